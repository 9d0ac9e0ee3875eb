"""find_nan names the op that stopped being finite, forward or backward, and a deny that mends it."""

import copy

import pytest
import torch
from torch import nn

import fxamp
from fxamp import ir
from fxamp.counting.zoo import MODELS
from fxamp.errors import OptionError
from fxamp.numerics.extent import extent_of
from fxamp.numerics.find import find_nan
from fxamp.numerics.flow import Flow
from fxamp.numerics.origin import origin_of
from fxamp.numerics.run import call_of
from fxamp.numerics.runner import Part
from fxamp.numerics.watch import watch_nan
from fxamp.numerics.watcher import Watcher, watch_flow

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.linspace(0.5, 1.5, 32).reshape(4, 8)


class Net(nn.Module):
    """Two linear layers that double and pass on, and a forward given as a function."""

    def __init__(self, function):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(8, 8, 1, bias=False)
        self.function = function
        with torch.no_grad():
            for layer in (self.a, self.b):
                layer.weight.copy_(torch.eye(8))
            self.conv.weight.copy_(torch.eye(8)[:, :, None])

    def forward(self, x):
        return self.function(self, x)


def big(m, x):
    """A low value of about 30,000: half of fp16's range."""
    return m.a(x * 30000.0)


def four_times(m, x):
    return nn.functional.linear(x, m.b.weight * 4.0)


# name of the node that must be named, forward, whether float32 is finite, and the function
FORWARD = [
    ("add", True, lambda m, x: big(m, x) + big(m, x) + big(m, x)),
    ("mul_1", True, lambda m, x: m.a(x) * 1.0 * 60000.0 * 4.0),
    ("linear_1", True, lambda m, x: nn.functional.linear(big(m, x), m.b.weight * 4.0)),
    ("matmul", True, lambda m, x: big(m, x) @ m.b.weight.mul(4.0).t()),
    ("conv1d", True, lambda m, x: nn.functional.conv1d(big(m, x)[..., None], m.conv.weight * 4.0)),
    ("bmm", True, lambda m, x: torch.bmm(big(m, x)[None], (m.b.weight * 4.0)[None])),
    ("to", True, lambda m, x: m.a(x * 1e3 * 1e3)),
    ("add_1", True, lambda m, x: four_times(m, nn.functional.gelu((m.a(x) + 6e4 + 6e4) - 12e4))),
    ("exp", False, lambda m, x: (m.a(x) * 100.0).exp()),
    ("log", False, lambda m, x: (m.a(x) * 0.0).log()),
    ("truediv", False, lambda m, x: (m.a(x) * 0.0) / (m.b(x) * 0.0)),
    ("sqrt", False, lambda m, x: (-m.a(x)).sqrt()),
    ("softmax", False, lambda m, x: m.a(x).masked_fill(x > 0, float("-inf")).softmax(-1)),
]


@pytest.mark.parametrize("name, finite_in_float32, function", FORWARD, ids=[case[0] for case in FORWARD])
def test_the_op_that_overflows_is_named(name, finite_in_float32, function):
    model = fxamp.convert(Net(function), FP16, (X,), pad_to=0)
    found = find_nan(model, (X,))
    assert found is not None
    assert (found.name, found.phase) == (name, "forward") or (name == "to" and found.op == "to")
    assert found.is_bad_in_float32 is not finite_in_float32
    assert "test_find_nan.py:" in found.source
    if finite_in_float32:
        assert found.overrides
        mended = fxamp.convert(Net(function), FP16, (X,), pad_to=0, overrides=found.overrides)
        assert bool(torch.isfinite(mended(X)).all())
    else:
        assert found.overrides == {} and "not a matter of precision" in str(found)


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_of_weights_that_are_cast_together_the_one_that_overflows_is_named(capture):
    model = Net(lambda m, x: m.b(m.a(x * 1e-3)))
    with torch.no_grad():
        model.a.weight[0, 0] = 1e5
    found = find_nan(fxamp.convert(model, FP16, (X,), capture=capture), (X,))
    assert (found.op, found.colour, found.phase, found.module) == ("to", "weight cast", "forward", "a")
    assert len(found.inputs) == 1 and found.inputs[0].endswith(": float32 [8, 8] [0, 1e+05]")
    assert "test_find_nan.py:" in found.source and len(found.overrides) == 1
    assert find_nan(fxamp.convert(model, FP16, (X,), capture=capture, overrides=found.overrides), (X,)) is None


