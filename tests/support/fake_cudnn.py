"""A stand-in for cudnn.deepseek_sparse_attention that computes in float64 on any torch tensor, and raises for whatever
NVIDIA's wrappers (nvidia-cudnn-frontend 1.32) or their kernels do not take. It is strict where they are silent:
a query without a key, which must never reach them, and what they leave undefined come back as NaN.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch


def require(fact: bool, words: str) -> None:
    if not fact:
        raise AssertionError(f"cuDNN does not take this: {words}")


class FakeDsa:
    """The two wrappers of a GPU of compute capability `major`; `calls` keeps what they were given."""

    def __init__(self, major: int) -> None:
        self.major, self.calls = major, []

    def install(self, monkeypatch) -> None:
        package, module = ModuleType("cudnn"), ModuleType("cudnn.deepseek_sparse_attention")
        package.__path__ = []
        package.deepseek_sparse_attention = module
        module.sparse_attention_backward_wrapper = self.backward
        module.sparse_attention_forward_wrapper = self.forward
        module.SparseAttentionBackward = self.Operation
        monkeypatch.setitem(sys.modules, "cudnn", package)
        monkeypatch.setitem(sys.modules, "cudnn.deepseek_sparse_attention", module)

    class Operation:
        """A plan of the deterministic gradient, which knows how much it works in: 64 sums of the gradient of kv."""

        def __init__(
            self, sample_q, sample_kv, sample_out, sample_dout, sample_lse, sample_attn_sink, sample_topk_idxs,
            sample_dq=None, sample_dkv=None, sample_topk_length=None, softmax_scale=None, block_tile=64,
            deterministic=False, q_cluster_mode="off",
        ):  # fmt: skip
            require(deterministic and sample_topk_length is not None, "a plan of another kind")
            require(sample_q.shape == sample_dout.shape and sample_topk_idxs.dtype == torch.int32, "a plan's arrays")
            self.bytes, self.checked = 8 * sample_lse.numel() + 64 * 4 * sample_kv.numel(), False

        def check_support(self) -> bool:
            self.checked = True
            return True

        def scratch_workspace_bytes(self) -> int:
            require(self.checked, "a plan that was not checked")
            return self.bytes

    def _check(self, q, kv, sinks, ids, lengths, **others) -> None:
        named = {"q": q, "kv": kv, "attn_sink": sinks, "topk_idxs": ids, "topk_length": lengths, **others}
        for name, x in named.items():
            require(isinstance(x, torch.Tensor) and not x.requires_grad, f"{name} is no plain tensor")
            require(x.is_contiguous() and x.data_ptr() % 16 == 0, f"{name} is strided or not aligned")
        queries, heads, dim = q.shape
        require(queries > 0 and kv.shape[0] > 0 and ids.shape[1] > 0, "an axis of length 0")
        require(q.dtype in (torch.float16, torch.bfloat16) and kv.dtype == q.dtype, "dtypes of q and kv")
        require(dim == 512 and tuple(kv.shape[1:]) == (512,), "head_dim")
        require(sinks.dtype == torch.float32 and sinks.shape == (heads,), "attn_sink")
        require(ids.dtype == torch.int32 and ids.ndim == 2 and ids.shape[0] == queries, "topk_idxs")
        require(ids.shape[1] % 64 == 0, "a width that is no multiple of 64")
        require(lengths.dtype == torch.int32 and lengths.shape == (queries,), "topk_length")
        slot = torch.arange(ids.shape[1])
        inside = slot < lengths[:, None]
        require(bool(((ids >= 0) & (ids < kv.shape[0]))[inside].all()), "an id outside the keys in a prefix")
        require(bool((ids[~inside] == -1).all()), "a suffix that is not -1")

    def backward(
        self, q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None, dq=None, dkv=None,
        block_tile=64, deterministic=False, stream=None, workspace=None, q_cluster_mode="off",
    ):  # fmt: skip
        self._check(q, kv, attn_sink, topk_idxs, topk_length, out=out, dout=dout, lse=lse)
        heads = q.shape[1]
        for name, x in (("out", out), ("dout", dout)):
            require(x.shape == q.shape and x.dtype == q.dtype, name)
        require(lse.dtype == torch.float32 and lse.shape == q.shape[:2], "lse")
        require(heads > 1 and (heads % 4 == 0 if self.major == 9 else heads in (64, 128)), f"{heads} heads")
        require(self.major != 9 or not deterministic, "deterministic on SM90")
        self.calls.append(SimpleNamespace(
            kind="backward", q=q, kv=kv, out=out, dout=dout, lse=lse, sinks=attn_sink, ids=topk_idxs,
            lengths=topk_length, scale=softmax_scale, deterministic=deterministic,
        ))  # fmt: skip
        q_, kv_, out_, dout_, lse_, sinks_ = (x.double() for x in (q, kv, out, dout, lse, attn_sink))
        grad_q, grad_kv, grad_sinks = torch.zeros_like(q_), torch.zeros_like(kv_), torch.zeros_like(sinks_)
        for n in range(q.shape[0]):
            length = int(topk_length[n])
            if length == 0:
                grad_q[n] = grad_sinks[:] = torch.nan
                continue
            ids = topk_idxs[n, :length].long()
            rows = kv_[ids]
            total = torch.logaddexp(lse_[n], sinks_)
            total = torch.where(sinks_ == torch.inf, torch.inf, total)
            p = torch.exp(softmax_scale * q_[n] @ rows.T - total[:, None])
            delta = (dout_[n] * out_[n]).sum(-1)
            ds = softmax_scale * p * (dout_[n] @ rows.T - delta[:, None])
            grad_q[n] = ds @ rows
            grad_kv.index_add_(0, ids, ds.T @ q_[n] + p.T @ dout_[n])
            grad_sinks -= torch.exp(sinks_ - total) * delta
        grad_sinks = torch.where(sinks_.isinf(), torch.nan, grad_sinks)
        return {"dq": grad_q.to(q.dtype), "dkv": grad_kv.to(kv.dtype), "d_sink": grad_sinks.float()}

    def forward(
        self, q, kv, topk_idxs, *, attn_sink=None, topk_length=None, softmax_scale=None, indexer_topk=0, stream=None
    ):
        self._check(q, kv, attn_sink, topk_idxs, topk_length)
        require(self.major == 10, "a forward pass on SM90")
        require(q.shape[1] in (64, 128), f"{q.shape[1]} heads")
        self.calls.append(SimpleNamespace(kind="forward", q=q, kv=kv, sinks=attn_sink, ids=topk_idxs))
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], torch.inf)
        for n in range(q.shape[0]):
            length = int(topk_length[n])
            if length == 0:
                out[n] = torch.nan
                continue
            rows = kv[topk_idxs[n, :length].long()].double()
            scores = softmax_scale * q[n].double() @ rows.T
            lse[n] = scores.logsumexp(-1)
            total = torch.logaddexp(scores.logsumexp(-1), attn_sink.double())
            total = torch.where(attn_sink == torch.inf, torch.inf, total)
            out[n] = (torch.exp(scores - total[:, None]) @ rows).float()
        return {"out": out.to(q.dtype), "max_logits": None, "lse": lse, "lse_indexer": None}
