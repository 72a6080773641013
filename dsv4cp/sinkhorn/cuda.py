"""Sinkhorn on the GPU: launch parameters of kernels_cu/sinkhorn.cu (4 x 4) and sinkhorn_generic.cu (M up to 16).

Both entry points take CuPy arrays; the launch_* functions below them take addresses, for callers whose memory
is not CuPy's. Work is queued on CuPy's current stream, or the one given; nothing waits for it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cupy
import numpy as np

from .. import _kernels
from .._kernel_notes import Launches, Noting, launches
from .contract import Spec

ELEMENTS = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
WIDTHS = (2, 4, 8, 16)  # lanes per matrix in the generic kernels

# Every specialisation that this file launches, for the tests that compile them all.
VARIANTS = {
    "sinkhorn.cu": [{"ELEMENT": e} for e in ELEMENTS.values()],
    "sinkhorn_generic.cu": [{"ELEMENT": e, "WIDTH": w} for e in ELEMENTS.values() for w in WIDTHS],
}

THREADS = 128
STEP_BYTES = 32 * 2 * 16  # of a warp: r and c of one step, a float4 each for 32 matrices
WINDOW = 18  # steps kept at once: all of repeat 20, and 12 warps still fit an H100's multiprocessor
GENERIC_STEP_BYTES = 32 * 2 * 4  # of a warp: r and c of one step, a float each for 32 lanes
RESIDENT_BLOCKS = 3  # what the registers of sinkhorn4_backward allow
ROUNDS = 8  # most blocks for each resident one: 3% faster than 1 on an H200 (see sinkhorn.cu)


def forward(x: Any, spec: Spec) -> Any:
    """y [..., M, M] in x's dtype."""
    if x.data.device_id != cupy.cuda.runtime.getDevice():
        with x.device:
            return forward(x, spec)
    x = _contiguous(x)
    y = _empty_like(x, spec)
    launch_forward(x.data.ptr, y.data.ptr, spec)
    return y


def backward(grad_y: Any, x: Any, spec: Spec) -> Any:
    """grad_x [..., M, M] in x's dtype. A grad_y of another dtype than x is read as float32, and then so is x."""
    if x.data.device_id != cupy.cuda.runtime.getDevice():
        with x.device:
            return _backward(grad_y, x, spec)
    return _backward(grad_y, x, spec)


def _backward(grad_y: Any, x: Any, spec: Spec) -> Any:
    dtype = x.dtype
    if grad_y.dtype != dtype:
        spec = dataclasses.replace(spec, dtype="float32")
        return _backward(grad_y.astype(np.float32), x.astype(np.float32), spec).astype(dtype, copy=False)
    grad_y, x = _contiguous(grad_y), _contiguous(x)
    grad_x = _empty_like(x, spec)
    launch_backward(grad_y.data.ptr, x.data.ptr, grad_x.data.ptr, spec)
    return grad_x


def _contiguous(x: Any) -> Any:
    """x, row-major: a copy where its strides are others."""
    return x if x.flags.c_contiguous else cupy.ascontiguousarray(x)


def _empty_like(x: Any, spec: Spec) -> Any:
    """cupy.empty(x.shape, x.dtype), a seventh faster: half a microsecond counts beside a launch."""
    return cupy.ndarray(spec.shape, x.dtype, cupy.cuda.alloc(x.nbytes))


