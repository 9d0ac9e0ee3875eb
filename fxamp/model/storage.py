"""Parameters whose storage was lowered (O2, O3) and still stand for float32 numbers.

Each keeps its exact float32 numbers as a master (see `fxamp.runtime.masters`) until an optimizer takes them over;
`state_dict` and `load_state_dict` of the converted model speak float32, see `fxamp.model.state_dicts`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fxamp.errors import OptionError
from fxamp.model.lost_updates import watch_plain_steps
from fxamp.model.state_dicts import is_shard, let_go, named_tensors
from fxamp.runtime.masters import (
    LOGICAL,
    MASTER,
    attach_master,
    detach_master,
    exact_values,
    is_stored_low,
    logical_dtype,
    loosen,
    master_of,
)
from fxamp.runtime.padded_weights import make_room, renew_room
from fxamp.runtime.recurrent_memory import lay_together, recurrent_layers


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
    tensors = dict(named_tensors(model))
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


def apply_exactly(model: nn.Module, apply: Callable[[], Any]) -> bool:
    """Move or convert a model (`.to`, `.float()`, `.half()`): masters move too, and conversions start from them.

    Args:
        apply: does it to the parameters and buffers.

    Returns:
        Whether a lowered tensor has another dtype now.
    """
    before = {name: tensor for name, tensor in named_tensors(model) if is_stored_low(tensor)}
    dtypes = {name: tensor.dtype for name, tensor in before.items()}
    exact = {name: exact_values(tensor) for name, tensor in before.items() if hasattr(tensor, MASTER)}
    for tensor in filter(is_shard, before.values()):
        let_go(tensor)  # torch exchanges what a DTensor is made of, if nobody has a weak reference
    apply()
    now = dict(named_tensors(model))
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
        for name, tensor in named_tensors(model)
        if is_stored_low(tensor)
    }


def mark(model: nn.Module, marks: Marks, is_copy: bool = False) -> None:
    """Give a model's tensors what they lack of `marks`; those of a copy have masters of their own."""
    tensors = dict(named_tensors(model))
    for name, (logical, master) in marks.items():
        tensor = tensors.get(name)
        if tensor is not None and not is_stored_low(tensor):
            setattr(tensor, LOGICAL, logical)
            if master is not None:
                attach_master(tensor, master.detach().clone() if is_copy else master)
                loosen(tensor)
