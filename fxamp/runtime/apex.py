"""apex.amp's interface on top of the converter, the loss scaler and the master-weight optimizer.

    from fxamp.runtime import apex as amp              # was: from apex import amp
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

Nothing of torch is patched: where apex replaced functions, the model's graph is rewritten. As in apex the
loss scalers belong to the process, one `initialize` sets them. Differences: an overflow also skips under a
static scale (apex wrote the inf into the weights), and whether a step is skipped is decided on the device.
"""

import collections
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxamp.errors import CheckpointError, FxampError, OptionError
from fxamp.runtime import gradients
from fxamp.runtime.apex_options import BRIEF, Properties, properties, table
from fxamp.runtime.apex_prepare import (
    IS_UNSCALED,
    PENDING_FOUND_INF,
    add_back,
    check_models,
    check_optimizers,
    converted,
    prepared,
    put_back,
    registry,
    scaler_of,
    stash,
)
from fxamp.runtime.fixed_scalers import NoOpLossScaler, StaticLossScaler
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scale_rule import ScaleRule, checked_scale
from fxamp.runtime.scaler import LossScaler

logger = logging.getLogger("fxamp")

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


class NotInitializedError(FxampError, RuntimeError):
    """scale_loss or state_dict was used before initialize."""


class _Session:
    """What one `initialize` set up."""

    def __init__(self, chosen: Properties | None, scalers: list[LossScaler]) -> None:
        self.properties = chosen
        self.scalers = scalers


