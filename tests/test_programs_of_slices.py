"""Calls of every operation that come again: playing gives what operators give, on a GPU whose memory is the CPU's."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import SparseIndexPlan, torch_ops  # noqa: E402
from dsv4cp.indexer import torch_bridge_kernels as indexer_kernels  # noqa: E402
from dsv4cp.indexer import torch_bridge_topk  # noqa: E402
from dsv4cp.sinkhorn import torch_bridge as sinkhorn_bridge  # noqa: E402
from dsv4cp.sparse_attention import cuda, cuda_bwd  # noqa: E402
from dsv4cp.sparse_attention import torch_bridge_kernels as attention_kernels  # noqa: E402
from tests.support.compare import check_equal  # noqa: E402
from tests.support.stand_in_gpu import ALL_PROGRAMS, installed  # noqa: E402
from tests.support.threads import run_at_once  # noqa: E402


class Mode(TorchDispatchMode):
    """Looks on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["portable", "hopper"])
def gpu(request, monkeypatch):
    yield from installed(monkeypatch, request.param == "hopper")


NORMAL = {"backend": "tilelang", "repeat": 4, "eps": 2.0**-20}
AT = {"compress_ratio": 4, "softmax_scale": 0.125, "backend": "tilelang"}
BF16 = torch.bfloat16


def attention(heads=40, dim=512, dtype=BF16, sinks=torch.float32, ids=torch.int32, plan=False, lse=False, **options):
    def make(seed):
        g = torch.Generator().manual_seed(seed)
        q, kv, s = (torch.randn(*sizes, generator=g) for sizes in ((1, 3, heads, dim), (1, 9, dim), (heads,)))
        return [q.to(dtype), kv.to(dtype), s.to(sinks), torch.randint(-1, 9, (1, 3, 5), generator=g).to(ids)]

    def call(q, kv, s, ids):
        options_ = {"backend": "tilelang", "return_lse": lse, **options}
        if plan:
            made = SparseIndexPlan("tilelang", ids, None, None, kv.shape[1])
            return torch_ops.dsv4_sparse_attention(q, kv, s, None, 0.125, plan=made, **options_)
        return torch_ops.dsv4_sparse_attention(q, kv, s, ids, 0.125, **options_)

    return make, call, 3, "sparse_attention"


def scores(dim=128, weights=torch.float32, **options):
    def make(seed):
        g = torch.Generator().manual_seed(seed)
        q, k, w = (torch.randn(*sizes, generator=g) for sizes in ((2, 9, 8, dim), (2, 6, dim), (2, 9, 8)))
        return [q.to(BF16), k.to(BF16), w.to(weights)]

    def call(q, k, w):
        return torch_ops.dsv4_indexer_scores(q, k, w, **AT, **options)

    return make, call, 3, "indexer_scores"


def topk_scores(ids=torch.int64, weights=torch.float32):
    def make(seed):
        g = torch.Generator().manual_seed(seed)
        return [*scores(weights=weights)[0](seed), torch.randint(-1, 6, (2, 9, 5), generator=g).to(ids)]

    def call(q, k, w, ids):
        return torch_ops.dsv4_indexer_topk_scores(q, k, w, ids, **AT)

    return make, call, 3, "indexer_topk_scores"


def normal(dtype=torch.float32):
    def make(seed):
        return [torch.randn(37, 4, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)]

    return make, lambda x: torch_ops.dsv4_sinkhorn_normalize(x, **NORMAL), 1, "sinkhorn_normalize"


CASES = {
    "attention": attention(),
    "attention, few heads": attention(heads=4, dtype=torch.float16),
    "attention, D 64": attention(heads=3, dim=64),
    "attention, sinks in bfloat16": attention(sinks=BF16),
    "attention, int64 ids": attention(ids=torch.int64),
    "attention, a plan": attention(plan=True),
    "attention, a plan of int64": attention(plan=True, ids=torch.int64, sinks=BF16),
    "attention, lse": attention(lse=True),
    "attention, auto": attention(heads=4, backend="auto", all_rows_nonempty=True),
    "indexer": scores(),
    "indexer, later queries": scores(dim=64, weights=BF16, query_start=5, query_total_len=20),
    "indexer at ids": topk_scores(),
    "indexer at int32 ids": topk_scores(ids=torch.int32, weights=BF16),
    "Sinkhorn": normal(),
    "Sinkhorn in bfloat16": normal(BF16),
}
SOME = "attention, lse", "attention, sinks in bfloat16", "attention, a plan", "indexer", "indexer at ids", "Sinkhorn"
FIXED = {"attention, fixed order": attention(heads=4, backward_impl="deterministic")}  # not by the reference


