"""Behind sizes that the data decides, what does not hang on the data is known as everywhere else."""

import copy
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.capture.open_sizes import OpenSizes
from fxamp.fakes import UNKNOWN, Fakes
from fxamp.model.engine import engine_of

X = torch.randn(2, 6, 8)
SOME = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 0, 1]]).bool()
MASKS = [SOME, ~SOME, SOME | True, torch.arange(12).view(2, 6) == 3]


def put_back(model, x, mask):
    y = torch.zeros_like(x)
    y[mask] = model.fc(x[mask])
    y = y if y.shape[1] > 3 else y * 64
    return model.last(y)


def padded(model, x, mask):
    """Rows are taken out, and go back to their places, as around a kernel for sequences of many lengths."""
    rows = mask.flatten().nonzero().flatten()
    chosen = model.fc(x.flatten(0, 1)[rows])
    y = torch.zeros(mask.numel(), chosen.shape[-1]).index_copy(0, rows, chosen)
    batch, length = mask.shape
    y = y.view(batch, length, *chosen.shape[1:])
    return model.last(y * (64 if y.shape != x.shape else 1))


def columns(model, x, mask):
    y = model.fc(x[mask])
    return model.last(y * 64 if y.shape[-1] != 8 or y.shape[1:].numel() != 8 else y)


def reduced(model, x, mask):
    y = model.fc(x[mask]).mean(0)
    return model.last(y if y.shape == (8,) and y.size(0) == 8 and len(y) == 8 else y * 64)


def loss(model, x, mask):
    found = F.cross_entropy(model.fc(x[mask]), torch.arange(12).view(2, 6)[mask] % 8)
    return model.last(x[:, 0]) * (found if found.shape == () and found.numel() == 1 else 64)


def iterated(model, x, mask):
    rows = torch.zeros(3, 8).index_add(0, torch.arange(3), model.fc(x[mask]).sum(0).expand(3, 8))
    return torch.stack([model.last(row) * place for place, row in enumerate(rows)])


class Deciding(nn.Module):
    def __init__(self, body) -> None:
        super().__init__()
        self.fc, self.last, self.body = nn.Linear(8, 8), nn.Linear(8, 8), body

    def forward(self, x, mask):
        return self.body(self, x, mask)


def _run(model, x, mask):
    model.zero_grad()
    y = model(x, mask)
    y.square().mean().backward()
    return y.detach(), *(parameter.grad for parameter in model.parameters())


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("body", [put_back, padded, columns, reduced, loss, iterated])
def test_python_may_decide_on_it(body, level):
    torch.manual_seed(0)
    model = Deciding(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level=level, example_inputs=(X, SOME))
    for mask in MASKS:
        for mine, theirs in zip(_run(converted, X, mask), _run(model, X, mask), strict=True):
            assert mine.shape == theirs.shape and (mine - theirs).norm() <= theirs.norm() * 2**-5
    (variant,) = engine_of(converted).all_variants()
    assert variant.captured.method == "symbolic"
    report = fxamp.report(converted)
    assert [row.precision for row in report.rows if row.op == "linear"] == ["low"] * (4 if body is iterated else 2)


@pytest.mark.parametrize("body", [put_back, padded])
def test_other_sizes_are_decided_on_anew(body):
    torch.manual_seed(0)
    model = Deciding(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for length in (6, 5, 4, 3, 2, 5, 3):
        for mask in MASKS[:3]:
            expected = model(X[:, :length], mask[:, :length])
            assert (converted(X[:, :length], mask[:, :length]) - expected).norm() < expected.norm() * 2**-5
    assert len(engine_of(converted).all_variants()) <= 4


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "ask",
    [
        lambda x, mask: x[mask].shape[0] > 1,
        lambda x, mask: len(x[mask].squeeze(0).sum(0).shape) == 1,
        lambda x, mask: (x[mask] + torch.ones(2, 8))[:1].shape[0] == 1 and x[mask].shape[0] == 2,
        lambda x, mask: x[mask].flatten().shape[0] > 8,
    ],
    ids=["rows", "squeezed", "added", "flattened"],
)
def test_what_hangs_on_the_data_is_not_known(ask):
    model = Deciding(lambda self, x, mask: self.fc(x) if ask(x, mask) else self.last(x))
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for rows in (torch.tensor([1, 3]), torch.tensor([3]), torch.tensor([0, 5])):
        mask = torch.isin(torch.arange(12).view(2, 6), rows)
        expected = model(X, mask)
        assert (converted(X, mask) - expected).norm() < expected.norm() * 2**-5


class Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def test_a_write_behind_such_a_size_is_seen():
    """A low copy from before it would be stale."""
    torch.manual_seed(0)

    def body(self, x, mask):
        y = x[mask] + 1
        before = self.fc(y)
        Write.apply(y)
        return self.last(y) + before.sum()

    model = Deciding(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="symbolic")
    expected = model(X, SOME)
    assert (converted(X, SOME) - expected).norm() < expected.norm() * 2**-5


@pytest.mark.parametrize("is_shared_first", [False, True])
@pytest.mark.parametrize("view", [lambda x, row: x.select(0, row), lambda x, row: x.select(0, row).view(2, 4)])
def test_a_view_at_a_place_that_the_data_decides_lies_in_the_memory_of_the_whole(view, is_shared_first):
    """Which another input may lie in, too: what is read of it afterwards is read anew."""

    class Clearing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x, y, mask):
            before, row = self.first(y), mask.sum().item() // 9
            view(x, row).zero_()
            return before + self.second(y)

    torch.manual_seed(0)
    model = Clearing()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for is_shared in (is_shared_first, not is_shared_first, is_shared_first):
        results = []
        for run in (converted, model):
            x = X[0].clone()
            results.append(run(x, x if is_shared else x.clone(), SOME))
        assert (results[0] - results[1]).norm() < results[1].norm() * 2**-5
    assert {variant.captured.method for variant in engine_of(converted).all_variants()} == {"symbolic"}