def launch_forward(x: int, y: int, spec: Spec, *, stream: Any = None) -> None:
    """Queues y from x: addresses of contiguous arrays of spec's dtype on the current device.

    stream: None for CuPy's current one, an object with `.ptr`, or a cudaStream_t as int. Raises RuntimeError
    where the kernel cannot be compiled or launched.
    """
    if spec.m == 4 and not (x | y) & 15:
        if isinstance(stream, Noting):
            _launch4(x, y, spec.dtype, spec.matrices, spec.repeat, spec.eps, stream)
        else:
            _kernels.play(_forward4(spec.dtype, spec.matrices, spec.repeat, spec.eps), (x, y), stream)
        return
    numbers = _numbers(spec.matrices, spec.repeat, spec.eps)
    width = _width(spec.m)
    _kernels.launch(
        _kernel("sinkhorn_forward", spec.dtype, width),
        grid=-(-spec.matrices * width // THREADS),
        block=THREADS,
        shared_bytes=THREADS // 32 * _tile_bytes(width),
        stream=stream,
        x=x,
        y=y,
        m=np.int32(spec.m),
        **numbers,
    )


def launch_backward(grad_y: int, x: int, grad_x: int, spec: Spec, *, stream: Any = None) -> None:
    """Queues grad_x from grad_y and x: addresses as in launch_forward, all three of spec's dtype. Raises as it does."""
    numbers = _numbers(spec.matrices, spec.repeat, spec.eps)
    if spec.m == 4 and (grad_y | x | grad_x) % 16 == 0:
        threads, window, shared, blocks = _backward_shape(spec.repeat, cupy.cuda.runtime.getDevice())
        _kernels.launch(
            _kernel("sinkhorn4_backward", spec.dtype),
            grid=min(-(-spec.matrices // threads), blocks),
            block=threads,
            shared_bytes=shared,
            stream=stream,
            grad_y=grad_y,
            x=x,
            grad_x=grad_x,
            window=np.int32(window),
            **numbers,
        )
        return
    width = _width(spec.m)
    window = _window(spec.repeat, WINDOW)
    _kernels.launch(
        _kernel("sinkhorn_backward", spec.dtype, width),
        grid=-(-spec.matrices * width // THREADS),
        block=THREADS,
        shared_bytes=THREADS // 32 * (_tile_bytes(width) + window * GENERIC_STEP_BYTES),
        stream=stream,
        grad_y=grad_y,
        x=x,
        grad_x=grad_x,
        m=np.int32(spec.m),
        window=np.int32(window),
        **numbers,
    )


@functools.lru_cache(maxsize=1024)  # one look-up for the shape that models call thousands of times
def _forward4(dtype: str, matrices: int, repeat: int, eps: float) -> Launches:
    """A forward call on 4 x 4 matrices, x and y."""
    note = Noting()
    _launch4(note.array(), note.array(), dtype, matrices, repeat, eps, note)
    return launches(note.steps, note.arrays)


def _launch4(x: int, y: int, dtype: str, matrices: int, repeat: int, eps: float, stream: Any) -> None:
    kernel, numbers = _kernel("sinkhorn4_forward", dtype), _numbers(matrices, repeat, eps)
    _kernels.launch(kernel, grid=-(-matrices // THREADS), block=THREADS, stream=stream, x=x, y=y, **numbers)


@functools.lru_cache(maxsize=1024)
def _numbers(count: int, repeat: int, eps: float) -> dict[str, Any]:
    """What every kernel is told, as NumPy scalars of its parameters' types."""
    return {"count": np.int64(count), "repeat": np.int32(repeat), "eps": np.float32(eps)}


@functools.cache
def _kernel(function: str, dtype: str, width: int | None = None) -> _kernels.Kernel:
    """The kernel specialised for a dtype and, where it is the generic one, a width."""
    if width is None:
        return _kernels.kernel("sinkhorn.cu", function, defines={"ELEMENT": ELEMENTS[dtype]})
    return _kernels.kernel("sinkhorn_generic.cu", function, defines={"ELEMENT": ELEMENTS[dtype], "WIDTH": width})


def _width(m: int) -> int:
    return next(width for width in WIDTHS if width >= m)


def _tile_bytes(width: int) -> int:
    """The generic kernels' tile of a warp: 32 rows of width + 1 floats."""
    return 32 * (width + 1) * 4


def _window(repeat: int, most: int) -> int:
    """Steps kept at once: all between the first and the last, as far as `most` allows; at least 1."""
    return max(1, min(repeat - 2, most))


@functools.cache
def _backward_shape(repeat: int, device: int) -> tuple[int, int, int, int]:
    """Threads, window, shared memory per block and the most blocks, for sinkhorn4_backward.

    Long iterations are repeated once per window: theirs grows with repeat, in smaller blocks, as far as a
    block's shared memory goes.
    """
    about = cupy.cuda.Device(device).attributes
    most = about["MaxSharedMemoryPerBlockOptin"] // STEP_BYTES
    window = _window(repeat, min(most, max(WINDOW, repeat // 16)))
    threads = THREADS
    while threads > 32 and threads // 32 * window > 4 * WINDOW:
        threads //= 2
    shared = threads // 32 * window * STEP_BYTES
    # CUDA takes 1 KB of each resident block for itself.
    resident = about["MaxSharedMemoryPerMultiprocessor"] // (shared + 1024)
    resident = max(1, min(resident, RESIDENT_BLOCKS * THREADS // threads))
    return threads, window, shared, ROUNDS * resident * about["MultiProcessorCount"]
