"""The GPU benchmark: the ceilings of this card, then each op at V4's shapes beside its floor and its peers.

A floor is the fewest bytes or multiply-adds an op needs over the ceiling measured here, in the same run: what
share of it an op reaches says how much is left. Inputs are random, and several sets of them take turns, so
that none is still in the L2 cache when its turn comes. Each case is one function that makes a Case.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .. import _backend

Call = Callable[[], Any]
Function = Callable[..., Any]  # of one input set's arrays, by name
Say = Callable[[str], None]

SECONDS = 0.25  # of GPU time for one row
SHORT = 0.25  # ms: calls shorter than this are timed in batches of about this length
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

    def floor(self, ceilings: Ceilings) -> float | None:
        """The least milliseconds, None where launches cost more than the work."""
        if self.launch_bound:
            return None
        return max(self.flops / ceilings.flops, self.bytes / ceilings.bytes, self.scatter / ceilings.scatter)


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

    from . import bench_ceilings, bench_gpu_cases, bench_gpu_layers

    ceilings = None
    for found in bench_ceilings.rows(tiny=tiny, repeats=repeats, say=say):
        if isinstance(found, Ceilings):
            ceilings = found
        else:
            yield found
    for make in (*bench_gpu_cases.CASES, *bench_gpu_layers.cases()):
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
        ours = [row(case, name, function, ceilings, repeats) for name, function in case.ours.items()]
        for made in ours:
            say(f"  {made['implementation']}: {made.get('failed', made.get('ms'))}")
            yield made
        if peers:
            yield from _peer_rows(case, ours, ceilings, repeats, say)
        del case
        release(cupy)


def _peer_rows(
    case: Case, ours: list[dict[str, Any]], ceilings: Ceilings | None, repeats: int, say: Say
) -> Iterator[dict[str, Any]]:
    """A row for each installed peer of the case's op; `ratio` says how many times as fast as it our best row is."""
    from . import bench_peers

    best = min((made["ms"] for made in ours if "ms" in made), default=None)
    for implementation, function in bench_peers.of(case.op, case.sets, say):
        made = row(case, implementation, function, ceilings, repeats)
        say(f"  {implementation}: {made.get('failed', made.get('ms'))}")
        if "ms" in made:  # a peer that fails here has said so: it is no failure of this package
            yield made | ({"ratio": made["ms"] / best} if best else {}) | {"peer": True}


def row(
    case: Case, implementation: str, function: Callable[..., Any], ceilings: Ceilings | None, repeats: int
) -> dict[str, Any]:
    """One measured row; "failed" in it says why there is no time. A long run is not given up for one failure."""
    made: dict[str, Any] = {"case": case.name, "size": case.size, "implementation": implementation}
    try:
        ms = timed([lambda s=s: function(**s) for s in case.sets], repeats)  # type: ignore[misc]
    except Exception as error:
        return made | {"failed": _words(error)}
    made["ms"] = ms
    if case.flops:
        made["tflops"] = case.flops / ms / 1e9
    else:
        made["gbs"] = (case.bytes or case.scatter) / ms / 1e6
    floor = case.floor(ceilings) if ceilings else None
    return made | ({"floor_ms": floor, "share": floor / ms} if floor is not None else {})


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


def timed(calls: list[Call], repeats: int) -> float:
    """Median milliseconds of a call, the calls taking turns; CUDA events on the current stream.

    All samples are queued before the host waits, so that a sample of a long call is GPU time alone. A sample of
    short calls is a batch of them, divided by their number: where Python is slower than the GPU, that is Python's time.
    """
    import cupy

    stream = cupy.cuda.get_current_stream()
    for call in calls[:2] * 2:  # compile, warm up
        call()
    stream.synchronize()
    once = _sample(calls, 0, 3)
    stream.synchronize()
    estimate = max(cupy.cuda.get_elapsed_time(*once) / 3, 1e-3)
    batch = max(1, round(SHORT / estimate))
    samples = int(min(max(repeats, 1e3 * SECONDS / (estimate * batch)), 20 * repeats))
    events = [_sample(calls, n * batch, batch) for n in range(samples)]
    stream.synchronize()
    return statistics.median(cupy.cuda.get_elapsed_time(*pair) / batch for pair in events)


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
