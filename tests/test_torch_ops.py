"""torch_ops: names, signatures and backends of the mirrored module, errors, plans, requires_grad."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing

import numpy as np
import pytest
import torch

import dsv4cp
from dsv4cp import torch_ops
from dsv4cp._torch_backend import choose
from tests.support import naive
from tests.support.compare import check_close, check_equal
from tests.support.torch_cases import IDS, SCALES, attention_inputs, calls, indexer_inputs, rand

# Facts about the mirrored module: its functions and their parameters. A star starts the keyword-only ones.
ATTENTION = "q, kv, sinks, topk_idxs, sm_scale"
INDEXER = "q, pooled_kv, weights"
SIGNATURES = {
    "dsv4_sinkhorn_normalize": "x, *, backend, repeat, eps",
    "build_dsv4_sparse_topk_indices": "*, batch_size, seq_len, key_len, window_size, device, attention_mask=None, "
    "compress_ratio=0, compressed_topk=None, n_pooled=0, vanilla_key_len=None, q_positions=None, "
    "vision_token_types=None, max_image_tokens=0",
    "plan_dsv4_sparse_indices": "topk_idxs, kv_sequence, backend, all_rows_nonempty=False",
    "dsv4_sparse_attention": f"{ATTENTION}, *, backend, reference_rounding=False",
    "dsv4_indexer_scores": f"{INDEXER}, *, compress_ratio, softmax_scale, backend, query_start=0, "
    "query_total_len=None",
    "dsv4_indexer_topk_scores": f"{INDEXER}, topk_indices, *, compress_ratio, softmax_scale, backend",
    "is_dsv4_kernel_available": "name",
    "sinkhorn_normalize_torch": "x, repeat, eps",
    "sparse_attention_torch": ATTENTION,
    "dense_attention_topk_torch": ATTENTION,
    "indexer_scores_torch": f"{INDEXER}, softmax_scale",
    "extract_indexer_topk_scores_torch": "logits, topk_indices",
}
# What this package adds: keywords with a default, so that every call of the mirrored module still works.
ADDED = {
    "build_dsv4_sparse_topk_indices": "q_segment_ids=None, q_local_positions=None, pooled_segment_ids=None, "
    "pooled_positions=None, dtype=None",
    "dsv4_sparse_attention": "all_rows_nonempty=False, plan=None, return_lse=False, backward_impl='atomic', "
    "backward_workspace_bytes=2147483648",
}
BACKENDS = {
    "Dsv4SparseAttentionBackend": ("torch", "sparse_torch", "tilelang", "cudnn", "auto"),
    "Dsv4IndexerBackend": ("torch", "tilelang", "auto"),
    "Dsv4SinkhornBackend": ("torch", "tilelang", "auto"),
}
KERNELS = ("sinkhorn", "sparse_attn", "indexer")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")


def bare_signature(function) -> str:
    """The signature without annotations, as text."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


# --- The surface ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    want = ", ".join(filter(None, (SIGNATURES[name], ADDED.get(name))))
    assert bare_signature(getattr(torch_ops, name)) == f"({want})"


def test_names():
    assert set(torch_ops.__all__) == {*SIGNATURES, *BACKENDS, "SparseIndexPlan"}
    assert len(torch_ops.__all__) == len(set(torch_ops.__all__))
    assert torch_ops.SparseIndexPlan is dsv4cp.SparseIndexPlan
    for name in SIGNATURES:
        function = getattr(torch_ops, name)
        assert function.__doc__ and function.__name__ == name
        assert "return" in function.__annotations__


@pytest.mark.parametrize("name", BACKENDS)
def test_backend_names(name):
    assert typing.get_args(getattr(torch_ops, name)) == BACKENDS[name]


@ON_CPU
@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_without_a_gpu(name):
    assert torch_ops.is_dsv4_kernel_available(name) is False


@pytest.mark.parametrize("name", ["", "attention", "Sinkhorn", None, 3])
def test_unknown_kernel_name(name):
    with pytest.raises(ValueError, match="sparse_attn"):
        torch_ops.is_dsv4_kernel_available(name)


