"""Index building and planning on the GPU: launch parameters for the kernels in numba_cuda_build and numba_cuda_plan.

Everything runs on CuPy's current stream of the arrays' device. The host waits once, for the number of nonempty rows
of a cudnn plan, and not at all where the caller promised that every row is nonempty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from .. import _numba
from .._arrays import dtype_name
from . import reference
from .contract import PlanSpec, Spec
from .numba_cuda_build import (
    DOCUMENTS,
    ENTRY_DOCUMENTS,
    GIVEN,
    IMAGES,
    MASK,
    POSITIONS,
    SPAN_THREADS,
    SPAN_TILE,
    build_rows,
    span_scan,
    span_totals,
)
from .numba_cuda_plan import PACKED, THREADS, UNROLL, compact_rows, compact_wide_rows, shift_ids
from .reference_rows import _document_stop, bounded

# Rows are a warp's work where there are enough of them to fill a GPU, else a block's.
MANY_ROWS = 8192
WIDEST = 2**30  # slots: int32 arithmetic inside a row ends here
MOST_BLOCKS = 2**16  # a multiple of what any GPU runs at once; kernels stride over the rest

# Bits of a float, as an integer of its size: (integer type, bits of +inf).
FLOAT_BITS: dict[str, tuple[Any, int]] = {
    "float16": (np.int16, 0x7C00),
    "bfloat16": (np.int16, 0x7F80),
    "float32": (np.int32, 0x7F800000),
    "float64": (np.int64, 0x7FF0000000000000),
}


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
    """Ids [B, S, width]."""
    out = _numba.empty((spec.batch, spec.queries, spec.width), spec.dtype, spec.device)
    if out.size == 0:
        return out
    device, rows = spec.device, spec.batch * spec.queries
    positions = topk = segments = locals_ = entry_segments = entry_positions = stops = _numba.absent(2, device)
    mask = spans = _numba.absent(3, device)
    modes, magnitude, infinity = 0, 0, 0
    if spec.has_positions:
        modes |= POSITIONS
        shared = 1 if spec.positions_shared else spec.batch
        positions = _int64(q_positions).reshape(shared, spec.queries)
    if spec.has_mask and spec.keys > 0:
        modes |= MASK
        bits, infinity = FLOAT_BITS[dtype_name(attention_mask)]
        mask = _numba.own(attention_mask)[:, 0].view(bits)
        magnitude = int(np.iinfo(bits).max)
    if spec.given_topk and spec.compressed_width > 0:
        modes |= GIVEN
        topk = _ids(compressed_topk).reshape(rows, spec.compressed_width)
    if spec.documents:
        modes |= DOCUMENTS
        segments, locals_ = _int64(q_segment_ids), _int64(q_local_positions)
    if spec.pooled_documents:
        modes |= ENTRY_DOCUMENTS
        entry_segments, entry_positions = _int64(pooled_segment_ids), _int64(pooled_positions)
    if spec.images and spec.image_keys > 0:
        modes |= IMAGES
        spans = _spans(spec, vision_token_types, device)
        if spec.documents:
            stops = _stops(spec, positions, segments, locals_, device)
    lanes = 32 if rows >= MANY_ROWS else 128
    block = _block(lanes, 256 // lanes)
    _numba.launch(
        build_rows,
        (-(-rows // block[1]),),
        block,
        out.reshape(rows, spec.width),
        *(positions, mask, topk, segments, locals_, entry_segments, entry_positions, spans, stops),
        *(modes, spec.queries, spec.keys, spec.raw_keys, spec.window, spec.raw_width, spec.pooled, spec.ratio),
        *(spec.image_tokens, spec.image_keys, magnitude, infinity),
    )
    return out


def plan(topk_idxs: Any, spec: PlanSpec) -> tuple[Any, Any, Any]:
    """(indices, topk_length, valid_rows) of the Spec's layout."""
    indices, lengths = lay_out(topk_idxs, spec)
    waits = lengths is not None and not spec.all_rows_nonempty
    return indices, lengths, nonempty(lengths, spec.device) if waits else None


