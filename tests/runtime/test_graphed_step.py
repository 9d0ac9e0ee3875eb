"""GraphedStep equals the eager loop; where there is no GPU its graphs are simulated."""

import copy
import gc
import importlib
import logging
import math
import weakref

import pytest
import torch

import fxamp
from fxamp import recorded, weight_fits
from fxamp.errors import OptionError
from fxamp.runtime.device_rates import make_capturable
from fxamp.runtime.graphed_step import WARM_UP, GraphedStep
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler
from tests.runtime.runtime_instruments import ThirdParty
from tests.runtime.simulated_graph import SimulatedGraphs
from tests.zoo.measure import loss_of

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def pieces(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model.to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
    return (
        model,
        MasterWeightOptimizer(optimizer) if dtype != torch.float32 else optimizer,
        LossScaler(2.0**10),
    )


def loss_fn(outputs, targets):
    return torch.nn.functional.mse_loss(outputs.float(), targets)


def batches(count, device="cpu", dtype=torch.float32, bad=()):
    torch.manual_seed(1)
    for number in range(count):
        inputs = torch.randn(6, 4, device=device) * (math.nan if number in bad else 1.0)
        yield inputs.to(dtype), torch.randn(6, 2, device=device)


def eager_loop(model, optimizer, scaler, data, max_grad_norm=None, rate_of=None):
    losses = []
    for number, (inputs, targets) in enumerate(data):
        if rate_of:
            optimizer.param_groups[0]["lr"] = rate_of(number)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_grad_norm=max_grad_norm)
        scaler.update()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def graphs(monkeypatch):
    return SimulatedGraphs(monkeypatch)


def same(ours, theirs, rtol=0.0):
    """Bit for bit, but that a graph reads its learning rate as a float32 number."""
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=rtol)


def test_without_cuda_it_is_the_eager_loop_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, optimizer, scaler = pieces()
    step = GraphedStep(model, loss_fn, optimizer, scaler, max_grad_norm=0.5)
    with caplog.at_level(logging.INFO, "fxamp"):
        losses = [float(step(*batch)) for batch in batches(5, bad=(2,))]
    expected = pieces()
    assert losses == pytest.approx(eager_loop(*expected, batches(5, bad=(2,)), 0.5), rel=0, nan_ok=True)
    same(model, expected[0])
    assert not step.is_graphed
    assert [record.message for record in caplog.records] == ["GraphedStep runs eagerly: CUDA is not available"]


OPTIMIZERS = {
    "fused AdamW": lambda params: torch.optim.AdamW(params, 0.05, fused=True),
    "foreach AdamW": lambda params: torch.optim.AdamW(params, 0.05, foreach=True),
    "capturable Adam": lambda params: torch.optim.Adam(params, 0.05, foreach=True, capturable=True),
    "fused SGD": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, fused=True),
    "foreach SGD": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, foreach=True),
    "capturable RMSprop": lambda params: torch.optim.RMSprop(params, 0.05, foreach=True, capturable=True),
}


