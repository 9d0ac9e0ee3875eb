"""A plan as a JSON file: a line for each node, and what is said of one that somebody edited wrongly."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError, nearest
from fxamp.passes.policy import LEVELS
from fxamp.review.match import Place, place_of_key
from fxamp.whole import checked_path

FORMAT = 2
_READ = (1, 2)
"""Formats that are read; the first has precisions alone."""
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "low_dtype": tuple(map(dtype_name, LOW_DTYPES)),
    "opt_level": ("O0", "O1", "O2", "O3"),
    "level": LEVELS,
}
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, str), "a text"),
    "casts": (lambda value: type(value) is int and value >= 0, "a number of 0 or more"),
    "weight_casts": (lambda value: type(value) is int and value >= 0, "a number of 0 or more"),
    "graphs": (lambda value: isinstance(value, dict), "a table of graphs by title"),
}
_OF_PARTS = "blocks"  # in plans of models whose parts have graphs of their own
_STORED = "parameters"  # in plans of O2 and O3

Graphs = dict[str, dict[str, str]]
Places = dict[str, dict[str, Place]]
Blocks = dict[str, tuple[str, ...]]


def line_of(decided: str, place: Place | None) -> str:
    """What a file has of a node: "low | its line | what it reads | its shape"."""
    return " | ".join((decided, place.text, place.reads, place.shape) if place is not None else (decided,))


def text_of(fields: Mapping[str, Any], graphs: Mapping[str, Mapping[str, str]]) -> str:
    """The whole file, whose differences read well."""
    return json.dumps({"fxamp_plan": FORMAT, **fields, "graphs": graphs}, indent=1) + "\n"


def read_plan(path: "str | os.PathLike[str]") -> dict[str, Any]:
    """The fields of a plan, with `places`: where the nodes of its graphs stand.

    Raises:
        OptionError: it is not there, or not a plan; names the file, and the key that is wrong.
    """
    found = checked_path(path, "the plan cannot be read")
    try:
        read = json.loads(found.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"the plan {str(path)!r} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{str(path)!r} is not a plan: it is not JSON ({error}).") from error
    if not isinstance(read, dict) or "fxamp_plan" not in read:
        raise OptionError(f"{str(path)!r} is not a plan. Write one with fxamp.report(model).save_plan(path).")
    if read["fxamp_plan"] not in _READ:
        known = " and ".join(map(str, _READ))
        raise OptionError(f"{str(path)!r} is a plan of format {read['fxamp_plan']!r}; this fxamp reads {known}.")
    missing = sorted({*_CHOICES, *_KINDS} - read.keys())
    if missing:
        raise OptionError(f"the plan {str(path)!r} lacks {', '.join(missing)}.")
    _check_fields(read, path)
    graphs, places = _graphs_of(read["graphs"], path)
    fields = {name: read[name] for name in (*_CHOICES, *_KINDS) if name != "graphs"}
    blocks, parameters = _blocks_of(read.get(_OF_PARTS, {}), graphs, path), _parameters_of(read.get(_STORED, {}), path)
    return {**fields, "graphs": graphs, "places": places, _OF_PARTS: blocks, _STORED: parameters}


def _wrong(path: "str | os.PathLike[str]", problem: str) -> OptionError:
    return OptionError(f"the plan {str(path)!r}: {problem}. Mend it, or save the plan again.")


def _check_fields(read: Mapping[str, Any], path: "str | os.PathLike[str]") -> None:
    for name, allowed in _CHOICES.items():
        if read[name] not in allowed:
            hint = nearest(read[name], allowed) if isinstance(read[name], str) else ""
            raise _wrong(path, f"{name} is {_shown(read[name])}.{hint} Allowed: {', '.join(allowed)}")
    for name, (is_right, kind) in _KINDS.items():
        if not is_right(read[name]):
            raise _wrong(path, f"{name} is {_shown(read[name])}, not {kind}")


def _shown(value: Any) -> str:
    """A value in a message: lists and tables by their kind alone."""
    return f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)


def _graphs_of(read: Mapping[str, Any], path: "str | os.PathLike[str]") -> tuple[Graphs, Places]:
    graphs: Graphs = {}
    places: Places = {}
    for title, nodes in read.items():
        if not isinstance(nodes, dict):
            raise _wrong(path, f"graphs: {title} is {_shown(nodes)}, not a table of nodes")
        graphs[title], places[title] = {}, {}
        for key, value in nodes.items():
            decided, bar, described = str(value).partition(" | ")
            parts = described.rsplit(" | ", 2)  # a line may hold a bar itself, what stands behind it does not
            if decided not in ("low", "high") or (bar and len(parts) != 3):
                allowed = "Allowed: low, high, and behind it nothing or ' | line | reads | shape'"
                raise _wrong(path, f"{title}: {key} is {value!r}. {allowed}")
            graphs[title][key] = decided
            if bar:
                text, reads, shape = parts
                places[title][key] = place_of_key(key)._replace(text=text, reads=reads, shape=shape)
    return graphs, places


def _blocks_of(read: Any, graphs: Graphs, path: "str | os.PathLike[str]") -> Blocks:
    if not isinstance(read, dict):
        raise _wrong(path, f"{_OF_PARTS} is {_shown(read)}, not a table of modules by graph")
    for title, paths in read.items():
        if title not in graphs:
            raise _wrong(path, f"{_OF_PARTS}: there is no graph {title!r}.{nearest(title, graphs)}")
        if not (isinstance(paths, list) and paths and all(isinstance(each, str) and each for each in paths)):
            raise _wrong(path, f"{_OF_PARTS}: {title} is {_shown(paths)}, not a list of modules")
    return {title: tuple(paths) for title, paths in read.items()}


def _parameters_of(read: Any, path: "str | os.PathLike[str]") -> dict[str, str]:
    if not isinstance(read, dict):
        raise _wrong(path, f"{_STORED} is {_shown(read)}, not a table of precisions by parameter")
    for name, stored in read.items():
        if stored not in ("low", "high"):
            raise _wrong(path, f"{_STORED}: {name} is {_shown(stored)}. Allowed: low, high")
    return read
