"""Kernels of the fuzzer's own run on the stream that orders the memory they touch, whatever CuPy's current one is.

Shown with stand-ins for CuPy and torch's streams, which remember what was queued where.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.support import fuzz_arrays  # noqa: E402
from tests.support.fuzz_arrays import Canaries, Way  # noqa: E402


class Streams:
    """torch's and CuPy's current streams, by address; `queued` has (what, stream) in order."""

    def __init__(self) -> None:
        self.torch, self.cupy, self.queued = 0, 0, []

    def torch_stream(self, pointer: int) -> SimpleNamespace:
        return SimpleNamespace(
            cuda_stream=pointer,
            wait_stream=lambda other: self.queued.append((f"wait for {other.cuda_stream}", pointer)),
            synchronize=lambda: self.queued.append(("synchronize", pointer)),
        )

    @contextlib.contextmanager
    def cupy_stream(self, pointer: int):
        before, self.cupy = self.cupy, pointer
        yield
        self.cupy = before

    def kernel(self, *_arguments) -> None:
        self.queued.append(("kernel", self.cupy))


@pytest.fixture
def streams(monkeypatch):
    made = Streams()
    cuda = SimpleNamespace(
        get_current_stream=lambda: SimpleNamespace(ptr=made.cupy),
        ExternalStream=lambda pointer: made.cupy_stream(pointer),
    )
    cuda.Stream = type("Stream", (), {"null": property(lambda _: made.cupy_stream(0))})()
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: made.torch_stream(made.torch))
    monkeypatch.setattr(torch.cuda, "ExternalStream", made.torch_stream)
    monkeypatch.setattr(fuzz_arrays, "_raw_kernel", lambda *_: made.kernel)
    for name in ("empty", "zeros"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, device=None, **kw: real(*a, **kw))
    return made


PAIRS = [(0, 0), (7, 0), (0, 7), (7, 7), (7, 8)]


@pytest.mark.parametrize("of_torch, of_cupy", PAIRS)
def test_numbers_are_drawn_on_the_stream_of_their_tensor(streams, of_torch, of_cupy):
    streams.torch, streams.cupy = of_torch, of_cupy
    fuzz_arrays.normal(1, "x", (3,), "cuda")
    fuzz_arrays.integers(1, "x", (3,), 0, 5, "cuda")
    assert streams.queued == [("kernel", of_torch)] * 2 and streams.cupy == of_cupy


@pytest.mark.parametrize("library", ["torch", "cupy"])
@pytest.mark.parametrize("of_torch, of_cupy", PAIRS)
def test_margins_are_checked_after_the_call_and_before_their_memory_is_taken(streams, of_torch, of_cupy, library):
    streams.torch, streams.cupy = of_torch, of_cupy
    Canaries(Way(library, "cuda", "cuda"), 0xFF, [(0, 4, None)] * 2).broken()
    want = [("kernel", of_torch)] * 2
    if library == "cupy" and of_torch != of_cupy:
        want = [(f"wait for {of_cupy}", of_torch), *want, (f"wait for {of_torch}", of_cupy)]
    assert streams.queued == want and streams.cupy == of_cupy


@pytest.mark.parametrize("harm", [None, 0, -1])
def test_margins_on_the_host_are_never_given_to_a_kernel(streams, harm):
    """torch makes tensors on the host in a call on a GPU too: a kernel that read those lost the context."""
    with Canaries(Way("torch", "cuda", "tilelang"), 0xFF) as canaries:
        x = torch.empty(3, dtype=torch.float32)
    if harm is not None:
        torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())[harm] = 0
    assert bool(canaries.broken()) == (harm is not None) and streams.queued == []


def test_constants_are_there_for_every_stream(streams, monkeypatch):
    streams.torch = 7
    made = SimpleNamespace(is_cuda=True, device="cuda")
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: made)
    fuzz_arrays.constants.cache_clear()
    assert all(fuzz_arrays.constants((0.5, 1.5), torch.float64, "cuda") is made for _ in range(2))
    fuzz_arrays.constants.cache_clear()  # the stand-in is nobody's number
    assert streams.queued == [("synchronize", 7)]
