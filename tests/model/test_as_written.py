"""Models at O2 and O3 whose forward no graph holds: it runs as written, what it calls as graphs."""

import collections
import contextlib
import copy
import gc
import logging
import pickle
import re
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.model.engine import Engine, engine_of
from fxamp.model.seen import Family
from fxamp.model.written import Written
from tests.choosing import Block, Choosing, batch, trained

LOWS = [torch.float16, torch.bfloat16]


class Experts(nn.Module):
    """A mixture of experts that loops over those that are hit."""

    def __init__(self, width=16, count=4):
        super().__init__()
        self.gate, self.experts = nn.Linear(width, count), nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x):
        weights, chosen = F.softmax(self.gate(x).float(), -1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().flatten()
            out.index_add_(0, rows, (self.experts[number](x[rows]) * weights[rows, None]).to(x.dtype))
        return out


def blocks_of(converted):
    return sorted(engine_of(converted).blocks)


def converted_o2(model, dtype=torch.bfloat16, **options):
    return fxamp.convert(model, dtype, opt_level="O2", **options)


def sgd(model):
    return fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("kind", [Choosing, Experts])
@pytest.mark.parametrize("is_given", [True, False], ids=["example", "none"])
def test_it_trains_as_in_float32_and_keeps_float32_checkpoints(kind, dtype, is_given):
    torch.manual_seed(0)
    model = kind()
    plain, low = copy.deepcopy(model), copy.deepcopy(model)
    converted = converted_o2(model, dtype, example_inputs=(batch(0),) if is_given else None)
    expected = trained(plain, torch.optim.SGD(plain.parameters(), 0.1))
    autocast = trained(low, torch.optim.SGD(low.parameters(), 0.1), autocast=dtype)
    found = trained(converted, sgd(converted), scaler=fxamp.LossScaler(64.0))
    assert (found - expected).norm() <= 2 * (autocast - expected).norm()
    for name, weight in converted.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=0.01)
    stored = {name for name, weight in converted.named_parameters() if weight.dtype == dtype}
    assert stored == {name for name, _ in plain.named_parameters() if "norm" not in name}


def test_the_largest_modules_that_a_graph_holds_are_graphs_and_equal_ones_share_them():
    torch.manual_seed(0)
    choosing, experts = converted_o2(Choosing()), converted_o2(Experts())
    for model in (choosing, experts):
        trained(model, sgd(model))
    assert blocks_of(choosing) == ["head", "right", "stem"] or blocks_of(choosing) == ["head", "left", "right", "stem"]
    found = engine_of(experts)
    assert {path for path in found.blocks if path != "gate"} == {f"experts.{number}" for number in range(4)}
    assert len({id(inner) for inner in found.blocks.values()}) == 2
    report = fxamp.report(experts)
    assert {row.module for row in report.rows} >= {"gate", "experts.0.up"}
    assert report.outside[0].startswith(
        "all weights are in graphs of parts, around which there is a forward that runs as"
    )
    assert "test_as_written.py" in report.outside[0] and len(report.outside) == 1


def test_experts_that_no_row_takes_have_no_gradient():
    torch.manual_seed(0)
    converted = converted_o2(Experts())
    with torch.no_grad():
        converted.gate.bias.copy_(torch.tensor([1e3, 0.0, 0.0, 0.0]))
    converted(batch(0)).sum().backward()
    has = {
        name.split(".")[1] for name, weight in converted.named_parameters() if weight.grad is not None and "ex" in name
    }
    assert has == {"0"}
    assert converted.gate.weight.grad is not None and converted.gate.weight.grad.dtype == torch.bfloat16


class Stateful(nn.Module):
    """What forward does to the model itself, beside what no graph holds."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), nn.Sequential(Block(), nn.Dropout(0.5), Block()), Block()])
        self.norm = nn.BatchNorm1d(16)
        self.named = nn.ModuleDict({"a": Block(), "b": nn.Identity()})
        self.again, self.steps, self.last, self.current = self.layers[0], 0, None, None
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x):
        self.steps += 1
        self.current = self.layers[self.steps % 2]
        for layer in self.layers[:2]:
            x = layer(x)
        x = self.named["a" if x.sum().item() > 0 else "b"](self.norm(x))
        self.seen += x.detach().float().mean(0)
        self.last = x.detach()
        x = self.again(self.layers[1][:2](x))
        assert [type(child).__name__ for child in self.layers] == ["Block", "Sequential", "Block"]
        assert isinstance(self.layers[0], Block) and self.again is self.layers[0] and len(self.layers) == 3
        assert set(self.named) == {"a", "b"} and [name for name, _ in self.named_children()][:1] == ["layers"]
        return x


def test_what_forward_does_to_the_model_it_does():
    torch.manual_seed(0)
    model = Stateful()
    plain = copy.deepcopy(model)
    converted = converted_o2(model)
    kinds = [type(module) for module in model.modules()]
    for step in range(3):
        torch.manual_seed(step)
        expected = plain(batch(step))
        torch.manual_seed(step)
        found = converted(batch(step))
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert (converted.steps, converted.current is converted.layers[1]) == (3, True)
    torch.testing.assert_close(converted.seen, plain.seen, rtol=0.05, atol=0.05)
    torch.testing.assert_close(converted.norm.running_mean, plain.norm.running_mean, rtol=0.05, atol=0.01)
    assert converted.norm.num_batches_tracked == 3 and converted.last.shape == (8, 16)
    assert [type(module) for module in converted.modules()][1:] == kinds[1:]
    assert type(converted.layers[0]) is Block and converted.layers[0] is model.layers[0]


class Exact(Choosing):
    """A head in float32, and a part of it."""

    def __init__(self):
        super().__init__()
        self.table, self.recurrent = nn.Linear(16, 16), nn.GRU(16, 16)

    def forward(self, x):
        h = self.left(self.stem(x))
        h = h if h.sum().item() > 0 else -h
        with torch.autocast("cpu", enabled=False):
            h = self.recurrent(self.right(h.float()) @ self.table.weight)[0]
            assert h.dtype == torch.float32
            return self.head(h)


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("has_gradients", [True, False])
def test_where_forward_turns_autocast_off_it_is_float32(dtype, has_gradients):
    torch.manual_seed(0)
    model = Exact()
    exact, plain = copy.deepcopy(model), copy.deepcopy(model)
    converted = converted_o2(model, dtype)
    with torch.no_grad():
        for name, weight in converted.named_parameters():
            exact.get_parameter(name).copy_(weight)  # rounded as the converted model's are
    with torch.set_grad_enabled(has_gradients):
        with torch.autocast("cpu", dtype):
            expected = exact(batch(0))
        found = converted(batch(0))
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    if has_gradients:
        assert trained(converted, sgd(converted)).isfinite().all() and plain is not model


class Again(torch.autograd.Function):
    """Runs a layer without a graph of autograd's, and again in backward, on a state that it joins with the weight."""

    @staticmethod
    def forward(ctx, layer, x, weight):
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        joined = torch.cat([x.flatten(), torch.zeros_like(weight).flatten()])
        x = joined[: x.numel()].view_as(x).detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(x)
        return None, *torch.autograd.grad(result, (x, weight), gradient)


