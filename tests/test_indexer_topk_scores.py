"""dsv4_indexer_topk_scores, its gradient, and extract_indexer_topk_scores."""

from __future__ import annotations

import tracemalloc

import array_api_strict as strict
import numpy as np
import pytest

from dsv4cp import (
    dsv4_indexer_scores,
    dsv4_indexer_topk,
    dsv4_indexer_topk_scores,
    dsv4_indexer_topk_scores_grad,
    extract_indexer_topk_scores,
)
from dsv4cp.indexer import reference
from tests.support import naive
from tests.support.compare import check_close, check_equal, check_like, to_numpy
from tests.support.indexer_data import BACKENDS, DTYPES, ids, make, views

SCALE = 0.125
INF, NAN = np.inf, np.nan


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def scores(q, k, w, indices, backend="reference", **more):
    return dsv4_indexer_topk_scores(
        q, k, w, indices, **{"compress_ratio": 4, "softmax_scale": SCALE, "backend": backend, **more}
    )


def grads(g, q, k, w, indices, backend="reference", **more):
    return dsv4_indexer_topk_scores_grad(
        g, q, k, w, indices, **{"compress_ratio": 4, "softmax_scale": SCALE, "backend": backend, **more}
    )


def oracle(q, k, w, indices):
    return gather(naive.indexer_scores(q, k, w, SCALE), indices)


def gather(table, indices):
    """table[..., ids], -inf outside [0, P), one slot at a time."""
    table = to_numpy(table)
    out = np.full(indices.shape, -INF, table.dtype)
    for at in np.ndindex(*indices.shape):
        if 0 <= indices[at] < table.shape[-1]:
            out[at] = table[(*at[:-1], indices[at])]
    return out


