"""From a rewritten graph to a plain Python function over torch calls."""

import dataclasses
import functools
import itertools
import keyword
import linecache
import operator
import re
import secrets
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import PythonCode, inplace_methods

from fxamp import ir
from fxamp.capture.recompute import eager_call, fold_checkpoints
from fxamp.capture.replaced import is_ours
from fxamp.switches import set_switches, switches_found


@dataclasses.dataclass(frozen=True)
class CompiledForward:
    """A graph as a function.

    Attributes:
        run: (module, *inputs) -> outputs; parameters and modules are read by path from `module` at each call.
        source: its Python text.
    """

    run: Callable[..., Any]
    source: str


_numbers = itertools.count(1)


def compile_graph(
    graph: fx.Graph,
    root: nn.Module,
    constants: dict[str, torch.Tensor],
    build: Callable[[nn.Module, Any], Any] | None = None,
) -> CompiledForward:
    """Compile a graph.

    Parameters and buffers are read through the dictionaries of the module that owns them, not through
    `nn.Module.__getattr__`, so the call is cheap and a replaced or functionally swapped tensor is seen.

    Args:
        graph: not changed.
        root: tells what each path is (parameter, buffer, plain attribute, module).
        constants: tensors that belong to no module.
        build: makes (module, outputs) into what forward returns; None: they are that.
    """
    graph = fold_checkpoints(graph, eager_call(lambda inner: compile_graph(inner, root, constants).run))
    places = {
        node: _access(root, str(node.target), node.op, constants)
        for node in graph.nodes
        if node.op in ("get_attr", "call_module")
    }
    code = _python_code(graph, {node: f"{_PLACE}{number}" for number, node in enumerate(places)})
    found = list(places.values())
    lines = re.sub(rf"\bself\.{_PLACE}(\d+)\b", lambda match: found[int(match[1])], code.src).splitlines()
    switched = [found_and_put for target, found_and_put in _SWITCHED.items() if _calls(graph, target)]
    if switched:
        lines = _restoring(lines, switched)
    source = "\n".join(lines) + "\n"
    namespace = {**code.globals, **_RESTORERS, **{_constant(name): value for name, value in constants.items()}}
    name = f"<fxamp forward {next(_numbers)}>"
    exec(compile(source, name, "exec"), namespace)
    _show_in_tracebacks(name, source, namespace["forward"])
    return CompiledForward(_building(namespace["forward"], build), source)


_PLACE = f"_fxamp_{secrets.token_hex(8)}_"  # no text of the user's holds it


def _python_code(graph: fx.Graph, names: dict[fx.Node, str]) -> PythonCode:
    """The graph's code with other names for what it reads of the module: a path may hold anything, names may not.

    Where `n += 1` is said of a number, the code says `m = iadd(n, 1)`: torch.fx would write `n += 1; m = n`, and who
    reads n behind that gets the new number.

    A function of torch's is called as itself, and not by its name, where that stands for another one which calls it.
    """
    rebinding = {node: _called(node.target) for node in graph.nodes if _rebinds(node) or _is_replaced(node)}
    targets = {node: node.target for node in (*names, *rebinding)}
    try:
        for node, target in (*names.items(), *rebinding.items()):
            node.target = target
        return graph.python_code("self")
    finally:
        for node, target in targets.items():
            node.target = target


def _rebinds(node: fx.Node) -> bool:
    """Whether it is an in-place operator on what may be no tensor. An item that is assigned rebinds no name."""
    if node.op != "call_function" or getattr(node.target, "__module__", "") != "_operator":
        return False
    if node.target is operator.setitem or getattr(node.target, "__name__", "") not in inplace_methods:
        return False
    return not (isinstance(node.args[0], fx.Node) and ir.is_tensor(node.args[0]))


def _is_replaced(node: fx.Node) -> bool:
    """Whether the name by which torch.fx writes a function of torch's stands for another one."""
    if node.op != "call_function" or not isinstance(node.target, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    package, *names = fx.node._get_qualified_name(node.target).split(".")
    found: Any = torch if package == "torch" else None
    for name in names:
        found = getattr(found, name, None)
    return isinstance(found, types.FunctionType) and found is not node.target and not is_ours(found)


@functools.cache
def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which torch.fx writes as a call of this very object."""

    @functools.wraps(function, assigned=("__name__", "__doc__"))
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _building(forward: Callable[..., Any], build: Callable[[nn.Module, Any], Any] | None) -> Callable[..., Any]:
    if build is None:
        return forward
    return lambda module, *inputs: build(module, forward(module, *inputs))


def _access(root: nn.Module, path: str, op: str, constants: dict[str, torch.Tensor]) -> str:
    if path in constants:
        return _constant(path)
    *owners, name = path.split(".") if path else [""]
    if op == "call_module":
        return "self" + "".join(f"._modules[{part!r}]" for part in path.split("."))
    owner = root.get_submodule(".".join(owners))
    base = "self" + "".join(f"._modules[{part!r}]" for part in owners)
    for entries in ("_parameters", "_buffers"):
        if name in getattr(owner, entries):
            return f"{base}.{entries}[{name!r}]"
    name, *keys = [name] if name in owner.__dict__ else name.split("[")  # of a tensor in a container
    items = "".join(f"[{key}" for key in keys)
    is_plain = name.isidentifier() and not keyword.iskeyword(name)
    return f"{base}.{name}{items}" if is_plain else f"getattr({base}, {name!r}){items}"


def _constant(name: str) -> str:
    return f"_fxamp{name}"


_RESTORERS = {"_fxamp_found": switches_found, "_fxamp_set": set_switches}
# How a mode is asked, and how it is put back, for each call that switches one.
_SWITCHED = {
    torch._C._set_grad_enabled: ("torch.is_grad_enabled", "torch._C._set_grad_enabled"),
    set_switches: ("_fxamp_found", "_fxamp_set"),
}


def _calls(graph: fx.Graph, target: Any) -> bool:
    return any(node.target is target for node in graph.nodes)


def _restoring(lines: list[str], switched: list[tuple[str, str]]) -> list[str]:
    """An error inside a no_grad region, or where a switch is set, must not leave it so."""
    start = next(number for number, line in enumerate(lines) if line.startswith("def forward"))
    head, body = lines[: start + 1], lines[start + 1 :]
    return [
        *head,
        *(f"    _fxamp_mode_{number} = {found}()" for number, (found, _) in enumerate(switched)),
        "    try:",
        *("    " + line for line in body),
        "    except BaseException:",
        *(f"        {put}(_fxamp_mode_{number})" for number, (_, put) in enumerate(switched)),
        "        raise",
    ]


def _show_in_tracebacks(name: str, source: str, function: Callable[..., Any]) -> None:
    """Let tracebacks find the generated text while there is the function."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    weakref.finalize(function, linecache.cache.pop, name, None).atexit = False
