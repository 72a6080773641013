"""What the indexer functions take: shapes, dtypes and limits, checked once and kept in a frozen Spec.

Metadata only: no value of an array is read. The one place of this slice that raises about inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from .._arrays import (
    FLOATS,
    ID_DTYPES,
    compute_dtype,
    facts,
    real_number,
    require_dtype,
    require_shape,
    whole_number,
)

MAX_ENTRIES = 2**31 - 1  # ids are int32
LARGEST_POSITION = 2**60  # sums of a few positions stay inside int64
FLOAT32_MAX = 3.4028234663852886e38
ORDERS = ("id", "score")


@dataclass(frozen=True)
class Spec:
    """One call: where its arrays live, its sizes, and the dtype its arithmetic runs in."""

    library: str
    xp: Any
    device: Any
    batch: int  # B
    queries: int  # S
    entries: int  # P
    heads: int  # I
    index_dim: int  # E
    compute: Any  # float64 if any input is float64, else float32
    softmax_scale: float
    compress_ratio: int  # R
    query_start: int = 0


_NAMES = tuple(field.name for field in fields(Spec))


@dataclass(frozen=True)
class SlotsSpec(Spec):
    """A call that names the entries of each query."""

    slots: int = 0  # T


@dataclass(frozen=True)
class TopkSpec(Spec):
    """A call that selects the entries of each query."""

    topk: int = 0
    order: str = "id"
    return_scores: bool = False
    packed: bool = False  # documents decide what a query sees, not the causal rule


@dataclass(frozen=True)
class SelectSpec:
    """A selection over a given score matrix [..., P], where `causal` [..., S, P]."""

    library: str
    xp: Any
    device: Any
    leading: tuple[int, ...]
    entries: int
    compute: Any
    topk: int
    order: str
    return_scores: bool
    causal: bool = False  # query i sees (query_start + i + 1) // compress_ratio entries, else all
    compress_ratio: int = 1
    query_start: int = 0


@dataclass(frozen=True)
class ExtractSpec:
    """A gather [..., P], [..., T] -> [..., T]."""

    library: str
    xp: Any
    device: Any
    entries: int
    slots: int


def check_scores(
    q: Any,
    pooled_kv: Any,
    weights: Any,
    compress_ratio: Any,
    softmax_scale: Any,
    query_start: Any = 0,
    query_total_len: Any = None,
    **others: Any,
) -> Spec:
    """The Spec of a dense-score call; `others` are further arrays that must share library and device."""
    shared = facts(q=q, pooled_kv=pooled_kv, weights=weights, **others)
    for name, x in (("q", q), ("pooled_kv", pooled_kv), ("weights", weights)):
        require_dtype(name, x, FLOATS)
    batch, queries, heads, index_dim = require_shape("q", q, "B S I E")
    _, entries, _ = require_shape("pooled_kv", pooled_kv, "B P E", B=batch, E=index_dim)
    require_shape("weights", weights, "B S I", B=batch, S=queries, I=heads)
    _limit_entries("pooled_kv", entries)
    start = whole_number("query_start", query_start, maximum=LARGEST_POSITION)
    compute = compute_dtype(shared.xp, q, pooled_kv, weights)
    if query_total_len is not None:
        total = whole_number("query_total_len", query_total_len)
        if start + queries > total:
            raise ValueError(f"query_total_len: expected at least query_start + S = {start} + {queries}, got {total}")
    return Spec(
        library=shared.library,
        xp=shared.xp,
        device=shared.device,
        batch=batch,
        queries=queries,
        entries=entries,
        heads=heads,
        index_dim=index_dim,
        compute=compute,
        softmax_scale=_scale(softmax_scale, math.inf if compute == shared.xp.float64 else FLOAT32_MAX),
        compress_ratio=whole_number("compress_ratio", compress_ratio, minimum=1, maximum=LARGEST_POSITION),
        query_start=start,
    )


def check_scores_grad(
    grad_scores: Any,
    q: Any,
    pooled_kv: Any,
    weights: Any,
    compress_ratio: Any,
    softmax_scale: Any,
    query_start: Any = 0,
    query_total_len: Any = None,
) -> Spec:
    """The Spec of a dense-score gradient."""
    spec = check_scores(
        q, pooled_kv, weights, compress_ratio, softmax_scale, query_start, query_total_len, grad_scores=grad_scores
    )
    require_dtype("grad_scores", grad_scores, FLOATS)
    require_shape("grad_scores", grad_scores, "B S P", B=spec.batch, S=spec.queries, P=spec.entries)
    return spec


def check_topk_scores(
    q: Any,
    pooled_kv: Any,
    weights: Any,
    topk_indices: Any,
    compress_ratio: Any,
    softmax_scale: Any,
    **others: Any,
) -> SlotsSpec:
    """The Spec of a call that scores given ids."""
    spec = check_scores(q, pooled_kv, weights, compress_ratio, softmax_scale, topk_indices=topk_indices, **others)
    require_dtype("topk_indices", topk_indices, ID_DTYPES)
    shape = require_shape("topk_indices", topk_indices, "B S T", B=spec.batch, S=spec.queries)
    return SlotsSpec(**_values(spec), slots=shape[2])


def check_topk_scores_grad(
    grad_scores: Any,
    q: Any,
    pooled_kv: Any,
    weights: Any,
    topk_indices: Any,
    compress_ratio: Any,
    softmax_scale: Any,
) -> SlotsSpec:
    """The Spec of the gradient of scores at given ids."""
    spec = check_topk_scores(
        q, pooled_kv, weights, topk_indices, compress_ratio, softmax_scale, grad_scores=grad_scores
    )
    require_dtype("grad_scores", grad_scores, FLOATS)
    require_shape("grad_scores", grad_scores, "B S T", B=spec.batch, S=spec.queries, T=spec.slots)
    return spec


def check_topk(
    q: Any,
    pooled_kv: Any,
    weights: Any,
    topk: Any,
    compress_ratio: Any,
    softmax_scale: Any,
    query_start: Any = 0,
    query_total_len: Any = None,
    order: Any = "id",
    return_scores: Any = False,
    documents: dict[str, Any] | None = None,
) -> TopkSpec:
    """The Spec of a selection from q, pooled_kv and weights; `documents` holds the four packing arrays or None."""
    given = {name: x for name, x in (documents or {}).items() if x is not None}
    if given and len(given) < len(documents or {}):
        absent = [name for name in documents or {} if name not in given]
        raise ValueError(
            f"{', '.join(absent)}: expected all of {', '.join(documents or {})} or none, got only {', '.join(given)}"
        )
    spec = check_scores(q, pooled_kv, weights, compress_ratio, softmax_scale, query_start, query_total_len, **given)
    for name, x in given.items():
        require_dtype(name, x, ID_DTYPES)
        if name.startswith("q_"):
            require_shape(name, x, "B S", B=spec.batch, S=spec.queries)
        else:
            require_shape(name, x, "B P", B=spec.batch, P=spec.entries)
    return TopkSpec(
        **_values(spec),
        topk=whole_number("topk", topk, maximum=MAX_ENTRIES),
        order=_order(order),
        return_scores=_flag("return_scores", return_scores),
        packed=bool(given),
    )


def check_select(
    scores: Any, topk: Any, order: Any = "id", return_scores: Any = False, compress_ratio: Any = None,
    query_start: Any = 0,
) -> SelectSpec:  # fmt: skip
    """The Spec of a selection over given scores, of every entry or, with compress_ratio, of the finished ones."""
    shared, causal = facts(scores=scores), compress_ratio is not None
    require_dtype("scores", scores, FLOATS)
    if len(scores.shape) < 1 + causal:
        wanted = "[..., S, P] with compress_ratio" if causal else "[..., P]"
        raise ValueError(f"scores: expected shape {wanted}, got {list(scores.shape)}")
    _limit_entries("scores", scores.shape[-1])
    start = whole_number("query_start", query_start, maximum=LARGEST_POSITION)
    if start and not causal:
        raise ValueError(f"query_start: expected 0 without compress_ratio, got {start}")
    ratio = whole_number("compress_ratio", compress_ratio, minimum=1, maximum=LARGEST_POSITION) if causal else 1
    return SelectSpec(
        shared.library, shared.xp, shared.device, leading=tuple(scores.shape[:-1]), entries=scores.shape[-1],
        compute=compute_dtype(shared.xp, scores), topk=whole_number("topk", topk, maximum=MAX_ENTRIES),
        order=_order(order), return_scores=_flag("return_scores", return_scores), causal=causal, compress_ratio=ratio,
        query_start=start,
    )  # fmt: skip


def check_extract(logits: Any, topk_indices: Any) -> ExtractSpec:
    """The Spec of a gather of scores."""
    shared = facts(logits=logits, topk_indices=topk_indices)
    require_dtype("logits", logits, FLOATS)
    require_dtype("topk_indices", topk_indices, ID_DTYPES)
    if len(logits.shape) < 1:
        raise ValueError(f"logits: expected shape [..., P], got {list(logits.shape)}")
    if tuple(topk_indices.shape[:-1]) != tuple(logits.shape[:-1]) or len(topk_indices.shape) != len(logits.shape):
        wanted = ", ".join(str(n) for n in (*logits.shape[:-1], "T"))
        raise ValueError(f"topk_indices: expected shape [{wanted}] like logits, got {list(topk_indices.shape)}")
    return ExtractSpec(
        library=shared.library,
        xp=shared.xp,
        device=shared.device,
        entries=logits.shape[-1],
        slots=topk_indices.shape[-1],
    )


def _values(spec: Spec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in _NAMES}  # vars() is what torch.compile cannot trace of a dataclass


def _limit_entries(name: str, entries: int) -> None:
    if entries > MAX_ENTRIES:
        raise ValueError(f"{name}: expected at most {MAX_ENTRIES} entries (ids are int32), got {entries}")


def _scale(value: Any, largest: float) -> float:
    scale = real_number("softmax_scale", value)
    if not (math.isfinite(scale) and abs(scale) <= largest):
        raise ValueError(f"softmax_scale: expected a finite number that the arithmetic can hold, got {scale}")
    return scale


def _order(order: Any) -> str:
    if not isinstance(order, str):
        raise TypeError(f"order: expected a string, got {type(order).__name__}")
    if order not in ORDERS:
        raise ValueError(f"order: expected {' or '.join(map(repr, ORDERS))}, got {order!r}")
    return order


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {type(value).__name__}")
    return bool(value)
