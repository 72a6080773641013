// Exact top-k of score rows: radix selection, up to 2048 of any number of entries. Float32, bfloat16 or float16 scores.
// archs: 80 86 89 90 100 120
// hot: indexer_topk
//
//     ids[row] = the topk visible entries with the largest scores; of equal ones (-0.0 equals +0.0) those with smaller ids;
//                never NaN nor -inf; -1 where there are not enough
//     visible  : j < limit_i = before + (phase + i) / ratio; DOCUMENTS: same segment, not 0, and early enough in it
//
// Grid: one block a row. Block: THREADS; a tile is THREADS x 4 VECTORS entries, four neighbours a thread and vector.
// Shared memory (dynamic): 2049 words, first bins, then chosen ids; sort_size pairs of words for the order by score.
// Determinism: integer counts alone, so atomics leave no trace; bits of a row depend on its scores alone.
//
// A score becomes a rank, a 32-bit number that grows as scores fall; entries that may not be chosen have the rank NONE.
// Digits of 11, 11 and 10 bits are counted in turn among the ranks that share the digits found so far, until the ranks up
// to some number are exactly topk. Ranks of a row that fits a tile stay in registers; longer rows are read once a pass.
// Nothing behind the causal limit is read. A row with at most topk entries needs no counting.
//
// Budget on one H200, [32768, 8192] float32, causal, k 1024: 537 MB in, 134 MB out: 0.16 ms of memory. About 20 instructions
// an entry: 0.2 ms. A block's dozen barriers (5 us a row) want at least three blocks a multiprocessor.
#include "common.cuh"

#ifndef ELEMENT
#define ELEMENT Float32
#endif
#ifndef THREADS
#define THREADS 512
#endif
#ifndef VECTORS
#define VECTORS 4
#endif
#ifndef BLOCKS
#define BLOCKS 3  // of a multiprocessor, for the register budget
#endif
#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int WARPS = THREADS / 32, TILE = THREADS * 4 * VECTORS, QUARTERS = VECTORS / 4;
static const int BINS = 2048, OWN_BINS = BINS / THREADS;
static const u32 NONE = 0xffffffffu, ALL = 0xfffffffeu;
static_assert(VECTORS % 4 == 0 && WARPS <= 32 && OWN_BINS % 4 == 0, "counts are packed in fours");
#define MINUS_INFINITY __int_as_float(0xff800000)

// +inf 0, ..., both zeros 0x7f800000, ..., the lowest finite score 0xfeffffff; NaN and -inf: NONE
DEVICE u32 rank_of(float score) {
    const u32 bits = __float_as_uint(score);
    const u32 rank = (int)bits < 0 ? bits - 0x00800000u : 0x7f800000u - bits;
    return rank < 0xff000000u ? rank : NONE;
}

struct Row {
    const element* scores;
    int limit;     // entries behind it are not read
    bool aligned;  // four neighbours in one load
#if DOCUMENTS
    const i64 *segments, *positions;  // of the entries
    i64 segment, groups;              // the query's, and how many groups of its document are finished
#endif
};

DEVICE bool visible(const Row& row, int j) {
#if DOCUMENTS
    return __ldg(row.segments + j) == row.segment && __ldg(row.positions + j) < row.groups;
#else
    return true;
#endif
}

DEVICE void load_four(const element* from, float (&x)[4]) {
    if (sizeof(element) == 4) {
        const uint4 chunk = __ldg((const uint4*)from);
        x[0] = __uint_as_float(chunk.x), x[1] = __uint_as_float(chunk.y);
        x[2] = __uint_as_float(chunk.z), x[3] = __uint_as_float(chunk.w);
    } else {
        const uint2 chunk = __ldg((const uint2*)from);
        const u16 raw[4] = {(u16)chunk.x, (u16)(chunk.x >> 16), (u16)chunk.y, (u16)(chunk.y >> 16)};
#pragma unroll
        for (int c = 0; c < 4; c++) x[c] = Element::load((const element*)&raw[c]);
    }
}

// How many vectors of a tile reach entries that are read; the others hold NONE.
DEVICE int live_of(const Row& row, int tile) { return (row.limit - tile * TILE - 1) / (THREADS * 4) + 1; }

