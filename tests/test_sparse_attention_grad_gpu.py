"""Sparse attention's gradient kernels: CuPy arrays and torch tensors, both main kernels, both kinds of sums."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from tests.support.attention_gpu import DTYPES, oracle_grad, random_inputs, relative_error  # noqa: E402
from tests.support.compare import check_close, check_equal, check_like, to_numpy  # noqa: E402
from tests.support.tolerances import EPS, FROBENIUS  # noqa: E402

pytestmark = pytest.mark.gpu

INF = np.inf
DIMS = (64, 128, 256, 512)
HEADS = (1, 3, 8, 24, 31, 32, 33, 48, 64, 96, 128)
SLOTS = (1, 2, 3, 63, 65, 129, 192, 640, 705, 1152)
IMPLEMENTATIONS = ("atomic", "deterministic")
CAP = 2**31


def cupy_grads(grad_out, q, kv, sinks, ids, scale, impl="atomic", **options):
    """(grad_q, grad_kv, grad_sinks) of backend "cuda" on CuPy arrays."""
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend="cuda", return_lse=True)
    return dsv4cp.dsv4_sparse_attention_grad(
        grad_out, q, kv, sinks, ids, out, lse, scale, backend="cuda", backward_impl=impl, **options
    )


def torch_grads(grad_out, q, kv, sinks, ids, scale, impl="atomic", **options):
    """The same through torch_ops' "tilelang" and torch autograd; CuPy arrays go in, tensors come out."""
    from dsv4cp import _bridge, torch_ops

    leaves = [_bridge.to_torch(x).clone().requires_grad_() for x in (q, kv, sinks)]
    out = torch_ops.dsv4_sparse_attention(
        *leaves, _bridge.to_torch(ids), scale, backend="tilelang", backward_impl=impl, **options
    )
    out.backward(_bridge.to_torch(grad_out))
    return tuple(x.grad for x in leaves)


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


def inputs(*args, seed=0, **sizes):
    """(grad_out, q, kv, sinks, ids) with hostile ids, and NaN in every row that no query selects."""
    q, kv, sinks, ids = random_inputs(*args, seed=seed, **sizes)
    g = np.random.default_rng(seed + 1).standard_normal(q.shape, np.float32).astype(q.dtype)
    return cupy.asarray(g), q, kv, sinks, ids


def check(got, data, scale) -> None:
    """Against the float64 oracle: each gradient as a whole, in the dtype of its input."""
    _, q, kv, sinks, _ = data
    for g, want, like, name in zip(got, oracle_grad(*data, scale), (q, kv, sinks), ("q", "kv", "sinks"), strict=True):
        check_like(g, dtype=like.dtype.name, shape=like.shape)
        limit = FROBENIUS["sink_grad" if name == "sinks" else "attention_grad"]
        error = relative_error(cupy.asarray(to_numpy(g)), want)
        assert error <= limit, f"gradient of {name}: {error:.3g}"


