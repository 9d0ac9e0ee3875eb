"""Every invariant is shown a graph that breaks it; the pipeline changes nothing in its own result."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fxamp import ir
from fxamp.canonical import canonical_text
from fxamp.errors import InvariantError
from fxamp.fakes import Fakes
from fxamp.passes.base import Pass, run_passes
from fxamp.passes.verify import (
    casts_minimal,
    every_node_coloured,
    keeps_state,
    lints,
    operands_agree,
    outputs_have,
    regions_keep_grad_mode,
    types_hold,
    writes_land,
)
from tests.language import (
    BF16,
    FP16,
    FP32,
    PIPELINE,
    assert_same,
    captured,
    node_of,
    policy,
    run_graph,
    run_steps,
)

X, W = torch.rand(4, 4), torch.rand(4, 4)


def product(x, w):
    return F.linear(x, w)


def rewritten(function=product, *inputs, **options):
    setting = captured(function, *(inputs or (X, W)), **options)
    run_steps(PIPELINE, setting)
    return setting


def holds(setting):
    """The invariant that recorded types are what running gives."""
    return types_hold(Fakes(setting.captured.root), setting.captured.example)


def test_the_pipeline_s_result_breaks_nothing():
    setting = rewritten()
    for invariant in (lints, every_node_coloured, operands_agree, casts_minimal, writes_land, outputs_have(FP32)):
        invariant(setting.graph)
    holds(setting)(setting.graph)


def test_lints():
    setting = rewritten()
    linear, output = node_of(setting, "linear"), node_of(setting, "output")
    output.append(linear)
    with pytest.raises(InvariantError, match="malformed"):
        lints(setting.graph)


def test_regions_keep_grad_mode():
    def quiet(x, w):
        with torch.no_grad():
            y = x * 2
        return F.linear(y, w)

    setting = rewritten(quiet)
    switches = [node for node in setting.graph.nodes if node.target is torch._C._set_grad_enabled]
    assert len(switches) == 2
    for node in switches:
        node.meta[ir.REGION] = "region"
    regions_keep_grad_mode(setting.graph)
    del switches[0].meta[ir.REGION]
    with pytest.raises(InvariantError, match=f"switches gradients with .*{switches[1].name}"):
        regions_keep_grad_mode(setting.graph)


def test_every_node_coloured():
    setting = captured(product, X, W)
    with pytest.raises(InvariantError, match="input_0 has no reason"):
        every_node_coloured(setting.graph)
    setting = rewritten()
    ir.set_mark(node_of(setting, "linear"), precision="medium")
    with pytest.raises(InvariantError, match="linear has the precision 'medium'"):
        every_node_coloured(setting.graph)


def test_what_is_stored_low_is_low():
    setting = rewritten()
    node_of(setting, "input").meta["stored_low"] = True
    with pytest.raises(InvariantError, match="its parameter is stored low"):
        every_node_coloured(setting.graph)


def test_operands_agree():
    setting = rewritten()
    linear = node_of(setting, "linear")
    linear.replace_input_with(linear.args[0], linear.args[0].args[0])
    with pytest.raises(InvariantError, match=r"linear \(linear\) is low but reads input_0 high"):
        operands_agree(setting.graph)


def test_operands_agree_about_what_keeps_its_dtype():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x, w):
            y = F.linear(x, w)
            return F.batch_norm(y, self.bn.running_mean, self.bn.running_var, weight=self.bn.weight)

    setting = rewritten(lambda m, x, w: m(x, w), module=Normed())
    normed = node_of(setting, "batch_norm")
    with setting.graph.inserting_before(normed):
        small = setting.graph.call_method("to", (normed.kwargs["weight"], BF16))
    small.meta.update(cast_of(setting, "input_1").meta)
    normed.update_kwarg("weight", small)
    with pytest.raises(InvariantError, match=r"batch_norm .*reads to.* low, not high"):
        operands_agree(setting.graph)


def _copy_of(setting, cast, source=None):
    with setting.graph.inserting_after(cast):
        twin = setting.graph.call_method("to", (source or cast.args[0], cast.args[1]))
    twin.meta.update(cast.meta)
    return twin


def cast_of(setting, name):
    return next(node for node in setting.graph.nodes if ir.mark(node).role and ir.mark(node).serves == name)


def test_a_value_cast_twice():
    setting = rewritten()
    twin = _copy_of(setting, cast_of(setting, "input_0"))
    node_of(setting, "linear").update_arg(1, twin)
    setting.graph.erase_node(cast_of(setting, "input_1"))
    with pytest.raises(InvariantError, match="input_0 is cast twice"):
        casts_minimal(setting.graph)


def test_an_unused_cast():
    setting = rewritten()
    _copy_of(setting, cast_of(setting, "input_0"))
    with pytest.raises(InvariantError, match="is used by nobody"):
        casts_minimal(setting.graph)


def test_a_cast_to_the_dtype_the_value_has():
    setting = rewritten()
    cast = cast_of(setting, "input_0")
    cast.update_arg(1, FP32)
    with pytest.raises(InvariantError, match="casts input_0 to float32, which it is already"):
        casts_minimal(setting.graph)


def test_a_cast_of_a_cast():
    setting = rewritten()
    cast = cast_of(setting, "input_0")
    back = _copy_of(setting, cast, cast)
    back.update_arg(1, FP32)
    node_of(setting, "linear").update_arg(0, back)
    with pytest.raises(InvariantError, match="casts the cast to"):
        casts_minimal(setting.graph)


def test_outputs_have():
    setting = rewritten()
    last = cast_of(setting, "linear")
    node_of(setting, "output").replace_input_with(last, last.args[0])
    with pytest.raises(InvariantError, match=r"the output linear is torch.bfloat16, not torch.float32"):
        outputs_have(FP32)(setting.graph)
    outputs_have(None)(setting.graph)


def test_a_write_into_a_cast_is_lost():
    def model(x, w):
        y = F.linear(x, w)
        y.relu_()
        return y

    setting = rewritten(model)
    writes_land(setting.graph)
    relu, linear = node_of(setting, "relu"), node_of(setting, "linear")
    relu.update_arg(0, linear.args[0])
    with pytest.raises(InvariantError, match="relu_ writes into to, a copy"):
        writes_land(setting.graph)


def test_types_hold_catches_a_wrong_dtype_and_a_graph_that_cannot_run():
    setting = rewritten()
    linear = node_of(setting, "linear")
    kind = ir.mark(linear).type
    ir.set_mark(linear, type=dataclasses.replace(kind, dtype=FP16))
    with pytest.raises(InvariantError, match=r"linear \(linear, .*gives torch.bfloat16, but torch.float16 is recorded"):
        holds(setting)(setting.graph)

    setting = rewritten(lambda x, w: torch.bmm(x, w[None]), X[None], W)
    node_of(setting, "bmm").update_arg(1, node_of(setting, "input", 1))
    with pytest.raises(InvariantError, match=r"bmm .*fails in the rewritten graph"):
        holds(setting)(setting.graph)


def test_an_error_names_the_pass_the_rule_and_those_that_ran():
    @dataclasses.dataclass(frozen=True)
    class Breaks(Pass):
        ensures = (casts_minimal,)

        def apply(self, graph):
            cast = next(node for node in graph.nodes if ir.mark(node).serves == "input_0")
            cast.update_arg(1, FP32)
            return True

    setting = rewritten()
    with pytest.raises(InvariantError, match=r"after Breaks, casts_minimal: to casts input_0.*ran: Breaks"):
        run_passes(setting.graph, (Breaks(),))

    @dataclasses.dataclass(frozen=True)
    class Needs(Breaks):
        requires = (every_node_coloured,)

    with pytest.raises(InvariantError, match=r"before Needs, every_node_coloured: .*ran: none"):
        run_passes(captured(product, X, W).graph, (Needs(),))


# --------------------------------------------------------------------------------------------- idempotence


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        y = F.relu(self.bn(self.conv(x)), inplace=True)
        return self.fc(F.adaptive_avg_pool2d(y, 1).flatten(1))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(2, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(2, 4, 16))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 16), nn.Embedding(4, 16)
        self.block, self.head = TransformerBlock(), nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.block(x)).log_softmax(-1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.Linear(32, 16), nn.Linear(16, 2)

    def forward(self, x):
        state = x.new_zeros(2, 16)
        for step in range(3):
            state = torch.tanh(self.cell(torch.cat((x[:, step], state), -1)))
        return self.out(state), state


MODELS = {
    "conv net": (ConvNet, torch.rand(2, 3, 8, 8)),
    "transformer block": (TransformerBlock, torch.rand(2, 4, 16)),
    "language model": (LanguageModel, torch.randint(0, 20, (2, 4))),
    "recurrent": (Recurrent, torch.rand(2, 3, 16)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("low", [FP16, BF16])
def test_the_pipeline_changes_nothing_in_its_own_result(name, low):
    make, given = MODELS[name]
    setting = rewritten(lambda m, x: m(x), given, module=make().eval(), chosen=policy(low))
    holds(setting)(setting.graph)
    text, result = canonical_text(setting.graph), run_graph(setting, given)
    for node in setting.graph.nodes:
        if node.op != "placeholder":
            node.meta.pop("val", None)  # what the value was before casts
    assert run_steps(PIPELINE, setting) is False
    assert canonical_text(setting.graph) == text
    assert_same(run_graph(setting, given), result)


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model.conv.weight.data.add_(0) is None or model.conv.weight.detach().add_(1),
        lambda model: setattr(model.conv, "weight", nn.Parameter(model.conv.weight.detach().clone())),
        lambda model: model.half(),
        lambda model: model.register_buffer("mark", torch.zeros(1)),
        lambda model: model.bn.running_mean.add_(1),
    ],
    ids=["written", "replaced", "retyped", "added", "buffer written"],
)
def test_a_pass_that_touches_the_models_state_is_named(write):
    model = ConvNet()

    class Careless(Pass):
        def apply(self, graph):
            write(model)
            return False

    with pytest.raises(InvariantError, match=r"after Careless, state_untouched: .*the model's own '\w"):
        run_passes(torch.fx.Graph(), (Careless(),), (keeps_state(model),))
