"""O1 to O3: where the numbers are kept, what a checkpoint holds, and that training works."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import fxamp
from fxamp.capture.locations import explained
from fxamp.model.engine import engine_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        h = self.table(tokens).transpose(1, 2)
        h = F.relu(self.bn(self.conv(h))).transpose(1, 2)
        return self.head(self.norm(h))


TOKENS = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def test_o2_lowers_gemm_weights_and_keeps_batch_norm_in_fp32(model):
    parameters = dict(model.named_parameters())
    converted = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level="O2")
    dtypes = {name: p.dtype for name, p in converted.named_parameters()}
    assert dtypes["conv.weight"] == dtypes["head.weight"] == dtypes["head.bias"] == torch.bfloat16
    assert dtypes["bn.weight"] == dtypes["bn.bias"] == torch.float32
    assert converted.bn.running_mean.dtype == torch.float32
    assert all(converted.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert fxamp.report(converted).weight_casts == 0


def test_o2_outputs_equal_o1s(model):
    o1 = fxamp.convert(copy.deepcopy(model), torch.bfloat16, (TOKENS,)).eval()
    o2 = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level="O2").eval()
    assert torch.equal(o1(TOKENS), o2(TOKENS))


def test_an_o2_checkpoint_is_the_fp32_models(model):
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level="O2")
    state = converted.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
    other = fxamp.convert(Net(), torch.bfloat16, (TOKENS,), opt_level="O2")
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["head.weight"], state["head.weight"])
    assert torch.equal(other.eval()(TOKENS), converted.eval()(TOKENS))


def test_a_copy_of_an_o2_model_captures_and_checkpoints_as_the_original(model):
    converted = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level="O2")
    twin = copy.deepcopy(converted)
    assert torch.equal(twin.eval()(TOKENS), converted.eval()(TOKENS))
    assert torch.equal(twin.state_dict()["conv.weight"], converted.state_dict()["conv.weight"])
    assert twin.conv.weight is not converted.conv.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_o2_with_masters_trains_like_fp32(model, dtype):
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, dtype, (TOKENS,), opt_level="O2")
    low = fxamp.MasterWeightOptimizer(torch.optim.SGD(converted.parameters(), lr=0.05))
    high = torch.optim.SGD(plain.parameters(), lr=0.05)
    scaler = fxamp.LossScaler(init_scale=2.0**8, enabled=dtype == torch.float16)
    for _ in range(20):
        ours = F.cross_entropy(converted(TOKENS).flatten(0, 1), TOKENS.flatten())
        scaler.scale(ours).backward()
        scaler.step(low)
        scaler.update()
        low.zero_grad()
        theirs = F.cross_entropy(plain(TOKENS).flatten(0, 1), TOKENS.flatten())
        theirs.backward()
        high.step()
        high.zero_grad()
    assert theirs < 2.0
    # twenty steps whose gradients carry 8 or 11 bits
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=2**-5, atol=0)
    moved = converted.state_dict()["head.weight"] - plain.state_dict()["head.weight"]
    assert moved.abs().max() < 2**-5


def test_o3_is_all_low(model):
    converted = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level="O3")
    assert all(value.dtype == torch.bfloat16 for value in converted.parameters())
    assert converted.bn.running_mean.dtype == torch.bfloat16
    assert converted(TOKENS).dtype == torch.float32
    report = fxamp.report(converted)
    assert report.casts_to_low == 0
    assert {row.precision for row in report.rows if row.op in ("layer_norm", "batch_norm", "linear")} == {"low"}


def test_o3_trains(model):
    converted = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level="O3")
    F.cross_entropy(converted(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in converted.parameters())


def test_o2_leaves_a_weight_that_is_also_read_high_in_fp32():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.both = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.both(self.low(x)) + self.both.weight.exp().sum()

    x = torch.ones(2, 8)
    converted = fxamp.convert(Both(), torch.bfloat16, opt_level="O2", example_inputs=(x,))
    assert converted.low.weight.dtype == torch.bfloat16 and converted.both.weight.dtype == torch.float32


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_the_first_call_after_lowering_finds_its_graph(model, opt_level):
    converted = fxamp.convert(model, torch.bfloat16, (TOKENS,), opt_level=opt_level)
    engine, graphs = engine_of(converted), engine_of(converted).all_variants()
    converted(TOKENS)
    assert engine_of(converted) is engine and engine.all_variants() == graphs


WAYS_TO_ASK = {
    "parameters": lambda net: next(net.parameters()).dtype,
    "named_parameters": lambda net: dict(net.named_parameters())["fc.weight"].dtype,
    "_parameters": lambda net: net.fc._parameters["weight"].dtype,
    "attribute": lambda net: net.fc.weight.dtype,
    "result_type": lambda net: torch.result_type(next(net.parameters()), 1.0),
    "to a parameter": lambda net: next(net.parameters()),
}


class TimeSteps(nn.Module):
    """Reads its own dtype, as libraries of diffusion models do; 997 is no bfloat16."""

    def __init__(self, ask) -> None:
        super().__init__()
        self.fc, self.ask = nn.Linear(8, 4), ask

    def forward(self, t):
        t = t.to(self.ask(self))
        angles = t[:, None].float() * torch.tensor([1.0, 0.3, 0.1, 0.03])
        return self.fc(torch.cat([angles.sin(), angles.cos()], 1))


@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_forward_reads_the_dtype_that_a_lowered_parameter_stands_for(way):
    times = torch.tensor([997, 998, 999, 501])
    net = TimeSteps(WAYS_TO_ASK[way])
    o1 = fxamp.convert(copy.deepcopy(net), torch.bfloat16, (times,))(times)
    low = fxamp.convert(net, torch.bfloat16, (times,), "O2")
    assert torch.equal(low(times), o1)
    assert low.fc.bias.dtype == torch.bfloat16


def test_sizes_in_bytes_that_forward_asks_for_are_float32s():
    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x):
            weight = next(self.parameters())
            return self.fc(x), weight.element_size() + weight.itemsize + weight.nbytes

    x = torch.ones(2, 8)
    assert fxamp.convert(Bytes(), torch.bfloat16, (x,), "O2")(x)[1] == 4 + 4 + 4 * 32


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("of", ["weight", "input", "number"])
def test_the_limits_of_a_traced_dtype_are_float32s(opt_level, of):
    class Limits(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x, index):
            if of == "number":
                return self.fc(x), torch.iinfo(index.dtype).max
            return self.fc(x), torch.finfo(self.fc.weight.dtype if of == "weight" else x.dtype).eps

    call = torch.ones(2, 8), torch.zeros(2, dtype=torch.int16)
    net = Limits()
    limit = net(*call)[1]
    assert fxamp.convert(net, torch.bfloat16, call, opt_level, capture="symbolic")(*call)[1] == limit


class Fussy(nn.Module):
    """Decides on what a layer gives while it is asked to, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.is_fussy = nn.Linear(8, 4), False

    def forward(self, x):
        if self.is_fussy and self.fc(x).sum() > -100:
            x = -x
        return self.fc(x)


