"""Calls of a kind that came before: what tells a kind, what is never told, what is noted and played."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _bridge, _bridge_programs, _kernels, _programs  # noqa: E402
from dsv4cp._bridge_programs import run, settle, told  # noqa: E402
from dsv4cp._kernel_notes import Step  # noqa: E402
from dsv4cp._programs import Program, Programs  # noqa: E402
from dsv4cp.sinkhorn import torch_bridge as sinkhorn_bridge  # noqa: E402
from tests.support.compare import check_equal  # noqa: E402
from tests.support.threads import run_at_once  # noqa: E402

NORMAL = {"backend": "tilelang", "repeat": 4, "eps": 2.0**-20}
empty_cpu = torch._C._dynamo.guards._empty_strided_cpu


class Subclass(torch.Tensor):
    """A tensor of another type."""


class Mode(TorchDispatchMode):
    """Looks on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    """Looks on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors of the CPU count as those of a device."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(_bridge_programs, "_device_of", lambda x: 0)


# --- What is told --------------------------------------------------------------------------------------------


def test_a_call_is_told_with_its_addresses(on_gpu):
    x, y = torch.zeros(8), torch.zeros(2, 3)
    call = told((x, y), ("auto", 0.5, 3, None, True, torch.float32))
    assert call.addresses == [x.data_ptr(), y.data_ptr()] and call.gradient is False
    assert all(a is b for a, b in zip(call.tensors, (x, y), strict=True))


def test_tensors_elsewhere_are_not_told():
    x = torch.zeros(8)
    assert told((x,), ()) is None
    assert told((torch.zeros(8, device="meta"),), ()) is None


@pytest.mark.parametrize("grad", [False, True])
def test_whoever_looks_on_is_not_passed_by(on_gpu, grad):
    x = torch.zeros(8, requires_grad=grad)
    for watcher in (
        Mode(), FunctionMode(), torch.device("cpu"), torch.autograd.profiler.profile(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), FakeTensorMode(),
    ):  # fmt: skip
        with watcher:
            assert told((x,), ()) is None, watcher
        assert told((x,), ()) is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_is_not_passed_by(on_gpu):
    seen = []

    def traced(x):
        seen.append(told((x,), ()))
        return x + 1

    torch.jit.trace(traced, torch.zeros(8), check_trace=False)
    assert seen and set(seen) == {None}


def test_transforms_are_not_passed_by(on_gpu):
    seen, x, other = [], torch.zeros(4, 8), torch.zeros(8)
    torch.func.vmap(lambda y: seen.append(told((y,), ())) or seen.append(told((other,), ())) or y)(x)
    torch.func.grad(lambda y: seen.append(told((y,), ())) or seen.append(told((other,), ())) or y.sum())(x)
    assert seen == [None] * 4


def test_gradients_of_an_old_vmap_are_not_told(on_gpu):
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(told((grad,), ()) is None)
            return grad

    x = torch.zeros(8, requires_grad=True)
    torch.autograd.grad(Identity.apply(x), x, torch.ones(4, 8), is_grads_batched=True)
    torch.autograd.grad(Identity.apply(x), x, torch.ones(8))
    assert seen == [True, False]


def left_by_a_transform():
    left = []
    torch.func.grad(lambda y: left.append(y) or y.sum())(torch.ones(8))
    return left[0]


def nested():
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(8).as_subclass(Subclass),
        lambda: FakeTensorMode().from_tensor(torch.zeros(8)),
        lambda: torch._efficientzerotensor(8),
        lambda: torch._to_functional_tensor(torch.zeros(8)),
        lambda: torch.zeros(8, device="meta"),
        lambda: torch.zeros(8).to_sparse(),
        lambda: torch.zeros(0),
        lambda: torch.zeros(2, 0, 3),
        left_by_a_transform,
        nested,
        lambda: torch.zeros(9)[1:],
        lambda: torch._neg_view(torch.zeros(8)),
        lambda: None,
        lambda: np.zeros(8, np.float32),
        lambda: [0.0],
        lambda: 0.0,
    ],
    ids=["subclass", "fake", "efficient zeros", "functional", "meta", "sparse", "empty", "empty axis",
         "left by a transform", "nested", "off 16 bytes", "negated", "None", "array", "list", "float"],
)  # fmt: skip
def test_other_tensors_are_not_told(on_gpu, make):
    x = make()
    assert told((x,), ()) is None and told((torch.zeros(8), x), ()) is None


@pytest.mark.parametrize(
    "other",
    [
        np.float32(1), np.float64(1), np.int64(1), np.bool_(True), [1], (1,), torch.ones(()), Fraction(1), 1 + 0j,
        type("Int", (int,), {})(1), type("Str", (str,), {})("auto"),
    ],
    ids=lambda other: type(other).__name__,
)  # fmt: skip
def test_other_types_are_not_told(on_gpu, other):
    x = torch.zeros(8)
    assert told((x,), (1, other)) is None
    assert told((x,), (1, 1)) is not None


def test_the_compiler_sees_the_operator(on_gpu, monkeypatch):
    """told is not reached: what it looks at is no part of a graph."""
    monkeypatch.setattr(_bridge, "missing", lambda backend: None)
    monkeypatch.setattr("dsv4cp._torch_backend._unfit", lambda tensors, require_bf16: None)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.rand(3, 4, 4)
    torch._dynamo.reset()
    for program in sinkhorn_bridge._PROGRAMS, sinkhorn_bridge._GRADIENTS:
        monkeypatch.setattr(program, "_known", Refusing())
    monkeypatch.setattr(sinkhorn_bridge, "_notes", Refusing().get)
    compiled = torch.compile(lambda x: sinkhorn_bridge.dsv4_sinkhorn_normalize(x, **NORMAL), fullgraph=True,
                             backend=backend)  # fmt: skip
    want = sinkhorn_bridge.NORMALIZE(x, NORMAL["repeat"], NORMAL["eps"])
    for _ in range(3):
        check_equal(compiled(x), want)
    torch._dynamo.reset()
    assert any("sinkhorn_normalize" in name for name in targets)


class Refusing(dict):
    """Memory that nobody may look into."""

    def get(self, *_):
        raise AssertionError("looked into")


# --- Kinds ---------------------------------------------------------------------------------------------------

OTHERS = ("auto", 0.5, 3, None, True)


def kind(*tensors, others=OTHERS):
    return told(tensors, others).kind


def test_equal_calls_are_of_one_kind(on_gpu):
    x, y = torch.zeros(2, 8), torch.ones(4)
    want = kind(x, y)
    assert hash(kind(x.clone(), y + 1)) == hash(want)
    for like in ((x.clone(), y), (torch.nn.Parameter(x), y), (x, y.clone().requires_grad_()), (y.new_ones(2, 8), y)):
        assert kind(*like) == want
    with torch.no_grad():
        assert kind(torch.nn.Parameter(x), y) == want
    assert kind(x, y, others=("au" + "to", 1 / 2, 3, None, True)) == want


def test_other_metadata_is_another_kind(on_gpu, monkeypatch):
    x, y = torch.zeros(2, 8), torch.zeros(8)
    kinds = [
        kind(x, y), kind(y, x), kind(torch.zeros(4, 8), y), kind(torch.zeros(2, 1, 8), y), kind(torch.zeros(8, 2).T, y),
        kind(x.bfloat16(), y), kind(x.half(), y), kind(x, y.double()), kind(x, x), kind(x, torch.zeros(16)[::2]),
        kind(x), kind(x, y, y),
    ]  # fmt: skip
    for device in (1, 2):
        monkeypatch.setattr(_bridge_programs, "_device_of", lambda x, device=device: device)
        kinds.append(kind(x, y))
    assert len(set(kinds)) == len(kinds)
    assert told((x, y), (), 2).device == 2 and told((x, y), ()).kind == told((x, y), (), 2).kind
    assert told((x, y), (), 1) is None, "tensors that are not where they have to be"
    monkeypatch.setattr(_bridge_programs, "_device_of", lambda z: int(z is y))
    assert told((x, y), ()) is None and told((y, x), ()) is None, "tensors of two devices"


def test_a_call_without_tensors_is_told_by_its_device(on_gpu):
    call, other = told((), ("", 3), 0), told((), ("", 3), 1)
    assert (call.device, call.addresses, call.tensors, call.gradient) == (0, [], (), False)
    assert call.kind != other.kind and call.kind == told((), ("", 3), 0).kind


def test_other_values_are_other_kinds(on_gpu):
    x = torch.zeros(8)
    values = [0, 1, 2, True, False, 1.0, 0.5, 2.0, "1", "", "auto", None, torch.float32, torch.device("cpu"), 2**70]
    kinds = [kind(x, others=(value,)) for value in values]
    kinds += [kind(x, others=()), kind(x, others=(1, 1)), kind(x, others=(None, 1)), kind(x, others=(1, None))]
    assert len(set(kinds)) == len(kinds)


def test_whether_a_gradient_is_wanted(on_gpu):
    x, leaf = torch.zeros(8), torch.zeros(8, requires_grad=True)
    for tensors, wanted in (((x,), False), ((leaf,), True), ((x, leaf), True), ((x, torch.nn.Parameter(x)), True)):
        assert told(tensors, ()).gradient is wanted
        with torch.no_grad():
            assert told(tensors, ()).gradient is False
        with torch.inference_mode():
            assert told(tensors, ()).gradient is False
            with torch.enable_grad():
                assert told(tensors, ()).gradient is False, "autograd sees nothing there"
        with torch._C._AutoDispatchBelowAutograd():
            assert told(tensors, ()).gradient is False


def test_inference_tensors_that_require_a_gradient_are_not_told_where_one_is_wanted(on_gpu):
    with torch.inference_mode():
        x, leaf = torch.zeros(8), torch.zeros(8, requires_grad=True)
        assert told((x, leaf), ()).gradient is False
    assert told((x,), ()) is not None and told((leaf,), ()) is None
    with torch.no_grad():
        assert told((x, leaf), ()).gradient is False


def test_a_profiler_of_all_threads_is_seen_in_every_one(on_gpu):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities, found = [torch.profiler.ProfilerActivity.CPU], []
    with torch.profiler.profile(activities=activities, experimental_config=config):
        run_at_once([lambda: found.append(told((torch.zeros(8),), ()))])
    assert found == [None] and told((torch.zeros(8),), ()) is not None


# --- Programs ------------------------------------------------------------------------------------------------


@pytest.fixture
def played(on_gpu, monkeypatch):
    """What was played: steps, addresses, stream."""
    plays = []
    monkeypatch.setattr(_bridge_programs, "_empty_cuda", empty_cpu)
    monkeypatch.setattr(_bridge, "on_stream_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(_bridge, "is_current", lambda device: True)
    monkeypatch.setattr(_bridge, "stream_pointer", lambda device: 77)
    monkeypatch.setattr(_kernels, "play", lambda *args: plays.append(args))
    return plays


class Notes:
    """A note that counts."""

    def __init__(self, *results):
        self.results, self.asked = list(results), 0

    def __call__(self, making):
        self.asked += 1
        result = self.results.pop(0) if self.results else 1
        if isinstance(result, Exception):
            raise result
        making.make((2,), "float32")
        return result


def call_of(n=8, *others):
    return told((torch.zeros(n),), others)


def test_a_program_is_noted_of_the_second_call(played):
    programs, note = Programs(), Notes()
    for asked in (0, 1, 1, 1):
        assert (programs.find(call_of().kind) is None) == (asked == 0 or note.asked == 0)
        settle(programs, call_of(), note)
        assert note.asked == asked
    program = programs.find(call_of().kind)
    assert type(program) is Program and programs.find(call_of().kind) is program
    assert programs.find(call_of(12).kind) is None and programs.find(call_of(8, 1).kind) is None
    assert Programs().find(call_of().kind) is None


def test_what_is_not_told_is_not_noted(played):
    programs, note = Programs(), Notes()
    for _ in range(3):
        settle(programs, None, note)
    assert note.asked == 0 and programs._known == {}


def test_the_note_gets_the_tensors_of_its_call(played):
    programs, given = Programs(), []
    x, y = torch.zeros(8), torch.zeros(4, 3, dtype=torch.bfloat16).T
    for _ in range(2):
        call = told((x, y, x), ())
        settle(programs, call, lambda making: given.extend(making.given) or 0)
    assert [laid.address for laid in given] == [z.data_ptr() for z in (x, y, x)]
    assert [(laid.address.array, laid.address.offset) for laid in given] == [(0, 0), (1, 0), (2, 0)]
    of_x, of_y = ((8,), (1,), "float32"), ((3, 4), (1, 3), "bfloat16")
    assert [laid[1:] for laid in given] == [of_x, of_y, of_x]


def test_notes_are_taken_on_the_tensors_device(played, monkeypatch):
    entered = []

    @contextlib.contextmanager
    def on_stream_of(x):
        entered.append(x)
        yield
        entered.append("left")

    monkeypatch.setattr(_bridge, "on_stream_of", on_stream_of)
    programs, call = Programs(), call_of()
    for _ in range(2):
        settle(programs, call, lambda making: entered.append("noted") or 0)
    assert entered == [call.device, "noted", "left"]


def test_tensors_that_changed_since_they_were_told_are_not_noted(played):
    """Hooks for saved tensors run in between, and are given the caller's own tensors."""
    programs, note = Programs(), Notes(0)
    for _ in range(3):
        x = torch.zeros(4, 6).T
        call = told((x,), ())
        x.data = x.data.contiguous()
        settle(programs, call, note)
    assert programs.find(call.kind) is None and programs.find(told((x,), ()).kind) is None and note.asked == 0
    gone = torch.zeros(6)
    for _ in range(3):
        call = told((gone,), ())
        gone.data = torch.zeros(0)
        settle(programs, call, note)
        gone = torch.zeros(6)
    assert programs.find(call.kind) is None and note.asked == 0


