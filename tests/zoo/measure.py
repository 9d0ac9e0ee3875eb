"""One model of the zoo, measured: fp32, torch.autocast and fxamp side by side, with the same seeds."""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import fxamp
from fxamp.model.engine import engine_of

LOW = torch.bfloat16
ERRORS = ("outputs", "gradients", "evaluated", "buffers")
Call = tuple[tuple[Any, ...], dict[str, Any]]
# What Tensor Cores would run, each call under one name.
_GEMMS = frozenset(
    f"aten::{name}"
    for name in """mm addmm bmm baddbmm addbmm addmv convolution convolution_backward mkldnn_rnn_layer
    mkldnn_rnn_layer_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward""".split()
)
_WIDTHS = {"c10::BFloat16": 16, "c10::Half": 16, "float": 32, "double": 64}


@dataclasses.dataclass
class Run:
    """What three training steps and an evaluation of one model gave.

    Attributes:
        outputs, gradients: of the first step.
        losses: of each step.
        evaluated: outputs in eval mode, before any step.
        buffers: after the first step's forward.
        low, gemms: GEMM calls of the last step, forward and backward.
    """

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    losses: list[float]
    evaluated: list[torch.Tensor]
    buffers: dict[str, torch.Tensor]
    low: int
    gemms: int

    @property
    def share(self) -> float:
        return self.low / self.gemms if self.gemms else 1.0


@dataclasses.dataclass
class Row:
    """A model's line in the table; errors are distances from fp32, relative (L2).

    Attributes:
        more: the same with other seeds, where they were asked for, or the first one was more than twice as far from
            fp32 as autocast; errors are then root mean squares over all.
    """

    name: str
    capture: str
    nodes: int
    casts: int
    full: Run
    auto: Run
    ours: Run
    model: nn.Module
    converted: nn.Module
    more: list["Row"] = dataclasses.field(default_factory=list)

    def error(self, run: Run, what: str) -> float:
        """Distance of our or autocast's outputs, gradients, evaluated outputs or buffers from fp32's."""
        of_seeds = [ours if run is self.ours else theirs for ours, theirs in self.errors_of_seeds(what)]
        return math.sqrt(sum(error**2 for error in of_seeds) / len(of_seeds))

    def errors_of_seeds(self, what: str) -> list[tuple[float, float]]:
        """Our distance and autocast's, seed by seed."""
        return [(_error(row.ours, row.full, what), _error(row.auto, row.full, what)) for row in (self, *self.more)]

    @property
    def is_near(self) -> bool:
        """Whether nothing is more than twice as far from fp32 as autocast has it."""
        return all(self.error(self.ours, what) <= 2 * self.error(self.auto, what) + 1e-6 for what in ERRORS)


class CountGemms:
    """Count GEMM calls, and those whose first floating operand is 16 bits wide, forward and backward.

    (By the profiler: Dynamo compiles nothing under a TorchDispatchMode.)
    """

    def __init__(self) -> None:
        self.low = self.total = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def __enter__(self) -> "CountGemms":
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.profiler.kineto_results.events():
            if event.name() in _GEMMS:
                floats = [dtype for dtype in event.dtypes() if dtype in _WIDTHS]
                self.total += 1
                self.low += bool(floats) and _WIDTHS[floats[0]] == 16


def _error(one: Run, full: Run, what: str) -> float:
    return distance(tensors_of(one, what), tensors_of(full, what))


def measure(
    name: str, make: Callable[[], nn.Module], call: Call, capture: str = "auto", seeds: int = 1, **options: Any
) -> Row:
    """Train and evaluate three models that start equal; from three seeds at least where one may be noise."""
    row = _measure(0, name, make, call, capture, options)
    if not row.is_near:
        seeds = max(seeds, 3)
    row.more = [_measure(seed, name, make, call, capture, options) for seed in range(1, seeds)]
    return row


