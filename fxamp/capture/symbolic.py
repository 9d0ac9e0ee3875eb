"""Capture by symbolic tracing, with fxamp's own `fx.Tracer`: as often as one call structure needs."""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.capture.captured import Captured, settled
from fxamp.capture.counters import check_repeatable, numbers_before, sets_numbers
from fxamp.capture.data import NOTHING_LEFT_OUT, Answers, LeftOut
from fxamp.capture.effects import clear_caches_of
from fxamp.capture.inputs import CallSpec
from fxamp.capture.left_out import MOST_FUNCTIONS, called_through, frames_of, functions_to_leave_out
from fxamp.capture.locations import explained
from fxamp.capture.reads import Place
from fxamp.capture.refusals import has_open_sizes, with_state
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
        CaptureError: control flow on values, an attribute set in forward, and what else a graph cannot hold.
        OptionError: the example inputs make an operation of the model fail.
    """
    fakes = fakes or Fakes(root)
    left_out = left_out if again is None else again.left_out
    with one_at_a_time:
        try:
            with opened_wraps(keep_whole) as opened:
                return _settled_trace(root, spec, example, fakes, live, again, left_out)
        except CaptureError:
            if not opened:
                raise
        return _settled_trace(root, spec, example, fakes, live, again, left_out)


def _settled_trace(*given: Any) -> Captured:
    return settled(_trace(*given), lambda: _trace(*given))


def _trace(
    root: nn.Module,
    spec: CallSpec,
    example: list[Any] | None,
    fakes: Fakes,
    live: frozenset[Place],
    again: Answers | None,
    left_out: LeftOut,
) -> Captured:
    """A graph of forward, which reads numbers that forward sets (`self.steps += 1`) at each call."""
    captured = _trace_around(root, spec, example, fakes, live, again, left_out)
    if sets_numbers(captured) and not numbers_before(captured) <= live:
        live |= numbers_before(captured)
        captured = _trace_around(root, spec, example, fakes, live, again, left_out)
    if sets_numbers(captured):
        check_repeatable(captured, _trace_around(root, spec, example, fakes, live, again, left_out))
    return captured


def _trace_around(
    root: nn.Module,
    spec: CallSpec,
    example: list[Any] | None,
    fakes: Fakes,
    live: frozenset[Place],
    again: Answers | None,
    left_out: LeftOut,
) -> Captured:
    """A graph of forward, which leaves as little to run before it as is needed."""
    first: FxampError | None = None
    while True:
        try:
            return _trace_once(root, spec, example, fakes, live, again, left_out)
        except CaptureError as error:
            first = first or error
            is_asked = again is None and example is not None and not is_made_up(example)
            more = _more_left_out(error, left_out) if is_asked else None
            if more is None:
                raise first from first.__cause__
            left_out = more


def _more_left_out(error: CaptureError, left_out: LeftOut) -> LeftOut | None:
    """What else may run before the graph, so that a trace does not end as it did; None for nothing."""
    if len(left_out.codes) < MOST_FUNCTIONS and (found := functions_to_leave_out(frames_of(error), left_out.codes)):
        return left_out._replace(functions=(*left_out.functions, *found))
    return left_out._replace(closes=True) if has_open_sizes(error) and not left_out.closes else None


def _trace_once(
    root: nn.Module,
    spec: CallSpec,
    example: list[Any] | None,
    fakes: Fakes,
    live: frozenset[Place],
    again: Answers | None,
    left_out: LeftOut,
) -> Captured:
    tracer = SymbolicTracer(root, spec, example, fakes, live, again, left_out)
    load_einops()
    fill_override_tables()
    try:
        with uncaught_captures(), called_through(left_out.functions, tracer.beforehand.leave_out):
            graph = tracer.trace(root)
    except FxampError as error:
        with_state(error, tracer.state_so_far(), tracer.values.has_open)
        raise
    except Exception as error:
        found = explained(error, root, example is not None)
        raise with_state(found, tracer.state_so_far(), tracer.values.has_open) from error
    finally:
        if tracer.questions.has_hashed:
            clear_caches_of(tracer)
    captured = Captured(
        root=root,
        graph=graph,
        spec=spec,
        training=tuple(tracer.training.items()),
        decisions=tuple(dict.fromkeys(tracer.questions.decisions)),
        constants=tracer.constants,
        output_form=tracer.output_form,
        example=tracer.example,
        state=tracer.state,
        live=live,
        grad_mode=tracer.grad_mode,
        settings=tracer.settings,
        further=tracer.beforehand.trial(),
        answers=Answers(tracer.questions.of_data.answers(), tracer.beforehand.results(), left_out),
    )
    captured.data = tracer.questions.of_data.trial(fakes.in_mode(FakeTensorMode()), captured.read)
    return captured
