"""A user's TorchDispatchModes (a counter of operations, selective checkpointing) around Dynamo.

Dynamo compiles nothing where it meets one, finds none of its own graphs again, and gives the function up for good: from
then on it would run as it was written. So modes wait outside while Dynamo is at work, and are back while a graph runs.
What Python does between two graphs they do not see.

FlopCounterMode and others of torch's put hooks on all modules besides, for which Dynamo gives up as well: such a call
is better run without it.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from fxamp.errors import CaptureError

_FOLLOWED = (
    "somebody follows all modules there are by global hooks (torch.nn.modules.module.register_module_forward_hook), "
    "which do not fire in a graph"
)


class _Waiting(threading.local):
    """The stack of modes as it was outside, in this thread; None where none wait."""

    stack: list[Any] | None = None


_waiting = _Waiting()


def are_modes_active() -> bool:
    """Whether a mode of the user's is, one that is no part of torch's own machinery."""
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return False
    return not all(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def follow_modules() -> bool:
    """Whether somebody has put hooks on all modules there are."""
    return bool(torch.nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def check_not_followed() -> None:
    """Check that a graph does what the call would do.

    Raises:
        CaptureError: there are hooks on all modules, and no mode of torch's that brings its own and counts operations.
    """
    if follow_modules() and not are_modes_active():
        raise CaptureError(_FOLLOWED)


def modes_wait() -> contextlib.AbstractContextManager[None]:
    """While it is entered no mode but torch's own (fake tensors) is active."""
    if not are_modes_active():
        return contextlib.nullcontext()
    stack = _get_current_dispatch_mode_stack()
    return _exchanged([mode for mode in stack if mode.is_infra_mode()], stack)


def modes_return() -> contextlib.AbstractContextManager[None]:
    """While it is entered those that wait are active again."""
    stack = _waiting.stack
    return contextlib.nullcontext() if stack is None else _exchanged(stack, None)


@contextlib.contextmanager
def _exchanged(inside: list[Any], waiting: list[Any] | None) -> Iterator[None]:
    before, waited = _get_current_dispatch_mode_stack(), _waiting.stack
    _set_stack(inside)
    _waiting.stack = waiting
    try:
        yield
    finally:
        _set_stack(before)
        _waiting.stack = waited


def _set_stack(modes: list[Any]) -> None:
    for _ in range(torch._C._len_torch_dispatch_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
