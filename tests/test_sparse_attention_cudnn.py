"""Backend "cudnn" of sparse attention without a GPU: what NVIDIA's wrappers are given and what is made of their answer
(by a stand-in that computes in float64 and is stricter than they are), the operators, plans, errors."""

from __future__ import annotations

import contextlib
import re
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

import dsv4cp  # noqa: E402
from dsv4cp import SparseIndexPlan, _backend, _bridge, _kernels, torch_ops  # noqa: E402
from dsv4cp.sparse_attention import (  # noqa: E402
    contract,
    contract_cudnn,
    cuda_pack,
    cudnn,
    reference,
    torch_bridge,
    torch_bridge_cudnn,
    torch_bridge_cudnn_ops,
)
from tests.support import naive  # noqa: E402
from tests.support.compare import check_close, check_equal, to_numpy  # noqa: E402
from tests.support.fake_cudnn import FakeDsa  # noqa: E402

D, SCALE, CAP = 512, 512**-0.5, 2**31
INF, NAN = float("inf"), float("nan")


def inputs(b=2, s=4, h=3, k=9, t=7, *, seed=0, dtype=torch.bfloat16, empty=True):
    """(q, kv, sinks, ids): masked and out-of-range ids anywhere, repeats, NaN in rows that nobody selects, sinks +inf
    and -inf, and with `empty` a query without a key in each batch row."""
    g = torch.Generator().manual_seed(seed)
    q, kv = (torch.randn(n, generator=g).to(dtype) for n in ((b, s, h, D), (b, k, D)))
    sinks = torch.randn(h, generator=g)
    if h > 2:
        sinks[1], sinks[2] = INF, -INF
    ids = torch.randint(-3, k + 3, (b, s, t), generator=g)
    ids[ids == 4] = 3
    if t > 2:
        ids[..., 2] = 1
    if empty and s > 1:
        ids[:, 1] = -1
        ids[0, 1, :1] = k  # another batch row's, if it were not masked first
    kv[:, 4] = NAN
    return q, kv, sinks, ids


def forward_of(q, kv, sinks, ids):
    """out in q's dtype and lse float32, by the oracle."""
    out, lse = naive.attention(q, clean(kv), sinks, ids, SCALE)
    return torch.tensor(out).to(q.dtype), torch.tensor(lse).float()


def clean(kv):
    return torch.where(kv.isnan(), 0, kv)  # the oracle multiplies rows that it masks


def spec_of(q, kv, sinks, ids):
    return contract.check(q, kv, sinks, ids, SCALE)


