"""What a recurrent call multiplies, and how its weights grow when its sizes do.

    output, h, c = lstm(x, (h0, c0), [w_ih, w_hh, b_ih, b_hh, ...], has_biases, layers, dropout, training, both, first)

K is the size of `x`, N that of the output: the hidden size, or the projection's. A unit that is added has weights,
biases and first states of zero, and stays zero: an LSTM's candidate is tanh(0) and its cell keeps half of 0; a GRU
mixes tanh(0) and 0; an Elman cell gives tanh(0) or relu(0). The rows of a weight are gate blocks of the hidden size,
and with two directions the columns behind the first layer are two blocks, so both grow block by block.
"""

import dataclasses
import math

from torch import fx

from fxamp import ir
from fxamp.passes.gemm_types import UNKNOWN_SIZES, Gemm, GemmDim, Place, count_of, operands
from fxamp.runtime.padded_weights import Dims
from fxamp.runtime.recurrent_memory import GATES, RecurrentCall

Position = tuple[int, int | None]
"""An argument, and the number in its list; None where it is no list."""

OPS = frozenset({*GATES, *(f"{op}_cell" for op in GATES)})
"""Recurrent ops, whole sequences and single steps."""


@dataclasses.dataclass(frozen=True)
class Recurrent(Gemm):
    """The products of a recurrent call.

    Attributes:
        gates: blocks in the rows of each weight.
        hidden: size of a cell's state.
        projected: size of a projected output, 0 without projections.
        directions: 1 or 2.
        weights: (argument, number in its list or None) -> (layer, what it is: "ih", "hh", "bias" or "hr").
        states: position of the first states among the arguments.
        drops: whether it drops elements between its layers.
    """

    gates: int
    hidden: int
    projected: int
    directions: int
    weights: dict[Position, tuple[int, str]]
    states: int
    drops: bool

    def growths(self, extras: tuple[int, ...]) -> dict[Position, Dims]:
        """How each weight grows; those that do not are left out.

        Args:
            extras: elements added to K, to N and, with a projection, to the hidden size.
        """
        read, out, hidden = (*extras, extras[1])[:3]
        rows, forward = (self.gates, hidden), (self.directions, out)
        dims: dict[str, Dims] = {
            "bias": (rows,),
            "first ih": (rows, (1, read)),
            "hh": (rows, (1, out)),
            "hr": ((1, out), (1, hidden)),
            "ih": (rows, forward),
        }
        found = {
            at: dims["first ih" if (layer, kind) == (0, "ih") else kind] for at, (layer, kind) in self.weights.items()
        }
        return {at: _normal(how) for at, how in found.items() if any(extra for _, extra in how)}

    def first_states(self, extras: tuple[int, ...]) -> tuple[int, ...]:
        """Elements added to the last dimension of each first state: the hidden one's, then an LSTM's cell's."""
        return tuple((*extras, extras[1])[1:3])

    def result(self, number: int, extras: tuple[int, ...]) -> tuple[int, int]:
        """(elements added to each block of the last dimension, blocks) of one of the results."""
        is_whole = not ir.mark(self.node).op.endswith("_cell")
        is_cell = ir.mark(self.node).op.startswith("lstm") and number == 1 + is_whole
        return self.first_states(extras)[is_cell], self.directions if is_whole and number == 0 else 1

    def is_ambiguous(self, extras: tuple[int, ...]) -> bool:
        """Whether torch would take it for one without projections: it compares the two states' sizes."""
        out, hidden = self.first_states(extras)
        return self.projected > 0 and self.projected + out == self.hidden + hidden


def describe_recurrent(node: fx.Node) -> Recurrent | str:
    """The products of a recurrent call on explicit weights, or the reason why they cannot be padded."""
    op = ir.mark(node).op
    if node.op != "call_function" or node.kwargs:
        return "its weights belong to a module that stays whole, in gate blocks of the hidden size"
    if any(ir.shape_of(value) is None for value in operands(node)):
        return UNKNOWN_SIZES
    if ir.is_tuple(node) and not all(ir.mark(user).op == "getitem" and _index(user) is not None for user in node.users):
        return "its results are handed on as one tuple"
    return _cell(node, GATES[op.removesuffix("_cell")]) if op.endswith("_cell") else _sequence(node, GATES[op])


