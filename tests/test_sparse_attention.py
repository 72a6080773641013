"""Sparse attention forward: golden values, the float64 oracle, masks, sinks, views, special values, plans."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import dsv4cp
from dsv4cp import dense_attention_topk, dsv4_sparse_attention
from tests.support import naive
from tests.support.attention_ways import DTYPES, NUMPY, WAYS, inputs, one_channel, sealed
from tests.support.compare import check_close, check_equal, check_like, to_numpy

SCALE = 0.25
INF = np.inf


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def channel(out) -> float:
    """Channel 0 of the golden setting; every other channel must be exactly 0."""
    out = to_numpy(out)
    assert (out[..., 1:] == 0).all()
    return float(out[0, 0, 0, 0])


# --- Golden values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "want_out", "want_lse"),
    [
        pytest.param([0, 1, -1, -1], 0.57611688, 1.31326169, id="two keys"),
        pytest.param([3, 4, 7, -5], 2.85772238, 3.0, id="out of range"),
        pytest.param([1, 1, -1, -1], 0.84463760, 1.69314718, id="repeated"),
        *[pytest.param([-1] * n + [0, 1], 0.57611688, 1.31326169, id=f"{n} masked first") for n in (16, 32, 64, 128)],
    ],
)
def test_golden_values(way, ids, want_out, want_lse):
    _, q, kv, sinks, ids = one_channel(ids)
    out, lse = way.forward(q, kv, sinks, ids, 1)
    assert channel(out) == pytest.approx(want_out, rel=2e-6)
    assert float(to_numpy(lse)[0, 0, 0]) == pytest.approx(want_lse, rel=1e-6)
    assert channel(way.dense(q, kv, sinks, ids, 1)) == pytest.approx(want_out, rel=2e-6)


def test_golden_nan_in_unselected_rows(way):
    _, q, kv, sinks, ids = one_channel([1, 2, -1, -1])
    kv[0, [0, 3]] = np.nan
    out, lse = way.forward(q, kv, sinks, ids, 1)
    assert channel(out) == pytest.approx(1.57521038, rel=2e-6)
    assert float(to_numpy(lse)[0, 0, 0]) == pytest.approx(2.31326169, rel=1e-6)
    assert channel(way.dense(q, kv, sinks, ids, 1)) == pytest.approx(1.57521038, rel=2e-6)


@pytest.mark.parametrize("sink", [0.0, -INF, INF, 2e38, -2e38, np.nan])
def test_row_without_keys(way, sink):
    _, q, kv, sinks, ids = inputs(s=4)
    sinks = np.full_like(sinks, sink)
    empty, full = ids.copy(), ids.copy()
    empty[0, 1], full[0, 1] = -1, 3
    out, lse = way.forward(q, kv, sinks, empty, SCALE)
    assert (to_numpy(out)[0, 1] == 0).all() and (to_numpy(lse)[0, 1] == -INF).all()
    assert (to_numpy(way.dense(q, kv, sinks, empty, SCALE))[0, 1] == 0).all()
    other, other_lse = way.forward(q, kv, sinks, full, SCALE)
    for row in (0, 2, 3):
        check_equal(out[0, row, ...], other[0, row, ...])
        check_equal(lse[0, row, ...], other_lse[0, row, ...])


def test_id_of_another_batch_row(way):
    _, q, kv, sinks, ids = inputs(b=2, k=8)
    kv, ids = kv.copy(), ids.copy()
    kv[1] = 1e30
    ids[0, :, 0], ids[1] = 9, -1
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    without = way.forward(q[:1], kv[:1], sinks, np.where(ids == 9, -1, ids)[:1], SCALE)
    check_equal(out[:1, ...], without[0])
    check_equal(lse[:1, ...], without[1])


def test_masked_slots_read_no_row_outside_the_keys(way):
    _, q, kv, sinks, ids = inputs()
    around = np.full((kv.shape[0], kv.shape[1] + 2, kv.shape[2]), np.nan, kv.dtype)
    around[:, 1:-1] = kv
    out, lse = way.forward(q, around[:, 1:-1], sinks, ids, SCALE)
    check_equal(out, way.forward(q, kv, sinks, ids, SCALE)[0])
    assert np.isfinite(to_numpy(out)).all() and not np.isnan(to_numpy(lse)).any()


def test_more_slots_than_rows(way):
    _, q, kv, sinks, _ = inputs(k=8)
    ids = np.full((2, 5, 640), -1)
    ids[..., 600:608] = range(8)
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = way.forward(q, kv, sinks, ids[..., 600:608], SCALE)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")


@pytest.mark.parametrize("slots", [1, 2, 3, 63, 65, 129, 192, 640, 705, 1152])
def test_slot_widths(way, slots):
    _, q, kv, sinks, ids = inputs(b=1, s=3, h=2, d=8, k=40, t=slots)
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 31, 32, 33, 48, 64, 96, 128])
def test_head_counts(way, heads):
    _, q, kv, sinks, ids = inputs(b=1, s=3, h=heads)
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    for h in range(heads):
        one_out, one_lse = way.forward(q[:, :, h : h + 1], kv, sinks[h : h + 1], ids, SCALE)
        check_close(out[:, :, h : h + 1, ...], to_numpy(one_out), "attention")
        check_close(lse[:, :, h : h + 1], to_numpy(one_lse), "lse")


# --- The oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_matches_the_oracle(way, dtype, id_dtype):
    if not way.halves and dtype in ("float16", "bfloat16"):
        pytest.skip("the library has no such dtype")
    _, q, kv, sinks, ids = inputs(h=4, d=24, t=11, dtype=DTYPES[dtype])
    ids = ids.astype(id_dtype)
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_like(out, like=way.array(q), dtype=dtype)
    check_like(lse, like=way.array(q), dtype="float64" if dtype == "float64" else "float32")
    check_close(out, want_out, "attention", dtype)
    check_close(lse, want_lse, "lse", dtype)
    dense = way.dense(q, kv, sinks, ids, SCALE)
    check_like(dense, like=way.array(q), dtype=dtype)
    check_close(dense, want_out, "attention", dtype)


@pytest.mark.parametrize("d", [512, 200])
def test_wide_rows(d):
    """Sizes at which the products are taken in blocks of columns."""
    _, q, kv, sinks, ids = inputs(b=1, s=2, h=8, d=d, k=300, t=251)
    out, lse = dsv4_sparse_attention(q, kv, sinks, ids, d**-0.5, return_lse=True)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, d**-0.5)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")


def test_dtypes_of_q_and_kv_may_differ(way):
    _, q, kv, sinks, ids = inputs(dtype=np.float64)
    kv = kv.astype(np.float32)
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_like(out, dtype="float64")
    check_close(out, want_out, "attention", "float64")
    check_close(lse, want_lse, "lse", "float64")
    q, kv = q.astype(np.float32), kv.astype(np.float64)
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    check_like(out, dtype="float32")
    check_like(lse, dtype="float64")
    check_close(out, naive.attention(q, kv, sinks, ids, SCALE)[0], "attention")


def test_p_is_rounded_to_the_input_dtype():
    bf16 = ml_dtypes.bfloat16
    scores = np.linspace(-1, 1, 64).astype(bf16)
    q, ids = scores.reshape(1, 64, 1, 1), np.tile([0, 1], (1, 64, 1))
    kv = np.array([0, 1], bf16).reshape(1, 2, 1)
    out = dsv4_sparse_attention(q, kv, np.zeros(1, np.float32), ids, 1.0).astype(np.float32).ravel()
    s = np.stack([np.zeros(64), scores.astype(np.float64)], -1)
    e = np.exp(s - s.max(-1, keepdims=True))
    total = e.sum(-1) + np.exp(-s.max(-1))
    rounded = (e.astype(bf16).astype(np.float64)[:, 1] / total).astype(bf16).astype(np.float32)
    plain = (e[:, 1] / total).astype(bf16).astype(np.float32)
    check_equal(out, rounded)
    assert (rounded != plain).any()


# --- Sinks, special values -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sink", [INF, -INF, 2e38, -2e38, 85.0, -85.0, 200.0])
def test_sinks(way, sink):
    _, q, kv, sinks, ids = inputs()
    sinks = sinks.copy()
    sinks[1] = sink
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")
    check_close(way.dense(q, kv, sinks, ids, SCALE), want_out, "attention")
    if sink in (INF, 2e38):
        assert (to_numpy(out)[:, :, 1] == 0).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_bad_rows_reach_only_those_who_selected_them(way, bad):
    _, q, kv, sinks, ids = inputs(s=6)
    kv, ids, clean = kv.copy(), ids.copy(), kv.copy()
    ids[ids == 0] = 4
    ids[0, 3, 2] = 0
    kv[:, 0], clean[:, 0] = bad, 1
    with np.errstate(invalid="ignore"):  # query (0, 3) meets it
        out, _ = way.forward(q, kv, sinks, ids, SCALE)
        dense = way.dense(q, kv, sinks, ids, SCALE)
    want, _ = way.forward(q, clean, sinks, ids, SCALE)
    touched = np.zeros(ids.shape[:2], bool)
    touched[0, 3] = True
    check_equal(to_numpy(out)[~touched], to_numpy(want)[~touched])
    check_close(to_numpy(dense)[~touched], to_numpy(want)[~touched], "attention")
    assert np.isnan(to_numpy(out)[0, 3]).any(-1).all() and np.isnan(to_numpy(dense)[0, 3]).all()


def test_bad_query_stays_alone(way):
    _, q, kv, sinks, ids = inputs()
    spoiled = q.copy()
    spoiled[0, 2, 1] = np.nan
    out, want = way.forward(spoiled, kv, sinks, ids, SCALE)[0], way.forward(q, kv, sinks, ids, SCALE)[0]
    touched = np.zeros(q.shape[:3], bool)
    touched[0, 2, 1] = True
    check_equal(to_numpy(out)[~touched], to_numpy(want)[~touched])
    assert np.isnan(to_numpy(out)[touched]).all()


def test_scores_of_any_size(way):
    _, q, kv, sinks, ids = inputs()
    for factor in (1e4, 1e-30, 0.0, -3.0):
        out, lse = way.forward(q, kv, sinks, ids, factor)
        want_out, want_lse = naive.attention(q, kv, sinks, ids, factor)
        np.testing.assert_allclose(to_numpy(out), want_out, rtol=2e-2 if factor == 1e4 else 2e-5, atol=2e-5)
        np.testing.assert_allclose(to_numpy(lse), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", "bshdkt")
def test_axes_of_length_zero(way, axis):
    g, q, kv, sinks, ids = inputs(**{"s": 2, axis: 0})
    out, lse = way.forward(q, kv, sinks, ids, SCALE)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")
    check_close(way.dense(q, kv, sinks, ids, SCALE), want_out, "attention")
    for got, like in zip(way.backward(g, q, kv, sinks, ids, SCALE), (q, kv, sinks), strict=True):
        check_like(got, dtype="float32", shape=like.shape)


def test_reference_rounding():
    _, q, kv, sinks, ids = inputs()
    out, lse = dsv4_sparse_attention(q, kv, sinks, ids, SCALE, reference_rounding=True, return_lse=True)
    want_out, want_lse = naive.attention(q, kv, sinks, ids, SCALE)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse")
    low = np.full((1, 1, 4), -1e16, np.float32)  # scores -4e32, below the start of the running maximum
    q, ids, no_sink = -low[None], np.zeros((1, 1, 1), int), np.full(1, -INF, np.float32)
    check_equal(dsv4_sparse_attention(q, low, no_sink, ids, 1.0), low[None])
    check_equal(dsv4_sparse_attention(q, low, no_sink, ids, 1.0, reference_rounding=True), np.zeros_like(q))


# --- Views, numbers, flags -----------------------------------------------------------------------------


def every_second(x: np.ndarray) -> np.ndarray:
    """x as every second element of a parent filled with NaN."""
    parent = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)
    parent[..., ::2] = x
    return parent[..., ::2]


VIEWS = {
    "reversed axes": lambda x: np.ascontiguousarray(x.T).T,
    "flipped": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "flipped rows": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1] if x.ndim > 1 else x,
    "heads first": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) if x.ndim > 2 else x,
    "every second": every_second,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_views_equal_copies(view, dtype):
    _, q, kv, sinks, ids = inputs(h=8, d=64, k=40, t=40, dtype=DTYPES[dtype])
    want = NUMPY.forward(q, kv, sinks, ids, SCALE)
    views = [sealed(VIEWS[view](x)) for x in (q, kv, sinks)]
    views.append(sealed(np.ascontiguousarray(ids.T).T))
    for got, copy in zip(NUMPY.forward(*views, SCALE), want, strict=True):
        check_equal(got, copy)
        assert got.flags.c_contiguous and got.flags.owndata
    check_equal(dense_attention_topk(*views, SCALE), dense_attention_topk(q, kv, sinks, ids, SCALE))


def test_numbers_of_any_kind(way):
    _, q, kv, sinks, ids = inputs()
    want, _ = way.forward(q, kv, sinks, ids, 0.25)
    for scale in (np.float64(0.25), np.float32(0.25), np.array(0.25), np.float16(0.25)):
        check_equal(way.forward(q, kv, sinks, ids, scale)[0], want)
    check_equal(way.forward(q, kv, sinks, ids.astype(np.int32), 0.25)[0], want)
    check_equal(way.forward(q, kv, sinks.astype(np.float64), ids, 0.25)[0], want)
    if way.halves:
        half = sinks.astype(ml_dtypes.bfloat16)
        check_equal(
            way.forward(q, kv, half, ids, 0.25)[0], way.forward(q, kv, half.astype(np.float32), ids, 0.25)[0]
        )


def test_flags_change_nothing(way):
    _, q, kv, sinks, ids = inputs()
    full = np.where(ids < 0, 0, ids)
    want, _ = way.forward(q, kv, sinks, full, SCALE)
    check_equal(way.forward(q, kv, sinks, full, SCALE, all_rows_nonempty=True)[0], want)
    alone = dsv4_sparse_attention(q, kv, sinks, full, SCALE)
    check_equal(alone, NUMPY.forward(q, kv, sinks, full, SCALE)[0])


# --- Plans ---------------------------------------------------------------------------------------------


def test_plan_equals_ids():
    _, q, kv, sinks, ids = inputs()
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, kv.shape[1])
    want, _ = NUMPY.forward(q, kv, sinks, ids, SCALE)
    check_equal(dsv4_sparse_attention(q, kv, sinks, ids, SCALE, plan=plan), want)
    check_equal(dsv4_sparse_attention(q, kv, sinks, None, SCALE, plan=plan), want)
    check_equal(dsv4_sparse_attention(q, kv, sinks, np.zeros_like(ids), SCALE, plan=plan), want)  # the plan counts


def test_plans_that_do_not_fit():
    _, q, kv, sinks, ids = inputs()
    plan = {"backend": "reference", "indices": ids.astype(np.int32), "kv_sequence": kv.shape[1]}
    for wrong, error, match in (
        ({"backend": "cuda"}, ValueError, "plan: expected a plan for backend 'reference', got one for 'cuda'"),
        ({"backend": "cudnn"}, ValueError, "plan"),
        ({"backend": "torch"}, ValueError, "plan"),
        ({"kv_sequence": 8}, ValueError, "kv_sequence 9 like kv, got 8"),
        ({"indices": ids[:, 1:].astype(np.int32)}, ValueError, "plan.indices"),
        ({"indices": ids[..., 1:].astype(np.int32)}, ValueError, "plan.indices"),
        ({"indices": ids.astype(np.float32)}, TypeError, "plan.indices"),
        ({"indices": ids.tolist()}, TypeError, "plan.indices"),
    ):
        with pytest.raises(error, match=match):
            dsv4_sparse_attention(q, kv, sinks, ids, SCALE, plan=SimpleNamespace(**{**plan, **wrong}))
    for thing in (ids, "reference", 3, SimpleNamespace(backend="reference", kv_sequence=9)):
        with pytest.raises(TypeError, match="plan"):
            dsv4_sparse_attention(q, kv, sinks, ids, SCALE, plan=thing)
    with pytest.raises(TypeError, match="topk_idxs"):
        dsv4_sparse_attention(q, kv, sinks, None, SCALE)
