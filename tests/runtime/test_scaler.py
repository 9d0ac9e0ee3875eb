"""LossScaler against torch.amp.GradScaler as an independent oracle, and what it promises beyond it."""

import copy
import gc
import math
import pickle
import random

import pytest
import torch
from runtime_instruments import NoSync

from fxamp.errors import CheckpointError, OptionError, ScaleCollapseError
from fxamp.runtime import device_skip
from fxamp.runtime.fixed_scalers import NoOpLossScaler, StaticLossScaler
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.scaler_base import StepOrderError
from fxamp.runtime.step_result import StaleResultError

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    "fused_momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "foreach_adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused_adam": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "radam": lambda p: torch.optim.RAdam(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}
BAD = (math.inf, -math.inf, math.nan)


def parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def backward(scaler: torch.amp.GradScaler, weight: torch.Tensor, gradient: list[float]) -> None:
    """A loss whose gradient with respect to weight is exactly `gradient` times the scale."""
    scaler.scale((weight * torch.tensor(gradient)).sum()).backward()


def one_step(scaler, optimizer, weight, gradient):
    optimizer.zero_grad()
    backward(scaler, weight, gradient)
    result = scaler.step(optimizer)
    scaler.update()
    return result


class Side:
    """One scaler with its own optimizers, driven through a history."""

    def __init__(self, scaler: torch.amp.GradScaler, kinds: list[str]) -> None:
        self.scaler = scaler
        self.weights = [parameter(1.0, -2.0, 3.0) for _ in kinds]
        self.optimizers = [OPTIMIZERS[kind]([weight]) for kind, weight in zip(kinds, self.weights, strict=True)]
        for kind, optimizer in zip(kinds, self.optimizers, strict=True):
            if kind == "fused_momentum" and not isinstance(scaler, LossScaler):
                # torch's own path reads an uninitialised momentum buffer after a skipped first step; without
                # this flag it skips on the host, before the buffer exists.
                optimizer._step_supports_amp_scaling = False

    def play(self, event: dict) -> None:
        for number, gradients in enumerate(event["gradients"]):
            self.optimizers[number].zero_grad()
            for gradient in gradients:
                backward(self.scaler, self.weights[number], gradient)
            if event["unscales"]:
                self.scaler.unscale_(self.optimizers[number])
            self.scaler.step(self.optimizers[number])
        self.scaler.update(event["new_scale"])

    def seen(self) -> tuple:
        return self.scaler.get_scale(), self.scaler._get_growth_tracker(), [w.tolist() for w in self.weights]


def random_event(rng: random.Random, optimizers: int) -> dict:
    def gradient() -> list[float]:
        values = [rng.uniform(-1, 1) for _ in range(3)]
        if rng.random() < 0.25:
            values[rng.randrange(3)] = rng.choice(BAD)
        return values

    return {
        "gradients": [[gradient() for _ in range(rng.choice((1, 1, 3)))] for _ in range(optimizers)],
        "unscales": rng.random() < 0.3,
        "new_scale": rng.choice((8.0, 2.0**15)) if rng.random() < 0.1 else None,
    }


@pytest.fixture(params=[False, True], ids=["as_on_a_gpu", "host_flag"])
def way_to_skip(request, monkeypatch):
    """The skip by selection, which a GPU takes, and the look at a flag in host memory."""
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", request.param)


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("seeds", [range(500), range(500, 1000)], ids=str)
def test_1000_random_histories_equal_torch(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        kinds = rng.choices(list(OPTIMIZERS), k=rng.choice((1, 1, 2)))
        interval = rng.choice((1, 2, 3, 2000))
        options = {"init_scale": rng.choice((1.0, 2.0**16)), "growth_interval": interval}
        ours, torchs = Side(LossScaler(**options), kinds), Side(torch.amp.GradScaler("cpu", **options), kinds)
        for step in range(4):
            event = random_event(rng, len(kinds))
            ours.play(event)
            torchs.play(event)
            assert ours.seen() == torchs.seen(), (seed, step, kinds)


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_long_history_of_each_optimizer_equals_torch(kind):
    rng = random.Random(kind)
    ours, torchs = Side(LossScaler(), [kind]), Side(torch.amp.GradScaler("cpu"), [kind])
    for step in range(30):
        event = random_event(rng, 1)
        event["gradients"] = [[[math.nan, 1.0, 1.0]]] if step in (0, 1) else event["gradients"]
        ours.play(event)
        torchs.play(event)
        assert ours.seen() == torchs.seen(), step
    state, expected = ours.optimizers[0].state_dict(), torchs.optimizers[0].state_dict()
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def test_is_a_grad_scaler():
    assert isinstance(LossScaler(), torch.amp.GradScaler)


# What happens at the ends of the range


def test_nan_in_the_data_for_300_steps_raises_by_name_and_changes_no_parameter():
    model = torch.nn.Linear(2, 1)
    before = copy.deepcopy(model.state_dict())
    optimizer, scaler = torch.optim.Adam(model.named_parameters()), LossScaler()
    errors = []
    for _ in range(300):
        optimizer.zero_grad()
        scaler.scale(model(torch.tensor([[math.nan, 1.0]])).sum()).backward()
        scaler.step(optimizer)
        try:
            scaler.update()
        except ScaleCollapseError as error:
            errors.append(str(error))
    # 65536 needs 30 halvings to 2^-14, then every 50 skips count.
    assert len(errors) == (300 - 30) // 50
    assert "weight" in errors[0] and "bias" not in errors[0] and "50 skipped" in errors[0]
    assert scaler.get_scale() == 2.0**-14
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_torchs_scale_collapse_does_not_happen():
    """166 overflows take torch's scale to 0, and the next finite step writes NaN."""
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(max_skips=1000)
    for _ in range(200):
        one_step(scaler, optimizer, weight, [math.inf])
    one_step(scaler, optimizer, weight, [1.0])
    assert weight.tolist() == [0.5]


def test_names_from_the_model_where_the_optimizer_has_none():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), LossScaler(2.0**-14, max_skips=1)
    scaler.name_parameters(model)
    with pytest.raises(ScaleCollapseError, match=r"gradients: weight\. No parameter"):
        one_step(scaler, optimizer, model.weight, [math.nan])
    other = LossScaler(2.0**-14, max_skips=1)
    with pytest.raises(ScaleCollapseError, match=r"group 0 parameter 0 \(1, 1\)"):
        one_step(other, optimizer, model.weight, [math.nan])


def test_scale_stays_within_max():
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.0), LossScaler(8.0, growth_interval=1, max_scale=32.0)
    scales = []
    for _ in range(4):
        one_step(scaler, optimizer, weight, [1.0])
        scales.append(scaler.get_scale())
    assert scales == [16.0, 32.0, 32.0, 32.0]


def test_bounds_and_norms_are_integers_too():
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(4.0, max_scale=2**70)
    backward(scaler, weight, [1.0])
    assert scaler.step(optimizer, max_grad_norm=2**70).grad_norm == 1.0
    scaler.update()
    assert (weight.item(), scaler.get_scale()) == (0.5, 4.0)


