"""The default device: `torch.set_default_device`, and `with device:` around a call or in forward.

Tensors on `meta` have no numbers, so that a second device is at hand everywhere; what a graph has found out about them
is compared with a model that names the device each time.
"""

import contextlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import fxamp
from tests.devices import default_device

LOW = torch.bfloat16
META = torch.device("meta")
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def convert(body, device="cpu", **options):
    torch.manual_seed(0)
    return fxamp.convert(Layer(body).to(device), dtype=LOW, **{"capture": "symbolic"} | options)


def known(converted):
    """What a graph knows of the values that are computed."""
    left_out = ("getattr", "getitem", "packed_cast", "output")
    rows = [row for row in fxamp.report(converted).rows if row.op not in left_out]
    assert all(row.shape for row in rows if row.precision != "none")
    return [(row.op, row.precision, row.shape, row.reason) for row in rows]


BODIES = {
    "arange": lambda self, x: self.fc(x) + torch.arange(4) * 1.0,
    "ones": lambda self, x: self.fc(x) @ torch.ones(4, 4),
    "traced size": lambda self, x: self.fc(x) + torch.zeros(x.shape[0], 4),
    "traced dtype": lambda self, x: self.fc(x) + torch.full((x.shape[0], 4), 0.5, dtype=x.dtype),
    "tensor": lambda self, x: self.fc(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "tensor of a size": lambda self, x: self.fc(x) / torch.tensor(x.shape[0]),
    "rand": lambda self, x: self.fc(x) * (torch.rand(6, 4) > 0.5),
    "eye": lambda self, x: self.fc(x) @ torch.eye(x.shape[1]),
}
NAMED = {
    "arange": lambda self, x: self.fc(x) + torch.arange(4, device=x.device) * 1.0,
    "ones": lambda self, x: self.fc(x) @ torch.ones(4, 4, device=x.device),
    "traced size": lambda self, x: self.fc(x) + torch.zeros(x.shape[0], 4, device=x.device),
    "traced dtype": lambda self, x: self.fc(x) + torch.full((x.shape[0], 4), 0.5, dtype=x.dtype, device=x.device),
    "tensor": lambda self, x: self.fc(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "tensor of a size": lambda self, x: self.fc(x) / torch.tensor(x.shape[0], device=x.device),
    "rand": lambda self, x: self.fc(x) * (torch.rand(6, 4, device=x.device) > 0.5),
    "eye": lambda self, x: self.fc(x) @ torch.eye(x.shape[1], device=x.device),
}


@pytest.mark.parametrize("is_region", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_what_forward_makes_is_known_to_be_on_the_default_device(name, is_region):
    named = convert(NAMED[name], META)
    assert named(X.to(META)).device == META
    converted = convert(BODIES[name], META)
    with torch.device("meta") if is_region else default_device("meta"):
        assert converted(X.to(META)).device == META
    assert known(converted) == known(named)


def test_a_region_in_forward_holds_in_the_graph():
    def body(self, x):
        with torch.device("meta"):
            there = torch.zeros(x.shape[0], 4), torch.arange(3), torch.empty(2, device="cpu")
            named = torch.zeros(x.shape[0], device="cpu")
        here = torch.ones(4)
        return self.fc(x) + here, *there, named

    converted, model = convert(body), Layer(body)
    for given in (X, X[:2]):
        found, expected = converted(given), model(given)
        assert [(value.device, value.shape) for value in found] == [(value.device, value.shape) for value in expected]


def test_a_region_in_forward_that_names_the_host_holds_under_another_default():
    def body(self, x):
        with torch.device("cpu"):
            here = torch.ones(4)
        return self.fc(x), here, torch.ones(4)

    with default_device("meta"):
        assert [value.device.type for value in convert(body, META)(X.to(META))] == ["meta", "cpu", "meta"]


def asks(self, x):
    return self.fc(x) * (2 if torch.ones(1).device.type == "cpu" else 3)


def reads(self, x):
    return self.fc(x) * (2 if torch.get_default_device().type == "cpu" else 3)


@pytest.mark.parametrize("body", [asks, reads])
def test_another_default_device_asks_again(body):
    converted, torch_made = convert(body), Layer(body)
    torch_made.load_state_dict(converted.state_dict())
    for device in (None, "meta", "cpu", "meta", None):
        with torch.device(device) if device else contextlib.nullcontext():
            torch.testing.assert_close(converted(X), torch_made(X), rtol=0, atol=0.05)


def test_a_graph_that_makes_nothing_there_holds_under_any():
    """A model is made, and converted with example inputs, inside `with device:`, and trained outside of it."""
    model = Layer(lambda self, x: self.fc(x).relu() + torch.zeros_like(x))
    with torch.device("meta"):
        converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(X,))
    converted(X)
    with torch.device("cpu"):
        converted(X)
    assert len(fxamp.report(converted).captures) == 1

    with torch.device("cpu"):  # as it is without one
        converted = convert(lambda self, x: self.fc(x) + torch.ones(4), example_inputs=(X,))
    converted(X)
    assert len(fxamp.report(converted).captures) == 1


def test_a_constant_that_forward_makes_is_made_again_under_another():
    body = lambda self, x: (self.fc(x), torch.as_tensor([1.0, 2.0]), torch.scalar_tensor(3.0))  # noqa: E731
    converted, model = convert(body), Layer(body)
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            assert [value.device for value in converted(X)] == [value.device for value in model(X)]


class Makes(nn.Module):
    def forward(self, x):
        return torch.zeros(3)


def test_a_module_that_stays_whole_in_a_region_is_not_held():
    """A graph would call it outside of the region."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.part = nn.Linear(4, 99), Makes()
            self.part.register_forward_hook(lambda module, args, result: None)

        def forward(self, x):
            with torch.device("meta"):
                there = self.part(x)
            return self.fc(x), there

    assert fxamp.convert(Around(), dtype=LOW)(X)[1].device == META
    with pytest.raises(fxamp.CaptureError, match="'part' stays whole and is called inside `with device:`"):
        fxamp.convert(Around(), dtype=LOW, capture="symbolic", example_inputs=(X,))


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_compiled(device):
    torch._dynamo.reset()
    given = X.to(device or "cpu")
    model = convert(lambda self, x: self.fc(x) * torch.full((x.shape[0], 4), 2.0), given.device)
    compiled = torch.compile(model, backend="eager")
    with torch.device(device) if device else contextlib.nullcontext():
        for count in (6, 3):
            found, expected = compiled(given[:count]), model(given[:count])
            assert found.device == expected.device and found.shape == expected.shape
            assert device == "meta" or torch.equal(found, expected)


class Doubled(TorchFunctionMode):
    """A mode of the user's: `torch.full` gives twice what it is asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.full else result


def test_a_mode_of_the_users_stays_where_it_was():
    body = lambda self, x: self.fc(x) + torch.full((4,), 1.0, device="cpu")  # noqa: E731
    converted, model = convert(body), Layer(body)
    model.load_state_dict(converted.state_dict())
    with default_device("meta"), Doubled():
        torch.testing.assert_close(converted(X), model(X), rtol=0, atol=0.05)
        assert torch._C._len_torch_function_stack() == 2


ALONE = """
import torch, fxamp
from torch import nn

class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        with torch.device("meta"):
            there = torch.zeros(3)
        return self.fc(x) * there.shape[0]

converted = fxamp.convert(Region(), dtype=torch.bfloat16)
converted(torch.randn(2, 4))
with torch.device("meta"):
    for make in (torch.zeros, torch.ones, torch.empty, torch.randn, torch.arange, torch.eye):
        assert make(3).device.type == "meta", make
assert torch.zeros in torch.overrides.get_ignored_functions()
"""


def test_torchs_own_tables_of_functions_are_not_made_during_a_capture():
    """torch keeps the functions that the default device holds for from when it is first asked.

    In a process of its own: the tables are made once.
    """
    subprocess.run([sys.executable, "-c", ALONE], check=True, timeout=300)
