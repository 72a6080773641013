"""Launches of the indexer's gradient kernels and of the scores of given ids: kernels_cu/indexer_grad_*.cu and
indexer_gather_scores.cu. Operands come by address and strides, for callers whose memory is not CuPy's (cuda_grad.py has
those whose is); work is queued on CuPy's current stream, or the one given; nothing waits for it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cupy
import numpy as np

from .. import _kernels
from . import contract_grad
from .contract import SlotsSpec, Spec

ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}
KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
DIMS, HEADS = contract_grad.KERNEL_DIMS, (64, 128)  # of a block of indexer_grad_query.cu
HOPPER_DIM, HOPPER_HEADS, HOPPER_SHARED = 128, 64, (101632, 103680)  # of indexer_grad_query_sm90.cu, by FIXED
TILE, LIST, THREADS = 64, 1024, 128
MOST_ROWS = 65535  # batch rows of a launch: a grid's second and third axes
PARTS, PART_QUERIES, PARTS_BYTES = 16, 64, 256 * 2**20  # of the dense gradient of keys; bytes of a launch's partial sums

PATHS = ("hopper", "portable")
forced_path: str | None = None  # "portable" makes every call take those kernels: for tests and measurements


class Operand(NamedTuple):
    """An array by address; strides in elements."""

    address: int
    dtype: str
    strides: tuple[int, ...]


def _query_shared(dim: int, heads: int) -> int:
    """The layout at the head of indexer_grad_query.cu: q, two stages of keys, on g, w, lists, bits, parts."""
    bits = 512 * (heads // 64) if heads > 64 else 0
    return 2 * dim * (heads + 2 * TILE) + 2 * TILE * heads + 4 * heads + 8 * LIST + bits + 16 * heads


def _scores_shared(dim: int, blocks: int) -> int:
    return blocks * 64 * 2 * dim + 4 * 2 * 32 * 2 * dim + blocks * 256


def _entry_shared(dim: int) -> int:
    return 2 * 64 * 2 * dim + 2 * 256 + 8


def _query_defines(dtype: str, dim: int, heads: int, fixed: bool) -> dict[str, Any]:
    return {
        "ELEMENT": ELEMENTS[dtype], "INDEX_DIM": dim, "HEADS": heads, "FIXED": int(fixed),
        "SHARED_BYTES": _query_shared(dim, heads),
    }  # fmt: skip


def _hopper_defines(dtype: str, fixed: bool, want_q: bool, want_k: bool) -> dict[str, Any]:
    return {
        "ELEMENT": ELEMENTS[dtype], "FIXED": int(fixed), "WANT_Q": int(want_q), "WANT_K": int(want_k),
        "SHARED_BYTES": HOPPER_SHARED[fixed],
    }  # fmt: skip


def _entry_defines(dtype: str, dim: int) -> dict[str, Any]:
    return {"ELEMENT": ELEMENTS[dtype], "INDEX_DIM": dim, "SHARED_BYTES": _entry_shared(dim)}


# For the tests that compile: every layout, and the first one with the other element, which changes no layout.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "indexer_grad_query.cu": [
        _query_defines(dtype, dim, heads, fixed)
        for dtype in ELEMENTS
        for dim in DIMS
        for heads in HEADS
        for fixed in (False, True)
        if dtype == "bfloat16" or (dim == 128 and heads == 64)
    ],
    "indexer_grad_query_sm90.cu": [
        _hopper_defines(dtype, fixed, want_q, want_k)
        for dtype in ELEMENTS
        for fixed in (False, True)
        for want_q, want_k in ((True, True), (True, False), (False, True))
        if (want_k or not fixed) and (dtype == "bfloat16" or (want_q and want_k))
    ],
    "indexer_grad_entry.cu": [_entry_defines(dtype, dim) for dtype in ELEMENTS for dim in DIMS],
    "indexer_gather_scores.cu": [{"ELEMENT": e, "INDEX_DIM": dim} for e in ELEMENTS.values() for dim in DIMS],
    "indexer_grad_finish.cu": [{"ELEMENT": element} for element in ELEMENTS.values()],
}


# --- Passes --------------------------------------------------------------------------------------------


class Passes(NamedTuple):
    """How the sums over queries are held: `rows` batch rows by `keys` key rows at a time."""

    deterministic: bool
    rows: int
    keys: int
    workspace_bytes: int


def plan(spec: SlotsSpec, deterministic: bool, cap: int) -> Passes:
    """The passes of topk_scores_grad. "atomic": float32 sums of all keys, which the cap does not count. "deterministic":
    8 bytes a column and a bound per key row, within the cap: whole batch rows, or ranges of one row's keys."""
    rows = min(spec.batch, MOST_ROWS)
    if not deterministic:
        return Passes(False, rows, spec.entries, 4 * rows * spec.entries * spec.index_dim)
    each = 8 * spec.index_dim + 4
    fits = cap // each
    if rows and spec.entries:
        contract_grad.check_workspace(cap, each)
    keys = min(spec.entries, max(fits, 1))
    rows = min(rows, max(1, fits // max(keys, 1)))
    return Passes(True, rows, keys, rows * keys * each)


def _dense_parts(spec: Spec) -> tuple[int, int]:
    """(parts, queries of each) that the dense gradient of keys is summed in; the batch does not change them."""
    parts = max(1, min(PARTS, spec.queries // PART_QUERIES, PARTS_BYTES // max(1, 4 * spec.entries * spec.index_dim)))
    return parts, max(1, -(-spec.queries // parts))


def _dense_rows(spec: Spec) -> int:
    each = 4 * _dense_parts(spec)[0] * spec.entries * spec.index_dim
    return max(1, min(spec.batch, MOST_ROWS, PARTS_BYTES // max(1, each)))


def dense_workspace_bytes(spec: Spec) -> int:
    """Partial sums of the dense gradient of keys: of as many batch rows as 256 MiB take, but at least one part of one."""
    return 4 * _dense_rows(spec) * _dense_parts(spec)[0] * spec.entries * spec.index_dim


# --- Launches ------------------------------------------------------------------------------------------
# q, k: aligned (see `aligned`), one dtype; weights and ids contiguous; results contiguous addresses. stream: None for
# CuPy's current one, an object with `.ptr`, or a cudaStream_t as int. The current device is that of the arrays.


def launch_topk_scores(
    q: Operand, k: Operand, weights: Operand, ids: Operand, out: int, spec: SlotsSpec, *, stream: Any = None
) -> None:
    """Queues the scores at the ids."""
    blocks = -(-spec.heads // 64)
    for first in range(0, spec.batch, MOST_ROWS):
        q_first, k_first = _from(q, first), _from(k, first)
        _kernels.launch(
            _scores_kernel(q.dtype, spec.index_dim),
            grid=(spec.queries, min(MOST_ROWS, spec.batch - first)) if spec.slots else 0,
            block=THREADS, shared_bytes=_scores_shared(spec.index_dim, blocks), stream=stream,
            q=q_first, k=k_first, weights=_from(weights, first), ids=_from(ids, first),
            scores=np.uintp(out + 4 * first * spec.queries * spec.slots),
            **_strides("q", q, "bsh"), **_strides("k", k, "bp"),
            heads=np.int32(spec.heads), head_blocks=np.int32(blocks), entries=np.int32(spec.entries),
            slots=np.int32(spec.slots), w_kind=np.int32(KINDS[weights.dtype]), ids_wide=np.int32(ids.dtype == "int64"),
            scale=np.float32(spec.softmax_scale),
        )  # fmt: skip


def launch_topk_scores_grad(
    grad_scores: Operand, q: Operand, k: Operand, weights: Operand, ids: Operand, grad_q: int, grad_k: int, grad_w: int,
    workspace: int, spec: SlotsSpec, passes: Passes, *, stream: Any = None,
) -> None:  # fmt: skip
    """Queues the three gradients. workspace: passes.workspace_bytes, aligned to 16 bytes."""
    width, split = spec.index_dim, passes.keys < spec.entries
    terms = np.uint32(min(max(spec.queries * spec.slots, 1), 2**32 - 1))
    shared = {
        **_numbers(grad_scores, q, weights, spec), **_strides("g", grad_scores, "bst"), **_strides("q", q, "bsh"),
        "ids": np.uintp(ids.address), "slots": np.int32(spec.slots), "ids_wide": np.int32(ids.dtype == "int64"),
    }  # fmt: skip
    more = {
        **_strides("k", k, "bp"), "k": np.uintp(k.address), "query_start": np.int64(0), "ratio": np.int64(1),
        "terms": terms,
    }  # fmt: skip
    nothing = np.uintp(0)
    for first in range(0, spec.batch, max(passes.rows, 1)):
        rows = min(passes.rows, spec.batch - first)
        grid = {"grid": (spec.queries, rows), "stream": stream}
        queries = {"grad_q": np.uintp(grad_q), "grad_w": np.uintp(grad_w)}
        if split or spec.entries == 0:  # gradients of q and w on their own: they sum over all keys
            everything = {"sums": nothing, "bounds": nothing, **_range(first, 0, spec.entries)}
            _launch_query(q.dtype, spec, passes.deterministic, **grid, **shared, **more, **queries, **everything)
            queries = {"grad_q": nothing, "grad_w": nothing}
        for key in range(0, spec.entries, max(passes.keys, 1)):
            keys = min(passes.keys, spec.entries - key)
            here = _range(first, key, key + keys)
            columns = rows * keys * width
            bounds = workspace + 8 * columns if passes.deterministic else 0
            if columns:
                _clear(workspace, (8 if passes.deterministic else 4) * columns + (4 * rows * keys if bounds else 0), stream)
            if bounds:
                _kernels.launch(
                    _finish_kernel(q.dtype, "indexer_grad_bounds"), block=THREADS, **grid, **shared, **here,
                    bounds=np.uintp(bounds), index_dim=np.int32(width),
                )  # fmt: skip
            sums = {"sums": np.uintp(workspace), "bounds": np.uintp(bounds)}
            _launch_query(q.dtype, spec, passes.deterministic, **grid, **shared, **more, **queries, **sums, **here)
            _launch_finish(q.dtype, workspace, bounds, grad_k, spec, first, rows, key, keys, 1, terms, stream)


def launch_scores_grad(
    grad_scores: Operand, q: Operand, k: Operand, weights: Operand, grad_q: int, grad_k: int, grad_w: int, workspace: int,
    spec: Spec, *, stream: Any = None,
) -> None:  # fmt: skip
    """Queues the three gradients of dense causal scores. workspace: dense_workspace_bytes, aligned to 16 bytes."""
    parts, segment = _dense_parts(spec)
    shared = {
        **_numbers(grad_scores, q, weights, spec), **_strides("q", q, "bsh"), **_strides("k", k, "bp"),
        "k": np.uintp(k.address), "query_start": np.int64(spec.query_start), "ratio": np.int64(spec.compress_ratio),
    }  # fmt: skip
    each = _dense_rows(spec)
    for first in range(0, spec.batch, each):
        rows = min(each, spec.batch - first)
        _launch_query(
            q.dtype, spec, False, grid=(spec.queries, rows), stream=stream, **shared, **_strides("g", grad_scores, "bst"),
            ids=np.uintp(0), grad_q=np.uintp(grad_q), grad_w=np.uintp(grad_w), sums=np.uintp(0), bounds=np.uintp(0),
            slots=np.int32(spec.entries), ids_wide=np.int32(0), terms=np.uint32(1), **_range(first, 0, spec.entries),
        )  # fmt: skip
        _kernels.launch(
            _entry_kernel(q.dtype, spec.index_dim), grid=(-(-spec.entries // TILE), parts, rows), block=THREADS,
            shared_bytes=_entry_shared(spec.index_dim), stream=stream, **shared, **_strides("g", grad_scores, "bsp"),
            sums=np.uintp(workspace), batch_first=np.int32(first), queries=np.int32(spec.queries),
            entries=np.int32(spec.entries), segment=np.int32(segment),
        )  # fmt: skip
        one = np.uint32(1)
        _launch_finish(q.dtype, workspace, 0, grad_k, spec, first, rows, 0, spec.entries, parts, one, stream)


def _launch_query(dtype: str, spec: Spec, fixed: bool, **arguments: Any) -> None:
    if spec.index_dim == HOPPER_DIM and spec.heads <= HOPPER_HEADS and forced_path != "portable" and _is_hopper():
        wants = bool(arguments["grad_q"]), bool(arguments["sums"])
        kernel, block = _hopper_kernel(dtype, fixed and wants[1], *wants), THREADS
        shared_bytes = HOPPER_SHARED[fixed and wants[1]]
    else:
        heads = next(n for n in HEADS if n >= spec.heads)
        kernel, block = _query_kernel(dtype, spec.index_dim, heads, fixed), 2 * heads
        shared_bytes = _query_shared(spec.index_dim, heads)
    _kernels.launch(kernel, block=block, shared_bytes=shared_bytes, **arguments)


def _launch_finish(
    dtype: str, sums: int, bounds: int, grad_k: int, spec: Spec, first: int, rows: int, key: int, keys: int, parts: int,
    terms: Any, stream: Any,
) -> None:  # fmt: skip
    width = spec.index_dim
    columns = rows * keys * width
    _kernels.launch(
        _finish_kernel(dtype, "indexer_grad_finish"), grid=-(-columns // (8 * THREADS)), block=THREADS, stream=stream,
        sums=np.uintp(sums), bounds=np.uintp(bounds), grad_k=np.uintp(grad_k + 2 * first * spec.entries * width),
        columns=np.int64(columns), rows_columns=np.int64(keys * width), entries_columns=np.int64(spec.entries * width),
        first_column=np.int64(key * width), parts=np.int32(parts), index_dim=np.int32(width), terms=terms,
    )  # fmt: skip


def _numbers(grad_scores: Operand, q: Operand, weights: Operand, spec: Spec) -> dict[str, Any]:
    return {
        "grad_scores": np.uintp(grad_scores.address), "q": np.uintp(q.address), "weights": np.uintp(weights.address),
        "heads": np.int32(spec.heads), "g_kind": np.int32(KINDS[grad_scores.dtype]),
        "w_kind": np.int32(KINDS[weights.dtype]), "scale": np.float32(spec.softmax_scale),
    }  # fmt: skip


def _range(first: int, key: int, end: int) -> dict[str, Any]:
    return {"batch_first": np.int32(first), "key_first": np.int32(key), "key_last": np.int32(end)}


def _strides(name: str, x: Operand, axes: str) -> dict[str, Any]:
    return {f"{name}_stride_{axis}": np.int64(step) for axis, step in zip(axes, x.strides, strict=False)}


def _from(x: Operand, row: int) -> Any:
    """The address of a batch row."""
    size = {"int64": 8, "int32": 4, "float32": 4}.get(x.dtype, 2)
    return np.uintp(x.address + size * row * x.strides[0])


def _clear(address: int, size: int, stream: Any) -> None:
    if stream is None:
        stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memsetAsync(address, 0, size, stream if isinstance(stream, int) else stream.ptr)


@functools.cache
def _query_kernel(dtype: str, dim: int, heads: int, fixed: bool) -> _kernels.Kernel:
    defines = _query_defines(dtype, dim, heads, fixed)
    return _kernels.kernel("indexer_grad_query.cu", "indexer_grad_query", defines=defines)


@functools.cache
def _hopper_kernel(dtype: str, fixed: bool, want_q: bool, want_k: bool) -> _kernels.Kernel:
    defines = _hopper_defines(dtype, fixed, want_q, want_k)
    return _kernels.kernel("indexer_grad_query_sm90.cu", "indexer_grad_query_sm90", defines=defines, arch="sm_90a")


def _is_hopper() -> bool:
    return _capability(cupy.cuda.runtime.getDevice()) == "90"


@functools.cache
def _capability(device: int) -> str:
    return cupy.cuda.Device(device).compute_capability


@functools.cache
def _entry_kernel(dtype: str, dim: int) -> _kernels.Kernel:
    return _kernels.kernel("indexer_grad_entry.cu", "indexer_grad_entry", defines=_entry_defines(dtype, dim))


@functools.cache
def _scores_kernel(dtype: str, dim: int) -> _kernels.Kernel:
    defines = {"ELEMENT": ELEMENTS[dtype], "INDEX_DIM": dim}
    return _kernels.kernel("indexer_gather_scores.cu", "indexer_gather_scores", defines=defines)


@functools.cache
def _finish_kernel(dtype: str, function: str) -> _kernels.Kernel:
    return _kernels.kernel("indexer_grad_finish.cu", function, defines={"ELEMENT": ELEMENTS[dtype]})
