"""Lets an optimizer see float32 tensors in the place of 16-bit parameters, for the length of a call."""

import itertools
import operator
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from fxamp.dtypes import LOW_DTYPES
from fxamp.runtime import gradients
from fxamp.runtime.copies import by_kind, copy_on, is_plain, wide_copies

# torch's optimizers that treat each parameter by itself: stepping them bucket by bucket changes nothing.
ELEMENTWISE_NAMES = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"),
)
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in ELEMENTWISE_NAMES if hasattr(torch.optim, name))


class StandIns:
    """Context: the optimizer's groups and state hold `wide` in place of `narrow`, and no other parameter.

        with StandIns(optimizer, optimizer.param_groups, [weight], [master]):
            optimizer.step()                           # updates master, with state keyed by it

    The lists in the groups are changed in place, because some optimizers (L-BFGS) keep a reference to them.

    Args:
        optimizer: its `param_groups` are `groups` meanwhile.
        groups: one or more of its groups.
        narrow, wide: pairs, in the order of the groups; a parameter may stand for itself.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: list[dict[str, Any]],
        narrow: list[torch.Tensor],
        wide: list[torch.Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._pairs = list(zip(narrow, wide, strict=True))
        self._all_groups: list[dict[str, Any]] = []
        self._whole: list[list[torch.Tensor]] = []

    def __enter__(self) -> "StandIns":
        self._all_groups = self._optimizer.param_groups
        self._whole = [list(group["params"]) for group in self._groups]
        if len(self._groups) == 1:  # of many buckets each is a small part of a group
            self._groups[0]["params"][:] = [stand_in for _, stand_in in self._pairs]
        else:
            chosen = {id(parameter): stand_in for parameter, stand_in in self._pairs}
            for group, parameters in zip(self._groups, self._whole, strict=True):
                group["params"][:] = [chosen[id(p)] for p in parameters if id(p) in chosen]
        _rekey(self._optimizer.state, self._pairs)
        self._optimizer.param_groups = self._groups
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._optimizer.param_groups = self._all_groups
        for group, parameters in zip(self._groups, self._whole, strict=True):
            group["params"][:] = parameters
        _rekey(self._optimizer.state, [(stand_in, parameter) for parameter, stand_in in self._pairs])


def apart(narrow: list[torch.Tensor], wide: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters that do not stand for themselves, and their stand-ins."""
    are = list(map(operator.is_not, narrow, wide))
    return list(itertools.compress(narrow, are)), list(itertools.compress(wide, are))


def buckets(parameters: list[torch.Tensor], nbytes: int) -> Iterator[list[torch.Tensor]]:
    """Split parameters that have gradients, in order, so that float32 copies of a bucket fit in `nbytes`.

    A single larger parameter is a bucket of its own.
    """
    bucket: list[torch.Tensor] = []
    filled = 0
    for parameter in parameters:
        if parameter.grad is None:
            continue
        size = 4 * parameter.numel()
        if bucket and filled + size > nbytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += size
    if bucket:
        yield bucket


def step_of_each(optimizer: torch.optim.Optimizer) -> Callable[[], Any] | None:
    """The optimizer's step without its hooks, if calling it once a bucket is the same as calling it once.

    None for every class that is not torch's own and elementwise, and where somebody has put a step of his own on it.
    """
    step: Any = type(optimizer).step
    if type(optimizer) not in ELEMENTWISE or _step_on(optimizer) not in (None, step):
        return None
    bare = step.__wrapped__ if getattr(step, "hooked", False) else step
    return lambda: bare(optimizer)


def _step_on(optimizer: torch.optim.Optimizer) -> Any:
    """The function behind a step that was put on this optimizer, below what learning rate schedulers put there."""
    step: Any = vars(optimizer).get("step")
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return getattr(step, "__func__", step)


def give_gradients(
    narrow: list[torch.Tensor],
    wide: list[torch.Tensor],
    inverse_scale: torch.Tensor | None,
    copies_of: Callable[[list[torch.Tensor]], list[torch.Tensor]] = wide_copies,
) -> None:
    """Give each stand-in the float32 gradient of its parameter, times `inverse_scale` (0-d float32).

    A parameter that stands for itself has its gradient multiplied in place.

    Args:
        copies_of: gives float32 copies of dense gradients.
    """
    values = _widened(narrow, wide, copies_of)
    if inverse_scale is not None:
        for device, places in by_kind(values):
            torch._foreach_mul_([values[place] for place in places], copy_on(device, inverse_scale))


def _widened(
    narrow: list[torch.Tensor],
    wide: list[torch.Tensor],
    copies_of: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Give stand-ins float32 copies of gradients, those of a device and dtype by one multi-tensor copy.

    Returns:
        What the gradients of `wide` are now, as `gradients.values_of` has them.
    """
    found = list(map(_GRAD, narrow))
    dtypes = gradients.plain_dtypes(found)
    if dtypes is not None and dtypes <= _LOW and not any(map(operator.is_, narrow, wide)):  # in a few passes of C
        for stand_in, copy in zip(wide, copies := copies_of(found), strict=True):
            stand_in.grad = copy
        return copies
    stand_ins: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    others: list[torch.Tensor | None] = []
    for parameter, stand_in in zip(narrow, wide, strict=True):
        gradient = parameter.grad
        if stand_in is parameter:
            others.append(gradients.values_of(parameter))
        elif gradient is None:
            stand_in.grad = None  # a master may have that of an earlier backward
        elif gradient.dtype == torch.float32 or not is_plain(gradient):
            stand_in.grad = gradient.float()
            others.append(gradients.values_of(stand_in))
        else:
            stand_ins.append(stand_in)
            sources.append(gradient)
    copies = copies_of(sources)
    for stand_in, copy in zip(stand_ins, copies, strict=True):
        stand_in.grad = copy
    return copies + [each for each in others if each is not None]


def _rekey(state: dict[Any, Any], pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for old, new in pairs:
        if old is not new and (kept := state.pop(old, _NOTHING)) is not _NOTHING:
            state[new] = kept


_NOTHING = object()
_GRAD = operator.attrgetter("grad")
_LOW = frozenset(LOW_DTYPES)
