"""The converted model is the user's model: class, state, methods, copies, modes."""

import copy
import functools
import gc
import inspect
import io
import linecache
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.model.engine import engine_of


class Net(nn.Module):
    """A small net with everything that keeps state: batch norm, dropout, a buffer, a mode of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.register_buffer("shift", torch.full((width,), 0.5))
        self.head = nn.Linear(width, 3)
        self.calls = "untouched"

    def forward(self, x: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Logits of images."""
        h = F.relu(self.bn(self.conv(x))).mean((2, 3)) + self.shift
        h = F.dropout(h, 0.5, self.training)
        return self.head(h) / temperature

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(1)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def bf16(model: nn.Module, **options) -> nn.Module:
    return fxamp.convert(model, dtype=torch.bfloat16, **options)


def test_class_name_signature_and_docs_are_the_users(model):
    converted = bf16(model)
    assert isinstance(converted, Net)
    assert type(converted).__name__ == "Net"
    assert type(converted).__qualname__ == Net.__qualname__
    assert type(converted).__module__ == Net.__module__
    assert inspect.signature(converted.forward) == inspect.signature(model.forward)
    assert converted.forward.__doc__ == "Logits of images."


def test_who_unwraps_forward_still_has_the_converted_one(model, x):
    """As Accelerate's unwrap_model does, to take its own wrappers off."""
    model.eval()
    converted = bf16(model)
    wrapped = functools.wraps(type(converted).forward)(lambda *args: None)
    unwrapped = types.MethodType(inspect.unwrap(wrapped), converted)
    assert torch.equal(unwrapped(x), converted(x)) and not torch.equal(unwrapped(x), model(x))


def test_state_is_shared_and_in_the_same_order(model):
    converted = bf16(model)
    assert list(converted.state_dict()) == list(model.state_dict())
    for name, parameter in model.named_parameters():
        assert converted.get_parameter(name) is parameter
        assert parameter.dtype == torch.float32
    assert converted.get_buffer("shift") is model.get_buffer("shift")


def test_the_original_still_runs_in_fp32(model, x):
    model.eval()
    before = model(x)
    bf16(model)(x)
    assert torch.equal(model(x), before)


def test_state_dict_round_trips_both_ways(model, x):
    converted, other = bf16(model), Net()
    other.load_state_dict(converted.state_dict(), strict=True)
    fresh = bf16(Net())
    fresh.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(fresh.eval()(x), converted.eval()(x))


def test_methods_call_the_rewritten_forward(model, x):
    converted = bf16(model).eval()
    assert torch.equal(converted.predict(x), converted(x).argmax(1))


def test_eval_is_deterministic_and_train_drops(model, x):
    converted = bf16(model)
    converted.eval()
    assert torch.equal(converted(x), converted(x))
    converted.train()
    assert not torch.equal(converted(x), converted(x))
    assert len(engine_of(converted).all_variants()) == 2


def test_a_mixture_of_modes_gets_its_own_graph(model, x):
    converted = bf16(model)
    converted.train()
    converted.bn.eval()
    mean = model.bn.running_mean.clone()
    converted(x)
    assert torch.equal(model.bn.running_mean, mean)
    converted.bn.train()
    converted(x)
    assert not torch.equal(model.bn.running_mean, mean)


def test_dropout_draws_the_numbers_that_eager_draws(model, x):
    converted = bf16(model)
    torch.manual_seed(3)
    mask = converted(x).detach() != 0
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert mask.any()


def test_batch_norm_buffers_evolve_as_in_eager(model, x):
    eager = copy.deepcopy(model)
    converted = bf16(model)
    for step in range(3):
        eager(x + step)
        converted(x + step)
    assert int(model.bn.num_batches_tracked) == int(eager.bn.num_batches_tracked) == 3
    # the statistics are of a bf16 convolution of numbers below 4: 8 bits
    torch.testing.assert_close(model.bn.running_mean, eager.bn.running_mean, rtol=0, atol=4 * 2**-8)


