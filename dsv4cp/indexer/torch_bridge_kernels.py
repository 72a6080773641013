"""Dense indexer scores on torch tensors as the operators dsv4::indexer_scores and dsv4::indexer_scores_grad.

On CUDA tensors that fit the kernels both directions are this package's CUDA; everything on other tensors is the
reference run on torch tensors, so that a graph captured with the operators runs anywhere. Scores are
masked to -inf where an entry is not finished, and the gradient ignores what comes in there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _bridge
from .._bridge_programs import Told, forward_of, gradient_of, known, playable, run, settle
from .._programs import Program, Programs
from .._torch_backend import without_autocast
from . import contract, contract_kernels, reference, torch_bridge_topk
from .contract import Spec


@_bridge.remembered
def checked(
    q: Any, pooled_kv: Any, weights: Any, compress_ratio: Any, softmax_scale: Any, query_start: Any = 0,
    query_total_len: Any = None,
) -> tuple[Spec, str | None]:  # fmt: skip
    """The Spec of a call, and why the CUDA kernels cannot take its tensors (None: they can)."""
    spec = contract.check_scores(q, pooled_kv, weights, compress_ratio, softmax_scale, query_start, query_total_len)
    return spec, contract_kernels.unfit(q, pooled_kv, weights)


@functools.cache  # an import statement in each call takes half a microsecond
def _launches() -> Any:
    from . import cuda_scores

    return cuda_scores


def _cuda_scores(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int, softmax_scale: float,
    query_start: int,
) -> torch.Tensor:  # fmt: skip
    spec, unfit = checked(q, pooled_kv, weights, compress_ratio, softmax_scale, query_start)
    if unfit is not None:
        return reference.scores(q, pooled_kv, weights, spec)
    cuda = _launches()
    q, pooled_kv = _bridge.readable(q, cuda.aligned), _bridge.readable(pooled_kv, cuda.aligned)
    weights = _bridge.plain(weights)
    out = torch.empty((spec.batch, spec.queries, spec.entries), dtype=torch.float32, device=q.device)
    with _bridge.on_stream_of(q) as stream:
        operands = _operand(q), _operand(pooled_kv), _operand(weights)
        cuda.launch_scores(*operands, out.data_ptr(), spec, cuda.limits(spec), stream=stream)
    return out


def _reference_scores(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int, softmax_scale: float,
    query_start: int,
) -> torch.Tensor:  # fmt: skip
    spec = contract.check_scores(q, pooled_kv, weights, compress_ratio, softmax_scale, query_start)
    return reference.scores(q, pooled_kv, weights, spec)


def _fake_scores(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int, softmax_scale: float,
    query_start: int,
) -> torch.Tensor:  # fmt: skip
    wide = torch.float64 in (q.dtype, pooled_kv.dtype, weights.dtype)
    shape = (q.shape[0], q.shape[1], pooled_kv.shape[1])
    return q.new_empty(shape, dtype=torch.float64 if wide else torch.float32)


def _reference_grad(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
    softmax_scale: float, query_start: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    spec = contract.check_scores_grad(grad_scores, q, pooled_kv, weights, compress_ratio, softmax_scale, query_start)
    return reference.scores_grad(grad_scores, q, pooled_kv, weights, spec)


def _fake_grad(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
    softmax_scale: float, query_start: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return q.new_empty(q.shape), pooled_kv.new_empty(pooled_kv.shape), weights.new_empty(weights.shape)


class _Scores(torch.autograd.Function):
    """SCORES with SCORES_GRAD as its gradient; asked for a graph of the gradient, the reference's."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
        softmax_scale: float, query_start: int, ready: tuple[Program, Told] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(q, pooled_kv, weights)
        ctx.options = options = compress_ratio, softmax_scale, query_start
        ctx.before = None
        if ready is not None:
            ctx.before = forward_of(*ready)
            return run(*ready)[0]
        with _bridge.below_autograd():
            return SCORES(q, pooled_kv, weights, *options)

    @staticmethod
    def backward(ctx: Any, grad_scores: torch.Tensor) -> tuple[Any, ...]:
        saved, before = ctx.saved_tensors, ctx.before
        if before is not None:
            again = gradient_of(before, saved, grad_scores, torch_bridge_topk.forced_path())
            if again is not None:
                return (*again, None, None, None, None)
        if torch.is_grad_enabled():
            grads: tuple[torch.Tensor | None, ...] = _differentiated(grad_scores, *saved, *ctx.options)
        else:
            grads = torch_bridge_topk.dense_gradient(grad_scores, *saved, *ctx.options, before=before)
        return (*grads, *(None,) * (len(ctx.needs_input_grad) - 3))


