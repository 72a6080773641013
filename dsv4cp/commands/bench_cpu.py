"""The host benchmark: sparse attention beside a plain torch reference, and index lists at training length.

Both implementations of a case run in the same process on the same threads, in turn, so that whatever else
the machine does hits both. The torch reference is written here: gather, einsum, softmax with a sink, autograd.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import dsv4cp

from .measure import peak_mib

ATTENTION = {"S": 512, "H": 8, "D": 512, "K": 640, "T": 256}
INDICES = {"S": 65536, "window": 128, "topk": 512}
TINY_ATTENTION = {"S": 16, "H": 2, "D": 32, "K": 20, "T": 8}
TINY_INDICES = {"S": 256, "window": 16, "topk": 16}
OURS = "dsv4cp"


def about() -> list[str]:
    """The threads that the numbers below were measured with."""
    lines = [f"NumPy {np.__version__}, BLAS threads: {_blas_threads()}"]
    if importlib.util.find_spec("torch") is None:
        lines.append("torch is not installed: nothing to compare attention with; install dsv4cp[torch]")
    else:
        import torch

        lines.append(f"torch {torch.__version__}, threads: {torch.get_num_threads()}")
    if "OPENBLAS_CORETYPE" in os.environ:
        lines.append(f"OPENBLAS_CORETYPE={os.environ['OPENBLAS_CORETYPE']}: NumPy's BLAS may run another CPU's kernels")
    return lines


def _blas_threads() -> str:
    """What NumPy's BLAS uses, asked of threadpoolctl where it is installed."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        given = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
        return given or f"all {os.cpu_count()} (threadpoolctl, which could tell, is not installed)"
    blas = [i for i in threadpool_info() if i["user_api"] == "blas"]
    return ", ".join(f"{i['num_threads']} ({i['internal_api']} {i.get('architecture', '')})" for i in blas) or "unknown"


def rows(*, tiny: bool, repeats: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Every row of the host benchmark; `say` gets a line before each long step."""
    say("sparse attention, forward and gradient")
    yield from attention_rows(TINY_ATTENTION if tiny else ATTENTION, repeats)
    say("index building and planning")
    yield from index_rows(TINY_INDICES if tiny else INDICES, repeats)


# --- Sparse attention ----------------------------------------------------------------------------------


def attention_rows(size: dict[str, int], repeats: int) -> Iterator[dict[str, Any]]:
    """Forward and gradient: every slot valid, ids distinct and random, float32."""
    rng = np.random.default_rng(0)
    s, h, d, k, t = (size[name] for name in "SHDKT")
    q, grad = (rng.standard_normal((1, s, h, d), np.float32) for _ in range(2))
    kv, sinks = rng.standard_normal((1, k, d), np.float32), rng.standard_normal(h, np.float32)
    ids = np.argsort(rng.random((1, s, k)), axis=-1)[..., :t].astype(np.int32)
    scale = d**-0.5
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, return_lse=True)

    def forward() -> tuple[Any, ...]:
        return dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, return_lse=True)

    def gradient() -> tuple[Any, ...]:
        return dsv4cp.dsv4_sparse_attention_grad(grad, q, kv, sinks, ids, out, lse, scale)

    shape = "B1 " + " ".join(f"{key}{value}" for key, value in size.items()) + " float32"
    ours = {"forward": forward, "gradient": gradient}
    theirs = torch_reference(q, kv, sinks, ids, scale, grad) if importlib.util.find_spec("torch") else {}
    for part, call in ours.items():
        case = {"case": f"sparse attention {part}", "size": shape}
        peer = theirs.get(part)
        times = alternate([call] if peer is None else [call, peer], repeats)
        row = case | {"implementation": OURS, "ms": times[0], "peak_mib": peak_mib(call)}
        if peer is None:
            yield row
            continue
        pairs = list(zip(call(), peer(), strict=False))  # the peer has no lse
        error = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        yield row | {"ratio": times[1] / times[0], "error": error, "error_limit": 1e-3}
        yield case | {"implementation": "plain torch", "ms": times[1]}


def torch_reference(q: Any, kv: Any, sinks: Any, ids: Any, scale: float, grad: Any) -> dict[str, Callable[[], tuple]]:
    """The plain way in torch: gather the keys of every query, einsum, softmax with a sink in the denominator."""
    import torch

    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, kv, sinks)]
    index, incoming = torch.from_numpy(ids).long(), torch.from_numpy(grad)
    rows = torch.arange(len(q))[:, None, None]

    def attend(q: Any, kv: Any, sinks: Any) -> Any:
        keys = kv[rows, index]  # [B, S, T, D]
        scores = torch.einsum("bshd,bstd->bsht", q, keys) * scale
        sink = sinks[None, None, :, None].expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        return torch.einsum("bsht,bstd->bshd", p, keys)

    graph = attend(*tensors)

    def forward() -> tuple[Any, ...]:
        with torch.no_grad():
            return (attend(*tensors).numpy(),)

    def gradient() -> tuple[Any, ...]:
        return tuple(g.numpy() for g in torch.autograd.grad(graph, tensors, incoming, retain_graph=True))

    return {"forward": forward, "gradient": gradient}


def alternate(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median milliseconds of each call, taking turns after one warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, of_call in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if turn > 0:
                of_call.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(t) for t in times]


# --- Index lists ---------------------------------------------------------------------------------------


def index_rows(size: dict[str, int], repeats: int) -> Iterator[dict[str, Any]]:
    """A window and a given top-k, then a plan of either layout."""
    rng = np.random.default_rng(0)
    s, window, topk = size["S"], size["window"], size["topk"]
    pooled = s // 4
    first = rng.integers(0, pooled - topk + 1, (1, s, 1), np.int32)
    chosen = first + np.arange(topk, dtype=np.int32)
    chosen[chosen >= (np.arange(s) + 1)[:, None] // 4] = -1

    def build() -> Any:
        return dsv4cp.build_dsv4_sparse_topk_indices(
            batch_size=1,
            seq_len=s,
            key_len=s + pooled,
            window_size=window,
            compress_ratio=4,
            compressed_topk=chosen,
            n_pooled=pooled,
        )

    shape = f"B1 S{s} T{window + topk}"
    built = build()
    for what, call in (
        ("index building", build),
        ("planning, cuda layout", lambda: dsv4cp.plan_dsv4_sparse_indices(built, s + pooled, "cuda")),
        ("planning, cudnn layout", lambda: dsv4cp.plan_dsv4_sparse_indices(built, s + pooled, "cudnn")),
        ("both, cuda layout", lambda: dsv4cp.plan_dsv4_sparse_indices(build(), s + pooled, "cuda")),
        ("both, cudnn layout", lambda: dsv4cp.plan_dsv4_sparse_indices(build(), s + pooled, "cudnn")),
    ):
        (ms,) = alternate([call], max(1, repeats // 2))
        yield {"case": what, "size": shape, "implementation": OURS, "ms": ms, "peak_mib": peak_mib(call)}
