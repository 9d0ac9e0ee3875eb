"""What the user has compiled, or scripted, inside of a model is captured as the Python that it is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def eager(function):
    return torch.compile(function, backend="eager")


def gate(x, weight):
    return torch.sigmoid(F.linear(x, weight)) * x


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.gate = gate

    def inner(self, x):
        return self.gate(self.first(x), self.last.weight)

    def forward(self, x):
        return self.last(self.inner(x).relu())


class Forward(Plain):
    @eager
    def forward(self, x):
        return self.last(self.inner(x).relu())


class Method(Plain):
    @eager
    def inner(self, x):
        return super().inner(x)


class Function(Plain):
    def __init__(self):
        super().__init__()
        self.gate = eager(gate)


class Scripted(Plain):
    def __init__(self):
        super().__init__()
        self.gate = torch.jit.script(gate)


class Twice(Forward):
    forward = eager(Forward.forward)


class Child(nn.Sequential):
    def __init__(self):
        super().__init__(Forward())


COMPILED = [Forward, Method, Function, Twice, Child]
CASES = [*COMPILED, Scripted]


def made(kind):
    torch.manual_seed(0)
    return kind()


def gradients(model, x):
    model(x).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    pass


@pytest.mark.parametrize("capture", ["symbolic", "dynamo", "auto"])
@pytest.mark.parametrize("kind", CASES)
def test_it_runs_and_trains_as_the_model_without_torch_compile(kind, capture):
    expected = fxamp.convert(made(Plain), dtype=torch.bfloat16)
    converted = fxamp.convert(made(kind), dtype=torch.bfloat16, capture=capture)
    assert converted(X).equal(expected(X))
    assert all(map(torch.equal, gradients(converted, X), gradients(expected, X)))
    assert set(fxamp.report(converted).captures) == {"dynamo" if capture == "dynamo" else "symbolic"}


@pytest.mark.parametrize("kind", CASES)
def test_so_it_does_at_o2_and_compiled_anew(kind):
    expected = fxamp.convert(made(Plain), dtype=torch.bfloat16, opt_level="O2", example_inputs=(X,))
    converted = fxamp.convert(made(kind), dtype=torch.bfloat16, opt_level="O2", example_inputs=(X,))
    assert converted(X).equal(expected(X))
    assert torch.compile(converted, backend="eager", fullgraph=True)(X).equal(expected(X))


@pytest.mark.parametrize("kind", COMPILED)
def test_the_model_itself_stays_compiled(kind):
    torch._dynamo.utils.counters.clear()
    model = made(kind)
    fxamp.convert(model, dtype=torch.bfloat16)(X)
    assert model(X).equal(made(Plain)(X))
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1


@pytest.mark.parametrize("kind", CASES)
def test_its_forward_can_be_compiled(kind):
    expected = fxamp.convert(made(Plain), dtype=torch.bfloat16)
    converted = fxamp.convert(made(kind), dtype=torch.bfloat16)
    assert torch.compile(converted.forward, backend="eager")(X).equal(expected(X))


def test_a_scripted_function_stays_one_where_nothing_is_traced():
    model, scripted = made(Scripted), torch.jit.ScriptFunction.__call__
    converted = fxamp.convert(model, dtype=torch.bfloat16)
    converted(X)
    assert torch.jit.ScriptFunction.__call__ is scripted
    assert model(X).equal(made(Plain)(X)) and isinstance(model.gate, torch.jit.ScriptFunction)
    rows = {row.op: row.precision for row in fxamp.report(converted).rows}
    assert (
        rows["sigmoid"] and [row.precision for row in fxamp.report(converted).rows if row.op == "linear"] == ["low"] * 3
    )


@torch.jit.script
def pieces(parts: list[torch.Tensor], factor: float = 2.0, flip: bool = False):
    total = parts[0] * factor
    for part in parts[1:]:
        total = total - part if flip else total + part
    return total, total.shape[0]


def test_a_scripted_function_takes_lists_and_keywords_and_gives_tuples():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            found, rows = pieces([self.fc(x), x, x], flip=True)
            return found * rows

    model = Model()
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture="symbolic")
    for rows in (4, 3):
        torch.testing.assert_close(converted(X[:rows]), model(X[:rows]), rtol=0.05, atol=0.05)


class Disabled(Plain):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def test_a_forward_that_dynamo_is_to_leave_alone_is_left_alone():
    assert fxamp.convert(made(Disabled), dtype=torch.bfloat16, capture="dynamo")(X).equal(made(Plain)(X))
    assert not fxamp.convert(made(Disabled), dtype=torch.bfloat16)(X).equal(made(Plain)(X))
