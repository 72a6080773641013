"""One attention layer over several processes, each with a part of the queries; equal to one process, gradients too.

    torchrun --nproc-per-node 2 examples/context_parallel.py           # gloo on CPUs, NCCL where there are GPUs
    torchrun --nproc-per-node 2 examples/context_parallel.py --tokens 4096 --backend auto

Each rank holds a contiguous shard of the tokens. It projects its own queries, keys and compressed entries; keys and
entries are gathered, because any later query may select them, and the gathering is differentiable: on the way back
every rank gets the sum of all ranks' gradients for the rows that it owns. q_positions and query_start tell the
functions where the shard stands. Cuts never go through a group of compressed tokens, so shards may differ in length,
and any number of ranks works. The same layer then runs over packed documents.
"""

from __future__ import annotations

import argparse
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist

import dsv4cp.torch_ops as ops

C, H, D, IH, IE, R, WINDOW, TOPK = 32, 4, 64, 4, 16, 4, 16, 8


class GatherRows(torch.autograd.Function):
    """Rows of all ranks, one shard after the other: [S_rank, C] -> [S, C]. Its transpose sums and cuts out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        longest = max(sizes)
        padded = x.new_zeros(longest, *x.shape[1:])  # collectives want equal shapes
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)  # each rank has used all rows; gloo has no reduce_scatter
        first = sum(ctx.sizes[: dist.get_rank()])
        return grad[first : first + ctx.sizes[dist.get_rank()]], None


class Text:
    """Where every token and compressed entry belongs: one document, or several packed with padding behind them."""

    def __init__(self, tokens: int, lengths: list[int] | None) -> None:
        self.tokens, self.packed = tokens, lengths is not None
        self.segments = torch.zeros(tokens, dtype=torch.int32)  # 0 is padding
        self.positions = torch.zeros(tokens, dtype=torch.int32)
        groups, of, number = [], [], []
        start = 0
        for document, length in enumerate(lengths or [tokens], start=1):
            self.segments[start : start + length] = document
            self.positions[start : start + length] = torch.arange(length)
            for n in range(length // R):
                groups.append(range(start + n * R, start + (n + 1) * R))
                of.append(document)
                number.append(n)
            start += length
        self.groups = torch.tensor([list(g) for g in groups], dtype=torch.int64).reshape(-1, R)
        self.pooled_segments = torch.tensor(of, dtype=torch.int32)
        self.pooled_positions = torch.tensor(number, dtype=torch.int32)

    def cuts(self, ranks: int) -> list[int]:
        """ranks + 1 places to cut at, as even as groups allow."""
        found = [0]
        for rank in range(1, ranks):
            cut = self.tokens * rank // ranks
            inside = self.groups[(self.groups[:, 0] < cut) & (self.groups[:, -1] >= cut)]
            found.append(max(int(inside[0, 0]) if len(inside) else cut, found[-1]))
        return [*found, self.tokens]


def layer(
    weights: dict[str, torch.Tensor], x: torch.Tensor, text: Text, ranks: int, rank: int, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention output and chosen index scores of one shard x [S_rank, C]; ranks = 1 is the whole."""
    cuts = text.cuts(ranks)
    first, last = cuts[rank], cuts[rank + 1]
    device = x.device
    own = text.groups[(text.groups[:, 0] >= first) & (text.groups[:, 0] < last)] - first

    def gather(rows: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """All ranks' rows, given where in the text each row starts."""
        if ranks == 1:
            return rows
        sizes = [int(((starts >= a) & (starts < b)).sum()) for a, b in itertools.pairwise(cuts)]
        return GatherRows.apply(rows, sizes)

    def pooled(name: str) -> torch.Tensor:
        """Softmax-weighted means over the shard's own groups, gathered."""
        members = x[own.to(device)]
        share = (members @ weights[f"{name}_gate"]).softmax(dim=1)
        return gather((share * (members @ weights[f"{name}_value"])).sum(dim=1), text.groups[:, 0])

    q = (x @ weights["q"]).unflatten(-1, (H, D))
    entries = pooled("kv")
    keys = torch.cat([gather(x @ weights["kv"], torch.arange(text.tokens)), entries])
    index_q, index_w = (x @ weights["iq"]).unflatten(-1, (IH, IE)), x @ weights["iw"]
    index_k = pooled("ik")

    segments, positions = text.segments.to(device), text.positions.to(device)
    pooled_segments, pooled_positions = text.pooled_segments.to(device), text.pooled_positions.to(device)
    rules: dict[str, Any] = {"compress_ratio": R, "softmax_scale": IE**-0.5, "backend": "torch"}
    with torch.no_grad():  # the choice: "torch" scores are unmasked, so what is not visible is masked here
        scores = ops.dsv4_indexer_scores(
            index_q[None], index_k[None], index_w[None], query_start=first, query_total_len=text.tokens, **rules
        )
        visible = pooled_segments == segments[first:last, None]
        visible &= pooled_positions < ((positions[first:last] + 1) // R)[:, None]
        best = scores.masked_fill(~visible, -torch.inf).topk(min(TOPK, len(entries)), dim=-1)
        chosen = torch.where(best.values.isfinite(), best.indices, -1)
    documents: dict[str, Any] = {}
    if text.packed:
        documents = {
            "q_segment_ids": segments[None, first:last],
            "q_local_positions": positions[None, first:last],
            "pooled_segment_ids": pooled_segments[None],
            "pooled_positions": pooled_positions[None],
        }
    ids = ops.build_dsv4_sparse_topk_indices(
        batch_size=1,
        seq_len=last - first,
        key_len=len(keys),
        vanilla_key_len=text.tokens,
        window_size=WINDOW,
        device=device,
        compress_ratio=R,
        compressed_topk=chosen,
        n_pooled=len(entries),
        q_positions=torch.arange(first, last, device=device),
        **documents,
    )
    dtype = torch.bfloat16 if backend == "tilelang" else q.dtype
    out = ops.dsv4_sparse_attention(
        q[None].to(dtype), keys[None].to(dtype), weights["sinks"], ids, D**-0.5, backend=backend
    )
    chosen_scores = ops.dsv4_indexer_topk_scores(index_q[None], index_k[None], index_w[None], chosen, **rules)
    return out[0].float(), torch.where(chosen >= 0, chosen_scores, 0)[0]


def loss_of(out: torch.Tensor, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out * target).sum() + scores.square().sum() / 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=203)
    parser.add_argument("--backend", default="torch", help="of attention, as in dsv4cp.torch_ops")
    options = parser.parse_args()
    if options.tokens < 40:
        parser.error("--tokens: at least 40, so that there are several documents to pack")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if gpus else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpus else "gloo", device_id=device if gpus else None)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)

    generator = torch.Generator().manual_seed(0)  # the same numbers on every rank

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    s = options.tokens
    shapes = {"q": (C, H * D), "kv": (C, D), "kv_gate": (C, D), "kv_value": (C, D), "iq": (C, IH * IE), "iw": (C, IH)}
    shapes |= {"ik_gate": (C, IE), "ik_value": (C, IE)}
    weights = {name: normal(*shape) * C**-0.5 for name, shape in shapes.items()} | {"sinks": normal(H)}
    x, target = normal(s, C), normal(s, H, D)
    a = s // 3
    texts = {"one document": Text(s, None), "packed documents": Text(s, [a, 7, s - a - 17, 3])}
    limit = 3e-2 if options.backend in ("tilelang", "auto") and gpus else 2e-5
    failed = False
    for name, text in texts.items():

        def run(ranks: int, rank: int, text: Text = text) -> tuple[Any, ...]:
            cuts = text.cuts(ranks)
            mine = slice(cuts[rank], cuts[rank + 1])
            own = {k: w.to(device).requires_grad_() for k, w in weights.items()}
            shard = x[mine].to(device).requires_grad_()
            out, scores = layer(own, shard, text, ranks, rank, options.backend)
            loss_of(out, scores, target[mine].to(device)).backward()
            return out.detach(), shard.grad, {k: w.grad for k, w in own.items()}, mine

        out, grad_x, grads, mine = run(ranks, rank)
        if ranks > 1:
            for grad in grads.values():  # every rank has the same weights and a part of the loss
                dist.all_reduce(grad)
        whole_out, whole_grad_x, whole_grads, _ = run(1, 0)
        pairs = [(out, whole_out[mine]), (grad_x, whole_grad_x[mine])] + [(grads[k], whole_grads[k]) for k in grads]
        wholes = [whole_out, whole_grad_x, *whole_grads.values()]
        errors = [
            ((p - q).abs().max() / w.abs().max()).item() if p.numel() else 0.0
            for (p, q), w in zip(pairs, wholes, strict=True)
        ]
        worst = torch.tensor([max(errors)], device=device)
        if ranks > 1:
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if rank == 0:
            cuts = text.cuts(ranks)
            shards = ", ".join(str(b - a) for a, b in itertools.pairwise(cuts))
            print(f"{name}: {ranks} ranks of {shards} queries; largest difference from one process {worst.item():.1e}")
        failed |= not worst.item() <= limit
    if dist.is_initialized():
        dist.destroy_process_group()
    if failed:
        raise SystemExit("the shards do not add up to the whole")
    return 0


if __name__ == "__main__":
    main()
