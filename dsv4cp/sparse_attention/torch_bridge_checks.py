"""Checks of sparse attention's calls on torch tensors, remembered by metadata: _bridge.remembered."""

from __future__ import annotations

from typing import Any

from .. import _bridge
from . import contract
from .contract import Spec


def check(
    q: Any, kv: Any, sinks: Any, topk_idxs: Any, sm_scale: Any, plan: Any = None, reference_rounding: Any = False,
    all_rows_nonempty: Any = False, return_lse: Any = False,
) -> Spec:  # fmt: skip
    """The Spec of a forward call."""
    flags = {"reference_rounding": reference_rounding, "all_rows_nonempty": all_rows_nonempty, "return_lse": return_lse}
    return contract.check(q, kv, sinks, topk_idxs, sm_scale, plan=plan, **flags)


@_bridge.remembered
def checked(q: Any, kv: Any, *others: Any) -> tuple[Spec, str | None]:
    """What `check` says, and why the CUDA kernels cannot take the tensors (None: they can)."""
    return check(q, kv, *others), contract.kernels_unfit(q, kv)


@_bridge.remembered
def checked_grad(
    grad_out: Any, q: Any, kv: Any, sinks: Any, topk_idxs: Any, out: Any, lse: Any, sm_scale: float,
    deterministic: bool, workspace_bytes: int,
) -> tuple[Spec, str | None]:  # fmt: skip
    """The same of a gradient call, whose further arguments are those of its operator."""
    spec = contract.check_grad(
        grad_out, q, kv, sinks, topk_idxs, out, lse, sm_scale,
        backward_impl="deterministic" if deterministic else "atomic", backward_workspace_bytes=workspace_bytes,
    )  # fmt: skip
    return spec, contract.kernels_unfit(q, kv)
