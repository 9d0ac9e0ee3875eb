"""profile: exponents counted exactly, shares that float16 really loses, and a conversion that uses them."""

import json
import math
import sys
import warnings

import pytest
import torch
from torch import nn

import fxamp
from fxamp.errors import OptionError
from fxamp.instruments import profile
from fxamp.numerics.histogram import Histogram, exponent_of_zero
from fxamp.numerics.ranges_file import load_ranges
from fxamp.review.report import report

FP16, BF16 = torch.float16, torch.bfloat16
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def every_number(dtype):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).float()


def histogram(values):
    found = Histogram()
    found.add(values)
    return found


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_exponents_of_all_16_bit_numbers(dtype):
    numbers = every_number(dtype)
    found = histogram(numbers)
    finite = numbers[numbers.isfinite() & (numbers != 0)].double()
    expected = {}
    for exponent in torch.log2(finite.abs()).floor().int().tolist():
        expected[exponent] = expected.get(exponent, 0) + 1
    assert found.exponents() == expected
    assert (found.zeros, found.infinite) == (2, 2)
    assert found.total == numbers.numel()
    assert found.largest == torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_flushed_and_overflown_shares_are_those_of_a_cast(dtype):
    torch.manual_seed(0)
    fractions, exponents = torch.rand(20000) + 1.0, torch.randint(-140, 127, (20000,))
    values = torch.ldexp(fractions.double(), exponents).float()
    found, cast = histogram(values), values.to(dtype)
    assert found.share_flushed(dtype) == int((cast == 0).sum()) / values.numel()
    assert found.share_overflown(dtype) == int(cast.isinf().sum()) / values.numel()


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-10])
def test_shares_under_a_scale(scale):
    values = torch.ldexp(torch.full((60,), 1.5), torch.arange(-40, 20))
    cast = (values * scale).to(FP16)
    assert histogram(values).share_flushed(FP16, scale) == int((cast == 0).sum()) / 60
    assert histogram(values).share_overflown(FP16, scale) == int(cast.isinf().sum()) / 60


def test_overflow_is_told_to_the_last_bit():
    largest = torch.nextafter(torch.tensor(65520.0), torch.tensor(0.0))
    assert not histogram(largest).overflows(FP16) and histogram(torch.tensor(65520.0)).overflows(FP16)
    assert exponent_of_zero(FP16) == -25


def test_histograms_add_up():
    whole, parts = histogram(X), histogram(X[:2])
    parts.merge(histogram(X[2:]))
    assert parts.exponents() == whole.exponents() and parts.largest == whole.largest


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.norm(self.a(x)) * 3e4 * 4.0)


def test_values_and_gradients_are_those_of_a_plain_run():
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    seen = {}

    def hook(module, args, output):
        output.register_hook(lambda gradient: seen.update(tanh=gradient))

    net[1].register_forward_hook(hook)
    plain = net(X)
    plain.pow(2).mean().backward()
    net = nn.Sequential(*net)
    net[1]._forward_hooks.clear()
    ranges = profile(net, [X], lambda output: output.pow(2).mean(), progress=False)
    assert ranges.nodes["linear_1"].values.exponents() == histogram(plain).exponents()
    assert ranges.nodes["tanh"].gradients.exponents() == histogram(seen["tanh"]).exponents()


def test_the_model_is_left_as_it_was():
    net = Net().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    profile(net, [X, X + 1], lambda output: output.mean(), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters()) and net.training


def test_what_overflows_is_suggested_and_kept_in_float32():
    net = Net()
    ranges = profile(net, [X], lambda output: output.mean() * 1e-6, progress=False)
    evidence = ranges.deny()
    assert any("overflows float16" in text for text in evidence.values()), evidence
    plain, fed = fxamp.convert(net, FP16, (X,)), fxamp.convert(net, FP16, (X,), ranges=ranges)
    rows = {row.name: row for row in report(fed).rows}
    assert all(rows[name].precision == "high" for name in evidence)
    assert {row.reason_kind for row in report(fed).rows} >= {"ranges"}
    assert rows["linear_1"].precision == "high", "it reads a value that overflows"
    assert not bool(plain(X).isfinite().all()) and bool(fed(X).isfinite().all())


class Scale(nn.Module):
    def forward(self, x):
        return x * 3e4 * 4.0


