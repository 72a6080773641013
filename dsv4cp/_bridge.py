"""torch <-> device pointers, CuPy arrays, streams and devices. With its part _bridge_calls.py and with
_torch_backend.py the only shared file with torch.

Two ways across, for two needs. The hot path hands raw pointers to a kernel launch: `on_stream_of(x)` makes
the tensor's device current, says which CUDA stream torch works on there, and puts everything back. Whole
arrays change hands through DLPack without a copy: `to_cupy`, `to_numpy`, `to_torch`.

`define_op` registers what a slice's torch_bridge.py launches as a torch operator, which is what lets
torch.compile, torch.export and FakeTensor see it as one node.

Streams. Kernels run on torch's current stream of the tensor's device, in backward too: torch's autograd
threads restore the forward's stream, but not CuPy's, so the stream is looked up at every launch. Outputs
and temporaries of the hot path come from torch's allocator (torch.empty), which keeps memory until the work
queued on that stream is done; nothing there needs record_stream.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import array_api_compat.torch  # noqa: F401  (loaded here so that torch.compile never meets the import)
import numpy as np
import torch

from . import _arrays, _backend
from ._arrays import dtype_name, library, numpy_dtype
from ._bridge_calls import (  # noqa: F401  (handed on)
    below_autograd,
    call,
    cast,
    contiguous,
    has_tangent,
    name_of,
    out_of_autocast,
    own_views,
    plain,
    readable,
    remembered,
)

OPERATORS = torch.library.Library("dsv4", "FRAGMENT")  # the definitions live as long as this object


def define_op(
    schema: str,
    *,
    kernels: Mapping[str, Callable[..., Any]],
    fake: Callable[..., Any],
    autograd: type[torch.autograd.Function] | None = None,
    has_derivatives: bool = True,
) -> Any:
    """Define the operator dsv4::`schema` and return the callable that reaches it in torch's dispatcher.

    kernels: what runs on tensors without autograd, by dispatch key ("CUDA", "CPU"). fake: what tells the
    result's shape, dtype and device to tracers. autograd: the Function to apply when a gradient is wanted; its
    forward calls the operator inside `below_autograd()`. Without it the operator has no gradient. has_derivatives:
    False for results like ids. Forward-mode differentiation of others raises: it would lose the tangent.

    torch.library.custom_op and register_autograd would do the same with less text, and at a higher cost per call.
    """
    name = schema.partition("(")[0]
    OPERATORS.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, kernel in kernels.items():
        OPERATORS.impl(name, out_of_autocast(kernel, key.lower()), key)
    torch.library.register_fake(f"dsv4::{name}", fake, lib=OPERATORS)
    operator = getattr(torch.ops.dsv4, name).default
    if has_derivatives:

        def differentiable(*args: Any) -> Any:
            if has_tangent(*args):
                raise NotImplementedError(f"dsv4::{name}: it has no forward-mode derivative (torch.func.jvp)")
            if autograd is not None and torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
                return autograd.apply(*args)
            with below_autograd():
                return operator(*args)

        OPERATORS.impl(name, differentiable, "Autograd")
    return operator


@torch.compiler.assume_constant_result
def missing(backend: str) -> str | None:
    """_backend.missing, which torch.compile asks once instead of tracing it: a machine does not change."""
    return _backend.missing(backend)


# Run, not traced, by torch.compile: what it looks up in sys.modules is no part of a graph.
torch.compiler.assume_constant_result(_arrays._library_of)


class _StreamHandle:
    """A stream of torch's under the CUDA stream protocol. torch owns it and never destroys its pooled streams."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


@functools.cache  # an import statement in each call takes half a microsecond
def _runtime() -> Any:
    import cupy

    return cupy.cuda.runtime


@functools.lru_cache(maxsize=1024)
def _cupy_stream(pointer: int) -> Any:
    """A CuPy stream that names, but does not own, the given CUDA stream."""
    import cupy

    return cupy.cuda.Stream.from_external(_StreamHandle(pointer))


def stream_pointer(device_index: int) -> int:
    """The CUDA stream (cudaStream_t) torch works on now on that device, in this thread."""
    # The one-call form that torch's own compiled kernels use; current_stream() would build an object each time.
    return torch._C._cuda_getCurrentRawStream(device_index)


