"""dsv4_indexer_topk and select_indexer_topk: exact selection, its order, and who sees what."""

from __future__ import annotations

import tracemalloc

import array_api_strict as strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsv4cp import dsv4_indexer_scores, dsv4_indexer_topk, select_indexer_topk
from dsv4cp.indexer import reference, selection
from tests.support import naive
from tests.support.compare import check_close, check_equal, check_like, to_numpy
from tests.support.indexer_data import BACKENDS, DTYPES, make, views

R, SCALE = 4, 0.125
INF, NAN = np.inf, np.nan


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=["float32", "float64", "strict"])
def kind(request):
    """Each way of selecting: one integer key (NumPy float32), a stable sort (float64, other libraries)."""
    return {
        "float32": lambda x: np.asarray(x, np.float32),
        "float64": lambda x: np.asarray(x, np.float64),
        "strict": lambda x: strict.asarray(np.asarray(x, np.float32)),
    }[request.param]


def topk(q, k, w, count, backend="reference", **more):
    return dsv4_indexer_topk(
        q, k, w, count, **{"compress_ratio": R, "softmax_scale": SCALE, "backend": backend, **more}
    )


# ---------------------------------------------------------------- the selection alone


def test_masked_is_worse_than_any_score(kind):
    got = select_indexer_topk(kind([[-5.0, -INF, -INF]]), 4)
    assert to_numpy(got).tolist() == [[0, -1, -1, -1]]


def test_ties_go_to_the_smaller_id(kind):
    scores = np.zeros(8320)
    winners = np.random.default_rng(0).permutation(8320)[:100]
    scores[winners] = np.arange(1, 101)
    got = to_numpy(select_indexer_topk(kind(scores), 2048))
    losers = np.setdiff1d(np.arange(8320), winners)[: 2048 - 100]
    check_equal(got, np.sort(np.r_[winners, losers]).astype(np.int32))
    by_score = to_numpy(select_indexer_topk(kind(scores), 2048, order="score"))
    check_equal(by_score, np.r_[winners[::-1], losers].astype(np.int32))
    for order in ("id", "score"):
        assert to_numpy(select_indexer_topk(kind(np.zeros(8320)), 512, order=order)).tolist() == list(range(512))


def test_zeros_of_both_signs_tie(kind):
    scores = kind([-0.0, 0.0, -0.0, 1.0, 0.0])
    assert to_numpy(select_indexer_topk(scores, 3)).tolist() == [0, 1, 3]
    assert to_numpy(select_indexer_topk(scores, 5, order="score")).tolist() == [3, 0, 1, 2, 4]


def test_nan_and_infinities(kind):
    rows = kind([[NAN, 1, 2, -INF, 3], [NAN] * 5, [1, INF, 5, INF, -INF], [-INF] * 5, [-NAN, -1, NAN, -INF, -2]])
    ids = to_numpy(select_indexer_topk(rows, 4))
    assert ids.tolist() == [[1, 2, 4, -1], [-1] * 4, [0, 1, 2, 3], [-1] * 4, [1, 4, -1, -1]]
    ids, values = map(to_numpy, select_indexer_topk(rows, 4, order="score", return_scores=True))
    assert ids.tolist() == [[4, 2, 1, -1], [-1] * 4, [1, 3, 2, 0], [-1] * 4, [1, 4, -1, -1]]
    check_equal(
        values,
        np.array(
            [[3, 2, 1, -INF], [-INF] * 4, [INF, INF, 5, 1], [-INF] * 4, [-1, -2, -INF, -INF]], values.dtype
        ),
    )


def test_scores_outside_the_half_range(kind):
    assert to_numpy(select_indexer_topk(kind(-70000.0 - np.arange(1000)), 64)).tolist() == list(range(64))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 4), (7,), (2, 3, 4)])
