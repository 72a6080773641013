"""The GPU benchmark: the ceilings of this card, then each op at V4's shapes beside its floor and its peers.

A floor is the fewest bytes or multiply-adds an op needs over the ceiling measured here, in the same run: what
share of it an op reaches says how much is left. Inputs are random, and several sets of them take turns, so
that none is still in the L2 cache when its turn comes. Each case is one function that makes a Case.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .. import _backend
from .bench_timing import HOST_ROUNDS, Call, HostTiming, Timing, orders, prepared

Function = Callable[..., Any]  # of one input set's arrays, by name
Say = Callable[[str], None]
T = TypeVar("T")

MOST_SETS = 512


@dataclass(frozen=True)
class Ceilings:
    """What this card reaches on plain work: tensor-core operations and bytes per millisecond."""

    flops: float  # bf16 matrix product
    bytes: float  # device copy, read plus written
    scatter: float  # fp32 added to random rows, payload only


@dataclass(frozen=True)
class Case:
    """An op at a shape: its least work, and how it is called on each of several input sets."""

    name: str  # what is measured
    size: str  # at which shape of which model
    op: str  # what bench_peers calls it
    sets: list[dict[str, Any]]  # CuPy arrays by name, one dictionary an input set
    ours: dict[str, Function]  # implementation -> function of one set's arrays
    flops: float = 0.0
    bytes: float = 0.0
    scatter: float = 0.0  # bytes added to random rows
    launch_bound: bool = False  # too small for a floor: the row is the time per call, Python included
    host: bool = False  # the row is the host's time, whatever the GPU has still to do

    def floor(self, ceilings: Ceilings) -> float | None:
        """The least milliseconds, None where launches cost more than the work."""
        if self.launch_bound:
            return None
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bytes, self.scatter / ceilings.scatter)


class Entry(NamedTuple):
    """What a row measures: a function of one set's arrays, and the sets."""

    implementation: str
    function: Function
    sets: list[dict[str, Any]]

    def calls(self) -> list[Call]:
        """One call for each set."""
        return [functools.partial(self.function, **arrays) for arrays in self.sets]


def missing() -> str | None:
    """Why there is nothing to measure on this machine, None when there is."""
    return _backend.missing("cuda")


def rows(*, peers: bool, tiny: bool, repeats: int, say: Say, only: str = "") -> Iterator[dict[str, Any]]:
    """Ceilings first, then every case: our rows, and with `peers` one row for each installed peer of its op.

    repeats: the least number of samples whose median a row is; short calls get more of them. `say` gets a line
    before each step and for each peer that is not there. only: words, with commas between them, one of which is in
    the names of the cases wanted.
    """
    import cupy

    from . import bench_ceilings, bench_gpu_cases, bench_gpu_layers, bench_host

    ceilings = None
    for found in bench_ceilings.rows(tiny=tiny, repeats=repeats, say=say):
        if isinstance(found, Ceilings):
            ceilings = found
        else:
            yield found
    hosts: list[Case] = []
    for make in bench_host.cases():
        yield from _made(make, only, tiny, hosts)
    host = Measuring([(case, entries_of(case)) for case in hosts], repeats)
    rounds = 1 if tiny else HOST_ROUNDS
    turns = itertools.cycle(orders(host.count, rounds))
    for make in (*bench_gpu_cases.CASES, *bench_gpu_layers.cases()):
        yield from _alone(make, only, tiny, ceilings, peers=peers, repeats=repeats, say=say)
        release(cupy)
        if not tiny:
            host.turn(next(turns))  # now and then through the whole run
    while host.turns < rounds:
        host.turn(next(turns))
    for case, made in zip(hosts, host.rows(ceilings), strict=True):
        say(f"{case.name}: {case.size}")
        _tell(made, say)
        yield from made


Make = Callable[[bool], Case]  # of whether it shall be tiny


def _is_wanted(make: Make, only: str) -> bool:
    """Whether a word of `only` is in the case's name; a case that cannot be made has none, and is to be heard of."""
    try:
        name = make(True).name.lower()
    except Exception:
        return True
    return any(word in name for word in wanted_words(only))


def wanted_words(only: str) -> list[str]:
    """What the option --only asks for."""
    return [word.strip().lower() for word in only.split(",") if word.strip()]


def _made(make: Make, only: str, tiny: bool, made: list[Case]) -> Iterator[dict[str, Any]]:
    """Appends the case to `made`, if it is wanted; a row that says why, if it cannot be made."""
    try:
        if not only or _is_wanted(make, only):
            made.append(make(tiny))
    except Exception as error:
        name = " ".join([getattr(make, "func", make).__name__, *map(str, getattr(make, "keywords", {}).values())])
        yield {"case": name, "size": "making inputs", "implementation": "dsv4cp", "failed": _words(error)}


