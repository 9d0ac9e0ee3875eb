"""What the user's source says about a name."""

import ast
import functools
import linecache
from collections.abc import Iterator


@functools.lru_cache(maxsize=1024)
def names_of_dtypes(file: str, line: int) -> frozenset[str]:
    """The local names that, around a line, hold the dtype of some value and nothing else.

        dt = x.dtype
        y = y.to(dt)          # here "dt" is one

    A name that is also an argument, or is bound in any other way, is left out; so is everything where the source
    cannot be read.
    """
    function = _innermost_function(file, line)
    if function is None:
        return frozenset()
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    bound: dict[str, bool] = dict.fromkeys(arguments, False)
    for name, value in _bindings(function):
        bound[name] = bound.get(name, True) and isinstance(value, ast.Attribute) and value.attr == "dtype"
    return frozenset(name for name, is_dtype in bound.items() if is_dtype)


def converts_relatively(file: str, line: int) -> bool:
    """Whether a call around a line converts to the dtype of another value.

    y = f(x.to(torch.float32)).to(
        x.dtype
    )
    """
    function = _innermost_function(file, line)
    names = names_of_dtypes(file, line)
    for node in ast.walk(function) if function is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            asked = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dtype")]
            is_here = node.lineno <= line <= (node.end_lineno or 0)
            if is_here and any(is_dtype_of_a_value(ast.unparse(value), names) for value in asked):
                return True
    return False


def is_dtype_of_a_value(text: str, names: frozenset[str]) -> bool:
    """Whether an argument of `.to` in the source is what a dtype was read into: `x.dtype`, `input_dtype`."""
    return text.endswith("dtype") or text in names


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _innermost_function(file: str, line: int) -> Function | None:
    found: Function | None = None
    for node in ast.walk(_tree(file)):
        if isinstance(node, Function) and node.lineno <= line <= (node.end_lineno or 0):
            found = node if found is None or node.lineno >= found.lineno else found
    return found


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _bindings(function: Function) -> Iterator[tuple[str, ast.expr | None]]:
    """Each name that the function binds, with the value of a plain assignment and None for any other way."""
    plain = {
        id(node.targets[0]): node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and len(node.targets) == 1
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id, plain.get(id(node))
