"""Tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def print_table(console: Console, table: Table) -> None:
    """Prints a table in full: on a narrow terminal its lines wrap, but nothing in it is cut off."""
    needed = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    before = console.width
    console.width = max(before, needed)
    console.print(table)
    console.width = before
