"""Modules of torch.jit inside a model: whole in the graph, in float32, and not touched by the capture."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

BF16 = torch.bfloat16
MAKERS = {"script": torch.jit.script, "trace": lambda part: torch.jit.trace(part, (torch.randn(4, 8),))}


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return torch.relu(self.norm(self.fc(x)))


class Net(nn.Module):
    """Reads the shape of what the compiled part gives."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.part = MAKERS[kind](Part())

    def forward(self, x):
        h = self.part(self.first(x))
        return self.last(h.view(h.shape[0] * 2, -1).view(-1, 8))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("capture", ["symbolic", "auto"])
def test_a_compiled_part_stays_whole_and_what_is_around_it_runs_low(kind, capture):
    model, x = Net(kind), torch.randn(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    converted = fxamp.convert(model, BF16, (x,), capture=capture)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"the capture wrote {name}"
    rows = {row.name: row for row in fxamp.report(converted).rows}
    assert (rows["part"].precision, rows["part"].shape) == ("high", (4, 8))
    assert rows["linear"].precision == rows["linear_1"].precision == "low"
    converted(x)
    assert len(engine_of(converted).all_variants()) == 1, (
        "what torch.jit keeps in its modules at a first call is its own"
    )


@pytest.mark.parametrize("kind", MAKERS)
def test_it_trains_as_the_model_does(kind):
    model, x = Net(kind), torch.randn(4, 8)
    plain = Net(kind)
    converted = fxamp.convert(model, BF16)
    for net in (converted, plain):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(engine_of(converted).all_variants()) == 1
    for (name, value), expected in zip(converted.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0.02, atol=0.01, msg=name)
    assert int(converted.part.norm.num_batches_tracked) == int(plain.part.norm.num_batches_tracked)
    plain.eval()
    converted.eval()
    torch.testing.assert_close(converted(x), plain(x), rtol=0.05, atol=0.02)
