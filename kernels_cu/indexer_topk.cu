// Exact top-k of score rows: radix selection, up to 2048 of any number of entries. Float32, bfloat16 or float16 scores.
// archs: 80 86 89 90 100 120
// hot: indexer_topk
//
//     ids[row] = the topk visible entries with the largest scores; of equal ones (-0.0 equals +0.0) those with smaller ids;
//                never NaN nor -inf; -1 where there are not enough
//     visible  : j < limit_i = before + (phase + i) / ratio; DOCUMENTS: same segment, not 0, and early enough in it
//
// Grid: one block a row, of the queries first .. first + rows - 1 of each batch row. Block: THREADS; a tile is VECTORS times
//   four neighbours a thread, VECTORS times 128 neighbours a warp.
// Shared memory (dynamic): two times 2049 bins; chosen ids, or pairs of ranks and ids to sort, in the place of the first.
// Determinism: integer counts alone, so atomics leave no trace; bits of a row depend on its scores alone.
//
// A score is its own key: the bits of floats grow with positive ones and, read as unsigned, away from zero with negative
// ones, which therefore are worse than all positive ones. NaN and -inf become NONE, the worst key. Digits of 11, 11 and 10
// bits are counted in turn among the keys that share the digits found so far, best first, until the keys up to some bin
// are exactly topk. Keys of a row that fits a tile stay in registers; longer rows are read once a pass. Nothing behind the
// causal limit is read but the rest of four neighbours. A row with at most topk entries needs no counting.
//
// Budget on one H200, [32768, 8192] float32, causal, k 1024: 537 MB in, 134 MB out: 0.16 ms of memory. It is instructions
// that count: about 20 an entry and 400 a warp and row beside them.
//
// Log (one H200, CUDA 13.0; the case above, kernel alone; GEMM 780 to 795 TFLOP/s in the same runs):
//   1  ranks made of scores by six instructions, 16 a thread, counts of all warps scanned at once: expected 0.3 to 0.5 ms;
//      got 0.60 with 512 threads and ranks in registers, 0.52 with 256 that read long rows again in each pass.
//   2  scores as their own keys, warps own neighbours so that one count a warp is all they exchange: expected 0.3, got 0.54.
//      A profile: 8200 instructions a row, 2.2 a clock, a third of the time at barriers. The compiler had put a branch
//      around each load: one after the other went to memory and back.
//   3  loads predicated and all on their way at once, one barrier fewer a digit: 0.51 with 256 threads, 80 registers.
//   4  queries that see up to 4096 entries in launches of 128 threads: 0.45; up to 1024 and 2048 with fewer entries a
//      thread: 0.44. [4096, 1024], k 512: 0.024 ms with 8 entries a thread, 0.029 with 32.
//   By ncu (1.98 GHz), all rows read to their ends, 0.518 ms: issue slots 65 % busy, ALU 63, L2 60, DRAM 48 (2.3 TB/s), 37 % of
//   the warps resident: instructions, then the turns of a row's phases. 64 registers, for a fourth block, cost
//   48 bytes of spills.
#include "common.cuh"

#ifndef ELEMENT
#define ELEMENT Float32
#endif
#ifndef THREADS
#define THREADS 256
#endif
#ifndef VECTORS
#define VECTORS 8
#endif
#ifndef BLOCKS
#define BLOCKS 3  // of a multiprocessor, for the register budget
#endif
#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif
typedef ELEMENT Element;
typedef Element::storage element;

static const int WARPS = THREADS / 32, WARP_ENTRIES = VECTORS * 128, TILE = WARPS * WARP_ENTRIES;
static const int BINS = 2048, OWN_BINS = BINS / THREADS, ARRAY = BINS + 4;  // words of an array of bins
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
static const int RESIDENT = BLOCKS * 3 / 4;  // the compiler wants more registers there
#else
static const int RESIDENT = BLOCKS;
#endif
static const u32 NONE = 0xffffffffu, POSITIVE = 0x7fffffffu;
static_assert(WARPS >= 4 && WARPS <= 8 && VECTORS <= 8 && OWN_BINS % 4 == 0, "how counts are summed");
#define MINUS_INFINITY __int_as_float(0xff800000)

