"""Sparse attention by NVIDIA's DSA kernels (the package cudnn) on torch tensors that contract_cudnn finds fit.

cuDNN sees one batch row: queries [N, H, D] with N = B*S, keys [B*K, D], ids of that coordinate with the valid ones
first, and only queries that have a key. On SM90 it has the gradient alone: this package's CUDA kernels supply out and
lse there. It compiles its kernels at the first call for a dtype, a head count and a width (some seconds each), and its
wrapper keeps a small Python object for every combination of shapes and scale it has seen. What the backend costs beside
the wrapper called directly is in docs/records/h200.json.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from .. import _bridge
from . import contract_cudnn
from .contract import Spec
from .contract_cudnn import Ids

SLOT_MULTIPLE = 128  # of the widths that ids are laid out in, as in the plans: cuDNN compiles for each width

# What cuDNN takes: SM90 assumes that float32 rows [H] begin on 16 bytes, SM100's forward pass has these two counts.
HEADS_SM90, HEADS_SM100 = 4, (64, 128)


@torch.compiler.assume_constant_result
def major(index: int) -> int:
    """The GPU's compute capability, its first number."""
    return torch.cuda.get_device_capability(index)[0]


def missing(q: Any, kv: Any, spec: Spec) -> str | None:
    """Why cuDNN's kernels cannot run on this machine, or cannot take these tensors; None when they can."""
    reason = _bridge.missing("cudnn")
    if reason is None and isinstance(q, torch.Tensor) and q.is_cuda:
        reason = contract_cudnn.unfit(q, kv, spec, major(q.get_device()))
    return reason


# --- What cuDNN is given ---------------------------------------------------------------------------------


