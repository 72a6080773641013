"""Lists of keys that queries attend to: the public functions that build them and lay them out."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import library
from .._backend import pick
from .._cupy_programs import Repeated
from .._plan import SparseIndexPlan
from . import contract

OFFERED = ("reference", "numba")

# The backends that dsv4_sparse_attention's "auto" chooses from: "auto" plans must fit them. Slices do not
# import each other, so the tests compare this with what sparse_attention offers.
ATTENTION_OFFERED = ("reference", "cuda")

_BUILD, _PLAN = Repeated(__package__), Repeated(__package__)


def build_dsv4_sparse_topk_indices(
    *,
    batch_size: int,
    seq_len: int,
    key_len: int,
    window_size: int,
    attention_mask: Any = None,
    compress_ratio: int = 0,
    compressed_topk: Any = None,
    n_pooled: int = 0,
    vanilla_key_len: int | None = None,
    q_positions: Any = None,
    vision_token_types: Any = None,
    max_image_tokens: int = 0,
    q_segment_ids: Any = None,
    q_local_positions: Any = None,
    pooled_segment_ids: Any = None,
    pooled_positions: Any = None,
    dtype: Any = None,
    like: Any = None,
    backend: str = "auto",
) -> Any:
    """The keys that each query attends to: its window of raw keys, then compressed entries.

    For the query i of row b at global position p (i, or q_positions) with W = window_size, R =
    compress_ratio, P = n_pooled and N = vanilla_key_len (default seq_len), slots hold, in this order,

        window[t]     = k if k <= p else -1,          k = max(p - W + 1, 0) + t,  t < min(N, W)
        compressed[j] = N + j if j < (p + 1) // R else -1,                        j < P
        compressed[t] = N + c if c >= 0 else -1,      c = compressed_topk[b, i, t]   (instead, where given)

    and then every id outside [0, key_len), and every id whose additive mask value is negative, is -1. A given
    compressed_topk is shifted and range-checked only: causality is the caller's. P = 0: no compressed slots.

    Image spans (vision_token_types with max_image_tokens = V > 0; 0 starts a span, 4 ends it, -1 is text,
    anything else is inside) widen the window of queries in a span to the whole span, both ways:

        valid  = (starts seen > ends seen) or is_end
        left   = min((p - last start at or before p) * valid, V - 1)      a missing start counts as key 0
        right  = min((first end at or after p - p) * valid, V)            a missing end as the key behind the last
        window[t] = k if k <= p + right else -1,
                    k = max(p - (W - 1) - max(left - (W - 1), 0), 0) + t,  t < min(N', W + V)

    with N' = seq_len, or N under q_positions; text queries keep the plain window. By these formulas an unclosed
    span reaches one id past the last raw key, as in the source.

    Packed documents (q_segment_ids, q_local_positions; segment 0 is padding): with l the local position, a
    window or span also starts no earlier than the document, p - l, and a span ends with it; entry j is seen iff

        pooled_segment_ids[b, j] == q_segment_ids[b, i]  and  pooled_positions[b, j] < (l + 1) // R

    for a given compressed_topk too where the pooled arrays are given. A query of segment 0 sees nothing. Under
    q_positions, image spans end where the next document with a query in this call begins.

    batch_size, seq_len, key_len, ...: B, S, K and the other sizes, integers >= 0.
    attention_mask: additive floats [B or 1, 1, S, >= key_len]; negative values mask, NaN does not.
    compressed_topk: [B, S, k] of any integer dtype, -1 for none, any order, duplicates kept. It takes an
        n_pooled > 0: with the default 0 it is not looked at.
    q_positions: [S], [1, S] or [B, S], for queries that are not rows 0 .. S-1 of the keys (context parallel).
        A negative position sees nothing. Positions are not compared with vanilla_key_len: window ids from
        there on name compressed entries.
    vision_token_types: [B, S], or [B, vanilla_key_len] under q_positions: the types of all keys, of which the
        query takes the one at its position. One axis is enough when B = 1. It takes a max_image_tokens > 0: with
        the default 0 it is not looked at.
    q_segment_ids, q_local_positions: [B, S]. pooled_segment_ids, pooled_positions: [B, n_pooled].
    dtype: int64 (None) or int32, as a name or a dtype.
    like: an array whose library and device the result gets; needed only where no other array says so.
    backend: "auto", "reference", or another that this version offers and this machine can run.

    Returns ids [B, S, slots] in a new contiguous array: of the library and device of the arrays given, else
    NumPy. A row without keys is all -1. No [S, key_len] array is made; temporaries are bounded. Values are
    never looked at on the host, so on a GPU nothing waits; ids and positions of any size are dealt with
    without overflow.

    Raises TypeError for mixed libraries, a wrong dtype or kind, or torch tensors (dsv4cp.torch_ops takes
    those); ValueError for shapes, negative sizes, a mask that is not 4-D, one of two arrays that go
    together missing, n_pooled > 0 with a compress_ratio below 1 where the rule above needs one, or mixed
    devices; RuntimeError for a backend that cannot run.

    Source: NeMo AutoModel's deepseek_v4 index builder (window, compressed and image part); the closed form for
    packed documents is this package's.
    """
    arrays = {
        "attention_mask": attention_mask,
        "compressed_topk": compressed_topk,
        "q_positions": q_positions,
        "vision_token_types": vision_token_types,
        "q_segment_ids": q_segment_ids,
        "q_local_positions": q_local_positions,
        "pooled_segment_ids": pooled_segment_ids,
        "pooled_positions": pooled_positions,
    }
    given = {name: x for name, x in (*arrays.items(), ("like", like)) if x is not None}
    numbers = (
        batch_size, seq_len, key_len, window_size, compress_ratio, n_pooled, vanilla_key_len, max_image_tokens,
    )  # fmt: skip
    call, again = _BUILD.play(tuple(given.values()), (",".join(given), *numbers, _word(dtype), backend))
    if again is not None:
        return again[0]
    spec = contract.check(
        batch_size=batch_size,
        seq_len=seq_len,
        key_len=key_len,
        window_size=window_size,
        compress_ratio=compress_ratio,
        n_pooled=n_pooled,
        vanilla_key_len=vanilla_key_len,
        max_image_tokens=max_image_tokens,
        dtype=dtype,
        like=like,
        **arrays,
    )
    impl: Any
    match chosen := pick("build_dsv4_sparse_topk_indices", backend, spec.library, offered=OFFERED):
        case "numba":
            from . import numba_cuda as impl
        case _:
            from . import reference as impl
    ids = impl.build(spec, **arrays)
    if chosen == "numba":
        _BUILD.settle(call, "build", spec, ",".join(given))
    return ids


def plan_dsv4_sparse_indices(
    topk_idxs: Any,
    kv_sequence: int,
    backend: str = "auto",
    all_rows_nonempty: bool = False,
    *,
    index_backend: str = "auto",
) -> SparseIndexPlan:
    """Lay the ids of a selection out once, for all layers and calls that share it.

    With valid(id) = 0 <= id < kv_sequence, in the ids' own dtype, so that no id wraps into another row:

        "reference", "cuda":  indices[b, s, t] = topk_idxs[b, s, t] if valid else -1           int32 [B, S, T]
        "cudnn":              indices[b*S + s, 0, :] = sorted(id + b*kv_sequence for valid ids), then -1
                              topk_length[b*S + s]   = number of valid ids                     int32 [B*S]
                              valid_rows             = rows with topk_length > 0               int64, or None

    The cudnn layout is int32 [B*S, 1, width], T rounded up to a multiple of 128 (128 when T is 0). Repeated ids
    stay repeated. valid_rows is None when every row has a key.

    topk_idxs: [B, S, T] of any integer dtype, any strides; it is not written, and the plan does not alias it.
    kv_sequence: K, keys per row of the kv that the plan will be used with.
    backend: the layout, named after the backend of dsv4_sparse_attention that takes it; "auto" is the one that
        its "auto" takes for these arrays. Every layout can be made on every machine.
    all_rows_nonempty: a promise that every row has a valid id. It makes valid_rows None without counting, and
        with it the cudnn layout waits for nothing on a GPU (finding valid_rows is the one point that does).
        If it is broken, topk_length still says 0 for the empty rows, but the plan does not list them: cuDNN
        then runs on rows without keys, and what it returns for those rows is not defined. Other rows, and
        the other layouts, are not affected.
    index_backend: which implementation does it: "auto", "reference", or another that this version offers.

    Returns a frozen SparseIndexPlan whose backend field is the layout's name.

    Raises TypeError for ids that are no integer array, a kv_sequence that is no integer, an
    all_rows_nonempty that is no bool, or torch tensors (dsv4cp.torch_ops takes those); ValueError for a
    shape, an unknown layout, or a kv_sequence whose ids int32 cannot hold (B*kv_sequence in the cudnn
    layout); RuntimeError for an index_backend that cannot run.

    Source: the int32 conversion of NeMo AutoModel's deepseek_v4 attention; the cudnn layout is what NVIDIA's DSA
    kernels read.
    """
    layout = backend
    if isinstance(backend, str) and backend == "auto" and (lib := library(topk_idxs)) is not None:
        layout = pick("plan_dsv4_sparse_indices", "auto", lib, offered=ATTENTION_OFFERED)
    call, again = _PLAN.play((topk_idxs,), (kv_sequence, layout, all_rows_nonempty, index_backend))
    if again is not None:
        return SparseIndexPlan(layout, *_laid_out(again, topk_idxs.device, all_rows_nonempty), kv_sequence)
    spec = contract.check_plan(topk_idxs, kv_sequence, layout, all_rows_nonempty)
    impl: Any
    chosen = pick("plan_dsv4_sparse_indices", index_backend, spec.library, offered=OFFERED, argument="index_backend")
    match chosen:
        case "numba":
            from . import numba_cuda as impl
        case _:
            from . import reference as impl
    indices, topk_length, valid_rows = impl.plan(topk_idxs, spec)
    if chosen == "numba":
        _PLAN.settle(call, "plan", spec)
    return SparseIndexPlan(layout, indices, topk_length, valid_rows, spec.kv_sequence)


def _laid_out(again: list[Any], device: Any, all_rows_nonempty: bool) -> tuple[Any, Any, Any]:
    """(indices, topk_length, valid_rows) of a plan's results."""
    if len(again) == 1:
        return again[0], None, None
    from . import numba_cuda

    return again[0], again[1], None if all_rows_nonempty else numba_cuda.nonempty(again[1], device)


def _word(dtype: Any) -> Any:
    """A dtype's name where it has one that says all."""
    named = isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic))
    return np.dtype(dtype).name if named else dtype


