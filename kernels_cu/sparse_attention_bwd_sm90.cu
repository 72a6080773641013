// Sparse attention backward on Hopper, its products and sums: wgmma, D 512, bfloat16 or float16, any H.
// archs: 90a
// hot: sparse_attention_bwd_sm90
//
//     p = exp2(scale2 q.k - L),  ds = scale p (grad_out.k - delta)              over slots t with 0 <= id_t < keys
//     grad_q[h] = sum_t ds[h,t] k_t,     sums[id_t] += sum_h ds[h,t] q[h] + p[h,t] grad_out[h]
//
// DETERMINISTIC: sums are integers (fixed_sum.cuh), else float32 added with atomics; they go to sparse_attention_bwd_finish.cu.
// DELTA 1: L and delta = grad_out . out are found here and written for the gradient of the sinks; 0: they come from
// sparse_attention_bwd_prep.cu.
//
// Grid: clusters of 2 HEAD_BLOCKS blocks, persistent: one block a multiprocessor; cluster i takes the items i, i + clusters,
// ...; an item is HEAD_BLOCKS * 64 heads of one query. The blocks of a pair own 256 columns each of everything with columns;
// with HEAD_BLOCKS 2 a second pair has the other 64 heads of the same slots. So each (query, slot) row is added to the sums
// once for up to 128 heads.
// Block: 512 threads in roles that run ahead of each other, coupled by mbarriers:
//   score warpgroup     delta, the diagonal of out dO^T; [S | dP] (64 slots x 128) over its 256 columns; half of it, the other block's 32 heads, goes to that
//                       block, which adds its own, forms p and ds of its 32 heads and writes them to both blocks
//   product warpgroups  two, 128 columns each: dQ += dS K, then dKV = dS^T Q + P^T dO and its addition to the sums. They take
//                       turns with dKV, so that one adds while the other multiplies
//   gather warps        three: the halves of the key rows of each block of 64 slots; Q, dO and out of an item, L
//   index warp          valid ids in slot order
// Shared memory (dynamic, up to 227 KB): units of 32 KB, one queue of them for Q and dO stacked [4 chunks][128 rows][64] (two),
//   keys and out [4 chunks][64][64]; dS and P [stage][64 slots][64 heads]; all 128-byte swizzled and used in both directions;
//   scores received; with HEAD_BLOCKS 2 also products received; ids, factors, L, delta.
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
//
// 7 to 9: float32 sums, medians in ms of the whole call / this kernel, S4096 T640, S4096 T160, S2048 H128 (380 valid) on an
// H200 (GEMM 750 to 764; before, in the same run: 1.957/1.806 0.834/0.676 1.762/1.608, of which prep 0.137 0.137 0.144).
// Clocks of a block before (GEMM 775): scores handed out 1350 and waited for 475, the other block's scores 1372, softmax 1740, P free
// 306, P written 552, keys 313; a gather warp 2279 to start copies of 12 KB: every access queues behind the additions.
//   7  delta by a warp with plain loads of grad_out and out, predicted 1.90 0.72 together (GEMM 775): 2.19 1.80 2.22, with two
//      warps 2.11 1.10 1.86: a head's loads take some 1500 clocks behind the additions, and 40 registers hold few heads. Not pursued.
//   8  one queue of units instead of stages of Q, dO and of keys: keys have four units in mid-item, so the scores of the next
//      block no longer wait for them, and the exchange runs beside; predicted 1.45 to 1.6 for T640: 1.811/1.654 0.810/0.659
//      1.754/1.600. Other block's scores 485, softmax 1322, keys 479, handed out 1597.
//      delta as a product, out in a unit after the first keys: predicted 0.1 ms of prep's 0.137: 1.748/1.730 0.748/0.732
//      1.641/1.627. A block's share of it for T640: 114 for out, 122 the product, 159 the other block's part.
//   9  a chunk of scores handed out between the parts of the softmax, expected up to 1000 clocks a block less:
//      1.700/1.695 0.749/0.734 1.618/1.598 (handed out 818 instead of 1610, softmax with the rest 1831 instead of 1324: 285).
//      Float32 sums alone.
//      The other block's part of delta waited for only at the first softmax: spills, 1.870 0.808 1.725.
//      Trades of columns between the additions instead of before: 1.764 0.753 1.648 (with 8); with 9 and pauses of 60
//      and 150 clocks as well: 1.786 0.760 1.657 and 1.850 0.773 1.683: softmax 1187, but P waits 2159 for the products.
//      Now the score warpgroup spends 6250 clocks a block of T640 (6425 before 7), 7070 of T160: still the chain that limits.
//      Integer sums: correctness alone was checked, they were not timed since 6.
// 10 and 11: medians in ms of the whole call, float32 sums, S4096 T640, S4096 T160, S2048 H128; before: 1.707 0.762 1.613.
//  10  sums keep four columns of a lane side by side, so that lanes trade half as much before they add (128 shuffles and 398
//      selections less 64 and 192), expected 3 to 5 %: 1.685 0.752 1.616.
//      Additions by bulk copies of whole rows from 32 KB of shared memory, a unit of keys less, expected 1.35 to 1.45 for
//      T640, since shuffles, additions and the fence before dQ leave the product warpgroups: 1.795 0.760 1.610. The copy
//      engine adds a row of 512 bytes no faster than that; dropped.
//  11  the arrival that gives the other block's buffer of scores back overtook loads from it (see nothing_of): in one query
//      of thousands, most often of T160, S of 8 heads was the next block's. It now waits for what was loaded: 1.690 0.752
//      1.600. Ordered for the whole cluster instead (.release.cluster): 1.868 0.893 1.793, as it waits for additions.
//
// By ncu, with 11 (clocks as they are, 1.78 to 1.80 GHz), this kernel, busy in percent of the peak: float32 T640 1.68 ms:
// tensor pipe 44, L2 80, L1 67, DRAM 17, issue slots 27; T160 0.727: 39, 82, 60, 53, 25; S8192 H128 T1152 (895 valid) 13.19:
// 39, 37, 69, 8, 24, on 120 multiprocessors. Integers: T640 2.56: 29, 89, 72, 7, 28; T160 0.986: 27, 83, 61, 20, 25; H128
// 16.32: 31, 52, 63, 4, 25. So additions and gathered rows fill L2 for 64 heads, integers nearly to the end: what would be
// left of T640 at 100 % of it is 1.34 ms, so that 1.3 takes fewer additions (rows of the window summed over neighbouring
// queries), not better hiding. 128 heads: the chain of roles and the trade of products, no unit.
#include "sparse_attention_bwd_sm90_producers.cuh"
#include "sparse_attention_bwd_sm90_results.cuh"

