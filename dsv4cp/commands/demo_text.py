"""The demo's text: read a file safely, cut it into paragraphs, pack those as documents."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Packed:
    """S bytes of text as documents laid end to end, and the P compressed entries of R tokens each."""

    tokens: np.ndarray  # [S] int64, the bytes
    segments: np.ndarray  # [S] int32, the paragraph of each token, from 1
    positions: np.ndarray  # [S] int32, the place in its paragraph, from 0
    groups: np.ndarray  # [P, R] int64, the tokens that each entry is pooled from
    pooled_segments: np.ndarray  # [P] int32
    pooled_positions: np.ndarray  # [P] int32, the entry's number in its paragraph


def read_text(path: str | None, limit: int) -> bytes:
    """The first `limit` bytes of a UTF-8 text file; without a path, of CPython's documentation texts.

    Raises ValueError with a message for people when there is no such file or no text in it.
    """
    if path is None:
        return _documentation()[:limit]
    file = Path(path)
    if not file.exists():
        raise ValueError(f"{path}: there is no such file")
    if not file.is_file():
        raise ValueError(f"{path}: is {'a folder' if file.is_dir() else 'no regular file'}, expected a text file")
    try:
        with file.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    if not data:
        raise ValueError(f"{path}: is empty")
    whole = len(data) <= limit
    data = data[:limit]
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text (byte {error.start} is {data[error.start]:#04x})") from error
    if "\0" in text:
        raise ValueError(f"{path}: is binary (byte {data.index(0)} is zero), expected a text file")
    if not text.strip():
        raise ValueError(f"{path}: has only white space in the first {len(data)} bytes")
    return data


def _documentation() -> bytes:
    """The texts behind Python's help(), in a fixed order."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python has no pydoc_data.topics; give a text FILE") from error
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def pack(data: bytes, ratio: int) -> Packed:
    """Each paragraph with the blank lines after it is a document; its full groups of `ratio` bytes are pooled."""
    starts = [0, *(m.end() for m in re.finditer(rb"\n[ \t\r]*\n\s*", data) if m.end() < len(data))]
    ends = [*starts[1:], len(data)]
    segments = np.empty(len(data), np.int32)
    positions = np.empty(len(data), np.int32)
    groups, pooled_segments, pooled_positions = [], [], []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
        segments[start:end] = number
        positions[start:end] = np.arange(end - start)
        entries = (end - start) // ratio
        groups.append(start + np.arange(entries * ratio).reshape(entries, ratio))
        pooled_segments.append(np.full(entries, number, np.int32))
        pooled_positions.append(np.arange(entries, dtype=np.int32))
    return Packed(
        tokens=np.frombuffer(data, np.uint8).astype(np.int64),
        segments=segments,
        positions=positions,
        groups=np.concatenate(groups).astype(np.int64),
        pooled_segments=np.concatenate(pooled_segments),
        pooled_positions=np.concatenate(pooled_positions),
    )
