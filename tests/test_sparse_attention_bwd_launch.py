"""What the gradient's kernels are launched with, without a GPU: passes, memory, tiles, shared memory, arguments."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernels
from dsv4cp._arrays import element_strides
from dsv4cp.sparse_attention import contract, cuda_bwd, cuda_bwd_mma, cuda_bwd_passes, cuda_bwd_sm90

SHARED = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448}  # bytes that a block may opt in to
HEADS = (1, 3, 8, 16, 17, 24, 31, 32, 33, 48, 64, 96, 128)
MAIN = "sparse_attention_bwd"
GIB2 = 2 * 2**30
ADDRESSES = ("grad_out", "q", "kv", "sinks", "ids", "out", "lse", "grad_q", "grad_kv", "grad_sinks", "work")


@pytest.fixture
def launches(monkeypatch):
    made = []

    def launch(kernel, *, grid, block, shared_bytes=0, stream=None, **arguments):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert type(value) is (kinds[name] or int), name
            assert kinds[name] or 0 <= value < 2**64, f"{name} is no address"
        values = {name: value.item() if kinds[name] else value for name, value in arguments.items()}
        defines = {name: int(v) if v.isdecimal() else v for name, v in kernel.defines}
        variants = {**cuda_bwd.VARIANTS, **cuda_bwd_mma.VARIANTS}[kernel.file]
        free = ("ELEMENT", "PARTS", "FIXED") if kernel.function == MAIN else ()
        listed = [{k: str(v) for k, v in variant.items() if k not in free} for variant in variants]
        plain = {k: v for k, v in kernel.defines if k not in free}
        assert plain in listed, "not among what the compile test compiles"
        shape = {"grid": grid, "block": block, "shared": shared_bytes, "stream": stream}
        made.append(SimpleNamespace(name=kernel.function, defines=defines, **shape, **values))

    monkeypatch.setattr(_kernels, "launch", launch)
    monkeypatch.setattr(cuda_bwd, "forced_path", "portable")
    return made


@pytest.fixture(params=SHARED)
def shared(request, monkeypatch):
    device = SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": SHARED[request.param]})
    runtime = SimpleNamespace(getDevice=lambda: 0)
    fake = SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: device, runtime=runtime))
    monkeypatch.setattr(cuda_bwd, "cupy", fake)
    monkeypatch.setattr(cuda_bwd_mma, "cupy", fake)
    cuda_bwd_mma._tile.cache_clear()
    yield SHARED[request.param]
    cuda_bwd_mma._tile.cache_clear()


def spec_of(b=2, s=5, h=8, d=512, k=100, t=7, scale=0.5) -> contract.Spec:
    q, kv = np.broadcast_to(np.float16(0), (b, s, h, d)), np.broadcast_to(np.float16(0), (b, k, d))
    ids = np.broadcast_to(np.int64(0), (b, s, t))
    return contract.check(q, kv, np.zeros(h, np.float32), ids, scale)


def launch(spec: contract.Spec, deterministic: bool = False, cap: int = GIB2, **options) -> dict[str, int]:
    strides = {"q_strides": (3, -(2**40), 5, 1), "kv_strides": (2**33, 8, 1)}
    strides |= {"grad_out_strides": (8, 16, 24, 1), "out_strides": (32, 40, 48, 1)}
    at = {name: (n + 1) << 50 for n, name in enumerate(ADDRESSES)}
    plan = cuda_bwd_passes.layout(spec, deterministic, cap)
    options = {"dtype": "float16", **at, **strides, **options}
    cuda_bwd.launch_backward(plan=plan, spec=spec, deterministic=deterministic, **options)
    return at


def named(launches, name: str) -> list[SimpleNamespace]:
    return [x for x in launches if x.name == name]


# --- Launches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", contract.KERNEL_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_has_a_row_and_each_slot_is_scattered_once(launches, shared, heads, d, deterministic):
    launch(spec_of(h=heads, d=d), deterministic, stream=7)
    main = named(launches, MAIN)
    rows = main[0].defines["ROWS"]
    tiles = -(-heads // rows)
    assert [x.defines["PARTS"] for x in main] == ([3] if tiles == 1 else [1, 2])
    assert main[-1].grid == 2 * 5, "a block per query: its sums are of all heads"
    assert tiles == 1 or main[0].grid == 2 * 5 * tiles
    assert tiles == 1 or rows == 64 or (d == 512 and shared < SHARED["sm_90"])
    assert rows == 16 or heads > rows // 2, "a smaller tile would do"
    for x in main:
        assert x.block == 32 * x.defines["WARPS"]
        assert x.shared == x.defines["SHARED_BYTES"] <= shared
        assert x.defines["FIXED"] == (deterministic and x.defines["PARTS"] != 1)
        assert (x.defines["ELEMENT"], x.defines["HEAD_DIM"]) == ("Float16", d)
    (finish,) = named(launches, "sparse_attention_bwd_finish")
    assert finish.defines["FIXED"] == deterministic
    assert {x.stream for x in launches} == {7}


def test_the_order_of_a_call(launches, shared):
    prefix = "sparse_attention_bwd_"
    ends = ["sinks", "sinks_sum"]
    launch(spec_of())
    assert [x.name.removeprefix(prefix) for x in launches] == ["prep", "zero", MAIN, "finish", *ends]
    launches.clear()
    launch(spec_of(), True)
    first = ["prep", "zero", "select", "exponents"]
    assert [x.name.removeprefix(prefix) for x in launches] == [*first, "zero", MAIN, "finish", *ends]


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_sums_are_read_in_the_order_in_which_the_main_kernel_has_left_them(
    launches, shared, monkeypatch, taken, deterministic
):
    """Hopper's float32 sums lie in quads of columns; those of the portable kernel, also in its place, in order."""
    monkeypatch.setattr(cuda_bwd, "_main", lambda *_: cuda_bwd_sm90)
    monkeypatch.setattr(cuda_bwd_sm90, "finds_delta", lambda *_: not deterministic)
    monkeypatch.setattr(cuda_bwd_sm90, "launch", lambda **_: taken)
    launch(spec_of(), deterministic)
    assert (MAIN in [x.name for x in launches]) == (not taken)
    (finish,) = named(launches, "sparse_attention_bwd_finish")
    assert finish.defines["QUADS"] == (taken and not deterministic)


