"""Which arrays the CUDA kernels of the indexer take. Metadata only."""

from __future__ import annotations

from typing import Any

from .._arrays import dtype_name

DTYPES, NUMBERS = ("bfloat16", "float16"), ("bfloat16", "float16", "float32")  # of q and entries; of weights and scores
DIMS, MOST_HEADS = (64, 128), 128
MOST_ITEMS = 2**31 - 1  # queries, and entries of all batch rows


def unfit(q: Any, pooled_kv: Any, weights: Any) -> str | None:
    """Why the kernels cannot take these arrays though they are valid arguments, None when they can."""
    return _unfit_dtype(q, pooled_kv, weights) or _unfit_size(q)


def within(chosen: str, backend: str, q: Any, pooled_kv: Any, weights: Any) -> str:
    """`chosen`, or "reference" where "auto" chose kernels that cannot take the arrays; raises where they were named."""
    if chosen != "cuda" or unfit(q, pooled_kv, weights) is None:
        return chosen
    if backend == "auto":
        return "reference"
    reason = _unfit_dtype(q, pooled_kv, weights)
    raise ValueError(_unfit_size(q)) if reason is None else TypeError(reason)


def within_selection(chosen: str, backend: str, scores: Any) -> str:
    """The same for a selection over given scores."""
    if chosen != "cuda" or dtype_name(scores) in NUMBERS:
        return chosen
    if backend == "auto":
        return "reference"
    raise TypeError(f"scores: the CUDA kernels take {', '.join(NUMBERS)}, got {dtype_name(scores)}")


def _unfit_dtype(q: Any, pooled_kv: Any, weights: Any) -> str | None:
    if dtype_name(q) not in DTYPES:
        return f"q: the CUDA kernels take bfloat16 or float16, got {dtype_name(q)}"
    if dtype_name(pooled_kv) != dtype_name(q):
        return f"pooled_kv: the CUDA kernels take q's dtype {dtype_name(q)}, got {dtype_name(pooled_kv)}"
    if dtype_name(weights) not in NUMBERS:
        return f"weights: the CUDA kernels take {', '.join(NUMBERS)}, got {dtype_name(weights)}"
    return None


def _unfit_size(q: Any) -> str | None:
    heads, dim = q.shape[-2:]
    if dim not in DIMS:
        return f"q: the CUDA kernels take index dim 64 or 128, got {dim}"
    if not 0 < heads <= MOST_HEADS:
        return f"q: the CUDA kernels take 1 to {MOST_HEADS} heads, got {heads}"
    return None
