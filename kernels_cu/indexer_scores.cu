// Indexer scores on mma.sync: sm_80 and later, E 64 or 128, bfloat16 or float16, any number of heads.
// archs: 80 86 89 90 100 120
// hot: indexer_scores
//
//     score[i,j] = sum_h relu(q[i,h] . k[j]) scale w[i,h]      for entries j < limit_i, else -inf
//     limit_i    = before + (phase + i) / ratio, at most the number of entries
//
// Entries are the rows of the products and heads their columns: the sum over heads stays inside a thread, plus one exchange
// in its quad. A warp keeps its 32 entries in registers; queries pass through shared memory, HEADS heads at a time.
//
// Grid: one block per 128 entries and block_queries queries, entry blocks of the same queries side by side.
// Block: 128 threads, 32 entries a warp.
// Shared memory (dynamic): two stages of [HEADS][E], 16-byte chunks swizzled by XOR with the row; two of HEADS weights.
// Determinism: no atomics; a score is one sum in an order that E and the number of heads decide.
//
// Budget at I 64, E 128 on an H200: a warp reads 16 KB a query for 64 products of 16 x 8 x 16 twice over: shared memory and
// tensor cores (mma.sync, 60 % of wgmma's rate) are about even, 850 to 1024 clocks for 256 entries and a query a
// multiprocessor: S32768 P8192 at least 4.6 ms. Measured there, kernel alone: 6.44 to 7.02 ms in four runs, GEMM 780 to
// 795 TFLOP/s.
#include "common_mma.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef INDEX_DIM
#define INDEX_DIM 128
#endif
#ifndef HEADS
#define HEADS 64
#endif
typedef ELEMENT Element;

static const int THREADS = 128, ENTRIES = 128;
static const int STEPS = INDEX_DIM / 16, ROW_CHUNKS = INDEX_DIM / 8;
static const u32 ROW_BYTES = INDEX_DIM * 2, STAGE_BYTES = HEADS * ROW_BYTES, AT_WEIGHTS = 2 * STAGE_BYTES;
static_assert(HEADS % 32 == 0 && HEADS <= THREADS, "groups of 32 heads; a thread brings one weight");
#ifdef SHARED_BYTES  // what the launch asks for
static_assert(AT_WEIGHTS + 2 * HEADS * 4 == SHARED_BYTES, "shared memory");
#endif
#define MINUS_INFINITY __int_as_float(0xff800000)

// ---- Instructions --------------------------------------------------------------------------------------

// 16 bytes to shared memory in the background; zeros, and nothing read, unless `exists`.
DEVICE void copy16(u32 to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}

