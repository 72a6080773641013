"""One V4-shaped layer around the library's ops: seeded weights, the glue between the ops, the glue's gradients.

    h[s, m]  = embedding[byte s][m] + position                 M streams of width C
    z        = rms(h flattened) @ w_mix + b_mix                -> pre, post [M] and the M x M mixing logits
    comb     = Sinkhorn(logits)                                (library)
    u        = rms(sum_m pre[m] h[m])
    q, kv    = rms(u @ w_q), rms(u @ w_kv)
    pooled   = rms(sum over a group's R tokens of softmax(gate) * value), once for keys, once for the indexer
    ids      = indexer top-k, index lists, plan, attention     (library)
    h'[m]    = sum_n comb[m, n] h[n] + post[m] (out @ w_o)
    loss     = sum(h' * grad_streams) + sum(selected index scores * grad_scores)

Arrays are NumPy's or CuPy's: xp is the module itself. One text, so no batch axis; the ops get B = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

STREAMS, RATIO, WIDTH = 4, 4, 128
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """What the demo's options choose."""

    tokens: int
    heads: int
    head_dim: int
    window: int
    topk: int
    index_heads: int
    index_dim: int


def make_weights(sizes: Sizes, seed: int) -> dict[str, np.ndarray]:
    """Every weight in float32, the same for the same seed and sizes."""
    rng = np.random.default_rng(seed)
    m, c, d, e, r = STREAMS, WIDTH, sizes.head_dim, sizes.index_dim, RATIO

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    b_mix = normal(m * m + 2 * m, scale=0.5)
    b_mix[2 * m :] += 2 * np.eye(m, dtype=np.float32).ravel()  # streams mostly stay themselves
    return {
        "embedding": normal(256, m, c, scale=1.0),
        "w_mix": normal(m * c, m * m + 2 * m, scale=2 * (m * c) ** -0.5),
        "b_mix": b_mix,
        "w_q": normal(c, sizes.heads * d, scale=c**-0.5),
        "w_kv": normal(c, d, scale=c**-0.5),
        "sinks": normal(sizes.heads, scale=1.0),
        "w_value": normal(c, d, scale=c**-0.5),
        "w_gate": normal(c, d, scale=c**-0.5),
        "b_gate": normal(r, d, scale=0.5),
        "w_iq": normal(c, sizes.index_heads * e, scale=c**-0.5),
        "w_iw": normal(c, sizes.index_heads, scale=c**-0.5),
        "w_ivalue": normal(c, e, scale=c**-0.5),
        "w_igate": normal(c, e, scale=c**-0.5),
        "b_igate": normal(r, e, scale=0.5),
        "w_o": normal(sizes.heads * d, c, scale=(sizes.heads * d) ** -0.5),
    }


def position_code(positions: np.ndarray) -> np.ndarray:
    """Sines and cosines of the place in the document, [S, C] float32: the bytes alone would carry no order."""
    rates = 0.3 * 1000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    angles = positions[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


def rms(xp: Any, x: Any) -> Any:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS)


def rms_grad(xp: Any, grad: Any, x: Any) -> Any:
    """Gradient of rms: (grad - y mean(grad y)) / sqrt(mean(x^2) + eps)."""
    size = xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS)
    y = x / size
    return (grad - y * xp.mean(grad * y, axis=-1, keepdims=True)) / size


def sigmoid(xp: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)); the mixing logits are far from where exp would overflow."""
    return 1 / (1 + xp.exp(-x))


def streams_and_logits(xp: Any, w: dict[str, Any], tokens: Any, position: Any) -> dict[str, Any]:
    """The streams h [S, M, C], the gates pre and post [S, M] and the mixing logits [S, M, M]."""
    m = STREAMS
    h = w["embedding"][tokens] + position[:, None, :]
    flat = h.reshape(len(tokens), -1)
    normed = rms(xp, flat)
    z = normed @ w["w_mix"] + w["b_mix"]
    pre, post = sigmoid(xp, z[:, :m]), 2 * sigmoid(xp, z[:, m : 2 * m])
    return {"h": h, "normed": normed, "pre": pre, "post": post, "logits": z[:, 2 * m :].reshape(-1, m, m)}


def projections(xp: Any, w: dict[str, Any], a: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """u [S, C] and everything that is projected from each token alone."""
    s = len(a["h"])
    mixed = xp.sum(a["pre"][:, :, None] * a["h"], axis=1)
    u = rms(xp, mixed)
    raw_q, raw_kv = (u @ w["w_q"]).reshape(s, sizes.heads, sizes.head_dim), u @ w["w_kv"]
    iq, iw = (u @ w["w_iq"]).reshape(s, sizes.index_heads, sizes.index_dim), u @ w["w_iw"]
    return {
        "mixed": mixed,
        "u": u,
        "raw_q": raw_q,
        "raw_kv": raw_kv,
        "q": rms(xp, raw_q),
        "kv": rms(xp, raw_kv),
        "iq": iq,
        "iw": iw,
    }


def pool(xp: Any, w: dict[str, Any], u: Any, groups: Any, prefix: str) -> dict[str, Any]:
    """Gated pooling: each channel of an entry is a softmax-weighted mean over its group's tokens, then rms."""
    members = u[groups]  # [P, R, C]
    value = members @ w[f"w_{prefix}value"]
    gate = members @ w[f"w_{prefix}gate"] + w[f"b_{prefix}gate"]
    gate = xp.exp(gate - xp.max(gate, axis=1, keepdims=True))
    share = gate / xp.sum(gate, axis=1, keepdims=True)
    raw = xp.sum(share * value, axis=1)
    return {"members": members, "value": value, "share": share, "raw": raw, "pooled": rms(xp, raw)}


