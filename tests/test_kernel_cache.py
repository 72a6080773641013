"""CuPy's disk cache of kernels when it is damaged, cannot be written, is interrupted, or is used by two processes.

NVRTC and the cache are CuPy's own; only the loading of a module needs a GPU and is replaced (support/compile_alone.py).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy.cuda import compiler  # noqa: E402
from cupy.cuda._compiler_cache import DiskKernelCacheBackend  # noqa: E402

from dsv4cp import _backend, _kernel_cache, _kernel_text, _kernels  # noqa: E402
from tests.support import compile_alone  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TEXT = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1.0f; }\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, a kernel of one line, and how often NVRTC ran: (folder, load, runs)."""
    sources, folder, runs = tmp_path / "sources", tmp_path / "cache", []
    sources.mkdir()
    (sources / "a.cu").write_text(TEXT)
    monkeypatch.setattr(_kernel_text, "source_folder", lambda: sources)
    monkeypatch.setattr(compiler, "_kernel_cache_backend", DiskKernelCacheBackend(str(folder)))
    compile_alone.without_a_gpu(monkeypatch.setattr)
    real = compiler._compile_using_nvrtc_no_warning

    def counted(*args, **kwargs):
        runs.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(compiler, "_compile_using_nvrtc_no_warning", counted)
    for cached in (_kernel_text.expand, _kernels._kernel, _kernel_cache._warn):
        cached.cache_clear()

    def load():
        """As a new process would."""
        _kernels._kernel.cache_clear()
        return _kernels._load(_kernels.kernel("a.cu", "f"), 0)

    load()
    runs.clear()
    yield folder, load, runs
    for cached in (_kernel_text.expand, _kernels._kernel, _kernel_cache._warn):
        cached.cache_clear()


def whole(entry: Path) -> bool:
    """The entry begins with the hash of the rest, which is an ELF file."""
    data = entry.read_bytes()
    return data[:40].decode() == hashlib.sha1(data[40:]).hexdigest() and data[40:44] == b"\x7fELF"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))


def test_a_whole_entry_is_taken(cache):
    folder, load, runs = cache
    assert len(entries(folder)) == 1 and whole(entries(folder)[0])
    load()
    assert runs == []


@pytest.mark.parametrize("damage", ["empty", "cut", "one bit", "other text"])
def test_a_damaged_entry_is_built_anew(cache, damage):
    folder, load, runs = cache
    (entry,) = entries(folder)
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    kinds = {"empty": b"", "cut": bytes(data[:200]), "one bit": bytes(data), "other text": b"x" * 500}
    entry.write_bytes(kinds[damage])
    load()
    assert len(runs) == 1 and whole(entry)
    load()
    assert len(runs) == 1


