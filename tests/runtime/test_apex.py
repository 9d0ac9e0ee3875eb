"""apex.amp's interface, with a script written for it."""

import math

import pytest
import torch

from fxamp.errors import CheckpointError, OptionError
from fxamp.runtime import apex as amp
from fxamp.runtime import device_skip
from fxamp.runtime.apex_casts import registry
from fxamp.runtime.apex_options import properties
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.masters import master_of
from fxamp.runtime.scaler_base import StepOrderError
from tests.runtime.test_master_checks import AroundAnother


def convert(model, *, dtype=None, opt_level="O1", **options):
    """Stands for fxamp.convert: lowers parameters in O2 and O3, as it does, and notes how it was called."""
    calls.append({"dtype": dtype, "opt_level": opt_level, **options})
    if opt_level != "O1":
        for buffer in (buffer for buffer in model.buffers() if buffer.is_floating_point()):
            buffer.data = buffer.to(dtype or torch.bfloat16)
        for parameter in model.parameters():
            master = parameter.detach()
            parameter.data = master.to(dtype or torch.bfloat16)
            if opt_level == "O2":
                parameter._fxamp_master = master
    return model


calls: list[dict] = []


@pytest.fixture(autouse=True)
def fresh():
    amp._amp_state.session = amp.casting.low = None
    calls.clear()
    for paths in registry.values():
        paths.clear()
    yield
    amp._amp_state.session = amp.casting.low = None


def start(opt_level, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=opt_level, convert=convert, **options)


def train(model, optimizer, steps=4, factor=1.0):
    torch.manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(8, 3)
        optimizer.zero_grad()
        outputs = model(inputs.to(next(model.parameters()).dtype)).float()
        loss = (outputs - inputs.sum(1, keepdim=True)).square().mean() * factor
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 1.0)
        optimizer.step()
    return [parameter.detach().float() for parameter in amp.master_params(optimizer)]


def test_o0_and_o1_equal_plain_training():
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    results = [train(*start(level)) for level in ("O0", "O1")]
    del plain
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_o2_trains_masters_close_to_float32(dtype):
    expected = train(*start("O0"))
    model, optimizer = start("O2", cast_model_type=dtype)
    assert isinstance(optimizer, MasterWeightOptimizer)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}})  # so that no step is skipped
    for mine, theirs in zip(train(model, optimizer), expected, strict=True):
        assert mine.dtype == torch.float32
        # 4 steps of 0.1 on gradients of at most norm 1, right to about 2^-6: momentum sums them to 10 steps.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=10 * 0.1 * 2**-6)


def test_o3_trains_without_masters_and_static():
    model, optimizer = start("O3", cast_model_type=torch.float16, loss_scale="128.0")
    before = [parameter.clone() for parameter in model.parameters()]
    train(model, optimizer)
    assert not isinstance(optimizer, MasterWeightOptimizer)
    assert master_of(next(model.parameters())) is None
    assert not torch.equal(before[0], next(model.parameters()))
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_overflow_skips_one_step_of_every_optimizer_passed(opt_level):
    one, two = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    (one, two), (first, second) = amp.initialize(
        [one, two],
        [torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(two.parameters(), 0.1)],
        opt_level=opt_level,
        convert=convert,
    )
    weights = [one.weight.clone(), two.weight.clone()]
    for factor in (math.inf, 1.0):
        first.zero_grad()
        second.zero_grad()
        loss = one.weight.float().sum() * factor + two.weight.float().sum()
        with amp.scale_loss(loss, [first, second]) as scaled:
            scaled.backward()
        first.step()
        second.step()
        moved = [not torch.equal(now.weight, then) for now, then in zip((one, two), weights, strict=True)]
        assert moved == ([False, False] if factor == math.inf else [True, True])
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 1}


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_overflow_of_two_backwards_skips_a_fused_step_too(opt_level, monkeypatch):
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)  # as on a GPU, where the kernel reads the flag
    model = torch.nn.Linear(2, 1)
    made = torch.optim.Adam(model.parameters(), 0.1, fused=True)
    model, optimizer = amp.initialize(model, made, opt_level=opt_level, convert=convert)
    weights = [each.clone() for each in amp.master_params(optimizer)]
    for _ in range(2):
        with amp.scale_loss(model.weight.float().sum() * math.inf, optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    assert all(map(torch.equal, weights, amp.master_params(optimizer)))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
@pytest.mark.parametrize("delay", [True, False])
def test_accumulation_equals_one_backward(opt_level, delay):
    weight = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = amp.initialize(
        weight, torch.optim.SGD(weight.parameters(), 0.5), opt_level=opt_level, convert=convert
    )
    before = next(amp.master_params(optimizer)).clone()
    for last in (False, True):
        loss = (model.weight.float() * torch.tensor([0.25, 2.0])).sum()
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)), before - 0.5 * torch.tensor([[0.5, 4.0]]))


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_delayed_backward_that_reaches_one_optimizer_keeps_the_gradients_of_the_other(opt_level):
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    models, optimizers = amp.initialize(
        layers, [torch.optim.SGD(layer.parameters(), 1.0) for layer in layers], opt_level=opt_level, convert=convert
    )
    for reached, delay in ((models, False), (models[:1], True), (models, False)):
        loss = sum(model.weight.float().sum() for model in reached)
        with amp.scale_loss(loss, optimizers, delay_unscale=delay) as scaled:
            scaled.backward()
    assert [next(amp.master_params(optimizer)).grad.item() for optimizer in optimizers] == [3.0, 2.0]


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_zeroing_in_place_amid_an_accumulation_begins_anew(opt_level):
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(
        layer, torch.optim.SGD(layer.parameters(), 1.0), opt_level=opt_level, convert=convert
    )
    backward(model, optimizer, 0.5)
    backward(model, optimizer, 4.0, delay_unscale=True)
    optimizer.zero_grad(set_to_none=False)
    backward(model, optimizer, 0.25)
    assert next(amp.master_params(optimizer)).grad.item() == 0.25