def entries_of(case: Case) -> list[Entry]:
    """Ours."""
    return [Entry(name, function, case.sets) for name, function in case.ours.items()]


def _alone(
    make: Make, only: str, tiny: bool, ceilings: Ceilings | None, *, peers: bool, repeats: int, say: Say
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of a case whose entries take turns with one another, peers' among them."""
    cases: list[Case] = []
    yield from _made(make, only, tiny, cases)
    for case in cases:
        say(f"{case.name}: {case.size}")
        ours, theirs = entries_of(case), _peers(case, say) if peers else []
        made = measured(case, [*ours, *theirs], ceilings, repeats)
        _tell(made, say)
        yield from made[: len(ours)]
        yield from compared(made[: len(ours)], made[len(ours) :])


def _tell(made: list[dict[str, Any]], say: Say) -> None:
    for row in made:
        say(f"  {row['implementation']}: {row.get('failed', row.get('ms'))}")


def _peers(case: Case, say: Say) -> list[Entry]:
    from . import bench_peers

    return [Entry(*peer) for peer in bench_peers.of(case.op, case.sets, say)]


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The peers' rows that have a time; `ratio` says how many times as fast as it our best row is, without cuDNN's
    kernels under our backend of that name."""
    best = min((made["ms"] for made in ours if "ms" in made and not by_cudnn(made)), default=None)
    for made in theirs:
        if "ms" in made:  # a peer that fails here has said so: it is no failure of this package
            yield made | ({"ratio": made["ms"] / best} if best else {}) | {"peer": True}


def by_cudnn(row: dict[str, Any]) -> bool:
    """Whether a row of ours runs NVIDIA's kernels."""
    return " cudnn" in row.get("implementation", "")


def measured(
    case: Case, entries: Sequence[Entry], ceilings: Ceilings | None, repeats: int
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each entry, which take turns in a few rounds."""
    measuring = Measuring([(case, entries)], repeats)
    for order in orders(measuring.count):
        measuring.turn(order)
    [made] = measuring.rows(ceilings)
    return made


class Measuring:
    """Entries of some cases, which take turns in rounds.

    In each round they come after others (`orders`): a card that has just had a pause, or lighter work, runs faster for
    a while, and one that is hot or short of power slower, so that a place in the order, and who went before, would be
    worth several percent. What fails has a row that says why: a long run is not given up for it.
    """

    def __init__(self, group: Sequence[tuple[Case, Sequence[Entry]]], repeats: int) -> None:
        self.turns = 0
        self._rows: list[list[dict[str, Any]]] = []
        self._taken: list[tuple[Case, dict[str, Any], Timing | None]] = []
        for case, entries in group:
            self._rows.append([])
            for entry in entries:
                row = {"case": case.name, "size": case.size, "implementation": entry.implementation}
                prepare = functools.partial(HostTiming if case.host else prepared, entry.calls(), repeats)
                self._rows[-1].append(row)
                self._taken.append((case, row, _unless_it_fails(row, prepare)))

    @property
    def count(self) -> int:
        """How many take turns."""
        return len(self._taken)

    def turn(self, order: Sequence[int]) -> None:
        """One round."""
        self.turns += 1
        for n in order:
            _, row, timing = self._taken[n]
            if timing is not None and "failed" not in row:
                _unless_it_fails(row, timing.take)

    def rows(self, ceilings: Ceilings | None) -> list[list[dict[str, Any]]]:
        """For each case a row for each entry."""
        for case, row, timing in self._taken:
            if timing is not None and "failed" not in row:
                row |= timing.times()
                _rate(case, row, ceilings)
        return self._rows


def _unless_it_fails(row: dict[str, Any], call: Callable[[], T]) -> T | None:
    try:
        return call()
    except Exception as error:
        row["failed"] = _words(error)
        return None


def _rate(case: Case, row: dict[str, Any], ceilings: Ceilings | None) -> None:
    """Adds the row's rate and share of the floor."""
    ms = row["ms"]
    if case.flops:
        row["tflops"] = case.flops / ms / 1e9
    elif case.bytes or case.scatter:
        row["gbs"] = (case.bytes or case.scatter) / ms / 1e6
    floor = case.floor(ceilings) if ceilings else None
    if floor is not None:
        row |= {"floor_ms": floor, "share": floor / ms}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def input_sets(bytes_each: int, tiny: bool) -> int:
    """How many input sets take turns: together several times the L2 cache, two at least."""
    import cupy

    cache = cupy.cuda.Device().attributes["L2CacheSize"]
    return 2 if tiny else min(max(2, -(-4 * cache // max(bytes_each, 1))), MOST_SETS)


def release(cupy: Any) -> None:
    """Give the memory of a finished case back, torch's too, so that the next one finds the card empty."""
    import gc
    import sys

    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