DEVICE float relu(float x) {  // keeps NaN
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

struct Call {
    const u16* q;
    const void* weights;
    i64 q_stride_h, w_stride_h;
    int heads, weight_type;
    float scale;
};

DEVICE float load_weight(const Call& p, i64 at) {
    if (p.weight_type == 0) return __ldg((const float*)p.weights + at);
    const u16 bits = __ldg((const u16*)p.weights + at);
    return p.weight_type == 1 ? BFloat16::load(&bits) : Float16::load(&bits);
}

// Starts copying heads h0 .. h0 + HEADS - 1 of a query; heads that do not exist are zeros.
DEVICE void copy_heads(const Call& p, u32 stage, i64 q_at, int h0) {
#pragma unroll
    for (int x = 0; x < HEADS * ROW_CHUNKS / THREADS; x++) {
        const int at = threadIdx.x + x * THREADS, h = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
        const bool exists = h0 + h < p.heads;
        copy16(stage + h * ROW_BYTES + ((chunk ^ (h & 7)) << 4), p.q + q_at + (exists ? h0 + h : 0) * p.q_stride_h + chunk * 8, exists);
    }
}

// ---- The kernel ----------------------------------------------------------------------------------------

// q, k: 16-byte aligned rows; strides in elements. weights: weight_type 0 float32, 1 bfloat16, 2 float16. out [batch][queries]
// [entries]. fill: write -inf where nobody looks.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    indexer_scores(const u16* __restrict__ q, const u16* __restrict__ k, const void* __restrict__ weights, float* __restrict__ out, i64 q_stride_b,
                   i64 q_stride_s, i64 q_stride_h, i64 k_stride_b, i64 k_stride_p, i64 w_stride_b, i64 w_stride_s, i64 w_stride_h,
                   u32 before, u32 phase, u32 ratio, int queries, int heads, int entries, int block_queries, int weight_type, int fill,
                   float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    float* const shared_weights = (float*)(memory + AT_WEIGHTS);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 entry_blocks = (entries - 1) / ENTRIES + 1, query_blocks = (queries - 1) / block_queries + 1;
    const u32 row0 = blockIdx.x % entry_blocks * ENTRIES, block = blockIdx.x / entry_blocks;
    const int b = block / query_blocks, q0 = block % query_blocks * block_queries, end = min(queries - q0, block_queries) + q0;
    const Call p = {q, weights, q_stride_h, w_stride_h, heads, weight_type, scale};

    // This lane's entry of those that it writes, and whether there is one.
    const u32 first = row0 + warp * 32, mine = first + (lane >> 1 & 1) * 16 + (lane & 1) * 8 + (lane >> 2);
    float* to = out + ((i64)b * queries + q0) * entries + mine;
    int i = q0;
    for (; i < end; i++, to += entries) {  // queries that see nothing of the block
        if (row0 < before + (phase + (u32)i) / ratio) break;
        if (fill && mine < (u32)entries) *to = MINUS_INFINITY;
    }
    if (i == end) return;

    // Entries as A operands; those that do not exist are zeros.
    u32 a[2][STEPS][4];
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 row = first + t * 16 + e * 8 + (lane >> 2);
            const u16* from = k + b * k_stride_b + (i64)row * k_stride_p + (lane & 3) * 2;
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                a[t][s][e] = row < (u32)entries ? __ldg((const u32*)(from + s * 16)) : 0;
                a[t][s][e + 2] = row < (u32)entries ? __ldg((const u32*)(from + s * 16 + 8)) : 0;
            }
        }

    const u32 b_at = shared + (lane & 7) * ROW_BYTES, b_chunk = lane >> 3, x = lane & 7;
    i64 q_at = b * q_stride_b + i * q_stride_s, w_at = b * w_stride_b + i * w_stride_s;
    int stage = 0;
    copy_heads(p, shared, q_at, 0);
    float weight = threadIdx.x < HEADS && threadIdx.x < heads ? load_weight(p, w_at + threadIdx.x * w_stride_h) : 0.f;
    float sums[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
    int h0 = 0;
#pragma unroll 1
    while (i < end) {
        if (threadIdx.x < HEADS) shared_weights[stage * HEADS + threadIdx.x] = __fmul_rn(weight, scale);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();  // this stage is complete; nobody reads the other one
        const u32 limit = min(before + (phase + (u32)i) / ratio, (u32)entries);
        const int now_h0 = h0, now = stage;
        const bool last = h0 + HEADS >= heads;
        // The next stage: further heads, or the next query.
        h0 = last ? 0 : h0 + HEADS;
        if (last) q_at += q_stride_s, w_at += w_stride_s, i++;
        stage ^= 1;
        if (i < end) {
            copy_heads(p, shared + stage * STAGE_BYTES, q_at, h0);
            const int h = h0 + threadIdx.x;
            weight = threadIdx.x < HEADS && h < heads ? load_weight(p, w_at + h * w_stride_h) : 0.f;
        }
        const bool seen = first < limit;  // by the warp
        if (seen) {
#pragma unroll 1
            for (int g = 0; g < HEADS; g += 32) {
                float c[2][4][4];
#pragma unroll
                for (int t = 0; t < 2; t++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++) c[t][j][e] = 0.f;
                const u32 from = b_at + now * STAGE_BYTES + g * ROW_BYTES;
#pragma unroll
                for (int s = 0; s < STEPS; s += 2)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        u32 r[4];  // 8 heads by 32 columns
                        load_matrices(r, from + j * 8 * ROW_BYTES + (((s * 2 + b_chunk) ^ x) << 4));
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            multiply<Element>(c[t][j], a[t][s], r[0], r[1]);
                            multiply<Element>(c[t][j], a[t][s + 1], r[2], r[3]);
                        }
                    }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int h = g + j * 8 + (lane & 3) * 2;
                    const float2 w = *(const float2*)(shared_weights + now * HEADS + h);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (now_h0 + h + e >= heads) continue;  // a head that does not exist adds nothing: its 0 * inf is NaN
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            sums[t][0] = __fmaf_rn(relu(c[t][j][e]), e ? w.y : w.x, sums[t][0]);
                            sums[t][1] = __fmaf_rn(relu(c[t][j][e + 2]), e ? w.y : w.x, sums[t][1]);
                        }
                    }
                }
            }
        }
        if (last) {
            // The quad's sums: lane t of it keeps row (t & 1) * 8 of tile t >> 1.
            float half[2];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const float other = __shfl_xor_sync(FULL_WARP, lane & 1 ? sums[t][0] : sums[t][1], 1);
                half[t] = (lane & 1 ? sums[t][1] : sums[t][0]) + other;
                sums[t][0] = sums[t][1] = 0.f;
            }
            const float other = __shfl_xor_sync(FULL_WARP, lane & 2 ? half[0] : half[1], 2);
            const float score = (lane & 2 ? half[1] : half[0]) + other;
            if (mine < (u32)entries && (seen || fill)) *to = mine < limit ? score : MINUS_INFINITY;
            to += entries;
        }
    }
}
