"""Where Python asks `is` of what was read of a traced value, or for its class: questions that no proxy can answer.

    if mask.dtype is torch.bool: ...
    dtype, device = x.dtype, x.device
    if dtype is torch.float32: ...

The bytecode behind the read tells it before it is asked; then the value itself is handed out.
"""

import dis
import functools
import itertools
import types

from fxamp.capture.functions_of import codes_of
from fxamp.capture.locations import is_library_file, is_torchs_file

_PASSED_OVER = ("CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "PUSH_NULL")
# What takes a value, and asks nothing of it by identity.
_HARMLESS = (
    "CALL",
    "KW_NAMES",
    "COMPARE_OP",
    "BINARY_",
    "CONTAINS_OP",
    "FORMAT_VALUE",
    "POP_TOP",
    "LOAD_ATTR",
    "LOAD_ME",
)


def is_compared_by_identity(frame: types.FrameType) -> bool:
    """Whether what the current instruction of a frame gives may be an operand of `is`.

    1. It is, where an `is` takes it at once, or a local's name that an `is` takes somewhere.
    2. It may be, where it goes another way (into a tuple, out of a conditional, back to the caller) and the function or
       its caller compares anything by identity, but with None.

    What is handed on to another function, or kept in an object, is not followed.
    """
    instructions = _instructions(frame.f_code)
    # A function of Python's is called from the end of the caches behind the instruction that calls it.
    place = max((number for number, each in enumerate(instructions) if each.offset <= frame.f_lasti), default=None)
    taker = None if place is None else _taker(instructions, place + 1)
    if taker is None:
        return False
    if _is_identity(taker):
        return True
    if _is_local(taker):
        return any(_reads_by_identity(code, str(taker.argval), frozenset()) for code in codes_of(frame.f_code))
    around = [frame.f_code, *([frame.f_back.f_code] if frame.f_back is not None else [])]
    return any(_asks(inner) for code in around for inner in codes_of(code))


def may_be_compared_by_identity(frame: types.FrameType | None) -> bool:
    """Whether a frame, or one of those that called it, compares anything by identity: an answer that errs towards yes.

    What is read in a loop over parameters is handed back through several functions (`module.dtype` of libraries), at
    the farthest to the forward of the module that asks. It may be torch that reads: a mode passes the question on. A
    property is called by the capture, which watches what modules are asked for.
    """
    while frame is not None and is_torchs_file(frame.f_code.co_filename):
        frame = frame.f_back
    while frame is not None and not is_torchs_file(file := frame.f_code.co_filename):
        is_users = file.startswith("<") or not is_library_file(file)
        if is_users and any(_asks(code) for code in codes_of(frame.f_code)):
            return True
        frame = frame.f_back
    return False


def is_compared_with_others(frame: types.FrameType) -> bool:
    """Whether the same may be compared with anything but None."""
    return any(map(_asks, codes_of(frame.f_code))) and is_compared_by_identity(frame)


def is_asked_whether_none(frame: types.FrameType, name: str) -> bool:
    """Whether the current instruction of a frame reads an attribute and asks that of it alone: `self.last is None`."""
    return (frame.f_lasti, name) in _none_questions(frame.f_code)


def is_asked_for_its_class(frame: types.FrameType) -> bool:
    """Whether the current instruction of a frame is a class pattern of `match`, or reads `.__class__`, as functions of
    `functools.singledispatch` do."""
    return frame.f_lasti in _class_questions(frame.f_code) and not is_torchs_file(frame.f_code.co_filename)


@functools.lru_cache(maxsize=1024)
def _none_questions(code: types.CodeType) -> frozenset[tuple[int, str]]:
    """(place in a function, attribute) of these instructions, with their caches."""
    instructions = _instructions(code)
    found: set[tuple[int, str]] = set()
    ends = {each.offset: following.offset for each, following in itertools.pairwise(dis.get_instructions(code))}
    for number, each in enumerate(instructions):
        asking = instructions[number + 1 : number + 3]
        is_constant = [after.opname for after in asking] == ["LOAD_CONST", "IS_OP"] and asking[0].argval is None
        if each.opname == "LOAD_ATTR" and asking and (is_constant or _is_jump_at_none(asking[0])):
            found.update((offset, each.argval) for offset in range(each.offset, ends[each.offset]))
    return frozenset(found)


@functools.lru_cache(maxsize=1024)
def _class_questions(code: types.CodeType) -> frozenset[int]:
    """Where in a function these instructions are, with their caches: one that Python has specialised for a property
    calls it from there (3.12)."""
    instructions = list(dis.get_instructions(code))
    return frozenset(
        offset
        for each, following in itertools.pairwise(instructions)
        if each.opname == "MATCH_CLASS" or (each.opname == "LOAD_ATTR" and each.argval == "__class__")
        for offset in range(each.offset, following.offset)
    )


@functools.lru_cache(maxsize=1024)
def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname not in _PASSED_OVER]


def _taker(instructions: list[dis.Instruction], place: int) -> dis.Instruction | None:
    """What takes the value that is on top of the stack before the instruction at `place`, None where it is harmless."""
    above = 0  # values that were loaded since
    for each in instructions[place:]:
        is_load = each.opname.startswith("LOAD_")
        if above == 0 and each.opname.startswith(_HARMLESS):
            return None
        if is_load and not each.opname.startswith(_HARMLESS):
            above += 1
        elif not is_load:
            return each if above <= 1 or not _is_identity(each) else None
    return None


def _is_identity(instruction: dis.Instruction) -> bool:
    return instruction.opname == "IS_OP" or _is_jump_at_none(instruction)


def _is_jump_at_none(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("POP_JUMP") and instruction.opname.endswith("NONE")


def _is_local(instruction: dis.Instruction) -> bool:
    return instruction.opname in ("STORE_FAST", "STORE_DEREF")


def _reads_by_identity(code: types.CodeType, name: str, known: frozenset[str]) -> bool:
    """Whether a local, or another one that it is given to, is an operand of `is` somewhere in a function."""
    instructions = _instructions(code)
    for number, each in enumerate(instructions):
        if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and each.argval == name:
            taker = _taker(instructions, number + 1)
            if taker is None or (_is_local(taker) and taker.argval in known | {name}):
                continue
            if _is_local(taker):
                if _reads_by_identity(code, str(taker.argval), known | {name}):
                    return True
            elif _is_identity(taker) or _asks(code):
                return True
    return False


@functools.lru_cache(maxsize=1024)
def _asks(code: types.CodeType) -> bool:
    """Whether a function compares by identity with anything but None."""
    instructions = _instructions(code)
    before = zip([None, *instructions], instructions, strict=False)
    return any(each.opname == "IS_OP" and (last is None or last.argval is not None) for last, each in before)
