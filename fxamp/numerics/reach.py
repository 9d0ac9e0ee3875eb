"""Which gradients that are not finite reach a parameter, or an input of the call; others an op of the model takes back.

The slope of sqrt(relu(h)) is infinite where h is below 0, in float32 too, and relu's backward puts a zero there.
"""

import dataclasses
from collections.abc import Iterator

from torch import fx, nn

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.numerics.flow import CallFlow, Flow


@dataclasses.dataclass(frozen=True)
class Reach:
    """Where the bad gradients of a watched call go.

    Attributes:
        values: by the turn of a graph in the call, names of the values whose gradient is not finite and leads, from
            one such to the next, to a parameter's or an input's.
    """

    values: dict[int, frozenset[str]]

    def of(self, flow: Flow) -> frozenset[str]:
        """Those of one graph."""
        return self.values.get(flow.part.number, frozenset())

    def __bool__(self) -> bool:
        return any(self.values.values())


def reach_of(call: CallFlow) -> Reach:
    """Follow the bad gradients of a call back from where they arrive.

    An input of a later graph counts only where they are not seen to go into an earlier one, or arrive there.
    """
    found: dict[int, frozenset[str]] = {}
    is_handed_on = reaches = False
    for flow in call.parts:
        takes_inputs = reaches or not is_handed_on
        found[flow.part.number] = names = frozenset(_led_to(flow, takes_inputs))
        edges = flow.edges.items()
        returned = [value for (value, reader), extent in edges if reader == "output" and not extent.is_finite]
        is_handed_on = is_handed_on or bool(returned)
        reaches = reaches or not names.isdisjoint(returned)
    return Reach(found)


def _led_to(flow: Flow, takes_inputs: bool) -> set[str]:
    """Values with a bad gradient, from the ends of backward on."""
    nodes: dict[str, fx.Node] = {node.name: node for node in flow.variant.graph.nodes}
    bad = bad_values(flow)
    frontier = [name for name in bad if _is_end(flow, nodes[name], takes_inputs)]
    reached: set[str] = set()
    while frontier:
        name = frontier.pop()
        if name not in reached:
            reached.add(name)
            frontier += (reader for reader in _made_by(flow, nodes[name]) if reader in bad or _is_unseen(flow, reader))
    return reached


def bad_values(flow: Flow) -> set[str]:
    """Names of the values whose gradient, over an edge at least, is not finite."""
    edges = (value for (value, _), extent in flow.edges.items() if not extent.is_finite)
    return {*edges, *(value for value, extent in flow.sums.items() if not extent.is_finite)}


def _is_end(flow: Flow, node: fx.Node, takes_inputs: bool) -> bool:
    """Whether its gradient is somebody's: a parameter's, an input's, or that of a module that has parameters inside."""
    if node.op == "placeholder":
        return takes_inputs or ir.is_weight(node)
    if node.op == "call_module":
        module: nn.Module = flow.variant.captured.root.get_submodule(str(node.target))
        return any(parameter.requires_grad for parameter in module.parameters())
    return node.op == "get_attr"


def _made_by(flow: Flow, node: fx.Node) -> Iterator[str]:
    """The readers whose backward made its bad gradient, or may have: not every edge can be watched."""
    written = (reader for (_, reader), writer in flow.writers.items() if writer == node.name)
    unseen = (user.name for user in node.users if mutated(user) or _takes_gradients(user))
    for reader in dict.fromkeys((*written, *unseen)):
        if (node.name, reader) not in flow.edges:
            yield reader
    yield from (reader for (value, reader), extent in flow.edges.items() if value == node.name and not extent.is_finite)


def _takes_gradients(node: fx.Node) -> bool:
    return node.op == "output" or ir.has_gradient(node)


def _is_unseen(flow: Flow, name: str) -> bool:
    """Whether no gradient of the value was seen, though it may have had one."""
    return name != "output" and name not in flow.sums and not any(value == name for value, _ in flow.edges)