// First entry of a thread's vector v of a tile.
DEVICE u32 entry_of(int tile, int v) { return (u32)tile * TILE + (v * THREADS + threadIdx.x) * 4; }

DEVICE void load_ranks(u32 (&rank)[VECTORS][4], const Row& row, int tile) {
    const int live = live_of(row, tile);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        const u32 j = entry_of(tile, v), limit = row.limit;
        float x[4] = {MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY, MINUS_INFINITY};
        if (v >= live) {
#pragma unroll
            for (int c = 0; c < 4; c++) rank[v][c] = NONE;
            continue;
        }
        if (row.aligned && j + 3 < limit) {
            load_four(row.scores + j, x);
        } else {
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (j + c < limit) x[c] = Element::load(row.scores + j + c);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            rank[v][c] = rank_of(x[c]);
#if DOCUMENTS
            if (rank[v][c] != NONE && !visible(row, (int)j + c)) rank[v][c] = NONE;
#endif
        }
    }
}

// Counts the digits at `shift` of ranks whose digits from `above` on are the prefix; FIRST: the upper digits of all, NONE
// in the last bin, where no other rank is. Ranks that do not count go to a bin that nobody reads: a branch costs more.
template <bool FIRST>
DEVICE void count(const u32 (&rank)[VECTORS][4], u32 bins, u32 prefix, int above, int shift, int live) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (v >= live) break;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 r = rank[v][c];
            const u32 at = FIRST ? r >> 19 & 0x1ffc : r >> above == prefix ? (r >> shift & (BINS - 1)) * 4 : BINS * 4;
            asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bins + at) : "memory");
        }
    }
}

struct Shared {
    u32 totals[2][QUARTERS][WARPS];  // of the warps, for two tiles in turn
    u32 warp_bins[WARPS];
    u32 bin, before, count, total;  // the bin that holds the last entry wanted
    u32 cut;
};

// Where this thread's vectors begin among the counted entries of a tile; returns how many the tile has. counts: one
// byte a vector. One barrier.
DEVICE int scan_tile(int (&before)[VECTORS], const u32 (&counts)[QUARTERS], Shared& s, int tile, int lane, int warp) {
    u32 sums[QUARTERS];
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
        sums[q] = counts[q];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(FULL_WARP, sums[q], step);
            if (lane >= step) sums[q] += other;  // a byte never passes 128
        }
        if (lane == 31) s.totals[tile & 1][q][warp] = sums[q];
    }
    __syncthreads();  // totals are there; the next tile but one may write here again
    int start = 0;
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
        const u32 mine = lane < WARPS ? s.totals[tile & 1][q][lane] : 0;
        const u32 even = mine & 0x00ff00ffu, odd = mine >> 8 & 0x00ff00ffu;  // two vectors a word
        u32 even_sum = even, odd_sum = odd;
#pragma unroll
        for (int step = 1; step < WARPS; step *= 2) {
            const u32 e = __shfl_up_sync(FULL_WARP, even_sum, step), o = __shfl_up_sync(FULL_WARP, odd_sum, step);
            if (lane >= step) even_sum += e, odd_sum += o;
        }
        const u32 even_before = __shfl_sync(FULL_WARP, even_sum - even, warp), odd_before = __shfl_sync(FULL_WARP, odd_sum - odd, warp);
        const u32 even_all = __shfl_sync(FULL_WARP, even_sum, WARPS - 1), odd_all = __shfl_sync(FULL_WARP, odd_sum, WARPS - 1);
        const u32 own = sums[q] - counts[q];
        before[q * 4] = start + (even_before & 0xffff) + (own & 0xff);
        start += even_all & 0xffff;
        before[q * 4 + 1] = start + (odd_before & 0xffff) + (own >> 8 & 0xff);
        start += odd_all & 0xffff;
        before[q * 4 + 2] = start + (even_before >> 16) + (own >> 16 & 0xff);
        start += even_all >> 16;
        before[q * 4 + 3] = start + (odd_before >> 16) + (own >> 24);
        start += odd_all >> 16;
    }
    return start;
}

