"""Launches of index building and planning as notes for calls that come again (_programs.py), of any library's arrays.

making.given are the arrays of a call that has been checked; the Spec is that of the call on CuPy arrays. None where a
call does more than launch the kernels of numba_cuda.py: casts or copies its arrays, or plans rows wider than they take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _numba
from .._kernel_notes import NotLaunches
from .._numba_notes import NumbaNotes
from .._programs import Making
from . import numba_cuda
from .contract import PlanSpec, Spec


def build(spec: Spec, names: str, making: Making) -> int | None:
    """The arrays of these names, with commas between them, to ids; one named "like" is not read."""
    keys = names.split(",") if names else []

    def call(arrays: list[Any]) -> None:
        read = {name: x for name, x in zip(keys, arrays, strict=True) if name != "like"}
        numba_cuda.build(spec, **read)

    return _noted(making, 1, call)


def plan(spec: PlanSpec, making: Making) -> int | None:
    """topk_idxs to indices and, in the cudnn layout, lengths."""
    results = 2 if spec.layout == "cudnn" else 1
    return _noted(making, results, lambda arrays: numba_cuda.lay_out(arrays[0], spec))


def _noted(making: Making, results: int, call: Callable[[list[Any]], object]) -> int | None:
    notes = NumbaNotes(making)
    arrays = notes.given()
    try:
        with _numba.noting(notes):
            call(arrays)
    except NotLaunches:
        return None
    return results