def test_each_loss_has_its_scaler_and_gradients_add_up_unscaled():
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(linear, torch.optim.SGD(linear.parameters(), 1.0), num_losses=2, convert=convert)
    amp.load_state_dict(
        {
            "loss_scaler0": {"loss_scale": 4.0, "unskipped": 3},
            "loss_scaler1": {"loss_scale": 1024.0, "unskipped": 0},
        }
    )
    before = model.weight.clone()
    for loss_id, slope in ((0, 0.5), (1, 0.25)):
        with amp.scale_loss(model.weight.sum() * slope, optimizer, loss_id) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.75)
    assert amp.state_dict() == {
        "loss_scaler0": {"loss_scale": 4.0, "unskipped": 4},
        "loss_scaler1": {"loss_scale": 1024.0, "unskipped": 1},
    }


@pytest.mark.parametrize("moved", ["overflow", "growth", "loaded"])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_delayed_backward_follows_the_scale_that_another_optimizers_moves(opt_level, moved):
    """One loss_id for both, apex's default: what stands scaled by 2^16 is not unscaled by another scale."""
    first, second = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
    models, (one, other) = amp.initialize(
        [first, second],
        [torch.optim.SGD(first.parameters(), 1.0), torch.optim.SGD(second.parameters(), 1.0)],
        opt_level=opt_level,
        convert=convert,
    )
    backward(models[0], one, 0.5, delay_unscale=True)
    backward(models[0], one, 0.25, delay_unscale=True)
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    if moved == "loaded":
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    elif moved == "growth":
        amp.load_state_dict({"loss_scaler0": {"loss_scale": scale, "unskipped": 1999}})
        backward(models[1], other, 0.25)
    else:
        backward(models[1], other, math.inf)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == {"overflow": scale / 2, "growth": scale * 2}.get(moved, 8)
    backward(models[0], one, 0.125, delay_unscale=True)
    backward(models[0], one, 1.0)
    assert next(amp.master_params(one)).grad.item() == 1.875


def test_after_an_error_in_the_block_delayed_gradients_bear_the_scale_they_were_given():
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(
        linear, torch.optim.SGD(linear.parameters(), 1.0), opt_level="O1", convert=convert
    )
    backward(model, optimizer, 0.5, delay_unscale=True)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 8.0, "unskipped": 0}})
    with pytest.raises(KeyError), amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer):
        raise KeyError
    backward(model, optimizer, 0.25)
    assert model.weight.grad.item() == 0.75


