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
from .._kernel_arguments import constants
from .._kernel_notes import Noting
from . import contract_grad, cuda_grad_kernels
from .contract import SlotsSpec, Spec
from .cuda_grad_kernels import THREADS, TILE, finish_kernel

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}
MOST_ROWS = 65535  # batch rows of a launch: a grid's second and third axes
PARTS, PART_QUERIES, PARTS_BYTES = 16, 64, 256 * 2**20  # of the dense gradient of keys; bytes of partial sums


class Operand(NamedTuple):
    """An array by address; strides in elements."""

    address: int
    dtype: str
    strides: tuple[int, ...]


class Operands(NamedTuple):
    """What a call reads. q, k: `aligned`, one dtype; weights, ids contiguous; incoming gradients with any strides."""

    q: Operand
    k: Operand
    weights: Operand
    ids: Operand | None = None  # none where scores are dense
    grad_scores: Operand | None = None


def aligned(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether 16-byte copies reach every row: strides in elements of 2 bytes, of axes longer than 1."""
    return address % 16 == 0 and _even(shape, strides)


@functools.lru_cache(maxsize=1024)
def _even(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = (step for step, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1)
    return strides[-1] == 1 and not any(step % 8 for step in steps)


# --- Passes --------------------------------------------------------------------------------------------


class Passes(NamedTuple):
    """How the sums over queries are held: `rows` batch rows by `keys` key rows at a time."""

    deterministic: bool
    rows: int
    keys: int
    workspace_bytes: int


def plan(spec: SlotsSpec, deterministic: bool, cap: int) -> Passes:
    """The passes of topk_scores_grad. "atomic": float32 sums of all keys, which the cap does not count.
    "deterministic": 8 bytes a column and a bound per key row, within the cap: whole batch rows, or ranges of a row."""
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
    """Of partial sums of the dense gradient of keys: as many batch rows as 256 MiB take, at least one part of one."""
    return 4 * _dense_rows(spec) * _dense_parts(spec)[0] * spec.entries * spec.index_dim


# --- Launches ------------------------------------------------------------------------------------------
# Results are contiguous, by address; grads are those of q, k and weights. stream: None for CuPy's current one, an
# object with `.ptr`, or a cudaStream_t as int. The current device is that of the arrays.


def launch_topk_scores(x: Operands, out: int, spec: SlotsSpec, *, stream: Any = None) -> None:
    """Queues the scores at the ids."""
    q, k, weights, ids = x.q, x.k, x.weights, _given(x.ids)
    kernel, shared_bytes = cuda_grad_kernels.scores_kernel(spec, q.dtype)
    for first in range(0, spec.batch, MOST_ROWS):
        q_first, k_first = _from(q, first), _from(k, first)
        _kernels.launch(
            kernel,
            grid=(spec.queries, min(MOST_ROWS, spec.batch - first)) if spec.slots else 0,
            block=THREADS, shared_bytes=shared_bytes, stream=stream,
            q=q_first, k=k_first, weights=_from(weights, first), ids=_from(ids, first),
            scores=out + 4 * first * spec.queries * spec.slots,
            **constants(
                ("q", "bsh", q.strides), ("k", "bp", k.strides), heads=spec.heads, head_blocks=-(-spec.heads // 64),
                entries=spec.entries, slots=spec.slots, w_kind=KINDS[weights.dtype], ids_wide=ids.dtype == "int64",
            ),
            scale=np.float32(spec.softmax_scale),
        )  # fmt: skip


def launch_topk_scores_grad(
    x: Operands, grads: tuple[int, ...], workspace: int, spec: SlotsSpec, passes: Passes, *, stream: Any = None
) -> None:
    """Queues the three gradients. workspace: passes.workspace_bytes, aligned to 16 bytes."""
    q, k, ids, grad_scores = x.q, x.k, _given(x.ids), _given(x.grad_scores)
    grad_q, grad_k, grad_w = grads
    width, split = spec.index_dim, passes.keys < spec.entries
    terms = np.uint32(min(max(spec.queries * spec.slots, 1), 2**32 - 1))
    shared = {
        **_numbers(x, spec), "ids": ids.address,
        **constants(
            ("g", "bst", grad_scores.strides), ("q", "bsh", q.strides), slots=spec.slots, ids_wide=ids.dtype == "int64"
        ),
    }  # fmt: skip
    more = {
        **constants(("k", "bp", k.strides)), "k": k.address, "query_start": np.int64(0), "ratio": np.int64(1),
        "terms": terms,
    }  # fmt: skip
    nothing = 0
    for first in range(0, spec.batch, max(passes.rows, 1)):
        rows = min(passes.rows, spec.batch - first)
        grid = {"grid": (spec.queries, rows), "stream": stream}
        queries = {"grad_q": grad_q, "grad_w": grad_w}
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
                _clear(workspace, 8 * columns + 4 * rows * keys if bounds else 4 * columns, stream)
            if bounds:
                _kernels.launch(
                    finish_kernel(q.dtype, "indexer_grad_bounds"), block=THREADS, **grid, **shared, **here,
                    bounds=bounds, index_dim=np.int32(width),
                )  # fmt: skip
            sums = {"sums": workspace, "bounds": bounds}
            _launch_query(q.dtype, spec, passes.deterministic, **grid, **shared, **more, **queries, **sums, **here)
            _launch_finish(q.dtype, workspace, bounds, grad_k, spec, first, rows, key, keys, 1, terms, stream)


def launch_scores_grad(
    x: Operands, grads: tuple[int, ...], workspace: int, spec: Spec, *, stream: Any = None
) -> None:
    """Queues the three gradients of dense causal scores. workspace: dense_workspace_bytes, aligned to 16 bytes."""
    q, k, grad_scores = x.q, x.k, _given(x.grad_scores)
    grad_q, grad_k, grad_w = grads
    parts, segment = _dense_parts(spec)
    kernel, threads, shared_bytes = cuda_grad_kernels.entry_kernel(spec, q.dtype)
    shared = {
        **_numbers(x, spec), **constants(("q", "bsh", q.strides), ("k", "bp", k.strides)),
        "k": k.address, "query_start": np.int64(spec.query_start), "ratio": np.int64(spec.compress_ratio),
    }  # fmt: skip
    each = _dense_rows(spec)
    for first in range(0, spec.batch, each):
        rows = min(each, spec.batch - first)
        _launch_query(
            q.dtype, spec, False, grid=(spec.queries, rows), stream=stream, **shared,
            **constants(("g", "bst", grad_scores.strides), slots=spec.entries, ids_wide=0), ids=0, grad_q=grad_q,
            grad_w=grad_w, sums=0, bounds=0, terms=np.uint32(1), **_range(first, 0, spec.entries),
        )  # fmt: skip
        _kernels.launch(
            kernel, grid=(-(-spec.entries // TILE), parts, rows), block=threads,
            shared_bytes=shared_bytes, stream=stream, **shared, sums=workspace,
            **constants(
                ("g", "bsp", grad_scores.strides), batch_first=first, queries=spec.queries, entries=spec.entries,
                segment=segment,
            ),
        )  # fmt: skip
        one = np.uint32(1)
        _launch_finish(q.dtype, workspace, 0, grad_k, spec, first, rows, 0, spec.entries, parts, one, stream)


def _launch_query(dtype: str, spec: Spec, fixed: bool, **arguments: Any) -> None:
    wants = bool(arguments["grad_q"]), bool(arguments["sums"])
    kernel, threads, shared_bytes = cuda_grad_kernels.query_kernel(spec, dtype, fixed, *wants)
    _kernels.launch(kernel, block=threads, shared_bytes=shared_bytes, **arguments)


def _launch_finish(
    dtype: str, sums: int, bounds: int, grad_k: int, spec: Spec, first: int, rows: int, key: int, keys: int, parts: int,
    terms: Any, stream: Any,
) -> None:  # fmt: skip
    width = spec.index_dim
    columns = rows * keys * width
    _kernels.launch(
        finish_kernel(dtype, "indexer_grad_finish"), grid=-(-columns // (8 * THREADS)), block=THREADS, stream=stream,
        sums=sums, bounds=bounds, grad_k=grad_k + 2 * first * spec.entries * width,
        columns=np.int64(columns), rows_columns=np.int64(keys * width), entries_columns=np.int64(spec.entries * width),
        first_column=np.int64(key * width), parts=np.int32(parts), index_dim=np.int32(width), terms=terms,
    )  # fmt: skip


def _given(x: Operand | None) -> Operand:
    if x is None:
        raise TypeError("operands: expected ids or incoming gradients, got None")
    return x


def _numbers(x: Operands, spec: Spec) -> dict[str, Any]:
    grad_scores = _given(x.grad_scores)
    return {
        "grad_scores": grad_scores.address, "q": x.q.address, "weights": x.weights.address,
        **constants(heads=spec.heads, g_kind=KINDS[grad_scores.dtype], w_kind=KINDS[x.weights.dtype]),
        "scale": np.float32(spec.softmax_scale),
    }  # fmt: skip


def _range(first: int, key: int, end: int) -> dict[str, Any]:
    return constants(batch_first=first, key_first=key, key_last=end)


def _from(x: Operand, row: int) -> Any:
    """The address of a batch row."""
    if row == 0:
        return x.address
    size = {"int64": 8, "int32": 4, "float32": 4}.get(x.dtype, 2)
    return x.address + size * row * x.strides[0]


def _clear(address: Any, size: int, stream: Any) -> None:
    if isinstance(stream, Noting):
        stream.zero(address, size)
        return
    if stream is None:
        stream = cupy.cuda.get_current_stream()
    cupy.cuda.runtime.memsetAsync(address, 0, size, stream if isinstance(stream, int) else stream.ptr)
