"""Independent float64 oracle in torch operations, on the CPU or a GPU, with a bound of the error for every number.

Imports nothing from dsv4cp. tests/test_fuzz.py compares it with naive.py, which is slower by three orders. A function
returns pairs (value, bound): a float32 implementation of the definition that rounds its operands of matrix products to
the input dtype stays within the bound. The bounds follow the data, so that cancellation, large scales and tiny numbers
need no table:

- `unit` (UNIT), STEP: rounding of a product's operand or a result to the input dtype, half a unit in the last place, of
  float16 below its normal numbers half a step. Attention takes the sum of magnitudes. The indexer takes those of many
  operands as independent, but for equal ones: they add as squares, and SIGMAS times their root is allowed.
- `acc` (ACC): arithmetic of the compute dtype: sums in any order, exponentials, the hardware's shorter mantissas. It
  multiplies the sum of magnitudes.
- `least` (LEAST): what a dtype cannot tell from 0 (float16 operands below its normal numbers; flushed float32 numbers).
- `fixed_quantum`: what sums of scaled integers, whose order is free, are multiples of; half of it for each term.
"""

from __future__ import annotations

from typing import Any

import torch

UNIT = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
LAST = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ACC = {"float64": 2.0**-46, "float32": 2.0**-19}
LEAST = {"float64": 1e-300, "float32": 2.0**-124, "float16": 2.0**-24, "bfloat16": 2.0**-124}
STEP = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}  # half of the least number above 0
TINY = {"float64": 2.0**-1022, "float32": 2.0**-126}  # the least normal number
SIGMAS = 5.0
SHORT = 64  # terms of a sum that ACC covers; equal terms one after another err in one direction
VANISHED = 2e-35  # exp(-80): a weight below it may count as 0
INF = float("inf")

Pair = tuple[torch.Tensor, torch.Tensor]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compute(*tensors: torch.Tensor) -> str:
    """The dtype arithmetic runs in."""
    return "float64" if any(x.dtype == torch.float64 for x in tensors) else "float32"


def rounded(value: torch.Tensor, error: torch.Tensor, dtype: torch.dtype) -> Pair:
    """(value, error + one rounding of the result to dtype)."""
    kind = name(dtype)
    return value, error + LAST[kind] * (value.abs() + error) + 2 * LEAST[kind]


def operand_error(size: torch.Tensor, kind: str | None) -> torch.Tensor:
    """What numbers of these magnitudes lose at most when they are rounded to a dtype: half a unit in the last place, or
    half of the least number, or all of what is less; None: nothing."""
    if kind is None or UNIT[kind] == 0.0:
        return torch.zeros_like(size)
    return torch.maximum(UNIT[kind] * size, size.clamp(max=STEP[kind]))


NEAR = 1 + 2.0**-12  # bounds of float32 beside those of float64: a power of two may lie between


