"""The indexer's gradient kernels and that of scores at given ids: their specialisations, shared memory, and which path
a device and a shape take. kernels_cu/indexer_grad_*.cu, indexer_gather_scores.cu.
"""

from __future__ import annotations

import functools
from typing import Any

import cupy

from .. import _kernels
from . import contract_kernels
from .contract import Spec

ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}
DIMS, HEADS = contract_kernels.DIMS, (64, 128)  # of a block of indexer_grad_query.cu
HOPPER_DIM, HOPPER_HEADS, HOPPER_THREADS, HOPPER_SHARED = 128, 64, 256, 108864  # of indexer_grad_query_sm90.cu
HOPPER_ENTRY_SHARED = 50768  # of indexer_grad_entry_sm90.cu, for any number of heads
TILE, LIST, THREADS = 64, 1024, 128

PATHS = ("hopper", "portable")
forced_path: str | None = None  # "portable" makes every call take those kernels: for tests and measurements


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
        "SHARED_BYTES": HOPPER_SHARED,
    }  # fmt: skip


def _hopper_entry_defines(dtype: str) -> dict[str, Any]:
    return {"ELEMENT": ELEMENTS[dtype], "SHARED_BYTES": HOPPER_ENTRY_SHARED}


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
    "indexer_grad_entry_sm90.cu": [_hopper_entry_defines(dtype) for dtype in ELEMENTS],
    "indexer_grad_entry.cu": [_entry_defines(dtype, dim) for dtype in ELEMENTS for dim in DIMS],
    "indexer_gather_scores.cu": [{"ELEMENT": e, "INDEX_DIM": dim} for e in ELEMENTS.values() for dim in DIMS],
    "indexer_grad_finish.cu": [{"ELEMENT": element} for element in ELEMENTS.values()],
}


def query_kernel(spec: Spec, dtype: str, fixed: bool, want_q: bool, want_k: bool) -> tuple[_kernels.Kernel, int, int]:
    """(kernel, threads, bytes of shared memory) of the gradients that go query by query."""
    if spec.index_dim == HOPPER_DIM and spec.heads <= HOPPER_HEADS and forced_path != "portable" and _is_hopper():
        fixed = fixed and want_k
        return _hopper_kernel(dtype, fixed, want_q, want_k), HOPPER_THREADS, HOPPER_SHARED
    heads = next(n for n in HEADS if n >= spec.heads)
    return _query_kernel(dtype, spec.index_dim, heads, fixed), 2 * heads, _query_shared(spec.index_dim, heads)


def entry_kernel(spec: Spec, dtype: str) -> tuple[_kernels.Kernel, int, int]:
    """(kernel, threads, bytes of shared memory) of the dense gradient of entries."""
    if spec.index_dim == HOPPER_DIM and forced_path != "portable" and _is_hopper():
        return _hopper_entry_kernel(dtype), HOPPER_THREADS, HOPPER_ENTRY_SHARED
    return _entry_kernel(dtype, spec.index_dim), THREADS, _entry_shared(spec.index_dim)


def scores_kernel(spec: Spec, dtype: str) -> tuple[_kernels.Kernel, int]:
    """(kernel, bytes of shared memory) of the scores at given ids."""
    return _scores_kernel(dtype, spec.index_dim), _scores_shared(spec.index_dim, -(-spec.heads // 64))


@functools.cache
def _query_kernel(dtype: str, dim: int, heads: int, fixed: bool) -> _kernels.Kernel:
    defines = _query_defines(dtype, dim, heads, fixed)
    return _kernels.kernel("indexer_grad_query.cu", "indexer_grad_query", defines=defines)


@functools.cache
def _hopper_kernel(dtype: str, fixed: bool, want_q: bool, want_k: bool) -> _kernels.Kernel:
    defines = _hopper_defines(dtype, fixed, want_q, want_k)
    return _kernels.kernel("indexer_grad_query_sm90.cu", "indexer_grad_query_sm90", defines=defines, arch="sm_90a")


@functools.cache
def _hopper_entry_kernel(dtype: str) -> _kernels.Kernel:
    defines = _hopper_entry_defines(dtype)
    return _kernels.kernel("indexer_grad_entry_sm90.cu", "indexer_grad_entry_sm90", defines=defines, arch="sm_90a")


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
def finish_kernel(dtype: str, function: str) -> _kernels.Kernel:
    return _kernels.kernel("indexer_grad_finish.cu", function, defines={"ELEMENT": ELEMENTS[dtype]})
