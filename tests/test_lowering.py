"""Which parameters O2 and O3 store low where no graph of the model is known."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.lists import OpLists

BF16 = torch.bfloat16


class Addmm(nn.Module):
    """A layer of the user's own, like the Conv1D of transformers."""

    def __init__(self, inner, outer):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer) / 4), nn.Parameter(torch.zeros(outer))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Defaults(nn.Module):
    """What forward takes has defaults, as in transformers: there is no call to assume."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(20, 16), nn.Parameter(torch.zeros(8, 16))
        self.addmm, self.norm, self.relu = Addmm(16, 16), nn.LayerNorm(16), nn.ReLU()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.scale, self.head = nn.Parameter(torch.ones(16)), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens=None, labels=None):
        h = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        h = self.norm(self.addmm(h))
        h = h + self.attention(h, h, h, need_weights=False)[0]
        for layer in self.layers:
            h = h + layer(h) * self.scale
        logits = self.head(h)
        loss = None if labels is None else F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return logits, loss


LOW = {
    "addmm.weight",
    "addmm.bias",
    "attention.in_proj_weight",
    "attention.in_proj_bias",
    "attention.out_proj.weight",
    "attention.out_proj.bias",
    *(f"layers.{number}.0.{name}" for number in range(3) for name in ("weight", "bias")),
}


def stored(model):
    return {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.dtype == BF16}


def tokens():
    return torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(0))


def test_what_layers_read_low_by_themselves_is_stored_low(caplog):
    with caplog.at_level(logging.INFO, "fxamp"):
        converted = fxamp.convert(Defaults(), BF16, opt_level="O2")
    assert stored(converted) == LOW
    assert "its layers read low by themselves: 12 tensors" in caplog.text


def test_such_a_model_trains_in_one_graph():
    torch.manual_seed(0)
    converted = fxamp.convert(Defaults(), BF16, opt_level="O2")
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.Adam(converted.parameters(), 0.01))
    losses = []
    for _ in range(20):
        loss = converted(tokens=tokens(), labels=tokens())[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    report = fxamp.report(converted)
    assert not report.is_preview and not report.outside
    assert all(row.precision == "low" for row in report.rows if row.colour == "allow")


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_a_script_for_apex_runs_with_the_import_changed(opt_level):
    torch.manual_seed(0)
    model = Defaults()
    model, optimizer = fxamp.initialize(
        model, torch.optim.Adam(model.parameters(), 0.01), opt_level=opt_level, cast_model_type=BF16, verbosity=0
    )
    losses = []
    for _ in range(20):
        loss = model(tokens(), labels=tokens())[1]
        with fxamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    "change, left",
    [
        ({"overrides": {"layers.1": "deny"}}, {"layers.1.0.weight", "layers.1.0.bias"}),
        ({"overrides": {"layers.*": "deny"}}, {name for name in LOW if name.startswith("layers.")}),
        (
            {"lists": OpLists.default().override(deny=["linear"])},
            {name for name in LOW if "layers" in name or "out" in name},
        ),
        ({"lists": OpLists.default().override(deny=["addmm"])}, {"addmm.weight", "addmm.bias"}),
        ({"overrides": {"*": "deny"}}, LOW),
    ],
)
def test_lists_and_overrides_hold(change, left):
    assert stored(fxamp.convert(Defaults(), BF16, opt_level="O2", **change)) == LOW - left


def with_hooks(width=16):
    """Those modules hold a share of the weights that hangs on the width of the head."""
    torch.manual_seed(0)
    model = Defaults()
    model.head = nn.Linear(16, width, bias=False)
    model.layers[0].register_forward_hook(lambda module, args, out: None)
    model.addmm.register_forward_pre_hook(lambda module, args: None)
    return model


@pytest.mark.parametrize("width, options", [(512, {}), (16, {"capture": "symbolic"})], ids=["little", "one graph"])
def test_modules_with_hooks_that_a_graph_runs_whole_keep_float32(width, options):
    converted = fxamp.convert(with_hooks(width), BF16, opt_level="O2", **options)
    kept = {name for name in LOW if not name.startswith(("layers.0.", "addmm."))}
    assert stored(converted) == kept | {"head.weight"}
    converted(tokens())[0].sum().backward()


@pytest.mark.parametrize("is_example", [False, True])
def test_modules_with_hooks_that_are_graphs_themselves_are_stored_low(is_example):
    example = {"example_inputs": {"tokens": tokens()}} if is_example else {}
    model, plain = with_hooks(), with_hooks()
    fired = []
    model.layers[0].register_forward_hook(lambda module, args, out: fired.append(module[0].weight.dtype))
    converted = fxamp.convert(model, BF16, opt_level="O2", **example)
    assert stored(converted) == LOW | {"head.weight"}
    found = converted(tokens())[0]
    assert fired == [BF16]
    torch.testing.assert_close(found, plain(tokens())[0], rtol=0.05, atol=0.05)
    found.sum().backward()
    assert not [row for row in fxamp.report(converted).rows if row.role == "weight cast"]


def test_a_weight_of_two_layers_is_stored_low_if_both_read_it_low():
    model = Defaults()
    model.layers[1][0].weight = model.layers[0][0].weight
    model.layers[2][0].weight = nn.Parameter(torch.randn(16, 16))
    model.embedding.weight = nn.Parameter(torch.randn(20, 16))  # not the head's any more
    converted = fxamp.convert(model, BF16, opt_level="O2")
    assert stored(converted) == (LOW | {"head.weight"}) - {"layers.1.0.weight"}
    assert converted.layers[1][0].weight is converted.layers[0][0].weight


def test_at_o3_all_is_stored_low_but_what_an_override_denies():
    model = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x=None):
            return self.net(x)

    converted = fxamp.convert(Both(), BF16, opt_level="O3", overrides={"net.1": "deny"})
    assert stored(converted) == {"net.0.weight", "net.0.bias"}
    converted(torch.randn(2, 4, 4)).sum().backward()
    assert stored(fxamp.convert(Defaults(), BF16, opt_level="O3")) == {
        name for name, _ in Defaults().named_parameters()
    }


class Mixing(nn.Module):
    """A small matrix around a block, as hyper-connections have it."""

    def __init__(self, width, block):
        super().__init__()
        self.mix, self.block = nn.Parameter(torch.randn(width, width) / 4), block

    def forward(self, x):
        return self.block(x @ self.mix) + x


@pytest.mark.parametrize("inner, is_little", [(16, False), (4096, True)])
def test_a_layer_with_little_of_its_own_is_not_looked_at(inner, is_little, monkeypatch):
    looked, look = [], fxamp.lowering._found_alone
    monkeypatch.setattr(
        "fxamp.lowering._found_alone", lambda layer, *given: looked.append(type(layer)) or look(layer, *given)
    )
    model = Defaults()
    model.layers[0] = Mixing(16, nn.Sequential(nn.Linear(16, inner), nn.ReLU(), nn.Linear(inner, 16)))
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, BF16, opt_level="O2")
    assert ("layers.0.mix" not in stored(converted)) == (Mixing not in looked) == is_little
    assert {"layers.0.block.0.weight", "layers.0.block.2.weight"} < stored(converted)
    found, expected = converted(tokens())[0], plain(tokens())[0]
    assert (found - expected).norm() <= 0.03 * expected.norm()