class Adjoint(nn.Module):
    """The solver of an ordinary differential equation gets its gradients so."""

    def __init__(self):
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x)
        if x.sum() > 1e6:
            x = -x
        return self.head(Again.apply(self.layer, x, self.layer.weight))


@pytest.mark.parametrize("dtype", LOWS)
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_layer_runs_in_the_backward_of_a_function_of_the_models_own(opt_level, dtype):
    torch.manual_seed(0)
    model = Adjoint()
    low, converted = copy.deepcopy(model), fxamp.convert(copy.deepcopy(model), dtype, opt_level=opt_level)
    model(batch(0)).sum().backward()
    with torch.autocast("cpu", dtype):
        low(batch(0)).sum().backward()
    converted(batch(0)).sum().backward()
    for expected, autocast, found in zip(*(each.parameters() for each in (model, low, converted)), strict=True):
        scale = torch.finfo(dtype).eps * expected.grad.norm()  # O2 stores gradients rounded
        assert (found.grad.float() - expected.grad).norm() <= 2 * (autocast.grad - expected.grad).norm() + scale


def test_weights_that_forward_writes_are_written():
    class Clamping(Choosing):
        def forward(self, x):
            out = super().forward(x)
            with torch.no_grad():
                for weight in (self.head.weight, self.head.bias):
                    weight.clamp_(-0.01, 0.01)
                self.stem.up.bias.data.mul_(0)
            return out

    torch.manual_seed(0)
    converted = converted_o2(Clamping())
    converted(batch(0))
    assert converted.head.weight.abs().max() <= 0.0101 and converted.head.bias.abs().max() <= 0.0101
    assert not converted.stem.up.bias.any() and not converted.state_dict()["stem.up.bias"].any()


class Constrained(Choosing):
    """Holds weights to what it wants before it reads them, in float32 and outside of torch's layers."""

    def __init__(self, renews=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.ones(16))
        self.scale, self.renews = nn.LayerNorm(16), renews

    def forward(self, x):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for weight in (self.bias, self.scale.weight, self.head.bias):
                weight.clamp_(max=0.5)
            if self.renews:
                self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
            else:
                self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.3))
        out = super().forward(self.scale(F.linear(x, self.weight, self.bias)))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.bias.mul_(0.9)
        return out


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("renews", [False, True])
@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_what_forward_writes_into_weights_it_reads_in_float32_is_read_and_kept(opt_level, renews, no_gradients):
    torch.manual_seed(0)
    model = Constrained(renews)
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, torch.bfloat16, opt_level=opt_level, example_inputs=(batch(0),))
    expected = trained(plain, torch.optim.SGD(plain.parameters(), 0.01))
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(converted.parameters(), 0.01))
    assert trained(converted, optimizer) == pytest.approx(expected, rel=0.05)
    with no_gradients():
        torch.testing.assert_close(converted(batch(9)), plain(batch(9)), rtol=0.05, atol=0.05, check_dtype=False)
    for name, value in converted.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0.01, atol=0.01)