# StepResult


def test_result_tells_what_happened():
    weight = parameter(3.0, 4.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.0), LossScaler(16.0)
    result = one_step(scaler, optimizer, weight, [3.0, 4.0])
    assert (result.skipped, result.scale, result.grad_norm, result.nonfinite) == (False, 16.0, 5.0, [])
    result = one_step(scaler, optimizer, weight, [math.inf, 4.0])
    assert (result.skipped, result.found_inf, result.scale) == (True, True, 16.0)
    assert result.nonfinite == ["group 0 parameter 0 (2,)"]
    assert repr(result) == "StepResult(skipped=True, scale=16)"
    assert scaler.get_scale() == 8.0
    assert scaler.skipped_steps == 1
    assert [(r.step, r.scale, r.skipped) for r in scaler.history()] == [(1, 16.0, False), (2, 16.0, True)]


def test_the_count_of_nonfinite_numbers():
    weights = [parameter(1.0, 2.0, 3.0), parameter(1.0).to(torch.float64).detach().requires_grad_(), parameter(1.0)]
    optimizer, scaler = torch.optim.SGD(weights, 0.5), LossScaler(4.0)
    scaler.scale(weights[0].sum() + weights[1].sum()).backward()
    weights[0].grad[:2], weights[1].grad[0] = torch.tensor([math.inf, math.nan]), math.nan
    result = scaler.step(optimizer)
    scaler.update()
    assert result.nonfinite_count == 3 and len(result.nonfinite) == 2
    optimizer.zero_grad()
    for name in ("nonfinite_count", "nonfinite"):
        with pytest.raises(StaleResultError, match=rf"{name} was read after .* Read it before zero_grad\(\)\.$"):
            getattr(result, name)

    good = one_step(scaler, optimizer, weights[0], [1.0, 1.0, 1.0])
    optimizer.zero_grad()
    with NoSync():
        assert good.nonfinite_count == 0, "of a step that was done nothing is looked at"


def test_the_count_of_a_step_without_gradients_is_none():
    scaler, optimizer = LossScaler(device="cpu"), torch.optim.SGD([parameter(1.0)], 0.5)
    result = scaler.step(optimizer)
    assert result.skipped and result.nonfinite_count == 0


def test_a_norm_read_late_is_never_that_of_another_step():
    """New gradients take the addresses, and the versions, of those before them."""
    weights = [torch.nn.Parameter(torch.ones(64)) for _ in range(3)]
    optimizer, scaler, results = torch.optim.SGD(weights, 0.1), LossScaler(), []
    for factor in (1.0, 10.0, 100.0, 1000.0, 5.0):
        optimizer.zero_grad()
        scaler.scale(sum((weight * factor).sum() for weight in weights)).backward()
        results.append(scaler.step(optimizer))
        scaler.update()
    for result in results[:-1]:
        with pytest.raises(RuntimeError, match="before zero_grad"):
            _ = result.grad_norm
    assert results[-1].grad_norm == pytest.approx(5 * 192**0.5)


def test_names_of_nonfinite_gradients_are_the_models():
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), LossScaler()
    scaler.name_parameters(model)
    assert one_step(scaler, optimizer, model.weight, [math.nan]).nonfinite == ["weight"]


def test_names_are_those_of_several_models_and_go_with_their_parameters():
    scaler = LossScaler()
    models = [torch.nn.Linear(1, 1, bias=False), torch.nn.ParameterDict({"head": torch.nn.Parameter(torch.ones(1, 1))})]
    for model in models:
        scaler.name_parameters(model)

    def names(*parameters):
        optimizer = torch.optim.SGD(parameters, 0.1)
        scaler.scale(math.nan * sum(each.sum() for each in parameters)).backward()
        found = scaler.step(optimizer).nonfinite
        scaler.update()
        return found

    assert names(models[0].weight, models[1]["head"]) == ["weight", "head"]
    del models, model
    gc.collect()
    new = [torch.nn.Parameter(torch.ones(1, 1)) for _ in range(50)]  # in the places of the old
    assert not {"weight", "head"} & set(names(*new))


@pytest.mark.parametrize("has_gradient", [True, False])
def test_parameters_that_are_added_between_unscale_and_step(has_gradient):
    """Their gradients are still scaled: torch steps with them."""
    first, second = parameter(1.0), parameter(1.0)
    optimizer, scaler = torch.optim.SGD([first], 0.5), LossScaler(2.0**10)
    scaler.scale(first.sum() + (second.sum() if has_gradient else 0)).backward()
    scaler.unscale_(optimizer)
    optimizer.add_param_group({"params": [second]})
    if has_gradient:
        with pytest.raises(StepOrderError, match="added since unscale_"):
            scaler.step(optimizer)
        return
    scaler.step(optimizer)
    assert first.tolist() == [0.5] and second.tolist() == [1.0]


def test_each_optimizer_of_pure_bfloat16_is_warned_about(caplog):
    scaler = LossScaler(dtype=torch.bfloat16)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        optimizer = kind([weight], 0.1)
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            scaler.step(optimizer)
    copy.deepcopy(scaler).step(optimizer)
    told = [record.message.split()[0] for record in caplog.records if "directly" in record.message]
    assert told == ["SGD", "Adam", "Adam"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_norm_read_after_zero_grad_says_so(set_to_none):
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.1), LossScaler()
    result = one_step(scaler, optimizer, weight, [1.0])
    optimizer.zero_grad(set_to_none)
    with pytest.raises(RuntimeError, match="before zero_grad"):
        _ = result.grad_norm
    assert not result.skipped


@pytest.mark.parametrize("gradient", [[0.3, -2.0, 5.0], [3e-5, -2e-5, 1e-5]])
@pytest.mark.parametrize("max_norm", [1e-5, 0.1, 1e6, math.inf])
def test_clipping_in_the_step_equals_torchs(max_norm, gradient):
    weight, reference = parameter(1.0, 2.0, 3.0), parameter(1.0, 2.0, 3.0)
    scaler = LossScaler()
    scaler.scale((weight * torch.tensor(gradient)).sum()).backward()
    result = scaler.step(torch.optim.SGD([weight], 0.1), max_grad_norm=max_norm)
    reference.grad = torch.tensor(gradient)
    norm = torch.nn.utils.clip_grad_norm_([reference], max_norm)
    torch.optim.SGD([reference], 0.1).step()
    assert torch.equal(weight.grad, reference.grad)
    assert torch.equal(weight, reference)
    assert result.grad_norm == float(norm)


def test_scheduler_guarded_by_the_result_never_warns(recwarn):
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 1.0), LossScaler()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for gradient in (math.nan, 1.0, math.nan, 1.0):
        if not one_step(scaler, optimizer, weight, [gradient]).skipped:
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert not recwarn.list


# Recipes


