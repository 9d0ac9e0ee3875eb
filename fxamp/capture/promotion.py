"""Low values from outside beside float32 weights, read as torch.autocast reads them.

    linear(x, w)                         # x is float16, w float32: eager torch refuses, torch.autocast casts both
    linear(x.to(torch.float32), w)       # in the graph; which of the two runs low is for the passes to decide

The widened value is exact, so rounding it back to the dtype it came from is too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.capture.guesses import known_or_guessed
from fxamp.dtypes import ARGUMENT_CAST, LOW_DTYPES
from fxamp.fakes import UNKNOWN, Fakes
from fxamp.inplace import mutated
from fxamp.lists import OpLists
from fxamp.paths import attribute_at

# Ops that fake tensors let pass with mixed operands, and a device does not; autocast casts for them on CUDA.
_STRICT = frozenset({"layer_norm", "group_norm", "index_put", "cross", "grid_sample", "grid_sampler"})
# Ops that write into places which an index or a mask tells.
_WRITES = frozenset(
    """index_add index_copy index_put index_reduce masked_scatter put scatter scatter_add scatter_reduce
    setitem""".split()
)
_CONVERSIONS = frozenset({"to", "half", "bfloat16", "type", "type_as"})
_KEPT = ("source", "nn_module_stack", "autocast", "stack_trace")

Run = Callable[[fx.Node], Any]


class Promotion:
    """What is widened in one graph, node by node as the graph is made.

    1. A GEMM, a convolution, attention and a norm get operands of one dtype.
    2. A deny op reads the model's own low inputs in float32, where the model's weights are float32, or it has none.
    3. What the user converted (`x.half()`) is read by other ops as it is, and nothing is done in a region without
       autocast.
    4. The low arguments of a half_function are as inputs that come in low: its deny ops read them in float32.
    5. An op that torch refuses on mixed operands is tried on widened ones (by the tracer).
    6. What is written into chosen places has the dtype of what it is written into: there torch promotes nothing.

    Args:
        root: resolves modules.
        run: gives the fake value of a node.
        is_float32: whether the model's weights are; None: by those of `root`.
    """

    def __init__(self, root: nn.Module, run: Run, is_float32: bool | None = None) -> None:
        self.root = root
        self.run = run
        dtypes = {weight.dtype for weight in root.parameters()}
        self._is_float32 = (not dtypes or torch.float32 in dtypes) if is_float32 is None else is_float32
        self._from_outside: set[fx.Node] = set()

    def before(self, node: fx.Node) -> bool:
        """Widen what the node reads, or make it low; tells whether anything was."""
        operands, written = self._wanted(node), self._written(node)
        widen(node, operands, self.run)
        wide = [] if written is None else [given for given in node.all_input_nodes if _dtype(given) == torch.float32]
        for given in wide:
            _convert(node, given, _dtype(written), self.run)  # type: ignore[arg-type]
        return bool(operands or wide)

    def after(self, node: fx.Node) -> None:
        """Remember low values that came in from outside, or follow from such, and what has them for parts."""
        if not _holds_low(node) or ir.is_weight(node):
            return
        if node.op == "placeholder" or (node.target == "to" and node.kwargs == ARGUMENT_CAST):
            self._from_outside.add(node)
        elif any(given in self._from_outside for given in node.all_input_nodes):
            if ir.canonical_op(node, self.root) not in _CONVERSIONS:
                self._from_outside.add(node)

    def promoted(self, node: fx.Node) -> list[fx.Node]:
        """The low values from outside that torch widens for an op which has a float32 result, beside float32 ones."""
        if not node.op.startswith("call_") or ir.canonical_op(node, self.root) in _CONVERSIONS:
            return []
        is_wide = node.op != "call_module" and _dtype(node) == torch.float32
        return [given for given in low_operands(node) if is_wide and given in self._from_outside]

    def _wanted(self, node: fx.Node) -> list[fx.Node]:
        if node.op not in ("call_function", "call_method") or node.meta.get("autocast") == "off":
            return []
        op = ir.canonical_op(node, self.root)
        colour = OpLists.default().colour(op)
        if colour == "allow" or op in _STRICT or self._writes_places(node):
            return low_operands(node)
        if colour != "deny" or not self._is_float32 or op in _CONVERSIONS:
            return []
        written = mutated(node)
        outside = [given for given in node.all_input_nodes if given in self._from_outside and _is_low(given)]
        return [given for given in outside if given not in written]

    def _written(self, node: fx.Node) -> fx.Node | None:
        """What a node writes float32 values into places of, where that is low."""
        is_on = node.op in ("call_function", "call_method") and node.meta.get("autocast") != "off"
        return next((given for given in mutated(node) if is_on and _is_low(given) and self._writes_places(node)), None)

    def _writes_places(self, node: fx.Node) -> bool:
        op = ir.canonical_op(node, self.root)
        chosen = ir.nodes_in(node.args[1]) if op == "setitem" else mutated(node)
        return op in _WRITES and any(isinstance(known_or_guessed(given), torch.Tensor) for given in chosen)


def low_operands(node: fx.Node) -> list[fx.Node]:
    """The float16 and bfloat16 operands of a node whose floating operands have several dtypes; none it writes into."""
    floats = {given: _dtype(given) for given in node.all_input_nodes if _dtype(given) in (*LOW_DTYPES, torch.float32)}
    if len(set(floats.values())) < 2 or node.meta.get("autocast") == "off":
        return []
    written = mutated(node)
    return [given for given in floats if _is_low(given) and given not in written]


def widen(node: fx.Node, operands: Sequence[fx.Node], run: Run) -> None:
    """Let a node read these operands in float32."""
    for given in operands:
        cast = _convert(node, given, torch.float32, run)
        cast.meta[ir.PROMOTED] = True


def _convert(node: fx.Node, given: fx.Node, dtype: torch.dtype, run: Run) -> fx.Node:
    """Let a node read an operand in another dtype."""
    with node.graph.inserting_before(node):
        cast = node.graph.call_method("to", (given, dtype))
    cast.meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
    cast.meta["val" if "val" in given.meta else ir.GUESS] = run(cast)
    node.replace_input_with(given, cast)
    return cast


def promote(graph: fx.Graph, root: nn.Module, fakes: Fakes, is_model: bool) -> None:
    """Widen wherever it is wanted in a whole graph, and bring the values below up to date.

    Args:
        root: whose weights the graph reads.
        is_model: whether that is the model: else a graph without weights may be a piece of a low one, whose deny ops
            are left alone.
    """

    def value(given: fx.Node) -> Any:
        is_graph = given.op == "get_attr" and "val" not in given.meta  # an argument of an op of higher order
        return attribute_at(fakes.root, given.target) if is_graph else given.meta["val"]

    weights = [node.meta.get("val") for node in graph.nodes if ir.is_weight(node)]
    dtypes = {weight.dtype for weight in (*root.parameters(), *weights) if isinstance(weight, nn.Parameter)}
    promotion = Promotion(
        root, lambda node: fakes.run(node, value), is_float32=torch.float32 in dtypes or (is_model and not dtypes)
    )
    stale: set[fx.Node] = set()
    for node in list(graph.nodes):
        if promotion.before(node) or any(given in stale for given in node.all_input_nodes):
            stale.add(node)
            if ir.TRANSFORMED in node.meta:  # has levels that are gone: what it gives is widened as what it was given
                node.meta["val"] = node.meta["val"].float() if _is_low(node) else node.meta["val"]
            elif node.op != "output":
                node.meta["val"] = promotion.run(node)
        promotion.after(node)


def read_as_own(graph: fx.Graph, root: nn.Module, fakes: Fakes) -> None:
    """What comes in low is no choice of the user's: what torch would widen for an op may stay low, if the op runs low.

    So it is in the parts of a forward that runs as it is written: fxamp, or autocast, made their inputs low.
    """
    promotion = Promotion(root, lambda node: fakes.run(node, known_or_guessed))
    for node in list(graph.nodes):
        widen(node, promotion.promoted(node), promotion.run)
        promotion.after(node)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of a node's tensor; zeros of a size that hangs on data (a packed sequence's) have their tensor's."""
    value = known_or_guessed(node)
    if value is UNKNOWN and node.target == "new_zeros" and "dtype" not in node.kwargs:
        return _dtype(node.args[0])  # type: ignore[arg-type]
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_low(node: fx.Node) -> bool:
    return _dtype(node) in LOW_DTYPES


def _holds_low(node: fx.Node) -> bool:
    """Whether it is low, or a tuple with a low part, as `split` gives."""
    value = known_or_guessed(node)
    parts = value if isinstance(value, (tuple, list)) else ()
    return _is_low(node) or any(isinstance(part, torch.Tensor) and part.dtype in LOW_DTYPES for part in parts)
