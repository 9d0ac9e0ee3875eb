"""Attributes that Python code sets on tensors: on a caller's, on the model's weights, on what forward gives."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError
from fxamp.model.engine import engine_of
from tests.capture.test_same_tensor import Net, X, near


class AsksInput(Net):
    def forward(self, x):
        return self.last(self.first(x) * getattr(x, "gain", 1.0))


class AsksWhetherThere(Net):
    def forward(self, x):
        return self.last(self.first(x)) * (3.0 if hasattr(x, "gain") else 1.0)


class AsksInputInside(Net):
    def forward(self, parts):
        return self.last(sum(self.first(part) * getattr(part, "gain", 1.0) for part in parts))


class AsksWeight(Net):
    def forward(self, x):
        return self.last(self.first(x) * getattr(self.first.weight, "gain", 1.0))


class AsksBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x):
        return self.last(self.first(x) + self.shift * getattr(self.shift, "gain", 1.0))


def given(gain=None):
    x = X.clone()
    if gain is not None:
        x.gain = gain
    return x


def marked(tensor, gain):
    if gain is None:
        vars(tensor).pop("gain", None)
    else:
        tensor.gain = gain


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("gains", [(None, 3.0, 4.0, None), (3.0, None, 4.0)])
@pytest.mark.parametrize("kind", [AsksInput, AsksWhetherThere, AsksInputInside, AsksWeight, AsksBuffer])
def test_each_call_answers_for_its_own_tensors(kind, gains, opt_level):
    plain, converted = kind().eval(), fxamp.convert(kind().eval(), dtype=torch.bfloat16, opt_level=opt_level)
    for gain in gains:
        for model in (plain, converted):
            marked(model.first.weight, gain), [marked(buffer, gain) for buffer in model.buffers()]
        args = ([given(gain), given()],) if kind is AsksInputInside else (given(gain),)
        near(converted(*args), plain(*args))


def test_an_attribute_that_is_not_there_costs_no_graph():
    converted = fxamp.convert(AsksInput().eval(), dtype=torch.bfloat16)
    for _ in range(3):
        converted(given())
    (variant,) = engine_of(converted).all_variants()
    assert variant.captured.method == "symbolic" and variant.captured.attributes == {(0, "gain"): False}


class SetsOnOutput(Net):
    def forward(self, x):
        y = self.last(self.first(x))
        y.aux = 2 * y.sum()
        return y


class SetsInside(Net):
    def forward(self, x):
        h = self.first(x)
        h.gain = 2.0
        return self.last(h * h.gain)


class SetsOnInput(Net):
    def forward(self, x):
        x.seen = getattr(x, "seen", 0) + 1
        return self.last(self.first(x)) * x.seen


class SetsOnWeight(Net):
    def forward(self, x):
        self.first.weight.calls = getattr(self.first.weight, "calls", 0) + 1
        return self.last(self.first(x)) * self.first.weight.calls


class SetsOnKept(Net):
    def forward(self, x):
        self.seen = self.first(x)
        self.seen.gain = 2.0
        return self.last(self.seen)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("kind", "look"),
    [
        (SetsOnOutput, lambda model, x, y: y.aux),
        (SetsInside, lambda model, x, y: y),
        (SetsOnInput, lambda model, x, y: torch.tensor(float(x.seen))),
        (SetsOnWeight, lambda model, x, y: torch.tensor(float(model.first.weight.calls))),
        (SetsOnKept, lambda model, x, y: torch.tensor(model.seen.gain)),
    ],
)
def test_what_forward_sets_is_there_after_the_call(kind, look, opt_level):
    plain, converted = kind(), fxamp.convert(kind(), dtype=torch.bfloat16, opt_level=opt_level)
    for _ in range(3):
        results = []
        for model in (plain, converted):
            x = X.clone()
            y = model(x)
            results.append((y, look(model, x, y).float()))
        near(*[y for y, _ in results])
        torch.testing.assert_close(*[seen for _, seen in results], rtol=0.05, atol=0.1)


def test_what_is_set_is_named():
    with pytest.raises(CaptureError, match=r"forward sets \.aux on a tensor"):
        fxamp.convert(SetsOnOutput(), dtype=torch.bfloat16, capture="symbolic", example_inputs=(X,))
    converted = fxamp.convert(SetsInside(), dtype=torch.bfloat16, capture="symbolic", example_inputs=(X,))
    near(converted(X), SetsInside()(X))


ASKED = {
    "storage_offset": lambda x: x.storage_offset() > 0,
    "parameter": lambda x: isinstance(x, nn.Parameter),
    "version": lambda x: x._version > 0,
    "view": lambda x: x._is_view(),
    "dim_order": lambda x: x.dim_order() != (0, 1),
    "shared": lambda x: x.is_shared(),
    "storage": lambda x: x.untyped_storage().nbytes() > 128,
}


class Asks(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.asks, self.fc = asks, nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) + (5 if self.asks(x) else 1)


def others():
    """Tensors of one shape that answer such questions otherwise."""
    plain = torch.randn(4, 8)
    written = torch.randn(4, 8).mul_(2)
    part, turned = torch.randn(40)[8:].view(4, 8), torch.randn(8, 4).t()
    return [plain, written, part, turned, nn.Parameter(torch.randn(4, 8)), torch.randn(4, 8).share_memory_()]


@pytest.mark.parametrize("is_turned_round", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_what_is_asked_of_an_input_is_asked_at_each_call(name, is_turned_round, fresh_dynamo):
    model = Asks(ASKED[name])
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, overrides={"*": "deny"})
    given = others()
    for x in given[::-1] if is_turned_round else given:
        assert torch.equal(converted(x), model(x))