def item_of(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The call and the number of a result that a node takes from a tuple."""
    source = node.args[0] if node.args else None
    number = _index(node) if ir.mark(node).op == "getitem" and isinstance(source, fx.Node) else None
    return None if number is None or not isinstance(source, fx.Node) else (source, number)


def sequence_call(node: fx.Node) -> tuple[list[fx.Node], RecurrentCall] | None:
    """The weights of a call on a whole sequence, in its order, and the call; None for any other node."""
    op, at = ir.mark(node).op, _weights_at(node)
    if op not in GATES or node.op != "call_function" or node.kwargs or at is None:
        return None
    _, layers, _, _, is_both = node.args[at + 1 : at + 6]
    weights = ir.nodes_in(node.args[at])
    if not isinstance(layers, int) or not weights or len(weights) % (layers * (2 if is_both else 1)):
        return None
    return weights, RecurrentCall(op, layers, bool(is_both), tuple(range(len(weights))))


def _weights_at(node: fx.Node) -> int | None:
    """Where the list of its weights stands among the arguments."""
    at = next((position for position, value in enumerate(node.args) if isinstance(value, list)), -1)
    return None if at < 2 or len(node.args) < at + 6 else at


def _index(item: fx.Node) -> int | None:
    number = item.args[1] if len(item.args) > 1 else None
    return number if isinstance(number, int) and number >= 0 else None


# ---------------------------------------------------------------------------------------------- the two forms


def _sequence(node: fx.Node, gates: int) -> Recurrent | str:
    at = _weights_at(node)
    if at is None:
        return "arguments in an order that is not known"
    has_biases, layers, dropout, training, is_both = node.args[at + 1 : at + 6]
    weights, hidden = ir.nodes_in(node.args[at]), ir.nodes_in(node.args[at - 1])
    directions = 2 if is_both else 1
    if not isinstance(layers, int) or len(weights) % (layers * directions):
        return "weights in an order that is not known"
    kinds = ["ih", "hh", *(["bias"] * 2 if has_biases else [])]
    kinds += ["hr"] if len(weights) == layers * directions * (len(kinds) + 1) else []
    if len(weights) != layers * directions * len(kinds):
        return "weights in an order that is not known"
    named: dict[Position, tuple[int, str]] = {
        (at, number): (number // (directions * len(kinds)), kinds[number % len(kinds)])
        for number in range(len(weights))
    }
    drops = bool(dropout) and bool(training) and layers > 1
    return _describe(node, gates, directions, named, weights, hidden, at - 1, drops)


def _cell(node: fx.Node, gates: int) -> Recurrent | str:
    weights = [value for value in node.args[2:] if isinstance(value, fx.Node)]
    if len(node.args) not in (4, 6) or len(weights) not in (2, 4):
        return "arguments in an order that is not known"
    kinds = ("ih", "hh", "bias", "bias")
    named: dict[Position, tuple[int, str]] = {(2 + number, None): (0, kinds[number]) for number in range(len(weights))}
    return _describe(node, gates, 1, named, weights, ir.nodes_in(node.args[1]), 1)


def _describe(
    node: fx.Node,
    gates: int,
    directions: int,
    named: dict[Position, tuple[int, str]],
    weights: list[fx.Node],
    states: list[fx.Node],
    at: int,
    drops: bool = False,
) -> Recurrent | str:
    data, first = node.args[0], ir.shape_of(weights[0]) or ()
    shape = ir.shape_of(data) or ()
    hidden, projected = first[0] // gates, 0
    if any(kind == "hr" for _, kind in named.values()):
        projected = (ir.shape_of(weights[1]) or (0, 0))[1]
    if not shape or 0 in (*shape, *first) or first[1] != shape[-1]:
        return "one of its sizes is 0, or its input is not of the weights' size"
    rows, out = math.prod(shape[:-1]), projected or hidden
    places = () if projected else (Place(at, "", len(ir.shape_of(states[0]) or ()) - 1),)
    rank = len(ir.shape_of(node) or (0, 0, 0))
    dims = [GemmDim("K", shape[-1], (Place(0, "", len(shape) - 1),)), GemmDim("N", out, places, rank - 1)]
    dims += [GemmDim("H", hidden, (), rank - 1)] if projected else []
    sizes = [(count_of(weight), kind) for weight, (_, kind) in zip(weights, named.values(), strict=True)]
    macs = rows * sum(size for size, kind in sizes if kind != "bias")
    steps = rows // max(1, (ir.shape_of(states[0]) or (1,))[-2])
    again = sum(size for size, kind in sizes if kind in ("hh", "hr")) * max(0, steps - 1)  # read at every step
    nbytes = 2 * (sum(map(count_of, operands(node))) + again + rows * out * directions)
    return Recurrent(node, tuple(dims), rows, macs, nbytes, gates, hidden, projected, directions, named, at, drops)


def _normal(dims: Dims) -> Dims:
    """Without blocks where nothing is added behind them."""
    return tuple((blocks, extra) if extra else (1, 0) for blocks, extra in dims)