def pack(ids, spec, width):
    """What the packing kernel makes, slot by slot."""
    flat = torch.full((spec.batch * spec.queries, width), -1, dtype=torch.int32)
    lengths = torch.zeros(len(flat), dtype=torch.int32)
    for r, row in enumerate(ids.reshape(len(flat), spec.slots).tolist()):
        kept = [i + r // spec.queries * spec.keys for i in row if 0 <= i < spec.keys]
        flat[r, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
        lengths[r] = len(kept)
    return flat, lengths


@pytest.fixture(params=[9, 10], ids=["SM90", "SM100"])
def dsa(request, monkeypatch):
    """cuDNN on a GPU of that generation, whose tensors are on the CPU."""
    fake = FakeDsa(request.param)
    fake.install(monkeypatch)
    monkeypatch.setattr(torch_bridge_cudnn, "major", lambda index: request.param)
    monkeypatch.setattr(torch_bridge_cudnn, "packed", pack)
    return fake


@pytest.fixture
def hopper(dsa):
    if dsa.major != 9:
        pytest.skip("one generation is enough")
    return dsa


def planned(ids, keys, **options):
    plan = torch_ops.plan_dsv4_sparse_indices(ids, keys, "cudnn", **options)
    return contract_cudnn.Ids(plan.indices, plan.topk_length, plan.valid_rows)


def unplanned(ids, keys):
    return contract_cudnn.Ids(ids, None, None)


def gradient(arrays, grad, laid, *, out=None, lse=None, promise=False, deterministic=False, cap=CAP):
    if out is None:
        out, lse = forward_of(*arrays)
    spec = spec_of(*arrays)
    return torch_bridge_cudnn.backward(grad, *arrays[:3], laid, out, lse, spec, promise, deterministic, cap)


# --- Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lay", [planned, unplanned])
@pytest.mark.parametrize("h", [1, 3, 4, 6, 64])
def test_gradients(dsa, h, lay):
    s = 2 if h == 64 else 4
    arrays = q, kv, sinks, ids = inputs(h=h, s=s)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    grad[:, 1] = NAN  # where no query has a key
    got = gradient(arrays, grad, lay(ids, kv.shape[1]))
    want = naive.attention_grad(torch.where(grad.isnan(), 0, grad), q, clean(kv), sinks, ids, SCALE)
    for g, w, like in zip(got, want, (q, kv, sinks), strict=True):
        assert g.dtype == like.dtype and g.is_contiguous()
        check_close(g, w, "attention_grad", "bfloat16")
    assert (got[0][:, 1] == 0).all() and (got[1][:, 4] == 0).all() and got[1].any()
    (call,) = dsa.calls
    assert call.q.shape[0] == 2 * (s - 1) and (call.lengths > 0).all()
    assert call.q.shape[1] == (-(-h // 4) * 4 if dsa.major == 9 else 64)
    assert (call.q[:, h:] == 0).all() and (call.dout[:, h:] == 0).all() and (call.out[:, h:] == 0).all()
    assert (call.lse[:, h:] == INF).all() and (call.sinks[h:] == -INF).all()


@pytest.mark.parametrize("lay", [planned, unplanned])
@pytest.mark.parametrize("h", [1, 3, 64, 65])
def test_forward_on_blackwell(dsa, h, lay):
    if dsa.major != 10:
        pytest.skip("SM90 has no forward pass")
    arrays = q, kv, sinks, ids = inputs(h=h, s=3)
    out, lse = torch_bridge_cudnn.forward(q, kv, sinks, lay(ids, 9), spec_of(*arrays), False)
    want_out, want_lse = naive.attention(q, clean(kv), sinks, ids, SCALE)
    check_close(out, want_out, "attention", like=q)
    check_close(lse, want_lse, "lse", "bfloat16")
    assert lse.dtype == torch.float32 and (out[:, 1] == 0).all() and (lse[:, 1] == -INF).all()
    assert dsa.calls[0].q.shape == (4, 64 if h <= 64 else 128, D)


def test_a_broken_promise_keeps_to_its_rows(dsa):
    arrays = q, kv, sinks, ids = inputs(h=4)
    sinks[:] = 0.5
    laid = planned(ids, 9, all_rows_nonempty=True)
    grad_q, _, _ = gradient(arrays, torch.ones_like(q), laid)
    assert grad_q[:, 1].isnan().all() and not grad_q[:, 2:].isnan().any()
    if dsa.major == 10:
        _, lse = torch_bridge_cudnn.forward(q, kv, sinks, laid, spec_of(*arrays), True)
        assert (lse[:, 1] == -INF).all() and lse[:, 2:].isfinite().all()


def test_golden_values(dsa):
    """Everything zero but channel 0; ids in and out of range, repeated, masked first."""
    for ids, want_kv, want_sink in (
        ([0, 1, -1, -1], [0.08983845, 0.82032310, 0, 0], -0.12210311),
        ([3, 4, 7, -5], [0, 0, 0, 1.08810411], -0.13552998),
        ([-1] * 64 + [0, 1], [0.08983845, 0.82032310, 0, 0], -0.12210311),
    ):
        q, kv = torch.zeros(1, 1, 1, D, dtype=torch.bfloat16), torch.zeros(1, 4, D, dtype=torch.bfloat16)
        q[..., 0], kv[0, :, 0] = 1, torch.arange(4)
        arrays = q, kv, torch.zeros(1), torch.tensor([[ids]])
        out, lse = naive.attention(*arrays, 1)
        spec = contract.check(*arrays, 1)
        for lay in (planned, unplanned):
            _, grad_kv, grad_sinks = torch_bridge_cudnn.backward(
                q, *arrays[:3], lay(arrays[3], 4), torch.tensor(out).to(q.dtype), torch.tensor(lse).float(), spec,
                False, False, CAP,
            )  # fmt: skip
            np.testing.assert_allclose(to_numpy(grad_kv)[0, :, 0], want_kv, rtol=8e-3)
            np.testing.assert_allclose(to_numpy(grad_sinks), [want_sink], rtol=8e-3)


# --- What cuDNN is given ---------------------------------------------------------------------------------


def test_arrays_that_fit_are_not_copied(dsa):
    arrays = q, kv, sinks, ids = inputs(h=64, s=2, empty=False)
    out, lse = forward_of(*arrays)
    grad = torch.ones_like(q)
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 9, "cudnn")
    assert plan.valid_rows is None
    laid = contract_cudnn.Ids(plan.indices, plan.topk_length, None)
    gradient(arrays, grad, laid, out=out, lse=lse, deterministic=dsa.major == 10)
    (call,) = dsa.calls
    given = (call.q, call.kv, call.out, call.dout, call.lse, call.sinks, call.ids, call.lengths)
    for x, own in zip(given, (q, kv, out, grad, lse, sinks, plan.indices, plan.topk_length), strict=True):
        assert x.data_ptr() == own.data_ptr()
    assert call.ids.shape == (4, 128) and call.kv.shape == (18, D) and call.scale == SCALE
    assert call.deterministic is (dsa.major == 10)


def test_strided_and_wide_arrays_are_converted(dsa):
    arrays = q, kv, sinks, ids = inputs(h=4)
    out, lse = forward_of(*arrays)
    grad = torch.randn(q.shape).to(q.dtype)
    want = gradient(arrays, grad, unplanned(ids, 9), out=out, lse=lse)
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, kv)]
    wide = torch.stack([grad.float()] * 2, -1)[..., 0]
    sinks64 = sinks.double()
    got = gradient((*other, sinks64, ids), wide, unplanned(ids, 9), out=out.float(), lse=lse.double())
    for g, w in zip(got[:2], want[:2], strict=True):
        check_equal(g, w)
    assert got[2].dtype == torch.float64
    check_equal(got[2].float(), want[2])


def test_ids_are_laid_out_as_in_a_plan(dsa):
    q, kv, sinks, ids = inputs()
    spec = spec_of(q, kv, sinks, ids)
    made, plan = torch_bridge_cudnn.laid_out(unplanned(ids, 9), spec, False), planned(ids, 9)
    check_equal(made.lengths, plan.lengths)
    check_equal(made.rows, plan.rows)
    big = torch.iinfo(torch.int32).max
    ascending = torch.where(made.ids < 0, big, made.ids).sort(-1).values
    check_equal(torch.where(ascending == big, -1, ascending), plan.ids[:, 0])
    assert torch_bridge_cudnn.laid_out(unplanned(ids, 9), spec, True).rows is None
    full = torch.zeros(2, 4, 129, dtype=torch.int32)
    full_laid = torch_bridge_cudnn.laid_out(unplanned(full, 9), spec_of(q, kv, sinks, full), False)
    assert full_laid.rows is None and full_laid.ids.shape == (8, 256)


def test_nothing_to_do_calls_nothing(dsa):
    for arrays in (
        (*inputs()[:3], torch.full((2, 4, 7), -1)),
        (*inputs(t=0)[:3], torch.zeros(2, 4, 0, dtype=torch.int64)),
        inputs(s=0),
    ):
        q, kv, sinks, ids = arrays
        out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -INF)
        for lay in (planned, unplanned):
            got = gradient(arrays, torch.full_like(q, NAN), lay(ids, 9), out=out, lse=lse)
            for g, like in zip(got, (q, kv, sinks), strict=True):
                assert g.shape == like.shape and g.dtype == like.dtype and (g == 0).all()
            if dsa.major == 10:
                out_, lse_ = torch_bridge_cudnn.forward(q, kv, sinks, lay(ids, 9), spec_of(*arrays), False)
                assert (out_ == 0).all() and (lse_ == -INF).all() and lse_.dtype == torch.float32
    assert dsa.calls == []


