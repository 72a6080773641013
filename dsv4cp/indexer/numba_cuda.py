"""Extraction of top-k scores on the GPU with Numba: a gather.

Neighbouring threads read neighbouring ids and write neighbouring scores; blockDim.x threads make a query's row (a
warp where rows are many), blockDim.y rows a block. Scores move as the integers of their size, so every float type
takes the same way and NaN keeps its bits. No shared memory, no atomics: deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _numba
from .._arrays import dtype_name
from .._numba import cuda
from .contract import ExtractSpec

# Bits of -inf as a signed integer of the float's size.
MINUS_INFINITY = {
    "float16": np.int16(-0x0400),
    "bfloat16": np.int16(-0x0080),
    "float32": np.int32(-0x00800000),
    "float64": np.int64(-0x0010000000000000),
}
MANY_ROWS = 8192


@cuda.jit
def extract_rows(scores, ids, out, minus_infinity):
    """out[a, r, t] = scores[a, r, ids[a, r, t]] where the id is inside the row, else -inf. All [A, R, ...]."""
    rows, slots, entries = out.shape[1], out.shape[2], scores.shape[2]
    row = np.int64(cuda.blockIdx.x) * cuda.blockDim.y + cuda.threadIdx.y
    while row < out.shape[0] * rows:
        a = row // rows
        r = row - a * rows
        t = np.int64(cuda.threadIdx.x)
        while t < slots:
            entry = np.int64(ids[a, r, t])
            if 0 <= entry < entries:
                out[a, r, t] = scores[a, r, entry]
            else:
                out[a, r, t] = minus_infinity
            t += cuda.blockDim.x
        row += np.int64(cuda.gridDim.x) * cuda.blockDim.y


def extract(logits: Any, topk_indices: Any, spec: ExtractSpec) -> Any:
    """Scores at the ids, contiguous, in logits' dtype. Rows of logits may be strided: nothing [.., P] is copied."""
    out = _numba.empty(tuple(topk_indices.shape), logits.dtype, spec.device)
    if out.size == 0:
        return out
    if spec.entries == 0:
        with _numba.on(spec.device):
            out.fill(-np.inf)
        return out
    none = MINUS_INFINITY[dtype_name(logits)]
    scores = _three_axes(_numba.own(logits).view(type(none)))
    ids = _numba.contiguous(_numba.own(topk_indices)).reshape((*scores.shape[:2], spec.slots))
    rows = scores.shape[0] * scores.shape[1]
    lanes = 32 if rows >= MANY_ROWS else 128
    block = (16, 2) if _numba.SIMULATED else (lanes, 256 // lanes)
    flat = out.view(type(none)).reshape(ids.shape)
    _numba.launch(extract_rows, (-(-rows // block[1]),), block, scores, ids, flat, none)
    return out


def _three_axes(x: Any) -> Any:
    """x as [A, R, P]; more leading axes are joined, which copies only where their strides forbid it."""
    if x.ndim <= 3:
        return x.reshape(x.shape) if x.ndim == 3 else x[(None,) * (3 - x.ndim)]
    return x.reshape(-1, *x.shape[-2:])
