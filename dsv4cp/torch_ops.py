"""The torch surface of dsv4cp: names and keyword signatures of NeMo AutoModel's deepseek_v4.optimized_kernels.

    import dsv4cp.torch_ops as optimized_kernels

Every function takes torch tensors and joins torch autograd. Each slice's torch_bridge holds its own
functions; this module only collects them. Backend names are the mirrored module's:

- "torch" and "sparse_torch": the reference equations, differentiated by torch; any device and float dtype.
- "tilelang": this package's CUDA kernels (the name is kept so that configurations carry over).
- "cudnn": NVIDIA's DSA kernels, sparse attention only.
- "auto": the CUDA kernels where they can take the tensors (Sinkhorn: CUDA; the others: CUDA and bfloat16), else
  the reference.

A backend that cannot run is a RuntimeError that says why, an unknown one a ValueError.
"""

from __future__ import annotations

from typing import Literal

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"dsv4cp.torch_ops needs torch ({error}); install dsv4cp[torch]") from error

from ._backend import missing as _missing
from ._plan import SparseIndexPlan
from .indexer import torch_bridge as _indexer
from .indexer.torch_bridge import (
    Dsv4IndexerBackend,
    dsv4_indexer_scores,
    dsv4_indexer_topk_scores,
    extract_indexer_topk_scores_torch,
    indexer_scores_torch,
)
from .sinkhorn import torch_bridge as _sinkhorn
from .sinkhorn.torch_bridge import Dsv4SinkhornBackend, dsv4_sinkhorn_normalize, sinkhorn_normalize_torch
from .sparse_attention import torch_bridge as _sparse_attention
from .sparse_attention.torch_bridge import (
    Dsv4SparseAttentionBackend,
    dense_attention_topk_torch,
    dsv4_sparse_attention,
    sparse_attention_torch,
)
from .sparse_indices.torch_bridge import build_dsv4_sparse_topk_indices, plan_dsv4_sparse_indices

__all__ = [
    "Dsv4IndexerBackend",
    "Dsv4SinkhornBackend",
    "Dsv4SparseAttentionBackend",
    "SparseIndexPlan",
    "build_dsv4_sparse_topk_indices",
    "dense_attention_topk_torch",
    "dsv4_indexer_scores",
    "dsv4_indexer_topk_scores",
    "dsv4_sinkhorn_normalize",
    "dsv4_sparse_attention",
    "extract_indexer_topk_scores_torch",
    "indexer_scores_torch",
    "is_dsv4_kernel_available",
    "plan_dsv4_sparse_indices",
    "sinkhorn_normalize_torch",
    "sparse_attention_torch",
]


def is_dsv4_kernel_available(name: Literal["sinkhorn", "sparse_attn", "indexer", "sparse_attn_cudnn"]) -> bool:
    """Whether this machine can run the CUDA kernels ("tilelang") of an op, or cuDNN's ("cudnn") of sparse attention:
    False without a GPU."""
    match name:
        case "sinkhorn":
            return _sinkhorn.kernel_missing() is None
        case "sparse_attn":
            return _sparse_attention.kernel_missing() is None
        case "indexer":
            return _indexer.kernel_missing() is None
        case "sparse_attn_cudnn":
            return _missing("cudnn") is None
    known = "'sinkhorn', 'sparse_attn', 'indexer' or 'sparse_attn_cudnn'"
    raise ValueError(f"name: expected {known}, got {name!r}")
