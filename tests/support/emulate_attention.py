"""The arithmetic of sparse attention's kernels in torch on the CPU: what they round, where, to what.

Products of half types summed in float32; p and ds rounded to the half type before they are operands; p formed with a
maximum that lags behind by up to 2^8; out and the gradients rounded once. Sums have torch's order, not the kernels'.
Imports nothing from dsv4cp. It shows on a machine without a GPU that the oracle's bounds hold what such arithmetic does
to the fuzzer's inputs, and that they do not hold what a mistake does: `mistake` is applied to the operands p and ds,
float32 [H, slots] of a block of one query (forward) or of one query (backward), before they are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

LOG2E = math.log2(math.e)
BLOCK, LAG = 48, 8.0  # keys at a time; how far (log2) the maximum may lag behind
INF = float("inf")

Mistake = Callable[[str, torch.Tensor], torch.Tensor]  # ("p" or "ds", the operand) -> the operand


def right(_name: str, x: torch.Tensor) -> torch.Tensor:
    return x


def queries(q, kv, ids):
    """(b, s, its rows float32 [n, D], their ids) of every query; slots without a key are left out, as there."""
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            valid = (ids[b, s] >= 0) & (ids[b, s] < kv.shape[1])
            of = ids[b, s][valid].long()
            yield b, s, kv[b, of].float(), of


def forward(q, kv, sinks, ids, scale: float, mistake: Mistake = right) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, H, D] in q's dtype, lse [B, S, H] float32)."""
    half, scale2 = q.dtype, torch.tensor(scale * LOG2E, dtype=torch.float32)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -INF)
    for b, s, rows, _ in queries(q, kv, ids):
        scores = (q[b, s].float() @ rows.T) * scale2
        m = torch.full((q.shape[2], 1), -INF)
        total, o = torch.zeros_like(m), torch.zeros(q.shape[2], q.shape[3])
        for first in range(0, len(rows), BLOCK):
            part, values = scores[:, first : first + BLOCK], rows[first : first + BLOCK]
            top = part.amax(1, keepdim=True)
            after = torch.where((top > m + LAG) | (m == -INF), top, m)
            shift = torch.where(after == -INF, 0.0, after)
            alpha, p = torch.exp2(m - shift), torch.exp2(part - shift)
            m, total = after, total * alpha + p.sum(1, keepdim=True)
            o = o * alpha + mistake("p", p).to(half).float() @ values
        sink = torch.exp2(sinks.float()[:, None] * LOG2E - torch.where(m == -INF, 0.0, m))
        share = torch.where(total == 0, 0.0, 1 / (total + sink))
        out[b, s] = (o * share).to(half)
        lse[b, s] = torch.where(total == 0, -INF, m / LOG2E + torch.log(total))[:, 0]
    return out, lse


def exponents(g, q, kv, ids, delta, scale: float) -> torch.Tensor:
    """float64 [B, K]: sums of a key are integers times 2^-e (fixed_sum.cuh), by the bounds of
    sparse_attention_bwd_prep.cu; NaN where the sum is."""
    found = torch.zeros(kv.shape[:2], dtype=torch.float64)
    most = torch.zeros(*kv.shape[:2], 3)  # slots, key_part, rest
    for b, s, _, of in queries(q, kv, ids):
        largest, x = q[b, s].float().abs().amax(1), g[b, s].float()
        key_part = (abs(scale) * x.square().sum(1).sqrt() * 1.0001 * largest).sum()
        rest = ((scale * delta[b, s]).abs() * largest + x.abs().amax(1)).sum()
        for key in of.tolist():
            slots = most[b, key, 0] + 1
            most[b, key] = torch.maximum(most[b, key], torch.stack((slots, key_part, rest)))
    for b, k in most[..., 0].nonzero().tolist():
        slots, key_part, rest = most[b, k].tolist()
        bound = 2 * (key_part * kv[b, k].float().norm().item() * 1.0001 + rest)
        exponent = min(62 - math.frexp(bound)[1] - (int(slots) - 1).bit_length(), 126)
        found[b, k] = exponent if bound < 2.0**120 else math.nan
    return found


def backward(
    g, q, kv, sinks, ids, out, lse, scale: float, mistake: Mistake = right, fixed: int | None = None
) -> tuple[torch.Tensor, ...]:
    """(grad_q, grad_kv, grad_sinks) in the dtypes of q, kv and sinks.

    fixed: grad_kv as a sum of integers, whose exponents are less by so many; None: of float32.
    """
    half, scale2 = q.dtype, torch.tensor(scale * LOG2E, dtype=torch.float32)
    sink2 = sinks.float() * LOG2E
    larger = torch.maximum(lse, sinks.float())
    sum_ = torch.exp2((lse - larger) * LOG2E) + torch.exp2((sinks.float() - larger) * LOG2E)
    total = larger * LOG2E + torch.log2(sum_)
    total = torch.where((lse == -INF) | (sinks == INF), INF, total)
    delta = (g.float() * out.float()).sum(3)
    grad_q, sums = torch.zeros_like(q), torch.zeros(kv.shape)
    if fixed is not None:
        unit = torch.exp2(exponents(g, q, kv, ids, delta, scale) - fixed)[..., None]
        sums = torch.zeros(kv.shape, dtype=torch.int64)
    for b, s, rows, of in queries(q, kv, ids):
        p = mistake("p", torch.exp2((q[b, s].float() @ rows.T) * scale2 - total[b, s][:, None]))
        ds = mistake("ds", scale * p * (g[b, s].float() @ rows.T - delta[b, s][:, None]))
        p, ds = p.to(half).float(), ds.to(half).float()
        grad_q[b, s] = (ds @ rows).to(half)
        terms = ds.T @ q[b, s].float() + p.T @ g[b, s].float()
        sums[b].index_add_(0, of, terms if fixed is None else (terms * unit[b, of]).nan_to_num(0.0).round().long())
    grad_sinks = torch.where(total == INF, 0.0, torch.exp2(sink2 - total) * delta)
    if fixed is not None:
        sums = sums / unit
    return grad_q, sums.to(kv.dtype), -grad_sinks.sum((0, 1)).to(sinks.dtype)
