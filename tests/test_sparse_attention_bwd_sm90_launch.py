"""What Hopper's main kernel of sparse attention's gradient is launched with, without a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernels
from dsv4cp.sparse_attention import contract
from dsv4cp.sparse_attention import cuda_bwd_sm90 as sm90

MOST_SHARED = 232448  # bytes that a block of sm_90 may opt in to
MAP = bytes(128)
NAMES = "grad_out q kv sinks ids out lse log2_total delta grad_q sums exponents".split()
AT = {name: 2**40 + n for n, name in enumerate(NAMES)}


@pytest.fixture
def launches(monkeypatch):
    made = []

    def launch(kernel, *, grid, block, shared_bytes, stream, **arguments):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert kinds[name] is np.void or type(value) is (kinds[name] or int), name
        defines = dict(kernel.defines)
        assert defines in [{k: str(v) for k, v in variant.items()} for variant in sm90.VARIANTS[sm90.FILE]]
        made.append(SimpleNamespace(defines=defines, grid=grid, block=block, shared=shared_bytes, **arguments))

    monkeypatch.setattr(_kernels, "launch", launch)
    monkeypatch.setattr(sm90, "tensor_map", lambda *_: MAP)
    monkeypatch.setattr(sm90, "_multiprocessors", lambda _: 132)
    monkeypatch.setattr(sm90, "_is_hopper", lambda _: True)
    runtime = SimpleNamespace(getDevice=lambda: 0)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    return made


def spec_of(b=2, s=50, h=8, d=512, k=100, t=7) -> contract.Spec:
    q, kv = np.broadcast_to(np.float16(0), (b, s, h, d)), np.broadcast_to(np.float16(0), (b, k, d))
    return contract.check(q, kv, np.zeros(h, np.float32), np.broadcast_to(np.int64(0), (b, s, t)), 0.5)


def launch(spec, *, deterministic=False, key_first=0, key_last=100, parts=3) -> bool:
    strides = (spec.queries * spec.heads * 512, spec.heads * 512, 512, 1)
    return sm90.launch(
        **AT, spec=spec, dtype="float16", grad_out_strides=strides, q_strides=strides, kv_strides=(51200, 512, 1),
        out_strides=(3, -(2**40), 5, 1), deterministic=deterministic, key_first=key_first, key_last=key_last,
        parts=parts, stream=None,
    )  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [1, 32, 33, 64, 65, 128, 129, 300])
def test_every_head_has_a_block_of_a_cluster(launches, heads, deterministic):
    spec = spec_of(h=heads)
    assert sm90.fits(spec, 0)
    assert launch(spec, deterministic=deterministic)
    (made,) = launches
    blocks = int(made.defines["HEAD_BLOCKS"])
    assert blocks == (1 if heads <= 64 else 2)
    clusters = made.grid // (2 * blocks)
    assert made.grid == clusters * 2 * blocks
    assert made.items == 2 * 50 * -(-heads // (64 * blocks))
    assert clusters == min(made.items, 66 if blocks == 1 else 30)
    assert made.shared == int(made.defines["SHARED_BYTES"]) <= MOST_SHARED
    assert made.block == 512
    assert made.defines["DETERMINISTIC"] == str(int(deterministic))
    assert made.defines["DELTA"] == str(int(not deterministic))
    assert (made.queries, made.heads, made.keys, made.slots) == (50, heads, 100, 7)


def test_arguments(launches):
    launch(spec_of())
    (made,) = launches
    mapped = ("grad_out", "q", "out")
    assert [getattr(made, name) for name in NAMES if name not in mapped] == [AT[n] for n in NAMES if n not in mapped]
    assert (made.kv_stride_b, made.kv_stride_k) == (51200, 512)


def test_maps(launches, monkeypatch):
    asked = []
    monkeypatch.setattr(sm90, "tensor_map", lambda *of: asked.append(of) or (MAP, of[0]))
    launch(spec_of())
    launch(spec_of())
    for made in launches:
        assert (made.q_map[1], made.grad_out_map[1], made.out_map[1]) == (AT["q"], AT["grad_out"], AT["out"])
    rows, out = (512, 8 * 512, 50 * 8 * 512), (5, -(2**40), 3)
    strides = {"q": rows, "grad_out": rows, "out": out}
    wanted = [(AT[name], (8, 50, 2), steps, "float16", 32) for name, steps in strides.items()]
    assert list(dict.fromkeys(asked)) == wanted, "equal calls ask for equal maps, which are kept"


def test_a_pass_for_grad_q_alone_adds_nothing(launches):
    launch(spec_of(), parts=1)
    launch(spec_of(), parts=2, key_first=10, key_last=20)
    assert [(m.parts, m.key_first, m.key_last) for m in launches] == [(1, 0, 0), (2, 10, 20)]


def test_strides_that_the_driver_refuses(launches, monkeypatch):
    monkeypatch.setattr(sm90, "tensor_map", lambda *_: None)
    assert not launch(spec_of())
    assert not launches


def test_where_the_driver_refuses_out_delta_is_given(launches, monkeypatch):
    monkeypatch.setattr(sm90, "tensor_map", lambda address, *_: None if address == AT["out"] else (MAP, address))
    assert launch(spec_of())
    (made,) = launches
    assert made.defines["DELTA"] == "0"
    assert (made.q_map[1], made.grad_out_map[1]) == (AT["q"], AT["grad_out"])
    launch(spec_of(h=65))
    assert launches[1].defines["DELTA"] == "0"


def test_what_does_not_fit(launches):
    assert not sm90.fits(spec_of(d=256), 0)
    assert not sm90.fits(spec_of(s=0), 0)
