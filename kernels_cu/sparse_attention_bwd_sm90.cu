// Sparse attention backward on Hopper: clusters of two blocks, D 512, bfloat16 or float16, 64 heads at a time.
// archs: 90a
// hot: sparse_attention_bwd_sm90
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#include "fixed_sum.cuh"
#include "sparse_attention_bwd_sm90.cuh"

#ifndef DETERMINISTIC
#define DETERMINISTIC 0
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int HEAD_DIM = 512, HALF = 256, HEADS = 64, OWN_HEADS = 32, SLOTS = 64;
#ifndef HEAD_BLOCKS
#define HEAD_BLOCKS 1
#endif
#ifndef Q_STAGES
#define Q_STAGES 1
#endif
#ifndef STAGES
#define STAGES 3
#endif
static const int CLUSTER = 2 * HEAD_BLOCKS;
static const int GROUPS = 16 / HEAD_BLOCKS;  // of 8 columns, that a product warpgroup adds to the sums
#ifndef SCATTER
#define SCATTER 1
#endif
#ifndef P_STAGES
#define P_STAGES (3 - HEAD_BLOCKS)
#endif
#ifndef PREFETCH
#define PREFETCH 1
#endif
#ifndef TURNS
#define TURNS 1
#endif
#ifndef ORDER
#define ORDER 0
#endif
static const int ID_STAGES = DETERMINISTIC ? 4 : 8, GATHER_WARPS = 3, THREADS = 512;
#ifndef SR
#define SR 128
#define PR 168
#endif
static const int SCORE_REGISTERS = SR, PRODUCT_REGISTERS = PR, PRODUCER_REGISTERS = 512 - SR - 2 * PR;
static const u32 KEY_CHUNK = SLOTS * 128, KEY_BYTES = 4 * KEY_CHUNK;   // 64 columns of the rows; all
static const u32 X_CHUNK = 2 * HEADS * 128, X_BYTES = 4 * X_CHUNK;     // the same of the stacked Q and dO
static const u32 BOX = OWN_HEADS * 128, P_TILE = SLOTS * HEADS * 2, SENT_BYTES = SLOTS * HEADS * 4;
static const u32 AT_KEYS = Q_STAGES * X_BYTES, AT_DS = AT_KEYS + STAGES * KEY_BYTES;  // P behind dS
static const u32 AT_SENT = AT_DS + P_STAGES * 2 * P_TILE, AT_TRADE = AT_SENT + SENT_BYTES, TRADE_BYTES = SLOTS * 64 * 4;
static const u32 AT_IDS = AT_TRADE + (HEAD_BLOCKS - 1) * 2 * TRADE_BYTES, AT_ID_META = AT_IDS + 8 * SLOTS * 4;
static const u32 AT_FACTORS = AT_IDS + 4 * SLOTS * 4, AT_KEY_META = AT_ID_META + ID_STAGES * 4, AT_HEADS = (AT_KEY_META + STAGES * 4 + 15) / 16 * 16;
static const u32 AT_BARS = AT_HEADS + Q_STAGES * OWN_HEADS * 8;  // after L and delta of this block's heads
static const int BAR_X_FULL = 0, BAR_X_FREE = BAR_X_FULL + Q_STAGES, BAR_KEY_FULL = BAR_X_FREE + Q_STAGES;
static const int BAR_KEY_FREE = BAR_KEY_FULL + STAGES, BAR_ID_FULL = BAR_KEY_FREE + STAGES, BAR_ID_FREE = BAR_ID_FULL + ID_STAGES;
static const int BAR_SENT_FULL = BAR_ID_FREE + ID_STAGES, BAR_SENT_FREE = BAR_SENT_FULL + 1, BAR_P_FULL = BAR_SENT_FREE + 1;
static const int BAR_P_FREE = BAR_P_FULL + P_STAGES, BAR_TRADE_FULL = BAR_P_FREE + P_STAGES, BAR_TRADE_FREE = BAR_TRADE_FULL + 2;
static const int BARS = HEAD_BLOCKS > 1 ? BAR_TRADE_FREE + 2 : BAR_TRADE_FULL;
static const u32 AT_CLOCKS = AT_BARS + BARS * 8;
#ifdef CLOCKS
static const u32 SHARED = AT_CLOCKS + 128;
__device__ u64 clock_sums[32];
#else
static const u32 SHARED = AT_CLOCKS;
#endif
#ifdef SHARED_BYTES
static_assert(SHARED == SHARED_BYTES, "what cuda_bwd_sm90.py asks for");
#endif
__device__ u32 shared_needed = SHARED;

static const u32 LAST = 0x10000;  // flag beside a block's slot count
#define INFINITE __int_as_float(0x7f800000)

