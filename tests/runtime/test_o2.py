"""The runtime under models converted at O2: float32 checkpoints, exact masters, apex's script."""

import pytest
import torch

import fxamp
from fxamp.runtime import (
    GraphedStep,
    LossScaler,
    MasterWeightOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from fxamp.runtime import apex as amp
from fxamp.runtime.masters import master_of


def plain(seed=0):
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    return torch.nn.Sequential(*layers)


def converted(seed=0, dtype=torch.bfloat16):
    model = fxamp.convert(plain(seed), dtype=dtype, opt_level="O2")
    optimizer = MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), 0.01, fused=True))
    return model, optimizer, LossScaler(2.0**8, growth_interval=2)


def batch(number):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(number))


def train(model, optimizer, scaler, numbers):
    step = GraphedStep(model, lambda outputs, inputs: (outputs - inputs[:, :4]).square().mean(), optimizer, scaler)
    return [float(step(batch(number), batch(number))) for number in numbers]


def test_masters_are_the_float32_weights_before_conversion():
    exact = {name: value.clone() for name, value in plain().named_parameters()}
    model, _, _ = converted()
    lowered = [name for name, parameter in model.named_parameters() if master_of(parameter) is not None]
    assert lowered
    for name, parameter in model.named_parameters():
        if name in lowered:
            assert parameter.dtype == torch.bfloat16
            assert torch.equal(master_of(parameter), exact[name])


def test_checkpoint_is_float32_loads_plain_and_resumes_bit_exact(tmp_path):
    whole = converted()
    expected = train(*whole, range(6))
    first = converted()
    losses = train(*first, range(3))
    model, optimizer, scaler = first
    save_checkpoint(tmp_path / "a.pt", model=model, optimizer=optimizer, scaler=scaler)
    second = converted(seed=7)
    load_checkpoint(tmp_path / "a.pt", model=second[0], optimizer=second[1], scaler=second[2])
    assert losses + train(*second, range(3, 6)) == expected
    for mine, theirs in zip(second[1].master_params(), whole[1].master_params(), strict=True):
        assert torch.equal(mine, theirs)

    single = plain(seed=9)
    load_checkpoint(tmp_path / "a.pt", model=single)
    for parameter, master in zip(single.parameters(), model.parameters(), strict=True):
        exact = master_of(master)
        assert torch.equal(parameter, master if exact is None else exact)


def test_plain_float32_weights_load_into_a_converted_model(tmp_path):
    single = plain(seed=3)
    torch.save(single.state_dict(), tmp_path / "plain.pt")
    model, optimizer, _ = converted()
    load_checkpoint(tmp_path / "plain.pt", model=model)
    for master, parameter in zip(optimizer.master_params(), single.parameters(), strict=True):
        assert torch.equal(master, parameter)


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2", "O3"])
def test_a_script_written_for_apex(opt_level):
    """Its only change is the import: amp is fxamp.runtime.apex."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    losses = []
    for number in range(25):
        inputs = batch(number)
        optimizer.zero_grad()
        loss = (model(inputs).float() - inputs[:, :4]).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] in (1.0, 2.0**16)


def test_at_o3_a_float32_op_on_a_buffer_that_is_stored_low_is_computed_aside_and_reported_as_it_runs():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 8)
            self.register_buffer("state", torch.ones(8))

        def forward(self, x):
            self.state.mul_(0.5).mul_(1e5)  # which float16 does not hold
            return self.fc(x) + self.state

    x = torch.zeros(2, 8)
    model = fxamp.convert(Counting(), torch.float16, (x,), opt_level="O3")
    model(x)
    assert model.state.dtype == torch.float16 and torch.equal(model.state, torch.full((8,), 5e4).half())
    rows = {(row.op, row.precision) for row in fxamp.report(model).rows if row.op in ("buffer", "mul", "copy")}
    assert rows == {("buffer", "low"), ("mul", "low"), ("mul", "high"), ("copy", "low")}


SEEN = []


class Scales(torch.autograd.Function):
    """A function of the user's, which torch.autocast does not reach."""

    @staticmethod
    def forward(ctx, x, weight):
        SEEN.append(weight.dtype)
        ctx.save_for_backward(weight)
        return x * weight.mean(1)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad * weight.mean(1), grad.sum(0)[:, None].expand_as(weight) / weight.shape[1]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize(
    "reads",
    [
        lambda weight, h: Scales.apply(h, weight),
        lambda weight, h: Scales.apply(h, weight.t().t()),
        lambda weight, h: torch.vmap(lambda row: torch.nn.functional.linear(row, weight))(h),
        lambda weight, h: sum(torch.broadcast_tensors(h, weight[0])),
    ],
    ids=["function", "view", "vmap", "broadcast_tensors"],
)
def test_a_stored_weight_beside_a_value_that_is_written_is_read_in_float32(reads, writes):
    """A function that nobody lists may return a view of any of its arguments, of a weight that is low, too."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            h = torch.cumsum(self.first(x), 0)
            if x.shape[0] > 100:  # so that no graph is known at the conversion
                h = h * 2
            if writes:
                h += 1
            y = reads(self.first.weight, h)
            return self.last(y) + h

    plain, x = Net(), torch.linspace(-1, 1, 32).reshape(4, 8)
    model = fxamp.convert(Net(), dtype=torch.bfloat16, opt_level="O2")
    assert model.first.weight.dtype == torch.bfloat16
    model(x)
    SEEN.clear()
    for net in (plain, model):
        net.outputs = net(x)
        net.outputs.square().sum().backward()
    assert set(SEEN) <= {torch.float32}
    torch.testing.assert_close(model.outputs, plain.outputs, rtol=0.03, atol=0.03)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.float(), other.grad, rtol=0.1, atol=0.1)