def oracle_grad(g, q, k, w, indices):
    """The dense oracle with each slot's gradient added to its entry."""
    dense = np.zeros((*q.shape[:2], k.shape[1]))
    for at in np.ndindex(*indices.shape):
        if 0 <= indices[at] < k.shape[1]:
            dense[(*at[:2], indices[at])] += float(g[at])
    return naive.indexer_scores_grad(dense, q, k, w, SCALE, np.ones(dense.shape, bool))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_scores_equal_the_oracle(backend, dtype, id_dtype):
    q, k, w = make(entries=5, heads=5, dim=7, dtype=dtype)
    indices = ids(entries=5, dtype=id_dtype)
    got = scores(q, k, w, indices, backend)
    check_like(got, dtype="float64" if dtype == "float64" else "float32")
    check_close(got, oracle(q, k, w, indices), "indexer", dtype, like=q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_equals_the_oracle(backend, dtype):
    q, k, w = make(1, entries=5, heads=3, dim=6, dtype=dtype)
    indices = ids(1, entries=5)
    g = np.random.default_rng(2).standard_normal(indices.shape).astype(DTYPES[dtype])
    g[(indices < 0) | (indices >= 5)] = NAN  # ignored where the score is -inf
    wanted = oracle_grad(g, q, k, w, indices)
    for got, want, x in zip(grads(g, q, k, w, indices, backend), wanted, (q, k, w), strict=True):
        check_like(got, like=q, dtype=x.dtype.name, shape=x.shape)
        check_close(got, want, "indexer_grad", dtype)


def test_gradient_by_finite_differences(backend):
    inputs = make(3, batch=1, queries=5, entries=3, heads=2, dim=3, dtype="float64")
    indices = ids(3, batch=1, queries=5, entries=3, slots=4)
    g = np.random.default_rng(4).standard_normal(indices.shape)

    def loss(*x):
        y = scores(*x, indices, backend)
        return float(np.where(np.isfinite(y), y * g, 0).sum())

    for n, got in enumerate(grads(g, *inputs, indices, backend)):
        want = np.zeros_like(inputs[n])
        for at in np.ndindex(*want.shape):
            moved = [[x.copy() for x in inputs] for _ in range(2)]
            moved[0][n][at] += 1e-6
            moved[1][n][at] -= 1e-6
            want[at] = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        assert np.abs(got - want).max() < 1e-7


def test_gradient_of_every_entry_equals_the_dense_gradient(backend):
    from dsv4cp import dsv4_indexer_scores_grad

    q, k, w = make(5, queries=12, entries=3, exact=True)
    indices = dsv4_indexer_topk(q, k, w, 8, compress_ratio=4, softmax_scale=SCALE, backend=backend)
    assert indices.shape[2] > k.shape[1]
    g = np.random.default_rng(6).integers(-3, 4, indices.shape).astype(np.float32)
    dense = np.zeros((2, 12, 3), np.float32)
    dense[...] = g[..., :3]
    at = {"compress_ratio": 4, "softmax_scale": SCALE, "backend": backend}
    want = dsv4_indexer_scores_grad(dense, q, k, w, **at)
    for a, b in zip(grads(g, q, k, w, indices, backend), want, strict=True):
        check_close(a, b, "indexer_grad", "float32")
    check_equal(
        extract_indexer_topk_scores(dsv4_indexer_scores(q, k, w, **at), indices, backend=backend),
        scores(q, k, w, indices, backend),
    )


def test_a_repeated_id_counts_once_per_slot(backend):
    q, k, w = make(7, batch=1, queries=1, entries=4, exact=True)
    repeated, single = np.array([[[2, 2, -1, 2]]], np.int32), np.array([[[2]]], np.int32)
    g = np.ones((1, 1, 4), np.float32)
    assert np.unique(scores(q, k, w, repeated, backend)[0, 0, [0, 1, 3]]).size == 1
    for a, b in zip(
        grads(g, q, k, w, repeated, backend), grads(3 * g[..., :1], q, k, w, single, backend), strict=True
    ):
        check_close(a, b, "indexer_grad", "float32")


@pytest.mark.parametrize("bad", [NAN, INF, 3e38])
def test_rows_that_nobody_selects_reach_nothing(backend, bad):
    q, k, w = make(8, entries=6)
    indices = np.where(np.isin(ids(8, entries=6), (0, 3)), -1, ids(8, entries=6)).astype(np.int32)
    g = np.ones(indices.shape, np.float32)
    want, want_grads = scores(q, k, w, indices, backend), grads(g, q, k, w, indices, backend)
    k[:, 0], k[:, 3] = bad, bad
    check_equal(scores(q, k, w, indices, backend), want)
    for a, b in zip(grads(g, q, k, w, indices, backend), want_grads, strict=True):
        check_equal(a, b)
    assert (want_grads[1][:, [0, 3]] == 0).all()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_query_without_entries_gets_zero_and_gives_nothing(backend, bad):
    q, k, w = make(9, entries=4)
    indices = ids(9, entries=4)  # row 4 has no valid id
    g = np.full(indices.shape, 2, np.float32)
    want = grads(g, q, k, w, indices, backend)
    q[:, 4], w[:, 4], g[:, 4] = bad, bad, bad
    got = grads(g, q, k, w, indices, backend)
    for a, b in zip(got, want, strict=True):
        check_equal(a, b)
    assert (got[0][:, 4] == 0).all() and (got[2][:, 4] == 0).all()
    assert np.isneginf(scores(q, k, w, indices, backend)[:, 4]).all()


def test_an_id_of_another_batch_row_is_out_of_range(backend):
    q, k, w = make(10, entries=8)
    k[1] = 1e30
    indices = np.full((2, 9, 2), -1, np.int32)
    indices[0, :, 0], indices[0, :, 1] = 9, 1
    assert np.isneginf(scores(q, k, w, indices, backend)[0, :, 0]).all()
    assert (grads(np.ones((2, 9, 2), np.float32), q, k, w, indices, backend)[1][1] == 0).all()


def test_no_row_before_the_buffer_is_read(backend):
    q, k, w = make(11, entries=4)
    guarded = np.full((2, 5, 8), NAN, np.float32)
    guarded[:, 1:] = k
    indices = ids(11, entries=4)
    check_equal(scores(q, guarded[:, 1:], w, indices, backend), scores(q, k, w, indices, backend))
    got = grads(np.ones(indices.shape, np.float32), q, guarded[:, 1:], w, indices, backend)
    assert np.isfinite(got[1]).all() and np.isnan(guarded[:, 0]).all()


@pytest.mark.parametrize("slots", [0, 1, 2, 3, 63, 65, 129, 640, 1152])
def test_slot_widths(backend, slots):
    q, k, w = make(12, batch=1, queries=5, entries=700)
    indices = ids(12, batch=1, queries=5, entries=700, slots=slots) if slots else np.zeros((1, 5, 0), np.int32)
    got = scores(q, k, w, indices, backend)
    check_close(got, oracle(q, k, w, indices), "indexer", "float32")
    g = np.random.default_rng(13).standard_normal(indices.shape).astype(np.float32)
    for a, b in zip(grads(g, q, k, w, indices, backend), oracle_grad(g, q, k, w, indices), strict=True):
        check_close(a, b, "indexer_grad", "float32")


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"entries": 0}, {"heads": 0}, {"dim": 0}])
def test_zero_length_axes(backend, sizes):
    q, k, w = make(**sizes)
    indices = np.zeros((*q.shape[:2], 3), np.int32)
    indices[..., 1:2] = -1
    got = scores(q, k, w, indices, backend)
    check_equal(got, gather(np.zeros((*q.shape[:2], k.shape[1]), np.float32), indices))
    for x, gradient in zip((q, k, w), grads(np.ones_like(got), q, k, w, indices, backend), strict=True):
        check_like(gradient, like=x, dtype="float32", shape=x.shape)
        assert (gradient == 0).all()


