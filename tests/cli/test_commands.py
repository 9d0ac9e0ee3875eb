"""The command line: what it prints, and its exit codes."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fxamp.cli import main
from tests import choosing

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.a(x)).exp()

def with_inputs():
    return Net(), (torch.zeros(2, 8),)

made = Net()

class Two(Net):
    def forward(self, tokens, x):
        return super().forward(x) + tokens.float().mean()

def loss(output):
    return output.float().mean()

def seeded():
    torch.manual_seed(0)
    return Net(), (torch.linspace(-1, 1, 32).reshape(4, 8),)

def chaotic(output):
    return (output.float() * 1e7).sin().sum()

def batches():
    return [torch.zeros(4, 8), torch.ones(4, 8)]

def no_batches():
    return []

number = 3

def needs(width):
    return Net()

def broken():
    return 1 / 0

class Talks(Net):
    def forward(self, x):
        print("in forward")
        return super().forward(x)

def talks():
    print("in a factory")
    return Talks(), (torch.zeros(2, 8),)

def talking_batches():
    print("in a loader")
    yield torch.ones(4, 8)

def talking_loss(output):
    print("in a loss")
    return output.float().mean()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_models.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "half_written.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("cli_models", None)
    return tmp_path


def run(*arguments: str) -> int:
    return main(arguments)


@pytest.mark.parametrize("target", ["cli_models:Net", "cli_models.py:Net", "cli_models:made", "cli_models:with_inputs"])
def test_inspect_finds_the_model_however_it_is_named(target, capsys):
    assert run("inspect", target, "--input", "4x8", "--dtype", "fp16") == 0
    said = capsys.readouterr().out
    assert said.startswith("Converted 2/9 nodes to float16 precision using 1 cast(s) to float16"), said


def test_each_argument_of_forward_has_its_input(capsys):
    assert run("inspect", "cli_models:Two", "--input", "4:int64", "--input", "4x8", "--nodes") == 0
    said = capsys.readouterr().out
    assert "preview" not in said and "4x8" in said and "input_1" in said


@pytest.mark.parametrize("inputs", [("cli_models:with_inputs",), ("cli_models:Net", "--input", "4x8")])
def test_audit_takes_its_inputs_from_the_factory_or_the_command_line(inputs, capsys):
    assert run("audit", *inputs) == 0
    assert capsys.readouterr().out.startswith("Net: ")


@pytest.mark.parametrize("dtype", ["fp16", "half", "float16"])
def test_a_dtype_has_the_names_that_convert_takes(dtype, capsys):
    assert run("inspect", "cli_models:with_inputs", "--dtype", dtype, "--json") == 0
    assert json.loads(capsys.readouterr().out)["low_dtype"] == "float16"


def test_while_conversion_is_disabled_commands_say_so(monkeypatch, capsys):
    monkeypatch.setenv("FXAMP_DISABLE", "1")
    assert run("inspect", "cli_models:with_inputs", "--nodes", "--suggest") == 0
    assert "Not converted: FXAMP_DISABLE=1" in capsys.readouterr().out
    assert run("explain", "cli_models:with_inputs", "a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["chains"] == []


def test_inspect_as_json(capsys):
    assert run("inspect", "cli_models:with_inputs", "--json", "--dtype", "bf16") == 0
    read = json.loads(capsys.readouterr().out)
    assert read["low_dtype"] == "bfloat16" and read["casts"] == 2


def test_inspect_as_json_holds_suggestions(capsys):
    assert run("inspect", "cli_models:with_inputs", "--json", "--suggest") == 0
    read = json.loads(capsys.readouterr().out)
    assert isinstance(read["suggestions"], list)
    assert all({"move", "casts", "launches", "nbytes", "why_not"} <= move.keys() for move in read["suggestions"])


def test_inspect_lists_nodes_and_dumps(capsys, folder):
    assert run("inspect", "cli_models:with_inputs", "--nodes", "--dump", "out") == 0
    assert "layer_norm" in capsys.readouterr().out
    assert (folder / "out" / "graph.diff").exists()


@pytest.mark.parametrize("limit, code", [("2", 0), ("1", 1)])
def test_more_casts_than_allowed_is_exit_code_1(limit, code, capsys):
    assert run("inspect", "cli_models:with_inputs", "--max-casts", limit) == code
    assert ("2 casts, more than --max-casts 1" in capsys.readouterr().err) == (code == 1)


@pytest.mark.parametrize("share, code", [("0.2", 0), ("0.9", 1)])
def test_fewer_low_nodes_than_asked_is_exit_code_1(share, code):
    assert run("inspect", "cli_models:with_inputs", "--min-low", share) == code


def test_the_environment_and_overrides_act(monkeypatch, capsys):
    assert run("inspect", "cli_models:with_inputs", "--override", "a=deny") == 0
    assert "Converted 0/9" in capsys.readouterr().out
    monkeypatch.setenv("FXAMP_INFERLIST_ADD", "exp")
    assert run("inspect", "cli_models:with_inputs") == 0
    assert "environment: FXAMP_INFERLIST_ADD=exp: exp: deny -> infer (1 nodes" in capsys.readouterr().out


def test_explain_answers_the_newcomers_question(capsys):
    assert run("explain", "cli_models:with_inputs", "LayerNorm", "--level", "strict", "--dtype", "fp16") == 0
    said = capsys.readouterr().out
    assert "layer_norm (`layer_norm`, deny) runs in float32" in said
    assert 'convert(..., level="balanced") lets it run low' in said
    assert "what it costs: " in said


def test_explain_as_json_has_a_chain_for_every_node(capsys):
    assert run("explain", "cli_models:with_inputs", "exp", "--json") == 0
    read = json.loads(capsys.readouterr().out)
    assert [[row["reason_kind"] for row in chain] for chain in read["chains"]] == [["list"]]


def test_lists_of_single_ops(capsys):
    assert run("lists", "exp", "linear") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["exp", "deny"], ["linear", "allow"]]
    assert run("lists", "nn.Linear") == 0
    assert "linear" in capsys.readouterr().out


def test_lists_of_one_colour_as_json(capsys):
    assert run("lists", "--colour", "allow", "--json") == 0
    assert {row["colour"] for row in json.loads(capsys.readouterr().out)} == {"allow"}


@pytest.mark.parametrize("reference, op", [("torch", "softmax"), ("tensorflow", "log_softmax")])
def test_differences_from_other_systems(reference, op, capsys):
    assert run("lists", "--diff", reference, "--json") == 0
    rows = {row["op"]: row for row in json.loads(capsys.readouterr().out)}
    assert "exp" not in rows
    assert all(row["reason"] or row["colour"] == "unlisted" for row in rows.values())
    assert op in rows


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("inspect", "cli_models"), "'cli_models' is not of the form pkg.module:factory"),
        (("inspect", "cli_modles:Net"), "there is no module 'cli_modles'"),
        (("inspect", "no_such.py:Net"), "there is no file 'no_such.py'"),
        (("inspect", "cli_models:Nett"), "cli_models has no 'Nett'. Did you mean 'Net'?"),
        (("inspect", "cli_models:number"), "cli_models:number gives a int"),
        (("inspect", "cli_models:Net", "--input", "4xx8"), "'4xx8' is no shape"),
        (("inspect", "cli_models:Net", "--input", "4x8:flaot32"), "Did you mean 'float32'?"),
        (("inspect", "cli_models:Net", "--override", "a"), "--override a is not of the form"),
        (("inspect", "cli_models:Net", "--override", "a=dney"), "'dney' is not allowed"),
        (("explain", "cli_models:Net", "norn"), "Did you mean 'norm'?"),
        (("lists", "sofmax"), "Did you mean 'softmax'?"),
        (("explain", "cli_models:with_inputs", "cli_models.py:13"), "Lines near it that made nodes: cli_models.py:12."),
        (
            ("inspect", "cli_models:needs"),
            "cli_models:needs is called without arguments, and that does not fit: missing",
        ),
        (("inspect", "cli_models:broken"), "cli_models.py:45: ZeroDivisionError: division by zero"),
        (("inspect", "half_written.py:Net"), "half_written.py fails at"),
        (("lists", "GELU"), "Did you mean 'gelu'?"),
        (("audit", "cli_models:Net"), "there are no inputs to run cli_models:Net on: give --input SHAPE"),
        (("compare", "cli_models:Net"), "let the factory return (model, inputs)"),
        (("audit", "cli_models:Net", "--input", "2x9"), "when it is called with (float32 tensor of shape (2, 9))"),
        (("inspect", "cli_models:Net", "--input", "2x8", "--input", "2x8"), "do not fit Net.forward"),
    ],
)
def test_mistakes_are_exit_code_2_and_name_the_culprit(arguments, said, capsys):
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err


def test_compare_and_its_search(capsys):
    target = ("compare", "cli_models:with_inputs", "--dtype", "bf16", "--input", "4x8")
    assert run(*target) == 0
    assert capsys.readouterr().out.startswith("largest relative error of an output: ")
    assert run(*target, "--tolerance", "1e-12") == 1
    assert "overrides={" in capsys.readouterr().out
    assert run(*target, "--tolerance", "0.5", "--json", "--loss", "cli_models:loss") == 0
    assert json.loads(capsys.readouterr().out)["nodes"] == []
    target = ("compare", "cli_models:seeded", "--dtype", "bf16", "--tolerance", "0.05")
    assert run(*target) == 0
    assert run(*target, "--loss", "cli_models:chaotic") == 1, "the loss is further off"
    assert "overrides={" in capsys.readouterr().out


def test_profile_measures_saves_and_feeds(capsys, folder):
    target = ("profile", "cli_models:Net", "cli_models:batches", "--loss", "cli_models:loss")
    assert run(*target, "--save", "ranges.json") == 0
    assert "2 batches; loss scale" in capsys.readouterr().out
    assert json.loads((folder / "ranges.json").read_text())["batches"] == 2
    assert run("profile", "cli_models:Net", "cli_models:no_batches") == 2
    assert "profile got no batches" in capsys.readouterr().err


def test_plans_and_suggestions_of_inspect(capsys, folder):
    assert run("inspect", "cli_models:with_inputs", "--save-plan", "plan.json", "--suggest") == 0
    assert "suggestion: infer=['exp']" in capsys.readouterr().out
    assert run("inspect", "cli_models:with_inputs", "--plan", "plan.json", "--level", "strict") == 0
    assert "Converted 2/9" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [(), ("inspect",), ("explain",), ("lists",), ("diff",), ("profile",), ("compare",), ("audit",), ("demo",)],
)
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*command, "--help")
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert "exit codes: 0 all is well" in said
    if command:
        assert "--json" in said and said.count("fxamp") >= 2, "an example"
    if not command:
        assert "fxamp inspect train.py:make_model" in said
    if command in (("inspect",), ("explain",), ("audit",)):
        assert "(model, inputs)" in said and "once for each argument" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("inspekt",), "invalid choice: 'inspekt'"),
        (("inspekt",), "Did you mean 'inspect'? See fxamp --help."),
        (("inspect", "cli_models:Net", "--opt-level", "o2"), "Did you mean 'O2'? See fxamp inspect --help."),
        (("inspect", "cli_models:Net", "--dtype", "fp61"), "Did you mean 'fp16'?"),
        (("inspect", "cli_models:Net", "--level", "Strict"), "Did you mean 'strict'?"),
        (("inspect", "cli_models:Net", "--overide", "a=deny"), "Did you mean '--override'?"),
        (("inspect",), "the following arguments are required: TARGET. See fxamp inspect --help."),
    ],
)
def test_a_misspelt_command_or_option_is_exit_code_2_with_the_nearest(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["layer_norm", "LayerNorm", "nn.LayerNorm", "F.layer_norm", "LAYER_NORM"])
def test_explain_takes_an_op_by_any_of_its_names(name, capsys):
    assert run("explain", "cli_models:with_inputs", name) == 0
    assert "`layer_norm`" in capsys.readouterr().out


def test_python_m_fxamp_runs(folder):
    done = subprocess.run([sys.executable, "-m", "fxamp", "lists", "exp"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "deny" in done.stdout


COMMANDS = {
    "inspect": ("cli_models:with_inputs",),
    "explain": ("cli_models:with_inputs", "exp"),
    "lists": ("exp",),
    "diff": ("plan.json", "plan.json"),
    "profile": ("cli_models:Net", "cli_models:batches"),
    "compare": ("cli_models:with_inputs",),
    "audit": ("cli_models:with_inputs",),
    "demo": ("--tasks", "digits", "--device", "cpu", "--workers", "1", "--steps", "2"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_gives_json_and_nothing_else(command, capsys):
    """`fxamp` of the table above names every command there is."""
    if command == "demo":
        pytest.importorskip("sklearn")
    if command == "diff":
        assert run("inspect", "cli_models:with_inputs", "--save-plan", "plan.json", "--json") == 0
        capsys.readouterr()
    assert run(command, *COMMANDS[command], "--json") in (0, 1)
    json.loads(capsys.readouterr().out)


TALKING = {
    "inspect": ("cli_models:talks", "--json"),
    "explain": ("cli_models:talks", "exp", "--json"),
    "profile": ("cli_models:talks", "cli_models:talking_batches", "--loss", "cli_models:talking_loss", "--json"),
    "compare": ("cli_models:talks", "--loss", "cli_models:talking_loss", "--json"),
    "audit": ("cli_models:talks", "--sarif"),
}


@pytest.mark.parametrize("command", TALKING)
def test_what_the_users_code_prints_is_no_part_of_the_json(command, capsys):
    assert run(command, *TALKING[command]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert "in a factory" in said.err


def test_no_command_is_left_out(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    listed = capsys.readouterr().out.partition("COMMAND\n")[2].partition("\n\n")[0]
    assert {line.split()[0] for line in listed.splitlines()} == set(COMMANDS)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as stopped:
        run("--version")
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("fxamp ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profile", "cli_models:Net", "cli_models:loss"), "cli_models:loss is called without arguments"),
        (("profile", "cli_models:Net", "cli_models:number"), "cli_models:number gives a int, not batches"),
        (("profile", "cli_models:Net", "cli_models:no_batches"), "profile got no batches"),
        (("profile", "cli_models:Net", "cli_models:batches", "--save", "/dev/full"), "'/dev/full': No space left"),
        (("profile", "cli_models:Net", "cli_models:batches", "--plot", "r.foo"), "Format 'foo' is not supported"),
        (("inspect", "cli_models:with_inputs", "--save-plan", "/dev/full"), "'/dev/full': No space left"),
        (("inspect", "cli_models:with_inputs", "--dump", "cli_models.py"), "the dump cannot be written"),
        (("compare", "cli_models:with_inputs", "--scale", "0"), "--scale 0: a loss scale is positive"),
        (("compare", "cli_models:with_inputs", "--scale", "nan"), "--scale nan: a loss scale is positive"),
        (("demo", "--device", "foo"), "--device foo: torch cannot use it here"),
        (("demo", "--device", "cpu", "--out", "cli_models.py"), "--out cli_models.py: "),
    ],
)
def test_more_mistakes_are_exit_code_2(arguments, said, capsys, folder):
    before = sorted(folder.iterdir())
    assert run(*arguments) == 2
    assert said in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before, "nothing is left behind"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "cli_models:with_inputs", "--tolerance", "nan"), "--tolerance: nan is not 0 or more"),
        (("compare", "cli_models:with_inputs", "--tolerance", "inf"), "--tolerance: inf is not 0 or more, and finite"),
        (("compare", "cli_models:with_inputs", "--tolerance", "-1"), "--tolerance: -1 is not 0 or more"),
        (("compare", "cli_models:with_inputs", "--max-runs", "0"), "--max-runs: 0 is not 1 or more"),
        (("inspect", "cli_models:with_inputs", "--min-low", "2"), "--min-low: 2 is not from 0 to 1"),
        (("inspect", "cli_models:with_inputs", "--max-casts", "-1"), "--max-casts: -1 is not 0 or more"),
        (("inspect", "cli_models:with_inputs", "--max-casts", "few"), "invalid int value: 'few'"),
    ],
)
def test_numbers_that_cannot_be_are_said_at_once(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "cli_models:with_inputs", "--save-plan", "/dev/full"),
        ("profile", "cli_models:Net", "cli_models:batches", "--save", "/dev/full"),
    ],
)
def test_what_was_found_is_printed_before_a_file_fails(arguments, capsys):
    assert run(*arguments) == 2
    assert len(capsys.readouterr().out.splitlines()) > 3


def test_a_warning_is_a_sentence_without_a_line_of_fxamps(capsys):
    assert run("inspect", "cli_models:with_inputs", "--save-plan", "plan.json") == 0
    capsys.readouterr()
    assert run("inspect", "cli_models:Two", "--input", "4:int64", "--input", "4x8", "--plan", "plan.json") == 0
    said = capsys.readouterr().err
    assert said.startswith("fxamp: warning: the plan of Net does not fit this model"), said
    assert "UserWarning" not in said and ".py:" not in said


def test_a_warning_of_the_environment_is_a_sentence_too(monkeypatch):
    for variable, value in (("DENYLST_ADD", "exp"), ("DENYLIST_ADD", "gellu"), ("LOG_LEVEL", "DEBG")):
        monkeypatch.setenv(f"FXAMP_{variable}", value)
    command = [sys.executable, "-m", "fxamp", "inspect", "cli_models:with_inputs"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    hints = ("FXAMP_LOG_LEVEL=DEBG is no level.", "FXAMP_DENYLST_ADD is not", "FXAMP_DENYLIST_ADD: 'gellu' is not")
    assert len(said) == len(hints), said
    assert all(line.startswith(f"fxamp: warning: {hint}") for line, hint in zip(said, hints, strict=True)), said


def test_control_c_is_exit_code_130(monkeypatch, capsys):
    def interrupted(chosen):
        raise KeyboardInterrupt

    monkeypatch.setattr("fxamp.cli.review.converted", interrupted)
    assert run("inspect", "cli_models:Net") == 130
    assert "interrupted" in capsys.readouterr().err


UNDERFLOWS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).tanh()

def make():
    torch.manual_seed(0)
    return Small(), (torch.ones(4, 8),)

def tiny(output):
    return output.float().sum() * 1e-9
"""


