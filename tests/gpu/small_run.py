"""Every kernel of this package on tiny arrays: what tests/gpu/sanitize.sh runs under compute-sanitizer.

    python tests/gpu/small_run.py [--slice sinkhorn|sparse_indices|sparse_attention|indexer] [--list] [--racecheck]

Inputs are made on the CPU and uploaded, results are judged there by the fuzzer's oracle, and CuPy allocates without its
pool, so that nearly nothing but this package's kernels runs on the GPU and each array is an allocation of its own.
--slice: the ops of one folder alone, for runs side by side. --racecheck: kernels as that tool can follow them, in which
each lane of a warp arrives at an mbarrier for itself (common_hopper.cuh says why). Exit status 1: a wrong result, or a
kernel of kernels_cu/ or of a numba_cuda file that never ran.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import cupy
import numpy as np

from dsv4cp import _backend, _kernels
from dsv4cp.commands import offers
from tests.support.fuzz_arrays import Held, Way, numpy_of
from tests.support.fuzz_ops import OPS, Refused, Verdict

ROOT = Path(__file__).parents[2]
HOST = Way("numpy", "cpu", "auto")
SLOTS = {"B": 2, "S": 3, "K": 90, "T": 70, "ids": "random", "id dtype": "int64"}
INDEX = {"B": 2, "S": 9, "P": 70, "R": 1, "start": 3}
ran: Counter[str] = Counter()


class Upload(Way):
    """CuPy arrays made from inputs on the CPU, results back to the CPU."""

    def give(self, held: Held | None) -> Any:
        return None if held is None else cupy.asarray(numpy_of(held.view).copy(order="C"))

    def take(self, x: Any):
        return HOST.take(x.get())


def cases(name: str) -> Iterator[dict[str, Any]]:
    """Tiny cases that between them reach every kernel of an op."""
    if name.startswith("attention"):
        impls = ["atomic", "deterministic"] if "gradient" in name else [None]
        for impl in impls:
            more = {} if impl is None else {"impl": impl}
            for dim in (64, 128, 256, 512):
                for heads in (3, 20, 40):
                    yield {**SLOTS, "D": dim, "H": heads, **more}
            yield {**SLOTS, "D": 512, "H": 64, "dtype": "float16", "kv dtype": "float16", "id dtype": "int32", **more}
            yield {**SLOTS, "D": 512, "H": 65, "T": 129, **more}
        if "gradient" not in name:
            yield {**SLOTS, "D": 512, "H": 40, "rounding": True}
    elif name.startswith("index scores"):
        for heads in (64, 32, 16, 8):
            for dtype in ("bfloat16", "float16"):
                yield {**INDEX, "I": heads, "T": 40, "dtype": dtype, "w dtype": dtype}
        yield {**INDEX, "T": 128, "S": 65, "P": 129}
        if "at ids gradient" in name:
            yield {**INDEX, "I": 64, "T": 40, "impl": "deterministic"}
            yield {**INDEX, "I": 128, "E": 64, "T": 40, "impl": "deterministic"}
    elif name == "index top-k":
        for more in ({}, {"order": "score", "return scores": True}, {"documents": True}, {"P": 300, "topk": 64}):
            yield {**INDEX, "topk": 16, **more}
    elif name == "selection":
        for entries, k in ((5, 2), (300, 64), (2049, 512), (8320, 2048)):
            for order in ("id", "score"):
                yield {"leading": [2, 3], "P": entries, "topk": k, "order": order, "return scores": True}
    elif name.startswith("Sinkhorn"):
        for m in (1, 2, 3, 4, 5, 9, 16):
            for dtype in ("float32", "bfloat16", "float16"):
                yield {"M": m, "leading": [33], "repeat": 3, "dtype": dtype}
        yield {"M": 4, "leading": [33], "repeat": 50}
    elif name == "plan":
        for layout in ("cuda", "cudnn", "flat"):
            for slots in (70, 640, 2561):
                yield {"B": 2, "S": 5, "K": 129, "T": slots, "layout of plan": layout, "ids": "random"}
    elif name == "index lists":
        yield {"B": 2, "N": 40, "K": 60, "W": 8, "P": 6, "R": 4, "given": True, "k": 5, "mask": "float32"}
        yield {"B": 2, "N": 40, "K": 60, "W": 8, "P": 6, "R": 4, "documents": True, "positions": "rows", "S": 7}
        yield from ({"spans": True, "seed": n} for n in range(4))
    elif name == "extraction":
        for dtype in ("float32", "bfloat16", "float64"):
            yield {"B": 2, "S": 17, "K": 129, "T": 33, "dtype": dtype, "ids": "random"}


def paths() -> Iterator[str | None]:
    """The path that this GPU gets, then the portable one of every module that has several."""
    for path in (None, "portable"):
        for name, module in list(sys.modules.items()):  # not everything in there is a module
            if name.startswith("dsv4cp.") and hasattr(module, "forced_path"):
                module.forced_path = path
        yield path


def expected(part: str = "") -> set[str]:
    """Names of all kernels there are, or of those of one slice."""
    found = set()
    for file in sorted((ROOT / "kernels_cu").glob(f"{part}*.cu")):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", file.read_text(encoding="utf-8"), flags=re.S)
        text = re.sub(r"__\w+__\s*\([^()]*\)", " ", text)  # __launch_bounds__(128)
        found |= set(re.findall(r'extern "C"\s+__global__[^;{}]*?\b(\w+)\s*\([^;{}]*\)\s*\{', text))
    if _backend.missing("numba") is None:
        for file in sorted((ROOT / "dsv4cp").glob(f"{part or '*'}/numba_cuda*.py")):
            module = importlib.import_module(f"dsv4cp.{file.parent.name}.{file.stem}")
            for name, x in vars(module).items():
                options = getattr(x, "targetoptions", None)
                if options is not None and not options.get("device") and x.py_func.__module__ == module.__name__:
                    found.add(name)
    return found


def record() -> None:
    """Notes every launch."""
    real = _kernels._queue

    def queue(kernel, *args):
        ran[kernel.function] += 1
        return real(kernel, *args)

    _kernels._queue = queue
    if _backend.missing("numba") is None:
        from dsv4cp import _numba

        launch = _numba.launch

        def noted(kernel, *args):
            ran[kernel.py_func.__name__] += 1
            return launch(kernel, *args)

        _numba.launch = noted


def for_racecheck() -> None:
    """Hopper's kernels with EVERY_LANE_ARRIVES."""
    real = _kernels.kernel

    def kernel(file, function, *, defines=None, arch=None):
        more = {"EVERY_LANE_ARRIVES": 1} if arch else {}
        return real(file, function, defines={**(defines or {}), **more}, arch=arch)

    _kernels.kernel = kernel


