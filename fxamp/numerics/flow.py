"""What was seen of one call: the extents of every value and gradient of its graphs, forward and backward."""

import dataclasses

from fxamp.model.variant import Variant
from fxamp.numerics.extent import Extent
from fxamp.numerics.runner import Part

Edge = tuple[str, str]
"""(the value's node, the node that reads it)"""


@dataclasses.dataclass(eq=False)
class Flow:
    """One watched run of one graph.

    Attributes:
        part: the graph and its turn in the call.
        values: extents of every node's value when it was made; of a tuple, the first part that is not finite. What an
            op has written counts too: `o[:, 0] = value` returns nothing.
        reads: (value, reader) -> its extent when it was read: in-place ops may have written it since.
        edges: extents of the gradients that flowed over each edge, in the order of backward.
        sums: extents of the gradients of whole values, where several readers' gradients were added.
        writers: (value, reader) -> the in-place op that wrote the value last before it was read.
        earlier: in-place op -> the one that wrote the same memory before it.
        counts: of values that are counted, how many elements of each tensor are not zero; `edge_counts`: of the
            gradients over each edge, `sum_counts`: of whole values.
        held: of a module that the graph calls whole, and that gave what is not finite, the first of its own parameters
            and buffers that is not: (path in the model, extent).
        takes_masks: whether infinities among its inputs may be a mask's: they were there before.
    """

    part: Part
    values: dict[str, Extent] = dataclasses.field(default_factory=dict)
    edges: dict[Edge, Extent] = dataclasses.field(default_factory=dict)
    sums: dict[str, Extent] = dataclasses.field(default_factory=dict)
    reads: dict[Edge, Extent] = dataclasses.field(default_factory=dict)
    writers: dict[Edge, str] = dataclasses.field(default_factory=dict)
    earlier: dict[str, str] = dataclasses.field(default_factory=dict)
    held: dict[str, tuple[str, Extent]] = dataclasses.field(default_factory=dict)
    takes_masks: bool = True
    counts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    edge_counts: dict[Edge, int] = dataclasses.field(default_factory=dict)
    sum_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    exact: "Flow | None" = None

    @property
    def variant(self) -> Variant:
        """The graph."""
        return self.part.variant

    @property
    def has_finite_gradients(self) -> bool:
        """Whether every gradient that flowed is finite."""
        return all(extent.is_finite for extent in (*self.edges.values(), *self.sums.values()))


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """What is not finite of an op that stands in no graph.

    Attributes:
        op, source, module: what ran, the user's line, and the path of the module whose forward it stands in.
        value: what it gave, or the gradient that it passed back; `reads`: what it read.
        causes: who made what it read that is not finite, as far as that is known.
        is_new: whether what it read explains nothing of it, and the code does not mean it.
    """

    op: str
    source: str
    module: str
    value: Extent
    reads: tuple[Extent, ...]
    causes: tuple["Made", ...] = ()
    is_new: bool = True
    is_gradient: bool = False

    def begun_by(self) -> list["Made"]:
        """The new ones among those that it comes of, itself included; where there are none, the first ones."""
        seen, frontier = dict[int, Made](), [self]
        while frontier:
            made = frontier.pop()
            if id(made) not in seen:
                seen[id(made)] = made
                frontier += made.causes
        new = [made for made in seen.values() if made.is_new]
        return new or [made for made in seen.values() if not made.causes]

    def is_as(self, other: "Made") -> bool:
        """Whether another run, of another precision, was as bad there."""
        bad = (self.value.nans, self.value.infs) == (other.value.nans, other.value.infs)
        return bad and (self.op, self.source, self.module) == (other.op, other.source, other.module)


@dataclasses.dataclass(eq=False)
class CallFlow:
    """One watched call: the flows of its graphs in order, its outputs and its loss.

    Attributes:
        made: what code around graphs made, in order; `arrived`: of the inputs of graphs, (turn, node) -> who made it;
            `given`: of the outputs. `unmade`: the first that the backward of such code made.
        came: the gradients that came to the outputs.
        gradients: of parameters and inputs by name, where a backward has run.
        error: what stopped the run behind a value that is not finite, such as an index made of one.
    """

    parts: list[Flow] = dataclasses.field(default_factory=list)
    inputs: list[Extent] = dataclasses.field(default_factory=list)
    outputs: list[Extent] = dataclasses.field(default_factory=list)
    gradients: dict[str, Extent] = dataclasses.field(default_factory=dict)
    loss: Extent | None = None
    error: Exception | None = None
    made: list[Made] = dataclasses.field(default_factory=list)
    arrived: dict[tuple[int, str], Made] = dataclasses.field(default_factory=dict)
    given: list[Made] = dataclasses.field(default_factory=list)
    came: list[Extent] = dataclasses.field(default_factory=list)
    unmade: Made | None = None

    @property
    def has_finite_ends(self) -> bool:
        """Whether it ran to its end, and outputs and loss are finite."""
        ends = [*self.outputs, *([self.loss] if self.loss else [])]
        return self.error is None and all(extent.is_finite for extent in ends)

    @property
    def is_finite(self) -> bool:
        """Whether outputs, loss and every gradient on the way are finite."""
        arrived = all(extent.is_finite for extent in self.gradients.values())
        return self.has_finite_ends and arrived and all(flow.has_finite_gradients for flow in self.parts)

    @property
    def has_bad_values(self) -> bool:
        """Whether any value in any graph is not finite, or code around them has made one."""
        values = (extent for flow in self.parts for extent in flow.values.values())
        return any(made.is_new for made in self.made) or any(not extent.is_finite for extent in values)
