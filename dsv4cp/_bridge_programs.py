"""Calls on torch tensors of a kind that came before (_programs.py): from the addresses of their tensors to the launches
at once. Beside them such a call costs a tuple, a look into a dict and the memory of its results; its gradient no more
than that, since what it saved is known from the forward call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _bridge, _kernels
from ._bridge_calls import PLAIN, TENSORS, dispatch_modes, forward_mode, function_modes, functorch
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


def _looked_at() -> bool:
    """Whether torch.compile, torch.jit.trace, a mode, a transform of torch.func, forward-mode differentiation or a
    profiler that would show the operator is to see this call."""
    if torch.compiler.is_compiling() or function_modes() or dispatch_modes() or functorch() is not None:
        return True
    if forward_mode._current_level >= 0 or _profiler._is_profiler_enabled:
        return True
    return _profiled_here() or _traced() is not None


def told(tensors: tuple[Any, ...], others: tuple[Any, ...], device: int = -1) -> Told | None:
    """What a call on `tensors` is known by; None where anything might miss the way through the dispatcher.

    device: where they have to be, -1 where the first one says it.

    Not told are calls that anything looks at; tensors of other types (and old transforms' wrappers, which have no
    memory), off 16 bytes or lazily negated, off the GPU or of two; inference tensors that require a gradient where one
    is wanted; and others than numbers, strings, None, dtypes and devices. Equal numbers of different types are
    different kinds; zeros' signs are not told apart.
    What a user registers on the operators themselves (torch.library.register_autocast, say) is not asked about.
    """
    if _looked_at():
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
    return _run(program, call.addresses, call.device)


def _run(program: Program, addresses: list[int], device: int) -> list[torch.Tensor]:
    if not _bridge.is_current(device):
        with _bridge.on_stream_of(device):
            return _run(program, addresses, device)
    made = [_empty_cuda(*make) for make in program.makes]
    addresses = addresses + [x.data_ptr() for x in made]
    _kernels.play(program.launches, addresses, _bridge.stream_pointer(device), device)
    return made[: program.results]


# --- Gradients of played calls -------------------------------------------------------------------------------


class Forward(NamedTuple):
    """What a played call leaves to its gradient, in an autograd.Function that saves the call's tensors and its results
    for backward, in this order."""

    program: Program
    addresses: list[int]  # of the saved tensors
    device: int


def forward_of(program: Program, call: Told, *results: torch.Tensor) -> Forward | None:
    """The call's, once it was played with `results`; None where hooks will pack what is saved: anything may come back
    from them."""
    if _hooks is None or _hooks(True) is not None:
        return None
    if not program.gradients.facts:
        program.gradients.facts = _facts(call)
    return Forward(program, call.addresses + [x.data_ptr() for x in results], call.device)


def gradient_of(
    forward: Forward | None, saved: tuple[torch.Tensor, ...], grad: Any, *others: Any
) -> list[torch.Tensor] | None:
    """The gradient of a forward call, on `grad` and what it saved, by the program that remember_gradient was told for
    calls like these; None where it was told none, where a graph of the gradient is wanted, or where anything but grad
    is not as it was.

    Telling what is saved once more would take as long as all the rest. Without hooks torch hands back the very tensors
    that the call was given, and raises where any was changed in place since. What it does not look at is x.data = y, so
    their sizes, strides, dtypes and memory are; what is at the same address is on the same device. Results come back
    as they were made, whatever their data was set to.
    """
    if forward is None or torch.is_grad_enabled() or type(grad) not in TENSORS or grad.is_neg() or _looked_at():
        return None
    program, addresses, device = forward
    facts, found = program.gradients.facts, program.gradients.known
    try:
        key, address = (grad.shape, grad.stride(), grad.dtype, _device_of(grad), others), grad.data_ptr()
        if not address or address & 15 or [x.data_ptr() for x in saved] != addresses:
            return None
        if [(x.shape, x.stride(), x.dtype, x.is_neg()) for x in saved[: len(facts)]] != facts:
            return None
    except RuntimeError:
        return None  # no memory, or no strides
    for known_by, gradient in found:
        if known_by == key:
            return _run(gradient, [address, *addresses], device)
    return None


def remember_gradient(forward: Forward | None, call: Told, gradient: Program, *others: Any) -> None:
    """To be told that `gradient` is the program of a gradient `call` on grad and what the forward call saved, with
    whatever else a gradient of this forward kind may depend on in `others`."""
    if forward is None or call.device != forward.device or call.addresses[1:] != forward.addresses:
        return
    program, (incoming, *saved) = forward.program, _facts(call)
    given, found = program.gradients.facts, program.gradients.known
    results = [(*make, False) for make in program.makes[: len(saved) - len(given)]]
    if saved == given + results:  # nobody has changed these tensors
        found[:] = [((*incoming[:3], call.device, others), gradient), *found[: MOST_GRADIENTS - 1]]


def _facts(call: Told) -> list[tuple[Any, ...]]:
    """Sizes, strides, dtype and whether lazily negated, of each tensor."""
    _, _, *told, _ = call.kind
    return [(*told[n : n + 3], False) for n in range(0, len(told), 3)]


def playable(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """What applies a Function, whose nodes have `before` (a Forward or None), to calls that were told.

    It leaves out function.apply's look for transforms of torch.func and for wrappers that they leave behind, a seventh
    of such a call: `told` refuses both. The nodes lose `before` once somebody asks for what they have saved, to hang
    hooks on it.
    """
    node: Any = function._backward_cls  # type: ignore[attr-defined]
    raw = node._raw_saved_tensors

    def asked(self: Any) -> Any:
        self.before = None
        return raw.__get__(self)

    node._raw_saved_tensors = property(asked)
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


MOST_GRADIENTS = 8  # of one kind of forward calls; looked through one by one, which for a few is quicker than a hash
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # since torch 2.8


# --- Programs of torch ---------------------------------------------------------------------------------------


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
