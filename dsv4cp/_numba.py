"""Numba CUDA behind one door: its import, and launches on CuPy's current stream of the arrays' device.

Only the numba_cuda files of the slices import this module, and they only when their backend was chosen.
Importing it may raise whatever numba-cuda raises where it does not fit the installed NumPy;
_backend.missing("numba") turns that into a sentence.

With NUMBA_ENABLE_CUDASIM=1 in the environment before Numba's first import, the same kernels run in Numba's
simulator on NumPy arrays (tests do that). The simulator has no warp operations, so the kernels use none.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
from numba import cuda as _cuda

from ._kernel_notes import NotLaunches

cuda: Any = _cuda  # what kernels import: under this name the simulator finds it in their modules

SIMULATED = bool(numba.config.ENABLE_CUDASIM)  # type: ignore[attr-defined]

# Numba warns about grids of fewer blocks than this; our kernels stride over the grid, so surplus blocks are
# free, and small problems need not touch the process-wide warning filters.
_LEAST_BLOCKS = 128

_here = threading.local()  # notes: what this thread's launches are noted in, see noting()


def _load_target() -> None:
    """Loads Numba's CUDA target now, lending it numpy.row_stack while it loads.

    numba-cuda 0.30 names numpy.row_stack, an old alias of vstack, when its target loads (else at the first
    compilation); NumPy 2.5 dropped the alias and nothing else that is needed. It is lent and taken back.
    """
    lent = "row_stack" not in vars(np)
    if lent:
        np.row_stack = np.vstack  # type: ignore[attr-defined]
    try:
        importlib.import_module("numba.cuda.np.arrayobj")
    except ModuleNotFoundError:  # an older layout of numba-cuda: it loads its target by itself
        pass
    finally:
        if lent:
            del np.row_stack  # type: ignore[attr-defined]


if not SIMULATED:
    _load_target()


def absent(ndim: int, device: Any) -> Any:
    """An int64 array of one element, ready to launch, for a kernel argument that is not read."""
    return _absent(ndim, 0 if SIMULATED else int(device))


@functools.cache
def _absent(ndim: int, device: int) -> Any:
    return _launchable(_new((1,) * ndim, np.int64, device))


@contextlib.contextmanager
def noting(notes: Any) -> Iterator[None]:
    """In the block this thread's launches are noted (_numba_notes.py) instead of queued, new arrays are stand-ins, and
    what would do other work on the GPU raises NotLaunches."""
    before, _here.notes = _notes(), notes
    try:
        yield
    finally:
        _here.notes = before


def _notes() -> Any:
    return getattr(_here, "notes", None)


def empty(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """A new array: CuPy on the device, NumPy in the simulator."""
    notes = _notes()
    return _new(shape, dtype, device) if notes is None else notes.empty(shape, dtype)


def _new(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    if SIMULATED:
        return np.empty(shape, dtype)
    import cupy

    with cupy.cuda.Device(device):
        return cupy.empty(shape, dtype)


def on(device: Any) -> Any:
    """`with on(device):` array operations run on that device."""
    if _notes() is not None:
        raise NotLaunches("array operations")
    if SIMULATED:
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Device(device)


def own(x: Any) -> Any:
    """x as the array type the host code works on: NumPy in the simulator, else CuPy (other libraries' by view)."""
    if SIMULATED:
        return np.asarray(x)
    import cupy

    if isinstance(x, cupy.ndarray):
        return x
    # DLPack first: the CUDA array interface cannot say bfloat16.
    return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)


def contiguous(x: Any, dtype: Any = None) -> Any:
    """x row-major, itself where it is so already, in the given dtype (default: its own)."""
    other = dtype is not None and x.dtype != dtype
    if not other and x.flags.c_contiguous:
        return x
    if _notes() is not None:
        raise NotLaunches("a copy")
    if other:
        x = x.astype(dtype)
    return x if x.flags.c_contiguous else x.copy(order="C")


def launch(kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], *args: Any) -> None:
    """Queues kernel on CuPy's current stream of the arrays' device and leaves the current device as it was.

    args: CuPy arrays (NumPy in the simulator) and Python ints. The kernel must stride over the grid: more
    blocks in x than asked for may run. An empty grid launches nothing. No host synchronisation: arrays are
    taken without the waiting that the CUDA array interface would do on their stream.
    """
    if 0 in grid:
        return
    if (notes := _notes()) is not None:
        notes.launch(kernel, (max(grid[0], _LEAST_BLOCKS), *grid[1:]), block, args)
        return
    if SIMULATED:
        kernel[grid, block](*[_launchable(a) if isinstance(a, np.ndarray) else a for a in args])
        return
    import cupy

    grid = (max(grid[0], _LEAST_BLOCKS), *grid[1:])
    device = next(a for a in args if isinstance(a, cupy.ndarray)).device
    with device:
        stream = _stream(device.id, cupy.cuda.get_current_stream().ptr)
        kernel[grid, block, stream](*[_launchable(a) if isinstance(a, cupy.ndarray) else a for a in args])


@functools.lru_cache(maxsize=256)
def _stream(device: int, pointer: int) -> Any:
    """Numba's object for a CUDA stream; 0 is the default stream."""
    return cuda.external_stream(pointer) if pointer else 0


def _launchable(x: Any) -> Any:
    """An array as Numba takes it, on the same memory, read-only or not."""
    if SIMULATED:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        return FakeCUDAArray(x)
    return cuda.as_cuda_array(x, sync=False)
