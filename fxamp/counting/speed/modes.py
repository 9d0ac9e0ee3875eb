"""The ways to train that the speed suite compares, as a table of builders."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fxamp.convert import convert
from fxamp.counting.speed.workloads import Workload
from fxamp.counting.zoo.language import Attention
from fxamp.dynamo.backend import backend
from fxamp.runtime import apex
from fxamp.runtime.graphed_step import GraphedStep
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

# Small enough that no step of random data overflows: a skipped step would be a shorter one.
SCALE = 2.0**10
RATE = 1e-4
# Adam's usual 1e-8 is zero in fp16.
HALF_EPS = 1e-4


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A way to train, ready to run.

    Attributes:
        step: one whole step, from clearing gradients to the update; its loss.
        loss: forward and loss alone, for the counter; None where Python does not see the ops.
        parameters: what that loss is differentiated by.
        is_sharing: its model and optimizer are those of `Setting.shared`.
        note: what a reader must know, asked after the steps.
        scale: of the loss, asked after the steps; below `SCALE` where steps were skipped.
    """

    step: Callable[[], torch.Tensor]
    loss: Callable[[], torch.Tensor] | None
    parameters: Sequence[torch.Tensor]
    is_sharing: bool = False
    note: Callable[[], str] = lambda: ""
    scale: Callable[[], float] = lambda: SCALE


