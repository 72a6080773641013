"""Facts about arrays (library, namespace, device, dtype) and the few operations the array API lacks.

Reads metadata only: looking at device values would hide a synchronisation. Imports no GPU or torch
library; array_api_compat recognises arrays of libraries that the caller has imported already.
"""

from __future__ import annotations

import functools
import operator
import sys
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import array_api_compat as compat
import numpy as np

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ID_DTYPES = ("int32", "int64")
NOT_PLAIN = (np.matrix, np.ma.MaskedArray)  # subclasses whose meaning arithmetic on plain arrays would lose
WRAPPED = ("numpy", "cupy", "torch")  # libraries whose namespaces array_api_compat completes

P = ParamSpec("P")
T = TypeVar("T")


class ArrayFacts(NamedTuple):
    """What the arrays of one call have in common."""

    library: str  # "numpy", "cupy", "torch", or the array-API library's module name
    xp: Any  # array-API namespace
    device: Any


def library(x: object) -> str | None:
    """Name of the library that made x, or None when x is not an array."""
    return _library_of(type(x))


def _library_of(cls: type) -> str | None:
    """library() of the instances of a class, found once: every call of the package asks."""
    if cls not in _LIBRARIES:
        name = cls.__module__.partition(".")[0] if hasattr(cls, "__array_namespace__") else None
        for lib, kind in (("numpy", "ndarray"), ("numpy", "generic"), ("cupy", "ndarray"), ("torch", "Tensor")):
            module = sys.modules.get(lib)  # a class of a library that nobody imported does not exist
            if module is not None and issubclass(cls, getattr(module, kind, ())):
                name = lib
        _LIBRARIES[cls] = name
    return _LIBRARIES[cls]


_LIBRARIES: dict[type, str | None] = {}


def _namespace(lib: str, x: Any) -> Any:
    """Array-API namespace of x."""
    wrapper = getattr(compat, lib, None) if lib in WRAPPED else None  # once loaded: a shortcut past a slow look-up
    return compat.array_namespace(x) if wrapper is None else wrapper


def _device(lib: str, x: Any) -> Any:
    """Device of x, as its library names it."""
    return "cpu" if lib == "numpy" else x.device if lib in WRAPPED else compat.device(x)


def device_of(x: Any) -> Any:
    """Device of an array, as its library names it."""
    return _device(library(x) or "", x)


def facts(**arrays: Any) -> ArrayFacts:
    """Library, namespace and device shared by the given arrays; None values are absent arguments.

    Raises TypeError for a non-array, an array subclass that would lose its meaning (np.matrix, masked
    arrays) or a mix of libraries, ValueError for a mix of devices.
    """
    lib = first = device = None
    for name, x in arrays.items():  # one pass: every call of the package comes through here
        if x is None:
            continue
        kind = library(x)
        if kind is None:
            raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
        if isinstance(x, NOT_PLAIN):
            raise TypeError(f"{name}: expected a plain array, got {type(x).__name__} (convert it with np.asarray)")
        if lib is None:
            lib, first, first_name, device = kind, x, name, _device(kind, x)
        elif kind != lib:
            found = ", ".join(f"{n}: {library(a) or type(a).__name__}" for n, a in arrays.items() if a is not None)
            raise TypeError(f"expected arrays of one library, got {found}")
        elif (here := _device(kind, x)) != device:
            raise ValueError(f"{name}: expected an array on {device} like {first_name}, got one on {here}")
    if lib is None:
        import array_api_compat.numpy as xp

        return ArrayFacts("numpy", xp, "cpu")
    namespace = _namespace(lib, first)
    if lib == "torch":
        for name, x in arrays.items():
            if x is None:
                continue
            if x.layout is not namespace.strided or x.is_nested:
                kind = "nested" if x.is_nested else x.layout
                raise TypeError(f"{name}: expected a dense (strided) tensor, got a {kind} one")
    return ArrayFacts(lib, namespace, device)


def dtype_name(x: Any) -> str:
    """The dtype of an array, or a dtype itself, as a bare name: 'bfloat16', 'float32', 'int64', 'bool'."""
    dtype = getattr(x, "dtype", x)
    if isinstance(dtype, np.dtype):
        return _numpy_name(dtype)
    name = getattr(dtype, "name", None) or str(dtype)
    return name.rpartition(".")[2]


@functools.lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype) -> str:
    """NumPy builds this string anew each time, in Python: a call of the package asks a dozen times."""
    return dtype.name.rpartition(".")[2]


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a bare name; RuntimeError with what to install for a bfloat16 that NumPy does not have."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise RuntimeError("bfloat16 arrays in NumPy need the package ml_dtypes (pip install ml_dtypes)") from error
    return np.dtype(ml_dtypes.bfloat16)


def require_dtype(name: str, x: Any, allowed: tuple[str, ...]) -> str:
    """The dtype's name if it is one of `allowed`, else TypeError."""
    got = dtype_name(x)
    if got not in allowed:
        raise TypeError(f"{name}: expected dtype {' or '.join(allowed)}, got {got}")
    return got


def element_strides(x: Any) -> tuple[int, ...]:
    """Strides in elements, as addresses are made from them. Those of an empty array are zeros before a last 1: its
    address may be null, and a row further along a reversed axis would then lie below 0."""
    if x.size == 0:
        return (*(0,) * (x.ndim - 1), 1)  # what is empty has an axis
    return _in_elements(x.strides, x.itemsize)


