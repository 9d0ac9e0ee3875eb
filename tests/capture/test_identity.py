"""Questions by `is`, isinstance() and getattr() of what is read off a tensor have eager's answers."""

import functools
import sys

import pytest
import torch
from torch import nn

import fxamp
from fxamp.capture.identity import is_asked_for_its_class

LOW = torch.bfloat16
X, MASK = torch.linspace(-1, 1, 32).reshape(4, 8), torch.arange(32).reshape(4, 8) % 3 == 0


class Model(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.question = question

    @property
    def dtype(self):
        return dtype_of_parameters(self)

    def forward(self, x, mask):
        h = self.linear(x)
        return h * (2.0 if self.question(self, x, h, mask) else 30.0)


def stored(m, x, h, mask):
    dtype = mask.dtype
    return dtype is torch.bool


def stored_and_converted(m, x, h, mask):
    dtype = x.dtype
    h = h.to(dtype)
    return dtype is torch.float32 and h.dtype == dtype


def by_default(m, x, h, mask, dtype=None):
    dtype = dtype or mask.dtype
    answer = dtype is not torch.bool
    return not answer


def walrus(m, x, h, mask):
    if (dtype := x.dtype) is torch.float32:
        return dtype is not torch.bool
    return False


def no_index(m, x, h, mask):
    index = x.device.index
    if index is None:
        h = h + 1
    return index is None


def closed_over(m, x, h, mask):
    dtype = x.dtype

    def asks():
        return dtype is torch.float32

    return asks()


def two_at_once(m, x, h, mask):
    dtype, device = x.dtype, x.device
    return dtype is torch.float32 and device == h.device


def conditional(m, x, h, mask):
    dtype = x.dtype if mask is None else mask.dtype
    return dtype is torch.bool


def two_names(m, x, h, mask):
    first = second = mask.dtype
    third = first
    return third is torch.bool and second is torch.bool


def in_a_loop(m, x, h, mask):
    for dtype in (x.dtype, h.dtype):
        if dtype is not torch.float32:
            return False
    kinds = [value.dtype for value in (mask, x)]
    return kinds[0] is torch.bool


def dtype_of(value):
    return value.dtype


def dtype_of_parameters(module):
    return next(weight.dtype for weight in module.parameters() if weight.is_floating_point())


def in_a_region(m, x, h, mask):
    with torch.device("cpu"):
        dtype = dtype_of_parameters(m)
    return dtype is torch.float32


@functools.singledispatch
def kind(value):
    return "anything"


@kind.register
def _(value: torch.Tensor):
    return "tensor"


def matched(value):
    match value:
        case None:
            return "none"
        case nn.Parameter():
            return "parameter"
        case torch.Tensor(ndim=3) | torch.Tensor(dtype=torch.int64):
            return "other tensor"
        case torch.Tensor(ndim=2):
            return "tensor"
        case int() if value > 6:
            return "large"
        case 4, width:
            return width
        case [_, *rest]:
            return len(rest)
        case _:
            return "anything"


def parts(value):
    match value:
        case _, _:
            return 2
        case [_]:
            return 1
        case _:
            return 0


QUESTIONS = {
    "matched tensor": lambda m, x, h, mask: (matched(x), matched(h), matched(None)) == ("tensor", "tensor", "none"),
    "matched parameter": lambda m, x, h, mask: matched(m.linear.weight) == "parameter",
    "matched sizes": lambda m, x, h, mask: (
        (matched(x.shape), matched(h[1:].size()), matched(x.shape[1])) == (8, 1, "large")
    ),
    "matched parts": lambda m, x, h, mask: (parts(h.chunk(2)), parts(h.chunk(1)), parts(h.chunk)) == (2, 1, 0),
    "dispatched": lambda m, x, h, mask: (kind(h), kind(mask), kind(x.shape[0])) == ("tensor", "tensor", "anything"),
    "class": lambda m, x, h, mask: h.__class__ is torch.Tensor and m.linear.weight.__class__ is nn.Parameter,
    "class's name": lambda m, x, h, mask: (h.__class__.__name__, x.shape.__class__.__name__) == ("Tensor", "Size"),
    "parameters', by a property": lambda m, x, h, mask: m.dtype is torch.float32,
    "parameters', by getattr": lambda m, x, h, mask: getattr(m, "dtype", None) is torch.float32,
    "parameters', by a property, its class": lambda m, x, h, mask: type(m.dtype) is torch.dtype,
    "a parameter's": lambda m, x, h, mask: next(m.parameters()).dtype is torch.float32,
    "parameters', from a function": lambda m, x, h, mask: dtype_of_parameters(m) is torch.float32,
    "parameters', among others": lambda m, x, h, mask: dtype_of_parameters(m) in (torch.float32, torch.float64),
    "parameters', as a key": lambda m, x, h, mask: {torch.float32: True}[dtype_of_parameters(m)],
    "parameters', in a device's region": in_a_region,
    "parameters', in a text": lambda m, x, h, mask: "float32" in f"{(0, dtype_of_parameters(m))}",
    "two at once": two_at_once,
    "conditional": conditional,
    "conditional, inline": lambda m, x, h, mask: (x.dtype if mask is None else mask.dtype) is torch.bool,
    "two names": two_names,
    "in a loop": in_a_loop,
    "chained": lambda m, x, h, mask: x.dtype is not torch.bool is not None,
    "from a function": lambda m, x, h, mask: dtype_of(mask) is torch.bool,
    "dtype is": lambda m, x, h, mask: mask.dtype is torch.bool,
    "is dtype": lambda m, x, h, mask: torch.bool is mask.dtype,
    "dtype is not": lambda m, x, h, mask: mask.dtype is not torch.float32,
    "stored": stored,
    "stored and converted": stored_and_converted,
    "by default": by_default,
    "walrus": walrus,
    "closed over": closed_over,
    "both sides": lambda m, x, h, mask: h.dtype is x.dtype,
    "getattr": lambda m, x, h, mask: getattr(mask, "dtype", None) is torch.bool,
    "layout": lambda m, x, h, mask: x.layout is torch.strided,
    "no index": no_index,
    "index or": lambda m, x, h, mask: (x.device.index or 0) == 0,
    "device type": lambda m, x, h, mask: x.device.type is not None and isinstance(x.device.type, str),
    "gradient": lambda m, x, h, mask: x.grad is None,
    "requires": lambda m, x, h, mask: x.requires_grad is False,
    "dtype's type": lambda m, x, h, mask: isinstance(x.dtype, torch.dtype) and not isinstance(x.dtype, torch.Tensor),
    "device's type": lambda m, x, h, mask: isinstance(x.device, torch.device),
    "shape's type": lambda m, x, h, mask: isinstance(x.shape, torch.Size) and isinstance(x.shape, (tuple, list)),
    "transpose's type": lambda m, x, h, mask: isinstance(x.T, torch.Tensor),
    "method's type": lambda m, x, h, mask: not isinstance(x.sum, torch.Tensor) and callable(x.sum),
    "flag that is not there": lambda m, x, h, mask: getattr(h, "_my_flag", None) is None,
    "flag of an input": lambda m, x, h, mask: not hasattr(x, "_my_flag"),
    "flag of a weight": lambda m, x, h, mask: not hasattr(m.linear.weight, "_my_flag"),
    "autocast": lambda m, x, h, mask: torch.amp.is_autocast_available(x.device.type),
}


@pytest.mark.parametrize("with_example", [True, False])
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_have_eagers_answers(question, with_example):
    model = Model(question)
    expected = model(X, MASK)
    converted = fxamp.convert(model, LOW, (X, MASK) if with_example else None)
    assert float(expected.abs().max()) < 5  # the first answer is the right one
    torch.testing.assert_close(converted(X, MASK), expected, atol=0.05, rtol=0.02)
    torch._dynamo.reset()


def test_another_dtype_has_another_answer():
    model = Model(stored)
    converted = fxamp.convert(model, LOW, (X, MASK))
    torch.testing.assert_close(converted(X, MASK.float()), model(X, MASK.float()), atol=0.5, rtol=0.02)


def test_a_flag_on_an_input_is_read():
    x = X.clone()
    x._my_flag = True
    model = Model(lambda m, x, h, mask: getattr(x, "_my_flag", False))
    expected = model(x, MASK)
    torch.testing.assert_close(fxamp.convert(model, LOW)(x, MASK), expected, atol=0.05, rtol=0.02)
    torch._dynamo.reset()


def test_a_conversion_to_a_dtype_that_is_only_compared_by_value_stays_relative():
    """`h.to(x.dtype)` is no wish for float32, as long as no `is` needs the dtype itself."""

    def forward(m, x, h, mask):
        return x.dtype == torch.float32 and m.linear(h.to(x.dtype)).dtype == x.dtype

    report = fxamp.report(fxamp.convert(Model(forward), LOW, (X, MASK)))
    assert not [row for row in report.rows if row.reason_kind == "user cast"]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("of", ["next", "function", "dictionary"])
def test_a_conversion_to_the_dtype_of_the_parameters_is_no_wish_for_float32(of, opt_level):
    ways = {
        "next": lambda m: next(m.parameters()).dtype,
        "function": dtype_of_parameters,
        "dictionary": lambda m: dict(m.named_parameters())["linear.weight"].dtype,
    }

    class Again(Model):
        def forward(self, x):
            return self.linear(self.linear(x).to(ways[of](self)))

    model = nn.Sequential(Again(None), nn.Linear(8, 8))
    converted = fxamp.convert(model, LOW, (X,), opt_level=opt_level, capture="symbolic")
    assert [row.precision for row in fxamp.report(converted).rows if row.op == "linear"] == ["low"] * 3
    assert converted(X).dtype == torch.float32


def by_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    now = torch.get_default_dtype()
    torch.set_default_dtype(before)
    return now is torch.float32


OF_PARAMETERS = {
    "equal": lambda dtype: dtype == torch.float32,
    "among": lambda dtype: dtype in (torch.float16, torch.float32),
    "a key": lambda dtype: {torch.float32: True}[dtype],
    "a text": lambda dtype: f"{dtype}".endswith("float32"),
    "limits": lambda dtype: torch.finfo(dtype).eps < 1e-6,
    "true": lambda dtype: bool(dtype),
    "by default": by_default_dtype,
    "promoted": lambda dtype: torch.promote_types(dtype, torch.float16) == torch.float32,
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("asks", OF_PARAMETERS.values(), ids=OF_PARAMETERS)
def test_the_dtype_of_the_parameters_needs_no_example(asks, opt_level):
    model = Model(lambda m, x, h, mask: asks(dtype_of_parameters(m)))
    expected = model(X, MASK)
    converted = fxamp.convert(model, LOW, opt_level=opt_level, capture="symbolic")
    assert fxamp.report(converted).is_preview
    torch.testing.assert_close(converted(X, MASK), expected, atol=0.05, rtol=0.02)


def test_a_tensor_in_a_text_is_refused_by_its_line():
    with pytest.raises(fxamp.CaptureError, match=r"test_identity.py:\d+: Python's format\(\) of a traced value"):
        fxamp.convert(Model(lambda m, x, h, mask: "nan" not in f"{x}"), LOW, (X, MASK), capture="symbolic")


@pytest.mark.parametrize("device_type", ["x.device.type", "keyword"])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_autocast_regions_of_a_tensors_device_type(device_type, opt_level):
    class Island(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            if device_type == "keyword":
                region = torch.autocast(device_type=x.device.type, enabled=False)
            else:
                region = torch.autocast(x.device.type, enabled=False)
            with region:
                h = self.a(x)
            return self.b(h)

    converted = fxamp.convert(Island(), LOW, (X,), opt_level=opt_level, capture="symbolic")
    precisions = [row.precision for row in fxamp.report(converted).rows if row.op == "linear"]
    assert precisions == ["high", "low"] and converted(X).shape == (4, 8)


def test_what_fails_on_the_dtype_of_parameters_fails_in_the_call():
    class Fails(nn.Linear):
        def forward(self, x):
            made = torch.ones(2, 3, dtype=dtype_of_parameters(self))
            return super().forward(x) + (made @ made).sum()

    converted = fxamp.convert(Fails(8, 8), LOW, capture="symbolic")
    with pytest.raises(RuntimeError, match=r"2x3|\[2, 3\]"):
        converted(X)


class Asked:
    """A class whose property notes whether the frame that reads it asks for a class."""

    def __init__(self):
        self.answers = []

    @property
    def __class__(self):
        self.answers.append(is_asked_for_its_class(sys._getframe(1)))
        return Asked


def test_question_for_a_class_is_seen_in_code_that_python_has_specialised():
    asked = Asked()
    for _ in range(1000):  # `.__class__` of 3.12 is a call from within the instruction by then
        asked.__class__  # noqa: B018
    assert len(asked.answers) == 1000 and all(asked.answers)

    asked.answers.clear()
    for _ in range(1000):
        isinstance(asked, int)
    assert len(asked.answers) == 1000 and not any(asked.answers)