def test_a_deny_that_mends_names_nothing_without_a_float():
    def function(m, x):
        y = m.a(x) * 1e4 * 1e2
        return m.b(y.reshape(-1, y.size(-1)).reshape(y.size(0), -1))

    found = find_nan(fxamp.convert(Net(function), FP16, (X,)), (X,))
    assert found.overrides and not [name for name in found.overrides if name.startswith("size")]


def test_what_overflows_again_on_its_way_back_is_mended_too():
    """The value behind the op is too large for the next layer, and its gradient for the layer before."""
    torch.manual_seed(0)

    def function(m, x):
        return m.b(m.a(x * 100.0) * 30000.0)

    model = Net(function)

    def loss(output):
        return output.mean()

    converted = fxamp.convert(model, FP16, (X,))
    found = find_nan(converted, (X,), loss)
    assert found.phase == "forward" and found.overrides, str(found)
    mended = fxamp.convert(model, FP16, (X,), overrides=found.overrides)
    assert find_nan(mended, (X,), loss) is None
    for name in found.overrides:
        rest = {other: "deny" for other in found.overrides if other != name}
        assert find_nan(fxamp.convert(model, FP16, (X,), overrides=rest), (X,), loss) is not None, (
            f"{name} is not needed"
        )


def test_a_mask_that_fxamp_clamps_explains_no_overflow():
    def attention(m, x):
        mask = (x.cumsum(-1) > 1.0).float().log() - 12e4  # -inf in float32 too; low it would not fit, and is clamped
        return (four_times(m, big(m, x)) + mask).softmax(-1)

    model = fxamp.convert(Net(attention), FP16, (X,), pad_to=0, overrides={"add": "allow"})
    assert any(row.role == "cast" and row.op == "clamp" for row in fxamp.report(model).rows)
    found = find_nan(model, (X,))
    assert (found.name, found.is_bad_in_float32) == ("linear_1", False)
    with watch_nan(model, raises=False) as watch:
        model(X)
    assert watch.found.name == "linear_1"