def is_current(device_index: int) -> bool:
    """Whether the device is current for torch and for CuPy, each of which links a CUDA runtime of its own."""
    return _only_one() or torch._C._cuda_getDevice() == device_index == _runtime().getDevice()


@functools.cache
def _only_one() -> bool:
    """Whether this process sees one GPU, which is current then."""
    one: bool = _runtime().getDeviceCount() == 1
    return one


class on_stream_of:
    """`with on_stream_of(x) as stream:` the device of CUDA tensor x, or number x, is current, for torch and for CuPy.

    `stream` is a CuPy stream object for torch's current stream there (`stream.ptr` is the handle). It is not
    made CuPy's current stream, which costs more than a launch: pass it to the launch, or use `cupy_on_stream_of`.
    Both libraries get back the device that was current, also after an exception.
    """

    __slots__ = ("_cupy_device", "_index", "_torch_device")

    def __init__(self, x: torch.Tensor | int) -> None:
        self._index = x if isinstance(x, int) else x.get_device()

    def __enter__(self) -> Any:
        runtime = _runtime()  # each library links a CUDA runtime of its own: ask and set both
        index, self._torch_device, self._cupy_device = self._index, torch.cuda.current_device(), runtime.getDevice()
        if self._torch_device != index:
            torch.cuda.set_device(index)
        if self._cupy_device != index:
            runtime.setDevice(index)
        return _cupy_stream(stream_pointer(index))

    def __exit__(self, *exc_info: object) -> None:
        if self._cupy_device != self._index:
            _runtime().setDevice(self._cupy_device)
        if self._torch_device != self._index:
            torch.cuda.set_device(self._torch_device)


class cupy_on_stream_of:
    """Like `on_stream_of`; CuPy's operations inside the block run on that stream, in memory of torch's allocator.

    For work that is more than a launch. What is made inside leaves by `to_torch` as an ordinary torch tensor.
    """

    __slots__ = ("_allocator", "_guard", "_stream")

    def __init__(self, x: torch.Tensor) -> None:
        self._guard = on_stream_of(x)

    def __enter__(self) -> Any:
        import cupy

        self._stream = self._guard.__enter__()
        try:
            self._allocator = cupy.cuda.using_allocator(_allocate)
            self._allocator.__enter__()
            return self._stream.__enter__()
        except BaseException:
            self._guard.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._stream.__exit__(*exc_info)
            self._allocator.__exit__(*exc_info)
        finally:
            self._guard.__exit__()


class torch_on_stream_of:
    """The reverse of `cupy_on_stream_of`: torch's operations inside run on CuPy's current stream of a CuPy array's
    device. What is made inside and leaves by `to_cupy` keeps torch's memory, which torch reuses on that stream alone.

    RuntimeError on CUDA's per-thread default stream, which torch cannot name.
    """

    __slots__ = ("_entered", "_x")

    def __init__(self, x: Any) -> None:
        self._x = x

    def __enter__(self) -> None:
        import cupy

        index = self._x.data.device_id
        with contextlib.ExitStack() as entering:
            entering.enter_context(cupy.cuda.Device(index))
            ours = cupy.cuda.get_current_stream()
            if ours.ptr == 2:
                raise RuntimeError("torch cannot work on CUDA's per-thread default stream: make another one current")
            if ours.ptr in (0, 1):  # an ExternalStream of these would be a new stream
                theirs = torch.cuda.default_stream(index)
            else:
                theirs = torch.cuda.ExternalStream(ours.ptr, device=index)
                _recorded[ours.ptr] = ours  # what torch's functions record on it must find it alive
            entering.enter_context(torch.cuda.stream(theirs))  # of its device, which becomes torch's current one
            self._entered = entering.pop_all()

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.__exit__(*exc_info)


def _allocate(size: int) -> Any:
    """CuPy's allocator interface over torch's allocator, on the current device and torch's current stream."""
    import cupy

    owner = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
    memory = cupy.cuda.UnownedMemory(owner.data_ptr(), size, owner, owner.get_device())
    return cupy.cuda.MemoryPointer(memory, 0)


