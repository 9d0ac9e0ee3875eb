"""Convert chosen submodules one by one, and leave them callable: FSDP2 units, checkpointed blocks, modules with hooks.

The converted model is then a tree: its own modules above the boundaries are shallow copies, each boundary is a
converted model of its own, and everything below is the user's. In the graph around them a boundary is one
`call_module`. Values cross it in float32.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from fxamp.capture.leaves import TABLES
from fxamp.derived import quiet
from fxamp.errors import OptionError, nearest
from fxamp.model.converted import make_sibling
from fxamp.model.engine import Engine
from fxamp.model.likeness import likeness
from fxamp.model.part_options import decisions, options_within
from fxamp.model.views import keep_alive, take_state
from fxamp.model.ways import Way
from fxamp.options import Options
from fxamp.references import repointed
from fxamp.tree import every_module

BLOCKS = "blocks"


class AsWritten(Way):
    """The forward around boundaries where no graph can hold it: it runs as the user wrote it, in float32."""

    runs = "as it is written"

    def how(self, module: nn.Module) -> str:
        """How calls run, in a sentence about the model."""
        return "runs as written around its blocks"

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return base.forward(module, *args, **kwargs)


def check_boundaries(model: nn.Module, boundaries: Any, options: Options) -> tuple[str, ...]:
    """The paths that `boundaries=` names.

    Args:
        boundaries: module classes, paths, globs, or "blocks" for the repeated blocks of the model; one or several.
            A list of modules stands for what it holds, and a module for all places in which it is.

    Raises:
        OptionError: something that names no submodule, or an option that does not go with boundaries.
    """
    if boundaries is None or boundaries == ():
        return ()
    asked = (boundaries,) if isinstance(boundaries, (str, type)) else boundaries
    if not isinstance(asked, Iterable):
        raise OptionError(f"boundaries={boundaries!r} is not allowed. Give module classes, paths, globs or 'blocks'.")
    if options.opt_level != "O1":
        raise OptionError(f"boundaries= goes with opt_level='O1' only, not with {options.opt_level!r}.")
    modules = dict(every_module(model))
    found = {id(modules[path]) for each in asked for path in _paths(model, each)}
    paths = [path for path, module in modules.items() if id(module) in found]
    return tuple(sorted(paths, key=lambda path: path.count(".")))


def _paths(model: nn.Module, asked: Any) -> list[str]:
    modules = {path: module for path, module in every_module(model) if path}
    if asked == BLOCKS and (BLOCKS not in modules or _is_container(modules[BLOCKS])):
        found = _repeated(model)
        if not found:
            raise OptionError(
                f"boundaries='blocks': {type(model).__qualname__} repeats no block. Name classes or paths."
            )
    elif isinstance(asked, str):
        found = [path for path in modules if fnmatch.fnmatchcase(path, asked)]
        if not found:
            raise OptionError(f"boundaries: {asked!r} matches no submodule.{nearest(asked, modules)}")
    elif isinstance(asked, type) and issubclass(asked, nn.Module):
        found = [path for path, module in modules.items() if isinstance(module, asked)]
        if not found:
            classes = {type(module).__qualname__ for module in modules.values()}
            raise OptionError(
                f"boundaries: the model has no submodule of class {asked.__qualname__}."
                f"{nearest(asked.__qualname__, classes)}"
            )
    else:
        raise OptionError(f"boundaries: {asked!r} is not allowed. Give module classes, paths, globs or 'blocks'.")
    return [each for path in found for each in _called(modules, path)]


def _called(modules: Mapping[str, nn.Module], path: str) -> list[str]:
    """The path, or for a container, which is never called itself, those of what it holds."""
    if not _is_container(modules[path]):
        return [path]
    return [each for name in modules[path]._modules for each in _called(modules, f"{path}.{name}")]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _repeated(model: nn.Module) -> list[str]:
    """The outermost children of lists and sequences of which two or more have one class, and parts."""
    found: list[str] = []
    for path, module in model.named_modules():
        if any(path == known or path.startswith(known + ".") for known in found):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(child) for child in module]
        found += [
            f"{path}.{name}".lstrip(".")
            for name, child in module._modules.items()
            if child is not None
            and kinds.count(type(child)) > 1
            and child._modules
            and any(True for _ in child.parameters())
        ]
    return found


def make_tree(
    model: nn.Module, engine: Engine, paths: tuple[str, ...], build: Callable[[Options], Engine]
) -> nn.Module:
    """A sibling of the model with converted siblings of its submodules at `paths`; the model is not changed.

    Args:
        engine: of the forward around them.
        build: makes an engine; called once for equal blocks.
    """
    sibling = make_sibling(model, engine)
    copies: dict[int, nn.Module] = {}
    shared: dict[Any, Engine] = {}
    modules = [path for path, _ in every_module(model)]
    for path in paths:
        owner = sibling
        *above, name = path.split(".")
        for part in above:
            owner = _replaced(owner, part, copies, _shallow_copy)
        _replaced(owner, name, copies, lambda block, path=path: _converted(block, path, engine, shared, build, modules))  # type: ignore[misc]
    for copy in {id(model): sibling, **copies}.values():
        own = {name: value for name, value in copy.__dict__.items() if name not in TABLES}
        copy.__dict__.update({name: repointed(value, {id(model): sibling, **copies}) for name, value in own.items()})
    return sibling


def _replaced(
    owner: nn.Module, name: str, copies: dict[int, nn.Module], make: Callable[[nn.Module], nn.Module]
) -> nn.Module:
    """The copy of a child, in the child's place; a module that stands in two places has one copy."""
    child = owner._modules[name]
    assert child is not None
    if id(child) not in copies:
        copies[id(child)] = made = make(child)
        copies[id(made)] = made
    owner._modules[name] = copies[id(child)]
    return copies[id(child)]


def _shallow_copy(module: nn.Module) -> nn.Module:
    twin: nn.Module = object.__new__(quiet(type(module)))
    take_state(module, twin)
    keep_alive(module, twin)
    return twin


def _converted(
    block: nn.Module,
    path: str,
    outer: Engine,
    shared: dict[Any, Engine],
    build: Callable[[Options], Engine],
    modules: Collection[str],
) -> nn.Module:
    options = options_within(block, path, outer.options, modules)
    key = (*likeness(block), decisions(options))
    if key not in shared:
        shared[key] = build(options)
        shared[key].is_boundary = True
    shared[key].paths += (path,)
    outer.boundaries[path] = shared[key]
    return make_sibling(block, shared[key])
