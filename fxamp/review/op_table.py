"""Our op lists beside torch.autocast's and grappler's, and where and why they differ."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tabulate import tabulate

from fxamp.errors import OptionError
from fxamp.lists import HERE, OpLists
from fxamp.lists.rows import read_toml
from fxamp.opnames import canonical_name

Reference = Literal["torch", "tensorflow"]

LEFT_ALONE = "-"
"""No entry: autocast runs the op in the dtypes it is given; grappler does not know it."""

COLOURS_OF_POLICY = {
    "lower_precision_fp": ("allow",),
    "fp32": ("deny",),
    "fp32_set_opt_dtype": ("deny",),
    "fp32_append_dtype": ("deny",),
    "banned": ("deny",),
    "promote": ("infer", "clear"),
}
"""Autocast's policy -> colours that do the same: infer and clear ops have the widest type at level strict."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One op in all systems."""

    op: str
    colour: str
    cuda: str
    cpu: str
    grappler: str
    reason: str

    def differs_from(self, reference: Reference) -> bool:
        """Whether that system states something else about the op; having no entry states nothing."""
        if reference == "tensorflow":
            return self.grappler not in (LEFT_ALONE, self.colour)
        policies = {self.cuda, self.cpu} - {LEFT_ALONE}
        return any(self.colour not in COLOURS_OF_POLICY[policy] for policy in policies)


def compare_ops(lists: OpLists) -> list[Comparison]:
    """Every op that any of the systems lists, by name."""
    cuda, cpu, grappler = (_reference()[system] for system in ("autocast_cuda", "autocast_cpu", "grappler"))
    return [
        Comparison(
            op=op,
            colour=lists.colour(op),
            cuda=cuda.get(op, LEFT_ALONE),
            cpu=cpu.get(op, LEFT_ALONE),
            grappler=grappler.get(op, LEFT_ALONE),
            reason=row.reason if (row := lists.row(op)) else "",
        )
        for op in sorted({*lists, *cuda, *cpu, *grappler})
    ]


def autocast_policies(device: str) -> Mapping[str, str]:
    """What torch.autocast does with an op on "cuda" or "cpu": op -> policy; the others run in the dtypes they get."""
    return _reference()[f"autocast_{device}"]


def differences(lists: OpLists, reference: str) -> list[Comparison]:
    """The ops of which `reference`, "torch" or "tensorflow", states something else than these lists do.

    Raises:
        OptionError: another reference.
    """
    if reference not in ("torch", "tensorflow"):
        raise OptionError(f"No reference {reference!r}. Allowed: torch, tensorflow.")
    name: Reference = "torch" if reference == "torch" else "tensorflow"
    return [comparison for comparison in compare_ops(lists) if comparison.differs_from(name)]


def op_table(comparisons: Iterable[Comparison], with_reason: bool = False) -> str:
    """The comparisons as text, one op a line."""
    headers = [
        "op",
        "fxamp",
        "autocast CUDA",
        "autocast CPU",
        "grappler",
        *(["reason"] if with_reason else []),
    ]
    rows = [dataclasses.astuple(comparison)[: len(headers)] for comparison in comparisons]
    return tabulate(rows, headers=headers, disable_numparse=True)


@functools.cache
def _reference() -> Mapping[str, Mapping[str, str]]:
    """System -> canonical op -> policy, or grappler's colour."""
    tables = read_toml(HERE / "reference.toml")
    ours = tables["grappler_names"]
    return {
        "autocast_cuda": _policies(tables["autocast_cuda"]),
        "autocast_cpu": _policies(tables["autocast_cpu"]),
        "grappler": {
            op: colour for colour, kinds in tables["grappler"].items() for kind in kinds for op in ours.get(kind, ())
        },
    }


def _policies(table: Mapping[str, Any]) -> dict[str, str]:
    return {canonical_name(name.partition(".")[0]): policy for policy, names in table.items() for name in names}
