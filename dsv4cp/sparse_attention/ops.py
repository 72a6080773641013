"""Sparse attention over selected keys, its gradient, and the dense oracle: the public array functions."""

from __future__ import annotations

from typing import Any

from .._arrays import dtype_name
from .._backend import pick
from .._cupy_programs import Repeated, Told
from .._plan import SparseIndexPlan
from . import contract, contract_cudnn

OFFERED = ("reference", "cuda", "cudnn")
GRAD_OFFERED = ("reference", "cuda", "cudnn")
DENSE_OFFERED = ("reference",)
_FORWARD, _BACKWARD = Repeated(__package__, "cuda"), Repeated(__package__, "cuda_bwd")
PLANS = {"reference": ("reference",), "cuda": ("cuda",), "cudnn": ("cudnn",)}  # plan names each backend takes


def dsv4_sparse_attention(
    q: Any,
    kv: Any,
    sinks: Any,
    topk_idxs: Any,
    sm_scale: float,
    *,
    backend: str = "auto",
    reference_rounding: bool = False,
    all_rows_nonempty: bool = False,
    plan: Any = None,
    return_lse: bool = False,
) -> Any:
    """Multi-query attention of each query over its own selected key rows, with a sink per head.

        s[b,i,h,t] = sm_scale * q[b,i,h] . kv[b, id[b,i,t]]          for slots t with 0 <= id < K
        out[b,i,h] = sum_t exp(s_t) kv[b, id_t] / (sum_t exp(s_t) + exp(sink_h))
        lse[b,i,h] = log sum_t exp(s_t)                              natural log, keys only

    K rows serve as keys and as values. The sink is a logit that only joins the denominator.

    Args:
        q: [B, S, H, D] float16, bfloat16, float32 or float64.
        kv: [B, K, D], any of these dtypes; usually q's.
        sinks: [H], any of these dtypes.
        topk_idxs: [B, S, T] int32 or int64, ids into kv's rows of the same batch row. A slot outside
            [0, K) is masked, whatever it holds (-1 by convention), anywhere in the row. A repeated id
            counts once per slot. May be None when a plan is given; the plan's ids are used then.
        sm_scale: finite real number on the host, within float32 unless q or kv is float64.
        backend: "auto" takes "cuda" for CuPy arrays q and kv both in bfloat16 or both in float16 with D 64, 128, 256
            or 512, "reference" for all others. "cuda" by name takes nothing else. "cudnn", NVIDIA's DSA kernels
            (package nvidia-cudnn-frontend, Hopper or Blackwell), is never taken but by name: bfloat16 or float16
            with D 512; on Hopper, where cuDNN has the gradient alone, it runs the kernels of "cuda" here.
        reference_rounding: the arithmetic of DeepSeek's inference code, in which the running maximum starts
            at -1e30: keys that score lower weigh nothing. Forward only; its lse is not one for the gradient.
        all_rows_nonempty: the caller's promise that every query has a valid slot. The reference looks at
            every slot anyway and has nothing to skip; "cudnn" without a plan need not wait for the GPU then.
        plan: a SparseIndexPlan of plan_dsv4_sparse_indices for this backend and K.
        return_lse: return (out, lse) instead of out.

    Returns:
        out [B, S, H, D] in q's dtype, and with return_lse also lse [B, S, H] float32 (float64 when q or kv
        is float64).

    A query without a valid slot (also T = 0 or K = 0) has out 0 and lse -inf, for any sink. Sink +inf: out
    0. Sink -inf: no sink. NaN and infinities in rows that a query did not select never reach it; a NaN that
    it selected makes its output NaN. Arithmetic is float32 (float64 when q or kv is float64): scores, their
    maximum, the sum of unrounded p; for a float16 or bfloat16 kv p is rounded to that dtype before it is
    multiplied with the values. Works on chunks of queries: memory beyond inputs and outputs stays under
    256 MiB for any B, S and K, and with NumPy the result has the same bits for every chunk size.

    Raises:
        TypeError: an argument of the wrong kind or dtype, arrays of different libraries, torch tensors.
        ValueError: shapes that do not fit, another device, an unknown backend, a scale that is not finite,
            a plan for another backend or another K. Plans for the kernels also fit an "auto" that runs the
            reference on CuPy arrays.
        RuntimeError: a backend that cannot run here, arrays that "cudnn" does not take.

    Source: attention of DeepSeek-V4 (shared key-value rows, sinks, selected ids); written from the definition.
    """
    options = sm_scale, backend, reference_rounding, all_rows_nonempty, return_lse
    call, again = _play(_FORWARD, (q, kv, sinks), topk_idxs, plan, (), options)
    if again is not None:
        return tuple(again) if return_lse else again[0]
    flags = {"reference_rounding": reference_rounding, "all_rows_nonempty": all_rows_nonempty, "return_lse": return_lse}
    spec = contract.check(q, kv, sinks, topk_idxs, sm_scale, plan=plan, **flags)
    chosen = pick("dsv4_sparse_attention", backend, spec.library, offered=OFFERED)
    if chosen == "cudnn":
        from . import cudnn

        contract_cudnn.require(q, kv, spec, cudnn.major(q), reference_rounding=bool(reference_rounding))
        laid = contract_cudnn.ids(plan, topk_idxs, spec)
        out, lse = cudnn.forward(q, kv, sinks, laid, spec, bool(all_rows_nonempty))
        return (out, lse) if return_lse else out
    chosen = contract.within_kernels(chosen, backend, q, kv)
    ids = contract.plan_ids(plan, topk_idxs, _plans(chosen, backend, spec.library), spec)
    impl: Any
    match chosen:
        case "cuda":
            from . import cuda as impl
        case _:
            from . import reference as impl
    out, lse = impl.forward(q, kv, sinks, ids, spec, reference_rounding=bool(reference_rounding))
    if chosen == "cuda" and dtype_name(sinks) == "float32":
        _FORWARD.settle(call, "forward", spec, bool(reference_rounding))
    return (out, lse) if return_lse else out


