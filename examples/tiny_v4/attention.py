"""Attention over a window and compressed entries, and the lightning indexer that chooses among the entries."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dsv4cp.torch_ops as ops

from .config import Backends, Config
from .layers import Compressor, rms, rotate


class Indexer(nn.Module):
    """Chooses `topk` compressed entries for each query, and learns to choose those that attention would look at.

    A top-k has no gradient, so the language-model loss cannot teach the indexer. It learns as DeepSeek-V3.2's
    report describes for the sparse stage of its training: its input is detached, its only loss is

        KL(p || softmax(index scores)) over the chosen entries,

    and p is attention's own weight on them, summed over the heads and normalised. Attention is the teacher and
    gets no gradient from it. dsv4_indexer_topk_scores gives the scores of the chosen entries their gradient.
    """

    def __init__(self, config: Config, backends: Backends, ratio: int) -> None:
        super().__init__()
        self.heads, self.dim, self.topk, self.ratio = config.index_heads, config.index_dim, config.topk, ratio
        self.rope_dim = min(config.rope_dim, config.index_dim // 2)
        self.backend = backends.indexer
        self.q = nn.Linear(config.q_rank, self.heads * self.dim, bias=False)
        self.weights = nn.Linear(config.width, self.heads, bias=False)
        self.compressor = Compressor(config.width, self.dim, ratio, self.rope_dim)

    def project(self, u: torch.Tensor, q_latent: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """index q [B, S, I, E], index keys [B, P, E], weights [B, S, I]."""
        u, q_latent = u.detach(), q_latent.detach()
        q = self.q(q_latent).unflatten(-1, (self.heads, self.dim))
        q = rotate(q.float(), torch.arange(u.shape[1], device=u.device), self.rope_dim)
        weights = self.weights(u).float() * self.heads**-0.5
        return q.to(dtype), self.compressor(u).to(dtype), weights

    def rules(self) -> dict[str, Any]:
        return {"compress_ratio": self.ratio, "softmax_scale": self.dim**-0.5, "backend": self.backend}

    @torch.no_grad()
    def choose(self, projected: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """ids [B, S, k] of the best finished entries, ascending, -1 where fewer are finished."""
        scores = ops.dsv4_indexer_scores(*projected, **self.rules())
        queries, entries = scores.shape[1:]
        finished = (torch.arange(queries, device=scores.device) + 1) // self.ratio
        unseen = torch.arange(entries, device=scores.device) >= finished[:, None]
        best = scores.masked_fill(unseen, -torch.inf).topk(min(self.topk, entries), dim=-1)
        ids = torch.where(best.values.isfinite(), best.indices, entries).sort(dim=-1).values
        return torch.where(ids < entries, ids, -1)

    def loss(self, projected: tuple[torch.Tensor, ...], chosen: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean KL over the queries that have a choice; target [B, S, k] sums to 1 there, 0 in empty slots."""
        there = chosen >= 0
        scores = ops.dsv4_indexer_topk_scores(*projected, chosen, **self.rules())
        log_share = torch.where(there, scores, -1e9).log_softmax(dim=-1)
        divergence = (torch.xlogy(target, target) - target * log_share).sum(dim=-1)
        several = there.sum(dim=-1) > 1
        return (divergence * several).sum() / several.sum().clamp(min=1)


class Attention(nn.Module):
    """Shared keys and values, a window of raw keys, compressed entries after them, a sink per head, grouped output.

    Keys are values too, so the output carries their rotation; turning it back by the query's position leaves
    the distance between the two.
    """

    def __init__(self, config: Config, backends: Backends, ratio: int) -> None:
        super().__init__()
        c = config
        self.config, self.ratio, self.backend = config, ratio, backends.attention
        self.q_down = nn.Linear(c.width, c.q_rank, bias=False)
        self.q_norm = nn.Parameter(torch.ones(c.q_rank))
        self.q_up = nn.Linear(c.q_rank, c.heads * c.head_dim, bias=False)
        self.kv = nn.Linear(c.width, c.head_dim, bias=False)
        self.kv_norm = nn.Parameter(torch.ones(c.head_dim))
        self.sinks = nn.Parameter(torch.zeros(c.heads))
        channels = c.heads * c.head_dim // c.groups
        self.o_groups = nn.Parameter(torch.randn(c.groups, channels, c.o_rank) * channels**-0.5)
        self.o = nn.Linear(c.groups * c.o_rank, c.width, bias=False)
        self.compressor = Compressor(c.width, c.head_dim, ratio, c.rope_dim) if ratio else None
        self.indexer = Indexer(config, backends, ratio) if ratio == 4 else None

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, S, C] -> [B, S, C], and the indexer's loss."""
        c = self.config
        batch, tokens = u.shape[:2]
        dtype = torch.bfloat16 if u.is_cuda else u.dtype  # what the CUDA kernels take
        positions = torch.arange(tokens, device=u.device)
        q_latent = rms(self.q_down(u), self.q_norm)
        q = rms(self.q_up(q_latent).unflatten(-1, (c.heads, c.head_dim)))
        q = rotate(q, positions, c.rope_dim).to(dtype)
        keys = rotate(rms(self.kv(u), self.kv_norm), positions, c.rope_dim).to(dtype)
        entries, chosen, projected = keys[:, :0], None, None
        if self.compressor is not None:
            entries = self.compressor(u).to(dtype)
            keys = torch.cat([keys, entries], dim=1)
        if self.indexer is not None:
            projected = self.indexer.project(u, q_latent, dtype)
            chosen = self.indexer.choose(projected)

        ids = ops.build_dsv4_sparse_topk_indices(
            batch_size=batch,
            seq_len=tokens,
            key_len=keys.shape[1],
            window_size=c.window,
            device=u.device,
            compress_ratio=self.ratio,
            compressed_topk=chosen,
            n_pooled=entries.shape[1],
            dtype=torch.int32,
        )
        out, lse = ops.dsv4_sparse_attention(
            q,
            keys,
            self.sinks,
            ids,
            c.head_dim**-0.5,
            backend=self.backend,  # type: ignore[arg-type]
            all_rows_nonempty=True,  # a query sees itself
            return_lse=True,
        )
        out = rotate(out.float(), -positions, c.rope_dim).to(dtype)
        grouped = out.reshape(batch, tokens, c.groups, -1)
        y = self.o(torch.einsum("bsgc,gcr->bsgr", grouped, self.o_groups.to(dtype)).flatten(2))
        loss = y.new_zeros((), dtype=torch.float32)
        if self.indexer is not None and self.training and chosen.shape[-1] > 1:
            loss = self.indexer.loss(projected, chosen, self.weight_on(q, entries, chosen, lse))
        return y, loss

    @torch.no_grad()
    def weight_on(
        self, q: torch.Tensor, entries: torch.Tensor, chosen: torch.Tensor, lse: torch.Tensor
    ) -> torch.Tensor:
        """What attention gives the chosen entries, summed over heads and normalised: [B, S, k]."""
        total = torch.logaddexp(lse, self.sinks.to(lse.dtype))  # of each query and head
        target = torch.zeros(chosen.shape, device=q.device)
        slots = chosen.clamp(min=0)
        for head in range(q.shape[2]):  # one [B, S, P] at a time
            logits = (q[:, :, head] @ entries.mT).float() * self.config.head_dim**-0.5
            target += (logits.gather(-1, slots) - total[:, :, head, None]).exp()
        target = target * (chosen >= 0)
        return target / target.sum(dim=-1, keepdim=True).clamp(min=1e-30)
