"""Small torch inputs and one call of every differentiable torch_ops function, shared by its test files."""

from __future__ import annotations

import numpy as np
import torch

from dsv4cp import torch_ops


def rand(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def attention_inputs(dtype=torch.float64):
    """B 2, S 4, H 3, D 5, K 6, T 7; -1 at head, middle and tail, an empty row, a repeated id, ids out of range."""
    ids = torch.tensor(
        [
            [[-1, 0, 1, -1, 5, 2, -1], [-1] * 7, [3, 3, 4, -1, -1, -1, 0], [0, 1, 2, 3, 4, 5, -1]],
            [[6, 2, -5, 99, 1, -1, -1], [-1, -1, -1, -1, -1, -1, 5], [5, 4, 3, 2, 1, 0, 0], [2, -1, 2, -1, 2, -1, 2]],
        ]
    )
    q, kv, sinks = rand(2, 4, 3, 5, dtype=dtype), rand(2, 6, 5, seed=1, dtype=dtype), rand(3, seed=2)
    return q, kv, sinks.to(torch.float64 if dtype == torch.float64 else torch.float32), ids, 0.7


def indexer_inputs(dtype=torch.float64):
    """B 2, S 4, I 3, E 5, P 6."""
    return rand(2, 4, 3, 5, dtype=dtype), rand(2, 6, 5, seed=1, dtype=dtype), rand(2, 4, 3, seed=2, dtype=dtype)


IDS = torch.tensor([[[0, 5, -1], [-1, -1, -1], [3, 3, 1], [6, -7, 2]], [[1, 2, 3], [-1, 4, -1], [5, 0, 2], [2, 1, 0]]])
SCALES = {"compress_ratio": 2, "softmax_scale": 0.3}


def calls(backend: str, dtype=torch.float64):
    """One call per differentiable op: name -> (function of the float tensors, those tensors)."""
    q, kv, sinks, ids, scale = attention_inputs(dtype)
    iq, ik, iw = indexer_inputs(dtype)
    return {
        "dsv4_sinkhorn_normalize": (
            lambda x: torch_ops.dsv4_sinkhorn_normalize(x, backend=backend, repeat=3, eps=1e-6),
            (rand(2, 1, 4, 4, dtype=dtype),),
        ),
        "dsv4_sparse_attention": (
            lambda q, kv, sinks: torch_ops.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend=backend),
            (q, kv, sinks),
        ),
        "dsv4_indexer_scores": (
            lambda q, k, w: torch_ops.dsv4_indexer_scores(q, k, w, **SCALES, backend=backend),
            (iq, ik, iw),
        ),
        "dsv4_indexer_topk_scores": (
            lambda q, k, w: torch_ops.dsv4_indexer_topk_scores(q, k, w, IDS, **SCALES, backend=backend),
            (iq, ik, iw),
        ),
    }
