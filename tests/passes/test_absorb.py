"""Casts that kernels do inside disappear; each rule is proved over values."""

import math
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxamp
from fxamp import ir
from fxamp.errors import InvariantError
from fxamp.passes.absorb import PROMOTES, ROUNDS_ONCE, TAKES_DTYPE, Absorb
from fxamp.passes.base import run_passes
from fxamp.passes.verify import ALWAYS
from tests.language import BF16, FP16, FP32, PIPELINE, assert_same, captured, policy, run_graph, run_steps

ABSORB = lambda s: Absorb(s.policy.low)  # noqa: E731
LOW = (FP16, BF16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def layers(count: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))


def casts_of(function, *inputs, absorb=True, **options) -> list[str]:
    """Activation casts as "low" or "high", in order; outputs equal those without the pass."""
    module = options.pop("module", layers())
    plain = captured(function, *inputs, module=module, **options)
    run_steps(PIPELINE, plain)
    setting = captured(function, *inputs, module=module, **options)
    run_steps((*PIPELINE, ABSORB), setting)
    assert_same(run_graph(setting, *inputs), run_graph(plain, *inputs))
    assert not run_passes(setting.graph, (Absorb(setting.policy.low),), ALWAYS), "once is enough"
    return [ir.mark(node).precision for node in setting.graph.nodes if ir.mark(node).role == "cast"]


# ------------------------------------------------------------------------------------------------ whole graphs


@pytest.mark.parametrize("low", LOW)
def test_cast_up_op_cast_down_is_the_op_on_the_low_value(low):
    assert casts_of(lambda m, x: m[1](m[0](x).exp()), X, chosen=policy(low)) == ["low", "high"]


def test_an_op_somebody_reads_in_float32_stays():
    found = casts_of(lambda m, x: (m[1](h := m[0](x).exp()), h), X)
    assert found == ["low", "high", "low", "high"]


def test_a_function_that_rounds_more_than_once_stays():
    assert casts_of(lambda m, x: m[1](m[0](x).pow(3)), X) == ["low", "high", "low", "high"]
    assert "erf" not in ROUNDS_ONCE and "gelu" not in ROUNDS_ONCE


def test_an_op_that_the_user_denied_stays():
    chosen = policy(overrides={"exp": "deny"})
    assert casts_of(lambda m, x: m[1](m[0](x).exp()), X, chosen=chosen) == ["low", "high", "low", "high"]


@pytest.mark.parametrize("op, call", [("tanh", torch.tanh), ("exp", torch.exp), ("silu", F.silu)])
def test_an_op_that_the_user_listed_stays(op, call):
    """What it saves for its backward is then float32, as its gradient is."""
    model = nn.Sequential(nn.Linear(8, 8), Applies(call), nn.Linear(8, 8))
    lists = fxamp.OpLists.default().override(deny=[op])
    converted, like = (
        fxamp.convert(model, FP16, (X,), lists=lists),
        fxamp.convert(model, FP16, (X,), overrides={"1": "deny"}),
    )
    (row,) = (row for row in fxamp.report(converted).rows if row.op == op)
    assert row.precision == "high" and row.dtype == "float32"
    gradients = [torch.autograd.grad(each(X).square().sum(), each[0].weight)[0] for each in (converted, like)]
    assert torch.equal(*gradients)


