"""A kernel that holds a stream until the host says so: what a call queues behind it cannot have run before."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

SOON = 8.0  # seconds: less than MOST, more than a call that does not wait
MOST = 40_000_000_000  # clock cycles, 20 s and more: a call that waits for the device gets on, and is seen
TEXT = """
extern "C" __global__ void hold(const volatile int* open, long long most) {
  const long long start = clock64();
  while (!*open && clock64() - start < most) __nanosleep(1000);
}
"""


@functools.cache
def _kernel() -> Any:
    import cupy

    return cupy.RawKernel(TEXT, "hold")


@contextlib.contextmanager
def held(stream: Any) -> Iterator[None]:
    """Work of the stream queued inside waits until the end of the block, however slow the host is: whatever is still
    to be done there when the block ends proves that no call waited for the device. AssertionError otherwise, with where
    the host was after SOON seconds."""
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(4)
    flag = np.frombuffer(memory, np.int32, 1)
    flag[0] = 0
    gc.collect()  # and not inside: what earlier tests left may unload modules and free memory, which waits
    gc.disable()
    _kernel()((1,), (1,), (np.uintp(memory.ptr), np.int64(MOST)), stream=stream)
    with tempfile.TemporaryFile("w+") as stack:
        faulthandler.dump_traceback_later(SOON, file=stack)
        try:
            yield
            if stream.done:
                stack.seek(0)
                raise AssertionError(f"a call waited for the device; after {SOON} s the host was here:\n{stack.read()}")
        finally:
            faulthandler.cancel_dump_traceback_later()
            flag[0] = 1
            gc.enable()
            stream.synchronize()
