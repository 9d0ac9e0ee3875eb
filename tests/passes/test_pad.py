"""PadGemms: what stays padded, what is sliced, what nobody may notice, and what every GEMM is told."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import fxamp
from fxamp import ir
from fxamp.canonical import canonical_text
from fxamp.errors import InvariantError
from fxamp.model.engine import engine_of
from fxamp.passes.pad import PadGemms
from fxamp.passes.pad_verify import pads_minimal
from tests.passes.pad_models import (
    BF16,
    Attention,
    Bilinear,
    Einsum,
    Flash,
    Gemms,
    Head,
    HeadAndLogits,
    Residual,
    Unet,
    assert_equal,
    assert_same,
    check,
    mlp,
    numbers,
    smoothed,
    step,
    whole_numbers,
    words,
)
from tests.runtime.test_packed_weights import Ops


class Between(nn.Module):
    """linear, something, linear: the padded value passes through `between`, or is sliced before it."""

    def __init__(self, between, width=13, out=13):
        super().__init__()
        self.one, self.two = nn.Linear(5, width), nn.Linear(out, 3)
        self.scale = nn.Parameter(torch.ones(width))
        self.between = between

    def forward(self, x):
        return self.two(self.between(self, self.one(x)))


KEEPS = {
    "relu": lambda m, y: torch.relu(y),
    "in place": lambda m, y: functional.relu(y, inplace=True),
    "gelu": lambda m, y: functional.gelu(y),
    "sigmoid": lambda m, y: torch.sigmoid(y),
    "exp": lambda m, y: torch.exp(y.clamp(max=1.0)),
    "add a number": lambda m, y: y + 2.0,
    "twice": lambda m, y: y + y,
    "weight": lambda m, y: y * m.scale,
    "weight added": lambda m, y: m.scale + y,
    "gate": lambda m, y: y * torch.sigmoid(y),
    "gate of one": lambda m, y: y * torch.sigmoid(m.scale[:1]),
    "transposed": lambda m, y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "reshaped": lambda m, y: y.view(2, -1, 13).relu().reshape(-1, 13),
    "unsqueezed": lambda m, y: y.unsqueeze(1).relu().squeeze(1),
    "rows": lambda m, y: y[1:],
    "sum of rows": lambda m, y: y.sum(0, keepdim=True),
    "dropout": lambda m, y: functional.dropout(y, 0.0),
    "cloned": lambda m, y: y.clone().relu_(),
}
SLICES = {
    "softmax": lambda m, y: functional.softmax(y, -1),
    "layer_norm": lambda m, y: functional.layer_norm(y, (13,)),
    "sum": lambda m, y: y.sum(-1, keepdim=True) + torch.zeros_like(y),
    "cat": lambda m, y: torch.cat([y, y], -1)[:, :13],
    "part": lambda m, y: y[:, torch.arange(13)],
    "mixed": lambda m, y: y.reshape(13, -1).reshape(-1, 13),
    "infinite": lambda m, y: torch.log(y.abs()).clamp(-5, 5),
    "infinite slope": lambda m, y: torch.sqrt(y.abs() + 0),
    "steep": lambda m, y: (y.exp() - 1).abs().pow(0.5),
    "fraction": lambda m, y: m.scale / (y.abs() + 1) * y.amax(-1, keepdim=True),
    "not padded": lambda m, y: y * torch.ones_like(y).cumsum(-1),
    "unbounded factor": lambda m, y: y * y.amax(-1, keepdim=True),
    "flip": lambda m, y: y.flip(-1),
    "random": lambda m, y: functional.dropout(torch.sigmoid(y), 0.0),
}


@pytest.mark.parametrize("name", KEEPS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_padding_stays_through(name, dtype):
    run = check(whole_numbers(Between(KEEPS[name])), numbers(6, 5), dtype=dtype)
    first, second = (note for note in _notes(run))
    assert first.kept and second.text.startswith("K 13 -> 16, N 3 -> 8")
    assert len(run.activation_pads()) == 1 and len(run.parts()) == 1


@pytest.mark.parametrize("name", SLICES)
def test_padding_is_sliced_before(name):
    run = check(whole_numbers(Between(SLICES[name])), numbers(6, 5))
    assert not _notes(run)[0].kept
    assert len(run.parts()) == 2
    slices = [ir.mark(node).reason.text for node in run.parts()]
    assert all(len(text.split(": ", 1)[1]) > 10 for text in slices)


MODELS = {
    "attention": (Attention(), (numbers(2, 9, 30),)),
    "flash": (Flash(), (numbers(2, 9, 30),)),
    "residual": (Residual(), (numbers(2, 3, 8, 8),)),
    "unet": (Unet(), (numbers(2, 3, 8, 8),)),
    "bilinear": (Bilinear(), (numbers(4, 12),)),
    "einsum": (Einsum(), (numbers(2, 3, 13),)),
    "head": (Head(), (words(1009, 2, 9), words(1009, 2, 9))),
    "head with bias": (Head(bias=True, tied=False), (words(1009, 2, 9), words(1009, 2, 9))),
    "head and logits": (HeadAndLogits(), (words(1009, 2, 9), words(1009, 2, 9))),
    "smoothed head": (Head(loss=smoothed), (words(1009, 2, 9), words(1009, 2, 9))),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_step_is_the_unpadded_one(name, opt_level):
    model, inputs = MODELS[name]
    padded, plain = (step(whole_numbers(model), *inputs, opt_level=opt_level, pad_to=n) for n in (8, 0))
    for ours, theirs in zip(padded.outputs, plain.outputs, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7)  # one rounding of bfloat16
    for key, gradient in plain.gradients.items():
        scale = 1.0 if gradient is None else float(gradient.abs().max())
        torch.testing.assert_close(padded.gradients[key], gradient, rtol=2**-6, atol=2**-6 * scale)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_keeps_its_statistics(mode, momentum):
    model = Residual()
    for norm in (model.norm1, model.norm2):
        norm.momentum = momentum
    model.train(mode == "train")
    run = check(model, numbers(2, 3, 8, 8))
    if momentum is not None:  # the capture knows no shapes behind a cumulative average
        assert len(run.parts()) == 1 and len(run.activation_pads()) == 1
    assert run.buffers["norm1.running_mean"].shape == (17,)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_on_a_batch_norm_sees_what_it_always_saw(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 17, 1), nn.BatchNorm2d(17), nn.ReLU(), nn.Conv2d(17, 8, 1))
    seen: list[int] = []
    getattr(model[1], f"register_{kind}")(lambda module, *given: seen.append(shape_in(given)[1]))
    x = numbers(2, 3, 8, 8)
    converted = fxamp.convert(model, BF16, (x,), pad="always")
    converted(x).sum().backward()
    assert seen == [17]


def shape_in(given) -> torch.Size:
    """Of the first tensor that a hook is given."""
    first = given[0]
    return first.shape if isinstance(first, torch.Tensor) else first[0].shape


# ------------------------------------------------------------------------------------------- what weights cost


def kernels_of(model, x):
    """Names of the ops that pad or copy, in one forward without gradients."""
    with Ops() as ops, torch.no_grad():
        model(x)
    return [name for name in ops.names if name in ("constant_pad_nd", "copy_", "fill_", "_foreach_copy_")]


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((8, 13), ["_foreach_copy_"]),  # rows of the weight and the bias
        ((13, 8), ["fill_", "copy_", "_foreach_copy_", "constant_pad_nd"]),  # columns; and of the input
        ((8, 13, 8), ["fill_", "copy_", "_foreach_copy_"]),  # the rows of one weight are the columns of the next
    ],
)
def test_weights_grow_while_they_are_cast(widths, expected):
    model = fxamp.convert(mlp(*widths), BF16, numbers(4, widths[0]), pad="always")
    assert kernels_of(model, numbers(4, widths[0])) == expected


def test_weights_that_are_stored_low_have_room_for_rows_and_columns_cost_a_copy():
    model = fxamp.convert(mlp(8, 13, 16, 21), BF16, numbers(4, 8), pad="always", opt_level="O2")
    assert kernels_of(model, numbers(4, 8)) == ["fill_", "copy_"]
    run = step(mlp(8, 13, 16, 21), numbers(4, 8), opt_level="O2")
    assert {value.dtype for value in run.gradients.values()} == {BF16}
    assert fxamp.report(run.model).weight_casts == 0


def test_training_with_room_is_training_without(monkeypatch):
    """Equal to the bit, over steps with masters, loads, and weights that are moved out of their room."""

    def trained():
        torch.manual_seed(0)
        model = fxamp.convert(mlp(8, 13, 21, 5), BF16, numbers(4, 8), pad="always", opt_level="O2")
        optimizer = fxamp.MasterWeightOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        for number in range(6):
            if number == 2:
                model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            if number == 4:
                model[0].weight.data = model[0].weight.detach().clone()
            model(numbers(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {**model.state_dict(), "twin": copy.deepcopy(model)(numbers(4, 8))}

    with_room = trained()
    monkeypatch.setattr("fxamp.model.storage.make_room", lambda weight, multiple: None)
    without = trained()
    assert all(torch.equal(value, without[name]) for name, value in with_room.items())


def test_a_bucket_holds_weights_of_one_dtype():
    """The middle weight is also read in float32, so O2 stores it so."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp(8, 13, 16, 21)

        def forward(self, x):
            return self.layers(x), self.layers[2].weight.double().sum()

    graph = step(Net(), numbers(4, 8), opt_level="O2").graph
    packed = [node for node in graph.nodes if ir.mark(node).op == "packed_cast"]
    dtypes = [{ir.mark(weight).type.dtype for weight in node.all_input_nodes} for node in packed]
    assert all(len(found) == 1 for found in dtypes) and len(set.union(*dtypes)) == 2


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_the_report_names_what_is_padded(opt_level):
    report = fxamp.report(step(mlp(5, 13, 8), numbers(4, 5), opt_level=opt_level).model)
    found = {(each.node, each.dim, each.logical, each.padded) for each in report.padded}
    assert found >= {("_0_weight", 0, 13, 16), ("_0_weight", 1, 5, 8), ("_0_bias", 0, 13, 16), ("_2_weight", 1, 13, 16)}
    assert len(found) == 5  # and the input


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_frozen_weights_are_kept_padded(opt_level):
    x = numbers(4, 8)
    net = mlp(8, 13, 8)
    plain = fxamp.convert(copy.deepcopy(net), BF16, x, pad_to=0)
    model = fxamp.convert(net, BF16, x, pad="always", opt_level=opt_level).freeze()
    assert kernels_of(model, x) and not kernels_of(model, x)
    with torch.no_grad():
        before = model(x)
        torch.testing.assert_close(before, plain(x), rtol=2**-7, atol=2**-7)
        model[0].weight.add_(1)
        assert not torch.equal(model(x), before)