def of_kind(kind, optimizer):
    """A model that is plain, float16, or converted; its optimizer, and a scaler whose scale moves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2)
    )
    if kind == "float16":
        model.half()
    if kind == "O1":
        model = fxamp.convert(model, dtype=torch.float16)
    built = OPTIMIZERS[optimizer](model.parameters())
    if kind == "float16":
        built = MasterWeightOptimizer(built)
    if kind == "O2":
        model, built = fxamp.initialize(model, built, opt_level="O2", verbosity=0)
    return model, built, LossScaler(2.0**10, growth_interval=3)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("bad", [(4, 5, 8), (0, 1, 2, 3, 7)], ids=["later", "from the first step"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["float32", "float16", "O1", "O2"])
def test_replays_equal_the_eager_loop(graphs, kind, optimizer, bad, max_grad_norm):
    """Skipped steps, growth and a new rate at each step; a first overflow must not keep a graph from being made."""
    dtype = torch.float16 if kind == "float16" else torch.float32
    # Finite data, gradients that overflow: data that is not would leave its mark in batch norm's statistics.
    data = list(batches(14, dtype=dtype))
    data = [(x, t * (math.inf if number in bad else 1.0)) for number, (x, t) in enumerate(data)]
    changes_rate = "foreach SGD" not in optimizer

    def rate_of(number):
        return 2.0**-5 / (1 + number // 4) if changes_rate else 0.05

    model, built, scaler = of_kind(kind, optimizer)
    step = graphs.step_for(model, loss_fn, built, scaler, max_grad_norm=max_grad_norm)
    skipped = []
    torch.manual_seed(2)
    for number, batch in enumerate(data):
        built.param_groups[0]["lr"] = rate_of(number)
        step(*batch)
        skipped.append(step.last_result.skipped)
    expected = of_kind(kind, optimizer)
    torch.manual_seed(2)
    eager_loop(*expected, data, max_grad_norm, rate_of)
    assert step.is_graphed and graphs.captures == 1
    assert skipped == [number in bad for number in range(14)]
    assert scaler.state_dict() == expected[2].state_dict() and scaler.skipped_steps == len(bad)
    is_exact = "SGD" in optimizer or optimizer == "capturable Adam"
    same(model, expected[0], 0.0 if is_exact else 2**-9 if kind == "float16" else 2**-16)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", ["fused SGD", "capturable Adam"])
def test_replays_without_scaling_equal_the_eager_loop(graphs, optimizer, max_grad_norm):
    def made():
        torch.manual_seed(0)
        model = fxamp.convert(
            torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)), "bf16"
        )
        return model, OPTIMIZERS[optimizer](model.parameters()), fxamp.scaler_for("bf16")

    model, built, scaler = made()
    step = graphs.step_for(model, loss_fn, built, scaler, max_grad_norm=max_grad_norm)
    results = []
    for batch in batches(10):
        step(*batch)
        results.append(step.last_result)
    expected = made()
    eager_loop(*expected, batches(10), max_grad_norm)
    assert step.is_graphed and graphs.captures == 1
    assert not any(result.skipped for result in results)
    if max_grad_norm is not None:
        assert len({result.grad_norm for result in results}) == 10
    same(model, expected[0])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", ["bert", "transformer", "unet", "ncf", "big_lstm", "jasper"])
def test_steps_of_real_architectures_are_recorded(graphs, name, level):
    """No op of a converted step reads the device or brings numbers from the host."""
    zoo = importlib.import_module(f"tests.zoo.{name}")
    torch.manual_seed(1)
    call = zoo.inputs()

    def made():
        torch.manual_seed(0)
        model = zoo.make()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=True)
        options = {"opt_level": level, "verbosity": 0, "dtype": torch.float16, "example_inputs": call}
        return *fxamp.initialize(model, optimizer, **options), LossScaler()

    model, optimizer, scaler = made()
    step = graphs.step_for(model, lambda outputs, _: loss_of(outputs), optimizer, scaler)
    torch.manual_seed(2)
    losses = [step(call, torch.zeros(())) for _ in range(WARM_UP + 4)]
    other, its_optimizer, its_scaler = made()
    torch.manual_seed(2)
    for loss in losses:
        its_optimizer.zero_grad()
        expected = loss_of(other(*call))
        its_scaler.scale(expected).backward()
        its_scaler.step(its_optimizer)
        its_scaler.update()
        torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert step.is_graphed and graphs.captures == 1
    assert scaler.state_dict() == its_scaler.state_dict()
    same(model, other)
    for mine, theirs in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_is_kept_from_call_to_call_sees_replays(graphs):
    """A replay runs no Python, and a fused optimizer leaves no trace in a tensor."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    frozen = fxamp.convert(model, dtype=torch.float16)
    data = list(batches(WARM_UP + 3))
    step = graphs.step_for(frozen, loss_fn, torch.optim.AdamW(frozen.parameters(), 0.5, fused=True), LossScaler(2.0))
    for batch in data[:-1]:
        step(*batch)
    frozen.freeze()
    with torch.no_grad():
        before = frozen(data[0][0])
        step(*data[-1])
        after = frozen(data[0][0])
        expected = fxamp.convert(copy.deepcopy(model), dtype=torch.float16)(data[0][0])
    assert graphs.captures == 1 and not torch.equal(before, after)
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


