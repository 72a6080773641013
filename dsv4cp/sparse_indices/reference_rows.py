"""Which raw keys each query sees, as one interval: window, packed document and image span in closed form.

Everything here is [B, S] or [B, keys of the row]; nothing has a slot axis.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .._arrays import cast
from .contract import LARGEST_SIZE, Spec

IMAGE_START, IMAGE_END = 0, 4


class Rows(NamedTuple):
    """Per query, [B, S] or [1, S] where all rows agree. int64."""

    first: Any  # first raw key, in [0, keys]
    last: Any  # last raw key, in [-1, keys - 1]; below first: none
    groups: Any  # compressed entries whose position is below this are finished, (position + 1) // R
    segment: Any  # document of the query, 0 is padding; None without documents


def query_rows(
    spec: Spec, q_positions: Any, vision_token_types: Any, q_segment_ids: Any, q_local_positions: Any
) -> Rows:
    """The interval [first, last] of raw keys, and what decides the compressed part."""
    xp = spec.xp
    p = _positions(spec, q_positions)
    local, segment = p, None
    document = xp.zeros_like(p)
    if spec.documents:
        local = bounded(xp, q_local_positions)
        segment = cast(xp, q_segment_ids, xp.int64)
        document = p - local  # global position of the document's first token
    left = right = xp.zeros_like(p)
    if spec.images:
        left, right = _image_reach(spec, vision_token_types, p, document, segment)

    before = spec.window - 1
    first = p - before
    if spec.images:
        first = first - xp.clip(left - before, 0, None)
    last = p + right
    if spec.documents:
        first = xp.maximum(first, document)
        last = xp.where(segment == 0, xp.full_like(last, -1), last)

    groups = xp.zeros_like(p) if spec.ratio == 0 else (local + 1) // spec.ratio
    return Rows(xp.clip(first, 0, spec.keys), xp.clip(last, -1, spec.keys - 1), groups, segment)


def bounded(xp: Any, x: Any) -> Any:
    """x as int64 in [-LARGEST_SIZE, LARGEST_SIZE]: sums of two cannot overflow."""
    return xp.clip(cast(xp, x, xp.int64), -LARGEST_SIZE, LARGEST_SIZE)


def _positions(spec: Spec, q_positions: Any) -> Any:
    """Global position of every query, [1, S] or [B, S]."""
    xp = spec.xp
    if not spec.has_positions:
        return xp.arange(spec.queries, dtype=xp.int64, device=spec.device)[None, :]
    return bounded(xp, xp.reshape(q_positions, (1 if spec.positions_shared else spec.batch, spec.queries)))


# --- Image spans ---------------------------------------------------------------------------------------


def _image_reach(spec: Spec, types: Any, p: Any, document: Any, segment: Any) -> tuple[Any, Any]:
    """How far left and right of itself a query sees because it stands in an image span; 0, 0 for text.

    valid = (starts seen > ends seen) or is_end
    left  = min((p - last start at or before p) * valid, max_image_tokens - 1)
    right = min((first end at or after p - p) * valid, max_image_tokens)

    all of it counted inside the query's document, whose first key stands for a missing start and
    whose end (exclusive) for a missing end.
    """
    xp, n = spec.xp, spec.image_keys
    shape = (spec.batch, spec.queries)
    p, document = xp.broadcast_to(p, shape), xp.broadcast_to(document, shape)
    if n == 0:
        return xp.zeros_like(p), xp.zeros_like(p)
    types = xp.reshape(types, (spec.batch, n))
    is_start, is_end = types == IMAGE_START, types == IMAGE_END
    key = xp.arange(n, dtype=xp.int64, device=spec.device)[None, :]
    excess = xp.cumulative_sum(cast(xp, is_start, xp.int64) - cast(xp, is_end, xp.int64), axis=1)
    last_start = running_max(xp, xp.where(is_start, key, xp.zeros_like(key)))
    next_end = following_min(xp, xp.where(is_end, key, xp.full_like(key, n)))

    at = xp.clip(p, 0, n - 1)
    inside = (p >= 0) & (p < n) & (document <= p)
    seen, start, end = _pick(xp, excess, at), _pick(xp, last_start, at), _pick(xp, next_end, at)
    if spec.documents:
        before = xp.clip(document - 1, -1, n - 1)
        seen = seen - xp.where(before >= 0, _pick(xp, excess, xp.clip(before, 0, None)), xp.zeros_like(seen))
        start = xp.maximum(start, document)
        stop = xp.clip(_document_stop(spec, p, document, segment), None, n)
        end = xp.minimum(end, stop)
    valid = inside & ((seen > 0) | (end == p))
    left = xp.where(valid, p - start, xp.zeros_like(p))
    right = xp.where(valid, end - p, xp.zeros_like(p))
    left, right = xp.clip(left, None, spec.image_tokens - 1), xp.clip(right, None, spec.image_tokens)
    if spec.documents:  # an unclosed span reaches up to its document's last key, not to the next one's first
        right = xp.where(valid, xp.minimum(right, stop - 1 - p), right)
    return left, right


def _document_stop(spec: Spec, p: Any, document: Any, segment: Any) -> Any:
    """First position after each query that belongs to another document, as far as this call's queries show it.

    With q_positions (context parallel) that is the beginning of the next document that has a query here.
    """
    xp = spec.xp
    if spec.has_positions:
        order = xp.argsort(p, axis=1)
        p, document, segment = _pick(xp, p, order), _pick(xp, document, order), _pick(xp, segment, order)
    index = xp.arange(spec.queries, dtype=xp.int64, device=spec.device)[None, :]
    changes = (segment[:, 1:] != segment[:, :-1]) | (document[:, 1:] != document[:, :-1])
    end = xp.full((spec.batch, 1), spec.queries, dtype=xp.int64, device=spec.device)
    other = xp.where(changes, index[:, 1:], xp.full_like(index[:, 1:], spec.queries))
    other = following_min(xp, xp.concat([other, end], axis=1))  # the next query of another document
    at = xp.clip(other, None, spec.queries - 1)
    starts, known = _pick(xp, document, at), _pick(xp, segment, at) != 0  # padding has no local positions
    stop = xp.where(known & (starts > p), starts, _pick(xp, p, at))
    stop = xp.where(other < spec.queries, stop, xp.full_like(stop, LARGEST_SIZE))
    return _pick(xp, stop, xp.argsort(order, axis=1)) if spec.has_positions else stop


def _pick(xp: Any, x: Any, at: Any) -> Any:
    """x[b, at[b, i]]."""
    return xp.take_along_axis(x, at, axis=1)


def running_max(xp: Any, x: Any) -> Any:
    """Maximum of x[:, :i + 1], by doubling: the array API has no cumulative maximum."""
    step = 1
    while step < x.shape[1]:
        x = xp.concat([x[:, :step], xp.maximum(x[:, step:], x[:, :-step])], axis=1)
        step *= 2
    return x


def following_min(xp: Any, x: Any) -> Any:
    """Minimum of x[:, i:]."""
    step = 1
    while step < x.shape[1]:
        x = xp.concat([xp.minimum(x[:, :-step], x[:, step:]), x[:, -step:]], axis=1)
        step *= 2
    return x