def test_a_table_that_is_also_the_head_is_gathered_in_its_own_size():
    run = step(Head(), words(1009, 2, 9), words(1009, 2, 9))
    gathers = [node for node in run.graph.nodes if ir.mark(node).op == "embedding"]
    assert all(ir.mark(value).type.shape[0] in (1009, 2) for node in gathers for value in node.all_input_nodes)


# ------------------------------------------------------------------------------------------------ the head


class Sizes(Gemms):
    """Counts the tensors of a given number of elements, or a little more, that ops make."""

    def __init__(self, count, more):
        super().__init__()
        self.sizes, self.made = (count, more), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {value.data_ptr() for value in args if isinstance(value, torch.Tensor)}
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor) and value.numel() in self.sizes:
                self.made += value.data_ptr() not in known
        return result


@pytest.mark.parametrize("options", [{}, {"bias": True, "tied": False}])
def test_a_loss_inside_the_model_reads_the_padded_logits_without_a_copy(options):
    tokens, made = words(1009, 2, 9), []
    for pad_to in (0, 8):
        with Sizes(18 * 1009, 18 * 1016) as sizes:
            run = step(Head(**options), tokens, tokens, pad_to=pad_to)
        made.append(sizes.made)
    assert made[0] == made[1]
    assert not [node for node in run.parts() if any(user.op != "call_method" for user in node.users)]
    assert "hidden from the loss" in run.notes()["linear"].text


