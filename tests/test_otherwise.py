"""Calls at O1 that no graph holds: as written with graphs inside, or Dynamo's."""

import copy
import gc
import logging
import pickle
import re
import sys
import types
import warnings

import pytest
import torch
import torch.nn.attention.flex_attention
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.dynamo.backend import DynamoForward
from fxamp.dynamo.preview import _speaks_of_autocast
from fxamp.model.engine import engine_of
from fxamp.model.written import Written
from tests.choosing import Block, Choosing, batch
from tests.choosing import trained as trained_by
from tests.zoo.measure import autocast

LOWS = [torch.float16, torch.bfloat16]


class Deciding(Block):
    """A block that no graph holds either."""

    def forward(self, x):
        h = super().forward(x)
        return h if h.sum().item() > 0 else -h


class Shallow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.a(x)
        return self.b(h if h.sum().item() > 0 else -h)


def o1(model, dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    return fxamp.convert(model, dtype, **options)


def chosen(converted):
    return type(engine_of(converted).otherwise.chosen)


def trained(model, **how):
    return trained_by(model, torch.optim.SGD(model.parameters(), 0.1), **how)


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
def test_a_model_of_modules_that_graphs_hold_runs_as_written(dtype, is_given, caplog):
    torch.manual_seed(0)
    model = Choosing()
    plain, low = copy.deepcopy(model), copy.deepcopy(model)
    with caplog.at_level(logging.INFO, "fxamp"):
        converted = o1(model, dtype, example_inputs=(batch(0),) if is_given else None)
        found = trained(converted, scaler=fxamp.LossScaler(64.0))
    assert (found - trained(plain)).norm() <= 2 * (
        trained(low, autocast=dtype) - trained(copy.deepcopy(plain))
    ).norm() + 0.1
    engine = engine_of(converted)
    assert chosen(converted) is Written and not engine.otherwise.by_dynamo.calls
    assert {"stem"} <= set(engine.blocks) <= {"stem", "left", "right"}
    assert set(fxamp.report(converted).captures) == {"symbolic"}
    told = [record.message for record in caplog.records if "not as a symbolic graph" in record.message]
    assert len(told) == 1 and "Choosing: runs as under torch.autocast, and what it calls as graphs" in told[0]
    assert {weight.dtype for weight in converted.parameters()} == {torch.float32}


def test_its_steps_are_those_of_autocast():
    torch.manual_seed(0)
    model = Choosing()
    plain, low = copy.deepcopy(model), copy.deepcopy(model)
    expected, autocast = trained(plain), trained(low, autocast=torch.bfloat16)
    found = trained(o1(model))
    assert (found - expected).norm() <= 2 * (autocast - expected).norm()
    for weight, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=0, atol=0.01)


def test_one_whose_modules_no_graph_holds_is_for_dynamo(caplog):
    converted = o1(Choosing(Deciding))
    with caplog.at_level(logging.INFO, "fxamp"):
        for step in range(2):
            converted(batch(step)).sum().backward()
    assert chosen(converted) is DynamoForward
    assert set(fxamp.report(converted).captures) == {"dynamo"} and not engine_of(converted).blocks
    assert sum("captured by Dynamo from now on" in record.message for record in caplog.records) == 1


class Dropped(nn.Module):
    """Sets a weight of the layer in it at each call, as the weight dropout of AWD-LSTM does."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(8, 12, batch_first=True)
        self.raw = nn.Parameter(self.cell.weight_hh_l0.detach())
        del self.cell.weight_hh_l0
        self.cell.weight_hh_l0 = self.raw.detach()
        self.cell.flatten_parameters = self.nothing

    def nothing(self):
        pass

    def forward(self, *given):
        self.cell.weight_hh_l0 = F.dropout(self.raw, 0.0, self.training)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.cell(*given)


class Carrying(nn.Module):
    """A recurrent model that keeps its states in lists, or in buffers."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.table, self.layer, self.head = nn.Embedding(9, 8), Dropped(), nn.Linear(12, 8)
        self.register_buffer("h", torch.zeros(1, 4, 12))
        self.register_buffer("c", torch.zeros(1, 4, 12))
        self.states = [(self.h, self.c)]

    def forward(self, x):
        result, (h, c) = self.layer(self.table(x), self.states[0] if self.where == "list" else (self.h, self.c))
        if self.where == "list":
            self.states = [(h.detach(), c.detach())]
        else:
            self.h, self.c = h.detach(), c.detach()
        return self.head(result)