class Pinned(Choosing):
    """Holds one number of a weight where autocast is off."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x):
        h = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            weight = self.last.weight
            with torch.no_grad():
                weight[0, 0] = 0.25
            return F.linear(h.float(), weight, self.last.bias)


def test_what_forward_leaves_of_a_weight_that_it_writes_keeps_its_low_bits():
    torch.manual_seed(0)
    model = Pinned()
    converted = converted_o2(copy.deepcopy(model))
    converted.last.requires_grad_(False)
    fxamp.MasterWeightOptimizer(torch.optim.SGD(converted.parameters(), 0.01))
    converted(batch(0))
    expected = model.last.weight.detach().clone()
    expected[0, 0] = 0.25
    assert converted.last.weight.dtype == torch.bfloat16
    assert torch.equal(converted.state_dict()["last.weight"], expected)


class Slotted(Choosing):
    __slots__ = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Listed(Choosing, list):
    def forward(self, x):
        self.append(len(x))
        return super().forward(x)

    calls = property(len)
    __eq__, __hash__ = nn.Module.__eq__, nn.Module.__hash__


@pytest.mark.parametrize(("kind", "is_inside"), [(Slotted, True), (Slotted, False), (Listed, True)])
def test_what_an_object_keeps_beside_its_attributes_forward_reads_and_writes(kind, is_inside):
    torch.manual_seed(0)
    slotted = kind()
    model = nn.Sequential(slotted, nn.Linear(3, 3)) if is_inside else slotted
    expected = model(batch(0))
    converted = converted_o2(model)
    assert converted(batch(0)).shape == expected.shape
    torch.testing.assert_close(converted(batch(0)), expected, rtol=0.05, atol=0.02)
    assert is_inside or converted.calls == 3


class Keeping(Choosing):
    """Keeps modules in containers of its own, and asks for their classes."""

    def forward(self, x):
        self.used = [self.stem, self.left]
        other = copy.copy(self.stem)
        other.tag = "copy"
        assert not hasattr(self.stem, "tag") and other.up.weight is self._modules.copy()["stem"].up.weight
        assert list(reversed(self._modules)) == ["head", "right", "left", "stem"]
        assert self.stem.__class__ is Block and self.__class__ in type(self).__mro__
        return super().forward(x)


def test_modules_that_forward_keeps_elsewhere_are_equal_to_the_models_and_are_copied_as_such():
    torch.manual_seed(0)
    converted = converted_o2(Keeping())
    converted(batch(0)).sum().backward()
    assert converted.used == [converted.stem, converted.left] and converted.used[0] != converted.left
    assert {converted.stem: 1, converted.left: 2}[converted.used[1]] == 2
    twin, loaded = copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))
    assert twin.used[0] is twin.stem and loaded.used[0] is loaded.stem and type(twin.used[0]) is Block


class Comparing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), nn.Linear(16, 16), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = 2 * layer(x) if type(layer) is Block else layer(x)
        return x if x.sum().item() > 0 else -x


def test_a_forward_that_compares_classes_finds_them():
    torch.manual_seed(0)
    model = Comparing()
    expected = model(batch(0))
    converted = converted_o2(model)
    for _ in range(2):
        torch.testing.assert_close(converted(batch(0)), expected, rtol=0.05, atol=0.1)


def test_hooks_find_a_module_by_what_it_is():
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    names = {module: name for name, module in converted.named_modules()}
    seen = []
    for child in converted.children():
        child.register_forward_hook(lambda module, args, out: seen.append(names[module]))
        child.register_full_backward_hook(lambda module, *_: seen.append(names[module]))
    converted(batch(0)).sum().backward()
    assert sorted(seen) in (sorted(2 * ["stem", side, "head"]) for side in ("left", "right"))


def test_flags_and_hooks_that_are_set_by_an_older_reference_are_seen():
    torch.manual_seed(0)
    converted = converted_o2(Stateful())
    inner, layer = converted.layers[1], converted.layers[0]
    converted(batch(0))
    seen = []
    inner.eval()
    layer.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__) or 2 * out)
    doubled = [converted(batch(1)) for _ in range(2)]
    assert seen == ["Block"] * 4  # in two places of each call
    assert not converted.layers[1][1].training and converted.layers[0].training
    layer._forward_hooks.clear()
    once = converted(batch(1))
    assert not torch.allclose(doubled[0], once, rtol=0.05, atol=0.1)
    torch.testing.assert_close(doubled[0], doubled[1], rtol=0.05, atol=0.1)  # no dropout: `inner` is not trained


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_compute_the_same_again(reentrant, opt_level, caplog):
    class Checkpointing(Choosing):
        def forward(self, x, saves=True):
            h = checkpoint(self.stem, x, use_reentrant=reentrant) if saves else self.stem(x)
            chosen = self.left if h.sum().item() > 0 else self.right
            return self.head(checkpoint(lambda y: chosen(y), h, use_reentrant=reentrant) if saves else chosen(h))

    torch.manual_seed(0)
    converted = fxamp.convert(Checkpointing(), torch.bfloat16, opt_level=opt_level)
    gradients = []
    for saves in (True, False):
        x = batch(0).requires_grad_()
        result = converted(x, saves)
        assert {"left", "right"}.intersection(blocks_of(converted)) and "stem" in blocks_of(converted)
        result.square().sum().backward()
        gradients.append([x.grad, *(weight.grad for weight in converted.parameters() if weight.grad is not None)])
        converted.zero_grad()
    assert len(gradients[0]) == len(gradients[1]) > 8
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


class Deciding(nn.Module):
    """No graph holds it, but one holds what is inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        h = self.inner(x)
        return h if h.sum().item() > -1e9 else x


class Taught(Choosing):
    """Its right block is renewed at each call, and asked without gradients."""

    def __init__(self, no_gradients):
        super().__init__()
        self.right = Deciding(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
        self.no_gradients = no_gradients

    def forward(self, x):
        h = self.stem(x)
        with torch.no_grad():
            for weight in self.right.parameters():
                weight.lerp_(torch.ones_like(weight), 0.25)
        with self.no_gradients():
            target = self.right(h)
        return (self.left(h) - target.clone() if h.sum().item() > -1e9 else h).square().mean()


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("no_gradients", [torch.no_grad, torch.inference_mode])
def test_a_teacher_in_a_step_of_training_is_a_graph(no_gradients, opt_level):
    torch.manual_seed(0)
    model = Taught(no_gradients)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level=opt_level)
    for seed in range(3):
        expected, found = model(batch(seed)), converted(batch(seed))
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected, rtol=0.05, atol=1e-3)
    inner = engine_of(converted).way.engines.values()
    paths = {path for engine in inner for variant in engine.graphs() for path in variant.blocks}
    assert paths >= {"left", "right.inner", "stem"}, paths
    assert all(weight.grad is None for weight in converted.right.parameters())


def test_copies_and_pickles_hold_no_view():
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    trained(converted, sgd(converted), 1)
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(twin.stem) is Block and twin.stem is not converted.stem
        torch.testing.assert_close(twin(batch(3)), converted(batch(3)), rtol=0, atol=0)
        with torch.no_grad():
            twin.head.bias.add_(1)
        torch.testing.assert_close(twin(batch(3)), converted(batch(3)) + 1, rtol=0, atol=0.05)


