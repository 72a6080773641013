"""Wrong arguments, one at a time, for every array function: a clear refusal, no warning, nothing changed."""

from __future__ import annotations

import warnings

import array_api_strict
import ml_dtypes
import numpy as np
import pytest

import dsv4cp
from tests.support.compare import check_equal

B, S, H, D, K, T, P, INDEX_HEADS, E, R = 2, 5, 2, 8, 9, 6, 3, 2, 4, 2
rng = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def rows(*values: int) -> np.ndarray:
    return np.array([values] * B)


Q, KV, SINKS, IDS = floats(B, S, H, D), floats(B, K, D), floats(H), rng.integers(-1, K, (B, S, T))
OUT, LSE = dsv4cp.dsv4_sparse_attention(Q, KV, SINKS, IDS, 0.5, return_lse=True)
PLAN = dsv4cp.plan_dsv4_sparse_indices(IDS, K)
ATTENTION = {"q": Q, "kv": KV, "sinks": SINKS, "topk_idxs": IDS, "sm_scale": 0.5}
INDEXER = {"q": floats(B, S, INDEX_HEADS, E), "pooled_kv": floats(B, P, E), "weights": floats(B, S, INDEX_HEADS)}
INDEXER |= {"compress_ratio": R, "softmax_scale": 0.5, "backend": "auto"}
START = {"query_start": 0, "query_total_len": S}
ENTRIES = {"topk_indices": rng.integers(-1, P, (B, S, 4))}
DOCUMENTS = {"q_segment_ids": rows(1, 1, 1, 2, 2), "q_local_positions": rows(0, 1, 2, 0, 1)}
DOCUMENTS |= {"pooled_segment_ids": rows(1, 2, 0), "pooled_positions": rows(0, 0, 0)}
SINKHORN = {"x": floats(3, 4, 4), "repeat": 3, "eps": 1e-6, "backend": "auto"}
CALLS = {
    "dsv4_sinkhorn_normalize": SINKHORN,
    "dsv4_sinkhorn_normalize_grad": {"grad_y": floats(3, 4, 4), **SINKHORN},
    "build_dsv4_sparse_topk_indices": {
        "batch_size": B, "seq_len": S, "key_len": K, "window_size": 3, "attention_mask": np.zeros((B, 1, S, K)),
        "compress_ratio": R, "compressed_topk": rng.integers(-1, P, (B, S, 4)), "n_pooled": P, "vanilla_key_len": 6,
        "q_positions": rows(0, 1, 2, 3, 4), "vision_token_types": rows(-1, 0, 1, 4, -1, -1), "max_image_tokens": 2,
        **DOCUMENTS, "dtype": "int64", "like": np.zeros(1), "backend": "auto",
    },
    "plan_dsv4_sparse_indices": {
        "topk_idxs": IDS, "kv_sequence": K, "backend": "auto", "all_rows_nonempty": False, "index_backend": "auto",
    },
    "flatten_sparse_indices": {"topk_idxs": IDS, "kv_sequence": K},
    "dsv4_sparse_attention": {
        **ATTENTION, "backend": "auto", "reference_rounding": False, "all_rows_nonempty": False, "plan": PLAN,
        "return_lse": False,
    },
    "dsv4_sparse_attention_grad": {
        "grad_out": floats(B, S, H, D), **ATTENTION, "out": OUT, "lse": LSE, "backend": "auto",
        "backward_impl": "atomic", "backward_workspace_bytes": 2**31, "plan": PLAN, "all_rows_nonempty": False,
    },
    "dense_attention_topk": ATTENTION,
    "dsv4_indexer_scores": {**INDEXER, **START},
    "dsv4_indexer_scores_grad": {"grad_scores": floats(B, S, P), **INDEXER, **START},
    "dsv4_indexer_topk_scores": {**INDEXER, **ENTRIES},
    "dsv4_indexer_topk_scores_grad": {"grad_scores": floats(B, S, 4), **INDEXER, **ENTRIES},
    "extract_indexer_topk_scores": {"logits": floats(B, S, P), **ENTRIES, "backend": "auto"},
    "dsv4_indexer_topk": {**INDEXER, **START, **DOCUMENTS, "topk": 4, "order": "id", "return_scores": False},
    "select_indexer_topk": {
        "scores": floats(B, S, P), "topk": 4, "order": "id", "return_scores": False, "backend": "auto",
        "compress_ratio": R, "query_start": 1,
    },
}  # fmt: skip

