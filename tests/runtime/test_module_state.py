"""What a model keeps in Python from step to step, under GraphedStep on simulated graphs: as in the eager loop."""

import collections
import logging
import math
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import fxamp
from fxamp.runtime.graphed_step import WARM_UP
from fxamp.runtime.module_state import CarriedOver, ModuleState
from fxamp.runtime.scaler import LossScaler
from tests.runtime.simulated_graph import SimulatedGraphs

CHANGED = WARM_UP + 3
STEPS = WARM_UP + 8


class Keeps(nn.Module):
    """A layer, and what the cases below keep beside it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.set_up()

    def set_up(self):
        self.h = torch.zeros(6, 2)


class Tensor(Keeps):
    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h
        self.h = y.detach()
        return y


class WithItsGraph(Keeps):
    def forward(self, x):
        self.h = self.layer(x) + 0.5 * self.h.detach()
        return self.h


class Pair(Keeps):
    def set_up(self):
        self.h = torch.zeros(6, 2), torch.zeros(6, 2)

    def forward(self, x):
        last, before = self.h
        y = self.layer(x) + 0.5 * last - 0.25 * before
        self.h = y.detach(), last
        return y


class NewList(Keeps):
    def set_up(self):
        self.h = [torch.zeros(6, 2) for _ in range(3)]

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h[0] - 0.25 * self.h[2]
        self.h = [y.detach(), *self.h[:2]]
        return y


class IntoList(Keeps):
    def set_up(self):
        self.h = [torch.zeros(6, 2)]

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h[0]
        self.h[0] = y.detach()
        return y


class IntoDict(Keeps):
    def set_up(self):
        self.h = {"last": torch.zeros(6, 2)}

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h["last"]
        self.h["last"] = y.detach()
        return y


class Queue(Keeps):
    def set_up(self):
        self.h = collections.deque([torch.zeros(6, 2)] * 3, maxlen=3)

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h[0]
        self.h.append(y.detach())
        return y


class Namespace(Keeps):
    def set_up(self):
        self.state = types.SimpleNamespace(h=torch.zeros(6, 2))

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.state.h
        self.state.h = y.detach()
        return y


class Shift(Keeps):
    def set_up(self):
        self.last = self.before = torch.zeros(6, 2)

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.last + 0.25 * self.before
        self.before, self.last = self.last, y.detach()
        return y


class Rows(Keeps):
    """What is kept in one place is a view of what was kept in another."""

    def set_up(self):
        self.rows, self.oldest = torch.zeros(4, 6, 2), torch.zeros(6, 2)

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.oldest
        self.oldest, self.rows = self.rows[-1], torch.cat([y.detach()[None], self.rows[:-1]])
        return y


class Turned(Keeps):
    def set_up(self):
        self.h = torch.arange(36.0).view(6, 6) / 36

    def forward(self, x):
        y = self.layer(x) + self.h[:, :2]
        self.h = self.h.t()
        return y


class ViewOfKept(Keeps):
    """What is replaced at each step is a view of what is written in place."""

    def set_up(self):
        self.rows, self.h = torch.zeros(2, 6, 2), torch.zeros(6, 2)

    def forward(self, x):
        self.rows.mul_(0.5).add_(1)
        y = self.layer(x) + self.h
        self.h = self.rows[0]
        return y


class TwoOfOne(Keeps):
    """Two places hold one tensor, which is written in place through one of them."""

    def set_up(self):
        self.h = self.other = torch.zeros(6, 2)

    def forward(self, x):
        self.other.add_(1)
        y = self.layer(x) + self.h
        self.h = self.other = y.detach()
        return y


class InPlace(Keeps):
    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h
        self.h.copy_(y.detach())
        return y


class LastInput(Keeps):
    def set_up(self):
        self.h = torch.zeros(6, 4)

    def forward(self, x):
        y = self.layer(x + 0.5 * self.h)
        self.h = x
        return y


class NoneAtFirst(Keeps):
    def set_up(self):
        self.h = None

    def forward(self, x):
        y = self.layer(x) if self.h is None else self.layer(x) + 0.5 * self.h
        self.h = y.detach()
        return y


class Buffer(Keeps):
    def set_up(self):
        self.register_buffer("h", torch.zeros(2))

    def forward(self, x):
        y = self.layer(x)
        self.h = 0.5 * self.h + y.detach().mean(0)
        return y - self.h


class Shown(Keeps):
    def forward(self, x):
        y = self.layer(x)
        self.h = y.softmax(-1)
        return y


class Child(Keeps):
    def set_up(self):
        self.cell = Tensor()

    def forward(self, x):
        return self.layer(x) + self.cell(x)


class Masked(Keeps):
    def set_up(self):
        self.h = torch.ones(2)

    def forward(self, x):
        return self.layer(x) * self.h


class Named(NamedTuple):
    last: torch.Tensor
    before: list[torch.Tensor]


class NamedPair(Keeps):
    def set_up(self):
        self.h = Named(torch.zeros(6, 2), [torch.zeros(6, 2)])

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h.last - 0.25 * self.h.before[0]
        self.h = Named(y.detach(), [self.h.last])
        return y


class ByName(Keeps):
    def set_up(self):
        self.h = collections.defaultdict(list, {"last": [torch.zeros(6, 2)]})

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h["last"][0]
        self.h = collections.defaultdict(list, {"last": [y.detach()]})
        return y


class WeightNormed(Keeps):
    def set_up(self):
        nn.utils.weight_norm(self.layer)

    def forward(self, x):
        return self.layer(x)


class Normed(WeightNormed):
    def set_up(self):
        nn.utils.spectral_norm(self.layer)


class Pruned(WeightNormed):
    def set_up(self):
        prune.l1_unstructured(self.layer, "weight", amount=0.25)


class Output(collections.OrderedDict):
    """Of a class that cannot be made from its entries alone."""

    def __init__(self, *, last):
        super().__init__(last=last)


class KeepsOutput(Keeps):
    def set_up(self):
        self.h = Output(last=torch.zeros(6, 2))

    def forward(self, x):
        y = self.layer(x) + 0.5 * self.h["last"]
        self.h = Output(last=y.detach())
        return y


class Grows(Keeps):
    def set_up(self):
        self.h = []

    def forward(self, x):
        y = self.layer(x) + (sum(self.h) / len(self.h) if self.h else 0)
        self.h.append(y.detach())
        return y


class Alternates(Keeps):
    def set_up(self):
        self.h = None

    def forward(self, x):
        y = self.layer(x)
        if self.h is not None:
            y, self.h = y + self.h, None
        else:
            self.h = y.detach()
        return y


class CountsInObject(Keeps):
    def set_up(self):
        self.state = types.SimpleNamespace(count=0)

    def forward(self, x):
        self.state.count += 1
        return self.layer(x) * self.state.count


class CountsInDict(Keeps):
    def set_up(self):
        self.state = {"count": 0}

    def forward(self, x):
        self.state["count"] += 1
        return self.layer(x) * self.state["count"]


class CountsInSet(Keeps):
    def set_up(self):
        self.state = set()

    def forward(self, x):
        self.state.add(len(self.state))
        return self.layer(x) * len(self.state)


class CountsInHiddenModule(Keeps):
    def set_up(self):
        self.parts = [CountsInDict()]

    def forward(self, x):
        return self.layer(x) + self.parts[0](x)


class Centred(nn.Module):
    """A loss with a running mean, in a new tensor at each step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, outputs, targets):
        loss = F.mse_loss(outputs.float() - self.centre, targets)
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().float().mean(0)
        return loss

    def anneal(self, outputs, targets):
        return self(outputs, targets) * getattr(self, "weight", 1.0)


