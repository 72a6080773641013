"""Sparse attention's gradient at the sizes of whole layers, run after run: faults of timing, one query in thousands,
that tolerances of a norm do not show."""

from __future__ import annotations

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("ml_dtypes")

from tests.support.attention_gpu import LAYERS, layer_inputs, relative_error  # noqa: E402
from tests.support.attention_grad_gpu import IMPLEMENTATIONS, check, cupy_grads  # noqa: E402

pytestmark = pytest.mark.gpu

SCALE = 512**-0.5


@pytest.mark.parametrize("layer", ["R4", "R128"])
def test_layers_match_the_oracle(layer):
    """S 4096: the limits on Frobenius norms, for a random grad_out of its own."""
    q, kv, sinks, ids = layer_inputs(*LAYERS[layer])
    data = layer_inputs(*LAYERS[layer], seed=1)[0], q, kv, sinks, ids
    for impl in IMPLEMENTATIONS:
        check(cupy_grads(*data, SCALE, impl), data, SCALE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layer", LAYERS)
def test_runs_have_the_same_bits(layer, dtype):
    q, kv, sinks, ids = layer_inputs(*LAYERS[layer], dtype=dtype)
    data = cupy.ascontiguousarray(q[:, ::-1]), q, kv, sinks, ids
    fixed = cupy_grads(*data, SCALE, "deterministic")
    first = cupy_grads(*data, SCALE, "atomic")
    # What differs is delta, summed in another order, and the order of float32 sums: a single wrong block of 64 slots of
    # 8 heads is 1e-3 of either gradient.
    assert relative_error(first[0], fixed[0].astype("float32")) < 2e-4
    assert relative_error(first[1], fixed[1].astype("float32")) < 5e-4
    for n in range(12):
        again = cupy_grads(*data, SCALE, "atomic")
        assert int((again[0].view("u2") != first[0].view("u2")).sum()) == 0, n
        assert int((again[2].view("u4") != first[2].view("u4")).sum()) == 0, n
        assert relative_error(again[1], first[1].astype("float32")) < 5e-4, n
        if n % 4 == 0:
            again = cupy_grads(*data, SCALE, "deterministic")
            assert all(int((a.view("u1") != b.view("u1")).sum()) == 0 for a, b in zip(again, fixed, strict=True)), n
