"""The launch door without a GPU: what the driver is handed, what is refused, how launches keep out of each other's way.

The driver is a stand-in that reads the arguments from memory as cuLaunchKernel does: by address, each in its C type.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernel_arguments, _kernels
from tests.support.threads import run_at_once

POINTER, I64, F32 = ctypes.c_uint64, ctypes.c_int64, ctypes.c_float
MAP = ctypes.c_char * 128


class Array:
    """What the door looks at of a CuPy array."""

    def __init__(self, contiguous=True, dtype="float32", device=0):
        self.flags = SimpleNamespace(c_contiguous=contiguous)
        self.dtype = np.dtype(dtype)
        self.data = SimpleNamespace(device_id=device, ptr=4096)


class DriverError(RuntimeError):
    """CuPy's CUDADriverError."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"CUDA_ERROR {status}")


class Driver:
    """Stands for CuPy: records launches, attribute settings and the current device."""

    def __init__(self, types=(POINTER, POINTER, I64, F32)):
        self.types = types  # of the parameters, in C
        self.launches, self.errors, self.current, self.shared, self.compiled = [], [], 0, [], []
        self.ptr, self.contexts, self.meanwhile = 99, 0, None
        self.runtime = self.driver = self

    # cupy.cuda
    def get_current_stream(self):
        return SimpleNamespace(ptr=1000 + self.current)

    # cupy.cuda.driver
    def launchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, table, extra):
        assert function == self.ptr and extra == 0
        if self.errors and (error := self.errors.pop(0)):
            raise error
        first = self.read(table)
        if self.meanwhile:
            self.meanwhile()
        args = self.read(table)
        assert args == first, "arguments changed while the driver was reading them"
        self.launches.append(SimpleNamespace(
            grid=(gx, gy, gz), block=(bx, by, bz), args=args, shared=shared, stream=stream, device=self.current
        ))

    def read(self, table):
        addresses = (ctypes.c_void_p * len(self.types)).from_address(table)
        return [ctypes.string_at(at, ctypes.sizeof(c)) if c is MAP else c.from_address(at).value
                for c, at in zip(self.types, addresses, strict=True)]

    # cupy.cuda.runtime
    def getDevice(self):
        return self.current

    def setDevice(self, device):
        self.current = device

    def memGetInfo(self):
        self.contexts += 1

    # cupy.RawModule and cupy.RawKernel
    def module(self, *, code, options):
        self.compiled.append((code, options))
        return self

    def get_function(self, name):
        return self

    @property
    def kernel(self):
        return self

    def __setattr__(self, name, value):
        if name == "max_dynamic_shared_size_bytes":
            self.shared.append(value)
        super().__setattr__(name, value)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(_kernel_arguments, "_array_type", lambda: Array)
    monkeypatch.setattr(_kernels, "_cuda", lambda: made)
    monkeypatch.setattr(_kernels, "_raw_module", lambda: made.module)
    return made


@pytest.fixture
def scale(sources):
    """A kernel that exists as text only."""
    (sources / "a.cu").write_text('extern "C" __global__ void scale(const float* x, u16* y, i64 n, float f) {}\n')
    return _kernels.kernel("a.cu", "scale", defines={"WIDTH": 4}, arch="sm_90a")


def good(**changes) -> dict:
    arguments = {"x": Array(), "y": 256, "n": np.int64(3), "f": np.float32(2)}
    return {"grid": 2, "block": 32, **arguments, **changes}


