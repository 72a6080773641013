// Indexer scores at given ids on mma.sync: sm_80 and later, INDEX_DIM 64 or 128, any I up to 128.
// archs: 80 86 89 90 100 120
// hot: indexer_gather_scores
//
//     score[t] = sum_h relu(q[h] . k[id_t]) scale w[h] where 0 <= id_t < entries, else -inf
//
// Grid: x queries, y batch rows. Block: 4 warps that share q and otherwise go their own ways: each takes every fourth group
//   of 32 slots, copies its key rows (two stages of its own), multiplies them with 64 heads at a time and sums over heads.
// Shared memory (dynamic): q [64 head_blocks][E], key rows [4 warps][2][32][E], scale w [64 head_blocks]; 16-byte chunks
//   swizzled by XOR with the row.
// Determinism: no atomics; the sum over heads has one order for every slot. A score's bits depend on q, w and its key row.
//
// Masked slots are zero-filled by the copy, which reads nothing; a group without a valid slot costs its ids alone.
// relu keeps NaN.
#include "indexer_grad.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef INDEX_DIM
#define INDEX_DIM 128
#endif
typedef ELEMENT Element;

static const int WARPS = 4, THREADS = WARPS * 32, GROUP = 32, CHUNKS = INDEX_DIM / 8, K_STEPS = INDEX_DIM / 16;
static const u32 ROW = INDEX_DIM * 2, STAGE = GROUP * ROW;
#define MINUS_INFINITY __int_as_float(0xff800000)

// The id of this lane's slot, -1 where it is masked or there is none.
DEVICE int read_id(const void* ids, i64 row, int slot, int slots, int entries, int wide) {
    const i64 id = slot < slots ? load_id(ids, row + slot, wide) : -1;
    return id >= 0 && id < entries ? (int)id : -1;
}

// Starts copying the warp's 32 rows, one id a lane.
DEVICE void gather(u32 stage, const u16* k, i64 stride, int id, int lane) {
    const int chunk = lane % CHUNKS;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int row = i * (32 / CHUNKS) + lane / CHUNKS, from = __shfl_sync(FULL_WARP, id, row);
        copy16_if(stage + row * ROW + ((chunk ^ (row & 7)) << 4), k + (from < 0 ? 0 : from) * stride + chunk * 8, from >= 0);
    }
}

// weights [B][S][I] and ids [B][S][T] contiguous; scores float32 [B][S][T]; strides in elements, the last of q and k is 1.
extern "C" __global__ void __launch_bounds__(THREADS, 2) indexer_gather_scores(
    const u16* q, const u16* k, const void* weights, const void* ids, float* scores, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h,
    i64 k_stride_b, i64 k_stride_p, int heads, int head_blocks, int entries, int slots, int w_kind, int ids_wide, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = shared_address(dynamic), at_keys = shared + head_blocks * 64 * ROW, at_w = at_keys + WARPS * 2 * STAGE;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, b = blockIdx.y, s = blockIdx.x;
    const i64 query = (i64)b * gridDim.x + s, row = query * slots;
    q += b * q_stride_b + s * q_stride_s;
    k += b * k_stride_b;
    for (int i = threadIdx.x; i < head_blocks * 64 * CHUNKS; i += THREADS) {
        const int h = i / CHUNKS, chunk = i % CHUNKS;
        copy16_if(shared + h * ROW + ((chunk ^ (h & 7)) << 4), q + (h < heads ? h * q_stride_h : 0) + chunk * 8, h < heads);
    }
    for (int h = threadIdx.x; h < head_blocks * 64; h += THREADS)
        store_float(at_w + h * 4, h < heads ? load_number(weights, query * heads + h, w_kind) * scale : 0.f);
    copies_commit();
    const u32 keys = at_keys + warp * 2 * STAGE;
    int slot = warp * GROUP, stage = 0;
    int id = read_id(ids, row, slot + lane, slots, entries, ids_wide);
    int next = read_id(ids, row, slot + WARPS * GROUP + lane, slots, entries, ids_wide);
    gather(keys, k, k_stride_p, id, lane);
    copies_commit();
    copies_wait<1>();
    __syncthreads();  // q and w are there for all warps

    for (; slot < slots; slot += WARPS * GROUP, stage ^= 1) {
        gather(keys + (stage ^ 1) * STAGE, k, k_stride_p, next, lane);  // rows without an id cost nothing
        copies_commit();
        const int after = read_id(ids, row, slot + 2 * WARPS * GROUP + lane, slots, entries, ids_wide);
        copies_wait<1>();
        __syncwarp();  // rows of all lanes have arrived
        float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};  // of rows lane / 4 + 0, 8, 16, 24
        if (__any_sync(FULL_WARP, id >= 0)) {
            const u32 a_at = keys + stage * STAGE + (lane & 15) * ROW + (((lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll 1
            for (int block = 0; block < head_blocks; ++block) {
                const u32 b_at = shared + (block * 64 + (lane & 7) + ((lane >> 4) << 3)) * ROW + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
                float l[2][8][4];
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int j = 0; j < 8; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e) l[m][j][e] = 0.f;
#pragma unroll
                for (int i = 0; i < K_STEPS; ++i) {
                    u32 a[2][4];
                    load_matrices(a[0], (a_at ^ ((i & 3) << 5)) + (i >> 2) * 128);
                    load_matrices(a[1], (a_at ^ ((i & 3) << 5)) + (i >> 2) * 128 + 16 * ROW);
#pragma unroll
                    for (int j = 0; j < 8; j += 2) {
                        u32 c[4];
                        load_matrices(c, (b_at ^ ((i & 3) << 5)) + (i >> 2) * 128 + j * 8 * ROW);
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
                            multiply<Element>(l[m][j], a[m], c[0], c[1]);
                            multiply<Element>(l[m][j + 1], a[m], c[2], c[3]);
                        }
                    }
                }
                if (block * 64 + 64 > heads) {  // an infinite key times the zeros of a head that does not exist is no logit
#pragma unroll
                    for (int j = 0; j < 8; ++j)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (block * 64 + j * 8 + (lane & 3) * 2 + (e & 1) >= heads) l[0][j][e] = l[1][j][e] = 0.f;
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 w = load_float2(at_w + (block * 64 + j * 8 + (lane & 3) * 2) * 4);
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            sum[m][e] += relu(l[m][j][e * 2]) * w.x;
                            sum[m][e] += relu(l[m][j][e * 2 + 1]) * w.y;
                        }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                sum[m][e] += __shfl_xor_sync(FULL_WARP, sum[m][e], 1);
                sum[m][e] += __shfl_xor_sync(FULL_WARP, sum[m][e], 2);
            }
        // Each lane stores one score: that of slot lane / 4 + 8 (lane % 4).
        const int mine = (lane >> 2) + 8 * (lane & 3);
        const bool valid = __shfl_sync(FULL_WARP, id, mine) >= 0;
        const float x = lane & 2 ? (lane & 1 ? sum[1][1] : sum[1][0]) : (lane & 1 ? sum[0][1] : sum[0][0]);
        if (slot + mine < slots) scores[row + slot + mine] = valid ? x : MINUS_INFINITY;
        id = next;
        next = after;
        __syncwarp();  // the stage has been read by all lanes
    }
    copies_wait<0>();
}
