"""The GPU benchmark's arithmetic, cases and record on a machine without a GPU; with one, a tiny run (marker gpu)."""

from __future__ import annotations

import json

import pytest

from dsv4cp.__main__ import main
from dsv4cp.commands import bench, bench_gpu, bench_gpu_cases, bench_peers, machine
from dsv4cp.commands.bench_gpu import Case, Ceilings

CEILINGS = Ceilings(flops=8e11, bytes=4e9, scatter=3e9)  # per ms
ROW_KEYS = {"case", "size", "implementation", "ms", "tflops", "gbs", "floor_ms", "share", "ratio", "peer", "failed"}


def case(**work) -> Case:
    return Case("op", "S8", "op", [{"x": 1}, {"x": 2}], {"dsv4cp, CuPy": lambda x: x}, **work)


# --- Without a GPU ---------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(bench_gpu, "missing", lambda: "no CUDA GPU is visible")
    assert main(["bench"]) == 2
    assert "no CUDA GPU is visible; --cpu measures the host" in capsys.readouterr().err
    assert main(["bench", "--peers", "--tiny"]) == 2


def test_peers_are_gpu_kernels(capsys):
    assert main(["bench", "--cpu", "--peers"]) == 2
    assert "--peers" in capsys.readouterr().err


def test_the_floor_is_the_larger_term():
    assert case(bytes=8e9, flops=8e11).floor(CEILINGS) == 2.0
    assert case(bytes=4e9, flops=8e12).floor(CEILINGS) == 10.0
    assert case(scatter=6e9).floor(CEILINGS) == 2.0
    assert case(bytes=4e9, launch_bound=True).floor(CEILINGS) is None


def test_a_row_has_time_rate_and_share(monkeypatch):
    calls = []
    monkeypatch.setattr(bench_gpu, "timed", lambda functions, repeats: [f() for f in functions] and 2.0)
    made = bench_gpu.row(case(bytes=4e9), "dsv4cp", lambda x: calls.append(x), CEILINGS, 3)
    assert calls == [1, 2]  # every input set has its turn
    assert made == {
        "case": "op", "size": "S8", "implementation": "dsv4cp", "ms": 2.0, "gbs": 2000.0, "floor_ms": 1.0, "share": 0.5,
    }  # fmt: skip
    made = bench_gpu.row(case(flops=8e11), "dsv4cp", lambda x: None, CEILINGS, 3)
    assert made["tflops"] == 400.0 and made["share"] == 0.5
    assert "floor_ms" not in bench_gpu.row(case(bytes=1, launch_bound=True), "dsv4cp", lambda x: None, CEILINGS, 3)


def test_a_failure_is_a_row_and_an_exit_status(monkeypatch, capsys):
    def fail(functions, repeats):
        raise RuntimeError("out of order")

    monkeypatch.setattr(bench_gpu, "timed", fail)
    made = bench_gpu.row(case(bytes=1), "dsv4cp, CuPy", lambda x: x, CEILINGS, 3)
    assert made["failed"] == "RuntimeError: out of order" and "ms" not in made
    monkeypatch.setattr(bench_gpu, "missing", lambda: None)
    monkeypatch.setattr(bench_gpu, "rows", lambda **_: iter([made]))
    assert main(["bench"]) == 1
    assert "out of order" in capsys.readouterr().err


def test_peers_get_the_ratio_to_our_best_row(monkeypatch):
    monkeypatch.setattr(bench_gpu, "timed", lambda functions, repeats: functions[0]())
    monkeypatch.setattr(bench_peers, "of", lambda op, sets, say: iter([("Peer 1", lambda x: 6.0), ("Peer 2", broken)]))
    said = []
    ours = [{"ms": 2.0}, {"ms": 3.0}, {"failed": "x"}]
    made = list(bench_gpu._peer_rows(case(bytes=1), ours, CEILINGS, 3, said.append))
    assert [(r["implementation"], r["ratio"], r["peer"]) for r in made] == [("Peer 1", 3.0, True)]
    assert any("Peer 2" in line and "does not load" in line for line in said)


