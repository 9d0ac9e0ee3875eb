"""Functions of the model that look into its inputs alone run before the graph, as they are written."""

import contextlib
import copy
import itertools
import pickle
import random
import sys
import threading
import types

import numpy
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import fxamp
from fxamp.capture.left_out import functions_to_leave_out
from fxamp.model.engine import engine_of

GRIDS = [torch.tensor(grids) for grids in ([[2, 4], [4, 2]], [[4, 4], [2, 2]], [[2, 8], [2, 2]], [[6, 2], [2, 6]])]
KINDS = [torch.tensor(kinds) for kinds in ([0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1], [0] * 6)]


def _rows(grids):
    torch.manual_seed(int(grids.sum()))
    return torch.randn(int(grids.prod(1).sum()), 8)


def positions(grids):
    """As vision-language models make them: for each image as many rows as it has patches."""
    found = []
    for height, width in grids.tolist():
        rows = torch.arange(height)[:, None].expand(-1, width)
        if height > width:
            rows = rows + 1
        found.append(torch.stack([rows, torch.arange(width)[None].expand(height, -1)], dim=-1).flatten(0, 1))
    return torch.cat(found)


class Positioned(nn.Module):
    """Adds embeddings of positions that the grids of images decide; images attend to themselves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last, self.embed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(16, 8)

    def forward(self, x, grids):
        places = positions(grids)
        x = self.fc(x + self.embed(places).sum(1))
        counts = torch.repeat_interleave(grids.prod(1), 1)
        parts = x.split(counts.tolist())
        done = [F.scaled_dot_product_attention(part[None], part[None], part[None])[0] for part in parts]
        y = torch.cat(done)
        return self.last(y) if y.shape == x.shape else y


class Spans(nn.Module):
    """Numbers runs of equal kinds, each from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last, self.embed = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(16, 8)

    def places_of(self, kinds, options=None):
        found = []
        for _, group in itertools.groupby(kinds.tolist()):
            found += range(len(list(group)))
        return torch.tensor(found), {"most": max(found)} if options is None else options

    def forward(self, x, kinds):
        places, _ = self.places_of(kinds)
        return self.last(self.fc(x).relu() + self.embed(places))


def _run(model, *inputs):
    model.zero_grad()
    y = model(*inputs)
    y.square().mean().backward()
    return y.detach(), *(parameter.grad for parameter in model.parameters())


def _check_close(converted, model, *inputs):
    for mine, theirs in zip(_run(converted, *inputs), _run(model, *inputs), strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or (mine.shape == theirs.shape and (mine - theirs).norm() <= theirs.norm() * 2**-5)


def _variants(converted):
    return engine_of(converted).all_variants()


CALLS = {Positioned: [(_rows(grids), grids) for grids in GRIDS], Spans: [(torch.randn(6, 8), each) for each in KINDS]}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", CALLS)
def test_one_graph_holds_whatever_it_gives(kind, level):
    torch.manual_seed(0)
    model, calls = kind(), CALLS[kind]
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, calls[0], level)
    for inputs in calls * 2:
        _check_close(converted, model, *inputs)
    assert {variant.captured.method for variant in _variants(converted)} == {"symbolic"}
    assert len(_variants(converted)) <= 2
    report = fxamp.report(converted)
    assert {row.precision for row in report.rows if row.op in ("linear", "scaled_dot_product_attention")} == {"low"}


@pytest.mark.parametrize("kind", CALLS)
def test_with_everything_denied_it_is_eager_s_bit_for_bit(kind):
    torch.manual_seed(0)
    model, calls = kind(), CALLS[kind]
    converted = fxamp.convert(
        copy.deepcopy(model), torch.bfloat16, calls[0], overrides={"*": "deny"}, capture="symbolic"
    )
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, converted)]
    for inputs in calls * 2:
        for mine, theirs in zip(_run(converted, *inputs), _run(model, *inputs), strict=True):
            assert torch.equal(mine, theirs)
        for optimizer in optimizers:
            optimizer.step()


