"""Numbers and questions of other packages: numpy's scalars and functions, einops, torch._check, `callable`."""

import collections
import importlib
import math
import re
import typing

import numpy as np
import pytest
import torch
from einops import _backends, einsum, pack, rearrange, reduce, repeat, unpack
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.capture.proxies import ValueProxy
from fxamp.errors import CaptureError

LOW = torch.bfloat16


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.fc, self.head, self.number = nn.Linear(8, 8), head, np.float64(2.5)
        self.order, self.scale = np.array([3, 1, 2, 0, 7, 6, 5, 4]), np.linspace(0.0, 1.0, 8, dtype=np.float32)

    def forward(self, x):
        return self.head(self, self.fc(x))


class Temperature(float):
    """Prints as no name of Python's."""

    def __repr__(self):
        return f"Temperature of {float(self)}"


def checked(condition):
    """As transformers does: a question, or an answer."""
    if callable(condition):
        condition = condition()
    torch._check(condition, lambda: "the sizes differ")


def triangle(m, x):
    made = x.new_zeros(8, 8)
    made[np.tril_indices(8, -1)] = 1.0
    return x @ made


def moved(m, x):
    made = torch.tensor(m.scale)
    made[0] += 1.0  # of this call alone
    return x + made


def as_checked(x):
    checked(x.shape[0] * 2 == x.numel() // 4)
    checked(lambda: x.dim() == 2)
    assert not callable(x) and not callable(x.shape) and not callable(x.dtype) and callable(x.view)
    return x


HEADS = {
    "numpy log": lambda m, x: x * np.log(3.0),
    "numpy sqrt of a size": lambda m, x: x / np.sqrt(x.shape[-1]),
    "numpy ceil of a size": lambda m, x: x[: int(np.ceil(x.shape[0] / 2))],
    "numpy product of sizes": lambda m, x: x.reshape(int(np.prod(x.shape))),
    "numpy number before": lambda m, x: np.float32(0.5) * x + np.float64(1.0) - np.int64(2) / (x * x + 1),
    "numpy comparison": lambda m, x: x * (np.float32(0.5) < x),
    "numpy attribute": lambda m, x: x * m.number,
    "numpy in clamp": lambda m, x: x.clamp(max=np.float64(2)),
    "numpy in full": lambda m, x: x + torch.full((8,), np.float64(2.0)),
    "numpy slice": lambda m, x: x[:, : np.int64(4)],
    "numpy in dropout": lambda m, x: F.dropout(x, np.float64(0.1), False),
    "numpy index": lambda m, x: x[:, m.order] + m.fc.bias[m.order],
    "numpy index written": triangle,
    "tensor of an array": lambda m, x: x + torch.tensor(m.scale, device=x.device),
    "tensor of an array as another": lambda m, x: x + torch.tensor(m.order, dtype=x.dtype),
    "tensor of an array written": moved,
    "as_tensor of an array": lambda m, x: x + torch.as_tensor(m.scale, device=x.device),
    "a kind of float": lambda m, x: F.leaky_relu(x, Temperature(0.25)),
    "checked": lambda m, x: as_checked(x),
    "rounded sizes": lambda m, x: x * round(x.shape[0] / 4) + round(x.shape[1] / 3, 1),
    "size in sizes": lambda m, x: x * (2 if 8 in x.shape else 3) * (2 if -1 in x.shape else 3),
    "einops": lambda m, x: rearrange(x, "b (h d) -> h b d", h=2),
    "einops of sizes": lambda m, x: rearrange(x, "b d -> d b").view(8, x.shape[0]),
    "einops others": lambda m, x: einsum(repeat(x, "b d -> b n d", n=3), x, "b n d, c d -> b n c").softmax(-1),
    "einops reduce": lambda m, x: reduce(x, "b (h d) -> b h", "max", d=4),
    "einops pack": lambda m, x: unpack(*pack([x, x + 1], "* d"), "* d")[1],
}


@pytest.mark.parametrize("options", [{}, {"example_inputs": True}, {"example_inputs": True, "opt_level": "O2"}])
@pytest.mark.parametrize("head", HEADS)
def test_numbers_of_other_packages_are_as_in_eager(head, options):
    torch.manual_seed(0)
    model, inputs = Model(HEADS[head]), [torch.randn(rows, 8) for rows in (3, 5)]
    wanted = [model(x).detach() for x in inputs]
    given = {**options, "example_inputs": (inputs[0],)} if options else {}
    ours = fxamp.convert(model, LOW, **given)
    for x, want in zip(inputs, wanted, strict=True):
        for _ in range(2):
            torch.testing.assert_close(ours(x).float(), want, rtol=0.05, atol=0.05)
    assert set(fxamp.report(ours).captures) == {"symbolic"}


def test_what_is_written_into_an_array_is_in_the_next_call():
    model, x = Model(lambda m, x: x[:, m.order] + torch.tensor(m.scale)), torch.randn(3, 8)
    ours = fxamp.convert(model, LOW)
    for _ in range(3):
        torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)
        model.order[:], model.scale[3] = np.roll(model.order, 1), model.scale[3] + 2
    assert fxamp.report(ours).captures == ("symbolic",)


