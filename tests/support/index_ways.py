"""The ways to call the index functions on the CPU and on a GPU, and random hostile calls of the builder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dsv4cp


@dataclass(frozen=True)
class Way:
    """One library and backend that index cases run on."""

    library: str
    backend: str = "auto"
    device: str = "cpu"

    def array(self, x: Any) -> Any:
        """A NumPy array in this library; anything else unchanged."""
        if not isinstance(x, np.ndarray):
            return x
        if self.library == "array_api_strict":
            import array_api_strict

            return array_api_strict.asarray(x)
        if self.library == "cupy":
            import cupy

            return cupy.asarray(x)
        if self.library == "torch":
            import torch

            return torch.from_numpy(np.array(x)).to(self.device)
        return x

    def build(self, **arguments: Any) -> Any:
        arrays = {name: self.array(x) for name, x in arguments.items()}
        if self.library == "torch":
            from dsv4cp.sparse_indices import torch_bridge

            return torch_bridge.build_dsv4_sparse_topk_indices(**arrays, device=self.device)
        like = self.array(np.zeros(0))
        return dsv4cp.build_dsv4_sparse_topk_indices(**arrays, like=like, backend=self.backend)

    def plan(self, ids: np.ndarray, kv_sequence: int, layout: str, **more: Any) -> Any:
        if self.library == "torch":
            from dsv4cp.sparse_indices import torch_bridge

            layout = {"reference": "torch", "cuda": "tilelang"}.get(layout, layout)
            return torch_bridge.plan_dsv4_sparse_indices(self.array(ids), kv_sequence, layout, **more)
        ids = self.array(ids)
        return dsv4cp.plan_dsv4_sparse_indices(ids, kv_sequence, layout, index_backend=self.backend, **more)


WAYS = [
    pytest.param(Way("numpy"), id="numpy"),
    pytest.param(Way("array_api_strict"), id="strict"),
    pytest.param(Way("torch"), id="torch"),
    pytest.param(Way("cupy", "reference"), id="cupy-reference", marks=pytest.mark.gpu),
    pytest.param(Way("cupy", "auto"), id="cupy-auto", marks=pytest.mark.gpu),
    pytest.param(Way("torch", device="cuda"), id="torch-cuda", marks=pytest.mark.gpu),
]


def documents(rng: np.random.Generator, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(segment ids, local positions) of rows packed from documents of 1 to 6 tokens, with padding anywhere."""
    segments, locals_ = np.zeros((batch, length), np.int64), np.zeros((batch, length), np.int64)
    for b in range(batch):
        at, numbers = 0, iter(rng.permutation(length + 1) + 1)
        while at < length:
            size = min(int(rng.integers(1, 7)), length - at)
            padding = rng.random() < 0.2
            segments[b, at : at + size] = 0 if padding else next(numbers)
            locals_[b, at : at + size] = 0 if padding and rng.random() < 0.5 else np.arange(size)
            at += size
    return segments, locals_


def random_call(seed: int) -> dict[str, Any]:
    """Arguments of a build call: any mix of positions, documents, spans, given top-k and masks, with hostile values."""
    rng = np.random.default_rng(seed)
    batch, keys = int(rng.integers(1, 4)), int(rng.integers(1, 16))
    window, ratio, pooled = int(rng.integers(0, 9)), int(rng.integers(1, 4)), int(rng.integers(0, 6))
    call: dict[str, Any] = {
        "batch_size": batch,
        "seq_len": keys,
        "key_len": int(rng.integers(1, keys + pooled + 4)),
        "window_size": window,
        "compress_ratio": ratio,
        "n_pooled": pooled,
    }
    rows = np.tile(np.arange(keys), (batch, 1))
    if rng.random() < 0.5:  # some of the queries, in any order
        rows = np.stack([rng.choice(keys, max(1, keys // 2), replace=False) for _ in range(batch)])
        call.update(seq_len=rows.shape[1], vanilla_key_len=keys, q_positions=rows.astype(rng.choice(["i4", "i8"])))
    queries = rows.shape[1]
    packed = rng.random() < 0.5
    if packed:
        segments, locals_ = documents(rng, batch, keys)
        call["q_segment_ids"] = np.take_along_axis(segments, rows, axis=1).astype(np.int32)
        call["q_local_positions"] = np.take_along_axis(locals_, rows, axis=1)
    if pooled and rng.random() < 0.5:
        call["compressed_topk"] = rng.integers(-3, pooled + 4, (batch, queries, int(rng.integers(0, 6))), np.int32)
    if packed and (rng.random() < 0.5 or (pooled and "compressed_topk" not in call)):
        call["pooled_segment_ids"] = rng.integers(0, 6, (batch, pooled))
        call["pooled_positions"] = rng.integers(0, 4, (batch, pooled))
    if rng.random() < 0.4:
        shape = (int(rng.choice([1, batch])), 1, queries, call["key_len"] + int(rng.integers(0, 3)))
        call["attention_mask"] = rng.choice([0.0, -0.0, 3.0, np.nan, -1e-9, -np.inf], shape).astype(np.float32)
    if rng.random() < 0.5:
        call["vision_token_types"] = rng.choice([-1, 0, 1, 2, 4], (batch, keys)).astype(rng.choice(["i1", "i8"]))
        call["max_image_tokens"] = int(rng.integers(0, 8))
    return call
