# mypy: ignore-errors
"""The scatter-add ceiling's kernel: a block per row at a time, neighbouring threads add to neighbouring floats.

Numba's stubs describe the host side only: mypy does not read kernels.
"""

from __future__ import annotations

from numba import cuda, float32


@cuda.jit
def add_rows(ids, table):
    """table[ids[n]] += 1 for every n, fp32 atomics whose results nobody reads."""
    one = float32(1.0)
    n = cuda.blockIdx.x
    while n < ids.shape[0]:
        row = ids[n]
        column = cuda.threadIdx.x
        while column < table.shape[1]:
            cuda.atomic.add(table, (row, column), one)
            column += cuda.blockDim.x
        n += cuda.gridDim.x
