"""Code around the graphs of a forward that runs as it is written: the op and line where numbers stop being finite."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxamp.capture.locations import is_library_file, user_line_below
from fxamp.model.seen import running
from fxamp.model.view_class import part_of
from fxamp.numerics.extent import Extent, extent_of
from fxamp.numerics.flow import CallFlow, Made
from fxamp.numerics.losses import floats_in
from fxamp.opnames import canonical_name, dotted_path

_GRAPHS = ("run_part", "trace")
"""What runs a graph, and what captures one."""
_UNSET = ("empty", "empty_like", "empty_strided", "empty_permuted", "resize_", "resize_as_")
"""What gives memory as it is found."""


class Around(TorchFunctionMode):
    """Notes in `flow` what ops that stand in no graph make of finite numbers, forward and backward, and is not.

    Torch's own functions are one op, as the user has written them. Dynamo would take a mode into its graphs: it is for
    forwards that run as they are written alone.

    Args:
        flow: of the call.
        with_gradients: a backward will run.
    """

    def __init__(self, flow: CallFlow, with_gradients: bool) -> None:
        super().__init__()
        self.flow = flow
        self.with_gradients = with_gradients
        self.known: set[Node] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _looked_at((args, kwargs))
        source = user_line_below("watch_flow", _GRAPHS) if given is not None else None
        if given is None or source is None:
            return func(*args, **kwargs)
        reads = tuple(extent_of(tensor) for tensor in given)
        before = {tensor.grad_fn for tensor in given}
        result = func(*args, **kwargs)
        made = _looked_at(result) or []
        part = part_of(getattr(running, "view", None))
        place = (canonical_name(func), source, "" if part is None else part.path)
        bad = next((found for found in map(extent_of, made) if not found.is_finite), None)
        if (
            bad is not None
            and not place[0].endswith(_UNSET)
            and all(read.is_finite for read in reads)
            and not _is_written(bad, args, kwargs)
        ):
            self.flow.made.append(Made(*place, bad, reads))
        if self.with_gradients:
            self._watch(made, before, functools.partial(Made, *place, reads=reads))
        return result

    def watch_functions(self, output: Any) -> None:
        """Look at the backwards of the user's own `autograd.Function`s, of which no op tells."""
        for node in _nodes_of(floats_in(output), set()):
            kind = getattr(node, "_forward_cls", None)
            code = getattr(getattr(kind, "backward", None), "__code__", None)
            if kind is not None and code is not None and not is_library_file(code.co_filename):
                source = f"{code.co_filename}:{code.co_firstlineno}"
                node.register_hook(self._looking(functools.partial(Made, dotted_path(kind), source, "", reads=())))

    def _watch(self, made: list[torch.Tensor], before: set[Node | None], noted: Callable[..., Made]) -> None:
        """Look at what the op's own nodes of autograd make of gradients."""
        for node in _nodes_of(made, self.known | before):
            self.known.add(node)
            node.register_hook(self._looking(noted))

    def _looking(self, noted: Callable[..., Made]) -> Callable[..., None]:
        """A hook on a node of autograd: notes what it passes back of finite gradients, and is not."""

        def look(given_back: tuple[Any, ...], came: tuple[Any, ...]) -> None:
            if self.flow.unmade is None and all(extent.is_finite for extent in _extents(came)):
                bad = next((found for found in _extents(given_back) if not found.is_finite), None)
                self.flow.unmade = None if bad is None else noted(bad, is_gradient=True)

        return look


def _looked_at(values: Any) -> list[torch.Tensor] | None:
    """The floating tensors among them; None where one holds no numbers to look at: a capture's, a transform's, or of
    several shapes."""
    tensors = floats_in(values)
    return None if any(map(_is_unseen, tensors)) else tensors


def _is_unseen(tensor: torch.Tensor) -> bool:
    is_empty_handed = isinstance(tensor, FakeTensor) or tensor.is_meta or is_functorch_wrapped_tensor(tensor)
    return is_empty_handed or tensor.is_nested


def _extents(gradients: tuple[Any, ...]) -> Iterator[Extent]:
    return (extent_of(tensor) for tensor in floats_in(gradients))


def _nodes_of(made: list[torch.Tensor], stops: set[Any]) -> Iterator[Node]:
    """What autograd holds between results and what was there before; not the leaves."""
    frontier = [tensor.grad_fn for tensor in made]
    seen = set(stops)
    while frontier:
        node = frontier.pop()
        if node is not None and node not in seen and node.name() != "torch::autograd::AccumulateGrad":
            seen.add(node)
            yield node
            frontier += [following for following, _ in node.next_functions]


def _is_written(bad: Extent, args: Any, kwargs: Any) -> bool:
    """Whether the infinities are meant: a literal of the code, or a mask's, beside its zeros."""
    literals = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, float))
    return not bad.nans and ((bad.is_mask and bad.low is not None) or any(map(math.isinf, literals)))
