"""Parameters whose storage was lowered (O2, O3) and still stand for float32 numbers.

Each keeps its exact float32 numbers as a master (see `fxamp.runtime.masters`) until an optimizer takes them over;
`state_dict` and `load_state_dict` of the converted model speak float32.
"""

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError
from fxamp.runtime.distributed import local
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import (
    LOGICAL,
    MASTER,
    attach_master,
    begin_load,
    detach_master,
    end_load,
    exact_values,
    is_master_written,
    loosen,
    master_of,
    one_at_a_time,
    reconcile_,
    set_master,
)
from fxamp.runtime.padded_weights import make_room, renew_room
from fxamp.runtime.recurrent_memory import lay_together, recurrent_layers

log = logging.getLogger("fxamp")

_LOWERED = "_fxamp_lowered"  # on a module: {name of its tensor that was lowered: whether it has a master}


def is_stored_low(tensor: object) -> bool:
    """Whether lower_parameters() lowered this tensor."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, LOGICAL) and tensor.dtype in LOW_DTYPES


def logical_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype a tensor stands for: float32 for a lowered one, else its own."""
    return getattr(tensor, LOGICAL, tensor.dtype) if is_stored_low(tensor) else tensor.dtype


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A tensor that was lowered, and what it held before."""

    tensor: torch.Tensor
    exact: torch.Tensor
    gradient: torch.Tensor | None

    def put_back(self) -> None:
        """Make the tensor what it was, with the gradient that it had."""
        self.tensor.grad = None
        self.tensor.data = self.exact
        self.tensor.grad = self.gradient
        detach_master(self.tensor)
        delattr(self.tensor, LOGICAL)


@torch.inference_mode(False)  # what is made in it could not be trained
@torch.no_grad()
def lower_parameters(
    model: nn.Module, names: Iterable[str], low: torch.dtype, keep_masters: bool = True, multiple: int = 1
) -> list[Lowered]:
    """Store the named parameters and buffers in `low`; trainable ones keep their exact float32 numbers as masters.

    The Parameter objects stay the same, so an optimizer that holds them still does. Gradients are lowered with
    them. Tied tensors are lowered once. All are lowered, or none.

    Args:
        multiple: each gets memory for a multiple of so many rows, for GEMMs that are padded to it.

    Raises:
        OptionError: one was made under `torch.inference_mode()`.
    """
    tensors = dict(_named_tensors(model))
    names = [name for name in names if name in tensors]
    _check_writes_are_counted(tensors, names)
    watch_plain_steps()
    in_blocks = {weight for layer in recurrent_layers(model) for weight in layer.parameters()}
    done: list[Lowered] = []
    try:
        for name in names:
            tensor = tensors[name]
            if not is_stored_low(tensor):
                _lower(tensor, low, keep_masters, done)
                if tensor not in in_blocks:  # which grow behind each block of rows, not behind the last row
                    make_room(tensor, multiple)
        lay_together(model, is_stored_low)
    except BaseException:
        put_back(done)
        raise
    return done


def _check_writes_are_counted(tensors: Mapping[str, torch.Tensor], names: list[str]) -> None:
    made = [name for name in names if tensors[name].is_inference()]
    if made:
        others = f" and {len(made) - 1} more were" if len(made) > 1 else " was"
        raise OptionError(
            f"{made[0]}{others} made under torch.inference_mode(), where torch counts no writes: a weight that stands "
            "for float32 numbers cannot be kept true to them. Make the model outside of it, or convert "
            "copy.deepcopy(model), copied outside of it."
        )


def put_back(lowered: Iterable[Lowered]) -> None:
    """Undo `lower_parameters`."""
    for each in lowered:
        each.put_back()


def _lower(tensor: torch.Tensor, low: torch.dtype, keep_masters: bool, done: list[Lowered]) -> None:
    exact = tensor.data  # with a version counter of its own: who wrote, master or parameter, is told by theirs
    gradient = tensor.grad if tensor.is_leaf else None
    values = exact.to(low)
    low_gradient = None if gradient is None else gradient.to(low)
    done.append(Lowered(tensor, exact, gradient))
    setattr(tensor, LOGICAL, torch.float32)
    tensor.grad = None  # of the other dtype, torch would not have it
    tensor.data = values
    tensor.grad = low_gradient
    if keep_masters and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
        attach_master(tensor, exact)
        loosen(tensor)


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
            module.__dict__[_LOWERED] = lowered
            handles.append(_Names(module))
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
        self.module.__dict__.pop(_LOWERED, None)


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


def _raise_to_float32(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
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
    _load(dict(_named_tensors(model)), state, prefix)


def _load(tensors: Mapping[str, torch.Tensor], state: dict[str, Any], prefix: str) -> None:
    for name, tensor in tensors.items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or _is_shard(value) != _is_shard(tensor):
            continue
        if is_stored_low(tensor) and value.shape == tensor.shape:
            begin_load(tensor, value.to(device=tensor.device, dtype=torch.float32))


def _end_load(module: nn.Module, _: Any) -> None:
    for tensor in _own_tensors(module).values():
        if is_stored_low(tensor):
            end_load(tensor)


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    own = {name: value for name, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}
    for name, has_master in module.__dict__.get(_LOWERED, {}).items():
        if name in own and _is_shard(own[name]) and own[name].dtype in LOW_DTYPES and not is_stored_low(own[name]):
            _mark_shard(own[name], has_master)
    return own


def _mark_shard(tensor: torch.Tensor, has_master: bool) -> None:
    """Let a DTensor by which `fully_shard` has replaced a lowered parameter stand for float32 numbers, too."""
    setattr(tensor, LOGICAL, torch.float32)
    if has_master and not hasattr(tensor, MASTER):  # an optimizer may have given it one
        attach_master(tensor, tensor.detach().float())
        loosen(tensor)


def _is_shard(tensor: torch.Tensor) -> bool:
    return local(tensor) is not tensor


def apply_exactly(model: nn.Module, apply: Callable[[], Any]) -> bool:
    """Move or convert a model (`.to`, `.float()`, `.half()`): masters move too, and conversions start from them.

    Args:
        apply: does it to the parameters and buffers.

    Returns:
        Whether a lowered tensor has another dtype now.
    """
    before = {name: tensor for name, tensor in _named_tensors(model) if is_stored_low(tensor)}
    dtypes = {name: tensor.dtype for name, tensor in before.items()}
    exact = {name: exact_values(tensor) for name, tensor in before.items() if hasattr(tensor, MASTER)}
    for tensor in filter(_is_shard, before.values()):
        _take_over(tensor)
        _handed_out.pop(tensor, None)  # torch exchanges what a DTensor is made of, if nobody has a weak reference
    apply()
    now = dict(_named_tensors(model))
    for name, tensor in before.items():
        renew_room(tensor, now[name])
        _move_master(tensor, now[name], exact.get(name), now[name].dtype != dtypes[name])
    lay_together(model, is_stored_low)
    return any(now[name].dtype != dtype for name, dtype in dtypes.items())


def _move_master(old: torch.Tensor, new: torch.Tensor, exact: torch.Tensor | None, is_converted: bool) -> None:
    """Let a tensor that was moved or converted have its exact numbers.

    It may be another object now (`to_empty`), or the same with another's attributes (a DTensor).
    """
    if not hasattr(new, LOGICAL):
        setattr(new, LOGICAL, getattr(old, LOGICAL, torch.float32))
    if exact is None:
        return
    if exact.is_meta and not new.is_meta:
        exact = new.detach().float()  # there are no numbers yet
    with torch.no_grad():
        if is_converted:
            new.copy_(exact)
        if not hasattr(new, MASTER):
            attach_master(new, exact.to(new.device))
            loosen(new)
        elif exact.device != new.device:
            exact.data = exact.to(new.device)


Marks = dict[str, tuple[torch.dtype, torch.Tensor | None]]
"""Of each lowered tensor the dtype it stands for, and its master."""


def marks_of(model: nn.Module) -> Marks:
    """What a deep copy, and a process to which torch.multiprocessing sends a model, do not get with its tensors."""
    return {
        name: (logical_dtype(tensor), master_of(tensor))
        for name, tensor in _named_tensors(model)
        if is_stored_low(tensor)
    }


def mark(model: nn.Module, marks: Marks, is_copy: bool = False) -> None:
    """Give a model's tensors what they lack of `marks`; those of a copy have masters of their own."""
    tensors = dict(_named_tensors(model))
    for name, (logical, master) in marks.items():
        tensor = tensors.get(name)
        if tensor is not None and not is_stored_low(tensor):
            setattr(tensor, LOGICAL, logical)
            if master is not None:
                attach_master(tensor, master.detach().clone() if is_copy else master)
                loosen(tensor)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


