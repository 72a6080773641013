"""Forward-mode differentiation (torch.func.jvp, dual numbers): kernels refuse it, instead of giving no tangent."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from dsv4cp import _bridge, torch_ops

AT = {"compress_ratio": 2, "softmax_scale": 0.5, "backend": "torch"}


def test_a_tangent_is_seen_at_any_place():
    x, ids = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    assert not _bridge.has_tangent(x, ids, 1, None)
    with forward_ad.dual_level():
        assert not _bridge.has_tangent(x, ids, 1, None, "a", [x])
        assert _bridge.has_tangent(ids, None, forward_ad.make_dual(x, x))
    seen = []
    torch.func.jvp(lambda y: seen.append((_bridge.has_tangent(y), _bridge.has_tangent(x))) or y, (x,), (x,))
    assert seen == [(True, False)]


def test_operators_refuse_it_and_run_beside_it():
    x = torch.rand(5, 4, 4)
    want = torch.ops.dsv4.sinkhorn_normalize(x, 4, 1e-6)
    with forward_ad.dual_level():
        assert torch.equal(torch.ops.dsv4.sinkhorn_normalize(x, 4, 1e-6), want)
        with pytest.raises(NotImplementedError, match=r"dsv4::sinkhorn_normalize: it has no forward-mode derivative"):
            torch.ops.dsv4.sinkhorn_normalize(forward_ad.make_dual(x, x), 4, 1e-6)
        for dual in ((forward_ad.make_dual(x, x), x), (x, forward_ad.make_dual(x, x))):
            with pytest.raises(NotImplementedError, match=r"dsv4::sinkhorn_normalize_grad: it has no forward-mode"):
                torch.ops.dsv4.sinkhorn_normalize_grad(*dual, 4, 1e-6)


@pytest.mark.parametrize("op", ["Sinkhorn", "scores", "scores at ids"])
def test_the_reference_has_it(op):
    """By differences, and as vmap of it, in jacfwd."""
    g = torch.Generator().manual_seed(0)
    q, k, w = (torch.randn(*sizes, generator=g, dtype=torch.float64) for sizes in ((1, 3, 2, 4), (1, 2, 4), (1, 3, 2)))
    ids = torch.tensor([[[0, 1], [1, -1], [1, 1]]])
    function, given = {
        "Sinkhorn": (lambda x: torch_ops.dsv4_sinkhorn_normalize(x, backend="torch", repeat=3, eps=1e-6), [q[0, :2]]),
        "scores": (lambda q, k, w: torch_ops.dsv4_indexer_scores(q, k, w, **AT), [q, k, w]),
        "scores at ids": (
            lambda q, k, w: torch_ops.dsv4_indexer_topk_scores(q, k, w, ids, **AT).nan_to_num(neginf=0), [q, k, w]
        ),
    }[op]  # fmt: skip
    if op == "Sinkhorn":
        given = [torch.randn(2, 3, 3, generator=g, dtype=torch.float64)]
    leaves = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    plain = [x.detach() for x in leaves]
    for forward, reverse in zip(
        torch.func.jacfwd(function, tuple(range(len(plain))))(*plain),
        torch.func.jacrev(function, tuple(range(len(plain))))(*plain), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(forward, reverse)


# --- Kernels, on a GPU whose memory is the CPU's ---------------------------------------------------------------

ONE_OF_EACH = "attention", "indexer", "indexer at ids", "Sinkhorn"


@pytest.fixture
def gpu(monkeypatch):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from tests.support.stand_in_gpu import installed

    yield from installed(monkeypatch, True)


def case_of(name):
    from tests.test_programs_of_slices import CASES, tensors

    case = CASES[name]
    return case[1], tensors(case, 0, False), case[2]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_kernels_refuse_it(gpu, name, before, leaves):
    """Calls of a kind that came before, too."""
    call, given, count = case_of(name)
    given = [x.requires_grad_(leaves and x.is_floating_point()) for x in given]
    for _ in range(before):
        want = call(*given)
    plays = gpu.plays
    for n in range(count):

        def of(x, n=n):
            return call(*given[:n], x, *given[n + 1 :])

        x, t = given[n].detach(), torch.ones_like(given[n])
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(of, (x,), (t,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            of(forward_ad.make_dual(given[n], t))
    assert gpu.plays == plays
    if before:
        with forward_ad.dual_level():  # beside it they run
            assert torch.equal(call(*given), want)
        call(*given)
        assert gpu.plays == plays + 1, "played again"


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_gradients_refuse_it(gpu, name, before):
    """What comes in as a dual number, at any level of transforms; beside it they run, batched ones too."""
    call, given, count = case_of(name)
    leaves = [x.requires_grad_() for x in given[:count]]
    for _ in range(before):
        y = call(*given)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    y = call(*given)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    want = torch.autograd.grad(y, leaves, grad, retain_graph=True)

    def pull(g):
        return torch.autograd.grad(y, leaves, g, retain_graph=True)[0]

    one, plays = torch.ones(()), gpu.plays
    for refused in (
        lambda: torch.func.jvp(pull, (grad,), (grad,)),
        lambda: torch.func.jvp(lambda a: torch.func.jvp(lambda b: pull(a) * b, (one,), (one,))[0], (grad,), (grad,)),
        lambda: torch.func.jvp(lambda a: torch.func.grad(lambda b: (pull(a) * b).sum())(one), (grad,), (grad,)),
        lambda: torch.vmap(lambda a: torch.func.jvp(pull, (a,), (a,))[1])(grad[None]),
    ):
        with pytest.raises(NotImplementedError, match="_grad: it has no forward-mode derivative"):
            refused()
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="_grad: it has no forward-mode derivative"):
            pull(forward_ad.make_dual(grad, grad))
        assert gpu.plays == plays
        beside = torch.autograd.grad(y, leaves, grad, retain_graph=True)
        batched = torch.autograd.grad(y, leaves, torch.stack([grad, grad]), retain_graph=True, is_grads_batched=True)
    for x, two, w in zip(beside, batched, want, strict=True):
        assert torch.equal(x, w) and torch.equal(two, torch.stack([w, w]))


def test_a_level_of_another_thread_is_in_nobodys_way():
    x = torch.rand(3, 4, 4, requires_grad=True)
    y = torch.ops.dsv4.sinkhorn_normalize(x, 4, 1e-6)
    want, found = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0], []

    def batched():
        grads = torch.ones(2, *y.shape)
        found.append(torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)[0])

    with forward_ad.dual_level():
        thread = threading.Thread(target=batched)
        thread.start()
        thread.join()
    assert torch.equal(found[0], torch.stack([want, want]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_kernels_refuse_it_on_a_gpu(name):
    call, given, count = case_of(name)
    given = [x.cuda() for x in given]
    leaves = [x.requires_grad_() for x in given[:count]]

    def pull(g, y):
        return torch.autograd.grad(y, leaves, g, retain_graph=True)

    for _ in range(3):
        y = call(*given)
        x, one = given[0].detach(), torch.ones_like(y)
        want = pull(one, y)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(lambda x: call(x, *given[1:]), (x,), (x,))
        with pytest.raises(NotImplementedError, match="_grad: it has no forward-mode derivative"):
            torch.func.jvp(lambda g, y=y: pull(g, y)[0], (one,), (one,))
        with forward_ad.dual_level():
            beside = call(*given)
            got = pull(one, beside)
        assert torch.equal(beside, y) and torch.equal(got[0], want[0]), "of queries: no order of sums"