def dsv4_sparse_attention_grad(
    grad_out: Any,
    q: Any,
    kv: Any,
    sinks: Any,
    topk_idxs: Any,
    out: Any,
    lse: Any,
    sm_scale: float,
    *,
    backend: str = "auto",
    backward_impl: str = "atomic",
    backward_workspace_bytes: int = 2 * 1024**3,
    plan: Any = None,
    all_rows_nonempty: bool = False,
) -> tuple[Any, Any, Any]:
    """Gradient of dsv4_sparse_attention from what the forward call saved: (grad_q, grad_kv, grad_sinks).

        p_t      = exp(s_t - L),  p_sink = exp(sink - L),  L = log(exp(lse) + exp(sink))
        delta    = grad_out . out
        ds_t     = p_t (grad_out . kv[id_t] - delta)
        grad_q   = sm_scale sum_t ds_t kv[id_t]
        grad_kv[id_t] += sum_h sm_scale ds_t q_h + p_t grad_out_h
        grad_sinks    -= sum_bi p_sink delta

    Args:
        grad_out: [B, S, H, D], any float dtype and any strides.
        q, kv, sinks, topk_idxs, sm_scale, plan, all_rows_nonempty: as in the forward call.
        out, lse: what the forward call returned with return_lse=True.
        backend: as in the forward call, by q and kv. "cuda" and "cudnn" round grad_out and out to
            q's dtype; those may come from any backend's forward call.
        backward_impl: what may change the bits of grad_kv from run to run. "cuda", "atomic": float32 sums, added to in
            any order. "cuda", "deterministic": sums of integers, scaled by a power of two for each key that is found
            from bounds before the first term; their bits depend on no order, stream, split into batch rows or cap.
            grad_q and grad_sinks have a fixed order in both. The reference on NumPy and array-API arrays adds in a
            fixed order either way; on CuPy arrays it adds with atomics, and "deterministic" is a RuntimeError. "cudnn"
            has "atomic" alone on Hopper (else a RuntimeError); its "deterministic" on Blackwell repeats for the same
            shapes.
        backward_workspace_bytes: cap on working memory beyond outputs and the float32 sum of grad_kv. A
            smaller cap means more passes and the same bits; the reference works within 16 MiB on the CPU
            unless one query alone needs more. "cuda", "deterministic": cap on its sums, 8 bytes for each element of
            grad_kv of a pass, which covers some batch rows, or some key rows (64 at least) of one. Beside it "cuda"
            takes 8 bytes for each query and head, and "deterministic" 8 for each query and 20 for each key. "cudnn"
            takes the same 8 bytes on Hopper, and copies what cuDNN cannot read as it is: strided arrays, queries with
            a key where others have none, H that is no multiple of 4.

    Returns:
        grad_q, grad_kv and grad_sinks in the dtypes of q, kv and sinks. The reference sums grad_kv in float32
        (float64 when q or kv is float64) in the order of queries and slots, and rounds it once. "cuda" rounds p and ds
        to q's dtype as operands of products, sums everything in float32 (or finer) and rounds once.

    A query without a valid slot contributes nothing, whatever grad_out holds there. Sink +inf: every
    gradient of that head is 0; sink -inf: the gradient of the sink is 0, or NaN where a query with keys holds a NaN
    ("cudnn": 0). A key row that nobody selects has gradient exactly 0; a NaN reaches only the rows that the query
    holding it selected. Under "deterministic" a query that holds or selects a NaN or an infinity makes the rows that
    it selected NaN throughout.

    Raises:
        TypeError, ValueError, RuntimeError: as the forward call. ValueError also for an unknown
            backward_impl and for a cap that one step does not fit in (the message says the minimum): one query
            of the reference, 64 key rows of "cuda", "deterministic".

    Source: derivative of the definition in dsv4_sparse_attention.
    """
    options = sm_scale, backend, backward_impl, backward_workspace_bytes, all_rows_nonempty
    call, again = _play(_BACKWARD, (grad_out, q, kv, sinks), topk_idxs, plan, (out, lse), options)
    if again is not None:
        return again[0], again[1], again[2]
    spec = contract.check_grad(
        grad_out, q, kv, sinks, topk_idxs, out, lse, sm_scale,
        backward_impl=backward_impl, backward_workspace_bytes=backward_workspace_bytes,
        plan=plan, all_rows_nonempty=all_rows_nonempty,
    )  # fmt: skip
    chosen = pick("dsv4_sparse_attention_grad", backend, spec.library, offered=GRAD_OFFERED)
    if chosen == "cudnn":
        from . import cudnn

        contract_cudnn.require(q, kv, spec, cudnn.major(q))
        return cudnn.backward(
            grad_out, q, kv, sinks, contract_cudnn.ids(plan, topk_idxs, spec), out, lse, spec,
            all_rows_nonempty=bool(all_rows_nonempty), deterministic=backward_impl == "deterministic",
            workspace_bytes=int(backward_workspace_bytes),
        )  # fmt: skip
    chosen = contract.within_kernels(chosen, backend, q, kv)
    contract.check_fixed_order(chosen, spec.library, backward_impl)
    ids = contract.plan_ids(plan, topk_idxs, _plans(chosen, backend, spec.library), spec)
    cap = int(backward_workspace_bytes)
    match chosen:
        case "cuda":
            fixed = backward_impl == "deterministic"
            from . import cuda_bwd

            grads = cuda_bwd.backward(grad_out, q, kv, sinks, ids, out, lse, spec, cap, fixed)
            if dtype_name(sinks) == "float32":
                _BACKWARD.settle(call, "backward", spec, fixed, cap)
            return grads
        case _:
            from . import reference

            return reference.backward(grad_out, q, kv, sinks, ids, out, lse, spec, cap)


