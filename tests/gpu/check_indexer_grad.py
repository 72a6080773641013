"""Errors and times of the indexer's gradient kernels on a GPU.

python -m tests.gpu.check_indexer_grad [hopper|portable]... [errors|times|one]...

A path by name leaves out the other. "one" makes a single call of each kind, for a profiler.

Errors: relative Frobenius against a float64 oracle, hostile inputs, both modes; exit status 1 when one is beyond LIMIT,
a case fails, or bits differ. Times: the launches alone, medians.
"""

from __future__ import annotations

import functools
import sys

import cupy
import numpy as np

from dsv4cp.indexer import contract, cuda_grad, cuda_grad_kernels
from tests.support.indexer_gpu import dense_oracle_grad, inputs, layer_inputs, oracle_grad, oracle_scores

LIMIT = 8e-3  # of gradients rounded to 16 bits, as tests/support/tolerances.py has it for attention's
failures: list[str] = []


def expect(right: bool, what: str) -> bool:
    """`right`; where it is not, the exit status will say so."""
    if not right:
        failures.append(what)
    return right


def error(got, want) -> float:
    found = _error(got, want)
    expect(found <= LIMIT, f"error {found:.2e}")  # NaN too
    return found


def _error(got, want) -> float:
    got, want = cupy.asarray(got).astype(np.float64), cupy.asarray(want).astype(np.float64)
    if not bool((cupy.isnan(got) == cupy.isnan(want)).all()):
        return np.nan
    finite = cupy.isfinite(want)
    got, want = cupy.where(finite, got, 0), cupy.where(finite, want, 0)
    return float(cupy.linalg.norm(got - want) / max(float(cupy.linalg.norm(want)), 1e-30))


CASES = [
    {},
    {"dim": 64},
    {"heads": 1, "slots": 1},
    {"heads": 31, "slots": 65, "dtype": "float16"},
    {"heads": 65, "slots": 63},
    {"heads": 128, "slots": 129},
    {"heads": 128, "dim": 64, "slots": 200, "dtype": "float16"},
    {"slots": 0},
    {"slots": 1152, "queries": 5, "entries": 900},
    {"slots": 2048, "queries": 3, "entries": 2500},
    {"slots": 200, "numbers": "float32", "ids": np.int64},
    {"slots": 200, "numbers": "float16", "dtype": "bfloat16", "entries": 7},
]


DENSE = [
    {},
    {"heads": 128, "queries": 300, "entries": 80},
    {"dim": 64, "heads": 5, "queries": 700, "entries": 170, "dtype": "float16"},
    {"queries": 300, "entries": 80, "dtype": "float16"},
]


def errors(paths) -> None:
    print(f"{'case':<60}{'path':<10}{'scores':>9}  {'q':>8} {'k':>8} {'w':>8}   deterministic   in parts: same bits")
    for case in CASES:
        for path in paths:
            if path != "hopper" or (case.get("dim", 128) == 128 and case.get("heads", 64) <= 64):
                print(f"{case!s:<60}{path:<10}", guarded(case_errors, case, path), flush=True)
    for case in DENSE:
        for path in paths:
            print(f"dense {case!s:<54}{path:<10}", guarded(dense_errors, case, path), flush=True)


def guarded(check, case, path) -> str:
    """The check's line, or what stopped it: the next case may still run."""
    cuda_grad_kernels.forced_path = path
    try:
        return check(case)
    except Exception as problem:
        failures.append(type(problem).__name__)
        return f"{type(problem).__name__}: {str(problem)[:300]}"
    finally:
        cuda_grad_kernels.forced_path = None


