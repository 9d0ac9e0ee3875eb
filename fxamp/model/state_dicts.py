"""State dicts of models whose parameters are stored low: they give float32 numbers, take them, and may be written."""

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fxamp.dtypes import LOW_DTYPES
from fxamp.model.lost_updates import look_for_averages
from fxamp.runtime.distributed import local
from fxamp.runtime.masters import (
    LOGICAL,
    MASTER,
    attach_master,
    begin_load,
    end_load,
    exact_values,
    is_master_written,
    is_stored_low,
    loosen,
    one_at_a_time,
    reconcile_,
    set_master,
)
from fxamp.tree import every_buffer, every_parameter

LOWERED = "_fxamp_lowered"  # on a module: {name of its tensor that was lowered: whether it has a master}


def speak_float32(model: nn.Module, original: nn.Module) -> list[Any]:
    """Let state_dict() of the model and its parts give, and load_state_dict() take, float32 for lowered tensors.

    Args:
        original: the model that it was made from, which has the same tensors and parts.

    Returns:
        Handles that take it back.
    """
    handles: list[Any] = []
    for module in (*model.modules(), original):
        lowered = {
            name: hasattr(tensor, MASTER) for name, tensor in _own_tensors(module).items() if is_stored_low(tensor)
        }
        if lowered:
            module.__dict__[LOWERED] = lowered
            handles.append(_Names(module))
        if module._parameters or module._buffers:  # others may be tied to a lowered one later
            handles.append(module.register_state_dict_post_hook(_raise_to_float32))  # type: ignore[no-untyped-call]
            handles.append(module.register_load_state_dict_post_hook(_end_load))  # type: ignore[no-untyped-call]
            if module is not model:  # the model itself has a method that does so, see load_exactly
                handles.append(module.register_load_state_dict_pre_hook(_begin_load))  # type: ignore[no-untyped-call]
    return handles


@dataclasses.dataclass
class _Names:
    """Handle of what a module knows of its lowered tensors."""

    module: nn.Module

    def remove(self) -> None:
        self.module.__dict__.pop(LOWERED, None)


@dataclasses.dataclass
class _HandedOut:
    """A float32 tensor that a state dict holds of a lowered one: writes into it are writes into the model.

    Attributes:
        copy: the tensor where it is no master but was made for the state dict: kept until it was looked at once.
    """

    given: weakref.ref[torch.Tensor]
    version: int
    copy: torch.Tensor | None

    def take_over(self, tensor: torch.Tensor) -> bool:
        """Give the lowered tensor what was written; whether there may be more to come."""
        given = self.given()
        if hasattr(tensor, MASTER):
            if is_master_written(tensor):
                reconcile_(tensor)
        elif given is not None and given._version != self.version:
            set_master(tensor, given)
            self.version = given._version
        self.copy = None
        return given is not None


_handed_out: MutableMapping[torch.Tensor, list[_HandedOut]] = WeakIdKeyDictionary()


def take_over_writes() -> None:
    """Give lowered tensors what was written into state dicts; called before each forward, cheap where none is held."""
    if _handed_out:
        with one_at_a_time:
            for tensor in list(_handed_out):
                _take_over(tensor)


def _take_over(tensor: torch.Tensor) -> None:
    held = _handed_out.pop(tensor, [])
    if is_stored_low(tensor) and (left := [each for each in held if each.take_over(tensor)]):
        _handed_out[tensor] = left


def let_go(tensor: torch.Tensor) -> None:
    """Give a lowered tensor what was written into state dicts, and look at these no longer."""
    _take_over(tensor)
    _handed_out.pop(tensor, None)


def _raise_to_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    look_for_averages(_own_tensors(module).values())
    for name, tensor in _own_tensors(module).items():
        if prefix + name in state and is_stored_low(tensor):
            with one_at_a_time, torch.inference_mode(False):  # whose tensors count no writes
                _take_over(tensor)
                given = exact_values(tensor).detach()
                copy = None if hasattr(tensor, MASTER) else given
                _handed_out.setdefault(tensor, []).append(_HandedOut(weakref.ref(given), given._version, copy))
            state[prefix + name] = given


def _begin_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _load(_own_tensors(module), state, prefix)


def load_exactly(model: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Give the masters of lowered tensors what load_state_dict() is about to round into the tensors.

    A method of converted models calls it, not a hook that torch would bind to one module: copies have it too.
    """
    for module in model.modules():
        _own_tensors(module)
    _load(dict(named_tensors(model)), state, prefix)


def _load(tensors: Mapping[str, torch.Tensor], state: dict[str, Any], prefix: str) -> None:
    for name, tensor in tensors.items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or is_shard(value) != is_shard(tensor):
            continue
        if is_stored_low(tensor) and value.shape == tensor.shape:
            begin_load(tensor, value.to(device=tensor.device, dtype=torch.float32))


def _end_load(module: nn.Module, _: Any) -> None:
    for tensor in _own_tensors(module).values():
        if is_stored_low(tensor):
            end_load(tensor)


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {name: value for name, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}
    for name, has_master in module.__dict__.get(LOWERED, {}).items():
        if name in own and is_shard(own[name]) and own[name].dtype in LOW_DTYPES and not is_stored_low(own[name]):
            _mark_shard(own[name], has_master)
    return own


def _mark_shard(tensor: torch.Tensor, has_master: bool) -> None:
    """Let a DTensor by which `fully_shard` has replaced a lowered parameter stand for float32 numbers, too."""
    setattr(tensor, LOGICAL, torch.float32)
    if has_master and not hasattr(tensor, MASTER):  # an optimizer may have given it one
        attach_master(tensor, tensor.detach().float())
        loosen(tensor)


def was_lowered(model: nn.Module) -> bool:
    """Whether O2 or O3 has lowered tensors of a model, also those that `fully_shard` has replaced since."""
    is_marked = any(LOWERED in module.__dict__ for module in model.modules())
    return is_marked or any(map(is_stored_low, model.parameters()))


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one rank's part of another."""
    return local(tensor) is not tensor


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer by each of its names."""
    yield from every_parameter(model)
    yield from every_buffer(model)
