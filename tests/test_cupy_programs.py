"""Calls on CuPy arrays that come again: what tells a kind, what is never told, and that playing queues what launch code
does, on a GPU whose memory is the CPU's."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")
torch = pytest.importorskip("torch")

import dsv4cp  # noqa: E402
from dsv4cp import SparseIndexPlan, _cupy_programs, _programs  # noqa: E402
from dsv4cp._cupy_programs import Repeated, run, told  # noqa: E402
from dsv4cp._kernel_notes import Step, launches  # noqa: E402
from dsv4cp._programs import Gradients, Laid, Program  # noqa: E402
from dsv4cp.indexer import cuda_grad_kernels, cuda_scores  # noqa: E402
from dsv4cp.indexer import ops as indexer_ops  # noqa: E402
from dsv4cp.sparse_attention import contract, cuda, cuda_bwd, reference  # noqa: E402
from dsv4cp.sparse_attention import ops as attention_ops  # noqa: E402
from tests.support.compare import check_equal  # noqa: E402
from tests.support.packed import all_values  # noqa: E402
from tests.support.stand_in_cupy import REPEATED, Device, cupy_of, empty, installed, torch_of  # noqa: E402
from tests.support.threads import run_at_once  # noqa: E402

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Subclass(cupy.ndarray):
    """An array of another type."""


@pytest.fixture(params=["portable", "hopper"])
def gpu(request, monkeypatch):
    yield from installed(monkeypatch, request.param == "hopper")


@pytest.fixture
def one_gpu(monkeypatch):
    yield from installed(monkeypatch, True)


# --- What is told --------------------------------------------------------------------------------------------


def test_a_call_is_told_with_its_addresses():
    x, y = empty((8,)), empty((2, 3), "bfloat16")
    call = told((x, y), ("auto", 0.5, 3, None, True))
    assert call.addresses == [x.data.ptr, y.data.ptr]
    assert all(a is b for a, b in zip(call.arrays, (x, y), strict=True))


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(8, np.float32), torch.zeros(8), np.float32(0), None, 0.0, [0.0], SimpleNamespace(data=None),
        empty((8,)).view(Subclass), empty((8,), off=4), empty((8,), off=8), empty((9,))[1:],
        cupy.ndarray((0,), np.float32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)),
    ],
    ids=["NumPy", "torch", "scalar", "None", "float", "list", "other", "subclass", "off 4", "off 8", "view", "empty"],
)  # fmt: skip
def test_other_arrays_are_not_told(x):
    y = empty((8,))
    assert told((x,), ()) is None and told((x, y), ()) is None and told((y, x), ()) is None
    assert told((y, y), ()) is not None


@pytest.mark.parametrize(
    "other",
    [
        np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.zeros(()), [1], (1,), {}, Fraction(1), 1 + 0j,
        type("Int", (int,), {})(1), type("Str", (str,), {})("auto"), np.dtype("float32"), empty(()), torch.float32,
    ],
    ids=lambda other: type(other).__name__,
)  # fmt: skip
def test_other_options_are_not_told(other):
    x = empty((8,))
    for _ in range(2):
        assert told((x,), (1, other)) is None and told((x,), (other,)) is None
        assert told((x,), (1, 1)) is not None


def test_a_forced_path_is_asked_for_of_cupy_arrays_alone():
    asked, x = [], empty((8,))
    path = SimpleNamespace(forced_path=None)

    def launches():
        asked.append(1)
        return path

    assert told((np.zeros(8),), (1,), launches) is None and told((torch.zeros(8),), (1,), launches) is None
    assert asked == []
    kinds = [told((x,), (1,), launches).kind, told((x,), (1,)).kind]
    path.forced_path = "portable"
    kinds.append(told((x,), (1,), launches).kind)
    assert len(asked) == 2 and len(set(kinds)) == 3


@pytest.mark.parametrize("module", [None, ModuleType("cupy")], ids=["no CuPy", "half imported"])
def test_before_cupy_is_imported_nothing_is_told(monkeypatch, module):
    if module is None:
        monkeypatch.delitem(sys.modules, "cupy")
    else:
        monkeypatch.setitem(sys.modules, "cupy", module)  # as another thread sees it meanwhile
    assert told((np.zeros(8),), (1,), lambda: pytest.fail("imported")) is None


def test_callers_with_numpy_arrays_import_nothing():
    code = """
