// Sparse attention forward on Hopper: wgmma, D 512, bfloat16 or float16, any H (64 heads at a time).
// archs: 90a
// hot: sparse_attention_fwd_sm90
//
//     s[h,t]   = scale q[h] . kv[id_t]              over slots t with 0 <= id_t < keys, in slot order
//     out[h]   = sum_t exp(s_t) kv[id_t] / (sum_t exp(s_t) + exp(sink_h)),    lse[h] = log sum_t exp(s_t)
//
// Grid: persistent, one block a multiprocessor and no more than items; block i takes the items i, i + grid, ..., rotated so
//   that the first ones come last; an item is 64 heads of one query.
// Block: 512 threads in roles that run ahead of each other, coupled by mbarriers alone:
//   score warpgroup     S = Q K^T of a block of 48 keys, softmax, p to shared memory; three quarters of Q live in its registers
//   value warpgroups    two, 256 columns each: O += P V, the output
//   gather warps        three: the key rows of each block, eight lanes a row, four blocks in shared memory; before an item's
//                       keys, as one more block, the part of its Q that goes to registers
//   index warp          reads the id row, drops masked slots and hands out blocks of 48 ids in slot order
// Shared memory (dynamic, 223 KB): the last two chunks of Q [2][64][64], keys [4][8 chunks][48][64] (128-byte swizzled, so
//   that the same rows serve as K-major keys and N-major values), p [2][6][64][8] as operand A, factors, ids.
// Registers: 128 a thread at launch, 152 score, 160 value, 40 gather and index warps: all 65536.
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
//  What was left a block after 12: scores 1240, softmax 980, hand-over 320, waiting for keys 180; 2720 in a row.
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
//  17  the kernel after 12, the last query first and maxima shuffled only where a score rises by more than 2^8: 0.591, 0.247, 3.439.
//      Not kept, the two not told apart. A guess: every block then has rows of one length from the start, and all ask for
//      Q and ids and store at the same moment.
//  18  the gather: eight lanes take 16 bytes of each chunk of a row, so that an address serves eight copies instead of two and
//      ids are read by lane: 68 instructions a warp and block for 224. All in the same run as the kernel before it: H64 T640
//      0.550 -> 0.522 ms, H64 T160 0.242 -> 0.246, H128 T1152 3.752 -> 3.515.
//  19  two score warpgroups that take blocks in turn, 640 threads (96 registers a thread: 56 score, 160 value, 48 others),
//      the whole of Q in shared memory, maxima and sums from one to the other. Expected 0.46 (0.19, 3.0). Got 0.589 to 0.608
//      (0.248 to 0.259, 3.96 to 4.08) with the old gather; 0.579 to 0.605 (0.247 to 0.251, 3.83 to 3.99) with the new one,
//      beside 0.577 (0.239, 3.82) of the kernel after 12; 0.561 (0.245, 3.79) with 22, beside 0.550 (0.242, 3.75). Clocks a
//      block of each, by a build that counts them and is slower for it: scores 1460 to 1510, softmax and hand-over 2100, waiting
//      for keys 1070 to 1160. Three blocks are too few: each is held for all of that, the values and the gather, and Q's 64 KB
//      leave no room for a fourth.
//      Registers: accumulators begin at R24, and of 160 only four are left for A: p of 48 keys does not fit. One k step at a
//      time, 1020 to 1210 clocks of products a block; p from shared memory, 740 to 820.
//      m64n256 does not compile at 96 registers a thread, whatever setmaxnreg says.
//  20  the grid's last, unfilled round takes the first queries, which have few ids: in one run 0.577 -> 0.571, 0.239 -> 0.247,
//      3.815 -> 3.782; with 21, 0.523 -> 0.511, 0.224 -> 0.225, 3.488 -> 3.444.
//  21  what stands here: three quarters of Q pass through the ring of keys into registers, one block before an item's keys, and
//      48 KB less of Q in shared memory make a fourth block of keys; p an operand in shared memory. With 18 and 20, in the run
//      of 18: 0.508, 0.224, 3.452 beside 0.550, 0.242, 3.752; GEMM 793 to 808 TFLOP/s. A counting build: scores 1060, softmax
//      800, hand-over 340, waiting for keys 70 a block, 490 an item for Q.
//      Values that do not wait for the next block's scores (see 4): 0.582, 0.228, 4.105.
//  22  output through the last block's keys (stmatrix, then whole lines): epilogue 3600 to 4000 -> 2800 clocks by the counting
//      builds, times 0.511, 0.225, 3.444 beside 0.508, 0.224, 3.452: left out, since score and gather warps run ahead meanwhile.
//
// By ncu, commit faa342f (clocks as they are, 1.66 to 1.73 GHz), busy in percent of the peak: T640 0.515 ms: tensor pipe 60,
// load/store data pipe 62, L2 42, DRAM 22, issue slots 31; T160 0.225 ms: 43, 60, 64, 68, 33; S2048 H128 T1152 (380 valid)
// 0.411 ms: 57, 61, 40, 26, 32. No unit is full. Where warps wait, of all samples of T640: value warps for scores and p 20,
// for their own products 10, gather warps for a free block 11, the score warpgroup for its products 4: the chain scores,
// softmax, hand-over above. T160 also nears what DRAM gives (Q, out). Before 18: 55 56 32 20 36; 39 53 59 62 35; 52 55 35 25 36.
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#include "sparse_attention_gather.cuh"
#include "common_wgmma.cuh"

