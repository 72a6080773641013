"""What a launch tells the driver."""

from __future__ import annotations


def all_values(blocks, values):
    """The values of all parameters, read from memory that `values` were packed into."""
    held = blocks.new()
    blocks.pack(held.memory, blocks.begin, *values)
    return blocks._whole.unpack(held.memory[: blocks.size])
