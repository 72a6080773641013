"""The golden cases: small inputs with the right answer, each on every backend that can show it, forward and backward.

TABLE says which ops show which case; ways are the fuzzer's, so that a new backend is in by being offered. A case fails
where an op of the table ran on no way. `python -m pytest tests/test_golden.py -rP` prints what ran where.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dsv4cp  # noqa: E402
from tests.support.fuzz_arrays import Canaries, Held, Way, hold, numpy_of  # noqa: E402
from tests.support.fuzz_ops import OPS, Refused, value  # noqa: E402

INF = math.inf
ATTENTION, GRADIENT = "attention", "attention gradient"
TABLE = {
    1: (ATTENTION, GRADIENT, "dense attention"),
    2: (ATTENTION, GRADIENT, "dense attention"),
    3: (ATTENTION, GRADIENT, "dense attention", "plan"),
    4: (ATTENTION, GRADIENT, "plan"),
    5: (ATTENTION, GRADIENT),
    6: (ATTENTION, GRADIENT, "dense attention"),
    7: (ATTENTION, GRADIENT),
    8: (ATTENTION, GRADIENT, "dense attention"),
    9: (ATTENTION, GRADIENT, "plan"),
    10: (ATTENTION, GRADIENT),
    11: (ATTENTION, GRADIENT),
    12: ("index top-k", "selection", "index lists"),
    13: ("index scores", "index scores gradient", "index top-k", "selection", "index lists"),
    14: ("index top-k",),
    15: ("selection",),
    16: ("selection",),
    17: ("selection",),
    18: ("Sinkhorn",),
    19: ("Sinkhorn gradient",),
    20: (GRADIENT, "Sinkhorn gradient", "index scores gradient", "index scores at ids gradient"),
    21: (ATTENTION, "selection", "extraction", "Sinkhorn"),
    22: (ATTENTION, "Sinkhorn", "index scores"),
    # 23, side streams: tests/test_everywhere_gpu.py. 24, recompilations: the last test here, on a GPU.
    25: ("index lists",),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def ran(request):
    """op -> ways that ran; at the end every op of the case must be there."""
    found: dict[str, list[str]] = defaultdict(list)
    yield found
    number = int(request.node.originalname.split("_")[1])
    for op in TABLE[number]:
        print(f"golden {number}, {op}: {', '.join(found[op]) or 'nothing'}")
        assert found[op], f"golden case {number}: {op} ran nowhere"


def ways(name: str, device: str, ran) -> Iterator[Way]:
    for way in distinct(name, device):
        yield way
        ran[name].append(str(way))


def distinct(name: str, device: str) -> list[Way]:
    """Without names that stand for another way of the list on this device."""
    found = OPS[name].ways(device)
    alias = ("sparse_torch",) if device == "cuda" else ("sparse_torch", "auto")
    return [way for way in found if way.library != "torch" or way.backend not in alias or len(found) == 1] or found


def put(way: Way, x, dtype: str | None = None) -> Held:
    """A NumPy array or list as an input of a way."""
    t = torch.as_tensor(np.asarray(x)).to(way.device)
    return hold(t if dtype is None else t.to(getattr(torch, dtype)), "contiguous", 0xFF if t.is_floating_point() else 0)


def run(name: str, way: Way, held: dict[str, Held], **options) -> list[np.ndarray | None] | None:
    """Results as float64 or integer NumPy arrays; None where the backend refuses."""
    op = OPS[name]
    case = {"op": name, "way": str(way), **op.plain(), **options}
    try:
        got = [None if x is None else way.take(x).cpu() for x in op.run(way, case, held)]
    except Refused:
        return None
    return [None if x is None else (x.double() if x.is_floating_point() else x).numpy() for x in got]


# --- Attention -----------------------------------------------------------------------------------------------


class Call:
    """One attention call with its gradient on a way, in the dtypes that the way takes."""

    def __init__(self, way: Way, q, kv, sinks, ids, scale=1.0, g=None, dtype: str | None = None) -> None:
        self.way = way
        self.dtype = dtype or ("float32" if way.reference else "bfloat16")
        g = np.ones_like(np.asarray(q, float)) if g is None else g
        arrays = {"q": q, "kv": kv, "g": g}
        self.held = {n: put(way, np.asarray(x, float), self.dtype) for n, x in arrays.items()}
        self.held["sinks"] = put(way, np.asarray(sinks, float), "float32")
        self.held["ids"] = put(way, ids)
        dim = self.held["q"].view.shape[3]
        self.options = {"D": dim, "scale": scale * dim**0.5, "values": "normal", "dtype": self.dtype}
        self.close = 2e-6 if self.dtype == "float32" else 5e-3

    def forward(self):
        """(out, lse)."""
        with Canaries(self.way, 0xFF) as canaries:
            got = run(ATTENTION, self.way, self.held, **self.options)
        assert not canaries.broken()
        return got

    def dense(self):
        return run("dense attention", self.way, self.held, **self.options)[0]

    def backward(self, impl: str = "atomic"):
        """(grad_q, grad_kv, grad_sinks), or None where the way does not offer the implementation."""
        if self.way.library != "torch":  # chained to what the forward call of the same kind saves
            kind = Way(self.way.library, self.way.device, "auto")
            op = OPS[ATTENTION]
            case = {"op": ATTENTION, "way": str(kind), **op.plain(), **self.options}
            out, lse = op.run(kind, case, self.held)
            self.held["out"], self.held["lse"] = (hold(kind.take(x), "contiguous", 0xFF) for x in (out, lse))
        with Canaries(self.way, 0xFF) as canaries:
            got = run(GRADIENT, self.way, self.held, impl=impl, **self.options)
        assert not canaries.broken()
        return got


def near(got, want, close: float) -> None:
    np.testing.assert_allclose(got, want, rtol=close, atol=close)


def f1(ids, *, sink=0.0, nan_rows=(), keys=4):
    """q, kv, sinks, ids, scale, g: all zero but channel 0."""
    q, kv = np.zeros((1, 1, 1, 512)), np.zeros((1, keys, 512))
    q[..., 0] = 1
    kv[0, :, 0] = range(keys)
    kv[0, list(nan_rows)] = np.nan
    return q, kv, [sink], [[ids]], 1.0, q.copy()


def random(b=2, s=5, h=3, d=64, k=9, t=7, seed=0):
    rng = np.random.default_rng(seed)
    q, g, kv = rng.standard_normal((b, s, h, d)), rng.standard_normal((b, s, h, d)), rng.standard_normal((b, k, d))
    return q, kv, rng.standard_normal(h), rng.integers(-2, k + 2, (b, s, t)), d**-0.5, g


def forwards(device, ran, *arguments) -> Iterator[tuple[Call, np.ndarray, np.ndarray]]:
    """(call, out, lse) of every forward way."""
    for way in ways(ATTENTION, device, ran):
        call = Call(way, *arguments)
        if (got := call.forward()) is not None:
            yield call, got[0], got[1]


def backwards(device, ran, *arguments) -> Iterator[tuple[Call, list[np.ndarray]]]:
    """(call, gradients) of every gradient way, both implementations."""
    for way in ways(GRADIENT, device, ran):
        for impl in ("atomic", "deterministic"):
            call = Call(way, *arguments)
            if (got := call.backward(impl)) is not None:
                yield call, got


def denses(device, ran, *arguments) -> Iterator[tuple[Call, np.ndarray]]:
    for way in ways("dense attention", device, ran):
        call = Call(way, *arguments)
        yield call, call.dense()


@pytest.mark.parametrize("sink", [0.0, -INF, INF])
def test_1_row_without_keys(device, ran, sink):
    empty = f1([-1] * 4, sink=sink)
    for _, out, lse in forwards(device, ran, *empty):
        assert (out == 0).all() and np.isneginf(lse).all()
    for _, out in denses(device, ran, *empty):
        assert (out == 0).all()
    for _, grads in backwards(device, ran, *empty):
        assert all((x == 0).all() for x in grads)
    q, kv, _, ids, scale, g = random()
    sinks = [sink, 0.5, -0.5]
    with_keys, without = ids.copy(), ids.copy()
    with_keys[:, 1], without[:, 1] = 3, -1
    others = [0, 2, 3, 4]
    for way in distinct(ATTENTION, device):
        got, want = (Call(way, q, kv, sinks, x, scale).forward() for x in (without, with_keys))
        if got is None:
            continue
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a[:, others], b[:, others], equal_nan=True)
    for way in distinct(GRADIENT, device):
        got, want = (Call(way, q, kv, sinks, x, scale, g).backward() for x in (without, with_keys))
        if got is None:
            continue
        assert (got[0][:, 1] == 0).all() and np.array_equal(got[0][:, others], want[0][:, others])


@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_2_masked_slots_before_valid_ones(device, ran, n):
    x = f1([-1] * n + [0, 1])
    for call, out, lse in forwards(device, ran, *x):
        near((out[0, 0, 0, 0], lse[0, 0, 0]), (0.57611688, 1.31326169), call.close)
    for call, out in denses(device, ran, *x):
        near(out[0, 0, 0, 0], 0.57611688, call.close)
    for call, (dq, dkv, dsink) in backwards(device, ran, *x):
        near(dq[0, 0, 0, 0], 0.24420621, 2 * call.close)
        near(dkv[0, :, 0], [0.08983845, 0.82032310, 0, 0], 2 * call.close)
        near(dsink[0], -0.12210311, 2 * call.close)


def test_3_ids_out_of_range(device, ran):
    x = f1([3, 4, 7, -5])
    for call, out, lse in forwards(device, ran, *x):
        near((out[0, 0, 0, 0], lse[0, 0, 0]), (2.85772238, 3.0), call.close)
    for call, out in denses(device, ran, *x):
        near(out[0, 0, 0, 0], 2.85772238, call.close)
    for call, (_, dkv, dsink) in backwards(device, ran, *x):
        near(dkv[0, :, 0], [0, 0, 0, 1.08810411], 2 * call.close)
        near(dsink[0], -0.13552998, 2 * call.close)
    for way in ways("plan", device, ran):
        got = run("plan", way, {"ids": put(way, [[[3, 4, 7, -5]]])}, K=4)
        assert got[0].tolist() == [[[3, -1, -1, -1]]]


def test_4_id_of_another_batch_row(device, ran):
    q, kv, sinks, ids, scale, g = random(k=8)
    ids = np.clip(ids, -1, 7)
    ids[0, :, 0] = 9
    kv[1] = 3e4
    ids[1] = -1
    alone = ids.copy()
    alone[0, :, 0] = -1
    for call, out, lse in forwards(device, ran, q, kv, sinks, ids, scale):
        want = Call(call.way, q[:1], kv[:1], sinks, alone[:1], scale).forward()
        assert np.array_equal(out[:1], want[0]) and np.array_equal(lse[:1], want[1]) and (out[1] == 0).all()
    for call, (dq, dkv, _) in backwards(device, ran, q, kv, sinks, ids, scale, g):
        assert (dkv[1] == 0).all() and (dq[1] == 0).all()
        want = Call(call.way, q[:1], kv[:1], sinks, alone[:1], scale, g[:1]).backward()
        near(dkv[:1], want[1], max(8 * call.close, 1e-4))
    for way in ways("plan", device, ran):
        got = run("plan", way, {"ids": put(way, [[[9, 1]], [[9, 1]]])}, K=8, **{"layout of plan": "cudnn"})
        assert got[0][:, 0, :2].tolist() == [[1, -1], [9, -1]] and got[1].tolist() == [1, 1]


def test_5_gradient_chain(device, ran):
    x = f1([0, 1, -1, -1])
    for call, out, lse in forwards(device, ran, *x):
        near((out[0, 0, 0, 0], lse[0, 0, 0]), (0.57611688, 1.31326169), call.close)
    for call, (dq, dkv, dsink) in backwards(device, ran, *x):
        near(dq[0, 0, 0, 0], 0.24420621, 2 * call.close)
        near(dkv[0, :, 0], [0.08983845, 0.82032310, 0, 0], 2 * call.close)
        near(dsink[0], -0.12210311, 2 * call.close)
        assert (dq[..., 1:] == 0).all() and (dkv[..., 1:] == 0).all()


def test_6_repeated_id(device, ran):
    x = f1([1, 1, -1, -1])
    for call, out, lse in forwards(device, ran, *x):
        near((out[0, 0, 0, 0], lse[0, 0, 0]), (0.84463760, 1.69314718), call.close)
    for call, out in denses(device, ran, *x):
        near(out[0, 0, 0, 0], 0.84463760, call.close)
    p = math.e / (2 * math.e + 1)  # of each of the two slots
    delta = 2 * p
    for call, (dq, dkv, dsink) in backwards(device, ran, *x):
        ds = p * (1 - delta)
        near(dq[0, 0, 0, 0], 2 * ds, 4 * call.close)
        near(dkv[0, :, 0], [0, 2 * (ds + p), 0, 0], 2 * call.close)
        near(dsink[0], -(1 - delta) * delta, 4 * call.close)


def test_7_minus_one_is_no_row_before_the_buffer(device, ran):
    q, kv, sinks, ids, scale, g = random()
    ids[:, :, 0] = -1
    for name, results in ((ATTENTION, 2), (GRADIENT, 3)):
        for way in ways(name, device, ran):
            call = Call(way, q, kv, sinks, ids, scale, g)
            kept = call.held["kv"].view
            parent = torch.full((2, 11, 64), math.nan, dtype=kept.dtype, device=way.device)
            parent[:, 1:-1] = kept
            call.held["kv"] = Held(parent[:, 1:-1], parent, parent.clone())
            got = call.forward() if results == 2 else call.backward()  # canaries lie around every result
            assert got is None or not any(np.isnan(x).any() for x in got)


def test_8_nan_in_unselected_rows(device, ran):
    x = f1([1, 2, -1, -1], nan_rows=(0, 3))
    for call, out, lse in forwards(device, ran, *x):
        near((out[0, 0, 0, 0], lse[0, 0, 0]), (1.57521038, 2.31326169), call.close)
        assert np.isfinite(out).all()
    for call, out in denses(device, ran, *x):
        near(out[0, 0, 0, 0], 1.57521038, call.close)
    for _, (dq, dkv, dsink) in backwards(device, ran, *x):
        assert all(np.isfinite(y).all() for y in (dq, dkv, dsink))
        assert (dkv[0, [0, 3]] == 0).all() and (dkv[0, [1, 2], 0] != 0).all()


def test_9_more_slots_than_rows(device, ran):
    q, kv, sinks, _, scale, g = random(k=8)
    wide = np.full((2, 5, 640), -1)
    wide[..., 600:608] = range(8)
    for call, out, lse in forwards(device, ran, q, kv, sinks, wide, scale):
        want = Call(call.way, q, kv, sinks, wide[..., 600:608], scale).forward()
        near(out, want[0], max(call.close, 1e-5))
        near(lse, want[1], 1e-5)
    for call, grads in backwards(device, ran, q, kv, sinks, wide, scale, g):
        want = Call(call.way, q, kv, sinks, wide[..., 600:608], scale, g).backward()
        for a, b in zip(grads, want, strict=True):
            near(a, b, max(8 * call.close, 1e-4))
    for way in ways("plan", device, ran):
        got = run("plan", way, {"ids": put(way, wide)}, K=8, **{"layout of plan": "cudnn"})
        assert (got[0][:5, 0, :8] == range(8)).all() and (got[0][:, 0, 8:] == -1).all()


def judged(name: str, way: Way, held: dict[str, Held], options: dict) -> None:
    """The call against the float64 oracle."""
    from tests.support.fuzz_ops import Verdict

    op = OPS[name]
    case = {"op": name, "way": str(way), **op.plain(), **options}
    try:
        got = [way.take(x) for x in op.run(way, case, held)]
    except Refused:
        return
    v = Verdict(detail=True)
    op.judge(way, case, held, got, v)
    assert not v.failed(), (str(way), v.notes)


@pytest.mark.parametrize("slots", [1, 2, 3, 63, 65, 129, 192, 640, 705, 1152])
def test_10_slot_width(device, ran, slots):
    for name in (ATTENTION, GRADIENT):
        for way in ways(name, device, ran):
            call = Call(way, *random(b=1, s=2, h=3, k=300, t=slots))
            judged(name, way, call.held, call.options)


@pytest.mark.parametrize("heads", [1, 3, 8, 24, 31, 32, 33, 48, 64, 96, 128])
def test_11_head_counts(device, ran, heads):
    dim = 512 if device == "cuda" else 64
    for name in (ATTENTION, GRADIENT):
        for way in ways(name, device, ran):
            call = Call(way, *random(b=1, s=2, h=heads, d=dim, k=40, t=9))
            judged(name, way, call.held, call.options)


# --- Indexer -------------------------------------------------------------------------------------------------


def index_inputs(way: Way, b, s, p, *, heads=64, dim=128, seed=0) -> dict[str, Held]:
    dtype = "float32" if way.reference else "bfloat16"
    rng = np.random.default_rng(seed)
    arrays = {"q": (b, s, heads, dim), "k": (b, p, dim), "w": (b, s, heads)}
    return {n: put(way, rng.standard_normal(shape), dtype) for n, shape in arrays.items()}


NO_DOCUMENTS = {"documents": False, "start": 0}


@pytest.mark.parametrize(("s", "p"), [(8, 2), (3, 0)])
def test_12_fewer_entries_than_slots(device, ran, s, p):
    visible = [(i + 1) // 4 for i in range(s)]
    for way in ways("index top-k", device, ran):
        got = run("index top-k", way, index_inputs(way, 1, s, p), R=4, topk=512, **NO_DOCUMENTS)
        if got is not None:
            assert got[0].shape == (1, s, 512)
            assert [[j for j in row if j >= 0] for row in got[0][0].tolist()] == [list(range(n)) for n in visible]
    for way in ways("selection", device, ran):
        got = run("selection", way, {"scores": put(way, np.zeros((s, p)), "float32")}, topk=512)
        assert got[0].shape == (s, 512) and (got[0][:, p:] == -1).all() and (got[0][:, :p] == range(p)).all()
    for way in ways("index lists", device, ran):
        given = np.full((1, s, 512), -1)
        given[:, :, : min(p, 1)] = 0
        held = {"compressed_topk": put(way, given), "like": put(way, [0.0], "float32")}
        sizes = {"B": 1, "N": s, "K": s + p, "W": 2, "P": p, "R": 4, "dtype": "int64"}
        got = run(
            "index lists",
            way,
            held if way.library != "torch" else {"compressed_topk": held["compressed_topk"]},
            **sizes,
        )
        assert (got[0][:, :, min(2, s) + 1 :] == -1).all()


def test_13_unfinished_groups_are_hidden(device, ran):
    want = [0, 0, 0, 1, 1, 1, 1, 2, 2]
    for way in ways("index scores", device, ran):
        held = index_inputs(way, 1, 9, 3)
        got = run("index scores", way, held, R=4, **NO_DOCUMENTS)
        if got is None or (way.library == "torch" and not np.isneginf(got[0]).any()):
            continue  # torch's reference leaves scores unmasked, as the mirrored module does
        assert [(row > -INF).sum() for row in got[0][0]] == want
        for entry in range(3):  # an entry changes no row that must not see it
            other = index_inputs(way, 1, 9, 3)
            other["k"].view[:, entry] = math.nan
            again = run("index scores", way, other, R=4, **NO_DOCUMENTS)
            before = 4 * (entry + 1) - 1
            assert np.array_equal(again[0][:, :before], got[0][:, :before])
    for way in ways("index scores gradient", device, ran):
        if way.library == "torch" and way.backend != "tilelang":
            continue
        held = index_inputs(way, 1, 9, 3)
        held["g"] = put(way, np.ones((1, 9, 3)), "float32")
        got = run("index scores gradient", way, held, R=4, **NO_DOCUMENTS)
        if got is not None:
            assert (got[1][0, 2] == 0).all() and (got[1][0, 1] != 0).any() and (got[0][0, :3] == 0).all()
    for way in ways("index top-k", device, ran):
        got = run("index top-k", way, index_inputs(way, 1, 9, 3), R=4, topk=4, **NO_DOCUMENTS)
        if got is not None:
            assert [(row >= 0).sum() for row in got[0][0]] == want
    for way in ways("selection", device, ran):
        given = np.where(np.arange(3) < np.array(want)[:, None], -1.0, INF)
        got = run("selection", way, {"scores": put(way, given, "float32")}, R=4, topk=4)
        assert [(row >= 0).sum() for row in got[0]] == want
    for way in ways("index lists", device, ran):
        held = {} if way.library == "torch" else {"like": put(way, [0.0], "float32")}
        got = run("index lists", way, held, B=1, N=9, K=11, W=0, P=2, R=4, dtype="int64", positions="none")
        assert [(row >= 0).sum() for row in got[0][0]] == want


def test_14_masked_beats_negative(device, ran):
    for way in ways("index top-k", device, ran):
        held = index_inputs(way, 1, 5, 2)
        for n, x in (("q", 0.0), ("k", 0.0), ("w", 0.0)):
            held[n].view.fill_(x)
        held["q"].view[..., 0, 0], held["k"].view[..., 0], held["w"].view[..., 0] = 1.0, 5.0, -1.0
        got = run("index top-k", way, held, R=4, topk=4, E=128, scale=128**0.5, **NO_DOCUMENTS)
        if got is not None:
            assert got[0][0, 4].tolist() == [0, -1, -1, -1]


def selected(way: Way, scores, k: int, order: str = "id") -> list:
    held = {"scores": put(way, np.asarray(scores, np.float32)[None])}
    return run("selection", way, held, topk=k, order=order, **{"return scores": False})[0][0].tolist()


def test_15_ties(device, ran):
    scores = np.zeros(8320)
    winners = np.random.default_rng(0).permutation(8320)[:100]
    scores[winners] = np.arange(1, 101)
    for way in ways("selection", device, ran):
        ids = selected(way, scores, 2048)
        zeros = [j for j in range(8320) if j not in set(winners)][: 2048 - 100]
        assert ids == sorted([*winners, *zeros])
        assert selected(way, np.zeros(8320), 512) == list(range(512))


def test_16_nan_and_infinite_scores(device, ran):
    for way in ways("selection", device, ran):
        assert selected(way, [math.nan, 1, 2, -INF, 3], 4) == [1, 2, 4, -1]
        assert selected(way, [math.nan] * 5, 4) == [-1] * 4
        assert selected(way, [1, INF, 5, INF], 3, "score") == [1, 3, 2]


def test_17_scores_outside_half_range(device, ran):
    for way in ways("selection", device, ran):
        assert selected(way, -70000.0 - np.arange(1000), 64) == list(range(64))


# --- Sinkhorn ------------------------------------------------------------------------------------------------

A = np.array([[0, 1, 2, 3], [0, 0, 0, 0], [5, 0, 0, 0], [-3, 2, 1, 0.0]])
V4 = {"repeat": 20, "eps": 1e-6, "dtype": "float32"}


def test_18_sinkhorn_order_eps_count(device, ran):
    for way in ways("Sinkhorn", device, ran):
        (y,) = run("Sinkhorn", way, {"x": put(way, A, "float32")}, **V4)
        near((y[0, 0], y[2, 0]), (0.0079233363, 0.9183108937), 3e-6)
        near(y.sum(0), 0.999999, 1e-6)
        near(y.sum(1), (1.00096112, 1.00070383, 0.99732684, 1.00100421), 1e-6)
        high = A.copy()
        high[:, 0] = 200
        for x in (np.zeros((4, 4)), high):
            near(run("Sinkhorn", way, {"x": put(way, x, "float32")}, **V4)[0], 0.24999975, 1e-6)


def test_19_sinkhorn_gradient(device, ran):
    for way in ways("Sinkhorn gradient", device, ran):
        held = {"x": put(way, A, "float32"), "g": put(way, np.arange(16.0).reshape(4, 4), "float32")}
        (got,) = run("Sinkhorn gradient", way, held, **V4)
        np.testing.assert_allclose(got[0], (1.384507e-3, -3.46880e-5, -3.820463e-4, -9.677741e-4), atol=3e-6)


# --- Memory, numbers -----------------------------------------------------------------------------------------

LAYOUTS = ("padded", "odd", "every second", "transposed", "flipped", "stride 0")
GRADIENTS = {
    GRADIENT: {"B": 2, "S": 3, "H": 3, "K": 9, "T": 7, "impl": "deterministic", "id dtype": "int64"},
    "Sinkhorn gradient": {"leading": [9], "repeat": 20},
    "index scores gradient": {"B": 2, "S": 9, "P": 3},
    "index scores at ids gradient": {"B": 2, "S": 9, "P": 5, "T": 4},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_20_strided_gradients(device, ran, layout):
    """Bit-equal to the contiguous copy where the sums have a fixed order, else within the oracle's bound."""
    from tests.support.fuzz_ops import Verdict

    for name, sizes in GRADIENTS.items():
        op = OPS[name]
        for way in ways(name, device, ran):
            for change in ({}, {"impl": "atomic"}) if name == GRADIENT else ({},):
                case = {"op": name, "way": str(way), **op.plain(way), **sizes, **change}
                held = op.make(way, case)
                g = value(held["g"])
                held["g"] = hold(g, layout, 0xFF)
                plain = {**held, "g": hold(value(held["g"]).clone(), "contiguous", 0xFF)}
                try:
                    got, want = ([way.take(x) for x in op.run(way, case, h)] for h in (held, plain))
                except Refused:
                    continue
                v = Verdict(detail=True)
                fixed = (
                    device == "cpu" or name == "Sinkhorn gradient" or (name == GRADIENT and case["impl"] != "atomic")
                )
                if fixed and not (way.reference and device == "cuda"):
                    for n, (a, b) in enumerate(zip(got, want, strict=True)):
                        v.equal(f"result {n}", a, b)
                op.judge(way, case, held, got, v)
                assert not v.failed(), (str(way), layout, v.notes)


