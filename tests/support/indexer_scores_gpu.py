"""Indexer scores and selections on a GPU: vectorised oracles, and random inputs at the sizes of a V4 layer.

The oracles repeat the definitions on CuPy and NumPy arrays, for shapes that tests/support/naive.py is too slow for.
Nothing here imports dsv4cp.
"""

from __future__ import annotations

import cupy
import numpy as np

from .attention_gpu import DTYPES, NORMALS, product

NUMBERS = {**DTYPES, "float32": np.dtype(np.float32)}  # dtypes of weights and of given scores


def visible(queries: int, entries: int, ratio: int, start: int = 0):
    """[S, P]: whether query i sees entry j."""
    finished = np.array([(start + i + 1) // ratio for i in range(queries)], dtype=object)
    return cupy.asarray((np.arange(entries)[None, :] < finished[:, None]).astype(bool))


def oracle(q, k, w, scale, *, rows: int = 64):
    """[B, S, P] float64, unmasked."""
    out = cupy.empty((q.shape[0], q.shape[1], k.shape[1]))
    for b in range(q.shape[0]):
        entries = cupy.ascontiguousarray(k[b].astype(np.float32).astype(np.float64).T)
        for s in range(0, q.shape[1], rows):
            part = q[b, s : s + rows].astype(np.float32).astype(np.float64)
            logits = product(part.reshape(1, -1, part.shape[-1]), entries[None])[0]
            logits = logits.reshape(*part.shape[:2], -1)
            logits = cupy.where(logits <= 0, 0.0, logits)
            weights = w[b, s : s + rows].astype(np.float32).astype(np.float64)[:, None, :] * scale
            out[b, s : s + rows] = product(weights, logits)[:, 0]
    return out


def first_by_sort(scores, topk: int, order: str = "id"):
    """(ids int32, values) of a full stable sort of scores [N, P] on the host."""
    table = cupy.asnumpy(scores).astype(np.float64)
    clean = np.where(np.isnan(table), -np.inf, table)
    ids = np.argsort(-clean + 0.0, axis=-1, kind="stable")[:, :topk].astype(np.int64)
    found = np.take_along_axis(clean, ids, axis=-1)
    ids = np.where(found > -np.inf, ids, table.shape[1])
    if order == "id":
        ids = np.sort(ids, axis=-1)
    values = np.take_along_axis(np.pad(clean, ((0, 0), (0, 1)), constant_values=-np.inf), ids, axis=-1)
    short = topk - ids.shape[1]
    ids = np.pad(np.where(ids < table.shape[1], ids, -1), ((0, 0), (0, short)), constant_values=-1)
    return ids.astype(np.int32), np.pad(values, ((0, 0), (0, short)), constant_values=-np.inf).astype(np.float32)


def random_inputs(b=2, s=45, p=150, i=5, e=64, *, dtype="bfloat16", weights="float32", seed=0):
    """(q, pooled_kv, weights) as CuPy arrays."""
    rng = np.random.default_rng(seed)
    shapes = ((b, s, i, e), (b, p, e), (b, s, i))
    kinds = (dtype, dtype, weights)
    return tuple(
        cupy.asarray(rng.standard_normal(shape, np.float32).astype(NUMBERS[kind]))
        for shape, kind in zip(shapes, kinds, strict=True)
    )


def layer_inputs(queries: int, entries: int, *, heads=64, dim=128, seed=0):
    """(q, pooled_kv, weights) of a V4 layer: bfloat16 and float32 weights."""
    normals = cupy.asarray(np.random.default_rng(seed).standard_normal(NORMALS, np.float32))

    def normal(kind, *shape):
        size = int(np.prod(shape))
        whole = cupy.empty(-(-size // NORMALS) * NORMALS, kind)
        whole.reshape(-1, NORMALS)[...] = normals.astype(kind)
        return whole[:size].reshape(shape)

    half = DTYPES["bfloat16"]
    return (
        normal(half, 1, queries, heads, dim),
        normal(half, 1, entries, dim),
        normal(np.float32, 1, queries, heads),
    )
