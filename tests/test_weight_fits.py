"""A graph that was made for other weights, or for other parts of the model, is not run."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of
from fxamp.weight_fits import WeightFits

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """A layer scale, and a number that forward reads."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.fc, self.gamma, self.factor = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), factor

    def forward(self, x):
        return self.fc(x) * self.gamma * self.factor


class Biased(nn.Module):
    """An attention bias in a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, x):
        return (self.fc(x) + self.bias).softmax(-1)


class Plain(nn.Module):
    """A layer scale that is neither a parameter nor a buffer."""

    def __init__(self, gamma=1.0):
        super().__init__()
        self.fc, self.end, self.gamma = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), torch.full((8,), gamma)

    def forward(self, x):
        return self.end(self.fc(x) * self.gamma * 1e4)


WRITES = {
    "load_state_dict": lambda model, name, value: model.load_state_dict({name: value}, strict=False),
    "load_state_dict, assigned": lambda model, name, value: model.load_state_dict(
        {name: value.clone()}, strict=False, assign=True
    ),
    "a new tensor": lambda model, name, value: setattr(model, name, type(getattr(model, name))(value.clone())),
    "copy_": lambda model, name, value: _tensor(model, name).copy_(value),
}


def _tensor(model, name):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}[name].detach()


def error(model, plain, x=X):
    with torch.no_grad():
        expected, found = plain(x), model(x)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("is_called", [True, False])
@pytest.mark.parametrize(
    ("make", "name", "value"), [(Scaled, "gamma", 1e-8), (Scaled, "gamma", 1e5), (Biased, "bias", -1e9)]
)
def test_numbers_that_come_later_are_looked_at(make, name, value, write, is_called):
    model = fxamp.convert(make(), torch.float16, X)
    if is_called:
        model(X)
    values = torch.zeros(8)
    values[: 8 if name == "gamma" else 3] = value
    WRITES[write](model, name, values)
    plain = make()
    plain.load_state_dict(model.state_dict())
    assert error(model, plain) < 2e-3
    WRITES[write](model, name, torch.ones(8))
    plain.load_state_dict(model.state_dict())
    assert error(model, plain) < 2e-3


class Registered(Plain):
    """The same in a buffer: numbers below what float16 holds would be lost in it."""

    def __init__(self):
        super().__init__()
        del self.gamma
        self.register_buffer("gamma", torch.ones(8))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_none_of_them_is_lost_compiled_or_not(write, compiles):
    torch._dynamo.reset()
    model = fxamp.convert(Registered(), torch.float16, X)
    run, plain = torch.compile(model, backend="eager") if compiles else model, Registered()
    plain.load_state_dict(model.state_dict())
    assert error(run, plain) < 2e-3
    for value in (1e-7, 1.0):
        WRITES[write](model, "gamma", torch.full((8,), value))
        plain.load_state_dict(model.state_dict())
        assert error(run, plain) < 2e-3


RECORDED = {
    "compile": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "export, strict": lambda model: torch.export.export(model, (X,), strict=True).module(),
    "trace": lambda model: torch.jit.trace(model, (X,)),
}


@pytest.mark.parametrize("record", RECORDED)
@pytest.mark.parametrize("has_graph", [False, True])
def test_nor_are_those_that_came_before_the_model_is_recorded(record, has_graph):
    torch._dynamo.reset()
    model, plain = fxamp.convert(Registered(), torch.float16, X if has_graph else None), Registered()
    model.load_state_dict({"gamma": torch.full((8,), 1e-7)}, strict=False)
    plain.load_state_dict(model.state_dict())
    assert error(RECORDED[record](model), plain) < 2e-3


def test_what_an_export_cannot_look_at_a_call_has():
    """torch.export shows tensors without numbers."""
    model, plain = fxamp.convert(Registered(), torch.float16, X), Registered()
    model.load_state_dict({"gamma": torch.full((8,), 1e-7)}, strict=False)
    plain.load_state_dict(model.state_dict())
    model(X)
    assert error(torch.export.export(model, (X,)).module(), plain) < 2e-3


def test_an_export_leaves_what_was_loaded_to_be_looked_at():
    model, plain = fxamp.convert(Registered(), torch.float16, X), Registered()
    model.load_state_dict({"gamma": torch.full((8,), 1e-7)}, strict=False)
    plain.load_state_dict(model.state_dict())
    torch.export.export(model, (X,))
    assert error(model, plain) < 2e-3


@pytest.mark.parametrize("write", ["a new tensor", "copy_"])
def test_numbers_of_a_plain_attribute_are_looked_at(write):
    model = fxamp.convert(Plain(), torch.float16, X)
    model(X)
    if write == "copy_":
        model.gamma.copy_(torch.full((8,), 1e-7))
    else:
        model.gamma = torch.full((8,), 1e-7)
    plain = Plain(1e-7)
    plain.load_state_dict(model.state_dict())
    assert error(model, plain) < 2e-3


def test_a_checkpoint_makes_no_new_graph_where_a_plain_attribute_is_as_before():
    model = fxamp.convert(Plain(1e-7), torch.float16)
    for _ in range(3):
        model(X)
        model.load_state_dict(model.state_dict())
    assert len(engine_of(model).all_variants()) == 1


def test_a_checkpoint_of_a_parent_is_seen_after_training():
    parent = nn.Sequential(fxamp.convert(Scaled(), torch.float16, X))
    optimizer = torch.optim.SGD(parent.parameters(), lr=0.1)
    parent(X).sum().backward()
    optimizer.step()
    parent.load_state_dict({"0.gamma": torch.full((8,), 1e-8)}, strict=False)
    plain = Scaled()
    plain.load_state_dict(parent[0].state_dict())
    assert error(parent, plain) < 2e-3


def test_training_looks_at_no_number(monkeypatch):
    model = fxamp.convert(Scaled(), torch.float16, X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X)
    looks = []
    monkeypatch.setattr("fxamp.weight_fits.fit_in", lambda tensor, low: looks.append(tensor) or "normal")
    for _ in range(5):
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()
    assert not looks and len(engine_of(model).all_variants()) == 1


def test_writes_without_an_optimizer_are_looked_at_ever_more_rarely(monkeypatch):
    model, looks = fxamp.convert(Scaled(), torch.float16, X), []
    model(X)
    monkeypatch.setattr("fxamp.weight_fits.fit_in", lambda tensor, low: looks.append(tensor) or "normal")
    for _ in range(64):
        with torch.no_grad():
            model.gamma.mul_(1.0)
        model(X)
    assert len(looks) == 7


@pytest.mark.parametrize("gamma", [1.0, 1e-8])
def test_a_part_that_is_exchanged_for_an_equal_one_brings_its_own_numbers(gamma):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Scaled(2.0)

        def forward(self, x):
            return self.part(x) + 0

    model = fxamp.convert(Net(), torch.float16)
    model(X), model(X)
    model.part = Scaled(3.0)
    nn.init.constant_(model.part.gamma, gamma)
    plain = Net()
    plain.part = copy.deepcopy(model.part)
    assert error(model, plain) < 2e-3
    model.part.factor = plain.part.factor = 5.0
    assert error(model, plain) < 2e-3


# What happens between the making of a graph and the first question, and whether the numbers are looked at.
BETWEEN = {
    "nothing": (lambda model: None, False),
    "a step": (lambda model: _step(model), False),
    "a checkpoint": (lambda model: model.load_state_dict(model.state_dict()), True),
    "a step and a checkpoint": (lambda model: (_step(model), model.load_state_dict(model.state_dict())), True),
    "a write": (lambda model: model.gamma.detach().mul_(1), True),
    "a new tensor": (lambda model: setattr(model, "gamma", nn.Parameter(torch.ones(8))), True),
}


def _step(model):
    model.gamma.grad = torch.ones(8)
    torch.optim.SGD([model.gamma], lr=0.0).step()


@pytest.mark.parametrize("between", BETWEEN)
def test_a_graph_begins_with_the_weights_that_it_was_made_for(between, monkeypatch):
    happens, is_looked_at = BETWEEN[between]
    model, looks = fxamp.convert(Scaled(), torch.float16, X), []
    check = WeightFits({"gamma": "normal"}, torch.float16)
    check.note(model)
    happens(model)
    monkeypatch.setattr("fxamp.weight_fits.fit_in", lambda tensor, low: looks.append(tensor) or "normal")
    assert check(model) and check(model) and bool(looks) == is_looked_at


def test_a_copy_is_looked_at_whatever_was_trained():
    model = fxamp.convert(Scaled(), torch.float16, X)
    check = WeightFits({"gamma": "normal"}, torch.float16)
    check.note(model)
    twin = copy.deepcopy(model)
    nn.init.constant_(twin.gamma, 1e-8)
    _step(model)
    assert check(model) and not check(twin)


class Residual(nn.Module):
    """Blocks with a layer scale that begins below what float16 holds."""

    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Scaled() for _ in range(3)), nn.Linear(8, 4)
        for block in self.blocks:
            nn.init.constant_(block.gamma, 1e-6)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


@pytest.mark.parametrize("example", [None, X])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_training_from_a_layer_scale_makes_one_graph(example, is_loaded):
    model = fxamp.convert(Residual(), torch.float16, example)
    if is_loaded:
        model.load_state_dict(Residual().state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert len(engine_of(model).all_variants()) == 1
    model.load_state_dict(model.state_dict())
    model(X)
    assert len(engine_of(model).all_variants()) == 2, "a checkpoint is looked at, also after training"


def test_weights_made_under_inference_mode_count_no_writes():
    with torch.inference_mode():
        plain = Plain()
        converted = fxamp.convert(plain, torch.float16)
        for gamma in (1.0, 1e-7, 1.0):
            plain.gamma.fill_(gamma)
            assert error(converted, plain) < 2**-9, "the graph for numbers that fit was run for one that does not"


class Remembering(nn.Module):
    """A buffer that is another tensor after each call."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = self.mean * 0.5 + x.mean(0)
        return self.fc(x) + self.mean