import sys, numpy as np, dsv4cp
f, at = np.float32, {"compress_ratio": 2, "softmax_scale": 0.5}
q, kv, sinks, ids = np.ones((1, 2, 3, 4), f), np.ones((1, 5, 4), f), np.ones(3, f), np.zeros((1, 2, 3), np.int32)
w = np.ones((1, 2, 3), f)
for _ in range(3):
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.5, return_lse=True)
    dsv4cp.dsv4_sparse_attention_grad(out, q, kv, sinks, ids, out, lse, 0.5)
    s = dsv4cp.dsv4_indexer_scores(q, kv, w, **at)
    dsv4cp.dsv4_indexer_scores_grad(s, q, kv, w, **at)
    s = dsv4cp.dsv4_indexer_topk_scores(q, kv, w, ids, **at)
    dsv4cp.dsv4_indexer_topk_scores_grad(s, q, kv, w, ids, **at)
    dsv4cp.dsv4_sinkhorn_normalize(np.ones((2, 4, 4), f), repeat=3, eps=1e-6)
print([m for m in sys.modules if m in ("cupy", "torch", "ml_dtypes") or m.startswith("dsv4cp.") and ".cuda" in m])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["[]"]


# --- Kinds ---------------------------------------------------------------------------------------------------

OTHERS = ("auto", 0.5, 3, None, True)


def kind(*arrays, others=OTHERS):
    return told(arrays, others).kind


def test_equal_calls_are_of_one_kind():
    x, y = empty((2, 8)), empty((4,), "bfloat16")
    want = kind(x, y)
    assert hash(kind(empty((2, 8)), empty((4,), "bfloat16"))) == hash(want)
    assert kind(empty((2, 8)), y) == kind(x, empty((4,), "bfloat16")) == want
    assert kind(x, y, others=("au" + "to", 1 / 2, 3, None, True)) == want


def test_other_metadata_is_another_kind():
    x, y = empty((2, 8)), empty((8,))
    kinds = [
        kind(x, y), kind(y, x), kind(empty((4, 8)), y), kind(empty((2, 1, 8)), y), kind(empty((8, 2)).T, y), kind(x, x),
        kind(x[:, ::-1][:, 3:], y), kind(empty((2, 8), "bfloat16"), y), kind(empty((2, 8), "float16"), y), kind(x),
        kind(x, empty((8,), "float64")), kind(x, empty((16,))[::2]), kind(x, y, y), kind(x, empty((8,), "int32")),
        kind(x, empty((8,), "uint32")), kind(empty((2, 8), device=1), y), kind(x, empty((8,), device=1)),
        kind(empty((2, 8), device=1), empty((8,), device=1)), kind(empty((2, 8), strides=(16, 1)), y),
        kind(empty((2, 8), strides=(0, 1)), y),
    ]  # fmt: skip
    assert len(set(kinds)) == len(kinds)


def test_other_options_are_other_kinds():
    x = empty((8,))
    values = [0, 1, 2, True, False, 1.0, 0.5, 2.0, "1", "", "auto", None, 2**70, math.inf]
    kinds = [kind(x, others=(value,)) for value in values]
    kinds += [kind(x, others=()), kind(x, others=(1, 1)), kind(x, others=(None, 1)), kind(x, others=(1, None))]
    assert len(set(kinds)) == len(kinds)


# --- Programs ------------------------------------------------------------------------------------------------


@pytest.fixture
def noted(one_gpu, monkeypatch):
    """An operation of its own; whenever it takes note, `noted.notes` gets arguments and Making."""
    repeated = Repeated("dsv4cp.sinkhorn")
    repeated.notes, repeated.results = [], 1

    def note(*arguments):
        repeated.notes.append(arguments)
        arguments[-1].make((2, 3), "bfloat16")
        arguments[-1].make((64,), "uint8")
        arguments[-1].zero(arguments[-1].given[0].address, 1)
        return repeated.results

    monkeypatch.setattr(_cupy_programs, "_module", lambda name: SimpleNamespace(note=note))
    return repeated


def call_once(repeated, x, *others):
    call, results = repeated.play((x,), others)
    if results is None:
        repeated.settle(call, "note", "given")
    return results


def test_the_second_call_is_noted_the_third_is_played(noted):
    for n in range(5):
        results = call_once(noted, empty((8,)), 1)
        assert len(noted.notes) == (n > 0) and (results is None) == (n < 2)
    assert call_once(noted, empty((9,)), 1) is None and call_once(noted, empty((8,)), 2) is None
    assert call_once(noted, np.zeros(8), 1) is None and len(noted.programs._known) == 3 and len(noted.notes) == 1


def test_the_note_gets_how_the_arrays_lie(noted):
    for _ in range(2):
        arrays = empty((3, 4), "bfloat16").T, empty((8,), "int64")
        call, _ = noted.play(arrays, ())
        noted.settle(call, "note", "given")
    ((given, making),) = noted.notes
    assert given == "given" and [x.address for x in making.given] == [x.data.ptr for x in arrays]
    assert [(x.address.array, x.address.offset) for x in making.given] == [(0, 0), (1, 0)]
    assert [x[1:] for x in making.given] == [((4, 3), (1, 4), "bfloat16"), ((8,), (1,), "int64")]


