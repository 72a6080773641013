// Gradient of dense indexer scores with respect to the entries, one tile of entries at a time, on mma.sync: sm_80 and later.
// archs: 80 86 89 90 100 120
// hot: indexer_grad_entry
//
//     grad_k[j] = scale sum_i g[i,j] sum_h [q[i,h] . k[j] > 0] w[i,h] q[i,h]     over queries i that see entry j
//     i sees j  iff  j < (query_start + i + 1) / ratio
//
// Grid: x tiles of 64 entries, y segments of `segment` queries, z batch rows. Block: 4 warps of 16 entries each. An item of a
//   block is 64 heads of one query; items follow each other through two stages of shared memory.
// Registers: a warp's key rows as A operands and its 16 x INDEX_DIM sums, for all its queries.
// Shared memory (dynamic): q [2][64][E] (16-byte chunks swizzled by XOR with the row), w [2][64] and its power of two [2].
// Determinism: no atomics: sums in the order of queries, then of segments (indexer_grad_finish). g of unseen pairs is not read.
//
// Log: see indexer_grad_query.cu for the operands (on w exact in 16 bits where w is; g and scale in float32).
#include "indexer_grad.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef INDEX_DIM
#define INDEX_DIM 128
#endif
typedef ELEMENT Element;

static const int THREADS = 128, TILE = 64, CHUNKS = INDEX_DIM / 8, K_STEPS = INDEX_DIM / 16, TILES = INDEX_DIM / 8, PASS = 4;
static const u32 ROW = INDEX_DIM * 2, STAGE = 64 * ROW, AT_W = 2 * STAGE, AT_POWER = AT_W + 2 * 64 * 4, SHARED = AT_POWER + 8;
#ifdef SHARED_BYTES  // what the launch asks for
static_assert(SHARED == SHARED_BYTES, "shared memory");
#endif

struct Call {
    const u16* q;
    const void* weights;
    i64 q_stride_s, q_stride_h, first_weight;  // of the batch row
    int heads, w_kind;
};

// Starts copying q of an item; heads beyond I are zeros.
DEVICE void copy_q(const Call& p, u32 to, int query, int h0) {
    const int chunk = threadIdx.x % CHUNKS;
    const u16* from = p.q + query * p.q_stride_s + chunk * 8;
#pragma unroll
    for (int i = 0; i < 64 * CHUNKS / THREADS; ++i) {
        const int row = threadIdx.x / CHUNKS + i * (THREADS / CHUNKS);
        const bool exists = h0 + row < p.heads;
        copy16_if(to + row * ROW + ((chunk ^ (row & 7)) << 4), from + (exists ? h0 + row : 0) * p.q_stride_h, exists);
    }
    copies_commit();
}
DEVICE float read_w(const Call& p, int query, int h) {
    return h < p.heads ? load_number(p.weights, p.first_weight + (i64)query * p.heads + h, p.w_kind) : 0.f;
}
// One warp: w of an item, near 1, and the power of two that was divided out.
DEVICE void store_w(u32 shared, int stage, float w0, float w1, int lane) {
    float top = larger(w0, w1);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = larger(top, __shfl_xor_sync(FULL_WARP, top, step));
    const Power power = power_of(top);
    store_float(shared + AT_W + (stage * 64 + lane) * 4, w0 * power.down);
    store_float(shared + AT_W + (stage * 64 + 32 + lane) * 4, w1 * power.down);
    if (lane == 0) store_float(shared + AT_POWER + stage * 4, power.up);
}