def check_same(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        check_equal(g, w)


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
def test_rows_without_keys(way, impl, sink, incoming):
    g, q, kv, sinks, ids = inputs(d=64, h=5)
    g[...], sinks[...], ids[...] = incoming, sink, -1
    for got in way(g, q, kv, sinks, ids, 0.1, impl):
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
def test_masked_slots_first(way, impl, masked):
    check_same(way(*one_channel([-1] * masked + [0, 1]), 1.0, impl), way(*one_channel([0, 1]), 1.0, impl))


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
def test_slot_widths(way, impl, slots):
    data = inputs(b=1, s=4, h=64, d=512, k=300, t=slots)
    check(way(*data, 512**-0.5, impl), data, 512**-0.5)


@pytest.mark.parametrize("heads", HEADS)
def test_head_counts(way, impl, heads):
    data = inputs(b=1, s=4, h=heads, d=512, k=150, t=130, seed=heads)
    check(way(*data, 512**-0.5, impl), data, 512**-0.5)


def test_heads_equal_calls_of_one(way, impl):
    g, q, kv, sinks, ids = data = inputs(h=35, d=64)
    got = list(map(to_numpy, way(*data, 0.2, impl)))
    parts = [way(g[:, :, h], q[:, :, h], kv, sinks[h], ids, 0.2, impl) for h in (slice(n, n + 1) for n in range(35))]
    dq, dkv, dsinks = zip(*(map(to_numpy, x) for x in parts), strict=True)
    check_close(got[0], np.concatenate(dq, 2), "attention_grad", "bfloat16")
    check_close(got[2], np.concatenate(dsinks), "attention_grad", "bfloat16")
    total = np.sum([x.astype(np.float64) for x in dkv], 0)  # each part is rounded
    assert relative_error(cupy.asarray(got[1]), cupy.asarray(total)) <= FROBENIUS["attention_grad"]


# --- The oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", DIMS)
@pytest.mark.parametrize("heads", [64, 20, 7, 100])
def test_matches_the_oracle(way, impl, heads, d, dtype):
    data = inputs(b=2, s=6, h=heads, d=d, k=120, t=150, dtype=dtype, seed=d)
    check(way(*data, d**-0.5, impl), data, d**-0.5)


@pytest.mark.parametrize("sink", [INF, -INF, 2e38, -2e38, 85.0, -85.0])
def test_sinks(way, impl, sink):
    data = inputs(h=33, d=64)
    data[3][::2] = sink
    got = way(*data, 0.1, impl)
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
        assert relative_error(scaled, w.astype(np.float64)) <= 1e-4


def test_one_large_query_costs_others_nothing(path):
    """A query of gradients 2^60 times as large takes precision from the keys that it selects alone."""
    g, q, kv, sinks, ids = inputs(b=1, s=40, h=16, d=128, k=200, t=40, unseen=1.0)
    g[0, 5] = g[0, 5].astype(np.float32) * np.float32(2.0**60)
    got = cupy_grads(g, q, kv, sinks, ids, 0.1, "deterministic")
    _, want, _ = oracle_grad(g, q, kv, sinks, ids, 0.1)
    large = np.isin(np.arange(200), ids[0, 5].get())
    for rows in (large, ~large):
        assert relative_error(got[1][0, rows], want[0, rows]) <= FROBENIUS["attention_grad"]


# --- NaN and infinity ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, INF])
@pytest.mark.parametrize("where", ["kv", "q", "grad_out"])
def test_a_bad_number_reaches_only_the_rows_of_its_query(way, where, bad):
    g, q, kv, sinks, ids = inputs(s=6, h=20, d=128, k=30, unseen=1.0)
    ids = cupy.where(ids == 0, 4, ids)
    ids[1, 3] = -1
    ids[1, 3, :4] = cupy.asarray([0, 2, 2, 99])
    want = list(map(to_numpy, way(g, q, kv, sinks, ids, 0.1, "deterministic")))
    {"kv": kv[1, 0], "q": q[1, 3, 4], "grad_out": g[1, 3, 4]}[where][3] = bad
    got = list(map(to_numpy, way(g, q, kv, sinks, ids, 0.1, "deterministic")))
    query, rows = np.zeros(q.shape[:2], bool), np.zeros(kv.shape[:2], bool)
    query[1, 3] = rows[1, [0, 2]] = True
    check_equal(got[0][~query], want[0][~query])
    check_equal(got[1][~rows], want[1][~rows])
    assert np.isnan(got[1][rows]).all()
    atomic = list(map(to_numpy, way(g, q, kv, sinks, ids, 0.1, "atomic")))
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
    want = way(*long_call, "deterministic")
    busy, noise = cupy.cuda.Stream(non_blocking=True), cupy.ones((2048, 2048), np.float32)
    for n in range(20):
        with busy:
            for _ in range(1 + n % 4):
                cupy.add(noise, 1, out=noise)
        check_same(way(*long_call, "deterministic"), want)
        if n < 3:
            atomic = way(*long_call, "atomic")
            check_equal(atomic[0], want[0])
            check_equal(atomic[2], want[2])


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
    whole = way(*long_call, "deterministic")
    for n in range(2):
        one = slice(n, n + 1)
        part = way(g[one], q[one], kv[one], sinks, ids[one], scale, "deterministic")
        check_equal(to_numpy(part[0]), to_numpy(whole[0])[one])
        check_equal(to_numpy(part[1]), to_numpy(whole[1])[one])


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


# --- Arrays --------------------------------------------------------------------------------------------

LAYOUTS = {
    "stride 0": lambda x: cupy.broadcast_to(x[:1, :1, :1, :], x.shape),
    "one number": lambda x: cupy.broadcast_to(x[:1, :1, :1, :1], x.shape),
    "transposed": lambda x: cupy.ascontiguousarray(x.T).T,
    "heads first": lambda x: cupy.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "flipped": lambda x: cupy.ascontiguousarray(x[:, ::-1, ..., ::-1])[:, ::-1, ..., ::-1],
    "queries flipped": lambda x: cupy.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "every second row": lambda x: cupy.repeat(x, 2, axis=1)[:, ::2],
    "odd address": lambda x: cupy.concatenate([x[..., :1], x], axis=-1)[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_gradients_equal_copies(path, layout):
    g, q, kv, sinks, ids = inputs(h=20, d=128)
    view = LAYOUTS[layout](g)
    want = cupy_grads(view.copy(order="C"), q, kv, sinks, ids, 0.1, "deterministic")
    check_same(cupy_grads(view, q, kv, sinks, ids, 0.1, "deterministic"), want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_inputs_equal_copies(path, layout):
    g, q, kv, sinks, ids = inputs(h=20, d=128, b=1, unseen=1.0)
    view = LAYOUTS[layout]
    q_, kv_ = view(q), view(kv[:, :, None])[:, :, 0]
    out, lse = dsv4cp.dsv4_sparse_attention(q_, kv_, sinks, ids, 0.1, backend="cuda", return_lse=True)

    def call(*arrays):
        return dsv4cp.dsv4_sparse_attention_grad(*arrays, 0.1, backend="cuda", backward_impl="deterministic")

    parent = cupy.empty((*out.shape[:3], 256), out.dtype)
    parent[..., :128] = out
    views = view(g), q_, kv_, sinks, ids, parent[..., :128], lse
    check_same(call(*views), call(*(x.copy(order="C") for x in views)))


def test_torch_gradients_in_any_layout(path):
    torch = pytest.importorskip("torch")
    from dsv4cp import _bridge, torch_ops

    g, q, kv, sinks, ids = map(_bridge.to_torch, inputs(h=20, d=128))
    leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
    out = torch_ops.dsv4_sparse_attention(*leaves, ids, 0.1, backend="tilelang", backward_impl="deterministic")
    parent = g.permute(3, 2, 1, 0).contiguous()
    one, row = g[..., :1].contiguous(), g[:1, :1, :1]
    for grad in (parent.permute(3, 2, 1, 0), row.expand(g.shape), one.expand(g.shape), torch.cat([g, g], 2)[:, :, ::2]):
        got = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        check_same(got, torch.autograd.grad(out, leaves, grad.contiguous(), retain_graph=True))


@pytest.mark.parametrize("other", ["float32", "float16", "float64"])
def test_dtypes_of_the_other_arrays(path, other):
    g, q, kv, sinks, ids = inputs(h=20, d=128)
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.1, backend="cuda", return_lse=True)
    want = dsv4cp.dsv4_sparse_attention_grad(g, q, kv, sinks, ids, out, lse, 0.1, backend="cuda")
    wide = [x.astype(np.float32).astype(other) for x in (g, out)]
    got = dsv4cp.dsv4_sparse_attention_grad(
        wide[0], q, kv, sinks.astype(other), ids.astype(np.int32), wide[1], lse.astype(np.float64), 0.1, backend="cuda"
    )
    assert got[2].dtype.name == other
    if other != "float16":
        check_equal(got[0], want[0])
    check_close(got[1], want[1], "attention_grad", "bfloat16")


@pytest.mark.parametrize("axis", ["b", "s", "h", "k", "t"])
def test_axes_of_length_zero(way, impl, axis):
    sizes = {"b": 2, "s": 5, "h": 3, "k": 40, "t": 70, axis: 0}
    rng = np.random.default_rng(0)
    b, s, h, k, t = sizes.values()
    shapes = (b, s, h, 64), (b, s, h, 64), (b, k, 64)
    floats = [rng.standard_normal(n).astype(DTYPES["bfloat16"]) for n in shapes]
    data = [*floats, np.zeros(h, np.float32), rng.integers(-2, 42, (b, s, t))]
    for got, like in zip(way(*map(cupy.asarray, data), 0.1, impl), data[1:4], strict=True):
        assert got.shape == like.shape
        assert (to_numpy(got) == 0).all()


def test_nothing_is_written_around_outputs_and_inputs(path, impl):
    """Addresses inside buffers of canaries: kv's row before the first, all outputs, the working memory."""
    from dsv4cp.sparse_attention import contract, cuda, cuda_bwd

    g, q, kv, sinks, ids = inputs(h=33, d=512, k=50)
    spec = contract.check(q, kv, sinks, ids, 0.1)
    ids = ids.astype(np.int32)
    out, lse = cuda.forward(q, kv, sinks, ids, spec)
    plan = cuda_bwd.layout(spec, impl == "deterministic", CAP)
    sizes = {"grad_q": 2 * q.size, "grad_kv": 2 * kv.size, "grad_sinks": 4 * sinks.size, "work": plan.size}
    around = {name: cupy.full(size + 4096, 0xA5, np.uint8) for name, size in sizes.items()}
    buffer = cupy.full((spec.batch, spec.keys + 1, spec.dim), np.nan, kv.dtype)
    buffer[:, 1:] = kv
    held = buffer[:, 1:]
    arrays = {"grad_out": g, "q": q, "kv": held, "out": out}
    cuda_bwd.launch_backward(
        **{name: x.data.ptr for name, x in arrays.items()},
        **{f"{name}_strides": cuda._strides(x) for name, x in arrays.items()},
        **{name: x.data.ptr + 2048 for name, x in around.items()},
        sinks=sinks.data.ptr, ids=ids.data.ptr, lse=lse.data.ptr, plan=plan, spec=spec, dtype="bfloat16",
        deterministic=impl == "deterministic",
    )  # fmt: skip
    for name, x in around.items():
        assert (x[:2048] == 0xA5).all(), name
        assert (x[2048 + sizes[name] :] == 0xA5).all(), name
    kinds = {"grad_q": (q.dtype, q.shape), "grad_kv": (kv.dtype, kv.shape), "grad_sinks": (np.float32, sinks.shape)}
    got = [around[n][2048 : 2048 + sizes[n]].view(dtype).reshape(shape) for n, (dtype, shape) in kinds.items()]
    check(got, (g, q, kv, sinks, ids), 0.1)
    assert cupy.isnan(buffer[:, 0].astype(np.float32)).all()


# --- Dispatch, plans, streams --------------------------------------------------------------------------


def test_which_calls_get_the_kernels(path):
    g, q, kv, sinks, ids = inputs(h=5, d=64, unseen=1.0)
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.1, backend="cuda", return_lse=True)

    def call(*arrays, **options):
        return dsv4cp.dsv4_sparse_attention_grad(*arrays, 0.1, **options)

    same = {"backward_impl": "deterministic"}
    want = call(g, q, kv, sinks, ids, out, lse, backend="cuda", **same)
    check_same(call(g, q, kv, sinks, ids, out, lse, **same), want)
    single = [x.astype(np.float32) for x in (g, q, kv)]
    call(*single, sinks, ids, out, lse)
    with pytest.raises(TypeError, match="the CUDA kernels take"):
        call(*single, sinks, ids, out, lse, backend="cuda")
    with pytest.raises(RuntimeError, match="deterministic"):
        call(*single, sinks, ids, out, lse, **same)
    with pytest.raises(ValueError, match="head_dim"):
        call(g[..., :48], q[..., :48], kv[..., :48], sinks, ids, out[..., :48], lse, backend="cuda")


def test_a_plan_stands_for_the_ids(path):
    data = g, q, kv, sinks, ids = inputs(h=5, d=64)
    want = cupy_grads(*data, 0.1, "deterministic")
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, kv.shape[1], "cuda")
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, None, 0.1, backend="cuda", plan=plan, return_lse=True)
    got = dsv4cp.dsv4_sparse_attention_grad(
        g, q, kv, sinks, None, out, lse, 0.1, backend="cuda", backward_impl="deterministic", plan=plan
    )
    check_same(got, want)


