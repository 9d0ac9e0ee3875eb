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
from fxamp.counting.counts import Counts, count_step
from fxamp.counting.gpu_kernels import gpu_kernels
from fxamp.counting.zoo import COUNTED, MODELS, MakeStep, Step
from fxamp.errors import CaptureError
from fxamp.review.report import Report, report
from fxamp.runtime.masters import LOGICAL
from fxamp.runtime.padded_weights import note_room, with_room

Call = tuple[tuple[Any, ...], dict[str, Any]]
WAYS = (
    "fp32",
    "autocast",
    "O1 strict",
    "O1 balanced",
    "O1 aggressive",
    "O1 loss inside",
    "O2",
    "O2 loss inside",
    "half",
)
"""Loss inside: level balanced, where the converted model computes the loss too, as autocast does in its region."""
MORE_WAYS = ("O1 loss converted", "O2 loss converted")
"""Level balanced, where the loss is a converted module of its own, which reads the results as they are computed."""


@dataclasses.dataclass(frozen=True)
class Counted:
    """Counts of one model prepared in one way; `report` is fxamp's own account where it converted the model."""

    counts: Counts
    report: Report | None


def count(
    model: str | MakeStep, way: str, dtype: torch.dtype = torch.float16, device: str = "cuda", tiny: bool = False
) -> Counted:
    """Cost of one training step.

    Args:
        model: name of a zoo model (`COUNTED`, `MODELS`), or what makes a step: (tiny) -> Step, called with `device`
            as torch's default device.
        way: one of `WAYS` or `MORE_WAYS`; "half" has every parameter, buffer and input in `dtype`: the limit, not a
            competitor.
        device: "cuda": fake tensors, nothing is computed; "cpu": it really runs.
        tiny: small sizes.

    Raises:
        CaptureError: only Dynamo follows the model; under a dispatch mode it leaves the model as it was, in float32.
        MissingPackageError: the model comes from a package that is not installed.
    """
    mode = _mode(device)
    with mode, torch.device(device), _without_drawing(device):
        step = ({**MODELS, **COUNTED}[model] if isinstance(model, str) else model)(tiny)
    step.model.train()
    prepared, loss = _prepare(step, way, dtype, device)
    kernels = gpu_kernels() if device == "cuda" else contextlib.nullcontext()
    with mode, torch.device(device), kernels:
        counts = count_step(loss, list(prepared.parameters()))
    if not way.startswith("O"):
        return Counted(counts, None)
    ours = report(prepared)
    if "dynamo" in ours.captures:
        raise CaptureError(
            f"{step.model.__class__.__name__} was captured by Dynamo, which runs nothing while ops are counted"
        )
    return Counted(counts, ours)


def _mode(device: str) -> contextlib.AbstractContextManager[Any]:
    if device == "cpu":
        return contextlib.nullcontext()
    fake_cuda.install()
    return FakeTensorMode(allow_non_fake_inputs=True)


def _without_drawing(device: str) -> contextlib.AbstractContextManager[Any]:
    """Fake tensors have no values, and initialisers that draw again until a value suits them read some."""
    if device == "cpu":
        return contextlib.nullcontext()
    return mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor)


def _prepare(step: Step, way: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """The model as it is counted, and what runs it once and gives its loss."""
    call = step.inputs, dict(step.keywords)
    if way == "fp32":
        return step.model, lambda: step.loss_of(_run(step.model, call))
    if way == "autocast":
        return step.model, lambda: _under_autocast(step, call, dtype, device)
    if way == "half":
        halved, low = _halved(step.model, dtype), tree_map(lambda value: _in(value, dtype), call)
        return halved, lambda: step.loss_of(tree_map(lambda value: _in(value, torch.float32), _run(halved, low)))
    opt_level, _, level = way.partition(" ")
    if level not in ("strict", "aggressive"):
        level = "balanced"
    model, loss_of, output_dtype = step.model, step.loss_of, None if way.endswith("loss converted") else torch.float32
    if way.endswith("loss inside"):
        model, loss_of = _WithLoss(step).train(), lambda result: result
    elif way.endswith("loss converted"):
        loss_of = convert(_Loss(step, device), dtype)
    with mock.patch(f"{convert.__module__}.lower_parameters", _lower) if device == "cuda" else contextlib.nullcontext():
        converted = convert(
            model, dtype, example_inputs=call, opt_level=opt_level, level=level, output_dtype=output_dtype
        )
    return converted, lambda: loss_of(_run(converted, call))


class _WithLoss(nn.Module):
    """A model that gives its loss."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.model, self.loss_of = step.model, step.loss_of

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss_of(self.model(*args, **kwargs))


class _Loss(nn.Module):
    """The loss of a step; an empty buffer says where it is computed."""

    def __init__(self, step: Step, device: str) -> None:
        super().__init__()
        self.loss_of = step.loss_of
        with _mode(device):
            self.register_buffer("place", torch.empty(0, device=device))

    def forward(self, result: Any) -> torch.Tensor:
        return self.loss_of(result)


def _run(model: nn.Module, call: Call) -> Any:
    return model(*call[0], **call[1])


def _under_autocast(step: Step, call: Call, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The loss is computed inside the region, as autocast's documentation has it."""
    with fake_cuda.autocast(dtype) if device == "cuda" else torch.autocast(device, dtype):
        return step.loss_of(_run(step.model, call))


def _in(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _lower(
    model: nn.Module, names: Iterable[str], low: torch.dtype, keep_masters: bool = True, multiple: int = 1
) -> list[Any]:
    """`storage.lower_parameters` for fake tensors, whose `.data` cannot be replaced: new Parameter objects."""
    named = dict(model.named_parameters(remove_duplicate=False))
    made: dict[int, nn.Parameter] = {}
    wanted = {id(named[name]) for name in names if name in named}
    for name, parameter in named.items():
        if id(parameter) in wanted:
            owner, _, leaf = name.rpartition(".")
            if id(parameter) not in made:
                made[id(parameter)] = _roomy(parameter.detach().to(low), multiple)
            lowered = made[id(parameter)]
            setattr(lowered, LOGICAL, torch.float32)
            model.get_submodule(owner)._parameters[leaf] = lowered
    return []


def _roomy(values: torch.Tensor, multiple: int) -> nn.Parameter:
    roomy = with_room(values, multiple)
    parameter = nn.Parameter(values if roomy is None else roomy)
    if roomy is not None:
        note_room(parameter, multiple)
    return parameter


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
