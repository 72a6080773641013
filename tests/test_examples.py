"""Every example runs as it stands, and so does every Python block of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
NEEDS = {"torch_drop_in": "torch"}


def run(script: Path, folder: Path) -> str:
    """What a script prints when it runs by itself, away from the checkout, with this checkout's package."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(script)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_example(script, tmp_path):
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem])
    assert run(script, tmp_path).strip(), "an example prints what it found"


def test_every_example_checks_something():
    assert EXAMPLES
    assert [p.name for p in EXAMPLES if "raise SystemExit" not in p.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block(number, tmp_path):
    if "torch" in BLOCKS[number]:
        pytest.importorskip("torch")
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    shown = run(script, tmp_path)
    # Lines of the form `print(...)  # what it prints` promise their output.
    promised = re.findall(r"^print\(.*\)  # (.*)$", BLOCKS[number], flags=re.M)
    assert shown.splitlines()[: len(promised)] == promised


def test_the_readme_has_examples():
    assert BLOCKS
