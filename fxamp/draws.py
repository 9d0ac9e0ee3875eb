"""Numbers that forward draws outside of torch, as calls that a graph can hold: it draws them, and uses none.

p = random.uniform(0, 1)                    # for each layer, also where nothing is dropped
if self.training and p < self.layerdrop:    # with 0.0 no number lies below it
    continue
"""

import sys

from torch import fx

# What gives one number, by its module: from 0.0, or from its first argument, on.
DRAWS = {"random": ("random", "uniform"), "numpy.random": ("random", "uniform")}


def draw(module: str, name: str, *bounds: float) -> float:
    """A number from a generator that a whole process has."""
    return float(getattr(sys.modules[module], name)(*bounds))


fx.node.has_side_effect(draw)
