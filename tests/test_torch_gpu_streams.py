"""CUDA tensors on side streams and in threads, devices left as they were, whole arrays handed over and back."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from dsv4cp import _bridge, torch_ops
from tests.support.compare import check_equal

pytestmark = pytest.mark.gpu

REPEATS = 100
SPIN = 3_000_000  # clock cycles, about 1.5 ms: long after the host has queued what follows


def sinkhorn(x):
    return torch_ops.dsv4_sinkhorn_normalize(x, backend="tilelang", repeat=20, eps=1e-6)


def current():
    """Devices and streams that are current for torch and CuPy."""
    import cupy

    return (
        torch.cuda.current_device(),
        torch.cuda.current_stream().cuda_stream,
        cupy.cuda.runtime.getDevice(),
        cupy.cuda.get_current_stream().ptr,
    )


# --- Streams -----------------------------------------------------------------------------------------------


def test_side_stream_waits_for_a_long_kernel_that_fills_the_inputs():
    real, grad = torch.randn(2, 4096, 4, 4, device="cuda")
    want = sinkhorn(leaf := real.clone().requires_grad_())
    (want_grad,) = torch.autograd.grad(want, leaf, grad)
    x, g = torch.empty_like(real).requires_grad_(), torch.empty_like(grad)
    side = torch.cuda.Stream()
    before = current()
    for _ in range(REPEATS):
        with torch.no_grad():
            x.fill_(float("nan"))
            g.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            with torch.no_grad():
                x.copy_(real)
            y = sinkhorn(x)
            torch.cuda._sleep(SPIN)
            g.copy_(grad)
            (got,) = torch.autograd.grad(y, x, g)
        side.synchronize()
        check_equal(y, want)
        check_equal(got, want_grad)
    assert current() == before


def test_backward_called_under_another_stream_runs_on_the_forwards():
    real, grad = torch.randn(2, 4096, 4, 4, device="cuda")
    want = torch.autograd.grad(sinkhorn(leaf := real.clone().requires_grad_()), leaf, grad)[0]
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(10):
        x = torch.full_like(real, float("nan")).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            torch.cuda._sleep(SPIN)
            with torch.no_grad():
                x.copy_(real)
            y = sinkhorn(x)
        with torch.cuda.stream(other):
            other.wait_stream(one)
            y.backward(grad)
            got = x.grad.clone()
        torch.cuda.synchronize()
        check_equal(got, want)


def test_index_lists_on_a_side_stream():
    real = torch.randint(-1, 64, (2, 257, 64), device="cuda")

    def lists(topk):
        ids = torch_ops.build_dsv4_sparse_topk_indices(
            batch_size=2,
            seq_len=257,
            key_len=257 + 64,
            window_size=16,
            device="cuda",
            compress_ratio=4,
            compressed_topk=topk,
            n_pooled=64,
        )
        plan = torch_ops.plan_dsv4_sparse_indices(ids, 257 + 64, "tilelang")
        cudnn = torch_ops.plan_dsv4_sparse_indices(ids, 257 + 64, "cudnn", all_rows_nonempty=True)
        return ids, plan.indices, cudnn.indices, cudnn.topk_length

    want = lists(real)
    topk = torch.empty_like(real)
    side = torch.cuda.Stream()
    before = current()
    for _ in range(REPEATS):
        topk.fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(SPIN)
            topk.copy_(real)
            got = lists(topk)
        side.synchronize()
        for g, w in zip(got, want, strict=True):
            check_equal(g, w)
    assert current() == before


def test_a_finished_call_does_not_wait():
    x = torch.randn(8192, 4, 4, device="cuda")
    sinkhorn(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 100 ms
    busy = torch.cuda.Event()
    sinkhorn(x)
    busy.record()
    assert not busy.query()
    torch.cuda.synchronize()


def test_threads_with_streams_of_their_own():
    inputs = torch.randn(8, 2048, 4, 4, device="cuda")
    grads = torch.randn(8, 2048, 4, 4, device="cuda")
    want = []
    for x, grad in zip(inputs, grads, strict=True):
        leaf = x.clone().requires_grad_()
        want += torch.autograd.grad(sinkhorn(leaf), leaf, grad)
    torch.cuda.synchronize()
    got, errors = [None] * 8, []

    def work(n):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    x = torch.empty_like(inputs[n])
                    torch.cuda._sleep(SPIN // 10)
                    x.copy_(inputs[n])
                    x.requires_grad_()
                    sinkhorn(x).backward(grads[n])
                torch.cuda.current_stream().synchronize()
                got[n] = x.grad
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    for g, w in zip(got, want, strict=True):
        check_equal(g, w)


# --- Devices -----------------------------------------------------------------------------------------------


def test_current_device_and_streams_are_left_alone():
    before = current()
    x = torch.randn(5, 4, 4, device="cuda", requires_grad=True)
    sinkhorn(x).sum().backward()
    torch_ops.plan_dsv4_sparse_indices(torch.zeros(1, 2, 3, dtype=torch.int64, device="cuda"), 4, "cudnn")
    assert current() == before
    with pytest.raises(TypeError):
        sinkhorn(torch.ones(4, 4, dtype=torch.int64, device="cuda"))
    assert current() == before


def test_tensors_of_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    real = torch.randn(100, 4, 4)
    want = sinkhorn(real.cuda(0))
    before = current()
    x = real.cuda(1).requires_grad_()
    y = sinkhorn(x)
    y.sum().backward()
    assert y.device == x.grad.device == torch.device("cuda:1")
    check_equal(y, want)
    ids = torch.tensor([[[0, 5, -1]]], device="cuda:1")
    plan = torch_ops.plan_dsv4_sparse_indices(ids, 4, "tilelang")
    assert plan.indices.device == ids.device and plan.indices.tolist() == [[[0, -1, -1]]]
    assert current() == before
    with pytest.raises(ValueError, match="expected an array on cuda:1"):
        torch.ops.dsv4.sinkhorn_normalize_grad.default(want, y.detach(), 3, 1e-6)


# --- Whole arrays ------------------------------------------------------------------------------------------

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 3)], ids=str)
def test_round_trip_keeps_dtype_shape_and_memory(dtype, shape):
    x = (torch.arange(int(np.prod(shape)), device="cuda").reshape(shape) % 7).to(dtype)
    a = _bridge.to_cupy(x)
    assert a.dtype.name == str(dtype).rpartition(".")[2] and a.shape == shape
    check_equal(a, x)
    back = _bridge.to_torch(a)
    assert back.dtype == dtype and back.device == x.device
    check_equal(back, x)
    if x.numel():
        assert a.data.ptr == x.data_ptr() == back.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_survive_and_history_stays_behind(dtype):
    x = torch.randn(4, 6, device="cuda").to(dtype).requires_grad_()
    for view in (x.T, x[::2, 1::3], x[:, :1].expand(4, 5), x[2]):
        a = _bridge.to_cupy(view)
        assert a.strides == tuple(s * a.itemsize for s in view.stride())
        check_equal(a, view)
        check_equal(_bridge.to_torch(a), view)
        assert not _bridge.to_torch(a).requires_grad


def test_cupy_arrays_that_torch_cannot_describe_are_refused():
    import cupy

    with pytest.raises(ValueError, match="flipped"):
        _bridge.to_torch(cupy.arange(4)[::-1])
    with pytest.raises(ValueError, match="expected a CPU tensor"):
        _bridge.to_numpy(torch.ones(2, device="cuda"))


def test_hand_over_orders_the_two_libraries_streams():
    import cupy

    real = torch.randn(1 << 18, device="cuda")
    torch_side, cupy_side = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for _ in range(10):
        x = torch.full_like(real, float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch_side), cupy_side:
            torch.cuda._sleep(SPIN)
            x.copy_(real)
            doubled = _bridge.to_cupy(x) * 2  # CuPy's stream waits for torch's
            back = _bridge.to_torch(doubled) + 1  # and torch's for CuPy's
        torch.cuda.synchronize()
        check_equal(back, real * 2 + 1)


def test_memory_lives_until_cupys_stream_is_done_with_it():
    import cupy

    real = torch.randn(1 << 22, device="cuda")
    torch.cuda.synchronize()  # side streams do not wait for the default one, which makes real
    side, reader = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for _ in range(10):
        with torch.cuda.stream(side), reader:
            x = real.clone()
            a = _bridge.to_cupy(x)
            with torch.cuda.stream(torch.cuda.ExternalStream(reader.ptr)):
                torch.cuda._sleep(SPIN)
            copy = a.copy()
            del a, x
            torch.full_like(real, -1.0)  # would take the same block at once
        torch.cuda.synchronize()
        check_equal(_bridge.to_torch(copy), real)


def test_what_cupy_makes_for_torch_is_torchs_memory():
    import cupy

    like = torch.empty(1, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        before = torch.cuda.memory_allocated()
        with _bridge.cupy_on_stream_of(like) as stream:
            assert stream.ptr == side.cuda_stream == cupy.cuda.get_current_stream().ptr
            a = cupy.arange(1 << 20, dtype=cupy.int32).reshape(1 << 10, 1 << 10)
            part = a[3:5]
        assert torch.cuda.memory_allocated() - before == 4 << 20
        t, p = _bridge.to_torch(a), _bridge.to_torch(part)
        assert t.data_ptr() == a.data.ptr and p.data_ptr() == part.data.ptr
        assert t.shape == (1 << 10, 1 << 10) and t.dtype == torch.int32
        assert p.tolist() == part.get().tolist()
        t.record_stream(torch.cuda.current_stream())
        del a, part, t, p
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
