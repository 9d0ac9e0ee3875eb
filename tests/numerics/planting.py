"""Faults planted behind single nodes of real models, forward and backward, and who is named for them.

python -m tests.numerics.planting                      # every node of every model, every kind of fault: minutes
python -m tests.numerics.planting bert gpt2 --every 5
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import fxamp
from fxamp import ir
from fxamp.counting.zoo import MODELS
from fxamp.inplace import mutated
from fxamp.numerics.flow import CallFlow
from fxamp.numerics.losses import floats_in
from fxamp.numerics.origin import origin_of, vanished_origin
from fxamp.numerics.run import Call, call_of, in_float32
from fxamp.numerics.underflow import LOST, share_lost, underflows
from fxamp.numerics.watcher import watch_flow

NAN, INF = float("nan"), float("inf")
PLAIN = fx.Interpreter.run_node


class Deciding(nn.Module):
    """Four graphs of Dynamo's: forward decides on data, and a submodule breaks its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.inner(x))
        if y.sum() > 1e9:
            y = y * 2
        y = self.norm(self.first(y) + x)
        torch._dynamo.graph_break()
        return self.head(torch.softmax(self.second(y), -1) * y)


def counted(name: str) -> Callable[[], tuple[nn.Module, Any, Any]]:
    def make() -> tuple[nn.Module, Any, Any]:
        step = MODELS[name](True)
        return step.model, step.inputs, step.loss_of

    return make


def hand_written(name: str) -> Callable[[], tuple[nn.Module, Any, Any]]:
    def make() -> tuple[nn.Module, Any, Any]:
        module = importlib.import_module(f"tests.zoo.{name}")
        return module.make(), module.inputs(), squares

    return make


def hugging_face(name: str) -> Callable[[], tuple[nn.Module, Any, Any]]:
    def make() -> tuple[nn.Module, Any, Any]:
        from tests.zoo import hugging_face as zoo

        return zoo.make(name), zoo.call(name), lambda output: output.loss

    return make


def squares(output: Any) -> torch.Tensor:
    return torch.stack([part.float().square().mean() for part in floats_in(output)]).sum()


def deciding() -> tuple[nn.Module, Any, Any]:
    return Deciding(), (torch.linspace(-1, 1, 32).reshape(4, 8),), squares


