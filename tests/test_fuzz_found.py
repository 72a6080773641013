"""What the fuzzer found, each as a test of the whole kind."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from dsv4cp import torch_ops  # noqa: E402
from dsv4cp.sparse_attention import reference_chunks  # noqa: E402

ENDLESS = float("-inf")


def ones(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("chunks", ["one", "many"])
@pytest.mark.parametrize("name", ["sparse_attention_torch", "dense_attention_topk_torch"])
def test_key_gradients_of_half_types_are_summed_in_float32(name, chunks, monkeypatch):
    """512 queries add 1 each to one key: added up in bfloat16 that stops at 256."""
    if chunks == "many":
        monkeypatch.setattr(reference_chunks, "DEVICE_BYTES", 2**14)
    q, kv = torch.zeros(1, 512, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    kv.requires_grad_()
    ids, sinks = torch.zeros(1, 512, 1, dtype=torch.int64), torch.full((1,), ENDLESS)
    out = getattr(torch_ops, name)(q, kv, sinks, ids, 1.0)
    out.backward(ones(*out.shape))
    assert kv.grad.dtype == torch.bfloat16 and kv.grad.item() == 512.0


def test_sink_gradients_of_half_types_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(reference_chunks, "DEVICE_BYTES", 2**14)  # chunks of queries, whose gradients torch adds
    sinks = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(1, 4096, 1, dtype=torch.int64)
    out = torch_ops.sparse_attention_torch(
        torch.zeros(1, 4096, 1, 1), ones(1, 1, 1, dtype=torch.float32), sinks, ids, 1.0
    )
    out.backward(ones(*out.shape, dtype=torch.float32))
    assert sinks.grad.item() == -1024.0  # 4096 times -1/4


def test_entry_gradients_of_half_types_are_summed_in_float32():
    """The indexer's scores at ids: 512 queries that all name entry 0."""
    q, k, w = ones(1, 512, 1, 1), ones(1, 1, 1).requires_grad_(), ones(1, 512, 1)
    ids = torch.zeros(1, 512, 1, dtype=torch.int64)
    numbers = {"compress_ratio": 1, "softmax_scale": 1.0, "backend": "torch"}
    torch_ops.dsv4_indexer_topk_scores(q, k, w, ids, **numbers).sum().backward()
    assert k.grad.dtype == torch.bfloat16 and k.grad.item() == 512.0