@pytest.mark.parametrize(
    "loss",
    [
        smoothed,
        lambda logits, targets: functional.cross_entropy(logits, functional.one_hot(targets, 1009).float()),
        lambda logits, targets: functional.cross_entropy(logits, targets, weight=torch.ones(1009)),
        lambda logits, targets: functional.mse_loss(logits, torch.zeros_like(logits)),
    ],
)
def test_a_loss_that_would_see_the_padding_reads_the_slice(loss):
    tokens = words(1009, 2, 9)
    run = check(whole_numbers(Head(loss=loss)), tokens, tokens)
    assert "hidden" not in run.notes()["linear"].text
    assert run.parts()


def test_a_resized_vocabulary_gives_the_right_loss():
    tokens = words(1009, 2, 9)
    model, larger = fxamp.convert(Head(), BF16, (tokens, tokens), pad="always"), Head(1031)
    model.table.weight = model.head.weight = larger.table.weight
    expected = step(larger, tokens, tokens, pad_to=0).outputs[0]
    torch.testing.assert_close(model(tokens, tokens), expected, rtol=2**-7, atol=0)


# ------------------------------------------------------------------------------------------- what it leaves


def _notes(run):
    return [ir.mark(node).pad for node in run.graph.nodes if ir.mark(node).op == "linear"]


