"""What a trace reads of Python's state; see state.py for what is done with it."""

import contextlib
import copy
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from fxamp.capture.assignments import Assignments
from fxamp.capture.effects import Effects
from fxamp.capture.elements import SCALARS
from fxamp.capture.functions_of import named_in
from fxamp.capture.held_tensors import make_of
from fxamp.capture.hooks import check_hook_writes
from fxamp.capture.identity import is_asked_whether_none, is_compared_with_others
from fxamp.capture.kept_items import Item, is_inside, items_set, without
from fxamp.capture.locations import asker, is_library_frame, is_library_function, user_line
from fxamp.capture.objects import MISSING, Scope, frozen, is_descriptor, is_library, is_other_self, share_arrays
from fxamp.capture.outside import Outside
from fxamp.capture.places import Place, paths_of, ties_of
from fxamp.capture.process import VARIABLES, process_noted, title_of
from fxamp.capture.refusals import is_for_python
from fxamp.capture.selves import check_agrees
from fxamp.capture.settings import Settings
from fxamp.capture.state import HELD, LIFTED, NOT_NONE, Cell
from fxamp.capture.torch_settings import SETTINGS, torch_settings_reads
from fxamp.errors import CaptureError, FxampError
from fxamp.ir import ENGINE, RUN
from fxamp.module_hooks import HOOKS, recomputed_weights
from fxamp.patched import patched

# What nn.Module itself keeps in an instance; Structure looks after parameters, modules and hooks.
_OWN = frozenset({*nn.Module().__dict__, "__dict__", "__class__", ENGINE, RUN})
_TABLES = ("_parameters", "_buffers")
_INHERITED = frozenset(dir(nn.Module)) - {"forward"}


