"""How much work a call is: executed lines of Python, which a busy machine does not change as it changes seconds."""

import gc
import sys
from collections.abc import Callable


def lines(function: Callable[[], object]) -> int:
    """Lines that Python executes in this thread while `function` runs, libraries included."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # finalisers of other tests' objects would run somewhere in between
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
