"""A short run of the fuzzer with a fixed seed, its oracle against naive.py, and planted bugs, which it finds."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dsv4cp  # noqa: E402
from dsv4cp.indexer import reference as indexer_reference  # noqa: E402
from dsv4cp.indexer import selection  # noqa: E402
from dsv4cp.sinkhorn import reference as sinkhorn_reference  # noqa: E402
from dsv4cp.sparse_attention import reference as attention_reference  # noqa: E402
from dsv4cp.sparse_attention import reference_chunks  # noqa: E402
from dsv4cp.sparse_indices import reference_plan  # noqa: E402
from tests import fuzz  # noqa: E402
from tests.support import fuzz_arrays, naive, oracle64  # noqa: E402
from tests.support.fuzz_arrays import Canaries, Way, hold  # noqa: E402
from tests.support.fuzz_ops import OPS, try_case, value  # noqa: E402

CPU_CASES, GPU_CASES = 250, 1300
NUMPY, TORCH = Way("numpy", "cpu", "auto"), Way("torch", "cpu", "torch")


def run(capsys, *arguments: str) -> tuple[int, str]:
    status = fuzz.main(list(arguments))
    return status, capsys.readouterr().out


def test_a_short_run_finds_nothing(capsys):
    status, text = run(capsys, "--device", "cpu", "--seed", "20", "--cases", str(CPU_CASES), "--seconds", "60")
    assert status == 0, text
    assert f"{CPU_CASES} cases, 0 refused, 0 failures" in text
    assert all(op in text for op in OPS)


def test_nothing_of_a_run_watches_on_when_it_is_over(capsys):
    """The watch ends a process in which no case comes back: it must not outlive the run and end this one."""
    before = threading.active_count()
    arguments = ("--device", "cpu", "--seed", "1", "--cases", "3", "--seconds", "20", "--driver", "random")
    assert run(capsys, *arguments)[0] == 0
    end = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_runs_on_the_gpu_find_nothing(capsys, seed):
    """10,400 cases in all; under pytest-xdist the seeds run side by side."""
    status, text = run(capsys, "--device", "cuda", "--seed", str(seed), "--cases", str(GPU_CASES), "--seconds", "110")
    print(text)
    counted = re.search(r"^(\d+) cases, (\d+) refused, 0 failures", text, re.M)
    assert status == 0 and counted is not None, text
    assert int(counted[1]) + int(counted[2]) == GPU_CASES, "the time was too short for all cases"


def test_every_public_function_and_backend_is_tried():
    tried = {op.functions["array"] for op in OPS.values()}
    assert tried | {"flatten_sparse_indices"} == {name for name in dsv4cp.__all__ if name != "SparseIndexPlan"}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (2**21 + 3,), (0, 4)])
def test_a_gpu_draws_the_numbers_of_a_cpu(shape):
    """A case that failed on a GPU has the same inputs on a CPU."""
    for seed in (0, 1, 2**31 - 1):
        for low, high in ((0, 1), (-3, 4), (-(2**20), 2**33)):
            drawn = [fuzz_arrays.integers(seed, "x", shape, low, high, device) for device in ("cpu", "cuda")]
            assert torch.equal(drawn[0], drawn[1].cpu())
        drawn = [fuzz_arrays.normal(seed, "x", shape, device) for device in ("cpu", "cuda")]
        assert torch.equal(drawn[0], drawn[1].cpu())


def test_kernels_that_cases_need_are_compiled_beforehand():
    """Main kernels of attention on the portable path, by what the drawn cases say; each head_dim and each tile of heads
    meets both half types."""
    pytest.importorskip("cupy")
    from dsv4cp.sparse_attention import cuda, cuda_bwd_mma
    from tests.gpu import warm

    listed = [json.dumps(defines) for _, defines in warm.variants()]
    met, rng = set(), random.Random(0)
    for name in ("attention", "attention gradient"):
        for _ in range(400):
            case = fuzz.random_case(OPS[name], Way("cupy", "cuda", "cuda"), rng)
            dtype, dim, heads = case["dtype"], case["D"], next(n for n in (16, 32, 64, 128) if n >= case["H"])
            tile = [next(t for t in m.TILES[dim] if t[0] == min(heads, 64)) for m in (cuda, cuda_bwd_mma)]
            met |= {(dim, dtype), (min(heads, 64), dtype)}
            if name == "attention":
                assert json.dumps(cuda._defines(dtype, dim, tile[0], case["rounding"])) in listed
            elif dim != 512 or "flipped" in (case["q layout"], case["g layout"]):
                fixed = case["impl"] == "deterministic"
                for part in (3,) if heads <= 64 else (1, 2):
                    assert json.dumps(cuda_bwd_mma._defines(dtype, dim, tile[1], part, fixed)) in listed
    assert met == {(n, dtype) for n in (64, 128, 256, 512, 16, 32) for dtype in ("bfloat16", "float16")}


# --- The oracle ----------------------------------------------------------------------------------------------


def cases(name: str, way: Way, count: int, fits) -> list:
    """(case, its inputs) of small random cases."""
    rng, found = random.Random(name), []
    while len(found) < count:
        case = fuzz.random_case(OPS[name], way, rng)
        if fits(case):
            found.append((case, OPS[name].make(way, case)))
    return found


def near(got: torch.Tensor, want: np.ndarray) -> None:
    np.testing.assert_allclose(
        got.numpy(), want, rtol=1e-9, atol=1e-12 * max(1.0, float(np.nanmax(np.abs(want), initial=0)))
    )


def small(case: dict) -> bool:
    rows = case["B"] * min(case["S"], 5)
    return rows * case["H"] * case["T"] < 500 and case["D"] < 20 and not case["selected NaN"] and case["S"] < 9


def test_attention_oracle_is_the_plain_one():
    for case, held in cases("attention gradient", NUMPY, 40, small):
        op = OPS["attention gradient"]
        q, kv, sinks, ids, g = (value(held[n]) for n in ("q", "kv", "sinks", "ids", "g"))
        if g.isnan().any():
            continue
        (out, _), (lse, _) = op.oracle(NUMPY, case, held).forward()
        want_out, want_lse = naive.attention(q, kv, sinks, ids, op._scale(case))
        near(out, want_out)
        finite = np.isfinite(want_lse)
        assert np.array_equal(np.isneginf(lse.numpy()), np.isneginf(want_lse))
        near(lse[torch.from_numpy(finite)], want_lse[finite])
        got = op.oracle(NUMPY, case, held).backward(g, out, lse)
        for (x, _), want in zip(got, naive.attention_grad(g, q, kv, sinks, ids, op._scale(case)), strict=True):
            near(x, want)


def few(case: dict) -> bool:
    entries = case.get("T", case["P"])
    return (
        case["B"] * case["S"] * case["I"] * entries * case["P"] < 4000 and case["S"] < 20 and case["unseen"] == "plain"
    )


def test_index_score_oracle_is_the_plain_one():
    for case, held in cases("index scores gradient", NUMPY, 25, few):
        op = OPS["index scores gradient"]
        q, k, w, g = (value(held[n]).double() for n in ("q", "k", "w", "g"))
        scale, seen = op._scale(case), op._seen(case, held)
        near(oracle64.index_scores(q, k[:, None], w, scale, 0.0)[0], naive.indexer_scores(q, k, w, scale))
        visible = naive.indexer_visible(q.shape[1], k.shape[1], case["R"], case["start"])
        assert np.array_equal(seen.numpy(), np.broadcast_to(visible, seen.shape))
        rows = k[:, None].expand(-1, q.shape[1], -1, -1)
        (gq, _), (parts, _, _), (gw, _) = oracle64.index_scores_grad(g, q, rows, w, scale, 0.0, None, seen)
        want = naive.indexer_scores_grad(g.nan_to_num(0.0), q, k, w, scale, visible)
        for x, y in zip((gq, parts.sum(1), gw), want, strict=True):
            near(x, y)


@pytest.mark.parametrize("order", ["id", "score"])
def test_selection_oracle_is_the_plain_one(order):
    rng = np.random.default_rng(0)
    for entries, k in ((1, 1), (7, 3), (7, 9), (40, 40), (40, 5)):
        scores = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 2.0, -1.0], (5, entries))
        ids, _ = oracle64.topk(torch.from_numpy(scores), k, order)
        assert np.array_equal(ids.numpy(), naive.topk(scores, k, order))


def test_list_oracles_are_the_plain_ones():
    op = OPS["index lists"]
    fits = lambda case: not case["spans"] and case["N"] < 16 and case["P"] < 9 and case["S"] < 9  # noqa: E731
    for case, held in cases("index lists", NUMPY, 60, fits):
        call = op._numbers(case, held) | {n: value(h) for n, h in held.items() if n != "like"}
        assert np.array_equal(oracle64.build(call | {"device": "cpu"}).numpy(), naive.build_indices(**call))
    for case, held in cases("plan", NUMPY, 30, lambda case: case["T"] < 70 and case["S"] < 9):
        ids = value(held["ids"])
        width = max(1, -(-ids.shape[2] // 128)) * 128
        flat, lengths = oracle64.plan_cudnn(ids, case["K"], width)
        want, want_lengths, _ = naive.cudnn_plan(ids, case["K"], 128)
        assert np.array_equal(flat.numpy(), want) and np.array_equal(lengths.numpy(), want_lengths)


def test_sinkhorn_oracle_is_the_plain_one():
    rng = np.random.default_rng(0)
    for m, repeat, eps in ((1, 1, 0.1), (3, 2, 1e-6), (4, 20, 1e-6)):
        x, g = rng.standard_normal((2, 3, m, m))
        leaf = torch.from_numpy(x).requires_grad_()
        y = oracle64.sinkhorn(leaf, repeat, eps)
        near(y.detach(), naive.sinkhorn(x, repeat, eps))
        near(torch.autograd.grad(y, leaf, torch.from_numpy(g))[0], naive.sinkhorn_grad(g, x, repeat, eps))


# --- Planted bugs --------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def little_shrinking(monkeypatch):
    monkeypatch.setattr(fuzz, "SHRINK_SECONDS", 0.3)
    monkeypatch.setattr(fuzz, "MOST_FAILURES", 1)


def found(capsys, op: str, cases: int = 400) -> bool:
    """The fuzzer sees wrong numbers, not only an exception."""
    choice = ("--driver", "random", "--op", op, "--backend", "numpy", "--cases", str(cases), "--seed", "3")
    status, text = run(capsys, "--device", "cpu", *choice)
    return status == 1 and "differ, first at" in text and "--case" in text


def test_an_id_one_past_the_end_is_found(capsys, monkeypatch):
    """Id K taken for the last row."""
    real = reference_chunks.Scratch.gather

    def gather(self, kv, ids):
        return real(self, kv, np.where(ids == kv.shape[0], kv.shape[0] - 1, ids))

    monkeypatch.setattr(reference_chunks.Scratch, "gather", gather)
    assert found(capsys, "attention")


def test_a_forgotten_repeated_id_is_found(capsys, monkeypatch):
    real = reference_chunks.Scratch.gather

    def gather(self, kv, ids):
        rows, valid = real(self, kv, ids)
        twice = np.zeros_like(valid)
        twice[:, 1:] = ids[:, 1:] == ids[:, :-1]
        return rows, valid & ~np.asarray(twice)

    monkeypatch.setattr(reference_chunks.Scratch, "gather", gather)
    assert found(capsys, "attention")


def test_a_key_gradient_that_forgets_repeated_ids_is_found(capsys, monkeypatch):
    """total[ids] += values, which keeps one of several."""

    def add_rows(xp, total, ids, values):
        valid = ids >= 0
        total[ids[valid]] += values[valid]
        return total

    monkeypatch.setattr(attention_reference, "add_rows", add_rows)
    assert found(capsys, "attention gradient")


def test_too_coarse_probabilities_are_found(capsys, monkeypatch):
    """p rounded to 5 bits."""
    real = attention_reference.attend

    def attend(xp, q, rows, valid, sinks, scale, p_dtype, floor):
        rows = np.where(np.abs(rows) > 0, np.round(rows * 32) / 32, rows) if rows.dtype == np.float32 else rows
        return real(xp, q, rows, valid, sinks, scale, p_dtype, floor)

    monkeypatch.setattr(attention_reference, "attend", attend)
    assert found(capsys, "attention")


def test_a_last_slot_of_small_weight_dropped_is_found(capsys, monkeypatch):
    """As a kernel would whose tail of a list that is no multiple of 16 long is a slot short; only where each head gives
    the slot less than 1/32."""
    real = attention_reference.attend

    def attend(xp, q, rows, valid, sinks, scale, p_dtype, floor):
        out, lse = real(xp, q, rows, valid, sinks, scale, p_dtype, floor)
        if valid.shape[1] % 16:
            weight = np.exp(np.where(valid[:, -1:], scale * np.matmul(q, rows[:, -1, :, None])[..., 0], -np.inf) - lse)
            short = valid.copy()
            short[:, -1] &= ~(weight < 2.0**-5).all(1)
            return real(xp, q, rows, short, sinks, scale, p_dtype, floor)
        return out, lse

    monkeypatch.setattr(attention_reference, "attend", attend)
    assert found(capsys, "attention")


@pytest.mark.parametrize("gradient", [False, True])
def test_one_head_with_slightly_larger_weights_is_found(capsys, monkeypatch, gradient):
    """p of head 0 times 1 + 2^-6 where it meets the values, or in the gradient grad_out."""
    if gradient:
        real_grad = attention_reference.attend_grad

        def attend_grad(xp, grad_out, q, *rest):
            grad_q, grad_sinks, a, x = real_grad(xp, grad_out, q, *rest)
            a[:, q.shape[1]] *= 1 + 2.0**-6
            return grad_q, grad_sinks, a, x

        monkeypatch.setattr(attention_reference, "attend_grad", attend_grad)
    else:
        real = attention_reference.attend

        def attend(*arguments):
            out, lse = real(*arguments)
            out[:, 0] *= 1 + 2.0**-6
            return out, lse

        monkeypatch.setattr(attention_reference, "attend", attend)
    assert found(capsys, "attention gradient" if gradient else "attention")


def test_a_sink_in_the_log_sum_is_found(capsys, monkeypatch):
    real = attention_reference.attend

    def attend(xp, q, rows, valid, sinks, *rest):
        out, lse = real(xp, q, rows, valid, sinks, *rest)
        return out, np.where(np.isneginf(lse), lse, np.logaddexp(lse, np.minimum(sinks, 1e3)))

    monkeypatch.setattr(attention_reference, "attend", attend)
    assert found(capsys, "attention")


def test_an_entry_seen_too_early_is_found(capsys, monkeypatch):
    real = indexer_reference.Causal.__init__

    def early(self, spec, first):
        real(self, spec, first)
        self.first += 1

    monkeypatch.setattr(indexer_reference.Causal, "__init__", early)
    assert found(capsys, "index scores")


def test_a_gradient_at_zero_is_found(capsys, monkeypatch):
    """relu' = 1 at 0 too."""
    real = indexer_reference.selected_gradient

    def grad(xp, g, q, rows, valid, w, scale):
        return real(xp, g, np.where(q == 0, np.nextafter(0, 1, dtype=q.dtype), q), rows, valid, w, scale * 1.01)

    monkeypatch.setattr(indexer_reference, "selected_gradient", grad)
    assert found(capsys, "index scores at ids gradient")


