"""Dynamo as the second front door: the same passes, one report, and no model left that looks converted and is not."""

import copy
import dataclasses
import functools
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.errors import InvariantError
from fxamp.model.engine import engine_of


class Deciding(nn.Module):
    """Decides on data, so that a symbolic graph cannot hold it and Dynamo breaks it in two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = F.relu(self.inner(x))
        if y.sum() > 1e9:
            y = y * 2
        return {"logits": self.head(F.dropout(self.bn(y), 0.5, self.training))}


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        y = self.inner(x)
        with torch.autocast("cpu", enabled=False):
            y = y + self.inner(x)
        return self.head(y.relu())


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def linears(converted) -> list[str]:
    return [row.precision for row in fxamp.report(converted).rows if row.op == "linear"]


def test_auto_falls_back_to_dynamo_and_says_why_once(caplog):
    with caplog.at_level(logging.INFO, logger="fxamp"):
        converted = fxamp.convert(Deciding(), dtype=torch.bfloat16)
        converted(X)
        converted(X)
    said = [record.message for record in caplog.records if "captured by Dynamo" in record.message]
    assert len(said) == 1
    assert "test_dynamo.py" in said[0]
    assert set(fxamp.report(converted).captures) == {"dynamo"}
    assert linears(converted) == ["low", "low"]


class Choosing(nn.Module):
    """Symbolic capture can follow its choice with sizes that are known, and not with assumed types alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x.shape[-1] == 8 else x


def test_a_preview_that_fails_does_not_say_how_the_calls_are_captured(caplog):
    with caplog.at_level(logging.INFO, logger="fxamp"):
        converted = fxamp.convert(Choosing(), dtype=torch.bfloat16)
        (said,) = [record.message for record in caplog.records]
        assert "captured by Dynamo" not in said
        assert said.startswith("no preview of Choosing from assumed types") and "its first call decides" in said
        caplog.clear()
        converted(X)
    assert fxamp.report(converted).captures == ("symbolic",)
    assert not any("Dynamo" in record.message or "preview" in record.message for record in caplog.records)


def test_a_preview_that_fails_does_not_hide_the_fallback_of_a_call(caplog):
    with caplog.at_level(logging.INFO, logger="fxamp"):
        converted = fxamp.convert(Deciding(), dtype=torch.bfloat16)
        assert not any("captured by Dynamo" in record.message for record in caplog.records)
        converted(X)
    assert sum("captured by Dynamo" in record.message for record in caplog.records) == 1


def test_example_inputs_that_cannot_be_followed_are_no_preview(caplog):
    with caplog.at_level(logging.INFO, logger="fxamp"):
        fxamp.convert(Deciding(), dtype=torch.bfloat16, example_inputs=(X,))
    assert sum("captured by Dynamo" in record.message for record in caplog.records) == 1
    assert not any("no preview" in record.message for record in caplog.records)


def test_a_dynamo_captured_model_trains_as_eager():
    eager = Deciding()
    converted = fxamp.convert(copy.deepcopy(eager), dtype=torch.bfloat16)
    converted.eval(), eager.eval()
    ours, theirs = converted(X)["logits"], eager(X)["logits"]
    assert ours.dtype == torch.float32
    # two GEMMs of 8 numbers below 4
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-5)
    converted.train()(X)["logits"].sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in converted.parameters())
    assert int(converted.bn.num_batches_tracked) == 1


def test_train_and_eval_are_recaptured():
    converted = fxamp.convert(Deciding(), dtype=torch.bfloat16).train()
    assert not torch.equal(converted(X)["logits"], converted(X)["logits"])
    converted.eval()
    assert torch.equal(converted(X)["logits"], converted(X)["logits"])


def test_the_report_is_there_before_the_first_call_and_nothing_has_run():
    model = Straight()
    state = torch.get_rng_state()
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture="dynamo", example_inputs=(X,))
    report = fxamp.report(converted)
    assert report.is_preview
    assert report.captures == ("dynamo",)
    assert torch.equal(torch.get_rng_state(), state)
    before = report.low_precision_nodes
    converted(X)
    assert fxamp.report(converted).low_precision_nodes == before
    assert not fxamp.report(converted).is_preview


def test_a_region_without_autocast_is_protected():
    converted = fxamp.convert(Straight(), dtype=torch.bfloat16, capture="dynamo")
    converted(X)
    assert linears(converted) == ["low", "high", "low"]


