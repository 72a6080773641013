"""Indexer scores at given ids on torch tensors as the operators dsv4::indexer_topk_scores and
dsv4::indexer_topk_scores_grad, and the CUDA gradient of dense scores.

On CUDA tensors that fit the kernels both directions are this package's CUDA; everything else is the reference run on
torch tensors, so that a graph captured with the operators runs anywhere. The kernels' gradient of the entries is summed
by atomic additions, or, while torch.use_deterministic_algorithms is on when the backward pass runs, in a way whose bits
do not depend on any order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _bridge
from .._bridge_programs import Forward, Told, forward_of, gradient_of, known, playable, remember_gradient, run, settle
from .._programs import Making, Program, Programs
from .._torch_backend import without_autocast
from . import contract, contract_grad, reference
from .contract import SlotsSpec, Spec


@_bridge.remembered
def checked(
    q: Any, pooled_kv: Any, weights: Any, topk_indices: Any, compress_ratio: Any, softmax_scale: Any
) -> tuple[SlotsSpec, str | None]:
    """The Spec of a call, and why the CUDA kernels cannot take its tensors (None: they can)."""
    spec = contract.check_topk_scores(q, pooled_kv, weights, topk_indices, compress_ratio, softmax_scale)
    return spec, contract_grad.kernels_unfit(q, pooled_kv, weights)


@_bridge.remembered
def _checked_grad(
    grad_scores: Any, q: Any, pooled_kv: Any, weights: Any, topk_indices: Any, softmax_scale: Any
) -> tuple[SlotsSpec, str | None]:
    """The same of its gradient."""
    spec = contract.check_topk_scores_grad(grad_scores, q, pooled_kv, weights, topk_indices, 1, softmax_scale)
    return spec, contract_grad.kernels_unfit(q, pooled_kv, weights, grad_scores)


@_bridge.remembered
def _checked_dense_grad(
    grad_scores: Any, q: Any, pooled_kv: Any, weights: Any, compress_ratio: Any, softmax_scale: Any, query_start: Any
) -> tuple[Spec, str | None]:
    """The same of the gradient of dense scores."""
    spec = contract.check_scores_grad(grad_scores, q, pooled_kv, weights, compress_ratio, softmax_scale, query_start)
    return spec, contract_grad.kernels_unfit(q, pooled_kv, weights, grad_scores)


@functools.cache  # an import statement in each call takes half a microsecond
def _launches() -> Any:
    from . import cuda_grad_launch

    return cuda_grad_launch


@functools.cache
def notes() -> Any:
    """The module of the indexer's notes."""
    from . import cuda_notes

    return cuda_notes


