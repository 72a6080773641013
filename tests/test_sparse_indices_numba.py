"""The Numba kernels of index building, planning and score extraction, without a GPU.

In Numba's simulator, in a process of their own: every case of tests/support/index_cases.py must equal the reference
exactly, from read-only inputs. And compiled to PTX, which finds what the simulator, being Python, forgives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from dsv4cp import _backend, build_dsv4_sparse_topk_indices, plan_dsv4_sparse_indices
from tests.support.index_cases import build_cases, extract_cases, long_build_cases, plan_cases

pytest.importorskip("numba", reason="numba-cuda is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")

ROOT = Path(__file__).parents[1]
JOBS = [
    *(f"build: {name}" for name in (*build_cases(), next(iter(long_build_cases())))),
    *(f"plan: {name}" for name in plan_cases()),
    *(f"plan, wide: {name}" for name in ("shuffled 65", "empty rows", "ascending with gaps", "repeated")),
    "plan, all rows promised nonempty",
    *(f"extract: {name}" for name in extract_cases(ml_dtypes.bfloat16)),
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=env)


@pytest.fixture(scope="module")
def simulated() -> dict[str, str | None]:
    """Case -> what went wrong with it, None when nothing did."""
    done = run("-m", "tests.support.simulate_indices")
    if done.returncode:
        pytest.fail(done.stderr[-2000:], pytrace=False)
    return {name: error for name, _, error in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("job", JOBS)
def test_simulated_kernel_equals_the_reference(simulated, job):
    assert simulated.get(job, "did not run") is None, simulated.get(job)


def test_every_simulated_case_is_listed(simulated):
    assert sorted(simulated) == sorted(JOBS)


def test_kernels_compile_for_hopper_also_beside_numpy_without_row_stack():
    done = run("-m", "tests.support.compile_indices", "--numpy-2.5", NUMBA_ENABLE_CUDASIM="0")
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-2000:]
    made = {name: local for name, _, local in map(json.loads, done.stdout.splitlines())}
    assert len(made) == 10
    assert not any(made.values()), made


def test_the_target_loads_beside_numpy_without_row_stack():
    code = """
import numpy as np
vars(np).pop("row_stack", None)
np.__all__ = [name for name in np.__all__ if name != "row_stack"]
from dsv4cp import _numba
from numba.cuda.descriptor import cuda_target
cuda_target.typing_context.refresh()
cuda_target.target_context.refresh()
print(_numba.SIMULATED, hasattr(np, "row_stack"))
"""
    done = run("-W", "ignore", "-c", code, NUMBA_ENABLE_CUDASIM="0")
    assert (done.returncode, done.stdout.split()) == (0, ["False", "False"]), done.stderr[-2000:]


def test_numpy_arrays_do_not_go_to_numba():
    ids = np.zeros((1, 1, 1), np.int64)
    with pytest.raises(RuntimeError, match="'numba'"):
        build_dsv4_sparse_topk_indices(
            batch_size=1, seq_len=1, key_len=1, window_size=1, compressed_topk=ids, n_pooled=1, backend="numba"
        )
    with pytest.raises(RuntimeError, match="'numba'"):
        plan_dsv4_sparse_indices(ids, 1, "cuda", index_backend="numba")


def test_auto_warns_once_when_numba_cannot_run_on_a_gpu(monkeypatch):
    reasons = {"cuda": None, "numba": "it is broken (a reason of this test)"}
    monkeypatch.setattr(_backend, "missing", lambda backend: reasons[backend])
    offered = ("reference", "numba")

    def auto() -> str:
        return _backend.pick("op", "auto", "cupy", offered=offered)

    with pytest.warns(RuntimeWarning, match=r'"auto" runs the reference .*a reason of this test'):
        assert auto() == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert auto() == "reference"
        assert _backend.pick("op", "auto", "cupy", offered=("reference",)) == "reference"
        assert _backend.pick("op", "auto", "numpy", offered=offered) == "reference"
    with pytest.raises(RuntimeError, match="a reason of this test"):
        _backend.pick("op", "numba", "cupy", offered=offered)
    reasons["numba"] = None
    assert auto() == "numba"


def test_numba_says_that_it_is_simulating():
    code = "from dsv4cp import _backend; print(_backend._numba_missing())"
    done = run("-c", code, NUMBA_ENABLE_CUDASIM="1")
    assert "NUMBA_ENABLE_CUDASIM is set" in done.stdout, done.stderr