// ---- Score warpgroup -----------------------------------------------------------------------------------

// [S | dP] of 64 slots over this block's columns, started: column groups of 8, first this block's heads of S and of dP, then
// the other block's of dP and of S.
// One of the four chunks of columns, in their order: a warp waits while it hands them to the tensor cores, so other work goes
// in between.
template <int CHUNK>
DEVICE void start_scores(float (&own)[32], float (&other)[32], u32 keys, u32 x0, u32 x1) {
    u32 x = CHUNK >> 1 ? x1 : x0;
    asm volatile("" : "+r"(keys), "+r"(x));  // what is computed from them is not kept across blocks
    const u64 a = operand(keys + CHUNK * KEY_CHUNK, 16, 1024), b = operand(x + (CHUNK & 1) * X_CHUNK, 16, 1024);
    if (CHUNK == 0) fence_async();
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_m64n128k16_ss(own, other, a + (i * 32 >> 4), b + (i * 32 >> 4), i + CHUNK > 0);
    wgmma_end();
}

#if DELTA
// This block's columns' part of delta, the diagonal of out dO^T: of its own heads to shared memory, else to the other block.
DEVICE void find_delta(u32 out, u32 x0, u32 x1, u32 shared, u32 there, u32 item_stage, int thread) {
    asm volatile("" : "+r"(out), "+r"(x0), "+r"(x1));
    float d[32];
    const u64 a = operand(out, 16, 1024), b0 = operand(x0 + BOX, 16, 1024), b1 = operand(x1 + BOX, 16, 1024);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const u32 chunk = i >> 2, step = (i & 3) * 32;
        wgmma_m64n64k16_ss(d, a + ((chunk * KEY_CHUNK + step) >> 4), (chunk >> 1 ? b1 : b0) + (((chunk & 1) * X_CHUNK + step) >> 4), i > 0);
    }
    wgmma_end();
    wgmma_wait();
    // Rows g and g + 8 of a warp's 16, columns 8 j + 2 c + i: one lane of a quad has both.
    const int lane = thread & 31, warp = thread >> 5, g = lane >> 2;
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int w = 0; w < 4; w++)
        if (warp == w) low = g & 1 ? d[w * 8 + 1] : d[w * 8], high = g & 1 ? d[w * 8 + 7] : d[w * 8 + 6];
    const u32 to = (warp & 1) * 64 + g * 4;
    if ((lane & 3) == g >> 1) {
        if (warp < 2) {
            const u32 own = shared + AT_HEADS + item_stage * OWN_HEADS * 8 + OWN_HEADS * 4 + to;
            store_u32(own, __float_as_uint(low)), store_u32(own + 32, __float_as_uint(high));
        } else {
            const u32 parts = there + AT_PARTS + item_stage * OWN_HEADS * 4 + to, bar = there + AT_BARS + BAR_PARTS_FULL * 8;
            store_async1(parts, __float_as_uint(low), bar), store_async1(parts + 32, __float_as_uint(high), bar);
        }
    }
    __syncwarp();
    if (thread == 0) bar_arrive_expecting(shared + AT_BARS + BAR_PARTS_FULL * 8, OWN_HEADS * 4);
    else if (warp < 2 && arrives(lane)) bar_arrive(shared + AT_BARS + BAR_PARTS_FULL * 8);
}
#endif

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

