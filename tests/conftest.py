"""Markers and fixtures shared by the whole suite."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # before NumPy and torch start as many threads as there are cores, each
    _threads = max((os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), 1)
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, str(_threads))


def pytest_addoption(parser):
    parser.addoption("--failures", metavar="FILE", help="write each failure there at once: a run cut off leaves them")
    parser.addoption("--require-gpu", action="store_true", help="fail, instead of skip, gpu tests without a CUDA GPU")
    parser.addoption("--every-variant", action="store_true", help="compile every variant of every kernel for every GPU")


class Failures:
    """Writes failures down as they come, where pytest itself waits for the end; beside xdist's workers too."""

    def __init__(self, file: Path) -> None:
        self.file, self.start = file, time.monotonic()
        file.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            worker = getattr(getattr(report, "node", None), "gateway", None)
            place = worker.id if worker else "here"
            with self.file.open("a", encoding="utf-8") as out:
                out.write(f"{time.monotonic() - self.start:.0f} s {place} {report.nodeid} {report.when}\n")
                out.write(f"{report.longreprtext[-3000:]}\n\n")


def pytest_configure(config):
    file = config.getoption("--failures")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(file).resolve()))


def _gpu_missing() -> str | None:
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported: {error}"
    return None if cupy.cuda.is_available() else "no CUDA GPU is visible"


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    reason = _gpu_missing()
    if reason is None:
        return
    if item.config.getoption("--require-gpu"):
        pytest.fail(f"--require-gpu: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of CUDA text in place of kernels_cu."""
    from dsv4cp import _kernel_text, _kernels

    monkeypatch.setattr(_kernel_text, "source_folder", lambda: tmp_path)
    for cached in (_kernel_text.expand, _kernels._kernel):
        cached.cache_clear()
    yield tmp_path
    for cached in (_kernel_text.expand, _kernels._kernel):
        cached.cache_clear()
