"""One training loop for every row of the demo: fp32, torch.autocast, fxamp."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from fxamp.convert import convert
from fxamp.counting.counts import Counter
from fxamp.demo.tasks import Task, Values, parts, take
from fxamp.review.report import report
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

COUNT_EVERY, COUNT_FROM = 50, 20
"""Casts are counted in one step of fifty, from the 21st on, or the last of fewer: the counter sees every op, and that
takes time. In the first four that no overflow skips master weights are compared with their parameters."""
FEWEST = 2
"""Steps of a run: one is counted and one is timed."""
FINAL = 0.1
"""The share of the steps, the last ones, whose mean loss is the final loss."""
WARMUP = 0.1
"""The share of the steps in which the learning rate grows; then it falls to zero on a cosine."""
WEIGHT_DECAY = 0.01
TEST_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a model is trained: by which engine ("autocast", "fxamp" or none), and in which dtype its GEMMs run.

    `level` and `opt_level` are those of `fxamp.convert`.
    """

    engine: str
    dtype: torch.dtype
    level: str = "balanced"
    opt_level: str = "O1"

    @property
    def name(self) -> str:
        """mode.name == "fxamp fp16"; what is not as `fxamp.convert` has it by itself is named too."""
        short = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        level = self.level if self.level != "balanced" else ""
        opt_level = self.opt_level if self.opt_level != "O1" else ""
        return " ".join(filter(None, (self.engine, opt_level, level, short)))


FP32 = Mode("", torch.float32)
MIXED = tuple(Mode(engine, dtype) for dtype in (torch.bfloat16, torch.float16) for engine in ("autocast", "fxamp"))


@dataclasses.dataclass(frozen=True)
class Result:
    """What one run gave.

    Attributes:
        loss: mean training loss of the last tenth of the steps.
        held_out_loss, accuracy: over the whole held-out set, in the precision that trained; where the task has another
            metric than accuracy, that.
        low, nodes: of the graph that trained; None where there is none.
        casts: calls that convert one floating dtype to another, in a step (forward, loss, backward).
        tensors_cast: tensors that they convert; a bucket of weights is one call.
        skipped: steps that the scaler skipped.
        milliseconds: of a step, the median; steps in which casts were counted are left out.
        seconds: of the whole run, with conversion and test.
    """

    mode: Mode
    seed: int
    loss: float
    held_out_loss: float
    accuracy: float
    low: int | None
    nodes: int | None
    casts: float
    tensors_cast: float
    skipped: int
    milliseconds: float
    seconds: float


