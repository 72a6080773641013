"""Gradient of sparse attention: golden values, oracle, finite differences, masks, sinks, strides, memory cap."""

from __future__ import annotations

import numpy as np
import pytest

import dsv4cp
from dsv4cp import dsv4_sparse_attention, dsv4_sparse_attention_grad
from tests.support import naive
from tests.support.attention_ways import DTYPES, NUMPY, WAYS, Way, inputs, one_channel, sealed
from tests.support.compare import check_close, check_equal, check_like, to_numpy

SCALE = 0.25
INF = np.inf


@pytest.fixture(params=WAYS)
def way(request):
    return request.param


def check_all(got, want, dtype: str = "float32") -> None:
    for a, b in zip(got, want, strict=True):
        check_close(a, b, "attention_grad", dtype)


# --- Golden values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "dq", "dkv", "dsink"),
    [
        pytest.param([0, 1, -1, -1], 0.24420621, [0.08983845, 0.82032310, 0, 0], -0.12210311, id="chain"),
        pytest.param([3, 4, 7, -5], None, [0, 0, 0, 1.08810411], -0.13552998, id="out of range"),
    ],
)
def test_golden_values(way, ids, dq, dkv, dsink):
    grad_q, grad_kv, grad_sinks = map(to_numpy, way.backward(*one_channel(ids), 1))
    if dq is not None:
        assert float(grad_q[0, 0, 0, 0]) == pytest.approx(dq, rel=1e-5)
    np.testing.assert_allclose(grad_kv[0, :, 0], dkv, rtol=2e-6)
    assert float(grad_sinks[0]) == pytest.approx(dsink, rel=2e-6)
    assert (grad_q[..., 1:] == 0).all() and (grad_kv[..., 1:] == 0).all()


def test_golden_nan_in_unselected_rows(way):
    g, q, kv, sinks, ids = one_channel([1, 2, -1, -1])
    kv[0, [0, 3]] = np.nan
    grads = list(map(to_numpy, way.backward(g, q, kv, sinks, ids, 1)))
    assert all(np.isfinite(x).all() for x in grads)
    assert (grads[1][0, [0, 3]] == 0).all() and (grads[1][0, [1, 2], 0] != 0).all()


@pytest.mark.parametrize("masked", [16, 32, 64, 128])
def test_masked_slots_first(way, masked):
    check_all(way.backward(*one_channel([-1] * masked + [0, 1]), 1), way.backward(*one_channel([0, 1]), 1))


@pytest.mark.parametrize("sink", [0.0, -INF, INF, 2e38, np.nan])
@pytest.mark.parametrize("incoming", [1.0, np.nan, INF])
def test_rows_without_keys(way, sink, incoming):
    g, q, kv, sinks, ids = inputs()
    ids, g, sinks = np.full_like(ids, -1), np.full_like(g, incoming), np.full_like(sinks, sink)
    with np.errstate(invalid="ignore"):  # infinity times the zeros that stand for no key
        grads = way.backward(g, q, kv, sinks, ids, SCALE)
    for got in grads:
        assert (to_numpy(got) == 0).all()


def test_row_without_keys_leaves_its_neighbours_alone(way):
    g, q, kv, sinks, ids = inputs()
    ids = ids.copy()
    ids[0, 1] = -1
    others = [0, 2, 3, 4]
    got = way.backward(g, q, kv, sinks, ids, SCALE)
    without = way.backward(g[:, others], q[:, others], kv, sinks, ids[:, others], SCALE)
    assert (to_numpy(got[0])[0, 1] == 0).all()
    check_equal(to_numpy(got[0])[0, others], to_numpy(without[0])[0])


def test_id_of_another_batch_row(way):
    g, q, kv, sinks, ids = inputs(b=2, k=8)
    ids, kv = ids.copy(), kv.copy()
    ids[0, :, 0], ids[1], kv[1] = 9, -1, 1e30
    grad_q, grad_kv, grad_sinks = way.backward(g, q, kv, sinks, ids, SCALE)
    assert (to_numpy(grad_kv)[1] == 0).all()
    want = naive.attention_grad(g[:1], q[:1], kv[:1], sinks, ids[:1], SCALE)
    check_all((grad_q[:1, ...], grad_kv[:1, ...], grad_sinks), want)


def test_more_slots_than_rows(way):
    g, q, kv, sinks, _ = inputs(k=8)
    ids = np.full((2, 5, 640), -1)
    ids[..., 600:608] = range(8)
    check_all(way.backward(g, q, kv, sinks, ids, SCALE), way.backward(g, q, kv, sinks, ids[..., 600:608], SCALE))


