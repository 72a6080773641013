"""Markers and fixtures shared by the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser):
    parser.addoption("--require-gpu", action="store_true", help="fail, instead of skip, gpu tests without a CUDA GPU")
    parser.addoption("--every-variant", action="store_true", help="compile every variant of every kernel for every GPU")


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