def test_arguments(launches, shared):
    at = launch(spec_of())
    prep, _, main, finish, sinks, sinks_sum = launches
    for x in (prep, main):
        assert [getattr(x, n) for n in ("grad_out", "q", "log2_total", "delta")] == [
            at["grad_out"], at["q"], prep.log2_total, prep.delta
        ]  # fmt: skip
        assert [getattr(x, f"q_stride_{axis}") for axis in "bsh"] == [3, -(2**40), 5]
        assert [getattr(x, f"grad_out_stride_{axis}") for axis in "bsh"] == [8, 16, 24]
        assert (x.queries, x.heads) == (5, 8)
        assert x.scale == 0.5
    assert [getattr(prep, f"out_stride_{axis}") for axis in "bsh"] == [32, 40, 48]
    assert (prep.out, prep.lse, prep.sinks) == (at["out"], at["lse"], at["sinks"])
    assert (main.kv, main.ids, main.grad_q) == (at["kv"], at["ids"], at["grad_q"])
    assert (main.kv_stride_b, main.kv_stride_k) == (2**33, 8)
    assert (main.keys, main.slots, main.first_key, main.range) == (100, 7, 0, 100)
    assert main.sums == finish.sums
    assert (finish.grad_kv, finish.batch, finish.keys, finish.dim) == (at["grad_kv"], 2, 100, 512)
    assert (finish.first_key, finish.rows) == (0, 100)
    assert (sinks.rows, sinks.grid, sinks.sinks, sinks_sum.chunks) == (10, (1, 1), at["sinks"], 1)
    assert sinks.partial == sinks_sum.partial
    assert sinks_sum.grad_sinks == at["grad_sinks"]
    launches.clear()
    launch(spec_of(scale=3.4e38))
    assert np.isfinite(launches[0].scale)


