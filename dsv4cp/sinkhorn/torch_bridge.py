"""The torch surface of Sinkhorn normalisation: the reference on torch tensors, differentiated by torch."""

from __future__ import annotations

from typing import Literal

import torch

from .. import _backend
from .._torch_backend import choose
from . import contract, ops, reference

Dsv4SinkhornBackend = Literal["torch", "tilelang", "auto"]


def kernel_missing() -> str | None:
    """Why this machine cannot run the CUDA kernels of this op, None when it can."""
    if "cuda" not in ops.OFFERED:
        return "this version of dsv4cp has no CUDA kernels for it"
    return _backend.missing("cuda")


def sinkhorn_normalize_torch(x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    """The definition of dsv4cp.dsv4_sinkhorn_normalize on a torch tensor of any device.

    float32 inside (float64 for float64), result in x's dtype, differentiable any number of times.
    """
    return reference.forward_whole(x, contract.check(x, repeat, eps))


def dsv4_sinkhorn_normalize(
    x: torch.Tensor, *, backend: Dsv4SinkhornBackend, repeat: int, eps: float
) -> torch.Tensor:
    """dsv4cp.dsv4_sinkhorn_normalize for torch tensors: x [..., M, M] to the same shape and dtype.

    backend: "torch" is sinkhorn_normalize_torch, "tilelang" this package's CUDA kernels, "auto" the kernels for
    CUDA tensors where they can run, else "torch". Raises TypeError and ValueError as the array function,
    RuntimeError for "tilelang" where it cannot run.
    """
    choose(
        "dsv4_sinkhorn_normalize",
        backend,
        (x,),
        allowed=("torch", "tilelang", "auto"),
        kernel_missing=kernel_missing(),
    )
    return sinkhorn_normalize_torch(x, repeat, eps)
