"""Calls of the index functions, small enough for Numba's simulator and hostile enough for a GPU: data only.

Each builder returns the keyword arguments of build_dsv4_sparse_topk_indices with NumPy arrays, or the arguments of a
plan. The same calls go to every backend.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

INT64 = np.iinfo(np.int64)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _topk(seed: int, *shape: int, entries: int, dtype="int64") -> np.ndarray:
    """Entry ids with -1 at head, middle and tail, repeats, and ids out of range."""
    ids = _rng(seed).integers(0, max(entries, 1), shape)
    for at, value in ((0, -1), (shape[-1] // 2, -1), (-1, -1), (1, entries), (2, entries + 50)):
        if shape[-1] > 3:
            ids[..., at] = value
    if dtype == "int64" and ids.size > 8:
        ids.flat[5], ids.flat[6] = INT64.max, INT64.min
    return ids.astype(dtype)


def _documents(batch: int, queries: int, lengths: tuple[int, ...], pooled: int, ratio: int, padding: int) -> dict:
    """Packed documents of the given lengths in every row, the last `padding` tokens segment 0; row b rotated by b."""
    segments, local = np.zeros((2, batch, queries), np.int64)
    entry_segments, entry_positions = np.zeros((2, batch, pooled), np.int64)
    for b in range(batch):
        at, entry = 0, 0
        order = lengths[b % len(lengths) :] + lengths[: b % len(lengths)]
        for number, length in enumerate(order, 1):
            length = min(length, queries - padding - at)
            segments[b, at : at + length], local[b, at : at + length] = number, np.arange(length)
            finished = min(length // ratio, pooled - entry)
            entry_segments[b, entry : entry + finished] = number
            entry_positions[b, entry : entry + finished] = np.arange(finished)
            at, entry = at + length, entry + finished
    return {
        "q_segment_ids": segments,
        "q_local_positions": local,
        "pooled_segment_ids": entry_segments,
        "pooled_positions": entry_positions,
    }


def _types(seed: int, batch: int, keys: int) -> np.ndarray:
    """Image token types: spans, some unclosed, ends without a start, neighbouring spans."""
    types = _rng(seed).choice([-1, -1, -1, 0, 1, 2, 3, 4], (batch, keys))
    types[0, : keys // 2] = -1
    types[0, 1 : keys // 2 - 1] = 2
    types[0, 1], types[0, keys // 2 - 2] = 0, 4
    return types


def _mask(seed: int, dtype, *shape: int) -> np.ndarray:
    """Additive mask: zeros, -inf, tiny negatives, -0.0, NaN, +inf."""
    values = np.array([0.0, 0.0, 0.0, -np.inf, -1e-7, -0.0, np.nan, np.inf, -np.nan, 1.0], np.float32)
    return _rng(seed).choice(values, shape).astype(dtype)


def build_cases() -> dict[str, dict]:
    """Name -> keyword arguments of a build call."""
    cases: dict[str, dict] = {}
    plain = dict(batch_size=2, seq_len=9, key_len=11, window_size=4, compress_ratio=4, n_pooled=2)
    cases["window"] = dict(batch_size=2, seq_len=9, key_len=9, window_size=4)
    cases["window wider than the sequence"] = dict(batch_size=1, seq_len=5, key_len=5, window_size=40)
    cases["window 0"] = dict(batch_size=1, seq_len=5, key_len=6, window_size=0, compress_ratio=4, n_pooled=1)
    cases["window 1"] = dict(batch_size=1, seq_len=5, key_len=5, window_size=1)
    cases["keys cut the window"] = dict(batch_size=1, seq_len=9, key_len=5, window_size=4)
    cases["compressed"] = plain
    cases["compressed int32"] = dict(plain, dtype="int32")
    cases["more entries than keys"] = dict(plain, n_pooled=40, compress_ratio=1)
    cases["no keys"] = dict(batch_size=1, seq_len=3, key_len=0, window_size=2)
    cases["no queries"] = dict(batch_size=2, seq_len=0, key_len=4, window_size=2)
    cases["no rows"] = dict(batch_size=0, seq_len=3, key_len=4, window_size=2)
    cases["no slots"] = dict(batch_size=1, seq_len=3, key_len=4, window_size=0)
    for dtype in ("int64", "int32", "int8", "uint8", "uint64"):
        cases[f"given {dtype}"] = dict(
            batch_size=2, seq_len=7, key_len=13, window_size=3, n_pooled=6,
            compressed_topk=_topk(1, 2, 7, 70, entries=6).clip(0 if dtype[0] == "u" else -1, 100).astype(dtype),
        )
    cases["given hostile"] = dict(
        batch_size=1, seq_len=3, key_len=9, window_size=3, n_pooled=6, dtype="int32",
        compressed_topk=_topk(2, 1, 3, 9, entries=6),
    )
    cases["given uint64 beyond int64"] = dict(
        batch_size=1, seq_len=1, key_len=9, window_size=1, n_pooled=6,
        compressed_topk=np.array([[[0, 2**64 - 1, 2**63, 5, 6]]], np.uint64),
    )
    cases["given strided"] = dict(
        batch_size=2, seq_len=4, key_len=10, window_size=2, n_pooled=6,
        compressed_topk=_topk(3, 2, 5, 8, entries=6).swapaxes(1, 2)[:, ::2, ::-1],
    )
    cases["given no slots"] = dict(
        batch_size=2, seq_len=4, key_len=10, window_size=2, n_pooled=6, compressed_topk=np.zeros((2, 4, 0), np.int64)
    )
    cases["positions shared"] = dict(
        batch_size=2, seq_len=2, key_len=10, vanilla_key_len=8, window_size=4, compress_ratio=4, n_pooled=2,
        q_positions=np.array([4, 5]),
    )
    cases["positions per row, hostile"] = dict(
        batch_size=2, seq_len=4, key_len=10, vanilla_key_len=8, window_size=4, compress_ratio=4, n_pooled=2,
        q_positions=np.array([[4, -1, INT64.max, 7], [INT64.min, 0, 3, 2000]]),
    )
    cases["positions int32, strided"] = dict(
        batch_size=1, seq_len=3, key_len=10, window_size=4, vanilla_key_len=8,
        q_positions=np.arange(12, dtype=np.int32)[::-4],
    )
    for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
        cases[f"mask {np.dtype(dtype).name}"] = dict(plain, attention_mask=_mask(4, dtype, 2, 1, 9, 13))
    cases["mask shared, broadcast"] = dict(
        plain, attention_mask=np.broadcast_to(_mask(5, np.float32, 1, 1, 1, 13), (1, 1, 9, 13))
    )
    cases["mask and given"] = dict(
        batch_size=2, seq_len=5, key_len=9, window_size=3, n_pooled=4, compressed_topk=_topk(6, 2, 5, 6, entries=4),
        attention_mask=_mask(7, np.float32, 2, 1, 5, 9)[..., ::-1],
    )
    packed = _documents(2, 14, (5, 1, 6), pooled=4, ratio=2, padding=2)
    base = dict(batch_size=2, seq_len=14, window_size=4, compress_ratio=2, n_pooled=4, key_len=18)
    cases["documents"] = dict(base, **packed)
    cases["documents, window alone"] = dict(
        batch_size=2, seq_len=14, window_size=4, key_len=14,
        q_segment_ids=packed["q_segment_ids"], q_local_positions=packed["q_local_positions"],
    )
    cases["documents and given"] = dict(base, compressed_topk=_topk(8, 2, 14, 5, entries=4), **packed)
    cases["documents and given, entries unknown"] = dict(
        base, compressed_topk=_topk(8, 2, 14, 5, entries=4),
        q_segment_ids=packed["q_segment_ids"], q_local_positions=packed["q_local_positions"],
    )
    cases["documents, int32, mask"] = dict(
        base, dtype="int32", attention_mask=_mask(9, np.float32, 1, 1, 14, 18),
        **{k: v.astype(np.int32) for k, v in packed.items()},
    )
    rows = np.array([[3, 4, 9], [0, 5, 11]])
    cases["documents under positions"] = dict(
        base, seq_len=3, vanilla_key_len=14, q_positions=rows,
        **{k: np.take_along_axis(v, rows, 1) if k[0] == "q" else v for k, v in packed.items()},
    )
    images = dict(batch_size=2, seq_len=24, key_len=24, window_size=4, max_image_tokens=9)
    cases["images"] = dict(images, vision_token_types=_types(10, 2, 24))
    cases["images one axis"] = dict(images, batch_size=1, vision_token_types=_types(11, 1, 24)[0].astype(np.int8))
    cases["images, window 0"] = dict(images, window_size=0, vision_token_types=_types(12, 2, 24))
    cases["images off"] = dict(images, max_image_tokens=0, vision_token_types=_types(13, 2, 24))
    cases["images and compressed"] = dict(
        images, key_len=30, compress_ratio=4, n_pooled=6, vision_token_types=_types(14, 2, 24)
    )
    cases["images under positions"] = dict(
        images, seq_len=5, vanilla_key_len=24, q_positions=np.array([3, 23, 0, -1, 40]),
        vision_token_types=_types(15, 2, 24),
    )
    cases["images in documents"] = dict(
        base, vision_token_types=_types(16, 2, 14), max_image_tokens=6, **packed
    )
    cases["images in documents under positions"] = dict(
        cases["documents under positions"], vision_token_types=_types(17, 2, 14), max_image_tokens=6
    )
    return cases


def long_build_cases() -> dict[str, dict]:
    """Cases of several tiles and blocks: a GPU's size, a simulator's patience for the first one only."""
    keys = 2100  # more than two tiles of the span scan
    spans = np.full((1, keys), -1)
    spans[0, [5, 900, 1030, 2060]], spans[0, [300, 1000, 2050]] = 0, 4
    positions = np.array([0, 4, 5, 6, 299, 300, 301, 950, 1000, 1023, 1024, 1029, 1500, 2047, 2048, 2050, 2055, 2099])
    cases = {
        "spans over tiles": dict(
            batch_size=1, seq_len=len(positions), key_len=keys, vanilla_key_len=keys, window_size=3,
            max_image_tokens=40, vision_token_types=spans, q_positions=positions,
        )
    }
    cases["long images"] = dict(
        batch_size=3, seq_len=9000, key_len=9000, window_size=16, max_image_tokens=50,
        vision_token_types=_rng(18).choice([-1, 0, 1, 4], (3, 9000), p=[0.5, 0.05, 0.4, 0.05]),
    )
    cases["long given"] = dict(
        batch_size=2, seq_len=5000, key_len=6250, window_size=128, n_pooled=1250,
        compressed_topk=_topk(19, 2, 5000, 512, entries=1250),
    )
    cases["long compressed"] = dict(
        batch_size=1, seq_len=20000, key_len=20156, window_size=128, compress_ratio=128, n_pooled=156, dtype="int32"
    )
    cases["long documents"] = dict(
        batch_size=2, seq_len=4000, key_len=5000, window_size=128, compress_ratio=4, n_pooled=1000,
        **_documents(2, 4000, (1000, 3, 1700, 900), pooled=1000, ratio=4, padding=100),
    )
    return cases


def plan_cases() -> dict[str, tuple[np.ndarray, int]]:
    """Name -> (topk_idxs, kv_sequence)."""
    rng = _rng(20)
    cases: dict[str, tuple[np.ndarray, int]] = {}
    cases["ascending with gaps"] = (np.array([[[-1, 0, 2, -1, 5, 8, -1], [0, 1, 2, 3, 4, 5, 6]]]), 7)
    cases["out of range"] = (np.array([[[3, 4, 7, -5], [INT64.max, INT64.min, 0, 2**32 + 1]]]), 4)
    cases["batch rows"] = (np.array([[[9, 1, 0]], [[9, 1, 0]]]), 8)
    cases["empty rows"] = (np.array([[[-1, -1], [1, 0], [-1, -1]], [[5, 5], [-1, 2], [3, -1]]]), 5)
    cases["all empty"] = (np.full((2, 2, 3), -1), 5)
    cases["repeated"] = (np.array([[[2, 2, 1, 2, 0, 0, -1, 1, 1]]]), 3)
    cases["int32"] = (rng.integers(-3, 40, (2, 3, 21)).astype(np.int32), 30)
    cases["uint64"] = (np.array([[[2**64 - 1, 3, 2**63, 0, 1]]], np.uint64), 4)
    cases["uint8"] = (rng.integers(0, 256, (1, 2, 17)).astype(np.uint8), 200)
    cases["strided"] = (rng.integers(-3, 40, (3, 2, 40))[:, :, ::-2].swapaxes(0, 1), 30)
    cases["no keys"] = (np.array([[[0, 1, -1]]]), 0)
    cases["no slots"] = (np.zeros((2, 3, 0), np.int64), 4)
    cases["no queries"] = (np.zeros((2, 0, 3), np.int64), 4)
    for slots in (1, 3, 4, 5, 8, 9, 33, 65, 150):
        cases[f"shuffled {slots}"] = (rng.integers(-2, 60, (1, 1 + slots % 2, slots)), 58)
    run = np.concatenate([np.arange(20), 30 + rng.permutation(44)])
    cases["window, then top-k in any order"] = (np.stack([run, run[::-1]])[None], 80)
    return cases


def long_plan_cases() -> dict[str, tuple[np.ndarray, int]]:
    """Rows of several tiles, at and beyond what shared memory holds: a GPU's size."""
    rng = _rng(21)
    cases = {}
    for slots in (128, 640, 1151, 1152, 1153, 2559, 2560, 2561, 5000):
        ids = rng.integers(-100, 3 * slots, (2, 9, slots))
        ids[:, 0] = np.sort(ids[:, 0], -1)
        ids[:, 1] = np.sort(ids[:, 1], -1)[:, ::-1]
        ids[:, 2] = -1
        ids[:, 3] = 7
        ids[:, 4, 100:] = np.sort(ids[:, 4, 100:], -1)
        cases[f"{slots} slots"] = (ids, 3 * slots - 50)
    return cases


