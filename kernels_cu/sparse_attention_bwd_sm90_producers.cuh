// What feeds the warpgroups of sparse_attention_bwd_sm90.cu: ids, rows of keys, Q and dO, out.
#pragma once
#include "sparse_attention_bwd_sm90_layout.cuh"

// ---- Index warp ----------------------------------------------------------------------------------------

static const int AHEAD = DETERMINISTIC ? 2 : 4;  // warp-wide reads of ids on their way

// Valid ids, in slot order, in blocks of SLOTS; the last block of an item carries the flag LAST.
DEVICE void index_warp(const Call& p, u32 shared, u32 bars) {
    const int lane = fresh_thread() & 31;
    int stage = 0;
    u32 parity = 1;
    for (int item = p.first(); item < p.items; item += p.step()) {
        const int* row = p.ids + (i64)p.query(item) * p.slots;
#if DETERMINISTIC
        const int* exponents = p.exponents + (i64)(p.query(item) / p.queries) * p.keys;
#endif
        int have = 0, next[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) next[u] = u * 32 + lane < p.slots ? __ldg(row + u * 32 + lane) : -1;
        if (lane < 16 && item + p.step() < p.items) {
            const int query = p.query(item + p.step()), h0 = p.first_head(item + p.step()) + (lane >> 1 & 1) * OWN_HEADS;
            const TensorMap* map = lane & 1 ? p.q_map : p.grad_out_map;
            prefetch_box(map, p.half() * HALF + (lane >> 2) * 64, h0, query % p.queries, query / p.queries);
            if (DELTA && (lane & 1)) prefetch_box(p.out_map, p.half() * HALF + (lane >> 2) * 64, h0, query % p.queries, query / p.queries);
        }
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
                    if (arrives(lane)) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
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
        if (arrives(lane)) bar_arrive(bars + (BAR_ID_FULL + stage) * 8);
        if (++stage == ID_STAGES) stage = 0, parity ^= 1;
    }
}

// ---- Gather warps --------------------------------------------------------------------------------------

// Q and dO of an item, 256 columns, two chunks a unit: rows of this block's 32 heads of Q, the same of dO, the other 32 heads
// of dO, then of Q. The second block of heads keeps its columns in another order, chunks 1 0 3 2: see trade(). Heads beyond H
// arrive as zeros. One thread.
DEVICE void load_heads(const Call& p, u32 x0, u32 x1, u32 bar, int item) {
    const int query = p.query(item), h0 = p.first_head(item), s = query % p.queries, b = query / p.queries;
    bar_arrive_expecting(bar, 2 * UNIT);
#pragma unroll 1
    for (int c = 0; c < 4; c++) {
        const u32 to = (c >> 1 ? x1 : x0) + (c & 1) * X_CHUNK;
        const int column = p.half() * HALF + (c ^ p.head_block()) * 64;
        const int own = h0 + p.half() * OWN_HEADS, other = h0 + (1 - p.half()) * OWN_HEADS;
        load_box(to, p.q_map, column, own, s, b, bar);
        load_box(to + BOX, p.grad_out_map, column, own, s, b, bar);
        load_box(to + 2 * BOX, p.grad_out_map, column, other, s, b, bar);
        load_box(to + 3 * BOX, p.q_map, column, other, s, b, bar);
    }
}

// The rows of `out` that delta is found from: this block's 32 heads, then the other's. One thread.
DEVICE void load_out(const Call& p, u32 to, u32 bar, int item) {
    const int query = p.query(item), h0 = p.first_head(item), s = query % p.queries, b = query / p.queries;
    fence_async();  // the unit may have held keys
    bar_arrive_expecting(bar, UNIT);
#pragma unroll 1
    for (int c = 0; c < 4; c++, to += KEY_CHUNK) {
        const int column = p.half() * HALF + (c ^ p.head_block()) * 64;
        load_box(to, p.out_map, column, h0 + p.half() * OWN_HEADS, s, b, bar);
        load_box(to + BOX, p.out_map, column, h0 + (1 - p.half()) * OWN_HEADS, s, b, bar);
    }
}