@pytest.mark.parametrize("axis", "bskth")
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_to_do(launches, shared, axis, deterministic):
    launch(spec_of(**{axis: 0}), deterministic)
    for x in launches:
        grid = x.grid if isinstance(x.grid, tuple) else (x.grid,)
        assert 0 in grid or x.name != MAIN or axis in "kt", "grad_q is written where there are queries"
    if axis in "kt":
        assert named(launches, MAIN)[0].grid == 10
    if axis in "sth":  # there are keys, whose gradient is zero
        assert sum(x.grid for x in named(launches, "sparse_attention_bwd_finish")) > 0
    if axis in "bskt":  # and heads, whose sinks' gradient is
        assert named(launches, "sparse_attention_bwd_sinks_sum")[0].grid == 1


@pytest.mark.parametrize("axis", "skth")
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_arrays_may_lie_nowhere_and_be_reversed(launches, shared, axis, deterministic):
    """Their address is null, their batch stride negative, and a cap makes a pass of batch row 1."""
    spec = spec_of(**{axis: 0})
    shapes = {"grad_out": "bshd", "q": "bshd", "kv": "bkd", "out": "bshd"}
    sizes = {"b": 2, "s": spec.queries, "h": spec.heads, "d": 512, "k": spec.keys}
    options = {}
    for name, axes in shapes.items():
        shape = tuple(sizes[n] for n in axes)
        steps = [2 * int(np.prod([max(n, 1) for n in shape[i + 1 :]])) for i in range(len(shape))]
        array = SimpleNamespace(size=int(np.prod(shape)), ndim=len(shape), itemsize=2, strides=(-steps[0], *steps[1:]))
        options[f"{name}_strides"] = element_strides(array)
        options[name] = 0 if array.size == 0 else 2**50
    launch(spec, deterministic, 8 * 512 * max(spec.keys, 1), **options)
    assert any(x.name == MAIN for x in launches) or axis == "k"


@pytest.mark.parametrize("taken", [True, False])
def test_the_other_main_kernel_gets_the_calls_that_fit(monkeypatch, launches, shared, taken):
    asked, made = [], []
    monkeypatch.setattr(cuda_bwd, "forced_path", None)
    monkeypatch.setattr(cuda_bwd_sm90, "fits", lambda spec, device: asked.append(spec.batch) or True)
    monkeypatch.setattr(cuda_bwd_sm90, "describes", lambda *_: True)
    monkeypatch.setattr(cuda_bwd_sm90, "launch", lambda **arguments: made.append(arguments) or taken)
    launch(spec_of(d=64), True, cap=8 * 64 * 64, stream=7)
    assert asked == [2], "once for the call, not for its passes"
    assert [(x["parts"], x["key_first"], x["key_last"]) for x in made] == [
        (1, 0, 100), (2, 0, 64), (2, 64, 100), (2, 0, 64), (2, 64, 100),
    ]  # fmt: skip
    assert [x["spec"].batch for x in made] == [2, 1, 1, 1, 1]
    assert {x["stream"] for x in made} == {7}
    assert len(named(launches, MAIN)) == (0 if taken else 5), "what it refuses goes to the portable kernel"
    launches.clear()
    monkeypatch.setattr(cuda_bwd_sm90, "fits", lambda spec, device: False)
    launch(spec_of())
    assert len(named(launches, MAIN)) == 1


