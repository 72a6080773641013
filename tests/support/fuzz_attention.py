"""The fuzzer's cases of sparse attention, its gradient and the dense oracle."""

from __future__ import annotations

import math
import re
from typing import Any, get_args

import torch

import dsv4cp

from . import oracle64
from .fuzz_arrays import DTYPES, VALUES, Held, Way, constants, floats, hold, integers, normal
from .fuzz_base import (
    COST,
    IDS,
    Op,
    Verdict,
    attempt,
    half_dtypes,
    layouts,
    make_ids,
    spoil_rows,
    torch_ops,
    value,
)
from .fuzz_kernels import portable_dtype
from .oracle64 import INF, Attention

CPU_COST = 2**19  # as COST, of B*S*T*D and 2*B*S*H*T
LARGE = {"float16": 30.0}  # size of "large" values where it is not 1e4


class AttentionOp(Op):
    name, functions, gradient = "attention", {"array": "dsv4_sparse_attention"}, False

    def torch_backends(self) -> tuple[str, ...]:
        return get_args(torch_ops().Dsv4SparseAttentionBackend)

    def draw(self, choose, way: Way) -> None:
        kernels = not way.reference
        sizes = (
            [16, 5, 1, 3, 40, 64]
            if (way.reference and way.backend != "auto") or way.device == "cpu"
            else [512, 64, 128, 256]
        )
        dim = choose("D", sizes)
        heads = choose("H", [1, 2, 3, 4, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128])
        dtype = choose("dtype", half_dtypes(way) if not kernels or dim == 512 else [portable_dtype(dim, heads)])
        choose(
            "kv dtype", [dtype] if kernels or way.library == "array_api_strict" else [dtype, dtype, dtype, "float32"]
        )
        choose("sinks dtype", ["float32", "float32", dtype, "float64"])
        choose("B", [1, 2, 3, 1, 0] if choose("zero", [False] * 15 + [True]) else [1, 2, 3])
        choose("S", [1, 2, 3, 5, 17, 33, 0])
        choose("K", [1, 2, 7, 8, 40, 64, 129, 300, 700, 0])
        choose("T", [1, 2, 3, 4, 7, 16, 31, 63, 64, 65, 127, 128, 129, 192, 300, 640, 705, 1152, 1300, 0])
        choose("ids", list(IDS))
        choose("id dtype", ["int32", "int64"])
        choose("empty rows", [False, True])
        choose("unselected", ["plain", "NaN", "inf", "huge"])
        choose("selected NaN", [False] * 7 + [True])
        choose("sinks", ["normal", "normal", "zero", "+inf", "-inf", "1e4", "-1e4", "2e38", "mixed"])
        choose("values", list(VALUES[:1]) * 3 + list(VALUES))
        choose("scale", [1.0, 1.0, 1.0, 0.0, -1.0, 8.0, 1e-6])  # times D**-0.5
        portable = kernels and self.gradient and dtype == "float16" and dim == 512  # where q or grad_out is reversed
        for x in ("q", "kv", "ids"):
            some = layouts(way, "stride 0") if x != "ids" else layouts(way)
            choose(f"{x} layout", [n for n in some if n != "flipped"] if portable and x == "q" else some)
        choose("plan", ["none", "none", "plan", "plan alone"])
        choose("fill", [0xFF, 0x5A])
        by_name = way.library != "torch" or way.backend == "tilelang"  # where torch differentiates there is no rounding
        choose("rounding", [False] * 5 + [by_name and not self.gradient])
        if self.gradient:
            choose("impl", ["atomic", "deterministic"])
            choose("cap", ["default", "least"])
            choose("g layout", [n for n in layouts(way, "stride 0") if not (portable and n == "flipped")])
            choose("g values", ["normal", "integers", "equal"])
            choose("g NaN", ["nowhere", "nowhere", "empty rows", "one query"])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        device, seed = way.device, case["seed"]
        b, s, h, d, k, t = (case[n] for n in "BSHDKT")
        s = max(min(s, COST // max(1, b * max(t, 1) * max(d, 4 * h))), min(s, 1))
        if device == "cpu":
            s = max(min(s, CPU_COST // max(1, b * max(t, 1) * max(d, 2 * h))), min(s, 1))
        kind = case["values"]
        q = floats(seed, "q", (b, s, h, d), case["dtype"], kind, device)
        kv = floats(seed, "kv", (b, k, d), case["kv dtype"], kind, device)
        ids = make_ids(case, device, k, (b, s, t), case["ids"], case["id dtype"])
        held_ids = hold(ids, case["ids layout"], 0)
        if case["selected NaN"] and k:
            kv[-1:, k // 2] = math.nan
        kv = spoil_rows(kv, ids, case["unselected"])
        sinks = self._sinks(case, h, device)
        if case["selected NaN"] or case.get("g NaN") == "one query":  # 0 and NaN have both been promised there
            sinks = torch.where(sinks > 50, 2.0, sinks)
        kv_layout = case["kv layout"]
        if kv_layout == "stride 0" and case["unselected"] != "plain":
            kv_layout = "contiguous"  # rows that one batch row does not select, another one may
        held = {"q": hold(q, case["q layout"], 0xFF), "kv": hold(kv, kv_layout, 0xFF)}
        held |= {"sinks": hold(sinks, "contiguous", 0xFF), "ids": held_ids}
        if self.gradient:
            g = floats(seed, "g", (b, s, h, d), case["dtype"], case["g values"], device)
            if case["g NaN"] == "empty rows" and case["g layout"] != "stride 0":
                valid = ((ids >= 0) & (ids < k)).any(2)
                g = torch.where(valid[..., None, None], g, math.nan).to(g.dtype)
            elif case["g NaN"] == "one query" and case["g layout"] != "stride 0":
                g[-1:, -1:] = math.nan
            held["g"] = hold(g, case["g layout"], 0xFF)
        return held

    @staticmethod
    def _sinks(case: dict, heads: int, device) -> torch.Tensor:
        kind, dtype = case["sinks"], DTYPES[case["sinks dtype"]]
        x = normal(case["seed"], "sinks", (heads,), device)
        fixed = {"zero": 0.0, "+inf": INF, "-inf": -INF, "1e4": 1e4, "-1e4": -1e4, "2e38": 2e38}
        if kind in fixed:
            x = torch.full_like(x, fixed[kind])
        elif kind == "mixed":
            values = constants((INF, -INF, 2e38, -2e38, 1e4, -1e4, 0.0, 20.0), torch.float64, device)
            which = integers(case["seed"], "mixed", (heads,), 0, 16, device)
            x = torch.where(which < 8, values[which % 8], x)
        return x.to(dtype)

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        q, kv, sinks, ids = (way.give(held[n]) for n in ("q", "kv", "sinks", "ids"))
        options = self._options(way, case, ids, held)
        ids = None if case["plan"] == "plan alone" else ids
        function = torch_ops().dsv4_sparse_attention if way.library == "torch" else dsv4cp.dsv4_sparse_attention
        options |= {"reference_rounding": case["rounding"], "return_lse": True}
        return list(attempt(way, function, q, kv, sinks, ids, self._scale(case), backend=way.backend, **options))

    def _scale(self, case: dict) -> float:
        """Large values get a scale that keeps scores in reach of float32: gradients of scores of 1e8 mean nothing."""
        scale = case["scale"] * max(case["D"], 1) ** -0.5
        if case["values"] == "large" and (self.gradient or case["scale"] != 8.0):
            scale /= LARGE.get(case["dtype"], 1e4) * LARGE.get(case["kv dtype"], 1e4)
        return scale

    @staticmethod
    def _options(way: Way, case: dict, ids: Any, held: dict) -> dict[str, Any]:
        if case["plan"] == "none":
            return {}
        keys = held["kv"].view.shape[1]
        if way.library == "torch":
            plan = attempt(way, torch_ops().plan_dsv4_sparse_indices, ids, keys, way.backend)
        else:
            plan = attempt(way, dsv4cp.plan_dsv4_sparse_indices, ids, keys, way.backend)
        return {"plan": plan}

    def oracle(self, way: Way, case: dict, held: dict) -> Attention:
        q, kv, sinks, ids = (value(held[n]) for n in ("q", "kv", "sinks", "ids"))
        return Attention(q, kv, sinks, ids, self._scale(case), self.operands(way, case))

    def operands(self, way: Way, case: dict) -> str | None:
        """The half type that p (and ds) are rounded to for a product: in the kernels, and in the array reference's
        forward pass. What torch differentiates rounds nothing, nor do the equations of the gradient."""
        if way.reference and (self.gradient or way.library == "torch"):
            return None
        return case["kv dtype"] if case["kv dtype"] in ("bfloat16", "float16") else None

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        q, kv = held["q"].view, held["kv"].view
        out, lse = self.oracle(way, case, held).forward()
        v.close("out", got[0], out, q.dtype)
        v.close("lse", got[1], lse, DTYPES[oracle64.compute(q, kv)])


class AttentionGradOp(AttentionOp):
    name, functions, gradient = "attention gradient", {"array": "dsv4_sparse_attention_grad"}, True

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        q, kv, sinks, ids, g = (way.give(held[n]) for n in ("q", "kv", "sinks", "ids", "g"))
        if way.library == "torch":
            return self._torch(way, case, held, q, kv, sinks, ids, g)
        if "out" not in held:
            self.save(way, case, held)
        options = self._options(way, case, ids, held) | {"backward_impl": case["impl"], "backend": way.backend}
        ids = None if case["plan"] == "plan alone" else ids
        arguments = (g, q, kv, sinks, ids, way.give(held["out"]), way.give(held["lse"]), self._scale(case))
        results = list(attempt(way, dsv4cp.dsv4_sparse_attention_grad, *arguments, **options))
        if case["cap"] == "least":
            cap = self._least(way, arguments, options)
            again = attempt(way, dsv4cp.dsv4_sparse_attention_grad, *arguments, **options, backward_workspace_bytes=cap)
            results += list(again)
        return results

    def save(self, way: Way, case: dict, held: dict[str, Held | None]) -> None:
        """Puts what a forward pass would have saved beside the inputs, or renews it there."""
        (out, _), (lse, _) = self.oracle(way, case, held).forward()
        wide = DTYPES[oracle64.compute(held["q"].view, held["kv"].view)]
        for name, x in (("out", out.to(held["q"].view.dtype)), ("lse", lse.to(wide))):
            made = hold(x, "contiguous", 0xFF)
            if name in held:
                held[name].memory.copy_(made.memory)
                held[name].kept.copy_(made.memory)
            else:
                held[name] = made

    @staticmethod
    def _least(way: Way, arguments: tuple, options: dict) -> int:
        """The smallest cap the call says it takes."""
        try:
            dsv4cp.dsv4_sparse_attention_grad(*arguments, **options, backward_workspace_bytes=1)
        except ValueError as error:
            if (least := re.search(r"at least (\d+)", str(error))) is not None:
                return int(least[1])
        return 1

    def _torch(self, way: Way, case: dict, held: dict, q, kv, sinks, ids, g) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in (q, kv, sinks)]
        options = self._options(way, case, ids, held) | {"backward_impl": case["impl"], "backend": way.backend}
        ids = None if case["plan"] == "plan alone" else ids
        out = attempt(way, torch_ops().dsv4_sparse_attention, *leaves, ids, self._scale(case), **options)
        return list(attempt(way, torch.autograd.grad, out, leaves, g))

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        oracle, g = self.oracle(way, case, held), value(held["g"])
        if way.library == "torch":
            (out, _), (lse, _) = oracle.forward()
        else:
            out, lse = value(held["out"]), value(held["lse"])
        fixed = case["impl"] == "deterministic" and not way.reference and way.backend != "cudnn"
        differentiated = way.library == "torch" and way.reference
        own = way.library == "torch" and not way.reference
        want = oracle.backward(g, out, lse, own=own, fixed=fixed, slots=differentiated)
        if way.backend == "cudnn":
            # "Sink -inf: the gradient of the sink is 0" for NaN too: this package sets what cuDNN's kernels make of it.
            # Everyone else multiplies the sink's share, 0, by NaN, as cuDNN does where a finite sink's share is 0.
            none = value(held["sinks"]) == -INF
            want = (*want[:2], tuple(torch.where(none, 0.0, x) for x in want[2]))
        for label, x, pair, like in zip(
            ("grad_q", "grad_kv", "grad_sinks"), got, want, ("q", "kv", "sinks"), strict=False
        ):
            v.close(label, x, pair, held[like].view.dtype)
            if len(got) > 3:
                again = got[3 + ("grad_q", "grad_kv", "grad_sinks").index(label)]
                if case["impl"] == "deterministic" and way.library != "array_api_strict":  # it has no scatter-add
                    v.equal(f"{label}, least workspace", again, x)
                else:
                    v.close(f"{label}, least workspace", again, pair, held[like].view.dtype)


class DenseOp(AttentionOp):
    name, functions = "dense attention", {"array": "dense_attention_topk"}

    def torch_backends(self) -> tuple[str, ...]:
        return ("torch",)

    def ways(self, device: str, text: str = "") -> list[Way]:
        found = (Way("numpy" if device == "cpu" else "cupy", device, "reference"), Way("torch", device, "torch"))
        return [way for way in found if text in str(way)]

    def operands(self, way: Way, case: dict) -> str | None:
        return None

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        arrays = (way.give(held[n]) for n in ("q", "kv", "sinks", "ids"))
        function = torch_ops().dense_attention_topk_torch if way.library == "torch" else dsv4cp.dense_attention_topk
        return [function(*arrays, self._scale(case))]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        out, _ = self.oracle(way, case, held).forward()
        v.close("out", got[0], out, held["q"].view.dtype)
