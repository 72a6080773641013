"""Numba kernels that lay key ids out for the attention kernels: shift and range check, compaction, sorting.

shift_ids: a thread takes UNROLL ids of one batch row, a block's width apart, so that a warp reads and writes whole
lines and has several reads in flight. Grid (blocks over S*T, batch). Deterministic.

compact_rows: a block makes a query's row at a time. In shared memory: the row's ids in tiles, each thread counts
and checks a run of consecutive slots, a scan of the counts says where its run goes. Rows that come out ascending
(window ids before shifted compressed ids do) are written as they are; otherwise what follows the leading ascending
run is sorted by a bitonic network and merged with that run by binary search. Rows up to PACKED slots.

compact_wide_rows: the same for wider rows, packed and, if need be, sorted in the result itself (in global memory:
correct, not fast).

Loops and indices inside a row are int32, kept so by casts, since Numba widens every sum: int64 would take twice the
registers, and shared memory is indexed unsigned to spare the test for negative indices.

Equal ids keep their number of slots. The results are a function of the ids alone, whatever grid and block.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda

UNROLL = 4
THREADS = 128  # at most, and a multiple of GROUP
GROUP = 16  # counts summed by one thread
GROUPS = THREADS // GROUP
ITEMS = 9  # slots per thread and tile; odd, so that threads reading their runs hit different banks
TILE = THREADS * ITEMS
PACKED = 2560  # 128 window slots + top-k 2048 fit
LAST = np.int32(2**31 - 1)  # what a sort sees beyond its end
WHOLE, FLIP, PAIR, SINGLE = 0, 1, 2, 3  # what a pass of the sort does, see sort_pass

i32, u32 = np.int32, np.uint32


@cuda.jit
def shift_ids(ids, out, keys, step):
    """out[b, n] = ids[b, n] + b*step where 0 <= ids[b, n] < keys, else -1."""
    size = ids.shape[1]
    width = cuda.blockDim.x
    first = np.int64(cuda.blockIdx.x) * width * UNROLL
    while first < size:
        b = np.int64(cuda.blockIdx.y)
        while b < ids.shape[0]:
            shift = b * step
            i = first + cuda.threadIdx.x
            if first + UNROLL * width <= size:
                v0 = np.int64(ids[b, i])
                v1 = np.int64(ids[b, i + width])
                v2 = np.int64(ids[b, i + 2 * width])
                v3 = np.int64(ids[b, i + 3 * width])
                out[b, i] = v0 + shift if 0 <= v0 < keys else -1
                out[b, i + width] = v1 + shift if 0 <= v1 < keys else -1
                out[b, i + 2 * width] = v2 + shift if 0 <= v2 < keys else -1
                out[b, i + 3 * width] = v3 + shift if 0 <= v3 < keys else -1
            else:
                while i < size:
                    v = np.int64(ids[b, i])
                    out[b, i] = v + shift if 0 <= v < keys else -1
                    i += width
            b += cuda.gridDim.y
        first += np.int64(cuda.gridDim.x) * width * UNROLL


@cuda.jit(device=True)
def load_tile(line, base, items, keys, shift, tile):
    """tile[n] = line[base + n] as a flat id, -1 where masked; returns how many this thread's run of slots keeps.

    Neighbouring threads read neighbouring slots; then thread t owns the run tile[t*items : (t+1)*items].
    """
    t, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    n = t
    while n < items * threads:
        v = np.int64(-1)
        if base + n < line.shape[0]:
            v = np.int64(line[u32(base + n)])
        tile[u32(n)] = v + shift if 0 <= v < keys else -1
        n = i32(n + threads)
    cuda.syncthreads()  # the run below was loaded by other threads
    count = i32(0)
    n = i32(t * items)
    end = i32(n + items)
    while n < end:
        if tile[u32(n)] >= 0:
            count = i32(count + 1)
        n = i32(n + 1)
    return count


@cuda.jit(device=True)
def counts_before(count, counts, totals):
    """(sum of the counts of the threads before this one, sum of all). Ends with reads of counts and totals."""
    t, groups = i32(cuda.threadIdx.x), i32(cuda.blockDim.x // GROUP)
    counts[u32(t)] = count
    cuda.syncthreads()  # all counts are there
    if t < groups:
        part = i32(0)
        for i in range(GROUP):
            part = i32(part + counts[u32(t * GROUP + i)])
        totals[u32(t)] = part
    cuda.syncthreads()  # all totals are there
    group = i32(t // GROUP)
    before, total, i = i32(0), i32(0), i32(0)
    while i < groups:
        if i < group:
            before = i32(before + totals[u32(i)])
        total = i32(total + totals[u32(i)])
        i = i32(i + 1)
    i = i32(group * GROUP)
    while i < t:
        before = i32(before + counts[u32(i)])
        i = i32(i + 1)
    return before, total


@cuda.jit(device=True)
def leading_run(x, n, shortest):
    """Length of the ascending run that x[:n] begins with; shortest[0] is scratch. Two barriers."""
    t, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    if t == 0:
        shortest[0] = n
    cuda.syncthreads()  # x and the scratch are there
    i = t
    while i + 1 < n:
        if x[u32(i)] > x[u32(i + 1)]:
            cuda.atomic.min(shortest, 0, i32(i + 1))
            break
        i = i32(i + threads)
    cuda.syncthreads()  # every thread has looked
    return shortest[0]


@cuda.jit(device=True)
def sort_pass(x, begin, size, kind, level, gap):
    """One or two stages of a bitonic network over x[begin : begin + size], four elements a thread and round.

    The element at slot i of a block of `level` meets
        FLIP    slot level-1-i, then the slot gap = level/4 away
        PAIR    the slot 2*gap away, then the slot gap away
        SINGLE  the slot 1 away
        WHOLE   all of its quad of neighbours (levels 2 and 4)
    and the smaller id always goes first. So ids beyond the end, taken as LAST, would stay there: any size works.
    """
    threads = i32(cuda.blockDim.x)
    q = i32(cuda.threadIdx.x)
    while True:
        inner = i32(q & (gap - 1))  # gap is a power of two
        block = i32((q - inner) * 4)
        if block >= size:
            break
        i0 = i32(block + inner)
        i1 = i32(i0 + gap)
        i2 = i32(i1 + gap)
        i3 = i32(i2 + gap)
        if kind == FLIP:
            i3 = i32(block + level - 1 - inner)
            i2 = i32(i3 - gap)
        if i0 < size:
            v0, v1, v2, v3 = x[u32(begin + i0)], LAST, LAST, LAST
            if i1 < size:
                v1 = x[u32(begin + i1)]
            if i2 < size:
                v2 = x[u32(begin + i2)]
            if i3 < size:
                v3 = x[u32(begin + i3)]
            if kind == WHOLE:
                v0, v1 = min(v0, v1), max(v0, v1)
                v2, v3 = min(v2, v3), max(v2, v3)
            if kind == PAIR:
                v0, v2 = min(v0, v2), max(v0, v2)
                v1, v3 = min(v1, v3), max(v1, v3)
            elif kind != SINGLE:
                v0, v3 = min(v0, v3), max(v0, v3)
                v1, v2 = min(v1, v2), max(v1, v2)
            x[u32(begin + i0)] = min(v0, v1)
            if i1 < size:
                x[u32(begin + i1)] = max(v0, v1)
            if i2 < size:
                x[u32(begin + i2)] = min(v2, v3)
            if i3 < size:
                x[u32(begin + i3)] = max(v2, v3)
        q = i32(q + threads)


@cuda.jit(device=True)
def sort(x, begin, size):
    """x[begin : begin + size] ascending, by the whole block; every thread calls it after a barrier, alike.

    Levels 4, 8, ... up to the first power of two >= size; level 2**e has e stages, the flip and gaps 2**(e-2) .. 1,
    taken two a pass.
    """
    kind, level, gap = WHOLE, i32(4), i32(1)
    while level == 4 or level < 2 * size:
        sort_pass(x, begin, size, kind, level, gap)
        cuda.syncthreads()  # the next pass reads what other threads wrote
        if gap == 1:
            level = i32(level * 2)
            kind, gap = FLIP, i32(level >> 2)
        elif gap == 2:
            kind, gap = SINGLE, i32(1)
        else:
            kind, gap = PAIR, i32(gap >> 2)


@cuda.jit(device=True)
def rank(x, begin, end, value):
    """How many of the ascending x[begin:end] are below value."""
    low, high = begin, end
    while low < high:
        middle = i32((low + high) >> 1)
        if x[u32(middle)] < value:
            low = i32(middle + 1)
        else:
            high = middle
    return i32(low - begin)


@cuda.jit
def compact_rows(ids, out, lengths, keys, queries):
    """Row r of out: ids[r] inside [0, keys), plus (r // queries)*keys, ascending, then -1; lengths[r]: how many.

    ids [N, T] with T <= PACKED, out int32 [N, >= T], lengths int32 [N].
    """
    tile = cuda.shared.array(TILE, i32)
    packed = cuda.shared.array(PACKED, i32)
    counts = cuda.shared.array(THREADS, i32)
    totals = cuda.shared.array(GROUPS, i32)
    shortest = cuda.shared.array(1, i32)
    t, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    slots, width = i32(ids.shape[1]), i32(out.shape[1])
    items = i32(min(((slots + threads - 1) // threads) | 1, ITEMS))
    row = np.int64(cuda.blockIdx.x)
    while row < ids.shape[0]:
        ids_line, line = ids[row], out[row]
        shift = (row // queries) * keys
        n, base = i32(0), i32(0)
        while base < slots:
            count = load_tile(ids_line, base, items, keys, shift, tile)
            before, total = counts_before(count, counts, totals)
            at, i = i32(n + before), i32(t * items)
            end = i32(i + items)
            while i < end:
                v = tile[u32(i)]
                if v >= 0:
                    packed[u32(at)] = v
                    at = i32(at + 1)
                i = i32(i + 1)
            n = i32(n + total)
            base = i32(base + items * threads)
            cuda.syncthreads()  # the next tile overwrites tile, counts and totals
        run = leading_run(packed, n, shortest)
        i = t
        if run < n:  # merge the leading run, packed[:run], with what follows it, sorted
            sort(packed, run, i32(n - run))
            while i < n:
                v = packed[u32(i)]
                if i < run:
                    line[u32(i + rank(packed, run, n, v))] = v
                else:  # equal ids of the leading run come first
                    line[u32(i - run + rank(packed, i32(0), run, np.int64(v) + 1))] = v
                i = i32(i + threads)
        else:
            while i < n:
                line[u32(i)] = packed[u32(i)]
                i = i32(i + threads)
        while i < width:
            line[u32(i)] = -1
            i = i32(i + threads)
        if t == 0:
            lengths[row] = n
        cuda.syncthreads()  # the next row overwrites packed and shortest
        row += cuda.gridDim.x


@cuda.jit
def compact_wide_rows(ids, out, lengths, keys, queries):
    """As compact_rows for any T below 2**30: rows are packed and sorted in out itself."""
    tile = cuda.shared.array(TILE, i32)
    counts = cuda.shared.array(THREADS, i32)
    totals = cuda.shared.array(GROUPS, i32)
    shortest = cuda.shared.array(1, i32)
    t, threads = i32(cuda.threadIdx.x), i32(cuda.blockDim.x)
    slots, width = i32(ids.shape[1]), i32(out.shape[1])
    row = np.int64(cuda.blockIdx.x)
    while row < ids.shape[0]:
        ids_line, line = ids[row], out[row]
        shift = (row // queries) * keys
        n, base = i32(0), i32(0)
        while base < slots:
            count = load_tile(ids_line, base, i32(ITEMS), keys, shift, tile)
            before, total = counts_before(count, counts, totals)
            at, i = i32(n + before), i32(t * ITEMS)
            end = i32(i + ITEMS)
            while i < end:
                v = tile[u32(i)]
                if v >= 0:
                    line[u32(at)] = v
                    at = i32(at + 1)
                i = i32(i + 1)
            n = i32(n + total)
            base = i32(base + ITEMS * threads)
            cuda.syncthreads()  # the next tile overwrites tile, counts and totals
        i = i32(n + t)
        while i < width:
            line[u32(i)] = -1
            i = i32(i + threads)
        if leading_run(line, n, shortest) < n:
            sort(line, i32(0), n)
        if t == 0:
            lengths[row] = n
        cuda.syncthreads()  # the next row overwrites shortest
        row += cuda.gridDim.x