def with_one_array(m, x):
    order = np.arange(8)
    for place in range(3):
        order[place] = 7
        x = x + x[:, order]
    return x


def test_an_array_that_forward_writes_into_between_two_reads_is_left_to_dynamo():
    model, x = Model(with_one_array), torch.randn(3, 8)
    ours = fxamp.convert(model, LOW)
    torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.1)
    assert set(fxamp.report(ours).captures) == {"dynamo"}
    with pytest.raises(CaptureError, match="writes into a numpy array"):
        fxamp.convert(model, LOW, capture="symbolic", example_inputs=(x,))


def rolled(m, x):
    m.order[:] = np.roll(m.order, 1)
    return x[:, m.order]


def rolled_behind(m, x):
    y = x + torch.tensor(m.scale)
    m.scale += 1
    return y


def written_below(m, x):
    m.scale += 1
    return x + torch.as_tensor(m.first)


@pytest.mark.parametrize("head", [rolled, rolled_behind, written_below])
def test_an_array_of_the_model_s_that_forward_writes_into_is_left_to_dynamo_as_it_was(head):
    torch._dynamo.reset()
    (model, same), x = (Model(head), Model(head)), torch.randn(3, 8)
    for each in (model, same):
        each.first = each.scale[:8]  # a view
        each.load_state_dict(model.state_dict())
    ours = fxamp.convert(same, LOW)
    for _ in range(3):
        torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)
    assert set(fxamp.report(ours).captures) == {"dynamo"}
    before = model.order.copy(), model.scale.copy()
    with pytest.raises(CaptureError, match=r"writes into self.(order|scale) \(ndarray\)"):
        fxamp.convert(model, LOW, opt_level="O2", example_inputs=(x,), capture="symbolic")
    assert (model.order == before[0]).all() and (model.scale == before[1]).all()


def test_an_array_may_hold_no_number():
    model, x = Model(lambda m, x: x * torch.tensor(m.scale).nan_to_num(2.0)), torch.randn(3, 8)
    model.scale[2] = np.nan
    ours = fxamp.convert(model, LOW, capture="symbolic", example_inputs=(x,))
    torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)


def three_rows(m, x):
    torch._check(x.shape[0] == 3, lambda: "three rows")
    return x


def test_a_check_that_fails_at_another_size_still_fails():
    ours = fxamp.convert(Model(HEADS["checked"]), LOW, example_inputs=(torch.randn(3, 8),))
    assert ours(torch.randn(7, 8)).shape == (7, 8)
    odd = fxamp.convert(Model(three_rows), LOW, example_inputs=(torch.randn(3, 8),))
    with pytest.raises(RuntimeError, match="three rows"):
        odd(torch.randn(4, 8))


