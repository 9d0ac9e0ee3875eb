"""A NaN has a name where forward runs as it is written: the parts that it calls as graphs are looked at, in order."""

import copy

import pytest
import torch
from torch import nn

import fxamp
import tests.choosing
from tests.choosing import Choosing, batch

choosing_file = tests.choosing.__file__
BIG = 1e5  # times weights of 0.25: float16 holds these, and not what comes of them


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.up(x)


def choosing():
    torch.manual_seed(0)
    return Choosing(Residual)


def summed(out):
    return out.float().sum()


def watched(converted, loss_fn=summed):
    with fxamp.watch_nan(converted, raises=False) as watch:
        loss_fn(converted(batch(0))).backward()
    converted.zero_grad()
    return watch.found


def found_in(converted, loss_fn=summed):
    return fxamp.find_nan(converted, (batch(0),), loss_fn)


def taken(model):
    """The path of the block that forward chooses."""
    return "left" if model.stem(batch(0)).sum() > 0 else "right"


@pytest.mark.parametrize("is_seen_before", [False, True])
@pytest.mark.parametrize(
    ("look", "opt_level"), [(watched, "O1"), (watched, "O2"), (watched, "O3"), (found_in, "O2"), (found_in, "O3")]
)
def test_the_part_that_overflows_is_named_though_equal_ones_share_its_graph(look, opt_level, is_seen_before):
    model = choosing()
    path = taken(model)
    with torch.no_grad():
        model.get_submodule(path).up.weight.mul_(BIG)
    converted = fxamp.convert(model, torch.float16, opt_level=opt_level)
    if is_seen_before:
        converted(batch(1))
    found = look(converted)
    assert found.module.split(".")[0] == path
    assert not found.is_bad_in_float32 or opt_level == "O3"
    assert (found.call, found.steps) == (0, 0) or look is watched


@pytest.mark.parametrize("look", [watched, found_in])
def test_of_gradients_the_one_that_came_first_is_named(look):
    model = choosing()
    converted = fxamp.convert(model, torch.float16, opt_level="O2")
    found = look(converted, lambda out: out.float().sum() * 1e30)
    assert found.phase in ("backward", "sum of gradients") and found.module.startswith("head")
    assert "smaller loss scale" in str(found) and "no matter of precision" not in str(found)


class Between(Choosing):
    """What makes a bad number stands in its own forward, which no graph holds.

    Args:
        make: (hidden, scale) -> what the second block reads; `after`: (output, hidden, scale) -> the output.
    """

    def __init__(self, make=lambda h, scale: h, after=lambda out, h, scale: out):
        super().__init__()
        self.make, self.after = make, after
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        h = self.stem(x)
        h = h if h.sum().item() > -1e9 else -h
        return self.after(self.head(self.left(self.make(h, self.scale))), h, self.scale)


def between(**parts):
    torch.manual_seed(0)
    return fxamp.convert(Between(**parts), torch.float16, opt_level="O2")


def nan_where_large(h, scale):
    return h * torch.where(h > 1, torch.nan, 1.0)


def line_of(function):
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


LOOKS = pytest.mark.parametrize("look", [watched, found_in])


@LOOKS
def test_the_line_around_the_graphs_that_makes_it_is_named(look):
    found = look(between(make=nan_where_large))
    assert (found.phase, found.op, found.source) == ("between graphs", "where", line_of(nan_where_large))
    assert found.is_bad_in_float32 and "no graph holds this line" in str(found)
    assert bool(found.call) is (look is watched)


@LOOKS
def test_where_no_op_is_seen_the_line_that_reads_it_is_told(look):
    found = look(between(make=lambda h, scale: torch.vmap(lambda row: row / 0)(h)))
    assert found.phase == "between graphs" and "code between two graphs" in str(found)
    assert found.module.startswith("left") and found.source.startswith(f"{choosing_file}:")


@LOOKS
@pytest.mark.parametrize("has_gradients", [True, False])
def test_the_line_behind_the_last_graph_is_named(look, has_gradients):
    def behind(out, h, scale):
        return out * torch.where(h > 1, torch.nan, 1.0).mean(-1, True)

    if has_gradients:
        found = look(between(after=behind))
    else:
        converted = between(after=behind)
        converted(batch(0))
        with fxamp.watch_nan(converted, raises=False) as watch, torch.no_grad():
            converted(batch(0))
        found = watch.found
    assert (found.op, found.source, found.is_of_gradient) == ("where", line_of(behind), False)


