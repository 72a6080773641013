// Products of 16 x 8 tiles by a warp, sm_80 and later: mma.sync and the loads of its operands.
#pragma once
#include "common.cuh"

// Four 8 x 8 matrices of 16-bit elements; `at` is this lane's row in shared memory.
DEVICE void load_matrices(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

// The same, each matrix transposed.
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

#define MULTIPLY(TYPE)                                                                                           \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                      \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// c[16][8] += a[16][16] b[16][8]
template <typename E> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void multiply<BFloat16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { MULTIPLY("bf16"); }
template <> DEVICE void multiply<Float16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { MULTIPLY("f16"); }
