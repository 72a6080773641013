"""Which backend a call gets, in plain ifs. Knows no slice: each slice's ops.py says what it offers.

Backends: "reference" (the array-API equations, any library), "cuda" (CuPy RawKernels), "numba"
(Numba CUDA), "cudnn" (NVIDIA's DSA kernels). "auto" is "cuda" or "numba" for CuPy arrays where the op
offers it and this machine can run it, else "reference"; it never picks "cudnn".
"""

from __future__ import annotations

import functools
import warnings

BACKENDS = ("auto", "reference", "cuda", "numba", "cudnn")


@functools.cache  # a machine does not change, and asking the driver takes as long as a launch
def missing(backend: str) -> str | None:
    """Why this machine cannot run a backend, whatever the op; None when it can."""
    if backend == "reference":
        return None
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); install dsv4cp[cuda13] or dsv4cp[cuda12]"
    except OSError as error:  # it makes the folder of its kernel cache when it is imported
        return f"CuPy cannot be imported ({error}); set CUPY_CACHE_DIR to a folder that can be written"
    if not cupy.cuda.is_available():
        return "no CUDA GPU is visible"
    if backend == "numba":
        return _numba_missing()
    if backend == "cudnn":
        return _cudnn_missing()
    return None


@functools.cache  # Python forgets failed imports: without this each call would try again, for seconds
def _numba_missing() -> str | None:
    try:
        from . import _numba
    except Exception as error:  # numba-cuda fails in ways of its own beside a NumPy that it does not know
        return f"numba-cuda cannot be imported ({type(error).__name__}: {error}); it supports NumPy < 2.5"
    if _numba.SIMULATED:
        return "NUMBA_ENABLE_CUDASIM is set: Numba simulates GPUs in this process and cannot use one"
    return None if _numba.cuda.is_available() else "Numba sees no CUDA GPU"


@functools.cache  # once per process
def _warn_of_fallback(reason: str) -> None:
    """Says that "auto" takes the reference although there is a GPU."""
    message = f'dsv4cp: backend "auto" runs the reference instead of Numba\'s kernels: {reason}'
    warnings.warn(message, RuntimeWarning, stacklevel=4)


@functools.cache
def _cudnn_missing() -> str | None:
    from cupy.cuda import Device

    capability = str(Device().compute_capability)
    if capability[:-1] not in ("9", "10"):
        return f"cuDNN's DSA kernels need a Hopper or Blackwell GPU (SM90 or SM100), this one is SM{capability}"
    try:  # the names are looked up when they are asked for: only then are torch and the CuTe DSL imported
        from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper  # noqa: F401
    except Exception as error:  # each with failures of its own
        return f"cuDNN's DSA kernels cannot be imported ({type(error).__name__}: {error}); install dsv4cp[cudnn]"
    return None


def _for_torch(op: str, twin: str) -> str:
    """What to do with torch tensors that an array function got."""
    if not twin:
        return "dsv4cp.torch_ops has no such function; pass x.numpy() or cupy.from_dlpack(x)"
    if twin.endswith("_grad"):  # there autograd does it
        return f"import dsv4cp.torch_ops and differentiate dsv4cp.torch_ops.{twin[:-5]}"
    return f"import dsv4cp.torch_ops and call dsv4cp.torch_ops.{twin}"


def pick(
    op: str,
    backend: str,
    library: str,
    *,
    offered: tuple[str, ...],
    argument: str = "backend",
    twin: str | None = None,
) -> str:
    """The backend that runs `op` on arrays of `library`; `argument` is what the op calls `backend`.

    `twin` is the op's name in dsv4cp.torch_ops where that is another one, "" where it has none there.

    Raises TypeError for torch tensors (dsv4cp.torch_ops takes them), ValueError for an unknown backend
    name, RuntimeError saying what is missing when a backend asked for by name cannot run.
    """
    if library == "torch":
        raise TypeError(f"{op}: got torch tensors; {_for_torch(op, op if twin is None else twin)}")
    if not isinstance(backend, str) or backend not in BACKENDS:  # an array has no truth value to look up by
        raise ValueError(f"{argument}: expected one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "reference":
        return backend
    if backend == "auto":
        if library == "cupy":
            for name in ("cuda", "numba"):
                reason = missing(name) if name in offered else ""
                if reason is None:
                    return name
                if reason and name == "numba" and missing("cuda") is None:
                    _warn_of_fallback(reason)
        return "reference"
    if backend not in offered:
        raise RuntimeError(
            f"{op}: backend {backend!r} is not there: this version of dsv4cp has {', '.join(map(repr, offered))} for it"
        )
    reason = missing(backend)
    if reason is not None:
        raise RuntimeError(f"{op}: backend {backend!r} cannot run: {reason}")
    if library != "cupy":
        raise RuntimeError(f"{op}: backend {backend!r} needs CuPy arrays, got {library} arrays")
    return backend
