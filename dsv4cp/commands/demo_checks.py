"""What the demo's results are compared with: float64 on the host, written from the definitions.

Nothing here is shared with the ops that it checks.

Arguments are NumPy arrays of any float dtype; the batch axis of 1 is gone. `tick(share)` reports progress in
[0, 1] on the long ones. Attention here is dense: S x K scores, a block of queries at a time, each key
weighted by how many slots name it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .demo_text import Packed

DENSE_ROWS = 512  # query heads whose dense scores are held at once
Tick = Callable[[float], None]


def f64(x: Any) -> np.ndarray:
    """In float64; bfloat16 has no direct cast from every library, so it goes through float32."""
    return np.asarray(x, np.float32 if np.asarray(x).dtype.name == "bfloat16" else None).astype(np.float64)


def error(got: Any, want: np.ndarray) -> float:
    """Largest |got - want| over the largest |want|; inf where got is not finite but want is."""
    got = f64(got)
    if got.shape != want.shape:
        return float("inf")
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(got - want))
    largest = float(np.abs(want[np.isfinite(want)]).max(initial=0.0)) or 1.0
    worst = float(difference.max(initial=0.0)) / largest
    return float("inf") if np.isnan(worst) else worst


# --- Hyper-connections ---------------------------------------------------------------------------------


def sinkhorn_forward(x: np.ndarray, repeat: int, eps: float) -> np.ndarray:
    """Softmax of each row, then columns and rows in turn, 2*repeat - 1 divisions."""
    y = np.exp(f64(x))
    y = y / y.sum(-1, keepdims=True) + eps
    for step in range(2 * repeat - 1):
        y = y / (y.sum(-2 if step % 2 == 0 else -1, keepdims=True) + eps)
    return y


def sinkhorn_grad(grad: np.ndarray, x: np.ndarray, repeat: int, eps: float) -> np.ndarray:
    """Forward mode: the derivative along each of the M*M entries, contracted with the incoming gradient."""
    x, grad = f64(x), f64(grad)
    m = x.shape[-1]
    result = np.empty_like(x)
    for r in range(m):
        for c in range(m):
            p = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
            dy = np.zeros_like(x)
            dy[..., r, :] = -p[..., r, :] * p[..., r, c, None]
            dy[..., r, c] += p[..., r, c]
            y = p + eps
            for step in range(2 * repeat - 1):
                axis = -2 if step % 2 == 0 else -1
                divisor = y.sum(axis, keepdims=True) + eps
                dy = dy / divisor - y * dy.sum(axis, keepdims=True) / divisor**2
                y = y / divisor
            result[..., r, c] = (dy * grad).sum((-1, -2))
    return result


def rms(x: np.ndarray) -> np.ndarray:
    """Root-mean-square normalisation of the last axis."""
    return x / np.sqrt(np.einsum("...c,...c->...", x, x)[..., None] / x.shape[-1] + 1e-6)


def mixing(w: dict[str, np.ndarray], tokens: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, ...]:
    """(h [S, M, C], pre [S, M], post [S, M], logits [S, M, M])."""
    h = np.stack([w["embedding"][t] for t in tokens]) + position[:, None]
    m = h.shape[1]
    z = np.einsum("sk,kz->sz", rms(h.reshape(len(h), -1)), w["w_mix"]) + w["b_mix"]
    half = np.tanh(z[:, : 2 * m] / 2) / 2 + 0.5
    return h, half[:, :m], 2 * half[:, m:], z[:, 2 * m :].reshape(len(h), m, m)


def pooled(w: dict[str, np.ndarray], u: np.ndarray, groups: np.ndarray, prefix: str) -> np.ndarray:
    """Gated pooling, one group after the other."""
    value, gate = u @ w[f"w_{prefix}value"], u @ w[f"w_{prefix}gate"]
    entries = np.empty((len(groups), value.shape[1]))
    for j, members in enumerate(groups):
        share = np.exp(gate[members] + w[f"b_{prefix}gate"])
        entries[j] = sum(a * v for a, v in zip(share, value[members], strict=True)) / share.sum(0)
    return rms(entries)


# --- Selection and index lists -------------------------------------------------------------------------


def visible_entries(packed: Packed, ratio: int) -> list[range]:
    """The compressed entries that each query may see: finished groups of its own document."""
    first = {int(s): int(j) for j, s in reversed(list(enumerate(packed.pooled_segments)))}
    finished = (packed.positions + 1) // ratio
    return [
        range(first.get(int(s), 0), first.get(int(s), 0) + int(n))
        for s, n in zip(packed.segments, finished, strict=True)
    ]


def selection_regret(
    ids: np.ndarray,
    q: np.ndarray,
    entries: np.ndarray,
    weights: np.ndarray,
    scale: float,
    visible: list[range],
    tick: Tick,
) -> float:
    """How far the worst chosen entry is below the best one left out, relative to the scores; inf for invalid rows.

    A full sort of float64 scores; ids may differ from it only where scores are closer than rounding.
    """
    q, entries, weights = f64(q), f64(entries), f64(weights)
    worst, largest = 0.0, 0.0
    for s, seen in enumerate(visible):
        tick(s / len(visible))
        row = ids[s]
        chosen = row[row >= 0]
        count = min(len(row), len(seen))
        if len(chosen) != count or np.any(row[count:] != -1) or np.any(np.diff(chosen) <= 0):
            return float("inf")
        if count == 0:
            continue
        if chosen[0] < seen.start or chosen[-1] >= seen.stop:
            return float("inf")
        scores = scale * np.maximum(entries[seen.start : seen.stop] @ q[s].T, 0) @ weights[s]
        ordered = np.sort(scores)[::-1]
        worst = max(worst, float(ordered[count - 1] - scores[chosen - seen.start].min()))
        largest = max(largest, float(np.abs(scores).max()))
    return worst / (largest or 1.0)


def differing_rows(lists: np.ndarray, ids: np.ndarray, packed: Packed, window: int) -> int:
    """How many queries' lists are not exactly their window inside their document and then their chosen entries."""
    tokens, different = len(packed.tokens), 0
    if len(lists) != tokens:
        return tokens
    for s, row in enumerate(lists):
        reach = min(window - 1, int(packed.positions[s]))
        want = [*range(s - reach, s + 1), *(tokens + ids[s][ids[s] >= 0].astype(np.int64)).tolist()]
        different += row[row >= 0].tolist() != want
    return different


