"""The plan that sparse_indices makes and sparse_attention reads: the only type two slices share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class SparseIndexPlan:
    """Key ids of every query, laid out once for all layers that share a selection.

    It is frozen, and no call that uses it changes it. `backend` names the layout:

    - "reference" and "cuda" ("torch", "sparse_torch" and "tilelang" in torch_ops): `indices` int32
      [B, S, T], contiguous, -1 masked, every id inside [0, kv_sequence); `topk_length` and `valid_rows`
      are None.
    - "cudnn": `indices` int32 [B*S, 1, padded T], contiguous, global flat coordinates (row b adds
      b*kv_sequence), ascending valid prefix, -1 suffix; `topk_length` int32 [B*S] counts the prefix;
      `valid_rows` int64 holds the ids of the rows with at least one key, None when every row has one.
    """

    backend: str
    indices: Any
    topk_length: Any
    valid_rows: Any
    kv_sequence: int
