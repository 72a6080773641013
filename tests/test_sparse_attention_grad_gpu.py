"""Sparse attention's gradient kernels: golden cases, the oracle, NaN and infinity, bits, on CuPy arrays and torch
tensors, with both main kernels and both kinds of sums."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

from tests.support.attention_gpu import DTYPES, oracle_grad, relative_error  # noqa: E402
from tests.support.attention_grad_gpu import (  # noqa: E402
    IMPLEMENTATIONS,
    check,
    check_same,
    cupy_grads,
    inputs,
    torch_grads,
)
from tests.support.compare import check_close, check_equal, to_numpy  # noqa: E402
from tests.support.tolerances import EPS, FROBENIUS  # noqa: E402

pytestmark = pytest.mark.gpu

INF = np.inf
DIMS = (64, 128, 256, 512)
HEADS = (1, 3, 8, 24, 31, 32, 33, 48, 64, 96, 128)
SLOTS = (1, 2, 3, 63, 65, 129, 192, 640, 705, 1152)


@pytest.fixture(params=["portable", None], ids=["portable", "default"])
def path(request, monkeypatch):
    """The main kernel: the portable one, or what this GPU gets."""
    from dsv4cp.sparse_attention import cuda_bwd

    monkeypatch.setattr(cuda_bwd, "forced_path", request.param)
    return request.param


@pytest.fixture(params=["cupy", "torch"])
def way(request, path):
    if request.param == "torch":
        pytest.importorskip("torch")
        return torch_grads
    return cupy_grads


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request):
    return request.param


# --- Golden cases --------------------------------------------------------------------------------------


def one_channel(ids, *, sink=0.0, d=512, dtype="bfloat16", nan_rows=()):
    """All but channel 0 zero: kv[:, 0] = 0, 1, 2, 3, q[0] = 1, grad_out[0] = 1."""
    q, kv = np.zeros((1, 1, 1, d), DTYPES[dtype]), np.zeros((1, 4, d), DTYPES[dtype])
    q[..., 0] = 1
    kv[0, :, 0] = range(4)
    kv[0, list(nan_rows)] = np.nan
    arrays = q.copy(), q, kv, np.array([sink], np.float32), np.array([[ids]])
    return tuple(map(cupy.asarray, arrays))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ids", "dq", "dkv", "dsink"),
    [
        pytest.param([0, 1, -1, -1], 0.24420621, [0.08983845, 0.82032310, 0, 0], -0.12210311, id="chain"),
        pytest.param([3, 4, 7, -5], None, [0, 0, 0, 1.08810411], -0.13552998, id="out of range"),
    ],
)
def test_golden_values(way, impl, dtype, ids, dq, dkv, dsink):
    grad_q, grad_kv, grad_sinks = map(to_numpy, way(*one_channel(ids, dtype=dtype), 1.0, impl))
    close = {"rtol": EPS[dtype], "atol": EPS[dtype] / 2}  # p and ds are rounded, out too, which delta is made of
    if dq is not None:
        np.testing.assert_allclose(grad_q[0, 0, 0, 0], dq, **close)
    np.testing.assert_allclose(grad_kv[0, :, 0].astype(np.float32), dkv, **close)
    np.testing.assert_allclose(grad_sinks[0], dsink, **close)
    assert (grad_q[..., 1:] == 0).all()
    assert (grad_kv[..., 1:] == 0).all()


@pytest.mark.parametrize("sink", [0.0, -INF, INF, 2e38])
@pytest.mark.parametrize("incoming", [1.0, np.nan, INF])
@pytest.mark.parametrize(("dim", "heads"), [(64, 5), (512, 33), (512, 100)])
def test_rows_without_keys(path, impl, sink, incoming, dim, heads):
    g, q, kv, sinks, ids = inputs(d=dim, h=heads)
    g[...], sinks[...], ids[...] = incoming, sink, -1
    for got in cupy_grads(g, q, kv, sinks, ids, 0.1, impl):
        assert (to_numpy(got) == 0).all()


def test_row_without_keys_leaves_its_neighbours_alone(way):
    g, q, kv, sinks, ids = inputs(d=128, h=20, s=6)
    ids[0, 1] = -1
    others = [0, 2, 3, 4, 5]
    got = way(g, q, kv, sinks, ids, 0.1, "deterministic")
    without = way(g[:, others], q[:, others], kv, sinks, ids[:, others], 0.1, "deterministic")
    assert (to_numpy(got[0])[0, 1] == 0).all()
    check_equal(to_numpy(got[0])[0, others], to_numpy(without[0])[0])


@pytest.mark.parametrize("masked", [16, 32, 64, 128])
def test_masked_slots_first(path, impl, masked):
    check_same(cupy_grads(*one_channel([-1] * masked + [0, 1]), 1.0, impl), cupy_grads(*one_channel([0, 1]), 1.0, impl))


def test_id_of_another_batch_row(way, impl):
    g, q, kv, sinks, ids = inputs(b=2, k=8, d=64, unseen=1.0)
    ids[0, :, 0], ids[1], kv[1] = 9, -1, 1e30
    got = way(g, q, kv, sinks, ids, 0.1, impl)
    assert (to_numpy(got[1])[1] == 0).all()
    one = g[:1], q[:1], kv[:1], sinks, ids[:1]
    check((got[0][:1], got[1][:1], got[2]), one, 0.1)


def test_repeated_ids(way, impl):
    data = inputs(d=64, h=17)
    data[4][1] = cupy.asarray(np.random.default_rng(3).integers(0, 4, data[4].shape[1:]))
    data[2][1] = cupy.asarray(np.random.default_rng(4).standard_normal(data[2].shape[1:], np.float32))
    check(way(*data, 0.1, impl), data, 0.1)


def test_nan_in_unselected_rows(way, impl):
    grads = list(map(to_numpy, way(*one_channel([1, 2, -1, -1], nan_rows=(0, 3)), 1.0, impl)))
    assert all(np.isfinite(x).all() for x in grads)
    assert (grads[1][0, [0, 3]] == 0).all()
    assert (grads[1][0, [1, 2], 0] != 0).all()


def test_more_slots_than_rows(way):
    g, q, kv, sinks, _ = inputs(k=8, d=64, unseen=1.0)
    ids = np.full((2, 5, 640), -1)
    ids[..., 600:608] = range(8)
    got, want = (way(g, q, kv, sinks, cupy.asarray(x), 0.1, "deterministic") for x in (ids, ids[..., 600:608].copy()))
    check_same(got, want)


@pytest.mark.parametrize("slots", SLOTS)
def test_slot_widths(path, impl, slots):
    data = inputs(b=1, s=4, h=64, d=512, k=300, t=slots)
    check(cupy_grads(*data, 512**-0.5, impl), data, 512**-0.5)


@pytest.mark.parametrize("heads", HEADS)
def test_head_counts(path, impl, heads):
    data = inputs(b=1, s=4, h=heads, d=512, k=150, t=130, seed=heads)
    check(cupy_grads(*data, 512**-0.5, impl), data, 512**-0.5)


def test_heads_equal_calls_of_one(path, impl):
    g, q, kv, sinks, ids = data = inputs(h=35, d=64)
    got = list(map(to_numpy, cupy_grads(*data, 0.2, impl)))
    one = [slice(h, h + 1) for h in range(35)]
    parts = [cupy_grads(g[:, :, h], q[:, :, h], kv, sinks[h], ids, 0.2, impl) for h in one]
    dq, dkv, dsinks = zip(*(map(to_numpy, x) for x in parts), strict=True)
    check_close(got[0], np.concatenate(dq, 2), "attention_grad", "bfloat16")
    check_close(got[2], np.concatenate(dsinks), "attention_grad", "bfloat16")
    total = np.sum([x.astype(np.float64) for x in dkv], 0)  # each part is rounded
    assert relative_error(cupy.asarray(got[1]), cupy.asarray(total)) <= FROBENIUS["attention_grad"]


# --- The oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("heads", [64, 20, 7, 100])
def test_matches_the_oracle(path, impl, heads, d, dtype):
    data = inputs(b=2, s=6, h=heads, d=d, k=120, t=150, dtype=dtype, seed=d)
    check(cupy_grads(*data, d**-0.5, impl), data, d**-0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "d", "t"), [(64, 512, 150), (7, 512, 65), (100, 512, 130), (20, 128, 1), (3, 64, 0)])
def test_torch_gives_the_bits_of_cupy(path, heads, d, t, dtype):
    pytest.importorskip("torch")
    data = inputs(b=2, s=6, h=heads, d=d, k=120, t=t, dtype=dtype)
    check_same(torch_grads(*data, d**-0.5, "deterministic"), cupy_grads(*data, d**-0.5, "deterministic"))


@pytest.mark.parametrize("sink", [INF, -INF, 2e38, 3e38, -2e38, 85.0, -85.0, 1e4])
def test_sinks(path, impl, sink):
    data = inputs(h=33, d=64)
    data[3][::2] = sink
    got = cupy_grads(*data, 0.1, impl)
    check(got, data, 0.1)
    if abs(sink) > 1e38:
        assert (to_numpy(got[2])[::2] == 0).all()
    if sink > 1e38:
        assert (to_numpy(got[0])[:, :, ::2] == 0).all()


@pytest.mark.parametrize("size", [2.0**-40, 2.0**-20, 2.0**20, 2.0**40])
def test_sizes_of_gradients(path, impl, size):
    """A power of two times grad_out is that power times every gradient, bit for bit where no order changes bits."""
    g, *rest = inputs(b=1, s=40, h=64, d=512, k=90, t=120)
    want = cupy_grads(g, *rest, 512**-0.5, impl)
    got = cupy_grads((g.astype(np.float32) * np.float32(size)).astype(g.dtype), *rest, 512**-0.5, impl)
    for x, w, fixed in zip(got, want, (True, impl == "deterministic", True), strict=True):
        scaled = x.astype(np.float64) / size
        if fixed:
            check_equal(scaled, w.astype(np.float64))
        assert relative_error(scaled, w.astype(np.float64)) <= 1e-3  # other orders round some elements to a neighbour


def test_one_large_query_costs_others_nothing(path):
    """A query of gradients 2^60 times as large takes precision from the keys that it selects alone."""
    g, q, kv, sinks, ids = inputs(b=1, s=40, h=16, d=128, k=200, t=40, unseen=1.0)
    g[0, 5] = g[0, 5].astype(np.float32) * np.float32(2.0**60)
    got = cupy_grads(g, q, kv, sinks, ids, 0.1, "deterministic")
    _, want, _ = oracle_grad(g, q, kv, sinks, ids, 0.1)
    large = cupy.isin(cupy.arange(200), ids[0, 5])
    for rows in (large, ~large):
        assert relative_error(got[1][0][rows], want[0][rows]) <= FROBENIUS["attention_grad"]


# --- NaN and infinity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, INF])
@pytest.mark.parametrize("where", ["kv", "q", "grad_out"])
def test_a_bad_number_reaches_only_the_rows_of_its_query(path, where, bad):
    g, q, kv, sinks, ids = inputs(s=6, h=20, d=128, k=30, unseen=1.0)
    ids = cupy.where(ids == 0, 4, ids)
    ids[1, 3] = -1
    ids[1, 3, :4] = cupy.asarray([0, 2, 2, 99])
    want = list(map(to_numpy, cupy_grads(g, q, kv, sinks, ids, 0.1, "deterministic")))
    {"kv": kv[1, 0], "q": q[1, 3, 4], "grad_out": g[1, 3, 4]}[where][3] = bad
    got = list(map(to_numpy, cupy_grads(g, q, kv, sinks, ids, 0.1, "deterministic")))
    query, rows = np.zeros(q.shape[:2], bool), np.zeros(kv.shape[:2], bool)
    query[1, 3] = rows[1, [0, 2]] = True
    check_equal(got[0][~query], want[0][~query])
    check_equal(got[1][~rows], want[1][~rows])
    assert np.isnan(got[1][rows]).all()
    atomic = list(map(to_numpy, cupy_grads(g, q, kv, sinks, ids, 0.1, "atomic")))
    assert not np.isfinite(atomic[1][rows]).all()
    check_close(atomic[1][~rows], got[1][~rows], "attention_grad", "bfloat16")
    check_equal(atomic[0], got[0])


def test_terms_beyond_float16_are_not_finite(path):
    """ds = 70000 rounds to infinity as an operand; both kinds of sums say so, in the rows concerned."""
    g, q, kv, sinks, ids = one_channel([1, 2, -1, -1], dtype="float16")
    g[...], kv[0, 2] = 40.0, 300.0  # grad_out . kv is 6 million, delta close to it for one row alone
    q[...] = 0
    sinks[...] = 0
    got = {name: list(map(to_numpy, cupy_grads(g, q, kv, sinks, ids, 1.0, name))) for name in IMPLEMENTATIONS}
    for grads in got.values():
        assert not np.isfinite(grads[0]).all()
        assert not np.isfinite(grads[1][0, [1, 2]]).any()
        assert (grads[1][0, [0, 3]] == 0).all()


# --- Bits ----------------------------------------------------------------------------------------------


@pytest.fixture(params=[(64, 512), (128, 512), (20, 512), (48, 128)], ids=lambda x: f"H{x[0]}-D{x[1]}")
def long_call(request):
    h, d = request.param
    return *inputs(b=2, s=300, h=h, d=d, k=250, t=200), d**-0.5


def test_twenty_runs_have_the_same_bits(way, long_call):
    busy, noise = cupy.cuda.Stream(non_blocking=True), cupy.ones((2048, 2048), np.float32)
    want, want_atomic = way(*long_call, "deterministic"), way(*long_call, "atomic")
    # The busy stream waits for nothing: not for what still reads the memory that the pool gave to noise.
    cupy.cuda.Device().synchronize()
    for n in range(20):
        with busy:
            for _ in range(1 + n % 4):
                cupy.add(noise, 1, out=noise)
        check_same(way(*long_call, "deterministic"), want)
        atomic = way(*long_call, "atomic")
        check_equal(atomic[0], want_atomic[0])
        check_equal(atomic[2], want_atomic[2])


def test_every_cap_has_the_same_bits(way, long_call):
    want = way(*long_call, "deterministic")
    row = 8 * long_call[1].shape[-1]
    for cap in (2 * row * 250, 2 * row * 250 - 1, row * 250 - 1, row * 130, row * 64):
        check_same(way(*long_call, "deterministic", backward_workspace_bytes=cap), want)
    with pytest.raises(ValueError, match=f"backward_workspace_bytes: expected at least {row * 64} "):
        way(*long_call, "deterministic", backward_workspace_bytes=row * 64 - 1)
    way(*long_call, "atomic", backward_workspace_bytes=1)  # its sums are not under the cap


def test_batch_split_changes_no_bit(way, long_call):
    g, q, kv, sinks, ids, scale = long_call
    whole, whole_atomic = way(*long_call, "deterministic"), way(*long_call, "atomic")
    for n in range(2):
        one = slice(n, n + 1)
        part = way(g[one], q[one], kv[one], sinks, ids[one], scale, "deterministic")
        check_equal(to_numpy(part[0]), to_numpy(whole[0])[one])
        check_equal(to_numpy(part[1]), to_numpy(whole[1])[one])
        part = way(g[one], q[one], kv[one], sinks, ids[one], scale, "atomic")
        check_equal(to_numpy(part[0]), to_numpy(whole_atomic[0])[one])


def test_long_rows_within_the_default_cap(path):
    """S 65536: 81920 keys, 336 MB of sums."""
    rng = np.random.default_rng(0)
    s, k, h, t = 65536, 81920, 4, 24
    normal = cupy.asarray(rng.standard_normal(2**22, np.float32).astype(DTYPES["bfloat16"]))
    q = cupy.ascontiguousarray(cupy.broadcast_to(normal, (s * h * 512 // 2**22, 2**22))).reshape(1, s, h, 512)
    kv = cupy.ascontiguousarray(cupy.broadcast_to(normal, (k * 512 // 2**22, 2**22))).reshape(1, k, 512)
    g = q[:, ::-1]
    ids = cupy.asarray(rng.integers(-k // 4, k, (1, s, t)).astype(np.int32))
    sinks = cupy.zeros(h, np.float32)
    data = g, q, kv, sinks, ids
    got = cupy_grads(*data, 512**-0.5, "deterministic")
    check(got, data, 512**-0.5)
    check_same(cupy_grads(*data, 512**-0.5, "deterministic", backward_workspace_bytes=2**27), got)
