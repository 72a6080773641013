"""Gradient of sparse attention on this machine's GPU: correctness in short, then times. Under a minute.

    python tests/gpu/check_attention_bwd.py [--quick] [--path portable|default] [--only small|bits|layers]

Correctness: every tile of heads, head_dim and dtype, hostile ids, both implementations, against a float64 oracle; bits
of "deterministic" from run to run, beside other work, and for every cap; whole layers too. Times: medians of CUDA-event
times after warm-up of all kernels of a call (ids given as int32, each call queued behind other work), and of the main
kernel alone. Exit status 1 when anything differs or a target is missed.
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

from dsv4cp import _kernels
from dsv4cp.sparse_attention import contract, cuda, cuda_bwd
from tests.support.attention_gpu import DTYPES, NORMALS, layer_inputs, oracle_grad, random_inputs, relative_error
from tests.support.compare import check_equal
from tests.support.tolerances import FROBENIUS

# name: S, H, ratio, top-k; milliseconds that atomic and deterministic may take on Hopper's path, and the portable one
LAYERS = {
    "S4096 H64 T640 (R4)": (4096, 64, 4, 512, 1.3, 2.6, 5.0),
    "S4096 H64 T160 (R128)": (4096, 64, 128, 10**9, 0.48, 0.8, None),
    "S8192 H128 T1152 (R4)": (8192, 128, 4, 1024, 8.4, 15.0, None),
}
GRAD_LIMIT, SINK_LIMIT = FROBENIUS["attention_grad"], FROBENIUS["sink_grad"]
LIMITS = {"grad_q": GRAD_LIMIT, "grad_kv": GRAD_LIMIT, "grad_sinks": SINK_LIMIT}
CAP = 2 * 2**30
SCALE = 512**-0.5
failures: list[str] = []


def prepared(inputs, scale, seed=1):
    """What a gradient call takes: grad_out, the inputs, out and lse of the forward kernels, the Spec."""
    q, kv, sinks, ids = inputs
    spec = contract.check(q, kv, sinks, ids, scale)
    out, lse = cuda.forward(q, kv, sinks, ids, spec)
    count = min(q.size, NORMALS)
    normals = cupy.asarray(np.random.default_rng(seed).standard_normal(count, np.float32).astype(q.dtype))
    whole = cupy.empty((-(-q.size // count), count), q.dtype)
    whole[...] = normals
    grad_out = whole.reshape(-1)[: q.size].reshape(q.shape)
    return grad_out, q, kv, sinks, ids, out, lse, spec


def grads(call, deterministic, cap=CAP):
    return cuda_bwd.backward(*call, cap, deterministic)


def expect(what: str, got, call) -> dict[str, float]:
    """Relative errors of the three gradients; notes a difference instead of stopping at it."""
    grad_out, q, kv, sinks, ids, _, _, spec = call
    errors = {}
    oracle = oracle_grad(grad_out, q, kv, sinks, ids, spec.scale)
    for (name, limit), g, want in zip(LIMITS.items(), got, oracle, strict=True):
        errors[name] = error = relative_error(g, want)
        if not error <= limit:
            failures.append(f"{what} {name}")
            print(f"  DIFFERS {what} {name}: {error:.3g}", flush=True)
    return errors


def small_cases(path: str, seconds: float) -> None:
    start, done, worst, left = time.perf_counter(), 0, dict.fromkeys(LIMITS, 0.0), []
    cases = [(h, d, dtype, 300) for d in (512, 256, 128, 64) for h in (64, 16, 32, 96) for dtype in DTYPES]
    cases += [(h, 512, "bfloat16", t) for h in (16, 64, 100) for t in (1, 2, 3, 63, 65, 129, 640, 705, 1152)]
    cases += [(h, 512, "bfloat16", 200) for h in (1, 3, 8, 24, 31, 33, 48, 128)]
    for h, d, dtype, t in cases:
        if time.perf_counter() - start > seconds:
            left.append(f"H{h} D{d} T{t} {dtype}")
            continue
        # The sinks' gradients are sums over queries that cancel: of few heads they take many queries to be far from 0.
        inputs = random_inputs(b=2, s=4 if h > 8 else 64, h=h, d=d, k=200, t=t, dtype=dtype, seed=h)
        inputs[2][0] = (np.inf, -np.inf, 2e38)[done % 3]
        call = prepared(inputs, d**-0.5)
        for deterministic in (False, True):
            what = f"{path} H{h} D{d} T{t} {dtype} {'deterministic' if deterministic else 'atomic'}"
            for name, error in expect(what, grads(call, deterministic), call).items():
                worst[name] = max(worst[name], error)
        done += 1
    print(
        f"{path}: {done} small cases, {len(failures)} differences, largest relative errors "
        + ", ".join(f"{name} {error:.2e}" for name, error in worst.items())
        + f", {time.perf_counter() - start:.1f} s"
        + (f", no time for {len(left)}: {', '.join(left[:4])} ..." if left else ""),
        flush=True,
    )


def bits(path: str) -> None:
    """Deterministic: the same bits again, beside other work, under any cap; and atomic's of grad_q and grad_sinks."""
    busy, noise = cupy.cuda.Stream(non_blocking=True), cupy.ones((4096, 4096), np.float32)
    for s, h, d, k, t in ((512, 64, 512, 600, 300), (256, 128, 512, 300, 200), (256, 20, 128, 300, 150)):
        call = prepared(random_inputs(b=2, s=s, h=h, d=d, k=k, t=t), d**-0.5)
        want, want_atomic = grads(call, True), grads(call, False)
        row = 8 * d
        try:
            for _ in range(20):
                with busy:
                    cupy.add(noise, 1, out=noise)
                for g, w in zip(grads(call, True), want, strict=True):
                    check_equal(g, w)
                atomic = grads(call, False)
                check_equal(atomic[0], want_atomic[0])
                check_equal(atomic[2], want_atomic[2])
            for cap in (row * k, row * k - 1, row * 128, row * 64):
                for g, w in zip(grads(call, True, cap), want, strict=True):
                    check_equal(g, w)
        except AssertionError as difference:
            failures.append(f"{path} bits H{h} D{d}")
            print(f"  DIFFERS {path} bits H{h} D{d}: {difference}", flush=True)
    print(f"{path}: bits compared, {len(failures)} differences", flush=True)