class Applies(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


def test_an_op_in_a_region_without_autocast_stays():
    def forward(m, x):
        h = m[0](x)
        with torch.autocast("cpu", enabled=False):
            h = h.exp()
        return m[1](h)

    assert casts_of(forward, X) == ["low", "high", "low", "high"]


def test_an_in_place_op_stays():
    setting = captured(lambda m, x: m[1](m[0](x).exp_()), X, module=layers())
    run_steps((*PIPELINE, ABSORB), setting)
    assert ir.mark(next(n for n in setting.graph.nodes if ir.mark(n).op == "exp")).precision == "high"


@pytest.mark.parametrize(
    "spelling", [lambda h: torch.softmax(h, -1), lambda h: h.softmax(-1), lambda h: F.softmax(h, -1)]
)
def test_an_op_with_a_dtype_takes_the_cast_of_its_input(spelling):
    strict = policy(level="strict")
    setting = captured(lambda m, x: spelling(m[0](x)), X, module=layers(), chosen=strict)
    run_steps((*PIPELINE, ABSORB), setting)
    softmax = next(node for node in setting.graph.nodes if ir.mark(node).op == "softmax")
    assert softmax.kwargs["dtype"] == FP32 and ir.mark(softmax.args[0]).precision == "low"
    assert casts_of(lambda m, x: spelling(m[0](x)), X, chosen=strict) == ["low"]


def test_a_dtype_that_the_user_gave_is_kept():
    for reduce in (lambda h: h.exp().sum(-1, dtype=torch.float64), lambda h: h.sum(-1, dtype=torch.float64)):
        setting = captured(
            lambda m, x, reduce=reduce: reduce(m[0](x)), X, module=layers(), chosen=policy(level="strict")
        )
        run_steps((*PIPELINE, ABSORB), setting)
        total = next(node for node in setting.graph.nodes if ir.mark(node).op == "sum")
        assert total.kwargs["dtype"] == torch.float64


@pytest.mark.parametrize("low", LOW)
def test_conversions_of_float64_are_none_of_a_cast(low):
    """float64 -> float32 -> low rounds twice, and is no mask: the user's conversion stays what it is."""

    def forward(m, x):
        wide = x.double() * 1.0000001
        return m[0](wide.float()), m[1](x) + wide.float()

    setting = captured(forward, X, module=(module := layers()), chosen=policy(low))
    run_steps((*PIPELINE, ABSORB), setting)
    kinds = [(ir.dtype_of(n.args[0]), ir.dtype_of(n)) for n in setting.graph.nodes if str(n.target) in ("float", "to")]
    assert kinds.count((torch.float64, FP32)) == 2 and (torch.float64, low) not in kinds
    plain = captured(forward, X, module=module, chosen=policy(low))
    run_steps(PIPELINE, plain)
    assert_same(run_graph(setting, X), run_graph(plain, X))


def test_a_promoting_op_reads_a_low_operand_beside_a_float32_one():
    assert casts_of(lambda m, x: x.exp() + m[0](x), X) == ["low"]
    assert casts_of(lambda m, x: m[0](x) / x.exp(), X) == ["low"]


IN_PLACE = {
    "add_": lambda wide, low: wide.add_(low, alpha=2),
    "sub_": lambda wide, low: wide.sub_(low),
    "mul_": lambda wide, low: wide.mul_(low),
    "div_": lambda wide, low: wide.div_(low),
    "+=": lambda wide, low: operator.iadd(wide, low),
    "*=": lambda wide, low: operator.imul(wide, low),
    "broadcast": lambda wide, low: wide.add_(low[:1]),
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_a_promoting_op_that_writes_into_a_float32_operand_reads_a_low_one(write):
    assert casts_of(lambda m, x: write(x.exp(), m[0](x)), X) == ["low"]


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
@pytest.mark.parametrize("low", LOW)
def test_a_write_of_a_low_operand_has_the_values_and_gradients_of_the_cast(write, low):
    found = []
    for wide in (True, False):
        rng = torch.Generator().manual_seed(0)
        given = (torch.randn(64, 64, generator=rng) * 1e-3).to(low).requires_grad_()
        other = (torch.randn(64, 64, generator=rng) * 1e3).requires_grad_()
        result = write(other * 1.0, given.float() if wide else given)
        assert result.dtype == FP32
        found.append((result, *torch.autograd.grad((result * result.detach()).sum(), (given, other))))
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_what_is_written_is_not_read_low():
    """A low operand that is written becomes float32 first, and one that is written between keeps its cast's place."""

    def forward(m, x):
        h = m[0](x)
        total = x.exp()
        total += h
        h.mul_(2)
        total += h
        return total, h

    setting = captured(forward, X, module=(module := layers()))
    run_steps((*PIPELINE, ABSORB), setting)
    for ours, expected in zip(run_graph(setting, X)[0], forward(module, X), strict=True):
        torch.testing.assert_close(ours.float(), expected, rtol=2e-2, atol=2e-2)


class Residual(nn.Module):
    """Blocks that add to their stream in place."""

    def __init__(self, in_place):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.in_place = in_place

    def forward(self, x):
        x = x * 1.0
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = layer(norm(x))
            if self.in_place:
                x += y
            else:
                x = x + y
        return x


def test_a_stream_that_is_added_to_in_place_takes_no_more_casts():
    casts = {}
    for in_place in (True, False):
        model = Residual(in_place)
        report = fxamp.report(fxamp.convert(model, BF16, (torch.randn(8, 32),)))
        casts[in_place] = report.casts
    assert casts[True] == casts[False]


def test_a_float32_scalar_tensor_does_not_promote():
    assert casts_of(lambda m, x: x.exp().sum() * m[0](x), X) == ["low", "high"]


def test_without_shapes_nothing_promotes():
    setting = captured(lambda m, x: x.exp() + m[0](x), X, module=layers(), preview=True)
    run_steps(PIPELINE, setting)
    assert not run_passes(setting.graph, (Absorb(BF16),), ALWAYS)


def test_a_cast_with_several_readers_stays_for_its_backward():
    def forward(m, x):
        h, wide = m[0](x), x.exp()
        return h + wide, h * wide

    assert casts_of(forward, X) == ["low", "high"]
    frozen = layers().requires_grad_(False)
    assert casts_of(forward, X, module=frozen) == ["low"]


def test_a_cast_that_another_op_needs_stays():
    assert casts_of(lambda m, x: (x.exp() + (h := m[0](x)), h), X) == ["low", "high"]


def test_low_float32_low_is_the_low_value():
    chosen = policy(overrides={"linear_1": "allow"})
    setting = captured(lambda m, x: m[1](m[0](x).float()), X, module=layers(), chosen=chosen)
    run_steps((*PIPELINE, ABSORB), setting)
    first, second = (node for node in setting.graph.nodes if ir.mark(node).op == "linear")
    assert second.args[0] is first
    assert casts_of(lambda m, x: m[1](m[0](x).float()), X, chosen=chosen) == ["low", "high"]


@pytest.mark.parametrize("mask", [torch.bool, torch.uint8, torch.int8])
@pytest.mark.parametrize("spelling", [lambda m, h: m.float(), lambda m, h: m.to(FP32), lambda m, h: m.to(h.dtype)])
@pytest.mark.parametrize("low", LOW)
def test_a_mask_that_is_read_low_alone_is_made_low_at_once(mask, spelling, low):
    def forward(m, x, mask):
        h = m[0](x)
        return m[1](h * spelling(mask, h))

    values = torch.randint(-128, 128, (4, 8), generator=torch.Generator().manual_seed(0)).to(mask)
    assert casts_of(forward, X, values, chosen=policy(low)) == ["low", "high"]


def test_a_mask_that_is_read_in_float32_too_stays():
    assert casts_of(lambda m, x, mask: (m[1](m[0](x) * (h := mask.float())), h), X, X > 0) == ["low", "low", "high"]


def test_a_mask_at_the_end_is_read_beside_the_low_value():
    assert casts_of(lambda m, x, mask: m[0](x) * mask.float(), X, X > 0) == ["low"]


def test_a_mask_that_the_user_keeps_in_float32_stays():
    body = lambda m, x, mask: m[1](mask.float())  # noqa: E731
    assert casts_of(body, X, X > 0) == ["high"]
    assert casts_of(body, X, X > 0, chosen=policy(overrides={"float_1": "deny"})) == ["low", "high"]


def test_a_mask_written_after_it_was_made_keeps_its_dtype():
    def forward(m, x, mask):
        scale = mask.float()
        scale += 1e-3
        return m[1](m[0](x) * scale)

    assert "high" in casts_of(forward, X, X > 0)


def test_integers_that_low_precision_rounds_keep_their_dtype():
    found = casts_of(lambda m, x, at: m[1](m[0](x) * at.float()), X, torch.arange(8, dtype=torch.int16))
    assert "high" in found


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8])
@pytest.mark.parametrize("low", LOW)
def test_bytes_are_exact_in_both_low_dtypes(dtype, low):
    values = torch.arange(-128, 256).clamp(torch.iinfo(torch.int8).min, 255).to(dtype)
    assert torch.equal(values.to(low).float(), values.float())


