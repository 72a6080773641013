"""The one comparator: type, dtype, shape, special values, then finite values. It raises; it never returns a verdict."""

from __future__ import annotations

import array_api_compat as compat
import numpy as np

from .tolerances import FROBENIUS, tolerance


def to_numpy(x) -> np.ndarray:
    """Any array on the host, bfloat16 as float32, other dtypes unchanged."""
    if compat.is_torch_array(x):
        x = x.detach().cpu()
        return (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()
    if compat.is_cupy_array(x):
        x = x.get()
    if hasattr(x, "_array"):  # array_api_strict
        x = x._array
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype.name == "bfloat16" else x


def dtype_name(x) -> str:
    dtype = x.dtype
    return (getattr(dtype, "name", None) or str(dtype)).rpartition(".")[2]


def library(x) -> str:
    return type(x).__module__.partition(".")[0]


def check_like(got, *, like=None, dtype: str | None = None, shape: tuple | None = None) -> None:
    """`got` is an array of the library of `like` with the given dtype name and shape."""
    if like is not None and library(got) != library(like):
        raise AssertionError(f"library: expected {library(like)}, got {library(got)}")
    if dtype is not None and dtype_name(got) != dtype:
        raise AssertionError(f"dtype: expected {dtype}, got {dtype_name(got)}")
    if shape is not None and tuple(got.shape) != tuple(shape):
        raise AssertionError(f"shape: expected {tuple(shape)}, got {tuple(got.shape)}")


def check_close(got, want, op: str, dtype: str | None = None, *, like=None) -> None:
    """Floats against the oracle: NaN and infinities in the same places, finite values within the table.

    `dtype` is the input dtype that the tolerance is for (default: got's own).
    """
    check_like(got, like=like, shape=tuple(np.shape(to_numpy(want))))
    rtol, atol = tolerance(op, dtype or dtype_name(got))
    g, w = to_numpy(got).astype(np.float64), to_numpy(want).astype(np.float64)
    for kind, of in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        if not np.array_equal(of(g), of(w)):
            at = np.argwhere(of(g) != of(w))[0]
            raise AssertionError(f"{op}: {kind} differs first at {tuple(at)}: got {g[tuple(at)]}, want {w[tuple(at)]}")
    finite = np.isfinite(w)
    error = np.abs(np.where(finite, g, 0) - np.where(finite, w, 0))
    bound = atol + rtol * np.abs(np.where(finite, w, 0))
    if error.size and (error > bound).any():
        at = np.unravel_index(np.argmax(error - bound), error.shape)
        where = tuple(map(int, at))
        raise AssertionError(f"{op}: {where}: got {g[at]!r}, want {w[at]!r}, error {error[at]:.3g} > {bound[at]:.3g}")


def check_frobenius(got, want, op: str, limit: float | None = None) -> float:
    """||got - want|| / ||want|| within the limit; returns it for printing. NaN anywhere fails."""
    g, w = to_numpy(got).astype(np.float64), to_numpy(want).astype(np.float64)
    check_like(got, shape=w.shape)
    norm = float(np.linalg.norm(w))
    error = float(np.linalg.norm(g - w)) / (norm if norm > 0 else 1.0)
    limit = FROBENIUS[op] if limit is None else limit
    if not error <= limit:
        raise AssertionError(f"{op}: relative Frobenius error {error:.3g} > {limit:.3g}")
    return error


def check_equal(got, want, *, like=None, same_dtype: bool = True) -> None:
    """Bit-for-bit: integers exactly, floats with NaN equal to NaN and -0.0 different from +0.0."""
    g, w = to_numpy(got), to_numpy(want)
    check_like(got, like=like, shape=w.shape)
    if same_dtype and dtype_name(got) != dtype_name(want):
        raise AssertionError(f"dtype: expected {dtype_name(want)}, got {dtype_name(got)}")
    same = g == w
    if g.dtype.kind == "f":
        same = (same & (np.signbit(g) == np.signbit(w))) | (np.isnan(g) & np.isnan(w))
    if not np.all(same):
        at = tuple(map(int, np.argwhere(~same)[0]))
        count = int((~same).sum())
        raise AssertionError(f"{count} of {same.size} elements differ, first at {at}: got {g[at]!r}, want {w[at]!r}")