def broken(x):
    raise ImportError("does not load")


@pytest.mark.parametrize("op", ["sinkhorn_forward", "sinkhorn_backward", "build", "extract"])
def test_a_missing_peer_is_one_line(op, monkeypatch):
    import sys

    for name in ("tile_kernels", "nemo_automodel", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # import raises, find_spec too
    said = []
    assert list(bench_peers.of(op, [{}], said.append)) == []
    assert len(said) >= 1 and all("\n" not in line and "not there" in line for line in said)


def test_an_op_without_peers_has_none():
    assert list(bench_peers.of("plan", [{}], print)) == []


def test_a_run_that_is_cut_short_leaves_its_rows(monkeypatch, tmp_path):
    def rows(**_):
        yield {"case": "op", "size": "S8", "implementation": "us", "ms": 0.02}
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "missing", lambda: None)
    monkeypatch.setattr(bench_gpu, "rows", rows)
    monkeypatch.setattr(machine, "gpu", lambda: None)
    file = tmp_path / "gpu.json"
    assert main(["bench", "--record", str(file)]) == 130
    assert [row["ms"] for row in json.loads(file.read_text())["rows"]] == [0.02]


def test_only_some_cases(monkeypatch):
    cupy = pytest.importorskip("cupy")
    made = []

    def make(name):
        def case_of(tiny):
            made.append((name, tiny))
            return Case(name, "S8", "op", [{"x": 1}], {"us": lambda x: x}, bytes=1.0)

        return case_of

    monkeypatch.setattr("dsv4cp.commands.bench_ceilings.rows", lambda **_: iter([CEILINGS]))
    monkeypatch.setattr(bench_gpu_cases, "CASES", (make("Sinkhorn forward"), make("planning")))
    monkeypatch.setattr("dsv4cp.commands.bench_gpu_layers.cases", lambda: [])
    monkeypatch.setattr(bench_gpu, "timed", lambda functions, repeats: 1.0)
    monkeypatch.setattr(bench_gpu, "release", lambda _: None)
    assert cupy is not None
    found = list(bench_gpu.rows(peers=False, tiny=False, repeats=1, say=lambda _: None, only="top-k,PLAN"))
    assert [row["case"] for row in found] == ["planning"]
    assert made == [("Sinkhorn forward", True), ("planning", True), ("planning", False)]


def test_the_record_names_machine_and_commit(monkeypatch, tmp_path, capsys):
    gpu = {"name": "NVIDIA H200", "driver": 13000}
    rows = [
        {"case": "copy", "size": "ceilings of this card", "implementation": "memcpy", "ms": 2.0, "gbs": 4250.0},
        {"case": "op", "size": "S8", "implementation": "us", "ms": 0.02, "gbs": 90.0, "floor_ms": 0.01, "share": 0.5},
        {"case": "op", "size": "S8", "implementation": "Peer", "ms": 0.2, "gbs": 9.0, "ratio": 10.0, "peer": True},
    ]
    monkeypatch.setattr(bench_gpu, "missing", lambda: None)
    monkeypatch.setattr(bench_gpu, "rows", lambda **_: iter(rows))
    monkeypatch.setattr(machine, "gpu", lambda: gpu)
    file = tmp_path / "gpu.json"
    assert main(["bench", "--peers", "--record", str(file)]) == 0
    out = capsys.readouterr().out
    assert "ceilings of this card" in out and "50%" in out and "10.00" in out and "0.0200" in out
    written = json.loads(file.read_text())
    assert written["device"] == gpu and written["driver"] == 13000
    assert written["rows"] == rows and written["versions"]["numpy"]
    assert written["commit"] == machine.commit()


