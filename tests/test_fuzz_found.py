"""What the fuzzer found, each as a test of the whole kind."""

from __future__ import annotations

import dataclasses

import array_api_compat.numpy
import numpy as np
import pytest

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

from dsv4cp import torch_ops  # noqa: E402
from dsv4cp.indexer import contract, reference  # noqa: E402
from dsv4cp.sparse_attention import reference_chunks  # noqa: E402
from tests.support.fuzz_arrays import Way  # noqa: E402
from tests.support.fuzz_ops import OPS, Refused, Verdict, try_case  # noqa: E402

ENDLESS, NAN = float("-inf"), float("nan")


def ones(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


PART = 1.0 + 0.45 * 2.0**-7  # bfloat16 has 1 and 1 + 2^-7 around it
WHOLE = 3.0 + 2.0**-6  # what bfloat16 makes of 3 * PART; of three times 1 it makes 3


@pytest.mark.parametrize("chunks", ["one", "many"])
@pytest.mark.parametrize("name", ["sparse_attention_torch", "dense_attention_topk_torch"])
def test_key_gradients_of_half_types_are_rounded_once(name, chunks, monkeypatch):
    """Three queries select one key."""
    if chunks == "many":
        monkeypatch.setattr(reference_chunks, "DEVICE_BYTES", 1)
    kv = torch.zeros(1, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    ids, sinks = torch.zeros(1, 3, 1, dtype=torch.int64), torch.full((1,), ENDLESS)
    out = getattr(torch_ops, name)(torch.zeros(1, 3, 1, 1), kv, sinks, ids, 1.0)
    out.backward(torch.full_like(out, PART))
    assert kv.grad.dtype == torch.bfloat16 and kv.grad.item() == WHOLE


def test_sink_gradients_of_half_types_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(reference_chunks, "DEVICE_BYTES", 2**14)  # chunks of queries, whose gradients torch adds
    sinks = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1, 4096, 1, dtype=torch.int64)
    out = torch_ops.sparse_attention_torch(
        torch.zeros(1, 4096, 1, 1), ones(1, 1, 1, dtype=torch.float32), sinks, ids, 1.0
    )
    out.backward(ones(*out.shape, dtype=torch.float32))
    assert sinks.grad.item() == -1024.0  # 4096 times -1/4


def test_entry_gradients_of_half_types_are_rounded_once():
    """The indexer's scores at ids: three queries name entry 0."""
    q, k, w = torch.full((1, 3, 1, 1), PART), ones(1, 1, 1).requires_grad_(), torch.ones(1, 3, 1)
    ids = torch.zeros(1, 3, 1, dtype=torch.int64)
    numbers = {"compress_ratio": 1, "softmax_scale": 1.0, "backend": "torch"}
    torch_ops.dsv4_indexer_topk_scores(q, k, w, ids, **numbers).sum().backward()
    assert k.grad.dtype == torch.bfloat16 and k.grad.item() == WHOLE


def test_bounds_count_the_smallest_numbers_of_the_arithmetic():
    """Gradients of float64 sinks from float32 arithmetic among subnormal numbers."""
    op = OPS["attention gradient"]
    for way in op.ways("cpu"):
        sizes = {"D": 16, "H": 2, "T": 31, "dtype": "float32", "kv dtype": "float32", "sinks dtype": "float64"}
        sizes |= {"values": "denormal", "seed": 0}
        verdict = try_case(op, {"op": op.name, "way": str(way), **op.plain(way), **sizes}, detail=True)
        assert not verdict.failed(), (str(way), verdict.notes)


@pytest.mark.parametrize("backend", ["cudnn", "cuda"])
def test_gradients_of_sinks_that_are_none_beside_nan(backend):
    """Head 0 has a sink, head 1 none, head 2 one whose share is 0 in float32; grad_out of a query is NaN. The package
    says 0 for head 1 in place of cuDNN's kernels, and NaN else."""
    op, way, cpu = OPS["attention gradient"], Way("cupy", "cuda", backend), Way("torch", "cpu", "torch")
    case = {"op": op.name, "way": str(way), **op.plain(way), "H": 3, "T": 3, "ids": "all", "seed": 1}
    held = op.make(cpu, case)
    held["sinks"].view.copy_(torch.tensor([0.0, ENDLESS, -1e4]))
    held["g"].view[:, -1:] = NAN
    op.save(way, case, held)
    want = op.oracle(way, case, held).backward(*(held[n].view for n in ("g", "out", "lse")))
    grads = [want[n][0].to(held[x].view.dtype) for n, x in enumerate(("q", "kv"))]

    def failed(*sinks: float) -> list[str]:
        v = Verdict(detail=True)
        op.judge(way, case, held, [*grads, torch.tensor(sinks)], v)
        return v.failed()

    right, other = ((NAN, 0.0, NAN), (NAN, NAN, NAN)) if backend == "cudnn" else ((NAN, NAN, NAN), (NAN, 0.0, NAN))
    assert failed(*right) == []
    for wrong in (other, (0.0, *right[1:]), (*right[:2], 0.0)):
        assert failed(*wrong) == ["grad_sinks"]


@pytest.mark.gpu
@pytest.mark.parametrize("axis", "SKTH")
@pytest.mark.parametrize("name", ["attention", "attention gradient"])
def test_reversed_arrays_without_elements_on_the_gpu(name, axis):
    """An address made of a null pointer and a negative stride: OverflowError. Batch rows in passes of their own."""
    run_all(name, "cuda", B=2, **{axis: 0}, impl="deterministic", cap="least", layout="flipped")


@pytest.mark.gpu
@pytest.mark.parametrize("axis", "SP")
@pytest.mark.parametrize("name", [name for name in OPS if name.startswith("index ") and name != "index lists"])
def test_reversed_index_arrays_without_elements_on_the_gpu(name, axis):
    run_all(name, "cuda", B=2, **{axis: 0}, impl="deterministic", cap="least", layout="flipped")


def run_all(name: str, device: str, layout: str | None = None, **sizes) -> None:
    """The simplest case with other choices on all ways, as far as they have them; `layout` is that of every array."""
    op, taken = OPS[name], 0
    for way in op.ways(device):
        options: dict[str, list] = {}
        op.draw(lambda n, values, options=options: options.setdefault(n, values)[0], way)
        wanted = sizes | {n: layout for n in options if n.endswith("layout")}
        case = {n: values[0] for n, values in options.items()}
        case |= {n: x for n, x in wanted.items() if n in options and (not isinstance(x, str) or x in options[n])}
        case |= {"op": name, "way": str(way), "seed": 1}
        try:
            verdict = try_case(op, case, detail=True)
        except Refused:
            continue
        assert not verdict.failed(), (str(way), verdict.notes)
        taken += 1
    assert taken, "every backend refused the case"


class LikeCuPy:
    """NumPy's namespace, but `where` of bfloat16 is float32."""

    def __getattr__(self, name: str):
        return getattr(array_api_compat.numpy, name)

    @staticmethod
    def where(condition, x, y):
        found = np.where(condition, x, y)
        return found.astype(np.float32) if found.dtype == ml_dtypes.bfloat16 else found


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (2, 0, 5), (2, 3, 0)])
def test_extracted_scores_have_the_dtype_of_the_logits(shape):
    logits, ids = np.ones(shape, ml_dtypes.bfloat16), np.zeros((*shape[:2], 4), np.int32)
    spec = dataclasses.replace(contract.check_extract(logits, ids), xp=LikeCuPy())
    got = reference.extract(logits, ids, spec)
    assert got.dtype == logits.dtype and (got == (1.0 if shape[2] else -np.inf)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("entries", [0, 1, 7])
def test_extracted_scores_have_the_dtype_of_the_logits_on_the_gpu(dtype, entries):
    run_all("extraction", "cuda", dtype=dtype, K=entries, T=3, S=2)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sinks", ["2e38", "1e4", "-1e4", "+inf", "-inf", "mixed"])
def test_sinks_of_any_size_have_a_gradient(device, sinks):
    """A sink near the end of float32 made exp of a rounding error infinite: its gradient was NaN."""
    for impl in ("atomic", "deterministic"):
        run_all("attention gradient", device, B=2, S=3, H=5, K=7, T=4, sinks=sinks, impl=impl, ids="random")