@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_width_is_always_topk(kind, shape, count):
    scores = kind(np.ones(shape))
    ids, values = select_indexer_topk(scores, count, return_scores=True)
    want = np.full((*shape[:-1], count), -1, np.int32)
    want[..., : shape[-1]] = np.arange(min(count, shape[-1]))
    check_like(values, like=scores, dtype=str(values.dtype).rpartition(".")[2], shape=want.shape)
    check_equal(to_numpy(ids), want)
    check_equal(to_numpy(values), np.where(want >= 0, 1, -INF).astype(to_numpy(values).dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_float_dtype(dtype):
    scores = (np.random.default_rng(1).integers(-40, 40, (5, 60)) / 8).astype(DTYPES[dtype])
    ids, values = select_indexer_topk(scores, 17, order="score", return_scores=True)
    check_equal(ids, naive.topk(scores, 17, "score"))
    check_like(values, dtype="float64" if dtype == "float64" else "float32")
    check_equal(values, np.take_along_axis(to_numpy(scores), ids.astype(np.int64), -1).astype(values.dtype))


def test_views_of_scores():
    scores = np.random.default_rng(2).integers(-3, 4, (6, 30)).astype(np.float32)
    want = select_indexer_topk(scores, 9)
    parent = np.full((6, 38), INF, np.float32)
    parent[:, :30] = scores
    check_equal(select_indexer_topk(parent[:, :30], 9), want)
    for name, view in views(scores):
        kept = view.copy()
        check_equal(select_indexer_topk(view, 9), want)
        assert np.array_equal(view, kept), name


VALUES = [0.0, -0.0, 1.0, -1.0, 2.5, NAN, INF, -INF, 1e-45, -1e-45, 3e38, -3e38, 70000.0, 1.0000001]
HOSTILE = st.sampled_from([float(np.float32(value)) for value in VALUES])


@settings(max_examples=150, deadline=None)
@given(
    scores=hnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 3), st.integers(1, 40)),
        elements=HOSTILE | st.floats(width=32) | st.integers(-3, 3).map(float),
    ),
    count=st.integers(0, 45),
    order=st.sampled_from(["id", "score"]),
    wide=st.booleans(),
)
def test_selection_equals_a_full_sort(scores, count, order, wide):
    want = naive.topk(scores, count, order)
    got, values = select_indexer_topk(
        scores.astype(np.float64) if wide else scores, count, order=order, return_scores=True
    )
    check_equal(got, want)
    at = np.where(want >= 0, want, 0).astype(np.int64)
    assert np.array_equal(values, np.where(want >= 0, np.take_along_axis(scores, at, -1), -INF))


def test_chunks_of_rows_do_not_matter(monkeypatch):
    scores = np.random.default_rng(3).integers(-9, 9, (50, 40)).astype(np.float32)
    want = select_indexer_topk(scores, 12, order="score")
    monkeypatch.setattr(selection, "SELECT_BYTES", 1)
    check_equal(select_indexer_topk(scores, 12, order="score"), want)


# ---------------------------------------------------------------- scores and selection


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["id", "score"])
def test_topk_equals_a_sort_of_the_scores(backend, dtype, order):
    q, k, w = make(4, queries=30, entries=12, dtype=dtype, exact=True)
    scores = np.where(naive.indexer_visible(30, 12, R, 9), naive.indexer_scores(q, k, w, SCALE), -INF)
    ids, values = topk(q, k, w, 5, backend, query_start=9, order=order, return_scores=True)
    check_equal(ids, naive.topk(scores, 5, order))
    at = np.where(ids >= 0, ids, 0).astype(np.int64)
    check_equal(values, np.where(ids >= 0, np.take_along_axis(scores, at, -1), -INF).astype(values.dtype))
    check_equal(topk(q, k, w, 5, backend, query_start=9, order=order), ids)
    check_like(values, dtype="float64" if dtype == "float64" else "float32")


def test_topk_chooses_by_the_bits_of_the_scores(backend):
    q, k, w = make(5, queries=40, entries=600, heads=8, dim=16)
    scores = dsv4_indexer_scores(q, k, w, compress_ratio=R, softmax_scale=SCALE, backend=backend, query_start=2100)
    ids, values = topk(q, k, w, 64, backend, query_start=2100, order="score", return_scores=True)
    check_equal(ids, naive.topk(scores, 64, "score"))
    check_equal(values, np.take_along_axis(scores, ids.astype(np.int64), -1))


def test_fewer_entries_than_topk(backend):
    got = topk(*make(queries=8, entries=2), 512, backend)
    check_like(got, dtype="int32", shape=(2, 8, 512))
    assert (got[:, :, 2:] == -1).all()
    assert got[0, :, :2].tolist() == [[-1, -1]] * 3 + [[0, -1]] * 4 + [[0, 1]]
    empty = topk(*make(queries=3, entries=0), 512, backend)
    check_equal(empty, np.full((2, 3, 512), -1, np.int32))
    assert topk(*make(queries=8, entries=2), 0, backend).shape == (2, 8, 0)
    assert topk(*make(queries=0, entries=2), 3, backend).shape == (2, 0, 3)


def test_a_visible_negative_score_beats_every_masked_one(backend):
    q, k, w = np.ones((1, 9, 1, 1), np.float32), np.full((1, 2, 1), 5, np.float32), -np.ones((1, 9, 1), np.float32)
    ids, values = topk(q, k, w, 4, backend, softmax_scale=1, return_scores=True)
    assert ids[0, 4].tolist() == [0, -1, -1, -1] and values[0, 4].tolist() == [-5, -INF, -INF, -INF]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 6), bad=st.sampled_from([NAN, INF, 1e30, 7.0]))
