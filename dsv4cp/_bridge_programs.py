"""Calls on torch tensors of a kind that came before (_programs.py): from the addresses of their tensors to the launches
at once. Beside them such a call costs a tuple, a look into a dict and the memory of its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _bridge, _kernels
from ._bridge_calls import PLAIN, TENSORS, dispatch_modes, function_modes, functorch
from ._programs import Laid, Make, Making, Program, Programs

_profiler, _profiled_here = torch.autograd.profiler, torch.autograd._profiler_enabled
_traced = torch._C._get_tracing_state
_excluded, _AUTOGRAD = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradFunctionality


class Told(NamedTuple):
    """An eager call that nothing but the kernels would see, on plain tensors in memory of their own."""

    kind: tuple[Any, ...]  # all that a check or a launch may look at, but for where the tensors are
    addresses: list[int]  # on 16 bytes
    tensors: tuple[torch.Tensor, ...]
    gradient: bool  # is wanted
    device: int


def known(
    programs: Programs, tensors: tuple[Any, ...], others: tuple[Any, ...], device: int = -1
) -> tuple[Told | None, Program | None]:
    """What `told` says of a call, and its program where it came before."""
    call = told(tensors, others, device)
    return call, None if call is None else programs.find(call.kind)


def told(tensors: tuple[Any, ...], others: tuple[Any, ...], device: int = -1) -> Told | None:
    """What a call on `tensors` is known by; None where anything might miss the way through the dispatcher.

    device: where they have to be, -1 where the first one says it.

    Not told are calls under torch.compile, torch.jit.trace, a mode, a transform of torch.func or a profiler that would
    show the operator, tensors of other types (and old transforms' wrappers, which have no memory), off 16 bytes or
    lazily negated, off the GPU or of two; inference tensors that require a gradient where one is wanted; and others
    than numbers, strings, None, dtypes and devices. Equal numbers of different types are different kinds; zeros' signs
    are not told apart.
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
    addresses, wanted = [], False
    # Excluded in inference mode, which grad mode does not say, and below autograd.
    gradients = torch.is_grad_enabled() and not _excluded(_AUTOGRAD)
    try:
        if device < 0 and tensors and type(tensors[0]) in TENSORS:
            device = _device_of(tensors[0])
        for x in tensors:
            if type(x) not in TENSORS or not x.is_cuda or x.is_neg() or _device_of(x) != device:
                return None
            address = x.data_ptr()
            if not address or address & 15:
                return None
            kind += (x.shape, x.stride(), x.dtype)
            addresses.append(address)
            if gradients and x.requires_grad:
                if x.is_inference():
                    return None  # whether autograd sees it is the dispatcher's to say
                wanted = True
    except RuntimeError:
        return None  # no memory, or no strides
    kind.append(device)
    return Told(tuple(kind), addresses, tensors, wanted, device)


_plain_types: set[tuple[type, ...]] = set()
_device_of: Callable[[torch.Tensor], int] = torch.Tensor.get_device


def run(program: Program, call: Told) -> list[torch.Tensor]:
    """Queues the call on torch's current stream of its tensors' device, and returns its results."""
    device = call.device
    if not _bridge.is_current(device):
        with _bridge.on_stream_of(device):
            return run(program, call)
    made = [_empty_cuda(*make) for make in program.makes]
    addresses = call.addresses + [x.data_ptr() for x in made]
    _kernels.play(program.launches, addresses, _bridge.stream_pointer(device))
    return made[: program.results]


def settle(programs: Programs, call: Told | None, note: Callable[[Making], int | None]) -> None:
    """To be told of a call that the kernels have run: Programs.settle."""
    if call is not None:
        programs.settle(call.kind, functools.partial(_laid, call), note, _made, _bridge.on_stream_of(call.device))


def _laid(call: Told) -> list[Laid] | None:
    """How the tensors lie; None where hooks for saved tensors have changed them since: the note would be of another
    kind."""
    again = told(call.tensors, call.kind[1], call.device)
    if again is None or again.kind != call.kind:
        return None
    pairs = zip(call.addresses, call.tensors, strict=True)
    return [Laid(at, tuple(x.shape), x.stride(), _bridge.name_of(x.dtype)) for at, x in pairs]


def _made(make: Make) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Sizes, strides and dtype."""
    sizes, name = make
    return sizes, _steps_of(sizes), getattr(torch, name)


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