def test_numbers_and_constants_that_it_gives_are_the_graph_s():
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def sizes(self, grids):
            height, width = grids.max(0).values.tolist()
            return {"wide": int(width) > 4, "shape": (height // 2, int(width) // 2)}

        def forward(self, x, grids):
            sizes = self.sizes(grids)
            y = self.fc(x) if sizes["wide"] else self.other(x)
            height, width = sizes["shape"]
            return y[: height * width].view(height, width, 8).mean(1)

    torch.manual_seed(0)
    model = Sized()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (_rows(GRIDS[0]), GRIDS[0]), "O2")
    for grids in GRIDS * 2:
        _check_close(converted, model, _rows(grids), grids)
    assert {variant.captured.method for variant in _variants(converted)} == {"symbolic"}


class Looking(nn.Module):
    """Decides by a method that a graph cannot hold."""

    def __init__(self, look) -> None:
        super().__init__()
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.look, self.seen, self.scale, self.table = look, [], 1.0, torch.arange(6)
        self.config = {"most": 3}

    def forward(self, x, kinds):
        found = self.look(self, x, kinds)
        return self.fc(x) if found is None else self.other(x * found)


def _looped(kinds):
    return sum(number * place for place, number in enumerate(kinds.tolist()) if number)


def reads_a_weight(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return total + model.fc.bias.sum()


def reads_a_tensor_of_the_model(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return total + model.table.sum()


def sets_an_attribute(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    model.scale = float(total + 1)
    return torch.tensor(model.scale)


def adds_to_a_list(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    model.seen.append(total)
    return torch.tensor(float(len(model.seen)))


def writes_into_its_argument(model, _, kinds):
    kinds += 1
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number > 1 else 0
    return torch.tensor(float(total))


def draws(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return total + torch.rand(())


def looks_at_a_layer(model, x, _):
    total = 0
    for place, number in enumerate((model.fc(x)[:, 0] > 0).tolist()):
        total += place if number else 0
    return torch.tensor(float(total))


def gives_its_argument(kinds):
    total = 0
    for number in kinds.tolist():
        total += 1 if number else 0
    return kinds if total >= 3 else kinds[:1]


LEFT_ALONE = [
    reads_a_weight,
    sets_an_attribute,
    adds_to_a_list,
    writes_into_its_argument,
    draws,
    looks_at_a_layer,
    reads_a_tensor_of_the_model,
]


@pytest.mark.parametrize("look", LEFT_ALONE)
def test_what_may_not_run_before_the_graph(look):
    model, x, kinds = Looking(look), torch.randn(6, 8), KINDS[0].clone()
    state, generator = dict(vars(model)), torch.get_rng_state()
    with pytest.raises(fxamp.CaptureError, match=r"a traced value|iteration"):
        fxamp.convert(model, torch.bfloat16, (x, kinds), capture="symbolic")
    assert torch.equal(kinds, KINDS[0]) and model.seen == [] and model.scale == 1.0
    assert {name: value for name, value in vars(model).items() if value is not state[name]} == {}
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("look", [each for each in LEFT_ALONE if each is not draws])
def test_what_may_not_run_before_the_graph_is_left_to_dynamo(look):
    torch.manual_seed(0)
    model = Looking(look)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for kinds in KINDS:
        x, ours, theirs = torch.randn(6, 8), kinds.clone(), kinds.clone()
        expected, found = model(x, theirs), converted(x, ours)
        assert (found - expected).norm() <= expected.norm() * 2**-5
        assert torch.equal(ours, theirs) and converted.seen == model.seen and converted.scale == model.scale


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_tensor_that_is_an_argument_itself_is_no_further_input():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, kinds):
            chosen = gives_its_argument(kinds)
            y = self.fc(x)
            chosen += 1
            return y * kinds[:, None]

    torch.manual_seed(0)
    model = Own()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for kinds in KINDS * 2:
        x, ours, theirs = torch.randn(6, 8), kinds.clone(), kinds.clone()
        expected, found = model(x, theirs), converted(x, ours)
        assert (found - expected).norm() <= expected.norm() * 2**-5 and torch.equal(ours, theirs)


def test_it_may_be_given_a_list_of_numbers():
    def most(numbers, bounds):
        for bound in bounds:
            if max(numbers) <= bound:
                return bound
        return 0

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, kinds):
            bound = most(kinds.tolist(), [1, 3, 9])
            return self.fc(x) * bound + most([kinds[0].item(), kinds[1].item()], [bound])

    torch.manual_seed(0)
    model = Bounded()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, CALLS[Spans][0], "O2")
    for factor in (1, 2, 7, 30):
        for x, kinds in CALLS[Spans]:
            _check_close(converted, model, x, kinds * factor)
    assert {variant.captured.method for variant in _variants(converted)} == {"symbolic"}


def test_models_of_one_class_find_it_one_after_the_other():
    """What the graphs of others call is a copy of the function, which nobody else does."""
    held = []
    for _ in range(4):
        model = Spans()
        converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, CALLS[Spans][0], capture="symbolic")
        for inputs in CALLS[Spans]:
            _check_close(converted, model, *inputs)
        (variant,) = _variants(converted)
        assert variant.captured.further is not None
        held.append(converted)


def test_a_write_in_another_call_alone_is_an_error():
    """It is done by then, and whoever ran forward once more would do it twice."""

    def clears(model, _, kinds):
        total = 0
        for place, number in enumerate(kinds.tolist()):
            total += place if number else 0
        if total > 10:
            kinds.zero_()
        return torch.tensor(float(total))

    model = Looking(clears)
    converted = fxamp.convert(model, torch.bfloat16)
    x = torch.randn(6, 8)
    converted(x, KINDS[1].clone())
    with pytest.raises(fxamp.OptionError, match=r"clears writes into what it is given.*capture='dynamo'"):
        converted(x, torch.ones(6).long())


def test_what_forward_wrote_before_it_is_not_looked_at():
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, kinds, other):
            y = self.fc(x)
            other.add_(1)
            return y * torch.tensor(float(_looped(kinds)))

    model = Writing()
    kinds = KINDS[0].clone()
    with pytest.raises(fxamp.CaptureError):
        fxamp.convert(model, torch.bfloat16, (torch.randn(6, 8), kinds, kinds.clone()), capture="symbolic")


def test_what_is_to_have_gradients_is_not_written():
    """As embeddings under gradient checkpointing, and of frozen models with adapters."""

    class Embedding(Spans):
        def forward(self, x, kinds):
            embedded = self.embed(kinds)
            embedded.requires_grad_(True)
            places, _ = self.places_of(kinds)
            return self.last(self.fc(x + embedded).relu() + self.embed(places))

    model = Embedding()
    model.embed.requires_grad_(False)
    x = torch.randn(6, 8)
    converted = fxamp.convert(model, torch.bfloat16, (x, KINDS[0]), overrides={"*": "deny"}, capture="symbolic")
    for kinds in KINDS:
        for mine, theirs in zip(_run(converted, x, kinds), _run(model, x, kinds), strict=True):
            assert mine is theirs is None or torch.equal(mine, theirs)


def test_an_input_that_is_to_have_gradients_is_not_written():
    class Forces(Spans):
        def forward(self, x, kinds):
            x.requires_grad_(True)
            places, _ = self.places_of(kinds)
            return self.last(self.fc(x).relu() + self.embed(places))

    model, x = Forces(), torch.randn(6, 8)
    converted = fxamp.convert(model, torch.bfloat16, (x, KINDS[0]), overrides={"*": "deny"}, capture="symbolic")
    for kinds in KINDS:
        assert torch.equal(converted(x.detach(), kinds), model(x.detach(), kinds))


def test_what_is_to_have_gradients_itself_is_not_looked_at():
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, kinds):
            y = x * 2
            y.requires_grad_(True)
            return self.fc(gathered(y, kinds)), y

    with pytest.raises(fxamp.CaptureError):
        fxamp.convert(Asking(), torch.bfloat16, (torch.randn(6, 8), KINDS[0]), capture="symbolic")


