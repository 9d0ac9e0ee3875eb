"""float16 and bfloat16 inputs of a float32 model: what torch.autocast runs, runs, with its numbers."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fxamp
from fxamp.errors import OptionError

LOW = (torch.float16, torch.bfloat16)
X = torch.linspace(-2, 2, 80).reshape(2, 5, 8)


class Parts(nn.Module):
    """Layers, and a forward of the test's."""

    def __init__(self, forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.batch, self.act = nn.LayerNorm(8), nn.BatchNorm1d(5), nn.PReLU(5)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.run = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


FORWARDS = {
    "linear": lambda m, x: m.other(m.fc(x).relu()),
    "convolution": lambda m, x: m.fc(m.conv(x)),
    "bmm": lambda m, x: torch.bmm(m.fc(x), x.transpose(1, 2)),
    "matmul": lambda m, x: m.fc(x) @ x.transpose(1, 2),
    "einsum": lambda m, x: torch.einsum("bij,bkj->bik", m.fc(x), x),
    "baddbmm": lambda m, x: torch.baddbmm(m.fc(x).transpose(1, 2) @ m.fc(x), x.transpose(1, 2), m.fc(x)),
    "attention": lambda m, x: m.attention(x, x, x, need_weights=False)[0],
    "lstm": lambda m, x: m.lstm(x)[0],
    "batch_norm": lambda m, x: m.fc(m.batch(x)),
    "prelu": lambda m, x: m.fc(m.act(x)),
    "cast by hand": lambda m, x: m.other(m.fc(x).to(torch.float16)),
    "keyword": lambda m, x: F.linear(input=x, weight=m.fc.weight, bias=m.fc.bias),
}


@pytest.mark.parametrize("given", LOW)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("name", FORWARDS)
def test_what_autocast_runs_runs_with_its_numbers(name, given, low):
    model = Parts(FORWARDS[name]).eval()
    converted = fxamp.convert(model, dtype=low, pad_to=0, capture="symbolic")
    x = X.to(given)
    found = converted(x)
    # oneDNN's LSTM takes no two low dtypes, and autocast leaves the given one to it
    with torch.autocast("cpu", dtype=low), torch.backends.mkldnn.flags(enabled=name != "lstm"):
        expected = model(x).float()
    assert found.dtype == torch.float32
    # where autocast leaves an op in the input's dtype, ours may be nearer to float32, by the roundings it saves
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(low).eps, atol=4 * torch.finfo(low).eps)


@pytest.mark.parametrize("given", LOW)
@pytest.mark.parametrize("name", ["linear", "convolution", "bmm", "attention", "einsum"])
def test_gemms_are_bitwise_autocasts(name, given):
    model = Parts(FORWARDS[name]).eval()
    found = fxamp.convert(model, dtype=given, pad_to=0, capture="symbolic")(X.to(given))
    with torch.autocast("cpu", dtype=given):
        assert torch.equal(found, model(X.to(given)).float())


@pytest.mark.parametrize("given", LOW)
@pytest.mark.parametrize("low", LOW)
def test_a_packed_sequence_that_comes_low_starts_from_states_of_one_dtype(given, low):
    model = Parts(lambda m, packed: m.lstm(packed)[0].data)
    converted = fxamp.convert(model, dtype=low, capture="symbolic")
    packed = nn.utils.rnn.pack_sequence([X[0], X[0, :2]])
    found, expected = converted(packed.to(given)), model(packed)
    eps = max(torch.finfo(dtype).eps for dtype in (given, low))
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=4 * eps)


def test_an_input_in_the_low_dtype_is_read_as_it_is():
    converted = fxamp.convert(Parts(FORWARDS["linear"]), dtype="fp16")
    converted(X.half())
    report = fxamp.report(converted)
    assert (report.casts_to_low, report.casts_to_high, report.user_casts) == (0, 1, 0)
    assert report.coverage == 1.0
    assert not [row for row in report.rows if row.op == "to" and not row.role]


