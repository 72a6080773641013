// Sparse attention forward on Hopper: wgmma, D 512, bfloat16 or float16, any H (64 heads at a time).
// archs: 90a
// hot: sparse_attention_fwd_sm90
//
//     s[h,t]   = scale q[h] . kv[id_t]              over slots t with 0 <= id_t < keys, in slot order
//     out[h]   = sum_t exp(s_t) kv[id_t] / (sum_t exp(s_t) + exp(sink_h)),    lse[h] = log sum_t exp(s_t)
//
// Grid: persistent, one block a multiprocessor; block i takes the items i, i + grid, ...; an item is 64 heads of one query.
// Block: 512 threads in roles that run ahead of each other, coupled by mbarriers alone:
//   score warpgroup     S = Q K^T of a block of 48 keys, softmax, p to shared memory; half of Q lives in its registers
//   value warpgroups    two, 256 columns each: O += P V, the output
//   gather warps        three: the key rows of each block, 16 bytes a lane, three blocks in shared memory
//   index warp          reads the id row, drops masked slots and hands out blocks of 48 ids in slot order
// Shared memory (dynamic, 222 KB): Q [8 chunks][64][64], keys [3][8 chunks][48][64] (128-byte swizzled, so that the same
//   rows serve as K-major keys and N-major values), p in the order of the value warps' registers, factors, ids.
// Determinism: no atomics; every sum has a fixed order that the query's own valid ids decide. A query's bits do not
//   depend on B, S, its place or other queries.
//
// Masked slots cost a ballot in the index warp. Rows that a block lacks are zero-filled by the copy, which reads nothing:
// NaN in unselected rows never enters. The tensor cores take a block's scores before the previous block's values
// (BAR_SCORED): the values then run beside the softmax, which would leave the tensor cores idle.
//
// Floor on one H200 (S4096 H64 T640, 510 valid ids a query): products 0.345 ms at the best GEMM rate seen, 794 TFLOP/s.
//
// Log (one H200, CUDA 13.0; clocks per item of 11 blocks as the score warpgroup counts them, of which 16900 are tensor
// work at the full rate; what each change was expected to give, and gave):
//   1  three gather warps, id and row address looked up one by one: gathers alone 0.54 ms, all 0.65 ms.
//   2  ids of 16 rows read before the first copy is issued: expected gathers under 0.35, got 0.33; all 0.59.
//   3  seven gather warps (640 threads): hangs. setmaxnreg draws on what the launch allocated, 96 registers x 640 threads,
//      not on the whole file.
//   4  values wait for the next block's scores: H128 4.04 -> 3.62 ms, H64 unchanged.
//   5  scores of the next block issued before the softmax (double-buffered S): expected to hide the softmax, gave nothing:
//      issuing 32 wgmma stalls for as long as they run (1980 clocks a block either way).
//   6  softmax instructions placed between those wgmma: slower, 3400 clocks a block.
//   7  softmax in the value warpgroups, raw scores through shared memory: slower; key blocks are then held too long for
//      three of them to cover the gather.
//   8  Q by the tensor copy engine instead of cp.async by the score warpgroup: with 9, an item of
//      three to four blocks (T160) went from 13800 to 12500 clocks.
//   9  output packed before it is shuffled and stored, so that no store waits for another's registers: epilogue 5900 -> 3200
//      to 4200 clocks.
//  10  half of Q in registers: an A operand in shared memory halves the rate at N = 48. Scores 1345 -> 1236 clocks a block.
//  11  no score warpgroup, each value warpgroup scores its own half of the columns, partial sums exchanged: slower; the
//      value products' issue stalls behind the scores' (see 5).
//  12  scores rounded before the maximum is subtracted (a fused product made NaN of scores of 1e9): not timed apart.
//  What is left a block: scores 1240, softmax 980, hand-over 320, waiting for keys 180; 2720 in a row.
//  Medians of the kernel alone, random finished entries, after 11 (GEMM not measured in that run; 684 to 794 TFLOP/s in
//  others of the day): H64 T640 0.547 ms, H64 T160 0.243 ms, S8192 H128 T1152 3.33 ms (the portable kernel: 1.26, 0.54, 8.08).
//  Beside FlashMLA in one run, after 12, selections with fewer finished entries (382, 142, 640 a query), GEMM 702 TFLOP/s:
//  0.461 against 0.629 and, ids compacted for it, 0.468; 0.244 against 0.356 and 0.340; 2.89 against 4.01 and 2.95.
//  Other designs, rows of each right against the oracle, timed beside this one (H64 T640 0.545, H64 T160 0.242, S8192 H128 T1152
//  3.45 to 3.55 ms, GEMM 764 to 786 TFLOP/s, 15 and 16 at 1.67 to 1.76 GHz by their own clocks), all with the last query
//  first (see 17):
//  13  a cluster of two blocks with half the columns each: Q and O in registers, two queries a block to cover each other,
//      partial scores exchanged by st.async into the other block. Expected 0.39, got 0.787 (0.310, 4.67): the exchange of
//      16 KB takes 1900 clocks of 4600 a 64-key block; by plain remote stores 0.921; left out (wrong results) 0.582.
//  14  two warpgroups in step, half the columns each, sums of scores reduced and scattered through shared memory, p formed
//      with the maximum before and checked in the same barrier, output by bulk stores. Expected 0.40, got 0.562 to 0.600
//      (0.249 to 0.265, 3.65 to 3.81): scores 1270, softmax 530, barriers 240, values 1280 clocks a 64-key block one after
//      another; 4200 clocks an item for Q and the output, which nothing hides.
//  15  this division of work with 64 keys a block, three blocks, three quarters of Q in registers, p as an operand in
//      shared memory. Expected 0.38, got 0.585 (0.236, 3.88): scores 1200, softmax 840, hand-over 550, but 810 of 3700
//      clocks waiting for keys.
//  16  the same with 48 keys and four blocks: 0.593 (0.232, 3.91): scores 1000, softmax 620, hand-over 530, waiting 280;
//      0.67 where the gather warps have 24 registers and spill.
//      In 15 and 16 the gather warps scan the ids themselves with 32 to 64 slots on their way, and each 32 ids are a line
//      from DRAM: the scan, which here runs eight blocks ahead, may be what they wait for (not separated).
//  17  here, the last query first and maxima shuffled only where a score rises by more than 2^8: 0.591, 0.247, 3.439.
//      Not kept, the two not told apart. A guess: every block then has rows of one length from the start, and all ask for
//      Q and ids and store at the same moment.
//
// By ncu, busy in percent of the peak: T640 0.549 ms: tensor pipe 55, load/store data pipe 56, L2 32 (5.0 TB/s), DRAM 20, issue
// slots 36; T160 0.248 ms: 39, 53, 59 (6.4 TB/s), DRAM 62, 35; S2048 H128 T1152 (380 valid) 0.442 ms: 52, 55, 35, 25, 36. No unit
// is full: warps wait for each other's barriers, the score warpgroup's chain above. T160 also nears what DRAM gives (Q, out).
#include "common_hopper.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef SHARED_BYTES
#define SHARED_BYTES 228144
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int HEAD_DIM = 512, HEADS = 64;
static const int SLOTS = 48, STAGES = 3;  // keys of a block, blocks in shared memory
static const int P_STAGES = 2, ID_STAGES = 8;
static const int SCORE_STAGES = 4;  // enough that a phase is never lapped
static const int GATHER_WARPS = 3, GATHER_ROWS = SLOTS / GATHER_WARPS, THREADS = 512;
static const int SCORE_REGISTERS = 128, VALUE_REGISTERS = 168, PRODUCER_REGISTERS = 48;
static const u32 Q_CHUNK = HEADS * 128, KV_CHUNK = SLOTS * 128, KV_BYTES = 8 * KV_CHUNK, P_BYTES = HEADS * SLOTS * 2;
static const u32 AT_KEYS = 8 * Q_CHUNK, AT_P = AT_KEYS + STAGES * KV_BYTES, AT_ALPHA = AT_P + P_STAGES * P_BYTES;
static const u32 AT_FINAL = AT_ALPHA + P_STAGES * HEADS * 4, AT_IDS = AT_FINAL + P_STAGES * HEADS * 4;
static const u32 AT_ID_META = AT_IDS + ID_STAGES * SLOTS * 4, AT_KEY_META = AT_ID_META + ID_STAGES * 4;
static const u32 AT_P_META = AT_KEY_META + STAGES * 4, AT_BARS = (AT_P_META + P_STAGES * 4 + 7) / 8 * 8;
static const int BAR_Q_FULL = 0, BAR_SCORED = 1, BAR_KEY_FULL = BAR_SCORED + SCORE_STAGES, BAR_KEY_FREE = BAR_KEY_FULL + STAGES;
static const int BAR_P_FULL = BAR_KEY_FREE + STAGES, BAR_P_FREE = BAR_P_FULL + P_STAGES, BAR_ID_FULL = BAR_P_FREE + P_STAGES;
static const int BAR_ID_FREE = BAR_ID_FULL + ID_STAGES, BARS = BAR_ID_FREE + ID_STAGES;
static const u32 SHARED = AT_BARS + BARS * 8;
static_assert(SHARED == SHARED_BYTES, "what cuda_sm90.py asks for");

