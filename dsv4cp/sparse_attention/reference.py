"""Sparse attention as equations: scores, softmax with a sink, and their gradient, in array-API calls.

`attend`, `attend_grad` and `attend_dense` are the definitions, functional and free of in-place writes.
`forward`, `backward` and `dense` run them over chunks of queries, one batch row after another, so that
memory beyond inputs and outputs stays bounded for any length. Every query is computed by itself (its own
matrix products, its own sums), and sums over queries are carried on in the order of the queries; with
NumPy the chunk size therefore changes no bit of out, lse or any gradient.
"""

from __future__ import annotations

from typing import Any

from .._arrays import add_rows, cast, compute_dtype, dtype_name, quiet
from . import contract
from .contract import Spec
from .reference_chunks import Scratch, at_least_one_row, product, query_chunks, row_chunks, row_major, workspace

INFERENCE_FLOOR = -1e30  # where the running maximum of the inference arithmetic starts
EXP_LIMIT = 80.0  # exp of more than this counts as +inf: the sink then takes the whole denominator


# --- The equations -------------------------------------------------------------------------------------


def attend(
    xp: Any, q: Any, rows: Any, valid: Any, sinks: Any, scale: float, p_dtype: Any, floor: float
) -> tuple[Any, Any]:
    """(out [N, H, D], lse [N, H]) of N queries: q [N, H, D], their rows [N, T, D], valid [N, T], sinks [H].

    Rows of invalid slots are zero. p is rounded to `p_dtype` before it meets the values.
    """
    scores = product(xp, q * scale, xp.matrix_transpose(rows))  # [N, H, T]
    scores = xp.where(valid[:, None, :], scores, -xp.inf)
    shift = softmax_shift(xp, scores, floor)  # [N, H, 1]
    p = xp.exp(scores - shift)
    p_sum = xp.sum(p, axis=-1, keepdims=True)
    empty = p_sum == 0
    total = p_sum + sink_weight(xp, sinks, shift, empty)
    p_low = cast(xp, cast(xp, p, p_dtype), p.dtype)
    out = product(xp, p_low, rows) / total
    lse = xp.where(empty, -xp.inf, shift + xp.log(xp.where(empty, 1.0, p_sum)))
    return out, lse[:, :, 0]


def softmax_shift(xp: Any, scores: Any, floor: float) -> Any:
    """The largest score, kept off -inf. A constant: what is subtracted cancels, so it has no gradient."""
    top = xp.max(scores.detach() if hasattr(scores, "detach") else scores, axis=-1, keepdims=True)
    top = xp.where(top < floor, floor, top)
    return xp.where(top == -xp.inf, 0.0, top)


def sink_weight(xp: Any, sinks: Any, shift: Any, empty: Any) -> Any:
    """exp(sink - shift) [N, H, 1]: 0 at sink -inf, +inf from EXP_LIMIT on, without overflow on the way.

    1 where no key weighs anything: the output is 0 / 1 there and the sink has no gradient, whatever it is.
    """
    gap = xp.where(empty, 0.0, sinks[None, :, None] - shift)
    huge = gap > EXP_LIMIT
    return xp.where(huge, xp.inf, xp.exp(xp.where(huge, 0.0, gap)))


