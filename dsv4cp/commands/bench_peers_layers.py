"""Peers of sparse attention and the indexer; what they want of their inputs is prepared outside of the timed calls.

Facts: FlashMLA's Hopper kernels answer with use_legacy=True and ids padded to a multiple of 128; cuDNN DSA wants
an ascending valid prefix with its length, and has no sparse forward on SM90; AutoModel's TileLang kernels
take int64 ids and compile at the first call of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Peer = tuple[str, Callable[..., Any]]
Sets = list[dict[str, Any]]

SCALE = 512**-0.5


def packed(ids: Any) -> tuple[Any, Any]:
    """int32 [S, T padded to 128]: valid ids first, ascending, then -1; and how many there are."""
    import torch

    last = torch.iinfo(torch.int32).max
    ids = torch.nn.functional.pad(ids[0], (0, -ids.shape[-1] % 128), value=-1)
    front = torch.where(ids < 0, last, ids).sort(-1).values
    return torch.where(front == last, -1, front).int().contiguous(), (ids >= 0).sum(-1).int()


def flash_mla_forward(sets: Sets) -> Iterator[Peer]:
    import torch
    from flash_mla import flash_mla_sparse_fwd

    from .bench_peers import version

    for arrays in sets:
        ids = torch.nn.functional.pad(arrays["ids_"][0], (0, -arrays["ids_"].shape[-1] % 128), value=-1)
        arrays["as_given"] = ids.int().contiguous()[:, None]
        front, arrays["valid"] = packed(arrays["ids_"])
        arrays["front"] = front[:, None]
    name = f"FlashMLA{version('sgl-flash-mla')}"

    def call(q: Any, kv: Any, sinks: Any, ids: Any, **more: Any) -> Any:
        return flash_mla_sparse_fwd(q[0], kv[0][:, None], ids, SCALE, 512, attn_sink=sinks, use_legacy=True, **more)

    yield name, lambda q_, kv_, sinks_, as_given, **_: call(q_, kv_, sinks_, as_given)
    yield (
        f"{name}, ids compacted before",
        lambda q_, kv_, sinks_, front, valid, **_: call(q_, kv_, sinks_, front, topk_length=valid),
    )


def automodel_forward(sets: Sets) -> Iterator[Peer]:
    from .bench_peers import automodel, version

    kernels = automodel()
    yield (
        f"AutoModel{version('nemo-automodel')} TileLang",
        lambda q_, kv_, sinks_, ids_, **_: kernels.dsv4_sparse_attention(
            q_, kv_, sinks_, ids_, SCALE, backend="tilelang"
        ),
    )


def automodel_backward(sets: Sets) -> Iterator[Peer]:
    import torch

    from .bench_peers import automodel, version

    kernels = automodel()
    for arrays in sets:
        leaves = [arrays[name].detach().clone().requires_grad_() for name in ("q_", "kv_", "sinks_")]
        arrays["their_leaves"] = leaves
        arrays["their_out"] = kernels.dsv4_sparse_attention(*leaves, arrays["ids_"], SCALE, backend="tilelang")
    yield (
        f"AutoModel{version('nemo-automodel')} TileLang",
        lambda their_out, their_leaves, grad_, **_: torch.autograd.grad(
            their_out, their_leaves, grad_, retain_graph=True
        ),
    )


def cudnn_backward(sets: Sets) -> Iterator[Peer]:
    from cudnn.deepseek_sparse_attention import DSA

    from .. import _bridge
    from .bench_peers import version

    for arrays in sets:
        front, arrays["valid"] = packed(arrays["ids_"])
        arrays["front"] = front.clamp(min=0)
        arrays["plain"] = [arrays[name].detach() for name in ("q_", "kv_", "sinks_")]
        arrays["their_out"] = _bridge.to_torch(arrays["out"])
        arrays["their_lse"] = _bridge.to_torch(arrays["lse"])

    def call(plain: Any, their_out: Any, their_lse: Any, grad_: Any, front: Any, valid: Any, **_: Any) -> Any:
        q, kv, sinks = plain
        return DSA.sparse_attention_backward_wrapper(
            q[0], kv[0], their_out[0], grad_[0], their_lse[0], sinks, front, softmax_scale=SCALE, topk_length=valid
        )

    yield f"cuDNN DSA{version('nvidia-cudnn-frontend')}", call


# --- Indexer ---------------------------------------------------------------------------------------------


def automodel_scores(sets: Sets) -> Iterator[Peer]:
    from .bench_peers import automodel, version

    kernels = automodel()
    numbers = sets[0]["numbers"] | {"backend": "tilelang"}
    yield (
        f"AutoModel{version('nemo-automodel')} TileLang",
        lambda q_, pooled_, weights_, **_: kernels.dsv4_indexer_scores(q_, pooled_, weights_, **numbers),
    )


def automodel_scores_backward(sets: Sets) -> Iterator[Peer]:
    import torch

    from .bench_peers import automodel, version

    kernels = automodel()
    numbers = sets[0]["numbers"] | {"backend": "tilelang"}
    for arrays in sets:
        leaves = [arrays[name].detach().clone().requires_grad_() for name in ("q_", "pooled_", "weights_")]
        arrays["their_leaves"] = leaves
        arrays["their_out"] = kernels.dsv4_indexer_topk_scores(*leaves, arrays["ids_"], **numbers)
    yield (
        f"AutoModel{version('nemo-automodel')} TileLang",
        lambda their_out, their_leaves, grad_, **_: torch.autograd.grad(
            their_out, their_leaves, grad_, retain_graph=True
        ),
    )


def cudnn_scores(sets: Sets) -> Iterator[Peer]:
    from cudnn.deepseek_sparse_attention import DSA

    from .bench_peers import version

    numbers = sets[0]["numbers"]
    ratio, scale = numbers["compress_ratio"], numbers["softmax_scale"]
    yield (
        f"cuDNN DSA{version('nvidia-cudnn-frontend')}",
        lambda q_, pooled_, weights_, **_: DSA.indexer_forward_wrapper(
            q_, pooled_[:, :, None], weights_, ratio=ratio, sm_scale=scale
        ),
    )


def cudnn_topk(sets: Sets) -> Iterator[Peer]:
    """Scores by cuDNN's indexer forward, then its top-k: together what dsv4_indexer_topk does."""
    import torch
    from cudnn.deepseek_sparse_attention import DSA

    from .bench_peers import version

    numbers = sets[0]["numbers"]
    ratio, scale = numbers["compress_ratio"], numbers["softmax_scale"]
    queries, topk = sets[0]["ids_"].shape[1:]
    finished = ((torch.arange(queries, device="cuda") + 1) // ratio).clamp(min=1).int()

    def call(q_: Any, pooled_: Any, weights_: Any, **_: Any) -> Any:
        made = DSA.indexer_forward_wrapper(q_, pooled_[:, :, None], weights_, ratio=ratio, sm_scale=scale)
        scores = next(x for x in (made.values() if isinstance(made, dict) else made) if torch.is_tensor(x))
        return DSA.indexer_top_k_wrapper(scores.reshape(queries, -1), finished, topk)

    yield f"cuDNN DSA{version('nvidia-cudnn-frontend')}, scores then top-k", call


def cudnn_selection(sets: Sets) -> Iterator[Peer]:
    import torch
    from cudnn.deepseek_sparse_attention import DSA

    from .bench_gpu_cases import RATIO
    from .bench_peers import version

    queries, topk = sets[0]["scores_"].shape[1], sets[0]["topk"]
    finished = ((torch.arange(queries, device="cuda") + 1) // RATIO).clamp(min=1).int()
    yield (
        f"cuDNN DSA{version('nvidia-cudnn-frontend')}",
        lambda scores_, **_: DSA.indexer_top_k_wrapper(scores_[0], finished, topk),
    )


def torch_selection(sets: Sets) -> Iterator[Peer]:
    import torch

    topk = sets[0]["topk"]
    yield f"torch {torch.__version__} topk", lambda scores_, **_: torch.topk(scores_, topk, dim=-1, sorted=False)


def cudnn_scores_backward(sets: Sets) -> Iterator[Peer]:
    """Its gradient is that of a KL loss on the chosen scores: the same products, a little more arithmetic."""
    import torch
    from cudnn.deepseek_sparse_attention import DSA

    from .bench_peers import version

    scale = sets[0]["numbers"]["softmax_scale"]
    for arrays in sets:
        arrays["narrow"] = arrays["weights_"].to(torch.bfloat16)
        arrays["p"], arrays["target"] = (torch.rand_like(arrays["grad_"]).softmax(-1) for _ in range(2))
    one = torch.ones(1, device="cuda")
    yield (
        f"cuDNN DSA{version('nvidia-cudnn-frontend')} (KL gradient)",
        lambda q_, narrow, pooled_, p, target, ids_, **_: DSA.indexer_backward_wrapper(
            q_, narrow, pooled_, p, target, ids_, one, sm_scale=scale
        ),
    )