class Counting(Centred):
    steps = 0

    def forward(self, outputs, targets):
        self.steps += 1
        return super().forward(outputs, targets) * self.steps


def plain_loss(outputs, targets):
    return F.mse_loss(outputs.float(), targets)


def set_zeros(model, loss):
    model.h = torch.zeros_like(model.h)


def set_pair(model, loss):
    model.h = torch.zeros(6, 2), torch.ones(6, 2)


def set_entry(model, loss):
    model.h[0] = torch.ones(6, 2)


def set_none(model, loss):
    model.h = None


def fill(model, loss):
    model.h.fill_(0.25)


def evaluate(model, loss):
    model.eval()
    with torch.no_grad():
        model(torch.ones(6, 4))
    model.train()


def detach(model, loss):
    model.h = model.h.detach()


def mask(model, loss):
    model.h = torch.tensor([1.0, 0.0])


def weigh(model, loss):
    loss.__self__.weight = 0.5


GRAPHED = {
    "tensor": (Tensor,),
    "tensor, reset": (Tensor, set_zeros),
    "tensor, filled": (Tensor, fill),
    "tensor, in evaluation too": (Tensor, evaluate),
    "tensor, detached by the loop": (Tensor, detach),
    "tensor with its graph": (WithItsGraph,),
    "pair": (Pair,),
    "pair, reset": (Pair, set_pair),
    "new list": (NewList,),
    "new list, written into": (NewList, set_entry),
    "into a list": (IntoList,),
    "into a list, reset": (IntoList, set_entry),
    "into a dict": (IntoDict,),
    "queue": (Queue,),
    "namespace": (Namespace,),
    "shift": (Shift,),
    "a view of another": (Rows,),
    "a view of itself": (Turned,),
    "in place": (InPlace,),
    "in place, reset": (InPlace, set_zeros),
    "last input": (LastInput,),
    "none at first": (NoneAtFirst,),
    "reset to none": (NoneAtFirst, set_none),
    "buffer": (Buffer,),
    "buffer, reset": (Buffer, set_zeros),
    "named pair": (NamedPair,),
    "by name": (ByName,),
    "shown": (Shown,),
    "weight norm": (WeightNormed,),
    "spectral norm": (Normed,),
    "pruned": (Pruned,),
    "of a part": (Child,),
    "mask, another": (Masked, mask),
    "loss with a buffer": (Shown, None, Centred()),
    "loss that is a method": (Shown, weigh, Centred().anneal),
}
EAGER = {
    "grows": (Grows,),
    "in a class of its own": (KeepsOutput,),
    "a view of what stays": (ViewOfKept,),
    "one tensor in two places": (TwoOfOne,),
    "alternates": (Alternates,),
    "counts in an object": (CountsInObject,),
    "counts in a dict": (CountsInDict,),
    "counts in a set": (CountsInSet,),
    "counts in a module that is no part": (CountsInHiddenModule,),
    "loss that counts": (Shown, None, Counting()),
}
CONVERTED = {
    "as it is": lambda model: model,
    "O1": lambda model: fxamp.convert(model, torch.bfloat16),
    "O2": lambda model: fxamp.convert(model, torch.bfloat16, opt_level="O2"),
}