def test_importing_the_package_loads_no_gpu_library_and_no_torch():
    script = "import sys, dsv4cp; print([m for m in ('torch', 'cupy', 'numba', 'cudnn') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_torch_ops_loads_no_gpu_library():
    script = "import sys, dsv4cp.torch_ops; print([m for m in ('cupy', 'numba', 'cudnn') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- Values, backends, errors --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values(dtype):
    name = str(dtype).rpartition(".")[2]
    wide = "float64" if name == "float64" else "float32"
    q, kv, sinks, ids, scale = attention_inputs(dtype)
    iq, ik, iw = indexer_inputs(dtype)
    x = rand(2, 1, 4, 4, dtype=dtype)
    got = {op: function(*tensors) for op, (function, tensors) in calls("torch", dtype).items()}
    check_close(got["dsv4_sinkhorn_normalize"], naive.sinkhorn(x, 3, 1e-6), "sinkhorn", like=x)
    check_close(got["dsv4_sparse_attention"], naive.attention(q, kv, sinks, ids, scale)[0], "attention", like=x)
    want = naive.indexer_scores(iq, ik, iw, 0.3)
    check_close(got["dsv4_indexer_scores"], want, "indexer", name, like=x)
    inside = ((IDS >= 0) & (IDS < 6)).numpy()
    picked = np.where(inside, np.take_along_axis(want, np.where(inside, IDS.numpy(), 0), -1), -np.inf)
    check_close(got["dsv4_indexer_topk_scores"], picked, "indexer", name, like=x)
    assert got["dsv4_sinkhorn_normalize"].dtype == got["dsv4_sparse_attention"].dtype == dtype
    assert str(got["dsv4_indexer_scores"].dtype) == str(got["dsv4_indexer_topk_scores"].dtype) == f"torch.{wide}"


@ON_CPU
@pytest.mark.parametrize("op", calls("torch"))
def test_auto_is_the_reference_on_the_cpu(op):
    for dtype in (torch.float32, torch.bfloat16):
        (auto, tensors), (named, _) = calls("auto", dtype)[op], calls("torch", dtype)[op]
        check_equal(auto(*tensors), named(*tensors))


def test_sparse_torch_is_another_name_of_torch():
    (a, tensors), (b, _) = calls("sparse_torch")["dsv4_sparse_attention"], calls("torch")["dsv4_sparse_attention"]
    check_equal(a(*tensors), b(*tensors))


@ON_CPU
@pytest.mark.parametrize("op", calls("torch"))
def test_kernels_that_cannot_run_say_why(op):
    function, tensors = calls("tilelang", torch.bfloat16)[op]
    with pytest.raises(RuntimeError, match=r"tilelang.*(no CUDA|CuPy|CUDA tensors)"):
        function(*tensors)


@ON_CPU
def test_cudnn_that_cannot_run_says_why():
    function, tensors = calls("cudnn", torch.bfloat16)["dsv4_sparse_attention"]
    with pytest.raises(RuntimeError, match="cudnn"):
        function(*tensors)


@pytest.mark.parametrize("op", calls("torch"))
@pytest.mark.parametrize("backend", ["cuda", "reference", "", "Torch", None])
def test_unknown_backend(op, backend):
    function, tensors = calls(backend)[op]
    with pytest.raises(ValueError, match="backend"):
        function(*tensors)


@pytest.mark.parametrize("op", [op for op in calls("torch") if op != "dsv4_sparse_attention"])
@pytest.mark.parametrize("backend", ["sparse_torch", "cudnn"])
def test_backends_of_attention_alone(op, backend):
    function, tensors = calls(backend)[op]
    with pytest.raises(ValueError, match="backend"):
        function(*tensors)


@pytest.mark.parametrize("op", calls("torch"))
def test_arrays_are_refused(op):
    function, tensors = calls("torch")[op]
    with pytest.raises(TypeError):
        function(*(t.numpy() for t in tensors))


@pytest.mark.parametrize("op", calls("torch"))
def test_integer_tensors_are_refused(op):
    function, tensors = calls("torch")[op]
    with pytest.raises(TypeError, match="dtype"):
        function(tensors[0].long(), *tensors[1:])


def test_reference_rounding_needs_the_kernels():
    q, kv, sinks, ids, scale = attention_inputs()
    for backend in ("torch", "sparse_torch"):
        with pytest.raises(ValueError, match="reference_rounding"):
            torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend=backend, reference_rounding=True)


def test_unknown_backward_impl():
    q, kv, sinks, ids, scale = attention_inputs()
    with pytest.raises(ValueError, match="backward_impl"):
        torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend="torch", backward_impl="fast")


