"""fxamp.what_if and report.suggest: the numbers a conversion with that change really gives."""

import copy
import warnings

import pytest
import torch
from review_cases import FP16, Language, Two, tokens

import fxamp
from fxamp.errors import FxampWarning, OptionError
from fxamp.lists import OpLists
from fxamp.review.report import report
from fxamp.review.what_if import MAX_MOVES, WORTH, Suggestion, _moves, _saved, suggest, traffic, what_if
from tests.choosing import Choosing, batch
from tests.work import lines

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class SoftBlock(torch.nn.Module):
    """Its norm's weights stay in float32 where a preview decides, and would not if a call did."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def forward(self, x):
        return x + torch.nn.functional.softplus(self.norm(self.up(x)))


@pytest.fixture(scope="module")
def language():
    return fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict")


def totals(built):
    return built.low_precision_nodes, built.casts_to_low, built.casts_to_high, built.weight_casts, built.cast_bytes


@pytest.mark.parametrize(
    "move, conversion",
    [
        ({"infer": "softmax"}, {"lists": OpLists.default().override(infer=["softmax"])}),
        ({"deny": ["linear"]}, {"lists": OpLists.default().override(deny=["linear"])}),
        ({"deny": ["blocks.0"]}, {"overrides": {"blocks.0": "deny"}}),
        ({"allow": ["add_1"]}, {"overrides": {"add_1": "allow"}}),
        ({"deny": ["blocks.*.qkv"]}, {"overrides": {"blocks.*.qkv": "deny"}}),
    ],
)
def test_it_is_the_report_of_a_model_converted_so(language, move, conversion):
    before = totals(report(language))
    expected = fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict", **conversion)
    assert totals(what_if(language, **move)) == totals(report(expected)) != before
    assert totals(report(language)) == before, "the model itself is as it was"


@pytest.mark.parametrize("move", [{"deny": [" gelu"]}, {"deny": "blocks.0 "}, {"deny": "layer_norm, gelu".split(",")}])
def test_space_around_a_name_is_no_part_of_it(language, move):
    ((colour, names),) = move.items()
    stripped = {colour: [name.strip() for name in ([names] if isinstance(names, str) else names)]}
    assert totals(what_if(language, **move)) == totals(what_if(language, **stripped)) != totals(report(language))


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_refused(language, name):
    with pytest.raises(OptionError, match=r"' names nothing\. Give a node, "):
        what_if(language, deny=[name])
    with pytest.raises(OptionError, match=r"' names nothing\. Give a node, "):
        fxamp.explain(language, name)


def test_a_name_in_two_lists_is_refused_with_space_around_it_too(language):
    with pytest.raises(OptionError, match="'exp' stands in infer and in deny"):
        what_if(language, deny=["exp"], infer=[" exp"])


def test_the_training_flags_of_the_graph_are_kept():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    converted = fxamp.convert(model, FP16, (X,))
    converted.eval()
    assert what_if(converted, deny=["0"]).titles == report(converted).titles
    assert all(not module.training for module in (converted, *model.children()))


def test_suggestions_are_tried_and_ranked(language):
    found = suggest(report(language))
    assert len(found) > 1
    assert [move.worth for move in found] == sorted((move.worth for move in found), reverse=True)
    best = next(move for move in found if move.move == "infer=['softmax']")
    after = what_if(language, infer="softmax")
    assert best.casts == report(language).casts - after.casts > 0
    assert best.launches == report(language).launches - after.launches


def test_nothing_to_gain_gives_no_suggestion():
    assert report(fxamp.convert(Two(lambda m, x: m.b(m.a(x).relu())), FP16, (X,))).suggest() == []


@pytest.mark.parametrize("name, hint", [("blocks.0.qvk", "'blocks.0.qkv'"), ("sofmax", "'softmax'")])
def test_an_unknown_name_gets_the_nearest(language, name, hint):
    with pytest.raises(OptionError, match=f"what_if: '{name}' is no node.*Did you mean {hint}"):
        what_if(language, deny=[name])


def test_a_model_without_example_inputs_can_be_asked_too():
    converted = fxamp.convert(Two(lambda m, x: m.a(x).exp()), FP16)
    assert what_if(converted, infer="exp").low_precision_nodes == report(converted).low_precision_nodes + 1


@pytest.mark.parametrize("name", ["F.gelu", "nn.GELU", "GELU", "aten.gelu"])
def test_an_op_may_be_named_as_torch_names_it(language, name):
    assert what_if(language, deny=[name]).summary() == what_if(language, deny=["gelu"]).summary()
    assert what_if(language, deny=[name]).summary() != report(language).summary()


@pytest.mark.parametrize("name", ["LayerNorm", "layernorm"])
def test_a_module_class_means_its_nodes(language, name):
    after = what_if(language, deny=[name])
    assert {row.precision for row in after.rows if row.op == "layer_norm"} == {"high"}


def test_a_source_line_means_its_nodes(language):
    line = next(row.line for row in report(language).rows if row.op == "gelu")
    after = what_if(language, deny=line)
    assert {row.precision for row in after.rows if row.line == line and not row.role} == {"high"}


def test_a_module_is_no_name(language):
    with pytest.raises(OptionError, match=r"Linear is no name\. Give a string: a node, a module path"):
        fxamp.explain(language, torch.nn.Linear(2, 2))


def test_a_name_in_two_lists_is_refused(language):
    with pytest.raises(OptionError, match="what_if: 'gelu' stands in infer and in deny: give it one of them"):
        what_if(language, infer=["gelu"], deny=["gelu"])


class Branches(torch.nn.Module):
    """Weights that are read low, high and by both; one is tied, one is never trained."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30, 16)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.second.weight.requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        x = x + torch.relu(self.first(x)).exp()
        return self.head(self.norm(self.second(x)) * self.first.weight.sum(0))