def test_gradients_reach_a_low_input():
    model = Parts(FORWARDS["convolution"])
    x = X.half().requires_grad_()
    fxamp.convert(model, dtype="fp16")(x).sum().backward()
    ours, x.grad = x.grad, None
    with torch.autocast("cpu", dtype=torch.float16):
        model(x).float().sum().backward()
    assert ours.dtype == torch.float16 and torch.equal(ours, x.grad)


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x.split(5, 1)[0], lambda x: torch.stack(x.unbind(1), 1)])
def test_a_deny_op_reads_a_low_input_in_float32(part):
    model = Parts(lambda m, x: m.fc(part(x).pow(2).mean(-1, keepdim=True).rsqrt() * x))
    x = (X * 1000).half()  # its squares overflow float16
    exact = model(x.float())
    found = fxamp.convert(model, dtype="fp16")(x)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, exact, rtol=0, atol=4 * torch.finfo(torch.float16).eps * exact.abs().max().item())


MIXED = {  # ops that are no GEMM, of a low input and a float32 weight
    "promotes": lambda m, x: x * m.fc.weight[:5],
    "cat": lambda m, x: torch.cat([x[0], m.fc.weight]),
    "stack": lambda m, x: torch.stack([x[0], m.fc.weight[:5]]),
    "where": lambda m, x: torch.where(x > 0, x, m.fc.weight[:5]),
    "lerp": lambda m, x: torch.lerp(x[0], m.fc.weight[:5], 0.25),
    "index_add": lambda m, x: m.fc.weight.index_add(0, torch.arange(5), x[0]),
    "index_put": lambda m, x: m.fc.weight.clone().index_put((torch.arange(5),), x[0]),
    "scatter_add": lambda m, x: torch.ones(5, 8).scatter_add(0, torch.zeros(5, 8, dtype=torch.long), x[0]),
    "set items": lambda m, x: m.fc.weight.clone().index_fill(0, torch.tensor([0]), 0).copy_(m.fc.weight).add_(x[0, :1]),
    "cross": lambda m, x: torch.cross(x[0][:, :3], m.fc.weight[:5, :3], dim=1),
    "grid_sample": lambda m, x: F.grid_sample(m.fc.weight[None, None], x[:1, :, :2][None] / 2, align_corners=False),
    "grid_sample of a part": lambda m, x: F.grid_sample(
        x.split(4, -1)[1][None], m.fc.weight[None, None, :5, :2].repeat(1, 5, 1, 1), align_corners=False
    ),
    "grid_sample of what is converted": lambda m, x: F.grid_sample(
        x.to(x.dtype)[None], m.fc.weight[None, None, :5, :2].repeat(1, 5, 1, 1), align_corners=False
    ),
    "solve": lambda m, x: torch.linalg.solve(m.fc.weight, x[0].T),
}


@pytest.mark.parametrize("given", LOW)
@pytest.mark.parametrize("name", MIXED)
def test_other_ops_read_the_widest_dtype(name, given):
    model, x = Parts(MIXED[name]), X.to(given)
    found = fxamp.convert(model, dtype="fp16", capture="symbolic")(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, model(x.float()))


@pytest.mark.parametrize(
    "function", [lambda m, x: x.clone().mul_(m.fc.weight[:5]), lambda m, x: m.fc(x.float()).half()]
)
def test_what_the_model_makes_low_itself_stays_low(function):
    model, x = Parts(function), X.half()
    found = fxamp.convert(model, dtype="fp16", pad_to=0)(x)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, model(x), rtol=2**-10, atol=2**-10)


def test_what_the_user_cast_is_not_widened_for_other_ops():
    model = Parts(lambda m, x: m.fc(x).half().exp())
    converted = fxamp.convert(model, dtype="bf16", output_dtype=None)
    assert converted(X).dtype == torch.float16


