"""Top-k selection: the best entries of each query, exact, in bounded memory.

Order of entries: larger score first, then smaller id; -0.0 ties with +0.0; NaN and -inf are never chosen.
A row with fewer usable entries than `topk` ends in -1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import cast, device_of, library, quiet
from .contract import LARGEST_POSITION, SelectSpec, TopkSpec
from .reference import Causal, itemsize, score_rows, steps

SELECT_BYTES = 96 * 2**20  # temporaries of one chunk of rows, score rows included
LEAST = np.iinfo(np.int32).min  # the bits of -0.0
BYTES_PER_SCORE = 36  # more than best_of_rows holds at once for each float32 score of its rows (20 measured)


# ---------------------------------------------------------------- equations


def best_of_rows(xp: Any, scores: Any, topk: int, order: str) -> tuple[Any, Any]:
    """Ids int32 and scores of the best `topk` entries of each row: [N, P] -> two [N, topk]."""
    rows, entries = scores.shape
    device = device_of(scores)
    width = min(topk, entries)
    if width == 0 or rows == 0:
        return (
            xp.full((rows, topk), -1, dtype=xp.int32, device=device),
            xp.full((rows, topk), -xp.inf, dtype=scores.dtype, device=device),
        )
    clean = xp.where(xp.isnan(scores), -xp.inf, scores)
    if library(scores) in ("numpy", "cupy") and scores.dtype == np.float32:
        ids = _first_by_key(xp, clean, width, ordered=order == "score")
    else:
        # + 0.0 turns -0.0 into +0.0, which a radix sort would put apart.
        ids = xp.argsort(-clean + 0.0, axis=-1, stable=True)[:, :width]
    found = xp.take_along_axis(clean, cast(xp, ids, xp.int64), axis=-1)
    ids = cast(xp, xp.where(found > -xp.inf, ids, entries), xp.int32)
    if order == "id":
        ids = xp.sort(ids, axis=-1)
        at = cast(xp, xp.where(ids < entries, ids, 0), xp.int64)
        found = xp.where(ids < entries, xp.take_along_axis(clean, at, axis=-1), -xp.inf)
    ids = xp.where(ids < entries, ids, -1)
    if width < topk:
        rest = (rows, topk - width)
        ids = xp.concat([ids, xp.full(rest, -1, dtype=ids.dtype, device=device)], axis=-1)
        found = xp.concat([found, xp.full(rest, -xp.inf, dtype=found.dtype, device=device)], axis=-1)
    return ids, found


def _first_by_key(xp: Any, scores: Any, width: int, *, ordered: bool) -> Any:
    """NumPy and CuPy, float32: ids of the first `width` entries by one integer key per entry, (score, id) in 64 bits.

    A float's bits read as an integer grow with the float when those of negatives are flipped, so the
    complement in the upper half sorts larger scores first and the id in the lower half breaks ties. Bits alone are
    looked at: CuPy's arithmetic takes subnormal numbers for zeros.
    """
    bits = scores.view(np.int32)
    bits = ~xp.where(bits < 0, xp.where(bits == LEAST, np.int32(0), bits ^ np.int32(0x7FFFFFFF)), bits)
    keys = bits.astype(np.int64)
    del bits
    keys <<= 32
    keys |= xp.arange(scores.shape[1], dtype=np.int64)
    if library(scores) == "numpy" and width < scores.shape[1]:
        keys.partition(width - 1, axis=-1)
        keys = keys[:, :width]
    elif library(scores) == "cupy":  # its partition sorts, too
        keys, ordered = xp.sort(keys, axis=-1)[:, :width], False
    if ordered:
        keys = np.sort(keys, axis=-1)
    return (keys & 0xFFFFFFFF).astype(np.int32)


# ---------------------------------------------------------------- who sees what


class Packed:
    """Packed documents: a query sees entry j iff their segments match, the segment is not 0 (padding) and
    pooled_positions[j] < (l + 1) // R for the query's position l in its document."""

    def __init__(self, spec: TopkSpec, segments: Any, positions: Any, pooled_segments: Any, pooled_positions: Any):
        self.spec, self.segments, self.pooled_segments = spec, segments, pooled_segments
        xp = spec.xp
        positions = xp.clip(cast(xp, positions, xp.int64), -LARGEST_POSITION, LARGEST_POSITION)
        self.groups = (positions + 1) // spec.compress_ratio
        self.pooled_positions = cast(xp, pooled_positions, xp.int64)

    def mask(self, i0: int, i1: int, j0: int, j1: int) -> Any:
        """[i1 - i0, j1 - j0]."""
        mine, theirs = self.segments[i0:i1][:, None], self.pooled_segments[j0:j1][None, :]
        early = self.pooled_positions[j0:j1][None, :] < self.groups[i0:i1][:, None]
        return (mine != 0) & (mine == theirs) & early

    def limit(self, i1: int) -> int:
        """Every entry may be seen: where documents lie is not known without reading them."""
        return self.spec.entries