@pytest.mark.parametrize("slots", [1, 2, 3, 63, 65, 129, 192, 640, 705, 1152])
def test_slot_widths(way, slots):
    data = inputs(b=1, s=3, h=2, d=8, k=40, t=slots)
    check_all(way.backward(*data, SCALE), naive.attention_grad(*data, SCALE))


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 31, 32, 33, 48, 64, 96, 128])
def test_head_counts(way, heads):
    g, q, kv, sinks, ids = inputs(b=1, s=3, h=heads)
    got = way.backward(g, q, kv, sinks, ids, SCALE)
    one = [slice(h, h + 1) for h in range(heads)]
    parts = [list(map(to_numpy, way.backward(g[:, :, h], q[:, :, h], kv, sinks[h], ids, SCALE))) for h in one]
    dq, dkv, dsinks = zip(*parts, strict=True)
    check_all(got, (np.concatenate(dq, 2), np.sum(dkv, 0), np.concatenate(dsinks)))


# --- The oracle, finite differences --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_matches_the_oracle(way, dtype, id_dtype):
    if not way.halves and dtype in ("float16", "bfloat16"):
        pytest.skip("the library has no such dtype")
    g, q, kv, sinks, ids = inputs(h=4, d=24, t=11, dtype=DTYPES[dtype])
    got = way.backward(g, q, kv, sinks, ids.astype(id_dtype), SCALE)
    for x, like in zip(got, (q, kv, sinks), strict=True):
        check_like(x, like=way.array(q), dtype=like.dtype.name, shape=like.shape)
    check_all(got, naive.attention_grad(g, q, kv, sinks, ids, SCALE), dtype)


def test_wide_rows():
    """Sizes at which the products are taken in blocks of columns."""
    data = inputs(b=1, s=2, h=8, d=512, k=300, t=251)
    check_all(NUMPY.backward(*data, 512**-0.5), naive.attention_grad(*data, 512**-0.5))


def test_finite_differences():
    g, q, kv, sinks, ids = inputs(b=2, s=3, h=2, d=3, k=4, t=4, dtype=np.float64)
    got = NUMPY.backward(g, q, kv, sinks, ids, SCALE)
    step = 1e-6
    for n, grad in enumerate(got):
        for at in np.ndindex(*grad.shape):
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in (q, kv, sinks)]
                moved[n][at] += sign * step
                sides.append(float((dsv4_sparse_attention(*moved, ids, SCALE) * g).sum()))
            assert grad[at] == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-6, abs=1e-8)


def test_kv_gradient_is_rounded_once():
    """256 queries each add 1/256 of what one bfloat16 step at the total can hold."""
    bf16 = DTYPES["bfloat16"]
    q, kv = np.zeros((1, 512, 1, 1), bf16), np.zeros((1, 1, 1), bf16)
    g, ids, sinks = np.ones_like(q), np.zeros((1, 512, 1), int), np.full(1, -INF, np.float32)
    _, grad_kv, _ = NUMPY.backward(g, q, kv, sinks, ids, 1.0)
    assert float(grad_kv[0, 0, 0]) == 512.0  # added up in bfloat16 it would stop at 256


# --- Sinks, special values -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sink", [INF, -INF, 2e38, -2e38, 85.0, -85.0, 200.0])
def test_sinks(way, sink):
    g, q, kv, sinks, ids = inputs()
    sinks = sinks.copy()
    sinks[1] = sink
    got = way.backward(g, q, kv, sinks, ids, SCALE)
    check_all(got, naive.attention_grad(g, q, kv, sinks, ids, SCALE))
    if abs(sink) > 1e38:
        assert to_numpy(got[2])[1] == 0
    if sink > 1e38:
        assert (to_numpy(got[0])[:, :, 1] == 0).all()


def check_same(way, got, want):
    """Bit for bit where the way adds in a fixed order, else within the tolerance of the arithmetic."""
    if way.fixed_order:
        check_equal(got, want)
    else:
        check_close(got, want, "attention_grad", str(to_numpy(want).dtype))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_bad_unselected_rows_reach_nothing(way, bad):
    g, q, kv, sinks, ids = inputs(s=6)
    kv, ids, clean = kv.copy(), np.where(ids == 0, 4, ids), kv.copy()
    kv[:, 0], clean[:, 0] = bad, 1
    got = way.backward(g, q, kv, sinks, ids, SCALE)
    for a, b in zip(got, way.backward(g, q, clean, sinks, ids, SCALE), strict=True):
        check_same(way, a, b)
    assert (to_numpy(got[1])[:, 0] == 0).all()