_session: _Session | None = None


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    convert: Callable[..., torch.nn.Module] | None = None,
    **convert_options: Any,
) -> Any:
    """Convert models and prepare optimizers, as apex.amp.initialize does.

    Args:
        models, optimizers: one, or a list.
        enabled: False returns everything unchanged, and makes scale_loss pass the loss through.
        opt_level, cast_model_type, ..., loss_scale: see apex_options; None leaves the level's own value.
        cast_model_outputs: dtype of floating outputs; None is float32.
        num_losses: how many loss scalers; `scale_loss(..., loss_id=k)` picks one.
        verbosity: 0 leaves out the table of the chosen properties. What `convert` logs stays; FXAMP_LOG_LEVEL
            sets that.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; None is 2**-14.
        convert: what converts a model; None: fxamp.convert. It is called with dtype, opt_level, output_dtype,
            overrides, lists (where registered functions or batch norms ask for them) and `convert_options`.

    Returns:
        The converted models and the prepared optimizers, each as one or as a list, as given; the models alone where
        no optimizers were given. They replace what was given.

    Raises:
        OptionError: a property, model or optimizer that is not allowed; says what is.
        FxampError: whatever `convert` raises.
    """
    global _session
    if not enabled:
        _session = _Session(None, [NoOpLossScaler() for _ in range(num_losses)])
        return models if optimizers is None else (models, optimizers)
    chosen = properties(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    model_list = _as_list(models, torch.nn.Module, "model")
    optimizer_list = [] if optimizers is None else _as_list(optimizers, torch.optim.Optimizer, "optimizer")
    check_models(model_list)
    check_optimizers(optimizer_list)
    scalers = [scaler_of(chosen, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    if verbosity:
        logger.info("opt_level %s: %s\n%s", opt_level, BRIEF[opt_level], table(chosen))
    options = {**convert_options, "output_dtype": cast_model_outputs or torch.float32}
    models_converted = [converted(model, chosen, convert, options) for model in model_list]
    optimizers_prepared = [prepared(optimizer, chosen) for optimizer in optimizer_list]
    _session = _Session(chosen, scalers)
    models = models_converted if isinstance(models, list | tuple) else models_converted[0]
    if optimizers is None:
        return models
    return models, optimizers_prepared if isinstance(optimizers, list | tuple) else optimizers_prepared[0]


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: Optimizers,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the scaled loss; on exit gradients are unscaled, and checked for the next `optimizer.step()`.

    Gradients that stand from an earlier backward are added to the new ones, each unscaled by its own scale.
    After an error in the block they stand as before it. After the block
    `clip_grad_norm_(master_params(optimizer), max_norm)` clips true values.

    Args:
        loss: 0-d, of any floating dtype.
        optimizers: one, or a list: those whose parameters the loss reaches, as initialize() returned them.
        loss_id: which of the `num_losses` scalers.
        model: ignored, as in apex.
        delay_unscale: leave gradients scaled, because another backward at the same scale follows.
        delay_overflow_check: never skip because of this backward.

    Yields:
        The loss in float32 times the scale, to call `backward()` on.

    Raises:
        NotInitializedError: initialize was not called.
        OptionError: loss_id is out of range, or an optimizer did not come from initialize.
    """
    session = _current("scale_loss")
    if session.properties is None:
        yield loss
        return
    if not 0 <= loss_id < len(session.scalers):
        raise OptionError(
            f"loss_id={loss_id}: there are {len(session.scalers)} losses; initialize(num_losses=) sets it."
        )
    scaler = session.scalers[loss_id]
    every = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    for optimizer in every:
        if not hasattr(optimizer, IS_UNSCALED):
            raise OptionError(
                f"scale_loss() got a {type(optimizer).__name__} that initialize() did not return; use what it returned."
            )
    with _standing_gradients(every):
        yield scaler.scale(loss.float())
        if not delay_unscale:
            _unscale(scaler, every, delay_overflow_check)
    if not delay_unscale:
        scaler.update()


@contextlib.contextmanager
def _standing_gradients(optimizers: list[torch.optim.Optimizer]) -> Iterator[None]:
    """Set unscaled gradients aside; after an error they stand again, whatever happened to the new ones."""
    were_unscaled = [getattr(optimizer, IS_UNSCALED) for optimizer in optimizers]
    for optimizer in optimizers:
        stash(optimizer)
    try:
        yield
    except BaseException:
        for optimizer, was_unscaled in zip(optimizers, were_unscaled, strict=True):
            put_back(optimizer, was_unscaled)
        raise


def _unscale(scaler: LossScaler, optimizers: list[torch.optim.Optimizer], delay_overflow_check: bool) -> None:
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    found = [flag for optimizer in optimizers for flag in scaler._found_inf_per_device(optimizer).values()]
    for optimizer in optimizers:
        add_back(optimizer)
        setattr(optimizer, IS_UNSCALED, True)
        if not delay_overflow_check:
            getattr(optimizer, PENDING_FOUND_INF).extend(found)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The float32 tensors an optimizer updates, whose `.grad` is unscaled after scale_loss.

        torch.nn.utils.clip_grad_norm_(fxamp.master_params(optimizer), max_norm=1.0)

    Args:
        optimizer: any; of one that has no masters these are its parameters.

    Returns:
        Masters, and parameters that need none, in the order of the optimizer's groups.
    """
    if isinstance(optimizer, MasterWeightOptimizer):
        yield from optimizer.master_params()
    else:
        yield from gradients.parameters(optimizer)


def state_dict() -> dict[str, dict[str, float]]:
    """{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}, apex's format."""
    scalers = _current("state_dict").scalers
    return collections.OrderedDict(
        (
            f"loss_scaler{number}",
            {"loss_scale": scaler.get_scale(), "unskipped": scaler._get_growth_tracker()},
        )
        for number, scaler in enumerate(scalers)
    )


def load_state_dict(state: dict[str, dict[str, float]]) -> None:
    """Load apex's format; call it after `initialize` with the same level. A static scale becomes the one loaded.

    Raises:
        CheckpointError: a key that is no loss scaler's, or a value that is none of its states; nothing is changed.
        NotInitializedError: initialize was not called.
    """
    scalers = _current("load_state_dict").scalers
    unexpected = [key for key in state if not key.startswith("loss_scaler")]
    if unexpected:
        raise CheckpointError(f"Unexpected keys {unexpected}; apex's state has loss_scaler0, loss_scaler1, ...")
    if len(state) != len(scalers):
        logger.warning("the state has %d loss scalers, initialize() made %d", len(state), len(scalers))
    numbers = {key: _numbers_of(key, saved) for key, saved in state.items()}
    for number, scaler in enumerate(scalers):
        if f"loss_scaler{number}" in numbers and scaler.is_enabled():
            scale, unskipped = numbers[f"loss_scaler{number}"]
            now = {**scaler.state_dict(), "scale": scale, "_growth_tracker": unskipped}
            if isinstance(scaler, StaticLossScaler):
                now.update(min_scale=scale, max_scale=scale)
            LossScaler.load_state_dict(scaler, now)


def _numbers_of(key: str, saved: Any) -> tuple[float, int]:
    try:
        scale, unskipped = float(saved["loss_scale"]), int(saved["unskipped"])
        return checked_scale("loss_scale", scale, ScaleRule(min_scale=2.0**-149, max_scale=2.0**127)), unskipped
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{key} is {saved!r}, not a loss_scale and an unskipped: {error}") from error


def register_half_function(module: Any, name: str) -> None:
    """Run `module.name` in low precision; call it before initialize."""
    _register("allow", module, name)


def register_float_function(module: Any, name: str) -> None:
    """Run `module.name` in float32; call it before initialize."""
    _register("deny", module, name)


def register_promote_function(module: Any, name: str) -> None:
    """Run `module.name` in the widest precision of its inputs; call it before initialize."""
    _register("infer", module, name)


def half_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run a function of yours in low precision."""
    return _registered("allow", function)


def float_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run a function of yours in float32."""
    return _registered("deny", function)


def promote_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: run a function of yours in the widest precision of its inputs."""
    return _registered("infer", function)


# Internals


def _current(called: str) -> _Session:
    if _session is None:
        raise NotInitializedError(
            f"{called}() was called before initialize(): "
            "model, optimizer = initialize(model, optimizer, opt_level=...) comes first."
        )
    return _session


def _as_list(given: Any, kind: type, name: str) -> list[Any]:
    every = list(given) if isinstance(given, list | tuple) else [given]
    for one in every:
        if not isinstance(one, kind):
            raise OptionError(f"{name}s must be a {name} or a list of {name}s, got a {type(one).__name__}.")
    return every


def _register(colour: str, module: Any, name: str) -> None:
    function = getattr(module, name, None)
    if function is None:
        raise OptionError(f"No function named {name} in module {getattr(module, '__name__', module)}.")
    _registered(colour, function, f"{getattr(module, '__name__', type(module).__name__)}.{name}")


def _registered(colour: str, function: Callable[..., Any], path: str | None = None) -> Callable[..., Any]:
    registry[colour].append(path or f"{function.__module__}.{function.__qualname__}")
    return function
