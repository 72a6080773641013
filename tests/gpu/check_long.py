"""Long sequences on this machine's GPU: offsets beyond 2^31 elements, and memory as promised. Under a minute, 60 GB.

    python tests/gpu/check_long.py [--reference] [--scale N]

The last queries of a long call must equal the same queries called alone; gradients are those of a grad_out that is zero
for all other queries, so that they have the same twin. Peak memory beyond the inputs is printed and compared with what
the docstrings promise. A part whose op has no kernels in this version is left out and said to be (--reference runs it
on the reference, which takes minutes). --scale divides the lengths, to try the script. Exit status 1 when anything
differs or takes more memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import cupy
import ml_dtypes
import numpy as np

import dsv4cp
from dsv4cp import _backend
from dsv4cp.commands import offers
from tests.support.compare import check_equal, check_frobenius

BF16 = np.dtype(ml_dtypes.bfloat16)
NORMALS = 7_340_033  # a prime: rows cut out of repetitions of so many numbers differ
LAST = 24  # queries compared
MIB, GIB = 2**20, 2**30
failures: list[str] = []


class Peak:
    """Most bytes in use inside, beyond those before; measured at every allocation."""

    def __enter__(self) -> Peak:
        self.pool = cupy.get_default_memory_pool()
        self.pool.free_all_blocks()
        self.start = self.most = self.pool.used_bytes()
        self.allocator = cupy.cuda.using_allocator(self._allocate)
        self.allocator.__enter__()
        return self

    def _allocate(self, size: int):
        memory = self.pool.malloc(size)
        self.most = max(self.most, self.pool.used_bytes())
        return memory

    def __exit__(self, *exc_info: object) -> None:
        self.allocator.__exit__(*exc_info)

    @property
    def bytes(self) -> int:
        return self.most - self.start


def normal(seed: int, *shape: int) -> Any:
    """bfloat16 numbers: one block of normal ones, repeated."""
    rng = np.random.default_rng(seed)
    block = cupy.asarray(rng.standard_normal(NORMALS, np.float32).astype(BF16))
    size = int(np.prod(shape))
    whole = cupy.empty(-(-size // NORMALS) * NORMALS, BF16)
    whole.reshape(-1, NORMALS)[...] = block
    return whole[:size].reshape(shape)


def entries(queries: int, pooled: int, topk: int) -> Any:
    """int32 [1, S, topk]: causal compressed entries in no order, repeats among them; -1 where there is none yet."""
    ids, step = cupy.empty((1, queries, topk), np.int32), 16384
    for first in range(0, queries, step):
        position = cupy.arange(first, min(first + step, queries))[:, None]
        visible = cupy.minimum((position + 1) // 4, pooled)
        number = (position * topk + cupy.arange(topk)) * 0x9E3779B97F4A7C1 >> 20 & 0x7FFFFFFF
        ids[0, first : first + step] = cupy.where(visible > 0, number % cupy.maximum(visible, 1), -1)
    return ids


def lists(queries: int, pooled: int, chosen: Any) -> Any:
    """int32 [1, S, 128 + k]: a window of 128, then the chosen entries."""
    sizes = {"batch_size": 1, "seq_len": queries, "key_len": queries + pooled, "window_size": 128, "n_pooled": pooled}
    return dsv4cp.build_dsv4_sparse_topk_indices(**sizes, compressed_topk=chosen, dtype="int32")


def kernels(function: str, reference: bool) -> Iterator[str]:
    """The backends to try of a function."""
    offered = dict(offers.ops())[function]
    found = [b for b in offered if b not in ("reference", "cudnn") and _backend.missing(b) is None]
    if not found and reference:
        found = ["reference"]
    if not found:
        print(f"  {function}: no kernels in this version, left out")
    yield from found


def step(what: str, promised: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The call's results; prints time and peak memory, which may be the results and `promised` bytes more."""
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    with Peak() as peak:
        results = function(*args, **options)
        cupy.cuda.Device().synchronize()
    seconds = time.perf_counter() - start
    own = sum(x.nbytes for x in (results if isinstance(results, (tuple, list)) else [results]))
    beyond = peak.bytes - own
    good = beyond <= promised
    print(
        f"  {what:<50}{seconds:7.2f} s{peak.bytes / GIB:8.2f} GiB at the peak, {beyond / MIB:8.1f} MiB beyond results"
        f" (at most {promised / MIB:.0f}){'' if good else '  TOO MUCH'}",
        flush=True,
    )
    if not good:
        failures.append(f"{what}: {beyond / MIB:.0f} MiB beyond results")
    return results


