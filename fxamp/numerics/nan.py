"""A node whose output or gradient is the first that is not finite, and what would mend it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES
from fxamp.numerics.blocks import block_of
from fxamp.numerics.exact import exact_weight, has_master
from fxamp.numerics.extent import extent_of
from fxamp.numerics.flow import CallFlow, Made
from fxamp.numerics.mending import mending, node_of
from fxamp.numerics.origin import (
    Origin,
    value_of_gradient,
)
from fxamp.numerics.reach import reach_of
from fxamp.numerics.run import Call
from fxamp.numerics.twin import reads_of
from fxamp.paths import attribute_at
from fxamp.tree import every_buffer

Loss = Callable[[Any], torch.Tensor]
AROUND = "as written"
"""Colour of what stands in no graph."""
FROM_OUTSIDE = ("input", "parameter", "between graphs")
"""Phases of what came in not finite."""


@dataclasses.dataclass(frozen=True)
class BadNode:
    """Where a run stopped being finite.

    Attributes:
        phase: "forward", "backward", "sum of gradients", or "input", "parameter", "between graphs" or "loss" where it
            came in from outside; "output" where the model gives it, and no op was seen to make it of finite numbers.
        graph: number of the node's graph in `fxamp.report(model)`.
        value: of the first bad value or gradient, in words.
        inputs: of everything the node read, in words.
        overrides: the deny entries with which the run is finite, behind those that the model has already; empty where
            none was found.
        is_bad_in_float32: whether in fp32 what reaches the outputs, or of a bad gradient the parameters, is not finite
            either: then it is not a matter of precision.
        error: what then stopped the run, "" where nothing did.
        is_float16: whether the first bad value is float16.
        is_buffer: of phase "parameter": whether it is a buffer.
        has_infinite_inputs: whether the call was given infinities other than those of a mask.
        block: path of the module, converted by itself, that the node calls: what overflows is in there.
        master: of a parameter that is stored low (O2), its float32 value in words where that is finite; else "".
        call, steps: of `watch_nan`: the number of the call in the block, from 1 on, and how many optimizer steps were
            made in the block before it; 0 of `find_nan`. Two findings are equal whenever they were made.
        after: of phase "between graphs": the line of the last op of the graph before; `source` is that of what made it,
            or, where that is not known, the first line that reads it.
        is_of_gradient: whether the backward of that line made it.
        unknown: why it was not tried whether float32 is finite and `overrides` mend it; "" where it was.
    """

    name: str
    op: str
    phase: str
    value: str
    inputs: tuple[str, ...]
    source: str
    module: str
    colour: str
    precision: str
    overrides: dict[str, str]
    is_bad_in_float32: bool
    graph: int = 0
    error: str = ""
    unknown: str = ""
    after: str = ""
    is_of_gradient: bool = False
    has_infinite_inputs: bool = False
    block: str = ""
    master: str = ""
    is_buffer: bool = False
    is_float16: bool = False
    call: int = dataclasses.field(default=0, compare=False)
    steps: int = dataclasses.field(default=0, compare=False)

    def __str__(self) -> str:
        where = "what it holds" if self._is_held else _WHERE.get(self.phase, self.phase)
        if self.colour == AROUND:
            where = _WHERE["backward" if self.is_of_gradient else "forward"]
        name = f"{self.name} of graph {self.graph}" if self.graph > 0 else self.name
        lines = [
            f"{name} (`{self.op}`, {self.colour}, {self.precision}): {where} is the first that is not finite",
            f"  {self.value}",
            *([f"  in call {self.call} of the block, {_after(self.steps)}"] if self.call else []),
            *([f"  {self._place}"] if self._place else []),
            *(f"  it reads {text}" for text in self.inputs),
            *([f"  then the run stops: {self.error}"] if self.error else []),
            f"  {self.remedy}",
        ]
        return "\n".join(lines)

    @property
    def _place(self) -> str:
        at, module = self.source and f"at {self.source}", self.module and f"in module {self.module}"
        return ", ".join(filter(None, (at, module)))

    @property
    def _is_held(self) -> bool:
        """Whether it is a weight or buffer of a module that is one node."""
        return self.phase == "parameter" and self.op not in ("parameter", "buffer")

    @property
    def remedy(self) -> str:
        """What to do, in a sentence."""
        inside = f"; fxamp.find_nan(model.get_submodule({self.block!r}), what it is given) names the op in it"
        return self._outer_remedy + (inside if self.block else "")

    @property
    def _outer_remedy(self) -> str:
        if self.phase == "input":
            return "the input itself is not finite: look at the data"
        if self.phase == "between graphs":
            return self._code_remedy
        if self.phase == "output" and self.is_bad_in_float32:
            return (
                "it is written in the code or came in with an input, or is made by code outside of the graphs, and "
                "float32 gives it too: it is no matter of precision"
            )
        if self.phase == "parameter":
            if self.master:
                return f"its float32 value is finite ({self.master}), and is stored low: {self._deny_remedy}"
            held = self.value.partition(":")[0] if self._is_held else f"the {self.op}"
            writer = (
                "forward wrote it, or the model's own code" if self.is_buffer else "step wrote it, see fxamp.LossScaler"
            )
            return f"{held} itself is not finite: an earlier {writer}"
        return self._deny_remedy

    @property
    def _code_remedy(self) -> str:
        """Of what code makes that stands in no graph."""
        if self.colour == AROUND:
            if self.is_bad_in_float32:
                return "no graph holds this line, which runs as it is written; float32 makes it too: look there"
            return "no graph holds this line, and float32 is finite: compute it in float32, with autocast off"
        place = f", after {self.after}" if self.after else ""
        return f"it was made by code between two graphs{place}, which runs as it is written: look there"

    @property
    def _deny_remedy(self) -> str:
        if self.unknown:
            kept = "it is converted by itself" if self.block else "it runs in float32"
            likely = f"convert(..., overrides={self.overrides}) may mend it" if self.overrides else kept
            return f"{likely}; another run was not tried: {self.unknown}"
        if self.op == "output" and self.phase != "output" and not self.overrides:
            too = ", and does so in float32: it is no matter of precision" if self.is_bad_in_float32 else ""
            scale = "; where it is too large for float16, use a smaller loss scale" if self.is_float16 else ""
            if self.call and self.module:
                gives, who = self.module, "code of the model's behind it, or the loss,"
            else:
                gives, who = "the model", "the loss, or what else is computed of it outside,"
            return f"what {gives} gives is finite; {who} makes it{too or scale}"
        if self.is_bad_in_float32:
            where = "the infinities among the call's inputs" if self.has_infinite_inputs else "the line"
            return f"the float32 run is not finite here either: it is not a matter of precision, look at {where}"
        if self.overrides:
            is_part = self.call and self.phase not in ("backward", "sum of gradients")
            what = "this forward" if is_part else "the run"  # watch_nan has no loss to try a backward with, before it
            return f"convert(..., overrides={self.overrides}) makes {what} finite"
        if self.phase not in ("forward", "parameter", "output"):
            return "no deny near it mends it: use a smaller loss scale (fxamp.LossScaler finds one), or bfloat16"
        return "no deny mends it: try dtype=torch.bfloat16, whose range is float32's"


def _after(steps: int) -> str:
    return f"after {steps} optimizer step{'s' * (steps > 1)}" if steps else "before any optimizer step"


_WHERE = {
    "forward": "its output",
    "backward": "the gradient it passes back",
    "between graphs": "what code between the graphs gives it",
    "loss": "the loss of it",
    "output": "it",
}
"""What is not finite, in words."""


def describe(call: Call, flow: CallFlow, origin: Origin, loss_fn: Loss | None, exact: CallFlow) -> BadNode:
    """All about an origin, with the deny that mends it; runs the call a few times more.

    Args:
        exact: the same call in fp32.
    """
    from_outside = origin.phase in FROM_OUTSIDE and not _master_in_words(call, origin)
    is_bad = _is_bad_too(origin, exact)
    mended = () if from_outside or is_bad else mending(call, flow, origin, loss_fn)
    return bad_node(call, origin, mended, is_bad, flow)


def _is_bad_too(origin: Origin, exact: CallFlow) -> bool:
    """Whether fp32 fares no better: outputs or gradients that arrive are not finite; for a gradient, this one's.

    An infinity that fp32 has elsewhere, or here and takes back, says nothing of this one.
    """
    led = reach_of(exact)
    flow = next((flow for flow in exact.parts if flow.part.number == origin.flow.part.number), None)
    value = value_of_gradient(origin)
    if value is None or flow is None or value not in flow.values:
        is_around = origin.phase == "between graphs" and bool(origin.weight)
        return not exact.has_finite_ends or bool(led) or (is_around and _has_bad_gradients(exact))
    return value in led.of(flow)


def _master_in_words(call: Call, origin: Origin) -> str:
    """Of a bad parameter its float32 value, "" where it has none or that is bad too."""
    if origin.phase != "parameter" or node_of(origin).op != "get_attr":
        return ""
    weight = attribute_at(origin.flow.part.model(call.weights), str(node_of(origin).target))
    master = extent_of(exact_weight(weight)) if has_master(weight) else None
    return str(master) if master is not None and master.is_finite else ""


def _is_of_buffer(call: Call, origin: Origin) -> bool:
    """Whether it is a buffer that was not finite before the call: one of the graph's, or one that its node holds."""
    if origin.phase != "parameter":
        return False
    path = origin.weight or str(node_of(origin).target)
    model = origin.flow.part.model(call.weights)
    return ir.mark(node_of(origin)).op == "buffer" or path in dict(every_buffer(model))


