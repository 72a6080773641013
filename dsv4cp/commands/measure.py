"""Time and peak memory of a call, on the host or on a CuPy GPU."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple


class Measured(NamedTuple):
    """A call's result, its milliseconds and the MiB that it held at most beyond what was there before it."""

    result: Any
    ms: float
    peak_mib: float


def measured(function: Callable[[], Any], library: str) -> Measured:
    """Calls twice: once for the memory (and to compile and warm up), once for the time."""
    if library == "cupy":
        return _measured_on_gpu(function)
    peak = peak_mib(function)
    start = time.perf_counter()
    result = function()
    return Measured(result, 1e3 * (time.perf_counter() - start), peak)


def peak_mib(function: Callable[[], Any]) -> float:
    """What a call holds at most on the host, its result included, as NumPy reports it (BLAS buffers are not in it)."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        function()
        return (tracemalloc.get_traced_memory()[1] - before) / 2**20
    finally:
        tracemalloc.stop()


def _measured_on_gpu(function: Callable[[], Any]) -> Measured:
    """CUDA events for the time, the growth of CuPy's memory pool for the peak."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    function()
    peak = (pool.total_bytes() - before) / 2**20
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    result = function()
    end.record()
    end.synchronize()
    return Measured(result, cupy.cuda.get_elapsed_time(begin, end), peak)
