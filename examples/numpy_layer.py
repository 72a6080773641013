"""One attention layer with NumPy: choose compressed entries, build the index lists, plan, attend, differentiate."""

import numpy as np

import dsv4cp

B, S, H, D = 1, 64, 4, 32  # batch, queries, heads, channels
R, WINDOW, TOPK = 4, 16, 6  # tokens behind a compressed entry, raw keys and compressed entries a query sees
IH, IE = 4, 16  # index heads and their channels
P = S // R

rng = np.random.default_rng(0)
q = rng.standard_normal((B, S, H, D), dtype=np.float32)
kv = rng.standard_normal((B, S + P, D), dtype=np.float32)  # raw keys first, compressed entries after them
sinks = rng.standard_normal(H, dtype=np.float32)
index_q = rng.standard_normal((B, S, IH, IE), dtype=np.float32)
index_k = rng.standard_normal((B, P, IE), dtype=np.float32)
index_w = rng.standard_normal((B, S, IH), dtype=np.float32)

chosen = dsv4cp.dsv4_indexer_topk(index_q, index_k, index_w, TOPK, compress_ratio=R, softmax_scale=IE**-0.5)
ids = dsv4cp.build_dsv4_sparse_topk_indices(
    batch_size=B, seq_len=S, key_len=S + P, window_size=WINDOW, compress_ratio=R, compressed_topk=chosen, n_pooled=P
)
plan = dsv4cp.plan_dsv4_sparse_indices(ids, S + P)  # once for all layers that share the selection

scale = D**-0.5
out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, plan=plan, return_lse=True)
grad_out = np.ones_like(out)
grad_q, grad_kv, grad_sinks = dsv4cp.dsv4_sparse_attention_grad(grad_out, q, kv, sinks, ids, out, lse, scale, plan=plan)

dense = dsv4cp.dense_attention_topk(q, kv, sinks, ids, scale)
error = float(np.abs(out - dense).max())
print(f"query {S - 1} sees {int((ids[0, -1] >= 0).sum())} of {S + P} keys: {ids[0, -1].tolist()}")
print(f"largest difference from dense attention: {error:.1e}")
if error > 1e-5:
    raise SystemExit("sparse and dense attention disagree")

# The gradient of sum(out), checked along one random direction of q.
step = 1e-2 * rng.standard_normal(q.shape, dtype=np.float32)
ahead, behind = (dsv4cp.dsv4_sparse_attention(q + s, kv, sinks, ids, scale, plan=plan) for s in (step, -step))
slope, expected = float((ahead - behind).sum() / 2), float((grad_q * step).sum())
print(f"slope along a random step: {slope:.4f}, the gradient says {expected:.4f}")
if abs(slope - expected) > 1e-2 * max(1.0, abs(expected)):
    raise SystemExit("the gradient is wrong")