def packed_ids() -> list[str]:
    """What packs ids for cuDNN, without cuDNN, where this version has it; what is wrong."""
    if importlib.util.find_spec("dsv4cp.sparse_attention.cuda_pack") is None:
        return []
    from dsv4cp.sparse_attention import contract, cuda_pack

    wrong, width = [], 128
    for wide in (False, True):
        ids = np.random.default_rng(0).integers(-9, 99, (2, 3, 70)).astype(np.int64 if wide else np.int32)
        q, kv = np.zeros((2, 3, 1, 64), np.float32), np.zeros((2, 90, 64), np.float32)
        spec = contract.check(q, kv, np.zeros(1, np.float32), ids, 1.0)
        given, flat, lengths = cupy.asarray(ids), cupy.empty((6, width), np.int32), cupy.empty(6, np.int32)
        cuda_pack.launch_pack_ids(given.data.ptr, flat.data.ptr, lengths.data.ptr, spec, width, wide=wide)
        for row, (got, n) in enumerate(zip(flat.get().tolist(), lengths.get().tolist(), strict=True)):
            want = [int(x) + row // 3 * 90 for x in ids[row // 3, row % 3] if 0 <= x < 90]
            if n != len(want) or got != want + [-1] * (width - n):
                wrong.append(f"packed ids, wide {wide}, row {row}: {got[:n]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slice", default="", choices=sorted({slice_of(op) for op in OPS.values()}))
    parser.add_argument("--racecheck", action="store_true", help="each lane arrives at mbarriers for itself")
    parser.add_argument("--list", action="store_true", help="how often each kernel ran")
    options = parser.parse_args()
    start = time.perf_counter()
    cupy.cuda.set_allocator(None)
    if options.racecheck:
        for_racecheck()
    record()
    wrong: list[str] = packed_ids() if options.slice in ("", "sparse_attention") else []
    refused: Counter[str] = Counter()
    done = 0
    offered = dict(offers.ops())
    for name, op in OPS.items():
        if options.slice not in ("", slice_of(op)):
            continue
        for backend in offered.get(op.functions["array"], ()):
            if backend in ("reference", "cudnn") or _backend.missing(backend) is not None:
                continue
            importlib.import_module(f"dsv4cp.{slice_of(op)}.{'numba_cuda' if backend == 'numba' else backend}")
            for path in paths():
                for change in cases(name):
                    way = Upload("cupy", "cuda", backend)
                    case = {"op": name, "way": str(way), **op.plain(), **change}
                    held = op.make(HOST, case)
                    try:
                        got = [None if x is None else way.take(x) for x in op.run(way, case, held)]
                    except Refused as reason:
                        refused[f"{name} on {backend}: {str(reason)[:100]}"] += 1
                        continue
                    v = Verdict(detail=True)
                    op.judge(way, case, held, got, v)
                    wrong += [f"{name} on {backend}, path {path}: {x} {change}" for x in v.notes or v.failed()]
                    done += 1
    for _ in paths():
        break
    absent = sorted(expected(options.slice) - set(ran))
    print("\n".join(wrong + [f"refused {n}: {text}" for text, n in refused.items()]))
    print(
        f"{done} calls, {len(wrong)} wrong, {sum(ran.values())} launches of {len(ran)} kernels, "
        f"{time.perf_counter() - start:.0f} s"
    )
    if absent:
        print("never ran: " + ", ".join(absent))
    if options.list:
        print("\n".join(f"{n:6d} {name}" for name, n in sorted(ran.items())))
    return 1 if wrong or absent else 0


def slice_of(op) -> str:
    """The folder whose ops.py defines the op's function."""
    import dsv4cp

    return getattr(dsv4cp, op.functions["array"]).__module__.split(".")[1]


if __name__ == "__main__":
    sys.exit(main())
