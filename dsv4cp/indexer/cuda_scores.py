"""Indexer scores on the GPU: launch parameters of kernels_cu/indexer_scores.cu, the path for every device, and the
choice between it and Hopper's (cuda_sm90.py).

`scores` takes CuPy arrays; `launch_scores` takes operands by address and strides, for callers whose memory is not
CuPy's. Work is queued on CuPy's current stream, or the one given; nothing waits for it. Queries, entries and weights
are read where they lie; only rows that 16-byte copies cannot reach are copied.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import _kernels
from .._arrays import dtype_name, element_strides
from .._kernel_arguments import constants
from . import cuda_sm90
from .contract import SelectSpec, Spec

ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}
WEIGHT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
DIMS = (64, 128)
HEADS = (32, 64)  # of a stage: the smallest that holds all heads, else several stages of the largest
ENTRIES, THREADS = 128, 128  # of a block
BLOCK_QUERIES = (64, 32, 16, 8)  # of a block: the largest that gives every multiprocessor ENOUGH of them
ENOUGH = 8
LARGEST_STRIDE = 2**38  # elements; what the tensor copy engine can step over

forced_path: str | None = None  # "portable" makes every call take that kernel: for tests and measurements


class Operand(NamedTuple):
    """An array by address; strides in elements."""

    address: int
    dtype: str
    strides: tuple[int, ...]


class Limits(NamedTuple):
    """How many entries query i sees: before + (phase + i) // ratio, at most all; each fits 32 bits."""

    before: int
    phase: int
    ratio: int


def limits(spec: Spec | SelectSpec, causal: bool = True) -> Limits:
    """The causal rule (query_start + i + 1) // compress_ratio in numbers of 32 bits; every entry unless `causal`."""
    return _limits(spec.query_start, spec.compress_ratio, spec.entries, causal)


@functools.lru_cache(maxsize=1024)
def _limits(query_start: int, ratio: int, entries: int, causal: bool) -> Limits:
    before, phase = divmod(query_start + 1, ratio)
    if not causal or before >= entries:
        return Limits(entries, 0, 1)
    if ratio < 2**31:
        return Limits(before, phase, ratio)
    to_next = ratio - phase  # fewer than 2^31 queries meet one more entry at most
    return Limits(before, max(0, 2**31 - to_next), 2**31)


def _shared_bytes(dim: int, heads: int) -> int:
    return 2 * heads * 2 * dim + 2 * 4 * heads


def _defines(dtype: str, dim: int, heads: int) -> dict[str, Any]:
    shared = _shared_bytes(dim, heads)
    return {"ELEMENT": ELEMENTS[dtype], "INDEX_DIM": dim, "HEADS": heads, "SHARED_BYTES": shared}


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "indexer_scores.cu": [
        _defines(dtype, dim, heads)
        for dim in DIMS
        for heads in HEADS
        for dtype in ELEMENTS
        if dtype == "bfloat16" or (dim, heads) == (128, 64)
    ],
}


def scores(q: Any, pooled_kv: Any, weights: Any, spec: Spec) -> Any:
    """[B, S, P] float32 with the causal mask."""
    with cupy.cuda.Device(q.data.device_id):
        q, pooled_kv = readable(q), readable(pooled_kv)
        out = cupy.empty((spec.batch, spec.queries, spec.entries), np.float32)
        launch_scores(operand(q), operand(pooled_kv), operand(weights), out.data.ptr, spec, limits(spec))
        return out


def launch_scores(
    q: Operand,
    k: Operand,
    weights: Operand,
    out: int,
    spec: Spec,
    visible: Limits,
    *,
    fill: bool = True,
    stream: Any = None,
) -> None:
    """Queues out [B, S, P] float32 from operands on the current device.

    q and k must be `aligned`; out contiguous. fill: write -inf also where no query of a block of queries looks. stream:
    None for CuPy's current one, an object with `.ptr`, or a cudaStream_t as int.
    """
    if 0 in (spec.batch, spec.queries, spec.entries):
        return
    shared = {
        "weights": weights.address,
        "out": out,
        "scale": np.float32(spec.softmax_scale),
        "before": np.uint32(visible.before),
        "phase": np.uint32(visible.phase),
        "ratio": np.uint32(visible.ratio),
        **constants(
            ("w", "bsh", weights.strides), queries=spec.queries, heads=spec.heads, entries=spec.entries,
            weight_type=WEIGHT_TYPES[weights.dtype], fill=fill,
        ),
    }  # fmt: skip
    device = cupy.cuda.runtime.getDevice()
    if forced_path != "portable" and cuda_sm90.is_hopper(device):
        if cuda_sm90.launch(q, k, shared, spec, visible, device, stream):
            return
    rows = -(-spec.entries // ENTRIES) * spec.batch
    block_queries = _block_queries(rows, spec.queries, cuda_sm90.multiprocessors(device))
    heads = next((n for n in HEADS if n >= spec.heads), HEADS[-1])
    _kernels.launch(
        _kernel(q.dtype, spec.index_dim, heads),
        grid=rows * -(-spec.queries // block_queries),
        block=THREADS,
        shared_bytes=_shared_bytes(spec.index_dim, heads),
        stream=stream,
        q=q.address,
        k=k.address,
        **constants(("q", "bsh", q.strides), ("k", "bp", k.strides), block_queries=block_queries),
        **shared,
    )


def _block_queries(rows: int, queries: int, multiprocessors: int) -> int:
    """Queries of a block where there are `rows` blocks of entries."""
    wanted = ENOUGH * multiprocessors
    return next((n for n in BLOCK_QUERIES if rows * -(-queries // n) >= wanted), BLOCK_QUERIES[-1])


@functools.cache
def _kernel(dtype: str, dim: int, heads: int) -> _kernels.Kernel:
    return _kernels.kernel("indexer_scores.cu", "indexer_scores", defines=_defines(dtype, dim, heads))


# --- Memory ----------------------------------------------------------------------------------------------


def aligned(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether 16-byte copies and the tensor copy engine reach every row: strides in elements of 2 bytes."""
    return address % 16 == 0 and _even(shape, strides)


@functools.lru_cache(maxsize=1024)
def _even(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = [step for step, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1]
    return strides[-1] == 1 and all(0 < n < LARGEST_STRIDE and n % 8 == 0 for n in steps)


def readable(x: Any) -> Any:
    """x itself where the kernels can read it, else a contiguous copy."""
    return x if aligned(x.data.ptr, x.shape, element_strides(x)) else x.copy(order="C")


def operand(x: Any) -> Operand:
    return Operand(x.data.ptr, dtype_name(x), element_strides(x))
