"""CuPy arrays in the CPU's memory, for calls on the GPU of stand_in_gpu.py: what they allocate, queue and read."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import weakref
from types import SimpleNamespace

import cupy
import ml_dtypes
import numpy as np
import torch

from dsv4cp import _backend, _kernels
from dsv4cp._cupy_programs import Repeated
from dsv4cp.indexer import cuda_grad
from dsv4cp.indexer import ops as indexer_ops
from dsv4cp.sparse_attention import cuda_bwd
from dsv4cp.sparse_attention import ops as attention_ops

from . import stand_in_gpu
from .packed import all_values

REPEATED = [x for module in (indexer_ops, attention_ops) for x in vars(module).values() if type(x) is Repeated]
ATTRIBUTES = {
    "MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerMultiprocessor": 233472, "MultiProcessorCount": 132,
}  # fmt: skip
DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def memory(size: int, device: int = 0, off: int = 0, held=None):
    """`size` bytes of NaN, `off` bytes after a multiple of 256, as CuPy would hold them: with the last array they go.
    held: is given a weak reference to them."""
    block = np.full(size + 512, 0xFF, np.uint8)
    at = (block.ctypes.data + 255) // 256 * 256 + off
    if held is not None:
        held.append((at, size, weakref.ref(block)))
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(at, size, block, device), 0)


def empty(shape, dtype="float32", strides=None, **where):
    """A CuPy array; strides in elements."""
    dtype = DTYPES.get(dtype) or np.dtype(dtype)
    steps = None if strides is None else tuple(step * dtype.itemsize for step in strides)
    count = math.prod(shape) if strides is None else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return cupy.ndarray(shape, dtype, memory(max(count, 0) * dtype.itemsize, **where), steps)


def cupy_of(x: torch.Tensor, strides=None, **where):
    """A copy of a tensor, laid out as it is or by strides."""
    made = empty(tuple(x.shape), str(x.dtype).removeprefix("torch."), strides or x.stride(), **where)
    torch_of(made).copy_(x)
    return made


def torch_of(x) -> torch.Tensor:
    """The tensor in an array's memory."""
    dtype = getattr(torch, x.dtype.name)
    if x.size == 0:
        return torch.empty(x.shape, dtype=dtype)
    return stand_in_gpu.at(x.data.ptr, dtype, x.shape, [step // x.itemsize for step in x.strides])


class Device:
    """A device that can be entered."""

    attributes, compute_capability = ATTRIBUTES, "90"

    def __init__(self, number=0):
        self.id = number

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Blocks:
    """What CuPy allocates. Addresses are told by where they lie: (which block, offset)."""

    def __init__(self):
        self.made = []

    def alloc(self, size):
        return memory(size, held=self.made)

    def place(self, address, arrays):
        """In one of the call's arrays or, by its size, in what the call made."""
        for n, x in enumerate(arrays):
            if x.data.ptr <= address < x.data.ptr + max(x.data.mem.size, 1):
                return n, address - x.data.ptr
        for start, size, _ in self.made:
            if start <= address < start + max(size, 1):
                return "made", size, address - start
        return address


def without_device(module, name):
    """The module's function, whose `with q.device` enters nothing: that alone asks the driver."""
    text = inspect.getsource(getattr(module, name))
    if text.count("with q.device:") != 1:
        raise AssertionError(f"{name}: expected to enter q.device once")
    space = {**vars(module), "contextlib": contextlib}
    head = "from __future__ import annotations\n"
    exec(head + text.replace("with q.device:", "with contextlib.nullcontext():"), space)
    return space[name]


def installed(monkeypatch, hopper: bool):
    """Yields stand_in_gpu's Gpu for CuPy arrays too, with `blocks`, and nothing noted."""
    put, blocks = monkeypatch.setattr, Blocks()
    for gpu in stand_in_gpu.installed(monkeypatch, hopper):
        gpu.blocks, gpu.pointers = blocks, []
        put(_kernels, "_queue", functools.partial(_queue, gpu))
        put(cupy.cuda, "Device", Device)
        put(cupy.cuda, "alloc", blocks.alloc)
        put(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=77))
        put(cupy, "empty", lambda shape, dtype: _empty(blocks, shape, dtype))
        put(cupy, "ascontiguousarray", lambda x, dtype=None: _contiguous(blocks, x, dtype))
        put(_backend, "missing", lambda backend: None)
        for module, name in (
            (cuda_grad, "topk_scores"), (cuda_grad, "topk_scores_grad"), (cuda_grad, "scores_grad"),
            (cuda_bwd, "backward"),
        ):  # fmt: skip
            put(module, name, without_device(module, name))
        for repeated in REPEATED:
            put(repeated.programs, "_known", {})
        yield gpu


def _queue(gpu, kernel, cuda, device, sizes, blocks, values, shared_bytes, stream, fresh_thread=False):
    given, values, kinds = values, all_values(blocks, values), [p.kind for p in kernel.parameters]
    gpu.pointers.append([(int(v), b"") for v, kind in zip(values, kinds, strict=True) if kind is None])
    maps = [bytes(v) for v, kind in zip(values, kinds, strict=True) if kind is np.void]
    gpu.pointers[-1] += [(int.from_bytes(words[:8], "little"), words[8:]) for words in maps]
    gpu.queue(kernel, cuda, device, sizes, blocks, given, shared_bytes, 77 if stream is None else stream)


def _empty(blocks, shape, dtype):
    shape = (shape,) if isinstance(shape, int) else shape
    return cupy.ndarray(shape, dtype, blocks.alloc(math.prod(shape) * np.dtype(dtype).itemsize))


def _contiguous(blocks, x, dtype):
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if x.flags.c_contiguous and x.dtype == dtype:
        return x
    made = _empty(blocks, x.shape, dtype)
    torch_of(made).copy_(torch_of(x))
    return made
