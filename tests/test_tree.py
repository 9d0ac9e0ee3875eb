"""Models whose classes name modules and parameters in their own ways."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.tree import every_buffer, every_module, every_parameter

LOW = torch.bfloat16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.again, self.none = self.first, None
        self.last.weight = self.first.weight
        self.register_parameter("no", None)

    def forward(self, x):
        return self.last(self.norm(self.again(self.first(x))))


class OldSignatures(Net):
    """As torch had them before 2.0."""

    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix="", recurse=True):
        yield from super().named_buffers(prefix, recurse)


class OldModules(Net):
    def named_modules(self, memo=None, prefix="", *_, remove_duplicate=True):
        yield from super().named_modules(memo, prefix)


class OthersNames(Net):
    """As models that tell an optimizer of other names."""

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield f"net/{name}", parameter


CLASSES = [Net, OldSignatures, OldModules, OthersNames]


def test_they_are_what_torch_gives():
    net = nn.Sequential(Net(), nn.ModuleList([nn.PReLU()]))
    assert list(every_module(net)) == list(net.named_modules(remove_duplicate=False))
    for mine, theirs in (
        (every_parameter(net), net.named_parameters(remove_duplicate=False)),
        (every_buffer(net), net.named_buffers(remove_duplicate=False)),
    ):
        assert [(name, id(value)) for name, value in mine] == [(name, id(value)) for name, value in theirs]


@pytest.mark.parametrize("has_example", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("kind", CLASSES)
def test_whatever_a_class_calls_them(kind, opt_level, has_example):
    converted = fxamp.convert(kind(), dtype=LOW, opt_level=opt_level, example_inputs=(X,) if has_example else None)
    plain = fxamp.convert(Net(), dtype=LOW, opt_level=opt_level)
    made = [
        (model, fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) if opt_level == "O2" else None)
        for model in (converted, plain)
    ]
    for _ in range(3):
        losses = []
        for model, optimizer in made:
            optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            losses.append(model(X).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
    state = converted.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    converted.load_state_dict(state)
    assert torch.equal(copy.deepcopy(converted)(X), converted(X))
    assert fxamp.report(converted).coverage == fxamp.report(plain).coverage
    fxamp.compare(kind(), converted, (X,))