class Run:
    """A model in training: the loop a user writes, with its engine's autocast region, conversion and scaler.

    The seed decides the first weights and the batches; they are the same in every mode.
    """

    count_every = COUNT_EVERY

    def __init__(self, task: Task, mode: Mode, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.mode, self.seed = task, mode, seed
        self.model = self.prepared(task.model(), next(task.batches(seed))[0])
        self.optimizer = self.optimizer_of(self.model)
        self.models, self.optimizers = [self.model], [self.optimizer]
        self.scaler = scaler_of(mode, task.device)
        self.counts: list[Counter] = []
        self.losses: list[float] = []
        self.skipped = 0

    def __call__(self, on_step: Callable[[], Any] = lambda: None) -> Result:
        """Train, then test. `on_step` is called after every step."""
        start = time.perf_counter()
        losses, times, counted = self.losses, [], min(COUNT_FROM, self.task.steps - 1)
        for number, batch in enumerate(self.task.batches(self.seed)):
            self.set_rate(number)
            began = time.perf_counter()
            if number % self.count_every == counted:
                losses.append(self.counted_step(*batch))
            else:
                losses.append(self.step(*batch))
                times.append(time.perf_counter() - began)
            on_step()
        low, nodes = self.nodes()
        held_out_loss, accuracy = self.test(*self.task.held_out)
        return Result(
            mode=self.mode,
            seed=self.seed,
            loss=fmean(losses[-math.ceil(FINAL * len(losses)) :]),
            held_out_loss=held_out_loss,
            accuracy=accuracy,
            low=low,
            nodes=nodes,
            casts=fmean(counter.counts.casts for counter in self.counts),
            tensors_cast=fmean(counter.counts.tensors_cast for counter in self.counts),
            skipped=self.skipped,
            milliseconds=1e3 * median(times),
            seconds=time.perf_counter() - start,
        )

    def prepared(self, model: nn.Module, inputs: Values) -> nn.Module:
        """The model on its device, converted where the engine is fxamp."""
        model = model.to(self.task.device)
        if self.mode.engine != "fxamp":
            return model
        level, opt_level = self.mode.level, self.mode.opt_level
        return convert(model, self.mode.dtype, example_inputs=parts(inputs), level=level, opt_level=opt_level)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; with master weights where the parameters are low."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.task.learning_rate, weight_decay=WEIGHT_DECAY)
        return MasterWeightOptimizer(optimizer) if self.mode.opt_level == "O2" else optimizer

    def step(self, inputs: Values, targets: Values) -> float:
        """One step of training; returns its loss."""
        self.model.train()
        self.optimizer.zero_grad()
        with self.precision():
            loss = self.task.loss(self.model(*parts(inputs)), targets)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.update_scale()
        return loss.item()

    def update_scale(self) -> None:
        """The scaler's end of a step, and whether it skipped that."""
        scale = self.scaler.get_scale()
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < scale

    def set_rate(self, number: int) -> None:
        """The learning rate of a step; by its number, so that a skipped step moves nothing."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.task.learning_rate * rate(number / self.task.steps)

    def counted_step(self, inputs: Values, targets: Values) -> float:
        """The same step, its casts counted, those of scaler and masters too."""
        # Autograd in this thread: a thread of its own could still hold the counter when the interpreter ends.
        with Counter() as counter, torch.autograd.set_multithreading_enabled(False):
            loss = self.step(inputs, targets)
        self.counts.append(counter)
        return loss

    @torch.no_grad()
    def test(self, inputs: Values, targets: Values) -> tuple[float, float]:
        """Mean loss, and the metric."""
        self.model.eval()
        loss, outputs, examples = 0.0, [], len(parts(targets)[0])
        for start in range(0, examples, TEST_BATCH):
            some = slice(start, min(start + TEST_BATCH, examples))
            with self.precision():
                found = self.model(*parts(take(inputs, some)))
                loss += self.task.loss(found, take(targets, some)).item() * (some.stop - some.start)
            outputs.append(found)
        return loss / examples, self.task.metric(joined(outputs), targets)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast region, for the engine that needs one."""
        if self.mode.engine == "autocast":
            return torch.autocast(self.task.device.type, self.mode.dtype)
        return contextlib.nullcontext()

    def nodes(self) -> tuple[int | None, int | None]:
        """Nodes that run low, and all nodes, of the graphs that ran so far."""
        if self.mode.engine != "fxamp":
            return None, None
        built = report(self.model)
        return built.low_precision_nodes, built.total_nodes


def scaler_of(mode: Mode, device: torch.device) -> torch.amp.GradScaler:
    """The engine's own loss scaler; in bf16 and fp32, whose gradients do not underflow, one that does nothing."""
    scaler = LossScaler if mode.engine == "fxamp" else torch.amp.GradScaler
    return scaler(device=device.type, enabled=mode.dtype == torch.float16)


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of several batches as those of one."""
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(part) for part in zip(*outputs, strict=True))
    return torch.cat(list(outputs))


def rate(progress: float) -> float:
    """Share of the peak learning rate: up on a line, then down to zero on a cosine.

    rate(WARMUP) == 1.0
    """
    if progress < WARMUP:
        return progress / WARMUP
    return 0.5 + 0.5 * math.cos(math.pi * (progress - WARMUP) / (1 - WARMUP))