def test_notes_are_taken_on_the_arrays_device(noted, monkeypatch):
    entered = []
    monkeypatch.setattr(Device, "__enter__", lambda self: entered.append((self.id, len(noted.notes))))
    monkeypatch.setattr(Device, "__exit__", lambda self, *_: entered.append((self.id, len(noted.notes))))
    for _ in range(2):
        call_once(noted, empty((8,), device=3))
    assert entered == [(3, 0), (3, 1)]


def test_what_needs_more_than_launches_is_not_asked_again(noted):
    noted.results = None
    assert [call_once(noted, empty((8,))) for _ in range(5)] == [None] * 5
    assert len(noted.notes) == 1


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_whose_sign_is_not_told_have_no_program(noted, zero):
    for _ in range(4):
        assert call_once(noted, empty((8,)), zero) is call_once(noted, empty((8,)), 1, zero) is None
    assert noted.notes == []
    for other in (0, False, 1e-300):
        assert [call_once(noted, empty((8,)), other) is None for _ in range(3)] == [True, True, False]


def test_a_bounded_number_is_kept(noted, monkeypatch):
    monkeypatch.setattr(_programs, "MOST_KEPT", 8)
    for n in range(40):
        for _ in range(2):
            call_once(noted, empty((8,)), n)
        assert len(noted.programs._known) <= 8


def test_rows_without_gaps_are_told_by_strides():
    for shape, strides, row_major in (
        ((), (), True), ((3,), (1,), True), ((3,), (2,), False), ((2, 3), (3, 1), True), ((2, 3), (1, 2), False),
        ((1, 3), (99, 1), True), ((3, 1), (1, 99), True), ((2, 1, 3), (3, 7, 1), True), ((3,), (-1,), False),
        ((2, 3), (0, 1), False), ((2, 3), (4, 1), False), ((0,), (1,), True),
    ):  # fmt: skip
        assert Laid(16, shape, strides, "float32").row_major is row_major, (shape, strides)


# --- A run ---------------------------------------------------------------------------------------------------

ZERO = launches([Step(None, moves=((0, 0, 0),), size=1)], 1)


def program_of(makes, results):
    return Program(ZERO, tuple(map(_cupy_programs._made, makes)), results, Gradients())


@pytest.fixture
def plays(one_gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(_cupy_programs, "_kernels", SimpleNamespace(play=lambda *args: seen.append(args)))
    return seen


def test_a_run_makes_results_and_hands_on_addresses(plays):
    call = told((empty((8,)), empty((4,), "int64")), ())
    makes = [((2, 3), "bfloat16"), ((5,), "float32"), ((), "int32"), ((2, 0, 3), "float16")]
    program = program_of([*makes, ((64,), "uint8")], 4)
    results = run(program, call)
    assert [(x.shape, x.dtype.name) for x in results] == makes
    assert all(type(x) is cupy.ndarray and x.flags.c_contiguous for x in results)
    ((noted, addresses, stream, device),) = plays
    assert noted is ZERO and (stream, device) == (77, 0) and len(addresses) == 7
    assert addresses[:6] == [*call.addresses, *(x.data.ptr for x in results)] and addresses[6] not in addresses[:6]
    assert call.addresses == addresses[:2], "the call's own list stays as it is"
    assert {x.data.ptr for x in results[:3]}.isdisjoint(x.data.ptr for x in run(program, call))


def test_working_memory_is_held_until_all_is_queued_and_not_handed_out(one_gpu, monkeypatch):
    alive, made = [], one_gpu.blocks.made
    play = SimpleNamespace(play=lambda *args: alive.extend(block() is not None for *_, block in made))
    monkeypatch.setattr(_cupy_programs, "_kernels", play)
    results = run(program_of([((2,), "float32"), ((64,), "uint8")], 1), told((empty((8,)),), ()))
    assert alive == [True, True] and len(results) == 1
    assert [block() is None for *_, block in made] == [False, True]


def test_another_current_device_is_changed_and_put_back(plays, monkeypatch):
    state = [0]

    class Switching(Device):
        def __enter__(self):
            self.before, state[0] = state[0], self.id

        def __exit__(self, *_):
            state[0] = self.before

    def alloc(size, real=cupy.cuda.alloc):
        assert state == [1], "memory is made on the arrays' device"
        return real(size)

    monkeypatch.setattr(cupy.cuda, "Device", Switching)
    monkeypatch.setattr(cupy.cuda, "alloc", alloc)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: state[0])
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=100 + state[0]))
    call, program = told((empty((8,), device=1),), ()), program_of([((2,), "float32")], 1)
    assert len(run(program, call)) == 1 and state == [0] and plays[0][2] == 101
    state[0] = 1
    assert len(run(program, call)) == 1 and state == [1] and len(plays) == 2


