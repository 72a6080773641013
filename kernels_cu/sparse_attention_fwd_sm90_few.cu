// Sparse attention forward on Hopper for few heads: mma.sync, D 512, bfloat16 or float16, 16 heads at a time.
// archs: 90a
// hot: sparse_attention_fwd_sm90_few
//
//     s[h,t]   = scale q[h] . kv[id_t]              over slots t with 0 <= id_t < keys, in slot order
//     out[h]   = sum_t exp(s_t) kv[id_t] / (sum_t exp(s_t) + exp(sink_h)),    lse[h] = log sum_t exp(s_t)
//
// Grid: persistent, one block a multiprocessor; an item is 16 heads of one query; block i works on items 2 i and 2 i + 1,
//   then on those 2 grid further.
// Block: 384 threads in roles that run ahead of each other, coupled by mbarriers:
//   two groups of four warps   an item each: a warp scores 8 of a block's 32 keys, all of Q in its registers, and then
//                              owns 128 columns of the output
//   gather warps               two a group: they scan the id row and copy Q, then the rows of each block, 16 bytes a lane
// Shared memory (dynamic, 201 KB): two rings of three blocks [32][512], rows swizzled in 128-byte pieces; p, double-buffered.
// Determinism: no atomics; every sum has a fixed order that the query's own valid ids decide. A query's bits do not
//   depend on B, S, its place or other queries.
//
// 16 heads fill no more than a quarter of a 64-row wgmma; an m16n8k16 they fill. p is formed with the maximum of the blocks
// before, in one barrier that also asks whether any score lies more than 2^8 above it; only then are maxima exchanged
// and p formed again. Masked slots cost a ballot; rows that a block lacks are zero-filled and read nothing.
//
// Floors on one H200 (S4096 T640, 510 valid ids a query): a row crosses shared memory three times (arrival, scores,
// values), 0.21 ms at 128 bytes a clock; 2.1 GB out of L2 take 0.23 to 0.28 ms at the 9.2 to 7.7 TB/s measured.
//
// Log (one H200, CUDA 13.0, medians of the kernel alone, GEMM 764 to 786 TFLOP/s in the same runs; the portable kernel takes
// 0.544 ms, with T160, 142 valid ids a query, 0.195):
//   1  as described, each block's scores, barrier and values in turn: expected 0.32, got 0.351 and 0.141.
//   2  values of a block side by side with the next block's scores, for more products in flight: expected 0.27, got 0.355.
//      It holds two of a stream's three blocks, which leaves one for the gather.
//   3  again as 1; four partial sums instead of two: 0.343 against 0.351, and no difference after 4.
//   4  ids scanned 32 at a time, lane numbers read anew where they are used, nothing spilled: 0.322 and 0.126.
//   32 heads as two items: 0.61; the portable kernel 0.674; the 64-row kernel 0.515, but it cannot read reversed views, which
//   would then differ in bits.
//   Up to here the last query came first. Since then, not timed in that run: the first query first (see 17 in
//   sparse_attention_fwd_sm90.cu), and L2 is asked for the ids of the item after (every 32 ids are
//   a line that a scan otherwise waits for).
//
// By ncu, commit faa342f, H16 T640: 0.320 ms; busy in percent of the peak: load/store data pipe 67, L2 62, issue slots 39, the
// arithmetic pipes below that, DRAM 9. So key rows on their way from L2 through shared memory to the products limit it, not
// arithmetic: 510 rows of 1 KB a query serve 16 heads here, and would be as many for 64.
#include "common_mma.cuh"
#include "sparse_attention_gather.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef SHARED_BYTES
#define SHARED_BYTES 205696
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int HEAD_DIM = 512, HEADS = 16;
static const int SLOTS = 32, STAGES = 3, THREADS = 384;  // keys of a block, blocks of each of two streams
static const int CONSUMER_REGISTERS = 232, GATHER_REGISTERS = 40;
static const u32 ROW_BYTES = HEAD_DIM * 2, STAGE_BYTES = SLOTS * ROW_BYTES, P_ROW_BYTES = 128, P_BYTES = HEADS * P_ROW_BYTES;
static const u32 AT_P = 2 * STAGES * STAGE_BYTES, AT_TOPS = AT_P + 4 * P_BYTES, AT_IDS = AT_TOPS + 2 * 4 * HEADS * 4;
static const u32 AT_META = AT_IDS + 4 * 16 * 4, AT_BARS = AT_META + 8 * 4;
static const int BAR_FULL = 0, BAR_FREE = 2 * STAGES, BARS = 4 * STAGES;
static const u32 SHARED = AT_BARS + BARS * 8;
static_assert(SHARED == SHARED_BYTES, "what cuda_sm90.py asks for");