def test_a_module_that_was_exchanged_is_called():
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    before = converted(batch(0))
    converted.head = nn.Linear(16, 5)
    assert converted(batch(0)).shape == (8, 5) and before.shape == (8, 3)
    converted.stem.up = nn.Identity()
    with pytest.raises(RuntimeError, match="normalized_shape"):
        converted(batch(0))


def test_of_a_model_that_is_gone_nothing_is_left():
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    converted(batch(0)).sum().backward()
    parts = [weakref.ref(module) for module in converted.modules()]
    del converted
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


def test_errors_of_forward_stand_alone():
    class Failing(Choosing):
        def forward(self, x):
            raise ValueError(f"no {self.stem(x).sum().item()}")

    with pytest.raises(ValueError, match="no ") as found:
        converted_o2(Failing())(batch(0))
    assert found.value.__context__ is None


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_symbolic_capture_refuses(opt_level):
    plain = Choosing()
    for example in (None, (batch(0),)):
        with pytest.raises(fxamp.CaptureError, match="traced value"):
            fxamp.convert(plain, torch.bfloat16, example, opt_level, capture="symbolic")
    assert {weight.dtype for weight in plain.parameters()} == {torch.float32}


def test_everything_low_runs_so_too():
    torch.manual_seed(0)
    model = Choosing()
    plain = copy.deepcopy(model).bfloat16()
    converted = fxamp.convert(model, torch.bfloat16, opt_level="O3")
    assert {weight.dtype for weight in converted.parameters()} == {torch.bfloat16}
    found, expected = converted(batch(0)), plain(batch(0).bfloat16())
    torch.testing.assert_close(found, expected.float(), rtol=0.05, atol=0.02)
    found.sum().backward()
    assert converted.stem.norm.weight.grad.dtype == torch.bfloat16


def test_what_a_part_gives_has_the_dtype_that_autocast_gives_it():
    class Noting(Choosing):
        def forward(self, x):
            self.seen = self.head(self.stem(x)).dtype
            return super().forward(x)

    for opt_level in ("O1", "O2"):
        converted = fxamp.convert(Noting(), torch.bfloat16, opt_level=opt_level)
        assert converted(batch(0)).dtype == torch.float32
        assert converted.seen == torch.bfloat16


def test_a_call_that_was_refused_is_not_traced_again(monkeypatch):
    traced = []
    build = Engine._build
    monkeypatch.setattr(Engine, "_build", lambda *given: (traced.append(1), build(*given))[1])
    converted = converted_o2(Choosing())
    converted(batch(0))
    once = len(traced)
    for _ in range(3):
        converted(batch(0))
    assert len(traced) == once >= 3


class Numbered(nn.Module):
    """A layer that knows its number, and decides on what it gives where that is small."""

    def __init__(self, number, deciding):
        super().__init__()
        self.number, self.deciding, self.block, self.other = number, deciding, Block(), Block()

    def forward(self, x):
        h = self.block(x)
        return self.other(h if self.number >= self.deciding or h.sum().item() > 0 else -h)


@pytest.mark.parametrize(("deciding", "tried"), [(6, 2), (1, 6), (2, 2)])
def test_what_two_layers_of_a_stack_were_refused_for_the_others_are_not_traced_for(deciding, tried, monkeypatch):
    traced = []
    build = Engine._build
    monkeypatch.setattr(
        Engine, "_build", lambda self, module, *args: traced.append(module) or build(self, module, *args)
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(Numbered(number, deciding) for number in range(6)))
    plain = copy.deepcopy(model)
    converted = converted_o2(model)
    torch.testing.assert_close(converted(batch(0)), plain(batch(0)), rtol=0.05, atol=0.3)
    assert sum(isinstance(module, Numbered) for module in traced) == tried
    converted(batch(1))
    assert sum(isinstance(module, Numbered) for module in traced) == tried
    assert any(path.startswith("5") for path in blocks_of(converted))


class Checked(Numbered):
    """A layer that decides on what it gives while a flag says so."""

    def __init__(self, number):
        super().__init__(number, 0)
        self.checks = True

    def forward(self, x):
        h = self.block(x)
        return self.other(-h if self.checks and h.sum().item() > 0 else h)


class Stack(Choosing):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Checked(number) for number in range(5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


def test_layers_that_were_not_tried_are_once_their_flags_have_changed():
    torch.manual_seed(0)
    converted = converted_o2(Stack())
    converted(batch(0))
    paths = {f"layers.{number}" for number in range(5)}
    assert not paths.intersection(blocks_of(converted))
    for layer in converted.layers:
        layer.checks = False
    converted(batch(1))
    assert paths.issubset(blocks_of(converted))


def test_without_gradients_only_parts_with_a_graph_look_for_one(caplog):
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    with torch.no_grad():
        first = converted(batch(0))
    assert not blocks_of(converted)
    (said,) = fxamp.report(converted).outside
    assert said.startswith("without gradients forward runs as under torch.autocast: ")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    converted(batch(0)).sum().backward()
    known = blocks_of(converted)
    with torch.no_grad():
        again = converted(batch(0))
    assert known and blocks_of(converted) == known
    torch.testing.assert_close(first, again, rtol=0.05, atol=0.02)


def test_it_runs_under_torch_compile():
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    expected = converted(batch(0))
    compiled = torch.compile(converted, backend="eager")
    for _ in range(2):
        found = compiled(batch(0))
        assert torch.equal(found, expected)
    found.sum().backward()
    assert converted.stem.up.weight.grad is not None


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_what_its_author_keeps_in_float32_runs_so(opt_level):
    class Protected(Choosing):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                exact = self.right(self.stem(x.float()))
                self.seen = exact.dtype, (exact * 3).detach()
            return super().forward(exact)

    torch.manual_seed(0)
    model = Protected()
    for weight in model.parameters():  # so that the stored numbers are exact
        weight.data = weight.bfloat16().float()
    x = batch(0).bfloat16().float()
    expected = model.right(model.stem(x))
    converted = fxamp.convert(model, torch.bfloat16, opt_level=opt_level)
    for _ in range(2):
        found = converted(x)
        assert converted.seen[0] == torch.float32
        torch.testing.assert_close(converted.seen[1], expected * 3, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert all(weight.grad is not None for weight in converted.stem.parameters())
    assert blocks_of(converted), "what is not protected runs in graphs"


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "pruning"])
def test_a_weight_that_torchs_own_hook_makes_is_float32_where_autocast_is_off(kind):
    class Protected(Choosing):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                h = self.right(self.stem(x.float()))
            return super().forward(h)

    torch.manual_seed(0)
    model, layers = Protected(), nn.utils
    make = {
        "weight_norm": layers.weight_norm,
        "spectral_norm": layers.spectral_norm,
        "pruning": lambda layer: layers.prune.l1_unstructured(layer, "weight", 0.3),
    }
    make[kind](model.right.up)
    expected = model.eval()(batch(0)).detach()
    found = fxamp.convert(model, torch.bfloat16, opt_level="O3")(batch(0))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    found.sum().backward()


