"""Independent float64 oracle: plain loops from the definitions in the design. Imports nothing from dsv4cp.

Slow on purpose: one query, one slot, one key at a time, so that no trick of the library is repeated here.
"""

from __future__ import annotations

import math

import numpy as np

from .compare import to_numpy


def f64(x) -> np.ndarray:
    return to_numpy(x).astype(np.float64)


# --- Sinkhorn ------------------------------------------------------------------------------------------


def sinkhorn(x, repeat: int, eps: float) -> np.ndarray:
    x = f64(x)
    with np.errstate(invalid="ignore"):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        y = e / e.sum(axis=-1, keepdims=True) + eps
        y = y / (y.sum(axis=-2, keepdims=True) + eps)
        for _ in range(repeat - 1):
            y = y / (y.sum(axis=-1, keepdims=True) + eps)
            y = y / (y.sum(axis=-2, keepdims=True) + eps)
    return y


def sinkhorn_grad(grad_y, x, repeat: int, eps: float) -> np.ndarray:
    """Forward-mode: one directional derivative per input element, then contracted with grad_y."""
    x, g = f64(x), f64(grad_y)
    m = x.shape[-1]
    out = np.zeros_like(x)
    for r in range(m):
        for c in range(m):
            e = np.exp(x - x.max(axis=-1, keepdims=True))
            p = e / e.sum(axis=-1, keepdims=True)
            dx = np.zeros_like(x)
            dx[..., r, c] = 1.0
            dy = p * (dx - (p * dx).sum(axis=-1, keepdims=True))
            y = p + eps
            for step in range(2 * repeat - 1):
                axis = -2 if step % 2 == 0 else -1
                s, ds = y.sum(axis=axis, keepdims=True) + eps, dy.sum(axis=axis, keepdims=True)
                dy = dy / s - y * ds / s**2
                y = y / s
            out[..., r, c] = (dy * g).sum(axis=(-1, -2))
    return out


# --- Index lists ---------------------------------------------------------------------------------------


def _image_reach(types, max_image_tokens: int, first: int = 0, last: int | None = None) -> list[tuple[int, int]]:
    """(left, right) reach of every position of one row, counting only inside [first, last)."""
    n = len(types)
    last = n if last is None else last
    reach = []
    for i in range(n):
        if not first <= i < last:
            reach.append((0, 0))
            continue
        starts = [k for k in range(first, i + 1) if types[k] == 0]
        ends_seen = sum(1 for k in range(first, i + 1) if types[k] == 4)
        valid = len(starts) > ends_seen or types[i] == 4
        left = (i - (starts[-1] if starts else first)) if valid else 0
        ends_ahead = [k for k in range(i, last) if types[k] == 4]
        right = ((ends_ahead[0] if ends_ahead else last) - i) if valid else 0
        reach.append((min(left, max_image_tokens - 1), min(right, max_image_tokens)))
    return reach