def test_errors_of_a_run_come_out(one_gpu, monkeypatch):
    def play(*_):
        raise RuntimeError("scale: launch failed")

    monkeypatch.setattr(_cupy_programs, "_kernels", SimpleNamespace(play=play))
    with pytest.raises(RuntimeError, match="scale: launch failed"):
        run(program_of([((2,), "float32")], 1), told((empty((8,)),), ()))


# --- The slices ----------------------------------------------------------------------------------------------

AT = {"compress_ratio": 4, "softmax_scale": 0.125}


def random(seed, *shapes):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(*sizes, generator=g) for sizes in shapes]


def at_random(seed, keys, *sizes):
    return torch.randint(-1, keys, sizes, generator=torch.Generator().manual_seed(seed))


def attention(heads=40, dim=512, dtype=BF16, sinks=F32, ids=torch.int32, plan=False, backend="cuda", keys=9, **options):
    def make(seed):
        q, kv, s = random(seed, (1, 3, heads, dim), (1, keys, dim), (heads,))
        return [q.to(dtype), kv.to(dtype), s.to(sinks), at_random(seed, 9, 1, 3, 5).to(ids)]

    def call(q, kv, sinks, ids):
        named = {"plan": SparseIndexPlan("cuda", ids, None, None, 9)} if plan else {}
        ids = None if plan else ids
        return dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.125, backend=backend, **named, **options)

    lse = [((1, 3, heads), "float32")] if options.get("return_lse") else []
    return make, call, [((1, 3, heads, dim), name_of(dtype)), *lse], attention_ops._FORWARD


def attention_grad(heads=40, dim=512, dtype=BF16, ids=torch.int32, plan=False, keys=9, **options):
    make_inputs = attention(heads, dim, dtype, ids=ids, keys=keys)[0]

    def make(seed):
        inputs = make_inputs(seed)
        spec = contract.check(*inputs, 0.125)
        (grad_out,) = random(seed + 1, inputs[0].shape)
        return [grad_out.to(dtype), *inputs, *reference.forward(*inputs, spec)]

    def call(g, q, kv, sinks, ids, out, lse):
        named = {"plan": SparseIndexPlan("cuda", ids, None, None, 9)} if plan else {}
        more = {"backend": "cuda", **named, **options}
        return dsv4cp.dsv4_sparse_attention_grad(g, q, kv, sinks, None if plan else ids, out, lse, 0.125, **more)

    shapes = (1, 3, heads, dim), (1, keys, dim)
    return make, call, [*((x, name_of(dtype)) for x in shapes), ((heads,), "float32")], attention_ops._BACKWARD


def indexed(grad=False, slots=False, heads=8, dim=128, dtype=BF16, weights=F32, ids=torch.int64, **options):
    def make(seed):
        q, k, w, g = random(seed, (2, 9, heads, dim), (2, 6, dim), (2, 9, heads), (2, 9, 5 if slots else 6))
        chosen = [at_random(seed, 6, 2, 9, 5).to(ids)] if slots else []
        return [*([g] if grad else []), q.to(dtype), k.to(dtype), w.to(weights), *chosen]

    name = f"dsv4_indexer_{'topk_' * slots}scores{'_grad' * grad}"
    held = f"_{'TOPK_' * slots}SCORES{'_GRAD' * grad}"

    def call(*arrays):
        return getattr(dsv4cp, name)(*arrays, **{"backend": "cuda", **AT, **options})

    result = [((2, 9, 5 if slots else 6), "float32")]
    grads = [((2, 9, heads, dim), name_of(dtype)), ((2, 6, dim), name_of(dtype)), ((2, 9, heads), name_of(weights))]
    return make, call, grads if grad else result, getattr(indexer_ops, held)


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


