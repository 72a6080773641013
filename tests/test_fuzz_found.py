"""What the fuzzer found, each as a test of the whole kind."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dsv4cp import torch_ops  # noqa: E402
from dsv4cp.sparse_attention import reference_chunks  # noqa: E402

ENDLESS = float("-inf")


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
