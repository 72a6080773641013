"""Print what is installed, the GPU, and for each op which backends would run and why the others would not."""

from __future__ import annotations

import argparse
import importlib.util

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .._backend import BACKENDS, missing
from . import machine, offers
from .tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The doctor asks for nothing."""


def run(options: argparse.Namespace) -> int:
    """Always 0: what is missing is told, not judged."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print("Installed")
    for name, version in machine.versions().items():
        console.print(f"  {name:22} {version or 'not installed'}")
    console.print("\nMachine")
    for name, value in machine.host().items():
        console.print(f"  {name:22} {value}")
    gpu = machine.gpu()
    console.print("\nGPU" if gpu else f"\nGPU: none ({missing('cuda')})")
    for name, value in (gpu or {}).items():
        console.print(f"  {name:22} {value}")
    for warning in warnings():
        console.print(f"\nWarning: {warning}")
    console.print("\nOps and backends")
    print_table(console, ops_table())
    console.print('"-": this version has no such backend for the op. "auto" takes the reference for NumPy arrays.')
    if missing("cuda") is not None:
        console.print('"auto, CuPy" is empty: CuPy arrays need a GPU, and CuPy can use none here.')
    reasons = unavailable()
    if reasons:
        console.print("\nWhat cannot run on this machine, and why")
    for name, reason in reasons:
        console.print(f"  {name:22} {reason}")
    return 0


def state(backend: str, offered: tuple[str, ...]) -> str:
    """"runs", "cannot" where this machine lacks something, "-" where this version has no such backend for the op."""
    if backend not in offered:
        return "-"
    return "runs" if missing(backend) is None else "cannot"


def ops_table() -> Table:
    """One line an op."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("op", *BACKENDS[1:], "auto, CuPy"):
        table.add_column(name, no_wrap=True)
    gpu = missing("cuda") is None
    for op, offered in offers.ops():
        taken = offers.auto(offered, "cupy") if gpu else ""
        table.add_row(op, *(state(b, offered) for b in BACKENDS[1:]), taken)
    return table


def unavailable() -> list[tuple[str, str]]:
    """(backend, why this machine cannot run it), and the torch surface."""
    found = [(name, reason) for name in BACKENDS[1:] if (reason := missing(name)) is not None]
    if importlib.util.find_spec("torch") is None:
        found.append(("dsv4cp.torch_ops", "torch is not installed; install dsv4cp[torch]"))
    return found


def warnings() -> list[str]:
    """Combinations that are known not to work."""
    found = []
    have = machine.versions()
    numpy, numba_cuda = have["numpy"], have["numba-cuda"]
    if numpy and numba_cuda and tuple(map(int, numpy.split(".")[:2])) >= (2, 5):
        pair = f"NumPy {numpy} and numba-cuda {numba_cuda}"
        try:
            from .. import _numba  # noqa: F401
        except Exception as error:  # as many kinds as numba-cuda's import has ways to fail
            found.append(
                f"{pair} clash ({type(error).__name__}: {error}): the numba backend "
                'cannot run and "auto" does without it; install "numpy<2.5" beside numba-cuda'
            )
        else:
            found.append(
                f"{pair}: numba-cuda does not support this NumPy; the numba backend lends it the name it misses "
                '(numpy.row_stack); "numpy<2.5" is the supported pair'
            )
    if have["cupy"] is not None and have["ml_dtypes"] is None:
        found.append("bfloat16 CuPy arrays need ml_dtypes; install dsv4cp[cuda13] or dsv4cp[cuda12]")
    return found
