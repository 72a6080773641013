"""Specialisations of kernels that the fuzzer's cases meet beside those that the slices list for the compile tests.

A kernel takes a second to compile and a case milliseconds: attention's portable kernels are tried for each tile of
heads and each head_dim in one half type, so that each tile and each head_dim meets both types; the indexer's in float16
at index_dim 128. tests/gpu/warm.py compiles them side by side. Imports no torch.
"""

from __future__ import annotations

from typing import Any

DIMS, TILES = (64, 128, 256), (16, 32, 64)  # head_dims without kernels of their own; heads of a tile


def portable_dtype(dim: int, heads: int) -> str:
    """The half type of a case of the portable kernels."""
    tile = sum(heads > n for n in TILES[:2])
    return "float16" if DIMS.index(dim) == tile else "bfloat16"


def variants() -> list[tuple[str, dict[str, Any]]]:
    """(file, defines) on a device whose blocks may have 227 KB of shared memory."""
    return _attention() + _indexer()


def _attention() -> list[tuple[str, dict[str, Any]]]:
    from dsv4cp.sparse_attention import cuda, cuda_bwd_mma
    from dsv4cp.sparse_attention.cuda_bwd_passes import BOTH, GRAD_Q, SUMS

    found = []
    for heads in TILES:
        for dim in (*DIMS, 512):
            tile, bwd_tile = (next(t for t in module.TILES[dim] if t[0] == heads) for module in (cuda, cuda_bwd_mma))
            for dtype in ("bfloat16", "float16") if dim == 512 else (portable_dtype(dim, heads),):
                found += [("sparse_attention_fwd.cu", cuda._defines(dtype, dim, tile, on)) for on in (False, True)]
                if (dim, dtype) == (512, "float16"):
                    continue  # on Hopper, where reversed arrays alone come here, which are of the other type
                parts = [(BOTH, 0), (BOTH, 1), (GRAD_Q, 0), (SUMS, 1)] + [(SUMS, 0)] * (heads == TILES[-1])
                found += [(cuda_bwd_mma.FILE, cuda_bwd_mma._defines(dtype, dim, bwd_tile, *part)) for part in parts]
    return found


def _indexer() -> list[tuple[str, dict[str, Any]]]:
    from dsv4cp.indexer import cuda_grad_kernels, cuda_sm90

    half = "float16"
    found = [(cuda_sm90.FILE, cuda_sm90._defines(half, 128, heads)) for heads in cuda_sm90.HEADS]
    for fixed in (False, True):
        found.append(("indexer_grad_query.cu", cuda_grad_kernels._query_defines(half, 128, 128, fixed)))
        for wants in ((True, False), (False, True)):
            if wants[1] or not fixed:
                found.append(("indexer_grad_query_sm90.cu", cuda_grad_kernels._hopper_defines(half, fixed, *wants)))
    return found
