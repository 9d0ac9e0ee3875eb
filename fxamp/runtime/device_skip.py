"""Run an optimizer's step so that it has no effect when a gradient was not finite, decided on the device.

A flag in host memory (CPU training) is simply looked at: nothing waits, and a skipped step is not called. For a
flag on a GPU there are three ways, tried in this order:

1. `kernel`: the optimizer takes a `found_inf` tensor (torch's fused Adam, AdamW, SGD, Adagrad; the
   master-weight optimizer). Free.
2. `device`: parameters and state are copied, the step runs, and the copies are selected back where found_inf
   is set. Costs one transient copy of the stepped parameters and their state (Adam: 12 bytes a float32
   parameter), an eighth of it (at least 64 MiB), and a few passes over it. An optimizer of another package sees
   ones in place of the gradients of such a step (a decomposition of NaN raises), which takes a copy of them too.
   What the host changed meanwhile (Python counters, host tensors such as Adam's `step` beside CUDA parameters,
   state created in this step) is put back at the next step, when the answer has long arrived: the host never
   waits for the step it has just launched.
3. `host`: state made of objects that cannot be copied, an optimizer around another: found_inf is read, as
   torch.amp.GradScaler does.
"""

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo

from fxamp import recorded
from fxamp.runtime import distributed, gradients
from fxamp.runtime.copies import Skipped, copy_on
from fxamp.runtime.optimizer_trees import OpaqueStateError, is_torchs
from fxamp.runtime.snapshot import LAYOUTS, Snapshot
from fxamp.runtime.step_hooks import post_hooks_last
from fxamp.runtime.step_result import HostCopy

log = logging.getLogger("fxamp")

PENDING = "_fxamp_pending"
_SUPPORTS = "_step_supports_amp_scaling"
LOOKS_AT_HOST_FLAGS = True  # False makes the CPU take the GPU's ways, for tests of these


@dataclasses.dataclass
class _Pending:
    """Host-side changes of a step whose outcome is still on its way."""

    outcome: HostCopy
    undo: list[Callable[[], None]]


