"""Recurrent modules in models that only Dynamo can follow: they run low there as in a symbolic graph."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxamp
from tests.zoo.measure import autocast

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

LOW = torch.bfloat16
KINDS = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}


class Tagger(nn.Module):
    """Decides on its data, as the CRF layers of taggers do, so that no symbolic graph can hold it."""

    def __init__(self, kind: type[nn.Module], is_packed: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.recurrent = kind(16, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 8)
        self.is_packed = is_packed

    def forward(self, words: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        if self.is_packed:
            packed, _ = self.recurrent(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            x, _ = pad_packed_sequence(packed, batch_first=True)
        else:
            x, _ = self.recurrent(x)
        return self.scored(self.head(x), lengths)

    def scored(self, scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if scores.isnan().all():  # no word is known
            return scores.amax(-1)
        return scores.logsumexp(-1)


def step(model: nn.Module, words: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(words, lengths)
    out.float().square().mean().backward()
    return {"": out.detach()} | {name: weight.grad for name, weight in model.named_parameters()}


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Mean over tensors of the relative distance."""
    return sum(float((found[name] - value).norm() / value.norm()) for name, value in exact.items()) / len(exact)


def check(model: nn.Module, converted: nn.Module) -> None:
    """Two steps, no further from float32 than autocast's, give or take."""
    words, lengths = torch.randint(0, 40, (3, 7)), torch.tensor([7, 3, 5])
    peer = copy.deepcopy(model)
    for _ in range(2):
        exact, ours = step(model, words, lengths), step(converted, words, lengths)
        with autocast():
            theirs = step(peer, words, lengths)
        assert distance(ours, exact) <= 1.2 * distance(theirs, exact)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_run_low_where_dynamo_captures(kind):
    torch.manual_seed(0)
    model = Tagger(kind, is_packed=False)
    converted = fxamp.convert(copy.deepcopy(model), dtype=LOW)
    check(model, converted)
    report = fxamp.report(converted)
    assert set(report.captures) == {"dynamo"}
    assert [(row.op, row.precision) for row in report.rows if row.op in (KINDS[kind], "linear")] == [
        (KINDS[kind], "low"),
        ("linear", "low"),
    ]
    assert not [row for row in report.rows if row.op == "zeros"], "the first states are made in the dtype of the input"


def test_packed_sequences_stay_outside_unless_the_layer_is_converted_by_itself(monkeypatch):
    """As autocast runs packed ones on every CPU; where it fails at others, all layers of the class have graphs."""
    monkeypatch.setattr("fxamp.model.seen.autocast_runs_lstm", lambda low, device: True)
    torch.manual_seed(0)
    model = Tagger(nn.LSTM, is_packed=True)
    converted = fxamp.convert(copy.deepcopy(model), dtype=LOW)
    check(model, converted)
    assert any("recurrent.weight_ih_l0" in line for line in fxamp.report(converted).outside)
    apart = copy.deepcopy(model)
    apart.recurrent = fxamp.convert(apart.recurrent, dtype=LOW)
    converted = fxamp.convert(apart, dtype=LOW)
    check(model, converted)
    assert [row.precision for row in fxamp.report(apart.recurrent).rows if row.op == "lstm"] == ["low"]


def test_weights_of_a_recurrent_layer_that_are_replaced_are_read():
    torch.manual_seed(0)
    converted = fxamp.convert(Tagger(nn.LSTM, False), dtype=LOW)
    words, lengths = torch.randint(0, 40, (3, 7)), torch.tensor([7, 3, 5])
    before = converted(words, lengths)
    with torch.no_grad():
        converted.recurrent.weight_ih_l0.mul_(2)
    assert not torch.equal(converted(words, lengths), before)
    converted.recurrent.weight_ih_l0 = nn.Parameter(torch.zeros_like(converted.recurrent.weight_ih_l0))
    model = Tagger(nn.LSTM, False)
    model.load_state_dict(converted.state_dict())
    torch.testing.assert_close(converted(words, lengths), model(words, lengths), rtol=2e-2, atol=2e-2)
    step(converted, words, lengths)
    assert converted.recurrent.weight_ih_l0.grad.any()