@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_a_delayed_backward_is_not_unscaled_by_another_losss_scale(opt_level):
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(
        linear, torch.optim.SGD(linear.parameters(), 1.0), opt_level=opt_level, num_losses=2, convert=convert
    )
    backward(model, optimizer, 0.5, delay_unscale=True)
    gradient = model.weight.grad.clone()
    with pytest.raises(
        StepOrderError, match=r"bear the scale of loss 0.*loss_id=1 has its own: leave delay_unscale out"
    ):
        backward(model, optimizer, 0.25, loss_id=1)
    assert torch.equal(model.weight.grad, gradient)
    backward(model, optimizer, 0.25)
    backward(model, optimizer, 0.125, loss_id=1)
    assert next(amp.master_params(optimizer)).grad.item() == 0.875
    optimizer.step()
    optimizer.zero_grad()
    backward(model, optimizer, 0.5, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer, 0.25, loss_id=1)
    assert next(amp.master_params(optimizer)).grad.item() == 0.25


@pytest.mark.parametrize("twice", ["model", "optimizer"])
def test_what_is_given_twice_is_refused_before_anything_is_changed(twice):
    linear = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(linear.parameters(), 1.0)
    models, optimizers = ([linear, linear], optimizer) if twice == "model" else (linear, [optimizer, optimizer])
    with pytest.raises(OptionError, match=rf"{twice} 1 of the list, a (Linear|SGD), is there before; give each once"):
        amp.initialize(models, optimizers, opt_level="O2")
    assert linear.weight.dtype == torch.float32
    amp.initialize(linear, optimizer, opt_level="O2")


def test_bounds_of_the_scale():
    start("O1", min_loss_scale=64.0, max_loss_scale=256.0)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 256.0
    assert amp._amp_state.session.scalers[0].rule.min_scale == 64.0


@pytest.mark.parametrize(
    ("bounds", "culprit"),
    [
        ({"min_loss_scale": 2.0**17}, r"min_loss_scale=131072.*above.*65536"),
        ({"min_loss_scale": 8.0, "max_loss_scale": 4.0}, r"min_loss_scale=8.*above.*max_loss_scale=4"),
        ({"min_loss_scale": 0.0}, "min_loss_scale=0.0"),
        ({"max_loss_scale": math.nan}, "max_loss_scale=nan"),
    ],
)
def test_bounds_that_cannot_be_are_refused_by_name_before_anything_is_converted(bounds, culprit):
    with pytest.raises(OptionError, match=culprit):
        start("O2", **bounds)
    assert not calls


def test_an_optimizer_that_cannot_have_masters_is_refused_before_anything_is_converted():
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OptionError, match=r"cannot wrap AroundAnother.*around the SGD"):
        amp.initialize(model, [inner, AroundAnother(inner)], opt_level="O2", convert=convert)
    assert not calls and amp.casting.low is None
    amp.initialize(model, inner, opt_level="O2", convert=convert)


def test_a_static_scale_is_loaded_as_the_constant():
    start("O2", loss_scale=128.0)
    saved = amp.state_dict()
    assert saved["loss_scaler0"]["loss_scale"] == 128.0
    model, optimizer = start("O2", loss_scale=1024.0)
    amp.load_state_dict(saved)
    train(model, optimizer, steps=2)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


@pytest.mark.parametrize(
    ("saved", "culprit"),
    [
        ({"loss_scale": 4.0}, r"loss_scaler1.*'unskipped'"),
        ({"loss_scale": math.nan, "unskipped": 0}, "loss_scaler1.*nan"),
        (7.0, "loss_scaler1.*7.0"),
    ],
)
def test_a_state_that_is_none_is_refused_and_changes_nothing(saved, culprit):
    start("O1", num_losses=2)
    before = amp.state_dict()
    with pytest.raises(CheckpointError, match=culprit):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}, "loss_scaler1": saved})
    assert amp.state_dict() == before


def test_disabled_runs_as_if_absent():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert amp.initialize(model, optimizer, enabled=False) == (model, optimizer)
    loss = model.weight.sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss


def test_the_level_may_stand_third():
    model = torch.nn.Linear(8, 8)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "O2", verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == "O2" and model.weight.dtype != torch.float32
    with pytest.raises(OptionError, match="enabled='02' must be True or False"):
        amp.initialize(torch.nn.Linear(8, 8), None, "02")


