"""What the fuzzer tries: for each op how a case is drawn, made, called on a way and judged.

A case is a dict of plain values (JSON). `draw` gets a function choose(name, options) that the drivers supply; simpler
options come first, so that shrinking moves towards them. Backends come from what each ops.py offers: a new one needs no
line here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

import dsv4cp
from dsv4cp import _backend
from dsv4cp.commands import offers

from . import oracle64
from .fuzz_arrays import DTYPES, LAYOUTS, VALUES, Canaries, Held, Way, floats, hold, integers, normal
from .oracle64 import INF, Attention, Pair, rounded

# What a backend asked for by name may say of arguments that it does not take although they are valid.
REFUSAL = re.compile(r"kernels|cuDNN|cudnn|backend '\w+' cannot run|is not there", re.I)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Refused(Exception):
    """The backend does not take this case; nothing was computed."""


@dataclass
class Verdict:
    """What was compared: labels and 0-d bool tensors, True where all is well. Nothing here waits for a GPU."""

    labels: list[str] = field(default_factory=list)
    good: list[torch.Tensor] = field(default_factory=list)
    detail: bool = False  # also keep what is needed to print where it differs
    notes: list[str] = field(default_factory=list)

    def true(self, label: str, good: torch.Tensor | bool) -> None:
        self.labels.append(label)
        self.good.append(good if isinstance(good, torch.Tensor) else torch.tensor(good))

    def close(self, label: str, got: torch.Tensor, want: Pair, dtype: torch.dtype, shape=None) -> None:
        """NaN and infinities where the oracle has them, other numbers within its bound; dtype and shape exactly."""
        value, bound = want
        if not self._alike(label, got, dtype, value.shape if shape is None else shape):
            return
        value, bound = value.expand(got.shape), bound.expand(got.shape)
        most = 0.98 * torch.finfo(dtype).max
        g = got.double()
        at_the_end = (value.abs() + bound > most) & value.isfinite()
        fine = (g - value).abs() <= bound
        fine = torch.where(
            value.isfinite(), fine | (at_the_end & ~g.isnan()), (g == value) | (g.isnan() & value.isnan())
        )
        self._note(label, fine, got, value, bound)
        self.true(label, fine.all())

    def equal(self, label: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """The same numbers (integers, or bits of floats)."""
        if not self._alike(label, got, dtype or want.dtype, want.shape):
            return
        if got.is_floating_point():
            same = got.contiguous().view(BITS[got.element_size()]) == want.contiguous().view(BITS[want.element_size()])
            same = same | (got.isnan() & want.isnan())
        else:
            same = got == want
        self._note(label, same, got, want, torch.zeros(()))
        self.true(label, same.all())

    def _alike(self, label: str, got: torch.Tensor, dtype: torch.dtype, shape) -> bool:
        if got.dtype == dtype and tuple(got.shape) == tuple(shape):
            return True
        self.notes.append(f"{label}: expected {dtype} {list(shape)}, got {got.dtype} {list(got.shape)}")
        self.true(label, False)
        return False

    def _note(self, label: str, fine: torch.Tensor, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> None:
        if self.detail and not bool(fine.all()):
            at = tuple(int(i) for i in (~fine).nonzero()[0])
            by = bound.expand(got.shape)[at].item()
            count = int((~fine).sum())
            self.notes.append(
                f"{label}: {count} of {fine.numel()} differ, first at {at}: got {got[at].item()!r}, "
                f"want {want.expand(got.shape)[at].item()!r} within {by:.3g}"
            )

    def failed(self) -> list[str]:
        """Labels that are not well; waits for a GPU."""
        return [label for label, good in zip(self.labels, self.good, strict=True) if not bool(good)]


def attempt(way: Way, call, *args, **kwargs) -> Any:
    """The call's results; Refused where a backend asked for by name says that it cannot take the arguments."""
    try:
        return call(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        if way.backend not in ("auto", "reference", "torch", "sparse_torch") and REFUSAL.search(str(error)):
            raise Refused(str(error)) from None
        if "needs gradient kernels" in str(error):  # no fixed order on CuPy arrays without them: said, not computed
            raise Refused(str(error)) from None
        raise


def half_dtypes(way: Way) -> list[str]:
    """Dtypes to draw from: kernels take half types, the references every one."""
    if way.library == "array_api_strict":
        return ["float32", "float64"]
    if way.reference:
        return ["float32", "bfloat16", "float16", "float64"]
    return ["bfloat16", "float16"]


def layouts(way: Way, *also: str) -> list[str]:
    return [x for x in LAYOUTS if x != "stride 0" or x in also]


_available: dict[tuple[str, Way], bool] = {}


class Op:
    """One thing to try. Subclasses: draw, make, run, judge."""

    name: ClassVar[str]
    functions: ClassVar[dict[str, str]]  # library kind -> the public function that decides which backends there are

    def torch_backends(self) -> tuple[str, ...]:
        return ()

    def ways(self, device: str, text: str = "") -> list[Way]:
        """Libraries and backends that this version offers and this machine can run, of those that contain `text`."""
        offered = dict(offers.ops()).get(self.functions.get("array", ""), ("reference",))
        found = []
        if "array" in self.functions:
            if device == "cpu":
                found += [Way("numpy", "cpu", "auto"), Way("array_api_strict", "cpu", "reference")]
            else:
                found += [
                    Way("cupy", "cuda", b) for b in (*offered, "auto") if b == "auto" or _backend.missing(b) is None
                ]
        found += [Way("torch", device, b) for b in self.torch_backends()]
        return [way for way in found if text in str(way) and self.available(way)]

    def available(self, way: Way) -> bool:
        """torch backends that cannot run here say so at a plain call."""
        if way.library != "torch" or way.backend in ("torch", "sparse_torch", "auto"):
            return True
        if (self.name, way) not in _available:
            _available[self.name, way] = self._runs(way)
        return _available[self.name, way]

    def _runs(self, way: Way) -> bool:
        case = {"op": self.name, "way": str(way), **self.plain()}
        try:
            self.run(way, case, self.make(way, case))
        except Refused:
            return False
        except Exception:  # what it is will be seen by the first case
            return True
        return True

    def plain(self, way: Way | None = None) -> dict[str, Any]:
        """The simplest case of a way; without one, a case that every library's kernels take."""
        simple = Simplest()
        self.draw(simple, way or Way("cupy", "cuda", "cuda"))
        return {"seed": 1, **simple.case}

    def draw(self, choose, way: Way) -> None:
        raise NotImplementedError

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        raise NotImplementedError

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        raise NotImplementedError

    def judge(self, way: Way, case: dict, held: dict[str, Held | None], got: list[torch.Tensor], v: Verdict) -> None:
        raise NotImplementedError


class Simplest:
    """choose() that takes the first option of everything."""

    def __init__(self) -> None:
        self.case: dict[str, Any] = {}

    def __call__(self, name: str, options: list[Any]) -> Any:
        self.case[name] = options[0]
        return options[0]


def try_case(op: Op, case: dict, detail: bool = False) -> Verdict:
    """Makes, calls and judges one case. Raises Refused where the backend does not take it, or what the call raised."""
    way = Way.parse(case["way"])
    held = op.make(way, case)
    v = Verdict(detail=detail)
    with Canaries(way, case["fill"]) as canaries:
        results = op.run(way, case, held)
    for n, x in enumerate(results):
        if x is not None and not way.is_right_kind(x):
            raise AssertionError(f"result {n}: expected an array of {way.library}, got {type(x)}")
    got = [None if x is None else way.take(x) for x in results]
    v.true("canaries around what was allocated", ~canaries.broken())
    for name, h in held.items():
        if h is not None:
            v.true(f"{name} unmodified", (h.memory == h.kept).all())
    op.judge(way, case, held, got, v)
    return v


# --- Attention -----------------------------------------------------------------------------------------------

COST = 2**23  # gathered numbers, and scores, of one case at most: B*S*T*D and 4*B*S*H*T
IDS = ("random", "window", "repeated", "descending", "sparse", "garbage", "tail", "head", "same", "all", "none")


def make_ids(case: dict, device, keys: int, shape: tuple[int, int, int], kind: str, dtype: str) -> torch.Tensor:
    """[B, S, T] ids of a pattern, an empty row among them where the case says so."""
    seed, (batch, queries, slots) = case["seed"], shape
    r = integers(seed, "ids", shape, 0, max(keys, 1), device)
    t = torch.arange(slots, device=device)[None, None]
    s = torch.arange(queries, device=device)[None, :, None]
    spread = s * max(keys, 1) // max(queries, 1) + max(keys, 1) // max(queries, 1) - 1  # where query s stands
    if kind == "window":
        first = (spread - slots + 1).clamp(min=0)
        x = torch.where(first + t <= spread, first + t, -1).expand(shape)
    elif kind == "repeated":
        x = r % 3
    elif kind == "descending":
        x = (keys - 1 - t).expand(shape)
    elif kind == "sparse":
        x = torch.where(integers(seed, "sparse", shape, 0, 8, device) == 0, r, -1)
    elif kind == "garbage":
        limits = [-1, -2, -(2**31), 2**31 - 1, keys, keys + 1, -keys, 2 * keys, 0, max(keys - 1, 0)]
        if dtype == "int64":
            limits += [2**32, 2**32 + 1, -(2**63), 2**63 - 1, -(2**32) + 1]
        values = torch.tensor([x for x in limits if dtype == "int64" or -(2**31) <= x < 2**31], device=device)
        x = torch.where(integers(seed, "which", shape, 0, 2, device) == 0, r, values[r % len(values)])
    elif kind == "tail":
        x = torch.where(t < slots - slots // 3, r, -1)
    elif kind == "head":
        x = torch.where(t >= slots - slots // 3 - 1, r, -1)
    elif kind == "same":
        x = torch.full(shape, keys // 2, device=device)
    elif kind == "all":
        x = (t % max(keys, 1)).expand(shape)
    elif kind == "none":
        x = torch.full(shape, -1, device=device)
    else:
        x = integers(seed, "ids", shape, -1 - keys // 4, keys + keys // 4 + 1, device)
    if case.get("empty rows"):
        x = torch.where(integers(seed, "empty", (batch, queries, 1), 0, 3, device) == 0, -1, x)
    return x.to(DTYPES[dtype])


def spoil_rows(x: torch.Tensor, ids: torch.Tensor, kind: str) -> torch.Tensor:
    """x [B, K, D] with `kind` in every row that no id names."""
    if kind == "plain" or x.numel() == 0:
        return x
    batch, keys, _ = x.shape
    valid = (ids >= 0) & (ids < keys)
    named = torch.zeros((batch, keys + 1), dtype=torch.bool, device=x.device)
    flat = torch.where(valid, ids, keys).long().reshape(batch, -1)
    named.scatter_(1, flat, True)
    return torch.where(named[:, :keys, None], x, {"NaN": math.nan, "inf": INF, "huge": 6e4}[kind])


class AttentionOp(Op):
    name, functions, gradient = "attention", {"array": "dsv4_sparse_attention"}, False

    def torch_backends(self) -> tuple[str, ...]:
        from typing import get_args

        from dsv4cp import torch_ops

        return get_args(torch_ops.Dsv4SparseAttentionBackend)

    def draw(self, choose, way: Way) -> None:
        kernels = not way.reference
        dtype = choose("dtype", half_dtypes(way))
        choose(
            "kv dtype", [dtype] if kernels or way.library == "array_api_strict" else [dtype, dtype, dtype, "float32"]
        )
        choose("sinks dtype", ["float32", "float32", dtype, "float64"])
        sizes = (
            [16, 5, 1, 3, 40, 64]
            if (way.reference and way.backend != "auto") or way.device == "cpu"
            else [512, 64, 128, 256]
        )
        choose("D", sizes)
        choose("B", [1, 2, 3, 1, 0] if choose("zero", [False] * 15 + [True]) else [1, 2, 3])
        choose("S", [1, 2, 3, 5, 17, 33, 0])
        choose("H", [1, 2, 3, 4, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128])
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
        for x in ("q", "kv", "ids"):
            choose(f"{x} layout", layouts(way, "stride 0") if x != "ids" else layouts(way))
        choose("plan", ["none", "none", "plan", "plan alone"])
        choose("fill", [0xFF, 0x5A])
        choose("rounding", [False] * 5 + [kernels or way.library != "torch"] if not self.gradient else [False])
        if self.gradient:
            choose("impl", ["atomic", "deterministic"])
            choose("cap", ["default", "least"])
            choose("g layout", layouts(way, "stride 0"))
            choose("g values", ["normal", "integers", "equal"])
            choose("g NaN", ["nowhere", "nowhere", "empty rows", "one query"])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        device, seed = way.device, case["seed"]
        b, s, h, d, k, t = (case[n] for n in "BSHDKT")
        s = max(min(s, COST // max(1, b * max(t, 1) * max(d, 4 * h))), min(s, 1))
        if device == "cpu":
            s = max(min(s, 2**19 // max(1, b * max(t, 1) * max(d, 2 * h))), min(s, 1))
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
        held = {"q": hold(q, case["q layout"], 0xFF), "kv": hold(kv, case["kv layout"], 0xFF)}
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
            values = torch.tensor([INF, -INF, 2e38, -2e38, 1e4, -1e4, 0.0, 20.0], dtype=torch.float64, device=device)
            which = integers(case["seed"], "mixed", (heads,), 0, 16, device)
            x = torch.where(which < 8, values[which % 8], x)
        return x.to(dtype)

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        q, kv, sinks, ids = (way.give(held[n]) for n in ("q", "kv", "sinks", "ids"))
        options = self._options(way, case, ids, held)
        ids = None if case["plan"] == "plan alone" else ids
        function = _torch().dsv4_sparse_attention if way.library == "torch" else dsv4cp.dsv4_sparse_attention
        options |= {"reference_rounding": case["rounding"], "return_lse": True}
        return list(attempt(way, function, q, kv, sinks, ids, self._scale(case), backend=way.backend, **options))

    def _scale(self, case: dict) -> float:
        """Large values get a scale that keeps scores in reach of float32: gradients of scores of 1e8 mean nothing."""
        scale = case["scale"] * max(case["D"], 1) ** -0.5
        if case["values"] == "large" and (self.gradient or case["scale"] != 8.0):
            scale *= 1e-3 if case["dtype"] == "float16" else 1e-8
        return scale

    @staticmethod
    def _options(way: Way, case: dict, ids: Any, held: dict) -> dict[str, Any]:
        if case["plan"] == "none":
            return {}
        keys = held["kv"].view.shape[1]
        if way.library == "torch":
            plan = attempt(way, _torch().plan_dsv4_sparse_indices, ids, keys, _plan_backend(way, held))
        else:
            plan = attempt(way, dsv4cp.plan_dsv4_sparse_indices, ids, keys, way.backend)
        return {"plan": plan}

    def oracle(self, way: Way, case: dict, held: dict) -> Attention:
        q, kv, sinks, ids = (value(held[n]) for n in ("q", "kv", "sinks", "ids"))
        half = q.dtype if way.library == "torch" and kv.dtype != q.dtype else None
        return Attention(q, kv, sinks, ids, self._scale(case), half)

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
            return int(re.search(r"at least (\d+)", str(error))[1])
        return 1

    def _torch(self, way: Way, case: dict, held: dict, q, kv, sinks, ids, g) -> list[Any]:
        leaves = [x.detach().requires_grad_() for x in (q, kv, sinks)]
        options = self._options(way, case, ids, held) | {"backward_impl": case["impl"], "backend": way.backend}
        ids = None if case["plan"] == "plan alone" else ids
        out = attempt(way, _torch().dsv4_sparse_attention, *leaves, ids, self._scale(case), **options)
        return list(attempt(way, torch.autograd.grad, out, leaves, g))

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        oracle, g = self.oracle(way, case, held), value(held["g"])
        if way.library == "torch":
            (out, _), (lse, _) = oracle.forward()
        else:
            out, lse = value(held["out"]), value(held["lse"])
        want = oracle.backward(g, out, lse, loose=way.library == "torch")
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

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        arrays = (way.give(held[n]) for n in ("q", "kv", "sinks", "ids"))
        function = _torch().dense_attention_topk_torch if way.library == "torch" else dsv4cp.dense_attention_topk
        return [function(*arrays, self._scale(case))]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        out, _ = self.oracle(way, case, held).forward()
        v.close("out", got[0], out, held["q"].view.dtype)


def value(held: Held) -> torch.Tensor:
    """What the library's array holds."""
    if not held.flip:
        return held.view
    axis = next(i for i in range(held.view.ndim) if held.view.shape[i] > 1)
    return held.view.flip(axis)


def _torch():
    from dsv4cp import torch_ops

    return torch_ops


def _plan_backend(way: Way, held: dict) -> str:
    """An "auto" plan is for bfloat16 where there are kernels; other dtypes want the plan by name."""
    return way.backend


# --- Indexer -------------------------------------------------------------------------------------------------


class ScoresOp(Op):
    name, functions, gradient, slots = "index scores", {"array": "dsv4_indexer_scores"}, False, False

    def torch_backends(self) -> tuple[str, ...]:
        from typing import get_args

        return get_args(_torch().Dsv4IndexerBackend)

    def draw(self, choose, way: Way) -> None:
        kernels = not way.reference
        dtype = choose("dtype", half_dtypes(way)[:1] * 3 + half_dtypes(way) if kernels else half_dtypes(way))
        choose("w dtype", [dtype, dtype, "float32"])
        choose("E", [128, 128, 128, 64, 32] if kernels else [8, 1, 3, 16, 128])
        choose("I", [64, 64, 32, 16, 8] if kernels else [1, 2, 3, 4, 8, 64])
        choose("B", [1, 2, 3, 0] if choose("zero", [False] * 15 + [True]) else [1, 2, 3])
        choose("S", [1, 2, 3, 8, 9, 17, 63, 64, 65, 130, 0])
        choose("P", [1, 2, 3, 7, 16, 63, 64, 65, 129, 257, 300, 0])
        choose("R", [1, 4, 2, 3, 128])
        choose("start", [0, 0, 1, 7, 1000])
        choose("values", ["normal", "normal", "integers", "small", "zeros", "large", "equal"])
        choose("unseen", ["plain", "NaN", "inf"])
        choose("scale", [1.0, 1.0, -1.0, 0.0, 1e-3])
        for x in ("q", "k", "w"):
            choose(f"{x} layout", layouts(way, "stride 0"))
        choose("fill", [0xFF, 0x5A])
        if self.slots:
            choose("T", [1, 2, 3, 8, 31, 64, 65, 128, 130, 512, 640, 0])
            choose("ids", list(IDS))
            choose("id dtype", ["int32", "int64"])
            choose("empty rows", [False, True])
            choose("ids layout", layouts(way))
        if self.gradient:
            choose("g dtype", ["float32", "float32", dtype])
            choose("g values", ["normal", "integers", "equal"])
            choose("g layout", layouts(way, "stride 0"))
            choose("g unseen", ["plain", "NaN"])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        device, seed, kind = way.device, case["seed"], case["values"]
        b, s, i, e, p, t = (case.get(n, 0) for n in "BSIEPT")
        limit = COST if device == "cuda" else 2**17
        s = max(min(s, limit // max(1, b * max(t, p if not self.slots else 1) * max(i, e))), min(s, 1))
        q = floats(seed, "q", (b, s, i, e), case["dtype"], kind, device)
        k = floats(seed, "k", (b, p, e), case["dtype"], kind, device)
        w = floats(seed, "w", (b, s, i), case["w dtype"], "normal" if kind != "integers" else kind, device)
        held: dict[str, Held | None] = {}
        if self.slots:
            ids = make_ids(case, device, p, (b, s, t), case["ids"], case["id dtype"])
            held["ids"] = hold(ids, case["ids layout"], 0)
            k = spoil_rows(k, ids, case["unseen"])
        elif case["unseen"] != "plain":
            seen = (case["start"] + s) // case["R"]
            k[:, seen:] = math.nan if case["unseen"] == "NaN" else INF
        for name, x in (("q", q), ("k", k), ("w", w)):
            layout = case[f"{name} layout"]
            if name == "k" and layout == "stride 0" and case["unseen"] != "plain":
                layout = "contiguous"  # rows that one batch row does not see, another one may
            held[name] = hold(x, layout, 0xFF)
        if self.gradient:
            g = floats(seed, "g", (b, s, t if self.slots else p), case["g dtype"], case["g values"], device)
            if case["g unseen"] == "NaN" and case["g layout"] != "stride 0":
                g = torch.where(self._seen(case, held), g, math.nan).to(g.dtype)
            held["g"] = hold(g, case["g layout"], 0xFF)
        return held

    def _seen(self, case: dict, held: dict) -> torch.Tensor:
        """[B, S, P or T]: scores that exist."""
        q, entries = held["q"].view, held["k"].view.shape[1]
        if self.slots:
            ids = value(held["ids"])
            return (ids >= 0) & (ids < entries)
        seen = oracle64.causal(q.shape[1], entries, case["R"], case["start"], q.device)
        return seen.expand(q.shape[0], -1, -1)

    def _call(self, way: Way, case: dict, arrays: list[Any], backend: str) -> Any:
        options = {"compress_ratio": case["R"], "softmax_scale": self._scale(case), "backend": backend}
        if not self.slots:
            options |= {"query_start": case["start"]}
        module = _torch() if way.library == "torch" else dsv4cp
        name = "dsv4_indexer_topk_scores" if self.slots else "dsv4_indexer_scores"
        if self.gradient and way.library != "torch":
            name += "_grad"
        return attempt(way, getattr(module, name), *arrays, **options)

    @staticmethod
    def _scale(case: dict) -> float:
        return case["scale"] * case["E"] ** -0.5

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        arrays = [way.give(held[n]) for n in ("q", "k", "w")]
        ids = [way.give(held["ids"])] if self.slots else []
        if not self.gradient:
            return [self._call(way, case, arrays + ids, way.backend)]
        g = way.give(held["g"])
        if way.library != "torch":
            return list(self._call(way, case, [g, *arrays, *ids], way.backend))
        leaves = [x.detach().requires_grad_() for x in arrays]
        scores = self._call(way, case, leaves + ids, way.backend)
        if not scores.requires_grad:  # nothing to differentiate: no entry at all
            return [torch.zeros_like(x) for x in leaves]
        grads = attempt(way, torch.autograd.grad, scores, leaves, g.to(scores.dtype), allow_unused=True)
        return [torch.zeros_like(x) if y is None else y for x, y in zip(leaves, grads, strict=True)]

    def _acc(self, held: dict) -> float:
        return oracle64.ACC[oracle64.compute(*(held[n].view for n in ("q", "k", "w")))]

    def _rows(self, held: dict) -> torch.Tensor:
        """[B, 1 or S, P or T, E]: the entries each query meets, zeros where a slot is empty."""
        k = value(held["k"]).double()
        if not self.slots:
            return k[:, None]
        seen, ids = self._seen({}, held), value(held["ids"])
        if k.shape[1] == 0:
            return k.new_zeros((*ids.shape, k.shape[2]))
        batch = torch.arange(k.shape[0], device=k.device)[:, None, None]
        return torch.where(seen[..., None], k[batch, torch.where(seen, ids, 0).long()], 0.0)

    def _unmasked(self, way: Way) -> bool:
        return way.library == "torch" and way.backend != "tilelang" and not self.slots

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        q, w = value(held["q"]).double(), value(held["w"]).double()
        rows, acc, seen = self._rows(held), self._acc(held), self._seen(case, held)
        dtype = DTYPES[oracle64.compute(*(held[n].view for n in ("q", "k", "w")))]
        if self.gradient:
            self._judge_grad(way, case, held, got, v, q, rows, w, seen)
            return
        want, bound = oracle64.index_scores(q, rows, w, self._scale(case), acc)
        masked = torch.where(seen, want, -INF)
        if self._unmasked(way):
            if way.backend == "auto":  # the kernels' answer or the reference's
                got[0] = torch.where(~seen & (got[0] == -INF), want.nan_to_num(0.0).to(got[0].dtype), got[0])
                bound = torch.where(seen, bound, INF)
            masked = want
        if way.backend in ("auto", "torch") and not self.slots and case["unseen"] != "plain" and self._unmasked(way):
            got[0], masked = torch.where(seen, got[0], 0.0), torch.where(seen, want, 0.0)
        v.close("scores", got[0], (masked, bound), dtype)

    def _judge_grad(self, way, case, held, got, v, q, rows, w, seen) -> None:
        acc = self._acc(held)
        g = value(held["g"]).double()
        if self._unmasked(way):
            if way.backend == "auto" or case["g unseen"] == "NaN" or case["unseen"] != "plain":
                return  # which pairs count is the backend's choice
            seen = torch.ones_like(seen)
        unit = oracle64.UNIT[case["dtype"]] if not way.reference else 0.0
        if rows.shape[1] != q.shape[1]:
            rows = rows.expand(-1, q.shape[1], -1, -1)
        # A product of an unseen pair with NaN is no NaN: such pairs are zeros here.
        rows = torch.where(seen[..., None], rows, 0.0)
        (gq, eq), (parts, bounds, noises), (gw, ew) = oracle64.index_scores_grad(
            g, q, rows, w, self._scale(case), acc, unit, seen
        )
        if self.slots:
            at = Attention.__new__(Attention)
            entries = held["k"].view.shape[1]
            at.batch, at.keys, at.valid = q.shape[0], entries, seen
            at.ids = torch.where(seen, value(held["ids"]), 0).long()
            total = [at._scattered(x) for x in (parts, bounds, noises)]
        else:
            total = [x.sum(1) for x in (parts, bounds, noises)]
        ek = total[1] + oracle64.SIGMAS * total[2].sqrt()
        dtypes = [held[n].view.dtype for n in ("q", "k", "w")]
        pairs = ((gq, eq), (total[0], ek.nan_to_num(0.0)), (gw, ew))
        for label, x, pair, dtype in zip(("grad_q", "grad_k", "grad_w"), got, pairs, dtypes, strict=True):
            v.close(label, x, rounded(*pair, dtype), dtype)


class ScoresGradOp(ScoresOp):
    name, functions, gradient = "index scores gradient", {"array": "dsv4_indexer_scores_grad"}, True


class SlotScoresOp(ScoresOp):
    name, functions, slots = "index scores at ids", {"array": "dsv4_indexer_topk_scores"}, True


class SlotScoresGradOp(ScoresOp):
    name, functions, gradient, slots = (
        "index scores at ids gradient",
        {"array": "dsv4_indexer_topk_scores_grad"},
        True,
        True,
    )


class TopkOp(ScoresOp):
    """Exact where sums are exact (small integers); else no chosen entry may score less than one left out."""

    name, functions = "index top-k", {"array": "dsv4_indexer_topk"}

    def torch_backends(self) -> tuple[str, ...]:
        return ()

    def draw(self, choose, way: Way) -> None:
        super().draw(choose, way)
        choose("topk", [1, 2, 3, 8, 16, 64, 128, 512, 1024, 0])
        choose("order", ["id", "score"])
        choose("return scores", [False, True])
        choose("documents", [False, False, False, True])
        choose("score NaN", [False, False, False, True])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        held = super().make(way, case)
        b, s = held["q"].view.shape[:2]
        p, seed = held["k"].view.shape[1], case["seed"]
        if case["score NaN"] and case["k layout"] != "stride 0" and p:
            k = value(held["k"]).clone()
            k[:, ::5] = math.nan
            held["k"] = hold(k, case["k layout"], 0xFF)
        if case["documents"]:
            for name, shape, high in (("qs", (b, s), 4), ("qp", (b, s), 50), ("ps", (b, p), 4), ("pp", (b, p), 50)):
                held[name] = hold(integers(seed, name, shape, 0, high, way.device), "contiguous", 0)
        return held

    def _seen(self, case: dict, held: dict) -> torch.Tensor:
        if "qs" not in held:
            return super()._seen(case, held)
        qs, qp, ps, pp = (held[n].view for n in ("qs", "qp", "ps", "pp"))
        same = (qs[:, :, None] == ps[:, None, :]) & (qs[:, :, None] != 0)
        return same & (pp[:, None, :] < ((qp + 1) // case["R"])[:, :, None])

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        arrays = [way.give(held[n]) for n in ("q", "k", "w")]
        options = {"compress_ratio": case["R"], "softmax_scale": self._scale(case), "backend": way.backend}
        options |= {"query_start": case["start"], "order": case["order"], "return_scores": case["return scores"]}
        if case["documents"]:
            names = ("q_segment_ids", "q_local_positions", "pooled_segment_ids", "pooled_positions")
            options |= {n: way.give(held[x]) for n, x in zip(names, ("qs", "qp", "ps", "pp"), strict=True)}
        got = attempt(way, dsv4cp.dsv4_indexer_topk, *arrays, case["topk"], **options)
        return list(got) if case["return scores"] else [got]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        q, w = value(held["q"]).double(), value(held["w"]).double()
        scores, bound = oracle64.index_scores(q, self._rows(held), w, self._scale(case), self._acc(held))
        scores = torch.where(self._seen(case, held), scores, -INF)
        scores = torch.where(scores.isnan(), -INF, scores)
        k, entries = case["topk"], scores.shape[-1]
        if not v._alike("ids", got[0], torch.int32, (*scores.shape[:-1], k)):
            return
        ids = got[0].long()
        want_ids, _ = oracle64.topk(scores, k, case["order"])
        exact = case["values"] in ("integers", "zeros", "equal") and case["scale"] in (0.0,)
        v.equal("how many", (ids >= 0).sum(-1), (want_ids >= 0).sum(-1))
        chosen = torch.zeros((*scores.shape[:-1], entries + 1), dtype=torch.int64, device=scores.device)
        v.true("ids in range", ((ids >= -1) & (ids < max(entries, 1))).all())
        chosen.scatter_add_(
            -1, torch.where(ids >= 0, ids.clamp(max=max(entries - 1, 0)), entries), torch.ones_like(ids)
        )
        chosen = chosen[..., :entries]
        v.true("ids distinct", (chosen <= 1).all())
        v.true("-1 last", ((ids[..., 1:] < 0) | (ids[..., :-1] >= 0)).all())
        if case["order"] == "id":
            v.true("ascending", ((ids[..., 1:] > ids[..., :-1]) | (ids[..., 1:] < 0)).all())
        if entries and k:
            worst = torch.where(chosen > 0, scores + bound, INF).amin(-1)
            best = torch.where(chosen > 0, -INF, scores - bound).amax(-1)
            v.true("best chosen", (worst >= best).all())
            if exact:
                v.equal("ids", got[0], want_ids.int())
        if case["return scores"]:
            dtype = DTYPES[oracle64.compute(*(held[n].view for n in ("q", "k", "w")))]
            at = ids.clamp(min=0, max=max(entries - 1, 0))
            if entries:
                values = torch.where(ids >= 0, scores.gather(-1, at), -INF)
                v.close("scores", got[1], (values, bound.gather(-1, at)), dtype)
            if case["order"] == "score":
                v.true("descending", (got[1][..., 1:] <= got[1][..., :-1]).all())


SPECIAL = (math.nan, INF, -INF, 0.0, -0.0, 1.0, -1.0, 6e4, -6e4)


def special_scores(case: dict, shape: tuple[int, ...], device) -> torch.Tensor:
    """Scores with NaN, infinities, both zeros and many ties."""
    seed = case["seed"]
    x = floats(seed, "scores", shape, case["dtype"], "integers" if case["ties"] else "normal", device)
    if case["special"]:
        values = torch.tensor(SPECIAL, dtype=torch.float64, device=device).to(x.dtype)
        which = integers(seed, "special", shape, 0, 4 * len(SPECIAL), device)
        x = torch.where(which < len(SPECIAL), values[which % len(SPECIAL)], x)
    return x


class SelectOp(Op):
    name, functions = "selection", {"array": "select_indexer_topk"}

    def draw(self, choose, way: Way) -> None:
        choose("dtype", ["float32", "float32", "float32", *half_dtypes(way)])
        choose("leading", [[1], [3], [2, 5], [], [0], [2, 0], [300]])
        choose("P", [1, 2, 5, 31, 64, 100, 129, 1000, 2049, 8320, 0])
        choose("topk", [1, 2, 4, 16, 64, 512, 1024, 2048, 0])
        choose("order", ["id", "score"])
        choose("return scores", [False, True])
        choose("ties", [False, True])
        choose("special", [False, True])
        choose("layout", layouts(way, "stride 0"))
        choose("fill", [0xFF, 0x5A])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        leading = [min(n, 2**19 // max(case["P"], 1)) if n > 9 else n for n in case["leading"]]
        return {"scores": hold(special_scores(case, (*leading, case["P"]), way.device), case["layout"], 0xFF)}

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        options = {"order": case["order"], "return_scores": case["return scores"], "backend": way.backend}
        got = attempt(way, dsv4cp.select_indexer_topk, way.give(held["scores"]), case["topk"], **options)
        return list(got) if case["return scores"] else [got]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        scores = value(held["scores"])
        ids, values = oracle64.topk(scores, case["topk"], case["order"])
        v.equal("ids", got[0], ids.int())
        if case["return scores"]:
            dtype = DTYPES[oracle64.compute(scores)]
            v.close("scores", got[1], (torch.where(ids < 0, -INF, values), torch.zeros_like(values)), dtype)


class ExtractOp(Op):
    name, functions = "extraction", {"array": "extract_indexer_topk_scores"}

    def torch_backends(self) -> tuple[str, ...]:
        return ("torch",)

    def draw(self, choose, way: Way) -> None:
        choose("dtype", ["float32", *half_dtypes(way), *(["float64"] if way.library != "array_api_strict" else [])])
        choose("B", [1, 2, 3, 0])
        choose("S", [1, 3, 17, 300, 0])
        choose("K", [1, 2, 7, 64, 129, 1000, 0])
        choose("T", [1, 2, 3, 33, 64, 129, 640, 0])
        choose("ids", list(IDS))
        choose("id dtype", ["int32", "int64"])
        choose("empty rows", [False, True])
        choose("ties", [False, True])
        choose("special", [False, True])
        choose("layout", layouts(way, "stride 0"))
        choose("ids layout", layouts(way))
        choose("fill", [0xFF, 0x5A])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        b, s, k, t = (case[n] for n in "BSKT")
        scores = special_scores(case, (b, s, k), way.device)
        ids = make_ids(case, way.device, k, (b, s, t), case["ids"], case["id dtype"])
        return {"scores": hold(scores, case["layout"], 0xFF), "ids": hold(ids, case["ids layout"], 0)}

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        scores, ids = way.give(held["scores"]), way.give(held["ids"])
        if way.library == "torch":
            return [_torch().extract_indexer_topk_scores_torch(scores, ids)]
        return [attempt(way, dsv4cp.extract_indexer_topk_scores, scores, ids, backend=way.backend)]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        scores, ids = value(held["scores"]), value(held["ids"])
        if scores.shape[-1] == 0:
            want = torch.full(ids.shape, -INF, dtype=scores.dtype, device=scores.device)
        else:
            seen = (ids >= 0) & (ids < scores.shape[-1])
            want = torch.where(seen, scores.gather(-1, torch.where(seen, ids, 0).long()), -INF)
        v.close("scores", got[0], (want.double(), torch.zeros_like(want).double()), scores.dtype)


# --- Sinkhorn ------------------------------------------------------------------------------------------------


class SinkhornOp(Op):
    name, functions, gradient = "Sinkhorn", {"array": "dsv4_sinkhorn_normalize"}, False

    def torch_backends(self) -> tuple[str, ...]:
        from typing import get_args

        return get_args(_torch().Dsv4SinkhornBackend)

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
            y = attempt(way, _torch().dsv4_sinkhorn_normalize, x, **numbers)
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


# --- Index lists ---------------------------------------------------------------------------------------------


class PlanOp(Op):
    name, functions = "plan", {"array": "plan_dsv4_sparse_indices"}

    def torch_backends(self) -> tuple[str, ...]:
        return ("auto",)

    def draw(self, choose, way: Way) -> None:
        choose(
            "layout of plan",
            ["cuda", "cudnn", "reference", "flat"] if way.library != "torch" else ["cuda", "cudnn", "reference"],
        )
        choose("promise", [False, True])
        choose("B", [1, 2, 3, 0])
        choose("S", [1, 2, 5, 17, 65, 0])
        choose("K", [1, 2, 7, 64, 129, 1000, 50000, 0])
        choose("T", [1, 2, 3, 31, 33, 64, 65, 127, 128, 129, 640, 1152, 2561, 0])
        choose("ids", list(IDS))
        choose("id dtype", ["int32", "int64"])
        choose("empty rows", [False, True])
        choose("ids layout", layouts(way, "stride 0"))
        choose("fill", [0xFF, 0x5A])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        b, s, k, t = (case[n] for n in "BSKT")
        ids = make_ids(case, way.device, k, (b, s, t), case["ids"], case["id dtype"])
        return {"ids": hold(ids, case["ids layout"], 0)}

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        ids, keys, layout = way.give(held["ids"]), case["K"], case["layout of plan"]
        if way.library == "torch":
            name = {"reference": "torch", "cuda": "tilelang"}.get(layout, layout)
            plan = _torch().plan_dsv4_sparse_indices(ids, keys, name, case["promise"])
        elif layout == "flat":
            return [dsv4cp.flatten_sparse_indices(ids, keys)]
        else:
            plan = attempt(
                way, dsv4cp.plan_dsv4_sparse_indices, ids, keys, layout, case["promise"], index_backend=way.backend
            )
        return [plan.indices, plan.topk_length, plan.valid_rows]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        ids, keys = value(held["ids"]), case["K"]
        valid = (ids >= 0) & (ids < keys)
        if case["layout of plan"] == "flat":
            first = torch.arange(ids.shape[0], device=ids.device)[:, None, None] * keys
            want = torch.where(valid, torch.where(valid, ids, 0).long() + first, -1)
            v.equal("flat", got[0], want.flatten(0, 1))
        elif case["layout of plan"] == "cudnn":
            width = max(1, -(-ids.shape[2] // 128)) * 128
            flat, lengths = oracle64.plan_cudnn(ids, keys, width)
            v.equal("indices", got[0], flat.int())
            v.equal("topk_length", got[1], lengths.int())
            rows = lengths.nonzero()[:, 0]
            if case["promise"] or rows.shape[0] == lengths.shape[0]:
                v.true("valid_rows is None", got[2] is None)
            else:
                v.true("valid_rows is an array", got[2] is not None)
                if got[2] is not None:
                    v.equal("valid_rows", got[2], rows)
        else:
            v.equal("indices", got[0], torch.where(valid, ids, -1).int())
            v.true("lengths and rows are None", got[1] is None and got[2] is None)


class BuildOp(Op):
    """Any mix of positions, documents, given top-k and masks; image spans by naive.py."""

    name, functions = "index lists", {"array": "build_dsv4_sparse_topk_indices"}

    def torch_backends(self) -> tuple[str, ...]:
        return ("auto",)

    def draw(self, choose, way: Way) -> None:
        choose("spans", [False, False, False, True])
        choose("B", [1, 2, 3, 0])
        choose("N", [1, 2, 9, 15, 40, 130, 600, 0])  # keys of the sequence
        choose("S", [1, 2, 7, 33])  # queries, where positions are given
        choose("K", [1, 3, 12, 40, 700, 0])
        choose("W", [4, 0, 1, 2, 8, 128])
        choose("P", [0, 1, 2, 6, 100])
        choose("R", [4, 1, 2, 128])
        choose("k", [1, 0, 5, 70, 512])
        choose("positions", ["none", "none", "shared", "rows", "hostile"])
        choose("given", [False, True])
        choose("documents", [False, False, True])
        choose("mask", ["none", "none", "float32", "bfloat16", "shared"])
        choose("dtype", ["int64", "int32"])
        choose("int dtype", ["int64", "int32"])
        choose("ids layout", layouts(way))
        choose("fill", [0xFF, 0x5A])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        device, seed, layout = way.device, case["seed"], case["ids layout"]
        b, n, p, ints = case["B"], case["N"], case["P"], DTYPES[case["int dtype"]]
        held: dict[str, Held | None] = {}
        if way.library != "torch":
            held["like"] = hold(torch.zeros(1, device=device), "contiguous", 0)
        if case["spans"]:
            arrays = {n: x for n, x in self._spans(case).items() if isinstance(x, np.ndarray)}
            return held | {n: hold(torch.from_numpy(x).to(device), layout, 0) for n, x in arrays.items()}
        s = n if case["positions"] == "none" else case["S"]

        def ids(name: str, shape: tuple[int, ...], low: int, high: int) -> Held:
            return hold(integers(seed, name, shape, low, high, device).to(ints), layout, 0)

        if case["positions"] != "none":
            low, high = (-3, n + 5) if case["positions"] == "hostile" else (0, max(n, 1))
            held["q_positions"] = ids("position", (s,) if case["positions"] == "shared" else (b, s), low, high)
        if case["given"] and p:
            held["compressed_topk"] = ids("given", (b, s, case["k"]), -3, p + 4)
        if case["documents"]:
            held["q_segment_ids"], held["q_local_positions"] = (
                ids("segment", (b, s), 0, 3),
                ids("local", (b, s), 0, n + 1),
            )
            held["pooled_segment_ids"] = ids("entry", (b, p), 0, 3)
            held["pooled_positions"] = ids("place", (b, p), 0, 5)
        if case["mask"] != "none":
            values = torch.tensor([0.0, 0.0, 0.0, -0.0, 3.0, math.nan, -1e-6, -INF], device=device)
            shape = (1 if case["mask"] == "shared" else b, 1, s, case["K"] + 2)
            mask = values[integers(seed, "mask", shape, 0, 8, device)]
            held["attention_mask"] = hold(
                mask.to(torch.bfloat16 if case["mask"] == "bfloat16" else torch.float32), layout, 0xFF
            )
            if way.library == "array_api_strict" and case["mask"] == "bfloat16":
                held["attention_mask"] = hold(mask, layout, 0xFF)
        return held

    @staticmethod
    def _spans(case: dict) -> dict[str, Any]:
        """A small call whose documents, positions and image spans agree with each other."""
        from .index_ways import random_call

        seed = case["seed"] % 2**20
        while "vision_token_types" not in (call := random_call(seed)):
            seed += 1
        return call

    def _numbers(self, case: dict, held: dict) -> dict[str, Any]:
        if case["spans"]:
            return {n: x for n, x in self._spans(case).items() if not isinstance(x, np.ndarray)}
        s = case["N"] if case["positions"] == "none" else case["S"]
        call = {"batch_size": case["B"], "seq_len": s, "key_len": case["K"], "window_size": case["W"]}
        call |= {"compress_ratio": case["R"], "n_pooled": case["P"]}
        if case["positions"] != "none":
            call["vanilla_key_len"] = case["N"]
        return call

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        arrays = {n: way.give(h) for n, h in held.items()}
        call = self._numbers(case, held) | {"dtype": case["dtype"]}
        if way.library == "torch":
            return [_torch().build_dsv4_sparse_topk_indices(**call, **arrays, device=way.device)]
        like = arrays.pop("like")
        return [attempt(way, dsv4cp.build_dsv4_sparse_topk_indices, **call, **arrays, like=like, backend=way.backend)]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        call = self._numbers(case, held) | {n: value(h) for n, h in held.items() if n != "like"}
        device = got[0].device
        want = oracle64.build(call | {"device": device})
        if want is None:
            from . import naive

            want = torch.from_numpy(naive.build_indices(**call)).to(device)
        v.equal("ids", got[0], want.to(DTYPES[case["dtype"]]))


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        AttentionOp(), AttentionGradOp(), DenseOp(), ScoresOp(), ScoresGradOp(), SlotScoresOp(), SlotScoresGradOp(),
        TopkOp(), SelectOp(), ExtractOp(), SinkhornOp(), SinkhornGradOp(), PlanOp(), BuildOp(),
    )
}  # fmt: skip
