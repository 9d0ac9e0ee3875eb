"""Numbers that forward draws from Python's generators: drawn at each call where they decide nothing."""

import copy
import random

import numpy
import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError

DRAWS = {
    "random": lambda: random.random(),
    "uniform": lambda: random.uniform(0, 1),
    "numpy's random": lambda: numpy.random.random(),
    "numpy's uniform": lambda: numpy.random.uniform(0, 1),
    "torch's rand": lambda: torch.rand([]),
}


ROWS = torch.ones(2, 8)


class Dropping(nn.Module):
    """Layers that are left out in training, as Musicgen's and the adapter's of wav2vec 2."""

    def __init__(self, draw, layerdrop):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.draw, self.layerdrop = draw, layerdrop

    def forward(self, x):
        for layer in self.layers:
            number = self.draw()
            if self.training and number < self.layerdrop:
                continue
            x = layer(x)
        return x


class Using(nn.Module):
    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)
        self.use = use

    def forward(self, x):
        return self.use(self.fc(x))


def seeded(model, x, seed):
    """A result, and the next numbers of all generators."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return model(x), random.random(), numpy.random.random(), float(torch.rand([]))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_what_decides_nothing_is_drawn_by_the_graph(name, train):
    model = Dropping(DRAWS[name], 0.0 if train else 0.5).train(train)
    x = torch.randn(2, 8)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level="O2", example_inputs=(x,))
    before = random.getstate()
    converted(x)
    assert (random.getstate() == before) is (name not in ("random", "uniform"))
    for seed in range(3):
        expected, result = seeded(model, x, seed), seeded(converted, x, seed)
        torch.testing.assert_close(result[0], expected[0], rtol=0.05, atol=0.05)
        assert result[1:] == expected[1:]
    assert fxamp.report(converted).captures == ("symbolic",)


@pytest.mark.parametrize("layerdrop", [1.0, 2])
def test_all_layers_may_be_left_out_for_certain(layerdrop):
    model, x = Dropping(DRAWS["torch's rand"], layerdrop), torch.randn(2, 8)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (x,), capture="symbolic")
    assert torch.equal(converted(x), x)


def test_what_hangs_on_the_number_is_left_to_dynamo():
    model, x = Dropping(DRAWS["torch's rand"], 0.5), torch.randn(2, 8)
    with pytest.raises(CaptureError, match=r"test_drawn\.py:\d+"):
        fxamp.convert(copy.deepcopy(model), torch.bfloat16, (x,), capture="symbolic")
    changed = fxamp.convert(model, torch.bfloat16, (x,))
    for layerdrop in (0.0, 1.0, 0.0):  # of the converted one: they share layers alone
        changed.layerdrop = model.layerdrop = layerdrop
        torch.testing.assert_close(changed(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layerdrop", [-1, 0.0, 1.0])
def test_a_layer_may_be_kept_where_the_number_is_not_below(layerdrop):
    model, x = Using(lambda y: y * 3 if torch.rand([]) >= layerdrop else y), torch.randn(2, 8)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (x,), capture="symbolic")
    torch.testing.assert_close(converted(x), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("layerdrop", [0.0, 1.0])
@pytest.mark.parametrize("many", [0, 3])
def test_of_many_numbers_nothing_is_certain(many, layerdrop):
    """Python's bool() of several is an error of the model, and of none, too."""
    model, x = Dropping(lambda: torch.rand(many), layerdrop), torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor with"):
        model(x)
    with pytest.raises(CaptureError, match=r"test_drawn\.py:\d+"):
        fxamp.convert(model, torch.bfloat16, (x,), capture="symbolic")


def test_a_capture_draws_nothing():
    model = Dropping(DRAWS["uniform"], 0.0)
    before = random.getstate()
    fxamp.convert(model, torch.bfloat16, example_inputs=(torch.randn(2, 8),))
    assert random.getstate() == before


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y * random.random(),
        lambda y: y if random.random() < 0.5 else -y,
        lambda y: y if random.uniform(1, 0) >= 0.0 else -y,
        lambda y: y * float(random.random()),
        lambda y: (y, random.random()),
        lambda y: y * random.random() * 0 + y if random.random() else y,
    ],
    ids=["factor", "decision", "falling bounds", "float", "returned", "truth"],
)
def test_what_forward_uses_is_left_to_dynamo(use):
    model = Using(use)
    x = torch.randn(2, 8)
    with pytest.raises(CaptureError, match=r"test_drawn.py:\d+: (forward draws from Python's random|Python's \w+\(\))"):
        fxamp.convert(model, torch.bfloat16, example_inputs=(x,), capture="symbolic")
    torch._dynamo.reset()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for seed in range(3):
        expected, result = seeded(model, x, seed), seeded(converted, x, seed)
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("drawn", [lambda: random.uniform(a=0, b=1), lambda: numpy.random.uniform(0, 1, 4)])
def test_what_is_drawn_in_another_way_is_no_number_of_the_graph(drawn):
    with pytest.raises(CaptureError, match="forward draws from"):
        fxamp.convert(Using(lambda y: drawn() is y or y), torch.bfloat16, capture="symbolic", example_inputs=(ROWS,))


def test_no_number_lies_below_what_is_drawn():
    model = Using(lambda y: -y if random.uniform(-1, 1) < -1 else y if random.random() >= 0 else y * 2)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(ROWS,))
    torch.testing.assert_close(converted(ROWS), model(ROWS), rtol=0.05, atol=0.05)


def test_under_torch_compile_it_is_drawn_too():
    torch._dynamo.reset()
    model = Dropping(DRAWS["uniform"], 0.5).eval()
    x = torch.randn(2, 8)
    compiled = torch.compile(fxamp.convert(copy.deepcopy(model), torch.bfloat16), backend="eager")
    for seed in range(3):
        expected, result = seeded(model, x, seed), seeded(compiled, x, seed)
        torch.testing.assert_close(result[0], expected[0], rtol=0.05, atol=0.05)
        assert result[1:] == expected[1:]
