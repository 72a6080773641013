"""The launch door on a GPU: every kind of argument arrives, threads, streams, graphs and shared memory, errors."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from dsv4cp import _kernels
from tests.support.compare import check_equal
from tests.support.threads import run_at_once

pytestmark = pytest.mark.gpu

TEXT = r"""
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned u32;
struct alignas(64) TensorMap { u64 words[16]; };

template <typename T> __device__ void put(unsigned char*& to, const T& value) {
    for (int n = 0; n < (int)sizeof(T); ++n) *to++ = reinterpret_cast<const unsigned char*>(&value)[n];
}

extern "C" __global__ void mixed(
    bool a, double b, int c, const float* d, unsigned e, i64 f, float g, u64 h, bool i, u32 j, bool k,
    const __grid_constant__ TensorMap l, int m, unsigned char* n) {
    put(n, a); put(n, b); put(n, c); put(n, d); put(n, e); put(n, f); put(n, g); put(n, h); put(n, i); put(n, j);
    put(n, k); put(n, l); put(n, m);
}

// to[at] = value after `cycles`.
extern "C" __global__ void store(i64* to, int at, i64 value, i64 cycles) {
    for (i64 start = clock64(); clock64() - start < cycles;) {}
    to[at] = value;
}

extern "C" __global__ void __launch_bounds__(64) last_word(int* to, int words) {
    extern __shared__ int memory[];
    if (threadIdx.x == 0) memory[words - 1] = words;
    __syncthreads();
    if (threadIdx.x == 1) *to = memory[words - 1];
}
"""
LATE = 2_000_000  # cycles, about 1 ms: all launches of a test are queued by then


@pytest.fixture
def cp():
    import cupy

    return cupy


@pytest.fixture
def kernel(sources):
    (sources / "a.cu").write_text(TEXT)
    return lambda function: _kernels.kernel("a.cu", function)


def store(kernel, to, at, value, cycles=0, **where):
    _kernels.launch(
        kernel, grid=1, block=1, to=to, at=np.int32(at), value=np.int64(value), cycles=np.int64(cycles), **where
    )


def test_every_kind_of_argument_arrives(cp, kernel):
    words = np.arange(16, dtype=np.uint64) * 0x0123456789ABCDEF
    out = cp.zeros(256, np.uint8)
    values = {
        "a": np.bool_(True), "b": np.float64(-1e300), "c": np.int32(-(2**31)), "d": 2**64 - 1,
        "e": np.uint32(2**32 - 1), "f": np.int64(-(2**63)), "g": np.float32(np.inf), "h": np.uint64(2**64 - 1),
        "i": np.bool_(False), "j": np.uint32(7), "k": np.bool_(True),
        "l": np.array((words,), [("words", np.uint64, (16,))])[()], "m": np.int32(-3),
    }  # fmt: skip
    _kernels.launch(kernel("mixed"), grid=1, block=1, n=out, **values)
    want = b"".join(np.uint64(v).tobytes() if type(v) is int else v.tobytes() for v in values.values())
    assert out.get().tobytes() == want + bytes(256 - len(want))


def test_the_driver_has_its_own_copy_of_the_arguments(cp, kernel):
    """1000 launches, all through one block of arguments, wait behind the first."""
    out = cp.zeros(1000, np.int64)
    for n in range(1000):
        store(kernel("store"), out, n, n * n, LATE if n == 0 else 0)
    check_equal(out, np.arange(1000, dtype=np.int64) ** 2)


def test_threads_at_once(cp, kernel):
    out = cp.zeros((8, 500), np.int64)
    cp.cuda.Device().synchronize()

    def call(thread):
        with cp.cuda.Stream(non_blocking=True) as stream:
            for n in range(500):
                store(kernel("store"), out.data.ptr, 500 * thread + n, 1000 * thread + n, 100)
            stream.synchronize()

    run_at_once([lambda t=t: call(t) for t in range(8)])
    check_equal(out, np.arange(8)[:, None] * 1000 + np.arange(500))
    assert len(kernel("store").blocks.free) <= 8


def test_a_launch_is_the_first_thing_that_a_thread_does(cp, kernel):
    out = cp.zeros(4, np.int64)
    large = cp.zeros(1, np.int32)
    store(kernel("store"), out, 0, 1)
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    for n, given in ((1, None), (2, stream), (3, stream.ptr)):
        run_at_once([lambda n=n, given=given: store(kernel("store"), out.data.ptr, n, n + 1, stream=given)])
    words = 15 * 1024
    run_at_once([
        lambda: _kernels.launch(  # compiles, loads and opts in to shared memory there
            kernel("last_word"), grid=1, block=64, shared_bytes=4 * words, to=large.data.ptr, words=np.int32(words)
        )
    ])
    cp.cuda.Device().synchronize()
    check_equal(out, np.arange(1, 5, dtype=np.int64))
    check_equal(large, np.array([words], np.int32))


def test_a_tensor_map_is_the_first_thing_that_a_thread_asks_for(cp):
    from dsv4cp import _tensor_maps

    x = cp.zeros((8, 512), np.float16)
    cp.cuda.Device().synchronize()
    found = []

    def ask(n):
        found.append(_tensor_maps._tensor_map.__wrapped__(x.data.ptr, (512, 8), (512,), (64, n), "float16"))

    run_at_once([lambda n=n: ask(n) for n in (1, 2, 4)])
    assert all(isinstance(m, bytes) and len(m) == 128 for m in found) and len(set(found)) == 3


def test_streams(cp, kernel):
    """A launch waits on its stream alone: CuPy's current one where none is given, the per-thread default one too."""
    out = cp.zeros(8, np.int64)
    store(kernel("store"), out, 7, 1)
    cp.cuda.Device().synchronize()
    one, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    for n, stream in enumerate((one, cp.cuda.Stream.ptds)):
        with stream:
            store(kernel("store"), out, n, 1, 100 * LATE)
            busy = stream.record()
        store(kernel("store"), out, n, 2, stream=other)
        store(kernel("store"), out, n + 2, 5, stream=other.ptr)
        other.synchronize()
        assert not busy.done, "the stream's own work is over too soon"
        stream.synchronize()
        assert out[n] == 1, "what was queued on another stream came last"
        assert out[n + 2] == 5


