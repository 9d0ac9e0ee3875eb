"""What an engine has done for it by those who know the passes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fxamp.model.variant import Variant

Build = Callable[..., Variant]  # see fxamp.pipeline.build_variant


@dataclasses.dataclass(frozen=True)
class Workshop:
    """What an engine has done for it by those who know the passes; module-level functions, so that it pickles.

    Attributes:
        build: makes a variant for (plain model, spec, inputs, options).
        announce: tells of a model's new graphs.
        keep_weights: lets a variant keep its low weights from call to call.
        stored_low: the paths of the parameters that are stored low at O2 and O3, for (plain model, options, graph or
            None where no graph of the model is known).
    """

    build: Build
    announce: Callable[[nn.Module], None]
    keep_weights: Callable[[Variant, nn.Module], None]
    stored_low: Callable[[nn.Module, Any, fx.Graph | None], list[str]]