def test_a_side_stream_of_cupy(path, impl):
    real = inputs(h=64, d=512, b=1, s=64, k=80)
    want = cupy_grads(*real, 0.05, impl)
    side, slow = cupy.cuda.Stream(non_blocking=True), cupy.ones((4096, 4096), np.float32)
    for _ in range(10):
        held = [cupy.full_like(x, np.nan) for x in real[:4]]
        cupy.cuda.Device().synchronize()
        with side:
            for _ in range(20):
                cupy.add(slow, 1, out=slow)
            for to, x in zip(held, real, strict=False):
                to[...] = x
            got = cupy_grads(*held, real[4], 0.05, impl)
        side.synchronize()
        check_equal(got[0], want[0])
        check_equal(got[2], want[2])
        if impl == "deterministic":
            check_equal(got[1], want[1])


def test_backward_on_a_side_stream_of_torch(path):
    """Golden case 23, deterministic: forward and backward after a long kernel, bit for bit a hundred times."""
    torch = pytest.importorskip("torch")
    from dsv4cp import _bridge, torch_ops

    g, q, kv, sinks, ids = map(_bridge.to_torch, inputs(h=64, d=512, k=60, unseen=1.0))

    def call(*leaves):
        out = torch_ops.dsv4_sparse_attention(*leaves, ids, 0.05, backend="tilelang", backward_impl="deterministic")
        return torch.autograd.grad(out, leaves, g)

    want = call(*(x.clone().requires_grad_() for x in (q, kv, sinks)))
    side = torch.cuda.Stream()
    for _ in range(100):
        held = [torch.full_like(x, float("nan")).requires_grad_() for x in (q, kv, sinks)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000)
            with torch.no_grad():
                for to, new in zip(held, (q, kv, sinks), strict=True):
                    to.copy_(new)
            got = call(*held)
        side.synchronize()
        check_same(got, want)


