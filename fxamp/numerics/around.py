"""Code around the graphs of a forward that runs as it is written: the op and line where numbers stop being finite."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxamp.capture.locations import is_library_file, user_line_below
from fxamp.model.autocasting import running
from fxamp.model.view_class import part_of
from fxamp.numerics.extent import Extent, extent_of, numbers_in, storage_of
from fxamp.numerics.flow import CallFlow, Made
from fxamp.numerics.losses import floats_in
from fxamp.numerics.origin import UNSET
from fxamp.opnames import canonical_name, dotted_path

_GRAPHS = ("run_part", "trace")
"""What runs a graph, and what captures one."""


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
        self.makers: dict[StorageWeakRef, Made] = {}

    def __enter__(self) -> "Around":
        self.outside, running.view = getattr(running, "view", None), None  # this call may stand in a part of another
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        running.view = self.outside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _looked_at((args, {name: value for name, value in kwargs.items() if name != "out"}))
        source = user_line_below("watch_flow", _GRAPHS) if given is not None else None
        if given is None or source is None:
            return func(*args, **kwargs)
        reads = tuple(extent_of(tensor) for tensor in given)
        causes = tuple(dict.fromkeys(filter(None, map(self._maker_of, given, reads))))
        before = {tensor.grad_fn for tensor in given}
        result = func(*args, **kwargs)
        made = _looked_at(args[:1] if result is None else result) or []  # x[0] = y gives nothing
        part = part_of(getattr(running, "view", None))
        place = (canonical_name(func), source, "" if part is None else part.path)
        for tensor in made:
            found = extent_of(tensor)
            if not found.is_finite:
                is_new = _is_new(place[0], found, reads) and not _is_meant(found, args, kwargs)
                self._note(tensor, Made(*place, found, reads, causes, is_new))
        if self.with_gradients and source:
            self._watch(made, before, functools.partial(Made, *place, reads=reads))
        return result

    def _note(self, tensor: torch.Tensor, made: Made) -> None:
        """Note who made it; fxamp's own casts have no line of the user's, and pass on what they read."""
        if made.source:
            self.flow.made.append(made)
            self.makers[storage_of(tensor)] = made
        elif made.causes:
            self.makers[storage_of(tensor)] = made.causes[0]

    def _maker_of(self, tensor: torch.Tensor, extent: Extent) -> Made | None:
        return None if extent.is_finite else self.makers.get(storage_of(tensor))

    def arrives(self, place: tuple[int, str], value: Any) -> None:
        """An input of a graph, (turn, node)."""
        if isinstance(value, torch.Tensor) and (made := self._makers_in(value)):
            self.flow.arrived[place] = made[0]

    def gives(self, output: Any) -> None:
        """The call is over; of the user's own `autograd.Function`s, of which no op tells, look at the backwards."""
        self.flow.given = self._makers_in(output)
        for node in _nodes_of(floats_in(output), set()) if self.with_gradients else ():
            kind = getattr(node, "_forward_cls", None)
            code = getattr(getattr(kind, "backward", None), "__code__", None)
            if kind is not None and code is not None and not is_library_file(code.co_filename):
                source = f"{code.co_filename}:{code.co_firstlineno}"
                node.register_hook(self._looking(functools.partial(Made, dotted_path(kind), source, "", reads=())))

    def _makers_in(self, value: Any) -> list[Made]:
        tensors = _looked_at(value) or []
        return [made for tensor in tensors if (made := self._maker_of(tensor, extent_of(tensor))) is not None]

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
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return None if any(map(_is_unseen, leaves)) else numbers_in(leaves)


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


def _is_new(op: str, value: Extent, reads: tuple[Extent, ...]) -> bool:
    """Whether an op made a nan or an inf of what had none of that kind; memory as it is found is nobody's."""
    explains = any(read.nans for read in reads) if value.nans else any(not read.is_finite for read in reads)
    return not explains and not op.endswith(UNSET)


def _is_meant(bad: Extent, args: Any, kwargs: Any) -> bool:
    """Whether the infinities stand in the code: a literal, or a mask's, beside its zeros."""
    literals = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, float))
    return not bad.nans and (bad.is_mask or any(map(math.isinf, literals)))
