"""The scale's rule against Megatron's, apex's and DeepSpeed's published algorithms; choose_scale."""

import itertools
import random

import pytest
import torch

from fxamp.errors import OptionError
from fxamp.runtime.fixed_scalers import StaticLossScaler
from fxamp.runtime.scale_rule import ScaleRule, choose_scale
from fxamp.runtime.scaler import LossScaler


class Megatron:
    """Megatron-Core's DynamicGradScaler (megatron/core/optimizer/grad_scaler.py)."""

    def __init__(self, scale, interval, hysteresis, min_scale):
        self.scale, self.min_scale, self.interval, self.hysteresis = scale, min_scale, interval, hysteresis
        self.tracker, self.left = 0, hysteresis

    def update(self, bad):
        if bad:
            self.tracker = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale * 0.5, self.min_scale)
        else:
            self.tracker += 1
            if self.tracker == self.interval:
                self.tracker, self.left = 0, self.hysteresis
                self.scale *= 2.0


class ApexKernel(Megatron):
    """apex's csrc/update_scale_hysteresis.cu."""

    def update(self, bad):
        if bad:
            self.left -= 1
            if self.left > 0:
                self.tracker = 0
                return
            self.scale, self.tracker = self.scale * 0.5, 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            self.scale, self.tracker = self.scale * 2.0, 0
        self.left = self.hysteresis


class DeepSpeed:
    """DeepSpeed's DynamicLossScaler (deepspeed/runtime/fp16/loss_scaler.py)."""

    def __init__(self, scale, window, hysteresis, min_scale, consecutive):
        self.scale, self.window, self.hysteresis, self.min_scale = scale, window, hysteresis, min_scale
        self.consecutive, self.left, self.now, self.last = consecutive, hysteresis, 0, -1

    def update(self, bad):
        if bad:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.min_scale)
            else:
                self.left -= 1
            self.last = self.now
        else:
            if self.consecutive:
                self.left = self.hysteresis
            stable = self.now - self.last - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.left = self.hysteresis
                self.scale *= 2
        self.now += 1


class Ours:
    def __init__(self, scale, **options):
        self.rule = ScaleRule(**options)
        tracker = torch.tensor(LossScaler(refill=self.rule.refill)._init_growth_tracker, dtype=torch.int32)
        self.tensors = (torch.tensor(scale), tracker)
        self.left = torch.tensor(self.rule.hysteresis, dtype=torch.int32)

    def update(self, bad):
        self.rule.advance_(*self.tensors, self.left, torch.tensor(float(bad)))

    @property
    def scale(self):
        return float(self.tensors[0])

    @property
    def tracker(self):
        return int(self.tensors[1])


def histories(count, length):
    for seed in range(count):
        rng = random.Random(seed)
        rate = rng.choice((0.1, 0.4, 0.7))
        yield [rng.random() < rate for _ in range(length)], rng


@pytest.mark.parametrize("refill", ["growth", "good_step"])
def test_hysteresis_equals_megatron_and_apex(refill):
    oracle_class = Megatron if refill == "growth" else ApexKernel
    for history, rng in histories(100, 40):
        interval, hysteresis = rng.choice((1, 2, 3, 5)), rng.choice((2, 3, 4))
        floor = 1.0 if refill == "growth" else 2.0**-100  # apex's kernel has no minimum
        ours = Ours(
            64.0,
            growth_interval=interval,
            hysteresis=hysteresis,
            refill=refill,
            min_scale=floor,
            max_scale=2.0**100,
        )
        oracle = oracle_class(64.0, interval, hysteresis, floor)
        for bad in history:
            ours.update(bad)
            oracle.update(bad)
            assert (ours.scale, ours.tracker) == (oracle.scale, oracle.tracker)


@pytest.mark.parametrize("refill", ["deepspeed", "deepspeed_consecutive"])
def test_deepspeeds_rule_is_reproduced(refill):
    for history, rng in histories(250, 120):
        window, hysteresis = rng.randint(1, 5), rng.randint(1, 4)
        options = {"growth_interval": window, "hysteresis": hysteresis, "refill": refill}
        ours = Ours(2.0**20, **options, min_scale=1.0, max_scale=2.0**127)
        oracle = DeepSpeed(2.0**20, window, hysteresis, 1.0, consecutive=refill == "deepspeed_consecutive")
        for number, bad in enumerate(history):
            ours.update(bad)
            oracle.update(bad)
            if oracle.scale > 2.0**100:
                break
            assert ours.scale == oracle.scale, (number, window, hysteresis, history)


