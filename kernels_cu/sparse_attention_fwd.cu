// Sparse attention forward on mma.sync: sm_80 and later, HEAD_DIM 64, 128, 256 or 512, bfloat16 or float16, any H.
// archs: 80 86 89 90 100 120
// hot: sparse_attention_fwd
//
//     s[h,t]   = scale q[h] . kv[id_t]              over slots t with 0 <= id_t < keys, in slot order
//     out[h]   = sum_t exp(s_t) kv[id_t] / (sum_t exp(s_t) + exp(sink_h)),    lse[h] = log sum_t exp(s_t)
//
// Grid: one block per query and tile of ROWS heads: B * S * ceil(H / ROWS), tiles of a query side by side.
// Block: WARPS warps. For the scores they are ROWS / 16 row groups times KEY_GROUPS key groups: a warp computes 16 heads by
//   KEYS / KEY_GROUPS keys. For the values each warp owns all ROWS heads by HEAD_DIM / WARPS columns, so that a value
//   row is read from shared memory once, whatever ROWS is.
// Shared memory (dynamic): Q [ROWS][D], two stages of key rows [KEYS][D], P [ROWS][KEYS], then a few floats a head; all
//   in 16-byte chunks swizzled by XOR with the row, so that ldmatrix and the copies meet no bank conflict.
// Determinism: no atomics; every sum has a fixed order, set by HEAD_DIM, ROWS, KEYS, WARPS and by the valid ids of the query
//   alone. A query's bits do not depend on B, S, its place, or other queries.
//
// Masked slots cost a ballot: every warp scans the id row itself (64 slots at a time, the next 64 on their way) and takes
// from each block of KEYS valid ids those whose rows it gathers. Warps hand over nothing, so there is no barrier for it,
// and blocks are filled across masked slots. Rows that do not exist are zero-filled by the copy, which then reads
// nothing: what lies in unselected rows never enters.
//
// Per block of keys: barrier 1 (rows have arrived; nobody reads the other stage or P any more), copies of the next
// block start, scores; row maxima go through shared memory (barrier of the row group only); p to shared memory; barrier 2;
// values. The accumulator is rescaled only when a maximum grew by more than 2^8 (REFERENCE_ROUNDING: always).
//
// Budget for H 64, D 512 (ROWS 64, KEYS 64, WARPS 8), per block of 64 keys on an H200: the accumulator is 64 x 512
// floats = 128 registers in each of 256 threads, so one block a multiprocessor. Shared memory: 64 KB Q + 128 KB keys +
// 8 KB P. Traffic at 128 bytes a clock: scores 384 KB (Q read by 2 key groups, keys by 4 row groups) = 3070 clocks,
// values 64 KB + P 64 KB = 1020, copies 512. Tensor cores, at 60 % of their wgmma rate: 1700 clocks for each product. So
// scores are bound by shared memory and values by mma.sync; barriers keep the two apart: 3070 + 1700 + softmax and
// barriers, about 6000 clocks. S4096 T640 (510 valid ids a query, 8.3 blocks, 31 queries a multiprocessor) at 1.75 GHz:
// predicted 0.9 ms for the blocks and 0.1 ms for prologues and epilogues that nothing overlaps. Measured, kernel alone,
// two runs: 1.20 and 1.26 ms; H64 T160 0.53 and 0.54, H16 T640 0.52 and 0.54, S8192 H128 T1152 7.60 and 8.08. Not profiled.
// Smaller devices: 163 KB (sm_80) takes KEYS 32, where Q is read twice as often per key; 99 KB (sm_86, 89, 120) takes
// ROWS 32.
// ROWS 32 and 16 with WARPS 4 need at most 99 KB: two blocks of a multiprocessor then fill each other's barriers.
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 512
#endif
#ifndef ROWS
#define ROWS 64
#endif
#ifndef KEYS
#define KEYS 64
#endif
#ifndef WARPS
#define WARPS 8
#endif
#ifndef REFERENCE_ROUNDING
#define REFERENCE_ROUNDING 0
#endif

