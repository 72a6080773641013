"""What cuDNN's DSA kernels can be asked for: a part of contract.py, about backend "cudnn" alone. Metadata only."""

from __future__ import annotations

from typing import Any, NamedTuple

from .._arrays import dtype_name, facts, require_dtype, require_shape
from .contract import KERNEL_DTYPES, Spec, _plan_field, _require_plan, check_workspace

DIM = 512  # head_dim of its kernels whose values are whole key rows
MAJORS = (9, 10)  # of the GPUs that they are for: the first number of the compute capability
MOST_HEADS = 128  # of its forward kernels, which SM100 has


class Ids(NamedTuple):
    """Ids as cuDNN's kernels get them, from a plan; or as the caller gave them, when `lengths` is None."""

    ids: Any  # int32 [B*S, 1, T], row b's ids shifted by b*K, valid ones first; else int32 or int64 [B, S, T]
    lengths: Any  # int32 [B*S]: how many are valid
    rows: Any  # int64: which of the B*S have any, None when all have


def unfit(q: Any, kv: Any, spec: Spec, major: int) -> str | None:
    """Why cuDNN's kernels for GPUs of compute capability `major` cannot take these arrays, though they are valid
    arguments; None when they can."""
    if major not in MAJORS:  # of several GPUs of a machine one may be another kind
        return f"cuDNN's DSA kernels need a Hopper or Blackwell GPU (SM90 or SM100), got arrays on one of SM{major}x"
    for name, x in (("q", q), ("kv", kv)):
        if dtype_name(x) not in KERNEL_DTYPES:
            return f"{name}: cuDNN's kernels take bfloat16 or float16, got {dtype_name(x)}"
    if dtype_name(q) != dtype_name(kv):
        return f"kv: cuDNN's kernels take q's dtype {dtype_name(q)}, got {dtype_name(kv)}"
    if spec.dim != DIM:
        return f"q: cuDNN's kernels take head_dim {DIM}, got {spec.dim}"
    if major != 9 and spec.heads > MOST_HEADS:
        return f"q: cuDNN's forward kernels take at most {MOST_HEADS} heads, got {spec.heads}"
    most = (2**31 - 1) // spec.dim if major == 9 else 2**31  # SM90's gradient has 32-bit addresses
    if spec.batch * spec.keys > most:
        return f"kv: cuDNN's kernels reach at most {most} key rows, got {spec.batch}*{spec.keys}"
    return None


def require(q: Any, kv: Any, spec: Spec, major: int, *, reference_rounding: bool = False) -> None:
    """Raises where cuDNN's kernels were asked for by name and cannot do it."""
    reason = unfit(q, kv, spec, major)
    if reason is not None:
        raise RuntimeError(f"backend 'cudnn' cannot run: {reason}")
    if reference_rounding:
        raise ValueError("reference_rounding: cuDNN's kernels do not have it, this package's CUDA kernels do")


def require_order(backward_impl: str, major: int) -> None:
    """RuntimeError for sums of a fixed order where cuDNN has none."""
    if backward_impl == "deterministic" and major == 9:
        raise RuntimeError("backward_impl: cuDNN has 'atomic' alone on SM90, its 'deterministic' needs SM100")


def ids(plan: Any, topk_idxs: Any, spec: Spec) -> Ids:
    """The ids to attend to: the plan's where there is one."""
    if plan is None:
        return Ids(topk_idxs, None, None)
    _require_plan(plan, ("cudnn",), spec)
    parts = Ids(*(_plan_field(plan, name) for name in ("indices", "topk_length", "valid_rows")))
    rows = spec.batch * spec.queries
    if parts.lengths is None:
        raise TypeError("plan.topk_length: expected an array, got None")
    facts(**{"plan.indices": parts.ids, "plan.topk_length": parts.lengths, "plan.valid_rows": parts.rows})
    require_shape("plan.indices", parts.ids, "rows one T", rows=rows, one=1)
    require_dtype("plan.indices", parts.ids, ("int32",))
    require_shape("plan.topk_length", parts.lengths, "rows", rows=rows)
    require_dtype("plan.topk_length", parts.lengths, ("int32",))
    if parts.rows is not None:
        (count,) = require_shape("plan.valid_rows", parts.rows, "rows")
        require_dtype("plan.valid_rows", parts.rows, ("int64",))
        if count > rows:
            raise ValueError(f"plan.valid_rows: expected at most {rows} rows, got {count}")
    return parts


def require_workspace(cap: int, spec: Spec, least: int | None = None) -> None:
    """ValueError for a cap that what cuDNN works in does not fit in: two float32 numbers per query and head, or as it
    says itself."""
    check_workspace(cap, 8 * spec.batch * spec.queries * spec.heads if least is None else least)
