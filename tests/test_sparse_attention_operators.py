"""dsv4::sparse_attention and its gradient as torch operators: on CPU tensors everywhere, on CUDA tensors with a GPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dsv4cp import SparseIndexPlan, torch_ops  # noqa: E402
from dsv4cp.sparse_attention import contract, torch_bridge_kernels  # noqa: E402
from tests.support.compare import check_close, check_equal, check_frobenius, to_numpy  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SCALE, CAP = 0.1, 2**31
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(params=DEVICES)
def device(request):
    torch._dynamo.reset()
    return request.param


def inputs(device, dtype=torch.bfloat16, *, b=2, s=6, h=5, d=64, k=20, t=17, grad=True, seed=0):
    """[q, kv, sinks, ids]: ids hold -1, out-of-range and repeated ones; one query has none."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-4, k + 3, (b, s, t))
    ids[0, 1] = -1
    floats = [torch.tensor(rng.normal(size=shape)) for shape in ((b, s, h, d), (b, k, d), (h,))]
    q, kv, sinks = (x.to(device, kind) for x, kind in zip(floats, (dtype, dtype, torch.float32), strict=True))
    return [*(x.requires_grad_(grad) for x in (q, kv, sinks)), torch.tensor(ids, device=device)]


def operator(q, kv, sinks, ids, rounding=False):
    return torch_bridge_kernels.ATTEND(q, kv, sinks, ids, SCALE, rounding, False, CAP)


def reference(q, kv, sinks, ids):
    return torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, SCALE, backend="torch", return_lse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_operator_and_gradient_equal_the_reference(device, dtype):
    ours = inputs(device, dtype)
    out, lse = operator(*ours)
    want, want_lse = reference(*ours)
    name = str(dtype).rpartition(".")[2]
    check_close(out, to_numpy(want), "attention", name)
    check_close(lse, to_numpy(want_lse), "lse", name)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, ours[:3], grad)
    for got, g, like in zip(grads, torch.autograd.grad(want, ours[:3], grad), ours, strict=False):
        assert got.dtype == like.dtype
        assert got.shape == like.shape
        check_frobenius(got, to_numpy(g), "attention_grad")


def test_the_gradient_of_lse_and_gradients_of_gradients(device):
    ours = inputs(device, torch.float64)
    results = [operator(*ours), reference(*ours)]
    grad, grad_lse = torch.randn_like(results[0][0]), torch.randn_like(results[0][1])
    for pick in ((0, 1), (1,)):
        grads = [
            torch.autograd.grad([r[i] for i in pick], ours[:3], [(grad, grad_lse)[i] for i in pick], retain_graph=True,
                                allow_unused=True)
            for r in results
        ]  # fmt: skip
        for got, want in zip(*grads, strict=True):
            assert (got is None or not got.any()) if want is None else torch.allclose(got, want, rtol=1e-10, atol=1e-12)
    second = []
    for out, _ in results:
        (grad_q,) = torch.autograd.grad(out, ours[0], grad, create_graph=True)
        second.append(torch.autograd.grad(grad_q.square().sum(), ours[:3]))
    for got, want in zip(*second, strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-11)


def test_gradients_may_arrive_in_any_layout(device):
    ours = inputs(device)
    out, _ = operator(*ours)
    parent = torch.randn(out.shape[::-1], device=device).to(out.dtype)
    for grad in (parent.permute(3, 2, 1, 0), parent[:1, :1, :1, :1].expand(out.shape)):
        got = torch.autograd.grad(out, ours[:3], grad, retain_graph=True)
        for g, w in zip(got, torch.autograd.grad(out, ours[:3], grad.contiguous(), retain_graph=True), strict=True):
            check_frobenius(g, to_numpy(w), "attention_grad", 1e-3 if device == "cuda" else 0.0)


def test_only_what_needs_a_gradient_gets_one(device):
    q, kv, sinks, ids = inputs(device, grad=False)
    kv.requires_grad_()
    out, lse = operator(q, kv, sinks, ids)
    (out.float().sum() + lse[lse > -1e30].sum()).backward()
    assert q.grad is None
    assert kv.grad is not None
    with torch.no_grad():
        assert not operator(q, kv, sinks, ids)[0].requires_grad


def test_on_the_cpu_the_order_is_fixed_either_way():
    ours = inputs("cpu")
    grads = []
    for fixed in (False, True):
        out, _ = torch_bridge_kernels.ATTEND(*ours, SCALE, False, fixed, CAP)
        grads.append(torch.autograd.grad(out, ours[:3], torch.ones_like(out)))
    for atomic, deterministic in zip(*grads, strict=True):
        check_equal(atomic, deterministic)


