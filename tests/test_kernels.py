"""CUDA text without a GPU: every file compiles for every architecture it claims, hot kernels do not spill, includes
expand, and the launch door refuses what a kernel would misread.

The compile tests print a table of registers, shared memory and spills: pytest -rP tests/test_kernels.py
"""

from __future__ import annotations

import importlib
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernel_text, _kernels  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(p.name for p in (ROOT / "kernels_cu").glob("*.cu"))
MODULES = sorted(f"dsv4cp.{p.parent.name}.{p.stem}" for p in (ROOT / "dsv4cp").glob("*/cuda*.py"))


def variants() -> dict[str, list[dict]]:
    """File -> the macro combinations that the slices launch."""
    found: dict[str, list[dict]] = {}
    for name in MODULES:
        found.update(getattr(importlib.import_module(name), "VARIANTS", {}))
    return found


# --- Compiling -----------------------------------------------------------------------------------------


def test_every_file_is_launched_by_a_slice():
    """Each slice's cuda*.py list in VARIANTS what they launch of which file."""
    assert sorted(variants()) == FILES


@pytest.mark.parametrize(("file", "arch"), [(f, a) for f in FILES for a in _kernel_text.claims(f).archs])
def test_compiles_and_hot_kernels_do_not_spill(file, arch):
    hot = _kernel_text.claims(file).hot
    spills, seen = [], set()
    print(f"\n{'kernel':<28}{'arch':>6}{'registers':>11}{'shared':>8}{'stack':>7}{'spill st/ld':>13}  defines")
    for defines in variants()[file]:
        report = _kernels.compile_cubin(file, arch=arch, defines=defines)
        assert report.kernels, report.log
        assert report.cubin.startswith(b"\x7fELF")
        for name, k in report.kernels.items():
            shown = " ".join(f"{key}={value}" for key, value in defines.items())
            spill = f"{k.spill_store_bytes}/{k.spill_load_bytes}"
            print(f"{name:<28}{arch:>6}{k.registers:>11}{k.shared_bytes:>8}{k.stack_bytes:>7}{spill:>13}  {shown}")
            seen.add(name)
            if name in hot and k.spill_store_bytes + k.spill_load_bytes > 0:
                spills.append(f"{name} sm_{arch} {shown}: {spill} bytes")
    assert not spills
    assert set(hot) <= seen


def test_a_compiler_error_points_into_the_file():
    words = r"(?s)sinkhorn\.cu for sm_90: .*sinkhorn\.cu\((\d+)\): error: .*Nope"
    with pytest.raises(RuntimeError, match=words) as error:
        _kernels.compile_cubin("sinkhorn.cu", arch="90", defines={"ELEMENT": "Nope"})
    line = int(re.search(r"sinkhorn\.cu\((\d+)\)", str(error.value))[1])
    text = (ROOT / "kernels_cu" / "sinkhorn.cu").read_text(encoding="utf-8").splitlines()
    assert "ELEMENT" in text[line - 1]


# --- The text ------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of CUDA text in place of kernels_cu."""
    monkeypatch.setattr(_kernel_text, "source_folder", lambda: tmp_path)
    _kernel_text.expand.cache_clear()
    yield tmp_path
    _kernel_text.expand.cache_clear()


def test_includes_expand_once_with_lines(sources):
    text = 'one\n#include "b.cuh"\n #  include "c.cuh"\n#include <cuda_bf16.h>\n// "b.cuh"\nlast\n'
    (sources / "a.cu").write_text(text)
    (sources / "b.cuh").write_text('#pragma once\n#include "c.cuh"\nof b\n')
    (sources / "c.cuh").write_text("of c\n")
    assert _kernel_text.expand("a.cu").splitlines() == [
        '#line 1 "a.cu"',
        "one",
        '#line 1 "b.cuh"',
        "",
        '#line 1 "c.cuh"',
        "of c",
        '#line 3 "b.cuh"',
        "of b",
        '#line 3 "a.cu"',
        "",
        "#include <cuda_bf16.h>",
        '// "b.cuh"',
        "last",
    ]


