"""Plans and flat ids: against the oracle, golden cases, ids at the limits of their dtype, what a plan holds."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dsv4cp
from dsv4cp.sparse_indices import ops, reference_blocks
from dsv4cp.sparse_indices.contract import CUDNN_SLOT_MULTIPLE
from tests.support import naive
from tests.support.compare import check_equal, check_like, to_numpy
from tests.support.index_ways import WAYS, Way

LAYOUTS = ("reference", "cuda", "cudnn")
NUMPY = Way("numpy")


def in_place(ids: np.ndarray, keys: int) -> np.ndarray:
    """What the reference and cuda layouts hold, by a loop."""
    out = [int(k) if 0 <= int(k) < keys else -1 for k in ids.ravel()]
    return np.array(out, np.int32).reshape(ids.shape)


def check_plan(plan, ids: np.ndarray, keys: int, layout: str, like=None) -> None:
    """Every field of a plan against the oracle."""
    assert plan.kv_sequence == keys
    if layout != "cudnn":
        check_equal(plan.indices, in_place(ids, keys), like=like)
        assert plan.topk_length is None and plan.valid_rows is None
        return
    indices, lengths, rows = naive.cudnn_plan(ids, keys, CUDNN_SLOT_MULTIPLE)
    check_equal(plan.indices, indices, like=like)
    check_equal(plan.topk_length, lengths, like=like)
    if len(rows) == len(lengths):
        assert plan.valid_rows is None
    else:
        check_equal(plan.valid_rows, rows, like=like)


def hostile_ids(rng, shape, keys) -> np.ndarray:
    """Ids in and around [0, keys), with -1 anywhere, repeats, and some rows without a key."""
    ids = rng.integers(-3, keys + 4, shape)
    if ids.size:
        ids[rng.random(shape) < 0.3] = -1
        ids[rng.random(shape[:2]) < 0.2] = rng.choice([-1, keys, -(2**63), 2**63 - 1])
    return ids


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [0, 1, 2, 127, 128, 129, 300])
def test_plans_equal_the_oracle(way, layout, slots):
    rng = np.random.default_rng(slots)
    for batch, queries, keys in ((1, 5, 7), (3, 4, 200), (2, 1, 1), (2, 3, 0), (0, 3, 5), (2, 0, 5)):
        ids = hostile_ids(rng, (batch, queries, slots), keys)
        like = way.array(np.zeros(1))
        check_plan(way.plan(ids, keys, layout), ids, keys, layout, like)
        check_plan(way.plan(ids.astype(np.int32), keys, layout), ids.astype(np.int32), keys, layout, like)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 50, 2**16]))
def test_flat_ids_and_plans_of_any_ids(seed, block):
    rng = np.random.default_rng(seed)
    batch, queries, slots, keys = (int(n) for n in rng.integers(0, 9, 4))
    ids = hostile_ids(rng, (batch, queries, slots), keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_blocks, "HOST_BLOCK", block)
        for layout in LAYOUTS:
            check_plan(NUMPY.plan(ids, keys, layout), ids, keys, layout)
        flat = dsv4cp.flatten_sparse_indices(ids, keys)
    want = in_place(ids, keys).astype(np.int64)
    want = np.where(want < 0, -1, want + keys * np.arange(batch)[:, None, None]).reshape(batch * queries, slots)
    check_equal(flat, want)


# --- Golden cases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_golden_3_ids_out_of_range(way):
    ids = np.array([[[3, 4, 7, -5]]])
    check_equal(way.plan(ids, 4, "cuda").indices, np.array([[[3, -1, -1, -1]]], np.int32))
    plan = way.plan(ids, 4, "cudnn")
    check_equal(plan.indices[:, :, :4], np.array([[[3, -1, -1, -1]]], np.int32))
    check_equal(plan.topk_length, np.array([1], np.int32))


@pytest.mark.parametrize("way", [p for p in WAYS if p.values[0].library != "torch"])
def test_golden_4_ids_of_another_row(way):
    ids = np.array([[[9, 1]], [[9, 1]]])
    plan = way.plan(ids, 8, "cudnn")
    check_equal(plan.indices[:, 0, :3], np.array([[1, -1, -1], [9, -1, -1]], np.int32))
    check_equal(dsv4cp.flatten_sparse_indices(way.array(ids), 8), np.array([[-1, 1], [-1, 9]]))


@pytest.mark.parametrize("way", WAYS)
def test_golden_9_more_slots_than_keys(way):
    ids = np.full((1, 1, 640), -1)
    ids[..., 600:608] = np.arange(8)
    plan = way.plan(ids, 8, "cudnn")
    assert plan.indices.shape == (1, 1, 640)
    check_equal(plan.indices[0, 0, :9], np.array([*range(8), -1], np.int32))
    check_equal(plan.topk_length, np.array([8], np.int32))


# --- Limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_at_the_limits_of_their_dtype(way, dtype, layout):
    limit = np.iinfo(dtype)
    ids = np.array([[[limit.max, limit.min, 3, limit.max - 3, limit.min + 3, 1, 100, limit.max - 2**7]]], dtype)
    for keys in (0, 4, 2**7, 2**16, 2**31 - 1, 2**31):
        check_plan(way.plan(ids, keys, layout), ids, keys, layout)


def test_ids_that_wrap_into_range_stay_masked():
    ids = np.array([[[2**32 + 1, 2**31, -(2**32) + 2, 2**33]], [[2**32, 1, -(2**31), 2**32 - 1]]])
    for layout in LAYOUTS:
        check_plan(NUMPY.plan(ids, 4, layout), ids, 4, layout)


@pytest.mark.parametrize("way", WAYS)
def test_the_last_int32_id_is_an_id(way):
    keys = 2**30
    ids = np.array([[[-1, keys - 1, 0]], [[keys - 1, -1, keys]]])
    plan = way.plan(ids, keys, "cudnn")
    check_equal(plan.indices[:, 0, :3], np.array([[0, keys - 1, -1], [2**31 - 1, -1, -1]], np.int32))
    check_equal(plan.topk_length, np.array([2, 1], np.int32))
    with pytest.raises(ValueError, match=r"kv_sequence.*2\*1073741825"):
        way.plan(ids, keys + 1, "cudnn")


def test_ids_beyond_int32_are_refused():
    ids = np.zeros((1, 1, 1), np.int64)
    for layout in ("reference", "cuda"):
        with pytest.raises(ValueError, match="kv_sequence: expected at most 2147483648"):
            NUMPY.plan(ids, 2**31 + 1, layout)
    check_equal(dsv4cp.flatten_sparse_indices(ids, 2**40), np.zeros((1, 1), np.int64))
    with pytest.raises(ValueError, match="kv_sequence"):
        dsv4cp.flatten_sparse_indices(np.zeros((16, 1, 1), np.int64), 2**60)


# --- What a plan is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_promise_of_nonempty_rows(way):
    ids = np.array([[[1, -1], [2, 0]]])
    plan = way.plan(ids, 4, "cudnn", all_rows_nonempty=True)
    check_plan(plan, ids, 4, "cudnn")
    broken = way.plan(np.array([[[1, -1], [-1, 9]]]), 4, "cudnn", all_rows_nonempty=True)
    assert broken.valid_rows is None
    check_equal(broken.topk_length, np.array([1, 0], np.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_is_frozen_contiguous_and_its_own(layout):
    ids = np.array([[[0, 1, 2]]], np.int32)
    ids.flags.writeable = False
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, 3, layout)
    assert isinstance(plan, dsv4cp.SparseIndexPlan) and plan.backend == layout
    assert plan.indices.flags.c_contiguous and not np.shares_memory(plan.indices, ids)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.kv_sequence = 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(layout):
    rng = np.random.default_rng(3)
    parent = hostile_ids(rng, (4, 6, 10), 7)
    for ids in (parent[::-1, ::2, ::-3], parent.transpose(2, 0, 1), np.broadcast_to(parent[:1, :1], (3, 5, 10))):
        check_plan(NUMPY.plan(ids, 7, layout), np.ascontiguousarray(ids), 7, layout)
        want = dsv4cp.flatten_sparse_indices(np.ascontiguousarray(ids), 7)
        check_equal(dsv4cp.flatten_sparse_indices(ids, 7), want)


def test_auto_is_the_reference_on_the_cpu_and_follows_sparse_attention():
    assert dsv4cp.plan_dsv4_sparse_indices(np.zeros((1, 1, 1), np.int64), 3).backend == "reference"
    from dsv4cp.sparse_attention import ops as attention

    assert set(ops.ATTENTION_OFFERED) == {name for name in attention.OFFERED if name in ("reference", "cuda")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_the_result_and_little_else(layout):
    ids = np.tile(np.arange(640), (1, 16384, 1))
    tracemalloc.start()
    try:
        plan = NUMPY.plan(ids, 500, layout)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    check_like(plan.indices, dtype="int32")
    assert peak - plan.indices.nbytes < 8 * 2**20
    assert to_numpy(plan.indices).max() == 499