// Where time goes, in builds that ask: clocks since the previous reading, added to a role's counter by one thread.
#ifdef CLOCKS
struct Clock {
    u32 at, last;
    bool mine;
    DEVICE Clock(u32 shared, bool mine) : at(shared + AT_CLOCKS), last(clock()), mine(mine) {}
    DEVICE void read(int n) {
        const u32 now = clock();
        if (mine) store_u32(at + n * 4, load_u32(at + n * 4) + now - last);
        last = now;
    }
};
#else
struct Clock {
    DEVICE Clock(u32, bool) {}
    DEVICE void read(int) {}
};
#endif

struct Call {
    const TensorMap *q_map, *grad_out_map;
    const element* kv;
    const int* ids;
    const float *log2_total, *delta;
    element* grad_q;
    void* sums;
    int* exponents;
    i64 kv_stride_b, kv_stride_k;
    int queries, heads, keys, slots, groups, items, key_first, key_last, parts;
    float scale, scale2;
    u32 rank, half;      // of the block in its cluster; of the columns
    int head_block;
    int first, step;     // the cluster's items: first, first + step, ...
    DEVICE int query(int item) const {
        const int n = item / groups;
#if ORDER == 1
        const int each = (items / groups + step - 1) / step, at = n / step, c = (n % step + at * 7) % step;
        const int q = c * each + at;
        return q < items / groups ? q : 0;
#else
        return n;
#endif
    }
    DEVICE int first_head(int item) const { return (item % groups * HEAD_BLOCKS + head_block) * HEADS; }
};

// threadIdx.x, read again so that nothing derived from it is kept across roles.
DEVICE int fresh_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// ---- Index warp ----------------------------------------------------------------------------------------

// The second block of heads keeps its columns in another order, chunks 1 0 3 2: see trade().

// Q and dO of an item, 256 columns: rows of this block's 32 heads of Q, the same of dO, then the other 32 heads of both.
// Heads beyond H arrive as zeros. One thread.
DEVICE void load_heads(const Call& p, u32 to, u32 bar, int item) {
    const int query = p.query(item), h0 = p.first_head(item), s = query % p.queries, b = query / p.queries;
    bar_arrive_expecting(bar, X_BYTES);
#pragma unroll 1
    for (int c = 0; c < 4; c++, to += X_CHUNK) {
        const int column = p.half * HALF + (c ^ p.head_block) * 64, own = h0 + p.half * OWN_HEADS, other = h0 + (1 - p.half) * OWN_HEADS;
        load_box(to, p.q_map, column, own, s, b, bar);
        load_box(to + BOX, p.grad_out_map, column, own, s, b, bar);
        load_box(to + 2 * BOX, p.q_map, column, other, s, b, bar);
        load_box(to + 3 * BOX, p.grad_out_map, column, other, s, b, bar);
    }
}

static const int AHEAD = DETERMINISTIC ? 2 : 4;  // warp-wide reads of ids on their way
// All of an item that its scores need but keys, once the place is free. One warp.
DEVICE void load_item(const Call& p, u32 shared, u32 bars, int item, int x_stage, u32 free_parity, int lane) {
    const int head = p.first_head(item) + p.half * OWN_HEADS + lane;
    const i64 at = (i64)p.query(item) * p.heads + head;
    const float total = head < p.heads ? __ldg(p.log2_total + at) : INFINITE;  // p of a head that does not exist is 0
    const float delta = head < p.heads ? __ldg(p.delta + at) : 0.f;
    wait(bars + (BAR_X_FREE + x_stage) * 8, free_parity);
    store_u32(shared + AT_HEADS + x_stage * OWN_HEADS * 8 + lane * 4, __float_as_uint(total));
    store_u32(shared + AT_HEADS + x_stage * OWN_HEADS * 8 + (OWN_HEADS + lane) * 4, __float_as_uint(delta));
    __syncwarp();
    if (lane == 0) load_heads(p, shared + x_stage * X_BYTES, bars + (BAR_X_FULL + x_stage) * 8, item);
    __syncwarp();
}

