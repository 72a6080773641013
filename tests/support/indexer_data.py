"""Hostile inputs for the indexer tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
BACKENDS = ["reference"]


def make(seed=0, *, batch=2, queries=9, entries=3, heads=4, dim=8, dtype="float32", exact=False):
    """q, pooled_kv, weights. exact: small integers, so that every sum is exact in any order."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        x = rng.integers(-3, 4, shape) if exact else rng.standard_normal(shape)
        return np.asarray(x).astype(DTYPES[dtype])

    return (
        draw(batch, queries, heads, dim),
        draw(batch, entries, dim),
        draw(batch, queries, heads),
    )


def ids(seed=0, *, batch=2, queries=9, entries=3, slots=7, dtype=np.int32):
    """Random ids with repeats, -1 at head, middle and tail, ids out of range, and one row without any."""
    rng = np.random.default_rng(seed)
    out = rng.integers(0, max(entries, 1), (batch, queries, slots))
    out[rng.random(out.shape) < 0.2] = -1
    out[:, 0, :1], out[:, 1, slots // 2 : slots // 2 + 1], out[:, 2, -1:] = -1, -1, -1
    out[:, 3, :1], out[:, 3, -1:] = entries, -7
    out[:, 4] = -1
    return out.astype(dtype)


def views(x):
    """(name, array equal to x in another memory layout)."""
    yield "reversed", np.ascontiguousarray(np.flip(x))[tuple(slice(None, None, -1) for _ in x.shape)]
    yield "transposed", np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1] + 1), -9, x.dtype)
    wide[..., 1::2] = x
    yield "strided", wide[..., 1::2]
    outer = np.ascontiguousarray(np.moveaxis(x, 1, 0))
    yield "moved", np.moveaxis(outer, 0, 1)
    only = x.copy()
    only.flags.writeable = False
    yield "read-only", only
