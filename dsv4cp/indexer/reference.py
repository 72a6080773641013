"""Indexer scores and their gradients in array-API terms.

    logit[i, h, j] = q[i, h] . k[j]          score[i, j] = sum_h w[i, h] * scale * relu(logit[i, h, j])

Each query is one matrix product [I, E] @ [E, entries of a block] of fixed shape, and the sum over heads one
product [1, I] @ [I, entries of a block]; blocks of entries start at the same places in every call. So the bits
of a score do not depend on the batch or on how many queries share a chunk. Drivers (scores, scores_grad,
topk_scores, topk_scores_grad) only cut the work into chunks and store results; the equations are the
functions before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .._arrays import add_rows, cast, library, quiet
from .contract import ExtractSpec, SlotsSpec, Spec

CHUNK_BYTES = 8 * 2**20  # temporaries of one chunk of queries: small enough for a CPU cache
ENTRY_BLOCK = 256  # entries of one product; causal blocks that no query of a chunk sees are skipped
SLOT_BLOCK = 1024


# ---------------------------------------------------------------- equations


def relu(xp: Any, x: Any) -> Any:
    """max(x, 0), NaN kept. torch gives half a gradient at the tie of maximum, so it gets a where."""
    if library(x) == "torch":
        return xp.where(x <= 0, 0.0, x)
    return xp.maximum(x, 0.0)


def logits_of(xp: Any, q: Any, k: Any) -> Any:
    """logit = q . k: [..., I, E], [..., P, E] -> [..., I, P]."""
    return xp.matmul(q, xp.matrix_transpose(k))


def head_sum(xp: Any, w: Any, x: Any) -> Any:
    """sum_h w_h x_h: [..., I], [..., I, P] -> [..., P]."""
    return xp.matmul(w[..., None, :], x)[..., 0, :]


def dense_scores(xp: Any, q: Any, k: Any, w: Any, scale: float) -> Any:
    """The equation, unmasked: [..., I, E], [..., P, E], [..., I] -> [..., P]."""
    return head_sum(xp, w * scale, relu(xp, logits_of(xp, q, k)))


def select_rows(xp: Any, k: Any, ids: Any, valid: Any, dtype: Any) -> Any:
    """k[ids] where valid, else 0 whatever row 0 holds: [R, E], [N, T] -> [N, T, E]."""
    rows = xp.take(k, xp.reshape(xp.where(valid, ids, 0), (-1,)), axis=0)
    rows = cast(xp, xp.reshape(rows, (*ids.shape, k.shape[1])), dtype)
    return xp.where(valid[..., None], rows, 0.0)


def selected_scores(xp: Any, q: Any, rows: Any, valid: Any, w: Any, scale: float) -> Any:
    """Scores of each query with its own rows [N, T, E], -inf where not valid: -> [N, T]."""
    scores = dense_scores(xp, q, rows, w, scale)
    return xp.where(valid, scores, -xp.inf)


def dense_gradient(xp: Any, g: Any, q: Any, k: Any, w: Any, scale: float, seen: Any) -> tuple[Any, Any, Any]:
    """Gradients of a block: g [N, P], q [N, I, E], k [P, E], w [N, I], seen [N, P] -> those of q, k, w.

    With on = (logit > 0): grad_q = scale w_h sum_j on g_j k_j, grad_k = sum_ih on g_ij scale w_ih q_ih,
    grad_w = scale sum_j g_j relu(logit_j), every sum over seen pairs only. A product would turn 0 * NaN of an
    unseen pair into NaN, so products take finite factors and `touched` puts NaN back where a pair is seen.
    """
    g = xp.where(seen, g, 0.0) * scale
    logits = logits_of(xp, q, k)
    active = xp.where(seen[:, None, :], relu(xp, logits), 0.0)
    grad_w = xp.matmul(active, g[..., None])[..., 0]
    flow = cast(xp, logits > 0, g.dtype) * g[:, None, :]
    seen_g = cast(xp, seen, g.dtype)
    wq = w[..., None] * q
    k_finite, wq_finite = xp.isfinite(k), xp.isfinite(wq)
    grad_q = w[..., None] * xp.matmul(flow, xp.where(k_finite, k, 0.0))
    grad_q = _spoil(xp, grad_q, touched(xp, seen_g, ~k_finite)[:, None, :])
    grad_q = xp.where(xp.any(seen, axis=1)[:, None, None], grad_q, 0.0)
    pairs = q.shape[0] * q.shape[1]
    wq_flat = xp.reshape(xp.where(wq_finite, wq, 0.0), (pairs, q.shape[2]))
    grad_k = xp.matmul(xp.matrix_transpose(xp.reshape(flow, (pairs, k.shape[0]))), wq_flat)
    spoilt_q = xp.any(~wq_finite, axis=1)
    grad_k = _spoil(xp, grad_k, touched(xp, xp.matrix_transpose(seen_g), spoilt_q))
    return grad_q, grad_k, grad_w


def touched(xp: Any, sees: Any, bad: Any) -> Any:
    """True where a row sees (1.0 in `sees`) at least one bad element: [A, B], [B, E] -> [A, E]."""
    return xp.matmul(sees, cast(xp, bad, sees.dtype)) > 0


def _spoil(xp: Any, x: Any, where: Any) -> Any:
    return xp.where(where, xp.nan, x)


def selected_gradient(xp: Any, g: Any, q: Any, rows: Any, valid: Any, w: Any, scale: float) -> tuple[Any, Any, Any]:
    """Gradients at selected rows: g [N, T], rows [N, T, E] -> those of q, rows and w.

    The caller drops the row gradients of slots that are not valid.
    """
    g = xp.where(valid, g, 0.0) * scale
    logits = logits_of(xp, q, rows)
    on = cast(xp, logits > 0, g.dtype)
    grad_w = xp.matmul(relu(xp, logits), g[..., None])[..., 0]
    grad_q = w[..., None] * xp.matmul(on, g[..., None] * rows)
    grad_rows = g[..., None] * xp.matmul(xp.matrix_transpose(on), w[..., None] * q)
    some = xp.any(valid, axis=1)
    return (
        xp.where(some[:, None, None], grad_q, 0.0),
        grad_rows,
        xp.where(some[:, None], grad_w, 0.0),
    )


# ---------------------------------------------------------------- who sees what


class Causal:
    """Query i sees entry j iff j < (query_start + i + 1) // R: only finished groups of tokens."""

    def __init__(self, spec: Spec, first: int):
        self.spec, self.first = spec, spec.query_start + first + 1

    def mask(self, i0: int, i1: int, j0: int, j1: int) -> Any:
        """[i1 - i0, j1 - j0] for queries counted from `first`."""
        xp, device = self.spec.xp, self.spec.device
        tokens = xp.arange(self.first + i0, self.first + i1, dtype=xp.int64, device=device)
        entries = xp.arange(j0, j1, dtype=xp.int64, device=device)
        return entries[None, :] < (tokens // self.spec.compress_ratio)[:, None]

    def limit(self, i1: int) -> int:
        """No query before i1 sees this entry or a later one."""
        return (self.first + i1 - 1) // self.spec.compress_ratio


# ---------------------------------------------------------------- drivers


def steps(count: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive pieces."""
    return ((i, min(i + size, count)) for i in range(0, count, max(1, size)))


def rows_per_chunk(bytes_per_row: int) -> int:
    return max(1, CHUNK_BYTES // max(1, bytes_per_row))


def dense(xp: Any, x: Any, dtype: Any) -> Any:
    """x in `dtype` and row-major, so that a view gives the same bits as its copy."""
    x = cast(xp, x, dtype)
    return xp.ascontiguousarray(x) if hasattr(xp, "ascontiguousarray") else x


def itemsize(spec: Spec) -> int:
    return 8 if spec.compute == spec.xp.float64 else 4


def score_rows(q: Any, k: Any, w: Any, sees: Any, spec: Spec) -> Any:
    """Masked scores of N queries of one batch row: [N, I, E], [P, E], [N, I] -> [N, P]."""
    xp = spec.xp
    out = xp.full((q.shape[0], k.shape[0]), -xp.inf, dtype=spec.compute, device=spec.device)
    size = rows_per_chunk(4 * itemsize(spec) * spec.heads * min(ENTRY_BLOCK, k.shape[0]))
    for i0, i1 in steps(q.shape[0], size):
        q_part, w_part = dense(xp, q[i0:i1, ...], spec.compute), dense(xp, w[i0:i1, :], spec.compute)
        limit = sees.limit(i1)
        for j0, j1 in steps(k.shape[0], ENTRY_BLOCK):
            if j0 >= limit:
                break
            scores = dense_scores(xp, q_part, dense(xp, k[j0:j1, :], spec.compute), w_part, spec.softmax_scale)
            out[i0:i1, j0:j1] = xp.where(sees.mask(i0, i1, j0, j1), scores, -xp.inf)
    return out


@quiet
def scores(q: Any, pooled_kv: Any, weights: Any, spec: Spec) -> Any:
    """[B, S, P] with the causal mask."""
    xp = spec.xp
    out = xp.empty((spec.batch, spec.queries, spec.entries), dtype=spec.compute, device=spec.device)
    size = rows_per_chunk(itemsize(spec) * spec.entries)
    for b in range(spec.batch):
        for i0, i1 in steps(spec.queries, size):
            out[b, i0:i1, :] = score_rows(
                q[b, i0:i1, ...], pooled_kv[b, ...], weights[b, i0:i1, :], Causal(spec, i0), spec
            )
    return out


@quiet
def scores_grad(grad_scores: Any, q: Any, pooled_kv: Any, weights: Any, spec: Spec) -> tuple[Any, Any, Any]:
    """Gradients of `scores`; grad_pooled_kv is accumulated in the compute dtype and rounded once."""
    xp, dtype = spec.xp, spec.compute
    grad_q, grad_k, grad_w = (xp.zeros(x.shape, dtype=x.dtype, device=spec.device) for x in (q, pooled_kv, weights))
    size = rows_per_chunk(4 * itemsize(spec) * spec.heads * min(ENTRY_BLOCK, spec.entries))
    for b in range(spec.batch):
        total_k = cast(xp, grad_k[b, ...], dtype)  # itself, or a wider buffer that is rounded once
        for i0, i1 in steps(spec.queries, size):
            sees = Causal(spec, i0)
            q_part, w_part = dense(xp, q[b, i0:i1, ...], dtype), dense(xp, weights[b, i0:i1, :], dtype)
            total_q, total_w = xp.zeros_like(q_part), xp.zeros_like(w_part)
            for j0, j1 in steps(spec.entries, ENTRY_BLOCK):
                if j0 >= sees.limit(i1 - i0):
                    break
                part_q, part_k, part_w = dense_gradient(
                    xp,
                    dense(xp, grad_scores[b, i0:i1, j0:j1], dtype),
                    q_part,
                    dense(xp, pooled_kv[b, j0:j1, :], dtype),
                    w_part,
                    spec.softmax_scale,
                    sees.mask(0, i1 - i0, j0, j1),
                )
                total_q, total_w = total_q + part_q, total_w + part_w
                total_k[j0:j1, :] = total_k[j0:j1, :] + part_k
            grad_q[b, i0:i1, ...] = cast(xp, total_q, q.dtype)
            grad_w[b, i0:i1, :] = cast(xp, total_w, weights.dtype)
        grad_k[b, ...] = cast(xp, total_k, pooled_kv.dtype)
    return grad_q, grad_k, grad_w


def _slot_chunk(spec: SlotsSpec, copies: int) -> int:
    slots = min(SLOT_BLOCK, spec.slots)
    return rows_per_chunk(copies * itemsize(spec) * slots * (spec.index_dim + spec.heads))


@quiet
def topk_scores(q: Any, pooled_kv: Any, weights: Any, topk_indices: Any, spec: SlotsSpec) -> Any:
    """[B, S, T]: scores at the given ids; only those rows of pooled_kv are read."""
    xp, dtype = spec.xp, spec.compute
    out = xp.full((spec.batch, spec.queries, spec.slots), -xp.inf, dtype=dtype, device=spec.device)
    if spec.entries == 0:
        return out
    for b in range(spec.batch):
        for i0, i1 in steps(spec.queries, _slot_chunk(spec, 4)):
            q_part, w_part = dense(xp, q[b, i0:i1, ...], dtype), dense(xp, weights[b, i0:i1, :], dtype)
            for t0, t1 in steps(spec.slots, SLOT_BLOCK):
                ids = topk_indices[b, i0:i1, t0:t1]
                valid = (ids >= 0) & (ids < spec.entries)
                rows = select_rows(xp, pooled_kv[b, ...], ids, valid, dtype)
                out[b, i0:i1, t0:t1] = selected_scores(xp, q_part, rows, valid, w_part, spec.softmax_scale)
    return out


@quiet
def topk_scores_grad(
    grad_scores: Any, q: Any, pooled_kv: Any, weights: Any, topk_indices: Any, spec: SlotsSpec
) -> tuple[Any, Any, Any]:
    """Gradients of `topk_scores`; a repeated id adds once per slot."""
    xp, dtype = spec.xp, spec.compute
    grad_q, grad_k, grad_w = (xp.zeros(x.shape, dtype=x.dtype, device=spec.device) for x in (q, pooled_kv, weights))
    if spec.entries == 0:
        return grad_q, grad_k, grad_w
    for b in range(spec.batch):
        total_k = cast(xp, grad_k[b, ...], dtype)  # itself, or a wider buffer that is rounded once
        for i0, i1 in steps(spec.queries, _slot_chunk(spec, 5)):
            q_part, w_part = dense(xp, q[b, i0:i1, ...], dtype), dense(xp, weights[b, i0:i1, :], dtype)
            total_q, total_w = xp.zeros_like(q_part), xp.zeros_like(w_part)
            for t0, t1 in steps(spec.slots, SLOT_BLOCK):
                ids = topk_indices[b, i0:i1, t0:t1]
                valid = (ids >= 0) & (ids < spec.entries)
                rows = select_rows(xp, pooled_kv[b, ...], ids, valid, dtype)
                g = dense(xp, grad_scores[b, i0:i1, t0:t1], dtype)
                part_q, part_rows, part_w = selected_gradient(xp, g, q_part, rows, valid, w_part, spec.softmax_scale)
                total_q, total_w = total_q + part_q, total_w + part_w
                ids, part_rows = xp.reshape(ids, (-1,)), xp.reshape(part_rows, (math.prod(ids.shape), spec.index_dim))
                total_k = add_rows(xp, total_k, ids, part_rows)  # drops ids outside [0, P)
            grad_q[b, i0:i1, ...] = cast(xp, total_q, q.dtype)
            grad_w[b, i0:i1, :] = cast(xp, total_w, weights.dtype)
        grad_k[b, ...] = cast(xp, total_k, pooled_kv.dtype)
    return grad_q, grad_k, grad_w


def extract(logits: Any, topk_indices: Any, spec: ExtractSpec) -> Any:
    """logits[..., ids], -inf where an id is outside [0, P)."""
    xp = spec.xp
    if spec.entries == 0:
        return xp.full(topk_indices.shape, -xp.inf, dtype=logits.dtype, device=spec.device)
    valid = (topk_indices >= 0) & (topk_indices < spec.entries)
    ids = cast(xp, xp.where(valid, topk_indices, 0), xp.int64)
    found = xp.take_along_axis(logits, ids, axis=-1)
    chosen = xp.where(valid, found, xp.full((), -xp.inf, dtype=found.dtype, device=spec.device))  # asarray would wait
    return cast(xp, chosen, logits.dtype)  # CuPy's `where` makes float32 of bfloat16
