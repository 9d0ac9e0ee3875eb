"""O1 to O3: where the numbers are kept, what a checkpoint holds, and that training works."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp.engine import engine_of


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
