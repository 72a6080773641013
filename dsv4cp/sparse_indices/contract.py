"""What the index functions accept: metadata checks that end in a Spec of plain numbers and booleans.

Nothing here looks at array values (that would be a hidden synchronisation on a GPU): ids and positions
outside their range are dealt with where they are read, never reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._arrays import (
    FLOATS,
    ID_DTYPES,
    INTEGERS,
    ArrayFacts,
    dtype_name,
    facts,
    library,
    require_dtype,
    require_shape,
    whole_number,
)

LAYOUTS = ("reference", "cuda", "cudnn")

# FlashMLA's Hopper kernels and cuDNN's indexer gradient take widths that are multiples of 128 only, cuDNN's
# attention reads tiles of 64 ids: rows of whole 128-id blocks fit all of them, and keep every row aligned for
# 16-byte loads. topk_length says where the ids end.
CUDNN_SLOT_MULTIPLE = 128

# uint64 has no order-preserving way into the int64 that positions are computed in.
POSITION_DTYPES = tuple(name for name in INTEGERS if name != "uint64")
LARGEST_SIZE = 2**60  # sums of a few sizes stay inside int64
INT32_COUNT = 2**31  # ids 0 .. INT32_COUNT - 1 fit int32


@dataclass(frozen=True)
class Spec:
    """One call of build_dsv4_sparse_topk_indices: result [batch, queries, width], raw slots before compressed ones.

    The implementations get it with the arrays as keywords; an array whose flag is False is not read.
    """

    batch: int  # B
    queries: int  # S
    keys: int  # key_len: ids outside [0, keys) become -1
    raw_keys: int  # vanilla_key_len: what shifts compressed ids
    window: int  # W as given
    image_tokens: int  # max_image_tokens, 0 without image spans
    image_keys: int  # entries per row of vision_token_types, 0 without image spans
    raw_width: int  # slots of the window (and image) part
    pooled: int  # P
    ratio: int  # R
    compressed_width: int  # slots of the compressed part: k of compressed_topk, else P
    width: int  # raw_width + compressed_width
    has_positions: bool  # q_positions [S] or [1, S] (positions_shared) or [B, S]
    positions_shared: bool
    has_mask: bool  # attention_mask [1, 1, S, >= keys] (mask_shared) or [B, 1, S, >= keys]
    mask_shared: bool
    images: bool  # vision_token_types [B, image_keys], or [image_keys] when B == 1
    given_topk: bool  # compressed_topk [B, S, compressed_width]
    documents: bool  # q_segment_ids, q_local_positions [B, S]
    pooled_documents: bool  # pooled_segment_ids, pooled_positions [B, P] filter the compressed part
    dtype: str  # of the result: "int32" or "int64"
    library: str
    xp: Any
    device: Any


@dataclass(frozen=True)
class PlanSpec:
    """One call of plan_dsv4_sparse_indices or flatten_sparse_indices: ids [batch, queries, slots]."""

    batch: int  # B
    queries: int  # S
    slots: int  # T
    kv_sequence: int  # K: ids outside [0, K) become -1
    layout: str  # one of LAYOUTS, or "flat" for flatten_sparse_indices
    padded_slots: int  # slots rounded up to CUDNN_SLOT_MULTIPLE, at least one block
    all_rows_nonempty: bool
    library: str
    xp: Any
    device: Any


def check(
    *,
    batch_size: Any,
    seq_len: Any,
    key_len: Any,
    window_size: Any,
    attention_mask: Any = None,
    compress_ratio: Any = 0,
    compressed_topk: Any = None,
    n_pooled: Any = 0,
    vanilla_key_len: Any = None,
    q_positions: Any = None,
    vision_token_types: Any = None,
    max_image_tokens: Any = 0,
    q_segment_ids: Any = None,
    q_local_positions: Any = None,
    pooled_segment_ids: Any = None,
    pooled_positions: Any = None,
    dtype: Any = None,
    like: Any = None,
) -> Spec:
    """The Spec of a build call. Arrays that the call has no use for (see Spec's flags) are not checked further."""
    shared = facts(
        attention_mask=attention_mask,
        compressed_topk=compressed_topk,
        q_positions=q_positions,
        vision_token_types=vision_token_types,
        q_segment_ids=q_segment_ids,
        q_local_positions=q_local_positions,
        pooled_segment_ids=pooled_segment_ids,
        pooled_positions=pooled_positions,
        like=like,
    )
    batch, queries = _size("batch_size", batch_size), _size("seq_len", seq_len)
    keys, window = _size("key_len", key_len), _size("window_size", window_size)
    raw_keys = queries if vanilla_key_len is None else _size("vanilla_key_len", vanilla_key_len)
    pooled, ratio = _size("n_pooled", n_pooled), _size("compress_ratio", compress_ratio)
    image_tokens = _size("max_image_tokens", max_image_tokens)
    result_dtype = _result_dtype(dtype, keys)

    has_positions = q_positions is not None
    positions_shared = has_positions and _rows("q_positions", q_positions, batch, queries, shared=True)

    has_mask = attention_mask is not None
    mask_shared = has_mask and _mask_shared(attention_mask, batch, queries, keys)

    images = vision_token_types is not None and image_tokens > 0
    image_keys = (raw_keys if has_positions else queries) if images else 0
    if images:
        _rows("vision_token_types", vision_token_types, batch, image_keys, shared=False)
    raw_width = min(image_keys, window + image_tokens) if images else min(raw_keys, window)

    documents = _together(q_segment_ids=q_segment_ids, q_local_positions=q_local_positions)
    if documents:
        for name, x in (("q_segment_ids", q_segment_ids), ("q_local_positions", q_local_positions)):
            require_dtype(name, x, POSITION_DTYPES)
            require_shape(name, x, "B S", B=batch, S=queries)

    pooled_documents = _together(pooled_segment_ids=pooled_segment_ids, pooled_positions=pooled_positions)
    if pooled_documents:
        if not documents:
            raise ValueError("q_segment_ids: expected an array beside pooled_segment_ids, got None")
        for name, x in (("pooled_segment_ids", pooled_segment_ids), ("pooled_positions", pooled_positions)):
            require_dtype(name, x, POSITION_DTYPES)
            require_shape(name, x, "B P", B=batch, P=pooled)

    given_topk = compressed_topk is not None and pooled > 0
    compressed_width = pooled
    if given_topk:
        require_dtype("compressed_topk", compressed_topk, INTEGERS)
        compressed_width = require_shape("compressed_topk", compressed_topk, "B S k", B=batch, S=queries)[2]
    elif pooled > 0 and documents and not pooled_documents:
        raise ValueError("pooled_segment_ids: expected an array (packed documents, n_pooled > 0), got None")
    if pooled > 0 and (not given_topk or pooled_documents) and ratio < 1:
        raise ValueError(f"compress_ratio: expected an integer of at least 1 when n_pooled > 0, got {ratio}")

    return Spec(
        batch=batch,
        queries=queries,
        keys=keys,
        raw_keys=raw_keys,
        window=window,
        image_tokens=image_tokens if images else 0,
        image_keys=image_keys,
        raw_width=raw_width,
        pooled=pooled,
        ratio=ratio,
        compressed_width=compressed_width,
        width=raw_width + compressed_width,
        has_positions=has_positions,
        positions_shared=positions_shared,
        has_mask=has_mask,
        mask_shared=mask_shared,
        images=images,
        given_topk=given_topk,
        documents=documents,
        pooled_documents=pooled_documents and pooled > 0,
        dtype=result_dtype,
        library=shared.library,
        xp=shared.xp,
        device=shared.device,
    )


def check_plan(topk_idxs: Any, kv_sequence: Any, layout: Any, all_rows_nonempty: Any = False) -> PlanSpec:
    """The PlanSpec of a plan of one of LAYOUTS."""
    shared = facts(topk_idxs=topk_idxs)
    require_dtype("topk_idxs", topk_idxs, INTEGERS)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, ('auto', *LAYOUTS)))}, got {layout!r}")
    if not isinstance(all_rows_nonempty, (bool, np.bool_)):
        raise TypeError(f"all_rows_nonempty: expected a bool, got {type(all_rows_nonempty).__name__}")
    return _plan_spec(topk_idxs, kv_sequence, layout, bool(all_rows_nonempty), shared)