class WithoutRate(torch.optim.Optimizer):
    """As Adafactor of transformers by default: the group's rate is None."""

    def __init__(self, params):
        super().__init__(params, {"lr": None, "factor": 0.125})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["factor"])


@pytest.mark.parametrize("kind", ["without a rate", "with an empty group"])
def test_groups_need_neither_a_rate_nor_parameters(graphs, kind):
    results = []
    for graphed in (False, True):
        model, _, scaler = pieces()
        if kind == "without a rate":
            made = WithoutRate(model.parameters())
        else:
            groups = [{"params": []}, {"params": list(model.parameters())}]
            made = torch.optim.AdamW(groups, 0.0625, fused=True)
        step, data = graphs.step_for(model, loss_fn, made, scaler), list(batches(WARM_UP + 3))
        losses = [float(step(*batch)) for batch in data] if graphed else eager_loop(model, made, scaler, data)
        results.append([torch.tensor(losses), *model.parameters()])
    assert graphs.captures == 1
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_optimizer_that_cannot_read_its_rate_from_the_device_is_captured_anew(graphs, caplog):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = graphs.step_for(model, loss_fn, optimizer, LossScaler(), max_graphs=2)
    for batch in batches(WARM_UP + 2):
        step(*batch)
    for rate in (0.05, 0.04, 0.03):
        optimizer.param_groups[0]["lr"] = rate
        step(*next(batches(1)))
    assert graphs.captures == 2
    told = [record.message for record in caplog.records if "2 graphs" in record.message]
    assert len(told) == 1 and "What changes: lr. The optimizer reads its learning rate on the host" in told[0]


def test_hyper_parameters_that_change_at_each_step_are_named(graphs, caplog):
    """OneCycleLR moves the betas too."""
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler, max_graphs=2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    for batch in batches(WARM_UP + 4):
        step(*batch)
        scheduler.step()
    told = [record.message for record in caplog.records if "2 graphs" in record.message]
    assert graphs.captures == 2 and len(told) == 1 and told[0].endswith("What changes: betas.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimizer", ["fused AdamW", "capturable Adam"])
