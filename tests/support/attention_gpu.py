"""Sparse attention on a GPU: a vectorised float64 oracle, selections as a V4 layer makes them, random inputs.

The oracle repeats the definition on CuPy arrays, for shapes that tests/support/naive.py is too slow for. Nothing here
imports dsv4cp or asks for a CUDA library beyond CuPy: random numbers are NumPy's, products torch's where it is there.
"""

from __future__ import annotations

import cupy
import ml_dtypes
import numpy as np

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
CHUNK = 2**26  # float64 numbers of gathered rows at a time
# Queries, heads, ratio and top-k of layers: one block of heads with many slots a query and with few, two blocks, the
# kernel for few heads, heads that fill no block.
LAYERS = {
    "R4": (4096, 64, 4, 512),
    "R128": (4096, 64, 128, 4096),
    "H128": (2048, 128, 4, 512),
    "H16": (4096, 16, 4, 512),
    "H40": (2048, 40, 128, 2048),
}
NORMALS = 7_340_033  # a prime: rows cut out of repetitions of so many numbers differ


def product(a, b):
    """a @ b of stacks of float64 matrices."""
    try:
        import torch
    except ImportError:
        return cupy.matmul(a, b)
    return cupy.from_dlpack(torch.from_dlpack(cupy.ascontiguousarray(a)) @ torch.from_dlpack(b))


