"""Launches noted instead of queued: launch code runs once for a kind of call, `_kernels.play` repeats what it did.

Noting is given to launch code as its stream, and `launches` makes of its steps what is played. Arrays stand there as
`Address`, which remembers through sums in which array it lies, and tensor maps as `MapBytes`, which remember what they
describe; all else that the code computes is the same for every call of the kind. An address that is neither is refused
while noting. This file knows no slice.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ._kernel_arguments import Blocks, fitted, with_bytes
from ._kernel_sizes import launch_sizes

BASE, ROOM = 2**44, 2**41  # where arrays that are yet to be made seem to lie, each with room for more than a device has


class NotLaunches(Exception):
    """Code that is being noted would do more than launch kernels, or launches what cannot be noted."""


class Address(int):
    """`offset` bytes into one of a note's arrays. Sums with numbers stay in that array; all else is a plain int."""

    array: int
    offset: int

    def __new__(cls, at: int, array: int, offset: int = 0) -> Address:
        self = super().__new__(cls, at)
        self.array, self.offset = array, offset
        return self

    def __add__(self, more: int) -> Address:
        if isinstance(more, Address):
            raise TypeError("the sum of two addresses lies in no array")
        return Address(int(self) + int(more), self.array, self.offset + int(more))

    __radd__ = __add__


class MapBytes(bytes):
    """A tensor map of what is at `address`; encode(address) makes the same of another."""

    address: Address
    encode: Callable[[int], bytes]

    def __new__(cls, of: bytes, address: Address, encode: Callable[[int], bytes]) -> MapBytes:
        self = super().__new__(cls, of)
        self.address, self.encode = address, encode
        return self


class Step(NamedTuple):
    """One launch. values: the kernel's parameters, where they do not vary; a step without a kernel zeroes `size` bytes.

    moves: (which value, array, offset) of addresses; maps: the same of tensor maps, with what encodes them.
    """

    kernel: Any
    sizes: tuple[int, ...] = ()
    shared_bytes: int = 0
    values: tuple[Any, ...] = ()
    moves: tuple[tuple[int, int, int], ...] = ()
    maps: tuple[tuple[int, int, int, Callable[[int], bytes]], ...] = ()
    size: int = 0


class Launches(NamedTuple):
    """Steps as they are played: a call's values are laid side by side once, and each launch picks its own; what all
    calls share is in the blocks that it packs them into.

    Side by side lie the addresses of the arrays, then `constants` that stand between a launch's own values, then
    addresses inside of arrays (array, offset), then tensor maps (array, offset, what encodes them).
    """

    constants: tuple[Any, ...]
    inside: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, int, Any], ...]
    steps: tuple[Played, ...]


# kernel, sizes and shared_bytes as in Step; its blocks; what picks its values, or the address to zero; size as in Step.
Played = tuple[Any, tuple[int, ...], int, Any, Callable[[Sequence[Any]], Any], int]


def launches(steps: Sequence[Step], arrays: int) -> Launches:
    """What _kernels.play plays of steps that a Noting of so many arrays has."""
    inside = sorted({(array, offset) for x in steps for _, array, offset in x.moves if offset})
    maps = list(dict.fromkeys((array, offset, encode) for x in steps for _, array, offset, encode in x.maps))
    constants: list[Any] = []
    places: list[dict[int, Any]] = []  # by step: which value of the kernel, and where it lies side by side
    for step in steps:
        at: dict[int, Any] = {n: (array, offset) for n, array, offset in step.moves}
        at |= {n: (array, offset, encode) for n, array, offset, encode in step.maps}
        for n in range(min(at, default=0), max(at, default=0)):
            if n not in at:
                at[n] = arrays + len(constants)
                constants.append(step.values[n])
        places.append(at)

    def place(x: Any) -> int:
        if isinstance(x, int):
            return x
        if len(x) == 3:
            return arrays + len(constants) + len(inside) + maps.index(x)
        return arrays + len(constants) + inside.index(x) if x[1] else x[0]

    played = []
    for step, at in zip(steps, places, strict=True):
        of, blocks = [place(at[n]) for n in sorted(at)], None
        if step.kernel is not None:
            blocks = Blocks(step.kernel.parameters, step.values, at)
        pick = operator.itemgetter(*of) if len(of) > 1 or blocks is None else functools.partial(_few, of)
        played.append((step.kernel, step.sizes, step.shared_bytes, blocks, pick, step.size))
    return Launches(tuple(constants), tuple(inside), tuple(maps), tuple(played))


def _few(places: list[int], values: Sequence[Any]) -> tuple[Any, ...]:
    """What itemgetter gives of more than one place."""
    return tuple(values[n] for n in places)


class Noting:
    """A stream for launch code, which queues nothing: `steps` has what was launched."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.arrays = 0

    def array(self, address: int | None = None) -> Address:
        """One more array, in the order in which `_kernels.play` takes their addresses. address: where it is this time,
        None where it is yet to be made."""
        self.arrays += 1
        return Address(BASE + self.arrays * ROOM if address is None else address, self.arrays - 1)

    def launch(self, kernel: Any, grid: Any, block: Any, shared_bytes: int, arguments: dict[str, Any]) -> None:
        """Notes what _kernels.launch was asked for. Raises as it does, and TypeError for an address in no array."""
        given = {name: _plain(x) for name, x in arguments.items()}
        values = list(fitted(kernel.function, kernel.parameters, given, None)[0])
        moves, maps = [], []
        for n, parameter in enumerate(kernel.parameters):
            x = arguments[parameter.name]
            if type(x) is Address:
                moves.append((n, x.array, x.offset))
            elif type(x) is MapBytes:
                maps.append((n, x.address.array, x.address.offset, x.encode))
            elif parameter.kind is np.void or (parameter.kind is None and values[n] != 0):
                raise TypeError(f"{kernel.function}: {parameter.name}: {x!r} lies in no array of these notes")
        values = list(with_bytes(kernel, tuple(values))) if kernel.blocks.structs else values
        sizes = launch_sizes(kernel.function, grid, block)
        if 0 not in sizes[0]:
            # The driver is told Python numbers of the same values, which are quicker to pack than NumPy scalars.
            plain = tuple(x.item() if isinstance(x, np.generic) else x for x in values)
            self.steps.append(
                Step(kernel, (*sizes[0], *sizes[1]), shared_bytes, plain, tuple(moves), tuple(maps))
            )

    def zero(self, address: Address, size: int) -> None:
        """Notes that `size` bytes are set to zero."""
        if type(address) is not Address:
            raise TypeError(f"{address!r} lies in no array of these notes")
        self.steps.append(Step(None, moves=((0, address.array, address.offset),), size=size))


def _plain(x: Any) -> Any:
    """What a launch is told in the place of a noted value."""
    return int(x) if type(x) is Address else bytes(x) if type(x) is MapBytes else x
