"""The fuzzer's cases of the indexer: scores, their gradients, selection, extraction."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from typing import Any, get_args

import torch

import dsv4cp

from . import oracle64
from .fuzz_arrays import DTYPES, Held, Way, constants, floats, hold, integers
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
from .oracle64 import INF, Attention, rounded


@contextlib.contextmanager
def deterministic(wanted: bool):
    """torch.use_deterministic_algorithms inside, as a caller sets it for gradients in a fixed order."""
    kept = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or kept)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(kept)


class ScoresOp(Op):
    name, functions, gradient, slots = "index scores", {"array": "dsv4_indexer_scores"}, False, False

    def torch_backends(self) -> tuple[str, ...]:
        return get_args(torch_ops().Dsv4IndexerBackend)

    def draw(self, choose, way: Way) -> None:
        kernels = not way.reference
        dim = choose("E", [128, 128, 128, 64, 32] if kernels else [8, 1, 3, 16, 128])
        half = half_dtypes(way)
        if kernels:  # as the specialisations of fuzz_kernels.py
            half = half[:1] * 2 + half if dim == 128 else half[:1]
        dtype = choose("dtype", half)
        choose("w dtype", [dtype, dtype, "float32"])
        choose("I", [64, 64, 32, 16, 8, 1, 3, 33, 65, 128] if kernels else [1, 2, 3, 4, 8, 64])
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
            choose("impl", ["atomic", "deterministic"] if "backward_impl" in self._parameters() else ["atomic"])
            choose("cap", ["default", "least"] if "backward_workspace_bytes" in self._parameters() else ["default"])

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

    def _call(self, way: Way, case: dict, arrays: list[Any], backend: str, **more: Any) -> Any:
        options = more | {"compress_ratio": case["R"], "softmax_scale": self._scale(case), "backend": backend}
        if not self.slots:
            options |= {"query_start": case["start"]}
        module = torch_ops() if way.library == "torch" else dsv4cp
        name = "dsv4_indexer_topk_scores" if self.slots else "dsv4_indexer_scores"
        if self.gradient and way.library != "torch":
            name += "_grad"
        return attempt(way, getattr(module, name), *arrays, **options)

    def _parameters(self) -> list[str]:
        """Names of the array function's parameters: some gradients have several implementations."""
        return list(inspect.signature(getattr(dsv4cp, self.functions["array"])).parameters)

    @staticmethod
    def _scale(case: dict) -> float:
        """A power of two for integers, whose scores are then exact."""
        scale = case["scale"] * case["E"] ** -0.5
        if case["values"] != "integers" or scale == 0.0:
            return scale
        return math.copysign(2.0 ** round(math.log2(abs(scale))), scale)

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        arrays = [way.give(held[n]) for n in ("q", "k", "w")]
        ids = [way.give(held["ids"])] if self.slots else []
        if not self.gradient:
            return [self._call(way, case, arrays + ids, way.backend)]
        g = way.give(held["g"])
        options = {"backward_impl": case["impl"]} if "backward_impl" in self._parameters() else {}
        if way.library != "torch":
            arguments = [g, *arrays, *ids]
            got = list(self._call(way, case, arguments, way.backend, **options))
            if case["cap"] == "least":
                cap = {"backward_workspace_bytes": self._least(way, case, arguments, options)}
                got += list(self._call(way, case, arguments, way.backend, **options, **cap))
            return got
        with deterministic(case["impl"] == "deterministic" and way.backend == "tilelang"):
            return self._torch_grads(way, case, arrays, ids, g)

    def _least(self, way: Way, case: dict, arguments: list[Any], options: dict) -> int:
        """The smallest cap the call says it takes."""
        try:
            self._call(way, case, arguments, way.backend, **options, backward_workspace_bytes=1)
        except ValueError as error:
            if (least := re.search(r"at least (\d+)", str(error))) is not None:
                return int(least[1])
        return 1

    def _torch_grads(self, way: Way, case: dict, arrays: list[Any], ids: list[Any], g: torch.Tensor) -> list[Any]:
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
        half = None if way.reference or case["dtype"] not in ("bfloat16", "float16") else case["dtype"]
        if rows.shape[1] != q.shape[1]:
            rows = rows.expand(-1, q.shape[1], -1, -1)
        # A product of an unseen pair with NaN is no NaN: such pairs are zeros here.
        rows = torch.where(seen[..., None], rows, 0.0)
        (gq, eq), (parts, bounds, noises), (gw, ew) = oracle64.index_scores_grad(
            g, q, rows, w, self._scale(case), acc, half, seen, self._alike(case, held, seen)
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
        if self._by_integers(way, case):
            ek = ek + self._of_integers(g, q, w, self._scale(case), at)
        dtypes = [held[n].view.dtype for n in ("q", "k", "w")]
        pairs = ((gq, eq), (total[0], ek.nan_to_num(0.0)), (gw, ew))
        for n, (label, pair, dtype) in enumerate(zip(("grad_q", "grad_k", "grad_w"), pairs, dtypes, strict=True)):
            v.close(label, got[n], rounded(*pair, dtype), dtype)
            if len(got) > 3 and case["impl"] == "deterministic":
                v.equal(f"{label}, least workspace", got[3 + n], got[n])
            elif len(got) > 3:
                v.close(f"{label}, least workspace", got[3 + n], rounded(*pair, dtype), dtype)

    def _alike(self, case: dict, held: dict, seen: torch.Tensor) -> torch.Tensor | None:
        """[B, S, P or T]: how many terms of one sum may have equal numbers. With few different incoming gradients these
        are the slots of a query that name one entry; where the queries' weights are equal too, those of all queries."""
        if case["g values"] == "normal" and case["g layout"] != "stride 0":
            return None
        count = seen.double()
        if self.slots:
            ids = torch.where(seen, value(held["ids"]), 0).long()
            entries = max(1, held["k"].view.shape[1])
            named = count.new_zeros((*ids.shape[:2], entries)).scatter_add_(2, ids, count)
        else:
            named = count
        if case["values"] in ("equal", "integers") or case["w layout"] == "stride 0":
            named = named.sum(1, keepdim=True).expand_as(named)
        return (named.gather(2, ids) if self.slots else named).clamp(min=1.0)

    def _by_integers(self, way: Way, case: dict) -> bool:
        """grad_k is a sum of scaled integers: kernels, asked for a fixed order."""
        by_kernels = way.backend == "tilelang" if way.library == "torch" else not way.reference
        return self.slots and case["impl"] == "deterministic" and by_kernels

    @staticmethod
    def _of_integers(g: torch.Tensor, q: torch.Tensor, w: torch.Tensor, scale: float, at: Attention) -> torch.Tensor:
        """What they lose, [B, P, 1]: half a quantum a slot. Bounds are those of indexer_grad_finish.cu; the quantum is
        for all slots of the batch row, whichever entry they name."""
        bound = 2 * abs(scale) * g.abs() * (w.abs() * q.abs().amax(3)).sum(2, keepdim=True)
        slots = torch.full((), max(1, at.valid.shape[1] * at.valid.shape[2]), device=g.device)
        count = at._scattered(at.valid[..., None].double())
        return 0.5 * count * oracle64.fixed_quantum(at._largest(bound), slots)


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
        exact = case["values"] in ("integers", "zeros") or case["scale"] == 0.0
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
        values = constants(SPECIAL, torch.float64, device).to(x.dtype)
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
        choose("R", [None, None, 4, 1, 3, 128])
        choose("start", [0, 0, 1, 7, 1000, 30000])
        choose("unseen", ["plain", "NaN", "inf"])

    def make(self, way: Way, case: dict) -> dict[str, Held | None]:
        leading = [min(n, 2**19 // max(case["P"], 1)) if n > 9 else n for n in case["leading"]]
        scores = special_scores(case, (*leading, case["P"]), way.device)
        if case["unseen"] != "plain":
            bad = math.nan if case["unseen"] == "NaN" else INF
            scores = torch.where(self._seen(case, scores), scores, bad).to(scores.dtype)
        return {"scores": hold(scores, case["layout"], 0xFF)}

    @staticmethod
    def _causal(case: dict, scores: torch.Tensor) -> bool:
        return case["R"] is not None and scores.ndim > 1

    def _seen(self, case: dict, scores: torch.Tensor) -> torch.Tensor:
        """Broadcasts to the scores: entries that may be chosen."""
        if not self._causal(case, scores):
            return torch.ones((), dtype=torch.bool, device=scores.device)
        return oracle64.causal(*scores.shape[-2:], case["R"], case["start"], scores.device)[0]

    def run(self, way: Way, case: dict, held: dict[str, Held | None]) -> list[Any]:
        options = {"order": case["order"], "return_scores": case["return scores"], "backend": way.backend}
        if self._causal(case, held["scores"].view):
            options |= {"compress_ratio": case["R"], "query_start": case["start"]}
        got = attempt(way, dsv4cp.select_indexer_topk, way.give(held["scores"]), case["topk"], **options)
        return list(got) if case["return scores"] else [got]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        scores = value(held["scores"])
        seen = torch.where(self._seen(case, scores), scores, -INF)
        ids, values = oracle64.topk(seen, case["topk"], case["order"])
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
            return [torch_ops().extract_indexer_topk_scores_torch(scores, ids)]
        return [attempt(way, dsv4cp.extract_indexer_topk_scores, scores, ids, backend=way.backend)]

    def judge(self, way: Way, case: dict, held: dict, got: list[torch.Tensor], v: Verdict) -> None:
        scores, ids = value(held["scores"]), value(held["ids"])
        if scores.shape[-1] == 0:
            want = torch.full(ids.shape, -INF, dtype=scores.dtype, device=scores.device)
        else:
            seen = (ids >= 0) & (ids < scores.shape[-1])
            want = torch.where(seen, scores.gather(-1, torch.where(seen, ids, 0).long()), -INF)
        v.close("scores", got[0], (want.double(), torch.zeros_like(want).double()), scores.dtype)
