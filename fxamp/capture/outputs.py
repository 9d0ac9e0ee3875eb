"""What forward returns as something a graph can return, and how it is made whole again at each call.

Built-in containers stay as they are, registered ones (named tuples, the output classes of Hugging Face) are taken apart
by their pytree registration. An object of a plain class that forward makes, such as a dataclass or a cache of keys and
values, is made anew at each call: an instance of its class with the same attributes, in which the call's tensors stand.
"""

import collections
import contextlib
import dataclasses
import enum
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp.capture.held_tensors import is_named_tuple
from fxamp.capture.inputs import CONSTANTS
from fxamp.capture.kept_items import Item, Kept
from fxamp.capture.objects import slots_of, walk
from fxamp.capture.refusals import for_python
from fxamp.capture.traces import State
from fxamp.errors import CaptureError


@dataclasses.dataclass(frozen=True)
class OutputForm:
    """How flat outputs become what forward returns.

    Attributes:
        tree: of containers that pytree knows.
        leaves: how each of its leaves is made; none where they are the graph's outputs in order.
        inside_objects: places of the graph's outputs that are no results (see `holds_results`), but what objects hold.
            They come in the dtype that they are computed in: a cache of keys and values in float32 would be twice the
            bytes, and two more casts of each.
        places: what forward sets besides, and how each value is made.
        orders_items: whether a container makes its items in another order than forward does.
    """

    tree: pytree.TreeSpec
    leaves: tuple["Part", ...] = ()
    inside_objects: frozenset[int] = frozenset()
    places: tuple[tuple[Kept, "Part"], ...] = ()
    orders_items: bool = False

    def build(self, module: nn.Module, flat: Sequence[Any]) -> Any:
        """What forward returns in a call whose graph returns `flat`; the model's attributes are set as it does."""
        if not self.leaves:
            return self._whole(flat)
        made: dict[int, Any] = {}
        for place, part in self.places:
            place.put(module, part.build(flat, made))
        return self._whole([leaf.build(flat, made) for leaf in self.leaves])

    def _whole(self, leaves: Sequence[Any]) -> Any:
        result = pytree.tree_unflatten(leaves, self.tree)
        if self.orders_items:
            _order_items(result, self.tree)
        return result


@dataclasses.dataclass(frozen=True)
class Value:
    """One of the graph's outputs."""

    place: int

    def build(self, flat: Sequence[Any], made: dict[int, Any]) -> Any:
        return flat[self.place]

    def places(self, inside_objects: bool) -> Iterator[int]:
        yield self.place

    def constants(self) -> Iterator[Any]:
        yield from ()


@dataclasses.dataclass(frozen=True)
class Constant:
    """What is the same object at each call."""

    value: Any

    def build(self, flat: Sequence[Any], made: dict[int, Any]) -> Any:
        return self.value

    def places(self, inside_objects: bool) -> Iterator[int]:
        yield from ()

    def constants(self) -> Iterator[Any]:
        """What is in it that is the same at each call."""
        yield self.value


@dataclasses.dataclass(frozen=True)
class Whole:
    """A container or an object that is made at each call, once however often it is met.

    Attributes:
        number: in the result.
        names: keys or names of attributes; none of a sequence.
    """

    kind: type
    number: int
    names: tuple[Any, ...]
    parts: tuple["Part", ...]

    def build(self, flat: Sequence[Any], made: dict[int, Any]) -> Any:
        if self.number not in made:
            made[self.number] = self._made([part.build(flat, made) for part in self.parts])
        return made[self.number]

    @property
    def is_object(self) -> bool:
        """Whether it is an object of a class, and no container."""
        return self.kind not in _MAPPINGS and not _is_sequence(self.kind)

    def places(self, inside_objects: bool) -> Iterator[int]:
        """Of the graph's outputs that it holds; those that are no results where that is asked."""
        if inside_objects or not self.is_object or holds_results(self.kind):
            for part in self.parts:
                yield from part.places(inside_objects)

    def constants(self) -> Iterator[Any]:
        for part in self.parts:
            yield from part.constants()

    def _made(self, values: list[Any]) -> Any:
        if self.kind in _SEQUENCES:
            return self.kind(values)
        if _is_sequence(self.kind):
            return tuple.__new__(self.kind, values)
        if self.kind in _MAPPINGS:
            return self.kind(zip(self.names, values, strict=True))
        makes: Any = self.kind.__new__
        thing = makes(self.kind)
        slots = slots_of(self.kind)
        for name, value in zip(self.names, values, strict=True):
            if name in slots:
                object.__setattr__(thing, name, value)
            else:
                thing.__dict__[name] = value  # update() is what Dynamo of torch 2.11 cannot follow
        return thing


