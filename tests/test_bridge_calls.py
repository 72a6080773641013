"""What a call of a torch operator is spared: checks that are remembered, by what, how many, and when they are not."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dsv4cp import _bridge, _bridge_calls
from dsv4cp._plan import SparseIndexPlan
from dsv4cp.indexer import contract as indexer_contract
from dsv4cp.indexer import torch_bridge_kernels as indexer_kernels
from dsv4cp.sparse_attention import torch_bridge_kernels as attention_kernels
from tests.support.threads import run_at_once

NAN = float("nan")


class Subclass(torch.Tensor):
    """A tensor of another type."""


@pytest.fixture
def check():
    """A remembered function that returns a new object whenever it runs; `ran` has the arguments of those runs."""

    @_bridge.remembered
    def check(*args, **kwargs):
        check.ran.append((args, kwargs))
        return object()

    check.ran = []
    return check


def kept(check) -> dict:
    """What a remembered function keeps."""
    return next(cell.cell_contents for cell in check.__closure__ if isinstance(cell.cell_contents, dict))


def same(check, one: tuple, other: tuple) -> bool:
    return check(*one) is check(*other)


# --- Which calls are the same ----------------------------------------------------------------------------


def test_equal_metadata_is_one_run(check):
    one, other = torch.zeros(2, 3), torch.ones(3, 2).T  # neither values nor strides are looked at
    assert same(check, (one, 4, 0.5, True, "id", None), (other, 4, 0.5, True, "id", None))
    assert len(check.ran) == 1


def test_a_parameter_is_a_tensor(check):
    assert same(check, (torch.zeros(2, 3),), (torch.nn.Parameter(torch.ones(2, 3)),))
    assert same(check, (torch.zeros(2, 3),), (torch.ones(2, 3, requires_grad=True),))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 2),
        torch.zeros(6),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(2, 3, device="meta"),
        torch.zeros(2, 3).to_sparse(),
    ],
    ids=["shape", "rank", "dtype", "device", "layout"],
)
def test_other_metadata_is_another_run(check, other):
    assert not same(check, (torch.zeros(2, 3),), (other,))


VALUES = [0, 1, True, False, 1.0, 0.0, -0.0, "1", "", None, torch.float32, torch.device("cpu"), 2**70]


def test_values_of_other_types_and_minus_zero_are_other_runs(check):
    results = [check(value) for value in VALUES]
    assert len(set(results)) == len(VALUES)
    assert [check(value) for value in VALUES] == results
    assert len(check.ran) == len(VALUES)
    check(NAN)
    check(-NAN)
    assert len(check.ran) == len(VALUES) + 2


def test_keywords_have_their_names(check):
    x = torch.zeros(2)
    results = [check(x, None), check(x, a=None), check(x, b=None), check(x, a=None, b=None), check(a=x), check("a", x)]
    assert len(set(results)) == len(results)
    assert check(x, a=None, b=None) is results[3]


def test_plans_are_told_by_their_fields(check):
    ids, lengths = torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    plan = SparseIndexPlan("tilelang", ids, None, None, 5)
    assert same(check, (plan,), (SparseIndexPlan("tilelang", ids.clone(), None, None, 5),))
    for other in (
        SparseIndexPlan("torch", ids, None, None, 5),
        SparseIndexPlan("tilelang", ids[:1], None, None, 5),
        SparseIndexPlan("tilelang", ids, lengths, None, 5),
        SparseIndexPlan("tilelang", ids, None, lengths, 5),
        SparseIndexPlan("tilelang", ids, None, None, 6),
    ):
        assert not same(check, (plan,), (other,))


def test_none_is_a_result_too():
    ran = []
    check = _bridge.remembered(lambda x: ran.append(x))
    assert check(1) is check(1) is None
    assert ran == [1]


def test_attention_and_indexer_tell_a_scale_of_minus_zero_from_zero():
    q, k, w = torch.zeros(1, 2, 4, 64), torch.zeros(1, 3, 64), torch.zeros(1, 2, 4)
    ids, sinks = torch.zeros(1, 2, 5, dtype=torch.int32), torch.zeros(4)
    for scale in (0.0, -0.0, 0.0):
        spec, _ = indexer_kernels.checked(q, k, w, 4, scale)
        assert np.signbit(spec.softmax_scale) == np.signbit(scale)
        assert spec == indexer_contract.check_scores(q, k, w, 4, scale)
        spec, _ = attention_kernels.checked(q, k, sinks, ids, scale)
        assert np.signbit(spec.scale) == np.signbit(scale)


# --- What is not kept ------------------------------------------------------------------------------------


def test_errors_are_not_kept():
    ran = []

    @_bridge.remembered
    def check(x):
        ran.append(x)
        raise ValueError("x: expected another")

    for _ in range(2):
        with pytest.raises(ValueError, match=r"^x: expected another$") as caught:
            check(1)
        assert caught.value.__context__ is None
    assert ran == [1, 1]


def nested():
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2).as_subclass(Subclass),
        lambda: FakeTensorMode().from_tensor(torch.zeros(2)),
        nested,
        lambda: np.zeros(2),
        lambda: np.float32(1),
        lambda: (1, 2),
        lambda: [1, 2],
    ],
    ids=["subclass", "fake", "nested", "array", "NumPy scalar", "tuple", "list"],
)
def test_other_types_go_to_the_check(check, make):
    x = make()
    assert not same(check, (x,), (x,))
    for args, _ in check.ran:
        assert args[0] is x


def test_an_error_for_another_type_has_no_other_before_it():
    @_bridge.remembered
    def check(x):
        raise TypeError("x: expected a tensor")

    with pytest.raises(TypeError, match=r"^x: expected a tensor$") as caught:
        check([1])
    assert caught.value.__context__ is None


def test_sizes_that_are_symbols_go_to_the_check(check):
    symbols = ShapeEnv()
    with FakeTensorMode(shape_env=symbols):
        x = torch._to_functional_tensor(torch.empty(symbols.create_unbacked_symint(), 7))
        assert type(x) is torch.Tensor and type(x.shape[0]) is torch.SymInt
        for value in (x, x.shape[0]):
            assert not same(check, (value,), (value,))
    assert kept(check) == {}


def test_a_bounded_number_is_kept(check):
    first = check(0)
    for n in range(1, _bridge_calls.MOST_REMEMBERED):
        check(n)
    assert check(0) is first
    check(-1)  # one too many: all go
    assert check(0) is not first
    assert len(kept(check)) == 2


def test_nothing_is_kept_of_what_is_compiled():
    @_bridge.remembered
    def size(x, n):
        return x.shape[0] + n

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, n: x * size(x, n), fullgraph=True, backend="eager")
    assert compiled(torch.ones(3), 1).tolist() == [4] * 3
    assert compiled(torch.ones(5), 2).tolist() == [7] * 5
    torch._dynamo.reset()
    assert kept(size) == {}
    assert size(torch.ones(3), 1) == 4 and len(kept(size)) == 1


def test_transforms_see_the_sizes_that_they_show(check):
    seen = []
    torch.func.vmap(lambda x: seen.append(check(x)) or x)(torch.zeros(4, 2, 3))
    assert seen == [check(torch.zeros(2, 3))]
    assert check(torch.zeros(4, 2, 3)) is not seen[0]


# --- Threads ---------------------------------------------------------------------------------------------


def test_threads_get_their_own_calls_results():
    barrier = threading.Barrier(8)

    @_bridge.remembered
    def double(x, n):
        return x.shape[0], 2 * n

    def calls(start):
        barrier.wait()
        for n in range(start, start + 3000):
            assert double(torch.zeros(n % 7), n) == (n % 7, 2 * n)

    run_at_once([lambda start=start: calls(500 * start) for start in range(8)])
    assert 0 < len(kept(double)) <= _bridge_calls.MOST_REMEMBERED + 8  # one more for each that filled at that moment


def test_a_call_from_a_destructor_while_a_result_is_kept_waits_for_nobody():
    @_bridge.remembered
    def double(n):
        return 2 * n

    class Caller(dict):
        """Stands for the memory, with a destructor that runs while the first result is put there."""

        def __setitem__(self, key, value):
            first = not self.called
            self.called = True
            if first:
                assert double(7) == 14
            super().__setitem__(key, value)

    memory = Caller()
    memory.called = False
    next(cell for cell in double.__closure__ if isinstance(cell.cell_contents, dict)).cell_contents = memory
    worker = threading.Thread(target=double, args=(20,), daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive() and len(memory) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_nothing_is_kept_of_what_jit_traces():
    @_bridge.remembered
    def size(x):
        return x.shape[0]

    torch.jit.trace(lambda x: x * size(x), torch.ones(3), check_trace=False)
    assert kept(size) == {}


def test_a_plan_without_fields_goes_to_the_check(check):
    empty = SparseIndexPlan.__new__(SparseIndexPlan)
    assert not same(check, (empty,), (empty,))


def test_sizes_of_a_compiled_caller_may_change():
    """Numbers that a check reads off sizes are numbers, not symbols, as where nothing is remembered."""
    from dsv4cp import torch_ops

    def build(x):
        return torch_ops.build_dsv4_sparse_topk_indices(
            batch_size=x.shape[0], seq_len=x.shape[1], key_len=x.shape[1], window_size=4, device="cpu"
        )

    torch._dynamo.reset()
    compiled = torch.compile(build, fullgraph=True, backend="eager")
    for rows in (2, 4, 5, 6):
        assert torch.equal(compiled(torch.zeros(rows, rows + 3)), build(torch.zeros(rows, rows + 3)))
    torch._dynamo.reset()


# --- The way to an operator, and tensors that are read by pointer ----------------------------------------------


def test_autograd_is_idle_where_no_gradient_is_wanted():
    x, wanted = torch.zeros(2), torch.zeros(2, requires_grad=True)
    idle = _bridge_calls.autograd_is_idle
    assert idle(x, 1, 0.5, True, "id", None)
    assert not idle(x, wanted) and not idle(torch.nn.Parameter(x))
    with torch.no_grad():
        assert idle(x, wanted, torch.nn.Parameter(x))
    for other in (x.as_subclass(Subclass), FakeTensorMode().from_tensor(x), [x], np.float32(1)):
        assert not idle(x, other)
    answers = []
    torch.func.vmap(lambda y: answers.append(idle(y)) or y)(x)
    assert answers == [False]


def test_what_is_plain_is_handed_on():
    x = torch.zeros(4, 3)
    assert _bridge.plain(x) is x and _bridge.cast(x, torch.float32) is x
    assert _bridge.readable(x, lambda address, shape, strides: True) is x
    copied = _bridge.readable(x.T, lambda address, shape, strides: strides[-1] == 1)
    assert copied.is_contiguous() and copied.shape == (3, 4)
    wanted = torch.ones(3, requires_grad=True)
    assert not _bridge.plain(wanted).requires_grad
    negative = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    assert negative.is_neg() and _bridge.plain(negative).tolist() == [-2.0, 1.0]
    assert not _bridge.plain(negative).is_neg()
    assert _bridge.cast(x, torch.bfloat16).dtype == torch.bfloat16
    assert _bridge.name_of(torch.bfloat16) == "bfloat16" and _bridge.name_of(torch.int64) == "int64"