def test_what_forward_set_before_it_is_not_looked_at():
    class Setting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.offset = nn.Linear(8, 8), 0

        def look(self, kinds):
            return torch.tensor(float(_looped(kinds) + self.offset))

        def forward(self, x, kinds):
            self.offset = x.shape[0]
            return self.fc(x) * self.look(kinds)

    with pytest.raises(fxamp.CaptureError):
        fxamp.convert(Setting(), torch.bfloat16, (torch.randn(6, 8), KINDS[0]), capture="symbolic")


def test_what_it_is_given_of_the_model_is_that_of_each_call():
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.config, self.factor = nn.Linear(8, 8), {"most": 3}, 2

        def look(self, kinds):
            return torch.tensor(float(min(_looped(kinds) * self.factor, self.config["most"])))

        def forward(self, x, kinds):
            return self.fc(x) * self.look(kinds)

    torch.manual_seed(0)
    model = Configured()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for most, factor in ((3, 2), (9, 2), (9, 1)):
        for each in (model, converted):
            each.config["most"], each.factor = most, factor
        for kinds in KINDS:
            _check_close(converted, model, torch.randn(6, 8), kinds)
    other = copy.deepcopy(converted)
    other.factor = model.factor = 5
    model.config["most"] = other.config["most"] = 50
    _check_close(other, model, torch.randn(6, 8), KINDS[0])
    assert {variant.captured.method for variant in _variants(converted)} == {"symbolic"}


