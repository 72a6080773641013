"""python -m dsv4cp doctor | demo | bench: what they print, check, refuse and return."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dsv4cp
from dsv4cp.__main__ import main
from dsv4cp.commands import demo_checks, demo_run, demo_text, doctor, machine, offers
from dsv4cp.commands.demo_layer import Sizes
from tests.support import naive

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--tokens", "150", "--heads", "2", "--head-dim", "16", "--window", "12", "--top-k", "6"]
SMALL += ["--index-heads", "2", "--index-dim", "8", "--backend", "reference"]
TEXT = "One short paragraph.\n\nAnd a second one, a little longer than the first.\n \nab\n\nThe end of it: \u00fcber.\n"
STAGES = [
    "hyper-connection logits",
    "Sinkhorn",
    "projections",
    "gated pooling, ratio 4",
    "indexer top-6",
    "index building",
    "plan, layout reference",
    "sparse attention",
    "index scores",
    "sparse attention gradient",
    "index score gradient",
    "Sinkhorn gradient",
    "gradient of every weight",
]


@pytest.fixture
def text_file(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


# --- demo ----------------------------------------------------------------------------------------------


def test_demo_checks_every_stage_on_the_default_text(capsys):
    assert main(["demo", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "150 tokens" in out and f"all {len(STAGES)} stages agree" in out
    assert [stage for stage in STAGES if stage not in out] == []


def test_demo_reads_a_file_and_draws(text_file, tmp_path, capsys):
    picture = tmp_path / "map.png"
    assert main(["demo", text_file, *SMALL, "--seed", "3", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "in 4 documents" in out and f"{len(TEXT.encode())} tokens" in out


@pytest.mark.parametrize("text", ["a", "abc", "abcd", "one\n\ntwo"])
def test_demo_takes_the_shortest_texts(text, tmp_path, capsys):
    path = tmp_path / "short.txt"
    path.write_text(text)
    assert main(["demo", str(path), *SMALL]) == 0, capsys.readouterr().out


def test_demo_in_half_precision(capsys):
    """What the demo does on a GPU, with NumPy in CuPy's place: the ops get bfloat16, the limits are wider."""
    packed = demo_text.pack(demo_text.read_text(None, 150), 4)
    demo = demo_run.Demo(packed, Sizes(150, 2, 16, 12, 6, 2, 8), backend="auto", seed=0, on_gpu=False)
    demo.dtype, demo.limits = "bfloat16", demo_run.LIMITS["bfloat16"]
    demo.run()
    assert demo.failed() == [] and demo.q.dtype.name == "bfloat16"
    assert max(row.error for row in demo.rows) > 1e-4, "bfloat16 must show in the errors"


@pytest.mark.gpu
def test_demo_on_the_gpu(capsys):
    assert main(["demo", "--tokens", "1024", "--top-k", "128"]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "cupy, bfloat16" in out


@pytest.mark.gpu
def test_doctor_on_the_gpu(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert machine.gpu()["name"] in out and "GPU: none" not in out


def spoiled(name, spoil):
    """The library's function with a mistake in its result."""
    right = getattr(dsv4cp, name)

    def wrong(*args, **kwargs):
        return spoil(right(*args, **kwargs))

    wrong.__module__ = right.__module__
    return wrong


def moved(ids):
    """One id of the last query changed to another of the same document or, in a list, to a key before it."""
    ids = np.array(ids)
    ids[0, -1, 0] = max(ids[0, -1, 0] - 1, 0)
    return ids


SPOILED = [
    ("dsv4_sinkhorn_normalize", lambda y: y * np.float32(1.001), "Sinkhorn:"),
    ("dsv4_sinkhorn_normalize_grad", lambda g: np.swapaxes(g, -1, -2), "Sinkhorn gradient:"),
    ("dsv4_indexer_topk", lambda ids: ids[..., ::-1], "indexer top-6:"),
    ("build_dsv4_sparse_topk_indices", moved, "index building:"),
    ("dsv4_sparse_attention", lambda r: (r[0] * np.float32(0.999), r[1]), "sparse attention:"),
    ("dsv4_sparse_attention", lambda r: (np.where(r[0] > 1e9, r[0], np.nan), r[1]), "sparse attention:"),
    ("dsv4_sparse_attention_grad", lambda r: (r[0], r[1], r[2] * np.float32(1.01)), "sparse attention gradient:"),
    ("dsv4_sparse_attention_grad", lambda r: (r[0], r[1], r[2] * np.float32(1.01)), "gradient of every weight:"),
    ("dsv4_indexer_topk_scores", lambda s: s + np.float32(0.01), "index scores:"),
    ("dsv4_indexer_topk_scores_grad", lambda r: (r[0], -r[1], r[2]), "index score gradient:"),
    ("dsv4_indexer_topk_scores_grad", lambda r: (r[0], -r[1], r[2]), "gradient of every weight:"),
]


@pytest.mark.parametrize(("name", "spoil", "stage"), SPOILED, ids=[f"{n}-{s}" for n, _, s in SPOILED])
def test_demo_notices_a_wrong_result(name, spoil, stage, text_file, monkeypatch, capsys):
    monkeypatch.setattr(dsv4cp, name, spoiled(name, spoil), raising=False)
    assert main(["demo", text_file, *SMALL]) == 1
    out = capsys.readouterr().out
    assert any(line.startswith(f"FAILED {stage}") for line in out.splitlines()), out


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n\t\n", "only white space"),
        ("zeros.bin", b"text\0more", "is binary"),
        ("picture.png", b"\x89PNG\r\n\x1a\n", "is no UTF-8 text"),
        ("cut.txt", "gr\u00fc".encode()[:-1], "is no UTF-8 text"),
    ],
)
def test_demo_refuses(name, data, words, tmp_path, capsys):
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    assert main(["demo", str(path), *SMALL]) == 2
    error = capsys.readouterr().err
    assert words in error and name in error


