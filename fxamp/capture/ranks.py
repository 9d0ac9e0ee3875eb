"""What is known of a value in every call of its graph: dtype, device, and the number of its dimensions."""

from torch import fx, nn

from fxamp.inplace import mutated
from fxamp.opnames import canonical_name

_STATIC = frozenset({"dtype", "device", "layout", "ndim", "is_cuda"})
LOOSE_RANK = "loose_rank"
"""Set on a node where sizes decide on the number of its dimensions."""
# What their arguments alone, or the ranks they take, decide on.
_FIXED_RANK = frozenset("addmm baddbmm bmm expand mm reshape view".split())


def note_rank(node: fx.Node, called: nn.Module | None = None) -> None:
    """Note where sizes decide on a new node's rank: a squeeze drops what is 1, which another call may have less of.

    Args:
        called: the module that the node calls whole; what one of the user's does inside is not known.
    """
    op = canonical_name(node.target) if called is None and node.op.startswith("call") else ""
    is_open = called is not None and (not type(called).__module__.startswith("torch.nn.") or any(called.children()))
    if op == "squeeze" or is_open:
        for written in (node, *mutated(node)):
            written.meta[LOOSE_RANK] = True
    elif op not in _FIXED_RANK and any(given.meta.get(LOOSE_RANK) for given in node.all_input_nodes):
        node.meta[LOOSE_RANK] = True


def is_static(node: fx.Node) -> bool:
    """Whether a value follows from dtypes, devices and ranks alone."""
    if node.op == "call_function" and node.target is getattr and node.args[1] in _STATIC:
        return node.args[1] != "ndim" or not node.all_input_nodes[0].meta.get(LOOSE_RANK)
    if node.op == "call_method" and node.target in ("dim", "is_floating_point", "is_complex"):
        return node.target != "dim" or not node.all_input_nodes[0].meta.get(LOOSE_RANK)
    given = node.all_input_nodes
    return bool(given) and all(value.meta.get("static", False) for value in given)
