"""`generate` and `sample` call parts of the model: where its weights are stored low, as under autocast."""

import copy
import inspect

import pytest
import torch
from torch import nn

import fxamp

X = torch.linspace(-1, 1, 32).reshape(4, 8)
LOWS = (torch.float16, torch.bfloat16)


class Generating(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x, memory=None):
        return self.head(self.norm(self.encoder(x) if memory is None else memory))

    @torch.no_grad()
    def generate(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        """Encodes once, and decodes that."""
        memory = self.encoder(x)
        for _ in range(steps):
            memory = memory + self(x, memory).sum()
        return memory

    def sample(self, x):
        return self.head(self.encoder(x))


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("name", ["generate", "sample"])
def test_beside_low_weights_they_run_as_under_autocast(name, opt_level, dtype):
    model = Generating()
    converted = fxamp.convert(copy.deepcopy(model), dtype, (X,), opt_level=opt_level)
    converted(X).sum().backward()
    for each in (converted, copy.deepcopy(converted)):
        found, expected = getattr(each, name)(X), getattr(model, name)(X)
        assert (found.float() - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()
        assert found.requires_grad == expected.requires_grad
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("name", ["generate", "sample"])
def test_at_o1_they_are_the_models_own(name):
    model = Generating()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="symbolic")
    found, expected = getattr(converted, name)(X, *((0,) if name == "generate" else ())), model.sample(X)
    assert torch.equal(found, expected if name == "sample" else model.encoder(X))


def test_they_look_like_the_models_own():
    converted = fxamp.convert(Generating(), torch.bfloat16, (X,), opt_level="O2")
    assert inspect.signature(converted.generate) == inspect.signature(Generating().generate)
    assert converted.generate.__doc__ == "Encodes once, and decodes that."


def test_what_is_no_plain_method_is_left_alone():
    class Odd(nn.Linear):
        generate = None

        @staticmethod
        def sample():
            return torch.is_autocast_enabled("cpu")

    converted = fxamp.convert(Odd(8, 8), torch.bfloat16, (X,), opt_level="O2")
    assert converted.generate is None and converted.sample() is False
