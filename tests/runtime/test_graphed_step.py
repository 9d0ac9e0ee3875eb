"""GraphedStep equals the eager loop; the graph itself is replaced by a recorder where there is no GPU."""

import logging
import math

import pytest
import torch

from fxamp.errors import OptionError
from fxamp.runtime import graphed_step
from fxamp.runtime.graphed_step import WARM_UP, GraphedStep
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

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


class Recorder:
    """Stands for a CUDA graph: "captures" a step without leaving a trace of it, replays it on its buffers."""

    def __init__(self, monkeypatch):
        self.captures = 0
        monkeypatch.setattr(graphed_step, "_record", self.record)

    def record(self, step, static):
        self.captures += 1
        graph = graphed_step._Graph(lambda: None, static, torch.zeros(()), None)

        def replay():
            self.step.optimizer.zero_grad()
            self.rates = [float(rate) for rate in self.step._rates]
            watched, self.step.scaler.watch.observe = self.step.scaler.watch.observe, lambda copies: None
            graph.loss, graph.result = step()
            self.step.scaler.watch.observe = watched

        graph.replay = replay
        return graph

    def step_for(self, *args, **options):
        self.step = GraphedStep(*args, **options)
        self.step._why_eager = None
        self.step._notice = lambda leaves: None
        return self.step


@pytest.fixture
def recorder(monkeypatch):
    return Recorder(monkeypatch)


def same(ours, theirs):
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_equal_the_eager_loop_with_skips_and_new_rates(recorder, dtype):
    model, optimizer, scaler = pieces(dtype=dtype)
    step = recorder.step_for(model, loss_fn, optimizer, scaler)
    bad, skipped = (1, 5), []
    for number, batch in enumerate(batches(10, dtype=dtype, bad=bad)):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)
        step(*batch)
        skipped.append(step.last_result.skipped)
    expected = pieces(dtype=dtype)
    eager_loop(*expected, batches(10, dtype=dtype, bad=bad), rate_of=lambda number: 0.05 / (1 + number))
    same(model, expected[0])
    assert skipped == [number in bad for number in range(10)]
    assert recorder.captures == 1
    assert scaler.state_dict() == expected[2].state_dict()
    assert scaler.skipped_steps == 2


def test_schedulers_reach_the_graph(recorder):
    model, optimizer, scaler = pieces()
    step = recorder.step_for(model, loss_fn, optimizer, scaler)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number, batch in enumerate(batches(WARM_UP + 3)):
        step(*batch)
        scheduler.step()
        if recorder.captures:
            assert recorder.rates == [pytest.approx(0.05 * 0.5**number)]
    assert isinstance(optimizer.param_groups[0]["lr"], float)
    assert (recorder.captures, number) == (1, WARM_UP + 2)


def test_optimizer_that_cannot_read_its_rate_from_the_device_is_captured_anew(recorder):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = recorder.step_for(model, loss_fn, optimizer, LossScaler())
    for batch in batches(WARM_UP + 2):
        step(*batch)
    optimizer.param_groups[0]["lr"] = 0.05
    step(*next(batches(1)))
    assert recorder.captures == 2


def test_while_capturing_rates_are_device_tensors(recorder, monkeypatch):
    model, optimizer, scaler = pieces()
    seen = []

    def record(step, static):
        seen.append(optimizer.param_groups[0]["lr"])
        return recorder.record(step, static)

    monkeypatch.setattr(graphed_step, "_record", record)
    step = recorder.step_for(model, loss_fn, optimizer, scaler)
    for batch in batches(WARM_UP + 1):
        step(*batch)
    assert seen == [step._rates[0]] and isinstance(seen[0], torch.Tensor)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_new_shapes_modes_and_settings_recapture_up_to_the_bound(recorder, caplog):
    model, optimizer, scaler = pieces()
    step = recorder.step_for(model, loss_fn, optimizer, scaler, max_graphs=3)
    for batch in batches(WARM_UP + 2):
        step(*batch)
    assert recorder.captures == 1
    optimizer.param_groups[0]["weight_decay"] = 0.5
    step(*next(batches(1)))
    model.eval()
    step(*next(batches(1)))
    assert recorder.captures == 3
    with caplog.at_level(logging.INFO, "fxamp"):
        step(torch.randn(3, 4), torch.randn(3, 2))
    assert recorder.captures == 3 and "3 graphs; further shapes run eagerly" in caplog.text


def test_failed_capture_falls_back_and_says_why_once(recorder, monkeypatch, caplog):
    def fails(step, static):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed_step, "_record", fails)
    model, optimizer, scaler = pieces()
    step = recorder.step_for(model, loss_fn, optimizer, scaler)
    losses = [float(step(*batch)) for batch in batches(WARM_UP + 3)]
    assert not step.is_graphed
    assert len([r for r in caplog.records if "capture failed: operation not permitted" in r.message]) == 1
    expected = pieces()
    assert losses == pytest.approx(eager_loop(*expected, batches(WARM_UP + 3)), rel=2**-20)


def test_a_state_loaded_between_replays_is_read_by_the_next(recorder):
    model, optimizer, scaler = pieces()
    step = recorder.step_for(model, loss_fn, optimizer, scaler)
    data = list(batches(WARM_UP + 2))
    for batch in data[:-1]:
        step(*batch)
    held = scaler._scale  # where a CUDA graph reads
    scaler.load_state_dict(LossScaler(2.0**5).state_dict())
    step(*data[-1])
    assert recorder.captures == 1 and scaler._scale is held and held.item() == 2.0**5
    scaler.set_growth_interval(2)  # a number in the graph's own code
    step(*data[-1])
    assert recorder.captures == 2 and held.item() == 2.0**6


def test_a_batch_that_is_not_on_the_gpu_after_the_first_step_is_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model, optimizer, scaler = pieces()
    step = GraphedStep(model, loss_fn, optimizer, scaler)
    step._eager_steps = 1  # one step on the GPU
    with caplog.at_level(logging.INFO, "fxamp"):
        for batch in batches(2):
            step(*batch)
    told = [record.message for record in caplog.records]
    assert told == ["GraphedStep runs eagerly: a batch is not on a CUDA device"]


def test_collapse_is_raised_from_a_replay(recorder):
    model, optimizer, _ = pieces()
    scaler = LossScaler(2.0**-14, max_skips=WARM_UP + 2)
    step = recorder.step_for(model, loss_fn, optimizer, scaler)
    with pytest.raises(RuntimeError, match="sat at its floor"):
        for batch in batches(WARM_UP + 3, bad=range(20)):
            step(*batch)


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