// Valid ids, in slot order, in blocks of SLOTS; the last block of an item carries the flag LAST.
DEVICE void index_warp(const Call& p, u32 shared, u32 bars) {
    const int lane = fresh_thread() & 31;
    int stage = 0, x_stage = 0;
    u32 parity = 1, x_parity = 1;
    for (int item = p.first; item < p.items; item += p.step) {
        const int* row = p.ids + (i64)p.query(item) * p.slots;
#if DETERMINISTIC
        const int* exponents = p.exponents + (i64)(p.query(item) / p.queries) * p.keys;
#endif
        int have = 0, next[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) next[u] = u * 32 + lane < p.slots ? __ldg(row + u * 32 + lane) : -1;
#if Q_STAGES > 1
        load_item(p, shared, bars, item, x_stage, x_parity, lane);
#endif
#if PREFETCH
        if (lane < 16 && item + p.step < p.items) {
            const int query = p.query(item + p.step), h0 = p.first_head(item + p.step) + (lane >> 1 & 1) * OWN_HEADS;
            prefetch_box(lane & 1 ? p.q_map : p.grad_out_map, p.half * HALF + (lane >> 2) * 64, h0, query % p.queries, query / p.queries);
        }
#endif
        if (++x_stage == Q_STAGES) x_stage = 0, x_parity ^= 1;
        wait(bars + (BAR_ID_FREE + stage) * 8, parity);
        for (int first = 0; first < p.slots; first += AHEAD * 32) {
            int id[AHEAD];
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                const i64 slot = (i64)first + AHEAD * 32 + u * 32 + lane;
                id[u] = next[u];
                next[u] = slot < p.slots ? __ldg(row + slot) : -1;
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                const bool valid = (u32)id[u] < (u32)p.keys;  // negative ids are large as unsigned
                const u32 mask = __ballot_sync(FULL_WARP, valid);
                const int at = have + __popc(mask & ((1u << lane) - 1));
#if DETERMINISTIC
                const float factor = valid ? fixed_factor(__ldg(exponents + id[u])) : 0.f;
                if (valid && at < SLOTS) store_u32(shared + AT_FACTORS + (stage * SLOTS + at) * 4, __float_as_uint(factor));
#endif
                if (valid && at < SLOTS) store_u32(shared + AT_IDS + (stage * SLOTS + at) * 4, id[u]);
                have += __popc(mask);
                if (have > SLOTS) {  // more than a block: hand it out, begin the next with what is over
                    if (lane == 0) store_u32(shared + AT_ID_META + stage * 4, SLOTS);
                    __syncwarp();
                    if (lane == 0) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
                    if (++stage == ID_STAGES) stage = 0, parity ^= 1;
                    wait(bars + (BAR_ID_FREE + stage) * 8, parity);
#if DETERMINISTIC
                    if (valid && at >= SLOTS) store_u32(shared + AT_FACTORS + (stage * SLOTS + at - SLOTS) * 4, __float_as_uint(factor));
#endif
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

// Half a key row (512 bytes) is one copy of 16 bytes a lane. Groups of 8 rows go to the warps in turn.
DEVICE void gather_warp(const Call& p, u32 shared, u32 bars, int warp) {
    const int lane = fresh_thread() & 31;
    int stage = 0, id_stage = 0;
    u32 parity = 1, id_parity = 0;
    Clock clock(shared, warp == 0 && lane == 0);
    for (int item = p.first; item < p.items; item += p.step) {
        const element* kv = p.kv + p.query(item) / p.queries * p.kv_stride_b + p.half * HALF + lane * 8;
        bool more = true;
        while (more) {
            wait(bars + (BAR_ID_FULL + id_stage) * 8, id_parity);
            const u32 meta = load_u32(shared + AT_ID_META + id_stage * 4);
            clock.read(0);
            wait(bars + (BAR_KEY_FREE + stage) * 8, parity);
            clock.read(1);
            const u32 ids = shared + AT_IDS + id_stage * SLOTS * 4;
            const u32 tile = shared + AT_KEYS + stage * KEY_BYTES + ((lane >> 3) ^ p.head_block) * KEY_CHUNK + ((lane & 7) << 4);
            const int count = meta & 0xffff;
#pragma unroll 1
            for (int i = warp * 8; i < SLOTS; i += GATHER_WARPS * 8) {
                int id[8];  // read before the first copy is issued: the copies then follow each other at once
#pragma unroll
                for (int k = 0; k < 8; k += 4)
                    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                                 : "=r"(id[k]), "=r"(id[k + 1]), "=r"(id[k + 2]), "=r"(id[k + 3])
                                 : "r"(ids + (i + k) * 4)
                                 : "memory");
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const int bytes = i + k < count ? 16 : 0;  // rows that do not exist are zero-filled
                    copy16((tile + (i + k) * 128) ^ (k << 4), kv + (i64)(bytes ? id[k] : 0) * p.kv_stride_k, bytes);
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
            clock.read(2);
        }
    }
}

// ---- Score warpgroup -----------------------------------------------------------------------------------

// [S | dP] of 64 slots over this block's columns, started: column groups of 8, first this block's heads of S and of dP,
// then the other block's.
DEVICE void start_scores(float (&own)[32], float (&other)[32], u32 keys, u32 x) {
    asm volatile("" : "+r"(keys), "+r"(x));  // what is computed from them is not kept across blocks
    const u64 a = operand(keys, 16, 1024), b = operand(x, 16, 1024);
    fence_async();
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 16; i++)
        wgmma_m64n128k16_ss(own, other, a + (((i >> 2) * KEY_CHUNK + (i & 3) * 32) >> 4), b + (((i >> 2) * X_CHUNK + (i & 3) * 32) >> 4), i > 0);
    wgmma_end();
}

// p = 2^(scale2 s - L) and dS = scale p (dP - delta) of row g (e 0) or g + 8 (e 2), packed: pairs of heads 8 j + 2 c.
DEVICE void softmax(const Call& p, const float (&s)[32], u32 heads, bool exists, int e, u32 (&p2)[4], u32 (&ds2)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float total[2], delta[2], w[2], ds[2];
        load_float2(heads + j * 32, total[0], total[1]);
        load_float2(heads + OWN_HEADS * 4 + j * 32, delta[0], delta[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Rounded before L is subtracted, as in the forward.
            w[i] = exp2_fast(__fmul_rn(s[j * 4 + e + i], p.scale2) - total[i]);
            ds[i] = p.scale * (w[i] * (s[16 + j * 4 + e + i] - delta[i]));
        }
        p2[j] = exists ? Element::pack2(w[0], w[1]) : 0;
        ds2[j] = exists ? Element::pack2(ds[0], ds[1]) : 0;
    }
}

// What one block of slots becomes once the other half of its scores is there: P and dS in both blocks' shared memory.
DEVICE void finish_scores(const Call& p, float (&s)[32], u32 shared, u32 there, u32 heads, int count, u32 turn, int p_stage, u32 p_parity,
                          int thread, Clock& clock) {
    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    const u32 bars = shared + AT_BARS, p_full = AT_BARS + (BAR_P_FULL + p_stage) * 8;
    wait(bars + BAR_SENT_FULL * 8, turn);
    clock.read(8);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a, b, c, d;
        load_float4(shared + AT_SENT + i * 2048 + thread * 16, a, b, c, d);
        s[i * 4] += a, s[i * 4 + 1] += b, s[i * 4 + 2] += c, s[i * 4 + 3] += d;
    }
    __syncwarp();
    if (lane == 0) bar_arrive_remote(there + AT_BARS + BAR_SENT_FREE * 8);
    u32 w[2][4], ds[2][4];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        softmax(p, s, heads + (lane & 3) * 8, row + e * 8 < count, e * 2, w[e], ds[e]);
        transpose_quad(w[e], lane);
        transpose_quad(ds[e], lane);
    }
    clock.read(9);
    wait(bars + (BAR_P_FREE + p_stage) * 8, p_parity ^ 1);
    clock.read(10);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const u32 at = AT_DS + p_stage * 2 * P_TILE + (row + e * 8) * 128, here = at + (((lane & 3) ^ (row & 7)) << 4), other = at + (((4 + (lane & 3)) ^ (row & 7)) << 4);
        store_async<0>(there + other, ds[e][0], ds[e][1], ds[e][2], ds[e][3], there + p_full);
        store_async<P_TILE>(there + other, w[e][0], w[e][1], w[e][2], w[e][3], there + p_full);
        store_u32x4(shared + here, ds[e]);
        store_u32x4(shared + here + P_TILE, w[e]);
    }
    __syncwarp();
    if (thread == 0) bar_arrive_expecting(shared + p_full, P_TILE);
    else if (lane == 0) bar_arrive(shared + p_full);
    clock.read(11);
}