# name -> (what makes model, inputs and loss; the capture)
SUBJECTS: dict[str, tuple[Callable[[], tuple[nn.Module, Any, Any]], str]] = {
    **{name: (counted(name), "symbolic") for name in MODELS},
    **{name: (hand_written(name), "auto") for name in ("resnet50", "gnmt", "transformer", "bert")},
    **{f"hf:{name}": (hugging_face(name), "auto") for name in ("gpt2", "llama", "t5", "bart", "mpnet")},
    "transformer, dynamo": (hand_written("transformer"), "dynamo"),
    "hf:gpt2, dynamo": (hugging_face("gpt2"), "dynamo"),
    "deciding, dynamo": (deciding, "dynamo"),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault: what it does to a value, and where it shows."""

    kind: str
    phase: str
    number: float


FAULTS = tuple(
    Fault(kind, phase, number)
    for phase in ("forward", "backward")
    for kind, number in (("NaN", NAN), ("overflow", INF), ("underflow", 0.0))
)
SCALES = [2.0**exponent for exponent in range(0, 25, 2)]
"""Loss scales that are tried until no gradient is lost without a fault."""


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx, value, number):
        ctx.number = number
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return faulty(gradient, ctx.number), None


def faulty(value: torch.Tensor, number: float) -> torch.Tensor:
    """All of it is zero, as after an underflow; or its first finite element is NaN or inf."""
    if number == 0.0:
        return torch.zeros_like(value)
    place = int(torch.isfinite(value).reshape(-1).int().argmax())
    there = (torch.arange(value.numel()) == place).view(value.shape)
    return torch.where(there, torch.tensor(number, dtype=value.dtype), value)


def plant(fault: Fault, is_written: bool) -> Callable[[Any], Any]:
    """Changes the first floating tensor of a value; in place where in-place ops use it."""

    def changed(value: torch.Tensor) -> torch.Tensor:
        if fault.phase == "backward":
            return _Backward.apply(value, fault.number)
        if is_written:
            value.data.copy_(faulty(value.data, fault.number))
            return value
        return faulty(value, fault.number)

    def first_of(value: Any) -> Any:
        done: list[bool] = []

        def one(part: Any) -> Any:
            if done or not isinstance(part, torch.Tensor) or not part.is_floating_point() or not part.numel():
                return part
            if fault.phase == "backward" and not part.requires_grad:
                return part
            done.append(True)
            return changed(part)

        return pytree.tree_map(one, value)

    return first_of


@contextlib.contextmanager
def planted(node: fx.Node, change: Callable[[Any], Any]) -> Iterator[None]:
    """Every value of the node is changed while it stands."""

    def run_node(self: fx.Interpreter, n: fx.Node) -> Any:
        value = PLAIN(self, n)
        return change(value) if n is node else value

    fx.Interpreter.run_node = run_node  # type: ignore[method-assign]
    try:
        yield
    finally:
        fx.Interpreter.run_node = PLAIN  # type: ignore[method-assign]


@dataclasses.dataclass
class Subject:
    """A prepared model: its call, the nodes that faults are planted behind, and those that in-place ops write."""

    name: str
    call: Call
    loss_of: Any
    nodes: list[fx.Node]
    written: set[fx.Node]
    exact: CallFlow
    clean: CallFlow


def subject(name: str) -> Subject:
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, capture = SUBJECTS[name]
    model, inputs, loss_of = make()
    converted = fxamp.convert(model, torch.float16, inputs, capture=capture)
    call = call_of(converted, inputs)
    exact = watch_flow(call, loss_of, in_float32(call), as_float32=True, counting=True)
    for scale in SCALES:
        scaled = lambda output, by=scale: loss_of(output) * by  # noqa: E731
        clean = watch_flow(call, scaled, counting=True)
        if clean.is_finite and not underflows(exact, clean):
            break
    assert clean.is_finite and origin_of(clean, exact) is None, f"{name}: {origin_of(clean, exact)}"
    assert not underflows(exact, clean), f"{name}: {underflows(exact, clean)}"
    graphs = list(dict.fromkeys(part.part.variant.graph for part in clean.parts))
    every = [node for graph in graphs for node in graph.nodes if node.op.startswith("call")]
    written = {given for node in every for given in mutated(node)} | {node for node in every if mutated(node)}
    floats = {node for part in clean.parts for node in part.part.variant.graph.nodes if node.name in part.values}
    return Subject(name, call, scaled, [node for node in every if node in floats], written, exact, clean)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one fault; `found` is (node, phase), None where nothing was named."""

    node: str
    op: str
    fault: Fault
    found: tuple[str, str] | None

    @property
    def is_exact(self) -> bool:
        return self.found == (self.node, self.fault.phase)

    def __str__(self) -> str:
        return f"{self.fault.kind} {self.fault.phase} in {self.node} ({self.op}): {self.found or 'nothing'} is named"


def judged(about: Subject, node: fx.Node, fault: Fault) -> Verdict | None:
    """The verdict on one fault; None where it is none: nothing goes through there, or an in-place op writes there."""
    if (fault.phase == "backward" and node in about.written) or not can_be_felt(about, node, fault):
        return None
    with planted(node, plant(fault, node in about.written)):
        flow = watch_flow(about.call, about.loss_of, counting=True)
    op = ir.mark(node).role or ir.mark(node).op
    if fault.kind == "underflow":
        if fault.phase == "backward" and not is_an_underflow(about, node, flow):
            return None
        lost = [found for found in underflows(about.exact, flow) if found.phase == fault.phase]
        return Verdict(node.name, op, fault, (lost[0].name, lost[0].phase) if lost else None)
    if fault.phase == "backward" and all(part.has_finite_gradients for part in flow.parts):
        return None  # relu's backward takes a gradient where its input is negative for zero, whatever it is
    origin = origin_of(flow, about.exact) or vanished_origin(flow, about.exact)
    return Verdict(node.name, op, fault, None if origin is None else (origin.node, origin.phase))


def is_an_underflow(about: Subject, node: fx.Node, flow: CallFlow) -> bool:
    """Whether more than a tenth of any gradient that the node passes back is lost, which is what an underflow is.

    Faults are planted in the first tensor of a value. Of an `unbind` that is a part of what the node passes back, and
    may be a small one: of the last layer's queries only the class token's has a gradient, 32 of 352 elements (9 %).
    The first node behind it that loses a tenth is then the right answer, as it would be for a real loss of that size.
    """
    pairs = zip(about.clean.parts, flow.parts, strict=True)
    return any(
        share_lost(count, now.edge_counts.get(edge, 0)) > LOST
        for was, now in pairs
        if was.variant.graph is node.graph
        for edge, count in was.edge_counts.items()
        if edge[1] == node.name
    )


def can_be_felt(about: Subject, node: fx.Node, fault: Fault) -> bool:
    """Whether there is something to lose: a finite number, one that is not zero, a gradient that is passed on."""
    flows = [flow for flow in about.clean.parts if flow.variant.graph is node.graph]
    if fault.phase == "backward":
        passed = [count for flow in flows for edge, count in flow.edge_counts.items() if edge[1] == node.name]
        return any(passed) if fault.kind == "underflow" else bool(passed)
    if fault.kind == "underflow":
        return any(flow.counts[node.name][0] for flow in flows)
    return any(flow.values[node.name].low is not None for flow in flows)


def verdicts(about: Subject, faults: tuple[Fault, ...] = FAULTS, every: int = 1, offset: int = 0) -> list[Verdict]:
    """The verdicts on each fault behind every so-manieth node."""
    found = (judged(about, node, fault) for node in about.nodes[offset % every :: every] for fault in faults)
    return [verdict for verdict in found if verdict is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*SUBJECTS, []], help="default: all")
    parser.add_argument("--every", type=int, default=1, help="plant behind each so-manieth node only")
    chosen = parser.parse_args()
    wrong = 0
    for name in chosen.names or SUBJECTS:
        start = time.perf_counter()
        about = subject(name)
        found = verdicts(about, every=chosen.every)
        bad = [verdict for verdict in found if not verdict.is_exact]
        wrong += len(bad)
        kinds = collections.Counter(f"{verdict.fault.kind} {verdict.fault.phase}" for verdict in found)
        seconds = time.perf_counter() - start
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        named = f"{len(found) - len(bad)} of {len(found)} faults named exactly"
        print(f"{name}: {len(about.nodes)} nodes; {named} ({counts}); {seconds:.0f} s", flush=True)
        for verdict in bad:
            print(f"  {verdict}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
