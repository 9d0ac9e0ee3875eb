"""How often tensors were written, as autograd counts it, and where they are."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

_VERSION = operator.attrgetter("_version")
EXPIRED = torch.UntypedStorage._expired  # of a `StorageWeakRef.cdata`


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


class Memory:
    """The memory of a tensor. What is freed may come back at the same address: then it is another."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address = address_of(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def is_of(self, tensor: torch.Tensor) -> bool:
        return address_of(tensor) == self.address and not EXPIRED(self.storage.cdata)
