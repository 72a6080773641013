"""The demo's forward stages."""

from __future__ import annotations

from typing import Any

import numpy as np

import dsv4cp

from . import demo_checks as checks
from . import demo_layer as layer
from .demo_run import EPS, REPEAT, Demo


def hyper_connections(demo: Demo) -> None:
    """Logits, Sinkhorn, projections."""
    xp, w, a = demo.xp, demo.w, demo.a
    position = xp.asarray(demo.position)
    h64, pre64, post64, logits64 = checks.mixing(demo.w64, demo.packed.tokens, demo.position)
    a |= demo.stage(
        "hyper-connection logits",
        None,
        lambda backend: layer.streams_and_logits(xp, w, a["tokens"], position),
        lambda got, tick: demo.worst(got, {"h": h64, "pre": pre64, "post": post64, "logits": logits64}),
        1e-5,
    )
    demo.logits = demo.host(a["logits"])
    a["comb"] = demo.stage(
        "Sinkhorn",
        "dsv4_sinkhorn_normalize",
        lambda backend: dsv4cp.dsv4_sinkhorn_normalize(a["logits"], repeat=REPEAT, eps=EPS, backend=backend),
        lambda got, tick: checks.error(demo.host(got), checks.sinkhorn_forward(demo.logits, REPEAT, EPS)),
        1e-5,
    )
    demo.comb = demo.host(a["comb"])

    def projections64() -> dict[str, np.ndarray]:
        u = checks.rms(np.einsum("sm,smc->sc", pre64, h64))
        q = checks.rms((u @ demo.w64["w_q"]).reshape(len(u), demo.sizes.heads, -1))
        iq = (u @ demo.w64["w_iq"]).reshape(len(u), demo.sizes.index_heads, -1)
        return {"u": u, "q": q, "kv": checks.rms(u @ demo.w64["w_kv"]), "iq": iq, "iw": u @ demo.w64["w_iw"]}

    a |= demo.stage(
        "projections",
        None,
        lambda backend: layer.projections(xp, w, a, demo.sizes),
        lambda got, tick: demo.worst(got, projections64()),
        1e-5,
    )


def pooling(demo: Demo) -> None:
    """Compressed entries for keys and for the indexer; then everything that the ops get, in their dtype."""
    xp, w, a, groups = demo.xp, demo.w, demo.a, demo.packed.groups
    u64 = checks.f64(demo.host(a["u"]))
    both = demo.stage(
        f"gated pooling, ratio {layer.RATIO}",
        None,
        lambda backend: {"pool" + p: layer.pool(xp, w, a["u"], demo.groups, p) for p in ("", "i")},
        lambda got, tick: demo.worst(
            {p: got["pool" + p]["pooled"] for p in ("", "i")},
            {p: checks.pooled(demo.w64, u64, groups, p) for p in ("", "i")},
        ),
        1e-5,
    )
    a |= both
    demo.q = demo.half(a["q"])
    demo.keys = demo.half(xp.concatenate([a["kv"], a["pool"]["pooled"]]))
    index = {"q": a["iq"], "pooled_kv": a["pooli"]["pooled"], "weights": a["iw"]}
    demo.index = {name: demo.half(x) for name, x in index.items()}
    iq, ik, iw = (checks.f64(demo.host(x[0])) for x in demo.index.values())
    demo.index64 = iq, ik, iw
    q, keys, sinks = (checks.f64(demo.host(x)) for x in (demo.q[0], demo.keys[0], w["sinks"]))
    demo.attention64 = q, keys, sinks


def selection(demo: Demo) -> None:
    """Indexer top-k, index lists, plan."""
    xp, packed, window = demo.xp, demo.packed, demo.sizes.window
    tokens, entries = len(packed.tokens), len(packed.groups)
    documents: dict[str, Any] = {
        "q_segment_ids": xp.asarray(packed.segments)[None],
        "q_local_positions": xp.asarray(packed.positions)[None],
        "pooled_segment_ids": xp.asarray(packed.pooled_segments)[None],
        "pooled_positions": xp.asarray(packed.pooled_positions)[None],
    }
    ratio: dict[str, Any] = {"compress_ratio": layer.RATIO}
    visible = checks.visible_entries(packed, layer.RATIO)
    demo.chosen = demo.stage(
        f"indexer top-{demo.sizes.topk}",
        "dsv4_indexer_topk",
        lambda backend: dsv4cp.dsv4_indexer_topk(
            **demo.index, topk=demo.sizes.topk, softmax_scale=demo.index_scale, backend=backend, **ratio, **documents
        ),
        lambda got, tick: checks.selection_regret(demo.host(got)[0], *demo.index64, demo.index_scale, visible, tick),
        1e-5,
    )
    ids = demo.ids = demo.host(demo.chosen)[0]
    sizes = {"batch_size": 1, "seq_len": tokens, "key_len": tokens + entries, "n_pooled": entries}
    demo.built = demo.stage(
        "index building",
        "build_dsv4_sparse_topk_indices",
        lambda backend: dsv4cp.build_dsv4_sparse_topk_indices(
            window_size=window, compressed_topk=demo.chosen, backend=backend, **sizes, **ratio, **documents
        ),
        lambda got, tick: checks.differing_rows(demo.host(got)[0], ids, packed, window),
        0,
    )
    demo.lists = demo.host(demo.built)[0]
    layout = demo.takes("dsv4_sparse_attention")
    demo.plan = demo.stage(
        f"plan, layout {layout}",
        "plan_dsv4_sparse_indices",
        lambda backend: dsv4cp.plan_dsv4_sparse_indices(demo.built, tokens + entries, layout, index_backend=backend),
        lambda got, tick: checks.differing_rows(demo.host(got.indices).reshape(tokens, -1), ids, packed, window),
        0,
    )


def attention(demo: Demo) -> None:
    """Sparse attention, the scores of the chosen entries, the layer's result."""
    w, a = demo.w, demo.a
    demo.out, demo.lse = demo.stage(
        "sparse attention",
        "dsv4_sparse_attention",
        lambda backend: dsv4cp.dsv4_sparse_attention(
            demo.q, demo.keys, w["sinks"], demo.built, demo.scale, backend=backend, plan=demo.plan, return_lse=True
        ),
        lambda got, tick: checks.error(
            demo.host(got[0][0]), checks.attention(*demo.attention64, demo.lists, demo.scale, tick)["out"]
        ),
        demo.limits["forward"],
    )
    a["out"] = demo.out[0].astype(np.float32)
    demo.stage(
        "index scores",
        "dsv4_indexer_topk_scores",
        lambda backend: dsv4cp.dsv4_indexer_topk_scores(
            **demo.index,
            topk_indices=demo.chosen,
            compress_ratio=layer.RATIO,
            softmax_scale=demo.index_scale,
            backend=backend,
        ),
        lambda got, tick: checks.error(
            demo.host(got)[0], checks.index_scores(*demo.index64, demo.ids, demo.index_scale)
        ),
        1e-5,
    )
    a |= layer.streams_out(w, a)