@pytest.mark.parametrize("opt_level", ["O1", "O2", "O3"])
def test_a_call_that_could_not_be_captured_once_is_tried_again(opt_level):
    converted = fxamp.convert(Fussy(), torch.bfloat16, (torch.ones(2, 8),), opt_level, capture="symbolic")
    row = torch.ones(8)
    for _ in range(2):
        converted.is_fussy = True
        with pytest.raises(fxamp.CaptureError, match="depends on data"):
            converted(row)
        converted.is_fussy = False
        assert converted(row).shape == (4,)


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_transform_that_captures_leaves_plain_calls_alone(opt_level):
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    converted = fxamp.convert(net, torch.bfloat16, (torch.ones(4, 5),), opt_level)
    row = torch.randn(5, generator=torch.Generator().manual_seed(0))
    jacobian = torch.func.jacrev(converted)(row)
    out = converted(row)
    step = torch.func.jvp(converted, (row,), (torch.ones(5),))[1]
    assert jacobian.shape == (3, 5) and out.shape == (3,)
    torch.testing.assert_close(jacobian.sum(1), step, rtol=0.05, atol=0.05)  # products in bfloat16, summed otherwise


def test_an_error_without_a_line_of_the_users_names_none():
    error = explained(RuntimeError("no way"), nn.Linear(1, 1), has_example=True)
    assert str(error).startswith("Linear cannot be captured symbolically. RuntimeError: no way. Write")


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(lambda *_: None),
        lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    ],
    ids=["hook", "prune"],
)
def test_no_graph_holds_a_hook_on_a_module_with_lowered_weights(change):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))

    x, plain, late, refusing, early = torch.ones(2, 8), build(), build(), build(), build()
    low = fxamp.convert(late, torch.bfloat16, (x,), "O2")
    symbolic = fxamp.convert(refusing, torch.bfloat16, (x,), "O2", capture="symbolic")
    for model in (plain, low, symbolic, early):
        change(model[1][0])
    for _ in range(2):
        torch.testing.assert_close(low(x), plain(x), rtol=0.05, atol=0.05)
        with pytest.raises(fxamp.CaptureError, match=r"'1.0' has hooks.*O2.*bfloat16.*before convert"):
            symbolic(x)
    converted = fxamp.convert(early, torch.bfloat16, (x,), "O2")
    torch.testing.assert_close(converted(x), plain(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_parameter_replaced_by_a_float32_one_is_cast_as_at_o1(index):
    x = torch.ones(2, 8)
    o1 = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    low = fxamp.convert(copy.deepcopy(o1), torch.bfloat16, (x,), "O2")
    low(x)
    weight = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
    o1[index].weight = low[index].weight = weight
    assert torch.equal(low(x), fxamp.convert(o1, torch.bfloat16, (x,))(x))
    assert torch.equal(low.state_dict()[f"{index}.weight"], weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("example", [None, (TOKENS,)])
def test_a_batch_norm_that_is_denied_at_o3_stays_float32(model, dtype, example):
    plain = copy.deepcopy(model)
    converted = fxamp.convert(model, dtype, example, opt_level="O3", overrides={"bn": "deny"})
    kept = {name for name, value in converted.named_parameters() if value.dtype == torch.float32}
    assert kept == {"bn.weight", "bn.bias"} and converted.bn.running_var.dtype == torch.float32
    converted(TOKENS).sum().backward()
    plain(TOKENS)
    torch.testing.assert_close(converted.bn.running_var, plain.bn.running_var, rtol=2**-5, atol=0)


def test_a_preview_takes_inputs_to_be_where_the_weights_are(model):
    class Parallel(Net):
        def forward(self, tokens):
            if tokens.is_cuda and self.training:
                raise AssertionError
            return super().forward(tokens)

    converted = fxamp.convert(Parallel(), torch.bfloat16, opt_level="O2")
    assert converted.head.weight.dtype == torch.bfloat16 and converted.bn.weight.dtype == torch.float32
    assert converted(TOKENS).shape == (4, 6, 11)


class Deciding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return self.fc(x).relu() if x.shape[0] > 2 else self.fc(x)


def test_a_capture_that_needs_examples_says_how_several_models_get_theirs():
    nets = [Deciding(4), Deciding(8)]
    options = {"opt_level": "O2", "verbosity": 0, "capture": "symbolic"}
    with pytest.raises(fxamp.CaptureError, match=r"It is model 0 of 2: .*example_inputs=\[\(x,\), \(y,\)\]"):
        fxamp.initialize(nets, **options)
    with pytest.raises(fxamp.CaptureError, match="It is model 1 of 2"):
        fxamp.initialize(nets, **options, example_inputs=[(torch.ones(4, 4),), None])
    nets = [Deciding(4), Deciding(8)]
    shapes = [(torch.ones(4, 4),), (torch.ones(2, 8),)]
    made = fxamp.initialize(nets, opt_level="O2", verbosity=0, example_inputs=shapes)
    assert [net.fc.weight.dtype for net in made] == [torch.bfloat16] * 2
    assert [net(*shape).shape[1] for net, shape in zip(made, shapes, strict=True)] == [4, 8]


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_one_of_several_models_that_fails_leaves_no_half_converted_ones(opt_level):
    good = Deciding(4)
    before = good.fc.weight.detach().clone()
    with pytest.raises(fxamp.CaptureError, match="model 1 of 2"):
        examples = [(torch.ones(4, 4),), None]
        options = {"verbosity": 0, "capture": "symbolic", "example_inputs": examples}
        fxamp.initialize([good, Deciding(8)], opt_level=opt_level, **options)
    assert torch.equal(good.fc.weight, before) and good(torch.ones(4, 4)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_apexs_speed_of_light_setting_trains(model, dtype):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"keep_batchnorm_fp32": True, "cast_model_type": dtype, "loss_scale": 8.0, "verbosity": 0}
    converted, optimizer = fxamp.initialize(model, optimizer, opt_level="O3", **options)
    before = F.cross_entropy(converted(TOKENS).flatten(0, 1), TOKENS.flatten())
    for _ in range(10):
        optimizer.zero_grad()
        loss = F.cross_entropy(converted(TOKENS).flatten(0, 1), TOKENS.flatten())
        with fxamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert loss < 0.9 * before
    assert converted.bn.weight.dtype == torch.float32 and converted.conv.weight.dtype == dtype


@pytest.mark.parametrize("masters", ["fp32", "kahan"])
def test_an_o3_model_with_masters_is_captured_again(masters):
    """Masters are the optimizer's; the modules that stay whole (batch norm) run low all the same."""
    x, net = torch.randn(4, 8), nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, without = (fxamp.convert(copy.deepcopy(net), torch.bfloat16, (x,), "O3") for _ in range(2))
    optimizer = fxamp.MasterWeightOptimizer(torch.optim.SGD(model.parameters(), 0.1), masters=masters)
    model(x).sum().backward()
    optimizer.step()
    without.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), without.eval()(x))


@pytest.mark.parametrize("opt_level", ["O2", "O3"])
def test_an_example_that_no_graph_can_hold_is_told_of_where_gradients_are_off_too(opt_level):
    class Deciding(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            y = self.fc(x)
            return y + 1 if y.sum() > 0 else y

    with torch.no_grad(), pytest.raises(fxamp.CaptureError, match=r"bool\(\) of a traced value"):
        fxamp.convert(Deciding(), torch.bfloat16, (torch.randn(2, 8),), opt_level, capture="symbolic")


NORMS = {
    "batch_norm": lambda: nn.BatchNorm1d(16),
    "instance_norm": lambda: nn.InstanceNorm1d(16, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("is_low", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_by_itself_writes_its_low_statistics_at_o3(name, is_low, caplog):
    norm, plain = NORMS[name](), NORMS[name]()
    x = torch.randn(8, 16, 4, generator=torch.Generator().manual_seed(0)) + 1
    converted = fxamp.convert(norm, torch.bfloat16, opt_level="O3")
    found = converted(x.bfloat16() if is_low else x)
    torch.testing.assert_close(found.float(), plain(x), rtol=0.02, atol=0.02)
    assert converted.running_mean.dtype == torch.bfloat16
    torch.testing.assert_close(converted.running_mean.float(), plain.running_mean, rtol=0.02, atol=0.002)
    found.float().square().sum().backward()
    assert converted.weight.grad is not None
    assert fxamp.report(converted).captures == ("symbolic",)
