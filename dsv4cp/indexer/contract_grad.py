"""What the indexer's gradients and the scores of given ids accept beyond contract.py: how sums over queries are made,
working memory, incoming gradients of the CUDA kernels. Metadata only."""

from __future__ import annotations

from typing import Any

from .._arrays import dtype_name, whole_number
from . import contract_kernels

BACKWARD_IMPLS = ("atomic", "deterministic")
WORKSPACE_BYTES = 2 * 1024**3


def check_backward(backward_impl: Any, backward_workspace_bytes: Any) -> int:
    """The cap in bytes, once the name of the implementation and the cap are in range."""
    if not isinstance(backward_impl, str):
        raise TypeError(f"backward_impl: expected a string, got {type(backward_impl).__name__}")
    if backward_impl not in BACKWARD_IMPLS:
        raise ValueError(f"backward_impl: expected 'atomic' or 'deterministic', got {backward_impl!r}")
    return whole_number("backward_workspace_bytes", backward_workspace_bytes, minimum=1)


def check_workspace(cap: int, minimum: int) -> None:
    """A cap that one step of the gradient does not fit in is refused, not exceeded."""
    if cap < minimum:
        raise ValueError(f"backward_workspace_bytes: expected at least {minimum} for these shapes, got {cap}")


def check_fixed_order(chosen: str, library: str, backward_impl: str) -> None:
    """On CuPy arrays the reference sums over queries with atomics: what has no fixed order must not claim one."""
    if chosen == "reference" and library == "cupy" and backward_impl == "deterministic":
        raise RuntimeError(
            "backward_impl: 'deterministic' on CuPy arrays needs the CUDA kernels, which do not take this call"
        )


def kernels_unfit(q: Any, pooled_kv: Any, weights: Any, grad_scores: Any = None) -> str | None:
    """Why the CUDA kernels cannot take these arrays though they are valid arguments, None when they can."""
    return contract_kernels.unfit(q, pooled_kv, weights) or _unfit_grad(grad_scores)


def within_kernels(chosen: str, backend: str, q: Any, pooled_kv: Any, weights: Any, grad_scores: Any = None) -> str:
    """`chosen`, or "reference" where "auto" chose kernels that cannot take the arrays; raises where they were named."""
    chosen = contract_kernels.within(chosen, backend, q, pooled_kv, weights)
    reason = _unfit_grad(grad_scores)
    if chosen != "cuda" or reason is None:
        return chosen
    if backend == "auto":
        return "reference"
    raise TypeError(reason)


def _unfit_grad(grad_scores: Any) -> str | None:
    if grad_scores is None or dtype_name(grad_scores) in contract_kernels.NUMBERS:
        return None
    return f"grad_scores: the CUDA kernels take {', '.join(contract_kernels.NUMBERS)}, got {dtype_name(grad_scores)}"
