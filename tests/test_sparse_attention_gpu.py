"""Sparse attention's CUDA kernels: CuPy arrays and torch tensors, on the path this GPU gets and on the portable one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from tests.support import gate, naive  # noqa: E402
from tests.support.attention_gpu import DTYPES, layer_inputs, oracle, random_inputs  # noqa: E402
from tests.support.compare import check_close, check_equal, check_frobenius, check_like, to_numpy  # noqa: E402

pytestmark = pytest.mark.gpu

INF = np.inf
LSE_LIMIT = 2e-3
DIMS = (64, 128, 256, 512)
HEADS = (1, 3, 8, 16, 24, 31, 32, 33, 48, 64, 96, 128)
SLOTS = (0, 1, 2, 3, 63, 65, 129, 192, 640, 705, 1152)


class Way:
    """One library; CuPy arrays (or the library's own) go in, (out, lse) of the library come out."""

    def __init__(self, library: str) -> None:
        self.library = library

    def array(self, x):
        if self.library == "cupy" or not isinstance(x, cupy.ndarray):
            return x
        from dsv4cp import _bridge

        return _bridge.to_torch(x)

    def __call__(self, q, kv, sinks, ids, scale, **options):
        arrays = [self.array(x) for x in (q, kv, sinks, ids)]
        if self.library == "cupy":
            return dsv4cp.dsv4_sparse_attention(*arrays, scale, backend="cuda", return_lse=True, **options)
        from dsv4cp import torch_ops

        return torch_ops.dsv4_sparse_attention(*arrays, scale, backend="tilelang", return_lse=True, **options)

    def plan(self, ids, keys):
        if self.library == "cupy":
            return dsv4cp.plan_dsv4_sparse_indices(ids, keys, "cuda")
        from dsv4cp import torch_ops

        return torch_ops.plan_dsv4_sparse_indices(self.array(ids), keys, "tilelang")


@pytest.fixture(params=["portable", None], ids=["portable", "default"])
def path(request, monkeypatch):
    """The kernel: the portable one, or what this GPU gets."""
    from dsv4cp.sparse_attention import cuda

    monkeypatch.setattr(cuda, "forced_path", request.param)
    return request.param


@pytest.fixture(params=["cupy", "torch"])
def way(request, path):
    if request.param == "torch":
        pytest.importorskip("torch")
    return Way(request.param)


@pytest.fixture
def cupy_way(path):
    return Way("cupy")


def nans(shape, dtype):
    return cupy.asarray(np.full(shape, np.nan, dtype))


def check(got, inputs, scale, dtype) -> None:
    """Against the float64 oracle, element by element and as a whole."""
    out, lse = got
    want_out, want_lse = oracle(*inputs, scale)
    check_like(out, dtype=dtype, shape=inputs[0].shape)
    check_like(lse, dtype="float32", shape=inputs[0].shape[:3])
    check_frobenius(out, want_out, "attention")
    check_close(out, want_out, "attention", dtype)
    g, w = to_numpy(lse), to_numpy(want_lse)
    assert np.array_equal(np.isneginf(g), np.isneginf(w))
    some = ~np.isneginf(w)
    assert np.abs(g[some] - w[some]).max(initial=0) <= LSE_LIMIT


# --- Golden cases --------------------------------------------------------------------------------------


def one_channel(ids, *, sink=0.0, d=512, dtype="bfloat16", nan_rows=()):
    """All but channel 0 zero: kv[:, 0] = 0, 1, 2, 3, q[0] = 1."""
    q, kv = np.zeros((1, 1, 1, d), DTYPES[dtype]), np.zeros((1, 4, d), DTYPES[dtype])
    q[..., 0] = 1
    kv[0, :, 0] = range(4)
    if nan_rows:
        kv[0, nan_rows] = np.nan
    arrays = q, kv, np.array([sink], np.float32), np.array([[ids]])
    return SimpleNamespace(**dict(zip(("q", "kv", "sinks", "ids"), map(cupy.asarray, arrays), strict=True)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize(
    ("ids", "want_out", "want_lse"),
    [
        pytest.param([0, 1, -1, -1], 0.57611688, 1.31326169, id="two keys"),
        pytest.param([3, 4, 7, -5], 2.85772238, 3.0, id="out of range"),
        pytest.param([1, 1, -1, -1], 0.84463760, 1.69314718, id="repeated"),
        *[pytest.param([-1] * n + [0, 1], 0.57611688, 1.31326169, id=f"{n} masked first") for n in (16, 32, 64, 128)],
    ],
)
def test_golden_values(way, ids, want_out, want_lse, d, dtype):
    x = one_channel(ids, d=d, dtype=dtype)
    out, lse = (to_numpy(y) for y in way(x.q, x.kv, x.sinks, x.ids, 1))
    assert (out[..., 1:] == 0).all()
    assert float(out[0, 0, 0, 0]) == pytest.approx(want_out, rel=4e-3)
    assert float(lse[0, 0, 0]) == pytest.approx(want_lse, rel=2e-6)


def test_golden_nan_in_unselected_rows(way):
    x = one_channel([1, 2, -1, -1], nan_rows=[0, 3])
    out, lse = way(x.q, x.kv, x.sinks, x.ids, 1)
    assert float(to_numpy(out)[0, 0, 0, 0]) == pytest.approx(1.57521038, rel=4e-3)
    assert float(to_numpy(lse)[0, 0, 0]) == pytest.approx(2.31326169, rel=2e-6)


@pytest.mark.parametrize("sink", [0.0, -INF, INF, 2e38, -2e38, np.nan])
@pytest.mark.parametrize("h", [3, 64])
def test_row_without_keys(way, sink, h):
    q, kv, sinks, ids = random_inputs(s=4, h=h, d=512, unseen=1)
    sinks[:] = sink
    empty, full = ids.copy(), ids.copy()
    empty[:, 1], full[:, 1] = -1, 3
    out, lse = way(q, kv, sinks, empty, 0.25)
    other, other_lse = way(q, kv, sinks, full, 0.25)
    assert (to_numpy(out)[:, 1] == 0).all() and np.isneginf(to_numpy(lse)[:, 1]).all()
    for row in (0, 2, 3):
        check_equal(out[:, row], other[:, row])
        check_equal(lse[:, row], other_lse[:, row])


def test_id_of_another_batch_row(way):
    q, kv, sinks, ids = random_inputs(b=2, k=8, d=512, unseen=1)
    kv[1] = 1e30
    ids[0, :, 0] = 9
    out, lse = way(q, kv, sinks, ids, 0.05)
    ids[0, :, 0] = -1
    alone = way(q[:1], kv[:1], sinks, ids[:1], 0.05)
    check_equal(out[:1], alone[0])
    check_equal(lse[:1], alone[1])


@pytest.mark.parametrize("d", DIMS)
def test_masked_slots_read_no_row_outside_the_keys(way, d):
    q, kv, sinks, ids = random_inputs(d=d)
    around = nans((2, 42, d), kv.dtype)
    around[:, 1:-1] = kv
    got, want = way(q, around[:, 1:-1], sinks, ids, 0.1), way(q, kv, sinks, ids, 0.1)
    for g, w in zip(got, want, strict=True):
        assert not np.isnan(to_numpy(g)).any()
        check_equal(g, w)


def test_more_slots_than_rows(way):
    q, kv, sinks, _ = random_inputs(k=8, d=512, h=8, ids=np.tile(np.arange(8), (2, 5, 1)))
    ids = cupy.full((2, 5, 640), -1, np.int32)
    ids[..., 600:608] = cupy.arange(8)
    for got, want in zip(way(q, kv, sinks, ids, 0.1), way(q, kv, sinks, ids[..., 600:608], 0.1), strict=True):
        check_equal(got, want)


@pytest.mark.parametrize("h", [16, 64])
@pytest.mark.parametrize("slots", SLOTS)
def test_slot_widths(way, slots, h):
    inputs = random_inputs(b=1, s=4, h=h, d=512, k=300, t=slots, seed=slots)
    check(way(*inputs, 512**-0.5), inputs, 512**-0.5, "bfloat16")


@pytest.mark.parametrize("d", [128, 512])
@pytest.mark.parametrize("heads", HEADS)
def test_head_counts(way, heads, d):
    inputs = q, kv, sinks, ids = random_inputs(b=1, s=3, h=heads, d=d, t=150)
    out, lse = way(*inputs, d**-0.5)
    check((out, lse), inputs, d**-0.5, "bfloat16")
    for h in range(0, heads, max(1, heads // 5)):
        one, one_lse = way(q[:, :, h : h + 1], kv, sinks[h : h + 1], ids, d**-0.5)
        check_close(out[:, :, h : h + 1], to_numpy(one), "attention")
        check_close(lse[:, :, h : h + 1], to_numpy(one_lse), "lse")


def test_scales_and_sinks_of_any_kind(way):
    """Python numbers, NumPy numbers; ids int32 or int64; sinks in any float dtype."""
    q, kv, sinks, ids = random_inputs(h=8, d=128)
    want = way(q, kv, sinks, ids, 0.25)
    scales = (np.float64(0.25), np.float32(0.25), np.array(0.25))
    for got in [way(q, kv, sinks, ids, s) for s in scales] + [
        way(q, kv, sinks, ids.astype(np.int32), 0.25),
        way(q, kv, sinks.astype(np.float64), ids, 0.25),
    ]:
        for g, w in zip(got, want, strict=True):
            check_equal(g, w)
    half = sinks.astype(DTYPES["bfloat16"])
    check_equal(way(q, kv, half, ids, 0.25)[0], way(q, kv, half.astype(np.float32), ids, 0.25)[0])
    with pytest.raises(TypeError, match="sm_scale"):
        way(q, kv, sinks, ids, cupy.asarray(0.25))


# --- The oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("h", [5, 20, 40, 70])
def test_every_tile_matches_the_oracle(way, h, d, dtype):
    inputs = random_inputs(b=2, s=6, h=h, d=d, k=200, t=300, dtype=dtype, seed=h)
    check(way(*inputs, d**-0.5), inputs, d**-0.5, dtype)


def test_small_case_matches_the_plain_oracle(way):
    inputs = random_inputs(b=2, s=4, h=3, d=64, k=9, t=7)
    out, lse = way(*inputs, 0.25)
    want_out, want_lse = naive.attention(*inputs, 0.25)
    check_close(out, want_out, "attention")
    check_close(lse, want_lse, "lse", "bfloat16")


@pytest.mark.parametrize("scale", [0.0, -0.1, -3.0, 1e-30, 10.0])
def test_scale_of_any_sign(way, scale):
    inputs = random_inputs(b=1, s=5, h=33, d=512, t=200)
    out, lse = way(*inputs, scale)
    want_out, want_lse = oracle(*inputs, scale)
    check_frobenius(out, want_out, "attention")
    np.testing.assert_allclose(to_numpy(lse), to_numpy(want_lse), rtol=2e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2560, 64, 4, 512), (1024, 128, 128, 10**9), (700, 16, 4, 100)], ids=str)
def test_layers(way, shape, dtype):
    q, kv, sinks, ids = layer_inputs(*shape, dtype=dtype)
    queries = shape[0]
    out, lse = way(q, kv, sinks, ids, 512**-0.5)
    rows = cupy.asarray(np.unique(np.r_[0, 1, 3, 127, 128, np.linspace(0, queries - 1, 60).astype(int)]))
    sampled = q[:, rows], kv, sinks, ids[:, rows]
    rows = way.array(rows)
    check((out[:, rows], lse[:, rows]), sampled, 512**-0.5, dtype)


@pytest.mark.parametrize("growth", [0.0, 0.05, 3.0])
def test_growing_maximum(way, growth):
    """Scores that rise or fall along the slots: the running maximum moves often, seldom, or never."""
    for order in (1, -1):
        q, kv, sinks, _ = random_inputs(b=1, s=3, h=64, d=512, k=500, ids=np.tile(np.arange(500), (1, 3, 1)))
        q = cupy.abs(q.astype(np.float32)).astype(q.dtype)
        kv = (kv.astype(np.float32) * 0.1 + growth * cupy.arange(500)[None, :, None] / 500).astype(kv.dtype)
        ids = cupy.arange(500)[None, None, ::order] + cupy.zeros((1, 3, 1), np.int64)
        inputs = q, kv, sinks, ids
        check(way(*inputs, 512**-0.5), inputs, 512**-0.5, "bfloat16")


@pytest.mark.parametrize("sink", [INF, -INF, 2e38, -2e38, 85.0, -85.0, 200.0])
@pytest.mark.parametrize("h", [3, 64])
def test_sinks(way, sink, h):
    inputs = random_inputs(h=h, d=512)
    inputs[2][1] = sink
    out, lse = way(*inputs, 512**-0.5)
    check((out, lse), inputs, 512**-0.5, "bfloat16")
    if sink in (INF, 2e38):
        assert (to_numpy(out)[:, :, 1] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
@pytest.mark.parametrize("h", [3, 64])
def test_bad_rows_reach_only_those_who_selected_them(way, bad, h):
    q, kv, sinks, ids = random_inputs(s=6, h=h, d=512, unseen=1)
    ids = cupy.where(ids == 0, 4, ids)
    ids[0, 3, 2] = 0
    clean = kv.copy()
    kv[:, 0], clean[:, 0] = bad, 1
    out, want = to_numpy(way(q, kv, sinks, ids, 0.1)[0]), to_numpy(way(q, clean, sinks, ids, 0.1)[0])
    touched = np.zeros(ids.shape[:2], bool)
    touched[0, 3] = True
    check_equal(out[~touched], want[~touched])
    assert np.isnan(out[0, 3]).any(-1).all()


def test_bad_query_stays_alone(way):
    q, kv, sinks, ids = random_inputs(h=33, d=512)
    want = to_numpy(way(q, kv, sinks, ids, 0.1)[0])
    q[0, 2, 1] = np.nan
    out = to_numpy(way(q, kv, sinks, ids, 0.1)[0])
    touched = np.zeros(out.shape[:3], bool)
    touched[0, 2, 1] = True
    check_equal(out[~touched], want[~touched])
    assert np.isnan(out[touched]).all()


@pytest.mark.parametrize("axis", "bshkt")
def test_axes_of_length_zero(way, axis):
    q, kv, sinks, ids = random_inputs(**{"b": 2, "s": 2, "h": 3, "k": 5, "t": 4, axis: 0})
    out, lse = way(q, kv, sinks, ids, 0.1)
    assert tuple(out.shape) == q.shape and tuple(lse.shape) == q.shape[:3]
    if axis in "kt":
        assert (to_numpy(out) == 0).all() and np.isneginf(to_numpy(lse)).all()


# --- Memory --------------------------------------------------------------------------------------------


def every_second(x, axis):
    """x as every second entry along an axis of a parent filled with NaN."""
    shape = [n * (1 + (i == axis)) for i, n in enumerate(x.shape)]
    parent = nans(shape, x.dtype) if x.dtype.kind not in "iu" else cupy.zeros(shape, x.dtype)
    view = parent[(slice(None),) * axis + (slice(None, None, 2),)]
    view[...] = x
    return view


def inside(x, before, after):
    """x as the middle columns of a parent filled with NaN."""
    parent = nans((*x.shape[:-1], before + x.shape[-1] + after), x.dtype)
    view = parent[..., before : before + x.shape[-1]]
    view[...] = x
    return view


VIEWS = {
    "heads first": lambda x: cupy.ascontiguousarray(x.swapaxes(1, -2)).swapaxes(1, -2),
    "batch last": lambda x: cupy.moveaxis(cupy.ascontiguousarray(cupy.moveaxis(x, 0, -2)), -2, 0),
    "every second row": lambda x: every_second(x, 1),
    "padded rows": lambda x: inside(x, 8, 16),
    "odd rows": lambda x: inside(x, 3, 2),  # 16-byte copies do not reach these two: the caller's arrays are copied
    "every second column": lambda x: every_second(x, x.ndim - 1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("d", DIMS)
def test_views_equal_copies(way, view, d):
    q, kv, sinks, ids = random_inputs(h=20, d=d)
    want = way(q, kv, sinks, ids, 0.1)
    q_view, kv_view = VIEWS[view](q), VIEWS[view](kv)
    kept = q_view.copy(), kv_view.copy()
    for got, w in zip(way(q_view, kv_view, sinks, every_second(ids.astype(np.int64), 2), 0.1), want, strict=True):
        check_equal(got, w)
    for x, copy in zip((q_view, kv_view), kept, strict=True):
        check_equal(x, copy)


def test_flipped_views_equal_copies(cupy_way):
    q, kv, sinks, ids = random_inputs(h=20, d=512)
    want = cupy_way(q, kv, sinks, ids, 0.1)
    q_view, kv_view = (cupy.ascontiguousarray(x[:, ::-1])[:, ::-1] for x in (q, kv))
    for got, w in zip(cupy_way(q_view, kv_view, sinks[::-1].copy()[::-1], ids, 0.1), want, strict=True):
        check_equal(got, w)


@pytest.mark.parametrize("h", HEADS)
@pytest.mark.parametrize("d", DIMS)
def test_nothing_around_out_and_lse_is_written(path, h, d):
    from dsv4cp.sparse_attention import contract, cuda

    q, kv, sinks, ids = random_inputs(b=2, s=3, h=h, d=d)
    spec = contract.check(q, kv, sinks, ids, 0.1)
    ids32, margin = ids.astype(np.int32), 4096
    whole = cupy.full(q.size * 2 + 2 * margin, 0xA5, np.uint8)
    whole_lse = cupy.full(q.size // d * 4 + 2 * margin, 0xA5, np.uint8)
    strides = {"q_strides": (3 * h * d, h * d, d, 1), "kv_strides": (40 * d, d, 1)}
    for lse in (whole_lse.data.ptr + margin, 0):
        cuda.launch_forward(
            q.data.ptr, kv.data.ptr, sinks.data.ptr, ids32.data.ptr, whole.data.ptr + margin, lse, spec,
            dtype="bfloat16", **strides,
        )  # fmt: skip
    for block in (whole, whole_lse):
        assert bool((block[:margin] == 0xA5).all()) and bool((block[-margin:] == 0xA5).all())
    out = whole[margin:-margin].view(q.dtype).reshape(q.shape)
    lse = whole_lse[margin:-margin].view(np.float32).reshape(q.shape[:3])
    check((out, lse), (q, kv, sinks, ids), 0.1, "bfloat16")


def test_offsets_beyond_32_bits(cupy_way):
    """Key rows 2^21 elements apart, the last ones more than 2^32 bytes and 2^31 elements away."""
    keys, step = 1100, 2**21
    parent = cupy.empty((keys, step), DTYPES["bfloat16"])
    last = np.tile(np.arange(keys - 64, keys), (1, 4, 1))
    q, kv, sinks, ids = random_inputs(b=1, s=4, h=16, d=512, k=keys, ids=last)
    parent[:, :512] = kv[0]
    got = cupy_way(q, parent[None, :, :512], sinks, ids, 0.1)
    for g, w in zip(got, cupy_way(q, kv, sinks, ids, 0.1), strict=True):
        check_equal(g, w)


# --- Bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", [8, 64, 128])
def test_a_query_has_the_same_bits_alone_and_among_others(way, h):
    q, kv, sinks, ids = random_inputs(b=3, s=40, h=h, d=512, k=300, t=400)
    out, lse = way(q, kv, sinks, ids, 512**-0.5)
    for b, s in ((0, 0), (1, 17), (2, 39)):
        one = way(q[b : b + 1, s : s + 1], kv[b : b + 1], sinks, ids[b : b + 1, s : s + 1], 512**-0.5)
        check_equal(out[b : b + 1, s : s + 1], one[0])
        check_equal(lse[b : b + 1, s : s + 1], one[1])
    start = way(q[:, :20], kv, sinks, ids[:, :20], 512**-0.5)
    check_equal(out[:, :20], start[0])
    check_equal(lse[:, :20], start[1])


@pytest.mark.parametrize("rounding", [False, True])
def test_runs_repeat_bit_for_bit(way, rounding):
    inputs = random_inputs(b=1, s=300, h=64, d=512, k=900, t=640)
    want = [to_numpy(x) for x in way(*inputs, 512**-0.5, reference_rounding=rounding)]
    for _ in range(20):
        for got, w in zip(way(*inputs, 512**-0.5, reference_rounding=rounding), want, strict=True):
            check_equal(to_numpy(got), w)


@pytest.mark.parametrize("h", [8, 64])
def test_reference_rounding(way, h):
    inputs = random_inputs(h=h, d=512)
    check(way(*inputs, 512**-0.5, reference_rounding=True), inputs, 512**-0.5, "bfloat16")
    # Scores of -5e32 are below the start of the running maximum.
    low, q = (cupy.asarray(np.full((1, 1, n, 512), v, DTYPES["bfloat16"])) for n, v in ((1, -1e15), (h, 1e15)))
    sinks, ids = cupy.asarray(np.full(h, -INF, np.float32)), cupy.zeros((1, 1, 1), np.int64)
    check_equal(to_numpy(way(q, low[0], sinks, ids, 1.0)[0]), -to_numpy(q))
    rounded, lse = way(q, low[0], sinks, ids, 1.0, reference_rounding=True)
    assert (to_numpy(rounded) == 0).all() and np.isneginf(to_numpy(lse)).all()


# --- Plans, ids ----------------------------------------------------------------------------------------


def test_plans(way):
    q, kv, sinks, ids = random_inputs(h=20, d=512)
    plan = way.plan(ids, 40)
    want = way(q, kv, sinks, ids, 0.1)
    for given in (ids, None):
        for got, w in zip(way(q, kv, sinks, given, 0.1, plan=plan), want, strict=True):
            check_equal(got, w)
    with pytest.raises(ValueError, match="kv_sequence"):
        way(q, kv[:, :39], sinks, ids, 0.1, plan=plan)
    for name in ("reference", "cudnn"):
        other = dsv4cp.SparseIndexPlan(name, plan.indices, None, None, 40)
        with pytest.raises(ValueError, match="plan"):
            way(q, kv, sinks, ids, 0.1, plan=other)


def test_ids_beyond_int32_are_masked(way):
    q, kv, sinks, ids = random_inputs(h=20, d=128)
    wide = cupy.where((ids >= 0) & (ids < 40), ids, ids % 7 + 2**32)
    wide[0, 0, :3] = cupy.asarray([-(2**63), 2**63 - 1, 2**31])
    ids[0, 0, :3] = -1
    for got, w in zip(way(q, kv, sinks, wide, 0.1), way(q, kv, sinks, ids, 0.1), strict=True):
        check_equal(got, w)


# --- Streams, graphs, compilations ---------------------------------------------------------------------


def test_graph_replays_see_new_contents(way):
    first, second = (random_inputs(b=1, s=50, h=64, d=512, k=300, t=200, seed=n) for n in (1, 2))
    held = [x.copy() for x in first]
    want = [[to_numpy(x) for x in way(*inputs, 0.05)] for inputs in (first, second)]
    arrays = [way.array(x) for x in held]  # the same memory
    if way.library == "cupy":
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            way(*arrays, 0.05)  # fills the pool of this stream: capture cannot allocate
            stream.synchronize()
            stream.begin_capture()
            got = way(*arrays, 0.05)
            graph = stream.end_capture()
        replay, wait = (lambda: graph.launch(stream)), stream.synchronize
    else:
        import torch

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = way(*arrays, 0.05)
        replay, wait = graph.replay, torch.cuda.synchronize
    for inputs, results in zip((first, second, first), (*want, want[0]), strict=True):
        for to, new in zip(held, inputs, strict=True):
            to[...] = new
        cupy.cuda.Device().synchronize()
        replay()
        wait()
        for g, w in zip(got, results, strict=True):
            check_equal(to_numpy(g), w)


@contextlib.contextmanager
def current(way, stream):
    """The stream is CuPy's current one, and torch's for a way of torch."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(stream)
        if way.library == "torch":
            import torch

            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        yield


def test_calls_follow_the_current_stream_and_never_wait(way):
    inputs = random_inputs(b=1, s=64, h=16, d=512, k=300, t=200)
    want = [to_numpy(x) for x in way(*inputs, 0.05)]
    held = [cupy.zeros_like(x) for x in inputs]
    arrays = [way.array(x) for x in held]
    stream = cupy.cuda.Stream(non_blocking=True)
    with current(way, stream):
        way(*arrays, 0.05)  # fills the pool of this stream
    cupy.cuda.Device().synchronize()
    with current(way, stream), gate.held(stream):
        for to, new in zip(held, inputs, strict=True):
            to[...] = new  # only once the gate is open, and only for this stream's work
        got = way(*arrays, 0.05)
    for g, w in zip(got, want, strict=True):
        check_equal(to_numpy(g), w)


def test_shapes_do_not_recompile(cupy_way):
    from dsv4cp.sparse_attention import cuda

    rng = np.random.default_rng(0)
    kernels = []
    for _ in range(50):
        b, s, k, t = (int(n) for n in rng.integers(1, 60, 4))
        cupy_way(*random_inputs(b=b, s=s, h=8, d=128, k=k, t=t), 0.1)
        kernels.append(cuda._kernel.cache_info().currsize)
    assert kernels[-1] == kernels[0]


# --- Which backend -------------------------------------------------------------------------------------


def test_auto_takes_the_kernels_for_what_they_fit():
    q, kv, sinks, ids = random_inputs(h=4, d=64)
    auto = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.1)
    check_equal(auto, dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.1, backend="cuda"))
    wide = [x.astype(np.float32) for x in (q, kv)]
    same = dsv4cp.dsv4_sparse_attention(*wide, sinks, ids, 0.1, backend="reference")
    check_close(dsv4cp.dsv4_sparse_attention(*wide, sinks, ids, 0.1), to_numpy(same), "attention")
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, 40)
    assert plan.backend == "cuda"
    check_close(dsv4cp.dsv4_sparse_attention(*wide, sinks, ids, 0.1, plan=plan), to_numpy(same), "attention")
    with pytest.raises(TypeError, match="bfloat16 or float16"):
        dsv4cp.dsv4_sparse_attention(*wide, sinks, ids, 0.1, backend="cuda")
    with pytest.raises(TypeError, match="kv"):
        dsv4cp.dsv4_sparse_attention(q, kv.astype(np.float16), sinks, ids, 0.1, backend="cuda")
    narrow = q[..., :48], kv[..., :48]
    with pytest.raises(ValueError, match="64, 128, 256 or 512"):
        dsv4cp.dsv4_sparse_attention(*narrow, sinks, ids, 0.1, backend="cuda")
    check_frobenius(
        dsv4cp.dsv4_sparse_attention(*narrow, sinks, ids, 0.1), oracle(*narrow, sinks, ids, 0.1)[0], "attention"
    )


def test_gradient_of_auto_and_by_name_with_a_plan():
    q, kv, sinks, ids = random_inputs(h=4, d=64, unseen=1)
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.1, return_lse=True)
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, 40)
    grad = cupy.ones_like(out)
    want = naive.attention_grad(grad, q, kv, sinks, ids.get(), 0.1)
    for backend in ("auto", "cuda", "reference"):
        shared = None if backend == "reference" else plan
        got = dsv4cp.dsv4_sparse_attention_grad(
            grad, q, kv, sinks, ids, out, lse, 0.1, backend=backend, plan=shared
        )
        for g, w in zip(got, want, strict=True):
            check_frobenius(g, w, "attention_grad")
    first, named = (
        dsv4cp.dsv4_sparse_attention_grad(grad, q, kv, sinks, ids, out, lse, 0.1, backend=name)
        for name in ("auto", "cuda")
    )
    check_equal(named[0], first[0])
    check_equal(named[2], first[2])
