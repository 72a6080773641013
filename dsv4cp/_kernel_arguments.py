"""Arguments of a launch: whether they fit the kernel's parameters, and the block of memory that the driver reads.

A block holds each value in the width that the CUDA text declares, and a table of where each begins. This file knows no
slice.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ._kernel_text import Parameter

# struct's codes of scalar parameters, which mean the same widths in C; a pointer is POINTER.
CODES: dict[type, str] = {
    np.bool_: "?",
    np.int32: "i",
    np.uint32: "I",
    np.int64: "q",
    np.uint64: "Q",
    np.float32: "f",
    np.float64: "d",
}
POINTER = "Q"
ADDRESSES = (int, np.uintp)  # types that say an address: either is packed as the 64 bits of a pointer

_MISSING = object()
FLOAT32_MAX = 3.4028234663852886e38


def plain_type(parameter: Parameter, address: type = int) -> type:
    """The type of values that need no further look; a struct's bytes, which need no conversion either."""
    return bytes if parameter.kind is np.void else parameter.kind or address


@functools.lru_cache(maxsize=1024)
def constants(*arrays: tuple[str, str, tuple[int, ...]], **numbers: int) -> dict[str, Any]:
    """Strides of arrays, each (name, letters of its axes, strides), and 32-bit numbers, as the NumPy scalars that
    kernels are told: {name}_stride_{axis} int64, numbers int32. Kept, since making ten of them takes longer."""
    steps = [(name, axis, step) for name, axes, of in arrays for axis, step in zip(axes, of, strict=False)]
    strides = {f"{name}_stride_{axis}": np.int64(step) for name, axis, step in steps}
    return strides | {name: np.int32(n) for name, n in numbers.items()}


def float32(number: float) -> np.float32:
    """A parameter's value, infinite beyond float32."""
    if abs(number) <= FLOAT32_MAX:
        return np.float32(number)
    with np.errstate(over="ignore"):
        return np.float32(number)


# --- What the driver reads -----------------------------------------------------------------------------


class Block:
    """Memory for the arguments of one launch at a time."""

    __slots__ = ("_addresses", "memory", "table")

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        self.memory = bytearray(max(size, 1))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._addresses = (ctypes.c_void_p * max(len(offsets), 1))(*(base + offset for offset in offsets))
        self.table = ctypes.addressof(self._addresses)  # kernelParams of cuLaunchKernel


class Blocks:
    """The blocks of one kernel, or of launches that share some of its values. A launch pops one off `free` or makes a
    new one, packs its values, and appends it to `free` afterwards: the driver has copied them by then.

    No two launches share a block, since another thread may launch while the driver reads, and a destructor or signal
    handler that launches may run in the same one. list.pop and list.append are atomic.

    values, vary: where given, what all launches share, and which of the parameters they do not. Blocks are made with
    these values in them, and `pack` takes those of `packed` alone: from the first parameter that varies to the last.
    """

    __slots__ = ("_values", "_whole", "begin", "free", "offsets", "pack", "packed", "size", "structs")

    def __init__(
        self, parameters: Sequence[Parameter], values: Sequence[Any] | None = None, vary: Iterable[int] = ()
    ) -> None:
        codes = [_code(p) for p in parameters]
        self._whole = struct.Struct("@" + "".join(codes))  # each value aligned as in C
        ends = [struct.calcsize("@" + "".join(codes[: n + 1])) for n in range(len(codes))]
        self.offsets = tuple(end - struct.calcsize("@" + code) for end, code in zip(ends, codes, strict=True))
        self.size, self._values = self._whole.size, values
        self.structs = tuple((n, p.size) for n, p in enumerate(parameters) if p.kind is np.void)
        places = sorted(vary)
        first, last = (0, len(codes)) if values is None else (places[0], places[-1] + 1) if places else (0, 0)
        self.packed = parameters[first:last]
        self.begin = self.offsets[first] if codes else 0
        gaps = [after - before for before, after in zip(ends[first:], self.offsets[first + 1 : last], strict=False)]
        padded = [code + "x" * gap for code, gap in zip(codes[first:last], [*gaps, 0], strict=False)]
        self.pack = struct.Struct("=" + "".join(padded)).pack_into  # (memory, begin, *values of `packed`)
        self.free: list[Block] = [] if values is None else [self.new()]  # whether the values fit shows here

    def new(self) -> Block:
        """One more, for when `free` is empty."""
        made = Block(self.size, self.offsets)
        if self._values is not None:
            self._whole.pack_into(made.memory, 0, *self._values)
        return made


