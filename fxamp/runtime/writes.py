"""How often tensors were written, as autograd counts it."""

import operator
from collections.abc import Sequence
from typing import Any

import torch

_VERSION = operator.attrgetter("_version")


def versions_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The count of each: equal to a later one as long as nobody wrote.

    One made under inference_mode counts no writes, and may have been written: it has another each time.
    """
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return [object() if tensor.is_inference() else tensor._version for tensor in tensors]