# --- Attention -----------------------------------------------------------------------------------------


def slot_counts(lists: np.ndarray, keys: int) -> np.ndarray:
    """[queries, K]: how many slots of each query name each key."""
    counts = np.zeros((len(lists), keys))
    rows, slots = np.nonzero((lists >= 0) & (lists < keys))
    np.add.at(counts, (rows, lists[rows, slots]), 1)
    return counts


def attention_grad(
    q: np.ndarray, kv: np.ndarray, sinks: np.ndarray, lists: np.ndarray, scale: float, tick: Tick, grad: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of q, kv and sinks."""
    found = attention(q, kv, sinks, lists, scale, tick, grad)
    return {name: found[name] for name in ("q", "kv", "sinks")}


def attention(
    q: np.ndarray,
    kv: np.ndarray,
    sinks: np.ndarray,
    lists: np.ndarray,
    scale: float,
    tick: Tick,
    grad: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Dense softmax attention with a sink: out [S, H, D] and, with an incoming gradient, the gradients too."""
    q, kv, sinks = f64(q), f64(kv), f64(sinks)
    heads, dim = q.shape[1:]
    out, grad_q, grad_kv, grad_sinks = np.empty_like(q), np.empty_like(q), np.zeros_like(kv), np.zeros_like(sinks)
    block = max(1, DENSE_ROWS // heads)
    for start in range(0, len(q), block):
        tick(start / len(q))
        rows = slice(start, start + block)
        counts = slot_counts(lists[rows], len(kv))
        seen = np.flatnonzero(counts.any(0))  # keys that no query of the block names add zeros
        k, counts = kv[seen], counts[:, None, seen]
        flat = q[rows].reshape(-1, dim)
        scores = np.where(counts > 0, scale * (flat @ k.T).reshape(-1, heads, len(seen)), -np.inf)
        top = np.maximum(scores.max(-1, initial=-np.inf), sinks)[..., None]
        p = counts * np.exp(scores - top)
        sink = np.exp(sinks[:, None] - top)
        total = p.sum(-1, keepdims=True) + sink
        p, sink = p / total, sink / total
        flat_p = p.reshape(-1, len(seen))
        out[rows] = (flat_p @ k).reshape(-1, heads, dim)
        if grad is None:
            continue
        g = f64(grad[rows])
        mean = (g * out[rows]).sum(-1, keepdims=True)
        flat_g = g.reshape(-1, dim)
        ds = (scale * p * ((flat_g @ k.T).reshape(p.shape) - mean)).reshape(flat_p.shape)
        grad_q[rows] = (ds @ k).reshape(-1, heads, dim)
        grad_kv[seen] += ds.T @ flat + flat_p.T @ flat_g
        grad_sinks -= (sink * mean).sum((0, 2))
    return {"out": out} if grad is None else {"out": out, "q": grad_q, "kv": grad_kv, "sinks": grad_sinks}


# --- Indexer scores ------------------------------------------------------------------------------------


def index_scores(q: np.ndarray, entries: np.ndarray, weights: np.ndarray, ids: np.ndarray, scale: float) -> np.ndarray:
    """Scores of the chosen entries [S, k], -inf where none was chosen."""
    q, entries, weights = f64(q), f64(entries), f64(weights)
    result = np.full(ids.shape, -np.inf)
    for s, row in enumerate(ids):
        chosen = row >= 0
        result[s, chosen] = scale * np.maximum(entries[row[chosen]] @ q[s].T, 0) @ weights[s]
    return result


def index_scores_grad(
    grad: np.ndarray, q: np.ndarray, entries: np.ndarray, weights: np.ndarray, ids: np.ndarray, scale: float
) -> dict[str, np.ndarray]:
    """Gradients of index_scores, query by query."""
    q, entries, weights = f64(q), f64(entries), f64(weights)
    grad_q, grad_entries, grad_weights = np.zeros_like(q), np.zeros_like(entries), np.zeros_like(weights)
    for s, row in enumerate(ids):
        chosen = row >= 0
        k, g = entries[row[chosen]], scale * f64(grad[s, chosen])
        logits = k @ q[s].T  # [chosen, I]
        grad_weights[s] = g @ np.maximum(logits, 0)
        through = g[:, None] * (logits > 0) * weights[s]
        grad_q[s] = through.T @ k
        np.add.at(grad_entries, row[chosen], through @ q[s])
    return {"q": grad_q, "entries": grad_entries, "weights": grad_weights}


# --- The whole layer -----------------------------------------------------------------------------------


def loss(
    w: dict[str, np.ndarray],
    packed: Packed,
    position: np.ndarray,
    lists: np.ndarray,
    ids: np.ndarray,
    grad_streams: np.ndarray,
    grad_scores: np.ndarray,
    *,
    repeat: int,
    eps: float,
    scale: float,
    index_scale: float,
    tick: Tick,
) -> float:
    """The layer's loss for a fixed selection, from the weights to the last sum."""
    h, pre, post, logits = mixing(w, packed.tokens, position)
    u = rms(np.einsum("sm,smc->sc", pre, h))
    q = rms((u @ w["w_q"]).reshape(len(u), len(w["sinks"]), -1))
    keys = np.concatenate([rms(u @ w["w_kv"]), pooled(w, u, packed.groups, "")])
    out = attention(q, keys, w["sinks"], lists, scale, tick)["out"]
    y = out.reshape(len(u), -1) @ w["w_o"]
    streams = np.einsum("smn,snc->smc", sinkhorn_forward(logits, repeat, eps), h) + np.einsum("sm,sc->smc", post, y)
    entries = pooled(w, u, packed.groups, "i")
    iq = (u @ w["w_iq"]).reshape(len(u), w["w_iw"].shape[1], -1)
    scores = index_scores(iq, entries, u @ w["w_iw"], ids, index_scale)
    return float((streams * grad_streams).sum() + np.where(ids >= 0, scores * grad_scores, 0).sum())
