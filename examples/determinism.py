"""What is repeatable bit for bit, and how to ask for it where it is not the default."""

import numpy as np

import dsv4cp

try:
    import cupy

    xp = cupy if cupy.cuda.is_available() else np
except ImportError:
    xp = np

S, H, D, WINDOW, P, R = 256, 4, 64, 32, 64, 4
rng = np.random.default_rng(0)
q, grad_out = (xp.asarray(rng.standard_normal((1, S, H, D), dtype=np.float32)) for _ in range(2))
kv = xp.asarray(rng.standard_normal((1, S + P, D), dtype=np.float32))
sinks = xp.asarray(rng.standard_normal(H, dtype=np.float32))
ids = dsv4cp.build_dsv4_sparse_topk_indices(
    batch_size=1, seq_len=S, key_len=S + P, window_size=WINDOW, compress_ratio=R, n_pooled=P, like=q
)
scale = D**-0.5
print("arrays of", xp.__name__)


def same(name, first, second):
    """Says whether two results have the same bits, and stops where they must."""
    equal = all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
    print(f"{name}: {equal}")
    if not equal:
        raise SystemExit(f"{name}: bits differ")


# Forward passes: the same bits from call to call, whatever the batch, and for any part of the queries alone.
out, lse = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, return_lse=True)
again = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, scale, return_lse=True)
same("attention twice", (out, lse), again)
if xp is np:
    half = dsv4cp.dsv4_sparse_attention(q[:, S // 2 :], kv, sinks, ids[:, S // 2 :], scale)
    same("a half of the queries alone", (half,), (out[:, S // 2 :],))
x = xp.asarray(rng.standard_normal((100, 4, 4), dtype=np.float32))
mixed = dsv4cp.dsv4_sinkhorn_normalize(x, repeat=20, eps=1e-6)
same("one Sinkhorn matrix alone", (dsv4cp.dsv4_sinkhorn_normalize(x[7:8], repeat=20, eps=1e-6),), (mixed[7:8],))

# The gradient of kv is a sum over queries. NumPy adds in a fixed order. On a GPU "atomic", the default, adds as
# threads arrive; "deterministic" adds in a fixed order, or says that this version cannot.
arguments = (grad_out, q, kv, sinks, ids, out, lse, scale)
try:
    first, second = (dsv4cp.dsv4_sparse_attention_grad(*arguments, backward_impl="deterministic") for _ in range(2))
except RuntimeError as error:
    print("deterministic gradient:", error)
else:
    same("deterministic gradient twice", first, second)

# The indexer's choice: larger score first, then smaller id, so that ties are decided too.
tied = xp.asarray(np.array([[1.0, 3.0, 3.0, 2.0, 3.0]], np.float32))
best = dsv4cp.select_indexer_topk(tied, 2)
print("the two best of [1, 3, 3, 2, 3] have the ids", best[0].tolist())
if best[0].tolist() != [1, 2]:
    raise SystemExit("ties are not broken by id")
