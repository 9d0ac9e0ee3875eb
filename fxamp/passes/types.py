"""Give every node its canonical op and the type of its value.

With example inputs the types are what running the node on fake tensors gives (without sizes for a tensor that has
others later). Without them only dtypes are inferred, from the op's kind; a value whose dtype cannot be told is typed
`None` and left alone by every later pass, and an input is taken for float32 unless it is used as an index.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.authors import cast_by_autocast
from fxamp.dtypes import LOW_DTYPES
from fxamp.fake_limits import is_a_limit, is_foreign
from fxamp.fakes import UNKNOWN, Fakes, size_of
from fxamp.inplace import reshaped
from fxamp.lists import TRAITS
from fxamp.passes.base import Pass
from fxamp.passes.overrides import override_for
from fxamp.passes.policy import Policy
from fxamp.passes.reads import asked_dtype, float_reads
from fxamp.paths import attribute_at
from fxamp.sparse import is_sparse
from fxamp.value_types import TensorType, ValueType, tensors_in


@dataclasses.dataclass(frozen=True)
class InferTypes(Pass):
    """Mark every node with its canonical op and logical type (as in an fp32 run).

    Attributes:
        root: resolves parameters, buffers and leaf modules.
        fakes: runs nodes the capture gave no value for; None where no example inputs are known.
        constants: tensors that belong to no module, by name.
        policy: says which ops may run low, and on which operands.
    """

    root: nn.Module
    fakes: Fakes | None = None
    constants: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    policy: Policy | None = None

    def apply(self, graph: fx.Graph) -> bool:
        for node in graph.nodes:
            op = "buffer" if node.target in self.constants else ir.canonical_op(node, self.root)
            ir.set_mark(node, op=op, type=None)
            ir.set_mark(node, type=self._type(node))
            if ir.is_tuple(node) and ir.mark(node).op == "getitem":
                ir.set_mark(node, type=_part_of(ir.mark(node.args[0]).type, node.args[1], ir.mark(node).type))
            elif self.policy is not None and _may_keep_float32(node, self.policy):
                self._note_what_stays(node, self.policy)
        for node in reshaped(graph):
            kind = ir.mark(node).type
            if isinstance(kind, TensorType):
                ir.set_mark(node, type=dataclasses.replace(kind, shape=None))
        return False

    def _note_what_stays(self, node: fx.Node, policy: Policy) -> None:
        """Of a kernel's results, which are float32 whatever it is given: it is asked, as devices differ."""
        if not self._can_run(node):
            return
        fakes, values = self.fakes, {given: given.meta["val"] for given in node.all_input_nodes}
        if fakes is None:  # of sizes that vary it is asked with those that were seen
            fakes = Fakes(self.root)
            values = {given: pytree.tree_map(fakes.seen, value) for given, value in values.items()}
        for read in float_reads(node, policy.lists):
            if read.mode == "with":
                values[read.value] = fakes.lowered(values[read.value], policy.low)
        with torch.no_grad(), contextlib.suppress(Exception):  # there is no low kernel
            ir.set_mark(node, type=_staying(ir.mark(node).type, type_of(fakes.run(node, values.__getitem__))))

    def _type(self, node: fx.Node) -> ValueType:
        if node.op == "get_attr" and "val" not in node.meta:
            value = self.constants.get(str(node.target), attribute_at(self.root, node.target))
            node.meta["val"] = self.fakes.of(value) if self.fakes else value
        if "val" not in node.meta and self.fakes is not None and self._can_run(node):
            value = run_on_fakes(self.fakes, node)
            if value is not UNKNOWN:
                node.meta["val"] = value
        if "val" in node.meta:
            return type_of(node.meta["val"])
        if self.fakes is not None and (guess := self._guessed(node, self.fakes)) is not UNKNOWN:
            return type_of(guess)
        if node.op == "placeholder" and not ir.is_weight(node):
            return self._assumed(node)
        return infer_dtype(node)

    def _assumed(self, node: fx.Node) -> ValueType:
        """An input's type without an example: an index's, or float32, or what all of the model's weights are."""
        assumed = infer_dtype(node)
        stored = (given.meta.get("val") for given in node.graph.nodes if given.op == "get_attr")
        dtypes = {value.dtype for value in stored if isinstance(value, torch.Tensor) and value.is_floating_point()}
        is_low = len(dtypes) == 1 and dtypes <= {*LOW_DTYPES} and assumed == TensorType(torch.float32)
        return TensorType(dtypes.pop()) if is_low else assumed

    def _guessed(self, node: fx.Node, fakes: Fakes) -> Any:
        """A value whose sizes the capture guessed, or that is made of one: right but for the number of rows."""
        if ir.GUESS not in node.meta and node.op.startswith("call"):
            values = {given: given.meta.get("val", given.meta.get(ir.GUESS, UNKNOWN)) for given in node.all_input_nodes}
            if any(ir.GUESS in given.meta for given in values) and not any(v is UNKNOWN for v in values.values()):
                node.meta[ir.GUESS] = run_on_fakes(fakes, node, values.__getitem__)
        return node.meta.get(ir.GUESS, UNKNOWN)

    def _can_run(self, node: fx.Node) -> bool:
        is_call = node.op in ("call_function", "call_method", "call_module")
        return is_call and all("val" in given.meta for given in node.all_input_nodes)


