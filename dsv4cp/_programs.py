"""Calls of a kind that came before, whatever library their arrays are of: programs by kind, and how they are made.

The first call of a kind goes through checks and launch code; so does the second, after which the launch code is run
once more to note what it launches (_kernel_notes.py). From then on a call is told by its metadata and its launches are
played. How calls are told and programs run is the library's: _bridge_programs.py and _cupy_programs.py. This file knows
no slice.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from ._kernel_notes import Address, Launches, Noting, launches

MOST_KEPT = 1024  # programs of one operation
_UNKNOWN = object()
Make = tuple[tuple[int, ...], str]  # a row-major array: sizes and the dtype's bare name


class Laid(NamedTuple):
    """How an array of a call lies; strides in elements."""

    address: int  # an Address in notes
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def row_major(self) -> bool:
        """Without gaps, the last axis fastest."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


class Making(Noting):
    """Noting of one call: its arrays in `given`, in order, and those that it makes."""

    def __init__(self, arrays: Iterable[Laid]) -> None:
        super().__init__()
        self.given = [x._replace(address=self.array(x.address)) for x in arrays]
        self.makes: list[Make] = []

    def make(self, sizes: Iterable[int], dtype: str) -> Address:
        """A row-major array that the call makes, results first."""
        self.makes.append((tuple(sizes), dtype))
        return self.array()


class Gradients:
    """Programs of the gradients of one kind of calls: their library's to fill (_bridge_programs.py)."""

    __slots__ = ("facts", "known")

    def __init__(self) -> None:
        self.facts: list[tuple[Any, ...]] = []  # of the arrays that such a call is given
        self.known: list[tuple[tuple[Any, ...], Program]] = []  # each with what tells it of calls like these


class Program(NamedTuple):
    """The launches of one kind of call; `makes` as its library makes them, the first `results` are handed out."""

    launches: Launches
    makes: tuple[Any, ...]
    results: int
    gradients: Gradients


class Programs:
    """Programs by the kind of call, for one operation."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def forget(self) -> None:
        """Without any program, as at first."""
        self._known.clear()

    def find(self, kind: tuple[Any, ...]) -> Program | None:
        """The kind's, None where there is none (yet)."""
        return self._known.get(kind) or None

    def settle(
        self, kind: tuple[Any, ...], arrays: Callable[[], list[Laid] | None], note: Callable[[Making], int | None],
        made: Callable[[Make], Any], current: AbstractContextManager[Any],
    ) -> None:  # fmt: skip
        """To be told of a call that the kernels have run. Of the second of its kind, note(making) runs the launch code
        within `current`, and says how many results it has, None where a call of this kind needs more than launches.

        The call has succeeded: an error in noting is a warning, and calls of the kind go on as before."""
        found = self._known.get(kind, _UNKNOWN)
        if found is _UNKNOWN:
            if len(self._known) >= MOST_KEPT:
                self.forget()
            self._known[kind] = None  # sizes that never come again are not worth a program
        elif found is None and not any(type(x) is float and x == 0 for x in kind[1]):  # -0.0 is another call
            try:
                laid = arrays()
                if laid is None:
                    return  # they are others by now
                self._known[kind] = _noted(laid, note, made, current) or False
            except Exception as error:
                self._known[kind] = False
                words = f"a call could not be noted, others like it will take the host longer: {error!r}"
                warnings.warn(words, RuntimeWarning, stacklevel=2)


def _noted(
    laid: list[Laid], note: Callable[[Making], int | None], made: Callable[[Make], Any],
    current: AbstractContextManager[Any],
) -> Program | None:  # fmt: skip
    making = Making(laid)
    with current:
        results = note(making)
    if results is None:
        return None
    return Program(launches(making.steps, making.arrays), tuple(map(made, making.makes)), results, Gradients())