def test_a_future_token_changes_no_earlier_row(seed, count, bad):
    q, k, w = make(seed, queries=16, entries=4)
    cut = 4 * int(np.random.default_rng(seed).integers(1, 5)) - 1  # token `cut` finishes entry cut // 4
    want = topk(q, k, w, count, return_scores=True)
    q[:, cut:], k[:, cut // 4 :], w[:, cut:] = bad, bad, bad
    got = topk(q, k, w, count, return_scores=True)
    for a, b in zip(got, want, strict=True):
        check_equal(a[:, :cut], b[:, :cut])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_batch_or_chunk(backend, dtype, monkeypatch):
    q, k, w = make(6, batch=3, queries=17, entries=300, heads=16, dim=32, dtype=dtype)
    more = {"query_start": 1183, "order": "score", "return_scores": True}
    want = topk(q, k, w, 40, backend, **more)
    for b in range(3):
        got = topk(q[b : b + 1], k[b : b + 1], w[b : b + 1], 40, backend, **more)
        for a, c in zip(got, want, strict=True):
            check_equal(a, c[b : b + 1])
    for sizes in ((1, 1), (70_000, 100_000), (1 << 30, 1 << 30)) if backend == "reference" else ():
        monkeypatch.setattr(reference, "CHUNK_BYTES", sizes[0])
        monkeypatch.setattr(selection, "SELECT_BYTES", sizes[1])
        for a, c in zip(topk(q, k, w, 40, backend, **more), want, strict=True):
            check_equal(a, c)


def test_views_equal_their_copies(backend):
    inputs = make(7, queries=12, entries=10, heads=4, dim=6)
    want = topk(*inputs, 4, backend, query_start=30, return_scores=True)
    for n in range(3):
        for _, view in views(inputs[n]):
            arguments = [*inputs]
            arguments[n] = view
            for a, c in zip(topk(*arguments, 4, backend, query_start=30, return_scores=True), want, strict=True):
                check_equal(a, c)


# ---------------------------------------------------------------- packed documents


def pack(lengths, ratio, *, padding=3, seed=0):
    """One packed row of documents of these lengths: exact inputs, the four arrays, and where each document lies."""
    entries = [n // ratio for n in lengths]
    q, k, w = make(seed, batch=1, queries=sum(lengths) + padding, entries=sum(entries) + 1, exact=True)
    segments, positions = np.zeros((1, q.shape[1]), np.int32), np.zeros((1, q.shape[1]), np.int32)
    pooled_segments, pooled_positions = np.zeros((1, k.shape[1]), np.int32), np.zeros((1, k.shape[1]), np.int32)
    places, first, first_entry = [], 0, 0
    for number, (n, e) in enumerate(zip(lengths, entries, strict=True), start=1):
        segments[0, first : first + n], positions[0, first : first + n] = number, np.arange(n)
        pooled_segments[0, first_entry : first_entry + e] = number
        pooled_positions[0, first_entry : first_entry + e] = np.arange(e)
        places.append((slice(first, first + n), slice(first_entry, first_entry + e)))
        first, first_entry = first + n, first_entry + e
    documents = {
        "q_segment_ids": segments,
        "q_local_positions": positions,
        "pooled_segment_ids": pooled_segments,
        "pooled_positions": pooled_positions,
    }
    return (q, k, w), documents, places


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 14), max_size=5),
    ratio=st.integers(1, 5),
    count=st.integers(0, 6),
    order=st.sampled_from(["id", "score"]),
    seed=st.integers(0, 10**6),
)
def test_packed_documents_equal_calls_per_document(lengths, ratio, count, order, seed):
    (q, k, w), documents, places = pack(lengths, ratio, seed=seed)
    more = {"compress_ratio": ratio, "order": order, "return_scores": True}
    got = topk(q, k, w, count, **more, **documents)
    for tokens, entries in places:
        alone = topk(q[:, tokens], k[:, entries], w[:, tokens], count, **more)
        want = np.where(alone[0] >= 0, alone[0] + entries.start, -1).astype(np.int32)
        check_equal(got[0][:, tokens], want)
        check_equal(got[1][:, tokens], alone[1])
    assert (got[0][:, sum(lengths) :] == -1).all() and (got[1][:, sum(lengths) :] == -INF).all()


def test_one_document_is_the_causal_rule(backend):
    (q, k, w), documents, _ = pack([23], R, padding=0)
    want = topk(q, k[:, :5], w, 3, backend)
    check_equal(topk(q, k, w, 3, backend, **documents), want)
    wide = {name: x.astype(np.int64) for name, x in documents.items()}
    check_equal(topk(q, k, w, 3, backend, query_start=5, **wide), want)


def test_another_document_reaches_nothing(backend):
    (q, k, w), documents, places = pack([9, 12], R)
    want = topk(q, k, w, 3, backend, **documents)
    q[:, places[1][0]], k[:, places[1][1]] = NAN, NAN
    check_equal(topk(q, k, w, 3, backend, **documents)[:, :9], want[:, :9])


