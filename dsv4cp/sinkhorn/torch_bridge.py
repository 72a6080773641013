"""The torch surface of Sinkhorn normalisation.

Two ways: the reference on torch tensors, differentiated by torch, and the operators dsv4::sinkhorn_normalize
and dsv4::sinkhorn_normalize_grad, whose CUDA kernels are this package's. On CPU tensors the operators run
the reference, gradient included, so that a graph captured with them can be run and checked anywhere.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch

from .. import _bridge
from .._bridge_programs import Forward, Told, forward_of, gradient_of, known, playable, remember_gradient, run, settle
from .._programs import Program, Programs
from .._torch_backend import choose
from . import contract, ops, reference

Dsv4SinkhornBackend = Literal["torch", "tilelang", "auto"]
_check = _bridge.remembered(contract.check)
_PROGRAMS, _GRADIENTS = Programs(), Programs()


def kernel_missing() -> str | None:
    """Why this machine cannot run the CUDA kernels of this op, None when it can."""
    if "cuda" not in ops.OFFERED:
        return "this version of dsv4cp has no CUDA kernels for it"
    return _bridge.missing("cuda")


def sinkhorn_normalize_torch(x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    """The definition of dsv4cp.dsv4_sinkhorn_normalize on a torch tensor of any device.

    float32 inside (float64 for float64), result in x's dtype, differentiable any number of times.
    """
    choose("sinkhorn_normalize_torch", "torch", (x,), allowed=("torch",), kernel_missing=None)
    return reference.forward_whole(x, contract.check(x, repeat, eps))


def dsv4_sinkhorn_normalize(
    x: torch.Tensor, *, backend: Dsv4SinkhornBackend, repeat: int, eps: float
) -> torch.Tensor:
    """dsv4cp.dsv4_sinkhorn_normalize for torch tensors: x [..., M, M] to the same shape and dtype.

    backend: "torch" is sinkhorn_normalize_torch, "tilelang" this package's CUDA kernels, "auto" the kernels for
    CUDA tensors where they can run, else "torch". Raises TypeError and ValueError as the array function,
    RuntimeError for "tilelang" where it cannot run.
    """
    missing = kernel_missing()
    call, program = known(_PROGRAMS, (x,), (backend, repeat, eps)) if missing is None else (None, None)
    if call is not None and program is not None:
        if call.gradient:
            y: torch.Tensor = _apply(x, repeat, eps, (program, call))
            return y
        return run(program, call)[0]
    spec = _check(x, repeat, eps) if isinstance(x, torch.Tensor) else None  # choose() refuses all else
    picked = choose(
        "dsv4_sinkhorn_normalize",
        backend,
        (x,),
        allowed=("torch", "tilelang", "auto"),
        kernel_missing=missing or (None if spec is None else contract.kernels_unfit(spec)),
    )
    if picked == "tilelang" and spec is not None:
        y = _bridge.call(NORMALIZE, x, spec.repeat, spec.eps)
        if call is not None:
            settle(_PROGRAMS, call, functools.partial(_notes().forward, spec))
        return y
    return sinkhorn_normalize_torch(x, repeat, eps)


@functools.cache  # an import statement in each call takes half a microsecond
def _launches() -> Any:
    from . import cuda

    return cuda


@functools.cache
def _notes() -> Any:
    from . import cuda_notes

    return cuda_notes


def _reference_forward(x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    return reference.forward(x, contract.check(x, repeat, eps))


def _reference_backward(grad_y: torch.Tensor, x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    return reference.backward(grad_y, x, contract.check_grad(grad_y, x, repeat, eps))


def _cuda_forward(x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    spec = _check(x, repeat, eps)
    if contract.kernels_unfit(spec) is not None:
        return reference.forward(x, spec)
    x = _bridge.contiguous(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    with _bridge.on_stream_of(x) as stream:
        _launches().launch_forward(x.data_ptr(), y.data_ptr(), spec, stream=stream)
    return y


def _cuda_backward(grad_y: torch.Tensor, x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    spec = _check(x, repeat, eps)
    if grad_y.shape != x.shape or grad_y.device != x.device or grad_y.dtype != x.dtype:
        spec = contract.check_grad(grad_y, x, repeat, eps)
    if contract.kernels_unfit(spec) is not None:
        return reference.backward(grad_y, x, spec)
    if grad_y.dtype != x.dtype:  # torch's own gradients have x's dtype
        return _cuda_backward(grad_y.float(), x.float(), repeat, eps).to(x.dtype)
    x, grad_y = _bridge.contiguous(x), _bridge.contiguous(grad_y)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    with _bridge.on_stream_of(x) as stream:
        _launches().launch_backward(grad_y.data_ptr(), x.data_ptr(), grad_x.data_ptr(), spec, stream=stream)
    return grad_x


def _fake_forward(x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    contract.check(x, repeat, eps)
    return x.new_empty(x.shape)


def _fake_backward(grad_y: torch.Tensor, x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    contract.check_grad(grad_y, x, repeat, eps)
    return x.new_empty(x.shape)


class _Normalize(torch.autograd.Function):
    """NORMALIZE with NORMALIZE_GRAD as its gradient. Asked for a graph of the gradient (create_graph), it takes the
    reference's, which torch differentiates again."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, repeat: int, eps: float, ready: tuple[Program, Told] | None = None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.numbers, ctx.before = (repeat, eps), None
        if ready is not None:
            ctx.before = forward_of(*ready)
            return run(*ready)[0]
        with _bridge.below_autograd():
            return NORMALIZE(x, repeat, eps)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[Any, ...]:
        saved, before = ctx.saved_tensors, ctx.before
        if before is not None:
            again = gradient_of(before, saved, grad_y)
            if again is not None:
                return again[0], None, None, None
        return gradient(grad_y, *saved, *ctx.numbers, before=before), *(None,) * (len(ctx.needs_input_grad) - 1)


_apply = playable(_Normalize)


def gradient(
    grad_y: torch.Tensor, x: torch.Tensor, repeat: int, eps: float, *, before: Forward | None = None
) -> torch.Tensor:
    """NORMALIZE_GRAD, by its program where it came before; where gradients are enabled, the reference's."""
    if torch.is_grad_enabled():
        return _reference_backward(grad_y, x, repeat, eps)
    call, program = known(_GRADIENTS, (grad_y, x), (repeat, eps))
    if call is not None and program is not None:
        remember_gradient(before, call, program)
        return run(program, call)[0]
    grad_x: torch.Tensor = NORMALIZE_GRAD(grad_y, x, repeat, eps)
    if call is not None:
        settle(_GRADIENTS, call, functools.partial(_notes().backward, _check(x, repeat, eps)))
    return grad_x


NORMALIZE = _bridge.define_op(
    "sinkhorn_normalize(Tensor x, int repeat, float eps) -> Tensor",
    kernels={"CUDA": _cuda_forward, "CPU": _reference_forward},
    fake=_fake_forward,
    autograd=_Normalize,
)
NORMALIZE_GRAD = _bridge.define_op(
    "sinkhorn_normalize_grad(Tensor grad_y, Tensor x, int repeat, float eps) -> Tensor",
    kernels={"CUDA": _cuda_backward, "CPU": _reference_backward},
    fake=_fake_backward,
)