def test_training_after_a_buffer_was_made_under_inference_mode():
    plain = Remembering()
    converted = fxamp.convert(copy.deepcopy(plain), torch.bfloat16)
    for model in (plain, converted):
        with torch.inference_mode():
            model(X)
        model(X).sum().backward()
    assert torch.equal(plain.mean, converted.mean)
    assert converted.fc.weight.grad is not None


class Normed(nn.Module):
    """A residual around a norm whose bias may be tiny, and a small factor beside it."""

    def __init__(self, bias=0.0, factor=1.0, is_added_twice=False, is_factor=False):
        super().__init__()
        self.fc, self.end = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.is_added_twice = is_added_twice
        nn.init.constant_(self.norm.bias, bias)
        nn.init.constant_(self.norm.weight, factor)
        if is_factor:
            self.norm.weight = self.norm.bias

    def forward(self, x):
        x = self.norm(self.fc(x))
        return self.end(x * self.norm.bias if self.is_added_twice else x)


def norm_of(**options):
    torch.manual_seed(0)
    model = Normed(**options)
    converted = fxamp.convert(model, torch.float16, X)
    (row,) = (row for row in fxamp.report(converted).rows if row.op == "layer_norm")
    return row.precision, model, converted


@pytest.mark.parametrize("bias", [1e-8, 1e-5])
def test_a_bias_that_training_has_hardly_moved_is_added_low(bias):
    """After a step at 1e-5 biases that began with zeros are no normal float16 numbers; what they are added to is."""
    precision, model, converted = norm_of(bias=bias)
    assert precision == norm_of(bias=0.0)[0] == "low"
    exact = copy.deepcopy(model).double()(X.double())
    zero = norm_of(bias=0.0)
    error = float((converted(X) - exact).norm() / exact.norm())
    of_zero = float((zero[2](X) - copy.deepcopy(zero[1]).double()(X.double())).norm() / exact.norm())
    assert error <= 1.1 * of_zero + 1e-6


@pytest.mark.parametrize(
    "options",
    [{"bias": -1e9}, {"bias": 1e-5, "is_added_twice": True}, {"bias": 1e-5, "is_factor": True}, {"factor": 1e-6}],
)
def test_other_numbers_beside_a_norm_keep_it_high(options):
    assert norm_of(**options)[0] == "high"