def lay_out(topk_idxs: Any, spec: PlanSpec) -> tuple[Any, Any]:
    """(indices, topk_length), for which nothing waits."""
    if spec.layout != "cudnn":
        return _shifted(topk_idxs, spec, (spec.batch, spec.queries, spec.slots), np.int32, 0), None
    if spec.slots >= WIDEST:
        with _numba.on(spec.device):
            indices, lengths, _ = reference.plan(topk_idxs, replace(spec, all_rows_nonempty=True))
        return indices, lengths
    rows = spec.batch * spec.queries
    out = _numba.empty((rows, 1, spec.padded_slots), np.int32, spec.device)
    lengths = _numba.empty((rows,), np.int32, spec.device)
    if rows and spec.slots:
        ids = _ids(topk_idxs).reshape(rows, spec.slots)
        kernel = compact_rows if spec.slots <= PACKED else compact_wide_rows
        flat = out.reshape(rows, spec.padded_slots)
        grid, block = (min(rows, MOST_BLOCKS),), _block(THREADS)
        _numba.launch(kernel, grid, block, ids, flat, lengths, spec.kv_sequence, spec.queries)
    else:
        with _numba.on(spec.device):
            out.fill(-1)
            lengths.fill(0)
    return out, lengths


def nonempty(lengths: Any, device: Any) -> Any:
    """valid_rows, None where every row has a key."""
    with _numba.on(device):
        valid_rows = lengths.nonzero()[0].astype(np.int64, copy=False)  # the host waits here, for its size
    return None if valid_rows.size == lengths.size else valid_rows


def flatten(topk_idxs: Any, spec: PlanSpec) -> Any:
    """Flat ids, int64 [B*S, T]."""
    return _shifted(topk_idxs, spec, (spec.batch * spec.queries, spec.slots), np.int64, spec.kv_sequence)


def _shifted(topk_idxs: Any, spec: PlanSpec, shape: tuple[int, ...], dtype: Any, step: int) -> Any:
    """ids + b*step where inside [0, kv_sequence), else -1: B*S*T of the dtype in this shape."""
    size = spec.queries * spec.slots
    out = _numba.empty(shape, dtype, spec.device)
    if spec.batch and size:
        block = _block(256)
        grid = (-(-size // (UNROLL * block[0])), min(spec.batch, 2**15))
        ids, flat = _ids(topk_idxs).reshape(spec.batch, size), out.reshape(spec.batch, size)
        _numba.launch(shift_ids, grid, block, ids, flat, spec.kv_sequence, step)
    return out


def _block(*sizes: int) -> tuple[int, ...]:
    """The block's size; in the simulator, which runs a Python thread for each thread, a small one."""
    if not _numba.SIMULATED:
        return sizes
    return (32,) if len(sizes) == 1 else (16, 2)


def _int64(x: Any) -> Any:
    """Positions or document ids as the kernels read them: small arrays, so a cast costs less than another kernel."""
    return _numba.contiguous(_numba.own(x), np.dtype(np.int64))


def _ids(x: Any) -> Any:
    """Ids row-major as int32 or int64: large arrays, read as they are where possible."""
    x = _numba.own(x)
    if x.dtype == np.uint64:  # ids beyond int64 turn negative: masked, as they must be
        return _numba.contiguous(x).view(np.int64)
    return _numba.contiguous(x, None if x.dtype in (np.int32, np.int64) else np.dtype(np.int64))


def _spans(spec: Spec, vision_token_types: Any, device: Any) -> Any:
    """Image spans of every key, int64 [3, B, image_keys], as image_reach reads them."""
    types = _int64(vision_token_types).reshape(spec.batch, spec.image_keys)
    count = -(-spec.image_keys // SPAN_TILE)
    tiles = _numba.empty((3, spec.batch, count), np.int64, device)
    spans = _numba.empty((3, spec.batch, spec.image_keys), np.int64, device)
    batches, block = min(spec.batch, 2**15), _block(SPAN_THREADS)
    _numba.launch(span_totals, (-(-count // block[0]), batches), block, types, tiles)
    _numba.launch(span_scan, (min(count, MOST_BLOCKS), batches), block, types, tiles, spans)
    return spans


def _stops(spec: Spec, positions: Any, segments: Any, locals_: Any, device: Any) -> Any:
    """First position behind each query's document, int64 [B, S]: [B, S] arithmetic, left to the reference."""
    import array_api_compat as compat

    xp = compat.array_namespace(segments)
    with _numba.on(device):
        p = xp.arange(spec.queries, dtype=xp.int64)[None, :]
        if spec.has_positions:
            p = bounded(xp, positions)
        p = xp.broadcast_to(p, segments.shape)
        document = p - bounded(xp, locals_)
        stops = _document_stop(replace(spec, xp=xp, device=device), p, document, segments)
        return _numba.contiguous(stops, np.dtype(np.int64))