def test_a_region_without_autocast_is_left_alone():
    def forward(model, x):
        with torch.autocast("cpu", enabled=False):
            return model.fc(x)

    with pytest.raises(RuntimeError, match="dtype"):
        fxamp.convert(Parts(forward), dtype="fp16")(X.half())


def test_denied_gemms_run_in_float32():
    model = Parts(FORWARDS["linear"])
    found = fxamp.convert(model, dtype="fp16", overrides={"fc": "deny", "other": "deny"})(X.half())
    assert torch.equal(found, model(X.half().float()))


def test_a_bfloat16_mask_enters_float16_attention_clamped():
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x, mask):
            return F.scaled_dot_product_attention(self.fc(x), self.fc(x), self.fc(x), attn_mask=mask)

    mask = torch.zeros(5, 5, dtype=torch.bfloat16)
    mask[2] = torch.finfo(torch.bfloat16).min  # a row that sees nothing: -inf would make it NaN
    found = fxamp.convert(Attends(), dtype="fp16")(X, mask)
    assert torch.isfinite(found).all()


def test_a_low_model_with_float32_inputs_runs_as_under_autocast():
    model = Parts(FORWARDS["convolution"]).half()
    found = fxamp.convert(model, dtype="fp16", pad_to=0)(X)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(found, model(X).float())


# ---------------------------------------------------------------------------------------------------------- Dynamo


def test_dynamo_graphs_are_promoted_too():
    model = Parts(FORWARDS["linear"])
    by_tracing = fxamp.convert(model, dtype="fp16", pad_to=0, capture="symbolic")(X.half())
    assert torch.equal(fxamp.convert(model, dtype="fp16", pad_to=0, capture="dynamo")(X.half()), by_tracing)


def a_fake_bmm_takes_mixed_dtypes() -> bool:
    """Whether Dynamo finds nothing to refuse in one, as before torch 2.12."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.bmm(X.half(), X.transpose(1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_under_torch_compile_a_deny_op_reads_a_low_input_in_float32_where_the_weights_are(stored):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8, dtype=stored)
            self.register_buffer("mean", torch.ones(8))  # float32 in both

        def forward(self, x):
            return self.layer(x), x.exp(), self.mean + 1

    x = torch.randn(4, 8, dtype=torch.bfloat16)
    layer, exp, mean = torch.compile(Model(), backend="fxamp", options={"dtype": torch.bfloat16, "inner": "eager"})(x)
    assert (layer.dtype, exp.dtype, mean.dtype) == (stored, stored, torch.float32)
    assert torch.equal(exp, x.to(stored).exp())


@pytest.mark.parametrize("name", ["convolution", "bmm", "lstm"])
def test_what_dynamo_refuses_names_the_input_and_the_remedy(name):
    converted = fxamp.convert(Parts(FORWARDS[name]), dtype="fp16", capture="dynamo")
    if name == "bmm" and a_fake_bmm_takes_mixed_dtypes():
        assert torch.equal(converted(X.half()), fxamp.convert(Parts(FORWARDS[name]), dtype="fp16")(X.half()))
        return
    with pytest.raises(OptionError, match=r"Parts was called with a float16 tensor of shape \(2, 5, 8\).*x.float\(\)"):
        converted(X.half())


def test_other_errors_of_a_dynamo_model_are_its_own():
    def forward(model, x):
        raise ValueError("a type of the user's")

    with pytest.raises(ValueError, match="a type of the user's") as caught:
        fxamp.convert(Parts(forward), dtype="fp16", capture="dynamo")(X)
    assert type(caught.value) is ValueError


def test_an_op_that_takes_no_mixed_operands_even_when_widened_names_the_input():
    model = Parts(
        lambda m, x: m.fc(x).index_add_(0, torch.tensor([0]), x[:1], alpha=1).addcmul_(x, x).copysign(x[:, :3])
    )
    with pytest.raises(OptionError, match=r"called with \(float16 tensor of shape \(2, 5, 8\)\).*such as x.float\(\)"):
        fxamp.convert(model, dtype="fp16")(X.half())
