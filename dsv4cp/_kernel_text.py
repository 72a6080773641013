"""The CUDA text in kernels_cu/: where it lies, our own includes expanded into it, and what it declares.

CuPy's disk cache keys on the text it is given and not on included headers, so our own `#include "..."` must be
in the text; system includes (<...>) are left to the compiler. This file imports nothing of CUDA.
"""

from __future__ import annotations

import functools
import importlib.resources
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# C types of scalar parameters, and of what a pointer points to; names of common.cuh included.
SCALARS: dict[str, type] = {
    "bool": np.bool_,
    "int": np.int32,
    "unsigned": np.uint32,
    "unsigned int": np.uint32,
    "u32": np.uint32,
    "long long": np.int64,
    "i64": np.int64,
    "unsigned long long": np.uint64,
    "u64": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
STRUCTS: dict[str, int] = {"TensorMap": 128}  # structs passed by value, and their bytes


def source_folder() -> Any:
    """The folder of CUDA text: inside the installed package, else beside it (bare checkout, editable install).

    Never found as a package of its own: importing dsv4cp.kernels_cu could find another checkout's kernels.
    Raises FileNotFoundError where neither exists.
    """
    beside = Path(__file__).resolve().parent.parent / "kernels_cu"
    for folder in (importlib.resources.files("dsv4cp") / "kernels_cu", beside):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no CUDA sources: neither in the package dsv4cp nor at {beside}; reinstall dsv4cp")


@functools.cache
def expand(file: str) -> str:
    """The text of kernels_cu/`file` with our own includes in it, each file once, #line keeping error positions.

    Raises FileNotFoundError naming a missing file and who includes it.
    """
    return _expand(file, source_folder(), set(), None)


def _expand(file: str, folder: Any, seen: set[str], includer: str | None) -> str:
    seen.add(file)
    path = folder / file
    if not path.is_file():
        by = f", included by {includer}" if includer else ""
        raise FileNotFoundError(f"{file}: no such CUDA source in {folder}{by}")
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        include = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if include is None:
            lines.append("" if re.match(r"\s*#\s*pragma\s+once", line) else line)
        elif include[1] in seen:
            lines.append("")
        else:
            lines += [_expand(include[1], folder, seen, f"{file}:{number}"), f'#line {number + 1} "{file}"']
    return "\n".join(lines)


@dataclass(frozen=True)
class Claims:
    """What the head of a .cu file promises."""

    archs: tuple[str, ...]  # "90a": compiles for sm_90a
    hot: tuple[str, ...]  # kernels that must not spill registers


def claims(file: str) -> Claims:
    """The `// archs:` and `// hot:` lines of a .cu file. Raises ValueError where it claims no architecture."""
    text = (source_folder() / file).read_text(encoding="utf-8")
    archs, hot = (re.search(rf"^// {word}:(.*)$", text, re.M) for word in ("archs", "hot"))
    if archs is None or not archs[1].split():
        raise ValueError(f"{file}: expected a line '// archs: 80 90 ...' at its head")
    return Claims(tuple(archs[1].split()), tuple(hot[1].split()) if hot else ())


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel, read off its CUDA text."""

    name: str
    kind: type | None  # NumPy scalar type; None for a pointer, np.void for a struct passed by value
    dtype: Any  # what a pointer points to, None where any array will do
    size: int = 0  # bytes of a struct


def parameters(file: str, function: str) -> tuple[Parameter, ...]:
    """The parameter list of an extern "C" kernel, as the text declares it.

    Raises FileNotFoundError for a missing file, ValueError for a function that the text does not define or a type that
    is in neither SCALARS nor STRUCTS.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", expand(file), flags=re.S)
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(function)}\s*\(([^;{{}}]*)\)\s*\{{", text)
    if found is None:
        raise ValueError(f"{file}: defines no kernel {function}")
    return tuple(_parameter(p) for p in found[1].split(",") if p.strip())


def _parameter(declaration: str) -> Parameter:
    words = re.sub(r"\b(const|volatile|__restrict__|__grid_constant__)\b", " ", declaration).replace("*", " * ").split()
    name, base = words[-1], " ".join(w for w in words[:-1] if w != "*")
    if "*" in words:
        return Parameter(name, None, np.dtype(SCALARS[base]) if base in SCALARS else None)
    if base not in SCALARS and base not in STRUCTS:
        raise ValueError(f"{declaration.strip()}: {base} is a type of unknown width")
    return Parameter(name, SCALARS.get(base, np.void), None, STRUCTS.get(base, 0))
