"""The fuzzer's cases of index lists and plans."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import dsv4cp

from . import oracle64
from .fuzz_arrays import DTYPES, Held, Way, constants, hold, integers
from .fuzz_base import (
    IDS,
    Op,
    Verdict,
    attempt,
    layouts,
    make_ids,
    torch_ops,
    value,
)
from .oracle64 import INF


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
            plan = torch_ops().plan_dsv4_sparse_indices(ids, keys, name, case["promise"])
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
            values = constants((0.0, 0.0, 0.0, -0.0, 3.0, math.nan, -1e-6, -INF), torch.float32, device)
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
            return [torch_ops().build_dsv4_sparse_topk_indices(**call, **arrays, device=way.device)]
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
