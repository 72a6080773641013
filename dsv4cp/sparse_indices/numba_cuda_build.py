"""Numba kernels that build index lists.

build_rows: blockDim.x threads make a query's row (32, or more where rows are few), blockDim.y rows a block;
neighbouring threads write neighbouring slots, so whole lines leave at once. Everything about the query (its interval
of raw keys, its document, how many compressed entries are finished) is worked out once by each of its threads; each
slot is then written once, with window, compressed part, documents, image spans, mask and range check done in
registers. Grid: rows / blockDim.y blocks, striding. Shared memory: none.

span_totals, span_scan: what build_rows needs to know about image spans, three [B, keys] arrays, as a scan in tiles of
SPAN_TILE keys: first each tile's totals, then each tile again with the totals of all tiles before and after it.

No atomics: the results do not depend on grid and block. Positions are clipped to +-LARGEST first and ids compared
before they are shifted: no sum overflows.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda

# Bits of build_rows' modes: which optional arguments are read.
POSITIONS, MASK, GIVEN, DOCUMENTS, ENTRY_DOCUMENTS, IMAGES = 1, 2, 4, 8, 16, 32

LARGEST = 2**62
IMAGE_START, IMAGE_END = 0, 4
SPAN_THREADS = 128  # at most
SPAN_ITEMS = 8  # neighbouring keys a thread
SPAN_TILE = SPAN_THREADS * SPAN_ITEMS


@cuda.jit(device=True)
def clipped(x, low, high):
    return min(max(np.int64(x), low), high)


@cuda.jit(device=True)
def hidden(mask, b, i, key, magnitude, infinity):
    """mask[b, i, key] < 0, told from the bits of the float, so that every float type is read alike."""
    bits = np.int64(mask[b, i, key])
    size = bits & magnitude
    return bits < 0 and 0 < size <= infinity  # neither -0.0 nor NaN


@cuda.jit(device=True)
def image_reach(spans, stops, b, i, p, document, documents, tokens, keys):
    """(left, right): how far the query at p sees because it stands in an image span; (0, 0) for text.

    spans[0]: starts minus ends up to a key, [1]: the last start up to it, [2]: the first end from it on.
    """
    if not 0 <= p < keys or document > p:
        return 0, 0
    seen = spans[0, b, p]
    start = spans[1, b, p]
    end = spans[2, b, p]
    furthest = keys  # right end of an unclosed span
    if documents:
        if document > 0:
            seen -= spans[0, b, document - 1]
        start = max(start, document)
        stop = min(stops[b, i], keys)
        end = min(end, stop)
        furthest = stop - 1
    if not (seen > 0 or end == p):
        return 0, 0
    return min(p - start, tokens - 1), min(min(end - p, tokens), furthest - p)


@cuda.jit
def build_rows(
    out,  # int32 or int64 [B*S, raw_width + compressed width]
    positions,  # int64 [1 or B, S]
    mask,  # the floats' bits, [1 or B, S, >= keys], any strides
    topk,  # int32 or int64 [B*S, compressed width]
    segments,  # int64 [B, S]
    locals_,  # int64 [B, S]
    entry_segments,  # int64 [B, pooled]
    entry_positions,  # int64 [B, pooled]
    spans,  # int64 [3, B, image_keys], see image_reach
    stops,  # int64 [B, S]: first position behind the query's document
    modes,
    queries,
    keys,
    raw_keys,
    window,
    raw_width,
    pooled,
    ratio,
    image_tokens,
    image_keys,
    magnitude,
    infinity,
):
    """Row r of out: the raw keys, then the compressed entries, that query r % queries of row r // queries sees."""
    lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
    given = modes & GIVEN != 0
    masked = modes & MASK != 0
    documents = modes & DOCUMENTS != 0
    entry_documents = modes & ENTRY_DOCUMENTS != 0
    count = max(keys - raw_keys, 0)  # entries whose shifted id is below keys
    if entry_documents:
        count = min(count, pooled)
    width = out.shape[1]
    row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
    while row < out.shape[0]:
        b = row // queries
        i = row - b * queries
        mask_row = b if mask.shape[0] > 1 else 0

        # The query: global position, document, interval of raw keys, finished groups.
        p = i
        if modes & POSITIONS:
            p = clipped(positions[b if positions.shape[0] > 1 else 0, i], -LARGEST, LARGEST)
        local, document, segment = p, np.int64(0), np.int64(1)
        if documents:
            local = clipped(locals_[b, i], -LARGEST, LARGEST)
            document = p - local
            segment = segments[b, i]
        before = max(window - 1, 0)
        first, last = p - before, p
        if modes & IMAGES:
            before = window - 1
            left, right = image_reach(spans, stops, b, i, p, document, documents, image_tokens, image_keys)
            first = p - before - max(left - before, 0)
            last = p + right
        if documents:
            first = max(first, document)
        first = clipped(first, 0, keys)
        last = clipped(last, -1, keys - 1)
        limit = count  # entries that a given id may name
        if segment == 0:
            last, limit = np.int64(-1), np.int64(0)
        groups = np.int64(0)
        if ratio > 0:
            groups = (local + 1) // ratio

        # window[t] = first + t up to last
        t = np.int64(lane)
        while t < raw_width:
            key = first + t
            if key > last:
                key = np.int64(-1)
            elif masked and hidden(mask, mask_row, i, key, magnitude, infinity):
                key = np.int64(-1)
            out[row, t] = key
            t += lanes

        # compressed[c] = raw_keys + entry
        c = np.int64(lane)
        width_left = width - raw_width
        if masked or entry_documents:
            while c < width_left:
                entry = np.int64(topk[row, c]) if given else c
                seen = 0 <= entry < limit
                if entry_documents:
                    if seen:
                        seen = entry_segments[b, entry] == segment and entry_positions[b, entry] < groups
                elif not given:
                    seen = seen and entry < groups
                if seen and masked:
                    seen = not hidden(mask, mask_row, i, raw_keys + entry, magnitude, infinity)
                out[row, raw_width + c] = raw_keys + entry if seen else -1
                c += lanes
        elif given:
            while c + 3 * lanes < width_left:  # four reads in flight
                e0 = np.int64(topk[row, c])
                e1 = np.int64(topk[row, c + lanes])
                e2 = np.int64(topk[row, c + 2 * lanes])
                e3 = np.int64(topk[row, c + 3 * lanes])
                out[row, raw_width + c] = raw_keys + e0 if 0 <= e0 < limit else -1
                out[row, raw_width + c + lanes] = raw_keys + e1 if 0 <= e1 < limit else -1
                out[row, raw_width + c + 2 * lanes] = raw_keys + e2 if 0 <= e2 < limit else -1
                out[row, raw_width + c + 3 * lanes] = raw_keys + e3 if 0 <= e3 < limit else -1
                c += 4 * lanes
            while c < width_left:
                e0 = np.int64(topk[row, c])
                out[row, raw_width + c] = raw_keys + e0 if 0 <= e0 < limit else -1
                c += lanes
        else:
            limit = min(limit, groups)
            while c < width_left:
                out[row, raw_width + c] = raw_keys + c if c < limit else -1
                c += lanes
        row += np.int64(cuda.gridDim.x) * cuda.blockDim.y


