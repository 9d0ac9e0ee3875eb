"""Decisions whose one way only raises an error: what decides for the other way is a check, which a graph can hold.
And functions that decide nothing, whatever they ask.

    if labels.max() >= self.classes:                assert not x.isnan().any()
        raise ValueError(...)

The bytecode behind the question tells it. An error that forward may catch is no end: what it does then is not known.
"""

import builtins
import dis
import functools
import linecache
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from fxamp.capture.locations import user_frames, user_line

# What would be left undone where a graph raises the error by itself.
_LASTING = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_")
_LEAVING = ("RETURN_", "YIELD_")


class Check(NamedTuple):
    """The answer with which forward goes on, and the name and text of the builtin error that it raises otherwise."""

    way_on: bool
    error: str
    said: str


def check_asked_for() -> Check | None:
    """What the question that is being answered checks; None where both ways go on."""
    frames = list(user_frames())
    if not frames or (found := _check(frames[0].f_code, frames[0].f_lasti)) is None:
        return None
    if any(_may_catch(frame.f_code, frame.f_lasti) for frame in frames):
        return None
    way_on, error, line = found
    file = frames[0].f_code.co_filename
    return Check(way_on, error, f"{file}:{line}: {linecache.getline(file, line).strip()}")


def check_of_torch(error: type[Exception], message: Callable[[], Any] | None) -> Check | None:
    """What `torch._check_with` checks; None where its error is no builtin."""
    if getattr(builtins, error.__name__, None) is not error:
        return None
    return Check(True, error.__name__, f"{user_line()}: {message() if message else 'torch._check'}")


def is_asked_for_nothing() -> bool:
    """Whether a question is asked by a function that only looks, to warn say: it returns None and stores nothing."""
    return any(_only_looks(frame.f_code) for frame in user_frames())


@functools.lru_cache(maxsize=1024)
def _only_looks(code: types.CodeType) -> bool:
    before = ""
    for each in dis.get_instructions(code):
        gives = each.opname.startswith(_LEAVING) and "None" not in (before, each.argrepr)
        if gives or each.opname.startswith((*_LASTING, "YIELD_")):
            return False
        before = each.argrepr if each.opname == "LOAD_CONST" else ""
    return True


@functools.lru_cache(maxsize=1024)
def _check(code: types.CodeType, asked: int) -> tuple[bool, str, int] | None:
    ways = _ways(code)
    jump = ways.get(asked)
    if jump is None or not jump.opname.endswith(("JUMP_IF_TRUE", "JUMP_IF_FALSE", "WARD_IF_TRUE", "WARD_IF_FALSE")):
        return None
    jumped, passed = (_error(code, start) for start in _next(ways, jump))
    if (jumped is None) == (passed is None):
        return None
    return (jump.opname.endswith("TRUE") == (jumped is None), *(jumped or passed or ("", 0)))


def _error(code: types.CodeType, start: int) -> tuple[str, int] | None:
    """The builtin error with which every path from a place ends, and its line; None where one does not."""
    reached = _reached(code, start)
    names = [each.opname for each in reached]
    if any(name.startswith((*_LEAVING, *_LASTING)) for name in names):
        return None
    if any(each.opname == "RAISE_VARARGS" and _may_catch(code, each.offset) for each in reached):
        return None
    errors = {error: each for each in reached if (error := _builtin_error(each))}
    if len(errors) != 1 or "RAISE_VARARGS" not in names:
        return None
    ((error, each),) = errors.items()
    return error, (each.positions and each.positions.lineno) or code.co_firstlineno


def _builtin_error(each: dis.Instruction) -> str:
    """The name of the error that an instruction loads; "" where it loads none, or a class that is no builtin."""
    if each.opname == "LOAD_ASSERTION_ERROR":
        return "AssertionError"
    kind = getattr(builtins, str(each.argval), None) if each.opname == "LOAD_GLOBAL" else None
    return str(each.argval) if isinstance(kind, type) and issubclass(kind, Exception) else ""


@functools.lru_cache(maxsize=1024)
def _may_catch(code: types.CodeType, offset: int) -> bool:
    """Whether a function may go on after an error at a place in it.

    A `with` block is taken to pass errors on, but in a function that reads a name such as `contextlib.suppress`.
    """
    suppresses = any("suppress" in name for name in code.co_names)
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        reached = _reached(code, entry.target) if entry.start <= offset < entry.end else []
        is_with = not suppresses and any(each.opname == "WITH_EXCEPT_START" for each in reached[:3])
        if not is_with and any(each.opname.startswith(_LEAVING) for each in reached):
            return True
    return False


def _reached(code: types.CodeType, start: int) -> list[dis.Instruction]:
    """The instructions that may be run from one on, nearest first."""
    ways, reached, open_ends = _ways(code), {}, [start]
    while open_ends:
        offset = open_ends.pop()
        if offset not in reached:
            reached[offset] = ways[offset]
            open_ends += _next(ways, ways[offset])
    return list(reached.values())


def _next(ways: dict[int, dis.Instruction], each: dis.Instruction) -> list[int]:
    """Where it goes on from an instruction: where it jumps to first, then what follows."""
    name = each.opname
    jumped = [each.argval] if each.opcode in (*dis.hasjrel, *dis.hasjabs) else []
    if name.startswith(("RAISE_", "RERAISE", *_LEAVING)) or (jumped and name.startswith("JUMP_") and "IF" not in name):
        return jumped
    following = each.offset + 2
    return [*jumped, *([following] if following in ways else [])]


@functools.lru_cache(maxsize=256)
def _ways(code: types.CodeType) -> dict[int, dis.Instruction]:
    """The instructions of a function, each under its offset; caches are instructions, too."""
    return {each.offset: each for each in dis.get_instructions(code, show_caches=True)}