def test_a_kind_that_needs_more_is_not_asked_again(played):
    programs, note = Programs(), Notes(None)
    for _ in range(5):
        settle(programs, call_of(), note)
        assert programs.find(call_of().kind) is None
    assert note.asked == 1


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_whose_sign_is_not_told_have_no_program(played, zero):
    programs, note = Programs(), Notes()
    for _ in range(4):
        for call in (call_of(8, zero), call_of(8, 1, zero)):
            settle(programs, call, note)
            assert programs.find(call.kind) is None
    assert note.asked == 0
    for other in (0, False, 1e-300):
        for _ in range(2):
            settle(programs, call_of(8, other), note)
        assert programs.find(call_of(8, other).kind) is not None


def test_a_bounded_number_is_kept(played, monkeypatch):
    monkeypatch.setattr(_programs, "MOST_KEPT", 8)
    programs, note = Programs(), Notes()
    for n in range(8):
        for _ in range(2):
            settle(programs, call_of(8, n), note)
    assert all(programs.find(call_of(8, n).kind) for n in range(8))
    for n in range(8, 40):
        settle(programs, call_of(8, n), note)
        assert len(programs._known) <= 8
    assert programs.find(call_of(8, 0).kind) is None
    for _ in range(2):
        settle(programs, call_of(8, 0), note)
    assert programs.find(call_of(8, 0).kind) is not None