def check_flatten(topk_idxs: Any, kv_sequence: Any) -> PlanSpec:
    """The PlanSpec of flatten_sparse_indices."""
    return _plan_spec(topk_idxs, kv_sequence, "flat", False, facts(topk_idxs=topk_idxs))


def _plan_spec(
    topk_idxs: Any, kv_sequence: Any, layout: str, all_rows_nonempty: bool, shared: ArrayFacts
) -> PlanSpec:
    """The checks that plans and flat ids share, and their Spec."""
    require_dtype("topk_idxs", topk_idxs, INTEGERS)
    batch, queries, slots = require_shape("topk_idxs", topk_idxs, "B S T")
    keys = _size("kv_sequence", kv_sequence)
    if layout in ("reference", "cuda") and keys > INT32_COUNT:
        raise ValueError(f"kv_sequence: expected at most {INT32_COUNT} (int32 ids), got {keys}")
    limit, kind = (INT32_COUNT, "int32") if layout == "cudnn" else (2**63, "int64")
    if layout in ("cudnn", "flat") and batch * keys > limit:
        raise ValueError(f"kv_sequence: expected B*kv_sequence of at most {limit} ({kind} ids), got {batch}*{keys}")
    blocks = max(1, -(-slots // CUDNN_SLOT_MULTIPLE))
    return PlanSpec(
        batch=batch,
        queries=queries,
        slots=slots,
        kv_sequence=keys,
        layout=layout,
        padded_slots=blocks * CUDNN_SLOT_MULTIPLE,
        all_rows_nonempty=all_rows_nonempty,
        library=shared.library,
        xp=shared.xp,
        device=shared.device,
    )


def _size(name: str, value: Any) -> int:
    """A size or count as a Python int."""
    return whole_number(name, value, maximum=LARGEST_SIZE)


def _rows(name: str, x: Any, batch: int, length: int, *, shared: bool) -> bool:
    """Checks [B, length], [length] or [1, length]; True when one row stands for all. Not shared: B rows or B == 1."""
    require_dtype(name, x, POSITION_DTYPES)
    shape = tuple(x.shape)
    if shape == (batch, length):
        return batch == 1
    if (shared or batch == 1) and shape in ((length,), (1, length)):
        return True
    also = f" or [{length}]" if shared or batch == 1 else ""
    raise ValueError(f"{name}: expected shape [{batch}, {length}]{also}, got {list(shape)}")


def _mask_shared(mask: Any, batch: int, queries: int, keys: int) -> bool:
    """Checks an additive mask [B or 1, 1, S, >= key_len]; True when one row stands for all."""
    require_dtype("attention_mask", mask, FLOATS)
    shape = tuple(mask.shape)
    if len(shape) != 4:
        raise ValueError(f"attention_mask: expected rank 4, [B, 1, S, >= key_len], got rank {len(shape)}")
    if shape[0] not in (1, batch) or shape[1:3] != (1, queries) or shape[3] < keys:
        raise ValueError(f"attention_mask: expected shape [{batch}, 1, {queries}, >= {keys}], got {list(shape)}")
    return shape[0] == 1


def _together(**pair: Any) -> bool:
    """True when both arguments of a pair are given, False when neither is."""
    given = [name for name, x in pair.items() if x is not None]
    if len(given) == 1:
        other = next(name for name in pair if name != given[0])
        raise ValueError(f"{other}: expected an array beside {given[0]}, got None")
    return len(given) == 2


def _result_dtype(dtype: Any, keys: int) -> str:
    """The name int32 or int64 from None, a name, or any library's dtype object."""
    if dtype is None:
        return "int64"
    if library(dtype) is not None:
        raise TypeError(f"dtype: expected int32 or int64 as a name or a dtype, got {type(dtype).__name__}")
    name = np.dtype(dtype).name if isinstance(dtype, type) and issubclass(dtype, np.generic) else dtype_name(dtype)
    if name not in ID_DTYPES:
        raise TypeError(f"dtype: expected int32 or int64, got {name}")
    if name == "int32" and keys > INT32_COUNT:
        raise ValueError(f"key_len: expected at most {INT32_COUNT} for int32 ids, got {keys}")
    return name
