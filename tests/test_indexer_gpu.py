"""The indexer's CUDA kernels: scores on CuPy arrays and torch tensors, on the path this GPU gets and on the portable
one; the selection on CuPy arrays."""

from __future__ import annotations

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")

import dsv4cp  # noqa: E402
from tests.support.compare import check_close, check_equal, check_frobenius, check_like, to_numpy  # noqa: E402
from tests.support.indexer_scores_gpu import (  # noqa: E402
    DTYPES,
    NUMBERS,
    first_by_sort,
    oracle,
    random_inputs,
    visible,
)

pytestmark = pytest.mark.gpu

R, SCALE = 4, 0.125
INF, NAN = np.inf, np.nan


def cupy_scores(q, k, w, **more):
    options = {"compress_ratio": R, "softmax_scale": SCALE, "backend": "cuda", **more}
    return dsv4cp.dsv4_indexer_scores(q, k, w, **options)


def torch_scores(q, k, w, **more):
    from dsv4cp import _bridge, torch_ops

    options = {"compress_ratio": R, "softmax_scale": SCALE, "backend": "tilelang", **more}
    return torch_ops.dsv4_indexer_scores(*(_bridge.to_torch(x) for x in (q, k, w)), **options)


def topk(q, k, w, count, **more):
    options = {"compress_ratio": R, "softmax_scale": SCALE, "backend": "cuda", **more}
    return dsv4cp.dsv4_indexer_topk(q, k, w, count, **options)


def select(scores, count, **more):
    scores = scores if isinstance(scores, cupy.ndarray) else cupy.asarray(np.asarray(scores, np.float32))
    return dsv4cp.select_indexer_topk(scores, count, backend="cuda", **more)


@pytest.fixture(params=["portable", None], ids=["portable", "default"])
def path(request, monkeypatch):
    """The kernel: the portable one, or what this GPU gets."""
    from dsv4cp.indexer import cuda_scores

    monkeypatch.setattr(cuda_scores, "forced_path", request.param)
    return request.param


@pytest.fixture(params=["cupy", "torch"])
def scores(request, path):
    if request.param == "torch":
        pytest.importorskip("torch")
        return torch_scores
    return cupy_scores


# --- Scores ----------------------------------------------------------------------------------------------


def check(got, q, k, w, dtype, *, ratio=R, start=0, scale=SCALE) -> None:
    """Against the float64 oracle, element by element and as a whole."""
    seen = visible(q.shape[1], k.shape[1], ratio, start)
    want = cupy.where(seen, oracle(q, k, w, scale), -INF)
    check_like(got, dtype="float32", shape=want.shape)
    g = cupy.asarray(to_numpy(got))
    check_close(g, want, "indexer", dtype)
    check_frobenius(cupy.where(seen, g, 0), cupy.where(seen, want, 0), "indexer")


@pytest.mark.parametrize("e", [64, 128])
@pytest.mark.parametrize("heads", [1, 3, 16, 31, 32, 33, 64, 65, 127, 128])
def test_head_counts(scores, heads, e):
    inputs = random_inputs(2, 37, 200, heads, e, seed=heads)
    check(scores(*inputs, query_start=700), *inputs, "bfloat16", start=700)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", NUMBERS)
def test_dtypes(scores, dtype, weights):
    inputs = random_inputs(2, 20, 70, 64, 128, dtype=dtype, weights=weights)
    check(scores(*inputs, query_start=200), *inputs, dtype, start=200)


@pytest.mark.parametrize("entries", [1, 2, 63, 64, 65, 127, 129, 384, 385, 1030])
@pytest.mark.parametrize(("ratio", "start"), [(1, 0), (4, 0), (4, 1000), (7, 900), (128, 10**6), (4, 2**60)])
def test_sizes_and_positions(scores, entries, ratio, start):
    inputs = random_inputs(1, 141, entries, 8, 64, seed=entries)
    got = scores(*inputs, compress_ratio=ratio, query_start=start)
    check(got, *inputs, "bfloat16", ratio=ratio, start=start)