DEVICE void multiply(float* c, const u32 (&a)[4], u32 b0, u32 b1) { multiply<Element>(*(float (*)[4])c, a, b0, b1); }
// Barrier of a group's four warps that tells whether any thread raised its flag.
DEVICE bool any_of_group(int group, bool flag) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 q, %2, 0;\nbarrier.cta.red.or.pred p, %1, 128, q;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(any)
                 : "r"(group + 1), "r"((u32)flag)
                 : "memory");
    return any;
}
DEVICE void group_barrier(int group) { asm volatile("barrier.cta.sync %0, 128;" ::"r"(group + 1) : "memory"); }

struct Call {
    const element *q, *kv;
    const float* sinks;
    const int* ids;
    element* out;
    float* lse;
    i64 q_stride_b, q_stride_s, q_stride_h, kv_stride_b, kv_stride_k;
    int queries, heads, keys, slots, head_blocks, items;
    float scale;
};

// ---- Gather warps --------------------------------------------------------------------------------------

// Warp `member` of two fills rows 16 member to 16 member + 15 of a stream's stages; a stage of Q begins each item.
DEVICE void gather_warp(const Call& p, u32 shared, u32 bars, int warp) {
    const int stream = warp >> 1, member = warp & 1, row0 = member * 16;
    const u32 ids = shared + AT_IDS + warp * 64;
    int stage = stream * STAGES;
    u32 parity = 1;
    for (int item = blockIdx.x * 2 + stream; item < p.items; item += gridDim.x * 2) {
        const int query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
        Scan w;
        const int later = min(item + (int)gridDim.x * 2, p.items - 1) / p.head_blocks;
        scan_begin(w, p.ids + (i64)query * p.slots, p.slots, p.ids + (i64)later * p.slots);
        bar_wait(bars + (BAR_FREE + stage) * 8, parity);
        {
            const int lane = lane_of_32();
            const element* q = p.q + query / p.queries * p.q_stride_b + query % p.queries * p.q_stride_s + h0 * p.q_stride_h + lane * 8;
            u32 tile = shared + stage * STAGE_BYTES + member * 8 * ROW_BYTES + ((lane & ~7) << 4) + ((lane & 7) << 4);
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const int h = member * 8 + k, bytes = h0 + h < p.heads ? 16 : 0;
                const element* row = q + (bytes ? h : 0) * p.q_stride_h;
                copy16((tile + k * ROW_BYTES) ^ (k << 4), row, bytes);
                copy16(((tile + k * ROW_BYTES) ^ (k << 4)) + 512, row + 256, bytes);
            }
            bar_arrive_after_copies(bars + (BAR_FULL + stage) * 8);
            if (member == 0 && lane_of_32() == 0) bar_arrive(bars + (BAR_FULL + stage) * 8);
            if (++stage == (stream + 1) * STAGES) stage -= STAGES, parity ^= 1;
        }
        const element* kv = p.kv + query / p.queries * p.kv_stride_b;
        bool more = true;
        while (more) {
            const u32 meta = scan_block<SLOTS, 16>(w, p.keys, ids, row0);
            const int have = meta & 0xffff;
            more = !(meta & LAST);
            bar_wait(bars + (BAR_FREE + stage) * 8, parity);
            const int lane = lane_of_32();
            u32 tile = shared + stage * STAGE_BYTES + row0 * ROW_BYTES + (lane << 4);
            int left = have - row0;
#pragma unroll 1
            for (int i = 0; i < 16; i += 8, tile += 8 * ROW_BYTES, left -= 8) {
                int id[8];
                load_ids(id, ids + i * 4);
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const int bytes = k < left ? 16 : 0;
                    const element* row = kv + (i64)(bytes ? id[k] : 0) * p.kv_stride_k + lane * 8;
                    copy16((tile + k * ROW_BYTES) ^ (k << 4), row, bytes);
                    copy16(((tile + k * ROW_BYTES) ^ (k << 4)) + 512, row + 256, bytes);
                }
            }
            bar_arrive_after_copies(bars + (BAR_FULL + stage) * 8);
            if (member == 0 && lane_of_32() == 0) {
                store_u32(shared + AT_META + stage * 4, meta);
                bar_arrive(bars + (BAR_FULL + stage) * 8);
            }
            if (++stage == (stream + 1) * STAGES) stage -= STAGES, parity ^= 1;
        }
    }
}

// ---- Consumers: two groups of four warps, each with a query of its own ---------------------------------------

// s = Q K^T of 16 heads by the warp's 8 keys. Two sums, so that each product waits for half as many.
DEVICE void score_product(float (&s)[4], const u32 (&q)[32][4], u32 k_at) {
    float part[2][4] = {};
#pragma unroll
    for (int d = 0; d < 32; d += 2) {
        u32 b[4];
        load_matrices(b, (k_at ^ ((d & 3) << 5)) + (d >> 2) * 128);
        multiply(part[0], q[d], b[0], b[1]);
        multiply(part[1], q[d + 1], b[2], b[3]);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) s[e] = part[0][e] + part[1][e];
}

