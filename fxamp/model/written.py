"""The forward of a model where no graph holds it: as it is written, and what it calls as graphs.

It runs under torch.autocast, on low weights at O2 and O3, with a view of the model for `self` (`fxamp.model.seen`). In
it children are views, and a call of one looks for a graph. So the largest modules that a graph can hold run as graphs,
and what is around them runs as torch.autocast would run it.
"""

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxamp.capture.refusals import Refusals
from fxamp.dtypes import autocast_kind, device_of
from fxamp.model.autocasting import autocast_around, running
from fxamp.model.engine import Engine, engine_of
from fxamp.model.results import Results, in_dtype
from fxamp.model.seen import Family
from fxamp.model.view_class import itself, may_be_viewed, part_of
from fxamp.model.ways import Way
from fxamp.model.wide_arguments import computes_in_float32
from fxamp.model.wide_copies import taking_back_writes


class Written(Way):
    """What calls that no graph holds run through.

    Args:
        options: of the model, or of a part of it.
        rewrite: the pipeline.

    Attributes:
        blocks: the engines of the parts of which there are graphs, by path.
        engines: those of all parts that were called, as long as a model is there whose parts they are; equal parts, and
            those of copies of the model that hold no objects of their own, share one.
        kin: what parts of one kind could not be captured for, those inside of parts included.
        calls_as_written: of the model, so far.
    """

    may_be_written = True
    runs = "as under torch.autocast"
    reason_outside = "no graph of fxamp's holds this call of {}, which runs as under torch.autocast"  # in views
    takes_products = False
    """Whether linear layers and convolutions that autocast would run, as a graph does, are to be graphs."""

    def __init__(self, options: Any, rewrite: Callable[..., Any]) -> None:
        self.options = options
        self.rewrite: Callable[..., Any] = rewrite
        self.engine: Engine | None = None  # of the model, where that is not converted, or has another
        self.blocks: dict[str, Engine] = {}
        self.engines: weakref.WeakValueDictionary[Any, Engine] = weakref.WeakValueDictionary()
        self.kin: collections.defaultdict[Any, Refusals] = collections.defaultdict(Refusals)
        self.calls_itself = False
        self.calls_as_written = 0
        self._views: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return Written, (self.options, self.rewrite)

    def how(self, module: nn.Module) -> str:
        """How calls run, in a sentence about the model."""
        return "runs as under torch.autocast, and what it calls as graphs"

    def _call(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward as it is written.

        At O3 floating inputs are made low, as the weights are, but for a denied part. Low results of the model come in
        `options.output_dtype`, those of its parts as they are computed.
        """
        self.calls_as_written += 1
        view = self._view_of(module)
        part = part_of(view)
        is_on = part is None or not part.is_denied
        if self.options.opt_level == "O3" and (is_on or not computes_in_float32(module)):
            args, kwargs = _floats_as(self.options.low, (args, kwargs))
        with taking_back_writes(), autocast_around(autocast_kind(device_of(module)), self.options.low, is_on=is_on):
            if part is None:
                result = base.forward(view, *args, **kwargs)
            else:
                result = part.with_wide(base.forward, view, args, kwargs)
        wanted = self.options.output_dtype
        return result if wanted is None else Results(wanted).of(result)

    def _view_of(self, module: nn.Module) -> nn.Module:
        """The view of a module: of a part the one that is being called, which its engine knows nothing of."""
        if not may_be_viewed(type(module)):
            return module
        view = getattr(running, "view", None)
        if view is not None and itself(view) is module:
            return view  # type: ignore[no-any-return]
        if module not in self._views:
            engine = self.engine or engine_of(module)
            assert engine is not None
            self._views[module] = Family(self, engine, module).view(module, "", engine)
        return self._views[module]


def _floats_as(dtype: torch.dtype, values: Any) -> Any:
    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return in_dtype(dtype, tensor) if tensor.dtype == torch.float32 else tensor

    return pytree.tree_map_only(torch.Tensor, converted, values)
