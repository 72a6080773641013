"""Backend "cudnn" of sparse attention on a GPU with NVIDIA's real package: CuPy arrays and torch tensors, forward and
gradient, with and without a plan.

The package is optional: without it, or on a GPU that it has no kernels for, these tests skip, under --require-gpu too.
A package that is there and does not load fails them.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from dsv4cp import _bridge, torch_ops  # noqa: E402
from dsv4cp.sparse_attention import contract, torch_bridge_cudnn  # noqa: E402
from tests.support import gate, naive  # noqa: E402
from tests.support.attention_gpu import DTYPES, layer_inputs, oracle, oracle_grad, random_inputs  # noqa: E402
from tests.support.compare import check_close, check_equal, check_frobenius, check_like, to_numpy  # noqa: E402

pytestmark = pytest.mark.gpu

D, SCALE, INF = 512, 512**-0.5, np.inf
LSE_LIMIT = 2e-3


@pytest.fixture(autouse=True)
def there():
    if importlib.util.find_spec("cudnn") is None:
        pytest.skip("nvidia-cudnn-frontend is not installed")
    capability = cupy.cuda.Device().compute_capability
    if capability[:-1] not in ("9", "10"):
        pytest.skip(f"cuDNN has no kernels for SM{capability}")


class Way:
    """One library; CuPy arrays go in, (out, lse, (grad_q, grad_kv, grad_sinks)) of the library come out."""

    def __init__(self, library: str, planned: bool) -> None:
        self.library, self.planned = library, planned

    def array(self, x):
        return x if self.library == "cupy" or x is None else _bridge.to_torch(x)

    def plan(self, ids, keys, **options):
        ops = dsv4cp if self.library == "cupy" else torch_ops
        return ops.plan_dsv4_sparse_indices(self.array(ids), keys, "cudnn", **options)

    def forward(self, q, kv, sinks, ids, scale, **options):
        options = {"backend": "cudnn", "return_lse": True, **options}
        ops = dsv4cp if self.library == "cupy" else torch_ops
        return ops.dsv4_sparse_attention(*map(self.array, (q, kv, sinks, ids)), scale, **options)

    def __call__(self, grad, q, kv, sinks, ids, scale, **options):
        if self.planned and "plan" not in options:
            options["plan"], ids = self.plan(ids, kv.shape[1]), None
        if self.library == "cupy":
            out, lse = self.forward(q, kv, sinks, ids, scale, **options)
            grads = dsv4cp.dsv4_sparse_attention_grad(
                grad, q, kv, sinks, ids, out, lse, scale, backend="cudnn", **options
            )
            return out, lse, grads
        leaves = [self.array(x).detach().requires_grad_() for x in (q, kv, sinks)]
        out, lse = torch_ops.dsv4_sparse_attention(
            *leaves, self.array(ids), scale, backend="cudnn", return_lse=True, **options
        )
        return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, self.array(grad))


@pytest.fixture(params=["cupy", "cupy, plan", "torch", "torch, plan"])
def way(request):
    library, _, planned = request.param.partition(", ")
    return Way(library, bool(planned))


@pytest.fixture(params=["cupy", "torch"])
def library(request):
    return Way(request.param, False)


def gradient_like(q, seed=9):
    """Random gradients of out; NaN would be fine where a query has no key."""
    rng = np.random.default_rng(seed)
    return cupy.asarray(rng.standard_normal(q.shape, np.float32).astype(q.dtype))


def check(got, grad, inputs, scale=SCALE, dtype="bfloat16"):
    """Against the float64 oracle, element by element and as a whole."""
    out, lse, grads = got
    want_out, want_lse = oracle(*inputs, scale)
    check_like(out, dtype=dtype, shape=inputs[0].shape)
    check_frobenius(out, want_out, "attention")
    check_close(out, want_out, "attention", dtype)
    g, w = to_numpy(lse), to_numpy(want_lse)
    assert lse.dtype in (np.float32, torch.float32) and np.array_equal(np.isneginf(g), np.isneginf(w))
    seen = ~np.isneginf(w)
    assert np.abs(g[seen] - w[seen]).max(initial=0) <= LSE_LIMIT
    check_gradients(grads, grad, inputs, scale, dtype)


def check_gradients(grads, grad, inputs, scale=SCALE, dtype="bfloat16"):
    kinds = ("attention_grad", "attention_grad", "sink_grad")
    for g, w, like, kind in zip(grads, oracle_grad(grad, *inputs, scale), inputs, kinds, strict=False):
        check_like(g, dtype=like.dtype.name, shape=like.shape)
        check_frobenius(g, w, kind)
        # The table is for rows of size 1; the first compressed row of a layer sums what 700 queries and 128 heads add.
        size = np.maximum(np.sqrt(np.mean(to_numpy(w).astype(np.float64) ** 2, axis=-1, keepdims=True)), 1.0)
        check_close(to_numpy(g).astype(np.float64) / size, to_numpy(w) / size, "attention_grad", dtype)


def test_the_oracle_is_the_plain_one():
    inputs = random_inputs(b=2, s=4, h=4, d=16, k=9, t=7, unseen=0)
    inputs[2][:3] = cupy.asarray([INF, -INF, 90.0])
    grad = gradient_like(inputs[0])
    for g, w in zip(oracle_grad(grad, *inputs, 0.25), naive.attention_grad(grad, *inputs, 0.25), strict=True):
        np.testing.assert_allclose(to_numpy(g), w, rtol=1e-10, atol=1e-10)


# --- Golden cases --------------------------------------------------------------------------------------


def one_channel(ids, *, sink=0.0, dtype="bfloat16", nan_rows=()):
    """All but channel 0 zero: kv[:, 0] = 0, 1, 2, 3, q[0] = 1, grad_out 1 on channel 0."""
    q, kv = np.zeros((1, 1, 1, D), DTYPES[dtype]), np.zeros((1, 4, D), DTYPES[dtype])
    q[..., 0] = 1
    kv[0, :, 0] = range(4)
    if nan_rows:
        kv[0, nan_rows] = np.nan
    arrays = q, q, kv, np.array([sink], np.float32), np.array([[ids]])
    return [cupy.asarray(x) for x in arrays]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ids", "out", "lse", "grad_kv", "grad_sink"),
    [
        pytest.param([0, 1, -1, -1], 0.57611688, 1.31326169, [0.08983845, 0.8203231, 0, 0], -0.1221031, id="chain"),
        pytest.param([3, 4, 7, -5], 2.85772238, 3.0, [0, 0, 0, 1.08810411], -0.13552998, id="out of range"),
        pytest.param([1, 1, -1, -1], 0.84463760, 1.69314718, [0, 0.97585930, 0, 0], -0.1312247, id="repeated"),
        *[
            pytest.param([-1] * n + [0, 1], 0.57611688, 1.31326169, [0.0898384, 0.8203231, 0, 0], -0.1221031, id=str(n))
            for n in (16, 64, 126)
        ],
    ],
)
def test_golden_values(way, ids, out, lse, grad_kv, grad_sink, dtype):
    got_out, got_lse, grads = way(*one_channel(ids, dtype=dtype), 1)
    q_, kv_, sinks_ = (to_numpy(g) for g in grads)
    assert float(to_numpy(got_out)[0, 0, 0, 0]) == pytest.approx(out, rel=4e-3)
    assert float(to_numpy(got_lse)[0, 0, 0]) == pytest.approx(lse, rel=2e-6)
    np.testing.assert_allclose(kv_[0, :, 0], grad_kv, rtol=2e-2)  # two terms of opposite signs
    np.testing.assert_allclose(sinks_, [grad_sink], rtol=1e-2)
    assert (q_[..., 1:] == 0).all() and (kv_[..., 1:] == 0).all()
    if ids[:2] == [0, 1]:
        assert float(q_[0, 0, 0, 0]) == pytest.approx(0.24420621, rel=1e-2)


def test_golden_nan_in_unselected_rows(way):
    out, lse, (grad_q, grad_kv, grad_sinks) = way(*one_channel([1, 2, -1, -1], nan_rows=[0, 3]), 1)
    assert float(to_numpy(out)[0, 0, 0, 0]) == pytest.approx(1.57521038, rel=4e-3)
    assert float(to_numpy(lse)[0, 0, 0]) == pytest.approx(2.31326169, rel=2e-6)
    assert (to_numpy(grad_kv)[0, [0, 3]] == 0).all()
    assert all(np.isfinite(to_numpy(g)).all() for g in (grad_q, grad_kv, grad_sinks))


@pytest.mark.parametrize("sink", [0.0, -INF, INF, 2e38, -2e38])
@pytest.mark.parametrize("h", [3, 64])
def test_row_without_keys(way, sink, h):
    q, kv, sinks, ids = random_inputs(s=4, h=h, d=D, unseen=1)
    sinks[:] = sink
    empty, full = ids.copy(), ids.copy()
    empty[:, 1], full[:, 1] = -1, 3
    full[0, 0, :2] = empty[0, 0, :2] = 5
    grad = gradient_like(q)
    bad = grad.copy()
    bad[:, 1] = np.nan
    inputs = q, kv, sinks, empty
    out, lse, grads = way(bad, *inputs, 0.05)
    assert (to_numpy(out)[:, 1] == 0).all() and np.isneginf(to_numpy(lse)[:, 1]).all()
    assert (to_numpy(grads[0])[:, 1] == 0).all()
    check_gradients(grads, grad, inputs, 0.05)
    other = way(grad, q, kv, sinks, full, 0.05)
    for row in (0, 2, 3):
        check_equal(out[:, row], other[0][:, row])
        check_equal(lse[:, row], other[1][:, row])
        check_equal(grads[0][:, row], other[2][0][:, row])


@pytest.mark.parametrize("sink", [0.0, INF, -INF])
def test_no_row_has_keys(way, sink):
    grad, q, kv, sinks, ids = one_channel([-1, 4, -7, 99], sink=sink)
    out, lse, grads = way(grad, q, kv, sinks, ids, 1)
    assert (to_numpy(out) == 0).all() and np.isneginf(to_numpy(lse)).all()
    for g, like in zip(grads, (q, kv, sinks), strict=True):
        check_like(g, dtype=like.dtype.name, shape=like.shape)
        assert (to_numpy(g) == 0).all()


def test_id_of_another_batch_row(way):
    q, kv, sinks, ids = random_inputs(b=2, k=8, d=D, unseen=1)
    kv[1] = 1e30
    ids[0, :, 0] = 9
    ids[1] = -1
    grad = gradient_like(q)
    out, _, grads = way(grad, q, kv, sinks, ids, 0.05)
    ids[0, :, 0] = -1
    alone = way(grad[:1], q[:1], kv[:1], sinks, ids[:1], 0.05)
    check_equal(out[:1], alone[0])
    check_equal(grads[0][:1], alone[2][0])
    assert (to_numpy(grads[1])[1] == 0).all() and np.isfinite(to_numpy(grads[1])).all()


def test_masked_slots_reach_no_row_outside_the_keys(way):
    some = np.array([[[-1, 0, 39, -1], [40, 1, -1, 0], [0, 0, -2, 5]]])
    q, kv, sinks, ids = random_inputs(b=1, s=3, h=8, d=D, ids=some)
    around = cupy.asarray(np.full((1, 42, D), np.nan, kv.dtype))
    around[:, 1:-1] = kv
    grad = gradient_like(q)
    got, want = way(grad, q, around[:, 1:-1], sinks, ids, 0.1), way(grad, q, kv, sinks, ids, 0.1)
    check_equal(got[2][0], want[2][0])
    check(got, grad, (q, kv, sinks, ids), 0.1)


def test_more_slots_than_rows(way):
    q, kv, sinks, few = random_inputs(k=8, d=D, h=8, ids=np.tile(np.arange(8), (2, 5, 1)))
    ids = cupy.full((2, 5, 640), -1, np.int32)
    ids[..., 600:608] = few
    grad = gradient_like(q)
    got, want = way(grad, q, kv, sinks, ids, 0.1), way(grad, q, kv, sinks, few, 0.1)
    check_equal(got[0], want[0])
    check_equal(got[1], want[1])
    check(got, grad, (q, kv, sinks, few), 0.1)


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 31, 32, 33, 48, 64, 96, 128])
def test_head_counts(way, heads):
    inputs = q, kv, sinks, ids = random_inputs(b=2, s=3, h=heads, d=D, t=100)
    grad = gradient_like(q)
    got = way(grad, *inputs, SCALE)
    check(got, grad, inputs)
    if way.planned:
        return
    h = heads // 2
    one = way(grad[:, :, h : h + 1], q[:, :, h : h + 1], kv, sinks[h : h + 1], ids, SCALE)
    check_close(got[2][0][:, :, h : h + 1], to_numpy(one[2][0]), "attention_grad")
    check_close(got[2][2][h : h + 1], to_numpy(one[2][2]), "attention_grad", "bfloat16")


# --- The oracle ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sink", [INF, -INF, 2e38, -2e38, 85.0, -85.0, 200.0])
def test_sinks(way, sink):
    inputs = random_inputs(h=8, d=D)
    inputs[2][1] = sink
    grad = gradient_like(inputs[0])
    got = way(grad, *inputs, SCALE)
    check(got, grad, inputs)
    if abs(sink) == INF:
        assert to_numpy(got[2][2])[1] == 0
    if sink in (INF, 2e38):
        assert (to_numpy(got[2][0])[:, :, 1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1500, 64, 4, 512), (700, 128, 128, 10**9)], ids=str)
def test_layers(way, shape, dtype):
    inputs = layer_inputs(*shape, dtype=dtype)
    grad = gradient_like(inputs[0])
    check(way(grad, *inputs, SCALE), grad, inputs, dtype=dtype)


# Steeper softmaxes cancel digits in p (dp - delta), where delta comes from an `out` rounded to 16 bits: float64
# arithmetic on that `out` is off by 4e-3 at scale 0.7.
STEEP = pytest.mark.xfail(reason="cuDNN's own error there: 8.41e-3 seen on an H200, the limit is 8e-3", strict=False)


@pytest.mark.parametrize("scale", [-0.1, 1e-30, 0.2, pytest.param(0.7, marks=STEEP)])
def test_scale_of_any_sign(library, scale):
    inputs = random_inputs(b=1, s=5, h=8, d=D, t=100)
    grad = gradient_like(inputs[0])
    check_gradients(library(grad, *inputs, scale)[2], grad, inputs, scale)


@pytest.mark.parametrize("bad", [np.nan, INF])
def test_bad_rows_reach_only_those_who_selected_them(way, bad):
    q, kv, sinks, ids = random_inputs(s=6, h=8, d=D, unseen=1)
    ids = cupy.where((ids == 0) | (ids == 7), 4, ids)
    ids[0, 3] = -1
    ids[0, 3, :2] = cupy.asarray([0, 7])  # a bad row and one that nobody else selects
    clean = kv.copy()
    kv[:, 0], clean[:, 0] = bad, 1
    grad = gradient_like(q)
    got, want = (way(grad, q, rows, sinks, ids, 0.1) for rows in (kv, clean))
    touched = np.zeros(ids.shape[:2], bool)
    touched[0, 3] = True
    check_equal(to_numpy(got[0])[~touched], to_numpy(want[0])[~touched])
    check_equal(to_numpy(got[2][0])[~touched], to_numpy(want[2][0])[~touched])
    grad_kv = to_numpy(got[2][1])
    assert np.isnan(grad_kv[0, [0, 7]]).any(-1).all()
    grad_kv[0, [0, 7]] = 0
    assert np.isfinite(grad_kv).all()


@pytest.mark.parametrize("axis", "bshkt")
def test_axes_of_length_zero(way, axis):
    inputs = q, kv, sinks, _ = random_inputs(**{"b": 2, "s": 2, "h": 3, "d": D, "k": 5, "t": 4, axis: 0})
    out, lse, grads = way(gradient_like(q), *inputs, 0.1)
    assert tuple(out.shape) == q.shape and tuple(lse.shape) == q.shape[:3]
    for g, like in zip(grads, (q, kv, sinks), strict=True):
        check_like(g, dtype=like.dtype.name, shape=like.shape)
        assert (to_numpy(g) == 0).all()


# --- Memory, dtypes, plans -------------------------------------------------------------------------------


def test_views_and_other_dtypes(library):
    q, kv, sinks, ids = inputs = random_inputs(h=8, d=D)
    grad = gradient_like(q)
    want = library(grad, *inputs, 0.1)
    wide = cupy.stack([kv, kv], axis=2)[:, :, 1]
    q_view = cupy.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    got = library(grad, q_view, wide, sinks.astype(np.float64), ids.astype(np.int32), 0.1)
    for g, w in ((got[0], want[0]), (got[1], want[1]), (got[2][0], want[2][0])):
        check_equal(g, w)
    check_like(got[2][2], dtype="float64")
    check_gradients(got[2], grad, (q, kv, sinks.astype(np.float64), ids), 0.1)
    same = cupy.broadcast_to(grad[:, :, :1], grad.shape)  # a gradient of stride 0
    check_gradients(library(same, *inputs, 0.1)[2], same, inputs, 0.1)
    if library.library == "cupy":
        flipped = cupy.ascontiguousarray(grad[:, ::-1])[:, ::-1]
        check_equal(library(flipped, *inputs, 0.1)[2][0], want[2][0])
        out, lse = want[:2]
        options = {"backend": "cudnn"}
        got = dsv4cp.dsv4_sparse_attention_grad(
            grad.astype(np.float32), q, kv, sinks, ids, out.astype(np.float32), lse.astype(np.float64), 0.1, **options
        )
        check_equal(got[0], want[2][0])


def test_plans(library):
    q, kv, sinks, ids = inputs = random_inputs(h=8, d=D)
    grad = gradient_like(q)
    plan = library.plan(ids, 40)
    assert plan.valid_rows is not None
    want = library(grad, *inputs, 0.1)
    first = library(grad, q, kv, sinks, None, 0.1, plan=plan)
    for given in (ids, None):
        got = library(grad, q, kv, sinks, given, 0.1, plan=plan)
        check_equal(got[2][0], first[2][0])
        check(got, grad, inputs, 0.1)
    check_close(first[0], to_numpy(want[0]), "attention")
    whole = cupy.where(ids == -1, 3, ids)
    whole[0, 1] = 3
    whole[:, :, 0] = 2
    promise = library.plan(whole, 40, all_rows_nonempty=True)
    assert promise.valid_rows is None and library.plan(whole, 40).valid_rows is None
    kv[:, 2:4] = 1
    for options in ({"plan": promise}, {"all_rows_nonempty": True}, {}):
        check(library(grad, q, kv, sinks, whole, 0.1, **options), grad, (q, kv, sinks, whole), 0.1)
    with pytest.raises(ValueError, match="kv_sequence"):
        library(grad, q, kv[:, :39], sinks, ids, 0.1, plan=plan)
    other = dsv4cp.SparseIndexPlan("cuda", plan.indices, plan.topk_length, None, 40)
    with pytest.raises(ValueError, match="plan"):
        library(grad, q, kv, sinks, ids, 0.1, plan=other)


@pytest.mark.parametrize("slots", [0, 1, 31, 128, 129, 640, 1152])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_packed_ids_are_those_of_a_plan(slots, dtype):
    rng = np.random.default_rng(slots)
    ids = rng.integers(-20, 120, (3, 50, slots)).astype(dtype)
    if dtype is np.int64 and slots:
        ids[:, :, 0] = 2**32 + 5
        ids[0, 0] = -(2**63)
    ids[1, 4] = -1
    q = np.broadcast_to(np.float16(0), (3, 50, 2, D))
    spec = contract.check(q, np.broadcast_to(np.float16(0), (3, 100, D)), np.zeros(2, np.float32), ids, 1.0)
    width = max(1, -(-slots // 128)) * 128
    flat, lengths = torch_bridge_cudnn.packed(torch.from_numpy(ids).cuda(), spec, width)
    want = pack(ids, 100, width)
    check_equal(flat, want[0])
    check_equal(lengths, want[1])


def pack(ids, keys, width):
    batch, queries, slots = ids.shape
    flat = np.full((batch * queries, width), -1, np.int32)
    lengths = np.zeros(batch * queries, np.int32)
    for r, row in enumerate(ids.reshape(batch * queries, slots)):
        kept = row[(row >= 0) & (row < keys)] + r // queries * keys
        flat[r, : len(kept)], lengths[r] = kept, len(kept)
    return flat, lengths


# --- Streams, graphs, torch ----------------------------------------------------------------------------

@pytest.mark.parametrize("planned", [False, True])
def test_calls_follow_the_current_stream_and_never_wait(planned):
    q, kv, sinks, ids = random_inputs(b=1, s=64, h=8, d=D, k=300, t=100, unseen=1)
    ids[:, :, 0] = 1
    inputs = q, kv, sinks, ids
    grad = gradient_like(q)
    way = Way("cupy", False)
    held = [cupy.zeros_like(x) for x in (grad, *inputs)]
    stream = cupy.cuda.Stream(non_blocking=True)
    options = {"plan": way.plan(ids, 300, all_rows_nonempty=True)} if planned else {"all_rows_nonempty": True}
    want = way(grad, *inputs, 0.05, **options)  # a plan sorts the ids: without one sums have another order
    cupy.cuda.Device().synchronize()
    with stream:
        for to, new in zip(held, (grad, *inputs), strict=True):
            to[...] = new  # loads the kernels of copies, which may wait
            to[...] = 0
        way(*held, 0.05, **options)  # compiles, fills the pools of this stream
    cupy.cuda.Device().synchronize()
    with stream, gate.held(stream):
        for to, new in zip(held, (grad, *inputs), strict=True):
            to[...] = new  # only once the gate is open, and only for this stream's work
        got = way(*held, 0.05, **options)
    check_equal(to_numpy(got[2][0]), to_numpy(want[2][0]))
    check_gradients(got[2], grad, inputs, 0.05)


def test_torch_graph_replays_see_new_contents():
    way = Way("torch", False)
    first, second = (random_inputs(b=1, s=50, h=64, d=D, k=300, t=100, seed=n, unseen=1) for n in (1, 2))
    held = [_bridge.to_torch(x.copy()) for x in first]
    plan = way.plan(cupy.from_dlpack(held[3]), 300, all_rows_nonempty=True)
    grad = _bridge.to_torch(gradient_like(first[0]))
    leaves = [x.requires_grad_() for x in held[:3]]

    def step():
        out = torch_ops.dsv4_sparse_attention(*leaves, None, 0.05, backend="cudnn", plan=plan)
        return out, *torch.autograd.grad(out, leaves, grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for inputs in (first, second):
        with torch.no_grad():
            for to, new in zip(leaves, inputs, strict=False):
                to.copy_(_bridge.to_torch(new))
        graph.replay()
        torch.cuda.synchronize()
        check_gradients(got[1:], cupy.from_dlpack(grad), (*inputs[:3], first[3]), 0.05)


def test_torch_compile_and_second_derivatives():
    q, kv, sinks, ids = (_bridge.to_torch(x) for x in random_inputs(b=2, s=4, h=4, d=D, unseen=1))
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 40, "cudnn")

    def step(q, kv, sinks, ids):
        return torch_ops.dsv4_sparse_attention(q * 1, kv, sinks, ids, 0.05, backend="cudnn")

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
        out = function(*leaves, ids)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    check_equal(results[1][0], results[0][0])
    check_equal(results[1][1], results[0][1])
    second = []
    for backend, options in (("torch", {}), ("cudnn", {}), ("cudnn", {"plan": plan})):
        leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
        given = None if options else ids
        out = torch_ops.dsv4_sparse_attention(*leaves, given, 0.05, backend=backend, **options)
        (first,) = torch.autograd.grad(out.float().square().sum(), leaves[:1], create_graph=True)
        second.append(torch.autograd.grad(first.float().square().sum(), leaves[1:]))
    for got in second[1:]:
        for g, w in zip(got, second[0], strict=True):
            check_frobenius(g, to_numpy(w), "attention_grad", 3e-2)


def test_float_gradients_of_other_layouts_reach_autograd():
    q, kv, sinks, ids = (_bridge.to_torch(x) for x in random_inputs(b=1, s=4, h=64, d=D, unseen=1))
    leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
    out = torch_ops.dsv4_sparse_attention(*leaves, ids, 0.05, backend="cudnn")
    out.sum().backward()  # a gradient of stride 0
    want = oracle_grad(cupy.ones(q.shape, np.float32), *(cupy.from_dlpack(x) for x in (q, kv, sinks, ids)), 0.05)
    for leaf, w, kind in zip(leaves, want, ("attention_grad", "attention_grad", "sink_grad"), strict=True):
        check_frobenius(leaf.grad, w, kind)


# --- Refusals --------------------------------------------------------------------------------------------


def test_what_cannot_run_says_why(library):
    q, kv, sinks, ids = random_inputs(h=4, d=D)
    grad = gradient_like(q)
    if cupy.cuda.Device().compute_capability[:-1] == "9":
        with pytest.raises(RuntimeError, match=r"deterministic.*SM100"):
            if library.library == "cupy":
                out, lse = library.forward(q, kv, sinks, ids, 0.1)
                dsv4cp.dsv4_sparse_attention_grad(
                    grad, q, kv, sinks, ids, out, lse, 0.1, backend="cudnn", backward_impl="deterministic"
                )
            else:
                library(grad, q, kv, sinks, ids, 0.1, backward_impl="deterministic")
    with pytest.raises(RuntimeError, match="bfloat16 or float16, got float32"):
        library.forward(q.astype(np.float32), kv.astype(np.float32), sinks, ids, 0.1)
    with pytest.raises(RuntimeError, match="head_dim 512, got 128"):
        library.forward(q[..., :128], kv[..., :128], sinks, ids, 0.1)
    with pytest.raises(ValueError, match="reference_rounding"):
        library.forward(q, kv, sinks, ids, 0.1, reference_rounding=True)


def test_it_is_known_to_be_there():
    from dsv4cp.commands import doctor

    assert torch_ops.is_dsv4_kernel_available("sparse_attn_cudnn") is True
    assert doctor.state("cudnn", ("reference", "cudnn")) == "runs"
    assert "cudnn" not in dict(doctor.unavailable())


def test_shapes_do_not_recompile():
    """Only heads and widths of whole 128-id blocks do."""
    import cudnn.deepseek_sparse_attention.sparse_attention_backward as package

    try:
        from cudnn.deepseek_sparse_attention.sparse_attention_backward._interface_sm90 import flash_attn_bwd_sm90
    except ImportError:
        pytest.skip(f"{package.__name__} keeps its kernels elsewhere")
    way, rng, counts = Way("torch", False), np.random.default_rng(0), []
    for _ in range(12):
        b, s, k, t = (int(n) for n in rng.integers(1, 60, 4))
        inputs = random_inputs(b=b, s=s, h=8, d=D, k=k, t=t, unseen=1)
        way(gradient_like(inputs[0]), *inputs, 0.1)
        counts.append(SimpleNamespace(n=sum(len(c) for c in (
            flash_attn_bwd_sm90.compile_cache, flash_attn_bwd_sm90.compile_cache_pre,
            flash_attn_bwd_sm90.compile_cache_post,
        ))).n)  # fmt: skip
    assert counts[-1] == counts[0]
