"""What a change of the lists or overrides would cost or save, without converting by hand."""

import contextlib
import dataclasses
import fnmatch
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fxamp import ir
from fxamp.errors import FxampError, OptionError, nearest, warn_once
from fxamp.lists import Op, OpLists, each
from fxamp.lists.names import op_name
from fxamp.model.engine import Engine
from fxamp.passes.costs import LAUNCH_BYTES
from fxamp.passes.policy import LEVELS
from fxamp.review.find import find_rows
from fxamp.review.report import Report, build_report, report, require_engine
from fxamp.review.rows import Row
from fxamp.review.trials import Trials
from fxamp.words import bytes_in_words, plural

log = logging.getLogger("fxamp")

MAX_MOVES = 12
"""Moves that `suggest` tries."""
_MOVABLE: tuple[ir.Rule, ...] = ("list", "unlisted", "not low-born", "stream", "state", "user region", "override")
"""Kinds of reason that a move may set aside; literals, squares and integers are facts about the numbers."""
WORTH = 0.01
"""Share of all bytes that a move without a saved launch must save to be suggested."""


def what_if(
    converted: nn.Module,
    allow: Iterable[Op] | Op = (),
    deny: Iterable[Op] | Op = (),
    infer: Iterable[Op] | Op = (),
    clear: Iterable[Op] | Op = (),
) -> Report:
    """The report that the model would have with these ops or modules in other lists; nothing is changed.

        after = fxamp.what_if(model, infer=["exp"], deny=["encoder.layer.3"])
        print(after.casts - fxamp.report(model).casts)

    A name is an op of the model (`exp`), or else what `fxamp.explain` takes: a module path, a glob, a node, a source
    line or a module class of the model. At O2 those parameters are stored otherwise that a conversion with the change
    would store so; where the model has several graphs, by the first.

    Args:
        converted: a converted model.
        allow, deny, infer, clear: names that move to this list, one or several.

    Returns:
        As `fxamp.report` gives it, of the changed graphs.

    Raises:
        OptionError: a name is neither, with the nearest one, or means nodes of a block that is converted by itself; or
            the model was not converted, or (O2) cannot be copied.
    """
    if (today := report(converted)).left:
        return today
    engine = require_engine(converted)
    moves = {"allow": allow, "infer": infer, "deny": deny, "clear": clear}
    return _tried(Trials(converted, engine), today, _changes(today, engine, moves, warn_once))


_WITHIN = (
    "what_if: {name!r} is, or is inside of, a module that has a graph of its own (boundaries=, or a forward that runs "
    "as it is written), where equal modules share one: it moves lists there, and no single nodes or modules. Convert "
    "with overrides={{{name!r}: 'deny'}}, and compare the reports."
)


def _tried(trials: Trials, today: Report, changes: dict[str, Any]) -> Report:
    options = dataclasses.replace(today._options, **changes)
    return build_report(trials.variants(**changes), options, trials.converted, today.runs)


def _changes(
    today: Report, engine: Engine, moves: Mapping[str, Iterable[Op] | Op], say: Callable[[str], None] = log.debug
) -> dict[str, Any]:
    """The options that the moves, names by colour, mean; `say` tells of a name that could mean something else."""
    lists, overrides = engine.options.lists, dict(engine.options.overrides)
    graphs = len(engine.all_variants())  # the blocks' graphs stand behind them
    given = dict[Op, str]()
    for colour, names in moves.items():
        for name in each(names):
            if not isinstance(name, str):
                op_name(name, lists, where="what_if: ")  # or it is none
            name = name.strip() if isinstance(name, str) else name
            if given.setdefault(name, colour) != colour:
                raise OptionError(f"what_if: {name!r} stands in {given[name]} and in {colour}: give it one of them.")
            op, keys = _meant(name, lists, today.rows, graphs, tuple(engine.blocks), say)
            if op is not None:
                lists = lists.override(**{colour: [op]})
            overrides.update(dict.fromkeys((_from_block(engine, key) for key in keys), colour))
    return {"lists": lists, "overrides": overrides}


def _from_block(engine: Engine, key: str) -> str:
    """A path of the model as a block that is asked by itself knows it."""
    paths = [path for path in engine.paths if engine.is_boundary and key.startswith(f"{path}.")]
    return key.removeprefix(f"{paths[0]}.") if paths else key