@pytest.mark.parametrize("is_asked_before", [False, True])
@pytest.mark.parametrize("where", ["list", "buffer"])
def test_one_that_keeps_something_low_goes_on_as_written(where, is_asked_before):
    """A layer that Dynamo leaves outside of its graphs is float32, and takes no low state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Carrying(where)
    plain, low = copy.deepcopy(model), copy.deepcopy(model)
    converted = o1(model)
    for step in range(4):
        x = torch.randint(9, (4, 7), generator=torch.Generator().manual_seed(step))
        if is_asked_before and step == 0:
            with torch.no_grad(), autocast():
                low(x)
            with torch.no_grad():
                converted(x), plain(x)
        with autocast():
            theirs = low(x)
        found, expected = converted(x), plain(x)
        assert (found - expected).norm() <= 2 * (theirs - expected).norm() + 0.01
        found.sum().backward()


def test_what_was_low_before_is_not_kept_by_the_call():
    model = Choosing(Deciding)
    model.table = torch.ones(3, dtype=torch.bfloat16)
    model.register_buffer("other", torch.ones(3, dtype=torch.bfloat16))
    converted = o1(model)
    converted(batch(0)).sum().backward()
    assert chosen(converted) is DynamoForward


def test_what_was_converted_is_told_once_dynamo_has_been_asked(caplog):
    model = o1(nn.Sequential(*(Deciding(16) for _ in range(3))))
    with caplog.at_level(logging.INFO, "fxamp"):
        model(batch(0)).sum().backward()
        assert not any("Converted" in text or "call the model once" in text for text in caplog.messages)
        model(batch(0)).sum().backward()
    assert sum("Converted" in text for text in caplog.messages) == 1
    assert fxamp.report(model).low_precision_nodes


def test_one_of_layers_alone_is_for_dynamo_at_once(caplog):
    converted = o1(Shallow())
    with caplog.at_level(logging.INFO, "fxamp"):
        converted(batch(0)).sum().backward()
    assert engine_of(converted).otherwise.by_dynamo.calls == 1 and not engine_of(converted).otherwise.written.engines
    assert any("Shallow: captured by Dynamo, not as a symbolic graph" in record.message for record in caplog.records)


class Looping(nn.Module):
    """Dynamo gives up its frame: a graph breaks inside of the loop. `spare` is used by nobody."""

    def __init__(self):
        super().__init__()
        self.head, self.layers = nn.Linear(16, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.spare = nn.Linear(64, 64)

    def forward(self, x):
        x = self.head(x)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
            if x.sum().item() > 1e9:
                x = x * 2
        return x


@pytest.mark.parametrize("dtype", LOWS)
def test_what_dynamo_leaves_out_runs_as_autocast_runs_it(dtype, fresh_dynamo):
    torch.manual_seed(0)
    model = Looping()
    plain, low = copy.deepcopy(model), copy.deepcopy(model)
    converted = o1(model, dtype)
    assert torch.equal(converted(batch(0)), plain(batch(0)))
    assert chosen(converted) is Written
    found, expected = trained(converted), trained(low, autocast=dtype)
    assert torch.equal(found, expected) and not torch.equal(found, trained(plain))


def test_what_is_not_used_is_no_reason_to_leave_dynamo(fresh_dynamo):
    converted = o1(Spared())
    for step in range(3):
        converted(batch(step)).sum().backward()
    assert chosen(converted) is not Written and set(fxamp.report(converted).captures) == {"dynamo"}
    converted = o1(Spared().requires_grad_(False))  # then nothing tells
    converted(batch(0))
    assert chosen(converted) is Written


class Spared(Looping):
    """Graphs hold all that is used."""

    def forward(self, x, how="relu"):
        h = getattr(F, how)(self.head(x))
        for layer in self.layers:
            h = layer(h)
        return h if h.sum().item() > 0 else -h


class OnlyFloat32:
    """Does not take what torch.autocast makes low, as kernels do not that are for float32 alone."""

    def forward(self, *given):
        h = super().forward(*given)
        if h.dtype != torch.float32:
            raise RuntimeError("only float32 here")
        return h


class Refused(OnlyFloat32, Looping):
    pass


def test_what_raises_under_autocast_stays_with_dynamo(fresh_dynamo, caplog):
    model = Refused()
    converted = o1(model)
    for _ in range(4):
        assert torch.equal(converted(batch(0)), model(batch(0)))
    assert chosen(converted) is DynamoForward
    (said,) = [text for text in caplog.messages if "it raises under torch.autocast" in text]
    assert said == "Refused: left to Dynamo, as it raises under torch.autocast: only float32 here"


class RefusedSpared(OnlyFloat32, Spared):
    pass


def test_it_stays_with_dynamo_whatever_that_gives_up(fresh_dynamo, caplog):
    model = RefusedSpared()
    converted = o1(model)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for how in ("relu", "tanh", "sigmoid", *("gelu", "silu", "mish", "elu") * 2):
            assert torch.allclose(converted(batch(0), how), model(batch(0), how), rtol=0.1, atol=0.05)
    assert chosen(converted) is DynamoForward
    assert sum("it raises under torch.autocast" in text for text in caplog.messages) == 1


CALLS = []


class Noted(Looping):
    def forward(self, x):
        torch.compiler.disable(CALLS.append)(x.shape)
        if x.max().item() > 100:
            raise RuntimeError("too large")
        return super().forward(x)


def test_what_raises_anyway_is_the_models_own(fresh_dynamo, caplog):
    CALLS.clear()
    converted = o1(Noted())
    converted(batch(0))
    for _ in range(2):
        before = len(CALLS)
        with pytest.raises(RuntimeError, match="too large"):
            converted(batch(0) * 1000)
        assert len(CALLS) - before == 1  # also where it ran as written and by Dynamo
        assert chosen(converted) is Written and not any("it raises" in text for text in caplog.messages)
        with torch.autocast("cpu", torch.bfloat16):
            expected = Looping.forward(converted, batch(0))
        assert torch.equal(converted(batch(0)), expected.float())


def without_gradients(model, x, autocast=None):
    with torch.no_grad(), torch.autocast("cpu", autocast, enabled=autocast is not None):
        return model(x)


@pytest.mark.parametrize("dtype", LOWS)
class Casts(nn.Module):
    """Has a tensor of the user's class where Dynamo leaves its graph, whose own code casts to that class there."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.a(x).as_subclass(Mine)
        return self.b((h if h.sum().item() > 0 else -h).as_subclass(torch.Tensor))


