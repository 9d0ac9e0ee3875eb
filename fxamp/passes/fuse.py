"""Read what a model writes out op by op as the one op that it is: an RMS norm, and the tanh form of gelu."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from fxamp import ir
from fxamp.passes.alias import find_aliases, grad_regions
from fxamp.passes.base import Pass
from fxamp.passes.overrides import override_for, protected_part
from fxamp.passes.policy import Policy
from fxamp.passes.polynomials import Polynomial, polynomial, terms_below
from fxamp.passes.reads import is_conversion

# The weight's product with the norm, the norm itself, and what stands between: (1 + w), conversions.
_REACH = 4
_GELU: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}  # x / 2 * (1 + t)
_TANH: Polynomial = {(1, 0): math.sqrt(2 / math.pi), (3, 0): 0.044715 * math.sqrt(2 / math.pi)}  # of x


@dataclasses.dataclass(frozen=True)
class Found:
    """An expression that is one op.

    Attributes:
        result: the node that gives its value.
        members: the nodes of the expression, the result among them.
        operands: what it reads.
        target: the function that computes it, with `args`.
        approximate: of gelu.
    """

    result: fx.Node
    members: frozenset[fx.Node]
    operands: tuple[fx.Node, ...]
    target: Callable[..., Any]
    args: tuple[Any, ...]
    approximate: str = ""

    @property
    def op(self) -> str:
        return str(self.target.__name__)


@dataclasses.dataclass(frozen=True)
class FuseWrittenOut(Pass):
    """Replace an expression by the op it writes out, whose kernel computes in float32 and rounds once.

        v = x.to(float32).pow(2).mean(-1, keepdim=True); y = w * (x * rsqrt(v + eps))
        y = rms_norm(x, (d,), w, eps)

    The parts would each run in float32 (`pow` and `rsqrt` are on the deny list), with a pass over memory each.

    1. Nothing else reads the parts, no part is written in place, and all stand in one gradient mode and one
       checkpointed region.
    2. Whoever has said something about a part, or about the op, is obeyed: lists of the user's own, overrides, regions
       without autocast, `_keep_in_fp32_modules`, a plan.
    3. At level "strict" everything stays as it is written.

    Args:
        is_apart: whether a plan decides about the parts, given their module's path, the op and theirs.
    """

    policy: Policy
    is_apart: Callable[[str, str, Collection[str]], bool] | None = None

    def apply(self, graph: fx.Graph) -> bool:
        if self.policy.level == "strict":
            return False
        changed = False
        written, regions = find_aliases(graph).storage_of, grad_regions(graph)
        for node in list(graph.nodes):
            if node.op not in ("call_function", "call_method"):
                continue
            found = _rms_norm(node) or _gelu(node)
            if found is None or any(part in written for part in (*found.members, *found.operands)):
                continue
            if len({(regions[part], part.meta.get(ir.REGION)) for part in found.members}) == 1 and self._may(found):
                _replace(graph, found)
                changed = True
        return changed

    def _may(self, found: Found) -> bool:
        row = self.policy.lists.row(found.op)
        if row is None or self.policy.lists.colour(found.op) not in ("infer", "allow"):
            return False
        if self.is_apart is not None:
            ops = {ir.mark(part).op for part in found.members}
            if self.is_apart(ir.module_path(found.result), found.op, ops):
                return False
        return not any(self._is_spoken_of(part) for part in found.members)

    def _is_spoken_of(self, node: fx.Node) -> bool:
        row = self.policy.lists.row(ir.mark(node).op)
        return (
            (row is not None and row.origin != "default")
            or node.meta.get("autocast") == "off"
            or override_for(node, self.policy.overrides) is not None
            or protected_part(node, self.policy) is not None
        )


def _replace(graph: fx.Graph, found: Found) -> None:
    result = found.result
    written = [node for node in graph.nodes if node in found.members]
    parts = [node for node in written if node is not result]
    result.op, result.target, result.args, result.kwargs = "call_function", found.target, found.args, {}
    if found.approximate:
        result.kwargs = {"approximate": found.approximate}
    result.meta[ir.WRITTEN_OUT] = ", ".join(ir.mark(part).op for part in written)
    ir.set_mark(result, op=found.op)
    for part in reversed(parts):
        graph.erase_node(part)


def _closed(result: fx.Node, members: set[fx.Node]) -> bool:
    """Whether nobody but the expression reads its parts."""
    return all(user in members for part in members if part is not result for user in part.users)


# ------------------------------------------------------------------------------------------------ RMS norms


def _rms_norm(node: fx.Node) -> Found | None:
    """An RMS norm that ends in its product with a weight."""
    for weight, rest in _products(node):
        shape = ir.shape_of(weight)
        if shape is None or len(shape) != 1 or not _is_float32(weight):
            continue
        members = {node}
        scaled = _through_conversions(rest, members)
        for value, root in (*_products(scaled), *_quotients(scaled)):
            inner = {*members, scaled}
            x = _through_conversions(value, inner)
            eps = _root_mean_square(root, x, inner, "sqrt" if ir.mark(scaled).op == "div" else "rsqrt")
            if eps is None or not _is_float32(x) or not _fits(x, shape[0]) or not _closed(node, inner):
                continue
            if weight in inner or (value is not x and not _is_converted_back(scaled, node)):
                continue
            if rest is not scaled and not _is_converted_back(node):
                continue
            return Found(node, frozenset(inner), (x, weight), F.rms_norm, (x, (shape[0],), weight, eps))
    return None


def _root_mean_square(node: fx.Node, x: fx.Node, members: set[fx.Node], root: str) -> float | None:
    """The eps of sqrt(mean(x * x) + eps), or of its reciprocal (`root` is "rsqrt"); None where it is something else."""
    is_power = root == "rsqrt" and ir.mark(node).op == "pow" and node.args[1:] == (-0.5,)
    if (ir.mark(node).op != root and not is_power) or not node.args:
        return None
    total = node.args[0]
    if node.kwargs or not isinstance(total, fx.Node) or ir.mark(total).op != "add" or total.kwargs:
        return None
    numbers = [value for value in total.args if isinstance(value, float)]
    nodes = [value for value in total.args if isinstance(value, fx.Node)]
    if len(numbers) != 1 or len(nodes) != 1 or not _is_mean_of_last(nodes[0]):
        return None
    square = nodes[0].args[0]
    assert isinstance(square, fx.Node)
    members |= {node, total, nodes[0]}
    if ir.mark(square).op in ("pow", "square", "mul"):
        base = square.args[0]
        members.update(terms_below(square, {base} if isinstance(base, fx.Node) else ()))
        is_square = isinstance(base, fx.Node) and polynomial(square, {base: (1, 0)}) == {(2, 0): 1.0}
        if is_square and _through_conversions(base, members) is x:
            return numbers[0]
    return None


def _is_mean_of_last(node: fx.Node) -> bool:
    """`mean(y, -1, keepdim=True)` and its other spellings."""
    if ir.mark(node).op != "mean" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    given = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | dict(node.kwargs)
    dim, keeps = given.pop("dim", None), given.pop("keepdim", False)
    return keeps is True and not given and dim in (-1, [-1], (-1,))


def _products(node: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two factors of a product of tensors, both ways round."""
    if not isinstance(node, fx.Node) or ir.mark(node).op != "mul" or node.kwargs or len(node.args) != 2:
        return
    left, right = node.args
    if isinstance(left, fx.Node) and isinstance(right, fx.Node):
        yield left, right
        yield right, left


