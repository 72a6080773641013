"""Calls on CuPy arrays that come again on a GPU: the same results as the first, whatever memory the arrays are in."""

from __future__ import annotations

import numpy as np
import pytest

import dsv4cp
from dsv4cp._programs import Program
from dsv4cp.indexer import ops as indexer
from dsv4cp.sparse_attention import ops as attention
from tests.support.compare import check_equal, check_frobenius

try:
    import cupy
except ImportError:  # conftest.py skips or fails the tests
    cupy = None

pytestmark = pytest.mark.gpu

ml_dtypes = pytest.importorskip("ml_dtypes")

REPEATED = {
    "attention": attention._FORWARD, "attention gradient": attention._BACKWARD, "scores": indexer._SCORES,
    "scores gradient": indexer._SCORES_GRAD, "scores at ids": indexer._TOPK_SCORES,
    "scores at ids gradient": indexer._TOPK_SCORES_GRAD,
}  # fmt: skip
RUNS = 5


@pytest.fixture(autouse=True)
def forgotten():
    for repeated in REPEATED.values():
        repeated.programs.forget()


def made() -> dict[str, int]:
    """How many programs each operation has."""
    known = {name: repeated.programs._known.values() for name, repeated in REPEATED.items()}
    return {name: sum(isinstance(x, Program) for x in held) for name, held in known.items()}


def make(seed: int, heads: int, dtype, ids_dtype) -> dict:
    """Inputs in new memory, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def normal(*shape, dtype=dtype):
        return cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype))

    return {
        "q": normal(2, 9, heads, 512), "kv": normal(2, 20, 512), "sinks": normal(heads, dtype=np.float32),
        "ids": cupy.asarray(rng.integers(-1, 20, (2, 9, 6)).astype(ids_dtype)), "grad": normal(2, 9, heads, 512),
        "index_q": normal(2, 9, heads, 128), "entries": normal(2, 9, 128), "weights": normal(2, 9, heads),
        "chosen": cupy.asarray(rng.integers(-1, 9, (2, 9, 5)).astype(ids_dtype)),
        "grad_scores": normal(2, 9, 9, dtype=np.float32), "grad_chosen": normal(2, 9, 5, dtype=np.float32),
        "x": normal(3, 4, 4, dtype=np.float32), "grad_x": normal(3, 4, 4, dtype=np.float32),
    }  # fmt: skip


def step(a: dict, impl: str) -> dict:
    """Results and gradients of every operation that has kernels; with a plan too."""
    heads_cap = 2**31 if impl == "atomic" else 8 * 512 * 64
    at = {"compress_ratio": 4, "softmax_scale": 0.1}
    plan = dsv4cp.plan_dsv4_sparse_indices(a["ids"], 20)
    out, lse = dsv4cp.dsv4_sparse_attention(a["q"], a["kv"], a["sinks"], a["ids"], 0.05, return_lse=True)
    layer = dsv4cp.dsv4_sparse_attention(a["q"], a["kv"], a["sinks"], None, 0.05, plan=plan)
    three = a["index_q"], a["entries"], a["weights"]
    return {
        "out": out, "lse": lse, "layer": layer,
        "attention gradients": dsv4cp.dsv4_sparse_attention_grad(
            a["grad"], a["q"], a["kv"], a["sinks"], a["ids"], out, lse, 0.05, backward_impl=impl,
            backward_workspace_bytes=heads_cap,
        ),
        "scores": dsv4cp.dsv4_indexer_scores(*three, **at),
        "scores gradients": dsv4cp.dsv4_indexer_scores_grad(a["grad_scores"], *three, **at),
        "scores at ids": dsv4cp.dsv4_indexer_topk_scores(*three, a["chosen"], **at),
        "scores at ids gradients": dsv4cp.dsv4_indexer_topk_scores_grad(
            a["grad_chosen"], *three, a["chosen"], **at, backward_impl=impl
        ),
        "Sinkhorn": dsv4cp.dsv4_sinkhorn_normalize(a["x"], repeat=20, eps=1e-6),
        "Sinkhorn gradient": dsv4cp.dsv4_sinkhorn_normalize_grad(a["grad_x"], a["x"], repeat=20, eps=1e-6),
    }  # fmt: skip


def check(got: dict, want: dict, impl: str) -> None:
    for name, w in want.items():
        pairs = zip(got[name], w, strict=True) if isinstance(w, tuple) else [(got[name], w)]
        for n, (g, x) in enumerate(pairs):
            assert type(g) is cupy.ndarray and g.flags.c_contiguous and g.dtype == x.dtype and g.shape == x.shape
            if impl == "atomic" and n == 1 and name in ("attention gradients", "scores at ids gradients"):
                check_frobenius(g, x, "attention_grad", 1e-2)  # sums over queries in any order
            else:
                check_equal(g, x)


@pytest.mark.parametrize("impl", ["atomic", "deterministic"])
@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_results_are_those_of_the_first_call_from_any_memory(heads, dtype, ids_dtype, impl):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
    inputs = make(0, heads, kind, ids_dtype)
    first = step(inputs, impl)
    for _ in range(RUNS):
        again = make(0, heads, kind, ids_dtype)
        for x in inputs.values():
            x.fill(1)  # what a stale address would read
        inputs = again
        check(step(inputs, impl), first, impl)
    assert all(made().values()), made()
    other = make(1, heads, kind, ids_dtype)
    played = step(other, impl)
    for repeated in REPEATED.values():
        repeated.programs.forget()
    check(played, step(make(1, heads, kind, ids_dtype), impl), impl)


def test_streams_and_views():
    inputs = make(0, 64, ml_dtypes.bfloat16, "int32")
    want = step(inputs, "deterministic")
    for _ in range(3):
        step(inputs, "deterministic")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        held = {name: x.copy() for name, x in inputs.items()}
        check(step(held, "deterministic"), want, "deterministic")
    stream.synchronize()
    counts = made()
    wide = {name: cupy.concatenate([x, x], axis=-1)[..., : x.shape[-1]] for name, x in inputs.items()}
    for _ in range(4):  # other strides are other kinds
        check(step(wide, "deterministic"), want, "deterministic")
    assert all(n >= counts[name] for name, n in made().items())


def test_what_is_refused_is_refused_every_time():
    a = make(0, 64, ml_dtypes.bfloat16, "int32")
    for _ in range(3):
        step(a, "atomic")
        for call, kind in (
            (lambda: dsv4cp.dsv4_sparse_attention(a["q"], a["kv"][:, :, :64], a["sinks"], a["ids"], 0.05), ValueError),
            (lambda: dsv4cp.dsv4_sparse_attention(a["q"], a["kv"], a["sinks"], a["ids"], "0.05"), TypeError),
            (lambda: dsv4cp.dsv4_sparse_attention(a["q"], a["kv"].get(), a["sinks"], a["ids"], 0.05), TypeError),
            (lambda: dsv4cp.dsv4_sinkhorn_normalize(a["x"], repeat=True, eps=1e-6), TypeError),
            (lambda: dsv4cp.dsv4_sinkhorn_normalize(a["x"], repeat=0, eps=1e-6), ValueError),
        ):
            with pytest.raises(kind):
                call()