def test_a_small_workspace_is_refused(hopper):
    arrays = q, _, _, ids = inputs()
    least = 8 * q[..., 0].numel()
    gradient(arrays, q, unplanned(ids, 9), cap=least)
    with pytest.raises(ValueError, match=f"at least {least}"):
        gradient(arrays, q, unplanned(ids, 9), cap=least - 1)


def test_the_workspace_of_a_fixed_order_is_cudnns_own(dsa):
    if dsa.major != 10:
        pytest.skip("SM90 has no deterministic gradient")
    arrays = q, kv, _, ids = inputs(h=64, s=2)
    least = 8 * 2 * 64 + 63 * 4 * kv.numel()  # of the two queries that have a key
    gradient(arrays, q, planned(ids, 9), deterministic=True, cap=least)
    with pytest.raises(ValueError, match=f"at least {least}"):
        gradient(arrays, q, planned(ids, 9), deterministic=True, cap=least - 1)
    gradient(arrays, q, planned(ids, 9), cap=least - 1)
    assert [call.deterministic for call in dsa.calls] == [True, False]


# --- What it refuses -------------------------------------------------------------------------------------


def like(shape, dtype):
    return np.broadcast_to(np.zeros((), dtype), shape)


def spec_like(b=1, s=1, h=4, k=8, d=D, dtype=ml_dtypes.bfloat16):
    q, kv = like((b, s, h, d), dtype), like((b, k, d), dtype)
    return q, kv, contract.check(q, kv, np.zeros(h, np.float32), np.zeros((b, s, 1), np.int32), 0.1)