@cuda.jit(device=True)
def run_totals(types, b, begin, end):
    """(starts minus ends, last start or 0, first end or the number of keys) among types[b, begin:end]."""
    excess, last_start, next_end = np.int64(0), np.int64(0), np.int64(types.shape[1])
    for n in range(begin, end):
        kind = types[b, n]
        if kind == IMAGE_START:
            excess += 1
            last_start = np.int64(n)
        elif kind == IMAGE_END:
            excess -= 1
            next_end = min(next_end, np.int64(n))
    return excess, last_start, next_end


@cuda.jit
def span_totals(types, tiles):
    """tiles[:, b, n]: run_totals of tile n of row b. types int64 [B, keys]; one thread a tile and row."""
    keys = types.shape[1]
    tile = np.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    while tile < tiles.shape[2]:
        b = np.int64(cuda.blockIdx.y)
        while b < types.shape[0]:
            begin = tile * SPAN_TILE
            excess, last_start, next_end = run_totals(types, b, begin, min(begin + SPAN_TILE, keys))
            tiles[0, b, tile], tiles[1, b, tile], tiles[2, b, tile] = excess, last_start, next_end
            b += cuda.gridDim.y
        tile += np.int64(cuda.gridDim.x) * cuda.blockDim.x


@cuda.jit
def span_scan(types, tiles, spans):
    """spans[:, b, n]: (starts minus ends up to n, last start up to n, first end from n on). A block makes a tile."""
    excesses = cuda.shared.array(SPAN_THREADS, np.int64)  # of each thread's run of keys
    starts = cuda.shared.array(SPAN_THREADS, np.int64)
    ends = cuda.shared.array(SPAN_THREADS, np.int64)
    far_excesses = cuda.shared.array(SPAN_THREADS, np.int64)  # of each thread's share of the other tiles
    far_starts = cuda.shared.array(SPAN_THREADS, np.int64)
    far_ends = cuda.shared.array(SPAN_THREADS, np.int64)
    t, threads, keys = cuda.threadIdx.x, cuda.blockDim.x, types.shape[1]
    for tile in range(cuda.blockIdx.x, tiles.shape[2], cuda.gridDim.x):
        items = (SPAN_TILE + threads - 1) // threads
        tile_end = min((tile + 1) * SPAN_TILE, keys)
        begin = min(tile * SPAN_TILE + t * items, tile_end)
        end = min(begin + items, tile_end)
        for b in range(cuda.blockIdx.y, types.shape[0], cuda.gridDim.y):
            excess, last_start, next_end = np.int64(0), np.int64(0), np.int64(keys)
            for n in range(t, tiles.shape[2], threads):
                if n < tile:
                    excess += tiles[0, b, n]
                    last_start = max(last_start, tiles[1, b, n])
                elif n > tile:
                    next_end = min(next_end, tiles[2, b, n])
            far_excesses[t], far_starts[t], far_ends[t] = excess, last_start, next_end
            excess, last_start, next_end = run_totals(types, b, begin, end)
            excesses[t], starts[t], ends[t] = excess, last_start, next_end
            cuda.syncthreads()  # every thread's totals are there
            excess, last_start, next_end = np.int64(0), np.int64(0), np.int64(keys)
            for n in range(threads):
                excess += far_excesses[n]
                last_start = max(last_start, far_starts[n])
                next_end = min(next_end, far_ends[n])
                if n < t:
                    excess += excesses[n]
                    last_start = max(last_start, starts[n])
                elif n > t:
                    next_end = min(next_end, ends[n])
            for n in range(begin, end):
                kind = types[b, n]
                if kind == IMAGE_START:
                    excess += 1
                    last_start = np.int64(n)
                elif kind == IMAGE_END:
                    excess -= 1
                spans[0, b, n], spans[1, b, n] = excess, last_start
            n = end - 1
            while n >= begin:
                if types[b, n] == IMAGE_END:
                    next_end = np.int64(n)
                spans[2, b, n] = next_end
                n -= 1
            cuda.syncthreads()  # the next row overwrites the totals