def test_conversion_leaves_no_trace(model, x):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = dict(model.__dict__)
    state = torch.get_rng_state()
    bf16(model, example_inputs=(x,))
    assert model.__dict__ == attributes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def through_a_file(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize("via", COPIES)
def test_copies_are_converted_and_independent(model, x, via):
    converted = bf16(model).eval()
    expected = converted(x)
    twin = COPIES[via](converted)
    assert type(twin).__name__ == "Net"
    assert torch.equal(twin(x), expected)
    assert fxamp.report(twin).low_precision_nodes == fxamp.report(converted).low_precision_nodes
    with torch.no_grad():
        twin.head.weight.zero_()
        twin.head.bias.zero_()
    assert torch.equal(converted(x), expected)
    assert not twin(x).any()


@pytest.mark.parametrize("boundaries", [(), ("head",)], ids=["whole", "boundaries"])
def test_a_part_that_leads_back_to_the_converted_model_leads_to_its_copy(model, x, boundaries):
    converted = bf16(model, boundaries=boundaries).eval()
    converted.head.owners = [converted]
    twin = copy.deepcopy(converted)
    assert twin.head.owners[0] is twin is not converted
    assert engine_of(twin) is not None
    assert torch.equal(twin(x), converted(x))


def test_two_conversions_of_one_model_do_not_disturb_each_other(model, x):
    model.eval()
    low, half = bf16(model), fxamp.convert(model, dtype=torch.float16)
    first = low(x)
    assert not torch.equal(half(x), first)
    assert torch.equal(low(x), first)


def test_hooks_on_the_converted_model_and_its_submodules_fire(model, x):
    seen = []
    model.conv.register_forward_hook(lambda *_: seen.append("conv"))
    converted = bf16(model)
    converted.register_forward_hook(lambda *_: seen.append("root"))
    converted(x)
    assert seen == ["conv", "root"]
    assert not model._forward_hooks


def test_weight_writes_by_any_route_are_seen(model, x):
    converted = bf16(model).eval()
    converted(x)
    for write in (
        lambda: model.head.weight.data.mul_(0),
        lambda: setattr(model.head, "weight", nn.Parameter(torch.zeros_like(model.head.weight))),
    ):
        nn.init.ones_(model.head.weight)
        write()
        assert torch.equal(converted(x), model.head.bias.to(torch.bfloat16).float().expand(4, 3))


def test_functional_call_sees_the_swapped_parameters(model, x):
    converted = bf16(model).eval()
    zeros = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    assert not torch.func.functional_call(converted, zeros, (x,)).any()
    assert converted(x).any()


def test_slices_of_a_converted_sequential_run_unconverted():
    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    converted = bf16(body)
    part = converted[:2]
    x = torch.randn(2, 4)
    assert torch.equal(part(x), body[:2](x))
    for twin in (copy.copy(part), *(through(part) for through in COPIES.values())):
        assert type(twin).__name__ == "Sequential"
        assert torch.equal(twin(x), part(x))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_class_that_copies_itself_gives_a_converted_copy(level):
    body, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 4)
    exact = body(x)
    converted = bf16(torch.fx.symbolic_trace(body), opt_level=level, example_inputs=(x,))
    twin = copy.copy(converted)
    assert isinstance(twin, torch.fx.GraphModule) and engine_of(twin) is engine_of(converted)
    assert torch.equal(twin(x), converted(x)) and not torch.equal(twin(x), exact)
    assert all(mine is theirs for mine, theirs in zip(twin.parameters(), converted.parameters(), strict=True))
    assert twin.state_dict()["0.weight"].dtype == torch.float32


