"""torch.compile around a converted model: no graph need be there before, and none is used where it no longer holds."""

import copy
import enum

import pytest
import torch
from torch import nn

import fxamp
from fxamp.model.engine import engine_of

X = torch.randn(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 4))
        self.gain = 1.0

    def forward(self, x, mask=None, *, scales=None):
        y = torch.relu(self.norm(self.first(x)))
        if mask is not None:
            y = y * mask
        if scales:
            y = y * scales["all"] + scales["some"][0]
        return self.head(y) * self.gain


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return y if y.sum() > 0 else -y


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def both(net=None, **options):
    """A converted model that has no graph yet, and the same compiled into one graph."""
    converted = fxamp.convert(net or Net(), torch.bfloat16, **options)
    return converted, torch.compile(converted, fullgraph=True, backend="aot_eager")


def test_both_modes_in_one_graph_each_with_no_call_before():
    converted, compiled = both()
    compiled(X).sum().backward()
    assert converted.first.weight.grad is not None
    assert converted.norm.num_batches_tracked == 1
    converted.eval()
    assert torch.equal(compiled(X), converted(X))
    converted.train()
    assert compiled(X).shape == (4, 4)
    assert converted.norm.num_batches_tracked == 2


def test_a_graph_that_is_made_later_leaves_what_is_compiled():
    count = 0

    def compiler(module, inputs):
        nonlocal count
        count += 1
        return module.forward

    converted = fxamp.convert(Net(), torch.bfloat16)
    compiled = torch.compile(converted, fullgraph=True, backend=compiler)
    for training in (True, False, True, False):
        compiled.train(training)
        compiled(X)
    assert count == 2


def _compiled_in_place(converted, **options):
    converted.compile(**options)
    return converted


def _compiled_forward(converted, **options):
    return torch.compile(converted.forward, **options)


@pytest.mark.parametrize("compile", [torch.compile, _compiled_in_place, _compiled_forward])
def test_what_is_compiled_of_one_model_does_not_count_for_another(compile):
    """Dynamo allows a piece of code some captures: folds of a model, and models of other classes, have theirs each."""
    count = 0

    def compiler(module, inputs):
        nonlocal count
        count += 1
        return module.forward

    with torch._dynamo.config.patch(recompile_limit=2):
        for net in (Net, Net, lambda: nn.Sequential(nn.Dropout(), nn.Linear(8, 4)), Net):
            converted = fxamp.convert(net(), torch.bfloat16)
            compiled = compile(converted, backend=compiler)
            for training in (True, False, True):
                converted.train(training)
                compiled(X)
    assert count == 2 * 4


def test_blocks_are_compiled_one_by_one_however_many_there_are():
    count = 0

    def compiler(module, inputs):
        nonlocal count
        count += 1
        return module.forward

    converted = fxamp.convert(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(4)]), boundaries="blocks")
    expected = converted(X)
    for model in (converted, copy.deepcopy(converted)):
        for block in model:
            block.compile(backend=compiler)
        with torch._dynamo.config.patch(recompile_limit=1):
            assert torch.equal(model(X), expected)
    assert count == 2 * 4


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_that_vary(dynamic):
    converted = fxamp.convert(Net().eval(), torch.bfloat16)
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (4, 5, 6, 7):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), converted(x))
    assert len(engine_of(converted).graphs()) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, torch.rand(4, 16)), {}),
        ((X,), {"mask": torch.rand(4, 16)}),
        ((), {"x": X, "scales": {"all": 2.0, "some": [torch.rand(4, 16)]}}),
        ((X.t().contiguous().t(), None), {"scales": None}),
    ],
)
def test_every_way_to_call(args, kwargs):
    converted, compiled = both(Net().eval())
    assert torch.equal(compiled(*args, **kwargs), converted(*args, **kwargs))


class Way(enum.IntEnum):
    THERE = 1
    BACK = 2


def test_members_of_an_int_enum_are_no_numbers():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, way):
            return self.fc(x) if way is Way.THERE else -self.fc(x)

    converted = fxamp.convert(Turns(), torch.bfloat16)
    compiled = torch.compile(converted, backend="aot_eager")
    for way in (Way.THERE, Way.BACK, Way.THERE):
        assert torch.equal(compiled(X, way), converted(X, way))
    assert not torch.equal(compiled(X, Way.THERE), compiled(X, Way.BACK))


def test_inside_a_larger_compiled_function():
    converted = fxamp.convert(Net().eval(), torch.bfloat16)

    def step(x):
        return converted(x * 2) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), step(X))


@pytest.mark.parametrize("fullgraph", [False, True])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_hang_on_data(fullgraph):
    converted = fxamp.convert(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.bfloat16)

    def step(x):
        return converted(x[x[:, 0] > 0])

    compiled = torch.compile(step, fullgraph=fullgraph, backend="eager")
    for count in (1, 5, 0, 20):
        x = torch.randn(20, 8)
        x[:, 0] = (torch.arange(20) < count).float() - 0.5
        assert torch.equal(compiled(x), step(x))
        assert compiled(x).shape == (count, 4)


