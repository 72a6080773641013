"""What sparse attention refuses, with messages that name the argument, what was expected and what came."""

from __future__ import annotations

import numpy as np
import pytest

import dsv4cp
from dsv4cp import dense_attention_topk, dsv4_sparse_attention, dsv4_sparse_attention_grad
from dsv4cp.sparse_attention import contract, torch_bridge
from tests.support.attention_ways import NUMPY, Way, inputs

SCALE = 0.25
NAMES = ("q", "kv", "sinks", "topk_idxs", "sm_scale")

WRONG = [
    ("q", lambda x: x[0], ValueError, r"q: expected shape \[B, S, H, D\], got \[5, 3, 16\]"),
    ("q", lambda x: x.astype(np.int32), TypeError, "q: expected dtype .*float32.*, got int32"),
    ("q", lambda x: x.astype(np.complex64), TypeError, "q: expected dtype"),
    ("q", lambda x: x.tolist(), TypeError, "q: expected an array, got list"),
    ("q", lambda x: None, TypeError, "q: expected an array, got NoneType"),
    ("q", lambda x: np.ma.array(x), TypeError, "q: expected a plain array"),
    ("kv", lambda x: x[:1], ValueError, r"kv: expected shape \[B=2, K, D=16\], got \[1, 9, 16\]"),
    ("kv", lambda x: x[..., 1:], ValueError, "kv: expected shape"),
    ("kv", lambda x: x[:, :, None], ValueError, "kv: expected shape"),
    ("kv", lambda x: x.astype(bool), TypeError, "kv: expected dtype"),
    ("sinks", lambda x: x[1:], ValueError, r"sinks: expected shape \[H=3\], got \[2\]"),
    ("sinks", lambda x: x.astype(np.int64), TypeError, "sinks: expected dtype"),
    ("sinks", lambda x: None, TypeError, "sinks"),
    ("topk_idxs", lambda x: x[:, 1:], ValueError, r"topk_idxs: expected shape \[B=2, S=5, T\], got \[2, 4, 7\]"),
    ("topk_idxs", lambda x: x.astype(np.float32), TypeError, "topk_idxs: expected dtype int32 or int64, got float32"),
    ("topk_idxs", lambda x: x.astype(np.uint64), TypeError, "topk_idxs: expected dtype"),
    ("topk_idxs", lambda x: x >= 0, TypeError, "topk_idxs: expected dtype"),
    ("topk_idxs", lambda x: None, TypeError, "topk_idxs"),
    ("sm_scale", lambda x: "0.25", TypeError, "sm_scale: expected a real number"),
    ("sm_scale", lambda x: None, TypeError, "sm_scale"),
    ("sm_scale", lambda x: True, TypeError, "sm_scale"),
    ("sm_scale", lambda x: 1j, TypeError, "sm_scale"),
    ("sm_scale", lambda x: np.array([0.25]), TypeError, "sm_scale"),
    ("sm_scale", lambda x: np.nan, ValueError, "sm_scale: expected a finite number .*, got nan"),
    ("sm_scale", lambda x: -np.inf, ValueError, "sm_scale: expected a finite number"),
]


def arguments() -> dict:
    return dict(zip(NAMES, (*inputs()[1:], SCALE), strict=True))


def saved() -> dict:
    """Arguments of the gradient."""
    g, q, kv, sinks, ids = inputs()
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    return {"grad_out": g, **arguments(), "out": out, "lse": lse}


def identity(n: int) -> str:
    return f"{WRONG[n][0]}-{n}"


@pytest.mark.parametrize("n", range(len(WRONG)), ids=identity)
def test_wrong_inputs(n):
    name, change, error, match = WRONG[n]
    args = arguments()
    args[name] = change(args[name])
    for function in (dsv4_sparse_attention, dense_attention_topk):
        with pytest.raises(error, match=match):
            function(**args)
    args = saved()
    args[name] = change(args[name])
    with pytest.raises(error, match=match):
        dsv4_sparse_attention_grad(**args)


