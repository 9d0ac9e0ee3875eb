"""Torch's global switches that forward may set for a part of itself, as calls that a graph can hold.

with sdpa_kernel(SDPBackend.MATH):          found = switches_found()
    y = attention(q, k, v)                  set_switches((("flash_sdp", False), ...))
                                            y = attention(q, k, v)
                                            set_switches(found)
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

Switches = tuple[tuple[str, Any], ...]
"""(name, value) of some of them."""


def _set_deterministic(value: tuple[bool, bool]) -> None:
    is_on, only_warns = value
    torch.use_deterministic_algorithms(is_on, warn_only=only_warns)


def _is_deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


# Each: how it is asked, and how it is set. Not here: the gradient mode, which autograd keeps for each thread, autocast
# and the precision of float32 products, which a converted model decides itself.
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "flash_sdp": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "mem_efficient_sdp": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "math_sdp": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    "cudnn_sdp": (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    "sdp_priority": (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    "deterministic": (_is_deterministic, _set_deterministic),
    "cudnn": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "cudnn_benchmark": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "cudnn_deterministic": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
}


# Set together: of attention's kernels at least one must be left on.
_GROUPS = (
    ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp", "sdp_priority"),
    ("cudnn", "cudnn_benchmark", "cudnn_deterministic"),
    ("deterministic",),
    ("mkldnn",),
    ("default_dtype",),
)
# All kernels of attention, as torch starts. From here it shows which of them a model wants, whatever its caller wants.
_ALL_KERNELS = tuple((name, True) for name in ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"))


def switches_found() -> Switches:
    """All of them, as they are now."""
    return tuple([(name, get()) for name, (get, _) in _SWITCHES.items()])


def set_switches(wanted: Switches) -> None:
    """Set some of them; one that is as wanted is not touched."""
    for name, value in wanted:
        get, put = _SWITCHES[name]
        if get() != value:
            put(value)


def changed(found: Switches, now: Switches) -> Switches:
    """What must be set to come from one state of all switches to another: whole groups."""
    was, wanted = dict(found), dict(now)
    groups = [group for group in _GROUPS if any(was[name] != wanted[name] for name in group)]
    return tuple([(name, wanted[name]) for group in groups for name in group])


@contextlib.contextmanager
def kept_switches() -> Iterator[None]:
    """Inside, forward is traced: attention may take any kernel. Afterwards all is as it was, whatever forward left."""
    found = switches_found()
    try:
        set_switches(_ALL_KERNELS)
        yield
    finally:
        set_switches(found)
