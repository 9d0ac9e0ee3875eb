"""The command line: see what a conversion decides, without writing a script."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from fxamp import demo
from fxamp.cli_measure import run_audit, run_compare, run_diff, run_profile
from fxamp.convert import convert
from fxamp.dtypes import NAMES as DTYPE_NAMES
from fxamp.errors import FxampError, OptionError, nearest
from fxamp.lists import COLOURS, OpLists
from fxamp.lists.names import op_name
from fxamp.review.announce import configure_logging
from fxamp.review.dump import dump
from fxamp.review.explain import explain, reasons_of
from fxamp.review.op_table import compare_ops, differences, op_table
from fxamp.review.report import Report, report
from fxamp.review.rows import Row
from fxamp.review.table import node_table, overview
from fxamp.review.words import plural
from fxamp.targets import load_target

OK, LIMIT, WRONG = 0, 1, 2
"""Exit codes: all is well; a limit is broken or plans differ; the command could not do its work."""

_PROLOGUE = """\
Mixed precision as a compiler pass: every decision can be read before the first training step.

  fxamp inspect train.py:make_model --input 8x3x224x224   what runs low, what does not, what it costs
  fxamp explain train.py:make_model layer4.1.bn2          why, and what would change it
  fxamp explain train.py:make_model model.py:42           the same for a line of your code
  fxamp lists softmax exp                                 the colour and the reason of an op
  fxamp audit train.py:make_model --input 8x3x224x224     what float16 would do to its numbers
  fxamp lists --diff torch                                where they differ from torch.autocast, and why

