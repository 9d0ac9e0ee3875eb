"""fxamp.explain offers no setting that leaves the node as it is, and its chain ends at the op that its reason names."""

import re

import pytest
import torch
from review_cases import FP16, Case, Language, Two, tokens
from test_explain import converted, remedies_of
from torch import nn

import fxamp
from fxamp.lists import OpLists
from fxamp.review.explain import explain, reasons_of
from fxamp.review.report import report

BF16 = torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(4, 8)
ANGLES = torch.linspace(0, 3, 40).reshape(5, 8)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


class Rotary(nn.Module):
    """Llama's positions: halves of a low value, times sines that are made in float32."""

    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, angles):
        q, sin, cos = self.q(x), (angles.sin() * 0.5)[None], (angles.cos() * 0.5)[None]
        return self.o(q * cos + rotate_half(q) * sin)


class PostNorm(nn.Module):
    """BERT's: the sum of three embeddings is normalised, and so is each sum of the residual stream."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(30, 16), nn.Embedding(8, 16), nn.Embedding(2, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])[None]
        x = self.norms[0](self.words(tokens) + self.kinds(tokens * 0) + self.places(places))
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            x = norm(layer(x) + x)
        return x


class Shifted(nn.Module):
    """Swin's mask: regions are written in place into zeros that get the dtype of what is attended to."""

    def __init__(self):
        super().__init__()
        self.norm, self.q, self.o = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.norm(x)
        mask = x.new_zeros(4, 4)
        mask[:2, 2:] = 1.0
        mask[2:, :2] = 2.0
        mask = mask.masked_fill(mask != 0, -100.0)
        q = self.q(x)
        return self.o((q @ q.transpose(0, 1) + mask).softmax(-1) @ q)


class Buckets(nn.Module):
    """T5's: positions become indices by way of a logarithm."""

    def __init__(self):
        super().__init__()
        self.table, self.o = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        positions = torch.arange(x.shape[0])
        buckets = (torch.log(positions.float() + 1.0) * 3.0).to(torch.long)
        return self.o(self.table(buckets.clamp(max=7)) + x)


class Classifier(nn.Module):
    """What language models do when they are given labels: the logits go into a loss and to the caller."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.view(-1, 8), torch.zeros(4, dtype=torch.long)), logits


MODELS = {
    "rotary": (Rotary, (torch.ones(2, 5, 8), ANGLES)),
    "post-norm": (PostNorm, (tokens(),)),
    "pre-norm": (Language, (tokens(),)),
    "shifted": (Shifted, (X,)),
    "buckets": (Buckets, (X,)),
    "classifier": (Classifier, (X,)),
}
OPTIONS = [
    {"dtype": FP16, "level": "aggressive"},
    *({"dtype": BF16, "level": level} for level in ("balanced", "strict")),
]


def made(name, **options):
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return fxamp.convert(model().eval(), example_inputs=inputs, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_offered_for_a_node_makes_it_low(name, options):
    today = made(name, **options)
    offered = {}
    for row in report(today).rows:
        if row.precision == "high" and not row.role and row.op not in ("output", "parameter"):
            for remedy in remedies_of(today, row.name):
                if remedy.overrides:
                    offered.setdefault(tuple(remedy.overrides.items()), []).append((row.name, remedy.text))
    assert offered
    for overrides, given in offered.items():
        rows = {row.name: row for row in report(made(name, **options, overrides=dict(overrides))).rows}
        for node, text in given:
            assert rows[node].precision == "low", (node, text)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_chain_of_what_is_downstream_ends_at_the_op_that_its_reason_names(name, options):
    model = made(name, **options)
    found = [row for row in report(model).rows if row.reason_kind == "downstream" and not row.role]
    assert found or name in ("post-norm", "pre-norm", "shifted", "buckets", "classifier")
    for row in found:
        named = re.search(r"`\w+` \((\w+), deny\)", row.reason)
        chain = reasons_of(model, row.name)[0]
        assert named is None or named[1] in [link.name for link in chain], (row.name, row.reason)
        assert chain[-1].precision == "high", (row.name, [link.name for link in chain])


def test_of_two_deny_ops_the_one_that_the_reason_names_ends_the_chain():
    case = Case("", lambda m, x: m.b(m.a(x).exp().view(-1, 8) * 2.0 + x.sin()), "add", "high", (), "")
    names = [row.name for row in reasons_of(converted(case), "add")[0]]
    assert names[-1] == "exp" and "sin" not in names


def test_why_a_layer_norm_is_float32_and_what_makes_it_low():
    """The sum that its chain ends at is not all that keeps it."""
    text = explain(made("post-norm", dtype=BF16), "layer_norm")
    assert "begins the residual stream that add_2 adds to" in text
    assert 'overrides={"add_2": "allow"}' not in text
    assert 'overrides={"layer_norm": "allow"}) runs this node low whatever it reads' in text


def test_what_another_nodes_override_makes_low_names_both():
    text = explain(made("rotary", dtype=BF16, level="strict"), "mul_3")
    assert 'overrides={"sin": "allow"}) runs sin, and with it mul_3, low' in text


def test_what_reads_no_floats_is_not_said_to_run_low_by_an_override():
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x):
            return self.fc(x + torch.sin(torch.arange(16) * 1000.0))

    converted = fxamp.convert(Phases(), FP16, (torch.ones(4, 16),))
    text = explain(converted, "mul")
    assert '{"mul": "allow"} alone does not: no floating-point operand decides its dtype' in text
    assert '{"mul": "allow"}) runs' not in text


def test_what_shares_written_memory_is_told_so():
    text = explain(made("shifted", dtype=BF16, level="strict"), "setitem_1")
    assert '{"setitem_1": "allow"} alone does not: shares storage that is written in place' in text


@pytest.mark.parametrize("dtype", (FP16, BF16))
def test_what_moves_a_result_that_the_caller_gets_is_told_so(dtype):
    text = explain(made("classifier", dtype=dtype), "view")
    assert '{"view": "allow"} alone does not: it moves to' in text and "which the caller gets in float32" in text
    assert "runs this one low" not in text


class Blocks(nn.Module):
    """Equal blocks, in which an op leaves the deny list in vain, and a view's copy is a result."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.a(self.norm(x))
            return x + self.b(y.exp().log1p()) + y.view(-1, 2).float().sum(), y

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Blocks.Block() for _ in range(3)), nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x, y = block(x)
        return self.head(x + y)