def laid_out(ids: Ids, spec: Spec, all_rows_nonempty: bool) -> Ids:
    """Ids as in a plan, [N, width]. The host waits only where the caller made neither a plan nor the promise."""
    rows = spec.batch * spec.queries
    if ids.lengths is not None:
        flat = _bridge.contiguous(ids.ids.reshape(rows, ids.ids.shape[-1]))
        return Ids(flat, _bridge.contiguous(ids.lengths), ids.rows)
    width = max(1, -(-spec.slots // SLOT_MULTIPLE)) * SLOT_MULTIPLE
    flat, lengths = packed(_bridge.contiguous(ids.ids), spec, width)
    if all_rows_nonempty:
        return Ids(flat, lengths, None)
    valid_rows = lengths.nonzero()[:, 0]
    return Ids(flat, lengths, None if valid_rows.shape[0] == rows else valid_rows)


def packed(ids: torch.Tensor, spec: Spec, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [N, width], lengths [N]): as a plan has them but for the order of the valid ids, which stays."""
    from . import cuda_pack

    rows = spec.batch * spec.queries
    flat = torch.empty((rows, width), dtype=torch.int32, device=ids.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=ids.device)
    with _bridge.on_stream_of(ids) as stream:
        cuda_pack.launch_pack_ids(
            ids.data_ptr(), flat.data_ptr(), lengths.data_ptr(), spec, width,
            wide=ids.dtype == torch.int64, stream=stream,
        )  # fmt: skip
    return flat, lengths


def heads_of(heads: int, generation: int) -> int:
    """How many heads cuDNN is given; those beyond the caller's are zeros that weigh nothing."""
    if generation == 9:
        return -(-heads // HEADS_SM90) * HEADS_SM90
    return next(n for n in HEADS_SM100 if n >= heads)


def rows_of(x: torch.Tensor, laid: Ids, heads: int, dtype: torch.dtype, fill: float = 0.0) -> torch.Tensor:
    """x [B, S, H, ...] as contiguous [N, heads, ...], without the queries that have no key."""
    x = x.detach().flatten(0, 1)
    if x.dtype != dtype:
        x = x.to(dtype)
    if laid.rows is not None:
        x = in_words(x.contiguous()).index_select(0, laid.rows).view(dtype)
    if heads > x.shape[1]:
        x = pad(x, (0, 0) * (x.ndim - 2) + (0, heads - x.shape[1]), value=fill)
    return _bridge.contiguous(x)


def chosen(laid: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and lengths of the queries that have a key."""
    if laid.rows is None:
        return laid.ids, laid.lengths
    return laid.ids.index_select(0, laid.rows), laid.lengths.index_select(0, laid.rows)


def placed(y: torch.Tensor, like: torch.Tensor, laid: Ids, fill: float) -> torch.Tensor:
    """What cuDNN made, [N, heads, ...], in the shape of `like` [B, S, H, ...]; `fill` where a query has no key."""
    y = y[:, : like.shape[2]]
    if laid.rows is None:
        return y.contiguous().view(like.shape)
    whole = y.new_full((like.shape[0] * like.shape[1], *like.shape[2:]), fill)
    in_words(whole).index_copy_(0, laid.rows, in_words(y.contiguous()))
    return whole.view(like.shape)


def in_words(x: torch.Tensor) -> torch.Tensor:
    """The same memory in elements of 8 bytes where rows are made of them: torch copies rows element by element."""
    whole = x.ndim == 3 and x.data_ptr() % 8 == 0 and x.storage_offset() * x.itemsize % 8 == 0
    return x.view(torch.int64) if whole else x


def sinks_of(sinks: torch.Tensor, heads: int) -> torch.Tensor:
    """float32 [heads]; a padded head has no sink."""
    sinks = sinks.detach().float()
    if heads > sinks.shape[0]:
        sinks = pad(sinks, (0, heads - sinks.shape[0]), value=-torch.inf)
    return _bridge.contiguous(sinks)


# --- The kernels -----------------------------------------------------------------------------------------


def forward(
    q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, ids: Ids, spec: Spec, all_rows_nonempty: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of cuDNN's forward pass (SM100)."""
    from cudnn.deepseek_sparse_attention import sparse_attention_forward_wrapper

    like, laid = q[..., 0], laid_out(ids, spec, all_rows_nonempty)
    if nothing(laid, spec):
        return q.new_zeros(q.shape), like.new_full(like.shape, -torch.inf, dtype=torch.float32)
    heads = heads_of(spec.heads, major(q.get_device()))
    flat, lengths = chosen(laid)
    made = sparse_attention_forward_wrapper(
        rows_of(q, laid, heads, q.dtype),
        _bridge.contiguous(kv.detach().flatten(0, 1)),
        flat,
        attn_sink=sinks_of(sinks, heads),
        topk_length=lengths,
        softmax_scale=spec.scale,
    )
    # Its lse is +inf where a query has no key, which only a broken promise of the caller's lets through.
    lse = made["lse"].masked_fill(lengths[:, None] == 0, -torch.inf)
    return placed(made["out"], q, laid, 0.0), placed(lse, like, laid, -torch.inf)


def backward(
    grad_out: torch.Tensor, q: torch.Tensor, kv: torch.Tensor, sinks: torch.Tensor, ids: Ids, out: torch.Tensor,
    lse: torch.Tensor, spec: Spec, all_rows_nonempty: bool, deterministic: bool, workspace_bytes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(grad_q, grad_kv, grad_sinks) by cuDNN. What it cannot read as it is (strides, padded heads, queries without
    keys beside others) is copied, beyond the workspace."""
    from cudnn.deepseek_sparse_attention import sparse_attention_backward_wrapper

    contract_cudnn.require_workspace(workspace_bytes, spec)
    laid = laid_out(ids, spec, all_rows_nonempty)
    if nothing(laid, spec):
        return q.new_zeros(q.shape), kv.new_zeros(kv.shape), sinks.new_zeros(sinks.shape)
    heads = heads_of(spec.heads, major(q.get_device()))
    flat, lengths = chosen(laid)
    given = (
        rows_of(q, laid, heads, q.dtype),
        _bridge.contiguous(kv.detach().flatten(0, 1)),
        rows_of(out, laid, heads, q.dtype),
        rows_of(grad_out, laid, heads, q.dtype),
        rows_of(lse, laid, heads, torch.float32, torch.inf),  # a head whose every p is 0
        sinks_of(sinks, heads),
        flat,
    )
    if deterministic:
        contract_cudnn.require_workspace(workspace_bytes, spec, fixed_order_bytes(given, lengths, spec))
    made = sparse_attention_backward_wrapper(
        *given, softmax_scale=spec.scale, topk_length=lengths, deterministic=deterministic
    )
    # The weight of an infinite sink does not change, whatever 0 * inf came to.
    grad_sinks = made["d_sink"][: spec.heads].masked_fill(sinks.detach().isinf(), 0.0).to(sinks.dtype)
    return placed(made["dq"], q, laid, 0.0), made["dkv"].view(kv.shape), grad_sinks


def fixed_order_bytes(given: tuple[torch.Tensor, ...], lengths: torch.Tensor, spec: Spec) -> int:
    """What cuDNN's deterministic gradient works in beyond one float32 sum of grad_kv: it keeps many of them."""
    from cudnn.deepseek_sparse_attention import SparseAttentionBackward

    operation = SparseAttentionBackward(
        *given, sample_topk_length=lengths, softmax_scale=spec.scale, deterministic=True
    )  # fmt: skip
    operation.check_support()
    return int(operation.scratch_workspace_bytes()) - 4 * given[1].numel()


def nothing(laid: Ids, spec: Spec) -> bool:
    """Whether no query has a key; a promise that all have is believed as far as there are queries and keys."""
    none = laid.rows is not None and laid.rows.shape[0] == 0
    return none or 0 in (spec.batch, spec.queries, spec.heads, spec.keys)
