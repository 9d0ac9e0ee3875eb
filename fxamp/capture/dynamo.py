"""Graphs that Dynamo captured, in the form the passes read.

Dynamo hands parameters and buffers over as inputs, keeps autocast regions as nodes, and has run every node on fake
tensors already. `adopt` marks the weights among the inputs, turns autocast regions into marks on the nodes inside,
and keeps the values.
"""

import contextlib
import re
from typing import Any

import torch
from torch import fx, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from fxamp import ir
from fxamp.capture.captured import Captured
from fxamp.capture.checkpoints import open_checkpoints
from fxamp.capture.inference_regions import as_no_grad
from fxamp.capture.inputs import flatten_call
from fxamp.capture.locations import user_lines_in
from fxamp.capture.memory import note_memory
from fxamp.capture.recurrent import name_first_states
from fxamp.capture.source_names import converts_relatively, is_dtype_of_a_value, names_of_dtypes
from fxamp.errors import CaptureError
from fxamp.fakes import Fakes
from fxamp.inplace import run_and_note_writes
from fxamp.opnames import canonical_name, is_qualified

_STORED_AS = re.compile(r"\b_(parameters|buffers)(?:'\])?\['")
_STORES = re.compile(r"(?:\._|\.__dict__\['_)(?:modules|parameters|buffers)(?:'\])?(?=\[)")
_MODEL = re.compile(r"^L\['\w+'\](?:\[\d+\])?")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)[^\n]*\n([^\n]*)')
_TO = re.compile(r"\.(?:to|type)\(([^()]*)\)")
_TRITON = "triton_kernel_wrapper_mutation"
_FUNCTION = "autograd_function_apply"
_OPS = torch._ops.OpOverload, torch._ops.OpOverloadPacket
_ENTER, _EXIT = "_enter_autocast", "_exit_autocast"


def adopt(
    module: fx.GraphModule, example_inputs: list[Any], root: nn.Module, protected: frozenset[str] = frozenset()
) -> Captured:
    """A copy of one of Dynamo's graphs as a captured graph.

    Args:
        module: what Dynamo gives a backend; not changed.
        example_inputs: likewise: parameters, buffers and inputs in the order of the placeholders.
        root: resolves what the graph calls by path.
        protected: source lines whose nodes stand in a region without autocast.

    Raises:
        CaptureError: an autocast region that is entered and not left in the same graph.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    open_checkpoints(graph, module)
    wide: set[fx.Node] = set()
    for node in graph.nodes:
        node.type = None
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
        node.meta["source"] = _source_line(node)
        node.meta["nn_module_stack"] = _module_stack(node)
        if _is_relative_conversion(node) or _is_converted_back(node, wide):
            node.meta[ir.RELATIVE] = True
        elif _is_wide(node, wide):
            wide.add(node)
        if node.meta["source"] in protected:
            node.meta["autocast"] = "off"
    name_first_states(graph)
    _note_kernels(graph, module)
    inputs = graph.find_nodes(op="placeholder")
    note_memory(inputs, example_inputs)
    for node, value in zip(inputs, example_inputs, strict=True):
        kind = _weight_kind(node, value)
        if kind:
            node.meta[ir.WEIGHT] = kind
            node.meta[ir.WEIGHT_PATH] = weight_path(node)
    _mark_autocast_regions(graph)
    as_no_grad(graph)
    _mark_transforms(graph)
    return Captured(
        root=root,
        graph=graph,
        spec=flatten_call((), {})[0],
        example=list(example_inputs),
        method="dynamo",
    )


def _weight_kind(node: fx.Node, value: Any) -> str | None:
    """ "parameter" or "buffer" for an input that is the model's own tensor."""
    if isinstance(value, nn.Parameter):
        return "parameter"
    owner = _STORED_AS.search(source_of(node))
    return None if owner is None else {"parameters": "parameter", "buffers": "buffer"}[owner[1]]


def source_of(node: fx.Node) -> str:
    """How Dynamo names where an input comes from: "L['self']._modules['fc']._parameters['weight']"."""
    name: Any = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
    return str(name() if callable(name) else name)  # a method in torch 2.11, a property in 2.13


def weight_path(node: fx.Node) -> str:
    """Dotted path of a weight input: "fc.weight"."""
    return ".".join(re.findall(r"\['([^']+)'\]", _STORES.sub("", _MODEL.sub("", source_of(node)))))


def _is_relative_conversion(node: fx.Node) -> bool:
    """Whether a `.to(torch.float32)` of the graph was written `.to(x.dtype)`, or `.type(x.dtype)`: Dynamo resolves it.

    The user's line is asked: it tells where it names the dtype of another value and not a dtype of its own.
    """
    if node.op != "call_method" or node.target not in ("to", "type"):
        return False
    given = [
        (argument.strip(), file, int(line))
        for file, line, code in _FRAME.findall(node.meta.get("stack_trace") or "")
        for argument in _TO.findall(code)
    ]
    return bool(given) and all(is_dtype_of_a_value(text, names_of_dtypes(*place)) for text, *place in given)


def _is_converted_back(node: fx.Node, wide: set[fx.Node]) -> bool:
    """Whether it converts to float32 what is float32 by the user's word already, where the source names a dtype read.

    Of two conversions in one line, `f(x.to(torch.float32)).to(x.dtype)`, that is the second.
    """
    if node.op != "call_method" or node.target != "to" or node.args[0] not in wide:
        return False
    file, _, line = node.meta["source"].rpartition(":")
    return bool(file) and converts_relatively(file, int(line))