// The bits of the score, -0.0 as +0.0; NaN and -inf: NONE. No flushing of subnormals, whatever the compiler's options.
DEVICE u32 key_of(float score) {
    float key;
    asm("{ .reg .f32 x; .reg .pred p; add.f32 x, %1, 0f00000000; setp.gt.f32 p, x, 0fFF800000; selp.f32 %0, x, 0fFFFFFFFF, p; }"
        : "=f"(key)
        : "f"(score));
    return __float_as_uint(key);
}
// Grows as scores fall: what is sorted.
DEVICE u32 rank_of(u32 key) { return (int)key < 0 ? key : key ^ POSITIVE; }

struct Row {
    const element* scores;
    u32 limit;     // entries from here on are not read
    bool aligned;  // four neighbours in one load
#if DOCUMENTS
    const i64 *segments, *positions;  // of the entries
    i64 segment, groups;              // the query's, and how many groups of its document are finished
#endif
};

// Loads without branches, so that all of a row's are on their way before the first is waited for; `to` keeps what it held
// where `exists` is false.
DEVICE void load_word(u32& to, const void* from, bool exists) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.nc.b32 %0, [%1]; }" : "+r"(to) : "l"(from), "r"((int)exists));
}
DEVICE void load_half(u32& to, const void* from, bool exists) {
    asm volatile("{ .reg .pred p; .reg .b16 h; cvt.u16.u32 h, %0; setp.ne.s32 p, %2, 0; @p ld.global.nc.b16 h, [%1]; cvt.u32.u16 %0, h; }"
                 : "+r"(to)
                 : "l"(from), "r"((int)exists));
}
DEVICE void load_words(u32 (&to)[4], const void* from, bool exists) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
                 : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
                 : "l"(from), "r"((int)exists));
}
DEVICE void load_words(u32 (&to)[2], const void* from, bool exists) {
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
                 : "+r"(to[0]), "+r"(to[1])
                 : "l"(from), "r"((int)exists));
}

static const int WORDS = sizeof(element);  // of four neighbours

// Scores as they lie in memory, one in a word or two.
DEVICE u32 nothing() {  // -inf
    element x;
    Element::store(&x, MINUS_INFINITY);
    return WORDS == 4 ? 0xff800000u : *(const u16*)&x;
}
DEVICE float score_of(u32 raw) {
    if (WORDS == 4) return __uint_as_float(raw);
    const u16 bits = (u16)raw;
    return Element::load((const element*)&bits);
}
DEVICE void load_one(u32& to, const element* from, bool exists) {
    if (WORDS == 4) load_word(to, from, exists);
    else load_half(to, from, exists);
}

// This lane's entries of a tile: first + 128 v + c. The warp's vectors from `live` on hold nothing to choose.
struct Place {
    u32 first;
    int live;
};

DEVICE Place place_of(const Row& row, int tile, int lane, int warp) {
    const u32 start = (u32)tile * TILE + warp * WARP_ENTRIES;
    const int left = start < row.limit ? (int)(row.limit - start) : 0;
    return {start + lane * 4, min(VECTORS, (left + 127) / 128)};
}

// Also lowers at.live to the last vector that holds anything but NONE: rows may end in -inf.
DEVICE void load_keys(u32 (&key)[VECTORS][4], const Row& row, Place& at) {
    const element* from = row.scores + at.first;
    if (row.aligned) {
        u32 raw[VECTORS][WORDS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
#pragma unroll
            for (int x = 0; x < WORDS; x++) raw[v][x] = WORDS == 4 ? nothing() : nothing() * 0x10001u;
            load_words(raw[v], from + v * 128, at.first + v * 128 < row.limit);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                key[v][c] = key_of(score_of(WORDS == 4 ? raw[v][c & (WORDS - 1)] : raw[v][c / 2 & (WORDS - 1)] >> c % 2 * 16));
        if (row.limit & 3) {  // the last four neighbours are not all before the limit
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
                if (at.first + v * 128 == (row.limit & ~3u)) {
#pragma unroll
                    for (int c = 1; c < 4; c++)
                        if ((row.limit & 3) <= c) key[v][c] = NONE;
                }
        }
    } else {
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                key[v][c] = nothing();
                load_one(key[v][c], from + v * 128 + c, at.first + v * 128 + c < row.limit);
            }
#pragma unroll
        for (int v = 0; v < VECTORS; v++)
#pragma unroll
            for (int c = 0; c < 4; c++) key[v][c] = key_of(score_of(key[v][c]));
    }
#if DOCUMENTS
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 j = min(at.first + v * 128 + c, row.limit - 1);
            if (__ldg(row.segments + j) != row.segment | __ldg(row.positions + j) >= row.groups) key[v][c] = NONE;
        }
