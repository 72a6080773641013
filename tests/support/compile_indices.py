"""Compiles the Numba kernels to PTX for sm_90 without a GPU and prints a JSON line per kernel: [name, lines, local].

    python -m tests.support.compile_indices [--numpy-2.5]

local: how many lines name local memory (private arrays; none is meant to). With --numpy-2.5
NumPy's alias row_stack is taken away first, as NumPy 2.5 did. Exit status 77: libNVVM is not installed.
"""

from __future__ import annotations

import json
import sys
import types

import numpy as np

if "--numpy-2.5" in sys.argv:
    vars(np).pop("row_stack", None)
    np.__all__ = [name for name in np.__all__ if name != "row_stack"]

import numba.cuda.dispatcher
from numba import cuda
from numba.cuda.cudadrv import nvvm
from numba.types import Array, int16, int32, int64

from dsv4cp.indexer import numba_cuda as extract
from dsv4cp.sparse_indices import numba_cuda_build as build
from dsv4cp.sparse_indices import numba_cuda_plan as plan

HOPPER = (9, 0)


def kernels():
    """(name, kernel, argument types) of what a GPU run compiles."""

    def c(dtype, ndim):
        return Array(dtype, ndim, "C")

    rest = (c(int64, 2),) * 4 + (c(int64, 3), c(int64, 2)) + (int64,) * 12
    for ids, out, mask in ((int64, int64, c(int64, 3)), (int32, int32, Array(int16, 3, "A"))):
        yield f"build_rows {ids}", build.build_rows, (c(out, 2), c(int64, 2), mask, c(ids, 2), *rest)
    yield "span_totals", build.span_totals, (c(int64, 2), c(int64, 3))
    yield "span_scan", build.span_scan, (c(int64, 2), c(int64, 3), c(int64, 3))
    for ids, out in ((int64, int32), (int64, int64), (int32, int32)):
        yield f"shift_ids {ids} to {out}", plan.shift_ids, (c(ids, 2), c(out, 2), int64, int64)
    rows = (c(int64, 2), c(int32, 2), c(int32, 1), int64, int64)
    yield "compact_rows", plan.compact_rows, rows
    yield "compact_wide_rows", plan.compact_wide_rows, rows
    yield "extract_rows", extract.extract_rows, (Array(int32, 3, "A"), c(int64, 3), c(int32, 3), int32)


def main() -> int:
    # Device functions ask the current device for its architecture even where the kernel's is given.
    numba.cuda.dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=HOPPER)
    try:
        nvvm.NVVM()
    except Exception as error:
        print(f"libNVVM: {error}", file=sys.stderr)
        return 77
    for name, kernel, arguments in kernels():
        text, _ = cuda.compile(kernel.py_func, arguments, cc=HOPPER, device=False, abi="numba")
        lines = text.splitlines()
        local = sum(".local" in line for line in lines)
        print(json.dumps([name, len(lines), local]), flush=True)
    if "--numpy-2.5" in sys.argv and hasattr(np, "row_stack"):
        print("numpy.row_stack was not taken back", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
