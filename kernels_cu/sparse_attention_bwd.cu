// Sparse attention's gradient on mma.sync: sm_80 and later, HEAD_DIM 64, 128, 256 or 512, bfloat16 or float16, any H.
// archs: 80 90 100 120
// hot: sparse_attention_bwd
//
//     p[h,t]      = exp2(log2(e) scale q[h] . kv[id_t] - log2_total[h])         over slots t with 0 <= id_t < keys
//     ds[h,t]     = scale p[h,t] (grad_out[h] . kv[id_t] - delta[h])
//     grad_q[h]   = sum_t ds[h,t] kv[id_t]                                     PARTS 1 and 3
//     sums[id_t] += sum_h p[h,t] grad_out[h] + ds[h,t] q[h]                     PARTS 2 and 3, once per slot
//
// p and ds are rounded to the input dtype as operands of products, nothing else is.
//
// Grid: PARTS 3 and 2 one block per query, PARTS 1 one per query and tile of ROWS heads. PARTS 3 is for H <= ROWS. For more
//   heads grad_q and sums take a launch each (7 products instead of 5): PARTS 2 walks through all tiles of heads for each
//   block of keys and keeps its sums in registers, so that heads never multiply what is scattered.
// Block: WARPS warps; for scores ROWS / 16 row groups times KEY_GROUPS key groups, 16 heads by KEYS / KEY_GROUPS keys a warp;
//   for grad_q and sums each warp owns HEAD_DIM / WARPS columns of all heads and of all keys.
// Shared memory (dynamic): Q, grad_out [ROWS][D], key rows [KEYS][D], P, dS [ROWS][KEYS], ids of two blocks of keys, log2_total and delta.
// Determinism: grad_q and every term of sums come from sums in a fixed order, which depends on the query alone; PARTS 1 and
//   2 give the bits of PARTS 3. Terms are added to sums by FIXED 0: float32 atomics, in any order; FIXED 1: integers, whose
//   bits do not depend on it (fixed_sum.cuh).
//
// Per block of keys: barrier 1 (key rows are there, P and dS are read no more), scores, P and dS; barrier 2; grad_q; barrier 3
// (key rows are read no more), the next block's rows start to arrive, sums are computed in pieces and scattered.
//
// Budget for H 64, D 512 on an H200, per block of 64 keys: mma.sync at 60 % of the wgmma rate: 1700 clocks for each of five
// products = 8500; shared memory at 128 bytes a clock: scores 512 KB = 4100, grad_q 1000, sums 384 KB = 3100; scatter of
// 128 KB at 16.2 bytes a clock = 8100, in part beside the products of the next blocks. S4096 T640 (510 valid ids): 257
// blocks a multiprocessor, 10 to 16 thousand clocks each at 1.75 GHz: predicted 1.5 to 2.4 ms. Measured there, this kernel
// alone: 3.07 ms, 4.53 with FIXED, 2.01 without the scatter; T160 1.07, 1.57 and 0.77; S8192 H128 T1152 25.2 (two launches).
// red.v4 instead of v2 took as long (3.07 and 3.02), and so did queries far apart from each other at a time (3.06).
// By ncu, T640, 3.02 ms, busy in percent of the peak: L2 62, L1 63, tensor pipe and issue slots 36 and 18: none is full; one
// block of 8 warps with 255 registers a multiprocessor waits for its barriers, loads and additions in turn.
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
#ifndef PARTS
#define PARTS 3
#endif
#ifndef FIXED
#define FIXED 0
#endif
// Registers: one slot of a lane at a time (two spill), on sm_100 two (one spills) but fewer integer sums.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
#define SCANS 2
#define PIECE_NUMBERS (FIXED && HEAD_DIM >= 256 && ROWS == 64 ? 32 : 64)
#else
#define SCANS 1
#define PIECE_NUMBERS 64
#endif
#include "fixed_sum.cuh"
#include "sparse_attention_mma.cuh"

