"""The one tolerance table: what each op may differ from the float64 oracle by, and why.

Each entry: dtype -> (rtol, atol) for element-wise comparison of finite values. `frobenius` holds the
limits for whole arrays, ||got - want|| / ||want||, that the GPU backends are judged by.
"""

from __future__ import annotations

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# One rounding to the output dtype costs EPS/2; the rest is arithmetic in fp32 (fp64 for float64 inputs).
TABLE = {
    # 2*repeat normalisations, each with a few roundings, that contract errors: about 20 fp32 ulps.
    "sinkhorn": {"float64": (1e-13, 1e-15), "float32": (3e-6, 1e-7), "float16": (1e-3, 1e-6), "bfloat16": (8e-3, 1e-6)},
    # The unrolled gradient cancels between steps: errors scale with the incoming gradient, not the result.
    "sinkhorn_grad": {
        "float64": (1e-11, 1e-13),
        "float32": (1e-4, 3e-6),
        "float16": (2e-3, 2e-3),
        "bfloat16": (1.6e-2, 1.6e-2),
    },
    # D-term dot products of O(1) values in fp32, p rounded to the input dtype before PV for half types.
    "attention": {
        "float64": (1e-11, 1e-12),
        "float32": (2e-5, 2e-6),
        "float16": (2e-3, 2e-3),
        "bfloat16": (1.6e-2, 1.6e-2),
    },
    "lse": {"float64": (1e-12, 1e-12), "float32": (1e-5, 2e-6), "float16": (1e-4, 1e-4), "bfloat16": (1e-4, 1e-4)},
    # Gradients sum over slots, heads and queries; terms cancel, so the absolute part grows with their size.
    "attention_grad": {
        "float64": (1e-10, 1e-11),
        "float32": (1e-4, 2e-5),
        "float16": (5e-3, 1e-2),
        "bfloat16": (3e-2, 6e-2),
    },
    # Sum over I heads of E-term dot products in fp32; output is fp32 whatever the input dtype.
    "indexer": {"float64": (1e-11, 1e-12), "float32": (3e-5, 1e-5), "float16": (3e-5, 1e-5), "bfloat16": (3e-5, 1e-5)},
    "indexer_grad": {
        "float64": (1e-10, 1e-11),
        "float32": (1e-4, 2e-5),
        "float16": (3e-3, 3e-3),
        "bfloat16": (1.6e-2, 1.6e-2),
    },
}

FROBENIUS = {"attention": 4e-3, "attention_grad": 8e-3, "sink_grad": 1e-2, "indexer": 2e-3, "sinkhorn": 1e-6}


def tolerance(op: str, dtype: str) -> tuple[float, float]:
    """(rtol, atol) of an op for inputs of a dtype."""
    return TABLE[op][dtype]
