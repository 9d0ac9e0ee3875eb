"""The Python functions and code behind methods, properties, partials and decorated functions."""

import dis
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple


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


class Named(NamedTuple):
    """What a function's code names.

    Attributes:
        globals: the global names that it reads or sets; `co_names` has those of attributes too.
        handed_on: the globals that it reads for more than an attribute of theirs: `scaled(config, x)`.
        attributes: the attributes that it reads, of whatever object.
        imports: the Python modules that it imports: how many levels above its own (0: a full name), and the name.
        supers: the names that a method asks of the classes above its own: `forward` of `super().forward(x)`.
        strings: the texts that stand in it, also those it goes through: `for name in ("alpha", "beta")`. (Names of
            keyword arguments stand in tuples as well, which no LOAD_CONST reads.)
    """

    globals: tuple[str, ...]
    handed_on: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[tuple[int, str], ...]
    supers: tuple[str, ...]
    strings: tuple[str, ...]


@functools.lru_cache(maxsize=2**14)  # a package that a model uses may have thousands of functions
def named_in(code: types.CodeType) -> Named:
    """What a function's code names; of those written inside it, ask for themselves."""
    steps = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    return Named(
        globals=tuple(dict.fromkeys(str(each.argval) for each in steps if each.opname in _GLOBALS)),
        handed_on=tuple(
            dict.fromkeys(
                str(each.argval)
                for each, following in itertools.pairwise(steps)
                if each.opname in _GLOBALS and following.opname not in (*_READS, "STORE_ATTR")
            )
        ),
        attributes=frozenset(str(each.argval) for each in steps if each.opname in _READS),
        imports=tuple(
            (steps[place - 2].argval, str(each.argval))
            for place, each in enumerate(steps)
            if each.opname == "IMPORT_NAME"
        ),
        supers=_supers_in(steps),
        strings=_strings_in(code, steps),
    )


def _supers_in(steps: list[dis.Instruction]) -> tuple[str, ...]:
    found, is_asked = [], False
    for each in steps:
        if each.opname == "LOAD_GLOBAL" and each.argval == "super":
            is_asked = True
        elif is_asked and each.opname in (*_READS, "LOAD_SUPER_ATTR"):
            found.append(str(each.argval))
            is_asked = False
    return tuple(dict.fromkeys(found))


def _strings_in(code: types.CodeType, steps: list[dis.Instruction]) -> tuple[str, ...]:
    constants = [each.argval for each in steps if each.opname in ("LOAD_CONST", "RETURN_CONST")]
    inside = [part for each in constants if isinstance(each, (tuple, frozenset)) for part in each]
    return tuple(dict.fromkeys(each for each in (*code.co_consts, *inside) if isinstance(each, str)))


_READS = "LOAD_ATTR", "LOAD_METHOD"
_GLOBALS = frozenset("LOAD_GLOBAL LOAD_NAME STORE_GLOBAL DELETE_GLOBAL LOAD_FROM_DICT_OR_GLOBALS".split())
