"""The ways to call sparse attention and its gradient, small inputs, and the golden setting of one channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dsv4cp

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Way:
    """One library and backend that attention cases run on. NumPy arrays go in, arrays of the library come out."""

    library: str
    backend: str = "auto"
    device: str = "cpu"
    halves: bool = True  # float16 and bfloat16 exist

    @property
    def fixed_order(self) -> bool:
        """Whether sums over slots of one key have the same bits every time; a GPU's atomic additions have not."""
        return self.library != "cupy" and self.device == "cpu"

    def array(self, x: Any) -> Any:
        """A NumPy array in this library; None stays None."""
        if x is None or self.library == "numpy":
            return x
        if self.library == "array_api_strict":
            import array_api_strict

            return array_api_strict.asarray(x)
        if self.library == "cupy":
            import cupy

            return cupy.asarray(x)
        import torch

        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.astype(np.float32)).to(self.device, torch.bfloat16)
        return torch.from_numpy(np.array(x)).to(self.device)

    def forward(self, q, kv, sinks, ids, scale, **options) -> tuple[Any, Any]:
        """(out, lse)."""
        arrays = [self.array(x) for x in (q, kv, sinks, ids)]
        if self.library == "torch":
            from dsv4cp.sparse_attention.torch_bridge import dsv4_sparse_attention

            return dsv4_sparse_attention(*arrays, scale, backend=self.backend, return_lse=True, **options)
        return dsv4cp.dsv4_sparse_attention(*arrays, scale, backend=self.backend, return_lse=True, **options)

    def backward(self, grad_out, q, kv, sinks, ids, scale, **options) -> tuple[Any, Any, Any]:
        """(grad_q, grad_kv, grad_sinks), from what the forward call saved."""
        if self.library == "torch":
            from dsv4cp.sparse_attention.torch_bridge import dsv4_sparse_attention

            leaves = [self.array(x).requires_grad_() for x in (q, kv, sinks)]
            out = dsv4_sparse_attention(*leaves, self.array(ids), scale, backend=self.backend, **options)
            out.backward(self.array(grad_out))
            return tuple(x.grad for x in leaves)
        out, lse = self.forward(q, kv, sinks, ids, scale)
        arrays = [self.array(x) for x in (grad_out, q, kv, sinks, ids)]
        grad = dsv4cp.dsv4_sparse_attention_grad
        return grad(*arrays, out, lse, scale, backend=self.backend, **options)

    def dense(self, q, kv, sinks, ids, scale) -> Any:
        arrays = [self.array(x) for x in (q, kv, sinks, ids)]
        if self.library == "torch":
            from dsv4cp.sparse_attention.torch_bridge import dense_attention_topk_torch

            return dense_attention_topk_torch(*arrays, scale)
        return dsv4cp.dense_attention_topk(*arrays, scale)


NUMPY = Way("numpy")
WAYS = [
    pytest.param(NUMPY, id="numpy"),
    pytest.param(Way("array_api_strict", halves=False), id="strict"),
    pytest.param(Way("torch"), id="torch"),
    pytest.param(Way("cupy", "reference"), id="cupy-reference", marks=pytest.mark.gpu),
    pytest.param(Way("torch", "torch", "cuda"), id="torch-cuda", marks=pytest.mark.gpu),
]


def sealed(x: np.ndarray) -> np.ndarray:
    """x read-only, so that any write into it fails."""
    x.flags.writeable = False
    return x


def inputs(b=2, s=5, h=3, d=16, k=9, t=7, *, dtype=np.float32, seed=0) -> tuple[np.ndarray, ...]:
    """(grad_out, q, kv, sinks, ids), read-only: -1 and out-of-range ids anywhere, repeated ids, one empty row."""
    rng = np.random.default_rng(seed)
    floats = [rng.standard_normal(shape) for shape in ((b, s, h, d), (b, s, h, d), (b, k, d), (h,))]
    ids = rng.integers(-2, k + 2, (b, s, t))
    if s > 2 and b > 0:
        ids[0, 1] = -1
        ids[-1, 0, : t // 2] = -1
        ids[-1, 2, t // 2 :] = -1
    wide = np.float64 if dtype == np.float64 else np.float32
    return (*(sealed(x.astype(dtype)) for x in floats[:3]), sealed(floats[3].astype(wide)), sealed(ids))


def one_channel(ids: list[int], *, sink: float = 0.0, d: int = 512, dtype=np.float32) -> tuple[np.ndarray, ...]:
    """(grad_out, q, kv, sinks, ids) with all but channel 0 zero: kv[:, 0] = 0, 1, 2, 3, q[0] = 1, grad_out[0] = 1."""
    q, kv = np.zeros((1, 1, 1, d), dtype), np.zeros((1, 4, d), dtype)
    q[..., 0] = 1
    kv[0, :, 0] = range(4)
    return q.copy(), q, kv, np.array([sink], np.float32), np.array([[ids]])
