"""Cases of what a call costs the host: inputs so small that the GPU waits for Python, forward and backward of each op.

The rows "its launches alone" queue the kernels of one such call again, with the same arguments; what a call takes
longer is checks, memory for results, and torch's autograd, which further rows tell apart. Of a call with gradients
"torch's Function alone" applies an autograd.Function that hands out tensors which it has; of a backward pass "without
torch's engine" calls its node itself, and "torch's engine alone" runs a node that hands out tensors which it has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from .. import _kernels
from .bench_gpu import Case
from .bench_timing import Call

QUERIES, HEADS, DIM, TOPK, RATIO = 64, 64, 512, 32, 4
ENTRIES, INDEX_HEADS, INDEX_DIM = QUERIES // RATIO, 64, 128
OURS, WITH, WARM = "dsv4cp.torch_ops", "with gradients", 3
ENOUGH = 16  # input sets, so that batches of calls have more than one to take


@contextlib.contextmanager
def recorded(queued: list[Call], held: list[Any]) -> Iterator[None]:
    """Adds to `queued` what queues again each kernel that is launched, and memory that is zeroed, in the block; and to
    `held` the memory that played calls make there, which these write to."""
    from .. import _bridge_programs, _numba

    def keep(launch: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*args: Any, **kwargs: Any) -> Any:
            queued.append(functools.partial(launch, *args, **kwargs))
            return launch(*args, **kwargs)

        return kept

    def hold(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            held.append(make(*args))
            return held[-1]

        return made

    places: list[tuple[Any, str, Any]] = [
        (_kernels, "_queue", keep), (_kernels, "_zero", keep), (_numba, "launch", keep),
        (_bridge_programs, "_empty_cuda", hold),
    ]  # fmt: skip
    doors = [(module, name, getattr(module, name), listen) for module, name, listen in places]
    for module, name, door, listen in doors:
        setattr(module, name, listen(door))
    try:
        yield
    finally:
        for module, name, door, _ in doors:
            setattr(module, name, door)


def with_gradients(call: Call, tensors: list[Any], numbers: int) -> dict[str, Call]:
    """A call that leaves a node, and an autograd.Function that computes nothing, of so many tensors and numbers."""
    import torch

    result = call().detach()

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs[: len(tensors)])
            return result

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            return ctx.saved_tensors

    others = range(numbers)
    return {WITH: call, "torch's Function alone": lambda: Nothing.apply(*tensors, *others)}


def gradient(out: Any, leaves: list[Any], grad: Any) -> dict[str, Call]:
    """A backward pass, its node without torch's engine, and the engine with a node that computes nothing."""
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            ctx.save_for_backward(*inputs)
            return torch.empty_like(grad)

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return ctx.saved_tensors

    node, nothing = out.grad_fn, Nothing.apply(*leaves)
    others = (None,) * (len(node._input_metadata) - 1)  # of results beside out, which is the first

    def alone() -> Any:
        torch._C._set_grad_enabled(False)  # as the engine does; entering torch.no_grad() would count with the node
        try:
            return node.apply(grad, *others)
        finally:
            torch._C._set_grad_enabled(True)

    return {
        OURS: lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        "without torch's engine": alone,
        "torch's engine alone": lambda: torch.autograd.grad(nothing, leaves, grad, retain_graph=True),
    }


def warm(call: Call) -> Any:
    """What the last of some calls gives: the first compiles, the third of a kind is the first whose launches are noted,
    and gradients of that one are the first that are known by it."""
    return [call() for _ in range(WARM)][-1]