@pytest.fixture
def graphs(monkeypatch):
    return SimulatedGraphs(monkeypatch)


def batches(count=STEPS, rows=6):
    torch.manual_seed(1)
    return [(torch.randn(rows, 4), torch.randn(rows, 2)) for _ in range(count)]


def train(graphs, convert, made, change=None, loss=plain_loss, *, graphed, data=None, change_at=CHANGED):
    """Losses, what is kept at the end, and the GraphedStep where it made the steps."""
    model = convert(made())
    owner = getattr(loss, "__self__", loss)
    if isinstance(owner, nn.Module):
        owner.centre = torch.zeros(2)
        owner.steps, owner.weight = 0, 1.0
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    if any(parameter.dtype is torch.bfloat16 for parameter in model.parameters()):
        optimizer = fxamp.MasterWeightOptimizer(optimizer)
    scaler, losses = LossScaler(2.0**4), []
    step = graphs.step_for(model, loss, optimizer, scaler) if graphed else None
    for number, (inputs, targets) in enumerate(data or batches()):
        given = inputs.clone()
        if change is not None and number == change_at:
            change(model, loss)
        if step is not None:
            losses.append(float(step(inputs, targets)))
        else:
            optimizer.zero_grad()
            found = loss(model(inputs), targets)
            scaler.scale(found).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(found.detach()))
        assert torch.equal(inputs, given), "a batch is the user's"
    kept = [held for held in (getattr(model, "h", None), getattr(owner, "centre", None)) if torch.is_tensor(held)]
    return losses, [held.detach().float() for held in kept], step


def check(graphs, convert, case, **options):
    expected, kept, _ = train(graphs, convert, *case, graphed=False, **options)
    losses, held, step = train(graphs, convert, *case, graphed=True, **options)
    assert losses == pytest.approx(expected, rel=2**-20)
    torch.testing.assert_close(held, kept)
    return step


@pytest.mark.parametrize("convert", CONVERTED.values(), ids=CONVERTED)
@pytest.mark.parametrize("case", GRAPHED.values(), ids=GRAPHED)
def test_what_steps_put_in_the_place_of_tensors_is_carried_over(graphs, case, convert):
    step = check(graphs, convert, case)
    is_traced_anew = "not called before" in (step.why_eager or "")  # a pair of tensors, while it is converted
    assert step.is_graphed or is_traced_anew


