"""Scalers that do not adapt have LossScaler's interface."""

import math

import pytest
import torch

from fxamp.errors import CheckpointError, OptionError, ScaleCollapseError
from fxamp.runtime.fixed_scalers import NoOpLossScaler, StaticLossScaler, scaler_for
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import master_of
from fxamp.runtime.scaler import LossScaler


def train(scaler, gradients, **step_options):
    """The loop that has no `if`; returns the weight and what happened."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, results = torch.optim.SGD([weight], 0.5), []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([gradient, 0.0])).sum()).backward()
        results.append(scaler.step(optimizer, **step_options))
        scaler.update()
    return weight.tolist(), results


@pytest.mark.parametrize("make", [LossScaler, lambda: StaticLossScaler(128.0), NoOpLossScaler])
def test_one_loop_for_all(make):
    weight, results = train(make(), [1.0, 1.0], max_grad_norm=0.25)
    # 1e-6 in the clipping factor, as torch's: 0.25 / (1 + 1e-6).
    assert weight == pytest.approx([0.75, 1.0], rel=1e-6)
    assert [result.grad_norm for result in results] == [1.0, 1.0]
    assert isinstance(make(), torch.amp.GradScaler)


def test_static_scale_never_moves_but_skips():
    scaler = StaticLossScaler(128.0)
    weight, results = train(scaler, [math.inf, 1.0, math.nan] * 3)
    assert scaler.get_scale() == 128.0
    assert weight == [-0.5, 1.0]
    assert [result.skipped for result in results] == [True, False, True] * 3


def test_static_scale_that_always_overflows_raises():
    with pytest.raises(ScaleCollapseError, match="floor of 128 for 3 skipped"):
        train(StaticLossScaler(128.0, max_skips=3), [math.inf] * 3)


def test_static_state():
    scaler, other = StaticLossScaler(128.0), StaticLossScaler(2.0)
    other.load_state_dict(scaler.state_dict())
    train(other, [1.0, math.inf])
    assert other.get_scale() == 128.0
    with pytest.raises(CheckpointError, match="saved by a dynamic loss scaler"):
        other.load_state_dict(LossScaler().state_dict())
    with pytest.raises(CheckpointError, match="saved by a dynamic"):
        other.load_state_dict(torch.amp.GradScaler("cpu").state_dict())


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, "128"])
def test_static_scale_is_checked(scale):
    with pytest.raises(OptionError, match="scale="):
        StaticLossScaler(scale)


def test_no_op_does_nothing_and_says_nothing():
    scaler = NoOpLossScaler()
    loss = torch.ones(1)
    assert scaler.scale(loss) is loss
    scaler.update()
    scaler.update(3.0)
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    scaler.load_state_dict(LossScaler().state_dict())
    assert scaler.get_scale() == 1.0


def test_no_op_takes_closures():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.LBFGS([weight], line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = (weight - 1.0).square().sum()
        loss.backward()
        return loss

    NoOpLossScaler().step(optimizer, closure)
    assert weight.tolist() == [1.0]


def test_scaler_for_a_precision():
    assert type(scaler_for(torch.float16, init_scale=8.0)) is LossScaler
    assert scaler_for(torch.float16, init_scale=8.0).get_scale() == 8.0
    assert type(scaler_for(torch.bfloat16)) is type(scaler_for(torch.float32)) is NoOpLossScaler


@pytest.mark.parametrize("name", ["fp16", "half", "float16"])
def test_scaler_for_takes_the_names_that_convert_takes(name):
    assert type(scaler_for(name, init_scale=8.0)) is LossScaler
    assert type(scaler_for("bf16")) is type(scaler_for("fp32")) is NoOpLossScaler


@pytest.mark.parametrize("dtype", ["auto", None, torch.int8, torch.float8_e4m3fn, "flaot16"])
def test_scaler_for_refuses_what_it_does_not_know(dtype):
    with pytest.raises(OptionError, match=r"low_dtype\.( Did you mean 'float16')?"):
        scaler_for(dtype)


@pytest.mark.parametrize("dtype", ["auto", "bf17", torch.int8, 5])
def test_a_scaler_refuses_what_scaler_for_does_not_know(dtype):
    with pytest.raises(OptionError, match=r"low_dtype\."):
        LossScaler(dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", torch.bfloat16, "fp32", torch.float32, torch.float64])
def test_a_scaler_is_off_where_nothing_needs_scaling(dtype):
    assert not LossScaler(dtype=dtype).is_enabled()
    assert not StaticLossScaler(8.0, dtype=dtype).is_enabled()


@pytest.mark.parametrize("dtype", ["float16", "half", torch.float16, None])
def test_a_scaler_is_on_for_float16(dtype):
    assert LossScaler(dtype=dtype).is_enabled()


@pytest.mark.parametrize("state", [None, [], 5])
def test_a_static_scaler_refuses_what_is_no_state(state):
    with pytest.raises(CheckpointError, match=f"is a dict, got a {type(state).__name__}"):
        StaticLossScaler(8.0).load_state_dict(state)


@pytest.mark.parametrize(
    ("scale", "text"), [("dynamic", r"itself is fxamp\.LossScaler\(\)"), ("128.0", "'128.0' must be")]
)
def test_a_text_is_no_scale_and_no_device(scale, text):
    with pytest.raises(OptionError, match=text) as caught:
        StaticLossScaler(scale)
    assert "device" not in str(caught.value)


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1000.0, math.inf])
def test_clipping_without_a_scale_rounds_no_gradient_of_masters(max_norm):
    values = torch.tensor([1.0, -2.0, 3.0])
    low, plain = torch.nn.Parameter(values.bfloat16()), torch.nn.Parameter(values.clone())
    high, plain_high = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.clone())
    optimizer = MasterWeightOptimizer(torch.optim.SGD([low, high], lr=1.0))
    for parameter in (low, high, plain, plain_high):
        parameter.grad = (values / 3).bfloat16().to(parameter.dtype)
    result = NoOpLossScaler().step(optimizer, max_grad_norm=max_norm)
    norm = torch.nn.utils.clip_grad_norm_([plain, plain_high], max_norm)
    assert result.grad_norm == norm and not result.skipped and result.nonfinite == []
    torch.optim.SGD([plain, plain_high], lr=1.0).step()
    # The factor is divided by in place of multiplied with: two roundings of float32, of gradients of at most 1.
    torch.testing.assert_close(master_of(low), plain.detach(), rtol=0, atol=2**-22)
    torch.testing.assert_close(high, plain_high, rtol=0, atol=2**-22)
    assert not hasattr(optimizer, "grad_scale")