def test_shapes_are_returned_as_given():
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    assert amp.initialize([one, two], convert=convert) == [one, two]
    assert amp.initialize(one, optimizer, convert=convert) == (one, optimizer)
    assert [call["opt_level"] for call in calls] == ["O1", "O1", "O1"]


@pytest.mark.parametrize(
    ("level", "keep", "expected"), [("O2", False, "allow"), ("O2", "False", "allow"), ("O3", "True", "deny")]
)
def test_keep_batchnorm_becomes_an_override(level, keep, expected):
    start(level, keep_batchnorm_fp32=keep)
    assert calls[0]["overrides"] == {"1": expected}


def test_functions_of_torch_reach_the_lists():
    amp.register_half_function(torch.nn.functional, "softmax")
    amp.register_float_function(torch.Tensor, "tanh")
    amp.register_promote_function(torch, "add")

    class Lists:
        def override(self, **changes):
            return changes

    start("O1", lists=Lists())
    paths = {"allow": ("torch.nn.functional.softmax",), "deny": ("Tensor.tanh",), "infer": ("torch.add",)}
    assert calls[0]["lists"] == paths


@pytest.mark.parametrize(
    ("level", "overrides", "text"),
    [
        ("O4", {}, "'O4' is unknown"),
        ("O1", {"cast_model_type": torch.float16}, "remain float32"),
        ("O1", {"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True has no meaning"),
        ("O1", {"master_weights": True}, "master_weights=True has no meaning"),
        ("O2", {"patch_torch_functions": True}, "belongs to opt_level='O1'"),
        ("O2", {"cast_model_type": torch.float64}, "float64"),
        ("O2", {"keep_batchnorm_fp32": "yes"}, "'yes' must be"),
        ("O2", {"loss_scale": "static"}, "'static' must be a number"),
        ("O1", {"loss_scale": True}, "loss_scale=True must be a number"),
        ("O2", {"master_weights": "yes"}, "master_weights='yes' must be"),
        ("O1", {"patch_torch_functions": 1.5}, "patch_torch_functions=1.5 must be"),
        ("O0", {"cast_model_type": torch.float16}, "O0 is float32 training.*'O2' or 'O3'"),
        ("O0", {"cast_model_type": "float"}, "cast_model_type='float'"),
    ],
)
def test_contradictions_are_refused(level, overrides, text):
    with pytest.raises(OptionError, match=text):
        properties(level, **overrides)


def test_misuse_is_refused():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        pytest.raises(RuntimeError, match="before initialize"),
        amp.scale_loss(model.weight.sum(), optimizer),
    ):
        pass
    with pytest.raises(OptionError, match="got a int"):
        amp.initialize(3, optimizer)
    with pytest.raises(OptionError, match=r"weight is torch\.float16"):
        amp.initialize(torch.nn.Linear(1, 1).half(), convert=convert)
    with pytest.raises(OptionError, match="DataParallel"):
        amp.initialize(torch.nn.DataParallel(model), convert=convert)
    _, prepared = amp.initialize(model, optimizer, convert=convert)
    with pytest.raises(OptionError, match="only be passed through initialize"):
        amp.initialize(model, prepared, convert=convert)
    with (
        pytest.raises(OptionError, match="loss_id=1: there are 1"),
        amp.scale_loss(model.weight.sum(), prepared, 1),
    ):
        pass
    stranger = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(OptionError, match="did not return"), amp.scale_loss(model.weight.sum(), stranger):
        pass
    with pytest.raises(OptionError, match="closure"):
        prepared.step(lambda: 0)
    with pytest.raises(CheckpointError, match="Unexpected keys"):
        amp.load_state_dict({"scaler": {}})


def test_scheduler_made_before_or_after(recwarn):
    linear = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(linear.parameters(), 1.0)
    before = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    model, optimizer = amp.initialize(linear, inner, opt_level="O2", convert=convert)
    with amp.scale_loss(model.weight.float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    before.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_schedulers_of_the_returned_optimizer(level, recwarn):
    linear = torch.nn.Linear(1, 1)
    model, optimizer = amp.initialize(
        linear, torch.optim.SGD(linear.parameters(), 1.0), opt_level=level, convert=convert
    )
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    ]
    before = next(amp.master_params(optimizer)).clone()
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        with amp.scale_loss(model.weight.float().sum() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert torch.equal(next(amp.master_params(optimizer)), (before - 1.0) - 0.125)  # the overflow is skipped
    assert optimizer.param_groups[0]["lr"] == 0.5**4
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]
    with pytest.raises(OptionError, match="closure"):
        optimizer.step(lambda: 0)


