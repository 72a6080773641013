"""Numba's kernels on disk, saved by many processes at once: each signature has its own code."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

caching = pytest.importorskip("numba.core.caching", reason="no numba")

from tests.support import fuzz_jit  # noqa: E402

try:
    from numba.cuda.core import caching
except ImportError:
    pass

PROCESSES, ROUNDS = 3, 4


def slow_files(n: int) -> type:
    """Numba's class on a busy machine: the process that writes its index last writes its code first."""

    class Files(caching.IndexDataCacheFile):
        def _save_index(self, overloads):
            time.sleep(0.03 * n)
            super()._save_index(overloads)
            time.sleep(0.06 * (PROCESSES - n))

    return Files


def save_and_load(folder: Path, n: int, start, results, lock: bool) -> None:
    """One process: new signatures, and what is then found of them."""
    kind = slow_files(n)
    if lock:
        fuzz_jit.one_at_a_time(kind, folder)
    files = kind(str(folder), "kernel", "stamp")
    for k in range(ROUNDS):
        start.wait(60)
        files.save(("signature", n, k), f"code of {n}, {k}")
    start.wait(60)  # all have saved
    every = ((m, k) for m in range(PROCESSES) for k in range(ROUNDS))
    results.put([(m, k, files.load(("signature", m, k))) for m, k in every])


def saved_at_once(folder: Path, lock: bool) -> tuple[int, int]:
    """(signatures that are lost, signatures with another's code) of all that the processes find."""
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(PROCESSES), context.Queue()
    arguments = [(folder, n, start, results, lock) for n in range(PROCESSES)]
    running = [context.Process(target=save_and_load, args=x, daemon=True) for x in arguments]
    for process in running:
        process.start()
    found = [x for _ in running for x in results.get(timeout=120)]
    for process in running:
        process.join(60)
    assert len(found) == PROCESSES**2 * ROUNDS
    return sum(x is None for *_, x in found), sum(x not in (None, f"code of {m}, {k}") for m, k, x in found)


def test_many_processes_that_save_at_once_never_mix_kernels(tmp_path):
    assert saved_at_once(tmp_path, lock=True) == (0, 0)


def test_without_the_lock_they_do(tmp_path):
    """Else the test above would show nothing: a signature gets the code of another."""
    lost, mixed = saved_at_once(tmp_path, lock=False)
    print(f"{lost} lost, {mixed} mixed")
    assert mixed > 0


def test_a_class_is_put_under_the_lock_once(tmp_path):
    class Files(caching.IndexDataCacheFile):
        pass

    for _ in range(2):
        fuzz_jit.one_at_a_time(Files, tmp_path)
    files = Files(str(tmp_path), "kernel", "stamp")
    files.save("signature", 1)  # under a lock inside a lock it would wait for ever
    assert files.load("signature") == 1 and (tmp_path / fuzz_jit.LOCK).exists()
    files.flush()
    assert files.load("signature") is None