def test_nothing_that_forward_keeps_of_itself_leads_to_a_view():
    class Keeping(Choosing):
        def forward(self, x):
            before = {name: child.forward for name, child in self.named_children()}
            for name, child in self.named_children():  # as transformers 4.57 does where it collects hidden states
                child.forward = lambda *given, own=before[name]: own(*given)
            self.method, self.first = self.stem.extra_repr, self.stem
            y = super().forward(x)
            for name, child in self.named_children():
                child.forward = before.get(name, child.forward)
            return y

    torch.manual_seed(0)
    model = Keeping()
    expected = model.stem(batch(0))
    converted = converted_o2(model)
    for _ in range(2):
        converted(batch(0)).sum().backward()
    assert converted.method.__self__ is converted.stem is converted.first and type(converted.first) is Block
    for child in converted.children():
        forward = vars(child)["forward"]
        assert forward.__self__ is child and forward.__func__ is type(child).forward
    pickle.loads(pickle.dumps(converted.stem))
    torch.testing.assert_close(model.stem.float()(batch(0)), expected, rtol=0.05, atol=0.05)


def test_what_of_it_runs_how_is_told(caplog):
    torch.manual_seed(0)

    class Direct(Choosing):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return super().forward(x) + (self.table @ self.table).mean()

    with caplog.at_level(logging.INFO, "fxamp"):
        converted = converted_o2(Direct(), torch.bfloat16)
        converted(batch(0)).sum().backward()
        converted(batch(1)).sum().backward()
    told = [record for record in caplog.records if "not as a symbolic graph" in record.message]
    assert [record.levelname for record in told] == ["INFO"] and "Direct: runs as under torch.autocast" in told[
        0
    ].message
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and re.match(r"most of \S*Direct was not converted: ", warned[0])
    assert re.search(r"outside of every graph \(table.*\), in a forward that runs as under torch.autocast", warned[0])
    report = fxamp.report(converted)
    assert "(table)" in report.outside[0] and not any("no graph was captured yet" in text for text in report.advice)
    reason = fxamp.explain(converted, "stem.up")
    assert "linear" in str(reason)
    moved = fxamp.what_if(converted, deny=["linear"])
    assert moved.rows and all(row.precision != "low" for row in moved.rows if row.op == "linear")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("op", ["linear", "gelu"])
def test_a_list_that_is_changed_holds_for_layers_that_autocast_would_run(op, opt_level):
    torch.manual_seed(0)
    model = Choosing()
    with torch.no_grad():
        inner = model.right(model.stem(batch(0)))  # what the head reads, of either block
    converted = fxamp.convert(
        model, torch.bfloat16, opt_level=opt_level, lists=fxamp.OpLists.default().override(deny=[op])
    )
    converted(batch(0)).sum().backward()
    dtypes = []
    handle = converted.head.register_forward_hook(lambda _, given, out: dtypes.append(out.dtype))
    converted(batch(0))
    handle.remove()
    assert inner.dtype == torch.float32 and dtypes == [torch.float32 if op == "linear" else torch.bfloat16]
    assert ("head" in blocks_of(converted)) is (op == "linear" or opt_level == "O2")


def test_a_model_of_which_no_graph_is_made_says_so():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, 16))

        def forward(self, x):
            y = x @ self.table
            return y if y.sum().item() > 0 else -y

    converted = converted_o2(Bare())
    assert fxamp.report(converted).is_preview
    converted(batch(0)).sum().backward()
    report = fxamp.report(converted)
    assert not report.is_preview and not report.advice and "(table)" in report.outside[0]


def test_a_watch_for_nan_sees_into_parts_old_and_new_and_leaves_them_afterwards():
    torch.manual_seed(0)
    converted = converted_o2(Choosing(), torch.float16)
    x = batch(0)
    converted(x)  # the stem and one side are graphs by now
    with torch.no_grad():
        converted.stem.down.weight.mul_(-1)
        converted.head.weight.fill_(float("inf"))
        other = converted(x)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match=r"in module head") as found, fxamp.watch_nan(converted):
            converted(x)
        assert "first that is not finite" in str(found.value)
    parts = list(engine_of(converted).way.engines.values())
    assert len(parts) >= 2 and all(part.workshop is engine_of(converted).workshop for part in parts)
    assert not torch.isfinite(other).all()


def test_frozen_parts_stay_frozen():
    torch.manual_seed(0)
    converted = converted_o2(Choosing())
    converted(batch(0)).sum().backward()
    with torch.no_grad():
        before = converted(batch(0))
        converted.freeze()
        assert torch.equal(converted(batch(0)), before)


