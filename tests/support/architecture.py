"""The layout rules as functions over a source tree: each returns what breaks it, one line per finding.

A tree is a folder with dsv4cp/, kernels_cu/ and setup.cfg, so that every rule can be shown a bad example.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SLICES = ("indexer", "sinkhorn", "sparse_attention", "sparse_indices")
OTHER_FOLDERS = ("commands",)
ROLES = ("contract", "ops", "reference", "torch_bridge")
OPTIONAL_ROLES = ("cuda", "numba_cuda", "cudnn")
PARTS = {"indexer": ("selection",)}  # a phase that is an op of its own there
PYTHON_LINES, CUDA_LINES = 320, 600
MAY_IMPORT_TORCH = ("torch_ops", "torch_bridge", "_bridge", "_torch_backend")
KERNELS_ALONE = ("RawModule", "RawKernel", "nvrtc", "launchKernel", "launchCooperativeKernel")
GPU_LIBRARIES = ("cupy", "cupyx", "cuda", "cudnn", "numba", "torch")


# --- Reading a tree ------------------------------------------------------------------------------------


def python_files(tree: Path) -> list[Path]:
    return sorted(p for p in (tree / "dsv4cp").rglob("*.py") if "__pycache__" not in p.parts)


def shown(tree: Path, path: Path, node: ast.AST | None = None) -> str:
    return path.relative_to(tree).as_posix() + ("" if node is None else f":{node.lineno}")


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: Path, path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Absolute names of everything a file imports, wherever in the file; `from a import b` gives a.b."""
    package = list(path.parent.relative_to(tree).parts)
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", node


def slice_of(tree: Path, path: Path) -> str | None:
    parts = path.relative_to(tree / "dsv4cp").parts
    return parts[0] if len(parts) > 1 and parts[0] in SLICES else None


