"""The language of the pass tests.

    assert_rewrites(PIPELINE, before, after, x)           # two functions: what goes in, what comes out
    assert_untouched(PIPELINE, before, x)
    assert_colours("linear relu exp linear", "low low high low")
    assert_colours("a=linear b=exp(a) add(a,b)", "low high high")

A function of inputs, or of (module, inputs) where `module=` is given, stands for a graph; no graph is built node by
node. Graphs are compared as canonical text, and what they compute is compared exactly.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fxamp import ir
from fxamp.canonical import canonical_text
from fxamp.capture.captured import Captured
from fxamp.capture.inputs import flatten_call
from fxamp.capture.symbolic import capture_symbolic
from fxamp.fakes import Fakes
from fxamp.lists import OpLists
from fxamp.model.codegen import compile_graph
from fxamp.passes.base import Pass, run_passes
from fxamp.passes.cast import InsertCasts
from fxamp.passes.colour import ColourNodes
from fxamp.passes.literals import fit_in
from fxamp.passes.normalise import Normalise
from fxamp.passes.policy import Policy
from fxamp.passes.settle_writes import SettleWrites
from fxamp.passes.types import InferTypes
from fxamp.passes.verify import ALWAYS
from fxamp.paths import attribute_at
from fxamp.value_types import map_type

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a pass may ask for: one captured function and the policy of the test."""

    captured: Captured
    fakes: Fakes | None
    policy: Policy
    output_dtype: torch.dtype | None = FP32

    @property
    def graph(self) -> fx.Graph:
        return self.captured.graph

    def fit_of(self, node: fx.Node) -> str:
        constant = self.captured.constants.get(str(node.target))
        value = constant if constant is not None else attribute_at(self.captured.root, node.target)
        return fit_in(value, self.policy.low)


class ForgetShapes(Pass):
    """Types keep their dtypes alone, so that every activation cast costs the same."""

    def apply(self, graph: fx.Graph) -> bool:
        for node in graph.nodes:
            forget = lambda found: dataclasses.replace(found, shape=None)  # noqa: E731
            ir.set_mark(node, type=map_type(forget, ir.mark(node).type))
        return False


Step = Callable[[Setting], Pass]
INFER_TYPES: Step = lambda s: InferTypes(s.captured.root, s.fakes, s.captured.constants)  # noqa: E731
NORMALISE: Step = lambda s: Normalise()  # noqa: E731
SETTLE_WRITES: Step = lambda s: SettleWrites(s.policy, s.fit_of)  # noqa: E731
COLOUR: Step = lambda s: ColourNodes(s.policy, s.fit_of)  # noqa: E731
CAST: Step = lambda s: InsertCasts(s.policy, s.output_dtype)  # noqa: E731
DECIDE: tuple[Step, ...] = (INFER_TYPES, NORMALISE, SETTLE_WRITES, COLOUR)
FORGET_SHAPES: Step = lambda s: ForgetShapes()  # noqa: E731
DECIDE_IN_UNITS: tuple[Step, ...] = (INFER_TYPES, NORMALISE, FORGET_SHAPES, SETTLE_WRITES, COLOUR)
PIPELINE: tuple[Step, ...] = (*DECIDE, CAST)


def policy(low: torch.dtype = BF16, **options: Any) -> Policy:
    """The default policy, with changes: policy(level="strict", overrides={"exp": "allow"})."""
    options.setdefault("lists", OpLists.default())
    return Policy(low=low, **options)


# ------------------------------------------------------------------------------------------------- capture


