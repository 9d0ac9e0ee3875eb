"""Which ops may read a padded value and what their padded result holds: one rule an op, with a reason for each no.

An op may keep the padding when the elements of the model do not depend on the padded ones, and what it makes of
them, and of the zero gradient that reaches them, is finite again.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.passes.moved_dims import dims_after, dims_of_getitem
from fxamp.passes.padding_values import PER_ELEMENT, SAME, Kept, Padding, per_element
from fxamp.passes.static_dims import Static, is_static
from fxamp.paths import submodule
from fxamp.value_types import TensorType


@dataclasses.dataclass(frozen=True)
class Known:
    """What the rules may ask about.

    Attributes:
        root: the model.
        static: as static_dims() gives it.
        training: path -> flag of the modules whose mode is a condition of the graph.
    """

    root: nn.Module
    static: Mapping[fx.Node, Static]
    training: Mapping[str, bool]


def keep(node: fx.Node, given: Mapping[fx.Node, Padding], known: Known) -> Kept | str:
    """The padding of a node's result, or why it cannot read these padded values.

    Args:
        given: its padded arguments.
    """
    op = ir.mark(node).op
    if ir.RESULT in node.meta:
        return "the caller gets it, and others are computed from what the caller gets"
    if any(padding.blocks > 1 for padding in given.values()):
        return f"{op} reads two directions that are padded each"
    if op in PER_ELEMENT:
        return per_element(node, given, known.static)
    rule = _RULES.get(op)
    source = node.args[0] if node.args else node.kwargs.get("input")
    if rule is None:
        return f"{op} {_WHY.get(op, 'is not known to act per element')}"
    if not isinstance(source, fx.Node) or list(given) != [source] or ir.shape_of(node) is None:
        return f"{op} reads the padding in another way than its rule knows"
    return rule(node, source, given[source], known)


def asks_only(node: fx.Node, given: Mapping[fx.Node, Padding]) -> bool:
    """Whether a node only asks what padding does not change: another dimension's size, a dtype, a device."""
    op, (value, *others) = ir.mark(node).op, given.items()
    if others or not node.args or node.args[0] is not value[0] or node.all_input_nodes.count(value[0]) != 1:
        return False
    if op == "size":
        dim = ir.argument_of(node, 1, "dim")
        return isinstance(dim, int) and dim % len(ir.shape_of(value[0]) or (0,)) != value[1].dim
    is_only_source = all(value[0] not in ir.nodes_in(argument) for argument in (node.args[1:], node.kwargs))
    return is_only_source and (op in _CREATIONS or (op == "getattr" and node.args[1] in ("device", "dtype", "ndim")))


