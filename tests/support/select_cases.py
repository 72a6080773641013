"""Causal selections over given scores: hostile scores, and what is chosen from them by plain loops."""

from __future__ import annotations

import math

import numpy as np

from dsv4cp import select_indexer_topk

from . import naive
from .compare import check_equal, to_numpy

INF, NAN = np.inf, np.nan
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-45]


def finished(queries: int, entries: int, ratio: int, start: int) -> np.ndarray:
    """[S, P] bool in integers of any length."""
    limits = [min((start + i + 1) // ratio, entries) for i in range(queries)]
    return np.array([[j < n for j in range(entries)] for n in limits], bool).reshape(queries, entries)


def expected(scores, count: int, ratio: int, start: int = 0, order: str = "id"):
    """(ids, values) by a loop over the entries that each query may choose; only those are read."""
    shape = scores.shape
    seen = finished(*shape[-2:], ratio, start)
    table = to_numpy(scores).reshape(math.prod(shape[:-2]), *shape[-2:])
    ids = np.full((*table.shape[:2], count), -1, np.int32)
    values = np.full(ids.shape, -INF, np.float64 if table.dtype == np.float64 else np.float32)
    for b, i in np.ndindex(*table.shape[:2]):
        row = table[b, i, seen[i]]
        if row.size and count:
            ids[b, i] = naive.topk(row[None], count, order)[0]
        for t, j in enumerate(ids[b, i]):
            values[b, i, t] = row[j] if j >= 0 else -INF
    return ids.reshape(*shape[:-1], count), values.reshape(*shape[:-1], count)


def hostile(seed: int, *shape: int, ratio: int = 1, start: int = 0, beyond: float = NAN) -> np.ndarray:
    """Ties, zeros of both signs, NaN and infinities; `beyond` or +inf in every entry that is not finished."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, shape).astype(np.float32) / 2
    x = np.where(rng.random(shape) < 0.3, rng.choice(np.array(SPECIAL, np.float32), shape), x)
    bad = np.where(rng.random(shape) < 0.5, np.float32(INF), np.float32(beyond))
    return np.where(finished(*shape[-2:], ratio, start), x, bad).astype(np.float32)


def check_selection(scores, count, ratio, start=0, order="id", *, select=select_indexer_topk) -> None:
    """`select` on the scores, with values and without, against the plain loop, bit for bit."""
    want = expected(scores, count, ratio, start, order)
    options = {"compress_ratio": ratio, "query_start": start, "order": order}
    for got, x in zip(select(scores, count, return_scores=True, **options), want, strict=True):
        check_equal(got, x)
    check_equal(select(scores, count, **options), want[0])
