"""Working memory of sparse attention's gradient on the GPU, and the passes that a cap cuts the work into."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields

from . import contract
from .contract import Spec

GRAD_Q, SUMS, BOTH = 1, 2, 3  # parts of a pass
KEY_STEP = 64  # key rows that a pass covers at least
SINK_QUERIES = 64  # queries that a block sums up for the gradient of the sinks


@dataclass(frozen=True)
class Layout:
    """Working memory of one call: byte offsets of its arrays, and how much of the work a pass does."""

    log2_total: int  # float32 [B, S, H]
    delta: int  # float32 [B, S, H]
    sink_parts: int  # float32 [ceil(B S / SINK_QUERIES), H]
    key_part: int  # float32 [B, S]; this and the next three for sums of fixed order alone
    rest: int  # float32 [B, S]
    bounds: int  # uint32 [B, K, 4]
    exponents: int  # int32 [B, K]
    sums: int  # float32 or int64 [batch rows, key rows, D] of a pass
    size: int
    batch_rows: int  # of a pass
    key_rows: int  # of a pass


def layout(spec: Spec, deterministic: bool, cap: int) -> Layout:
    """The Layout of a call whose sums of fixed order take at most `cap` bytes; float32 sums are one array like kv.

    Raises ValueError where KEY_STEP key rows do not fit.
    """
    return _layout(spec.batch, spec.queries, spec.keys, spec.heads, spec.dim, deterministic, cap)


@functools.lru_cache(maxsize=1024)
def _layout(batch: int, queries: int, keys: int, heads: int, dim: int, deterministic: bool, cap: int) -> Layout:
    batch_rows, key_rows = batch, keys
    if deterministic:
        row = 8 * dim
        contract.check_workspace(cap, row * min(keys, KEY_STEP))
        batch_rows = min(batch, cap // max(row * keys, 1))
        if batch_rows == 0 and batch > 0:
            batch_rows, key_rows = 1, cap // row // KEY_STEP * KEY_STEP
    per_head, per_query, per_key = (4 * batch * n for n in (queries * heads, queries, keys))
    sink_parts = 4 * -(-batch * queries // SINK_QUERIES) * heads
    bounds = (per_query, per_query, 4 * per_key, per_key) if deterministic else (0,) * 4
    sums = (8 if deterministic else 4) * batch_rows * key_rows * dim
    sizes = [per_head, per_head, sink_parts, *bounds, sums]
    offsets, at = {}, 0
    for field, size in zip(fields(Layout), sizes, strict=False):
        offsets[field.name] = at
        at += -(-size // 256) * 256
    return Layout(**offsets, size=at, batch_rows=batch_rows, key_rows=key_rows)


def passes(spec: Spec, plan: Layout) -> Iterator[tuple[int, int, int, int, int]]:
    """(first batch row, last, first key row, last, parts) of each pass."""
    if plan.key_rows == spec.keys:
        for b in range(0, spec.batch, max(plan.batch_rows, 1)):
            yield b, min(b + plan.batch_rows, spec.batch), 0, spec.keys, BOTH
        return
    yield 0, spec.batch, 0, spec.keys, GRAD_Q
    for b in range(spec.batch):
        for key in range(0, spec.keys, plan.key_rows):
            yield b, b + 1, key, min(key + plan.key_rows, spec.keys), SUMS
