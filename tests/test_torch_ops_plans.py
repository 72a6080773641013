"""torch_ops: index lists, plans of torch tensors, and attention with a plan or with its lse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dsv4cp import torch_ops
from tests.support import naive
from tests.support.compare import check_close, check_equal
from tests.support.torch_cases import attention_inputs, rand

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


def test_indices_are_those_of_the_array_function():
    common = {"batch_size": 2, "seq_len": 9, "key_len": 13, "window_size": 4, "compress_ratio": 2, "n_pooled": 4}
    mask = np.where(np.random.default_rng(0).random((2, 1, 9, 13)) < 0.2, -1e9, 0.0).astype(np.float32)
    topk = np.random.default_rng(1).integers(-1, 5, (2, 9, 3))
    for more in ({}, {"attention_mask": mask}, {"compressed_topk": topk}):
        want = naive.build_indices(**common, **more)
        tensors = {name: torch.tensor(a) for name, a in more.items()}
        got = torch_ops.build_dsv4_sparse_topk_indices(**common, **tensors, device=torch.device("cpu"))
        assert isinstance(got, torch.Tensor) and got.dtype == torch.int64 and not got.requires_grad
        check_equal(got, want)
        short = torch_ops.build_dsv4_sparse_topk_indices(**common, **tensors, device="cpu", dtype=torch.int32)
        assert short.dtype == torch.int32
        check_equal(short, want.astype(np.int32))


@pytest.mark.parametrize("backend", ["torch", "sparse_torch", "tilelang", "cudnn", "auto"])
def test_plans_hold_tensors(backend):
    *_, ids, _ = attention_inputs()
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 6, backend)
    assert isinstance(plan, torch_ops.SparseIndexPlan) and plan.kv_sequence == 6
    assert plan.indices.dtype == torch.int32 and plan.indices.is_contiguous()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.backend = "torch"
    if backend == "cudnn":
        flat, lengths, rows = naive.cudnn_plan(ids, 6, plan.indices.shape[-1])
        check_equal(plan.indices, flat)
        check_equal(plan.topk_length, lengths)
        check_equal(plan.valid_rows, rows)
    else:
        check_equal(plan.indices, torch.where((ids >= 0) & (ids < 6), ids, -1).to(torch.int32))
        assert plan.topk_length is None and plan.valid_rows is None


@pytest.mark.parametrize("backend", ["torch", "sparse_torch", pytest.param("auto", marks=ON_CPU)])
def test_attending_with_a_plan_equals_attending_with_ids(backend):
    q, kv, sinks, ids, scale = attention_inputs()
    leaves = [[t.clone().requires_grad_() for t in (q, kv, sinks)] for _ in range(2)]
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 6, backend)
    results = [
        torch_ops.dsv4_sparse_attention(*leaves[0], ids, scale, backend=backend),
        torch_ops.dsv4_sparse_attention(*leaves[1], ids, scale, backend=backend, plan=plan),
    ]
    check_equal(*results)
    for result in results:
        result.backward(rand(*result.shape, seed=9))
    for a, b in zip(*leaves, strict=True):
        check_equal(a.grad, b.grad)


def test_a_plan_of_another_backend_or_length_is_refused():
    q, kv, sinks, ids, scale = attention_inputs()
    for backend, length in (("cudnn", 6), ("tilelang", 6), ("torch", 7)):
        plan = torch_ops.plan_dsv4_sparse_indices(ids, length, backend)
        with pytest.raises(ValueError, match="plan"):
            torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend="torch", plan=plan)


def test_lse_on_request():
    q, kv, sinks, ids, scale = attention_inputs()
    out, lse = torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend="torch", return_lse=True)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, scale)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")
