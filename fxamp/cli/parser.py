"""The commands and their options, with a help that teaches."""

import argparse
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from fxamp import __version__, demo
from fxamp.cli.measure import run_audit, run_compare, run_diff, run_profile
from fxamp.cli.review import DTYPES, converted, run_explain, run_inspect, run_lists
from fxamp.cli.types import WRONG, new_file, number, path
from fxamp.errors import OptionError, nearest
from fxamp.lists import COLOURS
from fxamp.passes.policy import LEVELS

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
exit codes: 0 all is well; 1 what was asked for does not hold: a limit (--max-casts, --min-low, --tolerance) is broken,
two plans differ, audit found something as grave as --fail-on, a claim of the demo failed; 2 the command could not do
its work, or the target's code failed or called sys.exit(), and says why on stderr. With --json, stdout holds JSON and
nothing else.
"""
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
        hint = hint or (_hint(self, unknown[1]) if unknown else "")
        self.exit(WRONG, f"{self.prog}: {message}.{hint} See {self.prog} --help.\n")


def _hint(parser: argparse.ArgumentParser, option: str) -> str:
    """Which commands have an option that was given to another one, or else the nearest option."""
    owners = _owners(parser)
    if option in owners:
        return f" {option} is an option of {' and '.join(owners[option])}."
    return nearest(option, owners)


def _owners(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """The options of a parser and of its commands, each with those that have it."""
    found: dict[str, list[str]] = {}
    for action in parser._actions:
        for option in action.option_strings:
            found.setdefault(option, []).append(parser.prog)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                for option, progs in _owners(command).items():
                    found.setdefault(option, []).extend(progs)
    return found


def parser() -> argparse.ArgumentParser:
    """The whole command line's."""
    whole = _Parser(
        prog="fxamp",
        description=_PROLOGUE,
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"fxamp {__version__}")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_explain(commands)
    _add_lists(commands)
    _add_diff(commands)
    _add_profile(commands)
    _add_compare(commands)
    _add_audit(commands)
    _add_demo(commands)
    return whole


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    more: str = "",
    formats: Mapping[str, str] | None = None,
) -> Any:
    """A command's parser; `formats`: options that print other than text, with their help, besides --json."""
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.\n\n{more}",
        epilog=_EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command=name)
    one_of = parser.add_mutually_exclusive_group()
    for option, help_format in {"--json": "print JSON for programs", **(formats or {})}.items():
        one_of.add_argument(option, action="store_true", help=help_format)
    return parser


def _add_inspect(commands: Any) -> None:
    more = (
        "fxamp inspect train.py:make_model --input 8x128:int64 --dump out    # open out/report.html\n"
        "fxamp inspect train.py:make_model --input 8x128:int64 --input 8x128 --nodes"
    )
    parser = _command(commands, "inspect", run_inspect, "convert a model and show what was decided", more)
    _add_model(parser)
    parser.add_argument("--nodes", action="store_true", help="a line for every node")
    parser.add_argument(
        "--dump", type=path, metavar="DIR", help="write before, after, diff, JSON, HTML and graph there"
    )
    parser.add_argument("--suggest", action="store_true", help="try moves of ops between lists, rank what they save")
    parser.add_argument("--plan", type=path, metavar="FILE", help="decide as this saved plan does")
    parser.add_argument(
        "--save-plan", type=new_file, metavar="FILE", help="write the decisions, to review and to compare in CI"
    )
    parser.add_argument(
        "--max-casts", type=number(int, 0), metavar="N", help="exit with 1 if there are more activation casts"
    )
    parser.add_argument(
        "--min-low", type=number(float, 0, 1), metavar="SHARE", help="exit with 1 if fewer nodes (0 to 1) run low"
    )


def _add_explain(commands: Any) -> None:
    more = (
        "fxamp explain train.py:make_model LayerNorm      # its reasons, what would change them, what float32 costs\n"
        "fxamp explain train.py:make_model 'encoder.*'\n\n"
        "NAME: a node, a module path or glob ('encoder.*'), a line (model.py:42), a module class or an op."
    )
    parser = _command(commands, "explain", run_explain, "say why a node runs as it does, and what changes it", more)
    _add_model(parser)
    parser.add_argument("name", metavar="NAME", help="what to explain")


def _add_lists(commands: Any) -> None:
    more = (
        "allow: always low. infer: low where that is safe. deny: float32. clear: as its neighbours.\n"
        "Shown beside torch.autocast's policies on CUDA and CPU, and TensorFlow grappler's colours.\n\n"
        "fxamp lists softmax nn.GELU      # two ops\n"
        "fxamp lists --diff torch         # what differs from torch.autocast, and why"
    )
    parser = _command(commands, "lists", run_lists, "show the op lists, environment included", more)
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these ops")
    parser.add_argument("--diff", choices=("torch", "tensorflow"), help="only what that system does differently")
    parser.add_argument("--colour", choices=COLOURS, help="only this list")


