"""A whole training step as one CUDA graph: forward, loss, backward, unscale, check, clip, update."""

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.recorded import RecordedTooSoonError, as_if_recorded
from fxamp.runtime import clipping, gradients
from fxamp.runtime.cuda_graph import Recorder
from fxamp.runtime.device_rates import DeviceRates, reads_rate_from_device
from fxamp.runtime.device_skip import settle
from fxamp.runtime.entries import Entries
from fxamp.runtime.fixed_scalers import NoOpLossScaler
from fxamp.runtime.graphed_checks import check_arguments, check_loss
from fxamp.runtime.module_state import CarriedOver, Change, ModuleState
from fxamp.runtime.optimizer_steps import note_step
from fxamp.runtime.recorded_step import Graph, is_elsewhere, static_buffer
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.step_result import StepResult
from fxamp.runtime.unseen_writes import take_writes
from fxamp.words import listed

log = logging.getLogger("fxamp")

WARM_UP = 3  # eager steps, skipped ones not counted, before the first capture: they create optimizer state
IN_VAIN = 3  # captures in a row that find a step to set something: for good, as a table that grew, or at each step
MAX_GRAPHS = 8  # each keeps its own activations
NOT_IN_KEY = ("params", "param_names", "lr", "initial_lr")
PLAIN = (bool, int, float, str, tuple, type(None))


