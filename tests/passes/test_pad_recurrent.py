"""Recurrent calls of odd sizes: padded block by block, they compute what they compute unpadded."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxamp
from fxamp import ir
from fxamp.model.engine import engine_of
from tests.passes.pad_models import BF16, Gemms, assert_equal_in_float64, numbers, step

X = torch.randn(8, 2, 5, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A recurrent module, and a linear layer that reads its output; last states come back too."""

    def __init__(self, make, width, reads=None):
        super().__init__()
        self.rnn, self.head, self.reads = make(), nn.Linear(width, 3), reads

    def forward(self, x):
        output, states = self.rnn(x) if self.reads is None else self.reads(self.rnn, x)
        return self.head(output), states


def packed(rnn, x):
    output, states = rnn(pack_padded_sequence(x, torch.tensor([8, 3])))
    return pad_packed_sequence(output)[0], states


def from_states(rnn, x):
    first = torch.ones(1, 2, 13)
    return rnn(x, (first, first * 0.5))


def from_written_states(rnn, x):
    first = x.new_zeros(1, 2, 13)
    first.add_(0.5)
    return rnn(x, (first, first))


def twice(rnn, x):
    output, states = rnn(x)
    again, states = rnn(x, states)
    return output + again, states


MODELS = {
    "lstm": Net(lambda: nn.LSTM(5, 13), 13),
    "gru": Net(lambda: nn.GRU(5, 13), 13),
    "tanh": Net(lambda: nn.RNN(5, 13), 13),
    "relu": Net(lambda: nn.RNN(5, 13, nonlinearity="relu"), 13),
    "layers": Net(lambda: nn.LSTM(5, 13, num_layers=3), 13),
    "no bias": Net(lambda: nn.GRU(5, 13, bias=False), 13),
    "batch first": Net(lambda: nn.LSTM(5, 13, batch_first=True), 13),
    "both": Net(lambda: nn.LSTM(5, 13, bidirectional=True), 26),
    "both, layers": Net(lambda: nn.GRU(5, 13, num_layers=2, bidirectional=True), 26),
    "projection": Net(lambda: nn.LSTM(5, 21, num_layers=2, proj_size=11), 11),
    "projection, both": Net(lambda: nn.LSTM(5, 21, proj_size=11, bidirectional=True), 22),
    "own states": Net(lambda: nn.LSTM(5, 13), 13, from_states),
    "written states": Net(lambda: nn.LSTM(5, 13), 13, from_written_states),
    "states carried": Net(lambda: nn.LSTM(5, 13), 13, twice),
    "packed": Net(lambda: nn.LSTM(5, 13), 13, packed),
    "packed, both, layers": Net(lambda: nn.GRU(5, 13, num_layers=2, bidirectional=True), 26, packed),
    "packed, projection": Net(lambda: nn.LSTM(5, 21, proj_size=11, bidirectional=True), 22, packed),
    "packed, cell by name": Net(lambda: nn.RNN(5, 13), 13, packed),
    "aligned input": Net(lambda: nn.LSTM(5, 13), 13, lambda rnn, x: rnn(x * 2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_step_is_equal_in_float64(name, mode):
    assert_equal_in_float64(MODELS[name].train(mode == "train"), X)


class Steps(nn.Module):
    """Cells called in a loop, each state read by the next step."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(5, 13), nn.Linear(13, 3)

    def forward(self, x):
        state, outputs = None, []
        for part in x.unbind(0):
            state = self.cell(part, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return self.head(torch.stack(outputs)), state


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda i, o: nn.RNNCell(i, o, False, "relu")])
def test_cells_in_a_loop_are_equal_in_float64(cell):
    assert_equal_in_float64(Steps(cell), X[:3])


def test_states_stay_padded_between_steps():
    run = step(Steps(nn.LSTMCell), X[:3])
    cells = [node for node in run.graph.nodes if ir.mark(node).op == "lstm_cell"]
    assert [ir.mark(cell).pad.state for cell in cells] == ["padded"] * 3
    assert [state.target for state in cells[1].args[1]] == [state.target for state in cells[2].args[1]]
    assert [state.args[0] for state in cells[2].args[1]] == [cells[1]] * 2


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["lstm", "both, layers", "projection"])
def test_every_product_that_runs_is_aligned(name, opt_level):
    x = numbers(8, 8, 5)
    model = MODELS[name]
    with Gemms() as gemms, torch.backends.mkldnn.flags(enabled=False):
        run = step(model, x, opt_level=opt_level)
    assert len(gemms.seen) > 20
    assert not [(op, size) for op, size in gemms.seen if size % 8]
    assert {name: value.shape for name, value in run.gradients.items()} == {
        name: value.shape for name, value in model.named_parameters()
    }


def test_the_next_layer_reads_the_padded_output():
    run = step(MODELS["lstm"], X)
    lstm, linear = (next(n for n in run.graph.nodes if ir.mark(n).op == op) for op in ("lstm", "linear"))
    assert linear.args[0].args[0] is lstm
    assert "K 5 -> 8, N 13 -> 16; stays padded" in ir.mark(lstm).pad.text
    assert not [node for node in run.activation_pads() if ir.mark(node.args[0]).op == "new_zeros"]


def test_two_directions_are_cut_once():
    run = step(MODELS["both"], X)
    cuts = [node for node in run.parts() if ir.mark(node.args[0]).op == "getitem"]
    assert len(cuts) == 3  # the output, and two states that the model returns


def test_both_directions_that_are_returned_are_cut_each():
    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(5, 13, bidirectional=True)

        def forward(self, x):
            return self.rnn(x)[0]

    model, found = Returned(), []
    for pad_to in (8, 0):
        converted = fxamp.convert(model, BF16, example_inputs=(X,), pad="always", pad_to=pad_to)
        model.zero_grad()
        result = converted(X)
        result.square().sum().backward()
        found.append((result, *[parameter.grad for parameter in model.parameters()]))
        assert bool(fxamp.report(converted).padded) == bool(pad_to)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)


def test_a_projection_that_could_not_be_told_is_left_alone():
    run = step(Net(lambda: nn.LSTM(5, 14, proj_size=13), 13), X)
    note = next(ir.mark(node).pad for node in run.graph.nodes if ir.mark(node).op == "lstm")
    assert note.state == "cannot" and "one size" in note.text


def test_a_result_written_in_place_keeps_its_size():
    def written(rnn, x):
        return rnn(x)[0].index_fill_(2, torch.tensor([3]), 1.0), x

    with torch.backends.mkldnn.flags(enabled=False):  # oneDNN's LSTM keeps its result for backward
        run = step(Net(lambda: nn.LSTM(5, 13), 13, written), X)
    note = next(ir.mark(node).pad for node in run.graph.nodes if ir.mark(node).op == "lstm")
    assert "K 5 -> 8" in note.text and "N 13 ->" not in note.text


class Translator(nn.Module):
    """An encoder of packed sequences whose lengths the caller gives, as translation models have it."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(30, 5), nn.Linear(26, 31)
        self.rnn = nn.LSTM(5, 13, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, words, lengths):
        given = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        output, (last, _) = self.rnn(given)
        return self.head(pad_packed_sequence(output, batch_first=True)[0]), last


def test_what_packed_sequences_decide_is_no_fact():
    """Other lengths, batches and numbers of steps than those of the example."""
    torch.manual_seed(0)
    plain = Translator()
    words, lengths = torch.arange(28).reshape(4, 7), torch.tensor([7, 2, 5, 3])
    padded = fxamp.convert(copy.deepcopy(plain), BF16, (words, lengths), pad="always")
    unpadded = fxamp.convert(plain, BF16, (words, lengths), pad_to=0)
    graph = engine_of(padded).all_variants()[0].graph
    notes = {ir.mark(node).op: ir.mark(node).pad.text for node in graph.nodes if ir.mark(node).pad is not None}
    assert "K 5 -> 8, N 13 -> 16" in notes["lstm"] and "K 26 -> 32, N 31 -> 32" in notes["linear"]
    for rows, steps, many in [
        (4, 7, lengths),
        (4, 7, [7, 7, 7, 7]),
        (4, 7, [1, 6, 1, 1]),
        (3, 5, [5, 4, 4]),
        (1, 2, [1]),
    ]:
        call = words[:rows, :steps], torch.as_tensor(many)
        (ours, last), (theirs, other) = padded(*call), unpadded(*call)
        assert ours.shape == theirs.shape and last.shape == other.shape
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-8)
        torch.testing.assert_close(last, other, rtol=2**-6, atol=2**-8)
    assert len(engine_of(padded).all_variants()) == 1


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_every_product_of_packed_sequences_is_aligned(opt_level):
    words, lengths = torch.arange(56).reshape(8, 7) % 30, torch.full((8,), 7)
    with Gemms() as gemms, torch.backends.mkldnn.flags(enabled=False):
        step(Translator(), words, lengths, opt_level=opt_level)
    assert len(gemms.seen) > 20
    assert not [(op, size) for op, size in gemms.seen if size % 8]


def test_a_model_that_decides_on_sizes_keeps_those_of_packed_sequences_open():
    class Decides(Translator):
        def forward(self, words, lengths):
            return super().forward(words if words.size(1) > 2 else words * 2, lengths)

    words, lengths = torch.arange(28).reshape(4, 7), torch.tensor([7, 2, 5, 3])
    torch.manual_seed(0)
    plain = Decides()
    padded = fxamp.convert(copy.deepcopy(plain), BF16, (words, lengths), pad="always")
    unpadded = fxamp.convert(plain, BF16, (words, lengths), pad_to=0)
    for many in (lengths, torch.tensor([7, 7, 1, 1]), torch.tensor([1, 1, 1, 2])):
        torch.testing.assert_close(padded(words, many), unpadded(words, many), rtol=2**-6, atol=2**-8)


def test_dropout_between_layers_is_told():
    model = Net(lambda: nn.LSTM(5, 13, num_layers=2, dropout=0.5), 13)
    for mode in (True, False):
        run = step(model.train(mode), X)
        note = next(ir.mark(node).pad for node in run.graph.nodes if ir.mark(node).op == "lstm")
        assert ("draws numbers for the padded shape" in note.text) == mode


def test_auto_leaves_a_recurrence_that_waits_for_memory():
    model = fxamp.convert(nn.LSTM(1500, 1500), BF16, torch.empty(35, 20, 1500), pad="auto")
    graph = engine_of(model).all_variants()[0].graph
    (note,) = [ir.mark(node).pad for node in graph.nodes if ir.mark(node).op == "lstm"]
    assert note.state == "left" and "memory-bound" in note.text
