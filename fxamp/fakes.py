"""Run single graph nodes on fake tensors: types and shapes without data, time or side effects."""

import contextlib
import copy
import logging
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from fxamp.authors import run_as_cast
from fxamp.draws import draw
from fxamp.errors import CaptureError, FxampError
from fxamp.grouped import GROUPED, like_grouped
from fxamp.ir import ENGINE
from fxamp.recurrent_fakes import asks_cudnn, like_recurrent, without_cudnn
from fxamp.references import copy_slots, repointed

UNKNOWN = object()

# Note on inputs and weights of a graph, or on fakes of them that do not share memory as the real tensors do: equal for
# those that lie in the same memory.
MEMORY = "fxamp_memory"

# Attribute of a copy that runs in a module's place: the module.
TWIN_OF = "_fxamp_twin_of"

# What torch keeps in each module: tensors, parts and hooks, each with a rule of its own.
_OF_TORCH = frozenset(vars(nn.Module()))

# Modules that may write into their input and say so: `inplace=True`.
_WRITERS = (nn.modules.dropout._DropoutNd,)

# Takes a uint8 condition, as torch still does, and fake tensors do not -> which of its arguments that is.
_WHERE: dict[Any, int] = {torch.where: 0, "where": 1, torch.Tensor.where: 1}

_log = logging.getLogger("torch._subclasses.fake_tensor")