// Finds the bin that holds the wanted-th counted rank, and zeroes the bins. s.total: of all bins but the last. Two barriers.
DEVICE void find_bin(u32* bins, u32 wanted, Shared& s, int lane, int warp) {
    u32 mine[OWN_BINS], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN_BINS; i += 4) {
        uint4* at = (uint4*)(bins + threadIdx.x * OWN_BINS + i);
        const uint4 four = *at;
        mine[i] = four.x, mine[i + 1] = four.y, mine[i + 2] = four.z, mine[i + 3] = four.w;
        sum += four.x + four.y + four.z + four.w;
        *at = make_uint4(0, 0, 0, 0);
    }
    u32 upto = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
        if (lane >= step) upto += other;
    }
    if (lane == 31) s.warp_bins[warp] = upto;
    __syncthreads();  // sums of the warps are there
    u32 warps = lane < WARPS ? s.warp_bins[lane] : 0;
    const u32 own = warps;
#pragma unroll
    for (int step = 1; step < WARPS; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, warps, step);
        if (lane >= step) warps += other;
    }
    upto += __shfl_sync(FULL_WARP, warps - own, warp);
    u32 before = upto - sum;
    if (before < wanted && wanted <= upto) {
#pragma unroll
        for (int i = 0; i < OWN_BINS; i++) {
            if (before < wanted && wanted <= before + mine[i]) s.bin = threadIdx.x * OWN_BINS + i, s.before = before, s.count = mine[i];
            before += mine[i];
        }
    }
    if (threadIdx.x == THREADS - 1) s.total = upto - mine[OWN_BINS - 1];
    __syncthreads();  // the bin is found
}

// Ascending (rank, id) pairs: a bitonic sort of `size` (a power of two) pairs in shared memory.
DEVICE void sort_pairs(u64* pairs, int size) {
    for (int width = 2; width <= size; width *= 2)
        for (int step = width / 2; step > 0; step /= 2) {
            __syncthreads();  // the previous step is complete
            for (int i = threadIdx.x; i < size / 2; i += THREADS) {
                const int low = (i / step) * step * 2 + i % step, high = low + step;
                const u64 a = pairs[low], b = pairs[high];
                if ((a > b) == ((low & width) == 0)) pairs[low] = b, pairs[high] = a;
            }
        }
    __syncthreads();  // sorted
}

