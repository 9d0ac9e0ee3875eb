"""Modes that forward switches while it is traced, as nodes: the gradient mode, and torch's global switches."""

from collections.abc import Callable

import torch
from torch import fx

from fxamp.capture.locations import user_line
from fxamp.errors import CaptureError
from fxamp.switches import Switches, changed, set_switches, switches_found

_IS_GRAD_ENABLED = torch.is_grad_enabled  # torch's own: while a model is traced another stands in its place


class ModeNodes:
    """Compares the modes with those at the last node, and makes the nodes that switch them.

    Args:
        create_node: of the tracer.
    """

    def __init__(self, create_node: Callable[..., fx.Node]) -> None:
        self._create_node = create_node
        self._grad_node: fx.Node | None = None  # the mode outside of the no_grad region that is open
        self._switches_node: fx.Node | None = None  # the switches outside, where some are set
        self._outside = self._inside = switches_found()

    def follow(self) -> None:
        """Make nodes where the user's code switched a mode since the last one."""
        self._follow_grad_mode()
        self._follow_switches()

    def _follow_grad_mode(self) -> None:
        if torch.is_inference_mode_enabled():
            raise CaptureError(f"{user_line()}: torch.inference_mode inside forward. Use torch.no_grad there.")
        inside = not torch.is_grad_enabled()
        if inside and self._grad_node is None:
            self._grad_node = self._call(_IS_GRAD_ENABLED)
            self._call(torch._C._set_grad_enabled, False)
        elif not inside and self._grad_node is not None:
            self._call(torch._C._set_grad_enabled, self._grad_node)
            self._grad_node = None

    def _follow_switches(self) -> None:
        now = switches_found()
        if now == self._inside:
            return
        if self._switches_node is None:
            self._switches_node = self._call(switches_found)
        else:
            self._call(set_switches, self._switches_node)
        wanted: Switches = changed(self._outside, now)
        if wanted:
            self._call(set_switches, wanted)
        else:
            self._switches_node = None
        self._inside = now

    def _call(self, target: Callable[..., object], *args: object) -> fx.Node:
        return self._create_node("call_function", target, args, {})
