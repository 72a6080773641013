"""From CUDA text to a launched kernel: compile, cache, launch. The only caller of cupy.RawModule and of NVRTC.

A kernel is named once with `kernel()`, which compiles nothing, and is compiled at its first launch on a device;
compiled code is kept in memory per device and on disk by CuPy, keyed by the expanded text (_kernel_text.py).

One door launches: `launch()`. It takes kernel arguments by name, checks each against the parameter list in the
CUDA text (kind, width, contiguity), and never lets an empty grid reach the driver. CuPy alone would pass
a Python int as 64 bits, ignore strides and turn None into a null pointer. What was checked is packed in the widths
that the text declares (_kernel_arguments.py), and queued by the driver itself. What launch code would do again for
every call of a kind is noted once (_kernel_notes.py) and played here. This file knows no slice.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ._kernel_arguments import ADDRESSES, Blocks, fitted, plain_type, unpackable, with_bytes
from ._kernel_cache import through_cache
from ._kernel_notes import Launches, Noting
from ._kernel_report import CompileReport, kernel_reports
from ._kernel_sizes import BLOCK_THREADS, GRID_LIMITS, launch_sizes
from ._kernel_text import Parameter, expand, parameters

STANDARD = "-std=c++17"
DEFAULT_SHARED = 48 * 1024  # bytes of dynamic shared memory a kernel may use without opting in
NO_CONTEXT = 201  # cuda.h: CUDA_ERROR_INVALID_CONTEXT

_lock = threading.RLock()


# --- Kernels -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Loaded:
    """A kernel on one device, of this compiler's or another's."""

    function: Any  # cupy.cuda.Function
    raw: Any  # cupy.RawKernel, which sets attributes of the same function
    shared_limit: int = DEFAULT_SHARED


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel by name and specialisation; compiled once per device, when first launched there."""

    file: str
    function: str
    defines: tuple[tuple[str, str], ...]
    arch: str | None  # None: the device's own
    parameters: tuple[Parameter, ...]
    take: Callable[[dict[str, Any]], tuple[Any, ...]]  # the parameters' values in order; KeyError where one is missing
    plain: tuple[tuple[type, ...], ...]  # types of values that need no further look: addresses of either type
    blocks: Blocks
    loaded: dict[int, Loaded] = field(default_factory=dict, repr=False)


def kernel(file: str, function: str, *, defines: Mapping[str, Any] | None = None, arch: str | None = None) -> Kernel:
    """The kernel `function` of kernels_cu/`file`, specialised by -D options; the same object for the same names.

    arch: "sm_90a" where the kernel needs it, else None for the device's own. Nothing is compiled yet.
    Raises FileNotFoundError for a missing file, ValueError for a function that the text does not define or a parameter
    of unknown width.
    """
    return _kernel(file, function, tuple((name, str(value)) for name, value in (defines or {}).items()), arch)


@functools.cache
def _kernel(file: str, function: str, defines: tuple[tuple[str, str], ...], arch: str | None) -> Kernel:
    declared = parameters(file, function)
    names, blocks = tuple(p.name for p in declared), Blocks(declared)
    plain = tuple(tuple(plain_type(p, address) for p in declared) for address in ADDRESSES)
    take = operator.itemgetter(*names) if len(names) > 1 else lambda arguments: tuple(arguments[n] for n in names)
    return Kernel(file, function, defines, arch, declared, take, plain, blocks)


# --- The launch door -----------------------------------------------------------------------------------