static const u32 LAST = 0x10000;  // flag beside a block's slot count
static const float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
static const float RESCALE_ABOVE = 8.0f;  // a maximum may lag by 2^8: p stays far inside float16
#define INFINITE __int_as_float(0x7f800000)

DEVICE u32 load_u32(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
DEVICE void store_u32(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE float load_float(u32 from) { return __uint_as_float(load_u32(from)); }
DEVICE void store_float(u32 to, float v) { store_u32(to, __float_as_uint(v)); }
DEVICE float exp2_fast(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct Call {
    const TensorMap* q_map;
    const element *q, *kv;
    const float* sinks;
    const int* ids;
    element* out;
    float* lse;
    i64 q_stride_b, q_stride_s, q_stride_h, kv_stride_b, kv_stride_k;
    int queries, heads, keys, slots, head_blocks, items;
    float scale;
};

// ---- Index warp ----------------------------------------------------------------------------------------

// Valid ids, in slot order, in blocks of SLOTS; the last block of an item carries the flag LAST. It also asks L2 for Q.
DEVICE void index_warp(const Call& p, u32 shared, u32 bars, int lane) {
    int stage = 0;
    u32 parity = 1;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS, rows = min(HEADS, p.heads - h0);
        const char* q = (const char*)(p.q + query / p.queries * p.q_stride_b + query % p.queries * p.q_stride_s + h0 * p.q_stride_h);
        for (int line = lane; line < rows * 8; line += 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(q + (line >> 3) * p.q_stride_h * 2 + (line & 7) * 128));
        const int* row = p.ids + (i64)query * p.slots;
        bar_wait(bars + (BAR_ID_FREE + stage) * 8, parity);
        int have = 0, next[4];
#pragma unroll
        for (int u = 0; u < 4; u++) next[u] = u * 32 + lane < p.slots ? __ldg(row + u * 32 + lane) : -1;
        for (int first = 0; first < p.slots; first += 128) {
            int id[4];
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const i64 slot = (i64)first + 128 + u * 32 + lane;
                id[u] = next[u];
                next[u] = slot < p.slots ? __ldg(row + slot) : -1;
            }
#pragma unroll
            for (int u = 0; u < 4; u++) {
                const bool valid = (u32)id[u] < (u32)p.keys;  // negative ids are large as unsigned
                const u32 mask = __ballot_sync(FULL_WARP, valid);
                const int at = have + __popc(mask & ((1u << lane) - 1));
                if (valid && at < SLOTS) store_u32(shared + AT_IDS + (stage * SLOTS + at) * 4, id[u]);
                have += __popc(mask);
                if (have > SLOTS) {  // more than a block: hand it out, begin the next with what is over
                    if (lane == 0) store_u32(shared + AT_ID_META + stage * 4, SLOTS);
                    __syncwarp();
                    if (lane == 0) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
                    if (++stage == ID_STAGES) stage = 0, parity ^= 1;
                    bar_wait(bars + (BAR_ID_FREE + stage) * 8, parity);
                    if (valid && at >= SLOTS) store_u32(shared + AT_IDS + (stage * SLOTS + at - SLOTS) * 4, id[u]);
                    have -= SLOTS;
                }
            }
        }
        if (lane == 0) store_u32(shared + AT_ID_META + stage * 4, have | LAST);
        __syncwarp();
        if (lane == 0) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
        if (++stage == ID_STAGES) stage = 0, parity ^= 1;
    }
}

// ---- Gather warps --------------------------------------------------------------------------------------

DEVICE void gather_warp(const Call& p, u32 shared, u32 bars, int warp, int lane) {
    int stage = 0, id_stage = 0;
    u32 parity = 1, id_parity = 0;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const element* kv = p.kv + item / p.head_blocks / p.queries * p.kv_stride_b + lane * 8;
        bool more = true;
        while (more) {
            bar_wait(bars + (BAR_ID_FULL + id_stage) * 8, id_parity);
            const u32 meta = load_u32(shared + AT_ID_META + id_stage * 4);
            bar_wait(bars + (BAR_KEY_FREE + stage) * 8, parity);
            u32 from = shared + AT_IDS + (id_stage * SLOTS + warp * GATHER_ROWS) * 4;
            u32 tile = shared + AT_KEYS + stage * KV_BYTES + (lane >> 3) * KV_CHUNK + warp * GATHER_ROWS * 128 + ((lane & 7) << 4);
            int left = (int)(meta & 0xffff) - warp * GATHER_ROWS;  // rows below it exist; the others are zero-filled
#pragma unroll 1
            for (int i = 0; i < GATHER_ROWS; i += 8, from += 32, tile += 1024, left -= 8) {
                int id[8];  // read before the first copy is issued: the copies then follow each other at once
#pragma unroll
                for (int k = 0; k < 8; k += 4)
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(id[k]), "=r"(id[k + 1]), "=r"(id[k + 2]), "=r"(id[k + 3])
                                 : "r"(from + k * 4)
                                 : "memory");
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const int bytes = k < left ? 16 : 0;
                    const element* row = kv + (i64)(bytes ? id[k] : 0) * p.kv_stride_k;
                    const u32 to = (tile + k * 128) ^ (k << 4);  // the tile starts on an 8-row boundary
                    copy16(to, row, bytes);
                    copy16(to + 4 * KV_CHUNK, row + 256, bytes);
                }
            }
            bar_arrive_after_copies(bars + (BAR_KEY_FULL + stage) * 8);
            if (warp == 0 && lane == 0) {
                store_u32(shared + AT_KEY_META + stage * 4, meta);
                bar_arrive(bars + (BAR_KEY_FULL + stage) * 8);
            }
            __syncwarp();  // every lane has read its ids
            if (lane == 0) bar_arrive(bars + (BAR_ID_FREE + id_stage) * 8);
            more = !(meta & LAST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (++id_stage == ID_STAGES) id_stage = 0, id_parity ^= 1;
        }
    }
}

