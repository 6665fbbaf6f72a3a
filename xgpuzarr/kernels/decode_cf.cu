// CF decoding in one pass: stored numbers to floats, fill values to NaN, times a factor, plus an offset.
//
// Each step rounds on its own, as it does in NumPy, where it is a pass of its own: no fused multiply-add. float32 keeps
// its subnormal numbers (float32.cuh).
//
// Formula: CF conventions, sections 2.5.1 "Missing data" and 8.1 "Packed data". Source of the bits of a half: IEEE 754,
// binary16.
#include "float32.cuh"

// The same numbers as `xgpuzarr.kernels.launch_cf.STORED`.
enum Stored {
    STORED_I8, STORED_U8, STORED_I16, STORED_U16, STORED_I32, STORED_U32, STORED_I64, STORED_U64,
    STORED_F16, STORED_F32, STORED_F64
};

// All values and what they are computed from are normal numbers of float32, or zero.
XGZ_FN float half_value(u16 bits) {
    const u32 exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const u32 sign = static_cast<u32>(bits & 0x8000) << 16;
    union {
        u32 bits;
        float value;
    } single;
    if (exponent == 0) {
        single.value = static_cast<float>(mantissa) * (1.0f / (1 << 24));
    } else {
        single.bits = (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
    }
    single.bits |= sign;
    return single.value;
}

XGZ_FN void set(float value, float* out) { *out = value; }
XGZ_FN void set(float value, double* out) { *out = widened(value); }
XGZ_FN void set(double value, float* out) { *out = narrowed(value); }
XGZ_FN void set(double value, double* out) { *out = value; }

template <class From, class To>
XGZ_FN To loaded(const void* values, i64 n, i64 i) {
    return static_cast<To>(Span<const From>{static_cast<const From*>(values), n}.load(i));
}

// Value i as the float it becomes, rounded to nearest even once.
template <class To>
XGZ_FN To load_stored(i32 stored, const void* values, i64 n, i64 i) {
    To value = 0;
    switch (stored) {
        case STORED_I8: return loaded<signed char, To>(values, n, i);
        case STORED_U8: return loaded<u8, To>(values, n, i);
        case STORED_I16: return loaded<short, To>(values, n, i);
        case STORED_U16: return loaded<u16, To>(values, n, i);
        case STORED_I32: return loaded<i32, To>(values, n, i);
        case STORED_U32: return loaded<u32, To>(values, n, i);
        case STORED_I64: return loaded<i64, To>(values, n, i);
        case STORED_U64: return loaded<u64, To>(values, n, i);
        case STORED_F16: set(half_value(Span<const u16>{static_cast<const u16*>(values), n}.load(i)), &value); break;
        case STORED_F32: set(Span<const float>{static_cast<const float*>(values), n}.load(i), &value); break;
        case STORED_F64: set(Span<const double>{static_cast<const double*>(values), n}.load(i), &value); break;
    }
    return value;
}

XGZ_FN float times(float a, float b) { return computed(MULTIPLY, a, b); }
XGZ_FN float plus(float a, float b) { return computed(ADD, a, b); }
#ifdef __CUDA_ARCH__
XGZ_FN double times(double a, double b) { return __dmul_rn(a, b); }
XGZ_FN double plus(double a, double b) { return __dadd_rn(a, b); }
#else
XGZ_FN double times(double a, double b) { return a * b; }
XGZ_FN double plus(double a, double b) { return a + b; }
#endif

// Fill values are compared as float64, which holds every float32: a number that none equals is no fill value.
template <class To>
XGZ_FN void decode_cf(const void* values, i32 stored, i64 n, Span<const double> fills, To replacement, bool has_factor,
                      To factor, bool has_offset, To offset, Span<To> out) {
    const i64 stride = element_stride();
    for (i64 i = first_element(); i < n; i += stride) {
        To value = load_stored<To>(stored, values, n, i);
        double wide = 0;
        set(value, &wide);
        bool is_fill = false;
        for (i64 f = 0; f < fills.size; ++f) is_fill |= wide == fills.load(f);
        if (is_fill) value = replacement;
        if (has_factor) value = times(value, factor);
        if (has_offset) value = plus(value, offset);
        out.store(i, value);
    }
}

extern "C" __global__ void decode_cf_float32(const void* values, i32 stored, i64 n, const double* fills, i64 n_fills,
                                             float replacement, i32 has_factor, float factor, i32 has_offset,
                                             float offset, float* out) {
    decode_cf<float>(values, stored, n, {fills, n_fills}, replacement, has_factor, factor, has_offset, offset,
                     {out, n});
}

extern "C" __global__ void decode_cf_float64(const void* values, i32 stored, i64 n, const double* fills, i64 n_fills,
                                             double replacement, i32 has_factor, double factor, i32 has_offset,
                                             double offset, double* out) {
    decode_cf<double>(values, stored, n, {fills, n_fills}, replacement, has_factor, factor, has_offset, offset,
                      {out, n});
}