@pytest.mark.parametrize(("refill", "consecutive"), [("deepspeed", False), ("deepspeed_consecutive", True)])
def test_deepspeeds_rule_for_every_history_of_nine_updates(refill, consecutive):
    for history in itertools.product((False, True), repeat=9):
        ours = Ours(2.0**10, hysteresis=2, refill=refill, growth_interval=3)
        oracle = DeepSpeed(2.0**10, 3, 2, 2.0**-14, consecutive)
        for bad in history:
            ours.update(bad)
            oracle.update(bad)
            assert ours.scale == oracle.scale, history


@pytest.mark.parametrize("updates", [2, 3])
def test_a_scaler_with_deepspeeds_rule_begins_and_resumes_as_deepspeed(updates):
    """A window of 2 is full after 3 good updates, saved and loaded in between or not."""
    scaler, weight = LossScaler(8.0, growth_interval=2, refill="deepspeed"), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], 0.0)
    for _ in range(updates):
        resumed = LossScaler()
        resumed.load_state_dict(scaler.state_dict())
        scaler = resumed
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (16.0 if updates == 3 else 8.0)


@pytest.mark.parametrize("scale", [2.0**-128, 2.0**-149, 1e-300, 1e39])
def test_scales_without_a_reciprocal_in_float32_are_refused(scale):
    """Their inverse is infinite, and would be written into parameters at the first finite step."""
    bound = "min_scale" if scale < 1 else "max_scale"
    with pytest.raises(OptionError, match=rf"{bound}=.*2\*\*-127"):
        ScaleRule(**{bound: scale})
    with pytest.raises(OptionError, match=r"scale=.*2\*\*-127"):
        StaticLossScaler(scale)
    state = {**torch.amp.GradScaler("cpu").state_dict(), "scale": scale}
    with pytest.raises(OptionError, match=r"scale=.*2\*\*-127"):
        LossScaler().load_state_dict(state)


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**126, 2.0**127])
def test_the_outermost_scales_work(scale):
    weight, scaler = torch.nn.Parameter(torch.ones(1)), StaticLossScaler(scale)
    scaler.scale((weight * 1.0).sum()).backward()
    scaler.step(torch.optim.SGD([weight], 0.5))
    assert weight.tolist() == [0.5]


def test_growth_to_infinity_stops_as_in_torch():
    ours = Ours(2.0**127, growth_interval=1, max_scale=3.4e38)
    torchs = torch.tensor(2.0**127), torch.zeros((), dtype=torch.int32)
    ours.update(False)
    torch._amp_update_scale_(*torchs, torch.zeros(()), 2.0, 0.5, 1)
    assert ours.scale == float(torchs[0]) == 2.0**127


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(1.0, 2.0**15), (2.0**-20, 2.0**35), (65504.0, 0.5), (65503.0, 1.0), (3.0, 2.0**14), (1e-30, 2.0**115)],
)
def test_choose_scale(largest, scale):
    assert choose_scale(largest) == scale
    assert scale * largest < 65504 <= 2 * scale * largest


def test_choose_scale_of_a_tensor_of_gradients():
    assert choose_scale(torch.tensor([0.5, -3.0, 1.0])) == 2.0**14


@pytest.mark.parametrize("largest", [5e-324, 1e-45, 2.0**-149, 1e-35, torch.tensor([1e-45]), 3.4e38])
def test_choose_scale_gives_what_a_static_scaler_takes(largest):
    scale = choose_scale(largest)
    assert scale == (2.0**126 if float(largest) < 1e-30 else 2.0**-112)
    assert StaticLossScaler(scale, device="cpu").get_scale() == scale


def test_choose_scale_refuses_an_empty_tensor():
    with pytest.raises(OptionError, match=r"max_abs_grad.*no element.*\(0, 3\)"):
        choose_scale(torch.zeros(0, 3))


@pytest.mark.parametrize("largest", [0.0, -1.0, float("inf"), float("nan"), "1"])
def test_choose_scale_refuses(largest):
    with pytest.raises(OptionError, match="max_abs_grad"):
        choose_scale(largest)
