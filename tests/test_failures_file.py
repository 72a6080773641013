"""--failures: what a run writes down before its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"
TESTS = """
import os

def test_fine():
    pass

def test_wrong():
    assert 1 == 2, "so it is"

def test_end():
    os._exit(9)
"""


def test_a_run_that_is_cut_off_leaves_its_failures(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--failures", "found"]
    done = subprocess.run(
        [*command, "test_it.py"], cwd=tmp_path, env={"PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True
    )
    assert done.returncode == 9
    text = (tmp_path / "found").read_text(encoding="utf-8")
    assert "test_it.py::test_wrong call" in text and "so it is" in text and "test_fine" not in text