FIXED = {"backward_impl": "deterministic"}
CASES = {
    "attention": attention(),
    "attention, few heads": attention(heads=4, dtype=F16),
    "attention, D 64": attention(heads=3, dim=64),
    "attention, int64 ids": attention(ids=torch.int64),
    "attention, a plan": attention(plan=True),
    "attention, lse": attention(return_lse=True),
    "attention, auto": attention(heads=4, backend="auto", all_rows_nonempty=True),
    "attention, rounding": attention(heads=4, reference_rounding=True),
    "attention gradient": attention_grad(),
    "attention gradient, few heads": attention_grad(heads=4, dtype=F16, all_rows_nonempty=True),
    "attention gradient, D 64": attention_grad(heads=3, dim=64, backend="auto"),
    "attention gradient, int64 ids": attention_grad(ids=torch.int64),
    "attention gradient, a plan": attention_grad(plan=True),
    "attention gradient, fixed order": attention_grad(heads=4, **FIXED),
    "attention gradient, a cap": attention_grad(heads=64, backward_workspace_bytes=2**20, **FIXED),
    "scores": indexed(),
    "scores, later queries": indexed(dim=64, weights=BF16, query_start=5, query_total_len=20),
    "scores, auto": indexed(heads=64, dtype=F16, weights=F16, backend="auto"),
    "scores gradient": indexed(True),
    "scores gradient, later queries": indexed(True, dim=64, weights=BF16, query_start=5),
    "scores at ids": indexed(slots=True),
    "scores at int32 ids": indexed(slots=True, weights=BF16, ids=torch.int32, backend="auto"),
    "gradient at ids": indexed(True, True),
    "gradient at int32 ids": indexed(True, True, heads=64, weights=F16, dtype=F16, ids=torch.int32),
    "gradient at ids, fixed order": indexed(True, True, **FIXED),
}
SOME = "attention, lse", "attention gradient", "scores", "scores gradient", "scores at ids", "gradient at ids"


def arrays_of(case, seed=0):
    return [cupy_of(x) for x in case[0](seed)]


def results(case, arrays):
    y = case[1](*arrays)
    return list(y) if isinstance(y, tuple) else [y]


def queued(gpu, case, arrays):
    """A call's results, and what it queues: kernels, their numbers, where their addresses lie; zeros."""
    gpu.queued, gpu.pointers, gpu.cleared, gpu.blocks.made[:] = [], [], [], []
    got = results(case, arrays)
    places = [[(gpu.blocks.place(at, arrays), rest) for at, rest in pointers] for pointers in gpu.pointers]
    return got, (gpu.queued[:], places, gpu.cleared[:])


def check_all(got, want):
    for g, w in zip(got, want, strict=True):
        check_equal(torch_of(g), torch_of(w))


@pytest.mark.parametrize("name", CASES)
def test_the_third_call_is_played_and_queues_what_launch_code_does(gpu, name):
    case = CASES[name]
    arrays, known = arrays_of(case), case[3].programs._known
    _, first = queued(gpu, case, arrays)
    assert first[0] and {stream for *_, stream, _ in first[0]} == {77} and list(known.values()) == [None]
    _, second = queued(gpu, case, arrays)
    assert second == first and [type(x) for x in known.values()] == [Program] and gpu.plays == 0
    for seed in (0, 1, 2):
        arrays = arrays_of(case, seed)
        before = gpu.plays
        got, third = queued(gpu, case, arrays)
        assert gpu.plays == before + 1 and third == first
        case[3].programs._known, kept = {}, known
        want, _ = queued(gpu, case, arrays)
        case[3].programs._known = kept
        check_all(got, want)
        assert gpu.plays == before + 1
    assert all(not x.programs._known for x in REPEATED if x is not case[3])


@pytest.mark.parametrize(
    ("make", "cap", "passes"),
    [
        (attention_grad, 4096 * 64, 3), (attention_grad, 4096 * 128, 2), (attention_grad, 4096 * 150, 1),
        (indexed, 1028 * 2, 6), (indexed, 1028 * 6, 2), (indexed, 1028 * 12, 1),
    ],
)  # fmt: skip
def test_caps_cut_the_work_as_launch_code_does(gpu, monkeypatch, make, cap, passes):
    sizes_of = {"keys": 150} if make is attention_grad else {"grad": True, "slots": True}
    case = make(heads=64, backward_workspace_bytes=cap, **sizes_of, **FIXED)

    def queue(kernel, cuda, device, sizes, blocks, values, shared_bytes, stream, fresh_thread=False):
        values = all_values(blocks, values)
        kinds = [p.kind for p in kernel.parameters]
        numbers = [np.asarray(v).item() for v, x in zip(values, kinds, strict=True) if x not in (None, np.void)]
        gpu.queued.append((kernel.function, kernel.defines, sizes, shared_bytes, stream, numbers))

    monkeypatch.setattr(gpu, "queue", queue)  # puts down what it would run: a stand-in for whole calls alone
    first, second, third = (queued(gpu, case, arrays_of(case))[1] for _ in range(3))
    assert first == second == third and gpu.plays == 1
    assert sum(function.endswith("finish") for function, *_ in third[0]) == passes


