"""torch_ops on CUDA tensors: the kernels' results and gradients, hand-over of arrays, errors, compilers, graphs."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from dsv4cp import _bridge, torch_ops
from tests.support import naive
from tests.support.compare import check_close, check_equal

pytestmark = pytest.mark.gpu

REPEAT, EPS = 20, 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def same_everywhere():
    torch.manual_seed(0)
    torch._dynamo.reset()


def sinkhorn(x, backend="tilelang"):
    return torch_ops.dsv4_sinkhorn_normalize(x, backend=backend, repeat=REPEAT, eps=EPS)


def name_of(dtype) -> str:
    return str(dtype).rpartition(".")[2]


# --- Sinkhorn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 4, 7, 16])
def test_sinkhorn_and_gradient_against_the_oracle(dtype, m):
    x = torch.randn(3, 11, m, m, device="cuda").mul_(3).to(dtype).requires_grad_()
    grad = torch.randn(3, 11, m, m, device="cuda").to(dtype)
    y = sinkhorn(x)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    assert y.is_contiguous() and y.dtype == dtype == grad_x.dtype
    check_close(y, naive.sinkhorn(x, REPEAT, EPS), "sinkhorn", name_of(dtype))
    check_close(grad_x, naive.sinkhorn_grad(grad, x, REPEAT, EPS), "sinkhorn_grad", name_of(dtype))


def test_golden_sinkhorn():
    a = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0], [5, 0, 0, 0], [-3, 2, 1, 0.0]], device="cuda", requires_grad=True)
    y = sinkhorn(a)
    assert abs(y[0, 0].item() - 0.0079233363) < 1e-7 and abs(y[2, 0].item() - 0.9183108937) < 1e-6
    (grad,) = torch.autograd.grad(y, a, torch.arange(16.0, device="cuda").reshape(4, 4))
    want = torch.tensor([1.384507e-3, -3.46880e-5, -3.820463e-4, -9.677741e-4])
    assert (grad[0].cpu() - want).abs().max() < 3e-6


def strided(kind: str, base: torch.Tensor) -> torch.Tensor:
    """Values of a shape [9, 4, 4] in a memory layout; `base` is [18, 8, 8]."""
    match kind:
        case "every second":
            return base[::2, ::2, ::2]
        case "transposed":
            return base[:9, :4, :4].transpose(-1, -2)
        case "stride 0":
            return base[0, 0, 0].expand(9, 4, 4)
        case "row broadcast":
            return base[:9, :1, :4].expand(9, 4, 4)
        case "batch last":
            return base.permute(2, 1, 0)[:4, :4, :9].permute(2, 1, 0)
        case "odd offset":
            return base.flatten()[1 : 1 + 144].view(9, 4, 4)
    raise ValueError(kind)


LAYOUTS = ("every second", "transposed", "stride 0", "row broadcast", "batch last", "odd offset")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_strides_change_no_bit(kind, dtype):
    view = strided(kind, torch.randn(18, 8, 8, device="cuda").to(dtype))
    plain = view.contiguous().clone()
    other = torch.randn(9, 4, 4, device="cuda").to(dtype)
    check_equal(sinkhorn(view), sinkhorn(plain))
    for x, grad, same in ((view, other, (plain, other)), (other, view, (other, plain))):
        check_equal(gradient(x, grad), gradient(*same))


def gradient(x, grad):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(sinkhorn(x), x, grad)[0]


def test_a_matmul_gives_the_gradient_a_transposed_layout():
    x = torch.randn(64, 4, 4, device="cuda")
    h = torch.randn(64, 4, 32, device="cuda")
    grads = []
    for backend in ("tilelang", "torch"):
        leaf = x.clone().requires_grad_()
        (sinkhorn(leaf, backend).transpose(-1, -2) @ h).square().sum().backward()
        grads.append(leaf.grad)
    check_close(grads[0] / 100, grads[1] / 100, "sinkhorn_grad")


@pytest.mark.parametrize("shape", [(0, 4, 4), (4, 4), (2, 0, 3, 3), (1, 1, 1, 4, 4)], ids=str)
def test_shapes(shape):
    x = torch.randn(shape, device="cuda", requires_grad=True)
    y = sinkhorn(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape


def test_auto_takes_the_kernels_and_a_graph_of_the_gradient_is_differentiable():
    x = torch.randn(3, 4, 4, device="cuda")
    check_equal(sinkhorn(x, "auto"), sinkhorn(x))
    assert torch_ops.is_dsv4_kernel_available("sinkhorn")
    leaf = torch.randn(2, 3, 3, device="cuda", requires_grad=True)
    (grad,) = torch.autograd.grad(sinkhorn(leaf).square().sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), leaf)
    assert torch.isfinite(second).all() and second.abs().max() > 0


def test_inputs_are_not_written_and_outputs_are_written_whole():
    x = torch.randn(1000, 4, 4, device="cuda")
    copy = x.clone()
    torch.full((1000, 4, 4), float("nan"), device="cuda")  # what torch's allocator hands out next
    y = sinkhorn(x)
    assert torch.isfinite(y).all()
    check_equal(x, copy)


def test_memory_of_results_is_torchs():
    x = torch.randn(1 << 16, 4, 4, device="cuda")
    before = torch.cuda.memory_allocated()
    y = sinkhorn(x)
    assert torch.cuda.memory_allocated() - before == y.numel() * 4


# --- Errors ------------------------------------------------------------------------------------------------


def test_kernels_refuse_what_is_not_on_the_gpu():
    with pytest.raises(RuntimeError, match="CUDA tensors, got one on cpu"):
        sinkhorn(torch.randn(4, 4))
    gradient_op = torch.ops.dsv4.sinkhorn_normalize_grad.default
    with pytest.raises(ValueError, match=r"grad_y: expected an array on cuda:0"):
        gradient_op(torch.randn(2, 4, 4), torch.randn(2, 4, 4, device="cuda"), 3, EPS)
    with pytest.raises(TypeError, match="expected dtype"):
        sinkhorn(torch.ones(4, 4, dtype=torch.int32, device="cuda"))
    with pytest.raises(ValueError, match="expected shape"):
        sinkhorn(torch.randn(4, 5, device="cuda"))
    check_equal(sinkhorn(torch.ones(4, 4), "auto"), sinkhorn(torch.ones(4, 4), "torch"))
    for x in (torch.randn(3, 17, 17, device="cuda"), torch.randn(3, 4, 4, device="cuda", dtype=torch.float64)):
        with pytest.raises(RuntimeError, match=r"float32, got float64|up to 16 x 16, got 17"):
            sinkhorn(x)
        check_equal(sinkhorn(x, "auto"), sinkhorn(x, "torch"))
        check_close(torch.ops.dsv4.sinkhorn_normalize.default(x, REPEAT, EPS), sinkhorn(x, "torch"), "sinkhorn")


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_gradient_operator_takes_any_float_gradient(grad_dtype):
    x, grad = torch.randn(5, 4, 4, device="cuda").bfloat16(), torch.randn(5, 4, 4, device="cuda").to(grad_dtype)
    got = torch.ops.dsv4.sinkhorn_normalize_grad.default(grad, x, REPEAT, EPS)
    check_close(got, naive.sinkhorn_grad(grad, x, REPEAT, EPS), "sinkhorn_grad", "bfloat16")


# --- Key ids ---------------------------------------------------------------------------------------------


def index_arguments():
    """Every kind of build call, as (keywords, CPU tensors by keyword)."""
    s, k, p = 37, 64, 9
    rng = np.random.default_rng(1)
    sizes = {"batch_size": 2, "seq_len": s, "key_len": k, "window_size": 8}
    topk = torch.from_numpy(rng.integers(-2, p + 2, (2, s, 5)))
    segments = torch.from_numpy(np.sort(rng.integers(0, 4, (2, s)), axis=1))
    local = torch.from_numpy(rng.integers(0, 9, (2, s)))
    pooled_segments, pooled_positions = (torch.from_numpy(rng.integers(0, 4, (2, p))) for _ in range(2))
    mask = torch.where(torch.from_numpy(rng.random((2, 1, s, k))) < 0.2, -1.0, 0.0)
    types = torch.from_numpy(rng.choice([-1, -1, 0, 2, 2, 4], (2, s)))
    pooled = {"n_pooled": p, "compress_ratio": 4}
    documents = {"q_segment_ids": segments, "q_local_positions": local}
    return {
        "window": (sizes, {}),
        "every entry": (sizes | pooled, {}),
        "top-k": (sizes | pooled, {"compressed_topk": topk}),
        "top-k int32": (sizes | pooled | {"dtype": torch.int32}, {"compressed_topk": topk.int()}),
        "mask": (sizes | pooled, {"compressed_topk": topk, "attention_mask": mask}),
        "bf16 mask": (sizes, {"attention_mask": mask.bfloat16()}),
        "positions": (sizes | {"vanilla_key_len": 50}, {"q_positions": torch.arange(5, 5 + s)}),
        "images": (sizes | {"max_image_tokens": 6}, {"vision_token_types": types}),
        "documents": (
            sizes | pooled,
            documents | {"pooled_segment_ids": pooled_segments, "pooled_positions": pooled_positions},
        ),
    }


@pytest.mark.parametrize("kind", index_arguments())
def test_index_building_equals_the_cpu(kind):
    sizes, tensors = index_arguments()[kind]
    want = torch_ops.build_dsv4_sparse_topk_indices(device="cpu", **sizes, **tensors)
    on_gpu = {name: t.cuda() for name, t in tensors.items()}
    got = torch_ops.build_dsv4_sparse_topk_indices(device="cuda", **sizes, **on_gpu)
    assert got.is_cuda and got.dtype == want.dtype and got.is_contiguous()
    check_equal(got, want)
    wide = {name: torch.stack([t, t], dim=-1)[..., 0] for name, t in on_gpu.items()}  # strided
    check_equal(torch_ops.build_dsv4_sparse_topk_indices(device="cuda", **sizes, **wide), want)


@pytest.mark.parametrize("backend", ["torch", "tilelang", "cudnn"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("slots", [0, 1, 5, 130])
def test_plans_equal_the_cpu(backend, dtype, slots):
    ids = torch.randint(-3, 70, (2, 13, slots), dtype=dtype)
    ids[1, 4] = -1
    for promise in (False, True):
        want = torch_ops.plan_dsv4_sparse_indices(ids, 64, backend, promise)
        got = torch_ops.plan_dsv4_sparse_indices(ids.cuda(), 64, backend, promise)
        assert got.backend == want.backend == backend
        for part in ("indices", "topk_length", "valid_rows"):
            g, w = getattr(got, part), getattr(want, part)
            assert (g is None) == (w is None), part
            if w is not None:
                assert g.is_cuda
                check_equal(g, w)


def test_plan_memory_is_torchs_and_keeps_its_stream():
    ids = torch.randint(-1, 64, (1, 1 << 12, 128), device="cuda")
    torch_ops.plan_dsv4_sparse_indices(ids, 64, "tilelang")
    before = torch.cuda.memory_allocated()
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 64, "tilelang")
    assert torch.cuda.memory_allocated() - before == plan.indices.numel() * 4
    plan.indices.record_stream(torch.cuda.Stream())


def test_extract_equals_the_cpu():
    logits, ids = torch.randn(2, 17, 40), torch.randint(-2, 43, (2, 17, 9))
    want = torch_ops.extract_indexer_topk_scores_torch(logits, ids)
    check_equal(torch_ops.extract_indexer_topk_scores_torch(logits.cuda(), ids.cuda()), want)


# --- Compilers and graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "transposed", "empty", "bfloat16"])
def test_sinkhorn_operators_pass_opcheck(kind):
    x = torch.randn(6, 4, 4, device="cuda")
    x = {"plain": x, "transposed": x.transpose(-1, -2), "empty": x[:0], "bfloat16": x.bfloat16()}[kind]
    forward, backward = torch.ops.dsv4.sinkhorn_normalize.default, torch.ops.dsv4.sinkhorn_normalize_grad.default
    for op, args in ((forward, (x.detach().requires_grad_(), 3, EPS)), (backward, (x * 2, x, 3, EPS))):
        assert set(torch.library.opcheck(op, args, test_utils=OPCHECKS).values()) == {"SUCCESS"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sinkhorn_compiles_to_one_graph(backend):
    def step(x, h):
        return (sinkhorn(x * 1.5, "auto") @ h).relu()

    x, h = torch.randn(33, 4, 4, device="cuda"), torch.randn(33, 4, 8, device="cuda")
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend=backend)):
        leaf = x.clone().requires_grad_()
        out = function(leaf, h)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    check_close(results[1][0], results[0][0], "attention", "float32")
    check_close(results[1][1] / 10, results[0][1] / 10, "sinkhorn_grad")


def test_index_functions_compile_to_one_graph():
    sizes, tensors = index_arguments()["top-k"]

    def lists(topk):
        ids = torch_ops.build_dsv4_sparse_topk_indices(device=topk.device, compressed_topk=topk, **sizes)
        cudnn = torch_ops.plan_dsv4_sparse_indices(ids, 64, "cudnn", all_rows_nonempty=True)
        return ids, torch_ops.plan_dsv4_sparse_indices(ids, 64, "tilelang").indices, cudnn.indices, cudnn.topk_length

    topk = tensors["compressed_topk"].cuda()
    for got, want in zip(torch.compile(lists, fullgraph=True, backend="aot_eager")(topk), lists(topk), strict=True):
        check_equal(got, want)


def test_cuda_graph_of_forward_and_backward():
    x = torch.randn(500, 4, 4, device="cuda", requires_grad=True)
    grad = torch.randn(500, 4, 4, device="cuda").transpose(-1, -2)
    for _ in range(2):  # compile and warm up outside of the capture
        torch.autograd.grad(sinkhorn(x), x, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sinkhorn(x)
        (grad_x,) = torch.autograd.grad(y, x, grad)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        check_equal(y, sinkhorn(x))
        check_equal(grad_x, torch.autograd.grad(sinkhorn(x), x, grad)[0])


def test_cuda_graph_of_index_lists():
    sizes, tensors = index_arguments()["top-k"]
    topk = tensors["compressed_topk"].cuda()

    def lists():
        ids = torch_ops.build_dsv4_sparse_topk_indices(device="cuda", compressed_topk=topk, **sizes)
        return ids, torch_ops.plan_dsv4_sparse_indices(ids, 64, "tilelang").indices

    for _ in range(2):
        lists()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = lists()
    topk.copy_(topk.flip(-1))
    graph.replay()
    for got, want in zip(captured, lists(), strict=True):
        check_equal(got, want)


# --- Overhead ------------------------------------------------------------------------------------------------


def test_python_overhead_is_printed(capsys):
    x = torch.randn(8192, 4, 4, device="cuda")
    leaf = x.clone().requires_grad_()
    grad = torch.randn_like(x)
    op = torch.ops.dsv4.sinkhorn_normalize.default
    calls = {
        "torch_ops.dsv4_sinkhorn_normalize": lambda: sinkhorn(x),
        "  with a gradient wanted": lambda: sinkhorn(leaf),
        "  forward and backward": lambda: torch.autograd.grad(sinkhorn(leaf), leaf, grad),
        "dsv4::sinkhorn_normalize alone": lambda: op(x, REPEAT, EPS),
        "torch.empty alone": lambda: torch.empty(x.shape, device="cuda"),
        "with on_stream_of(x) alone": lambda: _bridge.on_stream_of(x).__enter__(),
    }
    lines, times = [], {}
    for name, call in calls.items():
        for _ in range(50):
            call()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(400):
                call()
            torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / 400)
        times[name] = best * 1e6
        lines.append(f"{name:36s} {best * 1e6:7.1f} us")
    with capsys.disabled():
        print("\n8192 matrices, time per call:\n" + "\n".join(lines))
    assert times["torch_ops.dsv4_sinkhorn_normalize"] < 200
