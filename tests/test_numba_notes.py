"""Numba launches as notes: played, they hand the driver the words that a launch of the same arrays would, without a GPU
(a stand-in makes Numba's words)."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
ml_dtypes = pytest.importorskip("ml_dtypes")
pytest.importorskip("torch")
_numba = pytest.importorskip("dsv4cp._numba", reason="numba-cuda does not fit", exc_type=Exception)

from dsv4cp import _kernels, _numba_notes  # noqa: E402
from dsv4cp._kernel_notes import Address, NotLaunches, launches  # noqa: E402
from dsv4cp._programs import Laid, Making  # noqa: E402
from dsv4cp.sparse_indices import contract, cuda_notes, numba_cuda  # noqa: E402
from tests.support.index_cases import build_cases, plan_cases  # noqa: E402
from tests.support.packed import all_values  # noqa: E402
from tests.support.stand_in_cupy import Blocks, Device, empty  # noqa: E402

KERNELS = ("build_rows", "span_totals", "span_scan", "shift_ids", "compact_rows", "compact_wide_rows")
BUILDS, PLANS = build_cases(), plan_cases()
STREAM = 55


class NumbaArray:
    """What Numba takes for an array: attributes of a DeviceNDArray that it reads."""

    def __init__(self, pointer, shape, strides, dtype):
        self.pointer, self.shape, self.strides, self.dtype = pointer, tuple(shape), tuple(strides), np.dtype(dtype)
        self.size, self.ndim = int(np.prod(self.shape)), len(self.shape)
        self.__cuda_array_interface__ = {"data": (pointer, False)}

    def words(self):
        return [0, 0, self.size, self.dtype.itemsize, self.pointer, *self.shape, *self.strides]


class Compiled:
    """A kernel for some types, with the insides that notes ask for."""

    def __init__(self, name, types):
        self.argument_types = types
        function = SimpleNamespace(name=name, handle=1000 + hash((name, types)) % 1000)
        self._codelibrary = SimpleNamespace(get_cufunc=lambda: function)

    def _prepare_args(self, kind, x, stream, retr, made):
        made += x.words() if isinstance(x, NumbaArray) else [ctypes.c_int64(x)]


class NumbaKernel:
    """A dispatcher."""

    def __init__(self, name):
        self.name, self.kept = name, {}

    def typeof_pyval(self, x):
        return (x.ndim, x.dtype.str) if isinstance(x, NumbaArray) else "int64"

    def compile(self, types):
        return self.kept.setdefault(types, Compiled(self.name, types))


@pytest.fixture
def gpu(monkeypatch):
    """Kernels of Numba's and memory of CuPy's, and what the driver is given: (function, sizes, words, stream)."""
    made, put = SimpleNamespace(queued=[], blocks=Blocks()), monkeypatch.setattr
    for name in KERNELS:
        put(numba_cuda, name, NumbaKernel(name))
    absent = {n: NumbaArray(4096 * n, (1,) * n, (8,) * n, np.int64) for n in (2, 3)}
    put(_numba, "absent", lambda ndim, device: absent[ndim])
    put(_numba, "_launchable", lambda x: NumbaArray(x.data.ptr, x.shape, x.strides, x.dtype))
    put(cupy.cuda, "Device", Device)
    put(cupy.cuda, "alloc", made.blocks.alloc)
    put(cupy.cuda.runtime, "getDevice", lambda: 0)
    put(_kernels, "_cuda", lambda: SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)))

    def queue(kernel, cuda, device, sizes, blocks, values, shared_bytes, stream):
        assert kernel.loaded[device].function.ptr and shared_bytes == 0
        made.queued.append((kernel.function, sizes, list(all_values(blocks, values)), stream))

    put(_kernels, "_queue", queue)
    _numba_notes._kernel.cache_clear()
    yield made
    _numba_notes._kernel.cache_clear()


def on_gpu(x):
    if not isinstance(x, np.ndarray):
        return x
    return empty(x.shape, x.dtype.name, [step // x.itemsize for step in np.ascontiguousarray(x).strides])


def direct(monkeypatch, call):
    """What `call` launches and makes: [(kernel, grid, block, words)], arrays."""
    seen, made = [], []

    def launch(kernel, grid, block, *args):
        words = []
        for x in args:
            x = _numba._launchable(x) if isinstance(x, cupy.ndarray) else x
            words += x.words() if isinstance(x, NumbaArray) else [x]
        sizes = (max(grid[0], _numba._LEAST_BLOCKS), *grid[1:], 1, 1)[:3], (*block, 1, 1)[:3]
        seen.append((kernel.name, (*sizes[0], *sizes[1]), words))

    def new(shape, dtype, device):
        made.append(empty(shape, np.dtype(dtype).name))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(_numba, "launch", launch)
        patch.setattr(_numba, "empty", new)
        call()
    return seen, made


def laid(arrays) -> list[Laid]:
    return [Laid(64 * n, x.shape, [s // x.itemsize for s in x.strides], x.dtype.name) for n, x in enumerate(arrays, 1)]


def compare(monkeypatch, gpu, arrays, note, call, results) -> None:
    making = Making(laid(arrays))
    assert note(making) == results
    seen, made = direct(monkeypatch, call)
    assert [(tuple(sizes), name) for sizes, name in making.makes] == [(x.shape, x.dtype.name) for x in made]
    addresses = [x.data.ptr for x in (*arrays, *made)]
    _kernels.play(launches(making.steps, making.arrays), addresses, STREAM)
    assert gpu.queued == [(name, sizes, words, STREAM) for name, sizes, words in seen]
    assert seen


@pytest.mark.parametrize("name", BUILDS)
def test_played_building_hands_on_the_words_of_a_launch(gpu, monkeypatch, name):
    call = {key: on_gpu(x) for key, x in BUILDS[name].items()}
    arrays = {key: x for key, x in call.items() if isinstance(x, cupy.ndarray)}
    spec = contract.check(**call, **({} if arrays else {"like": empty((4,))}))
    if spec.batch * spec.queries * spec.width == 0:
        pytest.skip("nothing is launched")
    given = {key: x for key, x in arrays.items() if x.size}
    casts = any(x.dtype.kind in "iu" and x.dtype.itemsize < 8 for x in arrays.values())
    stops = spec.images and spec.image_keys > 0 and spec.documents

    def note(making):
        return cuda_notes.build(spec, ",".join(arrays), making)

    if len(given) < len(arrays):
        pytest.skip("arrays without elements have no address")
    if casts or stops:
        found = note(Making(laid(arrays.values())))
        assert found in (None, 1) and (not stops or found is None)
        return
    compare(monkeypatch, gpu, list(arrays.values()), note, lambda: numba_cuda.build(spec, **arrays), 1)


@pytest.mark.parametrize("layout", ["reference", "cuda", "cudnn"])
@pytest.mark.parametrize("name", PLANS)
def test_played_plans_hand_on_the_words_of_a_launch(gpu, monkeypatch, name, layout):
    ids, keys = on_gpu(PLANS[name][0]), PLANS[name][1]
    spec = contract.check_plan(ids, keys, layout, True)
    if ids.size == 0:
        pytest.skip("nothing is launched")

    def note(making):
        return cuda_notes.plan(spec, making)

    if ids.dtype not in (np.int32, np.int64, np.uint64):
        assert note(Making(laid([ids]))) is None, "a cast"
        return
    results = 2 if layout == "cudnn" else 1
    compare(monkeypatch, gpu, [ids], note, lambda: numba_cuda.lay_out(ids, spec), results)


def test_strided_ids_are_not_noted(gpu):
    ids = empty((2, 3, 4), "int64", (48, 8, 2))
    spec = contract.check_plan(ids, 9, "cuda", True)
    assert cuda_notes.plan(spec, Making(laid([ids]))) is None
    masks = empty((2, 1, 3, 9), "float32", (100, 50, 10, 1))  # read as they lie
    sizes = {"batch_size": 2, "seq_len": 3, "key_len": 9, "window_size": 2}
    spec = contract.check(**sizes, attention_mask=masks)
    assert cuda_notes.build(spec, "attention_mask", Making(laid([masks]))) == 1


def test_only_launches_are_noted(gpu):
    notes = _numba_notes.NumbaNotes(Making(laid([empty((4, 4), "int64")])))
    (x,) = notes.given()
    with _numba.noting(notes):
        cast = np.dtype(np.int32)
        for work in (lambda: _numba.on(0), lambda: _numba.contiguous(x.T), lambda: _numba.contiguous(x, cast)):
            with pytest.raises(NotLaunches):
                work()
        assert _numba.contiguous(x) is x
        with pytest.raises(NotLaunches, match="inside of another"):
            _numba.launch(numba_cuda.shift_ids, (1,), (32,), x[1:], 3)
        _numba.launch(numba_cuda.shift_ids, (0, 2), (32,), x, 3)  # an empty grid
        assert notes._making.steps == []
        _numba.launch(numba_cuda.shift_ids, (200, 2), (32,), x, 3)
    (step,) = notes._making.steps
    assert step.sizes == (200, 2, 1, 32, 1, 1) and step.moves == ((4, 0, 0),) and step.values[-1] == 3
    assert _numba._notes() is None, "the block is left"


@pytest.mark.parametrize("fault", ["no compile", "no library", "other words", "narrow", "short", "long", "raises"])
def test_a_numba_with_other_insides_is_not_noted(gpu, monkeypatch, fault):
    class Other(Compiled):
        def _prepare_args(self, kind, x, stream, retr, made):
            if fault == "raises":
                raise AssertionError("another signature")
            super()._prepare_args(kind, x, stream, retr, made)
            if fault == "other words" and isinstance(x, NumbaArray):
                made[-5], made[-4] = made[-4], made[-5]
            if fault == "narrow" and not isinstance(x, NumbaArray):
                made[-1] = ctypes.c_int32(x)
            if fault == "short":
                made.pop()
            if fault == "long":
                made.append(0)

    ids = empty((2, 3, 4), "int64")
    spec = contract.check_plan(ids, 9, "cuda", True)
    kernel = numba_cuda.shift_ids
    assert cuda_notes.plan(spec, Making(laid([ids]))) == 1
    if fault == "no compile":
        monkeypatch.delattr(NumbaKernel, "compile")
    else:
        monkeypatch.setattr(kernel, "compile", lambda types: Other("shift_ids", types))
    if fault == "no library":
        monkeypatch.setattr(Other, "_codelibrary", property(lambda x: x.nothing, lambda x, y: None), raising=False)
    assert cuda_notes.plan(spec, Making(laid([ids]))) is None


def test_threads_note_for_themselves(gpu):
    from tests.support.threads import run_at_once

    ids = empty((2, 3, 4), "int64")
    spec = contract.check_plan(ids, 9, "cuda", True)

    def note():
        making = Making(laid([ids]))
        assert cuda_notes.plan(spec, making) == 1 and len(making.steps) == 1
        assert [type(x) for x in (making.given[0].address,)] == [Address]

    run_at_once([note] * 8)
