"""Rows of the op lists: their form, and how they are read from TOML."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from fxamp.errors import OpListError, nearest

Colour = Literal["allow", "infer", "deny", "clear"]
COLOURS: tuple[Colour, ...] = get_args(Colour)
ROW_KEYS = ("reason", "operands")


@dataclasses.dataclass(frozen=True)
class Row:
    """One op's colour and why.

    Attributes:
        op: canonical name.
        operands: (position, keyword) of the arguments that are cast with the op, self being position 0; all
            others keep their dtype. None: every floating tensor argument, also inside lists.
        origin: who listed it: "default", an environment variable, or "lists=".
    """

    op: str
    colour: Colour
    reason: str
    operands: tuple[tuple[int, str], ...] | None = None
    origin: str = "default"


def read_toml(path: Path) -> dict[str, Any]:
    """The file as tables.

    Raises:
        OpListError: it is not TOML, or names a key twice.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise OpListError(f"{path}: not valid TOML, or an op stands twice in one list: {error}") from error


def read_list(path: Path, colour: Colour) -> list[Row]:
    """Rows of a file that is one list."""
    return list(_rows(path, colour, read_toml(path), "default"))


def read_lists(path: Path) -> list[Row]:
    """Rows of a user's file, whose tables are the four lists.

    Raises:
        OpListError: a table or row is malformed; names the file, the key and what is allowed.
    """
    tables = read_toml(path)
    for name, table in tables.items():
        if name not in COLOURS:
            raise OpListError(f"{path}: [{name}] is not a list.{nearest(name, COLOURS)} Allowed: {', '.join(COLOURS)}.")
        if not isinstance(table, Mapping):
            raise OpListError(f'{path}: {name} is {table!r}, allowed is a table [{name}] of rows: exp = "reason".')
    return [row for colour in COLOURS for row in _rows(path, colour, tables.get(colour, {}), f"lists={path}")]


def _rows(path: Path, colour: Colour, table: Mapping[str, Any], origin: str) -> Iterator[Row]:
    for op, value in table.items():
        fields = {"reason": value} if isinstance(value, str) else value
        where = f"{path}: {colour}: {op}"
        if not isinstance(fields, Mapping):
            raise OpListError(f'{where} is {value!r}. Allowed: "reason", or {{ reason = "...", operands = [...] }}.')
        yield Row(op, colour, _reason(where, fields), _operands(where, fields), origin)


def _reason(where: str, fields: Mapping[str, Any]) -> str:
    for key in fields:
        if key not in ROW_KEYS:
            raise OpListError(f"{where} has the key {key!r}.{nearest(key, ROW_KEYS)} Allowed: {', '.join(ROW_KEYS)}.")
    reason = fields.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        raise OpListError(f"{where} has no reason. Say in a few words why the op has this colour.")
    return reason


def _operands(where: str, fields: Mapping[str, Any]) -> tuple[tuple[int, str], ...] | None:
    if "operands" not in fields:
        return None
    texts = fields["operands"]
    if not isinstance(texts, list):
        raise OpListError(f'{where} has operands = {texts!r}. Allowed: a list such as ["0:input", "1:weight"].')
    return tuple(_operand(where, text) for text in texts)


def _operand(where: str, text: Any) -> tuple[int, str]:
    match = re.fullmatch(r"(\d+):([A-Za-z_]\w*)", text) if isinstance(text, str) else None
    if match is None:
        raise OpListError(f'{where} has the operand {text!r}. Allowed: "position:keyword", such as "0:input".')
    return int(match[1]), match[2]