// ---- Score warpgroup -----------------------------------------------------------------------------------

// Q of an item in eight boxes of 64 columns; heads beyond H arrive as zeros. One thread.
DEVICE void load_q(const Call& p, u32 shared, u32 bars, int item) {
    const int query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
    bar_arrive_expecting(bars + BAR_Q_FULL * 8, 8 * Q_CHUNK);
#pragma unroll 1
    for (int c = 0; c < 8; c++)
        load_box(shared + c * Q_CHUNK, p.q_map, c * 64, h0, query % p.queries, query / p.queries, bars + BAR_Q_FULL * 8);
}

// s = Q K^T of one block, started. The first half of Q's columns comes from registers.
DEVICE void start_scores(float (&s)[SLOTS / 2], const u32 (&q)[16][4], u32 shared, u32 keys) {
    u64 a = operand(shared + 4 * Q_CHUNK, 16, 1024), b = operand(keys, 16, 1024);
    fence_async();
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i == 0) wgmma_m64n48k16_rs_first(s, q[0], b);
        else wgmma_m64n48k16_rs(s, q[i], b + (((i >> 2) * KV_CHUNK + (i & 3) * 32) >> 4), 1);
    }
    b += 4 * KV_CHUNK >> 4;
#pragma unroll 1
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int k = 0; k < 4; k++) wgmma_m64n48k16_ss(s, a + (k * 32 >> 4), b + (k * 32 >> 4), 1);
        a += Q_CHUNK >> 4;
        b += KV_CHUNK >> 4;
    }
    wgmma_end();
}

