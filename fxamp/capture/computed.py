"""Tensors that forward makes of constants and sizes alone, or of these and its inputs.

    dims = torch.arange(1, x.dim()).tolist()
    steps = int(torch.ceil(torch.tensor(x.shape[1] / 4)))
    if mask.all(): ...

What they hold is known while forward is traced, so that Python may decide on it.
"""

import operator
import weakref
from typing import Any

import torch
from torch import fx

from fxamp.fakes import UNKNOWN, memory_of
from fxamp.inplace import mutated
from fxamp.opnames import canonical_name

_MAKING = (
    "arange as_tensor eye full full_like linspace logspace new_full new_ones new_zeros ones ones_like tensor zeros "
    "zeros_like"
)
_READING = (
    "abs add all amax amin any argmax argmin argsort bincount bitwise_and bitwise_not bitwise_or bitwise_xor bool "
    "bucketize cartesian_prod cat ceil chunk clamp clamp_max clamp_min clone contiguous cos count_nonzero cpu cumprod "
    "cumsum detach diagonal diff div double eq equal exp expand expand_as flatten flip float floor floor_divide fmod "
    "gather ge getitem gt hstack index_select int isfinite isin isinf isnan item le log log2 logical_and logical_not "
    "logical_or logical_xor long lt masked_fill masked_select max maximum mean meshgrid min minimum movedim mul "
    "nan_to_num narrow ne neg nonzero numel one_hot outer pad permute pow prod remainder repeat repeat_interleave "
    "reshape roll round scatter searchsorted select sign sin size sort split sqrt square squeeze stack sub sum t tile "
    "to tolist topk transpose tril triu trunc type unbind unique unique_consecutive unsqueeze view vstack where "
    "_indices _nnz ccol_indices coalesce col_indices crow_indices indices is_coalesced row_indices to_dense values"
)
# They write into their statistics, which no input is.
_STATISTICS = frozenset({"batch_norm", "instance_norm"})
_COMPUTED = frozenset(f"{_MAKING} {_READING}".split())
_NUMBERS = (int, float, torch.dtype, torch.device, torch.Size)


def sources(node: fx.Node, from_inputs: bool = False) -> list[fx.Node] | None:
    """The sizes and dtypes that a tensor is computed of; None where anything else decides on what it holds.

    Args:
        from_inputs: inputs may, too, and are among them.
    """
    found, seen, waiting = [], {node}, [node]
    while waiting:
        given = waiting.pop()
        if is_number(given) or (from_inputs and given.op == "placeholder"):
            found.append(given)
            continue
        if given.target not in _OURS and not is_computed(given):
            return None
        new = [each for each in given.all_input_nodes if each not in seen]
        seen.update(new)
        waiting += new
    tensors = {each for each in seen if not is_number(each)}
    if not tensors:
        return found
    is_written = _is_written(tensors) or (from_inputs and _writes_into_what_is_given(max(tensors)))
    return None if is_written else found


def together(*values: Any) -> tuple[Any, ...]:
    """These values: of which a node asks whether all hang on inputs alone."""
    return values


def item_at(listed: Any, places: tuple[int, ...]) -> Any:
    """An item of a list of lists."""
    for place in places:
        listed = listed[place]
    return listed


_OURS = frozenset({together, item_at})


class Forms:
    """What nodes compute, as texts: equal for nodes that compute the same, as those of equal layers may."""

    def __init__(self) -> None:
        self._of: dict[fx.Node, str] = {}
        self._numbers: dict[str, str] = {}

    def of(self, node: fx.Node) -> str:
        if node not in self._of:
            value = node.meta.get("val") if node.meta.get("static") else None
            if isinstance(value, (torch.dtype, torch.device)):  # at every call, whoever was asked for it
                text = repr(value)
            else:
                text = f"{node.op}:{node.target}{fx.node.map_arg((node.args, node.kwargs), self.of)!r}"
            self._of[node] = self._numbers.setdefault(text, f"%{len(self._numbers)}")
        return self._of[node]


def is_computed(node: fx.Node) -> bool:
    """Whether its op makes a tensor of constants, or reads one that may be made so."""
    return node.op in ("call_function", "call_method") and canonical_name(node.target) in _COMPUTED


def is_number(node: fx.Node) -> bool:
    """Whether it gives a size, a dtype or the like, which is known."""
    return isinstance(node.meta.get("val", UNKNOWN), _NUMBERS)


def _is_written(nodes: set[fx.Node]) -> bool:
    """Whether anything that comes before the last of these nodes writes into one of them, or into what is made of them:
    that may be a view.

    `requires_grad_` writes into no memory, and is asked of these nodes alone.
    """
    last, made, waiting = max(nodes), set(nodes), list(nodes)
    while waiting:
        given = waiting.pop()
        new = [user for user in given.users if user < last and user not in made]
        made.update(new)
        waiting += [user for user in new if user.target is operator.getitem] if _are_read(given) else new
    return any((nodes if _asks_for_gradients(node) else made).intersection(mutated(node)) for node in made)


def _asks_for_gradients(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "requires_grad_"


def _are_read(node: fx.Node) -> bool:
    """Whether a node gives numbers, or a list of them, of which nothing can be a view: a layer may be made of them."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return is_number(node) or (node.op == "call_method" and node.target in ("item", "tolist"))


def _writes_into_what_is_given(last: fx.Node) -> bool:
    """Whether anything before a node writes into an input or a weight, or into what may be a view of one.

    The inputs of another call may lie in one memory.
    """
    scan = _scans.get(last.graph)
    if scan is None or scan.is_stale:
        scan = _scans[last.graph] = _Scan()
    return scan.has_found(last)


class _Scan:
    """What has been seen of one graph, which grows at its end."""

    def __init__(self) -> None:
        self._done: fx.Node | None = None  # the last node that was looked at
        self._first: fx.Node | None = None  # the first that writes
        self._made_by: dict[object, fx.Node] = {}

    @property
    def is_stale(self) -> bool:
        """Whether it cannot go on."""
        return any(node is not None and node._erased for node in (self._done, self._first))

    def has_found(self, last: fx.Node) -> bool:
        """Whether one comes before a node."""
        node = next(iter(last.graph.nodes)) if self._done is None else self._done.next
        while self._first is None and (self._done is None or self._done < last) and node is not last:
            self._look_at(node)
            self._done, node = node, node.next
        return self._first is not None and self._first < last

    def _look_at(self, node: fx.Node) -> None:
        if "val" in node.meta:
            self._made_by.setdefault(memory_of(node.meta["val"]), node)
        writes_no_input = canonical_name(node.target) in _STATISTICS or _asks_for_gradients(node)
        for written in () if writes_no_input else mutated(node):
            maker = self._made_by.get(memory_of(written.meta["val"])) if "val" in written.meta else None
            if maker is None or maker.op in ("placeholder", "get_attr") or not _is_known(maker):
                self._first = node


_scans: "weakref.WeakKeyDictionary[fx.Graph, _Scan]" = weakref.WeakKeyDictionary()


def _is_known(node: fx.Node) -> bool:
    """Whether a value has been made of known ones: a view of an input lies in its memory then."""
    return all("val" in given.meta for given in node.all_input_nodes)


def computed(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """What a node gives, by the numbers that it is computed of."""
    if node not in known:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: computed(given, known))
        run = getattr(args[0], node.target) if isinstance(node.target, str) else node.target
        known[node] = run(*args[isinstance(node.target, str) :], **kwargs)
    return known[node]