def same(what: str, got: Any, want: Any, limit: str | None = None) -> None:
    """Bit for bit, or as a whole within a limit of tests/support/tolerances.py."""
    try:
        if limit is None:
            check_equal(got, want)
        else:
            check_frobenius(got, want, limit)
    except AssertionError as error:
        failures.append(what)
        print(f"  DIFFERS {what}: {error}", flush=True)


# --- Attention -----------------------------------------------------------------------------------------------


def attention(queries: int, heads: int, reference: bool, ids: Any = None) -> None:
    """Forward and backward of one layer."""
    pooled = queries // 4
    q, kv = normal(1, 1, queries, heads, 512), normal(2, 1, queries + pooled, 512)
    sinks = cupy.asarray(np.random.default_rng(3).standard_normal(heads), np.float32)
    ids = lists(queries, pooled, entries(queries, pooled, 512)) if ids is None else ids
    scale, last = 512**-0.5, slice(queries - LAST, queries)
    print(f"attention, S {queries} H {heads} D 512 T {ids.shape[2]}: q has {q.size / 2**31:.2f} * 2^31 elements")
    forward, backward = dsv4cp.dsv4_sparse_attention, dsv4cp.dsv4_sparse_attention_grad
    out = lse = None
    q_last, ids_last = q[:, last].copy(), ids[:, last].copy()
    for backend in kernels("dsv4_sparse_attention", reference):
        options = {"backend": backend, "return_lse": True}
        out, lse = step(f"forward, {backend}", 64 * MIB, forward, q, kv, sinks, ids, scale, **options)
        alone = forward(q_last, kv, sinks, ids_last, scale, **options)
        same(f"out, {backend}", out[:, last], alone[0])
        same(f"lse, {backend}", lse[:, last], alone[1])
    if out is None:
        return
    g = cupy.zeros(q.shape, BF16)
    g[:, last] = normal(4, 1, LAST, heads, 512)
    g_last, out_last, lse_last = (x[:, last].copy() for x in (g, out, lse))
    promised = 4 * kv.size + 2 * GIB  # the float32 sum of grad_kv, the cap
    for backend in kernels("dsv4_sparse_attention_grad", reference):
        for impl in ("atomic", "deterministic"):
            what, options = f"{backend}, {impl}", {"backend": backend, "backward_impl": impl}
            arguments = (g, q, kv, sinks, ids, out, lse, scale)
            grads = step(f"backward, {what}", promised, backward, *arguments, **options)
            alone = backward(g_last, q_last, kv, sinks, ids_last, out_last, lse_last, scale, **options)
            fixed = impl == "deterministic"
            same(f"grad_q, {what}", grads[0][:, last], alone[0], None if fixed else "attention_grad")
            if bool((grads[0][:, : queries - LAST] != 0).any()):
                failures.append(f"grad_q, {what}: something where grad_out is zero")
            same(f"grad_kv, {what}", grads[1], alone[1], None if fixed else "attention_grad")
            same(f"grad_sinks, {what}", grads[2], alone[2], "sink_grad")


# --- Indexer -------------------------------------------------------------------------------------------------