def recurrent():
    return torch.nn.Sequential(torch.nn.Embedding(30, 16), torch.nn.LSTM(16, 16))


LOW_WEIGHTS = [Branches, Language, recurrent]


def costs(built):
    """All that a conversion costs, and what runs where."""
    nodes = [(row.name, row.precision) for row in built.rows if not row.role]
    return *totals(built), built.launches, built.weight_cast_bytes, nodes


@pytest.mark.parametrize("make", LOW_WEIGHTS)
@pytest.mark.parametrize(
    "move, conversion",
    [
        ({}, {}),
        ({"deny": ["linear", "lstm"]}, {"lists": OpLists.default().override(deny=["linear", "lstm"])}),
        ({"infer": ["exp", "softmax"]}, {"lists": OpLists.default().override(infer=["exp", "softmax"])}),
        ({"allow": ["layer_norm"]}, {"lists": OpLists.default().override(allow=["layer_norm"])}),
        ({"allow": ["embedding"]}, {"lists": OpLists.default().override(allow=["embedding"])}),
        ({"deny": ["*"]}, {"overrides": {"*": "deny"}}),
    ],
)
def test_at_o2_weights_are_stored_as_the_conversion_would(make, move, conversion):
    torch.manual_seed(0)
    model = make().eval()
    options = {"dtype": FP16, "example_inputs": (tokens(),), "opt_level": "O2"}
    expected = report(fxamp.convert(copy.deepcopy(model), **options, **conversion))
    converted = fxamp.convert(model, **options)
    before = {name: (id(value), value.dtype, value.clone()) for name, value in converted.named_parameters()}
    assert costs(what_if(converted, **move)) == costs(expected)
    for name, value in converted.named_parameters():
        assert (id(value), value.dtype) == before[name][:2] and torch.equal(value, before[name][2])


def test_at_o2_suggestions_save_what_the_conversion_would():
    options = {"dtype": FP16, "example_inputs": (tokens(),), "opt_level": "O2", "level": "strict"}
    today = report(fxamp.convert(Language().eval(), **options))
    found = [move for move in suggest(today) if move.move.startswith("infer=")]
    assert found
    for move in found:
        lists = OpLists.default().override(**eval(f"dict({move.move})"))
        after = report(fxamp.convert(Language().eval(), lists=lists, **options))
        assert (move.casts, move.launches) == (today.casts - after.casts, today.launches - after.launches)


