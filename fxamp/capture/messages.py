"""Texts in which forward shows a traced value: what only the error of a check says decides nothing.

    check(n_tokens == features.shape[0], f"{n_tokens} tokens do not match")    # check: calls torch._check_with

A mark stands for the value while forward is traced, and the check, which a graph asks at each call, puts the value in
its place. A text that goes anywhere else is refused, for it may decide: `self.experts[f"expert_{number}"]`.
"""

import dis
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxamp.capture.guesses import known_or_guessed
from fxamp.capture.locations import user_frames, user_line
from fxamp.errors import CaptureError

_Place = tuple[int, int]


class Messages:
    """The texts of one trace that stand for values."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[fx.Proxy, str]] = {}
        self._unsaid: dict[str, str] = {}  # marks that no check has said yet, and the lines that made them
        self._is_heard = False

    def mark(self, proxy: fx.Proxy, how: str) -> str | None:
        """What stands for a value in the message of a check; None where the text may be for something else."""
        frame = next(user_frames(), None)
        if not self._is_heard and (frame is None or not _is_for_a_check(frame)):
            return None
        mark = f"<{proxy.node.name}{how and ':'}{how}>"
        self._marks[mark] = proxy, how
        self._unsaid[mark] = user_line()
        return mark

    @property
    def are_unsaid(self) -> bool:
        """Whether there are marks that no check has said yet."""
        return bool(self._unsaid)

    def heard(self, message: Callable[[], Any]) -> Callable[[], Any]:
        """The message of a check, whose marks are said now."""
        self._is_heard = True
        try:
            said = str(message())
        finally:
            self._is_heard = False
        self._unsaid = {mark: line for mark, line in self._unsaid.items() if mark not in said}
        return lambda: said

    def shown_in(self, said: str) -> dict[str, tuple[fx.Proxy, str]]:
        """The values that a text shows, each with its format, by what stands for them."""
        return {mark: shown for mark, shown in self._marks.items() if mark in said}

    def unsaid(self) -> list[fx.Proxy]:
        """The numbers that texts show which were not the message of a check.

        Raises:
            CaptureError: such a text shows a tensor.
        """
        shown = [self._marks[mark][0] for mark in self._unsaid]
        for proxy, line in zip(shown, self._unsaid.values(), strict=True):
            if isinstance(known_or_guessed(proxy.node), torch.Tensor):
                raise CaptureError(
                    f"{line}: forward makes a text of a traced value, which a graph holds in the message of a check "
                    "alone"
                )
        return shown


def _is_for_a_check(frame: types.FrameType) -> bool:
    """Whether the f-string that a frame makes now is an argument of a function that checks."""
    names = _called_with(frame.f_code, frame.f_lasti)
    if not names or (function := frame.f_globals.get(names[0])) is None:
        return False
    for name in names[1:]:
        function = getattr(function, name, None)
    if getattr(function, "__module__", None) == torch.__name__:
        return names[-1].startswith("_check")
    return any(name.startswith("_check") for name in getattr(getattr(function, "__code__", None), "co_names", ()))


@functools.lru_cache(maxsize=256)
def _called_with(code: types.CodeType, asked: int) -> tuple[str, ...]:
    """The global and the attributes by which the function is named that takes the f-string made at a place."""
    spans = [(each, span) for each in dis.get_instructions(code) if (span := _span(each)) is not None]
    made = next((span for each, span in spans if each.offset == asked and each.opname.startswith("FORMAT_")), None)
    if made is None:
        return ()
    calls = [(start, end) for each, (start, end) in spans if each.opname.startswith("CALL") and start < made[0]]
    around = [(start, end) for start, end in calls if end >= made[1]]
    if not around:
        return ()
    begin, _ = max(around)
    return tuple(
        str(each.argval)
        for each, (start, end) in spans
        if start == begin and end <= made[0] and each.opname in ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")
    )


def _span(each: dis.Instruction) -> tuple[_Place, _Place] | None:
    """Where the source of an instruction begins and ends; None where nothing tells."""
    if (at := each.positions) is None or at.lineno is None or at.end_lineno is None:
        return None
    if at.col_offset is None or at.end_col_offset is None:
        return None
    return (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)
