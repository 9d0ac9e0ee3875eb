"""What always holds in a graph: invariants that raise an InvariantError naming the node and what was found."""

import threading
from collections.abc import Callable

import torch
from torch import fx, nn

from fxamp import ir
from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import InvariantError
from fxamp.fakes import UNKNOWN, Fakes
from fxamp.inplace import mutated, reshaped
from fxamp.passes.alias import find_aliases, grad_regions
from fxamp.passes.base import Invariant
from fxamp.passes.types import run_on_fakes, type_of
from fxamp.tree import every_buffer, every_parameter
from fxamp.value_types import TensorType, tensors_in


def lints(graph: fx.Graph) -> None:
    """The graph is well-formed: every argument is defined before its use."""
    try:
        graph.lint()
    except Exception as error:
        raise InvariantError(f"the graph is malformed: {error}") from error


def regions_keep_grad_mode(graph: fx.Graph) -> None:
    """A checkpointed region leaves the gradient mode as it found it: a switch alone would reach what is around it."""
    switches: dict[object, list[str]] = {}
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled and ir.REGION in node.meta:
            switches.setdefault(node.meta[ir.REGION], []).append(node.name)
    for names in switches.values():
        if len(names) % 2:
            raise InvariantError(f"a checkpointed region switches gradients with {names} and does not switch them back")


def every_node_coloured(graph: fx.Graph) -> None:
    """Every node has a colour, a precision and a reason; what is stored low is low."""
    for node in graph.nodes:
        mark = ir.mark(node)
        if mark.reason.kind == "unmarked":
            raise InvariantError(f"{node.name} has no reason for its precision")
        if mark.precision not in ("low", "high", "none"):
            raise InvariantError(f"{node.name} has the precision {mark.precision!r}")
        if node.meta.get("stored_low") and mark.precision == "high":
            raise InvariantError(f"{node.name} is {mark.precision}, and its parameter is stored low")


def operands_agree(graph: fx.Graph) -> None:
    """Operands of a low node are low, those of a high node high; what keeps its dtype is float32."""
    for node in graph.nodes:
        for position, keyword, mode in ir.mark(node).modes:
            argument = node.kwargs.get(keyword) if keyword else node.args[position]
            for value in ir.nodes_in(argument):
                _check_operand(node, value, mode)


def _check_operand(node: fx.Node, value: fx.Node, mode: str) -> None:
    found, own = _found(value), ir.mark(node).precision
    expected = {"with": own, "high": "high", "low": "low"}.get(mode, found)
    if "none" in (found, expected) or node.op == "output":
        return
    if found != expected:
        raise InvariantError(
            f"{node.name} ({ir.mark(node).op}) is {own} but reads {value.name} {found}, not {expected}"
        )


def _found(value: fx.Node) -> str:
    """The precision of a value; "none" for what is low by itself, whatever computes it."""
    return "none" if _is_users_low(value) else ir.mark(value).precision


def _is_users_low(value: fx.Node) -> bool:
    """Whether a node of the model's that reads float32 gives a low value: x.half(), or x.mul_(y) of a low x."""
    dtypes = {found.dtype for found in tensors_in(ir.mark(value).type)}
    return ir.mark(value).precision == "high" and bool(dtypes) and dtypes <= {*LOW_DTYPES}


def casts_minimal(graph: fx.Graph) -> None:
    """One cast per (value, dtype); none to the dtype a value has, none unused, no pair that undoes itself."""
    aliases, regions = find_aliases(graph), grad_regions(graph)
    seen: dict[tuple[object, ...], fx.Node] = {}
    for node in graph.nodes:
        if ir.mark(node).role not in ("cast", "weight cast") or node.target != "to":
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        to = node.args[1]
        if not node.users:
            raise InvariantError(f"the cast {node.name} is used by nobody")
        if any(found.dtype == to for found in tensors_in(ir.mark(source).type)):
            raise InvariantError(f"{node.name} casts {source.name} to {dtype_name(to)}, which it is already")
        is_result = ir.RESULT in source.meta
        if ir.mark(source).role in ("cast", "weight cast") and source.target == "to" and not is_result:
            raise InvariantError(f"{node.name} casts the cast {source.name}")
        at_reader = ir.is_weight(source) or source in aliases.storage_of or regions[source] != regions[node]
        key = (source, to, aliases.epoch(source, node), regions[node] if at_reader else 0)
        if key in seen:
            raise InvariantError(f"{source.name} is cast twice to {to}: {seen[key].name} and {node.name}")
        seen[key] = node