def test_accumulation_of_four_micro_batches_equals_one_batch():
    inputs = torch.randn(8, 3)
    results = []
    for micro in (1, 4):
        weight = parameter(1.0, 2.0, 3.0)
        optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler()
        for part in inputs.chunk(micro):
            scaler.scale((part * weight).sum() / 8).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(weight.detach())
    # Sums in another order: a few roundings of float32.
    torch.testing.assert_close(results[0], results[1], rtol=2**-20, atol=0)


def test_two_optimizers_of_a_gan_skip_by_themselves():
    one, two = parameter(1.0), parameter(1.0)
    first, second = torch.optim.SGD([one], 0.5), torch.optim.SGD([two], 0.5)
    scaler = LossScaler(4.0)
    losses = scaler.scale([(one * 1.0).sum(), (two * math.inf).sum()])
    for loss in losses:
        loss.backward()
    results = scaler.step(first), scaler.step(second)
    scaler.update()
    assert [result.skipped for result in results] == [False, True]
    assert (one.tolist(), two.tolist(), scaler.get_scale()) == ([0.5], [1.0], 2.0)
    assert [record.skipped for record in scaler.history()] == [True]


def test_overflow_on_two_devices_skips_a_fused_step(monkeypatch):
    """torch's fused kernels skip where found_inf is 1, and not where it is 2."""
    monkeypatch.setattr(device_skip, "LOOKS_AT_HOST_FLAGS", False)
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.Adam([weight], 0.5, fused=True), LossScaler(4.0)
    backward(scaler, weight, [math.inf])
    scaler.unscale_(optimizer)
    flags = scaler._found_inf_per_device(optimizer)
    flags[torch.device("cuda", 1)] = flags[torch.device("cpu")].clone()
    assert scaler.step(optimizer).skipped
    assert weight.tolist() == [1.0]


def test_gradient_penalty_equals_float32():
    """The recipe of torch's documentation: the penalty's gradient is unscaled by hand, then scaled again."""
    results = []
    for scaler in (LossScaler(), LossScaler(enabled=False)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        inputs = torch.randn(5, 3, requires_grad=True)
        scaled = torch.autograd.grad(scaler.scale(model(inputs).sum()), inputs, create_graph=True)[0]
        penalty = ((scaled / scaler.get_scale()).norm(dim=1) - 1).square().mean()
        scaler.scale(model(inputs).sum() + penalty).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1], rtol=2**-20, atol=2**-24)


def test_sparse_gradients_equal_torchs():
    results = []
    for scaler in (LossScaler(), torch.amp.GradScaler("cpu")):
        torch.manual_seed(0)
        table = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
        for factor in (1.0, math.nan, 2.0):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor([1, 1, 3])).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append((table.weight.tolist(), scaler.get_scale()))
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_half_gradient_whose_sum_overflows_is_found():
    table = torch.nn.Embedding(2, 1, sparse=True)
    optimizer, scaler = torch.optim.SGD(table.parameters(), 0.1), LossScaler()
    scaler.scale(torch.zeros(()))
    table.half()
    values, indices = torch.full((2, 1), 60000.0, dtype=torch.float16), torch.tensor([[1, 1]])
    table.weight.grad = torch.sparse_coo_tensor(indices, values, (2, 1), is_coalesced=False)
    flags = scaler._check_inf_per_device(optimizer)
    assert [float(flag) for flag in flags.values()] == [1.0]


def test_the_scale_of_a_step_with_a_closure_is_told_under_any_default_dtype():
    weight = parameter(1.0)
    scaler = LossScaler(2.0**17)
    torch.set_default_dtype(torch.float16)
    try:
        result = scaler.step(torch.optim.SGD([weight], 1.0), closure=lambda: scaler.scale(weight.sum()).backward())
    finally:
        torch.set_default_dtype(torch.float32)
    assert result.scale == 2.0**17


def test_lbfgs_with_closure_equals_float32():
    results = []
    for scaler in (LossScaler(), LossScaler(enabled=False)):
        weight = parameter(-1.0, 2.0)
        optimizer = torch.optim.LBFGS([weight], max_iter=10, line_search_fn="strong_wolfe")

        def closure(weight=weight, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = (1 - weight[0]) ** 2 + 100 * (weight[1] - weight[0] ** 2) ** 2
            scaler.scale(loss).backward()
            return loss

        for _ in range(4):
            result = scaler.step(optimizer, closure=closure)
            scaler.update()
        assert float(result.returned.detach()) < 5
        results.append(weight.detach())
    assert torch.equal(results[0], results[1])


def test_lbfgs_overflow_inside_the_closure_gives_everything_back():
    weight, calls = parameter(-1.0, 2.0), []
    optimizer, scaler = torch.optim.LBFGS([weight], lr=0.1, max_iter=5), LossScaler()

    def closure():
        calls.append(weight.tolist())
        optimizer.zero_grad()
        loss = (weight**4).sum() * (math.nan if len(calls) == bad_call else 1.0)
        scaler.scale(loss).backward()
        return loss

    bad_call = 0
    scaler.step(optimizer, closure)
    scaler.update()
    before = weight.tolist(), copy.deepcopy(optimizer.state_dict())
    bad_call = len(calls) + 2
    result = scaler.step(optimizer, closure)
    scaler.update()
    assert result.skipped and scaler.get_scale() == 2.0**15
    assert calls[-1] != before[0], "the second call was made at moved parameters"
    assert weight.tolist() == before[0]
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)


