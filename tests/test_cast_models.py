"""model.half(), .to(torch.bfloat16), .double(): before a conversion and after one."""

import logging

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError

X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.fc(x)).exp())


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("called_before", [True, False])
def test_a_model_cast_after_conversion_runs_as_the_plain_one(dtype, called_before):
    model, plain = Net(), Net().to(dtype)
    converted = fxamp.convert(model, dtype="fp16", level="strict")
    if called_before:
        converted(X)
    converted.to(dtype)
    assert torch.equal(converted(X.to(dtype)), plain(X.to(dtype)))
    report = fxamp.report(converted)
    assert (report.casts, report.weight_casts, len(report.captures)) == (0, 0, 1)


@pytest.mark.parametrize("cast", [lambda model: model.half(), lambda model: nn.Sequential(model).half()])
def test_casting_the_original_or_what_is_around_it_is_noticed_too(cast, caplog):
    model = Net()
    converted = fxamp.convert(model, dtype="fp16", example_inputs=(X,))
    converted(X)
    cast(model)
    report = fxamp.report(converted)
    assert report.casts == 0 and "float16 by itself, so nothing is left to convert" in str(report)
    assert torch.equal(converted(X.half()), model(X.half()))
    assert len([text for text in warnings_of(caplog) if "nothing is left to convert" in text]) == 1


def test_back_in_float32_it_is_converted_again():
    model = Net()
    converted = fxamp.convert(model, dtype="bf16")
    expected = converted(X).dtype, fxamp.report(converted).summary()
    converted.double()(X.double())
    converted.float()
    assert (converted(X).dtype, fxamp.report(converted).summary()) == expected


@pytest.mark.parametrize("example", [None, (X.half(),)])
def test_a_model_that_is_low_already_is_said_to_be(example, caplog):
    converted = fxamp.convert(Net().half(), dtype="fp16", example_inputs=example)
    for _ in range(2):
        assert torch.equal(converted(X.half()), Net().half()(X.half()))
    (said,) = warnings_of(caplog)
    assert said.startswith("every parameter of Net is float16 by itself, so nothing is left to convert")
    assert "model.float()" in said
    report = fxamp.report(converted)
    assert report.advice == (said,) and report.coverage == 1.0
    assert "float32" not in {row.runs_in for row in report.rows}


def test_the_preview_of_a_low_model_assumes_low_inputs():
    report = fxamp.report(fxamp.convert(Net().bfloat16(), dtype="bf16"))
    assert report.is_preview and {row.runs_in for row in report.rows} == {"no float32"}


def test_lowered_parameters_are_no_low_model(caplog):
    converted = fxamp.convert(Net(), "bf16", (X,), opt_level="O3")
    converted(X)
    assert warnings_of(caplog) == []
    assert not any("nothing is left" in text for text in fxamp.report(converted).advice)
    assert fxamp.report(converted).low_precision_nodes > 0


def test_lowered_parameters_that_were_replaced_are_no_low_model(caplog):
    """As `fully_shard` does, whose shards are other parameters."""
    converted = fxamp.convert(Net(), "bf16", (X,), opt_level="O3")
    for module in converted.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = torch.nn.Parameter(parameter.detach().clone())
    converted(X)
    assert not any("nothing is left" in text for text in (*warnings_of(caplog), *fxamp.report(converted).advice))


def test_lowered_parameters_in_another_low_dtype_are_refused():
    converted = fxamp.convert(Net(), "bf16", (X,), opt_level="O2")
    converted(X)
    converted.half()
    with pytest.raises(OptionError, match=r"fc.weight was lowered .* is float16 now, and Net is to run in bfloat16"):
        converted(X)


def test_an_o2_model_back_in_float32_runs():
    converted = fxamp.convert(Net(), "bf16", (X,), opt_level="O2")
    expected = converted(X)
    converted.float()
    assert torch.equal(converted(X), expected)
    assert fxamp.report(converted).weight_casts > 0