class Fakes:
    """Fake values of one model's tensors, and what single nodes give on them.

    Args:
        root: the module whose parameters and leaf modules the nodes use; never written to.
        logical_dtype: the dtype a real tensor stands for, where that is not its own (a parameter that was lowered
            to half still stands for a float32 one).
        mode: the fake mode to run in; None: an own one.
    """

    def __init__(
        self,
        root: nn.Module,
        logical_dtype: Callable[[torch.Tensor], torch.dtype] = lambda tensor: tensor.dtype,
        mode: FakeTensorMode | None = None,
    ) -> None:
        self.root = root
        self._logical_dtype = logical_dtype
        self._mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[int, Any] = {}

    def in_mode(self, mode: FakeTensorMode) -> "Fakes":
        """Others of the same model, in another fake mode."""
        return Fakes(self.root, self._logical_dtype, mode)

    def of(self, value: Any) -> Any:
        """The fake twin of a real tensor; anything else as it is."""
        if not isinstance(value, torch.Tensor) or self.made(value):
            return value
        found = self._known.get(id(value))
        if found is None:
            with quietly():
                twin: torch.Tensor = self._twin(value) if isinstance(value, FakeTensor) else self._plain(value)
                dtype = self._logical_dtype(value)
                if twin.dtype != dtype:
                    with temporarily_clear_interpreter_stack():  # torch.func's transforms allow no requires_grad_
                        twin = twin.detach().to(dtype).requires_grad_(value.requires_grad)
            self._known[id(value)] = found = (twin, value)
        return found[0]

    def seen(self, value: Any) -> Any:
        """The fake twin of a tensor, and a number for a size, where those vary."""
        return size_of(value) if isinstance(value, torch.SymInt) else self.of(value)

    def made(self, value: torch.Tensor) -> bool:
        """Whether a tensor is one of these fakes, and not the user's own."""
        return getattr(value, "fake_mode", None) is self._mode

    def _plain(self, value: torch.Tensor) -> FakeTensor:
        if is_sharded(value):  # stands for what the unit that owns it gathers
            with self._mode:
                whole = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            return whole.requires_grad_(value.requires_grad)  # type: ignore[return-value]
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            with temporarily_clear_interpreter_stack():  # a tensor of a transform's level stands for one of its sizes
                return self._twin(value)
        if value.is_inference():
            twin = self._twin(value)
            setattr(twin, MEMORY, memory_of(value))
            return twin
        owner = value if value._base is None else value._base
        if owner.is_leaf and owner.grad is not None:
            return self._without_gradient(value)
        with warnings.catch_warnings():
            # torch reads `.grad` of a tensor with a history, and hides its warning only after filters had their say.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor", category=UserWarning)
            return self._mode.from_tensor(value, static_shapes=True)

    def _without_gradient(self, value: torch.Tensor) -> FakeTensor:
        """A fake for a tensor that has a gradient, or for a view of one.

        `from_tensor` fakes the gradient too, and fails where its dtype is another one, as LossScaler.unscale_ leaves
        it at a low parameter.
        """
        twin = self._mode.from_tensor(value.detach(), static_shapes=True)
        with temporarily_clear_interpreter_stack():
            twin.requires_grad_(value.requires_grad)
        if not value.is_leaf:
            with torch.enable_grad():
                return twin.view_as(twin)  # type: ignore[return-value]
        twin._is_param = isinstance(value, nn.Parameter)
        return twin

    def _twin(self, value: torch.Tensor) -> FakeTensor:
        """A fake for another mode's fake tensor (torch.export's), or for one that must not be saved for backward."""
        sizes, strides = [size_of(e) for e in value.shape], [size_of(e) for e in value.stride()]
        with self._mode:
            twin = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return twin.requires_grad_(value.requires_grad)  # type: ignore[return-value]

    def lowered(self, value: Any, dtype: torch.dtype) -> Any:
        """A fake value with its float32 tensors in `dtype`."""
        with self._mode:
            moved = lambda part: part.to(dtype) if part.dtype == torch.float32 else part  # noqa: E731
            return pytree.tree_map_only(torch.Tensor, moved, value)

    def run(self, node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
        """What a call node gives for its arguments' fake values.

        What autograd alone refuses (a write into a leaf, or into a piece that `chunk` gives) has a value too: calls
        without gradients may do it, and to others torch says it again when the graph runs. What fails for another
        reason is not asked again: a module may do something else where gradients are off.

        Raises:
            Exception: whatever torch raises for these shapes; `is_a_limit` tells a limit of fake tensors.
        """
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values)
        try:
            return self._run(node, args, kwargs)
        except RuntimeError as error:
            if is_a_limit(error) or isinstance(error, FxampError):
                raise
            with torch.no_grad():
                return self._run(node, args, kwargs)

    def _run(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with quietly(), _kept_randomness(), self._mode:
            if node.target in _WHERE:
                args, kwargs = _with_bool_condition(args, kwargs, _WHERE[node.target])
            if not kwargs and asks_cudnn(node.target, args):
                return like_recurrent(*args)
            if node.target is draw:
                return 0.0  # nothing reads it
            if node.target in GROUPED:
                return like_grouped(*args, **kwargs)
            if node.op == "call_function":
                return run_as_cast(node.target, args, kwargs)  # type: ignore[arg-type]
            if node.op == "call_method":
                return getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return self._call_module(str(node.target), args, kwargs)

    def _call_module(self, path: str, args: Any, kwargs: Any) -> Any:
        """Call a leaf module's plain forward (no hooks) on a copy of it whose state is fake.

        Raises:
            CaptureError: it writes into an argument, or fails without its hooks.
        """
        module = self.root.get_submodule(path)
        containers: dict[int, Any] = {}
        args, kwargs = _own_containers((args, kwargs), containers)  # those of a graph's node refuse to be written
        twin = _without_counting(twin_of(module, self.of, containers))
        held = _held_by((args, kwargs))
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        before = [value._version for value in given]
        try:
            with without_cudnn(module):
                result = twin.forward(*args, **kwargs)
        except Exception as error:
            if is_a_limit(error) or not _needs_hooks(module, given):
                raise
            raise CaptureError(
                f"{path!r} has hooks, and without them it fails ({error}), as a graph is made without running them. "
                "Mark the hooks with @torch.compiler.disable, and use capture='auto' or 'dynamo', which runs them."
            ) from error
        if [value._version for value in given] != before and not isinstance(module, _WRITERS):
            raise CaptureError(
                f"{path!r} stays whole (hooks on it, or boundaries=) and writes into an argument, which the graph "
                "around it cannot see. Return the new value from it instead."
            )
        if _held_by((args, kwargs)) != held:
            raise CaptureError(
                f"{path!r} stays whole (hooks on it, or boundaries=) and adds to or changes a list or dictionary that "
                "it is given, which the graph around it cannot see. Return the new value from it instead."
            )
        if _holds_any(result, set(map(id, containers.values()))):
            raise CaptureError(
                f"{path!r} stays whole (hooks on it, or boundaries=) and gives back a list or dictionary that it is "
                "given or keeps, and writes into that are none of a graph's. Return a new one from it instead."
            )
        return result


def holds_container(arguments: Any) -> bool:
    """Whether a list or dictionary is among arguments, which the module that is given it may write."""
    if isinstance(arguments, (list, dict)):
        return True
    return isinstance(arguments, tuple) and any(map(holds_container, arguments))


# Containers that are copied -> what the copy is: those of a graph's arguments refuse to be written.
_COPIED: dict[type, Any] = {
    **{kind: kind for kind in (list, dict, set, deque, OrderedDict, defaultdict, Counter)},
    immutable_list: list,
    immutable_dict: dict,
}


def _own_containers(value: Any, known: dict[int, Any]) -> Any:
    """The same values in containers that may be written.

    Args:
        known: by the id of each container that was met: the one in its place.
    """
    if type(value) is tuple:
        return tuple(_own_containers(each, known) for each in value)
    if (kind := _COPIED.get(type(value))) is None:
        return value
    if id(value) not in known:
        own: Any = copy.copy(value) if kind is type(value) else kind(value)
        known[id(value)] = own
        places = list(own) if isinstance(own, dict) else range(len(own)) if not isinstance(own, set) else ()
        for place in places:
            own[place] = _own_containers(own[place], known)
    return known[id(value)]


def _holds_any(value: Any, containers: set[int]) -> bool:
    """Whether a value is, or has in it, one of these lists and dictionaries, by id."""
    if id(value) in containers:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds_any(part, containers) for part in parts)