def tensors(case, seed, grad):
    make, _, count, _ = case
    return [x.requires_grad_() if grad and n < count else x for n, x in enumerate(make(seed))]


def results(case, given, **options):
    """What a call gives, and its gradients where they are wanted."""
    _, call, count, _ = case
    y = call(*given, **options)
    ys = list(y) if isinstance(y, tuple) else [y]
    if given[0].requires_grad and torch.is_grad_enabled():
        assert all(x.requires_grad for x in ys)
        incoming = torch.linspace(-1, 1, ys[0].numel()).reshape(ys[0].shape).to(ys[0].dtype)
        ys += torch.autograd.grad(ys[0], given[:count], incoming)
    return [x.detach() for x in ys]


def by_operator(case, given):
    with Mode():
        return results(case, given)


def check_all(got, want):
    for g, w in zip(got, want, strict=True):
        check_equal(g, w)


# --- The slices ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["eeettt", "tteettee", "teiteitei", "iiitet"])
@pytest.mark.parametrize("name", SOME)
def test_training_and_evaluation_take_turns(gpu, name, order):
    """t: with gradients, e: without, i: in inference mode; one program serves all."""
    case = CASES[name]
    given = tensors(case, 0, True)
    want = by_operator(case, given)
    for mode in order:
        context = {"t": contextlib.nullcontext, "e": torch.no_grad, "i": torch.inference_mode}[mode]
        with context():
            got = results(case, given)
        assert len(got) == len(want) if mode == "t" else len(got) < len(want)
        for g, w in zip(got, want, strict=False):
            check_equal(g, w)
    assert gpu.plays


@pytest.mark.parametrize("name", SOME)
def test_tensors_that_no_call_takes_are_refused_after_a_play_too(gpu, name):
    case = CASES[name]
    given = tensors(case, 0, False)
    for _ in range(4):
        results(case, given)
    plays, x = gpu.plays, given[0]
    nested = torch.nested.nested_tensor([x[0]])
    for wrong in (nested, x.to_sparse(), None, x.tolist()):
        for _ in range(2):
            with pytest.raises(Exception) as refused:
                case[1](wrong, *given[1:])
            with Mode(), pytest.raises(type(refused.value)):
                case[1](wrong, *given[1:])
    assert plays and gpu.plays == plays
    check_all(results(case, given), by_operator(case, given))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_third_call_of_a_kind_is_played(gpu, name, grad):
    case = CASES[name]
    given = tensors(case, 0, grad)
    want = by_operator(case, given)
    assert not any(programs._known for programs in ALL_PROGRAMS)
    for _ in range(2):
        check_all(results(case, given), want)
        assert gpu.plays == 0 and gpu.queued == []
    for seed in (0, 1, 2):
        ours = tensors(case, seed, grad)
        want = by_operator(case, ours)
        before = gpu.plays
        check_all(results(case, ours), want)
        assert gpu.plays == before + 1 + grad
    assert gpu.queued and {stream for *_, stream, _ in gpu.queued} == {77}


@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_with_and_without_gradients(gpu, name):
    case = CASES[name]
    leaves, plain = tensors(case, 0, True), tensors(case, 1, False)
    for _ in range(2):
        results(case, leaves)
    for context in (contextlib.nullcontext(), torch.no_grad(), torch.inference_mode()):
        with context:
            before = gpu.plays
            got = results(case, plain)
            assert gpu.plays == before + 1 and not got[0].requires_grad
            if type(context) is not contextlib.nullcontext:
                (y, *_) = results(case, leaves)
                assert gpu.plays == before + 2
                with Mode():
                    check_equal(y, results(case, leaves)[0])
        check_all(got, by_operator(case, plain))


