"""What a selection over given scores launches, without a GPU: plain loops do what the kernel would, on the very memory
that it would be given."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")

from dsv4cp import _kernels, select_indexer_topk  # noqa: E402
from dsv4cp.indexer import contract, cuda_topk  # noqa: E402
from dsv4cp.indexer.cuda_scores import Limits  # noqa: E402
from tests.support import naive  # noqa: E402
from tests.support.compare import check_equal, check_like  # noqa: E402
from tests.support.indexer_data import DTYPES  # noqa: E402
from tests.support.select_cases import check_selection, expected, hostile  # noqa: E402

INF = np.inf


class Device(np.ndarray):
    """An array that answers as CuPy's do; its memory is the host's."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


KINDS = {"Float32": np.dtype(np.float32), "BFloat16": np.dtype(ml_dtypes.bfloat16), "Float16": np.dtype(np.float16)}


def memory(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


@pytest.fixture
def gpu(monkeypatch):
    """An emulated GPU: `select` as the public function with backend "cuda", and its launches `made`."""
    made = []

    def launch(kernel, *, grid, block, shared_bytes, stream, **a):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert a.keys() == kinds.keys()
        assert all(type(value) is (kinds[name] or int) for name, value in a.items())
        a = {name: int(value) for name, value in a.items()}
        made.append(SimpleNamespace(defines=dict(kernel.defines), block=block, **a))
        dtype = KINDS[dict(kernel.defines)["ELEMENT"]]
        for n in range(grid):
            b, i = n // a["rows"], a["first"] + n % a["rows"]
            assert a["phase"] + i < 2**32
            limit = min(a["before"] + (a["phase"] + i) // a["ratio"], a["entries"])
            at = a["scores"] + (b * a["stride_b"] + i * a["stride_s"]) * dtype.itemsize
            row = memory(at, limit, dtype).astype(np.float32)
            order = "score" if a["sort_size"] else "id"
            ids = naive.topk(row[None], a["topk"], order)[0] if limit else np.full(a["topk"], -1, np.int32)
            to = 4 * (b * a["queries"] + i) * a["topk"]
            memory(a["ids"] + to, a["topk"], np.dtype(np.int32))[:] = ids
            if a["values"]:
                found = np.where(ids >= 0, row[ids], -INF) if limit else np.full(a["topk"], -INF)
                memory(a["values"] + to, a["topk"], np.dtype(np.float32))[:] = found

    fake = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda _: contextlib.nullcontext()),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Device),
        ascontiguousarray=lambda x: np.ascontiguousarray(x).view(Device),
    )
    monkeypatch.setattr(cuda_topk, "cupy", fake)
    monkeypatch.setattr(_kernels, "launch", launch)

    def select(scores, count, *, order="id", return_scores=False, compress_ratio=None, query_start=0):
        spec = contract.check_select(scores, count, order, return_scores, compress_ratio, query_start)
        got = cuda_topk.select(scores.view(Device), spec)
        return tuple(x.view(np.ndarray) for x in got) if return_scores else got.view(np.ndarray)

    return SimpleNamespace(select=select, made=made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize(
    "shape", [(7, 5), (1, 9), (2, 7, 5), (2, 1, 3, 6, 7), (3, 2, 6, 7), (0, 4), (2, 3, 0), (2, 0, 4)]
)
def test_launches_follow_the_rule(gpu, shape, order, dtype):
    for ratio, start in ((1, 0), (2, 3), (3, 1), (128, 0), (2**40, 2**41 - 4), (4, 2**60)):
        with np.errstate(over="ignore"):
            scores = hostile(7, *shape, ratio=ratio, start=start).astype(DTYPES[dtype])
        check_selection(scores, 3, ratio, start, order, select=gpu.select)
        check_selection(scores, 9, ratio, start, order, select=gpu.select)
        assert gpu.select(scores, 0, compress_ratio=ratio).shape == (*shape[:-1], 0)
    if 0 not in shape:
        assert all(x.queries == shape[-2] and x.entries == shape[-1] for x in gpu.made) and gpu.made
    else:
        assert not gpu.made


def test_launches_on_views_read_the_callers_memory(gpu):
    base = hostile(8, 4, 6, 8, ratio=2, start=3)
    parent = np.full((6, 5, 11), INF, np.float32)
    parent[:, :4, 2:10] = base.swapaxes(0, 1)
    for scores in (
        parent[:, :4, 2:10].swapaxes(0, 1),
        base[:, ::-1].copy()[:, ::-1],
        np.broadcast_to(base[:1], (4, 6, 8)),
    ):
        check_selection(scores, 4, 2, 3, select=gpu.select)
        first = gpu.made[-1]
        assert first.scores == scores.ctypes.data
        assert [4 * first.stride_b, 4 * first.stride_s] == list(scores.strides[:2])
    check_selection(np.asfortranarray(base), 4, 2, 3, select=gpu.select)  # no row lies together: a copy


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (2, 2, 3, 5)])
def test_without_the_rule_every_entry_is_seen(gpu, shape):
    scores = hostile(9, *shape) if len(shape) > 1 else hostile(9, 1, *shape)[0]
    want = select_indexer_topk(scores, 4)
    check_equal(gpu.select(scores, 4), want)
    (got,) = gpu.made
    assert (got.before, got.phase, got.ratio) == (5, 0, 1)


def test_short_rows_take_small_blocks(gpu, monkeypatch):
    """Launches of each block in BLOCKS cover the queries that see up to as many entries."""
    blocks = dict(zip((4, 8, 16, 2**31), cuda_topk.BLOCKS.values(), strict=True))
    monkeypatch.setattr(cuda_topk, "BLOCKS", blocks)
    monkeypatch.setattr(cuda_topk, "FEWEST_ROWS", 1)
    scores = hostile(10, 2, 60, 20, ratio=3, start=4)
    want = expected(scores, 5, 3, 4)[0]
    check_equal(gpu.select(scores, 5, compress_ratio=3, query_start=4), want)
    assert [(x.first, x.rows) for x in gpu.made] == [(0, 10), (10, 12), (22, 24), (46, 14)]
    assert [x.block for x in gpu.made] == [threads for threads, *_ in blocks.values()]
    assert {(x.before, x.phase, x.ratio) for x in gpu.made} == {(1, 2, 3)}


@pytest.mark.parametrize("order", ["id", "score"])
def test_more_than_the_kernel_chooses_takes_the_reference(gpu, monkeypatch, order):
    monkeypatch.setattr(cuda_topk, "MOST", 4)
    check_selection(hostile(11, 2, 9, 12, ratio=2, start=7), 5, 2, 7, order, select=gpu.select)
    assert not gpu.made
    check_like(gpu.select(hostile(11, 9, 12), 4, compress_ratio=2), dtype="int32", shape=(9, 4))
    assert gpu.made


def test_the_long_call_of_the_gpu_tests_takes_every_block():
    assert [rows for _, rows, _ in cuda_topk.pieces(2, 5300, 5300, Limits(1, 0, 1))] == [1024, 1024, 2048, 1204]
