"""Sparse attention on the GPU: launch parameters of kernels_cu/sparse_attention_fwd.cu, the path for every device,
and the choice between it and Hopper's (cuda_sm90.py).

`forward` takes CuPy arrays; `launch_forward` takes addresses and strides, for callers whose memory is not CuPy's.
Work is queued on CuPy's current stream, or the one given; nothing waits for it. Queries and keys are read
where they lie; only ids that are not contiguous int32, and rows that 16-byte copies cannot reach, are copied.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import numpy as np

from .. import _kernels
from .._arrays import dtype_name, element_strides
from .._kernel_arguments import constants, float32
from . import cuda_sm90
from .contract import Spec

ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}

# D -> (heads, keys, warps) of a block, in the order of preference: the first whose heads the call needs and whose
# shared memory the device has: 227 KB (sm_90, 100) takes all, 163 KB (sm_80) all but the first, 99 KB ends at 32 heads.
TILES = {
    512: ((64, 64, 8), (64, 32, 8), (32, 32, 4), (16, 32, 4)),
    256: ((64, 32, 4), (32, 32, 4), (16, 32, 4)),
    128: ((64, 64, 4), (32, 64, 4), (16, 64, 4)),
    64: ((64, 64, 4), (32, 64, 4), (16, 64, 4)),
}
HEADS = (16, 32, 64)  # of a tile; the smallest that holds all heads, else the largest

LOG2E = math.log2(math.e)
NARROW_THREADS = 256

forced_path: str | None = None  # "portable" makes every call take that kernel: for tests and measurements


def _shared_bytes(dim: int, tile: tuple[int, int, int]) -> int:
    """The layout at the head of the kernel: Q, two stages of keys, P; alpha, row values of each key group, ids."""
    rows, keys, warps = tile
    key_groups = warps // (rows // 16)
    return 2 * dim * (rows + 2 * keys) + 2 * rows * keys + 4 * (rows + key_groups * rows + keys)


def _defines(dtype: str, dim: int, tile: tuple[int, int, int], reference_rounding: bool) -> dict[str, Any]:
    rows, keys, warps = tile
    return {
        "ELEMENT": ELEMENTS[dtype],
        "HEAD_DIM": dim,
        "ROWS": rows,
        "KEYS": keys,
        "WARPS": warps,
        "SHARED_BYTES": _shared_bytes(dim, tile),
        "REFERENCE_ROUNDING": int(reference_rounding),
    }


# For the tests that compile: every tile, and the first one with another element and rounding, which change neither the
# layout nor the registers of the others.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "sparse_attention_fwd.cu": [
        _defines(dtype, dim, tile, rounding)
        for dim, tiles in TILES.items()
        for number, tile in enumerate(tiles)
        for dtype, rounding in (("bfloat16", False), ("float16", True))
        if dtype == "bfloat16" or (dim == 512 and number == 0)
    ],
    "sparse_attention_ids.cu": [{}],
    **cuda_sm90.VARIANTS,
}


def forward(q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec, reference_rounding: bool = False) -> tuple[Any, Any]:
    """(out [B, S, H, D] in q's dtype, lse [B, S, H] float32)."""
    if q.data.device_id != cupy.cuda.runtime.getDevice():
        with q.device:
            return _forward(q, kv, sinks, ids, spec, reference_rounding)
    return _forward(q, kv, sinks, ids, spec, reference_rounding)


def _forward(q: Any, kv: Any, sinks: Any, ids: Any, spec: Spec, reference_rounding: bool) -> tuple[Any, Any]:
    q, kv = _readable(q), _readable(kv)
    sinks, ids = cupy.ascontiguousarray(sinks, dtype=np.float32), _int32(cupy.ascontiguousarray(ids), spec)
    out, lse = cupy.empty(q.shape, q.dtype), cupy.empty(q.shape[:3], np.float32)
    launch_forward(
        q.data.ptr, kv.data.ptr, sinks.data.ptr, ids.data.ptr, out.data.ptr, lse.data.ptr, spec,
        dtype=dtype_name(q), q_strides=element_strides(q), kv_strides=element_strides(kv),
        reference_rounding=reference_rounding,
    )  # fmt: skip
    return out, lse


def launch_forward(
    q: int, kv: int, sinks: int, ids: int, out: int, lse: int, spec: Spec, *, dtype: str, q_strides: tuple[int, ...],
    kv_strides: tuple[int, ...], reference_rounding: bool = False, stream: Any = None,
) -> None:  # fmt: skip
    """Queues out and lse from addresses on the current device.

    q and kv must be `aligned`, of `dtype`, with strides in elements (the last is 1); sinks float32 [H] and ids int32
    [B, S, T] contiguous, ids outside [0, K) masked; out and lse (0: not wanted) contiguous. stream: None for CuPy's
    current one, an object with `.ptr`, or a cudaStream_t as int. Raises RuntimeError where the kernel cannot be
    compiled or launched.
    """
    arguments = {
        "q": q,
        "kv": kv,
        "sinks": sinks,
        "ids": ids,
        "out": out,
        "lse": lse,
        **constants(
            ("q", "bsh", q_strides), ("kv", "bk", kv_strides),
            queries=spec.queries, heads=spec.heads, keys=spec.keys, slots=spec.slots,
        ),
        "scale": float32(spec.scale if reference_rounding else spec.scale * LOG2E),  # unless exponentials are natural
    }  # fmt: skip
    device = cupy.cuda.runtime.getDevice()
    hopper = forced_path != "portable" and cuda_sm90.takes(spec, reference_rounding, device)
    if hopper and cuda_sm90.launch(arguments, spec, q_strides, dtype, device, stream):
        return
    _launch_portable(arguments, spec, dtype, reference_rounding, stream)


def _launch_portable(arguments: dict[str, Any], spec: Spec, dtype: str, reference_rounding: bool, stream: Any) -> None:
    tile = _tile(spec.dim, spec.heads, cupy.cuda.runtime.getDevice())
    _kernels.launch(
        _kernel(dtype, spec.dim, tile, reference_rounding),
        grid=spec.batch * spec.queries * -(-spec.heads // tile[0]),
        block=32 * tile[2],
        shared_bytes=_shared_bytes(spec.dim, tile),
        stream=stream,
        **arguments,
    )


def launch_narrow_ids(ids: int, narrow: int, count: int, keys: int, *, stream: Any = None) -> None:
    """Queues `count` int32 ids at `narrow` from int64 ones at `ids`; those outside [0, keys) become -1."""
    _kernels.launch(
        _kernels.kernel("sparse_attention_ids.cu", "sparse_attention_narrow_ids"),
        grid=min(-(-count // NARROW_THREADS), 2**16),
        block=NARROW_THREADS,
        stream=stream,
        ids=ids,
        narrow=narrow,
        count=np.int64(count),
        keys=np.int64(keys),
    )


def aligned(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether 16-byte copies reach every row: strides in elements of 2 bytes, of axes longer than 1."""
    return address % 16 == 0 and _even(shape, strides)


@functools.lru_cache(maxsize=1024)
def _even(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    steps = (step for step, size in zip(strides[:-1], shape[:-1], strict=True) if size > 1)
    return strides[-1] == 1 and not any(step % 8 for step in steps)


# --- Choices -------------------------------------------------------------------------------------------


@functools.cache
def _tile(dim: int, heads: int, device: int) -> tuple[int, int, int]:
    """(heads, keys, warps) of a block."""
    most = next((n for n in HEADS if n >= heads), HEADS[-1])
    memory = cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"]
    for tile in TILES[dim]:
        if tile[0] <= most and _shared_bytes(dim, tile) <= memory:
            return tile
    raise RuntimeError(f"sparse attention needs a GPU with 99 KB of shared memory per block, got {memory} bytes")


@functools.cache
def _kernel(dtype: str, dim: int, tile: tuple[int, int, int], reference_rounding: bool) -> _kernels.Kernel:
    defines = _defines(dtype, dim, tile, reference_rounding)
    return _kernels.kernel("sparse_attention_fwd.cu", "sparse_attention_fwd", defines=defines)


# --- CuPy arrays ---------------------------------------------------------------------------------------


def _readable(x: Any) -> Any:
    """x itself where the kernel can read it, else a contiguous copy."""
    return x if aligned(x.data.ptr, x.shape, element_strides(x)) else x.copy(order="C")


def _int32(ids: Any, spec: Spec) -> Any:
    """Contiguous ids as int32: themselves, or a copy after the range check."""
    if ids.dtype == np.int32:
        return ids
    narrow = cupy.empty(ids.shape, np.int32)
    launch_narrow_ids(ids.data.ptr, narrow.data.ptr, ids.size, spec.keys)
    return narrow