def test_an_error_of_a_note_is_a_warning_and_calls_go_on(played):
    programs, note = Programs(), Notes(RuntimeError("compile"))
    settle(programs, call_of(), note)
    with pytest.warns(RuntimeWarning, match="could not be noted.*compile"):
        settle(programs, call_of(), note)
    for _ in range(2):
        settle(programs, call_of(), note)
        assert programs.find(call_of().kind) is None and note.asked == 1


def test_threads_settle_and_find_their_own(played, monkeypatch):
    monkeypatch.setattr(_programs, "MOST_KEPT", 16)
    programs = Programs()

    def note(making, n):
        making.make((n,), "float32")
        return 1

    def calls(thread):
        for n in range(100):
            size = 1 + (n + thread) % 12 if n % 3 else 1000 * (thread + 1) + n
            x = told((torch.zeros(size),), ())
            if (program := programs.find(x.kind)) is not None:
                assert run(program, x)[0].shape == (size,)
            else:
                settle(programs, x, lambda making, size=size: note(making, size))

    run_at_once([lambda n=n: calls(n) for n in range(8)])
    assert played and len(programs._known) <= 16 + 8


# --- A run ---------------------------------------------------------------------------------------------------


def program_of(call, makes, results):
    """Of the second call of its kind, whose note makes these and zeroes a byte."""

    def note(making):
        addresses = [making.make(sizes, str(dtype).removeprefix("torch.")) for sizes, dtype in makes]
        assert [x.array for x in addresses] == list(range(len(call.addresses), making.arrays))
        making.steps.append(Step(None, moves=((0, 0, 0),), size=1))
        return results

    programs = Programs()
    for _ in range(2):
        settle(programs, call, note)
    return programs.find(call.kind)


