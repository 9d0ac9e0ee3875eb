"""Faults and errors planted behind single nodes of real models: exactly that node is named."""

import os

import pytest
import torch
from torch import fx

import fxamp
from fxamp import ir
from fxamp.numerics.compare import compare
from tests.numerics import planting

# A few nodes of some models in every run; ZOO=all plants behind every node of every model, half an hour.
EVERY = os.environ.get("ZOO") == "all"
SAMPLE = {
    "bert_base": 4, "gpt2_small": 3, "llama_1b": 3, "lstm_lm": 5, "transformer": 3, "ncf": 5, "unet": 4, "vit_b16": 3,
    "gnmt": 3, "deciding, dynamo": 6,
}  # fmt: skip
"""Nodes of each model that are planted."""


@pytest.mark.parametrize("name", planting.SUBJECTS)
def test_a_fault_behind_any_node_is_named(name):
    if name not in SAMPLE and not EVERY:
        pytest.skip("ZOO=all runs it")
    if name.startswith("hf:"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    about = planting.subject(name)
    every = 1 if EVERY else max(1, len(about.nodes) // SAMPLE[name])
    found = planting.verdicts(about, every=every, offset=sum(map(ord, name)))
    assert {verdict.fault for verdict in found} == set(planting.FAULTS)
    assert [str(verdict) for verdict in found if not verdict.is_exact] == []


class WrittenOut(torch.nn.Module):
    """A GELU by hand: one op in the converted graph, eight in the float32 run."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        return self.last(0.5 * y * (1.0 + torch.tanh(0.7978845608028654 * (y + 0.044715 * torch.pow(y, 3.0)))))


def test_a_fault_behind_an_op_that_float32_has_written_out_is_named(monkeypatch):
    made = WrittenOut(), (torch.linspace(-1, 1, 32).reshape(4, 8),), lambda output: output.square().sum()
    monkeypatch.setitem(planting.SUBJECTS, "written out", (lambda: made, "symbolic"))
    about = planting.subject("written out")
    (node,) = [node for node in about.nodes if ir.mark(node).op == "gelu"]
    verdicts = [planting.judged(about, node, fault) for fault in planting.FAULTS]
    assert len(verdicts) == 6 and [str(verdict) for verdict in verdicts if not verdict.is_exact] == []


def noisy(names):
    """Nodes whose values are half wrong wherever they run low."""

    def run_node(self, node):
        value = planting.PLAIN(self, node)
        is_sensitive = node.name in names and ir.mark(node).precision == "low"
        return value * 1.5 if is_sensitive else value

    return run_node


@pytest.mark.parametrize("places", [(0,), (0.5,), (1,), (0.25, 0.75), (0, 0.4, 1), (0, 0.2, 0.5, 0.7, 1)])
@pytest.mark.parametrize("name", ["gpt2_small", "lstm_lm"])
def test_bisection_finds_exactly_the_planted_nodes(name, places, monkeypatch):
    about = planting.subject(name)
    call, nodes = about.call, about.nodes
    gemms = [node.name for node in nodes if ir.mark(node).op == "linear"]
    planted = {gemms[round(place * (len(gemms) - 1))] for place in places}
    clean = compare(call.model, call.model, (call.args, call.kwargs)).output
    monkeypatch.setattr(fx.Interpreter, "run_node", noisy(planted))
    found = fxamp.find_deny(call.model, call.model, (call.args, call.kwargs), 2 * clean, progress=False)
    assert found.is_met and found.is_smallest and set(found.nodes) == planted


def test_a_swallowed_infinity_that_float32_has_too_is_no_finding():
    """An op of the model makes -inf in float32 as well, and takes care of it: a healthy model is healthy."""

    class Bucket(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * (x * 0.0).log().clamp(min=-1.0).exp()

    x = torch.linspace(-1, 1, 32).reshape(4, 8).abs()
    converted = fxamp.convert(Bucket(8, 8), torch.float16, (x,))
    assert fxamp.find_nan(converted, (x,), lambda output: output.sum()) is None
    with fxamp.watch_nan(converted):
        converted(x)


def test_a_swallowed_infinity_of_low_precision_alone_is_named():
    class Saturated(torch.nn.Linear):
        def forward(self, x):
            return torch.tanh(super().forward(x))

    layer = Saturated(8, 8)
    with torch.no_grad():
        layer.weight.fill_(6e4)
    x = torch.ones(4, 8)
    found = fxamp.find_nan(fxamp.convert(layer, torch.float16, (x,)), (x,))
    assert (found.op, found.phase) == ("linear", "forward") and found.overrides
