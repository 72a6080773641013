"""The language model: embedding, layers of attention and feed-forward in hyper-connections, next-token loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .attention import Attention
from .config import Backends, Config
from .layers import FeedForward, HyperConnection, rms


class Model(nn.Module):
    """Tokens [B, S] -> logits of the next token [B, S, V]."""

    def __init__(self, config: Config, backends: Backends) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        parts = [p for r in config.ratios for p in (Attention(config, backends, r), FeedForward(config))]
        self.layers = nn.ModuleList(HyperConnection(config, backends, part) for part in parts)
        self.join = nn.Parameter(torch.zeros(config.streams))  # how the last streams become one
        self.norm = nn.Parameter(torch.ones(config.width))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the sum of the indexers' losses."""
        h = self.embedding(tokens)[:, :, None].repeat(1, 1, self.config.streams, 1)
        index_loss = h.new_zeros(())
        for layer in self.layers:
            h, loss = layer(h)
            index_loss = index_loss + loss
        h = (self.join.sigmoid()[:, None] * h).sum(dim=2)
        return self.head(rms(h, self.norm)).float(), index_loss

    def losses(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy in nats a token of tokens [B, S + 1], and the indexers' loss."""
        with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
            logits, index_loss = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), index_loss

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The indexers' parameters apart: each side has its own loss."""
        own = {id(p) for m in self.modules() if isinstance(m, Attention) and m.indexer for p in m.indexer.parameters()}
        return [p for p in self.parameters() if id(p) not in own], [p for p in self.parameters() if id(p) in own]

    @torch.no_grad()
    def sample(self, tokens: list[int], count: int, *, temperature: float, generator: torch.Generator) -> list[int]:
        """`count` more tokens after the given ones; the last S are looked at."""
        self.eval()
        tokens = list(tokens)
        device = self.head.weight.device
        for _ in range(count):
            seen = torch.tensor(tokens[-self.config.tokens :], device=device)[None]
            with torch.autocast("cuda", torch.bfloat16, enabled=seen.is_cuda):
                logits = self(seen)[0][0, -1].cpu()
            tokens.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
        self.train()
        return tokens[-count:]
