"""Whether the Python state that a graph holds for is as it was, asked at each call.

The question is cheap where nothing has changed: one generated expression that compares identities. Only where one
differs are values compared (`frozen`), so that an equal value written again, or the state of a copied model, is no
change.
"""

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fxamp.capture.configs import held_by, is_config, place_of
from fxamp.capture.contents import numbers_of
from fxamp.capture.elements import CONTAINERS, SCALARS, elements_of, holds_the_same, is_too_long, length_of, plain_copy
from fxamp.capture.held_tensors import make_of
from fxamp.capture.kept_items import without
from fxamp.capture.objects import (
    DEPTH,
    EVERYTHING,
    METHODS,
    MISSING,
    POINTERS,
    Scope,
    attributes_named,
    depth_inside,
    is_array,
    is_library,
    namespace_of,
    parts_of,
    pointed_at,
    read,
)
from fxamp.capture.places import Place, paths_of
from fxamp.capture.state import LIFTED, Cell, type_of_kept, type_of_weight
from fxamp.paths import kept_in


class StateCheck:
    """Whether the cells of a graph hold what they held, for one model.

    Args:
        root: the model, or a copy of it.
        cells: what the graph takes for granted.
    """

    def __init__(self, root: nn.Module, cells: tuple[Cell, ...]) -> None:
        self._root = weakref.ref(root)
        self._cells = cells
        self._names = next((cell.names for cell in cells if cell.names), frozenset())  # flags have none
        self._held = frozenset((cell.path or "", cell.name) for cell in cells if cell.is_of_tensors)
        self._is_as_before: Callable[[], bool] | None = None
        self._known_change: tuple[Any, str, Any] | None = None
        self._suspect: Cell | None = None  # what had changed when it was asked last, if anything

    def holds(self) -> bool:
        """Whether the graph may run."""
        if self._is_as_before is not None:
            try:
                if self._is_as_before():
                    return True
            except Exception:  # an attribute is gone, or an element whose == is not a bool was exchanged
                pass
        if self._known_change is not None:
            holder, name, value = self._known_change
            if read(holder, name) is value:
                return False
        first = [] if self._suspect is None else [self._suspect]
        self._suspect = next(self._changed_among([*first, *self._cells]), None)
        if self._suspect is not None:
            return False
        self._is_as_before = self._comparison()
        return True

    def numbers(self) -> list[Any]:
        """What is read anew at each call, as it is now."""
        root = self._root()
        assert root is not None
        return [read(cell.holder(root), cell.name) for cell in self._cells if cell.frozen[-1] is LIFTED]

    def changed(self) -> list[Cell]:
        """The cells that hold something else now."""
        return list(self._changed_among(self._cells))

    def _changed_among(self, cells: Iterable[Cell]) -> Iterator[Cell]:
        root = self._root()
        assert root is not None
        scope = Scope(self._names, paths_of(root), root, self._held)
        return (cell for cell in cells if not self._is_unchanged(cell, root, scope))

    def _is_unchanged(self, cell: Cell, root: nn.Module, scope: Scope) -> bool:
        try:
            holder = cell.holder(root)
        except (KeyError, AttributeError):  # the module is gone
            return False
        value = read(holder, cell.name)
        if cell.tie is not None and value is not _tied(root, cell.tie):
            return False
        if _are_equal(cell.standing_for(value, scope), cell.frozen):
            return True
        if isinstance(value, SCALARS):
            self._known_change = (holder, cell.name, value)
        return False

    def _comparison(self) -> Callable[[], bool]:
        """A function that compares what the cells hold with what they hold now, object by object."""
        root = self._root()
        assert root is not None
        identities = _Identities(root, self._names, self._held)
        for cell in self._cells:
            identities.watch_cell(cell)
        return identities.function()


