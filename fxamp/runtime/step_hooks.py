"""Hooks of an optimizer's step, where the step is over only after the optimizer's own code is."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Hook = Callable[..., Any]
_PRE, _POST = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"

_noted: dict[int, list[tuple[Hook, tuple[Any, ...], dict[str, Any]]]] = {}
"""Of optimizers whose hooks are held, by their id: the calls."""


class _Holdable:
    """A hook that is only noted while those of its optimizer are held, and is itself at any other time."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.__module__ = getattr(hook, "__module__", "")

    def __call__(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = _noted.get(id(optimizer))
        if calls is None:
            return self.hook(optimizer, args, kwargs)
        calls.append((self.hook, args, kwargs))
        return None


@contextlib.contextmanager
def post_hooks_last(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context: what the optimizer's step calls at its end is called when the context ends, if it ends without error."""
    with _held(optimizer, _table(optimizer, _POST), _global_optimizer_post_hooks) as calls:
        yield
    for hook, args, kwargs in calls:
        hook(optimizer, args, kwargs)


@contextlib.contextmanager
def hooks_around(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Context: hooks that stand on an optimizer are called as it begins and ends, and none by its step in between.

    Those on all optimizers are called by the step of the one around it.

    Args:
        args, kwargs: of the step, without the optimizer itself.

    Returns:
        The same, or what a hook has put in their place.
    """
    given: tuple[Any, ...] = (optimizer, *args)
    for hook in list(_table(optimizer, _PRE).values()):
        returned = hook(optimizer, given, kwargs)
        if returned is not None:
            given, kwargs = returned
    tables = _table(optimizer, _PRE), _table(optimizer, _POST)
    with _held(optimizer, *tables, _global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        yield given[1:], kwargs
    for hook in list(_table(optimizer, _POST).values()):
        hook(optimizer, given, kwargs)


def _table(optimizer: torch.optim.Optimizer, name: str) -> dict[int, Hook]:
    table: dict[int, Hook] = getattr(optimizer, name, {})
    return table


@contextlib.contextmanager
def _held(
    optimizer: torch.optim.Optimizer, *tables: dict[int, Hook]
) -> Iterator[list[tuple[Hook, tuple[Any, ...], dict[str, Any]]]]:
    for table in tables:
        for key, hook in list(table.items()):
            if not isinstance(hook, _Holdable):
                table[key] = _Holdable(hook)  # for good: another thread may be stepping another optimizer
    if id(optimizer) in _noted:  # by who called this, and has the calls
        yield []
        return
    calls = _noted[id(optimizer)] = []
    try:
        yield calls
    finally:
        del _noted[id(optimizer)]
