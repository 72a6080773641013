"""What the indexer's kernels are launched with, without a GPU: limits, tiles, grids, shared memory, chunks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")

from dsv4cp import _kernels  # noqa: E402
from dsv4cp.indexer import contract, contract_kernels, cuda_scores, cuda_sm90, cuda_topk  # noqa: E402
from dsv4cp.indexer.cuda_scores import Limits, Operand  # noqa: E402

MAP = bytes(128)
SM90_SHARED = 232448  # bytes that a block may opt in to


@pytest.fixture
def launches(monkeypatch):
    made = []

    def launch(kernel, *, grid, block, shared_bytes=0, stream=None, **arguments):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert kinds[name] is np.void or type(value) is (kinds[name] or int), name
        values = {n: v if kinds[n] in (None, np.void) else v.item() for n, v in arguments.items()}
        defines = {name: int(v) if v.isdecimal() else v for name, v in kernel.defines}
        shape = {"grid": grid, "block": block, "shared": shared_bytes, "stream": stream}
        made.append(SimpleNamespace(function=kernel.function, defines=defines, **shape, **values))

    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setattr(cuda_scores, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(_kernels, "launch", launch)
    monkeypatch.setattr(cuda_sm90, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda_sm90, "is_hopper", lambda device: True)
    return made


@pytest.fixture
def maps(monkeypatch):
    """What the driver is asked to describe; it agrees."""
    asked = []
    monkeypatch.setattr(cuda_sm90, "tensor_map", lambda *arguments: asked.append(arguments) or MAP)
    return asked


def spec_of(b=2, s=50, i=64, e=128, p=300, ratio=4, start=0, scale=0.5) -> contract.Spec:
    half = np.float16(0)
    q, k, w = (np.broadcast_to(half, shape) for shape in ((b, s, i, e), (b, p, e), (b, s, i)))
    return contract.check_scores(q, k, w, ratio, scale, start)


def launch(spec: contract.Spec, **options) -> None:
    q = Operand(2**40, "float16", (2**33, 8192, 128, 1))
    k = Operand(2**40 + 16, "float16", (2**20, 128, 1))
    weights = Operand(2**40 + 2, "bfloat16", (-9, 0, 3))
    cuda_scores.launch_scores(q, k, weights, 2**40 + 3, spec, cuda_scores.limits(spec), **options)


# --- Limits ----------------------------------------------------------------------------------------------


RATIOS = (1, 3, 4, 128, 2**31 - 1, 2**31, 2**31 + 5, 2**40, 2**59)
BACK = (0, 1, 2, 40, 2**31 - 2, 2**31 + 2, 2**33)  # positions before the end of a group
STARTS = [(r, r * groups - n) for r in RATIOS for groups in (1, 2, 7) for n in BACK]


@pytest.mark.parametrize(
    ("ratio", "start"), [(r, s) for r, s in STARTS if 0 <= s <= contract.LARGEST_POSITION], ids=str
)
def test_limits_are_the_causal_rule_in_32_bits(ratio, start):
    for entries in (1, 5, 10**6, 2**31 - 1):
        spec = spec_of(p=entries, ratio=ratio, start=start)
        visible = cuda_scores.limits(spec)
        assert all(0 <= n < 2**32 for n in visible) and visible.before <= entries and visible.ratio > 0
        for i in (0, 1, 2, 39, 40, 41, 10**5, 2**31 - 2):
            assert visible.phase + i < 2**32
            got = min(visible.before + (visible.phase + i) // visible.ratio, entries)
            assert got == min((start + i + 1) // ratio, entries), (entries, i)
        assert visible.before + (visible.phase + 2**31 - 2) // visible.ratio < 2**32


def test_without_causality_everything_is_visible():
    assert cuda_scores.limits(spec_of(p=77), causal=False) == Limits(77, 0, 1)


# --- Scores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", contract_kernels.DIMS)
@pytest.mark.parametrize("heads", [1, 31, 32, 33, 64, 65, 128])
def test_every_head_has_a_place_and_the_block_fits(launches, maps, monkeypatch, heads, dim):
    launch(spec_of(i=heads, e=dim), stream=7)
    monkeypatch.setattr(cuda_scores, "forced_path", "portable")
    launch(spec_of(i=heads, e=dim), stream=7)
    hopper, portable = launches
    assert [x.function for x in launches] == ["indexer_scores_sm90", "indexer_scores"]
    assert heads <= hopper.defines["HEADS"] <= max(32, 2 * heads)
    assert hopper.shared == hopper.defines["SHARED_BYTES"] <= SM90_SHARED
    assert portable.shared == portable.defines["SHARED_BYTES"] <= 48 * 1024
    assert hopper.grid == 132 and hopper.block == 512 and portable.block == 128
    for got, file in ((hopper, "indexer_scores_sm90.cu"), (portable, "indexer_scores.cu")):
        from dsv4cp.indexer import cuda

        layouts = [{n: v for n, v in d.items() if n != "ELEMENT"} for d in cuda.VARIANTS[file]]
        assert {n: v for n, v in got.defines.items() if n != "ELEMENT"} in layouts
        assert (got.weights, got.out, got.stream) == (2**40 + 2, 2**40 + 3, 7)
        assert (got.w_stride_b, got.w_stride_s, got.w_stride_h) == (-9, 0, 3)
        assert (got.queries, got.heads, got.entries) == (50, heads, 300)
        assert (got.before, got.phase, got.ratio) == (0, 1, 4)
        assert (got.weight_type, got.fill, got.scale) == (1, 1, 0.5)
    assert (portable.q, portable.k) == (2**40, 2**40 + 16)
    assert (portable.q_stride_b, portable.q_stride_s, portable.q_stride_h) == (2**33, 8192, 128)
    assert (portable.k_stride_b, portable.k_stride_p) == (2**20, 128)


def test_what_the_driver_is_told(launches, maps):
    launch(spec_of(b=2, s=50, i=20, e=128, p=300))
    assert maps == [
        (2**40, (128, 20, 50, 2), (128, 8192, 2**33), (64, 32, 4, 1), "float16"),
        (2**40 + 16, (128, 300, 2, 1), (128, 2**20, 8), (64, 64, 1, 1), "float16"),
    ]


def test_strides_that_the_driver_refuses_take_the_portable_kernel(launches, monkeypatch):
    monkeypatch.setattr(cuda_sm90, "tensor_map", lambda *_: None)
    launch(spec_of())
    assert [x.function for x in launches] == ["indexer_scores"]


@pytest.mark.parametrize("path", ["portable", None])
def test_blocks_of_queries_cover_all_and_fill_the_device(launches, maps, monkeypatch, path):
    monkeypatch.setattr(cuda_scores, "forced_path", path)
    sizes = ((1, 1, 1), (1, 4096, 1024), (1, 32768, 8192), (64, 100, 25), (3, 10, 10**6))
    for b, s, p in sizes:
        launch(spec_of(b=b, s=s, p=p))
    small, medium, large, *_ = launches
    assert small.block_queries == 8 and medium.block_queries < large.block_queries
    for got, (b, s, p) in zip(launches, sizes, strict=True):
        assert got.block_queries % 4 == 0  # whole stages of 32 heads
        if path == "portable":
            assert got.grid == b * -(-s // got.block_queries) * -(-p // 128)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"s": 0}, {"p": 0}])
def test_nothing_to_do_launches_nothing(launches, maps, sizes):
    launch(spec_of(**sizes))
    assert not launches


@pytest.mark.parametrize(
    ("address", "shape", "strides", "want"),
    [
        (0, (2, 3, 64), (192, 64, 1), True),
        (8, (2, 3, 64), (192, 64, 1), False),
        (0, (2, 3, 64), (-192, 64, 1), False),
        (0, (2, 3, 64), (0, 64, 1), False),
        (0, (2, 3, 64), (192, 65, 1), False),
        (0, (2, 3, 64), (192, 64, 2), False),
        (0, (2, 3, 64), (2**38, 64, 1), False),
        (0, (1, 3, 64), (7, 64, 1), True),  # an axis of length 1 goes nowhere
    ],
)
def test_aligned(address, shape, strides, want):
    assert cuda_scores.aligned(address, shape, strides) is want


# --- Selection -------------------------------------------------------------------------------------------


def choose(shape, topk, order="id", **options):
    visible = options.pop("visible", Limits(shape[2], 0, 1))
    scores = Operand(2**40, options.pop("dtype", "float32"), (2**34, -8, 1))
    cuda_topk.launch_select(scores, 2**40 + 1, 0, shape, topk=topk, order=order, visible=visible, **options)


@pytest.mark.parametrize("entries", [1, 2048, 2049, 8192, 2**31 - 1])
@pytest.mark.parametrize("topk", [1, 2, 3, 1024, 1025, 2048])
def test_selection_fits_its_block(launches, entries, topk):
    choose((2, 5, entries), topk, visible=Limits(0, 1, 4), stream=7)
    choose((2, 5, entries), topk, order="score", dtype="float16")
    by_id, by_score = launches
    assert by_id.grid == 10 and by_id.block == by_id.defines["THREADS"]
    assert by_id.sort_size == 0 and topk <= by_score.sort_size < 2 * topk
    assert by_score.sort_size & (by_score.sort_size - 1) == 0
    assert by_id.shared == 8 * 2052 and by_id.shared >= 4 * topk
    assert by_score.shared >= 8 * by_score.sort_size
    assert by_score.shared <= 48 * 1024 - 1024
    assert (by_id.before, by_id.phase, by_id.ratio, by_id.stream) == (0, 1, 4, 7)
    assert (by_id.scores, by_id.ids, by_id.values) == (2**40, 2**40 + 1, 0)
    assert (by_id.stride_b, by_id.stride_s) == (2**34, -8)
    assert (by_id.queries, by_id.entries, by_id.topk) == (5, entries, topk)
    assert (by_id.first, by_id.rows) == (0, 5)
    assert by_id.defines in cuda_topk.VARIANTS["indexer_topk.cu"]
    assert by_score.defines in cuda_topk.VARIANTS["indexer_topk.cu"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("queries", [1, 5000, 16383, 16390, 40000])
@pytest.mark.parametrize("visible", [Limits(0, 1, 4), Limits(9000, 0, 1), Limits(4000, 3, 7), Limits(5000, 3, 2**31)])
def test_small_blocks_take_short_rows(batch, queries, visible):
    made = cuda_topk.pieces(batch, queries, 9000, visible)
    most = {block: n for n, block in cuda_topk.BLOCKS.items()}
    limits = np.minimum(visible.before + (visible.phase + np.arange(queries)) // visible.ratio, 9000)
    at, before = 0, 0
    for first, rows, block in made:
        assert first == at and rows > 0 and before < most[block]
        assert limits[first : first + rows].max() <= most[block]
        assert len(made) == 1 or batch * rows >= cuda_topk.FEWEST_ROWS
        at, before = first + rows, most[block]
    assert at == queries


def test_a_long_causal_call_takes_every_block():
    made = cuda_topk.pieces(1, 32768, 8192, Limits(0, 1, 4))
    assert [rows for _, rows, _ in made] == [4 * 1024 + 3, 4096, 8192, 32768 - 16387]
    assert [block for _, _, block in made] == list(cuda_topk.BLOCKS.values())


@pytest.mark.parametrize("entries", [1, 1024, 1025, 2048, 4096, 4097])
def test_one_launch_where_all_rows_are_alike(entries):
    block = next(block for n, block in cuda_topk.BLOCKS.items() if entries <= n)
    assert cuda_topk.pieces(2, 10**5, entries, Limits(entries, 0, 1)) == [(0, 10**5, block)]
    assert cuda_topk.pieces(1, 3, entries, Limits(0, 1, 1)) == [(0, 3, cuda_topk.BLOCKS[1024])]


def test_documents_of_a_part_are_found(launches):
    class Array:
        def __init__(self, address, strides):
            self.data, self.strides = SimpleNamespace(ptr=address), strides

    arrays = [Array(2**41 + n, (8 * (99 if n < 2 else 40), 8)) for n in range(4)]
    choose((3, 7, 40), 5, documents=arrays, ratio=6)
    (got,) = launches
    assert got.defines["DOCUMENTS"] == 1 and got.defines in cuda_topk.VARIANTS["indexer_topk.cu"]
    pointers = [got.q_segments, got.q_positions, got.entry_segments, got.entry_positions]
    assert pointers == [2**41 + n for n in range(4)]
    assert (got.q_stride, got.group) == (99, 6)


@pytest.mark.parametrize("b", [1, 3, 100])
@pytest.mark.parametrize("s", [1, 50, 70, 5000])
@pytest.mark.parametrize("rows", [1, 63, 64, 100, 10**6])
def test_chunks_hold_no_more_rows_than_allowed(b, s, rows):
    spec = contract.check_topk(*(np.zeros(n, np.float16) for n in ((b, s, 1, 1), (b, 9, 1), (b, s, 1))), 3, 4, 1.0)
    batches, queries = cuda_topk.chunk(spec, 10**9, rows)
    assert 1 <= batches <= b and 1 <= queries <= s and batches * queries <= max(rows, 1)
    assert batches == 1 or queries == s, "several batch rows only whole"
    assert batches * queries > rows // 2 or (queries == s and (batches == b or (batches + 1) * s > rows))
    assert cuda_topk.chunk(spec, 1, rows)[0] == 1


# --- What the kernels take -------------------------------------------------------------------------------


def test_what_the_kernels_take():
    def arrays(i=8, e=64, q="bfloat16", k="bfloat16", w="float32"):
        kinds = {"bfloat16": ml_dtypes.bfloat16}
        shapes = ((1, 2, i, e), (1, 3, e), (1, 2, i))
        return [np.zeros(n, kinds.get(t, t)) for n, t in zip(shapes, (q, k, w), strict=True)]

    for good in ({}, {"e": 128, "i": 128}, {"q": "float16", "k": "float16", "w": "bfloat16"}, {"w": "float16"}):
        assert contract_kernels.within("cuda", "cuda", *arrays(**good)) == "cuda"
    bad = [({"q": "float32", "k": "float32"}, TypeError), ({"q": "float16"}, TypeError), ({"w": "float64"}, TypeError)]
    bad += [({"e": 32}, ValueError), ({"i": 129}, ValueError), ({"i": 0}, ValueError)]
    for wrong, kind in bad:
        x = arrays(**wrong)
        assert contract_kernels.within("cuda", "auto", *x) == "reference"
        assert contract_kernels.within("reference", "auto", *x) == "reference"
        with pytest.raises(kind, match="the CUDA kernels take"):
            contract_kernels.within("cuda", "cuda", *x)


def test_which_scores_the_selection_takes():
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert contract_kernels.within_selection("cuda", "auto", np.zeros(3, dtype)) == "cuda"
    wide = np.zeros(3)
    assert contract_kernels.within_selection("cuda", "auto", wide) == "reference"
    with pytest.raises(TypeError, match=r"^scores: the CUDA kernels take"):
        contract_kernels.within_selection("cuda", "cuda", wide)
