// Gradients of scores at given ids on Hopper: wgmma, INDEX_DIM 128, up to 64 heads, bfloat16 or float16.
// archs: 90a
// hot: indexer_grad_query_sm90
//
//     l[t,h]    = q[h] . k[id_t]                       over slots t with an id in [key_first, key_last); on = (l > 0)
//     grad_q[h] = scale w[h] sum_t on[t,h] g[t] k[id_t]
//     grad_w[h] = scale sum_t relu(l[t,h]) g[t]
//     grad_k[id_t] += scale g[t] sum_h on[t,h] w[h] q[h]        once per slot, summed over all heads here
//
// Grid: one block per query (x, last first) and batch row (y). Block: 256 threads in roles, two blocks a multiprocessor, which
//   fill each other's waits. 64 slots at a time:
//   products    a warpgroup. logits: m64 (slots) n64 (heads); A key rows in registers, B q, K-major.
//               grad_k: m64 (slots) n64 (columns), twice; A on w in registers (the logits' own fragments), B q, N-major; laid
//               down in shared memory. grad_q: m64 (heads) n128; A on g from shared memory, M-major, B key rows, N-major; in
//               registers for the whole query.
//   gather      two warps copy the key rows of the next 64 slots.
//   additions   two warps add whole rows of 512 bytes to memory (cp.reduce.async.bulk).
//   All 256 threads read ids and incoming gradients, LIST slots at a time.
// Shared memory (dynamic, 128-byte swizzled tiles of 64 columns): q [2][64][64], two stages of key rows [2][64][64] and of on g
//   [64][64], rows to add [64][PITCH], w, lists of up to LIST valid slots, mbarriers.
// Determinism, operands, powers of two, NaN: as in indexer_grad_query.cu.
//
// Floors on one H200 at S32768 k1024 I64 E128 (31.5 million valid slots): scatter of 16.1 GB at 3.75 TB/s 4.3 ms, products
// 2.1 ms. Tensor cores 770 clocks a block of 64 slots, of 2600 that 5.7 ms leave a multiprocessor.
//
// Log (one H200, CUDA 13.0):
//   1  additions alone, random ascending rows: pieces of 64 bytes (red.v4 as the fragments lie) 5.2 ms, of 32 bytes 7.1, of
//      128 bytes and more, bulk rows of 256 or 512 bytes too, 4.3. Integers (64 bits): pieces of 16 bytes 21 ms, of
//      32 bytes 14.4, of 128 bytes and bulk rows 8.6. Gathering key rows beside it costs 0.2. Hence rows through shared memory.
//   2  one warpgroup a block that also copied and added: predicted 4.6 ms, got 6.23 atomic and 10.8 deterministic; S4096 k512
//      0.436 and 0.681 (GEMM 8192^3 of the run 787 TFLOP/s). fence.proxy.async is a MEMBAR; additions of a warp are a loop of
//      uniform instructions; both stood between the products. Hence warps of their own for copies and additions.
//   3  roles: predicted 5.0 ms, got 5.54 atomic and 10.97 deterministic; S4096 k512 0.384 and 0.689 (792 TFLOP/s).
//   4  ids, incoming gradients and w asked for together instead of one after another, the next block's from L2: predicted
//      5.0, got 5.59 and 10.95; S4096 0.381 and 0.684 (787 TFLOP/s): the start of a query was not what costs.
//   By ncu (1.80 GHz), busy in percent of the peak: S32768 k1024 atomic 5.87 ms: L2 93, L1 64, DRAM 5, issue slots 35;
//   deterministic 11.24: 92, 63, 3, 25; S4096 k512 0.447: 82, 57, 6, 32, and 0.785: 86, 59, 4, 24. L2 is full: additions and
//   gathered key rows, 24 GB of them for the first case.
//   Times are those of the whole call: clearing the sums, bounds, this kernel, rounding. Not tried on a GPU yet: additions as
//   red.v4 of whole rows by the addition warps, which would free rows sooner.
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef FIXED
#define FIXED 0
#endif
#ifndef WANT_Q  // grad_q and grad_w
#define WANT_Q 1
#endif
#ifndef WANT_K  // grad_k
#define WANT_K 1
#endif
#include "fixed_sum.cuh"
#include "indexer_grad.cuh"
#include "indexer_grad_hopper.cuh"
typedef ELEMENT Element;
#if FIXED
typedef i64 Sum;
#else
typedef float Sum;
#endif