#endif
    u32 some = 0;  // bit v: vector v of this lane holds something
#pragma unroll
    for (int v = 0; v < VECTORS; v++)
        if ((key[v][0] & key[v][1] & key[v][2] & key[v][3]) != NONE) some |= 1u << v;
    at.live = 32 - __clz(__reduce_or_sync(FULL_WARP, some));
}

// Counts keys: FIRST by their upper 11 bits, where NONE has the last bin to itself, else by (key - low) >> shift where that
// is less than span. The others share the bin behind: a branch would cost more.
template <bool FIRST>
DEVICE void count(const u32 (&key)[VECTORS][4], u32* bins, u32 low, int shift, u32 span, int live) {
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        if (v >= live) break;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const u32 at = FIRST ? key[v][c] >> 19 & 0x1ffc : min((key[v][c] - low) >> shift, span) * 4;
            atomicAdd((u32*)((char*)bins + at), 1u);
        }
    }
}

struct Shared {
    u32 totals[2][WARPS];  // entries that each warp has, for two tiles in turn
    u32 sums[3][WARPS];      // of the parts of the bins, for each digit
    u32 cut;
};

// Sum of values[w] for w < warp; all: of all warps.
DEVICE u32 sum_before(const u32* values, int warp, u32& all) {
    u32 before = 0;
    all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) before = all;
        all += values[w];
    }
    return before;
}

// Where this lane's vectors begin among the marked entries of a tile, in the order of ids; returns how many there are.
// mask: bit 4 v + c. One barrier.
DEVICE int places_of(int (&at)[VECTORS], u32 mask, Shared& s, int tile, int lane, int warp) {
    u32 nibbles = mask - (mask >> 1 & 0x55555555u);  // a count for every two bits, then for every vector
    nibbles = (nibbles & 0x33333333u) + (nibbles >> 2 & 0x33333333u);
    const u32 even = nibbles & 0x0f0f0f0fu, odd = nibbles >> 4 & 0x0f0f0f0fu;  // of vectors 0, 2, 4, 6 and 1, 3, 5, 7
    u32 even_sum = even, odd_sum = odd;  // no byte passes 128
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 e = __shfl_up_sync(FULL_WARP, even_sum, step), o = __shfl_up_sync(FULL_WARP, odd_sum, step);
        if (lane >= step) even_sum += e, odd_sum += o;
    }
    const u32 even_all = __shfl_sync(FULL_WARP, even_sum, 31), odd_all = __shfl_sync(FULL_WARP, odd_sum, 31);
    even_sum -= even, odd_sum -= odd;
    int start = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
        at[v] = start + ((v & 1 ? odd_sum : even_sum) >> (v >> 1) * 8 & 0xff);
        start += (v & 1 ? odd_all : even_all) >> (v >> 1) * 8 & 0xff;
    }
    if (lane == 0) s.totals[tile & 1][warp] = start;
    __syncthreads();  // totals are there; the next tile but one may write here again
    u32 all;
    const u32 before = sum_before(s.totals[tile & 1], warp, all);
#pragma unroll
    for (int v = 0; v < VECTORS; v++) at[v] += before;
    return all;
}

struct Found {
    u32 bin, before, count, total;  // the bin of the last key wanted, counts before and in it, and of all bins but the last
};

// Finds the bin that holds the wanted-th best key. positive: how many bins, from the first on, hold keys that grow with
// scores; those come first, the last one before all. One barrier; every warp searches the part that holds the bin.
DEVICE Found find_bin(const u32* bins, int positive, u32 wanted, u32* sums, int lane, int warp) {
    const int PART = BINS / WARPS, OWN = PART / 32;
    // Where a lane's bins of a part begin, in the order of the search: backwards where keys grow with scores.
    const auto begin_of = [&](int part) {
        const int at = part * PART + lane * OWN;
        return at < positive ? positive - OWN - at : at;
    };
    u32 sum = 0;
    const u32* mine = bins + begin_of(warp);
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        const uint4 four = *(const uint4*)(mine + i);
        sum += four.x + four.y + four.z + four.w;
    }
    sum = __reduce_add_sync(FULL_WARP, sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();  // sums of the parts are there
    Found found = {0, 0, 0, 0};
    int part = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const u32 more = sums[w];
        if (found.total < wanted) part = w, found.before = found.total;
        found.total += more;
    }
    found.total -= bins[BINS - 1];
    mine = bins + begin_of(part);
    u32 own[OWN], upto = 0;