def run_on_fakes(
    fakes: Fakes, node: fx.Node, values: Callable[[fx.Node], Any] = lambda given: given.meta["val"]
) -> Any:
    """The node's fake value, UNKNOWN where fake tensors cannot tell.

    Raises:
        Exception: what torch raises when the op does not take such arguments.
    """
    try:
        return fakes.run(node, values)
    except Exception as error:
        if is_a_limit(error) or node.op != "call_function" or is_foreign(node.target):
            return UNKNOWN
        raise


def _may_keep_float32(node: fx.Node, policy: Policy) -> bool:
    """Whether a node may run low and give float32: ops with several results do, and functions that are not torch's."""
    if not ir.is_tuple(node) and not (node.op == "call_function" and is_foreign(node.target)):
        return False
    key = override_for(node, policy.overrides)
    colour = policy.lists.colour(ir.mark(node).op) if key is None else policy.overrides[key]
    return colour in ("allow", "infer") or cast_by_autocast(node.target, policy.device) == policy.low


def _staying(kind: ValueType, low: ValueType) -> ValueType:
    """The type of a result, given its type where its op runs low."""
    if isinstance(kind, tuple) and isinstance(low, tuple):
        return tuple(map(_staying, kind, low))
    if isinstance(kind, TensorType) and isinstance(low, TensorType):
        return dataclasses.replace(kind, stays=low.dtype == torch.float32)
    return kind


def _part_of(whole: ValueType, place: object, kind: ValueType) -> ValueType:
    """The type of several results, which know what stays float32 among them."""
    return whole[place] if isinstance(whole, tuple) and isinstance(place, slice) else kind


def type_of(value: Any) -> ValueType:
    """The type of a (fake or real) value."""
    if isinstance(value, torch.Tensor):
        shape = tuple(map(size_of, value.shape))
        return TensorType(value.dtype, shape, value.requires_grad, is_sparse=is_sparse(value))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        parts = tuple(type_of(part) for part in value)
        return parts if any(part is not None for part in parts) else None
    if isinstance(value, dict):
        return tuple(type_of(part) for part in value.values())
    return None


# --------------------------------------------------------------------------------------- without any shapes

