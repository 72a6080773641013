"""The operators dsv4::build_sparse_indices, dsv4::plan_sparse_indices and dsv4::plan_sparse_indices_cudnn.

On CUDA tensors they run the Numba kernels on torch's current stream, in memory of torch's allocator; on CPU
tensors the reference, so that a graph captured with them can be run and checked anywhere.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from .. import _bridge
from .._bridge_programs import Told, known, run, settle
from .._programs import Program, Programs
from . import contract, reference
from .contract import PlanSpec, Spec

ARRAYS = (
    "attention_mask",
    "compressed_topk",
    "q_positions",
    "vision_token_types",
    "q_segment_ids",
    "q_local_positions",
    "pooled_segment_ids",
    "pooled_positions",
)


def build(spec: Spec, like: torch.Tensor, arrays: dict[str, Any]) -> torch.Tensor:
    """reference.build by the operator; like: a tensor on the result's device."""
    sizes = (spec.batch, spec.queries, spec.keys, spec.window, spec.ratio, spec.pooled, spec.raw_keys)
    return BUILD(like, *sizes, spec.image_tokens, spec.dtype, *(arrays[name] for name in ARRAYS))


Plan = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def plan(topk_idxs: torch.Tensor, spec: PlanSpec) -> Plan:
    """reference.plan by the operators. The host waits only to learn which rows of a cudnn plan are empty."""
    if spec.layout != "cudnn":
        return PLAN(topk_idxs, spec.kv_sequence), None, None
    indices, lengths = PLAN_CUDNN(topk_idxs, spec.kv_sequence)
    return _with_rows(indices, lengths, spec.all_rows_nonempty)


def _with_rows(indices: torch.Tensor, lengths: torch.Tensor, all_rows_nonempty: bool) -> Plan:
    if all_rows_nonempty:
        return indices, lengths, None
    valid_rows = lengths.nonzero()[:, 0]
    return indices, lengths, None if valid_rows.shape[0] == lengths.shape[0] else valid_rows


def _named(values: tuple[Any, ...]) -> dict[str, Any]:
    """The operator's arguments behind `like`, under the names that the contract has for them."""
    names = ("batch_size", "seq_len", "key_len", "window_size", "compress_ratio", "n_pooled", "vanilla_key_len")
    return dict(zip((*names, "max_image_tokens", "dtype", *ARRAYS), values, strict=True))


def _arrays(values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(ARRAYS, values[-len(ARRAYS) :], strict=True))


def _spec(like: torch.Tensor, *values: Any) -> Spec:
    return contract.check(like=like, **_named(values))


def _on_cupy(spec: Any, x: torch.Tensor) -> Any:
    """The Spec of the same call on CuPy arrays on x's device."""
    import array_api_compat.cupy as xp
    import cupy

    return replace(spec, library="cupy", xp=xp, device=cupy.cuda.Device(x.get_device()))


@_bridge.remembered
def _cupy_spec(like: torch.Tensor, *values: Any) -> Spec:
    return _on_cupy(_spec(like, *values), like)


@_bridge.remembered
def _cupy_plan_spec(topk_idxs: torch.Tensor, kv_sequence: int, layout: str) -> PlanSpec:
    return _on_cupy(contract.check_plan(topk_idxs, kv_sequence, layout, True), topk_idxs)


def _cuda_build(like: torch.Tensor, *values: Any) -> torch.Tensor:
    from . import numba_cuda

    spec = _cupy_spec(like, *values)
    with _bridge.cupy_on_stream_of(like):
        given = {name: None if x is None else _bridge.to_cupy(x) for name, x in _arrays(values).items()}
        return _bridge.to_torch(numba_cuda.build(spec, **given))


def _cpu_build(like: torch.Tensor, *values: Any) -> torch.Tensor:
    return reference.build(_spec(like, *values), **_arrays(values))


def _fake_build(like: torch.Tensor, *values: Any) -> torch.Tensor:
    spec = _spec(like, *values)
    return like.new_empty((spec.batch, spec.queries, spec.width), dtype=getattr(torch, spec.dtype))


def _cuda_plan(topk_idxs: torch.Tensor, kv_sequence: int) -> torch.Tensor:
    return _cuda_layout(topk_idxs, kv_sequence, "cuda")[0]