def test_two_converted_models_of_one_class_do_not_share_graphs():
    one = fxamp.convert(Straight(), dtype=torch.bfloat16, capture="dynamo")
    two = fxamp.convert(Straight(), dtype=torch.float16, capture="dynamo")
    assert not torch.equal(one(X), two(X))
    assert fxamp.report(one).low_dtype == "bfloat16"
    assert fxamp.report(two).low_dtype == "float16"


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_the_same(copier):
    converted = fxamp.convert(Deciding(), dtype=torch.bfloat16).eval()
    expected = converted(X)["logits"]
    twin = copier(converted)
    assert torch.equal(twin(X)["logits"], expected)
    nn.init.zeros_(twin.head.weight)
    assert torch.equal(converted(X)["logits"], expected)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_torch_compile_with_the_backend_by_name(inner):
    model = Straight()
    compiled = torch.compile(model, backend="fxamp", options={"dtype": torch.bfloat16, "inner": inner})
    out = compiled(X)
    out.sum().backward()
    assert out.dtype == torch.float32
    assert not torch.equal(out, model(X))
    torch.testing.assert_close(out, model(X), rtol=0, atol=2**-5)
    assert model.inner.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "culprit"),
    [({"dtpe": 1}, "'dtpe'.*Did you mean 'dtype'"), ({"level": "hard"}, "'hard'"), ({"inner": "nope"}, "nope")],
)
def test_wrong_backend_options_are_named(options, culprit):
    compiled = torch.compile(Straight(), backend="fxamp", options=options)
    with pytest.raises(Exception, match=culprit):
        compiled(X)


def test_new_shapes_stay_right():
    eager = Straight()
    converted = fxamp.convert(copy.deepcopy(eager), dtype=torch.bfloat16, capture="dynamo")
    for size in (4, 7, 2, 9, 1):
        x = torch.randn(size, 8)
        torch.testing.assert_close(converted(x), eager(x), rtol=0, atol=2**-5)


def test_a_conversion_back_to_a_values_dtype_does_not_keep_a_gemm_in_fp32():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = F.softmax(q @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype)
            explicit = v.to(torch.float32)
            return scores @ v, scores @ explicit

    converted = fxamp.convert(Attention(), dtype=torch.bfloat16, capture="dynamo")
    converted(X)
    products = [row.precision for row in fxamp.report(converted).rows if row.op == "matmul"]
    assert products == ["low", "low", "high"]


def test_regions_that_protect_themselves_only_under_autocast_are_found():
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 8)
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            if torch.is_autocast_enabled("cpu"):
                with torch.autocast("cpu", enabled=False):
                    y = self.gate(x)
            else:
                y = self.gate(x)
            return self.head(y)

    model = Router()
    converted = fxamp.convert(model, dtype=torch.bfloat16, capture="dynamo")
    converted(X)
    assert [row.precision for row in fxamp.report(converted).rows if row.op == "linear"] == ["low", "low"]


def test_source_lines_are_the_users():
    converted = fxamp.convert(Straight(), dtype=torch.bfloat16, capture="dynamo")
    converted(X)
    lines = {row.source for row in fxamp.report(converted).rows if row.op == "linear"}
    assert all("test_dynamo.py:" in line for line in lines)


def _kept_name(x, other):
    kind = x.dtype
    return (x.float() * 2).to(kind)


def _typed(x, other):
    return (x.float() * 2).type(x.dtype)


def _typed_as_told(x, other):
    return (x * 2).type(torch.float32)


def _own_dtype(x, other):
    kind = torch.float32
    return (x * 2).to(kind)


def _bound_twice(x, other):
    kind = x.dtype
    kind = torch.float32
    return (x * 2).to(kind)


def _argument(x, kind):
    y = (x * 2).to(kind)
    kind = x.dtype
    return y


def _of_a_lambda(x, other):
    kind = x.dtype
    function = lambda y, kind: (y * 2).to(kind)  # noqa: E731
    return function(x.to(kind), torch.float32)


def _inner(x, other):
    kind = torch.float32

    def function(y):
        kind = y.dtype
        return (y.float() * 2).to(kind)

    return function(x).to(kind)


def _there_and_back(x, other):
    kept_for_later_where_the_value_goes_back_to_it = x.dtype
    return F.layer_norm(x.to(dtype=torch.float32), x.shape[-1:], None, None, eps=1e-5).to(
        kept_for_later_where_the_value_goes_back_to_it
    )


def _there_twice(x, other):
    return F.layer_norm(x.to(dtype=torch.float32), x.shape[-1:], None, None, eps=1e-5).to(torch.float32)


def _beside_a_low_value(x, other):
    """The second conversion is the user's own: the sum was low."""
    return ((x.to(torch.float32) * 2).to(x.dtype) + x).to(other)


@pytest.mark.parametrize(
    ("function", "precision"),
    [
        (_kept_name, "low"),
        (_typed, "low"),
        (_typed_as_told, "high"),
        (_there_and_back, "low"),
        (_there_twice, "high"),
        (_beside_a_low_value, "high"),
        (_own_dtype, "high"),
        (_bound_twice, "high"),
        (_argument, "high"),
        (_of_a_lambda, "high"),
        (_inner, "high"),
    ],
)
def test_a_conversion_to_a_name_is_relative_where_the_name_is_a_dtype_that_was_read(function, precision):
    """`.to(torch.float32)` is the user's word and stays; `.to(kind)` of what was read from a value is not."""
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.last(function(self.first(x), torch.float32))

    model = fxamp.convert(Model(), torch.bfloat16, capture="dynamo")
    model(torch.randn(2, 8))
    rows = [row for row in fxamp.report(model).rows if row.op == "linear"]
    assert [row.precision for row in rows] == ["low", precision]


