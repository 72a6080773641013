"""What sparse attention's portable kernel is launched with, without a GPU: tiles, blocks, shared memory, arguments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")

from dsv4cp import _kernels  # noqa: E402
from dsv4cp.sparse_attention import contract, cuda  # noqa: E402

SHARED = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448}  # bytes that a block may opt in to
HEADS = (1, 3, 8, 16, 17, 24, 31, 32, 33, 48, 64, 96, 128)
POINTERS = ("q", "kv", "sinks", "ids", "out", "lse")


@pytest.fixture
def launches(monkeypatch):
    made = []

    def launch(kernel, *, grid, block, shared_bytes=0, stream=None, **arguments):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert type(value) is (bytes if kinds[name] is np.void else kinds[name] or int), name
        values = {n: v if kinds[n] in (None, np.void) else v.item() for n, v in arguments.items()}
        defines = {name: int(v) if v.isdecimal() else v for name, v in kernel.defines}
        shape = {"grid": grid, "block": block, "shared": shared_bytes, "stream": stream}
        made.append(SimpleNamespace(defines=defines, **shape, **values))

    monkeypatch.setattr(_kernels, "launch", launch)
    monkeypatch.setattr(cuda, "forced_path", "portable")
    return made


@pytest.fixture(params=SHARED)
def shared(request, monkeypatch):
    device = SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": SHARED[request.param]})
    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr(cuda, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: device, runtime=runtime)))
    cuda._tile.cache_clear()
    yield SHARED[request.param]
    cuda._tile.cache_clear()


def spec_of(b=2, s=5, h=8, d=512, k=100, t=7, scale=0.5) -> contract.Spec:
    q, kv = np.broadcast_to(np.float16(0), (b, s, h, d)), np.broadcast_to(np.float16(0), (b, k, d))
    ids = np.broadcast_to(np.int64(0), (b, s, t))
    return contract.check(q, kv, np.zeros(h, np.float32), ids, scale)


def launch(spec: contract.Spec, **options) -> None:
    strides = {"q_strides": (3, -(2**40), 5, 1), "kv_strides": (2**33, 8, 1)}
    pointers = [2**40 + n for n in range(len(POINTERS))]
    cuda.launch_forward(*pointers, spec, **{"dtype": "float16", **strides, **options})


@pytest.mark.parametrize("d", contract.KERNEL_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_has_a_row_and_the_block_fits(launches, shared, heads, d):
    for rounding in (False, True):
        launch(spec_of(h=heads, d=d), reference_rounding=rounding, stream=7)
    plain, rounded = launches
    rows, keys, warps = (plain.defines[name] for name in ("ROWS", "KEYS", "WARPS"))
    tiles = -(-heads // rows)
    assert plain.grid == 2 * 5 * tiles
    assert tiles * rows >= heads
    assert tiles == 1 or rows == 64 or (d == 512 and shared == SHARED["sm_86"])
    assert rows == 16 or heads > rows // 2, "a smaller tile would do"
    assert plain.block == 32 * warps
    assert plain.shared == plain.defines["SHARED_BYTES"] <= shared
    assert plain.shared >= 2 * d * (rows + 2 * keys)
    assert plain.defines["ELEMENT"] == "Float16"
    assert plain.defines["HEAD_DIM"] == d
    assert plain.stream == 7
    assert [plain.defines["REFERENCE_ROUNDING"], rounded.defines["REFERENCE_ROUNDING"]] == [0, 1]
    layouts = [{n: v for n, v in x.items() if n not in ("ELEMENT", "REFERENCE_ROUNDING")} for x in variants()]
    assert {n: v for n, v in plain.defines.items() if n not in ("ELEMENT", "REFERENCE_ROUNDING")} in layouts


def variants() -> list[dict]:
    return cuda.VARIANTS["sparse_attention_fwd.cu"]


def test_arguments(launches, shared):
    launch(spec_of())
    (got,) = launches
    assert [getattr(got, name) - 2**40 for name in POINTERS] == list(range(6))
    assert (got.q_stride_b, got.q_stride_s, got.q_stride_h) == (3, -(2**40), 5)
    assert (got.kv_stride_b, got.kv_stride_k) == (2**33, 8)
    assert (got.queries, got.heads, got.keys, got.slots) == (5, 8, 100, 7)
    assert got.scale == pytest.approx(0.5 * np.log2(np.e), rel=1e-7)
    launch(spec_of(), reference_rounding=True)
    assert launches[1].scale == 0.5
    launch(spec_of(scale=3e38))
    assert launches[2].scale == np.inf


def test_hopper_takes_one_kernel_for_few_heads_and_one_for_more(launches, shared, monkeypatch):
    from dsv4cp.sparse_attention import cuda_sm90

    monkeypatch.setattr(cuda, "forced_path", None)
    monkeypatch.setattr(cuda_sm90, "_is_hopper", lambda device: True)
    monkeypatch.setattr(cuda_sm90, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda_sm90, "tensor_map", lambda *_: bytes(128))
    for heads, queries, grid, block in (
        (1, 5, 5, cuda_sm90.FEW_THREADS),
        (16, 4, 4, cuda_sm90.FEW_THREADS),
        (16, 1000, 132, cuda_sm90.FEW_THREADS),
        (32, 5, 10, cuda_sm90.FEW_THREADS),
        (33, 5, 10, cuda_sm90.THREADS),
        (64, 1000, 132, cuda_sm90.THREADS),
        (128, 5, 20, cuda_sm90.THREADS),
    ):
        launch(spec_of(s=queries, h=heads), stream=7)
        got = launches[-1]
        assert (got.grid, got.block, got.batch, got.stream) == (grid, block, 2, 7)
        assert got.shared == got.defines["SHARED_BYTES"] <= SHARED["sm_90"]
    launch(spec_of(h=16), reference_rounding=True)
    assert "REFERENCE_ROUNDING" in launches[-1].defines


@pytest.mark.parametrize("axis", "bsh")
def test_nothing_to_do_is_an_empty_grid(launches, shared, axis):
    launch(spec_of(**{axis: 0}))
    assert launches[0].grid == 0


def test_a_device_without_the_memory_is_told(launches, monkeypatch, shared):
    device = SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": 65536})
    monkeypatch.setattr(cuda.cupy.cuda, "Device", lambda _: device)
    with pytest.raises(RuntimeError, match="99 KB"):
        launch(spec_of())


@pytest.mark.parametrize(
    ("address", "shape", "strides", "want"),
    [
        (0, (2, 3, 64), (192, 64, 1), True),
        (16, (2, 3, 64), (-192, 8, 1), True),
        (8, (2, 3, 64), (192, 64, 1), False),
        (0, (2, 3, 64), (192, 65, 1), False),
        (0, (2, 3, 64), (192, 64, 2), False),
        (0, (1, 3, 64), (7, 64, 1), True),  # an axis of length 1 goes nowhere
        (0, (0, 3, 64), (7, 64, 1), True),
    ],
)
def test_aligned(address, shape, strides, want):
    assert cuda.aligned(address, shape, strides) is want


def test_what_the_kernels_take():
    bf16, half, single = (np.zeros((1, 1, 1, 64), dtype) for dtype in (ml_dtypes.bfloat16, np.float16, np.float32))
    for q, kv in ((bf16, bf16), (half, half)):
        assert contract.within_kernels("cuda", "cuda", q, kv[0]) == "cuda"
    short = half[..., :8]
    for q, kv, kind in ((single, single, TypeError), (half, bf16, TypeError), (short, short, ValueError)):
        assert contract.kernels_unfit(q, kv[0]) is not None
        assert contract.within_kernels("cuda", "auto", q, kv[0]) == "reference"
        assert contract.within_kernels("reference", "auto", q, kv[0]) == "reference"
        with pytest.raises(kind, match="the CUDA kernels take"):
            contract.within_kernels("cuda", "cuda", q, kv[0])
