"""Backend "cudnn" of sparse attention on this machine's GPU: errors against float64, then times. About two minutes,
most of which is cuDNN compiling.

    python tests/gpu/check_attention_cudnn.py [--only errors|times|facts] [--layer WORDS] [--seconds N]

Errors: small hostile cases and layers, CuPy arrays and torch tensors, with and without a plan. Times: the wrapper
called directly on ids that are packed already, this backend with a shared plan, without a plan, and with a plan made
for each call; medians of CUDA-event times, each call queued behind other work, the ways taking turns. Facts: what the
wrapper itself does with inputs that this package never gives it. Exit status 1 when an error or a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

START = time.perf_counter()

import cupy  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

import dsv4cp  # noqa: E402
from dsv4cp import _backend, _bridge, torch_ops  # noqa: E402
from dsv4cp.sparse_attention import contract, torch_bridge_cudnn  # noqa: E402
from dsv4cp.sparse_attention.contract_cudnn import Ids  # noqa: E402
from tests.support.attention_gpu import layer_inputs, oracle, oracle_grad, random_inputs  # noqa: E402
from tests.support.compare import check_frobenius, to_numpy  # noqa: E402

SCALE = 512**-0.5
LIMITS = {"out": "attention", "grad_q": "attention_grad", "grad_kv": "attention_grad", "grad_sinks": "sink_grad"}
# S, H, ratio, top-k, milliseconds that the wrapper took when the target was set
LAYERS = {
    "S4096 H64 T640 (R4)": (4096, 64, 4, 512, 1.85),
    "S8192 H128 T1152 (R4)": (8192, 128, 4, 1024, 11.8),
    "S4096 H64 T160 (R128)": (4096, 64, 128, 10**9, 0.96),
}
failures: list[str] = []


def elapsed() -> float:
    return time.perf_counter() - START


def gradient_like(q, seed=3):
    rng = np.random.default_rng(seed)
    some = cupy.asarray(rng.standard_normal((1, 64, *q.shape[2:]), np.float32).astype(q.dtype))
    return cupy.ascontiguousarray(cupy.tile(some, (q.shape[0], -(-q.shape[1] // 64), 1, 1))[:, : q.shape[1]])


def by_cupy(grad, q, kv, sinks, ids, scale, plan=None):
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, backend="cudnn", plan=plan, return_lse=True)
    made = dsv4cp.dsv4_sparse_attention_grad(grad, q, kv, sinks, ids, out, lse, scale, backend="cudnn", plan=plan)
    return out, lse, *made


def by_torch(grad, q, kv, sinks, ids, scale, plan=None):
    leaves = [_bridge.to_torch(x).detach().requires_grad_() for x in (q, kv, sinks)]
    given = None if ids is None else _bridge.to_torch(ids)
    out, lse = torch_ops.dsv4_sparse_attention(*leaves, given, scale, backend="cudnn", plan=plan, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, _bridge.to_torch(grad))


def ways(ids, keys):
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, keys, "cudnn")
    plan_ = torch_ops.plan_dsv4_sparse_indices(_bridge.to_torch(ids), keys, "cudnn")
    yield "CuPy", by_cupy, ids, None
    yield "CuPy, plan", by_cupy, None, plan
    yield "torch", by_torch, ids, None
    yield "torch, plan", by_torch, None, plan_


def judge(what, got, want) -> str:
    """The relative Frobenius errors; notes a difference instead of stopping at it."""
    shown = []
    for (name, kind), g, w in zip(LIMITS.items(), (got[0], *got[2:]), (want[0], *want[2:]), strict=True):
        try:
            shown.append(f"{name} {check_frobenius(g, w, kind):.1e}")
        except AssertionError as difference:
            failures.append(f"{what}: {name}")
            shown.append(f"{name} DIFFERS ({difference})")
    g, w = to_numpy(got[1]), to_numpy(want[1])
    some = ~np.isneginf(w)
    worst = float(np.abs(g[some] - w[some]).max(initial=0))
    if not (worst <= 2e-3 and np.array_equal(np.isneginf(g), ~some)):
        failures.append(f"{what}: lse")
    return "  ".join([*shown, f"lse {worst:.1e}"])


def errors(seconds: float) -> None:
    cases = [(4, 100, "bfloat16"), (64, 100, "bfloat16"), (1, 3, "bfloat16"), (64, 640, "bfloat16")]
    cases += [(33, 128, "bfloat16"), (8, 64, "float16"), (128, 65, "bfloat16"), (3, 129, "float16")]
    for h, t, dtype in cases:
        if elapsed() > seconds:
            print(f"no time for H{h} T{t} {dtype}")
            continue
        begin = time.perf_counter()
        inputs = random_inputs(b=2, s=5, h=h, d=512, k=200, t=t, dtype=dtype, seed=h)
        if h > 2:
            inputs[2][:3] = cupy.asarray([np.inf, -np.inf, 2e38])
        grad = gradient_like(inputs[0])
        want = *oracle(*inputs, SCALE), *oracle_grad(grad, *inputs, SCALE)
        for name, way, ids, plan in ways(inputs[3], 200):
            what = f"H{h} T{t} {dtype} {name}"
            try:
                line = judge(what, way(grad, *inputs[:3], ids, SCALE, plan), want)
            except Exception as error:
                failures.append(what)
                line = f"FAILED {type(error).__name__}: {error}"
            print(f"{what:<34}{line}  [{time.perf_counter() - begin:.1f} s]", flush=True)
    for name, (queries, heads, ratio, topk, _) in LAYERS.items():
        if elapsed() > seconds:
            print(f"no time for {name}")
            continue
        inputs = layer_inputs(min(queries, 2048), heads, ratio, topk)
        grad = gradient_like(inputs[0])
        want = *oracle(*inputs, SCALE), *oracle_grad(grad, *inputs, SCALE)
        for way_name, way, ids, plan in ways(inputs[3], inputs[1].shape[1]):
            what = f"{name}, 2048 queries, {way_name}"
            print(f"{what:<52}{judge(what, way(grad, *inputs[:3], ids, SCALE, plan), want)}", flush=True)


# --- Times -----------------------------------------------------------------------------------------------


class Filler:
    """Work of several milliseconds, behind which calls are queued: what is timed is the GPU's time, not Python's."""

    def __init__(self) -> None:
        self.a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.b = torch.empty_like(self.a)

    def __call__(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.a, self.a, out=self.b)


def timed(calls, repeats: int, filler) -> dict[str, float]:
    """Median milliseconds of each call, the calls taking turns."""
    for call in calls.values():
        call()
        call()
    torch.cuda.synchronize()
    events = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            filler(4)
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            events[name].append(begin.elapsed_time(end))
    return {name: statistics.median(taken) for name, taken in events.items()}


def host(call, count=10) -> float:
    """Microseconds of Python for a call that nothing waits for."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / count * 1e6


