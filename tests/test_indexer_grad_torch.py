"""The operators dsv4::indexer_topk_scores and its gradient: on the CPU the reference; on a GPU the CUDA kernels."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dsv4cp import torch_ops  # noqa: E402
from dsv4cp.indexer import torch_bridge_topk as operators  # noqa: E402
from dsv4cp.indexer.torch_bridge import _topk_scores_torch, contract  # noqa: E402
from tests.support.compare import check_close, check_equal, check_frobenius  # noqa: E402
from tests.support.indexer_data import ids, make  # noqa: E402

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SCALE = 0.125
AT = {"compress_ratio": 4, "softmax_scale": SCALE, "backend": "tilelang"}


def tensors(dtype=torch.float32, grad=True, **sizes):
    made = [torch.from_numpy(x).to(dtype).requires_grad_(grad) for x in make(**sizes, dtype="float64")]
    return (*made, torch.from_numpy(ids(entries=sizes.get("entries", 3))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_operators_pass_opcheck(dtype):
    q, k, w, index = tensors(dtype)
    forward, gradient = torch.ops.dsv4.indexer_topk_scores.default, torch.ops.dsv4.indexer_topk_scores_grad.default
    g = torch.randn(index.shape)
    inputs = (q.detach(), k.detach(), w.detach(), index, SCALE)
    for op, args in ((forward, (q, k, w, index, SCALE)), (gradient, (g, *inputs))):
        checked = torch.library.opcheck(op, args, test_utils=OPCHECKS)
        assert set(checked.values()) == {"SUCCESS"}


def test_the_operator_on_the_cpu_is_the_reference_and_its_gradient():
    q, k, w, index = tensors()
    spec = contract.check_topk_scores(q, k, w, index, 4, SCALE)
    got, want = operators.TOPK_SCORES(q, k, w, index, SCALE), _topk_scores_torch(q, k, w, index, spec)
    check_close(got, want.detach(), "indexer")
    g = torch.randn(got.shape)
    for a, b in zip(torch.autograd.grad(got, (q, k, w), g), torch.autograd.grad(want, (q, k, w), g), strict=True):
        check_close(a, b, "indexer_grad")
    with torch.no_grad():
        assert not operators.TOPK_SCORES(q, k, w, index, SCALE).requires_grad


def test_the_operator_differentiates_twice():
    q, k, w, index = tensors(torch.float64, queries=9, heads=2, dim=3)

    def finite(*x):
        scores = operators.TOPK_SCORES(*x, index, SCALE)
        return torch.where(scores.isinf(), 0.0, scores)

    assert torch.autograd.gradcheck(finite, (q, k, w))
    assert torch.autograd.gradgradcheck(finite, (q, k, w))


def test_one_node_with_one_gradient_node():
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def keep(graph, _):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "dsv4" in str(n.target))
        return graph.forward

    torch._dynamo.reset()
    q, k, w, index = tensors()
    compiled = torch.compile(
        lambda *x: operators.TOPK_SCORES(*x, SCALE).nan_to_num(neginf=0.0), fullgraph=True,
        backend=aot_autograd(fw_compiler=keep),
    )  # fmt: skip
    compiled(q, k, w, index).sum().backward()
    assert seen == ["dsv4.indexer_topk_scores.default", "dsv4.indexer_topk_scores_grad.default"]


# --- On a GPU --------------------------------------------------------------------------------------------


def gpu_inputs(**sizes):
    """(grad_scores, q, k, w, ids) as torch tensors and as CuPy arrays."""
    from dsv4cp import _bridge
    from tests.support.indexer_gpu import inputs

    arrays = inputs(**sizes)
    return [_bridge.to_torch(x).clone() for x in arrays], arrays


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 65])
def test_gpu_values_and_gradients_are_those_of_the_array_functions(deterministic, heads):
    import dsv4cp

    (g, q, k, w, index), arrays = gpu_inputs(heads=heads, slots=130)
    leaves = [x.requires_grad_() for x in (q, k, w)]
    got = torch_ops.dsv4_indexer_topk_scores(*leaves, index, **AT)
    at = {"compress_ratio": 4, "softmax_scale": SCALE, "backend": "cuda"}
    assert np.array_equal(got.detach().cpu().numpy(), dsv4cp.dsv4_indexer_topk_scores(*arrays[1:], **at).get())
    got.backward(g)
    want = dsv4cp.dsv4_indexer_topk_scores_grad(*arrays, backward_impl="deterministic", **at)
    for a, b in zip(leaves, want, strict=True):
        assert np.array_equal(a.grad.view(torch.int16).cpu().numpy(), b.view(np.int16).get())


@pytest.mark.gpu
def test_gpu_deterministic_algorithms_fix_the_bits(deterministic):
    (g, q, k, w, index), _ = gpu_inputs(queries=200, entries=40, slots=300)
    leaves = [x.requires_grad_() for x in (q, k, w)]

    def gradients():
        return torch.autograd.grad(torch_ops.dsv4_indexer_topk_scores(*leaves, index, **AT), leaves, g)

    want = gradients()
    for _ in range(20):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            got = gradients()
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            check_equal(a, b)
    torch.use_deterministic_algorithms(False)
    for a, b in zip(gradients(), want, strict=True):
        check_frobenius(a, b, "indexer", 2e-3)


@pytest.mark.gpu
def test_gpu_strided_and_broadcast_gradients(deterministic):
    (g, q, k, w, index), _ = gpu_inputs(queries=10, slots=40)
    leaves = [x.requires_grad_() for x in (q, k, w)]
    g = g.nan_to_num()
    for incoming in (
        g.transpose(1, 2).contiguous().transpose(1, 2),
        torch.ones((), device="cuda").expand(g.shape),
        torch.stack([g, g], -1)[..., 0],
    ):
        got, want = (
            torch.autograd.grad(torch_ops.dsv4_indexer_topk_scores(*leaves, index, **AT), leaves, x)
            for x in (incoming, incoming.contiguous())
        )
        for a, b in zip(got, want, strict=True):
            check_equal(a, b)


@pytest.mark.gpu
def test_gpu_views_and_compile(deterministic):
    (g, q, k, w, index), _ = gpu_inputs(queries=10, slots=40)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)

    def call(q, k, w, index):
        return torch_ops.dsv4_indexer_topk_scores(q, k, w, index, **AT).nan_to_num(neginf=0.0)

    leaves = [x.requires_grad_() for x in (q, k, w)]
    want = torch.autograd.grad(call(*leaves, index), leaves, g.nan_to_num())
    others = [x.detach().requires_grad_() for x in (turned, k, w)]
    for a, b in zip(torch.autograd.grad(call(*others, index), others, g.nan_to_num()), want, strict=True):
        check_equal(a, b)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*leaves, index), leaves, g.nan_to_num()), want, strict=True):
        check_equal(a, b)


@pytest.mark.gpu
def test_gpu_dense_gradient_is_that_of_the_array_function():
    import dsv4cp
    from tests.support.indexer_gpu import inputs

    _, q, k, w, _ = inputs(queries=70, entries=20)
    k[...] = 1
    arrays, g = (q, k, w), np.random.default_rng(0).standard_normal((2, 70, 20)).astype(np.float32)
    leaves = [torch.from_dlpack(x).clone().requires_grad_() for x in arrays]
    got = torch_ops.dsv4_indexer_scores(*leaves, **AT)
    got.backward(torch.from_numpy(g).cuda())
    import cupy

    want = dsv4cp.dsv4_indexer_scores_grad(
        cupy.asarray(g), *arrays, compress_ratio=4, softmax_scale=SCALE, backend="cuda"
    )
    for a, b in zip(leaves, want, strict=True):
        assert np.array_equal(a.grad.view(torch.int16).cpu().numpy(), b.view(np.int16).get())