def test_copies_share_the_graphs_of_parts():
    converted = converted_o2(Choosing())
    twin = copy.deepcopy(converted)
    converted(batch(0)).sum()
    made = fxamp.report(converted).rows
    assert torch.equal(twin(batch(0)), converted(batch(0)))
    assert len(fxamp.report(twin).rows) == len(made)


class Memory:
    """What a graph cannot take: an object that holds what an earlier call computed."""

    def __init__(self, value):
        self.value = value


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), norm, nn.Linear(8, 8)

    def forward(self, x, memory=None):
        y = self.up(x)
        return self.down(self.norm(y if memory is None else y + memory.value))


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.LayerNorm((4, 8)), nn.RMSNorm((4, 8)), nn.BatchNorm1d(4)], ids=str
)
def test_norms_of_any_shape_take_such_a_call(norm, has_gradients):
    torch.manual_seed(0)
    model, x, memory = Net(copy.deepcopy(norm)).eval(), torch.randn(2, 4, 8), Memory(torch.randn(2, 4, 8))
    plain = copy.deepcopy(model)
    converted = converted_o2(model, example_inputs=(x,))
    stored = {name: weight.dtype for name, weight in converted.named_parameters()}
    with torch.set_grad_enabled(has_gradients):
        expected, found = plain(x, memory), converted(x, memory)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = plain(x, memory)
    assert found.dtype == torch.float32 and not torch.equal(found, expected)
    assert (found - expected).norm() <= 1.5 * (autocast - expected).norm()
    assert {name: weight.dtype for name, weight in converted.named_parameters()} == stored


class Summed(nn.Module):
    """What PEFT's LoRA of a parameter puts on it."""

    def __init__(self, other):
        super().__init__()
        self.__dict__["other"] = other

    def forward(self, weight):
        return weight + self.other


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.weight)


class Adapted(nn.Module):
    """Its part is of another class for the time of a call, as PEFT's `ParamWrapper` has it."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = Mixed(), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        parametrize.register_parametrization(self.base, "weight", Summed(self.b.weight @ self.a.weight), unsafe=True)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class DecidesAround(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), Adapted(), nn.Sequential(nn.Linear(8, 8)))

    def forward(self, x):
        y = self.blocks(x)
        return y * 2 if y.sum() > -1e9 else y


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_forward_may_parametrize_a_part_for_its_call(opt_level, monkeypatch):
    built, build = [], Engine._build
    monkeypatch.setattr(Engine, "_build", lambda *given: built.append(type(given[1]).__name__) or build(*given))
    torch.manual_seed(0)
    plain, x = DecidesAround(), torch.randn(4, 8)
    converted = fxamp.convert(copy.deepcopy(plain), torch.bfloat16, opt_level=opt_level)
    plain(x).square().mean().backward()
    base, kept = converted.blocks[1].base, []
    for _ in range(6):
        converted.zero_grad()
        converted(x).square().mean().backward()
        gc.collect()
        kept.append(sum(isinstance(each, nn.Module | torch.Tensor) for each in gc.get_objects()))
        assert type(base) is Mixed and list(base._parameters) == ["weight"]
    for (name, found), (_, expected) in zip(converted.named_parameters(), plain.named_parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert (found.grad.float() - expected.grad).norm() < 0.03 * expected.grad.norm(), name
    assert kept[-1] == kept[2]  # nothing is kept of a call
    assert not any(name.startswith("Parametrized") for name in built), built


class AsksProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        y = F.linear(x, self.weight)
        return -y if y.detach().sum() > 1e30 else y


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_denied_part_that_runs_as_written_is_given_float32(opt_level, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), AsksProduct(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    expected = model(x).detach()
    converted = fxamp.convert(model, torch.bfloat16, opt_level=opt_level, overrides={"1": "deny"})
    for _ in range(2):
        result = converted(x)
        result.sum().backward()
        torch.testing.assert_close(result, expected, rtol=0.05, atol=0.05)
    assert "0" in blocks_of(converted) and "left to Dynamo" not in caplog.text


class Fills(nn.Module):
    def __init__(self, has_weights):
        super().__init__()
        self.fc = nn.Linear(8, 8) if has_weights else None

    def forward(self, x, cache, mask):
        y = x if self.fc is None else self.fc(x)
        cache.append(y.shape[0])
        mask.mul_(0)
        return -y if y.detach().sum() > 1e30 else y


class GivesOn(nn.Module):
    def __init__(self, has_weights):
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), Fills(has_weights)

    def forward(self, x, cache, mask):
        y = self.part(self.first(x), cache, mask)
        return -y if y.detach().sum() > 1e30 else y


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_denied_part_writes_into_what_it_is_given(dtype, has_weights, opt_level):
    converted = fxamp.convert(GivesOn(has_weights), torch.bfloat16, opt_level=opt_level, overrides={"part": "deny"})
    for _ in range(2):
        cache, mask = [], torch.ones(4, dtype=dtype)
        converted(torch.randn(4, 8), cache, mask).sum().backward()
        assert cache == [4] and mask.tolist() == [0.0] * 4


class InContainers(nn.Module):
    """Reads features as a detection head does; tells which precision it computed in."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.dtypes = set()

    def forward(self, features, names, pair):
        y = 0
        for each in (*features, *names["inner"].values(), *pair):
            self.dtypes.add(each.exp().dtype)
            y = y + F.linear(each.exp(), self.weight)
        features.append(y)
        del names["gone"]
        names["sum"] = y.detach().numpy().sum()
        features[0].mul_(2)
        return y


