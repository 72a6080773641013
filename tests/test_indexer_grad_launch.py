"""What the indexer's gradient kernels are launched with, without a GPU: passes, ranges, layouts, arguments; and what
the public functions refuse."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from dsv4cp import _kernels  # noqa: E402
from dsv4cp._arrays import element_strides  # noqa: E402
from dsv4cp.indexer import contract, contract_grad, cuda_grad_kernels, cuda_grad_launch  # noqa: E402
from dsv4cp.indexer.cuda_grad_launch import Operand, Operands, aligned, plan  # noqa: E402
from tests.support.indexer_data import ids, make  # noqa: E402

SM80_SHARED, SM86_SHARED, SM90_SHARED = 163 * 1024, 99 * 1024, 232448  # bytes that a block may opt in to
GRADS, WORKSPACE = (2**41, 2**42, 2**43), 2**44


@pytest.fixture
def launches(monkeypatch):
    made = []

    def launch(kernel, *, grid, block, shared_bytes=0, stream=None, **arguments):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert type(value) is (kinds[name] or int), name
            assert kinds[name] or 0 <= value < 2**64, f"{name} is no address"
        values = {name: value.item() if kinds[name] else value for name, value in arguments.items()}
        defines = {name: int(v) if v.isdecimal() else v for name, v in kernel.defines}
        shape = {"grid": grid, "block": block, "shared": shared_bytes, "stream": stream}
        made.append(SimpleNamespace(file=kernel.file, function=kernel.function, defines=defines, **shape, **values))

    def clear(address, size, stream):
        made.append(SimpleNamespace(function="clear", address=address, size=size, stream=stream))

    monkeypatch.setattr(_kernels, "launch", launch)
    monkeypatch.setattr(cuda_grad_launch, "_clear", clear)
    monkeypatch.setattr(cuda_grad_kernels, "_is_hopper", lambda: True)
    return made


def spec_of(b=2, s=5, i=64, e=128, p=300, t=70, scale=0.5, start=0) -> contract.SlotsSpec:
    sizes = {"batch": b, "queries": s, "entries": p, "heads": i, "index_dim": e, "slots": t}
    return contract.SlotsSpec(
        "cupy", np, 0, compute=np.float32, softmax_scale=scale, compress_ratio=4, query_start=start, **sizes
    )


def operands(spec: contract.SlotsSpec, ids="int32") -> Operands:
    s, i, e, t = spec.queries, spec.heads, spec.index_dim, spec.slots
    return Operands(
        Operand(2**40, "float16", (s * i * e, i * e, e, 1)),
        Operand(2**40 + 16, "float16", (2**33, e, 1)),
        Operand(2**40 + 2, "bfloat16", (s * i, i, 1)),
        Operand(2**40 + 3, ids, (s * t, t, 1)),
        Operand(2**40 + 4, "float32", (0, -7, 3)),
    )


def grad(spec, deterministic=True, cap=2**31, **options):
    passes = plan(spec, deterministic, cap)
    cuda_grad_launch.launch_topk_scores_grad(operands(spec), GRADS, WORKSPACE, spec, passes, **options)
    return passes


@pytest.mark.parametrize("cap", [1028, 1028 * 100, 1028 * 299, 1028 * 300, 1028 * 599, 1028 * 600, 1028 * 10**6, 2**31])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_passes_cover_every_entry_once_within_the_cap(launches, cap, batch):
    spec = spec_of(b=batch)
    passes = grad(spec, cap=cap, stream=3)
    assert passes.workspace_bytes <= cap
    covered, with_q = np.zeros((batch, 300), int), np.zeros(batch, int)
    for n, got in enumerate(launches):
        assert got.stream == 3
        if got.function == "indexer_grad_query_sm90":
            rows = slice(got.batch_first, got.batch_first + got.grid[1])
            assert got.grid[0] == 5
            if got.sums:
                covered[rows, got.key_first : got.key_last] += 1
                columns = got.grid[1] * (got.key_last - got.key_first) * 128
                assert (got.sums, got.bounds) == (WORKSPACE, WORKSPACE + 8 * columns)
                before = launches[n - 2 : n]
                assert [x.function for x in before] == ["clear", "indexer_grad_bounds"]
                assert (before[0].address, before[0].size) == (WORKSPACE, 8 * columns + columns // 32)
                assert before[0].size <= passes.workspace_bytes
                assert before[1].bounds == got.bounds
                after = launches[n + 1]
                assert after.function == "indexer_grad_finish"
                assert (after.columns, after.first_column) == (columns, got.key_first * 128)
                assert after.grad_k == GRADS[1] + 2 * got.batch_first * 300 * 128
                assert after.terms == got.terms == 5 * 70
            if got.grad_q:
                assert (got.grad_q, got.grad_w) == (GRADS[0], GRADS[2])
                assert got.key_first == 0 and got.key_last == 300
                with_q[rows] += 1
            else:
                assert got.sums
            assert [got.defines["WANT_Q"], got.defines["WANT_K"]] == [bool(got.grad_q), bool(got.sums)]
    assert (covered == 1).all() and (with_q == 1).all()


def test_empty_arrays_may_lie_nowhere_and_be_reversed(launches):
    """Batch rows beyond a grid's second axis start a launch of their own: an address from nothing's negative stride."""
    spec = spec_of(b=70000, s=0, p=3)
    empty = SimpleNamespace(size=0, ndim=4, itemsize=2, strides=(-(2**14), 2**14, 256, 2))
    x = operands(spec)._replace(q=Operand(0, "float16", element_strides(empty)))
    cuda_grad_launch.launch_topk_scores(x, 2**40, spec)
    assert [launch.q for launch in launches] == [0, 0]


def test_a_cap_for_less_than_one_entry_is_refused():
    with pytest.raises(ValueError, match=r"^backward_workspace_bytes: expected at least 1028 .*got 1027"):
        plan(spec_of(), True, 1027)
    assert plan(spec_of(), False, 1).workspace_bytes == 4 * 2 * 300 * 128
    for nothing in (spec_of(b=0), spec_of(p=0)):
        assert plan(nothing, True, 1).workspace_bytes == 0


def test_atomic_is_one_pass_over_float32(launches):
    grad(spec_of(), deterministic=False)
    clear, query, finish = launches
    assert clear.size == 4 * 2 * 300 * 128
    assert (query.bounds, finish.bounds, finish.parts) == (0, 0, 1)
    assert query.defines["FIXED"] == 0
    assert (query.g_stride_b, query.g_stride_s, query.g_stride_t) == (0, -7, 3)
    assert (query.k_stride_b, query.k_stride_p) == (2**33, 128)
    assert (query.g_kind, query.w_kind, query.ids_wide, query.scale) == (0, 1, 0, 0.5)
    assert query.grid == (5, 2)


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 63, 64, 65, 128])
def test_the_path_and_its_layout(launches, monkeypatch, hopper, dim, heads):
    monkeypatch.setattr(cuda_grad_kernels, "_is_hopper", lambda: hopper)
    spec = spec_of(i=heads, e=dim)
    for deterministic in (False, True):
        grad(spec, deterministic, cap=(8 * dim + 4) * 100)
    queries = [x for x in launches if x.function.startswith("indexer_grad_query")]
    for got in queries:
        own = hopper and dim == 128 and heads <= 64
        assert got.function == ("indexer_grad_query_sm90" if own else "indexer_grad_query")
        assert got.defines in [
            {k: int(v) if str(v).isdecimal() else v for k, v in x.items()} for x in float16_variants(got.file)
        ]
        assert got.shared == got.defines["SHARED_BYTES"]
        assert got.shared <= (SM90_SHARED // 2 - 1024 if own else SM86_SHARED)
        assert got.block == (256 if own else 128 if heads <= 64 else 256)
        assert own or got.defines["HEADS"] >= heads
    monkeypatch.setattr(cuda_grad_kernels, "forced_path", "portable")
    launches.clear()
    grad(spec)
    assert [x.function for x in launches][2] == "indexer_grad_query"


def float16_variants(file: str) -> list[dict]:
    """Every layout of a file; the other element changes no layout."""
    return [{**x, "ELEMENT": "Float16"} for x in cuda_grad_kernels.VARIANTS[file]]


def test_scores_at_ids(launches):
    for heads, wide in ((64, "int32"), (65, "int64")):
        spec = spec_of(i=heads)
        cuda_grad_launch.launch_topk_scores(operands(spec, wide), 2**44, spec, stream=9)
    first, second = launches
    assert first.grid == (5, 2) and first.scores == 2**44
    assert (first.head_blocks, second.head_blocks) == (1, 2)
    assert (first.ids_wide, second.ids_wide) == (0, 1)
    assert first.shared == 16384 + 65536 + 256 and second.shared == 2 * 16384 + 65536 + 512
    assert second.shared <= SM86_SHARED
    spec = spec_of(t=0)
    cuda_grad_launch.launch_topk_scores(operands(spec), 2**44, spec)
    assert launches[2].grid == 0


def test_more_batch_rows_than_a_grid_has(launches):
    spec = spec_of(b=70_000, s=1, p=2, t=3)
    cuda_grad_launch.launch_topk_scores(operands(spec), 2**44, spec)
    second = launches[1]
    assert [x.grid for x in launches] == [(1, 65535), (1, 4465)]
    assert second.scores == 2**44 + 4 * 65535 * 3
    assert second.q == 2**40 + 2 * 65535 * 64 * 128
    assert second.ids == 2**40 + 3 + 4 * 65535 * 3
    launches.clear()
    grad(spec)
    queries = [x for x in launches if x.function == "indexer_grad_query_sm90"]
    assert [(x.batch_first, x.grid) for x in queries] == [(0, (1, 65535)), (65535, (1, 4465))]


@pytest.mark.parametrize("queries", [1, 63, 64, 127, 128, 5000, 10**6])
@pytest.mark.parametrize("entries", [1, 300, 10**5])
def test_dense_gradient_covers_every_query_and_entry(launches, queries, entries):
    spec = spec_of(b=3, s=queries, p=entries, start=11)
    cuda_grad_launch.launch_scores_grad(operands(spec), GRADS, WORKSPACE, spec)
    rows = 0
    for query, entry, finish in zip(*[iter(launches)] * 3, strict=True):
        assert (query.function, entry.function) == ("indexer_grad_query_sm90", "indexer_grad_entry_sm90")
        assert query.ids == query.sums == 0 and query.slots == entry.entries == entries
        assert query.query_start == entry.query_start == 11 and query.ratio == entry.ratio == 4
        tiles, parts, here = entry.grid
        assert tiles * 64 >= entries > (tiles - 1) * 64
        assert parts * entry.segment >= queries > (parts - 1) * entry.segment
        assert query.grid == (queries, here) and query.batch_first == entry.batch_first == rows
        assert finish.parts == parts and finish.columns == here * entries * 128
        assert 4 * parts * finish.columns <= cuda_grad_launch.dense_workspace_bytes(spec)
        rows += here
    assert rows == 3
    one = spec_of(b=1, s=queries, p=entries)
    assert cuda_grad_launch._dense_parts(one) == cuda_grad_launch._dense_parts(spec), "the batch must not change bits"
    limit = max(cuda_grad_launch.PARTS_BYTES, 4 * entries * 128)
    assert cuda_grad_launch.dense_workspace_bytes(spec) <= limit


@pytest.mark.parametrize(
    ("address", "shape", "strides", "want"),
    [
        (0, (2, 3, 64), (192, 64, 1), True),
        (8, (2, 3, 64), (192, 64, 1), False),
        (0, (2, 3, 64), (192, 65, 1), False),
        (0, (1, 3, 64), (5, 64, 1), True),
        (0, (2, 3, 64), (0, -64, 1), True),
        (0, (2, 3, 64), (192, 64, 2), False),
    ],
)
def test_what_16_byte_copies_reach(address, shape, strides, want):
    assert aligned(address, shape, strides) is want


# --- Arguments of the public functions ---------------------------------------------------------------------


def call(**more):
    q, k, w = make()
    g = np.ones((2, 9, 7), np.float32)
    return dsv4cp.dsv4_indexer_topk_scores_grad(g, q, k, w, ids(), compress_ratio=4, softmax_scale=0.5, **more)


def test_both_ways_of_summing_are_the_reference_on_numpy_arrays():
    want = call()
    for impl in contract_grad.BACKWARD_IMPLS:
        for a, b in zip(call(backward_impl=impl, backward_workspace_bytes=1), want, strict=True):
            assert (a == b).all()


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"backward_impl": "fast"}, ValueError, r"^backward_impl: expected 'atomic' or 'deterministic', got 'fast'"),
        ({"backward_impl": 1}, TypeError, r"^backward_impl: expected a string, got int"),
        ({"backward_workspace_bytes": 0}, ValueError, r"^backward_workspace_bytes: .*at least 1, got 0"),
        ({"backward_workspace_bytes": 1.5}, TypeError, r"^backward_workspace_bytes: expected an integer, got float"),
        ({"backend": "numba"}, RuntimeError, r"^dsv4_indexer_topk_scores_grad: backend 'numba' is not there"),
    ],
)
def test_bad_arguments_are_named(more, error, words):
    with pytest.raises(error, match=words):
        call(**more)


def test_what_the_kernels_do_not_take():
    half, single, double = (np.zeros((1, 2, 3, 64), t) for t in (np.float16, np.float32, np.float64))
    k, w = np.zeros((1, 5, 64), np.float16), np.zeros((1, 2, 3), np.float32)
    assert contract_grad.within_kernels("cuda", "cuda", half, k, w, single) == "cuda"
    assert contract_grad.within_kernels("cuda", "auto", half, k, w, double) == "reference"
    with pytest.raises(TypeError, match=r"^grad_scores: .*float32, got float64"):
        contract_grad.within_kernels("cuda", "cuda", half, k, w, double)
    assert contract_grad.within_kernels("cuda", "auto", single, k, w, single) == "reference"
    with pytest.raises(RuntimeError, match=r"^backward_impl: 'deterministic' on CuPy"):
        contract_grad.check_fixed_order("reference", "cupy", "deterministic")
    for chosen, library in (("cuda", "cupy"), ("reference", "numpy")):
        contract_grad.check_fixed_order(chosen, library, "deterministic")
