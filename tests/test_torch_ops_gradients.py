"""torch_ops under torch autograd: gradcheck, gradients with unusual strides, a training run."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsv4cp import torch_ops
from tests.support import naive
from tests.support.compare import check_close, check_equal
from tests.support.torch_cases import IDS, SCALES, attention_inputs, calls, indexer_inputs, rand

OPS = calls("torch")
*_, ATTENTION_IDS, ATTENTION_SCALE = attention_inputs()
ORACLES = {
    "sinkhorn_normalize_torch": (lambda x: torch_ops.sinkhorn_normalize_torch(x, 3, 1e-4), (rand(2, 3, 3),)),
    "sparse_attention_torch": (
        lambda *qks: torch_ops.sparse_attention_torch(*qks, ATTENTION_IDS, ATTENTION_SCALE),
        attention_inputs()[:3],
    ),
    "dense_attention_topk_torch": (
        lambda *qks: torch_ops.dense_attention_topk_torch(*qks, ATTENTION_IDS, ATTENTION_SCALE),
        attention_inputs()[:3],
    ),
    "indexer_scores_torch": (lambda *qkw: torch_ops.indexer_scores_torch(*qkw, 0.3), indexer_inputs()),
    "extract_indexer_topk_scores_torch": (
        lambda logits: torch_ops.extract_indexer_topk_scores_torch(logits, IDS),
        (rand(2, 4, 6),),
    ),
}
EVERY = {**OPS, **ORACLES}


def finite(function):
    """The finite part of the result: a masked score is -inf, which finite differences cannot take."""

    def call(*tensors):
        y = function(*tensors)
        return y[y.isfinite()]

    return call


# --- Against finite differences and the oracle ---------------------------------------------------------


@pytest.mark.parametrize("op", EVERY)
def test_gradcheck(op):
    function, tensors = EVERY[op]
    assert torch.autograd.gradcheck(finite(function), [t.clone().requires_grad_() for t in tensors])


@pytest.mark.parametrize("op", EVERY)
def test_gradgradcheck(op):
    function, tensors = EVERY[op]
    leaves = [t.clone().requires_grad_() for t in tensors]
    assert torch.autograd.gradgradcheck(finite(function), leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_gradients_against_the_oracle(dtype):
    name = str(dtype).rpartition(".")[2]

    def grads(op, grad):
        function, tensors = calls("torch", dtype)[op]
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = function(*leaves)
        y.backward(grad.to(y.dtype))
        return tensors, [t.grad for t in leaves]

    grad = rand(2, 1, 4, 4, seed=7, dtype=dtype)
    (x,), (got,) = grads("dsv4_sinkhorn_normalize", grad)
    check_close(got, naive.sinkhorn_grad(grad, x, 3, 1e-6), "sinkhorn_grad", name)

    grad = rand(2, 4, 3, 5, seed=7, dtype=dtype)
    tensors, got = grads("dsv4_sparse_attention", grad)
    wanted = naive.attention_grad(grad, *tensors, ATTENTION_IDS, ATTENTION_SCALE)
    for a, b in zip(got, wanted, strict=True):
        check_close(a, b, "attention_grad", name)

    grad = rand(2, 4, 6, seed=7, dtype=torch.float32)
    tensors, got = grads("dsv4_indexer_scores", grad)
    for a, b in zip(got, naive.indexer_scores_grad(grad, *tensors, 0.3, True), strict=True):
        check_close(a, b, "indexer_grad", name)


def test_empty_rows_have_no_gradient():
    """A row without keys: out 0, every gradient 0, whatever the sink, and its neighbours keep their bits."""
    q, kv, _, ids, scale = attention_inputs()
    for sink in (0.0, float("-inf"), float("inf")):
        grads = []
        for used in (ids, torch.cat([ids[:, :1], ids[:, 2:]], 1)):
            rows = [0, 1, 2, 3] if used.shape[1] == 4 else [0, 2, 3]
            leaves = [q[:, rows].clone(), kv.clone(), torch.full((3,), sink, dtype=torch.float64)]
            leaves = [t.requires_grad_() for t in leaves]
            ids_here = used.clone()
            if used.shape[1] == 4:
                ids_here[:, 1] = -1
            out = torch_ops.dsv4_sparse_attention(*leaves, ids_here, scale, backend="torch")
            out.backward(torch.ones_like(out))
            grads.append([out, *(t.grad for t in leaves)])
        (out, dq, dkv, ds), (out_less, dq_less, dkv_less, ds_less) = grads
        assert (out[:, 1] == 0).all() and (dq[:, 1] == 0).all()
        check_equal(out[:, [0, 2, 3]], out_less)
        check_close(dq[:, [0, 2, 3]], dq_less, "attention_grad")
        check_close(dkv, dkv_less, "attention_grad")
        check_close(ds, ds_less, "attention_grad")


# --- Gradients with unusual strides --------------------------------------------------------------------


def every_second(grad: torch.Tensor) -> torch.Tensor:
    """The same values as every second element of a parent filled with NaN."""
    parent = torch.full((*grad.shape[:-1], 2 * grad.shape[-1]), torch.nan, dtype=grad.dtype)
    parent[..., ::2] = grad
    return parent[..., ::2]


LAYOUTS = {
    "transposed": lambda g: g.transpose(-1, -2).contiguous().transpose(-1, -2),
    "axes reversed": lambda g: g.permute(*reversed(range(g.ndim))).contiguous().permute(*reversed(range(g.ndim))),
    "stride 0": lambda g: g[..., :1, :1].expand(g.shape),
    "stride 0 everywhere": lambda g: g.flatten()[0].expand(g.shape),
    "stride 0 over the batch": lambda g: g[:1].expand(g.shape),
    "every second element": every_second,
}


def check_bit_equal_gradients(function, tensors, layout) -> None:
    """A gradient laid out by `layout` and its contiguous copy give the same bits, and the parent's NaN stay out."""
    results = []
    for contiguous in (False, True):
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = function(*leaves)
        grad = layout(rand(*y.shape, seed=8).to(y.dtype))
        assert not grad.is_contiguous()
        y.backward(grad.contiguous() if contiguous else grad)
        results.append([t.grad for t in leaves])
    for strided, contiguous in zip(*results, strict=True):
        check_equal(strided, contiguous)
        assert strided.isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_strided_gradients_are_bit_equal_to_contiguous_ones(op, dtype, layout):
    check_bit_equal_gradients(*calls("torch", dtype)[op], LAYOUTS[layout])


