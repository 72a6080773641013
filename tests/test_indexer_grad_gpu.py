"""Scores at given ids and the indexer's gradients by their CUDA kernels: CuPy arrays, on the path this GPU gets and on
the portable one. Torch tensors: test_indexer_grad_torch_gpu.py."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from dsv4cp import _kernels  # noqa: E402
from tests.support import naive  # noqa: E402
from tests.support.compare import check_close, check_equal, check_frobenius, check_like, to_numpy  # noqa: E402
from tests.support.indexer_data import views  # noqa: E402
from tests.support.indexer_gpu import NUMBERS, dense_oracle_grad, inputs, oracle_grad, oracle_scores  # noqa: E402

pytestmark = pytest.mark.gpu

SCALE, R = 0.125, 4
AT = {"compress_ratio": R, "softmax_scale": SCALE, "backend": "cuda"}
INF, NAN = np.inf, np.nan
MODES = ("atomic", "deterministic")
SLOTS = (0, 1, 2, 3, 63, 64, 65, 129, 640, 1024, 1025, 1152, 2048)
HEADS = (1, 3, 16, 31, 32, 33, 63, 64, 65, 96, 127, 128)
# Output and incoming gradient are rounded once each to 16 bits, random errors of at most half a unit in the last place.
FROBENIUS = {"bfloat16": 4e-3, "float16": 5e-4}


@pytest.fixture(params=["portable", None], ids=["portable", "default"])
def path(request, monkeypatch):
    """The kernels: the portable ones, or what this GPU gets."""
    from dsv4cp.indexer import cuda_grad_kernels

    monkeypatch.setattr(cuda_grad_kernels, "forced_path", request.param)


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def scores(q, k, w, ids, **more):
    return dsv4cp.dsv4_indexer_topk_scores(q, k, w, ids, **{**AT, **more})


def grads(g, q, k, w, ids, mode="deterministic", **more):
    return dsv4cp.dsv4_indexer_topk_scores_grad(g, q, k, w, ids, backward_impl=mode, **{**AT, **more})


def dense_grads(g, q, k, w, **more):
    return dsv4cp.dsv4_indexer_scores_grad(g, q, k, w, **{**AT, **more})


def check(case, mode):
    g, q, k, w, ids = inputs(**case)
    dtype = case.get("dtype", "bfloat16")
    kept = [x.copy() for x in (g, q, k, w, ids)]
    got = scores(q, k, w, ids)
    check_like(got, like=q, dtype="float32", shape=ids.shape)
    check_close(got, oracle_scores(q, k, w, ids, SCALE), "indexer", dtype)
    wanted = oracle_grad(g, q, k, w, ids, SCALE)
    for got, want, x in zip(grads(g, q, k, w, ids, mode), wanted, (q, k, w), strict=True):
        check_like(got, like=x, dtype=x.dtype.name, shape=x.shape)
        own = dtype if x.dtype.name == "float32" else x.dtype.name  # what the gradient was rounded to
        check_close(got, want, "indexer_grad", own)
        check_frobenius(got, want, "indexer", FROBENIUS[own])
    for x, y in zip((g, q, k, w, ids), kept, strict=True):
        assert (x.view(np.uint8) == y.view(np.uint8)).all()


def same(got, want):
    for a, b in zip(got, want, strict=True):
        check_equal(a, b)


@pytest.mark.parametrize("slots", SLOTS)
def test_slot_widths(path, mode, slots):
    check({"slots": slots, "queries": 4, "entries": 900}, mode)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_head_counts(path, mode, heads, dim):
    check({"heads": heads, "dim": dim}, mode)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_dtypes(path, mode, dtype, numbers, ids):
    check({"dtype": dtype, "numbers": numbers, "ids": ids, "heads": 5}, mode)


def test_small_inputs_equal_the_independent_loop(path, mode):
    g, q, k, w, ids = inputs(heads=3, dim=64, entries=6, slots=5, queries=4)
    k = cupy.where(cupy.isnan(k), 0, k).astype(k.dtype)
    dense = np.zeros((2, 4, 6))
    for at in np.ndindex(2, 4, 5):
        if 0 <= int(ids[at]) < 6:
            dense[(*at[:2], int(ids[at]))] += float(g[at])
    wanted = naive.indexer_scores_grad(dense, q.get(), k.get(), w.get(), SCALE, np.ones(dense.shape, bool))
    for got, want in zip(grads(g, q, k, w, ids, mode), wanted, strict=True):
        check_close(got, want, "indexer_grad", "bfloat16")


# --- Order -----------------------------------------------------------------------------------------------


def test_deterministic_bits_repeat_on_busy_streams_and_for_every_cap(path):
    g, q, k, w, ids = inputs(queries=200, entries=60, slots=300)
    want = grads(g, q, k, w, ids)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    noise = cupy.zeros((64, 1 << 16), np.float32)
    cupy.cuda.runtime.deviceSynchronize()
    for n in range(20):
        with streams[n % 3]:
            if n % 2:  # something else takes multiprocessors away meanwhile
                with streams[(n + 1) % 3]:
                    for _ in range(10):
                        noise += 1
            got = grads(g, q, k, w, ids, backward_workspace_bytes=(1 << 31, 70_000, 1028 * 61, 1028 * 60, 1028)[n % 5])
        cupy.cuda.runtime.deviceSynchronize()
        same(got, want)


def test_gradients_of_q_and_w_have_one_order_in_both_modes(path):
    g, q, k, w, ids = inputs(queries=50, slots=300)
    want = grads(g, q, k, w, ids)
    for _ in range(5):
        got = grads(g, q, k, w, ids, "atomic")
        same((got[0], got[2]), (want[0], want[2]))
        check_frobenius(got[1], want[1].astype(np.float32), "indexer", 2e-3)


def test_bits_do_not_depend_on_the_batch(path):
    g, q, k, w, ids = inputs(batch=3, queries=20, slots=130)
    want, want_scores = grads(g, q, k, w, ids), scores(q, k, w, ids)
    for b in range(3):
        row = [x[b : b + 1] for x in (g, q, k, w, ids)]
        check_equal(scores(*row[1:]), want_scores[b : b + 1])
        same(grads(*row), [x[b : b + 1] for x in want])
    for i in (0, 7, 19):
        row = [x[:, i : i + 1] for x in (q, w, ids)]
        check_equal(scores(row[0], k, row[1], row[2]), want_scores[:, i : i + 1])


def test_a_cap_that_holds_no_entry_is_refused():
    g, q, k, w, ids = inputs(heads=2)
    with pytest.raises(ValueError, match=r"^backward_workspace_bytes: expected at least 1028 .*got 1027"):
        grads(g, q, k, w, ids, backward_workspace_bytes=1027)
    grads(g, q, k, w, ids, "atomic", backward_workspace_bytes=1)  # its float32 sums are not counted


# --- Golden cases, hostile inputs --------------------------------------------------------------------------


def test_golden_no_row_before_the_buffer_is_touched(path, mode):
    g, q, k, w, ids = inputs(heads=4, entries=20)
    k = cupy.where(cupy.isnan(k), 0, k).astype(k.dtype)
    guarded = cupy.full((2, 21, 128), NAN, k.dtype)
    guarded[:, 1:] = k
    assert bool((ids < 0).any())
    check_equal(scores(q, guarded[:, 1:], w, ids), scores(q, k, w, ids))
    got = grads(g, q, guarded[:, 1:], w, ids, mode)
    want = grads(g, q, k, w, ids, mode)
    if mode == "deterministic":
        same(got, want)
    assert all(bool(cupy.isfinite(x).all()) for x in got)
    assert bool(cupy.isnan(guarded[:, 0]).all())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_golden_rows_that_nobody_selects_reach_nothing(path, bad):
    g, q, k, w, ids = inputs(entries=30, slots=10)
    unseen = cupy.isnan(k)
    assert bool(unseen.any())
    want = grads(g, q, cupy.where(unseen, 0, k).astype(k.dtype), w, ids)
    got = grads(g, q, cupy.where(unseen, bad, k).astype(k.dtype), w, ids)
    same(got, want)
    assert bool((got[1][unseen] == 0).all())


@pytest.mark.parametrize("slots", [70, 300])
def test_golden_masked_slots_anywhere(path, slots):
    g, q, k, w, _ = inputs(batch=1, queries=3, entries=400, slots=slots)
    plain = cupy.asarray(np.random.default_rng(0).permutation(400)[:99].reshape(1, 3, 33).astype(np.int32))
    k = cupy.where(cupy.isnan(k), 0, k).astype(k.dtype)
    gp = g[..., :33]
    gp = cupy.where(cupy.isnan(gp), 1, gp).astype(gp.dtype)
    want, want_scores = grads(gp, q, k, w, plain), scores(q, k, w, plain)
    for shift in (0, 5, 16, slots - 33):
        wide, wide_g = cupy.full((1, 3, slots), -1, np.int32), cupy.full((1, 3, slots), NAN, np.float32)
        wide[..., shift : shift + 33], wide_g[..., shift : shift + 33] = plain, gp
        got = grads(wide_g, q, k, w, wide)
        same((got[0], got[2]), (want[0], want[2]))
        check_frobenius(got[1], want[1].astype(np.float32), "indexer", 1e-3)  # more slots, fewer bits below the point
        got = scores(q, k, w, wide)
        check_equal(got[..., shift : shift + 33], want_scores)
        assert int(cupy.isneginf(got).sum()) == 3 * (slots - 33)


def test_golden_an_id_of_another_batch_row_is_out_of_range(path, mode):
    g, q, k, w, _ = inputs(queries=3, slots=2, entries=8)
    k = cupy.ones_like(k)
    k[1] = 1e30
    ids = cupy.full((2, 3, 2), -1, np.int32)
    ids[0, :, 0], ids[0, :, 1] = 9, 1
    assert bool(cupy.isneginf(scores(q, k, w, ids)[0, :, 0]).all())
    got = grads(cupy.ones_like(g), q, k, w, ids, mode)
    assert bool((got[1][1] == 0).all()) and bool((got[0][1] == 0).all())
    assert bool((got[1][0, 2:] == 0).all()) and bool((got[1][0, 1] != 0).any())


def test_golden_a_repeated_id_counts_once_per_slot(path, mode):
    _, q, k, w, _ = inputs(batch=1, queries=1, entries=4, slots=1)
    k = cupy.ones_like(k)
    repeated, single = (cupy.asarray(np.array([[x]], np.int32)) for x in ([2, 2, -1, 2], [2]))
    g = cupy.ones((1, 1, 4), np.float32)
    got = scores(q, k, w, repeated)[0, 0].get()
    assert got[0] == got[1] == got[3] and np.isneginf(got[2])
    for a, b in zip(grads(g, q, k, w, repeated, mode), grads(3 * g[..., :1], q, k, w, single, mode), strict=True):
        check_close(a, to_numpy(b), "indexer_grad", "bfloat16")


@pytest.mark.parametrize("where", ["k", "q", "w", "g"])
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("heads", [64, 70])
def test_what_is_not_finite_reaches_what_the_reference_says(path, mode, where, bad, heads):
    g, q, k, w, ids = inputs(heads=heads, queries=5, entries=40, slots=30)
    k, g = (cupy.where(cupy.isnan(x), 1, x).astype(x.dtype) for x in (k, g))
    {"k": k, "q": q, "w": w, "g": g}[where][0, 3] = bad
    arrays = [x.get() for x in (g, q, k, w, ids)]
    want = dsv4cp.dsv4_indexer_topk_scores_grad(*arrays, compress_ratio=R, softmax_scale=SCALE)
    want_scores = dsv4cp.dsv4_indexer_topk_scores(*arrays[1:], compress_ratio=R, softmax_scale=SCALE)
    got, got_scores = [to_numpy(x) for x in grads(g, q, k, w, ids, mode)], to_numpy(scores(q, k, w, ids))
    assert (np.isfinite(got_scores) == np.isfinite(want_scores)).all()
    assert (np.isnan(got_scores) == np.isnan(want_scores)).all()
    for a, b in zip(got, want, strict=True):
        assert (np.isfinite(a) == np.isfinite(to_numpy(b))).all()


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_query_without_entries_gets_zero_and_gives_nothing(path, bad):
    g, q, k, w, ids = inputs(queries=6, slots=40)  # query 1 of row 0 has no valid id
    want = grads(g, q, k, w, ids)
    q[0, 1], w[0, 1], g[0, 1] = bad, bad, bad
    got = grads(g, q, k, w, ids)
    same(got, want)
    assert bool((got[0][0, 1] == 0).all()) and bool((got[2][0, 1] == 0).all())


@pytest.mark.parametrize(("g_scale", "w_scale"), [(1e-9, 1), (1e30, 1e-30), (1e-20, 1e20), (1e-12, 1e-3), (1e4, 1e-6)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_beyond_the_range_of_16_bits(path, mode, g_scale, w_scale, dtype):
    """Incoming gradients and weights in float32 of any size: float16 operands neither overflow nor underflow."""
    g, q, k, w, ids = inputs(dtype=dtype, numbers="float32", slots=1200, queries=3, entries=300)
    ids[:, :, 1024:], g[:, :, 1024:] = ids[:, :, :176], g[:, :, :176] * 40  # a second list with larger numbers
    want = grads(g, q, k, w, ids, mode)
    small_g, small_w = np.float32(g_scale), np.float32(w_scale)
    got = grads(g * small_g, q, k, w * small_w, ids, mode)
    factor = float(small_g) * float(small_w)
    if 1e-6 < factor < 1e3:  # else the results leave the range of their own type
        for n in (0, 1):
            check_frobenius(got[n].astype(np.float64) / factor, want[n].astype(np.float64), "indexer", 6e-3)
    check_frobenius(got[2].astype(np.float64) / float(small_g), want[2].astype(np.float64), "indexer", 1e-5)


def test_a_large_gradient_that_masks_nothing_leaves_small_ones(path):
    """Fixed point keeps 28 bits and more below the bound: one gradient a million times the others', on a row of its own
    query where every logit is negative, takes nothing from the sums."""
    g, q, k, w, ids = inputs(batch=1, queries=40, entries=5, slots=12, numbers="float32")
    ids = cupy.asarray((np.arange(40 * 12) % 5).reshape(1, 40, 12).astype(np.int32))
    k, g = (cupy.where(cupy.isnan(x), 1, x).astype(x.dtype) for x in (k, g))
    k, q[0, 7] = abs(k.astype(np.float32)).astype(k.dtype), -abs(q[0, 7].astype(np.float32))  # no logit above 0
    g[0, 7] = 1e6
    check_frobenius(grads(g, q, k, w, ids)[1], oracle_grad(g, q, k, w, ids, SCALE)[1], "indexer", 4e-3)


# --- Views, sizes, launches --------------------------------------------------------------------------------


def test_golden_views_and_strided_gradients(path):
    g, q, k, w, ids = inputs(queries=8, entries=40, slots=24, heads=8)
    k, g = (cupy.where(cupy.isnan(x), 1, x).astype(x.dtype) for x in (k, g))
    arrays = [g, q, k, w, ids]
    want, want_scores = grads(*arrays), scores(*arrays[1:])
    for n, x in enumerate(arrays):
        for name, view in views(x.get()):
            view_of = strided_like(view, x)
            changed = [*arrays[:n], view_of, *arrays[n + 1 :]]
            same(grads(*changed), want)
            check_equal(scores(*changed[1:]), want_scores)
            assert name
    flat = cupy.broadcast_to(cupy.asarray(np.float32(0.5)), g.shape)
    same(grads(flat, *arrays[1:]), grads(cupy.ascontiguousarray(flat), *arrays[1:]))


def strided_like(view: np.ndarray, x):
    """x on the GPU with the strides of a NumPy view of it."""
    if min(view.strides, default=1) < 0:
        return cupy.ascontiguousarray(x[tuple(slice(None, None, -1) for _ in x.shape)])[
            tuple(slice(None, None, -1) for _ in x.shape)
        ]
    order = np.argsort([-s for s in view.strides], kind="stable")
    gaps = [2 if a == order[-1] and view.strides[a] > x.itemsize else 1 for a in order]
    parent = cupy.zeros([gap * x.shape[a] for gap, a in zip(gaps, order, strict=True)], x.dtype)
    step = tuple(slice(None, None, gap) for gap in gaps)
    result = parent[step].transpose(np.argsort(order))
    result[...] = x
    return result


def test_rows_that_16_byte_copies_cannot_reach(path):
    g, q, k, w, ids = inputs(queries=4, slots=20)
    shifted = cupy.zeros(q.size + 1, q.dtype)[1:].reshape(q.shape)
    shifted[...] = q
    same(grads(g, shifted, k, w, ids), grads(g, q, k, w, ids))
    check_equal(scores(shifted, k, w, ids), scores(q, k, w, ids))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"queries": 0}, {"entries": 0}, {"slots": 0}])
def test_zero_length_axes(path, mode, sizes):
    g, q, k, w, ids = inputs(**sizes)
    assert bool(cupy.isneginf(scores(q, k, w, ids)).all())
    for x, gradient in zip((q, k, w), grads(cupy.ones_like(g), q, k, w, ids, mode), strict=True):
        check_like(gradient, like=x, dtype=x.dtype.name, shape=x.shape)
        assert bool((gradient == 0).all())


def test_golden_sizes_do_not_compile_anew(path, mode, monkeypatch):
    made = []
    module = _kernels._raw_module()
    monkeypatch.setattr(_kernels, "_raw_module", lambda: lambda **options: made.append(options) or module(**options))
    rng = np.random.default_rng(0)
    for n in range(50):
        queries, entries, slots = (int(x) for x in rng.integers(1, (20, 300, 200)))
        g, q, k, w, ids = inputs(queries=queries, entries=entries, slots=slots, batch=1, seed=n)
        grads(g, q, k, w, ids, mode)
        scores(q, k, w, ids)
    assert len(made) <= 4


def test_calls_are_captured_in_a_graph(path):
    g, q, k, w, ids = inputs(queries=20, slots=100)
    want = grads(g, q, k, w, ids)
    cupy.cuda.Device().synchronize()  # the stream does not wait for what makes the inputs
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        grads(g, q, k, w, ids)
        stream.synchronize()
        stream.begin_capture()
        got = grads(g, q, k, w, ids)
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch()
        stream.synchronize()
    same(got, want)


def test_auto_and_names():
    g, q, k, w, ids = inputs(queries=3, slots=8, heads=2)
    same(grads(g, q, k, w, ids, backend="auto"), grads(g, q, k, w, ids))
    check_equal(scores(q, k, w, ids, backend="auto"), scores(q, k, w, ids))
    wide = [cupy.nan_to_num(x.astype(np.float32)) for x in (q, k, w)]
    reference = grads(g, *wide, ids, "atomic", backend="auto")
    assert reference[0].dtype == np.float32
    with pytest.raises(RuntimeError, match=r"^backward_impl: 'deterministic'"):
        grads(g, *wide, ids, backend="auto")
    with pytest.raises(TypeError, match=r"^q: the CUDA kernels take bfloat16 or float16, got float32"):
        grads(g, *wide, ids)
    with pytest.raises(TypeError, match=r"^grad_scores: the CUDA kernels take .*got float64"):
        grads(g.astype(np.float64), q, k, w, ids)
    with pytest.raises(ValueError, match=r"^q: the CUDA kernels take index dim 64 or 128, got 96"):
        scores(q[..., :96], k[..., :96], w, ids)


# --- Dense scores ------------------------------------------------------------------------------------------


def dense_inputs(case, start=0):
    _, q, k, w, _ = inputs(**case)
    k = cupy.where(cupy.isnan(k), 0, k).astype(k.dtype)
    rng = np.random.default_rng(5)
    g = cupy.asarray(rng.standard_normal((q.shape[0], q.shape[1], k.shape[1]), np.float32) / 2)
    seen = cupy.arange(k.shape[1])[None, :] < ((start + cupy.arange(q.shape[1]) + 1) // R)[:, None]
    return cupy.where(seen, g, np.float32(NAN)), q, k, w, seen


@pytest.mark.parametrize("start", [0, 7, 1000, 2**59])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"heads": 3, "queries": 300, "entries": 70},
        {"heads": 128, "queries": 130, "entries": 64},
        {"dim": 64, "heads": 65, "queries": 70, "entries": 130, "dtype": "float16"},
        {"batch": 3, "queries": 1, "entries": 1},
    ],
    ids=str,
)
def test_dense_gradient_equals_the_oracle(path, case, start):
    g, q, k, w, seen = dense_inputs(case, start)
    wanted = dense_oracle_grad(cupy.where(seen, g, 0), q, k, w, SCALE)
    got = dense_grads(g, q, k, w, query_start=start)
    for a, want, x in zip(got, wanted, (q, k, w), strict=True):
        check_like(a, like=x, dtype=x.dtype.name, shape=x.shape)
        check_close(a, want, "indexer_grad", case.get("dtype", "bfloat16"))
    for _ in range(3):
        same(dense_grads(g, q, k, w, query_start=start), got)


def test_dense_bits_depend_on_no_neighbour(path):
    g, q, k, w, _ = dense_inputs({"batch": 3, "queries": 200, "entries": 50})
    want = dense_grads(g, q, k, w)
    for b in range(3):
        same(dense_grads(*(x[b : b + 1] for x in (g, q, k, w))), [x[b : b + 1] for x in want])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_dense_a_future_token_changes_no_earlier_row(path, bad):
    g, q, k, w, _ = dense_inputs({"queries": 12, "entries": 3})
    g[:, 11] = 0
    want = dense_grads(g, q, k, w)
    q[:, 11], k[:, 2], w[:, 11] = bad, bad, bad  # token 11 finishes entry 2, which only query 11 sees
    got = dense_grads(g, q, k, w)
    for n in (0, 2):
        check_equal(got[n][:, :11], want[n][:, :11])


def test_dense_strided_gradients_and_zero_lengths(path):
    g, q, k, w, seen = dense_inputs({"queries": 40, "entries": 12})
    g = cupy.where(seen, g, 0)
    want = dense_grads(g, q, k, w)
    turned = cupy.ascontiguousarray(g.transpose(0, 2, 1)).transpose(0, 2, 1)
    same(dense_grads(turned, q, k, w), want)
    flat = cupy.broadcast_to(cupy.asarray(np.float32(0.5)), g.shape)
    same(dense_grads(flat, q, k, w), dense_grads(cupy.ascontiguousarray(flat), q, k, w))
    for sizes in ({"batch": 0}, {"queries": 0}, {"entries": 0}):
        g, q, k, w, _ = dense_inputs(sizes)
        assert all(bool((x == 0).all()) for x in dense_grads(g, q, k, w))
