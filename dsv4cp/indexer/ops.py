"""Public functions of the lightning indexer. Array arguments are NumPy, CuPy or array-API arrays of one library."""

from __future__ import annotations

from typing import Any

from .._backend import pick
from .._cupy_programs import Repeated
from . import contract, contract_grad, contract_kernels

OFFERED = ("reference", "cuda")  # scores and selections
GRAD_OFFERED = ("reference", "cuda")  # the gradients, and dsv4_indexer_topk_scores that they belong to
_SCORES, _TOPK_SCORES = Repeated(__package__, "cuda_scores"), Repeated(__package__)
_SCORES_GRAD, _TOPK_SCORES_GRAD = (Repeated(__package__, "cuda_grad_kernels") for _ in range(2))
EXTRACT_OFFERED = ("reference", "numba")  # extract_indexer_topk_scores


def dsv4_indexer_scores(
    q: Any,
    pooled_kv: Any,
    weights: Any,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str = "auto",
    query_start: int = 0,
    query_total_len: int | None = None,
) -> Any:
    """score[b, i, j] = sum_h relu(q[b, i, h] . k[b, j]) * softmax_scale * w[b, i, h], -inf where j is not finished yet.

    Entry j stands for the tokens j*R .. j*R + R - 1; query i (global position query_start + i) sees it once all of
    them are there: j < (query_start + i + 1) // R. Every backend masks the others to -inf.

    q: [B, S, I, E]; pooled_kv: [B, P, E]; weights: [B, S, I]; each bfloat16, float16, float32 or float64.
    compress_ratio: R >= 1. query_start: position of the first query (context parallel).
    softmax_scale: finite real number on the host, usually E**-0.5.
    query_total_len: length of the whole sequence, at least query_start + S (the default); only checked, the causal
    rule does not need it.
    backend: "auto" takes "cuda" for CuPy arrays q and pooled_kv both in bfloat16 or both in float16, weights in one of
    these or float32, E 64 or 128, I 1 to 128; "reference" for all others. "cuda" by name takes nothing else.

    Returns [B, S, P], float32 (float64 if any input is float64), accumulated in that dtype. The bits of a score do
    not depend on the batch or on how many queries come along. P may exceed what the sequence has finished; zero
    lengths are fine. NaN and inf follow the equation (relu keeps NaN) for visible entries and never leave invisible
    ones. Raises TypeError (kind, dtype, library), ValueError (shape, range, device), RuntimeError (a backend that
    cannot run). Source: the index score of DeepSeek-V4's compressed sparse attention, masked as in the kernels
    behind NeMo AutoModel's deepseek_v4.optimized_kernels.
    """
    numbers = compress_ratio, softmax_scale, query_start, query_total_len
    call, again = _SCORES.play((q, pooled_kv, weights), (backend, *numbers))
    if again is not None:
        return again[0]
    spec = contract.check_scores(q, pooled_kv, weights, *numbers)
    chosen = pick("dsv4_indexer_scores", backend, spec.library, offered=OFFERED)
    impl: Any
    match contract_kernels.within(chosen, backend, q, pooled_kv, weights):
        case "cuda":
            from . import cuda

            scores = cuda.scores(q, pooled_kv, weights, spec)
            _SCORES.settle(call, "scores", spec)
            return scores
        case _:
            from . import reference as impl
    return impl.scores(q, pooled_kv, weights, spec)