def test_making_a_graph_draws_no_random_number_and_moves_no_buffer():
    converted, compiled = both()
    twin = fxamp.convert(Net(), torch.bfloat16)
    twin.load_state_dict(converted.state_dict())
    torch.manual_seed(3)
    expected = twin(X)
    torch.manual_seed(3)
    assert torch.equal(compiled(X), expected)
    assert torch.equal(converted.norm.running_mean, twin.norm.running_mean)


def test_a_number_that_changes_is_seen():
    converted, compiled = both(Net().eval())
    for gain in (1.0, 3.0, 7.0, 3.0):
        converted.gain = gain
        assert torch.equal(compiled(X), converted(X))


@pytest.mark.parametrize("kind", [nn.ReLU, nn.Tanh])
def test_a_module_that_is_added_or_exchanged_is_seen(kind):
    converted, compiled = both(Net().eval())
    before = compiled(X)
    converted.head.append(kind())
    assert torch.equal(compiled(X), converted(X))
    assert not torch.equal(compiled(X), before)
    converted.head[1] = nn.Linear(16, 4)
    assert torch.equal(compiled(X), converted(X))


@pytest.mark.parametrize("index", [0, 1])
def test_a_weight_that_is_no_longer_tied_is_seen(index):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    converted, compiled = both(net)
    compiled(X)
    converted[index].weight = nn.Parameter(torch.randn(8, 8))
    assert torch.equal(compiled(X), converted(X))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_low_weight_that_is_replaced_by_a_float32_one_is_seen(index):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    converted, compiled = both(net, opt_level="O2", example_inputs=(X,))
    compiled(X)
    converted[index].weight = nn.Parameter(torch.randn(8, 8))
    assert torch.equal(compiled(X), converted(X))


def test_a_call_that_no_graph_can_hold_is_named_and_breaks_where_it_may():
    converted, compiled = both(Chooses())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no graph for this call of Chooses: .*test_compiling\.py"):
        compiled(X)
    torch._dynamo.reset()
    compiled = torch.compile(converted, backend="aot_eager")
    torch.testing.assert_close(compiled(X), converted(X), rtol=0, atol=0)


def test_strict_export_needs_no_graph_before():
    converted = fxamp.convert(Net().eval(), torch.bfloat16)
    program = torch.export.export(converted, (X,), strict=True)
    assert torch.equal(program.module()(X), converted(X))


def test_blocks_that_are_converted_by_themselves():
    converted, compiled = both(nn.Sequential(Net(), nn.Linear(4, 8), Net()).eval(), boundaries=[Net])
    assert torch.equal(compiled(X), converted(X))


@pytest.mark.parametrize("gradients", [False, True])
def test_a_region_without_gradients(gradients):
    class Detaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                offset = self.fc(x)
            return self.fc(x) - offset

    converted, compiled = both(Detaching())
    with torch.set_grad_enabled(gradients):
        assert torch.equal(compiled(X), converted(X)) and compiled(X).requires_grad is gradients
    asked = [node.target for node in engine_of(converted).all_variants()[0].graph.nodes if "grad" in str(node.target)]
    assert asked[0] is torch.is_grad_enabled


def test_o2():
    net = Net().eval()
    converted, compiled = both(net, opt_level="O2")
    assert torch.equal(compiled(X), converted(X))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_called_first", [False, True])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_model_that_dynamo_captured_stays_converted(is_inside, is_called_first, backend):
    """A compiler around it must not trace through, into what the user wrote."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    converted = fxamp.convert(twin, torch.bfloat16, capture="dynamo")
    if is_called_first:
        converted(X)
    whole = nn.Sequential(converted, nn.Tanh()) if is_inside else converted
    compiled = torch.compile(whole, backend=backend)
    for _ in range(2):
        found = compiled(X)
        found.sum().backward()
    assert torch.equal(found, whole(X))
    assert not torch.equal(converted(X), model(X)), "it runs in bfloat16, compiled or not"
    assert all(weight.grad is not None for weight in twin.parameters())


def test_a_model_that_dynamo_captured_is_no_part_of_a_full_graph():
    converted = fxamp.convert(nn.Linear(8, 4), torch.bfloat16, capture="dynamo")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fxamp leaves Linear to Dynamo itself.*backend='fxamp'"):
        torch.compile(converted, backend="eager", fullgraph=True)(X)


class Pair:
    """What a forward may return that is no container of torch's."""


class ReturnsAPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        pair = Pair()
        pair.one, pair.other = self.fc(x), x
        return pair


def test_an_object_of_the_models_own_is_made_in_a_full_graph():
    compiled = torch.compile(fxamp.convert(ReturnsAPair(), dtype=torch.bfloat16), backend="eager", fullgraph=True)
    result = compiled(X)
    assert type(result) is Pair and torch.equal(result.other, X)
    assert result.one.requires_grad


@pytest.mark.parametrize("options", [{}, {"boundaries": ["0"]}])
def test_a_second_call_compiles_nothing_anew(options):
    torch._dynamo.reset()
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    run = torch.compile(fxamp.convert(model, dtype=torch.bfloat16, **options), backend=backend)
    counts = []
    for _ in range(3):
        run(torch.randn(2, 4)).sum().backward()
        counts.append(len(compiled))
    assert counts == [counts[0]] * 3
