"""Numba's compiled kernels on disk, for the fuzzer's processes: compiling them for dozens of kinds of arguments would
take each longer than all of its cases.
"""

from __future__ import annotations

import getpass
import hashlib
import importlib
import tempfile
from pathlib import Path

from dsv4cp import _backend

ROOT = Path(__file__).parents[2] / "dsv4cp"


def share_numba_kernels() -> None:
    """Lets the dispatchers of all numba_cuda files keep what they compile in a folder named after their text."""
    if _backend.missing("numba") is not None:
        return
    files = [ROOT / "_numba.py", *sorted(ROOT.glob("*/numba_cuda*.py"))]
    text = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"dsv4cp-fuzz-{getpass.getuser()}-{text}"
    folder.mkdir(mode=0o700, exist_ok=True)
    import numba
    from numba.cuda.dispatcher import CUDADispatcher

    numba.config.CACHE_DIR = str(folder)
    for file in files[1:]:
        module = importlib.import_module(f"dsv4cp.{file.parent.name}.{file.stem}")
        for x in vars(module).values():
            if isinstance(x, CUDADispatcher):
                x.enable_caching()
