"""What goes wrong in the user's code is exit code 2 and one sentence with the line, never a traceback, never 0 or 1."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fxamp.cli import main

MODELS = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).exp() + 1

def make():
    return Net(), (torch.randn(4, 8),)

def loss(output):
    raise KeyError("x")

def leaves(output):
    sys.exit(0)

def breaks_off():
    yield torch.randn(4, 8)
    raise OSError("disk gone")

def loses_its_worker():
    yield torch.randn(4, 8)
    raise BrokenPipeError("a worker is gone")

def three(output, targets, weights):
    return output.sum()

def two(output, targets):
    return output.sum()

mean = nn.MSELoss()

def good():
    return [torch.randn(4, 8)]

def through_torch():
    return torch.zeros(2) @ torch.zeros(3)

number = 3
"""
FILES = {
    "user_models.py": MODELS,
    "inner_import.py": "import nonexistent_zzz\n",
    "unfinished.py": "x = 1\ndef f(:\n",
    "script.py": "import sys\nfrom user_models import make\nsys.exit(0)\n",
    "fails.py": "import sys\nsys.exit('no data')\n",
    "lazy.py": "def __getattr__(name):\n    raise RuntimeError('not here')\n",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, content in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(content))
        sys.modules.pop(name.removesuffix(".py"), None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


PROFILE = ("profile", "user_models.py:make")
CASES = [
    (("inspect", "inner_import:x"), "inner_import.py:1: ModuleNotFoundError: No module named 'nonexistent_zzz'"),
    (("inspect", "unfinished:x"), "unfinished.py:2: SyntaxError: invalid syntax"),
    (("inspect", "unfinished.py:x"), "unfinished.py:2: SyntaxError: invalid syntax"),
    (("inspect", "..user_models:make"), "'..user_models' is no name of a module"),
    (("inspect", ".user_models:make"), "'.user_models' is no name of a module"),
    (("inspect", "script.py:make", "--max-casts", "0"), "script.py:3: it calls sys.exit(0)"),
    (("inspect", "script:make", "--max-casts", "0"), "script.py:3: it calls sys.exit(0)"),
    (("inspect", "fails.py:make"), "fails.py:2: it calls sys.exit('no data')"),
    (("inspect", "lazy.py:make"), "lazy.py:2: RuntimeError: not here"),
    (("inspect", "user_models.py:through_torch"), "user_models.py:43: RuntimeError: "),
    ((*PROFILE, "user_models.py:breaks_off"), "user_models.py:25: OSError: disk gone"),
    ((*PROFILE, "user_models.py:loses_its_worker"), "user_models.py:29: BrokenPipeError: a worker is gone"),
    ((*PROFILE, "user_models.py:good", "--loss", "user_models.py:loss"), "user_models.py:18: KeyError: 'x'"),
    ((*PROFILE, "user_models.py:good", "--loss", "user_models.py:leaves"), "user_models.py:21: it calls sys.exit(0)"),
    ((*PROFILE, "user_models.py:good", "--loss", "user_models.py:number"), "user_models.py:number gives no loss"),
    (("compare", "user_models.py:make", "--loss", "user_models.py:loss"), "user_models.py:18: KeyError: 'x'"),
    (("audit", "user_models.py:make", "--input", "4x8:int64"), "user_models.py:12: RuntimeError: mat1 and mat2"),
    (("audit", "user_models.py:make", "--input", "4x-8"), "'4x-8' is no shape"),
    *(
        ((command, "user_models.py:Net", *name, "--input", size), f"fxamp: --input {size}: torch makes no such tensor")
        for command, *name in (("inspect",), ("explain", "a"), ("compare",), ("audit",))
        for size in ("1000000000x1000000", "99999999999999999999x8:int64")
    ),
    (
        ("compare", "user_models.py:make", "--loss", "user_models.py:three"),
        "user_models.py:three is called with (output)",
    ),
    (("compare", "user_models.py:make", "--loss", "user_models.py:two"), "does not fit: missing a required argument"),
    (
        ("compare", "user_models.py:make", "--loss", "user_models.py:mean"),
        "user_models.py:mean is called with (output)",
    ),
    (
        (*PROFILE, "user_models.py:good", "--loss", "user_models.py:three"),
        "user_models.py:three is called with (output) or (output, targets), and that does not fit",
    ),
]


@pytest.mark.parametrize(("arguments", "said"), CASES, ids=[" ".join(arguments) for arguments, _ in CASES])
def test_what_the_users_code_raises_is_one_sentence_with_its_line(arguments, said, capsys):
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert said in told and told.startswith("fxamp: ") and told.count("\n") == 1, told
    assert main(arguments) == 2, "and again: nothing half-made is left"


def test_the_traceback_is_there_for_who_asks(folder):
    environment = {**os.environ, "FXAMP_LOG_LEVEL": "DEBUG", "PYTHONPATH": str(Path(__file__).parents[2])}
    given = ["-m", "fxamp", *PROFILE, "user_models.py:breaks_off"]
    done = subprocess.run([sys.executable, *given], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "Traceback" in done.stderr and "raise OSError" in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("arguments", [("lists", "exp"), ("lists",), ("inspect", "user_models.py:make", "--json")])
def test_a_full_disk_behind_stdout_is_exit_code_2(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fxamp", *arguments],
            cwd=folder,
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment,
        )
    said = done.stderr.decode()
    assert done.returncode == 2 and said.startswith("fxamp: ") and "No space left on device" in said, said
    assert "Traceback" not in said and "Exception ignored" not in said


def test_a_reader_that_has_seen_enough_is_no_error(folder):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for given in ("lists", "lists exp"):
        text = f"{sys.executable} -m fxamp {given} | true; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "user_models.py:make", "exp", "--suggest"), "--suggest is an option of fxamp inspect. See"),
        (("lists", "--sarif"), "--sarif is an option of fxamp audit. See"),
    ],
)
def test_an_option_of_another_command_is_told_as_such(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    told = capsys.readouterr().err
    assert said in told and "Did you mean" not in told


EMPTY = [
    ("inspect", "user_models.py:make", "--save-plan"),
    ("inspect", "user_models.py:make", "--dump"),
    ("inspect", "user_models.py:make", "--plan"),
    ("inspect", "user_models.py:make", "--ranges"),
    ("profile", "user_models.py:make", "user_models.py:good", "--save"),
    ("profile", "user_models.py:make", "user_models.py:good", "--plot"),
    ("diff", "plan.json", ""),
    ("diff", "", "plan.json"),
]


@pytest.mark.parametrize("arguments", EMPTY, ids=" ".join)
def test_an_empty_path_is_said_at_once(arguments, capsys, folder):
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, ""] if arguments[-1].startswith("--") else arguments)
    out, told = capsys.readouterr()
    assert "the path is empty" in told and told.count("\n") == 1 and not out, told
    assert sorted(folder.iterdir()) == before


