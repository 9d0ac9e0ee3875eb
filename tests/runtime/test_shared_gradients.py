"""Parameters that two optimizers of one scaler share: their gradients are unscaled once, whoever comes first."""

import itertools
import math

import pytest
import torch
from torch import nn

import fxamp
from fxamp.runtime import device_skip
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.scaler_base import StepOrderError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.125),
    "fused": lambda p: torch.optim.SGD(p, 0.125, momentum=0.5, fused=True),
    "masters": lambda p: fxamp.MasterWeightOptimizer(torch.optim.SGD(p, 0.125)),
    "fused_masters": lambda p: fxamp.MasterWeightOptimizer(torch.optim.SGD(p, 0.125, momentum=0.5, fused=True)),
}
PAIRS = list(itertools.product(OPTIMIZERS, OPTIMIZERS))
SCALE = 1024.0


@pytest.fixture(params=[False, True], ids=["as_on_a_gpu", "host_flag"], autouse=True)
def way_to_skip(request, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", request.param)


class Sharing:
    """Two optimizers: of the first parameter and the one that is shared, and of that and the last."""

    def __init__(self, kinds, scaler, shared=torch.float32):
        self.scaler = scaler
        self.weights = [nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype)) for dtype in (torch.float32, shared) * 2]
        self.weights.pop()
        first, middle, last = self.weights
        self.optimizers = [OPTIMIZERS[kinds[0]]([first, middle]), OPTIMIZERS[kinds[1]]([middle, last])]

    def backward(self, *factors):
        terms = [(weight.float() * factor).sum() for weight, factor in zip(self.weights, factors, strict=True)]
        self.scaler.scale(sum(terms)).backward()

    def zero_grad(self, **options):
        for optimizer in self.optimizers:
            optimizer.zero_grad(**options)

    def seen(self):
        return [weight.tolist() for weight in self.weights]


def step_both(side):
    return [side.scaler.step(optimizer) for optimizer in side.optimizers]


def unscale_first(side):
    side.scaler.unscale_(side.optimizers[0])
    return step_both(side)


def unscale_second(side):
    side.scaler.unscale_(side.optimizers[1])
    return step_both(side)


def unscale_both(side):
    for optimizer in side.optimizers * 2:
        side.scaler.unscale_(optimizer)
    return step_both(side)


def unscale_between(side):
    first, second = side.optimizers
    result = side.scaler.step(first)
    side.scaler.unscale_(second)
    return [result, side.scaler.step(second)]


def unscale_and_clip(side):
    for optimizer in side.optimizers:
        side.scaler.unscale_(optimizer)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.clamp_(max=0.5)
    return step_both(side)


def measure(side):
    return [side.scaler.step(optimizer, max_grad_norm=math.inf) for optimizer in side.optimizers]


ORDERS = [step_both, unscale_first, unscale_second, unscale_both, unscale_between, unscale_and_clip, measure]


def both(kinds, shared, play):
    """What a scaler makes of it, and what comes without one."""
    seen = []
    for scaler in (LossScaler(SCALE), LossScaler(enabled=False)):
        side = Sharing(kinds, scaler, shared)
        play(side)
        seen.append(side.seen())
    return seen