#if DELTA
// The same once the other block's part of delta is there, which also goes to global memory.
DEVICE void load_found_values(const Call& p, u32 shared, int item, u32 items, float (&total)[8], float (&delta)[8], int thread) {
    const u32 heads = shared + AT_HEADS + (items & 1) * OWN_HEADS * 8, parts = shared + AT_PARTS + (items & 1) * OWN_HEADS * 4;
    wait(shared + AT_BARS + BAR_PARTS_FULL * 8, items & 1);
    load_head_values(heads + (thread & 3) * 8, total, delta);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a, b;
        load_float2(parts + (thread & 3) * 8 + j * 32, a, b);
        delta[j * 2] += a, delta[j * 2 + 1] += b;
    }
    if (thread < OWN_HEADS) {
        const int head = p.first_head(item) + p.half() * OWN_HEADS + thread;
        const float sum = __uint_as_float(load_u32(heads + (OWN_HEADS + thread) * 4)) + __uint_as_float(load_u32(parts + thread * 4));
        if (head < p.heads) p.delta[(i64)p.query(item) * p.heads + head] = sum;
    }
    __syncwarp();
}
#endif

// What one block of slots becomes once the other half of its scores is there: P and dS in both blocks' shared memory.
template <class More1, class More2, class More3>
DEVICE void finish_scores(const Call& p, float (&s)[32], float (&total)[8], float (&delta)[8], u32 heads, u32 shared, u32 there,
                          int count, u32 turn, int p_stage, u32 p_parity, int thread, Clock& clock, More1 more1, More2 more2, More3 more3) {
    const int lane = thread & 31, row = (thread >> 5) * 16 + (lane >> 2);
    const u32 bars = shared + AT_BARS, p_full = AT_BARS + (BAR_P_FULL + p_stage) * 8;
    wait(bars + BAR_SENT_FULL * 8, turn);
    clock.read(8);
    u32 read = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a, b, c, d;
        load_float4(shared + AT_SENT + i * 2048 + thread * 16, a, b, c, d);
        s[i * 4] += a, s[i * 4 + 1] += b, s[i * 4 + 2] += c, s[i * 4 + 3] += d;
        read |= __float_as_uint(a);
    }
    __syncwarp();
    if (arrives(lane)) bar_arrive_remote(there + AT_BARS + BAR_SENT_FREE * 8 + p.nothing_of(read));
    more1();
    // The additions to global memory fill the way that loads from shared memory take, too: fewer of those a block. The
    // deterministic kernel lacks the registers, and its additions take longest anyway.
    if (DETERMINISTIC) load_head_values(heads, total, delta);
    u32 w[2][4], ds[2][4];