def test_numpy_of_a_tensors_values_is_no_part_of_a_graph():
    ours = fxamp.convert(Model(lambda m, x: x * float(np.sqrt(x.detach().abs().sum()))), LOW)
    assert ours(torch.randn(3, 8)).shape == (3, 8) and set(fxamp.report(ours).captures) == {"dynamo"}
    with pytest.raises(fxamp.CaptureError, match=r"numpy.sqrt\(\) of a traced value"):
        fxamp.convert(ours, LOW, capture="symbolic", example_inputs=(torch.randn(3, 8),))


KINDS: dict[type, object] = {}
COUNTS: dict[type, int] = {}


def dispatching(m, x):
    """Keeps what it found by the type of its argument, as libraries do that know several frameworks."""
    if type(x) not in KINDS:
        KINDS[type(x)] = math
    return x * KINDS[type(x)].pi


def counting(m, x):
    COUNTS[type(x)] = COUNTS.get(type(x), 0) + 1
    return x * 2


def test_what_is_kept_by_the_type_of_a_traced_value_is_forgotten():
    KINDS[torch.Tensor] = math
    model, x = Model(dispatching), torch.ones(2, 8)
    ours = fxamp.convert(model, LOW, capture="symbolic", example_inputs=(x,))
    assert set(KINDS) == {torch.Tensor}
    torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)


def test_a_count_by_the_type_of_a_traced_value_is_no_part_of_a_graph():
    with pytest.raises(fxamp.CaptureError, match="writes into the global 'COUNTS'"):
        fxamp.convert(Model(counting), LOW, capture="symbolic", example_inputs=(torch.ones(2, 8),))
    assert COUNTS == {}


class State:
    """What a registry knows, copied at each look, as einx copies it."""

    def __init__(self, before=None, by=0):
        self.names, self.looks = ["math"], by
        self.kinds = {} if before is None else dict(before.kinds)
        self.looks += 0 if before is None else before.looks


class Registry:
    by = 0

    def __init__(self):
        self.state = State()

    def get(self, *values):
        self.state = State(self.state, self.by)
        return self.state.kinds.setdefault(tuple(map(type, values)), math)


class CountingRegistry(Registry):
    by = 1


class GrowingRegistry(Registry):
    def get(self, *values):
        found = super().get(*values)
        self.state.names.append("numpy")
        return found


REGISTRY = Registry()


def registered(m, x):
    return x * REGISTRY.get(x, 1).pi


def test_a_state_that_is_replaced_by_its_equal_is_no_write(monkeypatch):
    monkeypatch.setitem(globals(), "REGISTRY", Registry())
    model, x = Model(registered), torch.ones(2, 8)
    model(x)
    state = REGISTRY.state
    ours = fxamp.convert(model, LOW, capture="symbolic", example_inputs=(x,))
    assert REGISTRY.state is state and set(state.kinds) == {(torch.Tensor, int)}
    for size in (2, 3, 2):  # and a look of somebody else's changes nothing
        x = torch.ones(size, 8)
        torch.testing.assert_close(ours(x), model(x), rtol=0.05, atol=0.05)
    assert len(fxamp.report(ours).captures) == 1 and set(REGISTRY.state.kinds) == {(torch.Tensor, int)}


@pytest.mark.parametrize("kind", [CountingRegistry, GrowingRegistry])
def test_a_state_that_is_replaced_by_another_is_a_write(kind, monkeypatch):
    monkeypatch.setitem(globals(), "REGISTRY", kind())
    with pytest.raises(fxamp.CaptureError, match="writes into the global 'REGISTRY'"):
        fxamp.convert(Model(registered), LOW, capture="symbolic", example_inputs=(torch.ones(2, 8),))
    assert (REGISTRY.state.looks, REGISTRY.state.names, REGISTRY.state.kinds) == (0, ["math"], {})


def test_einops_may_see_its_first_tensor_in_a_capture(monkeypatch):
    """It then loads its backend, and remembers it in a global."""
    monkeypatch.setattr(_backends, "_loaded_backends", {})
    monkeypatch.setattr(_backends, "_type2backend", {})
    ours = fxamp.convert(Model(HEADS["einops"]), LOW, capture="symbolic", example_inputs=(torch.randn(3, 8),))
    assert ours(torch.randn(3, 8)).shape == (2, 3, 4)


