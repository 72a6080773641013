"""Launches of sparse attention on torch tensors, as notes for calls that come again (_bridge_programs.py).

Each takes the tensors of a call that has been checked, and Making last; None where kernels cannot read the tensors as
they are. Sinks of other dtypes than float32 are the exception: they are written out before a program plays.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _bridge
from .._bridge_programs import Making
from .contract import Spec


@functools.cache  # an import statement in each call takes half a microsecond
def launches() -> Any:
    """The module of the forward's launches, and of what both share."""
    from . import cuda

    return cuda


@functools.cache
def gradient_launches() -> Any:
    """The module of the gradient's."""
    from . import cuda_bwd

    return cuda_bwd


def forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, spec: Spec,
    reference_rounding: bool, making: Making,
) -> int | None:  # fmt: skip
    """out and lse."""
    if not _readable((q, kv), (sinks, topk_idxs)):
        return None
    out, lse = making.make(q.shape, q.dtype), making.make(q.shape[:3], torch.float32)
    q_at, kv_at, sinks_at, ids_at = making.given
    launches().launch_forward(
        q_at, kv_at, sinks_at, _narrow(topk_idxs, ids_at, spec.keys, making), out, lse, spec,
        dtype=_bridge.name_of(q.dtype), q_strides=q.stride(), kv_strides=kv.stride(),
        reference_rounding=reference_rounding, stream=making,
    )  # fmt: skip
    return 2


def backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, spec: Spec, deterministic: bool, workspace_bytes: int, making: Making,
) -> int | None:  # fmt: skip
    """The gradients of q, kv and sinks, the last in float32."""
    fit = grad_out.dtype == q.dtype == out.dtype and lse.dtype == torch.float32
    if not fit or not _readable((grad_out, q, kv, out), (sinks, topk_idxs, lse)):
        return None
    plan = gradient_launches().layout(spec, deterministic, workspace_bytes)
    grads = making.make(q.shape, q.dtype), making.make(kv.shape, kv.dtype), making.make(sinks.shape, torch.float32)
    g_at, q_at, kv_at, sinks_at, ids_at, out_at, lse_at = making.given
    gradient_launches().launch_backward(
        grad_out=g_at, q=q_at, kv=kv_at, sinks=sinks_at, ids=_narrow(topk_idxs, ids_at, spec.keys, making), out=out_at,
        lse=lse_at, grad_q=grads[0], grad_kv=grads[1], grad_sinks=grads[2],
        work=making.make((plan.size,), torch.uint8), plan=plan, spec=spec, dtype=_bridge.name_of(q.dtype),
        grad_out_strides=grad_out.stride(), q_strides=q.stride(), kv_strides=kv.stride(), out_strides=out.stride(),
        deterministic=deterministic, stream=making,
    )  # fmt: skip
    return 3


def _readable(rows: tuple[torch.Tensor, ...], others: tuple[torch.Tensor, ...]) -> bool:
    aligned = launches().aligned
    return all(aligned(x.data_ptr(), x.shape, x.stride()) for x in rows) and all(x.is_contiguous() for x in others)


def _narrow(ids: torch.Tensor, at: Any, keys: int, making: Making) -> Any:
    if ids.dtype == torch.int32:
        return at
    narrow = making.make(ids.shape, torch.int32)
    launches().launch_narrow_ids(at, narrow, ids.numel(), keys, stream=making)
    return narrow
