"""Why a node, a module or a source line runs in the precision it does, and what would change it."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from fxamp.errors import OptionError
from fxamp.lists import OpLists
from fxamp.review.chain import Rows, by_name, chain_of, readers_of
from fxamp.review.find import find_rows, forward_at
from fxamp.review.outcomes import Outcomes
from fxamp.review.remedies import Remedy, gives_no_float, remedies_for
from fxamp.review.report import Report, report, require_engine
from fxamp.review.rows import Row
from fxamp.review.sharing import run_as
from fxamp.tree import every_module
from fxamp.words import bytes_in_words, listed, plural

_FULL = 3
"""Nodes of a module, a line or an op that are explained in full; the rest is counted."""
_NAMED = 4
"""Neighbours that are named."""


def explain(converted: nn.Module, name: str) -> str:
    """The chain of reasons of a node, module, source line or op, and what would change it.

        print(fxamp.explain(model, "encoder.layer.3"))     # a module path or glob
        print(fxamp.explain(model, "model.py:42"))         # a line
        print(fxamp.explain(model, "softmax_1"))           # a node of fxamp.report(model)

    Args:
        converted: a converted model.
        name: a node, a module path or glob, a source line, a module class or an op.

    Returns:
        Text to print, of several lines.

    Raises:
        OptionError: the model was not converted, or nothing has that name (it gives the nearest names).
    """
    built = report(converted)
    if built.left:
        return f"{built.summary()}: there is nothing to explain."
    engine = require_engine(converted)
    lists: OpLists = engine.options.lists
    outcomes, other = Outcomes(converted, built), run_as(engine, name)
    try:
        text = _explained(built, lists, outcomes, name if other is None else other)
    except OptionError as error:
        modules = dict(every_module(converted))
        if name and name in modules:
            return _outside(f"module {name} ({type(modules[name]).__name__})", built)
        if isinstance(name, str) and (place := forward_at(converted, name)) is not None:
            return _outside(f"source line {name}, in {place}", built)
        if not built.outside:
            raise
        raise OptionError(f"{error} What is outside of the graphs: {' '.join(built.outside)}") from error
    if other is None:
        return text
    named = f"{name} is run by the graph that was made for {other}: what is said of it holds for both"
    return f"{named}, and overrides= name each by its own path.\n\n{text}"


def _outside(title: str, built: Report) -> str:
    """What to say of a module or a line of which no graph holds a node."""
    if built.is_preview:
        more = "" if "dynamo" in built.captures else ", or pass example_inputs to fxamp.convert"
        return f"{title}: no graph that is there yet holds it. Call the model{more}."
    if not built.outside:
        return f"{title}: no graph holds a node of it: forward does not call it, or it computes nothing."
    return "\n  ".join((f"{title}: no graph holds a node of it. What is outside of the graphs:", *built.outside))


def _explained(built: Report, lists: OpLists, outcomes: Outcomes, name: str) -> str:
    kind, found = find_rows(built.rows, name)
    if kind == "node":
        texts = dict.fromkeys("\n".join(_node(row, built, lists, outcomes)) for row in found)
        return "\n\n".join(texts)
    return "\n".join(_group(f"{kind} {name}", found, built, lists, outcomes))


def reasons_of(converted: nn.Module, name: str) -> list[list[Row]]:
    """A chain for each node that `name` means, as rows: the node itself first, the root last."""
    built = report(converted)
    if built.left:
        return []
    kind, found = find_rows(built.rows, run_as(require_engine(converted), name) or name)
    rows = found if kind == "node" else _computing(found) or found
    return [chain_of(row, by_name(built.rows, row.graph)) for row in rows]


def _computing(rows: Sequence[Row]) -> list[Row]:
    """The rows of operations: no casts, inputs, parameters or outputs."""
    return [row for row in rows if not row.role and not row.is_source and row.op != "output"]


# ----------------------------------------------------------------------------------------------------- groups


def _group(title: str, found: Sequence[Row], built: Report, lists: OpLists, outcomes: Outcomes) -> Iterator[str]:
    computing = _computing(found)
    high = [row for row in computing if row.precision == "high"]
    low = sum(row.precision == "low" for row in computing)
    casts = sum(bool(row.role) for row in found)
    yield (
        f"{title}: {low} of {plural(len(computing), 'node')} in {built.low_dtype}, {len(high)} in float32"
        + (f", {plural(casts, 'cast')}" if casts else "")
    )
    if len(high) > 1 and all(not row.is_source for row in high):
        yield from _whole_cost(high, built)
    for (reason, kind), count in Counter((row.reason, row.reason_kind) for row in computing).most_common():
        yield f"  {count} x {reason}  [{kind}]"
    told = high or [row for row in computing if row.precision == "low"] or computing
    shown = (told or list(found))[:_FULL]
    for row in shown:
        yield ""
        yield from _node(row, built, lists, outcomes)
    left = len(told) - len(shown)
    if left > 0:
        yield ""
        yield f"... and {left} more: name one of them, or see print(fxamp.report(model))"


# -------------------------------------------------------------------------------------------------------- one


def _node(row: Row, built: Report, lists: OpLists, outcomes: Outcomes) -> Iterator[str]:
    rows = by_name(built.rows, row.graph)
    chain = chain_of(row, rows)
    yield _headline(row)
    place = [f"at {row.source}"] if row.source else []
    place += [f"in module {row.module} ({row.module_class})"] if row.module else []
    if place:
        yield "  " + ", ".join(place)
    if row.written_out:
        yield f"  written out in the model as {row.written_out}: one kernel that computes in float32 takes their place"
        yield f"  (a row for {row.op} in lists=, an override, or level='strict' leaves them as they are)"
    if gives_no_float(row):
        yield f"it takes what it reads in the dtype that has, and converts it to {row.dtype}"
    else:
        yield from _why(chain, lists)
    if row.role:
        yield from _who_reads(row, rows)
    elif row.reason_kind == "cut":
        yield from _neighbours(row, rows)
    yield "what would change it:"
    remedies = remedies_for(chain, rows, lists, outcomes)
    yield from (f"  - {remedy.text}" for remedy in _distinct(remedies))
    yield from _cost(row, rows, built)


def _why(chain: Sequence[Row], lists: OpLists) -> Iterator[str]:
    yield f"why {chain[0].runs_in}:"
    width = max(len(link.name) for link in chain)
    for link in chain:
        yield f"  {link.name:<{width}}  {link.reason}  [{link.reason_kind}]"
    yield from _list_row(chain[-1], lists)


def _headline(row: Row) -> str:
    shape = "" if row.shape is None else f" of shape {tuple(row.shape)}"
    what = row.role or f"`{row.op}`, {row.colour}"
    if gives_no_float(row):
        return f"{row.name} ({what}) gives {row.dtype}{shape}"
    return f"{row.name} ({what}) runs in {row.runs_in}" + (f", value {row.dtype}{shape}" if row.dtype else "")


def _list_row(root: Row, lists: OpLists) -> Iterator[str]:
    listed = lists.row(root.op)
    if root.reason_kind in ("list", "unlisted") and listed is not None:
        origin = "fxamp/lists/" + f"{listed.colour}.toml" if listed.origin == "default" else listed.origin
        yield f'  list row: {root.op} = "{listed.reason}"  ({origin})'


def _who_reads(row: Row, rows: Rows) -> Iterator[str]:
    readers = readers_of(row, rows)
    yield f"  read by {listed(map(_called, readers), _NAMED)}"
    for reader in readers[:1]:
        if reader.op == "output":
            yield "  outputs come back in convert(..., output_dtype=torch.float32)"
        for link in chain_of(reader, rows):
            yield f"    {link.name}: {link.reason}  [{link.reason_kind}]"


def _called(row: Row) -> str:
    """The row's name and precision; a cast is called after the value it casts."""
    if row.role and row.reason_node:
        return f"{row.reason_node} cast to {row.dtype}"
    return f"{row.name} ({row.runs_in})"