def _cuda_scores(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, topk_indices: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    spec, unfit = checked(q, pooled_kv, weights, topk_indices, 1, softmax_scale)
    if unfit is not None:
        return reference.topk_scores(q, pooled_kv, weights, topk_indices, spec)
    cuda = _launches()
    read = _read(q, pooled_kv, weights, topk_indices)
    out = torch.empty(topk_indices.shape, dtype=torch.float32, device=q.device)
    with _bridge.on_stream_of(q) as stream:
        cuda.launch_topk_scores(_operands(*read), out.data_ptr(), spec, stream=stream)
    return out


def _cuda_grad(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor,
    topk_indices: torch.Tensor, softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec, unfit = _checked_grad(grad_scores, q, pooled_kv, weights, topk_indices, softmax_scale)
    if unfit is not None:
        return reference.topk_scores_grad(grad_scores, q, pooled_kv, weights, topk_indices, spec)
    cuda = _launches()
    passes = cuda.plan(spec, torch.are_deterministic_algorithms_enabled(), contract_grad.WORKSPACE_BYTES)
    read = _read(q, pooled_kv, weights, topk_indices)
    grads = _empty_like(q, pooled_kv, weights)
    workspace = torch.empty(passes.workspace_bytes, dtype=torch.uint8, device=q.device)
    with _bridge.on_stream_of(q) as stream:
        operands = _operands(*read, _bridge.plain(grad_scores))
        addresses = tuple(x.data_ptr() for x in grads)
        cuda.launch_topk_scores_grad(operands, addresses, workspace.data_ptr(), spec, passes, stream=stream)
    return grads


def cuda_dense_grad(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
    softmax_scale: float, query_start: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of dense causal scores of CUDA tensors, every sum in a fixed order."""
    spec, unfit = _checked_dense_grad(
        grad_scores, q, pooled_kv, weights, compress_ratio, softmax_scale, query_start
    )  # fmt: skip
    if unfit is not None:
        return reference.scores_grad(grad_scores, q, pooled_kv, weights, spec)
    cuda = _launches()
    read = _read(q, pooled_kv, weights)
    grads = _empty_like(q, pooled_kv, weights)
    workspace = torch.empty(cuda.dense_workspace_bytes(spec), dtype=torch.uint8, device=q.device)
    with _bridge.on_stream_of(q) as stream:
        operands = _operands(*read, None, _bridge.plain(grad_scores))
        addresses = tuple(x.data_ptr() for x in grads)
        cuda.launch_scores_grad(operands, addresses, workspace.data_ptr(), spec, stream=stream)
    return grads


def _reference_scores(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, topk_indices: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    spec = contract.check_topk_scores(q, pooled_kv, weights, topk_indices, 1, softmax_scale)
    return reference.topk_scores(q, pooled_kv, weights, topk_indices, spec)


def _reference_grad(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor,
    topk_indices: torch.Tensor, softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = contract.check_topk_scores_grad(grad_scores, q, pooled_kv, weights, topk_indices, 1, softmax_scale)
    return reference.topk_scores_grad(grad_scores, q, pooled_kv, weights, topk_indices, spec)


def _fake_scores(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, topk_indices: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    contract.check_topk_scores(q, pooled_kv, weights, topk_indices, 1, softmax_scale)
    wide = torch.float64 in (q.dtype, pooled_kv.dtype, weights.dtype)
    return q.new_empty(topk_indices.shape, dtype=torch.float64 if wide else torch.float32)


def _fake_grad(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor,
    topk_indices: torch.Tensor, softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return _empty_like(q, pooled_kv, weights)


class _TopkScores(torch.autograd.Function):
    """TOPK_SCORES with TOPK_SCORES_GRAD as its gradient. Asked for a graph of the gradient (create_graph), it takes the
    reference's, which torch differentiates."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, topk_indices: torch.Tensor,
        softmax_scale: float, ready: tuple[Program, Told] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(q, pooled_kv, weights, topk_indices)
        ctx.softmax_scale, ctx.before = softmax_scale, None
        if ready is not None:
            ctx.before = forward_of(*ready)
            return run(*ready)[0]
        with _bridge.below_autograd():
            return TOPK_SCORES(q, pooled_kv, weights, topk_indices, softmax_scale)

    @staticmethod
    def backward(ctx: Any, grad_scores: torch.Tensor) -> tuple[Any, ...]:
        saved, before = ctx.saved_tensors, ctx.before
        if before is not None:
            again = gradient_of(before, saved, grad_scores, fixed_order(), forced_path())
            if again is not None:
                return (*again, None, None, None)
        given = grad_scores, *saved, ctx.softmax_scale
        grads: tuple[Any, ...]
        grads = _differentiated(*given) if torch.is_grad_enabled() else gradient_at_ids(*given, before=before)
        return (*grads, *(None,) * (len(ctx.needs_input_grad) - 3))


def _differentiated(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor,
    topk_indices: torch.Tensor, softmax_scale: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients by torch's own differentiation of the reference, with a graph."""
    from .torch_bridge import _topk_scores_torch

    q, pooled_kv, weights = leaves = _bridge.own_views(q, pooled_kv, weights)
    spec = contract.check_topk_scores(q, pooled_kv, weights, topk_indices, 1, softmax_scale)
    wanted = [x for x in leaves if x.requires_grad]
    with without_autocast(q):
        scores = _topk_scores_torch(q, pooled_kv, weights, topk_indices, spec)
        grads = iter(torch.autograd.grad(scores, wanted, grad_scores, create_graph=True, allow_unused=True))
    return tuple(next(grads) if x.requires_grad else None for x in leaves)


def _read(q: torch.Tensor, pooled_kv: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the kernels read: the tensors themselves where they can, else contiguous copies."""
    aligned = _launches().aligned
    return (_bridge.readable(q, aligned), _bridge.readable(pooled_kv, aligned), *map(_bridge.contiguous, others))


def _operands(*tensors: torch.Tensor | None) -> Any:
    cuda = _launches()
    read = [None if x is None else cuda.Operand(x.data_ptr(), _bridge.name_of(x.dtype), x.stride()) for x in tensors]
    return cuda.Operands(*read)


def _empty_like(q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, pooled_kv, weights))


_INPUTS = "Tensor q, Tensor pooled_kv, Tensor weights, Tensor topk_indices, float softmax_scale"
TOPK_SCORES = _bridge.define_op(
    f"indexer_topk_scores({_INPUTS}) -> Tensor",
    kernels={"CUDA": _cuda_scores, "CPU": _reference_scores},
    fake=_fake_scores,
    autograd=_TopkScores,
)
TOPK_SCORES_GRAD = _bridge.define_op(
    f"indexer_topk_scores_grad(Tensor grad_scores, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    kernels={"CUDA": _cuda_grad, "CPU": _reference_grad},
    fake=_fake_grad,
)


# --- Calls that come again ---------------------------------------------------------------------------------

PROGRAMS, _GRADIENTS, _DENSE_GRADIENTS = Programs(), Programs(), Programs()
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_apply = playable(_TopkScores)
fixed_order = torch.are_deterministic_algorithms_enabled


def forced_path() -> Any:
    """Of the gradient kernels."""
    return _launches().cuda_grad_kernels.forced_path


def play(
    program: Program, call: Told, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor,
    topk_indices: torch.Tensor, softmax_scale: float,
) -> torch.Tensor:  # fmt: skip
    """TOPK_SCORES of a call that has a program."""
    if call.gradient:
        scale, ready = float(softmax_scale), (program, call)
        scores: torch.Tensor = _apply(q, pooled_kv, weights, topk_indices, scale, ready)
        return scores
    return run(program, call)[0]


def noted(call: Told | None, spec: SlotsSpec) -> None:
    """To be told of a call that TOPK_SCORES has run on the kernels."""
    if call is not None:
        settle(PROGRAMS, call, functools.partial(notes().topk_scores, spec))


def gradient_at_ids(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor,
    topk_indices: torch.Tensor, softmax_scale: float, *, before: Forward | None = None,
) -> Gradients:  # fmt: skip
    """TOPK_SCORES_GRAD, by its program where it came before."""
    tensors, fixed = (grad_scores, q, pooled_kv, weights, topk_indices), fixed_order()
    call, again = _played(_GRADIENTS, tensors, (softmax_scale,), before, fixed)
    if again is not None:
        return again
    grads: Gradients = TOPK_SCORES_GRAD(*tensors, softmax_scale)

    def note(making: Making) -> int | None:
        spec, unfit = _checked_grad(*tensors, softmax_scale)
        options = spec, fixed, contract_grad.WORKSPACE_BYTES, making
        return None if unfit else notes().topk_scores_grad(*options)  # type: ignore[no-any-return]

    settle(_GRADIENTS, call, note)
    return grads


def dense_gradient(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
    softmax_scale: float, query_start: int, *, before: Forward | None = None,
) -> Gradients:  # fmt: skip
    """SCORES_GRAD of torch_bridge_kernels, by its program where it came before."""
    tensors, options = (grad_scores, q, pooled_kv, weights), (compress_ratio, softmax_scale, query_start)
    call, again = _played(_DENSE_GRADIENTS, tensors, options, before)
    if again is not None:
        return again
    from .torch_bridge_kernels import SCORES_GRAD

    grads: Gradients = SCORES_GRAD(*tensors, *options)

    def note(making: Making) -> int | None:
        spec, unfit = _checked_dense_grad(*tensors, *options)
        return None if unfit else notes().scores_grad(spec, making)  # type: ignore[no-any-return]

    settle(_DENSE_GRADIENTS, call, note)
    return grads


def _played(
    programs: Programs, tensors: tuple[torch.Tensor, ...], options: tuple[Any, ...], before: Forward | None,
    *others: Any,
) -> tuple[Told | None, Gradients | None]:  # fmt: skip
    """What a gradient call on a GPU is known by, and its results where it came before."""
    if not tensors[1].is_cuda:
        return None, None
    others = (*others, forced_path())
    call, program = known(programs, tensors, (*options, *others))
    if call is None or program is None:
        return call, None
    remember_gradient(before, call, program, *others)
    grad_q, grad_kv, grad_weights = run(program, call)
    return call, (grad_q, grad_kv, grad_weights)
