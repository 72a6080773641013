// Gradient of dense indexer scores with respect to the entries on Hopper: wgmma, INDEX_DIM 128, any I.
// archs: 90a
// hot: indexer_grad_entry_sm90
//
//     grad_k[j] = scale sum_i g[i,j] sum_h [q[i,h] . k[j] > 0] w[i,h] q[i,h]     over queries i that see entry j
//     i sees j  iff  j < (query_start + i + 1) / ratio
//
// Grid: x tiles of 64 entries, y segments of `segment` queries, z batch rows. Block: 256 threads in roles, two blocks a
//   multiprocessor. An item of a block is 64 heads of one query.
//   products    a warpgroup. logits: m64 (entries) n64 (heads), A key rows in registers for good. m64 n64 (columns), twice: A
//               on w in registers, B q, N-major; times g and scale in float32 into the tile's sums, in registers for good.
//   copies      two warps copy q of the next items, one reads w, one reads g.
// Shared memory (dynamic, 128-byte swizzled tiles of 64 columns): q [STAGES][2][64][64], w and g [STAGES][64], mbarriers.
// Determinism: no atomics: sums in the order of queries, then of segments (indexer_grad_finish). g of unseen pairs is not read.
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#include "indexer_grad.cuh"
#include "indexer_grad_hopper.cuh"
typedef ELEMENT Element;

static const int DIM = 128, THREADS = 256, STAGES = 3, PRODUCT_REGISTERS = 184, HELPER_REGISTERS = 72;
static const u32 TILE = 64 * 128, STAGE = 2 * TILE;
static const u32 AT_W = STAGES * STAGE, AT_G = AT_W + STAGES * 256, AT_META = AT_G + STAGES * 256, AT_BARS = AT_META + (STAGES + 1) / 2 * 16;
static const u32 SHARED = AT_BARS + 2 * STAGES * 8;
#ifdef SHARED_BYTES  // what the launch asks for
static_assert(SHARED == SHARED_BYTES, "shared memory");
#endif

struct Call {
    const u16* q;
    const void *weights, *grad_scores;
    i64 q_stride_s, q_stride_h, first_weight, g_at, g_stride_s, g_stride_p, query_start, ratio;  // of the batch row and tile
    int heads, blocks, first_entry, entries, w_kind, g_kind;
};

// Half of q of each item; heads beyond I are zeros.
DEVICE void copy_q(const Call& p, u32 shared, int first, int items, int part, int lane) {
    const int chunk = lane & 15;
    for (int item = 0; item < items; ++item) {
        const int stage = item % STAGES, h0 = item % p.blocks * 64 + part * 32 + (lane >> 4);
        const u16* from = p.q + (i64)(first + item / p.blocks) * p.q_stride_s + chunk * 8;
        const u32 to = shared + stage * STAGE + (chunk >> 3) * TILE + (part * 32 + (lane >> 4)) * 128;
        bar_wait(shared + AT_BARS + (STAGES + stage) * 8, item / STAGES & 1 ^ 1);
#pragma unroll 4
        for (int i = 0; i < 16; ++i) {
            const int row = i * 2 + (lane >> 4), h = h0 + i * 2;
            copy16_if(to + i * 256 + (((chunk & 7) ^ (row & 7)) << 4), from + (h < p.heads ? h : 0) * p.q_stride_h, h < p.heads);
        }
        bar_arrive_after_copies(shared + AT_BARS + stage * 8);
    }
}

// w of each item, near 1, and the power of two that was divided out.
DEVICE void read_w(const Call& p, u32 shared, int first, int items, int lane) {
    float next[2] = {0.f, 0.f};
    for (int item = -1; item < items; ++item) {
        const float w0 = next[0], w1 = next[1];
        if (item + 1 < items) {
            const i64 row = p.first_weight + (i64)(first + (item + 1) / p.blocks) * p.heads;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int h = (item + 1) % p.blocks * 64 + i * 32 + lane;
                next[i] = h < p.heads ? load_number(p.weights, row + h, p.w_kind) : 0.f;
            }
        }
        if (item < 0) continue;
        const int stage = item % STAGES;
        float top = larger(w0, w1);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) top = larger(top, __shfl_xor_sync(FULL_WARP, top, step));
        const Power power = power_of(top);
        bar_wait(shared + AT_BARS + (STAGES + stage) * 8, item / STAGES & 1 ^ 1);
        store_float(shared + AT_W + (stage * 64 + lane) * 4, w0 * power.down);
        store_float(shared + AT_W + (stage * 64 + 32 + lane) * 4, w1 * power.down);
        if (lane == 0) store_float(shared + AT_META + stage * 8, power.up);
        __syncwarp();  // all lanes have stored
        if (arrives(lane)) bar_arrive(shared + AT_BARS + stage * 8);
    }
}