def _add_diff(commands: Any) -> None:
    more = "fxamp inspect train.py:make_model --save-plan new.json; fxamp diff plans/model.json new.json"
    parser = _command(commands, "diff", run_diff, "compare two saved plans; exit code 1 where they differ", more)
    parser.add_argument("old", type=path, metavar="OLD.json")
    parser.add_argument("new", type=path, metavar="NEW.json")


def _add_profile(commands: Any) -> None:
    more = (
        "fxamp profile train.py:make_model train.py:batches --loss train.py:loss_fn --plot ranges.png\n"
        "fxamp profile train.py:make_model train.py:batches --save ranges.json\n"
        "fxamp inspect train.py:make_model --ranges ranges.json      # what does not fit runs in float32"
    )
    parser = _command(commands, "profile", run_profile, "measure ranges of values and gradients on real data", more)
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("batches", metavar="BATCHES", help="pkg.module:name of batches or of what gives them")
    parser.add_argument("--loss", metavar="NAME", help="pkg.module:name of loss_fn(output) or loss_fn(output, targets)")
    parser.add_argument("--save", type=new_file, metavar="FILE", help="write them as JSON")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="draw them (needs matplotlib)")


def _add_compare(commands: Any) -> None:
    more = (
        "fxamp compare train.py:make_model --input 8x128 --tolerance 1e-3     # which nodes to deny for that\n"
        "fxamp compare train.py:make_model --loss train.py:loss --dtype fp16 --scale 65536    # and the gradients\n\n"
        "error: norm of the difference by the norm of the float32 value. introduced: what of it the node itself adds.\n"
        "to 0: share of the numbers that are 0 in mixed precision only. An underflow line names who loses them first."
    )
    parser = _command(commands, "compare", _compare, "every node's value in mixed precision against float32", more)
    _add_model(parser)
    parser.add_argument("--loss", metavar="NAME", help="pkg.module:name of loss_fn(output): compare gradients too")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="loss scale; float16 gradients need one")
    parser.add_argument(
        "--tolerance",
        type=number(float, 0),
        metavar="T",
        help="find the deny entries that bring outputs, and the loss, within it",
    )
    parser.add_argument("--max-runs", type=number(int, 1), default=64, metavar="N", help="bound of that search")


def _compare(chosen: argparse.Namespace) -> int:
    if not 0 < chosen.scale < math.inf:
        raise OptionError(f"--scale {chosen.scale:g}: a loss scale is positive, such as 65536.")
    return run_compare(chosen, converted(chosen))


def _add_audit(commands: Any) -> None:
    more = (
        "fxamp audit train.py:make_model --input 8x128\n\n"
        "The model is run once, in float32, and not converted: for those who stay on torch.autocast or torch.compile."
    )
    text, formats = (
        "find what low precision would do to a model's numbers",
        {"--sarif": "print SARIF 2.1.0 for code review"},
    )
    parser = _command(commands, "audit", run_audit, text, more, formats)
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help=_INPUT_HELP)
    fail_on = ("error", "warning", "never")
    parser.add_argument("--fail-on", choices=fail_on, default="error", help="exit with 1 at such a finding or graver")


def _add_demo(commands: Any) -> None:
    text = "train two small real tasks in fp32, autocast and fxamp"
    parser = _command(commands, "demo", demo.run, text, (demo.__doc__ or "").partition("\n\n")[2])
    demo.add_arguments(parser)


def _add_model(parser: Any) -> None:
    parser.add_argument("target", metavar="TARGET", help=_TARGET_HELP)
    parser.add_argument("--input", action="append", default=[], metavar="SHAPE", help=_INPUT_HELP)
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="default", help="default: autocast's")
    help_levels = "O1: casts; O2: low parameters with float32 masters; O3: all low"
    parser.add_argument("--opt-level", choices=("O1", "O2", "O3"), default="O1", help=help_levels)
    help_level = "how far low precision spreads; default balanced"
    parser.add_argument("--level", choices=LEVELS, default="balanced", help=help_level)
    help_ranges = "decide by measured ranges: the file of fxamp profile --save"
    parser.add_argument("--ranges", type=path, metavar="FILE", help=help_ranges)
    help_override = "as convert(overrides=): module path, glob or node = colour; may be repeated"
    parser.add_argument("--override", action="append", default=[], metavar="NAME=COLOUR", help=help_override)