class SharpnessAware(torch.optim.Optimizer):
    """Two-step SAM: climb to the sharpest point nearby, take its gradient, step from where one was."""

    def __init__(self, params, rho=0.05, lr=0.1):
        super().__init__(params, {"rho": rho, "lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        (weight,) = self.param_groups[0]["params"]
        home, climb = weight.clone(), weight.grad * (0.05 / weight.grad.norm())
        weight.add_(climb)
        with torch.enable_grad():
            closure()
        weight.copy_(home - 0.1 * weight.grad)


def test_two_step_sam_equals_float32():
    results = []
    for scaler in (LossScaler(), LossScaler(enabled=False)):
        weight = parameter(1.0, -2.0)
        optimizer = SharpnessAware([weight])

        def closure(weight=weight, optimizer=optimizer, scaler=scaler):
            optimizer.zero_grad()
            loss = (weight**4).sum()
            scaler.scale(loss).backward()
            return loss

        for _ in range(3):
            closure()
            assert not scaler.step(optimizer, closure).skipped
            scaler.update()
        results.append(weight.detach())
    assert torch.equal(results[0], results[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_on_no_parameter_warn_once_by_cause(caplog):
    frozen = parameter(1.0)
    frozen.requires_grad_(False)
    scaler = LossScaler(device="cpu")
    for _ in range(2):
        assert scaler.step(torch.optim.SGD([frozen], 0.1)).skipped
        scaler.update()
    (record,) = caplog.records
    assert "1 parameters, 0 of them require grad" in record.message and "frozen" in record.message
    assert scaler._get_growth_tracker() == 0

    caplog.clear()
    moved = parameter(1.0) * 1.0
    LossScaler(device="cpu").step(_holding(moved))
    assert "not leaves" in caplog.records[0].message
    caplog.clear()
    LossScaler(device="cpu").step(torch.optim.SGD([parameter(1.0)], 0.1))
    assert "detached" in caplog.records[0].message and "another model" in caplog.records[0].message


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("max_norm", [None, 100.0])
def test_gradients_that_are_thrown_away_after_unscale_back_the_scale_off_as_torchs(max_norm, set_to_none):
    """A common guard: the norm is not finite, so zero_grad() comes before step()."""

    def run(scaler, **kwargs):
        weight, seen = parameter(1.0), []
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(8):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * 10.0).backward()
            weight.grad = weight.grad.half().float()  # overflows while the scale is above 2**12
            scaler.unscale_(optimizer)
            if not torch.nn.utils.clip_grad_norm_([weight], 1.0).isfinite():
                optimizer.zero_grad(set_to_none=set_to_none)
            scaler.step(optimizer, **kwargs)
            scaler.update()
            seen.append((scaler.get_scale(), weight.item()))
        return seen

    ours = run(LossScaler(2.0**16, device="cpu"), **({} if max_norm is None else {"max_grad_norm": max_norm}))
    assert ours == run(torch.amp.GradScaler("cpu", 2.0**16)) and ours[-1][0] < 2.0**13


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: [loss, loss.detach()]])
def test_a_detached_loss_and_a_foreign_parameter_are_told_apart(wrap, caplog):
    trained, foreign = parameter(1.0), parameter(1.0)
    scaler = LossScaler()
    scaler.scale(wrap((trained * 2).detach()))
    scaler.step(torch.optim.SGD([trained], 0.1))
    (record,) = caplog.records
    assert "detached" in record.message and "another model" not in record.message

    caplog.clear()
    scaler = LossScaler()
    scaled = scaler.scale(wrap(trained * 2))
    (scaled[0] if isinstance(scaled, list) else scaled).backward()
    scaler.step(torch.optim.SGD([foreign], 0.1))
    (record,) = caplog.records
    assert "another model" in record.message and "detached" not in record.message


def _moved(model, dtype):
    """As torch moves where it cannot keep the parameters: with new ones."""
    for name, weight in list(model.named_parameters()):
        setattr(model, name, torch.nn.Parameter(weight.detach().to(dtype)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: _moved(model, torch.float64), "was moved or cast with new parameters, which are float64 on cpu"),
        (lambda model: _moved(model, torch.float32), "was copied, re-created, or moved with new parameters"),
        (lambda model: torch.nn.Module.__init__(model), "on no others of their shapes"),
    ],
)
def test_moved_parameters_and_foreign_ones_are_told_apart(change, told, caplog):
    model = torch.nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), LossScaler()
    change(model)
    weights = list(model.parameters()) or [parameter(1.0)]
    loss = sum(weight.sum() for weight in weights)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    (record,) = caplog.records
    assert told in record.message and "backward() was not called" not in record.message


def test_a_backward_that_was_forgotten_is_told(caplog):
    model = torch.nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), LossScaler()
    loss = model(torch.ones(1, 3)).sum()
    scaler.scale([loss])
    copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))
    scaler.step(optimizer)
    (record,) = caplog.records
    assert "hangs on these parameters, so backward() was not called" in record.message
    assert "another model" not in record.message


def _holding(tensor):
    optimizer = torch.optim.SGD([parameter(0.0)], 0.1)
    optimizer.param_groups[0]["params"] = [tensor]
    return optimizer


def test_as_accelerate_calls_it():
    """Accelerate passes its closure, None, by position and watches whether `step` ran."""
    weight, ran = parameter(1.0), []
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler()
    plain_step = optimizer.step
    optimizer.step = lambda *args, **kwargs: (ran.append(args), plain_step(*args, **kwargs))
    backward(scaler, weight, [1.0])
    scaler.step(optimizer, None)
    scaler.update()
    assert (weight.tolist(), ran) == ([0.5], [(None,)])


def test_as_lightning_calls_it():
    """Lightning evaluates the closure itself, unscales to clip, and reads state through the same names."""
    weight = parameter(3.0, 4.0)
    optimizer, scaler = torch.optim.SGD([weight], 1.0), LossScaler()
    backward(scaler, weight, [3.0, 4.0])
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_([weight], 1e-9)
    scaler.step(optimizer)
    scaler.update()
    restored = torch.amp.GradScaler("cpu")
    restored.load_state_dict(scaler.state_dict())
    assert weight.tolist() == [3.0, 4.0] and restored._get_growth_tracker() == 1


# Order, states, arguments


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_what_is_written_into_gradients_after_unscale_is_looked_at(bad, max_norm):
    weight = parameter(1.0, 2.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(4.0)
    backward(scaler, weight, [1.0, 1.0])
    scaler.unscale_(optimizer)
    weight.grad[1] = bad
    result = scaler.step(optimizer, max_grad_norm=max_norm)
    assert (result.skipped, len(result.nonfinite), weight.tolist()) == (True, 1, [1.0, 2.0])
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_what_unscale_has_found_counts_where_it_was_written_over_since():
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(4.0)
    backward(scaler, weight, [math.inf])
    scaler.unscale_(optimizer)
    weight.grad.nan_to_num_(posinf=0.0)
    assert scaler.step(optimizer).skipped
    assert weight.tolist() == [1.0]


def test_unscale_twice_is_once():
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 1.0), LossScaler()
    backward(scaler, weight, [0.25])
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    scaler.update()
    assert (weight.tolist(), scaler._get_growth_tracker()) == ([0.75], 1)


def test_an_optimizer_that_stands_where_a_gone_one_stood_is_another():
    """What the first one found counts at the next update."""
    weight, scaler = torch.nn.Parameter(torch.zeros(2)), LossScaler(8.0)
    scaler.scale((weight * torch.inf).sum()).backward()
    scaler.step(torch.optim.SGD([weight], lr=1.0))
    gc.collect()
    (found,) = scaler._per_optimizer_states.values()
    weight.grad = None
    scaler.scale(weight.sum()).backward()
    second = torch.optim.SGD([weight], lr=1.0)
    scaler._per_optimizer_states.clear()
    scaler._per_optimizer_states[id(second)] = found  # as where the first one stood
    scaler.step(second)
    assert torch.equal(weight, torch.tensor([-1.0, -1.0]))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_wrong_order_says_what_was_called_and_the_right_order():
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 1.0), LossScaler()
    for call, name in ((scaler.update, "update"), (lambda: scaler.step(optimizer), "step")):
        with pytest.raises(StepOrderError, match=rf"{name}\(\) was called, but scale\(\) was never.*right order"):
            call()
    backward(scaler, weight, [1.0])
    scaler.step(optimizer)
    with pytest.raises(StepOrderError, match=r"step\(\) was called.*already stepped.*STEPPED"):
        scaler.step(optimizer)
    with pytest.raises(StepOrderError, match=r"unscale_\(\) was called.*already stepped"):
        scaler.unscale_(optimizer)
    with pytest.raises(StepOrderError, match=r"pickling.*after update\(\)"):
        pickle.dumps(scaler)


