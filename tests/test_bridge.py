"""dsv4cp._bridge without a GPU: hand-over of whole arrays, the device guard, operator registration."""

from __future__ import annotations

import types

import ml_dtypes
import numpy as np
import pytest
import torch

from dsv4cp import _bridge
from tests.support.compare import check_equal

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))).reshape(shape) % 7).to(dtype)


# --- torch and NumPy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 3)], ids=str)
def test_round_trip_keeps_dtype_shape_and_memory(dtype, shape):
    x = some(dtype, *shape)
    a = _bridge.to_numpy(x)
    assert a.dtype.name == str(dtype).rpartition(".")[2]
    check_equal(a, x)
    back = _bridge.to_torch(a)
    assert back.dtype == dtype and back.data_ptr() == x.data_ptr()
    check_equal(back, x)


def test_bfloat16_is_shared_not_copied():
    x = some(torch.bfloat16, 3, 4)
    a = _bridge.to_numpy(x)
    assert a.dtype == ml_dtypes.bfloat16
    a[1, 2] = 5.5
    assert x[1, 2].item() == 5.5
    b = np.ones((2, 3), ml_dtypes.bfloat16)
    y = _bridge.to_torch(b)
    y[0, 1] = -2
    assert float(b[0, 1]) == -2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_survive(dtype):
    x = some(dtype, 4, 6)
    for view in (x.T, x[::2, 1::3], x[:, :1].expand(4, 5), x[2]):
        a = _bridge.to_numpy(view)
        assert a.strides == tuple(s * a.itemsize for s in view.stride())
        check_equal(a, view)
        check_equal(_bridge.to_torch(a), view)


def test_autograd_history_stays_behind():
    x = torch.ones(3, requires_grad=True)
    a = _bridge.to_numpy(x * 2)
    assert a.tolist() == [2, 2, 2]
    assert not _bridge.to_torch(a).requires_grad
    a = _bridge.to_numpy(x.to(torch.bfloat16))
    assert a.astype(np.float32).tolist() == [1, 1, 1]


def test_lazily_negated_tensors_arrive_as_their_values():
    x = torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    assert x.is_neg()
    assert _bridge.to_numpy(x).tolist() == [-2.0, 1.0]


@pytest.mark.parametrize(
    "array, message",
    [
        (np.arange(4.0)[::-1], "flipped"),
        (np.ones((3, 4), ml_dtypes.bfloat16)[:, ::-1], "flipped"),
        (np.zeros(3, dtype=[("a", "i1"), ("b", "<f4")])["b"], "whole items"),
        (np.broadcast_to(np.ones(3), (2, 3)), "read-only"),
    ],
    ids=["flipped", "flipped bf16", "packed field", "read-only"],
)
def test_memory_that_torch_cannot_share_is_refused(array, message):
    with pytest.raises(ValueError, match=message):
        _bridge.to_torch(array)


@pytest.mark.parametrize("thing", [[1.0], 2.0, torch.ones(2), None], ids=["list", "float", "tensor", "None"])
def test_to_torch_takes_numpy_and_cupy_arrays_only(thing):
    with pytest.raises(TypeError, match="x: expected a NumPy or CuPy array"):
        _bridge.to_torch(thing)


def test_a_dtype_torch_does_not_have_is_a_type_error():
    with pytest.raises(TypeError):
        _bridge.to_torch(np.array(["a"]))


@pytest.mark.parametrize("hand_over", [_bridge.to_numpy, _bridge.to_cupy], ids=["to_numpy", "to_cupy"])
def test_tensors_without_plain_memory_are_refused(hand_over):
    if hand_over is _bridge.to_cupy:
        pytest.importorskip("cupy")
    with pytest.raises(TypeError, match="sparse_coo"):
        hand_over(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="meta device"):
        hand_over(torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="expected a torch tensor, got ndarray"):
        hand_over(np.ones(3))