@LOOKS
@pytest.mark.parametrize("place", ["make", "after"])
def test_the_line_whose_backward_makes_it_is_named(place, look):
    def root(h, scale):
        return h + (scale - scale.detach()).abs().sqrt()

    def root_behind(out, h, scale):
        return out + (scale - scale.detach()).abs().sqrt().sum()

    function = root if place == "make" else root_behind
    found = look(between(**{place: function}))
    assert (found.op, found.source, found.is_of_gradient) == ("sqrt", line_of(function), True)
    assert "the gradient it passes back" in str(found) and found.is_bad_in_float32


@LOOKS
def test_a_cast_of_fxamps_own_behind_it_does_not_hide_the_line(look):
    def low(out, h, scale):
        return (out / (out - out)).half()

    converted = between(after=low)
    with torch.no_grad():
        assert converted(batch(0)).dtype == torch.float32
    found = look(converted)
    assert (found.op, found.source) == ("div", line_of(low))


class NanBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.nan


@LOOKS
def test_a_function_of_the_users_whose_backward_makes_it_is_named(look):
    found = look(between(make=lambda h, scale: NanBack.apply(h)))
    assert found.op.endswith(".NanBack") and found.is_of_gradient and "between graphs" in found.phase
    assert found.source == f"{__file__}:{NanBack.backward.__code__.co_firstlineno}"


def test_what_stops_the_run_around_the_graphs_is_named():
    def row(h, scale):
        return h[int((h / (h - h)).sum().item())]

    found = found_in(between(make=row))
    assert (found.op, found.source) == ("div", line_of(row)) and "ValueError" in found.error


def test_watch_nan_raises_in_the_place_of_what_stops_the_run_around_the_graphs():
    def stopping(h, scale):
        return h[int((h / (h - h)).sum().item())]

    with pytest.raises(FloatingPointError) as raised, fxamp.watch_nan(converted := between(make=stopping)):
        converted(batch(0))
    assert str(raised.value).startswith("div (`div`, as written") and isinstance(raised.value.__cause__, ValueError)

    def wrong(h, scale):
        return h.no_such_thing

    with pytest.raises(AttributeError), fxamp.watch_nan(converted := between(make=wrong)) as watch:
        converted(batch(0))
    assert watch.found is None


def test_what_is_taken_back_around_the_graphs_is_named_if_float32_has_none():
    def swallowed(h, scale):
        return h + ((h.clamp(-1, 1) + 2).mm(torch.full((16, 16), 6e4)) ** -1).to(h.dtype)

    found = found_in(between(make=swallowed))
    assert (found.op, found.source, found.is_bad_in_float32) == ("mm", line_of(swallowed), False)


@pytest.fixture
def new_memory_holds_nan():
    torch.use_deterministic_algorithms(True)  # fills it, for such as read it to be found
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_memory_as_it_is_found_and_tensors_of_several_shapes_are_not_looked_at(new_memory_holds_nan):
    def unset(h, scale):
        found = torch.empty_like(h)
        nested = torch.nested.nested_tensor([h[:3], h[3:]]) * 2
        return found.copy_(h) + torch.cat(list(nested.unbind()))

    def divided(h, scale):
        return unset(h, scale) / 0

    assert torch.empty(1).isnan()
    assert found_in(between(make=unset)) is None
    found = found_in(between(make=divided))
    assert (found.op, found.source) == ("div", line_of(divided))


def safe_division(h, scale):
    ratio = torch.where(h > 0, 1 / h.clamp(min=0), 0.0)
    return h + torch.log(ratio.clamp(max=3) - 10)


def masked_wholly(h, scale):
    scores = (h @ h.mT).masked_fill(torch.ones(8, 8, dtype=torch.bool), -torch.inf)
    return scores.softmax(-1) @ h


def written_into_low(h, scale):
    low = torch.zeros(h.shape, dtype=torch.float16)
    low[:, 0] = h[:, 0].float() * 1e6
    return low


def complex_division(h, scale):
    return torch.view_as_real(torch.view_as_complex(h.float().reshape(8, 8, 2)) / 0).reshape(8, 16)


@LOOKS
@pytest.mark.parametrize(
    ("make", "op", "offset"),
    [
        (safe_division, "log", 2),
        (masked_wholly, "softmax", 2),
        (written_into_low, "setitem", 2),
        (complex_division, "div", 1),
    ],
)
def test_what_reaches_the_output_is_named_and_no_infinity_on_the_way_that_is_harmless(make, op, offset, look):
    found = look(between(make=make))
    assert (found.op, found.source) == (op, f"{__file__}:{make.__code__.co_firstlineno + offset}")
    assert found.is_bad_in_float32