def test_what_the_user_cast_down_stays():
    def forward(m, x):
        return m[0](x).float().to(torch.float64)

    setting = captured(forward, X, module=layers())
    run_steps((*PIPELINE, ABSORB), setting)
    assert any(torch.float64 in node.args for node in setting.graph.nodes)


@pytest.mark.parametrize(
    "function", [lambda m, x: m[1](m[0](x).exp()), lambda m, x: x.exp() * m[0](x), lambda m, x: m[0](x).softmax(-1)]
)
def test_gradients(function, monkeypatch):
    """In a model; of each op below. Rule 2 rounds the saved result, so within one rounding of bfloat16."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x):
            return function(self.layers, x)

    models = []
    for apply in (Absorb.apply, lambda self, graph: False):
        monkeypatch.setattr(Absorb, "apply", apply)
        models.append(fxamp.convert(Model(), BF16, example_inputs=(X,), level="strict"))
        models[-1](X).sum().backward()
    for ours, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        if plain.grad is not None:
            scale = float(plain.grad.abs().max())
            assert (ours.grad - plain.grad).abs().max() <= 4 * 2**-8 * scale  # 4 terms of a sum, one step each


def test_the_invariant_of_operands_sees_a_cast_that_is_missing():
    setting = captured(lambda m, x: x.exp() + m[0](x), X, module=layers())
    run_steps(PIPELINE, setting)
    cast = next(n for n in setting.graph.nodes if ir.mark(n).role == "cast" and ir.mark(n).precision == "high")
    cast.replace_all_uses_with(cast.args[0])
    setting.graph.erase_node(cast)
    with pytest.raises(InvariantError, match="is high but reads"):
        run_passes(setting.graph, (Absorb(BF16),), ALWAYS)


# ------------------------------------------------------------------------------------------------ all patterns


def patterns(low: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Every value of a 16-bit dtype."""
    return torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16).view(low)