# ------------------------------------------------------------------------------------- optimizers without masters

_groups_seen: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
_hooks: list[Any] = []
_said_all_low: list[bool] = []


def watch_plain_steps() -> None:
    """Look at every optimizer's steps from now on: one that updates lowered parameters itself is warned about.

    Registered where parameters are lowered: a process that never does so has no hook.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_masters))


def _check_masters(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or isinstance(optimizer, MasterWeightOptimizer):
        return
    lowered = [p for group in optimizer.param_groups for p in group["params"] if is_stored_low(p) and p.requires_grad]
    for parameter in lowered:
        loosen(parameter)  # a fused step does not count as a write
    if lowered and _groups_seen.get(optimizer) != len(optimizer.param_groups):
        _groups_seen[optimizer] = len(optimizer.param_groups)
        _warn_of_lost_updates(optimizer, lowered)


def _warn_of_lost_updates(optimizer: torch.optim.Optimizer, lowered: list[torch.Tensor]) -> None:
    is_o2 = any(hasattr(parameter, MASTER) for parameter in lowered)
    if not is_o2 and _said_all_low:
        return
    if not is_o2:
        _said_all_low.append(True)
    log.warning(
        "%s updates %d parameters that opt_level=%r stores in %s, and keeps no float32 masters of them: updates below "
        "their rounding are lost. Wrap it: fxamp.MasterWeightOptimizer(optimizer), or with masters='kahan' or "
        "'stochastic' for less memory.",
        type(optimizer).__name__,
        len(lowered),
        "O2" if is_o2 else "O3",
        dtype_name(lowered[0].dtype),
    )
