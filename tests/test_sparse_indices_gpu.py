"""Index building, planning and score extraction on a GPU: the simulator's cases and larger ones, against the reference.

Every result must equal the reference's on NumPy exactly, whatever the arrays' strides, the stream, or what else lies
in memory beside the results.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from dsv4cp import (
    build_dsv4_sparse_topk_indices,
    extract_indexer_topk_scores,
    flatten_sparse_indices,
    plan_dsv4_sparse_indices,
)
from tests.support import gate
from tests.support.compare import check_equal
from tests.support.index_cases import (
    build_cases,
    extract_cases,
    extracted,
    long_build_cases,
    long_plan_cases,
    plan_cases,
)

try:
    import cupy
except ImportError:  # conftest.py skips or fails the tests
    cupy = None

pytestmark = pytest.mark.gpu

ml_dtypes = pytest.importorskip("ml_dtypes")

BUILDS = {**build_cases(), **long_build_cases()}
PLANS = {**plan_cases(), **long_plan_cases()}
EXTRACTIONS = extract_cases(ml_dtypes.bfloat16)
LAYOUTS = ("contiguous", "strided")
MARGIN = 1024


def to_gpu(x, layout: str = "contiguous"):
    """A CuPy copy of a NumPy array; strided: every second element of a flipped, poisoned parent."""
    if not isinstance(x, np.ndarray):
        return x
    if layout == "contiguous" or x.ndim == 0:
        return cupy.asarray(np.ascontiguousarray(x))
    at = (..., slice(2 * x.shape[-1], 0, -2))
    parent = np.full((*x.shape[:-1], 2 * x.shape[-1] + 3), 1 if x.dtype.kind in "iu" else np.nan, x.dtype)
    parent[at] = x
    return cupy.asarray(parent)[at]


def bits(x):
    """What x holds, told apart bit by bit, NaN included."""
    return x.copy(order="C").view(f"u{x.itemsize}")


@contextlib.contextmanager
def canaries():
    """Everything CuPy allocates inside lies between two margins that must be untouched at the end."""
    blocks = []

    def allocate(size: int):
        memory = cupy.get_default_memory_pool().malloc(size + 2 * MARGIN)
        memory.memset_async(0xA5, size + 2 * MARGIN, cupy.cuda.get_current_stream())
        blocks.append((memory, size))
        return memory + MARGIN

    with cupy.cuda.using_allocator(allocate):
        yield
    for memory, size in blocks:
        whole = cupy.ndarray((size + 2 * MARGIN,), np.uint8, memory)
        assert bool((whole[:MARGIN] == 0xA5).all()), "the margin before an array was written"
        assert bool((whole[MARGIN + size :] == 0xA5).all()), "the margin behind an array was written"


def arrays_of(call: dict, layout: str) -> dict:
    given = {name: to_gpu(x, layout) for name, x in call.items()}
    return given if any(isinstance(x, np.ndarray) for x in call.values()) else {**given, "like": cupy.empty(0)}


def check_plan(got, want) -> None:
    assert (got.backend, got.kv_sequence) == (want.backend, want.kv_sequence)
    for name in ("indices", "topk_length", "valid_rows"):
        if getattr(want, name) is None:
            assert getattr(got, name) is None, name
        else:
            check_equal(getattr(got, name), getattr(want, name), like=cupy.empty(0))
            assert getattr(got, name).flags.c_contiguous, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BUILDS)
def test_build_equals_the_reference(name, layout):
    call = BUILDS[name]
    given = arrays_of(call, layout)
    before = {name: bits(x) for name, x in given.items() if isinstance(x, cupy.ndarray)}
    with canaries():
        got = build_dsv4_sparse_topk_indices(**given, backend="numba")
    check_equal(got, build_dsv4_sparse_topk_indices(**call, backend="reference"), like=cupy.empty(0))
    assert got.flags.c_contiguous
    for name, x in before.items():
        assert bool((bits(given[name]) == x).all()), f"{name} was written"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PLANS)
def test_plan_equals_the_reference(name, layout):
    ids, keys = PLANS[name]
    on_gpu = to_gpu(ids, layout)
    for kind in ("reference", "cuda", "cudnn"):
        with canaries():
            got = plan_dsv4_sparse_indices(on_gpu, keys, kind, index_backend="numba")
        check_plan(got, plan_dsv4_sparse_indices(ids, keys, kind, index_backend="reference"))
    promised = plan_dsv4_sparse_indices(on_gpu, keys, "cudnn", True, index_backend="numba")
    check_plan(promised, plan_dsv4_sparse_indices(ids, keys, "cudnn", True, index_backend="reference"))
    with canaries():
        got = flatten_sparse_indices(on_gpu, keys)
    check_equal(got, flatten_sparse_indices(ids, keys), like=cupy.empty(0))
    check_equal(on_gpu, ids)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EXTRACTIONS)
def test_extraction_equals_the_definition(name, layout):
    logits, ids = EXTRACTIONS[name]
    with canaries():
        got = extract_indexer_topk_scores(to_gpu(logits, layout), to_gpu(ids, layout), backend="numba")
    check_equal(got, extracted(logits, ids), like=cupy.empty(0))


def test_extraction_of_many_rows():
    rng = np.random.default_rng(0)
    scores = cupy.asarray(rng.standard_normal((2, 9000, 77), np.float32))[:, :, :70]
    ids = rng.integers(-2, 75, (2, 9000, 33)).astype(np.int32)
    got = extract_indexer_topk_scores(scores, cupy.asarray(ids), backend="numba")
    check_equal(got, extract_indexer_topk_scores(scores.get(), ids))


def test_auto_takes_numba():
    ids = cupy.asarray([[[0, 5, -1]]])
    auto = plan_dsv4_sparse_indices(ids, 4, "cudnn", index_backend="auto")
    check_plan(auto, plan_dsv4_sparse_indices(ids.get(), 4, "cudnn"))
    from dsv4cp import _backend

    assert _backend.pick("build_dsv4_sparse_topk_indices", "auto", "cupy", offered=("reference", "numba")) == "numba"


def everything(topk, scores):
    """One call of each function whose result needs nothing from the host."""
    built = build_dsv4_sparse_topk_indices(
        batch_size=topk.shape[0], seq_len=topk.shape[1], key_len=topk.shape[1] + scores.shape[-1], window_size=16,
        n_pooled=scores.shape[-1], compressed_topk=topk, backend="numba",
    )
    keys = topk.shape[1] + scores.shape[-1]
    plans = [plan_dsv4_sparse_indices(built, keys, kind, True, index_backend="numba") for kind in ("cuda", "cudnn")]
    return [built, plans[0].indices, plans[1].indices, plans[1].topk_length, flatten_sparse_indices(built, keys),
            extract_indexer_topk_scores(scores, topk, backend="numba")]


def inputs(seed: int):
    rng = np.random.default_rng(seed)
    return rng.integers(-1, 55, (2, 300, 40)), rng.standard_normal((2, 300, 50)).astype(np.float32)


def test_calls_follow_the_current_stream_and_never_wait():
    stream = cupy.cuda.Stream(non_blocking=True)
    device = cupy.cuda.runtime.getDevice()
    sources = [inputs(seed) for seed in range(20)]
    topk, scores = (cupy.asarray(x) for x in inputs(99))
    with stream:
        everything(topk, scores)  # compiles, and fills the pool of this stream
    stream.synchronize()
    for source in sources:
        fresh = [cupy.asarray(x) for x in source]
        cupy.cuda.get_current_stream().synchronize()
        with stream, gate.held(stream):
            topk[...], scores[...] = fresh  # only once the gate is open, and only for this stream's work
            got = everything(topk, scores)
        want = everything(*fresh)
        for g, w in zip(got, want, strict=True):
            check_equal(g, w)
    assert cupy.cuda.runtime.getDevice() == device


def test_shapes_do_not_recompile():
    from dsv4cp.sparse_indices import numba_cuda as host

    rng = np.random.default_rng(3)
    kernels = (host.build_rows, host.shift_ids, host.compact_rows)
    counts = []
    for _ in range(50):
        queries, pooled, slots = (int(n) for n in rng.integers(1, 300, 3))
        topk = cupy.asarray(rng.integers(-1, pooled, (1, queries, slots)))
        built = build_dsv4_sparse_topk_indices(
            batch_size=1, seq_len=queries, key_len=queries + pooled, window_size=int(rng.integers(1, 200)),
            n_pooled=pooled, compressed_topk=topk, backend="numba",
        )
        for kind in ("cuda", "cudnn"):
            plan_dsv4_sparse_indices(built, queries + pooled, kind, index_backend="numba")
        counts.append([len(kernel.overloads) for kernel in kernels])
    assert counts[-1] == counts[0]