struct Rows {
    float m0, m1, l0, l1;  // running maximum of scale s and sum of p, of rows g and g + 8 of this thread
};

// p = 2^(scale s - m) of one block, packed as the A operand of the value product. a0, a1: what earlier sums are
// multiplied with. Slots from `count` on do not exist.
DEVICE void softmax(float scale, float (&s)[SLOTS / 2], Rows& w, u32 (&packed)[SLOTS / 4], float& a0, float& a1, int count, int lane) {
    // Rounded before the maximum is subtracted: a fused product would leave its own rounding error, which for scores of
    // 1e9 is no longer small against 1.
#pragma unroll
    for (int i = 0; i < SLOTS / 2; i++) s[i] = __fmul_rn(s[i], scale);
    if (count < SLOTS) {
#pragma unroll
        for (int j = 0; j < SLOTS / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (j * 8 + (lane & 3) * 2 + e >= count) s[j * 4 + e] = s[j * 4 + 2 + e] = -INFINITE;
    }
    float x0 = s[0], x1 = s[2];
#pragma unroll
    for (int j = 0; j < SLOTS / 8; j++) {
        x0 = fmaxf(x0, fmaxf(s[j * 4], s[j * 4 + 1]));
        x1 = fmaxf(x1, fmaxf(s[j * 4 + 2], s[j * 4 + 3]));
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        x0 = fmaxf(x0, __shfl_xor_sync(FULL_WARP, x0, step));
        x1 = fmaxf(x1, __shfl_xor_sync(FULL_WARP, x1, step));
    }
    const float n0 = x0 > w.m0 + RESCALE_ABOVE || w.m0 == -INFINITE ? x0 : w.m0;
    const float n1 = x1 > w.m1 + RESCALE_ABOVE || w.m1 == -INFINITE ? x1 : w.m1;
    const float b0 = n0 == -INFINITE ? 0.f : n0, b1 = n1 == -INFINITE ? 0.f : n1;  // -inf - -inf never happens
    a0 = exp2_fast(w.m0 - b0), a1 = exp2_fast(w.m1 - b1);
    w.m0 = n0, w.m1 = n1;
    w.l0 *= a0, w.l1 *= a1;
#pragma unroll
    for (int j = 0; j < SLOTS / 8; j++) {
        const float p00 = exp2_fast(s[j * 4] - b0), p01 = exp2_fast(s[j * 4 + 1] - b0);
        const float p10 = exp2_fast(s[j * 4 + 2] - b1), p11 = exp2_fast(s[j * 4 + 3] - b1);
        w.l0 += p00 + p01, w.l1 += p10 + p11;
        packed[j * 2] = Element::pack2(p00, p01);
        packed[j * 2 + 1] = Element::pack2(p10, p11);
    }
}

DEVICE void score_warpgroup(const Call& p, u32 shared, u32 bars, int thread) {
    const int lane = thread & 31, warp = thread >> 5, row = warp * 16 + (lane >> 2);
    int stage = 0, p_stage = 0, scored = 0;
    u32 parity = 0, p_parity = 1, q_parity = 0;
    if (thread == 0 && blockIdx.x < p.items) load_q(p, shared, bars, blockIdx.x);
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
        Rows w = {-INFINITE, -INFINITE, 0.f, 0.f};
        bar_wait(bars + BAR_Q_FULL * 8, q_parity);
        q_parity ^= 1;
        u32 q[16][4];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int r = warp * 16 + (lane & 15);
            const u32 from = shared + (i >> 2) * Q_CHUNK + r * 128 + ((((i & 3) * 2 + (lane >> 4)) ^ (r & 7)) << 4);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(q[i][0]), "=r"(q[i][1]), "=r"(q[i][2]), "=r"(q[i][3])
                         : "r"(from)
                         : "memory");
        }
        u32 meta;
        do {
            float s[SLOTS / 2], a0, a1;
            u32 packed[SLOTS / 4];
            bar_wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
            start_scores(s, q, shared, shared + AT_KEYS + stage * KV_BYTES);
            meta = load_u32(shared + AT_KEY_META + stage * 4);
            wgmma_wait();
            if (lane == 0) bar_arrive(bars + (BAR_SCORED + scored) * 8);
            scored = (scored + 1) % SCORE_STAGES;
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if ((meta & LAST) && item + gridDim.x < p.items) {
                asm volatile("bar.sync 1, 128;" ::: "memory");  // no warp reads Q any more
                if (thread == 0) load_q(p, shared, bars, item + gridDim.x);
            }
            softmax(p.scale, s, w, packed, a0, a1, meta & 0xffff, lane);
            bar_wait(bars + (BAR_P_FREE + p_stage) * 8, p_parity);
            if (meta & LAST) {
#pragma unroll
                for (int step = 1; step < 4; step *= 2) {
                    w.l0 += __shfl_xor_sync(FULL_WARP, w.l0, step);
                    w.l1 += __shfl_xor_sync(FULL_WARP, w.l1, step);
                }
                if ((lane & 3) == 0) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int h = h0 + row + e * 8;
                        const float m = e ? w.m1 : w.m0, l = e ? w.l1 : w.l0, sink = h < p.heads ? __ldg(p.sinks + h) : 0.f;
                        const float share = l == 0.f ? 0.f : 1.f / (l + exp2_fast(sink * LOG2E - m));  // no valid slot: 0 for any sink
                        store_float(shared + AT_FINAL + (p_stage * HEADS + row + e * 8) * 4, share);
                        if (p.lse && h < p.heads) p.lse[(i64)query * p.heads + h] = l == 0.f ? -INFINITE : m * LN2 + logf(l);
                    }
                }
            }
            const u32 at = shared + AT_P + p_stage * P_BYTES + thread * 16;
