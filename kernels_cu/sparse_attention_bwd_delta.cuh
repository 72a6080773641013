// What sparse attention's gradient knows of a head beside its products; see sparse_attention_bwd_prep.cu.
#pragma once
#include "common.cuh"

static const float LOG2E = 1.4426950408889634f;
#define INFINITY_F __int_as_float(0x7f800000)

// log2(exp(lse) + exp(sink))
DEVICE float log2_of_total(float lse, float sink) {
    if (lse == -INFINITY_F || sink == INFINITY_F) return INFINITY_F;
    const float top = fmaxf(lse, sink);
    // A product of its own, rounded as in sparse_attention_bwd_sinks: there sink - total must not leave its rounding error.
    return __fmul_rn(top, LOG2E) + log2f(exp2f((lse - top) * LOG2E) + exp2f((sink - top) * LOG2E));
}