class Moved(Net):
    """The same with the scaling in a module of its own, and a layer more."""

    def __init__(self):
        super().__init__()
        self.scale, self.more = Scale(), nn.Linear(8, 8)

    def forward(self, x):
        return self.more(self.b(self.scale(self.norm(self.a(x)))))


@pytest.mark.parametrize("example", [(X,), None], ids=["example", "preview"])
def test_ranges_of_another_model_are_told(example):
    ranges = profile(Net(), [X], lambda output: output.mean() * 1e-6, progress=False)
    with pytest.warns(UserWarning, match="ranges do not fit") as said:
        fxamp.convert(Moved(), FP16, example, ranges=ranges)
    (told,) = {str(warning.message) for warning in said}
    assert told.startswith(
        "the ranges do not fit this model: 3 of 6 nodes were not measured (mul of scale, mul_1 of scale, linear_2 of "
        "more), and 2 of the 5 that were measured have no place among them: mul, mul_1 (float16 does not hold mul_1). "
    ), told
    assert told.endswith("Measure this model, captured as here: fxamp.profile(converted, batches).")


@pytest.mark.parametrize("pad", ["auto", "always"])
def test_nothing_is_said_of_ranges_of_the_model_itself(pad):
    class Several(nn.Module):
        """A graph for each flag."""

        def __init__(self):
            super().__init__()
            self.net, self.norm, self.lstm = Net(), nn.BatchNorm1d(8), nn.LSTM(8, 6)

        def forward(self, x, flag=True):
            y = self.norm(self.net(x)) if flag else (self.lstm(x)[0] * 2).add_(1.0)
            return nn.functional.gelu(y, approximate="tanh").mean()

    model, batches = Several(), [X, (X, False)]
    ranges = profile(model, batches, lambda output: output * 1e-6, progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ranges")
        fed = fxamp.convert(model, FP16, ranges=ranges, pad=pad)
        fed(X), fed(X, False)
    assert {row.reason_kind for row in report(fed).rows} >= {"ranges"}


def test_a_preview_with_other_types_than_the_call_is_no_reason_to_warn():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
            return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0])[0]

    inputs = torch.randn(5, 3, 8), torch.tensor([5, 3, 2])
    model = Packed()
    ranges = profile(model, [inputs], progress=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ranges")
        fxamp.convert(model, FP16, ranges=ranges)(*inputs)


def test_the_loss_scale_is_the_guides():
    net = nn.Sequential(nn.Linear(8, 8))
    ranges = profile(net, [X], lambda output: output.sum() * 2.0**-20, progress=False)
    assert ranges.gradients.largest == 2.0**-20
    assert ranges.weight_gradients.largest == 2.0**-18  # the bias's: a sum over four rows
    assert ranges.loss_scale == 2.0**33
    assert profile(net, [X], progress=False).loss_scale is None


@pytest.mark.parametrize("rows", [4, 512])
def test_the_loss_scale_keeps_the_weights_gradients_too(rows):
    """A weight's gradient is a sum over the batch, and may be far larger than any activation's."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.rand(rows, 8) * 50
    loss = lambda output: output.float().sum()  # noqa: E731
    with torch.no_grad():
        net[0].weight.abs_()
    ranges = profile(net, [x[: rows // 2], x], loss, progress=False)
    loss(net(x)).backward()
    largest = max(float(weight.grad.abs().max()) for weight in net.parameters())
    assert ranges.weight_gradients.largest == largest > 10 * ranges.gradients.largest
    assert ranges.weight_gradients.total == 2 * sum(weight.numel() for weight in net.parameters())
    assert ranges.loss_scale * largest <= 65504 < 2 * ranges.loss_scale * largest
    converted = fxamp.convert(net, FP16, (x,))
    converted.zero_grad()
    scaler = fxamp.StaticLossScaler(ranges.loss_scale)
    scaler.scale(loss(converted(x))).backward()
    assert not scaler.step(torch.optim.SGD(converted.parameters(), 1e-6)).skipped
    assert f"of a weight {largest:.3g}" in str(ranges).splitlines()[-1]


def test_sparse_gradients_of_a_table():
    table = nn.Embedding(10, 4, sparse=True)
    ranges = profile(table, [torch.tensor([1, 1, 3])], lambda output: output.sum() * 3.0, progress=False)
    assert ranges.weight_gradients.largest == 6.0


def test_files_without_weights_gradients_are_read(tmp_path):
    ranges = profile(Net(), [X], lambda output: output.mean() * 1e-6, progress=False)
    plain = ranges.as_dict()
    del plain["weight_gradients"]
    (tmp_path / "ranges.json").write_text(json.dumps(plain))
    again = load_ranges(tmp_path / "ranges.json")
    assert again.nodes["linear"].gradients.largest == ranges.nodes["linear"].gradients.largest
    assert again.weight_gradients.total == 0


def test_files_without_places_are_read(tmp_path):
    ranges = profile(Sized(), [(torch.randn(4, 8), torch.ones(4).bool())], progress=False)
    ranges.save(tmp_path / "ranges.json")
    written = json.loads((tmp_path / "ranges.json").read_text())
    for node in written["nodes"]:
        del node["text"], node["number"]
    (tmp_path / "ranges.json").write_text(json.dumps(written))
    found = [node.place for node in load_ranges(tmp_path / "ranges.json").nodes.values()]
    assert found == [node.place for node in ranges.nodes.values()] and any(place.number for place in found)


def test_pairs_and_batches_of_several_forms():
    net = nn.Linear(8, 8)
    targets = torch.zeros(4, dtype=torch.long)
    two = profile(net, [(X, targets)] * 2, nn.CrossEntropyLoss(), progress=False)
    one = profile(net, [X], lambda output: nn.functional.cross_entropy(output, targets), progress=False)
    assert two.batches == 2 and one.batches == 1
    assert two.nodes["linear"].values.total == 2 * one.nodes["linear"].values.total
    assert two.nodes["linear"].gradients.largest == one.nodes["linear"].gradients.largest


def test_saved_ranges_come_back(tmp_path):
    ranges = profile(Net(), [X], lambda output: output.mean() * 1e-6, progress=False)
    ranges.save(tmp_path / "ranges.json")
    again = load_ranges(tmp_path / "ranges.json")
    assert again.as_dict() == ranges.as_dict() and again.deny() == ranges.deny()
    (tmp_path / "ranges.json").write_text("{}")
    with pytest.raises(OptionError, match=r"ranges\.json' holds no ranges"):
        load_ranges(tmp_path / "ranges.json")


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    ranges = profile(Net(), [X], lambda output: output.mean() * 1e-6, progress=False)
    assert ranges.plot(tmp_path / "ranges.png").stat().st_size > 10000


def test_without_matplotlib_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ranges = profile(Net(), [X], progress=False)
    with pytest.raises(OptionError, match=r"plots need matplotlib\. Run: pip install 'fxamp\[review\]'"):
        ranges.plot(tmp_path / "ranges.png")


def test_a_picture_or_ranges_that_cannot_be_written_are_named(tmp_path):
    pytest.importorskip("matplotlib")
    ranges = profile(Net(), [X], progress=False)
    with pytest.raises(OptionError, match=r"the picture cannot be written to .*nowhere"):
        ranges.plot(tmp_path / "nowhere" / "ranges.png")
    with pytest.raises(OptionError, match=r"the ranges cannot be written to .*nowhere"):
        ranges.save(tmp_path / "nowhere" / "ranges.json")
    assert list(tmp_path.iterdir()) == []


def test_the_table_puts_what_hurts_first():
    ranges = profile(Net(), [X], lambda output: output.mean() * 1e-6, progress=False)
    lines = str(ranges).splitlines()
    assert "overflows float16" in lines[2]
    assert "loss scale" in lines[-1]


@pytest.mark.parametrize(
    "batches, loss_fn, said",
    [
        ([], None, "profile got no batches"),
        ([X.clone().fill_(math.nan)], None, "batch 0 holds NaN or infinite inputs"),
        ([X, X.clone().fill_(math.inf)], None, r"batch 1 holds .*\(float32 \[4, 8\] nothing finite, 32 inf\)"),
        ([X], lambda output: output.sum() * math.inf, r"the loss of batch 0 is .*inf"),
        ([X], lambda output: output, "not a scalar tensor"),
        ([X], lambda output, target: output.sum(), r"a batch must be \(inputs, targets\), not Tensor"),
    ],
)
def test_batches_that_mean_nothing_are_named(batches, loss_fn, said):
    with pytest.raises(OptionError, match=said):
        profile(nn.Linear(8, 8), batches, loss_fn, progress=False)


def test_gradients_that_were_not_measured_are_not_told_as_zeros():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    head = str(profile(model, [X], progress=False)).splitlines()[0]
    assert "largest" in head and "grad" not in head

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.trained = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

        def forward(self, x):
            return self.trained(self.frozen(x).tanh())

    lines = str(profile(Twice(), [X], lambda output: output.sum(), progress=False)).splitlines()
    start = lines[0].index("largest grad")
    cells = {line.split()[0]: line[start:].strip() for line in lines[2:-1]}
    assert cells["tanh"] == "" and cells["linear_1"] == "1               0.00%           0.00%"


def test_a_mask_of_minus_infinity_among_the_inputs_is_no_bad_data():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x, mask):
            return torch.softmax(self.a(x) @ x.t() + mask, -1)

    mask = torch.full((4, 4), -math.inf).triu(1)
    ranges = profile(Attention(), [(X, mask)], progress=False)
    assert ranges.nodes["softmax"].values.largest == 1.0
    assert fxamp.audit(Attention(), (X, mask)) is not None


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("scale", [1.0, 2.0**7, 2.0**-9])
def test_shares_are_those_of_a_cast_for_every_exponent_ties_included(dtype, scale):
    """Powers of two, their neighbours, and the last numbers before the next one: half a step of rounding is a tie."""
    step, last = torch.finfo(dtype).eps, 2.0**-23
    fractions = torch.tensor([1.0, 1.0 + last, 1.5, 2 - step, 2 - step / 2 - last, 2 - step / 2, 2 - last])
    for exponent in range(-149, 128):
        values = torch.ldexp(fractions.double(), torch.tensor(exponent)).float()
        for value in values[values.isfinite() & (values != 0)].unique():
            cast = (value.double() * scale).to(torch.float32).to(dtype)
            if (value.double() * scale).float().double() != value.double() * scale:
                continue  # the product itself would be rounded first
            found = histogram(value)
            assert found.share_flushed(dtype, scale) == float(cast == 0), value
            assert found.share_overflown(dtype, scale) == float(cast.isinf()), value
            assert scale != 1.0 or found.overflows(dtype) == bool(cast.isinf())


def test_ties_are_kept_by_files_and_sums(tmp_path):
    ranges = profile(Net(), [X], lambda output: output.sum() * 2.0**-25, progress=False)
    ranges.save(tmp_path / "ranges.json")
    again = load_ranges(tmp_path / "ranges.json")
    assert ranges.gradients.powers.sum() > 0
    assert again.gradients.share_flushed(FP16) == ranges.gradients.share_flushed(FP16) > 0
    assert again.nodes["linear"].values.share_overflown(BF16, 2.0**130) > 0
    old = json.loads((tmp_path / "ranges.json").read_text())
    for each in [old["weight_gradients"], *(node[key] for node in old["nodes"] for key in ("values", "gradients"))]:
        del each["powers"], each["rounded_up"]
    (tmp_path / "ranges.json").write_text(json.dumps(old))
    assert load_ranges(tmp_path / "ranges.json").gradients.exponents() == ranges.gradients.exponents()


def first(file):
    return file["nodes"][0]["values"]


# what is said of a file that was edited so
EDITS = {
    r"low_dtype is 'float99', not 'float16' or 'bfloat16'": lambda file: file.update(low_dtype="float99"),
    r"low_dtype is 'nn', not": lambda file: file.update(low_dtype="nn"),
    r"low_dtype is None, not a text": lambda file: file.update(low_dtype=None),
    r"batches is 'two', not a count": lambda file: file.update(batches="two"),
    r"batches is True, not a count": lambda file: file.update(batches=True),
    r"nodes is \{\}, not a list": lambda file: file.update(nodes={}),
    r"nodes\[0\] is 1, not an object": lambda file: file.update(nodes=[1]),
    r"nodes\[0\]\.op is missing": lambda file: file["nodes"][0].pop("op"),
    r"nodes\[0\]\.values is missing": lambda file: file["nodes"][0].pop("values"),
    r"exponents has '999', and exponents of float32 are -149 to 127": lambda file: first(file)["exponents"].update(
        {"999": 5}
    ),
    r"nodes\[0\]\.values\.exponents has '-400'": lambda file: first(file)["exponents"].update({"-400": 5}),
    r"exponents has 'x'": lambda file: first(file)["exponents"].update(x=5),
    r"exponents\.3 is 1\.5, not a count": lambda file: first(file)["exponents"].update({"3": 1.5}),
    r"exponents\.3 is -1, not a count": lambda file: first(file)["exponents"].update({"3": -1}),
    r"exponents\.3 is 10{30}": lambda file: first(file)["exponents"].update({"3": 10**30}),
    r"exponents is \[1\], not an object": lambda file: first(file).update(exponents=[1]),
    r"largest is 'big', not a number": lambda file: first(file).update(largest="big"),
    r"largest is nan, not a finite number": lambda file: first(file).update(largest=math.nan),
    r"weight_gradients\.zeros is None": lambda file: file["weight_gradients"].update(zeros=None),
    r"rounded_up is missing": lambda file: first(file).pop("rounded_up"),
}


@pytest.mark.parametrize("said, edit", EDITS.items(), ids=EDITS)
def test_of_a_file_edited_by_hand_the_wrong_entry_is_named(said, edit, tmp_path):
    file = json.loads(json.dumps(profile(Net(), [X], progress=False).as_dict()))
    edit(file)
    (tmp_path / "ranges.json").write_text(json.dumps(file))
    with pytest.raises(OptionError, match=rf"ranges\.json' holds no ranges \(.*{said}.*fxamp\.profile.*\.save\(path\)"):
        fxamp.convert(Net(), FP16, (X,), ranges=tmp_path / "ranges.json")


def test_a_file_that_is_a_list_is_named(tmp_path):
    (tmp_path / "ranges.json").write_text("[1]")
    with pytest.raises(OptionError, match=r"the file is \[1\], not an object"):
        load_ranges(tmp_path / "ranges.json")


def test_a_file_nested_too_deep_is_named(tmp_path):
    (tmp_path / "ranges.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(OptionError, match=r"ranges\.json' holds no ranges"):
        load_ranges(tmp_path / "ranges.json")


class Sized(nn.Module):
    """One graph for each way; the nodes behind the question have other names in each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask):
        x = self.fc(x)
        if not mask.all():
            x = x + (~mask).unsqueeze(-1)
        small = x + x.square()
        large = small * 200 * 200 + x
        return large / 40_000


