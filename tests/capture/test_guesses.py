"""Behind a size that data decides: what Python asks is answered as in eager, or the call is left to Dynamo."""

import operator

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

X = torch.randn(6, 8)
TWO = (2, 2)
MASK = torch.tensor([True, False, True, True, False, True])

SELECTIONS = {
    "x[mask]": lambda x: x[MASK],
    "masked_select": lambda x: x.masked_select(MASK[:, None]).view(-1, 8),
    "nonzero": lambda x: x[MASK.nonzero().flatten()],
    "where": lambda x: x[torch.where(MASK)[0]],
    "repeat_interleave": lambda x: x.repeat_interleave(MASK.long() + 1, dim=0),
    "unique": lambda x: x[torch.unique(MASK.long())],
}
QUESTIONS = {
    "isinstance": lambda y: isinstance(y, torch.Tensor),
    "is_tensor": lambda y: torch.is_tensor(y),
    "not a list": lambda y: not isinstance(y, (list, tuple)),
    "dtype": lambda y: y.dtype == torch.float32,
    "dim": lambda y: y.dim() == 2 and y.ndim == 2,
    "device": lambda y: y.device.type == "cpu",
    "layout": lambda y: y.layout == torch.strided,
    "is_floating_point": lambda y: y.is_floating_point(),
    "hasattr": lambda y: hasattr(y, "shape") and not hasattr(y, "logits"),
    "what is made of it": lambda y: isinstance(y.relu() + 1, torch.Tensor),
    "parts": lambda y: isinstance(y.chunk(2, 1), tuple),
    "sizes": lambda y: len(y.shape) == 2 and len(y.size()) == 2,
    "sizes taken": lambda y: sum(1 for _ in y.shape) == 2,
    "sizes in a tuple": lambda y: y.new_zeros((*y.shape[1:], 3)).dim() == 2,
    "sizes added": lambda y: len(y.shape[1:] + TWO + y.shape) == 5,
    "shown in a message": lambda y: torch._check_tensor_all(y < 99, lambda: f"too large: {y}") is None,
}


class Selecting(nn.Module):
    """Doubles where the answer is yes."""

    def __init__(self, select, ask) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.select, self.ask = select, ask

    def forward(self, x):
        y = self.select(x)
        return self.fc(y * 64 if self.ask(y) else y)


def _converted(select, ask):
    model = Selecting(select, ask)
    converted = fxamp.convert(model, dtype=torch.bfloat16)
    assert (converted(X) - model(X)).norm() < model(X).norm() * 2**-6
    assert model.ask(select(X))
    return converted


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_eagers_answer(question):
    converted = _converted(SELECTIONS["x[mask]"], QUESTIONS[question])
    assert {variant.captured.method for variant in engine_of(converted).all_variants()} == {"symbolic"}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_each_selection_is_known_by_its_type(selection):
    converted = _converted(SELECTIONS[selection], QUESTIONS["isinstance"])
    assert {variant.captured.method for variant in engine_of(converted).all_variants()} == {"symbolic"}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "ask",
    [
        lambda y: isinstance(y.shape[0], int),
        lambda y: y.squeeze().dim() == 2,
        lambda y: y.squeeze(0).dim() == 2,
        lambda y: y.shape[0] > 1,
        lambda y: y.shape[1] == 8,
        lambda y: isinstance(y.tolist(), list),
        lambda y: len(y.squeeze(0).shape) == 2,
        lambda y: len(y.shape[: y.shape[0] - 3]) == 1,
    ],
    ids=["a size's type", "squeezed", "rows squeezed", "rows", "columns", "list", "sizes squeezed", "as many sizes"],
)
def test_what_hangs_on_the_size_is_left_to_dynamo(ask):
    _converted(SELECTIONS["x[mask]"], ask)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("squeezed", [lambda y: y.squeeze(), lambda y: y.squeeze(0), lambda y: torch.squeeze(y, dim=0)])
@pytest.mark.parametrize("rank", [operator.methodcaller("dim"), operator.attrgetter("ndim")], ids=["dim", "ndim"])
def test_a_rank_that_hangs_on_the_size_is_not_guessed(rank, squeezed):
    class Ranked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, mask):
            y = squeezed(x[mask])
            return self.fc(y * 64 if rank(y) == 2 else y)

    model = Ranked()
    converted = fxamp.convert(model, dtype=torch.bfloat16)
    for mask in (MASK, torch.arange(6) == 1):
        expected = model(X, mask)
        assert (converted(X, mask) - expected).norm() < expected.norm() * 2**-6


class Padded(nn.Module):
    """Pads by amounts that are tensors, as codecs do by buffers of a convolution's sizes."""

    def __init__(self, asks=lambda y: True):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("before", torch.tensor(2))
        self.conv, self.asks = nn.Conv1d(6, 4, 3), asks

    def forward(self, x):
        after = torch.ceil((x.shape[-1] - self.before) / 4).to(torch.int64)
        y = nn.functional.pad(x, (self.before, after), mode="replicate")
        return self.conv(y if self.asks(y) else y * 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, "low"])
def test_what_is_padded_by_tensors_has_a_dtype(given, dtype):
    model, x = Padded(), X[None].to(dtype if given == "low" else given)
    converted = fxamp.convert(model, dtype, capture="symbolic")
    for before in (2, 4):
        with torch.no_grad():
            model.before.fill_(before)
        found, expected = converted(x), model(x.float())
        assert found.shape == expected.shape
        assert (found - expected).norm() < expected.norm() * 4 * torch.finfo(dtype).eps
    assert {row.op: row.runs_in for row in fxamp.report(converted).rows}["conv1d"] == str(dtype).removeprefix("torch.")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("asks", [lambda y: y.shape[-1] == 10, lambda y: y.shape[-1] > 11])
def test_how_much_tensors_pad_is_not_guessed(asks):
    """One on each side would make 10 columns; there are 12."""
    model = Padded(asks)
    found, expected = fxamp.convert(model, torch.bfloat16)(X[None]), model(X[None])
    assert (found - expected).norm() < expected.norm() * 2**-6
