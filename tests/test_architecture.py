"""The layout rules hold for this tree, and each of them fails on a small tree that breaks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import architecture as rules

ROOT = Path(__file__).resolve().parents[1]

OP = '''"""Ops."""


def dsv4_{name}(x: object) -> object:
    """Twice x.

        y = 2 x

    Raises:
        TypeError: x is no array.
    """
    return x
'''
OP_A = OP.format(name="a")


def good_tree(root: Path) -> Path:
    """The smallest tree that keeps every rule."""
    names = ", ".join(f'"dsv4_{s}"' for s in rules.SLICES)
    write(root, "dsv4cp/__init__.py", f'"""Names."""\n\n__all__ = [{names}]\n')
    write(root, "dsv4cp/commands/__init__.py", '"""Commands."""\n')
    write(root, "kernels_cu/common.cuh", "// shared\n")
    for s in rules.SLICES:
        write(root, f"dsv4cp/{s}/__init__.py", '"""A slice."""\n')
        for role in rules.ROLES:
            write(root, f"dsv4cp/{s}/{role}.py", f'"""{role}."""\n')
        write(root, f"dsv4cp/{s}/ops.py", OP.format(name=s))
    return root


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# What is done to the good tree, and the rule that must notice: (rule, file, text, words of the finding).
# A text of None removes the file.
BAD = [
    (rules.slices_stand_alone, "dsv4cp/indexer/reference.py", "from ..sinkhorn import ops\n", "dsv4cp.sinkhorn.ops"),
    (rules.slices_stand_alone, "dsv4cp/indexer/reference.py", "def f():\n    import dsv4cp.sinkhorn.ops\n", "sinkhorn"),
    (rules.slices_stand_alone, "dsv4cp/indexer/cuda.py", "from .. import sparse_attention\n", "sparse_attention"),
    (rules.slices_stand_alone, "dsv4cp/indexer/cuda.py", "from .. import dsv4_sinkhorn\n", "dsv4_sinkhorn"),
    (rules.slices_stand_alone, "dsv4cp/indexer/cuda.py", "import dsv4cp\n", "dsv4cp"),
    (rules.slices_stand_alone, "dsv4cp/indexer/cuda.py", "from ..torch_ops import x\n", "torch_ops"),
    (rules.shared_modules_know_no_slice, "dsv4cp/_arrays.py", "from .sinkhorn import ops\n", "dsv4cp.sinkhorn.ops"),
    (rules.shared_modules_know_no_slice, "dsv4cp/_arrays.py", "def f():\n    from . import indexer\n", "indexer"),
    (rules.torch_stays_in_its_files, "dsv4cp/indexer/reference.py", "def f():\n    import torch.nn\n", "torch.nn"),
    (rules.torch_stays_in_its_files, "dsv4cp/_arrays.py", "from torch import Tensor\n", "torch.Tensor"),
    (rules.torch_stays_in_its_files, "dsv4cp/_arrays.py", "import array_api_compat.torch as xp\n", "compat.torch"),
    (rules.torch_stays_in_its_files, "dsv4cp/commands/demo.py", "import torch\n", "torch"),
    (rules.importing_loads_no_gpu_library, "dsv4cp/__init__.py", "import numba\n", "numba"),
    (rules.importing_loads_no_gpu_library, "dsv4cp/__init__.py", "import missing_module_xyz\n", "missing_module_xyz"),
    (rules.only_one_file_compiles_cuda, "dsv4cp/sinkhorn/cuda.py", "def f(cp):\n    cp.RawModule('')\n", "RawModule"),
    (rules.only_one_file_compiles_cuda, "dsv4cp/sinkhorn/cuda.py", "from cupy import RawKernel\n", "RawKernel"),
    (rules.only_one_file_compiles_cuda, "dsv4cp/_numba.py", "def f(d):\n    d.launchKernel(1)\n", "launchKernel"),
    (rules.no_assert, "dsv4cp/sinkhorn/contract.py", "def f(x):\n    assert x\n", "assert"),
    (rules.no_function_is_named_like_a_folder, "dsv4cp/sinkhorn/ops.py", "def sinkhorn(x):\n    pass\n", "sinkhorn"),
    (rules.no_cuda_in_python_strings, "dsv4cp/sinkhorn/cuda.py", 'S = f"__global__ void {f}()"\n', "CUDA"),
    (rules.no_cuda_in_python_strings, "dsv4cp/_kernels.py", 'S = """\nint i = threadIdx.x;"""\n', "CUDA"),
    (rules.files_stay_short, "dsv4cp/_arrays.py", "x = 1\n" * 321, "321 lines"),
    (rules.files_stay_short, "kernels_cu/sinkhorn.cu", "//\n" * 601, "601 lines"),
    (rules.folders_are_the_slices, "dsv4cp/extra/__init__.py", "", "extra"),
    (rules.folders_are_the_slices, "dsv4cp/indexer/_utils.py", "", "_utils"),
    (rules.slices_have_their_roles, "dsv4cp/indexer/torch_bridge.py", None, "torch_bridge"),
    (rules.slices_have_their_roles, "dsv4cp/indexer/stuff.py", "", "stuff"),
    (rules.slices_have_their_roles, "dsv4cp/indexer/__init__.py", '"""Doc."""\nfrom . import ops\n', "docstring"),
    (rules.kernels_are_named_after_slices, "kernels_cu/gemm.cu", "", "gemm"),
    (rules.kernels_are_named_after_slices, "kernels_cu/sinkhorn.py", "", "sinkhorn.py"),
    (rules.kernels_are_named_after_slices, "kernels_cu/sinkhorn/forward.cu", "", "sinkhorn"),
    (rules.public_names_are_documented, "dsv4cp/sinkhorn/ops.py", "def f(x: int) -> int:\n    pass\n", "equation"),
    (rules.public_names_are_documented, "dsv4cp/sinkhorn/ops.py", OP_A.replace("y = 2 x", "it"), "equation"),
    (rules.public_names_are_documented, "dsv4cp/sinkhorn/ops.py", OP_A.replace("Raises", "May"), "raises"),
    (rules.public_names_are_documented, "dsv4cp/sinkhorn/ops.py", OP_A.replace("x: object", "x"), "x"),
    (rules.public_names_are_documented, "dsv4cp/sinkhorn/torch_bridge.py", "def f():\n    return 1\n", "docstring"),
    (rules.public_names_are_listed, "dsv4cp/sinkhorn/ops.py", OP.format(name="other"), "dsv4_other"),
    (rules.public_names_are_listed, "dsv4cp/__init__.py", '"""No names."""\n', "__all__"),
]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_this_tree_keeps(rule):
    assert rule(ROOT) == []


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_a_good_tree_keeps(rule, tmp_path):
    assert rule(good_tree(tmp_path)) == []


@pytest.mark.parametrize(("rule", "name", "text", "words"), BAD, ids=[f"{r.__name__}-{n}" for r, n, _, _ in BAD])
def test_a_bad_tree_is_noticed(rule, name, text, words, tmp_path):
    tree = good_tree(tmp_path)
    if text is None:
        (tree / name).unlink()
    else:
        write(tree, name, text)
    found = rule(tree)
    assert found, f"{rule.__name__} did not notice {name}"
    assert any(words in line for line in found), found


def test_every_rule_has_a_bad_example():
    assert {rule for rule, *_ in BAD} == set(rules.RULES)