def test_what_an_earlier_trace_left_with_einops_is_no_write_of_the_next_model(monkeypatch):
    """As a forward that could not be followed does: the next model stays a graph, and it is gone then."""
    kept = {torch.Tensor: _backends.get_backend(torch.empty(0)), ValueProxy: _backends.get_backend(torch.empty(0))}
    monkeypatch.setattr(_backends, "_type2backend", kept)
    ours = fxamp.convert(Model(HEADS["einops"]), LOW, capture="symbolic", example_inputs=(torch.randn(3, 8),))
    assert ours(torch.randn(3, 8)).shape == (2, 3, 4)
    assert set(kept) == {torch.Tensor}


def named(m, x):
    return x * (2 if re.fullmatch(r"fc\d*", "fc") else 3)


def test_what_python_keeps_of_patterns_is_no_state_of_the_models():
    re.purge()
    ours = fxamp.convert(Model(named), LOW, capture="symbolic", example_inputs=(torch.randn(3, 8),))
    assert ours(torch.randn(3, 8)).shape == (3, 8)


@pytest.mark.parametrize("with_example", [True, False])
def test_numbers_of_a_tensor_that_go_to_numpy_are_left_to_dynamo(with_example):
    """As TimesNet picks its periods; and it is no mistake of the inputs."""

    def periods(m, x):
        strongest = x.abs().mean(0).topk(2)[1].detach().cpu().numpy()
        return x * float(8 // (1 + int(strongest[0])) + 1)

    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    model = Model(periods)
    converted = fxamp.convert(model, LOW, (x,) if with_example else None)
    torch.testing.assert_close(converted(x), model(x), atol=0.1, rtol=0.02)
    with pytest.raises(CaptureError, match=r"\.numpy\(\)"):
        fxamp.convert(model, LOW, (x,), capture="symbolic")
    torch._dynamo.reset()


def test_einops_keeps_nothing_of_a_trace():
    """Its cache of shapes finds numbers by their hash, and asks whether they are equal: not those of a trace."""

    class Finding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = importlib.import_module("einops").rearrange(x, "(b s) d -> b s d", b=x.shape[0] // 5)
            return self.linear(found)

    model, x = Finding(), torch.randn(35, 7)
    converted = fxamp.convert(model, torch.bfloat16, capture="symbolic", example_inputs=(x,))
    for given in (x, torch.randn(35, 7), torch.randn(70, 7)):
        assert rearrange(given, "(b s) d -> b s d", b=given.shape[0] // 5).shape == model(given).shape
        assert (converted(given) - model(given)).norm() < 0.02 * model(given).norm()


class Info(dict):
    pass


class Ordered(collections.OrderedDict):
    pass


class Sizes(tuple):
    pass


class Listed(list):
    pass


class Size(typing.NamedTuple):
    rows: int


class NamedSize(Size):
    pass


class Slotted:
    __slots__ = ("__dict__", "rows")

    def __init__(self, rows):
        self.rows = rows


LAST = {}


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: Info(rows=rows),
        lambda rows: Ordered(rows=rows),
        lambda rows: Sizes((rows,)),
        lambda rows: Listed([rows]),
        Size,
        NamedSize,
        Slotted,
    ],
    ids=["dict", "OrderedDict", "tuple", "list", "NamedTuple", "derived NamedTuple", "slots"],
)
def test_what_an_object_holds_beside_its_attributes_is_a_write(make, monkeypatch):
    """Two of these have the same attributes, none, and are no equals."""

    def noting(m, x):
        LAST["size"] = make(x.shape[0])
        return x * 2

    def noted():
        held = LAST["size"]
        return getattr(held, "rows", None) or (held["rows"] if isinstance(held, dict) else held[0])

    monkeypatch.setitem(LAST, "size", make(1))
    converted = fxamp.convert(Model(noting), LOW)
    for rows in (4, 6, 6, 9):
        converted(torch.ones(rows, 8))
        assert noted() == rows
