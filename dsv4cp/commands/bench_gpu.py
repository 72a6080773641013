"""The GPU benchmark: the ceilings of this card, then each op at V4's shapes beside its floor and its peers.

A floor is the fewest bytes or multiply-adds an op needs over the ceiling measured here, in the same run: what
share of it an op reaches says how much is left. Inputs are random, and several sets of them take turns, so
that none is still in the L2 cache when its turn comes. Each case is one function that makes a Case.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from .. import _backend

Call = Callable[[], Any]
Function = Callable[..., Any]  # of one input set's arrays, by name
Say = Callable[[str], None]
T = TypeVar("T")

SECONDS = 0.25  # of GPU time for one row
SHORT = 0.25  # ms: calls shorter than this are timed in batches of about this length
MOST_SETS = 512
ROUNDS, TRIES = 3, 1000  # turns of each implementation of a case; orders that are drawn for one of them


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
    for make in (*bench_gpu_cases.CASES, *bench_gpu_layers.cases(), *bench_host.cases()):
        try:
            name = make(True).name.lower() if only else ""
            if only and not any(word.lower() in name for word in only.split(",")):
                continue
            case = make(tiny)
        except Exception as error:
            name = getattr(make, "func", make).__name__
            yield {"case": name, "size": "making inputs", "implementation": "dsv4cp", "failed": _words(error)}
            continue
        say(f"{case.name}: {case.size}")
        ours = [Entry(name, function, case.sets) for name, function in case.ours.items()]
        theirs = _peers(case, say) if peers else []
        made = measured(case, [*ours, *theirs], ceilings, repeats)
        for row in made:
            say(f"  {row['implementation']}: {row.get('failed', row.get('ms'))}")
        yield from made[: len(ours)]
        yield from compared(made[: len(ours)], made[len(ours) :])
        del case, ours, theirs
        release(cupy)


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
) -> list[dict[str, Any]]:
    """A row for each entry; "failed" in it says why there is no time. A long run is not given up for one failure.

    The entries take turns in ROUNDS rounds, in each after others (`orders`): a card that has just had a pause, or
    lighter work, runs faster for a while, and one that is hot or short of power slower, so that a place in the order,
    and who went before, would be worth several percent.
    """
    made: list[dict[str, Any]] = []
    timings: list[Timing | None] = []
    for entry in entries:
        made.append({"case": case.name, "size": case.size, "implementation": entry.implementation})
        prepare = functools.partial(HostTiming, entry.calls(), repeats) if case.host else functools.partial(
            prepared, entry.calls(), repeats
        )  # fmt: skip
        timings.append(_unless_it_fails(made[-1], prepare))
    for order in orders(len(made)):
        for n in order:
            row, timing = made[n], timings[n]
            if timing is not None and "failed" not in row:
                _unless_it_fails(row, timing.take)
    return [
        _rated(case, row, timing.median(), ceilings) if timing is not None and "failed" not in row else row
        for row, timing in zip(made, timings, strict=True)
    ]


def orders(count: int) -> list[list[int]]:
    """ROUNDS orders, in a row, in which nobody has the same predecessor twice where there are enough to choose from."""
    draws, chosen = random.Random(count), [list(range(count))]
    while len(chosen) < ROUNDS:
        one_row = list(itertools.chain(*chosen))
        used = set(itertools.pairwise(one_row))
        for _ in range(TRIES):
            order = draws.sample(range(count), count)
            if used.isdisjoint(itertools.pairwise([*one_row[-1:], *order])) and order[:1] != one_row[-1:]:
                break
        chosen.append(order)
    return chosen


def _unless_it_fails(row: dict[str, Any], call: Callable[[], T]) -> T | None:
    try:
        return call()
    except Exception as error:
        row["failed"] = _words(error)
        return None


def _rated(case: Case, row: dict[str, Any], ms: float, ceilings: Ceilings | None) -> dict[str, Any]:
    """The row with its time, rate and share of the floor."""
    row["ms"] = ms
    if case.flops:
        row["tflops"] = case.flops / ms / 1e9
    elif case.bytes or case.scatter:
        row["gbs"] = (case.bytes or case.scatter) / ms / 1e6
    floor = case.floor(ceilings) if ceilings else None
    return row | ({"floor_ms": floor, "share": floor / ms} if floor is not None else {})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


class Timing:
    """Samples of one implementation's calls on the current stream, by CUDA events, the calls taking turns.

    All samples of a turn are queued before the host waits, so that a sample of a long call is GPU time alone. A sample
    of short calls is a batch of them, divided by their number: where Python is slower than the GPU, that is Python's.
    """

    def __init__(self, calls: list[Call], batch: int, samples: int) -> None:
        self.calls, self.batch, self.samples = calls, batch, samples
        self._taken: list[float] = []
        self._next = 0

    def take(self) -> None:
        """One turn."""
        import cupy

        events = []
        for _ in range(self.samples):
            events.append(_sample(self.calls, self._next, self.batch))
            self._next += self.batch
        cupy.cuda.get_current_stream().synchronize()
        self._taken += [cupy.cuda.get_elapsed_time(*pair) / self.batch for pair in events]

    def median(self) -> float:
        """Milliseconds of a call."""
        return statistics.median(self._taken)


class HostTiming(Timing):
    """Samples of the host's time of a call: batches by the host's clock, the GPU idle before each.

    A batch has few enough calls to be queued before a launch would have to wait for an earlier one. Python's garbage
    collector is off meanwhile, as in timeit.
    """

    BATCH, LEAST = 24, 40  # calls; samples of a turn

    def __init__(self, calls: list[Call], repeats: int) -> None:
        super().__init__(calls, self.BATCH, max(self.LEAST, repeats))
        for call in calls[:3]:
            call()

    def take(self) -> None:
        """One turn."""
        import cupy

        collects = gc.isenabled()
        gc.disable()
        try:
            for _ in range(self.samples):
                cupy.cuda.Device().synchronize()
                begin = time.perf_counter()
                for n in range(self._next, self._next + self.batch):
                    self.calls[n % len(self.calls)]()
                self._taken.append(1e3 * (time.perf_counter() - begin) / self.batch)
                self._next += self.batch
        finally:
            if collects:
                gc.enable()


def prepared(calls: list[Call], repeats: int, rounds: int = ROUNDS) -> Timing:
    """Compiles, warms up, and finds a turn's samples: together `repeats` at least, more of short calls."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    for call in calls[:2] * 2:
        call()
    stream.synchronize()
    once = _sample(calls, 0, 3)
    stream.synchronize()
    estimate = max(cupy.cuda.get_elapsed_time(*once) / 3, 1e-3)
    batch = max(1, round(SHORT / estimate))
    samples = min(max(repeats, 1e3 * SECONDS / (estimate * batch)), 20 * repeats)
    return Timing(calls, batch, -(-int(samples) // rounds))


def timed(calls: list[Call], repeats: int) -> float:
    """Median milliseconds of a call, in one turn."""
    timing = prepared(calls, repeats, 1)
    timing.take()
    return timing.median()


def _sample(calls: list[Call], first: int, count: int) -> tuple[Any, Any]:
    """Events before and after `count` calls, the first of them number `first`."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for n in range(first, first + count):
        calls[n % len(calls)]()
    end.record()
    return begin, end


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
