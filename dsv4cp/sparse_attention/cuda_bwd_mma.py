"""Launch parameters of kernels_cu/sparse_attention_bwd.cu: the gradient's main kernel for every device.

The interface is that of the head of cuda_bwd.py; Hopper's path is cuda_bwd_sm90.py.
"""

from __future__ import annotations

import functools
from typing import Any

import cupy

from .. import _kernels
from .._kernel_arguments import constants, float32
from .contract import Spec
from .cuda_bwd_passes import BOTH, GRAD_Q, SUMS

FILE, FUNCTION = "sparse_attention_bwd.cu", "sparse_attention_bwd"
ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}

# D -> (heads, keys, warps) of a block, in the order of preference: the first whose heads the call needs and whose
# shared memory the device has: 227 KB (sm_90, 100) takes all, 163 KB (sm_80) all but the first, 99 KB the last of each.
TILES = {
    512: ((64, 64, 8), (32, 64, 8), (16, 32, 4)),
    256: ((64, 32, 4), (32, 32, 4), (16, 32, 4)),
    128: ((64, 64, 4), (32, 64, 4), (16, 64, 4)),
    64: ((64, 64, 4), (32, 64, 4), (16, 64, 4)),
}
HEADS = (16, 32, 64)  # of a tile; the smallest that holds all heads, else the largest


def _shared_bytes(dim: int, tile: tuple[int, int, int]) -> int:
    """The layout at the head of the kernel: Q, grad_out, keys; P, dS; ids of two blocks, two numbers a head."""
    rows, keys, _ = tile
    return 2 * dim * (2 * rows + keys) + 4 * rows * keys + 8 * keys + 8 * rows


def _defines(dtype: str, dim: int, tile: tuple[int, int, int], parts: int, deterministic: int) -> dict[str, Any]:
    rows, keys, warps = tile
    return {
        "ELEMENT": ELEMENTS[dtype],
        "HEAD_DIM": dim,
        "ROWS": rows,
        "KEYS": keys,
        "WARPS": warps,
        "PARTS": parts,
        "FIXED": int(deterministic and parts != GRAD_Q),  # grad_q has no sums to tell apart
        "SHARED_BYTES": _shared_bytes(dim, tile),
    }


# For the tests that compile: every tile with both kinds of sums; the parts of a divided call, which keep fewer numbers
# in registers, for the largest head_dim; float16, whose overflow is looked for, with the largest tile.
VARIANTS = {
    FILE: [
        *(_defines("bfloat16", dim, tile, BOTH, fixed) for dim in TILES for tile in TILES[dim] for fixed in (0, 1)),
        *(
            _defines("bfloat16", 512, tile, parts, fixed)
            for tile in TILES[512]
            for parts, fixed in ((GRAD_Q, 0), (SUMS, 0), (SUMS, 1))
        ),
        *(_defines("float16", 512, TILES[512][0], parts, 1) for parts in (BOTH, SUMS)),
    ]
}


def launch(
    *, grad_out: int, q: int, kv: int, ids: int, log2_total: int, delta: int, grad_q: int, sums: int, exponents: int,
    spec: Spec, dtype: str, grad_out_strides: tuple[int, ...], q_strides: tuple[int, ...], kv_strides: tuple[int, ...],
    deterministic: bool, key_first: int, key_last: int, parts: int, stream: Any,
) -> bool:  # fmt: skip
    """Queues the call and returns True: every call fits."""
    tile = _tile(spec.dim, spec.heads, cupy.cuda.runtime.getDevice())
    head_tiles = -(-spec.heads // tile[0])
    scale = float32(spec.scale)
    for part in (GRAD_Q, SUMS) if parts == BOTH and head_tiles > 1 else (parts,):
        _kernels.launch(
            _kernel(dtype, spec.dim, tile, part, deterministic),
            grid=spec.batch * spec.queries * (head_tiles if part == GRAD_Q else min(head_tiles, 1)),
            block=32 * tile[2],
            shared_bytes=_shared_bytes(spec.dim, tile),
            stream=stream,
            grad_out=grad_out,
            q=q,
            kv=kv,
            ids=ids,
            log2_total=log2_total,
            delta=delta,
            grad_q=grad_q,
            sums=sums,
            exponents=exponents,
            **constants(
                ("grad_out", "bsh", grad_out_strides), ("q", "bsh", q_strides), ("kv", "bk", kv_strides),
                queries=spec.queries, heads=spec.heads, keys=spec.keys, slots=spec.slots, first_key=key_first,
                range=key_last - key_first,
            ),
            scale=scale,
        )  # fmt: skip
    return True


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
def _kernel(dtype: str, dim: int, tile: tuple[int, int, int], parts: int, deterministic: bool) -> _kernels.Kernel:
    return _kernels.kernel(FILE, FUNCTION, defines=_defines(dtype, dim, tile, parts, deterministic))
