"""Grid and block sizes of a launch: what CUDA allows, checked before the driver sees them."""

from __future__ import annotations

from typing import Any

GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
BLOCK_THREADS = 1024


def launch_sizes(function: str, grid: Any, block: Any) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(grid, block) of three sizes each, from one to three each; TypeError or ValueError naming kernel and argument."""
    grid, block = _three(function, "grid", grid, GRID_LIMITS), _three(function, "block", block, BLOCK_LIMITS)
    if not 1 <= block[0] * block[1] * block[2] <= BLOCK_THREADS:
        raise ValueError(f"{function}: block: expected 1 to {BLOCK_THREADS} threads, got {block}")
    return grid, block


def _three(function: str, name: str, sizes: Any, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    if type(sizes) is int and 0 <= sizes <= limits[0]:
        return sizes, 1, 1
    given = sizes if type(sizes) is tuple else (sizes,)
    if not 1 <= len(given) <= 3 or set(map(type, given)) != {int}:
        raise TypeError(f"{function}: {name}: expected 1 to 3 ints, got {sizes!r}")
    full = (*given, 1, 1)[:3]
    if not (0 <= full[0] <= limits[0] and 0 <= full[1] <= limits[1] and 0 <= full[2] <= limits[2]):
        raise ValueError(f"{function}: {name}: expected at most {limits}, got {sizes}")
    return full
