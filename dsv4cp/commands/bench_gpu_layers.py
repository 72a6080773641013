"""Attention and indexer cases of the GPU benchmark, one small function each; an op joins when it has GPU kernels.

Work is counted on what a causal V4 layer needs: valid slots only, entries that are finished only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dsv4cp

from . import bench_cudnn
from .bench_gpu import Case, Function
from .bench_gpu_cases import RATIO, WINDOW, selection, with_torch

D = 512  # channels of a head
INDEX_HEADS, INDEX_DIM = 64, 128


def attention_sets(queries: int, heads: int, ratio: int, topk: int) -> tuple[list[dict[str, Any]], int]:
    """Two input sets of a layer and how many slots are valid in each."""
    import cupy
    import ml_dtypes

    entries = queries // ratio
    keys = queries + entries

    def bf16(*shape: int) -> Any:
        return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(ml_dtypes.bfloat16)

    sets = []
    for _ in range(2):
        chosen = {"compressed_topk": selection(queries, entries, topk)} if topk else {"like": cupy.empty(1)}
        ids = dsv4cp.build_dsv4_sparse_topk_indices(
            batch_size=1,
            seq_len=queries,
            key_len=keys,
            window_size=WINDOW,
            compress_ratio=ratio,
            n_pooled=entries,
            **chosen,
        )
        sets.append(
            {
                "q": bf16(1, queries, heads, D),
                "kv": bf16(1, keys, D),
                "sinks": cupy.random.standard_normal(heads, dtype=cupy.float32),
                "ids": ids,
                "grad": bf16(1, queries, heads, D),
            }
        )
    return sets, int((sets[0]["ids"] >= 0).sum())


def attention(
    tiny: bool, *, model: str, queries: int, heads: int, ratio: int, topk: int, backward: bool, portable: bool = False
) -> Case:
    """Sparse attention with a plan made once, as for every layer that shares a selection.

    portable: a row for the kernels of GPUs before Hopper, too.
    """
    if tiny:
        queries, topk = 256, min(topk, 32)
    sets, valid = attention_sets(queries, heads, ratio, topk)
    keys, slots = sets[0]["kv"].shape[1], sets[0]["ids"].shape[-1]
    scale = D**-0.5
    torch_too = with_torch(sets)
    for arrays in sets:
        arrays["plan"] = dsv4cp.plan_dsv4_sparse_indices(arrays["ids"], keys, "cuda")
        if backward:
            q, kv, sinks, plan = (arrays[name] for name in ("q", "kv", "sinks", "plan"))
            arrays["out"], arrays["lse"] = dsv4cp.dsv4_sparse_attention(
                q, kv, sinks, None, scale, backend="cuda", plan=plan, return_lse=True
            )
    part = "backward" if backward else "forward"
    calls = attention_backward if backward else attention_forward
    ours = calls(sets, keys, scale, torch_too)
    if portable:
        from ..sparse_attention import cuda, cuda_bwd

        name = "dsv4cp, CuPy, atomic" if backward else "dsv4cp, CuPy"
        ours[f"{name}, portable kernel"] = _portable(ours[name], cuda_bwd if backward else cuda)
    size = f"{model}: S{queries} H{heads} T{slots} K{keys}, {valid / queries:.0f} valid a query"
    rows = queries * heads * D * 2  # bytes of q, out, their gradients
    return Case(
        f"sparse attention {part}",
        size,
        f"attention_{part}",
        sets,
        ours,
        flops=valid * heads * D * (10 if backward else 4),
        bytes=rows * (4 if backward else 2) + keys * D * (6 if backward else 2) + 4 * queries * slots,
    )


def attention_forward(sets: list[dict[str, Any]], keys: int, scale: float, torch_too: bool) -> dict[str, Function]:
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": lambda q, kv, sinks, plan, **_: dsv4cp.dsv4_sparse_attention(
            q, kv, sinks, None, scale, backend="cuda", plan=plan
        ),
        "dsv4cp, CuPy, no plan": lambda q, kv, sinks, ids, **_: dsv4cp.dsv4_sparse_attention(
            q, kv, sinks, ids, scale, backend="cuda"
        ),
    }
    if torch_too:
        from .. import torch_ops

        for arrays in sets:
            arrays["plan_"] = torch_ops.plan_dsv4_sparse_indices(arrays["ids_"], keys, "tilelang")
        ours["dsv4cp.torch_ops"] = lambda q_, kv_, sinks_, plan_, **_: torch_ops.dsv4_sparse_attention(
            q_, kv_, sinks_, None, scale, backend="tilelang", plan=plan_
        )
    return ours


def _portable(function: Function, module: Any) -> Function:
    """The function with the module's kernels for every GPU instead of Hopper's."""

    def call(**arrays: Any) -> Any:
        before, module.forced_path = module.forced_path, "portable"
        try:
            return function(**arrays)
        finally:
            module.forced_path = before

    return call


def attention_backward(sets: list[dict[str, Any]], keys: int, scale: float, torch_too: bool) -> dict[str, Function]:
    return _by_cuda(sets, keys, scale, torch_too) | bench_cudnn.backward(sets, keys, scale, torch_too)


def _by_cuda(sets: list[dict[str, Any]], keys: int, scale: float, torch_too: bool) -> dict[str, Function]:
    from ..sparse_attention.ops import GRAD_OFFERED

    if "cuda" not in GRAD_OFFERED:
        return {}
    ours: dict[str, Function] = {
        f"dsv4cp, CuPy, {impl}": functools.partial(_gradient, scale=scale, impl=impl)
        for impl in ("atomic", "deterministic")
    }
    if torch_too:
        import torch

        from .. import torch_ops

        for arrays in sets:
            q, kv, sinks = leaves = [arrays[name].requires_grad_() for name in ("q_", "kv_", "sinks_")]
            plan = torch_ops.plan_dsv4_sparse_indices(arrays["ids_"], keys, "tilelang")
            arrays["leaves_"] = leaves
            arrays["out_"] = torch_ops.dsv4_sparse_attention(q, kv, sinks, None, scale, backend="tilelang", plan=plan)
        ours["dsv4cp.torch_ops, autograd"] = lambda out_, leaves_, grad_, **_: torch.autograd.grad(
            out_, leaves_, grad_, retain_graph=True
        )
    return ours


def _gradient(
    *, q: Any, kv: Any, sinks: Any, grad: Any, out: Any, lse: Any, plan: Any, scale: float, impl: str, **_: Any
) -> Any:
    return dsv4cp.dsv4_sparse_attention_grad(
        grad, q, kv, sinks, None, out, lse, scale, backend="cuda", backward_impl=impl, plan=plan
    )


# --- Indexer ---------------------------------------------------------------------------------------------


def indexer_sets(queries: int, topk: int, tiny: bool) -> tuple[list[dict[str, Any]], int]:
    """Two input sets and how many (query, entry) pairs are causal."""
    import cupy
    import ml_dtypes

    queries = 256 if tiny else queries
    entries = queries // RATIO
    topk = min(topk, entries)

    def bf16(*shape: int) -> Any:
        return cupy.random.standard_normal(shape, dtype=cupy.float32).astype(ml_dtypes.bfloat16)

    sets = [
        {
            "q": bf16(1, queries, INDEX_HEADS, INDEX_DIM),
            "pooled": bf16(1, entries, INDEX_DIM),
            "weights": cupy.random.standard_normal((1, queries, INDEX_HEADS), dtype=cupy.float32),
            "ids": cupy.sort(cupy.random.randint(0, entries, (1, queries, topk), dtype=cupy.int32)),
            "grad": cupy.random.standard_normal((1, queries, topk), dtype=cupy.float32),
        }
        for _ in range(2)
    ]
    return sets, sum((i + 1) // RATIO for i in range(queries))


def selecting(tiny: bool, *, queries: int, topk: int) -> Case:
    """The top-k of given causal scores: every finished score read once, ids written once."""
    import cupy

    queries = 256 if tiny else queries
    entries = queries // RATIO
    topk = min(topk, entries)
    hidden = cupy.arange(entries)[None, None] >= ((cupy.arange(queries) + 1) // RATIO)[None, :, None]
    sets = []
    for _ in range(2):
        scores = cupy.random.standard_normal((1, queries, entries), dtype=cupy.float32)
        scores[hidden] = -cupy.inf
        sets.append({"scores": scores})
    with_torch(sets)
    for arrays in sets:
        arrays["topk"] = topk
    ours: dict[str, Function] = {
        "dsv4cp, CuPy": functools.partial(_selected, compress_ratio=RATIO),
        "dsv4cp, CuPy, no limits": _selected,  # looks at the unfinished entries too
    }
    size = f"indexer: S{queries} P{entries} top-k {topk}"
    pairs = sum((i + 1) // RATIO for i in range(queries))
    return Case("indexer selection", size, "indexer_selection", sets, ours, bytes=4 * pairs + 4 * queries * topk)


def _selected(scores: Any, topk: int, compress_ratio: int | None = None, **_: Any) -> Any:
    return dsv4cp.select_indexer_topk(scores, topk, backend="cuda", compress_ratio=compress_ratio)


def indexing(tiny: bool, *, part: str, queries: int, topk: int) -> Case:
    """Scores of every finished entry, the exact top-k of them, or the gradient through chosen entries."""
    sets, pairs = indexer_sets(queries, topk, tiny)
    queries, topk = sets[0]["ids"].shape[1:]
    torch_too = with_torch(sets)
    numbers: dict[str, Any] = {"compress_ratio": RATIO, "softmax_scale": INDEX_DIM**-0.5, "backend": "cuda"}
    pair = INDEX_HEADS * INDEX_DIM
    work: dict[str, Any] = {}
    ours: dict[str, Function] = {}
    match part:
        case "scores":
            ours["dsv4cp, CuPy"] = lambda q, pooled, weights, **_: dsv4cp.dsv4_indexer_scores(
                q, pooled, weights, **numbers
            )
            work = {"flops": 2 * pairs * pair, "bytes": 4 * pairs}
        case "top-k":
            ours["dsv4cp, CuPy"] = lambda q, pooled, weights, **_: dsv4cp.dsv4_indexer_topk(
                q, pooled, weights, topk, **numbers
            )
            work = {"flops": 2 * pairs * pair, "bytes": 4 * queries * topk}
        case _:
            for impl in ("atomic", "deterministic"):
                ours[f"dsv4cp, CuPy, {impl}"] = functools.partial(_indexer_gradient, impl=impl)
            work = {"flops": 6 * queries * topk * pair}
    for arrays in sets:
        arrays["numbers"] = numbers
    if torch_too and part == "scores":
        from .. import torch_ops

        names = numbers | {"backend": "tilelang"}
        ours["dsv4cp.torch_ops"] = lambda q_, pooled_, weights_, **_: torch_ops.dsv4_indexer_scores(
            q_, pooled_, weights_, **names
        )
    size = f"indexer: S{queries} P{queries // RATIO} I{INDEX_HEADS} E{INDEX_DIM} top-k {topk}"
    return Case(f"indexer {part}", size, f"indexer_{part}", sets, ours, **work)


def _indexer_gradient(
    grad: Any, q: Any, pooled: Any, weights: Any, ids: Any, numbers: dict[str, Any], impl: str, **_: Any
) -> Any:
    return dsv4cp.dsv4_indexer_topk_scores_grad(grad, q, pooled, weights, ids, backward_impl=impl, **numbers)


ATTENTION: tuple[dict[str, Any], ...] = (
    {"model": "V4-Flash R4", "queries": 4096, "heads": 64, "ratio": 4, "topk": 512, "portable": True},
    {"model": "V4-Flash R128", "queries": 4096, "heads": 64, "ratio": 128, "topk": 0},
    {"model": "V4-Pro R4", "queries": 8192, "heads": 128, "ratio": 4, "topk": 1024},
)
FORWARD_ONLY: tuple[dict[str, Any], ...] = (
    {"model": "V4-Flash R4, a quarter of the heads", "queries": 4096, "heads": 16, "ratio": 4, "topk": 512},
    {"model": "V4-Flash R4, long", "queries": 65536, "heads": 64, "ratio": 4, "topk": 512},
)
INDEXER: tuple[dict[str, Any], ...] = ({"queries": 4096, "topk": 512}, {"queries": 32768, "topk": 1024})


def cases() -> list[Callable[[bool], Case]]:
    """The cases of the ops that have CUDA kernels in this version."""
    from ..indexer.ops import GRAD_OFFERED as indexer_gradient_offered
    from ..indexer.ops import OFFERED as indexer_offered
    from ..sparse_attention.ops import GRAD_OFFERED as gradient_offered
    from ..sparse_attention.ops import OFFERED as attention_offered

    made: list[Callable[[bool], Case]] = []
    if "cuda" in attention_offered:
        parts = (False, True) if "cuda" in gradient_offered or bench_cudnn.there() else (False,)
        made += [functools.partial(attention, **shape, backward=backward) for shape in ATTENTION for backward in parts]
        made += [functools.partial(attention, **shape, backward=False) for shape in FORWARD_ONLY]
    if "cuda" in indexer_offered:
        of = ("scores", "top-k", "backward") if "cuda" in indexer_gradient_offered else ("scores", "top-k")
        made += [functools.partial(indexing, **shape, part=part) for shape in INDEXER for part in of]
        made += [functools.partial(selecting, **shape) for shape in INDEXER]
    return made
