"""Sparse attention's gradient by backend "cudnn" in the GPU benchmark: what a layer costs with a plan that all layers
share, with a plan of its own, and without one. `--peers` adds the wrapper called directly."""

from __future__ import annotations

from typing import Any

import dsv4cp

from .._backend import missing
from .bench_gpu import Function


def there() -> bool:
    """Whether this machine can run it."""
    return missing("cudnn") is None


def backward(sets: list[dict[str, Any]], keys: int, scale: float, torch_too: bool) -> dict[str, Function]:
    """Implementation -> function of one set's arrays; every query of the sets has a key. Empty where it cannot run."""
    if not there():
        return {}
    for arrays in sets:
        arrays["plan_cudnn"] = planned(arrays["ids"], keys)

    def gradient(made: Any, given: Any, q: Any, kv: Any, sinks: Any, grad: Any, out: Any, lse: Any, **_: Any) -> Any:
        return dsv4cp.dsv4_sparse_attention_grad(
            grad, q, kv, sinks, given, out, lse, scale, backend="cudnn", plan=made, all_rows_nonempty=True
        )

    ours: dict[str, Function] = {
        "dsv4cp cudnn, CuPy, shared plan": lambda plan_cudnn, ids, **arrays: gradient(plan_cudnn, None, **arrays),
        "dsv4cp cudnn, CuPy, plan for each layer": lambda ids, **arrays: gradient(planned(ids, keys), None, **arrays),
        "dsv4cp cudnn, CuPy, no plan": lambda ids, **arrays: gradient(None, ids, **arrays),
    }
    if torch_too:
        import torch

        from .. import torch_ops

        for arrays in sets:
            q, kv, sinks = leaves = [arrays[name].detach().requires_grad_() for name in ("q_", "kv_", "sinks_")]
            plan = torch_ops.plan_dsv4_sparse_indices(arrays["ids_"], keys, "cudnn", all_rows_nonempty=True)
            arrays["cudnn_leaves"] = leaves
            arrays["cudnn_out"] = torch_ops.dsv4_sparse_attention(q, kv, sinks, None, scale, backend="cudnn", plan=plan)
        ours["dsv4cp.torch_ops cudnn, autograd, shared plan"] = lambda cudnn_out, cudnn_leaves, grad_, **_: (
            torch.autograd.grad(cudnn_out, cudnn_leaves, grad_, retain_graph=True)
        )
    return ours


def planned(ids: Any, keys: int) -> Any:
    return dsv4cp.plan_dsv4_sparse_indices(ids, keys, "cudnn", all_rows_nonempty=True)
