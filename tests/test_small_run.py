"""tests/gpu/small_run.py without a GPU: its cases are well formed, and it knows every kernel there is."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("cupy")

from tests.gpu import small_run, warm
from tests.support.fuzz_ops import OPS, Verdict


@pytest.mark.parametrize("name", OPS)
def test_cases_are_right_on_the_reference(name):
    op, cases = OPS[name], list(small_run.cases(name))
    assert cases or name == "dense attention"
    for change in cases[:: max(1, len(cases) // 2)]:
        case = {"op": name, "way": str(small_run.HOST), **op.plain(), **change}
        held = op.make(small_run.HOST, case)
        got = [None if x is None else small_run.HOST.take(x) for x in op.run(small_run.HOST, case, held)]
        v = Verdict(detail=True)
        op.judge(small_run.HOST, case, held, got, v)
        assert not v.failed(), v.notes


def test_paths_are_set_in_modules_whatever_else_sys_modules_holds(monkeypatch):
    from dsv4cp.sparse_attention import cuda

    monkeypatch.setattr(cuda, "forced_path", "unset")
    for module in list(sys.modules.values()):  # what paths() sets, this test gives back
        if getattr(module, "__name__", "").startswith("dsv4cp.") and hasattr(module, "forced_path"):
            monkeypatch.setattr(module, "forced_path", module.forced_path)
    monkeypatch.setitem(sys.modules, "not_a_module", object())
    assert [(path, cuda.forced_path) for path in small_run.paths()] == [(None, None), ("portable", "portable")]


def test_kernels_are_read_off_the_sources():
    names = small_run.expected()
    assert {"sinkhorn4_forward", "sparse_attention_fwd", "sparse_attention_fwd_sm90"} <= names


def test_hoppers_kernels_compile_as_racecheck_wants_them(monkeypatch):
    """Each lane arrives for itself: as many arrivals in the text as the barriers are told to wait for."""
    from dsv4cp import _kernel_text, _kernels

    first = {}
    for file, defines in warm.variants():
        if "EVERY_LANE_ARRIVES" in _kernel_text.expand(file):
            first.setdefault(file, defines)
    assert len(first) == 6
    for file, defines in first.items():
        plain, every = (
            _kernels.compile_cubin(file, arch="90a", defines={**defines, "EVERY_LANE_ARRIVES": on}) for on in (0, 1)
        )
        assert plain.cubin != every.cubin, file

    monkeypatch.setattr(_kernels, "kernel", _kernels.kernel)  # what for_racecheck() sets, this test gives back
    small_run.for_racecheck()
    on = [_kernels.kernel("sinkhorn.cu", "sinkhorn4_forward", defines={"ELEMENT": "Float16"}, arch=a).defines
          for a in (None, "sm_90a")]  # fmt: skip
    assert on == [(("ELEMENT", "Float16"),), (("ELEMENT", "Float16"), ("EVERY_LANE_ARRIVES", "1"))]


def test_every_op_names_its_slice():
    assert small_run.slice_of(OPS["index lists"]) == "sparse_indices"
    assert {small_run.slice_of(op) for op in OPS.values()} == {
        "sinkhorn", "sparse_indices", "sparse_attention", "indexer",
    }  # fmt: skip
