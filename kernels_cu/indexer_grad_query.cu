// Gradients of indexer scores, one query at a time, on mma.sync: sm_80 and later, INDEX_DIM 64 or 128, up to HEADS heads.
// archs: 80 86 89 90 100 120
// hot: indexer_grad_query
//
//     l[t,h]    = q[h] . k[id_t]                       over slots t with an id in [0, P); on = (l > 0)
//     grad_q[h] = scale w[h] sum_t on[t,h] g[t] k[id_t]
//     grad_w[h] = scale sum_t relu(l[t,h]) g[t]
//     grad_k[id_t] += scale g[t] sum_h on[t,h] w[h] q[h]        once per slot, summed over all heads here
//
// Without ids (dense scores) slot t is entry t of the entries that the query sees, and grad_k is another kernel's
// (indexer_grad_entry.cu).
//
// Grid: one block per query, last query first (in causal order the longest). Block: WARPS warps; 64 slots at a time.
//   logits: 4 slot groups x HEADS / 64 head groups: a warp has 16 slots by 64 heads.
//   grad_k: the same slot groups; a warp has INDEX_DIM / (HEADS / 64) columns. Whether on is known from 32 bits a lane.
//   grad_q: a warp has all heads by INDEX_DIM / WARPS columns, in registers for the whole query.
// Shared memory (dynamic): q [HEADS][E], two stages of key rows [64][E], on g [64][HEADS], lists of up to LIST valid slots;
//   16-byte chunks swizzled by XOR with the row, so that ldmatrix and copies meet no bank conflict.
// Determinism: grad_q and grad_w sum in slot order, without atomics: their bits depend on the query's own valid slots alone.
//   grad_k: FIXED 1 adds integers (fixed_sum.cuh), whose sum has no order; FIXED 0 adds float32 atomically.
//
// Operands are what is exact in 16 bits or nearly so: q, k, on w (w is usually of that type) and on g (g rounded once a
// slot, as grad_q's sum sees it); scale and g of grad_k, scale and w of grad_q are multiplied in float32 afterwards.
// w and g are first scaled by powers of two near their largest magnitude: float16 neither overflows nor underflows.
// on 0 multiplies w and g instead of replacing them, so that NaN and infinities stay (0 NaN = NaN). Slots that do not exist
// are zero-filled by the copy, which reads nothing.
#include "indexer_grad.cuh"
#include "fixed_sum.cuh"

#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#ifndef INDEX_DIM
#define INDEX_DIM 128
#endif
#ifndef HEADS
#define HEADS 64
#endif
#ifndef FIXED
#define FIXED 0
#endif
typedef ELEMENT Element;

static const int HALVES = HEADS / 64, WARPS = 4 * HALVES, THREADS = 32 * WARPS, SLOTS = 64, LIST = 1024;
static const int CHUNKS = INDEX_DIM / 8, K_COLUMNS = INDEX_DIM / HALVES, Q_TILES = INDEX_DIM / WARPS / 8, K_STEPS = INDEX_DIM / 16;
static const int PASS = HALVES > 1 ? 32 : 64, PASS_TILES = PASS / 8;  // columns of grad_k in registers at a time
static const u32 ROW = INDEX_DIM * 2, G_ROW = HEADS * 2, STAGE = SLOTS * ROW;
static const u32 AT_K = HEADS * ROW, AT_G = AT_K + 2 * STAGE, AT_W = AT_G + SLOTS * G_ROW, AT_ID = AT_W + HEADS * 4;
static const u32 AT_VALUE = AT_ID + LIST * 4, AT_BITS = AT_VALUE + LIST * 4, AT_PART = AT_BITS + (HALVES > 1 ? THREADS * 4 : 0);
static const u32 SHARED = AT_PART + 4 * HEADS * 4;
#ifdef SHARED_BYTES  // what the launch asks for
static_assert(SHARED == SHARED_BYTES, "shared memory");
#endif

// Starts copying 64 listed key rows from `first` on; rows from `count` on are zeros.
DEVICE void gather(const u16* k, i64 stride, u32 shared, u32 stage, int first, int count) {
    const int chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int i = 0; i < SLOTS * CHUNKS / THREADS; ++i) {
        const int row = threadIdx.x / CHUNKS + i * (THREADS / CHUNKS), at = first + row;
        const bool exists = at < count;
        const int id = exists ? (int)load_u32(shared + AT_ID + at * 4) : 0;
        copy16_if(stage + row * ROW + ((chunk ^ (row & 7)) << 4), k + id * stride + chunk * 8, exists);  // 64-bit: id * stride
    }
    copies_commit();
}