def test_hoppers_kernel_finds_what_it_needs_of_each_query_unless_exponents_do(monkeypatch, launches, shared):
    made = []
    monkeypatch.setattr(cuda_bwd, "forced_path", None)
    monkeypatch.setattr(cuda_bwd_sm90, "fits", lambda spec, device: True)
    monkeypatch.setattr(cuda_bwd_sm90, "describes", lambda *_: True)
    monkeypatch.setattr(cuda_bwd_sm90, "launch", lambda **arguments: made.append(arguments) or True)
    monkeypatch.setattr(cuda_bwd_sm90, "_map", lambda address, *_: None if refused == address else object())
    refused = None
    at = launch(spec_of())
    (main,) = made
    assert [main[name] for name in ("sinks", "out", "lse")] == [at[name] for name in ("sinks", "out", "lse")]
    assert main["out_strides"] == (32, 40, 48, 1)
    sinks = named(launches, "sparse_attention_bwd_sinks")[0]
    assert (main["log2_total"], main["delta"]) == (sinks.log2_total, sinks.delta)
    assert not named(launches, "sparse_attention_bwd_prep")
    refused = at["out"]
    launch(spec_of())
    assert len(named(launches, "sparse_attention_bwd_prep")) == 1, "strides of out that the driver refuses"
    refused = None
    launch(spec_of(), True)
    assert len(named(launches, "sparse_attention_bwd_prep")) == 2


@pytest.mark.parametrize("reversed_array", ["q", "grad_out"])
def test_passes_do_not_change_the_main_kernel(monkeypatch, launches, shared, reversed_array):
    # The driver takes a reversed batch axis of one row, but not of two: passes over one row must not notice.
    monkeypatch.setattr(cuda_bwd, "forced_path", None)
    monkeypatch.setattr(cuda_bwd_sm90, "fits", lambda spec, device: True)
    described = []

    def tensor_map(address, sizes, strides, dtype, heads):
        described.append((address, sizes, strides))
        return None if any(step < 0 for step, size in zip(strides, sizes, strict=True) if size > 1) else object()

    monkeypatch.setattr(cuda_bwd_sm90, "tensor_map", tensor_map)
    monkeypatch.setattr(cuda_bwd_sm90, "launch", lambda **_: pytest.fail("this pass would have other bits"))
    strides = {"q": (2560, 512, 64, 1), "grad_out": (2560, 512, 64, 1)}
    strides[reversed_array] = (-2560, 512, 64, 1)
    at = launch(
        spec_of(d=64), True, cap=8 * 64 * 64, **{f"{name}_strides": of for name, of in strides.items()}
    )
    assert [x.defines["PARTS"] for x in named(launches, MAIN)] == [1, 2, 2, 2, 2]
    assert described == [(at[name], (8, 5, 2), strides[name][2::-1]) for name in ("q", "grad_out")]


def test_a_device_without_the_memory_is_told(monkeypatch, shared, launches):
    device = SimpleNamespace(attributes={"MaxSharedMemoryPerBlockOptin": 65536})
    monkeypatch.setattr(cuda_bwd_mma.cupy.cuda, "Device", lambda _: device)
    with pytest.raises(RuntimeError, match="99 KB"):
        launch(spec_of())


# --- Passes and memory ---------------------------------------------------------------------------------


def covered(spec, cap):
    """How often the passes of a call add each key to sums, [B, K], and write grad_q, [B]; the largest sums in bytes."""
    plan = cuda_bwd_passes.layout(spec, True, cap)
    added, written, largest = np.zeros((spec.batch, spec.keys), int), np.zeros(spec.batch, int), 0
    for b, b_end, key, key_end, parts in cuda_bwd_passes.passes(spec, plan):
        if parts & 2:
            added[b:b_end, key:key_end] += 1
            largest = max(largest, 8 * (b_end - b) * (key_end - key) * spec.dim)
        if parts & 1:
            written[b:b_end] += 1
            assert (key, key_end) == (0, spec.keys)
    assert plan.sums + largest <= plan.size
    return added, written, largest


