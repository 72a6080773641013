"""Sparse attention forward on this machine's GPU: correctness in short, then times. Under a minute.

    python tests/gpu/check_attention_fwd.py [--quick] [--path portable|default]

Correctness: every tile of heads, head_dim and dtype, hostile ids, against a float64 oracle; rows of the timed layers
too. Times: medians of CUDA-event times after warm-up, of the kernel alone (ids given as int32, each call queued behind
other work). Exit status 1 when anything differs or a target is missed.
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
from dsv4cp.sparse_attention import contract, cuda
from tests.support.attention_gpu import DTYPES, layer_inputs, oracle, random_inputs
from tests.support.compare import check_close, check_equal, check_frobenius, to_numpy

# name: S, H, ratio, top-k, milliseconds that the portable path may take
LAYERS = {
    "S4096 H64 T640 (R4)": (4096, 64, 4, 512, 1.6),
    "S4096 H64 T160 (R128)": (4096, 64, 128, 10**9, None),
    "S4096 H16 T640 (R4)": (4096, 16, 4, 512, None),
    "S8192 H128 T1152 (R4)": (8192, 128, 4, 1024, None),
}
LONG = ("S65536 H64 T640 (R4)", 65536, 64, 4, 512)  # against the first of LAYERS, a query and a valid id
PLANNED = (4096, 64, 4, 512)
LSE_LIMIT = 2e-3
SCALE = 512**-0.5
failures: list[str] = []


def attend(q, kv, sinks, ids, scale, **options):
    return cuda.forward(q, kv, sinks, ids, contract.check(q, kv, sinks, ids, scale), **options)


def expect(what: str, got, inputs, scale, dtype: str) -> float:
    """The relative Frobenius error; notes a difference instead of stopping at it."""
    want, want_lse = oracle(*inputs, scale)
    error = float("nan")
    try:
        error = check_frobenius(got[0], want, "attention")
        check_close(got[0], want, "attention", dtype)
        g, w = to_numpy(got[1]), to_numpy(want_lse)
        if not np.array_equal(np.isneginf(g), np.isneginf(w)):
            raise AssertionError("lse: -inf in other places")
        some = ~np.isneginf(w)
        worst = float(np.abs(g[some] - w[some]).max(initial=0))
        if not worst <= LSE_LIMIT:
            raise AssertionError(f"lse: error {worst:.3g}")
    except AssertionError as difference:
        failures.append(what)
        print(f"  DIFFERS {what}: {difference}", flush=True)
    return error


def small_cases(path: str, seconds: float) -> None:
    start, done, worst, left = time.perf_counter(), 0, 0.0, []
    cases = [(h, d, dtype, 300, False) for d in (512, 256, 128, 64) for h in (64, 16, 32, 1) for dtype in DTYPES]
    cases += [(h, 512, "bfloat16", t, False) for h in (16, 64) for t in (1, 2, 3, 63, 65, 129, 640, 705, 1152)]
    cases += [(h, 512, "bfloat16", 200, False) for h in (3, 8, 24, 31, 33, 48, 96, 128)]
    cases += [(h, d, dtype, 200, True) for h, d in ((64, 512), (20, 512), (5, 128)) for dtype in DTYPES]
    for h, d, dtype, t, rounding in cases:
        what = f"{path} H{h} D{d} T{t} {dtype}" + (" reference_rounding" if rounding else "")
        if time.perf_counter() - start > seconds:
            left.append(what)
            continue
        inputs = random_inputs(b=2, s=4, h=h, d=d, k=200, t=t, dtype=dtype, seed=h)
        inputs[2][0] = (np.inf, -np.inf, 2e38)[done % 3]
        got = attend(*inputs, d**-0.5, reference_rounding=rounding)
        worst = max(worst, expect(what, got, inputs, d**-0.5, dtype))
        try:
            for g, again in zip(got, attend(*inputs, d**-0.5, reference_rounding=rounding), strict=True):
                check_equal(g, again)
            q, kv, sinks, ids = inputs
            one = attend(q[1:, 3:], kv[1:], sinks, ids[1:, 3:], d**-0.5, reference_rounding=rounding)
            check_equal(got[0][1:, 3:], one[0])
            check_equal(got[1][1:, 3:], one[1])
        except AssertionError as difference:
            failures.append(f"{what}: bits")
            print(f"  DIFFERS {what}, bits: {difference}", flush=True)
        done += 1
    print(
        f"{path}: {done} small cases, {len(failures)} differences, largest relative error {worst:.2e}, "
        f"{time.perf_counter() - start:.1f} s"
        + (f", no time for {len(left)}: {', '.join(left[:4])} ..." if left else ""),
        flush=True,
    )


def timed(inputs, repeats: int) -> float:
    return timed_call(lambda: attend(*inputs, SCALE), repeats)


def timed_call(call, repeats: int) -> float:
    """Median milliseconds."""
    filler = cupy.empty(2**30, np.uint8)
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        filler.fill(0)  # while this runs, Python queues the call: what is measured is the device's time
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(times)


def long_layer(repeats: int) -> None:
    """A sequence of 64K: the time of a query, and of a valid id, against the first layer's."""
    cuda.forced_path = None
    each = []
    for name, shape in ((next(iter(LAYERS)), next(iter(LAYERS.values()))[:4]), (LONG[0], LONG[1:])):
        inputs = layer_inputs(*shape)
        valid, ms = int((inputs[3] >= 0).sum()), timed(inputs, repeats)
        each.append((ms / shape[0], ms / valid))
        print(
            f"  {name:<24}{ms:8.3f} ms  {1e6 * ms / shape[0]:8.1f} ns a query, {1e6 * ms / valid:6.3f} ns a valid id",
            flush=True,
        )
    (query, entry), (long_query, long_entry) = each
    print(f"  the long one's: {long_query / query:.3f} a query, {long_entry / entry:.3f} a valid id", flush=True)


