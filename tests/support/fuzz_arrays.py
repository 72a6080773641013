"""Inputs and memory for the fuzzer: numbers that are the same on every machine, layouts, libraries, canaries.

All inputs are made as torch tensors from a counter and a seed by integer arithmetic, so that a case that failed on a
GPU has the same numbers on a CPU. They are handed to the library under test by view.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dsv4cp import _bridge_programs

MARGIN = 512  # bytes before and behind every buffer; keeps the alignment of allocators
DTYPES = {n: getattr(torch, n) for n in ("float64", "float32", "float16", "bfloat16", "int32", "int64")}


# --- Numbers -------------------------------------------------------------------------------------------------


UNIT = 3**0.5 / 0xFFFF  # of normal()


def first(seed: int, name: str) -> int:
    """What the counter begins with."""
    return (seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) % 2**63


def bits(seed: int, name: str, count: int, device) -> torch.Tensor:
    """int64 [count] of mixed bits: a counter through the finaliser of splitmix64."""
    x = torch.arange(count, dtype=torch.int64, device=device) * 0x1E3779B97F4A7C15 + first(seed, name)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def integers(seed: int, name: str, shape: tuple[int, ...], low: int, high: int, device) -> torch.Tensor:
    """int64 in [low, high)."""
    count = math.prod(shape)
    if device == "cuda" and count:
        return _drawn(seed, name, shape, torch.int64, low, max(high - low, 1))
    return ((bits(seed, name, count, device) >> 8 & 2**40 - 1) % max(high - low, 1) + low).reshape(shape)


def normal(seed: int, name: str, shape: tuple[int, ...], device) -> torch.Tensor:
    """float64 of mean 0 and variance 1: sums of four 16-bit numbers."""
    if device == "cuda" and math.prod(shape):
        return _drawn(seed, name, shape, torch.float64)
    x = bits(seed, name, math.prod(shape), device)
    total = (x & 0xFFFF) + (x >> 16 & 0xFFFF) + (x >> 32 & 0xFFFF) + (x >> 48 & 0xFFFF)
    return ((total - 2 * 0xFFFF).double() * UNIT).reshape(shape)


DRAW = r"""
extern "C" __global__ void draw_numbers(unsigned long long start, long long count, long long low, long long range,
                                        double unit, void* to) {
  // bits() of the file that holds this text; then integers() where range > 0, else normal().
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned long long x = (unsigned long long)i * 0x1E3779B97F4A7C15ull + start;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    if (range > 0) {
      ((long long*)to)[i] = (long long)(x >> 8 & (1ull << 40) - 1) % range + low;
    } else {
      const long long total = (x & 0xFFFF) + (x >> 16 & 0xFFFF) + (x >> 32 & 0xFFFF) + (x >> 48);
      ((double*)to)[i] = (double)(total - 2 * 0xFFFF) * unit;
    }
  }
}
"""


def _drawn(seed: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, low: int = 0, range_: int = 0) -> Any:
    """integers() or normal() on the GPU in one launch instead of two dozen."""
    x = torch.empty(shape, dtype=dtype, device="cuda")
    numbers = np.uint64(first(seed, name)), np.int64(x.numel()), np.int64(low), np.int64(range_), np.float64(UNIT)
    with on_torchs_stream():
        _raw_kernel(DRAW, "draw_numbers")(
            (min(-(-x.numel() // 256), 4096),), (256,), (*numbers, np.uintp(x.data_ptr()))
        )
    return x


@contextlib.contextmanager
def on_torchs_stream() -> Iterator[None]:
    """CuPy launches on torch's current stream, which orders the memory of torch's tensors."""
    import cupy

    stream = torch.cuda.current_stream().cuda_stream
    if stream == cupy.cuda.get_current_stream().ptr:
        yield
        return
    with cupy.cuda.ExternalStream(stream) if stream else cupy.cuda.Stream.null:
        yield


@functools.cache
def constants(values: tuple, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A tensor of these numbers, on a GPU copied there once: a copy waits for all that was queued.

    It is there for every stream when this returns, and is kept for good: its memory is of the first caller's stream.
    """
    x = torch.tensor(values, dtype=dtype, device=device)
    if x.is_cuda:
        torch.cuda.current_stream(x.device).synchronize()
    return x


VALUES = ("normal", "integers", "small", "large", "equal", "denormal", "zeros")


def floats(seed: int, name: str, shape: tuple[int, ...], dtype: str, kind: str, device) -> torch.Tensor:
    """A tensor of a kind of VALUES. "large" stays where sums of products fit the dtype's arithmetic."""
    if kind == "integers":
        x = integers(seed, name, shape, -3, 4, device).double()
    elif kind == "equal":
        x = torch.full(shape, 0.75, dtype=torch.float64, device=device)
    elif kind == "zeros":
        x = torch.zeros(shape, dtype=torch.float64, device=device)
    else:
        x = normal(seed, name, shape, device)
        half = dtype == "float16"
        x = (
            x
            * {"normal": 1.0, "small": 1e-3, "large": 30.0 if half else 1e4, "denormal": 1e-6 if half else 1e-39}[kind]
        )
    return x.to(DTYPES[dtype])