def test_launches_in_declared_order_and_compiles_once(driver, scale):
    given = good(stream=77)
    _kernels.launch(scale, **dict(reversed(given.items())))
    _kernels.launch(scale, **given)
    first, second = driver.launches
    assert first == second
    assert first.args == [4096, 256, 3, 2.0]
    assert (first.grid, first.block, first.shared, first.stream) == ((2, 1, 1), (32, 1, 1), 0, 77)
    assert [options for _, options in driver.compiled] == [("-std=c++17", "-DWIDTH=4", "-arch=sm_90a")]
    assert _kernels.kernel("a.cu", "scale", defines={"WIDTH": 4}, arch="sm_90a") is scale
    assert _kernels.kernel("a.cu", "scale", defines={"WIDTH": 8}) is not scale


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"n": 3}, TypeError, "n: expected int64, got int"),
        ({"n": np.int32(3)}, TypeError, "n: expected int64, got int32"),
        ({"n": None}, TypeError, "n: .*NoneType"),
        ({"n": True}, TypeError, "n: .*bool"),
        ({"f": 2.0}, TypeError, "f: expected float32, got float"),
        ({"f": np.float64(2)}, TypeError, "f: expected float32, got float64"),
        ({"x": None}, TypeError, "x: .*NoneType"),
        ({"x": True}, TypeError, "x: .*bool"),
        ({"x": 4096.0}, TypeError, "x: .*float"),
        ({"x": np.int64(4096)}, TypeError, "x: .*int64"),
        ({"x": np.uint32(4096)}, TypeError, "x: .*uint32"),
        ({"x": -1}, ValueError, "x: expected an address of 64 bits, got -1"),
        ({"y": 2**64}, ValueError, "y: expected an address of 64 bits, got 18446744073709551616"),
        ({"x": np.zeros(3, np.float32)}, TypeError, r"x: .*ndarray \(float32\)"),
        ({"x": Array(dtype="float64")}, TypeError, "x: expected dtype float32, got float64"),
        ({"x": Array(contiguous=False)}, ValueError, "x: .*contiguous"),
        ({"z": np.int64(1)}, TypeError, "z: no such parameter"),
        ({"grid": 2.0}, TypeError, "grid"),
        ({"grid": (1, 1, 1, 1)}, TypeError, "grid"),
        ({"grid": -1}, ValueError, "grid"),
        ({"grid": 2**31}, ValueError, "grid"),
        ({"grid": (1, 65536)}, ValueError, "grid"),
        ({"block": 0}, ValueError, "block"),
        ({"block": (33, 32)}, ValueError, "block"),
        ({"block": (1, 1, 65)}, ValueError, "block"),
    ],
)
def test_refusals_name_the_kernel_and_the_argument(driver, scale, changes, error, words):
    with pytest.raises(error, match=f"^scale: {words}"):
        _kernels.launch(scale, **good(**changes))
    assert not driver.launches
    _kernels.launch(scale, **good())  # and the next launch is none the worse
    assert [launch.args for launch in driver.launches] == [[4096, 256, 3, 2.0]]


def test_a_missing_argument_is_named(driver, scale):
    given = good()
    del given["n"]
    with pytest.raises(TypeError, match=r"^scale: n: expected int64, got nothing"):
        _kernels.launch(scale, **given)


@pytest.mark.parametrize("grid", [0, (0,), (3, 0), (0, 1, 1)])
def test_an_empty_grid_reaches_nothing(driver, scale, grid):
    _kernels.launch(scale, **good(grid=grid))
    assert not driver.launches
    assert not driver.compiled
    with pytest.raises(TypeError, match="n: "):  # what is wrong with the arguments is said all the same
        _kernels.launch(scale, **good(grid=grid, n=3))


# --- The block of arguments ----------------------------------------------------------------------------

# Every kind of scalar, each after one that leaves it misaligned: as C declares it, its type there, its value.
MIXED = [
    ("bool a", ctypes.c_bool, np.bool_(True)),
    ("double b", ctypes.c_double, np.float64(-1e300)),
    ("int c", ctypes.c_int32, np.int32(-(2**31))),
    ("const float* d", POINTER, 2**64 - 1),
    ("unsigned e", ctypes.c_uint32, np.uint32(2**32 - 1)),
    ("i64 f", I64, np.int64(-(2**63))),
    ("float g", F32, np.float32(np.inf)),
    ("u64 h", ctypes.c_uint64, np.uint64(2**64 - 1)),
    ("bool i", ctypes.c_bool, np.bool_(False)),
    ("u32 j", ctypes.c_uint32, np.uint32(7)),
    ("bool k", ctypes.c_bool, np.bool_(True)),
    ("const __grid_constant__ TensorMap l", MAP, np.array((np.arange(16) + 1,), [("words", np.uint64, (16,))])[()]),
    ("int m", ctypes.c_int32, np.int32(-3)),
    ("void* n", POINTER, 5),
]


@pytest.mark.parametrize("turn", range(len(MIXED)))
def test_the_block_is_laid_out_as_c_does(driver, sources, turn):
    order = MIXED[turn:] + MIXED[:turn]
    (sources / "a.cu").write_text(f'extern "C" __global__ void mixed({", ".join(d for d, _, _ in order)}) {{}}\n')
    kernel = _kernels.kernel("a.cu", "mixed")
    names = [declaration.split()[-1] for declaration, _, _ in order]
    driver.types = [kind for _, kind, _ in order]
    _kernels.launch(kernel, grid=1, block=1, **{n: v for n, (_, _, v) in zip(names, order, strict=True)})

    class Same(ctypes.Structure):
        _fields_ = list(zip(names, driver.types, strict=True))

    plain = [v.tobytes() if kind is MAP else v if kind is POINTER else v.item() for _, kind, v in order]
    assert list(kernel.blocks.offsets) == [getattr(Same, name).offset for name in names]
    (launch,) = driver.launches
    assert launch.args == plain
    same = Same(*plain)
    for name, value in zip(names, plain, strict=True):  # ctypes ends a string at its first zero
        if isinstance(value, bytes):
            ctypes.memmove(ctypes.addressof(same) + getattr(Same, name).offset, value, len(value))
    (block,) = kernel.blocks.free
    assert bytes(block.memory) == bytes(same)[: kernel.blocks.size]