@pytest.mark.parametrize("name", SOME)
def test_gradients_of_some_and_graphs_of_gradients(gpu, name):
    case = CASES[name]
    _, call, count, _ = case
    given = tensors(case, 0, True)
    for _ in range(2):
        results(case, given)

    def twice():
        y = call(*given)
        y = y[0] if isinstance(y, tuple) else y
        y = torch.where(y.isfinite(), y, 0).float()
        first = torch.autograd.grad(y.square().sum(), given[:count], create_graph=True)
        assert all(x.requires_grad for x in first)
        plays = gpu.plays
        return first, torch.autograd.grad(sum(x.float().square().sum() for x in first), given[:count]), plays

    with Mode():
        *want, plays = twice()
    *got, first_plays = twice()
    assert first_plays == plays + 1, "the forward is played, a graph of the gradient is torch's"
    for ours, theirs in zip(got, want, strict=True):
        check_all([x.detach() for x in ours], [x.detach() for x in theirs])
    some = [x.detach().requires_grad_(n == 0) for n, x in enumerate(given[:count])] + given[count:]
    y = call(*some)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.ones_like(y))
    assert some[0].grad is not None and not any(x.requires_grad for x in some[1:])


def test_lse_has_a_gradient_of_its_own(gpu):
    case = CASES["attention, lse"]
    given = tensors(case, 0, True)
    for _ in range(2):
        results(case, given)

    def grads():
        out, lse = case[1](*given)
        return torch.autograd.grad([out, lse], given[:3], [torch.ones_like(out), torch.ones_like(lse)])

    with Mode():
        want = grads()
    before = gpu.plays
    check_all(grads(), want)
    assert gpu.plays == before + 1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SOME)
def test_a_profiler_still_shows_the_operators(gpu, name, grad):
    case = CASES[name]
    given = tensors(case, 0, grad)
    for _ in range(3):
        played = results(case, given)
    before, operator = gpu.plays, f"dsv4::{case[3]}"
    with torch.autograd.profiler.profile() as seen:
        check_all(results(case, given), played)
    names = {event.name for event in seen.function_events}
    assert operator in names and (f"{operator}_grad" in names) == grad
    assert gpu.plays == before
    results(case, given)
    assert gpu.plays == before + 1 + grad


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_the_program_queues_what_the_operators_kernels_do(gpu):
    """With the CUDA kernels under the operators, as on a GPU."""
    library = torch.library.Library("dsv4", "IMPL")
    try:
        for name, kernel in (
            ("sparse_attention", attention_kernels._cuda_forward),
            ("sparse_attention_grad", attention_kernels._cuda_backward),
            ("indexer_scores", indexer_kernels._cuda_scores),
            ("indexer_scores_grad", torch_bridge_topk.cuda_dense_grad),
            ("indexer_topk_scores", torch_bridge_topk._cuda_scores),
            ("indexer_topk_scores_grad", torch_bridge_topk._cuda_grad),
            ("sinkhorn_normalize", sinkhorn_bridge._cuda_forward),
            ("sinkhorn_normalize_grad", sinkhorn_bridge._cuda_backward),
        ):
            library.impl(name, kernel, "CPU", allow_override=True)
        for name, case in {**CASES, **FIXED}.items():
            given, seen = tensors(case, 0, True), []
            for programs in ALL_PROGRAMS:
                programs.forget()
            for plays in (0, 0, 2):
                before = gpu.plays
                gpu.queued, gpu.cleared = [], []
                got = results(case, given)
                assert gpu.plays == before + plays
                seen.append((gpu.queued, gpu.cleared, got))
            (queued, cleared, want), *others = seen
            assert queued, name
            for other in others:
                assert other[:2] == (queued, cleared), name
                check_all(other[2], want)
    finally:
        library._destroy()


@pytest.mark.parametrize("op", [topk_scores(), attention(heads=4)], ids=["indexer at ids", "attention"])
def test_deterministic_algorithms_are_another_gradient(gpu, op):
    given = tensors(op, 0, True)
    for _ in range(3):
        want = results(op, given)
    plays, fixed = gpu.plays, {d for _, d, *_ in gpu.queued}
    torch.use_deterministic_algorithms(True)
    try:
        check_all(results(op, given), want)
        assert gpu.plays == plays + (1 if op[3] == "indexer_topk_scores" else 2)
        for _ in range(2):
            check_all(results(op, given), want)
        assert gpu.plays == plays + (4 if op[3] == "indexer_topk_scores" else 6)
    finally:
        torch.use_deterministic_algorithms(False)
    changed = {d for _, d, *_ in gpu.queued} - fixed
    assert bool(changed) == (op[3] == "indexer_topk_scores")
    assert all(("FIXED", "1") in d or "FIXED" not in dict(d) for d in changed)