@pytest.mark.parametrize(
    ("major", "sizes", "words"),
    [
        (9, {}, None),
        (9, {"dtype": np.float16, "h": 1000}, None),
        (9, {"dtype": np.float32}, "bfloat16 or float16, got float32"),
        (9, {"d": 64}, "head_dim 512, got 64"),
        (9, {"b": 2, "k": 2**21 - 1}, None),
        (9, {"b": 2, "k": 2**21}, "at most 4194303 key rows"),
        (10, {"b": 2, "k": 2**21, "h": 128}, None),
        (10, {"b": 2, "k": 2**30 + 1}, "at most 2147483648 key rows"),
        (10, {"h": 129}, "at most 128 heads, got 129"),
        (8, {}, "SM90 or SM100"),
        (12, {}, "SM90 or SM100"),
    ],
)
def test_what_the_kernels_take(major, sizes, words):
    q, kv, spec = spec_like(**sizes)
    reason = contract_cudnn.unfit(q, kv, spec, major)
    assert reason is None if words is None else words in reason
    with contextlib.nullcontext() if words is None else pytest.raises(RuntimeError, match=f"'cudnn'.*{words}"):
        contract_cudnn.require(q, kv, spec, major)


def test_other_refusals():
    q, kv, spec = spec_like()
    with pytest.raises(RuntimeError, match="q's dtype bfloat16, got float16"):
        contract_cudnn.require(q, kv.astype(np.float16), spec, 9)
    with pytest.raises(ValueError, match="reference_rounding"):
        contract_cudnn.require(q, kv, spec, 9, reference_rounding=True)
    contract_cudnn.require_order("atomic", 9)
    contract_cudnn.require_order("deterministic", 10)
    with pytest.raises(RuntimeError, match=r"deterministic.*SM100"):
        contract_cudnn.require_order("deterministic", 9)


def test_array_functions_say_why_they_cannot():
    rng = np.random.default_rng(0)
    q, kv, ids = rng.standard_normal((1, 2, 2, D)), rng.standard_normal((1, 3, D)), np.zeros((1, 2, 1), np.int64)
    out, lse = dsv4cp.dsv4_sparse_attention(q, kv, np.zeros(2), ids, 1.0, return_lse=True)
    with pytest.raises(RuntimeError, match="'cudnn'"):
        dsv4cp.dsv4_sparse_attention(q, kv, np.zeros(2), ids, 1.0, backend="cudnn")
    with pytest.raises(RuntimeError, match="'cudnn'"):
        dsv4cp.dsv4_sparse_attention_grad(out, q, kv, np.zeros(2), ids, out, lse, 1.0, backend="cudnn")


@pytest.mark.parametrize(
    ("capability", "words"),
    [("80", r"Hopper or Blackwell.*SM80"), ("120", "SM120"), ("90", None), ("100", None), ("103", None)],
)
def test_which_machines_can(monkeypatch, capability, words):
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(compute_capability=capability))
    FakeDsa(9).install(monkeypatch)
    found = _backend._cudnn_missing.__wrapped__()
    assert found is None if words is None else re.search(words, found)


def test_a_package_that_does_not_load_is_told(monkeypatch):
    monkeypatch.setattr(cupy.cuda, "Device", lambda: SimpleNamespace(compute_capability="90"))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    monkeypatch.delitem(sys.modules, "cudnn.deepseek_sparse_attention", raising=False)
    assert "install dsv4cp[cudnn]" in _backend._cudnn_missing.__wrapped__()
    FakeDsa(9).install(monkeypatch)  # there, but without what its wrappers import
    del sys.modules["cudnn.deepseek_sparse_attention"].sparse_attention_backward_wrapper
    assert "ImportError" in _backend._cudnn_missing.__wrapped__()


