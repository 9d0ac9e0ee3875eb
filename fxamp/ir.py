"""Questions about the nodes of a captured graph, and the marks that passes leave on them.

The one representation is a torch-level functional `fx.Graph`: `call_function` on `torch.*`,
`torch.nn.functional.*` and `torch.ops.*`, `call_method` on tensors, `call_module` for modules that stay whole,
`get_attr` for parameters and buffers by their path. Everything a pass knows about a node stands in one frozen
`Mark` under `node.meta["fxamp"]`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from fxamp.opnames import canonical_name, dotted_path, module_name
from fxamp.paths import attribute_at, submodule
from fxamp.value_types import TensorType, ValueType, tensors_in

MARK = "fxamp"
# Set by a capture on a placeholder that is handed a parameter or a buffer: "parameter" or "buffer".
WEIGHT = "fxamp_weight"
# Set by a capture on a conversion whose dtype was read from another value.
RELATIVE = "fxamp_relative"
# Set on a value that the model converts back to the dtype of another one, which in float32 is no conversion.
CONVERTED_BACK = "fxamp_converted_back"
# Set by a capture on a conversion to float32 that torch.autocast would make, see fxamp.capture.promotion.
PROMOTED = "fxamp_promoted"
# Set on a placeholder that is handed a parameter or a buffer: its path in the model.
WEIGHT_PATH = "fxamp_weight_path"
# Set by a capture on the nodes of a checkpointed region: which one, see fxamp.capture.recompute.
REGION = "checkpoint"
# Set by a capture on a call that wrote into its inputs: their positions among `all_input_nodes`.
WRITES = "fxamp_writes"
# Set by a capture on a node whose sizes the data decides: a value of the right rank and dtype, see
# fxamp.capture.guesses. Its sizes are an example of what may come, good for costs and for nothing that must hold.
GUESS = "fxamp_guess"
# What stays of a guess when values are forgotten: the sizes in the node's type are the most that may come.
GUESSED = "fxamp_guessed"
# Set by a capture on the nodes inside a torch.func transform: the number of the transform.
TRANSFORMED = "fxamp_transformed"
# Set on a result that a caller gets and that others are computed from, see fxamp.passes.outputs.
RESULT = "fxamp_result"
# Set by a capture on the output node: positions, among the results, of tensors inside objects that forward makes.
INSIDE_OBJECTS = "fxamp_inside_objects"
# Set by a capture on a value that forward sets an attribute to.
KEPT = "fxamp_kept"
# Set on an input that a caller of the model hands over, which nothing of the model has computed.
FROM_CALLER = "fxamp_from_caller"
# Set on a node that stands for an expression of the model: the ops it was written with, see fxamp.passes.fuse.
WRITTEN_OUT = "fxamp_written_out"
# Set on the nodes of a block that is converted by itself: the block's path in the model.
BLOCK_PATH = "fxamp_block_path"
BLOCK_CLASS = "fxamp_block_class"
# Set on what Dynamo makes of an autograd.Function around one op of a library: a `Kernel`.
KERNEL = "fxamp_kernel"
# Set by a capture on a function under torch.vmap: an `OpInside` for each op inside.
INSIDE = "fxamp_inside"
# And whether nothing there is known to need float32.
MAY_BE_LOW = "fxamp_may_be_low"
# Set by a capture, inside the graph of such a function, on what stands for one sample of an argument.
SAMPLE = "fxamp_sample"
# The attribute under which a converted model keeps what runs its forward.
ENGINE = "_fxamp_engine"
ORIGINAL = "_fxamp_original"
# And what asks that: a function with code of the model's own, as Dynamo's caches and limits belong to code.
RUN = "_fxamp_run"

Colour = Literal["allow", "infer", "deny", "clear", "unlisted"]
Precision = Literal["low", "high", "none"]
Role = Literal["", "cast", "weight cast", "pad", "slice"]


Rule = Literal[
    "absorbed",
    "aliasing",
    "author",
    "boundary",
    "cast",
    "conversion",
    "creation",
    "cut",
    "differences",
    "downstream",
    "gradient sums",
    "input",
    "inside",
    "integers",
    "kernel",
    "level",
    "list",
    "literal",
    "not between",
    "not low-born",
    "operand",
    "override",
    "pack",
    "pad",
    "parameter",
    "plan",
    "position",
    "ranges",
    "rows",
    "square",
    "state",
    "stream",
    "sum",
    "taint",
    "type",
    "unlisted",
    "unmarked",
    "upstream",
    "user cast",
    "user dtype",
    "user operand",
    "user region",
]
"""The rules that decide on nodes; mypy knows a misspelt one, which would be a decision that nobody makes."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a node has its colour or precision.

    Attributes:
        kind: the rule.
        text: one sentence for a reader.
        node: name of the node the reason came from, when it came from another one.
    """

    kind: Rule
    text: str
    node: str | None = None


@dataclasses.dataclass(frozen=True)
class PadNote:
    """What was decided about padding one GEMM.

    Attributes:
        state: "padded", "aligned", "left" (safe, but it would not pay) or "cannot" (not safe, or not known).
        text: one sentence with the sizes and the reason.
        dims: (name, size, padded size) of each dimension that a graph can change; the sizes are equal where it did
            not.
        rows: size of M, which only the caller of the model can change; None where it is not known.
        kept: whether the result stays padded on its way to another GEMM or to the loss.
    """

    state: Literal["padded", "aligned", "left", "cannot"]
    text: str
    dims: tuple[tuple[str, int, int], ...] = ()
    rows: int | None = None
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
    """What the passes know about one node.

    Attributes:
        op: canonical op name ("linear", "add", "input", "parameter", "output").
        type: of the value the node gives; logical (as in fp32) until casts are inserted, then real.
        colour: the list colour after overrides.
        precision: "low" or "high" for a node that handles float32 values, else "none".
        reason: of the precision.
        role: "" for a node of the model, else what the pass made it for.
        serves: for a node made by a pass, the name of the value it stands for.
        modes: how each float32 argument is read: (position, keyword, "with"|"high"|"low"|"any").
        tainted: whether the value holds finite numbers beyond the low range (mask fills).
        pad: of a GEMM, what was decided about padding it.
    """

    op: str
    type: ValueType = None
    colour: Colour = "unlisted"
    precision: Precision = "none"
    reason: Reason = Reason("unmarked", "no pass has looked at this node")
    role: Role = ""
    serves: str | None = None
    modes: tuple[tuple[int, str, str], ...] = ()
    tainted: bool = False
    pad: PadNote | None = None


def mark(node: fx.Node) -> Mark:
    """The node's mark; an unmarked node gives one that says so."""
    found = node.meta.get(MARK)
    return found if isinstance(found, Mark) else Mark(op="unknown")


