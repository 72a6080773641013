"""The indexer on a GPU: vectorised float64 oracles, random hostile inputs, selections as a V4 layer makes them.

The oracles repeat the definition on CuPy arrays, for shapes that tests/support/naive.py is too slow for. Nothing here
imports dsv4cp.
"""

from __future__ import annotations

import cupy
import numpy as np

from .attention_gpu import DTYPES, NORMALS, product

NUMBERS = {**DTYPES, "float32": np.dtype(np.float32)}


def _logits(q, k, ids, b, s):
    """(logits [I, T], rows [T, E], valid [T]) of one query in float64; rows of invalid slots are zeros."""
    valid = (ids[b, s] >= 0) & (ids[b, s] < k.shape[1])
    rows = cupy.where(valid[:, None], k[b][cupy.where(valid, ids[b, s], 0)].astype(np.float64), 0)
    return product(q[b, s].astype(np.float64)[None], rows.T[None].copy())[0], rows, valid


def oracle_scores(q, k, w, ids, scale):
    """[B, S, T] float64, -inf where an id is outside [0, P)."""
    out = cupy.full(ids.shape, -np.inf)
    if k.shape[1]:
        for b, s in np.ndindex(*ids.shape[:2]):
            logits, _, valid = _logits(q, k, ids, b, s)
            score = (w[b, s].astype(np.float64)[:, None] * scale * cupy.where(logits <= 0, 0, logits)).sum(axis=0)
            out[b, s] = cupy.where(valid, score, -np.inf)
    return out


def oracle_grad(g, q, k, w, ids, scale):
    """(grad_q, grad_k, grad_w) float64 of the scores at the ids."""
    dq, dk, dw = (cupy.zeros(x.shape) for x in (q, k, w))
    for b, s in np.ndindex(*ids.shape[:2]) if k.shape[1] else ():
        logits, rows, valid = _logits(q, k, ids, b, s)
        if not bool(valid.any()):
            continue
        gs, ws = cupy.where(valid, g[b, s].astype(np.float64), 0) * scale, w[b, s].astype(np.float64)
        on = (logits > 0).astype(np.float64)
        dw[b, s] = cupy.where(logits <= 0, 0, logits) @ gs
        dq[b, s] = ws[:, None] * (on @ (gs[:, None] * rows))
        at = cupy.flatnonzero(valid)
        cupy.add.at(dk[b], ids[b, s][at], (gs[:, None] * (on.T @ (ws[:, None] * q[b, s].astype(np.float64))))[at])
    return dq, dk, dw


def dense_oracle_grad(g, q, k, w, scale):
    """(grad_q, grad_k, grad_w) float64 of dense scores; g is 0 where a pair is not seen."""
    dq, dk, dw = (cupy.zeros(x.shape) for x in (q, k, w))
    for b, s in np.ndindex(*g.shape[:2]):
        rows, gs, ws = k[b].astype(np.float64), g[b, s].astype(np.float64) * scale, w[b, s].astype(np.float64)
        logits = q[b, s].astype(np.float64) @ rows.T
        on = (logits > 0).astype(np.float64)
        dw[b, s] = (on * logits) @ gs
        dq[b, s] = ws[:, None] * (on @ (gs[:, None] * rows))
        dk[b] += gs[:, None] * (on.T @ (ws[:, None] * q[b, s].astype(np.float64)))
    return dq, dk, dw


def inputs(
    *, batch=2, queries=9, heads=64, dim=128, entries=150, slots=70, dtype="bfloat16", numbers=None, ids=np.int32,
    seed=0,
):  # fmt: skip
    """(grad_scores, q, pooled_kv, weights, ids) as CuPy arrays: -1, other negative ids, ids from P on and repeats
    anywhere, one query without any, NaN in rows that nobody selects and in gradients of slots that do not exist."""
    rng = np.random.default_rng(seed)
    index = rng.integers(-entries // 3 - 1, entries + entries // 4 + 1, (batch, queries, slots))
    if batch and queries > 2 and slots:
        index[0, 1] = -1
        index[-1, 0, : slots // 2] = -1
        index[-1, 2, slots // 2 :] = -5
    q = rng.standard_normal((batch, queries, heads, dim), np.float32).astype(DTYPES[dtype])
    k = rng.standard_normal((batch, entries, dim), np.float32).astype(DTYPES[dtype])
    w = rng.standard_normal((batch, queries, heads), np.float32).astype(NUMBERS[numbers or dtype])
    # Sums over slots stay O(1), as the absolute parts of the tolerance table suppose.
    g = rng.standard_normal((batch, queries, slots), np.float32) * np.float32(min(1, 8 / max(slots, 1) ** 0.5))
    g = g.astype(NUMBERS[numbers or "float32"])
    g[(index < 0) | (index >= entries)] = np.nan
    for row in range(batch):
        k[row, np.setdiff1d(np.arange(entries), index[row])] = np.nan
    return tuple(cupy.asarray(x) for x in (g, q, k, w, index.astype(ids)))


def selection(queries: int, topk: int, ratio: int = 4):
    """int32 [1, S, topk]: up to topk distinct visible entries in ascending order, -1 after them; and P."""
    entries = queries // ratio
    entry = cupy.arange(entries)[None, :]
    out = cupy.full((1, queries, topk), -1, np.int32)
    for first in range(0, queries, 4096):
        position = cupy.arange(first, min(first + 4096, queries))[:, None]
        key = (position * entries + entry) * 0x9E3779B97F4A7C1 >> 20 & 0x7FFFFFFF  # the order of a hash
        order = cupy.argsort(cupy.where(entry < (position + 1) // ratio, key, 2**31), axis=-1)[:, :topk]
        visible = cupy.arange(order.shape[1])[None, :] < (position + 1) // ratio
        order = cupy.sort(cupy.where(visible, order, entries), axis=-1)
        out[0, first : first + 4096, : order.shape[1]] = cupy.where(order < entries, order, -1)
    return out, entries


def layer_inputs(queries: int, topk: int, *, heads=64, dim=128, dtype="bfloat16", seed=0):
    """(grad_scores, q, pooled_kv, weights, ids) of a V4 layer's indexer."""
    ids, entries = selection(queries, topk)
    rng = np.random.default_rng(seed)
    normals = cupy.asarray(rng.standard_normal(NORMALS, np.float32))

    def normal(kind, *shape):
        size = int(np.prod(shape))
        whole = cupy.empty(-(-size // NORMALS) * NORMALS, kind)
        whole.reshape(-1, NORMALS)[...] = normals
        return whole[:size].reshape(shape)

    kind = DTYPES[dtype]
    q, k, w = normal(kind, 1, queries, heads, dim), normal(kind, 1, entries, dim), normal(kind, 1, queries, heads)
    return normal(np.dtype(np.float32), 1, queries, topk), q, k[:, ::-1].copy(), w, ids
