"""How Dynamo captures the frames of one converted model, and what it says of those that it gives up.

Models of one class share the code of their submodules, and Dynamo's caches and limits belong to code. Each converted
model has captures, and as many as torch allows, for itself: those of another one, which may be gone by now, do not
count. A frame that Dynamo gives up, at the limit or by an error of its own, runs as it is written; that is told. One
that it gives up because it saw the model raise an error is captured again at the next call.
"""

import contextlib
import functools
import inspect
import logging
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.utils import checkpoint as torch_checkpoint

from fxamp.capture.locations import user_lines_in
from fxamp.errors import CaptureError

Hear = Callable[[str, str], None]  # a function, and why it is given up and what to do

# Since torch 2.13 a compiled function can have captures of its own; before, the limits of its frames are lifted.
_IS_APART = "isolate_recompiles" in inspect.signature(torch.compile).parameters
_NO_LIMIT = 1 << 30  # captures of one piece of code by all of a process
_LIMIT = "torch._dynamo hit config."
_AT_ITEM = "Graph break from `Tensor.item()`"
_GIVEN_UP = re.compile(r"WON'T CONVERT (.+?) (\S+) line (\d+)")

_KEEP_OUT = "Keep what changes from call to call out of it, or pass that as a tensor"
_REWRITE = "Rewrite that line, or convert the submodules around it (boundaries=)"

_dynamos_logs = [logging.getLogger(f"torch._dynamo.{name}") for name in ("convert_frame", "variables.tensor")]
_listening = threading.local()
_NOBODY: Any = object()  # listens while no converted model is captured


# Since torch 2.14 `@checkpoint(use_reentrant=False)` makes a checkpointed function, which Dynamo does not know for one.
# It would capture what runs inside by itself, and backward computes that again as it is written: in float32. So all of
# it runs as it is written, as torch has it for a call of `checkpoint` that Dynamo cannot capture (_disable_dynamo).
if hasattr(torch_checkpoint, "_checkpoint_impl"):
    _strategy = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(torch_checkpoint._checkpoint_impl.__code__, _strategy)


def compile_apart(function: Any, backend: str | Callable[..., Any], fullgraph: bool = False) -> Any:
    """`torch.compile` of a function, with captures of its own: those of others with the same code do not count."""
    options: dict[str, Any] = {"isolate_recompiles": True} if _IS_APART else {}
    return torch.compile(own_code(as_written(function)), backend=backend, fullgraph=fullgraph, **options)


def as_written(function: Any) -> Any:
    """The function behind one that the user has compiled (`@torch.compile`); any other as it is."""
    if "torch._dynamo" not in sys.modules or getattr(function, "_torchdynamo_disable", False):
        return function  # not imported, which takes seconds: nothing has been compiled
    return torch._dynamo.eval_frame.innermost_fn(function)


@contextlib.contextmanager
def captures_apart(hear: Hear | None = None, most: int | None = _NO_LIMIT) -> Iterator[None]:
    """A call of what `compile_apart` made: the captures of other models do not count, recurrent layers are captured.

    Dynamo leaves `nn.LSTM` and its like out by default, and the frame around it too; as one node they hold no surprise.
    It holds integers that are attributes of modules for constants, so that a count in `forward` is captured anew at
    each call; here one that has changed is read at each call, as it does with those that `forward` is given.

    Args:
        hear: is told of each frame that Dynamo gives up, in the place of torch's own lines in the log; since torch
            2.13 that is also a frame at which Dynamo fails, which before is given up for other models too, so that
            the error is raised there. None: it is always raised.
        most: captures of one piece of code, which equal modules share; before torch 2.13, where those of other models
            count, there is no limit then. None: as many as torch allows.
    """
    changed: dict[str, Any] = {
        "accumulated_recompile_limit": _NO_LIMIT,
        "allow_rnn": True,
        "allow_unspec_int_on_nn_module": True,
    }
    for dynamos in _dynamos_logs:
        dynamos.addFilter(_overheard)  # once, however often it is called
    if hear is not None:
        changed.update({"suppress_errors": True} if _IS_APART else {})
    _leave_out_what_fails()
    if most is not None:
        changed["recompile_limit"] = most if _IS_APART else _NO_LIMIT
    was, _listening.hear = getattr(_listening, "hear", _NOBODY), hear
    revert = torch._dynamo.config._make_closure_patcher(**changed)()
    try:
        yield
    except BaseException as error:
        _let_back(error)
        raise
    finally:
        revert()
        _listening.hear = was


