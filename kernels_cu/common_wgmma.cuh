// Warpgroup products of Hopper (sm_90a): d[64 x N] = or += A[64 x 16] B[16 x N] in float32, by the four warps of a warpgroup.
// ELEMENT is defined before this file is included.
//
// The four warps issue it together; each holds 16 rows of the accumulator. Issuing stalls once a few are on their way, so the
// instruction is asynchronous only within a short queue. An A operand in shared memory is read at half the rate of B: at
// N = 48 that costs 40 clocks where a register operand costs 24.
//
// A name says N and where A lies: _ss both operands in shared memory, _rs A in registers. Operands in shared memory are what
// common_hopper.cuh's operand() describes, K-major unless _t or a template argument says that they lie N-major (A: M-major).
// Accumulators are only in the registers once wgmma_wait() or wgmma_wait_but() has returned.
#pragma once
#include "common_hopper.cuh"

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Waits until at most LEFT of the groups of products that were started last are on their way.
template <int LEFT>
DEVICE void wgmma_wait_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// ---- The instruction's text and its lists of registers -------------------------------------------------

#define WRITTEN(x) "=f"(x)
#define CHANGED(x) "+f"(x)
#define OF_8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define OF_24(c, d) OF_8(c, d, 0), OF_8(c, d, 8), OF_8(c, d, 16)
#define OF_32(c, d) OF_24(c, d), OF_8(c, d, 24)
#define OF_64(c, d) OF_32(c, d), OF_8(c, d, 32), OF_8(c, d, 40), OF_8(c, d, 48), OF_8(c, d, 56)
#define OF_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define NAMES_24 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                            \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// accumulate: a number or the name of an operand, 0 where d is written; operands: A, B, the signs, what lies transposed.
#define WGMMA(n, names, accumulate, operands)                                                                      \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate ", 0;\n"                                                        \
    "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." ELEMENT_PTX "." ELEMENT_PTX " {" names "}, " operands ";\n}\n"

// ---- N = 48 --------------------------------------------------------------------------------------------

DEVICE void wgmma_m64n48k16_ss(float (&d)[24], u64 a, u64 b, int accumulate) {
    asm volatile(WGMMA("48", NAMES_24, "%26", "%24, %25, p, 1, 1, 0, 0") : OF_24(CHANGED, d) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_m64n48k16_rs(float (&d)[24], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(WGMMA("48", NAMES_24, "%29", "{%24, %25, %26, %27}, %28, p, 1, 1, 0") : OF_24(CHANGED, d) : OF_A(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_m64n48k16_rs_first(float (&d)[24], const u32 (&a)[4], u64 b) {
    asm volatile(WGMMA("48", NAMES_24, "0", "{%24, %25, %26, %27}, %28, p, 1, 1, 0") : OF_24(WRITTEN, d) : OF_A(a), "l"(b));
}

// ---- N = 64 --------------------------------------------------------------------------------------------

DEVICE void wgmma_m64n64k16_ss(float (&d)[32], u64 a, u64 b, int accumulate) {
    asm volatile(WGMMA("64", NAMES_32, "%34", "%32, %33, p, 1, 1, 0, 0") : OF_32(CHANGED, d) : "l"(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_m64n64k16_rs(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(WGMMA("64", NAMES_32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, 0") : OF_32(CHANGED, d) : OF_A(a), "l"(b), "r"(accumulate));
}
DEVICE void wgmma_m64n64k16_rs_first(float (&d)[32], const u32 (&a)[4], u64 b) {
    asm volatile(WGMMA("64", NAMES_32, "0", "{%32, %33, %34, %35}, %36, p, 1, 1, 0") : OF_32(WRITTEN, d) : OF_A(a), "l"(b));
}
DEVICE void wgmma_m64n64k16_rs_t(float (&d)[32], const u32 (&a)[4], u64 b, int accumulate) {
    asm volatile(WGMMA("64", NAMES_32, "%37", "{%32, %33, %34, %35}, %36, p, 1, 1, 1") : OF_32(CHANGED, d) : OF_A(a), "l"(b), "r"(accumulate));
}

// ---- N = 128 -------------------------------------------------------------------------------------------

template <int A_T, int B_T>
DEVICE void wgmma_m64n128k16_ss(float (&d)[64], u64 a, u64 b, int accumulate) {
    asm volatile(WGMMA("128", NAMES_64, "%66", "%64, %65, p, 1, 1, %67, %68")
                 : OF_64(CHANGED, d)
                 : "l"(a), "l"(b), "r"(accumulate), "n"(A_T), "n"(B_T));
}
// Columns 0 to 63 and 64 to 127 apart.
DEVICE void wgmma_m64n128k16_ss(float (&d)[32], float (&e)[32], u64 a, u64 b, int accumulate) {
    asm volatile(WGMMA("128", NAMES_64, "%66", "%64, %65, p, 1, 1, 0, 0")
                 : OF_32(CHANGED, d), OF_32(CHANGED, e)
                 : "l"(a), "l"(b), "r"(accumulate));
}
