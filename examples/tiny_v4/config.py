"""Sizes of the model, and which implementation runs its ops."""

from __future__ import annotations

from dataclasses import dataclass

import dsv4cp.torch_ops as ops


@dataclass(frozen=True)
class Config:
    """One model and how it is trained. Letters as everywhere in dsv4cp."""

    ratios: tuple[int, ...]  # of each layer: 0 window only, 4 window + indexer's choice, 128 window + all entries
    width: int  # C, channels of a stream
    heads: int  # H
    head_dim: int  # D
    rope_dim: int  # the last channels of a head that carry the position
    q_rank: int  # queries are made through this many channels
    groups: int  # heads / groups heads share an output projection
    o_rank: int  # channels that each group's projection keeps
    index_heads: int  # I
    index_dim: int  # E
    topk: int  # compressed entries that the indexer chooses for a query
    window: int  # W, raw keys that a query sees
    hidden: int  # of the feed-forward part
    tokens: int  # S, of a sequence
    batch: int  # B
    steps: int
    rate: float  # highest learning rate
    streams: int = 4  # M
    sinkhorn_repeat: int = 20
    vocabulary: int = 256


PRESETS = {
    # Two CPU cores, minutes.
    "cpu": Config(
        ratios=(0, 4, 128, 4), width=128, heads=4, head_dim=32, rope_dim=16, q_rank=64, groups=2, o_rank=64,
        index_heads=4, index_dim=16, topk=16, window=32, hidden=320, tokens=512, batch=4, steps=250, rate=4e-3,
    ),
    # A GPU, minutes; sizes that every backend's kernels take.
    "gpu": Config(
        ratios=(0, 4, 128, 4), width=256, heads=16, head_dim=512, rope_dim=64, q_rank=256, groups=4, o_rank=128,
        index_heads=64, index_dim=128, topk=128, window=128, hidden=768, tokens=1024, batch=4, steps=300, rate=2e-3,
    ),
    # The attention of V4-Flash (64 heads of 512 channels, top-k 512, window 128) in a model of 8 layers.
    "h200": Config(
        ratios=(0, 4, 128, 4, 128, 4, 128, 4), width=1024, heads=64, head_dim=512, rope_dim=64, q_rank=512, groups=8,
        o_rank=256, index_heads=64, index_dim=128, topk=512, window=128, hidden=2816, tokens=4096, batch=2, steps=300,
        rate=1e-3,
    ),
    # Sizes that a test can wait for.
    "small": Config(
        ratios=(0, 4, 128), width=64, heads=4, head_dim=64, rope_dim=32, q_rank=32, groups=2, o_rank=32,
        index_heads=4, index_dim=16, topk=8, window=16, hidden=128, tokens=256, batch=2, steps=30, rate=4e-3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Backends:
    """The `backend` argument of each op."""

    attention: str
    sinkhorn: str
    indexer: str


def choose_backends(name: str) -> tuple[Backends, list[str]]:
    """What --backend means for each op, and a line for each op that has no such kernels here.

    "torch" and "auto" are the same word for every op. "tilelang" (this package's kernels) and "cudnn" (NVIDIA's)
    must be there for attention, or the first call says why not; the other ops take the best they have.
    """
    if name in ("torch", "auto"):
        return Backends(name, name, name), []
    found, notes = {}, []
    for op, asked in (("sinkhorn", "sinkhorn"), ("indexer", "indexer")):
        there = ops.is_dsv4_kernel_available(asked)  # type: ignore[arg-type]
        found[op] = "tilelang" if there else "torch"
        if not there:
            notes.append(f"{op}: no CUDA kernels here, runs the torch reference")
    return Backends(attention=name, **found), notes
