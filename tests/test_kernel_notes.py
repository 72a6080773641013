"""Launches that are noted once and played later: they reach the driver as direct ones do, at the addresses of the
play; what lies in no array is refused while noting."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import time

import numpy as np
import pytest

pytest.importorskip("cupy", reason="CuPy is not installed")

from dsv4cp import _kernels, _tensor_maps
from dsv4cp._kernel_arguments import Blocks
from dsv4cp._kernel_notes import BASE, ROOM, Address, MapBytes, Noting, launches
from dsv4cp._kernel_text import Parameter
from tests.support.threads import run_at_once
from tests.test_kernel_launch import F32, I64, MAP, POINTER, Array, DriverError, driver, good, scale  # noqa: F401

NUMBERS = {"n": np.int64(2**40), "f": np.float32(0.1)}
SIZES = {"grid": (2, 3), "block": 32, "shared_bytes": 64}


def kernel_of(sources, driver, text, *types):  # noqa: F811
    """A kernel `f` of these parameters, which the driver reads as these C types."""
    (sources / "a.cu").write_text(f'extern "C" __global__ void f({text}) {{}}\n')
    driver.types = types
    return _kernels.kernel("a.cu", "f")


def noted_and_direct(driver, launch, *memory, stream=77):  # noqa: F811
    """What the driver saw of launch(stream, *addresses), played from notes of other addresses and launched directly."""
    noting = Noting()
    launch(noting, *(noting.array() for _ in memory))
    assert driver.launches == [], "a note queues nothing"
    _kernels.play(launches(noting.steps, noting.arrays), list(memory), stream)
    played = driver.launches[:]
    driver.launches.clear()
    launch(stream, *memory)
    return played, driver.launches


# --- Addresses -----------------------------------------------------------------------------------------------


def test_sums_stay_in_the_array():
    noting = Noting()
    noting.array(64)
    x = noting.array(4096)
    for sum_, offset in (
        (x, 0), (x + 0, 0), (x + 48, 48), (48 + x, 48), (x + np.int64(48), 48), (x + np.int32(-16), -16),
        (x + 16 + 32, 48), (8 + (x + np.int64(2)) + 1, 11), (x + 2**40, 2**40),
    ):  # fmt: skip
        assert type(sum_) is Address
        assert (sum_, sum_.array, sum_.offset) == (4096 + offset, 1, offset)
    assert type((x + np.int64(48)).offset) is int and type(x.offset) is int


def test_all_else_is_a_plain_number():
    x = Noting().array(4099)
    results = (x - 3, x * 2, x | 4, x & 15, x % 16, x // 2, x >> 1, -x)
    assert results == (4096, 8198, 4103, 3, 3, 2049, 2049, -4099)
    assert {type(y) for y in results} == {int}
    assert not isinstance(np.int64(1) + x, Address), "NumPy has the say where its number stands first"


def test_arrays_that_are_not_made_yet_lie_apart_from_all():
    noting = Noting()
    arrays = [noting.array(), noting.array(256), noting.array(), noting.array()]
    assert [x.array for x in arrays] == [0, 1, 2, 3] and noting.arrays == 4
    made = [arrays[0], *arrays[2:]]
    assert [x.offset for x in made] == [0, 0, 0] and arrays[1] == 256
    assert all(x % 256 == 0 and x > BASE for x in made)
    assert all(b - a >= ROOM for a, b in itertools.pairwise(made))


# --- What is noted is what would have been queued ------------------------------------------------------------


def test_the_play_is_the_launch(driver, scale):  # noqa: F811
    def launch(stream, x, y):
        _kernels.launch(scale, **SIZES, stream=stream, x=x, y=y, **NUMBERS)

    for memory in ((4096, 256), (2**64 - 1, 0)):
        driver.launches.clear()
        played, direct = noted_and_direct(driver, launch, *memory)
        assert played == direct
        (got,) = played
        assert got.args == [*memory, 2**40, pytest.approx(0.1)]
        assert (got.grid, got.block, got.shared, got.stream) == ((2, 3, 1), (32, 1, 1), 64, 77)
    assert len(driver.compiled) == 1


@pytest.mark.parametrize("stream", [0, 1, 2**47])
def test_the_stream_is_the_plays(driver, scale, stream):  # noqa: F811
    def launch(to, x, y):
        _kernels.launch(scale, **good(x=x, y=y, stream=to))

    played, direct = noted_and_direct(driver, launch, 4096, 256, stream=stream)
    assert played == direct and played[0].stream == stream


def test_names_in_any_order_offsets_and_one_array_twice(driver, scale):  # noqa: F811
    def launch(stream, a, b):
        for given in (
            good(x=a + 16, y=32 + b), good(y=a, x=b), good(x=a, y=a + 8, n=np.int64(-7)), good(x=b, y=0),
            good(f=np.float32(np.inf), y=np.uintp(0), x=b + 2**34),
        ):  # fmt: skip
            _kernels.launch(scale, **dict(reversed(given.items())), stream=stream)

    played, direct = noted_and_direct(driver, launch, 4096, 2**41)
    assert played == direct
    pairs = [launch.args[:2] for launch in played]
    assert pairs == [[4112, 2**41 + 32], [2**41, 4096], [4096, 4104], [2**41, 0], [2**41 + 2**34, 0]]


def test_several_kernels_in_their_order(driver, scale, sources):  # noqa: F811
    (sources / "b.cu").write_text('extern "C" __global__ void b(i64 n, float* x, const u16* y, float f) {}\n')
    other = _kernels.kernel("b.cu", "b")
    noting = Noting()
    x, y = noting.array(), noting.array()
    _kernels.launch(scale, **good(x=x, y=y, stream=noting))
    _kernels.launch(other, **good(x=y, y=x, grid=(1, 2, 3), block=(4, 2), stream=noting))
    _kernels.launch(scale, **good(x=y, y=y, stream=noting))
    assert [step.kernel for step in noting.steps] == [scale, other, scale]
    del noting.steps[2]
    driver.types = [POINTER, POINTER, I64, F32]
    _kernels.play(launches(noting.steps[:1], noting.arrays), [16, 32], 5)
    driver.types = [I64, POINTER, POINTER, F32]
    _kernels.play(launches(noting.steps[1:], noting.arrays), [16, 32], 5)
    first, second = driver.launches
    assert first.args == [16, 32, 3, 2.0] and second.args == [3, 32, 16, 2.0]
    assert (second.grid, second.block) == ((1, 2, 3), (4, 2, 1))


def test_every_kind_of_number(driver, sources):  # noqa: F811
    text = "bool a, double b, int c, float* x, unsigned d, i64 e, float g, u64 h, bool i"
    types = (
        ctypes.c_bool, ctypes.c_double, ctypes.c_int32, POINTER, ctypes.c_uint32, I64, F32, ctypes.c_uint64,
        ctypes.c_bool,
    )  # fmt: skip
    kernel = kernel_of(sources, driver, text, *types)
    numbers = {
        "a": np.bool_(True), "b": np.float64(-1e300), "c": np.int32(-(2**31)), "d": np.uint32(2**32 - 1),
        "e": np.int64(-(2**63)), "g": np.float32(0.1), "h": np.uint64(2**64 - 1), "i": np.bool_(False),
    }  # fmt: skip

    def launch(stream, x):
        _kernels.launch(kernel, grid=1, block=1, stream=stream, x=x, **numbers)

    played, direct = noted_and_direct(driver, launch, 48)
    assert played == direct
    assert played[0].args[:4] == [True, -1e300, -(2**31), 48]
    assert played[0].args[4:] == [2**32 - 1, -(2**63), float(np.float32(0.1)), 2**64 - 1, False]


def test_one_parameter_or_none(driver, sources):  # noqa: F811
    kernel = kernel_of(sources, driver, "float* x", POINTER)
    played, direct = noted_and_direct(
        driver, lambda stream, x: _kernels.launch(kernel, grid=1, block=1, stream=stream, x=x + 4), 16
    )
    assert played == direct and played[0].args == [20]
    (sources / "b.cu").write_text('extern "C" __global__ void g() {}\n')
    driver.launches, driver.types = [], ()
    empty = _kernels.kernel("b.cu", "g")
    played, direct = noted_and_direct(driver, lambda stream: _kernels.launch(empty, grid=1, block=1, stream=stream))
    assert played == direct and [launch.args for launch in played] == [[]]


def test_large_shared_memory_is_opted_in_to(driver, scale):  # noqa: F811
    noting = Noting()
    _kernels.launch(scale, **good(x=noting.array(), y=noting.array(), shared_bytes=64 * 1024, stream=noting))
    assert driver.shared == []
    for _ in range(2):
        _kernels.play(launches(noting.steps, noting.arrays), [16, 32], 0)
    assert driver.shared == [64 * 1024]


def test_notes_are_of_the_arguments_not_of_this_times_addresses(driver, scale):  # noqa: F811
    noting = Noting()
    _kernels.launch(scale, **good(x=noting.array(4096), y=noting.array(256) + 4, stream=noting))
    for memory in ([16, 32], [4096, 256], [2**50, 0]):
        _kernels.play(launches(noting.steps, noting.arrays), memory, 0)
        assert driver.launches[-1].args[:2] == [memory[0], memory[1] + 4]


@pytest.mark.parametrize("grid", [0, (0,), (3, 0), (0, 1, 1)])
def test_an_empty_grid_is_not_noted(driver, scale, grid):  # noqa: F811
    noting = Noting()
    given = good(x=noting.array(), y=noting.array(), stream=noting, grid=grid)
    _kernels.launch(scale, **given)
    assert noting.steps == [] and driver.compiled == []
    with pytest.raises(TypeError, match="n: "):
        _kernels.launch(scale, **{**given, "n": 3})


# --- Zeros ---------------------------------------------------------------------------------------------------


def test_zeros_are_played_in_their_place(driver, scale):  # noqa: F811
    queued = []
    driver.memsetAsync = lambda *args: queued.append((len(driver.launches), *args))
    noting = Noting()
    x, y = noting.array(), noting.array()
    noting.zero(y + 32, 100)
    _kernels.launch(scale, **good(x=x, y=y, stream=noting))
    noting.zero(x, 7)
    assert queued == []
    _kernels.play(launches(noting.steps, noting.arrays), [4096, 256], 55)
    assert queued == [(0, 288, 0, 100, 55), (1, 4096, 0, 7, 55)]
    assert [launch.args[:2] for launch in driver.launches] == [[4096, 256]]
    for address in (4096, np.uintp(4096), 0):
        with pytest.raises(TypeError, match=r"lies in no array of these notes$"):
            noting.zero(address, 4)
    assert len(noting.steps) == 3


# --- What is played ------------------------------------------------------------------------------------------


def test_launches_lay_each_varying_value_down_once(driver, scale):  # noqa: F811
    noting = Noting()
    x, y, z = noting.array(), noting.array(), noting.array()
    for first, second in ((x, y), (y + 16, z), (z, y + 16), (x + 32, x)):
        _kernels.launch(scale, **good(x=first, y=second, stream=noting))
    noting.zero(y + 16, 8)
    played = launches(noting.steps, noting.arrays)
    assert played.inside == ((0, 32), (1, 16)) and played.maps == () and len(played.steps) == 5
    queued = []
    driver.memsetAsync = lambda *args: queued.append(args)
    _kernels.play(played, (4096, 8192, 64), 7)
    assert [x.args[:2] for x in driver.launches] == [[4096, 8192], [8208, 64], [64, 8208], [4128, 4096]]
    assert queued == [(8208, 0, 8, 7)]
    assert launches([], 0) == ((), (), (), ())
    _kernels.play(launches([], 2), (16, 32), 7)
    assert len(driver.launches) == 4


def test_a_map_of_one_kind_and_place_is_encoded_once_a_call(asked):
    noting = Noting()
    x = noting.array(4096)
    a, b = (_tensor_maps.tensor_map(x, *KIND) for _ in range(2))
    assert a.encode is b.encode
    other = _tensor_maps.tensor_map(x, KIND[0], KIND[1], (64, 1, 1), KIND[3])
    assert other.encode is not a.encode


# --- What is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("lost", ["int", "uintp", "array", "difference", "aligned down"])
def test_an_address_in_no_array_is_refused(driver, scale, name, lost):  # noqa: F811
    noting = Noting()
    x = noting.array(4096)
    address = {"int": 4096, "uintp": np.uintp(4096), "array": Array(dtype="float32" if name == "x" else "uint16"),
               "difference": x - 16, "aligned down": x // 16 * 16}[lost]  # fmt: skip
    with pytest.raises(TypeError, match=f"^scale: {name}: .*lies in no array of these notes$"):
        _kernels.launch(scale, **{**good(x=x, y=x, stream=noting), name: address})
    assert noting.steps == []


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"n": 3}, TypeError, "n: expected int64, got int"),
        ({"n": np.int32(3)}, TypeError, "n: expected int64, got int32"),
        ({"n": Address(3, 0)}, TypeError, "n: expected int64, got (int|Address)"),
        ({"f": 2.0}, TypeError, "f: expected float32, got float"),
        ({"x": None}, TypeError, "x: expected a CuPy array or an address .*, got NoneType"),
        ({"x": np.int64(4096)}, TypeError, "x: expected a CuPy array or an address .*, got int64"),
        ({"x": MapBytes(bytes(128), Address(3, 0), bytes)}, TypeError, "x: expected a CuPy array .*, got (b|MapB)ytes"),
        ({"x": Array(dtype="float64")}, TypeError, "x: expected dtype float32, got float64"),
        ({"x": Array(contiguous=False)}, ValueError, "x: expected a contiguous array"),
        ({"z": np.int64(1)}, TypeError, "z: no such parameter"),
        ({"grid": 2.0}, TypeError, "grid"),
        ({"grid": -1}, ValueError, "grid"),
        ({"block": 0}, ValueError, "block"),
        ({"block": (33, 32)}, ValueError, "block"),
    ],
)
def test_refusals_are_those_of_a_launch(driver, scale, changes, kind, message):  # noqa: F811
    noting = Noting()
    given = good(x=noting.array(), y=noting.array(), stream=noting)
    for arguments in (given, good()):
        with pytest.raises(kind, match=f"^scale: {message}"):
            _kernels.launch(scale, **{**arguments, **changes})
    assert noting.steps == driver.launches == []
    _kernels.launch(scale, **given)  # and the next note is none the worse
    assert len(noting.steps) == 1


@pytest.mark.parametrize("name", ["x", "n"])
def test_a_missing_argument_is_named(driver, scale, name):  # noqa: F811
    noting = Noting()
    given = good(x=noting.array(), y=noting.array(), stream=noting)
    del given[name]
    with pytest.raises(TypeError, match=f"^scale: {name}: expected .*, got nothing"):
        _kernels.launch(scale, **given)


def test_errors_of_the_play_carry_the_kernel_and_the_sizes(driver, scale):  # noqa: F811
    noting = Noting()
    _kernels.launch(scale, **good(x=noting.array(), y=noting.array(), stream=noting, shared_bytes=7))
    driver.errors = [DriverError(1)]
    words = r"scale: launch failed: CUDA_ERROR 1 \(grid \(2, 1, 1\), block \(32, 1, 1\), 7 bytes"
    with pytest.raises(RuntimeError, match=words):
        _kernels.play(launches(noting.steps, noting.arrays), [16, 32], 0)
    with pytest.raises(ValueError, match=r"^scale: y: expected an address of 64 bits, got -1$"):
        _kernels.play(launches(noting.steps, noting.arrays), [16, -1], 0)
    driver.errors = [DriverError(_kernels.NO_CONTEXT)]  # as in a thread that has not used the device yet
    _kernels.play(launches(noting.steps, noting.arrays), [16, 32], 0)
    assert driver.contexts == 1 and [launch.args[:2] for launch in driver.launches] == [[16, 32]]


def test_a_play_is_on_the_current_device(driver, scale):  # noqa: F811
    noting = Noting()
    _kernels.launch(scale, **good(x=noting.array(), y=noting.array(), stream=noting))
    for driver.current in (0, 2):
        _kernels.play(launches(noting.steps, noting.arrays), [16, 32], 5)
    assert [launch.device for launch in driver.launches] == [0, 2]
    assert len(driver.compiled) == 2


def test_threads_at_once_have_their_own_arguments(driver, scale):  # noqa: F811
    noting = Noting()
    x, y = noting.array(), noting.array()
    for offset in (0, 1):
        _kernels.launch(scale, **good(x=x + offset, y=y, stream=noting))
    start = threading.Barrier(8)
    driver.meanwhile = lambda: time.sleep(0.0005)  # the driver runs without the interpreter's lock

    def call(thread):
        start.wait()
        for n in range(10):
            _kernels.play(launches(noting.steps, noting.arrays), [1000 * thread + 2 * n, thread], thread)

    run_at_once([lambda n=n: call(n) for n in range(8)])
    assert sorted(launch.args[0] for launch in driver.launches) == [1000 * t + n for t in range(8) for n in range(20)]
    assert all(launch.args[1] == launch.args[0] // 1000 == launch.stream for launch in driver.launches)


# --- Structs and tensor maps ---------------------------------------------------------------------------------

KIND = (512, 8, 50), (512, 4096), (64, 8, 1), "bfloat16"


@pytest.fixture
def asked(monkeypatch):
    """Addresses that the driver was asked to describe: a map begins with its address. It refuses 13."""
    addresses = []

    def encode(at, dtype, rank, address, *others):
        ctypes.memmove(at.value, (address.value or 0).to_bytes(8, "little") * 16, 128)
        addresses.append(address.value)
        return int(address.value == 13)

    monkeypatch.setattr(_tensor_maps, "_encoder", lambda: encode)
    _tensor_maps._tensor_map.cache_clear()
    _tensor_maps._encoder_of.cache_clear()
    yield addresses
    _tensor_maps._tensor_map.cache_clear()
    _tensor_maps._encoder_of.cache_clear()


def words(address: int) -> bytes:
    return address.to_bytes(8, "little") * 16


def test_maps_of_addresses_can_be_made_of_others(asked):
    x = Noting().array(4096) + 16
    map_ = _tensor_maps.tensor_map(x, *KIND)
    assert type(map_) is MapBytes and map_ == words(4112)
    assert (map_.address, map_.address.array, map_.address.offset) == (4112, 0, 16)
    for address in (4112, 256, 2**40):
        assert map_.encode(address) == words(address) == _tensor_maps.tensor_map(address, *KIND)
        assert type(map_.encode(address)) is type(_tensor_maps.tensor_map(address, *KIND)) is bytes


def test_a_map_of_another_kind_is_encoded_as_that_kind(monkeypatch):
    kinds = []
    monkeypatch.setattr(_tensor_maps, "_tensor_map", lambda *of: kinds.append(of) or bytes(128))
    other = (512, 8, 51), (512, 8192), (64, 16, 1), "float16"
    maps = [_tensor_maps.tensor_map(Noting().array(32), *kind) for kind in (KIND, other)]
    kinds.clear()
    for map_ in maps:
        map_.encode(48)
    assert kinds == [(48, *KIND), (48, *other)]


def test_a_map_is_asked_for_once_an_address_within_bounds(asked):
    encode = _tensor_maps.tensor_map(Noting().array(4096), *KIND).encode
    first = encode(16)
    for n in range(1, _tensor_maps.MOST_KEPT):
        encode(16 + 16 * n)
    _tensor_maps._tensor_map.cache_clear()
    asked.clear()
    assert encode(16) is first and asked == []
    encode(0)  # one too many: all go
    encode(16)
    assert asked == [None, 16]
    for n in range(3 * _tensor_maps.MOST_KEPT):
        encode(16 * n)
        assert len(encode.known) <= _tensor_maps.MOST_KEPT


def test_what_the_driver_refuses(asked):
    assert _tensor_maps.tensor_map(Noting().array(13), *KIND) is None
    encode = _tensor_maps.tensor_map(Noting().array(16), *KIND).encode
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the driver refuses a tensor map at 0xd"):
            encode(13)
    assert encode(32) == words(32)


def test_the_play_makes_maps_of_its_addresses(driver, sources, asked):  # noqa: F811
    types = (ctypes.c_int32, MAP, POINTER, MAP)
    kernel = kernel_of(sources, driver, "int n, const TensorMap a, float* x, const TensorMap b", *types)

    def launch(stream, x, y):
        maps = {"a": _tensor_maps.tensor_map(y + 32, *KIND), "b": _tensor_maps.tensor_map(x, *KIND)}
        _kernels.launch(kernel, grid=1, block=1, stream=stream, n=np.int32(7), x=x, **maps)

    played, direct = noted_and_direct(driver, launch, 4096, 256)
    assert played == direct
    assert played[0].args == [7, words(288), 4096, words(4096)]


def test_structs_that_are_no_map_of_an_array_are_refused(driver, sources, asked):  # noqa: F811
    kernel = kernel_of(sources, driver, "int n, const TensorMap map", ctypes.c_int32, MAP)
    noting = Noting()
    struct = np.ones((), [("bytes", np.uint8, (128,))])
    for value in (bytes(128), _tensor_maps.tensor_map(4096, *KIND), struct, struct[()]):
        with pytest.raises(TypeError, match=r"(?s)^f: map: .*lies in no array of these notes$"):
            _kernels.launch(kernel, grid=1, block=1, stream=noting, n=np.int32(1), map=value)
    for value in (noting.array(16), None, "x" * 128):
        with pytest.raises(TypeError, match=r"^f: map: expected void, got"):
            _kernels.launch(kernel, grid=1, block=1, stream=noting, n=np.int32(1), map=value)
    for size in (0, 127, 129):
        wrong = MapBytes(bytes(size), noting.array(16), bytes)
        with pytest.raises(TypeError, match=f"^f: map: expected a struct of 128 bytes, got {size}$"):
            _kernels.launch(kernel, grid=1, block=1, stream=noting, n=np.int32(1), map=wrong)
    assert noting.steps == []


# --- Blocks that hold what calls share -----------------------------------------------------------------------

KINDS = (np.bool_, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64, np.void, None)


def value_of(kind, size, g):
    if kind is None:
        return int(g.integers(2**63)) * 2 + 1
    if kind is np.void:
        return g.bytes(size)
    if issubclass(kind, np.floating):
        return kind(g.standard_normal())
    return kind(g.integers(2 if kind is np.bool_ else 100))


@pytest.mark.parametrize("seed", range(40))
def test_blocks_hold_what_packing_everything_would(seed):
    g = np.random.default_rng(seed)
    kinds = [KINDS[n] for n in g.integers(len(KINDS), size=g.integers(1, 12))]
    sizes = [8 * int(g.integers(1, 17)) if kind is np.void else 0 for kind in kinds]
    declared = tuple(
        Parameter(f"p{n}", kind, None, size) if size else Parameter(f"p{n}", kind, None)
        for n, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    )
    whole = Blocks(declared)
    shared = [value_of(*x, g) for x in zip(kinds, sizes, strict=True)]
    for vary in (range(len(kinds)), [], [int(g.integers(len(kinds)))], np.flatnonzero(g.integers(2, size=len(kinds)))):
        blocks = Blocks(declared, shared, vary)
        for _ in range(2):  # a block that was used before is packed again
            own = [value_of(*x, g) if n in vary else shared[n] for n, x in enumerate(zip(kinds, sizes, strict=True))]
            want, got = whole.new(), blocks.free.pop() if blocks.free else blocks.new()
            whole.pack(want.memory, whole.begin, *own)
            first = declared.index(blocks.packed[0]) if blocks.packed else 0
            blocks.pack(got.memory, blocks.begin, *own[first : first + len(blocks.packed)])
            blocks.free.append(got)
            for offset, kind, size in zip(whole.offsets, kinds, sizes, strict=True):
                width = size or (8 if kind is None else np.dtype(kind).itemsize)
                assert got.memory[offset : offset + width] == want.memory[offset : offset + width]
        assert blocks.offsets == whole.offsets and blocks.size == whole.size
        inner = [n for n in range(len(kinds)) if n in vary]
        assert len(blocks.packed) == (inner[-1] - inner[0] + 1 if inner else 0)


def test_shared_values_that_cannot_be_packed_show_when_noting(driver, scale):  # noqa: F811
    noting = Noting()
    _kernels.launch(scale, **good(x=noting.array(), y=noting.array(2**65), stream=noting))
    with pytest.raises(struct.error):
        launches(noting.steps, noting.arrays)


def test_an_address_that_cannot_be_packed_is_named(driver, scale):  # noqa: F811
    noting = Noting()
    _kernels.launch(scale, **good(x=noting.array(), y=noting.array(), stream=noting))
    with pytest.raises(ValueError, match=r"scale: y: expected an address of 64 bits"):
        _kernels.play(launches(noting.steps, noting.arrays), [16, 2**64], 0)
    _kernels.play(launches(noting.steps, noting.arrays), [16, 32], 0)
    assert driver.launches[-1].args[:2] == [16, 32]
