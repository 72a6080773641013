// Key ids as the attention kernels read them: int32, -1 where masked; for cuDNN those of all batch rows in one.
// archs: 80 86 89 90 100 120
// hot: sparse_attention_narrow_ids sparse_attention_pack_ids sparse_attention_pack_wide_ids
//
//     narrow[n] = ids[n] if 0 <= ids[n] < keys else -1
//
// The range is checked in 64 bits: an id beyond int32 becomes -1 and never another row's.
// Grid: any number of blocks; threads step through the ids. Block: any size. No shared memory. One writer per id.
//
//     packed[r, :] = ids[r, t] + (r / queries)*keys for the t with 0 <= ids[r, t] < keys, in their order, then -1
//     lengths[r]   = how many those are
//
// A warp makes a row, FETCH*32 ids at a time, all of them in flight before the first is looked at. Grid: any number
// of blocks; warps step through the rows. Block: any multiple of 32. No shared memory. Deterministic: a function of
// the ids alone.
#include "common.cuh"

static const int FETCH = 4;

extern "C" __global__ void sparse_attention_narrow_ids(const i64* __restrict__ ids, int* __restrict__ narrow, i64 count,
                                                       i64 keys) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x; n < count; n += step) {
        i64 id = ids[n];
        narrow[n] = 0 <= id && id < keys ? (int)id : -1;
    }
}

template <typename Id>
static DEVICE void pack_rows(const Id* __restrict__ ids, int* __restrict__ packed, int* __restrict__ lengths, i64 rows,
                             i64 queries, i64 keys, int slots, int width) {
    const u32 lane = threadIdx.x & 31, below = (1u << lane) - 1;
    const i64 warps = (i64)gridDim.x * (blockDim.x >> 5);
    for (i64 r = (i64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); r < rows; r += warps) {
        const Id* line = ids + r * slots;
        int* to = packed + r * width;
        const i64 shift = r / queries * keys;
        int kept = 0;
        for (i64 first = lane; first - lane < slots; first += FETCH * 32) {
            i64 id[FETCH];
#pragma unroll
            for (int j = 0; j < FETCH; j++) id[j] = first + j * 32 < slots ? (i64)line[first + j * 32] : -1;
#pragma unroll
            for (int j = 0; j < FETCH; j++) {
                const bool valid = 0 <= id[j] && id[j] < keys;
                const u32 votes = __ballot_sync(FULL_WARP, valid);
                if (valid) to[kept + __popc(votes & below)] = (int)(id[j] + shift);
                kept += __popc(votes);
            }
        }
        for (i64 t = kept + (i64)lane; t < width; t += 32) to[t] = -1;
        if (lane == 0) lengths[r] = kept;
    }
}

extern "C" __global__ void sparse_attention_pack_ids(const int* __restrict__ ids, int* __restrict__ packed,
                                                     int* __restrict__ lengths, i64 rows, i64 queries, i64 keys,
                                                     int slots, int width) {
    pack_rows(ids, packed, lengths, rows, queries, keys, slots, width);
}

extern "C" __global__ void sparse_attention_pack_wide_ids(const i64* __restrict__ ids, int* __restrict__ packed,
                                                          int* __restrict__ lengths, i64 rows, i64 queries, i64 keys,
                                                          int slots, int width) {
    pack_rows(ids, packed, lengths, rows, queries, keys, slots, width);
}
