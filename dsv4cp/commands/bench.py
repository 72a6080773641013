"""Measure the ops on this machine; --record writes the rows with what they were measured on, --plot draws them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import machine
from .tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's options."""
    parser.add_argument("--cpu", action="store_true", help="the host: NumPy beside a plain torch reference")
    parser.add_argument("--peers", action="store_true", help="on the GPU, time installed peers of each op as well")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--only", metavar="WORDS", help="on the GPU, cases whose name has one of these words (comma)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="timed calls a row (default 7)")
    parser.add_argument("--record", metavar="FILE.json", help="write device, driver, versions, commit and all rows")
    parser.add_argument("--plot", metavar="FILE.png", help="draw times, floors and peers (.png, .svg or .pdf)")
    parser.add_argument("--from", dest="recorded", metavar="FILE.json", help="draw this record, measure nothing")


def run(options: argparse.Namespace) -> int:
    """0 when everything was measured, 1 when results disagree or a call failed, 2 when it cannot run."""
    error = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, style="red")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if options.repeats < 1:
        error.print(f"bench: --repeats: expected an integer of at least 1, got {options.repeats}")
        return 2
    if options.only is not None and not options.only.strip(" ,"):
        error.print("bench: --only: expected words with commas between them, got none")
        return 2
    if options.record and not Path(options.record).resolve().parent.is_dir():
        error.print(f"bench: --record: there is no folder {Path(options.record).resolve().parent}")
        return 2
    if options.record and Path(options.record).is_dir():
        error.print(f"bench: --record: {options.record} is a folder, expected a file name")
        return 2
    from . import bench_plot

    try:
        if options.recorded and not options.plot:
            raise ValueError("--from draws a record: say where to with --plot FILE.png")
        if options.plot:
            bench_plot.check(options.plot)
    except (RuntimeError, ValueError) as problem:
        error.print(f"bench: --plot: {problem}")
        return 2
    try:
        found = bench_plot.read_record(options.recorded) if options.recorded else None
    except ValueError as problem:
        error.print(f"bench: --from: {problem}")
        return 2
    if found is not None:
        return _draw(options.plot, found, console, error)
    if options.cpu and options.peers:
        error.print("bench: --peers: peers are GPU kernels; leave --cpu out")
        return 2
    if options.cpu and options.only:
        error.print("bench: --only: it picks cases of the GPU; leave --cpu out")
        return 2
    if options.cpu:
        from . import bench_cpu

        for line in bench_cpu.about():
            console.print(line)
        measured = bench_cpu.rows(tiny=options.tiny, repeats=options.repeats, say=_say)
    else:
        from . import bench_gpu

        reason = bench_gpu.missing()
        if reason is not None:
            error.print(f"bench: nothing to measure on: {reason}; --cpu measures the host")
            return 2
        measured = bench_gpu.rows(
            peers=options.peers, tiny=options.tiny, repeats=options.repeats, say=_say, only=options.only or ""
        )
    rows: list[dict[str, Any]] = []
    about = record(rows) if options.record or options.plot else {}
    for row in measured:
        rows.append(row)
        if options.record:  # after every row: a run that is cut short leaves what it has measured
            Path(options.record).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    for size in dict.fromkeys(row["size"] for row in rows):
        console.print(f"\n{size}")
        print_table(console, table([row for row in rows if row["size"] == size]))
    if options.record:
        console.print(f"wrote {options.record}")
    if options.plot and (drawn := _draw(options.plot, about, console, error)):
        return drawn
    wrong = [row for row in rows if row.get("error", 0.0) > row.get("error_limit", float("inf"))]
    for row in wrong:
        error.print(f"{row['case']}: differs by {row['error']:.2g}, at most {row['error_limit']:g}")
    failed = [row for row in rows if "failed" in row]
    for row in failed:
        error.print(f"{row['case']}, {row['size']}, {row['implementation']}: {row['failed']}")
    return 1 if wrong or failed else 0


def _draw(path: str, found: dict[str, Any], console: Console, error: Console) -> int:
    """The picture of a record; 0, or 2 when it cannot be drawn."""
    from . import bench_plot

    try:
        bench_plot.draw(path, found)
    except (OSError, ValueError) as reason:
        error.print(f"bench: --plot: {path}: {reason}")
        return 2
    console.print(f"drew {path}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _milliseconds(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.3f}" if ms >= 0.1 else f"{ms:.4f}"


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a row of the same size; a column only where some row has something to say."""
    columns: dict[str, tuple[str, Callable[[Any], str]]] = {
        "case": ("case", str),
        "implementation": ("by", str),
        "ms": ("ms", _milliseconds),
        "tflops": ("TFLOP/s", "{:.1f}".format),
        "gbs": ("GB/s", "{:.0f}".format),
        "floor_ms": ("floor ms", _milliseconds),
        "share": ("of floor", "{:.0%}".format),
        "peak_mib": ("peak MiB", "{:.0f}".format),
        "ratio": ("speed-up", "{:.2f}".format),
        "error": ("differs", "{:.1e}".format),
    }
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    used = [key for key in columns if any(key in row for row in rows)]
    for key in used:
        words = key in ("case", "implementation")
        shown.add_column(columns[key][0], justify="left" if words else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(columns[key][1](row[key]) if key in row else "" for key in used))
    return shown


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything that someone needs to judge the numbers later."""
    gpu = machine.gpu()
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "MKL_NUM_THREADS")
    return {
        "host": machine.host(),
        "device": gpu,
        "driver": gpu and gpu["driver"],
        "versions": machine.versions(),
        "commit": machine.commit(),
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "rows": rows,
    }
