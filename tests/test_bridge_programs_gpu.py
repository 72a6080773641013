"""Calls of torch_ops that come again on a GPU: the same results as the first, whatever changes between them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4cp import _bridge_programs, torch_ops
from dsv4cp._programs import Program, Programs
from dsv4cp.indexer import torch_bridge_kernels as scores
from dsv4cp.indexer import torch_bridge_topk as topk
from dsv4cp.sinkhorn import torch_bridge as sinkhorn
from dsv4cp.sparse_attention import torch_bridge_kernels as attention
from tests.support.compare import check_equal, check_frobenius
from tests.support.gpu_jobs import OPS, jobs

pytestmark = pytest.mark.gpu

HELD = {
    "attention": attention.PROGRAMS, "attention gradient": attention._GRADIENTS, "scores": scores.PROGRAMS,
    "scores gradient": topk._DENSE_GRADIENTS, "scores at ids": topk.PROGRAMS,
    "scores at ids gradient": topk._GRADIENTS, "Sinkhorn": sinkhorn._PROGRAMS, "Sinkhorn gradient": sinkhorn._GRADIENTS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten():
    torch.manual_seed(0)
    for programs in HELD.values():
        programs.forget()


def made() -> dict[str, int]:
    """How many programs each operation has."""
    return {name: sum(isinstance(x, Program) for x in held._known.values()) for name, held in HELD.items()}


def make(heads=64, ids_dtype=torch.int32, dtype=torch.bfloat16, device="cuda"):
    """q, kv, sinks, index q, entries, weights and matrices; ids."""
    shapes = ((2, 9, heads, 512), (2, 20, 512), (heads,), (2, 9, heads, 128), (2, 9, 128), (2, 9, heads), (3, 4, 4))
    wide = {2} if heads == 64 else set()  # sinks
    dtypes = [torch.float32 if n in wide else dtype for n in range(len(shapes))]
    leaves = [torch.randn(x, device=device).to(t).requires_grad_() for x, t in zip(shapes, dtypes, strict=True)]
    return leaves, torch.randint(0, 20, (2, 9, 6), device=device, dtype=ids_dtype)


def every_op(leaves, ids, **options):
    """A call of each operation with operators."""
    q, kv, sinks, index_q, entries, weights, x = leaves
    at = {"compress_ratio": 4, "softmax_scale": 0.1, "backend": "tilelang"}
    return (
        torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, 0.05, backend="tilelang", **options),
        torch_ops.dsv4_indexer_scores(index_q, entries, weights, **at),
        torch_ops.dsv4_indexer_topk_scores(index_q, entries, weights, ids % 9, **at),
        torch_ops.dsv4_sinkhorn_normalize(x, backend="tilelang", repeat=20, eps=1e-6),
    )


def step(leaves, ids, **options):
    """Results without a gradient, with one, and gradients."""
    with torch.no_grad():
        plain = every_op(leaves, ids, **options)
    outputs = every_op(leaves, ids, **options)
    finite = [y.nan_to_num(neginf=0.0) if y.dtype == torch.float32 else y for y in outputs]
    grads = torch.autograd.grad(finite, leaves, [torch.ones_like(y) for y in finite])
    return [*plain, *(y.detach() for y in outputs), *grads]


def check(got, want) -> None:
    for n, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.is_contiguous() and g.stride() == w.stride() and g.dtype == w.dtype
        if n in (9, 12):  # of kv and entries: gradients summed over queries in any order
            check_frobenius(g, w, "attention_grad", 1e-2)
        else:
            check_equal(g, w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_results_are_those_of_the_first_call(heads, ids_dtype, dtype):
    inputs = make(heads, ids_dtype, dtype)
    first = step(*inputs)  # each forward twice, with and without a gradient: noted, not played
    for _ in range(4):
        check(step(*inputs), first)
    counts = made()
    assert counts.pop("scores at ids gradient") and all(counts.values()), counts


@pytest.mark.parametrize("impl", ["atomic", "deterministic"])
def test_both_gradients_and_other_memory(impl):
    options = {"backward_impl": impl, "backward_workspace_bytes": 8 * 512 * 64 if impl == "deterministic" else 2**31}
    inputs = make()
    for _ in range(3):
        step(*inputs, **options)
    for seed in range(5):
        torch.manual_seed(seed)
        leaves, ids = make()
        got = step(leaves, ids, **options)
        for programs in HELD.values():
            programs.kept, programs._known = programs._known, {}
        want = step(leaves, ids, **options)
        check(got, want)
        for programs in HELD.values():
            programs._known = programs.kept
    assert all(made().values())


def test_gradients_of_played_calls_are_not_told(monkeypatch):
    """A gradient is known by the forward call and what comes in."""
    for _ in range(3):
        step(*make())
    told, calls = _bridge_programs.told, []
    monkeypatch.setattr(_bridge_programs, "told", lambda *args: calls.append(args) or told(*args))
    for seed in range(3):
        torch.manual_seed(seed)
        leaves, ids = make()
        outputs = every_op(leaves, ids)
        incoming = [torch.randn_like(y) for y in outputs]
        assert calls, "forward calls are told"
        calls.clear()
        got = torch.autograd.grad(outputs, leaves, incoming)
        assert calls == []
        with Mode():
            want = torch.autograd.grad(every_op(leaves, ids), leaves, incoming)
        for n, (g, w) in enumerate(zip(got, want, strict=True)):
            if n in (1, 4):  # kv and entries: summed over queries in any order
                check_frobenius(g, w, "attention_grad", 1e-2)
            else:
                check_equal(g, w)


class Mode(TorchDispatchMode):
    """Looks on, so that nothing is played."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_plan_serves_layers():
    (q, kv, sinks, *_), ids = make()
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 20, "tilelang")
    want = torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, 0.05, backend="tilelang", return_lse=True)
    for _ in range(4):
        got = torch_ops.dsv4_sparse_attention(q, kv, sinks, None, 0.05, backend="tilelang", plan=plan, return_lse=True)
        for g, w in zip(got, want, strict=True):
            check_equal(g.detach(), w.detach())
    other = torch_ops.plan_dsv4_sparse_indices(ids.flip(1), 20, "tilelang")
    got = torch_ops.dsv4_sparse_attention(q, kv, sinks, None, 0.05, backend="tilelang", plan=other)
    want = torch_ops.dsv4_sparse_attention(q, kv, sinks, ids.flip(1).contiguous(), 0.05, backend="tilelang")
    check_equal(got.detach(), want.detach())
    wrong = torch_ops.plan_dsv4_sparse_indices(ids, 20, "torch")
    with pytest.raises(ValueError, match="plan: expected a plan for backend 'tilelang'"):
        torch_ops.dsv4_sparse_attention(q, kv, sinks, None, 0.05, backend="tilelang", plan=wrong)


