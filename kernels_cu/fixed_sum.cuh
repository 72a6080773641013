// Sums whose bits do not depend on the order of their terms: integers scaled by a power of two.
//
//     sum x_i  =  2^-e sum round(x_i 2^e)
//
// Integer addition is associative, so any number of threads may add with atomics, in any order, on any stream and in any
// number of passes: the bits are the same. One exponent e serves all terms of a sum. It is chosen before the first term,
// from a bound of |x_i| and the number of terms, so that the sum stays within 2^62; both must be found in an order-free
// way themselves (integer counts; maxima of non-negative floats, which order like the integers that hold their bits).
// A term 2^-24 times the bound then still has 62 - log2(terms) - 24 bits: a sum of float32 has 24 for the largest.
//
// FIXED_BROKEN stands for sums that hold NaN or infinity (or bounds beyond 2^120): nothing is added (the factor is 0) and
// fixed_value is NaN.
#pragma once
#include "common.cuh"

static const int FIXED_BITS = 62;
static const int FIXED_BROKEN = 0x7fffffff;  // the largest int: atomicMax(&exponent, FIXED_BROKEN) marks a sum at any time

// The bits of |x|, which compare like the numbers; NaN is the largest.
DEVICE u32 ordered_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Order-free maximum of non-negative floats kept as their bits; reads first, since most calls change nothing.
DEVICE void raise_bound(u32* bound, u32 bits) {
    if (*(volatile u32*)bound < bits) atomicMax(bound, bits);
}

// The exponent for `count` terms of at most `bound` each.
DEVICE int fixed_exponent(float bound, u32 count) {
    if (!(bound < 1.329228e36f)) return FIXED_BROKEN;             // 2^120; also NaN
    const int b = (int)(ordered_bits(bound) >> 23) - 126;         // bound < 2^b
    const int c = count <= 1 ? 0 : 32 - __clz((int)(count - 1));  // count <= 2^c
    return min(FIXED_BITS - b - c, 126);                          // 2^e is an ordinary float32, and so is 2^-e
}

DEVICE float fixed_factor(int exponent) {
    return exponent == FIXED_BROKEN ? 0.0f : __int_as_float((exponent + 127) << 23);
}

// round(x 2^e); x * factor is exact.
DEVICE i64 to_fixed(float x, float factor) { return __float2ll_rn(x * factor); }

DEVICE void add_fixed(i64* to, i64 value) { atomicAdd(reinterpret_cast<u64*>(to), (u64)value); }

// 2^-e v as float32, rounded to odd: rounding it on to bfloat16 or float16 gives what one rounding would give.
DEVICE float fixed_value(i64 v, int exponent) {
    if (exponent == FIXED_BROKEN) return __int_as_float(0x7fffffff);
    const float cut = __ll2float_rz(v);
    const float odd = __float2ll_rz(cut) == v ? cut : __uint_as_float(__float_as_uint(cut) | 1);
    return odd * __int_as_float((127 - exponent) << 23);
}
// The same, rounded to nearest, for float32 results.
DEVICE float fixed_value_nearest(i64 v, int exponent) {
    if (exponent == FIXED_BROKEN) return __int_as_float(0x7fffffff);
    return __ll2float_rn(v) * __int_as_float((127 - exponent) << 23);
}
