"""What "auto" takes, what can be asked for by name, and what happens when it cannot run."""

import numpy as np

import dsv4cp

x = np.random.default_rng(0).standard_normal((5, 4, 4)).astype(np.float32)

# NumPy arrays: "auto" is the reference. The result is the same array, bit for bit.
auto = dsv4cp.dsv4_sinkhorn_normalize(x, repeat=20, eps=1e-6)
named = dsv4cp.dsv4_sinkhorn_normalize(x, repeat=20, eps=1e-6, backend="reference")
print("NumPy: auto equals reference:", np.array_equal(auto, named))
if not np.array_equal(auto, named):
    raise SystemExit('"auto" took something else for NumPy arrays')

# A backend asked for by name runs or says why not; it is never replaced silently.
try:
    dsv4cp.dsv4_sinkhorn_normalize(x, repeat=20, eps=1e-6, backend="cuda")
    raise SystemExit("NumPy arrays went into CUDA kernels")
except RuntimeError as error:
    print("NumPy with backend='cuda':", error)
try:
    dsv4cp.dsv4_sinkhorn_normalize(x, repeat=20, eps=1e-6, backend="cud")
    raise SystemExit("an unknown backend was taken")
except ValueError as error:
    print("a typo:", error)

# CuPy arrays: "auto" takes CUDA kernels where the op has them, else the reference on the GPU.
try:
    import cupy

    gpu = cupy.cuda.is_available()
except ImportError:
    gpu = False
if gpu:
    on_gpu = dsv4cp.dsv4_sinkhorn_normalize(cupy.asarray(x), repeat=20, eps=1e-6)
    error = float(np.abs(on_gpu.get() - auto).max())
    print(f"CuPy: {type(on_gpu).__module__}, largest difference from NumPy {error:.1e}")
    if error > 1e-5:
        raise SystemExit("CuPy and NumPy disagree")
else:
    print("no CuPy with a GPU here; python -m dsv4cp doctor tells what is missing")
