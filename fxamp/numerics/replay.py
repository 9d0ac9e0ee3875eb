"""One call of a training step, kept until the step is over, so that it can be run again when it went wrong."""

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture.kept_items import Kept
from fxamp.model.engine import Engine
from fxamp.model.variant import Variant
from fxamp.numerics.between import made_around
from fxamp.numerics.extent import Extent, extent_of
from fxamp.numerics.flow import CallFlow
from fxamp.numerics.kept import state_kept
from fxamp.numerics.losses import floats_in
from fxamp.numerics.mending import first_ring, node_of
from fxamp.numerics.nan import BadNode, bad_code, bad_node, describe
from fxamp.numerics.origin import Origin, of_output, origin_of, vanished_origin
from fxamp.numerics.parts import Turns
from fxamp.numerics.run import Call, in_float32
from fxamp.numerics.watcher import watch_flow
from fxamp.randomness import generator_states, set_generators

log = logging.getLogger("fxamp")

_BACKWARD = ("backward", "sum of gradients")

_means_infinities: "weakref.WeakSet[Engine]" = weakref.WeakSet()
"""Of models whose outputs have infinities that float32 has too: to run each call again would take a step's time."""


class Replay:
    """What a call began with, and the gradients that came back to its outputs.

    Nothing of the user's autograd graph is held: inputs are kept detached, and share their memory.

    Args:
        call: with its inputs; nothing has run yet.
        flow: what is watched of it.
        number, steps: its number among the calls that are watched, and how many optimizer steps came before it.
        clock: counts the forwards and backwards of all calls, in order.
    """

    def __init__(self, call: Call, flow: CallFlow, number: int, steps: int, clock: Iterator[int]) -> None:
        self.call = dataclasses.replace(
            call, args=_kept(call.args), kwargs=_kept(call.kwargs), inputs=_kept(call.inputs)
        )
        self.flow = flow
        self.number = number
        self.steps = steps
        self.clock = clock
        self.began, self.came_back = next(clock), 0
        self.gradients: dict[int, torch.Tensor] = {}
        self.has_no_gradient = False
        self.is_kept = True
        self.outputs: list[Extent] = []
        self.weights = [(weight, _version(weight)) for weight in call.weights.parameters()]
        self.given = [(given, _version(given)) for given in _tensors(self.call)]
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in call.weights.buffers()]
        self.attributes = [] if call.variant is None else list(_set_by(call.variant, call.weights))
        self.flags = [(module, module.training) for module in call.weights.modules()]
        self.generators = generator_states(_devices(call))

    def watch_outputs(self, output: Any) -> None:
        """Note the gradients that come back to what the call gave."""
        outputs = floats_in(output)
        self.outputs = [extent_of(tensor) for tensor in outputs]
        self.has_no_gradient = not any(tensor.requires_grad for tensor in outputs)
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad and not any(tensor is earlier for earlier in outputs[:place]):
                tensor.register_hook(self._noting(place))  # type: ignore[no-untyped-call]

    def _noting(self, place: int) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            self.came_back = self.came_back or next(self.clock)
            if self.is_kept:
                known, gradient = self.gradients.get(place), gradient.detach()
                self.gradients[place] = gradient if known is None else known + gradient

        return note

    @property
    def is_over(self) -> bool:
        """Whether nothing can come of it any more: it has no backward, or the weights are those of another step."""
        return self.has_no_gradient or self._are_written()

    def time_of(self, origin: Origin | None) -> int:
        """When its forward began, or its backward if it went wrong there."""
        return self.came_back if origin is not None and origin.phase in _BACKWARD else self.began

    def release(self) -> None:
        """Keep the watch, and let go of what another run would need."""
        self.is_kept = False
        self.call = dataclasses.replace(self.call, args=(), kwargs={}, inputs=())
        self.given, self.buffers, self.attributes = [], [], []
        self.gradients.clear()

    def origin(self, exact: CallFlow | None = None) -> Origin | None:
        """Who began; or else the output, where what the call gave is not finite."""
        return first_bad(self.flow, exact) or of_output(dataclasses.replace(self.flow, outputs=self.outputs), exact)

    @property
    def is_written(self) -> bool:
        """Whether it is a call that ran as it is written, whose parts are calls of their own."""
        return self.call.variant is None and not self.flow.parts

    def diagnosis_around(self) -> BadNode | None:
        """What code around the parts of such a call makes: it is run again, whole, with that code looked at."""
        if self._missing("forward"):
            return None
        call = dataclasses.replace(self.call, dynamo=None, turns=Turns(self.call.engine))
        loss_fn = self._hand_back if self.gradients else None
        try:
            with self._as_it_was():
                flow = watch_flow(call, loss_fn)
                exact = watch_flow(call, loss_fn, in_float32(call), as_float32=True)
        except Exception:
            log.debug("the call could not be run again", exc_info=True)
            return None
        made = made_around(flow, exact, origin_of(flow, exact))
        return None if made is None else bad_code(made, flow, exact)

    def diagnosis_of_output(self) -> BadNode | None:
        """Of infinities in the outputs that the model seems to mean, and that float32 has not.

        A model is run in float32 for that until it is seen to mean them.
        """
        engine = self.call.engine
        if engine in _means_infinities or all(extent.is_finite for extent in self.outputs) or self._missing("output"):
            return None
        _means_infinities.add(engine)
        try:
            with self._as_it_was():
                exact = watch_flow(self.call, None, in_float32(self.call), as_float32=True)
                origin = self.origin(exact)
                if origin is None:
                    return None
                _means_infinities.discard(engine)
                return describe(self.call, self.flow, origin, None, exact)
        except Exception:  # a step must not fail for what could be added to it
            log.debug("the call could not be run again", exc_info=True)
            return None

    def diagnosis(self, origin: Origin) -> BadNode:
        """All about an origin: the call is run again in fp32, and with the deny entries that may mend it."""
        unknown = self._missing(origin.phase)
        if not unknown:
            try:
                found = self._described(origin)
            except Exception as error:  # the diagnosis matters more than what could be added to it
                log.debug("the call could not be run again", exc_info=True)
                text = str(error).partition("\n")[0]
                unknown = f"the call could not be run again ({type(error).__name__}: {text})"
            else:
                if found is not None:
                    return found
                unknown = "run again, the call is finite: was it a derivative of a derivative, or a race?"
        node = node_of(origin)
        denied = first_ring(node) if ir.mark(node).precision == "low" else ()
        return dataclasses.replace(bad_node(self.call, origin, denied, False, self.flow), unknown=unknown)

    def _described(self, origin: Origin) -> BadNode | None:
        """None where it does not happen again: what another run would say is then no answer."""
        are_finite = all(extent.is_finite for extent in self.outputs)  # else the gradients are those of what went wrong
        loss_fn = self._hand_back if self.gradients and (are_finite or origin.phase in _BACKWARD) else None
        with self._as_it_was():
            if first_bad(watch_flow(self.call, loss_fn)) is None:
                return None
            exact = watch_flow(self.call, loss_fn, in_float32(self.call), as_float32=True)
            origin = first_bad(self.flow, exact) or origin
            return describe(self.call, self.flow, origin, loss_fn, exact)

    def _missing(self, phase: str) -> str:
        """Why the call cannot be run again as it ran, "" where it can."""
        reasons = {
            "many calls have gone by since": not self.is_kept,
            "the weights have been written since": self._are_written(),
            "its inputs have been written since": any(_version(given) != before for given, before in self.given),
            "no gradient came back through the tensors that it returned": (phase in _BACKWARD and not self.gradients),
        }
        found = next((reason for reason, is_so in reasons.items() if is_so), "")
        return found and f"{found}; find_nan with the same weights and inputs tries it"

    def _are_written(self) -> bool:
        return any(_version(weight) != before for weight, before in self.weights)

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """Buffers, attributes, random numbers and training flags of the call; afterwards those of now."""
        now = [(module, module.training) for module, _ in self.flags]
        with state_kept(self.call.weights):
            for attribute, value in self.attributes:
                attribute.put_back(self.call.weights, value)
            for buffer, before in self.buffers:
                buffer.data.copy_(before)
            set_generators(self.generators)
            _set_flags(self.flags)
            try:
                yield
            finally:
                _set_flags(now)

    def _hand_back(self, output: Any) -> torch.Tensor:
        """Stands for the loss: its backward gives the outputs the gradients that they got."""
        outputs = floats_in(output)
        handed = [(outputs[place], gradient) for place, gradient in self.gradients.items()]
        return _HandBack.apply([gradient for _, gradient in handed], *(tensor for tensor, _ in handed))  # type: ignore[no-any-return, no-untyped-call]


