// Shared by Hopper's sparse attention forward kernels: small instructions, how a warp finds the rows that it gathers, how
// columns of the output are stored.
#pragma once
#include "common_hopper.cuh"

static const u32 LAST = 0x10000;  // flag beside a block's count of keys
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
// Read anew where it is used, so that it holds no register in between.
DEVICE int lane_of_32() {
    u32 x;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
    return x;
}

// A query's valid ids in slot order: 32 slots at a time, the next 32 on their way.
struct Scan {
    const int* row;
    int slots, next_slot, next, id, rank, used, count;  // rank: of this lane's id among the valid ones of the 32, or -1
};

DEVICE void scan_load(Scan& w) {
    const int slot = w.next_slot + lane_of_32();
    w.next = slot < w.slots ? __ldg(w.row + slot) : -1;
}
// Also asks L2 for the row of a later item: every 32 ids are a line of their own, and would each cost a way to DRAM.
DEVICE void scan_begin(Scan& w, const int* row, int slots, const int* later) {
    w.row = row, w.slots = slots, w.next_slot = 0, w.used = w.count = 0;
    scan_load(w);
    for (int slot = lane_of_32() * 32; slot < slots; slot += 1024) asm volatile("prefetch.global.L2 [%0];" ::"l"(later + slot));
}
DEVICE void scan_open(Scan& w, u32 keys) {
    w.id = w.next;
    const bool valid = (u32)w.id < keys;  // negative ids are large as unsigned
    const u32 mask = __ballot_sync(FULL_WARP, valid);
    w.rank = valid ? __popc(mask & ((1u << lane_of_32()) - 1)) : -1;
    w.count = __popc(mask);
    w.used = 0;
    w.next_slot += 32;
    scan_load(w);
}
// The next block of up to SLOTS ids: their count, and LAST where none follow. Ids row0 to row0 + SHARE - 1 of the block go to
// shared memory at `ids`, for this warp alone.
template <int SLOTS, int SHARE>
DEVICE u32 scan_block(Scan& w, u32 keys, u32 ids, int row0) {
    int have = 0;
    __syncwarp();  // the warp has read the last block's ids
    while (true) {
        while (w.used == w.count && w.next_slot < w.slots) scan_open(w, keys);
        if (have == SLOTS || w.used == w.count) break;
        const int at = w.rank - w.used + have - row0;
        if (w.rank >= w.used && (u32)at < (u32)SHARE) store_u32(ids + at * 4, w.id);
        const int taken = min(w.count - w.used, SLOTS - have);
        w.used += taken, have += taken;
    }
    __syncwarp();  // the ids are there for the whole warp
    return have | (w.used == w.count ? LAST : 0);
}
// Eight of those ids.
DEVICE void load_ids(int (&id)[8], u32 from) {
#pragma unroll
    for (int k = 0; k < 8; k += 4)
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(id[k]), "=r"(id[k + 1]), "=r"(id[k + 2]), "=r"(id[k + 3])
                     : "r"(from + k * 4)
                     : "memory");
}

// 128 columns of O * share. The lanes of a quad trade 2-column pieces, so that each stores 16 bytes; everything is packed
// first, so that no store waits for registers that another is still reading.
template <typename Element, int HEAD_DIM>
DEVICE void store_columns(const float (&o)[64], float share0, float share1, typename Element::storage* out, int row, int heads, int lane) {
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
