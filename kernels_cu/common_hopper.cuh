// Hopper's own instructions (sm_90a): mbarriers, the tensor copy engine. Warpgroup matrix products: common_wgmma.cuh.
#pragma once
#include "common.cuh"

#define CONCATENATE_(a, b) a##b
#define CONCATENATE(a, b) CONCATENATE_(a, b)
#define PTX_BFloat16 "bf16"
#define PTX_Float16 "f16"
#define ELEMENT_PTX CONCATENATE(PTX_, ELEMENT)

// ---- mbarriers: addresses in shared memory -------------------------------------------------------------

DEVICE void bar_init(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void bar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// Arrives when all copies (cp.async) that this thread has started are done.
DEVICE void bar_arrive_after_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
DEVICE void bar_arrive_expecting(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Whether this lane arrives for its warp, after a __syncwarp() that orders what the other lanes did before it. racecheck does
// not see that order and reports every such hand-over: compiled for it, each lane arrives for itself.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
DEVICE constexpr int of_warps(int warps) { return EVERY_LANE_ARRIVES ? warps * 32 : warps; }  // how many arrivals that makes
DEVICE bool arrives(int lane) { return EVERY_LANE_ARRIVES || lane == 0; }
DEVICE void bar_arrive_twice(u32 bar, int lane) {  // two arrivals of the warp
    if (EVERY_LANE_ARRIVES || lane < 2) bar_arrive(bar);
    if (EVERY_LANE_ARRIVES) bar_arrive(bar);
}
DEVICE void bar_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra GO_ON;\nbra AGAIN;\nGO_ON:\n}\n" ::"r"(bar), "r"(parity)
        : "memory");
}

// ---- Copies --------------------------------------------------------------------------------------------

// 16 bytes to shared memory in the background; zeros, and nothing read, for bytes 0.
DEVICE void copy16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

struct alignas(64) TensorMap {
    u64 words[16];  // opaque: encoded by the driver on the host
};

DEVICE void load_box(u32 to, const TensorMap* map, int c0, int c1, int c2, int c3, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(bar)
        : "memory");
}

// Orders what this thread knows to be in shared memory by ordinary stores and cp.async before reads by wgmma.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Operands of warpgroup products (common_wgmma.cuh) ----------------------------------------------------------

// A 128-byte swizzled operand in shared memory. group: bytes between blocks of 8 rows (K-major) or 8 k (N-major); next:
// bytes between 64-column chunks of an N-major operand.
DEVICE u64 operand(u32 address, u32 next, u32 group) {
    return (u64)((address & 0x3ffff) >> 4) | ((u64)(next >> 4) << 16) | ((u64)(group >> 4) << 32) | (1ull << 62);
}
