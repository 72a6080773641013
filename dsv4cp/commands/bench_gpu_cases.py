"""The cases of the GPU benchmark: V4-Flash, V4-Pro and their R128 layers, one small function each."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import dsv4cp

from .bench_gpu import Case, Function, input_sets

REPEAT, EPS = 20, 1e-6  # Sinkhorn
WINDOW, RATIO = 128, 4


def with_torch(sets: list[dict[str, Any]]) -> bool:
    """Adds to every array of every set a torch tensor on the same memory, as `name_`; False without torch."""
    if importlib.util.find_spec("torch") is None:
        return False
    from .. import _bridge

    for arrays in sets:
        arrays.update({f"{name}_": _bridge.to_torch(x) for name, x in list(arrays.items())})
    return True


# --- Sinkhorn: M 4, repeat 20, eps 1e-6, float32 ---------------------------------------------------------


def sinkhorn_sets(matrices: int, names: tuple[str, ...], tiny: bool) -> list[dict[str, Any]]:
    """Input sets of random [matrices, 4, 4] arrays."""
    import cupy

    shape = (matrices, 4, 4)
    count = input_sets(64 * matrices * len(names), tiny)
    return [{name: cupy.random.standard_normal(shape, dtype=cupy.float32) for name in names} for _ in range(count)]


def sinkhorn_forward(tiny: bool, *, matrices: int, launch_bound: bool = False) -> Case:
    """y from x: each read or written once."""
    matrices = 64 if tiny else matrices
    sets = sinkhorn_sets(matrices, ("x",), tiny)
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda x, **_: dsv4cp.dsv4_sinkhorn_normalize(x, repeat=REPEAT, eps=EPS, backend="cuda")
    }
    if with_torch(sets):
        from .. import torch_ops

        ours["dsv4cp.torch_ops"] = lambda x_, **_: torch_ops.dsv4_sinkhorn_normalize(
            x_, backend="tilelang", repeat=REPEAT, eps=EPS
        )
    size = f"hyper-connections, {matrices} matrices of 4 x 4, repeat {REPEAT}, float32"
    moved = 128 * matrices
    return Case("Sinkhorn forward", size, "sinkhorn_forward", sets, ours, bytes=moved, launch_bound=launch_bound)


def sinkhorn_backward(tiny: bool, *, matrices: int, launch_bound: bool = False) -> Case:
    """grad_x from grad_y and x: each read or written once."""
    matrices = 64 if tiny else matrices
    sets = sinkhorn_sets(matrices, ("grad_y", "x"), tiny)
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda grad_y, x, **_: dsv4cp.dsv4_sinkhorn_normalize_grad(
            grad_y, x, repeat=REPEAT, eps=EPS, backend="cuda"
        )
    }
    if with_torch(sets):
        import torch

        from .. import torch_ops

        for arrays in sets:
            x_ = arrays["x_"].requires_grad_()
            arrays["y_"] = torch_ops.dsv4_sinkhorn_normalize(x_, backend="tilelang", repeat=REPEAT, eps=EPS)
        ours["dsv4cp.torch_ops, autograd"] = lambda grad_y_, x_, y_, **_: torch.autograd.grad(
            y_, x_, grad_y_, retain_graph=True
        )
    size = f"hyper-connections, {matrices} matrices of 4 x 4, repeat {REPEAT}, float32"
    moved = 192 * matrices
    return Case("Sinkhorn backward", size, "sinkhorn_backward", sets, ours, bytes=moved, launch_bound=launch_bound)


# --- Key ids: S 131072 -----------------------------------------------------------------------------------


def selection(queries: int, entries: int, topk: int) -> Any:
    """int64 [1, S, k] as an indexer makes it: ascending ids of finished entries, -1 where fewer than k are finished.

    Entries at random where their scores fit in memory, else a run of neighbours at a random place.
    """
    import cupy

    finished = (cupy.arange(queries) + 1)[:, None] // RATIO
    if queries * entries <= 2**26:
        scores = cupy.random.random((queries, entries), dtype=cupy.float32)
        scores[cupy.arange(entries) >= finished] = -1
        chosen = cupy.argsort(-scores, axis=-1)[:, :topk]
        chosen = cupy.where(cupy.take_along_axis(scores, chosen, axis=-1) >= 0, chosen, entries)
        chosen.sort(axis=-1)
        return cupy.where(chosen < entries, chosen, -1)[None].astype(cupy.int64)
    first = (cupy.random.random((queries, 1)) * (cupy.maximum(finished - topk, 0) + 1)).astype(cupy.int64)
    chosen = first + cupy.arange(topk)
    return cupy.where(chosen < finished, chosen, -1)[None]


def build_given(tiny: bool) -> Case:
    """V4-Flash, R4: a window and the indexer's top-k, read once and written once."""
    queries, topk = (256, 16) if tiny else (131072, 512)
    entries = queries // RATIO
    sets = [{"compressed_topk": selection(queries, entries, topk)} for _ in range(2)]
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": queries, "key_len": queries + entries, "window_size": WINDOW}
    sizes |= {"n_pooled": entries, "compress_ratio": RATIO}
    width = min(WINDOW, queries) + topk
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda compressed_topk, **_: dsv4cp.build_dsv4_sparse_topk_indices(
            compressed_topk=compressed_topk, **sizes
        )
    }
    if with_torch(sets):
        from .. import torch_ops

        ours["dsv4cp.torch_ops"] = lambda compressed_topk_, **_: torch_ops.build_dsv4_sparse_topk_indices(
            compressed_topk=compressed_topk_, device=compressed_topk_.device, **sizes
        )
    for arrays in sets:
        arrays["sizes"] = sizes
    size = f"V4-Flash R4, given top-k {topk}: S{queries} T{width}"
    return Case("index building", size, "build", sets, ours, bytes=8 * queries * (topk + width))