static const bool GRAD_Q = (PARTS & 1) != 0, SUMS = (PARTS & 2) != 0;
static const int TILES = GROUP_KEYS / 8;         // 16 x 8 score tiles of a warp
static const int CHAINS = TILES == 1 ? 2 : 1;    // independent partial sums, so that four products are in flight
// Keys whose sums are in registers at a time: PIECE_NUMBERS of them a thread beside the 128 of grad_q, else 128.
static const int PIECE = !GRAD_Q || PIECE_NUMBERS * 32 / COLUMNS > KEYS ? KEYS : PIECE_NUMBERS * 32 / COLUMNS;
static const u32 AT_GRAD = ROWS * ROW_BYTES, AT_KEYS = 2 * AT_GRAD, AT_P = AT_KEYS + KEYS * ROW_BYTES;
static const u32 AT_DS = AT_P + ROWS * P_ROW_BYTES, AT_IDS = AT_DS + ROWS * P_ROW_BYTES;
static const u32 AT_ROWS = AT_IDS + 2 * KEYS * 4;  // log2_total, then delta, of the tile's heads
static_assert(AT_IDS % (KEYS * 8) == 0, "the two blocks of ids differ in one bit of the address");
static_assert((TILES == 1 || TILES % 2 == 0) && KEYS % PIECE == 0 && PIECE % 16 == 0, "how warps split scores and sums");

#ifdef SHARED_BYTES  // what the launch asks for
static_assert(AT_ROWS + 2 * ROWS * 4 == SHARED_BYTES, "shared memory");
#endif

static const float LOG2E = 1.4426950408889634f;
#define INFINITY_F __int_as_float(0x7f800000)

#if FIXED
typedef i64 Sum;
#else
typedef float Sum;
#endif

// Whether x is infinite once it is rounded, or NaN.
template <typename E> DEVICE bool overflows(float x);
template <> DEVICE bool overflows<BFloat16>(float x) { return !(fabsf(x) < __uint_as_float(0x7f7f8000u)); }
template <> DEVICE bool overflows<Float16>(float x) { return !(fabsf(x) < 65520.0f); }

// ---- Products ------------------------------------------------------------------------------------------

// s[16][GROUP_KEYS] = Q K^T, t = grad_out K^T. q_at, k_at: this lane's ldmatrix row at chunk 0.
DEVICE void score_products(float (&s)[TILES][4], float (&t)[TILES][4], u32 q_at, u32 k_at) {
    float part[2][CHAINS][TILES][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int c = 0; c < CHAINS; ++c)
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[m][c][j][e] = 0.0f;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 16; d += 2) {
        u32 pair[4];
        if (TILES == 1) load_matrices(pair, (k_at ^ ((d & 3) << 5)) + (d >> 2) * 128);  // 8 keys by 32 columns
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 column = ((d + half) & 3) << 5, row = (d >> 2) * 128;
            u32 a[2][4];
            load_matrices(a[0], (q_at ^ column) + row);
            load_matrices(a[1], (q_at ^ column) + AT_GRAD + row);
            if (TILES == 1) {
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    multiply<Element>(part[m][half % CHAINS][0], a[m], pair[half * 2], pair[half * 2 + 1]);
            } else {
#pragma unroll
                for (int j = 0; j + 1 < TILES; j += 2) {  // one load brings 16 keys by 16 columns
                    u32 b[4];
                    load_matrices(b, (k_at ^ column) + row + j * 8 * ROW_BYTES);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        multiply<Element>(part[m][0][j], a[m], b[0], b[1]);
                        multiply<Element>(part[m][0][j + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[j][e] = part[0][0][j][e] + (CHAINS > 1 ? part[0][CHAINS - 1][j][e] : 0.0f);
            t[j][e] = part[1][0][j][e] + (CHAINS > 1 ? part[1][CHAINS - 1][j][e] : 0.0f);
        }
}

// c[PIECE][COLUMNS] += P^T grad_out + dS^T Q. p_at: this lane's ldmatrix row at chunk 0 of P; p_first: first key over 8;
// q_at: at the warp's first column of Q.
DEVICE void sum_products(float (&c)[PIECE / 16][COLUMNS / 8][4], u32 p_at, int p_first, u32 q_at) {
#pragma unroll
    for (int k = 0; k < ROWS / 16; ++k) {
        u32 p[PIECE / 16][4], ds[PIECE / 16][4];
#pragma unroll
        for (int r = 0; r < PIECE / 16; ++r) {
            const u32 at = (p_at ^ ((p_first + r * 2) << 4)) + k * 16 * P_ROW_BYTES;
            load_matrices_transposed(p[r], at);
            load_matrices_transposed(ds[r], at + ROWS * P_ROW_BYTES);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j) {
            const u32 at = (q_at ^ ((j & 3) << 5)) + (j >> 2) * 128 + k * 16 * ROW_BYTES;
            u32 g[4], q[4];
            load_matrices_transposed(g, at + AT_GRAD);
            load_matrices_transposed(q, at);
#pragma unroll
            for (int r = 0; r < PIECE / 16; ++r) {
                multiply<Element>(c[r][j * 2], p[r], g[0], g[1]);
                multiply<Element>(c[r][j * 2 + 1], p[r], g[2], g[3]);
            }
#pragma unroll
            for (int r = 0; r < PIECE / 16; ++r) {
                multiply<Element>(c[r][j * 2], ds[r], q[0], q[1]);
                multiply<Element>(c[r][j * 2 + 1], ds[r], q[2], q[3]);
            }
        }
    }
}

// ---- Scatter -------------------------------------------------------------------------------------------

// The place of a key's sums, null where the block has no such key. sums: this lane's columns of key 0.
DEVICE Sum* sums_of(Sum* sums, u32 ids, int key, int have) {
    return key < have ? sums + (i64)(int)load_u32(ids + key * 4) * HEAD_DIM : nullptr;
}

#if !FIXED
DEVICE void add_pair(float* to, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
#else
    atomicAdd(to, x);
    atomicAdd(to + 1, y);
#endif
}
#endif

// Adds terms of 16 keys from `key` on, c[COLUMNS / 8] tiles of 16 x 8, to the keys' sums. A lane holds columns 2n and 2n + 1
// (n = lane % 4) of rows lane / 4 and that + 8. sums: the warp's columns of key 0; exponents: of key 0.
DEVICE void scatter(Sum* sums, const int* exponents, u32 ids, int key, int have, const float (&c)[COLUMNS / 8][4], int lane) {
    key += lane >> 2;
#if FIXED
    // Lanes exchange so that each instruction fills whole sectors: first columns 0 to 3, then 4 to 7.
    const bool upper = (lane & 2) != 0;
    sums += (lane & 1) * 2;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        Sum* const to = sums_of(sums, ids, key + e * 8, have);
        const float factor = to != nullptr ? fixed_factor(exponents[(int)load_u32(ids + (key + e * 8) * 4)]) : 0.0f;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j) {
            const float mine = upper ? c[j][e * 2 + 1] : c[j][e * 2];
            const float other = __shfl_xor_sync(FULL_WARP, upper ? c[j][e * 2] : c[j][e * 2 + 1], 2);
            if (to != nullptr) {
                add_fixed(to + j * 8 + (upper ? 1 : 0), to_fixed(upper ? other : mine, factor));
                add_fixed(to + j * 8 + (upper ? 5 : 4), to_fixed(upper ? mine : other, factor));
            }
        }
    }
#else
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        Sum* const to = sums_of(sums + (lane & 3) * 2, ids, key + e * 8, have);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
            if (to != nullptr) add_pair(to + j * 8, c[j][e * 2], c[j][e * 2 + 1]);
    }
#endif
}

