"""What sparse attention accepts: shapes, dtypes, plans, limits. Metadata only; ids are never looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._arrays import FLOATS, ID_DTYPES, dtype_name, facts, real_number, require_dtype, require_shape, whole_number

BACKWARD_IMPLS = ("atomic", "deterministic")
FLOAT32_MAX = 3.4028234663852886e38
KERNEL_DTYPES, KERNEL_DIMS = ("bfloat16", "float16"), (64, 128, 256, 512)  # what the CUDA kernels take


@dataclass(frozen=True)
class Spec:
    """Sizes, scale and home of one call; the symbols are those of the docstrings."""

    library: str
    xp: Any
    device: Any
    batch: int  # B
    queries: int  # S
    keys: int  # K
    heads: int  # H
    dim: int  # D
    slots: int  # T
    scale: float


def check(
    q: Any, kv: Any, sinks: Any, topk_idxs: Any, sm_scale: Any, *, plan: Any = None, plans: bool = True, **flags: Any
) -> Spec:
    """The Spec of a forward call. `flags` are the boolean arguments by name; plans=False: the function takes no plan.

    q [B, S, H, D], kv [B, K, D], sinks [H] in any float dtype each; topk_idxs [B, S, T] int32 or int64,
    None only when a plan is given.
    """
    indices: Any = None if plan is None else _plan_indices(plan)
    if topk_idxs is None and plan is None:
        raise TypeError("topk_idxs: expected an array of ids, got None" + (" and no plan" if plans else ""))
    for name, x in (("q", q), ("kv", kv), ("sinks", sinks)):
        if x is None:
            raise TypeError(f"{name}: expected an array, got NoneType")
    home = facts(q=q, kv=kv, sinks=sinks, topk_idxs=topk_idxs, **{"plan.indices": indices})
    batch, queries, heads, dim = require_shape("q", q, "B S H D")
    _, keys, _ = require_shape("kv", kv, "B K D", B=batch, D=dim)
    require_shape("sinks", sinks, "H", H=heads)
    for name, x in (("q", q), ("kv", kv), ("sinks", sinks)):
        require_dtype(name, x, FLOATS)
    if topk_idxs is None:
        slots = _plan_slots(plan, indices, batch, queries)
    else:
        slots = require_shape("topk_idxs", topk_idxs, "B S T", B=batch, S=queries)[2]
        require_dtype("topk_idxs", topk_idxs, ID_DTYPES)
    for name, flag in flags.items():
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name}: expected True or False, got {type(flag).__name__}")
    scale = real_number("sm_scale", sm_scale)
    largest = math.inf if "float64" in (dtype_name(q), dtype_name(kv)) else FLOAT32_MAX  # of the arithmetic
    if not (math.isfinite(scale) and abs(scale) <= largest):
        raise ValueError(f"sm_scale: expected a finite number that the arithmetic can hold, got {scale}")
    return Spec(home.library, home.xp, home.device, batch, queries, keys, heads, dim, slots, scale)


def check_grad(
    grad_out: Any,
    q: Any,
    kv: Any,
    sinks: Any,
    topk_idxs: Any,
    out: Any,
    lse: Any,
    sm_scale: Any,
    *,
    backward_impl: Any,
    backward_workspace_bytes: Any,
    plan: Any = None,
    **flags: Any,
) -> Spec:
    """The Spec of a gradient call: that of the forward call, with grad_out and out like q and lse [B, S, H]."""
    spec = check(q, kv, sinks, topk_idxs, sm_scale, plan=plan, **flags)
    for name, x in (("grad_out", grad_out), ("out", out), ("lse", lse)):
        if x is None:
            raise TypeError(f"{name}: expected an array, got NoneType")
    facts(q=q, grad_out=grad_out, out=out, lse=lse)
    sizes = {"B": spec.batch, "S": spec.queries, "H": spec.heads, "D": spec.dim}
    for name, x in (("grad_out", grad_out), ("out", out)):
        require_shape(name, x, "B S H D", **sizes)
        require_dtype(name, x, FLOATS)
    require_shape("lse", lse, "B S H", **sizes)
    require_dtype("lse", lse, ("float32", "float64"))
    check_backward(backward_impl, backward_workspace_bytes)
    return spec


def check_backward(backward_impl: Any, backward_workspace_bytes: Any) -> int:
    """The cap in bytes, once the name of the implementation and the cap are in range."""
    if not isinstance(backward_impl, str):
        raise TypeError(f"backward_impl: expected a string, got {type(backward_impl).__name__}")
    if backward_impl not in BACKWARD_IMPLS:
        raise ValueError(f"backward_impl: expected 'atomic' or 'deterministic', got {backward_impl!r}")
    return whole_number("backward_workspace_bytes", backward_workspace_bytes, minimum=1)


def kernels_unfit(q: Any, kv: Any) -> str | None:
    """Why the CUDA kernels cannot take these arrays though they are valid arguments, None when they can."""
    return _unfit_dtype(q, kv) or _unfit_dim(q)


def within_kernels(chosen: str, backend: str, q: Any, kv: Any) -> str:
    """`chosen`, or "reference" where "auto" chose kernels that cannot take the arrays; raises where they were named."""
    if chosen != "cuda" or kernels_unfit(q, kv) is None:
        return chosen
    if backend == "auto":
        return "reference"
    reason = _unfit_dtype(q, kv)
    raise ValueError(_unfit_dim(q)) if reason is None else TypeError(reason)


def _unfit_dtype(q: Any, kv: Any) -> str | None:
    for name, x in (("q", q), ("kv", kv)):
        if dtype_name(x) not in KERNEL_DTYPES:
            return f"{name}: the CUDA kernels take bfloat16 or float16, got {dtype_name(x)}"
    if dtype_name(q) != dtype_name(kv):
        return f"kv: the CUDA kernels take q's dtype {dtype_name(q)}, got {dtype_name(kv)}"
    return None


def _unfit_dim(q: Any) -> str | None:
    if q.shape[-1] not in KERNEL_DIMS:
        return f"q: the CUDA kernels take head_dim 64, 128, 256 or 512, got {q.shape[-1]}"
    return None


def check_differentiable(reference_rounding: bool) -> None:
    """The arithmetic of inference has no gradient."""
    if reference_rounding:
        raise ValueError("reference_rounding: it is forward only, got a call for its gradient")


def check_fixed_order(chosen: str, library: str, backward_impl: str) -> None:
    """On CuPy arrays the reference sums over keys with atomics: what has no fixed order must not claim one."""
    if chosen == "reference" and library == "cupy" and backward_impl == "deterministic":
        raise RuntimeError(
            "backward_impl: 'deterministic' on CuPy arrays needs the CUDA kernels, got a call that runs the reference"
        )


def check_kernel_gradient(deterministic: bool, needs: str) -> None:
    """What torch's own differentiation or sums on the GPU stand in for has no fixed order."""
    if deterministic:
        raise RuntimeError(f"backward_impl: 'deterministic' needs the kernels' gradient, which does not do {needs}")


