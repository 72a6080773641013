"""Gradient of sparse attention on the GPU: passes, memory, launch parameters of kernels_cu/sparse_attention_bwd*.cu.

One pass over batch rows and a range of key rows: zero the sums, the main kernel, finish. Before the first: prep, and for
sums of fixed order select and exponents. The main kernel is either of two behind one interface, cuda_bwd_sm90 where it fits
the call, else the portable one:

    fits(spec, device) -> bool
    launch(*, grad_out, q, kv, ids, log2_total, delta, grad_q, sums, exponents, spec, dtype, grad_out_strides, q_strides,
           kv_strides, deterministic, key_first, key_last, parts, stream) -> bool

addresses as ints on the current device; `spec.batch` is the number of batch rows of this launch and every address is that of its
first; strides in elements, the last is 1. grad_q [B, S, H, D] and sums [B, key_last - key_first, D] (float32 added with
red.add.f32, or int64 with add_fixed and the factor of exponents [B, K]: then an infinite term marks its key,
atomicMax(exponents + key, FIXED_BROKEN)) are contiguous. `parts`: 1 grad_q, 2 sums, 3 both; 1 and 2 together give the bits of 3.
Only slots with key_first <= id < key_last add to sums; grad_q (parts 1 and 3: then the range is [0, K)) takes all of them.
False: the launch was refused (strides that the driver cannot describe) and nothing was queued.
"""