def _is_wide(node: fx.Node, wide: set[fx.Node]) -> bool:
    """Whether the user converted to float32 here, or before in all that it is computed of."""
    asked = (*node.args, *node.kwargs.values())
    if (node.op == "call_method" and node.target == "float") or torch.float32 in asked:
        return True
    floats = [given for given in node.all_input_nodes if given.op != "placeholder" and _is_floating(given)]
    return bool(floats) and wide.issuperset(floats)


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _source_line(node: fx.Node) -> str:
    lines = user_lines_in(node.meta.get("stack_trace") or "")
    return lines[-1] if lines else ""


def _module_stack(node: fx.Node) -> dict[str, tuple[str, type]]:
    """Dynamo's module stack with plain paths: "L['self'].layers[0].fc" -> "layers.0.fc".

    The model is "L['args'][0]" where its forward is wrapped; the parts of one with a `__getattr__` of its own are
    "L['self'].__dict__['_modules']['layers']".
    """
    stack = {}
    for key, entry in (node.meta.get("nn_module_stack") or {}).items():
        path = _STORES.sub("", _MODEL.sub("", str(entry[0])))
        stack[key] = (re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path).strip("."), entry[1])
    return stack


def _mark_autocast_regions(graph: fx.Graph) -> None:
    """Nodes inside `torch.autocast(enabled=False)` are marked; the region's own nodes go.

    Without an enabled region what stood in it has other dtypes than Dynamo saw, and so has what follows from it.
    """
    open_regions: list[tuple[fx.Node, bool]] = []
    changed: set[fx.Node] = set()
    for node in list(graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name == _ENTER:
            open_regions.append((node, node.args[2] is not False))
        elif name == _EXIT:
            entered = node.args[0]
            if not open_regions or open_regions[-1][0] is not entered:
                raise CaptureError("an autocast region is left in another graph than it was entered in (a graph break)")
            graph.erase_node(node)
            graph.erase_node(open_regions.pop()[0])
        elif open_regions and not open_regions[-1][1]:
            node.meta["autocast"] = "off"
        if (open_regions and open_regions[-1][1]) or not changed.isdisjoint(node.all_input_nodes):
            changed.add(node)
            for key in ("val", "example_value"):
                node.meta.pop(key, None)
    if open_regions:
        raise CaptureError("an autocast region is entered and not left in the same graph (a graph break inside it)")


def _mark_transforms(graph: fx.Graph) -> None:
    """Mark the nodes inside torch.func transforms (grad, vmap) with a number: values there have levels of their own.

    A cast would have to stand on the right side of every change of level, and such values are not to be looked at
    from outside. What a transform gives is a tensor as any other.
    """
    depth = number = 0
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name.endswith("_increment_nesting"):
            depth, number = depth + 1, number + (depth == 0)
        if name.endswith("_nesting"):
            fx.node.has_side_effect(node.target)  # torch itself notes it of some of them
        if depth:
            node.meta[ir.TRANSFORMED] = number
            value = node.meta.get("val")
            if not isinstance(value, torch._subclasses.FakeTensor) or is_functorch_wrapped_tensor(value):
                node.meta["val"] = None
        depth -= name.endswith("_decrement_nesting")


def _note_kernels(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Let what Dynamo makes of an `autograd.Function` around one op of a library have that op's name."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.__name__ == _FUNCTION:
            body: Any = module.get_submodule(str(node.args[0].target))
            ops = [each for each in body.graph.nodes if isinstance(each.target, _OPS)]
            libraries = [each for each in ops if is_qualified(canonical_name(each.target))]
            if len(libraries) == 1:
                node.meta[ir.KERNEL] = ir.Kernel(
                    canonical_name(libraries[0].target), _arrivals(body.graph, libraries[0])
                )


def _arrivals(body: fx.Graph, op: fx.Node) -> dict[int, frozenset[tuple[int, str]]]:
    """By argument of the function, which begin behind its two bodies: the arguments of the op that it comes to."""
    found = {}
    for number, given in enumerate(body.find_nodes(op="placeholder")):
        reached = {given}
        for node in body.nodes:
            if not reached.isdisjoint(node.all_input_nodes):
                reached.add(node)
        arrived = {(each.position, each.keyword) for each in ir.arguments(op) if each.value in reached}
        found[2 + number] = frozenset(arrived)
    return found


def note_writes(graph: fx.Graph, fakes: Fakes) -> None:
    """Mark what functions write that are not torch's: numpy's, those of `torch.compiler.allow_in_graph`, and kernels.

    They are run once more, on tensors that lie where Dynamo's do and have versions of their own. What does not tell so,
    a kernel of Triton's or what cannot be run, may write all that it is given.
    """
    for node in graph.nodes:
        if node.op == "call_function" and _is_foreign(node.target):
            held = {given: given.meta.get("val") for given in node.all_input_nodes}
            values = {given: value.data if isinstance(value, torch.Tensor) else value for given, value in held.items()}
            node.meta[ir.WRITES] = tuple(range(len(values)))
            if getattr(node.target, "__name__", "") != _TRITON:
                with contextlib.suppress(Exception):
                    run_and_note_writes(node, values, fakes.run)


def _is_foreign(target: Any) -> bool:
    """Whether neither a function's name nor a schema tells what it writes. Other higher-order ops write nothing."""
    if isinstance(target, torch._ops.HigherOrderOperator):
        return bool(target.__name__ == _TRITON)
    return is_qualified(canonical_name(target)) and not isinstance(target, torch._ops.OpOverload)


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake tensor mode Dynamo ran the graph in, None where the graph holds no tensor."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch._subclasses.FakeTensor):
            return value.fake_mode
    return None


def is_dynamic(graph: fx.Graph) -> bool:
    """Whether any size in the graph is symbolic."""
    return any(
        isinstance(value, torch.SymInt)
        or (isinstance(value, torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in value.shape))
        for value in (node.meta.get("val") for node in graph.nodes)
    )
