"""Runs the Numba kernels in Numba's simulator and prints a JSON line per case: [name, seconds, error or null].

    python -m tests.support.simulate_indices

A process of its own, because the simulator must be chosen before Numba's first import and serves all of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before anything imports numba

import ml_dtypes
import numpy as np

from dsv4cp.indexer import contract as indexer_contract
from dsv4cp.indexer import numba_cuda as indexer_numba
from dsv4cp.sparse_indices import contract, numba_cuda, numba_cuda_plan, reference

from .compare import check_equal
from .index_cases import build_cases, extract_cases, extracted, long_build_cases, plan_cases


def frozen(x):
    """A read-only array on the same memory, strides kept."""
    if not isinstance(x, np.ndarray):
        return x
    view = x.view()
    view.flags.writeable = False
    return view


def build(call: dict) -> None:
    call = {name: frozen(x) for name, x in call.items()}
    spec = contract.check(**call)
    arrays = {name: x for name, x in call.items() if isinstance(x, np.ndarray)}
    check_equal(numba_cuda.build(spec, **arrays), reference.build(spec, **arrays))


def plan(ids: np.ndarray, keys: int) -> None:
    ids = frozen(ids)
    for layout in ("cuda", "cudnn"):
        spec = contract.check_plan(ids, keys, layout)
        for got, want in zip(numba_cuda.plan(ids, spec), reference.plan(ids, spec), strict=True):
            if want is not None:
                check_equal(got, want)
            elif got is not None:
                raise AssertionError(f"{layout}: expected None, got {got}")
    spec = contract.check_flatten(ids, keys)
    check_equal(numba_cuda.flatten(ids, spec), reference.flatten(ids, spec))


def promised_plan(ids: np.ndarray, keys: int) -> None:
    spec = contract.check_plan(ids, keys, "cudnn", True)
    indices, lengths, valid_rows = numba_cuda.plan(ids, spec)
    check_equal(indices, reference.plan(ids, spec)[0])
    check_equal(lengths, reference.plan(ids, spec)[1])
    if valid_rows is not None:
        raise AssertionError(f"valid_rows: expected None, got {valid_rows}")


def wide_plan(ids: np.ndarray, keys: int) -> None:
    """The same rows through the kernel for rows that shared memory cannot hold."""
    numba_cuda.PACKED = 0
    try:
        plan(ids, keys)
    finally:
        numba_cuda.PACKED = numba_cuda_plan.PACKED


def extract(logits: np.ndarray, ids: np.ndarray) -> None:
    logits, ids = frozen(logits), frozen(ids)
    spec = indexer_contract.check_extract(logits, ids)
    check_equal(indexer_numba.extract(logits, ids, spec), extracted(logits, ids))


def jobs():
    """(name, function, arguments) of every case."""
    for name, call in build_cases().items():
        yield f"build: {name}", build, (call,)
    name, call = next(iter(long_build_cases().items()))
    yield f"build: {name}", build, (call,)
    for name, case in plan_cases().items():
        yield f"plan: {name}", plan, case
    for name in ("shuffled 65", "empty rows", "ascending with gaps", "repeated"):
        yield f"plan, wide: {name}", wide_plan, plan_cases()[name]
    yield "plan, all rows promised nonempty", promised_plan, plan_cases()["empty rows"]
    for name, case in extract_cases(ml_dtypes.bfloat16).items():
        yield f"extract: {name}", extract, case


def main() -> int:
    for name, function, arguments in jobs():
        start, error = time.perf_counter(), None
        try:
            function(*arguments)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps([name, round(time.perf_counter() - start, 2), error]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
