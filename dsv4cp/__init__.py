"""dsv4cp (temporary lazy form while the slices are being written)."""

__version__ = "0.1.0"
_WHERE = {'SparseIndexPlan': '_plan', 'dsv4_indexer_scores': 'indexer.ops', 'dsv4_indexer_scores_grad': 'indexer.ops', 'dsv4_indexer_topk': 'indexer.ops', 'dsv4_indexer_topk_scores': 'indexer.ops', 'dsv4_indexer_topk_scores_grad': 'indexer.ops', 'extract_indexer_topk_scores': 'indexer.ops', 'select_indexer_topk': 'indexer.ops', 'dsv4_sinkhorn_normalize': 'sinkhorn.ops', 'dsv4_sinkhorn_normalize_grad': 'sinkhorn.ops', 'dense_attention_topk': 'sparse_attention.ops', 'dsv4_sparse_attention': 'sparse_attention.ops', 'dsv4_sparse_attention_grad': 'sparse_attention.ops', 'build_dsv4_sparse_topk_indices': 'sparse_indices.ops', 'flatten_sparse_indices': 'sparse_indices.ops', 'plan_dsv4_sparse_indices': 'sparse_indices.ops'}


def __getattr__(name):
    import importlib

    if name in _WHERE:
        return getattr(importlib.import_module("." + _WHERE[name], __name__), name)
    raise AttributeError(name)
