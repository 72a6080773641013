"""Sinkhorn normalisation and its gradient: golden values, the float64 oracle, views, special values, properties."""

from __future__ import annotations

import tracemalloc

import array_api_compat
import array_api_strict
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4cp import dsv4_sinkhorn_normalize, dsv4_sinkhorn_normalize_grad
from dsv4cp.sinkhorn import reference
from tests.support import naive
from tests.support.compare import check_close, check_equal, check_like, to_numpy

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
A = np.array([[0, 1, 2, 3], [0, 0, 0, 0], [5, 0, 0, 0], [-3, 2, 1, 0]], np.float64)
V4 = {"repeat": 20, "eps": 1e-6}
gpu = pytest.mark.gpu


@pytest.fixture(params=["numpy", "array_api_strict", pytest.param("cupy", marks=gpu)])
def make(request):
    """Turns a NumPy array into one of each library."""
    if request.param == "numpy":
        return lambda x: x
    if request.param == "array_api_strict":
        return array_api_strict.asarray
    import cupy

    return cupy.asarray


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=gpu)])
def half(request):
    """As `make`, without the libraries that lack the half-precision dtypes."""
    if request.param == "numpy":
        return lambda x: x
    import cupy

    return cupy.asarray


def sealed(x: np.ndarray) -> np.ndarray:
    """x read-only, so that any write into it fails."""
    x.flags.writeable = False
    return x


def logits(*shape: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, shape)


# --- Golden values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden_order_eps_and_count(make, dtype):
    y = dsv4_sinkhorn_normalize(make(sealed(A.astype(dtype))), **V4)
    check_like(y, like=make(A), dtype=dtype, shape=(4, 4))
    y = to_numpy(y)
    tight = 1e-9 if dtype == "float64" else 5e-7
    np.testing.assert_allclose(y[0, 0], 0.0079233363, rtol=0, atol=tight)
    np.testing.assert_allclose(y[2, 0], 0.9183108937, rtol=0, atol=tight)
    np.testing.assert_allclose(y.sum(0), 0.999999, rtol=0, atol=10 * tight)
    np.testing.assert_allclose(y.sum(1), [1.00096112, 1.00070383, 0.99732684, 1.00100421], rtol=0, atol=10 * tight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_golden_uniform(half, dtype):
    zeros = np.zeros((4, 4))
    one_hot = np.zeros((4, 4))
    one_hot[:, 0] = 200
    for x in (zeros, one_hot):
        y = dsv4_sinkhorn_normalize(half(x.astype(DTYPES[dtype])), **V4)
        check_like(y, dtype=dtype)
        check_close(y, np.full((4, 4), 0.24999975), "sinkhorn")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden_gradient(make, dtype):
    grad = np.arange(16.0).reshape(4, 4)
    got = dsv4_sinkhorn_normalize_grad(make(sealed(grad.astype(dtype))), make(sealed(A.astype(dtype))), **V4)
    check_like(got, like=make(A), dtype=dtype, shape=(4, 4))
    want = [1.384507e-3, -3.46880e-5, -3.820463e-4, -9.677741e-4]
    np.testing.assert_allclose(to_numpy(got)[0], want, rtol=0, atol=1e-9 if dtype == "float64" else 3e-7)
    check_close(got, naive.sinkhorn_grad(grad, A, **V4), "sinkhorn_grad")


# --- Against the oracle --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("repeat", [1, 2, 20])
def test_matches_the_oracle(half, dtype, m, repeat):
    x = logits(3, m, m, seed=m).astype(DTYPES[dtype])
    grad = logits(3, m, m, seed=m + 100).astype(DTYPES[dtype])
    y = dsv4_sinkhorn_normalize(half(sealed(x)), repeat=repeat, eps=1e-6)
    check_like(y, like=half(x), dtype=dtype)
    check_close(y, naive.sinkhorn(x, repeat, 1e-6), "sinkhorn")
    got = dsv4_sinkhorn_normalize_grad(half(sealed(grad)), half(sealed(x)), repeat=repeat, eps=1e-6)
    check_like(got, like=half(x), dtype=dtype)
    check_close(got, naive.sinkhorn_grad(grad, x, repeat, 1e-6), "sinkhorn_grad")


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (1, 1, 1), (0,), (2, 0, 3)])
@pytest.mark.parametrize("m", [1, 4])
def test_leading_axes(make, lead, m):
    x, grad = logits(*lead, m, m), logits(*lead, m, m, seed=1)
    y = dsv4_sinkhorn_normalize(make(x), **V4)
    check_close(y, naive.sinkhorn(x, **V4) if x.size else x, "sinkhorn", like=make(x))
    got = dsv4_sinkhorn_normalize_grad(make(grad), make(x), **V4)
    check_close(got, naive.sinkhorn_grad(grad, x, **V4) if x.size else x, "sinkhorn_grad", like=make(x))


