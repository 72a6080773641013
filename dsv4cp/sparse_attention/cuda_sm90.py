"""Launch parameters of Hopper's kernels, D 512, bfloat16 and float16: kernels_cu/sparse_attention_fwd_sm90.cu, 64 heads
at a time, and kernels_cu/sparse_attention_fwd_sm90_few.cu, 16 at a time.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from .. import _kernels
from .contract import Spec

FILE, FUNCTION = "sparse_attention_fwd_sm90.cu", "sparse_attention_fwd_sm90"
FEW_FILE, FEW_FUNCTION = "sparse_attention_fwd_sm90_few.cu", "sparse_attention_fwd_sm90_few"
DIM = 512
HEADS, THREADS = 64, 512
SHARED_BYTES = 228672  # SHARED in the kernels, which check it
FEW_HEADS, FEW_THREADS = 16, 384
FEW_SHARED_BYTES = 205696
FEW_AT_ONCE = 2  # (query, 16 heads) that a block works on
MOST_FEW = 32  # up to so many heads fill no more than half of a 64-row tile
MOST_ITEMS = 2**31 - 2**16  # the kernels count (query, head block) pairs, and a grid beyond them, in 32 bits
ELEMENTS = {"bfloat16": "BFloat16", "float16": "Float16"}

# Every specialisation that this file launches, for the tests that compile them all.
VARIANTS = {
    file: [{"ELEMENT": element, "SHARED_BYTES": shared} for element in ELEMENTS.values()]
    for file, shared in ((FILE, SHARED_BYTES), (FEW_FILE, FEW_SHARED_BYTES))
}

# cuda.h: CU_TENSOR_MAP_DATA_TYPE_FLOAT16 and _BFLOAT16, _SWIZZLE_128B, _L2_PROMOTION_L2_128B
DATA_TYPES = {"float16": 6, "bfloat16": 9}
SWIZZLE_128B, L2_PROMOTION_128B = 3, 2


def takes(spec: Spec, reference_rounding: bool, device: int) -> bool:
    """Whether this path runs the call."""
    return (
        spec.dim == DIM
        and not reference_rounding
        and _is_hopper(device)
        and 0 < spec.batch * spec.queries * -(-spec.heads // FEW_HEADS) <= MOST_ITEMS
    )


def launch(arguments: dict[str, Any], spec: Spec, dtype: str, device: int, stream: Any) -> bool:
    """Queues the call; False where the driver cannot describe q's strides, and nothing was queued.

    `arguments` are those of the portable kernel (cuda.launch_forward).
    """
    if spec.heads <= MOST_FEW:
        _launch_few(arguments, spec, dtype, device, stream)
        return True
    strides = tuple(int(arguments[f"q_stride_{axis}"]) for axis in "hsb")
    q_map = tensor_map(int(arguments["q"]), (spec.heads, spec.queries, spec.batch), strides, dtype)
    if q_map is None:
        return False
    _kernels.launch(
        _kernel(FILE, FUNCTION, SHARED_BYTES, dtype),
        grid=min(spec.batch * spec.queries * -(-spec.heads // HEADS), _multiprocessors(device)),
        block=THREADS,
        shared_bytes=SHARED_BYTES,
        stream=stream,
        q_map=q_map,
        batch=np.int32(spec.batch),
        **arguments,
    )
    return True


def _launch_few(arguments: dict[str, Any], spec: Spec, dtype: str, device: int, stream: Any) -> None:
    items = spec.batch * spec.queries * -(-spec.heads // FEW_HEADS)
    _kernels.launch(
        _kernel(FEW_FILE, FEW_FUNCTION, FEW_SHARED_BYTES, dtype),
        grid=min(-(-items // FEW_AT_ONCE), _multiprocessors(device)),
        block=FEW_THREADS,
        shared_bytes=FEW_SHARED_BYTES,
        stream=stream,
        batch=np.int32(spec.batch),
        **arguments,
    )


@functools.lru_cache(maxsize=256)
def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: str, heads: int = HEADS) -> Any:
    """What the tensor copy engine needs to know of q: rows of 512 columns along `sizes` axes, strides in elements.

    `heads`: of a box, which is 64 columns wide. A NumPy structured scalar of 128 opaque bytes, or None where the driver
    refuses.
    """
    rank = 1 + len(sizes)
    # An axis of one element may carry any stride; the driver wants one that it could use.
    steps = [2 * (stride if size > 1 else DIM) for size, stride in zip(sizes, strides, strict=True)]
    buffer = (ctypes.c_uint64 * 24)()  # the map is 16 words, aligned to 8 of them
    at = (ctypes.addressof(buffer) + 63) // 64 * 64
    status = _encoder()(
        ctypes.c_void_p(at), DATA_TYPES[dtype], rank, ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(DIM, *sizes), (ctypes.c_uint64 * (rank - 1))(*steps),
        (ctypes.c_uint32 * rank)(64, heads, *[1] * (rank - 2)), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, SWIZZLE_128B, L2_PROMOTION_128B, 0,
    )  # fmt: skip
    if status != 0:
        return None
    words = np.frombuffer(ctypes.string_at(at, 128), np.uint64)
    return np.array((words,), dtype=[("words", np.uint64, (16,))])[()]


@functools.cache
def _encoder() -> Any:
    """cuTensorMapEncodeTiled of the CUDA driver, which CuPy does not wrap."""
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@functools.cache
def _kernel(file: str, function: str, shared: int, dtype: str) -> _kernels.Kernel:
    defines = {"ELEMENT": ELEMENTS[dtype], "SHARED_BYTES": shared}
    return _kernels.kernel(file, function, defines=defines, arch="sm_90a")


@functools.cache
def _multiprocessors(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


@functools.cache
def _is_hopper(device: int) -> bool:
    import cupy

    return cupy.cuda.Device(device).compute_capability == "90"