@functools.lru_cache(maxsize=1024)  # a call on CuPy arrays asks for the strides of every array twice
def _in_elements(strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(stride // itemsize for stride in strides)


def require_shape(name: str, x: Any, symbols: str, **sizes: int) -> tuple[int, ...]:
    """The shape of x if it fits `symbols` ("B S H D"), where keywords fix the sizes already known."""
    want = symbols.split()
    shape = tuple(x.shape)
    fits = len(shape) == len(want)
    if fits:
        for symbol, size in zip(want, shape, strict=True):
            if symbol in sizes and sizes[symbol] != size:
                fits = False
    if not fits:
        shown = "[" + ", ".join(f"{s}={sizes[s]}" if s in sizes else s for s in want) + "]"
        raise ValueError(f"{name}: expected shape {shown}, got {list(shape)}")
    return shape


def real_number(name: str, value: Any) -> float:
    """A Python float from any real scalar on the host, 0-d NumPy arrays included; never from a device array."""
    if type(value) is float:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected a real number, got {type(value).__name__}")
    if isinstance(value, np.ndarray) and (value.ndim != 0 or dtype_name(value) not in FLOATS + INTEGERS):
        raise TypeError(f"{name}: expected a real number, got a {value.ndim}-d array of {value.dtype}")
    if library(value) not in (None, "numpy") or isinstance(value, (str, bytes, complex, np.complexfloating)):
        raise TypeError(f"{name}: expected a real number on the host, got {type(value).__name__}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: expected a real number, got {type(value).__name__}") from error


def whole_number(name: str, value: Any, *, minimum: int = 0, maximum: int | None = None) -> int:
    """A Python int from any integer scalar on the host within [minimum, maximum]."""
    if type(value) is int:
        number = operator.index(value)  # of a size that torch.compile has made a symbol, its number
    elif isinstance(value, (bool, np.bool_)) or (library(value) not in (None, "numpy")):
        raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")
    else:
        try:
            number = operator.index(value)
        except TypeError as error:
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from error
    if number < minimum:
        raise ValueError(f"{name}: expected an integer of at least {minimum}, got {number}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}: expected an integer of at most {maximum}, got {number}")
    return number


def quiet(function: Callable[P, T]) -> Callable[P, T]:
    """Runs it without NumPy's floating-point warnings: NaN, infinities and overflow are answers here, not surprises."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with np.errstate(all="ignore"):  # one per call: before NumPy 2 the object kept state that threads would share
            return function(*args, **kwargs)

    return run


def compute_dtype(xp: Any, *arrays: Any) -> Any:
    """The dtype arithmetic runs in: float64 if any input is float64, else float32."""
    return xp.float64 if any(dtype_name(a) == "float64" for a in arrays) else xp.float32


def cast(xp: Any, x: Any, dtype: Any) -> Any:
    """x in the given dtype, itself when it has that dtype already."""
    return x if x.dtype == dtype else xp.astype(x, dtype)


def add_rows(xp: Any, total: Any, ids: Any, values: Any) -> Any:
    """total[ids[n]] += values[n] in order of n: [R, D] from ids [N] and values [N, D]; ids outside [0, R) add nothing.

    The array API has no scatter-add. The caller owns `total` and uses the returned array in its place:
    NumPy and CuPy add into it, other libraries return a new one. NumPy adds strictly one after another, so
    any split of the slots into calls gives the same bits; torch on the CPU and the generic form have a
    fixed order too, CuPy's atomics do not. A NaN reaches no row but its own.
    """
    if total.shape[0] == 0 or ids.shape[0] == 0:
        return total
    valid = (ids >= 0) & (ids < total.shape[0])
    if library(total) == "numpy":
        _add_rows_numpy(total, ids, values, valid)
        return total
    ids = xp.where(valid, ids, 0)
    values = xp.where(valid[:, None], values, 0.0)
    if library(total) == "cupy":
        import cupy

        cupy.add.at(total, ids, values)
        return total
    if library(total) == "torch":
        return total.index_add(0, ids, values)
    rows = xp.arange(total.shape[0], dtype=ids.dtype, device=device_of(total))
    one_hot = xp.astype((rows[:, None] == ids[None, :]) & valid[None, :], values.dtype)
    finite = xp.isfinite(values)
    total = total + one_hot @ xp.where(finite, values, 0.0)
    for special in (xp.inf, -xp.inf, xp.nan):  # products with a one-hot matrix would spread them to every row
        there = xp.isnan(values) if special != special else values == special
        total = total + xp.where(one_hot @ xp.astype(there, values.dtype) > 0, special, xp.zeros_like(total))
    return total


def _add_rows_numpy(total: Any, ids: Any, values: Any, valid: Any) -> None:
    """Runs of slots without a repeated id are added at once, run after run: the order of a loop over slots."""
    slots = np.flatnonzero(valid)
    ids = ids[slots]
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    before = np.full(len(ids), -1)  # the slot before n that has the same id
    before[order[1:][same]] = order[:-1][same]
    latest = np.maximum.accumulate(before).tolist()
    buffer = np.empty((0, total.shape[1]), total.dtype)
    first = 0
    while first < len(ids):
        last = bisect_left(latest, first, first)  # the first slot that repeats an id of this run
        rows = ids[first:last]
        if len(buffer) < last - first:
            buffer = np.empty((last - first, total.shape[1]), total.dtype)
        run = buffer[: last - first]
        chosen = slots[first:last]
        whole = int(chosen[-1]) - int(chosen[0]) == last - first - 1
        added = values[int(chosen[0]) : int(chosen[-1]) + 1] if whole else values[chosen]
        np.add(total[rows], added, out=run)
        total[rows] = run
        first = last