def _line_of(node: fx.Node) -> str:
    """The node's line; of a weight's cast and of what comes in, which have none, that of what reads it."""
    has_none = ir.mark(node).role or node.op == "placeholder"
    lines = map(ir.source_line, (node, *(node.users if has_none else ())))
    return next(filter(None, lines), "")


def _last_line_before(origin: Origin, flow: CallFlow) -> str:
    """The last line of the graph that ran before, "" where there is none."""
    if origin.phase != "between graphs" or origin.flow not in flow.parts[1:]:
        return ""
    nodes = reversed(flow.parts[flow.parts.index(origin.flow) - 1].variant.graph.nodes)
    return next(filter(None, map(ir.source_line, nodes)), "")


def bad_code(made: Made, flow: CallFlow, exact: CallFlow) -> BadNode:
    """What is known of an op that stands in no graph."""
    return BadNode(
        name=made.op,
        op=made.op,
        phase="between graphs",
        value=f"{'a gradient' if made.is_gradient else made.op}: {made.value}",
        inputs=tuple(map(str, made.reads)),
        is_of_gradient=made.is_gradient,
        source=made.source,
        module=made.module,
        colour=AROUND,
        precision="low" if made.value.dtype in LOW_DTYPES else "high",
        overrides={},
        is_bad_in_float32=not exact.has_finite_ends or _has_bad_gradients(exact),
        error=_first_line(flow.error),
        is_float16=made.value.dtype == torch.float16,
        has_infinite_inputs=any(extent.infs and not extent.is_mask for extent in flow.inputs),
    )


