"""What the benchmark's rows of host time queue: the launches of a call, again."""

from __future__ import annotations

import gc
import importlib.util
import weakref

import pytest

from dsv4cp import _kernels, _numba
from dsv4cp.commands import bench_host


def test_launches_are_kept_and_queued_again(monkeypatch):
    made = []
    monkeypatch.setattr(_kernels, "_queue", lambda *args: made.append(("kernel", args)))
    monkeypatch.setattr(_numba, "launch", lambda *args: made.append(("numba", args)))
    doors = _kernels._queue, _numba.launch
    queued = []
    with pytest.raises(ZeroDivisionError), bench_host.recorded(queued, []):
        _kernels._queue(1, 2)
        _numba.launch(3)
        1 / 0  # noqa: B018
    assert (_kernels._queue, _numba.launch) == doors
    _kernels._queue(4)
    assert made == [("kernel", (1, 2)), ("numba", (3,)), ("kernel", (4,))]
    made.clear()
    for launch in queued:
        launch()
    assert made == [("kernel", (1, 2)), ("numba", (3,))]


def test_a_case_is_a_call_and_its_launches(monkeypatch):
    monkeypatch.setattr(_kernels, "_queue", lambda *args: made.append(args))
    calls = {"planning": {bench_host.OURS: lambda: [_kernels._queue(1), _kernels._queue(2)]}}
    monkeypatch.setattr(bench_host, "calls", lambda: calls)
    made = []
    case = bench_host.host(False, part="planning")
    whole, alone = case.ours
    assert (whole, alone) == ("dsv4cp.torch_ops", "its launches alone: 2") and case.launch_bound
    for name in (whole, alone):
        made.clear()
        case.ours[name]()
        assert made == [(1,), (2,)]


def test_what_the_launches_write_to_stays(monkeypatch):
    """Workspaces too, which no result of the call is: other cases' inputs may not come to lie there."""
    programs = pytest.importorskip("dsv4cp._bridge_programs")
    torch, made = pytest.importorskip("torch"), []

    def call():
        result, workspace = programs._empty_cuda(4), programs._empty_cuda(8)
        made.append(weakref.ref(workspace))
        return result

    monkeypatch.setattr(programs, "_empty_cuda", torch.zeros)
    monkeypatch.setattr(bench_host, "calls", lambda: {"x": {bench_host.OURS: call}})
    case = bench_host.host(False, part="x")
    assert programs._empty_cuda is torch.zeros and [x() is None for x in made] == [True] * bench_host.WARM + [False]
    del case
    gc.collect()
    assert made[-1]() is None


def test_torchs_share_of_a_gradient_has_a_row_of_its_own(monkeypatch):
    torch = pytest.importorskip("torch")
    ran = []

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx, a, b):
            ran.append((a is not None, torch.is_grad_enabled()))
            return 2 * a

    leaf, grad = torch.zeros(3, requires_grad=True), torch.ones(3)
    parts = bench_host.gradient(Two.apply(leaf)[0], [leaf], grad)
    monkeypatch.setattr(bench_host, "calls", lambda: {"x backward": parts})
    case = bench_host.host(False, part="x backward")
    whole, node, engine, _ = case.ours
    assert (whole, node, engine) == (bench_host.OURS, "without torch's engine", "torch's engine alone")
    ran.clear()
    assert torch.equal(case.ours[whole]()[0], 2 * grad) and torch.equal(case.ours[node](), 2 * grad)
    assert ran == [(True, False)] * 2
    assert torch.equal(case.ours[engine]()[0], leaf) and len(ran) == 2


def test_torchs_share_of_a_call_with_gradients_has_a_row_of_its_own(monkeypatch):
    torch = pytest.importorskip("torch")
    made, leaf = [], torch.ones(3, requires_grad=True)

    def call():
        made.append(leaf * 2)
        return made[-1]

    parts = bench_host.with_gradients(call, [leaf, torch.zeros(2)], 3)
    monkeypatch.setattr(bench_host, "calls", lambda: {"x": {bench_host.OURS: lambda: leaf.detach()} | parts})
    made.clear()
    case = bench_host.host(False, part="x")
    assert len(made) == bench_host.WARM, "the row is of a call that came before"
    assert list(case.ours) == [bench_host.OURS, bench_host.WITH, "torch's Function alone", "its launches alone: 0"]
    assert case.ours[bench_host.WITH]() is made[-1]
    for _ in range(3):  # the same results take a node of each call
        alone = case.ours["torch's Function alone"]()
        assert torch.equal(alone, 2 * leaf) and not made[-1].grad_fn.name() == alone.grad_fn.name()
        assert alone.grad_fn.saved_tensors[0] is leaf and len(alone.grad_fn.needs_input_grad) == 5


def test_parts_need_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench_host.cases() == []


@pytest.mark.gpu
def test_every_part_is_a_call_with_launches():
    pytest.importorskip("torch")
    calls = bench_host.calls()
    assert tuple(calls) == bench_host.PARTS
    for name, parts in calls.items():
        call = parts[bench_host.OURS]
        for _ in range(bench_host.WARM):
            call()
        queued = []
        with bench_host.recorded(queued, []):
            call()
        assert queued, name
