"""Sinkhorn kernels on this machine's GPU: correctness in short, then times. Under a minute.

    python tests/gpu/check_sinkhorn.py [--quick]

Correctness: every dtype and M against the float64 oracle, canaries, bits. Times: medians of CUDA-event times after
warm-up, over buffers larger than L2 at the large size; at the small size also what a call costs the host. Exit status 1
when anything differs or a target is missed.
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

from dsv4cp import dsv4_sinkhorn_normalize, dsv4_sinkhorn_normalize_grad
from dsv4cp.sinkhorn import contract, cuda
from tests.support import naive
from tests.support.compare import check_close, check_equal

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
LARGE, SMALL, REPEAT, EPS = 4_194_304, 8192, 20, 1e-6
V4 = {"repeat": REPEAT, "eps": EPS}
FORWARD_MS, BACKWARD_MS, CALL_US, TORCH_US = 0.35, 0.70, 20.0, 45.0
failures: list[str] = []


def expect(what: str, check, *arguments) -> None:
    """Notes a difference instead of stopping at it."""
    try:
        check(*arguments)
    except AssertionError as error:
        failures.append(what)
        print(f"  DIFFERS {what}: {error}")


# --- Correctness ---------------------------------------------------------------------------------------


def correctness() -> None:
    start, rng, cases = time.perf_counter(), np.random.default_rng(0), 0
    for name, dtype in DTYPES.items():
        for m in range(1, 17):
            for repeat, eps in ((1, 1e-6), (3, 1e-3), (20, 1e-6)):
                x, grad = (rng.normal(0, 2, (5, m, m)).astype(dtype) for _ in range(2))
                y = dsv4_sinkhorn_normalize(cupy.asarray(x), repeat=repeat, eps=eps, backend="cuda")
                got = dsv4_sinkhorn_normalize_grad(
                    cupy.asarray(grad), cupy.asarray(x), repeat=repeat, eps=eps, backend="cuda"
                )
                what = f"{name} M={m} repeat={repeat}"
                expect(what, check_close, y, naive.sinkhorn(x, repeat, eps), "sinkhorn")
                expect(f"{what} gradient", check_close, got, naive.sinkhorn_grad(grad, x, repeat, eps), "sinkhorn_grad")
                cases += 2
    x, grad = (rng.normal(0, 2, (8193, 4, 4)).astype(np.float32) for _ in range(2))
    on_x, on_grad = cupy.asarray(x), cupy.asarray(grad)
    y, got = dsv4_sinkhorn_normalize(on_x, **V4), dsv4_sinkhorn_normalize_grad(on_grad, on_x, **V4)
    want_y, want = naive.sinkhorn(x, REPEAT, EPS), naive.sinkhorn_grad(grad, x, REPEAT, EPS)
    expect("8193 matrices", check_close, y, want_y, "sinkhorn")
    expect("8193 matrices gradient", check_close, got, want, "sinkhorn_grad")
    expect("again", check_equal, dsv4_sinkhorn_normalize(on_x, **V4), y)
    expect("gradient again", check_equal, dsv4_sinkhorn_normalize_grad(on_grad, on_x, **V4), got)
    expect("one matrix alone", check_equal, dsv4_sinkhorn_normalize_grad(on_grad[77], on_x[77], **V4), got[77])
    error_y, error = np.abs(y.get() / want_y - 1).max(), np.abs(got.get() - want).max()
    print(f"float32 M=4 repeat 20: y within {error_y:.1e} relative, gradient within {error:.1e}")
    for m in (4, 3):  # 4: the tuned kernels
        buffer = cupy.full(64 * 1024, 0xA5, np.uint8)
        x = cupy.asarray(rng.normal(0, 2, (33, m, m)).astype(np.float32))
        spec = contract.check(x, REPEAT, EPS)
        cuda.launch_forward(x.data.ptr, buffer.data.ptr + 1024, spec)
        raw = buffer.get()
        expect(f"canary before, M={m}", check_equal, raw[:1024], np.full(1024, 0xA5, np.uint8))
        after = raw[1024 + x.nbytes :]
        expect(f"canary after, M={m}", check_equal, after, np.full(after.size, 0xA5, np.uint8))
    print(f"{cases + 9} checks, {len(failures)} differences, {time.perf_counter() - start:.1f} s")


# --- Times ---------------------------------------------------------------------------------------------


def device_ms(call, repeats: int) -> float:
    """Median of event times; each call is queued behind other work, so that they are the device's, not Python's."""
    filler = cupy.empty(2**28, np.uint8)
    for _ in range(3):
        call()
    begin, end, times = cupy.cuda.Event(), cupy.cuda.Event(), []
    for _ in range(repeats):
        filler.fill(0)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end))
    return statistics.median(times)


def call_us(call, calls: int = 500) -> float:
    """Median over 7 rounds of the time per call, of calls queued one after another."""
    rounds = []
    for _ in range(8):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        cupy.cuda.Device().synchronize()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(rounds[1:])


def line(what: str, ms: float, moved: int, limit: float | None = None) -> None:
    verdict = ""
    if limit is not None:
        verdict = f"  target {limit:g} {'met' if ms <= limit else 'MISSED'}"
        if ms > limit:
            failures.append(what)
    print(f"{what:<58}{ms:9.4f} ms{moved / ms / 1e6:9.0f} GB/s{verdict}", flush=True)


def host_line(what: str, us: float, limit: float | None) -> None:
    if limit is not None and us > limit:
        failures.append(what)
    verdict = "" if limit is None else f"  target {limit:g} {'met' if us <= limit else 'MISSED'}"
    print(f"{what:<58}{us:9.2f} us{verdict}", flush=True)


def arrays(count: int, dtype, m: int = 4):
    """Two arrays of normal numbers, drawn from a million (no cuRAND needed)."""
    numbers = cupy.asarray(np.random.default_rng(1).standard_normal(2**20, dtype=np.float32))
    at = cupy.arange(count * m * m, dtype=np.uint32)
    picks = [(at * np.uint32(factor)) >> np.uint32(12) for factor in (2654435761, 2246822519)]
    return [numbers[pick].reshape(count, m, m).astype(dtype) for pick in picks]


def times(repeats: int) -> None:
    big = [cupy.empty(2**30, np.uint8) for _ in range(2)]
    ms = device_ms(lambda: cupy.copyto(big[0], big[1]), repeats)
    line("device copy, 1 GiB", ms, 2 * 2**30)
    for name, dtype in DTYPES.items():
        grad, x = arrays(LARGE, dtype)
        limits = (FORWARD_MS, BACKWARD_MS) if name == "float32" else (None, None)
        forward = device_ms(lambda x=x: dsv4_sinkhorn_normalize(x, **V4), repeats)
        line(f"forward, {LARGE} 4x4 {name}", forward, 2 * x.nbytes, limits[0])
        backward = device_ms(lambda x=x, grad=grad: dsv4_sinkhorn_normalize_grad(grad, x, **V4), repeats)
        line(f"backward, {LARGE} 4x4 {name}", backward, 3 * x.nbytes, limits[1])
    for m in (2, 3, 8, 16):
        grad, x = arrays(LARGE * 16 // (m * m), np.float32, m)
        forward = device_ms(lambda x=x: dsv4_sinkhorn_normalize(x, **V4), 5)
        line(f"generic forward, {x.shape[0]} {m}x{m} float32", forward, 2 * x.nbytes)
        backward = device_ms(lambda x=x, grad=grad: dsv4_sinkhorn_normalize_grad(grad, x, **V4), 5)
        line(f"generic backward, {x.shape[0]} {m}x{m} float32", backward, 3 * x.nbytes)
    small_grad, small = arrays(SMALL, np.float32)
    line(f"forward, {SMALL} 4x4 float32", device_ms(lambda: dsv4_sinkhorn_normalize(small, **V4), 50), 2 * small.nbytes)
    backward = device_ms(lambda: dsv4_sinkhorn_normalize_grad(small_grad, small, **V4), 50)
    line(f"backward, {SMALL} 4x4 float32", backward, 3 * small.nbytes)


def host_times() -> None:
    grad, x = arrays(SMALL, np.float32)
    host_line(f"CuPy forward call, {SMALL}", call_us(lambda: dsv4_sinkhorn_normalize(x, **V4)), CALL_US)
    host_line(f"CuPy backward call, {SMALL}", call_us(lambda: dsv4_sinkhorn_normalize_grad(grad, x, **V4)), None)
    spec, y = contract.check(x, REPEAT, EPS), cupy.empty_like(x)
    host_line("  of it contract.check", call_us(lambda: contract.check(x, REPEAT, EPS)), None)
    host_line("  of it cupy.empty", call_us(lambda: cupy.empty(x.shape, x.dtype)), None)
    host_line("  of it launch_forward", call_us(lambda: cuda.launch_forward(x.data.ptr, y.data.ptr, spec)), None)
    kernel, grid, numbers = cuda._forward4("float32", SMALL, REPEAT, EPS)
    arguments = kernel.take({"x": np.uintp(x.data.ptr), "y": np.uintp(y.data.ptr), **numbers})
    bare = kernel.loaded[x.device.id].function
    host_line("  of it CuPy's launch", call_us(lambda: bare((grid, 1, 1), (cuda.THREADS, 1, 1), arguments)), None)
    try:
        import torch

        from dsv4cp import torch_ops
    except ImportError as error:
        print(f"torch_ops: {error}")
        return
    t = torch.randn(SMALL, 4, 4, device="cuda")
    call = lambda: torch_ops.dsv4_sinkhorn_normalize(t, backend="tilelang", **V4)  # noqa: E731
    try:
        call()
    except RuntimeError as error:
        print(f"torch_ops: {error}")
        return
    host_line(f"torch_ops forward call, {SMALL}", call_us(call), TORCH_US)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = options.parse_args().quick
    start = time.perf_counter()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    name = properties["name"].decode()
    print(f"{name}, {properties['multiProcessorCount']} multiprocessors, CuPy {cupy.__version__}")
    correctness()
    times(5 if quick else 20)
    host_times()
    print(f"{time.perf_counter() - start:.1f} s, {len(failures)} failures" + "".join(f"\n  {f}" for f in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