def _code(parameter: Parameter) -> str:
    if parameter.kind is None:
        return POINTER
    return f"{parameter.size}s" if parameter.kind is np.void else CODES[parameter.kind]


# --- What fits -----------------------------------------------------------------------------------------


def fitted(
    function: str, parameters: Sequence[Parameter], arguments: dict[str, Any], device: int | None
) -> tuple[tuple[Any, ...], int | None]:
    """The arguments in the parameters' order, arrays as addresses, and the launch's device.

    TypeError or ValueError for what is missing, unknown or unfit, named with the kernel.
    """
    values = [arguments.get(p.name, _MISSING) for p in parameters]
    for n, (value, parameter) in enumerate(zip(values, parameters, strict=True)):
        if type(value) is plain_type(parameter) or (parameter.kind is None and type(value) in ADDRESSES):
            continue
        _fit(f"{function}: {parameter.name}", parameter, value)
        if parameter.kind is None:
            values[n], where = value.data.ptr, value.data.device_id
            device = where if device is None else device
    if len(values) != len(arguments):
        unknown = ", ".join(sorted(set(arguments) - {p.name for p in parameters}))
        raise TypeError(f"{function}: {unknown}: no such parameter")
    return tuple(values), device


def _fit(where: str, want: Parameter, value: Any) -> None:
    """TypeError or ValueError for all but a struct, where the parameter is one, or a CuPy array that fits it."""
    if want.kind is not None:
        if want.kind is not np.void or not isinstance(value, (bytes, np.void, np.ndarray)):
            raise TypeError(f"{where}: expected {want.kind.__name__}, got {_kind(value)}")
        return
    if not isinstance(value, _array_type()):
        raise TypeError(f"{where}: expected a CuPy array or an address (int or np.uintp), got {_kind(value)}")
    if want.dtype is not None and value.dtype != want.dtype:
        raise TypeError(f"{where}: expected dtype {want.dtype}, got {value.dtype}")
    if not value.flags.c_contiguous:
        raise ValueError(f"{where}: expected a contiguous array, got a strided one")


def with_bytes(kernel: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """A kernel's values, structs as their bytes; TypeError for a struct of another size than the parameter's."""
    for n, size in kernel.blocks.structs:
        value = values[n]
        if type(value) is not bytes:
            value = value.tobytes()
            values = (*values[:n], value, *values[n + 1 :])
        if len(value) != size:  # packing would cut or fill it
            name = f"{kernel.function}: {kernel.parameters[n].name}"
            raise TypeError(f"{name}: expected a struct of {size} bytes, got {len(value)}")
    return values


def unpackable(function: str, parameters: Sequence[Parameter], values: Sequence[Any]) -> Exception:
    """What to raise where packing refused values of fitting types: an int beyond an address."""
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.kind is None and not 0 <= value < 2**64:
            return ValueError(f"{function}: {parameter.name}: expected an address of 64 bits, got {value}")
    return RuntimeError(f"{function}: the arguments cannot be packed: {values}")


def _kind(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    return type(value).__name__ + (f" ({value.dtype})" if isinstance(value, np.ndarray) else "")


@functools.cache
def _array_type() -> Any:
    import cupy

    return cupy.ndarray
