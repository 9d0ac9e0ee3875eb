"""One model of the zoo, prepared in one of the ways that are compared, and counted."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from fxamp.convert import convert
from fxamp.counting import fake_cuda
from fxamp.counting.counts import Counter, Counts, count_step
from fxamp.counting.gpu_kernels import gpu_kernels
from fxamp.counting.zoo import MODELS, Step
from fxamp.counting.zoo.step import MakeStep
from fxamp.review.report import Report, report

WAYS = ("fp32", "autocast", "O1 strict", "O1 balanced", "O1 aggressive", "O2", "half")


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counts of one model prepared in one way; `report` is fxamp's own account where it converted the model."""

    counts: Counts
    counter: Counter
    report: Report | None


def count(
    model: str | MakeStep, way: str, dtype: torch.dtype = torch.float16, device: str = "cuda", tiny: bool = False
) -> Counted:
    """Cost of one training step.

    Args:
        model: name of a zoo model (`MODELS`), or what makes a step: (tiny) -> Step, called with `device` as torch's
            default device.
        way: one of `WAYS`; "half" has every parameter, buffer and input in `dtype`: the limit, not a competitor.
        device: "cuda": fake tensors, nothing is computed; "cpu": it really runs.
        tiny: small sizes.
    """
    mode = _mode(device)
    with mode, torch.device(device):
        step = (MODELS[model] if isinstance(model, str) else model)(tiny)
    step.model.train()
    prepared, forward = _prepare(step, way, dtype, device)
    kernels = gpu_kernels() if device == "cuda" else contextlib.nullcontext()
    with mode, torch.device(device), kernels:
        counts, counter = count_step(forward, step.loss_of, list(prepared.parameters()))
    is_ours = way.startswith("O")
    return Counted(counts, counter, report(prepared) if is_ours else None)


def _mode(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "cpu":
        return contextlib.nullcontext()
    fake_cuda.install()
    return FakeTensorMode(allow_non_fake_inputs=True)


def _prepare(step: Step, way: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Callable[[], Any]]:
    if way == "fp32":
        return step.model, lambda: step.model(*step.inputs)
    if way == "autocast":
        return step.model, lambda: _under_autocast(step, dtype, device)
    if way == "half":
        halved, inputs = _halved(step.model, dtype), tree_map(lambda value: _in(value, dtype), step.inputs)
        return halved, lambda: tree_map(lambda value: _in(value, torch.float32), halved(*inputs))
    opt_level, _, level = way.partition(" ")
    with mock.patch(f"{convert.__module__}.lower_parameters", _lower) if device == "cuda" else contextlib.nullcontext():
        converted = convert(
            step.model, dtype, example_inputs=step.inputs, opt_level=opt_level, level=level or "balanced"
        )
    return converted, lambda: converted(*step.inputs)


def _under_autocast(step: Step, dtype: torch.dtype, device: str) -> Any:
    context = fake_cuda.autocast(dtype) if device == "cuda" else torch.autocast(device, dtype)
    with context:
        result = step.model(*step.inputs)
    return tree_map(lambda value: _in(value, torch.float32), result)


def _in(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _lower(model: nn.Module, names: Iterable[str], low: torch.dtype, **options: Any) -> list[Any]:
    """`fxamp.storage.lower_parameters` for fake tensors, whose `.data` cannot be replaced: new Parameter objects."""
    named = dict(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    wanted = {id(named[name]) for name in names if name in named}
    for name, parameter in named.items():
        if id(parameter) in wanted:
            owner, _, leaf = name.rpartition(".")
            lowered = made.setdefault(id(parameter), nn.Parameter(parameter.detach().to(low)))
            lowered._fxamp_logical_dtype = torch.float32  # type: ignore[attr-defined]
            model.get_submodule(owner)._parameters[leaf] = lowered
    return []


def _halved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with low parameters and buffers; new Parameter objects, because fake ones cannot be lowered."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                low = made.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype)))
                module._parameters[name] = low
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _in(buffer, dtype)
    return model