def _held_by(value: Any) -> Any:
    """What lists and dictionaries hold: equal as long as those hold the same objects."""
    if isinstance(value, (list, tuple)):
        return list(map(_held_by, value))
    if isinstance(value, dict):
        return [(name, _held_by(each)) for name, each in value.items()]
    return id(value)


def _without_counting(twin: nn.Module) -> nn.Module:
    """The twin, with a momentum for batch norms that average over all batches: their number, which no fake has,
    decides on no size or dtype."""
    for part in twin.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.momentum is None:
            part.momentum = 0.0
    return twin


def _needs_hooks(module: nn.Module, given: list[torch.Tensor]) -> bool:
    """Whether hooks may be what a call lacks; arguments of several dtypes are a reason to fail of their own."""
    dtypes = {value.dtype for value in given if value.is_floating_point()}
    return len(dtypes) < 2 and bool(module._forward_pre_hooks or module._forward_hooks)


def twin_of(module: nn.Module, state_of: Callable[[Any], Any], containers: dict[int, Any]) -> nn.Module:
    """A copy of a module and of those inside it, with other tensors in the places of its parameters and buffers.

    What forward sets is set on the copy, and what it puts into lists and dictionaries of the module into the copy's, so
    that other threads can run the module meanwhile. Converted models in it
    run the forwards that the user wrote. Hooks are the same ones; those that are methods of the module become the
    copy's. A module of torch.jit, whose tensors cannot be exchanged, is copied as it is.

    Args:
        state_of: gives the tensor to put in the place of a parameter or buffer.
        containers: takes the module's containers, by their ids, and those in their places.
    """
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    compiled = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    twins: dict[int, nn.Module] = {id(part): object.__new__(type(part)) for part in parts}
    twins.update((id(part), copy.deepcopy(part)) for part in compiled)
    for part in parts:
        own = {name: repointed(value, twins) for name, value in part.__dict__.items() if name != ENGINE}
        own.update((name, _own_containers(own[name], containers)) for name in own.keys() - _OF_TORCH)
        for name in ("_parameters", "_buffers"):
            own[name] = {key: state_of(value) for key, value in part.__dict__[name].items()}
        twins[id(part)].__dict__.update(own, **{TWIN_OF: part})
        copy_slots(part, twins[id(part)])
    return twins[id(module)]


def _with_bool_condition(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> tuple[Any, dict[str, Any]]:
    """The arguments of a `where`, with a uint8 condition read as torch's real kernels read it."""

    def read(value: Any) -> Any:
        return value.bool() if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 else value

    positional = tuple(read(value) if number == place else value for number, value in enumerate(args))
    return positional, {name: read(value) if name == "condition" else value for name, value in kwargs.items()}


def memory_of(value: Any) -> object:
    """A key that views of one tensor have in common; fakes of them have one in common too."""
    if isinstance(value, torch.Tensor):
        try:
            return value.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # sparse, or of a torch.func transform
            pass
    return "itself", id(value)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one rank's part of a DTensor."""
    return type(tensor).__name__ == "DTensor"


def size_of(extent: int | torch.SymInt) -> int:
    """A size as a number; a symbolic one counts as the size it was seen with."""
    if isinstance(extent, int):
        return extent
    hint = extent.node.hint
    return int(hint) if isinstance(hint, int) else 1


@contextlib.contextmanager
def _kept_randomness() -> Iterator[None]:
    """Leave Python's generator as it is: modules that stay whole may draw, and torch numbers fake collectives so."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No torch-function overrides, no autocast, no random state moved, and no log of what a meta kernel refuses."""
    was = _log.disabled
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    try:
        _log.disabled = True
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        with torch._C.DisableTorchFunction():
            yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        _log.disabled = was


def is_a_limit(error: Exception) -> bool:
    """Whether an error tells what fake tensors cannot do, rather than a mistake in the model."""
    text = str(error)
    kind = type(error).__module__
    return (
        "fake_tensor" in kind
        or "_subclasses" in kind
        or "symbolic_shapes" in kind
        or isinstance(error, NotImplementedError)
        or "FakeTensor" in text
        or "fake modes" in text
        or "meta tensor" in text
        or "Meta" in text
        or "data-dependent" in text
        or "data is not allocated" in text
        or ("dtype" in text and _is_raised_by_meta(error))
    )


def is_foreign(target: Any) -> bool:
    """Whether a node's target is not torch's: what it raises on fake tensors tells nothing about the model."""
    if isinstance(target, str):
        return False
    if isinstance(getattr(target, "__self__", None), type):  # `apply` of a custom autograd.Function
        return is_foreign(target.__self__)
    module = str(getattr(target, "__module__", "torch") or "torch")
    return module.partition(".")[0] not in ("torch", "_operator", "builtins")


def _is_raised_by_meta(error: Exception) -> bool:
    """Whether a meta kernel refused: about dtypes some are stricter than the real kernels (`_grouped_mm`)."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith("_meta_registrations.py"):
            return True
        trace = trace.tb_next
    return False