#include "sparse_attention_mma.cuh"

static const int TILES = GROUP_KEYS / 8;                // 16 x 8 score tiles of a warp
static const int CHAINS = TILES >= 4 ? 1 : 4 / TILES;   // independent partial sums, so that four products are in flight
static const u32 STAGE_BYTES = KEYS * ROW_BYTES;
static const u32 AT_KEYS = ROWS * ROW_BYTES, AT_P = AT_KEYS + 2 * STAGE_BYTES, AT_ALPHA = AT_P + ROWS * P_ROW_BYTES;
static const u32 AT_ROWS = AT_ALPHA + ROWS * 4, AT_IDS = AT_ROWS + KEY_GROUPS * ROWS * 4;
static_assert(TILES == 1 || TILES % 2 == 0, "how warps split the scores");

#ifdef SHARED_BYTES  // what the launch asks for
static_assert(AT_IDS + KEYS * 4 == SHARED_BYTES, "shared memory");
#endif

static const float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define MINUS_INFINITY __int_as_float(0xff800000)

// Barrier of the warps that score the same heads.
DEVICE void row_group_barrier(int group) {
    if (KEY_GROUPS > 1) asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(KEY_GROUPS * 32) : "memory");
}

// ---- Softmax arithmetic --------------------------------------------------------------------------------
// Scores are carried in units of `scale`: log2(e) times natural ones by default, natural ones in reference rounding.

#if REFERENCE_ROUNDING
#define FIRST_MAXIMUM (-1e30f)
DEVICE float power(float x) { return expf(x); }
DEVICE float sink_power(float sink, float m) { return expf(sink - m); }
DEVICE float natural(float m) { return m; }
DEVICE float raised(float m, float top) { return fmaxf(m, top); }
#else
#define FIRST_MAXIMUM MINUS_INFINITY
DEVICE float power(float x) { return exp2_fast(x); }
DEVICE float sink_power(float sink, float m) { return exp2_fast(sink * LOG2E - m); }
DEVICE float natural(float m) { return m * LN2; }
// A maximum that lags by up to 2^8 loses no precision: p stays below 256, far inside float16.
DEVICE float raised(float m, float top) { return top > m + 8.0f || m == MINUS_INFINITY ? top : m; }
#endif

// What is subtracted from scores: the maximum, kept off -inf so that -inf - -inf never happens.
DEVICE float shift_of(float m) { return m == MINUS_INFINITY ? 0.0f : m; }

// ---- The score product -----------------------------------------------------------------------------------

// s[16][GROUP_KEYS] = Q K^T. q_at, k_at: this lane's ldmatrix row at chunk 0; chunks are swizzled inside 128 bytes.
DEVICE void score_product(float (&s)[TILES][4], u32 q_at, u32 k_at) {
    float part[CHAINS][TILES][4];
#pragma unroll
    for (int c = 0; c < CHAINS; ++c)
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) part[c][j][e] = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d += 2) {
        u32 a[2][4];
        load_matrices(a[0], (q_at ^ ((d & 3) << 5)) + (d >> 2) * 128);
        load_matrices(a[1], (q_at ^ (((d + 1) & 3) << 5)) + (d >> 2) * 128);
        if (TILES == 1) {  // one load brings 8 keys by 32 columns
            u32 b[4];
            load_matrices(b, (k_at ^ ((d & 3) << 5)) + (d >> 2) * 128);
            multiply<Element>(part[d % CHAINS][0], a[0], b[0], b[1]);
            multiply<Element>(part[(d + 1) % CHAINS][0], a[1], b[2], b[3]);
        } else {  // one load brings 16 keys by 16 columns
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j + 1 < TILES; j += 2) {
                    u32 b[4];
                    load_matrices(b, (k_at ^ (((d + half) & 3) << 5)) + (d >> 2) * 128 + j * 8 * ROW_BYTES);
                    multiply<Element>(part[(d + half) % CHAINS][j], a[half], b[0], b[1]);
                    multiply<Element>(part[(d + half) % CHAINS][j + 1], a[half], b[2], b[3]);
                }
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[j][e] = part[0][j][e];
#pragma unroll
            for (int c = 1; c < CHAINS; ++c) s[j][e] += part[c][j][e];
        }
}

