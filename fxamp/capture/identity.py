"""Where Python asks `is` of what was read of a traced value: a question that no proxy can answer.

    if mask.dtype is torch.bool: ...
    index = x.device.index
    if index is None: ...

The bytecode behind the read tells it before it is asked; then the value itself is handed out.
"""

import dis
import functools
import types
from collections.abc import Iterator

_PASSED_OVER = ("CACHE", "NOP", "EXTENDED_ARG", "PRECALL", "PUSH_NULL")


def is_compared_by_identity(frame: types.FrameType) -> bool:
    """Whether what the current instruction of a frame gives is an operand of `is`, at once or by the name of a local.

    What is handed on to another function, or kept in an object, is not followed.
    """
    instructions = _instructions(frame.f_code)
    place = next((number for number, each in enumerate(instructions) if each.offset == frame.f_lasti), None)
    if place is None:
        return False
    taker = _taker(instructions, place + 1)
    if taker is None or not taker.opname.startswith("STORE_"):
        return taker is not None
    return any(_reads_by_identity(code, str(taker.argval)) for code in _codes(frame.f_code))


@functools.lru_cache(maxsize=1024)
def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [each for each in dis.get_instructions(code) if each.opname not in _PASSED_OVER]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside it, which may read its locals."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _taker(instructions: list[dis.Instruction], place: int) -> dis.Instruction | None:
    """What takes the value that is on top of the stack before the instruction at `place`: an `is`, or a name."""
    above = 0  # values that were loaded since
    for each in instructions[place:]:
        name = each.opname
        if name == "IS_OP":
            return each if above <= 1 else None
        if above == 0 and name.startswith("POP_JUMP") and name.endswith("NONE"):
            return each  # `is None` of a condition
        if above == 0 and name in ("STORE_FAST", "STORE_DEREF"):
            return each
        if name in ("LOAD_ATTR", "LOAD_METHOD") and above > 0:
            continue  # of the other operand
        is_copied = name == "COPY" and each.arg == 1 and above == 0  # (name := value): the name has it too
        if name in ("LOAD_ATTR", "LOAD_METHOD") or not (name.startswith("LOAD_") or is_copied):
            return None
        above += 0 if is_copied else 1
    return None


def _reads_by_identity(code: types.CodeType, name: str) -> bool:
    """Whether a local is an operand of `is` somewhere in a function."""
    instructions = _instructions(code)
    for number, each in enumerate(instructions):
        if each.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and each.argval == name:
            taker = _taker(instructions, number + 1)
            if taker is not None and not taker.opname.startswith("STORE_"):
                return True
    return False
