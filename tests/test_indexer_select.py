"""select_indexer_topk by the causal rule: who may be chosen, whatever scores beyond the limit hold."""

from __future__ import annotations

import tracemalloc

import array_api_strict as strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4cp import dsv4_indexer_scores, dsv4_indexer_topk, select_indexer_topk
from dsv4cp.indexer import contract, selection
from tests.support.compare import check_equal, to_numpy
from tests.support.indexer_data import DTYPES, make, views
from tests.support.select_cases import check_selection, expected, finished, hostile

INF, NAN = np.inf, np.nan


# ---------------------------------------------------------------- who may be chosen


def test_a_causal_selection_by_hand():
    scores = np.array([[5, 9, NAN], [1, INF, INF], [2, 2, NAN], [-0.0, 0.0, 7], [-INF, -1, NAN], [1, 2, 3]], np.float32)
    got = select_indexer_topk(scores, 2, compress_ratio=2)
    assert got.tolist() == [[-1, -1], [0, -1], [0, -1], [0, 1], [1, -1], [1, 2]]
    got = select_indexer_topk(scores[:4], 1, compress_ratio=2, query_start=2)
    assert got.tolist() == [[0], [1], [0], [2]]
    assert select_indexer_topk(scores, 2).tolist() == [[0, 1], [1, 2], [0, 1], [0, 2], [1, -1], [1, 2]]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    leading=st.sampled_from([(), (1,), (3,), (2, 2), (0,), (1, 2, 2)]),
    queries=st.integers(0, 9),
    entries=st.integers(0, 12),
    ratio=st.sampled_from([1, 2, 3, 4, 128]),
    start=st.sampled_from([0, 1, 3, 6, 11, 500]),
    count=st.integers(0, 15),
    order=st.sampled_from(["id", "score"]),
    beyond=st.sampled_from([NAN, INF, 1.0]),
    kind=st.sampled_from(["numpy", "strict", *DTYPES]),
    rows=st.sampled_from([1, 2, 5, 10**6]),
)
def test_it_equals_a_plain_loop(seed, leading, queries, entries, ratio, start, count, order, beyond, kind, rows):
    scores = hostile(seed, *leading, queries, entries, ratio=ratio, start=start, beyond=beyond)
    if kind in DTYPES:
        with np.errstate(over="ignore"):
            scores = scores.astype(DTYPES[kind])
    kept = scores.tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "rows_at_once", lambda *_: rows)
        if kind == "strict":
            options = {"compress_ratio": ratio, "query_start": start, "order": order, "return_scores": True}
            got = select_indexer_topk(strict.asarray(scores), count, **options)
            for a, b in zip(got, expected(scores, count, ratio, start, order), strict=True):
                check_equal(a, b, like=strict.asarray(scores))
        else:
            check_selection(scores, count, ratio, start, order)
    assert scores.tobytes() == kept


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 0, 4), (2, 3, 0), (0, 3, 4), (0, 0)])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_axes_without_length(shape, count):
    ids, values = select_indexer_topk(np.ones(shape, np.float32), count, compress_ratio=2, return_scores=True)
    check_equal(ids, np.full((*shape[:-1], count), -1, np.int32))
    check_equal(values, np.full((*shape[:-1], count), -INF, np.float32))


def test_a_limit_that_passes_every_entry_changes_nothing():
    scores = hostile(1, 3, 40, ratio=1, start=1000)
    for order in ("id", "score"):
        want = select_indexer_topk(scores, 50, order=order, return_scores=True)
        for start in (39, 2**40, 2**60):
            got = select_indexer_topk(scores, 50, order=order, return_scores=True, compress_ratio=1, query_start=start)
            for a, b in zip(got, want, strict=True):
                check_equal(a, b)


@pytest.mark.parametrize(
    ("ratio", "start"), [(2**31, 2**33 - 9), (2**40, 2**41 - 9), (2**31 - 1, 2**31 - 9), (2**60, 2**60), (2**60, 0)]
)
def test_ratios_and_positions_beyond_32_bits(ratio, start):
    check_selection(hostile(2, 20, 10, ratio=ratio, start=start), 3, ratio, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["id", "score"])
def test_it_equals_dsv4_indexer_topk_on_its_own_scores(dtype, order):
    """Bit for bit, though what is not finished is no longer -inf."""
    q, k, w = make(3, batch=2, queries=40, entries=13, dtype=dtype)
    rules = {"compress_ratio": 4, "query_start": 9}
    scores = dsv4_indexer_scores(q, k, w, softmax_scale=0.125, **rules)
    hidden = ~finished(40, 13, 4, 9)
    assert hidden.any() and np.isneginf(scores[:, hidden]).all()
    for bad in (NAN, INF, 7.0):
        scores[:, hidden] = bad
        for count in (1, 5, 13, 20):
            options = {"order": order, "return_scores": True, **rules}
            want = dsv4_indexer_topk(q, k, w, count, softmax_scale=0.125, **options)
            for a, b in zip(select_indexer_topk(scores, count, **options), want, strict=True):
                check_equal(a, b)