A target is pkg.module:name or file.py:name. The name is an nn.Module, or a function (or class) giving one
when it is called without arguments. A function may give (model, inputs), the arguments of one call; else --input
gives their shapes, once for each: --input 8x128:int64 --input 8x128. FXAMP_* variables act as in a script:
FXAMP_DENYLIST_ADD=softmax fxamp inspect ... shows what moving an op to another list would do.
"""
_EPILOGUE = """\
exit codes: 0 all is well; 1 a limit (--max-casts, --min-low) is broken, or two plans differ; 2 the command could
not do its work, and says why.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    configure_logging()
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except FxampError as error:
        print(f"fxamp: {error}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


# ------------------------------------------------------------------------------------------------- commands


def _inspect(chosen: argparse.Namespace) -> int:
    model = _converted(chosen)
    built = report(model)
    if chosen.dump:
        dump(model, chosen.dump)
    if chosen.save_plan:
        built.save_plan(chosen.save_plan)
    if chosen.json:
        more = {"suggestions": [vars(move) for move in built.suggest()]} if chosen.suggest else {}
        print(json.dumps({**built.as_dict(), **more}, indent=2))
    else:
        print("\n".join(overview(built)))
        if chosen.suggest:
            moves = [f"suggestion: {move}" for move in built.suggest()]
            print("\n".join(moves) or "no move of a single op would save anything")
        if chosen.nodes:
            print("\n" + node_table(built))
        if chosen.dump:
            print(f"written to {chosen.dump}: open {Path(chosen.dump) / 'report.html'}")
    return _check_limits(built, chosen)


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


def _explain(chosen: argparse.Namespace) -> int:
    model = _converted(chosen)
    if chosen.json:
        chains = [[row_as_dict(row) for row in chain] for chain in reasons_of(model, chosen.name)]
        print(json.dumps({"name": chosen.name, "chains": chains, "text": explain(model, chosen.name)}, indent=2))
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


def _lists(chosen: argparse.Namespace) -> int:
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
        print(json.dumps([vars(comparison) for comparison in found], indent=2))
    else:
        print(op_table(found, with_reason=True))
        print(_lists_footer(len(found), chosen.diff))
    return OK


def _lists_footer(count: int, reference: str | None) -> str:
    if reference:
        return f"\n{count} ops differ from {'torch.autocast' if reference == 'torch' else 'TensorFlow grappler'}"
    return f"\n{count} ops. Move one: FXAMP_{{ALLOW,INFER,DENY,CLEAR}}LIST_ADD=op, or fxamp.OpLists in Python."


# --------------------------------------------------------------------------------------------------- models


def _converted(chosen: argparse.Namespace) -> nn.Module:
    model, example = load_target(chosen.target, chosen.input)
    return convert(
        model,
        dtype=_DTYPES[chosen.dtype],
        example_inputs=example,
        opt_level=chosen.opt_level,
        level=chosen.level,
        overrides=dict(map(_override, chosen.override)) or None,
        plan=getattr(chosen, "plan", None),
    )


_DTYPES: dict[str, Any] = {**DTYPE_NAMES, "auto": "auto", "default": None}


def _override(text: str) -> tuple[str, str]:
    name, equals, colour = text.rpartition("=")
    if not equals:
        raise OptionError(f"--override {text} is not of the form name=colour, such as '*.head=deny'.")
    return name, colour


# -------------------------------------------------------------------------------------------------- parsing


_TARGET_HELP = "pkg.module:factory or file.py:factory; it gives a model, or (model, inputs)"
_INPUT_HELP = (
    "shape of one argument of forward, 8x3x224x224 or 8x128:int64, once for each argument; not needed where the "
    "factory gives (model, inputs)"
)


class _Parser(argparse.ArgumentParser):
    """Names the nearest choice where one is misspelt, and points at --help instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        given = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        hint = nearest(given[1], re.findall(r"[\w-]+", given[2])) if given else ""
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        hint = hint or (nearest(unknown[1], _options_of(self)) if unknown else "")
        self.exit(WRONG, f"{self.prog}: {message}.{hint} See {self.prog} --help.\n")


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser and of its commands."""
    found: list[str] = []
    for action in parser._actions:
        found += action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            found += [option for command in action.choices.values() for option in _options_of(command)]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fxamp",
        description=_PROLOGUE,
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_explain(commands)
    _add_lists(commands)
    _add_diff(commands)
    _add_profile(commands)
    _add_compare(commands)
    _add_audit(commands)
    _add_demo(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, more: str = "") -> Any:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n\n{more}",
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser


def _add_inspect(commands: Any) -> None:
    more = (
        "fxamp inspect train.py:make_model --input 8x128:int64 --dump out    # open out/report.html\n"
        "fxamp inspect train.py:make_model --input 8x128:int64 --input 8x128 --nodes"
    )
    parser = _command(commands, "inspect", _inspect, "convert a model and show what was decided", more)
    _add_model(parser)
    parser.add_argument("--nodes", action="store_true", help="a line for every node")
    parser.add_argument("--dump", metavar="DIR", help="write before, after, diff, JSON, HTML and graph there")
    parser.add_argument("--suggest", action="store_true", help="try moves of ops between lists, rank what they save")
    parser.add_argument("--plan", metavar="FILE", help="decide as this saved plan does")
    parser.add_argument("--save-plan", metavar="FILE", help="write the decisions, to review and to compare in CI")
    parser.add_argument("--max-casts", type=int, metavar="N", help="exit with 1 if there are more activation casts")
    parser.add_argument("--min-low", type=float, metavar="SHARE", help="exit with 1 if fewer nodes (0 to 1) run low")


def _add_explain(commands: Any) -> None:
    more = "NAME: a node, a module path or glob ('encoder.*'), a line (model.py:42), a module class or an op."
    parser = _command(commands, "explain", _explain, "say why a node runs as it does, and what changes it", more)
    _add_model(parser)
    parser.add_argument("name", metavar="NAME", help="what to explain")


def _add_lists(commands: Any) -> None:
    more = (
        "allow: always low. infer: low where that is safe. deny: float32. clear: as its neighbours.\n"
        "Shown beside torch.autocast's policies on CUDA and CPU, and TensorFlow grappler's colours."
    )
    parser = _command(commands, "lists", _lists, "show the op lists, environment included", more)
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--diff", choices=("torch", "tensorflow"), help="only what that system does differently")
    parser.add_argument("--colour", choices=COLOURS, help="only this list")


def _add_diff(commands: Any) -> None:
    more = "fxamp inspect train.py:make_model --save-plan new.json; fxamp diff plans/model.json new.json"
    parser = _command(commands, "diff", run_diff, "compare two saved plans; exit code 1 where they differ", more)
    parser.add_argument("old", metavar="OLD.json")
    parser.add_argument("new", metavar="NEW.json")


def _add_profile(commands: Any) -> None:
    more = "fxamp profile train.py:make_model train.py:batches --loss train.py:loss_fn --plot ranges.png"
    parser = _command(commands, "profile", run_profile, "measure ranges of values and gradients on real data", more)
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("batches", metavar="BATCHES", help="pkg.module:name of batches or of what gives them")
    parser.add_argument("--loss", metavar="NAME", help="pkg.module:name of loss_fn(output) or loss_fn(output, targets)")
    parser.add_argument("--save", metavar="FILE", help="write them as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw them (needs matplotlib)")


def _add_compare(commands: Any) -> None:
    more = "fxamp compare train.py:make_model --input 8x128 --tolerance 1e-3     # which nodes to deny for that"
    parser = _command(commands, "compare", _compare, "every node's value in mixed precision against float32", more)
    _add_model(parser)
    parser.add_argument("--loss", metavar="NAME", help="pkg.module:name of loss_fn(output): compare gradients too")
    parser.add_argument(
        "--tolerance", type=float, metavar="T", help="find the deny entries that bring outputs within it"
    )
    parser.add_argument("--max-runs", type=int, default=64, metavar="N", help="bound of that search")


def _compare(chosen: argparse.Namespace) -> int:
    return run_compare(chosen, _converted(chosen))


def _add_audit(commands: Any) -> None:
    more = (
        "fxamp audit train.py:make_model --input 8x128\n\n"
        "The model is run once, in float32, and not converted: for those who stay on torch.autocast or torch.compile."
    )
    parser = _command(commands, "audit", run_audit, "find what low precision would do to a model's numbers", more)
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help=_INPUT_HELP)
    parser.add_argument("--sarif", action="store_true", help="print SARIF 2.1.0 for code review")
    fail_on = ("error", "warning", "never")
    parser.add_argument("--fail-on", choices=fail_on, default="error", help="exit with 1 at such a finding or graver")


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="train two small real tasks in fp32, autocast and fxamp")
    demo.add_arguments(parser)
    parser.set_defaults(run=demo.run)


def _add_model(parser: Any) -> None:
    _add_options(parser, ("target",))


def _add_options(parser: Any, targets: Iterable[str]) -> None:
    for name in targets:
        parser.add_argument(name, metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help=_INPUT_HELP)
    parser.add_argument("--dtype", choices=tuple(_DTYPES), default="default", help="default: autocast's")
    help_levels = "O1: casts; O2: low parameters with float32 masters; O3: all low"
    parser.add_argument("--opt-level", choices=("O1", "O2", "O3"), default="O1", help=help_levels)
    help_level = "how far low precision spreads; default balanced"
    parser.add_argument("--level", choices=("strict", "balanced", "aggressive"), default="balanced", help=help_level)
    help_override = "as convert(overrides=): module path, glob or node = colour; may be repeated"
    parser.add_argument("--override", action="append", default=[], metavar="NAME=COLOUR", help=help_override)