def attend_grad(
    xp: Any, grad_out: Any, q: Any, rows: Any, valid: Any, sinks: Any, out: Any, lse: Any, scale: float
) -> tuple[Any, Any, Any, Any]:
    """(grad_q [N, H, D], grad_sinks per query [N, H], and A [N, 2H, T], X [N, 2H, D] with grad_rows = A^T X)."""
    heads = q.shape[1]
    x = xp.concat([q * scale, grad_out], axis=1)
    products = product(xp, x, xp.matrix_transpose(rows))  # one pass over the rows for both
    scores = xp.where(valid[:, None, :], products[:, :heads, :], -xp.inf)
    grad_p = products[:, heads:, :]
    empty = lse == -xp.inf
    endless = sinks[None, :] == xp.inf
    keys_part, sink_part = xp.where(empty, 0.0, lse), xp.where(endless, 0.0, sinks[None, :])
    larger = xp.maximum(keys_part, sink_part)
    total = larger + xp.log(xp.exp(keys_part - larger) + xp.exp(sink_part - larger))
    total = xp.where(endless, xp.inf, total)  # log of the whole denominator, [N, H]
    p = xp.exp(scores - total[:, :, None])
    delta = xp.sum(grad_out * out, axis=-1)
    grad_scores = xp.where(valid[:, None, :], p * (grad_p - delta[:, :, None]), 0.0)
    grad_q = product(xp, grad_scores * scale, rows)
    grad_sinks = xp.where(empty | endless, 0.0, -xp.exp(sink_part - total) * delta)
    return grad_q, grad_sinks, xp.concat([grad_scores, p], axis=1), x


def attend_dense(xp: Any, q: Any, kv: Any, counts: Any, sinks: Any, scale: float) -> Any:
    """out [N, H, D] of N queries over all keys kv [K, D]; counts [N, K] says how often each key is selected.

    A key that is not finite makes the output of the queries that selected it NaN, and of no other.
    """
    finite = xp.isfinite(kv)
    kv = xp.where(finite, kv, 0.0)
    broken = cast(xp, ~xp.all(finite, axis=-1), counts.dtype)  # [K]
    scores = xp.matmul(q * scale, xp.matrix_transpose(kv))  # [N, H, K]
    scores = xp.where(counts[:, None, :] > 0, scores, -xp.inf)
    shift = softmax_shift(xp, scores, -xp.inf)
    p = xp.exp(scores - shift) * counts[:, None, :]
    p_sum = xp.sum(p, axis=-1, keepdims=True)
    total = p_sum + sink_weight(xp, sinks, shift, p_sum == 0)
    out = xp.matmul(p, kv) / total
    return xp.where(xp.matmul(counts, broken)[:, None, None] > 0, xp.nan, out)


# --- The same over chunks of queries -------------------------------------------------------------------


@quiet
def forward(
    q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec, reference_rounding: bool = False, step: int | None = None
) -> tuple[Any, Any]:
    """(out, lse). `step` queries at a time; None takes what fits the working memory."""
    xp, dtype = spec.xp, compute_dtype(spec.xp, q, kv)
    out = xp.empty((spec.batch, spec.queries, spec.heads, spec.dim), dtype=q.dtype, device=spec.device)
    lse = xp.empty((spec.batch, spec.queries, spec.heads), dtype=dtype, device=spec.device)
    p_dtype = kv.dtype if dtype_name(kv) in ("float16", "bfloat16") else dtype
    scratch = Scratch(spec, dtype)
    for b, first, last in query_chunks(spec, dtype, step):
        rows, valid = scratch.gather(kv[b, ...], ids[b, first:last, :])
        chunk = attend_chunk(xp, q[b, first:last, ...], rows, valid, sinks, spec, p_dtype, reference_rounding)
        out[b, first:last, ...] = cast(xp, chunk[0], q.dtype)
        lse[b, first:last, ...] = chunk[1]
    return out, lse


def attend_chunk(
    xp: Any, q: Any, rows: Any, valid: Any, sinks: Any, spec: Spec, p_dtype: Any, reference_rounding: bool
) -> tuple[Any, Any]:
    """`attend` on inputs of any float dtype; the result is in the dtype that the arithmetic runs in."""
    dtype = rows.dtype
    floor = INFERENCE_FLOOR if reference_rounding else -xp.inf
    q, sinks = row_major(xp, q, dtype), row_major(xp, sinks, dtype)
    return attend(xp, q, rows, valid, sinks, spec.scale, p_dtype, floor)