#pragma unroll
            for (int k = 0; k < SLOTS / 16; k++)
                asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at + k * 2048), "r"(packed[k * 4]), "r"(packed[k * 4 + 1]),
                             "r"(packed[k * 4 + 2]), "r"(packed[k * 4 + 3])
                             : "memory");
            if ((lane & 3) == 0) {
                store_float(shared + AT_ALPHA + (p_stage * HEADS + row) * 4, a0);
                store_float(shared + AT_ALPHA + (p_stage * HEADS + row + 8) * 4, a1);
            }
            if (thread == 0) store_u32(shared + AT_P_META + p_stage * 4, meta & LAST);
            __syncwarp();
            if (lane == 0) bar_arrive(bars + (BAR_P_FULL + p_stage) * 8);
            if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
        } while (!(meta & LAST));
    }
}

// ---- Value warpgroups ----------------------------------------------------------------------------------

// 128 columns of O * share. The lanes of a quad trade 2-column pieces, so that each stores 16 bytes; everything is packed
// first, so that no store waits for registers that another is still reading.
DEVICE void store_columns(const float (&o)[64], float share0, float share1, element* out, int row, int heads, int lane) {
    u32 v[2][4][4];
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        v[0][i >> 2][i & 3] = Element::pack2(o[i * 4] * share0, o[i * 4 + 1] * share0);
        v[1][i >> 2][i & 3] = Element::pack2(o[i * 4 + 2] * share1, o[i * 4 + 3] * share1);
    }