def case_errors(case) -> str:
    g, q, k, w, ids = inputs(**case)
    spec = contract.check_topk_scores_grad(g, q, k, w, ids, 4, 0.125)
    scores = cuda_grad.topk_scores(q, k, w, ids, spec)
    want = oracle_scores(q, k, w, ids, 0.125)
    masked = cupy.isneginf(want)
    line = f"{error(cupy.where(masked, 0, scores), cupy.where(masked, 0, want)):9.1e}"
    line += " " if expect(bool((cupy.isneginf(scores) == masked).all()), "masked slots") else "!"
    wants = oracle_grad(g, q, k, w, ids, 0.125)
    got = ()
    for fixed in (False, True):
        got = cuda_grad.topk_scores_grad(g, q, k, w, ids, spec, deterministic=fixed)
        line += "  " + " ".join(f"{error(a, b):8.1e}" for a, b in zip(got, wants, strict=True))
    cap = (8 * spec.index_dim + 4) * max(1, spec.entries // 3)
    again = cuda_grad.topk_scores_grad(g, q, k, w, ids, spec, deterministic=True, workspace_bytes=cap)
    pairs = zip(got, again, strict=True)
    same = [expect(bool((a.view(np.uint8) == b.view(np.uint8)).all()), "bits in parts") for a, b in pairs]
    return line + "  " + " ".join(map(str, same))


def dense_errors(case) -> str:
    _, q, k, w, _ = inputs(**case)
    k = cupy.where(cupy.isnan(k), 0, k).astype(k.dtype)
    g = cupy.asarray(np.random.default_rng(5).standard_normal((q.shape[0], q.shape[1], k.shape[1]), np.float32))
    seen = cupy.arange(k.shape[1])[None, :] < ((7 + cupy.arange(q.shape[1]) + 1) // 4)[:, None]
    spec = contract.check_scores_grad(g, q, k, w, 4, 0.125, 7)
    got = cuda_grad.scores_grad(cupy.where(seen, g, np.float32(np.nan)), q, k, w, spec)
    wants = dense_oracle_grad(cupy.where(seen, g, 0), q, k, w, 0.125)
    return " ".join(f"{error(a, b):8.1e}" for a, b in zip(got, wants, strict=True))


def median(call, repeats: int = 20) -> float:
    events = [cupy.cuda.Event() for _ in range(2 * repeats)]
    call()
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        call()
        end.record()
    events[-1].synchronize()
    return float(np.median([cupy.cuda.get_elapsed_time(a, b) for a, b in zip(events[::2], events[1::2], strict=True)]))


def gemm() -> None:
    try:
        import torch
    except ImportError:
        return
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        torch.mm(a, b, out=out)
    end.record()
    end.synchronize()
    print(f"bf16 8192^3 GEMM {2 * 8192**3 * 10 / start.elapsed_time(end) / 1e9:.0f} TFLOP/s", flush=True)


def times(paths) -> None:
    gemm()
    for queries, topk in ((4096, 512), (32768, 1024)):
        g, q, k, w, ids = layer_inputs(queries, topk)
        repeats = 20 if queries < 10000 else 7
        spec = contract.check_topk_scores_grad(g, q, k, w, ids, 4, 0.125)
        forward = functools.partial(cuda_grad.topk_scores, q, k, w, ids, spec)
        line = f"S{queries} k {topk}: scores {median(forward, repeats):.3f} ms"
        for path in paths:
            cuda_grad_kernels.forced_path = path
            for fixed in (False, True):
                call = functools.partial(cuda_grad.topk_scores_grad, g, q, k, w, ids, spec, deterministic=fixed)
                line += f", {path} {'fixed' if fixed else 'atomic'} {median(call, repeats):.3f}"
        cuda_grad_kernels.forced_path = None
        print(line, flush=True)
    queries = 8192
    g, q, k, w, _ = layer_inputs(queries, 1)
    g = cupy.asarray(np.random.default_rng(1).standard_normal((1, queries, queries // 4), np.float32))
    spec = contract.check_scores_grad(g, q, k, w, 4, 0.125)
    print(f"dense S{queries}: {median(lambda: cuda_grad.scores_grad(g, q, k, w, spec), 5):.3f} ms", flush=True)


def one(paths) -> None:
    g, q, k, w, ids = layer_inputs(4096, 512)
    spec = contract.check_topk_scores_grad(g, q, k, w, ids, 4, 0.125)
    for cuda_grad_kernels.forced_path in paths:
        for fixed in (False, True):
            cuda_grad.topk_scores_grad(g, q, k, w, ids, spec, deterministic=fixed)
    cupy.cuda.runtime.deviceSynchronize()


if __name__ == "__main__":
    chosen = tuple(name for name in sys.argv[1:] if name in cuda_grad_kernels.PATHS) or cuda_grad_kernels.PATHS
    for name in [name for name in sys.argv[1:] if name not in cuda_grad_kernels.PATHS] or ["errors", "times"]:
        {"errors": errors, "times": times, "one": one}[name](chosen)
    print(f"{len(failures)} failures", *dict.fromkeys(failures))
    sys.exit(1 if failures else 0)
