"""Building index lists: against the oracle, golden cases, hostile numbers, independence of chunks and neighbours."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4cp
from dsv4cp.sparse_indices import reference_blocks
from tests.support import naive
from tests.support.compare import check_equal, check_like, to_numpy
from tests.support.index_ways import WAYS, Way, random_call

NUMPY = Way("numpy")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", range(8))
def test_random_calls_equal_the_oracle(way, block):
    for seed in range(block * 25, block * 25 + 25):
        call = random_call(seed)
        got = way.build(**call)
        check_like(got, dtype="int64", like=way.array(np.zeros(1)))
        check_equal(got, naive.build_indices(**call))


@settings(max_examples=150, deadline=None)
@given(st.integers(1000, 2**40))
def test_any_call_equals_the_oracle(seed):
    call = random_call(seed)
    check_equal(NUMPY.build(**call), naive.build_indices(**call))


# --- Golden cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_golden_25_context_parallel(way):
    got = way.build(
        batch_size=1,
        seq_len=2,
        key_len=10,
        vanilla_key_len=8,
        window_size=4,
        compress_ratio=4,
        n_pooled=2,
        q_positions=np.array([4, 5]),
    )
    check_equal(got, np.array([[[1, 2, 3, 4, 8, -1], [2, 3, 4, 5, 8, -1]]]))


@pytest.mark.parametrize("way", WAYS)
def test_golden_12_fewer_entries_than_slots(way):
    topk = np.full((1, 8, 512), -1, np.int32)
    topk[0, 3:7, 0], topk[0, 7, :2] = 0, (0, 1)
    got = to_numpy(way.build(batch_size=1, seq_len=8, key_len=10, window_size=3, n_pooled=2, compressed_topk=topk))
    assert got.shape == (1, 8, 3 + 512)
    check_equal(got[0, :, 3:5], np.array([[-1, -1]] * 3 + [[8, -1]] * 4 + [[8, 9]]))
    assert (got[..., 5:] == -1).all()
    none = np.full((1, 3, 512), -1, np.int32)
    got = way.build(batch_size=1, seq_len=3, key_len=3, window_size=3, n_pooled=0, compressed_topk=none)
    check_equal(got, np.array([[[0, -1, -1], [0, 1, -1], [0, 1, 2]]]))


@pytest.mark.parametrize("way", WAYS)
def test_golden_13_unfinished_groups_are_hidden(way):
    got = way.build(batch_size=1, seq_len=9, key_len=11, window_size=1, compress_ratio=4, n_pooled=2)
    visible = (to_numpy(got)[0, :, 1:] >= 9).sum(axis=-1)
    check_equal(visible, np.array([0, 0, 0, 1, 1, 1, 1, 2, 2]))


def test_golden_22_numbers():
    want = dsv4cp.build_dsv4_sparse_topk_indices(batch_size=2, seq_len=3, key_len=3, window_size=2)
    for number in (np.int64, np.int32, np.uint8, np.asarray):
        sizes = {"batch_size": number(2), "seq_len": number(3), "key_len": number(3), "window_size": number(2)}
        check_equal(dsv4cp.build_dsv4_sparse_topk_indices(**sizes), want)
    for wrong in (3.0, np.float32(3), True, "3", None, np.array([3])):
        with pytest.raises(TypeError, match="key_len: expected an integer"):
            dsv4cp.build_dsv4_sparse_topk_indices(batch_size=2, seq_len=3, key_len=wrong, window_size=2)


# --- What it returns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int32", np.int32, np.dtype("int32")])
def test_int32_on_request(dtype):
    for seed in range(20):
        call = random_call(seed)
        got = dsv4cp.build_dsv4_sparse_topk_indices(**call, dtype=dtype)
        check_equal(got, naive.build_indices(**call).astype(np.int32))
        assert got.flags.c_contiguous


def test_library_of_the_result():
    import array_api_strict as strict

    sizes = {"batch_size": 1, "seq_len": 2, "key_len": 2, "window_size": 2}
    want = np.array([[[0, -1], [0, 1]]])
    check_equal(dsv4cp.build_dsv4_sparse_topk_indices(**sizes), want, like=want)
    like = strict.asarray([0.5])
    check_equal(dsv4cp.build_dsv4_sparse_topk_indices(**sizes, like=like, dtype=strict.int64), want, like=like)
    check_equal(dsv4cp.build_dsv4_sparse_topk_indices(**sizes, q_positions=strict.arange(2)), want, like=like)


def test_inputs_are_not_written_and_views_work():
    for seed in range(40):
        call = random_call(seed)
        want = NUMPY.build(**call)
        views = {}
        for name, x in call.items():
            if isinstance(x, np.ndarray):
                wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::-2]
                wide[...] = x
                wide.flags.writeable = False
                x = wide
            views[name] = x
        check_equal(NUMPY.build(**views), want)
        for name, x in call.items():
            if isinstance(x, np.ndarray):
                check_equal(views[name], x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", ["batch_size", "seq_len", "key_len", "window_size", "n_pooled", "vanilla_key_len"])
def test_empty_axes(way, size):
    sizes = {"batch_size": 2, "seq_len": 3, "key_len": 4, "window_size": 2, "n_pooled": 1, "vanilla_key_len": 3}
    sizes[size] = 0
    call = {**sizes, "compress_ratio": 2}
    shape = (sizes["batch_size"], sizes["seq_len"])
    more = [
        {},
        {"attention_mask": np.zeros((shape[0], 1, shape[1], sizes["key_len"]), np.float32)},
        {"compressed_topk": np.zeros((*shape, 0), np.int64)},
        {"compressed_topk": np.zeros((*shape, 2), np.int64)},
        {"q_positions": np.arange(shape[1])},
        {"vision_token_types": np.zeros(shape, np.int64), "max_image_tokens": 2},
        {
            "vision_token_types": np.zeros((shape[0], sizes["vanilla_key_len"]), np.int64),
            "max_image_tokens": 2,
            "q_positions": np.arange(shape[1]),
        },
        {
            "vision_token_types": np.zeros(shape, np.int64),
            "max_image_tokens": 2,
            "q_segment_ids": np.ones(shape, np.int64),
            "q_local_positions": np.tile(np.arange(shape[1]), (shape[0], 1)),
            "pooled_segment_ids": np.ones((shape[0], sizes["n_pooled"]), np.int64),
            "pooled_positions": np.zeros((shape[0], sizes["n_pooled"]), np.int64),
        },
    ]
    for extra in more:
        check_equal(way.build(**call, **extra), naive.build_indices(**call, **extra))


# --- Hostile numbers -----------------------------------------------------------------------------------

LIMITS = {
    "int8": (-128, 127),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint8": (0, 255),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", LIMITS)
def test_given_ids_at_the_limits_of_their_dtype(way, dtype):
    low, high = LIMITS[dtype]
    topk = np.array([[[low, high, 2, high - 1, 1, low + 1, high - 8]]], dtype)
    for keys, raw in ((10, 8), (2**31, 8), (300, 0), (5, 8)):
        call = {"batch_size": 1, "seq_len": 1, "window_size": 0, "key_len": keys, "vanilla_key_len": raw, "n_pooled": 3}
        check_equal(way.build(**call, compressed_topk=topk), naive.build_indices(**call, compressed_topk=topk))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_at_the_limits_of_their_dtype(way, dtype):
    low, high = LIMITS[dtype]
    positions = np.array([low, low + 1, -1, 0, 5, 1000, high - 1, high], dtype)
    call = {"batch_size": 1, "seq_len": 8, "key_len": 12, "vanilla_key_len": 8, "window_size": 3, "n_pooled": 4}
    got = to_numpy(way.build(**call, compress_ratio=4, q_positions=positions))
    check_equal(got, naive.build_indices(**call, compress_ratio=4, q_positions=positions))
    assert (got[0, :3] == -1).all() and (got[0, -2:, 3:] == [8, 9, 10, 11]).all()
    segments, locals_ = np.ones((1, 8), dtype), positions[None, ::-1].copy()
    documents = {"q_segment_ids": segments, "q_local_positions": locals_, "q_positions": positions}
    pooled = {"pooled_segment_ids": segments[:, :4], "pooled_positions": positions[None, :4]}
    types = {"vision_token_types": np.array([[-1, 0, 1, 1, 4, -1, 0, 1]]), "max_image_tokens": 3}
    for call_types in ({}, types):
        got = to_numpy(way.build(**call, compress_ratio=4, **documents, **pooled, **call_types))
        assert got.min() >= -1 and got.max() < 12
        assert (got[0, :3, :-4] == -1).all()  # before the first key


@pytest.mark.parametrize("way", WAYS)
def test_keys_beyond_int32(way):
    call = {"batch_size": 1, "seq_len": 2, "vanilla_key_len": 2**40, "key_len": 2**40 + 4, "window_size": 2}
    got = way.build(**call, n_pooled=2, compress_ratio=2**38, q_positions=np.array([0, 2**40 - 1]))
    check_equal(got, np.array([[[0, -1, -1, -1], [2**40 - 2, 2**40 - 1, 2**40, 2**40 + 1]]]))


def test_nothing_but_negative_values_masks():
    for dtype in ("float16", "float32", "float64", "bfloat16"):
        if dtype == "bfloat16":
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        values = np.array([0.0, -0.0, 1.0, np.inf, np.nan, -np.inf, -1.0, -1e-3])
        mask = np.broadcast_to(values.astype(dtype), (1, 1, 8, 8))
        got = NUMPY.build(batch_size=1, seq_len=8, key_len=8, window_size=8, attention_mask=mask)
        check_equal(got[0, 7], np.array([0, 1, 2, 3, 4, -1, -1, -1]))


# --- Independence --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 7, 64, 1000]))
def test_chunks_do_not_matter(seed, size):
    call = random_call(seed)
    want = NUMPY.build(**call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_blocks, "HOST_BLOCK", size)
        check_equal(NUMPY.build(**call), want)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_do_not_know_each_other(seed):
    call = random_call(seed)
    want = NUMPY.build(**call)
    for b in range(call["batch_size"]):
        alone = {
            name: x[b : b + 1] if isinstance(x, np.ndarray) and x.shape[0] == call["batch_size"] else x
            for name, x in call.items()
        }
        check_equal(NUMPY.build(**{**alone, "batch_size": 1}), want[b : b + 1])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_each_raw_key_appears_once_and_in_order(seed):
    call = random_call(seed)
    raw = NUMPY.build(**{**call, "n_pooled": 0, "pooled_segment_ids": None, "pooled_positions": None})
    for at in np.ndindex(raw.shape[:2]):
        assert (np.diff(raw[at][raw[at] >= 0]) > 0).all()


@pytest.mark.parametrize("given_topk", [False, True])
def test_memory_is_the_result_and_little_else(given_topk):
    s, pooled = 16384, 512
    call = {"batch_size": 1, "seq_len": s, "key_len": s + pooled, "window_size": 128, "n_pooled": pooled}
    topk = np.tile(np.arange(pooled, dtype=np.int32), (1, s, 1)) if given_topk else None
    tracemalloc.start()
    try:
        got = dsv4cp.build_dsv4_sparse_topk_indices(**call, compress_ratio=32, compressed_topk=topk)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.shape == (1, s, 640)
    assert peak - got.nbytes < 8 * 2**20