Part = Value | Constant | Whole
_SEQUENCES = (list, tuple, set, torch.Size)
_MAPPINGS = (dict, collections.OrderedDict)
_PLAIN = (*CONSTANTS, int, float, complex, bytes, type, enum.Enum)


def _is_sequence(kind: type) -> bool:
    return kind in _SEQUENCES or is_named_tuple(kind)


def flatten_output(
    result: Any, state: State, places: Sequence[tuple[Kept, Any]] = (), others: Container[int] = ()
) -> tuple[Any, OutputForm | None]:
    """What the graph returns for `result`, and how that becomes `result` again; None where it is that already.

    Args:
        state: of the model before forward ran; what it held is returned as it is.
        places: attributes and items that the graph is to set, and to what.
        others: ids of containers that the model holds, and that are others at each call.

    Raises:
        CaptureError: a returned object, or what an attribute is set to, is neither a tensor, a constant, a registered
            container nor of a plain class; or forward has made a parameter of what it returns.
    """
    leaves, tree = pytree.tree_flatten(result)
    if any(isinstance(leaf, fx.Proxy) and vars(leaf).get("_is_param") for leaf in leaves):  # as nn.Parameter() notes it
        raise CaptureError(
            "forward returns an nn.Parameter that it has made, and a graph returns tensors. Return the tensor "
            "(h.detach().requires_grad_()), and make a parameter of it outside of forward."
        )
    if not places and _is_builtin(result):
        return result, None
    orders_items = _has_own_order(leaves, tree)
    if not places and all(map(_is_builtin, leaves)):
        return tuple(leaves), OutputForm(tree, orders_items=orders_items)
    made = {id(part) for place, value in places if isinstance(place, Item) for part in walk(value)}  # in containers now
    taken = _Taken({id(part) for value in state.held() for part in walk(value)} - made, others)
    parts = tuple(map(taken.part, leaves))
    kept = tuple((place, _set_part(taken, place, value)) for place, value in places)
    taken.check()
    tops = parts[0].parts if tree.is_leaf() and isinstance(parts[0], Whole) else parts  # of the result itself
    results = {number for part in (*tops, *(p for _, p in kept)) for number in part.places(inside_objects=False)}
    inside = frozenset(range(len(taken.flat))) - results
    return tuple(taken.flat), OutputForm(tree, parts, inside, kept, orders_items)


def _has_own_order(leaves: list[Any], tree: pytree.TreeSpec) -> bool:
    """Whether a container that is made of its items has them in another order: in that of its fields."""
    with contextlib.suppress(Exception):  # it is not made of what stands for tensors
        return bool(pytree.tree_structure(pytree.tree_unflatten(leaves, tree)) != tree)
    return False


def _order_items(made: Any, tree: pytree.TreeSpec) -> None:
    """Bring items into the order they had when forward returned them."""
    if tree.is_leaf():
        return
    if isinstance(made, collections.OrderedDict):
        for name in tree.context:
            made.move_to_end(name)
    if isinstance(made, (dict, list, tuple)):
        for part, inner in zip(made.values() if isinstance(made, dict) else made, tree.children(), strict=True):
            _order_items(part, inner)


def _set_part(taken: "_Taken", place: Kept, value: Any) -> Part:
    try:
        return taken.part(value)
    except CaptureError as error:
        raise CaptureError(f"forward sets attribute {place.title!r}: {error}") from None


def _is_builtin(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_builtin, value))
    if type(value) is dict:
        return all(map(_is_builtin, value.values()))
    return isinstance(value, (fx.Proxy, torch.Tensor, int, float, complex, *CONSTANTS))


