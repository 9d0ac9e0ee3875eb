"""What no linter sees in the package's code."""

import ast
import collections
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from fxamp.spellings import ALIASES

ROOT = Path(__file__).parent.parent / "fxamp"


def bound_twice(source: str) -> list[str]:
    """Names that a module binds more than once where it begins to run, and does so by no branch of an `if` or `try`."""
    counts: collections.Counter[str] = collections.Counter()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not node.decorator_list:
                counts[node.name] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            counts.update(name.id for name in names if isinstance(name.ctx, ast.Store))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            counts.update(alias.asname or alias.name for alias in node.names)
    return [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_binds_a_name_once(path):
    assert bound_twice(path.read_text()) == []


def test_the_check_can_fail():
    assert bound_twice("_SETS = {1}\ndef f():\n    return _SETS\n_SETS = {2}\n") == ["_SETS"]
    assert bound_twice("from a import b\nb = 1\n") == ["b"]


def op_words(source: str) -> set[str]:
    """Strings of one word, and the words of strings that are split."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "split":
            texts = [part.value for part in ast.walk(node.func.value) if isinstance(part, ast.Constant)]
            found |= {word for text in texts if isinstance(text, str) for word in text.split()}
    return found


@pytest.mark.parametrize("path", sorted((ROOT / "passes").glob("*.py")), ids=lambda path: path.name)
def test_passes_know_ops_by_their_canonical_names(path):
    """Under another spelling they would never meet one."""
    words = {word for word in op_words(path.read_text()) if not word.startswith("__")}
    assert {word: ALIASES[word] for word in words if ALIASES.get(word, word) != word} == {}


def test_the_words_are_found():
    assert op_words('A = frozenset("mul true_divide".split())\nB = ("ndimension",)') >= {"true_divide", "ndimension"}


MAKERS = {function.__name__ for function in _device_constructors()}


def without_device(source: str) -> list[int]:
    """Lines that make a tensor wherever the user's default device is."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        node.lineno
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in MAKERS
        and not {keyword.arg for keyword in node.keywords} & {"device", None}
    ]


PROGRAMS = ("counting", "demo")  # make models and data of their own, inside `with device:`
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.relative_to(ROOT).parts[0] not in PROGRAMS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tensors_of_fxamps_own_are_made_on_a_device_that_is_named(path):
    """`torch.set_default_device("cuda")` is the user's: a pinned copy, or a number for the host, is not to be there."""
    assert without_device(path.read_text()) == []


def test_a_tensor_on_no_device_is_found():
    assert without_device("torch.zeros(3)\ntorch.tensor(\n    1.0,\n)\n") == [1, 2]
    assert without_device('torch.zeros(3, device="cpu")\ntorch.ones(2, **options)\nx.new_zeros(3)\ntorch.zeros\n') == []
