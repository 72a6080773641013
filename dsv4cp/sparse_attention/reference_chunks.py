"""How the reference splits its work: chunk sizes, and buffers that NumPy reuses from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .._arrays import cast, device_of, library
from .contract import Spec

HOST_BYTES = 16 * 2**20  # what one chunk works on stays in a CPU's last-level cache
DEVICE_BYTES = 128 * 2**20  # elsewhere few large launches are faster
SERIAL_PRODUCT = 2**18  # OpenBLAS runs products of up to this many multiply-adds on the calling thread


def workspace(spec: Spec, dtype: Any) -> int:
    """Bytes that one query needs in `backward`, temporaries of the equations included."""
    item = 8 if dtype == spec.xp.float64 else 4
    per_slot = 6 * spec.dim + 12 * spec.heads + 8
    per_head = 10 * spec.dim + 16
    return item * (max(spec.slots, 1) * per_slot + spec.heads * per_head)


def query_chunks(
    spec: Spec, dtype: Any, step: int | None = None, cap: int | None = None, per_query: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """(batch row, first query, last query) of each chunk, batch rows one after another."""
    if step is None:
        budget = HOST_BYTES if spec.library == "numpy" else DEVICE_BYTES
        budget = budget if cap is None else min(budget, cap)
        step = budget // (workspace(spec, dtype) if per_query is None else max(1, 8 * per_query))
    step = max(1, step)
    for b in range(spec.batch):
        for first in range(0, spec.queries, step):
            yield b, first, min(first + step, spec.queries)


def row_chunks(spec: Spec) -> Iterator[tuple[int, int]]:
    """(first, last) of blocks of key rows that are rounded at a time."""
    step = max(1, 2**20 // (8 * max(spec.dim, 1)))
    for first in range(0, spec.keys, step):
        yield first, min(first + step, spec.keys)


def row_major(xp: Any, x: Any, dtype: Any) -> Any:
    """x in the given dtype and in row-major order: products of other layouts add in another order."""
    if library(x) in ("numpy", "cupy"):
        return xp.ascontiguousarray(x, dtype=dtype)
    x = cast(xp, x, dtype)
    return x.contiguous() if library(x) == "torch" else x


def product(xp: Any, a: Any, b: Any, out: Any = None) -> Any:
    """a @ b for stacks of matrices [N, M, L] and [N, L, J].

    NumPy hands each matrix to BLAS by itself, and at these sizes waking BLAS threads for each costs more than
    it saves, many times more on a busy machine. The longer side of the result is therefore taken in blocks
    that stay on one thread, where such blocks are not too thin. The blocks depend on M, L and J alone.
    """
    if library(a) != "numpy":
        return xp.matmul(a, b)
    n, m, inner = a.shape
    columns = b.shape[2]
    if out is None:
        out = np.empty((n, m, columns), a.dtype)
    if m > columns:
        product(xp, b.swapaxes(1, 2), a.swapaxes(1, 2), out.swapaxes(1, 2))
        return out
    block = SERIAL_PRODUCT // max(m * inner, 1) // 16 * 16
    if block < 32 or block >= columns:
        return np.matmul(a, b, out=out)
    even = columns // block * block
    split = (columns // block, block)  # splitting an axis makes views, of `out` too
    blocks = out[:, :, :even].reshape(n, m, *split).swapaxes(1, 2)
    np.matmul(a[:, None], b[:, :, :even].reshape(n, inner, *split).swapaxes(1, 2), out=blocks)
    np.matmul(a, b[:, :, even:], out=out[:, :, even:])
    return out


class Scratch:
    """The two [N, T, D] arrays of a chunk. NumPy writes each chunk into the same memory, which stays in cache."""

    def __init__(self, spec: Spec, dtype: Any) -> None:
        self.spec, self.dtype = spec, dtype
        self._buffers: dict[tuple[str, Any], Any] = {}

    def gather(self, kv: Any, ids: Any) -> tuple[Any, Any]:
        """(rows [N, T, D] with zeros for masked slots, valid [N, T]); T is at least 1."""
        xp, spec = self.spec.xp, self.spec
        if spec.slots == 0:
            ids = xp.full((ids.shape[0], 1), -1, dtype=ids.dtype, device=spec.device)
        valid = (ids >= 0) & (ids < spec.keys)
        kv = at_least_one_row(xp, kv)
        if library(kv) == "numpy":
            return self._gather_numpy(kv, ids, valid), valid
        return gather(xp, kv, ids, valid, self.dtype), valid

    def grad_rows(self, a: Any, x: Any) -> Any:
        """A^T X as [N*T, D] from A [N, 2H, T] and X [N, 2H, D]."""
        xp = self.spec.xp
        numpy = library(a) == "numpy"
        out = self._buffer("grad_rows", (a.shape[0], a.shape[2], x.shape[2]), a.dtype) if numpy else None
        return xp.reshape(product(xp, xp.matrix_transpose(a), x, out), (a.shape[0] * a.shape[2], x.shape[2]))

    def _gather_numpy(self, kv: Any, ids: Any, valid: Any) -> Any:
        shape = (*ids.shape, kv.shape[1])
        if not kv.flags.c_contiguous:  # np.take would copy all of kv first
            taken = kv[np.where(valid, ids, 0)]
        else:
            taken = np.take(kv, ids, axis=0, out=self._buffer("taken", shape, kv.dtype), mode="clip")
        if kv.dtype != self.dtype:
            rows = self._buffer("rows", shape, self.dtype)
            rows[...] = taken
        else:
            rows = taken
        rows[~valid] = 0
        return rows

    def _buffer(self, role: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory for `role`, as large as the first chunk, the largest, needed it."""
        size = int(np.prod(shape))
        whole = self._buffers.get((role, dtype))
        if whole is None or whole.size < size:
            whole = self._buffers[role, dtype] = np.empty(size, dtype)
        return whole[:size].reshape(shape)


def gather(xp: Any, kv: Any, ids: Any, valid: Any, dtype: Any) -> Any:
    """kv[ids] [N, T, D] from kv [K, D]; zeros where not valid."""
    safe = xp.reshape(xp.where(valid, ids, 0), (-1,))
    rows = xp.reshape(xp.take(kv, safe, axis=0), (*ids.shape, kv.shape[1]))
    return xp.where(valid[:, :, None], cast(xp, rows, dtype), 0.0)


def at_least_one_row(xp: Any, kv: Any) -> Any:
    """kv, or for K = 0 one row of zeros that masked slots can point at."""
    if kv.shape[0] > 0:
        return kv
    return xp.concat([kv, xp.zeros((1, kv.shape[1]), dtype=kv.dtype, device=device_of(kv))], axis=0)
