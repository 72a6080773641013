"""Numba's compiled kernels on disk, for the fuzzer's processes: compiling them for dozens of kinds of arguments would
take each longer than all of its cases.

Numba's cache is made for one process that saves at a time. An index says which file holds the code of which signature,
and a new signature takes the least number that the index does not have: two processes that save at once take one number
for two signatures, each writes an index without the other's, and a third process may then load a kernel whose arguments
are laid out otherwise. So every save and load of an index and its files happens under one lock of all processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import getpass
import hashlib
import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsv4cp import _backend

ROOT = Path(__file__).parents[2] / "dsv4cp"
LOCK = "lock"  # a file in the folder


def share_numba_kernels() -> None:
    """Lets the dispatchers of all numba_cuda files keep what they compile in a folder named after their text, and this
    file's: what was saved without the lock is not read."""
    if _backend.missing("numba") is not None:
        return
    files = [ROOT / "_numba.py", *sorted(ROOT.glob("*/numba_cuda*.py"))]
    text = hashlib.sha256(b"".join(file.read_bytes() for file in (*files, Path(__file__)))).hexdigest()[:16]
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
                one_at_a_time(type(x._cache._cache_file), folder)


def one_at_a_time(files: type, folder: Path) -> None:
    """Puts save, load and flush of Numba's class of index and data files under the folder's lock; once."""
    for name in ("save", "load", "flush"):
        method = getattr(files, name)
        if not hasattr(method, "__wrapped__"):
            setattr(files, name, _under_lock(method, folder / LOCK))


def _under_lock(method, lock: Path):
    @functools.wraps(method)
    def alone(*arguments):
        with locked(lock):
            return method(*arguments)

    return alone


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process and no other thread is inside. Not to be entered again from inside."""
    with open(path, "ab") as file:  # a file of its own each time: threads exclude each other too
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing ends it, and so does the end of the process
