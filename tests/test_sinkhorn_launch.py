"""What the Sinkhorn kernels are launched with, without a GPU: which kernel, how many blocks, how much shared memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernels
from dsv4cp._kernel_notes import Address, Noting
from dsv4cp._kernel_notes import launches as played
from dsv4cp.sinkhorn import contract, cuda
from tests.support.packed import all_values

# Shared memory of a block (opt-in) and of a multiprocessor, in bytes, and multiprocessors.
DEVICES = {"sm_80": (166912, 167936, 108), "sm_86": (101376, 102400, 84), "sm_90": (232448, 233472, 132)}
FAR = 2**40  # an address


@pytest.fixture
def launches(monkeypatch):
    """What is queued, whether launched or played."""
    made = []

    def launch(kernel, *, real=_kernels.launch, **given):
        arguments = {n: v for n, v in given.items() if n not in ("grid", "block", "shared_bytes", "stream")}
        kinds = {p.name: p.kind or (Address if isinstance(given["stream"], Noting) else int) for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert type(value) is kinds[name], name
        real(kernel, **given)

    def queue(kernel, _cuda, device, sizes, blocks, values, shared_bytes, stream):
        assert device == 0 and sizes[1:3] == sizes[4:] == (1, 1)
        shape = {"grid": sizes[0], "block": sizes[3], "shared": shared_bytes, "stream": stream}
        told = dict(zip((p.name for p in kernel.parameters), all_values(blocks, values), strict=True))
        made.append(SimpleNamespace(kernel=kernel, **shape, **told))

    monkeypatch.setattr(_kernels, "launch", launch)
    monkeypatch.setattr(_kernels, "_queue", queue)
    monkeypatch.setattr(_kernels, "_cuda", lambda: SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)))
    cuda._forward4.cache_clear()
    return made


@pytest.fixture(params=DEVICES)
def limits(request, monkeypatch):
    per_block, per_multiprocessor, multiprocessors = DEVICES[request.param]
    attributes = {
        "MaxSharedMemoryPerBlockOptin": per_block,
        "MaxSharedMemoryPerMultiprocessor": per_multiprocessor,
        "MultiProcessorCount": multiprocessors,
    }
    fake = SimpleNamespace(
        cuda=SimpleNamespace(
            Device=lambda index: SimpleNamespace(attributes=attributes),
            runtime=SimpleNamespace(getDevice=lambda: 0),
        )
    )
    monkeypatch.setattr(cuda, "cupy", fake)
    cuda._backward_shape.cache_clear()
    yield per_block, per_multiprocessor, multiprocessors
    cuda._backward_shape.cache_clear()


def spec_of(count: int, m: int = 4, repeat: int = 20, dtype=np.float32) -> contract.Spec:
    x = np.broadcast_to(np.zeros((m, m), dtype), (count, m, m))
    return contract.check(x, repeat, 1e-6)


@pytest.mark.parametrize("count", [0, 1, 31, 128, 129, 4_194_304])
@pytest.mark.parametrize("m", range(1, 17))
def test_every_matrix_has_its_threads(launches, limits, m, count):
    spec = spec_of(count, m)
    cuda.launch_forward(FAR, 2 * FAR, spec, stream=7)
    cuda.launch_backward(FAR, 2 * FAR, 3 * FAR, spec)
    if count == 0:
        assert launches == []
        return
    forward, backward = launches
    assert (forward.stream, backward.stream) == (7, None)
    assert (forward.x, forward.y) == (FAR, 2 * FAR)
    assert (backward.grad_y, backward.x, backward.grad_x) == (FAR, 2 * FAR, 3 * FAR)
    lanes = 1 if m == 4 else next(w for w in (2, 4, 8, 16) if w >= m)
    for launch in (forward, backward):
        assert (launch.count, launch.repeat, launch.eps) == (count, 20, np.float32(1e-6))
        assert (launch.kernel.file == "sinkhorn.cu") == (m == 4)
        made_of = [{k: str(v) for k, v in defines.items()} for defines in cuda.VARIANTS[launch.kernel.file]]
        assert dict(launch.kernel.defines) in made_of
    assert (forward.grid - 1) * forward.block < count * lanes <= forward.grid * forward.block
    if m != 4:
        assert forward.m == backward.m == m
        assert dict(forward.kernel.defines)["WIDTH"] == str(lanes)
        assert forward.shared == forward.block // 32 * 32 * (lanes + 1) * 4


def test_a_forward_call_that_comes_again_is_played_elsewhere(launches, limits, monkeypatch):
    spec, others = spec_of(100), [spec_of(100, repeat=3), spec_of(101), spec_of(100, dtype=np.float16)]
    cuda.launch_forward(FAR, 2 * FAR, spec, stream=7)
    cuda.launch_forward(FAR, 2 * FAR, spec, stream=SimpleNamespace(ptr=8))
    monkeypatch.setattr(_kernels, "launch", None)  # nothing is checked or packed anew
    cuda.launch_forward(5 * FAR, 16, spec)
    first, second, third = launches
    assert (third.x, third.y, third.stream) == (5 * FAR, 16, None) and second.stream.ptr == 8
    for launch in (second, third):
        assert {**vars(launch), "x": FAR, "y": 2 * FAR, "stream": 7} == vars(first)
    for other in others:
        with pytest.raises(TypeError):
            cuda.launch_forward(FAR, 2 * FAR, other)


def test_a_forward_call_is_noted_as_it_is_queued(launches, limits):
    for count in (0, 100):
        launches.clear()
        note, spec = Noting(), spec_of(count)
        cuda.launch_forward(note.array(), note.array(FAR), spec, stream=note)
        assert launches == [] and len(note.steps) == (count > 0)
        _kernels.play(played(note.steps, note.arrays), [3 * FAR, FAR], 7)
        cuda.launch_forward(3 * FAR, FAR, spec, stream=7)
        assert [vars(x) for x in launches[: len(note.steps)]] == [vars(x) for x in launches[len(note.steps) :]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("repeat", [1, 2, 3, 19, 20, 21, 50, 400, 5000, 10**6])
def test_backward_fits_the_device(launches, limits, repeat, dtype):
    per_block, per_multiprocessor, multiprocessors = limits
    cuda.launch_forward(FAR, 2 * FAR, spec_of(4_194_304, repeat=repeat, dtype=dtype))
    cuda.launch_backward(FAR, 2 * FAR, 3 * FAR, spec_of(4_194_304, repeat=repeat, dtype=dtype))
    forward, launch = launches
    assert forward.repeat == launch.repeat == repeat
    warps = launch.block // 32
    assert launch.block % 32 == 0
    assert 32 <= launch.block <= 128
    assert 1 <= launch.window <= max(1, repeat - 2)
    assert launch.shared == warps * launch.window * 1024
    assert launch.shared <= per_block
    rounds = multiprocessors * cuda.ROUNDS
    resident = launch.grid // rounds
    assert launch.grid % rounds == 0
    assert resident == 1 or resident * (launch.shared + 1024) <= per_multiprocessor
    assert resident * warps <= 12


def test_repeat_20_fills_an_h100_with_12_warps_a_multiprocessor(launches, limits):
    if limits != DEVICES["sm_90"]:
        pytest.skip("about one device")
    cuda.launch_backward(FAR, 2 * FAR, 3 * FAR, spec_of(4_194_304))
    (launch,) = launches
    assert (launch.block, launch.window, launch.shared, launch.grid) == (128, 18, 4 * 18 * 1024, 24 * 132)


@pytest.mark.parametrize("off", [1, 2, 4, 8])
def test_addresses_off_16_bytes_take_the_generic_kernels(launches, limits, off):
    spec = spec_of(100)
    cuda.launch_forward(FAR + off, FAR, spec)
    cuda.launch_forward(FAR, FAR + off, spec)
    cuda.launch_backward(FAR + off, FAR, FAR, spec)
    cuda.launch_backward(FAR, FAR + off, FAR, spec)
    cuda.launch_backward(FAR, FAR, FAR + off, spec)
    assert {launch.kernel.file for launch in launches} == {"sinkhorn_generic.cu"}
    assert {dict(launch.kernel.defines)["WIDTH"] for launch in launches} == {"4"}
