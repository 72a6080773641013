"""The fuzzer's bounds for attention in half types: what the kernels' arithmetic does to its inputs stays within them,
what a small mistake does, does not. The arithmetic is emulated (tests/support/emulate_attention.py); on a GPU the same
inputs go to the kernels.

FOUND are cases that earlier bounds called wrong, which took the errors of rounded operands for independent: equal p and
equal ds err alike. Those of float16 with small p lose digits to its smallest steps in p, ds, or in the saved out. Those
of INTEGERS have gradients far below the bounds of their sums, which sums of integers cannot hold.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from tests import fuzz  # noqa: E402
from tests.support import emulate_attention as kernels  # noqa: E402
from tests.support import fuzz_attention, oracle64  # noqa: E402
from tests.support.fuzz_arrays import Way  # noqa: E402
from tests.support.fuzz_base import Refused, Verdict, try_case  # noqa: E402
from tests.support.fuzz_ops import OPS, value  # noqa: E402

CPU, CUPY, AUTO, TORCH = (
    Way.parse(text) for text in ("torch/cpu/torch", "cupy/cuda/cuda", "cupy/cuda/auto", "torch/cuda/tilelang")
)
OUT, GRAD = "attention", "attention gradient"
FP16 = {"dtype": "float16", "kv dtype": "float16"}

FOUND = [
    (OUT, TORCH, 2111166846, {**FP16, "D": 64, "S": 2, "H": 8, "K": 2, "T": 300, "ids": "repeated", "values": "large"}),
    (OUT, TORCH, 1222640574, {"H": 3, "K": 2, "T": 300}),
    (OUT, AUTO, 317834473, {"H": 31, "K": 7, "T": 127, "ids": "repeated"}),
    (OUT, AUTO, 908389422, {"H": 17, "K": 2, "T": 127, "ids": "repeated"}),
    (GRAD, AUTO, 1559459259, {**FP16, "T": 1152, "ids": "repeated", "values": "large"}),
    (GRAD, AUTO, 686792709, {"H": 8, "T": 31, "ids": "repeated", "scale": 0.0}),
    (GRAD, CUPY, 184794120, {"S": 2, "K": 2, "T": 640, "empty rows": True, "sinks": "+inf", "g NaN": "one query"}),
    (GRAD, CUPY, 2036251135, {"H": 15, "T": 63, "ids": "repeated"}),
    (GRAD, AUTO, 1564692615, {"K": 2, "T": 129, "ids": "repeated", "sinks": "-inf", "values": "small"}),
    (GRAD, CUPY, 525488741, {"K": 2, "T": 192, "ids": "repeated", "sinks": "zero"}),
    (GRAD, Way.parse("torch/cuda/auto"), 928871161, {"H": 8, "T": 300, "scale": 0.0}),
    (GRAD, TORCH, 1082847101, {**FP16, "H": 15, "ids": "window", "sinks": "mixed"}),
    (GRAD, TORCH, 77389803, {**FP16, "H": 2, "ids": "window", "sinks": "mixed"}),
    (GRAD, TORCH, 1101858159, {**FP16, "K": 2, "values": "denormal"}),
    (GRAD, TORCH, 1986599699, {**FP16, "H": 8, "ids": "window", "sinks": "zero", "scale": 8.0}),
]

STEEP = {"H": 1, "K": 2, "values": "integers", "scale": 8.0, "impl": "deterministic"}
INTEGERS = [
    (GRAD, AUTO, 197312628, {**STEEP, "T": 3, "ids": "random"}),
    (GRAD, AUTO, 36956381, {**STEEP, "T": 1, "ids": "window"}),
]
FOUND += INTEGERS


def case_of(name: str, way: Way, seed: int, sizes: dict) -> dict:
    plain = OPS[name].plain(way) | {"dtype": "bfloat16", "kv dtype": "bfloat16", "D": 512}
    return {"op": name, "way": str(way), **plain, "seed": seed, **sizes}


def verdict(case: dict, mistake: kernels.Mistake = kernels.right, coarse: int = 0) -> Verdict:
    """The emulated kernels' answer to the inputs of a GPU's case, judged by the bounds of the case's way.

    coarse: bits that sums of integers have too few.
    """
    op, way = OPS[case["op"]], Way.parse(case["way"])
    held = op.make(CPU, case)
    q, kv, sinks, ids = (value(held[n]) for n in ("q", "kv", "sinks", "ids"))
    scale, v = op._scale(case), Verdict(detail=True)
    if way.library == "cupy" and op.gradient:
        op.save(way, case, held)
        out, lse = held["out"].view, held["lse"].view
    else:
        out, lse = kernels.forward(q, kv, sinks, ids, scale, mistake)
    got = (out, lse)
    if op.gradient:
        fixed = coarse if case["impl"] == "deterministic" else None
        got = kernels.backward(value(held["g"]), q, kv, sinks, ids, out, lse, scale, mistake, fixed)
    op.judge(way, case, held, list(got), v)
    return v


@pytest.fixture(autouse=True)
def whole_cases(monkeypatch):
    """As many queries as on a GPU."""
    monkeypatch.setattr(fuzz_attention, "CPU_COST", fuzz_attention.COST)


@pytest.mark.parametrize("n", range(len(FOUND)))
def test_bounds_hold_what_the_kernels_arithmetic_does(n):
    v = verdict(case_of(*FOUND[n]))
    assert not v.failed(), v.notes


@pytest.mark.gpu
@pytest.mark.parametrize("n", range(len(FOUND)))
def test_bounds_hold_what_the_kernels_do(n):
    case = case_of(*FOUND[n])
    try:
        v = try_case(OPS[case["op"]], case, detail=True)
    except Refused as reason:
        pytest.skip(str(reason))
    assert not v.failed(), v.notes


@pytest.mark.parametrize("n", range(len(INTEGERS)))
def test_bounds_of_integer_sums_are_no_wider_than_their_resolution(n):
    """Two bits fewer are found."""
    assert verdict(case_of(*INTEGERS[n])).labels and verdict(case_of(*INTEGERS[n]), coarse=2).failed() == ["grad_kv"]


@pytest.mark.parametrize("impl", ["deterministic", "atomic"])
def test_bounds_of_the_indexers_integer_sums(impl):
    """Two queries name an entry: one with a large bound, which adds nothing, and one that adds 2^-65 a column. A sum of
    integers is a multiple of 2^-62 then; one of float32 holds it."""
    name, scale, small = "index scores at ids gradient", 2.0**-3, 2.0**-62
    op = OPS[name]
    case = {"op": name, "way": str(CUPY), **op.plain(CUPY), "E": 64, "I": 1, "S": 2, "T": 1, "impl": impl, "seed": 1}
    held = op.make(CPU, case | {"ids": "all"})
    for array, numbers in (("q", (-1.0, 1.0)), ("w", (1.0, 1.0)), ("g", (1.0, small))):
        for s, x in enumerate(numbers):
            held[array].view[:, s] = x
    held["k"].view.fill_(1.0)
    q, k, w = (held[n].view for n in ("q", "k", "w"))
    grad_q, grad_w = torch.zeros_like(q), torch.zeros_like(w)
    grad_q[:, 1], grad_w[:, 1] = scale * small, 64 * scale * small

    def failed(column: float) -> list[str]:
        v = Verdict(detail=True)
        op.judge(CUPY, case, held, [grad_q, torch.full_like(k, column), grad_w], v)
        return v.failed()

    assert failed(scale * small) == [] and failed(4 * small) == ["grad_k"]
    assert failed(0.0) == ([] if impl == "deterministic" else ["grad_k"])


# --- Random cases, right and with a mistake --------------------------------------------------------------------


def small_weight_dropped(_: str, x: torch.Tensor) -> torch.Tensor:
    """The last slot of a block, unless it is a multiple of 16 long, where every head gives it little."""
    if x.shape[1] % 16 and bool((x[:, -1].abs() < 2.0**-4 * x.abs().sum(1)).all()):
        x = x.clone()
        x[:, -1] = 0.0
    return x


def one_head_larger(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "p":
        x = x.clone()
        x[0] *= 1 + 2.0**-6
    return x


def truncated(_: str, x: torch.Tensor) -> torch.Tensor:
    """Operands lose two more bits than bfloat16 has to lose."""
    return (x.view(torch.int32) & ~0x3FFFF).view(torch.float32)


def random_cases(name: str, dtype: str, count: int) -> list[dict]:
    rng, found = random.Random(f"{name} {dtype}"), []
    while len(found) < count:
        case = fuzz.random_case(OPS[name], CUPY, rng)
        case |= {"dtype": dtype, "kv dtype": dtype, "D": 64, "S": min(case["S"], 2)}
        case |= {"rounding": False, "selected NaN": False}
        if case["T"] * case["H"] < 20000 and 0 not in (case["B"], case["S"], case["K"], case["T"]):
            found.append(case)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [OUT, GRAD])
def test_random_cases_stay_within_the_bounds(name, dtype):
    for case in random_cases(name, dtype, 60):
        v = verdict(case)
        assert not v.failed(), (case, v.notes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [OUT, GRAD])
@pytest.mark.parametrize("mistake", [small_weight_dropped, one_head_larger, truncated])
def test_small_mistakes_are_found(name, dtype, mistake):
    """In a twentieth of the cases at least: of the 10,000 of a run, hundreds."""
    cases = random_cases(name, dtype, 60)
    assert sum(bool(verdict(case, mistake).failed()) for case in cases) >= len(cases) // 20


def test_the_bound_of_a_sum_is_the_sum_of_bounds():
    """T slots that name one key: p errs alike in all, and so the bound must not shrink with T."""
    case = case_of(OUT, AUTO, 1, {"D": 64, "T": 1024, "ids": "same", "K": 1})
    op = OPS[OUT]
    held = op.make(CPU, case)
    arrays = [value(held[n]) for n in ("q", "kv", "sinks", "ids")]
    (out, bound), _ = oracle64.Attention(*arrays, op._scale(case), "bfloat16").forward()
    (_, exact), _ = oracle64.Attention(*arrays, op._scale(case), None).forward()
    p = out.abs() * oracle64.UNIT["bfloat16"]
    assert torch.allclose(bound - exact, p * (1 + oracle64.LAST["bfloat16"]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("slots", [1, 64, 65, 512])
def test_equal_gradients_of_one_entry_err_alike(slots):
    """Of the indexer: slots of a query that name one entry with the same incoming gradient round w * g in one
    direction. Three cases of such slots were called wrong while their errors counted as independent."""
    g = torch.Generator().manual_seed(slots)
    off, independent = [], []
    for _ in range(40):
        q, k, w = (torch.randn(*sizes, generator=g).double() for sizes in ((1, 1, 64, 128), (1, 1, 128), (1, 1, 64)))
        q, k = q.bfloat16().double(), k.bfloat16().double()
        rows, grad = k[:, :, None].expand(1, 1, slots, 128), torch.randn(1, generator=g).double().expand(1, 1, slots)
        seen = torch.ones(1, 1, slots, dtype=torch.bool)
        on = (q @ k[0, 0] > 0).double()
        flow = (grad[:, :, None] * (w * on)[..., None]).bfloat16().double()  # what the kernels multiply
        got = torch.einsum("bsht,bshe->e", flow, q)
        for found, alike in ((off, torch.full(seen.shape, float(slots))), (independent, None)):
            _, (parts, bounds, noises), _ = oracle64.index_scores_grad(
                grad, q, rows, w, 1.0, oracle64.ACC["float32"], "bfloat16", seen, alike
            )
            want = parts.sum((0, 1, 2))
            bound = bounds.sum((0, 1, 2)) + oracle64.SIGMAS * noises.sum((0, 1, 2)).sqrt()
            found.append(((got - want).abs() / bound).max())
            assert alike is None or (want * 1.1 - want).abs().gt(bound).any(), "a tenth too much is wrong"
    assert max(off) < 1
    assert (max(independent) > 1) == (slots >= 64)
