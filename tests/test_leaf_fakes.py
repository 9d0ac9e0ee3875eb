"""Leaf modules on fake tensors: a copy runs, without hooks, and the module is as it was."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError, OptionError
from fxamp.fakes import Fakes


def offloaded() -> nn.Module:
    """Weights that are empty but for the time in which their module runs, as CPU offloading has them."""
    torch.manual_seed(0)
    model, stored = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), {}

    @torch.compiler.disable
    def load(module, inputs):
        for name, weight in module.named_parameters():
            weight.data = stored[module, name]

    @torch.compiler.disable
    def unload(module, inputs, result):
        for name, weight in module.named_parameters():
            stored[module, name], weight.data = weight.data, torch.empty(0)

    for module in (model[0], model[2]):
        unload(module, None, None)
        module.register_forward_pre_hook(load)
        module.register_forward_hook(unload)
    return model


@torch.no_grad()
def test_hooks_that_bring_the_weights_are_left_to_dynamo():
    model, x = offloaded(), torch.randn(4, 8)
    expected, converted = model(x), fxamp.convert(model, dtype=torch.bfloat16)
    if torch.__version__ < "2.12":
        converted(x)  # float32: Dynamo of 2.11 leaves such modules out, and is left for it
    for _ in range(3):
        result = converted(x)
        assert not torch.equal(result, expected), "it runs low"
        torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-6)


@torch.no_grad()
def test_a_leaf_that_needs_its_hooks_is_named():
    converted = fxamp.convert(offloaded(), dtype=torch.bfloat16, capture="symbolic")
    with pytest.raises(CaptureError, match=r"'0' has hooks, and without them it fails .*@torch.compiler.disable"):
        converted(torch.randn(4, 8))


def test_a_misfit_in_a_leaf_without_hooks_blames_the_inputs():
    converted = fxamp.convert(nn.Sequential(nn.BatchNorm1d(8)), dtype=torch.bfloat16, capture="symbolic")
    with pytest.raises(OptionError, match="the model fails in 0"):
        converted(torch.randn(4, 7))


class Kept(nn.Module):
    """A leaf, by its hook, that keeps its parts in more ways than one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.seen = nn.Linear(4, 4), nn.BatchNorm1d(4), []
        self.steps, self.run = [self.norm], self.through
        self.inner.register_forward_hook(self.note)

    def note(self, module, inputs, result):
        self.last = result

    def through(self, x):
        return self.inner(x) + self.last

    def forward(self, x):
        return self.steps[0](self.run(x))


def test_a_leaf_runs_on_a_copy_and_is_as_it_was():
    model = nn.Sequential(Kept())
    model[0].register_forward_hook(lambda *given: None)
    state = {name: (value, value._version, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    attributes = {id(part): dict(part.__dict__) for part in model.modules()}
    graph = torch.fx.Graph()
    node = graph.call_module("0", (graph.placeholder("x"),))
    fakes = Fakes(model)
    result = fakes.run(node, lambda given: fakes.of(torch.randn(3, 4)))
    assert fakes.made(result) and result.shape == (3, 4)
    assert all(part.__dict__ == attributes[id(part)] for part in model.modules())
    for name, (value, version, before) in state.items():
        assert model.state_dict(keep_vars=True)[name] is value and value._version == version, name
        assert torch.equal(value, before), name


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_a_batch_norm_that_averages_over_all_batches_has_a_value(norm):
    """torch reads its counter as a number there, which a fake has not: all that came after it had no shapes."""
    model = nn.Sequential(nn.Linear(8, 6), norm(6, momentum=None), nn.Unflatten(1, (2, 3)))
    batch_norm, x = model[1], torch.randn(4, 8)
    graph = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(x,))
    assert [row.shape for row in fxamp.report(graph).rows if row.op == "unflatten"] == [(4, 2, 3)]
    assert batch_norm.momentum is None and batch_norm.num_batches_tracked == 0
    if norm is nn.BatchNorm1d:
        graph(x).sum().backward()
        assert batch_norm.num_batches_tracked == 1