def writes_land(graph: fx.Graph) -> None:
    """No write goes into a copy that a pass made: the value it was meant for would not change."""
    for node in graph.nodes:
        for target in mutated(node):
            if ir.mark(target).role in ("cast", "weight cast", "pad"):
                raise InvariantError(f"{node.name} writes into {target.name}, a copy of {ir.mark(target).serves}")


def outputs_have(dtype: torch.dtype | None) -> Invariant:
    """An invariant: float outputs come in `dtype` (None: as computed), but for those inside objects."""

    def outputs_promised(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "output" or dtype is None:
                continue
            for value in set(node.all_input_nodes) - ir.as_computed(node):
                if ir.mark(value).role == "" and (ir.mark(value).precision == "none" or _is_users_low(value)):
                    continue
                for found in tensors_in(ir.mark(value).type):
                    if found.dtype in (torch.float32, torch.float16, torch.bfloat16) and found.dtype != dtype:
                        raise InvariantError(f"the output {value.name} is {found.dtype}, not {dtype}")

    return outputs_promised


def keeps_state(root: nn.Module) -> Invariant:
    """An invariant: the model's parameters and buffers, their names, dtypes and numbers of writes are as now.

    Writes are not counted while there are other threads, which may train the model. (A daemon is taken for one that
    watches something, as tqdm's does.)
    """

    def state_untouched(graph: fx.Graph) -> None:
        now = _state_of(root)
        compared = 2 if is_accompanied or _are_others_at_work() else 3
        for name in (*before, *now):
            if before.get(name, ())[:compared] != now.get(name, ())[:compared]:
                raise InvariantError(
                    f"the pass changed the model's own {name!r}: {before.get(name)} -> {now.get(name)}"
                )

    before, is_accompanied = _state_of(root), _are_others_at_work()
    return state_untouched


def _are_others_at_work() -> bool:
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread())


def _state_of(root: nn.Module) -> dict[str, tuple[int, torch.dtype, int]]:
    named = (*every_parameter(root), *every_buffer(root))
    return {name: (id(value), value.dtype, value._version) for name, value in named if not value.is_inference()}


def types_hold(fakes: Fakes, inputs: list[object]) -> Invariant:
    """An invariant: running the graph on fake tensors gives every node the dtype that is recorded.

    With gradients, as the types were found: what fails without them fails for the caller, in torch's words.
    """

    @torch.enable_grad()
    def recorded_types_hold(graph: fx.Graph) -> None:
        values: dict[fx.Node, object] = {}
        given = iter(inputs)
        changes = reshaped(graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                value, known = next(given), node.meta.get("val")
                values[node] = fakes.of(value) if known is None else known
            elif node.op == "get_attr":
                values[node] = _stored(node)
            elif node.op != "output":
                values[node] = _rerun(fakes, node, values)
                if values[node] is not UNKNOWN:
                    _compare_types(node, values[node])
            if node in changes:
                values[node] = UNKNOWN

    return recorded_types_hold


def _stored(node: fx.Node) -> object:
    """A weight as it is stored, which is not the logical float32 where it was lowered."""
    value, kind = node.meta.get("val", UNKNOWN), ir.mark(node).type
    if isinstance(value, torch.Tensor) and isinstance(kind, TensorType) and kind.dtype is not None:
        return value.to(kind.dtype)
    return value


def _rerun(fakes: Fakes, node: fx.Node, values: dict[fx.Node, object]) -> object:
    if node.meta.get(ir.TRANSFORMED) or any(values[given] is UNKNOWN for given in node.all_input_nodes):
        return UNKNOWN
    try:
        return run_on_fakes(fakes, node, values.__getitem__)
    except Exception as error:
        raise InvariantError(
            f"{node.name} ({ir.mark(node).op}, {ir.source_line(node)}) fails in the rewritten graph: {error}"
        ) from error


def _compare_types(node: fx.Node, value: object) -> None:
    found, recorded = list(tensors_in(type_of(value))), list(tensors_in(ir.mark(node).type))
    for real, noted in zip(found, recorded, strict=False):
        if noted.dtype is not None and real.dtype != noted.dtype:
            raise InvariantError(
                f"{node.name} ({ir.mark(node).op}, {ir.source_line(node)}) gives {real.dtype}, "
                f"but {noted.dtype} is recorded"
            )


ALWAYS: tuple[Callable[[fx.Graph], None], ...] = (lints, regions_keep_grad_mode)
