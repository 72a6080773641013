"""The scatter-add that the array API lacks: exact about order, about NaN, about what lies around the rows."""

from __future__ import annotations

import array_api_compat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4cp._arrays import add_rows
from tests.support.attention_ways import WAYS
from tests.support.compare import check_close, check_equal, to_numpy


def loop(total, ids, values):
    total = total.copy()
    for n, row in enumerate(ids):
        if 0 <= row < len(total):
            total[row] += values[n]
    return total


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 3), st.integers(0, 2**32))
def test_numpy_adds_in_the_order_of_a_loop(rows, slots, width, seed):
    rng = np.random.default_rng(seed)
    total = rng.standard_normal((rows, width)).astype(np.float32)
    ids, values = rng.integers(-2, rows + 2, slots), rng.standard_normal((slots, width)).astype(np.float32)
    want = loop(total, ids, values)
    cut = slots // 3
    got = total.copy()
    got = add_rows(np, got, ids[:cut], values[:cut])
    check_equal(add_rows(np, got, ids[cut:], values[cut:]), want)


@pytest.mark.parametrize("way", WAYS)
def test_every_library(way):
    rng = np.random.default_rng(0)
    total, values = rng.standard_normal((5, 4)), rng.standard_normal((9, 4))
    ids = np.array([-1, 0, 3, 3, 5, 0, -9, 3, 1])
    xp = array_api_compat.array_namespace(way.array(total))
    got = add_rows(xp, way.array(total.copy()), way.array(ids), way.array(values))
    check_close(got, loop(total, ids, values), "attention_grad")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_values_stay_in_their_row(way, bad):
    total, values = np.zeros((4, 3)), np.ones((6, 3))
    ids = np.array([0, 2, -1, 1, 4, 0])
    values[[1, 2, 4]] = bad  # slots 2 and 4 add nothing
    values[3, 1] = bad
    xp = array_api_compat.array_namespace(way.array(total))
    got = to_numpy(add_rows(xp, way.array(total.copy()), way.array(ids), way.array(values)))
    check_equal(got, np.array([[2, 2, 2], [1, bad, 1], [bad, bad, bad], [0, 0, 0]]))


def test_rows_around_the_total_are_left_alone():
    around = np.full((6, 3), 7.0)
    total = around[1:-1]
    total[:] = 0
    assert add_rows(np, total, np.array([-1, 0, 3, 4, -5]), np.ones((5, 3))) is total
    check_equal(around, np.array([7.0, 1, 0, 0, 1, 7])[:, None] * np.ones(3))


def test_nothing_to_add():
    for rows, slots in ((0, 3), (3, 0), (0, 0)):
        total = np.ones((rows, 2))
        check_equal(add_rows(np, total, np.zeros(slots, int), np.ones((slots, 2))), np.ones((rows, 2)))