#pragma unroll
    for (int e = 0; e < 2; e++) {
        softmax(p, s, total, delta, row + e * 8 < count, e * 2, w[e], ds[e]);
        transpose_quad(w[e], lane);
        transpose_quad(ds[e], lane);
        if (e == 0) more2();
    }
    more3();
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
    else if (arrives(lane)) bar_arrive(shared + p_full);
    clock.read(11);
}

// The scores of the next block run while this one's are finished, if its keys are there; not across items.
DEVICE void score_warpgroup(const Call& p, u32 shared, u32 bars) {
    const int thread = fresh_thread();
    u32 there = remote(shared, cluster_rank() ^ 1);
    int stage = 0, p_stage = 0;
    u32 items = 0, parity = 0, p_parity = 0, turn = 0;  // turn: of the buffers with one stage: the parity of the block's number
    Units units;
    Clock clock(shared, thread == 0);
    for (int item = p.first(); item < p.items; item += p.step(), items++) {
        const u32 heads = shared + AT_HEADS + (items & 1) * OWN_HEADS * 8 + (thread & 3) * 8;
        float own[32], other[32], s[32], total[8], delta[8];  // s: of the block before
        u32 meta = 0, keys;
        auto start0 = [&](bool first) {
            keys = shared + units.next_keys(first) * UNIT;
            start_scores<0>(own, other, keys, shared + units.x0() * UNIT, shared + units.x1() * UNIT);
        };
        auto start1 = [&] { start_scores<1>(own, other, keys, shared + units.x0() * UNIT, shared + units.x1() * UNIT); };
        auto start2 = [&] { start_scores<2>(own, other, keys, shared + units.x0() * UNIT, shared + units.x1() * UNIT); };
        auto start3 = [&] { start_scores<3>(own, other, keys, shared + units.x0() * UNIT, shared + units.x1() * UNIT); };
        auto start = [&](bool first) {
            start0(first), start1(), start2(), start3();
            clock.read(6);
        };
        // What one block becomes; `more`: parts of the next one's scores to hand out on the way.
        auto finish_with = [&](auto more1, auto more2, auto more3) {
            finish_scores(p, s, total, delta, heads, shared, there, meta & 0xffff, turn ^ 1, p_stage, p_parity, thread, clock, more1, more2, more3);
            if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
        };
        auto finish = [&] {
            auto nothing = [] {};
            finish_with(nothing, nothing, nothing);
        };
        auto exchange = [&] {  // what was started, once it is there
            meta = load_u32(shared + AT_KEY_META + stage * 4);
            if (++stage == KEY_STAGES) stage = 0, parity ^= 1;
            wgmma_wait();
            clock.read(7);
            wait(bars + BAR_SENT_FREE * 8, turn ^ 1);
            asm volatile("" : "+r"(there));
            send<16, 16>(there + AT_SENT + thread * 16, other, there + AT_BARS + BAR_SENT_FULL * 8);
            send<0, 16>(there + AT_SENT + 8192 + thread * 16, other, there + AT_BARS + BAR_SENT_FULL * 8);
            if (thread == 0) bar_arrive_expecting(bars + BAR_SENT_FULL * 8, SENT_BYTES);
#pragma unroll
            for (int i = 0; i < 32; i++) s[i] = own[i];
            turn ^= 1;
            clock.read(3);
        };
        units.begin_item();
        wait(bars + (BAR_X_FULL + (items & 1)) * 8, items >> 1 & 1);
        clock.read(4);
        if (!DETERMINISTIC && !DELTA) load_head_values(heads, total, delta);
        wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
        clock.read(5);
        start(true);
        exchange();
#if DELTA
        wait(bars + BAR_OUT_FULL * 8, items & 1);
        clock.read(17);
        find_delta(shared + units.out() * UNIT, shared + units.x0() * UNIT, shared + units.x1() * UNIT, shared, there, items & 1, thread);
        bar_arrive_twice(bars + (BAR_UNIT_FREE + units.out()) * 8, thread & 31);  // as many arrivals as for all units
        __syncwarp();
        clock.read(18);
        load_found_values(p, shared, item, items, total, delta, thread);
        clock.read(19);
#endif
        while (!(meta & LAST)) {
            const bool at_once = is_past(bars + (BAR_KEY_FULL + stage) * 8, parity);
            if (!at_once) {
                finish();
                wait(bars + (BAR_KEY_FULL + stage) * 8, parity);
            }
            clock.read(5);
            if (at_once && !DETERMINISTIC) {
                start0(false);
                clock.read(6);
                finish_with(start1, start2, start3);
            } else {
                start(false);
                if (at_once) finish();
            }
            exchange();
        }
        finish();
        units.end_item();
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
        const u32 heads = (i & 3) * 16, row = i < 4 ? heads + (heads >= OWN_HEADS ? HEADS : 0) : OWN_HEADS + heads;
        wgmma_m64n128k16_ss<0, 1>(dkv, a + (((i >> 2) * P_TILE + heads * 2) >> 4), b + (row * 128 >> 4), i > 0);
    }
}

