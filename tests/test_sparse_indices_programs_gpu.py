"""Index building and planning that come again on a GPU: played calls give what the reference gives, from new memory and
new values each time, on CuPy arrays and torch tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dsv4cp
from dsv4cp import torch_ops
from dsv4cp._programs import Program
from dsv4cp.sparse_indices import ops, torch_bridge_kernels
from tests.support.compare import check_equal
from tests.support.index_cases import build_cases, long_build_cases, long_plan_cases, plan_cases

try:
    import cupy
except ImportError:  # conftest.py skips or fails the tests
    cupy = None

pytestmark = pytest.mark.gpu

BUILDS = {**build_cases(), **long_build_cases()}
PLANS = {**plan_cases(), **long_plan_cases()}
RUNS = 5
HELD = {
    ("cupy", "build"): lambda: ops._BUILD.programs, ("cupy", "plan"): lambda: ops._PLAN.programs,
    ("torch", "build"): lambda: torch_bridge_kernels.BUILDS, ("torch", "plan"): lambda: torch_bridge_kernels.PLANS,
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgotten():
    for held in HELD.values():
        held().forget()


def outcome(library: str, what: str) -> list[bool]:
    """Of each kind that came twice whether it is played."""
    known = HELD[library, what]()._known.values()
    return [isinstance(x, Program) for x in known if x is not None]


class Given:
    """Copies of NumPy arrays on the GPU: new memory for each run, that of the run before overwritten."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.before: list = []

    def __call__(self, x):
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.name == "bfloat16" and self.library == "torch":
            made = torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        else:
            made = torch.from_numpy(np.ascontiguousarray(x)).cuda() if self.library == "torch" else cupy.asarray(x)
        self.now.append(made)
        return made

    def next_run(self) -> None:
        for x in self.before:
            x[...] = 3  # an id, a position and a visible mask value: what a stale address would read
        self.before, self.now = getattr(self, "now", []), []


def values_of(run: int, x):
    """Other values of the same metadata: rows in another order."""
    return np.roll(x, run, axis=-1 if x.ndim < 3 else -2).copy() if isinstance(x, np.ndarray) and x.size else x


def numpy_of(x):
    if isinstance(x, torch.Tensor):
        return None if x is None else x.cpu().numpy()
    return None if x is None else x.get()


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("name", BUILDS)
def test_built_lists_are_the_references_every_time(name, library):
    call, give = BUILDS[name], Given(library)
    for run in range(RUNS):
        give.next_run()
        given = {key: values_of(run, x) for key, x in call.items()}
        want = dsv4cp.build_dsv4_sparse_topk_indices(**given, backend="reference")
        on_gpu = {key: give(x) for key, x in given.items()}
        if library == "torch":
            got = torch_ops.build_dsv4_sparse_topk_indices(**on_gpu, device="cuda")
        else:
            like = {} if give.now else {"like": cupy.empty(8)}
            got = dsv4cp.build_dsv4_sparse_topk_indices(**on_gpu, **like, backend="numba")
        assert got.shape == want.shape
        check_equal(numpy_of(got), want)
    kept = outcome(library, "build")
    arrays = [x for x in call.values() if isinstance(x, np.ndarray)]
    narrow = [x for x in arrays if x.dtype.kind in "iu" and x.dtype.itemsize < 8]
    stops = "vision_token_types" in call and "q_segment_ids" in call
    if arrays and not any(x.size == 0 for x in arrays) and not narrow and not stops:
        assert kept == [True], name  # nothing to cast or to work out beside: launches alone


@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("name", PLANS)
def test_plans_are_the_references_every_time(name, library):
    (ids, keys), give = PLANS[name], Given(library)
    layouts = {"cuda": "tilelang", "cudnn": "cudnn", "reference": "torch"}
    for run in range(RUNS):
        give.next_run()
        turned = values_of(run, ids)
        for layout, backend in layouts.items():
            for promise in (False, True):
                want = dsv4cp.plan_dsv4_sparse_indices(turned, keys, layout, promise, index_backend="reference")
                if library == "torch":
                    if ids.dtype.kind == "u" and ids.dtype.itemsize > 1:
                        continue  # torch has no range checks of wide unsigned ids
                    got = torch_ops.plan_dsv4_sparse_indices(give(turned), keys, backend, promise)
                    assert got.backend == backend
                else:
                    got = dsv4cp.plan_dsv4_sparse_indices(give(turned), keys, layout, promise, index_backend="numba")
                    assert got.backend == layout
                assert got.kv_sequence == want.kv_sequence and type(got.kv_sequence) is int
                for field in ("indices", "topk_length", "valid_rows"):
                    g, w = getattr(got, field), getattr(want, field)
                    assert (g is None) == (w is None), field
                    if w is not None:
                        check_equal(numpy_of(g), w)
    if ids.size and ids.dtype in (np.int32, np.int64):
        assert outcome(library, "plan") == [True] * 6, name


def test_a_list_without_arrays_is_played_on_its_device():
    def build(**changes):
        sizes = {"batch_size": 2, "seq_len": 33, "key_len": 41, "window_size": 7, "n_pooled": 8, "compress_ratio": 4}
        return sizes | changes

    for device in ("cuda", torch.device("cuda", 0), 0, "cuda:0", torch.device("cuda")):
        for changes in ({}, {"dtype": torch.int32}, {"dtype": "int32"}, {"window_size": 9}):
            for _ in range(4):
                call = build(**changes)
                got = torch_ops.build_dsv4_sparse_topk_indices(**call, device=device)
                want = dsv4cp.build_dsv4_sparse_topk_indices(**call | {"dtype": "int32"}, backend="reference")
                assert got.dtype == (torch.int32 if "dtype" in changes else torch.int64)
                check_equal(got.cpu().numpy().astype("int32"), want)
    assert outcome("torch", "build") == [True] * 4


