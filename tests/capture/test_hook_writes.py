"""Hooks that write what forward reads: a graph has read it before the hook runs.

The layers with hooks hold few of the weights, so that a graph would be kept.
"""

import collections
import functools
import logging
import types

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import CaptureError, OptionError

LOW = torch.bfloat16
XS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


class Box:
    """What fastai calls a Hook: an object that keeps what a layer gives."""

    def __init__(self):
        self.value = torch.zeros(4, 8)
        self.inner = None

    def keep(self, module, args, result):
        self.value = result

    def keep_inside(self, module, args, result):
        self.inner.keep(module, args, result)

    def keep_by_name(self, module, args, result):
        setattr(self, "value", result)  # noqa: B010

    def keep_before(self, module, args):
        self.value = args[0] * 1

    def __call__(self, module, args, result):
        self._through_another(result)

    def _through_another(self, result):
        self.value = result


class Outer:
    """Leads to an object through another."""

    def __init__(self, box):
        self.middle = types.SimpleNamespace(box=box)

    def keep(self, module, args, result):
        self.middle.box.value = result


class Asks:
    """Leads to an object by a property."""

    def __init__(self, box):
        self._box = box

    @property
    def box(self):
        return self._box

    def keep(self, module, args, result):
        self.box.value = result


class Either:
    def __init__(self, box):
        self.box, self.other = box, Box()

    def keep(self, module, args, result):
        (self.box if result.dim() == 2 else self.other).value = result


def binds_anew(box, module, args, result):
    box = box.middle.box
    box.value = result


def binds_closure_anew(holder):
    def hook(module, args, result):
        nonlocal holder
        was, holder = holder, holder.middle.box
        holder.value = result
        holder = was

    return hook


def keep_in(box, module, args, result):
    box.value = result


def calls_function(module, args, result, box):
    keep_in(box, module, args, result)


class Holder(nn.Module):
    """Reads what hooks on `first` have written."""

    def __init__(self, hook, read):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 99)
        self.box, self.boxes, self.number, self.flag = Box(), collections.deque([Box()]), 1.0, True
        self.box.inner = Box()
        self.kept = None
        self.read = read
        hook(self)

    def forward(self, x):
        y = self.middle(self.first(x).relu())
        return self.last(torch.cat([y, self.read(self)], -1))


def on_first(make):
    return lambda model: model.first.register_forward_hook(make(model))


of_box = lambda model: model.box.value  # noqa: E731
KINDS = {
    "bound method": (on_first(lambda model: model.box.keep), of_box),
    "callable object": (on_first(lambda model: model.box), of_box),
    "closure that calls": (on_first(lambda model: lambda m, i, o, box=model.box: box.keep(m, i, o)), of_box),
    "partial": (on_first(lambda model: functools.partial(Box.keep, model.box)), of_box),
    "partial of a function": (on_first(lambda model: functools.partial(keep_in, model.box)), of_box),
    "function that calls": (on_first(lambda model: functools.partial(calls_function, box=model.box)), of_box),
    "setattr": (on_first(lambda model: model.box.keep_by_name), of_box),
    "object in an object": (on_first(lambda model: model.box.keep_inside), lambda model: model.box.inner.value),
    "object in a container": (on_first(lambda model: model.boxes[0].keep), lambda model: model.boxes[0].value),
    "attribute of an attribute": (
        on_first(lambda model: Outer(model.boxes[0]).keep),
        lambda model: model.boxes[0].value,
    ),
    "property": (on_first(lambda model: Asks(model.boxes[0]).keep), lambda model: model.boxes[0].value),
    "one of two": (on_first(lambda model: Either(model.box).keep), of_box),
    "bound anew": (
        on_first(lambda model: functools.partial(binds_anew, Outer(model.boxes[0]))),
        lambda model: model.boxes[0].value,
    ),
    "closure bound anew": (
        on_first(lambda model: binds_closure_anew(Outer(model.boxes[0]))),
        lambda model: model.boxes[0].value,
    ),
    "before": (lambda model: model.first.register_forward_pre_hook(model.box.keep_before), of_box),
}


def check(hook, read, opt_level, is_called_before, **options):
    model, reference = Holder(hook, read), Holder(hook, read)
    if is_called_before:
        model(XS[3])
    converted = fxamp.convert(model, dtype=LOW, opt_level=opt_level, **options)
    for x in XS:
        found, expected = converted(x), reference(x)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        reference.zero_grad()
        converted.zero_grad()
        expected.sum().backward()
        found.sum().backward()
        mine, theirs = converted.first.weight.grad.float(), reference.first.weight.grad
        assert (mine - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_hook_writes_into_an_object_is_never_stale(kind, opt_level, is_called_before):
    torch._dynamo.reset()
    check(*KINDS[kind], opt_level, is_called_before)


@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_is_kept(kind):
    with pytest.raises(CaptureError, match="a hook on 'first' may write it while forward runs"):
        fxamp.convert(Holder(*KINDS[kind]), dtype=LOW, capture="symbolic", example_inputs=(XS[0],))


def test_a_capture_that_fails_for_what_another_call_left():
    """As a U-Net whose hooks keep the encoder's results: those of a batch of another size fit nothing."""
    model = Holder(*KINDS["bound method"])
    model(XS[0][:1])
    converted = fxamp.convert(model, dtype=LOW)
    torch.testing.assert_close(converted(XS[1]), Holder(*KINDS["bound method"])(XS[1]), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda model: lambda m, i, o: setattr(model, "kept", o),
        lambda model: functools.partial(lambda model, m, i, o: model.__setattr__("kept", o), model),
    ],
)
def test_a_function_that_sets_an_attribute_of_the_model_is_refused(make, is_called_before):
    model = Holder(on_first(make), lambda model: model.kept)
    if is_called_before:
        model(XS[0])
    with pytest.raises(OptionError, match=r"sets self\.kept of the model it was made for"):
        fxamp.convert(model, dtype=LOW)(XS[0])