@quiet
def backward(
    grad_out: Any, q: Any, kv: Any, sinks: Any, ids: Any, out: Any, lse: Any, spec: Spec, cap: int,
    step: int | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(grad_q, grad_kv, grad_sinks), working within `cap` bytes; every sum has a fixed order."""
    xp, dtype = spec.xp, compute_dtype(spec.xp, q, kv)
    contract.check_workspace(cap, workspace(spec, dtype))
    grad_q = xp.empty(tuple(q.shape), dtype=q.dtype, device=spec.device)
    grad_kv = xp.empty(tuple(kv.shape), dtype=kv.dtype, device=spec.device)
    grad_sinks = xp.zeros((spec.heads,), dtype=xp.float64, device=spec.device)
    scratch = Scratch(spec, dtype)
    total = None
    for b, first, last in query_chunks(spec, dtype, step, cap):
        if first == 0:
            total = xp.zeros((spec.keys, spec.dim), dtype=dtype, device=spec.device)
        here = (b, slice(first, last), ...)
        rows, valid = scratch.gather(kv[b, ...], ids[b, first:last, :])
        g_, q_, out_, lse_ = (row_major(xp, a[here], dtype) for a in (grad_out, q, out, lse))
        sinks_ = row_major(xp, sinks, dtype)
        grad_q_, grad_sinks_, a_, x_ = attend_grad(xp, g_, q_, rows, valid, sinks_, out_, lse_, spec.scale)
        grad_q[here] = cast(xp, grad_q_, q.dtype)
        grad_sinks = carry_sum(xp, grad_sinks, grad_sinks_)
        grad_rows = scratch.grad_rows(a_, x_)
        kept = xp.where(valid, ids[b, first:last, :], -1)
        total = add_rows(xp, total, xp.reshape(kept, (-1,)), grad_rows)
        if last == spec.queries:
            for rows_first, rows_last in row_chunks(spec):
                grad_kv[b, rows_first:rows_last, :] = cast(xp, total[rows_first:rows_last, :], kv.dtype)
    if spec.queries == 0:
        grad_kv = xp.zeros(tuple(kv.shape), dtype=kv.dtype, device=spec.device)
    return grad_q, grad_kv, cast(xp, grad_sinks, sinks.dtype)


def carry_sum(xp: Any, total: Any, parts: Any) -> Any:
    """total + parts[0] + parts[1] + ... one after another, so that the split into chunks does not matter."""
    terms = xp.concat([total[None, :], cast(xp, parts, total.dtype)], axis=0)
    return xp.cumulative_sum(terms, axis=0)[-1, :]


@quiet
def dense(q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec) -> Any:
    """out of the dense oracle, [B, S, H, D]."""
    xp = spec.xp
    out = xp.empty(tuple(q.shape), dtype=q.dtype, device=spec.device)
    dtype = compute_dtype(xp, q, kv)
    for b, first, last in query_chunks(spec, dtype, per_query=spec.keys * (2 * spec.heads + 1)):
        chunk = dense_chunk(xp, q[b, first:last, ...], kv[b, ...], sinks, ids[b, first:last, :], spec, dtype)
        out[b, first:last, ...] = cast(xp, chunk, q.dtype)
    return out


def dense_chunk(xp: Any, q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec, dtype: Any) -> Any:
    """`attend_dense` for N queries with ids [N, T], in the dtype that the arithmetic runs in."""
    kv = at_least_one_row(xp, kv)
    queries, keys = ids.shape[0], kv.shape[0]
    valid = (ids >= 0) & (ids < spec.keys)
    cell = xp.arange(queries, dtype=xp.int64, device=spec.device)[:, None] * keys + cast(xp, ids, xp.int64)
    cell = xp.reshape(xp.where(valid, cell, -1), (-1,))
    ones = xp.ones((cell.shape[0], 1), dtype=dtype, device=spec.device)
    counts = xp.zeros((queries * keys, 1), dtype=dtype, device=spec.device)
    counts = xp.reshape(add_rows(xp, counts, cell, ones), (queries, keys))
    q, kv, sinks = (row_major(xp, x, dtype) for x in (q, kv, sinks))
    return attend_dense(xp, q, kv, counts, sinks, spec.scale)
