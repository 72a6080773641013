"""CuPy's disk cache of compiled kernels, and the way past it where it fails. Imports nothing of CUDA.

CuPy compares each entry with its hash, builds a damaged one anew, and moves new ones into place whole, so that an
interrupted process or two at once leave nothing broken. What ends a call in CuPy alone: a folder that cannot be written
or read, a full disk, and an entry that is whole and yet no module that this driver loads.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

IN_MEMORY = "CUPY_CACHE_IN_MEMORY"  # CuPy asks for it at every compilation
UNLOADABLE = re.compile("CUDA_ERROR_(INVALID_(IMAGE|SOURCE|PTX)|NO_BINARY_FOR_GPU)")


def through_cache(compiled: Callable[[], T]) -> T:
    """compiled(), and where the disk cache made it fail, compiled() again without that, with a warning.

    For one thread at a time: the switch is an environment variable.
    """
    try:
        return compiled()
    except Exception as error:
        if not isinstance(error, OSError) and UNLOADABLE.search(str(error)) is None:
            raise
        _warn(f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}")
    kept = os.environ.get(IN_MEMORY)
    os.environ[IN_MEMORY] = "1"
    try:
        return compiled()
    finally:
        if kept is None:
            del os.environ[IN_MEMORY]
        else:
            os.environ[IN_MEMORY] = kept


@functools.cache  # once per process
def _warn(reason: str) -> None:
    advice = "every process compiles anew; set CUPY_CACHE_DIR to a folder that can be written"
    warnings.warn(f"dsv4cp: CuPy's kernel cache cannot be used ({reason}): {advice}", RuntimeWarning, stacklevel=7)
