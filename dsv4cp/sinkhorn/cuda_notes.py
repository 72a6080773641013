"""Launches of Sinkhorn normalisation as notes for calls that come again (_programs.py), of any library's arrays.

making.given are the arrays of a call that has been checked; None where kernels cannot read them as they lie.
"""

from __future__ import annotations

from .._programs import Making
from . import contract, cuda


def forward(spec: contract.Spec, making: Making) -> int | None:
    """x to y."""
    (x,) = making.given
    if contract.kernels_unfit(spec) or not x.row_major:
        return None
    cuda.launch_forward(x.address, making.make(x.shape, x.dtype), spec, stream=making)
    return 1


def backward(spec: contract.Spec, making: Making) -> int | None:
    """grad_y, x to grad_x."""
    grad_y, x = making.given
    if contract.kernels_unfit(spec) or grad_y.dtype != x.dtype or not (x.row_major and grad_y.row_major):
        return None
    cuda.launch_backward(grad_y.address, x.address, making.make(x.shape, x.dtype), spec, stream=making)
    return 1
