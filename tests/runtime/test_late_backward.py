"""A scaled backward between unscale_() and step(): an error where it reaches the same gradients, nothing elsewhere."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch._dynamo import compiled_autograd

import fxamp
from fxamp.errors import OptionError
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.scaler_base import StepOrderError

REFUSED = r"step\(\) was called.*after unscale_\(\).*another scaled loss.*scaled again in part: unscale after the last"


def both() -> tuple[torch.nn.Parameter, torch.optim.Optimizer, LossScaler]:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    return weight, torch.optim.SGD([weight], 0.5), LossScaler(1024.0)


def loss_of(weight: torch.Tensor) -> torch.Tensor:
    return (weight * torch.tensor([0.25, 0.5])).sum()


@pytest.mark.parametrize("zeroed", ["kept", "zeroed", "dropped"])
@pytest.mark.parametrize("is_scaled_first", [False, True])
def test_a_second_loss_after_unscale_is_refused(is_scaled_first, zeroed):
    weight, optimizer, scaler = both()
    losses = scaler.scale([loss_of(weight), loss_of(weight)])
    losses[0].backward()
    scaler.unscale_(optimizer)
    if zeroed != "kept":
        optimizer.zero_grad(set_to_none=zeroed == "dropped")
    (losses[1] if is_scaled_first else scaler.scale(loss_of(weight))).backward()
    before = weight.detach().clone()
    with pytest.raises(StepOrderError, match=REFUSED):
        scaler.step(optimizer)
    with pytest.raises(StepOrderError, match=r"already been called.*gradients have changed"):
        scaler.unscale_(optimizer)
    assert torch.equal(weight, before)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_of(weight)).backward()
    scaler.step(optimizer)
    assert torch.equal(weight.detach(), before - 0.5 * torch.tensor([0.25, 0.5]))


def test_the_same_loss_once_more_is_refused():
    weight, optimizer, scaler = both()
    scaled = scaler.scale(loss_of(weight))
    scaled.backward(retain_graph=True)
    scaler.unscale_(optimizer)
    scaled.backward()
    with pytest.raises(StepOrderError, match=REFUSED):
        scaler.step(optimizer)


def test_a_loop_without_unscale_has_no_hooks():
    """Each would cost as much as all the rest of scale()."""
    weight, optimizer, scaler = both()
    for _ in range(2):
        scaled = scaler.scale(loss_of(weight))
        scaled.backward()
        assert not scaled._backward_hooks and len(scaler.scaled_losses) == 1
        scaler.step(optimizer)
        scaler.update()


def test_a_copy_made_while_a_loss_is_there_steps_as_the_scaler_would():
    weight, optimizer, scaler = both()
    scaled = scaler.scale(loss_of(weight))
    scaled.backward()
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.scaled_losses == [] and len(scaler.scaled_losses) == 1
        twin.scale(torch.ones(()))  # which takes the state to a device
        twin.step(optimizer)
    assert not torch.equal(weight.detach(), torch.tensor([1.0, 2.0]))


def test_losses_of_a_generator_are_watched_too():
    weight, optimizer, scaler = both()
    first, second = scaler.scale(loss_of(weight) for _ in range(2))
    first.backward()
    scaler.unscale_(optimizer)
    second.backward()
    with pytest.raises(StepOrderError, match=REFUSED):
        scaler.step(optimizer)


def test_the_sum_of_scaled_losses_counts():
    weight, optimizer, scaler = both()
    scaler.scale(loss_of(weight)).backward()
    scaler.unscale_(optimizer)
    sum(scaler.scale([loss_of(weight), loss_of(weight)])).backward()  # scaled after unscale_()
    with pytest.raises(StepOrderError, match=REFUSED):
        scaler.step(optimizer)


@pytest.mark.parametrize("options", [{}, {"masters": "fp32"}])
def test_under_masters_too(options):
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD([weight], 0.5), **options), LossScaler(8.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(StepOrderError, match=REFUSED):
        scaler.step(optimizer)
    assert weight.tolist() == [1.0, 1.0]


def test_only_the_optimizer_that_was_reached_is_refused():
    weight, optimizer, scaler = both()
    other = torch.nn.Parameter(torch.ones(2))
    others = torch.optim.SGD([other], 0.5)
    scaler.scale(loss_of(weight) + loss_of(other)).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(others)
    scaler.scale(loss_of(other)).backward()
    scaler.step(optimizer)
    with pytest.raises(StepOrderError, match=REFUSED):
        scaler.step(others)


# What is no mistake, and gives GradScaler's numbers.


def another_models_loss(scaler, optimizer, weight):
    generator = torch.nn.Parameter(torch.ones(2))
    scaler.scale(loss_of(generator)).backward()


def through_the_frozen_model(scaler, optimizer, weight):
    """A generator's loss goes through the discriminator, whose parameters are frozen meanwhile."""
    generator = torch.nn.Parameter(torch.ones(2))
    weight.requires_grad_(False)
    scaler.scale((weight * generator).sum()).backward()
    weight.requires_grad_(True)


