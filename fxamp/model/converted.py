"""What the user gets back: a sibling of their model, the same state with a rewritten forward.

The sibling is an instance of a cached subclass that has the name, the methods and the signature of the user's
class and overrides `forward` alone. It has its own `__dict__` and hooks, and shares parameters, buffers and
submodules with the original. It pickles and deep-copies as (the plain model, the engine's recipe); a copy has the
same graphs, a loaded pickle captures them again at its first call.
"""

import contextlib
import copy
import functools
import inspect
from typing import Any

import torch
from torch import nn

from fxamp.capture.frames import as_written, leave_out, own_code
from fxamp.derived import BASE, Derived, finalizer_of, subclass
from fxamp.errors import OptionError
from fxamp.ir import ENGINE, RUN
from fxamp.model.compiling import graphs_made_ready, make_ready
from fxamp.model.engine import Engine
from fxamp.model.methods import under_autocast
from fxamp.model.state_dicts import load_exactly, take_over_writes
from fxamp.model.storage import Marks, apply_exactly, mark, marks_of
from fxamp.model.views import base_of, keep_alive, plain_view, take_state
from fxamp.references import repointed


def make_sibling(model: nn.Module, engine: Engine) -> nn.Module:
    """The user's model again, with `engine` as its forward; the model itself is not changed."""
    if "forward" in model.__dict__:
        raise OptionError(
            f"{type(model).__qualname__} has a forward that was set on the instance (model.forward = ...). "
            "Convert the model before that is done, or give the class that forward."
        )
    return _with_state(object.__new__(_siblings.of(base_of(model))), model, engine)


def _with_state(sibling: nn.Module, plain: nn.Module, engine: Engine | None) -> nn.Module:
    take_state(plain, sibling)
    keep_alive(plain, sibling)
    if engine is not None:
        sibling.__dict__[ENGINE] = engine
        sibling.__dict__[RUN] = own_code(_run)
    return sibling


def _make_class(base: Any) -> type:
    @functools.wraps(as_written(base.forward))
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get(ENGINE) is None:  # made by self.__class__(...), as slices of a Sequential are
            return base.forward(self, *args, **kwargs)
        return self.__dict__[RUN](self, args, kwargs)

    leave_out(forward)
    _keep_unwrapped(forward, base.forward)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        made = _rebuild, (plain_view(self), self.__dict__.get(ENGINE), marks_of(self))
        around = self.__dict__.get("forward")  # set since, which may lead back to the model
        return made if around is None else (*made, around, None, None, _set_forward)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        take_over_writes()  # the copy's parameters know nothing of the state dicts that were written into
        memo[id(self)] = twin = object.__new__(type(self))  # before its parts are copied, which may lead back to it
        _with_state(twin, copy.deepcopy(plain_view(self), memo), copy.deepcopy(self.__dict__.get(ENGINE), memo))
        mark(twin, marks_of(self), is_copy=True)
        if "forward" in self.__dict__:
            _set_forward(twin, repointed(copy.deepcopy(self.__dict__["forward"], memo), {id(self): twin}))
        return twin

    def __copy__(self: Any) -> Any:
        plain = plain_view(self)
        plain = base.__copy__(plain) if hasattr(base, "__copy__") else plain
        twin = _rebuild(plain, self.__dict__.get(ENGINE), marks_of(self))
        if "forward" in self.__dict__:
            _set_forward(twin, self.__dict__["forward"])
        return twin

    def _load_from_state_dict(self: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        base._load_from_state_dict(self, state_dict, prefix, *args)
        if (engine := self.__dict__.get(ENGINE)) is not None:
            engine.loads += 1
        load_exactly(self, state_dict, prefix)  # after the user's hooks, which may change names and values

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_other = apply_exactly(self, lambda: base._apply(self, *args, **kwargs))
        if is_other and (engine := self.__dict__.get(ENGINE)) is not None:
            engine.start_again()
        return self

    names = {
        **under_autocast(base),
        **finalizer_of(base),
        **({} if hasattr(base, "freeze") else {"freeze": freeze}),
        "__copy__": __copy__,
        "forward": forward,
        "__reduce_ex__": __reduce_ex__,
        "__deepcopy__": __deepcopy__,
        "_apply": _apply,
        "_load_from_state_dict": _load_from_state_dict,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        BASE: base,
    }
    return subclass(base, names)


_siblings = Derived(_make_class)


def _run(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of converted models, of which each has a copy: it is compiled apart from others."""
    numbers = None
    if torch.compiler.is_compiling():
        from torch._dynamo.comptime import comptime  # takes seconds to import, and is there by then

        comptime(make_ready)
        numbers = graphs_made_ready()
    engine = self.__dict__[ENGINE]
    if not torch.compiler.is_dynamo_compiling():
        engine.is_trained |= torch.is_grad_enabled()
    if not torch.compiler.is_compiling():
        take_over_writes()
    return engine(self, args, kwargs, numbers)


def freeze(self: Any) -> Any:
    """Keep the low weights for inference; call it again after a write through `p.data`. Returns the model."""
    engine = self.__dict__.get(ENGINE)
    if engine is not None:
        engine.current(self).freeze(self)
    return self


def _keep_unwrapped(forward: Any, plain: Any) -> None:
    """Let a forward have the signature of the plain one, but not lead to it: who unwraps forwards would take that."""
    with contextlib.suppress(ValueError, TypeError):
        forward.__signature__ = inspect.signature(plain)
    del forward.__wrapped__


def _set_forward(model: nn.Module, forward: Any) -> None:
    """Give a copy of a converted model the forward that was set on that, around its own."""
    model.__dict__["forward"] = forward


def _rebuild(plain: nn.Module, engine: Engine | None, marks: Marks) -> nn.Module:
    mark(plain, marks)
    return plain if engine is None else make_sibling(plain, engine)
