// Indexer scores on Hopper: wgmma, E 64 or 128, bfloat16 or float16, up to 128 heads.
// archs: 90a
// hot: indexer_scores_sm90
//
//     score[i,j] = sum_h relu(q[i,h] . k[j]) scale w[i,h]      for entries j < limit_i, else -inf
//     limit_i    = before + (phase + i) / ratio, at most the number of entries
//
// Entries are the rows of the products and heads their columns: the sum over heads then stays inside a thread, plus one
// exchange in its quad. Entries are the A operand and live in registers; queries stream through shared memory, where
// they are the B operand as they lie in memory (K-major).
//
// Grid: persistent, one block a multiprocessor. An item is a block of ENTRIES entries by `block_queries` queries; items
//   are numbered query block by query block, and block i takes the items i, i + grid, ...: multiprocessors that run side
//   by side read the same queries, so that each query comes from memory once. Items without a visible pair do not exist.
// Block: GROUPS warpgroups, each two tiles of 64 entries (tile t of group g is number t GROUPS + g, so that a block cut by
//   the causal limit still occupies all groups), and four more warps: one starts copies, one brings weights and limits,
//   two write -inf where no item reaches.
// Shared memory (dynamic): entries of the item [E/64][ENTRIES][64], STAGES of 128 (query, head) rows [E/64][128][64], all
//   128-byte swizzled; then weights times scale in the order in which threads use them, limits, the item, barriers.
// Determinism: no atomics; a score is one sum in an order that E and the number of heads decide.
//
// The tensor cores are lent to one warpgroup after the other (HAND_OVER): while one multiplies a unit of 64 rows with its
// two tiles, the others weigh and sum theirs.
//
// Budget on one H200, S32768 P8192 I64 E128, causal: 2.2 TFLOP, 2.8 ms at 790 TFLOP/s. A unit is 512 clocks of tensor
// work for a warpgroup; relu and product are 64 instructions each a thread, relu at half rate: 130 to 200 clocks, hidden.
// Queries: 32 KB from L2 per 3072 clocks a multiprocessor, 2.4 TB/s in all. 1.07 GB of scores: 0.25 ms of memory, hidden.
//
// Log (one H200, CUDA 13.0; the case above, kernel alone; GEMM 786 to 795 TFLOP/s in the same runs. Runs of many launches
// lose clock to the power limit: 1980 MHz at first, down to 1635; the same kernel then takes 0.3 to 0.4 ms longer):
//   1  products of 64 entries with 128 rows, one tile after the other: expected 3.0 to 3.3 ms, got 3.39. Without an order of
//      the warpgroups 3.48, handing over 0, 2 or 4 instructions before the end 3.47, 3.41, 3.44. Two warpgroups 3.93; 64
//      entries a warpgroup 3.41. S4096 P1024: 0.087 ms with 64 queries an item, 0.116 with 8.
//   2  what it consists of: without the sums 2.73 ms, with sums but without loading weights 3.17, sums alone 1.70. The tensor
//      cores were busy 72 % of the active clocks, shared memory 62 %: weights cost a quarter of that.
//   3  items found by hops over equal query blocks instead of one block after the other: 8 queries an item then cost what 64
//      do, 0.085 ms at S4096.
//   4  a lane's weights read once for two tiles (units of 64 rows): 3.48 beside 3.69 for 1 in one run. A profile showed 45
//      instructions between a turn and its first product: operand descriptions moved to uniform registers.
//   5  units unrolled and descriptions added to in 32 bits, so that they are uniform from the start: three such moves; not
//      timed yet.
#ifndef ELEMENT
#define ELEMENT BFloat16
#endif
#include "common_wgmma.cuh"

