"""Your own Numba kernel between the ops: CuPy, Numba and torch share memory, nothing is copied. Needs a GPU."""

import cupy
from numba import cuda

import dsv4cp

S, H, D, WINDOW = 256, 8, 64, 32


@cuda.jit
def gate(out, weight):
    """out[s, h, d] *= weight[h], in place."""
    i = cuda.grid(1)
    if i < out.size:
        d = i % out.shape[2]
        h = i // out.shape[2] % out.shape[1]
        s = i // (out.shape[1] * out.shape[2])
        out[s, h, d] *= weight[h]


cupy.random.seed(0)
q = cupy.random.standard_normal((1, S, H, D), dtype=cupy.float32)
kv = cupy.random.standard_normal((1, S, D), dtype=cupy.float32)
sinks = cupy.zeros(H, cupy.float32)
weight = cupy.linspace(0.5, 1.5, H, dtype=cupy.float32)
ids = dsv4cp.build_dsv4_sparse_topk_indices(batch_size=1, seq_len=S, key_len=S, window_size=WINDOW, like=q)

out = dsv4cp.dsv4_sparse_attention(q, kv, sinks, ids, D**-0.5)
expected = out[0] * weight[:, None]

# The CUDA array interface: Numba takes a CuPy array as it is. One stream for both: the kernel waits for the op.
stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
gate[(out.size + 255) // 256, 256, stream](out[0], weight)
error = float(cupy.abs(out[0] - expected).max())
print(f"Numba's kernel worked on CuPy's memory, largest difference {error:.1e}")
if error > 1e-6:
    raise SystemExit("the kernel did not see CuPy's array, or ran too early")

# And back: a Numba array becomes a CuPy array for the ops.
mine = cuda.to_device(q.get())
again = dsv4cp.dsv4_sparse_attention(cupy.asarray(mine), kv, sinks, ids, D**-0.5)
same = bool((again == out / weight[:, None]).all()) or float(cupy.abs(again * weight[:, None] - out).max()) < 1e-6
print("a Numba array through cupy.asarray gives the same attention:", same)
if not same or cupy.asarray(mine).data.ptr != mine.__cuda_array_interface__["data"][0]:
    raise SystemExit("cupy.asarray copied or changed Numba's array")

# DLPack: torch tensors as CuPy arrays and the other way round. Tensors that require a gradient: dsv4cp.torch_ops.
try:
    import torch
except ImportError:
    print("torch is not installed: no DLPack with it")
else:
    tensor = torch.from_dlpack(out)
    view = cupy.from_dlpack(tensor)
    shared = view.data.ptr == out.data.ptr == tensor.data_ptr()
    print("DLPack to torch and back shares memory:", shared)
    if not shared:
        raise SystemExit("DLPack copied")