def test_a_run_makes_results_and_hands_on_addresses(played):
    call = told((torch.zeros(8), torch.zeros(4)), ())
    makes = [((2, 3), torch.bfloat16), (torch.Size((5,)), torch.float32), ((3, 0, 2), torch.int32), ((), torch.half)]
    program = program_of(call, [*makes, ((64,), torch.uint8)], 4)
    results = run(program, call)
    assert [(x.shape, x.dtype) for x in results] == [(torch.Size(sizes), dtype) for sizes, dtype in makes]
    assert all(x.is_contiguous() and not x.requires_grad for x in results)
    ((noted, addresses, stream, device),) = played
    assert noted.steps[0][-1] == 1 and len(noted.steps) == 1 and (stream, device) == (77, 0)
    assert addresses[:6] == [*call.addresses, *(x.data_ptr() for x in results)]
    assert len(addresses) == 7 and addresses[6] not in addresses[:6]
    assert call.addresses == addresses[:2], "the call's own list stays as it is"
    again = run(program, call)
    assert all(a is not b for a, b in zip(results, again, strict=True))
    assert {x.data_ptr() for x in results[:2]}.isdisjoint(x.data_ptr() for x in again[:2])


def test_working_memory_is_held_until_all_is_queued(played, monkeypatch):
    made, alive = [], []

    def empty(*args):
        x = empty_cpu(*args)
        made.append(x.untyped_storage()._weak_ref())
        return x

    def play(*args):
        alive.append([torch.UntypedStorage._expired(ref) for ref in made])

    monkeypatch.setattr(_bridge_programs, "_empty_cuda", empty)
    monkeypatch.setattr(_kernels, "play", play)
    call = call_of()
    results = run(program_of(call, [((2,), torch.float32), ((64,), torch.uint8)], 1), call)
    assert alive == [[False, False]] and len(results) == 1
    assert [torch.UntypedStorage._expired(ref) for ref in made] == [False, True]
    for ref in made:
        torch.UntypedStorage._free_weak_ref(ref)