@pytest.mark.parametrize("eps", [0, 0.0, 1e-12, 1e-3, 0.5])
def test_eps_enters_every_division(make, eps):
    x, grad = logits(4, 4, 4), logits(4, 4, 4, seed=1)
    check_close(dsv4_sinkhorn_normalize(make(x), repeat=3, eps=eps), naive.sinkhorn(x, 3, eps), "sinkhorn")
    got = dsv4_sinkhorn_normalize_grad(make(grad), make(x), repeat=3, eps=eps)
    check_close(got, naive.sinkhorn_grad(grad, x, 3, eps), "sinkhorn_grad")


@pytest.mark.parametrize("repeat", [1, 2, 7])
def test_gradient_against_finite_differences(repeat):
    x, grad = logits(2, 3, 3), logits(2, 3, 3, seed=1)
    got = dsv4_sinkhorn_normalize_grad(grad, x, repeat=repeat, eps=1e-3)
    want, h = np.zeros_like(x), 1e-5
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += h
        down[at] -= h
        y_up, y_down = (dsv4_sinkhorn_normalize(z, repeat=repeat, eps=1e-3) for z in (up, down))
        want[at] = (grad * (y_up - y_down)).sum() / (2 * h)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)


def test_gradient_dtype_may_differ_from_x():
    x, grad = logits(3, 4, 4).astype(np.float32), logits(3, 4, 4, seed=1)
    for dtype in DTYPES.values():
        g = grad.astype(dtype)
        got = dsv4_sinkhorn_normalize_grad(g, x, **V4)
        check_equal(got, dsv4_sinkhorn_normalize_grad(g.astype(np.float32), x, **V4))
    x64 = x.astype(np.float64)
    check_close(
        dsv4_sinkhorn_normalize_grad(grad.astype(np.float16), x64, **V4),
        naive.sinkhorn_grad(grad.astype(np.float16), x64, **V4),
        "sinkhorn_grad",
        "float64",
    )


# --- Views, blocks, neighbours -------------------------------------------------------------------------


VIEWS = {
    "transposed": lambda xp, x: x.swapaxes(-1, -2),
    "flipped": lambda xp, x: x[::-1, ::-1, ::-1],
    "every second": lambda xp, x: x[::2],
    "matrices along the first axes": lambda xp, x: x.transpose(2, 0, 1)[:, :, : x.shape[1]],
    "one matrix repeated": lambda xp, x: xp.broadcast_to(x[:1], x.shape),
    "one number everywhere": lambda xp, x: xp.broadcast_to(x[0, 0, 0], x.shape),
}


@pytest.mark.parametrize("m", [4, 9])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_bit_equal_to_copies(half, m, dtype, view):
    base = half(logits(m, m, m).astype(DTYPES[dtype]))
    xp = array_api_compat.array_namespace(base)
    original = xp.asarray(base, copy=True)
    x = VIEWS[view](xp, base)
    copy = half(np.ascontiguousarray(to_numpy(x)).astype(DTYPES[dtype]))
    other = half(logits(*x.shape, seed=5).astype(DTYPES[dtype]))
    check_equal(dsv4_sinkhorn_normalize(x, **V4), dsv4_sinkhorn_normalize(copy, **V4))
    check_equal(dsv4_sinkhorn_normalize_grad(x, other, **V4), dsv4_sinkhorn_normalize_grad(copy, other, **V4))
    check_equal(dsv4_sinkhorn_normalize_grad(other, x, **V4), dsv4_sinkhorn_normalize_grad(other, copy, **V4))
    check_equal(base, original)


@pytest.mark.parametrize("m", [4, 9])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_bits_do_not_depend_on_blocks_or_neighbours(monkeypatch, m, dtype):
    x, grad = logits(37, m, m).astype(dtype), logits(37, m, m, seed=1).astype(dtype)
    y, g = dsv4_sinkhorn_normalize(x, **V4), dsv4_sinkhorn_normalize_grad(grad, x, **V4)
    for n in (0, 17, 36):
        check_equal(dsv4_sinkhorn_normalize(x[n], **V4), y[n])
        check_equal(dsv4_sinkhorn_normalize_grad(grad[n], x[n], **V4), g[n])
    for elements in (1, 5 * m * m, 36 * m * m):
        monkeypatch.setattr(reference, "HOST_BLOCK", elements)
        check_equal(dsv4_sinkhorn_normalize(x, **V4), y)
        check_equal(dsv4_sinkhorn_normalize_grad(grad, x, **V4), g)


def test_results_are_contiguous_and_own_their_memory():
    x = np.asfortranarray(logits(3, 4, 4))
    for result in (dsv4_sinkhorn_normalize(x, **V4), dsv4_sinkhorn_normalize_grad(x, x, **V4)):
        assert result.flags.c_contiguous and result.flags.writeable
        assert not np.shares_memory(result, x)


