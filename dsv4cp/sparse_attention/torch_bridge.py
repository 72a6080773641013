"""Sparse attention for torch tensors, with the names and signatures of the mirrored module (NeMo AutoModel's
deepseek_v4.optimized_kernels): the reference equations run on torch tensors and differentiated by torch, or the
operators of torch_bridge_kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from .. import _bridge
from .._arrays import compute_dtype
from .._torch_backend import choose, with_row_major_gradient, without_autocast
from . import (
    contract,
    contract_cudnn,
    ops,
    reference,
    torch_bridge_checks,
    torch_bridge_cudnn,
    torch_bridge_cudnn_ops,
    torch_bridge_kernels,
)
from .contract import Spec
from .reference_chunks import Scratch, query_chunks

Dsv4SparseAttentionBackend = Literal["torch", "sparse_torch", "tilelang", "cudnn", "auto"]
BACKENDS = ("torch", "sparse_torch", "tilelang", "cudnn", "auto")
TORCH_PLANS, KERNEL_PLANS = ("torch", "sparse_torch"), ("tilelang",)


def kernel_missing() -> str | None:
    """Why sparse attention's CUDA kernels cannot run on this machine, None when they can."""
    if "cuda" not in ops.OFFERED:
        return "this version of dsv4cp has no CUDA kernels for sparse attention"
    return _bridge.missing("cuda")