def test_a_kernel_without_parameters(driver, sources):
    (sources / "a.cu").write_text('extern "C" __global__ void f() {}\n')
    driver.types = ()
    _kernels.launch(_kernels.kernel("a.cu", "f"), grid=1, block=1)
    assert [launch.args for launch in driver.launches] == [[]]
    with pytest.raises(TypeError, match=r"^f: x: no such parameter"):
        _kernels.launch(_kernels.kernel("a.cu", "f"), grid=1, block=1, x=1)


@pytest.mark.parametrize("size", [0, 64, 127, 129, 256])
def test_a_struct_of_another_size_is_refused(driver, sources, size):
    (sources / "a.cu").write_text('extern "C" __global__ void f(int n, const TensorMap map) {}\n')
    kernel = _kernels.kernel("a.cu", "f")
    driver.types = (ctypes.c_int32, MAP)
    wrong = np.zeros((), [("bytes", np.uint8, (size,))])
    for value in (wrong, wrong[()], bytes(size)):
        with pytest.raises(TypeError, match=f"^f: map: expected a struct of 128 bytes, got {size}$"):
            _kernels.launch(kernel, grid=1, block=1, n=np.int32(1), map=value)
    for value in (bytearray(128), "x" * 128, 5, None, np.float64(1)):
        with pytest.raises(TypeError, match=r"^f: map: expected void, got"):
            _kernels.launch(kernel, grid=1, block=1, n=np.int32(1), map=value)
    right = np.ones((), [("bytes", np.uint8, (128,))])
    for value in (right, right[()], b"\1" * 128):
        _kernels.launch(kernel, grid=1, block=1, n=np.int32(1), map=value)
    assert [launch.args for launch in driver.launches] == [[1, b"\1" * 128]] * 3


@pytest.mark.parametrize("address", [int, np.uintp], ids=["int", "uintp"])
def test_addresses_of_either_type(driver, scale, address):
    for x in (0, 1, 2**40, 2**63, 2**64 - 1):
        for y in (address(8), np.uintp(8)):
            _kernels.launch(scale, **good(x=address(x), y=y))
            assert driver.launches[-1].args[:2] == [x, 8]


def test_one_launch_after_another_takes_one_block(driver, scale):
    for n in range(50):
        _kernels.launch(scale, **good(n=np.int64(n)))
    driver.errors = [DriverError(1)]
    with pytest.raises(RuntimeError):
        _kernels.launch(scale, **good())
    assert [launch.args[2] for launch in driver.launches] == list(range(50))
    assert len(scale.blocks.free) == 1


def test_a_launch_inside_a_launch_has_a_block_of_its_own(driver, scale):
    """A destructor or signal handler may launch while the driver reads."""

    def meanwhile():
        driver.meanwhile = None
        _kernels.launch(scale, **good(n=np.int64(8)))

    driver.meanwhile = meanwhile
    _kernels.launch(scale, **good(n=np.int64(7)))
    assert [launch.args[2] for launch in driver.launches] == [8, 7]