def _quotients(node: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    if isinstance(node, fx.Node) and ir.mark(node).op == "div" and not node.kwargs and len(node.args) == 2:
        if all(isinstance(given, fx.Node) for given in node.args):
            yield node.args  # type: ignore[misc]


def _through_conversions(node: Any, members: set[fx.Node]) -> Any:
    """What a value is before the user's conversions to float32, which it has in a float32 run; they join `members`."""
    while isinstance(node, fx.Node) and is_conversion(node) and _is_float32(node) and _is_float32(node.args[0]):
        members.add(node)
        node = node.args[0]
    return node


def _is_converted_back(*values: fx.Node) -> bool:
    """Whether what the user converted to float32 does not stay so: `y.to(x.dtype)` of one of these."""
    return any(ir.CONVERTED_BACK in value.meta for value in values)


# -------------------------------------------------------------------------------------------------- gelu


def _gelu(node: fx.Node) -> Found | None:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))), in whatever order it is written, at its tanh."""
    if ir.mark(node).op != "tanh" or node.kwargs or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
        return None
    inside = node.args[0]
    for x in dict.fromkeys(given for term in terms_below(inside) for given in term.all_input_nodes):
        if _is_float32(x) and _near(polynomial(inside, {x: (1, 0)}), _TANH):
            return _around(node, x, {node, *terms_below(inside, {x})})
    return None


def _around(tanh: fx.Node, x: fx.Node, below: set[fx.Node]) -> Found | None:
    top = tanh
    for _ in range(_REACH):
        if len(top.users) != 1:
            return None
        top = next(iter(top.users))
        if _near(polynomial(top, {x: (1, 0), tanh: (0, 1)}), _GELU):
            members = below | {*terms_below(top, {x, tanh})}
            return Found(top, frozenset(members), (x,), F.gelu, (x,), "tanh") if _closed(top, members) else None
    return None


def _near(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None or found.keys() != wanted.keys():
        return False
    return all(math.isclose(found[powers], wanted[powers], rel_tol=1e-6) for powers in wanted)


# ------------------------------------------------------------------------------------------------- types


def _is_float32(value: Any) -> bool:
    return ir.dtype_of(value) == torch.float32


def _fits(x: fx.Node, width: int) -> bool:
    """Whether the last dimension is `width` wide; where sizes are not known yet, the graph is never run."""
    shape = ir.shape_of(x)
    return shape is None or (len(shape) > 0 and shape[-1] == width)
