"""A GPU for tests whose memory is the CPU's: what is queued reads and writes at the addresses that it is given, with
the reference's equations."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _bridge, _bridge_programs, _cupy_programs, _kernels, _tensor_maps  # noqa: E402
from dsv4cp._programs import Programs  # noqa: E402
from dsv4cp.indexer import contract as indexer_contract  # noqa: E402
from dsv4cp.indexer import cuda_grad_kernels, cuda_scores, torch_bridge_topk  # noqa: E402
from dsv4cp.indexer import cuda_sm90 as indexer_sm90  # noqa: E402
from dsv4cp.indexer import reference as indexer_reference  # noqa: E402
from dsv4cp.indexer import torch_bridge_kernels as indexer_kernels  # noqa: E402
from dsv4cp.sinkhorn import contract as sinkhorn_contract  # noqa: E402
from dsv4cp.sinkhorn import cuda as sinkhorn_cuda  # noqa: E402
from dsv4cp.sinkhorn import reference as sinkhorn_reference  # noqa: E402
from dsv4cp.sinkhorn import torch_bridge as sinkhorn_bridge  # noqa: E402
from dsv4cp.sparse_attention import contract, cuda, cuda_bwd_mma, cuda_bwd_sm90  # noqa: E402
from dsv4cp.sparse_attention import cuda_sm90 as attention_sm90  # noqa: E402
from dsv4cp.sparse_attention import reference as attention_reference  # noqa: E402
from dsv4cp.sparse_attention import torch_bridge_kernels as attention_kernels  # noqa: E402
from tests.support.packed import all_values  # noqa: E402

empty_cpu = torch._C._dynamo.guards._empty_strided_cpu


ELEMENTS = {"BFloat16": torch.bfloat16, "Float16": torch.float16, "Float32": torch.float32}
KINDS = [torch.float32, torch.bfloat16, torch.float16]  # WEIGHT_TYPES and KINDS of the indexer's launches
LOG2E = math.log2(math.e)


def at(address, dtype, sizes, steps=None):
    """The tensor at an address."""
    steps = torch.empty(sizes, device="meta").stride() if steps is None else steps
    count = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(sizes, steps)


def mapped(words, dtype):
    """The tensor that a map of `encode` describes."""
    address, rank, *numbers = (int.from_bytes(words[n : n + 8], "little") for n in range(0, 128, 8))
    steps = (1, *(step // 2 for step in numbers[4 : 3 + rank]))
    return at(address, dtype, numbers[:rank][::-1], steps[::-1])


def encode(to, dtype, rank, address, sizes, steps, box, ones, *others):
    """Stands for cuTensorMapEncodeTiled."""
    numbers = [address.value, rank, *sizes, *[0] * (4 - rank), *steps]
    words = b"".join(n.to_bytes(8, "little") for n in numbers).ljust(128, b"\0")
    ctypes.memmove(to.value, words, 128)
    return 0


class Gpu:
    """Runs what is queued with the reference's equations; `queued` has it, but for addresses."""

    def __init__(self):
        self.queued, self.plays, self.held, self.cleared = [], 0, None, []

    def queue(self, kernel, cuda, device, sizes, blocks, values, shared_bytes, stream, fresh_thread=False):
        values = all_values(blocks, values)
        names = [p.name for p in kernel.parameters]
        numbers = {p.name: v for p, v in zip(kernel.parameters, values, strict=True) if p.kind not in (None, np.void)}
        self.queued.append((kernel.function, kernel.defines, sizes, shared_bytes, int(getattr(stream, "ptr", stream)),
                            {name: np.asarray(v).item() for name, v in numbers.items()}))  # fmt: skip
        x = SimpleNamespace(**dict(zip(names, values, strict=True)), grid=sizes[:3])
        defines = dict(kernel.defines)
        x.dtype, x.defines = ELEMENTS.get(defines.get("ELEMENT")), defines
        name = kernel.function.removesuffix("_sm90").removesuffix("_sm90_few")
        getattr(self, name)(x)

    # --- Sinkhorn
    def sinkhorn4_forward(self, x):
        sizes = (x.count, 4, 4)
        spec = sinkhorn_contract.check(at(x.x, x.dtype, sizes), int(x.repeat), float(x.eps))
        at(x.y, x.dtype, sizes).copy_(sinkhorn_reference.forward(at(x.x, x.dtype, sizes), spec))

    def sinkhorn4_backward(self, x):
        grad_y, of = (at(address, x.dtype, (x.count, 4, 4)) for address in (x.grad_y, x.x))
        spec = sinkhorn_contract.check(of, int(x.repeat), float(x.eps))
        at(x.grad_x, x.dtype, of.shape).copy_(sinkhorn_reference.backward(grad_y, of, spec))

    # --- Sparse attention
    def sparse_attention_narrow_ids(self, x):
        ids = at(x.ids, torch.int64, (x.count,))
        inside = (ids >= 0) & (ids < x.keys)
        at(x.narrow, torch.int32, (x.count,)).copy_(torch.where(inside, ids, -1))

    def attention_inputs(self, x):
        tiles = -(-x.heads // int(x.defines.get("ROWS", x.heads)))
        batch = getattr(x, "batch", None) or x.grid[0] // (x.queries * tiles)
        if hasattr(x, "q_map"):
            q = mapped(x.q_map, x.dtype)
        else:
            strides = x.q_stride_b, x.q_stride_s, x.q_stride_h, 1
            q = at(x.q, x.dtype, (batch, x.queries, x.heads, int(x.defines.get("HEAD_DIM", 512))), strides)
        kv = at(x.kv, x.dtype, (q.shape[0], x.keys, q.shape[3]), (x.kv_stride_b, x.kv_stride_k, 1))
        return q, kv, at(x.ids, torch.int32, (*q.shape[:2], x.slots))

    def sparse_attention_fwd(self, x):
        q, kv, ids = self.attention_inputs(x)
        sinks = at(x.sinks, torch.float32, (x.heads,))
        rounding = x.defines.get("REFERENCE_ROUNDING") == "1"
        spec = contract.check(q, kv, sinks, ids, round(float(x.scale) / (1 if rounding else LOG2E), 5))
        out, lse = attention_reference.forward(q, kv, sinks, ids, spec, rounding)
        at(x.out, x.dtype, q.shape).copy_(out)
        at(x.lse, torch.float32, q.shape[:3]).copy_(lse)

    sparse_attention_fwd_sm90 = sparse_attention_fwd_sm90_few = sparse_attention_fwd

    def sparse_attention_bwd_prep(self, x):
        self.held = x

    def sparse_attention_bwd(self, x):
        q, kv, ids = self.attention_inputs(x)
        if hasattr(x, "out_map") and self.held is None:
            grad_out, out, more = mapped(x.grad_out_map, x.dtype), mapped(x.out_map, x.dtype), x
        else:
            more, self.held = self.held, None
            grad_out, out = (
                at(getattr(more, n), x.dtype, q.shape, [*(getattr(more, f"{n}_stride_{a}") for a in "bsh"), 1])
                for n in ("grad_out", "out")
            )
        sinks, lse = at(more.sinks, torch.float32, (x.heads,)), at(more.lse, torch.float32, q.shape[:3])
        spec = contract.check(q, kv, sinks, ids, float(x.scale))
        grads = attention_reference.backward(grad_out, q, kv, sinks, ids, out, lse, spec, 2**31)
        at(x.grad_q, x.dtype, q.shape).copy_(grads[0])
        self.results = grads[1:]

    def sparse_attention_bwd_finish(self, x):
        at(x.grad_kv, x.dtype, (x.batch, x.keys, x.dim)).copy_(self.results[0])

    def sparse_attention_bwd_sinks_sum(self, x):
        at(x.grad_sinks, torch.float32, (x.heads,)).copy_(self.results[1])

    def nothing(self, x):
        """Working memory alone."""

    sparse_attention_bwd_zero = sparse_attention_bwd_sinks = indexer_grad_entry = indexer_grad_bounds = nothing
    sparse_attention_bwd_select = sparse_attention_bwd_exponents = nothing

    # --- Indexer
    def indexer_scores(self, x):
        if hasattr(x, "q_map"):
            q, k = mapped(x.q_map, x.dtype), mapped(x.k_map, x.dtype)[0]
        else:
            blocks = -(-x.entries // cuda_scores.ENTRIES) * -(-x.queries // x.block_queries)
            batch, dim = x.grid[0] // blocks, int(x.defines["INDEX_DIM"])
            strides = x.q_stride_b, x.q_stride_s, x.q_stride_h, 1
            q = at(x.q, x.dtype, (batch, x.queries, x.heads, dim), strides)
            k = at(x.k, x.dtype, (batch, x.entries, dim), (x.k_stride_b, x.k_stride_p, 1))
        weights = at(x.weights, KINDS[x.weight_type], q.shape[:3], (x.w_stride_b, x.w_stride_s, x.w_stride_h))
        start = int(x.before * x.ratio + x.phase - 1)
        spec = indexer_contract.check_scores(q, k, weights, int(x.ratio), float(x.scale), start)
        at(x.out, torch.float32, (*q.shape[:2], x.entries)).copy_(indexer_reference.scores(q, k, weights, spec))

    def indexer_inputs(self, x, entries):
        dim = int(x.defines.get("INDEX_DIM", 128))
        q = at(x.q, x.dtype, (x.grid[1], x.grid[0], x.heads, dim), (x.q_stride_b, x.q_stride_s, x.q_stride_h, 1))
        k = at(x.k, x.dtype, (x.grid[1], entries, dim), (x.k_stride_b, x.k_stride_p, 1))
        return q, k, at(x.weights, KINDS[x.w_kind], q.shape[:3])

    def indexer_gather_scores(self, x):
        q, k, weights = self.indexer_inputs(x, x.entries)
        ids = at(x.ids, torch.int64 if x.ids_wide else torch.int32, (*q.shape[:2], x.slots))
        spec = indexer_contract.check_topk_scores(q, k, weights, ids, 1, float(x.scale))
        at(x.scores, torch.float32, ids.shape).copy_(indexer_reference.topk_scores(q, k, weights, ids, spec))

    def indexer_grad_query(self, x):
        q, k, weights = self.indexer_inputs(x, x.key_last)
        grad = at(x.grad_scores, KINDS[x.g_kind], (*q.shape[:2], x.slots), (x.g_stride_b, x.g_stride_s, x.g_stride_t))
        if x.ids:
            ids = at(x.ids, torch.int64 if x.ids_wide else torch.int32, grad.shape)
            spec = indexer_contract.check_topk_scores_grad(grad, q, k, weights, ids, 1, float(x.scale))
            grads = indexer_reference.topk_scores_grad(grad, q, k, weights, ids, spec)
        else:
            numbers = int(x.ratio), float(x.scale), int(x.query_start)
            spec = indexer_contract.check_scores_grad(grad, q, k, weights, *numbers)
            grads = indexer_reference.scores_grad(grad, q, k, weights, spec)
        for address, grad in zip((x.grad_q, x.grad_w), grads[::2], strict=True):
            if address:
                at(address, grad.dtype, grad.shape).copy_(grad)
        self.results = grads[1]

    def indexer_grad_finish(self, x):
        at(x.grad_k, x.dtype, self.results.shape).copy_(self.results)


ALL_PROGRAMS = [
    value
    for module in (attention_kernels, indexer_kernels, torch_bridge_topk, sinkhorn_bridge)
    for value in vars(module).values()
    if isinstance(value, Programs)
]


def installed(monkeypatch, hopper: bool):
    """Yields a Gpu that takes the place of CUDA for torch's CPU tensors, without any program, until the test ends."""
    made, put = Gpu(), monkeypatch.setattr
    attributes = {
        "MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerMultiprocessor": 233472, "MultiProcessorCount": 132,
    }  # fmt: skip
    runtime = SimpleNamespace(
        getDevice=lambda: 0, setDevice=lambda _: None, memsetAsync=lambda *args: made.cleared.append(args[1:])
    )
    put(cupy.cuda.runtime, "getDevice", runtime.getDevice)
    put(cupy.cuda.runtime, "memsetAsync", runtime.memsetAsync)
    put(cupy.cuda, "Device", lambda _: SimpleNamespace(attributes=attributes, compute_capability="90"))
    for module in attention_sm90, cuda_bwd_sm90:
        put(module, "_is_hopper", lambda device: hopper)
        put(module, "_multiprocessors", lambda device: 132)
    put(indexer_sm90, "is_hopper", lambda device: hopper)
    put(indexer_sm90, "multiprocessors", lambda device: 132)
    put(cuda_grad_kernels, "_is_hopper", lambda: hopper)
    for module, name in ((cuda, "_tile"), (cuda_bwd_mma, "_tile"), (sinkhorn_cuda, "_backward_shape")):
        put(module, name, getattr(module, name).__wrapped__)
    put(torch.Tensor, "is_cuda", property(lambda x: True))
    put(torch.Tensor, "get_device", lambda x: 0)
    put(torch.cuda, "current_device", lambda: 0)
    put(_bridge, "missing", lambda backend: None)
    put(_bridge, "_runtime", lambda: runtime)
    put(_bridge, "_cupy_stream", lambda pointer: SimpleNamespace(ptr=pointer))
    put(_bridge, "is_current", lambda device: True)
    put(_bridge, "stream_pointer", lambda device: 77)
    put(_bridge_programs, "_device_of", lambda x: 0)
    put(_bridge_programs, "_empty_cuda", empty_cpu)
    put(_tensor_maps, "_encoder", lambda: encode)
    put(_kernels, "_cuda", lambda: SimpleNamespace(runtime=runtime))
    put(_kernels, "_queue", made.queue)

    def play(*args):
        made.plays += 1
        _kernels.play(*args)

    for module in _bridge_programs, _cupy_programs:  # launch code that plays what it noted itself is not counted
        put(module, "_kernels", SimpleNamespace(play=play))
    for programs in ALL_PROGRAMS:
        put(programs, "_known", {})
    _tensor_maps._tensor_map.cache_clear()
    _tensor_maps._encoder_of.cache_clear()
    yield made
    _tensor_maps._tensor_map.cache_clear()
    _tensor_maps._encoder_of.cache_clear()
