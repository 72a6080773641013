"""The demo's backward stages: the gradient of each op, then of every weight."""

from __future__ import annotations

from typing import Any

import numpy as np

import dsv4cp

from . import demo_checks as checks
from . import demo_layer as layer
from .demo_run import EPS, REPEAT, Demo

STEP = 1e-7  # of the finite difference in float64: so small that hardly any relu of the indexer changes sign


def ops(demo: Demo) -> None:
    """Gradients of sparse attention, of the chosen entries' scores and of Sinkhorn."""
    xp, w, a = demo.xp, demo.w, demo.a
    g = demo.g = layer.grad_before_attention(xp, w, a, xp.asarray(demo.grad_streams))
    grad_out = demo.half(g.pop("out"))
    saved = (demo.q, demo.keys, w["sinks"], demo.built, demo.out, demo.lse, demo.scale)
    grad_q, grad_keys, g["sinks"] = demo.stage(
        "sparse attention gradient",
        "dsv4_sparse_attention_grad",
        lambda backend: dsv4cp.dsv4_sparse_attention_grad(
            grad_out, *saved, backend=backend, plan=demo.plan if demo.plan.backend == backend else None
        ),
        lambda got, tick: demo.worst(
            {"q": got[0][0], "kv": got[1][0], "sinks": got[2]},
            checks.attention_grad(*demo.attention64, demo.lists, demo.scale, tick, demo.host(grad_out[0])),
        ),
        demo.limits["gradient"],
    )
    g["q"] = grad_q[0].astype(np.float32)
    g["kv"], g["pooled"] = (x.astype(np.float32) for x in xp.split(grad_keys[0], [len(a["h"])]))

    grad_scores = np.where(demo.ids >= 0, demo.grad_scores, 0)
    grads = demo.stage(
        "index score gradient",
        "dsv4_indexer_topk_scores_grad",
        lambda backend: dsv4cp.dsv4_indexer_topk_scores_grad(
            xp.asarray(grad_scores)[None],
            **demo.index,
            topk_indices=demo.chosen,
            compress_ratio=layer.RATIO,
            softmax_scale=demo.index_scale,
            backend=backend,
        ),
        lambda got, tick: demo.worst(
            {"q": got[0][0], "entries": got[1][0], "weights": got[2][0]},
            checks.index_scores_grad(grad_scores, *demo.index64, demo.ids, demo.index_scale),
        ),
        demo.limits["gradient"],
    )
    g["iq"], g["ik"], g["iw"] = (x[0].astype(np.float32) for x in grads)

    g["logits"] = demo.stage(
        "Sinkhorn gradient",
        "dsv4_sinkhorn_normalize_grad",
        lambda backend: dsv4cp.dsv4_sinkhorn_normalize_grad(
            g["comb"], a["logits"], repeat=REPEAT, eps=EPS, backend=backend
        ),
        lambda got, tick: checks.error(
            demo.host(got), checks.sinkhorn_grad(demo.host(g["comb"]), demo.logits, REPEAT, EPS)
        ),
        1e-4,
    )


def weights(demo: Demo) -> None:
    """The chain rule from the ops' gradients back to every weight, the embedding included."""
    demo.stage(
        "gradient of every weight",
        None,
        lambda backend: layer.grad_of_weights(demo.xp, demo.w, demo.a, demo.g, demo.groups),
        lambda got, tick: _directional_error(demo, got, tick),
        demo.limits["layer"],
    )


def _directional_error(demo: Demo, grads: dict[str, Any], tick: checks.Tick) -> float:
    """The gradient along one direction through all weights, against a central difference of the float64 loss.

    Each weight's share of the direction goes half along its gradient, so that nothing cancels, and half at
    random, so that a gradient that is wrong across itself shows; shares are scaled so that every weight
    counts the same, however small its gradient.
    """
    rng = np.random.default_rng([demo.seed, 2])
    g = {name: checks.f64(demo.host(grads[name])) for name in demo.w64}
    norms = {name: float(np.linalg.norm(x)) for name, x in g.items()}
    smallest = min((norm for norm in norms.values() if norm > 0), default=1.0)
    direction = {}
    for name, x in g.items():
        size = norms[name] or smallest
        random = rng.standard_normal(x.shape)
        direction[name] = smallest / size * (x / size + random / np.linalg.norm(random))
    expected = sum(float((g[name] * direction[name]).sum()) for name in g)

    def loss(step: float, first: float) -> float:
        return checks.loss(
            {name: x + step * direction[name] for name, x in demo.w64.items()},
            demo.packed,
            demo.position,
            demo.lists,
            demo.ids,
            demo.grad_streams,
            demo.grad_scores,
            repeat=REPEAT,
            eps=EPS,
            scale=demo.scale,
            index_scale=demo.index_scale,
            tick=lambda share: tick(first + share / 2),
        )

    difference = (loss(STEP, 0.0) - loss(-STEP, 0.5)) / (2 * STEP)
    return abs(difference - expected) / abs(difference)
