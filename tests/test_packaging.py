"""The wheel, the sdist, an editable install and a bare checkout all carry every module and every CUDA file."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = (".py", ".cu", ".cuh", ".typed")
NOT_COPIED = (".git", "__pycache__", "_build", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis", ".venv")


def in_the_tree(source: Path) -> dict[str, bytes]:
    """What a wheel must contain, by its path in site-packages."""
    files = {}
    for folder, prefix in (("dsv4cp", "dsv4cp"), ("kernels_cu", "dsv4cp/kernels_cu")):
        for path in sorted((source / folder).rglob("*")):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                files[f"{prefix}/{path.relative_to(source / folder).as_posix()}"] = path.read_bytes()
    return files


PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation")


def run(*command: object, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the tree, so that building leaves nothing behind in it."""
    copy = tmp_path_factory.mktemp("packaging") / "source"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return copy


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    out = source.parent / "wheel"
    run(*PIP, "wheel", *OFFLINE, "-w", out, source, cwd=out.parent)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel) -> Path:
    """The wheel installed into a folder of its own."""
    target = wheel.parent.parent / "site"
    run(*PIP, "install", *OFFLINE, "--target", target, wheel, cwd=target.parent)
    return target


def test_the_wheel_holds_exactly_the_tree(wheel, source):
    with zipfile.ZipFile(wheel) as z:
        got = {name: z.read(name) for name in z.namelist() if ".dist-info/" not in name}
        metadata = z.read(next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))).decode()
        licences = [n for n in z.namelist() if n.endswith("LICENSE")]
    want = in_the_tree(source)
    assert sorted(got) == sorted(want)
    assert got == want
    assert "dsv4cp/py.typed" in got
    assert "Apache-2.0" in metadata and licences


def test_the_sdist_holds_the_tree_and_the_tests(source):
    code = "import setuptools.build_meta as b; print(b.build_sdist('../sdist'))"
    run(sys.executable, "-c", code, cwd=source)
    (built,) = (source.parent / "sdist").glob("*.tar.gz")
    with tarfile.open(built) as t:
        members = [m for m in t.getmembers() if m.isfile()]
        got = {m.name.partition("/")[2]: t.extractfile(m).read() for m in members}
    want = {name.replace("dsv4cp/kernels_cu/", "kernels_cu/"): text for name, text in in_the_tree(source).items()}
    for folder in ("tests", "examples", "docs"):
        for path in (source / folder).rglob("*"):
            if path.suffix in (".py", ".md", ".sh", ".txt"):
                want[path.relative_to(source).as_posix()] = path.read_bytes()
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "setup.cfg", "pyproject.toml", ".ci/run")
    for name in (*names, "tests/constraints.txt"):
        want[name] = (source / name).read_bytes()
    assert [name for name in want if name not in got] == []
    # setuptools writes setup.cfg anew: without comments, with an [egg_info] section.
    rewritten, original = sections(got.pop("setup.cfg")), sections(want.pop("setup.cfg"))
    assert {name: rewritten[name] for name in original} == original
    assert [name for name in want if got[name] != want[name]] == []


def sections(text: bytes) -> dict[str, dict[str, str]]:
    config = configparser.ConfigParser()
    config.read_string(text.decode())
    return {name: dict(config[name]) for name in config.sections()}


FIND = """
import dsv4cp, sys
from dsv4cp import _kernel_text
from pathlib import Path
folder = Path(str(_kernel_text.source_folder()))
print(Path(dsv4cp.__file__).parent)
print(folder)
print(*sorted(p.name for p in folder.iterdir() if p.suffix in (".cu", ".cuh")))
"""


def found(cwd: Path, *before: str, flags: tuple[str, ...] = ()) -> tuple[Path, Path, list[str]]:
    """What a fresh interpreter finds from cwd: the package, the folder of the CUDA text, the files in it."""
    script = cwd / "find_cuda_text.py"
    script.write_text("\n".join(before) + FIND)
    package, folder, names = run(sys.executable, *flags, script, cwd=cwd).rstrip("\n").split("\n")
    return Path(package), Path(folder), names.split()


def cuda_files(source: Path) -> list[str]:
    names = sorted(p.name for p in (source / "kernels_cu").iterdir() if p.suffix in (".cu", ".cuh"))
    assert names
    return names


def test_an_installed_wheel_finds_its_own_cuda_files(site, source, tmp_path):
    package, folder, names = found(tmp_path, f"import sys; sys.path.insert(0, {str(site)!r})")
    assert (package, folder) == (site / "dsv4cp", site / "dsv4cp" / "kernels_cu")
    assert names == cuda_files(source)


def test_an_installed_wheel_runs_the_demo(site, tmp_path):
    script = tmp_path / "run_demo.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(site)!r})\nimport dsv4cp.__main__ as m\nprint(m.__file__)\n"
        "sys.exit(m.main(['demo', '--tokens', '100', '--backend', 'reference', '--plot', 'map.png']))\n"
    )
    shown = run(sys.executable, script, cwd=tmp_path)
    assert shown.startswith(str(site)) and "agree with their float64 definitions" in shown
    assert (tmp_path / "map.png").stat().st_size > 0


def test_a_bare_checkout_finds_its_own_cuda_files(source):
    package, folder, names = found(source)
    assert (package, folder) == (source / "dsv4cp", source / "kernels_cu")
    assert names == cuda_files(source)


def test_an_editable_install_finds_the_cuda_files_of_its_checkout(source, tmp_path):
    target = tmp_path / "site"
    run(*PIP, "install", *OFFLINE, "--target", target, "-e", source, cwd=tmp_path)
    # -S: this interpreter's installed packages without its .pth files, one of which may be another editable install.
    packages = [path for path in sys.path if path.endswith("-packages")]
    before = f"import site, sys; site.addsitedir({str(target)!r}); sys.path += {packages!r}"
    package, folder, names = found(tmp_path, before, flags=("-S",))
    assert (package, folder) == (source / "dsv4cp", source / "kernels_cu")
    assert names == cuda_files(source)


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = sorted(config["options"]["packages"].split())
    folders = sorted(".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "dsv4cp").rglob("__init__.py"))
    assert listed == sorted([*folders, "dsv4cp.kernels_cu"])
