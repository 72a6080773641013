"""How the reference walks over [B, S, slots]: in blocks whose temporaries stay small."""

from __future__ import annotations

from collections.abc import Iterator

from .contract import PlanSpec, Spec

# Slots per block: a block's temporaries stay in a CPU's cache, or fill a GPU at one launch per step.
HOST_BLOCK, DEVICE_BLOCK = 2**16, 2**24


def blocks(spec: Spec | PlanSpec, batch: int, queries: int, slots: int) -> Iterator[tuple[slice, slice]]:
    """(rows, queries) slices that cover [batch, queries] with a bounded number of slots each."""
    on_host = spec.library != "cupy" and getattr(spec.device, "type", "cpu") == "cpu"
    room = max(1, (HOST_BLOCK if on_host else DEVICE_BLOCK) // max(slots, 1))
    at_once = min(queries, room)
    together = max(1, room // max(queries, 1))
    for b in range(0, batch, together):
        for s in range(0, queries, max(at_once, 1)):
            yield slice(b, min(b + together, batch)), slice(s, min(s + at_once, queries))