def test_a_defect_of_the_passes_is_told_and_the_model_runs_as_it_is_written(caplog):
    """InvariantError is fxamp's own fault: `auto` goes on as under autocast, `symbolic` shows it."""

    def broken(*args, **options):
        raise InvariantError("linear gives bfloat16, but float32 is recorded")

    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x = nn.Linear(8, 8), torch.randn(2, 8)
    model = fxamp.convert(copy.deepcopy(plain), torch.bfloat16)
    engine_of(model).workshop = dataclasses.replace(engine_of(model).workshop, build=broken)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(x).float()
    assert torch.equal(model(x), expected)
    assert "please report it: linear gives bfloat16" in caplog.text
    only = fxamp.convert(plain, torch.bfloat16, capture="symbolic")
    engine_of(only).workshop = dataclasses.replace(engine_of(only).workshop, build=broken)
    with pytest.raises(InvariantError, match="recorded"):
        only(x)


class Store:
    """As a cache of keys and values, which forward writes into."""

    def __init__(self):
        self.kept = []
        self.sizes = {}

    def add(self, value):
        self.kept.append(value)
        self.sizes[len(self.kept)] = value.shape[0]
        return torch.cat(self.kept)


class Storing(nn.Module):
    """It speaks of autocast, so that its protected lines are looked for: by a run on fake tensors."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, store):
        with torch.autocast("cpu", enabled=False):
            x = x * 2.0
        return self.fc(store.add(x))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("with_example", [False, True])
def test_an_object_that_forward_writes_into_is_written_once_and_with_real_values(capture, with_example):
    torch._dynamo.reset()
    model, x, store = Storing(), torch.randn(2, 8), Store()
    example = {"example_inputs": (x, store)} if with_example else {}
    converted = fxamp.convert(model, torch.bfloat16, capture=capture, **example)
    assert store.kept == [], "conversion runs nothing on what it was given"
    for calls in (1, 2):
        result = converted(x, store)
        assert len(store.kept) == calls and store.sizes == dict.fromkeys(range(1, calls + 1), 2)
        assert all(type(value) is torch.Tensor and torch.equal(value, x * 2.0) for value in store.kept)
        torch.testing.assert_close(result, model.fc(torch.cat([x * 2.0] * calls)), rtol=0.02, atol=0.02)


class OwnRegion(nn.Module):
    """Opens an autocast region of its own, in another dtype than it is converted to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.float16):
            y = torch.cat([self.first(x), x.exp()], -1)
        return self.last(y.float())


@pytest.mark.parametrize("options", [{}, {"overrides": {"*": "deny"}}, {"overrides": {"first": "deny"}}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_region_that_the_model_opens_says_nothing_of_the_dtypes_it_is_converted_to(options, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = OwnRegion(), torch.randn(4, 8)
    plain = model.last(torch.cat([model.first(x), x.exp()], -1))
    converted = fxamp.convert(model, dtype, (x,), capture="dynamo", **options)
    exact = options.get("overrides") == {"*": "deny"}
    torch.testing.assert_close(converted(x), plain, rtol=0 if exact else 2**-6, atol=0 if exact else 2**-6)


class Asks(nn.Module):
    """Has a `__getattr__` of its own, as models of diffusers and peft have: torch 2.13 names its parts otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.parts = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        return self.parts[0](self.fc(x) * self.scale + self.shift)


def passed_on(forward):
    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs)

    return call


class Wrapped(nn.Module):
    """Its forward is wrapped, as every one of transformers is: the model is one of the arguments."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.inner, self.fc = inner, nn.Linear(8, 8)

    @passed_on
    def forward(self, x):
        return self.fc(self.inner(x))


NAMED = {
    "own getattr": (Asks, "fc"),
    "wrapped": (lambda: Wrapped(nn.Identity()), "fc"),
    "getattr inside": (lambda: Wrapped(Asks()), "inner.fc"),
    "wrapped inside": (lambda: nn.Sequential(Wrapped(Asks())), "0.inner.parts.0"),
}


@pytest.mark.parametrize("name", NAMED)
def test_parts_have_the_paths_that_the_model_gives_them(name):
    torch._dynamo.reset()
    make, part = NAMED[name]
    x, rows = torch.randn(2, 8), {}
    for capture in ("symbolic", "dynamo"):
        converted = fxamp.convert(make(), torch.float16, (x,), capture=capture, overrides={part: "deny"})
        converted(x)
        report = fxamp.report(converted)
        computed = [row for row in report.rows if not row.role and not row.is_source and row.op != "output"]
        rows[capture] = [(row.op, row.module, row.precision) for row in computed]
        assert report.runs == (1,) and {row.op for row in report.rows if row.is_source} >= {"input", "parameter"}
    assert rows["dynamo"] == rows["symbolic"]
    assert "high" in [precision for _, module, precision in rows["dynamo"] if f"{module}.".startswith(f"{part}.")]