def sparse_attention_torch(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """out[b,i,h] = sum_t exp(s_t) kv[b, id_t] / (sum_t exp(s_t) + exp(sink_h)), s_t = sm_scale * q . kv[b, id_t].

    q [B, S, H, D], kv [B, K, D], sinks [H], topk_idxs [B, S, T] -> [B, S, H, D] in q's dtype; float32 inside
    (float64 when q or kv is float64), p is not rounded. Masked slots, empty rows, sinks and NaN as in
    dsv4cp.dsv4_sparse_attention. Differentiable any number of times; gradients of kv and sinks are summed in float32
    and rounded once. Long inputs are recomputed in chunks during the backward pass, so that memory beyond inputs,
    outputs, gradients and a float32 kv with its gradient stays bounded.
    """
    spec = contract.check(q, kv, sinks, topk_idxs, sm_scale, plans=False)
    _only_torch("sparse_attention_torch", q, kv)
    return _attend(q, kv, sinks, topk_idxs, spec)[0]


def dense_attention_topk_torch(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """The oracle: scores of every query with every key, weighted by how often the key is selected. O(S K)."""
    spec = contract.check(q, kv, sinks, topk_idxs, sm_scale, plans=False)
    _only_torch("dense_attention_topk_torch", q, kv)
    dtype = compute_dtype(spec.xp, q, kv)
    kv, sinks = _summed_in(dtype, kv, sinks)

    def part(q: Any, kv: Any, sinks: Any, ids: Any) -> tuple[Any]:
        return (reference.dense_chunk(spec.xp, q, kv, sinks, ids, spec, dtype).to(dtype=q.dtype),)

    return _over_chunks(part, q, kv, sinks, topk_idxs, spec, per_query=spec.keys * (2 * spec.heads + 1))[0]


def dsv4_sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    sinks: torch.Tensor,
    topk_idxs: torch.Tensor | None,
    sm_scale: float,
    *,
    backend: Dsv4SparseAttentionBackend,
    reference_rounding: bool = False,
    all_rows_nonempty: bool = False,
    plan: Any = None,
    return_lse: bool = False,
    backward_impl: str = "atomic",
    backward_workspace_bytes: int = 2 * 1024**3,
) -> Any:
    """dsv4cp.dsv4_sparse_attention for torch tensors, with the gradient through torch autograd.

    backend: "torch" and "sparse_torch" are sparse_attention_torch, "tilelang" this package's CUDA kernels (bfloat16
    or float16, D 64, 128, 256 or 512), "cudnn" NVIDIA's (bfloat16 or float16, D 512, Hopper or Blackwell; on Hopper
    the forward pass is that of "tilelang"), "auto" the CUDA kernels for CUDA bfloat16 tensors where they can run,
    else "torch". The gradients of "tilelang" and "cudnn" run kernels too, those of dsv4cp.dsv4_sparse_attention_grad,
    where backward_impl and backward_workspace_bytes are described; "torch" checks and ignores them. Asked for a graph
    of the gradient (create_graph) or for the gradient of lse, both let torch differentiate the reference.
    reference_rounding needs the kernels of "tilelang" and no gradient. topk_idxs may be None when a plan made for
    this backend is given; an "auto" that runs the reference on CUDA tensors takes a plan for the kernels too.

    Returns out [B, S, H, D] in q's dtype, or (out, lse) with return_lse; lse is differentiable too.
    Raises TypeError and ValueError as the array function, ValueError for reference_rounding where the
    reference runs and when its gradient is asked for, RuntimeError for a backend that cannot run; in the backward
    pass of "tilelang" with backward_impl "deterministic" ValueError for a cap below one step, RuntimeError where torch
    would differentiate the reference. On Hopper "cudnn" with a gradient wanted has no "deterministic": a RuntimeError.
    """
    missing, call, program = kernel_missing(), None, None
    if missing is None:
        call, program = torch_bridge_kernels.known_of(
            q, kv, sinks, topk_idxs, plan, sm_scale, backend, reference_rounding, all_rows_nonempty, return_lse,
            backward_impl, backward_workspace_bytes,
        )  # fmt: skip
    fixed = isinstance(backward_impl, str) and backward_impl == "deterministic"
    if call is not None and program is not None:
        ids, more = topk_idxs if plan is None else plan.indices, (fixed, backward_workspace_bytes)
        out, lse = torch_bridge_kernels.play(program, call, q, kv, sinks, ids, sm_scale, reference_rounding, *more)
        return (out, lse) if return_lse else out
    arguments = q, kv, sinks, topk_idxs, sm_scale, plan, reference_rounding, all_rows_nonempty, return_lse
    if (unfit := missing) is None:
        spec, unfit = torch_bridge_checks.checked(*arguments)
    else:
        spec = torch_bridge_checks.check(*arguments)
    picked = choose(
        "dsv4_sparse_attention",
        backend,
        (q, kv),
        allowed=BACKENDS,
        kernel_missing=unfit,
        cudnn_missing=torch_bridge_cudnn.missing(q, kv, spec) if backend == "cudnn" else None,
        require_bf16=backend == "auto",
    )
    cap = contract.check_backward(backward_impl, backward_workspace_bytes)
    if picked == "cudnn":
        generation = torch_bridge_cudnn.major(q.get_device())
        contract_cudnn.require(q, kv, spec, generation, reference_rounding=bool(reference_rounding))
        if torch.is_grad_enabled() and (q.requires_grad or kv.requires_grad or sinks.requires_grad):
            contract_cudnn.require_order(backward_impl, generation)
        laid = contract_cudnn.ids(plan, topk_idxs, spec)
        options = spec.scale, bool(all_rows_nonempty), fixed, cap
        out, lse = _bridge.call(torch_bridge_cudnn_ops.ATTEND, q, kv, sinks, *laid, *options)
        return (out, lse) if return_lse else out
    ids = contract.plan_ids(plan, topk_idxs, _plans(picked, backend, q), spec)
    if picked == "tilelang":
        options = spec.scale, bool(reference_rounding), fixed, cap
        out, lse = _bridge.call(torch_bridge_kernels.ATTEND, q, kv, sinks, ids, *options)
        torch_bridge_kernels.noted(call, spec, bool(reference_rounding))
    else:
        contract.check_rounding(reference_rounding, backend)
        out, lse = _attend(q, kv, sinks, ids, spec)
    return (out, lse) if return_lse else out


def _plans(picked: str, backend: str, q: torch.Tensor) -> tuple[str, ...]:
    """Names of the plans that fit: an "auto" plan of CUDA ids is the kernels', whatever dtype attention then meets."""
    if picked == "tilelang":
        return KERNEL_PLANS
    return TORCH_PLANS + KERNEL_PLANS if backend == "auto" and q.is_cuda else TORCH_PLANS


def _only_torch(op: str, *tensors: Any) -> None:
    choose(op, "torch", tensors, allowed=BACKENDS, kernel_missing=None)


def _summed_in(dtype: torch.dtype, *shared: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What several slots, queries or chunks use, in a dtype: torch adds their gradients in the dtype that they have."""
    return tuple(x.to(dtype) for x in shared)


def _attend(q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec) -> tuple[Any, Any]:
    dtype = compute_dtype(spec.xp, q, kv)
    kv, sinks = _summed_in(dtype, kv, sinks)
    scratch = Scratch(spec, dtype)

    def part(q: Any, kv: Any, sinks: Any, ids: Any) -> tuple[Any, Any]:
        rows, valid = scratch.gather(kv, ids)
        out, lse = reference.attend_chunk(spec.xp, q, rows, valid, sinks, spec, dtype, reference_rounding=False)
        return out.to(dtype=q.dtype), lse

    return _over_chunks(part, q, kv, sinks, ids, spec)


def _over_chunks(
    part: Callable[..., tuple[Any, ...]], q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec, **sizes: int
) -> tuple[Any, ...]:
    """part(q, kv of the row, sinks, ids) on chunks of queries, put together as [B, S, ...]. With several chunks
    the backward pass computes each again instead of keeping its intermediate values."""
    chunks: list[tuple[int, int, int] | None] = list(query_chunks(spec, compute_dtype(spec.xp, q, kv), **sizes))
    again = len(chunks) > spec.batch and torch.is_grad_enabled()
    parts = []
    for chunk in chunks or [None]:
        if chunk is None:  # no query at all: one call without queries gives the shapes
            args = q.reshape(0, spec.heads, spec.dim), kv.sum(dim=0), sinks, ids.reshape(0, spec.slots)
        else:
            b, first, last = chunk
            args = q[b, first:last], kv[b], sinks, ids[b, first:last]
        with without_autocast(q):
            if again:
                parts.append(checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False))
            else:
                parts.append(part(*args))
    whole = (torch.cat(p).reshape(spec.batch, spec.queries, *p[0].shape[1:]) for p in zip(*parts, strict=True))
    return tuple(map(with_row_major_gradient, whole))
