"""The indexer of torch_ops: values, gradients through autograd, backends, errors."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dsv4cp.indexer.torch_bridge import (  # noqa: E402
    dsv4_indexer_scores,
    dsv4_indexer_topk_scores,
    extract_indexer_topk_scores_torch,
    indexer_scores_torch,
)
from tests.support import naive  # noqa: E402
from tests.support.compare import check_close, check_equal, check_like  # noqa: E402
from tests.support.indexer_data import ids, make  # noqa: E402

SCALE = 0.125
AT = {"compress_ratio": 4, "softmax_scale": SCALE}
BACKENDS = ["torch", "auto"]


def tensors(*arguments, dtype=torch.float32, grad=False, **sizes):
    return [
        torch.from_numpy(x).to(dtype).requires_grad_(grad) for x in make(*arguments, **sizes, dtype="float64")
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_unmasked_and_equal_the_oracle(backend, dtype):
    x = tensors(dtype=dtype)
    got = dsv4_indexer_scores(*x, **AT, backend=backend, query_start=3, query_total_len=12)
    name = str(dtype).rpartition(".")[2]
    check_like(got, like=x[0], dtype="float64" if dtype == torch.float64 else "float32")
    check_close(got, naive.indexer_scores(*x, SCALE), "indexer", name)
    check_equal(indexer_scores_torch(*x, SCALE), got)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_topk_scores_and_gradients_equal_the_oracle(backend, dtype, id_dtype):
    x = tensors(1, entries=5, dtype=dtype, grad=True)
    indices = torch.from_numpy(ids(1, entries=5)).to(id_dtype)
    got = dsv4_indexer_topk_scores(*x, indices, **AT, backend=backend)
    name = str(dtype).rpartition(".")[2]
    logits = torch.from_numpy(naive.indexer_scores(*x, SCALE))
    check_close(got, extract_indexer_topk_scores_torch(logits, indices), "indexer", name)
    g = np.random.default_rng(2).standard_normal(got.shape)
    got.backward(torch.from_numpy(g).to(got.dtype))
    dense = np.zeros(logits.shape)
    for at in np.ndindex(*indices.shape):
        if 0 <= indices[at] < 5:
            dense[(*at[:2], indices[at])] += g[at]
    wanted = naive.indexer_scores_grad(dense, *x, SCALE, np.ones(dense.shape, bool))
    for t, want in zip(x, wanted, strict=True):
        check_like(t.grad, dtype=name)
        check_close(t.grad, want, "indexer_grad", name)


def test_gradcheck():
    x = tensors(3, batch=2, queries=5, entries=4, heads=2, dim=3, dtype=torch.float64, grad=True)
    indices = torch.from_numpy(ids(3, queries=5, entries=4, slots=4))

    def dense(*x):
        return dsv4_indexer_scores(*x, **AT, backend="torch")

    def selected(*x):
        scores = dsv4_indexer_topk_scores(*x, indices, **AT, backend="torch")
        return torch.where(scores.isinf(), 0.0, scores)

    for function in (dense, selected):
        assert torch.autograd.gradcheck(function, x)
        assert torch.autograd.gradgradcheck(function, x)

    def extract(table):
        scores = extract_indexer_topk_scores_torch(table, indices)
        return torch.where(scores.isinf(), 0.0, scores)

    table = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(extract, (table,))


def test_fully_masked_rows_have_finite_gradients():
    x = tensors(4, entries=3, grad=True)
    indices = torch.from_numpy(ids(4, entries=3))
    scores = dsv4_indexer_topk_scores(*x, indices, **AT, backend="torch")
    probabilities = torch.where(scores.isinf(), -1e9, scores).softmax(-1)
    (probabilities * torch.arange(7.0)).sum().backward()
    for t in x:
        assert torch.isfinite(t.grad).all()
    assert (x[0].grad[:, 4] == 0).all() and (x[2].grad[:, 4] == 0).all()


def test_rows_that_nobody_selects_reach_nothing():
    q, k, w = tensors(5, entries=6)
    indices = torch.from_numpy(np.where(ids(5, entries=6) == 0, -1, ids(5, entries=6)))
    want = dsv4_indexer_topk_scores(q, k, w, indices, **AT, backend="torch")
    k[:, 0] = torch.nan
    x = [t.requires_grad_() for t in (q, k, w)]
    got = dsv4_indexer_topk_scores(*x, indices, **AT, backend="torch")
    check_equal(got, want)
    got.backward(torch.ones_like(got))
    assert all(torch.isfinite(t.grad).all() for t in x) and (k.grad[:, 0] == 0).all()


def test_no_gradient_at_a_zero_logit():
    q, k, w = tensors(6)
    x = [t.requires_grad_() for t in (torch.zeros_like(q), k, w)]
    dsv4_indexer_scores(*x, **AT, backend="torch").sum().backward()
    assert all((t.grad == 0).all() for t in x)


def test_strided_and_broadcast_gradients():
    x = tensors(7, grad=True)
    indices = torch.from_numpy(ids(7))
    for function in (
        lambda: dsv4_indexer_scores(*x, **AT, backend="torch"),
        lambda: dsv4_indexer_topk_scores(*x, indices, **AT, backend="torch"),
    ):
        out = function()
        plain = torch.randn(out.shape)
        for g in (
            plain.transpose(1, 2).contiguous().transpose(1, 2),
            torch.ones(()).expand(out.shape),
            torch.stack([plain, plain], -1)[..., 0],
        ):
            got = torch.autograd.grad(function(), x, g)
            for a, b in zip(got, torch.autograd.grad(function(), x, g.contiguous()), strict=True):
                check_equal(a, b)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"entries": 0}, {"heads": 0}])
def test_zero_length_axes_stay_in_the_graph(sizes):
    x = tensors(**sizes, grad=True)
    indices = torch.zeros((*x[0].shape[:2], 3), dtype=torch.int32)
    scores = dsv4_indexer_topk_scores(*x, indices, **AT, backend="torch")
    check_like(scores, dtype="float32", shape=tuple(indices.shape))
    assert (scores == (-torch.inf if x[1].shape[1] == 0 else 0)).all()
    (scores.nan_to_num(0, 0, 0).sum() + dsv4_indexer_scores(*x, **AT, backend="torch").sum()).backward()
    assert all((t.grad == 0).all() for t in x)


def test_backends_and_errors():
    x = tensors()
    indices = torch.from_numpy(ids())
    calls = (
        lambda backend: dsv4_indexer_scores(*x, **AT, backend=backend),
        lambda backend: dsv4_indexer_topk_scores(*x, indices, **AT, backend=backend),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match=r"backend 'tilelang' cannot run: "):
            call("tilelang")
        with pytest.raises(ValueError, match=r"^backend: .*'torch', 'tilelang', 'auto', got 'sparse_torch'"):
            call("sparse_torch")
    with pytest.raises(TypeError, match=r"backend"):
        dsv4_indexer_scores(*x, **AT)
    with pytest.raises(TypeError, match=r"expected torch tensors, got ndarray"):
        dsv4_indexer_scores(*make(), **AT, backend="torch")
    with pytest.raises(TypeError, match=r"one library|expected torch tensors"):
        dsv4_indexer_topk_scores(*x, ids(), **AT, backend="torch")
    with pytest.raises(TypeError, match=r"^topk_indices: expected dtype int32 or int64"):
        dsv4_indexer_topk_scores(*x, indices.float(), **AT, backend="torch")
    with pytest.raises(ValueError, match=r"^topk_indices: expected shape"):
        extract_indexer_topk_scores_torch(torch.zeros(2, 9, 3), indices[0])
    with pytest.raises(ValueError, match=r"^query_total_len"):
        dsv4_indexer_scores(*x, **AT, backend="torch", query_start=1, query_total_len=9)
    with pytest.raises(ValueError, match=r"^pooled_kv: expected shape"):
        indexer_scores_torch(x[0], x[1][:1], x[2], SCALE)


def test_no_slot_at_all():
    """T = 0: an empty result that still belongs to the graph, as for every other axis without length."""
    x = tensors(2, grad=True)
    got = dsv4_indexer_topk_scores(*x, torch.zeros(*x[0].shape[:2], 0, dtype=torch.int64), **AT, backend="torch")
    assert got.shape == (*x[0].shape[:2], 0)
    got.sum().backward()
    for t in x:
        check_equal(t.grad, torch.zeros_like(t))


def test_autocast_changes_nothing():
    """float32 scores stay float32, and are computed in it, inside torch.autocast."""
    x, indices = tensors(3, entries=5), torch.from_numpy(ids(3, entries=5))

    def run():
        scores = dsv4_indexer_scores(*x, **AT, backend="auto")
        return scores, dsv4_indexer_topk_scores(*x, indices, **AT, backend="auto")

    want = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    for a, b in zip(got, want, strict=True):
        check_equal(a, b)