// g of each item's query and the tile's entries, and how many of those it sees.
DEVICE void read_g(const Call& p, u32 shared, int first, int items, int lane) {
    float next[2] = {0.f, 0.f};
    int next_seen = 0;
    for (int item = -1; item < items; ++item) {
        const float g0 = next[0], g1 = next[1];
        const int seen = next_seen;
        if (item + 1 < items && (item + 1) % p.blocks == 0) {
            const int query = first + (item + 1) / p.blocks;
            const i64 sees = min((p.query_start + query + 1) / p.ratio, (i64)p.entries) - p.first_entry;
            next_seen = (int)min(max(sees, (i64)0), (i64)64);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = i * 32 + lane;
                next[i] = row < next_seen ? load_number(p.grad_scores, p.g_at + query * p.g_stride_s + row * p.g_stride_p, p.g_kind) : 0.f;
            }
        }
        if (item < 0) continue;
        const int stage = item % STAGES;
        bar_wait(shared + AT_BARS + (STAGES + stage) * 8, item / STAGES & 1 ^ 1);
        store_float(shared + AT_G + (stage * 64 + lane) * 4, g0);
        store_float(shared + AT_G + (stage * 64 + 32 + lane) * 4, g1);
        if (lane == 0) store_u32(shared + AT_META + stage * 8 + 4, (u32)seen);
        __syncwarp();  // all lanes have stored
        if (arrives(lane)) bar_arrive(shared + AT_BARS + stage * 8);
    }
}

// acc += f c where the pair is seen; unseen ones may hold NaN and add nothing instead of 0.
DEVICE void add(float (&acc)[32], const float (&c)[32], float f0, float f1, bool seen0, bool seen1) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        acc[n * 4] = seen0 ? fmaf(f0, c[n * 4], acc[n * 4]) : acc[n * 4];
        acc[n * 4 + 1] = seen0 ? fmaf(f0, c[n * 4 + 1], acc[n * 4 + 1]) : acc[n * 4 + 1];
        acc[n * 4 + 2] = seen1 ? fmaf(f1, c[n * 4 + 2], acc[n * 4 + 2]) : acc[n * 4 + 2];
        acc[n * 4 + 3] = seen1 ? fmaf(f1, c[n * 4 + 3], acc[n * 4 + 3]) : acc[n * 4 + 3];
    }
}

DEVICE void products(u32 shared, const u32 (&a)[8][4], float* out, int rows, int items, float scale, int warp, int lane) {
    const int row = warp * 16 + (lane >> 2);  // of this thread's fragments, and row + 8
    float left[32], right[32];                // columns 0 to 63 and 64 to 127
#pragma unroll
    for (int i = 0; i < 32; ++i) left[i] = right[i] = 0.f;
#pragma unroll 1
    for (int item = 0; item < items; ++item) {
        const int stage = item % STAGES;
        const u32 tile = shared + stage * STAGE;
        bar_wait(shared + AT_BARS + stage * 8, item / STAGES & 1);
        fence_async();
        float l[32];
        const u64 q = operand(tile, 16, 1024), q_t = operand(tile, TILE, 1024);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_m64n64k16_rs(l, a[i], q + (((i >> 2) * TILE + (i & 3) * 32) >> 4), i > 0);
        wgmma_end();
        const float up = load_float(shared + AT_META + stage * 8) * scale;
        const int seen = (int)load_u32(shared + AT_META + stage * 8 + 4);
        const float f0 = load_float(shared + AT_G + (stage * 64 + row) * 4) * up, f1 = load_float(shared + AT_G + (stage * 64 + row + 8) * 4) * up;
        wgmma_wait();
        u32 on_w[4][4];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 w = load_float2(shared + AT_W + (stage * 64 + j * 8 + (lane & 3) * 2) * 4);
            const float zx = w.x * 0.f, zy = w.y * 0.f;
            on_w[j >> 1][(j & 1) * 2] = Element::pack2(l[j * 4] > 0.f ? w.x : zx, l[j * 4 + 1] > 0.f ? w.y : zy);
            on_w[j >> 1][(j & 1) * 2 + 1] = Element::pack2(l[j * 4 + 2] > 0.f ? w.x : zx, l[j * 4 + 3] > 0.f ? w.y : zy);
        }
        float c[32], d[32];
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_m64n64k16_rs_t(c, on_w[i], q_t + (i * 2048 >> 4), i > 0);
        wgmma_end();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_m64n64k16_rs_t(d, on_w[i], q_t + ((TILE + i * 2048) >> 4), i > 0);
        wgmma_end();
        wgmma_wait_but<1>();
        add(left, c, f0, f1, row < seen, row + 8 < seen);
        wgmma_wait();
        __syncwarp();  // the warp has read all of the stage
        if (arrives(lane)) bar_arrive(shared + AT_BARS + (STAGES + stage) * 8);
        add(right, d, f0, f1, row < seen, row + 8 < seen);
    }
    out += (i64)row * DIM + (lane & 3) * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (row + e * 8 < rows) {
                *reinterpret_cast<float2*>(out + e * 8 * DIM + n * 8) = make_float2(left[n * 4 + e * 2], left[n * 4 + e * 2 + 1]);
                *reinterpret_cast<float2*>(out + e * 8 * DIM + 64 + n * 8) = make_float2(right[n * 4 + e * 2], right[n * 4 + e * 2 + 1]);
            }
}

