"""Name the op that overflowed while a model trains: every call is watched, and run again where it went wrong."""

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxamp.model.engine import Engine, engine_of
from fxamp.model.unconverted import check_left
from fxamp.model.variant import Variant
from fxamp.model.ways import Way
from fxamp.numerics.extent import extent_of
from fxamp.numerics.losses import floats_in
from fxamp.numerics.nan import BadNode
from fxamp.numerics.replay import Replay
from fxamp.numerics.run import Call, check_module, looking_dynamo
from fxamp.numerics.runner import Part, Runner, run_part, served, sizes_of
from fxamp.numerics.watcher import CallWatcher
from fxamp.runtime.distributed import local

KEPT = 64
"""Calls without an optimizer step between them that are kept to be run again: micro-batches, or calls for no step."""


class NanWatch:
    """What `watch_nan` gives: `.found` is the first bad node, None for as long as all is finite."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.calls: list[Replay] = []
        self.clock = itertools.count()
        self.begun = 0
        self.steps = 0
        self.error: Exception | None = None
        self._found: BadNode | None = None

    @property
    def found(self) -> BadNode | None:
        """The first bad node of all calls so far, in the order in which forwards and backwards ran; and, where the call
        could be run again, whether float32 is finite there, and the deny that mends it."""
        if self._found is None:
            self._found = self._diagnosis()
        if self._found is not None:
            self.calls.clear()
        return self._found

    def _diagnosis(self) -> BadNode | None:
        origins = [(call, call.origin()) for call in self.calls]
        for call, origin in sorted(origins, key=lambda each: each[0].time_of(each[1])):
            found = self._of_call(call) if origin is None else call.diagnosis(origin)
            if found is not None:
                return self._told(self._in_model(found, call), call)
        written = [call for call in self.calls if call.is_written and call.gradients]
        for call in written if self._has_bad_gradients() else ():  # of a parameter that no part reads
            if (found := call.diagnosis_around()) is not None:
                return self._told(found, call)
        return None

    def _has_bad_gradients(self) -> bool:
        gradients = (parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
        return any(not extent_of(local(gradient)).is_finite for gradient in gradients)  # no rank waits for others

    def _of_call(self, call: Replay) -> BadNode | None:
        """What is bad of a call in whose graphs nothing is seen to be."""
        if not call.is_written:
            return call.diagnosis_of_output()
        return None if all(extent.is_finite for extent in call.outputs) else call.diagnosis_around()

    def _told(self, found: BadNode, call: Replay) -> BadNode:
        return dataclasses.replace(found, call=call.number, steps=call.steps)

    def _around(self, part: Replay) -> BadNode | None:
        """What code around a part of a forward that runs as it is written makes, if that can be told."""
        outer = [call for call in self.calls if call.is_written and call.number < part.number]
        return outer[-1].diagnosis_around() if outer else None

    def _in_model(self, found: BadNode, replay: Replay) -> BadNode:
        """What was found in a part of a forward that runs as it is written; equal parts share a graph."""
        call = replay.call
        path = next((path for path, part in self.model.named_modules() if part is call.model), "")
        if not path or call.variant is None or not call.variant.blocks:
            return found
        is_given = any(not extent.is_finite and not extent.is_mask for extent in replay.flow.inputs)
        is_from_around = found.phase == "input" or (is_given and found.phase == "forward" and found.is_bad_in_float32)
        phase = "between graphs" if is_from_around else found.phase
        is_given_back = phase == "backward" and found.op == "output"
        if (is_from_around or is_given_back) and (code := self._around(replay)) is not None:
            return code
        if is_given_back:  # as it was given, rounded: float32 was not asked what it is
            found = dataclasses.replace(found, is_bad_in_float32=False)
        return dataclasses.replace(found, phase=phase, module=path + found.module.removeprefix(call.variant.blocks[0]))

    def begin(self, call: Call) -> "CallWatcher":
        """What watches a new call."""
        self.begun += 1
        watcher = CallWatcher(call.weights, with_gradients=torch.is_grad_enabled())
        if self.found is None:  # asked while the state of the last call is still there
            self.calls = [earlier for earlier in self.calls if not earlier.is_over]
            for earlier in self.calls[-KEPT : 1 - KEPT]:
                earlier.release()
            watcher.flow.inputs = [extent_of(tensor) for tensor in floats_in((call.args, call.kwargs))]
            self.calls.append(Replay(call, watcher.flow, self.begun, self.steps, self.clock))
        return watcher

    def end(self, watcher: CallWatcher, output: Any) -> None:
        """The call has given `output`."""
        for call in self.calls:
            if call.flow is watcher.flow:
                call.watch_outputs(output)

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The weights are about to be written: what can be told is told now, and the step is over."""
        own = {id(weight) for weight in model.parameters()}
        if any(id(weight) in own for group in optimizer.param_groups for weight in group["params"]):
            _ = self.found
            self.calls.clear()
            self.steps += 1

    def stop(self, watcher: CallWatcher, error: Exception) -> None:
        """A call was stopped, perhaps by what is not finite, such as an index made of it."""
        if watcher.flow.has_bad_values:
            watcher.flow.error = self.error = error
            return
        for call in self.calls:
            if call.flow is watcher.flow and call.is_written and (found := call.diagnosis_around()) is not None:
                self._found, self.error = self._told(found, call), error


