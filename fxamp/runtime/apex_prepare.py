"""What apex's `initialize` does to models, optimizers and scalers."""

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from fxamp.dtypes import resolve_dtype
from fxamp.errors import CaptureError, OptionError
from fxamp.runtime import gradients
from fxamp.runtime.apex_casts import registry
from fxamp.runtime.apex_gradients import SCALED_BY, STASH
from fxamp.runtime.apex_options import Properties
from fxamp.runtime.arguments import check_names, check_needs_no_closure
from fxamp.runtime.device_skip import settle, step_unless
from fxamp.runtime.fixed_scalers import StaticLossScaler
from fxamp.runtime.master_checks import check_arguments
from fxamp.runtime.master_gradients import mirror_gradient
from fxamp.runtime.master_weights import BUCKET_BYTES, MasterWeightOptimizer
from fxamp.runtime.masters import is_stored_low
from fxamp.runtime.scale_rule import ANY_SCALE, checked_scale
from fxamp.runtime.scaler import LossScaler
from fxamp.runtime.scaler_base import StepOrderError
from fxamp.runtime.scaler_state import any_of

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
PENDING_FOUND_INF = "_fxamp_found_inf"
SET_BY_LEVEL = ("model", "opt_level", "output_dtype")  # arguments of convert that initialize() gives it
FIRST_SCALE = 2.0**16  # apex's own


def check_models(models: list[torch.nn.Module]) -> None:
    """Refuse wrapped models, models that were cast by hand, and one that is there twice."""
    for number, model in enumerate(models):
        if any(model is other for other in models[:number]):
            raise OptionError(f"model {number} of the list, a {type(model).__name__}, is there before; give each once.")
        if type(model).__name__ in WRAPPERS:
            raise OptionError(f"a model is wrapped in {type(model).__name__}; wrap what initialize() returns instead.")
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                raise OptionError(
                    f"{name} is {tensor.dtype}, expected torch.float32: do not call .half() on the model, "
                    "whatever the opt_level; initialize() does it."
                )


def check_optimizers(optimizers: list[torch.optim.Optimizer], chosen: Properties) -> None:
    """Refuse optimizers that were prepared before, are there twice, or cannot have the masters of their level."""
    for number, optimizer in enumerate(optimizers):
        if any(optimizer is other for other in optimizers[:number]):
            raise OptionError(
                f"optimizer {number} of the list, a {type(optimizer).__name__}, is there before; give each once."
            )
        if isinstance(optimizer, MasterWeightOptimizer) or hasattr(optimizer, PENDING_FOUND_INF):
            raise OptionError("A given optimizer should only be passed through initialize() once.")
        check_needs_no_closure(
            optimizer, "initialize(): scale_loss() is one backward a step; use fxamp.convert() and a LossScaler"
        )
        if chosen.master_weights:
            check_arguments(optimizer, "fp32", BUCKET_BYTES)


def check_options(convert: Callable[..., torch.nn.Module] | None, options: dict[str, Any], own: list[str]) -> None:
    """Refuse options that the converter has not; one of the user's own takes what it takes.

    Args:
        own: the arguments of initialize() itself, for the hint.

    Raises:
        OptionError: names the option, and the nearest that there is.
    """
    if convert is not None and not callable(convert):
        raise OptionError(f"convert={convert!r} is nothing that can be called; leave it out for fxamp.convert.")
    if not isinstance(options.get("overrides"), Mapping | None):
        raise OptionError(f"overrides={options['overrides']!r} must be a dict of module paths to colours.")
    if convert is None:
        known = inspect.signature(importlib.import_module("fxamp").convert).parameters
        check_names("initialize()", options, [*own, *(name for name in known if name not in (*own, *SET_BY_LEVEL))])


def low_of(chosen: Properties, models: list[torch.nn.Module], options: dict[str, Any]) -> torch.dtype | None:
    """The low dtype that the models will run in; None where nothing is converted."""
    if not _converts(chosen):
        return None
    device = next((tensor.device for model in models for tensor in model.parameters()), torch.device("cpu"))
    return resolve_dtype(chosen.cast_model_type or options.get("dtype"), device)


def _converts(chosen: Properties) -> bool:
    return chosen.opt_level in ("O2", "O3") or chosen.patch_torch_functions


def converted_all(
    models: list[torch.nn.Module],
    chosen: Properties,
    convert: Callable[..., torch.nn.Module] | None,
    options: dict[str, Any],
) -> list[torch.nn.Module]:
    """Every model as its level asks, each with its own example inputs where a list of them is given; all or none.

    Raises:
        CaptureError: of one of several models, with how to give example inputs to each.
    """
    options = dict(options)
    examples = options.pop("example_inputs", None)
    own = examples if isinstance(examples, list) else [examples] * len(models)
    if len(own) != len(models):
        raise OptionError(
            f"example_inputs is a list of {len(own)}, and there are {len(models)} models: give one for each, a tuple "
            "of arguments or None; a tuple in place of the list is for every model."
        )
    made = []
    before = [(tensor, tensor.data, tensor.grad) for model in models for tensor in _tensors(model)]
    for number, (model, example) in enumerate(zip(models, own, strict=True)):
        try:
            given = {} if example is None else {"example_inputs": example}
            made.append(converted(model, chosen, convert, {**options, **given}))
        except Exception as error:
            _put_back(before)
            if not isinstance(error, CaptureError) or len(models) == 1 or example is not None:
                raise
            raise CaptureError(
                f"{error} It is model {number} of {len(models)}: initialize(models, ..., example_inputs=[(x,), (y,)]) "
                "gives each its own, None where one needs none."
            ) from error
    return made


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_leaf)


