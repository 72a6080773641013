"""Every op and gradient on every backend of a GPU: side streams, threads, graphs, devices, memory pressure, failed
allocations, and bits that stay. New backends are in as soon as they are offered (support/gpu_jobs.py)."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy")

from tests.support.fuzz_ops import OPS  # noqa: E402
from tests.support.gpu_jobs import current, jobs, same_bits  # noqa: E402

pytestmark = pytest.mark.gpu

SPIN = 3_000_000  # clock cycles, about 1.5 ms: long after the host has queued what follows
LONG = 200_000_000  # about 100 ms
REPLAYS, REPEATS, THREADS = 100, 50, 8


@pytest.fixture(params=OPS)
def name(request):
    return request.param


# --- Streams -------------------------------------------------------------------------------------------------


def test_side_streams(name):
    """Inputs are NaN until, behind a long kernel on the same side stream, the right ones are copied in."""
    side = torch.cuda.Stream()
    for job in jobs(name):
        before = current()
        with job.on(side):
            job.run()  # compiles, and fills this stream's pool
        for _ in range(5):
            job.poison()
            torch.cuda.synchronize()
            with job.on(side):
                torch.cuda._sleep(SPIN)
                job.refill()
                got = job.run()
            side.synchronize()
            assert not job.wrong(got)
        assert current() == before, job


def test_kernels_never_wait_for_the_device(name):
    for job in jobs(name, kernels=True):
        job.call()
        torch.cuda.synchronize()
        busy = torch.cuda.Event()
        torch.cuda._sleep(LONG)
        kept = job.call()
        busy.record()
        assert not busy.query(), f"{job}: the call waited"
        torch.cuda.synchronize()
        del kept


def test_memory_freed_while_kernels_that_read_it_wait(name):
    """Inputs and temporaries go back to the pools before the work has begun; others take the memory at once."""
    side = torch.cuda.Stream()
    for job in jobs(name):
        sizes = [h.memory.numel() for h in job.held.values()]
        with job.on(side):
            job.run()
        torch.cuda.synchronize()
        for _ in range(3):
            with job.on(side):
                torch.cuda._sleep(SPIN)
                mine = jobs_copy(job)
                got = mine.run()
                del mine
                spoil = [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes for _ in range(3)]
            spoil += [torch.full((n,), 0xFF, dtype=torch.uint8, device="cuda") for n in sizes for _ in range(3)]
            torch.cuda.synchronize()
            assert not job.wrong(got)
            del spoil


def jobs_copy(job):
    """The same call on new memory, made on the current stream."""
    from tests.support.gpu_jobs import Job

    held = job.op.make(job.way, job.case)
    if "out" in job.held:
        job.op.save(job.way, job.case, held)
    return Job(job.op, job.way, job.case, held)


def test_threads_at_once():
    """Eight threads, each with a stream of its own, run everything in an order of their own."""
    work = [job for name in OPS for job in jobs(name)]
    errors: list[str] = []
    barrier = threading.Barrier(THREADS)

    def run(n: int) -> None:
        try:
            mine = work[n * len(work) // THREADS :] + work[: n * len(work) // THREADS]
            stream = torch.cuda.Stream()
            barrier.wait()
            for job in mine:
                with job.on(stream):
                    torch.cuda._sleep(SPIN // 30)
                    copy = jobs_copy(job)
                    got = copy.run()
                    stream.synchronize()
                    errors.extend(copy.wrong(got))
        except Exception as error:
            errors.append(f"thread {n}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(n,)) for n in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


# --- Graphs --------------------------------------------------------------------------------------------------


def test_graph_replays_see_new_contents(name):
    for job in jobs(name, kernels=True):
        side = torch.cuda.Stream()
        with job.on(side):
            for _ in range(2):
                job.run()
        torch.cuda.synchronize()
        if job.way.library == "torch":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = job.run()
            replay = graph.replay
        else:
            stream = cupy.cuda.ExternalStream(side.cuda_stream)
            with job.on(side):
                stream.begin_capture()
                results = job.call()
                captured = stream.end_capture()
            torch.cuda.synchronize()
            got = [job.way.take(x) for x in results if x is not None]
            replay = lambda captured=captured, stream=stream: captured.launch(stream)  # noqa: E731
        for seed in range(REPLAYS):
            job.renew(seed)
            torch.cuda.synchronize()
            replay()
            torch.cuda.synchronize()
            assert not job.wrong(got), f"replay {seed}"


# --- Bits ----------------------------------------------------------------------------------------------------


def test_bits_stay_beside_other_work(name):
    """50 runs of what promises it, alone and while another kernel keeps the GPU busy, on changing streams."""
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    other, streams = torch.cuda.Stream(), [torch.cuda.current_stream(), torch.cuda.Stream()]
    for job in jobs(name):
        if not job.repeats:
            continue
        want = job.run()
        torch.cuda.synchronize()
        for n in range(REPEATS):
            if n % 2:
                with torch.cuda.stream(other):
                    for _ in range(4):
                        a @ a
            with job.on(streams[n // 2 % 2]):
                got = job.run()
            torch.cuda.synchronize()
            assert same_bits(got, want), f"{job}: run {n}"


# --- Devices -------------------------------------------------------------------------------------------------


def test_current_device_streams_and_allocator_are_left_alone(name):
    for job in jobs(name):
        before = current()
        job.run()
        assert current() == before, job


def test_tensors_of_another_device(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    for job in jobs(name):
        want = job.run()
        torch.cuda.synchronize()
        for h in job.held.values():
            move(h)
        before = current()
        got = job.run()
        torch.cuda.synchronize(1)
        assert current() == before, job
        assert all(x.device.index == 1 for x in got), job
        if job.repeats:
            assert same_bits([x.cpu() for x in got], [x.cpu() for x in want]), job


def move(held) -> None:
    """The same memory on the second GPU."""
    view, memory = held.view, held.memory
    held.memory, held.kept = memory.to("cuda:1"), held.kept.to("cuda:1")
    offset = (view.data_ptr() - memory.data_ptr()) // view.element_size()
    held.view = held.memory.view(view.dtype).as_strided(view.shape, view.stride(), offset)


# --- Memory that is not there --------------------------------------------------------------------------------


def test_a_failed_allocation_raises_and_the_next_call_works(name, monkeypatch):
    """The 1st, 2nd, ... allocation of a call fails; each time the call raises, and the next one is right."""
    real = torch.empty
    for job in jobs(name):
        before = current()
        for fail in range(1, 40):
            count = [0]

            def refuse(fail=fail, count=count) -> bool:
                count[0] += 1
                return count[0] == fail

            def allocate(size: int, refuse=refuse):
                if refuse():
                    raise cupy.cuda.memory.OutOfMemoryError(size, 0)
                return cupy.get_default_memory_pool().malloc(size)

            def empty(*args, refuse=refuse, **kwargs):
                if refuse():
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory (planted)")
                return real(*args, **kwargs)

            with monkeypatch.context() as patch, cupy.cuda.using_allocator(allocate):
                if job.way.library == "torch":
                    patch.setattr(torch, "empty", empty)
                try:
                    got = job.call()
                except (cupy.cuda.memory.OutOfMemoryError, torch.cuda.OutOfMemoryError):
                    got = None
            assert current() == before, f"{job}: allocation {fail}"
            if got is not None:
                break
            assert not job.wrong(job.run()), f"after allocation {fail}"


def test_a_small_pool_raises_and_the_next_call_works():
    """CuPy's own limit, in the middle of a call that needs more than one block."""
    for name in ("attention", "attention gradient", "index scores", "Sinkhorn gradient"):
        for job in jobs(name):
            if job.way.library != "cupy":
                continue
            pool = cupy.cuda.MemoryPool()
            pool.set_limit(size=2**16)
            with cupy.cuda.using_allocator(pool.malloc), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
                job.call()
            assert pool.used_bytes() == 0, f"{job}: memory is lost"
            assert not job.wrong(job.run())
