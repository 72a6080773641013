"""Gradients of played calls, known by the forward call and what comes in: right whatever happens to what was saved.

On a GPU whose memory is the CPU's."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _bridge_programs
from dsv4cp._bridge_programs import MOST_GRADIENTS, Forward, Told, gradient_of, remember_gradient
from dsv4cp._kernel_notes import Launches
from dsv4cp._programs import Gradients, Program
from dsv4cp.sparse_attention import cuda_bwd
from tests.support.compare import check_equal
from tests.support.stand_in_gpu import installed
from tests.support.threads import run_at_once
from tests.test_programs_of_slices import CASES, Mode, tensors

ONE_OF_EACH = "attention", "indexer", "indexer at ids", "Sinkhorn"
TELL = "attention, sinks in bfloat16", "attention, a plan of int64"  # whose sinks each direction copies to float32


@pytest.fixture(params=["portable", "hopper"])
def gpu(request, monkeypatch):
    making = installed(monkeypatch, request.param == "hopper")
    made, told = next(making), _bridge_programs.told
    made.told = 0

    def counted(*args):
        made.told += 1
        return told(*args)

    monkeypatch.setattr(_bridge_programs, "told", counted)
    yield made
    next(making, None)


def incoming(y, seed=0):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)


def forward(case, given):
    y = case[1](*given)
    return y[0] if isinstance(y, tuple) else y


def grads(y, case, given, grad, **options):
    return torch.autograd.grad(y, given[: case[2]], grad, **options)


def warmed(case):
    """Tensors of a kind whose gradients are known by the forward call."""
    given = tensors(case, 0, True)
    for _ in range(3):
        y = forward(case, given)
        grads(y, case, given, incoming(y))
    return given


def check_both(gpu, case, given, grad, *, told, between=lambda y: None, hooks=contextlib.nullcontext):
    """Gradients by the operators and played, with the same done in between; `told`: how often the latter are told."""
    with Mode(), hooks():
        y = forward(case, given)
    with Mode():
        between(y)
        want = grads(y, case, given, grad)
    plays = gpu.plays
    with hooks():
        y = forward(case, given)
    assert gpu.plays == plays + 1
    between(y)
    gpu.told = 0
    got = grads(y, case, given, grad)
    assert gpu.told == told
    for g, w in zip(got, want, strict=True):
        assert g.stride() == w.stride() and not g.requires_grad
        check_equal(g, w)


# --- Known by the forward call -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_played_calls_are_not_told(gpu, name):
    case = CASES[name]
    warmed(case)
    for seed in (0, 1, 2):
        given = tensors(case, seed, True)
        y = forward(case, given)
        plays, gpu.told = gpu.plays, 0
        got = grads(y, case, given, incoming(y, seed))
        assert gpu.plays == plays + 1 and gpu.told == (name in TELL)
        with Mode():
            want = grads(forward(case, given), case, given, incoming(y, seed))
        for g, w in zip(got, want, strict=True):
            check_equal(g, w)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_kinds_of_incoming_gradients(gpu, name):
    case = CASES[name]
    given = warmed(case)
    y = forward(case, given)
    laid = {
        "transposed": incoming(y.transpose(0, 1).contiguous()).transpose(0, 1),
        "expanded": incoming(y[:, :1]).expand(y.shape),
        "off 16 bytes": incoming(torch.empty(y.numel() + 1, dtype=y.dtype))[1:].view(y.shape),
        "negated": torch._neg_view(incoming(y)),
        "inference": incoming(y),
        "a parameter": torch.nn.Parameter(incoming(y)),
    }
    with torch.inference_mode():
        laid["inference"] = laid["inference"].clone()
    for _ in range(4):
        for grad in laid.values():
            plain = grad.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
            with Mode():
                want = grads(forward(case, given), case, given, plain)
            y = forward(case, given)
            for g, w in zip(grads(y, case, given, grad), want, strict=True):
                check_equal(g, w)
    for label, grad in laid.items():
        y = forward(case, given)
        gpu.told, plays = 0, gpu.plays
        grads(y, case, given, grad)
        if label in ("inference", "a parameter"):
            assert gpu.told == 0 and gpu.plays == plays + 1, label
        if label in ("off 16 bytes", "negated"):
            assert gpu.told == 1 and gpu.plays == plays, label


def test_the_gradients_kernels_are_asked_for_each_time(gpu, monkeypatch):
    case = CASES["attention"]
    given = warmed(case)
    grad = incoming(forward(case, given))
    monkeypatch.setattr(cuda_bwd, "forced_path", "portable")
    check_both(gpu, case, given, grad, told=1)
    monkeypatch.undo()


def test_determinism_is_asked_for_each_time(gpu):
    case = CASES["indexer at ids"]
    given = warmed(case)
    y = forward(case, given)
    for fixed in (True, True, True, False, True):
        torch.use_deterministic_algorithms(fixed)
        try:
            y = forward(case, given)
            gpu.queued = []
            grads(y, case, given, incoming(y))
            seen = gpu.queued
        finally:
            torch.use_deterministic_algorithms(False)
    assert any(("FIXED", "1") in defines for _, defines, *_ in seen) and gpu.told
    gpu.told = 0
    for fixed in (True, False, True):
        torch.use_deterministic_algorithms(fixed)
        try:
            y = forward(case, given)
            gpu.queued, gpu.told = [], 0
            grads(y, case, given, incoming(y))
        finally:
            torch.use_deterministic_algorithms(False)
        assert gpu.told == 0
        assert any(("FIXED", "1") in defines for _, defines, *_ in gpu.queued) == fixed


def test_threads_share_them(gpu):
    case = CASES["Sinkhorn"]  # whose launches leave nothing in the stand-in
    warmed(case)
    want = {}
    for seed in range(4):
        given = tensors(case, seed, True)
        with Mode():
            y = forward(case, given)
            want[seed] = grads(y, case, given, incoming(y, seed))
    gpu.told, different = 0, []

    def work(seed):
        for _ in range(20):
            given = tensors(case, seed, True)
            y = forward(case, given)
            got = grads(y, case, given, incoming(y, seed))
            different.extend(seed for g, w in zip(got, want[seed], strict=True) if not torch.equal(g, w))

    run_at_once([lambda n=n: work(n % 4) for n in range(8)])
    assert different == [] and gpu.told <= 8 * 20, "forward calls alone are told"


# --- What happens to the saved tensors -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_hooks_around_the_forward_call(gpu, name):
    case = CASES[name]
    given = warmed(case)
    grad = incoming(forward(case, given))
    packed = []

    def pack(x):
        packed.append(x)
        return len(packed) - 1

    def unpack(n):
        x = packed[n]
        return 2 * x if x.is_floating_point() else x

    check_both(gpu, case, given, grad, told=1, hooks=lambda: saved_tensors_hooks(pack, unpack))
    assert packed

    def elsewhere(n):  # the same values, laid otherwise
        x = packed[n]
        return torch.empty(x.shape[::-1], dtype=x.dtype).permute(*range(x.ndim)[::-1]).copy_(x)

    check_both(gpu, case, given, grad, told=1, hooks=lambda: saved_tensors_hooks(pack, elsewhere))
    check_both(gpu, case, given, grad, told=0)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_hooks_around_the_backward_call_see_nothing(gpu, name):
    case = CASES[name]
    given = warmed(case)
    y = forward(case, given)
    want = grads(y, case, given, incoming(y), retain_graph=True)
    gpu.told = 0
    with saved_tensors_hooks(lambda x: None, lambda x: None):
        got = grads(y, case, given, incoming(y))
    assert gpu.told == 0
    for g, w in zip(got, want, strict=True):
        check_equal(g, w)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_hooks_on_one_saved_tensor(gpu, name):
    case = CASES[name]
    given = warmed(case)
    grad = incoming(forward(case, given))

    def hang(y):
        y.grad_fn._raw_saved_tensors[0].register_hooks(lambda x: x.detach().clone(), lambda x: 3 * x)

    check_both(gpu, case, given, grad, told=1, between=hang)
    check_both(gpu, case, given, grad, told=1, between=lambda y: y.grad_fn._raw_saved_tensors)
    check_both(gpu, case, given, grad, told=0)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_that_was_put_in_its_place(gpu, name):
    case = CASES[name]
    given = warmed(case)
    grad, others = incoming(forward(case, given)), tensors(case, 5, False)
    for n in range(len(given)):
        own = given[n].data

        with Mode():
            y = forward(case, given)
            given[n].data = others[n]
            want = grads(y, case, given, grad)
        given[n].data = own
        y = forward(case, given)
        given[n].data = others[n]
        gpu.told = 0
        for g, w in zip(grads(y, case, given, grad), want, strict=True):
            check_equal(g, w)
        assert gpu.told == 1
        given[n].data = own
    check_both(gpu, case, given, grad, told=0)


OTHERS = {
    torch.bfloat16: torch.float16, torch.float32: torch.bfloat16, torch.int32: torch.float32, torch.int64: torch.float64
}  # fmt: skip


def other_metadata(x):
    """Tensors at x's address that are others."""
    flat = x.reshape(-1)
    yield flat[: x.numel() - x[-1].numel()].view(-1, *x.shape[1:])
    yield flat.as_strided(x.shape, (0,) * x.ndim)
    yield flat.as_strided(x.shape, [s // 2 if s > 1 else s for s in x.stride()])
    yield torch._neg_view(x)
    yield flat.view(OTHERS[x.dtype])[: x.numel()].view(x.shape)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_other_metadata_at_the_same_address(gpu, name):
    """x.data = y: y is what the gradient is of, or is refused, as by the operators."""
    case = CASES[name]

    def outcome(given, n, y, grad):
        given[n].data = y
        try:
            return [g.clone() for g in grads(*grad)]
        except Exception as error:
            return type(error)

    for n in range(len(tensors(case, 0, False))):
        for which in range(5):
            found = []
            for mode in (Mode, contextlib.nullcontext):
                given = warmed(case)
                own = given[n].data
                with mode():
                    y = forward(case, given)
                    other = list(other_metadata(own))[which]
                    plays, gpu.told = gpu.plays, 0
                    found.append(outcome(given, n, other, (y, case, given, incoming(y))))
                given[n].data = own
            want, got = found
            same = n == 2 and which == 2 and given[2].ndim == 1  # whose strides cannot be halved
            if isinstance(want, type):  # torch's own engine raises some of these
                assert got is want and gpu.plays == plays, (n, which, want, got)
            else:
                assert gpu.told == 1 - same and isinstance(got, list), (n, which, got)
                for g, w in zip(got, want, strict=True):
                    check_equal(g, w)


def test_results_are_those_of_the_call_whatever_their_data_is_set_to(gpu):
    case = CASES["attention, lse"]
    given = warmed(case)
    out, lse = case[1](*given)
    grad = incoming(out)
    want = grads(out, case, given, grad, retain_graph=True)
    out.data, lse.data, gpu.told = torch.zeros_like(out), lse.data[:, :1], 0
    for g, w in zip(grads(out, case, given, grad), want, strict=True):
        check_equal(g, w)
    assert gpu.told == 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_that_was_emptied(gpu, name):
    case = CASES[name]
    given = warmed(case)
    y = forward(case, given)
    want = grads(y, case, given, incoming(y), retain_graph=True)
    storage = given[0].untyped_storage()
    kept, size = given[0].detach().clone(), storage.nbytes()
    storage.resize_(0)
    plays = gpu.plays
    with pytest.raises(Exception, match=r".+"):
        grads(y, case, given, incoming(y), retain_graph=True)
    assert gpu.plays == plays
    storage.resize_(size)
    with torch.no_grad():
        given[0].data.copy_(kept)
    for g, w in zip(grads(y, case, given, incoming(y)), want, strict=True):
        check_equal(g, w)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_is_changed_in_place_is_torchs_error(gpu, name):
    case = CASES[name]
    for change in (lambda x: x.mul_(2), lambda x: x.resize_(x.numel()), lambda x: x.transpose_(0, 1)):
        given = warmed(case)
        y = forward(case, given)
        change(given[-1].detach())  # which has the version of what was saved
        plays = gpu.plays
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grads(y, case, given, incoming(y))
        assert gpu.plays == plays


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_checkpoints(gpu, name, reentrant):
    case = CASES[name]
    given = warmed(case)
    y = forward(case, given)
    want = grads(y, case, given, incoming(y))
    for _ in range(2):
        y = checkpoint(lambda *x: forward(case, x), *given, use_reentrant=reentrant)
        for x in given[: case[2]]:
            x.grad = None
        y.backward(incoming(y))
        for x, w in zip(given, want, strict=False):
            check_equal(x.grad, w)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_nothing_saved_outlives_the_backward_pass(gpu, name):
    case = CASES[name]
    warmed(case)
    leaves = tensors(case, 1, True)
    given = [x.clone() for x in leaves]  # whose graph does not hold them
    y = forward(case, given)
    inputs = [weakref.ref(x) for x in given]
    grad = incoming(y)
    del given
    gpu.told = 0
    y.backward(grad)
    assert gpu.told == 0 and [x() for x in inputs] == [None] * len(inputs) and leaves[0].grad is not None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(grad)


# --- By itself -----------------------------------------------------------------------------------------------

FACTS = (torch.Size((8,)), (1,), torch.float32)


def made_up(*others):
    nothing = Launches((), (), (), ())
    program = Program(nothing, (), 0, Gradients())
    program.gradients.facts = [(*FACTS, False)]
    gradient = Program(nothing, (((4,), (1,), torch.float32),), 1, Gradients())
    call = Told(((), (), *FACTS, *FACTS, 0), [32, 64], (), False, 0)
    return Forward(program, [64], 0), call, gradient


def test_what_differs_is_not_remembered(gpu):
    before, call, gradient = made_up()
    other = (torch.Size((2, 4)), (4, 1), torch.float32)
    for wrong in (
        call._replace(addresses=[32, 80]),
        call._replace(device=1),
        call._replace(kind=((), (), *FACTS, *other, 0)),
        call._replace(kind=((), (), *FACTS, *FACTS[:2], torch.float64, 0)),
    ):
        remember_gradient(before, wrong, gradient)
        assert before.program.gradients.known == []
    remember_gradient(None, call, gradient)
    remember_gradient(before, call, gradient)
    assert [x for _, x in before.program.gradients.known] == [gradient]


def test_few_are_kept_the_newest_first(gpu):
    before, call, gradient = made_up()
    for n in range(3 * MOST_GRADIENTS):
        remember_gradient(before, call, gradient, n)
        found = before.program.gradients.known
        assert found[0][0][-1] == (n,) and len(found) == min(n + 1, MOST_GRADIENTS)


def test_only_what_was_remembered_is_played(gpu):
    before, call, gradient = made_up()
    x, grad = torch.zeros(8), torch.zeros(8)
    before.addresses[:] = call.addresses[1:] = [x.data_ptr()]
    remember_gradient(before, call, gradient, "a")
    with torch.no_grad():
        assert gradient_of(before, (x,), grad, "a")[0].shape == (4,)
        assert gradient_of(before, (x,), grad, "b") is None
        assert gradient_of(before, (x.clone(),), grad, "a") is None
        assert gradient_of(None, (x,), grad, "a") is None
        for other in (None, grad.double(), grad.view(2, 4), torch.zeros(16)[::2], grad.to_sparse(), 3.0):
            assert gradient_of(before, (x,), other, "a") is None
        with Mode():
            assert gradient_of(before, (x,), grad, "a") is None
    assert gradient_of(before, (x,), grad, "a") is None, "a graph of the gradient"


def test_a_torch_that_does_not_tell_of_hooks_is_told_everything(gpu, monkeypatch):
    monkeypatch.setattr(_bridge_programs, "_hooks", None)
    case = CASES["attention"]
    given = warmed(case)
    check_both(gpu, case, given, incoming(forward(case, given)), told=1)
