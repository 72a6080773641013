"""A lost context: the case that raised is named, and the cases before it run again. Without a GPU: a planted error."""

from __future__ import annotations

import json
import os
import stat
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from tests import fuzz  # noqa: E402
from tests.support import fuzz_replay  # noqa: E402
from tests.support.fuzz_ops import OPS  # noqa: E402

LOST = "CUDA error: an illegal memory access was encountered"
CPU = ("--device", "cpu", "--driver", "random", "--op", "plan", "--backend", "numpy", "--seconds", "30")


def plan_case(seed: int) -> dict:
    return {"op": "plan", "way": "numpy/cpu/auto", **OPS["plan"].plain(), "seed": seed}


def planted(monkeypatch, at: int, *, raised: list) -> None:
    """The n-th call of this process finds the context lost."""
    real, calls = fuzz.try_case, []

    def try_case(op, case, detail=False):
        calls.append(case)
        if len(calls) == at:
            raised.append(case)
            raise RuntimeError(LOST)
        return real(op, case, detail)

    monkeypatch.setattr(fuzz, "try_case", try_case)


@pytest.fixture
def children(monkeypatch):
    """What would be run in other processes, and what they answer."""
    made = {"commands": [], "answers": []}

    def child(command, seconds, **more):
        made["commands"].append(command)
        if "--replay" in command:
            made["lines"] = open(command[-1]).read().splitlines()
            os.unlink(command[-1])
        return made["answers"].pop(0) if made["answers"] else (0, "REPLAY: none of 3 cases fails\n")

    monkeypatch.setattr(fuzz_replay, "child", child)
    monkeypatch.setattr(fuzz_replay.shutil, "which", lambda _: None)
    return made


def test_the_case_that_raised_is_listed_and_the_last_cases_run_again(capsys, monkeypatch, children):
    raised: list[dict] = []
    planted(monkeypatch, 60, raised=raised)
    assert fuzz.main([*CPU, "--cases", "100"]) == 1
    text = capsys.readouterr().out
    assert f"raised here: python tests/fuzz.py --case '{json.dumps(raised[0])}'" in text
    assert "REPLAY: none of 3 cases fails" in text
    lines = children["lines"]
    assert len(lines) == fuzz.KEPT == 48 and lines[-1] == json.dumps(raised[0])
    assert "--replay" in children["commands"][0]


def test_a_context_lost_while_a_case_is_shrunk_is_looked_for_too(capsys, monkeypatch, children):
    """The first run of a case differs, a simpler one of its kind loses the context."""
    raised: list[dict] = []
    planted(monkeypatch, 2, raised=raised)
    monkeypatch.setattr(fuzz.Verdict, "failed", lambda _: ["ids"])
    op = OPS["plan"]
    session = fuzz.Session([(op, fuzz.Way.parse("numpy/cpu/auto"))])
    with pytest.raises(RuntimeError, match="illegal"):
        session.failed(op, {**plan_case(5), "S": 33, "K": 64}, "ids")
    assert session.ring[-1] == session.raised == raised[0]
    fuzz.lost(session, RuntimeError(LOST), threading.Event())
    assert f"raised here: {fuzz_replay.again(json.dumps(raised[0]))}" in capsys.readouterr().out
    assert json.loads(children["lines"][-1]) == raised[0] and len(children["lines"]) == 2


def test_memcheck_looks_at_what_the_replay_blames_first(capsys, monkeypatch, children):
    monkeypatch.setattr(fuzz_replay.shutil, "which", lambda _: "/bin/compute-sanitizer")
    blamed, suspect, other = (json.dumps(plan_case(n)) for n in (1, 2, 3))
    said = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 4 bytes\n=========     at f+0x10\n"
    children["answers"] += [
        (1, f"1 of 3: plan\nREPLAY: the first that fails, case 1 of 3: lost\n  {fuzz_replay.again(blamed)}\n"),
        (0, "fine\n"),
        (99, said),
    ]
    fuzz_replay.investigate([json.loads(x) for x in (blamed, other)], [json.loads(suspect)])
    text = capsys.readouterr().out
    assert [command[-1] for command in children["commands"][1:]] == [blamed, suspect]
    assert f"memcheck: {fuzz_replay.again(suspect)}\n========= Invalid __global__ read" in text


def lines_of(tmp_path, cases: list[dict]) -> str:
    file = tmp_path / "cases.jsonl"
    file.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return str(file)


def test_a_file_of_cases_runs_again(capsys, tmp_path):
    assert fuzz.main(["--replay", lines_of(tmp_path, [plan_case(n) for n in range(3)])]) == 0
    assert "REPLAY: none of 3 cases fails" in capsys.readouterr().out


def test_a_replay_names_the_first_case_that_fails_and_ends_at_a_lost_context(capsys, monkeypatch, tmp_path):
    cases = [plan_case(n) for n in range(4)]
    answers = {1: ValueError("wrong"), 2: RuntimeError(LOST)}

    def try_case(op, case, detail=False, real=fuzz.try_case):
        if error := answers.get(case["seed"]):
            raise error
        return real(op, case, detail)

    monkeypatch.setattr(fuzz, "try_case", try_case)
    assert fuzz.main(["--replay", lines_of(tmp_path, cases)]) == 1
    text = capsys.readouterr().out
    assert f"the first that fails, case 2 of 4: ValueError: wrong\n  {fuzz_replay.again(json.dumps(cases[1]))}" in text
    assert "the context is lost at case 3 of 4" in text and "4 of 4" not in text


def test_children_launch_one_kernel_at_a_time_and_end_in_time(tmp_path):
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "blocking $CUDA_LAUNCH_BLOCKING"\nsleep $1\n')  # sleep is a child of its own
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert fuzz_replay.child([str(program), "0"], 10.0) == (0, "blocking 1\n")
    start = time.monotonic()
    assert fuzz_replay.child([str(program), "30"], 0.5) == (None, "blocking 1\n") and time.monotonic() - start < 20