def flatten_sparse_indices(topk_idxs: Any, kv_sequence: int) -> Any:
    """Ids of all rows in one coordinate, as if the kv of all rows stood below each other.

        flat[b*S + s, t] = id + b*kv_sequence if 0 <= id < kv_sequence else -1,    id = topk_idxs[b, s, t]

    An id out of range is masked before the shift: it never names another row's keys.

    topk_idxs: [B, S, T] of any integer dtype, any strides. kv_sequence: K, keys per row.

    Returns a new contiguous int64 array [B*S, T] in topk_idxs' library, on its device. Order and repeated ids
    stay; a row without keys is all -1.

    Raises TypeError for ids that are no integer array or torch tensors (plan them with
    dsv4cp.torch_ops.plan_dsv4_sparse_indices), ValueError for a shape or a B*kv_sequence beyond int64.

    Source: the step between the ids and the cudnn layout of plan_dsv4_sparse_indices.
    """
    spec = contract.check_flatten(topk_idxs, kv_sequence)
    twin = "plan_dsv4_sparse_indices"
    impl: Any
    match pick("flatten_sparse_indices", "auto", spec.library, offered=OFFERED, twin=twin):
        case "numba":
            from . import numba_cuda as impl
        case _:
            from . import reference as impl
    return impl.flatten(topk_idxs, spec)