def build_indices(
    *,
    batch_size,
    seq_len,
    key_len,
    window_size,
    attention_mask=None,
    compress_ratio=0,
    compressed_topk=None,
    n_pooled=0,
    vanilla_key_len=None,
    q_positions=None,
    vision_token_types=None,
    max_image_tokens=0,
    q_segment_ids=None,
    q_local_positions=None,
    pooled_segment_ids=None,
    pooled_positions=None,
) -> np.ndarray:
    vanilla = seq_len if vanilla_key_len is None else vanilla_key_len
    w = window_size
    images = vision_token_types is not None and max_image_tokens > 0
    span = seq_len if q_positions is None else vanilla
    width = min(span, w + max_image_tokens) if images else min(vanilla, w)
    topk = None if compressed_topk is None else to_numpy(compressed_topk)
    compressed_width = 0 if n_pooled == 0 else (n_pooled if topk is None else topk.shape[-1])
    packed = q_segment_ids is not None
    result = np.full((batch_size, seq_len, width + compressed_width), -1, np.int64)
    positions = np.arange(seq_len)[None] if q_positions is None else np.atleast_2d(to_numpy(q_positions))
    positions = np.broadcast_to(positions, (batch_size, seq_len))
    if images:
        types = np.broadcast_to(np.atleast_2d(to_numpy(vision_token_types)), (batch_size, span))
    for b in range(batch_size):
        for i in range(seq_len):
            p = int(positions[b, i])
            segment = int(to_numpy(q_segment_ids)[b, i]) if packed else None
            local = int(to_numpy(q_local_positions)[b, i]) if packed else p
            if packed and segment == 0:
                continue
            document = p - local if packed else 0
            row = []
            if images:
                last = span
                for n in range(seq_len if packed else 0):  # the document ends where another one's query shows it to
                    other, its_segment = int(positions[b, n]), int(to_numpy(q_segment_ids)[b, n])
                    begins = other - int(to_numpy(q_local_positions)[b, n])
                    if other > p and its_segment != segment:
                        last = min(last, begins if its_segment != 0 and begins > p else other)
                inside = 0 <= p < span
                left, right = _image_reach(types[b], max_image_tokens, document, last)[p] if inside else (0, 0)
                start = max(p - (w - 1) - max(left - (w - 1), 0), 0)
                stop = min(p + right, last - 1) if packed else p + right
            else:
                start, stop = max(p - w + 1, 0), p
            start = max(start, document)
            row = [k if k <= stop else -1 for k in range(start, start + width)]
            for j in range(compressed_width):
                entry = j if topk is None else int(topk[b, i, j])
                ok = entry >= 0
                if ok and packed and pooled_segment_ids is not None:
                    ok = entry < n_pooled
                    ok = ok and int(to_numpy(pooled_segment_ids)[b, entry]) == segment
                    ok = ok and int(to_numpy(pooled_positions)[b, entry]) < (local + 1) // compress_ratio
                elif topk is None:
                    ok = entry < (local + 1) // compress_ratio
                row.append(entry + vanilla if ok else -1)
            for t, k in enumerate(row):
                if not 0 <= k < key_len:
                    k = -1
                if k >= 0 and attention_mask is not None:
                    mask = to_numpy(attention_mask)
                    if mask[b if mask.shape[0] > 1 else 0, 0, i, k] < 0:
                        k = -1
                result[b, i, t] = k
    return result


def cudnn_plan(topk_idxs, kv_sequence: int, multiple: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indices [B*S, 1, padded], lengths [B*S], ids of nonempty rows) of the cuDNN layout."""
    ids = to_numpy(topk_idxs)
    batch, seq, slots = ids.shape
    padded = -(-max(slots, 1) // multiple) * multiple
    flat = np.full((batch * seq, 1, padded), -1, np.int32)
    lengths = np.zeros(batch * seq, np.int32)
    for b in range(batch):
        for i in range(seq):
            valid = sorted(int(k) + b * kv_sequence for k in ids[b, i] if 0 <= int(k) < kv_sequence)
            flat[b * seq + i, 0, : len(valid)] = valid
            lengths[b * seq + i] = len(valid)
    return flat, lengths, np.flatnonzero(lengths).astype(np.int64)


# --- Sparse attention ----------------------------------------------------------------------------------


def _row(q, kv, sink, ids, scale):
    """One query head: (ids kept, p, p_sink, out, lse). A +inf or huge sink takes the whole denominator."""
    keep = [int(k) for k in ids if 0 <= int(k) < len(kv)]
    if not keep:
        return keep, None, 0.0, np.zeros(kv.shape[-1]), -math.inf
    scores = np.array([scale * float(q @ kv[k]) for k in keep])
    top = scores.max()
    lse = top + math.log(np.exp(scores - top).sum())
    total = sink if sink == math.inf else np.logaddexp(lse, sink)
    p = np.exp(scores - total)
    p_sink = 1.0 if sink == math.inf else math.exp(sink - total)
    out = sum(p[n] * kv[k] for n, k in enumerate(keep)) if sink != math.inf else np.zeros(kv.shape[-1])
    return keep, p, p_sink, out, lse


def attention(q, kv, sinks, topk_idxs, sm_scale) -> tuple[np.ndarray, np.ndarray]:
    """(out [B, S, H, D], lse [B, S, H])."""
    q, kv, sinks, ids = f64(q), f64(kv), f64(sinks), to_numpy(topk_idxs)
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, s, h in np.ndindex(*q.shape[:3]):
        *_, out[b, s, h], lse[b, s, h] = _row(q[b, s, h], kv[b], sinks[h], ids[b, s], sm_scale)
    return out, lse


def attention_grad(grad_out, q, kv, sinks, topk_idxs, sm_scale) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(grad_q, grad_kv, grad_sinks)."""
    g, q, kv, sinks, ids = f64(grad_out), f64(q), f64(kv), f64(sinks), to_numpy(topk_idxs)
    dq, dkv, dsinks = np.zeros(q.shape), np.zeros(kv.shape), np.zeros(sinks.shape)
    for b, s, h in np.ndindex(*q.shape[:3]):
        keep, p, p_sink, out, _ = _row(q[b, s, h], kv[b], sinks[h], ids[b, s], sm_scale)
        delta = float(g[b, s, h] @ out)
        if not keep:
            continue
        dsinks[h] -= p_sink * delta
        for n, k in enumerate(keep):
            ds = p[n] * (float(g[b, s, h] @ kv[b, k]) - delta)
            dq[b, s, h] += sm_scale * ds * kv[b, k]
            dkv[b, k] += sm_scale * ds * q[b, s, h] + p[n] * g[b, s, h]
    return dq, dkv, dsinks


