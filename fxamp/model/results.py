"""Low results of a forward that runs as it is written, in the dtype in which a graph would give them."""

import collections
import copy
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.capture.outputs import attributes_held, holds_results, is_plain
from fxamp.dtypes import LOW_DTYPES


class Results:
    """Makes results what they are to be, each once.

    What containers and dataclasses hold are results, and what the object holds that forward returns itself: as in
    `fxamp.capture.outputs`. An object in which a tensor is another now is a copy, for the model may hold it, too.

    Args:
        dtype: of results that are low.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._made: dict[int, Any] = {}  # by the id of what forward has returned
        self._seen: list[Any] = []  # which is kept: a pytree may make its leaves, and another would have the id

    def of(self, returned: Any) -> Any:
        """What the call gives where forward has returned this."""
        if pytree.tree_is_leaf(returned) and is_plain(returned):
            return self._object(returned)
        return pytree.tree_map(self._leaf, returned)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):  # of a class that pytree does not know
            return self._mapping(value)
        return self._object(value) if holds_results(type(value)) else value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in LOW_DTYPES:
            return tensor
        if id(tensor) not in self._made:
            self._seen.append(tensor)
            self._made[id(tensor)] = in_dtype(self._dtype, tensor)
        made: torch.Tensor = self._made[id(tensor)]
        return made

    def _mapping(self, value: dict[Any, Any]) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        self._seen.append(value)
        self._made[id(value)] = value  # what holds itself
        kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        held = dict(kind.items(value))
        parts = {name: pytree.tree_map(self._leaf, part) for name, part in held.items()}
        if all(_are_one(part, held[name]) for name, part in parts.items()):
            return value
        made = self._made[id(value)] = type(value).__new__(type(value))  # past what its class makes of a look
        for name, part in parts.items():
            kind.__setitem__(made, name, part)
        if (own := getattr(value, "__dict__", None)) is not None:
            replaced = {id(held[name]): part for name, part in parts.items()}
            is_own_namespace = own is value
            own = {name: replaced.get(id(part), part) for name, part in own.items()}
            made.__dict__ = made if is_own_namespace else own
        return made

    def _object(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._seen.append(value)
            self._made[id(value)] = value  # what holds itself
            parts = {name: pytree.tree_map(self._leaf, part) for name, part in attributes_held(value).items()}
            others = {name: part for name, part in parts.items() if not _are_one(part, getattr(value, name))}
            if others:
                made = self._made[id(value)] = copy.copy(value)
                for name, part in others.items():
                    object.__setattr__(made, name, part)
        return self._made[id(value)]


def _are_one(made: Any, part: Any) -> bool:
    return all(one is other for one, other in zip(pytree.tree_leaves(made), pytree.tree_leaves(part), strict=True))


def in_dtype(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in another dtype, with what Python code has set on it: `y.aux = ...`."""
    # Forward may have switched gradients on where the caller has not.
    with torch.set_grad_enabled(torch.is_grad_enabled() or tensor.requires_grad):
        made = tensor.to(dtype)
    if type(tensor) is torch.Tensor:
        vars(made).update(vars(tensor))
    return made