def _cuda_plan_cudnn(topk_idxs: torch.Tensor, kv_sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices, lengths, _ = _cuda_layout(topk_idxs, kv_sequence, "cudnn")
    return indices, lengths


def _cuda_layout(topk_idxs: torch.Tensor, kv_sequence: int, layout: str) -> tuple[Any, ...]:
    from . import numba_cuda

    spec = _cupy_plan_spec(topk_idxs, kv_sequence, layout)
    with _bridge.cupy_on_stream_of(topk_idxs):
        made = numba_cuda.plan(_bridge.to_cupy(topk_idxs), spec)
        return tuple(None if x is None else _bridge.to_torch(x) for x in made)


def _cpu_plan(topk_idxs: torch.Tensor, kv_sequence: int) -> torch.Tensor:
    return reference.plan(topk_idxs, contract.check_plan(topk_idxs, kv_sequence, "cuda"))[0]


def _cpu_plan_cudnn(topk_idxs: torch.Tensor, kv_sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices, lengths, _ = reference.plan(topk_idxs, contract.check_plan(topk_idxs, kv_sequence, "cudnn", True))
    return indices, lengths


def _fake_plan(topk_idxs: torch.Tensor, kv_sequence: int) -> torch.Tensor:
    spec = contract.check_plan(topk_idxs, kv_sequence, "cuda")
    return topk_idxs.new_empty((spec.batch, spec.queries, spec.slots), dtype=torch.int32)


def _fake_plan_cudnn(topk_idxs: torch.Tensor, kv_sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec = contract.check_plan(topk_idxs, kv_sequence, "cudnn", True)
    rows = spec.batch * spec.queries
    indices = topk_idxs.new_empty((rows, 1, spec.padded_slots), dtype=torch.int32)
    return indices, topk_idxs.new_empty((rows,), dtype=torch.int32)


BUILD = _bridge.define_op(
    "build_sparse_indices(Tensor like, SymInt batch_size, SymInt seq_len, SymInt key_len, SymInt window_size, "
    "SymInt compress_ratio, SymInt n_pooled, SymInt vanilla_key_len, SymInt max_image_tokens, str dtype, "
    + ", ".join(f"Tensor? {name}" for name in ARRAYS)
    + ") -> Tensor",
    kernels={"CUDA": _cuda_build, "CPU": _cpu_build},
    fake=_fake_build,
    has_derivatives=False,
)
PLAN = _bridge.define_op(
    "plan_sparse_indices(Tensor topk_idxs, SymInt kv_sequence) -> Tensor",
    kernels={"CUDA": _cuda_plan, "CPU": _cpu_plan},
    fake=_fake_plan,
    has_derivatives=False,
)
PLAN_CUDNN = _bridge.define_op(
    "plan_sparse_indices_cudnn(Tensor topk_idxs, SymInt kv_sequence) -> (Tensor, Tensor)",
    kernels={"CUDA": _cuda_plan_cudnn, "CPU": _cpu_plan_cudnn},
    fake=_fake_plan_cudnn,
    has_derivatives=False,
)


# --- Calls that come again ---------------------------------------------------------------------------------

BUILDS, PLANS = Programs(), Programs()


def known_build(device: Any, arrays: dict[str, Any], *others: Any) -> tuple[Told | None, Program | None]:
    """What a call whose arrays are on its device already is known by, and its program. others: numbers and dtype."""
    if torch.compiler.is_compiling():
        return None, None
    try:
        where = torch.device(device)
    except (TypeError, RuntimeError):
        return None, None  # none at all: that is the way through the checks to say
    if where.type != "cuda":
        return None, None
    index = torch._C._cuda_getDevice() if where.index is None else where.index
    if index < 0:
        return None, None  # torch reads cuda:200 so
    given = {name: x for name, x in arrays.items() if x is not None}
    return known(BUILDS, tuple(given.values()), (",".join(given), *others), index)


def noted_build(call: Told | None, spec: Spec, like: torch.Tensor, arrays: dict[str, Any]) -> None:
    """To be told of a call that BUILD has run on the kernels."""
    if call is not None:
        settle(BUILDS, call, lambda making: _notes().build(_on_cupy(spec, like), call.kind[1][0], making))


def noted_plan(call: Told | None, topk_idxs: torch.Tensor, spec: PlanSpec) -> None:
    """To be told of a call that PLAN or PLAN_CUDNN has run on the kernels."""
    if call is not None:
        settle(PLANS, call, lambda making: _notes().plan(_on_cupy(spec, topk_idxs), making))


def played_plan(program: Program, call: Told, all_rows_nonempty: bool) -> Plan:
    """plan() of a call that has a program."""
    made = run(program, call)
    return (made[0], None, None) if len(made) == 1 else _with_rows(made[0], made[1], all_rows_nonempty)


@functools.cache
def _notes() -> Any:
    from . import cuda_notes

    return cuda_notes
