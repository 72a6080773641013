"""Runs the Numba Sinkhorn kernels in Numba's simulator, or compiles them; prints a JSON line per case: [name, error].

    NUMBA_ENABLE_CUDASIM=1 python -m tests.support.simulate_sinkhorn
    python -m tests.support.simulate_sinkhorn --compile

Exit status 77: libNVVM, which --compile needs, is not installed.
"""

from __future__ import annotations

import json
import sys
import types

import ml_dtypes
import numpy as np

from dsv4cp.sinkhorn import contract

from . import naive
from .compare import check_close, check_like

# name -> (shape, dtype, repeat, eps)
CASES = {
    "one 4x4": ((4, 4), np.float32, 3, 1e-6),
    "leading axes": ((2, 3, 4, 4), np.float32, 2, 1e-3),
    "1x1": ((3, 1, 1), np.float32, 2, 0.1),
    "5x5, one division": ((2, 5, 5), np.float32, 1, 1e-6),
    "16x16": ((1, 16, 16), np.float32, 2, 1e-6),
    "bfloat16": ((3, 4, 4), ml_dtypes.bfloat16, 2, 1e-6),
    "float16": ((3, 2, 2), np.float16, 2, 1e-6),
    "none": ((0, 4, 4), np.float32, 2, 1e-6),
    "-inf entry": ((2, 4, 4), np.float32, 3, 1e-6),
}


def simulate(name: str) -> None:
    """Raises where forward or backward differ from the oracle."""
    from dsv4cp.sinkhorn import numba_cuda

    shape, dtype, repeat, eps = CASES[name]
    rng = np.random.default_rng(len(name))
    x, grad = (rng.normal(0, 2, shape).astype(dtype) for _ in range(2))
    if name == "-inf entry":
        x[0, 1, 2] = -np.inf
    if x.ndim > 2:  # strided and read-only
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    x.flags.writeable = grad.flags.writeable = False
    spec = contract.check_grad(grad, x, repeat, eps)
    y, grad_x = numba_cuda.forward(x, spec), numba_cuda.backward(grad, x, spec)
    for got in (y, grad_x):
        check_like(got, like=x, dtype=np.dtype(dtype).name, shape=shape)
    if x.size:
        check_close(y, naive.sinkhorn(x, repeat, eps), "sinkhorn")
        check_close(grad_x, naive.sinkhorn_grad(grad, x, repeat, eps), "sinkhorn_grad")


def small_blocks() -> None:
    """The gradient in blocks of one matrix."""
    from dsv4cp.sinkhorn import numba_cuda

    kept, numba_cuda.STATE_BYTES = numba_cuda.STATE_BYTES, 1
    try:
        simulate("leading axes")
    finally:
        numba_cuda.STATE_BYTES = kept


def compiled(name: str) -> None:
    """Raises where a kernel does not compile for sm_90 or computes in float64."""
    from numba import cuda
    from numba.types import Array, float32, int64

    from dsv4cp.sinkhorn import numba_cuda

    a, kept = Array(float32, 3, "C"), Array(float32, 4, "C")
    arguments = (a, a, int64, float32) if name == "normalize" else (a, a, a, kept, a, int64, float32)
    text, _ = cuda.compile(getattr(numba_cuda, name).py_func, arguments, cc=(9, 0), device=False, abi="numba")
    if ".f64" in text:
        raise AssertionError(f"{name} computes in float64")


def main() -> int:
    jobs = {name: lambda name=name: simulate(name) for name in CASES}
    jobs["blocks of one matrix"] = small_blocks
    if "--compile" in sys.argv:
        import numba.cuda.dispatcher
        from numba.cuda.cudadrv import nvvm

        # Device functions ask the current device for its architecture even where the kernel's is given.
        numba.cuda.dispatcher.get_current_device = lambda: types.SimpleNamespace(compute_capability=(9, 0))
        try:
            nvvm.NVVM()
        except Exception as error:
            print(f"libNVVM: {error}", file=sys.stderr)
            return 77
        jobs = {name: lambda name=name: compiled(name) for name in ("normalize", "normalize_grad")}
    for name, job in jobs.items():
        try:
            job()
            error = None
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        print(json.dumps([name, error]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
