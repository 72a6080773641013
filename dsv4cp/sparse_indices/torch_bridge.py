"""Index building and planning for torch tensors, with the names and signatures of the mirrored module (NeMo
AutoModel's deepseek_v4.optimized_kernels): the Numba kernels for CUDA tensors where they can run, else the
reference run on torch tensors. Ids have no gradient."""

from __future__ import annotations

from typing import Any, Literal

import torch

from .. import _bridge
from .._arrays import library
from .._bridge_programs import known, run
from .._plan import SparseIndexPlan
from .._torch_backend import choose
from . import contract, ops, reference, torch_bridge_kernels

# What lays ids out for each backend of dsv4_sparse_attention: every layout is made on every device.
LAYOUTS = {"torch": "reference", "sparse_torch": "reference", "tilelang": "cuda", "cudnn": "cudnn"}


_check, _check_plan = _bridge.remembered(contract.check), _bridge.remembered(contract.check_plan)


def attention_kernel_missing() -> str | None:
    """Why sparse attention's CUDA kernels cannot run on this machine, None when they can."""
    if "cuda" not in ops.ATTENTION_OFFERED:
        return "this version of dsv4cp has no CUDA kernels for sparse attention"
    return _bridge.missing("cuda")


def build_dsv4_sparse_topk_indices(
    *,
    batch_size: int,
    seq_len: int,
    key_len: int,
    window_size: int,
    device: torch.device | str | int,
    attention_mask: torch.Tensor | None = None,
    compress_ratio: int = 0,
    compressed_topk: torch.Tensor | None = None,
    n_pooled: int = 0,
    vanilla_key_len: int | None = None,
    q_positions: torch.Tensor | None = None,
    vision_token_types: torch.Tensor | None = None,
    max_image_tokens: int = 0,
    q_segment_ids: torch.Tensor | None = None,
    q_local_positions: torch.Tensor | None = None,
    pooled_segment_ids: torch.Tensor | None = None,
    pooled_positions: torch.Tensor | None = None,
    dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """dsv4cp.build_dsv4_sparse_topk_indices for torch: ids [B, S, slots] on `device`, int64 unless dtype says int32.

    Tensors on another device are moved to `device`. Raises as the array function does.
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
    call = None
    if _kernels_missing() is None:
        call, program = torch_bridge_kernels.known_build(
            device, arrays, batch_size, seq_len, key_len, window_size, compress_ratio, n_pooled, vanilla_key_len,
            max_image_tokens, dtype,
        )  # fmt: skip
        if call is not None and program is not None:
            return run(program, call)[0]
    like = torch.empty(0, device=device)
    arrays = {name: _moved(x, like) for name, x in arrays.items()}
    spec = _check(
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
    if _by_kernels(spec.device):
        ids = torch_bridge_kernels.build(spec, like, arrays)
        torch_bridge_kernels.noted_build(call, spec, like, arrays)
        return ids
    return reference.build(spec, **arrays)


def plan_dsv4_sparse_indices(
    topk_idxs: torch.Tensor,
    kv_sequence: int,
    backend: Literal["torch", "sparse_torch", "tilelang", "cudnn", "auto"],
    all_rows_nonempty: bool = False,
) -> SparseIndexPlan:
    """dsv4cp.plan_dsv4_sparse_indices for torch: a plan of tensors on topk_idxs' device.

    backend: that of the dsv4_sparse_attention calls the plan is for. "torch" and "sparse_torch" have the array
    function's "reference" layout, "tilelang" its "cuda" layout. "auto" is "tilelang" for CUDA ids where the
    kernels can run, else "torch": the choice that attention makes for bfloat16; name the backend for other
    dtypes. Every layout can be made on every device. Raises as the array function does.
    """
    call = None
    if _kernels_missing() is None:
        auto = isinstance(backend, str) and backend == "auto" and attention_kernel_missing() is None
        laid: str = "tilelang" if auto else backend
        call, program = known(torch_bridge_kernels.PLANS, (topk_idxs,), (kv_sequence, laid, all_rows_nonempty))
        if call is not None and program is not None:
            made = torch_bridge_kernels.played_plan(program, call, all_rows_nonempty)
            return SparseIndexPlan(laid, *made, kv_sequence)
    allowed = (*LAYOUTS, "auto")
    name = choose(
        "plan_dsv4_sparse_indices",
        "torch" if isinstance(backend, str) and backend in LAYOUTS else backend,  # a layout needs no kernel
        (topk_idxs,),
        allowed=allowed,
        kernel_missing=attention_kernel_missing(),
    )
    name = name if backend == "auto" else backend
    spec = _check_plan(topk_idxs, kv_sequence, LAYOUTS[name], all_rows_nonempty)
    kernels = _by_kernels(spec.device)
    make = torch_bridge_kernels.plan if kernels else reference.plan
    indices, topk_length, valid_rows = make(topk_idxs.detach(), spec)
    if kernels:
        torch_bridge_kernels.noted_plan(call, topk_idxs, spec)
    return SparseIndexPlan(name, indices, topk_length, valid_rows, spec.kv_sequence)


def _by_kernels(device: torch.device) -> bool:
    """Whether the Numba kernels take tensors of a device."""
    return device.type == "cuda" and _kernels_missing() is None


def _kernels_missing() -> str | None:
    """Why the Numba kernels cannot run on this machine, None when they can."""
    return _bridge.missing("numba") if "numba" in ops.OFFERED else "this version of dsv4cp has none"


def _moved(x: Any, like: torch.Tensor) -> Any:
    """x on like's device, without its autograd history; what is no tensor with memory is left for the contract."""
    return x.detach().to(like.device) if library(x) == "torch" and not x.is_meta else x
