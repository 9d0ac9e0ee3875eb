"""Capture by symbolic tracing, with fxamp's own `fx.Tracer`: as often as one call structure needs."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.capture.captured import Captured, are_equal, settled
from fxamp.capture.counters import check_repeatable, held_before, numbers_before, sets_numbers
from fxamp.capture.data import NOTHING_LEFT_OUT, Answers, LeftOut
from fxamp.capture.effects import clear_caches
from fxamp.capture.imports import Imports
from fxamp.capture.inputs import CallSpec
from fxamp.capture.kept_items import Item, is_held, unreadable
from fxamp.capture.left_out import MOST_FUNCTIONS, called_through, frames_of, functions_to_leave_out
from fxamp.capture.locations import explained
from fxamp.capture.places import Place
from fxamp.capture.refusals import has_hidden_trace, has_open_sizes, opened_in, with_state
from fxamp.capture.sizes import is_made_up
from fxamp.capture.surroundings import fill_override_tables, load_einops, opened_wraps
from fxamp.capture.tracer import SymbolicTracer
from fxamp.errors import CaptureError, FxampError, uncaught_captures
from fxamp.fakes import Fakes

one_at_a_time = threading.RLock()
"""Held while a trace patches torch's modules, by whoever makes one; an engine holds it for a whole capture."""


def capture_symbolic(
    root: nn.Module,
    spec: CallSpec,
    example: list[Any] | None,
    fakes: Fakes | None = None,
    keep_whole: Callable[[str], bool] = lambda name: False,
    live: frozenset[Place] = frozenset(),
    again: Answers | None = None,
    left_out: LeftOut = NOTHING_LEFT_OUT,
) -> Captured:
    """Trace `root.forward` for one call structure; a thread waits for another's trace.

    Args:
        root: the module; unchanged afterwards.
        spec: which arguments are inputs and which are constants.
        example: the inputs (real tensors and numbers) of one call, None to trace without values.
        fakes: makes and runs fake values; None: plain ones of `root`.
        keep_whole: whether a function given to torch.fx.wrap stays one node (one that the op lists name does);
            others are traced into where that is possible.
        live: numbers of modules that are read at each call instead of being constants of the graph.
        again: what the data of the call said, where `example` is what is left of one that was captured before.
        left_out: what of forward is known by now to run before the graph.

    Raises:
        CaptureError: control flow on values, an attribute set to what no graph gives, and what else none can hold.
        OptionError: the example inputs make an operation of the model fail.
    """
    left_out = left_out if again is None else again.left_out
    asked = _Trace(root, spec, example, fakes or Fakes(root), live, again, left_out)
    with one_at_a_time:
        try:
            with opened_wraps(keep_whole) as opened:
                return settled(_trace(asked), lambda: _trace(asked))
        except CaptureError:
            if not opened:
                raise
        return settled(_trace(asked), lambda: _trace(asked))


class _Trace(NamedTuple):
    """What a trace is made of; see `capture_symbolic`."""

    root: nn.Module
    spec: CallSpec
    example: list[Any] | None
    fakes: Fakes
    live: frozenset[Place]
    again: Answers | None
    left_out: LeftOut
    may_hide: bool = True  # from forward that it is traced


def _trace(asked: _Trace) -> Captured:
    """A graph of forward, which reads what forward sets (`self.steps += 1`, `self.hidden = h, c`) at each call."""
    captured = _trace_around(asked)
    changing = held_before(captured) | (numbers_before(captured) if sets_numbers(captured) else frozenset())
    if not changing <= asked.live:
        asked = asked._replace(live=asked.live | changing)
        captured = _trace_around(asked)
    if sets_numbers(captured):
        check_repeatable(captured, _trace_around(asked))
    return _reading_items(asked, captured)


def _reading_items(asked: _Trace, captured: Captured) -> Captured:
    """A graph that reads what the items held that forward sets, at each call, where anything may hang on that.

    Raises:
        CaptureError: it would have to read what is no tensor.
    """
    items = [place for place, _ in captured.places_set if isinstance(place, Item) and is_held(asked.root, place)]
    containers = frozenset((item.path, item.name) for item in items)
    if containers <= captured.containers_read:
        return captured
    with contextlib.suppress(FxampError), unreadable(asked.root, items):
        if are_equal(captured, _trace_around(asked)):
            return captured
    again = _trace_around(asked._replace(live=asked.live | containers))
    if containers <= again.containers_read:
        return again
    raise CaptureError(
        f"forward sets self.{items[0].title}, and hangs on what that held before, which a graph does not read. Return "
        "the value instead, or keep it in a buffer (self.buffer.copy_(value))."
    )


def _trace_around(asked: _Trace) -> Captured:
    """A graph of forward, which leaves as little to run before it as is needed."""
    has_data = asked.again is None and asked.example is not None and not is_made_up(asked.example)
    first: FxampError | None = None
    while True:
        try:
            return _trace_once(asked)
        except CaptureError as error:
            if asked.may_hide and has_hidden_trace(error):
                asked = asked._replace(may_hide=False)  # it asks less, then
                continue
            first = first or error
            more = _more_left_out(error, asked.left_out) if has_data else None
            if more is None:
                raise first from first.__cause__
            asked = asked._replace(left_out=more)


def _more_left_out(error: CaptureError, left_out: LeftOut) -> LeftOut | None:
    """What else may run before the graph, so that a trace does not end as it did; None for nothing."""
    if len(left_out.codes) < MOST_FUNCTIONS and (found := functions_to_leave_out(frames_of(error), left_out.codes)):
        return left_out._replace(functions=(*left_out.functions, *found))
    if left_out.closes or not has_open_sizes(error):
        return None
    functions = (*left_out.functions, *opened_in(error))
    return LeftOut(functions if len(functions) <= MOST_FUNCTIONS else left_out.functions, closes=True)


def _trace_once(asked: _Trace) -> Captured:
    imports = Imports()
    return imports.loaded_before(lambda: _trace_among(asked, imports))


def _trace_among(asked: _Trace, imports: Imports) -> Captured:
    tracer = SymbolicTracer(*asked)
    load_einops()
    fill_override_tables()
    try:
        with (
            uncaught_captures(),
            called_through(asked.left_out.functions, tracer.beforehand.leave_out),
            imports.noted(tracer),
        ):
            graph = tracer.trace(asked.root)
    except FxampError as error:
        with_state(error, tracer)
        raise
    except Exception as error:
        found = explained(error, asked.root, asked.example is not None)
        raise with_state(found, tracer) from error
    finally:
        if tracer.questions.has_hashed:
            clear_caches(lambda kept: issubclass(type(kept), fx.Proxy) and kept.tracer is tracer)
    data = tracer.questions.of_data
    captured = Captured(
        root=asked.root,
        graph=graph,
        spec=asked.spec,
        training=tuple(tracer.training.items()),
        decisions=tuple(dict.fromkeys(tracer.questions.decisions)),
        constants=tracer.constants,
        output_form=tracer.output_form,
        example=tracer.example,
        state=tracer.state,
        live=asked.live,
        grad_mode=tracer.grad_mode,
        default_device=tracer.device.asked,
        attributes=tracer.attributes,
        settings=tracer.settings,
        further=tracer.beforehand.trial(),
        answers=Answers(data.answers(), tracer.beforehand.results(), asked.left_out, data.is_for_recorded),
    )
    captured.data = data.trial(asked.fakes.in_mode(FakeTensorMode()), captured.read)
    return captured
