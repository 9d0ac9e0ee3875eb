"""The commands that show decisions: inspect, explain, lists."""

import argparse
import json
import sys
from typing import Any

from torch import nn

from fxamp.capture.inputs import call_arguments
from fxamp.cli.targets import load_target, run_named
from fxamp.cli.types import LIMIT, OK
from fxamp.convert import convert
from fxamp.dtypes import NAMES as DTYPE_NAMES
from fxamp.errors import OptionError, nearest
from fxamp.lists import OpLists
from fxamp.lists.names import op_name
from fxamp.review.dump import dump
from fxamp.review.explain import explain, reasons_of
from fxamp.review.op_table import compare_ops, differences, op_table
from fxamp.review.report import Report, report
from fxamp.review.rows import Row
from fxamp.review.table import node_table, overview
from fxamp.words import plural


def run_inspect(chosen: argparse.Namespace) -> int:
    """What was decided; 1 where a limit is broken."""
    model = converted(chosen)
    built = report(model)
    if chosen.json:
        more = {"suggestions": [vars(move) for move in built.suggest()]} if chosen.suggest else {}
        print(json.dumps({**built.as_dict(), **more}, indent=2), file=chosen.stdout)
    else:
        print("\n".join(overview(built)))
        if chosen.suggest:
            moves = [f"suggestion: {move}" for move in built.suggest()]
            print("\n".join(moves) or "no move of a single op would save anything")
        if chosen.nodes:
            print("\n" + node_table(built))
    _write(model, built, chosen)
    return _check_limits(built, chosen)


def _write(model: nn.Module, built: Report, chosen: argparse.Namespace) -> None:
    """The files that were asked for: behind what is printed, which is so not lost where they cannot be written."""
    if chosen.save_plan is not None:
        built.save_plan(chosen.save_plan)
        _print_unless_json(chosen, f"written: {chosen.save_plan}; compare it with another by fxamp diff")
    if chosen.dump is not None:
        page = dump(model, chosen.dump) / "report.html"
        _print_unless_json(chosen, f"written to {chosen.dump}" + (f": open {page}" if page.exists() else ""))


def _print_unless_json(chosen: argparse.Namespace, text: str) -> None:
    if not chosen.json:
        print(text)


def _check_limits(built: Report, chosen: argparse.Namespace) -> int:
    broken = []
    if chosen.max_casts is not None and built.casts > chosen.max_casts:
        broken.append(f"{plural(built.casts, 'cast')}, more than --max-casts {chosen.max_casts}")
    share = built.low_precision_nodes / max(1, built.total_nodes)
    if chosen.min_low is not None and share < chosen.min_low:
        broken.append(f"{share:.0%} of the nodes in {built.low_dtype} are less than --min-low {chosen.min_low:g}")
    for text in broken:
        print(f"fxamp: {text}", file=sys.stderr)
    return LIMIT if broken else OK


def run_explain(chosen: argparse.Namespace) -> int:
    """Why, as text or as chains of rows."""
    model = converted(chosen)
    if chosen.json:
        chains = [[row_as_dict(row) for row in chain] for chain in reasons_of(model, chosen.name)]
        found = {"name": chosen.name, "chains": chains, "text": explain(model, chosen.name)}
        print(json.dumps(found, indent=2), file=chosen.stdout)
    else:
        print(explain(model, chosen.name))
    return OK


def row_as_dict(row: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    return {
        **vars(row),
        "shape": list(row.shape) if row.shape is not None else None,
        "inputs": list(row.inputs),
    }


def run_lists(chosen: argparse.Namespace) -> int:
    """The op lists, or where they differ from another system's."""
    lists = OpLists.default().with_environment()
    found = differences(lists, chosen.diff) if chosen.diff else compare_ops(lists)
    if chosen.ops:
        known = [comparison.op for comparison in compare_ops(lists)]
        wanted = [op if op in known else op_name(op, known) for op in chosen.ops]
        for op in wanted:
            if op not in known:
                raise OptionError(f"{op!r} is on no list.{nearest(op, known)} Unlisted ops run as they are written.")
        found = [comparison for comparison in found if comparison.op in wanted]
    if chosen.colour:
        found = [comparison for comparison in found if comparison.colour == chosen.colour]
    if chosen.json:
        print(json.dumps([vars(comparison) for comparison in found], indent=2), file=chosen.stdout)
    else:
        print(op_table(found, with_reason=True))
        print(_lists_footer(len(found), chosen.diff))
    return OK


def _lists_footer(count: int, reference: str | None) -> str:
    if reference:
        return f"\n{count} ops differ from {'torch.autocast' if reference == 'torch' else 'TensorFlow grappler'}"
    return f"\n{count} ops. Move one: FXAMP_{{ALLOW,INFER,DENY,CLEAR}}LIST_ADD=op, or fxamp.OpLists in Python."


def converted(chosen: argparse.Namespace) -> nn.Module:
    """The target, converted as the options say."""
    model, example = load_target(chosen.target, chosen.input)
    made = convert(
        model,
        dtype=DTYPES[chosen.dtype],
        example_inputs=example,
        opt_level=chosen.opt_level,
        level=chosen.level,
        overrides=dict(map(_override, chosen.override)) or None,
        plan=getattr(chosen, "plan", None),
        ranges=chosen.ranges,
    )
    if example is not None and not _is_captured(made):
        run_named(f"a call of {chosen.target}", lambda: _call(made, example))
    return made


_MOST_CALLS = 3
"""The first may tell that Dynamo holds too little of it, the next makes the graphs of its parts."""


def _call(model: nn.Module, example: Any) -> None:
    """Call a model that symbolic capture does not hold until its calls have made its graphs, or those of its parts."""
    args, kwargs = call_arguments(example, "the inputs")
    for _ in range(_MOST_CALLS):
        if not _is_captured(model):
            model(*args, **kwargs)


def _is_captured(model: nn.Module) -> bool:
    """Whether there are graphs that run, and not only what Dynamo would make of fake tensors."""
    built = report(model)
    return bool(built.captures) and not built.is_preview


DTYPES: dict[str, Any] = {**DTYPE_NAMES, "auto": "auto", "default": None}


def _override(text: str) -> tuple[str, str]:
    name, equals, colour = text.rpartition("=")
    if not equals:
        raise OptionError(f"--override {text} is not of the form name=colour, such as '*.head=deny'.")
    return name, colour