def backward(model, optimizer, slope, *, fails=False, **options):
    with amp.scale_loss((model.weight.float() * slope).sum(), optimizer, **options) as scaled:
        scaled.backward()
        if fails:
            raise MemoryError


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_stand_after_an_error_as_before_the_block(level):
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(
        linear, torch.optim.SGD(linear.parameters(), 1.0), opt_level=level, convert=convert
    )
    backward(model, optimizer, 0.5)
    with pytest.raises(MemoryError):
        backward(model, optimizer, 2.0, fails=True)
    assert next(amp.master_params(optimizer)).grad.item() == 0.5
    backward(model, optimizer, 0.25)
    assert next(amp.master_params(optimizer)).grad.item() == 0.75
    optimizer.zero_grad()
    backward(model, optimizer, 0.25)
    assert next(amp.master_params(optimizer)).grad.item() == 0.25


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("zeroes", ["optimizer", "model"])
def test_gradients_zeroed_after_an_error_are_gone(level, zeroes):
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(
        linear, torch.optim.SGD(linear.parameters(), 1.0), opt_level=level, convert=convert
    )
    backward(model, optimizer, 0.5)
    backward(model, optimizer, 4.0, delay_unscale=True)
    with pytest.raises(MemoryError):
        backward(model, optimizer, 2.0, fails=True)
    {"optimizer": optimizer, "model": model}[zeroes].zero_grad()
    backward(model, optimizer, 0.25)
    assert next(amp.master_params(optimizer)).grad.item() == 0.25


def test_an_error_while_unscaling_puts_the_gradients_back(monkeypatch):
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(linear, torch.optim.SGD(linear.parameters(), 1.0), convert=convert)
    backward(model, optimizer, 0.5)

    def out_of_memory(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(amp._amp_state.session.scalers[0], "unscale_", out_of_memory)
        with pytest.raises(MemoryError):
            backward(model, optimizer, 2.0)
    assert model.weight.grad.item() == 0.5
    backward(model, optimizer, 0.25)
    assert model.weight.grad.item() == 0.75


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_broken_backward_leaves_no_scaled_gradients_where_none_stood(level):
    linear = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = amp.initialize(
        linear, torch.optim.SGD(linear.parameters(), 1.0), opt_level=level, convert=convert
    )
    with pytest.raises(MemoryError):
        backward(model, optimizer, 2.0, fails=True)
    assert model.weight.grad is None
    assert all(parameter.grad is None for parameter in amp.master_params(optimizer))


def test_only_gradients_that_stood_are_kept_after_an_error():
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 1.0), convert=convert)
    with amp.scale_loss(model[0].weight.sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(MemoryError), amp.scale_loss(model[1].weight.sum(), optimizer) as scaled:
        scaled.backward()
        raise MemoryError
    assert model[0].weight.grad.item() == 1.0 and model[1].weight.grad is None


@pytest.mark.parametrize("count", ["2", 0, -1, 1.5, True])
def test_a_number_of_losses_that_cannot_be_is_refused(count):
    with pytest.raises(OptionError, match=f"num_losses={count!r} must be a whole number"):
        start("O1", num_losses=count)
    assert not calls


def test_wrong_arguments_are_refused_by_name():
    model, optimizer = start("O1")
    for call, culprit in (
        (lambda: amp.scale_loss(5.0, optimizer), "float as loss.*tensor"),
        (lambda: amp.scale_loss(torch.ones(()), optimizer, loss_id="0"), "loss_id='0' must be a whole number"),
        (lambda: amp.scale_loss(torch.ones(()), optimizer, loss_id=-1), "loss_id=-1"),
        (lambda: amp.scale_loss(torch.ones(()), optimizer, loss_id=1), "loss_id=1: there are 1"),
        (lambda: amp.scale_loss(torch.ones(()), model), "Sequential that initialize"),
    ):
        with pytest.raises(OptionError, match=culprit), call():
            pass
    with pytest.raises(OptionError, match=r"master_params.*int"):
        list(amp.master_params(5))
    for state in (None, 5):
        with pytest.raises(CheckpointError, match="the state is a"):
            amp.load_state_dict(state)
    with pytest.raises(OptionError, match="cast_model_outputs='half'"):
        start("O2", cast_model_outputs="half")
    with pytest.raises(OptionError, match=r"init.*initialize"):
        amp.init()


def test_one_example_for_each_model():
    nets = [torch.nn.Linear(1, 1), torch.nn.Linear(2, 1)]
    shapes = [(torch.ones(1, 1),), (torch.ones(1, 2),)]
    amp.initialize(nets, example_inputs=shapes, convert=convert)
    amp.initialize(nets, example_inputs=shapes[0], convert=convert)
    assert [call["example_inputs"] for call in calls] == [*shapes, shapes[0], shapes[0]]
    with pytest.raises(OptionError, match="list of 1, and there are 2 models"):
        amp.initialize(nets, example_inputs=shapes[:1], convert=convert)


def test_what_scripts_read_of_amp_state():
    assert not hasattr(amp._amp_state, "opt_properties") and not hasattr(amp._amp_state, "loss_scalers")
    start("O2", num_losses=2)
    scaler = amp._amp_state.loss_scalers[1]
    assert (scaler.loss_scale(), scaler._loss_scale, scaler._unskipped, scaler.dynamic) == (65536.0, 65536.0, 0, True)
    scaler._loss_scale, scaler._unskipped = 1024.0, 7
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 1024.0, "unskipped": 7}
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0
    chosen = amp._amp_state.opt_properties
    assert (chosen.enabled, chosen.opt_level, chosen.master_weights) == (True, "O2", True)
    start("O1", loss_scale=8.0)
    assert not amp._amp_state.loss_scalers[0].dynamic and not amp._amp_state.hard_override
    with pytest.raises(OptionError, match=r"allow_incoming_model_not_fp32.*float32 models"):
        amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(torch.nn.Linear(1, 1), enabled=False)
    assert not amp._amp_state.opt_properties.enabled and amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    with pytest.raises(AttributeError, match="no 'loss_scaler'; it has"):
        _ = amp._amp_state.loss_scaler


