"""What a cast, and a free node that runs high, costs: integers, in bytes where shapes are known."""

import dataclasses
import math

from torch import fx

from fxamp import ir
from fxamp.lists import TRAITS
from fxamp.value_types import tensors_in

# What a kernel launch is worth in bytes moved: about 2 microseconds of the shortest kernel at 2 TB/s of memory
# bandwidth (A100 80 GB data sheet; measured shortest kernels are 2 to 3 microseconds).
LAUNCH_BYTES = 4 << 20
# A cast reads 4 bytes and writes 2, or the reverse.
BYTES_PER_CAST_ELEMENT = 6
# Ops that gather rows of a weight: casting these costs less than casting the whole table.
GATHERS = frozenset({"embedding", "embedding_bag"})
# Ops whose backward needs their first floating inputs, in the precision they ran in. derivatives.yaml of torch.
_KEEPS_INPUTS = frozenset(
    """
    avg_pool1d avg_pool2d avg_pool3d baddbmm bilinear bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d cos div einsum erf gelu group_norm gru hardswish instance_norm layer_norm leaky_relu linear log
    lstm matmul max_pool1d max_pool2d max_pool3d mish mm mul multi_head_attention_forward pow prelu rms_norm
    scaled_dot_product_attention silu sin softplus square batch_norm abs log1p log2 log10
    """.split()
)
# Ops whose backward needs what they gave.
_KEEPS_RESULT = frozenset(
    "elu exp exp2 expm1 log_softmax reciprocal relu rsqrt scaled_dot_product_attention selu sigmoid softmax sqrt "
    "tan tanh".split()
)
# Products: the backward of each operand needs the other one.
_KEEPS_THE_OTHER = frozenset({"mul", "matmul", "mm", "bmm", "linear"})


@dataclasses.dataclass(frozen=True)
class Costs:
    """Prices of one graph; all its prices are in the same unit.

    Attributes:
        in_bytes: whether shapes are known. Without them every activation cast costs the same, a weight's next to
            nothing, and running high is free.
    """

    in_bytes: bool

    @staticmethod
    def of(graph: fx.Graph) -> "Costs":
        """Bytes where the graph's activations have shapes, else units."""
        calls = (ir.mark(node).type for node in graph.nodes if node.op.startswith("call"))
        return Costs(any(found.shape is not None for kind in calls for found in tensors_in(kind)))

    def cast(self, value: fx.Node) -> int:
        """Cost of casting a float32 value (or casting back a low one), its backward included.

        A parameter is cast together with others: it costs its bytes and no launch, unless it is a table that is only
        gathered from.
        """
        is_weight = ir.is_weight(value)
        if not self.in_bytes:
            if not is_weight:
                return LAUNCH_BYTES
            return LAUNCH_BYTES + 1 if any(ir.mark(user).op in GATHERS for user in value.users) else 1
        is_packed = is_weight and any(ir.mark(user).op not in GATHERS for user in value.users)
        backward = 2 if ir.has_gradient(value) else 1
        return max(1, backward * ((0 if is_packed else LAUNCH_BYTES) + BYTES_PER_CAST_ELEMENT * _elements(value)))

    def inside(self, value: fx.Node) -> int:
        """Cost of reading a low value in a float32 kernel that takes it as it is.

        Backward casts the gradient; forward reads 2 bytes an element less than `high` says.
        """
        gradient = self.cast(value) // 2 if ir.has_gradient(value) else 0
        return max(0, gradient - 2 * _elements(value))

    def kept(self, graph: fx.Graph) -> list["Kept"]:
        """What is saved for backward, value by value; nothing where shapes are not known."""
        if not self.in_bytes:
            return []
        keepers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            for value in kept_by(node):
                keepers.setdefault(value, []).append(node)
        return [Kept(value, tuple(nodes), _elements(value)) for value, nodes in keepers.items()]

    def high(self, node: fx.Node) -> int:
        """Extra bytes a free node moves when it runs high: 2 for every element read and written, and backward."""
        if not self.in_bytes or ir.mark(node).op in TRAITS["view"] or ir.mark(node).op in GATHERS:
            return 0
        total, backward = 0, 1
        for value in (node, *node.all_input_nodes):
            for found in tensors_in(ir.mark(value).type):
                if found.shape is not None and found.dtype is not None and found.dtype.is_floating_point:
                    total += 2 * math.prod(found.shape)
                    backward = 2 if found.requires_grad else backward
        return total * backward


@dataclasses.dataclass(frozen=True)
class Kept:
    """A value that is saved for backward: once in each precision in which somebody needs it.

    Attributes:
        value: the node that gives it.
        keepers: the nodes whose backward needs it, in the precision they run in.
        elements: its size; 4 bytes each are kept for high keepers, 2 for low ones.
    """

    value: fx.Node
    keepers: tuple[fx.Node, ...]
    elements: int


def kept_by(node: fx.Node) -> list[fx.Node]:
    """The float32 values that a node's backward needs: its inputs, its result, or none."""
    if not ir.has_gradient(node):
        return []
    op = ir.mark(node).op
    found = [node] if op in _KEEPS_RESULT else []
    if op in _KEEPS_INPUTS:
        inputs = [given for given in node.all_input_nodes if ir.holds_float32(given) and not ir.is_weight(given)]
        if op in _KEEPS_THE_OTHER and len(node.all_input_nodes) > 1:
            inputs = [given for given in inputs if any(map(ir.has_gradient, _others(node, given)))]
        found += inputs if op in _TAKES_MANY else inputs[:1] if op not in _KEEPS_THE_OTHER else inputs
    return found


_TAKES_MANY = frozenset({"scaled_dot_product_attention", "bilinear", "einsum", "baddbmm", "div", "lstm", "gru"})


def _others(node: fx.Node, given: fx.Node) -> list[fx.Node]:
    others = [value for value in node.all_input_nodes if value is not given]
    return others or [given]


def _elements(value: fx.Node) -> int:
    return sum(math.prod(found.shape) for found in tensors_in(ir.mark(value).type) if found.shape is not None)