static const int DIM = 128, HEADS = 64, THREADS = 256, WARPS = 8, SLOTS = 64, LIST = 1024, STAGES = 2, HELPERS = 2;
static const int PRODUCT_REGISTERS = 184, HELPER_REGISTERS = 72;
static const int AHEAD = 264;  // blocks that run at a time on a whole GPU
static const int ROWS_EACH = SLOTS / HELPERS;  // of a gathering or adding warp
static const u32 PITCH = 544;  // 512 bytes of a row and what keeps neighbouring rows in different banks
static const u32 TILE = 64 * 128, STAGE = 2 * TILE;
static const u32 AT_K = 2 * TILE, AT_G = AT_K + STAGES * STAGE, AT_ROWS = AT_G + 2 * TILE, AT_W = AT_ROWS + SLOTS * PITCH;
static const u32 AT_ID = AT_W + HEADS * 4, AT_VALUE = AT_ID + LIST * 4, AT_BARS = AT_VALUE + LIST * 4;
static const u32 AT_PART = AT_ROWS;  // between lists and after the last, when no rows wait there
static const int BAR_KEY_FULL = 0, BAR_KEY_FREE = BAR_KEY_FULL + STAGES, BAR_ROWS_FULL = BAR_KEY_FREE + STAGES;
static const int BAR_ROWS_FREE = BAR_ROWS_FULL + HELPERS, BARS = BAR_ROWS_FREE + HELPERS;
static const u32 SHARED = AT_BARS + BARS * 8;
#ifdef SHARED_BYTES  // what the launch asks for
static_assert(SHARED == SHARED_BYTES, "shared memory");
#endif

DEVICE void prefetch_line(const char* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
DEVICE void prefetch(const char* from, int bytes, int thread) {
    for (int line = thread; line * 128 < bytes; line += 128) prefetch_line(from + line * 128);
}

// ---- Gather and addition warps -------------------------------------------------------------------------

// Copies half of each block's 64 listed key rows; rows from `count` on are zeros. `step` counts blocks over all lists.
DEVICE void gather(const u16* k, i64 stride, u32 shared, int count, int& step, int part, int lane) {
    const int chunk = lane & 15;
    const u16* from = k + chunk * 8;
    for (int block = 0; block < count; block += SLOTS, ++step) {
        const int stage = step % STAGES, mine = block + part * ROWS_EACH + lane;
        const int id = mine < count ? (int)load_u32(shared + AT_ID + mine * 4) : -1;
        bar_wait(shared + AT_BARS + (BAR_KEY_FREE + stage) * 8, step / STAGES & 1 ^ 1);
        const u32 to = shared + AT_K + stage * STAGE + (chunk >> 3) * TILE + (part * ROWS_EACH + (lane >> 4)) * 128;
#pragma unroll 4
        for (int i = 0; i < ROWS_EACH / 2; ++i) {
            const int row = i * 2 + (lane >> 4), key = __shfl_sync(FULL_WARP, id, row);
            copy16_if(to + i * 256 + (((chunk & 7) ^ (row & 7)) << 4), from + (key < 0 ? 0 : key) * stride, key >= 0);
        }
        bar_arrive_after_copies(shared + AT_BARS + (BAR_KEY_FULL + stage) * 8);
    }
}

// Adds half of each block's rows to memory: 512 bytes a lane, all of a row or (FIXED) half of it at a time.
DEVICE void add_rows(Sum* sums, int key_first, u32 shared, int count, int& step, int part, int lane) {
    const u32 full = shared + AT_BARS + (BAR_ROWS_FULL + part) * 8, free = shared + AT_BARS + (BAR_ROWS_FREE + part) * 8;
    const u32 from = shared + AT_ROWS + (part * ROWS_EACH + lane) * PITCH;
    for (int block = 0; block < count; block += SLOTS) {
        const int mine = block + part * ROWS_EACH + lane;
        Sum* to = mine < count ? sums + (i64)((int)load_u32(shared + AT_ID + mine * 4) - key_first) * DIM : nullptr;
#pragma unroll 1
        for (int half = 0; half < (FIXED ? 2 : 1); ++half, ++step) {
            bar_wait(full, step & 1);
            if (to != nullptr) {
#if FIXED
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u64 [%0], [%1], 512;" ::"l"(to + half * 64), "r"(from) : "memory");
#else
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 512;" ::"l"(to), "r"(from) : "memory");
#endif
            }
            asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
            __syncwarp();  // all lanes' rows have been read
            if (arrives(lane)) bar_arrive(free);
        }
    }
}

// ---- Products ------------------------------------------------------------------------------------------

// Starts copying q; heads beyond I are zeros.
DEVICE void copy_q(const u16* q, i64 stride, u32 shared, int heads) {
    const int chunk = threadIdx.x % 16;
    const u32 to = shared + (chunk >> 3) * TILE;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int h = threadIdx.x / 16 + i * 8;
        copy16_if(to + h * 128 + (((chunk & 7) ^ (h & 7)) << 4), q + (h < heads ? h : 0) * stride + chunk * 8, h < heads);
    }
    copies_commit();
}

