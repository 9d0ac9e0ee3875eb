"""What always holds for the pads and slices of a graph."""

from torch import fx
from torch.nn import functional

from fxamp import ir
from fxamp.errors import InvariantError
from fxamp.passes.alias import find_aliases, grad_regions


def pads_minimal(graph: fx.Graph) -> None:
    """Every pad and slice is read; none undoes another; a value is padded in one way once, and sliced once."""
    aliases, regions = find_aliases(graph), grad_regions(graph)
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in graph.nodes:
        role = ir.mark(node).role
        if role not in ("pad", "slice"):
            continue
        if not node.users:
            raise InvariantError(f"the {role} {node.name} is used by nobody")
        if role == "pad" and node.target is not functional.pad:
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if role == "slice" and ir.mark(source).role in ("pad", "slice"):
            raise InvariantError(f"{node.name} slices {source.name}, which is a {ir.mark(source).role}")
        if role == "pad" and source.target is functional.pad and ir.mark(source).role == "pad":
            raise InvariantError(f"{node.name} pads {source.name}, which is a pad")
        amounts = str((node.args[1:], node.kwargs)) if role == "pad" else ""
        key = (role, source, amounts, aliases.epoch(source, node), regions[node])
        if key in seen:
            raise InvariantError(f"two of the same: {seen[key].name} and {node.name} {role} {source.name}")
        seen[key] = node
