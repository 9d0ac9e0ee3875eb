"""What forward asks for by a name that it makes at run time, which no code shows.

    getattr(config, f"layer{n}"), hasattr(config, key), vars(config), dataclasses.asdict(config)
    importlib.import_module(self.backend).scale

While a forward is traced, the files of its functions have a `getattr` of their own that takes note of it.
"""

import contextlib
import dataclasses
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from fxamp.capture.elements import SCALARS
from fxamp.capture.locations import is_library_frame
from fxamp.capture.objects import EVERYTHING, is_library
from fxamp.patched import patched

_KNOWN_OTHERWISE = (nn.Module, torch.Tensor, fx.Proxy, *SCALARS)
ASKED_BY = frozenset({"getattr", "hasattr", "vars"})


class Asked:
    """The names that a trace asks for.

    Args:
        note: is given an object of the user's, a class, a function or a Python module, and the name of an attribute.
        is_paused: whether what happens now is no part of the model's forward; another thread's is none.
    """

    def __init__(self, note: Callable[[Any, str], None], is_paused: Callable[[], bool]) -> None:
        self._note = note
        self._is_paused = is_paused
        self._is_over = False
        self._kinds: dict[type, bool] = {}
        self._instead = {"getattr": self._getattr, "hasattr": self._hasattr, "vars": self._vars}
        self._places: list[tuple[dict[str, Any], str, Any]] = []  # the globals of a file, a name, and what stands there

    def listen(self, space: dict[str, Any]) -> None:
        """Take note of what code with these globals asks for, until `restore`."""
        if self._is_over:
            return
        for name, instead in self._instead.items():
            if name not in space:
                space[name] = instead
                self._places.append((space, name, instead))

    def is_own(self, value: Any) -> bool:
        """Whether it is what stands in a file for a builtin."""
        return isinstance(value, types.MethodType) and isinstance(value.__self__, Asked)

    def restore(self) -> None:
        """Leave everybody alone again, for good."""
        self._is_over = True
        for space, name, instead in self._places:
            if space.get(name) is instead:
                del space[name]
        self._places.clear()

    @contextlib.contextmanager
    def modules_noted(self, loaded: Callable[[types.ModuleType], None]) -> Iterator[None]:
        """Around a trace: a Python module that is asked for by its name is given to `loaded`."""
        load = importlib.import_module

        def import_module(*args: Any, **kwargs: Any) -> types.ModuleType:
            module = load(*args, **kwargs)
            if not self._is_paused() and not is_library_frame(sys._getframe(1)):
                loaded(module)
            return module

        self.listen(vars(dataclasses))
        with patched((importlib, "import_module", import_module)):
            yield

    def _ask(self, value: Any, name: Any) -> None:
        kind = type(value)
        if kind not in self._kinds:
            self._kinds[kind] = _matters(kind)
        is_own = type(name) is str and not name.startswith("__")  # what Python and dataclasses keep stays as it is
        if self._kinds[kind] and is_own and not self._is_paused():
            self._note(value, name)

    def _getattr(self, value: Any, name: Any, *default: Any) -> Any:
        self._ask(value, name)
        return getattr(value, name, *default)

    def _hasattr(self, value: Any, name: Any) -> bool:
        self._ask(value, name)
        return hasattr(value, name)

    def _vars(self, *value: Any) -> Any:
        if not value:
            return sys._getframe(1).f_locals
        self._ask(value[0], EVERYTHING)
        return vars(*value)


def _matters(kind: type) -> bool:
    """Whether attributes of such a value may be state that nothing else watches."""
    if issubclass(kind, (type, types.FunctionType, types.ModuleType)):
        return True
    return not issubclass(kind, _KNOWN_OTHERWISE) and not is_library(kind)
