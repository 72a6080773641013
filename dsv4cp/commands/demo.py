"""Run one V4-shaped layer with its gradient on a real text and check every stage against float64."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from .._backend import missing
from .demo_layer import RATIO, Sizes
from .demo_text import pack, read_text
from .tables import print_table

BACKENDS = ("auto", "reference", "cuda", "numba", "cudnn")
# Sizes that finish in seconds on two cores, and the real ones of V4-Flash for a GPU.
ON_HOST = {"tokens": 2048, "heads": 8, "head_dim": 64, "window": 64, "top_k": 32, "index_heads": 8, "index_dim": 32}
ON_GPU = ON_HOST | {"tokens": 4096, "heads": 64, "head_dim": 512, "window": 128, "top_k": 512}
ON_GPU |= {"index_heads": 64, "index_dim": 128}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    about = "a UTF-8 text (default: the texts behind Python's help())"
    parser.add_argument("file", nargs="?", metavar="FILE", help=about)
    for name, about in (
        ("tokens", "how many bytes of the text to take at most"),
        ("heads", "query heads"),
        ("head_dim", "channels of a head"),
        ("window", "tokens of its own document that a query sees"),
        ("top_k", "compressed entries that the indexer chooses for a query"),
        ("index_heads", "heads of the indexer"),
        ("index_dim", "channels of an index head"),
    ):
        about += f" (default {ON_HOST[name]}, on a GPU {ON_GPU[name]})"
        parser.add_argument("--" + name.replace("_", "-"), type=_positive, metavar="N", help=about)
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="what runs the ops that offer it")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="seed of the weights (default 0)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw which keys each query sees, and a Sinkhorn matrix")


def run(options: argparse.Namespace) -> int:
    """0 when every check passes, 1 when one fails, 2 when the demo cannot run."""
    try:
        on_gpu = _on_gpu(options.backend)
        sizes = _sizes(options, ON_GPU if on_gpu else ON_HOST)
        data = read_text(options.file, sizes.tokens)
        _check_plot(options.plot)
    except (RuntimeError, ValueError) as error:
        _complain(error)
        return 2
    packed = pack(data, RATIO)

    from .demo_run import Demo

    demo = Demo(packed, sizes, backend=options.backend, seed=options.seed, on_gpu=on_gpu)
    console = Console(soft_wrap=True)
    console.print(
        f"{options.file or 'the texts behind help()'}: {_count(len(packed.tokens), 'token')} (bytes) in "
        f"{_count(int(packed.segments[-1]), 'document')} (a paragraph each), "
        f"{len(packed.groups)} compressed entries; {demo.where}, seed {options.seed}",
        markup=False,
        highlight=False,
    )
    if options.file and Path(options.file).stat().st_size > len(data):
        console.print(f"only the first {len(data)} bytes are taken; --tokens N takes more", highlight=False)
    demo.run()
    print_table(console, demo.table())
    console.print("max error: relative to the largest value; for the index lists, how many differ", highlight=False)
    if options.plot:
        from .demo_plot import draw

        try:
            draw(options.plot, packed, demo.lists, demo.logits, demo.comb)
        except OSError as error:
            _complain(f"--plot: {options.plot} cannot be written: {error.strerror}")
            return 2
        console.print(f"drew {options.plot}", markup=False, highlight=False)
    failed = demo.failed()
    for line in failed:
        console.print(f"FAILED {line}", style="red", markup=False, highlight=False)
    if not failed:
        console.print(f"all {len(demo.rows)} stages agree with their float64 definitions", highlight=False)
    return 1 if failed else 0


def _complain(what: object) -> None:
    """Why the demo cannot go on, on stderr."""
    Console(stderr=True, soft_wrap=True).print(f"demo: {what}", style="red", markup=False, highlight=False)


def _count(number: int, noun: str) -> str:
    """The number and its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _positive(text: str) -> int:
    """A size from the command line."""
    return _integer(text, 1)


def _seed(text: str) -> int:
    """A seed that NumPy takes."""
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    """An integer from the command line, refused in words below `least`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text}")
    return value


def _on_gpu(backend: str) -> bool:
    """Whether arrays live on the GPU; RuntimeError when a backend asked for by name cannot run."""
    if backend == "reference":
        return False
    reason = missing("cuda" if backend == "auto" else backend)
    if reason is not None and backend != "auto":
        raise RuntimeError(f"backend {backend!r} cannot run: {reason}")
    return reason is None


def _sizes(options: argparse.Namespace, defaults: dict[str, int]) -> Sizes:
    """The sizes asked for, the rest from the defaults."""
    chosen: dict[str, Any] = {name: getattr(options, name) or value for name, value in defaults.items()}
    return Sizes(topk=chosen.pop("top_k"), **chosen)


def _check_plot(path: str | None) -> None:
    """Finds out before the work whether the picture can be drawn."""
    if path is None:
        return
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"--plot: expected a name that ends in .png, got {path}")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"--plot: there is no folder {Path(path).resolve().parent}")
    if Path(path).is_dir():
        raise ValueError(f"--plot: {path} is a folder, expected a file name")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"--plot needs matplotlib ({error}); install dsv4cp[plot]") from error