def test_a_loaded_optimizer_is_captured_anew(graphs, dtype, optimizer):
    """A load replaces the state's tensors; a graph would go on with the old ones."""

    def trained(count, step_of):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(dtype)
        built = OPTIMIZERS[optimizer](model.parameters())
        built = MasterWeightOptimizer(built) if dtype != torch.float32 else built
        step = step_of(model, built)
        for number, batch in enumerate(batches(count, dtype=dtype)):
            if number == WARM_UP + 2:
                states = copy.deepcopy((model.state_dict(), built.state_dict()))
            if number == WARM_UP + 5:
                model.load_state_dict(states[0])
                built.load_state_dict(states[1])
            step(*batch)
        return model, built, step

    def eager(model, built):
        return lambda x, t: eager_loop(model, built, LossScaler(8.0), [(x, t)])

    model, built, step = trained(2 * WARM_UP + 9, lambda model, built: graphs.step_for(model, loss_fn, built))
    expected, other, _ = trained(2 * WARM_UP + 9, eager)
    assert step.is_graphed and graphs.captures == 2
    same(model, expected)
    for mine, theirs in zip(built.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_model_whose_memory_was_replaced_is_captured_anew(graphs):
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    data = list(batches(2 * WARM_UP + 4))
    for batch in data[: WARM_UP + 2]:
        step(*batch)
    model[0].weight.data = model[0].weight.data.clone()
    for batch in data[WARM_UP + 2 :]:
        step(*batch)
    expected = pieces()
    eager_loop(*expected, data)
    assert graphs.captures == 2
    same(model, expected[0], 2**-20)


def freeze(model, optimizer):
    model[0].requires_grad_(False)


def thaw(model, optimizer):
    model[2].requires_grad_(True)


def add_group(model, optimizer):
    weight = torch.nn.Parameter(torch.ones(2))
    model.register_forward_hook(lambda module, args, outputs: outputs * weight)
    model.register_parameter("factor", weight)
    optimizer.add_param_group({"params": [weight]})


def fix_statistics(model, optimizer):
    model[1].eval()


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("change", [freeze, thaw, add_group, fix_statistics])
def test_what_is_trained_may_change_between_replays(graphs, change, masters):
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
        model[2].requires_grad_(change is not thaw)
        made, scaler = torch.optim.AdamW(model.parameters(), 0.0625, fused=True), LossScaler(2.0**10)
        if masters:
            model.bfloat16()
            made = MasterWeightOptimizer(made)
        step = graphs.step_for(model, loss_fn, made, scaler) if graphed else None
        losses = []
        for number, batch in enumerate(batches(2 * WARM_UP + 6, dtype=model[0].weight.dtype)):
            if number == WARM_UP + 2:
                change(model, made)
            losses += [float(step(*batch))] if graphed else eager_loop(model, made, scaler, [batch])
        results.append([torch.tensor(losses), *model.state_dict().values()])
    assert graphs.captures == 2
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_step_that_waits_for_the_device_is_never_recorded(graphs, caplog):
    model, optimizer, scaler = pieces()

    def logging_loss(outputs, targets):
        loss = loss_fn(outputs, targets)
        loss.item()
        return loss

    step = graphs.step_for(model, logging_loss, optimizer, scaler)
    losses = [float(step(*batch)) for batch in batches(WARM_UP + 3)]
    expected = pieces()
    assert losses == pytest.approx(eager_loop(*expected, batches(WARM_UP + 3)), rel=0)
    assert graphs.captures == 0 and "each step waits for the device" in step.why_eager
    assert len([record for record in caplog.records if "runs eagerly" in record.message]) == 1


def test_steps_that_wait_now_and_then_are_warmed_up_for_longer(graphs):
    model, optimizer, scaler = pieces()
    waits = iter([True, False] * WARM_UP)

    def loss(outputs, targets):
        found = loss_fn(outputs, targets)
        if next(waits, False):
            found.item()
        return found

    step = graphs.step_for(model, loss, optimizer, scaler)
    for batch in batches(2 * WARM_UP + 1):
        step(*batch)
    assert step.is_graphed and graphs.captures == 1


def test_weights_that_were_loaded_are_not_looked_at_while_recording(graphs, monkeypatch):
    """A layer scale's numbers decide about a graph, and are read where a state was loaded."""
    fit_in, looked = weight_fits.fit_in, []

    def look(*given):
        looked.append(recorded.is_capturing(torch.device("cpu")))
        return fit_in(*given)

    monkeypatch.setattr(weight_fits, "fit_in", look)

    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.gamma = torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return super().forward(x) * self.gamma

    model = fxamp.convert(Scaled(), dtype=torch.float16)
    step = graphs.step_for(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, fused=True), LossScaler(8.0))
    for number, batch in enumerate(batches(WARM_UP + 2)):
        if number == WARM_UP:
            looked.clear()  # what was looked at when the graph was made
            model.load_state_dict(model.state_dict())
        step(*batch)
    model(next(batches(1))[0])
    assert step.is_graphed and graphs.captures == 1 and looked == [False]  # in the last call


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adam, torch.optim.RAdam])
def test_numbers_that_an_optimizer_keeps_on_the_host_go_to_the_device(kind):
    """All of them: where one stays behind, torch refuses every later step, recorded or not."""
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = kind([parameter], 0.1, foreach=False)
    optimizer.step()
    make_capturable(optimizer)
    assert optimizer.param_groups[0]["capturable"]
    assert {(value.device.type, value.dtype) for value in optimizer.state[parameter].values()} == {
        ("meta", torch.float32)
    }


def test_rates_are_float32_whatever_the_default(graphs):
    """Fused kernels read nothing else."""
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    torch.set_default_dtype(torch.float64)
    try:
        for x, targets in batches(WARM_UP + 1):
            step(x.float(), targets.float())
    finally:
        torch.set_default_dtype(torch.float32)
    assert step.is_graphed and step._rates.tensors[0].dtype == torch.float32


