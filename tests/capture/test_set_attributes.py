"""Attributes that forward sets: each program evolves as in eager, converted or not."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import CaptureError
from fxamp.model.engine import Engine, engine_of

LOW = torch.bfloat16
EXACT = {"overrides": {"*": "deny"}}


class Memo:
    """An object of the user's own, made in forward."""

    def __init__(self, value):
        self.value = value


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.size = None

    def forward(self, x):
        if self.size is not None:
            height, width = self.size
            assert x.shape[0] == height * width
            x = x.view(height, width, 16).transpose(0, 1).reshape(-1, 16)
        return torch.relu(self.fc(x))


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.first, self.second = Part(), Part()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("mask", None)
        self.hidden = None
        self.steps = 0
        self.rate = 0.5
        self.length = -1
        self._kept = None

    @property
    def kept(self):
        return self._kept

    @kept.setter
    def kept(self, value):
        self._kept = value * 2

    def forward(self, x):
        return self.body(self, x)


def features(net, x):
    net.features = net.first(x)
    return net.second(net.features)


def hidden_state(net, x):
    is_new = net.hidden is None or net.hidden.shape != x.shape
    state = torch.zeros_like(x) if is_new else net.hidden
    y = torch.tanh(net.first(x) + net.second(state))
    net.hidden = y.detach()
    return y


def counter(net, x):
    net.steps += 1
    net.rate = net.rate * 0.9
    return net.first(x) * net.steps + net.rate


def counter_that_decides(net, x):
    net.steps = net.steps + 1
    return net.first(x) if net.steps % 3 else net.second(x)


def flag(net, x):
    if net.hidden is None:
        net.hidden = True
        x = x * 2
    return net.first(x)


def buffer_replaced(net, x):
    y = net.first(x)
    net.mean = 0.9 * net.mean + 0.1 * y.detach().mean(0)
    return y - net.mean


def buffer_filled(net, x):
    if net.mask is None:
        net.mask = torch.ones(1, 16).tril()
    return net.first(x) * net.mask


def sizes_for_the_parts(net, x):
    height, width = x.shape[0] // 4, 4
    for part in (net.first, net.second):
        part.size = height, width
        x = part(x)
    return x


def containers(net, x):
    net.outs = []
    net.outs.append(net.first(x))
    net.outs.append(net.second(net.outs[0]))
    net.table = {"first": net.outs[0], "both": tuple(net.outs), "steps": (net.steps, None, "a")}
    return net.outs[-1] + net.table["first"]


def an_object(net, x):
    net.memo = Memo(net.first(x))
    net.memo.value = net.memo.value + 1
    return net.memo.value * 2


def mask_of_the_last_length(net, x):
    if net.length != x.shape[0]:
        net.triangle = torch.tril(torch.ones(x.shape[0], x.shape[0]))
        net.length = x.shape[0]
    return net.triangle @ net.first(x)


def through_a_property(net, x):
    net.kept = net.first(x)
    return net.kept + 1


def swapped(net, x):
    net.hidden, net.previous = net.first(x), net.hidden
    if net.previous is None or net.previous.shape != x.shape:
        return net.hidden
    return net.hidden + net.previous.detach()


def in_a_region(net, x):
    def inner(y):
        net.inside = net.first(y)
        return net.second(net.inside)

    return checkpoint(inner, x, use_reentrant=False)


def without_gradients(net, x):
    y = net.first(x)
    with torch.no_grad():
        net.shadow = y * 2
    return y + net.shadow


def norm_beside(net, x):
    net.features = net.first(x)
    return net.norm(net.features)


def written_afterwards(net, x):
    y = net.first(x) * 1
    net.features = y
    y += 1
    return y * 2


def an_input(net, x):
    net.given = x
    net.weight_seen = net.mean
    return net.first(x)


BODIES = [
    features, hidden_state, counter, counter_that_decides, flag, buffer_replaced, buffer_filled, sizes_for_the_parts,
    containers, an_object, mask_of_the_last_length, through_a_property, swapped, in_a_region, without_gradients,
    norm_beside, written_afterwards, an_input,
]  # fmt: skip
SHAPES = [(8, 16), (8, 16), (12, 16), (8, 16), (12, 16), (12, 16)]


def pairs(body):
    torch.manual_seed(0)
    plain = Net(body)
    return plain, copy.deepcopy(plain)


def inputs(step):
    return torch.randn(SHAPES[step % len(SHAPES)], generator=torch.Generator().manual_seed(step))


