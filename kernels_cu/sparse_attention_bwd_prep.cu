// What sparse attention's gradient needs of each query before its products, and, for sums of fixed order, of each key.
// archs: 80 86 89 90 100 120
// hot: sparse_attention_bwd_prep
//
//     log2_total[b,s,h] = log2(exp(lse) + exp(sink_h))      +inf where the head gets no gradient: no key, or a sink of +inf
//                                                           or so large that its log2 is infinite
//     delta[b,s,h]      = grad_out . out
//
// so that p = exp2(log2(e) scale q.k - log2_total) and ds = p (grad_out . k - delta). Hopper's kernel with float32 sums finds
// both itself.
//
// BOUNDS 1 (sums of fixed order, see fixed_sum.cuh): one query adds to a key k that it selects, per slot and column,
//
//     |sum_h scale ds_h q_h + p_h grad_out_h| <= key_part |k| + rest,
//     key_part = sum_h |scale| |grad_out_h| max|q_h|,   rest = sum_h |scale delta_h| max|q_h| + max|grad_out_h|,  p <= 1
//
//   sparse_attention_bwd_prep: both per query [B, S];
//   sparse_attention_bwd_select: per key the number of slots that select it and the largest key_part and rest of them;
//   sparse_attention_bwd_exponents: per key the exponent of its sums, from twice the bound (p may round to above 1).
//
// A NaN or infinity in a query, its gradient or a key that it selects makes key_part or rest infinite or NaN; all keys that
// the query selects are then FIXED_BROKEN and get NaN, as they do in the reference except where that finds a gradient
// that is infinite, or finite because an infinite score belongs to another key.
//
// Grid: prep B * S blocks of up to 8 warps, warps step through the query's heads, D / 8 lanes (at most 32) a head; select
// B * ceil(S / SELECT_QUERIES) blocks, a warp a query; exponents one warp a key. No dynamic shared memory.
// Determinism: sums over heads in a fixed order; counts and maxima are free of order.
// Bound by memory: prep reads grad_out and out once (with BOUNDS also q): S4096 H64 D512 537 MB, 0.13 ms at 4.2 TB/s.
// Measured on an H200, launch included: 0.136 ms, with BOUNDS 0.206.
#include "fixed_sum.cuh"
#include "sparse_attention_bwd_delta.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 512
#endif
#ifndef BOUNDS
#define BOUNDS 1
#endif

typedef ELEMENT Element;

static const int CHUNKS = HEAD_DIM / 8;                  // 16-byte chunks of a row
static const int ROW_LANES = CHUNKS < 32 ? CHUNKS : 32;  // lanes of a row
static const int AT_ONCE = 32 / ROW_LANES;               // rows of a warp at a time
static const int PARTS = CHUNKS / ROW_LANES;             // chunks of a lane
static const int MOST_WARPS = 8;
static const int SELECT_QUERIES = 32, SELECT_THREADS = 512, TABLE = 2048;

// Two 16-bit elements without their signs: as integers they order like the numbers, NaN above infinity.
DEVICE u32 larger_pair(u32 a, u32 b) { return __vmaxu2(a, b & 0x7fff7fffu); }
DEVICE u32 larger_of_chunk(u32 most, uint4 chunk) {
    return larger_pair(larger_pair(most, chunk.x), larger_pair(larger_pair(chunk.y & 0x7fff7fffu, chunk.z), chunk.w));
}
DEVICE float largest_of_pair(u32 pair) {
    u16 bits = (u16)max(pair & 0xffffu, pair >> 16);
    return Element::load(&bits);
}

// A bound of the Euclidean norm, where the sum of squares may have left the range of float32.
DEVICE float safe_norm(float squares, float largest) {
    const bool usable = squares > 1e-24f && squares < 1e38f;
    return usable ? sqrtf(squares) * 1.0001f : largest * sqrtf((float)HEAD_DIM) * 1.0001f;  // NaN stays NaN in `largest`
}

DEVICE float row_sum(float x) {
#pragma unroll
    for (int n = ROW_LANES / 2; n > 0; n >>= 1) x += __shfl_xor_sync(FULL_WARP, x, n);
    return x;
}
DEVICE u32 row_largest(u32 pair) {
#pragma unroll
    for (int n = ROW_LANES / 2; n > 0; n >>= 1) pair = __vmaxu2(pair, __shfl_xor_sync(FULL_WARP, pair, n));
    return pair;
}