def test_an_entry_that_is_whole_and_no_module_does_not_end_the_call(cache):
    folder, load, runs = cache
    (entry,) = entries(folder)
    entry.write_bytes(hashlib.sha1(b"no module").hexdigest().encode() + b"no module")
    with pytest.warns(RuntimeWarning, match="cache cannot be used.*INVALID_IMAGE.*CUPY_CACHE_DIR"):
        assert load().function.cubin.startswith(b"\x7fELF")
    assert len(runs) == 1


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def lock(folder: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    entries(folder)[0].unlink()
    folder.chmod(0o555)


def entry_is_a_folder(folder: Path) -> None:
    (entry,) = entries(folder)
    entry.unlink()
    entry.mkdir()


@pytest.mark.parametrize("spoil", [remove, replace_by_file, lock, entry_is_a_folder])
def test_a_folder_that_fails_costs_the_cache_and_not_the_call(cache, spoil, monkeypatch):
    folder, load, _ = cache
    spoil(folder)
    monkeypatch.delenv(_kernel_cache.IN_MEMORY, raising=False)
    with pytest.warns(RuntimeWarning, match="cache cannot be used") as said:
        load()
    assert len(said) == 1 and _kernel_cache.IN_MEMORY not in os.environ
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        load()
    monkeypatch.setenv(_kernel_cache.IN_MEMORY, "0")
    load()
    assert os.environ[_kernel_cache.IN_MEMORY] == "0"


def test_a_full_disk_costs_the_cache_and_not_the_call(cache, monkeypatch):
    folder, load, runs = cache
    entries(folder)[0].unlink()

    def full(self, name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskKernelCacheBackend, "_write_encoded", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        load()
    assert len(runs) == 2  # once for the disk, once without


def test_an_error_in_the_text_is_not_tried_twice(cache, monkeypatch):
    folder, load, runs = cache
    (_kernel_text.source_folder() / "a.cu").write_text('extern "C" __global__ void f(float* x) { nope; }\n')
    _kernel_text.expand.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="nope"):
            load()
    assert len(runs) == 1 and len(entries(folder)) == 1


@pytest.mark.parametrize("where", ["compiler", "cache"])
def test_an_interrupt_leaves_nothing_behind(cache, monkeypatch, where):
    """Ctrl-C inside a compilation: no half entry, no lock held, no kernel half made."""
    folder, load, _ = cache
    entries(folder)[0].unlink()

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if where == "compiler":
            patch.setattr(compiler, "_compile_using_nvrtc_no_warning", interrupted)
        else:
            patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load()
    assert entries(folder) == []
    kernel = _kernels.kernel("a.cu", "f")
    assert kernel.loaded == {}
    done = []
    thread = threading.Thread(target=lambda: done.append(_kernels._load(kernel, 0)))  # another thread gets the lock
    thread.start()
    thread.join(60)
    assert done and whole(entries(folder)[0])


# --- Processes -----------------------------------------------------------------------------------------------

KERNEL = ("sinkhorn.cu:sinkhorn4_forward", "ELEMENT=Float32")


def environment(folder: Path) -> dict[str, str]:
    """This process's, with a cache folder of its own and this checkout first."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "CUPY_CACHE_DIR": str(folder), "PYTHONPATH": path}


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.support.compile_alone", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(folder), **pipes)


def test_two_processes_at_once_and_one_that_was_interrupted(tmp_path):
    """All three write the same entry; the interrupted one must not spoil it for the others."""
    stopped = start(tmp_path, *KERNEL)
    assert stopped.stdout.readline() == "compiling\n"
    stopped.send_signal(signal.SIGINT)
    both = [start(tmp_path, *KERNEL) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.endswith("compiled\n"), err
        assert "cannot be used" not in err
    _, err = stopped.communicate(timeout=120)
    assert stopped.returncode != 0 and "KeyboardInterrupt" in err
    assert len(entries(tmp_path)) == 1 and whole(entries(tmp_path)[0])


# --- CuPy itself ---------------------------------------------------------------------------------------------


def test_a_cupy_that_cannot_make_its_folder_is_a_reason_and_no_crash(monkeypatch):
    """CuPy makes its cache folder at import; where that fails, so does the import, and not with an ImportError."""
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "cupy":
            raise PermissionError(13, "Permission denied: '/home/x/.cupy/kernel_cache'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "set CUPY_CACHE_DIR" in _backend.missing.__wrapped__("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["no folder to write", "damaged entries"])
def test_a_process_with_a_bad_cache_computes(tmp_path, state):
    code = """
import os, shutil, sys, warnings
import cupy
folder = os.environ["CUPY_CACHE_DIR"]
if sys.argv[1] == "no folder to write":
    shutil.rmtree(folder)
import dsv4cp
x = cupy.asarray([[[1.0, 2.0], [3.0, 5.0]]], "f4")
y = dsv4cp.dsv4_sinkhorn_normalize(x, repeat=20, eps=1e-6, backend="cuda")
z = dsv4cp.dsv4_sinkhorn_normalize(x.get(), repeat=20, eps=1e-6)  # on the host: CuPy's own kernels need the folder
assert float(abs(y.get() - z).max()) < 1e-5
print("computed")
"""
    script = tmp_path / "script.py"
    script.write_text(code)

    def run():
        command = [sys.executable, str(script), state]
        return subprocess.run(command, env=environment(tmp_path / "cache"), capture_output=True, text=True, timeout=120)

    if state == "damaged entries":
        first = run()
        assert first.stdout == "computed\n", first.stderr
        for entry in entries(tmp_path / "cache"):
            entry.write_bytes(entry.read_bytes()[:-7])
    done = run()
    assert done.stdout == "computed\n", done.stderr
    assert ("cannot be used" in done.stderr) == (state != "damaged entries")
    if state == "damaged entries":
        assert all(whole(entry) for entry in entries(tmp_path / "cache"))