#ifndef INDEX_DIM
#define INDEX_DIM 128
#endif
#ifndef HEADS
#define HEADS 64
#endif
#ifndef GROUPS
#define GROUPS 3
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef HAND_OVER
#define HAND_OVER 1  // instructions of a product that are still to be issued when the next warpgroup may begin; -1: no order
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int TILES = 2, THREADS = GROUPS * 128 + 128, ENTRIES = GROUPS * TILES * 64;
static const int QUERIES = 128 / HEADS;               // of a stage
static const bool ORDERED = HAND_OVER >= 0;
static_assert(HAND_OVER < INDEX_DIM / 16, "the turn is passed within a tile");
static const int CHUNKS = INDEX_DIM / 64, STEPS = INDEX_DIM / 16;
static const int UNITS = 2, UNIT_QUERIES = HEADS < 64 ? 64 / HEADS : 1;  // a unit: 64 (query, head) rows of a stage
static_assert((HEADS == 32 || HEADS == 64 || HEADS == 128), "units of a stage");
static const int QUAD_WEIGHTS = HEADS / 4 + 4;        // floats of a lane of a quad; four more keep the banks apart
static const u32 K_CHUNK = ENTRIES * 128, Q_CHUNK = 128 * 128, Q_BYTES = CHUNKS * Q_CHUNK;
static const u32 W_BYTES = QUERIES * 4 * QUAD_WEIGHTS * 4;
static const u32 AT_Q = CHUNKS * K_CHUNK, AT_W = AT_Q + STAGES * Q_BYTES, AT_LIMIT = AT_W + STAGES * W_BYTES;
static const u32 AT_ITEM = (AT_LIMIT + STAGES * QUERIES * 4 + 15) / 16 * 16, AT_BARS = AT_ITEM + 16;
static const int BAR_K_FULL = 0, BAR_K_FREE = 1, BAR_FULL = 2, BAR_FREE = BAR_FULL + STAGES, BARS = BAR_FREE + STAGES;
static const u32 SHARED = AT_BARS + BARS * 8;
#ifdef SHARED_BYTES
static_assert(SHARED == SHARED_BYTES, "what cuda_sm90.py asks for");
#endif
static const int LAUNCHED = 65536 / THREADS / 8 * 8;  // registers a thread has at the start
static const int PRODUCER_REGISTERS = GROUPS == 3 ? 32 : 40;
static const int MOST_REGISTERS = (LAUNCHED * (GROUPS + 1) - PRODUCER_REGISTERS) / GROUPS / 8 * 8;
static const int CONSUMER_REGISTERS = MOST_REGISTERS < 240 ? MOST_REGISTERS : 240;
#define MINUS_INFINITY __int_as_float(0xff800000)

DEVICE u32 load_u32(u32 from) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
    return v;
}
DEVICE void store_u32(u32 to, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory"); }
DEVICE float relu(float x) {  // keeps NaN
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

struct Call {
    const TensorMap *q_map, *k_map;
    const void* weights;
    float* out;
    i64 w_stride_b, w_stride_s, w_stride_h;
    u32 before, phase, ratio;
    int batch, queries, heads, entries, block_queries, weight_type, fill;
    float scale;
};

// limit_i = before + (phase + i) / ratio: how many entries query i of a batch row sees
DEVICE int limit_of(const Call& p, int i) { return (int)min(p.before + (p.phase + (u32)i) / p.ratio, (u32)p.entries); }

// The walk along this block's items.
struct Walk {
    int b, q0;   // the query block
    int number;  // the item's number among those of its query block
};

// Moves to the item's query block, over blocks with equally many items at once; false behind the last item.
DEVICE bool settle(const Call& p, Walk& walk) {
    while (true) {
        const int left = p.queries - walk.q0;
        const u32 limit = limit_of(p, walk.q0 + min(left, p.block_queries) - 1);  // of the block's last query
        const int items = (limit + (u32)(ENTRIES - 1)) / ENTRIES;
        if (walk.number < items) return true;
        int hop = (u32)(left - 1) / (u32)p.block_queries + 1;  // to the end of the batch row
        const u32 reach = items * (u32)ENTRIES;      // blocks with so many items see up to here
        if (reach < (u32)p.entries) {
            const u64 next = (u64)(reach - p.before + 1) * p.ratio - p.phase;  // the first query that sees more
            if (next < (u32)p.queries) hop = ((u32)next - (u32)walk.q0) / (u32)p.block_queries;
        }
        if (items > 0) hop = min(hop, (u32)walk.number / (u32)items);
        walk.number -= hop * items;
        if (hop * (i64)p.block_queries >= left) {
            walk.q0 = 0;
            if (++walk.b == p.batch) return false;
        } else {
            walk.q0 += hop * p.block_queries;
        }
    }
}
DEVICE bool start_walk(const Call& p, Walk& walk) {
    walk.b = walk.q0 = 0;
    walk.number = blockIdx.x;
    return settle(p, walk);
}
DEVICE bool next_item(const Call& p, Walk& walk) {
    int blocks;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));  // volatile: registers are too few to keep it in one
    walk.number += blocks;
    return settle(p, walk);
}
DEVICE int stages_of(const Call& p, const Walk& walk) {
    return (min(p.block_queries, p.queries - walk.q0) + QUERIES - 1) / QUERIES;
}