def test_ties_in_the_wrong_order_are_found(capsys, monkeypatch):
    real = selection.best_of_rows

    def last(xp, scores, topk, order):
        ids, found = real(xp, scores[:, ::-1], topk, order)
        return np.where(ids >= 0, scores.shape[1] - 1 - ids, ids).astype(np.int32), found

    monkeypatch.setattr(selection, "best_of_rows", last)
    assert found(capsys, "selection")


def test_an_entry_chosen_too_early_is_found(capsys, monkeypatch):
    real = selection.seen_scores
    monkeypatch.setattr(
        selection, "seen_scores", lambda table, i0, i1, spec: real(table, i0, i1, replace(spec, compress_ratio=1))
    )
    assert found(capsys, "selection")


def test_a_missing_division_is_found(capsys, monkeypatch):
    real = sinkhorn_reference.divisions
    monkeypatch.setattr(
        sinkhorn_reference, "divisions", lambda y, spec: list(real(y, spec))[: max(1, 2 * spec.repeat - 2)]
    )
    assert found(capsys, "Sinkhorn")


def test_an_unsorted_plan_is_found(capsys, monkeypatch):
    real = reference_plan.plan
    monkeypatch.setattr(
        "dsv4cp.sparse_indices.reference.plan", lambda ids, spec: (real(ids, spec)[0][..., ::-1], *real(ids, spec)[1:])
    )
    assert found(capsys, "plan")