def test_compare_names_who_loses_gradients_and_the_scale_that_keeps_them(folder, capsys):
    (folder / "underflows.py").write_text(UNDERFLOWS)
    given = ("compare", "underflows.py:make", "--loss", "underflows.py:tiny", "--dtype", "fp16")
    assert run(*given) == 0
    said = capsys.readouterr().out.splitlines()[1]
    assert said.startswith("underflow: ") and "100% of the gradients it passes back are 0 here only" in said
    assert run(*given, "--scale", str(2**20)) == 0
    assert "underflow: " not in capsys.readouterr().out


def test_ranges_that_were_saved_decide(capsys):
    assert run("profile", "cli_models:Net", "cli_models:batches", "--save", "ranges.json") == 0
    capsys.readouterr()
    assert run("inspect", "cli_models:with_inputs", "--ranges", "ranges.json") == 0
    assert capsys.readouterr().out.startswith("Converted ")
    assert run("inspect", "cli_models:with_inputs", "--ranges", "cli_models.py") == 2
    assert "'cli_models.py' holds no ranges" in capsys.readouterr().err
    assert run("inspect", "cli_models:Two", "--input", "4:int64", "--input", "4x8", "--ranges", "ranges.json") == 0
    said = capsys.readouterr().err
    assert said.startswith("fxamp: warning: the ranges do not fit this model: "), said


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_model_of_which_only_calls_make_graphs_is_called(opt_level, fresh_dynamo, tmp_path, capsys):
    target = [f"{Path(choosing.__file__)}:Experts", "--input", "64x16", "--opt-level", opt_level, "--dtype", "fp16"]
    plan = tmp_path / "plan.json"
    assert main(["inspect", *target, "--save-plan", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "experts.0.0" in {row["module"] for row in found["rows"]} and not found["is_preview"]
    assert main(["inspect", *target, "--plan", str(plan)]) == 0
    capsys.readouterr()
    assert main(["explain", *[target[0], "experts.0.0", *target[1:]]]) == 0
    assert "linear (`linear`, allow) runs in float16" in capsys.readouterr().out


def test_what_such_a_model_raises_is_named(capsys):
    assert main(["inspect", f"{Path(choosing.__file__)}:Experts", "--input", "64x15"]) == 2
    assert "choosing.py:" in capsys.readouterr().err


DECIDES = """
import torch

class Decides(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        h = self.a(x).relu()
        if h.sum() > 0:
            h = self.b(h).exp()
        return self.c(h)

def make():
    torch.manual_seed(0)
    return Decides(), (torch.randn(5, 16),)
"""


def test_a_model_that_decides_on_data_is_called_rather_than_previewed(folder, fresh_dynamo, capsys):
    """Fake tensors tell of the graph before the decision alone."""
    (folder / "decides.py").write_text(DECIDES)
    plan = folder / "plan.json"
    given = ("decides.py:make", "--dtype", "fp16")
    assert run("inspect", *given, "--max-casts", "2", "--save-plan", str(plan)) == 1
    said = capsys.readouterr().out
    assert said.startswith("Converted 5/17 nodes") and "preview" not in said
    assert run("explain", "decides.py:make", "c", "--dtype", "fp16") == 0
    assert "`linear`, allow) runs in float16" in capsys.readouterr().out
    assert run("inspect", *given, "--plan", str(plan)) == 0
    assert "does not fit" not in capsys.readouterr().err