def test_views_equal_their_copies(backend):
    inputs = (*make(14, queries=8, entries=6, heads=4, dim=10), ids(14, queries=8, entries=6, slots=6))
    g = np.random.default_rng(15).standard_normal((2, 8, 6)).astype(np.float32)
    want, want_grads = scores(*inputs, backend), grads(g, *inputs, backend)
    for n in range(5):
        for _, view in views((*inputs, g)[n]):
            arguments = [*inputs, g]
            arguments[n] = view
            kept = [x.copy() for x in arguments]
            check_equal(scores(*arguments[:4], backend), want)
            for got, expected in zip(grads(arguments[4], *arguments[:4], backend), want_grads, strict=True):
                check_equal(got, expected)
            for x, y in zip(arguments, kept, strict=True):
                check_equal(x, y)
    flat = np.broadcast_to(np.float32(0.5), g.shape)
    for a, b in zip(grads(flat, *inputs, backend), grads(flat.copy(), *inputs, backend), strict=True):
        check_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_batch_or_chunk(backend, dtype, monkeypatch):
    inputs = make(16, batch=3, queries=21, entries=50, heads=16, dim=32, dtype=dtype)
    indices = ids(16, batch=3, queries=21, entries=50, slots=33)
    g = np.random.default_rng(17).standard_normal(indices.shape).astype(np.float32)
    everything = (*inputs, indices, g)
    want, want_grads = scores(*everything[:4], backend), grads(g, *everything[:4], backend)
    for b in range(3):
        row = [x[b : b + 1] for x in everything]
        check_equal(scores(*row[:4], backend), want[b : b + 1])
        for got, expected in zip(grads(row[4], *row[:4], backend), want_grads, strict=True):
            check_equal(got, expected[b : b + 1])
    for size in (1, 70_000, 1 << 30) if backend == "reference" else ():
        monkeypatch.setattr(reference, "CHUNK_BYTES", size)
        check_equal(scores(*everything[:4], backend), want)
        for got, expected in zip(grads(g, *everything[:4], backend), want_grads, strict=True):
            check_equal(got, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sizes", [{"queries": 2048, "entries": 600, "heads": 4, "dim": 48}, {"queries": 5, "entries": 262144, "dim": 128}]
)
def test_memory_is_bounded(backend, dtype, sizes):
    inputs = make(18, batch=1, **sizes, dtype=dtype)
    spread = np.arange(sizes["queries"])[:, None] * 7 + np.arange(512) * (sizes["entries"] // 512)
    indices = (spread % sizes["entries"])[None].astype(np.int32)
    g = np.ones(indices.shape, np.float32)
    tracemalloc.start()
    try:
        forward = scores(*inputs, indices, backend)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak - forward.nbytes < 256 * 2**20
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        backward = grads(g, *inputs, indices, backend)
        peak = tracemalloc.get_traced_memory()[1] - held
        assert peak - sum(x.nbytes for x in backward) < 256 * 2**20
    finally:
        tracemalloc.stop()


def test_array_api_strict():
    inputs, indices = make(19, entries=5), ids(19, entries=5)
    g = np.random.default_rng(20).standard_normal(indices.shape).astype(np.float32)
    wrapped = [strict.asarray(x) for x in (*inputs, indices)]
    check_close(scores(*wrapped), scores(*inputs, indices), "indexer", "float32", like=wrapped[0])
    for a, b in zip(grads(strict.asarray(g), *wrapped), grads(g, *inputs, indices), strict=True):
        check_close(a, b, "indexer_grad", "float32", like=wrapped[0])
    logits = np.random.default_rng(21).standard_normal((2, 9, 5))
    check_equal(
        extract_indexer_topk_scores(strict.asarray(logits), wrapped[3]),
        extract_indexer_topk_scores(logits, indices),
        like=wrapped[0],
    )


# ---------------------------------------------------------------- extract


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_extract_equals_a_loop(backend, dtype, id_dtype):
    logits = np.random.default_rng(22).standard_normal((2, 9, 5)).astype(DTYPES[dtype])
    logits[0, 0, 1:3] = NAN, INF
    indices = ids(22, entries=5, dtype=id_dtype)
    got = extract_indexer_topk_scores(logits, indices, backend=backend)
    check_like(got, like=logits, dtype=dtype)
    check_equal(got, gather(logits, indices), same_dtype=False)
    for n, x in enumerate((logits, indices)):
        for _, view in views(x):
            check_equal(extract_indexer_topk_scores(*((view, indices), (logits, view))[n], backend=backend), got)


def test_extract_of_other_ranks_and_empty_axes(backend):
    assert extract_indexer_topk_scores(np.array([1.0, 2.0]), np.array([1, -1, 0])).tolist() == [2, -INF, 1]
    empty = extract_indexer_topk_scores(np.zeros((2, 0), np.float32), np.zeros((2, 3), np.int64), backend=backend)
    check_equal(empty, np.full((2, 3), -INF, np.float32))
    assert extract_indexer_topk_scores(np.zeros((2, 4)), np.zeros((2, 0), np.int32), backend=backend).shape == (2, 0)
    assert extract_indexer_topk_scores(np.zeros((0, 4)), np.zeros((0, 3), np.int32), backend=backend).shape == (0, 3)


def test_bad_input_is_named():
    q, k, w = make()
    indices = ids()
    for error, text, value in (
        (TypeError, r"^topk_indices: expected dtype int32 or int64, got float32", indices.astype(np.float32)),
        (ValueError, r"^topk_indices: expected shape \[B=2, S=9, T\], got \[2, 8, 7\]", indices[:, 1:]),
        (TypeError, r"^topk_indices: expected an array, got list", indices.tolist()),
    ):
        with pytest.raises(error, match=text):
            scores(q, k, w, value)
    with pytest.raises(ValueError, match=r"^grad_scores: expected shape \[B=2, S=9, T=7\], got \[2, 9, 3\]"):
        grads(np.ones((2, 9, 3), np.float32), q, k, w, indices)
    with pytest.raises(ValueError, match=r"^topk_indices: expected shape \[2, 9, T\] like logits, got \[9, 7\]"):
        extract_indexer_topk_scores(np.zeros((2, 9, 3)), indices[0])
    with pytest.raises(TypeError, match=r"^logits: expected dtype"):
        extract_indexer_topk_scores(indices, indices)
    for call in (
        lambda name: scores(q, k, w, indices, name),
        lambda name: grads(np.ones(indices.shape, np.float32), q, k, w, indices, name),
        lambda name: extract_indexer_topk_scores(np.zeros((2, 9, 3)), indices, backend=name),
    ):
        with pytest.raises(RuntimeError, match=r"backend 'cudnn'"):
            call("cudnn")
        with pytest.raises(ValueError, match=r"^backend: expected one of .*got 'tilelang'"):
            call("tilelang")
