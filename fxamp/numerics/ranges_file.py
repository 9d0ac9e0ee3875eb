"""Read what `Ranges.save` wrote, and say what is wrong with a file that was edited."""

import json
import math
import os
from collections import Counter
from typing import Any

import torch

from fxamp.dtypes import LOW_DTYPES, dtype_name
from fxamp.errors import OptionError
from fxamp.numerics.histogram import HIGHEST, LOWEST, Histogram, no_counts
from fxamp.numerics.places import text_of
from fxamp.numerics.ranges import NodeRange, Ranges
from fxamp.whole import checked_path

_LOW = {dtype_name(low): low for low in LOW_DTYPES}


def load_ranges(path: "str | os.PathLike[str]") -> Ranges:
    """Read what `Ranges.save` wrote.

    Raises:
        OptionError: it is not there, or something else; the message names the entry.
    """
    found = checked_path(path, "the ranges cannot be read")
    try:
        return _ranges(json.loads(found.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        text = f"{str(path)!r} holds no ranges ({error}). Write them with fxamp.profile(...).save(path)."
        raise OptionError(text) from error


class _Place:
    """An object of the file, which knows where it stands there: `nodes[3].values`."""

    def __init__(self, given: Any, path: str = "") -> None:
        self.path = path
        self.given = _checked(given, dict, path or "the file", "an object")

    def where(self, key: str) -> str:
        return f"{self.path}.{key}".lstrip(".")

    def read(self, key: str, kind: type | tuple[type, ...], words: str) -> Any:
        if key not in self.given:
            raise ValueError(f"{self.where(key)} is missing")
        return _checked(self.given[key], kind, self.where(key), words)

    def at(self, key: str) -> "_Place":
        return _Place(self.read(key, dict, "an object"), self.where(key))

    def text(self, key: str) -> str:
        return str(self.read(key, str, "a text"))

    def number(self, key: str) -> float:
        value = self.read(key, (int, float), "a number")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{self.where(key)} is {value!r}, not a finite number from 0 on")
        return float(value)

    def count(self, key: str) -> int:
        value = self.read(key, int, "a count")
        if not 0 <= value < 2**63:
            raise ValueError(f"{self.where(key)} is {value!r}, not a count from 0 on")
        return int(value)

    def counts(self, key: str) -> torch.Tensor:
        """Counts by exponent."""
        found, place = no_counts(), self.at(key)
        for exponent in place.given:
            if exponent not in _EXPONENTS:
                raise ValueError(
                    f"{place.path} has {exponent!r}, and exponents of float32 are {LOWEST} to {HIGHEST - 1}"
                )
            found[int(exponent) - LOWEST] = place.count(exponent)
        return found


_EXPONENTS = frozenset(map(str, range(LOWEST, HIGHEST)))


def _checked(value: Any, kind: type | tuple[type, ...], where: str, words: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.40}, not {words}")
    return value


def _ranges(read: Any) -> Ranges:
    file = _Place(read)
    name = file.text("low_dtype")
    if name not in _LOW:
        raise ValueError(f"low_dtype is {name!r}, not {' or '.join(map(repr, _LOW))}")
    entries = enumerate(file.read("nodes", list, "a list"))
    counts: Counter[tuple[str, str, str]] = Counter()
    nodes = [_node(_Place(entry, f"nodes[{place}]"), counts) for place, entry in entries]
    has_weights = "weight_gradients" in file.given  # earlier files have none
    weights = _histogram(file.at("weight_gradients")) if has_weights else Histogram()
    return Ranges({node.name: node for node in nodes}, file.count("batches"), _LOW[name], weights)


def _node(entry: _Place, counts: Counter[tuple[str, str, str]]) -> NodeRange:
    """One node.

    Args:
        counts: nodes of one place by now. Earlier files have no numbers, but the nodes in their order.
    """
    name, op, module, source = (entry.text(key) for key in ("name", "op", "module", "source"))
    text = entry.text("text") if "text" in entry.given else text_of(source)
    served = entry.text("served") if "served" in entry.given else ""
    found = NodeRange(name, op, module, source, text, served=served)
    shared = found.place[:3]
    found.number = entry.count("number") if "number" in entry.given else counts[shared]
    counts[shared] += 1
    found.values, found.gradients = _histogram(entry.at("values")), _histogram(entry.at("gradients"))
    return found


def _histogram(entry: _Place) -> Histogram:
    found = Histogram(entry.counts("exponents"), zeros=entry.count("zeros"), largest=entry.number("largest"))
    found.infinite, found.nan = entry.count("infinite"), entry.count("nan")
    if "powers" in entry.given:  # earlier files tell no ties from their neighbours
        found.powers = entry.counts("powers")
        found.rounded_up = {low: entry.at("rounded_up").counts(name) for name, low in _LOW.items()}
    return found
