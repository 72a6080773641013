"""Launch parameters of kernels_cu/sparse_attention_bwd_sm90.cu: Hopper's main kernel of the gradient, D 512.

The interface is that of the head of cuda_bwd.py; the portable kernel serves the calls that do not fit.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from .. import _kernels
from .._kernel_arguments import constants, float32
from .contract import Spec
from .cuda_sm90 import DIM, ELEMENTS, MOST_ITEMS, _is_hopper, _multiprocessors, tensor_map

FILE, FUNCTION = "sparse_attention_bwd_sm90.cu", "sparse_attention_bwd_sm90"
HEADS, BOX_HEADS, THREADS = 64, 32, 512
# SHARED in the kernel, which checks it, by (blocks of heads in a cluster, deterministic, finds delta).
SHARED_BYTES = {
    (1, False, True): 231968,
    (1, False, False): 231696,
    (1, True, False): 215776,
    (2, False, True): 231984,
    (2, False, False): 231712,
    (2, True, False): 232176,
}
CLUSTERS_OF_FOUR = 30  # of 132 multiprocessors: what the parts of an H200 that share a cluster's network have room for


def _defines(element: str, blocks: int, deterministic: bool, finds_delta: bool) -> dict[str, Any]:
    return {
        "ELEMENT": element,
        "HEAD_BLOCKS": blocks,
        "DETERMINISTIC": int(deterministic),
        "DELTA": int(finds_delta),
        "SHARED_BYTES": SHARED_BYTES[blocks, deterministic, finds_delta],
    }


# Every specialisation that this file launches, for the tests that compile them all.
VARIANTS = {FILE: [_defines(e, *which) for e in ELEMENTS.values() for which in SHARED_BYTES]}


def fits(spec: Spec, device: int) -> bool:
    """Whether this path runs the call."""
    return (
        spec.dim == DIM and _is_hopper(device) and 0 < spec.batch * spec.queries * -(-spec.heads // HEADS) <= MOST_ITEMS
    )


def describes(
    grad_out: int, q: int, grad_out_strides: tuple[int, ...], q_strides: tuple[int, ...], spec: Spec, dtype: str
) -> bool:
    """Whether the driver can describe the strides of q and grad_out (reversed axes it cannot)."""
    q_map, grad_out_map = _map(q, q_strides, spec, dtype), _map(grad_out, grad_out_strides, spec, dtype)
    return q_map is not None and grad_out_map is not None


def finds_delta(out: int, out_strides: tuple[int, ...], spec: Spec, dtype: str, deterministic: bool) -> bool:
    """Whether the kernel finds log2_total and delta itself: not for sums of fixed order, whose exponents need more of
    every query beforehand, nor where the driver cannot describe the strides of out."""
    return not deterministic and _map(out, out_strides, spec, dtype) is not None


def launch(
    *, grad_out: int, q: int, kv: int, sinks: int, ids: int, out: int, lse: int, log2_total: int, delta: int,
    grad_q: int, sums: int, exponents: int, spec: Spec, dtype: str, grad_out_strides: tuple[int, ...],
    q_strides: tuple[int, ...], kv_strides: tuple[int, ...], out_strides: tuple[int, ...], deterministic: bool,
    key_first: int, key_last: int, parts: int, stream: Any,
) -> bool:  # fmt: skip
    """Queues the call; False where the driver cannot describe the strides of q or grad_out, and nothing was queued.

    Where `finds_delta`, log2_total and delta are results, from sinks, out and lse.
    """
    import cupy

    q_map, grad_out_map = _map(q, q_strides, spec, dtype), _map(grad_out, grad_out_strides, spec, dtype)
    if q_map is None or grad_out_map is None:
        return False
    out_map = None if deterministic else _map(out, out_strides, spec, dtype)
    finds = out_map is not None  # as finds_delta says
    device = cupy.cuda.runtime.getDevice()
    blocks = 1 if spec.heads <= HEADS else 2
    items = spec.batch * spec.queries * -(-spec.heads // (HEADS * blocks))
    room = _multiprocessors(device) // 2 if blocks == 1 else _multiprocessors(device) * CLUSTERS_OF_FOUR // 132
    if parts == 1:
        key_first = key_last = 0  # no slot adds to sums
    _kernels.launch(
        _kernel(dtype, blocks, deterministic, finds),
        grid=min(items, room) * 2 * blocks,
        block=THREADS,
        shared_bytes=SHARED_BYTES[blocks, deterministic, finds],
        stream=stream,
        q_map=q_map,
        grad_out_map=grad_out_map,
        out_map=out_map if finds else q_map,  # not read
        kv=kv,
        ids=ids,
        lse=lse,
        sinks=sinks,
        log2_total=log2_total,
        delta=delta,
        grad_q=grad_q,
        sums=sums,
        exponents=exponents,
        **constants(
            ("kv", "bk", kv_strides), items=items, queries=spec.queries, heads=spec.heads, keys=spec.keys,
            slots=spec.slots, key_first=key_first, key_last=key_last, parts=parts,
        ),
        scale=float32(spec.scale),
        scale2=float32(spec.scale * math.log2(math.e)),
    )  # fmt: skip
    return True


def _map(address: int, strides: tuple[int, ...], spec: Spec, dtype: str) -> Any:
    """The tensor map of q, grad_out or out, None where the driver refuses."""
    return tensor_map(address, (spec.heads, spec.queries, spec.batch), strides[2::-1], dtype, BOX_HEADS)


@functools.cache
def _kernel(dtype: str, blocks: int, deterministic: bool, finds: bool) -> _kernels.Kernel:
    defines = _defines(ELEMENTS[dtype], blocks, deterministic, finds)
    return _kernels.kernel(FILE, FUNCTION, defines=defines, arch="sm_90a")
