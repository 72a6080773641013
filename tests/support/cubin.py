"""What a cubin says of its kernels' parameters: the compiler's own word on their offsets and widths."""

from __future__ import annotations

import struct

WITH_BYTES = 0x04  # format of an entry of .nv.info that so many bytes follow; no other has any
PARAMETER = 0x17  # EIATTR_KPARAM_INFO


def kernel_parameters(cubin: bytes, function: str) -> list[tuple[int, int]]:
    """(offset, bytes) of each parameter of a kernel, in order."""
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + n * entry_size) for n in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, size in sections:
        begin = names + name
        if cubin[begin : cubin.index(b"\0", begin)].decode() == f".nv.info.{function}":
            return [found[1:] for found in sorted(_parameters(cubin[offset : offset + size]))]
    raise ValueError(f"no kernel {function}")


def _parameters(info: bytes) -> list[tuple[int, int, int]]:
    """(ordinal, offset, bytes)"""
    at, found = 0, []
    while at < len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if form == WITH_BYTES and attribute == PARAMETER:
            _, ordinal, offset, about = struct.unpack_from("<IHHI", info, at + 4)
            found.append((ordinal, offset, about >> 18))
        at += 4 + (value if form == WITH_BYTES else 0)
    return found
