"""Write a plan and its flow into the graph: pads, slices, and the arguments that follow from them."""

import dataclasses
import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from fxamp import ir
from fxamp.fakes import Fakes
from fxamp.ir import Reason
from fxamp.lists import TRAITS
from fxamp.passes.alias import Aliases, grad_regions
from fxamp.passes.gemms import OPS
from fxamp.passes.pad_arguments import argument_at, grow_type, keep_scale, put_at
from fxamp.passes.padding_flow import Flow, Plan, Planned, fits, is_cast_of_part, reads_as_it_is
from fxamp.passes.padding_values import PER_ELEMENT, Kept, is_parameter
from fxamp.passes.recurrent_gemms import Recurrent
from fxamp.paths import attribute_at
from fxamp.runtime import padded_norm
from fxamp.runtime.padded_results import cast_of_part
from fxamp.runtime.padded_weights import Dims, cut, grown
from fxamp.value_types import TensorType, ValueType

# Readers whose result does not depend on whether a slice is dense; others get a dense copy, as in the model.
_DENSE_RESULT_OPS = """
    bfloat16 cat cross_entropy double dropout float half layer_norm log_softmax mean nll_loss rms_norm
    softmax stack sum to type_as
"""
_STRIDED = frozenset(
    {
        *PER_ELEMENT,
        *OPS,
        *TRAITS["shape_result"],
        *_DENSE_RESULT_OPS.split(),
    }
)