MOVES = [{}, {"deny": ["linear"]}, {"infer": ["softplus"]}, {"allow": ["softplus"]}, {"deny": ["layer_norm"]}]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("move", MOVES, ids=str)
@pytest.mark.parametrize("make", [SoftBlock, lambda: Choosing(SoftBlock)], ids=["whole", "as written"])
def test_a_model_converted_without_example_inputs_is_stored_as_its_conversion_would(make, move, opt_level):
    torch.manual_seed(0)
    today, changed = make(), make()
    lists = OpLists.default().override(**move)
    for model in (today, changed):
        model.load_state_dict(today.state_dict())
    today = fxamp.convert(today, FP16, opt_level=opt_level)
    changed = fxamp.convert(changed, FP16, opt_level=opt_level, lists=lists)
    for model in (today, changed):
        model(batch(0)).float().sum().backward()
    found, expected = what_if(today, **move), report(changed)
    if opt_level == "O1" and move == {"deny": ["linear"]} and isinstance(changed, Choosing):
        assert costs(found)[:-1] == costs(expected)[:-1]  # its head is a graph now, which autocast ran
        assert {row.module for row in expected.rows} - {row.module for row in found.rows} == {"head"}
    else:
        assert costs(found) == costs(expected)


class Sized(SoftBlock):
    """Of assumed sizes there is no preview: what is stored low is decided layer by layer."""

    def forward(self, x):
        return super().forward(x) if x.shape[0] < 100 else x


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
@pytest.mark.parametrize("path", ["up", "norm"])
def test_a_module_that_is_denied_is_stored_as_its_conversion_would(path, opt_level):
    torch.manual_seed(0)
    today = Sized()
    today.norm.register_buffer("shift", torch.ones(16))
    changed = fxamp.convert(copy.deepcopy(today), FP16, opt_level=opt_level, overrides={path: "deny"})
    today = fxamp.convert(today, FP16, opt_level=opt_level)
    for model in (today, changed):
        model(batch(0)).float().sum().backward()
    before = costs(report(today))
    assert costs(what_if(today, deny=[path])) == costs(report(changed))
    assert costs(report(today)) == before != costs(report(changed))
    assert all(tensor.dtype == torch.float32 for tensor in changed.get_submodule(path).parameters())


def test_a_model_at_o2_that_cannot_be_copied_says_so():
    model = Branches()
    converted = fxamp.convert(model, FP16, (tokens(),), opt_level="O2")
    converted.stream = (each for each in ())
    with pytest.raises(OptionError, match=r"store low is tried on a copy.*Branches cannot be copied.*generator"):
        what_if(converted, deny=["linear"])


@pytest.mark.parametrize("level, wider", [("strict", "balanced"), ("balanced", "aggressive")])
def test_blocks_that_are_converted_by_themselves_count(level, wider):
    def converted_at(level, lists=None):
        options = {"level": level, "boundaries": "blocks", "lists": lists}
        return fxamp.convert(Language().eval(), FP16, (tokens(),), **options)

    converted = converted_at(level)
    today = report(converted)
    assert costs(what_if(converted)) == costs(today)
    expected = report(converted_at(level, OpLists.default().override(deny=["gelu"])))
    assert costs(what_if(converted, deny=["gelu"])) == costs(expected) != costs(today)
    saved = today.launches - report(converted_at(wider)).launches
    assert [move.launches for move in suggest(today) if wider in move.move] == ([saved] if saved > 0 else [])


@pytest.mark.parametrize("name", ["blocks.0.qkv", "blocks.1.qkv", "blocks.1", "blocks.*", "*.qkv", "Block"])
def test_a_name_inside_of_a_block_is_refused(name):
    converted = fxamp.convert(Language().eval(), FP16, (tokens(),), boundaries="blocks")
    with pytest.raises(
        OptionError, match=r"what_if: '[\w.*]+' is, or is inside of, a module that has a graph .*overrides="
    ):
        what_if(converted, deny=[name])


@pytest.mark.parametrize("bad", [5, None, torch.nn.Linear(2, 2)])
def test_what_is_no_name_is_refused(bad):
    converted = fxamp.convert(torch.nn.Linear(8, 8), FP16, (torch.ones(2, 8),))
    for given in (bad, [bad]):
        with pytest.raises(fxamp.OpListError, match=r"what_if: .* names no op"):
            what_if(converted, deny=given)


def test_a_block_that_is_asked_by_itself_takes_the_paths_that_its_report_shows():
    converted = fxamp.convert(Language().eval(), FP16, (tokens(),), boundaries="blocks")
    block = converted.blocks[0]
    (module,) = {row.module for row in report(block).rows if row.module.endswith(".qkv") and row.op == "linear"}
    after = what_if(block, deny=[module])
    assert [row.precision for row in after.rows if row.op == "linear" and row.module == module] == ["high"]


