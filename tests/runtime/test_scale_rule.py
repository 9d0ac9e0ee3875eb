"""The scale's rule against Megatron's, apex's and DeepSpeed's published algorithms; choose_scale."""

import itertools
import random

import pytest
import torch

from fxamp.errors import OptionError
from fxamp.runtime.fixed_scalers import StaticLossScaler
from fxamp.runtime.scale_rule import ScaleRule, choose_scale


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
        self.tensors = (torch.tensor(scale), torch.zeros((), dtype=torch.int32))
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


@pytest.mark.parametrize("refill", ["growth", "good_step"])
def test_hysteresis_equals_deepspeed_up_to_its_later_growth(refill):
    """DeepSpeed lets one more good step pass before the growth after an overflow: it is left out here."""
    for history, rng in histories(100, 60):
        window, hysteresis = rng.choice((3, 5)), rng.choice((1, 2, 3))
        ours = Ours(
            2.0**20,
            growth_interval=window,
            hysteresis=hysteresis,
            refill=refill,
            min_scale=1.0,
            max_scale=2.0**60,
        )
        oracle = DeepSpeed(2.0**20, window, hysteresis, 1.0, consecutive=refill == "good_step")
        since_reset = None  # good steps since the start or the last overflow
        oracle.update(False)  # at its start, as after an overflow, it needs one good step more
        since_reset = 0
        for bad in history:
            ours.update(bad)
            oracle.update(bad)
            if bad:
                oracle.update(False)
            since_reset = 0 if bad else since_reset + 1
            if not (bad and refill == "good_step"):
                assert ours.scale == oracle.scale
            if bad and refill == "good_step":
                break  # the extra good step would refill DeepSpeed's count


def test_deepspeed_consecutive_backoffs():
    """Without growth in reach, every pattern of 8 steps gives DeepSpeed's consecutive scale."""
    for history in itertools.product((False, True), repeat=8):
        ours = Ours(2.0**10, hysteresis=2, refill="good_step", growth_interval=100)
        oracle = DeepSpeed(2.0**10, 100, 2, 2.0**-14, consecutive=True)
        for bad in history:
            ours.update(bad)
            oracle.update(bad)
            assert ours.scale == oracle.scale, history


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
