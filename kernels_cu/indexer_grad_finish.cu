// Before and after the indexer's gradient of key rows: bounds of what is added, and the one rounding of the sums.
// archs: 80 86 89 90 100 120
// hot: indexer_grad_bounds indexer_grad_finish
//
//     bounds[b,j]  = 2 max over slots (i, t) that select entry j of |scale g[i,t]| sum_h |w[i,h]| max_d |q[i,h,d]|
//     grad_k[b,j]  = sum over parts of sums[part,b,j], rounded once
//
// A slot adds at most half of that to each column of its entry's row (the other half is for rounding w to 16 bits), which is
// what fixed_sum.cuh wants to know before the first addition. Infinite or NaN inputs make the bound so, and the row NaN.
//
// Bounds: grid x queries, y batch rows; 128 threads: the sum over heads, then one slot a thread at a time. Finish: one
// thread per 8 columns. A few floats of static shared memory. Determinism: maxima are free of order, sums over heads
// and parts have a fixed one.
#include "indexer_grad.cuh"
#include "fixed_sum.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
typedef ELEMENT Element;

static const int THREADS = 128;

// bounds [rows of y][key_last - key_first], zeros before. Other arguments as in indexer_grad_query.cu.
extern "C" __global__ void __launch_bounds__(THREADS) indexer_grad_bounds(
    const void* grad_scores, const u16* q, const void* weights, const void* ids, u32* bounds, i64 g_stride_b, i64 g_stride_s,
    i64 g_stride_t, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h, int batch_first, int heads, int index_dim, int slots, int g_kind,
    int w_kind, int ids_wide, int key_first, int key_last, float scale) {
    __shared__ float parts[THREADS / 32];
    const int b = batch_first + blockIdx.y, s = blockIdx.x;
    const i64 query = (i64)b * gridDim.x + s;
    const int chunks = index_dim / 8, chunk = threadIdx.x % chunks, rows = THREADS / chunks;
    q += b * q_stride_b + s * q_stride_s;
    float sum = 0.f;
    for (int h0 = 0; h0 < heads; h0 += rows) {
        const int h = h0 + threadIdx.x / chunks;
        u32 top = 0;
        if (h < heads) {
            float x[8];
            Element::unpack(*reinterpret_cast<const uint4*>(q + h * q_stride_h + chunk * 8), x);
#pragma unroll
            for (int i = 0; i < 8; ++i) top = max(top, ordered_bits(x[i]));
        }
        for (int step = 1; step < chunks; step *= 2) top = max(top, __shfl_xor_sync(FULL_WARP, top, step));
        if (h < heads && chunk == 0) sum += fabsf(load_number(weights, query * heads + h, w_kind)) * __uint_as_float(top);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = sum;
    __syncthreads();  // all warps' parts are there
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; ++i) sum += parts[i];
    sum *= 2.f;
    bounds += (i64)blockIdx.y * (key_last - key_first);
    for (int t = threadIdx.x; t < slots; t += THREADS) {
        const i64 id = load_id(ids, query * slots + t, ids_wide);
        if (id < key_first || id >= key_last) continue;
        const float g = load_number(grad_scores, b * g_stride_b + s * g_stride_s + t * g_stride_t, g_kind);
        raise_bound(bounds + (id - key_first), ordered_bits(scale * g * sum));
    }
}

// sums: parts of [batch][rows][index_dim] floats, or one part of integers with their bounds [batch][rows]; grad_k [batch]
// [entries][index_dim], of which rows key_first .. key_first + rows - 1 are written.
extern "C" __global__ void __launch_bounds__(THREADS) indexer_grad_finish(const void* sums, const u32* bounds, u16* grad_k, i64 columns,
                                                                          i64 rows_columns, i64 entries_columns, i64 first_column,
                                                                          int parts, int index_dim, u32 terms) {
    const i64 at = ((i64)blockIdx.x * THREADS + threadIdx.x) * 8;  // of [batch][rows][index_dim], `columns` in all
    if (at >= columns) return;
    float x[8];
    if (bounds != nullptr) {
        const i64* from = (const i64*)sums + at;
        const int exponent = fixed_exponent(__uint_as_float(bounds[at / index_dim]), terms);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = fixed_value(from[i], exponent);
    } else {
        const float* from = (const float*)sums + at;
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = from[i];
        for (int part = 1; part < parts; ++part) {
            from += columns;
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] += from[i];
        }
    }
    const i64 b = at / rows_columns;
    *reinterpret_cast<uint4*>(grad_k + b * entries_columns + first_column + (at - b * rows_columns)) = Element::pack(x);
}