class Mine(torch.Tensor):
    pass


class Unmeasured(tuple):
    """Dynamo asks for the length when it guards a tuple."""

    def __len__(self):
        raise NotImplementedError("no length")


class Scaled(Shallow):
    def __init__(self):
        super().__init__()
        self.scales = Unmeasured((2.0, -1.0))

    def forward(self, x):
        return super().forward(x) * self.scales[0]


def for_ever(*given):
    return for_ever(*given)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("kind", "why"), [(Casts, ".*maximum recursion depth"), (Scaled, "CaptureError: .*no length")])
def test_a_model_at_which_dynamo_fails_runs_as_autocast_runs_it(kind, why, trains, fresh_dynamo, monkeypatch, caplog):
    monkeypatch.setattr(torch._dynamo.utils, "to_subclass", for_ever)  # as where a package has patched `as_subclass`
    if kind is Scaled:  # Dynamo fails as it captures: raised before torch 2.13, and told of since
        monkeypatch.setattr(fxamp.capture.frames, "_IS_APART", False)
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 16)
    with torch.set_grad_enabled(trains):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = model(x).float()
        converted = o1(model)
        found, again = converted(x), converted(x)
    assert torch.equal(found, wanted) and torch.equal(again, wanted)
    assert chosen(converted) is Written
    told = [record.message for record in caplog.records if "as Dynamo fails at it" in record.message]
    assert len(told) == 1 and re.match(rf"{kind.__name__}: from now on run.* \({why}", told[0])