class PadEditor:
    """Changes one graph in place.

    Args:
        root: the model, for the state of its batch norms.
        fakes: their fake values, None where the graph has none.
    """

    def __init__(
        self, graph: fx.Graph, plan: Plan, flow: Flow, aliases: Aliases, root: nn.Module, fakes: Fakes | None
    ) -> None:
        self.graph, self.plan, self.flow, self.aliases = graph, plan, flow, aliases
        self.root, self.fakes = root, fakes
        self.regions = grad_regions(graph)
        self.made: dict[tuple[Any, ...], fx.Node] = {}
        self.replaced: list[fx.Node] = []

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node in self.plan:
                self._pad_gemm(self.plan[node])
            elif node in self.flow.kept:
                self._keep(node, self.flow.kept[node])
            else:
                self._slice_reads(node)
            if node in self.flow.paddings:
                padding = self.flow.paddings[node]
                grow_type(node, {padding.dim: padding.extra * padding.blocks})
        for node in dict.fromkeys(self.replaced):
            if not node.users:
                self.graph.erase_node(node)

    # ------------------------------------------------------------------------------------------- readers

    def _pad_gemm(self, planned: Planned) -> None:
        node = planned.gemm.node
        for operand in list(ir.arguments(node)):
            wants = planned.wants(operand.position, operand.keyword)
            padding = self.flow.paddings.get(operand.value)
            source = operand.value
            if padding is not None and fits(planned, operand, padding):
                wants = {dim: extra for dim, extra in wants.items() if dim != padding.dim}
            elif padding is not None:
                source = self._sliced(operand.value, node)
            is_bias = operand.position == 2 or operand.keyword == "bias"
            fill = self._lowest(node) if is_bias and node in self.flow.masked else 0.0
            ir.replace_operand(node, operand, self._padded(source, wants, node, fill))
        if node in self.flow.masked and ir.argument_of(node, 2, "bias") is None:
            self._add_masking_bias(planned)
        if ir.mark(node).op == "scaled_dot_product_attention":
            keep_scale(planned)
        if isinstance(planned.gemm, Recurrent):
            self._grow_recurrent(planned.gemm, planned.extras)

    def _grow_recurrent(self, gemm: Recurrent, extras: tuple[int, ...]) -> None:
        """Its weights grow block by block; with a projection its first states grow each by its own size."""
        node = gemm.node
        for at, dims in gemm.growths(extras).items():
            weight = argument_at(node, at)
            put_at(node, at, self._grown(weight, dims, node))
        if gemm.projected:
            for number, extra in enumerate(gemm.first_states(extras)):
                state = argument_at(node, (gemm.states, number))
                put_at(node, (gemm.states, number), self._padded(state, {2: extra} if extra else {}, node))
        for number, kind in enumerate(ir.mark(node).type if ir.is_tuple(node) else ()):  # type: ignore[arg-type]
            extra, blocks = gemm.result(number, extras)
            grow_type(node, {len(kind.shape) - 1: extra * blocks}, number)

    def _lowest(self, node: fx.Node) -> float:
        kind = ir.mark(node).type
        assert isinstance(kind, TensorType) and kind.dtype is not None
        return torch.finfo(kind.dtype).min

    def _add_masking_bias(self, planned: Planned) -> None:
        node, out = planned.gemm.node, planned.out
        weight = ir.argument_of(node, 1, "weight")
        assert out is not None
        while ir.mark(weight).role == "pad":
            weight = weight.args[0]
        rank, rows = len(ir.shape_of(weight) or ()), (ir.shape_of(weight) or (0,))[0]
        with self.graph.inserting_before(node):
            column = self.graph.call_function(operator.getitem, (weight, (slice(None), *(0,) * (rank - 1))))
            zeros = self.graph.call_function(torch.zeros_like, (column,))
        kind = TensorType(ir.mark(node).type.dtype, (rows,))  # type: ignore[union-attr]
        for made, op in ((column, "getitem"), (zeros, "zeros_like")):
            self._describe(made, node, kind, "pad", op, f"{node.name} hides its padding from the loss")
        bias = self._padded(zeros, {0: out[1]}, node, self._lowest(node))
        if len(node.args) > 2:
            node.args = (*node.args[:2], bias, *node.args[3:])
        elif len(node.args) == 2 and "bias" not in node.kwargs:
            node.args = (*node.args, bias)
        else:
            node.kwargs = {**node.kwargs, "bias": bias}

    def _keep(self, node: fx.Node, how: Kept) -> None:
        for operand in list(ir.arguments(node)):
            at = (operand.position, operand.keyword)
            dims = {place.dim: how.padding.extra for place in how.pads if (place.position, place.keyword) == at}
            if dims:
                ir.replace_operand(node, operand, self._padded(operand.value, dims, node))
        if how.grown is not None:
            self._grow_size(node, how.grown, how.padding.extra)
        if how.with_stats:
            self._pad_statistics(node)

    def _slice_reads(self, node: fx.Node) -> None:
        for value in node.all_input_nodes:
            if value not in self.flow.paddings or reads_as_it_is(value, node, self.flow, self.plan):
                continue
            if is_cast_of_part(value, node, self.flow):
                self._cast_part(node, value)
            else:
                node.replace_input_with(value, self._sliced(value, node))

    def _cast_part(self, cast: fx.Node, padded: fx.Node) -> None:
        """Make a cast read the padded value: its gradient is converted into the padded one at once."""
        padding, dtype = self.flow.paddings[padded], cast.args[1]
        dim = padding.dim - len(ir.shape_of(padded) or ())  # from the back: a squeeze may have left fewer dimensions
        cast.op, cast.target = "call_function", cast_of_part
        cast.args = (padded, dim, padding.extra, dtype)
        why = self.flow.refused.get((padded, cast), "nothing behind it reads the padding")
        reason = ir.mark(cast).reason
        ir.set_mark(cast, reason=dataclasses.replace(reason, text=f"{reason.text}; without its padding: {why}"))

    def _grow_size(self, node: fx.Node, index: int, extra: int) -> None:
        flat = len(node.args) == 2 and isinstance(node.args[1], (tuple, list))
        sizes: list[Any] = list(node.args[1]) if flat else list(node.args[1:])  # type: ignore[arg-type]
        size = sizes[index]
        if isinstance(size, fx.Node):
            with self.graph.inserting_before(node):
                longer = self.graph.call_function(operator.add, (size, extra))
            if isinstance(size.meta.get("val"), int):
                longer.meta["val"] = size.meta["val"] + extra
            self._describe(longer, node, None, "pad", "add", f"the padded size of {node.name}")
        sizes[index] = longer if isinstance(size, fx.Node) else size + extra
        node.args = (node.args[0], tuple(sizes)) if flat else (node.args[0], *sizes)

    def _pad_statistics(self, node: fx.Node) -> None:
        if node.op == "call_function":
            node.target = padded_norm.batch_norm
            return
        path = str(node.target)
        module = self.root.get_submodule(path)
        training = bool(module.training)
        state = [self._state(node, path, name) for name in ("running_mean", "running_var", "weight", "bias")]
        batches, is_tracked = (self._state(node, path, name) for name in ("num_batches_tracked", "track_running_stats"))
        numbers = [self._state(node, path, name) for name in ("momentum", "eps")]
        source = node.args[0] if node.args else node.kwargs["input"]
        node.op, node.target = "call_function", padded_norm.batch_norm
        node.kwargs = {}
        node.args = (source, *state, training, *numbers, batches, is_tracked)

    def _state(self, reader: fx.Node, path: str, name: str) -> fx.Node | None:
        """A node that reads one attribute of a module at every call; None where the module has none."""
        value = attribute_at(self.root, f"{path}.{name}")
        if value is None and name != "momentum":
            return None
        with self.graph.inserting_before(reader):
            made = self.graph.get_attr(f"{path}.{name}")
        made.meta["val"] = self.fakes.of(value) if self.fakes is not None else value
        kind = None
        if isinstance(value, torch.Tensor):
            kind = TensorType(made.meta["val"].dtype, tuple(value.shape), value.requires_grad)
        op = "parameter" if isinstance(value, nn.Parameter) else "buffer"
        self._describe(made, reader, kind, "pad", op, f"{reader.name} is computed over padded channels")
        is_high = kind is not None and kind.dtype == torch.float32
        ir.set_mark(made, precision="high" if is_high else "none")
        return made

    # ------------------------------------------------------------------------------------ pads and slices

    def _padded(self, value: fx.Node, dims: dict[int, int], reader: fx.Node, fill: float = 0.0) -> fx.Node:
        """The value with `dims` padded; made once, and before each reader again where it was written in between."""
        if not dims:
            return value
        key = ("pad", value, tuple(sorted(dims.items())), fill, *self._moment(value, reader))
        if key not in self.made and not fill and self._makes_zeros(value, dims):
            self.made[key] = self._longer_zeros(value, dims, reader)
        if key not in self.made:
            amounts = [0, 0] * len(ir.shape_of(value) or ())
            for dim, extra in dims.items():
                amounts[-1 - 2 * dim] = extra
            while amounts[-2:] == [0, 0]:
                amounts = amounts[:-2]
            with self.graph.inserting_before(reader):
                kwargs: dict[str, Any] = {"value": fill} if fill else {}
                made = self.graph.call_function(functional.pad, (value, tuple(amounts)), kwargs)
            what = "parameter" if is_parameter(value) else "value"
            why = f"the {what} {value.name} is padded for {reader.name}"
            self._describe(made, value, ir.mark(value).type, "pad", "pad", why)
            grow_type(made, dims)
            self.made[key] = made
        return self.made[key]

    def _makes_zeros(self, value: fx.Node, dims: dict[int, int]) -> bool:
        """Whether a value is zeros that the model makes, as a recurrent layer does for its first states."""
        if ir.mark(value).op != "new_zeros" or value.kwargs or value in self.aliases.storage_of:
            return False
        sizes = _sizes_of_zeros(value)
        return len(sizes) == len(ir.shape_of(value) or ()) and all(type(sizes[dim]) is int for dim in dims)

    def _longer_zeros(self, value: fx.Node, dims: dict[int, int], reader: fx.Node) -> fx.Node:
        sizes = _sizes_of_zeros(value)
        for dim, extra in dims.items():
            sizes[dim] += extra
        with self.graph.inserting_before(reader):
            made = self.graph.call_method("new_zeros", (value.args[0], tuple(sizes)))
        made.meta.update(value.meta)
        grow_type(made, dims)
        self.replaced.append(value)
        return made

    def _grown(self, weight: fx.Node, dims: Dims, reader: fx.Node) -> fx.Node:
        """The weight with its blocks grown; made once, and before each reader again where it was written."""
        if all(blocks == 1 for blocks, _ in dims):
            return self._padded(weight, {dim: extra for dim, (_, extra) in enumerate(dims) if extra}, reader)
        key = ("grown", weight, dims, *self._moment(weight, reader))
        if key not in self.made:
            with self.graph.inserting_before(reader):
                made = self.graph.call_function(grown, (weight, dims))
            why = f"the parameter {weight.name} is padded for {reader.name}"
            self._describe(made, weight, ir.mark(weight).type, "pad", "pad", why)
            grow_type(made, {dim: blocks * extra for dim, (blocks, extra) in enumerate(dims)})
            self.made[key] = made
        return self.made[key]

    def _sliced(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """The model's own part of a padded value."""
        key = ("slice", value, *self._moment(value, reader))
        if key not in self.made and reader.op == "output" and self._is_padded_cast(value):
            self.made[key] = self._cast_of_slice(value, reader)
        if key not in self.made:
            padding = self.flow.paddings[value]
            rank = len(ir.shape_of(value) or ())
            with self.graph.inserting_before(reader):
                if padding.blocks > 1:
                    dims = (*((1, 0),) * padding.dim, (padding.blocks, padding.extra))
                    made = self.graph.call_function(cut, (value, dims))
                elif self._is_read_dense(value):
                    back = (0, 0) * (rank - 1 - padding.dim)
                    made = self.graph.call_function(functional.pad, (value, (*back, 0, -padding.extra)))
                else:
                    # from the back: a squeeze may give a value of fewer dimensions for another batch
                    part: Any = (Ellipsis, slice(None, -padding.extra), *(slice(None),) * (rank - 1 - padding.dim))
                    made = self.graph.call_function(operator.getitem, (value, part))
            why = self.flow.refused.get((value, reader), "nothing behind it reads the padding")
            self._describe(made, value, ir.mark(value).type, "slice", "slice", f"{reader.name}: {why}")
            grow_type(made, {padding.dim: -padding.extra * padding.blocks})
            self.made[key] = made
        return self.made[key]

    def _is_padded_cast(self, value: fx.Node) -> bool:
        sources = [source for source in value.all_input_nodes if source in self.flow.paddings]
        return any(is_cast_of_part(source, value, self.flow) for source in sources)

    def _cast_of_slice(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """A cast of the low part: 6 bytes an element, where a dense slice of the float32 values moves 8."""
        source = value.all_input_nodes[0]
        with self.graph.inserting_before(reader):
            made = self.graph.node_copy(value, lambda given: given)
        padding = self.flow.paddings[value]
        made.meta[ir.MARK] = ir.mark(value)
        grow_type(made, {padding.dim: -padding.extra})
        self._cast_part(made, source)
        self.replaced.append(value)
        return made

    def _is_read_dense(self, value: fx.Node) -> bool:
        sliced = [user for user in value.users if (value, user) in self.flow.refused]
        return not all(ir.mark(user).op in _STRIDED or _asks(user) for user in sliced)

    def _moment(self, value: fx.Node, reader: fx.Node) -> tuple[int, int]:
        if value not in self.aliases.order or reader not in self.aliases.order:
            return 0, self.regions.get(reader, 0)
        return self.aliases.epoch(value, reader), self.regions[reader]

    def _describe(self, made: fx.Node, of: fx.Node, kind: ValueType, role: ir.Role, op: str, why: str) -> None:
        ir.keep_place(made, of)
        precision = ir.mark(of).precision if kind is not None else "none"
        made.meta[ir.MARK] = ir.Mark(op, kind, "clear", precision, Reason("pad", why, of.name), role, of.name)


def _asks(reader: fx.Node) -> bool:
    """Whether a reader reads no numbers: `x.shape` of a slice is what it is of its dense copy."""
    return ir.mark(reader).op == "getattr" and reader.args[1] in ("device", "dtype", "ndim", "shape")


def _sizes_of_zeros(node: fx.Node) -> list[Any]:
    """The sizes that new_zeros() is given, in one tuple or one by one."""
    first = node.args[1] if len(node.args) == 2 else None
    return list(first) if isinstance(first, (tuple, list)) else list(node.args[1:])
