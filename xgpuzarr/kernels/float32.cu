// One operation, or one conversion, of every float32 of an array, subnormal numbers kept.
#include "float32.cuh"

// `out` may be `values`.
extern "C" __global__ void float32_arithmetic(const float* values, i64 n, i32 operation, float operand, float* out) {
    const Span<const float> from{values, n};
    const Span<float> to{out, n};
    const i64 stride = element_stride();
    for (i64 i = first_element(); i < n; i += stride) to.store(i, computed(operation, from.load(i), operand));
}

extern "C" __global__ void float32_to_float64(const float* values, i64 n, double* out) {
    const Span<const float> from{values, n};
    const Span<double> to{out, n};
    const i64 stride = element_stride();
    for (i64 i = first_element(); i < n; i += stride) to.store(i, widened(from.load(i)));
}

extern "C" __global__ void float64_to_float32(const double* values, i64 n, float* out) {
    const Span<const double> from{values, n};
    const Span<float> to{out, n};
    const i64 stride = element_stride();
    for (i64 i = first_element(); i < n; i += stride) to.store(i, narrowed(from.load(i)));
}