// dQ first: it gives the keys back. "bar.sync 1 and 2": whose turn it is with dKV.
DEVICE void product_warpgroup(const Call& p, u32 shared, u32 bars, int columns) {
    const int thread = fresh_thread() & 127;
    const int lane = thread & 31;
    const u32 p_free_there = remote(bars + BAR_P_FREE * 8, cluster_rank() ^ 1);
    int id_stage = 0, p_stage = 0;
    u32 turn = 0, p_parity = 0;
    Units units;
    Clock clock(shared, thread == 0);
    const int c0 = 12 + columns * 8;
    const bool whole = p.key_first == 0 && p.key_last == p.keys;
    const int first_slot = __shfl_sync(FULL_WARP, (thread >> 5) * 16, 0);  // of this warp's rows, known to be the same in all lanes
    if (columns == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
    for (int item = p.first(); item < p.items; item += p.step()) {
        float dq[64];
        int accumulate = 0;
        u32 meta;
        units.begin_item();
        const int batch = p.query(item) / p.queries;
        do {
            wait(bars + (BAR_P_FULL + p_stage) * 8, p_parity);
            const u32 ds = shared + AT_DS + p_stage * 2 * P_TILE, unit = units.next_keys(!accumulate);
            clock.read(c0);
            fence_async();
            float dkv[64];
            wgmma_begin();
            add_queries(dq, ds, shared + unit * UNIT + columns * 2 * KEY_CHUNK, accumulate);
            wgmma_end();
            meta = load_u32(shared + AT_ID_META + id_stage * 4);
            const int count = meta & 0xffff;
            const u32 ids = shared + AT_IDS + id_stage * SLOTS * 4;
            wgmma_wait();
            if (arrives(lane)) bar_arrive(bars + (BAR_UNIT_FREE + unit) * 8);
            clock.read(c0 + 1);
            asm volatile("bar.sync %0, 256;" ::"r"(1 + columns) : "memory");
            wgmma_begin();
            multiply_keys(dkv, ds, shared + (columns ? units.x1() : units.x0()) * UNIT);
            wgmma_end();
            asm volatile("bar.arrive %0, 256;" ::"r"(2 - columns) : "memory");
            wgmma_wait();
            if (arrives(lane)) {
                bar_arrive(bars + (BAR_P_FREE + p_stage) * 8);
                bar_arrive_remote(p_free_there + p_stage * 8);
                if (meta & LAST) bar_arrive(bars + (BAR_UNIT_FREE + units.x0()) * 8), bar_arrive(bars + (BAR_UNIT_FREE + units.x1()) * 8);
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
            if (arrives(lane)) bar_arrive(bars + (BAR_ID_FREE + id_stage) * 8);
            clock.read(c0 + 3);
            accumulate = 1;
            turn ^= 1;
            if (++p_stage == P_STAGES) p_stage = 0, p_parity ^= 1;
            if (++id_stage == ID_STAGES) id_stage = 0;
        } while (!(meta & LAST));
        units.end_item();
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
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap grad_out_map, const __grid_constant__ TensorMap out_map,
    const element* kv, const int* ids, const float* lse, const float* sinks, float* log2_total, float* delta, element* grad_q, void* sums,
    int* exponents, i64 kv_stride_b, i64 kv_stride_k, int items, int queries, int heads, int keys, int slots, int key_first, int key_last,
    int parts, float scale, float scale2) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = (u32)__cvta_generic_to_shared(dynamic), bars = shared + AT_BARS;
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x >> 5, 0);
    const Call p = {&q_map, &grad_out_map, &out_map, kv, ids, lse, sinks, log2_total, delta, grad_q, sums, exponents, kv_stride_b,
                    kv_stride_k, queries, heads, keys, slots, items, key_first, key_last, parts, scale, scale2};
    if (threadIdx.x == 0) {
        for (int i = 0; i < ITEM_STAGES; i++) bar_init(bars + (BAR_X_FULL + i) * 8, 1);
        for (int i = 0; i < KEY_STAGES; i++) bar_init(bars + (BAR_KEY_FULL + i) * 8, GATHER_WARPS * 32 + 1);
        for (int i = 0; i < UNITS; i++) bar_init(bars + (BAR_UNIT_FREE + i) * 8, of_warps(8));
        for (int i = 0; i < ID_STAGES; i++) {
            bar_init(bars + (BAR_ID_FULL + i) * 8, of_warps(1));
            bar_init(bars + (BAR_ID_FREE + i) * 8, of_warps(GATHER_WARPS + 8));
        }
        bar_init(bars + BAR_SENT_FULL * 8, 1);
        bar_init(bars + BAR_SENT_FREE * 8, of_warps(4));
        for (int i = 0; i < P_STAGES; i++) bar_init(bars + (BAR_P_FULL + i) * 8, of_warps(4)), bar_init(bars + (BAR_P_FREE + i) * 8, of_warps(16));
        for (int i = 0; i < 2 * (HEAD_BLOCKS - 1); i++)
            bar_init(bars + (BAR_TRADE_FULL + i) * 8, 1), bar_init(bars + (BAR_TRADE_FREE + i) * 8, of_warps(4));
        if (DELTA) bar_init(bars + BAR_OUT_FULL * 8, 1), bar_init(bars + BAR_PARTS_FULL * 8, of_warps(2));
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
        if (warp == 15) index_warp(p, shared, bars);
        else gather_warp(p, shared, bars, warp - 12);
    }
    __syncwarp();
    cluster_sync();  // the other block may still write here, and arrive at barriers
#ifdef CLOCKS
    if (threadIdx.x < 32) atomicAdd(&clock_sums[threadIdx.x], (u64)load_u32(shared + AT_CLOCKS + threadIdx.x * 4));
#endif
}
