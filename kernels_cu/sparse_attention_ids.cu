// Key ids as the attention kernels read them: int32, -1 where masked.
// archs: 80 86 89 90 100 120
// hot: sparse_attention_narrow_ids
//
//     narrow[n] = ids[n] if 0 <= ids[n] < keys else -1
//
// The range is checked in 64 bits: an id beyond int32 becomes -1 and never another row's.
// Grid: any number of blocks; threads step through the ids. Block: any size. No shared memory. One writer per id.
#include "common.cuh"

extern "C" __global__ void sparse_attention_narrow_ids(const i64* __restrict__ ids, int* __restrict__ narrow, i64 count,
                                                       i64 keys) {
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x; n < count; n += step) {
        i64 id = ids[n];
        narrow[n] = 0 <= id && id < keys ? (int)id : -1;
    }
}