def test_what_raises_everywhere_is_raised_as_it_is(fresh_dynamo):
    class Endless(Shallow):
        def forward(self, x):
            return for_ever(super().forward(x))

    converted = o1(Endless())
    with pytest.raises(RuntimeError, match="maximum recursion depth"):  # before torch 2.13 as Dynamo tells of it
        converted(torch.randn(4, 16))
    assert chosen(converted) is type(None)


@pytest.mark.parametrize("dtype", LOWS)
def test_evaluation_of_which_dynamo_makes_no_graph_runs_as_autocast_runs_it(dtype, fresh_dynamo, caplog):
    torch.manual_seed(0)
    model = Looping()
    plain, low = copy.deepcopy(model), copy.deepcopy(model)
    with caplog.at_level(logging.INFO, "fxamp"):
        converted = o1(model, dtype)
        assert torch.equal(without_gradients(converted, batch(0)), plain(batch(0)))
        for step in range(3):
            found = without_gradients(converted, batch(step))
            assert torch.equal(found, without_gradients(low, batch(step), dtype).float())
            assert not torch.equal(found, plain(batch(step)))
    (said,) = (text for text in caplog.messages if "makes no graph" in text)
    assert said.startswith("Looping: without gradients from now on runs as under torch.autocast")
    assert "without gradients forward runs as under torch.autocast" in fxamp.report(converted).outside[0]
    assert torch.equal(converted(batch(0)), plain(batch(0)))  # what calls with gradients do they tell themselves
    assert chosen(converted) is Written
    assert torch.equal(trained(converted), trained(low, autocast=dtype))


def test_evaluation_that_dynamo_holds_stays_there(fresh_dynamo):
    converted = o1(Spared())
    for step in range(3):
        without_gradients(converted, batch(step))
    assert set(fxamp.report(converted).captures) == {"dynamo"}


class LoopsInEvaluation(Looping):
    def forward(self, x):
        return Spared.forward(self, x) if self.training else super().forward(x)


def test_training_and_evaluation_go_ways_of_their_own(fresh_dynamo):
    torch.manual_seed(0)
    model = LoopsInEvaluation()
    low, converted = copy.deepcopy(model), o1(model)
    for step in range(3):
        for is_training in (True, False):
            for each in (low, converted):
                each.train(is_training)
            found = without_gradients(converted.eval(), batch(step))
            if step:
                assert torch.equal(found, without_gradients(low.eval(), batch(step), torch.bfloat16).float())
            converted.train()(batch(step)).sum().backward()
    assert chosen(converted) is not Written
    assert set(fxamp.report(converted).captures) == {"dynamo"}


def test_evaluation_that_raises_under_autocast_stays_with_dynamo(fresh_dynamo, caplog):
    model = Refused()
    converted = o1(model)
    for _ in range(4):
        assert torch.equal(without_gradients(converted, batch(0)), model(batch(0)))
    assert sum("it raises under torch.autocast" in text for text in caplog.messages) == 1


def test_explain_says_of_a_module_that_it_is_outside(fresh_dynamo):
    converted = o1(Looping())
    for step in range(2):
        converted(batch(step)).sum().backward()
    said = fxamp.explain(converted, "layers.0")
    assert said.startswith("module layers.0 (Linear): no graph holds a node of it.")
    assert "in a forward that runs as under torch.autocast" in said
    with pytest.raises(fxamp.OptionError, match="is no node, module"):
        fxamp.explain(converted, "layers.7")
    unused = o1(nn.ModuleDict({"a": nn.Linear(4, 4)}))
    assert "no graph that is there yet holds it" in fxamp.explain(unused, "a")


def test_what_dynamo_gives_up_later_is_a_reason(fresh_dynamo, caplog):
    model = Spared()
    converted = o1(model)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for how in ("relu", "tanh", "sigmoid", "relu"):
            converted(batch(0), how).sum().backward()
        assert any("Dynamo gives up" in text for text in caplog.messages)
        assert chosen(converted) is not Written  # the last call had its graph
        assert torch.equal(converted(batch(0), "gelu"), model(batch(0), "gelu"))
        assert chosen(converted) is Written
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(batch(0), "gelu").float()
        assert torch.equal(converted(batch(0), "gelu"), expected)