def test_choose():
    x, y = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    every = ("torch", "sparse_torch", "tilelang", "cudnn", "auto")
    by = {"allowed": every, "kernel_missing": None}
    for backend in ("torch", "sparse_torch", "auto"):
        assert choose("op", backend, (x, y), **by) == "torch"
    with pytest.raises(RuntimeError, match=r"op: .*'tilelang'.*CUDA tensors"):
        choose("op", "tilelang", (x,), **by)
    with pytest.raises(RuntimeError, match="no such luck"):
        choose("op", "tilelang", (x,), allowed=every, kernel_missing="no such luck")
    assert choose("op", "auto", (), allowed=every, kernel_missing="no such luck") == "torch"
    with pytest.raises(ValueError, match="'torch', 'auto', got 'tilelang'"):
        choose("op", "tilelang", (x,), allowed=("torch", "auto"), kernel_missing=None)
    with pytest.raises(TypeError, match=r"op: .*ndarray"):
        choose("op", "torch", (x, np.zeros(1)), **by)


class Like:
    """What `choose` reads of a CUDA tensor, for a machine without one."""

    is_cuda, device = True, "cuda:0"

    def __init__(self, dtype):
        self.dtype = dtype


def test_choose_for_cuda_tensors(monkeypatch):
    monkeypatch.setattr("dsv4cp._torch_backend.library", lambda tensor: "torch")
    half, single = Like(torch.bfloat16), Like(torch.float32)
    by = {"allowed": ("torch", "tilelang", "auto"), "kernel_missing": None}
    assert choose("op", "auto", (half, single), **by) == choose("op", "tilelang", (single,), **by) == "tilelang"
    assert choose("op", "auto", (half, half), **by, require_bf16=True) == "tilelang"
    assert choose("op", "auto", (half, single), **by, require_bf16=True) == "torch"
    assert choose("op", "auto", (half, torch.zeros(1)), **by) == "torch"
    with pytest.raises(RuntimeError, match=r"bfloat16 tensors, got torch\.float32"):
        choose("op", "tilelang", (half, single), **by, require_bf16=True)


# --- Torch tensors given to the array functions --------------------------------------------------------

ARRAY_CALLS = {
    "dsv4_sinkhorn_normalize": lambda f: f(rand(4, 4), repeat=2, eps=1e-6),
    "dsv4_sinkhorn_normalize_grad": lambda f: f(rand(4, 4), rand(4, 4), repeat=2, eps=1e-6),
    "dsv4_sparse_attention": lambda f: f(*attention_inputs()),
    "dsv4_sparse_attention_grad": lambda f: f(
        rand(2, 4, 3, 5), *attention_inputs()[:4], rand(2, 4, 3, 5), rand(2, 4, 3), 0.7
    ),
    "dense_attention_topk": lambda f: f(*attention_inputs()),
    "dsv4_indexer_scores": lambda f: f(*indexer_inputs(), **SCALES),
    "dsv4_indexer_scores_grad": lambda f: f(rand(2, 4, 6), *indexer_inputs(), **SCALES),
    "dsv4_indexer_topk_scores": lambda f: f(*indexer_inputs(), IDS, **SCALES),
    "dsv4_indexer_topk_scores_grad": lambda f: f(rand(2, 4, 3), *indexer_inputs(), IDS, **SCALES),
    "extract_indexer_topk_scores": lambda f: f(rand(2, 4, 6), IDS),
    "dsv4_indexer_topk": lambda f: f(*indexer_inputs(), 3, **SCALES),
    "select_indexer_topk": lambda f: f(rand(2, 4, 6), 3),
    "plan_dsv4_sparse_indices": lambda f: f(IDS, 6),
    "flatten_sparse_indices": lambda f: f(IDS, 6),
    "build_dsv4_sparse_topk_indices": lambda f: f(
        batch_size=2, seq_len=4, key_len=4, window_size=2, q_positions=torch.arange(4)
    ),
}


@pytest.mark.parametrize("name", ARRAY_CALLS)
def test_array_functions_send_torch_tensors_here(name):
    with pytest.raises(TypeError, match="torch_ops") as caught:
        ARRAY_CALLS[name](getattr(dsv4cp, name))
    named = re.findall(r"dsv4cp\.torch_ops\.(\w+)", str(caught.value))
    assert all(hasattr(torch_ops, function) for function in named)
    assert bool(named) != ("has no such function" in str(caught.value))