def test_the_commit_comes_from_git_or_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DSV4CP_COMMIT", "abc123")
    monkeypatch.setattr("dsv4cp.__file__", str(tmp_path / "dsv4cp" / "__init__.py"))
    assert machine.commit() == "abc123"
    monkeypatch.delenv("DSV4CP_COMMIT")
    assert machine.commit() is None


def test_every_case_is_a_function_of_tiny():
    assert len(bench_gpu_cases.CASES) >= 10
    assert all(callable(make) for make in bench_gpu_cases.CASES)


def test_the_cudnn_rows_call_what_they_say(monkeypatch):
    """A shared plan, one for each call, none; on a machine without cuDNN's kernels there is no row."""
    from dsv4cp.commands import bench_cudnn

    made = []
    monkeypatch.setattr(bench_cudnn, "missing", lambda name: "no such luck")
    assert bench_cudnn.backward([{"ids": 1}], 8, 0.5, False) == {}
    monkeypatch.setattr(bench_cudnn, "missing", lambda name: None if name == "cudnn" else "?")
    plans = iter(("shared", "own", "not made"))
    fake = type("dsv4cp", (), {
        "plan_dsv4_sparse_indices": staticmethod(lambda *a, **k: made.append(("plan", a, k)) or next(plans)),
        "dsv4_sparse_attention_grad": staticmethod(lambda *a, **k: made.append((a, k))),
    })  # fmt: skip
    monkeypatch.setattr(bench_cudnn, "dsv4cp", fake)
    arrays = {n: n for n in ("q", "kv", "sinks", "ids", "grad", "out", "lse", "plan")}  # plan: that of "cuda"
    rows = bench_cudnn.backward([arrays], 8, 0.5, False)
    plan = ("plan", ("ids", 8, "cudnn"), {"all_rows_nonempty": True})
    assert made == [plan]
    for name, ids, used, calls in (
        ("shared plan", None, "shared", []), ("plan for each layer", None, "own", [plan]), ("no plan", "ids", None, []),
    ):  # fmt: skip
        made.clear()
        rows[f"dsv4cp cudnn, CuPy, {name}"](**arrays)
        options = {"backend": "cudnn", "plan": used, "all_rows_nonempty": True}
        assert made == [*calls, (("grad", "q", "kv", "sinks", ids, "out", "lse", 0.5), options)]
    assert len(rows) == 3


def test_portable_rows_run_the_portable_kernel_and_no_other_row_does():
    from types import SimpleNamespace

    from dsv4cp.commands.bench_gpu_layers import _portable

    module = SimpleNamespace(forced_path=None)
    assert _portable(lambda x: (module.forced_path, x), module)(x=1) == ("portable", 1)
    assert module.forced_path is None
    with pytest.raises(ImportError):
        _portable(broken, module)(x=1)
    assert module.forced_path is None


def test_columns_show_what_rows_say():
    row = {"case": "a", "implementation": "b", "ms": 0.25, "tflops": 500.0, "floor_ms": 0.125, "share": 0.5}
    shown = bench.table([row])
    assert [str(c.header) for c in shown.columns] == ["case", "by", "ms", "TFLOP/s", "floor ms", "of floor"]


# --- With a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_tiny_run_measures_every_case(tmp_path):
    file = tmp_path / "gpu.json"
    assert main(["bench", "--tiny", "--repeats", "2", "--record", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert all(set(row) <= ROW_KEYS and row["ms"] > 0 for row in rows)
    cases = {row["case"] for row in rows}
    assert {"Sinkhorn forward", "Sinkhorn backward", "index building", "scores at top-k ids"} <= cases
    assert {"planning, cuda layout", "planning, cudnn layout"} <= cases
    by = {(row["case"], row["implementation"]) for row in rows}
    assert {("sparse attention forward", f"dsv4cp, CuPy{x}") for x in ("", ", no plan", ", portable kernel")} <= by
    assert ("sparse attention backward", "dsv4cp, CuPy, atomic, portable kernel") in by
    assert sum(row["size"] == "ceilings of this card" for row in rows) == 3