@pytest.mark.parametrize("share", [7, 3, 2.5, 1, 0.999, 0.5, 0.32])
def test_passes_stay_within_the_cap(share):
    spec = spec_of(b=3, k=200, d=64)
    cap = int(share * 8 * 200 * 64)
    added, written, largest = covered(spec, cap)
    assert (added == 1).all()
    assert (written == 1).all()
    assert cap // 4 < largest <= cap or share > 3


def test_a_cap_below_one_step_names_the_least():
    for keys, least in ((200, 8 * 64 * 64), (10, 8 * 10 * 64)):
        spec = spec_of(k=keys, d=64)
        assert (covered(spec, least)[0] == 1).all()
        with pytest.raises(ValueError, match=f"at least {least} "):
            cuda_bwd_passes.layout(spec, True, least - 1)
        cuda_bwd_passes.layout(spec, False, 1)  # float32 sums are not cut


def test_the_default_cap_takes_long_sequences():
    for queries, pooled in ((65536, 16384), (2**20, 2**18)):
        spec = spec_of(b=1, s=queries, h=64, k=queries + pooled, t=640)
        added, _, largest = covered(spec, GIB2)
        assert (added == 1).all()
        assert largest <= GIB2
        plan = cuda_bwd_passes.layout(spec, True, GIB2)
        assert plan.sums < 10 * queries * 64, "the rest is small: two numbers a head, two a query, five a key"


@pytest.mark.parametrize("deterministic", [False, True])
def test_arrays_do_not_overlap(deterministic):
    spec = spec_of(b=2, s=129, h=65, k=77, d=64)
    plan = cuda_bwd_passes.layout(spec, deterministic, GIB2)
    head, query, key = 4 * 2 * 129 * 65, 4 * 2 * 129, 4 * 2 * 77
    names = ["log2_total", "delta", "sink_parts"]
    sizes = [head, head, 4 * 5 * 65]
    if deterministic:
        names += ["key_part", "rest", "bounds", "exponents"]
        sizes += [query, query, 4 * key, key]
    names.append("sums")
    sizes.append((8 if deterministic else 4) * 2 * 77 * 64)
    offsets = [getattr(plan, name) for name in names]
    for at, size, following in zip(offsets, sizes, [*offsets[1:], plan.size], strict=True):
        assert at % 16 == 0
        assert at + size <= following


def test_passes_are_launched(launches, shared):
    spec = spec_of(b=2, k=100, d=64)
    at = launch(spec, True, cap=8 * 64 * 64)
    main, finish = named(launches, MAIN), named(launches, "sparse_attention_bwd_finish")
    assert [(x.defines["PARTS"], x.first_key, x.range) for x in main] == [
        (1, 0, 100), (2, 0, 64), (2, 64, 36), (2, 0, 64), (2, 64, 36),
    ]  # fmt: skip
    assert [x.grid for x in main] == [10, 5, 5, 5, 5]
    assert [x.q - at["q"] for x in main] == [0, 0, 0, 6, 6]
    assert [x.kv - at["kv"] for x in main] == [0, 0, 0, 2**34, 2**34]
    assert [x.ids - at["ids"] for x in main] == [0, 0, 0, 4 * 35, 4 * 35]
    assert [x.grad_out - at["grad_out"] for x in main] == [0, 0, 0, 16, 16]
    assert [x.exponents - main[0].exponents for x in main] == [0, 0, 0, 400, 400]
    assert [x.delta - main[0].delta for x in main] == [0, 0, 0, 160, 160]
    assert [(x.first_key, x.rows, x.batch) for x in finish] == [(0, 64, 1), (64, 36, 1)] * 2
    assert [x.grad_kv - at["grad_kv"] for x in finish] == [0, 0, 12800, 12800]
    zero = named(launches, "sparse_attention_bwd_zero")
    assert [x.chunks for x in zero[1:]] == [64 * 64 // 2, 36 * 64 // 2] * 2
