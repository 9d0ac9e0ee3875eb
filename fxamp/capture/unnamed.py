"""Methods that run without being named: what makes objects of the user's, writes into them, and compares them.

    config = Config()           # Config.__init__ may read a global
    cache["keys"] = keys        # and `__setitem__` a class attribute

Most classes have some that forward never comes to, and that name a great deal, as those of configurations do. So they
are looked at when they run: while forward is traced another function stands in the place of each, until it is called.
"""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

MAKERS = frozenset("__new__ __init__ __post_init__".split())
"""Methods of a class that forward may call."""

_INPLACE = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
_OTHERS = (
    frozenset(f"__i{name}__" for name in _INPLACE)
    | frozenset("__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __instancecheck__ __subclasscheck__".split())
    | frozenset("__setitem__ __delitem__ __missing__ __class_getitem__ __setattr__ __delattr__ __set__".split())
    | frozenset("__divmod__ __rdivmod__ __round__ __reversed__".split())
)
"""Methods of an object's class. (Those that read are few, and looked at wherever there are any.)"""


class Unnamed:
    """The methods of a trace that are to be looked at when they run, in this thread.

    Args:
        note: is given a class, a name, what it has by that name, and the function behind it, before that first runs.
    """

    def __init__(self, note: Callable[[type, str, Any, types.FunctionType], None]) -> None:
        self._note = note
        self._thread = threading.get_ident()
        self._is_over = False
        self._watched: set[tuple[type, bool]] = set()
        self._replaced: dict[tuple[type, str], tuple[Any, Any]] = {}  # (class, name) -> what was there, and is now

    def watch(self, kind: type, is_made: bool) -> None:
        """Look at such methods of a class, and at the setters of its properties.

        Args:
            is_made: whether forward may make an object of it.
        """
        if self._is_over or (kind, is_made) in self._watched:
            return
        self._watched.add((kind, is_made))
        names = _OTHERS | MAKERS if is_made else _OTHERS
        for name, held in list(vars(kind).items()):
            if (kind, name) not in self._replaced and (name in names or type(held) is property):
                instead = self._instead_of(kind, name, held)
                if instead is not None:
                    self._replaced[kind, name] = held, instead
                    type.__setattr__(kind, name, instead)

    def behind(self, kind: type, name: str) -> Any:
        """What a class has by a name, past what stands in its place."""
        held, instead = self._replaced.get((kind, name), (None, None))
        found = vars(kind)[name]
        return held if found is instead else found

    def restore(self) -> None:
        """Put all as it was, but for what forward itself has put there, for good."""
        self._is_over = True
        for (kind, name), (held, instead) in self._replaced.items():
            if vars(kind).get(name) is instead:
                type.__setattr__(kind, name, held)
        self._replaced.clear()

    def _instead_of(self, kind: type, name: str, held: Any) -> Any:
        if isinstance(held, types.FunctionType):
            return self._noting(kind, name, held)
        if isinstance(held, staticmethod | classmethod) and isinstance(held.__func__, types.FunctionType):
            return type(held)(self._noting(kind, name, held.__func__))
        if type(held) is property and isinstance(held.fset, types.FunctionType):
            return property(held.fget, self._noting(kind, name, held.fset), held.fdel, held.__doc__)
        return None

    def _noting(self, kind: type, name: str, function: types.FunctionType) -> Any:
        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread and (kind, name) in self._replaced:
                held, instead = self._replaced[kind, name]
                if vars(kind).get(name) is instead:
                    type.__setattr__(kind, name, held)
                self._note(kind, name, held, function)
            return function(*args, **kwargs)

        return noted