def pool_grad(xp: Any, w: dict[str, Any], p: dict[str, Any], grad: Any, prefix: str) -> tuple[Any, dict[str, Any]]:
    """Gradients of pool: of the members [P, R, C], and of its three weights."""
    grad_raw = rms_grad(xp, grad, p["raw"])[:, None, :]
    grad_value = grad_raw * p["share"]
    grad_gate = grad_value * (p["value"] - p["raw"][:, None, :])
    members, channels = p["members"].reshape(-1, WIDTH), grad.shape[-1]
    weights = {
        f"w_{prefix}value": members.T @ grad_value.reshape(-1, channels),
        f"w_{prefix}gate": members.T @ grad_gate.reshape(-1, channels),
        f"b_{prefix}gate": xp.sum(grad_gate, axis=0),
    }
    return grad_value @ w[f"w_{prefix}value"].T + grad_gate @ w[f"w_{prefix}gate"].T, weights


def streams_out(w: dict[str, Any], a: dict[str, Any]) -> dict[str, Any]:
    """y [S, C] from the attention output, and the layer's result [S, M, C]."""
    y = a["out"].reshape(len(a["h"]), -1) @ w["w_o"]
    return {"y": y, "streams": a["comb"] @ a["h"] + a["post"][:, :, None] * y[:, None, :]}


def grad_before_attention(xp: Any, w: dict[str, Any], a: dict[str, Any], grad_streams: Any) -> dict[str, Any]:
    """Gradients of streams_out: what the attention's and Sinkhorn's gradients start from."""
    grad_y = xp.sum(a["post"][:, :, None] * grad_streams, axis=1)
    return {
        "comb": grad_streams @ xp.swapaxes(a["h"], -1, -2),
        "h": xp.swapaxes(a["comb"], -1, -2) @ grad_streams,
        "post": xp.sum(grad_streams * a["y"][:, None, :], axis=-1),
        "w_o": a["out"].reshape(len(a["h"]), -1).T @ grad_y,
        "out": (grad_y @ w["w_o"].T).reshape(a["out"].shape),
    }


def grad_of_weights(xp: Any, w: dict[str, Any], a: dict[str, Any], g: dict[str, Any], groups: Any) -> dict[str, Any]:
    """Every weight's gradient, from the gradients g of the ops' inputs (q, kv, pooled, iq, iw, ik, logits, ...)."""
    s, u = len(a["h"]), a["u"]
    grads = {"w_o": g["w_o"], "sinks": g["sinks"]}
    grad_q = rms_grad(xp, g["q"], a["raw_q"]).reshape(s, -1)
    grad_kv = rms_grad(xp, g["kv"], a["raw_kv"])
    grad_u = grad_q @ w["w_q"].T + grad_kv @ w["w_kv"].T
    for name, grad in (("w_iq", g["iq"].reshape(s, -1)), ("w_iw", g["iw"])):
        grad_u = grad_u + grad @ w[name].T
        grads[name] = u.T @ grad
    for prefix, of in (("", "pooled"), ("i", "ik")):
        grad_members, weights = pool_grad(xp, w, a["pool" + prefix], g[of], prefix)
        grads |= weights
        grad_u[groups] += grad_members  # a token is in one group at most, so no sum is lost here
    grads |= {"w_q": u.T @ grad_q, "w_kv": u.T @ grad_kv}

    grad_mixed = rms_grad(xp, grad_u, a["mixed"])
    grad_pre = xp.sum(grad_mixed[:, None, :] * a["h"], axis=-1)
    post = a["post"] / 2
    grad_z = xp.concatenate(
        [grad_pre * a["pre"] * (1 - a["pre"]), 2 * g["post"] * post * (1 - post), g["logits"].reshape(s, -1)], axis=-1
    )
    grads |= {"w_mix": a["normed"].T @ grad_z, "b_mix": xp.sum(grad_z, axis=0)}
    grad_flat = rms_grad(xp, grad_z @ w["w_mix"].T, a["h"].reshape(s, -1))
    grad_h = g["h"] + a["pre"][:, :, None] * grad_mixed[:, None, :] + grad_flat.reshape(a["h"].shape)
    one_hot = (a["tokens"][:, None] == xp.arange(256)).astype(grad_h.dtype)
    grads["embedding"] = (one_hot.T @ grad_h.reshape(s, -1)).reshape(256, *grad_h.shape[1:])
    return grads
