// Shared by every kernel file: integer names, element types, 16-byte vectors, small arithmetic.
//
// NVRTC has no <stdint.h> and this file includes nothing, so that a kernel needs no CUDA headers on the
// user's machine. The 16-bit float conversions are single instructions from sm_80 on.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define FULL_WARP 0xffffffffu

// ---- Element types -------------------------------------------------------------------------------------
// Each has `storage`, PER_CHUNK (elements in 16 bytes), load and store of one element, and unpack and pack of
// a 16-byte chunk. Arithmetic is float32; a store rounds once, to nearest even. Kernels are specialised by
// -DELEMENT=Float32, BFloat16 or Float16.

struct Float32 {
    typedef float storage;
    static const int PER_CHUNK = 4;

    static DEVICE float load(const storage* from) { return *from; }
    static DEVICE void store(storage* to, float value) { *to = value; }

    static DEVICE void unpack(uint4 chunk, float* out) {
        out[0] = __uint_as_float(chunk.x);
        out[1] = __uint_as_float(chunk.y);
        out[2] = __uint_as_float(chunk.z);
        out[3] = __uint_as_float(chunk.w);
    }
    static DEVICE uint4 pack(const float* in) {
        return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]),
                          __float_as_uint(in[3]));
    }
};

struct BFloat16 {
    typedef u16 storage;
    static const int PER_CHUNK = 8;

    // bfloat16 is the upper half of a float32.
    static DEVICE float load(const storage* from) { return __uint_as_float((u32)*from << 16); }
    static DEVICE void store(storage* to, float value) {
        u16 bits;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        *to = bits;
    }
    static DEVICE void unpack2(u32 pair, float* out) {
        out[0] = __uint_as_float(pair << 16);
        out[1] = __uint_as_float(pair & 0xffff0000u);
    }
    static DEVICE u32 pack2(float low, float high) {
        u32 pair;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    static DEVICE void unpack(uint4 chunk, float* out) {
        unpack2(chunk.x, out);
        unpack2(chunk.y, out + 2);
        unpack2(chunk.z, out + 4);
        unpack2(chunk.w, out + 6);
    }
    static DEVICE uint4 pack(const float* in) {
        return make_uint4(pack2(in[0], in[1]), pack2(in[2], in[3]), pack2(in[4], in[5]), pack2(in[6], in[7]));
    }
};

struct Float16 {
    typedef u16 storage;
    static const int PER_CHUNK = 8;

    static DEVICE float load(const storage* from) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(*from));
        return value;
    }
    static DEVICE void store(storage* to, float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        *to = bits;
    }
    static DEVICE void unpack2(u32 pair, float* out) {
        asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high; }"
            : "=f"(out[0]), "=f"(out[1])
            : "r"(pair));
    }
    static DEVICE u32 pack2(float low, float high) {
        u32 pair;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
        return pair;
    }
    static DEVICE void unpack(uint4 chunk, float* out) {
        unpack2(chunk.x, out);
        unpack2(chunk.y, out + 2);
        unpack2(chunk.z, out + 4);
        unpack2(chunk.w, out + 6);
    }
    static DEVICE uint4 pack(const float* in) {
        return make_uint4(pack2(in[0], in[1]), pack2(in[2], in[3]), pack2(in[4], in[5]), pack2(in[6], in[7]));
    }
};

// ---- Arithmetic ----------------------------------------------------------------------------------------

// 1/x in one MUFU instruction, at most 1 ulp off; 1/0 = inf, 1/inf = 0, subnormals count as 0.
DEVICE float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