def times(seconds: float, repeats: int) -> None:
    filler = Filler()
    gemm = timed({"gemm": lambda: filler(1)}, 10, filler)["gemm"]
    print(f"bf16 8192^3 GEMM {gemm:.3f} ms, {2 * 8192**3 / gemm / 1e9:.0f} TFLOP/s", flush=True)
    for name, shape in LAYERS.items():
        if elapsed() > seconds:
            print(f"no time for {name}")
            continue
        try:
            layer_times(name, shape, repeats, filler)
        except Exception as error:
            failures.append(f"{name}: {error}")
            print(f"{name} FAILED {type(error).__name__}: {error}", flush=True)
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()


def layer_times(name: str, shape: tuple, repeats: int, filler: Filler) -> None:
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper as wrapper

    queries, heads, ratio, topk, once = shape
    arrays = q, kv, sinks, ids = layer_inputs(queries, heads, ratio, topk)
    keys, grad = kv.shape[1], gradient_like(q)
    options = {"backend": "cudnn"}
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, keys, "cudnn")
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, None, SCALE, plan=plan, return_lse=True, **options)
    q_, kv_, sinks_, ids_, grad_, out_, lse_ = (_bridge.to_torch(x) for x in (*arrays, grad, out, lse))
    plan_ = torch_ops.plan_dsv4_sparse_indices(ids_, keys, "cudnn")
    leaves = [x.detach().requires_grad_() for x in (q_, kv_, sinks_)]
    planned = torch_ops.dsv4_sparse_attention(*leaves, None, SCALE, plan=plan_, **options)
    promise = torch_ops.dsv4_sparse_attention(*leaves, ids_, SCALE, all_rows_nonempty=True, **options)
    waiting = torch_ops.dsv4_sparse_attention(*leaves, ids_, SCALE, **options)
    flat, length = plan_.indices[:, 0], plan_.topk_length
    spec = contract.check(q, kv, sinks, ids, SCALE)
    holes = ids_.clone()
    holes[:, 1] = -1
    hole_plan = torch_ops.plan_dsv4_sparse_indices(holes, keys, "cudnn")

    def direct():
        return wrapper(
            q_[0], kv_[0], out_[0], grad_[0], lse_[0], sinks_, flat, softmax_scale=SCALE, topk_length=length
        )  # fmt: skip

    def ours(plan):
        laid = Ids(plan.indices, plan.topk_length, plan.valid_rows)
        return torch_bridge_cudnn.backward(grad_, q_, kv_, sinks_, laid, out_, lse_, spec, False, False, 2**31)

    def of_cupy(plan, ids):
        return dsv4cp.dsv4_sparse_attention_grad(
            grad, q, kv, sinks, ids, out, lse, SCALE, plan=plan, all_rows_nonempty=True, **options
        )

    def graded(made):
        return torch.autograd.grad(made, leaves, grad_, retain_graph=True)

    def forward(plan, ids):
        return dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, SCALE, plan=plan, **options)

    plan_by_torch = lambda: torch_ops.plan_dsv4_sparse_indices(ids_, keys, "cudnn", True)  # noqa: E731
    backward_calls = {
        "wrapper, directly": direct,
        "torch, autograd, shared plan": lambda: graded(planned),
        "torch, autograd, no plan, all_rows_nonempty": lambda: graded(promise),
        "torch, autograd, no plan": lambda: graded(waiting),
        "torch, inner call, shared plan": lambda: ours(plan_),
        "torch, inner call, one query without keys": lambda: ours(hole_plan),
        "torch, plan for each call": lambda: ours(plan_by_torch()),
        "CuPy, shared plan": lambda: of_cupy(plan, None),
        "CuPy, no plan": lambda: of_cupy(None, ids),
    }
    other_calls = {
        "plan alone, torch": plan_by_torch,
        "plan alone, CuPy": lambda: dsv4cp.plan_dsv4_sparse_indices(ids, keys, "cudnn", True),
        "packing alone": lambda: torch_bridge_cudnn.packed(ids_, spec, flat.shape[-1]),
        "forward, shared plan": lambda: forward(plan, None),
        "forward, no plan": lambda: forward(None, ids),
    }
    before = elapsed()
    direct()
    torch.cuda.synchronize()
    print(f"{name}: first call of the wrapper {elapsed() - before:.1f} s; {once} ms were measured before", flush=True)
    calls = backward_calls | other_calls
    found = timed(calls, repeats, filler)
    base = found["wrapper, directly"]
    for what, ms in found.items():
        against = f"  {ms / base:6.3f} of the wrapper" if what in backward_calls else " " * 24
        print(f"  {name:<24}{what:<46}{ms:9.4f} ms{against}  host {host(calls[what]):7.0f} us", flush=True)
    for what in ("torch, autograd, shared plan", "CuPy, shared plan"):
        if found[what] > 1.05 * base:
            failures.append(f"{name}: {what} {found[what]:.3f} ms, the wrapper {base:.3f}")
    if queries == 4096 and topk == 512 and found["plan alone, CuPy"] > 0.3:
        failures.append(f"{name}: plan {found['plan alone, CuPy']:.3f} ms")


