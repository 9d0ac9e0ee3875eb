"""Lists of numbers that the data decides, as many as a size says: `x.split(counts.tolist())`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.model.engine import engine_of

X = torch.randn(12, 8)
COUNTS = [torch.tensor(counts) for counts in ([5, 7], [1, 11], [12, 0], [4, 8])]


def attended(model, x, counts):
    """Images of many sizes in one sequence, each of which attends to itself alone."""
    rows = x.shape[0]
    heads = model.fc(x).view(rows, 2, 4).transpose(0, 1).unsqueeze(0)
    parts = [torch.split(heads, counts.tolist(), dim=2) for _ in range(3)]
    done = [F.scaled_dot_product_attention(q, k, v).transpose(1, 2) for q, k, v in zip(*parts, strict=True)]
    y = torch.cat(done, dim=1).reshape(rows, -1)
    return model.last(y if y.shape == (rows, 8) else y * 64)


def by_hand(model, x, counts):
    heads = model.fc(x)
    parts = heads.split_with_sizes(counts.tolist())
    y = torch.cat([torch.softmax(part @ part.T, -1) @ part for part in parts])
    return model.last(y if y.shape == x.shape else y * 64)


def pooled(model, x, counts):
    parts = x.split(counts.tolist())
    return torch.stack([model.last(model.fc(part).sum(0)) for part in parts]) * len(parts)


def counted(model, x, counts):
    first, second = counts.tolist()
    y = model.fc(x)
    return model.last(torch.cat([y[:first] * second, y[first:] - first]))


def summed(model, x, counts):
    numbers = [number * 2 + 1 for number in counts.tolist()]
    return model.last(model.fc(x)) * sum(numbers) / len(numbers)


def nested(model, x, counts):
    rows = torch.stack([counts, counts * 2], dim=1)
    y = model.fc(x)
    for count, twice in rows.tolist():
        y = y + count / (1 + twice)
    return model.last(y)


def sized(model, x, counts):
    first, second = counts.tolist()
    parts = torch.split(model.fc(x), [first, second])
    return model.last(torch.cat([parts[1], parts[0]]))


class Listing(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.fc, self.last, self.body = nn.Linear(8, 8), nn.Linear(8, 8), body

    def forward(self, x, counts):
        return self.body(self, x, counts)


def _run(model, x, counts):
    model.zero_grad()
    y = model(x, counts)
    y.square().mean().backward()
    return y.detach(), *(parameter.grad for parameter in model.parameters())


def _check_close(converted, model, x, counts):
    for mine, theirs in zip(_run(converted, x, counts), _run(model, x, counts), strict=True):
        assert mine.shape == theirs.shape and (mine - theirs).norm() <= theirs.norm() * 2**-5


BODIES = [attended, by_hand, pooled, counted, summed, nested, sized]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("body", BODIES)
def test_one_graph_holds_whatever_the_numbers(body, level):
    torch.manual_seed(0)
    model = Listing(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (X, COUNTS[0]), level)
    for counts in COUNTS:
        _check_close(converted, model, X, counts)
    (variant,) = engine_of(converted).all_variants()
    assert variant.captured.method == "symbolic"
    report = fxamp.report(converted)
    assert {row.precision for row in report.rows if row.op == "linear"} == {"low"}


@pytest.mark.parametrize("body", [attended, by_hand, pooled, summed, nested])
def test_as_many_numbers_as_before_are_one_graph_for_all_sizes(body):
    torch.manual_seed(0)
    model = Listing(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (X, COUNTS[0]), capture="symbolic")
    for many in (2, 3, 1, 3, 2, 1):
        for rows in (12, 9, 6):
            counts = torch.full((many,), rows // many)
            counts[0] += rows - counts.sum()
            _check_close(converted, model, torch.randn(rows, 8), counts)
    assert len(engine_of(converted).all_variants()) <= 3 * 2


def test_a_part_that_is_written_into_changes_the_whole():
    class Clearing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, counts):
            y = x * 2
            before = self.first(y)
            y.split(counts.tolist())[0].zero_()
            return before + self.second(y)

    torch.manual_seed(0)
    model = Clearing()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (X, COUNTS[0]), capture="symbolic")
    for counts in COUNTS:
        expected = model(X, counts)
        assert (converted(X, counts) - expected).norm() < expected.norm() * 2**-5


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_python_does_with_a_number_is_still_its_own():
    def body(self, x, counts):
        first, _ = counts.tolist()
        return self.last(x) if first % 2 else self.fc(x)

    model = Listing(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for counts in COUNTS:
        expected = model(X, counts)
        assert (converted(X, counts) - expected).norm() < expected.norm() * 2**-5


def test_a_number_is_no_key_of_a_dictionary_that_holds_for_all():
    def body(self, x, counts):
        first, _ = counts.tolist()
        return self.fc(x) * {5: 2.0, 1: 3.0}.get(first, 0.5)

    with pytest.raises(fxamp.CaptureError, match=r"hash\(\)"):
        fxamp.convert(Listing(body), torch.bfloat16, (X, COUNTS[0]), capture="symbolic")


def by_rows(model, x):
    return torch.stack([model.last(model.fc(row)) * place for place, row in enumerate(x)])


def by_len(model, x):
    return torch.cat([model.last(model.fc(x[place])) for place in range(len(x))])


@pytest.mark.parametrize("body", [by_rows, by_len])
def test_who_goes_through_rows_decides_on_how_many_there_are_alone(body):
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return body(self, x)

    torch.manual_seed(0)
    model = Rows()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, torch.randn(2, 4, 8), capture="symbolic")
    for rows in (2, 3):
        for length in range(1, 12):
            x = torch.randn(rows, length, 8)
            expected = model(x)
            assert (converted(x) - expected).norm() < expected.norm() * 2**-5
    assert len(engine_of(converted).all_variants()) <= 4