def test_a_finished_call_does_not_wait_and_can_be_captured(path, impl):
    """In a CUDA graph anything that waits for the device is an error."""
    torch = pytest.importorskip("torch")
    from dsv4cp import _bridge, torch_ops

    g, *rest, ids = map(_bridge.to_torch, inputs(h=64, d=512, k=60, unseen=1.0))
    leaves = [x.clone().requires_grad_() for x in rest]

    def call():
        out = torch_ops.dsv4_sparse_attention(*leaves, ids, 0.05, backend="tilelang", backward_impl=impl)
        return torch.autograd.grad(out, leaves, g)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        want = call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        got = call()
    graph.replay()
    torch.cuda.synchronize()
    check_equal(got[0], want[0])
    check_equal(got[2], want[2])
    check_close(got[1], to_numpy(want[1]), "attention_grad", "bfloat16")


# --- Training ------------------------------------------------------------------------------------------


def losses(backend: str, steps: int = 50, compiled: bool = False, **options) -> list[float]:
    """A small attention layer learns a fixed target: its loss after each step."""
    torch = pytest.importorskip("torch")
    from dsv4cp import torch_ops

    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape, scale=1.0):
        return scale * torch.randn(shape, generator=generator, device="cuda")

    b, s, width, h, d, window = 2, 96, 48, 6, 64, 16
    x, target = normal(b, s, width), normal(b, s, width)
    weights = [normal(width, h * d, scale=0.2), normal(width, d, scale=0.2), normal(h * d, width, scale=0.1)]
    weights = [w.requires_grad_() for w in weights]
    sinks = torch.zeros(h, device="cuda", requires_grad=True)
    ids = torch_ops.build_dsv4_sparse_topk_indices(
        batch_size=b, seq_len=s, key_len=s, window_size=window, device="cuda"
    )
    optimizer = torch.optim.Adam([*weights, sinks], lr=5e-3)

    def loss_of():
        q = (x @ weights[0]).view(b, s, h, d).bfloat16()
        kv = (x @ weights[1]).bfloat16()
        out = torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, d**-0.5, backend=backend, **options)
        return (out.reshape(b, s, h * d).float() @ weights[2] - target).square().mean()

    if compiled:
        torch._dynamo.reset()
        loss_of = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    curve = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        curve.append(float(loss))
    return curve


