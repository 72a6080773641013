"""What the index functions refuse, and the torch surface's own promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import dsv4cp
from dsv4cp.sparse_indices import torch_bridge
from tests.support.compare import check_equal
from tests.support.index_ways import random_call

SIZES = {"batch_size": 2, "seq_len": 3, "key_len": 5, "window_size": 2}
IDS = np.zeros((2, 3, 4), np.int64)
ROWS = np.zeros((2, 3), np.int64)
POOLED = {"n_pooled": 2, "compress_ratio": 2}
DOCUMENTS = {"q_segment_ids": ROWS, "q_local_positions": ROWS}
ENTRIES = {"pooled_segment_ids": np.zeros((2, 2), np.int64), "pooled_positions": np.zeros((2, 2), np.int64)}

REFUSED = [
    ({"batch_size": -1}, ValueError, "batch_size: expected an integer of at least 0"),
    ({"seq_len": 2.0}, TypeError, "seq_len: expected an integer"),
    ({"window_size": -1}, ValueError, "window_size"),
    ({"key_len": 2**61}, ValueError, "key_len"),
    ({"vanilla_key_len": -3}, ValueError, "vanilla_key_len"),
    ({"max_image_tokens": -1}, ValueError, "max_image_tokens"),
    ({"n_pooled": 2}, ValueError, "compress_ratio: expected an integer of at least 1"),
    ({"n_pooled": 2, "compress_ratio": -1}, ValueError, "compress_ratio"),
    ({**POOLED, "compressed_topk": IDS.astype(np.float32)}, TypeError, "compressed_topk: expected dtype"),
    ({**POOLED, "compressed_topk": IDS[:1]}, ValueError, "compressed_topk: expected shape"),
    ({**POOLED, "compressed_topk": IDS[0]}, ValueError, "compressed_topk: expected shape"),
    ({**POOLED, "compressed_topk": [[1]]}, TypeError, "compressed_topk: expected an array"),
    ({"q_positions": np.zeros(4, np.int64)}, ValueError, r"q_positions: expected shape \[2, 3\] or \[3\], got \[4\]"),
    ({"q_positions": np.zeros((3, 3), np.int64)}, ValueError, "q_positions: expected shape"),
    ({"q_positions": np.zeros(3, bool)}, TypeError, "q_positions: expected dtype"),
    ({"q_positions": np.zeros(3, np.uint64)}, TypeError, "q_positions: expected dtype"),
    ({"vision_token_types": ROWS[:1], "max_image_tokens": 2}, ValueError, r"vision_token_types: expected shape \[2, 3"),
    ({"vision_token_types": ROWS[0], "max_image_tokens": 2}, ValueError, "vision_token_types: expected shape"),
    ({"vision_token_types": ROWS / 2, "max_image_tokens": 2}, TypeError, "vision_token_types: expected dtype"),
    (
        {"vision_token_types": ROWS, "max_image_tokens": 2, "q_positions": ROWS, "vanilla_key_len": 4},
        ValueError,
        r"vision_token_types: expected shape \[2, 4\]",
    ),
    ({"attention_mask": np.zeros((2, 3, 5))}, ValueError, "attention_mask: expected rank 4"),
    ({"attention_mask": np.zeros((2, 1, 3, 4))}, ValueError, r"attention_mask: expected shape \[2, 1, 3, >= 5\]"),
    ({"attention_mask": np.zeros((2, 4, 3, 5))}, ValueError, "attention_mask: expected shape"),
    ({"attention_mask": np.zeros((3, 1, 3, 5))}, ValueError, "attention_mask: expected shape"),
    ({"attention_mask": np.zeros((2, 1, 3, 5), bool)}, TypeError, "attention_mask: expected dtype"),
    ({"q_segment_ids": ROWS}, ValueError, "q_local_positions: expected an array beside q_segment_ids"),
    ({"q_local_positions": ROWS}, ValueError, "q_segment_ids: expected an array beside q_local_positions"),
    ({**DOCUMENTS, "q_segment_ids": ROWS[:1]}, ValueError, "q_segment_ids: expected shape"),
    ({**DOCUMENTS, "q_local_positions": ROWS * 1.0}, TypeError, "q_local_positions: expected dtype"),
    ({**DOCUMENTS, **POOLED}, ValueError, "pooled_segment_ids: expected an array"),
    ({**POOLED, **ENTRIES}, ValueError, "q_segment_ids: expected an array beside pooled_segment_ids"),
    ({**DOCUMENTS, **POOLED, "pooled_positions": ENTRIES["pooled_positions"]}, ValueError, "pooled_segment_ids"),
    ({**DOCUMENTS, **ENTRIES, "n_pooled": 3, "compress_ratio": 2}, ValueError, "pooled_segment_ids: expected shape"),
    ({**DOCUMENTS, **ENTRIES, "n_pooled": 2, "compressed_topk": IDS}, ValueError, "compress_ratio"),
    ({"dtype": "int16"}, TypeError, "dtype: expected int32 or int64, got int16"),
    ({"dtype": np.array(1)}, TypeError, "dtype: expected int32 or int64 as a name or a dtype, got ndarray"),
    ({"dtype": np.float32}, TypeError, "dtype: expected int32 or int64, got float32"),
    ({"dtype": "int32", "key_len": 2**31 + 1}, ValueError, "key_len: expected at most 2147483648"),
    ({"backend": "fast"}, ValueError, "backend: expected one of"),
    ({"backend": "cudnn"}, RuntimeError, "cudnn"),
    ({"like": 3}, TypeError, "like: expected an array"),
    ({"like": torch.zeros(1)}, TypeError, "torch_ops"),
    ({"q_positions": torch.zeros(3, dtype=torch.int64)}, TypeError, "torch_ops"),
    ({"q_positions": ROWS, "like": torch.zeros(1)}, TypeError, "one library"),
]


@pytest.mark.parametrize(("more", "error", "words"), REFUSED)
def test_build_refuses(more, error, words):
    with pytest.raises(error, match=words):
        dsv4cp.build_dsv4_sparse_topk_indices(**{**SIZES, **more})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((IDS * 1.0, 5), TypeError, "topk_idxs: expected dtype"),
        ((IDS == 0, 5), TypeError, "topk_idxs: expected dtype"),
        ((IDS[0], 5), ValueError, r"topk_idxs: expected shape \[B, S, T\]"),
        (([[[1]]], 5), TypeError, "topk_idxs: expected an array"),
        ((None, 5), TypeError, "topk_idxs: expected dtype"),
        ((np.ma.masked_array(IDS), 5), TypeError, "topk_idxs: expected a plain array"),
        ((torch.zeros(1, 1, 1, dtype=torch.int64), 5), TypeError, "torch_ops"),
        ((IDS, -1), ValueError, "kv_sequence"),
        ((IDS, 5.0), TypeError, "kv_sequence"),
        ((IDS, 5, "numba"), ValueError, "backend: expected one of 'auto', 'reference', 'cuda', 'cudnn'"),
        ((IDS, 5, "flat"), ValueError, "backend"),
        ((IDS, 5, None), ValueError, "backend"),
        ((IDS, 5, "cudnn", 1), TypeError, "all_rows_nonempty: expected a bool"),
    ],
)
def test_plan_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        dsv4cp.plan_dsv4_sparse_indices(*arguments)
    if len(arguments) == 2:
        with pytest.raises(error, match=words):
            dsv4cp.flatten_sparse_indices(*arguments)


def test_plan_refuses_an_implementation_that_is_not_there():
    with pytest.raises(RuntimeError, match="cudnn"):
        dsv4cp.plan_dsv4_sparse_indices(IDS, 5, index_backend="cudnn")
    with pytest.raises(ValueError, match="backend: expected one of"):
        dsv4cp.plan_dsv4_sparse_indices(IDS, 5, index_backend="fast")


# --- Torch ---------------------------------------------------------------------------------------------


def test_torch_takes_only_tensors():
    with pytest.raises(TypeError, match="one library"):
        torch_bridge.build_dsv4_sparse_topk_indices(**SIZES, q_positions=ROWS, device="cpu")
    with pytest.raises(TypeError, match="torch"):
        torch_bridge.plan_dsv4_sparse_indices(IDS, 5, "torch")
    with pytest.raises(ValueError, match="backend: expected one of"):
        torch_bridge.plan_dsv4_sparse_indices(torch.from_numpy(IDS), 5, "reference")


def test_torch_moves_inputs_to_the_device():
    for seed in range(30):
        call = {k: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for k, x in random_call(seed).items()}
        want = torch_bridge.build_dsv4_sparse_topk_indices(**call, device="cpu")
        got = torch_bridge.build_dsv4_sparse_topk_indices(**call, device="meta")
        assert got.device.type == "meta" and got.shape == want.shape and got.dtype == torch.int64


def test_torch_results_have_no_history():
    mask = torch.zeros(2, 1, 3, 5, requires_grad=True)
    call = {**SIZES, "attention_mask": mask}
    got = torch_bridge.build_dsv4_sparse_topk_indices(**call, device=torch.device("cpu"), dtype=torch.int32)
    assert not got.requires_grad and got.dtype == torch.int32 and got.is_contiguous()


@pytest.mark.parametrize("backend", ["torch", "sparse_torch", "tilelang", "cudnn", "auto"])
def test_torch_plans_carry_the_name_of_their_backend(backend):
    ids = torch.tensor([[[3, 4, -1, 0, 0]], [[9, -9, 4, 1, 2]]])
    plan = torch_bridge.plan_dsv4_sparse_indices(ids, 4, backend)
    assert plan.backend == ("torch" if backend == "auto" else backend)
    layout = "cudnn" if backend == "cudnn" else "reference"
    want = dsv4cp.plan_dsv4_sparse_indices(ids.numpy(), 4, layout)
    check_equal(plan.indices, want.indices, like=ids)
    assert plan.indices.is_contiguous()
    if backend == "cudnn":
        check_equal(plan.topk_length, want.topk_length, like=ids)
        assert plan.valid_rows is None