def _has_bad_gradients(exact: CallFlow) -> bool:
    """Whether float32 gives such too: those of parameters that are stored in float16 may be finite before they are."""
    found = exact.gradients.values()
    return any(extent.nans or (extent.infs and extent.dtype != torch.float16) for extent in found)


def _first_line(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]


def bad_node(call: Call, origin: Origin, denied: tuple[str, ...], is_bad_in_float32: bool, flow: CallFlow) -> BadNode:
    """What is known of an origin without another run."""
    node, reads = node_of(origin), origin.flow.reads
    mark = ir.mark(node)
    read = [given.name for given in reads_of(node)]
    words = f"{origin.edge[0]}'s gradient" if origin.edge else "loss" if origin.phase == "loss" else node.name
    words = origin.weight or words
    return BadNode(
        name=node.name,
        op=mark.op,
        phase=origin.phase,
        value=f"{words}: {origin.extent}",
        inputs=tuple(f"{name}: {extent}" for name in read if (extent := reads.get((name, node.name)))),
        source=_line_of(node),
        module=origin.flow.part.module_path(node),
        colour=mark.role or mark.colour,
        precision=mark.precision,
        overrides={**call.engine.options.overrides, **dict.fromkeys(denied, "deny")} if denied else {},
        is_bad_in_float32=is_bad_in_float32,
        graph=origin.flow.part.graph,
        error=_first_line(flow.error),
        after=_last_line_before(origin, flow),
        block=block_of(call, origin.flow.part, node),
        master=_master_in_words(call, origin),
        is_buffer=_is_of_buffer(call, origin),
        is_float16=origin.extent.dtype == torch.float16,
        has_infinite_inputs=any(extent.infs and not extent.is_mask for extent in flow.inputs),
    )