REASONS = [
    (mlp(8, 16, 24), (numbers(4, 8),), "linear", "aligned", "multiples of 8"),
    (nn.Sequential(nn.Conv2d(6, 6, 3, groups=3)), (numbers(1, 6, 5, 5),), "conv2d", "cannot", "3 groups"),
    (Attention(), (numbers(2, 9, 30),), "matmul", "padded", "N = 9 is known only at run time"),
    (Head(), (words(1009, 2, 9), words(1009, 2, 9)), "embedding", "cannot", "no GEMM"),
]


@pytest.mark.parametrize(("model", "inputs", "op", "state", "text"), REASONS)
def test_every_gemm_has_an_answer(model, inputs, op, state, text):
    notes = [ir.mark(node).pad for node in step(model, *inputs).graph.nodes if ir.mark(node).op == op]
    assert any(note.state == state and text in note.text for note in notes)


AUTO = [
    ((2047, 2047), 8192, "padded", "K 2047 -> 2048, N 2047 -> 2048"),
    ((1023, 1023), 8192, "left", "would not pay"),  # on an H100 the GEMMs gain 0.2 ms of a step, and the host loses 0.3
    ((768, 50257), 4096, "padded", "N 50257 -> 50264"),
    ((2047, 8191), 64, "left", "memory-bound"),
    ((30, 30), 8192, "left", "too small"),
    ((1024, 1024), 8192, "aligned", "multiples of 8"),
]


@pytest.mark.parametrize(("widths", "rows", "state", "text"), AUTO)
def test_auto_pads_what_pays(widths, rows, state, text):
    model = fxamp.convert(nn.Sequential(nn.Linear(*widths)), BF16, torch.empty(rows, widths[0]))
    (node,) = (n for n in engine_of(model).all_variants()[0].graph.nodes if ir.mark(n).op == "linear")
    assert ir.mark(node).pad.state == state
    assert text in ir.mark(node).pad.text


def test_without_example_inputs_nothing_is_padded_before_the_first_call():
    model = fxamp.convert(mlp(5, 13, 3), BF16, pad="always")
    model(numbers(4, 5))
    assert {n.meta["fxamp"].pad.state for n in graph_of(model).nodes if n.meta["fxamp"].op == "linear"} == {"padded"}


def graph_of(model):
    return engine_of(model).all_variants()[0].graph


@pytest.mark.parametrize("pad_to", [1, 3, 16, 64])
def test_any_multiple(pad_to):
    run = check(whole_numbers(mlp(5, 13, 3)), numbers(4, 5), pad_to=pad_to)
    assert {padded % pad_to for note in _notes(run) for _, _, padded in note.dims} == {0}


@pytest.mark.parametrize("pad_to", [-8, 2.5, "8", True])
def test_a_wrong_multiple_is_refused(pad_to):
    with pytest.raises(fxamp.errors.OptionError, match="pad_to="):
        fxamp.convert(mlp(5, 3), BF16, pad_to=pad_to)


@pytest.mark.parametrize("pad_to", [0, None])
def test_no_multiple_no_padding(pad_to):
    run = step(mlp(5, 13, 3), numbers(4, 5), pad_to=pad_to)
    assert not run.role("pad") and not run.parts()


