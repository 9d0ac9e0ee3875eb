"""Weight casts are made bucket by bucket, each bucket just before its first use."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp import ir
from fxamp.canonical import canonical_text
from fxamp.errors import InvariantError
from fxamp.model.engine import engine_of
from fxamp.passes.alias import find_aliases
from fxamp.passes.base import run_passes
from fxamp.passes.pack import PackWeights, is_weight_cast, outputs_reached, packs_sound
from fxamp.passes.verify import ALWAYS, types_hold
from fxamp.runtime.packed_weights import packed_cast
from tests.language import BF16, FP16, PIPELINE, assert_same, assert_untouched, captured, policy, run_graph, run_steps

PACK = lambda s: PackWeights()  # noqa: E731
ALL = (*PIPELINE, PACK)


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])


X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


def chain(m, x):
    return torch._C._nn.linear(torch._C._nn.linear(x, m[0].weight, None), m[1].weight, None)


@pytest.mark.parametrize("low", [FP16, BF16])
def test_a_bucket_stands_before_its_first_use(low):
    setting = captured(lambda m, x: m[1](m[0](x).exp()), X, module=two_layers(), chosen=policy(low))
    run_steps(ALL, setting)
    called = [str(ir.mark(node).op) for node in setting.graph.nodes if node.op.startswith("call")]
    assert called == ["to", "packed_cast", "to", "to", "linear", "to", "exp", "to", "linear", "to"]
    packed = setting.graph.find_nodes(op="call_function", target=packed_cast)[0]
    assert packed.args[0] == low and [str(w.target) for w in packed.args[1:]] == ["module.0.weight", "module.1.weight"]


def pack(function, module, *inputs, limit=25 << 20, **options) -> list[list[str]]:
    """The parameters of each bucket; what is computed does not change."""
    plain = captured(function, *inputs, module=module, **options)
    run_steps(PIPELINE, plain)
    setting = captured(function, *inputs, module=module, **options)
    run_steps((*PIPELINE, lambda s: PackWeights(limit)), setting)
    assert_same(run_graph(setting, *inputs), run_graph(plain, *inputs))
    again = canonical_text(setting.graph)
    assert not run_passes(setting.graph, (PackWeights(limit),), ALWAYS) and canonical_text(setting.graph) == again
    return [
        [str(weight.target).removeprefix("module.") for weight in node.all_input_nodes]
        for node in setting.graph.nodes
        if node.target is packed_cast
    ]


def test_weights_are_taken_in_the_order_of_their_first_use():
    assert pack(lambda m, x: m[0](m[1](m[0](x))), two_layers(), X) == [["0.weight", "1.weight"]]
    assert pack(lambda m, x: m[0](m[1](x)), two_layers(), X) == [["1.weight", "0.weight"]]


def test_a_bucket_is_closed_when_it_is_full():
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(m, x):
        for layer in m:
            x = layer(x)
        return x

    assert pack(forward, layers, X, limit=2 * 128) == [["0.weight", "1.weight"], ["2.weight", "3.weight"]]
    assert pack(forward, layers, X, limit=2 * 128 - 1) == []
    assert len(pack(forward, layers, X)[0]) == 5


def test_a_large_weight_stands_alone_and_the_small_ones_go_on():
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 80), nn.Linear(80, 8)])
    found = pack(lambda m, x: m[2](m[1](m[0](x))), layers, X, limit=160)
    assert found == [["0.weight", "0.bias"]]


def test_weights_of_an_auxiliary_output_have_their_own_bucket():
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(6))

    def forward(m, x):
        trunk = m[1](m[0](x))
        return m[3](m[2](trunk)), m[5](m[4](trunk))

    assert pack(forward, layers, X) == [
        ["0.weight", "1.weight"],
        ["2.weight", "3.weight"],
        ["4.weight", "5.weight"],
    ]


def test_no_bucket_crosses_the_border_of_no_grad():
    def forward(m, x):
        with torch.no_grad():
            teacher = m[1](m[0](x))
        return m[1](m[0](x)), teacher

    found = pack(forward, two_layers(), X)
    assert len(found) == 2 and sorted(found[0]) == sorted(found[1])


class WithTable(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 5, bias=False)
        if tied:
            self.b.weight = self.table.weight

    def forward(self, tokens):
        return self.b(self.a(self.table(tokens)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_is_packed_only_if_a_gemm_reads_it_too(tied):
    model = WithTable(tied)
    found = pack(lambda m, t: m(t), model, torch.tensor([[1, 2]]))
    assert any("table.weight" in bucket for bucket in found) == tied


def test_a_written_weight_keeps_its_own_cast():
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v, self.u = (nn.Parameter(torch.rand(8, 8)) for _ in range(3))
            for name in ("b", "c"):
                self.register_buffer(name, torch.rand(8, 8))

        def forward(self, x):
            x = x @ self.w @ self.v
            self.b.add_(1.0)
            self.c.add_(1.0)
            return x @ self.b @ self.c @ self.u

    found = pack(lambda m, x: m(x), Written(), X)
    assert found == [["w", "v", "u"]]


class Spiking(nn.Module):
    """Keeps what it computed, and its history, in buffers; a call begins with zeros or with what was kept."""

    def __init__(self, is_reset: bool) -> None:
        super().__init__()
        self.a, self.b, self.is_reset = nn.Linear(8, 8), nn.Linear(8, 8), is_reset
        self.register_buffer("mem", torch.zeros(4, 8), persistent=False)
        self.register_buffer("trace", torch.ones(4, 8), persistent=False)

    def forward(self, x):
        if self.is_reset:
            mem, trace = torch.zeros_like(self.mem), torch.ones_like(self.trace)
        else:
            mem, trace = self.mem.detach(), self.a(self.trace.detach())
        for now in x:
            mem = 0.9 * mem + self.a(now)
            trace = trace * self.b(mem)
        self.mem, self.trace = mem, trace
        return trace


@pytest.mark.parametrize("is_reset", [True, False])
@pytest.mark.parametrize("capture", ["auto", "dynamo"])
@pytest.mark.parametrize("low", [FP16, BF16])
def test_backward_does_not_reach_the_call_that_a_buffer_is_from(low, capture, is_reset):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x = Spiking(is_reset), torch.randn(2, 4, 8)
    model = fxamp.convert(copy.deepcopy(plain), low, capture=capture)
    for _ in range(3):
        for net in (plain, model):
            net.zero_grad()
            net(x).square().mean().backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            # Four layers deep, each of operands and a result rounded: 3 eps/2 a layer and as much again in backward.
            error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
            assert error < 4 * 2 * 1.5 * torch.finfo(low).eps, name


def test_a_buffer_shares_no_cast_with_parameters():
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.register_buffer("cos", torch.rand(8, 8))
            self.register_buffer("sin", torch.rand(8, 8))

        def forward(self, x):
            return self.b(self.a(x) @ self.cos @ self.sin)

    assert pack(lambda m, x: m(x), Rotated(), X) == [["a.weight", "b.weight"], ["cos", "sin"]]


@pytest.mark.parametrize("low", [FP16, BF16])
def test_no_copy_is_made_of_which_only_sizes_are_read(low):
    class Begun(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)
            self.register_buffer("state", torch.rand(2, 8).t().contiguous().t())

        def forward(self, x):
            filled = torch.full_like(self.state, 0.5)
            return self.a(self.a(x) + torch.zeros_like(self.state) + filled + torch.ones_like(self.a.weight)[:2])

    options = {"module": Begun(), "chosen": policy(low, level="aggressive")}
    plain, setting = captured(lambda m, x: m(x), X, **options), captured(lambda m, x: m(x), X, **options)
    run_steps(PIPELINE, plain)
    run_steps(ALL, setting)
    assert_same(run_graph(setting, X), run_graph(plain, X))
    types_hold(setting.fakes, setting.captured.example)(setting.graph)
    made = [node for node in setting.graph.nodes if ir.mark(node).op in ("zeros_like", "full_like", "ones_like")]
    assert [ir.mark(node).type.dtype for node in made] == [low] * 3
    assert all(node.args[0].op == "get_attr" for node in made)
    cast = [str(node.args[0].target) for node in setting.graph.nodes if is_weight_cast(node)]
    assert cast == ["module.a.weight"]


def test_one_weight_is_not_packed():
    layer = nn.Linear(8, 8, bias=False)
    assert pack(lambda m, x: m(x), layer, X) == []
    assert_untouched((PACK,), lambda m, x: m(x), X, module=layer)


def test_without_shapes_one_bucket_is_made():
    setting = captured(lambda m, x: m[1](m[0](x)), X, module=two_layers(), preview=True)
    run_steps(ALL, setting)
    assert [len(n.args) - 1 for n in setting.graph.nodes if n.target is packed_cast] == [2]


def test_the_report_counts_parameters_and_o2_lowers_them():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_layers()

        def forward(self, x):
            return self.layers[1](F.relu(self.layers[0](x)))

    converted = fxamp.convert(Net(), BF16, example_inputs=(X,))
    found = fxamp.report(converted)
    assert (found.weight_casts, found.casts_to_low, found.casts_to_high) == (2, 1, 1)
    lowered = fxamp.convert(Net(), BF16, example_inputs=(X,), opt_level="O2")
    assert fxamp.report(lowered).weight_casts == 0
    assert all(parameter.dtype == BF16 for parameter in lowered.parameters())


def test_outputs_reached_follows_writes():
    def forward(x, y):
        z = x + 1
        z.add_(y * 2)
        return z, y + 1

    setting = captured(forward, X, X.clone())
    run_steps(PIPELINE[:1], setting)
    reached = outputs_reached(setting.graph, find_aliases(setting.graph))
    by_op = {ir.mark(node).op: reached[node] for node in setting.graph.nodes}
    assert by_op["mul"] == 0b01
    assert reached[next(iter(reversed(setting.graph.find_nodes(op="placeholder"))))] == 0b11


def test_the_invariant_sees_a_weight_cast_twice():
    setting = captured(chain, X, module=two_layers())
    run_steps(ALL, setting)
    packed = next(n for n in setting.graph.nodes if n.target is packed_cast)
    with setting.graph.inserting_after(packed):
        setting.graph.call_function(packed_cast, packed.args)
    with pytest.raises(InvariantError, match=r"module\.0\.weight is cast twice: by packed_cast and by packed_cast_1"):
        packs_sound(setting.graph)


def test_the_invariant_sees_a_packed_weight_that_is_written():
    setting = captured(chain, X, module=two_layers())
    run_steps(ALL, setting)
    packed = next(n for n in setting.graph.nodes if n.target is packed_cast)
    with setting.graph.inserting_before(packed):
        setting.graph.call_method("add_", (packed.args[1], 1.0))
    with pytest.raises(InvariantError, match=r"packed_cast casts module\.0\.weight, which is written in place"):
        packs_sound(setting.graph)


def test_the_invariant_sees_a_buffer_among_parameters():
    setting = captured(chain, X, module=two_layers())
    run_steps(ALL, setting)
    weight = next(n for n in setting.graph.nodes if n.op == "get_attr")
    ir.set_mark(weight, op="buffer")
    with pytest.raises(InvariantError, match="packed_cast casts parameters and buffers together"):
        packs_sound(setting.graph)


def test_casts_of_a_converted_model_are_in_the_generated_code_once():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = two_layers()

        def forward(self, x):
            return chain(self.layers, x)

    converted = fxamp.convert(Net(), BF16, example_inputs=(X,))
    source = engine_of(converted).all_variants()[0].compiled.source
    assert source.count("packed_cast(torch.bfloat16, ") == 1


class FirstState(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)
        self.hidden, self.cell = (kind(torch.randn(1, 1, 8)) for _ in range(2))

    def forward(self, x):
        return self.lstm(x, (self.hidden, self.cell))[0]


@pytest.mark.parametrize("kind", [nn.Parameter, nn.Buffer, torch.Tensor])
def test_first_states_of_a_recurrent_call_are_none_of_its_weights(kind):
    torch.manual_seed(0)
    plain = FirstState(kind)
    x = torch.randn(3, 1, 8)
    converted = fxamp.convert(copy.deepcopy(plain), BF16)
    found, expected = converted(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    found.sum().backward()
    expected.sum().backward()
    for one, other in zip(converted.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0.1, atol=0.1)