def test_gradients_of_before_an_update_are_refused():
    """Their scale may have moved (torch divides by that of now), or they are unscaled already (torch divides twice)."""
    one, other = parameter(1.0), parameter(1.0)
    first, second, scaler = torch.optim.SGD([one], 1.0), torch.optim.SGD([other], 1.0), LossScaler()
    scaler.scale((one + other).sum()).backward()
    scaler.step(first)
    scaler.update()
    for call, name in ((scaler.step, "step"), (scaler.unscale_, "unscale_")):
        with pytest.raises(
            StepOrderError, match=rf"{name}\(\) was called, but no loss was scaled since the last update"
        ):
            call(second)
    second.zero_grad()
    scaler.step(second)
    scaler.update()
    scaler.scale(other.sum()).backward()
    scaler.unscale_(second)
    scaler.update()
    with pytest.raises(StepOrderError, match=r"no loss was scaled since.*update\(\) comes once, after all"):
        scaler.step(second)
    assert other.item() == 1.0


class TakesMore(torch.optim.SGD):
    """Its step takes more than a closure, under another name."""

    def step(self, evaluate=None, factor=1.0):
        with torch.enable_grad():
            loss = evaluate() if evaluate is not None else None
        for group in self.param_groups:
            group["lr"] *= factor
        super().step()
        for group in self.param_groups:
            group["lr"] /= factor
        return loss