class _Taken:
    """Takes a result apart.

    Args:
        known: ids of objects that the model holds.
        others: ids of those of them that are others at each call.

    Attributes:
        flat: what the graph returns.
    """

    def __init__(self, known: Container[int], others: Container[int]) -> None:
        self.flat: list[Any] = []
        self._known, self._others = known, others
        self._wholes: dict[int, Whole | None] = {}  # by id; None while its parts are taken

    def part(self, value: Any) -> Part:
        if isinstance(value, (fx.Proxy, torch.Tensor)):
            self.flat.append(value)
            return Value(len(self.flat) - 1)
        if id(value) in self._others and not isinstance(value, tuple):
            raise CaptureError(
                f"forward hands on a {type(value).__qualname__} that the model holds, another at each call"
            )
        if isinstance(value, _PLAIN) or (id(value) in self._known and id(value) not in self._others):
            return Constant(value)
        if _is_sequence(type(value)):
            return self._whole(value, (), tuple(value))
        if type(value) in _MAPPINGS:
            return self._whole(value, tuple(value), tuple(value.values()))
        if is_plain(value):
            held = attributes_held(value)
            return self._whole(value, tuple(held), tuple(held.values()))
        raise _unreturnable(type(value))

    def _whole(self, value: Any, names: tuple[Any, ...], values: tuple[Any, ...]) -> Whole:
        if id(value) not in self._wholes:
            self._wholes[id(value)] = None
            number = len(self._wholes)
            self._wholes[id(value)] = Whole(type(value), number, names, tuple(map(self.part, values)))
        found = self._wholes[id(value)]
        if found is None:
            raise CaptureError(f"forward returns a {type(value).__qualname__} that holds itself")
        return found

    def check(self) -> None:
        """Raise for objects of a class, none of which holds a tensor: they may have been there before forward ran."""
        objects = [whole for whole in self._wholes.values() if whole is not None and whole.is_object]
        known = {whole.kind for whole in objects if any(True for _ in whole.places(inside_objects=True))}
        for whole in objects:
            if whole.kind not in known:
                raise _unreturnable(whole.kind)


def holds_results(kind: type) -> bool:
    """Whether what an object of this class holds is what forward returns, as that of a tuple is. So is what the object
    holds that forward returns itself, of whatever class; what others hold is a state of theirs.
    """
    return dataclasses.is_dataclass(kind)


def attributes_held(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots first."""
    kind: type = type(value)
    slots = slots_of(kind)
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def is_plain(value: Any) -> bool:
    """Whether an object is its attributes and nothing else."""
    kind: type = type(value)
    slots = slots_of(kind)
    if kind is types.SimpleNamespace:
        return True
    makes: Any = kind.__new__
    has_attributes = hasattr(value, "__dict__") or bool(slots)
    return makes is object.__new__ and has_attributes and not _is_special(kind)


def _is_special(kind: type) -> bool:
    return issubclass(kind, nn.Module) or kind.__module__ in ("builtins", "types", "threading", "weakref")


def _unreturnable(kind: type) -> CaptureError:
    return CaptureError(
        f"forward returns a {kind.__qualname__}, which a graph cannot return. Return tensors in built-in containers, "
        "or register the type with torch.utils._pytree.register_pytree_node."
    )


def check_no_attributes(values: Iterable[Any]) -> None:
    """Raise a CaptureError where forward has set an attribute of its own on a tensor that is seen after the call."""
    for value in values:
        if issubclass(type(value), fx.Proxy) and (names := vars(value).keys() - _KEPT_BY_PROXIES):
            error = CaptureError(
                f"forward sets .{min(names)} on a tensor, which a graph would not do. Return the value beside the "
                "tensor instead."
            )
            raise error if torch.__version__ >= "2.12" else for_python(error)  # whose Dynamo reads such once


# Of proxies, and of a parameter or buffer that forward makes.
_KEPT_BY_PROXIES = frozenset("node tracer _tensor _owner _name _made _is_param _is_buffer persistent".split())
