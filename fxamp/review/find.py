"""From what a user writes (a node, a module, a source line, an op) to the rows it means."""

import fnmatch
from collections.abc import Callable, Sequence
from pathlib import PurePath

from fxamp.errors import OptionError, nearest
from fxamp.review.rows import Row


def find_rows(rows: Sequence[Row], name: str) -> tuple[str, list[Row]]:
    """What kind of name it is, and its rows in graph order.

        find_rows(rows, "softmax_1")      == ("node", [...])
        find_rows(rows, "encoder.norm")   == ("module", [...])     # also a glob: "*.norm"
        find_rows(rows, "model.py:12")    == ("source line", [...])
        find_rows(rows, "LayerNorm")      == ("module class", [...])
        find_rows(rows, "softmax")        == ("op", [...])          # where no node has that name

    Raises:
        OptionError: nothing has that name; it gives the nearest ones.
    """
    name = name.strip()
    for kind, matches in _KINDS:
        found = [row for row in rows if matches(row, name)]
        if found:
            return kind, found
    raise OptionError(_unknown(rows, name))


def in_module(row: Row, path: str) -> bool:
    """Whether the row stands in the module at `path` (a glob matches too), or below it."""
    if any(letter in path for letter in "*?["):
        parts = row.module.split(".")
        return any(fnmatch.fnmatchcase(".".join(parts[:end]), path) for end in range(1, len(parts) + 1))
    return row.module == path or row.module.startswith(f"{path}.")


def _at_line(row: Row, name: str) -> bool:
    file, colon, number = name.rpartition(":")
    if not colon or not number.isdigit() or not row.source:
        return False
    path, _, line = row.source.rpartition(":")
    tail = PurePath(file).parts
    return line == number and PurePath(path).parts[-len(tail) :] == tail


_KINDS: tuple[tuple[str, Callable[[Row, str], bool]], ...] = (
    ("node", lambda row, name: row.name == name),
    ("module", in_module),
    ("source line", _at_line),
    ("module class", lambda row, name: row.module_class == name),
    ("op", lambda row, name: row.op == name),
    ("module class", lambda row, name: row.module_class.lower() == name.lower()),
)


def _unknown(rows: Sequence[Row], name: str) -> str:
    modules = {".".join(row.module.split(".")[:end]) for row in rows for end in range(1, row.module.count(".") + 2)}
    known = {row.name for row in rows} | modules | {row.module_class for row in rows} | {row.op for row in rows}
    known |= {row.line for row in rows}
    return (
        f"{name!r} is no node, module, source line or op of this model.{nearest(name, sorted(known - {''}))} "
        "print(fxamp.report(model)) lists every node."
    )