def test_21_views(device, ran):
    """scores [S, P + 8][:, :P], q from [B, H, S, D], kv backwards, x transposed: the same bits as copies."""
    changes = {
        ATTENTION: ({"q layout": "transposed"}, {"kv layout": "flipped"}, {"q layout": "padded", "kv layout": "odd"}),
        "selection": ({"layout": "padded"}, {"layout": "every second"}),
        "extraction": ({"layout": "padded"}, {"layout": "transposed"}),
        "Sinkhorn": ({"layout": "transposed"}, {"layout": "flipped"}),
    }
    sizes = {
        ATTENTION: {"B": 2, "S": 3, "H": 3, "K": 9, "T": 7},
        "selection": {"leading": [3], "P": 100, "topk": 16},
        "extraction": {"B": 2, "S": 3, "K": 64, "T": 33},
        "Sinkhorn": {"leading": [9], "repeat": 20},
    }
    for name, layouts in changes.items():
        op = OPS[name]
        for way in ways(name, device, ran):
            if way.backend == "cudnn":
                continue  # takes few shapes; its strides are in its own tests
            case = {"op": name, "way": str(way), **op.plain(way), **sizes[name]}
            want = [way.take(x) for x in op.run(way, case, op.make(way, case))]
            for change in layouts:
                held = op.make(way, {**case, **change})
                got = [way.take(x) for x in op.run(way, case, held)]
                for a, b in zip(got, want, strict=True):
                    assert np.array_equal(a.cpu().double().numpy(), b.cpu().double().numpy(), equal_nan=True), (
                        way,
                        change,
                    )
                assert all(bool((h.memory == h.kept).all()) for h in held.values())


