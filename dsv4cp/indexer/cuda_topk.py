"""Top-k selection on the GPU: launch parameters of kernels_cu/indexer_topk.cu, over given scores or over those of
cuda_scores.py, a chunk of queries at a time.

Nothing waits for the device. A selection of more than MOST entries takes the kernel's scores and the reference's
selection.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import cupy
import numpy as np

from .. import _kernels
from . import cuda_scores, selection
from .contract import SelectSpec, TopkSpec
from .cuda_scores import Limits, Operand, operand, readable

FILE = "indexer_topk.cu"
ELEMENTS = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
MOST = 2048  # entries that the kernel can choose
BIN_BYTES = 2 * 4 * 2052  # two arrays of bins
CHUNK_BYTES = 192 * 2**20  # scores of the queries that are scored before they are selected from
Block = tuple[int, int, int]  # threads, vectors of four entries that a thread holds, blocks a multiprocessor
# Up to how many entries of a row: all of them in registers; in the last one longer rows are read once a pass.
BLOCKS: dict[int, Block] = {1024: (128, 2, 8), 2048: (128, 4, 7), 4096: (128, 8, 6), 2**31: (256, 8, 3)}
FEWEST_ROWS = 2048  # that are worth a launch of their own


def _defines(dtype: str, block: Block, documents: bool) -> dict[str, Any]:
    threads, vectors, blocks = block
    return {
        "ELEMENT": ELEMENTS[dtype],
        "THREADS": threads,
        "VECTORS": vectors,
        "BLOCKS": blocks * 3 // 4 if documents else blocks,  # documents want registers
        "DOCUMENTS": int(documents),
    }


VARIANTS: dict[str, list[dict[str, Any]]] = {
    FILE: [
        *(_defines(dtype, block, False) for block in BLOCKS.values() for dtype in ELEMENTS),
        *(_defines("float32", block, True) for block in BLOCKS.values()),
    ]
}


def select(scores: Any, spec: SelectSpec) -> Any:
    """ids [..., topk] of given scores [..., P] or, causal, [..., S, P], with values if asked."""
    if spec.topk > MOST:
        return selection.select(scores, spec)
    with cupy.cuda.Device(scores.data.device_id):
        shape = (*spec.leading, spec.topk)
        ids, values = _results(shape, spec.return_scores)
        if ids.size and spec.entries:
            rows = _three_axes(scores)
            launch_select(
                operand(rows), ids.data.ptr, 0 if values is None else values.data.ptr, rows.shape,
                topk=spec.topk, order=spec.order, visible=cuda_scores.limits(spec, causal=spec.causal),
            )  # fmt: skip
        elif ids.size:
            _fill_empty(ids, values)
    return ids if values is None else (ids, values)


def topk(q: Any, pooled_kv: Any, weights: Any, documents: tuple[Any, ...], spec: TopkSpec) -> Any:
    """ids [B, S, topk], with scores if asked: scores a chunk of queries, selects, forgets the scores."""
    with cupy.cuda.Device(q.data.device_id):
        ids, values = _results((spec.batch, spec.queries, spec.topk), spec.return_scores)
        if ids.size == 0 or spec.entries == 0:
            _fill_empty(ids, values)
            return ids if values is None else (ids, values)
        pooled_kv = readable(pooled_kv)
        if spec.packed:
            documents = tuple(cupy.ascontiguousarray(x, dtype=np.int64) for x in documents)
        slowly = spec.topk > MOST
        rows = selection.rows_at_once(4, spec.entries) if slowly else max(1, CHUNK_BYTES // (4 * spec.entries))
        batches, queries = chunk(spec, 1 if slowly else rows, rows)
        buffer = cupy.empty(batches * queries * spec.entries, np.float32)
        for b in range(0, spec.batch, batches):
            for i in range(0, spec.queries, queries):
                b1, i1 = min(b + batches, spec.batch), min(i + queries, spec.queries)
                part = replace(spec, batch=b1 - b, queries=i1 - i, query_start=spec.query_start + i)
                visible = cuda_scores.limits(part, causal=not spec.packed)
                cuda_scores.launch_scores(
                    operand(readable(q[b:b1, i:i1])), operand(pooled_kv[b:b1]), operand(weights[b:b1, i:i1]),
                    buffer.data.ptr, part, visible, fill=slowly,
                )  # fmt: skip
                at = [x[b:b1, i:i1] if n < 2 else x[b:b1] for n, x in enumerate(documents) if x is not None]
                table = buffer[: part.batch * part.queries * spec.entries].reshape(-1, part.queries, spec.entries)
                found = ids[b:b1, i:i1], None if values is None else values[b:b1, i:i1]
                if slowly:
                    _select_slowly(table[0], at, found, part)
                    continue
                launch_select(
                    operand(table), found[0].data.ptr, 0 if found[1] is None else found[1].data.ptr, table.shape,
                    topk=spec.topk, order=spec.order, visible=visible, documents=at, ratio=spec.compress_ratio,
                )  # fmt: skip
    return ids if values is None else (ids, values)


def chunk(spec: TopkSpec, most_batches: int, rows: int) -> tuple[int, int]:
    """(batch rows, queries) that are scored at once: whole batch rows, or queries of one."""
    if rows >= spec.queries:
        return max(1, min(rows // spec.queries, spec.batch, most_batches)), spec.queries
    return 1, rows // 64 * 64 or rows


def launch_select(
    scores: Operand, ids: int, values: int, shape: tuple[int, ...], *, topk: int, order: str, visible: Limits,
    documents: Any = (), ratio: int = 1, stream: Any = None,
) -> None:  # fmt: skip
    """Queues ids [A, R, topk] int32 and values (0: not wanted) of scores [A, R, P] on the current device.

    The last axis of the scores has stride 1; query r of each of the A rows sees what `visible` says, or with documents
    (q_segment_ids, q_local_positions, pooled_segment_ids, pooled_positions: int64 CuPy arrays with contiguous last
    axes) what they say.
    """
    batch, queries, entries = shape
    pointers = [x.data.ptr for x in documents] or [0] * 4
    sort_size = 1 << (topk - 1).bit_length() if order == "score" else 0
    for first, rows, block in pieces(batch, queries, entries, visible):
        _kernels.launch(
            _kernel(scores.dtype, block, bool(documents)),
            grid=batch * rows,
            block=block[0],
            shared_bytes=max(BIN_BYTES, 8 * sort_size),
            stream=stream,
            scores=scores.address,
            ids=ids,
            values=values,
            stride_b=np.int64(scores.strides[0]),
            stride_s=np.int64(scores.strides[1]),
            before=np.uint32(visible.before),
            phase=np.uint32(visible.phase),
            ratio=np.uint32(visible.ratio),
            queries=np.int32(queries),
            first=np.int32(first),
            rows=np.int32(rows),
            entries=np.int32(entries),
            topk=np.int32(topk),
            sort_size=np.int32(sort_size),
            q_segments=pointers[0],
            q_positions=pointers[1],
            entry_segments=pointers[2],
            entry_positions=pointers[3],
            q_stride=np.int64(documents[0].strides[0] // 8 if documents else 0),
            group=np.int64(ratio),
        )


def pieces(batch: int, queries: int, entries: int, visible: Limits) -> list[tuple[int, int, Block]]:
    """(first query, queries, block) of each launch: queries that see few entries get smaller blocks."""
    made: list[tuple[int, int, Block]] = []
    first = 0
    for most, block in BLOCKS.items():
        end = queries
        if entries > most:  # the first query that sees more
            end = min(queries, max(0, (most + 1 - visible.before) * visible.ratio - visible.phase))
        if end > first and (batch * (end - first) >= FEWEST_ROWS or end == queries):
            made.append((first, end - first, block))
            first = end
    if len(made) > 1 and batch * made[-1][1] < FEWEST_ROWS:  # joins the one before it
        (start, rows, _), (_, more, block) = made[-2:]
        made[-2:] = [(start, rows + more, block)]
    return made


def _select_slowly(scores: Any, documents: Any, found: tuple[Any, Any], spec: TopkSpec) -> None:
    """The reference's selection over scores [S, P] of one batch row."""
    if spec.packed:
        sees = selection.Packed(spec, *(x[0] for x in documents))
        scores = cupy.where(sees.mask(0, spec.queries, 0, spec.entries), scores, np.float32(-np.inf))
    best, values = selection.best_of_rows(spec.xp, scores, spec.topk, spec.order)
    found[0][0] = best
    if found[1] is not None:
        found[1][0] = values


def _results(shape: tuple[int, ...], return_scores: bool) -> tuple[Any, Any]:
    return cupy.empty(shape, np.int32), cupy.empty(shape, np.float32) if return_scores else None


def _fill_empty(ids: Any, values: Any) -> None:
    ids.fill(-1)
    if values is not None:
        values.fill(-np.inf)


def _three_axes(scores: Any) -> Any:
    """scores as [A, R, P] with neighbours side by side; copies only where strides forbid it."""
    if scores.ndim > 3:
        scores = scores.reshape(-1, *scores.shape[-2:])
    scores = scores[(None,) * (3 - scores.ndim)]
    return scores if scores.strides[-1] == scores.itemsize or scores.shape[-1] == 1 else cupy.ascontiguousarray(scores)


@functools.cache
def _kernel(dtype: str, block: Block, documents: bool) -> _kernels.Kernel:
    return _kernels.kernel(FILE, "indexer_topk", defines=_defines(dtype, block, documents))
