"""One call of every op on every backend of a GPU, at a size of several blocks: what the stream, thread, graph,
determinism and memory tests run. Ops, ways and oracle are the fuzzer's; a new backend is in by being offered."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from .fuzz_arrays import Held, Way
from .fuzz_ops import OPS, Op, Refused, Verdict

SIZES: dict[str, dict[str, Any]] = {
    "attention": {"B": 2, "S": 33, "H": 64, "K": 300, "T": 192, "ids": "random", "id dtype": "int64"},
    "attention gradient": {"B": 2, "S": 33, "H": 64, "K": 300, "T": 192, "ids": "random", "id dtype": "int64"},
    "dense attention": {"B": 2, "S": 5, "H": 4, "K": 40, "T": 30, "D": 64},
    "index scores": {"B": 2, "S": 65, "P": 129, "R": 1, "start": 7},
    "index scores gradient": {"B": 2, "S": 65, "P": 129, "R": 1, "start": 7},
    "index scores at ids": {"B": 2, "S": 65, "P": 129, "T": 128},
    "index scores at ids gradient": {"B": 2, "S": 65, "P": 129, "T": 128},
    "index top-k": {"B": 2, "S": 65, "P": 257, "R": 1, "start": 7, "topk": 64},
    "selection": {"leading": [2, 5], "P": 2049, "topk": 64},
    "extraction": {"B": 2, "S": 300, "K": 129, "T": 64},
    "Sinkhorn": {"leading": [200], "repeat": 20},
    "Sinkhorn gradient": {"leading": [200], "repeat": 20},
    "plan": {"B": 2, "S": 65, "K": 129, "T": 640},
    "index lists": {"B": 2, "N": 600, "K": 700, "W": 128, "P": 100, "R": 4, "k": 70, "given": True},
}
MORE: dict[str, list[dict[str, Any]]] = {  # a second case of an op
    "attention gradient": [{"impl": "deterministic"}],
    "index scores at ids gradient": [{"impl": "deterministic"}],
    "selection": [{"R": 1, "start": 999, "unseen": "NaN"}],
    "Sinkhorn": [{"M": 9, "leading": [33]}],
    "Sinkhorn gradient": [{"M": 9, "leading": [33]}],
    "plan": [{"layout of plan": "cudnn", "promise": True}],
}


@dataclass
class Job:
    """One call: held inputs, results as torch tensors, a verdict by the oracle."""

    op: Op
    way: Way
    case: dict[str, Any]
    held: dict[str, Held | None]

    def __str__(self) -> str:
        return f"{self.op.name} on {self.way}" + (f", {self.case['impl']}" if "impl" in self.case else "")

    def run(self) -> list[torch.Tensor]:
        results = self.op.run(self.way, self.case, self.held)
        return [self.way.take(x) for x in results if x is not None]

    def call(self) -> list[Any]:
        """The results as the library's arrays: nothing else is queued."""
        return self.op.run(self.way, self.case, self.held)

    def poison(self) -> None:
        for h in self.held.values():
            h.memory.fill_(0xFF)

    def refill(self) -> None:
        for h in self.held.values():
            h.memory.copy_(h.kept)

    def renew(self, seed: int) -> None:
        """Other numbers in the same memory."""
        fresh = self.op.make(self.way, {**self.case, "seed": seed})
        for name, h in fresh.items():
            self.held[name].memory.copy_(h.memory)
            self.held[name].kept.copy_(h.memory)
        if "out" in self.held:
            self.op.save(self.way, self.case, self.held)

    def wrong(self, got: list[torch.Tensor]) -> list[str]:
        """What the oracle says against the results; waits."""
        v = Verdict(detail=True)
        whole = got + [None] * (3 - len(got)) if self.op.name == "plan" else got
        self.op.judge(self.way, self.case, self.held, list(whole), v)
        return [f"{self}: {x}" for x in (v.notes or v.failed())]

    @property
    def by_kernels(self) -> bool:
        """By this package's kernels, asked for by name: they can be captured, never wait, repeat what they promise."""
        return not self.way.reference and self.way.backend not in ("auto", "cudnn")

    @property
    def repeats(self) -> bool:
        """Whether the same bits are promised every time: atomic sums over shared rows promise none."""
        scatters = self.op.name in ("attention gradient", "index scores at ids gradient")
        return self.by_kernels and (not scatters or self.case["impl"] == "deterministic")

    @contextlib.contextmanager
    def on(self, stream: torch.cuda.Stream):
        """The stream is current for torch and, where the way is CuPy's, for CuPy."""
        with torch.cuda.stream(stream), contextlib.ExitStack() as stack:
            if self.way.library == "cupy":
                import cupy

                stack.enter_context(cupy.cuda.ExternalStream(stream.cuda_stream))
            yield


def jobs(name: str, *, kernels: bool = False) -> list[Job]:
    """Every way of an op that runs on this GPU; kernels: without the references and "auto"."""
    op, found = OPS[name], []
    for way in op.ways("cuda"):
        for more in [{}, *MORE.get(name, [])]:
            case = {"op": name, "way": str(way), **op.plain(), **SIZES[name], **more}
            job = Job(op, way, case, op.make(way, case))
            if kernels and not job.by_kernels:
                continue
            try:
                job.run()
            except Refused:
                continue
            found.append(job)
    torch.cuda.synchronize()
    return found


def current() -> tuple:
    """Devices and streams that are current for torch and CuPy."""
    import cupy

    return (
        torch.cuda.current_device(),
        torch.cuda.current_stream().cuda_stream,
        cupy.cuda.runtime.getDevice(),
        cupy.cuda.get_current_stream().ptr,
        cupy.cuda.get_allocator(),
    )


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Whether two sets of results are the same, NaN included; waits."""
    views = [
        (x.contiguous().view(torch.uint8) == y.contiguous().view(torch.uint8)).all()
        for x, y in zip(a, b, strict=True)
        if x.numel()
    ]
    return bool(torch.stack(views).all()) if views else True
