"""The indexer's gradients and the scores of given ids on the GPU, for CuPy arrays.

q, keys and incoming gradients are read where they lie; only what 16-byte copies cannot reach is copied. Work is queued
on CuPy's current stream; nothing waits for it.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from .._arrays import dtype_name, element_strides
from . import contract_grad
from .contract import SlotsSpec, Spec
from .cuda_grad_kernels import VARIANTS
from .cuda_grad_launch import (
    Operand,
    Operands,
    aligned,
    dense_workspace_bytes,
    launch_scores_grad,
    launch_topk_scores,
    launch_topk_scores_grad,
    plan,
)

__all__ = ["VARIANTS", "scores_grad", "topk_scores", "topk_scores_grad"]


def topk_scores(q: Any, pooled_kv: Any, weights: Any, topk_indices: Any, spec: SlotsSpec) -> Any:
    """[B, S, T] float32: scores at the given ids, -inf where an id is outside [0, P)."""
    with q.device:
        q, pooled_kv = _readable(q), _readable(pooled_kv)
        weights, ids = cupy.ascontiguousarray(weights), cupy.ascontiguousarray(topk_indices)
        out = cupy.empty(ids.shape, np.float32)
        launch_topk_scores(_operands(q, pooled_kv, weights, ids), out.data.ptr, spec)
        return out


def topk_scores_grad(
    grad_scores: Any, q: Any, pooled_kv: Any, weights: Any, topk_indices: Any, spec: SlotsSpec, *,
    deterministic: bool = False, workspace_bytes: int = contract_grad.WORKSPACE_BYTES,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(grad_q, grad_pooled_kv, grad_weights) of topk_scores."""
    passes = plan(spec, deterministic, workspace_bytes)
    with q.device:
        q, pooled_kv = _readable(q), _readable(pooled_kv)
        weights, ids = cupy.ascontiguousarray(weights), cupy.ascontiguousarray(topk_indices)
        grads = [cupy.empty(x.shape, x.dtype) for x in (q, pooled_kv, weights)]
        workspace = cupy.empty(passes.workspace_bytes, np.uint8)
        operands = _operands(q, pooled_kv, weights, ids, grad_scores)
        launch_topk_scores_grad(operands, tuple(x.data.ptr for x in grads), workspace.data.ptr, spec, passes)
        return tuple(grads)


def scores_grad(grad_scores: Any, q: Any, pooled_kv: Any, weights: Any, spec: Spec) -> tuple[Any, Any, Any]:
    """(grad_q, grad_pooled_kv, grad_weights) of dense causal scores, every sum in a fixed order."""
    with q.device:
        q, pooled_kv, weights = _readable(q), _readable(pooled_kv), cupy.ascontiguousarray(weights)
        grads = [cupy.empty(x.shape, x.dtype) for x in (q, pooled_kv, weights)]
        workspace = cupy.empty(dense_workspace_bytes(spec), np.uint8)
        operands = _operands(q, pooled_kv, weights, None, grad_scores)
        launch_scores_grad(operands, tuple(x.data.ptr for x in grads), workspace.data.ptr, spec)
        return tuple(grads)


def _operands(*arrays: Any) -> Operands:
    return Operands(*(None if x is None else _operand(x) for x in arrays))  # type: ignore[arg-type]


def _operand(x: Any) -> Operand:
    return Operand(x.data.ptr, dtype_name(x), element_strides(x))


def _readable(x: Any) -> Any:
    """x itself where the kernels can read it, else a contiguous copy."""
    operand = _operand(x)
    return x if aligned(operand.address, x.shape, operand.strides) else x.copy(order="C")
