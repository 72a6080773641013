"""What the indexer's gradients and the scores of given ids accept beyond contract.py: how sums over queries are made,
working memory, and which arrays the CUDA kernels take. Metadata only."""

from __future__ import annotations

from typing import Any

from .._arrays import dtype_name, whole_number

BACKWARD_IMPLS = ("atomic", "deterministic")
WORKSPACE_BYTES = 2 * 1024**3
KERNEL_DTYPES, KERNEL_DIMS, KERNEL_HEADS = ("bfloat16", "float16"), (64, 128), 128
KERNEL_NUMBERS = ("bfloat16", "float16", "float32")  # of weights and incoming gradients


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
    return _unfit_dtype(q, pooled_kv, weights, grad_scores) or _unfit_size(q)


def within_kernels(chosen: str, backend: str, q: Any, pooled_kv: Any, weights: Any, grad_scores: Any = None) -> str:
    """`chosen`, or "reference" where "auto" chose kernels that cannot take the arrays; raises where they were named."""
    if chosen != "cuda" or kernels_unfit(q, pooled_kv, weights, grad_scores) is None:
        return chosen
    if backend == "auto":
        return "reference"
    reason = _unfit_dtype(q, pooled_kv, weights, grad_scores)
    raise ValueError(_unfit_size(q)) if reason is None else TypeError(reason)


def _unfit_dtype(q: Any, pooled_kv: Any, weights: Any, grad_scores: Any) -> str | None:
    if dtype_name(q) not in KERNEL_DTYPES:
        return f"q: the CUDA kernels take bfloat16 or float16, got {dtype_name(q)}"
    if dtype_name(pooled_kv) != dtype_name(q):
        return f"pooled_kv: the CUDA kernels take q's dtype {dtype_name(q)}, got {dtype_name(pooled_kv)}"
    for name, x in (("weights", weights), ("grad_scores", grad_scores)):
        if x is not None and dtype_name(x) not in KERNEL_NUMBERS:
            return f"{name}: the CUDA kernels take {', '.join(KERNEL_NUMBERS)}, got {dtype_name(x)}"
    return None


def _unfit_size(q: Any) -> str | None:
    heads, dim = q.shape[-2:]
    if dim not in KERNEL_DIMS:
        return f"q: the CUDA kernels take index dim 64 or 128, got {dim}"
    if not 0 < heads <= KERNEL_HEADS:
        return f"q: the CUDA kernels take 1 to {KERNEL_HEADS} heads, got {heads}"
    return None
