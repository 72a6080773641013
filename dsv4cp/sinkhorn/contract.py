"""What Sinkhorn normalisation accepts: shapes, dtypes and limits, checked once, from metadata only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .. import _arrays

FLOAT32_MAX = 3.4028234663852886e38


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
    return _spec(_arrays.facts(x=x), x, repeat, eps)


def check_grad(grad_y: Any, x: Any, repeat: Any, eps: Any) -> Spec:
    """The Spec of a gradient call; grad_y has x's shape, library and device, and any supported dtype."""
    spec = _spec(_arrays.facts(x=x, grad_y=grad_y), x, repeat, eps)
    _arrays.require_dtype("grad_y", grad_y, _arrays.FLOATS)
    if tuple(grad_y.shape) != spec.shape:
        raise ValueError(f"grad_y: expected shape {list(spec.shape)} like x, got {list(grad_y.shape)}")
    return spec


def _spec(facts: _arrays.ArrayFacts, x: Any, repeat: Any, eps: Any) -> Spec:
    """The Spec of x with the two numbers."""
    dtype = _arrays.require_dtype("x", x, _arrays.FLOATS)
    shape = tuple(x.shape)
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
        repeat=_arrays.whole_number("repeat", repeat, minimum=1),
        eps=number,
    )
