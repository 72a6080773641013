"""Sparse attention in bounded memory: chunks change no bit, nothing grows with the length, caps are kept."""

from __future__ import annotations

import re
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from dsv4cp import dense_attention_topk, dsv4_sparse_attention, dsv4_sparse_attention_grad
from dsv4cp.sparse_attention import contract, reference, reference_chunks
from tests.support.attention_ways import DTYPES, NUMPY, inputs
from tests.support.compare import check_equal

MIB = 2**20
SCALE = 0.25
SHAPES = [
    pytest.param({"s": 13, "h": 3, "d": 16, "k": 40, "t": 7}, id="small"),
    pytest.param({"s": 9, "h": 8, "d": 512, "k": 300, "t": 256}, id="column blocks"),
    pytest.param({"s": 9, "h": 1, "d": 130, "k": 60, "t": 33}, id="one head"),
    pytest.param({"s": 5, "h": 64, "d": 64, "k": 200, "t": 129}, id="many heads"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_chunks_change_no_bit(shape, dtype):
    g, q, kv, sinks, ids = inputs(b=2, dtype=DTYPES[dtype], **shape)
    spec = contract.check(q, kv, sinks, ids, SCALE)
    out, lse = reference.forward(q, kv, sinks, ids, spec, step=shape["s"])
    grads = reference.backward(g, q, kv, sinks, ids, out, lse, spec, cap=2**40, step=shape["s"])
    for step in (1, 2, 3, 4, None):
        for a, b in zip(reference.forward(q, kv, sinks, ids, spec, step=step), (out, lse), strict=True):
            check_equal(a, b)
        got = reference.backward(g, q, kv, sinks, ids, out, lse, spec, cap=2**40, step=step)
        for a, b in zip(got, grads, strict=True):
            check_equal(a, b)


def peak_beyond(call) -> tuple[int, tuple]:
    """(bytes allocated at the peak beyond what is kept, results)."""
    call()
    tracemalloc.start()
    try:
        result = call()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak - kept, result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_working_memory_does_not_grow_with_the_length(dtype):
    peaks = []
    for s in (128, 512):
        g, q, kv, sinks, ids = inputs(b=2, s=s, h=8, d=64, k=s, t=256, dtype=DTYPES[dtype])
        forward, (out, lse) = peak_beyond(lambda args=(q, kv, sinks, ids): NUMPY.forward(*args, SCALE))
        saved = (g, q, kv, sinks, ids, out, lse)
        backward, _ = peak_beyond(lambda saved=saved: dsv4_sparse_attention_grad(*saved, SCALE))
        peaks.append((forward, backward - s * 64 * 4))  # the float32 sum of grad_kv
    assert max(peaks[1]) < 32 * MIB
    for small, large in zip(*peaks, strict=True):
        assert large < small + MIB


def test_a_cap_is_kept_and_changes_no_bit():
    g, q, kv, sinks, ids = inputs(b=2, s=40, h=8, d=64, k=50, t=120)
    out, lse = NUMPY.forward(q, kv, sinks, ids, SCALE)
    saved = (g, q, kv, sinks, ids, out, lse)
    want = dsv4_sparse_attention_grad(*saved, SCALE)
    with pytest.raises(ValueError, match="backward_workspace_bytes: expected at least") as refused:
        dsv4_sparse_attention_grad(*saved, SCALE, backward_workspace_bytes=1000)
    minimum = int(re.search(r"at least (\d+)", str(refused.value)).group(1))
    for cap in (minimum, minimum + 1, 2 * minimum, 7 * minimum, np.int64(2**40)):
        used, got = peak_beyond(
            lambda cap=cap: dsv4_sparse_attention_grad(*saved, SCALE, backward_workspace_bytes=cap)
        )
        assert used < cap + 50 * 64 * 4 + 16 * 1024  # the float32 sum of grad_kv, Python objects
        for a, b in zip(got, want, strict=True):
            check_equal(a, b)
    with pytest.raises(ValueError, match=f"at least {minimum} .*got {minimum - 1}"):
        dsv4_sparse_attention_grad(*saved, SCALE, backward_workspace_bytes=minimum - 1)


def test_rows_that_are_not_contiguous_are_not_copied_whole():
    _, q, _, sinks, ids = inputs(b=1, s=4, h=2, d=64)
    parent = np.zeros((1, 2**16, 128), np.float32)
    used, _ = peak_beyond(lambda: dsv4_sparse_attention(q, parent[:, :, ::2], sinks, ids, SCALE))
    assert used < MIB


def test_the_dense_oracle_takes_queries_in_chunks(monkeypatch):
    _, q, kv, sinks, ids = inputs(s=64, k=200)
    want = dense_attention_topk(q, kv, sinks, ids, SCALE)
    monkeypatch.setattr(reference_chunks, "HOST_BYTES", 2**17)
    used, got = peak_beyond(lambda: dense_attention_topk(q, kv, sinks, ids, SCALE))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert used < MIB


LONG = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
import numpy as np
from dsv4cp import dsv4_sparse_attention, dsv4_sparse_attention_grad
S, H, D, T, P = 16384, 8, 128, 640, 4096
rng = np.random.default_rng(0)
q, g = (rng.standard_normal((1, S, H, D), np.float32) for _ in "qg")
kv, sinks = rng.standard_normal((1, S + P, D), np.float32), np.zeros(H, np.float32)
i, w, j = np.arange(S)[:, None], np.arange(128), np.arange(512)
ids = np.concatenate([np.maximum(i - 127, 0) + w, S + (7 * i + 8 * j) % P], axis=1, dtype=np.int32)[None]
ids[0, :, :128][ids[0, :, :128] > i] = -1
out, lse = dsv4_sparse_attention(q, kv, sinks, ids, D**-0.5, return_lse=True)
last = (x[:, -2048:] for x in (q, ids, out, lse))  # the gradient takes longer, in memory that has one size
q, ids, out, lse = last
grads = dsv4_sparse_attention_grad(g[:, -2048:], q, kv, sinks, ids, out, lse, D**-0.5)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # ru_maxrss begins with the parent's
print(all(np.isfinite(x).all() for x in (out, lse, *grads)), int(status["VmHWM"].split()[0]) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is enforced on Linux")
def test_a_long_sequence_fits_four_gibibytes():
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    finite, peak_mib = done.stdout.split()
    inputs_and_outputs = 5 * 64 + 3 * 10 + 40  # q, g, out, grad_q and their like in MiB
    assert finite == "True" and int(peak_mib) < inputs_and_outputs + 256