// 64 columns of c, times factor, into the warp's rows from `column` on.
DEVICE void lay_down(const float (&c)[32], u32 rows, int column, const float (&factor)[2], const float (&unit)[2], int lane) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const u32 to = rows + ((lane >> 2) + e * 8) * PITCH + (column + (lane & 3) * 2) * sizeof(Sum);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float x = c[n * 4 + e * 2] * factor[e], y = c[n * 4 + e * 2 + 1] * factor[e];
#if FIXED
            // to_fixed and a store in one piece: apart, all conversions come first and their results fill the registers.
            asm volatile("{\n.reg .s64 x, y;\ncvt.rni.s64.f32 x, %1;\ncvt.rni.s64.f32 y, %2;\nst.shared.v2.u64 [%0], {x, y};\n}\n" ::"r"(to + n * 64),
                         "f"(x * unit[e]), "f"(y * unit[e])
                         : "memory");
#else
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + n * 32), "f"(x), "f"(y) : "memory");
#endif
        }
    }
}

struct Totals {
    float q[64], w[16];  // grad_q / (scale w), grad_w / scale of this lane's 16 heads
    int any;
};

// The blocks of one list. bounds: of the row's entry 0. g_power: of the incoming gradients; factor: scale times the power of two of w.
DEVICE void products(Totals& acc, u32 shared, const u32* bounds, int count, Power g_power, float factor, u32 terms,
                     int& step, int& row_step, int warp, int lane) {
    const int row = warp * 16 + (lane >> 2);  // of this thread's fragments, and row + 8
    const u32 bars = shared + AT_BARS;
#pragma unroll 1
    for (int block = 0; block < count; block += SLOTS, ++step) {
        const int stage = step % STAGES;
        const u32 keys = shared + AT_K + stage * STAGE, on_g = shared + AT_G + (step & 1) * TILE;
        bar_wait(bars + (BAR_KEY_FULL + stage) * 8, step / STAGES & 1);

        // l = K Q^T
        float l[32];
        {
            u32 a[8][4];
            const u32 from = keys + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
            for (int i = 0; i < 8; ++i) load_matrices(a[i], (from ^ ((i & 3) << 5)) + (i >> 2) * TILE);
            const u64 at_q = operand(shared, 16, 1024);
            wgmma_begin();
#pragma unroll
            for (int i = 0; i < 8; ++i) wgmma_m64n64k16_rs(l, a[i], at_q + (((i >> 2) * TILE + (i & 3) * 32) >> 4), i > 0);
            wgmma_end();
            wgmma_wait();
        }

        // on w as the A operand of grad_k, on g to shared memory, relu(l) g into grad_w.
        const int at0 = block + row, at1 = at0 + 8;
        const bool exists0 = at0 < count, exists1 = at1 < count;
        const float g0 = exists0 ? load_float(shared + AT_VALUE + at0 * 4) : 0.f, g1 = exists1 ? load_float(shared + AT_VALUE + at1 * 4) : 0.f;
        if (!exists1) {  // q may be infinite: 0 inf is no logit
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                l[j * 4 + 2] = l[j * 4 + 3] = 0.f;
                if (!exists0) l[j * 4] = l[j * 4 + 1] = 0.f;
            }
        }
        u32 on_w[4][4];
        {
            const float y0 = g0 * g_power.down, y1 = g1 * g_power.down, z0 = y0 * 0.f, z1 = y1 * 0.f;
            const u32 to = on_g + row * 128 + ((lane >> 2) << 4) + (lane & 3) * 4;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 w = load_float2(shared + AT_W + (j * 8 + (lane & 3) * 2) * 4);
                const float zx = w.x * 0.f, zy = w.y * 0.f;
                const bool p00 = l[j * 4] > 0.f, p01 = l[j * 4 + 1] > 0.f, p10 = l[j * 4 + 2] > 0.f, p11 = l[j * 4 + 3] > 0.f;
                on_w[j >> 1][(j & 1) * 2] = Element::pack2(p00 ? w.x : zx, p01 ? w.y : zy);
                on_w[j >> 1][(j & 1) * 2 + 1] = Element::pack2(p10 ? w.x : zx, p11 ? w.y : zy);
                if (WANT_Q) {
                    store_u32(to ^ (j << 4), Element::pack2(p00 ? y0 : z0, p01 ? y0 : z0));
                    store_u32((to ^ (j << 4)) + 1024, Element::pack2(p10 ? y1 : z1, p11 ? y1 : z1));
                    acc.w[j * 2] += relu(l[j * 4]) * g0 + relu(l[j * 4 + 2]) * g1;
                    acc.w[j * 2 + 1] += relu(l[j * 4 + 1]) * g0 + relu(l[j * 4 + 3]) * g1;
                }
            }
        }
        fence_async();
        product_barrier();  // on g is complete; that of the block before is done with

        // c, d = (on w) Q, and behind them acc += (on g)^T K. Integers take the registers that d would: there c is used twice.
        wgmma_begin();
