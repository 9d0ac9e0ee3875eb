"""What the user asked for, as far as colours are concerned."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import torch

from fxamp.ir import Colour
from fxamp.lists import OpLists
from fxamp.passes.reads import Mode

Level = Literal["strict", "balanced", "aggressive"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""Each level, with those that spread low precision further behind it."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """The constraints of one conversion.

    Attributes:
        low: the low dtype.
        lists: op colours, environment included.
        level: how far low precision spreads over infer nodes.
        overrides: module path, glob or node name -> colour.
        protected: parts of paths that the model keeps in fp32, see fxamp.passes.overrides.names_kept.
        output_mode: how the graph's outputs are read.
        everything_low: O3: no rule is kept but that numbers in the code which low precision cannot hold stay float32.
        device: type of the device the model runs on; some kernels are missing on the CPU.
    """

    low: torch.dtype
    lists: OpLists
    level: Level = "balanced"
    overrides: Mapping[str, Colour] = dataclasses.field(default_factory=dict)
    protected: tuple[str, ...] = ()
    output_mode: Mode = "high"
    everything_low: bool = False
    device: str = "cpu"

    def is_users_choice(self, op: str) -> bool:
        """Whether the lists say of an op what the user, not the package, put there."""
        row = self.lists.row(op)
        return row is not None and row.origin != "default"