def overflow_before_nan(h, scale):
    t = (h @ h.mT) * 3e4 * 3e4  # infinite in float16
    return h + (t - t).sum()


def log_before_nan(h, scale):
    z = torch.log(h * 0.0)  # in float32 too
    return h + z.mean() * 0.0


@pytest.mark.parametrize(
    ("make", "op", "is_bad_in_float32"), [(overflow_before_nan, "mul", False), (log_before_nan, "log", True)]
)
@LOOKS
def test_the_infinity_is_named_and_not_the_nan_that_it_becomes(make, op, is_bad_in_float32, look):
    found = look(between(make=make))
    assert (found.op, found.source, found.module) == (op, line_of(make), "")
    assert found.is_bad_in_float32 is is_bad_in_float32


@LOOKS
def test_a_hook_around_the_graphs_that_makes_a_gradient_bad_is_no_matter_of_the_loss(look):
    def hooked(out, h, scale):
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / 0)
        return out + h.sum(-1, keepdim=True)

    found = look(between(after=hooked))
    assert "what the model gives is finite" not in found.remedy, str(found)


class Shouting(nn.Module):
    """Calls a module that a part of the model runs whole, for it has a hook."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.norm.register_forward_hook(lambda module, given, output: output * 1e6)

    def forward(self, x):
        return self.norm(x)


def test_a_module_inside_of_a_part_that_runs_whole_is_named():
    torch.manual_seed(0)
    model = Choosing(lambda: nn.Sequential(nn.Linear(16, 16), Shouting(), nn.Linear(16, 16)))
    found = found_in(fxamp.convert(model, torch.float16, opt_level="O2"))
    assert found is not None and found.module == "stem.1.norm", str(found)


@LOOKS
def test_what_autocast_makes_infinite_around_the_graphs_is_a_matter_of_precision(look):
    def square(h, scale):
        return (h.clamp(-1, 1).float() * 1e4) @ (h.clamp(-1, 1).float().mT * 1e4) @ h.float() * 1e-9

    found = look(between(make=square))
    assert (found.op, found.source) == ("matmul", line_of(square))
    assert not found.is_bad_in_float32 and "compute it in float32" in found.remedy


def test_a_mask_around_the_graphs_is_no_fault():
    def masked(h, scale):
        mask = torch.zeros(h.shape).masked_fill(h > 0, -torch.inf)
        low = (torch.finfo(torch.float32).min * (h > 0)).half()
        return h + (h + mask).softmax(-1).nan_to_num() + (h + low).softmax(-1).nan_to_num()

    assert found_in(between(make=masked), lambda out: out.detach().sum().requires_grad_()) is None

    def masked_and_large(h, scale):
        return masked(h, scale) + torch.full_like(h, 1e30).half()

    found = found_in(between(make=masked_and_large))
    assert (found.op, found.source) == ("half", line_of(masked_and_large))


def test_looking_changes_nothing():
    model = choosing()
    with torch.no_grad():
        model.get_submodule(taken(model)).up.weight.mul_(BIG)
    model.norm = nn.BatchNorm1d(16)
    converted = fxamp.convert(model, torch.float16, opt_level="O2")
    converted(batch(0))
    before, random = copy.deepcopy(converted.state_dict()), torch.get_rng_state()
    assert found_in(converted) is not None
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in converted.parameters())
    for name, value in converted.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("look", [watched, found_in])
def test_a_model_that_is_finite_has_nothing_to_name(look):
    assert look(fxamp.convert(choosing(), torch.float16, opt_level="O2")) is None


def test_an_error_that_no_bad_value_led_to_is_the_users():
    converted = fxamp.convert(choosing(), torch.float16, opt_level="O2")
    with pytest.raises(RuntimeError, match="shape"):
        fxamp.find_nan(converted, (torch.randn(8, 5),))


def test_an_index_made_of_a_bad_value_leads_to_the_part():
    class Indexing(Choosing):
        def forward(self, x):
            h = self.left(self.stem(x))
            return self.head(h[: int(h.sum().item())])  # no integer of NaN

    torch.manual_seed(0)
    model = Indexing(Residual)
    with torch.no_grad():
        model.left.up.weight[0, 0] = float("nan")
    found = fxamp.find_nan(fxamp.convert(model, torch.float16, opt_level="O2"), (batch(0),))
    assert found.phase == "parameter" and found.module.startswith("left")