def test_auto_never_takes_it(monkeypatch):
    monkeypatch.setattr(_backend, "missing", lambda name: None if name in ("cudnn", "reference") else "not here")
    assert _backend.pick("op", "auto", "cupy", offered=("reference", "cuda", "cudnn")) == "reference"
    assert _backend.pick("op", "cudnn", "cupy", offered=("reference", "cuda", "cudnn")) == "cudnn"


def test_is_available_knows_it(monkeypatch):
    for reason in ("no such luck", None):
        monkeypatch.setattr(torch_ops, "_missing", lambda name, reason=reason: reason if name == "cudnn" else "?")
        assert torch_ops.is_dsv4_kernel_available("sparse_attn_cudnn") is (reason is None)


# --- Plans -----------------------------------------------------------------------------------------------


def test_plans_are_checked():
    q, kv, sinks, ids = inputs()
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 9, "cudnn")
    spec = contract.check(q, kv, sinks, None, SCALE, plan=plan)
    assert spec.slots == 128
    laid = contract_cudnn.ids(plan, None, spec)
    assert laid == (plan.indices, plan.topk_length, plan.valid_rows)
    assert contract_cudnn.ids(None, ids, spec) == (ids, None, None)
    parts = {"backend": "cudnn", "indices": plan.indices, "topk_length": plan.topk_length}
    parts |= {"valid_rows": plan.valid_rows, "kv_sequence": 9}
    for changed, kind, words in (
        ({"backend": "tilelang"}, ValueError, "plan"),
        ({"kv_sequence": 8}, ValueError, "kv_sequence 9"),
        ({"topk_length": None}, TypeError, "topk_length"),
        ({"topk_length": plan.topk_length[1:]}, ValueError, "topk_length"),
        ({"topk_length": plan.topk_length.long()}, TypeError, "topk_length"),
        ({"topk_length": plan.topk_length.numpy()}, TypeError, "one library"),
        ({"valid_rows": plan.valid_rows.int()}, TypeError, "valid_rows"),
        ({"valid_rows": torch.zeros(9, dtype=torch.int64)}, ValueError, "at most 8 rows"),
        ({"indices": plan.indices.long()}, TypeError, "indices"),
        ({"indices": plan.indices[:, 0]}, ValueError, "indices"),
        ({"indices": plan.indices[1:]}, ValueError, "indices"),
    ):
        with pytest.raises(kind, match=words):
            contract_cudnn.ids(SparseIndexPlan(**(parts | changed)), None, spec)
    with pytest.raises(ValueError, match=r"plan\.indices"):
        contract.check(q, kv, sinks, None, SCALE, plan=SparseIndexPlan(**(parts | {"indices": plan.indices[1:]})))
    with pytest.raises(ValueError, match="plan for backend"):
        torch_ops.dsv4_sparse_attention(q, kv, sinks, None, SCALE, backend="torch", plan=plan)


# --- torch_ops and the operators -------------------------------------------------------------------------


@pytest.fixture
def everywhere(dsa, monkeypatch):
    """backend="cudnn" passes every check of the machine; the operators run the reference, as on CPU tensors."""
    monkeypatch.setattr(torch_bridge_cudnn, "missing", lambda q, kv, spec: None)
    monkeypatch.setattr("dsv4cp._torch_backend._unfit", lambda tensors, require_bf16: None)
    monkeypatch.setattr(contract_cudnn, "unfit", lambda q, kv, spec, major: None)
    return dsa