def takes_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` itself honours an attribute `found_inf`."""
    supports = getattr(optimizer, _SUPPORTS, False)
    return bool(supports) and not _takes_grad_scaler(getattr(type(owner_of(optimizer)), "step", lambda: None))


def owner_of(optimizer: Any) -> Any:
    """The optimizer whose step reads `found_inf` and `grad_scale`: itself, or the one to which it hands on what it is
    asked (`__getattr__`), where those who set them would set them on the wrapper."""
    if not hasattr(optimizer, _SUPPORTS) or hasattr(type(optimizer), _SUPPORTS) or _SUPPORTS in vars(optimizer):
        return optimizer
    inside = (value for value in vars(optimizer).values() if getattr(value, _SUPPORTS, False))
    return next(map(owner_of, inside), optimizer)


@functools.lru_cache(maxsize=64)
def _takes_grad_scaler(step: Callable[..., Any]) -> bool:
    """Whether a step follows torch's older contract: an argument `grad_scaler`, and it skips itself."""
    return "grad_scaler" in inspect.signature(step).parameters


def step_unless(
    optimizer: torch.optim.Optimizer,
    found_inf: torch.Tensor,
    run: Callable[[], Any],
    *,
    grad_scale: torch.Tensor | None = None,
) -> Any:
    """Call `run`, which steps `optimizer`, so that nothing changes where `found_inf` is above 0.

    Call `settle(optimizer)` once before a step; it may be made of several such calls.

    Args:
        found_inf: 0-d float32 on the device of the loss scale, 0 or 1: fused kernels know no other flag.
        grad_scale: 0-d float32 by which gradients are still multiplied; only for an optimizer that takes it.

    Returns:
        What `run` returned.
    """
    if LOOKS_AT_HOST_FLAGS and found_inf.device.type == "cpu" and found_inf.reshape(1).tolist()[0] > 0:
        return None
    if takes_found_inf(optimizer):
        return _kernel_step(optimizer, found_inf, run, grad_scale)
    if LOOKS_AT_HOST_FLAGS and found_inf.device.type == "cpu":
        return run()
    _tell_of_fused(optimizer)
    try:
        before = Snapshot(optimizer, found_inf.device)
    except OpaqueStateError:
        return run() if HostCopy(found_inf.reshape(1).clone()).values[0] == 0 else None
    try:
        with post_hooks_last(optimizer):  # which may average the parameters
            with contextlib.nullcontext() if is_torchs(optimizer) else _ones_where(found_inf, optimizer):
                returned = run()
            before.select_back(found_inf)
    finally:
        before.drop()
    _defer(optimizer, found_inf, before.host_changes())
    return returned


def _tell_of_fused(optimizer: torch.optim.Optimizer) -> None:
    """Once for an optimizer that could be had without these copies."""
    if LAYOUTS not in vars(optimizer) and "fused" in getattr(optimizer, "defaults", ()):
        name = type(optimizer).__name__
        log.info(
            "%s(fused=True) takes less time: without it, parameters and state are copied before each step, so that a "
            "step can be left out without waiting for the device",
            name,
        )


@contextlib.contextmanager
def _ones_where(found_inf: torch.Tensor, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context: gradients are 1 where `found_inf` is above 0; afterwards they are what they were, to be named.

    Not 0, by which D-Adaptation divides on the host.
    """
    skipped = Skipped(found_inf)
    exchanged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for parameter in gradients.parameters(optimizer):
        given = parameter.grad
        if given is None or given.requires_grad:  # whose graph the optimizer may differentiate (AdaHessian)
            continue
        seen = given.clone()
        values = seen._values() if seen.is_sparse else distributed.local(seen)
        values.masked_fill_(skipped.on(given.device), 1)
        parameter.grad = seen
        exchanged.append((parameter, given, seen))
    try:
        yield
    finally:
        for parameter, given, seen in exchanged:
            if parameter.grad is seen:
                parameter.grad = given


def settle(optimizer: torch.optim.Optimizer) -> None:
    """Put back what the host changed in the last step, if that step turned out to be skipped."""
    pending: list[_Pending] | None = optimizer.__dict__.pop(PENDING, None)
    if pending is None:
        return
    optimizer.__dict__.pop("__getstate__", None)
    for step in pending:
        if step.outcome.values[0] > 0:
            for undo in step.undo:
                undo()


def _defer(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor, undo: list[Callable[[], None]]) -> None:
    if not undo:
        return
    if recorded.is_capturing(found_inf.device):
        for put_back in undo:  # what ran on the host while capturing did happen, and will happen again
            put_back()
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps state on the host, which a graph cannot skip; use its "
            "fused=True or capturable=True."
        )
    if not getattr(optimizer, "_fxamp_settles_before_saving", False):
        optimizer.register_state_dict_pre_hook(settle)
        optimizer._fxamp_settles_before_saving = True  # type: ignore[attr-defined]
    outcome = HostCopy(found_inf.detach().reshape(1).clone())
    optimizer.__dict__.setdefault(PENDING, []).append(_Pending(outcome, undo))
    # What copies and pickles ask for; they take it from the object, before the class has its say.
    optimizer.__dict__["__getstate__"] = functools.partial(_settled_state, optimizer)


def _settled_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer gives to be copied and pickled, once what is pending is put back."""
    settle(optimizer)
    return optimizer.__getstate__()


@_disable_dynamo  # which loses attributes that are set for the length of a call
def _kernel_step(
    optimizer: torch.optim.Optimizer,
    found_inf: torch.Tensor,
    run: Callable[[], Any],
    grad_scale: torch.Tensor | None,
) -> Any:
    lacking = _parameters_without_momentum(optimizer)
    # torch's own steps do not wait for the copies that they make of these.
    where = next((parameter.device for parameter in gradients.parameters(optimizer)), found_inf.device)
    owner = owner_of(optimizer)
    owner.grad_scale = None if grad_scale is None else copy_on(where, grad_scale)
    owner.found_inf = copy_on(where, found_inf)
    try:
        returned = run()
    finally:
        del owner.grad_scale, owner.found_inf
    if lacking:
        _defer(optimizer, found_inf, _momentum_undo(optimizer, lacking, found_inf))
    return returned


def _parameters_without_momentum(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Parameters for which fused SGD is about to allocate a momentum buffer.

    It uses torch.empty and leaves the buffer unwritten when found_inf is set, so a skipped first step would
    make the next one read uninitialised memory.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [
        parameter
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
    ]


def _momentum_undo(
    optimizer: torch.optim.Optimizer, lacking: list[torch.Tensor], found_inf: torch.Tensor
) -> list[Callable[[], None]]:
    undo: list[Callable[[], None]] = []
    for parameter in lacking:
        state = optimizer.state[parameter]
        buffer = state["momentum_buffer"]
        skipped = found_inf.to(buffer.device) > 0
        torch.where(skipped, torch.zeros((), dtype=buffer.dtype, device=buffer.device), buffer, out=buffer)
        undo.append(state.clear)
    return undo