// o[16][128] += P V of one block.
DEVICE void value_product(float (&o)[64], u32 p_at, u32 v_at) {
#pragma unroll
    for (int k = 0; k < SLOTS / 16; k++) {
        u32 a[4];
        load_matrices(a, p_at ^ (k << 5));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 b[4];
            load_matrices_transposed(b, (v_at ^ ((j & 3) << 5)) + (j >> 2) * 128 + k * 16 * ROW_BYTES);
            multiply(o + j * 8, a, b[0], b[1]);
            multiply(o + j * 8 + 4, a, b[2], b[3]);
        }
    }
}

// Where a lane reads: chunks of 16 bytes are XORed with row & 7, which is lane & 7 for all of these.
DEVICE u32 key_place(int warp) {  // of the warp's eight keys, for the scores
    const int lane = lane_of_32();
    return (warp * 8 + (lane & 7)) * ROW_BYTES + (((lane >> 3) ^ (lane & 7)) << 4);
}
DEVICE u32 value_place(int warp) {  // of the warp's 128 columns
    const int lane = lane_of_32();
    return (lane & 15) * ROW_BYTES + warp * 256 + (((lane >> 4) ^ (lane & 7)) << 4);
}
DEVICE u32 row_place(u32 row_bytes) {  // of 16 rows of Q or P
    const int lane = lane_of_32();
    return (lane & 15) * row_bytes + (((lane >> 4) ^ (lane & 7)) << 4);
}

