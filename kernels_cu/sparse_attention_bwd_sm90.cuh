// Instructions that the sparse attention backward adds to common_hopper.cuh: the other block of a cluster, products with
// both operands in shared memory, vector reductions to global memory.
#pragma once
#include "common_hopper.cuh"

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

// ---- Warpgroup products --------------------------------------------------------------------------------

// Waits until at most LEFT of the groups of products that were started last are on their way.
template <int LEFT>
DEVICE void wgmma_wait_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// d[64 x 128] += A[64 x 16] B[16 x 128], both from shared memory. A_T: A lies M-major; B_T: B lies N-major.
template <int A_T, int B_T>
DEVICE void wgmma_m64n128k16_ss(float (&d)[64], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT_PTX "." ELEMENT_PTX " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate), "n"(A_T), "n"(B_T));
}

// [d | e] of 64 x 128 += A[64 x 16] B[16 x 128], both from shared memory and K-major.
DEVICE void wgmma_m64n128k16_ss(float (&d)[32], float (&e)[32], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT_PTX "." ELEMENT_PTX " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(e[0]), "+f"(e[1]), "+f"(e[2]), "+f"(e[3]), "+f"(e[4]), "+f"(e[5]), "+f"(e[6]), "+f"(e[7]),
          "+f"(e[8]), "+f"(e[9]), "+f"(e[10]), "+f"(e[11]), "+f"(e[12]), "+f"(e[13]), "+f"(e[14]), "+f"(e[15]),
          "+f"(e[16]), "+f"(e[17]), "+f"(e[18]), "+f"(e[19]), "+f"(e[20]), "+f"(e[21]), "+f"(e[22]), "+f"(e[23]),
          "+f"(e[24]), "+f"(e[25]), "+f"(e[26]), "+f"(e[27]), "+f"(e[28]), "+f"(e[29]), "+f"(e[30]), "+f"(e[31])
        : "l"(a), "l"(b), "r"(accumulate));
}
// d[64 x 64] += A[64 x 16] B[16 x 64]: A and B from shared memory, both K-major.
DEVICE void wgmma_m64n64k16_ss(float (&d)[32], u64 a, u64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT_PTX "." ELEMENT_PTX " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31"
        "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(accumulate));
}