@pytest.mark.parametrize("kind", CALLS)
def test_whoever_captures_it_again_has_what_it_gave(kind):
    """Nothing but types is kept of the inputs."""
    torch.manual_seed(0)
    model, calls = kind(), CALLS[kind]
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    for inputs in calls[:2]:
        converted(*inputs)
    count = len([row for row in fxamp.report(converted).rows if row.op == "linear"])
    denied = fxamp.what_if(converted, deny=["linear"])
    assert [row.precision for row in denied.rows if row.op == "linear"] == ["high"] * count
    found = fxamp.compare(model, converted, calls[1])
    assert 0 < found.output < 2**-5
    assert fxamp.find_nan(converted, calls[0]) is None


def test_copies_pickles_and_modes():
    torch.manual_seed(0)
    model, calls = Spans(), CALLS[Spans]
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    converted(*calls[0])
    for other in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted)), converted.eval()):
        for inputs in calls:
            _check_close(other, model, *inputs)
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        for inputs in calls[:2]:
            with context():
                found = converted(*inputs)
            assert (found - model(*inputs)).norm() < found.norm() * 2**-5


@pytest.mark.usefixtures("fresh_dynamo")
def test_torch_compile_has_no_data_to_look_into():
    torch.manual_seed(0)
    model, calls = Spans(), CALLS[Spans]
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16)
    converted(*calls[0])
    compiled = torch.compile(converted, backend="eager")
    for inputs in calls:
        expected, found = model(*inputs), compiled(*inputs)
        assert (found - expected).norm() < expected.norm() * 2**-5


def test_the_function_is_the_user_s_own_again_and_all_the_time_in_other_threads():
    code, defaults = Spans.places_of.__code__, Spans.places_of.__kwdefaults__
    model, found, stop = Spans(), [], threading.Event()

    def call():
        while not stop.is_set():
            found.append(Spans.places_of(model, KINDS[0])[0].tolist())

    thread = threading.Thread(target=call)
    thread.start()
    try:
        fxamp.convert(model, torch.bfloat16, CALLS[Spans][0], capture="symbolic")
    finally:
        stop.set()
        thread.join()
    assert Spans.places_of.__code__ is code and Spans.places_of.__kwdefaults__ is defaults
    assert all(each == [0, 1, 0, 1, 2, 0] for each in found)


def test_a_function_that_gives_another_kind_of_value_each_time_has_a_graph_for_each():
    def kind_of(model, _, kinds):
        return None if _looped(kinds) > 10 else torch.tensor(float(_looped(kinds)))

    torch.manual_seed(0)
    model = Looking(kind_of)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (torch.randn(6, 8), KINDS[1]), "O2")
    for kinds in [*KINDS, torch.ones(6).long()] * 2:
        _check_close(converted, model, torch.randn(6, 8), kinds)


class Multiplied(nn.Module):
    """Multiplies by what a function gives, and decides by it, where that is of two values."""

    def __init__(self, look) -> None:
        super().__init__()
        self.fc, self.other, self.look = nn.Linear(8, 8), nn.Linear(8, 8), look
        self.factor, self.config, self.table = 2, {"most": 3}, torch.arange(6.0)
        self.options = types.SimpleNamespace(offset=1, seen=[])
        self.inner = nn.Module()
        self.inner.options = self.options

    def forward(self, x=None, kinds=None):  # defaults: no preview
        found = self.look(self, x, kinds)
        factor, is_long = found if isinstance(found, tuple) else (found, True)
        return (self.fc(x) if is_long else self.other(x)) * factor