#pragma unroll
    for (int g = 0; g < 8; g++) {
        u32(&q)[4] = v[g & 1][g >> 1];
        const u32 t0 = __shfl_xor_sync(FULL_WARP, odd ? q[0] : q[1], 1), t1 = __shfl_xor_sync(FULL_WARP, odd ? q[2] : q[3], 1);
        q[0] = odd ? t0 : q[0], q[1] = odd ? q[1] : t0, q[2] = odd ? t1 : q[2], q[3] = odd ? q[3] : t1;
    }
#pragma unroll
    for (int g = 0; g < 8; g++) {
        u32(&q)[4] = v[g & 1][g >> 1];
        const u32 t0 = __shfl_xor_sync(FULL_WARP, high ? q[0] : q[2], 2), t1 = __shfl_xor_sync(FULL_WARP, high ? q[1] : q[3], 2);
        q[0] = high ? t0 : q[0], q[2] = high ? q[2] : t0, q[1] = high ? t1 : q[1], q[3] = high ? q[3] : t1;
    }
#pragma unroll
    for (int g = 0; g < 8; g++) {
        const u32(&q)[4] = v[g & 1][g >> 1];
        const int r = row + (g & 1) * 8;
        if (r < heads)
            asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(out + (i64)r * HEAD_DIM + (g >> 1) * 32), "r"(q[0]), "r"(q[1]),
                         "r"(q[2]), "r"(q[3])
                         : "memory");
    }
}