def test_to_cupy_refuses_cpu_tensors():
    pytest.importorskip("cupy")
    with pytest.raises(ValueError, match="expected a CUDA tensor, got one on cpu"):
        _bridge.to_cupy(torch.ones(3))


# --- The device guard, on stand-ins for the two CUDA runtimes --------------------------------------------


class Runtimes:
    """Current devices of torch and CuPy, and every time one was set."""

    def __init__(self, monkeypatch, torch_device: int, cupy_device: int):
        self.torch, self.cupy, self.calls = torch_device, cupy_device, []
        pytest.importorskip("cupy")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.torch)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_torch)
        fake = types.SimpleNamespace(getDevice=lambda: self.cupy, setDevice=self.set_cupy)
        monkeypatch.setattr(_bridge, "_runtime", lambda: fake)
        monkeypatch.setattr(_bridge, "stream_pointer", lambda index: 1000 + index)

    def set_torch(self, device):
        self.torch = device
        self.calls.append(("torch", device))

    def set_cupy(self, device):
        self.cupy = device
        self.calls.append(("cupy", device))


def on_device(index: int):
    return types.SimpleNamespace(get_device=lambda: index)


@pytest.mark.parametrize("torch_device, cupy_device", [(0, 0), (2, 2), (0, 2), (2, 0), (1, 0)])
def test_guard_makes_the_device_current_and_puts_both_back(monkeypatch, torch_device, cupy_device):
    runtimes = Runtimes(monkeypatch, torch_device, cupy_device)
    with _bridge.on_stream_of(on_device(2)) as stream:
        assert (runtimes.torch, runtimes.cupy, stream.ptr) == (2, 2, 1002)
    assert (runtimes.torch, runtimes.cupy) == (torch_device, cupy_device)


def test_guard_sets_nothing_when_the_device_is_current(monkeypatch):
    runtimes = Runtimes(monkeypatch, 1, 1)
    with _bridge.on_stream_of(on_device(1)):
        pass
    assert runtimes.calls == []


def test_guard_restores_after_an_exception(monkeypatch):
    runtimes = Runtimes(monkeypatch, 0, 1)
    with pytest.raises(KeyError), _bridge.on_stream_of(on_device(3)):
        raise KeyError("from the launch")
    assert (runtimes.torch, runtimes.cupy) == (0, 1)


def test_streams_are_named_once(monkeypatch):
    Runtimes(monkeypatch, 0, 0)
    with _bridge.on_stream_of(on_device(0)) as first, _bridge.on_stream_of(on_device(0)) as second:
        assert first is second
    with _bridge.on_stream_of(on_device(4)) as other:
        assert other.ptr == 1004


# --- What a launch reads by pointer ----------------------------------------------------------------------


def test_contiguous_copies_only_what_is_not_row_major():
    x = torch.arange(12.0).reshape(3, 4).requires_grad_()
    assert _bridge.contiguous(x).data_ptr() == x.data_ptr()
    assert not _bridge.contiguous(x).requires_grad
    for view in (x.T, x[:, ::2], x[:1].expand(3, 4)):
        got = _bridge.contiguous(view)
        assert got.is_contiguous()
        check_equal(got, view)


def test_contiguous_starts_on_16_bytes():
    x = torch.arange(33.0)[1:]
    got = _bridge.contiguous(x)
    assert got.data_ptr() % 16 == 0
    check_equal(got, x)


# --- Operators -------------------------------------------------------------------------------------------


def test_an_operator_without_autograd_runs_and_traces():
    op = _bridge.define_op(
        "test_twice(Tensor x) -> Tensor",
        kernels={"CPU": lambda x: x * 2},
        fake=lambda x: torch.empty_like(x),
    )
    assert op(torch.ones(2)).tolist() == [2, 2]
    torch.library.opcheck(op, (torch.ones(2),))
    meta = op(torch.empty(2, 3, device="meta"))
    assert meta.shape == (2, 3) and meta.is_meta