#if WANT_K
        float c[32];
        const u64 at_q = operand(shared, TILE, 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_m64n64k16_rs_t(c, on_w[i], at_q + (i * 2048 >> 4), i > 0);
        wgmma_end();
#if !FIXED
        float d[32];
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_m64n64k16_rs_t(d, on_w[i], at_q + ((TILE + i * 2048) >> 4), i > 0);
        wgmma_end();
#endif
#endif
#if WANT_Q
        const u64 at_g = operand(on_g, 16, 1024), at_k = operand(keys, TILE, 1024);
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_m64n128k16_ss<1, 1>(acc.q, at_g + (i * 2048 >> 4), at_k + (i * 2048 >> 4), acc.any | (i > 0));
        wgmma_end();
#endif
#if WANT_K
        const float factors[2] = {factor * g0, factor * g1};
        const u32 rows = shared + AT_ROWS + warp * 16 * PITCH, full = bars + (BAR_ROWS_FULL + warp / 2) * 8;
        const u32 free = bars + (BAR_ROWS_FREE + warp / 2) * 8;
        float unit[2] = {0.f, 0.f};
#if FIXED
        if (exists0) unit[0] = fixed_factor(fixed_exponent(__uint_as_float(__ldg(bounds + load_u32(shared + AT_ID + at0 * 4))), terms));
        if (exists1) unit[1] = fixed_factor(fixed_exponent(__uint_as_float(__ldg(bounds + load_u32(shared + AT_ID + at1 * 4))), terms));
#endif
        bar_wait(free, row_step & 1 ^ 1);
#if FIXED
        wgmma_wait_but<WANT_Q>();
        lay_down(c, rows, 0, factors, unit, lane);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) wgmma_m64n64k16_rs_t(c, on_w[i], at_q + ((TILE + i * 2048) >> 4), i > 0);
        wgmma_end();
        fence_async();
        __syncwarp();  // the warp's rows are complete
        if (arrives(lane)) bar_arrive(full);
        ++row_step;
        bar_wait(free, row_step & 1 ^ 1);
        wgmma_wait();
        lay_down(c, rows, 0, factors, unit, lane);