def test_what_it_says_of_such_a_name_shows_the_change():
    options = {"dtype": FP16, "example_inputs": (tokens(),), "boundaries": "blocks"}
    today = report(fxamp.convert(Language().eval(), **options))
    after = report(fxamp.convert(Language().eval(), overrides={"blocks.1": "deny"}, **options))
    assert after.low_precision_nodes < today.low_precision_nodes


CHECKED = [
    (Language, lambda: tokens(), {"level": "strict"}),
    (Language, lambda: tokens(), {"pad": "always"}),
    (lambda: Two(lambda m, x: m.b(m.a(x).exp().add_(1.0)).unsqueeze_(0).softmax(-1)), lambda: X, {"level": "strict"}),
    (lambda: Two(lambda m, x: m.b(m.a(x).exp()) + torch.arange(8)), lambda: X, {"capture": "dynamo"}),
]


@pytest.mark.parametrize("make, inputs, options", CHECKED, ids=["strict", "padded", "written", "dynamo"])
@pytest.mark.parametrize("is_training", [True, False])
def test_suggestions_are_those_of_a_capture_for_each(make, inputs, options, is_training):
    converted = fxamp.convert(make().train(is_training), FP16, (inputs(),), **options)
    converted(inputs())
    today, expected = report(converted), set()
    for ways, name, why_not in list(_moves(today))[:MAX_MOVES]:
        tried = [_saved(today, what_if(converted, **{colour: [name]}), move, why_not) for move, colour in ways]
        worth = [each for each in tried if each.launches > 0 or each.nbytes > WORTH * traffic(today)]
        expected |= {str(each) for each in [each for each in worth if each.worth > 0][:1]}
    assert {str(move) for move in suggest(today) if "level=" not in move.move} == expected


@pytest.mark.parametrize("op", ["exp", "log1p"])
def test_an_op_between_others_that_stay_in_float32_is_for_the_allow_list(op):
    """On the infer list it would follow its neighbour of the deny list, and save nothing."""
    converted = fxamp.convert(Two(lambda m, x: m.b(torch.log1p(m.a(x).exp()))), FP16, (X,))
    today = report(converted)
    assert today.casts - what_if(converted, infer=[op]).casts == 0
    (found,) = (each for each in today.suggest() if repr(op) in each.move)
    assert found.move == f"allow=[{op!r}]" and found.casts == today.casts - what_if(converted, allow=[op]).casts > 0
    assert f"`{op}` is on the deny list" in found.why_not


def test_a_model_is_captured_once_for_all_suggestions(language):
    today = report(language)
    tries = sum(len(ways) for ways, *_ in _moves(today)) + 1
    assert tries > 5
    suggest(today)  # imports
    capturing = lines(lambda: what_if(language, infer="softmax"))
    assert lines(lambda: suggest(today)) < 0.7 * tries * capturing


class WritesParameter(torch.nn.Module):
    """Sets a parameter from the first batch, as an ActNorm does."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(1, 8))
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("done", torch.tensor(0.0))

    def forward(self, x):
        x = self.linear(x)
        if not self.done > 0.0:
            self.scale.data = (-torch.log(x.std(0, keepdim=True) + 1e-6)).data
            self.done = torch.tensor(1.0)
        return x * torch.exp(self.scale)


def test_a_graph_that_was_captured_under_no_grad_is_rebuilt_so():
    model = fxamp.convert(WritesParameter(), FP16)
    with torch.no_grad():
        model(X)
    model(X).sum().backward()
    before = totals(report(model))
    assert isinstance(report(model).suggest(), list)
    denied = what_if(model, deny=["linear"])
    assert denied.low_precision_nodes < before[0] and totals(report(model)) == before
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_move_that_changes_nothing_gives_the_same_types_in_either_grad_mode(grad_mode):
    model = fxamp.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)), FP16)
    with torch.set_grad_enabled(grad_mode):
        model(X)
    for asked in (True, False):
        with torch.set_grad_enabled(asked):
            assert totals(what_if(model, deny=[])) == totals(report(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_at_o3_nothing_is_said_of_hooks(dtype):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    fired = []
    net[0].register_forward_hook(lambda *_: fired.append(1))
    x = torch.randn(4, 3, 8, 8)
    model = fxamp.convert(copy.deepcopy(net), dtype, (x,), opt_level="O3")
    for loss in (None, lambda output: output.float().mean()):
        compared = fxamp.compare(net, model, (x,), loss)
        assert 0 < compared.output < 0.02 and {row.op for row in compared.rows} >= {"batch_norm", "relu"}
        assert fxamp.find_nan(model, (x,), loss) is None
    assert what_if(model, deny=["relu"]).total_nodes == report(model).total_nodes
    assert fxamp.explain(model, "batch_norm").startswith("op batch_norm: 1 of 1 node in")


def test_at_o3_an_overflow_is_held_against_float32():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    with torch.no_grad():
        net[2].weight.fill_(6e4)
    x = torch.randn(4, 8)
    model = fxamp.convert(net, FP16, (x,), opt_level="O3")
    found = fxamp.find_nan(model, (x,))
    assert (found.op, found.is_bad_in_float32) == ("linear", False) and found.module == "2"


class AsksForGradients(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if torch.is_grad_enabled() else self.linear(x).tanh()


def test_a_model_that_asks_for_the_grad_mode_gets_the_answer_of_the_capture():
    model = fxamp.convert(AsksForGradients(), FP16)
    with torch.no_grad():
        model(X)
    after = what_if(model, deny=["linear"])
    assert [row.op for row in after.rows if row.op in ("linear", "tanh")] == ["linear", "tanh"]


class Named(torch.nn.Module):
    """Parts with the names of ops."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.add_module(name, torch.nn.LayerNorm(64))
        self.name = name

    def forward(self, x):
        return self.last(getattr(self, self.name)(self.first(x)))


