"""How much work a call is, counted as `tools/scale` counts it."""

from fxamp.counting.work import lines

__all__ = ["lines"]
