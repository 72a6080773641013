"""Sinkhorn normalisation and its unrolled gradient in array-API operations.

The arithmetic runs on [M, M, N] with the matrices along the last axis, so that every operation is a long
vector operation, and sums over M add in ascending order. A result therefore has the same bits whatever
the strides of the inputs, the number of matrices beside it and the blocks they are cut into.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from .._arrays import cast, quiet
from .contract import Spec

ALONG_ROW, ALONG_COLUMN = 1, 0  # axes of [M, M, N] to sum over: within a row, within a column
HOST_BLOCK = 1 << 17  # elements at once: what fits into a core's cache
DEVICE_BLOCK = 1 << 24  # elements at once where every operation is a kernel launch
STATES = 16  # how many times a block all 2*repeat states of the gradient may take together


@quiet
def forward(x: Any, spec: Spec) -> Any:
    """y [..., M, M] in x's dtype."""
    return _in_blocks(lambda block: normalize(block, spec), spec, _block_elements(spec), x)


@quiet
def backward(grad_y: Any, x: Any, spec: Spec) -> Any:
    """grad_x [..., M, M] in x's dtype."""
    elements = min(_block_elements(spec), STATES * _block_elements(spec) // (2 * spec.repeat))
    return _in_blocks(lambda grad, block: normalize_grad(grad, block, spec), spec, elements, grad_y, x)


def forward_whole(x: Any, spec: Spec) -> Any:
    """forward without blocks, differentiable by the array library where it can differentiate."""
    xp = spec.xp
    y = normalize(matrices_last(xp.reshape(x, (spec.matrices, spec.m, spec.m)), spec), spec)
    return cast(xp, xp.reshape(matrices_first(y, spec), spec.shape), x.dtype)


def normalize(x: Any, spec: Spec) -> Any:
    """y [M, M, N] of x [M, M, N]."""
    y = softmax(spec.xp, x) + spec.eps
    for _, quotient, _ in divisions(y, spec):
        y = quotient
    return y


def normalize_grad(grad: Any, x: Any, spec: Spec) -> Any:
    """grad_x [M, M, N] of grad = grad_y [M, M, N]: each step of normalize backwards."""
    xp = spec.xp
    p = softmax(xp, x)
    for axis, y, divisor in reversed(list(divisions(p + spec.eps, spec))):
        grad = (grad - total(xp, grad * y, axis)) / divisor
    return p * (grad - total(xp, grad * p, ALONG_ROW))


def softmax(xp: Any, x: Any) -> Any:
    """Softmax of each row; subtracting the row's maximum keeps exp within range."""
    e = xp.exp(x - xp.max(x, axis=ALONG_ROW, keepdims=True))
    return e / total(xp, e, ALONG_ROW)


def divisions(y: Any, spec: Spec) -> Iterator[tuple[int, Any, Any]]:
    """The 2*repeat - 1 divisions of y, columns first and last: each one's axis, result and divisor."""
    for step in range(2 * spec.repeat - 1):
        axis = ALONG_COLUMN if step % 2 == 0 else ALONG_ROW
        divisor = total(spec.xp, y, axis) + spec.eps
        y = y / divisor
        yield axis, y, divisor


def total(xp: Any, y: Any, axis: int) -> Any:
    """Sum of [M, M, N] over `axis` in ascending order, the axis kept with length 1."""
    return xp.expand_dims(functools.reduce(operator.add, xp.unstack(y, axis=axis)), axis=axis)


def matrices_last(x: Any, spec: Spec) -> Any:
    """[N, M, M] as a contiguous [M, M, N] in the arithmetic's dtype."""
    xp, m = spec.xp, spec.m
    entries = xp.unstack(xp.reshape(x, (x.shape[0], m * m)), axis=1)
    return cast(xp, xp.reshape(xp.stack(entries, axis=0), (m, m, x.shape[0])), getattr(xp, spec.compute))


def matrices_first(y: Any, spec: Spec) -> Any:
    """[M, M, N] as a contiguous [N, M, M]."""
    xp, m = spec.xp, spec.m
    entries = xp.unstack(xp.reshape(y, (m * m, y.shape[2])), axis=0)
    return xp.reshape(xp.stack(entries, axis=1), (y.shape[2], m, m))


def _block_elements(spec: Spec) -> int:
    """How many elements the forward pass takes at once."""
    return DEVICE_BLOCK if spec.library == "cupy" else HOST_BLOCK


def _in_blocks(equation: Callable[..., Any], spec: Spec, elements: int, *arrays: Any) -> Any:
    """`equation` over blocks of matrices, joined into an array of the spec's shape and dtype."""
    xp, m = spec.xp, spec.m
    dtype = arrays[-1].dtype
    size = max(1, elements // (m * m))
    flat = [xp.reshape(a, (spec.matrices, m, m)) for a in arrays]
    parts = []
    for start in range(0, max(spec.matrices, 1), size):
        block = [matrices_last(a[start : min(start + size, spec.matrices), ...], spec) for a in flat]
        parts.append(cast(xp, matrices_first(equation(*block), spec), dtype))
    return xp.reshape(parts[0] if len(parts) == 1 else xp.concat(parts, axis=0), spec.shape)
