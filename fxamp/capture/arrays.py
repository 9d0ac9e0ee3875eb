"""Arrays of numpy that forward gives to torch, as an index or to make a tensor of: a graph holds tensors."""

import operator
from typing import Any

import torch

from fxamp.capture.numbers import is_numpys
from fxamp.errors import CaptureError

_TENSOR = torch.tensor  # a trace patches torch's
_TAKING_ARRAYS = frozenset({operator.getitem, operator.setitem, torch.as_tensor, torch.asarray})


class Arrays:
    """The arrays of one trace. The tensors share their memory: what is written into an array is in the next call."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[Any, bytes, torch.Tensor]] = {}  # by id: the array, what it held, its tensor

    def given(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """A call of torch's that takes arrays as one that takes tensors; any other call as it is."""
        if target is _TENSOR and args and _is_array(args[0]) and "pin_memory" not in kwargs:
            target, kwargs = torch.asarray, {**kwargs, "copy": True}  # tensor() warns of a tensor
        if target in _TAKING_ARRAYS:
            args = tuple(tuple(map(self._tensor, arg)) if type(arg) is tuple else self._tensor(arg) for arg in args)
        return target, args, kwargs

    def check(self) -> None:
        """Raise a CaptureError where forward has written into an array behind a call that took it."""
        if any(array.tobytes() != before for array, before, _ in self._met.values()):
            raise CaptureError(
                "forward writes into a numpy array that it has given to torch, which a graph would not do"
            )

    def _tensor(self, value: Any) -> Any:
        if not _is_array(value):
            return value
        if id(value) not in self._met:
            self._met[id(value)] = value, value.tobytes(), torch.as_tensor(value, device="cpu")
        return self._met[id(value)][-1]


def _is_array(value: Any) -> bool:
    return is_numpys(value) and bool(value.ndim)
