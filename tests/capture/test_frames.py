"""Frames that Dynamo captures: those of one model do not count against another, and what it gives up is told."""

import copy
import gc
import logging
import weakref

import pytest
import torch
import torch._dynamo
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

bf16 = torch.bfloat16


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if h.abs().sum() > 1e9:  # data decides: Dynamo captures the model, and breaks its graph here
            h = h * 2
        return torch.relu(h)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i = Inner()
        self.b = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.i(x))


@pytest.fixture(autouse=True)
def _from_the_start():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _low_nodes(converted: nn.Module) -> int:
    """Used in training and in evaluation."""
    x = torch.randn(4, 16)
    converted.train()(x).sum().backward()
    with torch.no_grad():
        converted.eval()(x)
    return fxamp.report(converted).low_precision_nodes


@pytest.mark.parametrize(("count", "are_kept"), [(12, True), (20, False)])
def test_the_last_conversion_of_a_class_is_as_low_as_the_first(count: int, are_kept: bool, caplog) -> None:
    kept, found = [], []
    for _ in range(count):
        converted = fxamp.convert(Net(), dtype=bf16)
        found.append(_low_nodes(converted))
        if are_kept:
            kept.append(converted)
        del converted
        gc.collect()
    assert found == [found[0]] * count
    assert found[0] > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_converted_model_that_is_gone_leaves_no_graph_behind() -> None:
    converted = fxamp.convert(Net(), dtype=bf16)
    _low_nodes(converted)
    graphs = [weakref.ref(variant) for variant in converted.__dict__["_fxamp_engine"].all_variants()]
    del converted
    gc.collect()
    assert graphs
    assert [graph() for graph in graphs] == [None] * len(graphs)


def test_past_the_number_of_captures_that_torch_allows_a_process() -> None:
    with torch._dynamo.config.patch(accumulated_recompile_limit=6):
        found = [_low_nodes(fxamp.convert(Net(), dtype=bf16)) for _ in range(5)]
    assert found == [found[0]] * 5


def test_a_users_own_compiled_model_keeps_its_own_limit() -> None:
    if not fxamp.capture.frames._IS_APART:
        pytest.skip("this torch has one limit for all that is compiled of a class")
    converted = [fxamp.convert(Net(), dtype=bf16) for _ in range(6)]
    for each in converted:
        _low_nodes(each)
    made = []

    def count(module, _):
        made.append(module)
        return module.forward

    torch.compile(Net(), backend=count)(torch.randn(4, 16))
    assert len(made) == 3  # before the break, behind it, and around
    assert torch._dynamo.config.recompile_limit == 8
    assert torch._dynamo.config.suppress_errors is False


class Rescales(nn.Module):
    """A number that changes from call to call, in a frame that Dynamo captures apart."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.mode = "0"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        torch._dynamo.graph_break()
        return h * len(self.mode) if self.mode != "none" else h


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_frame_that_is_captured_too_often_is_told(is_apart: bool, caplog, monkeypatch) -> None:
    if not is_apart:
        monkeypatch.setattr(fxamp.capture.frames, "_IS_APART", False)
    model = Rescales()
    converted, x = fxamp.convert(model, dtype=bf16, capture="dynamo"), torch.randn(2, 16)
    for number in range(12):
        converted.mode = str(number)
        converted(x)
    told = [r.getMessage() for r in caplog.records if "Dynamo gives up '" in r.getMessage()]
    assert told
    assert len(told) == len(set(told))
    assert "Rescales: Dynamo gives up" in told[0]
    assert "test_frames.py" in told[0]
    assert "recompile_limit = 8" in told[0]
    assert not [record for record in caplog.records if record.name.startswith("torch._dynamo")]


class Checked(nn.Module):
    """A layer that asks for its numbers, so that each is a frame of its own; all share the code."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * 2 if x.sum() > 1e9 else x)


@pytest.mark.parametrize("is_apart", [True, False])
def test_each_of_many_modules_of_one_class_is_captured_as_often_as_torch_allows(
    is_apart: bool, caplog, monkeypatch
) -> None:
    if not is_apart:
        monkeypatch.setattr(fxamp.capture.frames, "_IS_APART", False)
    widths = range(8, 8 + 11)
    model = nn.Sequential(*map(Checked, widths, widths[1:]))
    converted = fxamp.convert(model, dtype=bf16, capture="dynamo")
    for rows in (2, 3):
        converted(torch.randn(rows, 8)).sum().backward()
    assert "gives up" not in caplog.text
    report = fxamp.report(converted)
    assert report.outside == ()
    read = {row.module for row in report.rows if row.op == "linear" and row.precision == "low"}
    assert read == {f"{number}.fc" for number in range(10)}


