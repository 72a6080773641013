"""Sparse attention's gradient kernels in use: strided and empty arrays, canaries, dispatch, plans, streams, CUDA
graphs, torch.compile, and a layer that learns."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from tests.support.attention_gpu import DTYPES  # noqa: E402
from tests.support.attention_grad_gpu import (  # noqa: E402
    IMPLEMENTATIONS,
    check,
    check_same,
    cupy_grads,
    inputs,
    torch_grads,
)
from tests.support.compare import check_close, check_equal, to_numpy  # noqa: E402

pytestmark = pytest.mark.gpu

CAP = 2**31


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


@pytest.mark.parametrize("heads", [33, 100])
@pytest.mark.parametrize("layout", ["padded", *LAYOUTS])
def test_outputs_of_any_strides(path, heads, layout):
    """Where the copy engine cannot read `out`, its product with grad_out comes from a kernel before the main one."""
    g, q, kv, sinks, ids = inputs(h=heads, d=512)
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, 0.05, backend="cuda", return_lse=True)
    if layout == "padded":
        parent = cupy.full((*out.shape[:3], 1024), np.nan, out.dtype)
        parent[..., :512] = out
        view = parent[..., :512]
    else:
        view = LAYOUTS[layout](out)

    def call(out):
        return dsv4cp.dsv4_sparse_attention_grad(g, q, kv, sinks, ids, out, lse, 0.05, backend="cuda")

    for got, want in zip(call(view), call(view.copy(order="C")), strict=True):
        check_close(got, to_numpy(want), "attention_grad", "bfloat16")


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
    from dsv4cp._arrays import element_strides
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
        **{f"{name}_strides": element_strides(x) for name, x in arrays.items()},
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
    torch.cuda.synchronize()  # the side stream does not wait for what makes the leaves
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


@pytest.mark.parametrize("reversed_axis", ["none", "batch"])
def test_the_path_does_not_depend_on_the_cap(path, reversed_axis):
    """Bits differ between the main kernels, so a cap must not choose between them: a pass over one batch row sees no
    reversed axis, which the Hopper kernel could take."""
    data = list(inputs(b=2, h=64, d=512, k=70))
    if reversed_axis == "batch":
        data[:2] = (cupy.ascontiguousarray(x[::-1])[::-1] for x in data[:2])
    want = cupy_grads(*data, 0.1, "deterministic")
    for cap in (8 * 512 * 70, 8 * 512 * 64):  # one batch row at a time, and less than one
        check_same(cupy_grads(*data, 0.1, "deterministic", backward_workspace_bytes=cap), want)
