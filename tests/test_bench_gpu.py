"""The GPU benchmark's arithmetic, cases and record on a machine without a GPU; with one, a tiny run (marker gpu)."""

from __future__ import annotations

import functools
import gc
import itertools
import json

import pytest

import dsv4cp
from dsv4cp.__main__ import main
from dsv4cp.commands import bench, bench_gpu, bench_gpu_cases, bench_peers, bench_timing, machine
from dsv4cp.commands.bench_gpu import Case, Ceilings, Entry

CEILINGS = Ceilings(flops=8e11, bytes=4e9, scatter=3e9)  # per ms
ROW_KEYS = {
    "case", "size", "implementation", "ms", "median_ms", "tflops", "gbs", "floor_ms", "share", "ratio", "peer",
    "failed",
}  # fmt: skip


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


@pytest.mark.parametrize("only", ["", ",", " , "])
def test_picking_no_case_is_an_error(only, capsys):
    assert main(["bench", "--tiny", "--only", only]) == 2
    assert "--only: expected words with commas between them, got none" in capsys.readouterr().err
    assert bench_gpu.wanted_words("Host, top-k ,,") == ["host", "top-k"]


def test_cases_are_picked_on_the_gpu_alone(capsys):
    assert main(["bench", "--cpu", "--tiny", "--only", "Sinkhorn"]) == 2
    assert "--only: it picks cases of the GPU; leave --cpu out" in capsys.readouterr().err


def test_the_floor_is_the_larger_term():
    assert case(bytes=8e9, flops=8e11).floor(CEILINGS) == 2.0
    assert case(bytes=4e9, flops=8e12).floor(CEILINGS) == 10.0
    assert case(scatter=6e9).floor(CEILINGS) == 2.0
    assert case(bytes=4e9, launch_bound=True).floor(CEILINGS) is None


class Taken:
    """Stands for Timing: a turn calls everything, and the first result is the time."""

    def __init__(self, calls, repeats):
        self.calls, self.found = calls, []

    def take(self):
        self.found += [call() for call in self.calls]

    def times(self):
        return {"ms": self.found[0]}


def entry(function, sets=({"x": 1}, {"x": 2}), name="dsv4cp"):
    return Entry(name, function, list(sets))


def test_a_row_has_time_rate_and_share(monkeypatch):
    monkeypatch.setattr(bench_gpu, "prepared", Taken)
    [made] = bench_gpu.measured(case(bytes=4e9), [entry(lambda x: 2.0)], CEILINGS, 3)
    assert made == {
        "case": "op", "size": "S8", "implementation": "dsv4cp", "ms": 2.0, "gbs": 2000.0, "floor_ms": 1.0, "share": 0.5,
    }  # fmt: skip
    [made] = bench_gpu.measured(case(flops=8e11), [entry(lambda x: 2.0)], CEILINGS, 3)
    assert made["tflops"] == 400.0 and made["share"] == 0.5
    [made] = bench_gpu.measured(case(bytes=1, launch_bound=True), [entry(lambda x: 2.0)], CEILINGS, 3)
    assert made["ms"] == 2.0 and "floor_ms" not in made


def test_implementations_take_turns_with_all_their_sets(monkeypatch):
    monkeypatch.setattr(bench_gpu, "prepared", Taken)
    calls = []
    entries = [
        entry(lambda x, name=name: calls.append((name, x)) or 1.0, [{"x": 1}, {"x": 2}][:sets], name)
        for name, sets in (("us", 2), ("peer", 1))
    ]
    bench_gpu.measured(case(bytes=1), entries, CEILINGS, 3)
    us, peer = [("us", 1), ("us", 2)], [("peer", 1)]
    assert bench_timing.ROUNDS == 3 and calls[:3] == [*us, *peer] and sorted(calls) == sorted(3 * [*us, *peer])


