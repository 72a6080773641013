"""The indexer on the GPU: scores (cuda_scores.py, on Hopper cuda_sm90.py), the selection (cuda_topk.py), scores at
given ids and the gradients (cuda_grad.py)."""

from __future__ import annotations

from typing import Any

from . import cuda_grad_kernels, cuda_scores, cuda_sm90, cuda_topk
from .cuda_scores import scores
from .cuda_topk import select, topk

__all__ = ["VARIANTS", "scores", "select", "topk"]

# Every specialisation that these files launch, for the tests that compile them all.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    **cuda_scores.VARIANTS,
    **cuda_sm90.VARIANTS,
    **cuda_topk.VARIANTS,
    **cuda_grad_kernels.VARIANTS,
}