def state(net):
    own = {name: value for name, value in vars(net).items() if name not in vars(nn.Module()) and name != "body"}
    held = {name: value for name, value in own.items() if not name.startswith(("_fxamp", "_is_torch"))}
    held |= {f"{name}.size": part.size for name, part in (("first", net.first), ("second", net.second))}
    return held | {f"buffer {name}": value for name, value in net.named_buffers()}


def same(one, other, **close):
    if isinstance(one, Memo):
        one, other = one.value.float(), other.value  # what objects hold is not made float32
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, **close)
        assert one.requires_grad == other.requires_grad
    elif isinstance(one, (tuple, list, dict)):
        assert type(one) is type(other) and len(one) == len(other)
        if isinstance(one, dict):
            assert one.keys() == other.keys()
            one, other = list(one.values()), list(other.values())
        for each, its in zip(one, other, strict=True):
            same(each, its, **close)
    else:
        assert one == pytest.approx(other) if isinstance(one, float) else one == other


def test_the_comparison_sees_differences():
    plain, model = pairs(features)
    model(inputs(0))
    with pytest.raises(AssertionError):
        same(state(model), state(plain))
    plain(inputs(0))
    same(state(model), state(plain))
    model.features = model.features + 1
    with pytest.raises(AssertionError):
        same(state(model), state(plain))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("options", [EXACT, {}], ids=["exact", "low"])
@pytest.mark.parametrize("body", BODIES)
def test_attributes_are_set_as_in_eager(body, options, opt_level):
    plain, model = pairs(body)
    example = {"example_inputs": (inputs(0),)} if opt_level == "O2" else {}
    before = copy.deepcopy(state(model))
    converted = fxamp.convert(model, LOW, opt_level=opt_level, **options, **example)
    same(state(converted), before)
    close = {"rtol": 1e-5, "atol": 1e-6} if options and opt_level == "O1" else {"rtol": 0.05, "atol": 0.1}
    for step in range(len(SHAPES)):
        found, expected = converted(inputs(step)), plain(inputs(step))
        same(found, expected, **close)
        same(state(converted), state(plain), **close)
        for net, result in ((converted, found), (plain, expected)):
            net.zero_grad()
            result.square().mean().backward()
        for weight, its in zip(converted.parameters(), plain.parameters(), strict=True):
            assert (weight.grad is None) == (its.grad is None)
            if weight.grad is not None:
                same(weight.grad.float(), its.grad, rtol=close["rtol"], atol=close["atol"])


def test_gradients_flow_through_what_is_set():
    """An auxiliary loss, and the gradient of a score with respect to features (Grad-CAM)."""
    plain, model = pairs(features)
    converted = fxamp.convert(model, LOW)
    found = []
    for net in (plain, converted):
        result = net(inputs(0))
        (gradient,) = torch.autograd.grad(result.sum(), net.features, retain_graph=True)
        (net.features.square().mean() + result.mean()).backward()
        found.append([gradient, *(weight.grad for weight in net.first.parameters())])
    for one, other in zip(*found, strict=True):
        assert one.abs().sum() > 0
        same(one, other, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_of_the_new_kind_is_one_after_it_was_moved(persistent):
    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.places = nn.Linear(4, 4), nn.Buffer(torch.arange(4.0), persistent=persistent)

        def forward(self, x):
            self.places = self.places.to(device=x.device, dtype=x.dtype)
            return self.fc(x) + self.places

    x, model = torch.randn(2, 4), Moving()
    converted = fxamp.convert(model, dtype=LOW, capture="symbolic", example_inputs=(x,), **EXACT)
    for _ in range(2):
        assert torch.equal(converted(x), model(x))
    assert converted.state_dict().keys() == model.state_dict().keys()
    assert isinstance(converted.places, nn.Buffer) == isinstance(model.places, nn.Buffer)


def test_the_original_and_the_preview_are_left_alone():
    _, model = pairs(counter)
    converted = fxamp.convert(model, LOW, example_inputs=(inputs(0),))
    assert (model.steps, converted.steps) == (0, 0)
    converted(inputs(0))
    assert (model.steps, converted.steps) == (0, 1)
    _, other = pairs(features)
    converted = fxamp.convert(other, LOW)
    assert not hasattr(converted, "features")
    converted(inputs(0))
    assert hasattr(converted, "features")
    assert not hasattr(other, "features")


@pytest.mark.parametrize("body", [counter, hidden_state, features])
def test_copies_have_attributes_of_their_own(body):
    plain, model = pairs(body)
    converted = fxamp.convert(model, LOW)
    twins = [copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))]
    expected = [plain(inputs(step)).detach() for step in (0, 1)]
    for net in (converted, *twins):
        for step in (0, 1):
            same(net(inputs(step)).detach(), expected[step], rtol=0.05, atol=0.1)


