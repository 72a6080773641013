"""What the driver is asked for a tensor map, by a stand-in for it; attention's maps of q, grad_out and out."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

from dsv4cp import _tensor_maps
from dsv4cp.sparse_attention import cuda_sm90


@pytest.fixture
def asked(monkeypatch):
    """Calls of cuTensorMapEncodeTiled: the map's alignment and every argument. It refuses address 13."""
    calls = []

    def encode(at, dtype, rank, address, sizes, steps, box, element_steps, interleave, swizzle, promotion, fill):
        calls.append(
            (at.value % 64, dtype, rank, address.value, list(sizes), list(steps), list(box), list(element_steps),
             interleave, swizzle, promotion, fill)
        )  # fmt: skip
        ctypes.memmove(at.value, bytes(range(128)), 128)
        return int(address.value == 13)

    monkeypatch.setattr(_tensor_maps, "_encoder", lambda: encode)
    _tensor_maps._tensor_map.cache_clear()
    yield calls
    _tensor_maps._tensor_map.cache_clear()


@pytest.mark.parametrize("heads", [64, 32])
def test_attention_asks_for_boxes_of_heads_by_64_columns(asked, heads):
    words = cuda_sm90.tensor_map(2**40, (8, 50, 2), (512, 4096, 204800), "bfloat16", heads)
    sizes, steps, box = [512, 8, 50, 2], [1024, 8192, 409600], [64, heads, 1, 1]
    assert asked == [(0, 9, 4, 2**40, sizes, steps, box, [1, 1, 1, 1], 0, 3, 2, 0)]
    assert words == bytes(range(128))


def test_an_axis_of_one_element_gets_a_stride_that_the_driver_could_use(asked):
    cuda_sm90.tensor_map(0, (1, 50, 1), (7, 4096, -3), "float16")
    assert asked[0][1] == 6 and asked[0][5] == [1024, 8192, 1024]


@pytest.mark.parametrize("status", [3, 201])
def test_a_thread_without_a_context_gets_one_first(monkeypatch, status):
    happened = []

    def encode(at, *rest):
        happened.append("asked")
        ctypes.memmove(at.value, bytes(range(128)), 128)
        return 0 if "runtime" in happened else status

    monkeypatch.setattr(_tensor_maps, "_encoder", lambda: encode)
    runtime = SimpleNamespace(memGetInfo=lambda: happened.append("runtime"))
    monkeypatch.setattr(_tensor_maps, "_runtime", lambda: runtime)
    _tensor_maps._tensor_map.cache_clear()
    assert cuda_sm90.tensor_map(16, (8, 5, 2), (512, 4096, 20480), "float16") == bytes(range(128))
    assert happened == ["asked", "runtime", "asked"]
    _tensor_maps._tensor_map.cache_clear()


def test_maps_are_kept_and_refusals_are_none(asked):
    first, again = (cuda_sm90.tensor_map(16, (8, 5, 2), (512, 4096, 20480), "float16") for _ in range(2))
    assert first is again and len(asked) == 1
    assert cuda_sm90.tensor_map(13, (8, 5, 2), (512, 4096, 20480), "float16") is None