// The scores of the next block run while this one's are finished; not across items, whose Q and dO take the same place.
DEVICE void score_warpgroup(const Call& p, u32 shared, u32 bars) {
    const int thread = fresh_thread();
    u32 there = remote(shared, p.rank ^ 1);
    int stage = 0, x_stage = 0, p_stage = 0;
    u32 parity = 0, x_parity = 0, p_parity = 0, turn = 0;  // turn: of the buffers with one stage: the parity of the block's number
    Clock clock(shared, thread == 0);
    for (int item = p.first; item < p.items; item += p.step) {
        const u32 x = shared + x_stage * X_BYTES, heads = shared + AT_HEADS + x_stage * OWN_HEADS * 8;
        float own[32], other[32], s[32];
        u32 meta = 0;
#if Q_STAGES == 1
        if (thread < 32) load_item(p, shared, bars, item, 0, x_parity ^ 1, thread);
#endif
        wait(bars + (BAR_X_FULL + x_stage) * 8, x_parity);
        clock.read(4);
        for (bool first = true; first || !(meta & LAST); first = false) {
            wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
            clock.read(5);
            start_scores(own, other, shared + AT_KEYS + stage * KEY_BYTES, x);
            clock.read(6);
            if (!first) {
                finish_scores(p, s, shared, there, heads, meta & 0xffff, turn ^ 1, p_stage, p_parity, thread, clock);
                if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
            }
            meta = load_u32(shared + AT_KEY_META + stage * 4);
            if (++stage == STAGES) stage = 0, parity ^= 1;
            wgmma_wait();
            clock.read(7);
            wait(bars + BAR_SENT_FREE * 8, turn ^ 1);
            asm volatile("" : "+r"(there));
            send<0>(there + AT_SENT + thread * 16, other, there + AT_BARS + BAR_SENT_FULL * 8);
            if (thread == 0) bar_arrive_expecting(bars + BAR_SENT_FULL * 8, SENT_BYTES);
#pragma unroll
            for (int i = 0; i < 32; i++) s[i] = own[i];
            turn ^= 1;
            clock.read(3);
        }
        finish_scores(p, s, shared, there, heads, meta & 0xffff, turn ^ 1, p_stage, p_parity, thread, clock);
        if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
        if (++x_stage == Q_STAGES) x_stage = 0, x_parity ^= 1;
    }
}

