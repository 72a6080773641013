"""Sparse attention on torch tensors as the operators dsv4::sparse_attention and dsv4::sparse_attention_grad.

On CUDA tensors that fit the kernels both are this package's CUDA; on other tensors the reference is run on torch
tensors, so that a graph captured with the operators runs anywhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _bridge
from .._arrays import dtype_name
from .._bridge_programs import Forward, Told, forward_of, gradient_of, known, playable, remember_gradient, run, settle
from .._plan import SparseIndexPlan
from .._programs import Making, Program, Programs
from .._torch_backend import without_autocast
from . import contract, reference
from .contract import Spec
from .torch_bridge_checks import checked, checked_grad


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


@functools.cache
def _notes() -> Any:
    from . import cuda_notes

    return cuda_notes


def _cuda_forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float,
    reference_rounding: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    spec, unfit = checked(q, kv, sinks, topk_idxs, sm_scale)
    if unfit is not None:
        return reference.forward(q, kv, sinks, topk_idxs, spec, reference_rounding)
    cuda = launches()
    q, kv = _bridge.readable(q, cuda.aligned), _bridge.readable(kv, cuda.aligned)
    sinks, ids = _bridge.contiguous(_bridge.cast(sinks, torch.float32)), _bridge.contiguous(topk_idxs)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    with _bridge.on_stream_of(q) as stream:
        ids = _narrow(ids, spec.keys, stream)
        cuda.launch_forward(
            q.data_ptr(), kv.data_ptr(), sinks.data_ptr(), ids.data_ptr(), out.data_ptr(), lse.data_ptr(), spec,
            dtype=_bridge.name_of(q.dtype), q_strides=q.stride(), kv_strides=kv.stride(),
            reference_rounding=reference_rounding, stream=stream,
        )  # fmt: skip
    return out, lse


def _reference_forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float,
    reference_rounding: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = contract.check(q, kv, sinks, topk_idxs, sm_scale)
    return reference.forward(q, kv, sinks, topk_idxs, spec, reference_rounding)


def _cuda_backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sm_scale: float, deterministic: bool,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec, unfit = checked_grad(
        grad_out, q, kv, sinks, topk_idxs, out, lse, sm_scale, deterministic, workspace_bytes
    )  # fmt: skip
    if unfit is not None:
        return _reference_gradient(
            grad_out, q, kv, sinks, topk_idxs, out, lse, spec, deterministic, workspace_bytes
        )  # fmt: skip
    cuda, cuda_bwd = launches(), gradient_launches()
    plan, float32 = cuda_bwd.layout(spec, deterministic, workspace_bytes), torch.float32
    grad_out, q, kv, out = (_bridge.readable(_bridge.cast(x, q.dtype), cuda.aligned) for x in (grad_out, q, kv, out))
    sinks_, lse = (_bridge.contiguous(_bridge.cast(x, float32)) for x in (sinks, lse))
    ids = _bridge.contiguous(topk_idxs)
    grad_q, grad_kv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    grad_sinks = torch.empty(sinks.shape, dtype=torch.float32, device=q.device)
    work = torch.empty(plan.size, dtype=torch.uint8, device=q.device)
    with _bridge.on_stream_of(q) as stream:
        ids = _narrow(ids, spec.keys, stream)
        cuda_bwd.launch_backward(
            grad_out=grad_out.data_ptr(), q=q.data_ptr(), kv=kv.data_ptr(), sinks=sinks_.data_ptr(),
            ids=ids.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(), grad_q=grad_q.data_ptr(),
            grad_kv=grad_kv.data_ptr(), grad_sinks=grad_sinks.data_ptr(), work=work.data_ptr(), plan=plan, spec=spec,
            dtype=_bridge.name_of(q.dtype), grad_out_strides=grad_out.stride(), q_strides=q.stride(),
            kv_strides=kv.stride(), out_strides=out.stride(), deterministic=deterministic, stream=stream,
        )  # fmt: skip
    return grad_q, grad_kv, _bridge.cast(grad_sinks, sinks.dtype)


def _narrow(ids: torch.Tensor, keys: int, stream: Any) -> torch.Tensor:
    """Contiguous ids as int32: themselves, or a copy after the range check."""
    if ids.dtype == torch.int32:
        return ids
    narrow = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    launches().launch_narrow_ids(ids.data_ptr(), narrow.data_ptr(), ids.numel(), keys, stream=stream)
    return narrow


def _reference_backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sm_scale: float, deterministic: bool,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec, _ = checked_grad(
        grad_out, q, kv, sinks, topk_idxs, out, lse, sm_scale, deterministic, workspace_bytes
    )  # fmt: skip
    return _reference_gradient(grad_out, q, kv, sinks, topk_idxs, out, lse, spec, deterministic, workspace_bytes)


def _reference_gradient(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, spec: Spec, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    if q.is_cuda:
        contract.check_kernel_gradient(deterministic, f"{dtype_name(q)} with head_dim {spec.dim}")
    *grads, grad_sinks = reference.backward(grad_out, q, kv, sinks, topk_idxs, out, lse, spec, workspace_bytes)
    return (*grads, grad_sinks.clone())  # of its own memory: the reference's may be the last row of its sums


def _fake_forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float,
    reference_rounding: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    contract.check(q, kv, sinks, topk_idxs, sm_scale)
    wide = torch.float64 in (q.dtype, kv.dtype)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float64 if wide else torch.float32)


def _fake_backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sm_scale: float, deterministic: bool,
    workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), kv.new_empty(kv.shape), sinks.new_empty(sinks.shape)


class _Attend(torch.autograd.Function):
    """ATTEND with ATTEND_GRAD as its gradient. Asked for a graph of the gradient (create_graph), or for the gradient of
    lse, it takes the reference's, which torch differentiates."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float,
        reference_rounding: bool, deterministic: bool, workspace_bytes: int, ready: tuple[Program, Told] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        ctx.options = options = sm_scale, reference_rounding, deterministic, workspace_bytes
        ctx.before = None
        if ready is not None:
            out, lse = _attended(*ready, sinks)
            if sinks.dtype == torch.float32:  # the kernels read others from a copy of each call's own
                ctx.before = forward_of(*ready, out, lse)
        else:
            with _bridge.below_autograd():
                out, lse = ATTEND(q, kv, sinks, topk_idxs, *options)
        ctx.save_for_backward(q, kv, sinks, topk_idxs, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
        saved, before = ctx.saved_tensors, ctx.before
        if before is not None and grad_lse is None:
            grads = gradient_of(before, saved, grad_out, gradient_launches().forced_path)
            if grads is not None:
                return (*grads, None, None, None, None, None, None)
        q, kv, sinks, topk_idxs, out, lse = saved
        sm_scale, reference_rounding, deterministic, workspace_bytes = ctx.options
        contract.check_differentiable(reference_rounding)
        others = (None,) * (len(ctx.needs_input_grad) - 3)
        if grad_out is None and grad_lse is None:
            return (None, None, None, *others)
        if grad_out is not None and grad_lse is None and not torch.is_grad_enabled():
            options = sm_scale, deterministic, workspace_bytes
            return (*gradient(grad_out, q, kv, sinks, topk_idxs, out, lse, *options, before=before), *others)
        if q.is_cuda:
            contract.check_kernel_gradient(deterministic, "gradients of lse, nor graphs of a gradient (create_graph)")
        return (*_differentiated(q, kv, sinks, topk_idxs, sm_scale, grad_out, grad_lse), *others)


def _differentiated(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor, sm_scale: float,
    grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients by torch's own differentiation of the reference; where gradients are enabled, with a graph."""
    from . import torch_bridge

    graph = torch.is_grad_enabled()
    with torch.enable_grad(), without_autocast(q):
        leaves = _bridge.own_views(*(x if graph else x.detach().requires_grad_() for x in (q, kv, sinks)))
        q, kv, sinks = leaves
        spec = contract.check(q, kv, sinks, topk_idxs, sm_scale)
        results = zip(torch_bridge._attend(q, kv, sinks, topk_idxs, spec), (grad_out, grad_lse), strict=True)
        outputs, incoming = zip(*((y, g) for y, g in results if g is not None), strict=True)
        wanted = [x for x in leaves if x.requires_grad]
        grads = iter(torch.autograd.grad(outputs, wanted, incoming, create_graph=graph, allow_unused=True))
    return tuple(next(grads) if x.requires_grad else None for x in leaves)


_INPUTS = "Tensor q, Tensor kv, Tensor sinks, Tensor topk_idxs"
ATTEND = _bridge.define_op(
    f"sparse_attention({_INPUTS}, float sm_scale, bool reference_rounding, bool deterministic, int workspace_bytes)"
    " -> (Tensor, Tensor)",
    kernels={"CUDA": _cuda_forward, "CPU": _reference_forward},
    fake=_fake_forward,
    autograd=_Attend,
)
ATTEND_GRAD = _bridge.define_op(
    f"sparse_attention_grad(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, float sm_scale, bool deterministic,"
    " int workspace_bytes) -> (Tensor, Tensor, Tensor)",
    kernels={"CUDA": _cuda_backward, "CPU": _reference_backward},
    fake=_fake_backward,
)


# --- Calls that come again ---------------------------------------------------------------------------------

PROGRAMS, _GRADIENTS = Programs(), Programs()
_apply = playable(_Attend)


def known_of(q: Any, kv: Any, sinks: Any, ids: Any, plan: Any, *others: Any) -> tuple[Told | None, Program | None]:
    """What a call of torch_bridge's on a machine with kernels is known by, and its program."""
    if torch.compiler.is_compiling():
        return None, None
    laid: tuple[Any, ...] = ()
    if plan is not None:
        if ids is not None or type(plan) is not SparseIndexPlan:
            return None, None
        try:
            laid = plan.backend, plan.kv_sequence, plan.topk_length is None, plan.valid_rows is None
            ids = plan.indices
        except AttributeError:
            return None, None  # a plan without fields
    return known(PROGRAMS, (q, kv, sinks, ids), (*others, launches().forced_path, *laid))


def play(
    program: Program, call: Told, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: Any,
    sm_scale: float, reference_rounding: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """ATTEND of a call that has a program."""
    if call.gradient:
        options = float(sm_scale), bool(reference_rounding), deterministic, workspace_bytes
        out, lse = _apply(q, kv, sinks, topk_idxs, *options, (program, call))
        return out, lse
    return _attended(program, call, sinks)


def _attended(program: Program, call: Told, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sinks = _bridge.cast(sinks, torch.float32)  # held until the launch is queued
    call.addresses[2] = sinks.data_ptr()
    out, lse = run(program, call)
    return out, lse


def noted(call: Told | None, spec: Spec, reference_rounding: bool) -> None:
    """To be told of a call that ATTEND has run on the kernels."""
    if call is not None:
        settle(PROGRAMS, call, functools.partial(_notes().forward, spec, reference_rounding))


def gradient(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, topk_idxs: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, sm_scale: float, deterministic: bool, workspace_bytes: int,
    *, before: Forward | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """ATTEND_GRAD, by its program where it came before."""
    tensors, options = (grad_out, q, kv, sinks, topk_idxs, out, lse), (sm_scale, deterministic, workspace_bytes)
    call = program = None
    if q.is_cuda:
        forced = gradient_launches().forced_path
        call, program = known(_GRADIENTS, tensors, (*options, forced))
    if call is not None and program is not None:
        remember_gradient(before, call, program, forced)
        sinks32 = _bridge.cast(sinks, torch.float32)
        call.addresses[3] = sinks32.data_ptr()
        grad_q, grad_kv, grad_sinks = run(program, call)
        return grad_q, grad_kv, _bridge.cast(grad_sinks, sinks.dtype)

    def note(making: Making) -> int | None:
        spec, unfit = checked_grad(*tensors, *options)
        return None if unfit else _notes().backward(spec, deterministic, workspace_bytes, making)

    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ATTEND_GRAD(*tensors, *options)
    settle(_GRADIENTS, call, note)
    return grads