class Root(nn.Module):
    """A function as a module; `module`, where there is one, is its first argument."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs) if self.module is None else self.function(self.module, *inputs)


def captured(
    function: Callable[..., Any],
    *inputs: Any,
    module: nn.Module | None = None,
    chosen: Policy | None = None,
    output_dtype: torch.dtype | None = FP32,
    preview: bool = False,
) -> Setting:
    """The function's graph; a `preview` is captured without the inputs' types."""
    root = Root(function, module)
    spec, values = flatten_call(inputs, {})
    if preview:
        spec = dataclasses.replace(spec, leaves=tuple(("tensor", (None, None)) for _ in spec.leaves))
    found = capture_symbolic(root, spec, None if preview else values, keep_whole=lambda name: True)
    for node in found.graph.nodes:
        if node.op == "call_module":
            node.meta["weights"] = any(True for _ in root.get_submodule(str(node.target)).parameters())
    fakes = None if preview else Fakes(root)
    return Setting(found, fakes, chosen or policy(), output_dtype)


def run_steps(steps: Sequence[Step], setting: Setting) -> bool:
    """Run the passes with invariants on; checks that each tells the truth about having changed the graph."""
    changed = False
    for step in steps:
        one, text = step(setting), str(setting.graph)
        said = run_passes(setting.graph, (one,), ALWAYS)
        assert said == (text != str(setting.graph)), f"{one.name} says changed={said}, wrongly"
        changed = changed or said
    return changed


def rewritten(function: Callable[..., Any], *inputs: Any, **options: Any) -> Setting:
    """The function's graph as the user's calls run it, decided and cast."""
    setting = captured(function, *inputs, **options)
    run_steps(PIPELINE, setting)
    return setting


def run_graph(setting: Setting, *inputs: Any) -> Any:
    """What the graph gives, and its inputs and buffers afterwards (both are fresh copies)."""
    compiled = compile_graph(setting.graph, setting.captured.root, setting.captured.constants)
    values = pytree.tree_map(_copy, inputs)
    state = {name: value.clone() for name, value in setting.captured.root.named_buffers()}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = compiled.run(setting.captured.root, *pytree.tree_leaves(values))
    after = {name: value.clone() for name, value in setting.captured.root.named_buffers()}
    for name, value in setting.captured.root.named_buffers():
        value.copy_(state[name])
    return result, values, after


def _copy(value: Any) -> Any:
    return value.clone().detach() if isinstance(value, torch.Tensor) else value


# ----------------------------------------------------------------------------------------------- rewriting


def assert_rewrites(
    steps: Sequence[Step], before: Callable[..., Any], after: Callable[..., Any], *inputs: Any, **options: Any
) -> None:
    """The passes turn `before` into `after`, say so, and both compute exactly the same."""
    steps = (steps,) if callable(steps) else steps
    ours, expected = captured(before, *inputs, **options), captured(after, *inputs, **options)
    changed = run_steps(steps, ours)
    found, wanted = canonical_text(ours.graph), canonical_text(expected.graph)
    assert found == wanted, f"\nfound:\n{found}\n\nwanted:\n{wanted}"
    assert changed, "nothing was rewritten: use assert_untouched"
    assert_same(run_graph(ours, *inputs), run_graph(expected, *inputs))


def assert_untouched(steps: Sequence[Step], before: Callable[..., Any], *inputs: Any, **options: Any) -> None:
    """The passes leave the graph as it is, and say so."""
    steps = (steps,) if callable(steps) else steps
    setting = captured(before, *inputs, **options)
    text = canonical_text(setting.graph)
    changed = run_steps(steps, setting)
    assert canonical_text(setting.graph) == text, f"\nwas:\n{text}\n\nis:\n{canonical_text(setting.graph)}"
    assert not changed


def assert_same(found: Any, expected: Any) -> None:
    """Equal structure, types, dtypes and bits (nan equals nan)."""
    ours, shape = pytree.tree_flatten(found)
    theirs, other_shape = pytree.tree_flatten(expected)
    assert shape == other_shape, f"{shape} is not {other_shape}"
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, f"leaf {number} is {one.dtype}, not {other.dtype}"
            same = torch.equal(torch.nan_to_num(one, nan=1234.5), torch.nan_to_num(other, nan=1234.5))
            assert same, f"leaf {number} differs:\n{one}\n{other}"
        else:
            assert one == other, f"leaf {number} is {one!r}, not {other!r}"


# ------------------------------------------------------------------------------------------------- colours


def decided(function: Callable[..., Any], *inputs: Any, **options: Any) -> Setting:
    """The function's graph with every node marked."""
    setting = captured(function, *inputs, **options)
    run_steps(DECIDE, setting)
    return setting


def node_of(setting: Setting, op: str, number: int = 0) -> fx.Node:
    """The node that runs a canonical op (the `number`-th of them)."""
    found = [node for node in setting.graph.nodes if ir.mark(node).op == op]
    assert number < len(found), f"no {op} among {[ir.mark(node).op for node in setting.graph.nodes]}"
    return found[number]


def assert_precision(setting: Setting, expected: dict[str, str]) -> None:
    """Precision, and optionally the kind of the reason: {"exp": "high list", "add": "low"}; "add 1" is the second."""
    for key, wanted in expected.items():
        op, _, number = key.partition(" ")
        mark = ir.mark(node_of(setting, op, int(number or 0)))
        precision, _, kind = wanted.partition(" ")
        assert mark.precision == precision, f"{key} is {mark.precision}, not {precision}: {mark.reason}"
        assert kind in ("", mark.reason.kind), f"{key}: {mark.reason} is not of kind {kind!r}"


