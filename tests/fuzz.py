"""Random hostile calls of every function on every backend, against a float64 oracle, with canaries around all memory.

    python tests/fuzz.py --seconds N --seed K [--cases N] [--device cpu|cuda] [--op TEXT] [--backend TEXT] [--jobs N]
    python tests/fuzz.py --case LINE
    python tests/fuzz.py --replay FILE

Shapes with axes of length 0 and 1, dtypes, strides, id patterns, sinks, scales, values, plans, both backward
implementations; NaN in every row that must not be read; inputs must stay as they were. Every case is a JSON line, which
is printed when it fails (shrunk): --case runs that line again, on a CPU too when "way" is edited. On the CPU Hypothesis
draws the cases where it is installed, on a GPU a fast random driver. The oracle is tests/support/oracle64.py, which
tests/test_fuzz.py compares with tests/support/naive.py. --op and --backend keep the ops and the ways
("cupy/cuda/numba") that contain the text.

Where the GPU's context is lost, the case that raised and those in flight are printed, and a child runs the last 48
cases again: --replay FILE runs JSON lines in order, waits for the GPU after each, and prints the first that fails, or
that none does (by hand, set CUDA_LAUNCH_BLOCKING=1). compute-sanitizer, where it is on PATH, then looks at single cases
for a minute at most (tests/support/fuzz_replay.py).

Prints counts of each op and way. Exit status 0: all well; 1: a failure; 2: nothing to try; 3: a call hung.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tests.support import fuzz_replay
from tests.support.fuzz_arrays import Way
from tests.support.fuzz_jit import share_numba_kernels
from tests.support.fuzz_ops import OPS, Op, Refused, Verdict, try_case
from tests.support.fuzz_replay import dead

AT_ONCE = 16  # verdicts of a GPU looked at with one synchronisation
KEPT = 48  # cases to run again where the context is lost
HUNG = 120.0  # seconds without a finished case
MOST_FAILURES = 5
SHRINK_SECONDS = 20.0


class Session:
    """Counts, and what failed."""

    def __init__(self, pairs: list[tuple[Op, Way]], shrink: float | None = None) -> None:
        self.pairs, self.shrink = pairs, shrink
        self.done: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.failures: list[dict] = []
        self.flying: list[tuple[dict, Verdict | None]] = []  # cases whose verdict nobody has looked at
        self.ring: deque[dict] = deque(maxlen=KEPT)  # what ran last, shrinking included
        self.raised: dict | None = None  # the case whose call found the context lost
        self.beat = time.monotonic()

    def fly(self, op: Op, case: dict) -> None:
        """Queues one case; looks at verdicts now and then."""
        key = (op.name, case["way"])
        self.flying.append((case, None))
        self.ring.append(case)
        try:
            verdict = quiet(op, case)
        except Refused as reason:
            self.flying.pop()
            self.refused[key] += 1
            self.reasons[f"{case['way']}: {re.sub(r'[0-9]+', 'N', str(reason))[:110]}"] += 1
            return
        except Exception as error:
            if dead(error):
                self.raised = case  # and stays among those in flight: it may have done it
                raise
            self.flying.pop()
            self.failed(op, case, f"{type(error).__name__}: {error}")
            return
        self.done[key] += 1
        self.beat = time.monotonic()  # queued; whether it ends is seen in land()
        self.flying[-1] = (case, verdict)
        if len(self.flying) >= AT_ONCE or case["way"].split("/")[1] == "cpu":
            self.land()

    def land(self) -> None:
        """Looks at all verdicts."""
        flags = [good.reshape(()) for _, verdict in self.flying for good in verdict.good]
        on_gpu = [x for x in flags if x.is_cuda]
        fine = all(bool(x) for x in flags if not x.is_cuda) and (not on_gpu or bool(torch.stack(on_gpu).all()))
        looked_at, self.flying, self.beat = self.flying, [], time.monotonic()
        if fine:
            return
        for case, verdict in looked_at:
            if labels := verdict.failed():
                self.failed(OPS[case["op"]], case, ", ".join(labels))

    def failed(self, op: Op, case: dict, why: str) -> None:
        if len(self.failures) < MOST_FAILURES:
            print(f"FAILED {op.name} on {case['way']}: {why}", flush=True)
            try:
                small, why = shrink(op, case, self.shrink, self.ring.append)
            except Exception as error:
                if dead(error):
                    self.raised = self.ring[-1]
                raise
            print(f"  {why}\n  python tests/fuzz.py --case '{json.dumps(small)}'", flush=True)
        self.failures.append(case)


def quiet(op: Op, case: dict, detail: bool = False) -> Verdict:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        return try_case(op, case, detail)


def outcome(op: Op, case: dict) -> str | None:
    """Why a case fails, None where it does not."""
    try:
        verdict = quiet(op, case, detail=True)
    except Refused:
        return None
    except Exception as error:
        if dead(error):
            raise
        return f"{type(error).__name__}: {error}"
    labels = verdict.failed()
    return None if not labels else "; ".join(verdict.notes or labels)


def shrink(
    op: Op, case: dict, seconds: float | None = None, note: Callable[[dict], None] = lambda _: None
) -> tuple[dict, str]:
    """A simpler case that fails too, and why: each parameter is set to the simpler options before its own. `note` gets
    every case before it is tried."""
    end = time.monotonic() + (SHRINK_SECONDS if seconds is None else seconds)
    note(case)
    why = outcome(op, case)
    if why is None:
        return case, "(a second run does not fail)"
    options: dict[str, list] = {}
    op.draw(lambda name, values: options.setdefault(name, values) and case[name], Way.parse(case["way"]))
    moved = True
    while moved and time.monotonic() < end:
        moved = False
        for name, values in options.items():
            before = values.index(case[name]) if case[name] in values else 0
            for simpler in values[:before]:
                if time.monotonic() > end or simpler == case[name]:
                    continue
                trial = {**case, name: simpler}
                note(trial)
                if (again := outcome(op, trial)) is not None:
                    case, why, moved = trial, again, True
                    break
    return case, why


# --- Drivers -------------------------------------------------------------------------------------------------


def random_case(op: Op, way: Way, rng: random.Random) -> dict:
    case = {"op": op.name, "way": str(way), "seed": rng.randrange(2**31)}

    def choose(name: str, options: list):
        case[name] = rng.choice(options)
        return case[name]

    op.draw(choose, way)
    return case


def drive_random(session: Session, seed: int, cases: int, end: float) -> None:
    rng = random.Random(seed)
    turns = [pair for pair in session.pairs for _ in range(1 if pair[1].reference and pair[1].device == "cuda" else 3)]
    n = 0
    while n < cases and time.monotonic() < end and len(session.failures) < MOST_FAILURES:
        if n % len(turns) == 0:
            rng.shuffle(turns)
        op, way = turns[n % len(turns)]
        session.fly(op, random_case(op, way, rng))
        n += 1
    session.land()


def drive_hypothesis(session: Session, seed: int, cases: int, end: float) -> None:
    """Rounds of examples; Hypothesis shrinks what fails."""
    import hypothesis
    from hypothesis import strategies as st

    round_, failing = 0, []
    left = cases

    def example(data) -> None:
        index = data.draw(st.integers(0, len(session.pairs) - 1))
        op, way = session.pairs[index]
        case = {"op": op.name, "way": str(way), "seed": data.draw(st.integers(0, 2**16))}

        def choose(name: str, options: list):
            case[name] = options[data.draw(st.integers(0, len(options) - 1))]
            return case[name]

        op.draw(choose, way)
        try:
            verdict = quiet(op, case, detail=True)
        except Refused as reason:
            session.refused[op.name, str(way)] += 1
            session.reasons[f"{way}: {reason}"[:110]] += 1
            return
        except Exception as error:
            failing.append((op, case, f"{type(error).__name__}: {error}"))
            raise
        session.done[op.name, str(way)] += 1
        session.beat = time.monotonic()
        if labels := verdict.failed():
            failing.append((op, case, "; ".join(verdict.notes or labels)))
            raise AssertionError(labels[0])

    while left > 0 and time.monotonic() < end and len(session.failures) < MOST_FAILURES:
        settings = hypothesis.settings(
            max_examples=min(left, 100),
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=False,
        )
        test = hypothesis.seed(seed * 1000 + round_)(settings(hypothesis.given(st.data())(example)))
        before = sum(session.done.values()) + sum(session.refused.values())
        try:
            test()
        except Exception:
            if not failing:
                raise
            op, case, why = failing[-1]  # the smallest is tried last
            print(
                f"FAILED {op.name} on {case['way']}: {why}\n  python tests/fuzz.py --case '{json.dumps(case)}'",
                flush=True,
            )
            session.failures.append(case)
            failing.clear()
        left -= max(1, sum(session.done.values()) + sum(session.refused.values()) - before)
        round_ += 1


def watch(session: Session, over: threading.Event) -> None:
    """Ends the process when nothing has finished for a long time, naming what was running; until `over`."""
    while not over.wait(2.0):
        if time.monotonic() - session.beat > HUNG:
            print("HUNG: one of these has not come back:", flush=True)
            for case, _ in session.flying:
                print(f"  python tests/fuzz.py --case '{json.dumps(case)}'", flush=True)
            sys.stdout.flush()
            os._exit(3)


def drive(session: Session, options: argparse.Namespace) -> int:
    """All cases of this process; the exit status."""
    end = time.monotonic() + options.seconds
    over = threading.Event()
    threading.Thread(target=watch, args=(session, over), daemon=True).start()
    by_hypothesis = options.device == "cpu" and options.driver != "random"
    if by_hypothesis:
        try:
            import hypothesis  # noqa: F401
        except ImportError:
            by_hypothesis = False
    try:
        (drive_hypothesis if by_hypothesis else drive_random)(session, options.seed, options.cases, end)
    except KeyboardInterrupt:
        print("interrupted: what there is so far", flush=True)
    except Exception as error:
        if not dead(error):
            raise
        lost(session, error, over)
    finally:
        over.set()  # else it would end the process, a test's for one, long after this run
    return 1 if session.failures else 0


def lost(session: Session, error: Exception, over: threading.Event) -> None:
    """Says which case may have lost the context, and has it looked for in other processes."""
    over.set()  # nothing comes back from now on: the watch would end the search
    print(f"The GPU's context is lost: {error}. One of these did it, or one before:", flush=True)
    flying = [case for case, _ in session.flying]
    if session.raised is not None and not any(case is session.raised for case in flying):
        flying.append(session.raised)
    for case in flying:
        print(f"  {'raised here' if case is session.raised else 'in flight'}: {fuzz_replay.again(json.dumps(case))}")
    session.failures.append(session.raised or (flying or [{"lost": str(error)}])[-1])
    fuzz_replay.investigate(list(session.ring), flying[::-1])


# --- The command ---------------------------------------------------------------------------------------------


def pairs_of(device: str, op_text: str, way_text: str) -> list[tuple[Op, Way]]:
    found = []
    for name, op in OPS.items():
        if op_text in name:
            found += [(op, way) for way in op.ways(device, way_text)]
    return found


def replay(file: str) -> int:
    share_numba_kernels()
    return fuzz_replay.replay(file, lambda case: outcome(OPS[case["op"]], case))


def one_case(line: str) -> int:
    case = json.loads(line)
    op = OPS[case["op"]]
    try:
        verdict = quiet(op, case, detail=True)
        labels = verdict.failed()
    except Refused as reason:
        print(f"refused: {reason}")
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    for note in verdict.notes:
        print(note)
    print(f"FAILED: {', '.join(labels)}" if labels else f"fine: {', '.join(verdict.labels)}")
    return 1 if labels else 0


def spread(options: argparse.Namespace) -> list[dict]:
    """The summaries of --jobs processes with seeds of their own; their output passes through."""
    base = [
        sys.executable,
        __file__,
        "--seconds",
        str(options.seconds),
        "--device",
        options.device,
        "--driver",
        options.driver,
    ]
    base += [
        "--op",
        options.op,
        "--backend",
        options.backend,
        "--cases",
        str(-(-options.cases // options.jobs)),
        "--raw",
    ]
    if options.device == "cuda":  # or each process would compile every kernel that it meets first
        subprocess.run([sys.executable, str(Path(__file__).parent / "gpu" / "warm.py")], check=False)
    running = []
    threads = str(max((os.cpu_count() or 1) // options.jobs, 1))  # of a process: together they fill the machine once
    environment = {**{n: threads for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}, **os.environ}
    for n in range(options.jobs):
        arguments = [*base, "--seed", str(options.seed * 100 + n)]
        running.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment))
    summaries = []
    for process in running:
        text, _ = process.communicate()
        lines = text.splitlines()
        raw = [line for line in lines if line.startswith("RAW ")]
        print(
            "\n".join(line for line in lines if not line.startswith("RAW ")), end="\n" if len(lines) > len(raw) else ""
        )
        summaries.append(json.loads(raw[0][4:]) if raw else {"counts": [], "reasons": {}, "failures": 1})
        if process.returncode == 3:
            summaries[-1]["hung"] = True
    return summaries


def summary(session: Session) -> dict:
    keys = sorted({*session.done, *session.refused, *((op.name, str(way)) for op, way in session.pairs)})
    counts = [[*key, session.done[key], session.refused[key]] for key in keys]
    return {"counts": counts, "reasons": dict(session.reasons), "failures": len(session.failures)}


def report(summaries: list[dict], seconds: float, seed: int) -> int:
    """The table, and the exit status."""
    done: Counter = Counter()
    refused: Counter = Counter()
    reasons: Counter = Counter()
    for part in summaries:
        for op, way, n, no in part["counts"]:
            done[op, way] += n
            refused[op, way] += no
        reasons.update(part["reasons"])
    failures = sum(part["failures"] for part in summaries)
    print(f"{'op':<30}{'way':<26}{'cases':>8}{'refused':>9}")
    for op, way in sorted(done):
        print(f"{op:<30}{way:<26}{done[op, way]:>8}{refused[op, way]:>9}")
    for reason, n in reasons.most_common(20):
        print(f"  refused {n}: {reason}")
    total = sum(done.values())
    idle = [f"{op} on {way}" for (op, way), n in done.items() if n == 0 and total > 40 * len(done)]
    print(f"{total} cases, {sum(refused.values())} refused, {failures} failures, seed {seed}, {seconds:.0f} s")
    if idle:
        print("never ran: " + "; ".join(idle))
    if any(part.get("hung") for part in summaries):
        return 3
    return 1 if failures or idle else 0 if total else 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    parser.add_argument("--op", default="", help="only ops whose name contains this")
    parser.add_argument("--backend", default="", help="only ways that contain this")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--shrink", type=float, help="seconds to simplify a failing case for")
    parser.add_argument("--driver", choices=("auto", "random"), default="auto")
    parser.add_argument("--case", help="run one line again")
    parser.add_argument("--replay", metavar="FILE", help="run the JSON lines of a file in order")
    parser.add_argument("--list", action="store_true", help="ops and ways that would run")
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case:
        return one_case(options.case)
    if options.replay:
        return replay(options.replay)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    start = time.monotonic()
    if options.jobs > 1:
        return report(spread(options), time.monotonic() - start, options.seed)
    if options.device == "cpu":
        torch.set_num_threads(1)
    else:
        share_numba_kernels()
    session = Session(pairs_of(options.device, options.op, options.backend), options.shrink)
    if options.list or not session.pairs:
        print("\n".join(f"{op.name}: {way}" for op, way in session.pairs) or "nothing to try")
        return 0 if session.pairs else 2
    status = drive(session, options)
    if options.raw:
        print("RAW " + json.dumps(summary(session)), flush=True)
        return status
    return max(status, report([summary(session)], time.monotonic() - start, options.seed))


if __name__ == "__main__":
    sys.exit(main())