def small(dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, kv = (torch.randn(n, generator=g, dtype=dtype) for n in ((2, 4, 3, 8), (2, 6, 8)))
    ids = torch.randint(-2, 8, (2, 4, 5), generator=g)
    ids[0, 2] = -1
    return q, kv, torch.randn(3, generator=g, dtype=dtype), ids


@pytest.mark.parametrize("with_plan", [False, True])
def test_operators_equal_the_reference(everywhere, with_plan):
    *args, ids = small(torch.float64)
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 6, "cudnn") if with_plan else None
    given = None if with_plan else ids
    results = []
    for backend in ("torch", "cudnn"):
        leaves = [x.clone().requires_grad_() for x in args]
        own = {"plan": plan} if backend == "cudnn" else {}
        ids_ = given if backend == "cudnn" else ids
        out, lse = torch_ops.dsv4_sparse_attention(*leaves, ids_, 0.4, backend=backend, return_lse=True, **own)
        weight = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        first = torch.autograd.grad((out * weight).sum(), leaves, create_graph=True)
        again = torch.autograd.grad((out * weight).sum(), leaves, retain_graph=True)
        through_lse = torch.autograd.grad(lse.nan_to_num(neginf=0.0).sum(), leaves[:2], retain_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        results.append((out, lse, *first, *again, *through_lse, *second))
    for got, want in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(to_numpy(got), to_numpy(want), rtol=1e-9, atol=1e-9)


def test_forward_mode_is_refused(everywhere):
    *args, ids = small()
    leaves, forward_ad = [x.requires_grad_() for x in args], torch.autograd.forward_ad
    out = torch_ops.dsv4_sparse_attention(*leaves, ids, 0.4, backend="cudnn")
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="sparse_attention_cudnn_grad: it has no forward-mode derivative"):
            torch.autograd.grad(out, leaves, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))
        with pytest.raises(NotImplementedError, match="sparse_attention_cudnn: it has no forward-mode derivative"):
            q = forward_ad.make_dual(args[0], args[0])
            torch_ops.dsv4_sparse_attention(q, *args[1:], ids, 0.4, backend="cudnn")


def test_deterministic_gradients_need_blackwell(everywhere):
    *args, ids = small()
    options = {"backend": "cudnn", "backward_impl": "deterministic"}
    torch_ops.dsv4_sparse_attention(*args, ids, 0.4, **options)
    leaf = args[0].clone().requires_grad_()
    refused = pytest.raises(RuntimeError, match=r"deterministic.*SM100") if everywhere.major == 9 else None
    with refused or contextlib.nullcontext():
        torch_ops.dsv4_sparse_attention(leaf, *args[1:], ids, 0.4, **options).sum().backward()
    with pytest.raises(ValueError, match="reference_rounding"):
        torch_ops.dsv4_sparse_attention(*args, ids, 0.4, backend="cudnn", reference_rounding=True)


@pytest.mark.parametrize("with_plan", [False, True])
def test_operators_pass_opcheck(with_plan):
    q, kv, sinks, ids = small()
    laid = planned(ids, 6) if with_plan else unplanned(ids, 6)
    options = 0.4, False, False, CAP
    out, lse = torch_bridge_cudnn_ops.ATTEND(q, kv, sinks, *laid, *options)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    leaves = [x.clone().requires_grad_() for x in (q, kv, sinks)]
    for op, args in (
        (torch_bridge_cudnn_ops.ATTEND, (*leaves, *laid, *options)),
        (torch_bridge_cudnn_ops.ATTEND_GRAD, (out, q, kv, sinks, *laid, out, lse, *options)),
    ):
        assert set(torch.library.opcheck(op, args, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.parametrize("with_plan", [False, True])
def test_one_graph(everywhere, with_plan):
    torch._dynamo.reset()
    *args, ids = small()
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 6, "cudnn") if with_plan else None

    def step(q, kv, sinks, ids):
        return torch_ops.dsv4_sparse_attention(q * 1, kv, sinks, ids, 0.4, backend="cudnn", plan=plan)

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_() for x in args]
        out = function(*leaves, ids)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for got, want in zip(results[1], results[0], strict=True):
        check_close(got, want, "attention_grad", like=want)
    torch._dynamo.reset()


def test_on_gpu_tensors_the_operators_reach_cudnn(dsa, monkeypatch):
    """What the operators do with CUDA tensors, which these pretend to be."""
    arrays = q, kv, sinks, ids = inputs()
    want_out, want_lse = forward_of(*arrays)

    class Cuda(torch.Tensor):
        is_cuda = True

    def ours(q, kv, sinks, topk_idxs, scale, rounding, deterministic, cap):
        assert type(topk_idxs) is torch.Tensor and q.shape[0] in (1, 2)
        kv = clean(kv)
        return reference.forward(q, kv, sinks, topk_idxs, contract.check(q, kv, sinks, topk_idxs, scale), rounding)

    monkeypatch.setattr("dsv4cp.sparse_attention.torch_bridge_kernels._cuda_forward", ours)
    monkeypatch.setattr(torch_bridge_cudnn_ops, "contract", SimpleNamespace(
        check=lambda *a, **k: spec_of(*arrays), check_grad=lambda *a, **k: spec_of(*arrays)
    ))  # fmt: skip
    pretend = q.as_subclass(Cuda)
    for lay in (planned, unplanned):
        laid = lay(ids, 9)
        out, lse = torch_bridge_cudnn_ops._forward(pretend, kv, sinks, *laid, SCALE, False, False, CAP)
        check_close(out.as_subclass(torch.Tensor), want_out, "attention")
        check_close(lse.as_subclass(torch.Tensor), want_lse, "lse", "bfloat16")
        grads = torch_bridge_cudnn_ops._backward(
            q, pretend, kv, sinks, *laid, want_out, want_lse, SCALE, False, False, CAP
        )
        want = gradient(arrays, q, laid)
        for g, w in zip(grads, want, strict=True):
            check_equal(g.as_subclass(torch.Tensor), w)
    kinds = [call.kind for call in dsa.calls]
    assert kinds == (["backward"] * 4 if dsa.major == 9 else ["forward", "backward", "backward"] * 2)