def check_rounding(reference_rounding: bool, backend: str) -> None:
    """The reference that torch differentiates has no inference rounding, as in the mirrored module."""
    if reference_rounding:
        raise ValueError(f"reference_rounding: needs the CUDA kernels, got backend {backend!r} running the reference")


def check_workspace(cap: int, minimum: int) -> None:
    """A cap that one step of the gradient does not fit in is refused, not exceeded."""
    if cap < minimum:
        raise ValueError(f"backward_workspace_bytes: expected at least {minimum} for these shapes, got {cap}")


def plan_ids(plan: Any, topk_idxs: Any, names: tuple[str, ...], spec: Spec) -> Any:
    """The ids [B, S, T] to attend to: the plan's where there is one. `names` are the plan backends that fit."""
    if plan is None:
        return topk_idxs
    _require_plan(plan, names, spec)
    ids = _plan_field(plan, "indices")
    require_shape("plan.indices", ids, "B S T", B=spec.batch, S=spec.queries, T=spec.slots)
    require_dtype("plan.indices", ids, ID_DTYPES)
    return ids


def _require_plan(plan: Any, names: tuple[str, ...], spec: Spec) -> None:
    backend, kv_sequence = _plan_field(plan, "backend"), _plan_field(plan, "kv_sequence")
    if not isinstance(backend, str):
        raise TypeError(f"plan: expected a SparseIndexPlan, got one whose backend is a {type(backend).__name__}")
    if backend not in names:
        raise ValueError(f"plan: expected a plan for backend {' or '.join(map(repr, names))}, got one for {backend!r}")
    if whole_number("plan.kv_sequence", kv_sequence) != spec.keys:
        raise ValueError(f"plan: expected kv_sequence {spec.keys} like kv, got {kv_sequence}")


def _plan_slots(plan: Any, indices: Any, batch: int, queries: int) -> int:
    """Slots of a plan that stands alone; whether its backend fits is another question."""
    backend = _plan_field(plan, "backend")
    if isinstance(backend, str) and backend == "cudnn":
        return require_shape("plan.indices", indices, "rows one T", rows=batch * queries, one=1)[2]
    return require_shape("plan.indices", indices, "B S T", B=batch, S=queries)[2]


def _plan_indices(plan: Any) -> Any:
    indices = _plan_field(plan, "indices")
    if indices is None:
        raise TypeError("plan: expected a SparseIndexPlan with indices, got one whose indices are None")
    return indices


def _plan_field(plan: Any, name: str) -> Any:
    try:
        return getattr(plan, name)
    except AttributeError:
        raise TypeError(f"plan: expected a SparseIndexPlan, got {type(plan).__name__}") from None