class Reads:
    """What one trace reads.

    Args:
        root: the model.
        is_paused: whether what happens now is no part of the model's forward.
        lift: what stands in the graph for a number that is read anew at each call, None for all that is not.
        assignments: what forward itself has set by now.
        held: attributes that are containers of which the graph reads the tensors anew at each call.
    """

    def __init__(
        self,
        root: nn.Module,
        is_paused: Callable[[], bool],
        lift: Callable[[Place, Any], Any],
        assignments: Assignments,
        held: frozenset[Place] = frozenset(),
    ) -> None:
        self._root = root
        self._assignments = assignments
        self._paths = paths_of(root)
        self._is_paused = is_paused
        self._lift = lift
        self._held = held
        self._found: dict[tuple[int, str], tuple[Any, Any]] = {}  # (id of owner, name) -> owner, value
        self._registered: dict[tuple[int, str, str], tuple[nn.Module, Any]] = {}  # (id, name, kind) -> value
        self._listed: dict[tuple[int, str], tuple[nn.Module, dict[str, bool]]] = {}  # (id, kind) -> names: is it None
        self._looked_at: set[tuple[int, str]] = set()  # those that hold tensors of which not only None was asked
        self._known: dict[int, nn.Module] = {id(module): module for module in root.modules()}
        self._lifted: set[Place] = set()
        self._read_raw: set[Place] = set()  # from a module's `__dict__`: numbers, where others may be lifted
        self._effects = Effects()
        self._outside = Outside(self._keep, self._effects, is_paused)
        self._items: dict[int, list[Item]] = {}  # id of a list or a dictionary -> those that the graph sets
        self.settings: Settings | None = None  # what forward put into dictionaries, perhaps only this once

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note reads while the model's forward runs.

        Raises:
            CaptureError: forward wrote Python state, which a graph would not do again, or read what a hook may write.
            OptionError: a hook sets an attribute of the original model that forward reads.
        """

        def getattribute(module: nn.Module, name: str) -> Any:
            return self._read(module, name, asker(1))

        def reduce_ex(module: nn.Module, protocol: Any) -> Any:
            if not self._is_paused() and not self._assignments.is_made(module):
                self._copied(module, is_deep=sys._getframe(1).f_code is copy.deepcopy.__code__)
            return object.__reduce_ex__(module, protocol)

        if parametrize._cache_enabled and any(map(parametrize.is_parametrized, self._root.modules())):
            raise CaptureError("the call is made inside parametrize.cached(), and a graph computes its weights itself")
        failure: Exception | None = None
        try:
            with (
                patched((nn.Module, "__getattribute__", getattribute), (nn.Module, "__reduce_ex__", reduce_ex)),
                process_noted(self._keep, self._is_paused),
                torch_settings_reads(self._keep, self._is_paused),
                self._outside.noted(),
            ):
                self._outside.function(type(self._root).forward)
                for module in self._root.modules():
                    self._effects.remember_class(module)
                    self._outside.methods_of(module, is_made=False)
                    self._code_of(type(module))
                try:
                    yield
                except Exception as error:  # perhaps for what a hook has left from another call
                    self._check_hooks(error)
                    raise
            self._outside.finish()
            self._check_hooks()
        except (CaptureError, fx.proxy.TraceError) as error:
            failure = error
            raise
        finally:
            done = self._effects.undo()
            if failure is not None and isinstance(done, CaptureError) and is_for_python(done):
                raise done from failure  # whatever else a graph cannot hold: Dynamo is not to go on
        if isinstance(done, CaptureError):
            raise done
        self.settings = done

    def _check_hooks(self, cause: Exception | None = None) -> None:
        found = ((owner, name, value) for (_, name), (owner, value) in self._found.items())
        try:
            check_hook_writes(self._root, found, self._title, frozenset(self._outside.names))
        except FxampError as error:
            raise error from cause

    def _read(self, module: nn.Module, name: str, frame: types.FrameType) -> Any:
        """An attribute of a module, for whoever asks."""
        if issubclass(type(module), torch.jit.ScriptModule):  # torch.jit's own; what it does is compiled
            return object.__getattribute__(module, name)
        if id(module) not in self._known and not self._is_paused():
            self._meet(module)
        try:
            value = object.__getattribute__(module, name)
        except AttributeError:
            if name not in _OWN and not self._is_paused() and not self._assignments.has(module, name):
                self._keep_registered(self._own(module, name), name)
            raise
        if name == "training" and id(module) not in self._paths and not self._is_paused():
            self._keep(self._own(module, name), name, value)  # a module outside of the model's tree
        if name in _TABLES and not self._is_paused() and not self._assignments.is_made(module):
            self._listed.setdefault((id(module), name), (self._own(module, name), without(value, tuple(value))))
        if name == "__dict__" and not self._is_paused() and _is_code_of_a_model(frame):
            self._read_past(module, value, frame.f_code)
        if name in _OWN or self._is_paused() or (name in _INHERITED and name not in module.__dict__):
            return value
        if name in module.__dict__ and self._assignments.has(module, name):
            return self._assignments.value(module, name)
        owner = self._own(module, name)
        if isinstance(value, torch.Tensor) and is_compared_with_others(frame):
            raise CaptureError(
                f"{user_line()}: forward may ask whether {self._title(owner, name)} is the same tensor as another "
                "(`is`), which a graph cannot hold"
            )
        if isinstance(value, torch.Tensor) and not is_asked_whether_none(frame, name):
            self._looked_at.add((id(owner), name))
        return self._note(owner, name, value)

    def names(self, name: str) -> bool:
        """Whether a function of the model's names an attribute, of whatever object."""
        return name in self._outside.names

    def follow(self, function: Callable[..., Any]) -> None:
        """Look at what a function can read from outside."""
        self._outside.function(function)

    def take_items(self) -> list[tuple[Item, Any]]:
        """Items of what attributes hold that forward has set, and to what; the graph is to set them."""
        taken: list[tuple[Item, Any]] = []
        for (_, name), (owner, held) in self._found.items():
            path, before = self._path(owner), self._effects.held_before(held)
            if path is None or before is None or id(held) in self._items or self._assignments.has(owner, name):
                continue
            found = items_set(held, before)
            if found and not any(is_inside(held, other) for _, other in self._found.values()):
                self._items[id(held)] = [Item(path, name, key) for key in found]
                self._effects.take(held)
                taken += zip(self._items[id(held)], found.values(), strict=True)
        return taken

    def keep_unchanged(self) -> None:
        """Take for read what forward has set to what it was: a graph that does not set it is for that."""
        for module, name, held in self._assignments.unchanged():
            if name not in _OWN:
                self._keep(module, name, held)

    def cells(self, decided: set[Place], constants: Iterable[torch.Tensor]) -> tuple[Cell, ...]:
        """What was read, as it was.

        Args:
            decided: places whose number Python's control flow used, though it is a value of the graph.
            constants: tensors that the graph reads at each call, some in the memory of arrays of numpy.
        """
        for _, value in self._found.values():
            share_arrays(value, constants)
        names = frozenset(self._outside.names)
        scope = Scope(names, self._paths, self._root, self._held)
        found, ties = [], ties_of(self._root)
        for (_, name), (owner, value) in self._found.items():
            path, title = self._path(owner), self._title(owner, name)
            is_made = isinstance(owner, nn.Module) and self._assignments.is_made(owner)
            if is_made and (value is MISSING or isinstance(value, SCALARS)):
                continue  # the same at each call, which makes another module
            tie = ties.get((path, name)) if path is not None else None
            items = self._items.get(id(value), [])
            if items and (path, name) != (items[0].path, items[0].name):  # by another name: the same one at each call
                tie = (items[0].path, "", items[0].name)
            keys = tuple(item.key for item in items)
            holder = None if path is not None else {name: value} if is_made else owner  # it may have replaced it
            cell = Cell(name, (), path, holder, title, names, tie=tie, items_set=keys)
            if path is not None and (path, name) in self._lifted - decided - self._read_raw:
                found.append(cell.with_frozen((type(value), LIFTED)))
            elif path is not None and (path, name) in self._held:
                found.append(cell.with_frozen((type(value), make_of(value), HELD)))
            elif path is not None and isinstance(value, torch.Tensor) and (id(owner), name) not in self._looked_at:
                found.append(cell.with_frozen((torch.Tensor, NOT_NONE)))
            else:
                found.append(cell.with_frozen(cell.standing_for(value, scope)))
        for (_, name, kind), (owner, value) in self._registered.items():
            path, title = self._path(owner), self._title(owner, name)
            holder = None if path is not None else owner
            tie = None if value is MISSING else ties.get((path or "", name))
            cell = Cell(name, (), path, holder, title, names, kind, tie)
            found.append(cell.with_frozen(cell.standing_for(value, scope)))
        for (_, kind), (owner, entries) in self._listed.items():
            path, title = self._path(owner), self._title(owner, kind)
            holder = None if path is not None else owner
            found.append(Cell(kind, frozen(entries, scope), path, holder, title, names, items_set=tuple(entries)))
        found += [
            Cell(name, frozen(vars(kind)[name], scope), None, kind, f"{kind.__qualname__}.{name}", names)
            for kind in self._outside.classes
            for name in sorted(names & vars(kind).keys())
        ]
        found += [
            Cell(name, frozen(MISSING, scope), None, kind, f"{kind.__qualname__}.{name}", names)
            for kind in self._outside.classes
            for name in sorted(_inherited_values(kind, names))
        ]
        found += [
            Cell(name, frozen(value, scope), None, kind, f"{kind.__qualname__}.{name}", names)
            for kind, held in self._effects.classes.items()
            for name, value in held.items()
            if name in names and issubclass(kind, nn.Module) and not is_descriptor(value)
        ]
        if any(map(parametrize.is_parametrized, self._root.modules())):
            found.append(Cell("_cache_enabled", (int, 0), None, vars(parametrize), "parametrize.cached()", names))
        return tuple(found)

    def _path(self, owner: Any) -> str | None:
        return self._paths.get(id(owner)) if isinstance(owner, nn.Module) else None

    def _title(self, owner: Any, name: str) -> str:
        if isinstance(owner, nn.Module):
            path = self._path(owner)
            return f"self.{path}.{name}" if path else f"self.{name}"
        if isinstance(owner, type):
            return f"{owner.__qualname__}.{name}"
        if isinstance(owner, types.CellType):
            return "a variable of an enclosing function"
        if isinstance(owner, types.FunctionType):
            what = {"__code__": "code", "__defaults__": "defaults"}.get(name, "attributes")
            return f"the {what} of {owner.__qualname__}()"
        if owner is VARIABLES:
            return title_of(name)
        if owner is SETTINGS:
            return f"the setting {name.removeprefix('torch.')}() of torch"
        return f"the global {name!r} of {owner.get('__name__', 'a module')}"

    def _note(self, module: nn.Module, name: str, value: Any) -> Any:
        if name not in module.__dict__:
            owner = next((kind for kind in type(module).__mro__ if name in kind.__dict__), None)
            if owner is None or (is_library(owner) and name != "forward"):
                return value
            if module is not self._root or name != "forward":  # one set on a converted model is outside of its graphs
                self._keep(module, name, MISSING)
            for kind in itertools.takewhile(lambda kind: kind is not owner, type(module).__mro__):
                self._keep(kind, name, MISSING)  # where it would be found first
            self._keep(owner, name, self._effects.before(owner, name, owner.__dict__[name]))
            return value
        if name in recomputed_weights(module):
            return value
        self._keep(module, name, value)
        value = module.__dict__[name]  # a cached function has been opened
        place = (self._paths.get(id(module), ""), name)
        instead = self._lift(place, value) if id(module) in self._paths else None
        if instead is None:
            return value
        self._lifted.add(place)
        return instead

    def _code_of(self, kind: type) -> None:
        """The code of a forward of the user's, which a notebook that loads edited files puts in the old one's place."""
        forward = next((vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each)), None)
        if isinstance(forward, types.FunctionType) and not is_library_function(forward):
            self._keep(forward, "__code__", forward.__code__)

    def _read_past(self, module: nn.Module, held: dict[str, Any], code: types.CodeType) -> None:
        """A module whose `__dict__` a function reads: all that is there, and what the function may ask for by name."""
        for name in dict.fromkeys((*held, *named_in(code).strings)):
            if name not in _OWN and not self._assignments.has(module, name):
                self._read_raw.add((self._paths.get(id(module), ""), name))
                self._keep(self._own(module, name), name, held.get(name, MISSING))

    def _copied(self, module: nn.Module, is_deep: bool) -> None:
        """A module that forward copies, whose attributes are read past `getattr`.

        Raises:
            CaptureError: it holds tensors, and a deep copy of these would be frozen.
        """
        if is_deep and any(value is not None for table in _TABLES for value in module.__dict__[table].values()):
            raise CaptureError(
                f"forward copies a {type(module).__qualname__} by copy.deepcopy, with the numbers that its parameters "
                "and buffers have now"
            )
        for name, value in list(module.__dict__.items()):
            if name not in _OWN:
                self._note(self._own(module, name), name, value)
        self._keep(self._own(module, "training"), "training", module.training)

    def _meet(self, module: nn.Module) -> None:
        """A module outside of the model's tree, in a list say: Structure does not look after its parts and hooks."""
        self._known[id(module)] = module
        is_made = self._assignments.is_made(module) or "_modules" not in module.__dict__  # or it is being made
        self._outside.methods_of(module, is_made)
        if not is_other_self(module, self._root):
            for table in ("_modules", *HOOKS):
                if table in module.__dict__:  # a module that a table makes on demand may have none yet
                    self._keep(module, table, module.__dict__[table])

    def _own(self, module: nn.Module, name: str) -> nn.Module:
        """The module; the root for another self of it, which must agree with it."""
        if id(module) in self._paths or not is_other_self(module, self._root):
            return module
        check_agrees(module, self._root, name)
        return self._root

    def _keep_registered(self, module: nn.Module, name: str) -> None:
        """A parameter or buffer, whose shape the graph may hold, or a name that there is not.

        A value of forward's own that stands there (torch.func.functional_call has swapped it in) is the graph's, and
        what a module that forward makes (a loss) has registered is from no earlier call.
        """
        tables = [kind for kind in (*_TABLES, "_modules") if name in module.__dict__.get(kind, {})]
        for owner in type(module).__mro__ if not tables else ():
            if not is_library(owner):
                self._keep(owner, name, MISSING)
        if self._assignments.is_made(module):
            return
        for kind in tables[:1]:
            value = module.__dict__[kind][name]
            if kind != "_modules" and not issubclass(type(value), fx.Proxy):
                self._registered.setdefault((id(module), name, kind), (module, value))
        if not tables:
            self._keep(module, name, MISSING)
            for kind in (kind for kind in _TABLES if kind in module.__dict__):
                self._registered.setdefault((id(module), name, kind), (module, MISSING))

    def _keep(self, owner: Any, name: str, value: Any) -> None:
        if (id(owner), name) not in self._found:
            self._found[id(owner), name] = (owner, value)
            self._effects.remember(owner, name, value, self._title(owner, name))
            self._outside.follow(value)


def _inherited_values(kind: type, names: Set[str]) -> set[str]:
    """The named values that a class of the user's has from one above it, and may be given itself."""
    above = [vars(each) for each in kind.__mro__[1:] if not is_library(each)]
    held = {name: value for each in reversed(above) for name, value in each.items() if name in names}
    return {name for name, value in held.items() if name not in vars(kind) and not is_descriptor(value)}


def _is_code_of_a_model(frame: types.FrameType) -> bool:
    """Whether code is neither torch's nor Python's own (functools.cached_property)."""
    name = str(frame.f_globals.get("__name__")).partition(".")[0]
    return not is_library_frame(frame) and (name == "__main__" or name not in sys.stdlib_module_names)
