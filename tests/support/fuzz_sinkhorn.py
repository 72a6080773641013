"""The fuzzer's cases of Sinkhorn normalisation and its gradient."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch

import dsv4cp

from . import oracle64
from .fuzz_arrays import DTYPES, Held, Way, hold, integers, normal
from .fuzz_base import (
    Op,
    Verdict,
    attempt,
    half_dtypes,
    layouts,
    torch_ops,
    value,
)
from .oracle64 import INF


class SinkhornOp(Op):
    name, functions, gradient = "Sinkhorn", {"array": "dsv4_sinkhorn_normalize"}, False

    def torch_backends(self) -> tuple[str, ...]:
        return get_args(torch_ops().Dsv4SinkhornBackend)

    def draw(self, choose, way: Way) -> None:
        choose("dtype", ["float32", "bfloat16", "float16"] if not way.reference else half_dtypes(way))
        choose("M", [4, 4, 4, 4, 1, 2, 3, 5, 7, 8, 9, 15, 16] + ([17] if way.reference else []))
        choose("leading", [[1], [2], [3, 5], [33], [200], [], [0], [2, 0, 3], [2000]])
        choose("repeat", [1, 2, 3, 4, 20, 20, 21, 50])
        choose("eps", [1e-6, 1e-6, 1e-3, 0.1, 10.0])
        choose("spread", [1.0, 3.0, 0.0, 30.0, 1e4])
        choose("-inf", [False, False, False, True])
        choose("layout", layouts(way, "stride 0"))
        choose("fill", [0xFF, 0x5A])
        if self.gradient:
            choose("g dtype", ["same", "same", "float32"])
            choose("g layout", layouts(way, "stride 0"))
            choose("g bad", [False] * 5 + [True])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        m, seed = case["M"], case["seed"]
        leading = [min(n, 2**15 // (m * m * case["repeat"])) if n > 99 else n for n in case["leading"]]
        shape = (*leading, m, m)
        x = (normal(seed, "x", shape, way.device) * case["spread"]).to(DTYPES[case["dtype"]])
        if case["-inf"] and m > 1:
            hit = integers(seed, "inf", shape, 0, 9, way.device) == 0
            hit[..., 0] = False  # no row of -inf alone
            x = torch.where(hit, -INF, x)
        held = {"x": hold(x, case["layout"], 0xFF)}
        if self.gradient:
            g = normal(seed, "g", shape, way.device).to(
                DTYPES[case["dtype"] if case["g dtype"] == "same" else case["g dtype"]]
            )
            if case["g bad"] and case["g layout"] != "stride 0" and g.ndim > 2:
                g[:1, ..., 0, 0] = math.nan
            held["g"] = hold(g, case["g layout"], 0xFF)
        return held

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        x = way.give(held["x"])
        numbers = {"repeat": case["repeat"], "eps": case["eps"], "backend": way.backend}
        if way.library == "torch":
            x = x.detach().requires_grad_(self.gradient)
            y = attempt(way, torch_ops().dsv4_sinkhorn_normalize, x, **numbers)
            if not self.gradient:
                return [y]
            return list(torch.autograd.grad(y, x, way.give(held["g"]).to(y.dtype)))
        if not self.gradient:
            return [attempt(way, dsv4cp.dsv4_sinkhorn_normalize, x, **numbers)]
        return [attempt(way, dsv4cp.dsv4_sinkhorn_normalize_grad, way.give(held["g"]), x, **numbers)]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        x = value(held["x"])
        dtype, op = x.dtype, "sinkhorn_grad" if self.gradient else "sinkhorn"
        wide = x.double().requires_grad_(self.gradient)
        y = oracle64.sinkhorn(wide, case["repeat"], case["eps"])
        if self.gradient:
            g = value(held["g"])
            g = g.to(dtype) if way.library == "torch" else g
            (y,) = torch.autograd.grad(y, wide, g.double())
        from .tolerances import tolerance

        rtol, atol = tolerance(op, case["dtype"])
        y = y.detach()
        bad = y.isnan().any(-1, keepdim=True).any(-2, keepdim=True)  # of a matrix that holds one, all are NaN
        y = torch.where(bad, math.nan, y)
        size = 1.0 if not self.gradient else max(1.0, 1.0)
        v.close("y", got[0], (y, atol * size + rtol * y.abs()), dtype)


class SinkhornGradOp(SinkhornOp):
    name, functions, gradient = "Sinkhorn gradient", {"array": "dsv4_sinkhorn_normalize_grad"}, True
