"""What convert() was asked for, as a part of the model that is a graph by itself is to have it."""

import dataclasses
from collections.abc import Collection, Hashable
from typing import Any

from torch import nn

from fxamp.override_keys import overrides_within


def options_within(part: nn.Module, path: str, options: Any, modules: Collection[str]) -> Any:
    """The options of a part.

    Args:
        options: of the model.
        modules: the paths of all modules of the model.
    """
    return dataclasses.replace(
        options,
        overrides=overrides_within(part, path, options.overrides, modules),
        plan=options.plan and options.plan.within(path),
        ranges=options.ranges and options.ranges.within(path),
    )


def decisions(options: Any) -> Hashable:
    """Equal for options of parts of one model by which equal parts can share a graph."""
    plan, ranges = options.plan, options.ranges
    return tuple(options.overrides.items()), plan and plan.content, ranges and ranges.content(options.low)


def is_decided(path: str, options: Any) -> bool:
    """Whether a plan says something of nodes in a part, or ranges say that some must be float32."""
    plan, ranges = options.plan, options.ranges
    is_planned = plan is not None and bool(plan.within(path).graphs)
    return is_planned or (ranges is not None and bool(ranges.within(path).deny(options.low)))
