"""Calls on CuPy arrays of a kind that came before: told by metadata, played on CuPy's current stream (_programs.py)."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _kernels
from ._arrays import dtype_name, element_strides, numpy_dtype
from ._programs import Laid, Make, Program, Programs

PLAIN = frozenset((bool, int, str, float, type(None)))  # types whose equal values are the same, but for zeros' signs


class Told(NamedTuple):
    """A call on CuPy arrays of one device in memory of their own."""

    kind: tuple[Any, ...]  # all that a check or a launch may look at, but for where the arrays are
    addresses: list[int]  # on 16 bytes
    arrays: tuple[Any, ...]


def told(arrays: tuple[Any, ...], others: tuple[Any, ...], launches: Callable[[], Any] | None = None) -> Told | None:
    """What a call on `arrays` is known by; None for other arrays than CuPy's own, off 16 bytes, and for others than
    plain numbers, strings and None. Equal numbers of different types are different kinds.

    launches: the module whose forced_path belongs to the kind, asked for where the arrays are CuPy's.
    """
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)  # nobody has a CuPy array before it is imported
    if not arrays or type(arrays[0]) is not ndarray:
        return None
    if launches is not None:
        others = (*others, launches().forced_path)
    types = tuple(map(type, others))
    if types not in _plain_types:
        if not PLAIN.issuperset(types):
            return None
        _plain_types.add(types)  # finitely many: of types that are plain, in numbers that callers pass
    kind: list[Any] = [types, others]
    addresses = []
    for x in arrays:
        if type(x) is not ndarray:
            return None
        memory = x.data
        address = memory.ptr
        if not address or address & 15:
            return None
        kind += (x.shape, x.strides, x.dtype, memory.device_id)
        addresses.append(address)
    return Told(tuple(kind), addresses, arrays)


_plain_types: set[tuple[type, ...]] = set()


def run(program: Program, call: Told) -> list[Any]:
    """Queues the call on CuPy's current stream of its arrays' device, and returns its results."""
    cuda, ndarray = _cupy()
    device = call.arrays[0].data.device_id
    if cuda.runtime.getDevice() != device:
        with cuda.Device(device):
            return run(program, call)
    made = [ndarray(sizes, dtype, cuda.alloc(size)) for sizes, dtype, size in program.makes]
    addresses = call.addresses + [x.data.ptr for x in made]
    _kernels.play(program.launches, addresses, cuda.get_current_stream().ptr, device)
    return made[: program.results]


class Repeated:
    """One operation's calls on CuPy arrays that come again. package: the slice's, whose cuda_notes has the launches;
    launches: its module whose forced_path belongs to the kind."""

    def __init__(self, package: str, launches: str | None = None) -> None:
        self.programs = Programs()
        self._package = package
        self._launches = None if launches is None else functools.partial(_module, f"{package}.{launches}")

    def play(self, arrays: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Told | None, list[Any] | None]:
        """What the call is known by, and its results where it could be played."""
        call = told(arrays, others, self._launches)
        if call is None or (program := self.programs.find(call.kind)) is None:
            return call, None
        return call, run(program, call)

    def settle(self, call: Told | None, note: str, *arguments: Any) -> None:
        """To be told of a call that the kernels have run: note(*arguments, making) of cuda_notes notes it."""
        if call is not None:
            noting = functools.partial(getattr(_module(f"{self._package}.cuda_notes"), note), *arguments)
            device = _cupy()[0].Device(call.arrays[0].data.device_id)
            self.programs.settle(call.kind, functools.partial(_laid, call), noting, _made, device)


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(name)


def _laid(call: Told) -> list[Laid]:
    return [
        Laid(at, x.shape, element_strides(x), dtype_name(x)) for at, x in zip(call.addresses, call.arrays, strict=True)
    ]


def _made(make: Make) -> tuple[tuple[int, ...], Any, int]:
    """Sizes, dtype and bytes."""
    sizes, name = make
    dtype = numpy_dtype(name)
    return sizes, dtype, dtype.itemsize * math.prod(sizes)


@functools.cache
def _cupy() -> tuple[Any, Any]:
    import cupy

    return cupy.cuda, cupy.ndarray
