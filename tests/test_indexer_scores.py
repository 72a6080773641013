"""dsv4_indexer_scores and its gradient."""

from __future__ import annotations

import array_api_strict as strict
import numpy as np
import pytest

from dsv4cp import dsv4_indexer_scores, dsv4_indexer_scores_grad
from dsv4cp.indexer import reference
from tests.support import naive
from tests.support.compare import check_close, check_equal, check_like, to_numpy
from tests.support.indexer_data import BACKENDS, DTYPES, make, views

R, SCALE = 4, 0.125


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def scores(q, k, w, backend="reference", **more):
    return dsv4_indexer_scores(q, k, w, **{"compress_ratio": R, "softmax_scale": SCALE, "backend": backend, **more})


def grads(g, q, k, w, backend="reference", **more):
    return dsv4_indexer_scores_grad(
        g, q, k, w, **{"compress_ratio": R, "softmax_scale": SCALE, "backend": backend, **more}
    )


def oracle(q, k, w, start=0, ratio=R, scale=SCALE):
    visible = naive.indexer_visible(q.shape[1], k.shape[1], ratio, start)
    return np.where(visible, naive.indexer_scores(q, k, w, scale), -np.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 5])
def test_scores_equal_the_oracle(backend, dtype, start):
    q, k, w = make(queries=9, entries=5, heads=5, dim=7, dtype=dtype)
    got = scores(q, k, w, backend, query_start=start)
    check_like(got, dtype="float64" if dtype == "float64" else "float32")
    check_close(got, oracle(q, k, w, start), "indexer", dtype, like=q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 5])
def test_gradient_equals_the_oracle(backend, dtype, start):
    q, k, w = make(1, queries=9, entries=5, heads=3, dim=6, dtype=dtype)
    g = np.random.default_rng(2).standard_normal((2, 9, 5)).astype(DTYPES[dtype])
    visible = naive.indexer_visible(9, 5, R, start)
    g[:, ~visible] = np.nan  # ignored where the score is -inf
    for got, want, x in zip(
        grads(g, q, k, w, backend, query_start=start),
        naive.indexer_scores_grad(g, q, k, w, SCALE, visible),
        (q, k, w),
        strict=True,
    ):
        check_like(got, like=q, dtype=x.dtype.name, shape=x.shape)
        check_close(got, want, "indexer_grad", dtype)


def test_gradient_by_finite_differences(backend):
    inputs = make(3, batch=1, queries=6, entries=2, heads=2, dim=3, dtype="float64")
    ratio = 3
    g = np.random.default_rng(4).standard_normal((1, 6, 2))

    def loss(*x):
        y = scores(*x, backend, compress_ratio=ratio)
        return float(np.where(np.isfinite(y), y * g, 0).sum())

    for n, got in enumerate(grads(g, *inputs, backend, compress_ratio=ratio)):
        want = np.zeros_like(inputs[n])
        for at in np.ndindex(*want.shape):
            moved = [[x.copy() for x in inputs] for _ in range(2)]
            moved[0][n][at] += 1e-6
            moved[1][n][at] -= 1e-6
            want[at] = (loss(*moved[0]) - loss(*moved[1])) / 2e-6
        assert np.abs(got - want).max() < 1e-7


def test_mixed_dtypes_keep_their_own_gradient_dtype(backend):
    q, k, _ = make(dtype="bfloat16")
    w = make(dtype="float32")[2]
    g = np.ones((2, 9, 3), np.float32)
    check_close(scores(q, k, w, backend), oracle(q, k, w), "indexer", "float32")
    assert [x.dtype.name for x in grads(g, q, k, w, backend)] == ["bfloat16", "bfloat16", "float32"]


def test_unfinished_groups_are_invisible(backend):
    q, k, w = make(queries=9, entries=2)
    got = scores(q, k, w, backend)
    assert np.isfinite(got).sum(axis=2).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2
    later = scores(q, k, w, backend, query_start=3, query_total_len=12)
    assert np.isfinite(later).sum(axis=2).tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 2]] * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_future_token_changes_no_earlier_row(backend, bad):
    q, k, w = make(queries=12, entries=3)
    g = np.random.default_rng(5).standard_normal((2, 12, 3)).astype(np.float32)
    before, before_grads = scores(q, k, w, backend), grads(g, q, k, w, backend)
    q[:, 11], k[:, 2], w[:, 11] = bad, bad, bad  # token 11 finishes entry 2, which only query 11 sees
    check_equal(scores(q, k, w, backend)[:, :11], before[:, :11])
    g[:, 11] = 0
    g_before = g.copy()
    g_before[:, 11] = 0
    got = grads(g, q, k, w, backend)
    for n in (0, 2):
        check_equal(got[n][:, :11], before_grads[n][:, :11])
    assert np.isfinite(got[0][:, :11]).all() and np.isfinite(got[2][:, :11]).all()


