"""What this card reaches on plain work: a bf16 matrix product, a device copy, fp32 scatter-add."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .bench_gpu import Ceilings, release
from .bench_timing import timed

GEMM, COPY, ROWS, WIDTH, TABLE = 8192, 4 << 30, 1 << 22, 512, 5120
TINY = {"gemm": 512, "copy": 1 << 20, "rows": 1 << 10}


def rows(*, tiny: bool, repeats: int, say: Callable[[str], None]) -> Iterator[dict[str, Any] | Ceilings]:
    """A row for each ceiling, then the Ceilings."""
    import cupy

    say("ceilings of this card")
    of_card = {"size": "ceilings of this card"}
    n = TINY["gemm"] if tiny else GEMM
    implementation, product = gemm(cupy, n)
    ms = timed([product], repeats)
    flops = 2 * n**3 / ms
    made = {"case": f"matrix product {n}", "implementation": implementation, "ms": ms, "tflops": flops / 1e9}
    yield of_card | made
    del product
    release(cupy)

    size = TINY["copy"] if tiny else COPY
    ms = timed([copy(cupy, size)], repeats)
    moved = 2 * size / ms
    name = f"copy of {size / 2**30:.3g} GiB"
    yield of_card | {"case": name, "implementation": "cudaMemcpyAsync", "ms": ms, "gbs": moved / 1e6}
    release(cupy)

    count = TINY["rows"] if tiny else ROWS
    implementation, add = scatter(cupy, count)
    ms = timed([add], repeats)
    added = 4 * WIDTH * count / ms
    name = f"fp32 scatter-add, {count} rows of {WIDTH}"
    yield of_card | {"case": name, "implementation": implementation, "ms": ms, "gbs": added / 1e6}
    release(cupy)
    yield Ceilings(flops=flops, bytes=moved, scatter=added)


def gemm(cupy: Any, n: int) -> tuple[str, Callable[[], Any]]:
    """cuBLAS through torch in bf16, else through CuPy in fp16, which runs at the same rate."""
    try:
        import torch
    except ImportError:
        torch = None  # type: ignore[assignment]
    if torch is None or not torch.cuda.is_available():
        a, b = (cupy.random.standard_normal((n, n), dtype=cupy.float32).astype(cupy.float16) for _ in range(2))
        return "cuBLAS fp16 (CuPy)", lambda: cupy.matmul(a, b)
    p, q = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return "cuBLAS bf16 (torch)", lambda: torch.matmul(p, q)


def copy(cupy: Any, size: int) -> Callable[[], Any]:
    """One plain device-to-device copy."""
    source = cupy.random.random(size // 4, dtype=cupy.float32)
    target = cupy.empty_like(source)
    return lambda: target.data.copy_from_device_async(source.data, size)


def scatter(cupy: Any, count: int) -> tuple[str, Callable[[], Any]]:
    """Rows of fp32 added to random rows of a table that stays in L2, as in the gradient of gathered keys."""
    ids = cupy.random.randint(0, TABLE, count, dtype=cupy.int32)
    table = cupy.zeros((TABLE, WIDTH), cupy.float32)
    try:
        from .. import _numba
        from .bench_scatter import add_rows
    except Exception:  # numba-cuda raises various errors where it does not fit the installed NumPy

        values = cupy.ones((1, WIDTH), cupy.float32)
        return "CuPy add.at", lambda: cupy.add.at(table, ids, values)
    return "atomicAdd (Numba)", lambda: _numba.launch(add_rows, (min(count, 1 << 14),), (128,), ids, table)
