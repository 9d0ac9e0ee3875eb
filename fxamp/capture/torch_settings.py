"""Settings of torch's that forward asks for: a graph holds for what they were.

if torch.are_deterministic_algorithms_enabled(): ...
if torch.backends.cudnn.benchmark: ...
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from fxamp.capture.locations import asker, is_library_frame, user_line
from fxamp.errors import CaptureError
from fxamp.patched import patched

_OF_TORCH = (
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("get_deterministic_debug_mode", "get_float32_matmul_precision", "get_num_threads", "get_num_interop_threads"),
    *("is_anomaly_enabled", "is_anomaly_check_nan_enabled"),
)
# While a model is traced all kernels are on: see `fxamp.switches`.
_OF_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_OF_RANKS = ("is_initialized", "get_world_size", "get_rank")
_PROPERTY: Any = torch.backends.ContextProp
_GETTERS = [
    each.getter
    for kind in (type(torch.backends.cudnn), type(torch.backends.mkldnn))
    for each in vars(kind).values()
    if isinstance(each, _PROPERTY)
]


class _Settings:
    """What they are now, by the names of the functions that tell."""

    def __init__(self) -> None:
        self._tellers: dict[str, Callable[[], Any]] = {}
        self._values: dict[Any, Any] = {}

    def known_by(self, teller: Callable[[], Any]) -> str:
        """The name of a setting, known from now on."""
        name = f"{teller.__module__}.{teller.__qualname__}"
        self._tellers.setdefault(name, teller)
        return name

    def __getitem__(self, name: str) -> Any:
        value = self._tellers[name]()
        return self._values.setdefault((type(value), value), value)  # which is compared by identity

    def get(self, name: str, default: Any = None) -> Any:
        """As a dictionary's."""
        return self[name] if name in self._tellers else default

    def name_of(self, function: Any) -> str | None:
        """The setting that a function of torch's tells of, which the model may have by a name of its own; None for
        any other.
        """
        return _ASKED.get(function) if isinstance(function, types.FunctionType | types.BuiltinFunctionType) else None


def _ranks() -> tuple[int, int] | None:
    """This process's, and how many there are; None before `init_process_group`."""
    if not (distributed.is_available() and _is_initialized()):
        return None
    return _get_rank(), _get_world_size()


SETTINGS = _Settings()
_ASKED = {getattr(torch, name): SETTINGS.known_by(getattr(torch, name)) for name in _OF_TORCH if hasattr(torch, name)}
if distributed.is_available():
    _is_initialized, _get_rank, _get_world_size = (
        distributed.is_initialized, distributed.get_rank, distributed.get_world_size,
    )  # fmt: skip
    _ASKED |= {getattr(distributed, name): SETTINGS.known_by(_ranks) for name in _OF_RANKS}


class _Asker:
    """What stands in the place of torch's functions while a model is traced.

    Args:
        keep: takes an owner, a name and what it holds.
        is_paused: whether what happens now is no part of the model's forward.
    """

    def __init__(self, keep: Callable[[Any, Any, Any], None], is_paused: Callable[[], bool]) -> None:
        self._keep, self._is_paused = keep, is_paused
        self._before = {getter: SETTINGS[SETTINGS.known_by(getter)] for getter in _GETTERS}

    def _is_asked_by_the_model(self) -> bool:
        return not self._is_paused() and not is_library_frame(asker(2))

    def noting(self, teller: Callable[[], Any]) -> Callable[[], Any]:
        """The function, of which a note is taken, with what it told before forward: that may have set it."""
        name = SETTINGS.known_by(teller)
        before = SETTINGS[name]

        def tell() -> Any:
            if self._is_asked_by_the_model():
                self._keep(SETTINGS, name, before)
            return teller()

        return tell

    def noting_ranks(self, teller: Callable[..., Any]) -> Callable[..., Any]:
        """The same for one about the process group, for which torch's own modules ask, too."""
        name = SETTINGS.known_by(_ranks)

        def tell(*args: Any, **kwargs: Any) -> Any:
            if not self._is_paused():
                self._keep(SETTINGS, name, SETTINGS[name])
            return teller(*args, **kwargs)

        return tell

    def refusing(self, teller: Callable[[], Any]) -> Callable[[], Any]:
        """A function for which the model may not ask."""

        def tell() -> Any:
            if self._is_asked_by_the_model():
                raise CaptureError(
                    f"{user_line()}: forward asks torch.backends.cuda.{teller.__name__}(), and a graph holds for any "
                    "kernel of attention"
                )
            return teller()

        return tell

    def reading(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """How `torch.backends.cudnn.benchmark` and the like are read."""

        def get(setting: Any, holder: Any, kind: Any) -> Any:
            if setting.getter in self._before and self._is_asked_by_the_model():
                self._keep(SETTINGS, SETTINGS.known_by(setting.getter), self._before[setting.getter])
            return read(setting, holder, kind)

        return get


@contextlib.contextmanager
def torch_settings_reads(keep: Callable[[Any, Any, Any], None], is_paused: Callable[[], bool]) -> Iterator[None]:
    """Take note of the settings that the model asks for in this thread; see `_Asker` for the arguments."""
    asker = _Asker(keep, is_paused)
    places: list[tuple[Any, str, Callable[..., Any]]] = [(torch, name, asker.noting) for name in _OF_TORCH]
    places += [(torch.backends.cuda, name, asker.refusing) for name in _OF_ATTENTION]
    places += [(distributed, name, asker.noting_ranks) for name in _OF_RANKS if distributed.is_available()]
    places += [(_PROPERTY, "__get__", asker.reading)]
    found = [(space, name, wrap(getattr(space, name))) for space, name, wrap in places if hasattr(space, name)]
    with patched(*found):
        yield