class AroundContainers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), InContainers()

    def forward(self, x):
        y, z = self.first(x), self.first(x + 1)
        features, inner = [y, x], collections.OrderedDict(z=z)
        names, pair = {"inner": inner, "gone": y}, (z, features)[:1]
        names["itself"] = names
        result = self.part(features, names, pair)
        self.seen = float(names["sum"]), list(names), names["itself"] is names, features[1] is x, features[0] is y
        return result + features[2] + features[0] + names["inner"]["z"] * y.detach().float().numpy().size


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_containers_that_a_denied_part_is_given_hold_float32(opt_level):
    torch.manual_seed(0)
    model, x = AroundContainers(), torch.randn(4, 8)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level=opt_level, overrides={"part": "deny"})
    with torch.no_grad():
        expected = model(x)
        for _ in range(2):
            torch.testing.assert_close(converted(x), expected, rtol=0.05, atol=0.5)
            assert converted.seen[1:] == model.seen[1:] == (["inner", "itself", "sum"], True, True, True)
            assert converted.seen[0] == pytest.approx(model.seen[0], rel=0.05)
    assert converted.part.dtypes == {torch.float32}


class Softened(nn.Module):
    """Computes on weights of its own what no graph can hold, and notes in which precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.inner, self.softmax = nn.Linear(8, 8), nn.Softmax(-1)
        self.dtypes = []

    def forward(self, x):
        y = self.softmax(F.linear(x, self.weight)) + self.inner(x)
        self.dtypes.append(y.dtype)
        self.mean = y.detach().float().numpy().mean()
        return y


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("denied", ["1", "1.inner", "1.softmax"])
def test_what_is_denied_is_float32_without_gradients_too(denied, opt_level):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)), Softened()), torch.randn(4, 8)
    found = []
    expected = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level=opt_level, overrides={denied: "deny"})
    expected(x)
    part = expected.get_submodule(denied)
    for module in (part, model.get_submodule(denied)):
        module.register_forward_hook(lambda module, inputs, result: found.append((inputs[0].dtype, result.dtype)))
    converted = fxamp.convert(model, torch.bfloat16, opt_level=opt_level, overrides={denied: "deny"})
    with torch.no_grad():
        torch.testing.assert_close(converted(x), expected(x), rtol=0, atol=0)
    assert [result for _, result in found] == [torch.float32] * 2


def test_ops_moved_to_other_lists_stay_there_without_gradients():
    model, x = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Softened()), torch.randn(4, 8)
    lists = fxamp.OpLists.default().override(deny=["linear"])
    converted = fxamp.convert(model, torch.bfloat16, opt_level="O2", lists=lists)
    with torch.no_grad():
        converted(x)
    assert all(key.startswith(("0", "1.")) for key in blocks_of(converted)), blocks_of(converted)
    assert blocks_of(converted)


def test_views_ask_where_the_model_is_now():
    model = fxamp.convert(nn.Linear(8, 8), torch.bfloat16)
    engine = engine_of(model)
    family = Family(Written(engine.options, None), engine, model)
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert not family.is_autocast_on()
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.weight = nn.Parameter(torch.empty(8, 8, device="cuda"))
            assert family.is_autocast_on()
    finally:
        torch.set_autocast_enabled("cuda", before)


class GivenOn(nn.Module):
    """Hands what `ways` makes of a low value to a denied part."""

    def __init__(self, give, take):
        super().__init__()
        self.first, self.part = nn.Linear(8, 8), TakesOn(take)
        self.give = give

    def forward(self, x):
        y = self.first(x)
        self.mean = y.detach().float().numpy().mean()
        return self.give(self.part, y)


class TakesOn(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.take = take

    def forward(self, *given):
        self.mean = torch.zeros(1).numpy().mean()
        return self.take(self, *given)


class Attributes(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class Sealed(list):
    def __setitem__(self, key, value):
        raise TypeError("sealed")

    def __copy__(self):
        raise TypeError("sealed")


class Both(tuple):
    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


def _linear(part, value):
    return F.linear(value, part.weight)


def _returns(part, states, value):
    states.append(_linear(part, value))
    return states


def _steps(part, y):
    first = states = [y]
    for _ in range(3):
        states = part(states, y)
    return states is first, len(first), sum(each.float().sum() for each in first)


def _raises(part, states):
    states.append(1)
    raise ValueError


def _caught(part, y):
    states = [(y, y)]
    pair = states[0]
    with contextlib.suppress(ValueError):
        part(states)
    return len(states), states[0] is pair


def _linked(part, y):
    states = [y]
    states.append(states)
    return part(states).float().sum(), states[0] is y, states[1] is states


def _attributes(part, y):
    given = Attributes(x=y)
    return part(given).float().sum(), sorted(given), given.x is y


def _is_written(part, y):
    into = torch.zeros_like(y)
    part(y, into)
    return into.float().sum()


GIVEN = {
    "returned": (_steps, _returns),
    "raises": (_caught, _raises),
    "in itself": (_linked, lambda part, states: _linear(part, states[1][0])),
    "by attributes": (_attributes, lambda part, given: (given.update(out=1), _linear(part, given.x))[1]),
    "sealed": (lambda part, y: part(Sealed([y])).float().sum(), lambda part, given: _linear(part, given[0])),
    "a tuple's class": (lambda part, y: part(Both(y, y)).float().sum(), lambda part, given: _linear(part, given[1])),
    "chosen": (lambda part, y: part(y.max(0)).float().sum(), lambda part, given: _linear(part, given.values)),
    "written": (_is_written, lambda part, x, into: (into.copy_(x), _linear(part, x))[1]),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("given", GIVEN)
def test_what_a_denied_part_does_to_its_arguments(given, mode):
    torch.manual_seed(0)
    model, x = GivenOn(*GIVEN[given]), torch.randn(4, 8)
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, opt_level="O2", overrides={"part": "deny"})
    is_for_none = given in ("written", "in itself")  # whom autograd forbids it, and who has no key of inputs
    context = torch.no_grad if is_for_none and mode is torch.enable_grad else mode
    with context():
        expected, found = model(x), converted(x)
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0.03, atol=0.1)
        else:
            assert one == other


def test_a_denied_part_may_not_write_into_shared_memory():
    def give(part, y):
        y = y.detach().clone()
        part(y[:1], y)
        return y

    model = GivenOn(give, lambda part, row, whole: (whole.fill_(5), row.add_(1))[0])
    converted = fxamp.convert(model, torch.bfloat16, opt_level="O2", overrides={"part": "deny"})
    with pytest.raises(fxamp.FxampError, match="memory another one shares"):
        converted(torch.randn(4, 8))

    def chunks(part, y):
        both = torch.zeros(4, 16, dtype=y.dtype)
        part(*both.chunk(2, -1))
        return both

    model = GivenOn(chunks, lambda part, one, other: (one.fill_(5), other.add_(1))[0])
    converted = fxamp.convert(model, torch.bfloat16, opt_level="O2", overrides={"part": "deny"})
    assert converted(torch.randn(4, 8)).sum() == 4 * 8 * 6


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_part_that_is_allowed_where_all_else_is_denied(has_gradients, opt_level):
    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), TakesOn(_linear)

        def forward(self, x):
            self.mean = x.detach().numpy().mean()
            return self.b(self.a(x))

    overrides = {"*": "deny", "0.a": "allow"}
    converted = fxamp.convert(nn.Sequential(Top()), torch.bfloat16, opt_level=opt_level, overrides=overrides)
    with torch.set_grad_enabled(has_gradients):
        for _ in range(2):
            assert converted(torch.randn(4, 8)).dtype == torch.float32


class SwitchesOff(nn.Module):
    """Switches autocast off around a part."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        self.mean = x.detach().float().numpy().mean()
        with torch.autocast("cpu", enabled=False):
            return self.part(x)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_an_allowed_part_is_float32_where_forward_switches_autocast_off(opt_level):
    class Part(TakesOn):
        def __init__(self):
            super().__init__(lambda part, x: part.allowed(x))
            self.allowed = TakesOn(lambda part, x: dtypes.append(F.linear(x, part.weight).dtype) or x)

    dtypes = []
    overrides = {"part": "deny", "part.allowed": "allow"}
    converted = fxamp.convert(SwitchesOff(Part()), torch.bfloat16, opt_level=opt_level, overrides=overrides)
    with torch.no_grad():
        converted(torch.randn(4, 8))
    assert dtypes == [torch.float32]


