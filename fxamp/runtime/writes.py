"""How often tensors were written, as autograd counts it, and where they are."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor

_VERSION = operator.attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The count of each: equal to a later one as long as nobody wrote.

    One made under inference_mode counts no writes, and may have been written: it has another each time.
    """
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [object() if tensor.is_inference() else tensor._version for tensor in tensors]


def address_of(tensor: torch.Tensor) -> int:
    """Of a tensor's memory; 0 for a fake one, whose address is none."""
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()