// sums [segments][rows of z][entries][E] float32. Other arguments as in indexer_grad_query.cu.
extern "C" __global__ void __launch_bounds__(THREADS, 2) indexer_grad_entry(
    const void* grad_scores, const u16* q, const u16* k, const void* weights, float* sums, i64 g_stride_b, i64 g_stride_s,
    i64 g_stride_p, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h, i64 k_stride_b, i64 k_stride_p, i64 query_start, i64 ratio,
    int batch_first, int queries, int heads, int entries, int segment, int g_kind, int w_kind, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = shared_address(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, b = batch_first + blockIdx.z, blocks = (heads + 63) / 64;
    const int first_entry = blockIdx.x * TILE, row0 = first_entry + warp * 16 + (lane >> 2);
    const Call p = {q + b * q_stride_b, weights, q_stride_s, q_stride_h, (i64)b * queries * heads, heads, w_kind};

    // Key rows: through shared memory into A operands.
    {
        const int chunk = threadIdx.x % CHUNKS;
#pragma unroll
        for (int i = 0; i < TILE * CHUNKS / THREADS; ++i) {
            const int row = threadIdx.x / CHUNKS + i * (THREADS / CHUNKS), entry = first_entry + row;
            const bool exists = entry < entries;
            copy16_if(shared + row * ROW + ((chunk ^ (row & 7)) << 4), k + b * k_stride_b + (exists ? entry : 0) * k_stride_p + chunk * 8, exists);
        }
        copies_commit();
        copies_wait<0>();
        __syncthreads();  // key rows are there
    }
    u32 a[K_STEPS][4];
    {
        const u32 a_at = shared + (warp * 16 + (lane & 15)) * ROW + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
        for (int i = 0; i < K_STEPS; ++i) load_matrices(a[i], (a_at ^ ((i & 3) << 5)) + (i >> 2) * 128);
    }
    __syncthreads();  // the stages may be filled

    float acc[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[n][e] = 0.f;

    // Queries that see the first entry of the tile: (query_start + i + 1) / ratio > first_entry.
    const i64 reach = ((i64)first_entry + 1) * ratio - 1 - query_start, begin = (i64)blockIdx.y * segment;
    const i64 last = min(begin + segment, (i64)queries), first = max(begin, reach);
    const int items = first < last ? (int)(last - first) * blocks : 0;
    const i64 g_row = b * g_stride_b + (i64)row0 * g_stride_p;

    // Ahead of each item by one: q in flight, w and g in registers.
    float g0 = 0.f, g1 = 0.f;
    bool sees0 = false, sees1 = false;
    if (items > 0) {
        copy_q(p, shared, (int)first, 0);
        if (warp == 0) store_w(shared, 0, read_w(p, (int)first, lane), read_w(p, (int)first, 32 + lane), lane);
        const i64 sees = min((query_start + first + 1) / ratio, (i64)entries);
        sees0 = row0 < sees, sees1 = row0 + 8 < sees;
        g0 = sees0 ? load_number(grad_scores, g_row + first * g_stride_s, g_kind) : 0.f;
        g1 = sees1 ? load_number(grad_scores, g_row + first * g_stride_s + 8 * g_stride_p, g_kind) : 0.f;
    }
    for (int item = 0; item < items; ++item) {
        const int stage = item & 1;
        const u32 tile = shared + stage * STAGE;
        copies_wait<0>();
        __syncthreads();  // q and w of this item are there; those of the previous one are done with
        const bool more = item + 1 < items;
        const int next = (int)first + (item + 1) / blocks, next_h0 = (item + 1) % blocks * 64;
        float w0 = 0.f, w1 = 0.f, next_g0 = 0.f, next_g1 = 0.f;
        bool next0 = false, next1 = false;
        if (more) {
            copy_q(p, shared + (stage ^ 1) * STAGE, next, next_h0);
            if (warp == 0) w0 = read_w(p, next, next_h0 + lane), w1 = read_w(p, next, next_h0 + 32 + lane);
            const i64 sees = min((query_start + next + 1) / ratio, (i64)entries);
            next0 = row0 < sees, next1 = row0 + 8 < sees;
            if (next0) next_g0 = load_number(grad_scores, g_row + next * g_stride_s, g_kind);
            if (next1) next_g1 = load_number(grad_scores, g_row + next * g_stride_s + 8 * g_stride_p, g_kind);
        }

        // l = K Q^T: 16 entries by 64 heads; on w as the A operand of the next product.
        u32 on_w[4][4];
        {
            float l[8][4];
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) l[j][e] = 0.f;
            const u32 b_at = tile + ((lane & 7) + ((lane >> 4) << 3)) * ROW + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
#pragma unroll
            for (int i = 0; i < K_STEPS; ++i)
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    u32 c[4];
                    load_matrices(c, (b_at ^ ((i & 3) << 5)) + (i >> 2) * 128 + j * 8 * ROW);
                    multiply<Element>(l[j], a[i], c[0], c[1]);
                    multiply<Element>(l[j + 1], a[i], c[2], c[3]);
                }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 w = load_float2(shared + AT_W + (stage * 64 + j * 8 + (lane & 3) * 2) * 4);
                const float zx = w.x * 0.f, zy = w.y * 0.f;
                on_w[j >> 1][(j & 1) * 2] = Element::pack2(l[j][0] > 0.f ? w.x : zx, l[j][1] > 0.f ? w.y : zy);
                on_w[j >> 1][(j & 1) * 2 + 1] = Element::pack2(l[j][2] > 0.f ? w.x : zx, l[j][3] > 0.f ? w.y : zy);
            }
        }

        // acc += g (on w) Q
        const float up = load_float(shared + AT_POWER + stage * 4) * scale, f0 = g0 * up, f1 = g1 * up;
        const u32 b_at = tile + (lane & 15) * ROW + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
        for (int pass = 0; pass < TILES / PASS; ++pass) {
            float c[PASS][4];
#pragma unroll
            for (int n = 0; n < PASS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) c[n][e] = 0.f;
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int n = 0; n < PASS; n += 2) {
                    u32 d[4];
                    const int chunk = pass * PASS + n;
                    load_matrices_transposed(d, (b_at ^ ((chunk & 7) << 4)) + (chunk >> 3) * 128 + i * 16 * ROW);
                    multiply<Element>(c[n], on_w[i], d[0], d[1]);
                    multiply<Element>(c[n + 1], on_w[i], d[2], d[3]);
                }
#pragma unroll
            for (int n = 0; n < PASS; ++n) {  // unseen pairs may hold NaN: they add nothing instead of 0
                acc[pass * PASS + n][0] = sees0 ? fmaf(f0, c[n][0], acc[pass * PASS + n][0]) : acc[pass * PASS + n][0];
                acc[pass * PASS + n][1] = sees0 ? fmaf(f0, c[n][1], acc[pass * PASS + n][1]) : acc[pass * PASS + n][1];
                acc[pass * PASS + n][2] = sees1 ? fmaf(f1, c[n][2], acc[pass * PASS + n][2]) : acc[pass * PASS + n][2];
                acc[pass * PASS + n][3] = sees1 ? fmaf(f1, c[n][3], acc[pass * PASS + n][3]) : acc[pass * PASS + n][3];
            }
        }
        if (more && warp == 0) store_w(shared, stage ^ 1, w0, w1, lane);  // read by nobody before the barrier
        g0 = next_g0, g1 = next_g1, sees0 = next0, sees1 = next1;
    }

    float* out = sums + (((i64)blockIdx.y * gridDim.z + blockIdx.z) * entries + row0) * INDEX_DIM + (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        if (row0 < entries) *reinterpret_cast<float2*>(out + n * 8) = make_float2(acc[n][0], acc[n][1]);
        if (row0 + 8 < entries) *reinterpret_cast<float2*>(out + 8 * INDEX_DIM + n * 8) = make_float2(acc[n][2], acc[n][3]);
    }
}
