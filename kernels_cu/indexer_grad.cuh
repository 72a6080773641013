// Shared by the indexer's gradient kernels: numbers of any float type, mma.sync and its loads, copies, additions to memory.
#pragma once
#include "common_mma.cuh"

// ---- Numbers whose type is known at run time -----------------------------------------------------------
// Incoming gradients and head weights are few beside q and keys: one branch an element is cheaper than a kernel a type.

static const int KIND_FLOAT32 = 0, KIND_BFLOAT16 = 1, KIND_FLOAT16 = 2;

DEVICE float load_number(const void* from, i64 index, int kind) {
    if (kind == KIND_FLOAT32) return __ldg((const float*)from + index);
    const u16 bits = __ldg((const u16*)from + index);
    return kind == KIND_BFLOAT16 ? BFloat16::load(&bits) : Float16::load(&bits);
}
DEVICE void store_number(void* to, i64 index, int kind, float value) {
    if (kind == KIND_FLOAT32) ((float*)to)[index] = value;
    else if (kind == KIND_BFLOAT16) BFloat16::store((u16*)to + index, value);
    else Float16::store((u16*)to + index, value);
}
DEVICE i64 load_id(const void* ids, i64 index, int wide) {
    return wide ? __ldg((const i64*)ids + index) : (i64)__ldg((const int*)ids + index);
}

// The slots of one query: ids, and incoming gradients beside them.
struct Slots {
    const void *ids, *grad_scores;  // ids null: slot t is entry t
    i64 id_at, g_at, g_stride;      // elements
    int count, g_kind, ids_wide, key_first, key_last;
};

// Ids and incoming gradients of slots first, first + 32, ...; id -1 and g unspecified where a slot has none in [key_first,
// key_last). The choices of type stand outside the loops, so that all loads are on their way together.
template <int EACH> DEVICE void load_slots(const Slots& p, int first, int (&id)[EACH], float (&g)[EACH]) {
    if (p.ids == nullptr) {
#pragma unroll
        for (int u = 0; u < EACH; ++u) id[u] = first + u * 32 < p.count ? first + u * 32 : -1;
    } else if (p.ids_wide) {
        i64 wide[EACH];
#pragma unroll
        for (int u = 0; u < EACH; ++u) wide[u] = first + u * 32 < p.count ? __ldg((const i64*)p.ids + p.id_at + first + u * 32) : -1;
#pragma unroll
        for (int u = 0; u < EACH; ++u) id[u] = wide[u] >= 0 && wide[u] < p.key_last ? (int)wide[u] : -1;
    } else {
#pragma unroll
        for (int u = 0; u < EACH; ++u) id[u] = first + u * 32 < p.count ? __ldg((const int*)p.ids + p.id_at + first + u * 32) : -1;
    }
    const i64 at = p.g_at + first * p.g_stride, step = 32 * p.g_stride;
    if (p.g_kind == KIND_FLOAT32) {
#pragma unroll
        for (int u = 0; u < EACH; ++u) g[u] = first + u * 32 < p.count ? __ldg((const float*)p.grad_scores + at + u * step) : 0.f;
    } else {
        u16 bits[EACH];
#pragma unroll
        for (int u = 0; u < EACH; ++u) bits[u] = first + u * 32 < p.count ? __ldg((const u16*)p.grad_scores + at + u * step) : (u16)0;
#pragma unroll
        for (int u = 0; u < EACH; ++u) g[u] = p.g_kind == KIND_BFLOAT16 ? BFloat16::load(&bits[u]) : Float16::load(&bits[u]);
    }
#pragma unroll
    for (int u = 0; u < EACH; ++u) id[u] = id[u] >= p.key_first && id[u] < p.key_last ? id[u] : -1;
}

// ---- Shared memory -------------------------------------------------------------------------------------

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void store_u32(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE u32 load_u32(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
DEVICE void store_float(u32 to, float v) { store_u32(to, __float_as_uint(v)); }
DEVICE float load_float(u32 from) { return __uint_as_float(load_u32(from)); }
DEVICE float2 load_float2(u32 from) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

// 16 bytes to shared memory in the background; zeros, and nothing read, unless `exists`.
DEVICE void copy16_if(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---- Arithmetic ----------------------------------------------------------------------------------------

// max(x, 0), NaN kept.
DEVICE float relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

// The power of two that brings numbers of magnitude up to `largest` near 1, and its inverse: products with it are exact.
// 1 where there is nothing to gain (0) or to save (infinities, NaN).
struct Power {
    float down, up;
};
DEVICE Power power_of(float largest) {
    const int e = (int)(__float_as_uint(largest) >> 23 & 0xff);
    if (e == 0 || e == 255) return {1.f, 1.f};
    const int shift = min(max(e - 127, -126), 126);
    return {__uint_as_float((u32)(127 - shift) << 23), __uint_as_float((u32)(127 + shift) << 23)};
}

// The larger magnitude; NaN counts as infinity.
DEVICE float larger(float a, float b) {
    const u32 x = __float_as_uint(a) & 0x7fffffff, y = __float_as_uint(b) & 0x7fffffff;
    return __uint_as_float(min(max(x, y), 0x7f800000u));
}

// ---- Lists of valid slots ------------------------------------------------------------------------------

// A barrier of all WARPS warps, which may meet here from different places of the program: __syncthreads() may not, and
// synccheck takes "bar.sync" of all threads for one.
template <int WARPS>
DEVICE void block_barrier() {
    asm volatile("barrier.sync 2, %0;" ::"n"(WARPS * 32) : "memory");
}

// Writes ids and incoming gradients of valid slots to shared memory at_id and at_g, in slot order: warp w holds slots of
// ranks w EACH 32 on, as load_slots left them. Returns how many; `largest` becomes the largest |g| of them and of itself.
// All WARPS warps; at_part: 2 WARPS words. The caller's barrier before: nobody reads the lists any more.
template <int WARPS, int EACH>
DEVICE int build_list(const int (&id)[EACH], const float (&g)[EACH], u32 at_id, u32 at_g, u32 at_part, float& largest, int warp, int lane) {
    int count = 0;
    float top = 0.f;
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        if (id[u] >= 0) top = larger(top, g[u]);
        count += __popc(__ballot_sync(FULL_WARP, id[u] >= 0));
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = larger(top, __shfl_xor_sync(FULL_WARP, top, step));
    if (lane == 0) {
        store_u32(at_part + warp * 4, (u32)count);
        store_float(at_part + (WARPS + warp) * 4, top);
    }
    block_barrier<WARPS>();  // counts and maxima of all warps are there
    int at = 0, total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int n = (int)load_u32(at_part + w * 4);
        at += w < warp ? n : 0;
        total += n;
        largest = larger(largest, load_float(at_part + (WARPS + w) * 4));
    }
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        const u32 valid = __ballot_sync(FULL_WARP, id[u] >= 0);
        if (id[u] >= 0) {
            const int to = at + __popc(valid & ((1u << lane) - 1));
            store_u32(at_id + to * 4, (u32)id[u]);
            store_float(at_g + to * 4, g[u]);
        }
        at += __popc(valid);
    }
    block_barrier<WARPS>();  // the list is complete
    return total;
}

// ---- Additions to memory -------------------------------------------------------------------------------

DEVICE void add4(float* to, float x, float y, float z, float w) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
#else
    atomicAdd(to, x);
    atomicAdd(to + 1, y);
    atomicAdd(to + 2, z);
    atomicAdd(to + 3, w);
#endif
}