// grad_out, out, q: rows that 16-byte loads reach, strides in elements. lse, log2_total, delta [B, S, heads], key_part and
// rest [B, S] contiguous; q, key_part and rest are used with BOUNDS alone.
extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 4)
    sparse_attention_bwd_prep(const u16* __restrict__ grad_out, const u16* __restrict__ out, const u16* __restrict__ q,
                              const float* __restrict__ lse, const float* __restrict__ sinks,
                              float* __restrict__ log2_total, float* __restrict__ delta, float* __restrict__ key_part,
                              float* __restrict__ rest, i64 grad_out_stride_b, i64 grad_out_stride_s, i64 grad_out_stride_h,
                              i64 out_stride_b, i64 out_stride_s, i64 out_stride_h, i64 q_stride_b, i64 q_stride_s,
                              i64 q_stride_h, int queries, int heads, float scale) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const u32 query = blockIdx.x, b = query / queries, s = query % queries;
    const int column = lane % ROW_LANES * 8;
    const u16* g_row = grad_out + b * grad_out_stride_b + s * grad_out_stride_s + column;
    const u16* o_row = out + b * out_stride_b + s * out_stride_s + column;
    const u16* q_row = q + b * q_stride_b + s * q_stride_s + column;
    float key_sum = 0.0f, rest_sum = 0.0f;

#pragma unroll 2
    for (int first = warp * AT_ONCE; first < heads; first += warps * AT_ONCE) {
        const int head = first + lane / ROW_LANES, safe = min(head, heads - 1);  // lanes past the end repeat the last row
        uint4 g[PARTS], o[PARTS], x[PARTS];
#pragma unroll
        for (int n = 0; n < PARTS; ++n) {
            g[n] = __ldg(reinterpret_cast<const uint4*>(g_row + safe * grad_out_stride_h + n * ROW_LANES * 8));
            o[n] = __ldg(reinterpret_cast<const uint4*>(o_row + safe * out_stride_h + n * ROW_LANES * 8));
            if (BOUNDS) x[n] = __ldg(reinterpret_cast<const uint4*>(q_row + safe * q_stride_h + n * ROW_LANES * 8));
        }
        float dot = 0.0f, squares = 0.0f;
        u32 g_most = 0, q_most = 0;
#pragma unroll
        for (int n = 0; n < PARTS; ++n) {
            float a[8], c[8];
            Element::unpack(g[n], a);
            Element::unpack(o[n], c);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                dot += a[e] * c[e];
                if (BOUNDS) squares += a[e] * a[e];
            }
            if (BOUNDS) {
                g_most = larger_of_chunk(g_most, g[n]);
                q_most = larger_of_chunk(q_most, x[n]);
            }
        }
        dot = row_sum(dot);
        const i64 at = (i64)query * heads + safe;
        const float keys_only = lse[at], sink = sinks[safe];
        const float total = log2_of_total(keys_only, sink);
        if (head < heads && lane % ROW_LANES == 0) {
            log2_total[at] = total;
            delta[at] = dot;
        }
        if (BOUNDS) {
            squares = row_sum(squares);
            const float g_largest = largest_of_pair(row_largest(g_most)), q_largest = largest_of_pair(row_largest(q_most));
            const bool fine = total == total && keys_only < INFINITY_F;  // also a total of +inf: all p are 0 then
            if (head < heads) {
                key_sum += fine ? fabsf(scale) * safe_norm(squares, g_largest) * q_largest : INFINITY_F;
                rest_sum += fabsf(scale * dot) * q_largest + g_largest;
            }
        }
    }

    if (BOUNDS) {
        __shared__ float parts[2][MOST_WARPS * AT_ONCE];
        if (lane % ROW_LANES == 0) {
            parts[0][warp * AT_ONCE + lane / ROW_LANES] = key_sum;
            parts[1][warp * AT_ONCE + lane / ROW_LANES] = rest_sum;
        }
        __syncthreads();  // every row group's sums are there
        if (threadIdx.x < 2) {
            float sum = 0.0f;
            for (int n = 0; n < warps * AT_ONCE; ++n) sum += parts[threadIdx.x][n];
            (threadIdx.x == 0 ? key_part : rest)[query] = sum;
        }
    }
}

