"""Which ops are worth low precision, which need fp32, and why: data in `*.toml`, read and changed here."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from fxamp.errors import OpListError, warn_once
from fxamp.lists.environment import EnvironmentChange, read_environment
from fxamp.lists.names import entered, op_name
from fxamp.lists.rows import COLOURS, Colour, Row, read_list, read_lists, read_toml

__all__ = ["COLOURS", "DOMAIN_SENSITIVE", "TRAITS", "Colour", "EnvironmentChange", "Op", "OpLists", "Row"]

Op = str | Callable[..., Any]
"""How a caller names an op: name, dotted path, `ns::op`, function, module class or autograd.Function."""

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OpLists(Mapping[str, str]):
    """The four lists as one frozen mapping from canonical op name to colour.

        lists = OpLists.default().override(deny=["softmax"], allow=[my_fused_gemm])
        lists["softmax"] == "deny"
        lists.colour("never_heard_of") == "unlisted"

    Attributes:
        environment: what `FXAMP_*LIST_*` variables changed, in the order in which they were applied.
    """

    _rows: Mapping[str, Row]
    environment: tuple[EnvironmentChange, ...] = ()

    @staticmethod
    def default() -> "OpLists":
        """The lists of this package, without the environment's changes."""
        return _default()

    @staticmethod
    def from_toml(path: str | Path) -> "OpLists":
        """A user's file over the defaults.

            [deny]
            softmax = "my logits reach 1e5"
            "my_project.layers.fused_norm" = { reason = "fp32 kernel", operands = ["0:x"] }

        Raises:
            OpListError: it is malformed, names no op of torch, or an op twice.
        """
        rows: dict[str, Row] = {}
        for row in read_lists(Path(path)):
            op = op_name(row.op, OpLists.default(), where=f"{path}: {row.colour}: ")
            if op in rows:
                raise OpListError(f"{path}: {op!r} stands in {rows[op].colour} and in {row.colour}; keep one.")
            rows[op] = dataclasses.replace(row, op=op)
        return OpLists({**OpLists.default()._rows, **rows})

    def override(
        self,
        allow: Iterable[Op] | Op = (),
        infer: Iterable[Op] | Op = (),
        deny: Iterable[Op] | Op = (),
        clear: Iterable[Op] | Op = (),
    ) -> "OpLists":
        """New lists in which these ops have that colour; an op leaves the list it stood in.

        Warns, once per process, of a plain Python function, which no graph holds as an op.

        Raises:
            OpListError: an op is named for two lists, or is neither torch's nor a dotted path or `ns::op`.
        """
        colours: dict[str, Colour] = {}
        for colour, ops in zip(COLOURS, (allow, infer, deny, clear), strict=True):
            for op in each(ops):
                name = op_name(op, self, where=f"override({colour}=...): ")
                if (problem := entered(op, name)) is not None:
                    warn_once(f"override({colour}=...): {problem}")
                if colours.setdefault(name, colour) != colour:
                    raise OpListError(f"override: {name!r} is named for {colours[name]} and for {colour}; keep one.")
        return self._moved({name: (colour, "lists=") for name, colour in colours.items()})

    def with_environment(self, environ: Mapping[str, str] = os.environ) -> "OpLists":
        """New lists with what `FXAMP_{ALLOW,INFER,DENY,CLEAR}LIST_{ADD,REMOVE}` ask for.

        Warns, once per process, of names that are no op and of what changed nothing. ADD moves an op from its
        old list; REMOVE leaves it unlisted, and is applied after every ADD.

        Raises:
            OpListError: an op is added to two lists.
        """
        plan = read_environment(environ, self)
        lists = self._moved(plan.moves)
        rows = {op: row for op, row in lists._rows.items() if op not in plan.removed}
        for warning in plan.warnings:
            warn_once(warning)
        return OpLists(rows, self.environment + plan.changes)

    def row(self, op: str) -> Row | None:
        """The op's row; None where it is unlisted."""
        return self._rows.get(op)

    def colour(self, op: str) -> Colour | Literal["unlisted"]:
        """The op's colour, or "unlisted"."""
        row = self._rows.get(op)
        return row.colour if row else "unlisted"

    def digest(self) -> str:
        """Short stable text that differs when a colour or operand differs."""
        lines = (f"{row.op} {row.colour} {row.operands}\n" for _, row in sorted(self._rows.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def __getitem__(self, op: str) -> str:
        return self._rows[op].colour

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, OpLists) else super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        counts = ", ".join(f"{sum(row.colour == colour for row in self._rows.values())} {colour}" for colour in COLOURS)
        return f"OpLists({counts})"

    def _moved(self, moves: Mapping[str, tuple[Colour, str]]) -> "OpLists":
        """These ops in new lists, op -> (colour, origin); they keep their operands.

        An op that stands there already keeps its reason, but from now on it is that origin's wish.
        """
        rows = dict(self._rows)
        for op, (colour, origin) in moves.items():
            old = rows.get(op)
            if old and old.colour == colour:
                rows[op] = dataclasses.replace(old, origin=origin)
            else:
                reason = f"{f'moved from {old.colour}' if old else 'added'} by {origin}"
                rows[op] = Row(op, colour, reason, old.operands if old else None, origin)
        return OpLists(rows, self.environment)


def each(ops: Iterable[Op] | Op) -> Iterable[Op]:
    """The ops that an argument names, one or several."""
    return ops if isinstance(ops, Iterable) and not isinstance(ops, str) and not callable(ops) else (ops,)


@functools.cache
def _default() -> OpLists:
    rows: dict[str, Row] = {}
    for colour in COLOURS:
        for row in read_list(HERE / f"{colour}.toml", colour):
            if row.op in rows:
                raise OpListError(f"{row.op!r} stands in {rows[row.op].colour}.toml and in {colour}.toml")
            rows[row.op] = row
    return OpLists(dict(sorted(rows.items())))


def _traits() -> tuple[Mapping[str, frozenset[str]], Mapping[str, tuple[int, ...]]]:
    tables = read_toml(HERE / "traits.toml")
    domain_sensitive = {op: tuple(positions) for op, positions in tables.pop("domain_sensitive").items()}
    return {trait: frozenset(ops) for trait, ops in tables.items()}, domain_sensitive


_named_sets, _domain_sensitive = _traits()
TRAITS: Mapping[str, frozenset[str]] = MappingProxyType(_named_sets)
"""Named sets of canonical ops; `traits.toml` says what each means."""
DOMAIN_SENSITIVE: Mapping[str, tuple[int, ...]] = MappingProxyType(_domain_sensitive)
"""Op -> positions of the arguments whose rounding may leave its domain, or be magnified without bound."""
