"""The Numba Sinkhorn kernels without a GPU: in Numba's simulator, in a process of their own, and compiled to PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="numba-cuda is not installed")
pytest.importorskip("ml_dtypes")

from tests.support.simulate_sinkhorn import CASES

ROOT = Path(__file__).parents[1]
JOBS = [*CASES, "blocks of one matrix"]


def run(*arguments: str, simulator: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "NUMBA_ENABLE_CUDASIM": simulator}
    command = [sys.executable, "-m", "tests.support.simulate_sinkhorn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=env)


@pytest.fixture(scope="module")
def simulated() -> dict[str, str | None]:
    """Case -> what went wrong with it, None when nothing did."""
    done = run(simulator="1")
    if done.returncode:
        pytest.fail(done.stderr[-2000:], pytrace=False)
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("job", JOBS)
def test_simulated_kernels_match_the_oracle(simulated, job):
    assert simulated.get(job, "did not run") is None, simulated.get(job)


def test_kernels_compile_for_hopper_in_float32():
    done = run("--compile", simulator="0")
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(map(json.loads, done.stdout.splitlines())) == {"normalize": None, "normalize_grad": None}