def test_a_bad_query_reaches_no_entry_that_it_does_not_see(backend):
    q, k, w = make(queries=12, entries=3)
    g = np.ones((2, 12, 3), np.float32)
    want = grads(g[:, :0], q[:, :0], k, w[:, :0], backend)[1]
    assert (want == 0).all()
    q[:, 4], w[:, 5] = np.nan, np.inf  # both see entry 0 only
    got = grads(g, q, k, w, backend)[1]
    assert not np.isfinite(got[:, 0]).any()
    clean_q, clean_w = q.copy(), w.copy()
    clean_q[:, 4], clean_w[:, 5] = 0, 0
    check_equal(got[:, 1:], grads(g, clean_q, k, clean_w, backend)[1][:, 1:])
    q[:, 0], w[:, 1] = np.nan, np.nan  # see nothing
    empty = grads(g, q, k, w, backend)
    assert (empty[0][:, :3] == 0).all() and (empty[2][:, :3] == 0).all()


def test_a_visible_nan_is_not_hidden(backend):
    q, k, w = make(queries=8, entries=2)
    k[:, 0, 3] = np.nan
    got = scores(q, k, w, backend)
    assert np.isnan(got[:, 3:, 0]).all() and np.isneginf(got[:, :3]).all()
    grad_q = grads(np.ones((2, 8, 2), np.float32), q, k, w, backend)[0]
    assert np.isnan(grad_q[:, 3:, :, 3]).all() and (grad_q[:, :3] == 0).all()


def test_relu_has_no_gradient_at_zero(backend):
    q, k, w = make(batch=1, queries=8, entries=2)
    q[:, 3:5] = 0
    got = grads(np.ones((1, 8, 2), np.float32), q, k, w, backend)
    assert (got[0][:, 3:5] == 0).all() and (got[2][:, 3:5] == 0).all()


def test_views_equal_their_copies(backend):
    inputs = make(6, queries=8, entries=6, heads=4, dim=10)
    g = np.random.default_rng(7).standard_normal((2, 8, 6)).astype(np.float32)
    want, want_grads = scores(*inputs, backend, query_start=20), grads(g, *inputs, backend, query_start=20)
    for n in range(4):
        for _, view in views((*inputs, g)[n]):
            arguments = [*inputs, g]
            arguments[n] = view
            kept = [x.copy() for x in arguments]
            check_equal(scores(*arguments[:3], backend, query_start=20), want)
            gradients = grads(arguments[3], *arguments[:3], backend, query_start=20)
            for got, expected in zip(gradients, want_grads, strict=True):
                check_equal(got, expected)
            for x, y in zip(arguments, kept, strict=True):
                check_equal(x, y)


def test_broadcast_incoming_gradient(backend):
    inputs = make(8, queries=8, entries=4)
    g = np.broadcast_to(np.float32(0.5), (2, 8, 4))
    for got, want in zip(grads(g, *inputs, backend), grads(g.copy(), *inputs, backend), strict=True):
        check_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_batch_or_chunk(backend, dtype, monkeypatch):
    q, k, w = make(9, batch=3, queries=21, entries=300, heads=16, dim=32, dtype=dtype)
    start = 1100  # the diagonal crosses the second block of entries
    want = scores(q, k, w, backend, query_start=start)
    assert np.isfinite(want).any(axis=(0, 1)).sum() == 280
    for b in range(3):
        check_equal(scores(q[b : b + 1], k[b : b + 1], w[b : b + 1], backend, query_start=start), want[b : b + 1])
    for i in (0, 7, 20):
        got = scores(q[:, i : i + 1], k, w[:, i : i + 1], backend, query_start=start + i)
        check_equal(got, want[:, i : i + 1])
    if backend == "reference":
        for size in (1, 70_000, 1 << 30):
            monkeypatch.setattr(reference, "CHUNK_BYTES", size)
            check_equal(scores(q, k, w, backend, query_start=start), want)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"queries": 0},
        {"entries": 0},
        {"heads": 0},
        {"dim": 0},
        {"queries": 1, "entries": 1, "heads": 1, "dim": 1},
    ],
)
def test_zero_and_one_length_axes(backend, sizes):
    q, k, w = make(**sizes)
    got = scores(q, k, w, backend, query_start=40)
    check_close(got, naive.indexer_scores(q, k, w, SCALE), "indexer", "float32")
    for x, gradient in zip((q, k, w), grads(np.ones_like(got), q, k, w, backend, query_start=40), strict=True):
        check_like(gradient, like=x, dtype="float32", shape=x.shape)
        assert np.isfinite(gradient).all()


def test_entries_beyond_the_sequence_are_invisible(backend):
    q, k, w = make(queries=5, entries=9)
    k[:, 1:] = np.nan
    assert np.isfinite(scores(q, k, w, backend)[..., 0]).sum() == 2 * 2
    assert np.isneginf(scores(q, k, w, backend)[..., 1:]).all()
    gradient = grads(np.full((2, 5, 9), np.nan, np.float32), q, np.nan_to_num(k), w, backend)
    assert (gradient[1][:, 1:] == 0).all() and (gradient[0][:, :3] == 0).all()


