"""What the fuzzer's ops share: how a case is drawn, made, called on a way and judged.

A case is a dict of plain values (JSON). `draw` gets a function choose(name, options) that the drivers supply; simpler
options come first, so that shrinking moves towards them. Backends come from what each ops.py offers: a new one needs no
line here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dsv4cp import _backend
from dsv4cp.commands import offers

from .fuzz_arrays import DTYPES, LAYOUTS, Canaries, Held, Way, constants, integers
from .oracle64 import INF, Pair

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
        if isinstance(error, RuntimeError) and "backward_impl: 'deterministic'" in str(error):  # said, not computed
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
    # Of calls that come again the third plays what was noted of the second (dsv4cp/_programs.py); the fourth's gradient
    # is known by the forward call (_bridge_programs.py).
    runs = 4 if way.library in ("torch", "cupy") and way.device == "cuda" and case["seed"] % 2 else 1
    with Canaries(way, case["fill"]) as canaries:
        for _ in range(runs):
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


# --- What ops share ------------------------------------------------------------------------------------------

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
        fit = tuple(x for x in limits if dtype == "int64" or -(2**31) <= x < 2**31)
        values = constants(fit, torch.int64, device)
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


def value(held: Held) -> torch.Tensor:
    """What the library's array holds."""
    if not held.flip:
        return held.view
    axis = next(i for i in range(held.view.ndim) if held.view.shape[i] > 1)
    return held.view.flip(axis)


def torch_ops() -> Any:
    """dsv4cp.torch_ops, imported when a way of torch is tried."""
    from dsv4cp import torch_ops as module

    return module


def _plan_backend(way: Way, held: dict) -> str:
    """An "auto" plan is for bfloat16 where there are kernels; other dtypes want the plan by name."""
    return way.backend
