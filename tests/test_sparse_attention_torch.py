"""Sparse attention under torch autograd: recomputed chunks, second derivatives, special values, memory, views."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsv4cp import SparseIndexPlan, torch_ops
from dsv4cp.sparse_attention import reference_chunks
from dsv4cp.sparse_attention.torch_bridge import (
    dense_attention_topk_torch,
    dsv4_sparse_attention,
    sparse_attention_torch,
)
from tests.support import naive
from tests.support.attention_ways import Way, inputs
from tests.support.compare import check_close, check_equal, check_like

SCALE = 0.25
array = Way("torch").array


def leaves(*, dtype=np.float64, **sizes) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """(grad_out, [q, kv, sinks] that want gradients, ids)."""
    g, *floats, ids = map(array, inputs(dtype=dtype, **sizes))
    return g, [x.requires_grad_() for x in floats], ids


@pytest.fixture(params=["whole", "chunks"])
def chunks(request, monkeypatch):
    """With "chunks" every query is a chunk of its own, computed again in the backward pass."""
    if request.param == "chunks":
        monkeypatch.setattr(reference_chunks, "DEVICE_BYTES", 1)
    return request.param


@pytest.mark.parametrize("function", [sparse_attention_torch, dense_attention_topk_torch])
def test_chunks_give_the_same_values_and_gradients(function, chunks):
    g, args, ids = leaves()
    out = function(*args, ids, SCALE)
    check_like(out, like=g, dtype="float64", shape=g.shape)
    check_close(out, naive.attention(*args, ids, SCALE)[0], "attention")
    got = torch.autograd.grad(out, args, g)
    for a, b in zip(got, naive.attention_grad(g, *args, ids, SCALE), strict=True):
        check_close(a, b, "attention_grad")


@pytest.mark.parametrize("function", [sparse_attention_torch, dense_attention_topk_torch])
def test_first_and_second_derivatives(function, chunks):
    _, args, _ = leaves(b=1, s=3, h=2, d=2, k=3)
    ids = torch.tensor([[[-1, 0, 0, 2], [-1, 5, -1, -1], [2, 1, -1, 0]]])
    assert torch.autograd.gradcheck(lambda *x: function(*x, ids, SCALE), args)
    assert torch.autograd.gradgradcheck(lambda *x: function(*x, ids, SCALE), args, fast_mode=True)


def test_lse_is_differentiable(chunks):
    _, args, _ = leaves(b=1, s=2, h=2, d=2, k=3)
    ids = torch.tensor([[[-1, 0, 0, 2], [2, 1, -1, 0]]])

    def both(*x):
        return dsv4_sparse_attention(*x, ids, SCALE, backend="torch", return_lse=True)

    assert torch.autograd.gradcheck(both, args)
    assert torch.autograd.gradgradcheck(both, args, fast_mode=True)


@pytest.mark.parametrize("sink", [np.inf, -np.inf, 2e38, np.nan])
def test_special_sinks_and_empty_rows_give_no_nan(sink, chunks):
    g, args, ids = leaves(dtype=np.float32)
    if np.isnan(sink):  # it is a value like others for queries with keys
        ids[:] = -1
    with torch.no_grad():
        args[2][1] = sink
    out, lse = dsv4_sparse_attention(*args, ids, SCALE, backend="torch", return_lse=True)
    first = torch.autograd.grad(out, args, g, create_graph=True)
    second = torch.autograd.grad([x.sin().sum() for x in first], args)
    for x in (out, *first, *second):
        assert x.isfinite().all()
    assert not lse.isnan().any()
    assert first[2][1] == 0 and second[2][1] == 0


def test_nan_gradients_of_lse_stay_in_their_query():
    _, args, ids = leaves()
    _, lse = dsv4_sparse_attention(*args, ids, SCALE, backend="torch", return_lse=True)
    grad = torch.zeros_like(lse)
    grad[0, 1] = torch.nan  # the query without keys
    for x in torch.autograd.grad(lse, args[:2], grad):
        assert (x == 0).all()


def test_memory_of_long_inputs_is_bounded():
    """What the graph keeps between forward and backward: the inputs, not the gathered rows of every query."""
    g, args, ids = leaves(dtype=np.float32, b=1, s=2048, h=2, d=64, k=500, t=64)
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    limit = 8 * 2**20
    before = reference_chunks.DEVICE_BYTES
    reference_chunks.DEVICE_BYTES = limit
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = sparse_attention_torch(*args, ids, SCALE)
        out.backward(g)
    finally:
        reference_chunks.DEVICE_BYTES = before
    rows = 2048 * 64 * 64 * 4
    assert sum(kept.values()) < 6 * 2**20 < rows / 5
    want = [x.grad.clone() for x in args]
    again = [x.detach().clone().requires_grad_() for x in args]
    whole = sparse_attention_torch(*again, ids, SCALE)
    whole.backward(g)
    check_close(out, whole, "attention")
    for a, b in zip(want, again, strict=True):
        check_close(a, b.grad, "attention_grad")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_inputs_and_gradients(dtype):
    from tests.support.attention_ways import DTYPES

    g, args, ids = leaves(dtype=DTYPES[dtype], h=8, d=64, k=40, t=40)
    want_out = sparse_attention_torch(*args, ids, SCALE)
    want = torch.autograd.grad(want_out, args, g)
    strided = [x.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_() for x in args]
    out = sparse_attention_torch(*strided, ids.transpose(1, 2).contiguous().transpose(1, 2), SCALE)
    check_equal(out, want_out)
    got = torch.autograd.grad(out, strided, g.transpose(1, 2).contiguous().transpose(1, 2))
    for a, b in zip(got, want, strict=True):
        check_equal(a, b)


def test_plans():
    from dsv4cp.sparse_indices.torch_bridge import plan_dsv4_sparse_indices

    _, args, ids = leaves()
    want = sparse_attention_torch(*args, ids, SCALE)
    for name in ("torch", "sparse_torch", "auto"):
        plan = plan_dsv4_sparse_indices(ids, 9, name)
        for given in (ids, None):
            for backend in ("torch", "sparse_torch", "auto"):
                check_equal(dsv4_sparse_attention(*args, given, SCALE, backend=backend, plan=plan), want)
    for name in ("tilelang", "cudnn"):
        with pytest.raises(ValueError, match=f"plan: .*'{name}'"):
            dsv4_sparse_attention(*args, ids, SCALE, backend="torch", plan=plan_dsv4_sparse_indices(ids, 9, name))
    with pytest.raises(ValueError, match="kv_sequence 9"):
        dsv4_sparse_attention(*args, ids, SCALE, backend="torch", plan=plan_dsv4_sparse_indices(ids, 8, "torch"))


def test_no_query_at_all_keeps_the_graph():
    for sizes in ({"b": 0}, {"s": 0}, {"k": 0}, {"h": 0}, {"t": 0}):
        _, args, ids = leaves(**sizes)
        for function in (sparse_attention_torch, dense_attention_topk_torch):
            out = function(*args, ids, SCALE)
            for x, grad in zip(args, torch.autograd.grad(out.sum(), args), strict=True):
                assert grad.shape == x.shape and (grad == 0).all()


def test_autocast_changes_no_dtype_and_no_number():
    q, kv, sinks = torch.randn(1, 6, 2, 8), torch.randn(1, 9, 8), torch.randn(2)
    ids = torch.randint(-1, 9, (1, 6, 5))
    want = torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, 0.5, backend="torch", return_lse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, 0.5, backend="torch", return_lse=True)
        leaf = q.clone().requires_grad_()
        out = torch_ops.dsv4_sparse_attention(leaf, kv, sinks, ids, 0.5, backend="torch")
    out.square().sum().backward()  # outside, as torch asks for
    for g, w in zip(got, want, strict=True):
        check_equal(g, w)
    plain = q.clone().requires_grad_()
    torch_ops.dsv4_sparse_attention(plain, kv, sinks, ids, 0.5, backend="torch").square().sum().backward()
    check_equal(leaf.grad, plain.grad)


@pytest.mark.parametrize(
    "plan",
    [
        SparseIndexPlan("torch", None, None, None, 9),
        SparseIndexPlan("torch", torch.tensor(3), None, None, 9),
        SparseIndexPlan(torch.zeros(2), torch.zeros(1, 6, 5, dtype=torch.int32), None, None, 9),
        SparseIndexPlan("torch", torch.zeros(1, 6, 5, dtype=torch.int32), None, None, torch.zeros(2)),
    ],
)
def test_hand_made_plans_are_refused_by_name(plan):
    with pytest.raises((TypeError, ValueError), match=r"^plan"):
        torch_ops.dsv4_sparse_attention(
            torch.zeros(1, 6, 2, 8), torch.zeros(1, 9, 8), torch.zeros(2), None, 1.0, backend="torch", plan=plan
        )
