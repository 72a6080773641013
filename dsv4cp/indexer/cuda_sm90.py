"""Launch parameters of kernels_cu/indexer_scores_sm90.cu: Hopper's path of the indexer scores."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import _kernels
from .._tensor_maps import tensor_map
from .contract import Spec

FILE, FUNCTION = "indexer_scores_sm90.cu", "indexer_scores_sm90"
ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}
DIMS = (64, 128)
HEADS = (32, 64, 128)  # of a query's product; the smallest that holds all
GROUPS, TILES, STAGES = 3, 2, 3
ENTRIES, THREADS, ROWS = 64 * GROUPS * TILES, 128 * (GROUPS + 1), 128  # of a block; (query, head) rows of a stage
BLOCK_QUERIES = (64, 32, 16, 8)  # of an item: the largest that gives every multiprocessor ENOUGH items
ENOUGH = 48


def _shared_bytes(dim: int, heads: int) -> int:
    """The layout at the head of the kernel: entries, stages of queries; weights and limits, the item, barriers."""
    queries = ROWS // heads
    rows = 2 * dim * (ENTRIES + STAGES * ROWS)
    item = -(-(rows + STAGES * queries * (16 * (heads // 4 + 4) + 4)) // 16) * 16
    return item + 16 + 8 * (2 + 2 * STAGES)


def _defines(dtype: str, dim: int, heads: int) -> dict[str, Any]:
    shared = _shared_bytes(dim, heads)
    return {"ELEMENT": ELEMENTS[dtype], "INDEX_DIM": dim, "HEADS": heads, "SHARED_BYTES": shared}


# For the tests that compile: every layout, and the one tuned for with the other element.
VARIANTS = {
    FILE: [
        _defines(dtype, dim, heads)
        for dim in DIMS
        for heads in HEADS
        for dtype in ELEMENTS
        if dtype == "bfloat16" or (dim, heads) == (128, 64)
    ]
}


def launch(q: Any, k: Any, shared: dict[str, Any], spec: Spec, visible: Any, device: int, stream: Any) -> bool:
    """Queues the call; False where the driver cannot describe the strides, and nothing was queued.

    `shared` are the arguments that the portable kernel takes too (cuda.launch_scores).
    """
    heads = next(n for n in HEADS if n >= spec.heads)
    q_map = tensor_map(
        q.address,
        (spec.index_dim, spec.heads, spec.queries, spec.batch),
        (q.strides[2], q.strides[1], q.strides[0]),
        (64, heads, ROWS // heads, 1),
        q.dtype,
    )
    k_map = tensor_map(
        k.address,
        (spec.index_dim, spec.entries, spec.batch, 1),
        (k.strides[1], k.strides[0], 8),
        (64, 64, 1, 1),
        k.dtype,
    )
    if q_map is None or k_map is None:
        return False
    blocks = multiprocessors(device)
    kernel, shared_bytes = _kernel(q.dtype, spec.index_dim, heads)
    _kernels.launch(
        kernel,
        grid=blocks,
        block=THREADS,
        shared_bytes=shared_bytes,
        stream=stream,
        q_map=q_map,
        k_map=k_map,
        batch=np.int32(spec.batch),
        block_queries=_block_queries(spec.batch, spec.queries, spec.entries, visible, blocks),
        **shared,
    )
    return True


@functools.lru_cache(maxsize=1024)
def _block_queries(batch: int, queries: int, entries: int, visible: Any, blocks: int) -> np.int32:
    """Queries of an item. Few queries make more, smaller items, many read the entries less often."""
    # Entry blocks that a query meets on average; the last query meets most of them.
    most = min(entries, visible.before + (visible.phase + queries - 1) // visible.ratio)
    rows = (min(entries, visible.before) + most) / (2 * ENTRIES) + 0.5
    pieces = {n: batch * -(-queries // n) * rows for n in BLOCK_QUERIES}
    return np.int32(next((n for n in BLOCK_QUERIES if pieces[n] >= ENOUGH * blocks), BLOCK_QUERIES[-1]))


@functools.cache
def _kernel(dtype: str, dim: int, heads: int) -> tuple[_kernels.Kernel, int]:
    """The kernel and its bytes of shared memory."""
    kernel = _kernels.kernel(FILE, FUNCTION, defines=_defines(dtype, dim, heads), arch="sm_90a")
    return kernel, _shared_bytes(dim, heads)


@functools.cache
def multiprocessors(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@functools.cache
def is_hopper(device: int) -> bool:
    import cupy

    return cupy.cuda.Device(device).compute_capability == "90"