// Arguments as in indexer_grad_entry.cu.
extern "C" __global__ void __launch_bounds__(THREADS, 2) indexer_grad_entry_sm90(
    const void* grad_scores, const u16* q, const u16* k, const void* weights, float* sums, i64 g_stride_b, i64 g_stride_s,
    i64 g_stride_p, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h, i64 k_stride_b, i64 k_stride_p, i64 query_start, i64 ratio,
    int batch_first, int queries, int heads, int entries, int segment, int g_kind, int w_kind, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = shared_address(dynamic), bars = shared + AT_BARS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, b = batch_first + blockIdx.z, first_entry = blockIdx.x * 64;
    const Call p = {q + b * q_stride_b, weights, grad_scores, q_stride_s, q_stride_h, (i64)b * queries * heads,
                    b * g_stride_b + first_entry * g_stride_p, g_stride_s, g_stride_p, query_start, ratio,
                    heads, (heads + 63) / 64, first_entry, entries, w_kind, g_kind};
    // Queries that see the first entry of the tile: (query_start + i + 1) / ratio > first_entry.
    const i64 reach = ((i64)first_entry + 1) * ratio - 1 - query_start, begin = (i64)blockIdx.y * segment;
    const i64 last = min(begin + segment, (i64)queries), first = max(begin, reach);
    const int items = first < last ? (int)(last - first) * p.blocks : 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(bars + i * 8, 64 + of_warps(2));
        for (int i = 0; i < STAGES; ++i) bar_init(bars + (STAGES + i) * 8, of_warps(4));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Key rows: through shared memory into A operands.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x / 16 + i * 16, chunk = threadIdx.x % 16, entry = first_entry + row;
        const bool exists = entry < entries;
        copy16_if(shared + (chunk >> 3) * TILE + row * 128 + (((chunk & 7) ^ (row & 7)) << 4),
                  k + b * k_stride_b + (exists ? entry : 0) * k_stride_p + chunk * 8, exists);
    }
    copies_commit();
    copies_wait<0>();
    __syncthreads();  // key rows and barriers are there
    if (warp < 4) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        u32 a[8][4];
        const u32 from = shared + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) load_matrices(a[i], (from ^ ((i & 3) << 5)) + (i >> 2) * TILE);
        block_barrier<THREADS / 32>();  // the stages may be filled
        float* out = sums + (((i64)blockIdx.y * gridDim.z + blockIdx.z) * entries + first_entry) * DIM;
        products(shared, a, out, entries - first_entry, items, scale, warp, lane);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
        block_barrier<THREADS / 32>();  // the stages may be filled
        if (warp < 6) copy_q(p, shared, (int)first, items, warp - 4, lane);
        else if (warp == 6) read_w(p, shared, (int)first, items, lane);
        else read_g(p, shared, (int)first, items, lane);
    }
    copies_wait<0>();
}