def wide_calls(dtype):
    """As calls, at sizes where matrix products choose their order of adding by the operands' strides."""
    q, kv, sinks = rand(2, 24, 8, 64, dtype=dtype), rand(2, 64, 64, seed=1, dtype=dtype), rand(8, seed=2, dtype=dtype)
    iq, ik, iw = rand(2, 24, 8, 64, dtype=dtype), rand(2, 32, 64, seed=1, dtype=dtype), rand(2, 24, 8, seed=2)
    ids = torch.tensor(np.random.default_rng(3).integers(-1, 33, (2, 24, 40)))
    return {
        "dsv4_sparse_attention": (
            lambda *qks: torch_ops.dsv4_sparse_attention(*qks, ids, 0.125, backend="torch"),
            (q, kv, sinks if dtype == torch.float64 else sinks.float()),
        ),
        "dense_attention_topk_torch": (
            lambda *qks: torch_ops.dense_attention_topk_torch(*qks, ids, 0.125),
            (q, kv, sinks if dtype == torch.float64 else sinks.float()),
        ),
        "dsv4_indexer_scores": (
            lambda *qkw: torch_ops.dsv4_indexer_scores(*qkw, **SCALES, backend="torch"),
            (iq, ik, iw.to(dtype)),
        ),
        "dsv4_indexer_topk_scores": (
            lambda *qkw: torch_ops.dsv4_indexer_topk_scores(*qkw, ids, **SCALES, backend="torch"),
            (iq, ik, iw.to(dtype)),
        ),
        "dsv4_sinkhorn_normalize": (
            lambda x: torch_ops.dsv4_sinkhorn_normalize(x, backend="torch", repeat=20, eps=1e-6),
            (rand(70, 9, 9, dtype=dtype),),
        ),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", wide_calls(torch.float64))
def test_wide_strided_gradients_are_bit_equal_to_contiguous_ones(op, dtype):
    function, tensors = wide_calls(dtype)[op]
    for layout in LAYOUTS.values():
        check_bit_equal_gradients(function, tensors, layout)


@pytest.mark.parametrize("op", OPS)
def test_strided_inputs_equal_contiguous_ones(op):
    function, tensors = OPS[op]
    want = function(*tensors)
    strided = [LAYOUTS["axes reversed"](t) if t.ndim > 1 else every_second(t) for t in tensors]
    leaves = [t.detach().requires_grad_() for t in strided]
    got = function(*leaves)
    where = want.isfinite()
    check_close(got, want, "indexer")
    got[where].sum().backward()
    copies = [t.clone().requires_grad_() for t in tensors]
    function(*copies)[where].sum().backward()
    for a, b in zip(leaves, copies, strict=True):
        check_close(a.grad, b.grad, "indexer_grad")


# --- A training run ------------------------------------------------------------------------------------

B, S, M, C, H, D, R, W, TOP = 2, 12, 3, 6, 2, 4, 3, 4, 2
INDEX_HEADS, E = 2, 5
P = S // R


def plain_sinkhorn(x, *, backend, repeat, eps):
    x = x.exp() / x.exp().sum(-1, keepdim=True) + eps
    for step in range(2 * repeat - 1):
        x = x / (x.sum(-2 if step % 2 == 0 else -1, keepdim=True) + eps)
    return x


def plain_scores(q, pooled, weights, *, compress_ratio, softmax_scale, backend):
    return (torch.einsum("bshe,bpe->bshp", q, pooled).clamp(min=0) * weights[..., None]).sum(2) * softmax_scale


def plain_topk_scores(q, pooled, weights, ids, **options):
    scores = plain_scores(q, pooled, weights, **options)
    return torch.where(ids >= 0, scores.gather(-1, ids.clamp(min=0)), -torch.inf)


def plain_indices(*, compressed_topk, **_):
    """Which of the S + P keys a query sees, as a mask: the oracle needs no list."""
    i, j = torch.arange(S)[:, None], torch.arange(S)
    window = ((j <= i) & (j > i - W)).expand(B, S, S)
    chosen = (compressed_topk[..., None] == torch.arange(P)).any(-2)
    return torch.cat([window, chosen], -1)


def plain_attention(q, kv, sinks, seen, scale, *, backend):
    scores = (torch.einsum("bshd,bkd->bshk", q, kv) * scale).masked_fill(~seen[:, :, None], -torch.inf)
    with_sink = torch.cat([scores, sinks.view(1, 1, H, 1).expand(B, S, H, 1)], -1)
    return torch.einsum("bshk,bkd->bshd", with_sink.softmax(-1)[..., :-1], kv)


PLAIN = SimpleNamespace(
    dsv4_sinkhorn_normalize=plain_sinkhorn,
    dsv4_indexer_scores=plain_scores,
    dsv4_indexer_topk_scores=plain_topk_scores,
    build_dsv4_sparse_topk_indices=plain_indices,
    dsv4_sparse_attention=plain_attention,
)


def parameters() -> list[dict[str, torch.Tensor]]:
    """Two layers' weights."""
    shapes = {"mix": (M * C, M * M), "q": (C, H * D), "kv": (C, D), "out": (H * D, C), "sinks": (H,)}
    shapes |= {"iq": (C, INDEX_HEADS * E), "ik": (C, E), "iw": (C, INDEX_HEADS)}
    layers = [
        {name: 0.4 * rand(*shape, seed=31 * layer + n) for n, (name, shape) in enumerate(shapes.items())}
        for layer in range(2)
    ]
    return [{name: p.requires_grad_() for name, p in layer.items()} for layer in layers]


def layer_forward(ops, p, streams):
    """One V4-shaped layer on hyper-connection streams [B, S, M, C]; the new streams and the indexer's own loss."""
    mixing = ops.dsv4_sinkhorn_normalize(
        (streams.flatten(2) @ p["mix"]).view(B, S, M, M), backend="auto", repeat=5, eps=1e-6
    )
    u = streams.mean(2)
    raw = u @ p["kv"]
    pooled = raw.view(B, P, R, D).mean(2)
    indexer = (u @ p["iq"]).view(B, S, INDEX_HEADS, E), (u @ p["ik"]).view(B, P, R, E).mean(2), u @ p["iw"]
    options = {"compress_ratio": R, "softmax_scale": E**-0.5, "backend": "auto"}
    with torch.no_grad():
        visible = torch.arange(P) < (torch.arange(S)[:, None] + 1) // R
        scores = ops.dsv4_indexer_scores(*indexer, **options).masked_fill(~visible, -torch.inf)
        best = scores.topk(TOP, dim=-1)
        ids = torch.where(best.values > -torch.inf, best.indices, -1)
    chosen = ops.dsv4_indexer_topk_scores(*indexer, ids, **options)
    indexer_loss = torch.where(ids >= 0, chosen - 1, 0).square().mean()
    keys = ops.build_dsv4_sparse_topk_indices(
        batch_size=B,
        seq_len=S,
        key_len=S + P,
        window_size=W,
        device=u.device,
        compress_ratio=R,
        compressed_topk=ids,
        n_pooled=P,
    )
    attended = ops.dsv4_sparse_attention(
        (u @ p["q"]).view(B, S, H, D), torch.cat([raw, pooled], 1), p["sinks"], keys, D**-0.5, backend="auto"
    )
    return mixing @ streams + (attended.flatten(2) @ p["out"])[:, :, None], indexer_loss


def train(ops, steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    layers = parameters()
    x, target = rand(B, S, M, C, seed=77), rand(B, S, C, seed=78)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.values()], lr=0.1)
    losses = []
    for _ in range(steps):
        streams, loss = x, torch.zeros((), dtype=x.dtype)
        for layer in layers:
            streams, indexer_loss = layer_forward(ops, layer, streams)
            loss = loss + 0.1 * indexer_loss
        loss = loss + (streams.mean(2) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, layers


def test_two_layers_train_as_plain_torch_does():
    losses, layers = train(torch_ops, 6)
    plain_losses, plain_layers = train(PLAIN, 6)
    assert all(b < a for a, b in itertools.pairwise(losses)), losses
    assert losses == pytest.approx(plain_losses, rel=1e-9)
    for layer, plain in zip(layers, plain_layers, strict=True):
        for name, p in layer.items():
            assert p.grad.abs().max() > 0, name
            torch.testing.assert_close(p, plain[name], rtol=1e-8, atol=1e-10, msg=name)


def test_results_may_be_changed_in_place():
    """No result is a view whose change torch would refuse; the gradients stay right."""
    for op, (function, tensors) in OPS.items():
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = function(*leaves)
        kept = y.isfinite()
        y += 1
        y[kept].sum().backward()
        assert all(t.grad is not None for t in leaves), op