@functools.cache
def _leave_out_what_fails() -> None:
    """Before torch 2.13 Dynamo fails at `pad_packed_sequence` where it leaves `pack_padded_sequence` out of a graph."""
    if not _IS_APART:
        torch._dynamo.disallow_in_graph(torch._VF._pad_packed_sequence)


def _let_back(error: BaseException) -> None:
    """Let Dynamo look again at the frames that an error came through.

    A frame in which it meets a `raise` runs as it is written, which raises the error, and Dynamo marks its code as one
    to leave alone from then on. Since torch 2.13 the mark belongs to one compiled function.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code in torch._dynamo.convert_frame.input_codes:  # others were never to be captured
            set_code_exec_strategy(frame.f_code, _FrameExecStrategy(_FrameAction.DEFAULT, _FrameAction.DEFAULT))


def failed_captures() -> int:
    """How many frames Dynamo has tried to capture in this process, and could not."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    frames = torch._dynamo.utils.counters["frames"]
    return frames["total"] - frames["ok"]


def failure(error: BaseException | None) -> CaptureError | None:
    """An error of Dynamo's own as one that tells what to do; None for any other error."""
    if not isinstance(error, torch._dynamo.exc.InternalTorchDynamoError):
        return None
    return CaptureError(f"{_in_words(error)}.")


def is_dynamos_own(error: Exception) -> bool:
    """Whether a call may have failed in Dynamo alone. (Tensor methods that a package has patched are called by Dynamo's
    own code, which is then captured in its turn, without an end.)
    """
    return isinstance(error, RecursionError) or failure(error.__cause__) is not None


def frame_number() -> int:
    """Of the frame that is captured now: the same for all captures of one piece of code."""
    number = torch._guards.CompileContext.current_compile_id()
    return -1 if number is None or number.frame_id is None else number.frame_id


class _Overheard(logging.Filter):
    """Keeps back what Dynamo logs of a frame of a converted model that it gives up, for who listens.

    So it does a break of the graph at `.item()`, of which a line at INFO tells.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        hear = getattr(_listening, "hear", _NOBODY)
        text = str(record.msg)
        if text.lstrip().startswith(_AT_ITEM):
            return hear is _NOBODY
        if hear is None or hear is _NOBODY:
            return True
        if text.startswith(_LIMIT) and isinstance(record.args, tuple):
            limit, most, function, reason = map(str, record.args[:4])
            reason = reason.partition("\nUser stack trace")[0].strip() or "not known"
            allowed = f"torch._dynamo.config.{limit} = {most} allows ({reason})"
            hear(function, f"it was captured as often as {allowed}. {_KEEP_OUT}")
            return False
        if (found := _GIVEN_UP.match(text)) and record.exc_info and isinstance(record.exc_info[1], Exception):
            name, file, line = found.groups()
            hear(f"{name!r} ({file}:{line})", _in_words(record.exc_info[1]))
            return False
        return True


_overheard = _Overheard()


def _in_words(error: Exception) -> str:
    """Dynamo's error in one line, with the user's line that it tells of, and the remedy."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = user_lines_in(str(error))
    at = f" at {places[-1]}" if places else ""
    text = lines[0].rstrip(".: ") if lines else "no text"
    return f"Dynamo fails{at} with {type(error).__name__}: {text}. {_REWRITE}"


def leave_out(function: Any) -> None:
    """Let Dynamo begin with what a function calls: its own frame runs as it is, where nothing around it is captured."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


def own_code(function: Any) -> Any:
    """A copy of a function with a code object of its own: Dynamo's caches and limits belong to a code object."""
    while hasattr(function, "__wrapped__") and not hasattr(function, "__code__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        return function
    twin = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    return twin
