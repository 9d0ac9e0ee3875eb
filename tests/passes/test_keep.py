"""freeze(): low weights are cast once for inference, and gradients still work."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fxamp
from fxamp.passes.keep import KeepWeights
from tests.runtime.test_packed_weights import Net, Ops


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def frozen(x) -> nn.Module:
    torch.manual_seed(0)
    return fxamp.convert(Net(), torch.bfloat16, example_inputs=(x,)).freeze()


def casts_in(model: nn.Module, x: torch.Tensor) -> int:
    with Ops() as ops, torch.no_grad():
        model(x)
    return ops.names.count("_foreach_copy_")


def test_weights_are_cast_once(frozen, x):
    assert [casts_in(frozen, x), casts_in(frozen, x)] == [1, 0]


def test_outputs_are_those_of_the_model(frozen, x):
    torch.manual_seed(0)
    model = fxamp.convert(Net(), torch.bfloat16, example_inputs=(x,))
    with torch.no_grad():
        assert torch.equal(frozen(x), model(x)) and torch.equal(frozen(x), model(x))


def test_a_single_weight_is_kept_too(x):
    model = fxamp.convert(nn.Linear(4, 4, bias=False), torch.bfloat16, example_inputs=(x,)).freeze()
    assert [casts_in(model, x), casts_in(model, x)] == [1, 0]


def test_an_optimizer_step_is_seen(frozen, x):
    with torch.no_grad():
        before = frozen(x)
        frozen.first.bias.add_(1)
        assert not torch.equal(frozen(x), before)
    assert casts_in(frozen, x) == 0


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_training_steps_between_two_evaluations_are_seen(make, options, x):
    model, reference = fxamp.convert(Net(), torch.bfloat16).freeze(), fxamp.convert(Net(), torch.bfloat16)
    optimizer = make(model.parameters(), lr=0.5, **options)
    for _ in range(3):
        with torch.no_grad():
            reference.load_state_dict(model.state_dict())
            assert torch.equal(model(x), reference(x))
        model(x).square().mean().backward()
        optimizer.step()


def test_a_write_through_data_is_seen_after_freezing_again(frozen, x):
    with torch.no_grad():
        before = frozen(x)
        frozen.first.bias.data.add_(1)
        assert torch.equal(frozen(x), before), "documented: such a write leaves no trace"
        assert frozen.freeze() is frozen
        assert not torch.equal(frozen(x), before)


def test_training_a_frozen_model_works(frozen, x):
    frozen(x).sum().backward()
    assert float(frozen.first.weight.grad.abs().sum()) > 0


def test_graphs_captured_later_are_frozen_too(x):
    model = fxamp.convert(Net(), torch.bfloat16).freeze()
    casts_in(model, x)
    assert casts_in(model, x) == 0


def test_copies_and_pickles_stay_frozen_and_have_their_own_weights(frozen, x):
    for twin in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        casts_in(twin, x)
        assert casts_in(twin, x) == 0
        with torch.no_grad():
            twin.first.weight.zero_()
            assert not torch.equal(twin(x), frozen(x))


class Freezing(Net):
    """A model with a method of that name."""

    def freeze(self) -> str:
        return "the user's own"


def test_the_users_own_method_wins(x):
    assert fxamp.convert(Freezing(), torch.bfloat16, example_inputs=(x,)).freeze() == "the user's own"


def test_a_written_weight_is_not_kept(x):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4, 4))

        def forward(self, x):
            self.seen.add_(1.0)
            return x @ self.seen

    model = fxamp.convert(Counting(), torch.bfloat16, example_inputs=(x,)).freeze()
    with torch.no_grad():
        assert not torch.equal(model(x), model(x))


def test_a_graph_without_weights_is_left_alone():
    graph = torch.fx.symbolic_trace(nn.ReLU()).graph
    assert not KeepWeights().apply(graph)
