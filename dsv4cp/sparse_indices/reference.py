"""Index building in array-API terms: blocks of queries, each slot computed once and written once.

The result is allocated here and filled block by block, so that temporaries stay bounded whatever S is;
the equations themselves write nothing in place.
"""

from __future__ import annotations

from typing import Any

from .._arrays import cast
from .contract import INT32_COUNT, Spec
from .reference_blocks import blocks
from .reference_plan import flatten, plan
from .reference_rows import Rows, bounded, query_rows

__all__ = ["build", "flatten", "plan"]


def build(
    spec: Spec,
    *,
    attention_mask: Any = None,
    compressed_topk: Any = None,
    q_positions: Any = None,
    vision_token_types: Any = None,
    q_segment_ids: Any = None,
    q_local_positions: Any = None,
    pooled_segment_ids: Any = None,
    pooled_positions: Any = None,
) -> Any:
    """Ids [B, S, width]: raw slots, then compressed slots."""
    xp = spec.xp
    shape = (spec.batch, spec.queries, spec.width)
    out = xp.empty(shape, dtype=getattr(xp, spec.dtype), device=spec.device)
    if 0 in shape:
        return out
    rows = query_rows(spec, q_positions, vision_token_types, q_segment_ids, q_local_positions)
    entries = None
    if spec.pooled_documents:
        entries = (cast(xp, pooled_segment_ids, xp.int64), bounded(xp, pooled_positions))
    ids_dtype = _ids_dtype(spec)
    first, last = cast(xp, rows.first, ids_dtype), cast(xp, rows.last, ids_dtype)
    offsets = xp.arange(spec.raw_width, dtype=ids_dtype, device=spec.device)
    for b, s in blocks(spec, *shape):
        raw = _interval(spec, _rows_of(first, b, s), _rows_of(last, b, s), offsets)
        out[b, s, : spec.raw_width] = _unmasked(spec, raw, attention_mask, b, s)
        if spec.compressed_width:
            block = Rows(*(None if x is None else _rows_of(x, b, s) for x in rows))
            given = compressed_topk[b, s, :] if spec.given_topk else None
            compressed = _compressed(spec, block, given, entries and tuple(x[b, :] for x in entries), ids_dtype)
            out[b, s, spec.raw_width :] = _unmasked(spec, compressed, attention_mask, b, s)
    return out


def _ids_dtype(spec: Spec) -> Any:
    """int32 where every id and every sum on the way to one fits, else int64."""
    largest = max(spec.keys + spec.raw_width, spec.raw_keys + spec.pooled)
    return spec.xp.int32 if largest < INT32_COUNT else spec.xp.int64


def _rows_of(x: Any, b: slice, s: slice) -> Any:
    """A block of [B, S], or of [1, S] that stands for all rows."""
    return x[:, s] if x.shape[0] == 1 else x[b, s]


def _interval(spec: Spec, first: Any, last: Any, offsets: Any) -> Any:
    """first, first + 1, ... with -1 beyond last."""
    ids = first[..., None] + offsets
    return spec.xp.where(ids <= last[..., None], ids, spec.xp.full_like(ids, -1))


def _compressed(spec: Spec, rows: Rows, given: Any, entries: Any, ids_dtype: Any) -> Any:
    """Compressed slots of a block, shifted by raw_keys: the given entries, or every finished one."""
    xp = spec.xp
    count = max(0, spec.keys - spec.raw_keys)  # entries that exist in [0, keys)
    if given is None:
        entry = xp.arange(spec.pooled, dtype=ids_dtype, device=spec.device)
        visible = xp.clip(rows.groups, 0, min(spec.pooled, count))
        seen = entry < cast(xp, visible, ids_dtype)[..., None]
        if entries is not None:
            segments, positions = entries[0][:, None, :], entries[1][:, None, :]
            seen = (entry < count) & _same_document(rows, segments, positions)
        entry = entry + min(spec.raw_keys, spec.keys)
    else:
        given = given if given.dtype in (xp.int32, xp.int64) else cast(xp, given, xp.int64)
        count = min(count, spec.pooled) if entries is not None else count
        seen = (given >= 0) & (given <= min(count, INT32_COUNT if given.dtype == xp.int32 else count) - 1)
        entry = xp.where(seen, given, xp.zeros_like(given))
        if entries is not None:
            at = cast(xp, xp.reshape(entry, (entry.shape[0], -1)), xp.int64)
            segments, positions = (xp.reshape(xp.take_along_axis(x, at, axis=1), entry.shape) for x in entries)
            seen = seen & _same_document(rows, segments, positions)
        elif rows.segment is not None:
            seen = seen & (rows.segment != 0)[..., None]
        entry = cast(xp, entry, ids_dtype) + min(spec.raw_keys, spec.keys)
    return xp.where(seen, entry, xp.full_like(entry, -1))


def _same_document(rows: Rows, segments: Any, positions: Any) -> Any:
    """Entry and query share a document that is not padding, and the entry's group of tokens is finished."""
    segment = rows.segment[..., None]
    return (segments == segment) & (segment != 0) & (positions < rows.groups[..., None])


def _unmasked(spec: Spec, ids: Any, attention_mask: Any, b: slice, s: slice) -> Any:
    """ids with -1 where the additive mask is negative."""
    xp = spec.xp
    if not spec.has_mask or spec.keys == 0 or ids.shape[-1] == 0:
        return ids
    mask = attention_mask[slice(None) if spec.mask_shared else b, 0, s, : spec.keys]
    batch = max(mask.shape[0], ids.shape[0])
    mask, ids = (xp.broadcast_to(x, (batch, *x.shape[1:])) for x in (mask, ids))
    at = cast(xp, xp.where(ids < 0, xp.zeros_like(ids), ids), xp.int64)
    values = xp.take_along_axis(mask, at, axis=-1)
    hidden = xp.where(xp.isnan(values), xp.zeros_like(values), values) < 0  # ml_dtypes warns where NaN is compared
    return xp.where(hidden, xp.full_like(ids, -1), ids)