def dsv4_indexer_scores_grad(
    grad_scores: Any,
    q: Any,
    pooled_kv: Any,
    weights: Any,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str = "auto",
    query_start: int = 0,
    query_total_len: int | None = None,
) -> tuple[Any, Any, Any]:
    """(grad_q, grad_pooled_kv, grad_weights) of dsv4_indexer_scores, given grad_scores g [B, S, P] of any float dtype.

    With logit = q_h . k_j and sums over visible pairs only (g is ignored elsewhere, NaN included):
        grad_q[i, h] = scale w[i, h] sum_j [logit > 0] g[i, j] k[j]
        grad_k[j]    = scale sum_i sum_h [logit > 0] g[i, j] w[i, h] q[i, h]
        grad_w[i, h] = scale sum_j relu(logit) g[i, j]

    Each gradient has the shape and dtype of its input; sums run in float32 (float64 if any input is float64) and are
    rounded once. A query that sees nothing and an entry that nobody sees get 0. NaN or inf in an entry reaches no
    query that does not see it, and the other way round; where it is seen, the affected gradients are not finite.
    backend: "auto" takes "cuda" for CuPy arrays as dsv4_indexer_topk_scores_grad does, "reference" for all others. The
    kernels add in a fixed order: the same bits every time; they need 256 MiB at most beyond the gradients, or 4 P E
    bytes where that is more. Other arguments and errors as in dsv4_indexer_scores.
    """
    arrays = grad_scores, q, pooled_kv, weights
    numbers = compress_ratio, softmax_scale, query_start, query_total_len
    call, again = _SCORES_GRAD.play(arrays, (backend, *numbers))
    if again is not None:
        return again[0], again[1], again[2]
    spec = contract.check_scores_grad(*arrays, *numbers)
    chosen = pick("dsv4_indexer_scores_grad", backend, spec.library, offered=GRAD_OFFERED)
    impl: Any
    match contract_grad.within_kernels(chosen, backend, q, pooled_kv, weights, grad_scores):
        case "cuda":
            from . import cuda_grad

            grads = cuda_grad.scores_grad(*arrays, spec)
            _SCORES_GRAD.settle(call, "scores_grad", spec)
            return grads
        case _:
            from . import reference as impl
    return impl.scores_grad(*arrays, spec)


def dsv4_indexer_topk_scores(
    q: Any,
    pooled_kv: Any,
    weights: Any,
    topk_indices: Any,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str = "auto",
) -> Any:
    """score[b, i, t] = sum_h relu(q[b, i, h] . k[b, id]) * softmax_scale * w[b, i, h] with id = topk_indices[b, i, t].

    -inf where an id is -1 or otherwise outside [0, P). The ids decide what is seen: there is no causal mask
    (compress_ratio is checked and part of the mirrored signature, but changes nothing). Ids may repeat and come in
    any order.

    q: [B, S, I, E]; pooled_kv: [B, P, E]; weights: [B, S, I]; each bfloat16, float16, float32 or float64.
    topk_indices: [B, S, T] int32 or int64.
    backend: "auto" takes "cuda" for CuPy arrays q and pooled_kv both in bfloat16 or both in float16, weights in one of
    these or float32, E 64 or 128, I 1 to 128; "reference" for all others. "cuda" by name takes nothing else.

    Returns [B, S, T], float32 (float64 if any input is float64). Only the named rows of pooled_kv are read, in chunks
    of bounded memory (256 MiB at most beyond inputs and result, for any S): NaN or inf in other rows reaches nothing.
    Errors as in dsv4_indexer_scores.
    """
    arrays = q, pooled_kv, weights, topk_indices
    call, again = _TOPK_SCORES.play(arrays, (backend, compress_ratio, softmax_scale))
    if again is not None:
        return again[0]
    spec = contract.check_topk_scores(*arrays, compress_ratio, softmax_scale)
    chosen = pick("dsv4_indexer_topk_scores", backend, spec.library, offered=GRAD_OFFERED)
    impl: Any
    match contract_grad.within_kernels(chosen, backend, q, pooled_kv, weights):
        case "cuda":
            from . import cuda_grad

            scores = cuda_grad.topk_scores(*arrays, spec)
            _TOPK_SCORES.settle(call, "topk_scores", spec)
            return scores
        case _:
            from . import reference as impl
    return impl.topk_scores(*arrays, spec)