#ifndef SHARED_BYTES
#define SHARED_BYTES 228672
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int HEAD_DIM = 512, HEADS = 64;
static const int SLOTS = 48, STAGES = 4;  // keys of a block, blocks in shared memory
static const int P_STAGES = 2, ID_STAGES = 8;
static const int SCORE_STAGES = 4;  // enough that a phase is never lapped
static const int GATHER_WARPS = 3, GATHER_ROWS = SLOTS / GATHER_WARPS, THREADS = 512;
static const int SCORE_REGISTERS = 152, VALUE_REGISTERS = 160, PRODUCER_REGISTERS = 40;
static const int Q_HELD = 6;  // of the eight 64-column chunks of Q, those in registers; as many bytes as a block of keys
static const u32 Q_CHUNK = HEADS * 128, KV_CHUNK = SLOTS * 128, KV_BYTES = 8 * KV_CHUNK, P_BYTES = HEADS * SLOTS * 2;
static const u32 AT_KEYS = (8 - Q_HELD) * Q_CHUNK, AT_P = AT_KEYS + STAGES * KV_BYTES, AT_ALPHA = AT_P + P_STAGES * P_BYTES;
static const u32 AT_FINAL = AT_ALPHA + P_STAGES * HEADS * 4, AT_IDS = AT_FINAL + SCORE_STAGES * HEADS * 4;
static const u32 AT_ID_META = AT_IDS + ID_STAGES * SLOTS * 4, AT_KEY_META = AT_ID_META + ID_STAGES * 4;
static const u32 AT_P_META = AT_KEY_META + STAGES * 4, AT_BARS = (AT_P_META + P_STAGES * 4 + 7) / 8 * 8;
static const int BAR_Q_FULL = 0, BAR_SCORED = 1, BAR_KEY_FULL = BAR_SCORED + SCORE_STAGES, BAR_KEY_FREE = BAR_KEY_FULL + STAGES;
static const int BAR_P_FULL = BAR_KEY_FREE + STAGES, BAR_P_FREE = BAR_P_FULL + P_STAGES, BAR_ID_FULL = BAR_P_FREE + P_STAGES;
static const int BAR_ID_FREE = BAR_ID_FULL + ID_STAGES, BARS = BAR_ID_FREE + ID_STAGES;
static const u32 SHARED = AT_BARS + BARS * 8;
static_assert(SHARED == SHARED_BYTES, "what cuda_sm90.py asks for");
static_assert(Q_HELD * Q_CHUNK == KV_BYTES, "a block of Q fills the place of a block of keys");