def _check_denied(look, calls, between=lambda model, place: None):
    """The converted model is eager's bit for bit, or says that it cannot be captured; how many calls it takes."""
    torch.manual_seed(0)
    model = Multiplied(look)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, overrides={"*": "deny"}, capture="symbolic")
    expected = list(_results(model, calls, between))
    found = [(mine, theirs) for mine, theirs in zip(_results(converted, calls, between), expected, strict=True) if mine]
    for mine, theirs in found:
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return len(found)


def _results(model, calls, between):
    """Of each call: output, gradients, and what Python draws next; None where the model is not captured."""
    LISTED.clear()
    NUMPY.fill(0)
    for place, inputs in enumerate(calls):
        between(model, place)
        random.seed(place)
        torch.manual_seed(place)
        for each in inputs:
            each.grad = None
        try:
            yield [*_run(model, *inputs), *(each.grad for each in inputs), random.random(), torch.rand(())]
        except fxamp.CaptureError:
            yield None


MANY = [(torch.randn(6, 8), kinds) for kinds in [KINDS[1], *KINDS, torch.ones(6).long()]]


def scaled(kinds, factor):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place * factor if number else 0
    return torch.tensor(float(total))


@pytest.mark.parametrize(
    "look",
    [
        lambda model, x, kinds: scaled(kinds, model.factor),
        lambda model, x, kinds: scaled(kinds, model.factor * x.shape[0]),
    ],
)
def test_a_number_of_the_model_that_it_is_given_is_that_of_each_call(look):
    def anneal(model, place):
        model.factor = 2 + place % 3

    assert _check_denied(look, MANY, anneal) == len(MANY)


def gathered(x, kinds):
    return torch.stack([x[place] * (2 if number else 1) for place, number in enumerate(kinds.tolist())])


def test_what_it_is_given_may_require_a_gradient():
    calls = [(x.clone().requires_grad_(place % 2 == 1), kinds) for place, (x, kinds) in enumerate(MANY)]
    assert _check_denied(lambda model, x, kinds: gathered(x * 2, kinds), calls[:1]) == 1
    for look in (lambda _, x, kinds: gathered(x, kinds), lambda _, x, kinds: gathered(x * 2, kinds)):
        _check_denied(look, calls)


