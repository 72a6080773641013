"""Capture a layer's calls in a CUDA graph and replay them on new numbers. Needs a GPU.

A replay writes into the memory of all arrays of the capture, temporary ones too. CuPy's pool would give that of the
temporary ones to the next array that asks: the capture has a pool of its own, which lives as long as the graph.
"""

import cupy
import ml_dtypes

import dsv4cp

S, H, D, R, WINDOW, TOPK = 256, 16, 512, 4, 64, 32
P, SCALE = S // R, D**-0.5
bf16 = ml_dtypes.bfloat16
cupy.random.seed(0)


def normal(*shape):
    return cupy.random.standard_normal(shape, dtype=cupy.float32)


# The graph reads and writes these arrays: new numbers are copied into them.
q, kv, sinks = normal(1, S, H, D).astype(bf16), normal(1, S + P, D).astype(bf16), normal(H)
chosen = cupy.sort(cupy.random.randint(0, P, (1, S, TOPK)))
mixing = normal(S, 4, 4)


def layer():
    """What is captured: index lists, plan, attention, Sinkhorn."""
    ids = dsv4cp.build_dsv4_sparse_topk_indices(
        batch_size=1, seq_len=S, key_len=S + P, window_size=WINDOW, compress_ratio=R, compressed_topk=chosen, n_pooled=P
    )
    plan = dsv4cp.plan_dsv4_sparse_indices(ids, S + P)
    out = dsv4cp.dsv4_sparse_attention(q, kv, sinks, None, SCALE, plan=plan)
    return out, dsv4cp.dsv4_sinkhorn_normalize(mixing, repeat=20, eps=1e-6)


stream = cupy.cuda.Stream(non_blocking=True)
pool = cupy.cuda.MemoryPool()
with stream:
    with cupy.cuda.using_allocator(pool.malloc):
        for _ in range(2):
            layer()  # compiles, and fills the pool: a capture cannot allocate
        stream.synchronize()
        stream.begin_capture()
        out, mixed = layer()  # the graph's results
        graph = stream.end_capture()

    for attempt in range(3):
        q[...] = normal(1, S, H, D).astype(bf16)
        chosen[...] = cupy.sort(cupy.random.randint(0, P, (1, S, TOPK)))
        mixing[...] = normal(S, 4, 4)
        graph.launch(stream)
        stream.synchronize()
        want_out, want_mixed = layer()
        same = bool((out == want_out).all() & (mixed == want_mixed).all())
        print(f"replay {attempt}: the same bits as calling the functions: {same}")
        if not same:
            raise SystemExit("a replay differs from the calls")

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for name, run in (("calls", layer), ("graph", lambda: graph.launch(stream))):
        begin.record()
        for _ in range(50):
            run()
        end.record()
        end.synchronize()
        print(f"{name}: {cupy.cuda.get_elapsed_time(begin, end) / 50:.3f} ms a layer")
