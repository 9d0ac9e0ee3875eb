"""The fp32 run beside a mixed one: which of its graphs and nodes stand for which."""

import operator

from torch import fx

from fxamp import ir
from fxamp.numerics.flow import CallFlow, Flow


def twins(exact: CallFlow, mixed: CallFlow) -> list[tuple[Flow, Flow]]:
    """(fp32's, mixed) for each graph that ran in both, at the same turn of the call."""
    others = {flow.part.identity: flow for flow in exact.parts}
    return [(others[flow.part.identity], flow) for flow in mixed.parts if flow.part.identity in others]


def root_of(node: fx.Node) -> fx.Node:
    """The model's own value behind a cast, a pad or a packed weight: fp32's graph has a node of its name."""
    while ir.mark(node).role and node.all_input_nodes:
        node = given_to(node)
    return node


def given_to(cast: fx.Node) -> fx.Node:
    """What a cast, a pad or a clamp was given; of a packed cast's results, the weight that it was."""
    given = cast.all_input_nodes[0]
    return given.all_input_nodes[position(cast)] if takes_part(cast) else given


def reads_of(node: fx.Node) -> list[fx.Node]:
    """What a node reads; of a packed cast's results each its own weight."""
    return [given_to(node)] if takes_part(node) else list(node.all_input_nodes)


def takes_part(node: fx.Node) -> bool:
    """Whether it takes one weight out of a packed cast."""
    return bool(ir.mark(node).role) and node.target is operator.getitem and isinstance(node.args[1], int)


def position(part: fx.Node) -> int:
    """Which of the packed cast's weights it takes."""
    return int(str(part.args[1]))