// ---- Product warpgroups --------------------------------------------------------------------------------

// dQ += dS K, both halves of the heads in the order of dS's columns.
DEVICE void add_queries(float (&dq)[64], u32 ds, u32 keys, int accumulate) {
    const u64 a = operand(ds, 16, 1024), b = operand(keys, KEY_CHUNK, 1024);
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma_m64n128k16_ss<1, 1>(dq, a + (k * 2048 >> 4), b + (k * 2048 >> 4), k | accumulate);
}

// dKV = dS^T Q + P^T dO: 16 heads a step.
DEVICE void multiply_keys(float (&dkv)[64], u32 ds, u32 x) {
    const u64 a = operand(ds, 16, 1024), b = operand(x, X_CHUNK, 1024);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 heads = (i & 3) * 16, row = (i >> 2) * OWN_HEADS + heads + (heads >= OWN_HEADS ? OWN_HEADS : 0);
        wgmma_m64n128k16_ss<0, 1>(dkv, a + (((i >> 2) * P_TILE + heads * 2) >> 4), b + (row * 128 >> 4), i > 0);
    }
}

#if DETERMINISTIC
typedef i64 sum_type;
#else
typedef float sum_type;
#endif

// Where a slot of a block adds its columns from `column` on. With SOME a slot may have nothing to add: it then adds zeros
// to a row that is there, since a branch around every addition costs more. The first slot of 16 exists.
template <bool SOME>
struct Row {
    sum_type* at;
    bool exists;
    DEVICE Row(const Call& p, int batch, u32 ids, int slot, int count, int column) {
        int r = slot & 15;
        const int n = SOME ? count - (slot & ~15) : 16, rows = p.key_last - p.key_first;
        exists = r < n;
        if (SOME) {
#pragma unroll
            for (int mask = 7; mask >= 0; mask = mask ? mask >> 1 : -1)
                if (r >= n) r &= mask;
        }
        int row = (int)load_u32(ids + ((slot & ~15) + r) * 4) - p.key_first;
        if (SOME && (u32)row >= (u32)rows) exists = false, row = min(slot, rows - 1);
        at = (sum_type*)p.sums + ((i64)batch * rows + row) * HEAD_DIM + column;
    }
    DEVICE float value(float x) const { return !SOME || exists ? x : 0.f; }
};
DEVICE int* exponent_of(const Call& p, int batch, u32 ids, int slot) {
    return p.exponents + (i64)batch * p.keys + load_u32(ids + slot * 4);
}