class _Identities:
    """Writes the function that compares what cells hold with what they hold now, object by object.

    Args:
        root: the model.
        names: the attributes of objects that matter.
        held: containers of which the graph reads the tensors anew at each call.
    """

    def __init__(self, root: nn.Module, names: frozenset[str], held: frozenset[Place]) -> None:
        self._root, self._names = root, names
        self._places = Scope(names, {}, root, held)
        self._space: dict[str, Any] = {
            "type_of_weight": type_of_weight, "type_of_kept": type_of_kept, "holds_the_same": holds_the_same,
            "without": without, "pointed_at": pointed_at, "numbers_of": numbers_of,
            "length_of": length_of, "make_of": make_of,
        }  # fmt: skip
        self._terms: list[str] = []
        self._numbers: dict[int, str] = {}
        self._watched: dict[int, int] = {}  # id -> how deep it was looked into
        self._sets: dict[frozenset[str], frozenset[str]] = {}  # names that objects have -> those that they have not

    def watch_cell(self, cell: Cell) -> None:
        """Compare what a cell holds, and what that is made of."""
        holder = cell.holder(self._root)
        value = read(holder, cell.name)
        entry = f"{self._named(holder)}[{cell.name!r}]"
        if cell.tie is not None:
            other, name = _place_of(self._root, cell.tie), cell.tie[2]
            self._terms.append(f"{entry} is {self._named(other)}[{name!r}]")
        if cell.frozen[-1] is LIFTED:
            self._terms.append(f"type({entry}) is {self._named(type(value))}")
        elif cell.is_of_tensors:
            self._terms.append(f"make_of({entry}) == {self._named(cell.frozen[1])}")
            return
        elif cell.path is not None and isinstance(value, torch.Tensor):
            self._watch_tensor(entry, value, cell)
        elif value is MISSING:
            self._terms.append(f"{cell.name!r} not in {self._named(holder)}")
        elif isinstance(holder, (types.CellType, types.FunctionType)):
            attribute = cell.name or "cell_contents"
            self._terms.append(f"{self._named(holder)}.{attribute} is {self._named(value)}")
        else:
            is_same = f"{entry} is {self._named(value)}"
            space = getattr(holder, "space", None)  # of torch's functions: mostly they are what stands there
            at_once = "" if space is None else f"{self._named(space)}.get({cell.name!r}) is {self._named(value)} or "
            self._terms.append(at_once + is_same)
        if cell.items_set:
            self._watch_items(value, cell.items_set)
        if cell.path is None or not isinstance(value, torch.Tensor):
            self._watch(value, DEPTH)

    def _watch_items(self, value: Any, items_set: tuple[Any, ...]) -> None:
        """Compare what a container holds, but for the items that the graph sets."""
        self._watched[id(value)] = DEPTH
        others = without(value, items_set)
        held = f"without({self._named(value)}, {self._named(items_set)})"
        self._terms.append(f"holds_the_same({held}, {self._named(elements_of(others))})")
        for part in elements_of(others):
            self._watch(part, DEPTH - 1)

    def _watch_tensor(self, entry: str, value: torch.Tensor, cell: Cell) -> None:
        """Compare types and shapes, whichever tensor it is: one that is replaced, or that was computed for a functional
        call, is not kept alive.
        """
        frozen = self._named(cell.frozen)
        if cell.is_not_none:
            self._terms.append(f"isinstance({entry}, {self._named(torch.Tensor)})")
            return
        if not cell.kind:
            self._terms.append(f"type_of_kept({entry}) == {frozen}")
            return
        is_same = f"type({entry}) is {self._named(type(value))}"
        is_same += f" and {entry}.dtype is {self._named(value.dtype)} and {entry}.shape == {self._named(value.shape)}"
        if cell.kind == "_buffers":  # of a parameter it is not asked: there are many, and optimizers keep them
            is_same += f" and {entry}.layout is {self._named(value.layout)}"
        self._terms.append(f"{is_same} or type_of_weight({entry}) == {frozen}")

    def function(self) -> Callable[[], bool]:
        """Whether all that was watched is as it was."""
        lines = [f"    if not ({term}): return False" for term in self._terms]
        exec("\n".join(["def is_as_before():", *lines, "    return True"]), self._space)
        made: Callable[[], bool] = self._space["is_as_before"]
        return made

    def _watch(self, value: Any, depth: int) -> None:
        if depth <= self._watched.get(id(value), 0) or isinstance(value, SCALARS):
            return
        self._watched[id(value)] = depth
        scope = Scope(self._names, {})
        parts = parts_of(value, scope)
        if parts is None:
            self._watch_place(value)
            return
        if isinstance(value, CONTAINERS) and not is_library(type(value)):
            self._watch_object(value, attributes_named(value, scope))
        if is_too_long(value):
            self._terms.append(f"length_of({self._named(value)}) == {parts[0][1]}")
        elif isinstance(value, set):
            self._terms.append(f"{self._named(set.__eq__)}({self._named(value)}, {self._named(plain_copy(value))})")
        elif isinstance(value, (dict, list, collections.deque, types.MappingProxyType)):
            self._terms.append(f"holds_the_same({self._named(value)}, {self._named(elements_of(value))})")
        elif is_array(value):
            self._terms.append(f"numbers_of({self._named(value)}) == {self._named(parts[0][1])}")
        elif is_config(value):
            held = held_by(value)
            own = f"{self._named(value)}.__dict__"
            self._terms.append(f"{own}[{place_of(value)!r}] is {self._named(held)}")
            self._terms.append(f"{own}.get('_parent') is {self._named(vars(value).get('_parent'))}")
            if isinstance(held, (dict, list)):
                self._terms.append(f"holds_the_same({self._named(held)}, {self._named(elements_of(held))})")
        elif isinstance(value, POINTERS):
            self._watch_pointer(value, parts[0][1])
        elif not isinstance(value, (tuple, frozenset, functools.partial, *METHODS)):
            self._watch_object(value, parts)
        for _, part in parts:
            self._watch(part, depth_inside(value, depth))

    def _watch_place(self, value: Any) -> None:
        """Of a tensor that stands in the model, too, where the graph reads it: that it still does."""
        for path in self._places.place_of(value):
            entries, name = kept_in(self._root, path)
            self._terms.append(f"{self._named(entries)}.get({name!r}) is {self._named(value)}")

    def _watch_pointer(self, value: Any, target: Any) -> None:
        now = f"pointed_at({self._named(value)})"
        if not isinstance(value, weakref.ref) or target is None:
            self._terms.append(f"{now} is {self._named(target)}")
        elif id(target) not in self._numbers:  # to be known by the reference alone, which does not keep it alive
            self._numbers[id(target)] = now

    def _watch_object(self, value: Any, parts: list[tuple[Any, Any]]) -> None:
        for name, part in parts:
            is_absent = f"not hasattr({self._named(value)}, {name!r})"
            self._terms.append(is_absent if part is MISSING else f"{self._named(value)}.{name} is {self._named(part)}")
        own = namespace_of(value)
        if own is not None and EVERYTHING in self._names:
            self._terms.append(f"len({self._named(value)}.__dict__) == {len(own)}")
        elif own is not None:
            absent = self._absent(frozenset(name for name in own if name in self._names))
            self._terms.append(f"{self._named(value)}.__dict__.keys().isdisjoint({self._named(absent)})")

    def _absent(self, held: frozenset[str]) -> frozenset[str]:
        """The names that an object has not which has these; objects of a class have the same, and names may be many."""
        if held not in self._sets:
            self._sets[held] = self._names - held
        return self._sets[held]

    def _named(self, value: Any) -> str:
        """The name under which the function knows an object, which it keeps alive."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = f"v{len(self._numbers)}"
            self._space[self._numbers[id(value)]] = value
        return self._numbers[id(value)]


def _are_equal(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    try:
        return now == before
    except Exception:  # a key or an element whose class forbids the question, and that is another object
        return False


def _tied(root: nn.Module, tie: tuple[str, str, str]) -> Any:
    return _place_of(root, tie).get(tie[2], MISSING)


def _place_of(root: nn.Module, tie: tuple[str, str, str]) -> dict[str, Any]:
    """The dictionary in which a tied tensor stands."""
    path, kind, _ = tie
    entries: dict[str, Any] = root.get_submodule(path).__dict__
    return entries[kind] if kind else entries
