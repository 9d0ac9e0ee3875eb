"""Questions about the gradients of an optimizer: where they are, and whether they are finite."""

import dataclasses
import logging
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxamp import words
from fxamp.errors import OptionError
from fxamp.runtime import distributed
from fxamp.runtime.copies import by_kind, copy_on
from fxamp.runtime.writes import versions_of

log = logging.getLogger("fxamp")

NAMED = 8  # parameters listed in a message before it says how many more there are


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All parameters of all groups, in order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def names(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, parameter) pairs; the name is the group's own where the optimizer was given named parameters."""
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for index, parameter in enumerate(group["params"]):
            fallback = f"group {number} parameter {index} {tuple(parameter.shape)}"
            yield (given[index] if given else fallback), parameter


def listed(found: Iterable[str]) -> str:
    """The first names of a list, for a message: listed(["a", "b"]) == "a, b"."""
    return words.listed(found, NAMED)


def check_optimizer(optimizer: object, called: str) -> None:
    """Refuse what has no list of parameter groups, or no step.

    Raises:
        OptionError: names the call and what it was given.
    """
    if not isinstance(getattr(optimizer, "param_groups", None), list) or not hasattr(optimizer, "step"):
        raise OptionError(f"{called} takes an optimizer, got a {type(optimizer).__name__}.")


def has_masters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a MasterWeightOptimizer, or a wrapper that hands on to one."""
    return hasattr(optimizer, "widen_gradients_")


def take_over(optimizer: torch.optim.Optimizer) -> None:
    """Let parameters have the gradients that the user has given their masters, where the optimizer has masters."""
    take = getattr(optimizer, "take_gradients", None)
    if take is not None and has_masters(optimizer):
        take()


def has_any(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter has a gradient."""
    return any(parameter.grad is not None for parameter in parameters(optimizer))


def values_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The stored numbers of a parameter's gradient as one dense real tensor of this rank, or None.

    A sparse fp16 gradient is coalesced first, because adding its duplicates may overflow (torch does the
    same); a DTensor gives its local shard, a complex gradient its real view.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.is_sparse:
        if gradient.dtype is torch.float16 and not gradient.is_coalesced():
            gradient = gradient.float().coalesce().to(torch.float16)
            parameter.grad = gradient
        gradient = gradient._values()
    return local_numbers(gradient)


def summed_values_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """As `values_of`, but rows that a sparse gradient holds several times are added up, 16-bit ones in float32.

    The gradient stays as it is.
    """
    gradient = parameter.grad
    if gradient is None or not gradient.is_sparse or gradient.dtype is torch.float16 or gradient.is_coalesced():
        return values_of(parameter)
    wide = gradient.float() if gradient.dtype is torch.bfloat16 else gradient
    return local_numbers(wide.coalesce()._values())