def dsv4_indexer_topk_scores_grad(
    grad_scores: Any,
    q: Any,
    pooled_kv: Any,
    weights: Any,
    topk_indices: Any,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str = "auto",
    backward_impl: str = "atomic",
    backward_workspace_bytes: int = contract_grad.WORKSPACE_BYTES,
) -> tuple[Any, Any, Any]:
    """(grad_q, grad_pooled_kv, grad_weights) of dsv4_indexer_topk_scores, given grad_scores g [B, S, T].

    The sums of dsv4_indexer_scores_grad over the slots with an id in [0, P); g is ignored in the other slots, NaN
    included. A repeated id counts once per slot. relu has gradient 1 where logit > 0, else 0. Rows that nobody
    selects and queries without a valid slot get 0.

    Each gradient has the shape and dtype of its input; grad_pooled_kv is accumulated in float32 (float64 if any input
    is float64) and rounded once. Memory of the reference and errors as in dsv4_indexer_topk_scores.
    backend: "auto" takes "cuda" where dsv4_indexer_topk_scores does, grad_scores in bfloat16, float16 or float32.
    backward_impl: how the kernels sum grad_pooled_kv over queries. "atomic": float32 additions in any order, so that
        its last bits may differ from run to run. "deterministic": integers scaled by a power of two per entry, whose
        sum has no order: the same bits every time, on every stream and for every cap. The other two gradients have
        one order in both. The reference has a fixed order on NumPy and array-API arrays; on CuPy arrays it has none and
        "deterministic" is a RuntimeError where the kernels do not take the call.
    backward_workspace_bytes: cap on the working memory of "deterministic", 8 E + 4 bytes an entry; a smaller one means
        more passes over batch rows or ranges of entries. The float32 sums of "atomic" are not counted.
        ValueError where not even one entry fits (the message says the minimum).
    """
    arrays, numbers = (grad_scores, q, pooled_kv, weights, topk_indices), (compress_ratio, softmax_scale)
    call, again = _TOPK_SCORES_GRAD.play(arrays, (backend, *numbers, backward_impl, backward_workspace_bytes))
    if again is not None:
        return again[0], again[1], again[2]
    spec = contract.check_topk_scores_grad(*arrays, *numbers)
    cap = contract_grad.check_backward(backward_impl, backward_workspace_bytes)
    chosen = pick("dsv4_indexer_topk_scores_grad", backend, spec.library, offered=GRAD_OFFERED)
    chosen = contract_grad.within_kernels(chosen, backend, q, pooled_kv, weights, grad_scores)
    contract_grad.check_fixed_order(chosen, spec.library, backward_impl)
    if chosen == "cuda":
        from . import cuda_grad

        fixed = backward_impl == "deterministic"
        grads = cuda_grad.topk_scores_grad(*arrays, spec, deterministic=fixed, workspace_bytes=cap)
        _TOPK_SCORES_GRAD.settle(call, "topk_scores_grad", spec, fixed, cap)
        return grads
    from . import reference

    return reference.topk_scores_grad(*arrays, spec)


def extract_indexer_topk_scores(logits: Any, topk_indices: Any, *, backend: str = "auto") -> Any:
    """out[..., t] = logits[..., topk_indices[..., t]], -inf where an id is -1 or otherwise outside [0, P).

    logits: [..., P], any float dtype; topk_indices: [..., T] int32 or int64 with the same leading axes.
    Returns [..., T] in logits' dtype. Only the named scores are read. P = 0 gives -inf everywhere.
    Errors as in dsv4_indexer_scores.
    """
    spec = contract.check_extract(logits, topk_indices)
    op = "extract_indexer_topk_scores"
    impl: Any
    match pick(op, backend, spec.library, offered=EXTRACT_OFFERED, twin=f"{op}_torch"):
        case "numba":
            from . import numba_cuda as impl
        case _:
            from . import reference as impl
    return impl.extract(logits, topk_indices, spec)


