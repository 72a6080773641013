"""Index kernels on this machine's GPU: correctness in short, then times. Under a minute.

    python tests/gpu/check_indices.py [--quick]

Correctness: the cases of tests/support/index_cases.py against the reference, and the timed results on sampled rows.
Times: medians of CUDA-event times on an otherwise idle GPU, after warm-up; each call is queued behind other work, so
that they are the device's, not Python's, whose time per call stands beside them. Exit status 1 when anything differs
or a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import cupy
import ml_dtypes
import numpy as np

from dsv4cp import (
    _backend,
    build_dsv4_sparse_topk_indices,
    extract_indexer_topk_scores,
    flatten_sparse_indices,
    plan_dsv4_sparse_indices,
)
from tests.support import index_cases
from tests.support.compare import check_equal

SEQUENCE, WINDOW, TOPK, RATIO = 131072, 128, 512, 128
CORRECTNESS_SECONDS = 30.0
failures: list[str] = []


def expect(what: str, got, want) -> None:
    """Notes a difference instead of stopping at it."""
    try:
        if want is None:
            if got is not None:
                raise AssertionError(f"expected None, got {type(got).__name__}")
        else:
            check_equal(got, want)
    except AssertionError as error:
        failures.append(what)
        print(f"  DIFFERS {what}: {error}")


def small_cases() -> None:
    """Everything the simulator runs and what only a GPU has the patience for, as far as the time allows."""
    start, done, left = time.perf_counter(), 0, []
    for name, call in {**index_cases.build_cases(), **index_cases.long_build_cases()}.items():
        if time.perf_counter() - start > CORRECTNESS_SECONDS:
            left.append(name)
            continue
        arrays = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
        got = build_dsv4_sparse_topk_indices(**arrays, like=cupy.empty(0), backend="numba")
        expect(f"build {name}", got, build_dsv4_sparse_topk_indices(**call))
        done += 1
    for name, (ids, keys) in {**index_cases.plan_cases(), **index_cases.long_plan_cases()}.items():
        if time.perf_counter() - start > CORRECTNESS_SECONDS:
            left.append(name)
            continue
        on_gpu = cupy.asarray(ids)
        for layout in ("cuda", "cudnn"):
            got = plan_dsv4_sparse_indices(on_gpu, keys, layout, index_backend="numba")
            want = plan_dsv4_sparse_indices(ids, keys, layout)
            for part in ("indices", "topk_length", "valid_rows"):
                expect(f"plan {layout} {part} {name}", getattr(got, part), getattr(want, part))
        expect(f"flatten {name}", flatten_sparse_indices(on_gpu, keys), flatten_sparse_indices(ids, keys))
        done += 1
    for name, (logits, ids) in index_cases.extract_cases(ml_dtypes.bfloat16).items():
        got = extract_indexer_topk_scores(cupy.asarray(logits), cupy.asarray(ids), backend="numba")
        expect(f"extract {name}", got, index_cases.extracted(logits, ids))
        done += 1
    print(f"{done} small cases, {len(failures)} differences, {time.perf_counter() - start:.1f} s")
    if left:
        print(f"  no time for {len(left)}: {', '.join(left)}")


class Timer:
    """Event-timed medians of calls that are queued behind a long fill."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.filler = cupy.empty(2**31, np.uint8)

    def __call__(self, call) -> tuple[float, float]:
        """(device milliseconds, host milliseconds) of one call."""
        for _ in range(3):
            call()
        device, host = [], []
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for _ in range(self.repeats):
            self.filler.fill(0)
            begin.record()
            start = time.perf_counter()
            call()
            host.append((time.perf_counter() - start) * 1e3)
            end.record()
            end.synchronize()
            device.append(cupy.cuda.get_elapsed_time(begin, end))
        return statistics.median(device), statistics.median(host)


def report(timer: Timer, what: str, call, moved: int, limit: float | None) -> None:
    """One line: times, bytes over time, and whether the target is met."""
    device, host = timer(call)
    verdict = ""
    if limit is not None:
        verdict = f"  target {limit} ms: {'met' if device <= limit else 'MISSED'}"
        if device > limit:
            failures.append(f"{what}: {device:.3f} ms")
    print(f"  {what:<58}{device:8.3f} ms{moved / device / 1e9:7.2f} TB/s{host:8.3f} ms Python{verdict}", flush=True)


def scattered(rows: int, columns: int):
    """Integers in [0, 2**31) without an order: a multiplicative hash, which needs no random number library."""
    number = cupy.arange(rows, dtype=np.int64)[:, None] * columns + cupy.arange(columns, dtype=np.int64)
    return (number * 0x9E3779B97F4A7C1) >> 20 & 0x7FFFFFFF