UNKNOWN_TENSOR = TensorType(None)
_CASTS = {
    "float": torch.float32,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "double": torch.float64,
    "long": torch.int64,
    "int": torch.int32,
    "bool": torch.bool,
}
_RECURRENT = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1, "rnn": 1}
# Functions of packed sequences: the data, and int64 sizes or lengths.
_WITH_SIZES = ("_pack_padded_sequence", "_pad_packed_sequence")
# Creators whose result has the default dtype unless told otherwise.
_FLOAT_CREATORS = frozenset("rand randn zeros ones empty linspace logspace eye hann_window hamming_window".split())
# Results that may be complex, or the parts of one.
_COMPLEX = frozenset("complex polar view_as_complex view_as_real real imag angle stft istft".split())
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float32}
# Integers and bools are added in int64.
_SUMS = frozenset("sum cumsum prod cumprod nansum trace".split())
# They give several tensors of one dtype.
_PARTS_ALIKE = frozenset(
    """aminmax broadcast_tensors chunk dsplit hsplit linalg_eigh linalg_lu linalg_polar linalg_qr linalg_slogdet
    linalg_svd lstm_cell meshgrid multi_head_attention_forward qr split split_with_sizes std_mean svd tensor_split
    unbind unsafe_chunk unsafe_split unsafe_split_with_sizes var_mean vsplit""".split()
)
# Indices are never float32: the argument positions that hold them.
_INDEX_ARGUMENTS = {"embedding": 0, "embedding_bag": 0, "one_hot": 0}


def infer_dtype(node: fx.Node) -> ValueType:
    """The dtype a node's value has in an fp32 run, from its op and its inputs' dtypes alone."""
    op = ir.mark(node).op
    if node.meta.get("boundary"):
        return TensorType(torch.float32)
    if node.op == "placeholder":
        return TensorType(torch.int64 if _is_used_as_index(node) else torch.float32)
    if node.op == "output":
        return None
    if op in TRAITS["shape_result"]:
        return None
    if op == "getattr":
        return _attribute_type(node)
    if op == "getitem":
        return _item_type(node)
    if op in _RECURRENT:
        floats = TensorType(torch.float32)
        if node.op == "call_function":
            return (floats,) * (_RECURRENT[op] + 1)
        return (floats, (floats, floats)) if _RECURRENT[op] == 2 else (floats, floats)
    if op in _WITH_SIZES:
        return (_first_argument_type(node), TensorType(torch.int64))
    if op in TRAITS["bool_result"]:
        return TensorType(torch.bool)
    if op in TRAITS["integer_result"]:
        return TensorType(torch.int64)
    asked = _asked_dtype(node, op)
    if asked is not None:
        return TensorType(asked)
    if op in ("type_as", "to") and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
        return _type_like(node.args[1])
    if op.startswith("fft_") or op in _COMPLEX:
        return UNKNOWN_TENSOR
    if op == "full":
        fill = ir.argument_of(node, 1, "fill_value")
        return TensorType(_NUMBERS[type(fill)]) if type(fill) in _NUMBERS else UNKNOWN_TENSOR
    if op in _FLOAT_CREATORS:
        return TensorType(torch.get_default_dtype())
    if op == "arange":
        return TensorType(torch.float32 if any(isinstance(a, float) for a in node.args) else torch.int64)
    return _promoted(node, op)


def _type_like(source: fx.Node) -> ValueType:
    """The type that `.to(source)` gives, source being a tensor or another tensor's dtype."""
    is_dtype = ir.mark(source).op == "getattr" and source.args[1] == "dtype"
    owner = source.args[0] if is_dtype else source
    kind = ir.mark(owner).type if isinstance(owner, fx.Node) else None
    return kind if isinstance(kind, TensorType) else UNKNOWN_TENSOR


def _promoted(node: fx.Node, op: str) -> ValueType:
    values = [
        found for given in node.all_input_nodes for found in tensors_in(ir.mark(given).type) if _counts(node, given)
    ]
    if not values:
        return None
    if any(found.dtype is None for found in values) or "." in op or "::" in op:
        return UNKNOWN_TENSOR
    dtype = values[0].dtype
    for found in values[1:]:
        assert dtype is not None and found.dtype is not None
        dtype = torch.promote_types(dtype, found.dtype)
    assert dtype is not None
    if not dtype.is_floating_point and not dtype.is_complex:
        dtype = torch.float32 if _makes_float(node, op) else torch.int64 if op in _SUMS else dtype
    result = TensorType(dtype)
    if op in TRAITS["values_and_indices"] and _gives_indices(node, op):
        return (result, TensorType(torch.int64))
    return _parts(node, result) if op in _PARTS_ALIKE else result


