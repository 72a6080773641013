// Sparse attention backward on Hopper, its products and sums: wgmma, D 512, bfloat16 or float16, any H.
// archs: 90a
// hot: sparse_attention_bwd_sm90
//
//     p = exp2(scale2 q.k - L),  ds = scale p (grad_out.k - delta)              over slots t with 0 <= id_t < keys
//     grad_q[h] = sum_t ds[h,t] k_t,     sums[id_t] += sum_h ds[h,t] q[h] + p[h,t] grad_out[h]
//
// L and delta come from sparse_attention_bwd_prep.cu, sums go to sparse_attention_bwd_finish.cu. DETERMINISTIC: sums are
// integers (fixed_sum.cuh), else float32 added with atomics.
//
// Grid: clusters of 2 HEAD_BLOCKS blocks, persistent: one block a multiprocessor; cluster i takes the items i, i + clusters,
// ...; an item is HEAD_BLOCKS * 64 heads of one query. The blocks of a pair own 256 columns each of everything with columns;
// with HEAD_BLOCKS 2 a second pair has the other 64 heads of the same slots. So each (query, slot) row is added to the sums
// once for up to 128 heads.
// Block: 512 threads in roles that run ahead of each other, coupled by mbarriers:
//   score warpgroup     [S | dP] (64 slots x 128) over its 256 columns; half of it, the other block's 32 heads, goes to that
//                       block, which adds its own, forms p and ds of its 32 heads and writes them to both blocks
//   product warpgroups  two, 128 columns each: dQ += dS K, then dKV = dS^T Q + P^T dO and its addition to the sums. They take
//                       turns with dKV, so that one adds while the other multiplies
//   gather warps        three: the halves of the key rows of each block of 64 slots
//   index warp          valid ids in slot order; what else its item needs, where there is room for two items
// Shared memory (dynamic, up to 227 KB): Q and dO stacked [stage][4 chunks][128 rows][64], keys [stage][4 chunks][64][64],
//   dS and P [stage][64 slots][64 heads], all 128-byte swizzled and used in both directions; scores received; with
//   HEAD_BLOCKS 2 also products received; ids, factors, L, delta.
// Determinism: P, dS, grad_q and each contribution to the sums have a fixed order that the query's own valid ids decide
//   (what two blocks add to each other is two terms). The order of additions to float32 sums is free; integer sums have the
//   same bits in any order.
//
// Rows that a block lacks are zero-filled: NaN in unselected rows never enters. Heads beyond H are zeros with L = +inf.
//
// Floor on one H200 (S4096 H64 T640, 510 valid ids a query): products 0.87 ms at 790 TFLOP/s; additions of 4.3 GB 1.14 ms
// at 3.75 TB/s (float32), 2.28 ms (integers): 4045 and 8090 clocks a block of 64 slots, of which products need 2560.
// Predicted: 1.3 and 2.6 ms, if everything hides behind the additions.
//
// Log (one H200, CUDA 13.0, GEMM 782 to 795 TFLOP/s unless said; medians of the kernel alone in ms for float32 sums of
// S4096 H64 T640 and T160 (141 valid), and integer sums of the same; clocks a block):
//   1  first version: 1.97 0.74 4.15 1.33; without the additions 1.55. Arrivals at the other block's barriers with
//      .release.cluster wait for all additions under way, waits with .acquire.cluster empty L1.
//   2  plain arrivals and waits; scores of the other block's heads first and sent while its own run (N = 64): 1.80 0.66;
//      64 at a time and 128 at a time are equal, taking turns is worth 1 %.
//      Additions by cp.reduce.async.bulk from a staging buffer of 8 rows a warp: 2.96 1.16.
//      A cluster works on neighbouring queries, not clusters on neighbours: 1.95.
//   3  quads trade until a warp's instruction adds to whole 128-byte lines, keys given back right after dQ, scores of the next
//      block run beside the softmax, one stage of Q and dO and three of keys: integers 4.15 -> 3.06; float32 1.90 0.82:
//      the change of queries costs 9000 clocks of the score warpgroup, a branch around each addition 8 instructions.
//   4  no branches around additions (zeros where a slot lacks), factors of the integers found by the index warp:
//      integers 2.57 1.14; float32 with one stage of Q and dO 1.93 0.80, with two 1.79 0.69. Of 6800 clocks a block, one
//      stage: scores 1485, softmax 1985 (its shared loads queue behind the additions), sends and waits 1400, next query 1075;
//      without the additions 1.45 ms. So the score warpgroup is the chain that limits float32 sums.
//   5  dQ of the next block started before a block's additions: ptxas then serialises the products (C7514); not pursued.
//   6  L and delta in registers, a softmax does not wait for the next block's keys, two stages of Q and dO for float32 sums:
//      expected to cut the softmax to 900 clocks; by ncu 1.80 0.70 2.57 (setmaxnreg.dec to more than the launch's 128 registers
//      is an illegal instruction: that state never ran). Busy in the same runs, in percent of the peak:
//          float32 T640: tensor pipe 41, L2 71, load/store data pipe 65, issue slots 30; T160: 38, 75, 61, 30
//          integers T640: tensor pipe 28, L2 89 (6.6 TB/s), load/store data pipe 52: bound by the additions in L2
//          H128 S2048 (380 valid): 36, 39, 60, 28, on 120 multiprocessors: bound by the chain of roles
//   H128 S2048, 895 valid ids of 10240 keys: cluster of four 3.53, integers 4.12; clusters of two that add twice 3.23, 5.50.
//      30 clusters of four run at once (120 of 132 multiprocessors), and trading products takes 2000 clocks a block.
#include "sparse_attention_bwd_sm90_results.cuh"

