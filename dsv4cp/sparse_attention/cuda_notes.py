"""Launches of sparse attention as notes for calls that come again (_programs.py), of any library's arrays.

making.given are the arrays of a call that has been checked, in the order of the function's docstring; None where
kernels cannot read them as they lie. Sinks are float32 by the time a program plays.
"""

from __future__ import annotations

import math
from typing import Any

from .._programs import Laid, Making
from . import cuda, cuda_bwd
from .contract import Spec


def forward(spec: Spec, reference_rounding: bool, making: Making) -> int | None:
    """q, kv, sinks, ids to out and lse."""
    q, kv, sinks, ids = making.given
    if not _readable((q, kv), (sinks, ids)):
        return None
    out, lse = making.make(q.shape, q.dtype), making.make(q.shape[:3], "float32")
    cuda.launch_forward(
        q.address, kv.address, sinks.address, _narrow(ids, spec.keys, making), out, lse, spec, dtype=q.dtype,
        q_strides=q.strides, kv_strides=kv.strides, reference_rounding=reference_rounding, stream=making,
    )  # fmt: skip
    return 2


def backward(spec: Spec, deterministic: bool, workspace_bytes: int, making: Making) -> int | None:
    """grad_out, q, kv, sinks, ids, out, lse to the gradients of q, kv and sinks, the last in float32."""
    grad_out, q, kv, sinks, ids, out, lse = making.given
    fit = grad_out.dtype == q.dtype == out.dtype and lse.dtype == "float32"
    if not fit or not _readable((grad_out, q, kv, out), (sinks, ids, lse)):
        return None
    plan = cuda_bwd.layout(spec, deterministic, workspace_bytes)
    grads = making.make(q.shape, q.dtype), making.make(kv.shape, kv.dtype), making.make(sinks.shape, "float32")
    cuda_bwd.launch_backward(
        grad_out=grad_out.address, q=q.address, kv=kv.address, sinks=sinks.address,
        ids=_narrow(ids, spec.keys, making), out=out.address, lse=lse.address, grad_q=grads[0], grad_kv=grads[1],
        grad_sinks=grads[2], work=making.make((plan.size,), "uint8"), plan=plan, spec=spec, dtype=q.dtype,
        grad_out_strides=grad_out.strides, q_strides=q.strides, kv_strides=kv.strides, out_strides=out.strides,
        deterministic=deterministic, stream=making,
    )  # fmt: skip
    return 3


def _readable(rows: tuple[Laid, ...], others: tuple[Laid, ...]) -> bool:
    return all(cuda.aligned(x.address, x.shape, x.strides) for x in rows) and all(x.row_major for x in others)


def _narrow(ids: Laid, keys: int, making: Making) -> Any:
    if ids.dtype == "int32":
        return ids.address
    narrow = making.make(ids.shape, "int32")
    cuda.launch_narrow_ids(ids.address, narrow, math.prod(ids.shape), keys, stream=making)
    return narrow