@pytest.mark.parametrize("name", CASES)
def test_results_are_arrays_of_their_own(gpu, name):
    case = CASES[name]
    arrays = arrays_of(case)
    for _ in range(2):
        kind_of_first = type(case[1](*arrays))
    gpu.blocks.made.clear()
    y = case[1](*arrays)
    got = list(y) if isinstance(y, tuple) else [y]
    assert gpu.plays == 1 and type(y) is kind_of_first
    assert [(x.shape, x.dtype.name) for x in got] == case[2]
    assert all(type(x) is cupy.ndarray and x.flags.c_contiguous and x.data.device_id == 0 for x in got)
    alive = [at for at, _, block in gpu.blocks.made if block() is not None]
    assert alive == [x.data.ptr for x in got], "working memory is freed"


def test_inputs_of_other_strides_are_other_kinds_and_played(gpu):
    for name in ("attention", "attention gradient", "scores", "scores gradient", "scores at ids", "gradient at ids"):
        case = CASES[name]
        dense = case[0](0)
        at = next(n for n, x in enumerate(dense) if x.dim() == 4)  # grad_out or q
        wide = torch.zeros(*dense[at].shape[:3], dense[at].shape[3] + 8, dtype=dense[at].dtype)
        strided = [cupy_of(x, wide.stride() if n == at else None) for n, x in enumerate(dense)]
        for _ in range(3):
            results(case, arrays_of(case))
        before = gpu.plays
        want, first = queued(gpu, case, strided)
        assert gpu.plays == before, name
        results(case, strided)
        got, third = queued(gpu, case, strided)
        assert gpu.plays == before + 1 and third == first, name
        check_all(got, want)


def test_what_kernels_cannot_read_as_it_is_stays_with_launch_code(gpu):
    q, kv, sinks, ids = CASES["attention"][0](0)
    spread = cupy_of(sinks, (2,))
    across = cupy_of(ids, (15, 1, 3))
    index_q, entries, weights, chosen = CASES["scores at ids"][0](0)
    wide = cupy_of(weights, (144, 16, 2))
    for case, arrays in (
        (CASES["attention"], [cupy_of(q), cupy_of(kv), spread, cupy_of(ids)]),
        (CASES["attention"], [cupy_of(q), cupy_of(kv), cupy_of(sinks), across]),
        (CASES["scores at ids"], [cupy_of(index_q), cupy_of(entries), wide, cupy_of(chosen)]),
    ):
        want = results(case, arrays)
        for _ in range(4):
            check_all(results(case, arrays), want)
        assert gpu.plays == 0 and list(case[3].programs._known.values()).count(False) >= 1
    case, arrays = CASES["scores"], [cupy_of(index_q), cupy_of(entries), wide]  # reads weights of any strides
    want = results(case, arrays)
    for _ in range(3):
        check_all(results(case, arrays), want)
    assert gpu.plays == 2


@pytest.mark.parametrize("sinks", [BF16, F16, torch.float64])
def test_sinks_of_other_dtypes_are_never_played(gpu, monkeypatch, sinks):
    case = attention(sinks=sinks)
    arrays = arrays_of(case)
    want, first = queued(gpu, case, arrays)
    for _ in range(4):
        got, again = queued(gpu, case, arrays)
        assert again == first
        check_all(got, want)
    made = arrays_of(CASES["attention gradient"])
    made[3] = arrays[2]
    monkeypatch.setattr(cuda_bwd, "backward", lambda *_: "grads")  # the cast of the result asks the driver
    for _ in range(4):
        assert CASES["attention gradient"][1](*made) == "grads"
    assert gpu.plays == 0 and all(not x.programs._known for x in REPEATED)


def test_gradients_in_other_dtypes_are_launch_codes(one_gpu, monkeypatch):
    """Only what needs no cast is played: grad_out and out in q's dtype, lse in float32."""
    case, asked = CASES["attention gradient"], []
    monkeypatch.setattr(cuda_bwd, "backward", lambda *_: asked.append(1) or ("grads",))
    usual = case[0](0)
    for n, dtype in ((0, F32), (0, F16), (5, F32), (6, torch.float64)):
        arrays = [cupy_of(x.to(dtype) if n == m else x) for m, x in enumerate(usual)]
        asked.clear()
        for _ in range(4):
            assert case[1](*arrays) == ("grads",)
        assert len(asked) == 4 and one_gpu.plays == 0


@pytest.mark.parametrize("name", SOME)
def test_zero_scales_keep_their_sign(gpu, name):
    case = CASES[name]
    *_, held = case
    arrays = arrays_of(case)

    def call(scale):
        if name.startswith("attention"):
            op = dsv4cp.dsv4_sparse_attention_grad if "gradient" in name else dsv4cp.dsv4_sparse_attention
            return op(*arrays, scale, backend="cuda")
        op = {"scores": "scores", "scores gradient": "scores_grad", "scores at ids": "topk_scores"}
        public = getattr(dsv4cp, f"dsv4_indexer_{op.get(name, 'topk_scores_grad')}")
        return public(*arrays, **{**AT, "softmax_scale": scale}, backend="cuda")

    for scale in (0.0, -0.0, -0.0, 0.0, 0.0, -0.0):
        gpu.queued = []
        call(scale)
        scales = [numbers["scale"] for *_, numbers in gpu.queued if "scale" in numbers]
        assert scales and {math.copysign(1, x) for x in scales} == {math.copysign(1, scale)}
    assert gpu.plays == 0 and set(held.programs._known.values()) == {None}
    for _ in range(3):
        call(1e-30)
    assert gpu.plays == 1


