"""The short way of torch_ops' Sinkhorn past autograd: taken where nothing watches, not taken where something does.

The operators run the reference on CPU tensors, so that the way to the kernels is tested without a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4cp import _bridge_calls
from dsv4cp.sinkhorn import torch_bridge
from tests.support import naive
from tests.support.compare import check_close, check_equal

V4 = {"repeat": 20, "eps": 1e-6}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """CPU tensors take the way of CUDA tensors."""
    monkeypatch.setattr(torch_bridge, "choose", lambda *args, **kwargs: "tilelang")
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def short(monkeypatch):
    """What autograd_is_idle answered, call by call."""
    answers, ask = [], _bridge_calls.autograd_is_idle

    def listen(*args):
        answers.append(ask(*args))
        return answers[-1]

    monkeypatch.setattr(_bridge_calls, "autograd_is_idle", listen)
    return answers


def normalize(x):
    return torch_bridge.dsv4_sinkhorn_normalize(x, backend="tilelang", **V4)


def test_plain_calls_take_it(short):
    x = torch.randn(5, 4, 4)
    want = naive.sinkhorn(x, **V4)
    check_close(normalize(x), want, "sinkhorn", like=x)
    with torch.no_grad():
        check_close(normalize(x.clone().requires_grad_()), want, "sinkhorn", like=x)
    with torch.inference_mode():
        check_close(normalize(x), want, "sinkhorn", like=x)
    assert short == [True] * 3


def test_a_wanted_gradient_does_not(short):
    x, grad = torch.randn(5, 4, 4, requires_grad=True), torch.randn(5, 4, 4)
    y = normalize(x)
    check_equal(y.detach(), normalize(x.detach()))
    check_close(torch.autograd.grad(y, x, grad)[0], naive.sinkhorn_grad(grad, x.detach(), **V4), "sinkhorn_grad")
    assert short == [False, True]


class Subclass(torch.Tensor):
    """A tensor of another type."""


class Seen(TorchDispatchMode):
    """Keeps the names of the operators that it is asked for."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """The same one level up."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, Functions])
def test_modes_see_the_operator(short, mode):
    x = torch.randn(5, 4, 4)
    with mode() as seen:
        y = normalize(x)
    assert [name for name in seen.names if "sinkhorn" in name] == ["dsv4.sinkhorn_normalize.default"]
    check_equal(y, normalize(x))
    assert short == [False, True]


def test_subclasses_and_fake_tensors(short):
    x = torch.randn(5, 4, 4)
    y = normalize(x.as_subclass(Subclass))
    check_equal(y.as_subclass(torch.Tensor), normalize(x))
    with FakeTensorMode() as mode:
        fake = normalize(mode.from_tensor(x))
    assert (fake.shape, fake.dtype) == (x.shape, x.dtype)
    assert short == [False, True, False]


def test_gradients_of_torch_func(short):
    x, grad = torch.randn(5, 4, 4), torch.randn(5, 4, 4)
    with pytest.raises(RuntimeError, match=r"functorch|vmap|setup_context"):
        torch.func.grad(lambda x: (normalize(x) * grad).sum())(x)
    assert short == [False]


@pytest.mark.parametrize("wanted", [False, True])
def test_one_graph(wanted):
    compiled = torch.compile(normalize, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 4, 4, requires_grad=wanted)
    y = compiled(x)
    assert y.requires_grad == wanted
    check_equal(y.detach(), normalize(x.detach()))
    if wanted:
        grad = torch.randn(5, 4, 4)
        check_equal(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(normalize(x), x, grad)[0])