def _differentiated(
    grad_scores: torch.Tensor, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
    softmax_scale: float, query_start: int,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """The gradients by torch's own differentiation of the reference, with a graph."""
    q, pooled_kv, weights = leaves = _bridge.own_views(q, pooled_kv, weights)
    spec = contract.check_scores(q, pooled_kv, weights, compress_ratio, softmax_scale, query_start)
    xp, sees = spec.xp, reference.Causal(spec, 0)
    seen = min(spec.entries, sees.limit(spec.queries))  # entries behind them may hold NaN: products would carry 0 * NaN
    wanted = [x for x in leaves if x.requires_grad]
    with without_autocast(q):
        wide = [xp.astype(x, spec.compute) for x in (q, pooled_kv[:, :seen], weights)]
        scores = reference.dense_scores(xp, wide[0], wide[1][:, None], wide[2], spec.softmax_scale)
        scores = torch.where(sees.mask(0, spec.queries, 0, seen), scores, -torch.inf)
        grads = iter(
            torch.autograd.grad(scores, wanted, grad_scores[:, :, :seen], create_graph=True, allow_unused=True)
        )
    return tuple(next(grads) if x.requires_grad else None for x in leaves)


def _operand(x: torch.Tensor) -> Any:
    return _launches().Operand(x.data_ptr(), _bridge.name_of(x.dtype), x.stride())


_INPUTS = "Tensor q, Tensor pooled_kv, Tensor weights, int compress_ratio, float softmax_scale, int query_start"
SCORES = _bridge.define_op(
    f"indexer_scores({_INPUTS}) -> Tensor",
    kernels={"CUDA": _cuda_scores, "CPU": _reference_scores},
    fake=_fake_scores,
    autograd=_Scores,
)
SCORES_GRAD = _bridge.define_op(
    f"indexer_scores_grad(Tensor grad_scores, {_INPUTS}) -> (Tensor, Tensor, Tensor)",
    kernels={"CUDA": torch_bridge_topk.cuda_dense_grad, "CPU": _reference_grad},
    fake=_fake_grad,
)


# --- Calls that come again ---------------------------------------------------------------------------------

PROGRAMS = Programs()
_apply = playable(_Scores)


def known_of(q: Any, pooled_kv: Any, weights: Any, *others: Any) -> tuple[Told | None, Program | None]:
    """What a call of torch_bridge's on a machine with kernels is known by, and its program."""
    if torch.compiler.is_compiling():
        return None, None
    return known(PROGRAMS, (q, pooled_kv, weights), (*others, _launches().forced_path))


def play(
    program: Program, call: Told, q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, compress_ratio: int,
    softmax_scale: float, query_start: int,
) -> torch.Tensor:  # fmt: skip
    """SCORES of a call that has a program."""
    if call.gradient:
        numbers = int(compress_ratio), float(softmax_scale), int(query_start)
        scores: torch.Tensor = _apply(q, pooled_kv, weights, *numbers, (program, call))
        return scores
    return run(program, call)[0]


def noted(call: Told | None, spec: Spec) -> None:
    """To be told of a call that SCORES has run on the kernels."""
    if call is not None:
        settle(PROGRAMS, call, functools.partial(torch_bridge_topk.notes().scores, spec))