class GraphedStep:
    """Runs one training step per call; on CUDA it is captured once for each shape, then replayed.

        step = fxamp.GraphedStep(model, loss_fn, optimizer, scaler)
        for inputs, targets in batches:
            loss = step(inputs, targets)
            scheduler.step()

    Every call is exactly one step, warm-up included. Inputs are copied into buffers of the graph, so that
    each call may bring new tensors. Overflowing steps are skipped inside the graph; the scaler's numbers
    arrive on the host afterwards. A change of a learning rate or of the scale takes effect at the next call,
    a change of another hyper-parameter, of the scaler's constants, of a module's `training`, of what a converted model
    reads of Python or of what any other module holds (numbers, texts, tensors, containers) recaptures; so does a rate
    that the optimizer reads on the host (SGD without fused=True). Where a graph's memory is replaced (an optimizer's
    state loaded, a model moved), or other parameters are trained (frozen ones, another group), it is warmed up and
    captured again. Tensors that modules keep from step to step (`self.hidden = hidden.detach()`) are carried over, also
    from what the loop sets in their place; one copy each. Modules are those of the model and of a loss that is a
    module, or a method of one. Whatever else Python decides in a step is decided while capturing: by a global, say.
    Without CUDA, or where capture is impossible (an optimizer that keeps state on the host, a step that waits for the
    device, a module that counts or whose list grows), the same steps run eagerly, and one line of the log says why.
    What is written into parameters with masters between two calls, their masters take before the second. The gradients
    of inputs stay in the graph.

    DistributedDataParallel keeps nodes of autograd from when it was made: make it under `torch.cuda.stream(s)` with a
    stream of your own, as torch's notes on CUDA graphs say.

    Args:
        model: called with `inputs`: a tensor, a tuple of arguments or a dict of keyword arguments.
        loss_fn: (outputs, targets) -> 0-d loss.
        optimizer: on CUDA best with fused=True; `capturable` is switched on where it exists.
        scaler: None scales nothing.
        max_grad_norm: clip to this norm, as in `LossScaler.step`.
        max_graphs: shapes (and other reasons to recapture) beyond this many run eagerly.

    Raises:
        OptionError: an argument of another kind, or a scaler that is not one of this package's; of a call, a loss that
            is not one number with a gradient.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler | None = None,
        *,
        max_grad_norm: float | None = None,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        check_arguments(model, loss_fn, optimizer, scaler, max_graphs)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.scaler = scaler or NoOpLossScaler()
        self.scaler.name_parameters(model)
        self.max_grad_norm = clipping.checked_max_norm(max_grad_norm)
        self.max_graphs = max_graphs
        self.last_result: StepResult | None = None
        self._graphs: dict[Any, list[Graph]] = {}
        self._modules = self._all_modules()
        self._carried = CarriedOver()
        self._held: ModuleState | None = None  # of the graph that was made last
        self._changing: set[str] = set()
        self._in_vain = 0  # captures in a row of steps that may be recorded next time
        self._are_trained: list[bool] = []
        self._rates: DeviceRates | None = None
        self._recorder: Recorder | None = None
        self._warm_steps = 0
        self._waits = 0  # steps in a row that waited for the device
        self._has_said_why = False
        self._has_said_full = False
        self._why_eager: str | None = None if torch.cuda.is_available() else "CUDA is not available"
        self._forget_graphs_at_load()

    @property
    def is_graphed(self) -> bool:
        """Whether steps are, or will be, replayed from a graph."""
        return self._why_eager is None

    @property
    def why_eager(self) -> str | None:
        """Why steps run eagerly; None where they are, or will be, replayed."""
        return self._why_eager

    def __call__(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Train on one batch and return its loss (0-d, detached, unscaled)."""
        leaves, structure = pytree.tree_flatten((inputs, targets))
        self._notice(leaves)
        if self._why_eager is not None:
            return self._eager(inputs, targets)
        are_trained = [parameter.requires_grad for parameter in gradients.parameters(self.optimizer)]
        if are_trained != self._are_trained:
            self._are_trained = are_trained
            self._start_again("other parameters are trained")
        if self._warm_steps < WARM_UP:
            return self._warm_up(inputs, targets)
        if self._rates is None:
            self._rates = DeviceRates(self.optimizer)
        self._rates.follow()
        key = self._key(leaves, structure)
        known = self._graphs.get(key, [])
        if any(graph.is_moved() for graph in known):
            self._start_again("the model's memory was replaced")
            return self._warm_up(inputs, targets)
        others = [] if self._held is None else self._carried.take(self._held)
        if any(map(self._carried.is_lost, others)):
            self._start_again(
                f"{listed([each.name for each in others], 3)}, which steps replace, was set to something else"
            )
            return self._warm_up(inputs, targets)
        graph = next((graph for graph in known if self._holds(graph, others)), None)
        graph = graph or self._capture(key, leaves, structure)
        if graph is not None:
            return self._replay(graph, leaves)
        return self._warm_up(inputs, targets) if self._in_vain else self._eager(inputs, targets)

    def _all_modules(self) -> list[torch.nn.Module]:
        """Of the model, and of a loss that is a module, or a method of one."""
        loss = getattr(self.loss_fn, "__self__", self.loss_fn)
        owners = [each for each in (self.model, loss) if isinstance(each, torch.nn.Module)]
        return list(dict.fromkeys(module for owner in owners for module in owner.modules()))

    def _holds(self, graph: Graph, others: list[Change]) -> bool:
        """Whether the next step would do what a graph does; `others` are what has changed since the last was made."""
        if graph.state is not self._held:
            others = self._carried.take(graph.state)
        self._changing.update(each.name for each in others)
        return not others and graph.recorded.holds()

    def _notice(self, leaves: list[Any]) -> None:
        """Say once why steps run eagerly."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._why_eager is None and any(leaf.device.type != "cuda" for leaf in tensors):
            self._why_eager = "a batch is not on a CUDA device"
        if self._why_eager is not None and not self._has_said_why:
            self._has_said_why = True
            log.warning("GraphedStep runs eagerly: %s", self._why_eager)

    def _run_eagerly(self, why: str) -> None:
        """From now on, and say so."""
        self._graphs.clear()
        self._why_eager, self._has_said_why = why, True
        log.warning("GraphedStep runs eagerly: %s", why)

    def _forget_graphs_at_load(self) -> None:
        """A loaded state is other tensors than those that graphs write."""
        myself = weakref.ref(self)

        def start_again(_: torch.optim.Optimizer) -> None:
            if (step := myself()) is not None:
                step._start_again("a state of the optimizer was loaded")

        self._inner.register_load_state_dict_post_hook(start_again)

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The optimizer itself, without its masters."""
        inner = getattr(self.optimizer, "optimizer", None)
        return inner if isinstance(inner, torch.optim.Optimizer) else self.optimizer

    def _start_again(self, why: str) -> None:
        if self._graphs:
            log.info("GraphedStep captures anew: %s", why)
        self._graphs.clear()
        self._modules = self._all_modules()
        self._held = None
        self._carried = CarriedOver()
        self._rates = None
        self._warm_steps = 0
        self._in_vain = 0

    def _warm_up(self, inputs: Any, targets: Any) -> torch.Tensor:
        """An eager step, which counts if a graph could have made it and it left optimizer state behind."""
        if self._recorder is None:
            self._recorder = Recorder(next(iter(gradients.parameters(self.optimizer))).device)
        before = ModuleState(self._modules)
        with self._recorder.warm_up() as waits, as_if_recorded():
            loss = self._eager(inputs, targets)
        self._carried.note(before.changes())
        self._waits = self._waits + 1 if waits else 0
        if not waits:
            assert self.last_result is not None
            self._warm_steps += not self.last_result.skipped
        elif self._waits == WARM_UP:
            self._run_eagerly(f"each step waits for the device, which a graph cannot ({waits[0]})")
        return loss

    def _eager(self, inputs: Any, targets: Any) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss, self.last_result = self._step(inputs, targets)
        return loss

    def _step(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, StepResult]:
        loss = self.loss_fn(_call(self.model, inputs), targets)
        check_loss(loss)
        self.scaler.scale(loss).backward()
        result = self.scaler.step(self.optimizer, max_grad_norm=self.max_grad_norm)
        self.scaler.update()
        return loss.detach(), result

    def _key(self, leaves: list[Any], structure: Any) -> Any:
        shapes = tuple(
            (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        )
        settings = tuple(
            (name, number)
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name not in NOT_IN_KEY or (name == "lr" and not reads_rate_from_device(group))
            if isinstance(number := _as_read(value), PLAIN)
        )
        rule = dataclasses.astuple(self.scaler.rule)
        looks_after = self.scaler.may_be_below_one()  # unscaling is another then
        modes = tuple([module.training for module in self._modules])
        return shapes, str(structure), settings, rule, modes, self.max_grad_norm, looks_after

    def _capture(self, key: Any, leaves: list[Any], structure: Any) -> Graph | None:
        from fxamp.model.as_made import Recorded  # what is converted is above this

        if sum(map(len, self._graphs.values())) >= self.max_graphs:
            self._say_full(key)
            return None
        static = [static_buffer(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inputs, targets = pytree.tree_unflatten(static, structure)
        self.optimizer.zero_grad(set_to_none=True)
        # Whatever still waits for an event must be read before: waiting is forbidden while capturing.
        settle(self.optimizer)
        settle(self._inner)
        self.scaler.watch.drain()
        entries = Entries(self._inner)
        self._carried.begin(ModuleState(self._modules))
        held = ModuleState(self._modules)
        weights = list(dict.fromkeys(weight for module in self._modules for weight in module.parameters(recurse=False)))
        memory = [(weight, weight.data) for weight in weights]
        assert self._recorder is not None and self._rates is not None
        try:
            with self._rates.in_place(), as_if_recorded():
                replay, (loss, result) = self._recorder.record(lambda: self._step_and_keep(inputs, targets, held))
            if entries.are_changed() or any(is_elsewhere(*each) for each in memory):
                raise RuntimeError(
                    "a step changes numbers on the host, or puts new tensors in the place of weights or optimizer "
                    "state, which a replay cannot"
                )
        except Exception as error:  # whatever a model or optimizer raises when it cannot be captured
            self._in_vain = self._in_vain + 1 if isinstance(error, _SetsError | RecordedTooSoonError) else 0
            entries.put_back()
            held.put_back()
            for weight, data in memory:
                if is_elsewhere(weight, data):
                    weight.data = data
            self.scaler.forget_iteration()
            self.optimizer.zero_grad(set_to_none=True)
            if not 0 < self._in_vain < IN_VAIN:
                self._in_vain = 0
                self._run_eagerly(f"capture failed: {error}")
            return None
        recorded = Recorded(self._modules)
        self._held = ModuleState(self._modules, read=recorded.modules)
        buffers = dict.fromkeys(each for module in self._modules for each in module.buffers(recurse=False))
        graph = Graph(replay, static, loss, result, [*weights, *buffers], recorded, self._held)
        self._graphs.setdefault(key, []).append(graph)
        return graph

    def _step_and_keep(self, inputs: Any, targets: Any, held: ModuleState) -> tuple[torch.Tensor, StepResult]:
        """A step to be recorded, at whose end the tensors that it has replaced are where it found them."""
        made = self._step(inputs, targets)
        if others := self._carried.take(held):
            raise _SetsError(f"a step sets {listed([each.name for each in others], 3)}, and a replay runs no Python")
        return made

    def _say_full(self, key: Any) -> None:
        """Say once that there are no more graphs, and which hyper-parameters have changed from graph to graph."""
        if self._has_said_full:
            return
        self._has_said_full = True
        every = [dict.fromkeys(seen[2]) for seen in (*self._graphs, key)]
        changed = sorted({name for one in every for name, value in one if (name, value) not in every[0]})
        changed += sorted(self._changing)
        if any(len(graphs) > 1 for graphs in self._graphs.values()) and not self._changing:
            changed.append("what the model reads of Python")
        log.warning(
            "GraphedStep has its %d graphs; what needs another one runs eagerly.%s%s",
            self.max_graphs,
            f" What changes: {', '.join(changed)}." if changed else "",
            " The optimizer reads its learning rate on the host: use fused=True." if "lr" in changed else "",
        )

    def _replay(self, graph: Graph, leaves: list[Any]) -> torch.Tensor:
        self._in_vain = 0
        take_writes(self.optimizer)
        for buffer, leaf in zip(graph.static, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                buffer.detach().copy_(leaf.detach(), non_blocking=True)
        graph.replay()
        note_step()
        self.last_result = graph.result.replayed()
        if self.scaler.is_enabled():
            self.scaler.observe_replay(self.last_result, self.optimizer)
        return graph.loss.clone()


class _SetsError(RuntimeError):
    """A step sets what a replay would leave as it was."""


def _as_read(value: Any) -> Any:
    """A setting as a step reads it while it is captured: of a tensor on the host its number."""
    is_on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() == 1
    return value.item() if is_on_host else value


def _call(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