DEVICE void value_warpgroup(const Call& p, u32 shared, u32 bars, int half, int thread) {
    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    int stage = 0, p_stage = 0, next = 1;
    u32 p_parity = 0;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        float o0[64], o1[64], share0 = 0.f, share1 = 0.f;  // columns 0..127 and 128..255 of this half
        int accumulate = 0;
        u32 last;
        do {
            bar_wait(bars + (BAR_P_FULL + p_stage) * 8, p_parity);
            u32 a[SLOTS / 16][4];
            const u32 from = shared + AT_P + p_stage * P_BYTES + thread * 16;
#pragma unroll
            for (int k = 0; k < SLOTS / 16; k++)
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(a[k][0]), "=r"(a[k][1]), "=r"(a[k][2]), "=r"(a[k][3])
                             : "r"(from + k * 2048)
                             : "memory");
            const float a0 = load_float(shared + AT_ALPHA + (p_stage * HEADS + row) * 4);
            const float a1 = load_float(shared + AT_ALPHA + (p_stage * HEADS + row + 8) * 4);
            last = load_u32(shared + AT_P_META + p_stage * 4);
            if (last) {
                share0 = load_float(shared + AT_FINAL + (p_stage * HEADS + row) * 4);
                share1 = load_float(shared + AT_FINAL + (p_stage * HEADS + row + 8) * 4);
            }
            __syncwarp();
            if (lane == 0) bar_arrive(bars + (BAR_P_FREE + p_stage) * 8);
            if (accumulate && __any_sync(FULL_WARP, a0 != 1.f || a1 != 1.f)) {
#pragma unroll
                for (int j = 0; j < 64; j += 4) {
                    o0[j] *= a0, o0[j + 1] *= a0, o0[j + 2] *= a1, o0[j + 3] *= a1;
                    o1[j] *= a0, o1[j + 1] *= a0, o1[j + 2] *= a1, o1[j + 3] *= a1;
                }
            }
            // The next block's scores first: see the head of the file. The item's last block has none to wait for.
            if (!last) bar_wait(bars + (BAR_SCORED + next % SCORE_STAGES) * 8, next / SCORE_STAGES & 1);
            next = (next + 1) % (2 * SCORE_STAGES);
            const u64 v = operand(shared + AT_KEYS + stage * KV_BYTES + half * 4 * KV_CHUNK, KV_CHUNK, 1024);
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < SLOTS / 16; k++) {
                wgmma_m64n128k16_rs_t(o0, a[k], v + (k * 2048 >> 4), k | accumulate);
                wgmma_m64n128k16_rs_t(o1, a[k], v + ((2 * KV_CHUNK + k * 2048) >> 4), k | accumulate);
            }
            wgmma_end();
            wgmma_wait();
            if (lane == 0) bar_arrive(bars + (BAR_KEY_FREE + stage) * 8);
            accumulate = 1;
            if (++stage == STAGES) stage = 0;
            if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
        } while (!last);
        const int query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
        element* out = p.out + ((i64)query * p.heads + h0) * HEAD_DIM + half * 256 + (lane & 3) * 8;
        store_columns(o0, share0, share1, out, row, p.heads - h0, lane);
        store_columns(o1, share0, share1, out + 128, row, p.heads - h0, lane);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------

