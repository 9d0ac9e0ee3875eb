"""The gradients of a model's parameters in mixed precision against the same in fp32."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from tabulate import tabulate
from torch import fx, nn

from fxamp import ir
from fxamp.numerics.distance import (
    difference_of,
    error_of,
    holds_all_of,
    introduced,
    largest_difference,
    share_flushed,
)
from fxamp.numerics.recording import Key, Recorded
from fxamp.paths import attribute_at
from fxamp.sparse import held
from fxamp.words import listed

ROUNDING = 1e-3
"""Share of the whole gradient's norm below which a difference may be the low dtype's rounding, bfloat16's included."""

CANCELLED = 0.02
"""Share of what was added up below which a difference may be the rounding of its terms."""


@dataclasses.dataclass(frozen=True)
class WeightError:
    """How far the loss's gradient with respect to a parameter is from its fp32 value.

    Attributes:
        name: path of the parameter; a tied one has the first of its paths.
        error: norm of the difference by the norm of the fp32 gradient: 1 where it is lost, inf where the mixed one
            alone is not finite.
        introduced: how much larger that is than the largest error among the gradients of its readers' values: what
            came in through the weight's own sum, or its casts.
        largest: largest absolute difference.
        flushed: share of the non-zero numbers of the fp32 gradient that are zero in mixed precision.
        norm: of the fp32 gradient.
        share: norm of the difference by the norm of the whole model's fp32 gradient.
        readers: names of the nodes that read it.
        of_terms: norm of the difference by the sum of the sizes of the fp32 gradients of its readers' values, which it
            is added up of; 0 where these are not known.
    """

    name: str
    error: float
    introduced: float
    largest: float
    flushed: float
    norm: float
    share: float
    readers: tuple[str, ...] = ()
    of_terms: float = 0.0

    @property
    def cancels(self) -> bool:
        """Whether both gradients are rounding alone, so that `error` says nothing.

        What should be zero is so: the gradient of a bias before a batch norm, or of the bias of attention's keys. One
        that is small because its part of the loss is, is not.
        """
        return self.error > 1 and self.share < ROUNDING and self.of_terms < CANCELLED


def weight_errors(exact: Recorded, mixed: Recorded, model: nn.Module) -> list[WeightError]:
    """Of every parameter that has a gradient in one of the runs, the largest error first; what cancels comes last.

    Args:
        model: whose parameters `exact` has read.
    """
    readers = _readers(exact, model)
    pairs = _both(exact, mixed)
    norms = {name: float(one.double().norm()) for name, (one, _) in pairs.items()}
    whole = math.hypot(*norms.values())
    rows = []
    for name, (one, other) in pairs.items():
        error = error_of(one, other)
        reading = readers.get(name, [])
        difference, terms = difference_of(one, other), sum(_size_of_gradient(exact, key) for key in reading)
        before = max((_gradient_error(exact, mixed, key) for key in reading), default=0.0)
        rows.append(
            WeightError(
                name,
                error,
                introduced(error, before),
                largest_difference(one, other),
                share_flushed(one, other),
                norms[name],
                difference / whole if whole else 0.0,
                tuple(dict.fromkeys(node for _, node in reading)),
                difference / terms if terms else 0.0,
            )
        )
    return sorted(rows, key=lambda row: (row.cancels, -row.error))


def _gradient_error(exact: Recorded, mixed: Recorded, key: Key) -> float:
    """Of the gradient of a node's value; 0 where it has none in one of the runs, or one of another size."""
    one, other = exact.gradients.get(key), mixed.gradients.get(key)
    return error_of(one[0], other[0]) if one and other and holds_all_of(one[0], other[0]) else 0.0


def _size_of_gradient(exact: Recorded, key: Key) -> float:
    """Sum of the absolute gradients of a node's value; 0 where it has none."""
    return sum(float(held(gradient).double().abs().sum()) for gradient in exact.gradients.get(key, []))


def weight_table(rows: Sequence[WeightError]) -> str:
    """As a table."""
    lines = [
        (
            row.name,
            "cancels" if row.cancels else f"{row.error:.2e}",
            f"{row.introduced:.2e}",
            f"{row.largest:.2e}",
            f"{row.flushed:.1%}",
            f"{row.norm:.2e}",
            f"{row.share:.1e}",
            listed(row.readers, 2),
        )
        for row in rows
    ]
    headers = ("gradient of", "error", "introduced", "largest", "to 0", "norm", "of all", "read by")
    return tabulate(lines, headers=headers, disable_numparse=True)


def _both(exact: Recorded, mixed: Recorded) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter's two gradients; where one run alone has any, the other's is zero."""
    found = {}
    for name, one in exact.weight_gradients.items():
        other = mixed.weight_gradients.get(name)
        given = one if one is not None else other
        if name in mixed.weight_gradients and given is not None:
            found[name] = tuple(torch.zeros_like(given) if value is None else value for value in (one, other))
    return found  # type: ignore[return-value]


def _readers(recorded: Recorded, model: nn.Module) -> dict[str, list[Key]]:
    """What reads each parameter; a module that is called whole reads all of its own."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[Key]] = {}
    for part in recorded.parts.values():
        root = part.root(model)
        for node in part.variant.graph.nodes:
            for parameter, reader in _reads(node, root, model):
                if id(parameter) in names:
                    found.setdefault(names[id(parameter)], []).append((part.identity, reader.name))
    return found


def _reads(node: fx.Node, root: nn.Module, model: nn.Module) -> Iterator[tuple[object, fx.Node]]:
    """(parameter, the node that reads it)"""
    if node.op == "call_module":
        yield from ((parameter, node) for parameter in root.get_submodule(str(node.target)).parameters())
    elif node.op == "placeholder" and ir.is_weight(node):
        yield from ((attribute_at(model, ir.weight_path(node)), reader) for reader in node.users)
    elif node.op == "get_attr":
        yield from ((attribute_at(root, node.target), reader) for reader in node.users)