// ---- The kernel ----------------------------------------------------------------------------------------

// q, kv: 16-byte aligned rows, strides in elements, multiples of 8. ids [B, S, slots], out [B, S, heads, D] and lse
// [B, S, heads] (or null) contiguous. scale: sm_scale, times log2(e) unless REFERENCE_ROUNDING.
extern "C" __global__ void __launch_bounds__(THREADS, WARPS == 8 ? 1 : 2)
    sparse_attention_fwd(const u16* __restrict__ q, const u16* __restrict__ kv, const float* __restrict__ sinks,
                         const int* __restrict__ ids, u16* __restrict__ out, float* __restrict__ lse, i64 q_stride_b,
                         i64 q_stride_s, i64 q_stride_h, i64 kv_stride_b, i64 kv_stride_k, int queries, int heads, int keys,
                         int slots, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 head_tiles = (heads + ROWS - 1) / ROWS, query = blockIdx.x / head_tiles;  // query: b * S + s
    const u32 b = query / queries, first_head = blockIdx.x % head_tiles * ROWS;
    const int rows = min(ROWS, heads - (int)first_head);  // heads of this tile that exist

    Scan scan;
    scan.row = ids + (i64)query * slots;
    scan.slots = slots;
    scan.next_slot = 0;
    scan.count = scan.used = 0;
    if (slots > 0) scan_load(scan, lane);

    // Q; rows of heads that do not exist are zeros.
    const u16* q_tile = q + b * q_stride_b + query % queries * q_stride_s + first_head * q_stride_h;
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS;
        bool exists = row < rows;
        const u16* from = q_tile + (exists ? row : 0) * q_stride_h + chunk * 8;
        copy16(shared + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4), from, exists);
    }

    // Where this lane reads and writes; chunks of a row are XORed with row & 7, which is lane & 7 for all of these.
    const int group = warp / KEY_GROUPS, key_group = warp % KEY_GROUPS;
    const int row0 = group * 16 + (lane >> 2);  // this lane's score rows: row0 and row0 + 8
    const u32 x = lane & 7;
    const u32 q_at = shared + (group * 16 + (lane & 15)) * ROW_BYTES + (((lane >> 4) ^ x) << 4);
    const u32 k_row = key_group * GROUP_KEYS + (TILES == 1 ? 0 : (lane >> 4) * 8) + x;
    const u32 k_at = shared + AT_KEYS + k_row * ROW_BYTES + (((TILES == 1 ? lane >> 3 : (lane >> 3) & 1) ^ x) << 4);
    const u32 v_chunk = warp * (COLUMNS / 8) + (lane >> 4);
    const u32 v_at = shared + AT_KEYS + (((lane >> 3) & 1) * 8 + x) * ROW_BYTES + ((v_chunk ^ x) << 4);
    // Rows of P are shorter than 128 bytes where KEYS < 64: 8 / P_CHUNKS of them share a swizzle.
    const u32 p_at = shared + AT_P + (lane & 15) * P_ROW_BYTES + (((lane >> 4) ^ (x / (8 / P_CHUNKS))) << 4);
    const u32 p_store = shared + AT_P + row0 * P_ROW_BYTES + (lane & 3) * 4, p_swizzle = (row0 & 7) / (8 / P_CHUNKS);
    const u32 alphas = shared + AT_ALPHA + (lane >> 2) * 4;  // of accumulator rows lane / 4 + 8 n
    const u32 row_values = shared + AT_ROWS + row0 * 4;      // [KEY_GROUPS][ROWS]: maxima, at the end sums

    float o[ROW_GROUPS][COLUMNS / 8][4];
#pragma unroll
    for (int r = 0; r < ROW_GROUPS; ++r)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) o[r][j][e] = 0.0f;
    float m0 = FIRST_MAXIMUM, m1 = FIRST_MAXIMUM, l0 = 0.0f, l1 = 0.0f;  // l: of this lane's keys only

    const u16* kv_row = kv + b * kv_stride_b;
    int have = next_block(scan, 0, keys, shared + AT_IDS, warp, lane);
    u32 stage = 0;
    if (have > 0) gather(shared + AT_KEYS, kv_row, kv_stride_k, shared + AT_IDS, have, warp, lane);

#pragma unroll 1
    while (have > 0) {
        const int have_next = have == KEYS ? next_block(scan, 0, keys, shared + AT_IDS, warp, lane) : 0;
        wait_for_copies();
        __syncthreads();  // this block's rows (and Q) are complete; the other stage, P and alpha are read no more
        if (have_next > 0)
            gather(shared + AT_KEYS + (STAGE_BYTES - stage), kv_row, kv_stride_k, shared + AT_IDS, have_next, warp, lane);

        // s = scale q . k, -inf behind the last key
        float s[TILES][4];
        score_product(s, q_at, k_at + stage);
        float top0 = MINUS_INFINITY, top1 = MINUS_INFINITY;
#pragma unroll
        for (int j = 0; j < TILES; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                bool exists = key_group * GROUP_KEYS + j * 8 + (lane & 3) * 2 + e < have;
                s[j][e] = exists ? s[j][e] * scale : MINUS_INFINITY;
                s[j][e + 2] = exists ? s[j][e + 2] * scale : MINUS_INFINITY;
                top0 = fmaxf(top0, s[j][e]);
                top1 = fmaxf(top1, s[j][e + 2]);
            }
        top0 = fmaxf(top0, __shfl_xor_sync(FULL_WARP, top0, 1));
        top1 = fmaxf(top1, __shfl_xor_sync(FULL_WARP, top1, 1));
        top0 = fmaxf(top0, __shfl_xor_sync(FULL_WARP, top0, 2));
        top1 = fmaxf(top1, __shfl_xor_sync(FULL_WARP, top1, 2));
        if (KEY_GROUPS > 1) {
            if ((lane & 3) == 0) {
                store_float(row_values + key_group * ROWS * 4, top0);
                store_float(row_values + key_group * ROWS * 4 + 32, top1);
            }
            row_group_barrier(group);  // every key group's maxima are there
#pragma unroll
            for (int g = 0; g < KEY_GROUPS; ++g) {
                top0 = fmaxf(top0, load_float(row_values + g * ROWS * 4));
                top1 = fmaxf(top1, load_float(row_values + g * ROWS * 4 + 32));
            }
        }

        // p = exp(s - m), l = alpha l + sum p, alpha = exp(m before - m)
        const float before0 = m0, before1 = m1;
        m0 = raised(m0, top0), m1 = raised(m1, top1);
        const float shift0 = shift_of(m0), shift1 = shift_of(m1);
        // A maximum of -inf means that the accumulator is zero (or NaN): 1 is as right as 0 and costs no rescaling.
        const float alpha0 = before0 == MINUS_INFINITY ? 1.0f : power(before0 - shift0);
        const float alpha1 = before1 == MINUS_INFINITY ? 1.0f : power(before1 - shift1);
        l0 *= alpha0, l1 *= alpha1;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            float p00 = power(s[j][0] - shift0), p01 = power(s[j][1] - shift0);
            float p10 = power(s[j][2] - shift1), p11 = power(s[j][3] - shift1);
            l0 += p00 + p01, l1 += p10 + p11;
            u32 to = p_store + (((key_group * TILES + j) ^ p_swizzle) << 4);
            store_u32(to, Element::pack2(p00, p01));
            store_u32(to + 8 * P_ROW_BYTES, Element::pack2(p10, p11));
        }
        if (key_group == 0 && (lane & 3) == 0) {
            store_float(shared + AT_ALPHA + row0 * 4, alpha0);
            store_float(shared + AT_ALPHA + row0 * 4 + 32, alpha1);
        }
        __syncthreads();  // P and alpha are complete; row maxima are read no more

        // o = alpha o + P V
        float alpha[ROW_GROUPS][2];
        bool rescale = false;
