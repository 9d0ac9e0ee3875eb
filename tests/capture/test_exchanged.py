"""What is exchanged between calls for something that looks the same: a graph that was captured before is not taken."""

import dataclasses

import pytest
import torch
from torch import nn

import fxamp

LOW = torch.bfloat16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CALLS = pytest.mark.parametrize("calls", [1, 3])  # from the second on, cells are compared object by object


def check(model, change, calls, x=X):
    """After `change`, which reaches both, the converted model computes what the model does."""
    converted = fxamp.convert(model, dtype=LOW)
    for _ in range(calls):
        converted(X if x is X else x)
    change(converted)
    if converted is not model:
        change(model)
    for _ in range(2):
        exact, found = model(x), converted(x)
        assert found.shape == exact.shape and found.dtype == exact.dtype
        assert (found - exact).norm() <= 5e-2 * exact.norm()
    return converted


class Boxed(nn.Module):
    def __init__(self, box):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.box = nn.Linear(8, 8), box

    def forward(self, x):
        h = self.first(x)
        for part in self.box.children():
            h = h + part(h)
        return h


class Own(nn.Module):
    """A module of the user's that has no part yet."""


@CALLS
@pytest.mark.parametrize("box", [nn.ModuleList, nn.Sequential, nn.ModuleDict, Own])
def test_a_part_is_added_to_a_module_that_had_none(box, calls):
    adapter = nn.Linear(8, 8)
    converted = check(Boxed(box()), lambda model: model.box.add_module("0", adapter), calls)
    converted(X).sum().backward()
    assert adapter.weight.grad is not None


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.register_buffer("position", torch.ones(8))

    def forward(self, x):
        h = self.norm(self.b(torch.tanh(self.a(x))) / self.a.weight.shape[0])
        return h * 3 if self.norm.weight.dtype == torch.float64 else h + self.position.sum() / self.position.numel()


def prune(model):
    if model.a.weight.shape[0] == 16:  # the converted model's weights are the model's
        model.a.weight.data, model.a.bias.data = model.a.weight.data[:4], model.a.bias.data[:4]
        model.b.weight.data = model.b.weight.data[:, :4]


@CALLS
def test_a_parameter_gets_data_of_another_shape(calls):
    check(Wide(), prune, calls)


@CALLS
def test_a_buffer_is_resized_in_place(calls):
    check(Wide(), lambda model: model.position.resize_(4).fill_(2.0), calls)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.middle, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x)
        if self.middle.weight.dtype != torch.float32:
            h = h * 3
        return self.b(self.middle(h.to(self.middle.weight.dtype)).float())


@CALLS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_part_changes_its_dtype(dtype, calls):
    check(Mixed(), lambda model: model.middle.to(dtype), calls)


class Kept(nn.Module):
    """A plain attribute begins as a buffer does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("start", torch.randn(8))
        self.last = self.start

    def forward(self, x):
        return self.layer(x) * self.start + self.last


@CALLS
def test_one_of_two_names_of_a_tensor_gets_another_one(calls):
    other = torch.randn(8) * 5
    check(Kept(), lambda model: setattr(model, "last", other), calls)


@CALLS
def test_a_weight_kept_under_a_plain_name_gets_another_one(calls):
    class Target(Kept):
        def __init__(self):
            super().__init__()
            self.__dict__["target"] = self.layer.weight

        def forward(self, x):
            return self.layer(x) - nn.functional.linear(x, self.target)

    other = torch.randn(8, 8)
    check(Target(), lambda model: model.__dict__.update(target=other), calls)


@dataclasses.dataclass
class Op:
    name: str
    weight: float = dataclasses.field(default=1.0, compare=False)


class Held(nn.Module):
    def __init__(self, held, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.held, self.function = nn.Linear(8, 8), held, function

    def forward(self, x):
        return self.function(self.layer(x), self.held)


def replaced(value, key=0):
    def change(model):
        model.held[key] = value

    return change


@CALLS
@pytest.mark.parametrize(
    ("held", "function", "change"),
    [
        ([Op("a")], lambda y, held: y * held[0].weight, replaced(Op("a", 9.0))),
        ({"k": 1}, lambda y, held: -y if held["k"] is True else y, replaced(True, "k")),
        ({"a": 1.0, "b": 2.0}, lambda y, held: y * next(iter(held.values())), lambda model: reorder(model.held)),
    ],
    ids=["uncompared field", "1 and True", "order"],
)
def test_an_element_is_exchanged_for_one_that_is_equal(held, function, change, calls):
    check(Held(held, function), change, calls)


def reorder(held):
    if next(iter(held)) == "a":
        held["a"] = held.pop("a")


def test_the_gradient_of_a_tensor_in_a_list_goes_to_the_one_that_is_there():
    model = Held([torch.ones((), requires_grad=True)], lambda y, held: y * held[0])
    converted = fxamp.convert(model, dtype=LOW)
    for _ in range(3):
        converted(X)
    converted.held[0] = fresh = torch.ones((), requires_grad=True)
    converted(X).sum().backward()
    assert fresh.grad is not None


def test_equal_values_written_anew_at_each_call_make_no_new_graph():
    model = Held({"scale": 1.5, "name": "a" * 3}, lambda y, held: y * held["scale"])
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic")
    for _ in range(6):
        converted.held.update(scale=float(f"{1.5}"), name="".join(["a"] * 3))
        converted(X)
    assert len(converted._fxamp_engine.all_variants()) == 1


class Hidden(nn.Module):
    """Keeps a module out of its tree, in a list, as students keep their teachers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Linear(8, 8)
        self.teacher = [nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh()))]

    def forward(self, x):
        return self.student(x) + self.teacher[0](x)


@pytest.mark.parametrize(
    "change",
    [
        lambda teacher: teacher[1].__setitem__(0, nn.ReLU()),
        lambda teacher: teacher.append(nn.Linear(8, 8)),
        lambda teacher: teacher[1].__delitem__(0),
        lambda teacher: teacher[0].register_forward_hook(lambda module, given, result: result * 5),
        lambda teacher: teacher[1].register_forward_pre_hook(lambda module, given: given[0] + 1),
    ],
    ids=["exchanged", "appended", "deleted", "hook", "pre hook"],
)
@CALLS
def test_a_module_in_a_list_changes_its_parts_and_hooks(change, calls):
    model = Hidden()
    converted = fxamp.convert(model, dtype=LOW)
    for _ in range(calls):
        converted(X)
    assert len(converted._fxamp_engine.all_variants()) == 1
    change(model.teacher[0])  # which both hold
    for _ in range(2):
        exact = model(X)
        assert (converted(X) - exact).norm() <= 2e-2 * exact.norm()