@pytest.mark.parametrize("where", ["kv", "q", "grad_out"])
def test_a_nan_reaches_only_the_rows_of_its_query(way, where):
    g, q, kv, sinks, ids = inputs(s=6)
    g, q, kv, ids = g.copy(), q.copy(), kv.copy(), np.where(ids == 0, 4, ids)
    ids[1, 3] = [-1, 0, 2, 2, -1, 99, 0]
    want = list(map(to_numpy, way.backward(g, q, kv, sinks, ids, SCALE)))
    {"kv": kv[1, 0], "q": q[1, 3], "grad_out": g[1, 3]}[where][:] = np.nan
    got = list(map(to_numpy, way.backward(g, q, kv, sinks, ids, SCALE)))
    query, rows = np.zeros(ids.shape[:2], bool), np.zeros(kv.shape[:2], bool)
    query[1, 3] = rows[1, [0, 2]] = True
    check_equal(got[0][~query], want[0][~query])
    check_same(way, got[1][~rows], want[1][~rows])
    assert np.isnan(got[0][query]).all() and np.isnan(got[1][rows]).all()


# --- Views ---------------------------------------------------------------------------------------------

LAYOUTS = {
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "flipped": lambda x: np.ascontiguousarray(x[:, ::-1, ..., ::-1])[:, ::-1, ..., ::-1],
    "heads first": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "every second row": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "stride 0": lambda x: np.broadcast_to(x[:1, :1, :1, :1], x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_strided_gradients_equal_copies(layout, dtype):
    g, q, kv, sinks, ids = inputs(h=8, d=64, k=40, t=40, dtype=DTYPES[dtype])
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    view = LAYOUTS[layout](g)
    want = dsv4_sparse_attention_grad(view.copy(order="C"), q, kv, sinks, ids, out, lse, SCALE)
    for a, b in zip(dsv4_sparse_attention_grad(view, q, kv, sinks, ids, out, lse, SCALE), want, strict=True):
        check_equal(a, b)


def test_views_of_everything():
    g, q, kv, sinks, ids = inputs(h=8, d=64, k=40, t=40)
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    want = dsv4_sparse_attention_grad(g, q, kv, sinks, ids, out, lse, SCALE)
    views = [sealed(np.ascontiguousarray(x.T).T) for x in (g, q, kv, sinks, ids, out, lse)]
    flips = [sealed(np.ascontiguousarray(x[..., ::-1])[..., ::-1]) for x in (g, q, kv, sinks, ids, out, lse)]
    for args in (views, flips):
        for a, b in zip(dsv4_sparse_attention_grad(*args, SCALE), want, strict=True):
            check_equal(a, b)


def test_dtypes_of_out_and_grad_out_may_differ():
    g, q, kv, sinks, ids = inputs(dtype=DTYPES["bfloat16"])
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    got = dsv4_sparse_attention_grad(g.astype(np.float32), q, kv, sinks, ids, out.astype(np.float32), lse, SCALE)
    for a, b in zip(got, dsv4_sparse_attention_grad(g, q, kv, sinks, ids, out, lse, SCALE), strict=True):
        check_equal(a, b)


# --- Implementation, workspace, plan -------------------------------------------------------------------


def test_both_implementations_are_the_same_fixed_order():
    data = inputs(h=8, d=64, k=40, t=40)
    want = NUMPY.backward(*data, SCALE)
    for implementation in ("atomic", "deterministic", "deterministic"):
        for a, b in zip(NUMPY.backward(*data, SCALE, backward_impl=implementation), want, strict=True):
            check_equal(a, b)


def test_batch_split_changes_no_bit():
    g, q, kv, sinks, ids = inputs(b=3)
    whole = NUMPY.backward(g, q, kv, sinks, ids, SCALE, backward_impl="deterministic")
    for n in range(3):
        part = NUMPY.backward(*(x[n : n + 1] for x in (g, q, kv)), sinks, ids[n : n + 1], SCALE)
        check_equal(part[0], whole[0][n : n + 1])
        check_equal(part[1], whole[1][n : n + 1])


def test_a_plan_stands_for_the_ids():
    g, q, kv, sinks, ids = inputs()
    want = NUMPY.backward(g, q, kv, sinks, ids, SCALE)
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, kv.shape[1])
    for given in (ids, None):
        out, lse = dsv4_sparse_attention(q, kv, sinks, given, SCALE, plan=plan, return_lse=True)
        for a, b in zip(
            dsv4_sparse_attention_grad(g, q, kv, sinks, given, out, lse, SCALE, plan=plan), want, strict=True
        ):
            check_equal(a, b)
    other = dsv4cp.plan_dsv4_sparse_indices(ids, kv.shape[1], "cuda")
    with pytest.raises(ValueError, match="'cuda'"):
        dsv4_sparse_attention_grad(g, q, kv, sinks, ids, out, lse, SCALE, plan=other)


@pytest.mark.gpu
def test_no_fixed_order_is_claimed_for_cupy():
    g, q, kv, sinks, ids = inputs(s=3)
    with pytest.raises(RuntimeError, match="deterministic"):
        Way("cupy").backward(g, q, kv, sinks, ids, SCALE, backward_impl="deterministic")