class Setting:
    """One workload, and the float32 model that all ways share which leave parameters in float32."""

    def __init__(self, name: str, work: Workload, dtype: torch.dtype, inner: str) -> None:
        self.name, self.work, self.dtype, self.inner = name, work, dtype, inner
        self.device = work.targets.device.type

    @functools.cached_property
    def shared(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A float32 model and its optimizer, whose state exists already."""
        model = self.work.make()
        optimizer = adamw(model)
        eager(self, model, optimizer, plain_scaler(self.device)).step()
        optimizer.zero_grad()
        return model, optimizer

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device, self.dtype)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, fused=True, **options)


def plain_scaler(device: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device, enabled=False)


def grad_scaler(setting: Setting) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(setting.device, init_scale=SCALE, enabled=setting.dtype == torch.float16)


def loss_scaler(setting: Setting) -> LossScaler:
    return LossScaler(SCALE, device=setting.device, enabled=setting.dtype == torch.float16)


def eager(
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    region: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    inputs: tuple[Any, ...] | None = None,
    **facts: Any,
) -> Prepared:
    """The loop a user writes."""
    work = setting.work
    arguments = work.inputs if inputs is None else inputs

    def loss() -> torch.Tensor:
        with region():
            return work.loss_fn(model(*arguments), work.targets)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss()
        scaler.scale(found).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return found.detach()

    facts.setdefault("loss", loss)
    if scaler.is_enabled():
        facts["scale"] = scaler.get_scale
    return Prepared(step, parameters=list(model.parameters()), **facts)


def fp32(setting: Setting) -> Prepared:
    return eager(setting, *setting.shared, plain_scaler(setting.device), is_sharing=True)


def autocast(setting: Setting) -> Prepared:
    return eager(setting, *setting.shared, grad_scaler(setting), setting.autocast, is_sharing=True)


def compiled_autocast(setting: Setting) -> Prepared:
    model, optimizer = setting.shared
    compiled: Any = torch.compile(model, backend=setting.inner)
    return eager(setting, compiled, optimizer, grad_scaler(setting), setting.autocast, is_sharing=True, loss=None)


def compiled_fxamp(setting: Setting) -> Prepared:
    model, optimizer = setting.shared
    options: dict[str, Any] = {"dtype": setting.dtype, "inner": setting.inner}
    # The function, not its name: a source tree that is not installed has no entry point.
    compiled: Any = torch.compile(model, backend=backend, options=options)
    return eager(setting, compiled, optimizer, loss_scaler(setting), is_sharing=True, loss=None)


def o1(setting: Setting) -> Prepared:
    model, optimizer = setting.shared
    return eager(setting, _converted(setting, model), optimizer, loss_scaler(setting), is_sharing=True)


def o2(setting: Setting) -> Prepared:
    return eager(setting, *_with_masters(setting), loss_scaler(setting))


def apex_o2(setting: Setting) -> Prepared:
    """apex's interface, as a script written for apex has it."""
    model = setting.work.make()
    model, optimizer = apex.initialize(
        model,
        adamw(model),
        opt_level="O2",
        cast_model_type=setting.dtype,
        loss_scale=SCALE if setting.dtype == torch.float16 else 1.0,
        verbosity=0,
        example_inputs=setting.work.inputs,
    )

    def loss() -> torch.Tensor:
        return setting.work.loss_fn(model(*setting.work.inputs), setting.work.targets)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        found = loss()
        with apex.scale_loss(found, optimizer) as scaled:
            scaled.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return found.detach()

    return Prepared(step, loss, list(model.parameters()))


def graphed(opt_level: str) -> Callable[[Setting], Prepared]:
    def build(setting: Setting) -> Prepared:
        model, optimizer = _with_masters(setting) if opt_level == "O2" else _alone(setting)
        work = setting.work
        scaler = loss_scaler(setting)
        step = GraphedStep(model, work.loss_fn, optimizer, scaler)

        def note() -> str:
            return "" if step.is_graphed else f"ran eagerly: {step.why_eager}"

        def run() -> torch.Tensor:
            loss = step(work.inputs, work.targets)
            if "out of memory" in (step.why_eager or ""):  # it goes on eagerly, which is not what is timed here
                raise torch.OutOfMemoryError(step.why_eager)
            return loss

        scale = scaler.get_scale if scaler.is_enabled() else lambda: SCALE
        return Prepared(run, None, list(model.parameters()), note=note, scale=scale)

    return build


def half(setting: Setting) -> Prepared:
    """Everything in the low dtype, the optimizer too: the limit of speed, and no way to train."""
    model, inputs = in_half(setting.work.make(), setting.work.inputs, setting.dtype)
    return eager(setting, model, adamw(model, eps=HALF_EPS), plain_scaler(setting.device), inputs=inputs)


def in_half(model: nn.Module, inputs: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """A model changed into one that is low everywhere and gives float32 outputs, and its inputs."""

    def as_dtype(wanted: torch.dtype, values: Any) -> Any:
        return tree_map(lambda value: value.to(wanted) if _is_float(value) else value, values)

    for module in model.modules():  # a mask made of float32 literals; CUDA's attention wants it in the queries' dtype
        if isinstance(module, Attention):
            module.register_forward_pre_hook(lambda module, given: as_dtype(dtype, given))
    model.register_forward_hook(lambda module, given, outputs: as_dtype(torch.float32, outputs))
    return model.to(dtype), as_dtype(dtype, inputs)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _converted(setting: Setting, model: nn.Module, opt_level: str = "O1") -> nn.Module:
    return convert(model, setting.dtype, example_inputs=setting.work.inputs, opt_level=opt_level)


def _alone(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _converted(setting, setting.work.make())
    return model, adamw(model)


def _with_masters(setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _converted(setting, setting.work.make(), "O2")
    return model, MasterWeightOptimizer(adamw(model))


BASELINE = "autocast"
MODES: dict[str, Callable[[Setting], Prepared]] = {
    "fp32": fp32,
    "TF32": fp32,  # the suite switches TF32 on around it
    "autocast": autocast,
    "O1": o1,
    "O2": o2,
    "apex O2": apex_o2,
    "O1 graphed": graphed("O1"),
    "O2 graphed": graphed("O2"),
    "half": half,
    "compile autocast": compiled_autocast,
    "compile fxamp": compiled_fxamp,
}
# Measured together, in turns, the baseline beside each. In this order for all models: what has a goal, what stands
# beside it, what has to be compiled.
SETS: tuple[tuple[str, ...], ...] = (
    ("autocast", "O1", "O2", "O1 graphed", "O2 graphed", "half"),
    ("fp32", "TF32", "apex O2"),
    ("compile autocast", "compile fxamp"),
)
COMPILED = frozenset(SETS[-1])
"""Compilers need minutes; the ratio of these two is a goal, so they are measured in one run."""
COMPILED_FIRST = ("resnet50_channels_last", "bert_base", "gpt2", "ncf")
"""Models whose compiled modes come before those of the others."""
