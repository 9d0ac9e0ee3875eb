"""Python asks the data of inputs: each answer has its graph, and every call the one that its own data chooses."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

import fxamp
from fxamp.model.engine import engine_of

X = torch.randn(2, 6, 8)
SOME, ALL = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 0, 0, 1]]).bool(), torch.ones(2, 6).bool()


class Asking(nn.Module):
    """Goes one way or the other, as `ask` says."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 8)
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.ask, self.most, self.calls = ask, 3, 0

    def forward(self, x, mask):
        return self.fc(x) if self.ask(self, x, mask) else self.other(x).relu()


def counted(model, _, mask):
    model.calls += 1
    return bool(mask.sum() > 4 * model.calls)


def embedded(model, _, mask):
    """The length of a layer's result, which another call may have otherwise."""
    return bool(mask[:, -model.embed(mask.long()).shape[1] + 1 :].all())


def _asked_before(mask):
    """What is written after the question was computed says nothing of it."""
    mask = mask.clone()
    found = mask.all().item()
    mask[0] = False
    return found


QUESTIONS = {
    "all": lambda _, __, mask: mask.all(),
    "sum": lambda _, __, mask: mask.long().sum(1).max() > 5,
    "item": lambda _, __, mask: mask.sum().item() >= 10,
    "bool": lambda _, __, mask: bool((~mask).any()),
    "not": lambda _, __, mask: not mask[0].any(),
    "of values": lambda _, x, mask: x[mask].abs().sum() > 1,
    "of both": lambda _, x, mask: (x.abs().sum(-1) > 0).eq(mask).all() and mask.float().mean() > 0.9,
    "a size's": lambda _, x, mask: mask.sum() > x.shape[1] + 2,
    "an attribute's": lambda model, _, mask: mask.sum(1).min() > model.most,
    "a layer's size": embedded,
    "twice": lambda _, __, mask: all(mask.all() for _ in range(9)),
    "of one device": lambda model, x, mask: all(
        mask.to(y.device, y.dtype).all() for y in (x, model.fc(x)) for _ in "ab"
    ),
    "written afterwards": lambda _, __, mask: _asked_before(mask),
    "in place of": lambda _, x, mask: torch.where(mask, x.sum(-1), 0.0).isfinite().all() and mask.nonzero().numel() > 9,
    "two": lambda _, __, mask: bool(mask[0].all()) != bool(mask[1].all()),
}


EXAMPLE = {"example_inputs": (X, SOME)}


def _converted(ask, level="O1", **options):
    torch.manual_seed(0)
    model = Asking(ask)
    return model, fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level=level, **options)


def _agree(model, converted, x, mask):
    expected, found = model(x, mask), converted(x, mask)
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert 0 < (found - expected).norm() < expected.norm() * 2**-5


def _methods(converted):
    return [variant.captured.method for variant in engine_of(converted).all_variants()]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_each_call_goes_the_way_of_its_data(question, level):
    model, converted = _converted(QUESTIONS[question], level, example_inputs=(X, SOME))
    for mask in (SOME, ALL, ~ALL, SOME, ALL.clone(), SOME.flip(0)):
        _agree(model, converted, X, mask)
    assert 1 < len(_methods(converted)) <= 4 and {*_methods(converted)} == {"symbolic"}


@pytest.mark.parametrize("question", ["all", "twice", "of one device"])
def test_what_several_layers_ask_is_asked_once(question):
    _, converted = _converted(QUESTIONS[question])
    converted(X, ALL)
    (variant,) = engine_of(converted).all_variants()
    assert variant.captured.answers.questions == (True,)


@pytest.mark.parametrize("question", ["all", "a size's", "a layer's size", "an attribute's"])
def test_lengths_are_asked_about_with_their_own_sizes(question):
    model, converted = _converted(QUESTIONS[question])
    for length in (6, 5, 4, 3, 6, 2, 3):
        for mask in (SOME, ALL):
            _agree(model, converted, X[:, :length], mask[:, :length])
    assert len(_methods(converted)) <= 4 and {*_methods(converted)} == {"symbolic"}


def test_an_attribute_that_changes_is_asked_about_anew():
    model, converted = _converted(QUESTIONS["an attribute's"])
    for most in (3, 1, 6, 3):
        model.most = converted.most = most
        _agree(model, converted, X, SOME)
        _agree(model, converted, X, ALL)


def test_a_number_that_forward_counts_is_the_one_of_the_call():
    model, converted = _converted(counted)
    for _ in range(4):
        _agree(model, converted, X, ALL)
    assert converted.calls == model.calls == 4


def test_gradients_follow_the_way_that_was_taken():
    _, converted = _converted(QUESTIONS["all"])
    for mask, taken, left in ((SOME, "other", "fc"), (ALL, "fc", "other"), (SOME, "other", "fc")):
        converted.zero_grad()
        converted(X, mask).sum().backward()
        assert getattr(converted, taken).weight.grad is not None and getattr(converted, left).weight.grad is None


def written(model, _, mask):
    mask.logical_not_()
    return mask.all()


def written_through_a_view(model, _, mask):
    mask[0].fill_(True)
    return mask.all()