def asks_the_mode(kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return torch.tensor(float(total + 100 * torch.is_grad_enabled()))


def without_gradients(_, __, kinds):
    with torch.no_grad():
        return asks_the_mode(kinds)


@pytest.mark.parametrize("look", [lambda _, __, kinds: asks_the_mode(kinds), without_gradients])
def test_it_runs_in_the_gradient_mode_of_its_place(look):
    assert _check_denied(look, MANY) == len(MANY)
    model = Multiplied(look)
    converted = fxamp.convert(model, torch.bfloat16, overrides={"*": "deny"}, capture="symbolic")
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            assert torch.equal(converted(*MANY[0]), look(None, *MANY[0]) * model.fc(MANY[0][0]))


def test_an_object_that_the_model_holds_twice_may_be_exchanged_in_one_place():
    def offset(options, kinds):
        total = 0
        for place, number in enumerate(kinds.tolist()):
            total += place if number else 0
        return torch.tensor(float(total + options.offset))

    def exchange(model, place):
        if place == 3:
            model.inner.options = types.SimpleNamespace(offset=50)
        if place == 6:
            model.options = types.SimpleNamespace(offset=70)

    assert _check_denied(lambda model, _, kinds: offset(model.inner.options, kinds), MANY, exchange) == len(MANY)


def test_a_tensor_that_it_is_given_twice_is_one():
    def compare(kinds, others):
        total = 0
        for place, number in enumerate(kinds.tolist()):
            total += place if number else 0
        return torch.tensor(float(total)), kinds is others

    assert _check_denied(lambda _, __, kinds: compare(kinds, kinds), MANY) == len(MANY)


LISTED, NUMPY, STATE = [], numpy.zeros(1), {"offset": 1}


def catches_the_refusal(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    with contextlib.suppress(Exception):
        total += model.table.sum().item()
    return torch.tensor(float(total))


def draws_of_python(_, __, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return torch.tensor(total + random.random()), total > 4


def draws_at_times(_, __, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return torch.tensor(total + (random.random() if total > 8 else 0)), total > 4


def counts_in_a_global_list(_, __, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    LISTED.append(total)
    return torch.tensor(float(len(LISTED))), total > 4


def counts_in_an_array(_, __, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    NUMPY[0] += 1
    return torch.tensor(float(NUMPY[0])), total > 4


def counts_in_an_object_of_the_model(model, _, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    model.options.seen.append(total)
    return torch.tensor(float(len(model.options.seen))), total > 4


def draws_of_torch_at_times(_, __, kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return torch.tensor(float(total)) + (torch.rand(()) if total > 10 else 0), total > 4


def _read_state(kinds):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return torch.tensor(float(total + STATE["offset"]))


def sets_a_global_around_it(model, x, kinds):
    y = model.fc(x)
    STATE["offset"] = 3
    try:
        return y * _read_state(kinds)
    finally:
        STATE["offset"] = 100


def _given_back(kinds, options):
    total = 0
    for place, number in enumerate(kinds.tolist()):
        total += place if number else 0
    return options, torch.tensor(float(total))


def writes_into_a_dictionary_that_it_is_given_back(_, __, kinds):
    options = {"a": 1}
    same, total = _given_back(kinds, options)
    same["b"] = 2
    return total * len(options)


NOT_BEFORE = [
    catches_the_refusal,
    draws_of_python,
    draws_at_times,
    draws_of_torch_at_times,
    counts_in_a_global_list,
    counts_in_an_array,
    counts_in_an_object_of_the_model,
    sets_a_global_around_it,
    writes_into_a_dictionary_that_it_is_given_back,
]


@pytest.mark.parametrize("look", NOT_BEFORE)
def test_what_running_it_before_the_graph_would_change_does_not_run_there(look):
    def empty(model, place):
        if place == 0:
            model.options.seen.clear()

    _check_denied(look, MANY, empty)


def test_the_function_of_many_models_is_found_for_each():
    models = [fxamp.convert(Spans(), torch.bfloat16, CALLS[Spans][0], capture="symbolic") for _ in range(10)]
    left_out = {engine_of(model).left_out.functions for model in models}
    assert left_out == {(Spans.places_of,)}


@pytest.mark.parametrize("is_given", [True, False])
def test_who_captures_again_runs_the_same_calls_before_the_graph(is_given):
    """The first call of `places` gives what it is given, which is traced; the second one runs before the graph."""

    def places(grids, given=None):
        if given is not None:
            return given
        return torch.cat([torch.arange(h * w) % (8 if h > w else 16) for h, w in grids.tolist()])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.embed = nn.Linear(8, 8), nn.Embedding(16, 8)

        def forward(self, x, grids):
            first = places(grids, grids) if is_given else places(grids)
            return self.fc(x + self.embed(places(grids))) * first.sum()

    model, inputs = Twice(), (_rows(GRIDS[0]), GRIDS[0])
    converted = fxamp.convert(model, torch.bfloat16, example_inputs=inputs, capture="symbolic")
    found = fxamp.compare(model, converted, inputs)
    assert 0 < found.output < 0.02


@pytest.mark.parametrize("is_of_layers", [True, False])
def test_forward_of_layers_does_not_run_before_the_graph_whatever_its_first_argument_is_called(is_of_layers):
    class Net(nn.Module):
        def forward(net, x):
            return functions_to_leave_out([sys._getframe()], ())

    net, x = Net(), fx.Proxy(fx.Graph().placeholder("x"))
    if is_of_layers:
        net.fc = nn.Linear(2, 2)
    assert bool(net.forward(x)) is not is_of_layers


def far_apart(mask):
    """Hangs on how a tensor lies in memory, and on what it carries."""
    rows = sum(int(sum(row) > 0) for row in mask.tolist())
    return rows * (10 if mask.stride(0) == 0 else 1) + getattr(mask, "bonus", 0)


class Decides(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask):
        found = far_apart(mask)
        return self.fc(x) * found if found < 10 else self.fc(x) + found


def marked(tensor):
    tensor.bonus = 20
    return tensor


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_it_is_tried_on_what_answers_as_its_inputs_do(order):
    torch.manual_seed(0)
    model = Decides()
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, overrides={"*": "deny"})
    masks = [torch.ones(4, 8), torch.ones(1, 8).expand(4, 8), marked(torch.ones(4, 8))]
    x = torch.randn(4, 8)
    for place in (*order, *order):
        assert torch.equal(converted(x, masks[place]), model(x, masks[place]))