def planned(repeats: int) -> None:
    """One layer's call with int64 ids, as the index builder returns them, and with a plan made once."""
    cuda.forced_path = None
    q, kv, sinks, ids = layer_inputs(*PLANNED)
    wide = ids.astype(np.int64)
    plan = dsv4cp.plan_dsv4_sparse_indices(wide, kv.shape[1], "cuda")
    without = timed_call(lambda: attend(q, kv, sinks, wide, SCALE), repeats)
    given = timed_call(lambda: attend(q, kv, sinks, plan.indices, SCALE), repeats)
    making = timed_call(lambda: dsv4cp.plan_dsv4_sparse_indices(wide, kv.shape[1], "cuda"), repeats)
    print(
        f"  int64 ids {without:.3f} ms, with a plan {given:.3f} ms (the plan, once for all layers: {making:.3f} ms)",
        flush=True,
    )


def layers(paths: tuple[str, ...], repeats: int) -> None:
    for name, (queries, heads, ratio, topk, limit) in LAYERS.items():
        inputs = q, kv, sinks, ids = layer_inputs(queries, heads, ratio, topk)
        valid = int((ids >= 0).sum())
        rows = cupy.asarray(np.unique(np.r_[0, 1, 2, 3, 127, 128, np.linspace(0, queries - 1, 24).astype(int)]))
        for path in paths:
            cuda.forced_path = None if path == "default" else path
            out, lse = attend(*inputs, SCALE)
            sampled = q[:, rows], kv, sinks, ids[:, rows]
            error = expect(f"{path} {name}", (out[:, rows], lse[:, rows]), sampled, SCALE, "bfloat16")
            ms = timed(inputs, repeats)
            verdict = ""
            if path == "portable" and limit is not None:
                verdict = f"  at most {limit} ms: {'met' if ms <= limit else 'MISSED'}"
                if ms > limit:
                    failures.append(f"{name}: {ms:.3f} ms")
            rate = 4 * valid * heads * 512 / ms / 1e9
            print(
                f"  {name:<24}{path:<10}{ms:8.3f} ms{rate:8.1f} TFLOP/s{valid / queries:8.1f} ids a query"
                f"  rel {error:.2e}{verdict}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--path", choices=("portable", "default"), help="one path alone")
    options = parser.parse_args()
    paths = (options.path,) if options.path else ("portable", "default")
    about = cupy.cuda.runtime.getDeviceProperties(0)
    print(f"{about['name'].decode()}, {about['multiProcessorCount']} multiprocessors", flush=True)
    for path in paths:
        cuda.forced_path = None if path == "default" else path
        small_cases(path, 15.0 if len(paths) > 1 else 25.0)
    layers(paths, 5 if options.quick else 20)
    if "default" in paths:
        planned(5 if options.quick else 20)
        long_layer(3 if options.quick else 10)
    cuda.forced_path = None
    print("FAILED: " + "; ".join(failures) if failures else "ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