def of_a_layer(model, x, _):
    return model.fc(x).sum() > 0


def of_a_weight(model, x, _):
    return x.sum() > model.fc.bias.sum()


def of_what_is_drawn(model, x, _):
    return x.sum() > torch.randn(()) * 100


def of_many(model, x, mask):
    model.fc(x)  # so that it may not run before the graph
    return sum(bool(row[place].all()) for row in mask for place in range(3)) > 3


@pytest.mark.parametrize("ask", [written, written_through_a_view, of_a_layer, of_a_weight, of_what_is_drawn, of_many])
def test_what_is_not_asked_of_data(ask):
    with pytest.raises(fxamp.CaptureError, match="a traced value decides the control flow"):
        _converted(ask, capture="symbolic", example_inputs=(X, SOME.clone()))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("ask", [written, written_through_a_view, of_a_layer, of_many])
def test_what_is_not_asked_of_data_is_left_to_dynamo(ask):
    model, converted = _converted(ask)
    for mask in (SOME, ALL, ~SOME):
        expected = model(X, mask.clone())
        assert (converted(X, mask.clone()) - expected).norm() < expected.norm() * 2**-5


@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_asks_too():
    model, converted = _converted(QUESTIONS["all"])
    compiled = torch.compile(converted, backend="eager")
    _agree(model, compiled, X, ALL)
    assert len(_methods(converted)) == 1, "what torch.compile is shown has no data"
    for mask in (SOME, ALL, SOME):
        _agree(model, compiled, X, mask)
    _agree(model, converted, X, ALL)
    assert {*_methods(converted)} == {"symbolic"}


class Clearing(nn.Module):
    """Writes into one input before it asks another, which may lie in the same memory."""

    def __init__(self, write) -> None:
        super().__init__()
        self.fc, self.write = nn.Linear(8, 8), write

    def forward(self, x, mask, other):
        h = self.fc(x).relu_()
        self.write(other, (x > 1e9).sum().item())
        return h if mask.all() else -h


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_shared_first", [False, True])
@pytest.mark.parametrize(
    "write",
    [
        lambda other, zero: other.zero_(),
        lambda other, zero: other[:1].logical_not_(),
        lambda other, zero: other.narrow(0, zero, 1).view(-1).zero_(),
        lambda other, zero: other[:, : zero + 3].logical_not_(),
        lambda other, zero: other.select(0, zero).zero_(),
    ],
    ids=["whole", "view", "view at a place that data decides", "view of a size that data decides", "row"],
)
def test_inputs_that_share_memory_are_asked_as_eager_asks_them(write, is_shared_first):
    torch.manual_seed(0)
    model = Clearing(write)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for is_shared in (is_shared_first, not is_shared_first, is_shared_first):
        ours, theirs = ALL.clone(), ALL.clone()
        found = converted(X, ours, ours[:1] if is_shared else ALL[:1].clone())
        expected = model(X, theirs, theirs[:1] if is_shared else ALL[:1].clone())
        assert torch.equal(ours, theirs)
        assert (found - expected).norm() < expected.norm() * 2**-5


def test_what_is_written_into_memory_of_the_model_s_own_is_no_input():
    model, converted = _converted(
        lambda self, x, mask: bool(self.fc(x).relu_().shape[0]) and mask.all(), "O2", **EXAMPLE
    )
    for mask in (SOME, ALL):
        _agree(model, converted, X, mask)
    assert {*_methods(converted)} == {"symbolic"}


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_call_without_data_says_nothing_of_those_with_data():
    model, converted = _converted(QUESTIONS["all"])
    with pytest.raises(RuntimeError):
        torch.func.vmap(converted, in_dims=(None, 0))(X, torch.stack([SOME, ALL]))
    for mask in (SOME, ALL):
        _agree(model, converted, X, mask)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("is_known", [False, True])
def test_torch_export_says_that_it_cannot_ask(is_known):
    _, converted = _converted(QUESTIONS["all"])
    if is_known:
        converted(X, SOME)
    with pytest.raises(GuardOnDataDependentSymNode):
        torch.export.export(converted, (X, SOME), strict=False)
    assert converted(X, ALL).shape == X.shape


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_copies_and_calls_under_modes_ask_for_themselves(context):
    model, converted = _converted(QUESTIONS["all"])
    _agree(model, converted, X, SOME)
    for other in (copy.deepcopy(converted), converted):
        for mask in (ALL, SOME):
            with context():
                found = other(X, mask)
            expected = model(X, mask)
            assert (found - expected).norm() < expected.norm() * 2**-5


@pytest.mark.parametrize("mask", [SOME, ALL])
def test_whoever_captures_it_again_goes_the_same_way(mask):
    """Nothing but types is kept of the inputs."""
    model, converted = _converted(QUESTIONS["all"])
    converted(X, mask)
    way = "fc" if mask is ALL else "other"
    denied = fxamp.what_if(converted, deny=["linear"])
    assert [(row.module, row.precision) for row in denied.rows if row.op == "linear"] == [(way, "high")]
    assert fxamp.compare(model, converted, (X, mask)).output < 2**-5