#else
        wgmma_wait_but<1 + WANT_Q>();
        lay_down(c, rows, 0, factors, unit, lane);
        wgmma_wait_but<WANT_Q>();
        lay_down(d, rows, 64, factors, unit, lane);
#endif
        fence_async();
        __syncwarp();  // the warp's rows are complete
        if (arrives(lane)) bar_arrive(full);
        ++row_step;
#endif
        wgmma_wait();
        __syncwarp();  // the warp has read the key rows
        if (arrives(lane)) bar_arrive(bars + (BAR_KEY_FREE + stage) * 8);
        acc.any = 1;
    }
}

// grad_q = scale w acc, grad_w = scale acc; a query without slots gets zeros whatever q, w and g hold.
DEVICE void store_totals(Totals& acc, u32 shared, u16* grad_q, void* grad_w, i64 query, int heads, int w_kind, float g_up, float factor,
                         float scale, int warp, int lane) {
    u16* out = grad_q + query * heads * DIM + (lane & 3) * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int h = warp * 16 + (lane >> 2) + e * 8;
        const float f = load_float(shared + AT_W + h * 4) * factor;
        if (h < heads) {
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const float x = acc.q[j * 4 + e * 2] * g_up * f, y = acc.q[j * 4 + e * 2 + 1] * g_up * f;
                *(u32*)(out + h * DIM + j * 8) = acc.any ? Element::pack2(x, y) : 0u;
            }
        }
    }
    // grad_w: lanes of equal lane % 4 have the same heads.
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) acc.w[i] += __shfl_xor_sync(FULL_WARP, acc.w[i], step);
        if (lane < 4) store_float(shared + AT_PART + (warp * HEADS + (i >> 1) * 8 + lane * 2 + (i & 1)) * 4, acc.w[i]);
    }
    product_barrier();  // the four warps' parts are there
    if (threadIdx.x < heads) {
        float x = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) x += load_float(shared + AT_PART + (i * HEADS + threadIdx.x) * 4);
        store_number(grad_w, query * heads + threadIdx.x, w_kind, acc.any ? x * scale : 0.f);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------

// Arguments as in indexer_grad_query.cu; which gradients are wanted is known at compile time here.
extern "C" __global__ void __launch_bounds__(THREADS, 2) indexer_grad_query_sm90(
    const void* grad_scores, const u16* q, const u16* k, const void* weights, const void* ids, u16* grad_q, void* grad_w, void* sums,
    const u32* bounds, i64 g_stride_b, i64 g_stride_s, i64 g_stride_t, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h,
    i64 k_stride_b, i64 k_stride_p, i64 query_start, i64 ratio, int batch_first, int heads, int slots, int g_kind, int w_kind,
    int ids_wide, int key_first, int key_last, u32 terms, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = shared_address(dynamic), bars = shared + AT_BARS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int b = batch_first + blockIdx.y, s = gridDim.x - 1 - blockIdx.x;
    if (ids == nullptr) {
        const i64 sees = (query_start + s + 1) / ratio;
        slots = sees < slots ? (int)sees : slots;
    }
    const i64 query = (i64)b * gridDim.x + s, first_row = (i64)blockIdx.y * (key_last - key_first);
    const auto slots_of = [=](int s) {
        const i64 ids_at = ((i64)(batch_first + blockIdx.y) * gridDim.x + s) * slots, g_at = (batch_first + blockIdx.y) * g_stride_b + s * g_stride_s;
        return Slots{ids, grad_scores, ids_at, g_at, g_stride_t, slots, g_kind, ids_wide, key_first, key_last};
    };
    int again = s;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) bar_init(bars + (BAR_KEY_FULL + i) * 8, HELPERS * 32);
        for (int i = 0; i < STAGES; ++i) bar_init(bars + (BAR_KEY_FREE + i) * 8, of_warps(4));
        for (int i = 0; i < HELPERS; ++i) bar_init(bars + (BAR_ROWS_FULL + i) * 8, of_warps(4 / HELPERS));
        for (int i = 0; i < HELPERS; ++i) bar_init(bars + (BAR_ROWS_FREE + i) * 8, of_warps(1));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    float g_top = 0.f;
    int step = 0, row_step = 0;
    if (warp < 4) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        copy_q(q + b * q_stride_b + s * q_stride_s, q_stride_h, shared, heads);
        Totals acc;