def clipped(scaler, optimizer, weight):
    torch.nn.utils.clip_grad_norm_([weight], 0.1)


def clipped_and_another(scaler, optimizer, weight):
    clipped(scaler, optimizer, weight)
    another_models_loss(scaler, optimizer, weight)


def a_plain_loss(scaler, optimizer, weight):
    loss_of(weight).backward()


def a_penalty_of_autograd_grad(scaler, optimizer, weight):
    (gradient,) = torch.autograd.grad(scaler.scale((weight**2).sum()), [weight], create_graph=True)
    assert gradient.tolist() == [2048.0, 4096.0]


def dropped(scaler, optimizer, weight):
    scaler.scale(loss_of(weight)).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "between",
    [
        another_models_loss,
        through_the_frozen_model,
        clipped,
        clipped_and_another,
        a_plain_loss,
        a_penalty_of_autograd_grad,
    ],
)
def test_what_is_no_mistake_steps_as_under_torchs_scaler(between):
    ends = []
    for kind in (LossScaler, torch.amp.GradScaler):
        weight, optimizer, _ = both()
        scaler = kind(init_scale=1024.0, device="cpu")
        scaler.scale(loss_of(weight)).backward()
        scaler.unscale_(optimizer)
        between(scaler, optimizer, weight)
        scaler.step(optimizer)
        scaler.update()
        ends.append(weight.tolist())
    assert ends[0] == ends[1] != [1.0, 2.0]


def test_gradients_that_are_dropped_afterwards_do_nothing():
    weight, optimizer, scaler = both()
    scaler.scale(loss_of(weight)).backward()
    scaler.unscale_(optimizer)
    dropped(scaler, optimizer, weight)
    scaler.step(optimizer)
    assert weight.tolist() == [1.0, 2.0]


def test_a_closure_may_scale_as_often_as_it_likes():
    ends = []
    for scaler in (LossScaler(1024.0), LossScaler(enabled=False)):
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = torch.optim.LBFGS([weight], 0.1, max_iter=5)

        def evaluate(weight=weight, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = ((weight - 3) ** 4).sum()
            scaler.scale(loss).backward()
            return loss

        for _ in range(3):
            scaler.step(optimizer, closure=evaluate)
            scaler.update()
        ends.append(weight.detach().clone())
    torch.testing.assert_close(*ends)
    assert not torch.equal(ends[0], torch.tensor([1.0, 2.0]))


def test_a_step_that_evaluates_by_itself_is_refused():
    """Its gradients would be scaled, and nobody would look whether they are finite."""

    class Evaluates(torch.optim.SGD):
        def step(self, closure=None, *, again=None):
            with torch.enable_grad():
                again()
            super().step()

    Evaluates.__module__ = "elsewhere"
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer, scaler = Evaluates([weight], 0.5), LossScaler(1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(weight)).backward()
        with pytest.raises(OptionError, match=r"the optimizer's step scales a loss.*closure=\.\.\."):
            scaler.step(optimizer, again=lambda: scaler.scale(loss_of(weight)).backward())
        assert weight.tolist() == [1.0, 2.0]
        scaler.update()


def test_a_compiled_step_scales(fresh_dynamo):
    weight, optimizer, scaler = both()

    @torch.compile(backend="eager")
    def scaled(factor: torch.Tensor) -> torch.Tensor:
        return scaler.scale((weight * factor).sum())

    scaled(torch.tensor([0.25, 0.5])).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [0.875, 1.75]


def test_a_loss_keeps_no_scaler_alive_beyond_itself():
    weight, _, scaler = both()
    scaled = scaler.scale(loss_of(weight))
    reference = weakref.ref(scaler)
    del scaled, scaler
    gc.collect()
    assert reference() is None


def test_a_list_stays_a_list():
    weight, _, scaler = both()
    scaled = scaler.scale([loss_of(weight), (loss_of(weight), torch.ones(()))])
    assert isinstance(scaled, list) and isinstance(scaled[1], tuple)
    assert fxamp.LossScaler(enabled=False).scale([1]) == [1]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd_traces_the_hook(fresh_dynamo, fullgraph):
    """What it traces is not watched, and steps as under torch's scaler."""
    weight, optimizer, scaler = both()
    scaler.scale(loss_of(weight)).backward()
    scaler.unscale_(optimizer)
    other = torch.nn.Parameter(torch.ones(2))
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=fullgraph)):
        scaler.scale(loss_of(other)).backward()
    scaler.step(optimizer)
    assert other.grad.tolist() == [256.0, 512.0] and weight.tolist() == [0.875, 1.75]
