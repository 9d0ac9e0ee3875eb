"""fxamp.report: what is counted is what runs."""

import copy
import json

import pytest
import torch
from review_cases import CASES, FP16, Language, Two, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.counting.counts import Counter
from fxamp.counting.zoo import MODELS
from fxamp.review.counted import is_cast, is_node, is_weight_cast
from fxamp.review.gemms import gemms_of
from fxamp.review.regions import regions_of
from fxamp.review.report import report

X = torch.linspace(-1, 1, 32).reshape(4, 8)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Conversions(TorchDispatchMode):
    """Counts tensors that ATen really converts between float32 and a low dtype."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.add(args[0], out)
        elif func is torch.ops.aten._foreach_copy_.default:
            for source, target in zip(args[1], args[0], strict=True):
                self.add(source, target)
        return out

    def add(self, source, target):
        self.count += source.dtype in FLOATS and target.dtype in FLOATS and source.dtype != target.dtype


def executed(model, *inputs) -> int:
    with Conversions() as seen, torch.no_grad():
        model(*inputs)
    return seen.count


@pytest.fixture(scope="module")
def language():
    torch.manual_seed(0)
    return fxamp.convert(Language().eval(), FP16, (tokens(),))


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_counted_casts_are_those_that_run(level, dtype):
    model = fxamp.convert(Language().eval(), dtype, (tokens(),), level=level)
    built = report(model)
    assert built.weight_casts > 5
    assert executed(model, tokens()) == built.casts + built.weight_casts + built.casts_inside


COUNTED = [case for case in CASES if case.kind != "level"]  # O3 converts the model itself


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.kind)
def test_counted_casts_are_those_that_run_for_every_kind_of_reason(case):
    model = fxamp.convert(case.model(case.function), case.dtype, (X,), **case.options)
    built = report(model)
    assert executed(model, X) == built.casts + built.weight_casts + built.casts_inside + built.user_casts


@pytest.mark.parametrize("name", ["bert_base", "llama_1b", "lstm_lm", "resnet50", "unet", "vit_b16"])
def test_counted_casts_are_those_that_run_in_real_models(name):
    torch.manual_seed(0)
    step = MODELS[name](True)
    model = fxamp.convert(step.model, torch.bfloat16, step.inputs)
    built = report(model)
    assert executed(model, *step.inputs) == built.casts + built.weight_casts + built.casts_inside + built.user_casts


class Grown(torch.nn.Module):
    """Weights whose padded copies grow in every way: rows, columns, channels, the gates of an LSTM."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 30, 3, padding=1), torch.nn.Conv2d(30, 20, 3, padding=1)
        self.lstm, self.head = torch.nn.LSTM(20, 13), torch.nn.Linear(13, 17)

    def forward(self, images):
        features = self.second(self.first(images).relu()).mean(3)
        return self.head(self.lstm(features.permute(0, 2, 1))[0])


@pytest.mark.parametrize("pad", ["auto", "always"])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_counted_launches_and_bytes_are_those_of_the_counter(opt_level, pad):
    images = torch.randn(2, 3, 16, 16)
    model = fxamp.convert(Grown(), torch.float16, (images,), opt_level=opt_level, pad=pad)
    built = report(model)
    with Counter() as counter:
        model(images)
    assert built.launches == counter.counts.forward_casts
    assert built.cast_bytes + built.weight_cast_bytes == counter.counts.cast_nbytes
    assert built.cast_bytes_are_exact and bool(built.padded) == (pad == "always")


