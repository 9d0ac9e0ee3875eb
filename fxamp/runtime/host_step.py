"""Steps that the host decides: disabled scalers, and optimizers that take a closure."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fxamp.errors import OptionError, nearest
from fxamp.runtime import distributed, gradients
from fxamp.runtime.arguments import check_needs_no_closure
from fxamp.runtime.device_skip import owner_of
from fxamp.runtime.optimizer_trees import NUMBERS, is_torchs, own_attributes
from fxamp.runtime.step_result import StepResult, plain_result

if TYPE_CHECKING:
    from fxamp.runtime.scaler import LossScaler

Closure = Callable[[], Any]


class _OverflowInClosure(Exception):
    """Leaves an optimizer's step from inside its closure."""


def take_closure(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], closure: Closure | None, kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], Closure | None]:
    """A closure may come by name or, as torch's optimizers take it, first by position, before other arguments.

    By name also where the optimizer's step has another name for it: `kwargs` loses it then.

    Raises:
        OptionError: two closures, or one that cannot be called; something else for a step that takes a closure alone;
            none for one that needs it.
    """
    if is_torchs(getattr(optimizer, "optimizer", optimizer) if gradients.has_masters(optimizer) else optimizer):
        _refuse_others(optimizer, args, kwargs)
    # What a signature says takes as long as a small kernel; only a keyword asks for it.
    if kwargs and closure is None and not args and callable(kwargs.get(name := _first_argument(optimizer))):
        closure = kwargs.pop(name)
    given = [each for each in (*args, closure) if callable(each)]
    if closure is not None and (len(given) != 1 or not callable(closure)):
        raise OptionError(
            f"closure={closure!r} cannot be called: it is a function of no arguments that returns the loss."
            if not callable(closure)
            else "step() was given two closures, by position and as closure=; pass one."
        )
    if closure is None and args and callable(args[0]):
        return args[1:], args[0]
    if closure is None and not args:
        check_needs_no_closure(optimizer, "step() without a closure")
    return (args[1:] if closure is not None and args[:1] == (None,) else args), closure


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called before or after a step, which may look at gradients: on it, inside of it, on all."""
    inner = getattr(optimizer, "optimizer", None)
    for each in (optimizer, inner):
        if getattr(each, "_optimizer_step_pre_hooks", None) or getattr(each, "_optimizer_step_post_hooks", None):
            return True
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    return not all(map(_is_ours, hooks))


def _is_ours(hook: Callable[..., Any]) -> bool:
    """This package's look at parameters, or know of the scale."""
    return getattr(hook, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def _first_argument(optimizer: torch.optim.Optimizer) -> str:
    """The name under which an optimizer's step takes its closure."""
    inner = getattr(optimizer, "optimizer", optimizer) if gradients.has_masters(optimizer) else optimizer
    return next(iter(inspect.signature(inner.step).parameters), "closure")


def _refuse_others(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    others = [repr(each) for each in args if each is not None and not callable(each)]
    others += [f"{name}={value!r}{nearest(name, ('closure', 'max_grad_norm'))}" for name, value in kwargs.items()]
    if others:
        raise OptionError(
            f"step() of {type(optimizer).__name__} takes a closure alone, and was given {others[0]}. "
            "Clipping is step(optimizer, max_grad_norm=1.0)."
        )


def plain_step(
    scaler: "LossScaler",
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    closure: Closure | None,
    max_grad_norm: float | None,
    kwargs: dict[str, Any],
) -> StepResult:
    """Clip and step; nothing is scaled and nothing is checked.

    An optimizer with masters clips the float32 gradients that it makes: 16-bit ones would be rounded once more.
    """
    norm: torch.Tensor | None = None
    about = scaler._about(optimizer)

    def clip(divisor: torch.Tensor | None = None) -> torch.Tensor | None:
        nonlocal norm, about
        if max_grad_norm is not None:
            norm, divisor = scaler._clip(optimizer, max_grad_norm, divisor)
            about = scaler._about(optimizer)
        return divisor

    if closure is None and max_grad_norm not in (None, math.inf) and gradients.has_masters(optimizer):
        with _dividing(optimizer, clip(_one(optimizer))):
            returned = optimizer.step(*args, **kwargs)
        about = scaler._about(optimizer)  # float32 gradients have been clipped in place
    elif closure is None:
        clip()
        if not gradients.has_any(optimizer):
            scaler.warn_of_none(optimizer)
        returned = optimizer.step(*args, **kwargs)
    else:

        def evaluate() -> Any:
            nonlocal about
            loss = closure()
            clip()
            about = scaler._about(optimizer)
            return loss

        returned = optimizer.step(evaluate, *args, **kwargs)
    return plain_result(optimizer, about, skipped=False, norm=norm, returned=returned)


def _one(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    first = next(gradients.parameters(optimizer), torch.ones((), device="cpu"))
    return torch.ones((), device=distributed.local(first).device)


@contextlib.contextmanager
def _dividing(optimizer: torch.optim.Optimizer, divisor: torch.Tensor | None) -> Iterator[None]:
    """Context: an optimizer with masters divides gradients by this 0-d tensor."""
    owner = owner_of(optimizer)
    owner.grad_scale = divisor
    try:
        yield
    finally:
        del owner.grad_scale


def step_with_closure(
    scaler: "LossScaler",
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    max_grad_norm: float | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> StepResult:
    """Let an optimizer call `closure` as often as it likes, on unscaled and finite gradients only.

    The first non-finite gradient ends the step: parameters and state get back the values they had, and the
    step counts as skipped. Gradients that stand before the call (SAM's first half) are unscaled too, if
    scale() was called for them.
    """
    state = scaler._per_optimizer_states[id(optimizer)]
    before = _Backup(optimizer)
    norm: torch.Tensor | None = None
    about = scaler._about(optimizer)

    def check(*, is_scaled: bool) -> None:
        nonlocal norm, about
        if is_scaled:
            state["stage"] = OptState.READY
            scaler._unscale_(optimizer, state)
        else:
            scaler._check_inf_per_device(optimizer)
        about = scaler._about(optimizer)
        if any(flag.item() > 0 for flag in state["found_inf_per_device"].values()):
            raise _OverflowInClosure
        if max_grad_norm is not None:
            norm, _ = scaler._clip(optimizer, max_grad_norm, None)
            about = scaler._about(optimizer)
            if scaler._with_norm(state, scaler._no_inf(), norm, max_grad_norm).item() > 0:
                raise _OverflowInClosure

    def evaluate() -> Any:
        calls = scaler._scale_calls
        with torch.enable_grad():
            loss = closure()
        check(is_scaled=scaler._scale_calls > calls)
        return loss

    skipped, returned = False, None
    try:
        if state["stage"] is OptState.READY and scaler._scale_calls > scaler._scale_calls_at_update:
            check(is_scaled=True)
        returned = optimizer.step(evaluate, *args, **kwargs)
    except _OverflowInClosure:
        skipped = True
        before.restore()
    return plain_result(optimizer, about, skipped=skipped, scale=scaler.get_scale(), norm=norm, returned=returned)


class _Backup:
    """Parameters, the optimizer's own state dict and the numbers and tensors that it keeps on itself, to return to."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        masters = getattr(optimizer, "master_params", lambda: ())()
        every = {id(tensor): tensor for tensor in (*gradients.parameters(optimizer), *masters)}
        self._parameters = [(tensor, tensor.detach().clone()) for tensor in every.values()]
        self._state = _cloned(dict(optimizer.state))
        self._groups = [
            {key: _cloned(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        inner = getattr(optimizer, "optimizer", None)
        both = (optimizer, inner) if isinstance(inner, torch.optim.Optimizer) else (optimizer,)
        kept = [(each, name, value) for each in both for name, value in own_attributes(each).items()]
        self._numbers = [(each, name, value) for each, name, value in kept if isinstance(value, NUMBERS)]
        self._tensors = [
            (each, name, value, value.detach().clone()) for each, name, value in kept if isinstance(value, torch.Tensor)
        ]

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            for created in group.keys() - values.keys() - {"params"}:
                del group[created]
            group.update(values)
        for optimizer, name, number in self._numbers:
            vars(optimizer)[name] = number
        for optimizer, name, tensor, value in self._tensors:
            tensor.detach().copy_(value)
            vars(optimizer)[name] = tensor


def _cloned(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _cloned(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_cloned(value) for value in tree)
    return tree
