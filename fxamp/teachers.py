"""Teachers: frozen copies of what is trained, which follow it by an average of weights.

An average that moves by 0.1 % a step changes no number of 8 or 11 bits, so O2 stores them in float32.

Source: He et al., "Momentum contrast for unsupervised visual representation learning", CVPR 2020.
"""

import collections
from collections.abc import Container, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from fxamp.sparse import is_sparse

_SAMPLE = 4  # numbers by which equal weights are found


def weights_of_teachers(model: nn.Module) -> list[str]:
    """The frozen parameters of modules that begin as copies of trained ones.

    A frozen matrix that equals a trained one tells where the copy is and of what; the biases and norms beside it belong
    to it. One whose first numbers are the same (zeros) tells nothing, nor do fake and meta tensors.
    """
    weights = {name: weight for name, weight in model.named_parameters() if not is_sparse(weight)}
    trained: collections.defaultdict[object, list[str]] = collections.defaultdict(list)
    frozen: dict[str, object] = {}
    for name, weight in weights.items():
        if (sample := _sample(weight)) is not None:
            trained[sample].append(name) if weight.requires_grad else frozen.update({name: sample})
    copies: dict[str, str] = {}
    for name, sample in frozen.items():
        same = (other for other in trained[sample] if torch.equal(weights[name], weights[other]))
        if (original := next(same, None)) is not None:
            copy, original = _without_common_end(name, original)
            copies.setdefault(copy, original)
    return [name for name, weight in weights.items() if not weight.requires_grad and _is_in(copies, name, weights)]


def _sample(weight: torch.Tensor) -> object:
    """Shape, dtype, device and the first numbers of a matrix; None of any other tensor, or where these are the same."""
    is_matrix = weight.dim() > 1 and weight.numel() > 1 and type(weight) is nn.Parameter
    if not is_matrix or weight.is_meta or isinstance(weight.data, FakeTensor):
        return None
    numbers = weight.detach()[(0,) * (weight.dim() - 1)][:_SAMPLE].tolist()
    return None if len(set(numbers)) < 2 else (weight.shape, weight.dtype, weight.device, *numbers)


def _without_common_end(copy: str, original: str) -> tuple[str, str]:
    """Paths of the modules in which two parameters have the same place."""
    ours, theirs = copy.split("."), original.split(".")
    while ours and theirs and ours[-1] == theirs[-1]:
        ours.pop()
        theirs.pop()
    return ".".join(ours), ".".join(theirs)


def _is_in(copies: Mapping[str, str], name: str, names: Container[str]) -> bool:
    """Whether a parameter is in one of the copies, and its original has such a one."""
    parts = name.split(".")
    for end in range(len(parts) + 1):
        original = copies.get(".".join(parts[:end]))
        if original is not None and ".".join((*filter(None, [original]), *parts[end:])) in names:
            return True
    return False