PATHS = {
    "attention": cuda, "attention gradient": cuda_bwd, "scores": cuda_scores, "scores gradient": cuda_grad_kernels,
    "gradient at ids": cuda_grad_kernels,
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_a_forced_path_is_another_kind(one_gpu, monkeypatch, name):
    case, gpu = CASES[name], one_gpu
    arrays = arrays_of(case)
    for _ in range(3):
        hopper = queued(gpu, case, arrays)
    assert gpu.plays == 1 and any("sm90" in function for function, *_ in hopper[1][0])
    monkeypatch.setattr(PATHS[name], "forced_path", "portable")
    first, second, third = (queued(gpu, case, arrays) for _ in range(3))
    assert gpu.plays == 2 and first[1] == second[1] == third[1]
    assert not any("sm90" in function for function, *_ in third[1][0])
    monkeypatch.setattr(PATHS[name], "forced_path", None)
    assert queued(gpu, case, arrays)[1] == hopper[1] and gpu.plays == 3


def test_what_is_named_by_a_call_is_of_its_kind(gpu):
    """A change of anything goes to launch code again, and back to the program."""
    q, kv, sinks, ids = arrays = arrays_of(CASES["attention, few heads"])
    op, usual = dsv4cp.dsv4_sparse_attention, {"backend": "cuda"}
    plan = {"plan": SparseIndexPlan("cuda", ids, None, None, 9)}
    for _ in range(3):
        op(*arrays, 0.125, **usual)
    assert gpu.plays == 1
    for args, options in (
        ((*arrays, 0.25), {}), ((*arrays, 1), {}), ((*arrays, 1.0), {}), ((q, kv, sinks, ids[..., :4], 0.125), {}),
        ((*arrays, 0.125), {"return_lse": True}), ((*arrays, 0.125), {"reference_rounding": True}),
        ((*arrays, 0.125), {"all_rows_nonempty": True}), ((*arrays, 0.125), {"backend": "auto"}),
        ((*arrays, np.float64(0.125)), {}), ((q, kv[:, :8], sinks, ids, 0.125), {}),
        ((q, kv, sinks, None, 0.125), plan), ((*arrays, 0.125), plan),
        ((*arrays, 0.125), {"return_lse": np.bool_(False)}),
    ):  # fmt: skip
        op(*args, **{**usual, **options})
        assert gpu.plays == 1, (args[4:], options)
    op(*arrays, 0.125, **usual)
    assert gpu.plays == 2


def test_fields_of_a_plan_are_of_the_kind(gpu):
    q, kv, sinks, ids = arrays_of(CASES["attention, few heads"])

    def call(plan, keys=kv):
        return dsv4cp.dsv4_sparse_attention(q, keys, sinks, None, 0.125, plan=plan, backend="cuda")

    for _ in range(3):
        want = call(SparseIndexPlan("cuda", ids, None, None, 9))
    assert gpu.plays == 1
    for wrong in (
        SparseIndexPlan("reference", ids, None, None, 9), SparseIndexPlan("cuda", ids, None, None, 8),
        SparseIndexPlan("cudnn", ids, ids, None, 9), SparseIndexPlan("other", ids, None, None, 9),
        SparseIndexPlan("cuda", None, None, None, 9), SparseIndexPlan("cuda", ids, None, None, "9"),
    ):  # fmt: skip
        for _ in range(3):
            with pytest.raises((ValueError, TypeError), match="plan"):
                call(wrong)
    plan = SparseIndexPlan("cuda", ids, None, None, 9)
    check_all([call(plan)], [want])
    assert gpu.plays == 2
    with pytest.raises(ValueError, match="topk_idxs"):
        dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids[..., 0], 0.125, plan=plan, backend="cuda")
    for _ in range(3):
        call(SparseIndexPlan("cuda", ids, None, None, np.int64(9)))
    assert gpu.plays == 2, "a number of NumPy's is not told"
    other = cupy_of(torch_of(ids).flip(1))
    fresh = dsv4cp.dsv4_sparse_attention(q, kv, sinks, other, 0.125, backend="cuda")
    check_all([call(SparseIndexPlan("cuda", other, None, None, 9))], [fresh])
    assert gpu.plays == 3


