"""CuPy: choose and plan once, attend in several layers with it, and the gradient of all of them. Needs a GPU."""

import cupy
import ml_dtypes

import dsv4cp

B, S, H, D = 1, 512, 16, 512  # batch, queries, heads, channels
R, WINDOW, TOPK, LAYERS = 4, 128, 64, 3
IH, IE = 64, 128  # index heads and their channels
P = S // R
bf16 = ml_dtypes.bfloat16  # NumPy's and CuPy's bfloat16

cupy.random.seed(0)


def normal(*shape):
    return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(bf16)


# The selection: the indexer's choice, the window in front of it, laid out for the kernels. No call waits for the GPU.
chosen = dsv4cp.dsv4_indexer_topk(
    normal(B, S, IH, IE), normal(B, P, IE), normal(B, S, IH), TOPK, compress_ratio=R, softmax_scale=IE**-0.5
)
ids = dsv4cp.build_dsv4_sparse_topk_indices(
    batch_size=B, seq_len=S, key_len=S + P, window_size=WINDOW, compress_ratio=R, compressed_topk=chosen, n_pooled=P
)
plan = dsv4cp.plan_dsv4_sparse_indices(ids, S + P)
print(f"ids {ids.shape} {ids.dtype}, plan for backend {plan.backend!r}")

scale = D**-0.5
worst = worst_gradient = 0.0
for _ in range(LAYERS):
    q, kv, grad_out = normal(B, S, H, D), normal(B, S + P, D), normal(B, S, H, D)
    sinks = cupy.random.standard_normal(H, dtype=cupy.float32)
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, None, scale, plan=plan, return_lse=True)
    grads = dsv4cp.dsv4_sparse_attention_grad(grad_out, q, kv, sinks, None, out, lse, scale, plan=plan)

    dense = dsv4cp.dense_attention_topk(q.astype("f4"), kv.astype("f4"), sinks, ids, scale)
    worst = max(worst, float(cupy.abs(out.astype("f4") - dense).max() / cupy.abs(dense).max()))

    # The same gradient in float32: NumPy's reference on the same numbers.
    arrays = [x.astype("f4").get() for x in (q, kv, sinks)]
    out32, lse32 = dsv4cp.dsv4_sparse_attention(*arrays, ids.get(), scale, return_lse=True)
    want = dsv4cp.dsv4_sparse_attention_grad(grad_out.astype("f4").get(), *arrays, ids.get(), out32, lse32, scale)
    for got, w in zip(grads, want, strict=True):
        got = got.astype("f4").get()
        worst_gradient = max(worst_gradient, float(((got - w) ** 2).sum() ** 0.5 / (w**2).sum() ** 0.5))
print(f"{LAYERS} layers: out differs from dense float32 attention by {worst:.1e} of its largest value")
print(f"{LAYERS} layers: gradients differ from NumPy's in float32 by {worst_gradient:.1e} (norm over norm)")
if worst > 2e-2 or worst_gradient > 2e-2:
    raise SystemExit("the kernels and the definition disagree")
