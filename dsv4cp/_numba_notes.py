"""Numba launches as notes for calls that come again (_programs.py). Knows no slice.

Numba needs a tenth of a millisecond to make of a call's arrays what the driver takes: 64-bit words, of an array

    0, 0, its elements, bytes of one, its address, its sizes, its strides in bytes

and of an int the int. For a call that comes again all but the addresses stay, so the words are noted once, as Numba
itself makes them, and _kernels.play hands them on with the addresses of that call. What is noted was compared with the
layout above; where they differ, or an installed numba-cuda has other insides, NotLaunches says so and calls go on
through Numba.
"""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import _numba
from ._arrays import numpy_dtype
from ._kernel_arguments import Blocks
from ._kernel_notes import BASE, ROOM, Address, NotLaunches, Step
from ._kernel_sizes import launch_sizes
from ._kernel_text import Parameter
from ._kernels import Kernel, Loaded
from ._programs import Making

AT = 4  # which word of an array is its address


class NumbaNotes:
    """What `_numba.noting` writes to: launches become steps of `making`, arrays are stand-ins of the right sizes.

    A stand-in lies where no memory is, each in a place of its own, by which a launch tells which array of the call it
    is given. Nothing is allocated: the call may be part of a graph that is being captured.
    """

    def __init__(self, making: Making) -> None:
        self._making = making
        self._addresses: dict[int, Address] = {}

    def given(self) -> list[Any]:
        """Stand-ins for the call's own arrays, in order."""
        return [self._stand_in(x.shape, x.dtype, x.strides, Address(0, n)) for n, x in enumerate(self._making.given)]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """One for an array that the call makes."""
        name = np.dtype(dtype).name
        return self._stand_in(shape, name, None, self._making.make(shape, name))

    def _stand_in(
        self, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None, address: Address
    ) -> Any:
        import cupy

        kind = numpy_dtype(dtype)
        at = BASE + ROOM * len(self._addresses)
        self._addresses[at] = address
        memory = cupy.cuda.UnownedMemory(at, ROOM, self, cupy.cuda.runtime.getDevice())
        steps = None if strides is None else tuple(kind.itemsize * n for n in strides)
        return cupy.ndarray(tuple(shape), kind, cupy.cuda.MemoryPointer(memory, 0), steps)

    def launch(self, kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Notes a launch of Numba's `kernel`. NotLaunches where its words cannot be told."""
        import cupy

        try:
            given = [_numba._launchable(x) if isinstance(x, cupy.ndarray) else x for x in args]
            compiled, theirs = _words(kernel, given)
            played = _kernel(compiled, len(theirs), cupy.cuda.runtime.getDevice())
        except Exception as error:  # numba-cuda's insides are not promised: of another version they may raise anything
            raise NotLaunches(f"{kernel}: {error}") from error
        moves, at = [], 0
        for x in args:
            if isinstance(x, (int, np.integer)):
                at += 1
                continue
            pointer, ours = _array(x)
            if theirs[at : at + len(ours)] != ours:
                raise NotLaunches(f"{kernel}: an array is told in other words")
            if isinstance(x, cupy.ndarray):
                if pointer not in self._addresses:
                    raise NotLaunches(f"{kernel}: an array that begins inside of another")
                moves.append((at + AT, self._addresses[pointer].array, 0))
            at += len(ours) + len(x.shape)  # strides are Numba's to say
        if at != len(theirs):
            raise NotLaunches(f"{kernel}: {len(theirs)} words, expected {at}")
        sizes = launch_sizes(played.function, grid, block)
        self._making.steps.append(Step(played, (*sizes[0], *sizes[1]), 0, tuple(theirs), tuple(moves)))


def _array(x: Any) -> tuple[int, list[int]]:
    """The address of an array of CuPy's or Numba's, and its words up to the sizes."""
    pointer = x.data.ptr if hasattr(x, "data") else x.__cuda_array_interface__["data"][0]
    return pointer, [0, 0, x.size, x.dtype.itemsize, pointer, *x.shape]


def _words(kernel: Any, args: list[Any]) -> tuple[Any, list[int]]:
    """The kernel compiled for these arguments, which it has been launched with, and the words that Numba makes."""
    compiled = kernel.compile(tuple(kernel.typeof_pyval(x) for x in args))
    made: list[Any] = []
    for kind, x in zip(compiled.argument_types, args, strict=True):
        compiled._prepare_args(kind, x, 0, [], made)
    return compiled, [_word(x) for x in made]


def _word(x: Any) -> int:
    if isinstance(x, ctypes._SimpleCData):
        if ctypes.sizeof(x) != 8:
            raise TypeError(f"{x!r} is no 64-bit word")
        x = x.value or 0  # None: a null pointer
    if type(x) is bool or not isinstance(x, (int, np.integer)):
        raise TypeError(f"{x!r} is no 64-bit word")
    return int(x)


@functools.lru_cache(maxsize=256)
def _kernel(compiled: Any, words: int, device: int) -> Kernel:
    """A kernel that Numba compiled and loaded on the current device, which is `device`, ready to be played there."""
    function = compiled._codelibrary.get_cufunc()
    declared = tuple(Parameter(f"word{n}", np.int64, None) for n in range(words))
    loaded = {device: Loaded(SimpleNamespace(ptr=int(function.handle)), None)}
    return Kernel("", function.name, (), None, declared, tuple, (), Blocks(declared), loaded)