def test_a_counter_makes_one_graph():
    _, model = pairs(counter)
    converted = fxamp.convert(model, LOW)
    for step in range(8):
        converted(inputs(0))
        assert converted.steps == step + 1
    assert len(engine_of(converted).all_variants()) == 1


def test_a_count_that_forward_decides_on_is_left_to_dynamo_in_the_end(caplog):
    caplog.set_level("INFO", "fxamp")
    plain, model = pairs(counter_that_decides)
    converted = fxamp.convert(model, LOW)
    for _ in range(12):
        same(converted(inputs(0)), plain(inputs(0)), rtol=0.05, atol=0.1)
        assert converted.steps == plain.steps
    assert "sets self.steps and decides on it in Python" in caplog.text


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_count_that_forward_decides_on_is_captured_five_times_and_no_more(opt_level, monkeypatch):
    plain, model = pairs(counter_that_decides)
    converted, captured = fxamp.convert(model, LOW, opt_level=opt_level), []
    build = Engine._build
    monkeypatch.setattr(Engine, "_build", lambda *given: captured.append(given[1]) or build(*given))
    for _ in range(12):
        same(converted(inputs(0)), plain(inputs(0)), rtol=0.05, atol=0.1)
        assert converted.steps == plain.steps
    assert sum(module is converted for module in captured) == 5
    assert not engine_of(converted).variants or not any(engine_of(converted).variants.values())


def test_a_count_that_forward_decides_on_stays_converted(caplog):
    """Dynamo, too, would capture each number by itself, and give the frame up where torch's limit is reached."""
    plain, model = pairs(counter_that_decides)
    converted = fxamp.convert(model, LOW)
    for _ in range(30):
        assert converted(inputs(0)).ne(plain(inputs(0))).any(), "it runs low"
        assert converted.steps == plain.steps
    assert "gives up" not in caplog.text
    assert len(engine_of(converted).all_variants()) < 12


def test_a_time_is_not_frozen():
    def body(net, x):
        net.started = time.perf_counter()
        return net.first(x)

    _, model = pairs(body)
    with pytest.raises(CaptureError, match=r"sets attribute 'started' to .*when it is traced again"):
        fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic")
    converted = fxamp.convert(model, LOW)
    times = []
    for step in range(2):
        converted(inputs(step))
        times.append(converted.started)
    assert times[0] < times[1]


class ReadingNorm(nn.BatchNorm1d):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_module_that_stays_whole_and_reads_it_sees_what_is_set():
    """A graph sets attributes at the end of a call, which is too late for it."""

    def body(net, x):
        y = net.first(x)
        net.norm.scale = y.detach().mean()
        return net.norm(y)

    plain, model = pairs(body)
    for net in (plain, model):
        net.norm = ReadingNorm(16)
    with pytest.raises(CaptureError, match=r"sets attribute 'norm\.scale' and calls 'norm', which may read it"):
        fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic")
    converted = fxamp.convert(model, LOW)
    for step in range(3):
        same(converted(inputs(step)), plain(inputs(step)), rtol=0.05, atol=0.05)


def a_norm_switched_over(net, x):
    was = net.norm.training
    net.train(not was)
    y = net.norm(net.first(x))
    net.train(was)
    return y


def a_norm_with_another_eps(net, x):
    net.norm.eps = 1.0
    y = net.norm(net.first(x))
    net.norm.eps = 1e-5
    return y


def a_norm_with_other_statistics(net, x):
    net.norm.running_mean = net.norm.running_mean + 1
    return net.norm(net.first(x)) + net.norm.running_mean


