"""Forward that imports a module for the first time: the module is as eager would have it, and forward is one graph."""

import concurrent.futures
import importlib
import random
import sys

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture.fake_values import FakeValues
from fxamp.capture.imports import Imports

X = torch.linspace(-1, 1, 16).reshape(2, 8)
NAME = "loaded_by_forward"
CODE = """
import random
import torch
from random import random as draw
from torch import finfo, tensor, zeros

TABLE = torch.tensor([1.0, 2.0] * 4)
ROWS = [torch.arange(3) for _ in range(2)]
EMPTY = zeros(3)
"""


class Importing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        found = importlib.import_module(NAME)
        return self.fc(x) * found.TABLE


class Trying(Importing):
    """Does without a module that cannot be loaded, whatever the reason."""

    def forward(self, x):
        try:
            from loaded_by_forward import TABLE
        except:  # noqa: E722
            TABLE = 2.0
        return self.fc(x) * TABLE


class Insisting(Importing):
    """Raises an error of its own where a module cannot be loaded."""

    def forward(self, x):
        try:
            from loaded_by_forward import TABLE
        except:  # noqa: E722
            raise ValueError("no table") from None
        return self.fc(x) * TABLE


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module, which is not loaded yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, NAME, raising=False)

    def write(code=CODE):
        (tmp_path / f"{NAME}.py").write_text(code)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("example", [None, (X,)], ids=["preview", "example"])
@pytest.mark.parametrize("kind", [Importing, Trying, Insisting])
def test_a_module_that_forward_loads_holds_nothing_of_the_trace(kind, example, module):
    module()
    torch.manual_seed(0)
    model = kind()
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=example)
    found, now = converted(X), sys.modules[NAME]
    assert [type(value) for value in (now.TABLE, *now.ROWS, now.EMPTY)] == [torch.Tensor] * 4
    assert (now.zeros, now.tensor, now.finfo, now.draw) == (torch.zeros, torch.tensor, torch.finfo, random.random)
    torch.testing.assert_close(found, model(X), rtol=0.02, atol=0.02)
    assert len(fxamp.report(converted).captures) == 1


def test_a_module_that_cannot_be_loaded_is_the_models_own_affair(module):
    module("import torch\nTABLE = torch.zeros(8)\nraise RuntimeError('no such device')")
    torch.manual_seed(0)
    model = Trying()
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic")
    torch.testing.assert_close(converted(X), model(X), rtol=0.02, atol=0.02)
    with pytest.raises(Exception, match="no such device"):
        fxamp.convert(Importing(), torch.bfloat16, example_inputs=(X,), capture="symbolic")


class Tracing:
    """Records what its own thread does, as a tracer."""

    def __init__(self):
        self.values = FakeValues(None, None)

    @property
    def is_recording(self):
        return not self.values.is_running


def test_another_thread_loads_modules_meanwhile(module):
    module()
    imports = Imports()
    with imports.noted(Tracing()), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(importlib.import_module, NAME).result().TABLE.shape == (8,)


def test_modules_are_loaded_as_before_after_a_trace(module):
    loaders = importlib.machinery.SourceFileLoader, importlib.machinery.SourcelessFileLoader
    before = [loader.exec_module for loader in loaders]
    module()
    fxamp.convert(Importing(), torch.bfloat16, example_inputs=(X,))
    assert [loader.exec_module for loader in loaders] == before
    assert not any("exec_module" in vars(loader) for loader in loaders[:1])