def index_arrays(seed: int, queries: int, pooled: int) -> tuple[tuple, tuple, dict, dict]:
    """(q, k, w), those of the last queries, and the numbers of each call."""
    q, k, w = normal(seed, 1, queries, 64, 128), normal(seed + 1, 1, pooled, 128), normal(seed + 2, 1, queries, 64)
    last = slice(queries - LAST, queries)
    numbers = {"compress_ratio": 4, "softmax_scale": 128**-0.5}
    return (q, k, w), (q[:, last].copy(), k, w[:, last].copy()), numbers, {**numbers, "query_start": queries - LAST}


def index_scores(queries: int, pooled: int, reference: bool) -> None:
    """Scores [S, P] beyond 2^31, and the selection from them."""
    arrays, part, numbers, at_the_end = index_arrays(5, queries, pooled)
    last = slice(queries - LAST, queries)
    print(f"index scores, S {queries} P {pooled}: {queries * pooled / 2**31:.2f} * 2^31 of them")
    scores = None
    for backend in kernels("dsv4_indexer_scores", reference):
        scores = None  # gives the memory back
        scores = step(f"scores, {backend}", 256 * MIB, dsv4cp.dsv4_indexer_scores, *arrays, **numbers, backend=backend)
        same(f"scores, {backend}", scores[:, last], dsv4cp.dsv4_indexer_scores(*part, **at_the_end, backend=backend))
    for backend in kernels("select_indexer_topk", reference) if scores is not None else ():
        alone = dsv4cp.select_indexer_topk(scores[:, last].copy(), 512, backend="reference")
        for what, rule in (("selection", {}), ("causal selection", {"compress_ratio": 4})):
            options = {"backend": backend, **rule}
            ids = step(f"{what}, {backend}", 256 * MIB, dsv4cp.select_indexer_topk, scores, 512, **options)
            same(f"{what}, {backend}", ids[:, last], alone)


def whole_layer(queries: int, heads: int, reference: bool) -> None:
    """Top-k, index lists, attention and its gradient, in the order of a layer."""
    pooled = queries // 4
    arrays, part, numbers, at_the_end = index_arrays(8, queries, pooled)
    last = slice(queries - LAST, queries)
    print(f"a layer, S {queries} P {pooled}")
    chosen = entries(queries, pooled, 512)
    for backend in kernels("dsv4_indexer_topk", reference):
        options = {"backend": backend}
        chosen = step(f"top-k, {backend}", 256 * MIB, dsv4cp.dsv4_indexer_topk, *arrays, 512, **numbers, **options)
        same(f"top-k, {backend}", chosen[:, last], dsv4cp.dsv4_indexer_topk(*part, 512, **at_the_end, **options))
    scored = dsv4cp.dsv4_indexer_topk_scores
    for backend in kernels("dsv4_indexer_topk_scores", reference):
        found = step(f"scores at ids, {backend}", 256 * MIB, scored, *arrays, chosen, **numbers, backend=backend)
        alone = scored(*part, chosen[:, last].copy(), **numbers, backend=backend)
        same(f"scores at ids, {backend}", found[:, last], alone)
    del arrays, part
    ids = step("index lists", 64 * MIB, lists, queries, pooled, chosen)
    plan = step("plan", 64 * MIB, plan_of, ids, queries + pooled)
    same("plan", plan, ids)
    del plan, chosen
    attention(queries, heads, reference, ids)


def plan_of(ids: Any, keys: int) -> Any:
    return dsv4cp.plan_dsv4_sparse_indices(ids, keys, "cuda").indices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", action="store_true", help="where there are no kernels, the reference")
    parser.add_argument("--scale", type=int, default=1, help="divides the lengths")
    options = parser.parse_args()
    start = time.perf_counter()
    print(cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), flush=True)
    by = options.scale
    for part in (
        lambda: attention(65537 // by, 64, options.reference),
        lambda: index_scores(92700 // by, 23175 // by, options.reference),
        lambda: whole_layer(131072 // by, 64, options.reference),
    ):
        part()
        cupy.get_default_memory_pool().free_all_blocks()
    print(f"{len(failures)} failures" + "".join(f"\n  {f}" for f in failures), f"({time.perf_counter() - start:.0f} s)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