def local_numbers(gradient: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a dense gradient, as real numbers."""
    gradient = distributed.local(gradient)
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def dense(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """`values_of` every parameter that has a gradient."""
    found = every(optimizer)
    if are_plain(found):
        return found
    return [values_of(parameter) for parameter in parameters(optimizer) if parameter.grad is not None]  # type: ignore[misc]


def every(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients, as they are, of the parameters that have one."""
    return [found for group in optimizer.param_groups for p in group["params"] if (found := p.grad) is not None]


def are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are dense real tensors of torch's own class."""
    dtypes = plain_dtypes(tensors)
    return dtypes is not None and not any(dtype.is_complex for dtype in dtypes)


def plain_dtypes(tensors: Sequence[torch.Tensor | None]) -> set[torch.dtype] | None:
    """The dtypes of dense tensors of torch's own class; None where any is another. Asked of all at once."""
    is_plain = set(map(type, tensors)) <= {torch.Tensor} and set(map(_LAYOUT, tensors)) <= {torch.strided}
    return set(map(_DTYPE, tensors)) if is_plain else None


_LAYOUT, _DTYPE = map(operator.attrgetter, ("layout", "dtype"))


def groups(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The process groups whose ranks have parts of an optimizer's gradients: those of DTensors.

    A rank that has no gradient for a parameter is one of them all the same.
    """
    found = [p if p.grad is None else p.grad for group in optimizer.param_groups for p in group["params"]]
    return distributed.groups_of(found)


def unscale_and_check(
    gradients: Iterable[torch.Tensor],
    inverse_scale: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    looks_after: bool = False,
) -> dict[torch.device, torch.Tensor]:
    """Multiply gradients in place by `inverse_scale` and note per device whether any is inf or NaN.

    One kernel for each device and dtype. It looks at the scaled values.

    Args:
        inverse_scale, found_inf: 0-d float32; found_inf is 0, and is the flag of its own device.
        looks_after: look at the unscaled values too, which a scale below 1 may take out of their range.

    Returns:
        device -> 0-d float32 tensor, 1 where something was not finite.
    """
    given = list(gradients)
    flags: dict[torch.device, torch.Tensor] = {}
    inverses: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        for device, places in by_kind(given):
            same = [given[place] for place in places]
            if device not in flags:
                flags[device] = copy_on(device, found_inf)
                inverses[device] = copy_on(device, inverse_scale)
            torch._amp_foreach_non_finite_check_and_unscale_(same, flags[device], inverses[device])
            if looks_after:
                one = torch.ones_like(inverses[device])
                torch._amp_foreach_non_finite_check_and_unscale_(same, flags[device], one)
    return flags


def check_sums_(optimizer: torch.optim.Optimizer, flags: dict[torch.device, torch.Tensor]) -> None:
    """Note where rows that a sparse gradient holds several times may add up to an inf, which the step would meet.

    To add them up waits for a GPU; the sum of all magnitudes does not, and is no less.
    """
    for parameter in parameters(optimizer):
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and not gradient.is_coalesced():
            values = gradient._values()
            flag = flags[values.device]
            flag.copy_(torch.where(torch.isfinite(values.abs().sum()), flag, torch.ones_like(flag)))


def refuse_half(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    """Refuse fp16 gradients, also complex ones: unscaled in place they would vanish below 2^-24.

    Raises:
        OptionError: names the parameters and the one-line remedy.
    """
    if torch.float16 not in set(map(_DTYPE, gradients)):
        return
    half = [
        name
        for name, parameter in names(optimizer)
        if parameter.grad is not None and parameter.grad.dtype == torch.float16
    ]
    if not half:
        halves = [
            name for name, each in names(optimizer) if each.grad is not None and each.grad.dtype == torch.complex32
        ]
        raise OptionError(
            f"{listed(halves)} have complex32 gradients, whose float16 parts lose everything below 2^-24 when unscaled "
            "in place; keep the parameters complex64."
        )
    raise OptionError(
        f"Attempting to unscale FP16 gradients: {listed(half)} have float16 gradients, which lose "
        "everything below 2^-24 when unscaled in place. Wrap the optimizer, which keeps float32 masters: "
        "optimizer = fxamp.MasterWeightOptimizer(optimizer)"
    )


def warn_of_pure_bfloat16(optimizer: torch.optim.Optimizer) -> None:
    """Log a warning if an optimizer updates bfloat16 parameters directly."""
    pure = [name for name, p in names(optimizer) if p.dtype == torch.bfloat16 and p.requires_grad]
    if pure and not has_masters(optimizer):
        log.warning(
            "%s updates bfloat16 parameters directly (%s): an update below 2^-9 of a weight is lost. Unless it "
            "compensates by itself, wrap it: fxamp.MasterWeightOptimizer(optimizer), or with masters='kahan' or "
            "'stochastic' to save memory.",
            type(optimizer).__name__,
            listed(pure),
        )


def nonfinite_counts(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Parameter -> how many numbers of its gradient are inf or NaN. Reads each device once."""
    found = {parameter: values_of(parameter) for parameter in parameters(optimizer)}
    values = {parameter: each for parameter, each in found.items() if each is not None}
    owners, counts = list(values), [0] * len(values)
    for _, places in by_kind(list(values.values())):
        bad = torch.stack([torch.isfinite(values[owners[place]]).logical_not().sum() for place in places])
        for place, count in zip(places, bad.tolist(), strict=True):
            counts[place] = count
    return dict(zip(owners, counts, strict=True))


def nonfinite_names(optimizer: torch.optim.Optimizer, known: Mapping[torch.Tensor, str]) -> list[str]:
    """Names of the parameters whose gradient holds an inf or a NaN: those in `known`, else the optimizer's own.

    Reads the device.
    """
    counts = nonfinite_counts(optimizer)
    return [known.get(parameter, name) for name, parameter in names(optimizer) if counts.get(parameter)]


@dataclasses.dataclass(frozen=True)
class Stamp:
    """The gradients of an optimizer at one time, without keeping them alive.

    An object has one weak reference as long as somebody holds that; a new gradient has another one, also at the
    address, and with the version, of an old one. So references are compared by identity.
    """

    references: list[weakref.ref[torch.Tensor]]
    versions: list[Any]

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the gradients are still those: neither zeroed, nor replaced, nor accumulated into."""
        now = stamp(optimizer)
        if len(now.references) != len(self.references) or now.versions != self.versions:
            return False
        return all(map(operator.is_, now.references, self.references))


def stamp(optimizer: torch.optim.Optimizer) -> Stamp:
    """The gradients as they are now."""
    found = every(optimizer)
    return Stamp(list(map(weakref.ref, found)), versions_of(found))


def require_grad(outputs: Any) -> bool:
    """Whether a tensor, or any in a list of tensors, requires grad; yes of an iterator, which can be read once."""
    if isinstance(outputs, torch.Tensor):
        return outputs.requires_grad
    return not isinstance(outputs, (list, tuple)) or any(map(require_grad, outputs))
