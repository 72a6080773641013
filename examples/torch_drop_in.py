"""torch: a small layer written for NeMo AutoModel's deepseek_v4.optimized_kernels, with only the import changed.

    from nemo_automodel.components.models.deepseek_v4 import optimized_kernels      becomes
    import dsv4cp.torch_ops as optimized_kernels
"""

import torch
from torch import nn

import dsv4cp.torch_ops as optimized_kernels

B, S, C, H, D, R, WINDOW, M = 2, 64, 48, 4, 64, 4, 8, 4


class Layer(nn.Module):
    """Hyper-connected attention over a window and all finished compressed entries, which here are plain means."""

    def __init__(self, backend):
        super().__init__()
        self.backend = backend
        self.q, self.kv, self.o = nn.Linear(C, H * D), nn.Linear(C, D), nn.Linear(H * D, C)
        self.mixing = nn.Parameter(torch.randn(M, M))
        self.sinks = nn.Parameter(torch.zeros(H))

    def forward(self, streams):  # [B, S, M, C]
        u = streams.mean(dim=2)
        dtype = torch.bfloat16 if u.is_cuda else u.dtype  # the kernels take bfloat16
        q = self.q(u).unflatten(-1, (H, D)).to(dtype)
        kv = self.kv(u)
        keys = torch.cat([kv, kv.unflatten(1, (S // R, R)).mean(dim=2)], dim=1).to(dtype)
        ids = optimized_kernels.build_dsv4_sparse_topk_indices(
            batch_size=B,
            seq_len=S,
            key_len=S + S // R,
            window_size=WINDOW,
            device=u.device,
            compress_ratio=R,
            n_pooled=S // R,
        )
        plan = optimized_kernels.plan_dsv4_sparse_indices(ids, S + S // R, self.backend)
        out = optimized_kernels.dsv4_sparse_attention(
            q, keys, self.sinks, ids, D**-0.5, backend=self.backend, plan=plan
        )
        comb = optimized_kernels.dsv4_sinkhorn_normalize(self.mixing, backend=self.backend, repeat=20, eps=1e-6)
        return comb @ streams + self.o(out.flatten(2).to(u.dtype))[:, :, None]


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layer = Layer(backend="auto").to(device)  # the kernels where they can run, else the reference
streams = torch.randn(B, S, M, C, device=device)
target = streams + streams.mean(dim=2, keepdim=True)
optimizer = torch.optim.Adam(layer.parameters(), 3e-2)
losses = []
for _ in range(20):
    loss = (layer(streams) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss of the layer: {losses[0]:.3f}, after 20 steps {losses[-1]:.3f}")
missing = [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
if missing or not losses[-1] < 0.9 * losses[0]:
    raise SystemExit(f"the layer does not learn; no gradient for {missing}")

# The mirrored module's names for the references are there too.
q = torch.randn(B, S, H, D, device=device)
kv = torch.randn(B, S, D, device=device)
ids = torch.randint(-1, S, (B, S, 12), device=device)
out = optimized_kernels.sparse_attention_torch(q, kv, layer.sinks, ids, D**-0.5)
error = (out - optimized_kernels.dense_attention_topk_torch(q, kv, layer.sinks, ids, D**-0.5)).abs().max().item()
print(f"sparse and dense reference differ by {error:.1e}")
if error > 1e-5:
    raise SystemExit("sparse and dense attention disagree")
for name in ("sinkhorn", "sparse_attn", "indexer"):
    print(f"kernels for {name} can run here: {optimized_kernels.is_dsv4_kernel_available(name)}")
