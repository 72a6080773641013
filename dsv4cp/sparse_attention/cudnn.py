"""Sparse attention by NVIDIA's DSA kernels on CuPy arrays.

Those kernels take torch tensors: arrays cross by DLPack, without a copy, and torch works on CuPy's current stream
meanwhile. On SM90 out and lse come from cuda.py, without torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from . import contract_cudnn
from .contract import Spec
from .contract_cudnn import Ids


def major(x: Any) -> int:
    """The compute capability of the GPU of a CuPy array, its first number."""
    return int(cupy.cuda.Device(x.data.device_id).compute_capability[:-1])


def forward(q: Any, kv: Any, sinks: Any, ids: Ids, spec: Spec, all_rows_nonempty: bool) -> tuple[Any, Any]:
    """(out [B, S, H, D] in q's dtype, lse [B, S, H] float32)."""
    if major(q) == 9:
        from . import cuda

        if ids.lengths is None:
            return cuda.forward(q, kv, sinks, ids.ids, spec)
        rows, slots = spec.batch * spec.queries, ids.ids.shape[-1]  # a plan's ids are those of one batch row
        one = replace(spec, batch=1, queries=rows, keys=spec.batch * spec.keys, slots=slots)
        q_, kv_ = q.reshape(1, rows, spec.heads, spec.dim), kv.reshape(1, one.keys, spec.dim)
        out, lse = cuda.forward(q_, kv_, sinks, ids.ids.reshape(1, rows, slots), one)
        return out.reshape(q.shape), lse.reshape(q.shape[:3])
    if _no_work(ids, spec):
        return cupy.zeros(q.shape, q.dtype), cupy.full(q.shape[:3], -np.inf, np.float32)
    from .. import _bridge
    from . import torch_bridge_cudnn

    with _bridge.torch_on_stream_of(q):
        q_, kv_, sinks_ = (_tensor(x) for x in (q, kv, sinks))
        made = torch_bridge_cudnn.forward(q_, kv_, sinks_, _tensors(ids), spec, all_rows_nonempty)
        return _arrays(made)


def backward(
    grad_out: Any, q: Any, kv: Any, sinks: Any, ids: Ids, out: Any, lse: Any, spec: Spec, *, all_rows_nonempty: bool,
    deterministic: bool, workspace_bytes: int,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(grad_q, grad_kv, grad_sinks)."""
    contract_cudnn.require_order("deterministic" if deterministic else "atomic", major(q))
    if _no_work(ids, spec):
        contract_cudnn.require_workspace(workspace_bytes, spec)
        return cupy.zeros(q.shape, q.dtype), cupy.zeros(kv.shape, kv.dtype), cupy.zeros(sinks.shape, sinks.dtype)
    from .. import _bridge
    from . import torch_bridge_cudnn

    with _bridge.torch_on_stream_of(q):
        grad_out_, q_, kv_, sinks_, out_, lse_ = (_tensor(x) for x in (grad_out, q, kv, sinks, out, lse))
        made = torch_bridge_cudnn.backward(
            grad_out_, q_, kv_, sinks_, _tensors(ids), out_, lse_, spec, all_rows_nonempty, deterministic,
            workspace_bytes,
        )  # fmt: skip
        return _arrays(made)


def _no_work(ids: Ids, spec: Spec) -> bool:
    """Whether no query has a key, as far as lengths of axes tell: arrays of size 0 have no memory to hand over."""
    nobody = ids.rows is not None and ids.rows.shape[0] == 0
    return nobody or 0 in (spec.batch, spec.queries, spec.heads, spec.keys, ids.ids.shape[-1])


def _tensor(x: Any) -> Any:
    """A torch tensor on the array's memory, or on that of a contiguous copy: torch has no negative strides."""
    from .. import _bridge

    return _bridge.to_torch(cupy.ascontiguousarray(x))


def _tensors(ids: Ids) -> Ids:
    return Ids(*(None if x is None else _tensor(x) for x in ids))


def _arrays(tensors: tuple[Any, ...]) -> Any:
    from .. import _bridge

    return tuple(_bridge.to_cupy(x) for x in tensors)
