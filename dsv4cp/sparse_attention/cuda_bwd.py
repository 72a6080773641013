"""Gradient of sparse attention on the GPU: launch parameters of kernels_cu/sparse_attention_bwd*.cu.

`backward` takes CuPy arrays; `launch_backward` takes addresses and strides, for callers whose memory is not CuPy's.
Work is queued on CuPy's current stream, or the one given; nothing waits for it. Before the passes
(cuda_bwd_passes.py): prep, unless the main kernel finds log2_total and delta itself, and for sums of fixed order select
and exponents. A pass: zero the sums, the main kernel, finish. Last the gradient of the sinks.

The main kernel is either of two behind one interface, cuda_bwd_sm90 where it fits the call and the driver can describe
the call's strides, else cuda_bwd_mma:

    launch(*, grad_out, q, kv, ids, log2_total, delta, grad_q, sums, exponents, spec, dtype, grad_out_strides,
           q_strides, kv_strides, deterministic, key_first, key_last, parts, stream) -> bool

addresses as ints on the current device; `spec.batch` is the number of batch rows of this launch and every address is
that of its first; strides in elements, the last is 1. grad_q [B, S, H, D] and sums [B, key_last - key_first, D]
(float32 added with red.add.f32, or int64 with add_fixed and the factor of exponents [B, K]: then an infinite term
marks its key, atomicMax(exponents + key, FIXED_BROKEN)) are contiguous. `parts`: 1 grad_q, 2 sums, 3 both; 1 and 2
together give the bits of 3. Only slots with key_first <= id < key_last add to sums; grad_q (parts 1 and 3: then the
range is [0, K)) takes all of them. Hopper's also takes sinks, out, lse and out_strides, and where its finds_delta says
so it writes log2_total and delta [B, S, H], which are read otherwise. False: the launch was refused (strides that the
driver cannot describe) and nothing was queued.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cupy
import numpy as np

from .. import _kernels
from .._arrays import dtype_name, element_strides
from .._kernel_arguments import constants, float32
from . import contract, cuda, cuda_bwd_mma, cuda_bwd_sm90
from .contract import Spec
from .cuda_bwd_mma import ELEMENTS
from .cuda_bwd_passes import SINK_QUERIES, SUMS, Layout, layout, passes

PREP, FINISH = "sparse_attention_bwd_prep.cu", "sparse_attention_bwd_finish.cu"
SINK_HEADS, SINK_LANES = 32, 8  # of a block of the kernels of the sinks
SELECT_QUERIES, SELECT_THREADS = 32, 512  # of a block of select
MOST_BLOCKS = 4096  # of kernels whose threads step through their work

forced_path: str | None = None  # "portable" makes every call take that kernel: for tests and measurements

# Every specialisation that this file launches, for the tests that compile them all.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    PREP: [
        {"ELEMENT": element, "HEAD_DIM": dim, "BOUNDS": bounds}
        for element in ELEMENTS.values()
        for dim in contract.KERNEL_DIMS
        for bounds in (0, 1)
    ],
    FINISH: [
        {"ELEMENT": element, "FIXED": fixed, "QUADS": quads}
        for element in ELEMENTS.values()
        for fixed, quads in ((0, 0), (0, 1), (1, 0))
    ],
}


# --- Launches ------------------------------------------------------------------------------------------


def launch_backward(
    *, grad_out: int, q: int, kv: int, sinks: int, ids: int, out: int, lse: int, grad_q: int, grad_kv: int,
    grad_sinks: int, work: int, plan: Layout, spec: Spec, dtype: str, grad_out_strides: tuple[int, ...],
    q_strides: tuple[int, ...], kv_strides: tuple[int, ...], out_strides: tuple[int, ...], deterministic: bool,
    stream: Any = None,
) -> None:  # fmt: skip
    """Queues the gradients from addresses on the current device.

    grad_out, q, kv and out must be `cuda.aligned`, of `dtype`, with strides in elements (the last is 1); sinks float32
    [H], ids int32 [B, S, T] and lse float32 [B, S, H] contiguous; grad_q and grad_kv (of `dtype`) and grad_sinks
    (float32) contiguous; `work` plan.size bytes, 16-byte aligned. stream: None for CuPy's current one, an object with
    `.ptr`, or a cudaStream_t as int. Raises RuntimeError where a kernel cannot be compiled or launched.
    """
    at = {name: work + offset for name, offset in vars(plan).items()}
    element, stream = ELEMENTS[dtype], {"stream": stream}
    strides = {"grad_out": grad_out_strides, "out": out_strides, "q": q_strides}
    main = _main(grad_out, q, grad_out_strides, q_strides, spec, dtype)
    if main is cuda_bwd_mma or not cuda_bwd_sm90.finds_delta(out, out_strides, spec, dtype, deterministic):
        _prep(grad_out, q, sinks, out, lse, at, spec, element, strides, deterministic, stream)
    if deterministic:
        _exponents(kv, ids, at, spec, element, kv_strides, stream)
    per_head, per_row = 4 * spec.queries * spec.heads, 2 * spec.queries * spec.heads * spec.dim
    for b, b_end, key, key_end, parts in passes(spec, plan):
        rows = key_end - key
        if parts & SUMS:
            _zero(at["sums"], (8 if deterministic else 4) * (b_end - b) * rows * spec.dim, stream)
        arguments = {
            "grad_out": grad_out + 2 * b * grad_out_strides[0],
            "q": q + 2 * b * q_strides[0],
            "kv": kv + 2 * b * kv_strides[0],
            "ids": ids + 4 * b * spec.queries * spec.slots,
            "log2_total": at["log2_total"] + b * per_head,
            "delta": at["delta"] + b * per_head,
            "grad_q": grad_q + b * per_row,
            "sums": at["sums"],
            "exponents": at["exponents"] + 4 * b * spec.keys if deterministic else 0,
            "spec": spec if b_end - b == spec.batch else dataclasses.replace(spec, batch=b_end - b),
            "dtype": dtype,
            "grad_out_strides": grad_out_strides,
            "q_strides": q_strides,
            "kv_strides": kv_strides,
            "deterministic": deterministic,
            "key_first": key,
            "key_last": key_end,
            "parts": parts,
            **stream,
        }
        more = {"sinks": sinks, "out": out, "lse": lse, "out_strides": out_strides}
        # Refused, if ever, where passes are over single batch rows: sums of fixed order, whose delta prep has found.
        hopper = main is cuda_bwd_sm90 and main.launch(**arguments, **more)
        if not hopper:
            cuda_bwd_mma.launch(**arguments)
        if parts & SUMS:
            quads = hopper and not deterministic
            _kernels.launch(
                _finish_kernel("sparse_attention_bwd_finish", element, deterministic, quads),
                grid=min(-(-(b_end - b) * rows * spec.dim // 8 // 256), MOST_BLOCKS),
                block=256,
                sums=at["sums"],
                exponents=arguments["exponents"],
                grad_kv=grad_kv + 2 * b * spec.keys * spec.dim,
                batch=np.int32(b_end - b),
                keys=np.int32(spec.keys),
                dim=np.int32(spec.dim),
                first_key=np.int32(key),
                rows=np.int32(rows),
                **stream,
            )
    _sinks(sinks, grad_sinks, at, spec, element, deterministic, stream)


def _main(
    grad_out: int, q: int, grad_out_strides: tuple[int, ...], q_strides: tuple[int, ...], spec: Spec, dtype: str
) -> Any:
    """The main kernel's module. It does not depend on how the work is cut into passes: strides are asked about for the
    whole call, since those of a reversed batch axis do not hinder a pass over one batch row."""
    hopper = (
        forced_path != "portable"
        and cuda_bwd_sm90.fits(spec, cupy.cuda.runtime.getDevice())
        and cuda_bwd_sm90.describes(grad_out, q, grad_out_strides, q_strides, spec, dtype)
    )
    return cuda_bwd_sm90 if hopper else cuda_bwd_mma


def _prep(
    grad_out: int, q: int, sinks: int, out: int, lse: int, at: dict[str, int], spec: Spec, element: str,
    strides: dict[str, tuple[int, ...]], deterministic: bool, stream: dict[str, Any],
) -> None:  # fmt: skip
    rows_at_once = max(256 // spec.dim, 1)  # heads that a warp works on
    _kernels.launch(
        _prep_kernel("sparse_attention_bwd_prep", element, spec.dim, deterministic),
        grid=spec.batch * spec.queries if spec.heads > 0 else 0,
        block=32 * min(max(-(-spec.heads // rows_at_once), 1), 8),
        grad_out=grad_out,
        out=out,
        q=q,
        lse=lse,
        sinks=sinks,
        log2_total=at["log2_total"],
        delta=at["delta"],
        key_part=at["key_part"],
        rest=at["rest"],
        **constants(*((name, "bsh", of) for name, of in strides.items()), queries=spec.queries, heads=spec.heads),
        scale=float32(spec.scale),
        **stream,
    )


def _exponents(
    kv: int, ids: int, at: dict[str, int], spec: Spec, element: str, kv_strides: tuple[int, ...],
    stream: dict[str, Any],
) -> None:  # fmt: skip
    """The exponent of every key's sums, from what its queries may add."""
    _zero(at["bounds"], 16 * spec.batch * spec.keys, stream)
    _kernels.launch(
        _prep_kernel("sparse_attention_bwd_select", element, spec.dim, True),
        grid=spec.batch * -(-spec.queries // SELECT_QUERIES) if spec.heads > 0 else 0,
        block=SELECT_THREADS,
        ids=ids,
        key_part=at["key_part"],
        rest=at["rest"],
        bounds=at["bounds"],
        queries=np.int32(spec.queries),
        keys=np.int32(spec.keys),
        slots=np.int32(spec.slots),
        **stream,
    )
    _kernels.launch(
        _prep_kernel("sparse_attention_bwd_exponents", element, spec.dim, True),
        grid=min(-(-spec.batch * spec.keys // 8), MOST_BLOCKS),
        block=256,
        kv=kv,
        bounds=at["bounds"],
        exponents=at["exponents"],
        kv_stride_b=np.int64(kv_strides[0]),
        kv_stride_k=np.int64(kv_strides[1]),
        batch=np.int32(spec.batch),
        keys=np.int32(spec.keys),
        **stream,
    )


def _sinks(
    sinks: int, grad_sinks: int, at: dict[str, int], spec: Spec, element: str, deterministic: bool,
    stream: dict[str, Any],
) -> None:  # fmt: skip
    rows = spec.batch * spec.queries
    chunks, head_tiles = -(-rows // SINK_QUERIES), -(-spec.heads // SINK_HEADS)
    _kernels.launch(
        _finish_kernel("sparse_attention_bwd_sinks", element, deterministic),
        grid=(chunks, head_tiles),
        block=(SINK_HEADS, SINK_LANES),
        log2_total=at["log2_total"],
        delta=at["delta"],
        sinks=sinks,
        partial=at["sink_parts"],
        rows=np.int64(rows),
        heads=np.int32(spec.heads),
        **stream,
    )
    _kernels.launch(
        _finish_kernel("sparse_attention_bwd_sinks_sum", element, deterministic),
        grid=head_tiles,
        block=(SINK_HEADS, SINK_LANES),
        partial=at["sink_parts"],
        grad_sinks=grad_sinks,
        chunks=np.int64(chunks),
        heads=np.int32(spec.heads),
        **stream,
    )


def _zero(address: int, size: int, stream: dict[str, Any]) -> None:
    chunks = -(-size // 16)
    _kernels.launch(
        _finish_kernel("sparse_attention_bwd_zero", "BFloat16", False),
        grid=min(-(-chunks // 256), MOST_BLOCKS),
        block=256,
        to=address,
        chunks=np.int64(chunks),
        **stream,
    )


@functools.cache
def _prep_kernel(function: str, element: str, dim: int, bounds: bool) -> _kernels.Kernel:
    return _kernels.kernel(PREP, function, defines={"ELEMENT": element, "HEAD_DIM": dim, "BOUNDS": int(bounds)})


@functools.cache
def _finish_kernel(function: str, element: str, fixed: bool, quads: bool = False) -> _kernels.Kernel:
    defines = {"ELEMENT": element, "FIXED": int(fixed), "QUADS": int(quads)}
    return _kernels.kernel(FINISH, function, defines=defines)


# --- CuPy arrays ---------------------------------------------------------------------------------------


def backward(
    grad_out: Any, q: Any, kv: Any, sinks: Any, ids: Any, out: Any, lse: Any, spec: Spec, cap: int, deterministic: bool
) -> tuple[Any, Any, Any]:
    """(grad_q, grad_kv, grad_sinks) in the dtypes of q, kv and sinks."""
    with q.device:
        grad_out, out, q, kv = (cuda._readable(x.astype(q.dtype, copy=False)) for x in (grad_out, out, q, kv))
        sinks32, lse = (cupy.ascontiguousarray(x, dtype=np.float32) for x in (sinks, lse))
        ids = cuda._int32(cupy.ascontiguousarray(ids), spec)
        grad_q, grad_kv = cupy.empty(q.shape, q.dtype), cupy.empty(kv.shape, kv.dtype)
        grad_sinks = cupy.empty(sinks.shape, np.float32)
        plan = layout(spec, deterministic, cap)
        work = cupy.empty(plan.size, np.uint8)
        launch_backward(
            grad_out=grad_out.data.ptr, q=q.data.ptr, kv=kv.data.ptr, sinks=sinks32.data.ptr, ids=ids.data.ptr,
            out=out.data.ptr, lse=lse.data.ptr, grad_q=grad_q.data.ptr, grad_kv=grad_kv.data.ptr,
            grad_sinks=grad_sinks.data.ptr, work=work.data.ptr, plan=plan, spec=spec, dtype=dtype_name(q),
            grad_out_strides=element_strides(grad_out), q_strides=element_strides(q), kv_strides=element_strides(kv),
            out_strides=element_strides(out), deterministic=deterministic,
        )  # fmt: skip
        return grad_q, grad_kv, grad_sinks.astype(sinks.dtype, copy=False)