@pytest.mark.parametrize("convert", CONVERTED.values(), ids=CONVERTED)
@pytest.mark.parametrize("case", EAGER.values(), ids=EAGER)
def test_what_else_steps_change_is_not_recorded(graphs, case, convert):
    assert not check(graphs, convert, case).is_graphed


def test_a_change_before_the_second_graph(graphs):
    """Graphs of several shapes share what is carried over."""
    data = [batch for pair in zip(batches(8), batches(8, rows=3), strict=True) for batch in pair]
    step = check(graphs, CONVERTED["as it is"], (Buffer, set_zeros), data=data, change_at=9)
    assert graphs.captures == 2 and step.is_graphed


def test_a_state_whose_shape_follows_the_batch_is_recorded_for_each_in_turn(graphs):
    class Follows(Tensor):
        def forward(self, x):
            if len(self.h) != len(x):
                self.h = torch.zeros(len(x), 2)
            return super().forward(x)

    data = [*batches(WARM_UP + 2), *batches(4, rows=3), *batches(WARM_UP + 2)]
    step = check(graphs, CONVERTED["as it is"], (Follows,), data=data)
    assert step.is_graphed and graphs.captures == 4, "of rows of 3 the first sets the state, and cannot be recorded"


class GrowsTable(Keeps):
    """Rotary embeddings and their like make a longer table when a longer sequence comes."""

    def set_up(self):
        self.table, self.length = torch.ones(6, 1), 6

    def forward(self, x):
        if len(x) > self.length:
            self.length, self.table = len(x), torch.linspace(0, 1, len(x))[:, None]
        return self.layer(x) * self.table[: len(x)]


@pytest.mark.parametrize("convert", CONVERTED.values(), ids=CONVERTED)
def test_what_is_set_once_is_recorded_at_the_next_step(graphs, convert):
    data = [*batches(WARM_UP + 2), *batches(3, rows=8), *batches(3), *batches(2, rows=10), *batches(2, rows=8)]
    step = check(graphs, convert, (GrowsTable,), data=data)
    assert step.is_graphed


def test_an_attribute_that_the_loop_sets_at_each_step_is_named(graphs, caplog):
    model = Masked()
    model.epoch = 0
    step = graphs.step_for(model, plain_loss, torch.optim.SGD(model.parameters(), 0.1, fused=True), max_graphs=2)
    with caplog.at_level(logging.WARNING, "fxamp"):
        for number, batch in enumerate(batches()):
            model.epoch = number
            step(*batch)
    assert graphs.captures == 2 and "What changes: Masked.epoch." in caplog.text


def test_memory_that_was_copied_is_not_kept_after_a_reset(graphs):
    model = NoneAtFirst()
    step = graphs.step_for(model, plain_loss, torch.optim.SGD(model.parameters(), 0.1, fused=True))
    for number, batch in enumerate(batches(37)):
        if number % 8 == 7:
            model.h = None
        step(*batch)
    assert graphs.captures == 5 and len(step._carried._copies) == 1


# ------------------------------------------------------------------------------------------------- what is a change


def changes_of(holder, change):
    state = ModuleState([holder])
    change(holder)
    return [found.name for found in state.changes()]


