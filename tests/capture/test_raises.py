"""Questions about data whose one answer only raises an error: the graph goes the other way, and asks at each call.

The asserts of models here are to be as Python compiles them: PYTEST_DONT_REWRITE.
"""

import contextlib
import types

import pytest
import torch
from torch import nn

import fxamp

LABELS = torch.tensor([0, 1, 2])


class Checking(nn.Module):
    def __init__(self, check) -> None:
        super().__init__()
        self.fc, self.check, self.most = nn.Linear(8, 8), check, 3

    def forward(self, x, labels):
        self.check(self, x, labels)
        return self.fc(x)


def raises_if(model, x, labels):
    if labels is not None and labels.max() >= model.most:
        raise ValueError(f"labels up to {model.most}")


def raises_if_not(model, x, labels):
    if not (labels < model.most).all().item():
        text = f"labels up to {model.most}"
        raise ValueError(text)


def raises_if_either(model, x, labels):
    if labels.min() < 0 or labels.max() >= model.most:
        if model.training:
            raise ValueError("while training")
        raise ValueError("in eval mode")


def asserts(model, x, labels):
    assert labels.min() >= 0 and labels.max() < model.most, f"labels up to {model.most}"


def raises_inside(model, x, labels):
    with torch.no_grad():
        try:
            raises_if(model, x, labels)
        finally:
            model.last = None


def asks_torch(model, x, labels):
    torch._check_with(ValueError, labels.max().item() < model.most, lambda: f"labels up to {model.most}")
    torch._check_tensor_all((labels >= 0), lambda: "labels from 0")


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("check", [raises_if, raises_if_not, raises_if_either, asserts, raises_inside, asks_torch])
def test_a_check_of_data_is_one_of_the_graph(check, opt_level):
    model = Checking(check)
    x, good, bad = torch.randn(4, 8), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 3])
    converted = fxamp.convert(
        model, dtype="bfloat16", opt_level=opt_level, capture="symbolic", example_inputs=(x, good)
    )
    assert converted(x, good).sum().isfinite()
    with pytest.raises(
        AssertionError if check is asserts else ValueError, match=r"test_raises\.py:\d+: (raise|assert|labels) "
    ):
        converted(x, bad)
    assert len(fxamp.report(converted).captures) == 1
    model.most = converted.most = 4
    converted(x, bad)


def compilable_check(answer, message):
    """As transformers has one, which its models that see images hand the numbers of tokens in the text."""
    said = message if callable(message) else lambda: message
    if isinstance(answer, torch.Tensor):
        torch._check_tensor_all_with(ValueError, answer, said)
    else:
        torch._check_with(ValueError, answer, said)


CHECKS = types.SimpleNamespace(compilable=compilable_check)


def tells_numbers(model, x, labels):
    most, size = labels.max(), x.shape[0]
    CHECKS.compilable(
        most < model.most,
        f"labels up to {most} ({most:03d}) of {model.most}, for {size}: {labels.float().mean():.2f} {{}}",
    )


def tells_torch(model, x, labels):
    torch._check_with(ValueError, (labels.max() < model.most).item(), lambda: f"labels up to {labels.max()}")


def tells_what_is_known(model, x, labels):
    compilable_check(isinstance(labels, torch.Tensor), f"labels up to {labels.max()}")
    torch._check(x.shape[-1] == 8, lambda: f"not {model.missing}")  # where it holds it is not said
    compilable_check(x.shape[-1] == 8, f"labels up to {labels.max()}")
    tells_numbers(model, x, labels)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("check", [tells_numbers, tells_torch, tells_what_is_known])
def test_a_check_tells_the_numbers_of_the_call(check, opt_level):
    model = Checking(check)
    x, good = torch.randn(4, 8), torch.tensor([0, 1, 2])
    converted = fxamp.convert(model, "bfloat16", opt_level=opt_level, capture="symbolic", example_inputs=(x, good))
    assert converted(x, good).sum().isfinite()
    for worst in (3, 7):
        with pytest.raises(ValueError, match=rf"test_raises\.py:\d+: labels up to {worst}") as told:
            converted(x, torch.tensor([0, 1, worst]))
        if check is not tells_torch:
            assert str(told.value).endswith(f" (00{worst}) of 3, for 4: {(1 + worst) / 3:.2f} {{}}")


def chooses(model, x, labels):
    model.fc(x)  # else it could run before the graph
    model.get_submodule({"2": "fc"}.get(f"{labels.max()}", ""))


def chooses_in_a_check(model, x, labels):
    compilable_check(f"{labels.max()}" != "3", "labels up to 2")


def keeps(model, x, labels):
    model.said = f"{labels.max()}"


def hands_on(model, x, labels):
    model.fc(x)
    print(f"{labels.max()}", end="")


@pytest.mark.parametrize("use", [chooses, chooses_in_a_check, keeps, hands_on])
def test_a_text_that_is_no_message_is_refused(use, capsys):
    x, labels = torch.randn(4, 8), torch.tensor([0, 1, 2])
    with pytest.raises(fxamp.CaptureError, match=r"test_raises\.py:\d+: (Python's|forward makes a) "):
        fxamp.convert(Checking(use), "bfloat16", capture="symbolic", example_inputs=(x, labels))
    assert not capsys.readouterr().out


class Refused(Exception):
    pass


def goes_on_either_way(model, x, labels):
    if labels.max() >= model.most:
        model.checked = True
        if model.training:
            return
        raise ValueError


def raises_what_is_no_builtin(model, x, labels):
    if labels.max() >= model.most:
        raise Refused


def asks_on(model, x, labels):
    if labels.max() >= model.most and labels.min() >= 0:
        raise ValueError


def is_caught(model, x, labels):
    try:
        raises_if(model, x, labels)
    except (ValueError, TypeError):
        return


def is_caught_by_all(model, x, labels):
    try:
        asserts(model, x, labels)
    except:  # noqa: E722
        return


def notes_it(model, x, labels):
    if labels.max() >= model.most:
        model.failed = True
        raise ValueError


def is_suppressed(model, x, labels):
    with contextlib.suppress(ValueError):
        raises_if(model, x, labels)


OTHERS = (goes_on_either_way, raises_what_is_no_builtin, asks_on, is_caught, is_caught_by_all, notes_it, is_suppressed)


@pytest.mark.parametrize("check", OTHERS)
def test_what_may_go_on_either_way_is_no_check(check):
    """Labels that are computed in the model are not asked: it would run twice."""
    model, labels = Checking(lambda model, x, labels: check(model, x, labels + model.fc.weight[0, 0].long())), LABELS
    with pytest.raises(fxamp.CaptureError, match="depends on data"):
        fxamp.convert(model, dtype="bfloat16", capture="symbolic", example_inputs=(torch.randn(4, 8), labels))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("check", OTHERS)
def test_it_goes_the_way_that_labels_of_the_call_say(check):
    model, x = Checking(check), torch.randn(4, 8)
    converted = fxamp.convert(Checking(check), dtype="bfloat16", example_inputs=(x, LABELS))
    assert {row.op for row in fxamp.report(converted).rows} >= {"linear"}
    for labels in (LABELS, LABELS + 5, LABELS):
        try:
            expected = type(model(x, labels))
        except (ValueError, Refused) as error:
            with pytest.raises(type(error)):
                converted(x, labels)
        else:
            assert isinstance(converted(x, labels), expected)
        assert getattr(converted, "checked", None) == getattr(model, "checked", None)