TakesMore.__module__ = "elsewhere"


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("call", [
    lambda step, optimizer, closure: step(optimizer, closure, 2.0),
    lambda step, optimizer, closure: step(optimizer, evaluate=closure, factor=2.0),
    lambda step, optimizer, closure: step(optimizer, closure=closure, factor=2.0),
])  # fmt: skip
def test_a_closure_is_known_however_it_is_given(call, has_masters):
    """Of one that is not, gradients would be scaled, and an overflow not seen."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16 if has_masters else torch.float32))
    optimizer, scaler = TakesMore([weight], 0.125), LossScaler(1024.0)
    if has_masters:
        optimizer = MasterWeightOptimizer(optimizer)
    factor = 1.0

    def closure():
        optimizer.zero_grad()
        loss = (weight.float().square() * factor).sum()
        scaler.scale(loss).backward()
        return loss

    for expected in ([0.5, 1.0], [0.25, 0.5]):
        assert not call(scaler.step, optimizer, closure).skipped
        scaler.update()
        assert weight.tolist() == expected
    factor = math.inf
    assert call(scaler.step, optimizer, closure).skipped
    assert weight.tolist() == [0.25, 0.5]


@pytest.mark.parametrize("has_masters", [False, True])
def test_a_skipped_closure_puts_back_what_the_optimizer_keeps(has_masters):
    class Counts(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, 0.1)
            self.steps = 0
            self.mean = torch.zeros(1)

        def step(self, closure=None):
            self.steps += 1
            self.mean.add_(1.0)
            return super().step(closure)

    Counts.__module__ = "elsewhere"
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16 if has_masters else torch.float32))
    inner, scaler = Counts([weight]), LossScaler()
    optimizer = MasterWeightOptimizer(inner) if has_masters else inner

    def closure():
        optimizer.zero_grad()
        loss = (weight.float() * math.inf).sum()
        scaler.scale(loss).backward()
        return loss

    assert scaler.step(optimizer, closure=closure).skipped
    assert inner.steps == 0
    assert inner.mean.item() == 0.0


def test_a_scale_on_the_meta_device_is_refused():
    weight = parameter(1.0)
    scaler = LossScaler()
    backward(scaler, weight, [1.0])
    with pytest.raises(OptionError, match="new_scale is on the meta device"):
        scaler.update(torch.ones(1, device="meta"))


def test_the_state_of_a_static_scaler_is_no_dynamic_ones():
    state = StaticLossScaler(2.0**20).state_dict()
    scaler = LossScaler(8.0)
    with pytest.raises(CheckpointError, match=r"StaticLossScaler's state, whose scale stays 1.04858e\+06"):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == 8.0
    bound = LossScaler(8.0, min_scale=8.0, max_scale=8.0)
    bound.load_state_dict(bound.state_dict())
    StaticLossScaler(2.0).load_state_dict(state)


@pytest.mark.parametrize("scaler", [LossScaler(enabled=False), NoOpLossScaler()])
def test_a_scaler_that_does_nothing_says_why_there_are_no_gradients(scaler, caplog):
    weight, other = parameter(1.0), parameter(1.0)
    optimizer = torch.optim.SGD([other], 0.1)
    scaler.scale(weight.sum()).backward()
    for _ in range(2):
        scaler.step(optimizer)
    (record,) = [r for r in caplog.records if "step() did nothing" in r.message]
    assert "although the loss that was scaled last requires grad" in record.message


def test_fp16_gradients_without_masters_are_refused_by_name():
    model = torch.nn.Linear(1, 1).half()
    optimizer, scaler = torch.optim.SGD(model.named_parameters(), 1.0), LossScaler(device="cpu")
    scaler.scale(torch.ones(()))
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(OptionError, match=r"weight have float16.*MasterWeightOptimizer\(optimizer\)"):
        scaler.step(optimizer)


ODD = {
    "init_scale": 32.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "hysteresis": 3,
    "refill": "good_step",
    "min_scale": 0.5,
    "max_scale": 4096.0,
}


def odd_scaler(**changes):
    """A used scaler with no default value in any field."""
    scaler = LossScaler(**{**ODD, **changes})
    weight = parameter(1.0)
    optimizer = torch.optim.SGD([weight], 0.1)
    for gradient in (1.0, math.nan, 1.0, math.nan, math.nan):
        one_step(scaler, optimizer, weight, [gradient])
    return scaler


@pytest.mark.parametrize("used", [True, False])
def test_state_round_trip_with_no_default_anywhere(used):
    scaler = odd_scaler()
    state = scaler.state_dict()
    assert state["_hysteresis_left"] == 1 and state["counters"]["skipped_steps"] == 3
    other = LossScaler(device="cpu" if used else None)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    assert copy.deepcopy(scaler).state_dict() == state


def test_loading_writes_into_the_tensors_that_cuda_graphs_read():
    scaler = LossScaler(device="cpu")
    held = scaler._scale, scaler._growth_tracker, scaler._hysteresis_left
    scaler.load_state_dict(odd_scaler().state_dict())
    assert scaler._scale is held[0] and scaler._growth_tracker is held[1] and scaler._hysteresis_left is held[2]
    assert held[0].item() == odd_scaler().get_scale() and held[2].item() == 1


def test_states_are_interchangeable_with_torchs_both_ways():
    state = odd_scaler(hysteresis=1).state_dict()
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(state)
    assert theirs.state_dict() == {key: state[key] for key in theirs.state_dict()}
    ours = LossScaler()
    ours.load_state_dict(theirs.state_dict())
    assert {key: ours.state_dict()[key] for key in theirs.state_dict()} == theirs.state_dict()


def test_five_steps_save_load_five_steps_equal_ten():
    events = [1.0, math.nan, 1.0, 1.0, math.nan, math.nan, 1.0, 1.0, 1.0, 1.0]

    def run(scaler, weight, part):
        optimizer = torch.optim.SGD([weight], 0.1)
        for gradient in part:
            one_step(scaler, optimizer, weight, [gradient])

    options = {"growth_interval": 2, "hysteresis": 2}
    whole, weight = LossScaler(**options), parameter(1.0)
    run(whole, weight, events)
    first, half = LossScaler(**options), parameter(1.0)
    run(first, half, events[:5])
    second = LossScaler(**options)
    second.load_state_dict(first.state_dict())
    run(second, half, events[5:])
    assert second.state_dict() == whole.state_dict()
    assert torch.equal(half, weight)


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({}, CheckpointError, "empty.*disabled"),
        ([], CheckpointError, "got a list"),
        ({"scale": 2.0}, CheckpointError, "growth_factor.*missing, found .*scale"),
        ({**torch.amp.GradScaler("cpu").state_dict(), "scale": 0.0}, OptionError, "scale=0.0"),
        ({**torch.amp.GradScaler("cpu").state_dict(), "scale": math.nan}, OptionError, "scale=nan"),
        (
            {**torch.amp.GradScaler("cpu").state_dict(), "growth_factor": 0.5},
            OptionError,
            "growth_factor=0.5",
        ),
    ],
)
def test_bad_states_are_refused(state, error, text):
    with pytest.raises(error, match=text):
        LossScaler().load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"init_scale": -1.0}, "init_scale=-1.0"),
        ({"init_scale": math.inf}, "init_scale=inf"),
        ({"init_scale": "cuda"}, r"LossScaler\(device='cuda'\)"),
        ({"init_scale": 2.0**30}, "max_scale=.*widen"),
        ({"growth_factor": 1.0}, "growth_factor=1.0.*> 1"),
        ({"growth_factor": math.nan}, "growth_factor=nan"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"backoff_factor": -0.5}, "backoff_factor=-0.5"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"growth_interval": 2.5}, "growth_interval=2.5"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"refill": "grow"}, "'grow'.*Did you mean 'growth'"),
        ({"min_scale": 0.0}, "min_scale=0.0"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale=8 is above max_scale=4"),
        ({"max_skips": 0}, "max_skips=0"),
    ],
)
def test_bad_arguments_are_refused(options, text):
    with pytest.raises(OptionError, match=text):
        LossScaler(**options)


@pytest.mark.parametrize("new", [-1.0, 0, math.nan, math.inf, "8", True, torch.tensor(-1.0), torch.ones(2)])
def test_bad_new_scale_is_refused_and_changes_nothing(new):
    scaler = LossScaler(device="cpu")
    with pytest.raises(OptionError, match="new_scale"):
        scaler.update(new)
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize("new", [1024, 1024.0, torch.tensor(1024), torch.tensor([1024.0])])
def test_new_scale_may_be_any_number(new):
    scaler = LossScaler(device="cpu")
    scaler.update(new)
    assert scaler.get_scale() == 1024.0


def test_steps_before_an_update_that_sets_the_scale_are_told_of_too():
    weight = parameter(1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.5), LossScaler(4.0)
    for gradient, new_scale in ((math.inf, 8.0), (1.0, torch.tensor(16.0)), (math.nan, None)):
        optimizer.zero_grad()
        backward(scaler, weight, [gradient])
        scaler.step(optimizer)
        with pytest.raises(OptionError, match="new_scale"):
            scaler.update(-1.0)
        scaler.update(new_scale)
    assert [(record.scale, record.skipped) for record in scaler.history()] == [(4.0, True), (8.0, False), (16.0, True)]
    assert (scaler.skipped_steps, scaler.get_scale()) == (2, 8.0)


def test_setters_check_too():
    scaler = LossScaler()
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.1)
    scaler.set_growth_interval(3)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (
        4,
        0.1,
        3,
    )
    with pytest.raises(OptionError, match="growth_factor=1"):
        scaler.set_growth_factor(1.0)


def test_scale_takes_nested_tensors_and_nothing_else():
    scaler = LossScaler(2.0)
    scaled = scaler.scale([torch.ones(2), (torch.ones(1),)])
    assert scaled[0].tolist() == [2.0, 2.0] and scaled[1][0].tolist() == [2.0]
    with pytest.raises(OptionError, match="given a int"):
        scaler.scale(3)


def test_disabled_passes_through():
    weight = parameter(1.0)
    scaler = LossScaler(enabled=False)
    result = one_step(scaler, torch.optim.SGD([weight], 0.5), weight, [1.0])
    assert (weight.tolist(), result.skipped, result.scale, scaler.state_dict()) == ([0.5], False, 1.0, {})
    assert scaler.get_scale() == 1.0


def test_pure_bfloat16_is_warned_of_once(caplog):
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    for optimizer, warnings in ((torch.optim.SGD([weight], 0.1), 1), (None, 0)):
        caplog.clear()
        scaler = LossScaler(device="cpu")
        optimizer = optimizer or MasterWeightOptimizer(torch.optim.SGD([weight], 0.1))
        for _ in range(2):
            scaler.scale(torch.ones(()))
            weight.grad = torch.ones_like(weight)
            scaler.step(optimizer)
            scaler.update()
        assert len([r for r in caplog.records if "updates bfloat16 parameters directly" in r.message]) == warnings


def test_bfloat16_needs_no_scaling():
    assert not LossScaler(dtype=torch.bfloat16).is_enabled()
    assert LossScaler(dtype=torch.float16).is_enabled()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp32"])
def test_precisions_that_need_no_scaling_may_be_named(dtype):
    assert not LossScaler(dtype=dtype).is_enabled()


# Sparse gradients with rows that occur several times


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sparse_gradient_whose_rows_add_up_to_an_inf_is_skipped(dtype, has_masters):
    """Each of the two rows is finite."""
    weight = torch.nn.Parameter(torch.ones(4, 2, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), LossScaler(1.0, device="cpu")
    optimizer = MasterWeightOptimizer(optimizer) if has_masters else optimizer
    scaler.scale(weight.sum())
    rows, values = torch.tensor([[1, 1]]), torch.full((2, 2), 2e38, dtype=dtype)
    weight.grad = torch.sparse_coo_tensor(rows, values, (4, 2), is_coalesced=False)
    result = scaler.step(optimizer)
    assert result.skipped and weight.eq(1).all()


def sparse_step(max_grad_norm, dtype=torch.float32, *, unscales=False):
    torch.manual_seed(0)
    table = torch.nn.Embedding(20, 4, sparse=True)
    with torch.no_grad():
        table.weight.copy_(table.weight.to(torch.bfloat16))
    reference = torch.nn.Embedding(20, 4, sparse=True)
    reference.load_state_dict(table.state_dict())
    table.to(dtype)
    optimizer, scaler = torch.optim.SGD(table.parameters(), 0.1), LossScaler(16.0)
    if dtype != torch.float32:
        optimizer = MasterWeightOptimizer(optimizer)
    factors = torch.arange(1.0, 5.0)
    tokens = torch.tensor([1, 1, 3, 1])
    scaler.scale((table(tokens).float() * factors).sum()).backward()
    (reference(tokens) * factors).sum().backward()
    if unscales:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer, max_grad_norm=max_grad_norm)
    gradient = reference.weight.grad.coalesce()
    norm = float(gradient.values().norm())
    factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
    expected = reference.weight.detach() - 0.1 * factor * gradient.to_dense()
    found = table.weight if dtype == torch.float32 else next(iter(optimizer.master_params()))
    return result.grad_norm, norm, found.detach(), expected


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_grad_norm", [None, math.inf, 0.5])
def test_norm_of_a_sparse_gradient_adds_rows_that_occur_twice(max_grad_norm, dtype, unscales):
    measured, norm, found, expected = sparse_step(max_grad_norm, dtype, unscales=unscales)
    assert norm == pytest.approx(17.32, rel=1e-3)  # 11.0 without the addition
    assert measured == pytest.approx(norm, rel=2**-20)
    torch.testing.assert_close(found, expected, rtol=2**-20, atol=2**-22)


# No parameter ever receives a NaN


HUGE = [1e30, 2e30]  # their float32 norm is inf


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("max_grad_norm", [math.inf, 1.0, 0.0])
def test_norm_above_float32_writes_no_nan(max_grad_norm, dtype, unscales):
    """Only measured, the step is made; to be clipped by a norm that is not known, it is skipped."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([weight], 2.0**-100), LossScaler(4.0)
    optimizer = optimizer if dtype == torch.float32 else MasterWeightOptimizer(optimizer)
    scaler.scale((weight.float() * torch.tensor(HUGE)).sum()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer, max_grad_norm=max_grad_norm)
    scaler.update()
    is_measured = max_grad_norm == math.inf
    assert (result.skipped, result.grad_norm, result.nonfinite) == (not is_measured, math.inf, [])
    assert scaler.get_scale() == (4.0 if is_measured else 2.0)
    expected = 1 - torch.tensor(HUGE) * 2.0**-100
    tolerance = 0.0 if dtype == torch.float32 else 2**-8  # the gradient's and the weight's rounding to bfloat16
    torch.testing.assert_close(
        weight.detach().float(), expected if is_measured else torch.ones(2), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("max_grad_norm", [math.inf, 1.0])
def test_norm_above_float32_in_a_closure_writes_no_nan(max_grad_norm):
    weight = parameter(1.0, 1.0)
    optimizer, scaler = torch.optim.SGD([weight], 1e-30), LossScaler(4.0)

    def closure():
        optimizer.zero_grad()
        loss = (weight * torch.tensor(HUGE)).sum()
        scaler.scale(loss).backward()
        return loss

    assert scaler.step(optimizer, closure, max_grad_norm=max_grad_norm).skipped is (max_grad_norm == 1.0)
    assert torch.isfinite(weight).all()


def test_clipping_by_a_nan_norm_keeps_the_names_of_those_that_are_nonfinite():
    model = torch.nn.Linear(2, 1)
    optimizer, scaler = torch.optim.SGD(model.named_parameters(), 0.1), LossScaler()
    scaler.scale(model(torch.tensor([[math.nan, 1.0]])).sum()).backward()
    assert scaler.step(optimizer, max_grad_norm=1.0).nonfinite == ["weight"]


@pytest.mark.usefixtures("way_to_skip")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: LossScaler(2.0**-10),
        lambda: LossScaler(1.0),  # the device may have halved it since
        lambda: LossScaler(16.0, backoff_factor=2.0**-14),
    ],
)
def test_unscaling_by_a_scale_below_one_is_looked_at(make, unscales, dtype):
    """The scaled gradient is finite, the unscaled one is not."""
    weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
    optimizer, scaler = torch.optim.SGD([weight], 0.1), make()
    optimizer = optimizer if dtype == torch.float32 else MasterWeightOptimizer(optimizer)
    if scaler._init_scale >= 1:
        scaler.scale((weight * math.inf).sum()).backward()
        assert scaler.step(optimizer).skipped
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() < 1
    scaler.scale((weight.float() * 1e36).sum() * (200 / scaler.get_scale())).backward()
    assert torch.isfinite(weight.grad).all()
    if unscales:
        scaler.unscale_(optimizer)
    result = scaler.step(optimizer)
    assert result.skipped and weight.tolist() == [1.0, 1.0]