def fixed_quantum(bound: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """What a sum of `count` integer terms, each of at most `bound`, is a multiple of: 2^-e, where count times bound,
    both rounded up to powers of two, times 2^e is 2^62, and e at most 126. 0 where the bound is no ordinary number."""
    fine = bound < 2.0**120
    power = torch.frexp(torch.where(fine, bound * NEAR, 1.0).clamp(min=2.0**-127)).exponent
    power = power + torch.frexp((count - 1).clamp(min=0).double()).exponent
    quantum = torch.ldexp(torch.ones_like(bound), (power - 62).clamp(min=-126))
    return torch.where(fine, quantum, 0.0)


def safe_norm(x: torch.Tensor) -> torch.Tensor:
    """The bound of |x| that goes into such a bound: float32 where squares fit it, else by the largest column."""
    squares = x.square().sum(-1)
    usable = (squares > 1e-24) & (squares < 1e38)
    return torch.where(usable, squares.sqrt(), x.abs().amax(-1) * x.shape[-1] ** 0.5)


# --- Sparse attention ----------------------------------------------------------------------------------------


class Attention:
    """One call: scores, probabilities and what they may be off by, from which forward and backward follow.

    operands: the half type that p and ds are rounded to before they meet values, queries and incoming gradients in a
    product; None where they are not. Equal numbers are rounded in one direction (slots that name one key, keys with one
    score, all slots where scale is 0), and so nothing averages out: bounds are sums of magnitudes, of first order.
    """

    def __init__(self, q, kv, sinks, ids, scale: float, operands: str | None = None) -> None:
        self.dtype, self.kv_dtype, self.sinks_dtype, self.scale = q.dtype, kv.dtype, sinks.dtype, scale
        self.operands, self.base, self.tiny = operands, ACC[compute(q, kv)], TINY[compute(q, kv)]
        # CuPy's casts to float64 count float32's numbers below normal as 0 (it compiles with -ftz=true).
        narrow = any(name(x.dtype) in ("float32", "bfloat16") for x in (q, kv, sinks))
        self.lost = TINY["float32"] if narrow and self.base == ACC["float64"] else 0.0
        if ids.shape[2] == 0:
            ids = torch.full((*ids.shape[:2], 1), -1, dtype=torch.int64, device=ids.device)
        keys = kv.shape[1]
        self.valid = (ids >= 0) & (ids < keys)
        self.ids = torch.where(self.valid, ids, 0).long()
        self.q, self.sinks = q.double(), sinks.double()[None, None, :, None]
        self.keys, self.batch = keys, q.shape[0]
        if keys == 0:
            self.rows = self.q.new_zeros((*ids.shape, q.shape[3]))
        else:
            batch = torch.arange(q.shape[0], device=q.device)[:, None, None]
            self.rows = torch.where(self.valid[..., None], kv.double()[batch, self.ids], 0.0)  # [B, S, T, D]
        self.size = self.rows.abs()
        self.mask = self.valid[:, :, None, :]
        self.scores = torch.where(self.mask, self.q @ self.rows.mT * scale, -INF)  # [B, S, H, T]
        size = torch.where(self.mask, self.q.abs() @ self.size.mT * abs(scale), 0.0)
        self.off = (2 * self.base * size.amax(3, keepdim=True)).nan_to_num(0.0)  # error of a score
        self.drift = self.off.clamp(max=1.0)  # relative error of its exponential
        self.acc = self.base * (1 + max(ids.shape[2], ids.shape[0] * ids.shape[1], q.shape[2]) / SHORT)
        self.acc_rows = self.acc + self.base * ids.shape[1] * ids.shape[2] / SHORT  # every slot may name one row
        top = self.scores.amax(3, keepdim=True)
        self.top = torch.where(top == -INF, 0.0, top)
        p = torch.exp(self.scores - self.top)
        self.total = p.sum(3, keepdim=True)
        self.empty = self.total == 0
        self.p = torch.where(
            self.empty, 0.0, p / torch.where(self.empty, 1.0, self.total + torch.exp(self.sinks - self.top))
        )

    def forward(self) -> tuple[Pair, Pair]:
        """((out, bound), (lse, bound))."""
        out = self.p @ self.rows
        error = self._p_error() @ self.size
        # A weight of float32's smallest numbers may count as 0, whatever it stands beside.
        error = error + VANISHED * self.size.sum(2)[:, :, None, :] + self.lost
        lse = torch.where(self.empty, -INF, self.top + torch.log(torch.where(self.empty, 1.0, self.total)))
        return rounded(out, error.nan_to_num(0.0), self.dtype), (lse[..., 0], self._lse_error(lse)[..., 0])

    def _p_error(self) -> torch.Tensor:
        """What p of the forward pass may be off by as a factor of its row, [B, S, H, T]."""
        # The operand is p over the largest so far, at last the largest of all: float16's steps are parts of that.
        largest = self.p.amax(3, keepdim=True).clamp(min=1e-300)
        off = largest * operand_error(self.p / largest, self.operands)
        # Its own exponential and the denominator's (twice drift); sums over slots, both in the compute dtype.
        return off + (2 * self.drift + self.acc) * self.p

    def _lse_error(self, lse: torch.Tensor) -> torch.Tensor:
        return (2 * self.off + self.acc * (lse.abs() + 1)).nan_to_num(0.0, 0.0, 0.0)

    def backward(
        self, grad_out, out, lse, own: bool = False, fixed: bool = False, slots: bool = False
    ) -> tuple[Pair, Pair, Pair]:
        """(value, bound) of grad_q, grad_kv, grad_sinks from a saved out and lse.

        own: the implementation saved those of its own forward pass, out rounded to the dtype; the ones given are right.
        fixed: grad_kv is a sum of scaled integers (kernels_cu/fixed_sum.cuh).
        slots: delta is the sum of p grad_p over slots, as where torch differentiates the reference.
        """
        g, out, lse = grad_out.double(), out.double(), lse.double()[..., None]
        empty, endless = lse == -INF, self.sinks == INF
        lse0, sinks0 = torch.where(empty, 0.0, lse), torch.where(endless, 0.0, self.sinks)
        whole = torch.where(endless, INF, torch.logaddexp(lse0, sinks0))
        seen = self.mask & ~empty
        p = torch.where(seen, torch.exp(self.scores - whole), 0.0)
        grad_p = g @ self.rows.mT
        delta = (g * out).sum(3, keepdim=True)
        ds = torch.where(seen, p * (grad_p - delta), 0.0)
        # p: error of the score and of the whole denominator's logarithm, a number of the compute dtype.
        drift = self.drift + self.base * (whole.abs().nan_to_num(0.0, 0.0, 0.0) + 1)
        if own:
            drift = drift + self._lse_error(lse)
        drift = drift.clamp(max=1.0)
        # delta = grad_out . out: its sum; and what its own out is off by.
        size_delta = (g * out).abs().sum(3, keepdim=True)
        off_delta = self.base * size_delta + self.tiny * g.shape[3]  # products may count as 0, below normal numbers
        if slots:
            off_delta = off_delta + (p * (drift + self.acc) * grad_p.abs()).sum(3, keepdim=True)
        if own:
            # A p that is off is so in every column, where it meets grad_out . row; sums err in each column by itself.
            off_delta = off_delta + (self._p_error() * grad_p.abs()).sum(3, keepdim=True)
            off_delta = off_delta + self.acc * (g.abs() * (self.p @ self.size)).sum(3, keepdim=True)
            # out was rounded to its dtype, where small numbers of float16 lose all digits.
            of_out = torch.maximum(LAST[name(self.dtype)] * out.abs(), out.abs().clamp(max=STEP[name(self.dtype)]))
            off_delta = off_delta + (g.abs() * of_out).sum(3, keepdim=True)
        # ds = p (grad_p - delta) in the compute dtype: errors of p, of grad_p = grad_out . row, of delta, of products.
        meets = grad_p.abs() + delta.abs()
        off = p * (2 * drift * meets + self.base * (g.abs() @ self.size.mT) + off_delta) + self.acc * ds.abs()
        off = torch.where(seen, off + VANISHED * meets, 0.0)
        off_p = torch.where(seen, 2 * drift * p + VANISHED, 0.0)
        # Operands: scale ds and p of the whole softmax, each with its error and rounded; float16 in steps of 2^-24.
        scale = abs(self.scale)
        off_ds = scale * off + operand_error(scale * (ds.abs() + off), self.operands)
        off_p = off_p + operand_error(p + off_p, self.operands)
        grad_q = self.scale * (ds @ self.rows)
        error_q = (off_ds + self.acc * scale * ds.abs()) @ self.size
        error_q = error_q + self.lost * scale * ds.abs().sum(3, keepdim=True)
        down, p_down = ds.mT, p.mT  # [B, S, T, H]
        parts = self.scale * (down @ self.q) + p_down @ g
        # Sums over heads, slots that name the key, and queries, in any order.
        bounds = (off_ds.mT + self.acc_rows * scale * down.abs()) @ self.q.abs()
        bounds = bounds + (off_p.mT + self.acc_rows * p_down) @ g.abs()
        bounds = bounds + self.lost * (scale * down.abs() + p_down).sum(3, keepdim=True)
        grad_kv, error_kv = self._scattered(parts), self._scattered(bounds)
        if fixed:
            error_kv = error_kv + self._of_integers(g, delta.abs() + off_delta)
        p_sink = torch.where(empty | endless, 0.0, torch.exp(sinks0 - whole))
        grad_sinks = -(p_sink * torch.where(empty, 0.0, delta)).sum((0, 1, 3))
        # The sink's weight, delta, and the sum over queries.
        error_s = p_sink * (2 * drift * delta.abs() + off_delta + self.acc * size_delta) + VANISHED * delta.abs()
        error_s = error_s + self.tiny
        error_s = torch.where(empty, 0.0, error_s).sum((0, 1, 3))
        return (
            rounded(grad_q, error_q.nan_to_num(0.0), self.dtype),
            rounded(grad_kv, error_kv.nan_to_num(0.0), self.kv_dtype),
            rounded(grad_sinks, error_s.nan_to_num(0.0), self.sinks_dtype),
        )

    def _of_integers(self, g: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """What sums of integers lose, [B, K, 1]: half a quantum a term, and a slot adds one term for 128 heads. The
        bound of a term is that of sparse_attention_bwd_prep.cu, where p may be 2: |k| key_part + rest, twice."""
        scale, largest_q = abs(self.scale), self.q.abs().amax(3)  # [B, S, H]
        key_part = (scale * safe_norm(g) * largest_q).sum(2, keepdim=True).expand(self.valid.shape)
        rest = (scale * delta[..., 0] * largest_q + g.abs().amax(3)).sum(2, keepdim=True).expand(self.valid.shape)
        norm = safe_norm(self.rows)  # [B, S, T]: the same for all slots that name a key
        count = self._scattered(self.valid[..., None].double())
        key_part, rest, norm = (self._largest(x) for x in (key_part, rest, norm))
        terms = -(-self.q.shape[2] // 128)
        return 0.5 * terms * count * fixed_quantum(2 * (key_part * norm + rest), count)

    def _largest(self, parts: torch.Tensor) -> torch.Tensor:
        """The largest of parts [B, S, T] >= 0 of the slots that name a key: [B, K, 1]."""
        first = torch.arange(self.batch, device=parts.device)[:, None, None] * self.keys
        at = torch.where(self.valid, self.ids + first, self.batch * self.keys)
        most = parts.new_zeros(self.batch * self.keys + 1)
        most.scatter_reduce_(0, at.flatten(), parts.nan_to_num(INF, INF).flatten(), "amax")
        return most[:-1].reshape(self.batch, self.keys, 1)

    def _scattered(self, parts: torch.Tensor) -> torch.Tensor:
        """parts [B, S, T, D] added to the rows their slots name: [B, K, D]. A slot without a key adds nothing."""
        dim = parts.shape[3]
        first = torch.arange(self.batch, device=parts.device)[:, None, None] * self.keys
        at = torch.where(self.valid, self.ids + first, self.batch * self.keys)
        total = parts.new_zeros((self.batch * self.keys + 1, dim))
        total.index_add_(0, at.flatten(), parts.reshape(-1, dim))
        return total[:-1].reshape(self.batch, self.keys, dim)


# --- Indexer -------------------------------------------------------------------------------------------------


def causal(queries: int, entries: int, ratio: int, start: int, device) -> torch.Tensor:
    """[1, S, P]: entry j is finished when query start + i has been read."""
    done = (torch.arange(queries, device=device, dtype=torch.int64) + start + 1) // ratio
    return (torch.arange(entries, device=device)[None, :] < done[:, None])[None]


def index_scores(q, rows, weights, scale: float, acc: float) -> Pair:
    """(scores, bound) of q [B, S, I, E] with rows [B, 1 or S, P, E]: [B, S, P]."""
    logits, size = q @ rows.transpose(2, 3), q.abs() @ rows.abs().transpose(2, 3)
    active = torch.where(logits <= 0, 0.0, logits)
    value = (weights[..., None] * active).sum(2) * scale
    error = acc * abs(scale) * (weights.abs()[..., None] * (size + active)).sum(2)
    return value, error.nan_to_num(0.0) + LEAST["float32"]


def index_scores_grad(
    g, q, rows, weights, scale: float, acc: float, half: str | None, seen, alike=None
) -> tuple[Any, ...]:
    """(value, bound) of the gradients of q and of weights; (values, bounds, squares) of that of rows [B, S, P, E], one
    copy a query, to be summed.

    g and seen [B, S, P]. half: the dtype that operands of products are rounded to. Where the sign of a logit is within
    its error, the whole term may be there or not. alike [B, S, P]: how many terms of one sum have a term's very
    numbers, so that their operands are rounded in one direction and n errors add up to n of them, not to sqrt(n); None:
    one each.
    """
    unit, least = (0.0, 0.0) if half is None else (UNIT[half], LEAST[half] if half == "float16" else 0.0)
    long = acc * (1 + max(q.shape[1] * q.shape[2], rows.shape[2]) / SHORT)
    longest = long + acc * q.shape[1] * rows.shape[2] / SHORT  # every slot may name one row
    logits, size = q @ rows.transpose(2, 3), q.abs() @ rows.abs().transpose(2, 3)
    g = torch.where(seen, g, 0.0) * scale
    seen = seen[:, :, None, :]
    on = torch.where(seen, (logits > 0).double(), 0.0)
    unsure = torch.where(seen & (logits.abs() <= acc * size), 1.0, 0.0)
    flow, doubt = g[:, :, None, :] * on, g.abs()[:, :, None, :] * (unsure + acc * on)
    noise, least = (unit * flow).square(), least**2 * on
    if alike is not None:
        noise, least = noise * alike[:, :, None, :], least * alike[:, :, None, :]
    w, across = weights[..., None], rows.abs()
    grad_q = w * (flow @ rows)
    noise_q = ((noise * w.square() + least * (1 + w.square())) @ rows.square()).sqrt()
    error_q = w.abs() * (doubt @ across + long * (flow.abs() @ across)) + SIGMAS * noise_q
    wq = w * q
    grad_rows = flow.transpose(2, 3) @ wq
    bounds = (doubt + longest * flow.abs()).transpose(2, 3) @ wq.abs()
    noises = (2 * noise + least).transpose(2, 3) @ wq.square() + least.transpose(2, 3) @ q.square()
    active = torch.where(seen, torch.where(logits <= 0, 0.0, logits), 0.0)
    grad_w = (active * g[:, :, None, :]).sum(3)
    error_w = long * (g.abs()[:, :, None, :] * torch.where(seen, size + active, 0.0)).sum(3)
    return (grad_q, error_q.nan_to_num(0.0)), (grad_rows, bounds, noises), (grad_w, error_w.nan_to_num(0.0))


# --- Sinkhorn ------------------------------------------------------------------------------------------------


def sinkhorn(x, repeat: int, eps: float) -> torch.Tensor:
    """The definition; torch differentiates it."""
    y = torch.softmax(x, -1) + eps
    y = y / (y.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        y = y / (y.sum(-1, keepdim=True) + eps)
        y = y / (y.sum(-2, keepdim=True) + eps)
    return y


# --- Selection and lists: exact ------------------------------------------------------------------------------


def topk(scores, k: int, order: str) -> Pair:
    """(ids int64 [..., k], their scores), by a stable sort of all entries."""
    entries = scores.shape[-1]
    clean = torch.where(scores.isnan(), -INF, scores.double())
    values, ids = torch.sort(clean + 0.0, dim=-1, descending=True, stable=True)
    values, ids = values[..., :k], ids[..., :k]
    ids = torch.where(values == -INF, -1, ids)
    if order == "id":
        key = torch.where(ids < 0, entries, ids)
        key, at = torch.sort(key, dim=-1)
        ids, values = torch.where(key == entries, -1, key), values.gather(-1, at)
    if k > entries:
        ids = torch.nn.functional.pad(ids, (0, k - entries), value=-1)
        values = torch.nn.functional.pad(values, (0, k - entries), value=-INF)
    return ids, values


def plan_cudnn(ids, keys: int, width: int) -> Pair:
    """(flat ids [B*S, 1, width], lengths [B*S])."""
    batch, _, slots = ids.shape
    valid = (ids >= 0) & (ids < keys)
    first = torch.arange(batch, device=ids.device)[:, None, None] * keys
    flat = torch.where(valid, torch.where(valid, ids, 0).long() + first, 2**62).flatten(0, 1)
    flat = torch.sort(flat, dim=-1).values
    flat = torch.where(flat == 2**62, -1, flat)
    return torch.nn.functional.pad(flat, (0, width - slots), value=-1)[:, None, :], valid.sum(2).reshape(-1)


def build(call: dict) -> torch.Tensor | None:
    """The lists of build_dsv4_sparse_topk_indices without image spans, from tensors; None where there are spans."""
    if call.get("vision_token_types") is not None and call.get("max_image_tokens", 0) > 0:
        return None
    batch, queries, keys, window = (call[n] for n in ("batch_size", "seq_len", "key_len", "window_size"))
    raw = call.get("vanilla_key_len")
    raw = queries if raw is None else raw
    pooled, ratio, device = call.get("n_pooled", 0), call.get("compress_ratio", 0), call["device"]
    position = call.get("q_positions")
    if position is None:
        position = torch.arange(queries, device=device)[None]
    position = torch.atleast_2d(position.long()).expand(batch, queries)[..., None]
    segment = call.get("q_segment_ids")
    local = position if segment is None else call["q_local_positions"].long()[..., None]
    begin = torch.zeros_like(position) if segment is None else position - local
    first = torch.maximum((position - window + 1).clamp(min=0), begin)
    slot = first + torch.arange(min(raw, window), device=device)
    parts = [torch.where(slot <= position, slot, -1)]
    if pooled > 0:
        given, entry_segment = call.get("compressed_topk"), call.get("pooled_segment_ids")
        entry = torch.arange(pooled, device=device)[None, None] if given is None else given.long()
        entry = entry.expand(batch, queries, entry.shape[-1])
        seen = entry >= 0
        if segment is not None and entry_segment is not None:
            inside = seen & (entry < pooled)
            at = torch.where(inside, entry, 0).flatten(1)
            its = entry_segment.long().gather(1, at).reshape(entry.shape)
            place = call["pooled_positions"].long().gather(1, at).reshape(entry.shape)
            seen = inside & (its == segment.long()[..., None]) & (place < (local + 1) // ratio)
        elif given is None:
            seen = entry < (local + 1) // ratio
        parts.append(torch.where(seen, entry + raw, -1))
    ids = torch.cat(parts, 2)
    ids = torch.where((ids >= 0) & (ids < keys), ids, -1)
    if segment is not None:
        ids = torch.where(segment[..., None] == 0, -1, ids)
    mask = call.get("attention_mask")
    if mask is not None and mask.shape[3] > 0:
        masked = mask[:, 0].expand(batch, queries, mask.shape[3]).gather(2, ids.clamp(min=0)) < 0
        ids = torch.where(masked, -1, ids)
    return ids