def _meant(
    name: Op, lists: OpLists, rows: Sequence[Row], graphs: int, blocks: Collection[str], say: Callable[[str], None]
) -> tuple[Op | None, list[str]]:
    """The op that a name means, or else the keys of `overrides=`, which reach the first `graphs` graphs.

    Args:
        blocks: paths of the modules that have graphs of their own.
    """
    if not isinstance(name, str):
        return name, []
    is_op = any(row.op == name for row in rows)
    is_module = any(f"{row.module}.".startswith(f"{name}.") for row in rows)
    if is_op and is_module:
        say(f"what_if: {name!r} is taken for the op; a glob ('*{name}') names the module.")
    if is_op or (name in lists and not is_module and all(name != row.name for row in rows)):
        return name, []
    if any(f"{name}.".startswith(f"{block}.") or fnmatch.fnmatchcase(block, name) for block in blocks):
        raise OptionError(_WITHIN.format(name=name))
    try:
        kind, found = find_rows(rows, name)
    except OptionError as error:
        hint = nearest(name, lists)
        more = f" Among the ops:{hint}" if hint and hint not in str(error) else ""
        raise OptionError(f"what_if: {error}{more}") from None
    if kind == "op":
        return found[0].op, []
    within = [row.graph >= graphs or row.module in blocks for row in found]
    if all(within) or (any(within) and kind != "node"):
        raise OptionError(_WITHIN.format(name=name))
    return None, [name] if kind in ("node", "module") else [row.name for row in found if not row.role]


# -------------------------------------------------------------------------------------------------- suggestions


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A move and what it would save in one forward.

    Attributes:
        move: as arguments of `what_if`, "infer=['exp']", or of convert(), "convert(level='balanced')". Where a node has
            the name of an op, the op is meant, as by `what_if`: "allow=['add'] (the op, wherever it stands)".
        casts, launches, nbytes: saved; below 0 where it costs.
        why_not: the reason the node is in float32 today.
    """

    move: str
    casts: int
    launches: int
    nbytes: int
    why_not: str

    @property
    def worth(self) -> int:
        """Bytes saved, launches included."""
        return self.nbytes + LAUNCH_BYTES * self.launches

    def __str__(self) -> str:
        saved = f"{plural(self.casts, 'cast')}, {self.launches} launch{'es' * (self.launches != 1)}"
        moved = f"{', but costs' if self.nbytes < 0 else ','} {bytes_in_words(abs(self.nbytes))}"
        return f"{self.move}: saves {saved}{moved}; today: {self.why_not}"


def suggest(built: Report) -> list[Suggestion]:
    """The moves that would save most, best first; each was tried. Whether the numbers allow it is not judged here:
    see fxamp.compare.
    """
    model = built._model
    if model is None:
        return []
    return sorted(_worthwhile(built, model), key=lambda suggestion: -suggestion.worth)


def _worthwhile(built: Report, model: nn.Module) -> Iterator[Suggestion]:
    """The moves that save something. An op of the deny list that saves nothing on the infer list may on the allow
    list."""
    engine, options = require_engine(model), built._options
    trials = Trials(model, engine)

    def tried(move: str, changes: dict[str, Any], why_not: str) -> Suggestion | None:
        found = _saved(built, _tried(trials, built, changes), move, why_not)
        is_enough = found.launches > 0 or found.nbytes > WORTH * traffic(built)
        return found if is_enough and found.worth > 0 else None

    for ways, name, why_not in list(_moves(built))[:MAX_MOVES]:
        for move, colour in ways:
            with contextlib.suppress(FxampError):
                if (found := tried(move, _changes(built, engine, {colour: [name]}), why_not)) is not None:
                    yield found
                    break
    for wider in LEVELS[LEVELS.index(options.level) + 1 :][:1]:
        if (found := tried(f"convert(level={wider!r})", {"level": wider}, f"level {options.level!r}")) is not None:
            yield found


def _saved(built: Report, after: Report, move: str, why_not: str) -> Suggestion:
    casts, launches = built.casts - after.casts, built.launches - after.launches
    return Suggestion(move, casts, launches, traffic(built) - traffic(after), why_not)


def traffic(built: Report) -> int:
    """Bytes of every value that is computed, with what its casts read; a measure to compare two reports by."""
    computed = sum(row.runs * (row.nbytes or 0) for row in built.rows if not row.is_source)
    return computed + (built.cast_bytes or 0) // 2 + (built.weight_cast_bytes or 0) // 2


def _moves(built: Report) -> Iterator[tuple[list[tuple[str, str]], str, str]]:
    """([(in words, colour), ...], name, reason today) of the causes of float32 regions, largest first, each once; of
    several colours the first that saves something is meant."""
    seen: set[str] = set()
    ops = {row.op for row in built.rows}
    rows = {(row.graph, row.name): row for row in built.rows}
    for region in built.regions:
        for name in region.nodes:
            row = rows[region.graph, name]
            if row.reason_kind not in _MOVABLE or row.op == "output":
                continue
            by_list = row.reason_kind in ("list", "unlisted")
            moved, colours = (row.op, ("infer", "allow")) if by_list else (row.name, ("allow",))
            if moved not in seen:
                seen.add(moved)
                is_taken_for_op = not by_list and row.name in ops
                of_op = " (the op, wherever it stands)" if is_taken_for_op else ""
                yield [(f"{colour}=[{moved!r}]{of_op}", colour) for colour in colours], moved, row.reason