def test_gradients_are_looked_at_once_where_the_scale_cannot_be_below_one(monkeypatch):
    kernel, calls = torch._amp_foreach_non_finite_check_and_unscale_, []
    monkeypatch.setattr(
        torch, "_amp_foreach_non_finite_check_and_unscale_", lambda *args: (calls.append(1), kernel(*args))
    )
    weight, scaler = parameter(1.0), LossScaler(2.0**10)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        one_step(scaler, optimizer, weight, [1.0])
    assert len(calls) == 3


# unscale_ once more


@pytest.mark.parametrize("between", ["backward", "backward that misses the first", "zero_grad and backward"])
def test_unscale_after_another_backward_is_refused(between):
    """Scaled gradients would stand beside unscaled ones; torch refuses every second call."""
    first, second = parameter(1.0), parameter(2.0)
    optimizer, scaler = torch.optim.SGD([first, second], 0.1), LossScaler()
    losses = scaler.scale([(first + second).sum(), (first + second).sum()])
    losses[0].backward()
    scaler.unscale_(optimizer)
    if "zero_grad" in between:
        optimizer.zero_grad()
    if "misses" in between:
        scaler.scale(second.sum()).backward()
    else:
        losses[1].backward()
    with pytest.raises(StepOrderError, match=r"already been called.*gradients have changed.*after the last backward"):
        scaler.unscale_(optimizer)


def test_unscale_twice_is_once_under_masters_too():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD([weight], 0.5)), LossScaler(8.0)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert weight.tolist() == [0.5, 0.5]


# What a result can still tell


def test_a_later_backward_that_misses_the_first_parameter_makes_a_result_stale():
    first, second = parameter(1.0), parameter(1.0)
    optimizer, scaler = torch.optim.SGD([first, second], 0.1), LossScaler()
    scaler.scale((first + second).sum()).backward()
    result = scaler.step(optimizer)
    assert result.grad_norm == pytest.approx(2**0.5)
    scaler.update()
    scaler.scale((second * math.nan).sum()).backward()
    for name in ("grad_norm", "nonfinite"):
        with pytest.raises(StaleResultError, match=f"{name} was read after.*another backward"):
            getattr(result, name)


