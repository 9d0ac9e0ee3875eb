"""Settings of torch's that forward asks for: a graph holds for what they were.

if torch.are_deterministic_algorithms_enabled(): ...
if torch.backends.cudnn.benchmark: ...
"""

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from fxamp.capture.locations import is_library_frame, user_line
from fxamp.errors import CaptureError

_OF_TORCH = (
    *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    *("get_deterministic_debug_mode", "get_float32_matmul_precision", "get_num_threads", "get_num_interop_threads"),
    *("is_anomaly_enabled", "is_anomaly_check_nan_enabled"),
)
# While a model is traced all kernels are on: see `fxamp.switches`.
_OF_ATTENTION = ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled")
_OF_RANKS = ("is_initialized", "get_world_size", "get_rank")
_PROPERTY: Any = torch.backends.ContextProp


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


@contextlib.contextmanager
def torch_settings_reads(keep: Callable[[Any, Any, Any], None], is_paused: Callable[[], bool]) -> Iterator[None]:
    """Take note of the settings that the model asks for in this thread; what it has set itself is the graph's.

    Args:
        keep: takes an owner, a name and what it holds.
    """
    thread = threading.get_ident()

    def is_asked_by_the_model() -> bool:
        return threading.get_ident() == thread and not is_paused() and not is_library_frame(sys._getframe(2))

    def noting(teller: Callable[[], Any]) -> Callable[[], Any]:
        name = SETTINGS.known_by(teller)
        before = SETTINGS[name]

        def tell() -> Any:
            if is_asked_by_the_model() and SETTINGS[name] == before:
                keep(SETTINGS, name, before)
            return teller()

        return tell

    def refusing(teller: Callable[[], Any]) -> Callable[[], Any]:
        def tell() -> Any:
            if is_asked_by_the_model():
                raise CaptureError(
                    f"{user_line()}: forward asks torch.backends.cuda.{teller.__name__}(), and a graph holds for any "
                    "kernel of attention"
                )
            return teller()

        return tell

    def noting_ranks(teller: Callable[..., Any]) -> Callable[..., Any]:
        name = SETTINGS.known_by(_ranks)

        def tell(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and not is_paused():  # torch's own modules ask, too
                keep(SETTINGS, name, SETTINGS[name])
            return teller(*args, **kwargs)

        return tell

    read = _PROPERTY.__get__

    def get(setting: Any, holder: Any, kind: Any) -> Any:
        if is_asked_by_the_model():
            keep(SETTINGS, name := SETTINGS.known_by(setting.getter), SETTINGS[name])
        return read(setting, holder, kind)

    places = [(torch, name, noting) for name in _OF_TORCH if hasattr(torch, name)]
    places += [(torch.backends.cuda, name, refusing) for name in _OF_ATTENTION if hasattr(torch.backends.cuda, name)]
    if distributed.is_available():
        places += [(distributed, name, noting_ranks) for name in _OF_RANKS]
    originals = [(space, name, getattr(space, name), wrap) for space, name, wrap in places]

    try:
        for space, name, teller, wrap in originals:
            setattr(space, name, wrap(teller))
        _PROPERTY.__get__ = get
        yield
    finally:
        for space, name, teller, _ in originals:
            setattr(space, name, teller)
        _PROPERTY.__get__ = read