def calls() -> dict[str, dict[str, Call]]:
    """A call of torch_ops, and parts of one, by what it does."""
    import torch

    from .. import torch_ops as ops

    torch_ops: Any = ops  # mypy takes a list's tensors for any of the positional parameters

    def bf16(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, kv, grad = bf16(1, QUERIES, HEADS, DIM), bf16(1, QUERIES + ENTRIES, DIM), bf16(1, QUERIES, HEADS, DIM)
    sinks = torch.randn(HEADS, device="cuda")
    leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
    lists = functools.partial(
        torch_ops.build_dsv4_sparse_topk_indices, batch_size=1, seq_len=QUERIES, key_len=QUERIES + ENTRIES,
        window_size=TOPK, n_pooled=ENTRIES, compress_ratio=RATIO, device="cuda",
    )  # fmt: skip
    ids = lists()
    planned = functools.partial(torch_ops.plan_dsv4_sparse_indices, ids, QUERIES + ENTRIES, "tilelang")
    attend = functools.partial(torch_ops.dsv4_sparse_attention, backend="tilelang", plan=planned())
    attended = functools.partial(attend, *leaves, None, DIM**-0.5)
    out = warm(attended)

    matrices = torch.randn(QUERIES, 4, 4, device="cuda")
    sinkhorn = functools.partial(torch_ops.dsv4_sinkhorn_normalize, backend="tilelang", repeat=20, eps=1e-6)
    leaf = matrices.clone().requires_grad_()
    normal = warm(lambda: sinkhorn(leaf))

    at: dict[str, Any] = {"compress_ratio": RATIO, "softmax_scale": INDEX_DIM**-0.5, "backend": "tilelang"}
    index_q, pooled = bf16(1, QUERIES, INDEX_HEADS, INDEX_DIM), bf16(1, ENTRIES, INDEX_DIM)
    weights = bf16(1, QUERIES, INDEX_HEADS)
    chosen = torch.arange(ENTRIES, device="cuda").expand(1, QUERIES, ENTRIES).contiguous()
    scorers = [x.clone().requires_grad_() for x in (index_q, pooled, weights)]
    dense, at_ids = torch_ops.dsv4_indexer_scores, torch_ops.dsv4_indexer_topk_scores
    scores = warm(lambda: at_ids(*scorers, chosen, **at))
    ones = torch.ones_like(scores)
    return {
        "Sinkhorn forward": {
            OURS: lambda: sinkhorn(matrices), **with_gradients(lambda: sinkhorn(leaf), [leaf], 2),
        },
        "Sinkhorn backward": gradient(normal, [leaf], matrices),
        "index building": {OURS: lists},
        "planning": {OURS: planned},
        "sparse attention forward": {
            OURS: lambda: attend(q, kv, sinks, None, DIM**-0.5), **with_gradients(attended, [*leaves, ids], 4),
        },
        "sparse attention backward": gradient(out, leaves, grad),
        "indexer scores": {
            OURS: lambda: dense(index_q, pooled, weights, **at),
            **with_gradients(lambda: dense(*scorers, **at), scorers, 3),
        },
        "indexer scores at ids": {
            OURS: lambda: at_ids(index_q, pooled, weights, chosen, **at),
            **with_gradients(lambda: at_ids(*scorers, chosen, **at), [*scorers, chosen], 1),
        },
        "indexer backward": gradient(scores, scorers, ones),
    }


PARTS = (
    "Sinkhorn forward", "Sinkhorn backward", "index building", "planning", "sparse attention forward",
    "sparse attention backward", "indexer scores", "indexer scores at ids", "indexer backward",
)  # fmt: skip


def cases() -> list[Callable[[bool], Case]]:
    """All of them, none without torch."""
    return [functools.partial(host, part=part) for part in PARTS] if importlib.util.find_spec("torch") else []


def host(tiny: bool, *, part: str) -> Case:
    """One call of torch_ops, and its launches alone."""
    parts = calls()[part]
    call = parts[OURS]
    for name in {OURS, WITH} & set(parts):
        warm(parts[name])
    queued: list[Call] = []
    held: list[Any] = []
    with recorded(queued, held):
        held.append(call())

    def launches(**_: Any) -> Any:
        for launch in queued:
            launch()
        return held

    ours: dict[str, Call] = {name: lambda f=f, **_: f() for name, f in parts.items()}
    ours[f"its launches alone: {len(queued)}"] = launches
    sets: list[dict[str, Any]] = [{} for _ in range(ENOUGH)]
    return Case("host time of a call", f"{part}, tiny", "host", sets, ours, launch_bound=True, host=True)
