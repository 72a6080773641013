"""The indexer for torch tensors, with the names and signatures of the mirrored module (NeMo AutoModel's
deepseek_v4.optimized_kernels): the reference equations run on torch tensors and differentiated by torch, or the
operators of torch_bridge_kernels."""

from __future__ import annotations

import math
from typing import Literal

import array_api_compat.torch as xp
import torch

from .. import _bridge
from .._arrays import cast
from .._bridge_programs import known
from .._torch_backend import choose, without_autocast
from . import contract, reference, torch_bridge_kernels, torch_bridge_topk

Dsv4IndexerBackend = Literal["torch", "tilelang", "auto"]
BACKENDS = ("torch", "tilelang", "auto")


def kernel_missing() -> str | None:
    """Why the indexer's CUDA kernels cannot run on this machine, None when they can."""
    return _bridge.missing("cuda")


def indexer_scores_torch(
    q: torch.Tensor, pooled_kv: torch.Tensor, weights: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """score[b, i, j] = sum_h relu(q[b, i, h] . k[b, j]) * softmax_scale * w[b, i, h], without a causal mask.

    q [B, S, I, E], pooled_kv [B, P, E], weights [B, S, I] -> float32 [B, S, P] (float64 if any input is);
    differentiable, twice too; the gradient of relu at 0 is 0.
    """
    spec = contract.check_scores(q, pooled_kv, weights, 1, softmax_scale)
    choose("indexer_scores_torch", "torch", (q, pooled_kv, weights), allowed=BACKENDS, kernel_missing=None)
    q, pooled_kv, weights = (cast(xp, x, spec.compute) for x in (q, pooled_kv, weights))
    with without_autocast(q):
        return reference.dense_scores(xp, q, pooled_kv[:, None, ...], weights, spec.softmax_scale)


def extract_indexer_topk_scores_torch(logits: torch.Tensor, topk_indices: torch.Tensor) -> torch.Tensor:
    """logits[..., topk_indices]: [..., P], [..., T] -> [..., T], -inf where an id is outside [0, P)."""
    spec = contract.check_extract(logits, topk_indices)
    choose("extract_indexer_topk_scores_torch", "torch", (logits, topk_indices), allowed=BACKENDS, kernel_missing=None)
    if spec.entries == 0:
        return reference.extract(logits, topk_indices, spec)
    # The same as the reference in half the passes over the ids, which take longest.
    inside = topk_indices.clamp(0, spec.entries - 1)
    return logits.gather(-1, inside.long()).masked_fill(inside != topk_indices, -math.inf)


def dsv4_indexer_scores(
    q: torch.Tensor,
    pooled_kv: torch.Tensor,
    weights: torch.Tensor,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: Dsv4IndexerBackend,
    query_start: int = 0,
    query_total_len: int | None = None,
) -> torch.Tensor:
    """Scores of every entry: see indexer_scores_torch for shapes.

    "torch" leaves them unmasked, as the mirrored module does; "tilelang" (the CUDA kernels: bfloat16 or float16, E 64
    or 128, I 1 to 128) gives -inf where j >= (query_start + i + 1) // compress_ratio. "auto" takes the kernels for
    CUDA bfloat16 tensors where they can run, else "torch". query_total_len: length of the whole sequence, at least
    query_start + S.
    """
    call = None
    if (missing := kernel_missing()) is None:
        call, program = torch_bridge_kernels.known_of(
            q, pooled_kv, weights, backend, compress_ratio, softmax_scale, query_start, query_total_len
        )
        if call is not None and program is not None:
            numbers = compress_ratio, softmax_scale, query_start
            return torch_bridge_kernels.play(program, call, q, pooled_kv, weights, *numbers)
    arguments = q, pooled_kv, weights, compress_ratio, softmax_scale, query_start, query_total_len
    if (unfit := missing) is None:
        spec, unfit = torch_bridge_kernels.checked(*arguments)
    else:
        spec = contract.check_scores(*arguments)
    picked = choose(
        "dsv4_indexer_scores",
        backend,
        (q, pooled_kv),
        allowed=BACKENDS,
        kernel_missing=unfit,
        require_bf16=backend != "tilelang",
    )
    if picked == "tilelang":
        numbers = spec.compress_ratio, spec.softmax_scale, spec.query_start
        scores = _bridge.call(torch_bridge_kernels.SCORES, q, pooled_kv, weights, *numbers)
        torch_bridge_kernels.noted(call, spec)
        return scores
    return indexer_scores_torch(q, pooled_kv, weights, softmax_scale)


def dsv4_indexer_topk_scores(
    q: torch.Tensor,
    pooled_kv: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: Dsv4IndexerBackend,
) -> torch.Tensor:
    """Scores at the ids of topk_indices [B, S, T] (int32 or int64), -inf where an id is outside [0, P).

    Only the named rows of pooled_kv reach a result and only they get a gradient, which is summed in float32 (float64 if
    any input is) and rounded once; a repeated id adds once per slot.
    "tilelang" (the CUDA kernels: bfloat16 or float16, E 64 or 128, I 1 to 128) sums the gradient of pooled_kv over
    queries with atomic additions, whose last bits may differ from run to run. While
    torch.use_deterministic_algorithms(True) is set during the backward pass it sums integers scaled by a power of two
    instead: the same bits every time, at up to twice the time, with 8 E + 4 bytes an entry (within 2 GiB: more take
    several passes). "auto" as in dsv4_indexer_scores.
    """
    call = None
    if (missing := kernel_missing()) is None:
        tensors, numbers = (q, pooled_kv, weights, topk_indices), (backend, compress_ratio, softmax_scale)
        call, program = known(torch_bridge_topk.PROGRAMS, tensors, numbers)
        if call is not None and program is not None:
            return torch_bridge_topk.play(program, call, q, pooled_kv, weights, topk_indices, softmax_scale)
    arguments = q, pooled_kv, weights, topk_indices, compress_ratio, softmax_scale
    if (unfit := missing) is None:
        spec, unfit = torch_bridge_topk.checked(*arguments)
    else:
        spec = contract.check_topk_scores(*arguments)
    picked = choose(
        "dsv4_indexer_topk_scores",
        backend,
        (q, pooled_kv),
        allowed=BACKENDS,
        kernel_missing=unfit,
        require_bf16=backend != "tilelang",
    )
    if picked == "tilelang":
        tensors = q, pooled_kv, weights, topk_indices
        scores = _bridge.call(torch_bridge_topk.TOPK_SCORES, *tensors, spec.softmax_scale)
        torch_bridge_topk.noted(call, spec)
        return scores
    return _topk_scores_torch(q, pooled_kv, weights, topk_indices, spec)


def _topk_scores_torch(
    q: torch.Tensor,
    pooled_kv: torch.Tensor,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    spec: contract.SlotsSpec,
) -> torch.Tensor:
    """The reference with every (row, query) pair as one query, ids counted over all rows' entries."""
    valid = (topk_indices >= 0) & (topk_indices < spec.entries)
    row_starts = torch.arange(spec.batch, device=q.device)[:, None, None] * spec.entries
    ids, valid = (x.flatten(0, 1) for x in (torch.where(valid, topk_indices + row_starts, -1), valid))
    q, weights = (cast(xp, x, spec.compute).flatten(0, 1) for x in (q, weights))
    pooled_kv = cast(xp, pooled_kv, spec.compute).flatten(0, 1)  # torch adds the slots' gradients in this dtype
    if pooled_kv.shape[0] == 0:  # a row to point at, so that the result still belongs to the autograd graph
        pooled_kv = torch.cat([pooled_kv, pooled_kv.new_zeros(1, spec.index_dim)])
    rows = reference.select_rows(xp, pooled_kv, ids, valid, spec.compute)
    with without_autocast(q):
        scores = reference.selected_scores(xp, q, rows, valid, weights, spec.softmax_scale)
    return scores.reshape(topk_indices.shape)