// ---- Additions to grad_k -------------------------------------------------------------------------------

// Lanes of a quad trade numbers until each holds one of every lane's: an addition of integers then covers whole sectors.
DEVICE void transpose(float (&x)[4], int lane) {
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const float r = __shfl_xor_sync(FULL_WARP, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? r : x[i], x[i + 1] = odd ? x[i + 1] : r;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float r = __shfl_xor_sync(FULL_WARP, high ? x[i] : x[i + 2], 2);
        x[i] = high ? r : x[i], x[i + 2] = high ? x[i + 2] : r;
    }
}

// 16 columns of rows r (lane / 4) and r + 8 from a pair of tiles: lanes trade pairs, so that each adds 4 neighbours.
// at: the row's columns, null where nothing is added; factor: what the products are multiplied with.
template <typename Sum>
DEVICE void scatter_pair(const float (&c0)[4], const float (&c1)[4], Sum* const (&at)[2], const float (&factor)[2], const float (&unit)[2],
                         int column, int lane) {
    const bool odd = lane & 1;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float f = factor[e], u0 = c0[e * 2] * f, u1 = c0[e * 2 + 1] * f, v0 = c1[e * 2] * f, v1 = c1[e * 2 + 1] * f;
        const float r0 = __shfl_xor_sync(FULL_WARP, odd ? u0 : v0, 1), r1 = __shfl_xor_sync(FULL_WARP, odd ? u1 : v1, 1);
        float x[4] = {odd ? r0 : u0, odd ? r1 : u1, odd ? v0 : r0, odd ? v1 : r1};  // columns 0, 8, 4, 12 and on, by lane
#if FIXED
        transpose(x, lane);
        if (at[e] == nullptr) continue;
        Sum* to = at[e] + column + (lane & 3);
        add_fixed(to, to_fixed(x[0], unit[e]));
        add_fixed(to + 8, to_fixed(x[1], unit[e]));
        add_fixed(to + 4, to_fixed(x[2], unit[e]));
        add_fixed(to + 12, to_fixed(x[3], unit[e]));
#else
        if (at[e] != nullptr) add4(at[e] + column + (odd ? 6 : 0) + (lane & 3) * 2, x[0], x[1], x[2], x[3]);
#endif
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------

// Grid x: queries, y: batch rows from batch_first on. grad_q, grad_w null: not wanted. sums [rows of y][key_last - key_first][E]
// null: grad_k not wanted. bounds [rows of y][key_last - key_first] and terms (FIXED): see indexer_grad_bounds.
// ids null: dense, slots = entries, query s sees entries below (query_start + s + 1) / ratio.
// Strides in elements; the last of q and k is 1, weights [B][S][I], ids [B][S][T] and grad_q, grad_w are contiguous.
extern "C" __global__ void __launch_bounds__(THREADS, HALVES > 1 ? 1 : 2) indexer_grad_query(
    const void* grad_scores, const u16* q, const u16* k, const void* weights, const void* ids, u16* grad_q, void* grad_w, void* sums,
    const u32* bounds, i64 g_stride_b, i64 g_stride_s, i64 g_stride_t, i64 q_stride_b, i64 q_stride_s, i64 q_stride_h,
    i64 k_stride_b, i64 k_stride_p, i64 query_start, i64 ratio, int batch_first, int heads, int slots, int g_kind, int w_kind,
    int ids_wide, int key_first, int key_last, u32 terms, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = shared_address(dynamic);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp & 3, half = warp >> 2;
    const int b = batch_first + blockIdx.y, s = gridDim.x - 1 - blockIdx.x;
    if (ids == nullptr) {
        const i64 sees = (query_start + s + 1) / ratio;
        slots = sees < slots ? (int)sees : slots;
    }
    const i64 query = (i64)b * gridDim.x + s;
    const Slots p = {ids, grad_scores, query * slots, b * g_stride_b + s * g_stride_s, g_stride_t, slots, g_kind, ids_wide, key_first, key_last};
    int id[LIST / THREADS];
    float g[LIST / THREADS];
    load_slots(p, warp * (LIST / WARPS) + lane, id, g);  // first of all: the longest wait
    k += b * k_stride_b;

    // q and w; heads beyond I are zeros.
    {
        const int chunk = threadIdx.x % CHUNKS;
        const u16* from = q + b * q_stride_b + s * q_stride_s;
#pragma unroll
        for (int i = 0; i < HEADS * CHUNKS / THREADS; ++i) {
            const int row = threadIdx.x / CHUNKS + i * (THREADS / CHUNKS);
            copy16_if(shared + row * ROW + ((chunk ^ (row & 7)) << 4), from + (row < heads ? row * q_stride_h : 0) + chunk * 8, row < heads);
        }
        copies_commit();
    }
    Power w_power = {1.f, 1.f};
    {
        float w[HEADS / 32], top = 0.f;
#pragma unroll
        for (int i = 0; i < HEADS / 32; ++i) {
            w[i] = i * 32 + lane < heads ? load_number(weights, query * heads + i * 32 + lane, w_kind) : 0.f;
            top = larger(top, w[i]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) top = larger(top, __shfl_xor_sync(FULL_WARP, top, step));
        w_power = power_of(top);
        if (warp == 0) {
#pragma unroll
            for (int i = 0; i < HEADS / 32; ++i) store_float(shared + AT_W + (i * 32 + lane) * 4, w[i] * w_power.down);
        }
    }

    float acc[HEADS / 16][Q_TILES][4], acc_w[16];  // grad_q / (scale w), grad_w / scale of this lane's 16 heads
#pragma unroll
    for (int m = 0; m < HEADS / 16; ++m)
#pragma unroll
        for (int n = 0; n < Q_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
#pragma unroll
    for (int i = 0; i < 16; ++i) acc_w[i] = 0.f;
    float g_top = 0.f;
    Power g_power = {1.f, 1.f};
    bool any = false;

    for (int first = 0; first < slots; first += LIST) {
        if (first > 0) load_slots(p, first + warp * (LIST / WARPS) + lane, id, g);
        __syncthreads();  // the previous list is done with
        const int count = build_list<WARPS>(id, g, shared + AT_ID, shared + AT_VALUE, shared + AT_PART, g_top, warp, lane);
        if (count == 0) continue;
        gather(k, k_stride_p, shared, shared + AT_K, 0, count);
        const Power power = power_of(g_top);
        if (any && power.up != g_power.up) {  // exact: a ratio of powers of two
            const float r = g_power.up * power.down;
#pragma unroll
            for (int m = 0; m < HEADS / 16; ++m)
#pragma unroll
                for (int n = 0; n < Q_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) acc[m][n][e] *= r;
        }
        g_power = power;
        any = true;

        for (int block = 0, stage = 0; block < count; block += SLOTS, stage ^= 1) {
            const u32 keys = shared + AT_K + stage * STAGE;
            copies_wait<0>();
            __syncthreads();  // rows have arrived; the other stage, on g and the bits are done with
            if (block + SLOTS < count) gather(k, k_stride_p, shared, shared + AT_K + (stage ^ 1) * STAGE, block + SLOTS, count);

            // l = K Q^T: 16 slots by 64 heads.
            float l[8][4];
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) l[j][e] = 0.f;
            {
                const int row = group * 16 + (lane & 15), head = half * 64 + (lane & 7) + ((lane >> 4) << 3);
                const u32 a_at = keys + row * ROW + (((lane >> 4) ^ (row & 7)) << 4);
                const u32 b_at = shared + head * ROW + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
#pragma unroll
                for (int i = 0; i < K_STEPS; ++i) {
                    u32 a[4];
                    load_matrices(a, (a_at ^ ((i & 3) << 5)) + (i >> 2) * 128);
#pragma unroll
                    for (int j = 0; j < 8; j += 2) {
                        u32 c[4];
                        load_matrices(c, (b_at ^ ((i & 3) << 5)) + (i >> 2) * 128 + j * 8 * ROW);
                        multiply<Element>(l[j], a, c[0], c[1]);
                        multiply<Element>(l[j + 1], a, c[2], c[3]);
                    }
                }
            }

            // on w as the A operand of grad_k, on g to shared memory, relu(l) g into grad_w.
            const int at0 = block + group * 16 + (lane >> 2), at1 = at0 + 8;
            const bool exists0 = at0 < count, exists1 = at1 < count;
            const float g0 = exists0 ? load_float(shared + AT_VALUE + at0 * 4) : 0.f, g1 = exists1 ? load_float(shared + AT_VALUE + at1 * 4) : 0.f;
            if (!exists1) {  // q may be infinite: 0 inf is no logit
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    l[j][2] = l[j][3] = 0.f;
                    if (!exists0) l[j][0] = l[j][1] = 0.f;
                }
            }
            u32 on_w[4][4], bits = 0;
            {
                const float y0 = g0 * g_power.down, y1 = g1 * g_power.down, z0 = y0 * 0.f, z1 = y1 * 0.f;
                const int row = group * 16 + (lane >> 2);
                const u32 to = shared + AT_G + row * G_ROW + half * 128 + ((lane >> 2) << 4) + (lane & 3) * 4;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 w = load_float2(shared + AT_W + (half * 64 + j * 8 + (lane & 3) * 2) * 4);
                    const bool p00 = l[j][0] > 0.f, p01 = l[j][1] > 0.f, p10 = l[j][2] > 0.f, p11 = l[j][3] > 0.f;
                    const float zx = w.x * 0.f, zy = w.y * 0.f;
                    on_w[j >> 1][(j & 1) * 2] = Element::pack2(p00 ? w.x : zx, p01 ? w.y : zy);
                    on_w[j >> 1][(j & 1) * 2 + 1] = Element::pack2(p10 ? w.x : zx, p11 ? w.y : zy);
                    store_u32(to ^ (j << 4), Element::pack2(p00 ? y0 : z0, p01 ? y0 : z0));
                    store_u32((to ^ (j << 4)) + 8 * G_ROW, Element::pack2(p10 ? y1 : z1, p11 ? y1 : z1));
                    acc_w[j * 2] += relu(l[j][0]) * g0 + relu(l[j][2]) * g1;
                    acc_w[j * 2 + 1] += relu(l[j][1]) * g0 + relu(l[j][3]) * g1;
                    if (HALVES > 1) bits |= ((u32)p00 | (u32)p01 << 1 | (u32)p10 << 2 | (u32)p11 << 3) << (j * 4);
                }
                if (HALVES > 1) store_u32(shared + AT_BITS + threadIdx.x * 4, bits);
            }
            __syncthreads();  // on g and the bits are complete

            if (grad_q != nullptr) {  // acc += (on g)^T K
                const u32 a_at = shared + AT_G + ((lane & 7) + ((lane >> 4) << 3)) * G_ROW + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
                const u32 b_at = keys + lane * ROW + (warp * Q_TILES >> 3) * 128 + (((warp * Q_TILES & 7) ^ (lane & 7)) << 4);
#pragma unroll
                for (int i = 0; i < SLOTS / 32; ++i) {
                    u32 c[Q_TILES][4];  // 32 slots by 8 columns
#pragma unroll
                    for (int n = 0; n < Q_TILES; ++n)
                        load_matrices_transposed(c[n], (b_at ^ (n << 4)) + i * 32 * ROW);
#pragma unroll
                    for (int k16 = 0; k16 < 2; ++k16)
#pragma unroll
                        for (int m = 0; m < HEADS / 16; ++m) {
                            u32 a[4];
                            load_matrices_transposed(a, (a_at ^ ((m & 3) << 5)) + (m >> 2) * 128 + (i * 32 + k16 * 16) * G_ROW);
#pragma unroll
                            for (int n = 0; n < Q_TILES; ++n) multiply<Element>(acc[m][n], a, c[n][k16 * 2], c[n][k16 * 2 + 1]);
                        }
                }
            }

            if (sums != nullptr) {  // scale g (on w) Q, added to the entries' rows
#if FIXED
                typedef i64 Sum;
#else
                typedef float Sum;
#endif
                Sum* at[2] = {nullptr, nullptr};
                float factor[2], unit[2] = {0.f, 0.f};
                const i64 keys_here = key_last - key_first, first_row = blockIdx.y * keys_here - key_first;
                factor[0] = scale * g0 * w_power.up, factor[1] = scale * g1 * w_power.up;
                if (exists0) {
                    const i64 row = first_row + (int)load_u32(shared + AT_ID + at0 * 4);
                    at[0] = (Sum*)sums + row * INDEX_DIM + half * K_COLUMNS;
                    if (FIXED) unit[0] = fixed_factor(fixed_exponent(__uint_as_float(__ldg(bounds + row)), terms));
                }
                if (exists1) {
                    const i64 row = first_row + (int)load_u32(shared + AT_ID + at1 * 4);
                    at[1] = (Sum*)sums + row * INDEX_DIM + half * K_COLUMNS;
                    if (FIXED) unit[1] = fixed_factor(fixed_exponent(__uint_as_float(__ldg(bounds + row)), terms));
                }
                u32 other = 0;
                if (HALVES > 1) other = load_u32(shared + AT_BITS + (threadIdx.x ^ 128) * 4);
#pragma unroll 1
                for (int pass = 0; pass < K_COLUMNS / PASS; ++pass) {
                    float c[PASS_TILES][4];
#pragma unroll
                    for (int n = 0; n < PASS_TILES; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) c[n][e] = 0.f;
                    const u32 chunk = half * (K_COLUMNS / 8) + pass * PASS_TILES, b_shift = (chunk >> 3) * 128 + (((chunk & 7) ^ (lane >> 4) ^ (lane & 7)) << 4);
#pragma unroll
                    for (int side = 0; side < HALVES; ++side) {  // own heads, then those of the other warp with these slots
                        const int h0 = (side ? half ^ 1 : half) * 64;
                        const u32 b_at = shared + (h0 + (lane & 15)) * ROW + b_shift;
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            u32 a[4];
#pragma unroll
                            for (int e = 0; e < 4; ++e) {
                                a[e] = on_w[i][e];
                                if (side) {
                                    const float2 w = load_float2(shared + AT_W + (h0 + (i * 2 + (e >> 1)) * 8 + (lane & 3) * 2) * 4);
                                    const u32 two = other >> ((i * 2 + (e >> 1)) * 4 + (e & 1) * 2);
                                    a[e] = Element::pack2(two & 1 ? w.x : w.x * 0.f, two & 2 ? w.y : w.y * 0.f);
                                }
                            }
#pragma unroll
                            for (int n = 0; n < PASS_TILES; n += 2) {
                                u32 d[4];
                                load_matrices_transposed(d, (b_at ^ (n << 4)) + i * 16 * ROW);
                                multiply<Element>(c[n], a, d[0], d[1]);
                                multiply<Element>(c[n + 1], a, d[2], d[3]);
                            }
                        }
                    }
#pragma unroll
                    for (int n = 0; n < PASS_TILES; n += 2) scatter_pair(c[n], c[n + 1], at, factor, unit, pass * PASS + n * 8, lane);
                }
            }
        }
    }
    copies_wait<0>();  // q of a query without slots
    if (grad_q == nullptr) return;

    // grad_q = scale w acc; a query without slots gets zeros whatever q, w and g hold.
    __syncthreads();  // w is there; lists and maxima are done with