// q_map: q as [B][S][H][512], boxes of 64 heads by 64 columns, 128-byte swizzled. Strides in elements; the last is 1.
// scale: log2(e) times the caller's. lse: null where it is not wanted.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_attention_fwd_sm90(
    const __grid_constant__ TensorMap q_map, const element* q, const element* kv, const float* sinks, const int* ids, element* out,
    float* lse, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h, i64 kv_stride_b, i64 kv_stride_k, int batch, int queries, int heads,
    int keys, int slots, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = (u32)__cvta_generic_to_shared(dynamic), bars = shared + AT_BARS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head_blocks = (heads + HEADS - 1) / HEADS;
    const Call p = {&q_map, q, kv, sinks, ids, out, lse, q_stride_b, q_stride_s, q_stride_h, kv_stride_b, kv_stride_k,
                    queries, heads, keys, slots, head_blocks, batch * queries * head_blocks, scale};
    if (threadIdx.x == 0) {
        bar_init(bars + BAR_Q_FULL * 8, 1);
        for (int i = 0; i < SCORE_STAGES; i++) bar_init(bars + (BAR_SCORED + i) * 8, 4);
        for (int i = 0; i < STAGES; i++) bar_init(bars + (BAR_KEY_FULL + i) * 8, GATHER_WARPS * 32 + 1);
        for (int i = 0; i < STAGES; i++) bar_init(bars + (BAR_KEY_FREE + i) * 8, 8);
        for (int i = 0; i < P_STAGES; i++) bar_init(bars + (BAR_P_FULL + i) * 8, 4);
        for (int i = 0; i < P_STAGES; i++) bar_init(bars + (BAR_P_FREE + i) * 8, 8);
        for (int i = 0; i < ID_STAGES; i++) bar_init(bars + (BAR_ID_FULL + i) * 8, 1);
        for (int i = 0; i < ID_STAGES; i++) bar_init(bars + (BAR_ID_FREE + i) * 8, GATHER_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();  // barriers are initialised before anyone uses them
    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SCORE_REGISTERS));
        score_warpgroup(p, shared, bars, threadIdx.x);
    } else if (warp < 12) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(VALUE_REGISTERS));
        value_warpgroup(p, shared, bars, warp >= 8, threadIdx.x & 127);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (warp == 12 + GATHER_WARPS) index_warp(p, shared, bars, lane);
        else gather_warp(p, shared, bars, warp - 12, lane);
    }
}
