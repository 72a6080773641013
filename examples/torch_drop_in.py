"""The torch surface: the names of NeMo AutoModel's deepseek_v4.optimized_kernels, autograd included."""

import torch

import dsv4cp.torch_ops as optimized_kernels

B, S, H, D, R, WINDOW, P = 1, 32, 2, 16, 4, 8, 8
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
q = torch.randn(B, S, H, D, device=device, requires_grad=True)
kv = torch.randn(B, S + P, D, device=device, requires_grad=True)
sinks = torch.randn(H, device=device, requires_grad=True)

ids = optimized_kernels.build_dsv4_sparse_topk_indices(
    batch_size=B,
    seq_len=S,
    key_len=S + P,
    window_size=WINDOW,
    device=device,
    compress_ratio=R,
    n_pooled=P,
)
# "auto" takes CUDA kernels for bfloat16 CUDA tensors, else the reference, differentiated by torch.
out = optimized_kernels.dsv4_sparse_attention(q, kv, sinks, ids, D**-0.5, backend="auto")
out.square().mean().backward()
norms = ", ".join(f"{name} {x.grad.norm():.3f}" for name, x in (("q", q), ("kv", kv), ("sinks", sinks)))
print(f"out {tuple(out.shape)}, gradient norms: {norms}")

dense = optimized_kernels.dense_attention_topk_torch(q, kv, sinks, ids, D**-0.5)
error = (out - dense).abs().max().item()
print(f"largest difference from dense attention: {error:.1e}")
if error > 1e-5 or any(x.grad is None or not torch.isfinite(x.grad).all() for x in (q, kv, sinks)):
    raise SystemExit("wrong result or gradient")

logits = torch.randn(3, 4, 4, device=device)
mixed = optimized_kernels.dsv4_sinkhorn_normalize(logits, backend="auto", repeat=20, eps=1e-6)
print(f"column sums after Sinkhorn: {mixed.sum(-2)[0].tolist()}")
for name in ("sinkhorn", "sparse_attn", "indexer"):
    print(f"kernels for {name} can run here: {optimized_kernels.is_dsv4_kernel_available(name)}")