// A 16-bit K-major operand of 8 x 8 blocks of 128 contiguous bytes, not swizzled. k_step, m_step: bytes between blocks.
DEVICE u64 operand_blocks(u32 address, u32 k_step, u32 m_step) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)(k_step >> 4) << 16) | ((u64)(m_step >> 4) << 32);
}

struct Call {
    const TensorMap* q_map;
    const element *q, *kv;
    const float* sinks;
    const int* ids;
    element* out;
    float* lse;
    i64 q_stride_b, q_stride_s, q_stride_h, kv_stride_b, kv_stride_k;
    int queries, heads, keys, slots, head_blocks, items, shift;
    float scale;
};

// The grid's last round is not a full one: it takes the first items, which have the fewest ids where queries are causal.
DEVICE int item_at(const Call& p, int i) {
    i += p.shift;
    return i >= p.items ? i - p.items : i;
}

// Read again where it is wanted, so that nothing that follows from it occupies a register between.
DEVICE int thread_now() {
    int t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

// ---- Index warp ----------------------------------------------------------------------------------------

// Valid ids, in slot order, in blocks of SLOTS; the last block of an item carries the flag LAST. It also asks L2 for Q.
DEVICE void index_warp(const Call& p, u32 shared, u32 bars, int lane) {
    int stage = 0;
    u32 parity = 1;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const int item = item_at(p, i), query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS, rows = min(HEADS, p.heads - h0);
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
                    if (arrives(lane)) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
                    if (++stage == ID_STAGES) stage = 0, parity ^= 1;
                    bar_wait(bars + (BAR_ID_FREE + stage) * 8, parity);
                    if (valid && at >= SLOTS) store_u32(shared + AT_IDS + (stage * SLOTS + at - SLOTS) * 4, id[u]);
                    have -= SLOTS;
                }
            }
        }
        if (lane == 0) store_u32(shared + AT_ID_META + stage * 4, have | LAST);
        __syncwarp();
        if (arrives(lane)) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
        if (++stage == ID_STAGES) stage = 0, parity ^= 1;
    }
}

// ---- Gather warps --------------------------------------------------------------------------------------

// Chunks from..to-1 of Q of this thread block's item i; heads beyond H arrive as zeros. One thread, whose arrival it is too.
DEVICE void load_q(const Call& p, u32 at, u32 bar, int i, int from, int to) {
    const int item = item_at(p, i), query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
    bar_arrive_expecting(bar, (to - from) * Q_CHUNK);
#pragma unroll 1
    for (int c = from; c < to; c++, at += Q_CHUNK)
        load_box(at, p.q_map, c * 64, h0, query % p.queries, query / p.queries, bar);
}