# --- Facts -----------------------------------------------------------------------------------------------


def facts() -> None:
    """The wrapper itself, with what this package keeps from it."""
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper as wrapper

    def arrays(n=6, h=4, k=50, t=128, count=20):
        g = torch.Generator(device="cuda").manual_seed(0)
        q, out, dout = (torch.randn(n, h, 512, device="cuda", generator=g).bfloat16() for _ in range(3))
        kv = torch.randn(k, 512, device="cuda", generator=g).bfloat16()
        lse, sinks = torch.full((n, h), 5.0, device="cuda"), torch.zeros(h, device="cuda")
        ids = torch.full((n, t), -1, device="cuda", dtype=torch.int32)
        ids[:, :count] = torch.randint(0, k, (n, count), device="cuda", generator=g, dtype=torch.int32)
        length = torch.full((n,), count, device="cuda", dtype=torch.int32)
        return {"q": q, "kv": kv, "out": out, "dout": dout, "lse": lse, "attn_sink": sinks, "topk_idxs": ids,
                "softmax_scale": 0.05, "topk_length": length}  # fmt: skip

    def show(what, change, h=4):
        a = arrays(h=h)
        change(a)
        try:
            made = wrapper(**a)
            torch.cuda.synchronize()
            line = (
                "  ".join(
                    f"{n} finite {bool(made[n].isfinite().all())} norm {float(made[n].float().norm()):.4g}"
                    for n in ("dq", "dkv", "d_sink")
                )
                + f"  d_sink {made['d_sink'].tolist()[:4]}"
            )
        except Exception as error:
            line = f"{type(error).__name__}: {str(error)[:150]}"
        print(f"fact: {what:<40}{line}", flush=True)

    def set_(name, index, value):
        return lambda a: a[name].__setitem__(index, value)

    show("plain", lambda a: None)
    show("sink +inf", set_("attn_sink", 1, float("inf")))
    show("sink -inf", set_("attn_sink", 1, float("-inf")))
    show("length 0, lse +inf", lambda a: (set_("topk_length", 2, 0)(a), set_("lse", 2, float("inf"))(a)))
    show("length 0, lse -inf", lambda a: (set_("topk_length", 2, 0)(a), set_("lse", 2, float("-inf"))(a)))
    show("length 0, dout NaN", lambda a: (set_("topk_length", 2, 0)(a), set_("dout", 2, float("nan"))(a)))
    show("NaN in key 0, ids -1 behind the prefix", lambda a: (
        a["topk_idxs"].clamp_(min=1), set_("topk_idxs", (slice(None), slice(20, None)), -1)(a),
        set_("kv", 0, float("nan"))(a),
    ))  # fmt: skip
    show("NaN in key 0, ids 0 behind the prefix", lambda a: (
        a["topk_idxs"].clamp_(min=1), set_("topk_idxs", (slice(None), slice(20, None)), 0)(a),
        set_("kv", 0, float("nan"))(a),
    ))  # fmt: skip
    show("id beyond the keys in the prefix", set_("topk_idxs", (2, 3), 60))
    show("H 3", lambda a: None, h=3)
    show("H 1", lambda a: None, h=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=("errors", "times", "facts"))
    parser.add_argument("--layer", action="append", help="only layers with these words in their name")
    parser.add_argument("--seconds", type=float, default=100.0, help="begin nothing new after so many")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    only = options.only or ["errors", "times", "facts"]
    for name in [n for n in LAYERS if options.layer and not any(words in n for words in options.layer)]:
        del LAYERS[name]
    about = cupy.cuda.runtime.getDeviceProperties(0)
    reason = _backend.missing("cudnn")
    print(
        f"{about['name'].decode()}, torch {torch.__version__}, cudnn: {reason or 'runs'}, {elapsed():.1f} s", flush=True
    )
    if reason is not None:
        return 1
    if "errors" in only:
        errors(options.seconds)
    if "times" in only:
        times(options.seconds, options.repeats)
    if "facts" in only:
        facts()
    print("FAILED: " + "; ".join(failures) if failures else "ok", f"{elapsed():.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
