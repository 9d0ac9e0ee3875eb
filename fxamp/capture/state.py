"""Python state that a trace reads: attributes of modules and of their classes, globals and closures of their functions.

A graph holds what was read as constants, so it is valid only while the state is as it was. Every read becomes a
`Cell`; see `state_check.py` for what is asked of them at each call.
"""

import dataclasses
from typing import Any

import torch
from torch import nn

from fxamp.capture.held_tensors import make_of
from fxamp.capture.kept_items import without
from fxamp.capture.objects import Scope, frozen
from fxamp.fakes import is_sharded

LIFTED = object()  # a number that the graph reads anew at each call: its type alone matters
HELD = object()  # a container of which the graph reads the tensors anew at each call: its make alone matters
NOT_NONE = object()  # a tensor of which nothing was asked but that


@dataclasses.dataclass(frozen=True)
class Cell:
    """One place that was read.

    Attributes:
        name: the attribute, the global, or "" for the contents of a closure's cell.
        frozen: a stand-in for what it held, see `objects.frozen`.
        path: of the module that owns the attribute; None where `owner` does.
        owner: a class's or a Python module's namespace, a closure's cell, a function, or a module outside of the
            model's tree.
        title: how a message names it ("self.encoder.beta").
        names: the attributes that the model's functions read of objects.
        kind: "_parameters" or "_buffers" for what is registered there: only its shape matters.
        tie: path, kind and name of another place that must hold the same tensor, or container that the graph sets items
            of; kind "" is a plain attribute.
        items_set: keys of a list or a dictionary whose items the graph sets, and does not read.
    """

    name: str
    frozen: Any
    path: str | None
    owner: Any = dataclasses.field(repr=False)
    title: str
    names: frozenset[str] = dataclasses.field(repr=False)
    kind: str = ""
    tie: tuple[str, str, str] | None = None
    items_set: tuple[Any, ...] = ()

    def holder(self, root: nn.Module) -> Any:
        """What is asked for `name`: a dictionary or a closure's cell."""
        owner = self.owner if self.path is None else root.get_submodule(self.path)
        if self.kind:
            return owner.__dict__[self.kind]
        return owner.__dict__ if isinstance(owner, (nn.Module, type)) else owner

    @property
    def is_number(self) -> bool:
        """Whether it is a number of one of the model's modules, which a graph can read anew at every call."""
        return self.path is not None and not self.kind and self.frozen[0] in (int, float)

    @property
    def is_plain(self) -> bool:
        """Whether it is a number, a string or a flag of one of the model's modules."""
        is_constant = self.frozen[0] in (bool, int, float, str) and self.frozen[-1] is not LIFTED
        return self.path is not None and not self.kind and is_constant

    @property
    def is_of_tensors(self) -> bool:
        """Whether it is a container of one of the model's modules whose tensors the graph reads anew at each call."""
        return bool(self.frozen) and self.frozen[-1] is HELD

    @property
    def is_not_none(self) -> bool:
        """Whether it is a tensor that is a plain attribute, of which nothing matters but that it is no None."""
        return self.path is not None and self.frozen[-1] is NOT_NONE

    def with_frozen(self, stand_in: tuple[Any, ...]) -> "Cell":
        """The same place, holding something else."""
        return dataclasses.replace(self, frozen=stand_in)

    def standing_for(self, value: Any, scope: Scope) -> tuple[Any, ...]:
        """What `frozen` is to be equal to for the graph to be valid."""
        if self.path is not None and isinstance(value, torch.Tensor):
            if self.frozen and self.frozen[-1] is NOT_NONE:
                return self.frozen  # type: ignore[no-any-return]
            return type_of_weight(value) if self.kind else type_of_kept(value)  # read anew at each call
        if self.frozen and self.frozen[-1] is LIFTED:
            return (type(value), LIFTED)
        if self.is_of_tensors:
            return (type(value), make_of(value), HELD)
        return frozen(without(value, self.items_set) if self.items_set else value, scope)


def flag_cell(path: str, flag: bool) -> Cell:
    """A module's training flag."""
    return Cell("training", (bool, flag), path, None, f"self.{path}.training", frozenset())


def switch_cells(path: str, module: nn.Module) -> list[Cell]:
    """A module's plain attributes, other than the numbers with which it counts."""
    return [
        Cell(name, (type(value), value), path, None, f"self.{path}.{name}", frozenset())
        for name, value in vars(module).items()
        if name != "training" and isinstance(value, bool | str | None)
    ]


def type_of_weight(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the graph takes for granted of a parameter or a buffer."""
    return (tensor.shape, tensor.dtype, is_sharded(tensor), tensor.layout)


def type_of_kept(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What the graph takes for granted of a tensor that is a plain attribute of a module."""
    return (tensor.dtype, tensor.shape, tensor.device, tensor.layout)