def test_only_what_grew_is_padded():
    """The statistics of a batch norm and a bias of minus infinity are read and made, and have other shapes by birth."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Conv2d(8, 17, 1), torch.nn.BatchNorm2d(17), torch.nn.Conv2d(17, 8, 1))
    found = report(fxamp.convert(layers, torch.bfloat16, (torch.randn(2, 8, 4, 4),), pad="always")).padded
    assert {(each.logical, each.padded) for each in found} == {(17, 24)}

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(64, 51, bias=False)

        def forward(self, x, targets):
            return torch.nn.functional.cross_entropy(self.head(x), targets)

    inputs = torch.randn(16, 64), torch.randint(51, (16,))
    found = report(fxamp.convert(Head(), torch.float16, inputs, pad="always")).padded
    assert {(each.logical, each.padded) for each in found} == {(51, 56)}


class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(16, 16, batch_first=True), torch.nn.Linear(16, 8)

    def forward(self, x, lengths):
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.lstm(packed)[0].data)


@pytest.mark.parametrize("lengths", [[5, 5, 5], [5, 3, 2]])
def test_bytes_behind_a_packed_sequence_are_the_most_there_can_be(lengths):
    inputs = torch.randn(3, 5, 16), torch.tensor(lengths)
    built = report(model := fxamp.convert(Packed(), torch.float16, inputs))
    with Counter() as counter:
        model(*inputs)
    assert built.launches == counter.counts.forward_casts
    told = built.cast_bytes + built.weight_cast_bytes
    saved = 6 * (15 - sum(lengths)) * (16 + 8)  # rows that are cast: 16 numbers on the way in, 8 on the way out
    assert told == counter.counts.cast_nbytes + saved
    assert not built.cast_bytes_are_exact and "at most" in str(built)
    assert not json.loads(built.to_json())["cast_bytes_are_exact"]


def test_counting_notices_a_cast_that_is_not_counted(language):
    with Conversions() as seen:
        X.half().float()
    assert seen.count == 2


def test_totals_follow_from_the_rows(language):
    built = report(language)
    assert built.low_precision_nodes == sum(is_node(row) and row.precision == "low" for row in built.rows)
    assert built.casts == sum(map(is_cast, built.rows)) == 1
    assert built.weight_casts == sum(map(is_weight_cast, built.rows))
    assert built.total_nodes == sum(map(is_node, built.rows))
    assert built.launches <= built.casts + built.weight_casts


def test_the_summary_is_the_line_of_the_field(language):
    built = report(language)
    assert built.summary() == (
        f"Converted {built.low_precision_nodes}/{built.total_nodes} nodes to float16 precision using "
        f"{built.casts_to_low} cast(s) to float16 (excluding {built.weight_casts} weight casts)"
    )


def shared(boundaries="blocks"):
    torch.manual_seed(0)
    return fxamp.convert(Language().eval(), FP16, (tokens(),), level="strict", boundaries=boundaries)


def counted(model, *inputs):
    with Counter() as counter, torch.no_grad():
        model(*inputs)
    return counter.counts


def assert_totals_are_what_runs(model, *inputs):
    built, found = report(model), counted(model, *inputs)
    assert built.launches + built.casts_inside == found.forward_casts > 0
    assert built.casts + built.weight_casts + built.casts_inside == found.forward_tensors_cast
    told = built.cast_bytes + built.weight_cast_bytes
    assert told == found.cast_nbytes or (built.casts_inside and told < found.cast_nbytes), "which have no size here"
    return built


def test_a_graph_of_equal_blocks_counts_as_often_as_it_runs():
    built = assert_totals_are_what_runs(shared(), tokens())
    assert built.runs == (1, 2)
    assert built.total_nodes == sum(row.runs for row in built.rows if is_node(row))
    assert built.low_precision_nodes == sum(row.runs for row in built.rows if is_node(row) and row.precision == "low")
    assert "equal blocks share graphs: 2 run 3 times, and totals count each time" in str(built)
    alone = report(shared("blocks.0")), report(shared("blocks.1"))
    assert sum(gemm.work for gemm in built.gemms) == sum(gemm.work for gemm in alone[0].gemms)
    assert built.coverage == pytest.approx(alone[0].coverage) and alone[0].runs == alone[1].runs == (1, 1)


class Often(torch.nn.Module):
    """Equal blocks of which the first is called twice, another never, and one has a weight that float16 rounds to 0."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Scaled() for _ in range(4))
        with torch.no_grad():
            self.blocks[2].scale.fill_(1e-9)

    def forward(self, x):
        for number in (0, 0, 1, 2):
            x = self.blocks[number](x)
        return x


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.b(self.a(x) * self.scale)


def test_a_block_counts_as_often_as_it_is_called_and_in_the_graph_that_takes_it():
    model = fxamp.convert(Often(), FP16, (X,), boundaries=Scaled)
    model(X)
    built = assert_totals_are_what_runs(model, X)
    assert sorted(built.runs) == [1, 1, 3]
    model.eval()(X)
    assert sum(report(model).runs) == sum(built.runs), "no training flag was read"