// bounds [B, keys], zeros before: x slots that select the key, y and z the bits of the largest key_part and rest.
//
// Neighbouring queries select much the same keys, and atomics of all blocks on few addresses are slow (309 us for S4096 with
// 510 valid slots, one atomic a slot). So a block gathers what SELECT_QUERIES queries say in a table in shared memory, at
// key % TABLE; a key whose place is taken goes straight to `bounds`.
extern "C" __global__ void __launch_bounds__(SELECT_THREADS)
    sparse_attention_bwd_select(const int* __restrict__ ids, const float* __restrict__ key_part,
                                const float* __restrict__ rest, uint4* bounds, int queries, int keys, int slots) {
    __shared__ int place[TABLE];
    __shared__ u32 count[TABLE], most_key_part[TABLE], most_rest[TABLE];
    const int blocks = (queries + SELECT_QUERIES - 1) / SELECT_QUERIES;  // of a batch row
    const i64 b = blockIdx.x / blocks;
    const int first = blockIdx.x % blocks * SELECT_QUERIES, last = min(first + SELECT_QUERIES, queries);
    bounds += b * keys;
    for (int n = threadIdx.x; n < TABLE; n += SELECT_THREADS) {
        place[n] = -1;
        count[n] = most_key_part[n] = most_rest[n] = 0;
    }
    __syncthreads();  // the table is empty
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int s = first + warp; s < last; s += SELECT_THREADS / 32) {
        const i64 query = b * queries + s;
        const u32 key_bits = ordered_bits(key_part[query]), rest_bits = ordered_bits(rest[query]);
#pragma unroll 4
        for (int slot = lane; slot < slots; slot += 32) {
            const int id = __ldg(ids + query * slots + slot);
            if ((u32)id >= (u32)keys) continue;
            const int at = id % TABLE;
            int holder = *(volatile int*)(place + at);
            if (holder < 0) holder = atomicCAS(place + at, -1, id);
            if (holder < 0 || holder == id) {
                atomicAdd(count + at, 1u);
                raise_bound(most_key_part + at, key_bits);
                raise_bound(most_rest + at, rest_bits);
            } else {
                atomicAdd(&bounds[id].x, 1u);
                raise_bound(&bounds[id].y, key_bits);
                raise_bound(&bounds[id].z, rest_bits);
            }
        }
    }
    __syncthreads();  // the table is complete
    for (int n = threadIdx.x; n < TABLE; n += SELECT_THREADS) {
        const int id = place[n];
        if (id < 0) continue;
        atomicAdd(&bounds[id].x, count[n]);
        raise_bound(&bounds[id].y, most_key_part[n]);
        raise_bound(&bounds[id].z, most_rest[n]);
    }
}

// exponents [batch, keys]; rows of keys that no slot selects are not read.
extern "C" __global__ void sparse_attention_bwd_exponents(const u16* __restrict__ kv, const uint4* __restrict__ bounds,
                                                          int* __restrict__ exponents, i64 kv_stride_b, i64 kv_stride_k,
                                                          int batch, int keys) {
    const int lane = threadIdx.x & 31;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 row = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); row < (i64)batch * keys; row += warps) {
        const uint4 of = bounds[row];
        int exponent = 0;
        if (of.x > 0) {
            const u16* from = kv + row / keys * kv_stride_b + row % keys * kv_stride_k + lane % ROW_LANES * 8;
            float squares = 0.0f;
            u32 most = 0;
#pragma unroll
            for (int n = 0; n < PARTS; ++n) {
                const uint4 chunk = __ldg(reinterpret_cast<const uint4*>(from + n * ROW_LANES * 8));
                float a[8];
                Element::unpack(chunk, a);
#pragma unroll
                for (int e = 0; e < 8; ++e) squares += a[e] * a[e];
                most = larger_of_chunk(most, chunk);
            }
            const float norm = safe_norm(row_sum(squares), largest_of_pair(row_largest(most)));
            const float bound = __uint_as_float(of.y) * norm + __uint_as_float(of.z);
            exponent = fixed_exponent(2.0f * bound, of.x);
        }
        if (lane == 0) exponents[row] = exponent;
    }
}