# Some are fine for some arguments: None where it means "absent", numbers where they are in range.
VALUES = [
    None, object(), [1, 2], [], (), {}, "abc", "2", "", b"ab", True, np.True_, 10**30, -(10**30), 2**63, -1, 0, 1.5,
    np.nan, np.inf, -np.inf, 1e308, 1j, np.complex64(1), np.str_("2"), np.datetime64("2020"), np.zeros(0), np.ones(1),
    np.array(True), np.array(None), np.array("a"), np.array([0.5]), np.zeros((2, 2), np.complex64), int, ...,
    np.zeros((B, S, T), object), np.zeros((B, S, T), [("a", "f4")]), np.zeros(3, ml_dtypes.int4),
    np.ma.zeros((3, 4, 4)), array_api_strict.zeros((3, 4, 4)), array_api_strict.asarray(2), np.zeros((0, 0)),
    np.dtype("f4"),
]  # fmt: skip
ARGUMENTS = [(name, argument) for name, call in CALLS.items() for argument in call]


def altered(x: np.ndarray) -> list:
    """Arrays that are wrong in one way: an axis more, less, longer or without length, or another kind of number."""
    shapes = [x[None], x[0]]
    for axis, n in enumerate(x.shape):
        shapes += [np.zeros((*x.shape[:axis], m, *x.shape[axis + 1 :]), x.dtype) for m in (0, n + 1)]
    kinds = [x.astype(kind) for kind in (bool, np.complex64, object, "U3", "c16")]
    return [*shapes, *kinds, x.tolist(), np.ma.array(x), array_api_strict.asarray(x)]


def content(x):
    """What an argument holds, to compare before and after."""
    return x.tobytes() if isinstance(x, np.ndarray) and x.dtype != object else None


@pytest.mark.parametrize("name, argument", ARGUMENTS)
def test_one_bad_argument(name, argument):
    """TypeError or ValueError that names an argument, what was expected and what came; RuntimeError for a backend."""
    call = CALLS[name]
    good = call[argument]
    for value in VALUES + (altered(good) if isinstance(good, np.ndarray) else []):
        given = call | {argument: value}
        before = {a: content(x) for a, x in given.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                getattr(dsv4cp, name)(**given)
            except (TypeError, ValueError) as error:
                message = str(error)
                blamed = [a for a in call if f"{a}:" in message or f"{a}.indices:" in message]
                assert blamed and "expected" in message and "got" in message, (value, message)
        assert before == {a: content(x) for a, x in given.items()}, (value, "an argument was written")


def test_every_public_function_is_asked():
    assert set(CALLS) == {name for name in dsv4cp.__all__ if name != "SparseIndexPlan"}


# ---------------------------------------------------------------- values


SPECIAL = [np.nan, np.inf, -np.inf, 65504.0, -65504.0, 3e38, -3e38, 1e-45, 0.0, -0.0, 1e308, 1e-310, 1.0, -1.0]


def special(generator, dtype, *shape: int) -> np.ndarray:
    """Half normal numbers, half the ends of every format."""
    with np.errstate(all="ignore"):
        x = np.where(generator.random(shape) < 0.5, generator.standard_normal(shape), generator.choice(SPECIAL, shape))
        return x.astype(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("seed", range(5))
def test_no_warning_whatever_the_values(dtype, seed):
    """NaN, infinities, overflow and underflow are answers; a caller who makes NumPy raise gets the same ones."""
    g = np.random.default_rng(seed)
    x, grad = special(g, dtype, 3, 4, 4), special(g, dtype, 3, 4, 4)
    q, k, w = special(g, dtype, B, S, 2, E), special(g, dtype, B, P, E), special(g, dtype, B, S, 2)
    ids = g.integers(-1, P + 1, (B, S, 4))
    at = {"compress_ratio": 1, "softmax_scale": float(g.choice([0.5, 1e30, 0.0]))}
    v4 = {"repeat": 3, "eps": float(g.choice([0.0, 1e-6, 1e38]))}

    given_scores, given_grad = special(g, dtype, B, S, P), special(g, dtype, B, S, 4)

    def run():
        return [
            dsv4cp.dsv4_sinkhorn_normalize(x, **v4),
            dsv4cp.dsv4_sinkhorn_normalize_grad(grad, x, **v4),
            dsv4cp.dsv4_indexer_scores(q, k, w, **at),
            *dsv4cp.dsv4_indexer_scores_grad(given_scores, q, k, w, **at),
            *dsv4cp.dsv4_indexer_topk_scores_grad(given_grad, q, k, w, ids, **at),
            dsv4cp.dsv4_indexer_topk_scores(q, k, w, ids, **at),
            dsv4cp.dsv4_indexer_topk(q, k, w, 3, **at),
            dsv4cp.select_indexer_topk(given_scores, 3),
            dsv4cp.select_indexer_topk(given_scores, 3, compress_ratio=2),
            dsv4cp.extract_indexer_topk_scores(given_scores, ids),
        ]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = run()
    with np.errstate(all="raise"):
        for a, b in zip(run(), want, strict=True):
            check_equal(a, b)


def test_errstate_of_the_caller_stays():
    with np.errstate(over="raise", invalid="call"):
        before = np.geterr()
        dsv4cp.dsv4_sinkhorn_normalize(np.full((2, 2), np.inf), repeat=2, eps=0.0)
        assert np.geterr() == before
