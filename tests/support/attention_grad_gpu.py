"""Sparse attention's gradient kernels in tests: the two ways to call them, inputs, the check against the oracle."""

from __future__ import annotations

import cupy
import numpy as np

import dsv4cp
from tests.support.attention_gpu import oracle_grad, random_inputs, relative_error
from tests.support.compare import check_equal, check_like, to_numpy
from tests.support.tolerances import FROBENIUS

IMPLEMENTATIONS = ("atomic", "deterministic")


def cupy_grads(grad_out, q, kv, sinks, ids, scale, impl="atomic", **options):
    """(grad_q, grad_kv, grad_sinks) of backend "cuda" on CuPy arrays."""
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend="cuda", return_lse=True)
    return dsv4cp.dsv4_sparse_attention_grad(
        grad_out, q, kv, sinks, ids, out, lse, scale, backend="cuda", backward_impl=impl, **options
    )


def torch_grads(grad_out, q, kv, sinks, ids, scale, impl="atomic", **options):
    """The same through torch_ops' "tilelang" and torch autograd; CuPy arrays go in, tensors come out."""
    from dsv4cp import _bridge, torch_ops

    leaves = [_bridge.to_torch(x).clone().requires_grad_() for x in (q, kv, sinks)]
    out = torch_ops.dsv4_sparse_attention(
        *leaves, _bridge.to_torch(ids), scale, backend="tilelang", backward_impl=impl, **options
    )
    out.backward(_bridge.to_torch(grad_out))
    return tuple(x.grad for x in leaves)


def inputs(*args, seed=0, **sizes):
    """(grad_out, q, kv, sinks, ids) with hostile ids, and NaN in every row that no query selects."""
    q, kv, sinks, ids = random_inputs(*args, seed=seed, **sizes)
    g = np.random.default_rng(seed + 1).standard_normal(q.shape, np.float32).astype(q.dtype)
    return cupy.asarray(g), q, kv, sinks, ids


def check(got, data, scale) -> None:
    """Against the float64 oracle: each gradient as a whole, in the dtype of its input."""
    _, q, kv, sinks, _ = data
    for g, want, like, name in zip(got, oracle_grad(*data, scale), (q, kv, sinks), ("q", "kv", "sinks"), strict=True):
        check_like(g, dtype=like.dtype.name, shape=like.shape)
        limit = FROBENIUS["sink_grad" if name == "sinks" else "attention_grad"]
        error = relative_error(cupy.asarray(to_numpy(g)), want)
        assert error <= limit, f"gradient of {name}: {error:.3g}"


def check_same(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        check_equal(g, w)