def test_what_an_override_denies_stays_in_float32():
    class Direct(Choosing):
        def __init__(self):
            super().__init__()
            self.side = nn.Linear(16, 3)

        def forward(self, x):
            return super().forward(x) + F.linear(x, self.side.weight, self.side.bias)

    torch.manual_seed(0)
    model = Direct()
    for options in ({"overrides": {"**": "deny"}}, {"overrides": {"**": "deny"}, "opt_level": "O2"}):
        plain = copy.deepcopy(model)
        converted = fxamp.convert(plain, torch.bfloat16, **options)
        for step in range(2):
            x = batch(step).requires_grad_()
            other = batch(step).requires_grad_()
            found, expected = converted(x), model(other)
            found.sum().backward(), expected.sum().backward()
            assert torch.equal(found, expected) and torch.equal(x.grad, other.grad)
        assert {weight.dtype for weight in converted.parameters()} == {torch.float32}
    converted = o1(copy.deepcopy(model), overrides={"head": "deny", "stem.up": "deny"})
    converted(batch(0)).sum().backward()
    rows = {row.module: row.precision for row in fxamp.report(converted).rows if row.op == "linear"}
    assert rows["stem.up"] == rows["head"] == "high" and rows["stem.down"] == "low"


def test_flex_attention_is_for_dynamo():
    flex = torch.nn.attention.flex_attention.flex_attention

    class Flexible(Choosing):
        pass

    Flexible.__module__ = "file_that_calls_flex"
    file = types.ModuleType(Flexible.__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, file.__name__, file)
        for calls in (True, False):
            file.attention = flex if calls else None
            converted = o1(Flexible())
            converted(batch(0)).sum().backward()
            assert bool(engine_of(converted).otherwise.by_dynamo.calls) == calls


def test_calls_without_gradients_do_not_decide():
    converted = o1(Choosing())
    with torch.no_grad():
        first = converted(batch(0))
    assert chosen(converted) is type(None)
    converted(batch(0)).sum().backward()
    assert chosen(converted) is Written
    calls = engine_of(converted).otherwise.by_dynamo.calls
    with torch.no_grad():
        torch.testing.assert_close(converted(batch(0)), first, rtol=0.05, atol=0.02)
    assert engine_of(converted).otherwise.by_dynamo.calls == calls


def test_capture_dynamo_is_dynamos():
    converted = o1(Choosing(), capture="dynamo")
    converted(batch(0)).sum().backward()
    assert isinstance(engine_of(converted).otherwise, DynamoForward)
    assert set(fxamp.report(converted).captures) == {"dynamo"}


def test_what_looks_at_nodes_looks_at_dynamos_graphs():
    plain = Choosing()
    converted = o1(copy.deepcopy(plain))
    converted(batch(0)).sum().backward()
    assert fxamp.compare(plain, converted, (batch(0),)).rows
    assert fxamp.find_nan(converted, (batch(0),)) is None
    with torch.no_grad():
        converted.head.weight.fill_(float("inf"))
    assert fxamp.find_nan(converted, (batch(0),)) is not None
    with pytest.raises(FloatingPointError), fxamp.watch_nan(converted):
        converted(batch(0)).sum().backward()


def test_copies_pickles_and_changed_models_choose_anew():
    converted = o1(Choosing())
    expected = converted(batch(0))
    twin, loaded = copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))
    assert chosen(twin) is Written and chosen(loaded) is type(None)
    for other in (twin, loaded):
        torch.testing.assert_close(other(batch(0)), expected, rtol=0, atol=0)
        assert chosen(other) is Written
    converted.left = converted.right = Deciding()
    converted(batch(0)).sum().backward()
    assert chosen(converted) is DynamoForward