def _parts(node: fx.Node, part: TensorType) -> ValueType:
    """Of an op that gives several tensors as many as are read; where they are handed on together it is not known."""
    places = [user.args[1] for user in node.users if user.target is operator.getitem]
    are_known = len(places) == len(node.users) and all(isinstance(place, int) and place >= 0 for place in places)
    if not places or not are_known:
        return UNKNOWN_TENSOR
    return (part,) * (max(places) + 1)  # type: ignore[type-var, operator]


def _counts(node: fx.Node, given: fx.Node) -> bool:
    """Whether an input takes part in type promotion (an index does not)."""
    if ir.mark(node).op in ("embedding", "embedding_bag"):
        return given in ir.nodes_in(ir.argument_of(node, 1, "weight"))
    if ir.mark(node).op in ("gather", "index_select", "scatter", "scatter_add", "index_add", "take_along_dim"):
        return given not in ir.nodes_in(ir.argument_of(node, 2, "index"))
    if ir.mark(node).op in ("where", "masked_fill", "masked_select", "setitem"):
        return given is not (node.args[1] if ir.mark(node).op != "where" and len(node.args) > 1 else node.args[0])
    return True


def _makes_float(node: fx.Node, op: str) -> bool:
    if any(isinstance(argument, float) for argument in node.args):
        return op not in ("clamp", "masked_fill", "pad")
    return op in ("div", "mean", "sqrt", "exp", "log", "sin", "cos", "sigmoid", "tanh", "rsqrt", "reciprocal")


def _gives_indices(node: fx.Node, op: str) -> bool:
    if op in ("topk", "sort", "kthvalue", "mode"):
        return True
    if "pool" in op:
        return node.kwargs.get("return_indices") is True
    second = ir.argument_of(node, 1, "dim")
    return isinstance(second, int) and not isinstance(second, bool)


def _first_argument_type(node: fx.Node) -> TensorType:
    """The type of the first argument, without its shape."""
    kinds = [found.dtype for found in tensors_in(ir.mark(node.all_input_nodes[0]).type)]
    return TensorType(kinds[0]) if kinds else UNKNOWN_TENSOR


_FACTS = frozenset("shape dtype device ndim requires_grad is_leaf layout itemsize nbytes names grad_fn name".split())


def _attribute_type(node: fx.Node) -> ValueType:
    owner = ir.mark(node.args[0]).type if isinstance(node.args[0], fx.Node) else None
    if node.args[1] in _FACTS:
        return None
    return owner if node.args[1] in ("T", "mT", "H", "mH", "data", "grad") else UNKNOWN_TENSOR


def _item_type(node: fx.Node) -> ValueType:
    owner = ir.mark(node.args[0]).type if isinstance(node.args[0], fx.Node) else None
    index = node.args[1]
    if owner is None:
        return None
    if not isinstance(owner, tuple):
        return _first_argument_type(node)
    return owner[index] if isinstance(index, int) and -len(owner) <= index < len(owner) else UNKNOWN_TENSOR


def _asked_dtype(node: fx.Node, op: str) -> torch.dtype | None:
    """The dtype that the user's code names in the call."""
    if op in _CASTS and node.op == "call_method":
        return _CASTS[op]
    return asked_dtype(node)


def _is_used_as_index(node: fx.Node) -> bool:
    for user in node.users:
        position = _INDEX_ARGUMENTS.get(ir.mark(user).op if ir.MARK in user.meta else ir.target_name(user))
        if position is not None and ir.argument_of(user, position, "input") is node:
            return True
    return False