def test_22_python_numbers(device, ran):
    """Numbers of any host kind; ids and sinks of any dtype; a number on the device is a TypeError."""
    from dsv4cp import torch_ops

    q, kv, sinks, ids, scale, _ = random()
    for way in ways(ATTENTION, device, ran):
        if way.backend == "cudnn":
            continue
        function = torch_ops.dsv4_sparse_attention if way.library == "torch" else dsv4cp.dsv4_sparse_attention
        call = Call(way, q, kv, sinks, ids, scale)
        a = {n: way.give(h) for n, h in call.held.items()}
        arrays = a["q"], a["kv"], a["sinks"], a["ids"]
        want = numpy_of(way.take(function(*arrays, 0.25, backend=way.backend)).cpu().float())
        for number in (np.float64(0.25), np.float32(0.25), np.array(0.25)):
            got = function(*arrays, number, backend=way.backend)
            assert np.array_equal(numpy_of(way.take(got).cpu().float()), want)
        few = way.give(put(way, ids, "int32"))
        got = function(*arrays[:3], few, 0.25, backend=way.backend)
        assert np.array_equal(numpy_of(way.take(got).cpu().float()), want)
        with pytest.raises(TypeError):
            function(*arrays, "0.25", backend=way.backend)
        if device == "cuda":
            with pytest.raises(TypeError, match="sm_scale"):
                function(*arrays, a["sinks"][0], backend=way.backend)
    for way in ways("Sinkhorn", device, ran):
        function = torch_ops.dsv4_sinkhorn_normalize if way.library == "torch" else dsv4cp.dsv4_sinkhorn_normalize
        x = way.give(put(way, A, "float32"))
        want = way.take(function(x, repeat=3, eps=0.125, backend=way.backend))
        for repeat, eps in ((np.int64(3), np.float32(0.125)), (np.array(3), np.array(0.125))):
            assert torch.equal(way.take(function(x, repeat=repeat, eps=eps, backend=way.backend)), want)
        with pytest.raises(TypeError):
            function(x, repeat=3.0, eps=0.125, backend=way.backend)
    for way in ways("index scores", device, ran):
        function = torch_ops.dsv4_indexer_scores if way.library == "torch" else dsv4cp.dsv4_indexer_scores
        arrays = [way.give(h) for h in index_inputs(way, 1, 5, 2).values()]
        numbers = {"compress_ratio": np.int32(4), "backend": way.backend}
        want = way.take(function(*arrays, softmax_scale=0.25, **numbers))
        assert torch.equal(way.take(function(*arrays, softmax_scale=np.float32(0.25), **numbers)), want)
        with pytest.raises(TypeError):
            function(*arrays, softmax_scale=None, **numbers)