@pytest.mark.parametrize("heads", [1, 3, 31, 64])
def test_head_counts_equal_sums_of_single_heads(backend, heads):
    q, k, w = make(10, batch=1, queries=4, entries=4, heads=heads, exact=True)
    parts = [scores(q[:, :, h : h + 1], k, w[:, :, h : h + 1], backend, query_start=12) for h in range(heads)]
    check_close(scores(q, k, w, backend, query_start=12), sum(parts), "indexer")


@pytest.mark.parametrize("scale", [0.125, np.float64(0.125), np.float32(0.125), np.array(0.125), np.float16(0.125)])
def test_any_host_scalar_is_a_scale(backend, scale):
    inputs = make()
    check_equal(scores(*inputs, backend, softmax_scale=scale), scores(*inputs, backend))
    check_equal(
        scores(*inputs, backend, compress_ratio=np.int64(4), query_start=np.int32(0), query_total_len=np.uint8(9)),
        scores(*inputs, backend),
    )


def test_array_api_strict():
    inputs = make(11, queries=8, entries=2)
    g = np.random.default_rng(12).standard_normal((2, 8, 2)).astype(np.float32)
    wrapped = [strict.asarray(x) for x in inputs]
    got = scores(*wrapped)
    check_close(got, scores(*inputs), "indexer", "float32", like=wrapped[0])
    for a, b in zip(grads(strict.asarray(g), *wrapped), grads(g, *inputs), strict=True):
        check_close(a, b, "indexer_grad", "float32", like=wrapped[0])
    assert to_numpy(got).dtype == np.float32


def test_bad_input_is_named():
    q, k, w = make()

    def refused(error, text, *arguments, **more):
        with pytest.raises(error, match=text):
            scores(*arguments, **more)

    refused(ValueError, r"^q: expected shape \[B, S, I, E\], got \[9, 4, 8\]", q[0], k, w)
    refused(ValueError, r"^pooled_kv: expected shape \[B=2, P, E=8\], got \[1, 3, 8\]", q, k[:1], w)
    refused(ValueError, r"^weights: expected shape \[B=2, S=9, I=4\], got \[2, 9, 3\]", q, k, w[..., :3])
    refused(TypeError, r"^q: expected dtype .*got int32", q.astype(np.int32), k, w)
    refused(TypeError, r"^weights: expected an array, got list", q, k, w.tolist())
    refused(TypeError, r"one library", q, strict.asarray(k), w)
    refused(ValueError, r"^compress_ratio: .*at least 1, got 0", q, k, w, compress_ratio=0)
    refused(TypeError, r"^compress_ratio: expected an integer, got float", q, k, w, compress_ratio=4.0)
    refused(TypeError, r"^softmax_scale: expected a real number.*got str", q, k, w, softmax_scale="1")
    for scale in (np.nan, np.inf, -np.inf, 1e39, -(10**39)):
        refused(ValueError, r"^softmax_scale: expected a finite number.*got", q, k, w, softmax_scale=scale)
    refused(ValueError, r"^compress_ratio: .*at most \d+, got", q, k, w, compress_ratio=2**63)
    refused(ValueError, r"^query_start: .*at most \d+, got", q, k, w, query_start=2**63)
    refused(ValueError, r"^query_start: .*got -1", q, k, w, query_start=-1)
    late = {"query_start": 3, "query_total_len": 11}
    refused(ValueError, r"^query_total_len: expected at least .*3 \+ 9, got 11", q, k, w, **late)
    refused(ValueError, r"^backend: expected one of .*got 'gpu'", q, k, w, backend="gpu")
    refused(RuntimeError, r"^dsv4_indexer_scores: backend 'cudnn'", q, k, w, backend="cudnn")
    with pytest.raises(ValueError, match=r"^grad_scores: expected shape \[B=2, S=9, P=3\], got \[2, 9, 4\]"):
        grads(np.ones((2, 9, 4), np.float32), q, k, w)
    with pytest.raises(TypeError, match=r"^grad_scores: expected dtype"):
        grads(np.ones((2, 9, 3), np.int32), q, k, w)


def test_torch_tensors_are_sent_to_torch_ops():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"dsv4cp\.torch_ops\.dsv4_indexer_scores"):
        scores(*map(torch.from_numpy, make()))


def test_the_reference_runs_on_torch_tensors():
    torch = pytest.importorskip("torch")
    from dsv4cp.indexer import contract

    inputs = make(13, queries=8, entries=2)
    g = np.random.default_rng(14).standard_normal((2, 8, 2)).astype(np.float32)
    tensors = [torch.from_numpy(x) for x in inputs]
    spec = contract.check_scores(*tensors, R, SCALE)
    check_close(reference.scores(*tensors, spec), scores(*inputs), "indexer", "float32", like=tensors[0])
    for a, b in zip(reference.scores_grad(torch.from_numpy(g), *tensors, spec), grads(g, *inputs), strict=True):
        check_close(a, b, "indexer_grad", "float32", like=tensors[0])