@pytest.mark.parametrize("name", ["norm", "dropout", "softmax"])
def test_a_module_with_the_name_of_an_op_that_the_model_has_not_is_the_module(name):
    x = torch.randn(8, 64)
    asked = fxamp.what_if(fxamp.convert(Named(name), torch.float16, (x,)), deny=[name])
    made = fxamp.report(fxamp.convert(Named(name), torch.float16, (x,), overrides={name: "deny"}))
    assert asked.summary() == made.summary()
    assert [row.precision for row in asked.rows if row.op == "layer_norm"] == ["high"]


def test_a_name_that_is_an_op_and_a_module_is_the_op_and_that_is_said_once():
    converted = fxamp.convert(Named("linear"), torch.float16, (torch.randn(8, 64),))
    with pytest.warns(FxampWarning) as said:
        found = [fxamp.what_if(converted, deny=["linear"]) for _ in range(2)][-1]
    assert {row.precision for row in found.rows if row.op == "linear"} == {"high"}
    (text,) = (str(each.message) for each in said)
    assert "'linear' is taken for the op; a glob ('*linear') names the module" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = fxamp.what_if(converted, deny=["*linear"])
        fxamp.what_if(converted, deny=["layer_norm"])  # which is the name of its node, too
    assert {row.op for row in found.rows if row.precision == "high" and not row.is_source} >= {"layer_norm"}


def test_suggestions_say_nothing_of_names_that_nobody_gave(caplog):
    converted = fxamp.convert(Two(lambda m, x: m.b(m.a(x) + x)), FP16, (X,))
    assert any("'add'" in move.move for move in fxamp.report(converted).suggest())
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_suggestion_whose_name_is_a_node_and_an_op_says_which():
    converted = fxamp.convert(Two(lambda m, x: m.b(m.a(x) + x) + x), FP16, (X,), level="strict")
    (move,) = [move for move in fxamp.report(converted).suggest() if "'add'" in move.move]
    assert move.move == "allow=['add'] (the op, wherever it stands)"
    lists = fxamp.OpLists.default().override(allow=["add"])
    after = fxamp.convert(Two(lambda m, x: m.b(m.a(x) + x) + x), FP16, (X,), level="strict", lists=lists)
    assert move.casts == report(converted).casts - report(after).casts


def test_an_op_that_nothing_of_the_model_is_called_changes_nothing():
    converted = fxamp.convert(Named("part"), torch.float16, (torch.randn(8, 64),))
    assert fxamp.what_if(converted, deny=["softmax"]).summary() == fxamp.report(converted).summary()


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        ((1, 1, -5100), "saves 1 cast, 1 launch, but costs 5.1 kB; today: why"),
        ((4, 3, 5100), "saves 4 casts, 3 launches, 5.1 kB; today: why"),
    ],
)
def test_a_move_that_costs_bytes_does_not_claim_to_save_them(saved, told):
    assert str(Suggestion("deny=['exp']", *saved, "why")) == f"deny=['exp']: {told}"
