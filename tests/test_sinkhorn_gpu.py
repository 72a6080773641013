"""The Sinkhorn kernels on a GPU: every dtype and size against the oracle, views, canaries, special values, bits.

What both kernels and reference promise is in test_sinkhorn.py, which runs on CuPy arrays too.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from dsv4cp import _backend, _kernels, dsv4_sinkhorn_normalize, dsv4_sinkhorn_normalize_grad
from dsv4cp.sinkhorn import contract
from tests.support import naive
from tests.support.compare import check_close, check_equal, check_like, to_numpy

pytestmark = pytest.mark.gpu

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
CANARY = 0xA5


@pytest.fixture
def cp():
    import cupy

    return cupy


@pytest.fixture
def cuda():
    from dsv4cp.sinkhorn import cuda

    return cuda


@pytest.fixture(params=["cuda", "numba"])
def backend(request):
    reason = _backend.missing(request.param)
    if request.param == "numba" and reason is not None:
        pytest.skip(reason)
    return request.param


def logits(*shape: int, seed: int = 0, spread: float = 2.0, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, shape).astype(DTYPES[dtype])


def check_both(x: np.ndarray, grad: np.ndarray, y, grad_x, repeat: int, eps: float) -> None:
    """y and grad_x against the oracle."""
    check_close(y, naive.sinkhorn(x, repeat, eps), "sinkhorn")
    check_close(grad_x, naive.sinkhorn_grad(grad, x, repeat, eps), "sinkhorn_grad")


def both(cp, x: np.ndarray, grad: np.ndarray, repeat: int, eps: float, backend: str = "cuda"):
    x, grad = cp.asarray(x), cp.asarray(grad)
    y = dsv4_sinkhorn_normalize(x, repeat=repeat, eps=eps, backend=backend)
    grad_x = dsv4_sinkhorn_normalize_grad(grad, x, repeat=repeat, eps=eps, backend=backend)
    for got in (y, grad_x):
        check_like(got, like=x, dtype=x.dtype.name, shape=x.shape)
        assert got.flags.c_contiguous
    return y, grad_x


# --- Against the oracle --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", range(1, 17))
def test_every_size_and_dtype(cp, backend, dtype, m):
    for repeat, eps in ((1, 1e-6), (2, 1e-3), (20, 1e-6)):
        x, grad = logits(5, m, m, seed=m, dtype=dtype), logits(5, m, m, seed=m + 50, dtype=dtype)
        check_both(x, grad, *both(cp, x, grad, repeat, eps, backend), repeat, eps)


@pytest.mark.parametrize("m", [3, 4])
@pytest.mark.parametrize("eps", [0, 1e-12, 1e-6, 1e-3, 0.1, 10.0])
@pytest.mark.parametrize("repeat", [1, 2, 3, 19, 20, 21, 50])
def test_repeat_and_eps(cp, m, eps, repeat):
    x, grad = logits(40, m, m), logits(40, m, m, seed=1)
    check_both(x, grad, *both(cp, x, grad, repeat, eps), repeat, eps)


@pytest.mark.parametrize("m", [4, 5])
def test_long_iterations(cp, m):
    x, grad = logits(33, m, m), logits(33, m, m, seed=1)
    for repeat in (100, 1000, 5000):
        y, grad_x = both(cp, x, grad, repeat, 1e-4)
        wide = x.astype(np.float64), grad.astype(np.float64)
        check_close(y, dsv4_sinkhorn_normalize(wide[0], repeat=repeat, eps=1e-4), "sinkhorn")
        want = dsv4_sinkhorn_normalize_grad(wide[1], wide[0], repeat=repeat, eps=1e-4)
        check_close(grad_x, want, "sinkhorn_grad", "float32")


@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("count", [0, 1, 3, 31, 32, 33, 127, 129, 8193])
def test_counts(cp, m, count):
    x, grad = logits(count, m, m), logits(count, m, m, seed=1)
    y, grad_x = both(cp, x, grad, 20, 1e-6)
    at = np.unique(np.r_[np.arange(min(count, 40)), np.arange(max(count - 40, 0), count)]).astype(int)
    if count:
        check_both(x[at], grad[at], to_numpy(y)[at], to_numpy(grad_x)[at], 20, 1e-6)


@pytest.mark.parametrize("shape", [(4, 4), (1, 1, 4, 4), (2, 3, 5, 4, 4), (2, 0, 3, 4, 4), (7, 3, 3)])
def test_leading_axes(cp, backend, shape):
    x, grad = logits(*shape), logits(*shape, seed=1)
    y, grad_x = both(cp, x, grad, 20, 1e-6, backend)
    if x.size:
        check_both(x, grad, y, grad_x, 20, 1e-6)


def test_a_constant_in_the_gradient_costs_no_precision(cp):
    """Columns of y sum to one but for eps, so a large constant gradient must leave next to nothing."""
    x, grad = logits(500, 4, 4), logits(500, 4, 4, seed=1) + np.float32(100)
    _, grad_x = both(cp, x, grad, 20, 1e-6)
    error = np.abs(to_numpy(grad_x) - naive.sinkhorn_grad(grad, x, 20, 1e-6)).max()
    assert error < 1e-6


# --- Memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "offset"), [(4, 256), (4, 128), (4, 132), (4, 130), (1, 128), (3, 128), (16, 128)])
@pytest.mark.parametrize("count", [1, 33, 200])
def test_nothing_is_written_beside_the_output(cp, cuda, dtype, m, offset, count):
    """Offsets that are no multiple of 16 bytes take the generic kernel."""
    size = np.dtype(DTYPES[dtype]).itemsize
    offset += -offset % size
    x, grad = logits(count, m, m, dtype=dtype), logits(count, m, m, seed=1, dtype=dtype)
    on_x, on_grad = cp.asarray(x), cp.asarray(grad)
    spec = contract.check_grad(on_grad, on_x, 20, 1e-6)
    results = []
    for launch, inputs in ((cuda.launch_forward, (on_x,)), (cuda.launch_backward, (on_grad, on_x))):
        buffer = cp.full(offset + x.nbytes + 512, CANARY, np.uint8)
        launch(*(a.data.ptr for a in inputs), buffer.data.ptr + offset, spec)
        raw = buffer.get()
        assert (raw[:offset] == CANARY).all()
        assert (raw[offset + x.nbytes :] == CANARY).all()
        results.append(raw[offset : offset + x.nbytes].view(DTYPES[dtype]).reshape(x.shape))
    assert size * count * m * m == x.nbytes
    check_both(x, grad, *results, 20, 1e-6)


VIEWS = {
    "transposed": lambda xp, x: x.swapaxes(-1, -2),
    "flipped": lambda xp, x: x[::-1, ::-1, ::-1],
    "every second": lambda xp, x: x[::2],
    "columns of a wider parent": lambda xp, x: xp.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "one matrix repeated": lambda xp, x: xp.broadcast_to(x[:1], x.shape),
    "one number everywhere": lambda xp, x: xp.broadcast_to(x[0, 0, 0], x.shape),
}


@pytest.mark.parametrize("m", [4, 9])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_bit_equal_to_copies_and_unchanged(cp, backend, m, dtype, view):
    x, grad = cp.asarray(logits(70, m, m, dtype=dtype)), cp.asarray(logits(70, m, m, seed=1, dtype=dtype))
    before = x.copy(), grad.copy()
    numbers = {"repeat": 20, "eps": 1e-6, "backend": backend}
    x_view, grad_view = VIEWS[view](cp, x), VIEWS[view](cp, grad)
    x_copy, grad_copy = cp.array(x_view, order="C"), cp.array(grad_view, order="C")
    check_equal(dsv4_sinkhorn_normalize(x_view, **numbers), dsv4_sinkhorn_normalize(x_copy, **numbers))
    want = dsv4_sinkhorn_normalize_grad(grad_copy, x_copy, **numbers)
    check_equal(dsv4_sinkhorn_normalize_grad(grad_view, x_view, **numbers), want)
    check_equal(dsv4_sinkhorn_normalize_grad(grad_view, x_copy, **numbers), want)
    check_equal(x, before[0])
    check_equal(grad, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_is_not_16_byte_aligned(cp, dtype):
    x, grad = logits(70, 4, 4, dtype=dtype), logits(70, 4, 4, seed=1, dtype=dtype)
    shifted = []
    for a in (x, grad):
        parent = cp.empty(a.size + 1, a.dtype)
        parent[1:] = cp.asarray(a).ravel()
        shifted.append(parent[1:].reshape(a.shape))
    assert shifted[0].data.ptr % 16
    y = dsv4_sinkhorn_normalize(shifted[0], repeat=20, eps=1e-6, backend="cuda")
    grad_x = dsv4_sinkhorn_normalize_grad(shifted[1], shifted[0], repeat=20, eps=1e-6, backend="cuda")
    check_both(x, grad, y, grad_x, 20, 1e-6)


# --- Bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [4, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_the_same_every_time_and_everywhere(cp, m, dtype):
    x, grad = cp.asarray(logits(8193, m, m, dtype=dtype)), cp.asarray(logits(8193, m, m, seed=1, dtype=dtype))
    y, grad_x = both(cp, x, grad, 20, 1e-6)
    for _ in range(3):
        again = both(cp, x, grad, 20, 1e-6)
        check_equal(again[0], y)
        check_equal(again[1], grad_x)
    step = 16 if m == 6 else 1  # keeps the parts 16-byte aligned
    for part in (slice(0, 1), slice(5 * step, 6 * step), slice(64 * step, 64 * step + 40), slice(8000, 8193)):
        alone = both(cp, x[part], grad[part], 20, 1e-6)
        check_equal(alone[0], y[part])
        check_equal(alone[1], grad_x[part])


@pytest.mark.parametrize("repeat", [1, 2, 3, 20, 50])
def test_bits_do_not_depend_on_the_window(cp, cuda, monkeypatch, repeat):
    x, grad = logits(300, 4, 4), logits(300, 4, 4, seed=1)
    _, want = both(cp, x, grad, repeat, 1e-6)
    for window in (1, 2, 7, 40):
        monkeypatch.setattr(cuda, "WINDOW", window)
        cuda._backward_shape.cache_clear()
        _, got = both(cp, x, grad, repeat, 1e-6)
        check_equal(got, want)
    monkeypatch.undo()
    cuda._backward_shape.cache_clear()


# --- Special values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(cp, backend, dtype, m):
    x = logits(6, m, m, spread=1e4, dtype=dtype)
    x[1] = 1e4
    x[2] = -1e4
    x[3, :, 0] = 200
    x[4, 0, 1:] = -np.inf
    x[5, np.arange(m), np.arange(m)] = -np.inf
    grad = logits(6, m, m, seed=1, dtype=dtype)
    y, grad_x = both(cp, x, grad, 20, 1e-6, backend)
    check_both(x, grad, y, grad_x, 20, 1e-6)
    assert (to_numpy(grad_x)[4, 0, 1:] == 0).all()


@pytest.mark.parametrize("m", [4, 5])
def test_nan_and_infinity_stay_in_their_matrix(cp, backend, m):
    x, grad = logits(40, m, m), logits(40, m, m, seed=1)
    clean = [to_numpy(a) for a in both(cp, x, grad, 20, 1e-6, backend)]
    x[3, 1, 2], x[5, 0, 0], x[34, 2] = np.nan, np.inf, -np.inf
    grad[7, 0, 1], grad[9, 2, 2] = np.nan, np.inf
    y, grad_x = (to_numpy(a) for a in both(cp, x, grad, 20, 1e-6, backend))
    bad_y, bad = [3, 5, 34], [3, 5, 7, 9, 34]
    assert np.isnan(y[bad_y]).all()
    assert np.isnan(grad_x[bad]).all()
    check_equal(np.delete(y, bad_y, 0), np.delete(clean[0], bad_y, 0))
    check_equal(np.delete(grad_x, bad, 0), np.delete(clean[1], bad, 0))


# --- Dispatch, streams, errors -------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", [*DTYPES, "float64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_may_have_another_dtype(cp, backend, dtype, grad_dtype):
    x = logits(40, 4, 4, dtype=dtype)
    grad = logits(40, 4, 4, seed=1).astype({**DTYPES, "float64": np.float64}[grad_dtype])
    got = dsv4_sinkhorn_normalize_grad(cp.asarray(grad), cp.asarray(x), repeat=20, eps=1e-6, backend=backend)
    check_like(got, dtype=dtype)
    check_close(got, naive.sinkhorn_grad(grad.astype(np.float32), x, 20, 1e-6), "sinkhorn_grad")


def test_what_kernels_do_not_take(cp):
    for x in (cp.asarray(logits(3, 4, 4)).astype(np.float64), cp.asarray(logits(3, 17, 17))):
        y = dsv4_sinkhorn_normalize(x, repeat=3, eps=1e-6)
        check_close(y, naive.sinkhorn(x, 3, 1e-6), "sinkhorn", like=x)
        got = dsv4_sinkhorn_normalize_grad(x, x, repeat=3, eps=1e-6)
        check_close(got, naive.sinkhorn_grad(x, x, 3, 1e-6), "sinkhorn_grad", like=x)
        for name in ("cuda", "numba"):
            with pytest.raises(RuntimeError, match=f"{name}.*(float64|17 x 17)"):
                dsv4_sinkhorn_normalize(x, repeat=3, eps=1e-6, backend=name)
            with pytest.raises(RuntimeError, match=f"{name}.*(float64|17 x 17)"):
                dsv4_sinkhorn_normalize_grad(x, x, repeat=3, eps=1e-6, backend=name)
    with pytest.raises(RuntimeError, match="CuPy"):
        dsv4_sinkhorn_normalize(logits(3, 4, 4), repeat=3, eps=1e-6, backend="cuda")


def test_auto_takes_the_cuda_kernels(cp, cuda, monkeypatch):
    calls = []
    monkeypatch.setattr(cuda, "forward", lambda x, spec: calls.append("forward"))
    monkeypatch.setattr(cuda, "backward", lambda grad, x, spec: calls.append("backward"))
    x = cp.asarray(logits(3, 4, 4))
    dsv4_sinkhorn_normalize(x, repeat=3, eps=1e-6)
    dsv4_sinkhorn_normalize_grad(x, x, repeat=3, eps=1e-6)
    assert calls == ["forward", "backward"]


def test_side_streams(cp, backend):
    """100 times: a long fill, then the data, then the call, all on a stream that does not wait for the default one."""
    x, grad = cp.asarray(logits(999, 4, 4)), cp.asarray(logits(999, 4, 4, seed=1))
    y, grad_x = both(cp, x, grad, 20, 1e-6, backend)
    cp.cuda.Device().synchronize()
    stream, filler = cp.cuda.Stream(non_blocking=True), cp.empty(2**28, np.uint8)
    for _ in range(100):
        with stream:
            late_x, late_grad = cp.empty_like(x), cp.empty_like(grad)
            filler.fill(1)
            late_x[...] = x
            late_grad[...] = grad
            got = both(cp, late_x, late_grad, 20, 1e-6, backend)
            check_equal(got[0], y)
            check_equal(got[1], grad_x)


def test_a_stream_by_address(cp, cuda):
    x = cp.asarray(logits(99, 4, 4))
    spec = contract.check(x, 20, 1e-6)
    want, got = cuda.forward(x, spec), cp.zeros_like(x)
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    for given in (stream, stream.ptr):
        got.fill(0)
        cp.cuda.Device().synchronize()
        cuda.launch_forward(x.data.ptr, got.data.ptr, spec, stream=given)
        stream.synchronize()
        check_equal(got, want)


def test_a_handful_of_compilations(cp, cuda):
    """50 random shapes and repeats take no more kernels than dtypes, directions and widths."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        m, count, repeat = int(rng.integers(1, 17)), int(rng.integers(1, 999)), int(rng.integers(1, 40))
        both(cp, logits(count, m, m), logits(count, m, m, seed=1), repeat, 1e-6)
    made = [cuda._kernel(f, "float32") for f in ("sinkhorn4_forward", "sinkhorn4_backward")]
    made += [cuda._kernel(f, "float32", w) for f in ("sinkhorn_forward", "sinkhorn_backward") for w in cuda.WIDTHS]
    assert cuda._kernel.cache_info().currsize <= 3 * len(made)
    assert all(len(kernel.loaded) <= 1 for kernel in made)


def test_driver_errors_name_the_kernel(cp, cuda):
    x = cp.asarray(logits(1, 4, 4))
    with pytest.raises(RuntimeError, match="sinkhorn4_forward: launch failed"):
        _kernels.launch(
            cuda._kernel("sinkhorn4_forward", "float32"),
            grid=1,
            block=1024,  # more than its launch bounds
            x=x,
            y=x,
            count=np.int64(0),
            repeat=np.int32(1),
            eps=np.float32(0),
        )
    check_both(to_numpy(x), to_numpy(x), *both(cp, to_numpy(x), to_numpy(x), 20, 1e-6), 20, 1e-6)