def test_arrays_that_share_memory_stay_apart():
    """Notes tell arrays by their place in the call: views of one tensor today are two tensors tomorrow."""
    rng = np.random.default_rng(5)
    local = np.tile(np.arange(16), (1, 2))
    call = {"batch_size": 1, "seq_len": 32, "key_len": 32, "window_size": 6}
    for run in range(6):
        segments = np.sort(rng.integers(0, 3, (1, 32)), axis=-1)
        if run < 3:
            pair = torch.from_numpy(np.stack([segments, local])).cuda()
            on_gpu = {"q_segment_ids": pair[0], "q_local_positions": pair[1]}
        else:
            on_gpu = {"q_segment_ids": torch.from_numpy(segments).cuda(), "q_local_positions": pair[1].clone()}
            pair.fill_(1)
            pair[1] = torch.from_numpy(local)
        got = torch_ops.build_dsv4_sparse_topk_indices(**call, **on_gpu, device="cuda")
        want = dsv4cp.build_dsv4_sparse_topk_indices(
            **call, q_segment_ids=segments, q_local_positions=local, backend="reference"
        )
        check_equal(got.cpu().numpy(), want)
    same = torch.from_numpy(local).cuda()
    for _ in range(4):  # one tensor twice
        got = torch_ops.build_dsv4_sparse_topk_indices(
            **call, q_segment_ids=same, q_local_positions=same, device="cuda"
        )
        want = dsv4cp.build_dsv4_sparse_topk_indices(
            **call, q_segment_ids=local, q_local_positions=local, backend="reference"
        )
        check_equal(got.cpu().numpy(), want)


def test_what_is_refused_is_refused_every_time():
    ids = torch.zeros(2, 3, 4, dtype=torch.int64, device="cuda")
    for _ in range(3):
        torch_ops.plan_dsv4_sparse_indices(ids, 9, "tilelang")
        for wrong, kind in (((ids, 9, "numba"), ValueError), ((ids, True, "tilelang"), TypeError),
                            ((ids, 9, "tilelang", 1), TypeError), ((ids.float(), 9, "tilelang"), TypeError),
                            ((ids[0], 9, "tilelang"), ValueError), ((ids, -1, "tilelang"), ValueError)):  # fmt: skip
            with pytest.raises(kind):
                torch_ops.plan_dsv4_sparse_indices(*wrong)
        with pytest.raises(TypeError):
            torch_ops.build_dsv4_sparse_topk_indices(
                batch_size=True, seq_len=3, key_len=3, window_size=2, device="cuda"
            )
    on_cpu = torch_ops.plan_dsv4_sparse_indices(ids.cpu(), 9, "tilelang")
    assert on_cpu.indices.device.type == "cpu"


def test_lists_are_built_on_the_current_stream():
    """A played launch waits for what its own stream queued before, and for nothing else."""
    given = torch.zeros(1, 4096, 512, dtype=torch.int64, device="cuda")
    sizes = {"batch_size": 1, "seq_len": 4096, "key_len": 9000, "window_size": 128}
    call = sizes | {"n_pooled": 4000, "compress_ratio": 1}
    for _ in range(3):
        torch_ops.build_dsv4_sparse_topk_indices(**call, compressed_topk=given, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        given.fill_(7)
        got = torch_ops.build_dsv4_sparse_topk_indices(**call, compressed_topk=given, device="cuda")
        plan = torch_ops.plan_dsv4_sparse_indices(got, 9000, "tilelang")
    torch.cuda.current_stream().wait_stream(stream)
    assert bool((got[..., 128:] == 4096 + 7).all()) and bool((plan.indices == got).all())


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("warm", [1, 2, 3])
def test_a_call_that_comes_again_may_be_captured(library, warm):
    """The second of its kind, which is noted, too: noting allocates nothing."""
    rng = np.random.default_rng(warm)
    call = {"batch_size": 2, "seq_len": 40, "key_len": 60, "window_size": 9}
    first, second = (rng.integers(-1, 20, (2, 40, 6)) for _ in range(2))

    def lists(topk):
        if library == "torch":
            ids = torch_ops.build_dsv4_sparse_topk_indices(**call, compressed_topk=topk, n_pooled=20, compress_ratio=4,
                                                           device="cuda")  # fmt: skip
            return ids, torch_ops.plan_dsv4_sparse_indices(ids, 60, "cudnn", True).indices
        ids = dsv4cp.build_dsv4_sparse_topk_indices(**call, compressed_topk=topk, n_pooled=20, compress_ratio=4)
        return ids, dsv4cp.plan_dsv4_sparse_indices(ids, 60, "cudnn", True).indices

    topk = torch.from_numpy(first).cuda() if library == "torch" else cupy.asarray(first)
    for _ in range(warm):
        lists(topk)
    if library == "torch":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = lists(topk)
        replay, wait = graph.replay, torch.cuda.synchronize
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            made = lists(topk)
            graph = stream.end_capture()
        replay, wait = lambda: graph.launch(stream), stream.synchronize
    topk[...] = torch.from_numpy(second).cuda() if library == "torch" else cupy.asarray(second)
    torch.cuda.synchronize()
    for _ in range(2):
        replay()
    wait()
    want = dsv4cp.build_dsv4_sparse_topk_indices(
        **call, compressed_topk=second, n_pooled=20, compress_ratio=4, backend="reference"
    )
    check_equal(numpy_of(made[0]), want)
    check_equal(numpy_of(made[1]), dsv4cp.plan_dsv4_sparse_indices(want, 60, "cudnn", True).indices)
    check_equal(numpy_of(lists(topk)[0]), want)
