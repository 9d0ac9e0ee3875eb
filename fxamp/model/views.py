"""A converted model without its engine: an instance of the user's own class on the same state."""

import contextlib
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fxamp.capture.leaves import TABLES, is_boundary
from fxamp.derived import BASE, quiet
from fxamp.errors import OptionError
from fxamp.ir import ENGINE, ORIGINAL, RUN
from fxamp.references import copy_slots, repointed
from fxamp.tree import every_module


def plain_view(model: nn.Module, runs_around: bool = False) -> nn.Module:
    """The model without its engine: an instance of the user's own class on the same state.

    Args:
        runs_around: whether it has the forward, too, that was set on a converted model since, around its own: by the
            user, by Accelerate.
    """
    plain: nn.Module = object.__new__(quiet(base_of(model)))
    take_state(model, plain, functions=False)
    plain.__dict__.pop(RUN, None)
    plain.__dict__.pop(ORIGINAL, None)
    if plain.__dict__.pop(ENGINE, None) is not None:
        plain.__dict__.pop("_compiled_call_impl", None)  # of the converted one, by `model.compile()`
        if not runs_around:
            plain.__dict__.pop("forward", None)
    return plain


def base_of(model: nn.Module) -> Any:
    """The user's class of a converted model, or of a view of one; any other model's own."""
    return getattr(type(model), BASE, type(model))


def check_class(model: nn.Module) -> None:
    """Refuse a parametrization put on a converted model itself: it derives a class from the converted one's, which has
    properties in the place of parameters, and takes those away from the user's class, too, which has no properties.

    Raises:
        OptionError: such a model.
    """
    if BASE not in vars(type(model)) and hasattr(type(model), BASE) and is_parametrized(model):
        names = ", ".join(model.parametrizations)  # type: ignore[arg-type]
        raise OptionError(
            f"{base_of(model).__qualname__} was parametrized ({names}) after it was converted. Take that back by "
            "torch.nn.utils.parametrize.remove_parametrizations, parametrize the model, and convert it then."
        )


def plain_tree(model: nn.Module) -> nn.Module:
    """The plain view of a model and of every converted model inside it, on the same state."""
    views: dict[int, nn.Module] = {}

    def view(module: nn.Module) -> nn.Module:
        if id(module) not in views:
            views[id(module)] = plain = plain_view(module, runs_around=module is not model)
            for name, child in module._modules.items():
                if child is not None and not is_boundary(child) and nested(child, itself=True):
                    plain._modules[name] = view(child)
        return views[id(module)]

    return view(model)


def nested(model: nn.Module, itself: bool = False) -> list[str]:
    """Paths of the converted models inside a model, but for its boundaries and what they hold."""
    modules = dict(every_module(model))
    borders = tuple(f"{path}." for path, module in modules.items() if path and is_boundary(module))
    inside = [path for path, module in modules.items() if ENGINE in module.__dict__ and (path or itself)]
    return [path for path in inside if not f"{path}.".startswith(borders)]


@contextlib.contextmanager
def plain_inside(model: nn.Module, paths: list[str]) -> Iterator[None]:
    """The converted models at `paths` run their plain forwards: what is around them converts those."""
    inner = {id(module): module for module in map(model.get_submodule, paths)}
    engines = [(module, module.__dict__.pop(ENGINE)) for module in inner.values() if ENGINE in module.__dict__]
    try:
        yield
    finally:
        for module, engine in engines:
            module.__dict__[ENGINE] = engine


def take_state(model: nn.Module, twin: nn.Module, functions: bool = True) -> None:
    """Give a twin the attributes of a model: own children and hooks, all else the same objects, its weights too.

    What leads to the model from its own attributes (a bound method, say) leads to the twin.

    Args:
        functions: whether that holds for functions that close over it, too, which are then other objects.
    """
    twins = {id(model): twin}
    state = {
        name: value if name in TABLES else repointed(value, twins, functions) for name, value in model.__dict__.items()
    }
    own = {name: state[name].copy() for name in TABLES if name in state and name not in ("_parameters", "_buffers")}
    twin.__dict__.update(state | own)
    copy_slots(model, twin)


class _Original:
    """Holds what nothing should look into."""

    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def keep_alive(model: nn.Module, twin: nn.Module) -> None:
    """Let a model live as long as a twin that has its state, where its end would be noticed.

    `model = fxamp.convert(model)` lets go of the original: its `__del__` would take off the hooks that both have, and a
    weak reference to it that a child has would be dead.
    """
    if ORIGINAL in twin.__dict__:  # of a model that is converted again
        return
    if hasattr(type(model), "__del__") or not all(map(_is_torchs, weakref.getweakrefs(model))):
        twin.__dict__[ORIGINAL] = _Original(model)


def to_convert_again(model: nn.Module) -> nn.Module:
    """The plain view of a converted model, with what keeps the original alive; with a forward that was set on it since,
    which is no conversion's.
    """
    own = types.MethodType(type(model).forward, model)  # Accelerate sets it when it takes its wrappers off
    plain = plain_view(model, runs_around=model.__dict__.get("forward") != own)
    plain.__dict__.update({name: held for name, held in model.__dict__.items() if name == ORIGINAL})
    return plain


def _is_torchs(reference: Any) -> bool:
    """Whether a weak reference is one of those that Dynamo has to every module, once it has compiled anything."""
    return str(getattr(reference.__callback__, "__module__", "")).startswith("torch.")


class _Reached(BaseException):
    """Carries the arguments of forward past whatever the caller catches."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.given = args, kwargs


def forward_arguments(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What forward is given in a call of the model: a class may complete the arguments in a `__call__` of its own.

    Forward does not run.
    """
    if type(model).__call__ is nn.Module.__call__:
        return args, kwargs

    def reached(*given: Any, **named: Any) -> None:
        raise _Reached(given, named)

    twin = plain_view(model)
    twin.__dict__["forward"] = reached
    try:
        twin(*args, **kwargs)
    except _Reached as found:
        return found.given
    return args, kwargs
