"""Float32 gradients of 16-bit parameters, which their masters share: `master.grad` is `parameter.grad`, or nothing.

Whoever is given another gradient by the user has it from then on, master or parameter; of two, the master.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, MutableMapping

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fxamp.runtime.copies import is_plain, wide_copies
from fxamp.runtime.flat_copies import WideCopies
from fxamp.runtime.layouts import Layouts
from fxamp.runtime.masters import MASTER, is_low, stored_master
from fxamp.runtime.stand_ins import apart, buckets, give_gradients
from fxamp.runtime.writes import versions_of

_TOGETHER_BYTES = 64 * 2**20  # of float32 gradients made by one copy, while the 16-bit ones are still there

# Of each master: the gradient that this module gave it, so that another one is known to be the user's.
_given: MutableMapping[torch.Tensor, weakref.ref[torch.Tensor]] = WeakIdKeyDictionary()


def widen_gradients_(parameters: Iterable[torch.Tensor]) -> None:
    """Turn the 16-bit gradients of parameters into float32 ones, for their masters too."""
    every = list(parameters)
    take_gradients(every)
    low = [p for p in every if p.grad is not None and is_low(p) and p.grad.dtype == p.dtype]
    together = [p for p in low if is_plain(p.grad)]  # type: ignore[arg-type]
    for bucket in buckets(together, _TOGETHER_BYTES):
        copies = wide_copies([p.grad for p in bucket])  # type: ignore[misc]
        for parameter, copy in zip(bucket, copies, strict=True):
            parameter.grad_dtype = None
            parameter.grad = copy
    for parameter in low:
        if parameter.grad.dtype != torch.float32:  # type: ignore[union-attr]
            parameter.grad_dtype = None
            parameter.grad = parameter.grad.float()  # type: ignore[union-attr]
    for parameter in every:
        mirror_gradient(parameter)


def mark_used(parameters: Iterable[torch.Tensor]) -> None:
    """Note that an optimizer has stepped with these gradients: nobody changes them any more before they are cleared.

    The note is an attribute, for torch exchanges no tensor to which there are weak references (`model.to()` of shards).
    """
    used = [gradient for each in parameters if (gradient := each.grad) is not None and MASTER in each.__dict__]
    for gradient, version in zip(used, versions_of(used), strict=True):
        setattr(gradient, _USED, [version])


def is_used(gradient: torch.Tensor | None) -> bool:
    """Whether a gradient is as it was when an optimizer stepped with it, without another backward."""
    return gradient is not None and getattr(gradient, _USED, None) == versions_of([gradient])


_USED = "_fxamp_used"


def drop_widened(parameters: Iterable[torch.Tensor], set_to_none: bool = True) -> None:
    """Clear widened gradients, so that the next are 16 bits again: none, or 16-bit zeros. Masters have none."""
    masters = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != parameter.dtype:
            parameter.grad = None
            parameter.grad_dtype = dtype = parameter.grad_dtype or parameter.dtype  # the user may want float32 sums
            if not set_to_none:
                parameter.grad = torch.zeros_like(gradient, dtype=dtype, requires_grad=False)
        if (master := getattr(parameter, MASTER, None)) is not None:
            masters.append(master)
    take_back_gradients(masters)


def mirror_gradient(parameter: torch.Tensor) -> None:
    """Give a parameter's master the same float32 gradient, or none if the parameter has none.

    A step that was skipped, or `model.zero_grad()`, would leave the master the gradient of an earlier backward.
    """
    master = stored_master(parameter)
    if master is None:
        return
    gradient = parameter.grad
    if gradient is None or gradient.dtype != torch.float32:
        take_back_gradients([master])
    elif master.grad is not gradient or master not in _given:
        master.grad = gradient
        _given[master] = weakref.ref(gradient)


def take_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """`take_gradient` of many: in the usual case no master has a gradient, or was given one."""
    pairs = [(each, master) for each in parameters if (master := getattr(each, MASTER, None)) is not None]
    if not _given and not any([master.grad is not None for _, master in pairs]):
        return
    for parameter, master in pairs:
        gradient = parameter.grad
        if master.grad is not None or (gradient is not None and gradient.dtype != parameter.dtype):
            take_gradient(parameter)


def take_gradient(parameter: torch.Tensor) -> None:
    """Let a parameter have the gradient that the user has given its master; none, where that was cleared."""
    master = stored_master(parameter)
    if master is None:
        return
    of_master, of_parameter = master.grad, parameter.grad
    is_alike = of_master is of_parameter
    if is_alike or (of_master is None and of_parameter is not None and of_parameter.dtype == parameter.dtype):
        return
    reference = _given.get(master)
    if of_master is None or reference is not None:
        given = None if reference is None else reference()
        if given is None or of_parameter is not given:  # it has had another since: what its master has is older
            return
    if of_master is None:
        del _given[master]
        parameter.grad = None
    else:
        parameter.grad_dtype = None
        parameter.grad = of_master
        _given[master] = weakref.ref(of_master)


@contextlib.contextmanager
def lent_gradients(
    narrow: list[torch.Tensor],
    wide: list[torch.Tensor],
    inverse_scale: torch.Tensor | None,
    layouts: Layouts | None = None,
) -> Iterator[None]:
    """Context: stand-ins have the gradients of their parameters, see `give_gradients`; afterwards none.

    Args:
        layouts: where the gradients lie, for an optimizer that keeps none of them.
    """
    copies = WideCopies(layouts)
    try:
        give_gradients(narrow, wide, inverse_scale, copies.of)
        yield
    finally:
        take_back_gradients(apart(narrow, wide)[1])
        copies.drop()


def take_back_gradients(masters: Iterable[torch.Tensor]) -> None:
    """Leave masters, or what stood in for parameters in their place, no gradient."""
    has_given = len(_given) > 0
    for master in masters:
        master.grad = None
        if has_given:
            _given.pop(master, None)
