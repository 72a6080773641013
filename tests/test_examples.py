"""Every example runs as it stands, on several processes where it asks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # this checkout before all else
EXAMPLES = ROOT / "examples"
NEEDS_TORCH = ("torch_drop_in",)
NEEDS_GPU = ("cupy_layers", "cuda_graph", "numba_interop")
ON_BOTH = ("choosing_a_backend", "determinism", "torch_drop_in")  # these take a GPU where there is one
OWN_TESTS = ("context_parallel", "train_tiny_v4")  # below, and in tests/test_train_tiny_v4.py
ALL = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem not in OWN_TESTS)
CASES = [pytest.param(name, marks=pytest.mark.gpu) if name in NEEDS_GPU else name for name in ALL]
CASES += [pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-gpu") for name in ON_BOTH]


def run(*command: object, folder: Path) -> str:
    """What a script prints when it runs by itself, away from the checkout, with this checkout's package."""
    env = os.environ | {"PYTHONPATH": PATH, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", *map(str, command)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_example(name, tmp_path):
    if name in NEEDS_TORCH:
        pytest.importorskip("torch")
    assert run(EXAMPLES / f"{name}.py", folder=tmp_path).strip(), "an example prints what it found"


def test_every_example_checks_something():
    assert ALL
    silent = [name for name in ALL if "raise SystemExit" not in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")]
    assert silent == []


def torchrun(ranks: int, *arguments: object, folder: Path) -> list[str]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return run(*launch, EXAMPLES / "context_parallel.py", *arguments, folder=folder).splitlines()


@pytest.mark.parametrize("ranks", [2, 3])
def test_context_parallel(ranks, tmp_path):
    """The script itself compares with one process: outputs, and the gradients of inputs and weights."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    lines = [line for line in torchrun(ranks, folder=tmp_path) if "ranks of" in line]
    assert [line.partition(":")[0] for line in lines] == ["one document", "packed documents"]
    assert all(f": {ranks} ranks of " in line for line in lines)


@pytest.mark.gpu
def test_context_parallel_on_gpus(tmp_path):
    torch = pytest.importorskip("torch")
    ranks = min(2, torch.cuda.device_count())
    lines = torchrun(ranks, "--tokens", 1000, "--backend", "tilelang", folder=tmp_path)
    assert sum("ranks of" in line for line in lines) == 2