class Deep(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("position", range(5))
@pytest.mark.parametrize("part, module", [(0, "linear"), (1, "layer_norm")])
def test_an_overflow_planted_in_any_module_is_named(position, part, module):
    torch.manual_seed(0)
    model = Deep()
    with torch.no_grad():
        model.layers[position][part].weight.fill_(6e4)
        model.layers[position][part].bias.fill_(3e4)
    converted = fxamp.convert(model, FP16, (X,))
    found = find_nan(converted, (X,))
    assert found is not None and found.op == module
    assert found.module == f"layers.{position}.{part}"
    assert any("[" in text for text in found.inputs)


@pytest.mark.parametrize("place", [0, 0.5, 1])
@pytest.mark.parametrize("name", ["bert_base", "gpt2_small", "resnet50", "unet", "convnext_tiny"])
def test_an_overflow_planted_in_a_real_model_is_named(name, place):
    torch.manual_seed(0)
    step = MODELS[name](True)
    gemms = [(path, m) for path, m in step.model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    if name == "gpt2_small":
        gemms.pop()  # the head's weight is the embedding's: the overflow is made there
    path, module = gemms[round(place * (len(gemms) - 1))]
    with torch.no_grad():
        module.weight.copy_(6e4 * module.weight.sign())
    found = find_nan(fxamp.convert(step.model, FP16, step.inputs), step.inputs, step.loss_of)
    assert found is not None and (found.module, found.phase) == (path, "forward"), str(found)
    assert found.op in ("linear", "conv2d") and found.inputs


class Boom(nn.Module):
    """The identity, whose backward is infinite: the slope of sqrt at 0."""

    def forward(self, x):
        return x + (x - x.detach()).abs().sqrt()


@pytest.mark.parametrize("place", [0, 0.5, 1])
@pytest.mark.parametrize("name", ["bert_base", "gpt2_small", "resnet50", "unet", "convnext_tiny"])
def test_a_bad_gradient_planted_in_a_real_model_is_named(name, place):
    torch.manual_seed(0)
    step = MODELS[name](True)
    norms = [path for path, m in step.model.named_modules() if isinstance(m, (nn.LayerNorm, nn.BatchNorm2d))]
    path = norms[round(place * (len(norms) - 1))]
    owner, _, child = path.rpartition(".")
    parent = step.model.get_submodule(owner)
    setattr(parent, child, nn.Sequential(getattr(parent, child), Boom()))
    model = fxamp.convert(step.model, FP16, step.inputs)
    assert find_nan(model, step.inputs) is None, "the forward is finite"
    found = find_nan(model, step.inputs, step.loss_of)
    assert (found.op, found.phase, found.module) == ("sqrt", "backward", f"{path}.1"), str(found)
    assert found.is_bad_in_float32


@pytest.mark.parametrize("position", range(5))
def test_a_nan_planted_in_any_parameter_is_named(position):
    model = Deep()
    with torch.no_grad():
        model.layers[position][0].weight[3, 3] = float("nan")
    found = find_nan(fxamp.convert(model, BF16, (X,)), (X,))
    assert (found.phase, found.name) == ("parameter", f"layers_{position}_0_weight")
    assert "an earlier step wrote it" in str(found)


class Held(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.middle = middle
        self.last = nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


HELD = [
    ("weight", nn.BatchNorm2d(8)),
    ("bias", nn.BatchNorm2d(8)),
    ("running_var", nn.BatchNorm2d(8).eval()),
    ("weight", nn.InstanceNorm2d(8, affine=True)),
    ("running_mean", nn.InstanceNorm2d(8, track_running_stats=True).eval()),
]


@pytest.mark.parametrize(("name", "norm"), HELD, ids=[f"{type(norm).__name__}-{name}" for name, norm in HELD])
def test_a_nan_that_a_module_holds_is_named_by_its_path(name, norm):
    model = Held(copy.deepcopy(norm))
    with torch.no_grad():
        getattr(model.middle, name)[3] = float("nan")
    images = torch.randn(2, 3, 8, 8)
    found = find_nan(fxamp.convert(model, BF16, (images,)), (images,))
    assert (found.phase, found.module, found.is_bad_in_float32) == ("parameter", "middle", True), str(found)
    assert f"what it holds is the first that is not finite\n  middle.{name}: float32 [8]" in str(found)
    writer = "forward" if name.startswith("running") else "step"
    assert f"middle.{name} itself is not finite: an earlier {writer} wrote it" in found.remedy


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_buffer_is_not_written_by_a_step(capture):
    model = Net(lambda m, x: m.a(x + m.shift))
    model.register_buffer("shift", torch.full((8,), float("nan")))
    found = find_nan(fxamp.convert(model, BF16, (X,), capture=capture), (X,))
    assert (found.phase, found.op) == ("parameter", "buffer")
    assert "the buffer itself is not finite: an earlier forward wrote it, or the model's own code" in found.remedy


def test_a_running_statistic_that_is_only_written_is_not_blamed():
    model = Held(nn.BatchNorm2d(8))
    model.middle.running_var[3] = float("nan")
    images = torch.randn(2, 3, 8, 8)
    converted = fxamp.convert(model, FP16, (images,))
    assert find_nan(converted, (images,)) is None
    with torch.no_grad():
        model.middle.weight[0] = 1e6
    found = find_nan(converted, (images,))
    assert (found.phase, found.op) == ("forward", "batch_norm"), str(found)


def test_a_nan_in_the_input_is_named():
    found = find_nan(fxamp.convert(Deep(), BF16, (X,)), (X.clone().fill_(float("nan")),))
    assert (found.phase, found.op) == ("input", "input") and "look at the data" in str(found)


BACKWARD = [
    ("sqrt", False, lambda m, x: (m.a(x) * 0.0).sqrt()),
    ("norm", False, lambda m, x: (m.a(x) * 0.0 + 1.0).log().pow(0.5)),
    ("acos", False, lambda m, x: (m.a(x) * 0.0 + 1.0).acos()),
]


@pytest.mark.parametrize("function, op", [(BACKWARD[0][2], "sqrt"), (BACKWARD[1][2], "pow"), (BACKWARD[2][2], "acos")])
def test_the_op_whose_backward_is_not_finite_is_named(function, op):
    model = fxamp.convert(Net(function), FP16, (X,))
    found = find_nan(model, (X,), loss_fn=lambda output: output.sum())
    assert (found.op, found.phase) == (op, "backward")
    assert found.is_bad_in_float32
    assert find_nan(model, (X,)) is None, "the forward is finite"


@pytest.mark.parametrize("position", range(5))
def test_a_gradient_that_overflows_is_named_with_its_module(position):
    torch.manual_seed(0)
    model = Deep()
    with torch.no_grad():
        model.layers[position][0].weight.mul_(1e3)  # what is behind it gets a gradient a thousand times larger
    converted = fxamp.convert(model, FP16, (X,))
    found = find_nan(converted, (X,), loss_fn=lambda output: output.sum() * 2.0**20)
    assert found is not None and found.phase in ("backward", "sum of gradients")
    assert not found.is_bad_in_float32


def test_a_loss_scale_that_is_too_large_is_said():
    torch.manual_seed(0)
    converted = fxamp.convert(Deep(), FP16, (X,))
    assert find_nan(converted, (X,), loss_fn=lambda output: output.sum()) is None
    found = find_nan(converted, (X,), loss_fn=lambda output: output.sum() * 2.0**30)
    assert found is not None and found.phase != "forward"


def test_the_sum_of_two_gradients_can_be_the_one_that_overflows():
    def function(m, x):
        y = m.a(x)
        return m.b(y) * 1.0 + m.b(y.relu()) * 1.0

    net = Net(function)
    net.b.weight.requires_grad_(False)  # its own gradient would be the first that overflows
    model = fxamp.convert(net, FP16, (X,))
    found = find_nan(model, (X,), loss_fn=lambda output: output.sum() * 40000.0)
    assert (found.phase, found.name) == ("sum of gradients", "linear")


def test_infinities_that_the_code_means_are_not_reported():
    model = fxamp.convert(Net(lambda m, x: m.b(m.a(x).masked_fill(x > 1.45, float("-inf")).softmax(-1))), FP16, (X,))
    assert find_nan(model, (X,), loss_fn=lambda output: output.sum()) is None


def test_of_two_infinities_the_one_that_reaches_the_output_is_named():
    def function(m, x):
        harmless = torch.tanh(big(m, x) * 4.0)
        return m.b(x + harmless * 0.0 + 1.0).log() * (m.b(x) * 0.0).log()

    found = find_nan(fxamp.convert(Net(function), FP16, (X,), level="aggressive"), (X,))
    assert found.op == "log"


def test_in_place_writes_are_followed():
    def function(m, x):
        y = m.a(x).clone()
        y.mul_(1e30).mul_(1e30)
        return y + 1.0

    found = find_nan(fxamp.convert(Net(function), FP16, (X,)), (X,))
    assert found is not None and found.name == "mul__1"

    def smooth(m, x):
        y = m.a(x).clone()
        y.mul_(0.0)
        return y.sqrt()

    found = find_nan(fxamp.convert(Net(smooth), FP16, (X,)), (X,), loss_fn=lambda output: output.sum())
    assert (found.op, found.phase) == ("sqrt", "backward")


def test_a_value_in_the_memory_of_a_freed_one_was_not_written_by_its_writer():
    """Two values at one address, one after the other; the first was written in place."""
    call = call_of(fxamp.convert(Net(lambda m, x: m.a((x.clone().mul_(2.0) + 1.0).sin())), FP16, (X,), pad_to=0), (X,))
    clone, written, add, sin = (
        next(node for node in call.variant.graph.nodes if node.name == name) for name in ("clone", "mul_", "add", "sin")
    )
    watcher = Watcher(Flow(Part(0, 0, call.variant, ())), call.weights, with_gradients=False)
    memory = bytearray(128)
    first = torch.frombuffer(memory, dtype=torch.float32)
    watcher.see(clone, first)
    watcher.see(written, first)
    watcher.edge(clone, add, first)
    assert watcher.flow.writers == {("clone", "add"): "mul_"}
    del first
    second = torch.frombuffer(memory, dtype=torch.float32)
    watcher.see(add, second)
    watcher.edge(add, sin, second)
    assert watcher.flow.writers == {("clone", "add"): "mul_"}


def test_a_finite_run_finds_nothing_and_leaves_no_mark():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    converted = fxamp.convert(model, FP16, (X,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert find_nan(converted, (X,), loss_fn=lambda output: output.sum()) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_watching_a_training_step_raises_and_afterwards_all_is_as_before():
    model = fxamp.convert(Net(lambda m, x: (m.a(x) * 0.0).sqrt()), FP16, (X,))
    plain = model(X)
    said = r"sqrt \(`sqrt`, infer, high\): the gradient it passes back"
    with pytest.raises(FloatingPointError, match=said), watch_nan(model):
        model(X).sum().backward()
    assert torch.equal(model(X), plain)
    assert "fxamp forward" in model._fxamp_engine.all_variants()[0].compiled.run.__code__.co_filename


def test_watching_sees_graphs_that_are_captured_inside():
    model = fxamp.convert(Net(lambda m, x: (m.a(x) * 100.0).exp()), FP16)
    with watch_nan(model, raises=False) as watch:
        model(X)
    assert watch.found is not None and watch.found.name == "exp"


def test_it_works_after_the_scale_has_collapsed():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    converted = fxamp.convert(model, FP16, (X,))
    from fxamp.runtime.scaler import LossScaler

    scaler = LossScaler(init_scale=2.0, min_scale=1.0, max_skips=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    broken = lambda output: (output * 0.0).sqrt().sum()  # noqa: E731
    with pytest.raises(fxamp.ScaleCollapseError):
        for _ in range(20):
            optimizer.zero_grad()
            scaler.scale(broken(converted(X))).backward()
            scaler.step(optimizer)
            scaler.update()
    found = find_nan(converted, (X,), loss_fn=lambda output: scaler.scale(broken(output)))
    assert (found is not None and found.phase == "backward") or found.phase == "sum of gradients"


def test_what_is_not_a_scalar_loss_is_named():
    model = fxamp.convert(Net(lambda m, x: m.a(x)), FP16, (X,))
    with pytest.raises(OptionError, match=r"loss_fn gives Tensor, not a scalar tensor"):
        find_nan(model, (X,), loss_fn=lambda output: output)
    with pytest.raises(OptionError, match=r"this Linear was not converted"):
        find_nan(nn.Linear(8, 8), (X,))


def test_extents_tell_what_a_value_holds():
    extent = extent_of(torch.tensor([1.0, -2.0, float("nan"), float("inf"), float("-inf")]))
    assert str(extent) == "float32 [5] [-2, 1], 1 nan and 2 inf"
    assert str(extent_of(torch.tensor([float("nan")]))) == "float32 [1] nothing finite, 1 nan"


class Bucketed(nn.Module):
    """Values that are made to indices: what is not finite becomes an index that is out of range."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.table = nn.Embedding(4, 8)
        with torch.no_grad():
            self.a.weight.copy_(torch.eye(8))

    def forward(self, x):
        large = big(self, x) + big(self, x)
        return self.table((large / 30000.0).long())


def test_an_index_made_of_an_overflow_is_traced_to_the_overflow():
    converted = fxamp.convert(Bucketed(), FP16, (X,), pad_to=0)
    found = find_nan(converted, (X,))
    assert (found.name, found.phase) == ("add", "forward"), str(found)
    assert "then the run stops: IndexError" in str(found) and found.overrides


def test_an_error_without_a_bad_value_is_the_models_own():
    with pytest.raises(IndexError):
        find_nan(fxamp.convert(Bucketed(), torch.bfloat16, (X,), pad_to=0), (X * 10.0,))


def test_what_a_mask_explains_and_what_it_does_not():
    """An infinity of the attention's own is named, in find_nan and while training, though it reads a mask's -inf."""

    def attend(m, x):
        mask = torch.full((4, 4), float("-inf")).triu(1)
        query = m.b(x)[None]
        return m.norm(nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask))

    converted = fxamp.convert(Net(attend), FP16, (X,), pad_to=0)
    assert find_nan(converted, (X,)) is None
    real = nn.functional.scaled_dot_product_attention

    def spoilt(*given, **more):
        value = real(*given, **more).clone()
        value[0, 0, 0] = float("inf")
        return value

    call = call_of(converted, (X,))
    node = next(node for node in call.variant.graph.nodes if ir.mark(node).op == "scaled_dot_product_attention")
    node.target = spoilt
    found = find_nan(converted, (X,))
    assert (found.name, found.phase) == (node.name, "forward"), str(found)
    assert origin_of(watch_flow(call, None)).node == node.name, "without the fp32 run too, as in training"


@pytest.mark.parametrize("value, is_named", [(float("inf"), True), (1e30, False)])
def test_infinities_of_the_data_are_named(value, is_named):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), torch.randn(4, 8)
    x[1, 2] = value
    with torch.no_grad():
        model[1].weight.mul_(1.0 if is_named else 1e30)
    found = fxamp.find_nan(fxamp.convert(model, torch.bfloat16, example_inputs=(x,)), (x,))
    assert found.is_bad_in_float32 and found.has_infinite_inputs == is_named
    assert ("look at the infinities among the call's inputs" in str(found)) == is_named


def test_a_low_weight_written_directly_is_what_float32_sees():
    model = fxamp.convert(Net(lambda m, x: m.b(m.a(x))), BF16, (X,), opt_level="O2")
    with torch.no_grad():
        model.a.weight.fill_(1e38)
    found = find_nan(model, (X,))
    assert found.is_bad_in_float32


def test_at_o2_a_weight_that_low_precision_cannot_hold_is_mended_by_a_deny():
    def large():
        model = Net(lambda m, x: m.b(m.a(x * 1e-3)))
        with torch.no_grad():
            model.a.weight[0, 0] = 1e5
        return model

    found = find_nan(fxamp.convert(large(), FP16, (X,), opt_level="O2"), (X,))
    assert (found.name, found.phase, found.overrides) == ("a_weight", "parameter", {"linear": "deny"})
    assert "its float32 value is finite (float32 [8, 8] [0, 1e+05])" in found.remedy
    assert "overrides={'linear': 'deny'}) makes the run finite" in found.remedy
    assert find_nan(fxamp.convert(large(), FP16, (X,), opt_level="O2", overrides=found.overrides), (X,)) is None


def test_at_o2_a_weight_that_is_infinite_in_float32_too_was_written_so():
    model = Net(lambda m, x: m.b(m.a(x)))
    with torch.no_grad():
        model.a.weight[0, 0] = float("inf")
    found = find_nan(fxamp.convert(model, FP16, (X,), opt_level="O2"), (X,))
    assert found.phase == "parameter" and not found.master and not found.overrides
    assert "an earlier step wrote it" in found.remedy


# whether the loss itself is finite, and a loss that spoils it
LOSSES = {
    "nan": (False, lambda output: (output - output).log().sum()),
    "overflow": (False, lambda output: (output * 1e30).pow(2).sum()),
    "a constant": (False, lambda output: output.sum() + float("inf")),
    "its slope": (True, lambda output: (output * 0.0).sqrt().sum()),
}


@pytest.mark.parametrize("is_finite, loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_what_the_loss_makes_is_said_to_be_the_losss(is_finite, loss, capture):
    converted = fxamp.convert(Net(lambda m, x: m.b(m.a(x)).sigmoid()), FP16, capture=capture)
    found = find_nan(converted, (X,), loss)
    assert (found.op, found.phase) == ("output", "backward" if is_finite else "loss")
    said = "gives is finite; the loss, or what else is computed of it outside, makes it, and does so in float32"
    assert said in found.remedy and found.is_bad_in_float32 and not found.overrides


def test_a_loss_that_float32_makes_finite_is_mended_in_the_model():
    model = fxamp.convert(Net(lambda m, x: torch.tanh(m.a(x * 1e-9))), FP16, (X,))
    found = find_nan(model, (X,), lambda output: output.log().sum())
    assert found.phase == "loss" and not found.is_bad_in_float32
    assert found.overrides and "makes the run finite" in found.remedy
    mended = fxamp.convert(Net(lambda m, x: torch.tanh(m.a(x * 1e-9))), FP16, (X,), overrides=found.overrides)
    assert find_nan(mended, (X,), lambda output: output.log().sum()) is None


def test_what_mends_it_is_offered_with_the_overrides_that_the_model_has():
    model = Net(lambda m, x: (m.a(x * 30000.0) * 4.0).sum() + (m.b(x * 30000.0) * 4.0).sum())
    today = fxamp.convert(model, FP16, (X,), pad_to=0, overrides={"mul_1": "deny"})
    found = find_nan(today, (X,))
    assert found is not None and found.overrides["mul_1"] == "deny" and len(found.overrides) > 1
    assert find_nan(fxamp.convert(model, FP16, (X,), pad_to=0, overrides=found.overrides), (X,)) is None


def test_what_overflows_before_a_clamp_of_fxamps_own_is_named_before_the_gradients_that_follow():
    """In low precision the product is infinite, and so is the quotient; the cast in front of `b` clamps that."""

    def hidden(m, x):
        return m.b(m.a(x) * 300 * 300 / 9e4)

    converted = fxamp.convert(Net(hidden), FP16, (X,))
    assert fxamp.report(converted).casts_to_low, "or there is no clamp"

    def loss(output):
        return output.float().square().mean()

    with pytest.raises(FloatingPointError) as raised, watch_nan(converted):
        loss(converted(X)).backward()
    for found in (find_nan(converted, (X,)), find_nan(converted, (X,), loss)):
        assert (found.name, found.phase, found.overrides) == ("mul_1", "forward", {"mul_1": "deny"})
    assert str(raised.value).startswith("mul_1 (`mul`, infer, low): its output is the first that is not finite")
    assert "overrides={'mul_1': 'deny'}) makes this forward finite" in str(raised.value)


def test_the_denials_that_mend_a_gradient_are_all_needed():
    torch.manual_seed(0)

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            h = self.b(self.a(x) * 3e4)
            return h - h.max()

    def loss(output):
        return output.float().square().mean()

    model, x = Large(), torch.randn(8, 16)
    found = find_nan(fxamp.convert(copy.deepcopy(model), FP16, (x,)), (x,), loss)
    assert found.phase == "backward" and len(found.overrides) > 1

    def is_mended(overrides):
        return find_nan(fxamp.convert(copy.deepcopy(model), FP16, (x,), overrides=overrides), (x,), loss) is None

    assert is_mended(found.overrides)
    for name in found.overrides:
        assert not is_mended({other: "deny" for other in found.overrides if other != name})


class Asserting(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x):
        z = torch.log(self.linear(x) * 0 + x[0, 0])
        if self.how == "assert":
            assert torch.isfinite(z).all()
        elif self.how == "raise" and not torch.isfinite(z).all():
            raise ValueError("not finite")
        elif self.how == "torch":
            torch._assert(torch.isfinite(z).all(), "not finite")
        return z


@pytest.mark.parametrize("how", ["assert", "raise", "torch"])
def test_what_stops_the_run_is_named_though_float32_stops_too(how):
    x = torch.rand(2, 4) + 1
    converted = fxamp.convert(Asserting(how), torch.float16, (x,))
    assert fxamp.find_nan(converted, (x,)) is None
    found = fxamp.find_nan(converted, (-x,))
    assert found.op == "log" and found.is_bad_in_float32
    assert "then the run stops" in str(found)


def test_memory_as_it_is_found_is_no_fault():
    class Out(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            y = self.linear(x).detach()
            return torch.div(y, torch.zeros_like(y), out=torch.empty_like(y))

    x = torch.rand(4, 8)
    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    try:
        found = fxamp.find_nan(fxamp.convert(Out(), torch.float16, (x,)), (x,))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.op == "div"
