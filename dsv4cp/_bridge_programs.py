"""Calls of a kind that was met before: from the addresses of their tensors to the launches at once.

The first call of a kind goes through operator, dispatcher and checks; so does the second, after which launch code is
run once more to note what it launches (_kernel_notes.py). From then on a call is told by its metadata and its launches
are played: beside them it costs a tuple, a look into a dict and the memory of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from . import _bridge, _kernels
from ._bridge_calls import MOST_REMEMBERED, PLAIN, TENSORS, dispatch_modes, function_modes, functorch
from ._kernel_notes import Address, Noting, Step

_profiler, _profiled_here = torch.autograd.profiler, torch.autograd._profiler_enabled
_traced = torch._C._get_tracing_state
_excluded, _AUTOGRAD = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradFunctionality
_UNKNOWN = object()
Make = tuple[tuple[int, ...], torch.dtype]  # a row-major tensor


class Told(NamedTuple):
    """An eager call that nothing but the kernels would see, on plain tensors in memory of their own."""

    kind: tuple[Any, ...]  # all that a check or a launch may look at, but for where the tensors are
    addresses: list[int]  # on 16 bytes
    tensors: tuple[torch.Tensor, ...]
    gradient: bool  # is wanted


def told(tensors: tuple[Any, ...], others: tuple[Any, ...]) -> Told | None:
    """What a call on `tensors` is known by; None where anything might miss the way through the dispatcher.

    Not told are calls under torch.compile, torch.jit.trace, a mode, a transform of torch.func or a profiler that would
    show the operator, tensors of other types (and old transforms' wrappers, which have no memory), off 16 bytes or
    lazily negated, off the GPU; inference tensors that require a gradient; and others than numbers, strings, None,
    dtypes and devices. Equal numbers of different types are different kinds; the signs of zeros are not told apart.
    What a user registers on the operators themselves (torch.library.register_autocast, say) is not asked about.
    """
    if torch.compiler.is_compiling() or function_modes() or dispatch_modes() or functorch() is not None:
        return None
    if _profiler._is_profiler_enabled or _profiled_here() or _traced() is not None:
        return None
    types = tuple(map(type, others))
    if types not in _plain_types:
        if not all(kind in PLAIN or kind is float for kind in types):
            return None
        _plain_types.add(types)  # finitely many: of types that are plain, in numbers that callers pass
    kind: list[Any] = [types, others]
    addresses, gradient = [], False
    try:
        for x in tensors:
            if type(x) not in TENSORS or not x.is_cuda or x.is_neg():
                return None
            address = x.data_ptr()
            if not address or address & 15:
                return None
            kind += (x.shape, x.stride(), x.dtype, _device_of(x))
            addresses.append(address)
            if x.requires_grad:
                if x.is_inference():
                    return None  # whether autograd sees it is the dispatcher's to say
                gradient = True
    except RuntimeError:
        return None  # no memory, or no strides
    # Excluded in inference mode, which grad mode does not say, and below autograd.
    wanted = gradient and torch.is_grad_enabled() and not _excluded(_AUTOGRAD)
    return Told(tuple(kind), addresses, tensors, wanted)


_plain_types: set[tuple[type, ...]] = set()
_device_of: Callable[[torch.Tensor], int] = torch.Tensor.get_device


class Program:
    """The launches of one kind of call, and the results and working memory that it makes for them."""

    __slots__ = ("_makes", "_results", "_steps")

    def __init__(self, steps: Iterable[Step], makes: Iterable[Make], results: int) -> None:
        self._steps, self._results = tuple(steps), results
        self._makes = tuple((sizes, _steps_of(sizes), dtype) for sizes, dtype in makes)

    def run(self, call: Told) -> list[torch.Tensor]:
        """Queues the call on torch's current stream of its tensors' device, and returns its results."""
        device = call.tensors[0].get_device()
        if not _bridge.is_current(device):
            with _bridge.on_stream_of(call.tensors[0]):
                return self.run(call)
        made = [_empty_cuda(*make) for make in self._makes]
        addresses = call.addresses + [x.data_ptr() for x in made]
        _kernels.play(self._steps, addresses, _bridge.stream_pointer(device))
        return made[: self._results]


class Making(Noting):
    """Noting, which knows the tensors as well."""

    def __init__(self, addresses: Iterable[int]) -> None:
        super().__init__()
        self.given = [self.array(address) for address in addresses]
        self._makes: list[Make] = []

    def make(self, sizes: Iterable[int], dtype: torch.dtype) -> Address:
        """A row-major tensor that the call makes, results first."""
        self._makes.append((tuple(sizes), dtype))
        return self.array()

    def program(self, results: int) -> Program:
        """What was noted; the first `results` of what it makes are handed out."""
        return Program(self.steps, self._makes, results)


class Programs:
    """Programs by the kind of call, for one operation."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Any] = {}

    def find(self, call: Told) -> Program | None:
        """The call's, None where there is none (yet)."""
        return self._known.get(call.kind) or None

    def settle(self, call: Told | None, note: Callable[[Making], int | None]) -> None:
        """To be told of a call that the kernels have run. Of the second of its kind, note(making) runs the launch code
        and says how many results it has, None where a call of this kind needs more than launches."""
        if call is None:
            return
        found = self._known.get(call.kind, _UNKNOWN)
        if found is _UNKNOWN:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[call.kind] = None  # sizes that never come again are not worth a program
        elif found is None and not any(type(x) is float and x == 0 for x in call.kind[1]):  # -0.0 is another call
            again = told(call.tensors, call.kind[1])
            if again is None or again.kind != call.kind:
                return  # hooks for saved tensors have changed them since: the note would be of another kind
            making = Making(call.addresses)
            with _bridge.on_stream_of(call.tensors[0]):
                results = note(making)
            self._known[call.kind] = False if results is None else making.program(results)


def _torch_empty(sizes: tuple[int, ...], steps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, steps, dtype=dtype, device="cuda")


# The call that compiled programs of torch make: less than half the time of torch.empty, which a torch without it has.
_empty_cuda: Any = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", _torch_empty)


def _steps_of(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, as torch.empty gives them."""
    steps, step = [], 1
    for size in reversed(sizes):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))