def test_threads_at_once_have_blocks_of_their_own(driver, scale):
    start = threading.Barrier(8)
    driver.meanwhile = lambda: time.sleep(0.001)  # the driver runs without the interpreter's lock

    def call(thread):
        start.wait()
        for n in range(20):
            _kernels.launch(scale, **good(n=np.int64(100 * thread + n), y=thread))

    run_at_once([lambda n=n: call(n) for n in range(8)])
    assert sorted(launch.args[2] for launch in driver.launches) == [100 * t + n for t in range(8) for n in range(20)]
    assert all(launch.args[1] == launch.args[2] // 100 for launch in driver.launches)
    assert len(driver.compiled) == 1
    assert len(scale.blocks.free) <= 8


# --- Devices, streams, errors --------------------------------------------------------------------------


def test_launches_on_the_device_of_the_array_and_returns(driver, scale):
    _kernels.launch(scale, **good(x=Array(device=2)))
    _kernels.launch(scale, **good(x=16, device=1))
    _kernels.launch(scale, **good(x=16))
    assert [launch.device for launch in driver.launches] == [2, 1, 0]
    assert [launch.stream for launch in driver.launches] == [1002, 1001, 1000]  # the current one of that device
    assert driver.current == 0
    assert len(driver.compiled) == 3  # once per device
    driver.errors = [DriverError(1)]
    with pytest.raises(RuntimeError):
        _kernels.launch(scale, **good(x=Array(device=2)))
    assert driver.current == 0


@pytest.mark.parametrize("stream", [0, 1, 2, 2**47, SimpleNamespace(ptr=5)], ids=str)
def test_a_given_stream(driver, scale, stream):
    _kernels.launch(scale, **good(stream=stream))
    assert driver.launches[0].stream == getattr(stream, "ptr", stream)


def test_large_shared_memory_is_opted_in_to_once(driver, scale):
    for size in (48 * 1024, 64 * 1024, 64 * 1024, 60 * 1024, 100 * 1024):
        _kernels.launch(scale, **good(shared_bytes=size))
    assert driver.shared == [64 * 1024, 100 * 1024]
    assert [launch.shared for launch in driver.launches][-1] == 100 * 1024


def test_driver_errors_carry_the_kernel_and_the_sizes(driver, scale):
    driver.errors = [DriverError(1)]
    words = r"scale: launch failed: CUDA_ERROR 1 \(grid \(2, 1, 1\), block \(32, 1, 1\), 7 bytes"
    with pytest.raises(RuntimeError, match=words):
        _kernels.launch(scale, **good(shared_bytes=7))
    assert driver.contexts == 0


def test_a_thread_without_a_context_gets_one(driver, scale):
    driver.errors = [DriverError(_kernels.NO_CONTEXT)]
    _kernels.launch(scale, **good())
    assert driver.contexts == 1
    assert [launch.args for launch in driver.launches] == [[4096, 256, 3, 2.0]]
    driver.errors = [DriverError(_kernels.NO_CONTEXT)] * 2  # none to be had
    with pytest.raises(RuntimeError, match=f"scale: launch failed: CUDA_ERROR {_kernels.NO_CONTEXT}"):
        _kernels.launch(scale, **good())
    assert driver.errors == []


# --- What is missing is named --------------------------------------------------------------------------

NO_NVRTC = RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12": No such file: libnvrtc.so.13')
NO_HEADER = RuntimeError('a.cu(3): catastrophic error: cannot open source file "cuda_bf16.h"')


@pytest.mark.parametrize(("major", "suffix"), [(13, ""), (12, "-cu12")])
@pytest.mark.parametrize(
    ("error", "package"),
    [(NO_NVRTC, "nvidia-cuda-nvrtc"), (ImportError("libnvrtc.so.13: cannot open: No such file"), "nvidia-cuda-nvrtc"),
     (NO_HEADER, "nvidia-cuda-runtime")],
)  # fmt: skip
def test_what_to_install_is_named(driver, scale, monkeypatch, major, suffix, error, package):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(_kernels, "_cuda_major", lambda: major)
    monkeypatch.setattr(_kernels, "_raw_module", lambda: fail)
    with pytest.raises(RuntimeError, match=rf"a\.cu: scale: .*pip install {package}{suffix}\n"):
        _kernels.launch(scale, **good())
    monkeypatch.setattr(_kernels, "_nvrtc", fail)
    with pytest.raises(RuntimeError, match=rf"a\.cu for sm_90: .*pip install {package}{suffix}\n"):
        _kernels.compile_cubin("a.cu", arch="90")


# --- Values ----------------------------------------------------------------------------------------------


def test_constants_are_numpy_scalars_by_name():
    got = _kernel_arguments.constants(("q", "bsh", (2**40, -3, 0, 1)), ("kv", "bk", (5, 6, 1)), heads=7, wide=True)
    strides = {"q_stride_b": 2**40, "q_stride_s": -3, "q_stride_h": 0, "kv_stride_b": 5, "kv_stride_k": 6}
    assert got == strides | {"heads": 7, "wide": 1}
    assert {name: type(x) for name, x in got.items()} == dict.fromkeys(strides, np.int64) | {
        "heads": np.int32, "wide": np.int32
    }  # fmt: skip


@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, 3.4e38, -3.4028234663852886e38, 3.40282347e38, 1e39, -1e300, 1e-50])
def test_numbers_beyond_float32_are_infinite(number):
    with np.errstate(over="ignore"):
        want = np.float32(number)
    with np.errstate(all="raise", under="ignore"):
        got = _kernel_arguments.float32(number)
    assert type(got) is np.float32 and got.tobytes() == want.tobytes()