# ---------------------------------------------------------------------------------------------- whole models


def test_state_and_gradients_keep_their_shapes():
    model = mlp(5, 13, 3)
    run = step(model, numbers(4, 5))
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in run.model.state_dict().items()} == shapes
    assert {name: value.shape for name, value in run.gradients.items()} == shapes


def test_one_graph_serves_every_batch():
    model = fxamp.convert(whole_numbers(Residual()), BF16, numbers(2, 3, 8, 8), pad="always")
    plain = fxamp.convert(whole_numbers(Residual()), BF16, numbers(2, 3, 8, 8), pad_to=0)
    for batch, size in ((2, 8), (5, 8), (3, 12)):
        x = numbers(batch, 3, size, size)
        assert torch.equal(model(x), plain(x))
    assert len(engine_of(model).all_variants()) == 1


class Sized(nn.Module):
    """linear, relu, something that depends on sizes, linear."""

    def __init__(self, between, width=6):
        super().__init__()
        self.one, self.two, self.between = nn.Linear(5, 7), nn.Linear(7, width), between

    def forward(self, x, *others):
        return self.two(self.between(torch.relu(self.one(x)), *others))


SIZES_CHANGE = {
    "squeeze(0)": (lambda y: y.squeeze(0), (1, 4, 5), (3, 4, 5)),
    "squeeze(1)": (lambda y: y.squeeze(1), (3, 1, 5), (3, 4, 5)),
    "squeeze()": (lambda y: y.squeeze(), (3, 4, 5), (1, 4, 5)),
    "squeeze(-2)": (lambda y: y.squeeze(-2), (3, 1, 5), (2, 4, 5)),
}


@pytest.mark.parametrize("name", SIZES_CHANGE)
def test_a_squeeze_that_finds_another_size(name):
    between, first, then = SIZES_CHANGE[name]
    model = whole_numbers(Sized(between))
    padded, plain = (fxamp.convert(copy.deepcopy(model), BF16, pad="always", pad_to=n) for n in (8, 0))
    for shape in (first, then, first):
        assert_same(padded(numbers(*shape)), plain(numbers(*shape)), name)


def test_a_squeeze_behind_the_padded_channels():
    """(3, 7, 1) loses its last dimension, (3, 7, 7) does not: the linear layer reads channels, then pixels."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv1d(5, 7, 1), nn.Linear(7, 6)

        def forward(self, x):
            return self.two(torch.relu(self.one(x)).squeeze(2))

    model = whole_numbers(Net())
    padded, plain = (fxamp.convert(copy.deepcopy(model), BF16, pad="always", pad_to=n) for n in (8, 0))
    for pixels in (1, 7, 1):
        assert_same(padded(numbers(3, 5, pixels)), plain(numbers(3, 5, pixels)), str(pixels))


def test_a_mask_that_broadcasts_in_one_call_and_not_in_the_next():
    model = whole_numbers(Sized(lambda y, mask: y * mask))
    padded, plain = (fxamp.convert(copy.deepcopy(model), BF16, pad="always", pad_to=n) for n in (8, 0))
    for width in (1, 7):
        mask = numbers(4, width) > 0
        assert_same(padded(numbers(4, 5), mask), plain(numbers(4, 5), mask), str(width))


def test_a_view_whose_rest_is_another_size():
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(5, 7)

        def forward(self, x, w):
            return self.one(x).relu().view(x.shape[0], -1) @ w

    model = whole_numbers(View())
    padded, plain = (fxamp.convert(copy.deepcopy(model), BF16, pad="always", pad_to=n) for n in (8, 0))
    for length in (1, 2):
        x, w = numbers(3, length, 5), numbers(7 * length, 4)
        assert_same(padded(x, w), plain(x, w), str(length))


class Rows(nn.Module):
    """linear to 7, of as many rows as the call has, flattened for a product with the call's own weight."""

    def __init__(self, rows):
        super().__init__()
        self.one, self.rows = nn.Linear(5, 7), rows
        self.row, self.number, self.tokens = (nn.Parameter(torch.ones(*shape)) for shape in ((1, 7), (1, 1), (8, 5)))

    def forward(self, x, w):
        return self.rows(self, x).relu().flatten()[None] @ w