def test_views_and_batches_equal_their_copies():
    scores = hostile(4, 3, 11, 9, ratio=2, start=5)
    want = select_indexer_topk(scores, 4, compress_ratio=2, query_start=5)
    for _, view in views(scores):
        check_equal(select_indexer_topk(view, 4, compress_ratio=2, query_start=5), want)
    for b in range(3):
        check_equal(select_indexer_topk(scores[b], 4, compress_ratio=2, query_start=5), want[b])
    for i in range(11):
        alone = select_indexer_topk(scores[:, i : i + 1], 4, compress_ratio=2, query_start=5 + i)
        check_equal(alone, want[:, i : i + 1])


def test_the_reference_runs_on_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        with np.errstate(over="ignore"):
            scores = hostile(5, 2, 30, 8, ratio=3, start=2).astype(DTYPES[dtype])
        tensor = torch.from_numpy(to_numpy(scores)).to(getattr(torch, dtype))
        spec = contract.check_select(tensor, 5, "score", True, 3, 2)
        ids, values = selection.select(tensor, spec)
        want = expected(scores, 5, 3, 2, "score")
        check_equal(ids, want[0], like=tensor)
        check_equal(values, want[1], like=tensor)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_memory_is_bounded(dtype):
    scores = np.random.default_rng(6).standard_normal((2, 2048, 2048)).astype(dtype)
    tracemalloc.start()
    try:
        got = select_indexer_topk(scores, 64, compress_ratio=1, query_start=1024)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - got.nbytes < selection.SELECT_BYTES


def test_bad_arguments_are_named():
    scores = np.ones((3, 4), np.float32)

    def refused(error, text, x=scores, **more):
        with pytest.raises(error, match=text):
            select_indexer_topk(x, 2, **more)

    row = r"^scores: expected shape \[..., S, P\] with compress_ratio, got \[4\]"
    refused(ValueError, row, scores[0], compress_ratio=4)
    refused(ValueError, r"^scores: expected shape \[..., P\], got \[\]", np.array(1.0))
    refused(ValueError, r"^query_start: expected 0 without compress_ratio, got 3", query_start=3)
    refused(ValueError, r"^query_start: expected an integer of at least 0, got -1", query_start=-1, compress_ratio=4)
    most = rf"expected an integer of at most {2**60}, got {2**60 + 1}"
    refused(ValueError, f"^query_start: {most}", query_start=2**60 + 1, compress_ratio=4)
    refused(ValueError, f"^compress_ratio: {most}", compress_ratio=2**60 + 1)
    refused(ValueError, r"^compress_ratio: expected an integer of at least 1, got 0", compress_ratio=0)
    for bad in (4.0, True, "4", scores):
        refused(TypeError, r"^compress_ratio: expected an integer", compress_ratio=bad)
        refused(TypeError, r"^query_start: expected an integer", query_start=bad, compress_ratio=4)
    with pytest.raises(TypeError, match="positional"):
        select_indexer_topk(scores, 2, "id", False, "auto", 4)
    check_equal(select_indexer_topk(scores, 2, query_start=np.int64(0)), select_indexer_topk(scores, 2))
    check_equal(
        select_indexer_topk(scores, 2, compress_ratio=np.int32(2), query_start=np.array(1)),
        select_indexer_topk(scores, 2, compress_ratio=2, query_start=1),
    )


# ---------------------------------------------------------------- keys


class WithoutSubnormals:
    """NumPy as CuPy computes: arithmetic on floats takes subnormal numbers for zeros; moves and integers do not."""

    def __getattr__(self, name):
        return getattr(np, name)

    def sort(self, x, axis):
        assert x.dtype.kind == "i", "CuPy's order of floats is not asked"
        return np.sort(x, axis=axis)

    def argsort(self, *args, **more):
        raise AssertionError("CuPy's order of floats is not asked")


@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize("count", [1, 5, 40, 50])
def test_cupy_sorts_by_bits(monkeypatch, order, count):
    scores = hostile(3, 20, 40)
    scores[:, ::7] = np.array([1e-45, -1e-45, 3e-39, 0.0, -0.0, -3e-39], np.float32)
    want = selection.best_of_rows(np, scores, count, order)
    check_equal(want[0], expected(scores, count, 1, 1000, order)[0])
    monkeypatch.setattr(selection, "library", lambda x: "cupy")
    for got, x in zip(selection.best_of_rows(WithoutSubnormals(), scores, count, order), want, strict=True):
        check_equal(got, x)
