"""From what a user writes (a node, a module, a source line, an op) to the rows it means."""

import contextlib
import fnmatch
import types
from collections.abc import Callable, Sequence
from pathlib import PurePath

from torch import nn

from fxamp.capture.functions_of import codes_of
from fxamp.errors import OpListError, OptionError, nearest
from fxamp.lists.names import op_name
from fxamp.model.views import base_of
from fxamp.review.rows import Row

_NAMES = "a node, a module path such as 'encoder.layer.3', a source line such as 'model.py:42', a module class or an op"


def find_rows(rows: Sequence[Row], name: str) -> tuple[str, list[Row]]:
    """What kind of name it is, and its rows in graph order.

        find_rows(rows, "softmax_1")      == ("node", [...])
        find_rows(rows, "encoder.norm")   == ("module", [...])     # also a glob: "*.norm"
        find_rows(rows, "model.py:12")    == ("source line", [...])
        find_rows(rows, "LayerNorm")      == ("module class", [...])
        find_rows(rows, "softmax")        == ("op", [...])          # where no node has that name; also "nn.Softmax"

    Raises:
        OptionError: nothing has that name; it gives the nearest ones. Or there is no name.
    """
    if not isinstance(name, str):
        raise OptionError(f"{type(name).__qualname__} is no name. Give a string: {_NAMES}.")
    if not name.strip():
        raise OptionError(f"{name!r} names nothing. Give {_NAMES}.")
    name = name.strip()
    for kind, matches in _KINDS:
        found = [row for row in rows if matches(row, name)]
        if found:
            return kind, found
    for spelling in (name, f"nn.{name}"):  # a model that is a LayerNorm itself has no module of that class in it
        with contextlib.suppress(OpListError):
            op = op_name(spelling, [row.op for row in rows])
            if found := [row for row in rows if row.op == op]:
                return "op", found
    raise OptionError(_unknown(rows, name))


def forward_at(model: nn.Module, name: str) -> str | None:
    """The forward in which a source line stands, in words, None where it is no line of one."""
    for path, module in model.named_modules():
        kind = base_of(module)
        code: types.CodeType | None = getattr(kind.forward, "__code__", None)
        if code is None:
            continue
        lines = {line for each in codes_of(code) for _, _, line in each.co_lines() if line}
        if any(_is_at(f"{code.co_filename}:{line}", name) for line in range(min(lines), max(lines) + 1)):
            return f"the forward of {path or 'the model'} ({kind.__name__})"
    return None


def in_module(row: Row, path: str) -> bool:
    """Whether the row stands in the module at `path` (a glob matches too), or below it."""
    if any(letter in path for letter in "*?["):
        parts = row.module.split(".")
        return any(fnmatch.fnmatchcase(".".join(parts[:end]), path) for end in range(1, len(parts) + 1))
    return row.module == path or row.module.startswith(f"{path}.")


def _at_line(row: Row, name: str) -> bool:
    return bool(row.source) and _is_at(row.source, name)


def _is_at(source: str, name: str) -> bool:
    """Whether "/path/model.py:42" is what "model.py:42" means."""
    file, colon, number = name.rpartition(":")
    if not colon or not number.isdigit():
        return False
    path, _, line = source.rpartition(":")
    tail = PurePath(file).parts
    return line == number and PurePath(path).parts[-len(tail) :] == tail


_KINDS: tuple[tuple[str, Callable[[Row, str], bool]], ...] = (
    ("node", lambda row, name: row.name == name),
    ("module", in_module),
    ("source line", _at_line),
    ("module class", lambda row, name: row.module_class == name),
    ("op", lambda row, name: row.op == name),
    ("module class", lambda row, name: row.module_class.lower() == name.lower()),
    ("op", lambda row, name: row.op == name.lower()),
)


def _unknown(rows: Sequence[Row], name: str) -> str:
    modules = {".".join(row.module.split(".")[:end]) for row in rows for end in range(1, row.module.count(".") + 2)}
    known = {row.name for row in rows} | modules | {row.module_class for row in rows} | {row.op for row in rows}
    known |= {row.line for row in rows}
    hint = _nearest_lines(rows, name) or nearest(name, sorted(known - {""}))
    return (
        f"{name!r} is no node, module, source line or op of this model.{hint} "
        "print(fxamp.report(model)) lists every node."
    )


def _nearest_lines(rows: Sequence[Row], name: str) -> str:
    """A hint at the lines around `file.py:12` that made nodes, "" where the file made none."""
    file, _, number = name.rpartition(":")
    lines = {int(row.line.rpartition(":")[2]) for row in rows if file and row.line.rpartition(":")[0] == file}
    if not lines or not number.isdigit():
        return ""
    around = [*sorted(line for line in lines if line < int(number))[-1:], *sorted(lines - {*range(int(number))})[:1]]
    return f" Lines near it that made nodes: {', '.join(f'{file}:{line}' for line in around)}."
