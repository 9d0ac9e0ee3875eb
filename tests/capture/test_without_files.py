"""Models whose code lies in no file: typed in a session, made by `exec`, of a `torch.package`."""

import io
import sys

import pytest
import torch
from torch import nn
from torch.package import PackageExporter, PackageImporter

import fxamp

SOURCE = """
import torch
from torch import nn

FACTOR = 1.0

def helper(y):
    return y * FACTOR

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = helper(self.fc(x))
        return y if torch.is_grad_enabled() else torch.softmax(y, -1)

class Forked(Net):
    def forward(self, x):
        with torch.random.fork_rng():
            first = torch.rand(4)
        return self.fc(x) + first - torch.rand(4)

class Inference(Net):
    def forward(self, x):
        y = self.fc(x)
        return 2 * y if torch.is_inference_mode_enabled() else y
"""
WHERE = [("<stdin>", "__main__"), ("<string>", "__main__"), ("<ipython-input-3>", "__main__"), ("<plugin>", "plugin")]


def packaged(tmp_path, monkeypatch):
    (tmp_path / "packed_model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import packed_model

    buffer = io.BytesIO()
    with PackageExporter(buffer) as exporter:
        exporter.intern("packed_model")
        exporter.extern(["torch", "torch.**"])
        exporter.save_pickle("model", "model.pkl", packed_model.Net())
    buffer.seek(0)
    del sys.modules["packed_model"]
    return vars(PackageImporter(buffer).import_module("packed_model"))


@pytest.fixture(params=[*WHERE, "package"], ids=lambda where: where if isinstance(where, str) else "".join(where))
def space(request, tmp_path, monkeypatch):
    """The globals of such a module."""
    if request.param == "package":
        return packaged(tmp_path, monkeypatch)
    filename, name = request.param
    space = {"__name__": name}
    exec(compile(SOURCE, filename, "exec"), space)
    return space


def agree(converted, plain, x):
    torch.testing.assert_close(converted(x), plain(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("begins_with_gradients", [True, False])
def test_globals_and_the_gradient_mode_are_read_at_each_call(space, begins_with_gradients):
    torch.manual_seed(0)
    net, x = space["Net"](), torch.randn(2, 4)
    converted = fxamp.convert(net, dtype=torch.bfloat16)
    for factor in (1.0, 3.0, 1.0):
        space["FACTOR"] = factor
        for with_gradients in (begins_with_gradients, not begins_with_gradients):
            with torch.set_grad_enabled(with_gradients):
                agree(converted, net, x)


def _needs_dynamo(space):
    if torch.__version__ < "2.13" and space["__name__"] == "plugin":
        pytest.skip("Dynamo imports the module of a function by its name, and there is none")


def test_inference_mode_is_another_one(space):
    _needs_dynamo(space)
    net, x = space["Inference"](), torch.randn(2, 4)
    converted = fxamp.convert(net, dtype=torch.bfloat16)
    agree(converted, net, x)
    with torch.inference_mode():
        agree(converted, net, x)
    agree(converted, net, x)


def test_random_numbers_that_are_put_back_are_drawn_again(space):
    _needs_dynamo(space)
    net, x = space["Forked"](), torch.randn(2, 4)
    converted = fxamp.convert(net, dtype=torch.bfloat16)
    for _ in range(3):
        agree(converted, net, x)


def test_the_report_names_their_lines(space):
    converted = fxamp.convert(space["Net"](), dtype=torch.bfloat16, example_inputs=(torch.randn(2, 4),))
    (line,) = {row.source.rpartition(":")[2] for row in fxamp.report(converted).rows if row.op == "linear"}
    assert line == "16"


def test_what_dataclasses_write_is_no_code_of_the_users():
    space = {"__name__": "plugin"}
    text = "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: float\n    y: float\n"
    exec(compile(text, "<plugin>", "exec"), space)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            point = space["Point"](self.fc(x), 2.0)
            return point.x * point.y

    net, x = Net(), torch.randn(2, 4)
    converted = fxamp.convert(net, dtype=torch.bfloat16, capture="symbolic", example_inputs=(x,))
    agree(converted, net, x)