#pragma unroll
    for (int m = 0; m < HEADS / 16; ++m)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int h = m * 16 + e * 8 + (lane >> 2);
            const float f = load_float(shared + AT_W + h * 4) * w_power.up * scale;
            if (h < heads) {
#pragma unroll
                for (int n = 0; n < Q_TILES; ++n) {
                    const float x = acc[m][n][e * 2] * g_power.up * f, y = acc[m][n][e * 2 + 1] * g_power.up * f;
                    u16* to = grad_q + (query * heads + h) * INDEX_DIM + (warp * Q_TILES + n) * 8 + (lane & 3) * 2;
                    *(u32*)to = any ? Element::pack2(x, y) : 0u;
                }
            }
        }
    // grad_w: lanes of equal lane % 4 have the same heads.
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) acc_w[i] += __shfl_xor_sync(FULL_WARP, acc_w[i], step);
        if (lane < 4) store_float(shared + AT_PART + (group * HEADS + half * 64 + (i >> 1) * 8 + lane * 2 + (i & 1)) * 4, acc_w[i]);
    }
    __syncthreads();  // the four slot groups' parts are there
    for (int h = threadIdx.x; h < heads; h += THREADS) {
        float x = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) x += load_float(shared + AT_PART + (i * HEADS + h) * 4);
        store_number(grad_w, query * heads + h, w_kind, any ? x * scale : 0.f);
    }
}