@pytest.mark.parametrize("measured", [["all"], ["some"], ["all", "some"], ["some", "all"]], ids=" ".join)
def test_what_was_measured_in_one_graph_holds_in_another(measured):
    """Nodes are told by their lines: the names of one graph are those of other nodes in another."""
    torch.manual_seed(0)
    net, x = Sized(), torch.randn(4, 8)
    masks = {"all": torch.ones(4).bool(), "some": torch.tensor([True, False, True, True])}
    ranges = profile(net, [(x, masks[name]) for name in measured], progress=False)
    with warnings.catch_warnings():
        if len(measured) == 2:
            warnings.simplefilter("error", fxamp.errors.FxampWarning)
        else:
            warnings.simplefilter("ignore", fxamp.errors.FxampWarning)
        converted = fxamp.convert(net, FP16, ranges=ranges)
        for mask in masks.values():
            expected = net(x, mask)
            assert (converted(x, mask) - expected).norm() < expected.norm() * 2**-8
    denied = [row.op for row in report(converted).rows if "overflows float16" in row.reason]
    assert denied == ["mul", "add", "div"] * 2  # of what is large, and of what reads it


def test_what_is_not_finite_in_float32_is_told_below_the_table():
    class Bad(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(1, 1)

        def forward(self, x):
            return x.log(), x * 1e30 * 1e30, x.masked_fill(x < 2, -math.inf).softmax(-1)

    text = str(fxamp.profile(Bad(), [torch.tensor([[-1.0, 1.0, 2.0]])], progress=False))
    assert text.splitlines()[-1] == "not finite in float32 already: log (1 nan), mul_1 (3 inf), masked_fill (2 inf)"
    fine = str(fxamp.profile(Bad(), [torch.tensor([[2.0, 3.0, 4.0]]) * 1e-30], progress=False))
    assert "masked_fill (3 inf)" in fine.splitlines()[-1]
    assert "not finite" not in str(fxamp.profile(nn.Linear(3, 3), [torch.ones(2, 3)], progress=False))
