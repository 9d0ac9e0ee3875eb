"""How calls of a model run that no graph of its engine holds: what is asked of each such way."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fxamp.model.variant import Variant

_NONE: Mapping[str, Any] = MappingProxyType({})


class Way:
    """What such calls run through. The attributes here are those of one that makes no graphs.

    Attributes:
        variants: every graph there is, in the order of their making.
        runs: how forward runs around the graphs of its parts, in words; "" where Dynamo's graphs hold it.
        calls: of the model by Dynamo, so far.
        trains: whether one of them was in training mode, with gradients.
        runs_as_written: whether a call came to its end, outside of modes, while Dynamo had made no graph.
        weights: paths of the weights that Dynamo's graphs were given.
        shared: a weight of a module -> the weight of the equal module whose graph runs it, and decided for both.
        given_up: functions that Dynamo does not capture any more, and why.
        blocks: the engines of the parts of which there are graphs, by path.
        engines: those of all parts that were called.
        calls_itself: whether forward has called itself with something else, for which there is a graph of the model.
        rewrite: the pipeline; None where no graphs are made.
        watch: while it is set, it runs Dynamo's graphs in the place of their compiled forwards.
        may_be_written: whether forward can run as it is written, with graphs inside.
        reason_outside: why a Dynamo that traces the model from outside may not trace through; "" where it may.
    """

    variants: Sequence[Variant] = ()
    runs: str = ""
    calls: int = 0
    trains: bool = False
    runs_as_written: bool = False
    weights: AbstractSet[str] = frozenset()
    shared: Mapping[str, str] = _NONE
    given_up: Mapping[str, str] = _NONE
    blocks: Mapping[str, Any] = _NONE
    engines: Mapping[Any, Any] = _NONE
    calls_itself: bool = False
    rewrite: Callable[..., Any] | None = None
    watch: Any = None
    may_be_written: bool = False
    reason_outside: str = ""
    _outside: Any = None  # `_call`, where Dynamo may not trace through it

    @property
    def present(self) -> "Way":
        """The way that calls take at present, of one that chooses among several."""
        return self

    @property
    def by_dynamo(self) -> "Way":
        """The way through Dynamo, of one that chooses among several."""
        return self

    @property
    def is_open(self) -> bool:
        """Whether no call has told yet which way calls go, of one that chooses among several."""
        return False

    @property
    def is_for_next_call(self) -> bool:
        """Whether the last call has told of another way, which none has gone yet."""
        return False

    def how(self, module: nn.Module) -> str:
        """How calls run, in a sentence about the model."""
        raise NotImplementedError

    def stay_outside(self, name: str) -> None:
        """Let a Dynamo that traces the model from outside break its graph here, where it may not trace through. (It is
        imported by then.)
        """
        if self.reason_outside and self._outside is None:
            reason = self.reason_outside.format(name)
            self._outside = torch.compiler.disable(self._call, reason=reason)  # type: ignore[no-untyped-call]

    def prefer_written(self) -> None:
        """Run all calls as they are written, where `may_be_written`."""

    def settled(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Way":
        """The way that calls take from now on; where none has told, this one is made for it."""
        return self

    def is_too_little(self, share: float | None, model: nn.Module) -> bool:
        """Whether Dynamo's graphs hold so little of what a call used that the model is to run as it is written.

        Args:
            share: None where it used no matrix.
        """
        return False

    def __call__(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of `module`, whose own class is `base`."""
        if torch.compiler.is_compiling() and self._outside is not None:
            return self._outside(base, module, args, kwargs)
        return self._call(base, module, args, kwargs)

    def _call(self, base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError
