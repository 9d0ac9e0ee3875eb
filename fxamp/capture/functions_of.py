"""The Python functions and code behind methods, properties, partials and decorated functions."""

import dis
import functools
import itertools
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


@functools.lru_cache(maxsize=512)
def handed_on(code: types.CodeType) -> frozenset[str]:
    """The globals that a function reads for more than an attribute of theirs: `scaled(config, x)`."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    return frozenset(
        str(each.argval)
        for each, following in itertools.pairwise(instructions)
        if each.opname in _GLOBALS and following.opname not in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
    )


@functools.lru_cache(maxsize=512)
def attributes_in(code: types.CodeType) -> frozenset[str]:
    """The attributes that a function reads, of whatever object."""
    return frozenset(str(i.argval) for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD"))


@functools.lru_cache(maxsize=512)
def imports_in(code: types.CodeType) -> tuple[tuple[int, str], ...]:
    """The Python modules that a function imports: how many levels above its own (0: a full name), and the name."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    return tuple(
        (instructions[place - 2].argval, str(each.argval))
        for place, each in enumerate(instructions)
        if each.opname == "IMPORT_NAME"
    )


@functools.lru_cache(maxsize=512)
def supers_in(code: types.CodeType) -> frozenset[str]:
    """The names that a method asks of the classes above its own: `forward` of `super().forward(x)`."""
    found, is_asked = set(), False
    for each in dis.get_instructions(code):
        if each.opname == "LOAD_GLOBAL" and each.argval == "super":
            is_asked = True
        elif is_asked and each.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_SUPER_ATTR"):
            found.add(str(each.argval))
            is_asked = False
    return frozenset(found)


@functools.lru_cache(maxsize=512)
def strings_in(code: types.CodeType) -> tuple[str, ...]:
    """The texts that stand in a function, also those it goes through: `for name in ("alpha", "beta")`.

    (Names of keyword arguments stand in tuples as well, which no LOAD_CONST reads.)
    """
    constants = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_CONST", "RETURN_CONST")]
    inside = [part for each in constants if isinstance(each, (tuple, frozenset)) for part in each]
    return tuple(dict.fromkeys(each for each in (*code.co_consts, *inside) if isinstance(each, str)))


_GLOBALS = frozenset("LOAD_GLOBAL LOAD_NAME STORE_GLOBAL DELETE_GLOBAL LOAD_FROM_DICT_OR_GLOBALS".split())