// Q of an item takes the place of one more block, before its keys.
DEVICE void gather_warp(const Call& p, u32 shared, u32 bars, int warp, int lane) {
    int stage = 0, id_stage = 0;
    u32 parity = 1, id_parity = 0;
    const i64 stride = p.kv_stride_k * 2;
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        const char* kv = (const char*)(p.kv + item_at(p, i) / p.head_blocks / p.queries * p.kv_stride_b) + (lane & 7) * 16;
        bool more = true;
        bar_wait(bars + (BAR_KEY_FREE + stage) * 8, parity);
        fence_async();  // ordinary instructions wrote and read what the copy engine now writes over
        if (warp == 0 && lane == 0) load_q(p, shared + AT_KEYS + stage * KV_BYTES, bars + (BAR_KEY_FULL + stage) * 8, i, 0, Q_HELD);
        __syncwarp();
        bar_arrive(bars + (BAR_KEY_FULL + stage) * 8);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        while (more) {
            bar_wait(bars + (BAR_ID_FULL + id_stage) * 8, id_parity);
            const u32 meta = load_u32(shared + AT_ID_META + id_stage * 4);
            bar_wait(bars + (BAR_KEY_FREE + stage) * 8, parity);
            // Eight lanes a row, 16 bytes of each of its eight chunks a lane: an address serves eight copies.
            const u32 from = shared + AT_IDS + (id_stage * SLOTS + warp * GATHER_ROWS + (lane >> 3)) * 4;
            const int left = (int)(meta & 0xffff) - warp * GATHER_ROWS - (lane >> 3);  // rows below it exist; the others are zero-filled
            u32 to = shared + AT_KEYS + stage * KV_BYTES + warp * GATHER_ROWS * 128 + (lane >> 3) * 128 + (((lane & 7) ^ (lane >> 3)) << 4);
            u32 id[GATHER_ROWS / 4];
#pragma unroll
            for (int k = 0; k < GATHER_ROWS / 4; k++) id[k] = load_u32(from + k * 16);
#pragma unroll
            for (int k = 0; k < GATHER_ROWS / 4; k++) {
                const int bytes = k * 4 < left ? 16 : 0;
                const char* row = kv + (u64)(bytes ? id[k] : 0) * (u64)stride;
#pragma unroll
                for (int c = 0; c < 8; c++) copy16(to + c * KV_CHUNK, row + c * 128, bytes);
                to = (to ^ 64) + 512;  // row 4 more: its 16-byte units swap places
            }
            bar_arrive_after_copies(bars + (BAR_KEY_FULL + stage) * 8);
            if (warp == 0 && lane == 0) {
                store_u32(shared + AT_KEY_META + stage * 4, meta);
                bar_arrive(bars + (BAR_KEY_FULL + stage) * 8);
            }
            __syncwarp();  // every lane has read its ids
            if (arrives(lane)) bar_arrive(bars + (BAR_ID_FREE + id_stage) * 8);
            more = !(meta & LAST);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if (++id_stage == ID_STAGES) id_stage = 0, id_parity ^= 1;
        }
    }
}

// ---- Score warpgroup -----------------------------------------------------------------------------------

// s = Q K^T of one block, started. The first chunks of Q come from registers, the others lie before the keys.
DEVICE void start_scores(float (&s)[SLOTS / 2], const u32 (&q)[Q_HELD * 4][4], u32 shared, u32 keys) {
    u64 a = operand(shared, 16, 1024), b = operand(keys, 16, 1024);
    fence_async();
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < Q_HELD * 4; i++) {
        if (i == 0) wgmma_m64n48k16_rs_first(s, q[0], b);
        else wgmma_m64n48k16_rs(s, q[i], b + (((i >> 2) * KV_CHUNK + (i & 3) * 32) >> 4), 1);
    }
    b += Q_HELD * KV_CHUNK >> 4;
#pragma unroll
    for (int i = 0; i < 32 - Q_HELD * 4; i++)
        wgmma_m64n48k16_ss(s, a + (((i >> 2) * Q_CHUNK + (i & 3) * 32) >> 4), b + (((i >> 2) * KV_CHUNK + (i & 3) * 32) >> 4), 1);
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
    if (thread == 0) load_q(p, shared, bars + BAR_Q_FULL * 8, blockIdx.x, Q_HELD, 8);
#pragma unroll 1
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        Rows w = {-INFINITE, -INFINITE, 0.f, 0.f};
        bar_wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
        u32 q[Q_HELD * 4][4];
        // The swizzle moves 16-byte units by the row; a k step further is another bit pair of the address.
        const u32 rows = shared + AT_KEYS + stage * KV_BYTES + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
        for (int k = 0; k < Q_HELD * 4; k++) {
            const u32 from = (rows ^ ((k & 3) << 5)) + (k >> 2) * Q_CHUNK;
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(q[k][0]), "=r"(q[k][1]), "=r"(q[k][2]), "=r"(q[k][3])
                         : "r"(from)
                         : "memory");
        }
        __syncwarp();
        bar_arrive_twice(bars + (BAR_KEY_FREE + stage) * 8, lane);  // for both value warpgroups
        if (++stage == STAGES) stage = 0, parity ^= 1;
        bar_wait(bars + BAR_Q_FULL * 8, q_parity);
        q_parity ^= 1;
        u32 meta;