def test_partial_document_arrays_are_refused():
    (q, k, w), documents, _ = pack([9, 12], R)
    for name in documents:
        with pytest.raises(ValueError, match=rf"^{name}: expected all of .* or none"):
            topk(q, k, w, 3, **{**documents, name: None})
        with pytest.raises(TypeError, match=rf"^{name}: expected dtype int32 or int64, got float32"):
            topk(q, k, w, 3, **{**documents, name: documents[name].astype(np.float32)})
        with pytest.raises(ValueError, match=rf"^{name}: expected shape"):
            topk(q, k, w, 3, **{**documents, name: documents[name][:, 1:]})


# ---------------------------------------------------------------- memory, libraries, errors


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "queries": 4096, "entries": 4096, "heads": 2, "dim": 4},
        {"batch": 1, "queries": 3, "entries": 262144, "heads": 64, "dim": 8, "dtype": "bfloat16"},
        {"batch": 1, "queries": 2, "entries": 262144, "heads": 4, "dim": 8, "dtype": "float64"},
    ],
)
def test_memory_is_bounded(sizes):
    inputs = make(8, **sizes)
    tracemalloc.start()
    try:
        got = topk(*inputs, 64, query_start=2**20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - got.nbytes < 256 * 2**20
    assert (got >= 0).all()


def test_array_api_strict():
    inputs = make(9, queries=20, entries=6, exact=True)
    wrapped = [strict.asarray(x) for x in inputs]
    got = topk(*wrapped, 4, query_start=4, return_scores=True)
    want = topk(*inputs, 4, query_start=4, return_scores=True)
    check_equal(got[0], want[0], like=wrapped[0])
    check_close(got[1], want[1], "indexer", "float32", like=wrapped[0])
    (q, k, w), documents, _ = pack([9, 12], R)
    packed = topk(*map(strict.asarray, (q, k, w)), 3, **{n: strict.asarray(x) for n, x in documents.items()})
    check_equal(packed, topk(q, k, w, 3, **documents), like=wrapped[0])


def test_the_reference_runs_on_torch_tensors():
    torch = pytest.importorskip("torch")
    from dsv4cp.indexer import contract

    inputs = make(10, queries=20, entries=6, exact=True)
    tensors = [torch.from_numpy(x) for x in inputs]
    spec = contract.check_topk(*tensors, 4, R, SCALE, order="score", return_scores=True)
    ids, values = selection.topk(*tensors, (None,) * 4, spec)
    want = topk(*inputs, 4, order="score", return_scores=True)
    check_equal(ids, want[0], like=tensors[0])
    check_equal(values, want[1], like=tensors[0])


def test_bad_input_is_named():
    inputs = make()

    def refused(error, text, *more_positional, **more):
        with pytest.raises(error, match=text):
            topk(*inputs, *(more_positional or (3,)), **more)

    refused(ValueError, r"^topk: expected an integer of at least 0, got -1", -1)
    refused(TypeError, r"^topk: expected an integer, got float", 2.0)
    refused(TypeError, r"^topk: expected an integer, got bool", True)
    refused(ValueError, r"^order: expected 'id' or 'score', got 'best'", order="best")
    refused(TypeError, r"^order: expected a string", order=1)
    refused(TypeError, r"^return_scores: expected True or False, got int", return_scores=1)
    refused(ValueError, r"^backend: expected one of", backend="torch")
    refused(RuntimeError, r"^dsv4_indexer_topk: backend", backend="cudnn")
    with pytest.raises(TypeError, match=r"^scores: expected dtype .* got int64"):
        select_indexer_topk(np.arange(5), 2)
    with pytest.raises(ValueError, match=r"^scores: expected shape \[..., P\], got \[\]"):
        select_indexer_topk(np.array(1.0), 2)
    with pytest.raises(TypeError, match=r"^scores: expected an array, got list"):
        select_indexer_topk([1.0], 2)
    with pytest.raises(TypeError, match=r"masked|MaskedArray"):
        select_indexer_topk(np.ma.masked_array([1.0]), 2)


def test_local_positions_at_the_ends_of_int64():
    """The last token's successor does not wrap to a negative position that would see nothing."""
    x = np.ones((1, 3, 1, 4)), np.ones((1, 2, 4)), np.ones((1, 3, 1))
    positions = np.array([[2**63 - 1, 2**63 - 2, -(2**63)]])
    ones = np.ones((1, 3), np.int64)
    ids = dsv4_indexer_topk(
        *x, 2, compress_ratio=1, softmax_scale=1.0, q_segment_ids=ones, q_local_positions=positions,
        pooled_segment_ids=ones[:, :2], pooled_positions=np.array([[0, 5]]),
    )  # fmt: skip
    check_equal(ids, np.array([[[0, 1], [0, 1], [-1, -1]]], np.int32))