# --- Indexer -------------------------------------------------------------------------------------------


def indexer_visible(seq_len, n_pooled, compress_ratio, query_start=0) -> np.ndarray:
    """[S, P] bool: entry j is visible to query i."""
    i, j = np.mgrid[:seq_len, :n_pooled]
    return j < (query_start + i + 1) // compress_ratio


def indexer_scores(q, pooled_kv, weights, softmax_scale) -> np.ndarray:
    """Unmasked scores [B, S, P]."""
    q, k, w = f64(q), f64(pooled_kv), f64(weights)
    out = np.zeros((q.shape[0], q.shape[1], k.shape[1]))
    for b, s, j in np.ndindex(*out.shape):
        for h in range(q.shape[2]):
            logit = float(q[b, s, h] @ k[b, j])
            out[b, s, j] += (0.0 if logit <= 0 else logit) * softmax_scale * w[b, s, h]
    return out


def indexer_scores_grad(grad_scores, q, pooled_kv, weights, softmax_scale, visible):
    """(grad_q, grad_pooled_kv, grad_weights); `visible` [B, S, P] tells which scores exist."""
    g, q, k, w = f64(grad_scores), f64(q), f64(pooled_kv), f64(weights)
    dq, dk, dw = np.zeros(q.shape), np.zeros(k.shape), np.zeros(w.shape)
    for b, s, j in np.argwhere(np.broadcast_to(visible, g.shape)):
        for h in range(q.shape[2]):
            logit = float(q[b, s, h] @ k[b, j])
            if logit > 0:
                scaled = g[b, s, j] * softmax_scale
                dw[b, s, h] += scaled * logit
                dq[b, s, h] += scaled * w[b, s, h] * k[b, j]
                dk[b, j] += scaled * w[b, s, h] * q[b, s, h]
    return dq, dk, dw


def topk(scores, k: int, order: str = "id") -> np.ndarray:
    """int32 [..., k] by a full sort: larger first, then smaller id; NaN and -inf never chosen."""
    scores = to_numpy(scores)
    flat = scores.reshape(-1, scores.shape[-1])
    out = np.full((flat.shape[0], k), -1, np.int32)
    for r, row in enumerate(flat):
        usable = [j for j in range(len(row)) if not math.isnan(row[j]) and row[j] != -math.inf]
        chosen = sorted(usable, key=lambda j: (-float(row[j]), j))[:k]
        chosen = sorted(chosen) if order == "id" else chosen
        out[r, : len(chosen)] = chosen
    return out.reshape(*scores.shape[:-1], k)
