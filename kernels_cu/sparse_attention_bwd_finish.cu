// The ends of sparse attention's gradient: zeros for the sums over queries, their rounding, the gradient of the sinks.
// archs: 80 86 89 90 100 120
// hot: sparse_attention_bwd_finish sparse_attention_bwd_sinks
//
//     grad_kv[b,k]  = sums[b,k], rounded once       FIXED 1: sums are integers (fixed_sum.cuh), FIXED 0: float32
//                                                   QUADS 1: of each 16 columns, 2 c, 2 c + 1, 8 + 2 c, 9 + 2 c lie at 4 c
//     grad_sinks[h] = -sum_bs exp2(log2(e) sink_h - log2_total) delta
//
// Grid: zero and finish any number of blocks, threads step through 16-byte chunks of the result; sinks: blocks of 32
// heads by 8 lanes over CHUNK_QUERIES queries (x) and heads (y), which leave partial sums [chunks, heads]; sinks_sum adds
// those with the same shape of block. No dynamic shared memory.
// Determinism: one writer an element; partial sums and their sum in a fixed order, for any backend_impl.
// Measured on an H200, launch included (S4096 H64 D512, 5120 keys, float32 sums): zero 5.8 us, finish 8, sinks 4.9 (10.9 with
// a branch around each load), sinks_sum 3.7.
#include "fixed_sum.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef FIXED
#define FIXED 1
#endif
#ifndef QUADS
#define QUADS 0
#endif

typedef ELEMENT Element;

static const int CHUNK_QUERIES = 64, SINK_HEADS = 32, SINK_LANES = 8;
static const float LOG2E = 1.4426950408889634f;
#define INFINITY_F __int_as_float(0x7f800000)

extern "C" __global__ void sparse_attention_bwd_zero(uint4* __restrict__ to, i64 chunks) {
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x; n < chunks; n += step) to[n] = make_uint4(0, 0, 0, 0);
}

// sums [batch, rows, dim] of keys first_key .. first_key + rows - 1; grad_kv [batch, keys, dim], exponents [batch, keys]
// (FIXED alone) from the same batch row on.
extern "C" __global__ void __launch_bounds__(256)
    sparse_attention_bwd_finish(const void* __restrict__ sums, const int* __restrict__ exponents, u16* __restrict__ grad_kv,
                                int batch, int keys, int dim, int first_key, int rows) {
    const i64 step = (i64)gridDim.x * blockDim.x, row_chunks = dim / 8, chunks = (i64)batch * rows * row_chunks;
    for (i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x; n < chunks; n += step) {
        const i64 row = n / row_chunks, to_row = row / rows * keys + first_key + row % rows;
        float x[8];
#if FIXED
        const longlong2* from = reinterpret_cast<const longlong2*>(sums) + n * 4;
        const int exponent = exponents[to_row];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const longlong2 v = from[e];
            x[e * 2] = fixed_value(v.x, exponent);
            x[e * 2 + 1] = fixed_value(v.y, exponent);
        }
#elif QUADS
        const float2* from = reinterpret_cast<const float2*>(sums) + (n & ~1LL) * 4 + (n & 1);  // row_chunks is even
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 v = from[e * 2];
            x[e * 2] = v.x, x[e * 2 + 1] = v.y;
        }
#else
        const float4* from = reinterpret_cast<const float4*>(sums) + n * 2;
        const float4 v = from[0], w = from[1];
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w, x[4] = w.x, x[5] = w.y, x[6] = w.z, x[7] = w.w;
#endif
        *reinterpret_cast<uint4*>(grad_kv + to_row * dim + n % row_chunks * 8) = Element::pack(x);
    }
}

// The sum over the block's lanes of each head, in the order of the lanes; complete in lane 0.
DEVICE float sum_of_lanes(float x) {
    __shared__ float parts[SINK_LANES][SINK_HEADS];
    parts[threadIdx.y][threadIdx.x] = x;
    __syncthreads();  // every lane's sum is there
    float sum = 0.0f;
    if (threadIdx.y == 0) {
#pragma unroll
        for (int n = 0; n < SINK_LANES; ++n) sum += parts[n][threadIdx.x];
    }
    return sum;
}

// partial [ceil(rows / CHUNK_QUERIES), heads]; rows: B * S.
extern "C" __global__ void __launch_bounds__(SINK_HEADS * SINK_LANES)
    sparse_attention_bwd_sinks(const float* __restrict__ log2_total, const float* __restrict__ delta,
                               const float* __restrict__ sinks, float* __restrict__ partial, i64 rows, int heads) {
    const int head = blockIdx.y * SINK_HEADS + threadIdx.x;
    float sum = 0.0f;
    if (head < heads) {
        const float sink = __fmul_rn(sinks[head], LOG2E);  // no fma with what follows: sink <= total as they are rounded
        const i64 first = (i64)blockIdx.x * CHUNK_QUERIES + threadIdx.y;
        float total[CHUNK_QUERIES / SINK_LANES], of[CHUNK_QUERIES / SINK_LANES];  // all on their way at once
#pragma unroll
        for (int n = 0; n < CHUNK_QUERIES / SINK_LANES; ++n) {
            const i64 row = first + n * SINK_LANES, at = row * heads + head;
            total[n] = row < rows ? log2_total[at] : INFINITY_F;
            of[n] = row < rows ? delta[at] : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < CHUNK_QUERIES / SINK_LANES; ++n)
            if (total[n] != INFINITY_F) sum -= exp2f(sink - total[n]) * of[n];  // the sink may be -inf, delta NaN
    }
    sum = sum_of_lanes(sum);
    if (threadIdx.y == 0 && head < heads) partial[(i64)blockIdx.x * heads + head] = sum;
}

extern "C" __global__ void __launch_bounds__(SINK_HEADS * SINK_LANES)
    sparse_attention_bwd_sinks_sum(const float* __restrict__ partial, float* __restrict__ grad_sinks, i64 chunks,
                                   int heads) {
    const int head = blockIdx.x * SINK_HEADS + threadIdx.x;
    float sum = 0.0f;
    if (head < heads) {
#pragma unroll 4
        for (i64 n = threadIdx.y; n < chunks; n += SINK_LANES) sum += partial[n * heads + head];
    }
    sum = sum_of_lanes(sum);
    if (threadIdx.y == 0 && head < heads) grad_sinks[head] = sum;
}