# --- Layouts -------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "padded", "odd", "every second", "transposed", "flipped", "stride 0")


@dataclass
class Held:
    """An input: the tensor as the library sees it, the memory it lies in, and a copy of that memory."""

    view: torch.Tensor
    memory: torch.Tensor
    kept: torch.Tensor
    flip: bool = False  # the library's array is this one, read backwards along its first axis longer than 1


def hold(x: torch.Tensor, layout: str, fill: int) -> Held:
    """x in a layout inside a buffer of `fill` bytes; the values are x's (stride 0: those of its first row)."""
    n = x.ndim
    if layout in ("padded", "odd", "every second", "transposed") and (n < 2 or x.numel() == 0):
        layout = "contiguous"
    flip = layout == "flipped"
    if layout == "padded":
        parent, shape = _parent((*x.shape[:-1], x.shape[-1] + 16), x, fill), x.shape
        view = parent[1][..., 8 : 8 + shape[-1]]
    elif layout == "odd":
        parent = _parent((*x.shape[:-1], x.shape[-1] + 5), x, fill)
        view = parent[1][..., 3 : 3 + x.shape[-1]]
    elif layout == "every second":
        axis = n - 2
        parent = _parent((*x.shape[:axis], 2 * x.shape[axis], *x.shape[axis + 1 :]), x, fill)
        view = parent[1][(slice(None),) * axis + (slice(None, None, 2),)]
    elif layout == "transposed":
        moved = x.transpose(0, n - 2) if n > 2 else x.transpose(0, 1)
        parent = _parent(tuple(moved.shape), x, fill)
        view = parent[1].transpose(0, n - 2) if n > 2 else parent[1].transpose(0, 1)
    elif layout == "stride 0" and n > 1 and x.numel():
        parent = _parent((1, *x.shape[1:]), x, fill)
        parent[1].copy_(x[:1])
        return _held(parent, parent[1].expand(x.shape))
    else:
        parent = _parent(tuple(x.shape), x, fill)
        view = parent[1]
    axis = next((i for i in range(n) if x.shape[i] > 1), None) if flip else None
    view.copy_(x if axis is None else x.flip(axis))
    held = _held(parent, view)
    held.flip = axis is not None
    return held


