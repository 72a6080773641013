"""Other people's kernels for the same ops, called on the same inputs in the same run, where they are installed.

Each function yields (implementation, function of one input set) or raises what its import raises. Facts about
the peers: TileKernels' Sinkhorn wants contiguous float32 and writes into given outputs; AutoModel's kernel
modules load without the package's __init__ files, which import transformers.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import bench_peers_layers as layers
from .bench_gpu_cases import EPS, REPEAT

Peer = tuple[str, Callable[..., Any]]


def of(
    op: str, sets: list[dict[str, Any]], say: Callable[[str], None]
) -> Iterator[tuple[str, Callable[..., Any], list[dict[str, Any]]]]:
    """The installed peers of an op: (implementation, function of one input set, its sets, which hold what it prepares
    besides the arrays given). `say` gets one line for each that is not there."""
    sources: tuple[Callable[[list[dict[str, Any]]], Iterator[Peer]], ...] = ()
    match op:
        case "sinkhorn_forward":
            sources = (tile_kernels_forward, torch_sinkhorn, torch_compiled_sinkhorn)
        case "sinkhorn_backward":
            sources = (tile_kernels_backward, torch_sinkhorn_backward)
        case "build":
            sources = (automodel_build,)
        case "extract":
            sources = (automodel_extract, torch_gather)
        case "attention_forward":
            sources = (layers.flash_mla_forward, layers.automodel_forward)
        case "attention_backward":
            sources = (layers.cudnn_backward, layers.automodel_backward)
        case "indexer_scores":
            sources = (layers.cudnn_scores, layers.automodel_scores)
        case "indexer_top-k":
            sources = (layers.cudnn_topk,)
        case "indexer_selection":
            sources = (layers.cudnn_selection, layers.torch_selection)
        case "indexer_backward":
            sources = (layers.cudnn_scores_backward, layers.automodel_scores_backward)
    for source in sources:
        own = [dict(arrays) for arrays in sets]
        try:
            for implementation, function in source(own):
                yield implementation, function, own
        except Exception as error:  # imports of GPU packages fail in many ways
            words = str(error).strip().splitlines() or [""]
            say(f"  {source.__name__.replace('_', ' ')}: not there ({type(error).__name__}: {words[0][:160]})")


def version(distribution: str) -> str:
    """The installed version of a distribution, or nothing where only its files lie on the path."""
    try:
        return " " + importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


# --- Sinkhorn --------------------------------------------------------------------------------------------


def tile_kernels_forward(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    from tile_kernels.mhc.sinkhorn_kernel import mhc_sinkhorn_fwd
    from torch import empty_like

    y = empty_like(sets[0]["x_"])
    yield f"TileKernels{version('tile-kernels')}", lambda x_, **_: mhc_sinkhorn_fwd(x_, y, REPEAT, EPS)


def tile_kernels_backward(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    from tile_kernels.mhc.sinkhorn_kernel import mhc_sinkhorn_bwd
    from torch import empty_like

    for arrays in sets:
        arrays["plain_x"] = arrays["x_"].detach()
    grad_x = empty_like(sets[0]["plain_x"])
    name = f"TileKernels{version('tile-kernels')}"
    yield name, lambda grad_y_, plain_x, **_: mhc_sinkhorn_bwd(grad_y_, plain_x, grad_x, REPEAT, EPS)


def plain_sinkhorn(x: Any) -> Any:
    """The definition in torch operations."""
    y = x.softmax(-1) + EPS
    y = y / (y.sum(-2, keepdim=True) + EPS)
    for _ in range(REPEAT - 1):
        y = y / (y.sum(-1, keepdim=True) + EPS)
        y = y / (y.sum(-2, keepdim=True) + EPS)
    return y


def torch_sinkhorn(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    import torch

    yield f"torch {torch.__version__}", lambda x_, **_: plain_sinkhorn(x_)


def torch_compiled_sinkhorn(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    import torch

    compiled = torch.compile(plain_sinkhorn)
    yield f"torch.compile {torch.__version__}", lambda x_, **_: compiled(x_)


def torch_sinkhorn_backward(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    import torch

    for arrays in sets[:2]:  # the graphs hold 40 states each
        arrays["plain_y"] = plain_sinkhorn(arrays["x_"])
    del sets[2:]
    yield (
        f"torch {torch.__version__}",
        lambda grad_y_, x_, plain_y, **_: torch.autograd.grad(plain_y, x_, grad_y_, retain_graph=True),
    )


# --- Key ids and top-k scores ------------------------------------------------------------------------------


def automodel() -> Any:
    """AutoModel's deepseek_v4.optimized_kernels, past the __init__ files of its packages."""
    name = "nemo_automodel.components.models.deepseek_v4.optimized_kernels"
    if name in sys.modules:
        return sys.modules[name]
    if "nemo_automodel" in sys.modules:  # a stand-in of an earlier try, or the package itself
        folders = list(sys.modules["nemo_automodel"].__path__)
    else:
        spec = importlib.util.find_spec("nemo_automodel")
        folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ModuleNotFoundError("No module named 'nemo_automodel'")
    base = folders[0]
    for part in ("", ".components", ".components.models", ".components.models.deepseek_v4", ".shared"):
        package = types.ModuleType("nemo_automodel" + part)
        package.__path__ = [base + part.replace(".", "/")]
        sys.modules.setdefault("nemo_automodel" + part, package)
    return importlib.import_module(name)


def automodel_build(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    kernels = automodel()
    device = next(x for name, x in sets[0].items() if name.endswith("_")).device

    def build(sizes: dict[str, int], compressed_topk_: Any = None, **_: Any) -> Any:
        return kernels.build_dsv4_sparse_topk_indices(device=device, compressed_topk=compressed_topk_, **sizes)

    yield f"AutoModel{version('nemo-automodel')} (torch)", build


def automodel_extract(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    kernels = automodel()
    name = f"AutoModel{version('nemo-automodel')} (torch)"
    yield name, lambda logits_, ids_, **_: kernels.extract_indexer_topk_scores_torch(logits_, ids_)


def torch_gather(sets: list[dict[str, Any]]) -> Iterator[Peer]:
    import torch

    for arrays in sets:
        arrays["long_ids"] = arrays["ids_"].long()
    name = f"torch {torch.__version__} gather (int64 ids, unchecked)"
    yield name, lambda logits_, long_ids, **_: torch.gather(logits_, -1, long_ids)