# --- CuPy arrays -----------------------------------------------------------------------------------------


class Arrays:
    """NumPy in the place of CuPy, for a module that only makes and reshapes arrays with it."""

    zeros, full, ascontiguousarray = np.zeros, np.full, np.ascontiguousarray


@pytest.fixture
def arrays_cross(dsa, monkeypatch):
    monkeypatch.setattr(cudnn, "cupy", Arrays)
    monkeypatch.setattr(cudnn, "major", lambda x: dsa.major)
    entered = []

    @contextlib.contextmanager
    def on(x):
        entered.append(x)
        yield
        entered.append(None)

    def to_cupy(x):
        assert entered[-1] is not None, "on another stream"
        return _bridge.to_numpy(x)

    monkeypatch.setattr(_bridge, "torch_on_stream_of", on)
    monkeypatch.setattr(_bridge, "to_cupy", to_cupy)
    return entered


def numpy_inputs(**options):
    arrays = inputs(**options)
    return [_bridge.to_numpy(x) for x in arrays], arrays


@pytest.mark.parametrize("with_plan", [False, True])
def test_arrays_cross_and_come_back(arrays_cross, dsa, monkeypatch, with_plan):
    arrays, tensors = numpy_inputs()
    q, kv, sinks, ids = arrays
    spec = spec_of(*arrays)
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, 9, "cudnn") if with_plan else None
    laid = contract_cudnn.ids(plan, ids, spec)
    from dsv4cp.sparse_attention import cuda

    monkeypatch.setattr(cuda, "forward", lambda q, kv, sinks, ids, spec: reference.forward(
        q, np.where(np.isnan(kv.astype(np.float32)), 0, kv).astype(kv.dtype), sinks, ids, spec
    ))  # fmt: skip
    out, lse = cudnn.forward(q, kv, sinks, laid, spec, False)
    want_out, want_lse = forward_of(*tensors)
    check_close(out, want_out, "attention", like=q)
    check_close(lse, want_lse, "lse", "bfloat16")
    grad = np.ascontiguousarray(q[:, :, ::-1])[:, :, ::-1]  # negative strides, which torch does not have
    options = {"all_rows_nonempty": False, "deterministic": False, "workspace_bytes": CAP}
    got = cudnn.backward(grad, q, kv, sinks, laid, _bridge.to_numpy(want_out), want_lse.numpy(), spec, **options)
    want = gradient(tensors, tensors[0], planned(tensors[3], 9) if with_plan else unplanned(tensors[3], 9))
    for g, w, x in zip(got, want, (q, kv, sinks), strict=True):
        assert g.dtype == x.dtype
        check_equal(g, w, like=x)
    assert arrays_cross[-2] is q and arrays_cross[-1] is None


def test_arrays_without_memory_do_not_cross(arrays_cross, dsa):
    nobody = np.full((2, 4, 7), -1)
    for arrays in (numpy_inputs(t=0)[0], numpy_inputs(s=0)[0], (*numpy_inputs()[0][:3], nobody)):
        q, kv, sinks, ids = arrays
        spec = spec_of(*arrays)
        plan = dsv4cp.plan_dsv4_sparse_indices(ids, 9, "cudnn") if ids is nobody else None
        laid = contract_cudnn.ids(plan, ids, spec)
        if dsa.major == 10:
            out, lse = cudnn.forward(q, kv, sinks, laid, spec, False)
            assert (out == 0).all() and (lse == -INF).all() and lse.dtype == np.float32
        out, lse = np.zeros_like(q), np.zeros(q.shape[:3], np.float32)
        options = {"all_rows_nonempty": False, "deterministic": False, "workspace_bytes": CAP}
        for g, x in zip(cudnn.backward(q, q, kv, sinks, laid, out, lse, spec, **options), arrays, strict=False):
            assert g.shape == x.shape and g.dtype == x.dtype and (g == 0).all()
    assert arrays_cross == [] and dsa.calls == []


