"""Blocks that are converted one by one and stay modules that are called."""

import copy
import io
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import CaptureError, OptionError
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.norm, self.mixer, self.number = nn.LayerNorm(16), Mixer(), number

    def forward(self, x, scale=None):
        x = x + self.mixer(self.norm(x))
        return x if scale is None else x * scale


class Net(nn.Module):
    """Blocks between a stem and a head; `branches` asks for a decision on data that no graph can hold."""

    def __init__(self, depth=3, branches=False, checkpointed=False, numbered=False):
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(number if numbered else 0) for number in range(depth))
        self.head = nn.Linear(16, 4)
        self.branches, self.checkpointed = branches, checkpointed

    def forward(self, x):
        x = self.stem(x)
        if self.branches and x.sum() > 1e6:
            x = x * 2
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x, scale=x.new_ones(16))
        return self.head(x)


def pair(boundaries="blocks", example=None, **how):
    torch.manual_seed(0)
    model = Net(**how)
    return model, fxamp.convert(model, LOW, boundaries=boundaries, example_inputs=example)


def distance(model, converted, x=X):
    expected = model(x)
    return float(((converted(x) - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize(
    "boundaries", ["blocks", "blocks.?", Block, (Block, nn.ModuleList), ["blocks.0", "blocks.1", "blocks.2"]]
)
@pytest.mark.parametrize("example", [None, (X,)])
def test_every_block_is_converted_and_equal_blocks_once(boundaries, example):
    model, converted = pair(boundaries, example)
    assert distance(model, converted) < 0.02
    inner = engine_of(converted).blocks
    assert list(inner) == ["blocks.0", "blocks.1", "blocks.2"] and len(set(map(id, inner.values()))) == 1
    report = fxamp.report(converted)
    assert report.captures == ("symbolic", "symbolic") and report.titles[1].startswith("blocks.0 and 2 like it: ")
    low = {row.module for row in report.rows if row.op == "linear" and row.precision == "low"}
    assert low == {"stem", "head", "blocks.0.mixer.up", "blocks.0.mixer.down"}


def test_the_model_is_the_same_to_its_user():
    model, converted = pair()
    assert type(converted.blocks[1]).__name__ == "Block" and isinstance(converted.blocks[1], Block)
    assert list(converted.state_dict()) == list(model.state_dict())
    assert all(one is other for one, other in zip(converted.parameters(), model.parameters(), strict=True))
    assert engine_of(model.blocks[0]) is None and type(model.blocks[0]) is Block
    assert converted.blocks is not model.blocks


def test_gradients_reach_every_parameter():
    model, converted = pair()
    gradients = []
    for net in (model, converted):
        model.zero_grad()
        net(X).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for mine, theirs in zip(*gradients, strict=True):
        assert (mine - theirs).abs().max() <= 0.05 * theirs.abs().max()


def test_a_block_can_be_called_and_runs_low():
    model, converted = pair()
    x = torch.randn(2, 16)
    with torch.no_grad():
        mine, theirs = converted.blocks[1](x), model.blocks[1](x)
    assert 0 < (mine - theirs).abs().max() < 0.05


def test_hooks_on_blocks_fire_before_and_after_conversion():
    torch.manual_seed(0)
    model, seen = Net(), []
    model.blocks[0].register_forward_hook(lambda module, args, result: seen.append("before"))
    converted = fxamp.convert(model, LOW, boundaries=Block)
    converted.blocks[2].register_forward_hook(lambda module, args, result: seen.append("after"))
    converted(X)
    assert seen == ["before", "after"]
    assert all(row.precision == "low" for row in fxamp.report(converted).rows if row.op == "linear")


def test_checkpointed_blocks_are_run_again_in_backward():
    model, converted = pair(checkpointed=True)
    runs = []
    for block in converted.blocks:
        block.register_forward_pre_hook(lambda *given: runs.append(1))
    assert distance(model, converted) < 0.02
    runs.clear()
    converted(X).sum().backward()
    assert len(runs) == 6


def test_around_blocks_that_no_graph_can_hold_the_model_runs_as_written(caplog):
    with caplog.at_level("INFO", "fxamp"):
        model, converted = pair(branches=True)
        assert distance(model, converted) < 0.02
    assert any("runs as written around its blocks" in record.getMessage() for record in caplog.records)
    report = fxamp.report(converted)
    assert report.captures == ("symbolic",)
    assert "stem.weight" in report.outside[0] and "head.weight" in report.outside[0]


class Kept:
    def __init__(self):
        self.values = []

    def add(self, value):
        self.values.append(value)


class KeepingBlock(nn.Module):
    """Symbolic capture cannot follow the object it is given; Dynamo can."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, kept):
        x = self.fc(x)
        kept.add(x)
        return x.relu()


class KeepingNet(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(KeepingBlock() for _ in range(depth))

    def forward(self, x):
        kept = Kept()
        for block in self.blocks:
            x = block(x, kept)
        return x


@pytest.mark.parametrize("example", [None, (X,)])
def test_blocks_that_dynamo_captures_count_as_often_as_they_run(example):
    converted = fxamp.convert(KeepingNet(3), LOW, boundaries="blocks", example_inputs=example)
    if example is not None:
        report = fxamp.report(converted)
        assert (report.is_preview, report.low_precision_nodes, report.outside) == (True, 3, ())
    for x in (X, X):
        converted(x)
        report = fxamp.report(converted)
        assert (report.casts_to_low, report.weight_casts, report.low_precision_nodes) == (3, 6, 3)
        assert not report.is_preview and not report.outside[1:]


class HeadedNet(KeepingNet):
    def __init__(self):
        super().__init__(2)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        return self.head(super().forward(x))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_what_runs_as_written_around_blocks_has_no_preview(capture):
    converted = fxamp.convert(HeadedNet(), LOW, boundaries="blocks", example_inputs=(X,), capture=capture)
    for is_called in (False, True):
        if is_called:
            converted(X)
        report = fxamp.report(converted)
        assert report.titles[0].startswith("blocks.0: dynamo") and len(report.titles) == 2
        assert report.is_preview is not is_called
        assert [row.module for row in report.rows if row.op == "linear"] == ["blocks.0.fc", "blocks.1.fc"]
        assert any("head.weight" in said for said in report.outside)


@pytest.mark.parametrize(("example", "is_called"), [(None, True), ((X,), False), ((X,), True)])
def test_explain_knows_the_parts_and_lines_of_blocks_that_dynamo_captures(example, is_called):
    converted = fxamp.convert(KeepingNet(3), LOW, boundaries="blocks", example_inputs=example)
    if is_called:
        converted(X)
    report = fxamp.report(converted)
    assert [title.split(":")[0] for title in report.titles] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {row.module for row in report.rows if row.op == "linear"} == {f"blocks.{n}.fc" for n in range(3)}
    for n in range(3):
        assert f"blocks.{n}.fc" in fxamp.explain(converted, f"blocks.{n}.fc")
        assert "relu" in fxamp.explain(converted, f"blocks.{n}")
    line = KeepingBlock.forward.__code__.co_firstlineno + 1
    assert fxamp.explain(converted, f"test_boundaries.py:{line}").startswith("source line")
    moved = fxamp.what_if(converted, deny=["linear"])
    assert not moved.low_precision_nodes
    assert {row.module for row in moved.rows if row.op == "linear"} == {
        row.module for row in fxamp.report(converted).rows if row.op == "linear"
    }


class ContainerNet(nn.Module):
    """Its blocks add to a list or a dictionary that they are given, which it reads in the end."""

    def __init__(self, kind, is_late=False):
        super().__init__()
        self.kind, self.is_late = kind, is_late
        self.blocks = nn.ModuleList(AddingBlock() for _ in range(2))

    def forward(self, x):
        kept = self.kind()
        if self.is_late:
            x = x[x[:, 0].abs() > 0]
        for block in self.blocks:
            x = block(x, into={"nested": (kept,)})
        return x + sum(kept.values() if isinstance(kept, dict) else kept)


class AddingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, into):
        x, kept = self.fc(x), into["nested"][0]
        if isinstance(kept, dict):
            kept[len(kept)] = x
        else:
            kept.append(x)
        return x.relu()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("example", [None, (X,)])
def test_blocks_that_add_to_a_container_they_are_given_run_as_written_around(kind, is_late, example):
    model = ContainerNet(kind, is_late)
    converted = fxamp.convert(model, LOW, boundaries="blocks", example_inputs=example)
    assert distance(model, converted) < 2**-6  # two products and their sum, each rounded to 8 bits
    report = fxamp.report(converted)
    assert report.low_precision_nodes == 2 and report.outside == ()  # every weight is a block's


class Output(OrderedDict):
    """As transformers' outputs: the first item, or one by its name."""

    def __getitem__(self, place):
        return super().__getitem__(place) if isinstance(place, str) else list(self.values())[place]

    def __getattr__(self, name):
        return self[name]


class ReadsOutput(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.fc, self.read = nn.Linear(8, 8), read

    def forward(self, x, given):
        return self.fc(x) + self.read(given[0])


@pytest.mark.parametrize("read", [lambda given: given[0], lambda given: given.hidden])
@pytest.mark.parametrize("example", [None, (X,)])
def test_blocks_that_are_given_a_dictionary_of_the_users_run_as_written_around(read, example):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.blocks = nn.Linear(8, 8), nn.ModuleList(ReadsOutput(read) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(x, [Output(hidden=self.stem(x))])
            return x

    model = Net()
    converted = fxamp.convert(model, LOW, boundaries="blocks", example_inputs=example)
    assert distance(model, converted) < 2**-6  # a few roundings to 8 bits
    with pytest.raises(CaptureError, match=r"'blocks\.0' stays whole .* is given an Output"):
        fxamp.convert(Net(), LOW, boundaries="blocks", capture="symbolic", example_inputs=(X,))


def test_asked_for_symbolic_capture_such_a_block_is_named():
    with pytest.raises(CaptureError, match=r"'blocks\.0' stays whole .* adds to or changes a list or dictionary"):
        fxamp.convert(ContainerNet(list), LOW, boundaries="blocks", capture="symbolic", example_inputs=(X,))


def test_explain_answers_for_a_block_that_runs_the_graph_of_its_like():
    _, converted = pair()
    converted(X)
    said = fxamp.explain(converted, "blocks.2.mixer.up")
    assert said.startswith("blocks.2.mixer.up is run by the graph that was made for blocks.0.mixer.up: ")


def test_a_graph_of_dynamo_that_holds_for_equal_blocks_is_for_all_of_them():
    x = torch.ones(3, 8, requires_grad=True)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    converted = fxamp.convert(nn.Sequential(blocks), LOW, boundaries=["0.0", "0.1", "0.2"], capture="dynamo")
    converted(x)
    report = fxamp.report(converted)
    assert [title.split(":")[0] for title in report.titles] == ["0.0 and 2 like it"] and report.runs == (3,)
    assert fxamp.explain(converted, "0.2.0").startswith("0.2.0 is run by the graph that was made for 0.0.0: ")


def test_blocks_that_differ_have_graphs_of_their_own():
    _, converted = pair(numbered=True)
    assert len(set(map(id, engine_of(converted).blocks.values()))) == 3


class Setting:
    def __init__(self, scale):
        self.scale = scale


class Scaled(Block):
    """A block that looks like its likes, and reads an object of its own."""

    def __init__(self, setting, act, sizes):
        super().__init__()
        self.setting, self.act, self.sizes = setting, act, sizes

    def forward(self, x, scale=None):
        return self.act(super().forward(x)) * self.setting.scale * len(self.sizes)


@pytest.mark.parametrize(
    ("settings", "acts", "sizes", "engines"),
    [
        ((Setting(2.0),) * 6, (F.gelu,) * 6, [(1, 2)] * 6, 1),
        (tuple(Setting(1.0 + number) for number in range(6)), (F.gelu,) * 6, [(1, 2)] * 6, 6),
        ((Setting(2.0),) * 6, (F.gelu, F.relu, torch.tanh) * 2, [(1, 2)] * 6, 3),
        ((Setting(2.0),) * 6, (F.gelu,) * 6, [(1,), (1, 2), (1, 2, 3)] * 2, 3),
    ],
)
def test_blocks_that_hold_different_objects_have_graphs_of_their_own(settings, acts, sizes, engines, caplog):
    torch.manual_seed(0)
    model = Net()
    model.blocks = nn.ModuleList(map(Scaled, settings, acts, sizes))
    converted = fxamp.convert(model, LOW, boundaries="blocks")
    with caplog.at_level("WARNING", "fxamp"):
        for _ in range(3):
            assert distance(model, converted) < 0.05
    assert not caplog.records
    assert len(set(map(id, engine_of(converted).blocks.values()))) == engines
    assert len(engine_of(converted).graphs()) == 1 + engines


def test_a_block_that_changes_leaves_its_likes_alone():
    model, converted = pair()
    converted(X)
    model.blocks[1].mixer.up = converted.blocks[1].mixer.up = nn.Linear(16, 32)  # shared: the block's parts are
    model.blocks[2].norm.eps = 5.0
    assert distance(model, converted) < 0.02


def test_what_has_changed_stays_converted_block_by_block():
    model, converted = pair()
    converted(X)
    converted.head = model.head = nn.Sequential(nn.Linear(16, 4))
    model.blocks[1].mixer.up = nn.Sequential(nn.Linear(16, 32))
    assert distance(model, converted) < 0.02
    assert list(engine_of(converted).blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    block = engine_of(converted.blocks[1])
    assert block.is_boundary and block.paths == engine_of(converted.blocks[0]).paths


def test_a_block_of_the_model_s_own_stays_a_call():
    model, converted = pair("head", (X,))
    (variant,) = engine_of(converted).all_variants()
    assert [node.target for node in variant.graph.nodes if node.op == "call_module"] == ["head"]
    assert distance(model, converted) < 0.02


def test_blocks_of_a_converted_model_inside_another_are_not_named(caplog):
    model, inner = pair()
    with caplog.at_level("INFO", "fxamp"):
        outer = fxamp.convert(nn.Sequential(inner), LOW)
    assert any("Sequential holds converted models (0)" in record.getMessage() for record in caplog.records)
    assert distance(model, outer) < 0.02


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.LSTM(8, 8)], ids=["linear", "lstm"])
def test_a_layer_that_is_a_block_multiplies_once(layer):
    converted = fxamp.convert(nn.Sequential(layer), dtype=LOW, boundaries=[type(layer)], example_inputs=(X,))
    alone = fxamp.report(fxamp.convert(layer, dtype=LOW, example_inputs=(X,))).gemms
    assert [gemm.op for gemm in fxamp.report(converted).gemms] == [gemm.op for gemm in alone]
    assert fxamp.report(converted).coverage == 1


def test_nested_boundaries():
    model, converted = pair((Block, Mixer))
    assert distance(model, converted) < 0.02
    assert engine_of(converted.blocks[0].mixer) is not None
    assert len(engine_of(converted).graphs()) == 3


def test_copies_and_pickles():
    model, converted = pair()
    converted(X)
    twin = copy.deepcopy(converted)
    assert torch.equal(twin(X), converted(X))
    with torch.no_grad():
        twin.blocks[0].mixer.up.weight.zero_()
    assert not torch.equal(twin(X), converted(X)) and distance(model, converted) < 0.02
    loaded = pickle.loads(pickle.dumps(converted))
    assert torch.equal(loaded(X), converted(X)) and engine_of(loaded.blocks[0]) is not None
    buffer = io.BytesIO()
    torch.save(converted, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(X), converted(X))


def test_train_eval_and_freeze():
    _, converted = pair()
    assert not converted.eval().blocks[0].training and not converted.blocks[0].mixer.up.training
    with torch.no_grad():
        before = converted(X)
        converted.freeze()
        assert torch.equal(converted(X), before)
        assert "kept_cast" in engine_of(converted.blocks[0]).all_variants()[0].compiled.source


def test_a_module_in_two_places_is_one_module():
    class Shared(Net):
        def __init__(self):
            super().__init__(depth=2)
            self.blocks[1] = self.blocks[0]

    model = Shared()
    converted = fxamp.convert(model, LOW, boundaries="blocks")
    assert converted.blocks[0] is converted.blocks[1] and distance(model, converted) < 0.02


def test_overrides_reach_into_blocks():
    model = Net()
    converted = fxamp.convert(
        model, LOW, boundaries="blocks", example_inputs=(X,), overrides={"blocks.1.mixer.*": "deny"}
    )
    assert len(set(map(id, engine_of(converted).blocks.values()))) == 2
    high = {row.module for row in fxamp.report(converted).rows if row.op == "linear" and row.precision == "high"}
    assert high == {"blocks.1.mixer.up", "blocks.1.mixer.down"}


class Doubled(nn.Module):
    """Has an op of its own, and a part with the name of another model's module."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(torch.exp(self.inner(x)))


@pytest.mark.parametrize(
    "overrides, low",
    [
        ({"blocks": "deny"}, ["head"]),
        ({"blocks": "deny", "blocks.1": "allow"}, ["blocks.1", "head"]),
        ({"blocks.0": "deny", "blocks.*.0": "allow"}, ["blocks.1", "head"]),
        ({"*": "deny", "blocks.1.0": "allow"}, ["blocks.1"]),
        ({"linear*": "deny"}, []),
    ],
    ids=str,
)
def test_overrides_around_blocks_hold_inside_as_without_blocks(overrides, low):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
            self.head = nn.Linear(8, 8)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    for boundaries in ((), "blocks.*"):
        x = torch.ones(2, 8)
        converted = fxamp.convert(Net(), LOW, (x,), overrides=overrides, boundaries=boundaries)
        rows = [row for row in fxamp.report(converted).rows if row.op == "linear" and row.precision == "low"]
        assert sorted({row.module.removesuffix(".0") for row in rows}) == low


def test_overrides_of_nodes_reach_into_blocks_and_those_of_the_models_modules_do_not():
    model = nn.Sequential(OrderedDict(body=nn.Sequential(Doubled(), Doubled()), head=nn.Linear(8, 4)))
    x = torch.randn(2, 8)
    options = {"boundaries": [Doubled], "example_inputs": (x,), "overrides": {"exp": "allow", "head": "deny"}}
    converted = fxamp.convert(model, LOW, **options)
    rows = [row for row in fxamp.report(converted).rows if row.op in ("exp", "linear")]
    assert {row.reason for row in rows if row.op == "exp"} == {"overrides['exp'] = 'allow'"}
    assert {row.module: row.precision for row in rows if row.op == "linear" and row.precision == "high"} == {
        "head": "high"
    }
    model = nn.Sequential(OrderedDict(body=nn.Sequential(Doubled(), Doubled()), exp=nn.Linear(8, 4)))
    converted = fxamp.convert(model, LOW, **{**options, "overrides": {"exp": "allow"}})
    reasons = [row.reason for row in fxamp.report(converted).rows if row.op == "exp"]
    assert reasons and not any("overrides" in reason for reason in reasons), "it is the name of a module"
    for wrong in ("exq", "inner"):  # a part of a block is named by its whole path
        with pytest.raises(OptionError, match=f"'{wrong}' matches no module and no node"):
            fxamp.convert(model, LOW, **{**options, "overrides": {wrong: "allow"}})


def test_compile_around_boundaries():
    model, converted = pair(example=(X,))
    converted(X)
    compiled = torch.compile(converted, backend="eager")
    assert torch.equal(compiled(X), converted(X)) and distance(model, compiled) < 0.02


@pytest.mark.parametrize(
    ("boundaries", "options", "message"),
    [
        ("block", {}, r"boundaries: 'block' matches no submodule. Did you mean 'blocks'"),
        ("blocks.7", {}, r"'blocks.7' matches no submodule"),
        (nn.Conv2d, {}, r"the model has no submodule of class Conv2d"),
        (3, {}, r"boundaries=3 is not allowed"),
        ([3], {}, r"boundaries: 3 is not allowed"),
        (["blocks"], {"model": nn.Sequential(nn.Linear(8, 8))}, r"Sequential repeats no block"),
        ("blocks.0", {"opt_level": "O2"}, r"goes with opt_level='O1' only"),
        (["blocks"], {"model": Net(depth=1)}, r"Net repeats no block"),
    ],
)
def test_a_wrong_boundary_is_named(boundaries, options, message):
    model = options.pop("model", None) or Net()
    with pytest.raises(OptionError, match=message):
        fxamp.convert(model, LOW, boundaries=boundaries, **options)
    assert "blocks" not in dict(model.named_children()) or type(model.blocks[0]) is Block


def test_symbolic_capture_around_blocks_names_the_line():
    with pytest.raises(CaptureError, match=r"test_boundaries\.py:\d+: Python's bool"):
        fxamp.convert(Net(branches=True), LOW, boundaries="blocks", example_inputs=(X,), capture="symbolic")


@pytest.mark.parametrize("boundaries", ["blocks", ("layers.0", "layers.1"), "layers.*"])
def test_a_block_that_stands_in_two_places_is_one(boundaries):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(4, 4), 1.0

        def forward(self, x):
            return self.fc(x) * self.scale

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Scaled(), Scaled()])
            self.last, self.extra = self.layers[1], nn.Sequential(nn.ReLU(), self.layers[0])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last(self.extra(x))

    model, x = Net(), torch.randn(2, 4)
    converted = fxamp.convert(copy.deepcopy(model), torch.float16, boundaries=boundaries)
    converted(x)
    for each in (model, converted):
        each.last.scale, each.layers[0].scale = 2.0, 3.0
    assert converted.last is converted.layers[1] and converted.extra[1] is converted.layers[0]
    assert torch.allclose(converted(x), model(x), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("example", [None, (torch.ones(2, 4, 8),)], ids=["none", "example"])
@pytest.mark.parametrize("make", [lambda y: {"y": y, "none": None}, lambda y: OrderedDict(y=y)])
def test_what_a_block_gives_in_a_container_can_be_sliced(make, example):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return make(self.fc(x))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.inner(x)["y"][:, 0])

    model, x = Outer(), torch.randn(2, 4, 8)
    found = fxamp.convert(model, LOW, example, boundaries=["inner"])(x)
    torch.testing.assert_close(found, model(x), rtol=0.05, atol=0.05)


def test_an_object_that_forward_reads_around_blocks_that_give_none_is_no_change(caplog):
    class Config:
        def __init__(self):
            self.scale = 2.0

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x), None

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.config, self.inner = Config(), Inner()

        def forward(self, x):
            return self.inner(x)[0] * self.config.scale

    model = Outer()
    converted = fxamp.convert(model, LOW, boundaries=["inner"])
    for _ in range(3):
        converted(X)
    assert len(engine_of(converted).all_variants()) == 1 and "has changed" not in caplog.text
    for each in (model, converted):
        each.config.scale = 5.0
    torch.testing.assert_close(converted(X), model(X), rtol=0.05, atol=0.05)