def test_demo_refuses_a_folder(tmp_path, capsys):
    assert main(["demo", str(tmp_path), *SMALL]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_demo_takes_a_text_cut_inside_a_character(tmp_path):
    path = tmp_path / "cut.txt"
    path.write_text("\u00fc" * 200, encoding="utf-8")
    assert len(demo_text.read_text(str(path), 151)) == 151


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "map.jpg"], ".png"),
        (["--plot", "no/such/folder/map.png"], "no folder"),
        (["--backend", "cuda"], "cannot run"),
    ],
)
def test_demo_refuses_options_that_cannot_work(arguments, words, text_file, monkeypatch, capsys):
    monkeypatch.setattr("dsv4cp.commands.demo.missing", lambda backend: "no CUDA GPU is visible")
    assert main(["demo", text_file, *SMALL, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--tokens", "0"], ["--heads", "x"], ["--seed", "-1"], ["--backend", "tpu"], ["--unknown"]]
)
def test_demo_refuses_bad_options(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_picture_or_record_that_would_replace_a_folder_is_refused(text_file, tmp_path, capsys):
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert main(["demo", text_file, *SMALL, "--plot", str(folder)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["bench", "--cpu", "--tiny", "--record", str(folder)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_demo_says_when_it_takes_a_part_of_the_text(text_file, capsys):
    assert main(["demo", text_file, *SMALL]) == 0
    assert "only the first" not in capsys.readouterr().out
    assert main(["demo", text_file, *SMALL, "--tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert "only the first 20 bytes" in out and "in 1 document " in out


@pytest.mark.parametrize("command", [["demo", *SMALL], ["doctor"]])
def test_a_narrow_terminal_cuts_no_word_of_a_table(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(command) == 0
    assert "\u2026" not in capsys.readouterr().out


def test_documents_are_paragraphs():
    packed = demo_text.pack(TEXT.encode(), 4)
    starts = np.flatnonzero(packed.positions == 0)
    assert [bytes(packed.tokens[s : s + 2].astype(np.uint8)) for s in starts] == [b"On", b"An", b"ab", b"Th"]
    assert packed.segments.tolist() == sorted(packed.segments.tolist()) and packed.segments[0] == 1
    for group, segment, place in zip(packed.groups, packed.pooled_segments, packed.pooled_positions, strict=True):
        assert set(packed.segments[group]) == {segment}
        assert packed.positions[group].tolist() == [4 * place + r for r in range(4)]


def test_the_demos_definitions_agree_with_the_oracle():
    """Two independent float64 definitions: the demo's and the test suite's."""
    rng = np.random.default_rng(5)
    q, kv, sinks = rng.standard_normal((6, 3, 4)), rng.standard_normal((9, 4)), rng.standard_normal(3)
    grad = rng.standard_normal(q.shape)
    ids = rng.integers(-2, 11, (6, 5))
    ids[2] = -1
    ids[3] = [1, 1, 1, -1, 4]
    got = demo_checks.attention(q, kv, sinks, ids, 0.5, lambda share: None, grad)
    out, _ = naive.attention(q[None], kv[None], sinks, ids[None], 0.5)
    grads = naive.attention_grad(grad[None], q[None], kv[None], sinks, ids[None], 0.5)
    for name, want in zip(("out", "q", "kv", "sinks"), (out[0], grads[0][0], grads[1][0], grads[2]), strict=True):
        assert demo_checks.error(got[name], want) < 1e-12, name

    x, g = rng.standard_normal((2, 5, 4, 4))
    assert demo_checks.error(demo_checks.sinkhorn_forward(x, 20, 1e-6), naive.sinkhorn(x, 20, 1e-6)) < 1e-13
    assert demo_checks.error(demo_checks.sinkhorn_grad(g, x, 20, 1e-6), naive.sinkhorn_grad(g, x, 20, 1e-6)) < 1e-11


def test_the_demos_error_measure_can_fail():
    want = np.array([1.0, -np.inf, np.nan])
    assert demo_checks.error(want, want) == 0
    assert demo_checks.error(np.array([1.5, -np.inf, np.nan]), want) == 0.5
    for wrong in ([1.0, 5.0, np.nan], [1.0, -np.inf, 0.0], [np.nan, -np.inf, np.nan], [1.0, np.inf, np.nan], [1.0]):
        assert demo_checks.error(np.array(wrong), want) == float("inf"), wrong


# --- doctor --------------------------------------------------------------------------------------------


def test_doctor_lists_versions_and_every_op(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for name, version in machine.versions().items():
        assert any(name in line and (version or "not installed") in line for line in out.splitlines()), name
    ops = dict(offers.ops())
    assert {"dsv4_sinkhorn_normalize", "plan_dsv4_sparse_indices", "dsv4_sparse_attention_grad"} < set(ops)
    for op in ops:
        assert any(line.split()[:2] == [op, "runs"] for line in out.splitlines()), op


def test_readme_lists_every_function_with_its_backends():
    """The table's third column is what the code offers, its fourth what "auto" takes for CuPy arrays."""
    rows = {}
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            rows[cells[0].strip("`")] = tuple(cells[2].replace("`", "").split(", ")), cells[3].strip("`")
    for op, backends in offers.ops():
        assert op in rows, f"README's table has no {op}"
        best = next((b for b in ("cuda", "numba") if b in backends), "reference")
        assert rows[op] == (backends, best), op
    without_backend = {"dense_attention_topk", "flatten_sparse_indices"}
    assert set(rows) == {op for op, _ in offers.ops()} | without_backend


def test_doctor_says_why_a_backend_cannot_run(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "missing", lambda b: None if b == "reference" else f"{b} is out of order")
    monkeypatch.setattr(offers, "ops", lambda: iter([("dsv4_op", ("reference", "cuda"))]))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "dsv4_op" in line]
    assert line.split() == ["dsv4_op", "runs", "cannot", "-", "-"]
    assert "cuda is out of order" in out and "cudnn is out of order" in out


def test_doctor_knows_the_numpy_numba_clash(monkeypatch, capsys):
    monkeypatch.setattr(machine, "versions", lambda: VERSIONS)
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "dsv4cp._numba", raising=False)  # another test may have imported it
    monkeypatch.delattr(dsv4cp, "_numba", raising=False)
    (warning,) = doctor.warnings()
    assert "NumPy 2.5.2 and numba-cuda 0.30.4 clash" in warning and "numpy<2.5" in warning


VERSIONS = {"dsv4cp": "0", "python": "3", "numpy": "2.5.2", "numba-cuda": "0.30.4", "cupy": None, "ml_dtypes": None}


def test_doctor_sees_no_clash_where_there_is_none(monkeypatch):
    monkeypatch.setattr(machine, "versions", lambda: VERSIONS | {"numpy": "2.4.6"})
    assert doctor.warnings() == []


# --- bench ---------------------------------------------------------------------------------------------


def test_bench_cpu_measures_and_records(tmp_path, capsys):
    pytest.importorskip("torch")
    record = tmp_path / "bench.json"
    assert main(["bench", "--cpu", "--tiny", "--repeats", "2", "--record", str(record)]) == 0
    out = capsys.readouterr().out
    assert "threads" in out and "sparse attention gradient" in out
    written = json.loads(record.read_text())
    assert set(written) == {"host", "device", "driver", "versions", "commit", "environment", "rows"}
    assert written["versions"] == machine.versions() and written["host"]["cores"] >= 1
    cases = [row["case"] for row in written["rows"]]
    assert cases[:4] == ["sparse attention forward"] * 2 + ["sparse attention gradient"] * 2
    assert "index building" in cases and "both, cudnn layout" in cases
    for row in written["rows"]:
        assert row["ms"] > 0
        if row["implementation"].startswith("dsv4cp"):
            assert row["peak_mib"] > 0
    for row in written["rows"][:4:2]:
        assert row["ratio"] > 0 and row["error"] < 1e-4


def test_bench_cpu_without_torch_says_so(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--cpu", "--tiny", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert "torch is not installed" in out and "plain torch" not in out


def test_bench_notices_disagreement(monkeypatch, capsys):
    pytest.importorskip("torch")
    wrong = spoiled("dsv4_sparse_attention", lambda r: (r[0] * np.float32(1.1), r[1]))
    monkeypatch.setattr(dsv4cp, "dsv4_sparse_attention", wrong, raising=False)
    assert main(["bench", "--cpu", "--tiny", "--repeats", "1"]) == 1
    assert "differs by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--cpu", "--repeats", "0"], "--repeats"), (["--cpu", "--record", "no/such/folder/x.json"], "no folder")],
)
def test_bench_refuses(arguments, words, capsys):
    assert main(["bench", "--tiny", *arguments]) == 2
    assert words in capsys.readouterr().err


# --- the module itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"], ["doctor"]])
def test_the_module_runs_as_a_program(arguments):
    command = [sys.executable, "-m", "dsv4cp", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_ctrl_c_is_a_line_and_a_status(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "doctor: interrupted\n"


def test_no_command_is_an_error():
    command = [sys.executable, "-m", "dsv4cp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and "doctor | demo | bench" in done.stderr