def test_25_context_parallel(device, ran):
    for way in ways("index lists", device, ran):
        held = {"q_positions": put(way, [4, 5])}
        if way.library != "torch":
            held["like"] = put(way, [0.0], "float32")
        sizes = {"B": 1, "N": 8, "S": 2, "K": 10, "W": 4, "P": 2, "R": 4, "positions": "shared", "dtype": "int64"}
        got = run("index lists", way, held, **sizes)
        assert got[0].tolist() == [[[1, 2, 3, 4, 8, -1], [2, 3, 4, 5, 8, -1]]]


@pytest.mark.gpu
def test_24_recompilations(monkeypatch):
    """50 random lengths after a first call compile nothing, on every kernel."""
    from dsv4cp import _kernels

    loads: list[str] = []
    real = _kernels._load

    def load(kernel, device):
        loads.append(kernel.function)
        return real(kernel, device)

    rng = np.random.default_rng(0)
    for name in (ATTENTION, GRADIENT, "index scores", "index scores gradient", "index scores at ids", "index top-k"):
        op = OPS[name]
        for way in op.ways("cuda"):
            if way.reference or way.backend == "cudnn":
                continue
            base = {"op": name, "way": str(way), **op.plain(), "H": 64, "B": 2}
            count = []
            for n in range(50):
                s, k, t = (int(x) for x in rng.integers(1, 200, 3))
                case = {**base, "seed": n, "S": s, "K": k, "T": t, "P": k, "R": int(rng.integers(1, 9))}
                with monkeypatch.context() as patch:
                    patch.setattr(_kernels, "_load", load)
                    op.run(way, case, op.make(way, case))
                count.append(len(loads))
            # Widths that a kernel is specialised for come up in the first calls; later ones must add nothing.
            assert count[-1] == count[24], f"{name} on {way}: {loads[count[24] :]}"
            assert count[-1] - (count[0] if count else 0) <= 12, f"{name} on {way}"