def test_a_graph_replays_what_was_captured(cp, kernel):
    out = cp.zeros(3, np.int64)
    store(kernel("store"), out, 0, 0)
    cp.cuda.Device().synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for n in range(3):
            store(kernel("store"), out, n, 10 + n)
        graph = stream.end_capture()
        assert not out.get(stream=stream).any()
        for n in range(3):
            store(kernel("store"), out, n, 20 + n)
        out.fill(0)
        graph.launch(stream)
        stream.synchronize()
    check_equal(out, np.array([10, 11, 12]))


def test_shared_memory_up_to_the_devices_limit_and_not_beyond(cp, kernel):
    most = cp.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    out = cp.zeros(1, np.int32)
    for size in (4, 48 * 1024, 48 * 1024 + 4, 64 * 1024, most, 1024):
        _kernels.launch(kernel("last_word"), grid=1, block=64, shared_bytes=size, to=out, words=np.int32(size // 4))
        check_equal(out, np.array([size // 4], np.int32))
    with pytest.raises(RuntimeError, match=rf"last_word: launch failed: .*, {most + 4} bytes of shared memory"):
        _kernels.launch(kernel("last_word"), grid=1, block=64, shared_bytes=most + 4, to=out, words=np.int32(1))
    _kernels.launch(kernel("last_word"), grid=1, block=64, shared_bytes=most, to=out, words=np.int32(9))
    check_equal(out, np.array([9], np.int32))


def test_a_launch_that_the_driver_refuses(cp, kernel):
    out = cp.zeros(1, np.int32)
    with pytest.raises(RuntimeError, match=r"last_word: launch failed: CUDA_ERROR.*block \(65, 1, 1\)") as error:
        _kernels.launch(kernel("last_word"), grid=1, block=65, shared_bytes=4, to=out, words=np.int32(1))
    assert type(error.value.__cause__).__name__ == "CUDADriverError"
    _kernels.launch(kernel("last_word"), grid=1, block=64, shared_bytes=4, to=out, words=np.int32(1))
    check_equal(out, np.array([1], np.int32))


def test_a_thread_without_a_context(cp, kernel):
    """The driver alone refuses to launch there."""
    seen = []

    def call():
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        seen.append(context.value)
        store(kernel("store"), out.data.ptr, 0, 3)
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        seen.append(context.value)

    out = cp.zeros(1, np.int64)
    store(kernel("store"), out, 0, 1)
    cp.cuda.Device().synchronize()
    run_at_once([call])
    cp.cuda.Device().synchronize()
    assert seen[0] is None, "this thread had a context: the test shows nothing"
    check_equal(out, np.array([3]))