def test_values_count_not_objects():
    module = Masked()
    module.numbers, module.text, module.nothing = [1.0, math.nan, (2, 3)], "a" * 50, None
    module.table, module.names = {"a": {"b": 1000}}, {"x", "y"}

    def renew(module):
        module.numbers, module.text = [1.0, float("nan"), tuple([2, 3])], "".join(["a"] * 50)
        module.table["a"]["b"] = int("1000")
        module.names = {"y", "x"}

    assert changes_of(module, renew) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda m: m.table["a"].update(b=2), "Masked.table['a']['b']"),
        (lambda m: m.table.update(c=2), "Masked.table['c']"),
        (lambda m: m.table.pop("a"), "Masked.table['a']"),
        (lambda m: m.items.append(1), "Masked.items"),
        (lambda m: m.items.__setitem__(1, 5), "Masked.items[1]"),
        (lambda m: m.names.add("z"), "Masked.names"),
        (lambda m: setattr(m, "text", 1), "Masked.text"),
        (lambda m: setattr(m, "flag", 1), "Masked.flag"),
        (lambda m: setattr(m, "fresh", 1), "Masked.fresh"),
        (lambda m: delattr(m, "text"), "Masked.text"),
        (lambda m: setattr(m, "h", torch.ones(2)), "Masked.h"),
        (lambda m: setattr(m.state, "count", 2), "Masked.state.count"),
    ],
)
def test_a_change_is_named_and_put_back(change, name):
    module = Masked()
    module.table, module.items, module.names = {"a": {"b": 1}}, [1, 2], {"x"}
    module.text, module.flag, module.state = "a", True, types.SimpleNamespace(count=1)
    state = ModuleState([module])
    change(module)
    assert [found.name for found in state.changes()] == [name]
    state.put_back()
    assert state.changes() == [] and module.table == {"a": {"b": 1}} and module.items == [1, 2]
    assert module.names == {"x"} and (module.text, module.flag, module.state.count) == ("a", True, 1)
    assert not hasattr(module, "fresh") and module.h.eq(1).all()


def test_what_is_another_packages_is_not_looked_into():
    module = Masked()
    module.loop = logging.getLogger("one of the test's")
    module.itself = module
    module.long = list(range(5000))
    assert changes_of(module, lambda m: setattr(m.loop, "count", 1)) == []
    assert changes_of(module, lambda m: m.long.append(1)) == []
    assert changes_of(module, lambda m: setattr(m, "long", [])) == ["Masked.long"]


def test_of_modules_whose_reads_are_known_tensors_count():
    module = Masked()
    module.count, module.kept = 1, {"h": torch.zeros(1), "n": 1}
    state = ModuleState([module], read=[module])
    module.kept["h"] = torch.zeros(1)
    assert [found.name for found in state.changes()] == ["Masked.kept['h']"]


def test_what_differs_in_shape_is_left():
    module = Tensor()
    carried = CarriedOver()
    for number in range(2):
        before, module.h = ModuleState([module]), torch.full((6, 2), float(number))
        carried.note(before.changes())
    carried.begin(ModuleState([module]))
    copy, state = module.h, ModuleState([module])
    module.h = torch.full((6, 2), 2.0)
    assert carried.take(state) == [] and module.h is copy and copy.eq(2).all()
    for other in (torch.zeros(3, 2), torch.zeros(6, 2).half(), torch.zeros(6, 2).to_sparse(), None):
        module.h = other
        (left,) = carried.take(state)
        assert left.name == "Tensor.h" and carried.is_lost(left) and copy.eq(2).all()
        module.h = copy


def test_what_comes_to_share_its_memory_is_left():
    module = Shift()
    module.table = torch.zeros(3, 6, 2)
    carried = CarriedOver()
    for _ in range(2):
        before, module.last, module.before = ModuleState([module]), torch.ones(6, 2), torch.ones(6, 2)
        carried.note(before.changes())
    carried.begin(ModuleState([module]))
    state, copies = ModuleState([module]), (module.last, module.before)

    def left_of(last, before):
        module.last, module.before = last, before
        names = [change.name for change in carried.take(state)]
        module.last, module.before = copies
        return names

    one = torch.zeros(6, 2)
    assert left_of(torch.zeros(6, 2), torch.zeros(6, 2)) == left_of(copies[1], copies[0]) == []
    assert left_of(one, one) == left_of(one, one.view(6, 2)) == ["Shift.last", "Shift.before"]
    assert left_of(module.table[1], torch.zeros(6, 2)) == ["Shift.last"]
    module.layer.weight.data = torch.zeros(6, 2)
    state = ModuleState(module.modules())
    assert left_of(module.layer.weight.detach(), torch.zeros(6, 2)) == ["Shift.last"]


def test_what_differs_in_names_is_left():
    module = Tensor()
    module.h = {"a": torch.zeros(2)}
    carried = CarriedOver()
    for _ in range(2):
        before, module.h = ModuleState([module]), {"a": torch.ones(2)}
        carried.note(before.changes())
    carried.begin(ModuleState([module]))
    state = ModuleState([module])
    for other in ({"b": torch.ones(2)}, {"a": torch.ones(2), "b": 1}, {}, [torch.ones(2)]):
        module.h = other
        (left,) = carried.take(state)
        assert left.name == "Tensor.h" and carried.is_lost(left) and module.h is other