def test_gradient_memory_is_bounded():
    x = logits(1 << 16, 4, 4).astype(np.float32)
    tracemalloc.start()
    try:
        dsv4_sinkhorn_normalize_grad(x, x, **V4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * x.nbytes + (32 << 20), f"peak {peak >> 20} MiB; all states at once would be 160 MiB"


# --- Special values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, size", [("float16", 6e4), ("bfloat16", 1e30), ("float32", 1e30), ("float64", 1e300)])
def test_large_logits(half, dtype, size):
    x = np.sign(logits(4, 4, 4)) * size
    x[0], x[1] = size, -size
    x = x.astype(DTYPES[dtype])
    grad = logits(4, 4, 4, seed=1).astype(DTYPES[dtype])
    check_close(dsv4_sinkhorn_normalize(half(x), **V4), naive.sinkhorn(x, **V4), "sinkhorn")
    got = dsv4_sinkhorn_normalize_grad(half(grad), half(x), **V4)
    check_close(got, naive.sinkhorn_grad(grad, x, **V4), "sinkhorn_grad")


def test_minus_infinity_is_an_entry_without_weight(make):
    x, grad = logits(2, 4, 4), logits(2, 4, 4, seed=1)
    x[0, 1, :3] = -np.inf
    check_close(dsv4_sinkhorn_normalize(make(x), **V4), naive.sinkhorn(x, **V4), "sinkhorn")
    got = dsv4_sinkhorn_normalize_grad(make(grad), make(x), **V4)
    check_close(got, naive.sinkhorn_grad(grad, x, **V4), "sinkhorn_grad")
    assert (to_numpy(got)[0, 1, :3] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, "row"])
def test_nan_and_infinity_stay_in_their_matrix(make, bad):
    x, grad = logits(3, 4, 4), logits(3, 4, 4, seed=1)
    clean_y, clean_g = dsv4_sinkhorn_normalize(x, **V4), dsv4_sinkhorn_normalize_grad(grad, x, **V4)
    if bad == "row":
        x[1, 2] = -np.inf
    else:
        x[1, 2, 3] = bad
    y = to_numpy(dsv4_sinkhorn_normalize(make(x), **V4))
    g = to_numpy(dsv4_sinkhorn_normalize_grad(make(grad), make(x), **V4))
    for got, clean in ((y, clean_y), (g, clean_g)):
        assert np.isnan(got[1]).all()
        check_close(got[::2], clean[::2], "sinkhorn_grad")


def test_non_finite_gradient_stays_in_its_matrix(make):
    x, grad = logits(3, 4, 4), logits(3, 4, 4, seed=1)
    clean = dsv4_sinkhorn_normalize_grad(grad, x, **V4)
    grad[1, 0, 0] = np.nan
    got = to_numpy(dsv4_sinkhorn_normalize_grad(make(grad), make(x), **V4))
    assert np.isnan(got[1]).all()
    check_close(got[::2], clean[::2], "sinkhorn_grad")


# --- Properties ----------------------------------------------------------------------------------------

matrices = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.integers(1, 6), st.floats(0.01, 30)).map(
        lambda shape: logits(2, shape[0], shape[0], seed=seed, spread=shape[1])
    )
)


@settings(max_examples=40, deadline=None)
@given(x=matrices, repeat=st.integers(1, 25), eps=st.floats(1e-7, 1e-2))
def test_columns_sum_to_their_share_and_rows_converge(x, repeat, eps):
    y = dsv4_sinkhorn_normalize(x, repeat=repeat, eps=eps)
    assert (y > 0).all()
    assert (y.sum(-2) < 1).all() and (y.sum(-2) > 0).all()
    if repeat > 1:  # before the last division a column sums to something above 1/(M+1)
        np.testing.assert_allclose(y.sum(-2), 1, atol=10 * (x.shape[-1] + 1) * eps)


@settings(max_examples=40, deadline=None)
@given(x=matrices, repeat=st.integers(1, 25), shift=st.floats(-50, 50), seed=st.integers(0, 1000))
def test_symmetries(x, repeat, shift, seed):
    """A constant added to a row changes nothing; permuted rows and columns permute the result."""
    m = x.shape[-1]
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(m), rng.permutation(m)
    y = dsv4_sinkhorn_normalize(x, repeat=repeat, eps=1e-6)
    shifted = x.copy()
    shifted[:, rng.integers(m)] += shift
    np.testing.assert_allclose(dsv4_sinkhorn_normalize(shifted, repeat=repeat, eps=1e-6), y, rtol=1e-9, atol=1e-12)
    permuted = dsv4_sinkhorn_normalize(x[:, rows][:, :, columns], repeat=repeat, eps=1e-6)
    np.testing.assert_allclose(permuted, y[:, rows][:, :, columns], rtol=1e-10, atol=1e-13)


@settings(max_examples=40, deadline=None)
@given(x=matrices, repeat=st.integers(1, 25), a=st.floats(-3, 3), seed=st.integers(0, 1000))
def test_gradient_is_linear_and_blind_to_row_shifts(x, repeat, a, seed):
    g, h = logits(*x.shape, seed=seed), logits(*x.shape, seed=seed + 1)
    by = {"repeat": repeat, "eps": 1e-6}
    dg, dh = dsv4_sinkhorn_normalize_grad(g, x, **by), dsv4_sinkhorn_normalize_grad(h, x, **by)
    np.testing.assert_allclose(dsv4_sinkhorn_normalize_grad(g + a * h, x, **by), dg + a * dh, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(dg.sum(-1), 0, atol=1e-9)
    check_equal(dsv4_sinkhorn_normalize_grad(0 * g, x, **by) + 0.0, np.zeros_like(x))
