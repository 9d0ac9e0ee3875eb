"""The op lists' environment variables: parsing, conflicts, and warnings for what has no effect."""

import dataclasses
import os
from collections.abc import Iterable, Mapping

from fxamp.errors import OpListError, nearest, warn_once
from fxamp.lists.names import entered, op_name
from fxamp.lists.rows import COLOURS, Colour

ADD: dict[str, Colour] = {f"FXAMP_{colour.upper()}LIST_ADD": colour for colour in COLOURS}
REMOVE: dict[str, Colour] = {f"FXAMP_{colour.upper()}LIST_REMOVE": colour for colour in COLOURS}
KNOWN = (*ADD, *REMOVE, "FXAMP_DISABLE", "FXAMP_LOG_LEVEL", "FXAMP_LOG_PATH")

_ON = ("1", "true", "yes", "on")
_OFF = ("", "0", "false", "no", "off")


def disabled_by(environ: Mapping[str, str] = os.environ) -> str | None:
    """What switches conversion off, "FXAMP_DISABLE=1"; None where nothing does.

    A value that is neither on (1, true, yes, on) nor off (0, false, no, off) counts as on, with a warning.
    """
    value = environ.get("FXAMP_DISABLE", "").strip()
    if value.lower() in _OFF:
        return None
    text = f"FXAMP_DISABLE={value}"
    if value.lower() not in _ON:
        warn_once(
            f"{text} is neither on ({', '.join(_ON)}) nor off ({', '.join(_OFF[1:])}).{nearest(value, _ON + _OFF)} "
            "It is read as on: models are left as they are."
        )
    return text


@dataclasses.dataclass(frozen=True)
class EnvironmentChange:
    """What one variable did.

    Attributes:
        ops: canonical names of the ops that it moved or removed.
        effect: the same in words, "exp: deny -> allow"; "nothing" where it changed nothing.
    """

    variable: str
    value: str
    ops: tuple[str, ...]
    effect: str


@dataclasses.dataclass
class EnvironmentPlan:
    """What all variables ask for together."""

    moves: dict[str, tuple[Colour, str]] = dataclasses.field(default_factory=dict)
    removed: set[str] = dataclasses.field(default_factory=set)
    changes: tuple[EnvironmentChange, ...] = ()
    warnings: list[str] = dataclasses.field(default_factory=list)


def read_environment(environ: Mapping[str, str], lists: Mapping[str, str]) -> EnvironmentPlan:
    """The plan for these lists; every ADD comes before every REMOVE.

    Raises:
        OpListError: an op is added to two lists.
    """
    plan = EnvironmentPlan(warnings=list(_unknown_variables(environ)))
    for variable, colour in ADD.items():
        _add(plan, variable, colour, environ.get(variable, ""), lists)
    for variable, colour in REMOVE.items():
        _remove(plan, variable, colour, environ.get(variable, ""), lists)
    return plan


def _unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    for variable in sorted(environ):
        if variable.startswith("FXAMP_") and variable not in KNOWN:
            hint = nearest(variable, KNOWN)
            yield f"{variable} is not a variable of fxamp.{hint} Known: {', '.join(sorted(KNOWN))}."


def _add(plan: EnvironmentPlan, variable: str, colour: Colour, value: str, lists: Mapping[str, str]) -> None:
    effects = {}
    for op in _ops(plan, variable, value, lists):
        other, other_variable = plan.moves.get(op, (colour, variable))
        if other != colour:
            raise OpListError(f"{op!r} is added to two lists, by {other_variable} and by {variable}; keep one.")
        plan.moves[op] = (colour, variable)
        if lists.get(op) == colour:
            plan.warnings.append(f"{variable}={value}: {op!r} is on that list already.")
        else:
            effects[op] = f"{op}: {lists.get(op, 'unlisted')} -> {colour}"
    _record(plan, variable, value, effects)


def _remove(plan: EnvironmentPlan, variable: str, colour: Colour, value: str, lists: Mapping[str, str]) -> None:
    effects = {}
    for op in _ops(plan, variable, value, lists):
        before = lists.get(op, "unlisted")
        now = plan.moves[op][0] if op in plan.moves else before
        if now == colour:
            plan.removed.add(op)
            effects[op] = f"{op}: {colour} -> unlisted"
        elif before != colour:
            plan.warnings.append(f"{variable}={value}: {op!r} is not on that list but {before}.")
    _record(plan, variable, value, effects)


def _ops(plan: EnvironmentPlan, variable: str, value: str, lists: Mapping[str, str]) -> Iterable[str]:
    """The ops that the value names, each once; warns of names that are no op."""
    names = dict.fromkeys(name for part in value.split(",") if (name := part.strip()))
    ops: dict[str, None] = {}
    for name in names:
        try:
            op = op_name(name, lists, where=f"{variable}: ")
            ops[op] = None
        except OpListError as error:
            plan.warnings.append(f"{error} The name is ignored.")
            continue
        if (problem := entered(name, op)) is not None:
            plan.warnings.append(f"{variable}: {problem}")
    return ops


def _record(plan: EnvironmentPlan, variable: str, value: str, effects: Mapping[str, str]) -> None:
    if value.strip(", "):
        change = EnvironmentChange(variable, value, tuple(effects), "; ".join(effects.values()) or "nothing")
        plan.changes = (*plan.changes, change)
