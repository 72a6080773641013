"""The gradient of sparse attention on a GPU in float64, for shapes that tests/support/naive.py is too slow for.

Repeats the definition on CuPy arrays; imports nothing from dsv4cp.
"""

from __future__ import annotations

import cupy
import cupyx
import numpy as np

from .attention_gpu import CHUNK, product


def grad_oracle(grad_out, q, kv, sinks, ids, scale):
    """(grad_q, grad_kv, grad_sinks) in float64; rows that nobody selects, and grad_out where a query has no key, may
    hold NaN."""
    batch, queries, heads, dim = q.shape
    slots, keys = ids.shape[2], kv.shape[1]
    grad_q, grad_kv = cupy.zeros(q.shape, np.float64), cupy.zeros(kv.shape, np.float64)
    grad_sinks = cupy.zeros(heads, np.float64)
    if slots == 0 or keys == 0:
        return grad_q, grad_kv, grad_sinks
    sinks = sinks.astype(np.float64)[None, :, None]
    step = max(1, CHUNK // (slots * (dim + 4 * heads)))
    for b in range(batch):
        for s in range(0, queries, step):
            n = slice(s, s + step)
            valid = (ids[b, n] >= 0) & (ids[b, n] < keys)
            seen = valid.any(axis=-1)[:, None, None]
            rows = kv[b].astype(np.float32)[cupy.where(valid, ids[b, n], 0)].astype(np.float64)
            rows = cupy.where(valid[:, :, None], rows, 0)
            turned = cupy.ascontiguousarray(rows.swapaxes(1, 2))
            q_, g_ = q[b, n].astype(np.float64), cupy.where(seen, grad_out[b, n].astype(np.float64), 0)
            scores = cupy.where(valid[:, None, :], product(q_, turned) * scale, -np.inf)
            top = scores.max(axis=-1, keepdims=True)
            top = cupy.where(seen, cupy.maximum(top, cupy.where(cupy.isinf(sinks), top, sinks)), 0)
            weights = cupy.exp(scores - top)
            sink = cupy.where(seen, cupy.exp(cupy.where(sinks == np.inf, 0, sinks - top)), 0)
            total = cupy.where(seen, weights.sum(axis=-1, keepdims=True) + sink, 1)
            endless = sinks == np.inf
            p = cupy.where(endless, 0, weights / total)
            out = product(p, rows)
            delta = (g_ * out).sum(axis=-1, keepdims=True)
            ds = scale * p * (product(g_, turned) - delta)
            grad_q[b, n] = product(ds, rows)
            grad_rows = product(ds.swapaxes(1, 2), q_) + product(p.swapaxes(1, 2), g_)
            cupyx.scatter_add(grad_kv[b], ids[b, n][valid], grad_rows[valid])
            grad_sinks -= cupy.where(endless, 0, sink / total * delta).sum(axis=(0, 2))
    return grad_q, grad_kv, grad_sinks