def first_bad(flow: CallFlow, exact: CallFlow | None = None) -> Origin | None:
    """Who began; in a call that was stopped, where nothing reached the outputs, of all that is bad."""
    found = origin_of(flow, exact)
    if found is None and flow.error is not None:
        found = vanished_origin(flow, exact or CallFlow())
    return found or of_output(flow, exact)


def _set_by(variant: Variant, model: nn.Module) -> Iterator[tuple[Kept, Any]]:
    """What the attributes and items hold now that a graph is about to set."""
    for place, _ in variant.captured.places_set:
        yield place, _kept(place.held_in(model))


class _HandBack(torch.autograd.Function):
    """A zero, whose backward gives these gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.handed = [gradient.to(output.dtype) for gradient, output in zip(gradients, outputs, strict=True)]
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, *ctx.handed


def _kept(values: Any) -> Any:
    """The same, detached from what made them."""

    def detached(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return value
        return value.detach().requires_grad_(value.requires_grad)

    return pytree.tree_map(detached, values)


def _tensors(call: Call) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((call.args, call.kwargs, call.inputs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _version(tensor: torch.Tensor) -> int:
    """Of its numbers: how often they were written."""
    return -1 if tensor.is_inference() else tensor._version


def _devices(call: Call) -> list[int]:
    return sorted({weight.device.index or 0 for weight in call.weights.parameters() if weight.is_cuda})


def _set_flags(flags: list[tuple[torch.nn.Module, bool]]) -> None:
    for module, is_training in flags:
        module.training = is_training