@pytest.mark.parametrize("write", ["index_add_", "index_copy_"])
def test_what_an_op_has_written_into_is_what_it_gives(write):
    def body(self, x, mask):
        rows = mask.flatten().nonzero().flatten()
        y = torch.zeros(12, 8)
        z = getattr(y, write)(0, rows, self.fc(x.flatten(0, 1)[rows]))
        y += 1
        return self.last(z if z.shape == (12, 8) else z * 64)

    torch.manual_seed(0)
    model = Deciding(body)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, capture="symbolic", example_inputs=(X, SOME))
    for mask in MASKS:
        expected = model(X, mask)
        assert (converted(X, mask) - expected).norm() < expected.norm() * 2**-5


def test_a_number_that_torch_takes_for_an_open_size_ends_it():
    graph = torch.fx.Graph()
    x, mask, y = map(graph.placeholder, ("x", "mask", "y"))
    chosen = graph.call_function(torch.masked_select, (x, mask))
    added, after = graph.call_method("add", (chosen, y)), graph.call_method("sum", (chosen,))
    fakes = Fakes(nn.Module())
    for node, value in ((x, torch.ones(6)), (mask, torch.ones(6).bool()), (y, torch.ones(4))):
        node.meta["val"] = fakes.of(value)
    sizes = OpenSizes(fakes)
    assert sizes.closed(chosen) is UNKNOWN
    assert OpenSizes(fakes).closed(added) is UNKNOWN
    assert sizes.closed(after).shape == ()
    assert sizes.closed(added) is UNKNOWN and sizes.closed(after) is UNKNOWN


@pytest.mark.parametrize("is_written", [False, True])
def test_those_that_read_the_same_numbers_of_an_input_have_the_same(is_written):
    graph, sizes = torch.fx.Graph(), OpenSizes(fakes := Fakes(nn.Module()))
    x, counts = map(graph.placeholder, ("x", "counts"))
    x.meta["val"], counts.meta["val"] = fakes.of(torch.ones(6, 8)), fakes.of(torch.ones(2).long())

    def split():
        doubled = graph.call_method("mul", (counts, 2))
        doubled.meta["val"] = fakes.of(torch.ones(2).long())
        numbers = graph.call_method("tolist", (doubled,))
        parts = graph.call_method("split", (x, numbers))
        assert sizes.closed(numbers) is UNKNOWN and sizes.closed(parts) is UNKNOWN
        return numbers, parts

    numbers, parts = split()
    if is_written:
        graph.call_method("add_", (counts, 1))
    others, other_parts = split()
    is_same = graph.call_function(operator.eq, (numbers, others))
    assert sizes.closed(is_same) is (UNKNOWN if is_written else True)
    row = [graph.call_function(operator.getitem, (each, 0)) for each in (parts, other_parts)]
    assert [sizes.closed(each) for each in row] == [UNKNOWN, UNKNOWN]
    assert sizes.closed(graph.call_function(torch.cat, ([parts, other_parts],))) is UNKNOWN
    whole = graph.call_function(torch.cat, (parts,))
    assert sizes.closed(whole).shape == (6, 8)


ROWS, MASK = torch.randn(6, 8), torch.tensor([True, False, True, True, False, True])
WRITTEN_BACK = {
    "masked_scatter": lambda x, mask, y: x.masked_scatter(mask[:, None], y),
    "masked_scatter by names": lambda x, mask, y: torch.masked_scatter(x, mask=mask[:, None], source=y),
    "index_add": lambda x, mask, y: x.index_add(0, torch.where(mask)[0], y),
    "index_copy": lambda x, mask, y: x.index_copy(0, torch.where(mask)[0], y),
    "index_put": lambda x, mask, y: x.index_put((mask,), y),
}


@pytest.mark.parametrize("written", WRITTEN_BACK)
def test_what_chosen_rows_are_written_into_has_known_sizes(written):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, mask):
            y = WRITTEN_BACK[written](x, mask, self.fc(x[mask]))
            return self.fc(y * 64 if y.shape == x.shape and y.shape[1] == 8 else y)

    model = Written()
    converted = fxamp.convert(model, dtype=torch.bfloat16)
    for x, mask in ((ROWS, MASK), (ROWS, torch.arange(6) == 1), (torch.cat([ROWS, ROWS]), torch.cat([MASK, ~MASK]))):
        expected = model(x, mask)
        assert (converted(x, mask) - expected).norm() < expected.norm() * 2**-6
    assert {variant.captured.method for variant in engine_of(converted).all_variants()} == {"symbolic"}


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_mask_of_unknown_size_says_how_large_the_result_is():
    class Broadcast(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, mask):
            y = x[:1].masked_scatter(x[mask] > 0, self.fc(x))
            return self.fc(y * 64 if y.shape[0] == 1 else y)

    model = Broadcast()
    converted = fxamp.convert(model, dtype=torch.bfloat16)
    for mask in (MASK, torch.arange(6) == 1):
        expected = model(ROWS, mask)
        assert (converted(ROWS, mask) - expected).norm() < expected.norm() * 2**-6
