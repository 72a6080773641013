"""Tensor maps: what the tensor copy engine of Hopper and later needs to know of an array. Knows no slice.

CuPy does not wrap cuTensorMapEncodeTiled, so it is called in the CUDA driver itself.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from ._kernel_notes import Address, MapBytes

# cuda.h: CU_TENSOR_MAP_DATA_TYPE_FLOAT16 and _BFLOAT16, _SWIZZLE_128B, _L2_PROMOTION_L2_128B
DATA_TYPES = {"float16": 6, "bfloat16": 9}
SWIZZLE_128B, L2_PROMOTION_128B = 3, 2
NO_CONTEXT = (3, 201)  # cuda.h: CUDA_ERROR_NOT_INITIALIZED and _INVALID_CONTEXT
MOST_KEPT = 64  # maps of one kind


class _Encoder:
    """tensor_map of one kind of array, by address; `known` has those that it made."""

    __slots__ = ("_kind", "known")

    def __init__(self, *kind: Any) -> None:
        self._kind = kind
        self.known: dict[int, bytes] = {}

    def __call__(self, address: int) -> bytes:
        found = self.known.get(address)
        if found is None:
            found = _tensor_map(address, *self._kind)
            if found is None:
                raise RuntimeError(f"the driver refuses a tensor map at {address:#x}: {self._kind}")
            if len(self.known) >= MOST_KEPT:
                self.known.clear()
            self.known[address] = found
        return found


def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], dtype: str
) -> bytes | None:
    """The map of a 2-byte array for copies of `box` elements that arrive 128-byte swizzled; axes fastest first.

    strides: in elements, of all axes but the first, whose stride is 1. Elements outside of `sizes` arrive as zeros.
    128 opaque bytes, or None where the driver refuses. Kept: a call asks for the same maps more than once, and training
    steps get the same memory again.
    """
    found = _tensor_map(address, sizes, strides, box, dtype)
    if type(address) is Address and found is not None:
        return MapBytes(found, address, _encoder_of(sizes, strides, box, dtype))
    return found


@functools.lru_cache(maxsize=512)
def _encoder_of(*kind: Any) -> _Encoder:
    return _Encoder(*kind)


@functools.lru_cache(maxsize=512)
def _tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], dtype: str
) -> bytes | None:
    rank = len(sizes)
    # An axis of one element may carry any stride; the driver wants one that it could use.
    steps = [2 * stride if size > 1 else 2 * sizes[0] for size, stride in zip(sizes[1:], strides, strict=True)]
    buffer = (ctypes.c_uint64 * 24)()  # the map is 16 words, aligned to 8 of them
    at = (ctypes.addressof(buffer) + 63) // 64 * 64
    arguments = (
        ctypes.c_void_p(at), DATA_TYPES[dtype], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, SWIZZLE_128B, L2_PROMOTION_128B, 0,
    )  # fmt: skip
    status = _encoder()(*arguments)
    if status in NO_CONTEXT:  # a thread's first call, often that of autograd's: any call of the runtime gives it one
        _runtime().memGetInfo()
        status = _encoder()(*arguments)
    return ctypes.string_at(at, 128) if status == 0 else None


@functools.cache
def _runtime() -> Any:
    import cupy

    return cupy.cuda.runtime


@functools.cache
def _encoder() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