def test_errors_are_those_of_the_first_call(gpu):
    q, kv, sinks, ids = arrays = arrays_of(CASES["attention, few heads"])
    index = arrays_of(CASES["gradient at ids"])
    attend, gradient = dsv4cp.dsv4_sparse_attention, dsv4cp.dsv4_indexer_topk_scores_grad
    blank = object.__new__(SparseIndexPlan)
    bad = [
        lambda: attend(*arrays, 0.125, backend="cuda", return_lse=1),
        lambda: attend(*arrays, 0.125, backend="other"),
        lambda: attend(*arrays, 0.125, backend=["cuda"]),
        lambda: attend(*arrays, math.nan, backend="cuda"),
        lambda: attend(*arrays, math.inf, backend="cuda"),
        lambda: attend(*arrays, "0.125", backend="cuda"),
        lambda: attend(*arrays, [0.125], backend="cuda"),
        lambda: attend(q, kv, sinks, None, 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks, ids[..., 0], 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks, torch_of(ids), 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks, torch_of(ids).numpy(), 0.125, backend="cuda"),
        lambda: attend(q, None, sinks, ids, 0.125, backend="cuda"),
        lambda: attend(q, kv[..., :256], sinks, ids, 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks[:3], ids, 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks, sinks, 0.125, backend="cuda"),
        lambda: attend(q, empty((1, 9, 512), "bfloat16"), sinks, ids, 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks, empty((1, 3, 5), "int32", device=1), 0.125, backend="cuda"),
        lambda: attend(q, kv, sinks, None, 0.125, backend="cuda", plan=blank),
        lambda: attend(q, kv, sinks, None, 0.125, backend="cuda", plan="plan"),
        lambda: gradient(*index, **AT, backend="cuda", backward_impl="other"),
        lambda: gradient(*index, **AT, backend="cuda", backward_workspace_bytes=0),
        lambda: gradient(*index, **AT, backend="cuda", backward_workspace_bytes=64, **FIXED),
        lambda: gradient(*index, **{**AT, "compress_ratio": 0}, backend="cuda"),
        lambda: gradient(*index, **{**AT, "compress_ratio": True}, backend="cuda"),
    ]  # fmt: skip

    def said():
        found = []
        for call in bad:
            with pytest.raises((TypeError, ValueError)) as error:
                call()
            found.append((error.type, str(error.value)))
        return found

    want = said()
    for _ in range(3):
        attend(*arrays, 0.125, backend="cuda")
        gradient(*index, **AT, backend="cuda")
    assert gpu.plays == 2
    for _ in range(3):
        assert said() == want
    assert gpu.plays == 2


def test_other_backends_and_what_kernels_do_not_take_are_never_noted(one_gpu, monkeypatch):
    case = CASES["attention, few heads"]
    arrays = arrays_of(case)
    module = "dsv4cp.sparse_attention.reference.forward"
    monkeypatch.setattr(module, lambda *_, **__: ("out", "lse"))
    q, kv, sinks, ids = case[0](0)
    wide = [cupy_of(x) for x in (q.float(), kv.float(), sinks, ids)]
    for _ in range(4):
        assert dsv4cp.dsv4_sparse_attention(*arrays, 0.125, backend="reference") == "out"
        assert dsv4cp.dsv4_sparse_attention(*wide, 0.125) == "out"
    assert one_gpu.plays == 0 and not case[3].programs._known and one_gpu.queued == []


def test_threads_play_their_own_calls(gpu):
    case = CASES["scores at ids"]
    given = [arrays_of(case, seed) for seed in range(8)]
    want = [results(case, x) for x in given]
    assert gpu.plays == 6

    def calls(n):
        for _ in range(10):
            check_all(results(case, given[n]), want[n])

    run_at_once([lambda n=n: calls(n) for n in range(8)])
    assert gpu.plays == 86


def test_threads_settle_and_find_their_own(one_gpu, monkeypatch):
    monkeypatch.setattr(_programs, "MOST_KEPT", 16)
    repeated = Repeated("dsv4cp.sinkhorn")

    def note(size, making):
        making.make((size,), "float32")
        return 1

    monkeypatch.setattr(_cupy_programs, "_module", lambda name: SimpleNamespace(note=note))

    def calls(thread):
        for n in range(100):
            size = 1 + (n + thread) % 12 if n % 3 else 1000 * (thread + 1) + n
            call, found = repeated.play((empty((size,)),), (thread % 2,))
            if found is not None:
                assert found[0].shape == (size,)
            else:
                repeated.settle(call, "note", size)

    run_at_once([lambda n=n: calls(n) for n in range(8)])
    assert one_gpu.plays and len(repeated.programs._known) <= 16 + 8
