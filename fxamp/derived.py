"""Classes that are derived from the users', for objects that stand for theirs."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

BASE = "_fxamp_base"
"""Where a class that is made of a user's says which that is."""


class Derived:
    """Classes that are derived from the users', one for each; weak on both sides, for each holds the user's.

    Args:
        make: derives one.
    """

    def __init__(self, make: Callable[[Any], type]) -> None:
        self._make = make
        self._made: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()

    def of(self, base: type) -> type:
        """The class that is derived from the user's."""
        found = self._made[base]() if base in self._made else None
        if found is None:
            found = self._make(base)
            self._made[base] = weakref.ref(found)
        return found


def subclass(base: Any, names: dict[str, Any], *beside: type) -> type:
    """Without a call of the user's `__init_subclass__`, which may ask for arguments, or note the class somewhere.

    Args:
        beside: further classes that it is derived from.
    """
    made: Any = type(base)(base.__name__, (nn.Module, *beside), names)
    try:
        made.__bases__ = (base, *beside)
    except TypeError:  # it has slots
        made = type(base)(base.__name__, (base, *beside), names)
    return made  # type: ignore[no-any-return]


def _nothing(self: Any) -> None:
    """In the place of a `__del__`."""


def finalizer_of(base: type) -> dict[str, Any]:
    """What a class has besides whose objects are on the state of another: the user's `__del__` would run for both."""
    return {"__del__": _nothing} if hasattr(base, "__del__") else {}


def quiet(base: Any) -> Any:
    """A class for objects on the state of another: the user's, or where that has a `__del__` one without it."""
    return _quiet.of(base) if getattr(base, "__del__", _nothing) is not _nothing else base


def _make_quiet(base: Any) -> type:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        make, given, *rest = base.__reduce_ex__(self, protocol)
        return (_call, (make, *(base if each is type(self) else each for each in given)), *rest)

    names = {
        "__del__": _nothing,
        "__reduce_ex__": __reduce_ex__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        BASE: base,
    }
    return subclass(base, names)


def _call(make: Any, *given: Any) -> Any:
    """What copyreg's own function does, of which pickle asks that the class be the object's."""
    return make(*given)


_quiet = Derived(_make_quiet)