def test_while_capturing_rates_are_device_tensors(graphs, monkeypatch):
    model, optimizer, scaler = pieces()
    seen = []

    record = graphs.record

    def looking(step):
        seen.append(optimizer.param_groups[0]["lr"])
        return record(step)

    monkeypatch.setattr(graphs, "record", looking)
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    for batch in batches(WARM_UP + 1):
        step(*batch)
    assert seen == [step._rates.tensors[0]] and isinstance(seen[0], torch.Tensor)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(("fused", "recaptures"), [(False, True), (True, False)])
def test_a_rate_in_a_tensor_on_the_host_is_read_while_capturing(graphs, fused, recaptures):
    """On a GPU, too: `alpha=-lr` of a tensor on the CPU waits for nothing, and the graph has its number for good."""
    model, rate = torch.nn.Linear(4, 2), torch.tensor(0.5)
    step = graphs.step_for(model, loss_fn, torch.optim.SGD(model.parameters(), rate, fused=fused), LossScaler())
    before = step._key([], None)
    rate.mul_(0.5)  # as schedulers do
    assert (step._key([], None) != before) == recaptures


@cuda
def test_a_schedule_of_a_rate_in_a_tensor_on_the_host():
    results = []
    for is_eager in (True, False):
        model, _, scaler = pieces("cuda")
        rate = torch.tensor(0.5)
        step = GraphedStep(model, loss_fn, torch.optim.SGD(model.parameters(), rate), scaler)
        step._why_eager = "the test compares" if is_eager else None
        for batch in batches(WARM_UP + 4, "cuda"):
            step(*batch)
            rate.mul_(0.5)
        results.append(list(model.parameters()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


class Penalised(torch.nn.Sequential):
    """A critic whose loss has the gradient of its outputs by its inputs in it."""

    def forward(self, x):
        outputs = super().forward(x)
        return outputs + torch.autograd.grad(outputs.sum(), x, create_graph=True)[0].norm()


def test_inputs_that_require_gradients_are_not_kept(graphs):
    """A replay takes their numbers; a history that led to them would hold the inputs of every step."""
    results, seen = [], []
    for graphed in (False, True):
        plain, _, scaler = pieces()
        model = Penalised(*plain)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
        step, losses = graphs.step_for(model, loss_fn, optimizer, scaler), []
        for inputs, targets in batches(WARM_UP + 6):
            given = inputs.requires_grad_()
            seen.append(weakref.ref(given))
            losses += [step(given, targets)] if graphed else eager_loop(model, optimizer, scaler, [(given, targets)])
        results.append([*map(float, losses), *model.parameters()])
    del given, inputs
    gc.collect()
    assert graphs.captures == 1 and not [reference for reference in seen if reference() is not None]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_graph_is_for_inputs_that_require_gradients_or_for_those_that_do_not(graphs):
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    for number, (inputs, targets) in enumerate(batches(WARM_UP + 4)):
        step(inputs.requires_grad_(number % 2 == 0), targets)
    assert graphs.captures == 2


def test_new_shapes_modes_and_settings_recapture_up_to_the_bound(graphs, caplog):
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler, max_graphs=3)
    for batch in batches(WARM_UP + 2):
        step(*batch)
    assert graphs.captures == 1
    optimizer.param_groups[0]["weight_decay"] = 0.5
    step(*next(batches(1)))
    model.eval()
    step(*next(batches(1)))
    assert graphs.captures == 3
    with caplog.at_level(logging.INFO, "fxamp"):
        step(torch.randn(3, 4), torch.randn(3, 2))
    assert graphs.captures == 3 and "3 graphs; what needs another one runs eagerly." in caplog.text


def test_failed_capture_falls_back_and_says_why_once(graphs, monkeypatch, caplog):
    def fails(step):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record", fails)
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    losses = [float(step(*batch)) for batch in batches(WARM_UP + 3)]
    assert not step.is_graphed
    assert len([r for r in caplog.records if "capture failed: operation not permitted" in r.message]) == 1
    expected = pieces()
    assert losses == pytest.approx(eager_loop(*expected, batches(WARM_UP + 3)), rel=2**-20)


@pytest.mark.parametrize("masters", [False, True])
def test_a_capture_that_fails_leaves_the_optimizer_as_it_was(graphs, masters):
    """Tensors that a recorded step puts into the state hold nothing: it was not run."""
    results = []
    for graphed in (False, True):
        model, _, scaler = pieces(dtype=torch.bfloat16 if masters else torch.float32)
        made = ThirdParty(model.parameters(), 0.125)
        made.state["history"] = [1.0]
        made = MasterWeightOptimizer(made) if masters else made
        step = graphs.step_for(model, loss_fn, made, scaler)
        data = list(batches(WARM_UP + 4, dtype=model[0].weight.dtype))
        losses = [float(step(*batch)) for batch in data] if graphed else eager_loop(model, made, scaler, data)
        results.append([torch.tensor(losses), *model.parameters(), *made.state_dict()["state"].values()])
    assert graphs.captures == 1 and "keeps state on the host" in step.why_eager
    torch.testing.assert_close(*results, rtol=0, atol=0)


class Replaces(torch.optim.Optimizer):
    """Puts new tensors, or numbers, in the place of those that were there."""

    def __init__(self, params, what):
        super().__init__(params, {"lr": 0.125, "what": what})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state, factor = self.state[parameter], 1.0
                if group["what"] == "state":
                    state["average"] = 0.5 * state.get("average", torch.zeros_like(parameter)) + parameter.grad
                elif group["what"] == "nested":
                    inner = state.setdefault("inner", {"average": torch.zeros_like(parameter)})
                    inner["average"] = state["average"] = 0.5 * inner["average"] + parameter.grad
                elif group["what"] == "count":
                    state["count"] = state.get("count", 0) + 1
                    factor = 1 / state["count"]
                update = state.get("average", parameter.grad) * (factor * group["lr"])
                if group["what"] == "data":
                    parameter.data = parameter.data - update
                else:
                    parameter.sub_(update)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("what", ["state", "nested", "count", "data"])
def test_what_a_step_replaces_cannot_be_recorded(graphs, what, scales):
    """A replay reads, and writes, the memory that there was while recording."""
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = pieces()[0]
        made, scaler = Replaces(model.parameters(), what), LossScaler(2.0**10, enabled=scales)
        step, data = graphs.step_for(model, loss_fn, made, scaler), list(batches(WARM_UP + 4))
        losses = [float(step(*batch)) for batch in data] if graphed else eager_loop(model, made, scaler, data)
        results.append([torch.tensor(losses), *model.state_dict().values()])
    assert graphs.captures == 1 and "capture failed" in step.why_eager
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_state_loaded_between_replays_is_read_by_the_next(graphs):
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    data = list(batches(WARM_UP + 2))
    for batch in data[:-1]:
        step(*batch)
    held = scaler._scale  # where a CUDA graph reads
    scaler.load_state_dict(LossScaler(2.0**5).state_dict())
    step(*data[-1])
    assert graphs.captures == 1 and scaler._scale is held and held.item() == 2.0**5
    scaler.set_growth_interval(2)  # a number in the graph's own code
    step(*data[-1])
    assert graphs.captures == 2 and held.item() == 2.0**6


def test_a_batch_that_is_not_on_the_gpu_after_the_first_step_is_told_of_once(caplog):
    model, optimizer, scaler = pieces()
    step = GraphedStep(model, loss_fn, optimizer, scaler)
    step._why_eager, step._warm_steps = None, 1  # one step on the GPU
    with caplog.at_level(logging.INFO, "fxamp"):
        for batch in batches(2):
            step(*batch)
    told = [record.message for record in caplog.records]
    assert told == ["GraphedStep runs eagerly: a batch is not on a CUDA device"]


def test_collapse_is_raised_from_a_replay(graphs):
    model, optimizer, _ = pieces()
    scaler = LossScaler(2.0**-14, max_skips=2)
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    with pytest.raises(RuntimeError, match=r"sat at its floor.*non-finite gradients: 0\.weight, 0\.bias, 2"):
        for batch in batches(WARM_UP + 3, bad=range(WARM_UP, 20)):
            step(*batch)
    assert graphs.captures == 1


@pytest.mark.parametrize("kind", [tuple, dict])
def test_inputs_may_be_arguments_or_keywords(kind):
    class Two(torch.nn.Linear):
        def forward(self, a, b):
            return super().forward(a * b)

    model = Two(2, 1)
    step = GraphedStep(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1))
    inputs = (torch.ones(1, 2), torch.ones(1, 2)) if kind is tuple else {"a": torch.ones(1, 2), "b": torch.ones(1, 2)}
    before = model.weight.clone()
    step(inputs, torch.zeros(1, 1))
    assert not torch.equal(model.weight, before)


