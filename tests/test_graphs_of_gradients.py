"""Gradients with a graph (create_graph) of inputs that are functions of one another, or have hooks: as without one."""

from __future__ import annotations

import pytest
import torch

from dsv4cp import torch_ops

BATCH, QUERIES, HEADS, DIM, ENTRIES, RATIO = 2, 5, 3, 8, 4, 2
AT = {"compress_ratio": RATIO, "softmax_scale": 0.5}


def drawn(*sizes, seed=0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PLACES = torch.tensor([[[0, 1, 1], [2, -1, 3], [1, 0, 9], [-1, -1, -1], [3, 3, 2]]]).expand(BATCH, -1, -1).contiguous()
MATRICES = drawn(DIM, DIM, seed=1), drawn(DIM, HEADS, seed=2), drawn(BATCH, QUERIES, HEADS, seed=3)


def attention(x, operator, lse=False):
    """q, kv and the sinks of one x [B, S, H, D]."""
    q, kv, sinks = x, x.sum(dim=2) @ MATRICES[0], x.mean(dim=(0, 1, 3))
    if operator:
        results = torch.ops.dsv4.sparse_attention(q, kv, sinks, PLACES, 0.5, False, False, 2**30)
    else:
        results = torch_ops.dsv4_sparse_attention(q, kv, sinks, PLACES, 0.5, backend="torch", return_lse=True)
    return results[1].nan_to_num(neginf=0.0) if lse else results[0]


def scores(x, operator):
    q, k, w = x, x[:, :ENTRIES, 0] @ MATRICES[0], x.mean(dim=3) * MATRICES[2]
    if operator:
        y = torch.ops.dsv4.indexer_scores(q, k, w, RATIO, 0.5, 0)
    else:
        y = torch_ops.dsv4_indexer_scores(q, k, w, **AT, backend="torch")
        seen = (torch.arange(QUERIES)[:, None] + 1) // RATIO > torch.arange(ENTRIES)
        y = torch.where(seen, y, -torch.inf)
    return y.nan_to_num(neginf=0.0)


def scores_at_ids(x, operator):
    q, k, w = x, x[:, :ENTRIES, 0] @ MATRICES[0], x.mean(dim=3) * MATRICES[2]
    if operator:
        y = torch.ops.dsv4.indexer_topk_scores(q, k, w, PLACES, 0.5)
    else:
        y = torch_ops.dsv4_indexer_topk_scores(q, k, w, PLACES, **AT, backend="torch")
    return y.nan_to_num(neginf=0.0)


def normal(x, operator):
    x = x[..., :HEADS]
    return torch.ops.dsv4.sinkhorn_normalize(x, 3, 1e-6) if operator else torch_ops.sinkhorn_normalize_torch(x, 3, 1e-6)


CASES = {
    "attention": attention, "attention, lse": lambda x, operator: attention(x, operator, lse=True), "scores": scores,
    "scores at ids": scores_at_ids, "Sinkhorn": normal,
}  # fmt: skip


def made(name, operator, **options):
    """x, the result's gradient of it."""
    x = drawn(BATCH, QUERIES, HEADS, DIM).requires_grad_()
    y = CASES[name](x, operator)
    (grad,) = torch.autograd.grad(y, x, drawn(*y.shape, seed=7), **options)
    return x, grad


@pytest.mark.parametrize("name", CASES)
def test_inputs_that_are_functions_of_one_another(name):
    _, want = made(name, False)
    for options in ({}, {"create_graph": True}):
        x, got = made(name, True, **options)
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    second = torch.autograd.grad(got.square().sum(), x)
    x, first = made(name, False, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.square().sum(), x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_hooks_are_called_once(name, graph):
    x = drawn(BATCH, QUERIES, HEADS, DIM).requires_grad_()
    called, grads = [], []
    for hooked in (False, True):
        inside = x * 1
        if hooked:
            inside.register_hook(lambda g: called.append(g) or 2 * g)
        y = CASES[name](inside, True)
        grads += torch.autograd.grad(y, x, drawn(*y.shape, seed=7), create_graph=graph)
    assert len(called) == 1
    torch.testing.assert_close(grads[1], 2 * grads[0])


@pytest.mark.parametrize("name", ["attention", "scores", "scores at ids"])
def test_autocast_does_not_reach_inside(name):
    def grad(**options):
        x = drawn(BATCH, QUERIES, HEADS, DIM).float().requires_grad_()
        mine = [m.float() for m in MATRICES]
        q, k, w = x, x.detach()[:, :ENTRIES, 0] @ mine[0], mine[2].clone().requires_grad_()
        if name == "scores":
            y = torch.ops.dsv4.indexer_scores(q, k, w, RATIO, 0.5, 0)
        elif name == "scores at ids":
            y = torch.ops.dsv4.indexer_topk_scores(q, k, w, PLACES, 0.5)
        else:
            y, _ = torch.ops.dsv4.sparse_attention(q, k, w[0, 0], PLACES, 0.5, False, False, 2**30)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(y, (x, w), drawn(*y.shape, seed=7).float(), **options)

    for got, want in zip(grad(create_graph=True), grad(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "scores", "scores at ids", "Sinkhorn"])
def test_inputs_that_are_functions_of_one_another_on_a_gpu(name):
    """The kernels' gradient and the reference's differ by rounding alone."""
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(1, 64, 64, 128, generator=g, device="cuda", dtype=torch.bfloat16).requires_grad_()
    ids = torch.randint(0, 16, (1, 64, 16), generator=g, device="cuda")
    mixed, at = x[:, :16].mean(dim=2) * 4, {"compress_ratio": 4, "softmax_scale": 0.1, "backend": "tilelang"}
    if name == "attention":
        y = torch_ops.dsv4_sparse_attention(x, mixed, x.float().mean(dim=(0, 1, 3)), ids, 0.1, backend="tilelang")
    elif name == "scores":
        y = torch_ops.dsv4_indexer_scores(x, mixed, x.mean(dim=3), **at).nan_to_num(neginf=0.0)
    elif name == "scores at ids":
        y = torch_ops.dsv4_indexer_topk_scores(x, mixed, x.mean(dim=3), ids, **at)
    else:
        y = torch_ops.dsv4_sinkhorn_normalize(x[..., :16, :16], backend="tilelang", repeat=3, eps=1e-6)
    y = y.float().square().sum()
    (plain,) = torch.autograd.grad(y, x, retain_graph=True)
    (graph,) = torch.autograd.grad(y, x, create_graph=True)
    assert graph.requires_grad and (plain - graph).abs().max() <= 0.06 * plain.abs().max()