@pytest.mark.parametrize("others, tiny", [(0, False), (2, False), (30, False), (2, True)])
def test_host_times_take_turns_together_through_the_whole_run(monkeypatch, others, tiny):
    """A few slow seconds of the machine fall on some rounds of every row, not on all rounds of one."""
    pytest.importorskip("cupy")
    monkeypatch.setattr(bench_gpu, "HostTiming", Taken)
    monkeypatch.setattr(bench_gpu, "prepared", Taken)
    monkeypatch.setattr(bench_gpu, "release", lambda _: None)
    monkeypatch.setattr("dsv4cp.commands.bench_ceilings.rows", lambda **_: iter([CEILINGS]))
    calls, said = [], []
    monkeypatch.setattr(bench_gpu_cases, "CASES", (lambda tiny: case(bytes=1.0),) * others)
    monkeypatch.setattr("dsv4cp.commands.bench_gpu_layers.cases", lambda: [])

    def host(tiny, name):
        if name == "broken":
            raise RuntimeError("no such luck")
        ours = {entry: lambda entry=entry: calls.append((name, entry)) or 2.0 for entry in ("call", "launches")}
        return Case("host time of a call", name, "host", [{}], ours, launch_bound=True, host=True)

    names = ["Sinkhorn", "planning", "scores"]
    makes = [functools.partial(host, name=name) for name in (*names, "broken")]
    monkeypatch.setattr("dsv4cp.commands.bench_host.cases", lambda: makes)
    failed, *rows = bench_gpu.rows(peers=False, tiny=tiny, repeats=1, say=said.append)
    assert (failed["case"], failed["failed"]) == ("host broken", "RuntimeError: no such luck")
    every = [(name, entry) for name in names for entry in ("call", "launches")]
    assert [row["case"] for row in rows[:others]] == ["op"] * others and len(rows) == others + len(every)
    assert [(row["size"], row["implementation"], row["ms"]) for row in rows[others:]] == [(*x, 2.0) for x in every]
    assert said[-3:] == ["host time of a call: scores", "  call: 2.0", "  launches: 2.0"]
    rounds = [calls[n : n + len(every)] for n in range(0, len(calls), len(every))]
    assert len(rounds) == (1 if tiny else max(bench_timing.HOST_ROUNDS, others))
    assert all(sorted(x) == sorted(every) for x in rounds) and (tiny or len(set(map(tuple, rounds))) > 12)


@pytest.mark.parametrize("rounds", [bench_timing.ROUNDS, bench_timing.HOST_ROUNDS])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 7, 12, 32, 41, 50])
def test_nobody_goes_after_the_same_one_twice(count, rounds):
    orders = bench_timing.orders(count, rounds)
    assert len(orders) == rounds and all(sorted(order) == list(range(count)) for order in orders)
    assert orders == bench_timing.orders(count, rounds)
    pairs = list(itertools.pairwise(n for order in orders for n in order))
    if count > (4 if rounds == bench_timing.ROUNDS else 40):
        assert len(set(pairs)) == len(pairs) and all(a != b for a, b in pairs)


def test_a_failure_is_a_row_and_an_exit_status(monkeypatch, capsys):
    def fail(x):
        raise RuntimeError("out of order")

    monkeypatch.setattr(bench_gpu, "prepared", Taken)
    made = bench_gpu.measured(case(bytes=1), [entry(fail), entry(lambda x: 1.0)], CEILINGS, 3)
    assert made[0]["failed"] == "RuntimeError: out of order" and "ms" not in made[0]
    assert made[1]["ms"] == 1.0 and "failed" not in made[1]
    monkeypatch.setattr(bench_gpu, "prepared", lambda calls, repeats: calls[0]())
    [early] = bench_gpu.measured(case(bytes=1), [entry(fail)], CEILINGS, 3)
    assert early["failed"] == "RuntimeError: out of order"
    monkeypatch.setattr(bench_gpu, "missing", lambda: None)
    monkeypatch.setattr(bench_gpu, "rows", lambda **_: iter(made))
    assert main(["bench"]) == 1
    assert "out of order" in capsys.readouterr().err


