"""What Sinkhorn normalisation accepts: shapes, dtypes and limits, checked once, from metadata only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .. import _arrays

FLOAT32_MAX = 3.4028234663852886e38
LARGEST_REPEAT = 2**31 - 1
KERNEL_M = 16  # what the GPU kernels take
KNOWN_CALLS = 1024
_known: dict[tuple[Any, ...], Spec] = {}  # of CuPy arrays, by everything that a check looks at
_kinds: set[type] = set()  # array types in _known


@dataclass(frozen=True)
class Spec:
    """A checked call: x is `matrices` matrices of M x M."""

    library: str
    xp: Any
    device: Any
    shape: tuple[int, ...]
    m: int
    matrices: int
    dtype: str
    compute: str  # dtype of the arithmetic, "float32" or "float64"
    repeat: int
    eps: float


def check(x: Any, repeat: Any, eps: Any) -> Spec:
    """The Spec of a forward call; TypeError for kinds and dtypes, ValueError for shapes and ranges."""
    if type(x) in _kinds and type(repeat) is int and type(eps) is float:
        spec = _known.get((type(x), x.data.device_id, x.dtype, x.shape, repeat, eps))
        if spec is not None:
            return spec
    return _spec(_arrays.facts(x=x), x, repeat, eps)


def check_grad(grad_y: Any, x: Any, repeat: Any, eps: Any) -> Spec:
    """The Spec of a gradient call; grad_y has x's shape, library and device, and any supported dtype."""
    spec = _spec(_arrays.facts(x=x, grad_y=grad_y), x, repeat, eps)
    _arrays.require_dtype("grad_y", grad_y, _arrays.FLOATS)
    if tuple(grad_y.shape) != spec.shape:
        raise ValueError(f"grad_y: expected shape {list(spec.shape)} like x, got {list(grad_y.shape)}")
    return spec


def kernels_unfit(spec: Spec) -> str | None:
    """Why the GPU kernels cannot take this call, None when they can."""
    if spec.compute == "float64":
        return "x: the kernels compute in float32, got float64"
    if spec.m > KERNEL_M:
        return f"x: the kernels take matrices up to {KERNEL_M} x {KERNEL_M}, got {spec.m} x {spec.m}"
    return None


def within_kernels(op: str, backend: str, spec: Spec) -> str:
    """`backend`, or "reference" where "auto" has a call that no kernel takes; RuntimeError where one was asked for."""
    reason = kernels_unfit(spec)
    if reason is None or not isinstance(backend, str) or backend not in ("auto", "cuda", "numba"):
        return backend
    if backend == "auto":
        return "reference"
    raise RuntimeError(f"{op}: backend {backend!r} cannot run: {reason}")


def _spec(facts: _arrays.ArrayFacts, x: Any, repeat: Any, eps: Any) -> Spec:
    """The Spec of x with the two numbers; of a CuPy array, that of an earlier call where everything is the same."""
    if x is None:
        raise TypeError("x: expected an array, got NoneType")
    shape = tuple(x.shape)
    if facts.library != "cupy" or type(repeat) is not int or type(eps) is not float:
        return _checked(facts, x, shape, repeat, eps)
    # Looking at a CuPy array anew would take longer than a launch. torch's bridge keeps Specs of its own:
    # torch.compile, which traces through here, allows no module state.
    key = (type(x), x.data.device_id, x.dtype, shape, repeat, eps)
    spec = _known.get(key)
    if spec is None:
        spec = _checked(facts, x, shape, repeat, eps)
        if len(_known) >= KNOWN_CALLS:
            _known.clear()
        _known[key] = spec
        _kinds.add(type(x))
    return spec


def _checked(facts: _arrays.ArrayFacts, x: Any, shape: tuple[int, ...], repeat: Any, eps: Any) -> Spec:
    dtype = _arrays.require_dtype("x", x, _arrays.FLOATS)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] < 1:
        raise ValueError(f"x: expected shape [..., M, M] with M >= 1, got {list(shape)}")
    compute = "float64" if dtype == "float64" else "float32"
    number = _arrays.real_number("eps", eps)
    largest = FLOAT32_MAX if compute == "float32" else math.inf
    if not (0 <= number < math.inf and number <= largest):
        raise ValueError(f"eps: expected a finite number of at least 0 that {compute} can hold, got {number}")
    return Spec(
        library=facts.library,
        xp=facts.xp,
        device=facts.device,
        shape=shape,
        m=shape[-1],
        matrices=math.prod(shape[:-2]),
        dtype=dtype,
        compute=compute,
        repeat=_arrays.whole_number("repeat", repeat, minimum=1, maximum=LARGEST_REPEAT),
        eps=number,
    )
