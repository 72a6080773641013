"""dsv4cp: the unusual kernels of DeepSeek-V4 layers for NumPy and CuPy arrays (torch: dsv4cp.torch_ops).

Importing this package loads neither cupy, numba nor torch.
"""

from ._plan import SparseIndexPlan
from .indexer.ops import (
    dsv4_indexer_scores,
    dsv4_indexer_scores_grad,
    dsv4_indexer_topk,
    dsv4_indexer_topk_scores,
    dsv4_indexer_topk_scores_grad,
    extract_indexer_topk_scores,
    select_indexer_topk,
)
from .sinkhorn.ops import dsv4_sinkhorn_normalize, dsv4_sinkhorn_normalize_grad
from .sparse_attention.ops import dense_attention_topk, dsv4_sparse_attention, dsv4_sparse_attention_grad
from .sparse_indices.ops import build_dsv4_sparse_topk_indices, flatten_sparse_indices, plan_dsv4_sparse_indices

__version__ = "0.1.0"

__all__ = [
    "SparseIndexPlan",
    "build_dsv4_sparse_topk_indices",
    "dense_attention_topk",
    "dsv4_indexer_scores",
    "dsv4_indexer_scores_grad",
    "dsv4_indexer_topk",
    "dsv4_indexer_topk_scores",
    "dsv4_indexer_topk_scores_grad",
    "dsv4_sinkhorn_normalize",
    "dsv4_sinkhorn_normalize_grad",
    "dsv4_sparse_attention",
    "dsv4_sparse_attention_grad",
    "extract_indexer_topk_scores",
    "flatten_sparse_indices",
    "plan_dsv4_sparse_indices",
    "select_indexer_topk",
]