#pragma unroll 1
        do {
            float s[SLOTS / 2], a0, a1;
            u32 packed[SLOTS / 4];
            bar_wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
            start_scores(s, q, shared, shared + AT_KEYS + stage * KV_BYTES);
            meta = load_u32(shared + AT_KEY_META + stage * 4);
            wgmma_wait();
            if (lane == 0) bar_arrive(bars + (BAR_SCORED + scored) * 8);
            const int final_stage = scored;
            scored = (scored + 1) % SCORE_STAGES;
            if (++stage == STAGES) stage = 0, parity ^= 1;
            if ((meta & LAST) && i + gridDim.x < p.items) {
                asm volatile("bar.sync 1, 128;" ::: "memory");  // no warp reads Q there any more
                if (thread == 0) load_q(p, shared, bars + BAR_Q_FULL * 8, i + gridDim.x, Q_HELD, 8);
            }
            softmax(p.scale, s, w, packed, a0, a1, meta & 0xffff, lane);
            bar_wait(bars + (BAR_P_FREE + p_stage) * 8, p_parity);
            if (meta & LAST) {
                const int item = item_at(p, i), query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
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
                        store_float(shared + AT_FINAL + (final_stage * HEADS + row + e * 8) * 4, share);
                        if (p.lse && h < p.heads) p.lse[(i64)query * p.heads + h] = l == 0.f ? -INFINITE : m * LN2 + logf(l);
                    }
                }
            }
            const u32 at = shared + AT_P + p_stage * P_BYTES + (lane >> 4) * 1024 + warp * 256 + (lane & 15) * 16;
#pragma unroll
            for (int k = 0; k < SLOTS / 16; k++)
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at + k * 2048), "r"(packed[k * 4]),
                             "r"(packed[k * 4 + 1]), "r"(packed[k * 4 + 2]), "r"(packed[k * 4 + 3])
                             : "memory");
            fence_async();
            if ((lane & 3) == 0) {
                store_float(shared + AT_ALPHA + (p_stage * HEADS + row) * 4, a0);
                store_float(shared + AT_ALPHA + (p_stage * HEADS + row + 8) * 4, a1);
            }
            if (thread == 0) store_u32(shared + AT_P_META + p_stage * 4, meta & LAST);
            __syncwarp();
            if (arrives(lane)) bar_arrive(bars + (BAR_P_FULL + p_stage) * 8);
            if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
        } while (!(meta & LAST));
    }
}

// ---- Value warpgroups ----------------------------------------------------------------------------------