def dsv4_indexer_topk(
    q: Any,
    pooled_kv: Any,
    weights: Any,
    topk: int,
    *,
    compress_ratio: int,
    softmax_scale: float,
    backend: str = "auto",
    query_start: int = 0,
    query_total_len: int | None = None,
    order: str = "id",
    return_scores: bool = False,
    q_segment_ids: Any = None,
    q_local_positions: Any = None,
    pooled_segment_ids: Any = None,
    pooled_positions: Any = None,
) -> Any:
    """ids[b, i] = the `topk` visible entries with the largest dsv4_indexer_scores, without the [S, P] matrix.

    Exact: larger score first, then smaller id; -0.0 ties with +0.0; +inf comes first; NaN and -inf (invisible entries
    included) are never chosen. A row with fewer usable entries ends in -1; the width is `topk` even where P < topk.
    order: "id" (canonical) lists the chosen ids ascending, "score" best first; -1 last in both.

    q, pooled_kv, weights, compress_ratio, softmax_scale, query_start, query_total_len: as in dsv4_indexer_scores.
    Packed documents: q_segment_ids, q_local_positions [B, S] and pooled_segment_ids, pooled_positions [B, P] (int32 or
    int64; all four or none) replace the causal rule and query_start: a query sees entry j iff the segments match, are
    not 0 (padding), and pooled_positions[j] < (q_local_positions[i] + 1) // R. Positions count from the start of the
    document, those of entries in groups of R tokens.

    Returns int32 [B, S, topk]; with return_scores=True (ids, scores), scores float32 (float64 if any input is
    float64), -inf where the id is -1. The same bits whatever the batch or the chunking; at most 256 MiB beyond inputs
    and result for any S (P up to 262144). Not differentiable: dsv4_indexer_topk_scores gives the chosen scores a
    gradient. backend and errors as in dsv4_indexer_scores; the CUDA kernels choose by the bits of their own scores, and
    more than 2048 entries by the reference's selection.
    """
    documents = {
        "q_segment_ids": q_segment_ids,
        "q_local_positions": q_local_positions,
        "pooled_segment_ids": pooled_segment_ids,
        "pooled_positions": pooled_positions,
    }
    spec = contract.check_topk(
        q, pooled_kv, weights, topk, compress_ratio, softmax_scale, query_start, query_total_len, order, return_scores,
        documents,
    )  # fmt: skip
    chosen = pick("dsv4_indexer_topk", backend, spec.library, offered=OFFERED, twin="")
    impl: Any
    match contract_kernels.within(chosen, backend, q, pooled_kv, weights):
        case "cuda":
            from . import cuda as impl
        case _:
            from . import selection as impl
    return impl.topk(q, pooled_kv, weights, tuple(documents.values()), spec)


def select_indexer_topk(
    scores: Any,
    topk: int,
    *,
    order: str = "id",
    return_scores: bool = False,
    backend: str = "auto",
    compress_ratio: int | None = None,
    query_start: int = 0,
) -> Any:
    """ids[...] = the `topk` largest of scores[..., P]: the selection of dsv4_indexer_topk over given scores.

    Larger score first, then smaller id; -0.0 ties with +0.0; +inf comes first; NaN and -inf are never chosen. A row
    with fewer usable entries ends in -1; the width is `topk` even where P < topk, and P = 0 or topk = 0 are fine.
    order: "id" lists the chosen ids ascending, "score" best first (ties: smaller id first); -1 last in both.

    backend: "auto" takes "cuda" for CuPy arrays in bfloat16, float16 or float32, "reference" for all others.
    compress_ratio: R >= 1 for causal scores [..., S, P]: query i chooses among the entries
    j < (query_start + i + 1) // R, and what the others hold, NaN and +inf included, changes nothing. None: among all.
    query_start: position of the first query; 0 without compress_ratio.
    scores: [..., P], any float dtype. Returns int32 [..., topk]; with return_scores=True (ids, values), values float32
    (float64 for float64 scores), -inf where the id is -1. Errors as in dsv4_indexer_scores.
    """
    spec = contract.check_select(scores, topk, order, return_scores, compress_ratio, query_start)
    chosen = pick("select_indexer_topk", backend, spec.library, offered=OFFERED, twin="")
    impl: Any
    match contract_kernels.within_selection(chosen, backend, scores):
        case "cuda":
            from . import cuda as impl
        case _:
            from . import selection as impl
    return impl.select(scores, spec)