def large_cases(repeats: int) -> None:
    """The real shape: checked on sampled rows, then timed."""
    rng = np.random.default_rng(0)
    timer = Timer(repeats)
    pooled = SEQUENCE // 4
    keys = SEQUENCE + pooled
    seen = (cupy.arange(SEQUENCE) + 1) // 4
    picks = scattered(SEQUENCE, TOPK) % cupy.maximum(seen, 1)[:, None]
    shuffled = cupy.where(seen[:, None] > cupy.arange(TOPK), picks, -1)[None]
    ascending = cupy.sort(shuffled, axis=-1)
    given = {"batch_size": 1, "seq_len": SEQUENCE, "key_len": keys, "window_size": WINDOW, "n_pooled": pooled}
    dense = {**given, "n_pooled": SEQUENCE // RATIO, "key_len": SEQUENCE + SEQUENCE // RATIO, "compress_ratio": RATIO}
    like = cupy.empty(0)
    rows = np.unique(np.r_[0, 1, 127, 128, 511, SEQUENCE - 1, rng.integers(0, SEQUENCE, 200)])
    at = cupy.asarray(rows)

    def sampled(what: str, call: dict, out) -> None:
        local = dict(call, seq_len=len(rows), vanilla_key_len=SEQUENCE, q_positions=rows)
        if "compressed_topk" in call:
            local["compressed_topk"] = call["compressed_topk"][:, at].get()
        local.pop("like", None)
        expect(what, out[:, at], build_dsv4_sparse_topk_indices(**local))

    builds = {
        "build, window 128 + 512 given, int64": dict(given, compressed_topk=ascending),
        "build, window 128 + 512 given, int32 in and out": dict(
            given, compressed_topk=ascending.astype(np.int32), dtype="int32"
        ),
        "build, window 128 + R128 (1024), int64": dict(dense, like=like),
        "build, window 128 + R128 (1024), int32": dict(dense, like=like, dtype="int32"),
    }
    print(f"S={SEQUENCE}: device time, bytes moved over it, Python's share")
    for what, call in builds.items():
        out = build_dsv4_sparse_topk_indices(**call, backend="numba")
        sampled(what, call, out)
        moved = out.nbytes + (call["compressed_topk"].nbytes if "compressed_topk" in call else 0)
        del out
        limit = 0.6 if "int64" in what else None
        report(timer, what, lambda call=call: build_dsv4_sparse_topk_indices(**call, backend="numba"), moved, limit)

    sources = {
        "given, ascending": (build_dsv4_sparse_topk_indices(**builds["build, window 128 + 512 given, int64"]), keys),
        "given, any order": (build_dsv4_sparse_topk_indices(**given, compressed_topk=shuffled), keys),
        "R128": (build_dsv4_sparse_topk_indices(**dense, like=like), dense["key_len"]),
    }
    del picks, ascending
    for what, (ids, length) in sources.items():
        part = ids[:, at].get()
        for layout, promised, limit in (("cuda", False, 0.6), ("cudnn", True, 3.0), ("cudnn", False, 3.0)):
            def call(ids=ids, length=length, layout=layout, promised=promised):
                return plan_dsv4_sparse_indices(ids, length, layout, promised, index_backend="numba")

            plan, want = call(), plan_dsv4_sparse_indices(part, length, layout, promised)
            got = plan.indices[:, at] if layout == "cuda" else plan.indices[at]
            name = f"{layout} plan, {what}, T={ids.shape[-1]}" + (", rows promised nonempty" if promised else "")
            expect(name, got, want.indices)
            if layout == "cudnn":
                expect(f"{name}: lengths", plan.topk_length[at], want.topk_length)
                expect(f"{name}: rows", plan.valid_rows, None)
            moved = ids.nbytes + plan.indices.nbytes
            del plan, got
            report(timer, name, call, moved, limit)
    del sources
    scores = cupy.sin(scattered(SEQUENCE // 8, pooled // 8 + 8).astype(np.float32))[None, :, : pooled // 8]
    picks = (scattered(SEQUENCE // 8, TOPK) % (pooled // 8 + 1) - 1).astype(np.int32)[None]
    out = extract_indexer_topk_scores(scores, picks, backend="numba")
    few = cupy.asarray(rows[rows < SEQUENCE // 8])
    expect("extract", out[:, few], index_cases.extracted(scores[:, few].get(), picks[:, few].get()))
    moved = picks.nbytes + out.nbytes + 32 * out.size  # a score is one sector
    report(
        timer, "extract, 16384 rows of 512 among 4096 scores, strided",
        lambda: extract_indexer_topk_scores(scores, picks, backend="numba"), moved, None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="times only, fewer repeats")
    quick = parser.parse_args().quick
    start = time.perf_counter()
    reason = _backend.missing("numba")
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode() if not reason else ""
    print(f"NumPy {np.__version__}, CuPy {cupy.__version__}, {name or reason}")
    if reason:
        return 1
    if not quick:
        small_cases()
    large_cases(7 if quick else 15)
    print(f"{len(failures)} failures" + "".join(f"\n  {f}" for f in failures), f"({time.perf_counter() - start:.0f} s)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