def _put_back(before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> None:
    """Undo what O2 and O3 did to the models before the one that failed: they can be given to initialize() again."""
    storage = importlib.import_module("fxamp.model.storage")
    storage.put_back(storage.Lowered(*each) for each in before if is_stored_low(each[0]))


def converted(
    model: torch.nn.Module,
    chosen: Properties,
    convert: Callable[..., torch.nn.Module] | None,
    options: dict[str, Any],
) -> torch.nn.Module:
    """A model as its level asks; `convert` is fxamp.convert unless given."""
    if not _converts(chosen):
        if options["output_dtype"] != torch.float32:
            model.register_forward_hook(functools.partial(_cast_outputs, dtype=options["output_dtype"]))
        return model
    options = {"dtype": chosen.cast_model_type, "opt_level": chosen.opt_level, **options}
    overrides = {**_batchnorm_overrides(model, chosen), **(options.pop("overrides", None) or {})}
    if overrides:
        options["overrides"] = overrides
    # Looked up when needed: the runtime is below the converter, and works without it.
    package = importlib.import_module("fxamp") if convert is None or any(registry.values()) else None
    if package is not None and any(registry.values()):
        lists = options.get("lists") or package.OpLists.default()
        options["lists"] = lists.override(**{colour: tuple(names) for colour, names in registry.items()})
    if convert is None:
        assert package is not None
        convert = package.convert
    _check_takes(convert, options)
    return convert(model, **options)


def _check_takes(convert: Callable[..., torch.nn.Module], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(convert)
    except (TypeError, ValueError):  # builtins tell none
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        raise OptionError(
            f"convert={convert!r} cannot be called with the model and {', '.join(f'{name}=' for name in options)}: "
            f"{error}. Let it take **options."
        ) from None


def _cast_outputs(module: torch.nn.Module, args: Any, outputs: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda given: given.to(dtype) if given.is_floating_point() else given, outputs
    )


def _batchnorm_overrides(model: torch.nn.Module, chosen: Properties) -> dict[str, str]:
    """Batch norms by path, where the property differs from what the level does by itself."""
    own = {"O2": True, "O3": False}.get(chosen.opt_level)
    if chosen.keep_batchnorm_fp32 is None or chosen.keep_batchnorm_fp32 == own:
        return {}
    colour = "deny" if chosen.keep_batchnorm_fp32 else "allow"
    kind = torch.nn.modules.batchnorm._BatchNorm
    return {path: colour for path, module in model.named_modules() if path and isinstance(module, kind)}


def prepared(optimizer: torch.optim.Optimizer, chosen: Properties) -> torch.optim.Optimizer:
    """The optimizer to use: with masters where the level has them, and a step that knows of overflows."""
    if chosen.master_weights:
        optimizer = MasterWeightOptimizer(optimizer)
    setattr(optimizer, PENDING_FOUND_INF, [])
    setattr(optimizer, SCALED_BY, None)
    setattr(optimizer, STASH, [])
    run = optimizer.step

    @_disable_dynamo  # of a compiled training step
    @functools.wraps(run)
    def step(self: torch.optim.Optimizer, closure: None = None) -> Any:
        """Step, unless a scale_loss since the last step found a gradient that is not finite."""
        if closure is not None:
            raise OptionError(
                "apex's interface takes no closure: scale_loss() comes before the step. With fxamp.convert() and a "
                "LossScaler, scaler.step(optimizer, closure=...) takes one."
            )
        if getattr(self, SCALED_BY) is not None and gradients.has_any(self):
            raise StepOrderError(
                "step() was called while the gradients are scaled: scale_loss(..., delay_unscale=True) came last. The "
                "last backward before a step belongs into scale_loss(loss, optimizer); zero_grad() drops them."
            )
        found: list[torch.Tensor] = getattr(self, PENDING_FOUND_INF)
        if not found:
            return run()
        found_inf = any_of(found, found[0].device)
        found.clear()
        settle(self)
        returned = step_unless(self, found_inf, run)
        for parameter in gradients.parameters(self):
            mirror_gradient(parameter)  # scripts look at the gradients of masters now, or clear them
        return returned

    clear = optimizer.zero_grad

    @functools.wraps(clear)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and those that are set aside."""
        getattr(self, STASH).clear()
        setattr(self, SCALED_BY, None)
        clear(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # schedulers wrap a method
    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    return optimizer


def scaler_of(chosen: Properties, min_scale: float | None, max_scale: float) -> LossScaler:
    """One loss's scaler.

    Raises:
        OptionError: bounds that cannot be, under apex's names of them.
    """
    if chosen.loss_scale == "dynamic":
        floor = 2.0**-14 if min_scale is None else min_scale
        for name, bound in (("min_loss_scale", floor), ("max_loss_scale", max_scale)):
            checked_scale(name, bound, ANY_SCALE)
        first = min(max_scale, FIRST_SCALE)
        if floor > first:
            limit = f"max_loss_scale={max_scale:g}" if max_scale < FIRST_SCALE else f"the first scale, {first:g}"
            raise OptionError(
                f"min_loss_scale={floor:.10g} is above {limit}; lower it, or use loss_scale={floor:.10g}."
            )
        scaler = LossScaler(first, min_scale=floor, max_scale=max_scale)
    else:
        scaler = StaticLossScaler(checked_scale("loss_scale", chosen.loss_scale, ANY_SCALE))
    scaler.allows_half_gradients = not chosen.master_weights and chosen.opt_level in ("O2", "O3")
    return scaler
