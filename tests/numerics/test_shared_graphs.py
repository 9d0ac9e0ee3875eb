"""Looks at a model of equal modules for which Dynamo runs one graph: each is run with its own weights."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of
from fxamp.numerics.bisect import find_deny
from fxamp.numerics.ranges_file import load_ranges

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16, 64) * 0.3), nn.Parameter(torch.randn(64, 16) * 0.1)
        self.register_buffer("shift", torch.randn(16))

    def forward(self, x):
        h = torch.relu(x @ self.a)
        if float(h.detach().sum()) > 1e9:
            h = h * 0.5
        return x + torch.sin(h @ self.b + self.shift)


class Net(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(output):
    return output.float().pow(2).mean()


def step(model):
    model.zero_grad()
    output = model(X)
    loss(output).backward()
    return output.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture(params=["auto", "dynamo"])
def pair(request):
    model = Net()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture=request.param)
    for _ in range(2):
        step(converted)
    assert len(engine_of(converted).way.variants) < 2 * len(model.blocks), "equal modules share graphs"
    return model, converted


def test_a_step_that_is_watched_is_the_step(pair):
    _, converted = pair
    expected, gradients = step(converted)
    with fxamp.watch_nan(converted):
        found, others = step(converted)
    assert torch.equal(found, expected) and all(map(torch.equal, others, gradients))


@pytest.mark.parametrize("has_gradients", [True, False])
def test_compare_runs_what_the_model_runs(pair, has_gradients):
    model, converted = pair
    compared = fxamp.compare(model, converted, (X,), loss if has_gradients else None)
    with torch.set_grad_enabled(has_gradients):
        exact, mixed = model(X), converted(X)
    assert compared.output == pytest.approx(float((mixed - exact).norm() / exact.norm()), rel=1e-3)
    if has_gradients:
        assert compared.loss == (loss(exact).item(), loss(mixed).item())
        assert {row.name for row in compared.weights} >= {f"blocks.{place}.a" for place in range(4)}


def test_a_model_with_other_weights_is_run_with_those(pair):
    _, converted = pair
    other = Net()
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.mul_(1.5)
    kept = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
    compared = fxamp.compare(other, converted, (X,), loss)
    assert compared.loss[0] == pytest.approx(loss(other(X)).item())
    assert all(torch.equal(kept[name], tensor) for name, tensor in converted.state_dict().items())


def test_a_parameter_that_is_not_finite_is_named_by_its_own_module(pair):
    _, converted = pair
    with torch.no_grad():
        converted.blocks[3].a[0, 0] = float("nan")
    found = fxamp.find_nan(converted, (X,), loss)
    assert (found.phase, found.module) == ("parameter", "blocks.3")
    with pytest.raises(FloatingPointError, match=r"in module blocks\.3"), fxamp.watch_nan(converted):
        step(converted)


def test_ranges_are_those_of_all_blocks(pair):
    model, _ = pair
    with torch.no_grad():
        model.blocks[3].b.mul_(1e8)
    assert max(found.values.largest for found in fxamp.profile(model, [X], progress=False).nodes.values()) > 65504
    assert any(finding.pattern == "overflow" for finding in fxamp.audit(model, (X,)).findings)


def test_ranges_of_a_block_decide_in_the_graph_that_runs_it(pair, tmp_path):
    model, _ = pair
    with torch.no_grad():
        model.blocks[3].b.mul_(1e6)
    found = fxamp.profile(model, [X], loss, progress=False)
    assert {found.nodes[name].module for name in found.deny()} == {"blocks.3"}  # whosever graph ran it
    found.save(tmp_path / "ranges.json")
    ranges = load_ranges(tmp_path / "ranges.json")
    converted = fxamp.convert(model, torch.float16, capture="dynamo", ranges=ranges)
    step(converted)
    shared = engine_of(converted).way.shared["blocks.3.b"].removesuffix(".b")
    products = [row for row in fxamp.report(converted).rows if row.op == "matmul" and row.module == shared]
    assert "ranges" in {row.reason_kind for row in products} and converted(X).isfinite().all()


def test_a_search_finds_its_nodes_with_the_right_weights(pair):
    model, converted = pair
    error = fxamp.compare(model, converted, (X,)).output
    found = find_deny(model, converted, (X,), error * 0.5, max_runs=12, progress=False)
    again = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="dynamo", overrides=found.overrides)
    assert found.is_met and fxamp.compare(model, again, (X,)).output == pytest.approx(found.error, rel=1e-3)
