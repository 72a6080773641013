"""Planning in array-API terms: ids outside [0, kv_sequence) become -1 before anything is added to them."""

from __future__ import annotations

from typing import Any

from .._arrays import cast
from .contract import INT32_COUNT, PlanSpec
from .reference_blocks import blocks

INT32_MAX = INT32_COUNT - 1


def plan(topk_idxs: Any, spec: PlanSpec) -> tuple[Any, Any, Any]:
    """(indices, topk_length, valid_rows) of the spec's layout."""
    return _flat_plan(topk_idxs, spec) if spec.layout == "cudnn" else (_in_place(topk_idxs, spec), None, None)


def flatten(topk_idxs: Any, spec: PlanSpec) -> Any:
    """int64 [B*S, T]: row b's ids shifted by b*kv_sequence, -1 where masked."""
    xp = spec.xp
    out = _empty(spec, xp.int64, spec.slots)
    for b, s in _blocks(spec):
        ids, seen = _checked(topk_idxs[b, s, :], spec, xp.int64)
        out[b, s, :] = xp.where(seen, ids + _shift(spec, b, xp.int64), xp.full_like(ids, -1))
    return xp.reshape(out, (spec.batch * spec.queries, spec.slots))


def _in_place(topk_idxs: Any, spec: PlanSpec) -> Any:
    """int32 [B, S, T]: every slot where it was."""
    xp = spec.xp
    out = _empty(spec, xp.int32, spec.slots)
    for b, s in _blocks(spec):
        ids, seen = _checked(topk_idxs[b, s, :], spec, xp.int32)
        out[b, s, :] = xp.where(seen, ids, xp.full_like(ids, -1))
    return out


def _flat_plan(topk_idxs: Any, spec: PlanSpec) -> tuple[Any, Any, Any]:
    """int32 [B*S, 1, padded_slots] sorted with masked slots last, their counts, and the rows that have any."""
    xp = spec.xp
    rows = spec.batch * spec.queries
    out = _empty(spec, xp.int32, spec.padded_slots)
    lengths = xp.empty((spec.batch, spec.queries), dtype=xp.int32, device=spec.device)
    slot = xp.arange(spec.slots, dtype=xp.int32, device=spec.device)
    for b, s in _blocks(spec):
        ids, seen = _checked(topk_idxs[b, s, :], spec, xp.int32)
        length = xp.sum(cast(xp, seen, xp.int32), axis=-1, dtype=xp.int32)
        ids = xp.where(seen, ids + _shift(spec, b, xp.int32), xp.full_like(ids, INT32_MAX))
        if spec.slots:
            ids = xp.sort(ids, axis=-1)
        out[b, s, : spec.slots] = xp.where(slot < length[..., None], ids, xp.full_like(ids, -1))
        out[b, s, spec.slots :] = -1
        lengths[b, s] = length
    lengths = xp.reshape(lengths, (rows,))
    return xp.reshape(out, (rows, 1, spec.padded_slots)), lengths, _nonempty(lengths, spec)


def _nonempty(lengths: Any, spec: PlanSpec) -> Any:
    """Ids of the rows with a key, None when that is every row. Waits for the device unless the caller promised."""
    if spec.all_rows_nonempty:
        return None
    (ids,) = spec.xp.nonzero(lengths)
    return None if ids.shape[0] == lengths.shape[0] else cast(spec.xp, ids, spec.xp.int64)


def _blocks(spec: PlanSpec) -> Any:
    return blocks(spec, spec.batch, spec.queries, max(spec.slots, 1))


def _empty(spec: PlanSpec, dtype: Any, slots: int) -> Any:
    return spec.xp.empty((spec.batch, spec.queries, slots), dtype=dtype, device=spec.device)


def _checked(ids: Any, spec: PlanSpec, dtype: Any) -> tuple[Any, Any]:
    """(ids in the wanted dtype, slots that hold a key): the range is looked at before the cast, masked ids may wrap."""
    xp = spec.xp
    if ids.dtype not in (xp.int32, xp.int64):
        ids = cast(xp, ids, xp.int64)  # uint64 ids beyond int64 turn negative: masked, as they must be
    last = min(spec.kv_sequence, INT32_COUNT if ids.dtype == xp.int32 else spec.kv_sequence) - 1
    seen = (ids >= 0) & (ids <= last)
    return cast(xp, ids, dtype), seen


def _shift(spec: PlanSpec, b: slice, dtype: Any) -> Any:
    """First flat id of each row of a block, [rows, 1, 1]."""
    rows = spec.xp.arange(b.start, b.stop, dtype=spec.xp.int64, device=spec.device)
    return cast(spec.xp, rows * spec.kv_sequence, dtype)[:, None, None]