def _allocated_here(x: Any) -> torch.Tensor | None:
    """The torch tensor of which a CuPy array is the memory, if `_allocate` made it and it is contiguous."""
    owner = getattr(x.data.mem, "_owner", None)
    if not isinstance(owner, torch.Tensor) or x.size == 0 or not x.flags.c_contiguous:
        return None
    begin = x.data.ptr - owner.data_ptr()
    return owner[begin : begin + x.nbytes].view(getattr(torch, dtype_name(x))).view(x.shape)


def _strided(name: str, x: Any) -> torch.Tensor:
    """The tensor without its autograd history; TypeError for anything that has no plain strided memory."""
    if library(x) != "torch":
        raise TypeError(f"{name}: expected a torch tensor, got {type(x).__name__}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name}: expected a strided torch tensor, got a {x.layout} one (convert it with .to_dense())")
    if x.is_meta:
        raise TypeError(f"{name}: expected a torch tensor with memory, got one on the meta device")
    return x.detach().resolve_conj().resolve_neg()


# CuPy streams that torch's allocator will put an event on when it frees what they read. CuPy destroys a stream
# with its last reference, and an event on a destroyed stream ends the process: so these are kept.
_recorded: dict[int, Any] = {}


def to_cupy(x: Any) -> Any:
    """A CuPy array on the memory of a CUDA tensor, any strides, bfloat16 included; the autograd history stays behind.

    CuPy's current stream waits for torch's. When they differ, torch keeps the memory until the work that CuPy's stream
    holds at the tensor's end is done, and that stream lives as long as the process. TypeError for another library's
    array or layout, ValueError for a tensor that is not on a CUDA device.
    """
    import cupy

    x = _strided("x", x)
    if not x.is_cuda:
        raise ValueError(f"x: expected a CUDA tensor, got one on {x.device} (to_numpy takes those)")
    index = x.get_device()
    with cupy.cuda.Device(index):
        ours = cupy.cuda.get_current_stream()
        if ours.ptr != stream_pointer(index):
            _recorded[ours.ptr] = ours
            x.record_stream(torch.cuda.ExternalStream(ours.ptr, device=index))
        return cupy.from_dlpack(x)


def to_numpy(x: Any) -> np.ndarray:
    """A NumPy array on the memory of a CPU tensor, bfloat16 through ml_dtypes; the autograd history stays behind.

    TypeError for another library's array or layout, ValueError for a tensor that is not on the CPU.
    """
    x = _strided("x", x)
    if x.device.type != "cpu":
        raise ValueError(f"x: expected a CPU tensor, got one on {x.device} (to_cupy takes CUDA tensors)")
    if x.dtype == torch.bfloat16:  # NumPy knows no bfloat16 in DLPack: its bits cross as int16
        return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return x.numpy()


def to_torch(x: Any) -> torch.Tensor:
    """A torch tensor on the memory of a NumPy or CuPy array, bfloat16 included.

    From CuPy, torch's current stream waits for CuPy's; the array must live until torch's work is done, since CuPy's
    pool does not know torch's streams (arrays made inside `cupy_on_stream_of` are torch's own memory: no such care).
    ValueError for memory that torch cannot describe or would write through: negative strides, strides that are no
    multiple of the item size, read-only NumPy arrays. TypeError for other libraries and dtypes that torch lacks.
    """
    kind = library(x)
    if kind not in ("numpy", "cupy"):
        raise TypeError(f"x: expected a NumPy or CuPy array, got {type(x).__name__}")
    if any(stride < 0 for stride in x.strides):
        raise ValueError("x: expected strides of zero or more, got a flipped array (copy it first)")
    if any(stride % x.itemsize for stride in x.strides):
        raise ValueError(f"x: expected strides in whole items of {x.itemsize} bytes, got {x.strides} (copy it first)")
    bits16 = dtype_name(x) == "bfloat16"
    if kind == "cupy":
        ours = _allocated_here(x)
        return torch.from_dlpack(x) if ours is None else ours
    if not x.flags.writeable:
        raise ValueError("x: expected a writeable array, got a read-only one that torch could write (copy it first)")
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if bits16 else torch.from_numpy(x)