def test_what_is_named_by_a_call_is_of_its_kind(gpu):
    """A change of anything goes to the operator again, and back to the program."""
    make, _, _, _ = attention(heads=4)
    q, kv, sinks, ids = make(0)
    plan = SparseIndexPlan("tilelang", ids, None, None, 9)
    usual = {"backend": "tilelang"}
    op = torch_ops.dsv4_sparse_attention
    for _ in range(2):
        op(q, kv, sinks, ids, 0.125, **usual)
    before = gpu.plays
    op(q, kv, sinks, ids, 0.125, **usual)
    assert gpu.plays == before + 1
    for args, options in (
        ((q, kv, sinks, ids, 0.25), {}), ((q, kv, sinks, ids, 1), {}), ((q, kv, sinks, ids[..., :4], 0.125), {}),
        ((q, kv, sinks, None, 0.125), {"plan": plan}), ((q, kv, sinks, ids, 0.125), {"return_lse": True}),
        ((q, kv, sinks, ids, 0.125), {"backward_impl": "deterministic"}), ((q, kv, sinks, ids, np.float64(0.125)), {}),
        ((q, kv, sinks, ids, 0.125), {"reference_rounding": True}), ((q, kv, sinks, ids, 0.125), {"backend": "auto"}),
        ((q, kv[:, :8], sinks, ids, 0.125), {}), ((q.half(), kv.half(), sinks, ids, 0.125), {}),
        ((q, kv, sinks, ids, 0.125), {"backward_workspace_bytes": 4096}),
    ):  # fmt: skip
        before = gpu.plays
        op(*args, **{**usual, **options})
        assert gpu.plays == before, (args[4:], options)
    op(q, kv, sinks, ids, 0.125, **usual)
    assert gpu.plays == before + 1


def test_errors_come_every_time(gpu):
    make, _, _, _ = attention(heads=4)
    q, kv, sinks, ids = make(0)
    op, plan = torch_ops.dsv4_sparse_attention, SparseIndexPlan("tilelang", ids, None, None, 9)
    for _ in range(3):
        op(q, kv, sinks, ids, 0.125, backend="tilelang")
        op(q, kv, sinks, None, 0.125, backend="tilelang", plan=plan)
    assert gpu.plays == 2
    for _ in range(3):
        for args, options, kind_, message in (
            ((q, kv, sinks, ids, 0.125), {"return_lse": 1}, TypeError, "return_lse: expected True or False"),
            ((q, kv, sinks, ids, 0.125), {"backend": "other"}, ValueError, "backend: expected one of"),
            ((q, kv, sinks, ids, 0.125), {"backward_workspace_bytes": 0}, ValueError, "backward_workspace_bytes"),
            ((q, kv, sinks, ids, 0.125), {"backward_impl": "x"}, ValueError, "backward_impl"),
            ((q, kv, sinks, ids.float(), 0.125), {}, TypeError, "topk_idxs"),
            ((q, kv, sinks, None, 0.125), {}, TypeError, "topk_idxs: expected an array of ids"),
            ((q, kv, sinks, ids, math.inf), {}, ValueError, "sm_scale"),
            (
                (q, kv, sinks, None, 0.125), {"plan": SparseIndexPlan("torch", ids, None, None, 9)}, ValueError,
                "plan: expected a plan for backend 'tilelang'",
            ),
            (
                (q, kv, sinks, None, 0.125), {"plan": SparseIndexPlan("tilelang", ids, None, None, 8)}, ValueError,
                "plan: expected kv_sequence 9",
            ),
        ):  # fmt: skip
            with pytest.raises(kind_, match=message):
                op(*args, **{"backend": "tilelang", **options})


