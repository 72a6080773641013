"""What the assembler says about compiled kernels: registers, shared memory, stack, spills."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelReport:
    """What one kernel needs, as the assembler says."""

    registers: int
    shared_bytes: int  # static
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class CompileReport:
    """One file compiled for one architecture."""

    file: str
    arch: str
    kernels: dict[str, KernelReport]
    log: str
    cubin: bytes = field(repr=False)


def kernel_reports(log: str) -> dict[str, KernelReport]:
    """The numbers of each kernel in a `ptxas -v` log."""
    reports = {}
    for part in log.split("Compiling entry function '")[1:]:

        def number(pattern: str, part: str = part) -> int:
            found = re.search(pattern, part)
            return int(found[1]) if found else 0

        reports[part[: part.index("'")]] = KernelReport(
            registers=number(r"Used (\d+) registers"),
            shared_bytes=number(r"(\d+) bytes smem"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
            spill_store_bytes=number(r"(\d+) bytes spill stores"),
            spill_load_bytes=number(r"(\d+) bytes spill loads"),
        )
    return reports
