"""Which case lost the GPU's context: the cases before it once more, in other processes, one after another.

Kernels report an illegal address at some later call, and the process in which it happened can do nothing more. So a
child with CUDA_LAUNCH_BLOCKING=1 runs the last cases in their order and waits for the GPU after each; then memcheck of
compute-sanitizer, where it is installed, runs the likely ones alone: many a wrong address is somebody's memory all the
same, and nobody notices.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

FUZZ = Path(__file__).parents[1] / "fuzz.py"
REPLAY_SECONDS, CHECK_SECONDS = 90.0, 60.0  # of the replay; of all runs of compute-sanitizer
FIRST_LINES = 12  # of what it says


def dead(error: Exception) -> bool:
    """The GPU's context is gone: no later call can work."""
    return bool(
        re.search(r"illegal (memory|address|instruction)|misaligned|cudaErrorIllegal|launch failure|ECC", str(error))
    )


def replay(file: str, outcome: Callable[[dict], str | None]) -> int:
    """Runs the JSON lines of a file in order, waiting for the GPU after each; outcome: why a case fails, or None.

    Ends at a lost context, which is printed as what fails first only where nothing failed before; other failures are
    printed as well.
    """
    lines = [line for line in Path(file).read_text().splitlines() if line.strip()]
    failed = 0
    for n, line in enumerate(lines, 1):
        case = json.loads(line)
        print(f"{n} of {len(lines)}: {case['op']} on {case['way']}", flush=True)
        lost = False
        try:
            why = outcome(case)
            if "/cuda/" in case["way"]:
                torch.cuda.synchronize()
        except Exception as error:
            why, lost = f"{type(error).__name__}: {error}".splitlines()[0], dead(error)
        if why is not None:
            rank = "fails too" if failed else "the first that fails"
            print(f"REPLAY: {rank}, case {n} of {len(lines)}: {why}\n  {again(line)}", flush=True)
            failed += 1
        if lost:
            print(f"REPLAY: the context is lost at case {n} of {len(lines)}", flush=True)
            return 1
    if not failed:
        print(f"REPLAY: none of {len(lines)} cases fails", flush=True)
    return 1 if failed else 0


def again(line: str) -> str:
    return f"python tests/fuzz.py --case '{line}'"


def investigate(ring: list[dict], suspects: list[dict]) -> None:
    """Prints what children find: the ring's cases in order, then single ones under memcheck, suspects first."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", prefix="dsv4cp-fuzz-", delete=False) as file:
        file.write("".join(json.dumps(case) + "\n" for case in ring))
    print(f"The last {len(ring)} cases: python tests/fuzz.py --replay {file.name}", flush=True)
    _, text = child([sys.executable, str(FUZZ), "--replay", file.name], REPLAY_SECONDS)
    found = [line for line in text.splitlines() if line.startswith(("REPLAY", "  python"))]
    if not any(line.startswith("REPLAY") for line in found):  # it died, or hung, without a word
        found = ["REPLAY: no answer; its last lines:", *text.splitlines()[-FIRST_LINES:]]
    print("\n".join(found), flush=True)
    blamed = re.findall(r"--case '(.*)'", "\n".join(found))
    rest = [json.dumps(case) for case in (*suspects, *reversed(ring))]
    check(list(dict.fromkeys([*reversed(blamed), *rest])))


def check(lines: list[str]) -> None:
    """Each alone under memcheck, until it says something or time is over."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        print("compute-sanitizer is not on PATH", flush=True)
        return
    end, done = time.monotonic() + CHECK_SECONDS, 0
    for line in lines:
        if (left := end - time.monotonic()) < 1.0:
            break
        # Numba asks the driver for functions that it may lack: no error.
        command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99"]
        command += [sys.executable, str(FUZZ), "--case", line]
        status, text = child(command, left, PYTORCH_NO_CUDA_MEMORY_CACHING="1")  # each input an allocation of its own
        if status is None:
            break
        done += 1
        said = [x for x in text.splitlines() if x.startswith("=========")]
        errors = [n for n, x in enumerate(said) if re.search(r"Invalid|Misaligned|error|hardware", x, re.I)]
        if status == 99 or (status != 0 and errors):
            at = errors[0] if errors else 0
            print("\n".join([f"memcheck: {again(line)}", *said[at : at + FIRST_LINES]]), flush=True)
            return
    print(f"memcheck: nothing in {done} of {len(lines)} cases, each alone", flush=True)


def child(command: list[str], seconds: float, **more: str) -> tuple[int | None, str]:
    """(exit status, None where time was over; what it said). Its own children end with it."""
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1", **more}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        text, status = running.communicate(timeout=seconds)[0], running.returncode
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # compute-sanitizer's program is a process of its own
        text, status = running.communicate()[0], None
    return status, text.decode(errors="replace")