class Nested(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pairs = torch.nn.ModuleList(torch.nn.Sequential(Scaled(), torch.nn.Dropout(0.0), Scaled()) for _ in "ab")

    def forward(self, x):
        for pair in self.pairs:
            x = pair(x)
        return x


def test_blocks_inside_of_blocks_and_graphs_for_training_and_evaluation():
    model = fxamp.convert(Nested(), FP16, (X,), boundaries=["pairs.?", Scaled])
    model(X)
    assert assert_totals_are_what_runs(model, X).runs == (1, 2, 4)
    model.eval()(X)
    assert sorted(report(model).runs) == [1, 1, 2, 2, 4]


class Shapes(torch.nn.Module):
    """Equal layers that are given other shapes: they share an engine, and each graph is for some of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        h = self.a(x)
        if h.sum().item() > 1e30:
            return h
        return self.c(self.b(h[None]).relu())[0]


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_equal_layers_count_in_the_graphs_that_run_for_them(opt_level):
    model = fxamp.convert(Shapes(), FP16, opt_level=opt_level)
    for _ in range(3):
        model(X).sum().backward()
    for _ in range(2):  # asking for a report is no call
        built = report(model)
        assert built.runs == (1, 2)
        assert built.low_precision_nodes == sum(
            row.runs for row in built.rows if row.precision == "low" and is_node(row)
        )
        assert sum(row.runs for row in built.rows if row.op == "linear") == 3


def test_around_blocks_that_no_graph_can_hold_each_is_called_once():
    class Branches(Nested):
        def forward(self, x):
            return super().forward(x) if x.erf().sum() > 1e30 else super().forward(x * 2)

    model = fxamp.convert(Branches(), FP16, (X,), boundaries=Scaled)
    model(X)
    assert assert_totals_are_what_runs(model, X).runs[-1] == 4


def test_bytes_moved_by_casts(language):
    built = report(language)
    casts = [row for row in built.rows if is_cast(row)]
    elements = sum(torch.Size(row.shape).numel() for row in casts)
    assert built.cast_bytes == 6 * elements


def test_json_holds_every_row_and_the_totals(language):
    built = report(language)
    read = json.loads(built.to_json())
    assert [row["name"] for row in read["rows"]] == [row.name for row in built.rows]
    assert read["casts"] == built.casts and read["summary"] == built.summary()
    assert read["rows"][0]["shape"] == [2, 8]


def test_the_table_has_a_line_for_every_node_but_parameter_reads(language):
    built = report(language)
    lines = str(built).splitlines()
    for row in built.rows:
        named = [line for line in lines if line.split()[:1] == [row.name]]
        assert len(named) == (row.op not in ("parameter", "buffer")), row.name
    assert lines[0] == built.summary()


def test_gemm_work_and_its_alignment(language):
    built = report(language)
    head = next(gemm for gemm in built.gemms if gemm.module == "head")
    assert (head.batch, head.m, head.n, head.k) == (1, 16, 30, 16)
    assert head.unaligned == ("n = 30 (out_features)",)
    assert built.coverage == 1.0
    assert any("n = 30 (out_features) is no multiple of 8" in text and "32" in text for text in built.advice)


def test_gemms_of_every_shape():
    def every(m, x):
        a = m.a(x)
        image = a.reshape(1, 2, 4, 4)
        kernel = m.b.weight.reshape(8, 2, 2, 2)
        batched = a.reshape(2, 2, 8)
        return (
            torch.nn.functional.conv2d(image, kernel),
            torch.bmm(batched, batched.transpose(1, 2)),
            torch.addmm(m.a.bias, a, m.b.weight),
            a @ m.a.bias,
            torch.mv(a, m.a.bias),
            torch.addmv(a[:, 0], a, m.a.bias),
            torch.baddbmm(batched[:, :, :2], batched, batched.transpose(1, 2)),
            torch.addbmm(a[:2, :2], batched, batched.transpose(1, 2)),
            torch.inner(a, m.b.weight[:3]),
            torch.nn.functional.conv_transpose2d(image, m.b.weight.reshape(2, 8, 2, 2)),
        )

    model = fxamp.convert(Two(every), FP16, (X,))
    sizes = [(g.op, g.batch, g.m, g.n, g.k) for g in gemms_of(model._fxamp_engine.all_variants()[0].graph)]
    assert sizes == [
        ("linear", 1, 4, 8, 8),
        ("conv2d", 1, 9, 8, 8),
        ("bmm", 2, 2, 2, 8),
        ("addmm", 1, 4, 8, 8),
        ("matmul", 1, 4, 1, 8),
        ("mv", 1, 4, 1, 8),
        ("addmv", 1, 4, 1, 8),
        ("baddbmm", 2, 2, 2, 8),
        ("addbmm", 1, 2, 2, 16),
        ("inner", 1, 4, 3, 8),
        ("conv_transpose2d", 1, 16, 32, 2),
    ]


def test_float32_regions_are_connected_and_largest_first():
    def regions(m, x):
        return m.b(m.a(x).exp() + 1.0) * 1.0, m.a(x)[:1].exp()

    found = regions_of(report(fxamp.convert(Two(regions), FP16, (X,))).rows)
    assert [region.nodes for region in found] == [("exp", "add"), ("exp_1",)]
    assert [region.nbytes for region in found] == [2 * 4 * 8 * 4, 8 * 4]
    assert found[0].cause == "exp"


def test_what_stays_outside_is_named():
    case = next(case for case in CASES if case.kind == "type")
    built = report(fxamp.convert(case.model(case.function), FP16, (X,), **case.options))
    assert (
        len(built.outside) == 1
        and "linear: hooks on it keep it whole: its weights are read inside the module" in built.outside[0]
    )


def test_active_variables_are_echoed_with_the_nodes_they_touched(monkeypatch):
    monkeypatch.setenv("FXAMP_DENYLIST_ADD", "linear")
    built = report(fxamp.convert(Two(lambda m, x: m.b(m.a(x))), FP16, (X,)))
    assert [(v.name, v.value, v.nodes) for v in built.environment] == [("FXAMP_DENYLIST_ADD", "linear", 2)]
    assert any(text.startswith("no node runs in low precision") for text in built.advice)


def test_without_example_inputs_it_is_a_preview():
    built = report(fxamp.convert(Two(lambda m, x: m.a(x)), FP16))
    assert built.is_preview and built.cast_bytes is None and built.coverage is None
    assert "preview" in str(built)


class Innermost(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.fc(x)).float() * 2


class Twice(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.parts = torch.nn.ModuleList([kind(), kind()])

    def forward(self, x):
        return self.parts[1](self.parts[0](x))


class Deep(Twice):
    def __init__(self):
        super().__init__(lambda: Twice(Innermost))
        self.head = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.head(super().forward(x))


def test_blocks_within_blocks_are_counted_before_the_first_call():
    """What a model's own code converts, and what it moves, as often as its block runs."""
    model = fxamp.convert(Deep(), torch.float16, (X,), boundaries=("parts.?", Twice, Innermost))
    before = report(model)
    with Counter() as counter:
        model(X)
    after = report(model)
    assert not before.is_preview and before.runs == after.runs == (1, 2, 4)
    for built in (before, after):
        assert (built.casts, built.user_casts, built.launches) == (6, 4, 11)
        moved = built.cast_bytes + built.weight_cast_bytes + built.user_cast_bytes
        assert moved == counter.counts.cast_nbytes and built.user_cast_bytes == 4 * 32 * (2 + 4)
    assert before.regions == after.regions and {region.nbytes for region in after.regions if region.graph == 2} == {
        4 * 32 * 4 * nodes for nodes in {len(region.nodes) for region in after.regions if region.graph == 2}
    }


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["original first", "copy first"])
def test_a_copy_of_a_converted_model_reads_its_own_batch_norm(order):
    """Copies share a graph, which belongs to the one that was called first."""
    model = fxamp.convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)), torch.bfloat16)
    both = (model, copy.deepcopy(model))
    for position in order:
        both[position](X)
    assert [report(each).outside for each in both] == [(), ()]


def test_what_a_shell_shows_is_one_line():
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(4, 8)
    converted = fxamp.convert(model, torch.bfloat16, (x,))
    shown = [
        repr(fxamp.report(converted)),
        repr(fxamp.compare(model, converted, (x,))),
        repr(fxamp.profile(model, [(x,)])),
    ]
    assert all("\n" not in text and len(text) < 200 for text in shown), shown
    assert shown[0] == f"<Report of Sequential: {fxamp.report(converted).summary()}>"
