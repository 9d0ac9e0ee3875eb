"""Arguments of a part that an override denies: low tensors among them, as what is around it makes them, come in
float32, also where they stand in lists, dictionaries and tuples."""

import copy
import operator
from typing import Any

import torch
from torch import nn

from fxamp.runtime.masters import is_stored_low


def computes_in_float32(module: nn.Module) -> bool:
    """Whether a module that an override denies wants float32: one whose weights the user keeps low does not."""
    return all(weight.dtype == torch.float32 or is_stored_low(weight) for weight in module.parameters())


class WideArguments:
    """The arguments of one call; what the call writes into those that it was given, the caller's have afterwards.

    Args:
        low: the dtype of tensors that come in float32. Containers without such tensors are the caller's own.
    """

    def __init__(self, low: torch.dtype) -> None:
        self._low = low
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # (low, float32), by the id of the first
        self._containers: dict[int, tuple[Any, Any, Any]] = {}  # (the caller's, given in its place, a copy of that)

    def of(self, value: Any) -> Any:
        """What stands for an argument."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value) if value.dtype == self._low else value
        if isinstance(value, tuple):
            return _tuple_like(value, [self.of(part) for part in value])
        if isinstance(value, (list, dict)):
            return self._of_container(value)
        return value

    def take_back(self) -> None:
        """Let the caller's tensors and containers have what was written into those that were given."""
        for low, wide in self._tensors.values():
            if not wide.is_inference() and wide._version:
                low.copy_(wide)
        for own, given, before in self._containers.values():
            if given is not own and not _are_same(given, before):
                _fill(own, [(key, self._own(part)) for key, part in _items(given)])

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._tensors.setdefault(id(tensor), (tensor, tensor.float()))[1]

    def _of_container(self, container: Any) -> Any:
        if id(container) in self._containers:  # once more, or in itself
            return self._containers[id(container)][1]
        self._containers[id(container)] = container, container, None
        wide = [(key, self.of(part)) for key, part in _items(container)]
        if all(map(operator.is_, [part for _, part in wide], [part for _, part in _items(container)])):
            return container
        given = copy.copy(container)
        for key, part in wide:
            given[key] = part
        self._containers[id(container)] = container, given, copy.copy(given)
        return given

    def _own(self, part: Any) -> Any:
        """The caller's, where one was given in its place."""
        pairs = [*self._tensors.values(), *((own, given) for own, given, _ in self._containers.values())]
        return next((own for own, given in pairs if given is part), part)


def _items(container: Any) -> list[tuple[Any, Any]]:
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _are_same(one: Any, other: Any) -> bool:
    ones, others = _items(one), _items(other)
    return len(ones) == len(others) and all(
        (key is its_key or key == its_key) and part is its_part
        for (key, part), (its_key, its_part) in zip(ones, others, strict=True)
    )


def _fill(container: Any, items: list[tuple[Any, Any]]) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(part for _, part in items)
    else:
        for key, part in items:
            container[key] = part


def _tuple_like(value: Any, parts: list[Any]) -> Any:
    """A tuple of these; the same one where it has them."""
    if all(map(operator.is_, parts, value)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