def test_a_gradient_that_takes_anothers_place_makes_a_result_stale():
    weights = [parameter(1.0) for _ in range(3)]
    optimizer, scaler = torch.optim.SGD(weights, 0.1), LossScaler()
    scaler.scale(sum(weight.sum() for weight in weights)).backward()
    result = scaler.step(optimizer)
    scaler.update()
    for _ in range(20):
        weights[1].grad = None
        weights[1].sum().backward()
        with pytest.raises(StaleResultError):
            _ = result.grad_norm


class DecaysGradients(torch.optim.SGD):
    """Writes its weight decay into the gradients, as some packages do."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for weight in self.param_groups[0]["params"]:
            weight.grad.add_(weight, alpha=10.0)
        super().step()
        return loss


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("with_closure", [True, False])
def test_an_optimizer_that_writes_gradients_leaves_a_norm_that_is_stale_or_right(with_closure, enabled):
    weight = parameter(1.0, 1.0, 1.0, 1.0)
    optimizer, scaler = DecaysGradients([weight], 0.1), LossScaler(enabled=enabled)

    def closure():
        optimizer.zero_grad()
        loss = weight.sum()
        scaler.scale(loss).backward()
        return loss

    for max_norm in (None, math.inf):
        if not with_closure:
            closure()
        result = scaler.step(optimizer, *([closure] if with_closure else []), max_grad_norm=max_norm)
        scaler.update()
        if max_norm is None:
            with pytest.raises(StaleResultError, match="by the optimizer's step itself"):
                _ = result.grad_norm
        else:
            assert result.grad_norm == 2.0


def test_norm_read_late_of_parameters_with_and_without_masters():
    """A master-weight optimizer unscales 16-bit gradients in copies, the others in place."""
    low, high = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), parameter(1.0, 1.0)
    optimizer, scaler = MasterWeightOptimizer(torch.optim.SGD([low, high], 0.1)), LossScaler(64.0)
    scaler.scale(low.float().sum() * 3 + high.sum() * 4).backward()
    result = scaler.step(optimizer)
    assert result.grad_norm == pytest.approx(50**0.5)


# The names at a collapse


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("max_skips", [1, 2, 5])
def test_collapse_after_zero_grad(max_skips, set_to_none):
    model = torch.nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.named_parameters(), 0.1), LossScaler(2.0**-14, max_skips=max_skips)
    with pytest.raises(ScaleCollapseError) as caught:
        for _ in range(max_skips):
            scaler.scale(model(torch.full((1, 2), math.nan)).sum()).backward()
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none)
            scaler.update()
    # With one skip allowed every step might be the last, and none is looked at before.
    expected = "cleared or written before update" if max_skips == 1 else "gradients: weight."
    assert expected in str(caught.value)
    assert "another" not in str(caught.value)


def test_collapse_of_the_norm_alone_says_so():
    weight = parameter(1.0, 1.0)
    optimizer, scaler = torch.optim.SGD([weight], 0.1), LossScaler(1.0, min_scale=1.0, max_skips=2)
    with pytest.raises(ScaleCollapseError, match="none, but the norm to clip by is above float32's range"):
        for _ in range(2):
            optimizer.zero_grad()
            backward(scaler, weight, HUGE)
            scaler.step(optimizer, max_grad_norm=1.0)
            scaler.update()


# Bad input


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("wrong", [None, torch.nn.Linear(1, 1), "adam", 5])
def test_step_takes_an_optimizer(wrong, enabled):
    with pytest.raises(OptionError, match=rf"step\(\) takes an optimizer, got a {type(wrong).__name__}\."):
        LossScaler(device="cpu", enabled=enabled).step(wrong)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"_growth_tracker": None}, "_growth_tracker=None"),
        ({"_growth_tracker": "a"}, "_growth_tracker='a'"),
        ({"_growth_tracker": 2.5}, "_growth_tracker=2.5"),
        ({"_growth_tracker": -5}, "_growth_tracker=-5.*>= -1"),
        ({"_hysteresis_left": None}, "_hysteresis_left=None"),
        ({"_hysteresis_left": "a"}, "_hysteresis_left='a'"),
        ({"counters": None}, "counters=None"),
        ({"counters": 5}, "counters=5"),
        ({"counters": {"steps": "a"}}, r"counters\['steps'\]='a'"),
        ({"scale": "65536"}, "scale='65536' must be a number"),
    ],
)
@pytest.mark.parametrize("used", [True, False])
def test_a_state_with_a_bad_entry_changes_nothing(entries, text, used):
    scaler = LossScaler(device="cpu" if used else None)
    before = scaler.state_dict()
    with pytest.raises(OptionError, match=text):
        scaler.load_state_dict({**odd_scaler().state_dict(), **entries})
    assert scaler.state_dict() == before


@pytest.mark.parametrize("max_grad_norm", ["1", -1.0, math.nan, True, [1.0]])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_bad_norm_to_clip_to_is_refused(max_grad_norm, enabled):
    scaler = LossScaler(device="cpu", enabled=enabled)
    with pytest.raises(OptionError, match=r"max_grad_norm=.*must be a number >= 0"):
        scaler.step(torch.optim.SGD([parameter(1.0)], 0.1), max_grad_norm=max_grad_norm)


def test_two_closures_or_none_at_all_are_refused():
    optimizer, scaler = torch.optim.SGD([parameter(1.0)], 0.1), LossScaler(device="cpu")
    with pytest.raises(OptionError, match="two closures"):
        scaler.step(optimizer, lambda: 1, closure=lambda: 2)
    with pytest.raises(OptionError, match="closure=5 cannot be called"):
        scaler.step(optimizer, closure=5)


def test_a_text_is_no_new_scale_and_no_device():
    with pytest.raises(OptionError, match="new_scale='2' must be a number"):
        LossScaler(device="cpu").update("2")


def test_a_skipped_step_with_a_closure_takes_back_what_it_put_in_the_groups():
    """Many optimizers count their steps in the group, from the first step on."""

    class Counting(torch.optim.SGD):
        def step(self, closure):
            for group in self.param_groups:
                group["step"] = group.get("step", 0) + 1
            return super().step(closure)

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = Counting([parameter], 0.1), LossScaler(2.0)
    factor = iter([math.inf, 1.0])

    def closure():
        optimizer.zero_grad()
        loss = (parameter * next(factor)).sum()
        scaler.scale(loss).backward()
        return loss

    for steps in (None, 1):
        scaler.step(optimizer, closure=closure)
        scaler.update()
        assert optimizer.param_groups[0].get("step") == steps


def test_complex_gradients_are_unscaled_and_looked_at_as_pairs():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([weight], 1.0), LossScaler(4.0)
    for gradient, expected in ((4 + 8j, -2j), (complex(1.0, math.inf), -2j), (2.0 + 0j, -1.0 - 2j)):
        scaler.scale(torch.zeros(()))
        weight.grad = torch.full((3,), gradient)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight.detach(), torch.full((3,), expected, dtype=torch.complex64))
