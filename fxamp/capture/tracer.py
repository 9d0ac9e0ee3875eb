"""Capture by symbolic tracing: an own `fx.Tracer` with explicit weights.

1. GEMM, norm, activation and recurrent modules are traced into, so that weights are values of the graph; modules that
   keep state between calls (batch norm), dropout, and modules with hooks stay `call_module`.
2. With an example call every proxy carries a fake value; Python's `bool`, `len`, iteration and `int` on a value
   that comes from shapes use it, and the source line of each such decision is recorded. What the data decides is
   asked of each call's data, where it hangs on inputs alone, and guessed nowhere.
3. Functions that make tensors (`arange`, `rand`...) become nodes, in-place operators and item assignments stay
   in-place, `torch.no_grad` regions become nodes, and regions where the user switched autocast off are marked.
4. Tracing leaves no mark on the model; attributes that forward sets are outputs of the graph, and what it could not
   repeat (a global that is set, a drawn random number) is an error that names it.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.capture import attention, recurrent
from fxamp.capture.arrays import Arrays
from fxamp.capture.assignments import Assignments
from fxamp.capture.beforehand import Beforehand
from fxamp.capture.captured import answer
from fxamp.capture.creations import Creations, DefaultDevice, traced_sizes, variables_made
from fxamp.capture.data import NOTHING_LEFT_OUT, Answers, DataQuestions, LeftOut
from fxamp.capture.drawn import drawn_at_each_call, frozen, whatever_is_drawn
from fxamp.capture.fake_values import FakeValues
from fxamp.capture.functions import whole_functions
from fxamp.capture.held_tensors import containers_in, paths_by_id, places_read_anew
from fxamp.capture.inputs import CallSpec, twins_among, unflatten_call
from fxamp.capture.kept_items import Kept
from fxamp.capture.leaves import is_leaf
from fxamp.capture.left_out import Openings
from fxamp.capture.lengths import handed_on_with_open_length, lists_parts_of_inputs
from fxamp.capture.live import LiveNumbers
from fxamp.capture.locations import user_frames, user_line
from fxamp.capture.mode_nodes import ModeNodes
from fxamp.capture.numbers import plain_number
from fxamp.capture.outputs import OutputForm, check_no_attributes, flatten_output
from fxamp.capture.places import Place, paths_of_tensors
from fxamp.capture.promotion import Promotion
from fxamp.capture.proxies import (
    SequenceProxy,
    ValueProxy,
    WeightProxy,
    gives_parts,
    kind_of_dictionary,
    opened,
)
from fxamp.capture.questions import Questions
from fxamp.capture.ranks import is_static, note_rank
from fxamp.capture.reads import Reads
from fxamp.capture.recompute import Region
from fxamp.capture.replaced import cells_of_functions, check_called_as_itself
from fxamp.capture.settings import Settings, all_of
from fxamp.capture.state import Cell, flag_cell, switch_cells
from fxamp.capture.surroundings import (
    asked_by_torch_check,
    autocast_device,
    compiled_functions_opened,
    grad_mode_reads,
    honest_questions,
    idle_autocast,
    plain_answers,
    scripted_functions_opened,
    training_reads,
    unrepeatable_randomness,
)
from fxamp.capture.traces import State, untouched
from fxamp.capture.vmapped import index_of_tensors, vmapped_functions
from fxamp.draws import draw
from fxamp.errors import CaptureError, ShardedParameterError
from fxamp.fakes import UNKNOWN, Fakes, is_sharded
from fxamp.module_hooks import has_hooks, hooks_on
from fxamp.paths import attribute_at
from fxamp.switches import kept_switches, switches_found


class SymbolicTracer(fx.Tracer):
    """The tracer behind `capture_symbolic`; one instance traces once."""

    def __init__(
        self,
        root: nn.Module,
        spec: CallSpec,
        example: list[Any] | None,
        fakes: Fakes,
        live: frozenset[Place] = frozenset(),
        again: Answers | None = None,
        left_out: LeftOut = NOTHING_LEFT_OUT,
        may_hide: bool = True,
    ) -> None:
        super().__init__(param_shapes_constant=True)
        self.spec = spec
        many, made = sum(kind != "constant" for kind, _ in spec.leaves), example or ()
        self.example = example = None if example is None else list(example[:many])  # further inputs are added
        self.values = FakeValues(example, fakes)
        self.training: dict[str, bool] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.output_form: OutputForm | None = None
        self.state: tuple[Cell, ...] = ()
        self.settings: Settings | None = None
        self.grad_mode: bool | None = None
        self.attributes: dict[tuple[int | str, str], bool] = {}
        self.gradients_outside = True
        self.device = DefaultDevice()
        self._closes = left_out.closes
        self.openings = Openings(left_out.codes)
        self._live = live
        self._others: frozenset[int] = frozenset()  # likewise of these containers
        self.held_tensors: frozenset[int] = frozenset()  # ids of those in containers that are read at each call
        self._numbers = LiveNumbers(live, self._attribute)
        self.beforehand = Beforehand(
            self, root, fakes, again and again.results, made[many:], self._numbers.decide_on, left_out.functions
        )
        data = DataQuestions(example, again, may_hide)
        self.questions = Questions(
            self._numbers, self._function, example, self.values, data, self.beforehand.run, left_out.codes
        )
        self._tensor_paths: dict[int, str] = {}
        self._weights: dict[str, WeightProxy] = {}
        self._arrays = Arrays()
        self._hooks: dict[int, list[object]] = {}  # id of a module -> those it has before forward runs
        self._modes: ModeNodes | None = None
        self._has_begun = False
        self._reads: Reads | None = None
        self._assignments: Assignments | None = None
        self._opened: nn.Module | None = None
        self._region: Region | None = None
        self._around: list[fx.Graph] = []  # while the graph of one sample is made: the whole one, and those between
        self.device_type = "cpu"

    # ------------------------------------------------------------------------------------------ one trace

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._promotion = Promotion(root, self.values.run)
        held = places_read_anew(root, self._live)
        self.held_tensors = frozenset(paths_by_id(held))
        self._tensor_paths = paths_of_tensors(root) | paths_by_id(held)
        values = (vars(root.get_submodule(path))[name] for path, name in held)
        self._others = frozenset(id(each) for value in values for each in containers_in(value))
        self._hooks = {id(module): hooks_on(module) for module in root.modules()}
        self.device_type = autocast_device(root)
        self._assignments = Assignments(State(root), lambda: not self.is_recording)
        lift, held_places = self._numbers.instead_of, frozenset(held)
        self._reads = Reads(root, lambda: not self.is_recording, lift, self._assignments, held_places)
        with (
            untouched(self._assignments.before),
            self._assignments.noted(),
            grad_mode_reads(self),
            training_reads(root, self.training),
            unrepeatable_randomness(),
            drawn_at_each_call(self),
            kept_switches(),
            torch.enable_grad(),
            idle_autocast(self.device_type),
            attention.plain_paths(),
            whole_functions(self._function, self._checkpointed),
            vmapped_functions(self),
            honest_questions(),
            plain_answers(self),
            compiled_functions_opened(),
            scripted_functions_opened(),
            variables_made(),
            traced_sizes(self),
            Creations(self),
            self._reads.noted(),
        ):
            graph = super().trace(root)
        self._arrays.check()
        if self._reads.names("get_default_device"):
            self.device.note()
        self.questions.forget_needless_counts()
        self.questions.check_messages()
        for node in graph.output_node().all_input_nodes:
            if node.target is draw:
                raise frozen(node)
        if self.output_form is not None and self.output_form.inside_objects:
            graph.output_node().meta[ir.INSIDE_OBJECTS] = self.output_form.inside_objects
        self.state = (
            *self._reads.cells(self._numbers.decided, self.constants.values()),
            *self._cells_of_whole_parts(graph),
            *cells_of_functions(self.root, graph),
        )
        self.settings = all_of(self._reads.settings, self._assignments.before.settings)
        return graph

    def follow(self, function: Callable[..., Any]) -> None:
        """Look at what a function that is part of the trace can read from outside, and write there."""
        if self._reads is not None:
            self._reads.follow(function)

    def _cells_of_whole_parts(self, graph: fx.Graph) -> Iterator[Cell]:
        """What may decide which of the items of a module that stays whole are None."""
        for path in dict.fromkeys(str(node.target) for node in graph.nodes if gives_parts(node)):
            for name, part in self.root.get_submodule(path).named_modules(prefix=path):
                yield from switch_cells(name, part)

    def state_so_far(self) -> tuple[Cell, ...]:
        """What a trace that failed had read of Python's state."""
        flags = (flag_cell(path, flag) for path, flag in self.training.items())
        return (
            () if self._reads is None else (*flags, *self._reads.cells(self._numbers.decided, self.constants.values()))
        )

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        self._has_begun = True
        self._modes = ModeNodes(self.create_node)
        self.graph._graph_namespace.create_name("self", None)  # what generated code calls the module: no value's name
        inputs: list[fx.Proxy] = []
        kinds = [leaf for leaf in self.spec.leaves if leaf[0] != "constant"]
        twins = twins_among(self.example or [])
        for position in range(len(kinds)):
            node = self.create_node("placeholder", f"input_{position}", (), {})
            if self.example is not None:
                node.meta["val"] = self.values.fake(self.example[position])
                self._promotion.after(node)
            is_twin = bool(twins) and twins[position] != position
            inputs.append(inputs[twins[position]] if is_twin else self.proxy(node))
        args, kwargs = unflatten_call(self.spec, inputs)
        forward = self._said_again(self.root, args, kwargs) or self.root.forward
        given = pytree.tree_flatten((args, kwargs))
        assignments, reads = self._assignments, self._reads
        assert assignments is not None and reads is not None

        def run() -> Any:
            result = forward(*args, **kwargs)
            now = pytree.tree_flatten((args, kwargs))
            if now[1] != given[1] or any(new is not old for new, old in zip(now[0], given[0], strict=True)):
                raise CaptureError(
                    "forward writes into a container among its arguments, and a graph holds no such writes"
                )
            self._follow_modes()
            # Items first: what holds them may be replaced, too.
            places: list[tuple[Kept, Any]] = [*reads.take_items(), *assignments.to_be_set()]
            reads.keep_unchanged()
            assignments.check_unread(self.graph, [place.title for place, _ in places])
            kept = pytree.tree_leaves([value for _, value in places])
            for value in kept:
                if issubclass(type(value), fx.Proxy):
                    value.node.meta[ir.KEPT] = True
            check_no_attributes([*given[0], *self._weights.values(), *pytree.tree_leaves(result), *kept])
            flat, self.output_form = flatten_output(result, assignments.before, places, self._others)
            for value in pytree.tree_leaves(flat):
                if issubclass(type(value), fx.Proxy):
                    self.questions.count_items(value)
            return flat

        return run, []

    # --------------------------------------------------------------------------------- hooks of fx.Tracer

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self._opened:
            return False
        return is_leaf(m) or recurrent.is_recurrent(m)  # one whose input has an unknown rank stays whole

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.evaluating:
            return forward(*args, **kwargs)
        try:
            self.path_of_module(m)
        except NameError:
            return forward(*args, **kwargs)  # a module made inside forward: its operations are traced
        if hooks_on(m) != self._hooks.get(id(m), []):
            raise CaptureError(
                f"{user_line()}: forward sets a hook on {self.path_of_module(m)!r} or takes one away, which a graph "
                "would not do. Do to the result what the hook does."
            )
        if self.is_leaf_module(m, ""):
            self._check_whole(m, (args, kwargs))
        instead = None if has_hooks(m) else self._said_again(m, args, kwargs)
        if instead is None:
            return super().call_module(m, forward, args, kwargs)
        self._opened = m
        return super().call_module(m, instead, args, kwargs)

    def _check_whole(self, module: nn.Module, given: Any) -> None:
        """Raise a CaptureError where a module that stays whole would not be called as forward calls it."""
        path = self.path_of_module(module)
        if kind := kind_of_dictionary(given):
            raise CaptureError(
                f"{user_line()}: {path!r} stays whole (hooks on it, or boundaries=) and is given an "
                f"{kind.__qualname__}, and a graph hands on plain dictionaries. Give it what it reads of that."
            )
        assert self._assignments is not None
        self._assignments.check_whole(module, path)

    def _said_again(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """A forward in the place of one that proxies cannot enter, None for any other module."""
        if isinstance(module, torch.jit.ScriptModule):  # its forward is no Python function
            return None
        call = (module, args, kwargs, self.example is not None)
        return recurrent.as_node(*call) or attention.as_node(*call)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self.evaluating or not isinstance(attr_val, torch.Tensor):
            return attr_val
        path = self._tensor_paths.get(id(attr_val))
        if path is None:
            return attr_val
        if path not in self._weights and is_sharded(attr_val):
            line = user_line()
            raise ShardedParameterError(
                f"{line and line + ': '}{path} is sharded, and its forward runs outside of the unit that gathers it. "
                "Name the modules that fully_shard is given: fxamp.convert(model, boundaries=...), then shard."
            )
        return self._weight(path, attr_val)

    def _weight(self, path: str, tensor: torch.Tensor) -> WeightProxy:
        """A tensor that is read at each call: one node, however often and by whichever way forward reaches it."""
        if path not in self._weights:
            node = self.create_node("get_attr", path, (), {})
            node.meta["val"] = self.values.fake(tensor)
            self._weights[path] = WeightProxy(node, self, tensor)
        return self._weights[path]

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        is_of_all = kind in ("get_attr", "placeholder") and self._around
        with self._recording_in(self._around[0] if is_of_all else self.graph):
            node = super().create_node(kind, *args, **kwargs)
        if self._region is not None:
            node.meta[ir.REGION] = self._region
        return node

    @contextlib.contextmanager
    def inside(self, graph: fx.Graph) -> Iterator[None]:
        """Nodes are made in a graph for one sample of what is vmapped; weights and inputs are the whole graph's."""
        self._follow_modes()
        self._around.append(self.graph)
        try:
            with self._recording_in(graph):
                yield
                self._follow_modes()
        finally:
            self._around.pop()

    @contextlib.contextmanager
    def _recording_in(self, graph: fx.Graph) -> Iterator[None]:
        was, self.graph = self.graph, graph
        try:
            yield
        finally:
            self.graph = was

    @contextlib.contextmanager
    def _checkpointed(self, region: Region) -> Iterator[None]:
        """Nodes made inside are recomputed in backward; a region inside a region is part of it."""
        self._follow_modes()  # what the user's code left or entered before the region stays before it
        was, self._region = self._region, self._region or region
        modes = torch.is_grad_enabled(), switches_found()
        try:
            yield
            self._follow_modes()
            now = torch.is_grad_enabled(), switches_found()
            if now != modes:
                what = "the gradient mode" if now[0] != modes[0] else "a switch of torch's"
                raise CaptureError(f"{user_line()}: a checkpointed function leaves {what} changed")
        finally:
            self._region = was

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter(self.questions.items(obj))

    def further_input(self, value: Any) -> fx.Proxy:
        """An input of the graph behind those of the call."""
        graph = self._around[0] if self._around else self.graph
        inputs = graph.find_nodes(op="placeholder")
        assert self.example is not None
        self.example.append(value)
        with graph.inserting_after(inputs[-1]):
            node = self.create_node("placeholder", f"input_{len(inputs)}", (), {})
        node.meta["val"] = self.values.fake(value)
        self._promotion.after(node)
        return self.proxy(node)

    def held_at(self, node: fx.Node) -> Any:
        """What a `get_attr` node stands for."""
        return self.constants.get(str(node.target), attribute_at(self.root, node.target))

    def _function(self, target: Callable[..., Any], args: Any, kwargs: Any) -> fx.Proxy:
        return self.create_proxy("call_function", target, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        kind = SequenceProxy if isinstance(node.meta.get("val"), (tuple, list)) else ValueProxy
        return kind(node, self)

    def create_arg(self, a: Any) -> Any:
        if issubclass(type(a), fx.Proxy):
            if a.node.graph not in (self.graph, *self._around):
                line = user_line()
                said = "a value of one sample leaves the function that is under torch.vmap"
                raise CaptureError(f"{line and line + ': '}{said}")
            return a.node
        if isinstance(a, torch.Tensor):
            return self._constant(a)
        if isinstance(a, PackedSequence):
            return self.create_proxy("call_function", PackedSequence, tuple(a), {}).node
        if isinstance(a, torch.Generator):
            raise CaptureError(f"{user_line()}: forward draws from a torch.Generator, and a graph holds none")
        if isinstance(a, nn.Module):
            raise CaptureError(f"a module ({type(a).__qualname__}) is passed to a function as an argument")
        if type(a) is type(torch.FloatTensor):
            return torch.typename(a)  # which x.type() takes in its place, and a graph can hold
        return super().create_arg(plain_number(a))

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> fx.Proxy:
        self._follow_modes()
        check_called_as_itself(target)
        target, args, kwargs = self._arrays.given(target, args, kwargs)
        kwargs = self.device.given(kind, target, kwargs)
        if self._around:
            target, args = index_of_tensors(target, args)
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **more)
        node = proxy.node
        if (certain := whatever_is_drawn(node)) is not None:
            self.graph.erase_node(node)
            return certain  # type: ignore[return-value]
        node.meta["source"] = user_line()
        if self._closes:
            self.questions.close_operands(proxy)
        called = self.root.get_submodule(str(target)) if kind == "call_module" else None
        note_rank(node, called)
        node.meta["static"] = is_static(node)
        if not torch.is_autocast_enabled(self.device_type):
            node.meta["autocast"] = "off"
        if called is not None:
            node.meta["inplace"] = bool(getattr(called, "inplace", False))
        if self.example is not None:
            self._promotion.before(node)
        for given in handed_on_with_open_length(node):
            self.questions.count_items(self.proxy(given))
        value = self.values.of(node)
        if value is not UNKNOWN:
            node.meta["val"] = value
            self._promotion.after(node)
            proxy = self.proxy(node)
        elif self.example is not None:
            node.meta[ir.GUESS] = self.values.guess(node)
            self._promotion.after(node)
            if not self._closes and all("val" in given.meta for given in node.all_input_nodes):
                self.openings.note(user_frames())
        if value is None and (kind == "call_module" or node.target is operator.getitem):
            self.questions.take_for_none(proxy)
            return None  # type: ignore[return-value]
        if kind == "call_module" and lists_parts_of_inputs(node):
            self.questions.note()
        return proxy if kind != "call_module" else opened(value, proxy)

    def to_bool(self, obj: fx.Proxy) -> bool:
        if asked_by_torch_check():
            return False
        return bool(self.questions.decide(obj, "bool"))

    def _attribute(self, path: str, value: Any) -> fx.Proxy:
        """A proxy of a plain attribute, which is read at each call."""
        node = self.create_node("get_attr", path, (), {})
        node.meta["val"] = value
        return self.proxy(node)

    @property
    def evaluating(self) -> bool:
        """Whether what happens now is no part of forward."""
        return self.values.is_running

    @property
    def has_assigned(self) -> bool:
        """Whether forward has set an attribute by now."""
        return self._assignments is not None and self._assignments.are_any

    @property
    def is_recording(self) -> bool:
        """Whether what happens now is a part of forward."""
        return self._has_begun and not self.evaluating

    def holds_others(self, tensors: Any) -> bool:
        """Whether one of these stands in a container that holds others at each call."""
        return any(id(each) in self.held_tensors for each in tensors)

    def note_attribute(self, tensor: torch.Tensor, name: str) -> None:
        """Note that the model has asked for an attribute of a weight: the graph is for the answer."""
        if (path := self._tensor_paths.get(id(tensor))) is not None and path not in self.constants:
            self.attributes[path, name] = answer(tensor, name)

    # ------------------------------------------------------------------------------------------ constants

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        if self.values.is_fake(tensor):
            raise CaptureError(f"{user_line()}: a fake tensor of the capture leaked into the model")
        path = self._tensor_paths.get(id(tensor))
        if path is None:
            path = f"_constant_{len(self.constants)}"
            self.constants[path] = tensor
            self._tensor_paths[id(tensor)] = path
        return self._weight(path, tensor).node

    def _follow_modes(self) -> None:
        """Make nodes where the user's code switched a mode since the last node."""
        if self._modes is not None and not self.evaluating:
            self._modes.follow()