#pragma unroll
    for (int i = 0; i < OWN; i += 4) {
        const uint4 four = *(const uint4*)(mine + i);
        own[i] = four.x, own[i + 1] = four.y, own[i + 2] = four.z, own[i + 3] = four.w;
        upto += four.x + four.y + four.z + four.w;
    }
    sum = upto;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_WARP, upto, step);
        if (lane >= step) upto += other;
    }
    const int finder = __ffs(__ballot_sync(FULL_WARP, found.before + upto >= wanted)) - 1;  // none where too few are wanted
    u32 before = found.before + upto - sum;
    const bool reversed = part * PART + lane * OWN < positive;
    int at = 0;
    bool done = false;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const u32 here = reversed ? own[OWN - 1 - i] : own[i];
        if (!done && before + here >= wanted) done = true, at = i, found.count = here;
        if (!done) before += here;
    }
    found.bin = (u32)(mine - bins) + (reversed ? OWN - 1 - at : at);
    found.bin = __shfl_sync(FULL_WARP, found.bin, finder & 31);
    found.before = __shfl_sync(FULL_WARP, before, finder & 31);
    found.count = __shfl_sync(FULL_WARP, found.count, finder & 31);
    return found;
}

DEVICE void clear(u32* bins) {
#pragma unroll
    for (int i = 0; i < OWN_BINS; i += 4) *(uint4*)(bins + (threadIdx.x * 4 + i * THREADS)) = make_uint4(0, 0, 0, 0);
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
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    indexer_topk(const element* __restrict__ scores, int* __restrict__ ids, float* __restrict__ values, i64 stride_b, i64 stride_s,
                 u32 before, u32 phase, u32 ratio, int queries, int first, int rows, int entries, int topk, int sort_size,
                 const i64* q_segments, const i64* q_positions, const i64* entry_segments, const i64* entry_positions, i64 q_stride, i64 group) {
    extern __shared__ __align__(16) u32 dynamic[];
    __shared__ Shared s;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 b = blockIdx.x / (u32)rows, i = first + blockIdx.x % (u32)rows;
    Row row;
    row.scores = scores + b * stride_b + i * stride_s;
    row.limit = min(before + (phase + i) / ratio, (u32)entries);
    row.aligned = ((u64)row.scores & (4 * sizeof(element) - 1)) == 0 && (entries & 3) == 0;
#if DOCUMENTS
    row.segments = entry_segments + (i64)b * entries, row.positions = entry_positions + (i64)b * entries;
    row.segment = q_segments[b * q_stride + i];
    const i64 most = 1ll << 60, position = q_positions[b * q_stride + i];
    const i64 next = (position < -most ? -most : position > most ? most : position) + 1;
    row.groups = next / group - (next % group < 0);  // rounds down
    if (row.segment == 0) row.limit = 0;
#endif
    const int tiles = row.limit == 0 ? 0 : (row.limit - 1) / TILE + 1;
    u32 key[VECTORS][4];
    Place place = place_of(row, 0, lane, warp);
    if (place.live > 0) load_keys(key, row, place);

    // Chosen are the keys with key ^ flip <= last; of those equal to `tied`, unless it is NONE, the ones with ids up to cut.
    u32 flip = 0, last = NONE - 1, tied = NONE, cut = 0;
    if (row.limit > (u32)topk) {
        u32 *bins = dynamic, *others = dynamic + ARRAY;
        clear(bins);
        clear(others);
        u32 low = 0, wanted = topk;
        int shift = 21, span = BINS;  // this digit's place and bins
        bool positive = false;        // the digits found are those of positive scores
        __syncthreads();  // bins are zero
#pragma unroll 1
        while (true) {
            for (int tile = 0; tile < tiles; tile++) {
                if (tiles > 1) {
                    place = place_of(row, tile, lane, warp);
                    if (place.live > 0) load_keys(key, row, place);
                }
                if (shift == 21) count<true>(key, bins, 0, 0, 0, place.live);
                else count<false>(key, bins, low, shift, span, place.live);
            }
            __syncthreads();  // everything is counted; nobody reads the other bins any more
            if (shift == 10) clear(others);  // for the third digit
            const int digit = shift == 21 ? 0 : shift == 10 ? 1 : 2;
            const Found found = find_bin(bins, digit == 0 ? BINS / 2 : positive ? span : 0, wanted, s.sums[digit], lane, warp);
            if (digit == 0) {
                if (found.total <= (u32)topk) break;  // all that may be chosen
                positive = found.bin < BINS / 2;
                flip = positive ? POSITIVE : 0;
            }
            wanted -= found.before;
            low += found.bin << shift;
            if (found.count == wanted || shift == 0) {
                last = positive ? low ^ POSITIVE : low + ((1u << shift) - 1);
                if (found.count != wanted) tied = low;
                break;
            }
            u32* const swap = bins;
            bins = others, others = swap;
            if (shift == 10) span = 1024;
            shift = shift == 21 ? 10 : 0;
        }
        if (tied != NONE) {  // the id of the wanted-th key that equals it
            for (int tile = 0, found = 0; tile < tiles; tile++) {
                if (tiles > 1) {
                    place = place_of(row, tile, lane, warp);
                    if (place.live > 0) load_keys(key, row, place);
                }
                u32 equal = 0;
                int at[VECTORS];
#pragma unroll
                for (int v = 0; v < VECTORS; v++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (v < place.live && key[v][c] == tied) equal |= 1u << (v * 4 + c);
                const int more = places_of(at, equal, s, tile, lane, warp);
#pragma unroll
                for (int v = 0; v < VECTORS; v++) {
                    int number = found + at[v];
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        if (equal >> (v * 4 + c) & 1 && ++number == (int)wanted) s.cut = place.first + v * 128 + c;
                }
                found += more;
            }
            __syncthreads();  // the cut is found
            cut = s.cut;
        }
    }

    // Chosen ids in ascending order: to shared memory, where nobody counts any more.
    int have = 0;
    for (int tile = 0; tile < tiles; tile++) {
        if (tiles > 1) {
                    place = place_of(row, tile, lane, warp);
                    if (place.live > 0) load_keys(key, row, place);
                }
        u32 mask = 0;
        int at[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (v >= place.live) break;
#pragma unroll
            for (int c = 0; c < 4; c++)
                if ((key[v][c] ^ flip) <= last) mask |= 1u << (v * 4 + c);
        }
        if (tied != NONE) {
#pragma unroll
            for (int v = 0; v < VECTORS; v++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (key[v][c] == tied && place.first + v * 128 + c > cut) mask &= ~(1u << (v * 4 + c));
        }
        const int more = places_of(at, mask, s, tile, lane, warp);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) {
            if (v >= place.live) break;
            int to = have + at[v];
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (mask >> (v * 4 + c) & 1) {
                    const u32 id = place.first + v * 128 + c;
                    if (sort_size) ((u64*)dynamic)[to] = (u64)rank_of(key[v][c]) << 32 | id;
                    else dynamic[to] = id;
                    to++;
                }
        }
        have += more;
    }
    if (sort_size) {
        for (int x = have + threadIdx.x; x < sort_size; x += THREADS) ((u64*)dynamic)[x] = ~0ull;
        sort_pairs((u64*)dynamic, sort_size);
    } else {
        for (int x = have + threadIdx.x; x < topk; x += THREADS) dynamic[x] = NONE;
    }
    __syncthreads();  // ids are there
    u32 block;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));  // anew: registers are few
    const i64 result = ((i64)(block / (u32)rows) * queries + first + block % (u32)rows) * topk;
    int* to = ids + result;
    if (!sort_size && (topk & 3) == 0 && ((u64)to & 15) == 0) {
        for (int x = threadIdx.x; x < topk / 4; x += THREADS) ((uint4*)to)[x] = ((const uint4*)dynamic)[x];
    } else {
        for (int x = threadIdx.x; x < topk; x += THREADS) to[x] = sort_size ? (int)((u64*)dynamic)[x] : (int)dynamic[x];
    }
    if (values)
        for (int x = threadIdx.x; x < topk; x += THREADS) {
            const int id = sort_size ? (int)((u64*)dynamic)[x] : (int)dynamic[x];
            values[result + x] = id < 0 ? MINUS_INFINITY : Element::load(row.scores + id);
        }
}