def test_a_turn_measures_batches_and_goes_on_where_the_last_ended(monkeypatch):
    pytest.importorskip("cupy")
    order = []
    monkeypatch.setattr("cupy.cuda.get_current_stream", lambda: type("S", (), {"synchronize": lambda _: None})())
    monkeypatch.setattr("cupy.cuda.get_elapsed_time", lambda begin, end: 10.0 * (1 + begin))
    monkeypatch.setattr(bench_timing, "_sample", lambda calls, first, count: order.append((first, count)) or (first, 0))
    timing = bench_timing.Timing([lambda: None], batch=2, samples=2)
    timing.take()
    timing.take()
    assert order == [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert timing.times() == {"ms": (15.0 + 25.0) / 2}  # 5, 15, 25, 35 ms a call


def test_the_hosts_time_is_by_its_own_clock_from_an_idle_gpu(monkeypatch):
    pytest.importorskip("cupy")
    clock, log = [0.0], []

    class Device:
        def synchronize(self):
            clock[0] += 100.0
            log.append("idle")

    def call():
        clock[0] += 0.001 if log.count("idle") < 3 else 0.004
        log.append("call")
        collecting.append(gc.isenabled())

    monkeypatch.setattr("cupy.cuda.Device", Device)
    monkeypatch.setattr(bench_timing.time, "perf_counter", lambda: clock[0])
    collecting = []
    timing = bench_timing.HostTiming([call], 2)
    assert log == ["call"]
    timing.samples = 3
    timing.take()
    assert collecting == [True] + [False] * (len(log) - 4) and gc.isenabled()
    batch = ["idle"] + ["call"] * timing.batch
    assert log == ["call", *batch * 3] and 20 < timing.batch < 100
    assert timing.times() == pytest.approx({"ms": 1.0, "median_ms": 1.0})  # of 1, 1 and 4
    timing.take()
    timing.take()
    assert timing.times() == pytest.approx({"ms": 1.0, "median_ms": 4.0}) and log.count("idle") == 9


def test_short_calls_have_batches_and_rounds_share_the_samples(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr("cupy.cuda.get_current_stream", lambda: type("S", (), {"synchronize": lambda _: None})())
    monkeypatch.setattr(bench_timing, "_sample", lambda calls, first, count: (0, 0))
    for call_ms, repeats, batch, samples in ((0.01, 7, 25, 47), (100.0, 7, 1, 3), (0.5, 2, 1, 14)):
        monkeypatch.setattr("cupy.cuda.get_elapsed_time", lambda begin, end, ms=call_ms: 3 * ms)
        timing = bench_timing.prepared([lambda: None], repeats)
        assert (timing.batch, timing.samples) == (batch, samples), call_ms


def test_peers_get_the_ratio_to_our_best_row(monkeypatch):
    monkeypatch.setattr(bench_gpu, "prepared", Taken)
    ours = [{"ms": 2.0}, {"ms": 3.0}, {"failed": "x"}]
    theirs = bench_gpu.measured(
        case(bytes=1), [entry(lambda x: 6.0, name="Peer 1"), entry(broken, name="Peer 2")], CEILINGS, 3
    )
    made = list(bench_gpu.compared(ours, theirs))
    assert [(r["implementation"], r["ratio"], r["peer"]) for r in made] == [("Peer 1", 3.0, True)]
    assert "does not load" in theirs[1]["failed"]
    cudnn = {"ms": 1.0, "implementation": "dsv4cp cudnn, CuPy, shared plan"}
    assert next(bench_gpu.compared([*ours, cudnn], theirs))["ratio"] == 3.0, "cuDNN is not held against itself"


def test_each_peer_has_sets_of_its_own(monkeypatch):
    def source(sets):
        for arrays in sets:
            arrays["theirs"] = "front"
        yield "FlashMLA", lambda **_: None

    monkeypatch.setattr(bench_peers.layers, "flash_mla_forward", source)
    monkeypatch.setattr(bench_peers.layers, "automodel_forward", lambda sets: iter([("AutoModel", print)]))
    given = [{"x": 1}]
    found = {name: sets for name, _, sets in bench_peers.of("attention_forward", given, print)}
    assert found == {"FlashMLA": [{"x": 1, "theirs": "front"}], "AutoModel": [{"x": 1}]} and given == [{"x": 1}]


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
    monkeypatch.setattr("dsv4cp.commands.bench_host.cases", lambda: [])
    monkeypatch.setattr(bench_gpu, "prepared", lambda calls, repeats: Taken([lambda: 1.0], repeats))
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
    assert machine.commit() == "abc123"  # in a checkout, too: it may be a copy of another commit's files
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


def test_both_gradients_of_the_indexer_get_what_a_set_holds(monkeypatch):
    import functools

    from dsv4cp.commands import bench_gpu_layers

    made = []
    fake = type("dsv4cp", (), {"dsv4_indexer_topk_scores_grad": staticmethod(lambda *a, **k: made.append((a, k)))})
    monkeypatch.setattr(bench_gpu_layers, "dsv4cp", fake)
    arrays = {n: n for n in ("q", "pooled", "weights", "ids", "grad")} | {"numbers": {"compress_ratio": 4}}
    for impl in ("atomic", "deterministic"):
        function = functools.partial(bench_gpu_layers._indexer_gradient, impl=impl)
        for call in Entry("us", function, [arrays | {"q_": 1}]).calls():
            call()
        want = ("grad", "q", "pooled", "weights", "ids"), {"backward_impl": impl, "compress_ratio": 4}
        assert made.pop() == want and not made


def test_selections_are_told_the_lengths_that_cudnn_is_told_and_not(monkeypatch):
    """Both rows of ours choose the same: what is not finished is -inf."""
    import sys
    from types import SimpleNamespace

    import numpy as np

    from dsv4cp.commands import bench_gpu_layers

    made, rng = [], np.random.default_rng(0)
    draw = SimpleNamespace(standard_normal=lambda shape, dtype: rng.standard_normal(shape, dtype))
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(arange=np.arange, inf=np.inf, float32=np.float32, random=draw)
    )
    monkeypatch.setattr(bench_gpu_layers, "with_torch", lambda sets: False)
    case = bench_gpu_layers.selecting(True, queries=4096, topk=32)
    real = dsv4cp.select_indexer_topk

    def select(scores, topk, **options):
        made.append(options)
        return real(scores, topk, **options | {"backend": "reference"})

    monkeypatch.setattr(bench_gpu_layers, "dsv4cp", SimpleNamespace(select_indexer_topk=select))
    ids = {name: [call() for call in Entry(name, f, case.sets).calls()] for name, f in case.ours.items()}
    assert list(ids) == ["dsv4cp, CuPy", "dsv4cp, CuPy, no limits"]
    assert [x["compress_ratio"] for x in made] == [4, 4, None, None] and {x["backend"] for x in made} == {"cuda"}
    for a, b in zip(*ids.values(), strict=True):
        assert a.shape == (1, 256, 32) and np.array_equal(a, b) and (a[0, -1] >= 0).all()


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
