"""The operators dsv4::sparse_attention_cudnn and dsv4::sparse_attention_cudnn_grad: sparse attention by cuDNN's
kernels where the tensors fit them, by the reference elsewhere, so that a graph captured with them runs anywhere.

Ids come as the caller gave them, or as a plan's three arrays (contract_cudnn.Ids).
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _bridge
from .._arrays import dtype_name
from . import contract, contract_cudnn, reference, torch_bridge_cudnn, torch_bridge_kernels
from .contract import Spec
from .contract_cudnn import Ids


def local(ids: Ids, spec: Spec) -> torch.Tensor:
    """Ids [B, S, T] into each batch row's own keys."""
    if ids.lengths is None:
        return ids.ids
    flat = _by_row(ids, spec.batch, spec.queries)
    shift = torch.arange(spec.batch, dtype=flat.dtype, device=flat.device)[:, None, None] * spec.keys
    return torch.where(flat >= 0, flat - shift, -1)


def _by_row(ids: Ids, batch: int, queries: int) -> torch.Tensor:
    return ids.ids if ids.lengths is None else ids.ids.reshape(batch, queries, ids.ids.shape[-1])


@_bridge.remembered
def _spec(q: Any, kv: Any, sinks: Any, topk_idxs: Any, topk_length: Any, sm_scale: float) -> Spec:
    """The Spec of an operator's arguments; with a plan, its slots are those of the plan."""
    ids = _by_row(Ids(topk_idxs, topk_length, None), *q.shape[:2])
    return contract.check(q, kv, sinks, ids, sm_scale)


@_bridge.remembered
def _grad_spec(
    grad_out: Any, q: Any, kv: Any, sinks: Any, topk_idxs: Any, topk_length: Any, out: Any, lse: Any, sm_scale: float,
    deterministic: bool, workspace_bytes: int,
) -> Spec:  # fmt: skip
    """The same of a gradient."""
    ids = _by_row(Ids(topk_idxs, topk_length, None), *q.shape[:2])
    return contract.check_grad(
        grad_out, q, kv, sinks, ids, out, lse, sm_scale,
        backward_impl="deterministic" if deterministic else "atomic", backward_workspace_bytes=workspace_bytes,
    )  # fmt: skip


def _forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, topk_length: torch.Tensor | None,
    valid_rows: torch.Tensor | None, sm_scale: float, all_rows_nonempty: bool, deterministic: bool,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    ids = Ids(topk_idxs, topk_length, valid_rows)
    spec = _spec(q, kv, sinks, topk_idxs, topk_length, sm_scale)
    generation = torch_bridge_cudnn.major(q.get_device()) if q.is_cuda else 0
    if not q.is_cuda or contract_cudnn.unfit(q, kv, spec, generation) is not None:
        return reference.forward(q, kv, sinks, local(ids, spec), spec)
    if generation != 9:
        return torch_bridge_cudnn.forward(q, kv, sinks, ids, spec, all_rows_nonempty)
    ours = torch_bridge_kernels._cuda_forward
    if topk_length is None:
        return ours(q, kv, sinks, topk_idxs, sm_scale, False, deterministic, workspace_bytes)
    rows = spec.batch * spec.queries  # a plan's ids are those of one batch row
    q_, kv_ = q.detach().reshape(1, rows, spec.heads, spec.dim), kv.detach().reshape(1, -1, spec.dim)
    ids_ = topk_idxs.reshape(1, rows, topk_idxs.shape[-1])
    out, lse = ours(q_, kv_, sinks, ids_, sm_scale, False, deterministic, workspace_bytes)
    return out.view(q.shape), lse.view(q.shape[:3])


def _backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    topk_length: torch.Tensor | None, valid_rows: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    sm_scale: float, all_rows_nonempty: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    ids = Ids(topk_idxs, topk_length, valid_rows)
    spec = _grad_spec(
        grad_out, q, kv, sinks, topk_idxs, topk_length, out, lse, sm_scale, deterministic, workspace_bytes
    )  # fmt: skip
    if q.is_cuda and contract_cudnn.unfit(q, kv, spec, torch_bridge_cudnn.major(q.get_device())) is None:
        return torch_bridge_cudnn.backward(
            grad_out, q, kv, sinks, ids, out, lse, spec, all_rows_nonempty, deterministic, workspace_bytes
        )
    if q.is_cuda:
        contract.check_kernel_gradient(deterministic, f"{dtype_name(q)} with head_dim {spec.dim}")
    *grads, grad_sinks = reference.backward(grad_out, q, kv, sinks, local(ids, spec), out, lse, spec, workspace_bytes)
    return (*grads, grad_sinks.clone())  # of its own memory: the reference's may be the last row of its sums


def _fake_forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, topk_length: torch.Tensor | None,
    valid_rows: torch.Tensor | None, sm_scale: float, all_rows_nonempty: bool, deterministic: bool,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _spec(q, kv, sinks, topk_idxs, topk_length, sm_scale)
    wide = torch.float64 in (q.dtype, kv.dtype)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float64 if wide else torch.float32)


def _fake_backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    topk_length: torch.Tensor | None, valid_rows: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
    sm_scale: float, all_rows_nonempty: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), kv.new_empty(kv.shape), sinks.new_empty(sinks.shape)


class _Attend(torch.autograd.Function):
    """ATTEND with ATTEND_GRAD as its gradient. Asked for a graph of the gradient (create_graph), or for the gradient of
    lse, it takes the reference's, which torch differentiates."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
        topk_length: torch.Tensor | None, valid_rows: torch.Tensor | None, sm_scale: float, all_rows_nonempty: bool,
        deterministic: bool, workspace_bytes: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ids, options = (topk_idxs, topk_length, valid_rows), (all_rows_nonempty, deterministic, workspace_bytes)
        with _bridge.below_autograd():
            out, lse = ATTEND(q, kv, sinks, *ids, sm_scale, *options)
        ctx.save_for_backward(q, kv, sinks, *ids, out, lse)
        ctx.options = sm_scale, *options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        q, kv, sinks, *ids, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (None,) * 10
        if grad_lse is None and not torch.is_grad_enabled():
            grads = ATTEND_GRAD(grad_out, q, kv, sinks, *ids, out, lse, *ctx.options)
            return (*grads, *(None,) * 7)
        sm_scale, _, deterministic, _ = ctx.options
        if q.is_cuda:
            contract.check_kernel_gradient(deterministic, "gradients of lse, nor graphs of a gradient (create_graph)")
        own = local(Ids(*ids), _spec(q, kv, sinks, ids[0], ids[1], sm_scale))
        grads = torch_bridge_kernels._differentiated(q, kv, sinks, own, sm_scale, grad_out, grad_lse)
        return (*grads, *(None,) * 7)


_IDS = "Tensor topk_idxs, Tensor? topk_length, Tensor? valid_rows"
_OPTIONS = "float sm_scale, bool all_rows_nonempty, bool deterministic, int workspace_bytes"
ATTEND = _bridge.define_op(
    f"sparse_attention_cudnn(Tensor q, Tensor kv, Tensor sinks, {_IDS}, {_OPTIONS}) -> (Tensor, Tensor)",
    kernels={"CUDA": _forward, "CPU": _forward},
    fake=_fake_forward,
    autograd=_Attend,
)
ATTEND_GRAD = _bridge.define_op(
    f"sparse_attention_cudnn_grad(Tensor grad_out, Tensor q, Tensor kv, Tensor sinks, {_IDS}, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    kernels={"CUDA": _backward, "CPU": _backward},
    fake=_fake_backward,
)
