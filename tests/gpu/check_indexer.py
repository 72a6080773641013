"""Indexer scores and top-k on this machine's GPU: correctness in short, then times. Under a minute.

    python tests/gpu/check_indexer.py [--quick] [--only-check | --only-times]

Correctness: both kernels of the scores, dtypes, heads, sizes, positions, against a float64 oracle; the selection
against a full stable sort. Times: medians of CUDA-event times after warm-up, of the kernels alone (every call queued
behind other work), beside a bfloat16 product of 8192 x 8192 where torch is installed. Exit status 1 when anything
differs or a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import cupy
import numpy as np

import dsv4cp
from dsv4cp.indexer import cuda_scores, cuda_topk
from tests.support.compare import check_close, check_equal, check_frobenius
from tests.support.indexer_scores_gpu import NUMBERS, first_by_sort, layer_inputs, oracle, random_inputs, visible

SCALE = 128**-0.5
failures: list[str] = []


def scores(q, k, w, *, ratio=4, start=0):
    return dsv4cp.dsv4_indexer_scores(
        q, k, w, compress_ratio=ratio, softmax_scale=SCALE, query_start=start, backend="cuda"
    )


def topk(q, k, w, count, *, ratio=4, start=0, **more):
    return dsv4cp.dsv4_indexer_topk(
        q, k, w, count, compress_ratio=ratio, softmax_scale=SCALE, query_start=start, backend="cuda", **more
    )


def expect(what: str, check, *arguments) -> float:
    """What the check returns; notes a difference instead of stopping at it."""
    try:
        return check(*arguments) or 0.0
    except AssertionError as difference:
        failures.append(what)
        print(f"  DIFFERS {what}: {difference}", flush=True)
        return float("nan")


def small_scores(path: str) -> None:
    begin, worst = time.perf_counter(), 0.0
    cases = [(i, e, "bfloat16", "float32", 150, 4, 500) for i in (1, 3, 16, 32, 33, 64, 65, 128) for e in (64, 128)]
    cases += [(64, 128, "float16", w, 1023, 4, 4000) for w in NUMBERS]
    cases += [(64, 128, "bfloat16", "bfloat16", p, r, s) for p, r, s in ((1, 1, 0), (385, 7, 2000), (700, 128, 10**6))]
    cases += [(20, 64, "bfloat16", "float32", 300, 2**40, 2**41 - 20), (8, 128, "bfloat16", "float32", 129, 4, 0)]
    for i, e, dtype, weights, p, ratio, start in cases:
        what = f"{path} I{i} E{e} {dtype} weights {weights} P{p} R{ratio} start {start}"
        q, k, w = random_inputs(2, 77, p, i, e, dtype=dtype, weights=weights, seed=i)
        got = scores(q, k, w, ratio=ratio, start=start)
        seen = visible(77, p, ratio, start)
        want = cupy.where(seen, oracle(q, k, w, SCALE), -np.inf)
        expect(what, check_close, got, want, "indexer", dtype)
        finite = cupy.where(seen, got, 0), cupy.where(seen, want, 0)
        worst = max(worst, expect(what, check_frobenius, *finite, "indexer"))
        expect(f"{what}, bits", check_equal, got, scores(q, k, w, ratio=ratio, start=start))
        part = scores(q[1:, 13:40], k[1:], w[1:, 13:40], ratio=ratio, start=start + 13)
        expect(f"{what}, bits of a part", check_equal, got[1:, 13:40], part)
    seconds = time.perf_counter() - begin
    print(f"{path}: {len(cases)} cases, largest relative error {worst:.2e}, {seconds:.1f} s", flush=True)


def small_selections() -> None:
    begin, rng = time.perf_counter(), np.random.default_rng(0)
    for p, k in ((5, 9), (100, 7), (1000, 512), (2049, 2048), (8192, 1024), (8320, 2048), (30000, 100), (70001, 1)):
        for kind in ("normal", "ties", "hostile"):
            table = rng.standard_normal((9, p), np.float32)
            if kind == "ties":
                table = np.round(table * 2)
            if kind == "hostile":
                special = np.array(
                    [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38], np.float32
                )
                table = np.where(rng.random(table.shape) < 0.7, rng.choice(special, table.shape), table)
                table[0], table[1], table[2] = np.nan, 0.0, -np.inf
            for order in ("id", "score"):
                what = f"selection P{p} k{k} {kind} by {order}"
                ids, values = dsv4cp.select_indexer_topk(
                    cupy.asarray(table), k, order=order, return_scores=True, backend="cuda"
                )
                want, found = first_by_sort(table, k, order)
                expect(what, check_equal, ids, want)
                expect(what, check_close, values, found, "indexer", "float32")
    for p, k, s, start in ((300, 64, 200, 700), (9000, 1024, 40, 20000), (500, 600, 100, 1500), (400, 3000, 20, 800)):
        q, kv, w = random_inputs(2, s, p, 64, 128, seed=p)
        own = scores(q, kv, w, start=start)
        ids, values = topk(q, kv, w, k, start=start, return_scores=True)
        want, found = first_by_sort(own.reshape(-1, p), k)
        expect(f"top-k P{p} k{k}", check_equal, ids.reshape(-1, k), want)
        expect(f"top-k P{p} k{k} values", check_equal, values.reshape(-1, k), found)
        spoiled = cupy.where(visible(s, p, 4, start), own, np.float32(np.nan))
        chosen = dsv4cp.select_indexer_topk(spoiled, k, backend="cuda", compress_ratio=4, query_start=start)
        expect(f"causal selection P{p} k{k}", check_equal, chosen, ids)
    print(f"selections: {time.perf_counter() - begin:.1f} s", flush=True)


def timed(call, repeats: int) -> float:
    """Median milliseconds; what is measured is the device's time, Python queues ahead of it."""
    filler = cupy.empty(2**30, np.uint8)
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        filler.fill(0)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(times)