def timed(call, deterministic: bool, repeats: int, main_alone: bool = False) -> float:
    """Median milliseconds of a call's kernels, or of its main kernel alone."""
    filler = cupy.empty(2**30, np.uint8)
    pair: list[cupy.cuda.Event] = []
    launch = _kernels.launch

    def watched(kernel, **arguments):
        main = kernel.function in ("sparse_attention_bwd", "sparse_attention_bwd_sm90")
        if main and not pair:
            pair.append(cupy.cuda.Event())
            pair[0].record()
        launch(kernel, **arguments)
        if main:
            pair[1:] = [cupy.cuda.Event()]
            pair[1].record()

    times = []
    for n in range(repeats + 2):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        pair.clear()
        filler.fill(n)  # while this runs, Python queues the call: what is measured is the device's time
        filler.fill(n)
        _kernels.launch = watched if main_alone else launch
        begin.record()
        grads(call, deterministic)
        end.record()
        _kernels.launch = launch
        end.synchronize()
        if n >= 2:
            times.append(cupy.cuda.get_elapsed_time(*(pair if main_alone else (begin, end))))
    return statistics.median(times)


def layers(paths: tuple[str, ...], repeats: int, check: bool = True) -> None:
    for name, (queries, heads, ratio, topk, *limits) in LAYERS.items():
        call = prepared(layer_inputs(queries, heads, ratio, topk), SCALE)
        valid = int((call[4] >= 0).sum())
        for path in paths:
            cuda_bwd.forced_path = None if path == "default" else path
            for deterministic in (False, True):
                mode = "deterministic" if deterministic else "atomic"
                errors = expect(f"{path} {name} {mode}", grads(call, deterministic), call) if check else {}
                ms, alone = timed(call, deterministic, repeats), timed(call, deterministic, repeats, main_alone=True)
                limit = (limits[2] if not deterministic else None) if path == "portable" else limits[deterministic]
                verdict = ""
                if limit is not None:
                    verdict = f"  at most {limit} ms: {'met' if ms <= limit else 'MISSED'}"
                    if ms > limit:
                        failures.append(f"{path} {name} {mode}: {ms:.3f} ms")
                print(
                    f"  {name:<24}{path:<9}{mode:<14}{ms:8.3f} ms, main kernel {alone:7.3f} ms"
                    f" ({10 * valid * heads * 512 / alone / 1e9:6.1f} TFLOP/s)  "
                    + " ".join(f"{error:.2e}" for error in errors.values())
                    + verdict,
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--path", choices=("portable", "default"), help="one path alone")
    parser.add_argument("--only", choices=("small", "bits", "layers"), help="one part alone")
    options = parser.parse_args()
    paths = (options.path,) if options.path else ("portable", "default")
    about = cupy.cuda.runtime.getDeviceProperties(0)
    print(f"{about['name'].decode()}, {about['multiProcessorCount']} multiprocessors", flush=True)
    for path in paths:
        cuda_bwd.forced_path = None if path == "default" else path
        if options.only in (None, "small"):
            small_cases(path, 15.0 if len(paths) > 1 else 40.0)
        if options.only in (None, "bits"):
            bits(path)
    if options.only in (None, "layers"):
        layers(paths, 5 if options.quick else 20)
    cuda_bwd.forced_path = None
    print("FAILED: " + "; ".join(failures) if failures else "ok")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