DEVICE void value_warpgroup(const Call& p, u32 shared, u32 bars, int half) {
    const int lane = thread_now() & 31;
    const u32 alpha_at = shared + AT_ALPHA + ((thread_now() >> 5 & 3) * 16 + (lane >> 2)) * 4;
    int stage = 0;
    u32 n = 0;  // blocks of keys so far
#pragma unroll 1
    for (int i = blockIdx.x; i < p.items; i += gridDim.x) {
        if (++stage == STAGES) stage = 0;  // Q
        float o0[64], o1[64];  // columns 0..127 and 128..255 of this half
        int accumulate = 0;
        u32 last;
#pragma unroll 1
        do {
            bar_wait(bars + (BAR_P_FULL + (n & 1)) * 8, n >> 1 & 1);
            const float a0 = load_float(alpha_at + (n & 1) * HEADS * 4), a1 = load_float(alpha_at + (n & 1) * HEADS * 4 + 32);
            last = load_u32(shared + AT_P_META + (n & 1) * 4);
            if (accumulate && __any_sync(FULL_WARP, a0 != 1.f || a1 != 1.f)) {
#pragma unroll
                for (int j = 0; j < 64; j += 4) {
                    o0[j] *= a0, o0[j + 1] *= a0, o0[j + 2] *= a1, o0[j + 3] *= a1;
                    o1[j] *= a0, o1[j + 1] *= a0, o1[j + 2] *= a1, o1[j + 3] *= a1;
                }
            }
            n++;
            // The next block's scores first: see the head of the file. The item's last block has none to wait for.
            if (!last) bar_wait(bars + (BAR_SCORED + n % SCORE_STAGES) * 8, n / SCORE_STAGES & 1);
            const u64 v = operand(shared + AT_KEYS + stage * KV_BYTES + half * 4 * KV_CHUNK, KV_CHUNK, 1024);
            const u64 a = operand_blocks(shared + AT_P + ((n - 1) & 1) * P_BYTES, 1024, 128);
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < SLOTS / 16; k++) {
                wgmma_m64n128k16_ss<0, 1>(o0, a + (k * 2048 >> 4), v + (k * 2048 >> 4), k | accumulate);
                wgmma_m64n128k16_ss<0, 1>(o1, a + (k * 2048 >> 4), v + ((2 * KV_CHUNK + k * 2048) >> 4), k | accumulate);
            }
            wgmma_end();
            wgmma_wait();
            __syncwarp();  // every lane has read what scales its sums
            if (arrives(lane)) {
                bar_arrive(bars + (BAR_KEY_FREE + stage) * 8);
                bar_arrive(bars + (BAR_P_FREE + ((n - 1) & 1)) * 8);
            }
            accumulate = 1;
            if (++stage == STAGES) stage = 0;
        } while (!last);
        const int item = item_at(p, i), query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
        const int row = (thread_now() >> 5 & 3) * 16 + (thread_now() >> 2 & 7);
        const float share0 = load_float(shared + AT_FINAL + (((n - 1) % SCORE_STAGES) * HEADS + row) * 4);
        const float share1 = load_float(shared + AT_FINAL + (((n - 1) % SCORE_STAGES) * HEADS + row + 8) * 4);
        element* out = p.out + ((i64)query * p.heads + h0) * HEAD_DIM + half * 256 + (lane & 3) * 8;
        store_columns<Element, HEAD_DIM>(o0, share0, share1, out, row, p.heads - h0, lane);
        store_columns<Element, HEAD_DIM>(o1, share0, share1, out + 128, row, p.heads - h0, lane);
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
                    queries, heads, keys, slots, head_blocks, batch * queries * head_blocks,
                    (int)(batch * queries * head_blocks % gridDim.x), scale};
    if (threadIdx.x == 0) {
        bar_init(bars + BAR_Q_FULL * 8, 1);
        for (int i = 0; i < SCORE_STAGES; i++) bar_init(bars + (BAR_SCORED + i) * 8, 4);
        for (int i = 0; i < STAGES; i++) bar_init(bars + (BAR_KEY_FULL + i) * 8, GATHER_WARPS * 32 + 1);
        for (int i = 0; i < STAGES; i++) bar_init(bars + (BAR_KEY_FREE + i) * 8, of_warps(8));
        for (int i = 0; i < P_STAGES; i++) bar_init(bars + (BAR_P_FULL + i) * 8, of_warps(4));
        for (int i = 0; i < P_STAGES; i++) bar_init(bars + (BAR_P_FREE + i) * 8, of_warps(8));
        for (int i = 0; i < ID_STAGES; i++) bar_init(bars + (BAR_ID_FULL + i) * 8, of_warps(1));
        for (int i = 0; i < ID_STAGES; i++) bar_init(bars + (BAR_ID_FREE + i) * 8, of_warps(GATHER_WARPS));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();  // barriers are initialised before anyone uses them
    if (warp < 4) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(SCORE_REGISTERS));
        score_warpgroup(p, shared, bars, threadIdx.x);
    } else if (warp < 12) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(VALUE_REGISTERS));
        value_warpgroup(p, shared, bars, warp >= 8);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (warp == 12 + GATHER_WARPS) index_warp(p, shared, bars, lane);
        else gather_warp(p, shared, bars, warp - 12, lane);
    }
}
