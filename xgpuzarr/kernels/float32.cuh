// Arithmetic and conversions of float32 that keep subnormal numbers, as IEEE 754 and NumPy have it.
//
// CuPy compiles with -ftz=true whatever it is told, and under that the compiler gives every instruction on float32 the
// modifier .ftz: operands and results that are subnormal become zero. So the instructions are written out here without
// it. Plain C++ would be right for the tests on the host only.
//
// Source: PTX ISA, "Floating Point Instructions", whose add, mul, div and cvt support subnormal numbers without .ftz,
// and with .rn round to nearest even, each on its own.
#ifndef XGPUZARR_FLOAT32_CUH
#define XGPUZARR_FLOAT32_CUH

#include "common.cuh"

enum { ADD = 0, MULTIPLY = 1, DIVIDE = 2 };

XGZ_FN float computed(i32 operation, float a, float b) {
#ifdef __CUDA_ARCH__
    float result;
    if (operation == ADD) {
        asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    } else if (operation == MULTIPLY) {
        asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    } else {
        asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    }
    return result;
#else
    return operation == ADD ? a + b : operation == MULTIPLY ? a * b : a / b;
#endif
}

XGZ_FN double widened(float value) {
#ifdef __CUDA_ARCH__
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
#else
    return value;
#endif
}

XGZ_FN float narrowed(double value) {
#ifdef __CUDA_ARCH__
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
#else
    return static_cast<float>(value);
#endif
}

// The elements of a thread: first, first + stride, ...
XGZ_FN i64 first_element() { return blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; }
XGZ_FN i64 element_stride() { return static_cast<i64>(gridDim.x) * blockDim.x; }

#endif
