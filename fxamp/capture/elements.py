"""What containers hold, past what their classes make of it.

A class of the user's may forbid what a reader asks of it (e3nn's Irrep is a tuple whose `len` raises), or build a
module at each look, so containers are read with the methods of Python's own class below it.
"""

import builtins
import collections
import enum
import linecache
import operator
import sys
import types
from typing import Any

import torch

SCALARS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
CONTAINERS = (collections.OrderedDict, dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType)
MOST, _MOST_COMPARED = 512, 2**14  # elements of a container that are looked into, and that are compared


def base_of(value: Any) -> Any:
    """Python's own class below that of a container."""
    return next(kind for kind in CONTAINERS if isinstance(value, kind))


def length_of(value: Any) -> int:
    """How many elements a container has, whatever its class says."""
    return int(base_of(value).__len__(value))


def is_pythons(container: Any) -> bool:
    """Whether a container is one of Python's own tables: of its builtins, which eval puts into the globals that it is
    given, of the modules that were imported, or of source lines. A capture adds to these, and no model lives there.
    """
    tables = (vars(builtins), sys.modules, sys.path_importer_cache, linecache.cache)
    return any(container is table for table in tables)


def is_looked_into(container: Any) -> bool:
    """Whether a container is; not a long one, nor one of Python's own."""
    return length_of(container) <= MOST and not is_pythons(container)


def is_too_long(value: Any) -> bool:
    """Whether it is a container of which the length alone is compared, for time's sake."""
    return isinstance(value, CONTAINERS) and length_of(value) > _MOST_COMPARED


def plain_copy(value: Any) -> Any:
    """A container of Python's own class with the elements of this one, past what its class makes of reading them: a
    table may build a module at each look.
    """
    kind = base_of(value)
    if kind is collections.OrderedDict:  # in its order, which dict's methods do not know
        return {key: dict.__getitem__(value, key) for key in kind.__iter__(value)}
    if kind is dict:
        return dict(dict.items(value))
    return dict(value) if kind is types.MappingProxyType else kind(kind.__iter__(value))


def elements_of(value: Any) -> list[Any]:
    """What a container holds, in its order, by the methods of Python's own class; of a mapping, keys and values."""
    plain = plain_copy(value)
    return [*plain, *plain.values()] if isinstance(plain, dict) else list(plain)


def holds_the_same(value: Any, elements: list[Any]) -> bool:
    """Whether a container holds these objects; numbers, strings and the like may be equal ones of the same type."""
    now = elements_of(value)
    return len(now) == len(elements) and (
        all(map(operator.is_, now, elements))
        or all(
            new is old or (type(new) is type(old) and isinstance(new, SCALARS) and new == old)
            for new, old in zip(now, elements, strict=True)
        )
    )


def named_elements(value: Any) -> list[tuple[Any, Any]]:
    """The elements of a container by their keys or places; those of a set in an order that a copy has too."""
    held = plain_copy(value)
    if isinstance(held, dict):
        return list(held.items())
    if not isinstance(held, (set, frozenset)):
        return list(enumerate(held))
    try:
        ordered = sorted(held, key=repr)
    except Exception:  # an element that forbids repr()
        ordered = list(held)
    return [("elements", element) for element in ordered]
