"""Sinkhorn normalisation of hyper-connection matrices: the public functions."""

from __future__ import annotations

import functools
from typing import Any

from .._backend import pick
from . import contract

OFFERED = ("reference", "cuda", "numba")


@functools.cache  # an import statement takes as long as the contract's check
def _cuda() -> Any:
    from . import cuda

    return cuda


def dsv4_sinkhorn_normalize(x: Any, *, repeat: int, eps: float, backend: str = "auto") -> Any:
    """Bring each M x M matrix of logits close to doubly stochastic: rows and columns that sum to 1.

    With sum_row the sum over the last axis and sum_column over the one before it, both kept with length 1:

        y = softmax(x, axis=-1) + eps
        y = y / (sum_column(y) + eps)
        repeat - 1 times:
            y = y / (sum_row(y) + eps)
            y = y / (sum_column(y) + eps)

    Columns come last: they sum to 1 up to eps, rows only as far as the iteration has converged.

    x: [..., M, M] float16, bfloat16, float32 or float64, any M >= 1, any leading axes, of length zero too.
        Any strides, read-only arrays too; it is not written.
    repeat: how many times columns are normalised, at least 1.
    eps: at least 0 and finite.
    backend: "auto" takes "cuda" for CuPy arrays of M up to 16 in float16, bfloat16 or float32, "reference" for
        all others. "numba" is "cuda" written to be read: the same limits, slower.

    Returns a new contiguous array of x's shape, dtype, library and device. Arithmetic is float32, float64 for
    float64; the softmax subtracts each row's maximum, so logits of any finite size are fine. Each matrix
    has the same bits whatever stands beside it.

    -inf is an entry with softmax 0. NaN, +inf or a row of only -inf makes that whole matrix NaN and
    touches no other. With eps = 0 a column whose softmax underflows to 0 in every row gives 0/0 = NaN.

    Raises TypeError for a non-array, an unsupported dtype, a torch tensor (dsv4cp.torch_ops takes those) or
    a repeat or eps that is no host number; ValueError for a shape, repeat or eps out of range or an
    unknown backend; RuntimeError, saying why, for a backend that cannot run.

    Source: the manifold-constrained hyper-connections of DeepSeek-V4, in the order of operations of DeepSeek's
    inference code and of NeMo AutoModel's deepseek_v4 torch reference.
    """
    spec = contract.check(x, repeat, eps)
    backend = contract.within_kernels("dsv4_sinkhorn_normalize", backend, spec)
    impl: Any
    match pick("dsv4_sinkhorn_normalize", backend, spec.library, offered=OFFERED):
        case "cuda":
            impl = _cuda()
        case "numba":
            from . import numba_cuda as impl
        case _:
            from . import reference as impl
    return impl.forward(x, spec)


def dsv4_sinkhorn_normalize_grad(grad_y: Any, x: Any, *, repeat: int, eps: float, backend: str = "auto") -> Any:
    """Gradient of sum(grad_y * dsv4_sinkhorn_normalize(x)) with respect to x.

    It unrolls exactly the 2*repeat - 1 divisions of the forward pass, from the last to the first. With
    y the result of a division by divisor = sum(previous y) + eps along an axis, and p = softmax(x, axis=-1):

        g = grad_y
        each division backwards:
            g = (g - sum(g * y)) / divisor      (sum along the division's axis)
        grad_x = p * (g - sum_row(g * p))

    No implicit shortcut: at repeat 20 the iteration has not converged, so that one would be wrong.

    grad_y: exactly x's shape (nothing is broadcast), any of the four float dtypes, not necessarily x's; it is
        read as float32 (float64 for float64 x). Transposed, flipped, stride-0 and read-only arrays give the
        same bits as their contiguous copy.
    x, repeat, eps, backend: as in dsv4_sinkhorn_normalize.

    Returns a new contiguous array of x's shape, dtype, library and device. Inputs are not written. The states of
    the forward pass are recomputed in blocks of matrices, so that memory stays bounded.

    Where x has NaN, +inf or a row of only -inf, or grad_y is not finite, that matrix' gradient is NaN and
    no other matrix is touched. At an entry of -inf the gradient is 0.

    Raises as dsv4_sinkhorn_normalize; TypeError also for arrays of two libraries, ValueError for two devices or a
    grad_y of another shape.

    Source: the chain rule on the definition above.
    """
    spec = contract.check_grad(grad_y, x, repeat, eps)
    backend = contract.within_kernels("dsv4_sinkhorn_normalize_grad", backend, spec)
    impl: Any
    match pick("dsv4_sinkhorn_normalize_grad", backend, spec.library, offered=OFFERED):
        case "cuda":
            impl = _cuda()
        case "numba":
            from . import numba_cuda as impl
        case _:
            from . import reference as impl
    return impl.backward(grad_y, x, spec)
