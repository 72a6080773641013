"""The ops that the fuzzer tries, by name. A new backend needs no line here: ways come from what ops.py offers."""

from __future__ import annotations

from .fuzz_attention import AttentionGradOp, AttentionOp, DenseOp
from .fuzz_base import Op, Refused, Verdict, try_case, value
from .fuzz_indexer import ExtractOp, ScoresGradOp, ScoresOp, SelectOp, SlotScoresGradOp, SlotScoresOp, TopkOp
from .fuzz_lists import BuildOp, PlanOp
from .fuzz_sinkhorn import SinkhornGradOp, SinkhornOp

__all__ = ["OPS", "Op", "Refused", "Verdict", "try_case", "value"]

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        AttentionOp(), AttentionGradOp(), DenseOp(), ScoresOp(), ScoresGradOp(), SlotScoresOp(), SlotScoresGradOp(),
        TopkOp(), SelectOp(), ExtractOp(), SinkhornOp(), SinkhornGradOp(), PlanOp(), BuildOp(),
    )
}  # fmt: skip