def seen_scores(table: Any, i0: int, i1: int, spec: SelectSpec) -> Any:
    """Rows i0 .. i1 - 1 of [N, P] in the dtype of the arithmetic; by the causal rule of row r, which is query r % S,
    -inf where it does not see, without the last entries that none of them sees."""
    xp = spec.xp
    if not spec.causal:
        return cast(xp, table[i0:i1, :], spec.compute)
    queries = spec.leading[-1]
    read = spec.query_start + (queries if i0 // queries < (i1 - 1) // queries else (i1 - 1) % queries + 1)
    scores = cast(xp, table[i0:i1, : min(read // spec.compress_ratio, spec.entries)], spec.compute)
    tokens = xp.arange(i0, i1, dtype=xp.int64, device=spec.device) % queries + (spec.query_start + 1)
    entries = xp.arange(scores.shape[1], dtype=xp.int64, device=spec.device)
    return xp.where(entries[None, :] < (tokens // spec.compress_ratio)[:, None], scores, -xp.inf)


# ---------------------------------------------------------------- drivers


@quiet
def topk(q: Any, pooled_kv: Any, weights: Any, documents: tuple[Any, ...], spec: TopkSpec) -> Any:
    """Scores a chunk of queries, selects, forgets the scores: ids [B, S, topk], with scores if asked."""
    xp = spec.xp
    shape = (spec.batch, spec.queries, spec.topk)
    ids = xp.empty(shape, dtype=xp.int32, device=spec.device)
    values = xp.empty(shape, dtype=spec.compute, device=spec.device) if spec.return_scores else None
    for b in range(spec.batch):
        for i0, i1 in steps(spec.queries, rows_at_once(itemsize(spec), spec.entries)):
            sees: Causal | Packed = Causal(spec, i0)
            if spec.packed:
                segments, positions, pooled_segments, pooled_positions = documents
                sees = Packed(
                    spec, segments[b, i0:i1], positions[b, i0:i1], pooled_segments[b, :], pooled_positions[b, :]
                )
            scores = score_rows(q[b, i0:i1, ...], pooled_kv[b, ...], weights[b, i0:i1, :], sees, spec)
            best, found = best_of_rows(xp, scores, spec.topk, spec.order)
            ids[b, i0:i1, :] = best
            if values is not None:
                values[b, i0:i1, :] = found
    return ids if values is None else (ids, values)


@quiet
def select(scores: Any, spec: SelectSpec) -> Any:
    """The selection alone over [..., P]."""
    xp = spec.xp
    rows = 1
    for n in spec.leading:
        rows *= n
    table = xp.reshape(scores, (rows, spec.entries))
    ids = xp.empty((rows, spec.topk), dtype=xp.int32, device=spec.device)
    values = xp.empty((rows, spec.topk), dtype=spec.compute, device=spec.device) if spec.return_scores else None
    for i0, i1 in steps(rows, rows_at_once(8 if spec.compute == xp.float64 else 4, spec.entries)):
        best, found = best_of_rows(xp, seen_scores(table, i0, i1, spec), spec.topk, spec.order)
        ids[i0:i1, :] = best
        if values is not None:
            values[i0:i1, :] = found
    shape = (*spec.leading, spec.topk)
    ids = xp.reshape(ids, shape)
    return ids if values is None else (ids, xp.reshape(values, shape))


def rows_at_once(score_bytes: int, entries: int) -> int:
    return max(1, SELECT_BYTES // (BYTES_PER_SCORE * score_bytes // 4 * max(1, entries)))
