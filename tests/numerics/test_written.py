"""find_nan and watch_nan see what is written in place, also by ops that return nothing; and answer in any case."""

import pytest
import torch
from torch import nn

import fxamp
from fxamp.numerics.replay import Replay

FP16 = torch.float16
X = torch.linspace(0.5, 1.5, 32).reshape(4, 8)
NAN, INF = float("nan"), float("inf")


class Net(nn.Module):
    """`b` of what a function makes of `a`."""

    def __init__(self, function):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.register_buffer("state", torch.zeros(4, 8))
        self.function = function

    def forward(self, x):
        return self.b(self.function(self, self.a(x)))


def bad(h):
    return (h - h).log() * 0


def through(write):
    """A forward in which a NaN goes into fresh memory."""

    def function(m, h):
        made = torch.zeros(4, 8)
        write(made, bad(h))
        return made

    return function


def set_column(o, v):
    o[:, 0] = v[:, 0]


def set_masked(o, v):
    o[torch.ones(4, dtype=torch.bool)] = v


def set_in_a_loop(o, v):
    for column in range(8):
        o[:, column] = v[:, column]


def set_then_fine(o, v):
    o[:, 0] = v[:, 0]
    o[:, 1] = 1.0


def set_view_then_fine(o, v):
    o[:, 0].copy_(v[:, 0])
    o[:, 1].copy_(torch.ones(4))


def set_in_a_mask(o, v):
    o.fill_(-INF)
    o[:, 0] = v[:, 0]


def set_by_name(o, v):
    torch.Tensor.__setitem__(o, (slice(None), 0), v[:, 0])


def set_by_method(o, v):
    o.__setitem__(0, v[0])


def add_out(o, v):
    torch.add(v.detach(), 1.0, out=o)


def foreach(o, v):
    torch._foreach_add_([o], [v])


def foreach_copy(o, v):
    torch._foreach_copy_([o], [v.detach()])


WRITES = [
    set_column,
    set_masked,
    set_in_a_loop,
    set_then_fine,
    set_view_then_fine,
    set_in_a_mask,
    set_by_name,
    set_by_method,
    add_out,
    foreach,
    foreach_copy,
]


def converted(function, capture="symbolic", **more):
    torch.manual_seed(0)
    return fxamp.convert(Net(function), FP16, (X,), capture=capture, pad_to=0, **more)


def watched(model, loss=None):
    """What watch_nan finds in one step."""
    with fxamp.watch_nan(model, raises=False) as watch:
        output = model(X)
        if loss is not None:
            loss(output).backward()
    return watch.found


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("write", WRITES)
def test_a_nan_is_followed_through_what_writes_it(write, capture):
    model = converted(through(write), capture)
    assert not model(X).isfinite().all()
    for found in (fxamp.find_nan(model, (X,)), fxamp.find_nan(model, (X,), torch.Tensor.mean), watched(model)):
        assert found is not None
        assert (found.op, found.phase, found.is_bad_in_float32) == ("log", "forward", True), str(found)


def test_watch_nan_raises_on_a_nan_that_was_written():
    model = converted(through(set_column))
    with pytest.raises(FloatingPointError, match="`log`"), fxamp.watch_nan(model):
        model(X)


def test_at_o2():
    model = converted(through(set_column), opt_level="O2")
    assert fxamp.find_nan(model, (X,)).op == "log"


def set_literal(m, h):
    h = h.clone()
    h[:, 0] = NAN
    return h


def set_attribute(m, h):
    m.state[:, 0] = bad(h)[:, 0].detach()
    return h + m.state


def test_a_write_of_a_literal_is_itself_the_origin():
    found = fxamp.find_nan(converted(set_literal), (X,))
    assert (found.op, found.phase) == ("setitem", "forward") and "test_written.py:" in found.source
    assert "4 nan" in found.value and "look at the line" in found.remedy


def test_a_write_into_a_buffer():
    model = converted(set_attribute)
    assert fxamp.find_nan(model, (X,)).op == "log"
    assert model.state.isfinite().all(), "looking leaves the buffer as it was"


def test_a_gradient_goes_through_a_write():
    def function(m, h):
        made = torch.zeros(4, 8)
        made[:, 0] = (h * 0.0).sqrt()[:, 0]
        return made

    found = fxamp.find_nan(converted(function), (X,), torch.Tensor.sum)
    assert (found.op, found.phase) == ("sqrt", "backward"), str(found)