def test_training_gives_the_loss_curve_of_the_reference(path, impl):
    want = np.array(losses("torch"))
    got = np.array(losses("tilelang", backward_impl=impl))
    assert want[-1] < 0.7 * want[0], "the layer learns"
    assert np.abs(got - want).max() <= 5e-3 * want[0], np.abs(got / want - 1).max()
    if impl == "deterministic":
        assert losses("tilelang", backward_impl=impl) == got.tolist()


def test_training_under_torch_compile(path, impl):
    want = losses("tilelang", 8, backward_impl=impl)
    got = losses("tilelang", 8, compiled=True, backward_impl=impl)
    np.testing.assert_allclose(got, want, rtol=2e-3)


def test_what_torch_differentiates_itself_claims_no_fixed_order(path):
    torch = pytest.importorskip("torch")
    from dsv4cp import _bridge, torch_ops

    g, *rest, ids = map(_bridge.to_torch, inputs(h=5, d=64, unseen=1.0))
    leaves = [x.clone().requires_grad_() for x in rest]
    options = {"backend": "tilelang", "backward_impl": "deterministic"}
    out, lse = torch_ops.dsv4_sparse_attention(*leaves, ids, 0.1, return_lse=True, **options)
    with pytest.raises(RuntimeError, match="gradients of lse"):
        torch.autograd.grad(lse[torch.isfinite(lse)].sum(), leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(out, leaves, g, create_graph=True)


def test_the_path_does_not_depend_on_the_cap(path):
    """Bits may differ between the main kernels, so a cap must not choose between them."""
    from dsv4cp.sparse_attention import contract, cuda_bwd

    data = inputs(b=2, h=64, d=512)
    spec = contract.check(*data[1:], 0.1)
    here = cuda_bwd._main(spec, 0)
    assert here is cuda_bwd._main(dataclasses.replace(spec, batch=1), 0)