def _parent(shape: tuple[int, ...], like: torch.Tensor, fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = int(np.prod(shape)) * like.element_size()
    memory = torch.full((size + 2 * MARGIN + -size % 8,), fill, dtype=torch.uint8, device=like.device)
    return memory, memory[MARGIN : MARGIN + size].view(like.dtype).view(shape)


def _held(parent: tuple[torch.Tensor, torch.Tensor], view: torch.Tensor) -> Held:
    return Held(view, parent[0], parent[0].clone())


# --- Libraries -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One library, device and backend: "cupy/cuda/numba"."""

    library: str
    device: str
    backend: str

    def __str__(self) -> str:
        return f"{self.library}/{self.device}/{self.backend}"

    @classmethod
    def parse(cls, text: str) -> Way:
        return cls(*text.split("/"))

    @property
    def reference(self) -> bool:
        return self.backend in ("reference", "torch", "sparse_torch") or (self.device == "cpu")

    def give(self, held: Held | None) -> Any:
        """The array the library gets."""
        if held is None:
            return None
        if self.library == "torch":
            x = held.view
            axis = next((i for i in range(x.ndim) if x.shape[i] > 1), 0)
            return x.flip(axis) if held.flip else x
        x = cupy_of(held.view) if self.library == "cupy" else numpy_of(held.view)
        if held.flip:
            axis = next(i for i in range(x.ndim) if x.shape[i] > 1)
            x = x[(slice(None),) * axis + (slice(None, None, -1),)]
        if self.library == "numpy":
            x = x.view()
            x.flags.writeable = False
        if self.library == "array_api_strict":
            import array_api_strict

            return array_api_strict.asarray(x)
        return x

    def take(self, x: Any) -> torch.Tensor:
        """A result as a torch tensor on the way's device."""
        if self.library == "torch":
            return x.detach()
        if self.library == "cupy":
            return torch_of_cupy(x)
        x = np.asarray(getattr(x, "_array", x))
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(np.ascontiguousarray(x).view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.array(x))

    def is_right_kind(self, x: Any) -> bool:
        return type(x).__module__.partition(".")[0] == self.library


def numpy_of(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        import ml_dtypes

        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def cupy_of(x: torch.Tensor) -> Any:
    import cupy

    return cupy.from_dlpack(x)


def torch_of_cupy(x: Any) -> torch.Tensor:
    if x.size == 0:
        return torch.empty(x.shape, dtype=DTYPES[x.dtype.name], device="cuda")
    return torch.from_dlpack(x)


# --- Canaries ------------------------------------------------------------------------------------------------

CHECK = r"""
extern "C" __global__ void check_margins(const unsigned char* block, long long size, int margin, int fill, int* bad) {
  // Every byte of the two margins of `block` is still `fill`.
  for (int i = threadIdx.x; i < margin; i += blockDim.x)
    if (block[i] != fill || block[margin + size + i] != fill) *bad = 1;
}
"""


@dataclass
class Canaries:
    """`with Canaries(way, fill):` everything the way's library allocates inside is full of `fill` and between margins.

    CuPy's allocator is replaced; torch.empty, empty_like and zeros, and what programs make their results by, are, since
    torch's allocator takes no Python.
    """

    way: Way
    fill: int
    blocks: list = field(default_factory=list)

    def __enter__(self) -> Canaries:
        self._exit = contextlib.ExitStack()
        if self.way.device == "cuda" and self.way.library == "cupy":
            import cupy

            self._exit.enter_context(cupy.cuda.using_allocator(self._cupy))
        if self.way.library == "torch":
            kept = {n: getattr(torch, n) for n in ("empty", "empty_like", "zeros", "zeros_like")}
            self._real = kept["empty"]
            torch.empty, torch.zeros = self._empty, self._zeros
            torch.empty_like = lambda x, **kw: self._empty(x.shape, **_like(x, kw))
            torch.zeros_like = lambda x, **kw: self._zeros(x.shape, **_like(x, kw))
            self._exit.callback(lambda: [setattr(torch, n, f) for n, f in kept.items()])
            made = _bridge_programs._empty_cuda
            _bridge_programs._empty_cuda = lambda shape, _, dtype: self._empty(shape, dtype=dtype, device="cuda")
            self._exit.callback(lambda: setattr(_bridge_programs, "_empty_cuda", made))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._exit.close()

    def _cupy(self, size: int):
        import cupy

        memory = cupy.get_default_memory_pool().malloc(size + 2 * MARGIN)
        memory.memset_async(self.fill, size + 2 * MARGIN, cupy.cuda.get_current_stream())
        self.blocks.append((memory.ptr, size, memory))
        return memory + MARGIN

    def _empty(self, *size: Any, dtype: Any = None, device: Any = None, **options: Any) -> torch.Tensor:
        size = size or (options["size"],)
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        dtype = dtype or torch.get_default_dtype()
        count = int(np.prod(shape))
        nbytes = count * dtype.itemsize
        memory = self._real(nbytes + 2 * MARGIN, dtype=torch.uint8, device=device or "cpu").fill_(self.fill)
        self.blocks.append((memory.data_ptr(), nbytes, memory))
        # Not a view: set_ gives a tensor of its own on the same storage.
        x = self._real(0, dtype=dtype, device=memory.device)
        x.set_(memory.untyped_storage(), MARGIN // dtype.itemsize, shape, _row_major(shape))
        return x.requires_grad_(True) if options.get("requires_grad") else x

    def _zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        return self._empty(*size, **options).zero_()

    def broken(self) -> torch.Tensor:
        """A 0-d bool tensor: some margin was written. Without synchronisation on a GPU."""
        found, rest = False, []
        for pointer, size, memory in self.blocks:
            # On the host there are blocks of calls on a GPU too; a kernel must not read those.
            if isinstance(memory, torch.Tensor) and not memory.is_cuda:
                ends = torch.cat([memory[:MARGIN], memory[MARGIN + size :]])
                found |= bool((ends != self.fill).any())
            else:
                rest.append((pointer, size))
        if self.way.device == "cpu":
            return torch.tensor(found)
        bad = torch.zeros((), dtype=torch.int32, device="cuda")
        kernel = _raw_kernel(CHECK, "check_margins")
        with self._after_the_call():
            for pointer, size in rest:
                arguments = (
                    np.uintp(pointer),
                    np.int64(size),
                    np.int32(MARGIN),
                    np.int32(self.fill),
                    np.uintp(bad.data_ptr()),
                )
                kernel((1,), (128,), arguments)
        return (bad > 0) | found

    @contextlib.contextmanager
    def _after_the_call(self) -> Iterator[None]:
        """Launches go to torch's current stream, where `bad` is, behind what the way's library has queued, and before
        what takes the blocks' memory next."""
        import cupy

        mine, theirs = torch.cuda.current_stream(), cupy.cuda.get_current_stream().ptr
        apart = self.way.library == "cupy" and theirs != mine.cuda_stream
        other = torch.cuda.ExternalStream(theirs) if apart else mine
        if apart:
            mine.wait_stream(other)
        with on_torchs_stream():
            yield
        if apart:
            other.wait_stream(mine)


def _like(x: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """dtype and device of x unless others are given; always row-major."""
    return {"dtype": x.dtype, "device": x.device} | {n: v for n, v in given.items() if n in ("dtype", "device") and v}


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


@functools.cache
def _raw_kernel(text: str, name: str) -> Any:
    import cupy

    return cupy.RawKernel(text, name)