def test_what_overflows_where_it_is_written_is_mended():
    def function(m, h):
        made = h.clone()
        made[:, 0] = (h.float()[:, 0] * 0.0 + 40.0).exp()
        return made

    model = converted(function, overrides={"setitem": "allow"})
    found = fxamp.find_nan(model, (X,))
    assert found.phase == "forward" and not found.is_bad_in_float32
    assert "setitem" in found.overrides, "what reads the written value is tried too"
    assert converted(function, overrides=found.overrides)(X).isfinite().all()


# ------------------------------------------------------------------------------- infinities that the code means


def fill_column(m, h):
    h = h.clone()
    h[:, 0] = INF
    return h


def cat(m, h):
    return torch.cat([h[:, :7], torch.full((4, 1), INF)], 1)


def pad(m, h):
    return nn.functional.pad(h[:, :7], (0, 1), value=INF)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
@pytest.mark.parametrize("function", [fill_column, cat, pad])
def test_a_gemm_that_reads_a_meant_infinity_is_named(function, capture):
    model = converted(function, capture)
    for found in (fxamp.find_nan(model, (X,)), fxamp.find_nan(model, (X,), torch.Tensor.mean), watched(model)):
        assert found is not None and (found.op, found.phase) == ("linear", "forward"), str(found)
        assert found.is_bad_in_float32 and "look at the line" in found.remedy


def masked(m, h):
    return h.masked_fill(torch.arange(8) > 3, -INF).softmax(-1)


def written_mask(m, h):
    mask = torch.zeros(8, 8)
    mask[torch.ones(8, 8, dtype=torch.bool).triu(1)] = -INF
    return (h[:, None] + mask[:4]).softmax(-1)[:, 0]


def two_masks(m, h):
    mask = torch.full((4, 8), -INF).triu(1)
    return (h + mask).masked_fill(torch.arange(8) > 5, -INF).softmax(-1)


@pytest.mark.parametrize("function", [masked, written_mask, two_masks])
def test_a_mask_that_softmax_removes_is_not(function):
    model = converted(function)
    assert model(X).isfinite().all()
    assert fxamp.find_nan(model, (X,)) is None and fxamp.find_nan(model, (X,), torch.Tensor.mean) is None
    assert watched(model, torch.Tensor.mean) is None


class Masked(Net):
    """Infinities are what it gives."""

    def forward(self, x):
        return self.a(x).masked_fill(x > 1.0, -INF)


class Scores(Masked):
    """A score of -inf is that of what is not to be."""

    def forward(self, x):
        return self.a(x).masked_fill(torch.arange(8) > 5, -INF).log_softmax(-1).sum(-1)


class Mean(Masked):
    def forward(self, x):
        return super().forward(x).mean(-1)


@pytest.mark.parametrize("kind", [Masked, Scores, Mean])
def test_meant_infinities_that_float32_gives_too_are_none(kind):
    model = fxamp.convert(kind(None), FP16, (X,), pad_to=0)
    assert not model(X).isfinite().all() and not model(X).isnan().any()
    assert fxamp.find_nan(model, (X,)) is None
    assert watched(model) is None


def test_of_meant_infinities_float32_is_asked_once(monkeypatch):
    runs, as_it_was = [], Replay._as_it_was
    monkeypatch.setattr(Replay, "_as_it_was", lambda self: runs.append(self) or as_it_was(self))
    model = fxamp.convert(Masked(None), FP16, (X,), pad_to=0)
    for _ in range(4):
        assert watched(model) is None
    assert len(runs) == 1


class Replaced(Net):
    """float32 replaces the infinity by a number that float16 cannot hold."""

    def forward(self, x):
        return self.a(x).masked_fill(x > 1.0, INF).nan_to_num(posinf=1e5)


def test_watch_nan_raises_where_float32_is_finite():
    model = fxamp.convert(Replaced(None), FP16, (X,), pad_to=0, overrides={"nan_to_num": "allow"}, output_dtype=None)
    assert not model(X).isfinite().all() and Replaced(None)(X).isfinite().all()
    found = fxamp.find_nan(model, (X,))
    assert found is not None and not found.is_bad_in_float32 and found.overrides
    with pytest.raises(FloatingPointError), fxamp.watch_nan(model):
        model(X)
