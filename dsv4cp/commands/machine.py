"""What this machine is: versions, GPU, commit, in plain dictionaries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import dsv4cp

# What a user may have installed that matters here: shown name -> distributions that provide it.
PACKAGES = {
    "numpy": ("numpy",),
    "array-api-compat": ("array-api-compat",),
    "ml_dtypes": ("ml_dtypes",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "numba": ("numba",),
    "numba-cuda": ("numba-cuda",),
    "nvidia-cudnn-frontend": ("nvidia-cudnn-frontend",),
    "torch": ("torch",),
    "matplotlib": ("matplotlib",),
    "rich": ("rich",),
}


def versions() -> dict[str, str | None]:
    """Versions of dsv4cp, Python and what dsv4cp can use; None for what is not installed. Imports nothing."""
    found: dict[str, str | None] = {"dsv4cp": dsv4cp.__version__, "python": platform.python_version()}
    for name, distributions in PACKAGES.items():
        found[name] = None
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    return found


def gpu() -> dict[str, Any] | None:
    """The current CUDA device and driver as CuPy sees them, None without CuPy or GPU."""
    try:
        import cupy
    except ImportError:
        return None
    if not cupy.cuda.is_available():
        return None
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    return {
        "name": properties["name"].decode(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "count": cupy.cuda.runtime.getDeviceCount(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
    }


def host() -> dict[str, Any]:
    """Processor, cores that this process may use, system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"system": platform.platform(), "processor": _processor(), "cores": cores}


def _processor() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """$DSV4CP_COMMIT where it is set, for a copy that git does not know; else the git commit of this checkout, with
    "+changes" when files differ from it, or None without git."""
    named = os.environ.get("DSV4CP_COMMIT")
    folder = Path(dsv4cp.__file__).resolve().parents[1]
    if named or not (folder / ".git").exists():
        return named or None
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changed else "")


def _git(folder: Path, *words: str) -> str:
    """One git command's output."""
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    return done.stdout.strip()
