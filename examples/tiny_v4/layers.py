"""The parts around attention: norms, rotary positions, gated pooling, hyper-connections, feed-forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import dsv4cp.torch_ops as ops

from .config import Backends, Config


def rms(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + 1e-6) over the last axis, in float32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return x if weight is None else x * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, channels: int) -> torch.Tensor:
    """Rotary positions on the last `channels` channels of x [B, S, ..., D]; positions [S] may be negative."""
    half = channels // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * rates  # [S, half]
    angles = angles.reshape(len(positions), *[1] * (x.ndim - 3), half)
    cos, sin = angles.cos(), angles.sin()
    plain, a, b = x.split([x.shape[-1] - channels, half, half], dim=-1)
    return torch.cat([plain, a * cos - b * sin, a * sin + b * cos], dim=-1)


class Compressor(nn.Module):
    """R tokens to one entry: each channel is a softmax-weighted mean over the group, then rms and its position.

        share = softmax over the group of (u @ w_gate + b_gate[place in the group])
        entry = rms(sum over the group of share * (u @ w_value))

    Tokens behind the last full group are in no entry yet. (V4's ratio-4 groups overlap; these do not.)
    """

    def __init__(self, width: int, channels: int, ratio: int, rope_dim: int) -> None:
        super().__init__()
        self.ratio, self.rope_dim = ratio, rope_dim
        self.value = nn.Linear(width, channels, bias=False)
        self.gate = nn.Linear(width, channels, bias=False)
        self.place = nn.Parameter(torch.zeros(ratio, channels))
        self.norm = nn.Parameter(torch.ones(channels))

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        """[B, S, C] -> [B, S // R, channels]."""
        entries = u.shape[1] // self.ratio
        groups = u[:, : entries * self.ratio].unflatten(1, (entries, self.ratio))
        share = (self.gate(groups).float() + self.place).softmax(dim=2)
        pooled = rms((share * self.value(groups)).sum(dim=2), self.norm)
        positions = self.ratio * torch.arange(entries, device=u.device)  # an entry stands where its first token does
        return rotate(pooled, positions, self.rope_dim)


class HyperConnection(nn.Module):
    """M residual streams in place of one, mixed by matrices that Sinkhorn makes doubly stochastic.

        z         = rms(all streams of a token) @ w + b            -> pre [M], post [M], logits [M, M]
        input     = sum_m sigmoid(pre_m) h_m
        h'[m]     = sum_n Sinkhorn(logits)[m, n] h[n] + 2 sigmoid(post_m) part(input)
    """

    def __init__(self, config: Config, backends: Backends, part: nn.Module) -> None:
        super().__init__()
        m = config.streams
        self.streams, self.repeat, self.backend, self.part = m, config.sinkhorn_repeat, backends.sinkhorn, part
        self.mix = nn.Linear(m * config.width, 2 * m + m * m)
        nn.init.normal_(self.mix.weight, std=0.02)
        with torch.no_grad():
            self.mix.bias.zero_()
            self.mix.bias[2 * m :] += 3 * torch.eye(m).flatten()  # at first streams mostly stay themselves
        self.norm = nn.Parameter(torch.ones(config.width))

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Streams [B, S, M, C] -> streams, and the part's own loss."""
        m = self.streams
        with torch.autocast(h.device.type, enabled=False):  # the mixing stays in float32
            z = self.mix(rms(h.flatten(2)))
            pre, post, logits = z[..., :m].sigmoid(), 2 * z[..., m : 2 * m].sigmoid(), z[..., 2 * m :]
            comb = ops.dsv4_sinkhorn_normalize(
                logits.unflatten(-1, (m, m)).contiguous(),
                backend=self.backend,  # type: ignore[arg-type]
                repeat=self.repeat,
                eps=1e-6,
            )
            u = rms((pre[..., None] * h).sum(dim=2), self.norm)
        y, loss = self.part(u)
        return comb @ h + post[..., None] * y.float()[:, :, None], loss


class FeedForward(nn.Module):
    """w_down(silu(w_gate u) * w_up u). (V4 has a mixture of experts here.)"""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.down(F.silu(self.gate(u)) * self.up(u)), u.new_zeros(())
