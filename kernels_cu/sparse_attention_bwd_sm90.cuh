// Instructions that the sparse attention backward adds to common_hopper.cuh: the other block of a cluster, vector reductions
// to global memory.
#pragma once
#include "common_wgmma.cuh"

// ---- Clusters ------------------------------------------------------------------------------------------

DEVICE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The place of `address` in the shared memory of block `rank` of the cluster. Offsets from it may be added.
DEVICE u32 remote(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// All threads of the cluster: what they wrote before is visible after.
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
DEVICE void bar_arrive_remote(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
// 16 bytes into another block's shared memory, OFFSET bytes from `to`; `bar` there counts them.
template <int OFFSET>
DEVICE void store_async(u32 to, u32 a, u32 b, u32 c, u32 d, u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0+%6], {%1, %2, %3, %4}, [%5];" ::"r"(to), "r"(a),
                 "r"(b), "r"(c), "r"(d), "r"(bar), "n"(OFFSET)
                 : "memory");
}
// COUNT of a thread's floats from x[FIRST] on, 2 KB between every four.
template <int FIRST, int COUNT, int N = 0, int SIZE>
DEVICE void send(u32 to, const float (&x)[SIZE], u32 bar) {
    store_async<N * 512>(to, __float_as_uint(x[FIRST + N]), __float_as_uint(x[FIRST + N + 1]), __float_as_uint(x[FIRST + N + 2]),
                         __float_as_uint(x[FIRST + N + 3]), bar);
    if constexpr (N + 4 < COUNT) send<FIRST, COUNT, N + 4>(to, x, bar);
}
DEVICE void store_async1(u32 to, u32 x, u32 bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(x), "r"(bar) : "memory");
}
// bar_wait for barriers that other blocks arrive at. With MOST_TRIES a wait that never ends becomes a trap.
DEVICE void wait(u32 bar, u32 parity) {
#ifdef MOST_TRIES
    u32 done = 0;
    for (int tries = 0; !done; tries++) {
        asm volatile(
            "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
        if (tries > MOST_TRIES) asm volatile("trap;");
    }
#else
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra GO_ON;\nbra AGAIN;\nGO_ON:\n}\n" ::"r"(bar), "r"(parity)
        : "memory");
#endif
}

// Whether a wait would end at once: one answer for the score warpgroup, since it decides which wgmma comes next, and those
// are the warpgroup's. "barrier 3".
DEVICE bool is_past(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p, q;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "barrier.cta.red.and.pred q, 3, 128, p;\nselp.u32 %0, 1, 0, q;\n}\n"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done;
}

// ---- Shared and global memory --------------------------------------------------------------------------

DEVICE u32 load_u32(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
DEVICE void store_u32(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE void load_float2(u32 from, float& a, float& b) {
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(a), "=f"(b) : "r"(from) : "memory");
}
DEVICE void load_float4(u32 from, float& a, float& b, float& c, float& d) {
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(from) : "memory");
}
DEVICE void store_u32x4(u32 to, const u32 (&v)[4]) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
template <int OFFSET>
DEVICE void add4(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0+%5], {%1,%2,%3,%4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d), "n"(OFFSET) : "memory");
}
template <int OFFSET>
DEVICE void add1(i64* to, i64 x) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0+%2], %1;" ::"l"(to), "l"(x), "n"(OFFSET) : "memory");
}
// The halves of a cluster's next Q and dO to L2.
DEVICE void prefetch_box(const TensorMap* map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
DEVICE float exp2_fast(float x) {
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// q[i] of lane c of a quad becomes q[c] of lane i.
DEVICE void transpose_quad(u32 (&q)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
    const u32 s0 = __shfl_xor_sync(FULL_WARP, odd ? q[0] : q[1], 1), s1 = __shfl_xor_sync(FULL_WARP, odd ? q[2] : q[3], 1);
    q[0] = odd ? s0 : q[0], q[1] = odd ? q[1] : s0, q[2] = odd ? s1 : q[2], q[3] = odd ? q[3] : s1;
    const u32 t0 = __shfl_xor_sync(FULL_WARP, high ? q[0] : q[2], 2), t1 = __shfl_xor_sync(FULL_WARP, high ? q[1] : q[3], 2);
    q[0] = high ? t0 : q[0], q[2] = high ? q[2] : t0, q[1] = high ? t1 : q[1], q[3] = high ? q[3] : t1;
}