def dense_attention_topk(q: Any, kv: Any, sinks: Any, topk_idxs: Any, sm_scale: float) -> Any:
    """The oracle of dsv4_sparse_attention: scores of every query with every key, weighted by how often it is selected.

        n[b,i,k]   = number of slots t with id[b,i,t] = k
        out[b,i,h] = sum_k n_k exp(s_k) kv[b,k] / (sum_k n_k exp(s_k) + exp(sink_h)),  s_k = sm_scale * q . kv[b,k]

    Args and dtypes as in dsv4_sparse_attention; [B, S, H, D] in q's dtype comes back. O(S K) work in float32
    (float64 when q or kv is float64), p never rounded. Masked slots, repeated ids, empty rows and sinks mean
    what they mean there. A query that selects a row with NaN or infinity gets NaN everywhere.

    Raises:
        TypeError, ValueError: as dsv4_sparse_attention.

    Source: the same definition, summed over keys instead of slots.
    """
    spec = contract.check(q, kv, sinks, topk_idxs, sm_scale, plans=False)
    twin = "dense_attention_topk_torch"
    pick("dense_attention_topk", "reference", spec.library, offered=DENSE_OFFERED, twin=twin)
    from . import reference as impl

    return impl.dense(q, kv, sinks, topk_idxs, spec)


def _play(
    repeated: Repeated, before: tuple[Any, ...], topk_idxs: Any, plan: Any, after: tuple[Any, ...],
    options: tuple[Any, ...],
) -> tuple[Told | None, list[Any] | None]:  # fmt: skip
    """Repeated.play with the plan's ids or topk_idxs between the arrays before and after."""
    if plan is None:
        return repeated.play((*before, topk_idxs, *after), options)
    if topk_idxs is not None or type(plan) is not SparseIndexPlan:
        return None, None
    try:
        ids, laid = plan.indices, (plan.backend, plan.kv_sequence, plan.topk_length is None, plan.valid_rows is None)
    except AttributeError:
        return None, None  # a plan without fields
    return repeated.play((*before, ids, *after), (*options, *laid))


def _plans(chosen: str, backend: str, library: str) -> tuple[str, ...]:
    """Names of the plans that fit: an "auto" plan of CuPy ids is the kernels', whatever dtype attention then meets."""
    steered = backend == "auto" and library == "cupy" and chosen == "reference"
    return PLANS["reference"] + PLANS["cuda"] if steered else PLANS[chosen]
