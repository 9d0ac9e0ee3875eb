"""References that a model keeps to itself, for a copy of it: they lead to the copy.

    self.run = {"fast": self._fast, "exact": self._exact}[mode]     # a bound method, made in __init__

A copy with the attributes of the model as they are would run its own forward and the model's methods, with the model's
training flag, its numbers, and its parts.
"""

import collections
import contextlib
import functools
import types
from collections.abc import Mapping
from typing import Any

_DEPTH = 4  # containers in containers that are looked into


def repointed(value: Any, twins: Mapping[int, Any], functions: bool = True, depth: int = _DEPTH) -> Any:
    """A value with twins in the places of what they are twins of; the same object where it holds none of those.

    Looks into methods, partials, functions' closures and defaults, and into containers of Python's own classes.

    Args:
        twins: by the id of what they replace.
        functions: whether to make functions anew; what has one is no longer the same object.
    """
    if id(value) in twins:
        return twins[id(value)]
    if depth == 0:
        return value
    again = functools.partial(repointed, twins=twins, functions=functions, depth=depth - 1)
    if type(value) is types.MethodType:
        owner = again(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if type(value) is functools.partial:
        given = [value.func, *value.args, *value.keywords.values()]
        found = list(map(again, given))
        if all(new is old for new, old in zip(found, given, strict=True)):
            return value
        function, *rest = found
        count = len(value.args)
        return functools.partial(function, *rest[:count], **dict(zip(value.keywords, rest[count:], strict=True)))
    if type(value) is types.FunctionType:
        return _function(value, again) if functions else value
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        items = {key: again(item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        made = collections.defaultdict(value.default_factory) if hasattr(value, "default_factory") else type(value)()
        made.update(items)
        return made
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        found = [again(item) for item in value]
        is_same = all(new is old for new, old in zip(found, value, strict=True))
        return value if is_same else type(value)(found)
    return value


def _function(function: types.FunctionType, again: Any) -> types.FunctionType:
    """A function that closes over something, or has it for a default; cells that hold nothing of it stay shared."""
    closure = tuple(_cell(cell, function, again) for cell in function.__closure__ or ())
    defaults, keywords = again(function.__defaults__), again(function.__kwdefaults__)
    is_same = all(new is old for new, old in zip(closure, function.__closure__ or (), strict=True))
    if is_same and defaults is function.__defaults__ and keywords is function.__kwdefaults__:
        return function
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults, closure if function.__closure__ else None
    )
    twin.__kwdefaults__ = keywords
    twin.__dict__.update(function.__dict__)
    twin.__qualname__, twin.__module__, twin.__doc__ = function.__qualname__, function.__module__, function.__doc__
    return twin


def _cell(cell: types.CellType, function: types.FunctionType, again: Any) -> types.CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # empty yet
        return cell
    found = held if held is function else again(held)
    return cell if found is held else types.CellType(found)


def copy_slots(source: object, twin: object) -> None:
    """Give a twin what its source keeps in `__slots__` of classes, the same objects."""
    for slot in [slot for kind in type(source).__mro__ for slot in vars(kind).values()]:
        if isinstance(slot, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # nothing is in it
                slot.__set__(twin, slot.__get__(source))