def test_the_order_is_checked_for_arrays_too(arrays_cross, dsa):
    arrays, _ = numpy_inputs()
    options = {"all_rows_nonempty": False, "deterministic": True, "workspace_bytes": CAP}
    out, lse = np.zeros_like(arrays[0]), np.zeros(arrays[0].shape[:3], np.float32)
    laid = contract_cudnn.Ids(arrays[3], None, None)

    def call():
        cudnn.backward(arrays[0], *arrays[:3], laid, out, lse, spec_of(*arrays), **options)

    if dsa.major == 9:
        with pytest.raises(RuntimeError, match="deterministic"):
            call()
    else:
        call()
        assert dsa.calls[0].deterministic


@pytest.mark.parametrize("pointer", [0, 1, 2, 0xABC0])
def test_torch_works_on_cupys_stream(monkeypatch, pointer):
    log = []

    @contextlib.contextmanager
    def noted(*what):
        log.append(("in", *what))
        yield
        log.append(("out", *what))

    stream = SimpleNamespace(ptr=pointer)
    monkeypatch.setattr(cupy.cuda, "Device", lambda index: noted("device", index))
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda s: noted("stream", s))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda index: f"default {index}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: f"{ptr:x} {device}")
    monkeypatch.setattr(_bridge, "_recorded", {})
    x = SimpleNamespace(data=SimpleNamespace(device_id=3))
    if pointer == 2:
        with pytest.raises(RuntimeError, match="per-thread"), _bridge.torch_on_stream_of(x):
            pass
        assert log[0] == ("in", "device", 3) and len(log) == 1
        return
    with _bridge.torch_on_stream_of(x):
        assert len(log) == 2
    name = "default 3" if pointer < 2 else "abc0 3"
    assert log == [("in", "device", 3), ("in", "stream", name), ("out", "stream", name), ("out", "device", 3)]
    assert _bridge._recorded == ({} if pointer < 2 else {pointer: stream})


# --- The packing kernel's launch -------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("s", "blocks"), [(0, 0), (1, 1), (9, 5), (2**18, 2**16)])
def test_packing_launch(monkeypatch, wide, s, blocks):
    made = []

    def launch(kernel, *, grid, block, stream=None, **arguments):
        kinds = {p.name: p.kind for p in kernel.parameters}
        assert arguments.keys() == kinds.keys()
        for name, value in arguments.items():
            assert type(value) is (kinds[name] or int), name
        values = {n: v.item() if kinds[n] else v for n, v in arguments.items()}
        made.append((kernel.function, grid, block, stream, values))

    monkeypatch.setattr(_kernels, "launch", launch)
    spec = spec_like(b=2, s=s)[2]
    cuda_pack.launch_pack_ids(10, 20, 30, spec, 128, wide=wide, stream=7)
    ((name, grid, block, stream, arguments),) = made
    assert name == ("sparse_attention_pack_wide_ids" if wide else "sparse_attention_pack_ids")
    assert (grid, block, stream) == (blocks, 128, 7)
    assert arguments == {
        "ids": 10, "packed": 20, "lengths": 30, "rows": 2 * s, "queries": s, "keys": 8, "slots": 1, "width": 128,
    }  # fmt: skip


def test_torch_bridge_says_why(monkeypatch):
    q, kv, sinks, ids = inputs()
    monkeypatch.setattr(_bridge, "missing", lambda name: "no such luck" if name == "cudnn" else None)
    with pytest.raises(RuntimeError, match="'cudnn' cannot run: no such luck"):
        torch_bridge.dsv4_sparse_attention(q, kv, sinks, ids, SCALE, backend="cudnn")
    monkeypatch.setattr(_bridge, "missing", lambda name: None)
    with pytest.raises(RuntimeError, match="'cudnn' cannot run: it needs CUDA tensors"):
        torch_bridge.dsv4_sparse_attention(q, kv, sinks, ids, SCALE, backend="cudnn")
