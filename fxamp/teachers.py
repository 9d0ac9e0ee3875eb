"""Teachers: frozen copies of what is trained, which follow it by an average of weights.

An average that moves by 0.1 % a step changes no number of 8 or 11 bits, so O2 stores them in float32.

Source: He et al., "Momentum contrast for unsupervised visual representation learning", CVPR 2020.
"""

import collections
from collections.abc import Container, Iterator, Mapping

import torch
from torch import nn

from fxamp.sparse import is_sparse
from fxamp.tree import every_parameter, without_common_end

_NUMBERS = 1024  # of each matrix, by which copies are found
_ENOUGH = 64  # numbers whose correlation is no chance
_ALIKE, _EQUAL = 0.5, 1 - 1e-6  # correlations


def weights_of_teachers(model: nn.Module) -> list[str]:
    """The frozen parameters of modules that are copies of trained ones, or were and have followed them since.

    A frozen matrix that is correlated with a trained one tells where the copy is and of what; the biases and norms
    beside it belong to it. Constant ones (zeros) tell nothing, nor do fake and meta tensors.
    """
    weights = dict(every_parameter(model))
    copies: dict[str, str] = {}
    for copy, original in _pairs(weights):
        copies.setdefault(*without_common_end(copy, original))
    return [name for name, weight in weights.items() if not weight.requires_grad and _is_in(copies, name, weights)]


def _pairs(weights: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, str]]:
    """Frozen matrices and the trained ones that they are most like."""
    groups: collections.defaultdict[object, list[str]] = collections.defaultdict(list)
    for name, weight in weights.items():
        if _holds_numbers(weight):
            groups[weight.shape, weight.dtype, weight.device].append(name)
    for names in groups.values():
        frozen = [name for name in names if not weights[name].requires_grad]
        trained = [name for name in names if weights[name].requires_grad]
        if not (frozen and trained):
            continue
        mine, others = (torch.stack([_numbers(weights[name]) for name in part]) for part in (frozen, trained))
        least = _ALIKE if mine.size(1) >= _ENOUGH else _EQUAL
        best, places = (mine @ others.T).max(1)
        for name, alike, place in zip(frozen, best.tolist(), places.tolist(), strict=True):
            if alike > least:
                yield name, trained[place]


def _holds_numbers(weight: nn.Parameter) -> bool:
    is_plain = type(weight) is nn.Parameter and not weight.is_meta and not is_sparse(weight)  # no fake or sharded one
    return is_plain and weight.is_floating_point() and weight.dim() > 1 and weight.numel() > 0


def _numbers(weight: torch.Tensor) -> torch.Tensor:
    """Some numbers of a matrix, evenly spaced, with mean 0 and norm 1; of constant ones zeros."""
    step = max(1, weight.numel() // _NUMBERS)
    numbers = weight.detach().flatten()[::step][:_NUMBERS].float().nan_to_num(0, 0, 0)
    return nn.functional.normalize(numbers - numbers.mean(), dim=0)


def _is_in(copies: Mapping[str, str], name: str, names: Container[str]) -> bool:
    """Whether a parameter is in one of the copies, and its original has such a one."""
    parts = name.split(".")
    for end in range(len(parts) + 1):
        original = copies.get(".".join(parts[:end]))
        if original is not None and ".".join((*filter(None, [original]), *parts[end:])) in names:
            return True
    return False
