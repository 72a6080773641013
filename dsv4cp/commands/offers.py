"""Which functions there are and which backends this version offers for each, read from the slices' ops.py."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .._backend import missing

SLICES = ("sinkhorn", "sparse_indices", "sparse_attention", "indexer")


def ops() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every public function that takes a backend, with the backends offered for it."""
    for name in SLICES:
        module = importlib.import_module(f"dsv4cp.{name}.ops")
        for function, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__ and not function.startswith("_")
            if own and "backend" in inspect.signature(value).parameters:
                yield function, offered(module, value)


def offered(module: ModuleType, function: Callable[..., Any]) -> tuple[str, ...]:
    """OFFERED where the function reads it, else the function's own constant, named *_OFFERED."""
    read = [name for name in inspect.unwrap(function).__code__.co_names if name.endswith("OFFERED")]
    return getattr(module, "OFFERED" if "OFFERED" in read or not read else read[0])


def auto(backends: tuple[str, ...], library: str) -> str:
    """What "auto" takes for arrays of a library on this machine."""
    if library == "cupy":
        return next((name for name in ("cuda", "numba") if name in backends and missing(name) is None), "reference")
    return "reference"
