"""Every function of torch_ops under torch.compile(fullgraph=True), and the operators under torch.library.opcheck.

On the CPU the functions are the reference; the operators run it too, so that what a graph holds for a GPU (fake
results, autograd, schemas) is checked here as well.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4cp import torch_ops
from dsv4cp.sinkhorn import torch_bridge as sinkhorn
from dsv4cp.sparse_indices import torch_bridge as indices
from dsv4cp.sparse_indices import torch_bridge_kernels as index_ops
from tests.support.compare import check_close, check_equal

S, W, R, P, K = 9, 4, 4, 2, 11
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def attention_inputs(dtype=torch.float32):
    q, kv, sinks = torch.randn(2, S, 3, 8, dtype=dtype), torch.randn(2, K, 8, dtype=dtype), torch.randn(3)
    ids = torch.randint(-1, K, (2, S, 6), dtype=torch.int32)
    ids[0, 3] = -1
    return q, kv, sinks, ids


def indexer_inputs():
    return torch.randn(2, S, 3, 8), torch.randn(2, P, 8), torch.randn(2, S, 3)


def topk():
    return torch.tensor([[0, 1, -1], [-1, 7, 0]]).repeat(S, 1)[: 2 * S].reshape(2, S, 3)


def build(compressed, **more):
    return torch_ops.build_dsv4_sparse_topk_indices(
        batch_size=2,
        seq_len=S,
        key_len=K,
        window_size=W,
        device=compressed.device,
        compress_ratio=R,
        compressed_topk=compressed,
        n_pooled=P,
        **more,
    )


def layouts(ids):
    """The tensors of three plans; "cudnn" without the promise looks at values and cannot be one graph."""
    plans = [
        torch_ops.plan_dsv4_sparse_indices(ids, K, "torch"),
        torch_ops.plan_dsv4_sparse_indices(ids, K, "tilelang"),
        torch_ops.plan_dsv4_sparse_indices(ids, K, "cudnn", all_rows_nonempty=True),
    ]
    return [p.indices for p in plans] + [plans[2].topk_length]


SINKHORN = {"repeat": 3, "eps": 1e-6}
SCORES = {"compress_ratio": R, "softmax_scale": 0.3}

# name -> (function of tensors, tensors); floats get gradients.
CALLS = {
    "dsv4_sinkhorn_normalize": (
        lambda x: torch_ops.dsv4_sinkhorn_normalize(x, backend="auto", **SINKHORN),
        lambda: (torch.randn(3, 4, 4),),
    ),
    "sinkhorn_normalize_torch": (
        lambda x: torch_ops.sinkhorn_normalize_torch(x, 3, 1e-6),
        lambda: (torch.randn(3, 4, 4),),
    ),
    "build_dsv4_sparse_topk_indices": (build, lambda: (topk(),)),
    "plan_dsv4_sparse_indices": (layouts, lambda: (attention_inputs()[3],)),
    "dsv4_sparse_attention": (
        lambda *a: torch_ops.dsv4_sparse_attention(*a, 0.3, backend="auto"),
        attention_inputs,
    ),
    "dsv4_sparse_attention, lse": (
        lambda *a: torch_ops.dsv4_sparse_attention(*a, 0.3, backend="sparse_torch", return_lse=True),
        attention_inputs,
    ),
    "sparse_attention_torch": (lambda *a: torch_ops.sparse_attention_torch(*a, 0.3), attention_inputs),
    "dense_attention_topk_torch": (lambda *a: torch_ops.dense_attention_topk_torch(*a, 0.3), attention_inputs),
    "dsv4_indexer_scores": (lambda *a: torch_ops.dsv4_indexer_scores(*a, backend="auto", **SCORES), indexer_inputs),
    "indexer_scores_torch": (lambda *a: torch_ops.indexer_scores_torch(*a, 0.3), indexer_inputs),
    "dsv4_indexer_topk_scores": (
        lambda *a: torch_ops.dsv4_indexer_topk_scores(*a, backend="auto", **SCORES),
        lambda: (*indexer_inputs(), topk()),
    ),
    "extract_indexer_topk_scores_torch": (
        torch_ops.extract_indexer_topk_scores_torch,
        lambda: (torch.randn(2, S, P), topk()),
    ),
}


def results_and_gradients(function, tensors):
    """All results of function, then the gradient of their weighted sum for every float tensor."""
    tensors = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    out = function(*tensors)
    outs = list(out) if isinstance(out, (list, tuple)) else [out]
    inputs = [t for t in tensors if t.requires_grad]
    if inputs:
        total = sum((o * torch.arange(1, o.numel() + 1).reshape(o.shape)).nan_to_num(neginf=0.0).sum() for o in outs)
        outs += torch.autograd.grad(total, inputs)
    return outs


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_forward_and_backward(name):
    function, make = CALLS[name]
    tensors = make()
    want = results_and_gradients(function, tensors)
    got = results_and_gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), tensors)
    for g, w in zip(got, want, strict=True):
        if w.is_floating_point():
            check_close(g, w, "attention_grad", like=w)
        else:
            check_equal(g, w)


AFTER_ANOTHER = """
import sys
import torch
f = torch.compile(lambda x, n: x * n, fullgraph=True, backend="eager")
f(torch.ones(3), 1), f(torch.ones(5), 2)
from tests.test_torch_compile import CALLS
for name, (function, make) in CALLS.items():
    torch._dynamo.reset()
    try:
        torch.compile(function, fullgraph=True, backend="eager")(*make())
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
"""


def test_one_graph_after_another_program_was_compiled():
    """What torch.compile traces must not look into sys.modules: that grows while torch wraps it, and tracing fails."""
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", AFTER_ANOTHER], cwd=root, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


def test_every_function_of_torch_ops_is_here():
    functions = {n for n in torch_ops.__all__ if callable(getattr(torch_ops, n)) and n.islower()}
    assert functions - {"is_dsv4_kernel_available"} <= {name.partition(",")[0] for name in CALLS}


def test_shapes_may_change_between_calls():
    compiled = torch.compile(CALLS["dsv4_sinkhorn_normalize"][0], fullgraph=True, backend="eager", dynamic=True)
    for n in (3, 5, 11):
        x = torch.randn(n, 4, 4)
        check_equal(compiled(x), CALLS["dsv4_sinkhorn_normalize"][0](x))


def test_wrong_input_is_refused_while_tracing():
    compiled = torch.compile(CALLS["dsv4_sinkhorn_normalize"][0], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="expected shape"):
        compiled(torch.randn(3, 4, 5))


# --- The operators -----------------------------------------------------------------------------------------


def x_of(kind: str) -> torch.Tensor:
    x = torch.randn(6, 5, 4, 4)
    match kind:
        case "strided":
            return x.transpose(-1, -2)[::2, :, :3, 1:]
        case "broadcast":
            return x[:1].expand(6, 5, 4, 4)
        case "empty":
            return x[:0]
        case "bfloat16":
            return x.bfloat16()
    return x


@pytest.mark.parametrize("kind", ["plain", "strided", "broadcast", "empty", "bfloat16"])
def test_sinkhorn_operators_pass_opcheck(kind):
    x = x_of(kind)
    forward, gradient = torch.ops.dsv4.sinkhorn_normalize.default, torch.ops.dsv4.sinkhorn_normalize_grad.default
    for args, op in (((x.detach().requires_grad_(), 3, 1e-6), forward), ((x.float() * 2, x, 3, 1e-6), gradient)):
        checked = torch.library.opcheck(op, args, test_utils=OPCHECKS)
        assert set(checked.values()) == {"SUCCESS"}


def test_sinkhorn_operator_is_the_reference_on_the_cpu():
    x, grad = torch.randn(7, 4, 4, requires_grad=True), torch.randn(7, 4, 4)
    y = sinkhorn.NORMALIZE(x, 20, 1e-6)
    want = sinkhorn.sinkhorn_normalize_torch(x, 20, 1e-6)
    check_equal(y, want)
    check_close(torch.autograd.grad(y, x, grad)[0], torch.autograd.grad(want, x, grad)[0], "sinkhorn_grad")
    with torch.no_grad():
        assert not sinkhorn.NORMALIZE(x, 20, 1e-6).requires_grad


def test_sinkhorn_operator_differentiates_twice():
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: sinkhorn.NORMALIZE(x, 4, 1e-6), x)


def test_sinkhorn_operator_is_one_node_with_one_gradient_node():
    seen = []

    def keep(graph, _):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "dsv4" in str(n.target))
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(
        lambda x: sinkhorn.NORMALIZE(x, 3, 1e-6), fullgraph=True, backend=aot_autograd(fw_compiler=keep)
    )
    compiled(torch.randn(2, 4, 4, requires_grad=True)).sum().backward()
    assert seen == ["dsv4.sinkhorn_normalize.default", "dsv4.sinkhorn_normalize_grad.default"]


@pytest.mark.parametrize("args", [(0, 1e-6), (3, -1.0), (3, float("nan"))], ids=str)
def test_operators_check_their_arguments(args):
    with pytest.raises(ValueError, match=r"repeat|eps"):
        sinkhorn.NORMALIZE(torch.randn(4, 4), *args)


def test_index_operators_pass_opcheck():
    like = torch.empty(0)
    sizes = (2, S, K, W, R, P, S, 0)
    nothing = [None] * len(index_ops.ARRAYS)
    given = dict.fromkeys(index_ops.ARRAYS) | {
        "attention_mask": torch.zeros(2, 1, S, K),
        "compressed_topk": topk(),
        "q_positions": torch.arange(S),
    }
    calls = [
        (index_ops.BUILD, (like, *sizes, "int64", *nothing)),
        (index_ops.BUILD, (like, *sizes, "int32", *given.values())),
        (index_ops.PLAN, (build(topk()), K)),
        (index_ops.PLAN_CUDNN, (build(topk()), K)),
    ]
    for op, args in calls:
        checked = torch.library.opcheck(op, args, test_utils=OPCHECKS)
        assert set(checked.values()) == {"SUCCESS"}


def test_index_functions_by_operators_are_the_same_and_one_graph(monkeypatch):
    ids, plans = build(topk()), layouts(build(topk()))
    narrow = build(topk(), dtype=torch.int32)
    empty_row = torch.full((1, 2, 3), -1)
    empty_row[0, 1, 0] = 2
    cudnn = torch_ops.plan_dsv4_sparse_indices(empty_row, K, "cudnn")
    monkeypatch.setattr(indices, "_by_kernels", lambda device: True)

    def everything(chosen):
        return [build(chosen), build(chosen, dtype=torch.int32), *layouts(build(chosen))]

    compiled = torch.compile(everything, fullgraph=True, backend="eager")
    for got in (everything(topk()), compiled(topk())):
        for g, w in zip(got, [ids, narrow, *plans], strict=True):
            check_equal(g, w)
    again = torch_ops.plan_dsv4_sparse_indices(empty_row, K, "cudnn")
    check_equal(again.indices, cudnn.indices)
    check_equal(again.topk_length, cudnn.topk_length)
    check_equal(again.valid_rows, cudnn.valid_rows)
    assert torch_ops.plan_dsv4_sparse_indices(ids, K, "cudnn").valid_rows is None