@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("grad_out", lambda x: x[:, 1:], ValueError, "grad_out: expected shape"),
        ("grad_out", lambda x: x.astype(np.int64), TypeError, "grad_out: expected dtype"),
        ("grad_out", lambda x: None, TypeError, "grad_out: expected an array"),
        ("out", lambda x: x[..., 1:], ValueError, "out: expected shape"),
        ("out", lambda x: x.tolist(), TypeError, "out: expected an array"),
        ("lse", lambda x: x[..., None], ValueError, "lse: expected shape"),
        ("lse", lambda x: x.astype(np.float16), TypeError, "lse: expected dtype float32 or float64, got float16"),
        ("lse", lambda x: None, TypeError, "lse: expected an array"),
    ],
)
def test_wrong_inputs_of_the_gradient(name, change, error, match):
    args = saved()
    args[name] = change(args[name])
    with pytest.raises(error, match=match):
        dsv4_sparse_attention_grad(**args)


@pytest.mark.parametrize("flag", ["reference_rounding", "all_rows_nonempty", "return_lse"])
@pytest.mark.parametrize("value", [1, None, "yes", 0.0])
def test_flags_are_booleans(flag, value):
    with pytest.raises(TypeError, match=f"{flag}: expected True or False"):
        dsv4_sparse_attention(**arguments(), **{flag: value})


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"backward_impl": "fast"}, ValueError),
        ({"backward_impl": None}, TypeError),
        ({"backward_workspace_bytes": 0}, ValueError),
        ({"backward_workspace_bytes": -1}, ValueError),
        ({"backward_workspace_bytes": 2.0**31}, TypeError),
        ({"backward_workspace_bytes": None}, TypeError),
        ({"all_rows_nonempty": 1}, TypeError),
    ],
)
def test_options_of_the_gradient(option, error):
    with pytest.raises(error, match=next(iter(option))):
        dsv4_sparse_attention_grad(**saved(), **option)
    if "all_rows_nonempty" not in option:
        q, kv, sinks, ids = (Way("torch").array(x) for x in inputs()[1:])
        with pytest.raises(error, match=next(iter(option))):
            torch_bridge.dsv4_sparse_attention(q, kv, sinks, ids, SCALE, backend="torch", **option)


def test_backends():
    for call, args in ((dsv4_sparse_attention, arguments()), (dsv4_sparse_attention_grad, saved())):
        for backend in ("", "torch", "tilelang", None):
            with pytest.raises(ValueError, match="backend"):
                call(**args, backend=backend)
        for backend in ("cuda", "cudnn", "numba"):
            with pytest.raises(RuntimeError, match=f"backend '{backend}'"):
                call(**args, backend=backend)
        call(**args, backend="reference")


def test_mixed_libraries():
    q, kv, sinks, ids = inputs()[1:]
    strict = Way("array_api_strict").array
    for name, args in (("kv", (q, strict(kv), sinks, ids)), ("topk_idxs", (q, kv, sinks, strict(ids)))):
        with pytest.raises(TypeError, match=f"{name}: array_api_strict"):
            dsv4_sparse_attention(*args, SCALE)
    args = saved()
    args["lse"] = strict(args["lse"])
    with pytest.raises(TypeError, match="lse: array_api_strict"):
        dsv4_sparse_attention_grad(**args)
    plan = dsv4cp.plan_dsv4_sparse_indices(strict(ids), 9)
    with pytest.raises(TypeError, match=r"plan\.indices"):
        dsv4_sparse_attention(q, kv, sinks, ids, SCALE, plan=plan)


def test_nothing_is_written():
    """inputs() are read-only already; copies must be equal afterwards too, in case a view was written."""
    args = saved()
    copies = {name: np.array(x) for name, x in args.items()}
    dsv4_sparse_attention(*(args[name] for name in NAMES))
    dense_attention_topk(*(args[name] for name in NAMES))
    dsv4_sparse_attention_grad(**args)
    for name, x in args.items():
        np.testing.assert_array_equal(x, copies[name])


@pytest.mark.parametrize("library, implementation", [("numpy", "deterministic"), ("cupy", "atomic")])
def test_a_fixed_order_may_be_asked_for_where_there_is_one(library, implementation):
    assert contract.check_fixed_order("reference", library, implementation) is None


def test_a_fixed_order_is_refused_where_there_is_none():
    with pytest.raises(RuntimeError, match="backward_impl"):
        contract.check_fixed_order("reference", "cupy", "deterministic")