def launch(
    kernel: Kernel,
    *,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    shared_bytes: int = 0,
    stream: Any = None,
    device: int | None = None,
    **arguments: Any,
) -> None:
    """Queues one launch of `kernel`, compiling it first where needed. Does not wait for it.

    arguments: the kernel's parameters by name. A pointer takes a contiguous CuPy array of the dtype the text
        declares, or an address as int or np.uintp: 64 bits either way; a scalar takes the NumPy scalar of exactly its
        type (np.int64 for i64); a struct takes bytes, or a NumPy structured scalar or array, of its size in bytes.
    grid, block: 1 to 3 sizes. A grid with a 0 in it launches nothing and never reaches the driver.
    shared_bytes: dynamic shared memory; more than 48 KB is opted in to, with all of L1 given to shared memory.
    stream: None for CuPy's current one, an object with `.ptr`, or a cudaStream_t as int; Noting takes note of the
        launch instead (_kernel_notes.py).
    device: where to launch; None for that of the first CuPy array, else the current one. It is current again
        afterwards whatever it was before.

    Threads may launch at once. Raises TypeError for a missing, unknown or unfit argument and ValueError for a
    non-contiguous array, an address or sizes out of range, each naming it; RuntimeError with the kernel's name where
    compiling, loading or launching fails, naming the package to install where NVRTC or CUDA headers are missing.
    """
    if isinstance(stream, Noting):
        if device is not None:
            raise TypeError(f"{kernel.function}: device: notes are played on the current one")
        stream.launch(kernel, grid, block, shared_bytes, arguments)
        return
    try:
        values = kernel.take(arguments)
    except KeyError:
        values = ()
    if tuple(map(type, values)) not in kernel.plain or len(values) != len(arguments):
        values, device = fitted(kernel.function, kernel.parameters, arguments, device)
    if kernel.blocks.structs:
        values = with_bytes(kernel, values)
    sizes: tuple[int, ...]
    if type(grid) is int and type(block) is int and 0 < grid <= GRID_LIMITS[0] and 0 < block <= BLOCK_THREADS:
        sizes = (grid, 1, 1, block, 1, 1)  # what most launches have: looked at here, a call costs as much again
    else:
        grid, block = launch_sizes(kernel.function, grid, block)
        if 0 in grid:
            return
        sizes = (*grid, *block)
    cuda = _cuda()
    current = cuda.runtime.getDevice()
    if device is None or device == current:
        _queue(kernel, cuda, current, sizes, kernel.blocks, values, shared_bytes, stream)
        return
    cuda.runtime.setDevice(device)
    try:
        _queue(kernel, cuda, device, sizes, kernel.blocks, values, shared_bytes, stream)
    finally:
        cuda.runtime.setDevice(current)


def play(launches: Launches, addresses: Sequence[int], stream: Any, device: int | None = None) -> None:
    """Queues noted launches on the current device, with the arrays of the notes at these addresses.

    device: the current one, None where it is to be asked for.

    stream: as in `launch`; a cudaStream_t where something is set to zero. Raises RuntimeError as `launch` does.
    """
    constants, inside, maps, steps = launches
    values = [*addresses, *constants]
    for array, offset in inside:
        values.append(addresses[array] + offset)
    for array, offset, encode in maps:
        address = addresses[array] + offset
        values.append(encode.known.get(address) or encode(address))
    cuda = _cuda()
    if device is None:
        device = cuda.runtime.getDevice()
    for kernel, sizes, shared_bytes, blocks, pick, size in steps:
        if kernel is None:
            _zero(cuda, pick(values), size, stream)
        else:
            _queue(kernel, cuda, device, sizes, blocks, pick(values), shared_bytes, stream)


def _zero(cuda: Any, address: int, size: int, stream: Any) -> None:
    cuda.runtime.memsetAsync(address, 0, size, stream)


def _queue(
    kernel: Kernel, cuda: Any, device: int, sizes: tuple[int, ...], blocks: Blocks, values: Sequence[Any],
    shared_bytes: int, stream: Any, fresh_thread: bool = False,
) -> None:  # fmt: skip
    loaded = kernel.loaded.get(device) or _load(kernel, device)
    try:
        held = blocks.free.pop()
    except IndexError:
        held = blocks.new()
    try:
        blocks.pack(held.memory, blocks.begin, *values)
        if shared_bytes > loaded.shared_limit:
            _allow_shared(loaded, shared_bytes)
        if stream is None:
            at = cuda.get_current_stream().ptr
        else:
            at = stream if type(stream) is int else stream.ptr
        cuda.driver.launchKernel(loaded.function.ptr, *sizes, shared_bytes, at, held.table, 0)
    except struct.error as error:
        raise unpackable(kernel.function, blocks.packed, values) from error
    except RuntimeError as error:  # CUDADriverError, CUDARuntimeError
        if getattr(error, "status", None) == NO_CONTEXT and not fresh_thread:
            cuda.runtime.memGetInfo()  # the driver alone gives a thread no context, any call of the runtime does
            return _queue(kernel, cuda, device, sizes, blocks, values, shared_bytes, stream, True)
        asked = f"grid {sizes[:3]}, block {sizes[3:]}, {shared_bytes} bytes of shared memory"
        raise RuntimeError(f"{kernel.function}: launch failed: {error} ({asked})") from error
    finally:
        blocks.free.append(held)