def steps_apart(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """The largest number of representable values between two tensors of a 16-bit dtype; NaN equals NaN."""
    assert torch.equal(ours.isnan(), theirs.isnan())
    ordered = []
    for tensor in (ours, theirs):
        bits = tensor.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).view(torch.int16).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return int((ordered[0] - ordered[1]).abs().max())


def function_of(op: str):
    return getattr(torch, op, None) or getattr(F, op)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", ROUNDS_ONCE)
def test_a_low_kernel_rounds_once(op, low, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = patterns(low, device)
    for given in (values, values[::7]):  # contiguous and strided kernels
        apart = steps_apart(function_of(op)(given), function_of(op)(given.float()).to(low))
        assert apart <= (0 if ROUNDS_ONCE[op] == "exact" else 1)


def steps_of_gradients(op: str, low: torch.dtype, device: str) -> float:
    """The most that the gradient of a low op is from that of the two casts, in the last place of the latter.

    Over all values whose results are finite and normal, for gradients of 2^-10 to 2^10. inf where one alone is finite.
    """
    limits, most = torch.finfo(low), 0.0
    values = patterns(low, device)
    results = function_of(op)(values.float()).to(low).float().abs()
    values = values[(results == 0) & (values.abs() < 1) | (results >= limits.tiny) & results.isfinite()]
    for size in (2.0**-10, 2.0**-5, 1.0, 2.0**5, 2.0**10):
        found = []
        for wide in (True, False):
            given = values.clone().requires_grad_()
            result = function_of(op)(given.float()).to(low) if wide else function_of(op)(given)
            (gradient,) = torch.autograd.grad(result, given, torch.full_like(result, size))
            found.append(gradient.double())
        expected, ours = found
        is_finite = expected.abs() < limits.max / 2
        if not ours[is_finite].isfinite().all():
            return math.inf
        step = expected[is_finite].abs().clamp(min=limits.tiny) * limits.eps
        most = max(most, float(((ours - expected)[is_finite].abs() / step).max()))
    return most


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", ROUNDS_ONCE)
def test_the_gradient_of_a_low_kernel_is_as_good(op, low, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert steps_of_gradients(op, low, device) <= 2


@pytest.mark.parametrize(
    "op", ["reciprocal", "rsqrt", "expm1", "tanh", "sigmoid", "atan", "acos", "log10", "tan", "erfc"]
)
def test_what_has_a_worse_gradient_keeps_its_casts(op):
    assert steps_of_gradients(op, FP16, "cpu") > 2 and op not in ROUNDS_ONCE


@pytest.mark.parametrize("level", ["strict", "balanced", "aggressive"])
@pytest.mark.parametrize("op", [torch.expm1, torch.reciprocal, torch.rsqrt, lambda x: 1 / x])
def test_gradients_where_a_low_backward_would_overflow_or_cancel(op, level):
    """As near to float32's as with the casts that CUDA's autocast makes."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            with torch.no_grad():
                self.first.weight.mul_(1e-4)
                self.first.bias.fill_(-7.0 if op is torch.expm1 else 1e-3)

        def forward(self, x):
            return self.last(op(self.first(x)))

    plain = Model()
    converted = fxamp.convert(Model(), FP16, (X,), level=level)
    for model in (plain, converted):
        (model(X).sum() * (1.0 if op is torch.expm1 else 2**-8)).backward()
    for name, parameter in converted.first.named_parameters():
        expected = plain.first.get_parameter(name).grad
        assert (parameter.grad - expected).norm() <= 0.01 * expected.norm(), name


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", PROMOTES)
def test_a_promoting_kernel_has_the_gradients_of_the_cast(op, low):
    values, function = patterns(low), getattr(torch, op)
    for other in (torch.full((65536,), 1.7), values.float().flip(0), torch.logspace(-30, 30, 65536)):
        for flipped in (False, True):
            found = []
            for wide in (True, False):
                given = values.clone().requires_grad_(), other.clone().requires_grad_()
                pair = (given[0].float() if wide else given[0], given[1])
                result = function(*(reversed(pair) if flipped else pair))
                found.append(torch.autograd.grad(result.sum(), given))
            for ours, expected in zip(*found, strict=True):
                assert torch.equal(ours.nan_to_num(nan=1.5), expected.nan_to_num(nan=1.5))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", TAKES_DTYPE)
def test_a_kernel_with_a_dtype_has_the_gradients_of_the_cast(op, low):
    function, rng = getattr(torch, op), torch.Generator().manual_seed(0)
    for shape in ((7,), (3, 5), (4, 1, 33), (2, 300)):
        values, weights = torch.randn(shape, generator=rng).to(low), torch.randn(shape, generator=rng)
        found = []
        for wide in (True, False):
            given = values.clone().requires_grad_()
            result = function(given.float(), -1) if wide else function(given, -1, dtype=FP32)
            factors = weights if result.shape == weights.shape else weights[..., 0]
            found.append(torch.autograd.grad((result * factors).sum(), given)[0])
        assert torch.equal(*found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", PROMOTES)
def test_a_promoting_kernel_reads_low_operands_exactly(op, low, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values, function = patterns(low, device), getattr(torch, op)
    for other in (torch.full((65536,), 1.7, device=device), values.float().flip(0)):
        for pair in ((values, other), (other, values)):
            wide = function(*(tensor.float() for tensor in pair))
            found = function(*pair)
            assert found.dtype == FP32 and torch.equal(found.nan_to_num(nan=1.5), wide.nan_to_num(nan=1.5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("op", TAKES_DTYPE)
def test_a_kernel_with_a_dtype_casts_inside(op, low, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    function, rng = getattr(torch, op), torch.Generator().manual_seed(0)
    for shape in ((7,), (3, 5), (4, 1, 33), (2, 300)):
        values = torch.randn(shape, generator=rng).to(device=device, dtype=low)
        found, wide = function(values, -1, dtype=FP32), function(values.float(), -1)
        if device == "cpu":
            assert torch.equal(found, wide) and found.dtype == FP32
        else:  # the kernel may add in another order: float32's own rounding of at most 300 terms
            assert torch.allclose(found, wide, rtol=300 * 2**-24, atol=300 * 2**-24)
