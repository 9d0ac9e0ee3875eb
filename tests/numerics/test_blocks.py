"""Blocks that are converted by themselves: the fp32 run has them in float32, and what overflows in them is low's."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fxamp
from fxamp.model.engine import engine_of
from fxamp.numerics.measuring import profile_converted

FP16 = torch.float16
X = torch.linspace(-1, 1, 128).reshape(8, 16)


class Block(nn.Module):
    """A linear layer, and a forward of its result given as a function."""

    def __init__(self, function):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.function = function

    def forward(self, x):
        return self.function(self.a(x))


def plain(y):
    return y.tanh()


def big(y):
    return (y * 6e4) * 2.0 / 6e4


def small_slope(y):
    return (y * 1e-3).relu() * 1e3


def pole(y):
    return (y * 0.0).log()


OVERFLOWS = {
    "product": big,
    "sum": lambda y: (y + 6e4 + 6e4) - 12e4,
    "matmul": lambda y: (y * 200 + 300) @ torch.full((16, 16), 200.0) * 1e-5,
}


def made(*functions, **more):
    torch.manual_seed(0)
    model = nn.Sequential(*map(Block, functions), nn.Linear(16, 4))
    return fxamp.convert(model, FP16, boundaries=[Block], **more)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("function", OVERFLOWS.values(), ids=OVERFLOWS)
def test_an_overflow_in_a_block_is_a_matter_of_precision(function, place):
    functions = [plain, plain, plain]
    functions[place] = function
    model = made(*functions)
    assert not bool(model(X).isfinite().all())
    found = fxamp.find_nan(model, (X,))
    assert (found.name, found.block, found.is_bad_in_float32) == (f"_{place}", str(place), False)
    assert found.overrides == {str(place): "deny"} and not found.unknown
    assert bool(made(*functions, overrides=found.overrides)(X).isfinite().all())
    assert f"fxamp.find_nan(model.get_submodule('{place}'), what it is given) names the op in it" in str(found)
    with fxamp.watch_nan(model, raises=False) as watch:
        model(X)
    assert watch.found == found
    assert all(engine_of(model[number]) is not None for number in range(3))


def test_every_block_that_overflows_is_denied():
    model = made(plain, big, big, big)
    found = fxamp.find_nan(model, (X,))
    assert found.name == "_1" and not found.is_bad_in_float32
    assert list(found.overrides) == ["1", "2", "3"]
    assert bool(made(plain, big, big, big, overrides=found.overrides)(X).isfinite().all())


def test_what_overflows_in_float32_too_is_not_a_matter_of_precision():
    found = fxamp.find_nan(made(plain, pole), (X,))
    assert (found.name, found.is_bad_in_float32, found.overrides) == ("_1", True, {})
    assert "not a matter of precision" in str(found) and "get_submodule('1')" in str(found)


def test_a_gradient_that_overflows_in_a_block():
    model, loss = made(plain, small_slope), lambda output: output.sum() * 2.0**10
    loss(model(X)).backward()
    assert not all(bool(weight.grad.isfinite().all()) for weight in model.parameters())
    found = fxamp.find_nan(model, (X,), loss)
    assert (found.block, found.phase, found.is_bad_in_float32) == ("1", "backward", False)
    assert found.overrides == {"1": "deny"}


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.b = Block(big), nn.Linear(16, 16)

    def forward(self, x):
        return self.b(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))


def test_a_block_that_the_backward_of_another_recomputes():
    """It is in float32 then, too."""
    torch.manual_seed(0)
    model = fxamp.convert(nn.Sequential(nn.Linear(16, 16), Recomputed()), FP16, boundaries=[Recomputed, Block])
    found = fxamp.find_nan(model, (X,), torch.sum)
    assert (found.block, found.is_bad_in_float32, found.overrides) == ("1", False, {"1": "deny"})
    assert engine_of(model[1]) is not None and engine_of(model[1].inner) is not None


def kept_whole():
    """A converted model inside of another, called whole because it has a hook."""
    torch.manual_seed(0)
    inner = fxamp.convert(Block(big), FP16)
    inner.register_forward_hook(lambda module, given, result: None)
    return fxamp.convert(nn.Sequential(nn.Linear(16, 16), inner), FP16)


def test_a_converted_model_that_is_called_whole():
    """No override of the outer model reaches into it."""
    model = kept_whole()
    assert not bool(model(X).isfinite().all())
    found = fxamp.find_nan(model, (X,))
    assert (found.name, found.block, found.is_bad_in_float32, found.overrides) == ("_1", "1", False, {})
    assert "get_submodule('1')" in str(found) and "not a matter of precision" not in str(found)


def test_a_call_that_could_not_be_run_again_names_the_block():
    model = made(plain, big)
    with fxamp.watch_nan(model, raises=False) as watch:
        model(X)
        with torch.no_grad():
            model[0].a.weight.add_(1.0)
    assert watch.found.unknown and watch.found.block == "1"
    assert "it is converted by itself; another run was not tried" in str(watch.found)


@pytest.mark.parametrize("lossy", [(0,), (1, 3)])
def test_the_blocks_that_lose_the_digits_are_found(lossy):
    functions = [(lambda y: (y + 1000.0) - 1000.0) if place in lossy else plain for place in range(4)]
    torch.manual_seed(0)
    model = nn.Sequential(*map(Block, functions), nn.Linear(16, 4))
    found = fxamp.find_deny(model, made(*functions), (X,), 1e-2, progress=False)
    assert found.is_met and found.is_minimal and set(found.nodes) == set(map(str, lossy))
    again = made(*functions, overrides=found.overrides)
    assert fxamp.compare(model, again, (X,)).output == found.error


def test_ranges_are_those_of_float32():
    model = made(plain, big, plain)
    ranges = profile_converted(model, [X], None, progress=False)
    with torch.no_grad():
        blocks = [model[number] for number in range(3)]
        y = X
        for block in blocks:
            y = block.function(nn.functional.linear(y, block.a.weight, block.a.bias))
    assert ranges.nodes["_2"].values.largest == float(y.abs().max())
    assert not ranges.nodes["_1"].values.infinite
