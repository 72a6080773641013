// What leaves the product warpgroups of sparse_attention_bwd_sm90.cu: additions to the sums of keys, rows of grad_q.
#pragma once
#include "sparse_attention_bwd_sm90_layout.cuh"

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
        const float factor = row.value(__uint_as_float(load_u32(ids + AT_FACTORS - AT_IDS + slot * 4)));  // else never written
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
// Two quads trade, so that their 8 lanes have 32 columns of one row, then of the other, which lie side by side: of each 16
// columns a lane c has 2 c, 2 c + 1, 8 + 2 c and 9 + 2 c, and the sums keep them so, as four neighbours at 4 c
// (sparse_attention_bwd_finish.cu, QUADS, puts them in order).
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
    const bool upper = lane & 4;
    column += (upper ? 16 : 0) + (lane & 3) * 4;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
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
        const int slot = warp_row + e * 4 + (lane >> 2 & 6);
        const Row<SOME> row0(p, batch, ids, slot, count, column), row1(p, batch, ids, slot + 1, count, column);
        add_columns<SOME>(o, row0, row1, e);
        if (e == 0) __syncwarp();  // else ptxas trades the other rows meanwhile, and spills
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
    u32 there = remote(shared, cluster_rank() ^ 2);
    asm volatile("" : "+r"(there));  // what is computed from it is not kept across blocks
    const u32 full = (BAR_TRADE_FULL + columns) * 8, free = (BAR_TRADE_FREE + columns) * 8;
    const u32 at = AT_TRADE + columns * TRADE_BYTES + thread * 16;
    wait(bars + free, turn ^ 1);
    send<32, 32>(there + at, dkv, there + AT_BARS + full);
    if (thread == 0) bar_arrive_expecting(bars + full, TRADE_BYTES);
    wait(bars + full, turn);
    u32 read = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float a, b, c, d;
        load_float4(shared + at + i * 2048, a, b, c, d);
        dkv[i * 4] += a, dkv[i * 4 + 1] += b, dkv[i * 4 + 2] += c, dkv[i * 4 + 3] += d;
        read |= __float_as_uint(a);
    }
    __syncwarp();
    if (arrives(thread & 31)) bar_arrive_remote(there + AT_BARS + free + p.nothing_of(read));
}
#endif