def oracle(q, kv, sinks, ids, scale):
    """(out [B, S, H, D], lse [B, S, H]) in float64."""
    batch, queries, heads, dim = q.shape
    slots, keys = ids.shape[2], kv.shape[1]
    out, lse = cupy.zeros(q.shape, np.float64), cupy.full(q.shape[:3], -np.inf)
    if slots == 0 or keys == 0:
        return out, lse
    sinks = sinks.astype(np.float64)[None, :, None]
    step = max(1, CHUNK // (slots * (dim + 4 * heads)))
    for b in range(batch):
        for s in range(0, queries, step):
            n = slice(s, s + step)
            valid = (ids[b, n] >= 0) & (ids[b, n] < keys)
            rows = kv[b].astype(np.float32)[cupy.where(valid, ids[b, n], 0)].astype(np.float64)
            rows = cupy.where(valid[:, :, None], rows, 0)
            scores = product(q[b, n].astype(np.float64), rows.swapaxes(1, 2)) * scale
            scores = cupy.where(valid[:, None, :], scores, -np.inf)
            top = scores.max(axis=-1, keepdims=True)
            top = cupy.where(top == -np.inf, 0, top)
            p = cupy.exp(scores - top)
            total = p.sum(axis=-1, keepdims=True)
            empty = total == 0
            with np.errstate(over="ignore"):
                denominator = cupy.where(empty, 1, total + cupy.exp(sinks - top))
            out[b, n] = product(p, rows) / denominator
            lse[b, n] = cupy.where(empty, -np.inf, top + cupy.log(cupy.where(empty, 1, total)))[:, :, 0]
    return out, lse


def oracle_grad(grad_out, q, kv, sinks, ids, scale):
    """(grad_q, grad_kv, grad_sinks) in float64, from the inputs alone."""
    batch, queries, heads, dim = q.shape
    slots, keys = ids.shape[2], kv.shape[1]
    grad_q, grad_kv, grad_sinks = cupy.zeros(q.shape), cupy.zeros(kv.shape), cupy.zeros(heads)
    if slots == 0 or keys == 0:
        return grad_q, grad_kv, grad_sinks
    sinks = sinks.astype(np.float64)[None, :, None]
    step = max(1, CHUNK // (slots * (2 * dim + 6 * heads)))
    for b in range(batch):
        for s in range(0, queries, step):
            n = slice(s, s + step)
            valid = (ids[b, n] >= 0) & (ids[b, n] < keys)
            safe = cupy.where(valid, ids[b, n], 0)
            rows = kv[b].astype(np.float32)[safe].astype(np.float64)
            rows = cupy.where(valid[:, :, None], rows, 0)
            q_, g = q[b, n].astype(np.float64), grad_out[b, n].astype(np.float64)
            scores = product(q_, rows.swapaxes(1, 2)) * scale
            scores = cupy.where(valid[:, None, :], scores, -np.inf)
            top = cupy.maximum(scores.max(axis=-1, keepdims=True), cupy.where(cupy.isposinf(sinks), -np.inf, sinks))
            top = cupy.where(top == -np.inf, 0, top)
            p = cupy.exp(scores - top)
            some = valid.any(axis=1)[:, None, None]
            total = cupy.where(some, p.sum(axis=-1, keepdims=True) + cupy.exp(sinks - top), 1)
            p, p_sink = p / total, cupy.where(some & ~cupy.isposinf(sinks), cupy.exp(sinks - top) / total, 0)
            grad_p = product(g, rows.swapaxes(1, 2))
            delta = (p * cupy.where(p > 0, grad_p, 0)).sum(axis=-1, keepdims=True)
            ds = cupy.where(p > 0, p * (grad_p - delta), 0) * scale
            grad_q[b, n] = product(ds, rows)
            terms = product(ds.swapaxes(1, 2), q_) + product(p.swapaxes(1, 2), g)
            cupy.add.at(grad_kv[b], cupy.where(valid, safe, 0).ravel(), (terms * valid[:, :, None]).reshape(-1, dim))
            grad_sinks -= cupy.where(some, p_sink * delta, 0).sum(axis=0)[:, 0]
    return grad_q, grad_kv, grad_sinks


def relative_error(got, want) -> float:
    """||got - want|| / ||want|| in float64, without a copy on the host; ||got|| where want is zero."""
    difference = norm = 0.0
    got, want = got.reshape(-1), want.reshape(-1)
    for n in range(0, len(got), 2**25):
        part = want[n : n + 2**25].astype(np.float64)
        difference += float(((got[n : n + 2**25].astype(np.float32).astype(np.float64) - part) ** 2).sum())
        norm += float((part**2).sum())
    return (difference / norm if norm > 0 else difference) ** 0.5


def v4_selection(queries: int, ratio: int, topk: int, *, window: int = 128):
    """int32 [1, S, T], K: the window's rows, then up to topk of the causal compressed rows, -1 where there are none."""
    position = cupy.arange(queries)[:, None]
    raw = cupy.maximum(position - window + 1, 0) + cupy.arange(min(window, queries))
    raw = cupy.where(raw > position, -1, raw)
    pooled = queries // ratio
    visible = (position + 1) // ratio
    if queries * pooled > 2**28 and topk < pooled:  # too many to sort: one of each of topk even strata, a few twice
        at = position * 0x9E3779B1 + cupy.arange(topk) * 0x85EBCA77 >> 7 & 0xFFFF
        chosen = (cupy.arange(topk) * 65536 + at) * visible // (topk * 65536)
        chosen = cupy.where(visible > topk, chosen, cupy.where(cupy.arange(topk) < visible, cupy.arange(topk), -1))
        ids = cupy.concatenate([raw, cupy.where(chosen >= 0, chosen + queries, -1)], axis=1)
        return cupy.ascontiguousarray(ids[None].astype(np.int32)), queries + pooled
    entry = cupy.arange(pooled)[None, :]
    if topk < pooled:  # distinct visible entries in the order of a multiplicative hash
        key = (position * pooled + entry) * 0x9E3779B97F4A7C1 >> 20 & 0x7FFFFFFF
        order = cupy.argsort(cupy.where(entry < visible, key, 2**31), axis=-1)[:, :topk]
        chosen = cupy.where(cupy.arange(topk)[None, :] < visible, order, -1)
    else:
        chosen = cupy.where(entry < visible, entry, -1)
    ids = cupy.concatenate([raw, cupy.where(chosen >= 0, chosen + queries, -1)], axis=1)
    return cupy.ascontiguousarray(ids[None].astype(np.int32)), queries + pooled


def random_inputs(b=2, s=5, h=3, d=64, k=40, t=70, *, dtype="bfloat16", seed=0, ids=None, unseen=np.nan):
    """(q, kv, sinks, ids) as CuPy arrays; ids hold -1, other negative numbers, ids from K on and repeats, one query has
    none; every row of kv that no query selects is filled with `unseen`."""
    rng = np.random.default_rng(seed)
    if ids is None:
        ids = rng.integers(-k // 3 - 1, k + k // 4 + 1, (b, s, t))
        if b and s > 2:
            ids[0, 1] = -1
            ids[-1, 0, : t // 2] = -1
            ids[-1, 2, t // 2 :] = -5
    q, kv = (rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for shape in ((b, s, h, d), (b, k, d)))
    sinks = rng.standard_normal(h).astype(np.float32)
    for row in range(b):
        kv[row, np.setdiff1d(np.arange(k), ids[row])] = unseen
    return cupy.asarray(q), cupy.asarray(kv), cupy.asarray(sinks), cupy.asarray(ids)


def layer_inputs(queries: int, heads: int, ratio: int, topk: int, *, dtype="bfloat16", seed=0):
    """(q, kv, sinks, ids) of a V4 layer with D 512."""
    ids, keys = v4_selection(queries, ratio, topk)
    rng = np.random.default_rng(seed)
    normals = cupy.asarray(rng.standard_normal(NORMALS, np.float32).astype(DTYPES[dtype]))

    def normal(*shape):
        size = int(np.prod(shape))
        whole = cupy.empty(-(-size // NORMALS) * NORMALS, normals.dtype)
        whole.reshape(-1, NORMALS)[...] = normals
        return whole[:size].reshape(shape)

    sinks = cupy.asarray(rng.standard_normal(heads).astype(np.float32))
    return normal(1, queries, heads, 512), normal(1, keys, 512), sinks, ids