// The scatter: adds a block's rows, 16 a warp, to the sums. Row g of an accumulator lies in quad g, but memory is fastest
// where a warp's instruction adds to whole lines of 128 bytes: quads trade columns for rows first.
#if DETERMINISTIC
// Four quads trade, so that each of their 16 lanes has one of 16 neighbouring columns of four rows.
template <bool SOME, int J, int END>
DEVICE void add_columns(const float (&o)[64], const Row<SOME>& row, float factor, int at) {
    add1<J * 64>(row.at, to_fixed(row.value(o[J * 4 + at]), factor));
    if constexpr (J + 2 < END) add_columns<SOME, J + 2, END>(o, row, factor, at);
}
// Rows g (e 0) or g + 8 (e 2), column groups FIRST .. FIRST + 7.
template <bool SOME, int FIRST>
DEVICE void scatter_part(const Call& p, float (&o)[64], int batch, u32 ids, int count, int column, int e) {
    const int thread = fresh_thread(), lane = thread & 31, first_slot = ((thread & 96) >> 1) + e * 4;
    const bool odd = lane & 4, high = lane & 8;
    column += (lane >> 3 & 1) * 8 + (lane & 3) * 2 + (lane >> 2 & 1);
    u32 most = 0;
#pragma unroll
    for (int j = FIRST; j < FIRST + 8; j += 2) {
        float &q0 = o[j * 4 + e], &q1 = o[j * 4 + e + 1], &q2 = o[j * 4 + 4 + e], &q3 = o[j * 4 + 5 + e];
        most = max(max(most, max(ordered_bits(q0), ordered_bits(q1))), max(ordered_bits(q2), ordered_bits(q3)));
        const float s0 = __shfl_xor_sync(FULL_WARP, odd ? q0 : q1, 4), s1 = __shfl_xor_sync(FULL_WARP, odd ? q2 : q3, 4);
        q0 = odd ? s0 : q0, q1 = odd ? q1 : s0, q2 = odd ? s1 : q2, q3 = odd ? q3 : s1;
    }
#pragma unroll
    for (int j = FIRST; j < FIRST + 8; j += 2) {
        float &q0 = o[j * 4 + e], &q1 = o[j * 4 + e + 1], &q2 = o[j * 4 + 4 + e], &q3 = o[j * 4 + 5 + e];
        const float t0 = __shfl_xor_sync(FULL_WARP, high ? q0 : q2, 8), t1 = __shfl_xor_sync(FULL_WARP, high ? q1 : q3, 8);
        q0 = high ? t0 : q0, q2 = high ? q2 : t0, q1 = high ? t1 : q1, q3 = high ? q3 : t1;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int slot = first_slot + (lane >> 4) * 4 + k;
        const Row<SOME> row(p, batch, ids, slot, count, column);
        const float factor = __uint_as_float(load_u32(ids + AT_FACTORS - AT_IDS + slot * 4));
        add_columns<SOME, FIRST, FIRST + 8>(o, row, factor, (k >> 1) * 4 + e + (k & 1));
    }
    if (most >= 0x7f800000u) {  // this lane's own row
        const int slot = first_slot + (lane >> 2);
        if (Row<true>(p, batch, ids, slot, count, column).exists) atomicMax(exponent_of(p, batch, ids, slot), FIXED_BROKEN);
    }
}
template <bool SOME>
DEVICE void scatter(const Call& p, float (&o)[64], int batch, u32 ids, int count, int column) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        scatter_part<SOME, 0>(p, o, batch, ids, count, column, e);
        if constexpr (GROUPS > 8) scatter_part<SOME, GROUPS - 8>(p, o, batch, ids, count, column, e);
    }
}
#else
// Two quads trade, so that their 8 lanes have 32 neighbouring columns of one row, then of the other.
template <bool SOME, int J = 0>
DEVICE void add_columns(const float (&o)[64], const Row<SOME>& row0, const Row<SOME>& row1, int e) {
    const int at = J * 4 + e;
    add4<J * 32>(row0.at, row0.value(o[at]), row0.value(o[at + 1]), row0.value(o[at + 4]), row0.value(o[at + 5]));
    add4<J * 32>(row1.at, row1.value(o[at + 8]), row1.value(o[at + 9]), row1.value(o[at + 12]), row1.value(o[at + 13]));
    if constexpr (J + 4 < GROUPS) add_columns<SOME, J + 4>(o, row0, row1, e);
}
template <bool SOME>
DEVICE void scatter(const Call& p, float (&o)[64], int batch, u32 ids, int count, int column) {
    const int thread = fresh_thread(), lane = thread & 31, warp_row = (thread & 96) >> 1;
    const bool odd = lane & 1, upper = lane & 4;
    column += (upper ? 16 : 0) + (lane & 1) * 8 + (lane & 2) * 2;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        const int slot = warp_row + e * 4 + (lane >> 2 & 6);
        const Row<SOME> row0(p, batch, ids, slot, count, column), row1(p, batch, ids, slot + 1, count, column);
        // Pairs of lanes: four columns of group j + odd instead of two of groups j and j + 1.
#pragma unroll
        for (int j = 0; j < GROUPS; j += 2) {
            float &a0 = o[j * 4 + e], &a1 = o[j * 4 + e + 1], &b0 = o[j * 4 + 4 + e], &b1 = o[j * 4 + 5 + e];
            const float s0 = __shfl_xor_sync(FULL_WARP, odd ? a0 : b0, 1), s1 = __shfl_xor_sync(FULL_WARP, odd ? a1 : b1, 1);
            if (odd) a0 = s0, a1 = s1;
            else b0 = s0, b1 = s1;
        }
        // Pairs of quads: groups j .. j + 1 or j + 2 .. j + 3 of both rows instead of both of one row.
#pragma unroll
        for (int j = 0; j < GROUPS; j += 4)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float &a = o[j * 4 + e + (i >> 1) * 4 + (i & 1)], &b = o[j * 4 + 8 + e + (i >> 1) * 4 + (i & 1)];
                const float v = __shfl_xor_sync(FULL_WARP, upper ? a : b, 4);
                if (upper) a = v;
                else b = v;
            }
#if SCATTER == 0
        if (__float_as_uint(o[e]) == 0x12345678) add_columns<SOME>(o, row0, row1, e);