def test_missing_files_are_named(sources):
    (sources / "a.cu").write_text('\n#include "gone.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r"gone\.cuh: .*included by a\.cu:2"):
        _kernel_text.expand("a.cu")
    with pytest.raises(FileNotFoundError, match=r"^b\.cu: "):
        _kernels.kernel("b.cu", "f")


def test_claims(sources):
    (sources / "a.cu").write_text("// archs: 80 90a\n// hot: f g\n")
    (sources / "b.cu").write_text("// archs: 80\n")
    (sources / "c.cu").write_text("// hot: f\n")
    assert _kernel_text.claims("a.cu") == _kernel_text.Claims(("80", "90a"), ("f", "g"))
    assert _kernel_text.claims("b.cu").hot == ()
    with pytest.raises(ValueError, match="archs"):
        _kernel_text.claims("c.cu")


def test_parameters_are_read_off_the_text(sources):
    (sources / "a.cu").write_text(
        "__global__ void other(int z);\n"
        'extern "C" __global__ void __launch_bounds__(128, 2) f(const float* __restrict__ x, // input, of count\n'
        "  u16 *y, i64 count, unsigned long long many,\n"
        "  /* unused */ unsigned flags, const __grid_constant__ TensorMap map, float const eps) {\n}\n"
        'extern "C" __global__ void g() {}\n'
    )
    names = [(p.name, p.kind, p.dtype) for p in _kernel_text.parameters("a.cu", "f")]
    assert names == [
        ("x", None, np.dtype(np.float32)),
        ("y", None, None),
        ("count", np.int64, None),
        ("many", np.uint64, None),
        ("flags", np.uint32, None),
        ("map", np.void, None),
        ("eps", np.float32, None),
    ]
    assert _kernel_text.parameters("a.cu", "g") == ()
    for absent in ("other", "h"):
        with pytest.raises(ValueError, match=absent):
            _kernel_text.parameters("a.cu", absent)


def test_sources_inside_the_package_come_first_then_those_beside_it(tmp_path, monkeypatch):
    package, checkout = tmp_path / "site" / "dsv4cp", tmp_path / "checkout"
    for folder in (package, checkout / "dsv4cp"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(_kernel_text, "__file__", str(checkout / "dsv4cp" / "_kernel_text.py"))
    monkeypatch.setattr(_kernel_text.importlib.resources, "files", lambda name: package)
    with pytest.raises(FileNotFoundError, match="reinstall"):
        _kernel_text.source_folder()
    (checkout / "kernels_cu").mkdir()
    assert _kernel_text.source_folder() == checkout / "kernels_cu"
    (package / "kernels_cu").mkdir()
    assert _kernel_text.source_folder() == package / "kernels_cu"


def test_this_checkout_finds_its_own_sources():
    assert (_kernel_text.source_folder() / "common.cuh").is_file()


# --- The launch door -----------------------------------------------------------------------------------


class Array:
    """What the door looks at of a CuPy array."""

    def __init__(self, contiguous=True, dtype="float32", device=0):
        self.flags = SimpleNamespace(c_contiguous=contiguous)
        self.dtype = np.dtype(dtype)
        self.data = SimpleNamespace(device_id=device)


class Driver:
    """Stands for CuPy: records launches, attribute settings and the current device."""

    def __init__(self, error=None):
        self.launches, self.error, self.current, self.shared, self.compiled = [], error, 0, [], []

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        if self.error:
            raise self.error
        self.launches.append(SimpleNamespace(
            grid=grid, block=block, args=args, shared=shared_mem, stream=stream, device=self.current
        ))

    # cupy.cuda.runtime
    def getDevice(self):
        return self.current

    def setDevice(self, device):
        self.current = device

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
    monkeypatch.setattr(_kernels, "_array_type", lambda: Array)
    monkeypatch.setattr(_kernels, "_runtime", lambda: made)
    monkeypatch.setattr(_kernels, "_raw_module", lambda: made.module)
    return made


@pytest.fixture
def scale(sources):
    """A kernel that exists as text only."""
    (sources / "a.cu").write_text('extern "C" __global__ void scale(const float* x, u16* y, i64 n, float f) {}\n')
    _kernels._kernel.cache_clear()
    yield _kernels.kernel("a.cu", "scale", defines={"WIDTH": 4}, arch="sm_90a")
    _kernels._kernel.cache_clear()


def good(**changes) -> dict:
    arguments = {"x": Array(), "y": np.uintp(256), "n": np.int64(3), "f": np.float32(2)}
    return {"grid": 2, "block": 32, **arguments, **changes}


def test_launches_in_declared_order_and_compiles_once(driver, scale):
    given = good(stream=77)
    _kernels.launch(scale, **dict(reversed(given.items())))
    _kernels.launch(scale, **given)
    assert [type(a) for a in driver.launches[0].args] == [Array, np.uintp, np.int64, np.float32]
    assert (driver.launches[0].grid, driver.launches[0].block) == ((2, 1, 1), (32, 1, 1))
    assert driver.launches[0].stream.ptr == 77
    assert len(driver.launches) == 2
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
        ({"x": 4096}, TypeError, "x: .*int"),
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
    assert not driver.compiled


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


def test_launches_on_the_device_of_the_array_and_returns(driver, scale):
    _kernels.launch(scale, **good(x=Array(device=2)))
    _kernels.launch(scale, **good(x=np.uintp(16), device=1))
    _kernels.launch(scale, **good(x=np.uintp(16)))
    assert [launch.device for launch in driver.launches] == [2, 1, 0]
    assert driver.current == 0
    assert len(driver.compiled) == 3  # once per device
    driver.error = RuntimeError("CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(RuntimeError):
        _kernels.launch(scale, **good(x=Array(device=2)))
    assert driver.current == 0


def test_large_shared_memory_is_opted_in_to_once(driver, scale):
    for size in (48 * 1024, 64 * 1024, 64 * 1024, 60 * 1024, 100 * 1024):
        _kernels.launch(scale, **good(shared_bytes=size))
    assert driver.shared == [64 * 1024, 100 * 1024]
    assert [launch.shared for launch in driver.launches][-1] == 100 * 1024


def test_driver_errors_carry_the_kernel_and_the_sizes(driver, scale):
    driver.error = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(RuntimeError, match=r"scale: launch failed: CUDA_ERROR_INVALID_VALUE.*grid \(2, 1, 1\)"):
        _kernels.launch(scale, **good())


def test_threads_compile_a_kernel_once(driver, scale):
    start = threading.Barrier(8)

    def call():
        start.wait()
        _kernels.launch(scale, **good())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(driver.compiled) == 1
    assert len(driver.launches) == 8


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


def test_a_missing_header_is_named_by_the_real_compiler(sources):
    (sources / "a.cu").write_text("#include <no_such_header.h>\n")
    with pytest.raises(RuntimeError, match=r"header no_such_header\.h is missing; pip install nvidia-cuda-runtime"):
        _kernels.compile_cubin("a.cu", arch="90")
