"""Run a model's forward for a look only: what it leaves behind in Python is put back."""

import collections
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from fxamp.function_modes import no_export
from fxamp.randomness import generators_kept

CONTAINERS = (
    dict,
    list,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)
_SCALARS = (bool, int, float, str, type(None))


@contextlib.contextmanager
def unseen(model: nn.Module) -> Iterator[None]:
    """Put back random generators, and the globals of the files that define the model's classes, when it ends.

    Numbers, strings and flags get their old values, and containers their old elements (one level deep). The model's
    own attributes are not looked at: the caller runs a copy.
    """
    namespaces = [vars(module) for module in _user_modules(model)]
    scalars = [{name: value for name, value in space.items() if type(value) in _SCALARS} for space in namespaces]
    containers = containers_in(namespaces)
    try:
        with generators_kept():
            yield
    finally:
        for space, before in zip(namespaces, scalars, strict=True):
            space.update({name: value for name, value in before.items() if space.get(name, space) is not value})
        for container, elements in containers:
            refill(container, elements)


@contextlib.contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """The user's hooks on saved tensors see the model's own tensors, and none of a capture."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def no_inference_mode() -> Iterator[None]:
    """A call in inference mode gets the graph that it would get under no_grad."""
    grad_mode = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad_mode):
        yield


@contextlib.contextmanager
def no_jit_trace() -> Iterator[None]:
    """torch.jit.trace records the graph that is made, and none of its making, whose sizes would be tensors."""
    state = torch._C._get_tracing_state()
    try:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


@contextlib.contextmanager
def outside_of_the_call() -> Iterator[None]:
    """The modes and hooks that a call is made under see nothing of what is found out for it.

    torch.export calls a model under modes of its own, and checkpoint under hooks that count what is saved.
    """
    if _is_plain():  # which costs an eighth of the rest
        yield
        return
    with _disable_current_modes(), no_export(), no_saved_tensor_hooks(), no_jit_trace(), no_inference_mode():
        yield


def _is_plain() -> bool:
    """Whether a call is made under none of these."""
    has_modes = torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch()  # type: ignore[no-untyped-call]
    is_watched = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not (has_modes or is_watched or torch._C._get_tracing_state() or torch.is_inference_mode_enabled())


def _user_modules(model: nn.Module) -> list[Any]:
    names = {type(module).__module__ for module in model.modules()}
    return [sys.modules[name] for name in sorted(names) if not name.startswith("torch.") and name in sys.modules]


def containers_in(namespaces: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """The containers that namespaces name, each with a copy of it."""
    found = {
        id(value): (value, value.copy())
        for space in namespaces
        for name, value in space.items()
        if type(value) in CONTAINERS and not name.startswith("__")
    }
    return list(found.values())


def is_refilled(container: Any, elements: Any) -> bool:
    """Whether a container holds others than these elements."""
    before, now = _flat(elements), _flat(container)
    return len(before) != len(now) or any(one is not other for one, other in zip(before, now, strict=True))


def refill(container: Any, elements: Any) -> None:
    """Let a container hold these elements."""
    if not is_refilled(container, elements):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(elements)
    else:
        container.extend(elements)


def _flat(container: Any) -> list[Any]:
    return [part for pair in container.items() for part in pair] if isinstance(container, dict) else list(container)
