"""Which functions of the model's a trace leaves out, and how they are called in it."""

import contextlib
import dis
import functools
import gc
import itertools
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp.capture.computed import sources
from fxamp.capture.locations import is_library_frame

MOST_FUNCTIONS = 8
"""So many functions a trace leaves out at the most: each costs a trace to find."""

_OF_GRAPH = "_fxamp_of_graph"  # set on the copy of a function that graphs call
_SETS = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "YIELD_VALUE"})


def functions_to_leave_out(
    frames: Iterable[types.FrameType], known: Collection[types.CodeType]
) -> tuple[types.FunctionType, ...]:
    """The first function among these frames that looks into inputs alone, with its copies; () where there is none.

    Args:
        frames: of a trace, innermost first.
        known: the code of those that were found before.
    """
    for code in _codes_to_leave_out(frames, known):
        if found := _functions_of(code):
            return found
    return ()


class Openings:
    """The functions of one trace in which it met the first of those values whose sizes the data decides.

    Args:
        known: the code of those that are left out by now.
    """

    def __init__(self, known: Collection[types.CodeType]) -> None:
        self._known = known
        self._codes: dict[types.CodeType, None] = {}

    def note(self, frames: Iterable[types.FrameType]) -> None:
        """Such a value is made in these frames, innermost first."""
        self._codes.update(dict.fromkeys(itertools.islice(_codes_to_leave_out(frames, self._known), 1)))

    def functions(self) -> tuple[types.FunctionType, ...]:
        """Those that look into inputs alone, with their copies."""
        return tuple(function for code in self._codes for function in _functions_of(code))


def _codes_to_leave_out(
    frames: Iterable[types.FrameType], known: Collection[types.CodeType]
) -> Iterator[types.CodeType]:
    for frame in frames:
        code = frame.f_code
        if code in known or is_library_frame(frame):
            continue
        if not _is_of_layers(frame) and _looks_at_inputs_alone(frame):
            yield code


def frames_of(error: BaseException) -> list[types.FrameType]:
    """Those in which an error was raised, or the one that caused it, innermost first."""
    frames = []
    trace = (error.__cause__ or error).__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


def _looks_at_inputs_alone(frame: types.FrameType) -> bool:
    """Whether what a function was called with, as far as it still holds that, hangs on inputs alone."""
    code, held = frame.f_code, frame.f_locals
    if code.co_freevars or _sets(code):
        return False
    many = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    given = pytree.tree_leaves([held.get(name) for name in code.co_varnames[:many]])
    nodes = [leaf.node for leaf in given if issubclass(type(leaf), fx.Proxy)]
    return bool(nodes) and all(sources(node, from_inputs=True) is not None for node in nodes)


@functools.lru_cache(1024)
def _sets(code: types.CodeType) -> bool:
    return any(step.opname in _SETS for step in dis.get_instructions(code))


def _functions_of(code: types.CodeType) -> tuple[types.FunctionType, ...]:
    found = (each for each in gc.get_referrers(code) if isinstance(each, types.FunctionType))
    return tuple(each for each in found if each.__code__ is code and not hasattr(each, _OF_GRAPH))


def _is_of_layers(frame: types.FrameType) -> bool:
    """Whether it is the forward of a module that has parameters."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if code.co_name != "forward" or not isinstance(owner, nn.Module):
        return False
    return any(True for _ in owner.parameters())


@contextlib.contextmanager
def called_through(
    functions: Sequence[types.FunctionType], call: Callable[[Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Calls of these functions go to `call`, with the function as it was, in this thread.

    By whatever name it is called, a function has one code, which is exchanged.
    """
    saved = [(each, each.__code__, each.__kwdefaults__) for each in functions]
    try:
        for function, code, defaults in saved:
            original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
            original.__kwdefaults__, original.__qualname__ = defaults, function.__qualname__
            setattr(original, _OF_GRAPH, True)
            function.__kwdefaults__ = {**(defaults or {}), "_fxamp_call": _in_this_thread(original, call)}
            function.__code__ = _instead.__code__
        yield
    finally:
        for function, code, defaults in saved:
            function.__code__, function.__kwdefaults__ = code, defaults


def _instead(*args: Any, _fxamp_call: Any, **kwargs: Any) -> Any:
    return _fxamp_call(args, kwargs)


def _in_this_thread(
    original: types.FunctionType, call: Callable[[Callable[..., Any], Any, Any], Any]
) -> Callable[..., Any]:
    thread = threading.get_ident()

    def run(args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(*args, **kwargs)
        return call(original, args, kwargs)

    return run