class Logger:
    """What a hook and forward both hold, and only read, keeps no graph away."""

    def __init__(self):
        self.scale, self.names = 2.0, ("a", "b")


def test_an_object_that_a_hook_only_reads_keeps_its_graph():
    class Reads:
        def __init__(self, logger):
            self.logger, self.seen = logger, []

        def __call__(self, module, args, result):
            self.seen.append(result.shape)
            return result * self.logger.scale

    class Model(Holder):
        def forward(self, x):
            return self.last(torch.cat([self.middle(self.first(x)), x], -1)) * self.logger.scale

    def hook(model):
        model.logger = Logger()
        model.first.register_forward_hook(Reads(model.logger))

    converted = fxamp.convert(Model(hook, None), dtype=LOW)
    torch.testing.assert_close(converted(XS[0]), Model(hook, None)(XS[0]), rtol=0.02, atol=0.05)
    assert fxamp.report(converted).captures == ("symbolic",)


def test_a_module_that_a_hook_holds_keeps_its_graph():
    def hook(model):
        middle, seen, model.parts = model.middle, [], [model.middle]
        model.first.register_forward_hook(lambda m, i, o: seen.append(middle.weight.dtype))

    class Model(Holder):
        def forward(self, x):
            return self.last(torch.cat([self.parts[0](self.first(x)), x], -1))

    converted = fxamp.convert(Model(hook, None), dtype=LOW)
    converted(XS[0])
    assert fxamp.report(converted).captures == ("symbolic",)


class Recorder:
    """Has an attribute of the name of one of the model's."""

    number = 0.0

    def note(self, model, module, args, result):
        self.number = result.detach().mean() * len(model.middle.weight)


def in_closure(model, recorder):
    def hook(module, args, result):
        recorder.number = result.detach().mean() * len(model.middle.weight)

    return hook


class Owner:
    def __init__(self, model, recorder):
        self.model, self.recorder = model, recorder

    def note(self, module, args, result):
        self.recorder.number = result.detach().mean() * len(self.model.middle.weight)


READERS = [
    in_closure,
    lambda model, recorder: functools.partial(recorder.note, model),
    lambda model, recorder: Owner(model, recorder).note,
]


@pytest.mark.parametrize("make", READERS)
def test_an_attribute_of_another_object_is_not_the_models(make, caplog):
    """The hook holds the model as well, which it only reads."""

    class Model(Holder):
        def forward(self, x):
            return self.last(torch.cat([self.middle(self.first(x)), x], -1)) * self.number

    hook = on_first(lambda model: make(model, Recorder()))
    with caplog.at_level(logging.WARNING, logger="fxamp"):
        converted = fxamp.convert(Model(hook, None), dtype=LOW)
    torch.testing.assert_close(converted(XS[0]), Model(hook, None)(XS[0]), rtol=0.02, atol=0.05)
    assert caplog.records == [] and fxamp.report(converted).captures == ("symbolic",)


class TestWarned:
    """Of hooks that hold the model that is converted: they do not see what is set on the converted one."""

    def told(self, make, caplog):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="fxamp"):
            fxamp.convert(Holder(on_first(make), lambda model: model.box.inner.value), dtype=LOW)
        return [record.getMessage() for record in caplog.records if "holds the model" in record.getMessage()]

    @pytest.mark.parametrize(
        "make",
        [
            lambda model: lambda m, i, o: o * model.number,
            lambda model: functools.partial(lambda model, m, i, o: o * model.number, model),
        ],
    )
    def test_that_reads_a_number(self, make, caplog):
        (message,) = self.told(make, caplog)
        assert "a hook on 'first'" in message and "reads its number:" in message

    def test_that_sets_an_attribute(self, caplog):
        (message,) = self.told(lambda model: lambda m, i, o: setattr(model, "kept", o.detach()), caplog)
        assert "sets its kept:" in message

    @pytest.mark.parametrize(
        "make",
        [
            lambda model: lambda m, i, o: None,
            lambda model: lambda m, i, o: o * 2 if model.training else None,
            lambda model: lambda m, i, o: model.boxes.append(Box()) if False else None,
            lambda model, flag=True: lambda m, i, o: o if flag else None,
        ],
    )
    def test_others_are_not(self, make, caplog):
        assert self.told(make, caplog) == []
