"""What a MasterWeightOptimizer can be given: its arguments, and the states that it loads."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fxamp.errors import OptionError, nearest
from fxamp.runtime.arguments import check_needs_no_closure
from fxamp.runtime.copies import is_plain
from fxamp.runtime.gradients import has_masters, parameters
from fxamp.runtime.masters import is_low
from fxamp.runtime.optimizer_trees import is_torchs, own_attributes
from fxamp.runtime.stand_ins import ELEMENTWISE
from fxamp.runtime.writes import versions_of

MODES = ("fp32", "kahan", "stochastic")
LIKE_THEIR_PARAMETERS = frozenset(set(ELEMENTWISE) - {torch.optim.Adafactor})
"""Optimizers whose state is of 0-d tensors and of tensors of the parameter's shape."""


def check_arguments(optimizer: Any, masters: Any, bucket_bytes: Any) -> None:
    """Refuse arguments of the constructor.

    Raises:
        OptionError: says which, and what is allowed.
    """
    if has_masters(optimizer):
        raise OptionError("The optimizer is a MasterWeightOptimizer already; use it as it is.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(f"MasterWeightOptimizer takes a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    _refuse_around(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptionError(
            "the optimizer is differentiable=True, and nothing goes back through masters and their rounding. Keep the "
            "parameters float32 (opt_level='O1') and use it as it is."
        )
    if masters not in MODES:
        raise OptionError(
            f"masters={masters!r} is not a mode. Allowed: {', '.join(MODES)}.{nearest(str(masters), MODES)}"
        )
    if not isinstance(bucket_bytes, int) or isinstance(bucket_bytes, bool) or bucket_bytes < 1:
        raise OptionError(
            f"bucket_bytes={bucket_bytes!r} must be a whole number >= 1, of bytes; a parameter that is larger is a "
            "bucket of its own."
        )


def check_apart(every: Iterable[torch.Tensor]) -> None:
    """Refuse 16-bit parameters that share numbers, of which each would have a master of its own.

    Raises:
        OptionError: gives their shapes.
    """
    different = {id(each): each for each in every if is_low(each)}.values()
    low = [each for each in different if is_plain(each.detach()) and each.is_contiguous()]
    spans: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
    for each in low:
        if each.numel() and (address := each.data_ptr()):
            spans.setdefault(each.untyped_storage().data_ptr(), []).append((address, address + each.nbytes, each))
    for found in spans.values():
        found.sort(key=lambda span: span[:2])
        for (_, end, first), (start, _, second) in itertools.pairwise(found):
            if start < end:
                raise OptionError(
                    f"two parameters, of shapes {tuple(first.shape)} and {tuple(second.shape)}, share memory, and each "
                    "would have a master of its own, which undoes the other's updates. Give the optimizer one of them."
                )


def _refuse_around(optimizer: torch.optim.Optimizer) -> None:
    groups = getattr(type(optimizer), "param_groups", None)
    is_settable = not isinstance(groups, property) or groups.fset is not None
    if is_settable and hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
        return
    name = type(optimizer).__name__
    inner = [type(value).__name__ for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    about = f"is around the {inner[0]}" if inner else "did not call Optimizer.__init__"
    raise OptionError(
        f"MasterWeightOptimizer cannot wrap {name}: it {about}, so that its groups and state are not its own to hold "
        f"masters. Keep the parameters float32 (opt_level='O1') and use {name} as it is"
        + (f", or wrap the {inner[0]} and go without {name}." if inner else ".")
    )


def own_list(optimizer: torch.optim.Optimizer) -> str:
    """The attribute in which an optimizer keeps 16-bit parameters beside its groups, "" for none."""
    low = {id(parameter) for parameter in parameters(optimizer) if is_low(parameter)}
    shared = {id(group["params"]) for group in optimizer.param_groups}  # L-BFGS keeps the group's own list
    for name, value in own_attributes(optimizer).items() if low else ():
        if any(id(tensor) in low for tensor in _tensors_in(value, shared)):
            return name
    return ""


def whole_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
    """The optimizer's step with these arguments behind the closure, to call while masters stand in its groups.

    What it keeps elsewhere it would update past them, which nothing else would show: the parameters take the masters'
    values afterwards, and are never trained.

    Raises:
        OptionError: of the call: it has written into 16-bit parameters.
    """
    step = functools.partial(optimizer.step, *([None, *args] if args else []), **kwargs)
    name = "" if is_torchs(optimizer) else own_list(optimizer)
    if not name:
        return step
    low = [parameter for parameter in parameters(optimizer) if is_low(parameter)]

    def watched() -> Any:
        before = versions_of(low)
        returned = step()
        if versions_of(low) != before:
            raise OptionError(
                f"MasterWeightOptimizer cannot wrap {type(optimizer).__name__}: it steps parameters that it keeps in "
                f"an attribute of its own, {name!r}, past the masters in its groups. Keep the parameters float32 "
                "(opt_level='O1') and use it as it is."
            )
        return returned

    return watched


def _tensors_in(value: Any, shared: set[int], depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and id(value) not in shared and isinstance(value, list | tuple | set | frozenset | Mapping):
        inside = [*value, *value.values()] if isinstance(value, Mapping) else value
        for each in inside:
            yield from _tensors_in(each, shared, depth - 1)


def check_group(group: Any) -> None:
    """Refuse what is no group of parameters; what is in one, torch checks.

    Raises:
        OptionError: says what was given instead.
    """
    if not isinstance(group, dict) or group.get("params") is None:
        known = f"a dict with {', '.join(map(repr, group)) or 'nothing'}" if isinstance(group, dict) else repr(group)
        raise OptionError(
            f'add_param_group() got {known[:200]}; it takes a dict such as {{"params": layer.parameters(), "lr": 0.1}}.'
        )


def check_step_arguments(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments beside the closure for a step that takes none.

    Raises:
        OptionError: names the first, and the optimizer.
    """
    if not args and not kwargs:
        return
    try:
        inspect.signature(optimizer.step).bind(None, *args, **kwargs)
    except TypeError as error:
        given = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
        name = type(optimizer).__name__
        raise OptionError(f"step() was given {given[0]}, which {name} does not take: {error}.") from error


def check_closure(optimizer: torch.optim.Optimizer, closure: Any) -> None:
    """Refuse what cannot be called, and nothing where the optimizer needs a closure."""
    if closure is None:
        check_needs_no_closure(optimizer, "step() without a closure")
    elif not callable(closure):
        raise OptionError(f"closure={closure!r} must be a function that re-evaluates the model and returns the loss.")


def check_is_state(state: Any) -> None:
    """Refuse what is no dict at all.

    Raises:
        OptionError: says what was given instead.
    """
    if not isinstance(state, Mapping):
        raise OptionError(
            f"load_state_dict() got a {type(state).__name__}; it takes what optimizer.state_dict() returns."
        )


def check_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse a state that is no state of such an optimizer; classes with a `load_state_dict` of their own check theirs.

    Raises:
        OptionError: says what it lacks, or which group is of another model.
    """
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    missing = [repr(key) for key in ("state", "param_groups") if key not in state]
    if missing:
        raise OptionError(
            f"the state has no {' and no '.join(missing)}; it has {sorted(map(str, state))[:8]}. load_state_dict() "
            "takes what optimizer.state_dict() returns."
        )
    for key, kind in (("state", Mapping), ("param_groups", list | tuple)):
        if not isinstance(state[key], kind):
            raise OptionError(f"{key!r} is a {type(state[key]).__name__} in the state: no optimizer's state dict.")
    given, own = state["param_groups"], optimizer.param_groups
    if len(given) != len(own):
        raise OptionError(
            f"the state has {len(given)} groups, the optimizer has {len(own)}: add_param_group() them first."
        )
    for number, (theirs, mine) in enumerate(zip(given, own, strict=True)):
        indices = theirs.get("params") if isinstance(theirs, Mapping) else None
        if not isinstance(indices, list | tuple):
            raise OptionError(f"group {number} of the state has no list of 'params': no optimizer's state dict.")
        if len(indices) != len(mine["params"]):
            raise OptionError(
                f"group {number} of the state is of {len(indices)} parameters, of the optimizer of "
                f"{len(mine['params'])}: the state is another model's."
            )
        for index, parameter in zip(indices, mine["params"], strict=True):
            _check_entry(optimizer, index, state["state"].get(index, {}), parameter)


def _check_entry(optimizer: torch.optim.Optimizer, index: object, entry: Any, parameter: torch.Tensor) -> None:
    """torch loads numbers of any shape, and a fused step reads them past their end."""
    if not isinstance(entry, Mapping):
        raise OptionError(f"the state of parameter {index} is a {type(entry).__name__}, not a dict.")
    if type(optimizer) not in LIKE_THEIR_PARAMETERS:
        return
    for key, value in entry.items():
        if key != "step" and isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
            raise OptionError(
                f"{key!r} of parameter {index} has shape {tuple(value.shape)} in the state, the parameter has "
                f"{tuple(parameter.shape)}: the state is another model's."
            )


def group_keys(optimizer: torch.optim.Optimizer) -> list[set[str]]:
    """What the optimizer gives each of its groups, without what a scheduler adds to them."""
    return [optimizer.defaults.keys() & group.keys() for group in optimizer.param_groups]


def check_groups(loaded: Iterable[Mapping[str, Any]], keys: Iterable[set[str]]) -> None:
    """Refuse groups as another optimizer's state has them: torch takes any of as many parameters, and the step fails.

    Args:
        loaded: after the optimizer's `__setstate__`, which gives them what older versions did not have.
        keys: the optimizer's `group_keys()` before.

    Raises:
        OptionError: says what they lack.
    """
    for number, (group, wanted) in enumerate(zip(loaded, keys, strict=True)):
        if missing := sorted(wanted - group.keys()):
            raise OptionError(f"group {number} has no {', no '.join(missing)}: the state is another optimizer's.")