def test_every_array_function_was_asked():
    import dsv4cp as package

    public = getattr(package, "__all__", ARRAY_CALLS)
    assert set(public) - {"SparseIndexPlan"} == set(ARRAY_CALLS)


# --- requires_grad -------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", calls("torch"))
def test_gradients_reach_those_who_ask(op):
    function, tensors = calls("torch")[op]
    assert not function(*tensors).requires_grad
    for wanted in range(len(tensors)):
        leaves = [t.clone().requires_grad_(n == wanted) for n, t in enumerate(tensors)]
        versions = [t._version for t in leaves]
        y = function(*leaves)
        assert y.requires_grad and [t._version for t in leaves] == versions
        y[y.isfinite()].sum().backward()
        assert [t.grad is not None for t in leaves] == [n == wanted for n in range(len(leaves))]
        assert leaves[wanted].grad.shape == leaves[wanted].shape and leaves[wanted].grad.isfinite().all()
    leaves = [t.clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        assert not function(*leaves).requires_grad
    with torch.inference_mode():
        check_equal(function(*leaves), function(*tensors))


@pytest.mark.parametrize("op", calls("torch"))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_inputs_dtype(op, dtype):
    function, tensors = calls("torch", dtype)[op]
    leaves = [t.clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    y[y.isfinite()].sum().backward()
    assert [t.grad.dtype for t in leaves] == [t.dtype for t in tensors]


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("sinkhorn_normalize_torch", {"x": torch.zeros(2, 4, 4), "repeat": 2, "eps": 0.0}),
        ("dsv4_sinkhorn_normalize", {"x": torch.zeros(2, 4, 4), "repeat": 2, "eps": 0.0, "backend": "auto"}),
        ("indexer_scores_torch", {
            "q": torch.zeros(1, 2, 1, 4), "pooled_kv": torch.zeros(1, 3, 4), "weights": torch.zeros(1, 2, 1),
            "softmax_scale": 1.0,
        }),
        ("extract_indexer_topk_scores_torch", {"logits": torch.zeros(2, 3), "topk_indices": torch.zeros(2, 1).long()}),
        ("plan_dsv4_sparse_indices", {
            "topk_idxs": torch.zeros(1, 2, 3).long(), "kv_sequence": 4, "backend": "torch",
        }),
    ],
)  # fmt: skip
def test_tensors_without_plain_memory_are_refused(name, arguments):
    for argument, x in arguments.items():
        if not isinstance(x, torch.Tensor):
            continue
        others = [x.to_sparse(), torch.nested.nested_tensor([x[0], x[0]])]
        for other in others + ([x.to_mkldnn()] if x.is_floating_point() else []):
            with pytest.raises(TypeError, match=rf"^{argument}: expected a dense \(strided\) tensor, got a"):
                getattr(torch_ops, name)(**arguments | {argument: other})


@pytest.mark.parametrize("name", ["sparse_attention_torch", "dense_attention_topk_torch"])
def test_attention_under_torch_func(name):
    """grad and vmap of torch.func see the same function as autograd (jvp would keep torch.compile out)."""
    g = torch.Generator().manual_seed(0)
    q, kv, sinks = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((1, 3, 2, 4), (1, 5, 4), (2,)))
    ids = torch.tensor([[[0, -1, 4], [2, 2, 9], [-1, -1, -1]]])

    def total(q, kv, sinks):
        return getattr(torch_ops, name)(q, kv, sinks, ids, 0.5).square().sum()

    leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
    want = torch.autograd.grad(total(*leaves), leaves)
    for a, b in zip(torch.func.grad(total, argnums=(0, 1, 2))(q, kv, sinks), want, strict=True):
        torch.testing.assert_close(a, b)
    both = torch.vmap(total, in_dims=(0, None, None))(torch.stack([q, 2 * q]), kv, sinks)
    torch.testing.assert_close(both, torch.stack([total(q, kv, sinks), total(2 * q, kv, sinks)]))


def test_the_sinkhorn_reference_takes_tensors_only():
    with pytest.raises(TypeError, match="expected torch tensors, got ndarray"):
        torch_ops.sinkhorn_normalize_torch(np.zeros((4, 4)), 2, 0.0)