def build_all(tiny: bool, *, entries: int) -> Case:
    """An R128 layer: a window and every finished entry; nothing is read."""
    import cupy

    queries, entries = (256, 2) if tiny else (131072, entries)
    like = cupy.empty((1,), cupy.int64)
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": queries, "key_len": queries + entries, "window_size": WINDOW}
    sizes |= {"n_pooled": entries, "compress_ratio": 128}
    width = min(WINDOW, queries) + entries
    sets: list[dict[str, Any]] = [{"like": like}]
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda like, **_: dsv4cp.build_dsv4_sparse_topk_indices(like=like, **sizes)
    }
    if with_torch(sets):
        from .. import torch_ops

        ours["dsv4cp.torch_ops"] = lambda like_, **_: torch_ops.build_dsv4_sparse_topk_indices(
            device=like_.device, **sizes
        )
    sets[0]["sizes"] = sizes
    size = f"R128, all finished entries: S{queries} T{width}"
    return Case("index building", size, "build", sets, ours, bytes=8 * queries * width)


def plan(tiny: bool, *, layout: str) -> Case:
    """A plan of V4-Flash ids: read as int64, written as int32."""
    queries, topk = (256, 16) if tiny else (131072, 512)
    entries = queries // RATIO
    keys = queries + entries
    sizes: dict[str, Any] = {"batch_size": 1, "seq_len": queries, "key_len": keys, "window_size": WINDOW}
    sizes |= {"n_pooled": entries, "compress_ratio": RATIO}
    sets = []
    for _ in range(2):
        chosen = selection(queries, entries, topk)
        sets.append({"ids": dsv4cp.build_dsv4_sparse_topk_indices(compressed_topk=chosen, **sizes)})
    slots = sets[0]["ids"].shape[-1]
    padded = -(-slots // 128) * 128 if layout == "cudnn" else slots
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda ids, **_: dsv4cp.plan_dsv4_sparse_indices(ids, keys, layout, all_rows_nonempty=True)
    }
    if with_torch(sets):
        from .. import torch_ops

        theirs: Any = "tilelang" if layout == "cuda" else layout
        ours["dsv4cp.torch_ops"] = lambda ids_, **_: torch_ops.plan_dsv4_sparse_indices(
            ids_, keys, theirs, all_rows_nonempty=True
        )
    size = f"V4-Flash R4, given top-k {topk}: S{queries} T{slots}"
    return Case(f"planning, {layout} layout", size, "plan", sets, ours, bytes=queries * (8 * slots + 4 * padded))


# --- Indexer ---------------------------------------------------------------------------------------------


def extract(tiny: bool) -> Case:
    """Scores at V4-Pro's chosen ids: ids and results once, one score for each id."""
    import cupy

    queries, entries, topk = (32, 64, 8) if tiny else (32768, 8192, 1024)
    logits = cupy.random.standard_normal((1, queries, entries), dtype=cupy.float32)
    sets = [
        {"logits": logits, "ids": cupy.sort(cupy.random.randint(0, entries, (1, queries, topk), dtype=cupy.int32))}
        for _ in range(2)
    ]
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda logits, ids, **_: dsv4cp.extract_indexer_topk_scores(logits, ids)
    }
    if with_torch(sets):
        from .. import torch_ops

        ours["dsv4cp.torch_ops"] = lambda logits_, ids_, **_: torch_ops.extract_indexer_topk_scores_torch(logits_, ids_)
    size = f"V4-Pro indexer: S{queries} P{entries} top-k {topk}"
    return Case("scores at top-k ids", size, "extract", sets, ours, bytes=12 * queries * topk)


CASES: tuple[Callable[[bool], Case], ...] = (
    functools.partial(sinkhorn_forward, matrices=4_194_304),
    functools.partial(sinkhorn_backward, matrices=4_194_304),
    functools.partial(sinkhorn_forward, matrices=8192, launch_bound=True),
    functools.partial(sinkhorn_backward, matrices=8192, launch_bound=True),
    build_given,
    functools.partial(build_all, entries=512),  # the width of V4-Flash's lists
    functools.partial(build_all, entries=1024),  # every entry of 131072 tokens
    functools.partial(plan, layout="cuda"),
    functools.partial(plan, layout="cudnn"),
    extract,
)
