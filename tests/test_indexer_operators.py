"""The operator dsv4::indexer_scores on the CPU, where the reference runs it: what graphs captured for a GPU rely on."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dsv4cp.indexer import torch_bridge_kernels as kernels  # noqa: E402
from tests.support import naive  # noqa: E402
from tests.support.compare import check_close, check_equal, check_like  # noqa: E402
from tests.support.indexer_data import make  # noqa: E402

SCALE, R = 0.125, 4
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def tensors(seed=0, *, dtype=torch.float32, grad=False, **sizes):
    made = make(seed, **sizes, dtype="float64")
    return [torch.from_numpy(x).to(dtype).requires_grad_(grad) for x in made]


def visible(start=0):
    return naive.indexer_visible(9, 3, R, start)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_masked(dtype, start):
    x = tensors(dtype=dtype)
    got = kernels.SCORES(*x, R, SCALE, start)
    want = np.where(visible(start), naive.indexer_scores(*x, SCALE), -np.inf)
    check_like(got, dtype="float64" if dtype == torch.float64 else "float32")
    check_close(got, want, "indexer", str(dtype).rpartition(".")[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gradient_ignores_what_is_not_visible(dtype):
    x = tensors(1, dtype=dtype, grad=True)
    out = kernels.SCORES(*x, R, SCALE, 2)
    seen = visible(2)
    g = np.random.default_rng(2).standard_normal(out.shape)
    wanted = naive.indexer_scores_grad(g, *x, SCALE, seen)
    incoming = torch.from_numpy(np.where(seen, g, np.nan)).to(out.dtype)
    for graph in (False, True):
        got = torch.autograd.grad(out, x, incoming, retain_graph=True, create_graph=graph)
        for t, y, want in zip(x, got, wanted, strict=True):
            name = str(t.dtype).rpartition(".")[2]
            check_like(y, dtype=name)
            check_close(y, want, "indexer_grad", name)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("start", [0, 2])
def test_entries_that_nobody_sees_may_hold_nan(start, graph):
    seen = visible(start)
    hidden = ~seen.any(axis=0)
    assert hidden.any()
    q, k, w = tensors(4)
    k[:, torch.from_numpy(hidden)] = torch.nan
    g = np.broadcast_to(np.where(seen, 1.0, 0.0), (q.shape[0], *seen.shape))
    wanted = naive.indexer_scores_grad(g, q, torch.nan_to_num(k), w, SCALE, seen)
    x = [y.requires_grad_() for y in (q, k, w)]
    out = kernels.SCORES(*x, R, SCALE, start)
    got = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=graph)
    for grad, want in zip(got, wanted, strict=True):
        check_close(grad.detach(), want, "indexer_grad", "float32")


def test_gradients_need_no_cupy():
    """A graph captured with operators runs, and is differentiated, on machines without it."""
    code = """
import sys

class NoCupy:
    def find_spec(self, name, path=None, target=None):
        if name == "cupy":
            raise ImportError(name)

sys.meta_path.insert(0, NoCupy())
import torch, dsv4cp.torch_ops
from dsv4cp.indexer import torch_bridge_kernels as scores, torch_bridge_topk as topk
from dsv4cp.sinkhorn import torch_bridge as sinkhorn
from dsv4cp.sparse_attention import torch_bridge_kernels as attention
q, k, w, x = (torch.ones(n, requires_grad=True) for n in ((1, 2, 3, 4), (1, 2, 4), (1, 2, 3), (2, 4, 4)))
ids = torch.zeros(1, 2, 3, dtype=torch.int32)
for y in (
    scores.SCORES(q, k, w, 1, 0.5, 0), topk.TOPK_SCORES(q, k, w, ids, 0.5), sinkhorn.NORMALIZE(x, 3, 1e-6),
    attention.ATTEND(q, k, torch.ones(3), ids, 0.5, False, False, 2**31)[0],
):
    y.backward(torch.ones_like(y))
print(q.grad.isfinite().all().item(), x.grad.isfinite().all().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "True"], done.stderr[-2000:]


def test_differentiable_twice():
    x = tensors(3, batch=1, queries=5, entries=2, heads=2, dim=3, dtype=torch.float64, grad=True)

    def function(*x):
        scores = kernels.SCORES(*x, 2, SCALE, 0)
        return torch.where(scores.isinf(), 0.0, scores)

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_only_what_wants_a_gradient_gets_one():
    q, k, w = tensors(4)
    k.requires_grad_()
    out = kernels.SCORES(q, k, w, R, SCALE, 0)
    out.nan_to_num(0, 0, 0).sum().backward()
    assert k.grad is not None and q.grad is None and w.grad is None
    with torch.no_grad():
        assert not kernels.SCORES(q, k, w, R, SCALE, 0).requires_grad


@pytest.mark.parametrize("grad", [False, True])
def test_the_operators_pass_opcheck(grad):
    x = tensors(5, grad=grad)
    checked = torch.library.opcheck(kernels.SCORES, (*x, R, SCALE, 3), test_utils=OPCHECKS)
    assert set(checked.values()) == {"SUCCESS"}
    g = torch.randn(2, 9, 3)
    checked = torch.library.opcheck(
        kernels.SCORES_GRAD, (g, *(t.detach() for t in x), R, SCALE, 3), test_utils=OPCHECKS
    )
    assert set(checked.values()) == {"SUCCESS"}


def test_it_is_one_node_of_a_compiled_graph():
    seen = []

    def keep(graph, _):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "dsv4" in str(n.target))
        return graph.forward

    x = tensors(6)
    compiled = torch.compile(lambda *x: kernels.SCORES(*x, R, SCALE, 3), fullgraph=True, backend=keep)
    check_equal(compiled(*x), kernels.SCORES(*x, R, SCALE, 3))
    assert seen == ["dsv4.indexer_scores.default"]
