"""Containers that forward may write into: what they held, whether they hold it still, and putting it back."""

import collections
import operator
from typing import Any

from torch import fx

from fxamp.capture.elements import SCALARS, base_of, length_of, plain_copy
from fxamp.capture.objects import attributes_of, slots_of

CONTAINERS = (dict, list, set, collections.deque)  # that can change without an assignment


def items_of(container: Any) -> list[tuple[Any, Any]]:
    """What can be put elsewhere in a container by its key or its place."""
    held = plain_copy(container)
    return list(held.items()) if isinstance(held, dict) else [] if isinstance(held, set) else list(enumerate(held))


def holds_still(container: Any, saved: Any) -> bool:
    """Whether it holds the same objects as its copy, in the same order."""
    if length_of(container) != len(saved):
        return False
    now = plain_copy(container)
    if isinstance(container, dict):
        return all(map(operator.is_, now, saved)) and all(map(operator.is_, now.values(), saved.values()))
    return bool(now == saved) if isinstance(now, set) else all(map(operator.is_, now, saved))


def restore(container: Any, saved: Any) -> None:
    """Have it hold what its copy holds, whatever its class does at a write."""
    kind = base_of(container)
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in saved.items():  # OrderedDict.update would ask its class
            kind.__setitem__(container, key, value)
    else:
        (kind.extend if kind in (list, collections.deque) else kind.update)(container, saved)


def has_equals_for(container: Any, saved: Any) -> bool:
    """Whether a dictionary holds equals for what it held: einx's registry puts a copy of its state there at each look.

    Values are equal that are one, and objects of one class whose attributes are, or are containers of the same; what is
    kept there by a trace's types does not count. No object is equal to another that holds anything else, as one of a
    class derived from dict does.
    """
    now = plain_copy(container)
    if not isinstance(container, dict) or len(now) != len(saved) or not all(map(operator.is_, now, saved)):
        return False
    return all(now[key] is value or _are_alike(now[key], value) for key, value in saved.items())


def _are_alike(one: Any, other: Any) -> bool:
    own, others = attributes_of(one), attributes_of(other)
    if type(one) is not type(other) or own is None or others is None or own.keys() != others.keys():
        return False
    return _has_attributes_alone(type(one)) and all(
        own[name] is value or _hold_the_same(own[name], value) for name, value in others.items()
    )


class _Plain:
    pass


def _has_attributes_alone(kind: type) -> bool:
    """Whether an instance holds nothing but its `__dict__`: no slots, and nothing that a builtin base class keeps."""
    sizes = kind.__basicsize__, kind.__itemsize__
    return sizes == (_Plain.__basicsize__, _Plain.__itemsize__) and not slots_of(kind)


def _hold_the_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or type(one) not in CONTAINERS:
        return False
    mine, others = plain_copy(one), plain_copy(other)
    for held in (mine, others):
        if isinstance(held, dict):
            forget_traced_types(held)
    return holds_still(mine, others)


def forget_traced_types(container: dict[Any, Any]) -> None:
    """What is kept by the type of an argument, as einops keeps its backends, is kept for tensors, not for a trace."""
    for key in [key for key in dict.__iter__(container) if _is_traced_type(key)]:
        if not isinstance(dict.get(container, key), (*SCALARS, *CONTAINERS)):
            base_of(container).pop(container, key)


def _is_traced_type(key: Any) -> bool:
    """Whether it is the type of a traced value, or a tuple of types of which one is."""
    if isinstance(key, tuple):
        return any(map(_is_traced_type, key))
    return isinstance(key, type) and issubclass(key, fx.Proxy)