def test_what_kernels_cannot_read_as_it_is_stays_with_the_operator(gpu):
    make, _, _, _ = attention(heads=4)
    q, kv, sinks, ids = make(0)
    unaligned = torch.empty(1, 3, 4, 513, dtype=BF16)[..., :512].copy_(q)
    across = ids.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.empty(8)[::2].copy_(sinks)
    normal_x = torch.randn(4, 4, 36).permute(2, 0, 1)
    w = torch.randn(2, 9, 16)[..., ::2]
    indexer_q, indexer_k, _, chosen = topk_scores()[0](0)
    op = torch_ops
    for call in (
        lambda: op.dsv4_sparse_attention(unaligned, kv, sinks, ids, 0.125, backend="tilelang"),
        lambda: op.dsv4_sparse_attention(q, kv, sinks, across, 0.125, backend="tilelang"),
        lambda: op.dsv4_sparse_attention(q, kv, spread, ids, 0.125, backend="tilelang"),
        lambda: op.dsv4_sinkhorn_normalize(normal_x, **NORMAL),
        lambda: op.dsv4_indexer_topk_scores(indexer_q, indexer_k, w, chosen, **AT),
    ):
        want = call()
        for _ in range(4):
            check_equal(call(), want)
        assert gpu.plays == 0
    dense = [op.dsv4_indexer_scores(indexer_q, indexer_k, w, **AT) for _ in range(4)]  # reads weights of any strides
    assert gpu.plays == 2
    check_all(dense[1:], dense[:1] * 3)


def test_incoming_gradients_of_any_strides(gpu):
    """Where kernels need rows, the operator makes them; the indexer reads what comes."""
    for name, plays in (("attention, few heads", 0), ("Sinkhorn", 0), ("indexer", 2), ("indexer at ids", 2)):
        case = CASES[name]
        given = tensors(case, 0, True)
        y = case[1](*given)
        one = torch.ones((), dtype=y.dtype)
        dense = torch.autograd.grad(y, given[: case[2]], torch.ones_like(y), retain_graph=True)
        before = gpu.plays
        for _ in range(4):
            check_all(torch.autograd.grad(y, given[: case[2]], one.expand(y.shape), retain_graph=True), dense)
        assert gpu.plays == before + plays, name


def test_a_forced_path_is_another_kind(gpu, monkeypatch):
    case = CASES["attention"]
    given = tensors(case, 0, True)
    for _ in range(3):
        want = results(case, given)
    for module in cuda, cuda_bwd:
        monkeypatch.setattr(module, "forced_path", "portable")
    before, gpu.queued = gpu.plays, []
    for _ in range(3):
        check_all(results(case, given), want)
    assert gpu.plays == before + 2
    assert gpu.queued and not any("sm90" in name for name, *_ in gpu.queued)


@pytest.mark.parametrize("name", SOME)
def test_inference_mode_has_no_gradient_whatever_grad_mode_says(gpu, name):
    case = CASES[name]
    _, call, _, _ = case
    given = tensors(case, 0, True)
    for _ in range(4):
        with torch.inference_mode(), torch.enable_grad():
            y = call(*given)
        for x in y if isinstance(y, tuple) else (y,):
            assert x.is_inference() and not x.requires_grad
    assert gpu.plays


def test_hooks_that_lay_a_saved_tensor_out_anew(gpu):
    """They are given the caller's tensor between a call and its note, which must not describe another kind."""

    def leaf(seed, rows_first):
        q, kv, sinks, ids = CASES["attention"][0](seed)
        q = q if rows_first else q.transpose(1, 2).contiguous().transpose(1, 2)
        return [q.requires_grad_(), kv, sinks, ids]

    def pack(x):
        if x.is_leaf and x.requires_grad and not x.is_contiguous():
            x.data = x.data.contiguous()
        return x

    _, call, _, _ = CASES["attention"]
    for rows_first in (False, True, False):
        for seed in range(4):
            with Mode():
                want = call(*leaf(seed, True)).detach()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                got = call(*leaf(seed, rows_first)).detach()
            check_equal(got, want)


def test_a_plan_without_fields_is_the_contracts_error_every_time(gpu):
    q, kv, sinks, _ = CASES["attention"][0](0)
    for _ in range(3):
        with pytest.raises(TypeError, match="plan"):
            torch_ops.dsv4_sparse_attention(
                q, kv, sinks, None, 0.125, backend="tilelang", plan=object.__new__(SparseIndexPlan)
            )


def test_threads_play_their_own_calls(gpu):
    case = CASES["Sinkhorn"]
    given = [tensors(case, seed, False) for seed in range(8)]
    want = [by_operator(case, x) for x in given]
    for _ in range(2):
        results(case, given[0])

    def calls(n):
        for _ in range(10):
            check_all(results(case, given[n]), want[n])

    run_at_once([lambda n=n: calls(n) for n in range(8)])
    assert gpu.plays == 80