def test_results_of_inference_are_inference_tensors(played):
    call = call_of()
    program = program_of(call, [((2,), torch.float32)], 1)
    with torch.inference_mode():
        assert run(program, call)[0].is_inference()
    assert not run(program, call)[0].is_inference()


def test_another_current_device_is_changed_and_put_back(played, monkeypatch):
    state = {"device": 1, "entered": 0}

    @contextlib.contextmanager
    def on_stream_of(x):
        before, state["device"] = state["device"], x
        state["entered"] += 1
        yield
        state["device"] = before

    def empty(*args):
        assert state["device"] == 0, "memory is made on the tensors' device"
        return empty_cpu(*args)

    monkeypatch.setattr(_bridge, "on_stream_of", on_stream_of)
    monkeypatch.setattr(_bridge, "is_current", lambda device: device == state["device"])
    monkeypatch.setattr(_bridge, "stream_pointer", lambda device: 100 + device)
    monkeypatch.setattr(_bridge_programs, "_empty_cuda", empty)
    call = call_of()
    program = program_of(call, [((2,), torch.float32)], 1)
    assert state["entered"] == 1 and state["device"] == 1, "it was noted there"
    state["entered"] = 0
    assert len(run(program, call)) == 1
    assert state == {"device": 1, "entered": 1} and [play[2] for play in played] == [100]
    state["device"] = 0
    run(program, call)
    assert state["entered"] == 1 and len(played) == 2


def test_errors_of_a_run_come_out(played, monkeypatch):
    def play(*_):
        raise RuntimeError("scale: launch failed")

    call = call_of()
    program = program_of(call, [((2,), torch.float32)], 1)
    monkeypatch.setattr(_kernels, "play", play)
    with pytest.raises(RuntimeError, match="scale: launch failed"):
        run(program, call)
    monkeypatch.setattr(_kernels, "play", lambda *_: None)
    assert len(run(program, call)) == 1


SIZES = [(), (3,), (2, 3, 4), (1, 1, 5), (0,), (2, 0, 4), (0, 3, 0), (4, 1, 0)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_strides_are_those_of_torch(sizes):
    assert _bridge_programs._steps_of(sizes) == torch.empty(sizes).stride()


def test_torch_has_the_call_that_makes_results():
    x = empty_cpu((2, 3), (3, 1), torch.bfloat16)
    assert (x.shape, x.stride(), x.dtype) == ((2, 3), (3, 1), torch.bfloat16)
    assert _bridge_programs._empty_cuda is torch._C._dynamo.guards._empty_strided_cuda


def test_a_torch_without_that_call_makes_them_by_its_public_one():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = _bridge_programs._torch_empty((2, 0, 3), (3, 3, 1), torch.bfloat16)
    assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 0, 3), (3, 3, 1), torch.bfloat16, "cuda")
