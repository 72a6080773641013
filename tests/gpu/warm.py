"""Compiles every specialisation of every kernel for this machine's GPU into CuPy's disk cache, in many processes.

    python tests/gpu/warm.py [--jobs N] [--racecheck]

Processes that come after it load kernels in milliseconds: what test processes side by side want. --racecheck: only
Hopper's, as tests/gpu/small_run.py --racecheck wants them. Prints what did not compile; exit status 1 then.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from dsv4cp import _kernel_text, _kernels
from tests.support import fuzz_kernels

ROOT = Path(__file__).parents[2]


def variants() -> list[tuple[str, dict[str, Any]]]:
    """(file, defines) of what the slices list and of what the fuzzer launches besides, the slow ones first."""
    found = {}
    for file in sorted((ROOT / "dsv4cp").glob("*/cuda*.py")):
        module = importlib.import_module(f"dsv4cp.{file.parent.name}.{file.stem}")
        for source, all_defines in getattr(module, "VARIANTS", {}).items():
            for defines in all_defines:
                found[source, json.dumps(defines)] = (source, defines)
    found |= {(source, json.dumps(defines)): (source, defines) for source, defines in fuzz_kernels.variants()}
    return sorted(found.values(), key=lambda v: -len(_kernel_text.expand(v[0])))


def first_kernel(file: str) -> str:
    """The name of a kernel of a file: one is enough, a file is compiled as a whole."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", (ROOT / "kernels_cu" / file).read_text(encoding="utf-8"), flags=re.S)
    text = re.sub(r"__\w+__\s*\([^()]*\)", " ", text)
    return re.search(r'extern "C"\s+__global__[^;{}]*?\b(\w+)\s*\(', text)[1]


def load(file: str, defines: dict[str, Any]) -> str | None:
    """Compiles as a launch would; what went wrong, None where the file is not for this GPU or all is well."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    archs = _kernel_text.claims(file).archs
    if capability not in archs and f"{capability}a" not in archs:
        return None
    arch = f"sm_{capability}a" if f"{capability}a" in archs else None
    kernel = _kernels.kernel(file, first_kernel(file), defines=defines, arch=arch)
    try:
        _kernels._load(kernel, cupy.cuda.Device().id)
    except RuntimeError as error:
        return f"{file} {defines}: {error}"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--racecheck", action="store_true")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    start, all_variants = time.perf_counter(), variants()
    if options.racecheck:
        mode = "EVERY_LANE_ARRIVES"
        mine = [v for v in all_variants if mode in _kernel_text.expand(v[0])]
        all_variants = [(file, {**defines, mode: 1}) for file, defines in mine]
    if options.part is not None:
        wrong = [text for text in (load(*v) for v in all_variants[options.part :: options.jobs]) if text]
        print("\n".join(wrong), end="\n" if wrong else "")
        return 1 if wrong else 0
    command = [sys.executable, __file__, "--jobs", str(options.jobs), *["--racecheck"] * options.racecheck, "--part"]
    running = [subprocess.Popen([*command, str(n)]) for n in range(options.jobs)]
    status = max(process.wait() for process in running)
    print(f"{len(all_variants)} specialisations, {time.perf_counter() - start:.0f} s", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