// ---- Copies: one thread --------------------------------------------------------------------------------

DEVICE void copy_thread(const Call& p, u32 shared, u32 bars) {
    int stage = 0;
    u32 parity = 1, k_parity = 1;
    Walk walk;
    for (bool more = start_walk(p, walk); more; more = next_item(p, walk)) {
        const int row0 = walk.number * ENTRIES, stages = stages_of(p, walk);
        bar_wait(bars + BAR_K_FREE * 8, k_parity);
        k_parity ^= 1;
        store_u32(shared + AT_ITEM, row0);
        store_u32(shared + AT_ITEM + 4, walk.q0);
        store_u32(shared + AT_ITEM + 8, walk.b);
        store_u32(shared + AT_ITEM + 12, stages);
        const int tiles = min(GROUPS * TILES, (p.entries - row0 + 63) / 64);  // entries beyond arrive as zeros
        bar_arrive_expecting(bars + BAR_K_FULL * 8, tiles * CHUNKS * 8192);
#pragma unroll 1
        for (int t = 0; t < tiles; t++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                load_box(shared + c * K_CHUNK + t * 8192, p.k_map, c * 64, row0 + t * 64, walk.b, 0, bars + BAR_K_FULL * 8);
#pragma unroll 1
        for (int s = 0; s < stages; s++) {
            bar_wait(bars + (BAR_FREE + stage) * 8, parity);
            bar_arrive_expecting(bars + (BAR_FULL + stage) * 8, Q_BYTES);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                load_box(shared + AT_Q + stage * Q_BYTES + c * Q_CHUNK, p.q_map, c * 64, 0, walk.q0 + s * QUERIES, walk.b,
                         bars + (BAR_FULL + stage) * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
    bar_wait(bars + BAR_K_FREE * 8, k_parity);
    store_u32(shared + AT_ITEM + 12, 0);  // no further item
    bar_arrive(bars + BAR_K_FULL * 8);
}

// ---- Weights and limits: one warp ----------------------------------------------------------------------

DEVICE float load_weight(const Call& p, i64 at) {
    if (p.weight_type == 0) return __ldg((const float*)p.weights + at);
    const u16 bits = __ldg((const u16*)p.weights + at);
    return p.weight_type == 1 ? BFloat16::load(&bits) : Float16::load(&bits);
}

DEVICE void weight_warp(const Call& p, u32 shared, u32 bars, int lane) {
    const u32 to = shared + AT_W + ((lane * 4 / HEADS * 4 + (lane & 1) * 2) * QUAD_WEIGHTS + lane % (HEADS / 4) / 2 * 2) * 4;
    u32 ring = 1;  // twice the stage, plus its parity: registers are few
    Walk walk;
    for (bool more = start_walk(p, walk); more; more = next_item(p, walk)) {
        const int end = min(p.queries - walk.q0, p.block_queries) + walk.q0;
        int n = lane * 4 / HEADS, h = lane * 4 % HEADS;  // this lane's query of a stage, and the first of its four heads
        asm volatile("" : "+r"(n), "+r"(h));  // anew for every item: registers are too few for what the compiler would keep
        i64 from = walk.b * p.w_stride_b + (walk.q0 + n) * p.w_stride_s + h * p.w_stride_h;
#pragma unroll 1
        for (int i0 = walk.q0; i0 < end; i0 += QUERIES, from += QUERIES * p.w_stride_s) {
            float w[4];  // asked for before the stage is free
#pragma unroll
            for (int u = 0; u < 4; u++)
                w[u] = i0 + n < end && h + u < p.heads ? load_weight(p, from + u * p.w_stride_h) : 0.f;
            bar_wait(bars + (BAR_FREE + (ring >> 1)) * 8, ring & 1);
#pragma unroll
            for (int u = 0; u < 4; u++)
                store_u32(to + (ring >> 1) * W_BYTES + ((u >> 1) * QUAD_WEIGHTS + (u & 1)) * 4, __float_as_uint(__fmul_rn(w[u], p.scale)));
            if (lane < QUERIES)  // -1: there is no such query
                store_u32(shared + AT_LIMIT + ((ring >> 1) * QUERIES + lane) * 4, i0 + lane < end ? limit_of(p, i0 + lane) : -1);
            __syncwarp();
            if (arrives(lane)) bar_arrive(bars + (BAR_FULL + (ring >> 1)) * 8);
            ring += 2;
            if (ring >= 2 * STAGES) ring = (ring & 1) ^ 1;
        }
    }
}

// ---- -inf where no item reaches: two warps -------------------------------------------------------------

DEVICE void fill_warp(const Call& p, int number, int lane) {
    const float4 four = make_float4(MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY);
    int q0 = blockIdx.x * 2 + number;  // the query, behind whole batch rows
#pragma unroll 1
    for (int b = 0; b < p.batch; b++, q0 -= p.queries) {
#pragma unroll 1
        for (; q0 < p.queries; q0 += gridDim.x * 2) {
            const int last = min(p.queries - q0 / p.block_queries * p.block_queries, p.block_queries) + q0 / p.block_queries * p.block_queries - 1;
            const u32 from = ((u32)limit_of(p, last) + ENTRIES - 1) / ENTRIES * ENTRIES;
            if (from >= (u32)p.entries) continue;
            float* to = p.out + ((i64)b * p.queries + q0) * p.entries + from;
            int left = p.entries - (int)from;
            const int head = min(left, (int)(-(u32)(u64)to >> 2 & 3));  // up to 16 bytes
            if (lane < head) to[lane] = MINUS_INFINITY;
            to += head, left -= head;
#pragma unroll 1
            for (int j = lane; j < left / 4; j += 32) ((float4*)to)[j] = four;
            if (lane < (left & 3)) to[left / 4 * 4 + lane] = MINUS_INFINITY;
        }
    }
}

// ---- Products and sums: GROUPS warpgroups --------------------------------------------------------------

DEVICE void wait_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory"); }
DEVICE void pass_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"((group + 1) % GROUPS + 1) : "memory"); }

// sums += sum_h relu(logit) w over a unit's heads of this thread's rows, of the first N of its tiles. A lane's weights are
// read once for all tiles: next to the tensor cores' own reading, shared memory has little to spare.
template <int N>
DEVICE void weigh_unit(float (&sums)[UNIT_QUERIES][TILES][2], const u32 (&a)[TILES][STEPS][4], u32 rows, u32 weights, int heads, int group, int lane) {
    // The upper half of an operand's description is the same for all; the lower one is added to without a carry.
    const u32 low = (rows & 0x3ffff) >> 4 | 1u << 16;
    float d[N][32];
    wgmma_begin();
#pragma unroll
    for (int t = 0; t < N; t++)
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            const u64 at = (u64)(1024 >> 4 | 1u << 30) << 32 | (low + (((i >> 2) * Q_CHUNK + (i & 3) * 32) >> 4));
            if (i == 0) wgmma_m64n64k16_rs_first(d[t], a[t][0], at);
            else wgmma_m64n64k16_rs(d[t], a[t][i], at, 1);
            if (ORDERED && t == N - 1 && i == STEPS - 1 - HAND_OVER) pass_turn(group);
        }
    wgmma_end();
    wgmma_wait();
    if (heads < 64 / UNIT_QUERIES) {  // a head that does not exist adds nothing: its 0 * inf is NaN
#pragma unroll
        for (int t = 0; t < N; t++)
#pragma unroll
            for (int x = 0; x < 32; x++)
                if ((x >> 2) % (8 / UNIT_QUERIES) * 8 + (lane & 3) * 2 + (x & 1) >= heads) d[t][x] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < UNIT_QUERIES; n++) {
        float part[N][2][2];
#pragma unroll
        for (int v = 0; v < 4 / UNIT_QUERIES; v++) {
            float w[4];
            asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                         : "=f"(w[0]), "=f"(w[1]), "=f"(w[2]), "=f"(w[3])
                         : "r"(weights + (n * 4 * QUAD_WEIGHTS + v * 4) * 4)
                         : "memory");
#pragma unroll
            for (int t = 0; t < N; t++)
#pragma unroll
                for (int x = 0; x < 4; x++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const float logit = relu(d[t][((n * 4 / UNIT_QUERIES + v) * 2 + (x >> 1)) * 4 + e * 2 + (x & 1)]);
                        part[t][e][x & 1] = v == 0 && x < 2 ? logit * w[x] : __fmaf_rn(logit, w[x], part[t][e][x & 1]);
                    }
        }
#pragma unroll
        for (int t = 0; t < N; t++)
#pragma unroll
            for (int e = 0; e < 2; e++) sums[n][t][e] += part[t][e][0] + part[t][e][1];
    }
}

DEVICE void score_group(const Call& p, u32 shared, u32 bars, int group, int thread) {
    const int lane = thread & 31, warp = thread >> 5;
    u32 ring = 0;  // parities of the stages (1) and of the entries (2), four times the stage: registers are few
    if (ORDERED && group == GROUPS - 1) pass_turn(group);
    while (true) {
        bar_wait(bars + BAR_K_FULL * 8, ring >> 1 & 1);
        ring ^= 2;
        const int row0 = load_u32(shared + AT_ITEM), q0 = load_u32(shared + AT_ITEM + 4), b = load_u32(shared + AT_ITEM + 8);
        int left = load_u32(shared + AT_ITEM + 12);
        if (left == 0) break;
        u32 a[TILES][STEPS][4];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const int r = (t * GROUPS + group) * 64 + warp * 16 + (lane & 15);
                const u32 from = shared + (i >> 2) * K_CHUNK + r * 128 + ((((i & 3) * 2 + (lane >> 4)) ^ (r & 7)) << 4);
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                             : "=r"(a[t][i][0]), "=r"(a[t][i][1]), "=r"(a[t][i][2]), "=r"(a[t][i][3])
                             : "r"(from)
                             : "memory");
            }
        __syncwarp();
        if (arrives(lane)) bar_arrive(bars + BAR_K_FREE * 8);
        // What this lane writes: an entry of one of its tiles, see below.
        const u32 first = row0 + group * 64, entry = first + (lane >> 1 & 1) * GROUPS * 64 + warp * 16 + (lane & 1) * 8 + (lane >> 2);
        float* to = p.out + ((i64)b * p.queries + q0) * p.entries + entry;
#pragma unroll 1
        for (; left > 0; left--) {
            const u32 stage = ring >> 2;
            bar_wait(bars + (BAR_FULL + stage) * 8, ring & 1);
            float sums[UNIT_QUERIES][TILES][2];
#pragma unroll  // so that the compiler sees operands that all threads share: moving them there takes longer than a turn allows
            for (int u = 0; u < UNITS; u++) {
                const u32 at_limits = shared + AT_LIMIT + (stage * QUERIES + (QUERIES > 1 ? u * UNIT_QUERIES : 0)) * 4;
                int most = 0;  // entries that a query of the unit sees
#pragma unroll
                for (int n = 0; n < UNIT_QUERIES; n++) most = max(most, (int)load_u32(at_limits + n * 4));
                const bool seen = first < (u32)most;
                const u32 rows = shared + AT_Q + stage * Q_BYTES + u * 64 * 128;
                u32 in_quad = lane & 3;
                asm volatile("" : "+r"(in_quad));  // anew for every unit: registers are few
                const u32 weights = shared + AT_W + stage * W_BYTES + in_quad * QUAD_WEIGHTS * 4 +
                                    u * (QUERIES > 1 ? UNIT_QUERIES * 4 * QUAD_WEIGHTS : 16) * 4;
                if (QUERIES > 1 || u == 0)
#pragma unroll
                    for (int n = 0; n < UNIT_QUERIES; n++) sums[n][0][0] = sums[n][0][1] = sums[n][1][0] = sums[n][1][1] = 0.f;
                if (ORDERED) wait_turn(group);
                const int heads = p.heads - (QUERIES > 1 ? 0 : u * 64);
                if (first + GROUPS * 64 < (u32)most) weigh_unit<2>(sums, a, rows, weights, heads, group, lane);
                else if (seen) weigh_unit<1>(sums, a, rows, weights, heads, group, lane);
                else if (ORDERED) pass_turn(group);
                if (QUERIES == 1 && u == 0) continue;
#pragma unroll
                for (int n = 0; n < UNIT_QUERIES; n++) {
                    // The quad's sums: lane t of it keeps row (t & 1) * 8 of tile t >> 1.
                    float half[2];
#pragma unroll
                    for (int t = 0; t < 2; t++)
                        half[t] = (lane & 1 ? sums[n][t][1] : sums[n][t][0]) +
                                  __shfl_xor_sync(FULL_WARP, lane & 1 ? sums[n][t][0] : sums[n][t][1], 1);
                    const float score = (lane & 2 ? half[1] : half[0]) + __shfl_xor_sync(FULL_WARP, lane & 2 ? half[0] : half[1], 2);
                    const int limit = load_u32(at_limits + n * 4);  // below 0: there is no such query
                    if (limit >= 0) {
                        if (entry < (u32)p.entries && (seen || p.fill)) *to = entry < (u32)limit ? score : MINUS_INFINITY;
                        to += p.entries;
                    }
                }
            }
            __syncwarp();
            if (arrives(lane)) bar_arrive(bars + (BAR_FREE + stage) * 8);
            ring += 4;
            if (ring >= STAGES * 4) ring ^= STAGES * 4 + 1;
        }
    }
}