// ---- The kernel ----------------------------------------------------------------------------------------

// Starts copying `rows` heads of Q or grad_out; rows behind them are zeros.
DEVICE void copy_heads(u32 to, const u16* from, i64 stride, int rows) {
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const bool exists = row < rows;
        copy16(to + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4), from + (exists ? row : 0) * stride + chunk * 8, exists);
    }
}

// grad_out, q, kv: 16-byte aligned rows, strides in elements, multiples of 8. ids [B, S, slots], log2_total and delta [B, S,
// heads], grad_q [B, S, heads, D], exponents [B, keys] (FIXED) contiguous; sums [B, range, D]: keys first_key to first_key +
// range - 1, and with GRAD_Q these are all keys.
extern "C" __global__ void __launch_bounds__(THREADS, WARPS == 8 ? 1 : 2)
    sparse_attention_bwd(const u16* __restrict__ grad_out, const u16* __restrict__ q, const u16* __restrict__ kv,
                         const int* __restrict__ ids, const float* __restrict__ log2_total,
                         const float* __restrict__ delta, u16* __restrict__ grad_q, void* __restrict__ sums,
                         int* exponents, i64 grad_out_stride_b, i64 grad_out_stride_s, i64 grad_out_stride_h,
                         i64 q_stride_b, i64 q_stride_s, i64 q_stride_h, i64 kv_stride_b, i64 kv_stride_k, int queries,
                         int heads, int keys, int slots, int first_key, int range, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 shared = shared_address(memory);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int head_tiles = (heads + ROWS - 1) / ROWS, block_tiles = SUMS ? 1 : head_tiles;
    const u32 query = blockIdx.x / block_tiles, b = query / queries;  // query: b * S + s
    int first_head = blockIdx.x % block_tiles * ROWS;

    Scan scan;
    scan.row = ids + (i64)query * slots;
    scan.slots = slots;
    scan.next_slot = 0;
    scan.count = scan.used = 0;
    if (slots > 0) scan_load(scan, lane);

    const u16* q_row = q + b * q_stride_b + query % queries * q_stride_s;
    const u16* g_row = grad_out + b * grad_out_stride_b + query % queries * grad_out_stride_s;
    const u16* kv_row = kv + b * kv_stride_b;
    const int group = warp / KEY_GROUPS, key_group = warp % KEY_GROUPS;
    const int row0 = group * 16 + (lane >> 2);  // this lane's score rows: row0 and row0 + 8
    // A head that does not exist has p = exp2(0 - inf) = 0 and ds = 0.
    auto load_heads = [&]() {
        const int rows = min(ROWS, heads - first_head);
        copy_heads(shared, q_row + first_head * q_stride_h, q_stride_h, rows);
        copy_heads(shared + AT_GRAD, g_row + first_head * grad_out_stride_h, grad_out_stride_h, rows);
        if (threadIdx.x < ROWS) {
            const int row = threadIdx.x;
            const i64 at = (i64)query * heads + first_head + row;
            store_float(shared + AT_ROWS + row * 4, row < rows ? log2_total[at] : INFINITY_F);
            store_float(shared + AT_ROWS + (ROWS + row) * 4, row < rows ? delta[at] : 0.0f);
        }
    };
    load_heads();

    // Where this lane reads and writes; chunks of a row are XORed with row & 7, which is lane & 7 for all of these.
    const u32 x = lane & 7, p_x = x / (8 / P_CHUNKS);  // rows of P shorter than 128 bytes share a swizzle
    const u32 q_at = shared + (group * 16 + (lane & 15)) * ROW_BYTES + (((lane >> 4) ^ x) << 4);
    const u32 k_row = key_group * GROUP_KEYS + (TILES == 1 ? 0 : (lane >> 4) * 8) + x;
    const u32 k_at = shared + AT_KEYS + k_row * ROW_BYTES + (((TILES == 1 ? lane >> 3 : (lane >> 3) & 1) ^ x) << 4);
    const u32 own_chunk = warp * (COLUMNS / 8) + (lane >> 4);
    const u32 own_at = (((lane >> 3) & 1) * 8 + x) * ROW_BYTES + ((own_chunk ^ x) << 4);  // own columns of Q or of keys
    const u32 ds_at = shared + AT_DS + (lane & 15) * P_ROW_BYTES + (((lane >> 4) ^ p_x) << 4);
    const u32 p_t_at = shared + AT_P + ((lane >> 4) * 8 + x) * P_ROW_BYTES + ((((lane >> 3) & 1) ^ p_x) << 4);
    const u32 p_store = shared + AT_P + row0 * P_ROW_BYTES + (lane & 3) * 4, p_swizzle = (row0 & 7) / (8 / P_CHUNKS);

    float dq[ROW_GROUPS][COLUMNS / 8][4];
#pragma unroll
    for (int r = 0; r < ROW_GROUPS; ++r)
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[r][j][e] = 0.0f;

    if (FIXED) exponents += (i64)b * keys;  // of this batch row
    Sum* const key0_sums = reinterpret_cast<Sum*>(sums) + ((i64)b * range - first_key) * HEAD_DIM + warp * COLUMNS;
    u32 block_ids = shared + AT_IDS;
    int have = next_block(scan, first_key, range, block_ids, warp, lane);
    if (have > 0) gather(shared + AT_KEYS, kv_row, kv_stride_k, block_ids, have, warp, lane);

#pragma unroll 1
    while (have > 0) {
        const u32 next_ids = block_ids ^ KEYS * 4;
        int have_next = 0;
        float c[PIECE / 16][COLUMNS / 8][4];
#pragma unroll 1
        for (int tile = 0; tile < (GRAD_Q ? 1 : head_tiles); ++tile) {
            if (!GRAD_Q && head_tiles > 1) {
                if (first_head != tile * ROWS) {
                    __syncthreads();  // Q, grad_out, P and dS of the tile before are read no more
                    first_head = tile * ROWS;
                    load_heads();
                }
            }
            wait_for_copies();
            __syncthreads();  // key rows, Q and grad_out are there; P, dS and the next block's ids are read no more
            if (tile == 0 && have == KEYS) have_next = next_block(scan, first_key, range, next_ids, warp, lane);

            // p = exp2(log2(e) scale q.k - log2_total), ds = scale p (grad_out.k - delta), 0 behind the last key
            float s[TILES][4], t[TILES][4];
            score_products(s, t, q_at, k_at);
            float total[2], row_delta[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                total[e] = load_float(shared + AT_ROWS + (row0 + e * 8) * 4);
                row_delta[e] = load_float(shared + AT_ROWS + (ROWS + row0 + e * 8) * 4);
            }
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                float p[4], ds[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int key = key_group * GROUP_KEYS + j * 8 + (lane & 3) * 2 + (e & 1);
                    const bool exists = key < have;
                    p[e] = exists ? exp2_fast(s[j][e] * (scale * LOG2E) - total[e >> 1]) : 0.0f;
                    ds[e] = exists ? scale * p[e] * (t[j][e] - row_delta[e >> 1]) : 0.0f;
#if FIXED
                    // Beyond float16 the term is infinite, and where lse and scores, both rounded, lie so far apart that p
                    // is (scores of 1e9): no bound of the inputs tells.
                    if (SUMS && overflows<Element>(ds[e]))
                        atomicMax(exponents + (int)load_u32(block_ids + key * 4), FIXED_BROKEN);
#endif
                }
                const u32 to = p_store + (((key_group * TILES + j) ^ p_swizzle) << 4);
                store_u32(to, Element::pack2(p[0], p[1]));
                store_u32(to + 8 * P_ROW_BYTES, Element::pack2(p[2], p[3]));
                store_u32(to + ROWS * P_ROW_BYTES, Element::pack2(ds[0], ds[1]));
                store_u32(to + (ROWS + 8) * P_ROW_BYTES, Element::pack2(ds[2], ds[3]));
            }
            __syncthreads();  // P and dS are complete

            if constexpr (GRAD_Q) {
                value_product(dq, ds_at, shared + AT_KEYS + own_at);  // grad_q += dS K
                if (SUMS || have_next > 0) __syncthreads();           // key rows are read no more
            }
            if (have_next > 0 && (GRAD_Q || tile == head_tiles - 1))
                gather(shared + AT_KEYS, kv_row, kv_stride_k, next_ids, have_next, warp, lane);

            if constexpr (SUMS) {
#pragma unroll 1
                for (int first = 0; first < KEYS; first += PIECE) {
                    if (tile == 0) {
#pragma unroll
                        for (int r = 0; r < PIECE / 16; ++r)
#pragma unroll
                            for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
                                for (int e = 0; e < 4; ++e) c[r][j][e] = 0.0f;
                    }
                    if (first >= have) break;
                    sum_products(c, p_t_at, first / 8, shared + own_at);
                    if (!GRAD_Q && tile < head_tiles - 1) continue;
#pragma unroll
                    for (int r = 0; r < PIECE / 16; ++r)
                        scatter(key0_sums, exponents, block_ids, first + r * 16, have, c[r], lane);
                }
            }
        }
        have = have_next;
        block_ids = next_ids;
    }

    // grad_q, through the memory of Q: each warp lays down its own columns and stores them as whole sectors.
    if constexpr (GRAD_Q) {
        wait_for_copies();  // Q of a query without keys
        __syncthreads();    // nobody reads Q any more
        const u32 to = shared + (lane >> 2) * ROW_BYTES + (lane & 3) * 4;
#pragma unroll
        for (int r = 0; r < ROW_GROUPS; ++r)
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                const u32 at = to + r * 16 * ROW_BYTES + (((warp * (COLUMNS / 8) + j) ^ (lane >> 2)) << 4);
                store_u32(at, Element::pack2(dq[r][j][0], dq[r][j][1]));
                store_u32(at + 8 * ROW_BYTES, Element::pack2(dq[r][j][2], dq[r][j][3]));
            }
        __syncwarp();  // the warp's columns are complete
        u16* out = grad_q + ((i64)query * heads + first_head) * HEAD_DIM + warp * COLUMNS;
        const int rows = min(ROWS, heads - first_head);
#pragma unroll 4
        for (int i = lane; i < ROWS * COLUMNS / 8; i += 32) {
            const int row = i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
            uint4 value = load_uint4(shared + row * ROW_BYTES + (((warp * (COLUMNS / 8) + chunk) ^ (row & 7)) << 4));
            if (row < rows) *reinterpret_cast<uint4*>(out + row * HEAD_DIM + chunk * 8) = value;
        }
    }
}
