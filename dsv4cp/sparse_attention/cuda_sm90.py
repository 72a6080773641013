"""Launch parameters of Hopper's kernels, D 512, bfloat16 and float16: kernels_cu/sparse_attention_fwd_sm90.cu, 64 heads
at a time, and kernels_cu/sparse_attention_fwd_sm90_few.cu, 16 at a time.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .. import _kernels, _tensor_maps
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


def takes(spec: Spec, reference_rounding: bool, device: int) -> bool:
    """Whether this path runs the call."""
    return (
        spec.dim == DIM
        and not reference_rounding
        and _is_hopper(device)
        and 0 < spec.batch * spec.queries * -(-spec.heads // FEW_HEADS) <= MOST_ITEMS
    )


def launch(
    arguments: dict[str, Any], spec: Spec, q_strides: tuple[int, ...], dtype: str, device: int, stream: Any
) -> bool:
    """Queues the call; False where the driver cannot describe q's strides, and nothing was queued.

    `arguments` are those of the portable kernel (cuda.launch_forward).
    """
    if spec.heads <= MOST_FEW:
        _launch_few(arguments, spec, dtype, device, stream)
        return True
    q_map = tensor_map(arguments["q"], (spec.heads, spec.queries, spec.batch), q_strides[2::-1], dtype)
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


def tensor_map(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: str, heads: int = HEADS) -> Any:
    """The map of rows of 512 columns along `sizes` axes, strides in elements; boxes of `heads` rows, 64 columns wide.

    None where the driver refuses.
    """
    return _tensor_maps.tensor_map(address, (DIM, *sizes), strides, (64, heads, *[1] * (len(sizes) - 1)), dtype)


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
