"""Sinkhorn in Numba CUDA: what cuda.py computes, written to be read. One thread holds one matrix.

It follows the definition division by division, and the gradient keeps every state of the forward pass in device
memory, blocks of matrices at a time. Everything runs on CuPy's current stream of the arrays' device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda, float32

from .. import _numba
from .contract import KERNEL_M, Spec

THREADS = 128
MOST_BLOCKS = 2**16  # kernels stride over the rest
STATE_BYTES = 256 * 2**20  # of states that the gradient keeps at once

MATRIX = (KERNEL_M, KERNEL_M)  # a thread's local arrays hold the largest matrix


def forward(x: Any, spec: Spec) -> Any:
    """y [..., M, M] in x's dtype."""
    y = _numba.empty((spec.matrices, spec.m, spec.m), np.float32, spec.device)
    _numba.launch(normalize, _grid(spec.matrices), (THREADS,), _matrices(x, spec), y, spec.repeat, np.float32(spec.eps))
    return y.astype(x.dtype, copy=False).reshape(spec.shape)


def backward(grad_y: Any, x: Any, spec: Spec) -> Any:
    """grad_x [..., M, M] in x's dtype."""
    grad, rows = _matrices(grad_y, spec), _matrices(x, spec)
    out = _numba.empty(rows.shape, np.float32, spec.device)
    states = 2 * spec.repeat
    block = max(1, min(spec.matrices, STATE_BYTES // (4 * states * spec.m**2)))
    kept = _numba.empty((states, block, spec.m, spec.m), np.float32, spec.device)
    divisors = _numba.empty((states, block, spec.m), np.float32, spec.device)
    for start in range(0, spec.matrices, block):
        part = slice(start, start + block)
        _numba.launch(
            normalize_grad,
            _grid(min(block, spec.matrices - start)),
            (THREADS,),
            grad[part],
            rows[part],
            out[part],
            kept,
            divisors,
            spec.repeat,
            np.float32(spec.eps),
        )
    return out.astype(x.dtype, copy=False).reshape(spec.shape)


def _matrices(x: Any, spec: Spec) -> Any:
    """x as contiguous float32 [N, M, M]."""
    return _numba.contiguous(x, np.float32).reshape((spec.matrices, spec.m, spec.m))


def _grid(matrices: int) -> tuple[int]:
    return (min(-(-matrices // THREADS), MOST_BLOCKS),)


# --- Kernels -------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def softmax(x, n, p, m):
    """p_ij = exp(x_ij - max_j x_ij) / sum_j exp(x_ij - max_j x_ij) of matrix n"""
    for i in range(m):
        top = x[n, i, 0]
        for j in range(1, m):
            top = max(top, x[n, i, j])
        total = float32(0)
        for j in range(m):
            p[i, j] = math.exp(x[n, i, j] - top)
            total += p[i, j]
        for j in range(m):
            p[i, j] /= total


@cuda.jit(device=True)
def divisor(y, m, columns, k, eps):
    """sum_i y_ik + eps for column k, sum_j y_kj + eps for row k"""
    total = float32(0)
    for l in range(m):  # noqa: E741
        total += y[l, k] if columns else y[k, l]
    return total + eps


@cuda.jit
def normalize(x, y, repeat, eps):
    """y of x, both [N, M, M]"""
    m = x.shape[1]
    state = cuda.local.array(MATRIX, float32)
    for n in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):  # type: ignore[call-arg]
        softmax(x, n, state, m)
        for i in range(m):
            for j in range(m):
                state[i, j] += eps
        for step in range(2 * repeat - 1):  # columns first and last
            columns = step % 2 == 0
            for k in range(m):
                d = divisor(state, m, columns, k, eps)
                for l in range(m):  # noqa: E741
                    if columns:
                        state[l, k] /= d
                    else:
                        state[k, l] /= d
        for i in range(m):
            for j in range(m):
                y[n, i, j] = state[i, j]


@cuda.jit
def normalize_grad(grad_y, x, grad_x, kept, divisors, repeat, eps):
    """grad_x of grad_y and x, all [N, M, M]; kept [2 repeat, N, M, M] and divisors [2 repeat, N, M] are scratch"""
    m = x.shape[1]
    p = cuda.local.array(MATRIX, float32)
    g = cuda.local.array(MATRIX, float32)
    for n in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):  # type: ignore[call-arg]
        softmax(x, n, p, m)
        for i in range(m):
            for j in range(m):
                g[i, j] = grad_y[n, i, j]
                kept[0, n, i, j] = p[i, j] + eps
        # Every division, its result and its divisors kept.
        for step in range(2 * repeat - 1):
            columns = step % 2 == 0
            for k in range(m):
                d = divisor(kept[step, n], m, columns, k, eps)
                divisors[step, n, k] = d
                for l in range(m):  # noqa: E741
                    if columns:
                        kept[step + 1, n, l, k] = kept[step, n, l, k] / d
                    else:
                        kept[step + 1, n, k, l] = kept[step, n, k, l] / d
        # Backwards, g <- (g - sum(g y)) / divisor along the axis of the division.
        for step in range(2 * repeat - 2, -1, -1):
            columns = step % 2 == 0
            for k in range(m):
                total = float32(0)
                for l in range(m):  # noqa: E741
                    i, j = (l, k) if columns else (k, l)
                    total += g[i, j] * kept[step + 1, n, i, j]
                for l in range(m):  # noqa: E741
                    i, j = (l, k) if columns else (k, l)
                    g[i, j] = (g[i, j] - total) / divisors[step, n, k]
        # Through the softmax, grad_x = p (g - sum_j g p).
        for i in range(m):
            total = float32(0)
            for j in range(m):
                total += g[i, j] * p[i, j]
            for j in range(m):
                grad_x[n, i, j] = p[i, j] * (g[i, j] - total)
