"""The Python functions and code behind methods, properties, partials and decorated functions."""

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any


def functions_in(value: Any) -> list[types.FunctionType]:
    """The Python functions behind a method, a property, a partial, a decorated or a cached function."""
    found: list[types.FunctionType] = []
    while value is not None:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif isinstance(value, types.FunctionType):
            found.append(value)
            value = getattr(value, "__wrapped__", None)
        elif type(value).__name__ in ("partial", "partialmethod"):
            value = value.func
        elif isinstance(value, functools._lru_cache_wrapper):
            value = value.__wrapped__
        else:
            value = None
    return found


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@functools.lru_cache(maxsize=512)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function reads or sets; `co_names` has those of attributes too."""
    return tuple(dict.fromkeys(str(i.argval) for i in dis.get_instructions(code) if i.opname in _GLOBALS))


_GLOBALS = frozenset("LOAD_GLOBAL LOAD_NAME STORE_GLOBAL DELETE_GLOBAL LOAD_FROM_DICT_OR_GLOBALS".split())
