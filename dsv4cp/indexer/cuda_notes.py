"""Launches of the indexer as notes for calls that come again (_programs.py), of any library's arrays.

making.given are the arrays of a call that has been checked, in the order of the function's docstring; None where
kernels cannot read them as they lie.
"""

from __future__ import annotations

from .._programs import Laid, Making
from . import cuda_grad_launch, cuda_scores
from .contract import SlotsSpec, Spec
from .cuda_grad_launch import Operand, Operands


def scores(spec: Spec, making: Making) -> int | None:
    """q, entries, weights to dense scores."""
    q, k, weights = making.given
    if not all(cuda_scores.aligned(x.address, x.shape, x.strides) for x in (q, k)):
        return None
    of_q, of_k, of_weights = (cuda_scores.Operand(x.address, x.dtype, x.strides) for x in (q, k, weights))
    out = making.make((spec.batch, spec.queries, spec.entries), "float32")
    cuda_scores.launch_scores(of_q, of_k, of_weights, out, spec, cuda_scores.limits(spec), stream=making)
    return 1


def topk_scores(spec: SlotsSpec, making: Making) -> int | None:
    """q, entries, weights, ids to the scores at the ids."""
    q, k, weights, ids = making.given
    if not _readable((q, k), (weights, ids)):
        return None
    out = making.make(ids.shape, "float32")
    cuda_grad_launch.launch_topk_scores(Operands(*map(_operand, making.given)), out, spec, stream=making)
    return 1


def topk_scores_grad(spec: SlotsSpec, deterministic: bool, workspace_bytes: int, making: Making) -> int | None:
    """grad_scores, q, entries, weights, ids to the gradients of q, entries and weights."""
    grad_scores, q, k, weights, ids = making.given
    if not _readable((q, k), (weights, ids)):
        return None
    passes = cuda_grad_launch.plan(spec, deterministic, workspace_bytes)
    grads = tuple(making.make(x.shape, x.dtype) for x in (q, k, weights))
    operands = Operands(*map(_operand, (q, k, weights, ids, grad_scores)))
    workspace = making.make((passes.workspace_bytes,), "uint8")
    cuda_grad_launch.launch_topk_scores_grad(operands, grads, workspace, spec, passes, stream=making)
    return 3


def scores_grad(spec: Spec, making: Making) -> int | None:
    """grad_scores, q, entries, weights to the gradients of q, entries and weights."""
    grad_scores, q, k, weights = making.given
    if not _readable((q, k), (weights,)):
        return None
    grads = tuple(making.make(x.shape, x.dtype) for x in (q, k, weights))
    operands = Operands(_operand(q), _operand(k), _operand(weights), None, _operand(grad_scores))
    workspace = making.make((cuda_grad_launch.dense_workspace_bytes(spec),), "uint8")
    cuda_grad_launch.launch_scores_grad(operands, grads, workspace, spec, stream=making)
    return 3


def _operand(x: Laid) -> Operand:
    return Operand(x.address, x.dtype, x.strides)


def _readable(rows: tuple[Laid, ...], others: tuple[Laid, ...]) -> bool:
    aligned = cuda_grad_launch.aligned
    return all(aligned(x.address, x.shape, x.strides) for x in rows) and all(x.row_major for x in others)