def set_mark(node: fx.Node, **changes: Any) -> None:
    """Replace fields of the node's mark."""
    node.meta[MARK] = dataclasses.replace(mark(node), **changes)


def keep_place(made: fx.Node, served: fx.Node) -> None:
    """Give a node that a pass has made the source line and the modules of the node that it serves."""
    made.meta.update({key: served.meta[key] for key in ("source", "nn_module_stack") if key in served.meta})


class OpInside(NamedTuple):
    """An op of a function under torch.vmap, and the (path, class) of the modules whose forward calls it there."""

    op: str
    modules: tuple[tuple[Any, Any], ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The op that a function computes with.

    Attributes:
        op: its canonical name.
        places: by argument of the function: the arguments of the op, (position, keyword), that it comes to.
    """

    op: str
    places: Mapping[int, frozenset[tuple[int, str]]]


# ---------------------------------------------------------------------------------------------------- names


def canonical_op(node: fx.Node, root: nn.Module | None = None) -> str:
    """Canonical op name of a node; `root` resolves `call_module` and tells parameters from buffers."""
    if node.op == "placeholder":
        return str(node.meta.get(WEIGHT, "input"))
    if node.op == "output":
        return "output"
    if node.op == "get_attr":
        return "parameter" if isinstance(attribute_at(root, node.target), nn.Parameter) else "buffer"
    if node.op == "call_module":
        kind = type(submodule(root, str(node.target)))
        return dotted_path(kind) if node.meta.get("boundary") else module_name(kind)
    return str(node.meta[KERNEL].op) if KERNEL in node.meta else canonical_name(node.target)


def is_weight(node: fx.Node) -> bool:
    """Whether the node gives a parameter, a buffer or a constant of the model."""
    return node.op == "get_attr" or WEIGHT in node.meta


def weight_path(node: fx.Node) -> str:
    """Path, in the model, of the parameter, buffer or constant that the node gives."""
    return str(node.meta.get(WEIGHT_PATH, node.target))


# ------------------------------------------------------------------------------------------------- operands


@dataclasses.dataclass(frozen=True)
class Operand:
    """One tensor argument of a node: where it stands, and the node that gives it."""

    position: int
    keyword: str
    value: fx.Node


def arguments(node: fx.Node) -> Iterator[Operand]:
    """Every node among the arguments, also inside lists, tuples, dicts and slices.

    A positional argument has keyword "", a keyword argument position -1.
    """
    for position, argument in enumerate(node.args):
        for value in nodes_in(argument):
            yield Operand(position, "", value)
    for keyword, argument in node.kwargs.items():
        for value in nodes_in(argument):
            yield Operand(-1, keyword, value)


def nodes_in(argument: Any) -> list[fx.Node]:
    """The nodes inside one argument, in order."""
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return found


def as_computed(output: fx.Node) -> set[fx.Node]:
    """The results that stand inside objects alone, which forward makes: they come back in the dtype they have."""
    places = output.meta.get(INSIDE_OBJECTS, frozenset())
    results: Any = output.args[0] if places else ()
    inside = {node for place in places for node in nodes_in(results[place])}
    return inside.difference(*(nodes_in(value) for place, value in enumerate(results) if place not in places))


def target_name(node: fx.Node) -> str:
    """A function's name, or the method's or path that a node's target is; "" for an object without a name."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def argument_of(node: fx.Node, position: int, keyword: str, default: Any = None) -> Any:
    """An argument by position or keyword."""
    if keyword in node.kwargs:
        return node.kwargs[keyword]
    if 0 <= position < len(node.args):
        return node.args[position]
    return default


def replace_operand(node: fx.Node, operand: Operand, value: fx.Node) -> None:
    """Replace one argument of a node, and no other that is the same value."""
    swap = lambda given: value if given is operand.value else given  # noqa: E731
    if operand.keyword:
        node.kwargs = {**node.kwargs, operand.keyword: fx.node.map_arg(node.kwargs[operand.keyword], swap)}
    else:
        args = list(node.args)
        args[operand.position] = fx.node.map_arg(args[operand.position], swap)
        node.args = tuple(args)


# ------------------------------------------------------------------------------------------------- values


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The sizes of a node's one tensor (of a symbolic one those of the example), None for anything else."""
    kind = mark(value).type if isinstance(value, fx.Node) else None
    return kind.shape if isinstance(kind, TensorType) else None


def dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a node's one tensor, None for anything else."""
    kind = mark(value).type if isinstance(value, fx.Node) else None
    return kind.dtype if isinstance(kind, TensorType) else None


def holds_float32(node: fx.Node) -> bool:
    """Whether the node gives at least one float32 tensor (by its logical type)."""
    return any(found.dtype == torch.float32 for found in tensors_in(mark(node).type))


def sparse_values(node: fx.Node) -> list[fx.Node]:
    """Of a node and what it reads, those that give a sparse tensor."""
    around = [*node.all_input_nodes, node]
    return [each for each in around if any(found.is_sparse for found in tensors_in(mark(each).type))]


def has_gradient(node: fx.Node) -> bool:
    """Whether backward passes through any tensor that the node gives."""
    return any(found.requires_grad for found in tensors_in(mark(node).type))


def is_tuple(node: fx.Node) -> bool:
    """Whether the node gives several values."""
    return isinstance(mark(node).type, tuple)


def is_tensor(node: fx.Node) -> bool:
    """Whether the node gives one tensor."""
    return isinstance(mark(node).type, TensorType)


def field_names(node: fx.Node) -> tuple[str, ...]:
    """Names of the fields of a result that has them (`x.max(1)`), none for any other."""
    kind: Any = type(node.meta.get("val", node.meta.get(GUESS)))
    return kind.__match_args__ if kind.__module__ == "torch.return_types" else ()


def is_returned_whole(node: fx.Node) -> bool:
    """Whether a result with named fields is an output as it is, so that it must not be taken apart."""
    return bool(field_names(node)) and any(user.op == "output" for user in node.users)


def stays_float32(node: fx.Node) -> bool:
    """Whether the node takes out of a result what is float32 in either precision."""
    if mark(node).op != "getitem" or not isinstance(node.args[0], fx.Node) or not isinstance(node.args[1], int):
        return False
    parts = mark(node.args[0]).type
    if not isinstance(parts, tuple) or not -len(parts) <= node.args[1] < len(parts):
        return False
    part = parts[node.args[1]]
    return isinstance(part, TensorType) and part.stays


# -------------------------------------------------------------------------------------------------- places


def source_line(node: fx.Node) -> str:
    """The user's source line that made the node, as "file.py:12", "" when not known."""
    return str(node.meta.get("source", ""))


def module_path(node: fx.Node) -> str:
    """Dotted path of the innermost module whose forward made the node, "" for the root."""
    stack, block = node.meta.get("nn_module_stack"), str(node.meta.get(BLOCK_PATH, ""))
    innermost = list(stack.values())[-1] if stack else ""
    inside = str(innermost[0]) if isinstance(innermost, tuple) else ""
    return ".".join(filter(None, (block, inside)))
