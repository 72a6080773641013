"""What a call of a torch operator costs the host beside its launches, kept small: checks are remembered, the dispatcher
is entered below autograd where that has nothing to do, tensors are wrapped or copied only where they must be. What a
kind of call costs when it comes again is _bridge_programs.py's.

A part of _bridge, which hands these names on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch

from ._plan import SparseIndexPlan

MOST_REMEMBERED = 1024  # results of one check
PLAIN = frozenset((bool, int, str, type(None), torch.dtype, torch.device))  # types whose equal values are the same
TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))  # types that are no more than their metadata says
_UNKNOWN = object()

P = ParamSpec("P")
T = TypeVar("T")


def remembered(check: Callable[P, T]) -> Callable[P, T]:
    """`check` with its results kept, for functions of metadata alone: checking anew takes longer than a launch.

    A result is kept for equal shapes, dtypes, layouts and devices of plain tensors (parameters too), the same fields of
    a SparseIndexPlan and the same values of all else; what cannot be told by these goes to `check` itself, as does
    every call that torch.compile traces, which allows no module state. What `check` raises is not kept.
    """
    known: dict[tuple[Any, ...] | None, Any] = {}

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return check(*args, **kwargs)
        key: tuple[Any, ...] | None
        try:
            key = (*_key(args), *kwargs, _UNKNOWN, *_key(kwargs.values())) if kwargs else _key(args)
            result = known.get(key, _UNKNOWN)
        except (TypeError, RuntimeError, AttributeError):
            key = None  # another type; sizes without a hash; a nested tensor, which has none; a plan without fields
        if key is None:
            return check(*args, **kwargs)
        if result is _UNKNOWN:
            result = check(*args, **kwargs)
            if torch._C._get_tracing_state() is None:  # torch.jit.trace makes tensors of sizes: equal to no others
                # No lock: a destructor or signal handler that calls in between would wait for its own thread. Threads
                # that fill at the same time may leave some more than the most.
                if len(known) >= MOST_REMEMBERED:
                    known.clear()
                known[key] = result
        return result

    return checked


def _key(values: Iterable[Any]) -> tuple[Any, ...]:
    """Everything that a check may look at; TypeError for values of other types."""
    key: list[Any] = []
    for x in values:
        kind = type(x)
        if kind in TENSORS:
            key += (x.shape, x.dtype, x.layout, x.device)
        elif kind in PLAIN:
            key += (kind, x)  # True is 1, but not of its type
        elif kind is float:
            key += (kind, x or repr(x))  # -0.0 equals 0.0, but scales otherwise
        elif kind is SparseIndexPlan:
            key += (kind, *_key((x.backend, x.indices, x.topk_length, x.valid_rows, x.kv_sequence)))
        else:
            raise TypeError(f"a {kind.__name__} is not told by its metadata")
    return tuple(key)


# --- The way to an operator ------------------------------------------------------------------------------


functorch = torch._C._functorch.peek_interpreter_stack
dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack


def below_autograd() -> Any:
    """A block in which operators go straight to their kernels: torch's documented way to call oneself from Autograd."""
    return torch._C._AutoDispatchBelowAutograd()


forward_mode = torch.autograd.forward_ad


def has_tangent(*args: Any) -> bool:
    """Whether forward-mode differentiation, which torch.func.jvp is too, follows one of the arguments."""
    if forward_mode._current_level < 0:
        return False
    return any(isinstance(x, torch.Tensor) and forward_mode.unpack_dual(x).tangent is not None for x in args)


def autograd_is_idle(*args: Any) -> bool:
    """Whether an operator may be called on these arguments with below_autograd(): eager, no gradient wanted, and
    neither a tensor subclass, a mode, a transform of torch.func nor forward-mode differentiation to see the call."""
    if torch.compiler.is_compiling() or forward_mode._current_level >= 0:
        return False
    wanted = torch.is_grad_enabled()
    for x in args:
        kind = type(x)
        if kind in TENSORS:
            if wanted and x.requires_grad:
                return False
        elif kind is not float and kind not in PLAIN:
            return False
    return functorch() is None and not dispatch_modes() and not function_modes()


def call(operator: Any, *args: Any) -> Any:
    """operator(*args), by the shorter way below autograd where that is idle."""
    if autograd_is_idle(*args):
        with below_autograd():
            return operator(*args)
    return operator(*args)


def out_of_autocast(kernel: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """An operator's kernel that no autocast reaches: what it computes in torch operations has the dtypes it says."""

    def exact(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device_type):
            return kernel(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return kernel(*args, **kwargs)

    return exact


def own_views(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views that torch.autograd.grad may be asked about inside of a backward pass: with respect to the tensors
    themselves it would walk on through the caller's graph, where one is a function of another, and call its hooks."""
    return tuple(x.view_as(x) for x in tensors)


# --- Tensors that kernels read by pointer ----------------------------------------------------------------


def plain(x: torch.Tensor) -> torch.Tensor:
    """x as memory: without its autograd history, its values written out where it is lazily negated."""
    return x.detach().resolve_neg() if x.requires_grad or x.is_neg() else x  # asking takes less than two no-ops


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a dtype, itself where it has that one."""
    return x if x.dtype == dtype else x.to(dtype)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """What a kernel may read by pointer: x, or a row-major copy made on the current stream; begins on 16 bytes."""
    if x.requires_grad or x.is_neg() or not x.is_contiguous():  # asking takes a quarter of the time of three no-ops
        x = x.detach().resolve_neg().contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def readable(x: torch.Tensor, aligned: Callable[..., bool]) -> torch.Tensor:
    """x itself where the kernels can read it, else a contiguous copy. aligned(address, shape, strides) says which."""
    x = plain(x)
    return x if aligned(x.data_ptr(), x.shape, x.stride()) else x.clone(memory_format=torch.contiguous_format)


@functools.cache
def name_of(dtype: torch.dtype) -> str:
    """A dtype as a bare name, like _arrays.dtype_name; for operators' kernels, which torch.compile does not trace."""
    return str(dtype).removeprefix("torch.")