def test_torchs_scaler_is_refused_with_the_way_out():
    with pytest.raises(OptionError, match=r"GradScaler, whose step reads.*load_state_dict"):
        GraphedStep(torch.nn.Linear(1, 1), loss_fn, None, torch.amp.GradScaler("cpu"))


@cuda
@pytest.mark.gpu
def test_on_a_gpu_a_capture_that_fails_leaves_random_numbers_usable():
    model, optimizer, scaler = pieces("cuda")
    model.append(torch.nn.Dropout(0.5))

    def loss(outputs, targets):
        found = loss_fn(outputs, targets)
        if torch.cuda.is_current_stream_capturing():
            found.item()
        return found

    step = GraphedStep(model, loss, optimizer, scaler)
    for batch in batches(WARM_UP + 3, "cuda"):
        step(*batch)
    torch.cuda.empty_cache()  # which fails where the allocator takes a recording to be under way
    assert "capture failed" in step.why_eager


@cuda
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_replays_equal_the_eager_loop(dtype):
    model, optimizer, scaler = pieces("cuda", dtype)
    step = GraphedStep(model, loss_fn, optimizer, scaler)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in list(batches(10, "cuda", dtype, bad=(1, 5))):
            step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = pieces("cuda", dtype)
    eager_loop(*expected, batches(10, "cuda", dtype, bad=(1, 5)))
    assert step.is_graphed and scaler.state_dict() == expected[2].state_dict()
    for mine, other in zip(model.parameters(), expected[0].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2**-10, atol=2**-12)