_CREATIONS = frozenset({"dim", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"})


def reads_masked(node: fx.Node, value: fx.Node, padding: Padding) -> bool:
    """Whether a loss over classes reads masked logits as they are: their probability, and gradient, is 0."""
    op, shape = ir.mark(node).op, ir.shape_of(value)
    if op not in ("cross_entropy", "nll_loss") or not padding.masked or shape is None:
        return False
    target = ir.mark(ir.argument_of(node, 1, "target")).type if len(node.all_input_nodes) > 1 else None
    return (
        node.op == "call_function"
        and ir.argument_of(node, 0, "input") is value
        and padding.dim == min(1, len(shape) - 1)
        and isinstance(target, TensorType)
        and target.dtype is not None
        and not target.dtype.is_floating_point
        and ir.argument_of(node, 2, "weight") is None
        and (op == "nll_loss" or ir.argument_of(node, 7, "label_smoothing", 0.0) == 0.0)
    )


# ------------------------------------------------------------------------------------ rules with one operand

Rule = Callable[[fx.Node, fx.Node, Padding, Known], Kept | str]


def _same(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    kind = ir.mark(node).type
    if isinstance(kind, TensorType) and kind.dtype is not None and kind.dtype.is_floating_point:
        return Kept(padding)
    return "a conversion to integers does not need the padding"


def _dropout(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    if padding.masked or padding.content != 0.0:
        return "dropout would give the padding different numbers"
    return Kept(padding)


def draws_random(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node draws random numbers for each element of its argument."""
    if "dropout" not in ir.mark(node).op:
        return False
    if node.op == "call_module":
        module = submodule(root, str(node.target))
        return module.training and getattr(module, "p", 1.0) > 0.0
    return bool(ir.argument_of(node, 2, "training", True)) and ir.argument_of(node, 1, "p", 0.5) != 0.0


def _reorder(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    order = dims_after(node, len(ir.shape_of(source) or ()))
    if order is None:
        return f"{ir.mark(node).op} with arguments that are not known"
    return Kept(dataclasses.replace(padding, dim=order.index(padding.dim)))


def _unsqueeze(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    dim = ir.argument_of(node, 1, "dim")
    if not isinstance(dim, int):
        return "unsqueeze at a place that is not known"
    dim %= len(ir.shape_of(node) or ())
    return Kept(dataclasses.replace(padding, dim=padding.dim + (dim <= padding.dim)))


def _squeeze(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    dim, shape = ir.argument_of(node, 1, "dim"), ir.shape_of(source) or ()
    if not isinstance(dim, int) or dim % len(shape) == padding.dim or not is_static(known.static, source, dim):
        return "squeeze of a dimension that is not known, not the same in every call, or padded"
    gone = shape[dim] == 1 and dim % len(shape) < padding.dim
    return Kept(dataclasses.replace(padding, dim=padding.dim - gone))


def _getitem(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    kept = dims_of_getitem(node)
    for number, (dim, whole) in enumerate(kept or ()):
        if dim == padding.dim and whole:
            return Kept(dataclasses.replace(padding, dim=number))
    return "an index takes part of the padded dimension"


def _flatten(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    rank = len(ir.shape_of(source) or ())
    start, end = ir.argument_of(node, 1, "start_dim", 0), ir.argument_of(node, 2, "end_dim", -1)
    if not isinstance(start, int) or not isinstance(end, int):
        return "flatten of dimensions that are not known"
    start, end = start % rank, end % rank
    if start <= padding.dim <= end:
        if not _are_ones(source, {*range(start, end + 1)} - {padding.dim}, known):
            return "flatten mixes the padded dimension with others"
        return Kept(dataclasses.replace(padding, dim=start))
    return Kept(dataclasses.replace(padding, dim=padding.dim - (end - start if padding.dim > end else 0)))


def _are_ones(source: fx.Node, dims: set[int], known: Known) -> bool:
    """Whether the source's extent in these dimensions is 1 in every call."""
    shape = ir.shape_of(source) or ()
    return all(shape[dim] == 1 and is_static(known.static, source, dim) for dim in dims)


def _reshape(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    op, old, new = ir.mark(node).op, ir.shape_of(source) or (), ir.shape_of(node) or ()
    behind = {*range(padding.dim + 1, len(old))}
    if not new or new[-1] != old[padding.dim] or not _are_ones(source, behind, known):
        return f"{op} mixes the padded dimension with others"
    flat = len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
    sizes: Any = node.args[1] if flat else node.args[1:]
    if node.kwargs or len(sizes) != len(new):
        return f"{op} with arguments that are not known"
    last = sizes[-1]
    moved = dataclasses.replace(padding, dim=len(new) - 1)
    if (isinstance(last, fx.Node) or last == -1) and not is_static(known.static, node, -1):
        return f"{op} to a size that is known only at run time"
    return Kept(moved, grown=None if isinstance(last, int) and last == -1 else len(sizes) - 1)


def _batch_norm(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    if padding.dim != 1 or padding.content != 0.0 or padding.masked:
        return "batch_norm of another dimension than its channels"
    if node.op == "call_function" and node.target is nn.functional.batch_norm:
        return Kept(Padding(1, padding.extra), with_stats=True)
    if node.op != "call_module":
        return "a backend form of batch_norm"
    module = submodule(known.root, str(node.target))
    if type(module) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        return f"{type(module).__qualname__} is not one of torch's own batch norms"
    if node.meta.get("hooked"):
        return "batch_norm has hooks, which would see the padding"
    if str(node.target) not in known.training:
        return "batch_norm whose mode is not a condition of the graph"
    return Kept(Padding(1, padding.extra), with_stats=True)


def _pool(spatial: int) -> Rule:
    def pool(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
        if padding.dim != len(ir.shape_of(source) or ()) - 1 - spatial or padding.content != 0.0 or padding.masked:
            return f"{ir.mark(node).op} over the padded dimension, or of padding that is not zero"
        return Kept(padding)

    return pool


def _interpolate(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    if padding.dim != 1 or padding.content != 0.0 or padding.masked:
        return "interpolate over the padded dimension, or of padding that is not zero"
    return Kept(padding)


def _pad(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    amounts, value = ir.argument_of(node, 1, "pad"), ir.argument_of(node, 3, "value")
    if not isinstance(amounts, (tuple, list)) or padding.dim >= len(ir.shape_of(source) or ()) - len(amounts) // 2:
        return "the model pads that dimension itself"
    if value not in (None, 0) or padding.content != 0.0 or padding.masked:
        return "the model pads with another number"
    return Kept(padding)


def _reduce(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    op, rank, dims = ir.mark(node).op, len(ir.shape_of(source) or ()), ir.argument_of(node, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims) or not dims:
        return f"{op} over everything would see the padding"
    gone = {dim % rank for dim in dims}
    if padding.dim in gone or padding.content != 0.0 or padding.masked:
        return f"{op} over the padded dimension would see it"
    keepdim = ir.argument_of(node, 2, "keepdim", False)
    left = 0 if keepdim is True else sum(dim < padding.dim for dim in gone)
    return Kept(dataclasses.replace(padding, dim=padding.dim - left))


def _log_softmax(node: fx.Node, source: fx.Node, padding: Padding, known: Known) -> Kept | str:
    kind, dim = ir.mark(node).type, ir.argument_of(node, 1, "dim")
    is_high = isinstance(kind, TensorType) and kind.dtype == torch.float32
    if padding.masked and is_high and isinstance(dim, int) and dim % len(ir.shape_of(source) or ()) == padding.dim:
        return Kept(padding)
    return f"log_softmax {_SEES}"


_SEES = "would see the padding"
_MIXES = "mixes the padded dimension with others"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"), _dropout),
    **dict.fromkeys(("getattr", "mT", "permute", "t", "transpose"), _reorder),
    **dict.fromkeys(("reshape", "view"), _reshape),
    **dict.fromkeys(("amax", "amin", "mean", "sum"), _reduce),
    **{f"{kind}_pool{n}d": _pool(n) for kind in ("avg", "max", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)},
    "batch_norm": _batch_norm,
    "flatten": _flatten,
    "getitem": _getitem,
    "interpolate": _interpolate,
    "log_softmax": _log_softmax,
    "pad": _pad,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
}
_SEEING_OPS = """
    argmax argmin cross_entropy cumsum group_norm instance_norm layer_norm logsumexp max min norm prod
    rms_norm softmax softmin sort std topk var
"""
_WHY = {
    **dict.fromkeys(_SEEING_OPS.split(), _SEES),
    **dict.fromkeys(["cat", "chunk", "expand", "repeat", "split", "stack", "unflatten", "unfold"], _MIXES),
    "output": "is the model's result, in the model's own shape",
    "prelu": "has a weight that may belong to the padded dimension",
    "rrelu": "draws random numbers for the padded shape",
}
