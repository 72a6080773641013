"""Image spans, packed documents and context parallel queries: known rows, and each rule against the parts it joins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4cp.sparse_indices.reference_rows import following_min, running_max
from tests.support import naive
from tests.support.compare import check_equal, to_numpy
from tests.support.index_ways import WAYS, Way, documents

NUMPY = Way("numpy")


def reach(types, *, window, tokens, **more):
    """The keys each query of one row sees, as lists, with room for one id past the last key."""
    types = np.asarray([types])
    sizes = {"batch_size": 1, "seq_len": types.shape[1], "key_len": types.shape[1] + 1, "window_size": window}
    call = {**sizes, "vision_token_types": types, "max_image_tokens": tokens, **more}
    got = NUMPY.build(**call)
    check_equal(got, naive.build_indices(**call))
    return [row[row >= 0].tolist() for row in got[0]]


def test_a_span_is_seen_whole_from_each_of_its_tokens():
    seen = reach([-1, 0, 1, 1, 4, -1, -1], window=2, tokens=5)
    assert seen == [[0], [0, 1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [4, 5], [5, 6]]


def test_a_long_window_reaches_past_the_span():
    assert reach([-1, -1, 0, 1, 4, -1], window=4, tokens=3)[3] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("types", "tokens", "query", "want"),
    [
        ([-1, 1, 4, -1], 8, 2, [0, 1, 2]),  # an end without a start: the span counts from key 0
        ([-1, 1, 1, -1], 8, 2, [1, 2]),  # neither: text
        ([-1, 0, 1, -1], 8, 2, [1, 2, 3, 4]),  # a start without an end: one id past the last key, as in the source
        ([0, 0, 1, 4, 1, 4], 8, 4, [1, 2, 3, 4, 5]),  # nested starts: still open after the first end
        ([0, 4, 4, 1], 8, 3, [2, 3]),  # more ends than starts: text again
        ([0, 1, 1, 1, 1, 1, 4], 3, 1, [0, 1, 2, 3, 4]),  # a span longer than max_image_tokens: capped to the right
        ([0, 1, 1, 1, 1, 1, 4], 3, 6, [4, 5, 6]),  # and to the left
    ],
)
def test_hostile_types(types, tokens, query, want):
    assert reach(types, window=2, tokens=tokens)[query] == want


def test_text_rows_keep_the_plain_window():
    types = np.full((1, 6), -1)
    plain = {"batch_size": 1, "seq_len": 6, "key_len": 6, "window_size": 3}
    got = NUMPY.build(**plain, vision_token_types=types, max_image_tokens=2)
    check_equal(got[..., :3], NUMPY.build(**plain))
    assert (got[..., 3:] == -1).all() and got.shape[-1] == 5


def test_types_without_room_for_an_image_are_not_read():
    plain = {"batch_size": 1, "seq_len": 4, "key_len": 4, "window_size": 3}
    got = NUMPY.build(**plain, vision_token_types=np.full((7, 9), np.nan), max_image_tokens=0)
    check_equal(got, NUMPY.build(**plain))


def test_one_axis_is_enough_for_one_row():
    call = {"batch_size": 1, "seq_len": 4, "key_len": 4, "window_size": 2, "max_image_tokens": 3}
    types = np.array([0, 1, 4, -1])
    check_equal(NUMPY.build(**call, vision_token_types=types), NUMPY.build(**call, vision_token_types=types[None]))


@pytest.mark.parametrize("way", WAYS)
def test_spans_of_many_random_rows(way):
    rng = np.random.default_rng(5)
    for keys in (1, 2, 33, 64):
        types = rng.choice([-1, 0, 1, 2, 4], (3, keys), p=[0.2, 0.1, 0.4, 0.2, 0.1])
        call = {"batch_size": 3, "seq_len": keys, "key_len": keys, "window_size": 5, "max_image_tokens": 9}
        check_equal(way.build(**call, vision_token_types=types), naive.build_indices(**call, vision_token_types=types))


@pytest.mark.parametrize("way", WAYS)
def test_packed_documents_in_the_open(way):
    """Documents of 3 and 4 tokens and padding; R = 2, so entries are finished pairs of one document."""
    got = way.build(
        batch_size=1,
        seq_len=8,
        key_len=11,
        window_size=3,
        compress_ratio=2,
        n_pooled=3,
        q_segment_ids=np.array([[1, 1, 1, 2, 2, 2, 2, 0]]),
        q_local_positions=np.array([[0, 1, 2, 0, 1, 2, 3, 0]]),
        pooled_segment_ids=np.array([[1, 2, 2]]),
        pooled_positions=np.array([[0, 0, 1]]),
    )
    want = [
        [0, -1, -1, -1, -1, -1],
        [0, 1, -1, 8, -1, -1],
        [0, 1, 2, 8, -1, -1],
        [3, -1, -1, -1, -1, -1],
        [3, 4, -1, -1, 9, -1],
        [3, 4, 5, -1, 9, -1],
        [4, 5, 6, -1, 9, 10],
        [-1, -1, -1, -1, -1, -1],
    ]
    check_equal(got, np.array([want]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_a_packed_document_sees_what_it_sees_alone(seed, images, given_topk):
    rng = np.random.default_rng(seed)
    keys, ratio, window = int(rng.integers(1, 24)), int(rng.integers(1, 4)), int(rng.integers(1, 6))
    segments, locals_ = documents(rng, 1, keys)
    entries = [(g, n) for g in np.unique(segments[segments > 0]) for n in range((segments == g).sum() // ratio)]
    pooled = np.array(entries, np.int64).reshape(-1, 2)[rng.permutation(len(entries))].T
    types = rng.choice([-1, 0, 1, 4], (1, keys))
    common = {"window_size": window, "compress_ratio": ratio, "max_image_tokens": 5 if images else 0}
    topk = rng.integers(-2, len(entries) + 2, (1, keys, 4)) if given_topk else None
    whole = NUMPY.build(
        **common,
        batch_size=1,
        seq_len=keys,
        key_len=keys + len(entries),
        n_pooled=len(entries),
        compressed_topk=topk,
        vision_token_types=types,
        q_segment_ids=segments,
        q_local_positions=locals_,
        pooled_segment_ids=pooled[:1],
        pooled_positions=pooled[1:],
    )
    for i in range(keys):
        row = whole[0, i]
        raw, compressed = row[(row >= 0) & (row < keys)], row[row >= keys] - keys
        if segments[0, i] == 0:
            assert (row == -1).all()
            continue
        begin, own = i - locals_[0, i], segments[0] == segments[0, i]
        count = int(own.sum())
        alone = NUMPY.build(
            **common,
            batch_size=1,
            seq_len=count,
            key_len=count,  # nothing past the document's last key
            n_pooled=0,
            vision_token_types=types[:, own],
        )[0, i - begin]
        check_equal(raw, alone[alone >= 0] + begin)
        chosen = np.arange(len(entries)) if topk is None else topk[0, i]
        chosen = chosen[(chosen >= 0) & (chosen < len(entries))]
        finished = (pooled[0, chosen] == segments[0, i]) & (pooled[1, chosen] < (locals_[0, i] + 1) // ratio)
        check_equal(compressed, chosen[finished])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_context_parallel_rows_are_rows_of_the_whole(seed, packed):
    rng = np.random.default_rng(seed)
    keys, ratio = int(rng.integers(1, 24)), int(rng.integers(1, 4))
    segments, locals_ = documents(rng, 2, keys)
    types = np.full((2, keys), -1)
    for b in range(2):  # whole spans, none across a document's end: a part of the queries cannot show where that is
        for at in np.flatnonzero((locals_[b] == 0) & (segments[b] > 0)):
            size = int((segments[b] == segments[b, at]).sum())
            if size >= 3:
                types[b, at : at + size] = [0, *[1] * (size - 2), 4]
    pooled = keys // ratio
    common = {"batch_size": 2, "key_len": keys + pooled, "window_size": 3, "compress_ratio": ratio, "n_pooled": pooled}
    common |= {"vision_token_types": types, "max_image_tokens": 4}
    if packed:
        common |= {
            "pooled_segment_ids": rng.choice(segments[0], (2, pooled)),
            "pooled_positions": rng.integers(0, 3, (2, pooled)),
        }
    where = {"q_segment_ids": segments, "q_local_positions": locals_} if packed else {}
    whole = NUMPY.build(**common, seq_len=keys, **where)
    rows = np.stack([rng.permutation(keys)[: max(1, keys // 2)] for _ in range(2)])
    part = {name: np.take_along_axis(x, rows, axis=1) for name, x in where.items()}
    got = NUMPY.build(**common, seq_len=rows.shape[1], vanilla_key_len=keys, q_positions=rows, **part)
    check_equal(got, np.take_along_axis(whole, rows[..., None], axis=1))


def test_positions_outside_the_types_are_text():
    types = np.array([[0, 1, 4]])
    call = {"batch_size": 1, "seq_len": 4, "key_len": 9, "vanilla_key_len": 3, "window_size": 2, "max_image_tokens": 2}
    got = NUMPY.build(**call, vision_token_types=types, q_positions=np.array([-1, 1, 3, 40]))
    check_equal(got, np.array([[[-1, -1, -1], [0, 1, 2], [2, 3, -1], [-1, -1, -1]]]))


@pytest.mark.parametrize("way", [p for p in WAYS if not p.marks])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 8, 31, 100])
def test_scans(way, size):
    import array_api_compat as compat

    x = np.random.default_rng(size).integers(-50, 50, (3, size))
    xp = compat.array_namespace(way.array(x))
    check_equal(to_numpy(running_max(xp, way.array(x))), np.maximum.accumulate(x, axis=1))
    check_equal(to_numpy(following_min(xp, way.array(x))), np.minimum.accumulate(x[:, ::-1], axis=1)[:, ::-1])