@contextlib.contextmanager
def watch_nan(converted: nn.Module, raises: bool = True) -> Iterator[NanWatch]:
    """Watch every call of a converted model, forward and backward; slow, so for the steps that go wrong.

        with fxamp.watch_nan(model):
            scaler.scale(criterion(model(x), y)).backward()     # raises FloatingPointError naming the op

    Of the step that is under way it keeps what each call began with (references to its inputs, a copy of the buffers)
    and the gradients that its outputs got, and runs the call again where it went wrong: in fp32, to say whether
    precision is the reason, and with the deny entries that may mend it. No random number is drawn, no buffer changed.

    Args:
        raises: raise on leaving the block, or in the place of the error that a bad value led to; else look at `.found`.

    Returns:
        What the `with` statement gives: its `.found` is the first bad node of all calls so far, as of `find_nan`, and
        None for as long as all is finite.

    Raises:
        FloatingPointError: on leaving, where an output, or the gradient of a parameter or an input, was not finite, in
            float32 either or not. An infinity that the model means to give, as masked scores, is none if float32 gives
            infinities too. One inside that an op of the model took back (tanh(inf) is 1; the slope of sqrt at a zero
            that relu made) is for `find_nan`, which compares with fp32.
        OptionError: the model was not converted.
        Any other error on its way out gets what was found as a note (LossScaler's ScaleCollapseError is one).
    """
    check_module(converted, "model")
    engine = engine_of(converted)
    if engine is None:
        check_left(converted, "watch_nan watches nothing")
        yield NanWatch(converted)
        return
    watch = NanWatch(converted)
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: watch.before_step(converted, optimizer))
    try:
        with _watched_by(watch, engine):
            yield watch
        _ = watch.found  # told while what the call began with is still there
    except Exception as error:
        if watch.found is None:
            raise
        if raises and error is watch.error:
            raise FloatingPointError(str(watch.found)) from error
        error.add_note(f"fxamp.watch_nan saw before: {watch.found}")
        raise
    finally:
        hook.remove()
    if raises and watch.found is not None:
        raise FloatingPointError(str(watch.found))


@contextlib.contextmanager
def _watched_by(watch: NanWatch, engine: Engine) -> Iterator[None]:
    """Every graph of the model, those that are yet to be made included, is run node by node."""
    workshop, otherwise = engine.workshop, engine.otherwise
    changed: list[tuple[Variant, Any]] = []

    def watched(variant: Variant) -> Variant:
        changed.append((variant, variant.compiled))
        variant.compiled = dataclasses.replace(variant.compiled, run=_watching(watch, engine, variant))
        return variant

    def parts() -> Iterator[Engine]:
        yield from (engine, *otherwise.present.engines.values())
        if engine.fallbacks or not engine.all_variants():  # a graph around them has blocks as nodes
            yield from {id(block): block for block in engine.boundaries.values()}.values()

    building = dataclasses.replace(workshop, build=lambda *given, **more: watched(workshop.build(*given, **more)))
    for part in parts():
        part.workshop = building
        for variant in part.all_variants():
            watched(variant)
    watching: Any = _Watched(watch, engine, otherwise)
    engine.otherwise = watching
    try:
        yield
    finally:
        engine.otherwise = otherwise
        for part in parts():  # also those that are new
            part.workshop = workshop
        for variant, compiled in changed:
            variant.compiled = compiled


def _watching(watch: NanWatch, engine: Engine, variant: Variant) -> Callable[..., Any]:
    """The forward of a graph that is a whole call."""

    def run(module: nn.Module, *inputs: Any) -> Any:
        watcher = watch.begin(Call(module, engine, inputs, {}, module, variant, inputs))
        with _errors_noted(watch, watcher):
            result = _watched_part(watcher, engine, variant, module, inputs)
        watch.end(watcher, result)
        return result

    return run


class _Watched:
    """Stands in the place of a way of calls that no graph holds: Dynamo's graphs of one call belong together."""

    def __init__(self, watch: NanWatch, engine: Engine, otherwise: Way) -> None:
        self.watch = watch
        self.engine = engine
        self.otherwise = otherwise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.otherwise, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.otherwise, memo)

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watcher = self.watch.begin(Call(module, self.engine, args, kwargs, module, dynamo=looking_dynamo(self.engine)))
        self.otherwise.watch = lambda variant, inputs: _watched_part(watcher, self.engine, variant, module, inputs)
        try:
            with _errors_noted(self.watch, watcher):
                result = self.otherwise(base, module, args, kwargs)
        finally:
            self.otherwise.watch = None
        self.watch.end(watcher, result)
        return result


@contextlib.contextmanager
def _errors_noted(watch: NanWatch, watcher: CallWatcher) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        watch.stop(watcher, error)
        raise


def _watched_part(watcher: CallWatcher, engine: Engine, variant: Variant, module: nn.Module, inputs: Any) -> Any:
    graph = next((place for place, known in enumerate(engine.all_variants()) if known is variant), 0)
    moved = served(variant, inputs, module)
    part = Part(len(watcher.flow.parts), graph, variant, sizes_of(inputs), moved=moved)
    return run_part(Runner(module, part, watcher.see, watcher.edge), inputs)