def changing(device, make):
    """A rate that changes at each step, and now and then a smaller batch: our model and the eager loop's."""
    data = [(x[:3], y[:3]) if number in (6, 9, 10) else (x, y) for number, (x, y) in enumerate(batches(14, device))]
    model, optimizer, scaler = pieces(device)
    step = make(model, loss_fn, optimizer, scaler)
    for number, batch in enumerate(data):
        optimizer.param_groups[0]["lr"] = 0.05 / (number + 1)
        step(*batch)
    expected = pieces(device)
    eager_loop(*expected, data, rate_of=lambda number: 0.05 / (number + 1))
    return step, model, expected[0]


def test_rates_and_shapes_may_change_from_step_to_step(graphs):
    step, model, expected = changing("cpu", graphs.step_for)
    assert step.is_graphed and graphs.captures == 2
    same(model, expected, rtol=1e-6)


@cuda
@pytest.mark.gpu
def test_on_a_gpu_rates_and_shapes_may_change_from_step_to_step():
    step, model, expected = changing("cuda", GraphedStep)
    assert step.is_graphed
    same(model, expected, rtol=2**-10)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": 5}, r"model is a int.*order is GraphedStep\(model, loss_fn, optimizer, scaler\)"),
        ({"loss_fn": 5}, "loss_fn is a int, which cannot be called"),
        ({"optimizer": torch.nn.Linear(1, 1)}, "optimizer is a Linear, not an optimizer"),
        ({"scaler": 5}, "scaler is a int, not a fxamp.LossScaler"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1'"),
        ({"max_graphs": -1}, "max_graphs=-1"),
        ({"max_graphs": "x"}, "max_graphs='x'"),
    ],
)
def test_arguments_of_another_kind_are_refused(changes, text):
    model, optimizer, scaler = pieces()
    given = {"model": model, "loss_fn": loss_fn, "optimizer": optimizer, "scaler": scaler, **changes}
    with pytest.raises(OptionError, match=text):
        GraphedStep(**given)


def test_swapped_arguments_are_refused():
    model, optimizer, scaler = pieces()
    with pytest.raises(OptionError, match=r"loss_fn is a AdamW.*The order is"):
        GraphedStep(model, optimizer, loss_fn, scaler)


