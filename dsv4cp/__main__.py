"""python -m dsv4cp doctor | demo | bench."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands import bench, demo, doctor


def make_parser() -> argparse.ArgumentParser:
    """The options of every command."""
    parser = argparse.ArgumentParser(prog="python -m dsv4cp", description="DeepSeek-V4 layer kernels on this machine.")
    parser.add_argument("--version", action="version", version=f"dsv4cp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="doctor | demo | bench")
    for command in (doctor, demo, bench):
        name = command.__name__.rpartition(".")[2]
        about = (command.__doc__ or "").splitlines()[0]
        of_command = commands.add_parser(name, help=about, description=about)
        command.add_arguments(of_command)
        of_command.set_defaults(run=command.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 fine, 1 a check failed, 2 it could not run, 130 Ctrl-C."""
    options = make_parser().parse_args(arguments)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print(f"{options.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