def product_rate() -> str:
    try:
        import torch
    except ImportError:
        return "torch is not installed: no product to compare with"
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return f"8192^3 bfloat16 product: {2 * 8192**3 / timed(lambda: torch.mm(a, b), 10) / 1e9:.0f} TFLOP/s"


def report(what: str, ms: float, most: float, flops: float = 0.0) -> None:
    verdict = "met" if ms <= most else "MISSED"
    if ms > most:
        failures.append(f"{what}: {ms:.3f} ms")
    rate = f"{flops / ms / 1e9:8.1f} TFLOP/s" if flops else ""
    print(f"  {what:<44}{ms:8.3f} ms  at most {most} ms: {verdict}{rate}", flush=True)


LAYERS = (  # S, P, k, milliseconds that scores, top-k and selection may take
    (32768, 8192, 1024, (3.5, 4.6, 0.5)),
    (4096, 1024, 512, (0.11, 1.0, 1.0)),
)


def layer(queries: int, entries: int, count: int, limits: tuple[float, float, float], repeats: int) -> None:
    q, k, w = layer_inputs(queries, entries)
    flops = 2.0 * 64 * 128 * sum((i + 1) // 4 for i in range(queries))
    own, ids = scores(q, k, w), topk(q, k, w, count)
    rows = [0, 3, 255, queries // 2, queries - 1]
    for n in rows:
        seen = cupy.arange(entries) < (n + 1) // 4
        want = cupy.where(seen, oracle(q[:, n : n + 1], k, w[:, n : n + 1], SCALE)[0, 0], -np.inf)
        expect(f"S{queries}, query {n}", check_close, own[0, n], want, "indexer", "bfloat16")
    expect(f"S{queries}, top-k", check_equal, ids[0, rows], first_by_sort(own[0, rows], count)[0])
    result = cupy.empty((1, queries, count), np.int32)

    def select() -> None:
        cuda_topk.launch_select(
            cuda_scores.operand(own), result.data.ptr, 0, own.shape,
            topk=count, order="id", visible=cuda_scores.Limits(0, 1, 4),
        )  # fmt: skip

    select()
    expect(f"S{queries}, selection", check_equal, result, ids)
    name = f"S{queries} P{entries} I64 E128"
    report(f"scores {name}", timed(lambda: scores(q, k, w), repeats), limits[0], flops)
    report(f"top-k {count}, {name}", timed(lambda: topk(q, k, w, count), repeats), limits[1], flops)
    report(f"selection [{queries}, {entries}] causal, k {count}", timed(select, repeats), limits[2])


def times(repeats: int) -> None:
    print(product_rate(), flush=True)
    for queries, entries, count, limits in LAYERS:
        layer(queries, entries, count, limits, repeats)
    print(product_rate(), flush=True)


def longest() -> None:
    """S 131072, P 32768: runs, and within 1 GiB."""
    q, k, w = layer_inputs(131072, 32768)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    ids = topk(q, k, w, 1024)
    extra = pool.total_bytes() - before - ids.nbytes
    print(f"  S131072 P32768 top-k 1024: {extra / 2**20:.0f} MiB extra, {timed(lambda: topk(q, k, w, 1024), 1):.1f} ms")
    if extra > 2**30:
        failures.append("memory")
    own = scores(q[:, -2:], k, w[:, -2:], start=131070)
    expect("longest", check_equal, ids[0, -2:], first_by_sort(own[0], 1024)[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats, no longest case")
    parser.add_argument("--only-check", action="store_true", help="no times")
    parser.add_argument("--only-times", action="store_true", help="no small cases")
    options = parser.parse_args()
    about = cupy.cuda.runtime.getDeviceProperties(0)
    print(f"{about['name'].decode()}, {about['multiProcessorCount']} multiprocessors", flush=True)
    if not options.only_times:
        for path in ("portable", None):
            cuda_scores.forced_path = path
            small_scores(path or "default")
        small_selections()
    if not options.only_check:
        times(5 if options.quick else 20)
        if not options.quick:
            longest()
    print("FAILED: " + "; ".join(failures) if failures else "ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