def test_what_is_refused_is_refused_every_time():
    leaves, ids = make()
    for _ in range(3):
        step(leaves, ids)
    q, kv, sinks, *_, x = leaves
    for call, kind in (
        (lambda: torch_ops.dsv4_sparse_attention(q, kv[:, :, :64], sinks, ids, 0.05, backend="tilelang"), ValueError),
        (lambda: torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, "0.05", backend="tilelang"), TypeError),
        (lambda: torch_ops.dsv4_sparse_attention(q, kv.cpu(), sinks, ids, 0.05, backend="tilelang"), ValueError),
        (lambda: torch_ops.dsv4_sinkhorn_normalize(x, backend="tilelang", repeat=0, eps=1e-6), ValueError),
        (lambda: torch_ops.dsv4_sinkhorn_normalize(x, backend="tilelang", repeat=True, eps=1e-6), TypeError),
    ):
        for _ in range(3):
            with pytest.raises(kind):
                call()


def test_modes_of_torch():
    inputs = make()
    want = step(*inputs)
    for _ in range(3):
        step(*inputs)
    with torch.inference_mode():
        for got, w in zip(every_op(*inputs), want, strict=False):
            assert got.is_inference() and not got.requires_grad
            check_equal(got, w)
    with torch.autograd.detect_anomaly(check_nan=False):
        check(step(*inputs), want)
    leaves, ids = inputs
    y = every_op(leaves, ids)[3]
    (grad,) = torch.autograd.grad(y, leaves[6], torch.ones_like(y), create_graph=True)
    assert grad.requires_grad
    saved = torch.autograd.graph.save_on_cpu()
    with saved:
        check(step(*inputs), want)


def test_a_profiler_sees_the_operators_and_the_same_results():
    inputs = make()
    for _ in range(3):
        want = step(*inputs)
    with torch.autograd.profiler.profile() as seen:
        got = step(*inputs)
    check(got, want)
    names = {event.name for event in seen.function_events}
    for name in ("sparse_attention", "indexer_scores", "indexer_topk_scores", "sinkhorn_normalize"):
        assert {f"dsv4::{name}", f"dsv4::{name}_grad"} <= names


def test_deterministic_algorithms_are_asked_about_every_time():
    leaves, ids = make()
    _, _, _, q, entries, weights, _ = leaves

    def gradient():
        y = torch_ops.dsv4_indexer_topk_scores(
            q, entries, weights, ids % 3, compress_ratio=4, softmax_scale=0.1, backend="tilelang"
        )
        return torch.autograd.grad(y, (q, entries, weights), torch.ones_like(y))

    for _ in range(3):
        atomic = gradient()
    torch.use_deterministic_algorithms(True)
    try:
        fixed = [gradient() for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert made()["scores at ids gradient"] == 2
    for grads in fixed[1:]:
        for g, w in zip(grads, fixed[0], strict=True):
            check_equal(g, w)
    for g, w in zip(atomic, fixed[0], strict=True):
        check_frobenius(g, w, "indexer_grad", 1e-2)


def test_graphs_replay_programs():
    inputs = make()
    for _ in range(3):
        step(*inputs)
    counts = made()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(*inputs)
    assert made() == counts, "the capture took programs"
    with torch.no_grad():
        for x in inputs[0]:
            x.copy_(torch.randn_like(x))
    want = step(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    check(got, want)


def test_another_device_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    inputs = make(device="cuda:1")
    want = step(*inputs)
    for _ in range(3):
        got = step(*inputs)
        assert torch.cuda.current_device() == 0 and all(x.device.index == 1 for x in got)
        check(got, want)


@pytest.mark.parametrize("name", [name for name in OPS if name not in ("plan", "index lists", "dense attention")])
def test_against_the_oracle(name):
    """Third calls and later ones, on numbers that the first have not seen."""
    for job in jobs(name, kernels=True):
        if job.way.library == "torch":
            for seed in range(4):
                job.renew(seed)
                assert not job.wrong(job.run())


def test_programs_are_found_by_kind_alone():
    programs = Programs()
    assert programs._known == {}
    x = torch.randn(5, 4, 4, device="cuda")
    for n in range(3):
        sinkhorn.dsv4_sinkhorn_normalize(x, backend="tilelang", repeat=20 + n, eps=1e-6)
        sinkhorn.dsv4_sinkhorn_normalize(x[n:], backend="tilelang", repeat=20, eps=1e-6)
    assert made()["Sinkhorn"] == 1 and len(sinkhorn._PROGRAMS._known) == 5
