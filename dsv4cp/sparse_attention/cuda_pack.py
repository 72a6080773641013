"""What cuDNN's kernels read instead of ids [B, S, T]: launch parameters of the packing in sparse_attention_ids.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _kernels
from .contract import Spec

THREADS = 128  # a warp for each row
MOST_BLOCKS = 2**16  # more rows than these have warps are taken in turns


def launch_pack_ids(
    ids: int, packed: int, lengths: int, spec: Spec, width: int, *, wide: bool, stream: Any = None
) -> None:
    """Queues packed, int32 [B*S, width], and lengths, int32 [B*S], from ids [B, S, T], int64 (wide) or int32.

    All are addresses of contiguous arrays; width >= T, B*K <= 2^31.
    """
    rows = spec.batch * spec.queries
    name = "sparse_attention_pack_wide_ids" if wide else "sparse_attention_pack_ids"
    _kernels.launch(
        _kernels.kernel("sparse_attention_ids.cu", name),
        grid=min(-(-rows // (THREADS // 32)), MOST_BLOCKS),
        block=THREADS,
        stream=stream,
        ids=ids,
        packed=packed,
        lengths=lengths,
        rows=np.int64(rows),
        queries=np.int64(spec.queries),
        keys=np.int64(spec.keys),
        slots=np.int32(spec.slots),
        width=np.int32(width),
    )