def test_graphs_of_a_copy_go_with_it():
    class Configured(Block):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(scale=1.0)

    converted = o1(Choosing(Configured))
    converted(batch(0)).sum().backward()
    engines = engine_of(converted).way.engines
    count = len(engines)
    for _ in range(2):
        copy.deepcopy(converted)(batch(0)).sum().backward()
    gc.collect()
    assert len(engines) == count > 1
    converted(batch(1)).sum().backward()


def test_an_error_in_the_first_call_decides_nothing():
    class Failing(Choosing):
        fails = True

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise ValueError("no")
            return y

    converted = o1(Failing())
    with pytest.raises(ValueError, match="no"):
        converted(batch(0))
    assert chosen(converted) is type(None)
    converted.fails = False
    converted(batch(0)).sum().backward()
    assert chosen(converted) is Written


def test_it_compiles_with_a_graph_break():
    converted = o1(Choosing())
    expected = converted(batch(0))
    compiled = torch.compile(converted, backend="eager")
    torch.testing.assert_close(compiled(batch(0)), expected, rtol=0, atol=0)


# ------------------------------------------------------------------------- regions in which autocast is switched off


class SwitchedOff(nn.Module):
    """As LightGlue of kornia: the author wants float32, in a method that has a question about data."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.matrix = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.inner(x)

    def inner(self, x):
        for layer in self.layers:
            x = layer(x).relu() @ self.matrix
        return x * 2 if bool(x.sum() > 1e9) else x


@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
def test_what_stands_where_autocast_is_switched_off_is_float32(is_given):
    torch.manual_seed(0)
    model, x = SwitchedOff(), torch.randn(4, 16)
    exact = model(x).detach()
    converted = o1(model, example_inputs=(x,) if is_given else None)
    for _ in range(2):
        result = converted(x)
        result.sum().backward()
        assert torch.equal(result, exact)
    assert chosen(converted) is Written
    with torch.no_grad():
        assert torch.equal(o1(model)(x), exact), "nor where the first call has no gradients"


class AsksTwice(nn.Module):
    """Says in its documentation that it is not for autocast."""

    def __init__(self):
        super().__init__()
        self.net, self.matrix = nn.Linear(6, 8), nn.Parameter(torch.eye(8))

    def forward(self, x):
        if bool(x.isnan().any()):
            x = x * 0
        h = self.net(x) @ self.matrix.exp()
        if bool(h.isnan().any()):
            h = h * 0
        return h  # also under autocast


class AsksTwiceAndSwitches(AsksTwice):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def test_only_code_that_speaks_of_autocast_keeps_a_model_out_of_graphs():
    ways = []
    for kind in (AsksTwice, AsksTwiceAndSwitches):
        torch.manual_seed(0)
        converted = o1(kind())
        for rows in (2, 3, 4):
            converted(torch.randn(rows, 6))
        ways.append((chosen(converted), len(engine_of(converted).otherwise.by_dynamo.variants)))
    (not_written, graphs), written = ways
    assert not_written is not Written and graphs and written == (Written, 0)


@pytest.mark.parametrize(
    ("source", "speaks"),
    [
        ("x = 1  # autocast", False),
        ('"""autocast"""\nx = 1', False),
        ('class A:\n    """autocast"""\n    def f(self):\n        """autocast"""\n        return 1', False),
        ("    def f(self):\n        return self.x", False),
        ("with torch.autocast('cpu', enabled=False):\n    pass", True),
        ("from torch import autocast as off", True),
        ("from torch.cuda.amp.autocast_mode import x", True),
        ("import torch.amp.autocast_mode", True),
        ("x = getattr(torch, 'autocast')", True),
        ("with maybe_autocast(False):\n    pass", True),
        ("    def f(self, use_autocast):\n        pass", True),
        ("f(use_autocast=1)", True),
        ("torch.set_autocast_enabled(False)", True),
        ("@off_autocast\ndef f(self):\n    pass", True),
        ("def f(:  # autocast", True),
    ],
)
def test_comments_and_documentation_speak_of_nothing(source, speaks):
    assert _speaks_of_autocast(source) == speaks


def test_what_compares_before_the_first_call_goes_the_way_of_the_calls():
    torch.manual_seed(0)
    model, x = SwitchedOff(), torch.randn(4, 16)
    converted = o1(copy.deepcopy(model))
    assert fxamp.compare(model, converted, (x,)).output == 0
    assert fxamp.find_nan(converted, (x,)) is None and chosen(converted) is Written


def test_dynamo_asked_for_tells_that_it_may_not_see_where_autocast_is_switched_off(caplog):
    torch.manual_seed(0)
    converted = fxamp.convert(SwitchedOff(), torch.bfloat16, capture="dynamo")
    converted(torch.randn(4, 16))
    (told,) = [record.message for record in caplog.records if "speaks of torch.autocast" in record.message]
    assert "forward asks what its data holds" in told and "overrides={path: 'deny'}" in told


def test_what_comes_before_a_question_about_data_is_seen_to_be_switched_off():
    torch.manual_seed(0)
    model, x = SwitchedOff(), torch.randn(4, 16)
    exact = model(x).detach()
    assert torch.equal(fxamp.convert(model, torch.bfloat16, capture="dynamo")(x), exact)


# ------------------------------------------------------------------------------------------ forwards that call forward


class OwnLoss(nn.Module):
    """As models of ultralytics: a batch makes forward call a loss, which calls forward with images."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x):
        if isinstance(x, dict):
            return self.loss(x)
        for layer in self.model:
            x = layer(x).relu()
        return x

    def loss(self, batch):
        missed = self.forward(batch["img"]) - batch["y"]
        return missed.abs().mean() if missed.sum() > 0 else missed.square().mean()