def strings(module: ast.Module) -> Iterator[ast.Constant]:
    """Every string but docstrings."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = [node.body[0] for node in ast.walk(module) if isinstance(node, described) and ast.get_docstring(node)]
    documentation = {id(statement.value) for statement in first if isinstance(statement, ast.Expr)}
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node


def public_functions(path: Path) -> list[ast.FunctionDef]:
    return [n for n in parsed(path).body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


# --- Who imports whom ----------------------------------------------------------------------------------


def slices_stand_alone(tree: Path) -> list[str]:
    """A slice imports itself and the shared dsv4cp._* modules: no other slice, nothing that is built on slices."""
    found = []
    for path in python_files(tree):
        own = slice_of(tree, path)
        if own is None:
            continue
        for name, node in imports(tree, path):
            if inside(name, "dsv4cp") and not (inside(name, f"dsv4cp.{own}") or name.startswith("dsv4cp._")):
                found.append(f"{shown(tree, path, node)}: slice {own} imports {name}")
    return found


def shared_modules_know_no_slice(tree: Path) -> list[str]:
    """dsv4cp/_*.py import neither slices nor commands."""
    found = []
    for path in sorted((tree / "dsv4cp").glob("_*.py")):
        if path.name in ("__init__.py", "__main__.py"):
            continue
        for name, node in imports(tree, path):
            if any(inside(name, f"dsv4cp.{s}") for s in (*SLICES, *OTHER_FOLDERS, "torch_ops")):
                found.append(f"{shown(tree, path, node)}: a shared module imports {name}")
    return found


def torch_stays_in_its_files(tree: Path) -> list[str]:
    """torch is imported by the torch surface only, and by the benchmark that measures against it."""
    found = []
    for path in python_files(tree):
        bench = path.parent.name == "commands" and path.stem.startswith("bench")
        if path.stem.startswith(MAY_IMPORT_TORCH) or bench:
            continue
        for name, node in imports(tree, path):
            if inside(name, "torch") or inside(name, "array_api_compat.torch"):
                found.append(f"{shown(tree, path, node)}: imports {name}")
    return found


def importing_loads_no_gpu_library(tree: Path) -> list[str]:
    """`import dsv4cp` loads no GPU library and no torch: asked of a fresh interpreter."""
    code = f"import sys; sys.path.insert(0, {str(tree)!r}); import dsv4cp; print(dsv4cp.__file__); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tree)
    if done.returncode:
        return [f"import dsv4cp fails: {done.stderr.strip().splitlines()[-1]}"]
    where, modules = done.stdout.splitlines()
    if Path(where).parent != tree / "dsv4cp":
        return [f"import dsv4cp found {where}"]
    return [f"import dsv4cp loads {name}" for name in GPU_LIBRARIES if name in modules.split()]


def only_one_file_compiles_cuda(tree: Path) -> list[str]:
    """RawModule, RawKernel, NVRTC and the driver's launches are reached through _kernels.py alone."""
    found = []
    for path in python_files(tree):
        if path.relative_to(tree).as_posix() == "dsv4cp/_kernels.py":
            continue
        for node in ast.walk(parsed(path)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
            if name in KERNELS_ALONE:
                found.append(f"{shown(tree, path, node)}: uses {name}")
        found += [
            f"{shown(tree, path, node)}: imports {name}"
            for name, node in imports(tree, path)
            if name.rpartition(".")[2] in KERNELS_ALONE
        ]
    return found


# --- What is in the files ------------------------------------------------------------------------------


def no_assert(tree: Path) -> list[str]:
    """Bad input raises TypeError or ValueError; `python -O` must not change what is checked."""
    return [
        f"{shown(tree, path, node)}: assert"
        for path in python_files(tree)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    ]


def no_function_is_named_like_a_folder(tree: Path) -> list[str]:
    """`dsv4cp.sinkhorn` must stay the module: a function of that name would shadow it."""
    return [
        f"{shown(tree, path, f)}: function {f.name} is named like a folder"
        for path in python_files(tree)
        for f in public_functions(path)
        if f.name in (*SLICES, *OTHER_FOLDERS)
    ]


def no_cuda_in_python_strings(tree: Path) -> list[str]:
    """CUDA text lives in kernels_cu/."""
    marks = re.compile(r"__(global|device)__ +\w|__shared__ +\w|\b(thread|block)Idx\.[xyz]|extern \"C\" +\w")
    return [
        f"{shown(tree, path, node)}: CUDA text in a string"
        for path in python_files(tree)
        for node in strings(parsed(path))
        if marks.search(node.value)
    ]


def files_stay_short(tree: Path) -> list[str]:
    """About 300 lines of Python and 600 of CUDA; longer files are split by phase."""
    sized = [(p, PYTHON_LINES) for p in python_files(tree)]
    sized += [(p, CUDA_LINES) for p in sorted((tree / "kernels_cu").glob("*.cu*"))]
    found = []
    for path, limit in sized:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            found.append(f"{shown(tree, path)}: {lines} lines, at most {limit}")
    return found


# --- Which files there are -----------------------------------------------------------------------------


def folders_are_the_slices(tree: Path) -> list[str]:
    """dsv4cp/ holds the slices and commands, nothing else, and no utils.py anywhere."""
    folders = sorted(p.name for p in (tree / "dsv4cp").iterdir() if p.is_dir() and p.name != "__pycache__")
    found = [f"dsv4cp/{f}: no slice" for f in folders if f not in (*SLICES, *OTHER_FOLDERS)]
    found += [f"dsv4cp/{s}: missing" for s in (*SLICES, *OTHER_FOLDERS) if s not in folders]
    found += [
        f"{shown(tree, p)}: says nothing about what is in it"
        for p in python_files(tree)
        if p.stem.strip("_") in ("utils", "util", "helpers", "misc", "common")
    ]
    return found


def slices_have_their_roles(tree: Path) -> list[str]:
    """Each slice has contract, ops, reference, torch_bridge; every other file is a part of a role."""
    found = []
    for name in SLICES:
        folder = tree / "dsv4cp" / name
        stems = [p.stem for p in sorted(folder.glob("*.py"))]
        found += [f"dsv4cp/{name}: no {role}.py" for role in ("__init__", *ROLES) if role not in stems]
        found += [
            f"dsv4cp/{name}/{stem}.py: begins with no role"
            for stem in stems
            if stem != "__init__" and not stem.lstrip("_").startswith((*ROLES, *OPTIONAL_ROLES, *PARTS.get(name, ())))
        ]
        init = folder / "__init__.py"
        if init.exists():
            body = parsed(init).body
            if len(body) != 1 or ast.get_docstring(parsed(init)) is None:
                found.append(f"dsv4cp/{name}/__init__.py: expected a docstring and nothing else")
    return found


def kernels_are_named_after_slices(tree: Path) -> list[str]:
    """kernels_cu/ is flat; a stem starts with a slice's name or common, or is fixed_sum."""
    found = []
    for path in sorted((tree / "kernels_cu").iterdir()):
        if path.name in ("__init__.py", "__pycache__"):
            continue
        if path.is_dir() or path.suffix not in (".cu", ".cuh"):
            found.append(f"{shown(tree, path)}: only .cu and .cuh files belong here")
        elif not path.stem.startswith((*SLICES, "common", "fixed_sum")):
            found.append(f"{shown(tree, path)}: begins with no slice's name")
    return found


# --- The public functions ------------------------------------------------------------------------------


def public_names_are_documented(tree: Path) -> list[str]:
    """In an ops.py: equation, what it raises, annotations. In a torch_bridge.py: a docstring."""
    found = []
    for name in SLICES:
        for path in sorted((tree / "dsv4cp" / name).glob("*.py")):
            if path.stem == "ops" or path.stem.startswith("ops_"):
                for f in public_functions(path):
                    at = shown(tree, path, f)
                    text = ast.get_docstring(f) or ""
                    if not re.search(r"\S +=+ \S|\b[Tt]he (sums|equations?) of \w+", text):
                        found.append(f"{at}: {f.name}: no equation")
                    if not re.search(r"\bRaises\b|[Ee]rrors as in \w+", text):
                        found.append(f"{at}: {f.name}: says neither what it raises nor where that is said")
                    arguments = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
                    bare = [a.arg for a in arguments if a.annotation is None]
                    if bare or f.returns is None:
                        found.append(f"{at}: {f.name}: not annotated: {', '.join(bare) or 'return'}")
            elif path.stem.startswith("torch_bridge"):
                found += [
                    f"{shown(tree, path, f)}: {f.name}: no docstring"
                    for f in public_functions(path)
                    if not ast.get_docstring(f)
                ]
    return found


def public_names_are_listed(tree: Path) -> list[str]:
    """Every public function of an ops.py is in dsv4cp.__all__, and everything in __all__ is defined somewhere."""
    listed = None
    for node in parsed(tree / "dsv4cp" / "__init__.py").body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            listed = ast.literal_eval(node.value)
    if listed is None:
        return ["dsv4cp/__init__.py: no __all__"]
    public = [f.name for s in SLICES for p in (tree / "dsv4cp" / s).glob("ops*.py") for f in public_functions(p)]
    found = [f"dsv4cp/__init__.py: {name} is missing from __all__" for name in public if name not in listed]
    known = (*public, "SparseIndexPlan", "__version__")
    found += [f"dsv4cp/__init__.py: {name} in __all__ is no op" for name in listed if name not in known]
    return found


RULES = (
    slices_stand_alone,
    shared_modules_know_no_slice,
    torch_stays_in_its_files,
    importing_loads_no_gpu_library,
    only_one_file_compiles_cuda,
    no_assert,
    no_function_is_named_like_a_folder,
    no_cuda_in_python_strings,
    files_stay_short,
    folders_are_the_slices,
    slices_have_their_roles,
    kernels_are_named_after_slices,
    public_names_are_documented,
    public_names_are_listed,
)