// scores: rows [batch][queries] of `entries`, strides in elements, the last 1. ids [batch][queries][topk] and values (or
// null) contiguous. sort_size: 0 for ids in ascending order, else a power of two that is at least topk. DOCUMENTS: segments
// and positions of queries, with q_stride elements a batch row, and of entries, [batch][entries].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    indexer_topk(const element* __restrict__ scores, int* __restrict__ ids, float* __restrict__ values, i64 stride_b, i64 stride_s, u32 before,
                 u32 phase, u32 ratio, int queries, int entries, int topk, int sort_size, const i64* q_segments,
                 const i64* q_positions, const i64* entry_segments, const i64* entry_positions, i64 q_stride, i64 group) {
    extern __shared__ __align__(16) u32 dynamic[];
    __shared__ Shared s;
    const u32 bins = (u32)__cvta_generic_to_shared(dynamic);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i64 number = blockIdx.x, b = number / queries;
    const int i = (int)(number - b * queries);
    Row row;
    row.scores = scores + b * stride_b + i * stride_s;
    row.limit = (int)min(before + (phase + (u32)i) / ratio, (u32)entries);
    row.aligned = ((u64)row.scores & (4 * sizeof(element) - 1)) == 0;
#if DOCUMENTS
    row.segments = entry_segments + b * entries, row.positions = entry_positions + b * entries;
    row.segment = q_segments[b * q_stride + i];
    const i64 most = 1ll << 60, position = q_positions[b * q_stride + i];
    const i64 next = (position < -most ? -most : position > most ? most : position) + 1;
    row.groups = next / group - (next % group < 0);  // rounds down
    if (row.segment == 0) row.limit = 0;
#endif
    const int tiles = row.limit == 0 ? 0 : (row.limit - 1) / TILE + 1;
    u32 rank[VECTORS][4];
    if (tiles == 1) load_ranks(rank, row, 0);

    // The ranks below `last`, and of those equal to it the ones with ids up to `cut`, are chosen.
    u32 last = ALL;
    u32 cut = 0x7fffffff;
    if (row.limit > topk) {
        for (int x = threadIdx.x; x < BINS; x += THREADS) dynamic[x] = 0;
        u32 prefix = 0, wanted = topk;
        int shift = 21, above = 32;  // this digit's place, and that of the digits found
        __syncthreads();  // bins are zero
#pragma unroll 1
        while (true) {
            for (int tile = 0; tile < tiles; tile++) {
                if (tiles > 1) load_ranks(rank, row, tile);
                if (above == 32) count<true>(rank, bins, prefix, above, shift, live_of(row, tile));
                else count<false>(rank, bins, prefix, above, shift, live_of(row, tile));
            }
            __syncthreads();  // everything is counted
            find_bin(dynamic, wanted, s, lane, warp);
            if (above == 32 && s.total <= (u32)topk) break;  // all that may be chosen
            const u32 digit = s.bin, count = s.count;
            wanted -= s.before;
            prefix = above == 32 ? digit : prefix << (above - shift) | digit;  // the third digit repeats a bit of the second
            if (count == wanted || shift == 0) {
                last = (prefix << shift) + ((1u << shift) - 1);
                if (count != wanted) {  // of `count` equal ranks, the first `wanted`
                    for (int tile = 0, found = 0; tile < tiles; tile++) {
                        if (tiles > 1) load_ranks(rank, row, tile);
                        u32 equal[QUARTERS];
                        int at[VECTORS];
#pragma unroll
                        for (int q = 0; q < QUARTERS; q++) equal[q] = 0;
#pragma unroll
                        for (int v = 0; v < VECTORS; v++)
#pragma unroll
                            for (int c = 0; c < 4; c++) equal[v >> 2] += (u32)(rank[v][c] == last) << (v & 3) * 8;
                        const int more = scan_tile(at, equal, s, tile, lane, warp);
#pragma unroll
                        for (int v = 0; v < VECTORS; v++) {
                            int before_me = found + at[v];
#pragma unroll
                            for (int c = 0; c < 4; c++)
                                if (rank[v][c] == last && ++before_me == (int)wanted) s.cut = entry_of(tile, v) + c;
                        }
                        found += more;
                    }
                    __syncthreads();  // the cut is found
                    cut = s.cut;
                }
                break;
            }
            above = shift;
            shift = shift == 21 ? 10 : 0;
        }
    }

    // Chosen ids in ascending order: to shared memory, where nobody counts any more.
    int have = 0;
    for (int tile = 0; tile < tiles; tile++) {
        if (tiles > 1) load_ranks(rank, row, tile);
        u32 chosen[QUARTERS];
        int at[VECTORS];
#pragma unroll
        for (int q = 0; q < QUARTERS; q++) chosen[q] = 0;
        const int live = live_of(row, tile);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (v >= live) break;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const bool is = rank[v][c] < last || (rank[v][c] == last && entry_of(tile, v) + c <= cut);
                if (!is) rank[v][c] = NONE;
                chosen[v >> 2] += (u32)is << (v & 3) * 8;
            }
        }
        const int more = scan_tile(at, chosen, s, tile, lane, warp);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (v >= live) break;
            int to = have + at[v];
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (rank[v][c] != NONE) {
                    if (sort_size) ((u64*)dynamic)[to++] = (u64)rank[v][c] << 32 | (entry_of(tile, v) + c);
                    else dynamic[to++] = entry_of(tile, v) + c;
                }
        }
        have += more;
    }
    if (sort_size) {
        for (int x = have + threadIdx.x; x < sort_size; x += THREADS) ((u64*)dynamic)[x] = ~0ull;
        sort_pairs((u64*)dynamic, sort_size);
    }
    __syncthreads();  // ids are there
    for (int x = threadIdx.x; x < topk; x += THREADS) {
        const int id = x >= have ? -1 : sort_size ? (int)((u64*)dynamic)[x] : (int)dynamic[x];
        ids[number * topk + x] = id;
        if (values) values[number * topk + x] = id < 0 ? MINUS_INFINITY : Element::load(row.scores + id);
    }
}
