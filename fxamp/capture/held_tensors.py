"""Containers of tensors that are attributes of modules, and others at each call: `self.hidden = h, c`.

A graph reads each of their tensors at each call, as it reads a tensor that is an attribute itself, at a path with the
key behind the name: `encoder.hidden[0]`. It is for containers of the same make, with tensors of the same types.
"""

import collections
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from fxamp.capture.elements import MOST, SCALARS
from fxamp.capture.places import Place, paths_of_tensors
from fxamp.paths import module_at

_DEPTH = 4  # containers in containers


class _Unheld(Exception):
    """It is no such container."""


def tensors_held(value: Any) -> dict[str, torch.Tensor]:
    """The tensors of a container, by what is behind its name in their paths; none where it may not be read anew."""
    try:
        return dict(_tensors(value, "", _DEPTH))
    except _Unheld:
        return {}


def make_of(value: Any) -> tuple[Any, ...] | None:
    """A stand-in that is equal for containers of which one graph may read the tensors; None for anything else."""
    try:
        return _make(value, {}, _DEPTH)
    except _Unheld:
        return None


def paths_by_id(held: Mapping[Place, Mapping[str, torch.Tensor]]) -> dict[int, str]:
    """id of each tensor that `places_read_anew` gives -> its path."""
    return {id(tensor): path for tensors in held.values() for path, tensor in tensors.items()}


def is_named_tuple(kind: type) -> bool:
    """Whether it is a class of named tuples, which hold nothing else."""
    return kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def containers_in(value: Any) -> list[Any]:
    """A container of tensors, and those in it."""
    parts = () if isinstance(value, (*SCALARS, torch.Tensor)) else _parts(value, _DEPTH)
    return [value, *(inner for _, part in parts for inner in containers_in(part))] if parts else []


def places_read_anew(root: nn.Module, places: Set[Place]) -> dict[Place, dict[str, torch.Tensor]]:
    """Of these attributes, those of which a graph may read the tensors at each call, and these by their paths.

    No tensor stands in two places, for the graph would read it in one and be asked for the other; nor do two have one
    path, where an attribute is named like an item.
    """
    found, paths = {}, paths_of_tensors(root)
    for place in sorted(places):
        try:
            value = vars(module_at(root, place[0])).get(place[1])
        except KeyError:  # the module is gone
            continue
        if make_of(value) is not None:
            title = ".".join(filter(None, place))
            found[place] = {f"{title}{keys}": tensor for keys, tensor in tensors_held(value).items()}
    counts = collections.Counter(id(tensor) for tensors in found.values() for tensor in tensors.values())
    counts.update(paths.keys())
    is_alone, names = {number for number, count in counts.items() if count == 1}, set(paths.values())
    return {
        place: each
        for place, each in found.items()
        if each and is_alone.issuperset(map(id, each.values())) and names.isdisjoint(each)
    }


def _tensors(value: Any, path: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor) and path:
        yield path, value
    elif not isinstance(value, SCALARS):
        for key, part in _parts(value, depth):
            yield from _tensors(part, f"{path}[{key!r}]", depth - 1)


def _parts(value: Any, depth: int) -> list[tuple[Any, Any]]:
    if not depth or not isinstance(value, (tuple, list, dict)) or len(value) > MOST:
        raise _Unheld
    if type(value) in (tuple, list) or is_named_tuple(type(value)):
        return list(enumerate(value))
    if type(value) is dict and all(type(key) is int or (type(key) is str and key.isidentifier()) for key in value):
        return list(value.items())
    raise _Unheld


def _make(value: Any, first: dict[int, int], depth: int) -> tuple[Any, ...]:
    if isinstance(value, SCALARS):
        return (type(value), value)
    if not isinstance(value, torch.Tensor):
        parts = _parts(value, depth)
        return (type(value), *((key, _make(part, first, depth - 1)) for key, part in parts))
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided
    if not is_plain or is_functorch_wrapped_tensor(value) or not all(map(_is_dynamos, vars(value))):
        raise _Unheld
    number = first.setdefault(id(value), len(first))  # one tensor may stand in two places
    return (torch.Tensor, value.dtype, value.shape, value.device, value.stride(), number)


def _is_dynamos(name: str) -> bool:
    """Whether an attribute of a tensor is one that torch.compile has left there."""
    return name.startswith("_dynamo_")