#pragma unroll
        for (int i = 0; i < 16; ++i) acc.w[i] = 0.f;
        acc.any = 0;
        Power g_power = {1.f, 1.f}, w_power = {1.f, 1.f};
        for (int first = 0; first < slots; first += LIST) {
            int id[LIST / THREADS];
            float g[LIST / THREADS];
            asm volatile("" : "+r"(again));  // addresses are found anew for each list: they must not live in registers meanwhile
            load_slots(slots_of(again), first + warp * (LIST / WARPS) + lane, id, g);
            if (first == 0) {  // behind the ids, which take longest
                const float w0 = lane < heads ? load_number(weights, query * heads + lane, w_kind) : 0.f;
                const float w1 = 32 + lane < heads ? load_number(weights, query * heads + 32 + lane, w_kind) : 0.f;
                float top = larger(w0, w1);
#pragma unroll
                for (int i = 16; i > 0; i /= 2) top = larger(top, __shfl_xor_sync(FULL_WARP, top, i));
                w_power = power_of(top);
                if (warp == 0) {
                    store_float(shared + AT_W + lane * 4, w0 * w_power.down);
                    store_float(shared + AT_W + (32 + lane) * 4, w1 * w_power.down);
                }
            }
            block_barrier<WARPS>();  // the previous list, and rows to add, are done with
            const int count = build_list<WARPS>(id, g, shared + AT_ID, shared + AT_VALUE, shared + AT_PART, g_top, warp, lane);
            const Power power = power_of(g_top);
            if (acc.any && power.up != g_power.up) {  // exact: a ratio of powers of two
                const float r = g_power.up * power.down;
#pragma unroll
                for (int i = 0; i < 64; ++i) acc.q[i] *= r;
            }
            g_power = power;
            copies_wait<0>();  // q
            fence_async();
            product_barrier();  // q and w are there for all
            products(acc, shared, bounds + (first_row - key_first), count, g_power, scale * w_power.up, terms, step, row_step, warp, lane);
        }
        block_barrier<WARPS>();  // rows to add are done with, w is there
        if (WANT_Q) store_totals(acc, shared, grad_q, grad_w, query, heads, w_kind, g_power.up, scale * w_power.up, scale, warp, lane);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
        if (s >= AHEAD) {  // what the block after the running ones will ask for first
            const int thread = threadIdx.x - 128;
            if (ids != nullptr) prefetch((const char*)ids + (query - AHEAD) * slots * (ids_wide ? 8 : 4), slots * (ids_wide ? 8 : 4), thread);
            if (g_stride_t == 1) {
                const int size = g_kind == KIND_FLOAT32 ? 4 : 2;
                prefetch((const char*)grad_scores + (b * g_stride_b + (s - AHEAD) * g_stride_s) * size, slots * size, thread);
            }
            for (int line = thread; line < heads * 2; line += 128)
                prefetch_line((const char*)(q + b * q_stride_b + (s - AHEAD) * q_stride_s + (line >> 1) * q_stride_h) + (line & 1) * 128);
        }
        for (int first = 0; first < slots; first += LIST) {
            int id[LIST / THREADS];
            float g[LIST / THREADS];
            asm volatile("" : "+r"(again));  // addresses are found anew for each list: they must not live in registers meanwhile
            load_slots(slots_of(again), first + warp * (LIST / WARPS) + lane, id, g);
            block_barrier<WARPS>();  // the previous list, and rows to add, are done with
            const int count = build_list<WARPS>(id, g, shared + AT_ID, shared + AT_VALUE, shared + AT_PART, g_top, warp, lane);
            if (warp < 4 + HELPERS) gather(k + b * k_stride_b, k_stride_p, shared, count, step, warp - 4, lane);
            else if (WANT_K) add_rows((Sum*)sums + first_row * DIM, key_first, shared, count, step, warp - 4 - HELPERS, lane);
        }
        block_barrier<WARPS>();  // rows to add are done with
    }
    copies_wait<0>();
}