def test_reference_rounding_is_forward_only(device):
    ours = inputs(device)
    out, _ = operator(*ours, rounding=True)
    with pytest.raises(ValueError, match="forward only"):
        out.float().sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_opcheck(device, dtype, grad):
    ours = inputs(device, dtype, grad=grad)
    # torch adds gradients with atomics on a GPU: that check compares two runs, whose bits are then unequal.
    repeatable = tuple(u for u in OPCHECKS if device == "cpu" or u != "test_aot_dispatch_dynamic")
    utils = repeatable if grad else OPCHECKS
    arguments = (*ours, SCALE, False, False, CAP)
    done = torch.library.opcheck(torch.ops.dsv4.sparse_attention.default, arguments, test_utils=utils)
    assert set(done.values()) == {"SUCCESS"}
    plain = [x.detach() for x in ours]
    out, lse = operator(*plain)
    arguments = (torch.randn_like(out), *plain, out, lse, SCALE, False, CAP)
    utils = repeatable
    done = torch.library.opcheck(torch.ops.dsv4.sparse_attention_grad.default, arguments, test_utils=utils)
    assert set(done.values()) == {"SUCCESS"}


def test_compiles_into_one_graph(device):
    ours = inputs(device)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*ours), operator(*ours), strict=True):
        check_equal(got, want)
    compiled(*ours)[0].float().square().sum().backward()
    got = [x.grad for x in ours[:3]]
    out, _ = operator(*ours)
    for g, w in zip(got, torch.autograd.grad(out.float().square().sum(), ours[:3]), strict=True):
        check_frobenius(g, to_numpy(w), "attention_grad")


# --- torch_ops with the kernels ------------------------------------------------------------------------


def kernels(*args, backend="tilelang", **options):
    return torch_ops.dsv4_sparse_attention(*args, SCALE, backend=backend, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [{"h": 64, "d": 512, "k": 200, "t": 150}, {"h": 5, "d": 128}], ids=str)
def test_training_with_the_kernels_equals_the_reference(shape):
    ours = inputs("cuda", **shape)
    out, want = kernels(*ours), kernels(*ours, backend="torch")
    check_frobenius(out, to_numpy(want), "attention")
    grad = torch.randn_like(out)
    for got, g in zip(torch.autograd.grad(out, ours[:3], grad), torch.autograd.grad(want, ours[:3], grad), strict=True):
        check_frobenius(got, to_numpy(g), "attention_grad", 2e-2)


@pytest.mark.gpu
def test_which_calls_get_the_kernels():
    assert torch_ops.is_dsv4_kernel_available("sparse_attn")
    q, kv, sinks, ids = ours = inputs("cuda", grad=False)
    check_equal(kernels(*ours, backend="auto"), kernels(*ours))
    kernels(q.half(), kv.half(), sinks, ids)
    narrow = q[..., :48], kv[..., :48]
    for bad, word in (((q.float(), kv.float()), "float32"), ((q, kv.half()), "float16"), (narrow, "48")):
        with pytest.raises(RuntimeError, match=word):
            kernels(*bad, sinks, ids)
        kernels(*bad, sinks, ids, backend="auto")
    with pytest.raises(RuntimeError, match="CUDA tensors"):
        kernels(*(x.cpu() for x in ours))
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 20, "auto")
    assert plan.backend == "tilelang"
    check_equal(kernels(q, kv, sinks, None, plan=plan), kernels(*ours))
    kernels(q.float(), kv.float(), sinks, None, plan=plan, backend="auto")
    with pytest.raises(ValueError, match="plan"):
        kernels(*ours, plan=SparseIndexPlan("torch", plan.indices, None, None, 20))


@pytest.mark.gpu
def test_gradients_that_cannot_be_are_refused():
    ours = inputs("cuda")
    with pytest.raises(ValueError, match="backward_impl"):
        kernels(*ours, backward_impl="fast")
    out = kernels(*ours, backward_impl="deterministic", backward_workspace_bytes=1)
    with pytest.raises(ValueError, match="backward_workspace_bytes"):
        out.float().sum().backward()
    kernels(*ours, backward_workspace_bytes=1).float().sum().backward()  # float32 sums are not under the cap
    wide = [x.float() for x in ours[:3]] + ours[3:]
    out, _ = torch_bridge_kernels.ATTEND(*wide, SCALE, False, True, CAP)  # the reference: its sums have no fixed order
    with pytest.raises(RuntimeError, match="float32"):
        out.sum().backward()
    spec = contract.check(*ours, SCALE)
    assert spec.library == "torch"


@pytest.mark.gpu
def test_side_streams():
    """Forward and backward on a side stream, after a long kernel, wait for what fills their inputs there."""
    real = inputs("cuda", h=16, d=512, grad=False)
    grad = torch.randn_like(real[0])
    leaves = [x.clone().requires_grad_() for x in real[:3]]
    want = kernels(*leaves, real[3])
    want_grads = torch.autograd.grad(want, leaves, grad)
    side = torch.cuda.Stream()
    for _ in range(100):
        held = [torch.full_like(x, float("nan")).requires_grad_() for x in real[:3]]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            with torch.no_grad():
                for to, new in zip(held, real, strict=False):
                    to.copy_(new)
            out = kernels(*held, real[3])
            got = torch.autograd.grad(out, held, grad)
        side.synchronize()
        check_equal(out, want)
        for g, w in zip(got, want_grads, strict=True):
            check_frobenius(g, to_numpy(w), "attention_grad", 1e-2)