// Half a key row (512 bytes) is one copy of 16 bytes a lane. Groups of 8 rows go to the warps in turn; the first also starts
// the loads of Q and dO.
DEVICE void gather_warp(const Call& p, u32 shared, u32 bars, int warp) {
    const int lane = fresh_thread() & 31;
    int stage = 0, id_stage = 0, item_stage = 0;
    u32 id_parity = 0, given_back = (1 << UNITS) - 1;  // the parity of each unit's barrier: a phase of X is waited for, too
    Units units;
    Clock clock(shared, warp == 0 && lane == 0);
    for (int item = p.first(); item < p.items; item += p.step()) {
        const element* kv = p.kv + p.query(item) / p.queries * p.kv_stride_b + p.half() * HALF + lane * 8;
        units.begin_item();
        // L of this block's heads; delta, too, where it is given. p of a head that does not exist is 0.
        float total = INFINITE, delta = 0.f;
        if (warp == 0) {
            const int head = p.first_head(item) + p.half() * OWN_HEADS + lane;
            const i64 at = (i64)p.query(item) * p.heads + head;
            if (head < p.heads) {
#if DELTA
                total = log2_of_total(__ldg(p.lse + at), __ldg(p.sinks + head));
                p.log2_total[at] = total;
#else
                total = __ldg(p.log2_total + at), delta = __ldg(p.delta + at);
#endif
            }
        }
        wait(bars + (BAR_UNIT_FREE + units.x0()) * 8, given_back >> units.x0() & 1);
        wait(bars + (BAR_UNIT_FREE + units.x1()) * 8, given_back >> units.x1() & 1);
        given_back ^= 1 << units.x0() | 1 << units.x1();
        if (warp == 0) {
            const u32 heads = shared + AT_HEADS + item_stage * OWN_HEADS * 8 + lane * 4;
            store_u32(heads, __float_as_uint(total));
            if (!DELTA) store_u32(heads + OWN_HEADS * 4, __float_as_uint(delta));
            fence_async();  // the units may have held keys
            __syncwarp();
            if (lane == 0) load_heads(p, shared + units.x0() * UNIT, shared + units.x1() * UNIT, bars + (BAR_X_FULL + item_stage) * 8, item);
            __syncwarp();
        }
        item_stage ^= 1;
        bool more = true;
        for (bool first = true; more; first = false) {
            const u32 unit = units.next_keys(first);
            wait(bars + (BAR_ID_FULL + id_stage) * 8, id_parity);
            const u32 meta = load_u32(shared + AT_ID_META + id_stage * 4);
            clock.read(0);
            wait(bars + (BAR_UNIT_FREE + unit) * 8, given_back >> unit & 1);
            given_back ^= 1 << unit;
            clock.read(1);
            const u32 ids = shared + AT_IDS + id_stage * SLOTS * 4;
            const u32 tile = shared + unit * UNIT + ((lane >> 3) ^ p.head_block()) * KEY_CHUNK + ((lane & 7) << 4);
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
            if (arrives(lane)) bar_arrive(bars + (BAR_ID_FREE + id_stage) * 8);
            if (DELTA && first) {
                // The other warps do not wait: the unit may be given back before they come here. What they wait for next
                // comes after what this waits for.
                if (warp == 0) {
                    wait(bars + (BAR_UNIT_FREE + units.out()) * 8, given_back >> units.out() & 1);
                    if (lane == 0) load_out(p, shared + units.out() * UNIT, bars + BAR_OUT_FULL * 8, item);
                    __syncwarp();
                }
                given_back ^= 1 << units.out();
            }
            more = !(meta & LAST);
            if (++stage == KEY_STAGES) stage = 0;
            if (++id_stage == ID_STAGES) id_stage = 0, id_parity ^= 1;
            clock.read(2);
        }
        units.end_item();
    }
}
