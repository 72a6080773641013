"""README, CONTRIBUTING and docs/: Python blocks run, commands parse, links and named files exist."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4cp
from dsv4cp import __main__ as program

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # this checkout before all else
DOCS = ROOT / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(DOCS.glob("*.md"))]
NAMES = [p.relative_to(ROOT).as_posix() for p in PAGES]
BLOCK = re.compile(r"^(<!-- gpu -->\n)?```python\n(.*?)^```", flags=re.M | re.S)
NEEDS_BUILD = ("docs/_build", "bench.json", "bench.png")  # what commands in the text write


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, *, gpu: bool) -> list[str]:
    """A page's Python blocks for the CPU, or those marked gpu."""
    return [code for mark, code in BLOCK.findall(text(name)) if bool(mark) == gpu]


def scripts() -> list:
    """(page, program): the blocks of a page in order are one program; README's stand alone, a block marked gpu too."""
    found = []
    for name in NAMES:
        plain = blocks(name, gpu=False)
        parts = plain if name == "README.md" else ["\n".join(plain)] if plain else []
        found += [pytest.param(part, id=f"{name}-{n}") for n, part in enumerate(parts)]
        on_gpu = enumerate(blocks(name, gpu=True))
        found += [pytest.param(part, id=f"{name}-gpu-{n}", marks=pytest.mark.gpu) for n, part in on_gpu]
    return found


@pytest.mark.parametrize("code", scripts())
def test_python_blocks_run(code, tmp_path):
    """Lines of the form `print(...)  # what it prints` promise their output."""
    if "torch" in code:
        pytest.importorskip("torch")
    if "_kernels" in code:
        pytest.importorskip("cupy")
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    promised = re.findall(r"^ *print\(.*\)  # (.*)$", code, flags=re.M)
    assert done.stdout.splitlines()[: len(promised)] == promised


def test_pages_have_blocks_and_promises():
    """The four pages of the ops, the torch page and README each show the functions at work."""
    for name in ("README.md", "docs/quickstart.md", "docs/torch.md", *(f"docs/{s}.md" for s in OPS)):
        code = "\n".join(blocks(name, gpu=False))
        assert re.search(r"print\(.*\)  # ", code), name


