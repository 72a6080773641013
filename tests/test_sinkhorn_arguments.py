"""Sinkhorn normalisation and its gradient: numbers of every host type, and what each wrong argument raises."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest

from dsv4cp import dsv4_sinkhorn_normalize, dsv4_sinkhorn_normalize_grad
from tests.support.compare import check_equal

V4 = {"repeat": 20, "eps": 1e-6}


def logits(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 2, shape)


def test_numbers_of_other_types():
    """A number of any host type gives the same bits."""
    x = logits(2, 4, 4).astype(np.float32)
    want = dsv4_sinkhorn_normalize(x, repeat=20, eps=2.0**-20)
    for repeat in (np.int64(20), np.uint8(20), np.array(20)):
        for eps in (np.float64(2.0**-20), np.float32(2.0**-20), np.array(2.0**-20), np.array(2.0**-20, np.float16)):
            if float(eps) == 2.0**-20:
                check_equal(dsv4_sinkhorn_normalize(x, repeat=repeat, eps=eps), want)


X = np.zeros((2, 4, 4), np.float32)


@pytest.mark.parametrize(
    "arguments, error, named",
    [
        ({"x": [[1.0]]}, TypeError, "x"),
        ({"x": 1.0}, TypeError, "x"),
        ({"x": None}, TypeError, "x: expected an array"),
        ({"x": X.astype(np.int32)}, TypeError, "x"),
        ({"x": X.astype(bool)}, TypeError, "x"),
        ({"x": X.astype(np.complex64)}, TypeError, "x"),
        ({"x": np.ma.masked_array(X)}, TypeError, "x"),
        ({"x": X[0, 0]}, ValueError, "x"),
        ({"x": X[..., :3]}, ValueError, "x"),
        ({"x": np.float32(1)[...]}, ValueError, "x"),
        ({"x": np.zeros((3, 0, 0))}, ValueError, "x"),
        ({"repeat": 0}, ValueError, "repeat"),
        ({"repeat": -1}, ValueError, "repeat"),
        ({"repeat": 2**31}, ValueError, "repeat"),
        ({"repeat": 20.0}, TypeError, "repeat"),
        ({"repeat": True}, TypeError, "repeat"),
        ({"repeat": None}, TypeError, "repeat"),
        ({"repeat": "20"}, TypeError, "repeat"),
        ({"repeat": np.array([20])}, TypeError, "repeat"),
        ({"eps": -1e-6}, ValueError, "eps"),
        ({"eps": np.nan}, ValueError, "eps"),
        ({"eps": np.inf}, ValueError, "eps"),
        ({"eps": 1e39}, ValueError, "eps"),
        ({"eps": "1e-6"}, TypeError, "eps"),
        ({"eps": None}, TypeError, "eps"),
        ({"eps": 1j}, TypeError, "eps"),
        ({"eps": np.array([1e-6])}, TypeError, "eps"),
        ({"eps": array_api_strict.asarray(1e-6)}, TypeError, "eps"),
        ({"backend": "torch"}, ValueError, "backend"),
        ({"backend": np.zeros(2)}, ValueError, "backend: expected one of"),
        ({"backend": "Reference"}, ValueError, "backend"),
        ({"backend": "cuda"}, RuntimeError, "cuda"),
        ({"backend": "cudnn"}, RuntimeError, "cudnn"),
    ],
)
def test_bad_arguments(arguments, error, named):
    call = {"x": X, "repeat": 20, "eps": 1e-6} | arguments
    with pytest.raises(error, match=named):
        dsv4_sinkhorn_normalize(call.pop("x"), **call)
    call = {"x": X, "repeat": 20, "eps": 1e-6} | arguments
    with pytest.raises(error, match=named):
        dsv4_sinkhorn_normalize_grad(X, call.pop("x"), **call)


@pytest.mark.parametrize(
    "grad_y, error",
    [
        (X[0], ValueError),
        (X[:1], ValueError),
        (X[None], ValueError),
        (np.zeros((), np.float32), ValueError),
        (X.astype(np.int64), TypeError),
        (X.tolist(), TypeError),
        (None, TypeError),
        (1.0, TypeError),
        (array_api_strict.asarray(X), TypeError),
    ],
)
def test_bad_gradients(grad_y, error):
    with pytest.raises(error, match="grad_y"):
        dsv4_sinkhorn_normalize_grad(grad_y, X, repeat=20, eps=1e-6)


def test_reference_by_name_is_what_auto_takes():
    x = logits(2, 4, 4)
    check_equal(dsv4_sinkhorn_normalize(x, **V4, backend="reference"), dsv4_sinkhorn_normalize(x, **V4))
    got = dsv4_sinkhorn_normalize_grad(x, x, **V4, backend="reference")
    check_equal(got, dsv4_sinkhorn_normalize_grad(x, x, **V4))