def test_a_forward_that_calls_itself_stays_with_the_graph_of_that_call():
    torch.manual_seed(0)
    model, given = OwnLoss(), {"img": torch.randn(4, 16), "y": torch.randn(4, 16)}
    converted = o1(model)
    losses = []
    for _ in range(3):
        losses.append(converted(given))
        losses[-1].backward()
    assert chosen(converted) is Written and fxamp.report(converted).captures == ("symbolic",)
    assert "all weights are in graphs" in str(fxamp.report(converted).outside)
    assert {gemm.precision for gemm in fxamp.report(converted).gemms} == {"low"} and losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0], model(given), rtol=2e-2, atol=1e-3)


def test_a_forward_that_calls_itself_without_a_graph_is_judged_by_its_parts():
    """There is a graph of other calls, which tells nothing of this one."""

    class Asking(OwnLoss):
        def forward(self, x):
            if isinstance(x, dict):
                return self.loss(x)
            for layer in self.model:
                x = layer(x).relu()
            return x * 2 if self.training and x.sum() > 1e9 else x

    torch.manual_seed(0)
    given = {"img": torch.randn(4, 16), "y": torch.randn(4, 16)}
    converted = o1(Asking())
    converted.eval()(given["img"]).sum().backward()
    converted.train()(given).backward()
    assert chosen(converted) is DynamoForward


class Listed(nn.Module):
    """Names its weights after no part of it, and refuses to be asked for one, as tensordict's parameters do."""

    def __init__(self):
        super().__init__()
        self._held = [nn.Linear(16, 16), nn.Linear(16, 16)]

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        for place, layer in enumerate(self._held):
            yield from layer.named_parameters(f"{prefix}{'.' if prefix else ''}{place}")

    def parameters(self, recurse=True):
        return (parameter for _, parameter in self.named_parameters())

    def __getattr__(self, name):
        if name.isdecimal():
            raise RuntimeError("cannot be taken apart")
        return super().__getattr__(name)


class HoldsListed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.params, self.head = Listed(), nn.Linear(16, 3)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        yield from self.params.named_parameters(f"{prefix}{'.' if prefix else ''}params")
        yield from self.head.named_parameters(f"{prefix}{'.' if prefix else ''}head")

    def forward(self, x):
        for layer in self.params._held:
            x = layer(x) if x.sum().item() < 1e9 else x
        return self.head(x)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_weights_that_are_named_after_no_part_of_the_model(level):
    plain, converted = HoldsListed(), fxamp.convert(HoldsListed(), opt_level=level)
    for seed in range(3):
        x = batch(seed)
        result = converted(x)
        torch.testing.assert_close(result.float(), plain(x), atol=0.05, rtol=0.05)
        result.float().sum().backward()
