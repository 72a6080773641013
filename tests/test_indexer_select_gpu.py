"""select_indexer_topk by the causal rule on CuPy arrays: the kernel against plain loops, a sort, the reference, and
dsv4_indexer_topk on its own scores."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from tests.support.compare import check_equal, check_like, to_numpy  # noqa: E402
from tests.support.indexer_scores_gpu import NUMBERS, first_by_sort, random_inputs, visible  # noqa: E402
from tests.support.select_cases import check_selection, hostile  # noqa: E402

pytestmark = pytest.mark.gpu

INF, NAN = np.inf, np.nan
EDGES = (1024, 2048, 4096)  # entries up to which a launch has smaller blocks


def select(scores, count, **more):
    return dsv4cp.select_indexer_topk(scores, count, backend="cuda", **more)


def on_gpu(scores, dtype="float32"):
    with np.errstate(over="ignore"):
        return cupy.asarray(scores.astype(NUMBERS[dtype]))


def spoiled(scores, ratio, start):
    """A copy with NaN and +inf in turn where an entry is not finished."""
    bad = cupy.where(cupy.arange(scores.shape[-1]) % 2 == 0, NAN, INF).astype(np.float32)
    mixed = cupy.where(visible(*scores.shape[-2:], ratio, start), scores.astype(np.float32), bad)
    return mixed.astype(scores.dtype)


def test_edges_are_those_of_the_launches():
    from dsv4cp.indexer import cuda_topk

    assert tuple(cuda_topk.BLOCKS)[:-1] == EDGES


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize(
    "shape",
    [(7, 5), (9, 1), (1, 9), (2, 7, 40), (2, 1, 3, 6, 7), (3, 2, 6, 8), (0, 4), (2, 3, 0), (2, 0, 4), (0, 3, 4)],
)
def test_shapes_dtypes_and_hostile_scores(shape, order, dtype):
    for n, (ratio, start) in enumerate(((1, 0), (2, 3), (3, 1), (4, 30), (128, 0), (2**40, 2**41 - 4), (4, 2**60))):
        scores = on_gpu(hostile(n, *shape, ratio=ratio, start=start), dtype)
        kept = scores.copy()
        for count in (3, 50):
            check_selection(scores, count, ratio, start, order, select=select)
        ids, values = select(scores, 0, compress_ratio=ratio, return_scores=True)
        check_like(ids, dtype="int32", shape=(*shape[:-1], 0), like=scores)
        check_like(values, dtype="float32", shape=(*shape[:-1], 0), like=scores)
        assert scores.tobytes() == kept.tobytes(), "scores were written"


@pytest.mark.parametrize(
    ("ratio", "start"), [(2**31, 2**33 - 9), (2**40, 2**41 - 9), (2**31 - 1, 2**31 - 9), (2**60, 2**60), (2**60, 0)]
)
def test_ratios_and_positions_beyond_32_bits(ratio, start):
    check_selection(on_gpu(hostile(2, 20, 10, ratio=ratio, start=start)), 3, ratio, start, select=select)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_strided_scores(dtype):
    base = hostile(3, 4, 30, 64, ratio=1, start=5)
    want = select(on_gpu(base, dtype), 9, compress_ratio=1, query_start=5, return_scores=True)
    check_selection(on_gpu(base, dtype), 9, 1, 5, select=select)
    parent = np.full((30, 5, 80), INF, np.float32)
    views = []
    for first in (0, 4, 3):  # 3: four neighbours are not one load
        parent[:, :4, first : first + 64] = base.swapaxes(0, 1)
        views.append(on_gpu(parent, dtype)[:, :4, first : first + 64].swapaxes(0, 1))
    contiguous = on_gpu(base, dtype)
    views += [contiguous[:, ::-1].copy()[:, ::-1], contiguous[..., ::-1].copy()[..., ::-1]]
    views += [cupy.asfortranarray(contiguous), on_gpu(np.repeat(base, 2, axis=-1), dtype)[..., ::2]]
    for view in views:
        kept = view.copy()
        got = select(view, 9, compress_ratio=1, query_start=5, return_scores=True)
        for a, b in zip(got, want, strict=True):
            check_equal(a, b)
        assert view.tobytes() == kept.tobytes(), "scores were written"
    shared = cupy.broadcast_to(contiguous[:1], (3, 30, 64))
    got = select(shared, 9, compress_ratio=1, query_start=5)
    check_equal(got, cupy.repeat(want[0][:1], 3, axis=0))


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize("edge", EDGES)
def test_rows_about_the_edge_of_a_launch(edge, order, dtype, monkeypatch):
    """Queries that see edge - 20 to edge + 17 entries, in one launch and in two; against a sort on the host."""
    from dsv4cp.indexer import cuda_topk

    start, entries = 3 * (edge - 20), edge + 17  # the last queries see all there is, in rows of odd length
    table = np.random.default_rng(edge).standard_normal((2, 120, entries), np.float32)
    table[:, ::2] = np.round(table[:, ::2] * 4)  # ties
    table[:, :, ::50], table[:, :, 7::90], table[:, :, 13::70] = -0.0, NAN, -INF
    scores = on_gpu(table, dtype)
    seen = cupy.where(visible(120, entries, 3, start), scores.astype(np.float32), -INF)
    options = {"compress_ratio": 3, "query_start": start, "order": order, "return_scores": True}
    for count in (7, edge // 2):
        want, found = first_by_sort(seen.reshape(-1, entries), count, order)
        for fewest in (cuda_topk.FEWEST_ROWS, 1):
            with monkeypatch.context() as patch:
                patch.setattr(cuda_topk, "FEWEST_ROWS", fewest)
                ids, values = select(spoiled(scores, 3, start), count, **options)
            check_equal(ids.reshape(want.shape), want)
            assert np.array_equal(to_numpy(values).reshape(found.shape), found)


@pytest.mark.parametrize("dtype", NUMBERS)
def test_a_long_call_takes_every_launch(dtype):
    """Rows of 1 to 5300 entries in four launches; bit for bit as the reference on the GPU."""
    from dsv4cp.indexer import cuda_scores, cuda_topk

    shape = 2, 5300, 5300
    assert len(cuda_topk.pieces(*shape, cuda_scores.Limits(1, 0, 1))) == len(cuda_topk.BLOCKS)
    rng = cupy.random.default_rng(4)
    scores = rng.standard_normal(shape, dtype=np.float32)
    scores[:, ::3] = cupy.round(scores[:, ::3] * 8)
    scores = spoiled(scores.astype(NUMBERS[dtype]), 1, 0)
    for order in ("id", "score"):
        options = {"compress_ratio": 1, "order": order, "return_scores": True}
        got = select(scores, 300, **options)
        want = dsv4cp.select_indexer_topk(scores, 300, backend="reference", **options)
        for a, b in zip(got, want, strict=True):
            check_equal(a, b)


def test_a_row_that_is_read_several_times():
    """More entries than a block holds."""
    table = np.random.default_rng(5).standard_normal((40, 20001), np.float32)
    table[::2] = np.round(table[::2] * 3)
    scores, start = cupy.asarray(table), 4 * 19990
    seen = cupy.where(visible(40, 20001, 4, start), scores, -INF)
    ids, values = select(spoiled(scores, 4, start), 1024, compress_ratio=4, query_start=start, return_scores=True)
    want, found = first_by_sort(seen, 1024)
    check_equal(ids, want)
    assert np.array_equal(to_numpy(values), found)


@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize(
    ("sizes", "count", "start"),
    [((2, 200, 300), 64, 700), ((1, 40, 9000), 1024, 35900), ((2, 100, 500), 600, 1500), ((1, 30, 3000), 2500, 11950)],
)
def test_it_equals_dsv4_indexer_topk_on_its_own_scores(sizes, count, start, order):
    """Bit for bit, though what is not finished is no longer -inf; 2500 are chosen by the reference."""
    inputs = random_inputs(*sizes, 64, 128)
    rules = {"compress_ratio": 4, "query_start": start, "backend": "cuda"}
    scores = dsv4cp.dsv4_indexer_scores(*inputs, softmax_scale=0.125, **rules)
    hidden = ~visible(*sizes[1:], 4, start)
    assert bool(hidden.any()) and bool((cupy.where(hidden, scores, -INF) == -INF).all())
    options = {"order": order, "return_scores": True, **rules}
    want = dsv4cp.dsv4_indexer_topk(*inputs, count, softmax_scale=0.125, **options)
    got = dsv4cp.select_indexer_topk(spoiled(scores, 4, start), count, **options)
    for a, b in zip(got, want, strict=True):
        check_equal(a, b)


@pytest.mark.parametrize("order", ["id", "score"])
def test_more_than_the_kernel_chooses(order):
    table = np.random.default_rng(6).standard_normal((2, 6, 5000), np.float32)
    start = 4 * 4990
    scores = spoiled(cupy.asarray(table), 4, start)
    seen = cupy.where(visible(6, 5000, 4, start), cupy.asarray(table), -INF).reshape(-1, 5000)
    ids, values = select(scores, 3000, compress_ratio=4, query_start=start, order=order, return_scores=True)
    want, found = first_by_sort(seen, 3000, order)
    check_equal(ids.reshape(want.shape), want)
    check_equal(values.reshape(found.shape), found)


@pytest.mark.parametrize("dtype", [*NUMBERS, "float64"])
def test_the_reference_on_the_gpu(dtype):
    x = hostile(7, 2, 30, 40, ratio=2, start=11)
    scores = cupy.asarray(x.astype(np.float64)) if dtype == "float64" else on_gpu(x, dtype)
    for order in ("id", "score"):
        check_selection(
            scores, 9, 2, 11, order,
            select=lambda *a, **more: dsv4cp.select_indexer_topk(*a, backend="reference", **more),
        )  # fmt: skip
        check_selection(scores, 9, 2, 11, order)  # "auto"


def test_bits_do_not_depend_on_neighbours():
    scores = spoiled(cupy.random.default_rng(8).standard_normal((3, 90, 1500), dtype=np.float32), 4, 5000)
    want = select(scores, 100, compress_ratio=4, query_start=5000)
    for b, first, last in ((0, 0, 90), (1, 7, 8), (2, 33, 80)):
        part = select(scores[b, first:last], 100, compress_ratio=4, query_start=5000 + first)
        check_equal(part, want[b, first:last])