#else
        add_columns<SOME>(o, row0, row1, e);
#endif
    }
}
#endif

// 128 columns of dQ, rows g and g + 8 of this thread. second: where the last 64 columns lie, relative to the first.
DEVICE void store_columns(const float (&o)[64], element* row0, element* row1, int second, int lane) {
#pragma unroll
    for (int g = 0; g < 8; g++) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = ((g >> 1) * 4 + i) * 4 + (g & 1) * 2;
            v[i] = Element::pack2(o[n], o[n + 1]);
        }
        transpose_quad(v, lane);
        element* to = (g & 1) ? row1 : row0;
        if (to)
            asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to + (g >> 2 ? second : 0) + (g >> 1 & 1) * 32), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
    }
}

#if HEAD_BLOCKS > 1
// Sums over both blocks of heads: this block keeps the first 64 of its 128 columns, the other the last, which are its first.
DEVICE void trade(const Call& p, float (&dkv)[64], u32 shared, u32 bars, int columns, u32 turn, int thread) {
    u32 there = remote(shared, p.rank ^ 2);
    asm volatile("" : "+r"(there));  // what is computed from it is not kept across blocks
    const u32 full = (BAR_TRADE_FULL + columns) * 8, free = (BAR_TRADE_FREE + columns) * 8;
    const u32 at = AT_TRADE + columns * TRADE_BYTES + thread * 16;
    wait(bars + free, turn ^ 1);
    send<32>(there + at, dkv, there + AT_BARS + full);
    if (thread == 0) bar_arrive_expecting(bars + full, TRADE_BYTES);
    wait(bars + full, turn);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a, b, c, d;
        load_float4(shared + at + i * 2048, a, b, c, d);
        dkv[i * 4] += a, dkv[i * 4 + 1] += b, dkv[i * 4 + 2] += c, dkv[i * 4 + 3] += d;
    }
    __syncwarp();
    if ((thread & 31) == 0) bar_arrive_remote(there + AT_BARS + free);
}
#endif