def _neighbours(row: Row, rows: Rows) -> Iterator[str]:
    given = [rows[name] for name in row.inputs if name in rows]
    reads = ", ".join(map(_called, given[:_NAMED]))
    read_by = ", ".join(map(_called, readers_of(row, rows)[:_NAMED]))
    yield f"  it reads {reads or 'nothing'}; it is read by {read_by or 'nobody'}"


def _distinct(remedies: Sequence[Remedy]) -> list[Remedy]:
    return list({remedy.text: remedy for remedy in remedies}.values())


def _cost(row: Row, rows: Rows, built: Report) -> Iterator[str]:
    """What float32 costs here: bytes beyond those of the low dtype, and casts that stand around the node."""
    if gives_no_float(row):
        yield f"what it costs: nothing, {row.dtype} is what it gives in any precision"
    elif row.precision == "high" and not row.is_source:
        names = ", ".join(_casts_beside(row, rows)) or "none"
        yield f"what it costs: {_bytes_beyond([row], rows, built)}; casts beside it: {names}"


def _whole_cost(high: Sequence[Row], built: Report) -> Iterator[str]:
    """The same of several nodes."""
    graphs = {row.graph: by_name(built.rows, row.graph) for row in high}
    casts = {(row.graph, name) for row in high for name in _casts_beside(row, graphs[row.graph])}
    together = [_bytes_beyond([row for row in high if row.graph == graph], graphs[graph], built) for graph in graphs]
    yield f"  what float32 costs here: {'; '.join(together)}; {plural(len(casts), 'cast')} beside them"


def _bytes_beyond(found: Sequence[Row], rows: Rows, built: Report) -> str:
    """Values that several of the nodes read count once for each: each reads them."""
    floats = [value for row in found for value in _values_of(row, rows) if value.dtype in ("float32", "")]
    if any(value.nbytes is None for value in floats):
        return "bytes are not known before example_inputs are given, or the first call"
    extra = sum(value.nbytes or 0 for value in floats) // 2
    return f"{bytes_in_words(extra)} more read and written than in {built.low_dtype}, forward"


def _values_of(row: Row, rows: Rows) -> list[Row]:
    return [row, *(rows[name] for name in row.inputs if name in rows)]


def _casts_beside(row: Row, rows: Rows) -> list[str]:
    around = (*readers_of(row, rows), *_values_of(row, rows)[1:])
    return [found.name for found in around if found.role == "cast"]
