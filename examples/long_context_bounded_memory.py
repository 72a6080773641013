"""A long row in bounded memory: scratch does not grow with the number of queries."""

import argparse
import tracemalloc

import numpy as np

import dsv4cp

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("tokens", nargs="?", type=int, default=2048)
S = parser.parse_args().tokens
H, D, R, WINDOW, TOPK = 2, 32, 4, 64, 64
IH, IE = 4, 16  # index heads and their channels
P = S // R
LIMIT_MIB = 256

rng = np.random.default_rng(0)
index_q = rng.standard_normal((1, S, IH, IE), dtype=np.float32)
index_k = rng.standard_normal((1, P, IE), dtype=np.float32)
index_w = rng.standard_normal((1, S, IH), dtype=np.float32)
q = rng.standard_normal((1, S, H, D), dtype=np.float32)
kv = rng.standard_normal((1, S + P, D), dtype=np.float32)
sinks = np.zeros(H, np.float32)


def scratch(name, call):
    """The call's result, and what it held at most beyond it."""
    tracemalloc.start()
    result = call()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    mib = (peak - now) / 2**20
    print(f"{name:26} {mib:7.1f} MiB beyond its result")
    if mib > LIMIT_MIB:
        raise SystemExit(f"{name} used more than {LIMIT_MIB} MiB")
    return result


print(f"{S} queries, {S + P} keys; all scores at once would take {S * P * 4 / 2**20:.0f} MiB")
rules = {"compress_ratio": R, "softmax_scale": IE**-0.5}
chosen = scratch("indexer top-k", lambda: dsv4cp.dsv4_indexer_topk(index_q, index_k, index_w, TOPK, **rules))
ids = dsv4cp.build_dsv4_sparse_topk_indices(
    batch_size=1,
    seq_len=S,
    key_len=S + P,
    window_size=WINDOW,
    compress_ratio=R,
    compressed_topk=chosen,
    n_pooled=P,
    dtype="int32",
)
scale = D**-0.5
out, lse = scratch("sparse attention", lambda: dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, return_lse=True))
scratch(
    "sparse attention gradient",
    lambda: dsv4cp.dsv4_sparse_attention_grad(np.ones_like(out), q, kv, sinks, ids, out, lse, scale),
)

# A part of the queries alone gives the same bits as the whole.
half = dsv4cp.dsv4_sparse_attention(q[:, S // 2 :], kv, sinks, ids[:, S // 2 :], scale)
print("the second half alone gives the same bits:", np.array_equal(half, out[:, S // 2 :]))
if not np.array_equal(half, out[:, S // 2 :]):
    raise SystemExit("results depend on the chunk")