# Rows of the first call happen to be as many as a weight's: 1.
AS_MANY_ROWS = {
    "added to a row": lambda m, x: m.one(x) + m.row,
    "times a number": lambda m, x: m.one(x) * m.number,
    "a token repeated": lambda m, x: m.one(m.tokens[:1].repeat(x.shape[0], 1)),
    "a split": lambda m, x: m.one(m.tokens.split([x.shape[0], 8 - x.shape[0]])[0]),
    "a split by method": lambda m, x: m.one(m.tokens.split(split_size=x.shape[0])[0]),
    "chosen": lambda m, x: m.one(m.tokens[:1].index_select(0, x[:, 0].long() * 0)),
    "grown by zeros": lambda m, x: m.one(functional.pad(m.tokens[:1], (0, 0, 0, x.shape[0] - 1))),
    "a batch of products": lambda m, x: m.tokens[:1].unsqueeze(0) @ (x[:, :, None] * m.row),
    "chosen by name": lambda m, x: m.one(torch.index_select(m.tokens[:1], dim=0, index=x[:, 0].long() * 0)),
}


@pytest.mark.parametrize("name", AS_MANY_ROWS)
def test_rows_that_are_one_in_one_call(name):
    model = whole_numbers(Rows(AS_MANY_ROWS[name]))
    padded, plain = (fxamp.convert(copy.deepcopy(model), BF16, pad="always", pad_to=n) for n in (8, 0))
    for rows in (1, 3):
        x, w = numbers(rows, 5), numbers(7 * rows, 4)
        assert_same(padded(x, w), plain(x, w), name)


class Total(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 7)

    def forward(self, x):
        return self.one(x).sum().flatten()


def test_a_number_that_is_flattened():
    model = whole_numbers(Total())
    assert torch.equal(fxamp.convert(model, BF16)(numbers(3, 5)), model(numbers(3, 5)))


def test_statistics_that_are_switched_off_for_a_call():
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 4, 1))
    x, states = numbers(4, 3, 6, 6), []
    for net in (model, fxamp.convert(copy.deepcopy(model), BF16, pad="always")):
        for tracked in (True, False, True):
            net[1].track_running_stats = tracked
            net(x)
        states.append((net[1].running_var, net[1].num_batches_tracked))
    assert states[1][1] == states[0][1] == 2
    torch.testing.assert_close(states[1][0], states[0][0], rtol=2**-6, atol=0)


def test_a_write_through_a_view_keeps_the_model_unpadded_there():
    def between(module, y):
        y[:, 0] = 1.0
        return y

    run = check(whole_numbers(Between(between)), numbers(6, 5))
    assert not _notes(run)[0].kept


def test_two_paddings_that_are_not_zero_do_not_meet_in_a_product():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 13), nn.Linear(5, 13)

        def forward(self, x):
            return (self.one(x) + 1) @ (self.two(x) + 1).transpose(0, 1)

    run = check(whole_numbers(Pair()), numbers(4, 5))
    assert "K 13 -> 16" in run.notes()["matmul"].text


def test_a_reshape_that_mixes_channels_reads_the_slice():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv1d(3, 5, 1), nn.Linear(13, 3)  # 5 and 13 lack 3 elements each

        def forward(self, x):
            return self.two(self.one(x).reshape(10, 13))

    run = check(whole_numbers(Mixed()), numbers(2, 3, 13))
    assert len(run.parts()) == 2


def test_a_pad_is_not_shared_across_a_no_grad_region():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.fc = nn.Linear(5, 13), nn.Linear(13, 3)

        def forward(self, x):
            y = self.first(x).flip(-1)
            with torch.no_grad():
                before = self.fc(y)
            return before + self.fc(y)

    run = check(whole_numbers(Twice()), numbers(4, 5))
    assert run.gradients["first.weight"].any()


def test_dropout_behind_padding_is_told():
    model = nn.Sequential(nn.Linear(5, 13), nn.Dropout(0.5), nn.Linear(13, 3))
    assert "dropout" in _notes(step(model, numbers(4, 5)))[0].text
    assert "dropout" not in _notes(step(model.eval(), numbers(4, 5)))[0].text


