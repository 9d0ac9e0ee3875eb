"""Run single graph nodes on fake tensors: types and shapes without data, time or side effects."""

import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from fxamp.authors import run_as_cast
from fxamp.draws import draw
from fxamp.dtypes import AUTOCAST_KINDS
from fxamp.errors import FxampError
from fxamp.fake_limits import is_a_limit
from fxamp.function_modes import no_overrides
from fxamp.grouped import GROUPED, like_grouped
from fxamp.leaf_fakes import call_leaf
from fxamp.recurrent_fakes import asks_cudnn, like_recurrent
from fxamp.sparse import is_sparse
from fxamp.sparse_fakes import asks_a_sparse_one, like_compressed, like_sparse, makes_compressed, part_of_sparse

UNKNOWN = object()

# Note on inputs and weights of a graph, or on fakes of them that do not share memory as the real tensors do: equal for
# those that lie in the same memory.
MEMORY = "fxamp_memory"

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
                dtype = self.dtype_of(value)
                if twin.dtype != dtype:
                    with temporarily_clear_interpreter_stack():  # torch.func's transforms allow no requires_grad_
                        twin = twin.detach().to(dtype).requires_grad_(value.requires_grad)
            self._known[id(value)] = found = (twin, value)
        return found[0]

    def dtype_of(self, value: torch.Tensor) -> torch.dtype:
        """The dtype that a real tensor stands for."""
        return self._logical_dtype(value)

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
        with unset_fake_temporarily():  # a module that stays whole runs inside of the mode, which would fake it here
            plain = value.detach()
        twin = self._mode.from_tensor(plain, static_shapes=True)
        with temporarily_clear_interpreter_stack():
            twin.requires_grad_(value.requires_grad)
        if not value.is_leaf:
            with torch.enable_grad():
                return twin.view_as(twin)  # type: ignore[return-value]
        twin._is_param = isinstance(value, nn.Parameter)
        return twin

    def _twin(self, value: torch.Tensor) -> FakeTensor:
        """A fake for another mode's fake tensor (torch.export's), or for one that must not be saved for backward."""
        sizes = [size_of(e) for e in value.shape]
        with self._mode:
            if is_sparse(value):
                twin = like_sparse(value, sizes)
            else:
                strides = [size_of(e) for e in value.stride()]
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
            if asks_a_sparse_one(node.target, args):
                return part_of_sparse(str(node.target), args[0], self._mode)
            if makes_compressed(node.target):
                return like_compressed(node.target, *args, **kwargs)
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
            return call_leaf(self.root, str(node.target), args, kwargs, self.of)


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
    """No torch-function overrides, no autocast, and no log of what a meta kernel refuses."""
    was = _log.disabled
    kinds = [kind for kind in AUTOCAST_KINDS if torch.is_autocast_enabled(kind)]
    try:
        _log.disabled = True
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        with no_overrides():
            yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        _log.disabled = was