NEW_FILES = [arguments for arguments in EMPTY if arguments[-1] in ("--save-plan", "--save", "--plot")]


@pytest.mark.parametrize("arguments", NEW_FILES, ids=" ".join)
@pytest.mark.parametrize(("path", "said"), [("none/file", "there is no directory 'none'"), (".", "'.' is a directory")])
def test_where_no_file_can_be_written_is_said_before_the_run(arguments, path, said, capsys, folder):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, path])
    out, told = capsys.readouterr()
    assert said in told and told.count("\n") == 1 and not out, told


@pytest.mark.parametrize(
    "command", [("profile", "user_models.py:make", "user_models.py:good"), ("compare", "user_models.py:make")]
)
def test_an_empty_loss_is_said(command, capsys):
    assert main([*command, "--loss", ""]) == 2
    assert "'' is not of the form pkg.module:factory" in capsys.readouterr().err


def test_two_formats_at_once_are_refused(capsys):
    for given in (("--sarif", "--json"), ("--json", "--sarif")):
        with pytest.raises(SystemExit, match="2"):
            main(["audit", "user_models.py:make", *given])
        out, told = capsys.readouterr()
        assert f"argument {given[1]}: not allowed with argument {given[0]}" in told and told.count("\n") == 1
        assert not out


def test_a_name_that_stdout_cannot_write_is_escaped(folder):
    (folder / "mod\u00e8le.py").write_text(textwrap.dedent(MODELS))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONIOENCODING": "ascii"}
    given = [sys.executable, "-m", "fxamp", "explain", "mod\u00e8le.py:make", "exp"]
    done = subprocess.run(given, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "mod\\xe8le.py" in done.stdout, done.stderr