def test_converting_and_padding_again_change_nothing():
    run = step(Residual(), numbers(2, 3, 8, 8))
    before = canonical_text(run.graph)
    assert fxamp.convert(run.model) is run.model
    assert PadGemms(run.model, None, 8, "always").apply(run.graph) is False
    assert canonical_text(run.graph) == before


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_compile(backend):
    plain, padded = (step(whole_numbers(Residual()), numbers(2, 3, 8, 8), pad_to=n) for n in (0, 8))
    compiled = torch.compile(padded.model, fullgraph=True, backend=backend)
    x = numbers(3, 3, 8, 8)
    torch.testing.assert_close(compiled(x), plain.model(x), rtol=2**-7, atol=2**-7)


def test_exported_with_a_dynamic_batch():
    model = fxamp.convert(whole_numbers(mlp(5, 13, 3)), BF16, numbers(4, 5), pad="always").eval()
    exported = torch.export.export(model, (numbers(4, 5),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.equal(exported.module()(numbers(7, 5)), model(numbers(7, 5)))


def test_dynamos_graphs_are_padded():
    model, plain = (
        fxamp.convert(whole_numbers(Residual()), BF16, pad="always", pad_to=n, capture="dynamo") for n in (8, 0)
    )
    for batch in (2, 3, 5, 4):
        x = numbers(batch, 3, 8, 8)
        assert torch.equal(model(x), plain(x))
        assert torch.equal(model.norm1.running_mean, plain.norm1.running_mean)
    graphs = [variant.graph for variant in engine_of(model).all_variants()]
    states = {ir.mark(n).pad.state for graph in graphs for n in graph.nodes if ir.mark(n).op in ("conv2d", "linear")}
    assert states == {"padded"}


@pytest.mark.parametrize(("changed", "states"), [(0, ["padded", "padded"]), (1, ["cannot", "cannot"])])
def test_symbolic_sizes_are_not_padded(changed, states):
    class Scores(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x @ x.transpose(-1, -2) @ x

    model, plain = (
        fxamp.convert(whole_numbers(Scores(8, 8)), BF16, pad="always", pad_to=n, capture="dynamo") for n in (8, 0)
    )
    for size in (5, 7, 6):
        sizes = [3, 5, 8]
        sizes[changed] = size
        assert torch.equal(model(numbers(*sizes)), plain(numbers(*sizes)))
    dynamic = engine_of(model).all_variants()[-1].graph
    assert [ir.mark(node).pad.state for node in dynamic.nodes if ir.mark(node).op == "matmul"] == states


def test_infinities_stay_where_they_were():
    model = whole_numbers(mlp(5, 13, 3))
    x = numbers(4, 5)
    x[1] = float("inf")
    padded, plain = (step(model, x, pad_to=n).outputs[0] for n in (8, 0))
    assert torch.equal(padded.isfinite(), plain.isfinite())
    assert torch.equal(padded[[0, 2, 3]], plain[[0, 2, 3]])


# ------------------------------------------------------------------------------------------- the invariant


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda graph, pad: graph.call_function(functional.pad, (pad, (0, 1))), "which is a pad"),
        (lambda graph, pad: graph.call_function(functional.pad, pad.args), "two of the same"),
        (lambda graph, pad: None, "used by nobody"),
    ],
)
def test_pads_minimal_fails_on(harm, named):
    graph = step(mlp(5, 13, 3), numbers(4, 5)).graph
    pads_minimal(graph)
    pad = next(node for node in graph.nodes if node.target is functional.pad)
    with graph.inserting_after(pad):
        harmful = harm(graph, pad)
    (reader, *_) = (user for user in pad.users if user is not harmful)
    if harmful is None:
        reader.replace_input_with(pad, pad.args[0])
    else:
        harmful.meta[ir.MARK] = dataclasses.replace(ir.mark(pad))
        with graph.inserting_before(reader):
            both = graph.call_function(torch.add, (harmful, pad))
        reader.replace_input_with(pad, both)
    with pytest.raises(InvariantError, match=named):
        pads_minimal(graph)


def test_assert_equal_fails_on_a_difference():
    run = step(mlp(5, 13, 3), numbers(4, 5))
    other = dataclasses.replace(run, outputs=(run.outputs[0] + 1,))
    with pytest.raises(AssertionError):
        assert_equal(run, other)
