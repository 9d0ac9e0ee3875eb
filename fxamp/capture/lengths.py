"""Tuples with as many items as a size says: `x.unbind(1)`, `x.split(4)`, `[x] * x.size(0)`.

Whoever counts the items, goes through them or hands all of them on has decided on that size.
"""

import operator
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.capture.guesses import known_or_guessed
from fxamp.capture.ranks import LOOSE_RANK
from fxamp.capture.splits import sizes_of_parts
from fxamp.fakes import UNKNOWN
from fxamp.opnames import canonical_name

_PARTS = frozenset({"unbind", "unsafe_split", "unsafe_chunk", "split", "chunk"})
_SEQUENCES = frozenset({operator.mul, operator.add, operator.getitem})


def has_open_length(node: fx.Node) -> bool:
    """Whether the node's value is a tuple (or list) of a length that another call may not have."""
    value = node.meta.get("val", UNKNOWN)
    if not isinstance(value, (tuple, list)) or isinstance(value, torch.Size) or not node.all_input_nodes:
        return False
    if node.target in _SEQUENCES:
        return any(given.op != "get_attr" and _is_number_or_open(given) for given in node.all_input_nodes)
    return _gives_open_length(node, value)


def parts_of_guess(node: fx.Node) -> int | None:
    """Of a guessed value, how many parts it has in every call: `values, places = x[mask].max(1)`; None: not known."""
    value = node.meta.get(ir.GUESS)
    if not isinstance(value, tuple):
        return None
    if isinstance(value, torch.Size):
        return len(value) if _has_known_rank(node) else None
    return None if node.target in _SEQUENCES or _gives_open_length(node, value) else len(value)


def counted_by(node: fx.Node) -> tuple[fx.Node, int] | int | None:
    """What tells how many items a list has whose numbers the data decides, None for what is no such list:
    (tensor, dimension) for `counts.tolist()` and the parts of `x.split(counts.tolist())`, or a number of items.
    """
    depth, listed = 0, node
    while listed.target is operator.getitem and isinstance(listed.args[1], int) and isinstance(listed.args[0], fx.Node):
        depth, listed = depth + 1, listed.args[0]
    if listed.op == "call_method" and listed.target == "tolist":
        tensor = listed.all_input_nodes[0]
        rank = getattr(known_or_guessed(tensor), "ndim", 0)
        return (tensor, depth) if depth < rank and not tensor.meta.get(LOOSE_RANK) else None
    sizes = sizes_of_parts(node)
    return counted_by(sizes) if isinstance(sizes, fx.Node) else None if sizes is None else len(sizes)


def _has_known_rank(sizes: fx.Node) -> bool:
    """Whether these are the sizes, or some of them, of a tensor whose rank no size decides."""
    if sizes.target in (operator.getitem, operator.add):
        parts = sizes.all_input_nodes
        return all(isinstance(known_or_guessed(part), torch.Size) and _has_known_rank(part) for part in parts)
    is_shape = sizes.args[1:] == ("shape",) or (sizes.target == "size" and len(sizes.args) == 1)
    return is_shape and not sizes.meta.get(LOOSE_RANK)


def _gives_open_length(node: fx.Node, value: tuple[Any, ...] | list[Any]) -> bool:
    op, given = canonical_name(node.target), node.all_input_nodes[0]
    if op not in _PARTS or given.op == "get_attr":
        return False
    many = ir.argument_of(node, 1, "chunks" if op.endswith("chunk") else "split_size")
    if isinstance(many, (tuple, list)):
        return False
    is_chunk = op.endswith("chunk") and many == len(value)
    is_split = op.endswith("split") and isinstance(many, int)
    return not (is_chunk and _are_features(node, given)) and not (is_split and _are_of_weights(node, given))


def _are_features(chunk: fx.Node, given: fx.Node) -> bool:
    """Whether a chunk is along the last dimension, or the channels of images: sizes that weights decide.

    `chunk(n)` has n items or less: in a call where it has less, an item that is missing is an error.
    """
    whole, dim = known_or_guessed(given), ir.argument_of(chunk, 2, "dim", 0)
    if not isinstance(whole, torch.Tensor) or not isinstance(dim, int):
        return False
    return dim in (-1, whole.dim() - 1) or (whole.dim() > 3 and dim in (1, 1 - whole.dim()))


def _are_of_weights(split: fx.Node, given: fx.Node) -> bool:
    """Whether a split is along the features that a weight of the model has just made."""
    whole, dim = known_or_guessed(given), ir.argument_of(split, 2, "dim", 0)
    if not isinstance(whole, torch.Tensor) or not isinstance(dim, int):
        return False
    made_by, weight = canonical_name(given.target), ir.argument_of(given, 1, "weight")
    place = whole.dim() - 1 if made_by == "linear" else 1 if made_by in ("conv1d", "conv2d", "conv3d") else None
    return dim % whole.dim() == place and isinstance(weight, fx.Node) and weight.op == "get_attr"


def _is_number_or_open(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val", UNKNOWN), int) or has_open_length(node)


def lists_parts_of_inputs(module: fx.Node) -> bool:
    """Whether a module that stays whole gives a list of as many items as its input is long: perhaps one for each image.

    (What else decides on how many there are is not known: the graph checks it.)
    """
    given = [node.meta.get("val", UNKNOWN) for node in module.all_input_nodes]
    sizes = {size for value in given if isinstance(value, torch.Tensor) for size in value.shape}

    def holds(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(holds, value.values()))
        is_many = isinstance(value, list) and len(value) in sizes
        return is_many or (isinstance(value, (list, tuple)) and any(map(holds, value)))

    return holds(module.meta.get("val", UNKNOWN))


def handed_on_with_open_length(node: fx.Node) -> list[fx.Node]:
    """Such tuples of which a node reads all items, and not one of them or a part, or only how many there are."""
    return [] if node.target in (operator.getitem, len) else list(filter(has_open_length, node.all_input_nodes))