def _allow_shared(loaded: Loaded, shared_bytes: int) -> None:
    with _lock:
        loaded.raw.max_dynamic_shared_size_bytes = shared_bytes
        loaded.raw.preferred_shared_memory_carveout = 100
        loaded.shared_limit = shared_bytes


def _load(kernel: Kernel, device: int) -> Loaded:
    """Compiles, or takes from CuPy's disk cache, and loads `kernel` on the current device, which is `device`."""
    with _lock:
        if device in kernel.loaded:
            return kernel.loaded[device]
        options = (STANDARD, *_define_options(kernel.defines), *([f"-arch={kernel.arch}"] if kernel.arch else []))
        text = expand(kernel.file)

        def compiled() -> Loaded:
            raw = _raw_module()(code=text, options=options).get_function(kernel.function)
            return Loaded(raw.kernel, raw)

        try:
            loaded = through_cache(compiled)
        except Exception as error:  # CuPy raises errors of many kinds here; each becomes one with a name and advice
            raise RuntimeError(f"{kernel.file}: {kernel.function}: {_advice(error)}") from error
        kernel.loaded[device] = loaded
        return loaded


@functools.cache
def _cuda() -> Any:
    import cupy.cuda

    return cupy.cuda


def _raw_module() -> Any:
    import cupy

    return cupy.RawModule


# --- Compiling -----------------------------------------------------------------------------------------


def compile_cubin(file: str, *, arch: str, defines: Mapping[str, Any] | None = None) -> CompileReport:
    """Compiles kernels_cu/`file` for sm_`arch` ("80", "90a") with NVRTC, as a launch would; needs no GPU.

    Raises FileNotFoundError for a missing file; RuntimeError with the compiler's log where the text does not
    compile, naming the package to install where NVRTC or CUDA headers are missing.
    """
    text = expand(file)
    pairs = tuple((name, str(value)) for name, value in (defines or {}).items())
    # What CuPy adds to a RawModule's options, so that the tests see what users run.
    as_cupy = ("-ftz=true", "--device-as-default-execution-space")
    options = (STANDARD, f"-arch=sm_{arch}", *_define_options(pairs), *as_cupy, *_include_options())
    try:
        nvrtc = _nvrtc()
        program = nvrtc.createProgram(text, file, (), ())
        try:
            nvrtc.compileProgram(program, (*options, "--ptxas-options=-v"))
            log, cubin = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
        except Exception as error:
            raise RuntimeError(f"{error}\n{nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)
    except (RuntimeError, ImportError, OSError) as error:
        raise RuntimeError(f"{file} for sm_{arch}: {_advice(error)}") from error
    return CompileReport(file, arch, kernel_reports(log), log, cubin)


def _define_options(defines: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in defines)


def _include_options() -> tuple[str, ...]:
    """-I for the CUDA headers, where they are installed."""
    import cupy.cuda

    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folder = find_nvidia_header_directory("cudart")
    except Exception:  # an older or missing cuda-pathfinder: ask CuPy
        folder = None
    if folder is None and (root := cupy.cuda.get_cuda_path()) is not None:
        folder = os.path.join(root, "include")
    return (f"-I{folder}",) if folder else ()


def _advice(error: BaseException) -> str:
    """The error's text, after what to install where it says that NVRTC or a CUDA header is missing."""
    text = f"{type(error).__name__}: {error}"
    suffix = "" if _cuda_major() >= 13 else f"-cu{_cuda_major()}"
    header = re.search(r'(?:cannot|could not) open source file "([^"]+)"', text)
    if header is not None:
        return f"the CUDA header {header[1]} is missing; pip install nvidia-cuda-runtime{suffix}\n{text}"
    if re.search(r"(?i)(find|load|open|import|no such file).*nvrtc", text):
        return f"the CUDA compiler NVRTC is missing; pip install nvidia-cuda-nvrtc{suffix}\n{text}"
    return text


def _cuda_major() -> int:
    """The CUDA version that CuPy was built for."""
    from cupy.cuda import driver

    return driver.get_build_version() // 1000


def _nvrtc() -> Any:
    from cupy.cuda import nvrtc

    return nvrtc