def test_layers_alone_make_graphs_for_ops_that_were_moved(monkeypatch):
    built, build = [], Engine._build
    monkeypatch.setattr(Engine, "_build", lambda *given: built.append(given) or build(*given))

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, past):
            past = torch.cat([past, self.fc(x)])
            return past.sum(0, keepdim=True) + len(past), past

    def give(part, y):
        past = y[:0]
        for _ in range(20):
            y, past = part(y[:1], past)
        return y

    model = GivenOn(give, _linear)
    model.part = Grows()
    lists = fxamp.OpLists.default().override(deny=["linear"])
    converted = fxamp.convert(model, torch.bfloat16, opt_level="O2", lists=lists)
    built.clear()
    with torch.no_grad():
        converted(torch.randn(4, 8))
    assert len(built) < 5


class Reading(nn.Module):
    """Reads on while what it has read says so."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.inside, self.cell, self.head = nn.Linear(16, 16), kind(16, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x):
        h, state = self.inside(x)[:, None], None
        self.mean = h.detach().float().numpy().mean()
        for _ in range(2 if self.mean > 0 else 3):
            h, state = self.cell(h, state)
        return self.head(h[:, 0])


class DecidingLSTM(nn.LSTM):
    """No graph holds it."""

    def forward(self, x, state=None):
        h, state = super().forward(x, state)
        return (h if h.sum().item() > 0 else -h), state


@pytest.fixture
def has_kernel(request, monkeypatch):
    """Whether torch.autocast runs an LSTM: without oneDNN it does on every CPU."""
    monkeypatch.setattr("fxamp.model.seen.autocast_runs_lstm", lambda low, device: request.param)
    with torch.backends.mkldnn.flags(enabled=not request.param):
        yield request.param


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("kind", [nn.LSTM, DecidingLSTM])
@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "none"], indirect=True)
def test_an_lstm_is_float32_where_autocast_fails_at_it(kind, opt_level, has_kernel):
    """As on a CPU for which oneDNN has no low LSTM."""
    torch.manual_seed(0)
    model = Reading(kind)
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, torch.bfloat16, opt_level=opt_level)
    for step in range(3):
        with torch.no_grad():
            evaluated, expected = converted(batch(step)), plain(batch(step))
        assert (evaluated - expected).norm() <= 0.05 * expected.norm()
        found, expected = converted(batch(step)), plain(batch(step))
        assert (found - expected).norm() <= 0.05 * expected.norm()
        found.sum().backward()
        expected.sum().backward()
    theirs, mine = plain.cell.weight_hh_l0.grad, converted.cell.weight_hh_l0.grad
    assert (mine.float() - theirs).norm() <= 0.05 * theirs.norm()


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("kind", [nn.LSTM, DecidingLSTM])
@pytest.mark.parametrize(
    "has_kernel, expected", [(True, torch.bfloat16), (False, torch.float32)], indirect=["has_kernel"]
)
def test_the_states_of_an_lstm_are_float32_where_autocast_fails_at_it(kind, opt_level, has_kernel, expected):
    model, found = nn.Sequential(*(Block() for _ in range(24)), Reading(kind)), []
    model[-1].cell.register_forward_hook(lambda module, args, result: found.append(result[0].dtype))
    with torch.no_grad():
        fxamp.convert(model, torch.bfloat16, opt_level=opt_level)(batch(0))
    assert found and set(found) == {expected}