DEVICE void consumer(const Call& p, u32 shared, int group, int warp) {
    const u32 bars = shared + AT_BARS;
    const u32 tops = shared + AT_TOPS + group * 4 * HEADS * 4;          // [4 warps][16]: maxima, at the end sums
    const u32 p_base = shared + AT_P + group * 2 * P_BYTES;
    int stage = group * STAGES;
    u32 parity = 0, buffer = 0;
    for (int item = blockIdx.x * 2 + group; item < p.items; item += gridDim.x * 2) {
        u32 q[32][4];
        bar_wait(bars + (BAR_FULL + stage) * 8, parity);
        const u32 q_at = shared + stage * STAGE_BYTES + row_place(ROW_BYTES);
#pragma unroll
        for (int d = 0; d < 32; d++) load_matrices(q[d], (q_at ^ ((d & 3) << 5)) + (d >> 2) * 128);
        __syncwarp();
        if (arrives(lane_of_32())) bar_arrive(bars + (BAR_FREE + stage) * 8);
        if (++stage == (group + 1) * STAGES) stage -= STAGES, parity ^= 1;

        float o[64], m0 = -INFINITE, m1 = -INFINITE, l0 = 0.f, l1 = 0.f;
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = 0.f;
        u32 meta;
        float s[4];
        do {
            bar_wait(bars + (BAR_FULL + stage) * 8, parity);
            meta = load_u32(shared + AT_META + stage * 4);
            score_product(s, q, shared + stage * STAGE_BYTES + key_place(warp));
            const int count = meta & 0xffff, lane = lane_of_32();
#pragma unroll
            for (int e = 0; e < 4; e++) s[e] = warp * 8 + (lane & 3) * 2 + (e & 1) < count ? __fmul_rn(s[e], p.scale) : -INFINITE;
            float top0 = fmaxf(s[0], s[1]), top1 = fmaxf(s[2], s[3]);
            const bool above = top0 > m0 + RESCALE_ABOVE || top1 > m1 + RESCALE_ABOVE || m0 == -INFINITE || m1 == -INFINITE;
            const u32 p_at = p_base + buffer * P_BYTES, p_store = p_at + (lane >> 2) * 128 + ((warp ^ (lane >> 2)) << 4) + (lane & 3) * 4;
            float p00 = exp2_fast(s[0] - m0), p01 = exp2_fast(s[1] - m0), p10 = exp2_fast(s[2] - m1), p11 = exp2_fast(s[3] - m1);
            store_u32(p_store, Element::pack2(p00, p01));
            store_u32(p_store + 1024, Element::pack2(p10, p11));
            if (any_of_group(group, above)) {  // also: P is complete
#pragma unroll
                for (int n = 1; n < 4; n *= 2) {
                    top0 = fmaxf(top0, __shfl_xor_sync(FULL_WARP, top0, n));
                    top1 = fmaxf(top1, __shfl_xor_sync(FULL_WARP, top1, n));
                }
                if ((lane & 3) == 0) {
                    store_float(tops + (warp * 16 + (lane >> 2)) * 4, top0);
                    store_float(tops + (warp * 16 + 8 + (lane >> 2)) * 4, top1);
                }
                group_barrier(group);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    top0 = fmaxf(top0, load_float(tops + (n * 16 + (lane >> 2)) * 4));
                    top1 = fmaxf(top1, load_float(tops + (n * 16 + 8 + (lane >> 2)) * 4));
                }
                const float n0 = top0 > m0 + RESCALE_ABOVE || m0 == -INFINITE ? top0 : m0;
                const float n1 = top1 > m1 + RESCALE_ABOVE || m1 == -INFINITE ? top1 : m1;
                const float b0 = n0 == -INFINITE ? 0.f : n0, b1 = n1 == -INFINITE ? 0.f : n1;
                const float a0 = exp2_fast(m0 - b0), a1 = exp2_fast(m1 - b1);
                m0 = n0, m1 = n1, l0 *= a0, l1 *= a1;
#pragma unroll
                for (int i = 0; i < 64; i += 4) o[i] *= a0, o[i + 1] *= a0, o[i + 2] *= a1, o[i + 3] *= a1;
                p00 = exp2_fast(s[0] - b0), p01 = exp2_fast(s[1] - b0), p10 = exp2_fast(s[2] - b1), p11 = exp2_fast(s[3] - b1);
                store_u32(p_store, Element::pack2(p00, p01));
                store_u32(p_store + 1024, Element::pack2(p10, p11));
                group_barrier(group);
            }
            l0 += p00 + p01, l1 += p10 + p11;
            value_product(o, p_at + row_place(P_ROW_BYTES), shared + stage * STAGE_BYTES + value_place(warp));
            __syncwarp();
            if (arrives(lane_of_32())) bar_arrive(bars + (BAR_FREE + stage) * 8);
            if (++stage == (group + 1) * STAGES) stage -= STAGES, parity ^= 1;
            buffer ^= 1;
        } while (!(meta & LAST));
        const int lane = lane_of_32();
#pragma unroll
        for (int n = 1; n < 4; n *= 2) {
            l0 += __shfl_xor_sync(FULL_WARP, l0, n);
            l1 += __shfl_xor_sync(FULL_WARP, l1, n);
        }
        group_barrier(group);  // maxima are read no more
        if ((lane & 3) == 0) {
            store_float(tops + (warp * 16 + (lane >> 2)) * 4, l0);
            store_float(tops + (warp * 16 + 8 + (lane >> 2)) * 4, l1);
        }
        group_barrier(group);
        const int query = item / p.head_blocks, h0 = item % p.head_blocks * HEADS;
        float share[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int row = (lane >> 2) + e * 8, h = h0 + row;
            float l = 0.f;
#pragma unroll
            for (int n = 0; n < 4; n++) l += load_float(tops + (n * 16 + row) * 4);
            const float m = e ? m1 : m0, sink = h < p.heads ? __ldg(p.sinks + h) : 0.f;
            share[e] = l == 0.f ? 0.f : 1.f / (l + exp2_fast(sink * LOG2E - m));
            if (warp == 0 && (lane & 3) == 0 && p.lse && h < p.heads)
                p.lse[(i64)query * p.heads + h] = l == 0.f ? -INFINITE : m * LN2 + logf(l);
        }
        element* out = p.out + ((i64)query * p.heads + h0) * HEAD_DIM + warp * 128 + (lane & 3) * 8;
        store_columns<Element, HEAD_DIM>(o, share[0], share[1], out, lane >> 2, p.heads - h0, lane);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) sparse_attention_fwd_sm90_few(
    const element* q, const element* kv, const float* sinks, const int* ids, element* out, float* lse, i64 q_stride_b, i64 q_stride_s,
    i64 q_stride_h, i64 kv_stride_b, i64 kv_stride_k, int batch, int queries, int heads, int keys, int slots, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = (u32)__cvta_generic_to_shared(dynamic), bars = shared + AT_BARS;
    const int warp = __shfl_sync(FULL_WARP, threadIdx.x >> 5, 0), head_blocks = (heads + HEADS - 1) / HEADS;
    const Call p = {q, kv, sinks, ids, out, lse, q_stride_b, q_stride_s, q_stride_h, kv_stride_b, kv_stride_k,
                    queries, heads, keys, slots, head_blocks, batch * queries * head_blocks, scale};
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) bar_init(bars + (BAR_FULL + i) * 8, 65);
        for (int i = 0; i < 2 * STAGES; i++) bar_init(bars + (BAR_FREE + i) * 8, of_warps(4));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp < 8) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        consumer(p, shared, warp >> 2, warp & 3);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GATHER_REGISTERS));
        gather_warp(p, shared, bars, warp - 8);
    }
}
