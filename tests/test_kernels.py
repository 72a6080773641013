"""CUDA text without a GPU: every file compiles for every architecture it claims, hot kernels do not spill, includes
expand, and arguments are packed in the widths that the compiler gave the parameters.

The compile tests print a table of registers, shared memory and spills: pytest -rP tests/test_kernels.py
"""

from __future__ import annotations

import importlib
import re
import struct
from pathlib import Path

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernel_arguments, _kernel_text, _kernels  # noqa: E402
from tests.support.cubin import kernel_parameters  # noqa: E402

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


WHOLE = ("90", "90a")  # where every variant is compiled; for other architectures two each, unless --every-variant


@pytest.mark.parametrize(("file", "arch"), [(f, a) for f in FILES for a in _kernel_text.claims(f).archs])
def test_compiles_and_hot_kernels_do_not_spill(file, arch, pytestconfig):
    hot = _kernel_text.claims(file).hot
    every = variants()[file]
    if arch not in WHOLE and not pytestconfig.getoption("--every-variant"):
        every = every[:1] + every[1:][-1:]
    spills, seen = [], set()
    print(f"\n{'kernel':<28}{'arch':>6}{'registers':>11}{'shared':>8}{'stack':>7}{'spill st/ld':>13}  defines")
    for defines in every:
        report = _kernels.compile_cubin(file, arch=arch, defines=defines)
        assert report.kernels, report.log
        assert report.cubin.startswith(b"\x7fELF")
        for name, k in report.kernels.items():
            shown = " ".join(f"{key}={value}" for key, value in defines.items())
            spill = f"{k.spill_store_bytes}/{k.spill_load_bytes}"
            print(f"{name:<28}{arch:>6}{k.registers:>11}{k.shared_bytes:>8}{k.stack_bytes:>7}{spill:>13}  {shown}")
            seen.add(name)
            assert packed_widths(file, name) == [width for _, width in kernel_parameters(report.cubin, name)], name
            if name in hot and k.spill_store_bytes + k.spill_load_bytes > 0:
                spills.append(f"{name} sm_{arch} {shown}: {spill} bytes")
    assert not spills
    assert set(hot) <= seen


def packed_widths(file: str, function: str) -> list[int]:
    """Bytes that the launch door packs for each parameter."""
    codes = [_kernel_arguments._code(p) for p in _kernel_text.parameters(file, function)]
    return [struct.calcsize(code) for code in codes]


def test_a_compiler_error_points_into_the_file():
    words = r"(?s)sinkhorn\.cu for sm_90: .*sinkhorn\.cu\((\d+)\): error: .*Nope"
    with pytest.raises(RuntimeError, match=words) as error:
        _kernels.compile_cubin("sinkhorn.cu", arch="90", defines={"ELEMENT": "Nope"})
    line = int(re.search(r"sinkhorn\.cu\((\d+)\)", str(error.value))[1])
    text = (ROOT / "kernels_cu" / "sinkhorn.cu").read_text(encoding="utf-8").splitlines()
    assert "ELEMENT" in text[line - 1]


# --- The text ------------------------------------------------------------------------------------------


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
    declared = _kernel_text.parameters("a.cu", "f")
    names = [(p.name, p.kind, p.dtype) for p in declared]
    assert names == [
        ("x", None, np.dtype(np.float32)),
        ("y", None, None),
        ("count", np.int64, None),
        ("many", np.uint64, None),
        ("flags", np.uint32, None),
        ("map", np.void, None),
        ("eps", np.float32, None),
    ]
    assert [p.size for p in declared if p.kind is np.void] == [128]
    assert _kernel_text.parameters("a.cu", "g") == ()
    for absent in ("other", "h"):
        with pytest.raises(ValueError, match=absent):
            _kernel_text.parameters("a.cu", absent)


@pytest.mark.parametrize("kind", ["size_t", "long", "half", "Other"])
def test_a_parameter_of_unknown_width_is_refused(sources, kind):
    (sources / "a.cu").write_text(f'extern "C" __global__ void f(int n, const {kind} x) {{}}\n')
    with pytest.raises(ValueError, match=f"const {kind} x: {kind} is a type of unknown width"):
        _kernels.kernel("a.cu", "f")


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


def test_a_missing_header_is_named_by_the_real_compiler(sources):
    (sources / "a.cu").write_text("#include <no_such_header.h>\n")
    with pytest.raises(RuntimeError, match=r"header no_such_header\.h is missing; pip install nvidia-cuda-runtime"):
        _kernels.compile_cubin("a.cu", arch="90")