OPS: dict[str, Callable[..., Any]] = {
    "relu": torch.relu,
    "view": lambda a: a.view(8, 8),
    "flatten": lambda a: a.transpose(0, 1),
    "exp": torch.exp,
    "log": torch.log,
    "sum": lambda a: a.sum(0, keepdim=True).expand(8, 8),
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda a: torch.softmax(a, -1),
    "norm": lambda a: torch.nn.functional.layer_norm(a, (8,)),
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "div": torch.div,
    "cat": lambda a, b: torch.cat((a, b))[:8],
    "matmul": torch.matmul,
    "double": lambda a: a + 2.0,
    "erf_": lambda a: a.erf_(),
    "add_": lambda a, b: a.add_(b),
    "relu_": lambda a: a.relu_(),
    "custom": lambda a: unlisted(a),
}


@fx.wrap
def unlisted(value: torch.Tensor) -> torch.Tensor:
    """A function on no list."""
    return value * 2


@dataclasses.dataclass(frozen=True)
class Statement:
    """One word of a program: `name=op(argument,...)`; without arguments it reads the word before it."""

    name: str
    op: str
    arguments: tuple[str, ...]


def parse(program: str) -> list[Statement]:
    """The statements of a program such as "linear b=exp add(0,b)"; a number names a word by its position."""
    statements: list[Statement] = []
    for number, word in enumerate(program.split()):
        match = re.fullmatch(r"(?:(\w+)=)?(\w+)(?:\(([\w,]*)\))?", word)
        assert match, f"{word!r} is not a statement"
        name, op, arguments = match.groups()
        last = statements[-1].name if statements else "x"
        given = tuple(arguments.split(",")) if arguments is not None else (last,)
        statements.append(Statement(name or str(number), op, given))
    return statements


class Program(nn.Module):
    """A program as a model: linear layers have weights of their own, `x` is the input, `p` a parameter."""

    def __init__(self, statements: list[Statement], outputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.statements = statements
        self.outputs = tuple(outputs) or (statements[-1].name,)
        self.p = nn.Parameter(torch.full((8, 8), 0.5), requires_grad=False)
        for number, statement in enumerate(statements):
            if statement.op == "linear":
                setattr(self, f"linear{number}", nn.Linear(8, 8, bias=False))

    def forward(self, x: torch.Tensor) -> Any:
        values: dict[str, Any] = {"x": x, "p": self.p}
        for number, statement in enumerate(self.statements):
            run = getattr(self, f"linear{number}", None) or OPS[statement.op]
            values[statement.name] = run(*(values[name] for name in statement.arguments))
        return tuple(values[name] for name in self.outputs)


def program_nodes(setting: Setting, statements: list[Statement]) -> list[fx.Node]:
    """The graph's node of each statement (the last one where an op is several)."""
    by_statement: list[fx.Node] = []
    nodes = [n for n in setting.graph.nodes if n.op.startswith("call") and ir.mark(n).role == ""]
    position = 0
    for statement in statements:
        width = {"sum": 2, "cat": 2}.get(statement.op, 1)
        by_statement.append(nodes[position])
        position += width
    return by_statement


def assert_colours(program: str, expected: str, outputs: str = "", **options: Any) -> None:
    """Each statement's precision: "low", "high", or "?" for what does not matter."""
    statements = parse(program)
    model = Program(statements, outputs.split())
    setting = decided(lambda m, x: m(x), torch.rand(8, 8), module=model, **options)
    marks = [ir.mark(node) for node in program_nodes(setting, statements)]
    wanted = expected.split()
    assert len(wanted) == len(marks), f"{len(marks)} statements, {len(wanted)} colours"
    rows = [
        f"{word:24} {mark.precision:5} (wanted {want}): {mark.reason.text}"
        for word, mark, want in zip(program.split(), marks, wanted, strict=True)
    ]
    assert all(want in ("?", mark.precision) for mark, want in zip(marks, wanted, strict=True)), "\n" + "\n".join(rows)


def count_casts(setting: Setting) -> int:
    """Activation casts in a graph whose casts are inserted."""
    return sum(ir.mark(node).role == "cast" for node in setting.graph.nodes)
