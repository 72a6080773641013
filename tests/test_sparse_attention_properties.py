"""Properties of sparse attention on random ids: dense oracle, slot order, independent rows, causality, plans."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4cp
from dsv4cp import dense_attention_topk, dsv4_sparse_attention, dsv4_sparse_attention_grad
from tests.support import naive
from tests.support.attention_ways import DTYPES, NUMPY
from tests.support.compare import check_close, check_equal

SCALE = 0.5
few = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw, dtypes=("float32", "float64", "bfloat16", "float16")):
    """(grad_out, q, kv, sinks, ids) of any small shape; ids in, out of and around [0, K), sinks infinite at times."""
    b, s, h, d = (draw(st.integers(1, n)) for n in (3, 5, 4, 9))
    k, t = draw(st.integers(0, 7)), draw(st.integers(0, 9))
    dtype = DTYPES[draw(st.sampled_from(dtypes))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    floats = [rng.standard_normal(shape).astype(dtype) for shape in ((b, s, h, d), (b, s, h, d), (b, k, d))]
    sinks = rng.standard_normal(h).astype(np.float64 if dtype == np.float64 else np.float32)
    sinks[rng.random(h) < 0.2] = draw(st.sampled_from([np.inf, -np.inf, 2e38, 0.0]))
    ids = rng.integers(-2, k + 2, (b, s, t)).astype(draw(st.sampled_from([np.int32, np.int64])))
    ids[rng.random((b, s)) < 0.2] = -1
    return *floats, sinks, ids


@few
@given(cases())
def test_equals_the_dense_oracle_and_the_definition(case):
    _, q, kv, sinks, ids = case
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse", q.dtype.name)
    check_close(out, dense_attention_topk(q, kv, sinks, ids, SCALE), "attention")


@few
@given(cases())
def test_gradient_equals_the_definition(case):
    for got, want in zip(NUMPY.backward(*case, SCALE), naive.attention_grad(*case, SCALE), strict=True):
        check_close(got, want, "attention_grad", case[1].dtype.name)


@few
@given(cases(), st.integers(0, 2**32))
def test_slot_order_does_not_matter(case, seed):
    g, q, kv, sinks, ids = case
    shuffled = np.random.default_rng(seed).permuted(ids, axis=-1)
    got, want = (NUMPY.forward(q, kv, sinks, x, SCALE) for x in (shuffled, ids))
    check_close(got[0], want[0], "attention")
    check_close(got[1], want[1], "lse", q.dtype.name)
    got = NUMPY.backward(g, q, kv, sinks, shuffled, SCALE)
    for a, b in zip(got, NUMPY.backward(g, q, kv, sinks, ids, SCALE), strict=True):
        check_close(a, b, "attention_grad", q.dtype.name)


@few
@given(cases(), st.data())
def test_batch_rows_are_independent(case, data):
    g, q, kv, sinks, ids = case
    row = data.draw(st.integers(0, len(q) - 1))
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    grad_q, grad_kv, _ = NUMPY.backward(g, q, kv, sinks, ids, SCALE)
    one = [x[row : row + 1] for x in (g, q, kv)]
    got = NUMPY.forward(*one[1:], sinks, ids[row : row + 1], SCALE)
    check_equal(got[0][0], out[row])
    check_equal(got[1][0], lse[row])
    got = NUMPY.backward(*one, sinks, ids[row : row + 1], SCALE)
    check_equal(got[0][0], grad_q[row])
    check_equal(got[1][0], grad_kv[row])
    others = [np.full_like(x, np.nan) for x in (q, kv)]
    for other, x in zip(others, (q, kv), strict=True):
        other[row] = x[row]
    check_equal(NUMPY.forward(*others, sinks, ids, SCALE)[0][row], out[row])


@few
@given(cases(), st.integers(0, 4))
def test_neighbouring_queries_do_not_matter(case, at):
    """Without every other query, one keeps its bits."""
    _, q, kv, sinks, ids = case
    at = min(at, q.shape[1] - 1)
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    saved = NUMPY.forward(q[:, at : at + 1], kv, sinks, ids[:, at : at + 1], SCALE)
    check_equal(saved[0][:, 0], out[:, at])
    check_equal(saved[1][:, 0], lse[:, at])


@few
@given(st.integers(2, 14), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32), st.data())
def test_a_future_token_changes_no_earlier_row(length, window, ratio, seed, data):
    rng = np.random.default_rng(seed)
    t = data.draw(st.integers(0, length - 2))
    pooled = length // ratio
    ids = dsv4cp.build_dsv4_sparse_topk_indices(
        batch_size=1, seq_len=length, key_len=length + pooled, window_size=window, compress_ratio=ratio, n_pooled=pooled
    )

    def run(tokens):
        q, raw = tokens[:, : 2 * 4].reshape(1, length, 2, 4), tokens[None, :, 8:]
        entries = raw[:, : pooled * ratio].reshape(1, pooled, ratio, 4).mean(2)
        return NUMPY.forward(q, np.concatenate([raw, entries], 1), np.zeros(2, np.float32), ids, SCALE)

    tokens = rng.standard_normal((length, 12)).astype(np.float32)
    changed = tokens.copy()
    changed[t + 1 :] = rng.choice([np.nan, 1e30, 3.0])
    with np.errstate(invalid="ignore", over="ignore"):
        for got, want in zip(run(changed), run(tokens), strict=True):
            check_equal(got[:, : t + 1], want[:, : t + 1])


@few
@given(cases(dtypes=("float32",)))
def test_plan_then_attend_equals_attend(case):
    g, q, kv, sinks, ids = case
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, kv.shape[1])
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    planned = dsv4_sparse_attention(q, kv, sinks, None, SCALE, plan=plan, return_lse=True)
    for got, want in zip(planned, (out, lse), strict=True):
        check_equal(got, want)
    got = dsv4_sparse_attention_grad(g, q, kv, sinks, None, out, lse, SCALE, plan=plan)
    for a, b in zip(got, NUMPY.backward(g, q, kv, sinks, ids, SCALE), strict=True):
        check_equal(a, b)


@few
@given(cases(dtypes=("float64",)), st.floats(-3, 3))
def test_gradient_is_linear_in_what_comes_in(case, factor):
    g, q, kv, sinks, ids = case
    one = NUMPY.backward(g, q, kv, sinks, ids, SCALE)
    for a, b in zip(NUMPY.backward(factor * g, q, kv, sinks, ids, SCALE), one, strict=True):
        check_close(a, factor * b, "attention_grad")


@few
@given(cases(dtypes=("float64",)), st.floats(-5, 5))
def test_moving_every_logit_changes_only_lse(case, shift):
    """One more channel that is 1 in q and shift / scale in every key, and sinks moved by the same shift."""
    _, q, kv, sinks, ids = case
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    wide_q = np.concatenate([q, np.ones((*q.shape[:3], 1))], -1)
    wide_kv = np.concatenate([kv, np.full((*kv.shape[:2], 1), shift / SCALE)], -1)
    moved, moved_lse = NUMPY.forward(wide_q, wide_kv, sinks + shift, ids, SCALE)
    check_close(moved[..., :-1], out, "attention")
    np.testing.assert_allclose(moved_lse, lse + shift, rtol=1e-10, atol=1e-10)