@pytest.mark.parametrize(
    ("body", "title"),
    [
        (a_norm_switched_over, "training"),
        (a_norm_with_another_eps, "eps"),
        (a_norm_with_other_statistics, "running_mean"),
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_module_that_stays_whole_runs_with_what_it_holds_meanwhile(body, title, is_training):
    plain, model = pairs(body)
    plain.train(is_training)
    model.train(is_training)
    with pytest.raises(CaptureError, match=rf"sets attribute 'norm\.{title}' and calls 'norm', which may read it"):
        fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic")
    converted = fxamp.convert(model, LOW, **EXACT)
    for step in range(3):
        same(converted(inputs(step)), plain(inputs(step)), rtol=1e-5, atol=1e-6)
        same(state(converted), state(plain), rtol=1e-5, atol=1e-6)


def flag_put_back(net, x):
    was = net.training
    net.eval()
    y = torch.dropout(net.first(x), 0.5, net.training)
    net.train(was)
    return y


def test_a_flag_that_is_put_back_makes_one_graph():
    plain, model = pairs(flag_put_back)
    converted = fxamp.convert(model, LOW, capture="symbolic", **EXACT)
    for step in range(0, 6, 2):
        same(converted(inputs(step)), plain(inputs(step)), rtol=1e-5, atol=1e-6)
    assert fxamp.report(converted).captures == ("symbolic",)


def test_a_hook_that_reads_it_sees_what_is_set():
    def body(net, x):
        net.features = net.first(x)
        return net.second(net.features)

    plain, model = pairs(body)
    for net in (plain, model):
        owner = [net]
        net.second.register_forward_hook(lambda part, given, result, owner=owner: result + owner[0].features.detach())
    with pytest.raises(CaptureError, match="sets attribute 'features' and calls 'second', which may read it"):
        fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic")


def test_other_copies_of_a_block_set_their_own():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Net(features), Net(features)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    plain = Two()
    converted = fxamp.convert(copy.deepcopy(plain), LOW, boundaries=Net)
    same(converted(inputs(0)), plain(inputs(0)), rtol=0.05, atol=0.05)
    for one, other in zip(converted.blocks, plain.blocks, strict=True):
        same(one.features, other.features, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("body", "title"),
    [
        (lambda net, x: (net.norm.eval(), net.norm(x))[1], "norm.training"),
        (lambda net, x: (setattr(net, "third", net.second), net.first(x))[1], "third"),
        (lambda net, x: (delattr(net, "length"), net.first(x))[1], "length"),
        (lambda net, x: (setattr(net, "run", lambda: net.first(x)), net.first(x))[1], "run"),
        (lambda net, x: (net.register_buffer("extra", torch.zeros(3)), net.first(x))[1], "extra"),
    ],
)
def test_what_a_graph_cannot_set_is_refused_by_name(body, title):
    _, model = pairs(body)
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(CaptureError, match=f"sets attribute {title!r}"):
        fxamp.convert(model, LOW, capture="symbolic", example_inputs=(inputs(0),))
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("body", [features, hidden_state, counter, buffer_replaced, containers])
def test_a_look_at_a_model_sets_nothing(body):
    _, model = pairs(body)
    converted = fxamp.convert(model, LOW)
    converted(inputs(0))
    before = state(converted)
    looks = (
        lambda: fxamp.find_nan(converted, inputs(1)),
        lambda: fxamp.compare(copy.deepcopy(pairs(body)[0]), converted, inputs(1)),
        lambda: fxamp.report(converted),
        lambda: fxamp.report(converted).suggest(),
        lambda: fxamp.what_if(converted, deny=["relu"]),
    )
    for look in looks:
        look()
        after = state(converted)
        assert after.keys() == before.keys()
        assert all(after[name] is value for name, value in before.items())


def test_a_nan_is_told_by_the_state_that_the_call_began_with():
    """The state that a call leaves behind has the NaN, the one that it found has not."""

    def body(net, x):
        state = torch.zeros_like(x) if net.hidden is None else net.hidden
        y = torch.log(net.first(x) - 1e3 * (net.steps > 0)) + state
        net.hidden, net.steps = y.detach(), net.steps + 1
        return y

    _, model = pairs(body)
    with torch.no_grad():
        model.first.fc.bias.fill_(5)
    converted = fxamp.convert(model, LOW)
    with fxamp.watch_nan(converted, raises=False) as watch:
        for step in (0, 1):
            converted(inputs(step)).sum().backward()
    assert watch.found is not None
    assert "log" in str(watch.found)
    assert "run again, the call is finite" not in str(watch.found)


@pytest.mark.parametrize("body", [features, hidden_state, counter, flag, swapped, buffer_filled, containers])
def test_attributes_are_set_under_torch_compile(body, fresh_dynamo):
    plain, model = pairs(body)
    converted = fxamp.convert(model, LOW)
    compiled = torch.compile(converted, backend="eager")
    for step in range(4):
        same(compiled(inputs(step)), plain(inputs(step)), rtol=0.05, atol=0.1)
        same(state(converted), state(plain), rtol=0.05, atol=0.1)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = x.mean()
        return x * 2


ELSEWHERE = Outside()


def in_a_list(net, x):
    return net.helpers[0](net.first(x))


def in_a_global(net, x):
    return ELSEWHERE(net.first(x))


def by_a_reference(net, x):
    y = net.first(x)
    net.first.__dict__["parent"][0].last = y
    return y


@pytest.mark.parametrize("body", [in_a_list, in_a_global, by_a_reference])
def test_what_is_set_outside_of_the_tree_is_no_value_of_the_trace(body):
    ELSEWHERE.last = None
    plain, model = pairs(body)
    for net in (plain, model):
        net.helpers = [Outside()]
        net.first.__dict__["parent"] = [Outside()]
    outside = (ELSEWHERE, model.helpers[0], model.first.__dict__["parent"][0])
    with pytest.raises(CaptureError, match="sets attribute 'last' of a Outside that is no part of the model's tree"):
        fxamp.convert(model, LOW, capture="symbolic")
    assert [each.last for each in outside] == [None] * 3
    converted = fxamp.convert(model, LOW)
    for step in range(2):
        same(converted(inputs(step)), plain(inputs(step)), rtol=0.05, atol=0.05)
    assert sum(isinstance(each.last, torch.Tensor) for each in outside) == 1


def test_a_module_made_in_forward_may_be_set_up_there():
    def body(net, x):
        scale = nn.Softplus()
        scale.beta = 2
        return scale(net.first(x)) * scale.beta

    plain, model = pairs(body)
    converted = fxamp.convert(model, LOW, capture="symbolic")
    same(converted(inputs(0)), plain(inputs(0)), rtol=0.05, atol=0.05)


def test_what_another_thread_sets_meanwhile_is_not_in_the_graph():
    """Both run a part that the converted model and its original share."""
    meanwhile = []

    def body(net, x):
        net.first.seen = x * 2
        if meanwhile:
            thread = threading.Thread(target=meanwhile.pop())
            thread.start()
            thread.join()
        return net.first(x) + net.first.seen

    plain, model = pairs(body)
    stranger = torch.full((8, 16), 100.0)
    converted = fxamp.convert(model, LOW)
    meanwhile.append(lambda: setattr(model.first, "seen", stranger))
    converted(inputs(0))
    assert not meanwhile
    for step in (0, 1):
        same(converted(inputs(step)), plain(inputs(step)), rtol=0.05, atol=0.05)
        same(converted.first.seen, plain.first.seen)


class Keeping(nn.Module):
    """Keeps what is as long as its batch, as vision-language models keep their positions from call to call."""

    def __init__(self, ask):
        super().__init__()
        self.fc, self.ask, self.last = nn.Linear(16, 16), ask, None

    def forward(self, x):
        y = self.fc(x) if self.ask(self) else self.fc(x) + 1
        self.last = y.sum(1)
        return y


def is_none(model):
    return model.last is None


def is_none_at_first(model):
    has_last = model.last is not None
    return not has_last or model.training


@pytest.mark.parametrize("ask", [is_none, is_none_at_first])
def test_a_tensor_that_is_asked_whether_it_is_none_alone_may_have_any_shape(ask):
    torch.manual_seed(0)
    model = Keeping(ask)
    converted = fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic", **EXACT)
    for rows in (4, 3, 4, 5, 3, 3, 4):
        x = torch.randn(rows, 16)
        assert torch.equal(converted(x), model(x)) and torch.equal(converted.last, model.last)
    assert len(engine_of(converted).all_variants()) == 2, "one for None"
    model.last = converted.last = None
    assert torch.equal(converted(x), model(x))
    assert len(engine_of(converted).all_variants()) == 2


def has_one_row(model):
    return model.last is None or model.last.shape[0] == 1


def sums_up(model):
    return model.last is None or ((last := model.last) is not None and last.dim() == 1 and len(last) == 1)


@pytest.mark.parametrize("ask", [has_one_row, sums_up])
def test_a_tensor_that_is_asked_more_has_its_shape(ask):
    torch.manual_seed(0)
    model = Keeping(ask)
    converted = fxamp.convert(copy.deepcopy(model), LOW, capture="symbolic", **EXACT)
    for rows in (4, 1, 4, 4, 1, 1):
        x = torch.randn(rows, 16)
        assert torch.equal(converted(x), model(x)) and torch.equal(converted.last, model.last)


def sets(name, value):
    def body(net, x):
        setattr(net, name, value)
        return net.first(x)

    return body


def a_tensor_and_then_none(net, x):
    net.hidden = net.first(x)
    y = net.hidden * 2
    net.hidden = None
    return y


def of_a_part(net, x):
    net.first.size = None
    return net.first(x)


def no_less(net, x):
    net.steps = max(net.steps, 0)
    return net.first(x) + net.steps


def the_same_tensor(net, x):
    net.state = net.beginning
    return net.first(x) + net.state


ALREADY_THERE = {
    "None": (sets("hidden", None), "hidden", None, torch.ones(2)),
    "a flag": (sets("is_done", False), "is_done", False, True),
    "a number": (sets("steps", 0), "steps", 0, 5),
    "another kind of number": (sets("rate", 0.5), "rate", 0.5, 2.0),
    "a text": (sets("way", "there"), "way", "there", "back"),
    "a tuple": (sets("shape", ()), "shape", (), (1,)),
    "a tensor in between": (a_tensor_and_then_none, "hidden", None, torch.ones(2)),
    "an attribute of a part": (of_a_part, "first.size", None, (2, 4)),
    "the larger of two": (no_less, "steps", 0, -3),
}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("case", ALREADY_THERE)
def test_what_forward_sets_to_what_is_there_it_sets_when_something_else_is(case, opt_level):
    body, name, value, other = ALREADY_THERE[case]
    path, _, name = name.rpartition(".")
    net = Net(body)
    setattr(net.get_submodule(path), name, value)
    converted = fxamp.convert(net, LOW, opt_level=opt_level)
    module = converted.get_submodule(path)
    for step in range(4):
        converted(inputs(0))
        assert type(getattr(module, name)) is type(value) and getattr(module, name) == value
        if step:
            setattr(module, name, other)
    assert len(engine_of(converted).all_variants()) <= 2


def test_a_tensor_that_forward_sets_again_is_set_where_another_is():
    plain, net = pairs(the_same_tensor)
    for model in (plain, net):
        model.beginning = model.state = torch.zeros(16)
    converted = fxamp.convert(net, LOW, **EXACT)
    for step in range(4):
        assert torch.equal(converted(inputs(0)), plain(inputs(0)))
        assert torch.equal(converted.state, plain.state)
        for model in (plain, converted):
            model.state = torch.full((16,), float(step))


def test_a_cache_for_evaluation_is_made_anew_after_each_epoch():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.make = nn.Linear(4, 16)
            self.cache = None

        def forward(self, x):
            if self.training:
                self.cache = None
                weight = self.make(torch.ones(4))
            else:
                if self.cache is None:
                    self.cache = self.make(torch.ones(4)).detach()
                weight = self.cache
            return x @ weight

    torch.manual_seed(0)
    losses = {}
    plain = Cached()
    for name, model in (("plain", plain), ("converted", fxamp.convert(copy.deepcopy(plain), LOW, **EXACT))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[name] = []
        for _ in range(4):
            model.train()
            for step in range(2):
                optimizer.zero_grad()
                (model(inputs(step)) - 1).square().mean().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                losses[name] += [(model(inputs(step)) - 1).square().mean().item() for step in range(2)]
    assert losses["converted"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["plain"][-1] < 0.9 * losses["plain"][0]


def test_a_number_of_a_part_that_forward_sets_before_the_part_runs():
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.drop = nn.Linear(16, 16), nn.Dropout(0.0)

        def forward(self, x):
            self.drop.p = 0.0
            return self.drop(self.fc(x))

    plain = Dropped()
    converted = fxamp.convert(copy.deepcopy(plain), LOW, **EXACT)
    for p in (0.0, 0.5, 0.9):
        converted.drop.p = p
        assert torch.equal(converted(inputs(0)), plain(inputs(0)))


def test_what_forward_sets_to_something_else_has_one_graph_whatever_it_held():
    net = Net(sets("way", "there"))
    net.way = "nowhere"
    converted = fxamp.convert(net, LOW)
    for other in ("back", "up", "down", None, 7):
        converted(inputs(0))
        assert converted.way == "there"
        converted.way = other
    assert len(engine_of(converted).all_variants()) == 1