def blocks(**options):
    torch.manual_seed(0)
    return fxamp.convert(Blocks().eval(), FP16, (X,), boundaries="blocks", **options)


def test_what_is_offered_inside_of_blocks_holds():
    today, offered = blocks(), []
    for row in report(today).rows:
        if row.graph and row.precision == "high" and not row.role and row.op not in ("output", "parameter"):
            offered += [(row.name, remedy) for remedy in remedies_of(today, row.name)]
    settings = [(node, remedy) for node, remedy in offered if remedy.overrides or remedy.environment]
    assert settings
    for node, remedy in settings:
        lists = OpLists.default().with_environment(remedy.environment)
        rows = report(blocks(overrides=dict(remedy.overrides) or None, lists=lists)).rows
        assert [row.precision for row in rows if row.graph and row.name == node] == ["low"], (node, remedy.text)


def test_a_list_that_leaves_a_node_of_a_block_as_it_is_is_not_offered():
    text = explain(blocks(), "log1p")
    assert "FXAMP_INFERLIST_ADD" not in text and 'overrides={"log1p": "allow"}' in text


def test_what_another_nodes_override_does_inside_of_a_block_is_tried():
    text = explain(blocks(), "view")
    assert '{"view": "allow"} alone does not: it moves to' in text


def test_a_node_that_gives_integers_costs_nothing():
    text = explain(made("buckets", dtype=BF16, level="strict"), "to")
    assert "nothing: it gives int64, and only float32 values change dtype" in text
    assert "allow" not in text and "what it costs: nothing" in text
    assert "runs in float32" not in text.splitlines()[0]


@pytest.mark.parametrize("options", [{"capture": "dynamo"}, {"boundaries": "b"}], ids=str)
def test_o2_is_not_offered_where_it_is_refused(options):
    torch._dynamo.reset()
    model = fxamp.convert(Two(lambda m, x: m.b(m.a(x))), FP16, (X,), **options)
    parameters = [row for row in report(model).rows if row.op == "parameter"]
    assert parameters
    text = explain(model, parameters[0].name)
    assert "convert(..., opt_level" not in text and "what would change it:\n  - nothing" in text


def test_at_o3_the_lists_are_offered_where_they_would_run_it_in_float32_alone():
    model = fxamp.convert(Two(lambda m, x: m.b(m.a(x).exp())), FP16, (X,), opt_level="O3")
    assert "follows the lists" in explain(model, "exp")
    assert "follows the lists" not in explain(model, "linear")