def test_o1_without_patches_converts_nothing_and_still_scales():
    model, optimizer = start("O1", patch_torch_functions=False)
    assert not calls and amp.state_dict()["loss_scaler0"]["loss_scale"] == 65536.0
    assert optimizer.param_groups[0]["params"][0] is model[0].weight


@pytest.mark.parametrize(("level", "more"), [("O0", {}), ("O1", {"patch_torch_functions": False})])
def test_models_that_stay_float32_give_the_outputs_asked_for(level, more):
    model, _ = start(level, cast_model_outputs=torch.float16, **more)
    assert model(torch.ones(2, 3)).dtype == torch.float16
    assert start(level, **more)[0](torch.ones(2, 3)).dtype == torch.float32


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_a_plain_backward_before_the_first_scale_loss_counts_whole(opt_level):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0, loss_scale="dynamic")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
            scaled.backward()
        assert next(amp.master_params(optimizer)).grad.eq(2.0).all()
        optimizer.step()


def test_what_is_dropped_while_scaled_does_not_make_the_next_gradients_scaled():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    with pytest.raises(StepOrderError, match="while the gradients are scaled"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    with amp.scale_loss(model(torch.ones(1, 3)).sum(), optimizer) as scaled:
        scaled.backward()
    assert model.weight.grad.eq(2.0).all()
    optimizer.step()


def test_no_optimizer_is_refused():
    model = torch.nn.Linear(3, 2)
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)
    with pytest.raises(OptionError, match="no optimizer"), amp.scale_loss(model(torch.ones(1, 3)).sum(), []):
        pass


def test_a_block_inside_of_another_of_the_same_optimizer_is_refused():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, "O0", loss_scale=1024.0, verbosity=0, num_losses=2)
    losses = [model(torch.ones(1, 2)).sum() for _ in range(2)]
    with (
        pytest.raises(StepOrderError, match="one block after the other"),
        amp.scale_loss(losses[0], optimizer) as outer,
    ):
        outer.backward()
        with amp.scale_loss(losses[1], optimizer, loss_id=1):
            pytest.fail("the block was entered")
    assert model.weight.grad is None
    for loss_id, loss in enumerate(model(torch.ones(1, 2)).sum() for _ in range(2)):
        with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
    assert torch.equal(model.weight.grad, torch.full((1, 2), 2.0))