def test_the_reason_of_a_limit_is_one_line() -> None:
    told = []
    limit = (
        "recompile_limit",
        8,
        "'forward' (net.py:3)",
        "0/7: type=<class 'Net'>\nUser stack trace:\n  File 'x'",
        "url",
    )
    record = logging.LogRecord(
        "torch._dynamo.convert_frame", logging.WARNING, "", 0, fxamp.capture.frames._LIMIT, limit, None
    )
    with fxamp.capture.frames.captures_apart(lambda _, why: told.append(why)):
        assert not fxamp.capture.frames._overheard.filter(record)
    assert len(told) == 1
    assert "(0/7: type=<class 'Net'>)." in told[0]


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.low(x)
            if x.norm().item() < 1e-6:
                break
        return x


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamos_advice_on_item_is_for_who_compiles() -> None:
    """It names an option that would not help a converted model, of which one line at INFO tells."""
    from torch._dynamo.variables.tensor import TensorVariable

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torch._dynamo.variables.tensor")
    log.addHandler(handler)
    try:
        for model in (fxamp.convert(Asks(), dtype=bf16), torch.compile(Asks(), backend="eager")):
            TensorVariable._warn_capture_scalar_outputs.cache_clear()
            assert told == []
            model(torch.randn(2, 8)).sum().backward()
    finally:
        log.removeHandler(handler)
    assert len(told) == 1


class Odd(tuple):
    """Dynamo asks for the length when it guards a tuple."""

    def __len__(self) -> int:
        raise NotImplementedError("no length")


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(8, 8)
        self.ir = Odd((2.0, -1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(x) * self.ir[0]


@pytest.mark.skipif(not fxamp.capture.frames._IS_APART, reason="before torch 2.13 that is a CaptureError")
def test_a_frame_that_dynamo_fails_at_runs_as_it_is_written_and_is_told(caplog) -> None:
    model, x = Fails(), torch.randn(2, 8)
    converted = fxamp.convert(model, dtype=bf16, capture="dynamo")
    first, again = converted(x), converted(x)
    assert torch.equal(first, model(x))
    assert torch.equal(again, first)
    told = [r.getMessage() for r in caplog.records if "Dynamo gives up '" in r.getMessage()]
    assert len(told) == 1
    for part in ("Fails: Dynamo gives up 'forward'", "InternalTorchDynamoError", "NotImplementedError", "boundaries="):
        assert part in told[0]
    report = fxamp.report(converted)
    assert report.low_precision_nodes == 0  # a graph that was made, and never runs, is no graph
    assert "Dynamo gave up 'forward'" in str(report.outside)


def test_an_error_of_dynamos_own_is_a_capture_error_where_it_cannot_be_kept_to_one_model(monkeypatch) -> None:
    monkeypatch.setattr(fxamp.capture.frames, "_IS_APART", False)  # as before torch 2.13
    converted = fxamp.convert(Fails(), dtype=bf16, capture="dynamo")
    with pytest.raises(fxamp.errors.CaptureError, match=r"InternalTorchDynamoError: NotImplementedError.*boundaries="):
        converted(torch.randn(2, 8))


def test_what_the_passes_refuse_is_still_raised() -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return self.fc(x)

    def refuse(*_, **__):
        raise fxamp.errors.CaptureError("not this graph")

    converted = fxamp.convert(Leaves(), dtype=bf16, capture="dynamo")
    converted.__dict__["_fxamp_engine"].otherwise.rewrite = refuse
    for _ in range(2):
        with pytest.raises(fxamp.errors.CaptureError, match="not this graph"):
            converted(torch.randn(2, 8))


class Refuses(nn.Module):
    """Raises for some inputs: in its own forward or in a submodule's, before or after a graph break."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.a, self.b, self.check = where, nn.Linear(16, 16), nn.Linear(16, 4), Check()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.where == "first" and labels is not None and len(labels) != len(x):
            raise KeyError("labels")
        h = self.a(x)
        if "behind a break" in self.where and h.abs().sum() > 1e9:
            h = h * 2
        if "submodule" in self.where:
            h = self.check(h, labels)
        h = self.b(torch.relu(h))
        if "last" in self.where and labels is not None and len(labels) != len(x):
            raise KeyError("labels")
        return h


class Check(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(16, 16)

    def forward(self, h: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        h = self.c(h)
        if labels is not None and len(labels) != len(h):
            raise KeyError("labels")
        return h


@pytest.mark.parametrize("comes_first", [False, True], ids=["after good calls", "at the first call"])
@pytest.mark.parametrize("where", ["first", "last", "submodule", "last, behind a break", "submodule, behind a break"])
def test_an_error_of_the_models_own_leaves_the_calls_after_it_low(where: str, comes_first: bool) -> None:
    torch.manual_seed(0)
    model, x, good, bad = Refuses(where), torch.randn(4, 16), torch.zeros(4), torch.zeros(3)
    converted = fxamp.convert(model, dtype=bf16, capture="dynamo")
    untroubled = fxamp.convert(copy.deepcopy(model), dtype=bf16, capture="dynamo")
    expected = untroubled(x), untroubled(x, good)
    if not comes_first:
        converted(x)
    for _ in range(2):
        with pytest.raises(KeyError, match="labels"):
            converted(x, bad)
    for _ in range(2):
        assert torch.equal(converted(x), expected[0])
        assert torch.equal(converted(x, good), expected[1])
    assert len(engine_of(converted).all_variants()) == len(engine_of(untroubled).all_variants())
    assert not torch.equal(expected[0], model(x)) and not torch.equal(expected[1], model(x, good))