def extract_cases(bfloat16) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> (logits, topk_indices). NaN stands in every score that no id names."""
    rng = _rng(22)
    cases = {}
    for dtype in (np.float16, np.float32, np.float64, bfloat16):
        logits = rng.standard_normal((2, 3, 7)).astype(dtype)
        logits[..., 5:] = np.nan
        logits[0, 0, :4] = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32).astype(dtype)
        cases[np.dtype(dtype).name] = (logits, _topk(23, 2, 3, 9, entries=5).clip(-1, 4))
    wide = rng.standard_normal((2, 3, 20)).astype(np.float32)
    cases["hostile ids"] = (wide, _topk(24, 2, 3, 9, entries=20))
    cases["int32 ids"] = (wide, _topk(25, 2, 3, 33, entries=20, dtype="int32"))
    cases["strided rows"] = (wide[:, ::-1, :7], _topk(26, 2, 3, 5, entries=7))
    cases["strided ids"] = (wide.swapaxes(0, 1), _topk(27, 3, 2, 10, entries=20)[..., ::-2])
    cases["one axis"] = (wide[0, 0], _topk(28, 6, entries=20))
    cases["two axes"] = (wide[0], _topk(29, 3, 6, entries=20))
    cases["four axes"] = (np.broadcast_to(wide[:, None], (2, 4, 3, 20)), _topk(30, 2, 4, 3, 6, entries=20))
    cases["no entries"] = (wide[..., :0], _topk(31, 2, 3, 6, entries=1))
    cases["no slots"] = (wide, np.zeros((2, 3, 0), np.int64))
    cases["no rows"] = (wide[:, :0], np.zeros((2, 0, 4), np.int64))
    return cases


def extracted(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """What extraction means, id by id."""
    out = np.full(ids.shape, -np.inf, logits.dtype)
    for at in np.ndindex(ids.shape):
        if 0 <= int(ids[at]) < logits.shape[-1]:
            out[at] = logits[(*at[:-1], int(ids[at]))]
    return out
