"""How much work a call is: executed lines of Python, which a busy machine does not change as it changes seconds."""

import gc
import sys
from collections.abc import Callable
from typing import Any


def lines(function: Callable[[], object]) -> int:
    """Lines that Python executes in this thread while `function` runs, libraries included."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # finalisers of other objects would run somewhere in between
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