@pytest.mark.parametrize(
    ("ratio", "start"), [(2**31, 2**33 - 9), (2**40, 2**41 - 9), (2**31 - 1, 2**31 - 9), (2**60, 2**60)]
)
def test_ratios_beyond_32_bits(scores, ratio, start):
    inputs = random_inputs(1, 20, 10, 8, 64)
    check(scores(*inputs, compress_ratio=ratio, query_start=start), *inputs, "bfloat16", ratio=ratio, start=start)


@pytest.mark.parametrize("sizes", [{"b": 0}, {"s": 0}, {"p": 0}])
def test_zero_lengths(scores, sizes):
    q, k, w = random_inputs(**sizes)
    check_like(scores(q, k, w), dtype="float32", shape=(q.shape[0], q.shape[1], k.shape[1]))


def test_golden_unfinished_groups_are_invisible(scores):
    inputs = random_inputs(2, 9, 2, 64, 128)
    got = to_numpy(scores(*inputs))
    assert np.isfinite(got).sum(axis=2).tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2
    for t in range(8):
        q, k, w = (x.copy() for x in inputs)
        q[:, t + 1], w[:, t + 1], k[:, (t + 1) // R :] = NAN, NAN, NAN  # entry (t+1)//R holds token t+1
        check_equal(to_numpy(scores(q, k, w))[:, : t + 1], got[:, : t + 1])


@pytest.mark.parametrize("heads", [5, 64, 128])
def test_nan_and_infinities_follow_the_equation(scores, heads):
    q, k, w = random_inputs(1, 12, 40, heads, 64)
    k[0, 3, 7], k[0, 5, 2], k[0, 6] = NAN, INF, -INF
    q[0, 4, heads - 1, 1], w[0, 6, 0], w[0, 7, heads - 1] = NAN, INF, NAN
    check_hostile(scores, q, k, w)


def check_hostile(scores, q, k, w):
    with np.errstate(all="ignore"):
        logits = np.einsum("shd,pd->shp", *(x[0].astype(np.float32).get().astype(np.float64) for x in (q, k)))
        weighed = np.where(logits <= 0, 0, logits) * (w[0].get().astype(np.float64) * SCALE)[:, :, None]
        want = weighed.sum(axis=1)
    got = to_numpy(scores(q, k, w, query_start=400))[0]
    assert np.array_equal(np.isnan(got), np.isnan(want))
    for sign in (INF, -INF):
        assert np.array_equal(got == sign, want == sign)


def test_heads_that_do_not_exist_add_nothing(scores):
    """Rows of zeros fill a product of fewer heads; 0 * inf must not reach the sum."""
    q, k, w = random_inputs(1, 8, 20, 5, 64)
    q[...], w[...] = 1, 1
    k[0, 2, 0], k[0, 3] = INF, -INF
    got = to_numpy(scores(q, k, w, query_start=100))[0]
    assert (got[:, 2] == INF).all() and (got[:, 3] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_no_neighbour(scores, dtype):
    q, k, w = random_inputs(3, 150, 500, 64, 128, dtype=dtype)
    whole = to_numpy(scores(q, k, w, query_start=1500))
    check_equal(to_numpy(scores(q, k, w, query_start=1500)), whole)
    for b, first, last in ((0, 0, 150), (1, 7, 8), (2, 33, 100)):
        rows = slice(b, b + 1), slice(first, last)
        part = scores(q[rows], k[b : b + 1], w[rows], query_start=1500 + first)
        check_equal(to_numpy(part), whole[rows])
        fewer = scores(q[rows], k[b : b + 1, :301], w[rows], query_start=1500 + first)
        check_equal(to_numpy(fewer), whole[rows][:, :, :301])


def layouts(x):
    """(name, an equal array in another memory layout)."""
    yield "moved", cupy.moveaxis(cupy.ascontiguousarray(cupy.moveaxis(x, 1, 0)), 0, 1)
    yield "flipped", cupy.ascontiguousarray(x[:, ::-1])[:, ::-1]
    wide = cupy.full((*x.shape[:-1], x.shape[-1] + 8), NAN, x.dtype)
    wide[..., : x.shape[-1]] = x
    yield "padded", wide[..., : x.shape[-1]]
    odd = cupy.full((*x.shape[:-1], x.shape[-1] + 1), NAN, x.dtype)
    odd[..., 1:] = x
    yield "odd", odd[..., 1:]
    yield "transposed", cupy.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def test_views_equal_their_copies(path):
    inputs = random_inputs(2, 30, 70, 64, 128)
    want = cupy_scores(*inputs, query_start=200)
    ids = topk(*inputs, 9, query_start=200)
    for n in range(3):
        for name, view in layouts(inputs[n]):
            arguments = [*inputs]
            arguments[n] = view
            kept = view.copy()
            check_equal(cupy_scores(*arguments, query_start=200), want)
            check_equal(topk(*arguments, 9, query_start=200), ids)
            assert bool((view == kept).all()), name


def test_broadcast_inputs(path):
    q, k, w = random_inputs(1, 6, 70, 64, 128)
    q, k, w = (cupy.broadcast_to(x, (3, *x.shape[1:])) for x in (q, k, w))
    check_equal(
        cupy_scores(q, k, w, query_start=300), cupy_scores(*map(cupy.ascontiguousarray, (q, k, w)), query_start=300)
    )


def test_nothing_outside_is_written(path):
    from dsv4cp.indexer import contract, cuda_scores

    q, k, w = random_inputs(2, 19, 131, 64, 128)
    around = cupy.full(2 * 19 * 131 + 64, 77, np.float32)
    spec = contract.check_scores(q, k, w, R, SCALE, 300)
    out = around[32:-32]
    cuda_scores.launch_scores(*map(cuda_scores.operand, (q, k, w)), out.data.ptr, spec, cuda_scores.limits(spec))
    assert bool((around[:32] == 77).all()) and bool((around[-32:] == 77).all())
    check_equal(out.reshape(2, 19, 131), cupy_scores(q, k, w, query_start=300))


def test_auto_and_names():
    q, k, w = random_inputs(1, 9, 20, 64, 128)
    check_equal(cupy_scores(q, k, w, backend="auto"), cupy_scores(q, k, w))
    single = q.astype(np.float32), k.astype(np.float32), w
    check_close(cupy_scores(*single, backend="auto"), cupy_scores(q, k, w), "indexer", "bfloat16")
    for bad, error in (((single[0], k, w), TypeError), ((q, k, w.astype(np.float64)), TypeError)):
        with pytest.raises(error, match="the CUDA kernels take"):
            cupy_scores(*bad)
    with pytest.raises(ValueError, match="index dim"):
        cupy_scores(q[..., :32], k[..., :32], w)


def test_sizes_do_not_compile_anew():
    """Golden case 24."""
    from dsv4cp.indexer import cuda_scores, cuda_sm90, cuda_topk

    rng, kernels = np.random.default_rng(0), (cuda_scores._kernel, cuda_sm90._kernel, cuda_topk._kernel)
    before = sum(k.cache_info().currsize for k in kernels)
    for _ in range(50):
        s, p, count = (int(n) for n in rng.integers(1, 300, 3))
        topk(*random_inputs(1, s, p, 64, 128), count, query_start=int(rng.integers(0, 999)))
    assert sum(k.cache_info().currsize for k in kernels) - before <= 3


# --- Selection -------------------------------------------------------------------------------------------


def test_golden_masked_is_worse_than_any_score():
    assert to_numpy(select([[-5.0, -INF, -INF]], 4)).tolist() == [[0, -1, -1, -1]]
    q, k, w = (cupy.asarray(np.full(shape, value, ml_dtypes.bfloat16)) for shape, value in
               (((1, 9, 1, 64), 1), ((1, 2, 64), 5 / 64), ((1, 9, 1), -1)))  # fmt: skip
    ids, values = topk(q, k, w, 4, softmax_scale=1, return_scores=True)
    assert to_numpy(ids)[0, 4].tolist() == [0, -1, -1, -1]
    assert to_numpy(values)[0, 4, 0] == pytest.approx(-5, rel=1e-2)


def test_golden_ties():
    scores = np.zeros(8320)
    winners = np.random.default_rng(0).permutation(8320)[:100]
    scores[winners] = np.arange(1, 101)
    losers = np.setdiff1d(np.arange(8320), winners)[: 2048 - 100]
    check_equal(select(scores, 2048), np.sort(np.r_[winners, losers]).astype(np.int32))
    check_equal(select(scores, 2048, order="score"), np.r_[winners[::-1], losers].astype(np.int32))
    for order in ("id", "score"):
        assert to_numpy(select(np.zeros(8320), 512, order=order)).tolist() == list(range(512))


def test_golden_nan_and_infinities():
    rows = [[NAN, 1, 2, -INF, 3], [NAN] * 5, [1, INF, 5, INF, -INF], [-INF] * 5, [-NAN, -1, NAN, -INF, -2]]
    ids, values = map(to_numpy, select(rows, 4, order="score", return_scores=True))
    assert ids.tolist() == [[4, 2, 1, -1], [-1] * 4, [1, 3, 2, 0], [-1] * 4, [1, 4, -1, -1]]
    want = [[3, 2, 1, -INF], [-INF] * 4, [INF, INF, 5, 1], [-INF] * 4, [-1, -2, -INF, -INF]]
    check_equal(values, np.array(want, np.float32))
    assert to_numpy(select(rows, 4)).tolist() == [[1, 2, 4, -1], [-1] * 4, [0, 1, 2, 3], [-1] * 4, [1, 4, -1, -1]]


def test_golden_scores_outside_the_half_range():
    assert to_numpy(select(-70000.0 - np.arange(1000), 64)).tolist() == list(range(64))


def test_golden_fewer_entries_than_topk():
    got = to_numpy(topk(*random_inputs(2, 8, 2, 64, 128), 512))
    assert got.shape == (2, 8, 512) and (got[:, :, 2:] == -1).all()
    assert got[0, :, :2].tolist() == [[-1, -1]] * 3 + [[0, -1]] * 4 + [[0, 1]]
    ids, values = topk(*random_inputs(2, 3, 0, 64, 128), 512, return_scores=True)
    check_equal(ids, np.full((2, 3, 512), -1, np.int32))
    check_equal(values, np.full((2, 3, 512), -INF, np.float32))
    assert topk(*random_inputs(2, 8, 2, 64, 128), 0).shape == (2, 8, 0)
    assert topk(*random_inputs(2, 0, 2, 64, 128), 3).shape == (2, 0, 3)


SPECIAL = np.array([0.0, -0.0, NAN, -NAN, INF, -INF, 1e-45, -1e-45, 3e38, -3e38, 1.0000001, 1.0], np.float32)


@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize("kind", ["normal", "narrow", "ties", "hostile"])
@pytest.mark.parametrize(
    ("entries", "count"),
    [(1, 1), (5, 9), (100, 7), (2048, 512), (2049, 2048), (8192, 1024), (8193, 1024), (16385, 2048), (70001, 3)],
)
def test_selection_equals_a_full_sort(entries, count, kind, order):
    rng = np.random.default_rng(entries)
    table = rng.standard_normal((7, entries), np.float32)
    if kind == "narrow":  # all upper digits equal
        table = (1 + table * 2**-20).astype(np.float32)
    if kind == "ties":
        table = np.round(table * 2)
    if kind == "hostile":
        table = np.where(rng.random(table.shape) < 0.7, rng.choice(SPECIAL, table.shape), table)
        table[0], table[1], table[2] = NAN, 0.0, -INF
    ids, values = select(table, count, order=order, return_scores=True)
    want, found = first_by_sort(table, count, order)
    check_equal(ids, want)
    check_equal(values, np.where(found == 0, to_numpy(values), found))  # a zero keeps its sign
    assert np.array_equal(to_numpy(values), found)


def test_more_than_the_kernel_chooses():
    table = np.random.default_rng(1).standard_normal((3, 5000), np.float32)
    for order in ("id", "score"):
        check_equal(select(table, 3000, order=order), first_by_sort(table, 3000, order)[0])
    q, k, w = random_inputs(1, 20, 4000, 64, 128)
    own = cupy_scores(q, k, w, query_start=12000)
    check_equal(topk(q, k, w, 2500, query_start=12000)[0], first_by_sort(own[0], 2500)[0])


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("shape", [(7,), (60,), (3, 61), (2, 3, 64), (2, 2, 3, 40), (0, 5), (3, 0)])
def test_dtypes_and_shapes(dtype, shape):
    scores = cupy.asarray((np.random.default_rng(2).integers(-40, 40, shape) / 8).astype(NUMBERS[dtype]))
    ids, values = select(scores, 17, order="score", return_scores=True)
    check_like(ids, dtype="int32", shape=(*shape[:-1], 17))
    flat = (
        scores.astype(np.float32).reshape(-1, shape[-1]) if scores.size else np.zeros((3 if shape[0] else 0, shape[-1]))
    )
    want, found = first_by_sort(flat, 17, "score")
    check_equal(ids.reshape(want.shape), want)
    check_equal(values.reshape(want.shape), np.where(found == 0, 0.0, found).astype(np.float32))


def test_views_of_scores():
    scores = cupy.asarray(np.random.default_rng(3).integers(-3, 4, (6, 300)).astype(np.float32))
    want = select(scores, 9)
    parent = cupy.full((6, 308), INF, np.float32)
    parent[:, :300] = scores
    check_equal(select(parent[:, :300], 9), want)
    parent[:, 3:303] = scores
    check_equal(select(parent[:, 3:303], 9), want)
    for view in (scores[:, ::-1].copy()[:, ::-1], cupy.asfortranarray(scores), scores[::-1].copy()[::-1]):
        check_equal(select(view, 9), want)


@pytest.mark.parametrize("order", ["id", "score"])
@pytest.mark.parametrize(
    ("sizes", "count", "start"), [((2, 200, 300), 64, 700), ((1, 40, 9000), 1024, 36500), ((2, 100, 500), 600, 1500)]
)
def test_topk_equals_a_sort_of_the_scores(path, sizes, count, start, order):
    inputs = random_inputs(*sizes, 64, 128)
    own = cupy_scores(*inputs, query_start=start)
    ids, values = topk(*inputs, count, query_start=start, order=order, return_scores=True)
    want, found = first_by_sort(own.reshape(-1, sizes[2]), count, order)
    check_equal(ids.reshape(-1, count), want)
    check_equal(values.reshape(-1, count), found)
    check_equal(topk(*inputs, count, query_start=start, order=order), ids)


def test_bits_do_not_depend_on_batch_or_chunk(path, monkeypatch):
    from dsv4cp.indexer import cuda_topk

    q, k, w = random_inputs(3, 150, 400, 64, 128)
    more = {"query_start": 1500, "order": "score", "return_scores": True}
    want = topk(q, k, w, 40, **more)
    for b in range(3):
        got = topk(q[b : b + 1], k[b : b + 1], w[b : b + 1], 40, **more)
        for a, c in zip(got, want, strict=True):
            check_equal(a, c[b : b + 1])
    for rows in (1, 70, 200, 310):
        monkeypatch.setattr(cuda_topk, "CHUNK_BYTES", rows * 4 * 400)
        for a, c in zip(topk(q, k, w, 40, **more), want, strict=True):
            check_equal(a, c)


def documents(lengths, ratio, batch=1, dtype=np.int32):
    """Documents of these lengths in each batch row, the last two tokens and one entry padding."""
    entries = [n // ratio for n in lengths]
    s, p = sum(lengths) + 2, sum(entries) + 1
    arrays = {
        "q_segment_ids": np.zeros((batch, s), dtype), "q_local_positions": np.zeros((batch, s), dtype),
        "pooled_segment_ids": np.zeros((batch, p), dtype), "pooled_positions": np.zeros((batch, p), dtype),
    }  # fmt: skip
    at, first, first_entry = [], 0, 0
    for number, (n, e) in enumerate(zip(lengths, entries, strict=True), start=1):
        tokens, pooled = slice(first, first + n), slice(first_entry, first_entry + e)
        arrays["q_segment_ids"][:, tokens], arrays["q_local_positions"][:, tokens] = number, np.arange(n)
        arrays["pooled_segment_ids"][:, pooled], arrays["pooled_positions"][:, pooled] = number, np.arange(e)
        at.append((tokens, pooled))
        first, first_entry = first + n, first_entry + e
    return s, p, {name: cupy.asarray(x) for name, x in arrays.items()}, at


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("count", [5, 100, 2500])
@pytest.mark.parametrize("rows", [10**6, 50])
def test_packed_documents_equal_calls_per_document(path, monkeypatch, dtype, count, rows):
    from dsv4cp.indexer import cuda_topk

    s, p, packed, at = documents((90, 33, 0, 250, 3), R, batch=2, dtype=dtype)
    q, k, w = random_inputs(2, s, p, 64, 128)
    monkeypatch.setattr(cuda_topk, "CHUNK_BYTES", rows * 4 * p)
    ids, values = topk(q, k, w, count, return_scores=True, **packed)
    for tokens, entries in at:
        alone = topk(q[:, tokens], k[:, entries], w[:, tokens], count, return_scores=True)
        check_equal(ids[:, tokens], cupy.where(alone[0] >= 0, alone[0] + entries.start, -1).astype(np.int32))
        check_equal(values[:, tokens], alone[1])
    assert bool((ids[:, -2:] == -1).all())
    hidden = at[3]
    q[:, hidden[0]], k[:, hidden[1]] = NAN, NAN
    check_equal(topk(q, k, w, count, **packed)[:, :123], ids[:, :123])


def test_local_positions_at_the_ends_of_int64():
    q, k, w = random_inputs(1, 4, 3, 64, 128)
    q[...], k[...], w[...] = 1, 1, 1
    ones = cupy.ones((1, 4), np.int64)
    positions = cupy.asarray(np.array([[2**63 - 1, 2**63 - 2, -(2**63), -5]]))
    ids = topk(
        q, k, w, 2, compress_ratio=3, q_segment_ids=ones, q_local_positions=positions,
        pooled_segment_ids=ones[:, :3], pooled_positions=cupy.asarray(np.array([[0, 5, -3]])),
    )  # fmt: skip
    check_equal(ids, np.array([[[0, 1], [0, 1], [-1, -1], [2, -1]]], np.int32))


def test_memory_is_bounded():
    q, k, w = random_inputs(1, 6000, 20000, 8, 64)
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        ids = topk(q, k, w, 256, query_start=10**6)
        assert pool.total_bytes() - ids.nbytes <= 256 * 2**20
    assert bool((ids >= 0).all())


# --- torch -----------------------------------------------------------------------------------------------


def test_torch_gradient_is_the_reference_of_the_masked_scores():
    torch = pytest.importorskip("torch")
    from dsv4cp import _bridge, torch_ops

    inputs = random_inputs(2, 19, 8, 16, 64)
    tensors = [_bridge.to_torch(x).clone().requires_grad_() for x in inputs]
    got = torch_ops.dsv4_indexer_scores(*tensors, compress_ratio=R, softmax_scale=SCALE, backend="tilelang")
    g = torch.randn(got.shape, device="cuda")
    g[torch.isinf(got)] = NAN
    grads = torch.autograd.grad(got, tensors, g)
    want = dsv4cp.dsv4_indexer_scores_grad(
        _bridge.to_cupy(g), *inputs, compress_ratio=R, softmax_scale=SCALE, backend="reference"
    )
    for a, b, dtype in zip(grads, want, ("bfloat16", "bfloat16", "float32"), strict=True):
        check_like(a, dtype=dtype)
        check_close(a, to_numpy(b), "indexer_grad", dtype)


def test_torch_auto_and_streams():
    torch = pytest.importorskip("torch")
    from dsv4cp import _bridge, torch_ops

    assert torch_ops.is_dsv4_kernel_available("indexer")
    inputs = random_inputs(2, 40, 100, 64, 128)
    want = to_numpy(torch_scores(*inputs, query_start=300))
    check_equal(to_numpy(torch_scores(*inputs, query_start=300, backend="auto")), want)
    q, k, w = (_bridge.to_torch(x) for x in inputs)
    stream = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            late = q * 1
            got = torch_ops.dsv4_indexer_scores(
                late, k, w, compress_ratio=R, softmax_scale=SCALE, backend="tilelang", query_start=300
            )
        stream.synchronize()
        check_equal(to_numpy(got), want)
    compiled = torch.compile(
        lambda *x: torch_ops.dsv4_indexer_scores(
            *x, compress_ratio=R, softmax_scale=SCALE, backend="tilelang", query_start=300
        ),
        fullgraph=True,
        backend="aot_eager",
    )
    check_equal(to_numpy(compiled(q, k, w)), want)