def test_a_written_input_is_found(monkeypatch):
    op, case = OPS["Sinkhorn"], {"op": "Sinkhorn", "way": str(TORCH), **OPS["Sinkhorn"].plain()}
    monkeypatch.setattr("dsv4cp.sinkhorn.torch_bridge.sinkhorn_normalize_torch", lambda x, *_: x.detach().add_(1.0))
    assert "x unmodified" in try_case(op, case).failed()


@pytest.mark.parametrize("at", ["before", "behind"])
def test_a_write_beside_a_buffer_is_found(at):
    with Canaries(TORCH, 0xFF) as canaries:
        x = torch.empty(3, 5, dtype=torch.float32)
        y = torch.empty_like(x)
    assert not canaries.broken() and bool(x.isnan().all() & y.isnan().all())
    memory = torch.empty(0).set_(x.untyped_storage())
    memory[{"before": 127, "behind": 128 + 15}[at]] = 0.0
    assert canaries.broken()


def test_layouts_hold_the_same_numbers():
    x = torch.arange(24.0).reshape(2, 3, 4)
    for layout in ("contiguous", "padded", "odd", "every second", "transposed", "flipped"):
        held = hold(x, layout, 0xFF)
        assert torch.equal(value(held), x) and np.array_equal(np.asarray(NUMPY.give(held)), x.numpy()), layout
    assert torch.equal(value(hold(x, "stride 0", 0xFF)), x[:1].expand(2, 3, 4))


def test_a_line_runs_again(capsys):
    case = {"op": "plan", "way": "numpy/cpu/auto", **OPS["plan"].plain()}
    assert fuzz.main(["--case", json.dumps(case)]) == 0
    assert "fine" in capsys.readouterr().out