// ---- Kernel --------------------------------------------------------------------------------------------

// q_map: q as [B][S][heads][E], boxes of QUERIES by HEADS by 64 columns; k_map: entries as [1][B][P][E], boxes of 64 by 64
// columns; 128-byte swizzled. Strides of the weights in elements; weight_type 0 float32, 1 bfloat16, 2 float16. out
// [B][S][P]. phase < 2^31. block_queries: a multiple of QUERIES. fill: write -inf where nobody looks.
extern "C" __global__ void __launch_bounds__(THREADS, 1) indexer_scores_sm90(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const void* weights, float* out, i64 w_stride_b,
    i64 w_stride_s, i64 w_stride_h, u32 before, u32 phase, u32 ratio, int batch, int queries, int heads, int entries, int block_queries,
    int weight_type, int fill, float scale) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    const u32 shared = (u32)__cvta_generic_to_shared(dynamic), bars = shared + AT_BARS;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const Call p = {&q_map, &k_map, weights, out, w_stride_b, w_stride_s, w_stride_h, before, phase, ratio,
                    batch, queries, heads, entries, block_queries, weight_type, fill, scale};
    if (threadIdx.x == 0) {
        bar_init(bars + BAR_K_FULL * 8, 1);
        bar_init(bars + BAR_K_FREE * 8, of_warps(GROUPS * 4));
        for (int i = 0; i < STAGES; i++) bar_init(bars + (BAR_FULL + i) * 8, 1 + of_warps(1));
        for (int i = 0; i < STAGES; i++) bar_init(bars + (BAR_FREE + i) * 8, of_warps(GROUPS * 4));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();  // barriers are initialised before anyone uses them
    if (warp < GROUPS * 4) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        score_group(p, shared, bars, warp >> 2, threadIdx.x & 127);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (warp == GROUPS * 4) {
            if (lane == 0) copy_thread(p, shared, bars);
        } else if (warp == GROUPS * 4 + 1) {
            weight_warp(p, shared, bars, lane);
        } else if (fill) {
            fill_warp(p, warp & 1, lane);
        }
    }
}
