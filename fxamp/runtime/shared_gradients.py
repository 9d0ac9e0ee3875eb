"""Gradients that several optimizers of a scaler share: whoever comes first unscales them, for the others too.

    scaler.step(first)
    scaler.step(second)  # unscales what first has not, and looks at all
    scaler.update()

A gradient is unscaled as long as it is the same tensor, and nobody has written it since as far as autograd counts:
one that was cleared, and that another backward has filled, is scaled again. What is written between unscale_() and
step() is clipping; a scaled backward is seen then (`late_backward`).
"""

import dataclasses
import types
import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fxamp.runtime import gradients
from fxamp.runtime.optimizer_trees import is_torchs
from fxamp.runtime.scaler_state import any_of, combined_found_inf

if TYPE_CHECKING:
    from fxamp.runtime.scaler import LossScaler
    from fxamp.runtime.step_result import StepResult

State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shared:
    """An optimizer's parameters, apart by whether others have unscaled their gradients.

    Attributes:
        unscaled, rest: each has groups, as an optimizer has.
        states: the scaler's of those others whose found_inf counts here, too: gradients were written since, or
            unscaled by a step that may have been left out.
    """

    unscaled: Any
    rest: Any
    states: list[State]


def unscale_rest_(scaler: "LossScaler", shared: Shared) -> dict[torch.device, torch.Tensor]:
    """Unscale what others have not, and look at all; found_inf of each device."""
    inverse, no_inf = scaler._inverse_scale(), scaler._no_inf()
    found = gradients.dense(shared.unscaled)
    with _unsafe_preserve_version_counter(tuple(found)):  # looking multiplies, here by 1
        flags = gradients.unscale_and_check(found, torch.ones_like(inverse), no_inf.clone())
    gradients.check_sums_(shared.unscaled, flags)
    others = [combined_found_inf(state, no_inf.device) for state in shared.states]
    found_inf = any_of([no_inf, *others, *flags.values()], no_inf.device)
    every = scaler._unscale_grads_(shared.rest, inverse, found_inf, scaler.allows_half_gradients)
    return every or {found_inf.device: found_inf}


def left_by(optimizer: torch.optim.Optimizer, result: "StepResult") -> gradients.Stamp | None:
    """An optimizer's gradients as its step has left them; most steps do not write any, which is not asked again."""
    inner = getattr(optimizer, "optimizer", optimizer) if gradients.has_masters(optimizer) else optimizer
    writes = not is_torchs(inner) or inner.defaults.get("nesterov", False)
    return gradients.stamp(optimizer) if writes and not result.has_scaled_gradients else result.stamp


def shared_with_others(scaler: "LossScaler", optimizer: torch.optim.Optimizer, state: State) -> Shared | None:
    """Which of an optimizer's gradients others have unscaled since the last update(); None where that is nothing.

    Raises:
        StepOrderError: after an unscale_() of another a scaled backward has reached what is shared.
    """
    states = scaler._per_optimizer_states
    others = [other for other in states.values() if other is not state and other.get("unscaled") is not None]
    if not others:
        return None
    parameters = _parameters_of(optimizer)
    near = [other for other in others if _may_share(other["optimizer"](), parameters)]
    if not near:
        return None
    owners = [parameter for parameter in gradients.parameters(optimizer) if parameter.grad is not None]
    mine = gradients.stamp(optimizer)
    places = {id(reference): place for place, reference in enumerate(mine.references)}
    ids: set[int] = set()
    counting = []
    for other in near:
        found = _unscaled_by(scaler, other, mine, places)
        ids.update(id(owners[place]) for place in found)
        if any(found.values()) or (found and _unscales_itself(other)):
            counting.append(other)
    return Shared(_part(optimizer, ids, True), _part(optimizer, ids, False), counting) if ids else None


def _may_share(other: torch.optim.Optimizer | None, parameters: frozenset[int]) -> bool:
    """Whether another optimizer, which may be gone, has any of the parameters of these ids."""
    return other is None or not parameters.isdisjoint(_parameters_of(other))


def _parameters_of(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """Ids of an optimizer's parameters, looked at anew where their number has changed: each step asks for them."""
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    known = _known.get(optimizer)
    if known is None or known[0] != lengths:
        known = _known[optimizer] = lengths, frozenset(map(id, gradients.parameters(optimizer)))
    return known[1]


_known: MutableMapping[torch.optim.Optimizer, tuple[list[int], frozenset[int]]] = weakref.WeakKeyDictionary()


def _unscaled_by(scaler: "LossScaler", other: State, mine: gradients.Stamp, places: dict[int, int]) -> dict[int, bool]:
    """Where among `mine` are gradients that another optimizer has unscaled, and whether they were written since."""
    found, theirs = {}, other["unscaled"]
    for reference, version in zip(theirs.references, theirs.versions, strict=True):
        place, gradient = places.get(id(reference)), reference()
        if place is None or gradient is None or (_unscales_itself(other) and gradient.dtype.itemsize == 2):
            continue  # of 16-bit ones it has unscaled copies
        if version == mine.versions[place]:
            found[place] = False
        elif other.get("has_mixed_gradients"):
            raise scaler._order_error(
                "unscaling",
                "these gradients are shared with another optimizer, after whose unscale_() a backward of another "
                "scaled loss has reached them, so they are scaled again in part: unscale after the last backward()",
            )
        elif other["stage"] is OptState.UNSCALED:
            found[place] = True
    return found


def _unscales_itself(state: State) -> bool:
    """Whether an optimizer with masters has unscaled in its step."""
    result: StepResult | None = state.get("result")
    return result is not None and result.has_scaled_gradients


def _part(optimizer: torch.optim.Optimizer, ids: set[int], are_these: bool) -> Any:
    """The groups of an optimizer with the parameters of these ids alone, or without them."""
    groups = []
    for group in optimizer.param_groups:
        kept = [place for place, parameter in enumerate(group["params"]) if (id(parameter) in ids) is are_these]
        lists = {name: group[name] for name in ("params", "param_names") if group.get(name)}
        groups.append({"params": [], **{name: [each[place] for place in kept] for name, each in lists.items()}})
    return types.SimpleNamespace(param_groups=groups)
