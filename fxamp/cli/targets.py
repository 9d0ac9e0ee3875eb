"""What the command line means by `pkg.module:factory`: a model, and the inputs of one call."""

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from fxamp.errors import FxampError, OptionError, nearest


def load_target(text: str, inputs: list[str]) -> tuple[nn.Module, Any]:
    """The model that `text` names, and example inputs.

        load_target("my_project.models:resnet", ["8x3x224x224"])
        load_target("train.py:make_model", [])

    Args:
        text: `module:name` or `file.py:name`. The name is a model, or a function or class that gives one when
            called without arguments; it may also give (model, example_inputs).
        inputs: shapes of one call's arguments, "8x128" or "8x128:int64"; they win over the factory's.

    Raises:
        OptionError: nothing is there; names the part that is wrong.
    """
    found = load_name(text)
    made = _call(text, found) if callable(found) and not isinstance(found, nn.Module) else found
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise OptionError(f"{text} gives a {type(model).__qualname__}, not an nn.Module or (nn.Module, inputs).")
    return model, tuple(map(parse_input, inputs)) if inputs else example


def load_batches(text: str) -> Iterable[Any]:
    """The batches that `text` names: a list, a loader, or a function that gives either or yields them.

    Raises:
        OptionError: nothing is there, or nothing that can be gone through.
    """
    found = load_name(text)
    made = _call(text, found) if callable(found) and not isinstance(found, Iterable) else found
    if isinstance(made, (torch.Tensor, str)) or not isinstance(made, Iterable):
        raise OptionError(
            f"{text} gives a {type(made).__qualname__}, not batches. Give a list, a DataLoader, or a generator "
            "function, whose items are each the inputs of one call."
        )
    return made


def _call(text: str, factory: Callable[[], Any]) -> Any:
    """What a factory gives; what it raises is named with its line."""
    if problem := _misfit(factory, ()):
        raise OptionError(f"{text} is called without arguments, and that does not fit: {problem}.")
    return run_named(text, factory)


def _misfit(function: Callable[..., Any], given: tuple[str, ...]) -> str:
    """Why a function cannot be called with these positional arguments; "" where it can, or has no signature."""
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin
        pass
    return ""


def run_named(text: str, run: Callable[[], Any]) -> Any:
    """What `run`, the user's code, gives.

    Raises:
        OptionError: whatever it raises that is no FxampError; sys.exit() is no success of the command's.
    """
    try:
        return run()
    except FxampError:
        raise
    except (Exception, SystemExit) as error:
        raise OptionError(f"{text} {failure(error)}") from error


_LONGEST = 500
"""Characters of a foreign error's text that are repeated."""


def failure(error: BaseException) -> str:
    """What the user's code raised and at which of its lines, to stand behind the name of what was done."""
    kind, text = type(error).__name__, str(error)
    where = _users_line(error)
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        where, text = f"{error.filename}:{error.lineno}", error.msg
    said = f"{kind}: {textwrap.shorten(text, _LONGEST, placeholder=' ...')}"
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        said = f"it calls sys.exit({code}). Put what a script does below if __name__ == '__main__'"
    return f"fails at {where}: {said}. FXAMP_LOG_LEVEL=DEBUG shows the traceback."


_PACKAGE = os.path.join(Path(__file__).parent, "")
_FOREIGN = ("<", _PACKAGE, *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""How the paths of files begin that are not the user's: made code, fxamp, Python's own and what was installed."""


def _users_line(error: BaseException) -> str:
    """The deepest line of the user's code, or else, where all of it was installed, of a file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_FOREIGN)]
    files = [frame for frame in frames if not frame.filename.startswith("<")]
    last = (own or files or frames)[-1]
    return f"{last.filename}:{last.lineno}"


def is_of_print(error: OSError) -> bool:
    """Whether it is standard output that failed: under a line of fxamp's own, and on no file by name."""
    return error.filename is None and traceback.extract_tb(error.__traceback__)[-1].filename.startswith(_PACKAGE)


def load_name(text: str) -> Any:
    """What `module:name` or `file.py:name` names.

    Raises:
        OptionError: nothing is there.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise OptionError(f"{text!r} is not of the form pkg.module:factory (or file.py:factory).")
    module = _module(where)
    found = run_named(text, lambda: getattr(module, name, None))
    if found is None:
        names = [known for known in vars(module) if not known.startswith("_")]
        raise OptionError(f"{where} has no {name!r}.{nearest(name, names)}")
    return found


def load_loss(text: str, *calls: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    """The loss function that `text` names.

        load_loss("train.py:loss", ("output",), ("output", "targets"))

    Args:
        calls: what it may be called with; it takes one of them.

    Raises:
        OptionError: nothing is there, nothing that can be called, or nothing that can be called so.
    """
    found = load_name(text)
    if not callable(found):
        raise OptionError(f"{text} gives no loss: it is a {type(found).__qualname__}. Give a function of the output.")
    problems = [_misfit(found.forward if isinstance(found, nn.Module) else found, call) for call in calls]
    if problems and all(problems):
        shown = " or ".join(f"({', '.join(call)})" for call in calls)
        raise OptionError(f"{text} is called with {shown}, and that does not fit: {problems[0]}.")
    return cast(Callable[..., torch.Tensor], found)


def _module(where: str) -> ModuleType:
    if where.endswith(".py"):
        return _module_of_file(Path(where))
    if not all(part.isidentifier() for part in where.split(".")):
        raise OptionError(f"{where!r} is no name of a module, such as pkg.module. Give that, or file.py:name.")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return cast(ModuleType, run_named(where, lambda: _imported(where)))


def _imported(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
            raise
        raise OptionError(
            f"there is no module {error.name!r}. Run it in the folder that holds the module, or give file.py:name."
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise OptionError(f"there is no file {str(path)!r}.")
    if path.stem in sys.modules and getattr(sys.modules[path.stem], "__file__", None) == str(path.resolve()):
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    loader = spec.loader
    try:
        run_named(str(path), lambda: loader.exec_module(module))
    except BaseException:
        del sys.modules[path.stem]  # as an import does: what was begun is no module
        raise
    return module


def parse_input(text: str) -> torch.Tensor:
    """A tensor for a shape: parse_input("2x16:int64") has zeros, parse_input("2x3") normal random numbers.

    Raises:
        OptionError: no shape, no dtype of torch, or torch cannot make it.
    """
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        known = [known for known, value in vars(torch).items() if isinstance(value, torch.dtype)]
        raise OptionError(f"--input {text}: {name!r} is no dtype of torch.{nearest(name, known)}")
    try:
        sizes = [int(size) for size in shape.split("x")] if shape else []
    except ValueError:
        sizes = [-1]
    if any(size < 0 for size in sizes):
        raise OptionError(f"--input {text}: {shape!r} is no shape. Write it as 8x3x224x224.")
    try:
        return _example(sizes, dtype)
    except (RuntimeError, TypeError) as error:  # too large, or a dtype of torch's that few functions know
        reason = textwrap.shorten(str(error).partition("\n")[0], _LONGEST, placeholder=" ...")
        raise OptionError(
            f"--input {text}: torch makes no such tensor ({reason}). Give another shape or dtype."
        ) from error


def _example(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0), device="cpu").to(dtype)
    return torch.zeros(sizes, dtype=dtype, device="cpu")