def kinds_of(shared):
    """A plain optimizer takes no float16 gradients."""
    return [kinds for kinds in PAIRS if shared is torch.float32 or all("masters" in kind for kind in kinds)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shared", [torch.float32, torch.float16])
def test_the_steps_are_those_of_no_scaler(shared, order):
    def play(side):
        for factor in (0.5, 0.25, 1.0):
            side.zero_grad()
            side.backward(factor, 2 * factor, 4 * factor)
            order(side)
            side.scaler.update()

    for kinds in kinds_of(shared):
        found, expected = both(kinds, shared, play)
        assert found == expected, kinds


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shared", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_overflow_skips_those_that_have_it(bad, shared, order):
    for kinds in kinds_of(shared):
        side = Sharing(kinds, LossScaler(SCALE), shared)
        before = side.seen()
        factors = [0.25, 0.5, 0.25]
        factors[bad] = math.inf
        side.backward(*factors)
        skipped = [result.skipped for result in order(side)]
        side.scaler.update()
        have_it = [bad < 2, bad > 0]
        if skipped != have_it:
            # Only the device knows whether a step of masters has unscaled what is shared in float32.
            is_unsure = kinds[0].endswith("masters") and shared is torch.float32
            assert skipped == [True, True] and (is_unsure or order is unscale_and_clip)
        after = side.seen()
        for place, by in ((0, skipped[0]), (1, all(skipped)), (2, skipped[1])):
            assert (after[place] == before[place]) is by, (kinds, place)
        assert side.scaler.get_scale() == SCALE / 2
        side.zero_grad()
        side.backward(0.5, 0.5, 0.5)
        order(side)
        assert all(weight.isfinite().all() for weight in side.weights)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("shared", [torch.float32, torch.float16])
def test_gradients_that_were_cleared_and_come_anew_are_unscaled(shared, set_to_none):
    def play(side):
        for factor in (0.5, 0.25):
            for optimizer in side.optimizers:
                side.zero_grad(set_to_none=set_to_none)
                side.backward(factor, factor, factor)
                side.scaler.step(optimizer)
            side.scaler.update()

    for kinds in kinds_of(shared):
        found, expected = both(kinds, shared, play)
        assert found == expected, kinds


def test_a_third_optimizer_and_one_that_is_gone():
    weight = nn.Parameter(torch.tensor([1.0]))
    scaler = LossScaler(SCALE)
    scaler.scale(weight.sum()).backward()
    kept = torch.optim.SGD([weight], 0.125)
    scaler.step(kept)
    scaler.step(torch.optim.SGD([weight], 0.125))
    scaler.step(fxamp.MasterWeightOptimizer(torch.optim.SGD([weight], 0.125)))
    assert weight.item() == 1 - 3 * 0.125


def test_a_parameter_that_was_added_is_shared_from_then_on():
    weights = [nn.Parameter(torch.tensor([1.0])) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], 0.125) for weight in weights]
    scaler = LossScaler(SCALE)
    for is_shared in (False, True):
        if is_shared:
            optimizers[1].add_param_group({"params": [weights[0]]})
        scaler.scale(weights[0].sum() + weights[1].sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for weight in weights:
            weight.grad = None
    assert [weight.item() for weight in weights] == [1 - 3 * 0.125, 1 - 2 * 0.125]


class Writes(torch.optim.SGD):
    """As some optimizers do, it leaves in the gradients what it has made of them."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.125, momentum=0.5, nesterov=True, foreach=True), lambda p: Writes(p, 0.125)]
)
def test_what_the_first_step_leaves_in_the_gradients_is_unscaled(make, explicit, wrapped, monkeypatch):
    monkeypatch.setattr(
        device_skip, "LOOKS_AT_HOST_FLAGS", True
    )  # on a GPU others' steps are given copies of gradients
    seen = []
    for scaler in (LossScaler(SCALE), LossScaler(enabled=False)):
        weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        first, second = make([weight]), torch.optim.SGD([weight], 0.125)
        first = fxamp.MasterWeightOptimizer(first) if wrapped else first
        for _ in range(2):
            weight.grad = None
            scaler.scale(weight.sum()).backward()
            if explicit:
                scaler.unscale_(first)
            scaler.step(first)
            scaler.step(second)
            scaler.update()
        seen.append(weight.tolist())
    assert seen[0] == seen[1]


def test_a_sparse_gradient_is_unscaled_once():
    weight = nn.Parameter(torch.ones(4, 2))
    optimizers = [torch.optim.SGD([weight], 0.125) for _ in range(2)]
    scaler = LossScaler(SCALE)
    rows = torch.tensor([0, 2, 2])
    scaler.scale(nn.functional.embedding(rows, weight, sparse=True).sum()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert weight[:, 0].tolist() == [0.75, 1.0, 0.5, 1.0]


def test_rows_of_a_sparse_gradient_that_add_up_to_an_overflow_skip_both():
    weight = nn.Parameter(torch.ones(4, 2))
    optimizers = [torch.optim.SGD([weight], 0.125) for _ in range(2)]
    scaler = LossScaler(1.0)
    rows = torch.tensor([2, 2])
    scaler.scale((nn.functional.embedding(rows, weight, sparse=True) * 3e38).sum()).backward()
    assert [scaler.step(optimizer).skipped for optimizer in optimizers] == [True, True]
    assert weight.eq(1).all()


@pytest.mark.parametrize("kinds", PAIRS)
def test_the_norm_of_the_first_step_is_told_after_the_second(kinds):
    side = Sharing(kinds, LossScaler(SCALE))
    side.backward(0.25, 0.5, 0.25)
    results = step_both(side)
    assert results[0].grad_norm == pytest.approx(math.sqrt(2 * (0.25**2 + 0.5**2)))
    assert results[1].grad_norm == pytest.approx(math.sqrt(2 * (0.25**2 + 0.5**2)))


def test_with_a_closure_what_stands_before_it_is_unscaled_once():
    weight = nn.Parameter(torch.tensor([1.0]))
    first, second = torch.optim.SGD([weight], 0.125), torch.optim.SGD([weight], 0.125)
    scaler = LossScaler(SCALE)

    def closure():
        second.zero_grad()
        loss = weight.sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    scaler.step(first)
    scaler.step(second, closure=closure)
    assert weight.item() == 0.75


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers_of_one_scaled_loss(level):
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizers = [torch.optim.SGD(model.parameters(), 0.125) for _ in range(2)]
    model, optimizers = fxamp.initialize(model, optimizers, opt_level=level, verbosity=0)
    for _ in range(3):
        with fxamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizers) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    assert model.weight.tolist() == [[1 - 6 * 0.125] * 2]


@pytest.mark.parametrize("call", [LossScaler.unscale_, LossScaler.step])
def test_a_backward_that_adds_to_what_another_has_unscaled_is_refused(call):
    side = Sharing(("sgd", "sgd"), LossScaler(SCALE))
    side.backward(0.5, 0.5, 0.5)
    side.scaler.unscale_(side.optimizers[0])
    side.backward(0.5, 0.5, 0.5)
    with pytest.raises(StepOrderError, match=r"shared with another optimizer.*unscale after the last backward"):
        call(side.scaler, side.optimizers[1])


def test_an_optimizer_that_shares_nothing_is_not_looked_at(monkeypatch):
    weights = [nn.Parameter(torch.tensor([1.0])) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], 0.125) for weight in weights]
    scaler = LossScaler(SCALE)
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    scaler.step(optimizers[0])
    looked = []
    monkeypatch.setattr("fxamp.runtime.shared_gradients._unscaled_by", lambda *given: looked.append(given))
    scaler.step(optimizers[1])
    assert not looked and [weight.item() for weight in weights] == [0.875, 0.875]