def test_a_scale_that_may_be_below_one_has_a_graph_of_its_own(graphs):
    """There the unscaled gradients are looked at too, which other graphs do not."""
    model, optimizer, scaler = pieces()
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    for batch in batches(6):
        step(*batch)
    assert len(step._graphs) == 1
    scaler.update(0.25)
    for batch in batches(2):
        step(*batch)
    assert len(step._graphs) == 2


class Reads(torch.nn.Module):
    """A model that reads a number and a flag, and may count."""

    def __init__(self, counts=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.alpha, self.doubles = torch.nn.Linear(4, 2), 1.0, False
        self.counts, self.steps = counts, 0

    def forward(self, x):
        if self.counts:
            self.steps += 1
        return self.layer(x) * self.alpha * (2.0 if self.doubles else 1.0) * (1 + self.steps)


def changed_at(model, number):
    """What a training loop does to its model before a step."""
    if number == WARM_UP + 2:
        model.alpha = 0.5
    if number == WARM_UP + 4:
        model.doubles = True
    if number == WARM_UP + 6:
        model.alpha, model.doubles = 1.0, False


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_converted_model_reads_of_python_is_asked_before_a_replay(graphs, level):
    results = []
    for graphed in (False, True):
        model = fxamp.convert(Reads(), opt_level=level)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        optimizer = MasterWeightOptimizer(optimizer) if level == "O2" else optimizer
        scaler = LossScaler(2.0**10)
        step = graphs.step_for(model, loss_fn, optimizer, scaler)
        losses = []
        for number, batch in enumerate(batches(WARM_UP + 8)):
            changed_at(model, number)
            losses += [float(step(*batch))] if graphed else eager_loop(model, optimizer, scaler, [batch])
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=2**-20)
    assert graphs.captures == 3 and step.is_graphed  # the last change is back to the first graph


def test_a_number_that_anneals_at_each_step_ends_in_eager_steps(graphs, caplog):
    model, others = (fxamp.convert(Reads()) for _ in range(2))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1, fused=True), LossScaler(2.0**10)
    expected = torch.optim.SGD(others.parameters(), 0.1, fused=True), LossScaler(2.0**10)
    step = graphs.step_for(model, loss_fn, optimizer, scaler, max_graphs=3)
    for number, batch in enumerate(batches(WARM_UP + 6)):
        model.alpha = others.alpha = 1.0 + 0.1 * number
        loss = float(step(*batch))
        assert [loss] == pytest.approx(eager_loop(others, *expected, [batch]), rel=2**-20)
    assert graphs.captures == 3 and "What changes: what the model reads of Python." in caplog.text


@pytest.mark.parametrize("convert", [lambda model: model, fxamp.convert])
def test_a_model_that_counts_on_the_host_is_not_replayed(graphs, convert):
    results = []
    for graphed in (False, True):
        model = convert(Reads(counts=True))
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.001, fused=True), LossScaler(2.0**10)
        step, data = graphs.step_for(model, loss_fn, optimizer, scaler), list(batches(WARM_UP + 4))
        losses = [float(step(*batch)) for batch in data] if graphed else eager_loop(model, optimizer, scaler, data)
        results.append([*losses, model.steps])
    assert results[1] == pytest.approx(results[0], rel=2**-20)
    assert "a step sets Reads.steps" in step.why_eager


def test_what_a_failed_recording_sets_is_put_back(graphs):
    class Names(Reads):
        def forward(self, x):
            self.last = float(x.shape[0])
            self.steps = self.steps + 1 if hasattr(self, "first") else 0
            return self.layer(x)

    model = Names()
    step = graphs.step_for(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1, fused=True))
    for batch in batches(WARM_UP):
        step(*batch)
    model.first = True
    for batch in batches(3):
        step(*batch)
    assert model.steps == 3 and model.last == 6.0 and not step.is_graphed


def test_a_number_that_is_none_does_not_change(graphs):
    model, optimizer, scaler = pieces()
    model.last, model.best = math.nan, -math.inf
    step = graphs.step_for(model, loss_fn, optimizer, scaler)
    for batch in batches(WARM_UP + 2):
        step(*batch)
    assert graphs.captures == 1 and step.is_graphed