// ---- Index warp ----------------------------------------------------------------------------------------

// The second block of heads keeps its columns in another order, chunks 1 0 3 2: see trade().

// Q and dO of an item, 256 columns: rows of this block's 32 heads of Q, the same of dO, then the other 32 heads of both.
// Heads beyond H arrive as zeros. One thread.
DEVICE void load_heads(const Call& p, u32 to, u32 bar, int item) {
    const int query = p.query(item), h0 = p.first_head(item), s = query % p.queries, b = query / p.queries;
    bar_arrive_expecting(bar, X_BYTES);
#pragma unroll 1
    for (int c = 0; c < 4; c++, to += X_CHUNK) {
        const int column = p.half() * HALF + (c ^ p.head_block()) * 64;
        const int own = h0 + p.half() * OWN_HEADS, other = h0 + (1 - p.half()) * OWN_HEADS;
        load_box(to, p.q_map, column, own, s, b, bar);
        load_box(to + BOX, p.grad_out_map, column, own, s, b, bar);
        load_box(to + 2 * BOX, p.q_map, column, other, s, b, bar);
        load_box(to + 3 * BOX, p.grad_out_map, column, other, s, b, bar);
    }
}

// All of an item that its scores need but keys, once the place is free. One warp.
DEVICE void load_item(const Call& p, u32 shared, u32 bars, int item, int x_stage, u32 free_parity, int lane) {
    const int head = p.first_head(item) + p.half() * OWN_HEADS + lane;
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

static const int AHEAD = DETERMINISTIC ? 2 : 4;  // warp-wide reads of ids on their way

// Valid ids, in slot order, in blocks of SLOTS; the last block of an item carries the flag LAST.
DEVICE void index_warp(const Call& p, u32 shared, u32 bars) {
    const int lane = fresh_thread() & 31;
    int stage = 0, x_stage = 0;
    u32 parity = 1, x_parity = 1;
    for (int item = p.first(); item < p.items; item += p.step) {
        const int* row = p.ids + (i64)p.query(item) * p.slots;
#if DETERMINISTIC
        const int* exponents = p.exponents + (i64)(p.query(item) / p.queries) * p.keys;
#endif
        int have = 0, next[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) next[u] = u * 32 + lane < p.slots ? __ldg(row + u * 32 + lane) : -1;
        if (Q_STAGES > 1) load_item(p, shared, bars, item, x_stage, x_parity, lane);  // else ids must run ahead of it
        if (lane < 16 && item + p.step < p.items) {
            const int query = p.query(item + p.step), h0 = p.first_head(item + p.step) + (lane >> 1 & 1) * OWN_HEADS;
            const TensorMap* map = lane & 1 ? p.q_map : p.grad_out_map;
            prefetch_box(map, p.half() * HALF + (lane >> 2) * 64, h0, query % p.queries, query / p.queries);
        }
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
    for (int item = p.first(); item < p.items; item += p.step) {
        const element* kv = p.kv + p.query(item) / p.queries * p.kv_stride_b + p.half() * HALF + lane * 8;
        bool more = true;
        while (more) {
            wait(bars + (BAR_ID_FULL + id_stage) * 8, id_parity);
            const u32 meta = load_u32(shared + AT_ID_META + id_stage * 4);
            clock.read(0);
            wait(bars + (BAR_KEY_FREE + stage) * 8, parity);
            clock.read(1);
            const u32 ids = shared + AT_IDS + id_stage * SLOTS * 4;
            const u32 tile = shared + AT_KEYS + stage * KEY_BYTES + ((lane >> 3) ^ p.head_block()) * KEY_CHUNK + ((lane & 7) << 4);
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
    for (int i = 0; i < 16; i++) {
        const u32 chunk = i >> 2, step = (i & 3) * 32;
        wgmma_m64n128k16_ss(own, other, a + ((chunk * KEY_CHUNK + step) >> 4), b + ((chunk * X_CHUNK + step) >> 4), i > 0);
    }
    wgmma_end();
}

// p = 2^(scale2 s - L) and dS = scale p (dP - delta) of row g (e 0) or g + 8 (e 2), packed: pairs of heads 8 j + 2 c.
DEVICE void softmax(const Call& p, const float (&s)[32], const float (&total)[8], const float (&delta)[8], bool exists, int e,
                    u32 (&p2)[4], u32 (&ds2)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float w[2], ds[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            // Rounded before L is subtracted, as in the forward.
            w[i] = exp2_fast(__fmul_rn(s[j * 4 + e + i], p.scale2) - total[j * 2 + i]);
            ds[i] = p.scale * (w[i] * (s[16 + j * 4 + e + i] - delta[j * 2 + i]));
        }
        p2[j] = exists ? Element::pack2(w[0], w[1]) : 0;
        ds2[j] = exists ? Element::pack2(ds[0], ds[1]) : 0;
    }
}

// L and delta of this thread's heads: 8 j + 2 c, 8 j + 2 c + 1.
DEVICE void load_head_values(u32 heads, float (&total)[8], float (&delta)[8]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        load_float2(heads + j * 32, total[j * 2], total[j * 2 + 1]);
        load_float2(heads + OWN_HEADS * 4 + j * 32, delta[j * 2], delta[j * 2 + 1]);
    }
}

// What one block of slots becomes once the other half of its scores is there: P and dS in both blocks' shared memory.
DEVICE void finish_scores(const Call& p, float (&s)[32], float (&total)[8], float (&delta)[8], u32 heads, u32 shared, u32 there,
                          int count, u32 turn, int p_stage, u32 p_parity, int thread, Clock& clock) {
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
    // The additions to global memory fill the way that loads from shared memory take, too: fewer of those a block. The
    // deterministic kernel lacks the registers, and its additions take longest anyway.
    if (DETERMINISTIC) load_head_values(heads, total, delta);
    u32 w[2][4], ds[2][4];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        softmax(p, s, total, delta, row + e * 8 < count, e * 2, w[e], ds[e]);
        transpose_quad(w[e], lane);
        transpose_quad(ds[e], lane);
    }
    clock.read(9);
    wait(bars + (BAR_P_FREE + p_stage) * 8, p_parity ^ 1);
    clock.read(10);
#pragma unroll
    for (int e = 0; e < 2; e++) {
        const u32 at = AT_DS + p_stage * 2 * P_TILE + (row + e * 8) * 128;
        const u32 here = at + (((lane & 3) ^ (row & 7)) << 4), other = at + (((4 + (lane & 3)) ^ (row & 7)) << 4);
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

// The scores of the next block run while this one's are finished, if its keys are there; not across items.
DEVICE void score_warpgroup(const Call& p, u32 shared, u32 bars) {
    const int thread = fresh_thread();
    u32 there = remote(shared, cluster_rank() ^ 1);
    int stage = 0, x_stage = 0, p_stage = 0;
    u32 parity = 0, x_parity = 0, p_parity = 0, turn = 0;  // turn: of the buffers with one stage: the parity of the block's number
    Clock clock(shared, thread == 0);
    for (int item = p.first(); item < p.items; item += p.step) {
        const u32 x = shared + x_stage * X_BYTES, heads = shared + AT_HEADS + x_stage * OWN_HEADS * 8 + (thread & 3) * 8;
        float own[32], other[32], s[32], total[8], delta[8];  // s: of the block before
        u32 meta = 0;
        if (Q_STAGES == 1 && thread < 32) load_item(p, shared, bars, item, 0, x_parity ^ 1, thread);
        wait(bars + (BAR_X_FULL + x_stage) * 8, x_parity);
        clock.read(4);
        if (!DETERMINISTIC) load_head_values(heads, total, delta);
        for (bool first = true; first || !(meta & LAST); first = false) {
            bool unfinished = !first;
            if (unfinished && !is_past(bars + (BAR_KEY_FULL + stage) * 8, parity)) {
                finish_scores(p, s, total, delta, heads, shared, there, meta & 0xffff, turn ^ 1, p_stage, p_parity, thread, clock);
                if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
                unfinished = false;
            }
            wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
            clock.read(5);
            start_scores(own, other, shared + AT_KEYS + stage * KEY_BYTES, x);
            clock.read(6);
            if (unfinished) {
                finish_scores(p, s, total, delta, heads, shared, there, meta & 0xffff, turn ^ 1, p_stage, p_parity, thread, clock);
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
        finish_scores(p, s, total, delta, heads, shared, there, meta & 0xffff, turn ^ 1, p_stage, p_parity, thread, clock);
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

// dKV = dS^T Q + P^T dO: 16 heads a step, in the order of dS's columns.
DEVICE void multiply_keys(float (&dkv)[64], u32 ds, u32 x) {
    const u64 a = operand(ds, 16, 1024), b = operand(x, X_CHUNK, 1024);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 heads = (i & 3) * 16, row = (i >> 2) * OWN_HEADS + heads + (heads >= OWN_HEADS ? OWN_HEADS : 0);
        wgmma_m64n128k16_ss<0, 1>(dkv, a + (((i >> 2) * P_TILE + heads * 2) >> 4), b + (row * 128 >> 4), i > 0);
    }
}

// dQ first: it gives the keys back. "bar.sync 1 and 2": whose turn it is with dKV.
DEVICE void product_warpgroup(const Call& p, u32 shared, u32 bars, int columns) {
    const int thread = fresh_thread() & 127;
    const int lane = thread & 31;
    const u32 p_free_there = remote(bars + BAR_P_FREE * 8, cluster_rank() ^ 1);
    int stage = 0, x_stage = 0, id_stage = 0, p_stage = 0;
    u32 turn = 0, p_parity = 0;
    Clock clock(shared, thread == 0);
    const int c0 = 12 + columns * 8;
    const bool whole = p.key_first == 0 && p.key_last == p.keys;
    const int first_slot = __shfl_sync(FULL_WARP, (thread >> 5) * 16, 0);  // of this warp's rows, known to be the same in all lanes
    if (columns == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
    for (int item = p.first(); item < p.items; item += p.step) {
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
            wgmma_wait();
            if (lane == 0) bar_arrive(bars + (BAR_KEY_FREE + stage) * 8);
            clock.read(c0 + 1);
            asm volatile("bar.sync %0, 256;" ::"r"(1 + columns) : "memory");
            wgmma_begin();
            multiply_keys(dkv, ds, shared + x_stage * X_BYTES + columns * 2 * X_CHUNK);
            wgmma_end();
            asm volatile("bar.arrive %0, 256;" ::"r"(2 - columns) : "memory");
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
            const int column = p.half() * HALF + columns * 128 + p.head_block() * 64;
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
        const int row = (fresh_thread() & 127) >> 5 << 4 | (lane >> 2);
        const int h = p.first_head(item) + ((row >> 5) ^ p.half()) * OWN_HEADS + (row & 31), second = p.head_block() ? -64 : 64;
        element* to = p.grad_q + ((i64)p.query(item) * p.heads + h) * HEAD_DIM + p.half() * HALF + columns * 128;
        to += p.head_block() * 64 + (lane & 3) * 8;
        if (p.parts & 1) store_columns(dq, h < p.heads ? to : nullptr, h + 8 < p.heads ? to + 8 * HEAD_DIM : nullptr, second, lane);
        clock.read(c0 + 4);
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------

// q_map and grad_out_map: [B][S][H][512], boxes of 32 heads by 64 columns, 128-byte swizzled. Strides in elements; the last is
// 1. sums: [batch, key_last - key_first, 512]; parts, exponents: see cuda_bwd.py. scale2: log2(e) times scale.
extern "C" __global__ void __cluster_dims__(2 * HEAD_BLOCKS, 1, 1) __launch_bounds__(THREADS, 1) sparse_attention_bwd_sm90(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap grad_out_map, const element* kv, const int* ids,
    const float* log2_total, const float* delta, element* grad_q, void* sums, int* exponents, i64 kv_stride_b, i64 kv_stride_k,
    int batch, int queries, int heads, int keys, int slots, int key_first, int key_last, int parts, float scale, float scale2) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = (u32)__cvta_generic_to_shared(dynamic), bars = shared + AT_BARS;
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x >> 5, 0), groups = (heads + HEADS * HEAD_BLOCKS - 1) / (HEADS * HEAD_BLOCKS);
    const Call p = {&q_map, &grad_out_map, kv, ids, log2_total, delta, grad_q, sums, exponents, kv_stride_b, kv_stride_k,
                    queries, heads, keys, slots, groups, batch * queries * groups, key_first, key_last, parts, scale, scale2, (int)gridDim.x / CLUSTER};
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
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(SCORE_REGISTERS));
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
