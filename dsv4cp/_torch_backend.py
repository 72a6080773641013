"""What the torch surfaces of all slices share: which implementation a call gets, in plain ifs, and row-major gradients.

The torch-side twin of _backend; knows no slice.

The names are those of the mirrored module: "torch" and "sparse_torch" are the reference equations
differentiated by torch, "tilelang" is this package's CUDA kernels (the name is kept so that
configurations carry over), "cudnn" is NVIDIA's DSA kernels, "auto" takes the CUDA kernels where they
can run and the reference elsewhere.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ._arrays import dtype_name, library


def choose(
    op: str,
    backend: str,
    tensors: tuple[Any, ...],
    *,
    allowed: tuple[str, ...],
    kernel_missing: str | None,
    cudnn_missing: str | None = None,
    require_bf16: bool = False,
) -> str:
    """What runs `op` on these tensors: "torch", "tilelang" or "cudnn".

    `allowed` lists the names that `op` takes, `kernel_missing` says why its CUDA kernels cannot run on this
    machine (None: they can), `cudnn_missing` the same of cuDNN's. Raises TypeError for anything but torch tensors,
    ValueError for a name outside `allowed`, RuntimeError saying why when kernels asked for by name cannot run.
    """
    for tensor in tensors:
        if library(tensor) != "torch":
            raise TypeError(f"{op}: expected torch tensors, got {type(tensor).__name__}; dsv4cp itself takes arrays")
    if not isinstance(backend, str) or backend not in allowed:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, allowed))}, got {backend!r}")
    if backend in ("torch", "sparse_torch"):
        return "torch"
    reason = (cudnn_missing if backend == "cudnn" else kernel_missing) or _unfit(tensors, require_bf16)
    if backend == "auto":
        return "torch" if reason else "tilelang"
    if reason:
        raise RuntimeError(f"{op}: backend {backend!r} cannot run: {reason}")
    return backend


def _unfit(tensors: tuple[Any, ...], require_bf16: bool) -> str | None:
    """Why kernels cannot take these tensors, None when they can."""
    for tensor in tensors:
        if not tensor.is_cuda:
            return f"it needs CUDA tensors, got one on {tensor.device}"
        if require_bf16 and dtype_name(tensor) != "bfloat16":
            return f"it needs bfloat16 tensors, got {tensor.dtype}"
    return None


def without_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """A block whose products keep their dtype: autocast would compute and return float32 scores in bfloat16."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


class _RowMajorGradient(torch.autograd.Function):
    """The identity, whose gradient is copied to row-major order if it has another."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: torch.Tensor) -> torch.Tensor:
        return y.detach()  # not a view in autograd's eyes, so that the result may be changed in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        """Nothing to keep; torch.func's transforms ask for it."""

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> torch.Tensor:
        return grad_y.contiguous()


def with_row_major_gradient(y: torch.Tensor) -> torch.Tensor:
    """y, whose incoming gradient reaches the operations behind it in row-major order.

    A matrix product adds in another order for a transposed operand, so without this the gradients of
    equal numbers with unequal strides would differ in their last bits.
    """
    return _RowMajorGradient.apply(y)
