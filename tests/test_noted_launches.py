"""Every operation's launch code, noted with arrays in one place and played in another, queues what it queues itself."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

from dsv4cp import _kernels, _tensor_maps  # noqa: E402
from dsv4cp._kernel_notes import Noting, launches  # noqa: E402
from dsv4cp.indexer import contract as indexer_contract  # noqa: E402
from dsv4cp.indexer import cuda_grad_kernels, cuda_grad_launch, cuda_scores  # noqa: E402
from dsv4cp.indexer import cuda_sm90 as indexer_sm90  # noqa: E402
from dsv4cp.indexer.cuda_grad_launch import Operand, Operands  # noqa: E402
from dsv4cp.sinkhorn import contract as sinkhorn_contract  # noqa: E402
from dsv4cp.sinkhorn import cuda as sinkhorn_cuda  # noqa: E402
from dsv4cp.sparse_attention import contract, cuda, cuda_bwd, cuda_bwd_sm90, cuda_sm90  # noqa: E402
from tests.support.packed import all_values  # noqa: E402

STREAM = 77
SHARED, GIB2 = 232448, 2**31
HERE, THERE = ([(n + 1) * far for n in range(16)] for far in (2**40, 2**42 + 4096))


class Device:
    """The driver and a Hopper without a device: what is queued on it."""

    def __init__(self):
        self.queued = []

    def queue(self, kernel, _cuda, device, sizes, blocks, values, shared_bytes, stream, _fresh=False):
        plain = all_values(blocks, values)
        self.queued.append((kernel.file, kernel.function, kernel.defines, device, sizes, plain, shared_bytes, stream))

    def clear(self, address, value, size, stream):
        self.queued.append(("clear", address, value, size, stream))


@pytest.fixture
def device(monkeypatch):
    driver = Device()
    attributes = {
        "MaxSharedMemoryPerBlockOptin": SHARED, "MultiProcessorCount": 132, "MaxSharedMemoryPerMultiprocessor": 233472
    }  # fmt: skip
    runtime = SimpleNamespace(getDevice=lambda: 0, memsetAsync=driver.clear)
    about = SimpleNamespace(attributes=attributes, compute_capability="90")
    fake = SimpleNamespace(runtime=runtime, Device=lambda *_: about)
    for module in (cuda, cuda_bwd, cuda_bwd.cuda_bwd_mma, cuda_scores, cuda_grad_launch, sinkhorn_cuda):
        monkeypatch.setattr(module, "cupy", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(cupy.cuda, "runtime", runtime)
    for module, hopper, many in (
        (cuda_sm90, "_is_hopper", "_multiprocessors"), (cuda_bwd_sm90, "_is_hopper", "_multiprocessors"),
        (indexer_sm90, "is_hopper", "multiprocessors"),
    ):  # fmt: skip
        monkeypatch.setattr(module, hopper, lambda _: True)
        monkeypatch.setattr(module, many, lambda _: 132)
    monkeypatch.setattr(cuda_grad_kernels, "_is_hopper", lambda: True)
    monkeypatch.setattr(_kernels, "_cuda", lambda: fake)
    monkeypatch.setattr(_kernels, "_queue", driver.queue)

    def encode(at, dtype, rank, address, sizes, steps, box, *rest):
        told = repr((dtype, rank, address.value, list(sizes), list(steps), list(box)))
        ctypes.memmove(at.value, told.encode().ljust(128)[:128], 128)
        return 0

    monkeypatch.setattr(_tensor_maps, "_encoder", lambda: encode)
    remembered = _tensor_maps._tensor_map, _tensor_maps._encoder_of, sinkhorn_cuda._backward_shape
    for function in remembered:
        function.cache_clear()
    yield driver
    for function in remembered:
        function.cache_clear()


def compare(device, launch, arrays: int, least: int) -> None:
    """launch(addresses, stream) of `arrays` arrays, itself and noted elsewhere."""
    launch(THERE[:arrays], STREAM)
    direct, device.queued = device.queued, []
    note = Noting()
    launch([note.array(at if n % 2 else None) for n, at in enumerate(HERE[:arrays])], note)
    assert device.queued == []
    _kernels.play(launches(note.steps, note.arrays), THERE[:arrays], STREAM)
    assert device.queued == direct
    assert len(direct) >= least
    assert all(len(x) == 5 or x[7] == STREAM for x in direct)


def attention(b=2, s=5, h=64, d=512, k=100, t=7, scale=0.5):
    q, kv = np.broadcast_to(np.float16(0), (b, s, h, d)), np.broadcast_to(np.float16(0), (b, k, d))
    return contract.check(q, kv, np.zeros(h, np.float32), np.broadcast_to(np.int64(0), (b, s, t)), scale)


@pytest.fixture(params=[None, "portable"], ids=["default", "portable"])
def path(request, monkeypatch):
    for module in (cuda, cuda_bwd, cuda_scores, cuda_grad_kernels):
        monkeypatch.setattr(module, "forced_path", request.param)


@pytest.mark.parametrize("rounding", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
def test_attention(device, path, heads, rounding):
    spec = attention(h=heads)
    strides = {"q_strides": (5 * heads * 512, heads * 512, 512, 1), "kv_strides": (51200, 512, 1)}

    def launch(at, stream):
        cuda.launch_narrow_ids(at[3], at[4], 70, 100, stream=stream)
        ours = (*at[:3], at[4], *at[5:7])
        cuda.launch_forward(*ours, spec, dtype="bfloat16", **strides, reference_rounding=rounding, stream=stream)

    compare(device, launch, 7, 2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cap", [GIB2, 8 * 512 * 100, 8 * 512 * 64], ids=["whole", "a row", "ranges"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 512), (64, 512), (128, 512), (20, 128)])
def test_attention_gradient(device, path, heads, dim, cap, deterministic):
    spec = attention(h=heads, d=dim)
    plan = cuda_bwd.layout(spec, deterministic, cap)
    names = ("grad_out", "q", "kv", "sinks", "ids", "out", "lse", "grad_q", "grad_kv", "grad_sinks", "work")
    rows = 5 * heads * dim, heads * dim, dim, 1
    strides = {f"{name}_strides": rows for name in ("grad_out", "q", "out")} | {"kv_strides": (100 * dim, dim, 1)}

    def launch(at, stream):
        cuda_bwd.launch_backward(
            **dict(zip(names, at, strict=True)), plan=plan, spec=spec, dtype="float16", deterministic=deterministic,
            **strides, stream=stream,
        )  # fmt: skip

    compare(device, launch, 11, 5)


def slots(b=2, s=5, i=64, e=128, p=300, t=70, start=0):
    sizes = {"batch": b, "queries": s, "entries": p, "heads": i, "index_dim": e, "slots": t}
    return indexer_contract.SlotsSpec(
        "cupy", np, 0, compute=np.float32, softmax_scale=0.5, compress_ratio=4, query_start=start, **sizes
    )


def operand(at, dtype, *sizes):
    strides = [int(np.prod(sizes[n + 1 :])) for n in range(len(sizes))]
    return Operand(at, dtype, tuple(strides))


@pytest.mark.parametrize("heads", [8, 64, 128])
def test_indexer_scores(device, path, heads):
    spec = slots(i=heads)

    def launch(at, stream):
        operands = (
            cuda_scores.Operand(*operand(at[0], "bfloat16", 2, 5, heads, 128)),
            cuda_scores.Operand(*operand(at[1], "bfloat16", 2, 300, 128)),
            cuda_scores.Operand(*operand(at[2], "float32", 2, 5, heads)),
        )
        cuda_scores.launch_scores(*operands, at[3], spec, cuda_scores.limits(spec), stream=stream)

    compare(device, launch, 4, 1)


def read(at, ids: str | None, grad: bool) -> Operands:
    return Operands(
        operand(at[0], "bfloat16", 2, 5, 64, 128), operand(at[1], "bfloat16", 2, 300, 128),
        operand(at[2], "bfloat16", 2, 5, 64), operand(at[3], ids, 2, 5, 70) if ids else None,
        operand(at[4], "float32", 2, 5, 70 if ids else 300) if grad else None,
    )  # fmt: skip


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_indexer_scores_at_ids(device, path, ids):
    spec = slots()
    compare(
        device, lambda at, s: cuda_grad_launch.launch_topk_scores(read(at, ids, False), at[5], spec, stream=s), 6, 1
    )


@pytest.mark.parametrize("batch_rows", [2, 70000])
def test_rows_beyond_a_grid(device, batch_rows):
    spec = slots(b=batch_rows)
    compare(
        device, lambda at, s: cuda_grad_launch.launch_topk_scores(read(at, "int64", False), at[5], spec, stream=s), 6,
        1 + (batch_rows > 65535),
    )  # fmt: skip


@pytest.mark.parametrize("cap", [GIB2, 1028 * 300, 1028 * 64])
@pytest.mark.parametrize("deterministic", [False, True])
def test_indexer_gradient_at_ids(device, path, deterministic, cap):
    spec = slots()
    passes = cuda_grad_launch.plan(spec, deterministic, cap)

    def launch(at, stream):
        operands = read(at, "int64", True)
        cuda_grad_launch.launch_topk_scores_grad(operands, tuple(at[5:8]), at[8], spec, passes, stream=stream)

    compare(device, launch, 9, 3)


def test_dense_indexer_gradient(device, path):
    spec = slots()

    def launch(at, stream):
        cuda_grad_launch.launch_scores_grad(read(at, None, True), tuple(at[5:8]), at[8], spec, stream=stream)

    compare(device, launch, 9, 3)


@pytest.mark.parametrize("m", [2, 4, 7, 16])
def test_sinkhorn(device, m):
    spec = sinkhorn_contract.check(np.zeros((99, m, m), np.float32), 20, 1e-6)

    def launch(at, stream):
        sinkhorn_cuda.launch_forward(*at[:2], spec, stream=stream)
        sinkhorn_cuda.launch_backward(*at[2:5], spec, stream=stream)

    compare(device, launch, 5, 2)
