"""Arguments of a part that an override denies: low tensors among them, as what is around it makes them, come in
float32, also where they stand in lists, dictionaries and tuples.
"""

import operator
from typing import Any

import torch
from torch import nn

from fxamp.errors import OptionError
from fxamp.runtime.masters import is_stored_low

_MOST = 2**14  # elements of a container that is looked into


def computes_in_float32(module: nn.Module) -> bool:
    """Whether a module that an override denies wants float32: one whose weights the user keeps low does not."""
    return all(weight.dtype == torch.float32 or is_stored_low(weight) for weight in module.parameters())


class WideArguments:
    """The arguments of one call.

    Lists and dictionaries stay the caller's own, which may keep and return them: they hold float32 tensors for the time
    of the call, and low ones again afterwards, but for what the call has put there. What it writes into a tensor, the
    caller's has afterwards.

    Args:
        low: the dtype of tensors that come in float32.
        title: how a message names the part.
    """

    def __init__(self, low: torch.dtype, title: str) -> None:
        self._low, self._title = low, title
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by id: low, float32, its version
        self._put: list[tuple[Any, Any, Any]] = []  # (container, what stood there, what stands there now)
        self._met: dict[int, Any] = {}  # containers

    def of(self, value: Any) -> Any:
        """What stands for an argument."""
        if isinstance(value, torch.Tensor):
            return self._wide(value) if value.dtype == self._low else value
        if isinstance(value, tuple):
            parts = [self.of(part) for part in tuple.__iter__(value)]
            return value if all(map(operator.is_, parts, tuple.__iter__(value))) else _tuple_like(value, parts)
        if isinstance(value, (list, dict)) and id(value) not in self._met:
            self._met[id(value)] = value
            for key, part in _items(value):
                if (wide := self.of(part)) is not part:
                    self._put.append((value, part, wide))
                    _set(value, key, wide)
            self.of(getattr(value, "__dict__", None))  # an output of transformers' has its items there, too
        return value

    def put_back(self) -> None:
        """Let the caller's containers hold what they held, wherever the call has put nothing else."""
        own = {id(wide): part for _, part, wide in self._put}
        for container in {id(container): container for container, _, _ in self._put}.values():
            for key, part in _items(container):
                if id(part) in own:
                    _set(container, key, own[id(part)])

    def take_back(self) -> None:
        """Let the caller's tensors have what was written into those that were given.

        Raises:
            OptionError: another argument lies in the same memory, and was to see it at once.
        """
        for low, wide, version in self._tensors.values():
            if wide._version == version:
                continue
            if any(other is not low and _overlap(low, other) for other, _, _ in self._tensors.values()):
                raise OptionError(
                    f"{self._title}, which an override denies, writes into an argument whose memory another one "
                    "shares. Give it copies (x.clone()), or deny what calls it, too."
                )
            with torch.set_grad_enabled(torch.is_grad_enabled() and not (low.is_leaf and low.requires_grad)):
                low.copy_(wide)

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._tensors:
            if torch.is_inference_mode_enabled():  # whose tensors count no writes
                with torch.inference_mode(False), torch.no_grad():
                    wide = tensor.float()
            else:
                wide = tensor.float()
            self._tensors[id(tensor)] = tensor, wide, wide._version
        return self._tensors[id(tensor)][1]


def _items(container: Any) -> list[tuple[Any, Any]]:
    """By the methods of Python's own class: that of the user's may forbid the question."""
    if isinstance(container, dict):
        items = list(dict.items(container))
    else:
        items = list(enumerate(list.__iter__(container)))
    return items if len(items) <= _MOST else []


def _set(container: Any, key: Any, value: Any) -> None:
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


def _tuple_like(value: Any, parts: list[Any]) -> Any:
    """A tuple of the same class, past what that makes of its arguments."""
    try:
        made: Any = tuple.__new__(type(value), parts)
    except TypeError:  # one of C's
        return type(value)(parts)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have elements in common."""
    if one.layout is not torch.strided or other.layout is not torch.strided:
        return False
    storage = one.untyped_storage()
    if storage.data_ptr() != other.untyped_storage().data_ptr():
        return False
    marks = torch.zeros(storage.nbytes() // one.element_size(), dtype=torch.bool, device="cpu")
    marks.as_strided(one.size(), one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.size(), other.stride(), other.storage_offset()).any())