OPS = ("sinkhorn", "sparse_indices", "sparse_attention", "indexer")


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of a shell block."""
    found = []
    for name in NAMES:
        for block in re.findall(r"^```console\n(.*?)^```", text(name), flags=re.M | re.S):
            found += [(name, line[2:]) for line in block.splitlines() if line.startswith("$ ")]
        found += [(name, line) for line in re.findall(r"^    (python -m .*)$", text(name), flags=re.M)]
    return found


@pytest.mark.parametrize(("name", "command"), commands())
def test_commands_are_spelt_right(name, command, monkeypatch):
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[:3] == ["python", "-m", "dsv4cp"]:
            options = program.make_parser().parse_args(words[3:])
            assert callable(options.run)
        for word in words:
            if re.fullmatch(r"(examples|tests|docs|\.ci)/[\w./]+", word) and word not in NEEDS_BUILD:
                assert (ROOT / word).exists(), f"{name}: {word}"
        if "examples/train_tiny_v4.py" in words:
            pytest.importorskip("torch")
            monkeypatch.syspath_prepend(str(ROOT / "examples"))
            options = importlib.import_module("train_tiny_v4").read_options(words[2:])
            assert options.steps is None or options.steps > 0
        if "install" in words:
            extras = re.findall(r"\.\[([\w,]+)\]", part)
            listed = re.findall(r"^(\w+) =$", text("setup.cfg").partition("[options.extras_require]")[2], flags=re.M)
            assert [e for group in extras for e in group.split(",") if e not in listed] == []


def test_a_misspelt_option_would_be_noticed():
    with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit):
        program.make_parser().parse_args(["bench", "--recrod", "x"])


def anchors(name: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text(name), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text(name), flags=re.M | re.S)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in anchors(file.resolve().relative_to(ROOT).as_posix()), f"{name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_named_files_exist(name):
    top = "dsv4cp|kernels_cu|examples|tests|docs|\\.github|\\.ci"
    for path in re.findall(rf"`((?:{top})/[\w./-]*)`", text(name)):
        assert (ROOT / path).exists(), f"{name}: {path}"


def test_every_function_is_on_a_page():
    pages = "\n".join(p.read_text(encoding="utf-8") for p in DOCS.glob("*.md"))
    shown = set(re.findall(r"auto(?:function|class):: (?:dsv4cp\.)?(\w+)", pages))
    assert set(dsv4cp.__all__) - {"__version__"} <= shown
    torch_ops = pytest.importorskip("dsv4cp.torch_ops")
    page = text("docs/torch.md")
    assert [n for n in torch_ops.__all__ if f"autofunction:: {n}" not in page and f"`{n}`" not in page] == []


@pytest.mark.parametrize("name", OPS)
def test_every_backend_is_on_the_ops_page(name):
    module = importlib.import_module(f"dsv4cp.{name}.ops")
    own = [v for key, v in vars(module).items() if key.endswith("OFFERED") and key != "ATTENTION_OFFERED"]
    offered = {backend for value in own for backend in value}
    table = text(f"docs/{name}.md").partition("## Backends")[2]
    assert offered and offered <= set(re.findall(r"^\| `(\w+)` \|", table, flags=re.M))


def test_every_example_is_on_the_page():
    page = text("docs/examples.md")
    assert [p.name for p in (ROOT / "examples").glob("*.py") if f"`examples/{p.name}`" not in page] == []


def test_docstrings_become_restructured_text(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from docstrings import convert

    lines = """First line with x_ and a*b, `a*b` and a lone `.

        y = x_

    x: an array,
        any dtype
    repeat, eps: numbers

    Args:
        q: the queries,
            of any kind.

    backend: this one
    goes on.

    A list:
    - one
      and more
    Source: somewhere.""".splitlines()
    lines = [lines[0], *(line[4:] for line in lines[1:])]
    convert(lines)
    made = "\n".join(lines)
    assert made == r"""First line with x\_ and a\*b, ``a*b`` and a lone \`.

::

    y = x_

x
    an array,
    any dtype
repeat, eps
    numbers


**Args**

q
    the queries,
    of any kind.

backend: this one
goes on.

A list:

- one
  and more

Source: somewhere.""", made


# --- Figures -------------------------------------------------------------------------------------------------

# Rows of README's table of times by how they begin -> the record's rows that they are of: case, and words of the size.
FIGURES = {
    "Sinkhorn, 4194304": ("Sinkhorn forward", "4194304"),
    "its gradient": ("Sinkhorn backward", "4194304"),
    "Sinkhorn, 8192": ("Sinkhorn forward", "8192"),
    "index lists": ("index building", "given top-k 512: S131072 T640"),
    "a plan of them": ("planning", "S131072 T640"),
    "attention, S4096 H64 T640": ("sparse attention forward", "S4096 H64 T640"),
    "attention, S4096 H64 T160": ("sparse attention forward", "S4096 H64 T160"),
    "attention, S8192": ("sparse attention forward", "S8192 H128"),
    "attention, S4096 H16": ("sparse attention forward", "S4096 H16"),
    "attention, S65536": ("sparse attention forward", "S65536"),
    "gradient, S4096 H64 T640": ("sparse attention backward", "S4096 H64 T640"),
    "gradient, S4096 H64 T160": ("sparse attention backward", "S4096 H64 T160"),
    "gradient, S8192": ("sparse attention backward", "S8192 H128"),
    "indexer scores, S4096": ("indexer scores", "S4096 P1024"),
    "indexer scores, S32768": ("indexer scores", "S32768 P8192"),
    "scores to top-k": ("indexer top-k", "S32768"),
    "selection alone": ("indexer selection", "S32768"),
    "gradient of top-k scores": ("indexer backward", "S32768"),
    "the same, S4096": ("indexer backward", "S4096"),
}


def three_digits(number: float) -> str:
    text = f"{number:.3g}"
    return f"{number:#.3g}".rstrip(".") if "e" not in text else f"{number:.0f}"


def test_readmes_times_are_the_records():
    """Every time and share of a floor in the table is one of the record's, of the case that the row is about."""
    record = json.loads((DOCS / "records" / "h200.json").read_text())
    text = (ROOT / "README.md").read_text().partition("| case | dsv4cp | of floor | others |")[2].partition("\n\n")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    seen = set()
    for line in lines:
        name, ours, floor, others = (cell.strip() for cell in line.split("|")[1:-1])
        begins = max((start for start in FIGURES if name.startswith(start)), key=len)
        seen.add(begins)
        case, size = FIGURES[begins]
        rows = [row for row in record["rows"] if row["case"].startswith(case) and size in row["size"] and "ms" in row]
        for cell, mine in ((ours, True), (others, False)):
            known = {three_digits(row["ms"]) for row in rows if row["implementation"].startswith("dsv4cp") == mine}
            found = re.findall(r"(?<![\w.])\d+\.?\d*(?![\w.]*\d)", cell)
            assert set(found) <= known, f"{name}: {sorted(set(found) - known)} of {cell!r}, recorded {sorted(known)}"
            assert found or not cell, name
        shares = {f"{100 * row['share']:.0f}" for row in rows if "share" in row}
        assert set(re.findall(r"\d+(?= %)", floor)) <= shares, f"{name}: {floor!r}, recorded {sorted(shares)}"
    assert seen == set(FIGURES)