DEVICE void product_warpgroup(const Call& p, u32 shared, u32 bars, int columns) {
    const int thread = fresh_thread() & 127;
    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    const u32 p_free_there = remote(bars + BAR_P_FREE * 8, p.rank ^ 1);
    int stage = 0, x_stage = 0, id_stage = 0, p_stage = 0;
    u32 turn = 0, p_parity = 0;
    Clock clock(shared, thread == 0);
    const int c0 = 12 + columns * 8;
    const bool whole = p.key_first == 0 && p.key_last == p.keys;
    const int first_slot = __shfl_sync(FULL_WARP, (thread >> 5) * 16, 0);  // of this warp's rows, known to be the same in all lanes
#if TURNS
    if (columns == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
#endif
    for (int item = p.first; item < p.items; item += p.step) {
        float dq[64];
        int accumulate = 0;
        u32 meta;
        const int batch = p.query(item) / p.queries;
        do {
            wait(bars + (BAR_P_FULL + p_stage) * 8, p_parity);
            const u32 ds = shared + AT_DS + p_stage * 2 * P_TILE;
            clock.read(c0);
            fence_async();
            float dkv[64];
            wgmma_begin();
            add_queries(dq, ds, shared + AT_KEYS + stage * KEY_BYTES + columns * 2 * KEY_CHUNK, accumulate);
            wgmma_end();
            meta = load_u32(shared + AT_ID_META + id_stage * 4);
            const int count = meta & 0xffff;
            const u32 ids = shared + AT_IDS + id_stage * SLOTS * 4;
#if TURNS
            wgmma_wait();
            if (lane == 0) bar_arrive(bars + (BAR_KEY_FREE + stage) * 8);
            clock.read(c0 + 1);
            asm volatile("bar.sync %0, 256;" ::"r"(1 + columns) : "memory");
            wgmma_begin();
            multiply_keys(dkv, ds, shared + x_stage * X_BYTES + columns * 2 * X_CHUNK);
            wgmma_end();
            asm volatile("bar.arrive %0, 256;" ::"r"(2 - columns) : "memory");
#else
            multiply_keys(dkv, ds, shared + x_stage * X_BYTES + columns * 2 * X_CHUNK);
            wgmma_end();
            wgmma_wait_but<1>();
            if (lane == 0) bar_arrive(bars + (BAR_KEY_FREE + stage) * 8);
            clock.read(c0 + 1);
#endif
            wgmma_wait();
            if (lane == 0) {
                bar_arrive(bars + (BAR_P_FREE + p_stage) * 8);
                bar_arrive_remote(p_free_there + p_stage * 8);
                if (meta & LAST) bar_arrive(bars + (BAR_X_FREE + x_stage) * 8);
            }
            clock.read(c0 + 2);
#if HEAD_BLOCKS > 1
            trade(p, dkv, shared, bars, columns, turn, thread);
            clock.read(c0 + 5);
#endif
            const int column = p.half * HALF + columns * 128 + p.head_block * 64;
            if (whole && first_slot + 16 <= count) scatter<false>(p, dkv, batch, ids, count, column);
            else if (first_slot < count && p.key_first < p.key_last) scatter<true>(p, dkv, batch, ids, count, column);
            __syncwarp();  // every lane has read its ids
            if (lane == 0) bar_arrive(bars + (BAR_ID_FREE + id_stage) * 8);
            clock.read(c0 + 3);
            accumulate = 1;
            turn ^= 1;
            if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
            if (++stage == STAGES) stage = 0;
            if (++id_stage == ID_STAGES) id_stage = 0;
        } while (!(meta & LAST));
        if (++x_stage == Q_STAGES) x_stage = 0;
        // Rows 0..31 are this block's heads, 32..63 the other's.
        const int h = p.first_head(item) + ((row >> 5) ^ p.half) * OWN_HEADS + (row & 31);
        element* to = p.grad_q + ((i64)p.query(item) * p.heads + h) * HEAD_DIM + p.half * HALF + columns * 128 + p.head_block * 64 + (lane & 3) * 8;
        if (p.parts & 1) store_columns(dq, h < p.heads ? to : nullptr, h + 8 < p.heads ? to + 8 * HEAD_DIM : nullptr, p.head_block ? -64 : 64, lane);
        clock.read(c0 + 4);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(2 * HEAD_BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) sparse_attention_bwd_sm90(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap grad_out_map, const element* kv, const int* ids,
    const float* log2_total, const float* delta, element* grad_q, void* sums, int* exponents, i64 kv_stride_b, i64 kv_stride_k, int batch, int queries,
    int heads, int keys, int slots, int key_first, int key_last, int parts, float scale, float scale2) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = (u32)__cvta_generic_to_shared(dynamic), bars = shared + AT_BARS;
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x >> 5, 0), groups = (heads + HEADS * HEAD_BLOCKS - 1) / (HEADS * HEAD_BLOCKS);
    const u32 rank = cluster_rank();
    const Call p = {&q_map, &grad_out_map, kv, ids, log2_total, delta, grad_q, sums, exponents, kv_stride_b, kv_stride_k, queries, heads, keys, slots,
                    groups, batch * queries * groups, key_first, key_last, parts, scale, scale2, rank, rank & 1, (int)rank >> 1,
                    (int)blockIdx.x / CLUSTER, (int)gridDim.x / CLUSTER};
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; i++) bar_init(bars + (BAR_X_FULL + i) * 8, 1), bar_init(bars + (BAR_X_FREE + i) * 8, 8);
        for (int i = 0; i < STAGES; i++) {
            bar_init(bars + (BAR_KEY_FULL + i) * 8, GATHER_WARPS * 32 + 1);
            bar_init(bars + (BAR_KEY_FREE + i) * 8, 8);
        }
        for (int i = 0; i < ID_STAGES; i++) {
            bar_init(bars + (BAR_ID_FULL + i) * 8, 1);
            bar_init(bars + (BAR_ID_FREE + i) * 8, GATHER_WARPS + 8);
        }
        bar_init(bars + BAR_SENT_FULL * 8, 1);
        bar_init(bars + BAR_SENT_FREE * 8, 4);
        for (int i = 0; i < P_STAGES; i++) bar_init(bars + (BAR_P_FULL + i) * 8, 4), bar_init(bars + (BAR_P_FREE + i) * 8, 16);
        for (int i = 0; i < 2 * (HEAD_BLOCKS - 1); i++)
            bar_init(bars + (BAR_TRADE_FULL + i) * 8, 1), bar_init(bars + (BAR_TRADE_FREE + i) * 8, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
#ifdef CLOCKS
    if (threadIdx.x < 32) store_u32(shared + AT_CLOCKS + threadIdx.x * 4, 0);
#endif
    __syncthreads();
    cluster_sync();  // barriers are initialised before anyone, here or in the other block, uses them
    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SCORE_REGISTERS));
        score_warpgroup(p, shared, bars);
    } else if (warp < 12) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(PRODUCT_REGISTERS));
        product_warpgroup(p, shared, bars, warp >= 8);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (warp == 12 + GATHER_WARPS) index_warp(p, shared, bars);
        else gather_warp(p, shared, bars, warp - 12);
    }
    __syncwarp();
    cluster_sync();  // the other block may still write here, and arrive at barriers
#ifdef CLOCKS
    if (threadIdx.x < 32) atomicAdd(&clock_sums[threadIdx.x], (u64)load_u32(shared + AT_CLOCKS + threadIdx.x * 4));
#endif
}