def test_a_call_inside_autocast_casts_nothing_twice(model, x):
    converted = bf16(model).eval()
    expected = converted(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(converted(x), expected)


def test_keyword_and_number_arguments(model, x):
    converted = bf16(model).eval()
    expected = converted(x)
    torch.testing.assert_close(converted(x, temperature=2.0), expected / 2, rtol=0, atol=2**-8)
    torch.testing.assert_close(converted(x=x, temperature=4.0), expected / 4, rtol=0, atol=2**-8)
    assert len(engine_of(converted).all_variants()) == 3


def test_two_forwards_before_a_backward(model, x):
    converted = bf16(model).eval()
    one, two = converted(x), converted(2 * x)
    (one.sum() + two.sum()).backward()
    got = model.head.bias.grad
    assert torch.equal(got, torch.full_like(got, 8.0))


def test_frozen_and_unused_parameters_keep_no_gradient(x):
    class Partly(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(2, 2)

    model = Partly()
    model.conv.weight.requires_grad_(False)
    converted = bf16(model)
    converted(x).sum().backward()
    assert model.conv.weight.grad is None
    assert model.unused.weight.grad is None
    assert model.head.weight.grad is not None


def test_dtypes_of_inputs_select_the_graph():
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10)

        def forward(self, tokens):
            return self.head(self.table(tokens))

    converted = bf16(Lookup())
    assert converted(torch.arange(5)).shape == (5, 10)
    assert converted(torch.arange(5, dtype=torch.int32)).shape == (5, 10)


def test_double_backward_reaches_the_weights(model, x):
    converted = bf16(model).eval()
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(converted(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert model.conv.weight.grad.abs().sum() > 0


def test_a_forward_set_on_the_instance_is_refused(model):
    model.forward = lambda x: x
    with pytest.raises(fxamp.OptionError, match="set on the instance"):
        bf16(model)


def tripled(forward, *args):
    return 3 * forward(*args)


WAYS_TO_COPY = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("options", [{}, {"opt_level": "O2"}, {"boundaries": ["0"]}], ids=["O1", "O2", "block"])
@pytest.mark.parametrize("is_inside", [False, True], ids=["whole", "inside"])
@pytest.mark.parametrize("way", WAYS_TO_COPY)
def test_a_forward_set_on_a_converted_model_goes_with_its_copies(way, is_inside, options, x):
    model = bf16(nn.Sequential(Net(), nn.Identity()).eval(), **options)
    part = model[0] if is_inside else model
    part.forward = functools.partial(tripled, part.forward)
    expected, twin = model(x), WAYS_TO_COPY[way](model)
    assert torch.equal(twin(x), expected)
    if way != "copy":  # which shares its parts, as in eager
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        assert torch.equal(twin(x), expected)


class Restored(Net):
    """Has a state of its own for pickles."""

    def __getstate__(self):
        return {"d": self.__dict__, "n": 1}

    def __setstate__(self, state):
        assert state["n"] == 1
        self.__dict__ = state["d"]


def test_a_class_that_unpickles_itself_is_given_its_own_state_alone(x):
    model = bf16(Restored().eval())
    model.forward = functools.partial(tripled, model.forward)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_a_closure_around_a_converted_model_leads_to_the_copy(model, x):
    converted = bf16(model.eval())
    own = converted.forward
    converted.forward = lambda x: 3 * own(x)
    expected, twin = converted(x), copy.deepcopy(converted)
    with torch.no_grad():
        for weight in converted.parameters():
            weight.zero_()
    assert torch.equal(twin(x), expected)


def test_a_forward_set_on_a_converted_model_is_no_part_of_another_conversion(model, x):
    converted = bf16(model)
    converted.forward = functools.partial(tripled, converted.forward)
    with pytest.raises(fxamp.OptionError, match="set on the instance"):
        fxamp.convert(converted, dtype=torch.float16)
    converted.forward = types.MethodType(type(converted).forward, converted)  # Accelerate's way of taking it back
    assert fxamp.convert(converted, dtype=torch.float16)(x).dtype == torch.float32
    around = nn.Sequential(bf16(Net().eval()))
    around[0].forward = functools.partial(tripled, around[0].forward)
    expected = around(x)
    torch.testing.assert_close(bf16(around)(x), expected, rtol=0.03, atol=0.03)


def test_moving_and_retyping_the_converted_model(model, x):
    converted = bf16(model).eval()
    expected = converted(x)
    assert torch.equal(converted.to("cpu").float()(x), expected)
    converted.double()
    assert converted(x.double()).dtype == torch.float64


def test_a_module_exchanged_after_conversion_is_noticed(model, x):
    converted = bf16(model, example_inputs=(x,)).eval()
    converted(x)
    converted.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    assert converted(x).shape == (4, 5)


def test_a_hook_added_after_conversion_fires(model, x):
    converted = bf16(model, example_inputs=(x,))
    converted(x)
    seen = []
    handle = model.head.register_forward_hook(lambda *_: seen.append("head"))
    converted(x)
    handle.remove()
    converted(x)
    assert seen == ["head"]
    assert any(row.op == "linear" and row.precision == "low" for row in fxamp.report(converted).rows)


def test_a_parametrization_added_after_conversion_is_noticed(model, x):
    class Zero(nn.Module):
        def forward(self, weight):
            return weight * 0

    converted = bf16(model, example_inputs=(x,)).eval()
    converted(x)
    nn.utils.parametrize.register_parametrization(model.head, "weight", Zero())
    assert torch.equal(converted(x), model.head.bias.to(torch.bfloat16).float().expand(4, 3))


def test_a_changed_copy_does_not_change_the_original(model, x):
    converted = bf16(model).eval()
    expected = converted(x)
    twin = copy.deepcopy(converted)
    twin.head = nn.Linear(8, 5)
    assert twin(x).shape == (4, 5)
    assert torch.equal(converted(x), expected)


def test_results_with_named_fields_keep_them():
    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).max(1), self.fc(x).sort(0).values

    model = Best()
    ours, theirs = bf16(model)(torch.ones(2, 4)), model(torch.ones(2, 4))
    assert type(ours[0]) is type(theirs[0])
    assert ours[0].values.dtype == torch.float32
    assert torch.equal(ours[0].indices, theirs[0].indices)


def test_a_class_lives_as_long_as_it_is_used(x):
    class Local(Net):
        pass

    model = bf16(Local(), example_inputs=(x,))
    kinds = [weakref.ref(Local), weakref.ref(type(model))]
    assert type(copy.deepcopy(model)) is type(model) is type(bf16(Local()))
    del model
    gc.collect()
    assert kinds[1]() is None  # the last of its instances is gone
    again = bf16(Local(), example_inputs=(x,))
    again(x)
    del again, Local
    gc.collect()
    assert kinds[0]() is None


def _wrapped(converted):
    forward = converted.forward
    converted.forward = lambda x: forward(x) * 2.0


def _as_accelerate_wraps(converted):
    forward = converted.forward.__func__
    converted.forward = types.MethodType(lambda self, x: forward(self, x) * 2.0, converted)


@pytest.mark.parametrize("wrap", [_wrapped, _as_accelerate_wraps])
@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_a_forward_set_on_a_converted_model_is_outside_of_its_graph(wrap, capture, caplog):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    converted = fxamp.convert(model, torch.bfloat16, capture=capture)
    wrap(converted)
    for _ in range(3):
        torch.testing.assert_close(converted(x), model(x) * 2.0, rtol=0.02, atol=0.02)
    assert len(engine_of(converted).graphs()) == 1
    assert "has changed" not in caplog.text


class Completing(nn.Module):
    """As torch_geometric's aggregations: a call of its own finds out what forward needs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def __call__(self, x, index, size=None):
        return super().__call__(x, index, size=int(index.max()) + 1 if size is None else size)

    def forward(self, x, index, size=None):
        return x.new_zeros(size, 8).index_add(0, index, self.fc(x))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_example_is_completed_by_the_call_of_the_class(opt_level):
    model, inputs = Completing(), (torch.randn(6, 8), torch.tensor([0, 0, 1, 1, 2, 2]))
    expected = model(*inputs)
    converted = fxamp.convert(model, torch.bfloat16, inputs, opt_level=opt_level)
    torch.testing.assert_close(converted(*inputs), expected, rtol=0.02, atol=0.02)
    assert len(engine_of(converted).all_variants()) == 1, "the example is the call"
    assert fxamp.find_nan(converted, inputs) is None


def test_a_call_of_the_class_that_fails_fails_as_it_does():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'index'"):
        fxamp.convert(Completing(), torch.bfloat16, (torch.randn(6, 8),))


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def training_step(self, x):
        return self.net(x).square().mean()


def test_a_class_is_not_noted_as_a_subclass_of_itself(x):
    made = []

    class Noted(Net):
        def __init_subclass__(cls, name):
            made.append(name)

    class Named(Noted, name="named"):
        pass

    model = Named().eval()
    converted = fxamp.convert(model)
    assert isinstance(converted, Named) and type(converted).__mro__[1:] == Named.__mro__
    torch.testing.assert_close(converted(x), model(x), rtol=0.02, atol=0.02)
    assert made == ["named"]


@pytest.mark.parametrize("boundaries", [None, ["0", "1"]])
def test_attributes_in_slots_are_taken_along(boundaries):
    class Slotted(nn.Linear):
        __slots__ = ("empty", "factor")

        def forward(self, x):
            return super().forward(x) * self.factor

    model = nn.Sequential(Slotted(4, 4), Slotted(4, 4))
    model[0].factor = model[1].factor = 2.0
    x = torch.randn(3, 4)
    for each in (model, model[0]):
        converted = fxamp.convert(each, boundaries=None if each is model[0] else boundaries)
        torch.testing.assert_close(converted(x), each(x), rtol=0.02, atol=0.02)
        assert not hasattr(converted, "empty")


def test_a_class_without_forward_is_warned_about(caplog):
    fxamp.convert(WithoutForward(), torch.bfloat16)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "has no forward" in said[0] and "model.net = fxamp.convert(model.net)" in said[0]


def test_without_forward_and_with_boundaries_nothing_is_warned_of(caplog):
    fxamp.convert(WithoutForward(), torch.bfloat16, boundaries=["net"])
    assert "has no forward" not in caplog.text


def test_the_text_of_a_graph_is_in_tracebacks_while_there_is_the_graph():
    converted = fxamp.convert(nn.Sequential(nn.Linear(4, 4)), dtype=torch.bfloat16)
    converted(torch.randn(2, 4))
    name = engine_of(converted).all_variants()[0].compiled.run.__code__.co_filename
    assert "linear" in "".join(linecache.getlines(name))
    del converted
    gc.collect()
    assert name not in linecache.cache
