"""Times of calls, on the GPU by events and on the host by its clock, and in what order implementations take turns."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

Call = Callable[[], Any]

SECONDS = 0.25  # of GPU time for one row
SHORT = 0.25  # ms: calls shorter than this are timed in batches of about this length
ROUNDS, TRIES = 3, 200  # turns of each implementation of a case; orders that are drawn for one of them
HOST_ROUNDS = 24  # the same of host times, at least


def orders(count: int, rounds: int = ROUNDS) -> list[list[int]]:
    """Orders for that many rounds, one after the other, in which nobody has the same predecessor twice where there are
    enough to choose from."""
    draws, row = random.Random(count), list(range(count))  # all orders, one after the other
    used = {n: {n} for n in row}  # who has followed each
    for before, after in itertools.pairwise(row):
        used[before].add(after)
    for _ in range(rounds - 1):
        drawn = [_order(draws, row[-1:], used) for _ in range(TRIES)] if count else []
        order = min(drawn, key=lambda x: x[0], default=(0, []))[1]
        for before, after in itertools.pairwise([*row[-1:], *order]):
            used[before].add(after)
        row += order
    return [row[n * count : (n + 1) * count] for n in range(rounds)]


def _order(draws: random.Random, last: list[int], used: dict[int, set[int]]) -> tuple[int, list[int]]:
    """All once, after the last one; and how many of them have had their predecessor before."""
    left, order, again = set(used), list(last), 0
    while left:
        fresh = sorted(left - used[order[-1]])
        again += not fresh
        order.append(draws.choice(fresh or sorted(left)))
        left.remove(order[-1])
    return again, order[len(last) :]


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

    def times(self) -> dict[str, float]:
        """Milliseconds of a call, as a row has them."""
        return {"ms": statistics.median(self._taken)}


class HostTiming(Timing):
    """Samples of the host's time of a call: batches by the host's clock, the GPU idle before each.

    A batch has few enough calls to be queued before a launch would have to wait for an earlier one. Python's garbage
    collector is off meanwhile, as in timeit, and the time is the best turn's median, as there: other work on a machine
    makes Python slower, for seconds at a time, and nothing makes it faster. The median of all is told beside it.
    """

    BATCH, SAMPLES = 24, 8  # calls; samples of a turn

    def __init__(self, calls: list[Call], repeats: int) -> None:
        super().__init__(calls, self.BATCH, max(self.SAMPLES, repeats))
        for call in calls[:3]:
            call()

    def times(self) -> dict[str, float]:
        """The best turn's and the usual milliseconds of a call."""
        turns = [self._taken[n : n + self.samples] for n in range(0, len(self._taken), self.samples)]
        return {"ms": min(map(statistics.median, turns)), "median_ms": statistics.median(self._taken)}

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
    return timing.times()["ms"]


def _sample(calls: list[Call], first: int, count: int) -> tuple[Any, Any]:
    """Events before and after `count` calls, the first of them number `first`."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for n in range(first, first + count):
        calls[n % len(calls)]()
    end.record()
    return begin, end
