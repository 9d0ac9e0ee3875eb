"""What an optimizer keeps beside its tensors: numbers, texts, and containers of these and of tensors."""

from collections.abc import Callable
from typing import Any

import torch

NUMBERS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
OF_EVERY_OPTIMIZER = ("state", "param_groups", "defaults", "_opt_called")  # noted otherwise, or not of the step
OURS = "_fxamp"  # how attributes begin that are of this package


class OpaqueStateError(Exception):
    """Optimizer state that cannot be copied and compared."""


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a class of torch.optim itself: it keeps nothing on the object, and steps on any numbers."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps on itself (`self.total_steps`)."""
    names = [name for name in vars(optimizer) if name not in OF_EVERY_OPTIMIZER and not name.startswith(OURS)]
    return {name: vars(optimizer)[name] for name in names}


def copied(tree: Any, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return copy_of(tree)
    if isinstance(tree, dict):
        return {key: copied(value, copy_of) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        copies = (copied(value, copy_of) for value in tree)
        return list(copies) if isinstance(tree, list) else tuple(copies)
    if isinstance(tree, NUMBERS) or callable(tree):
        return tree
    if isinstance(tree, set | frozenset) and all(isinstance(each, NUMBERS) for each in tree):
        return set(tree) if isinstance(tree, set) else tree
    raise OpaqueStateError(f"optimizer state holds a {type(tree).__name__}")


def is_same(now: Any, before: Any) -> bool:
    """Whether a tree of host values is unchanged; tensors in it count as unchanged only by identity."""
    if now is before:
        return True
    if type(now) is not type(before) or isinstance(now, torch.Tensor):
        return False
    if isinstance(now, list | tuple):
        return len(now) == len(before) and all(map(is_same, now, before))
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(is_same(now[key], before[key]) for key in now)
    return bool(now == before)