def _measure(
    seed: int, name: str, make: Callable[[], nn.Module], call: Call, capture: str, options: dict[str, Any]
) -> Row:
    eager, auto, mine = (_seeded(make, seed) for _ in range(3))
    parameters, keys = dict(mine.named_parameters()), list(mine.state_dict())
    converted = fxamp.convert(mine, dtype=LOW, capture=capture, example_inputs=call, **options)
    assert list(converted.state_dict()) == keys
    assert all(converted.get_parameter(path) is value for path, value in parameters.items())
    full = run(eager, call, seed=seed)
    cast = run(auto, call, autocast, seed)
    ours = run(converted, call, seed=seed)
    report = fxamp.report(converted)
    return Row(name, capture_of(converted), nodes_of(converted), report.casts, full, cast, ours, mine, converted)


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    """torch.autocast as a peer; without oneDNN on a CPU for which its low-precision LSTM has no kernel."""
    with torch.autocast("cpu", dtype=LOW), torch.backends.mkldnn.flags(enabled=_onednn_has_low_lstm()):
        yield


@functools.cache
def _onednn_has_low_lstm() -> bool:
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=LOW):
            nn.LSTM(8, 8).eval()(torch.zeros(1, 1, 8))
    except RuntimeError:
        return False
    return True


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def capture_of(converted: nn.Module) -> str:
    """Which capture runs the model."""
    methods = sorted({variant.captured.method for variant in engine_of(converted).all_variants()})
    return "+".join(methods) or "none"


def nodes_of(converted: nn.Module) -> int:
    return max((variant.total_nodes for variant in engine_of(converted).all_variants()), default=0)


def run(model: nn.Module, call: Call, region: Callable[[], Any] | None = None, seed: int = 0) -> Run:
    """Evaluate once, then make three training steps; `region` is entered around each forward."""
    evaluated = tensors(_forward(model.eval(), call, region, seed))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        with CountGemms() if step == 2 else contextlib.nullcontext() as count:
            outputs = _forward(model, call, region, seed)
            if step == 0:
                buffers = {name: value.clone() for name, value in model.named_buffers()}
            loss = loss_of(outputs)
            loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            first = tensors(outputs)
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
    return Run(first, gradients, losses, evaluated, buffers, count.low, count.total)


def _forward(model: nn.Module, call: Call, region: Callable[[], Any] | None, seed: int) -> Any:
    args, kwargs = call
    torch.manual_seed(7 + seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if region is None:
            return model(*args, **kwargs)
        with region():
            return model(*args, **kwargs)


def loss_of(outputs: Any) -> torch.Tensor:
    """A model's own loss where it gives one, else the mean square of everything it gives."""
    own = getattr(outputs, "loss", None)
    if own is not None:
        return own.float()
    floats = [value for value in _leaves(outputs) if value.requires_grad]
    return sum(value.float().square().mean() for value in floats)


def tensors(outputs: Any) -> list[torch.Tensor]:
    """The floating outputs, detached, as float64."""
    return [value.detach().double() for value in _leaves(outputs)]


def _leaves(outputs: Any) -> list[torch.Tensor]:
    found = pytree.tree_leaves(outputs)
    return [value for value in found if isinstance(value, torch.Tensor) and value.is_floating_point()]


def tensors_of(one: Run, what: str) -> list[torch.Tensor]:
    found = getattr(one, what)
    values: Iterator[Any] = iter(found.values() if isinstance(found, dict) else found)
    return [value.double() for value in values if value is not None and value.is_floating_point()]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Relative L2 distance over all tensors; infinities and NaNs must stand in the same places."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    if not ours:
        return 0.0
    one, other = (torch.cat([value.flatten() for value in values]) for values in (ours, theirs))
    finite = other.isfinite()
    if not torch.equal(one.isfinite(), finite):
        return float("inf")
    one, other = one[finite], other[finite]
    return float((one - other).norm() / other.norm().clamp_min(1e-12))