#pragma unroll
        for (int r = 0; r < ROW_GROUPS; ++r)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                alpha[r][e] = load_float(alphas + (r * 16 + e * 8) * 4);
                rescale |= alpha[r][e] != 1.0f;
            }
        if (__any_sync(FULL_WARP, rescale)) {
#pragma unroll
            for (int r = 0; r < ROW_GROUPS; ++r)
#pragma unroll
                for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[r][j][e] *= alpha[r][e >> 1];
        }
        value_product(o, p_at, v_at + stage);
        stage = STAGE_BYTES - stage;
        have = have_next;
    }

    // lse = m + log l, f = 1 / (l + exp(sink - m)); a row without keys has out 0 and lse -inf.
    l0 += __shfl_xor_sync(FULL_WARP, l0, 1);
    l1 += __shfl_xor_sync(FULL_WARP, l1, 1);
    l0 += __shfl_xor_sync(FULL_WARP, l0, 2);
    l1 += __shfl_xor_sync(FULL_WARP, l1, 2);
    if ((lane & 3) == 0) {
        store_float(row_values + key_group * ROWS * 4, l0);
        store_float(row_values + key_group * ROWS * 4 + 32, l1);
    }
    wait_for_copies();  // Q of a query without keys
    __syncthreads();    // sums are complete; nobody reads P, alpha, Q or keys any more
    if (key_group == 0 && (lane & 3) == 0) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float m = e ? m1 : m0;
            const int row = row0 + e * 8;
            float sum = 0.0f;
#pragma unroll
            for (int g = 0; g < KEY_GROUPS; ++g) sum += load_float(row_values + g * ROWS * 4 + e * 32);
            float factor = 0.0f;
            if (row < rows) {
                if (sum != 0.0f) factor = 1.0f / (sum + sink_power(sinks[first_head + row], shift_of(m)));
                const float log_sum = sum == 0.0f ? MINUS_INFINITY : natural(m) + logf(sum);
                if (lse != nullptr) lse[(i64)query * heads + first_head + row] = log_sum;
            }
            store_float(shared + AT_ALPHA + row * 4, factor);
        }
    }
    __syncthreads();  // factors are complete

    // out = f o, through the memory of Q: each warp lays down its own columns and stores them as whole sectors.
#pragma unroll
    for (int r = 0; r < ROW_GROUPS; ++r) {
        const float factor0 = load_float(alphas + r * 16 * 4), factor1 = load_float(alphas + (r * 16 + 8) * 4);
        const u32 to = shared + (r * 16 + (lane >> 2)) * ROW_BYTES + (lane & 3) * 4;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            u32 chunk = ((warp * (COLUMNS / 8) + j) ^ (lane >> 2)) << 4;
            store_u32(to + chunk, Element::pack2(o[r][j][0] * factor0, o[r][j][1] * factor0));
            store_u32(to + chunk + 8 * ROW_BYTES, Element::pack2(o[r][j][2] * factor1, o[r][j][3] * factor1));
        }
    }
    __syncwarp();  // the warp's columns are complete
    u16* out_tile = out + ((i64)query * heads + first_head) * HEAD_DIM + warp * COLUMNS;
#pragma unroll 4
    for (int i = lane; i < ROWS * COLUMNS / 8; i += 32) {
        int row = i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
        uint4 value = load_uint4(shared + row * ROW_BYTES + (((warp * (COLUMNS / 8) + chunk) ^ (row & 7)) << 4));
        if (row < rows) *reinterpret_cast<uint4*>(out_tile + row * HEAD_DIM + chunk * 8) = value;
    }
}
