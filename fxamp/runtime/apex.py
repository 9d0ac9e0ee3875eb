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

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxamp.errors import FxampError, OptionError
from fxamp.runtime import gradients
from fxamp.runtime.apex_casts import (
    casting,
    casts_disabled,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from fxamp.runtime.apex_gradients import SCALED_BY, add_back, check_scaled_by, leave_scaled, standing_gradients
from fxamp.runtime.apex_options import BRIEF, LEVELS, check_output_dtype, check_whole, properties, table
from fxamp.runtime.apex_prepare import (
    PENDING_FOUND_INF,
    check_models,
    check_optimizers,
    check_options,
    converted_all,
    low_of,
    prepared,
    scaler_of,
)
from fxamp.runtime.apex_state import AmpState, Session, load, saved
from fxamp.runtime.arguments import checked_flag
from fxamp.runtime.fixed_scalers import NoOpLossScaler
from fxamp.runtime.master_weights import MasterWeightOptimizer
from fxamp.runtime.scaler import LossScaler

__all__ = [
    "NotInitializedError",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]

log = logging.getLogger("fxamp")

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


class NotInitializedError(FxampError, RuntimeError):
    """scale_loss or state_dict was used before initialize."""


_amp_state = AmpState()


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool | str = True,
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
        enabled: False returns everything unchanged, and makes scale_loss pass the loss through. Third as in apex;
            a level that stands here is the opt_level: `initialize(model, optimizer, "O2")`.
        opt_level, cast_model_type, ..., loss_scale: see apex_options; None leaves the level's own value.
        cast_model_outputs: dtype of floating outputs; None is float32, and at O0 as they come.
        num_losses: how many loss scalers; `scale_loss(..., loss_id=k)` picks one.
        verbosity: 0 leaves out the table of the chosen properties. What `convert` logs stays; FXAMP_LOG_LEVEL
            sets that.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale; None is 2**-14.
        convert: what converts a model; None: fxamp.convert. It is called with dtype, opt_level, output_dtype,
            overrides, lists (where registered functions or batch norms ask for them) and `convert_options`.
        convert_options: further arguments of fxamp.convert. `example_inputs` may be a list, one for each of `models`:
            `initialize([net, critic], example_inputs=[(noise,), (images,)])`.

    Returns:
        The converted models and the prepared optimizers, each as one or as a list, as given; the models alone where
        no optimizers were given. They replace what was given.

    Raises:
        OptionError: a property, model, optimizer or option of convert that is not allowed; says what is.
        FxampError: whatever `convert` raises.
    """
    if isinstance(enabled, str) and enabled in LEVELS:
        opt_level, enabled = enabled, True
    check_options(convert, convert_options, list(inspect.signature(initialize).parameters)[:-1])
    check_whole("num_losses", num_losses, 1)
    check_whole("verbosity", int(verbosity) if isinstance(verbosity, bool) else verbosity, 0)
    check_output_dtype(cast_model_outputs)
    if not checked_flag("enabled", enabled):
        casting.low = None
        _amp_state.session = Session(None, [NoOpLossScaler() for _ in range(num_losses)])
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
    check_optimizers(optimizer_list, chosen)
    scalers = [scaler_of(chosen, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    if verbosity:
        log.info("opt_level %s: %s\n%s", opt_level, BRIEF[opt_level], table(chosen))
    options = {**convert_options, "output_dtype": cast_model_outputs or torch.float32}
    low = low_of(chosen, model_list, options)
    with casting.instead(low):
        models_converted = converted_all(model_list, chosen, convert, options)
    casting.low = low
    optimizers_prepared = [prepared(optimizer, chosen) for optimizer in optimizer_list]
    _amp_state.session = Session(chosen, scalers, models_converted)
    _amp_state.verbosity = verbosity
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
    After an error in the block they stand as before it (where scaled ones stood, of a delay_unscale, those of the
    broken backward are among them). After the block
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
        OptionError: the loss is no tensor, loss_id is out of range, a flag is none, there is no optimizer, or one did
            not come from initialize.
        StepOrderError: gradients stand scaled, by another loss's delay_unscale, or another block of the same optimizer
            is open.
    """
    session = _current("scale_loss")
    if session.properties is None:
        yield loss
        return
    if not isinstance(loss, torch.Tensor):
        raise OptionError(f"scale_loss() got a {type(loss).__name__} as loss; give the tensor, without .item().")
    check_whole("loss_id", loss_id, 0)
    if loss_id >= len(session.scalers):
        raise OptionError(
            f"loss_id={loss_id}: there are {len(session.scalers)} losses; initialize(num_losses=) sets it."
        )
    delay_unscale = checked_flag("delay_unscale", delay_unscale)
    delay_overflow_check = checked_flag("delay_overflow_check", delay_overflow_check)
    scaler = session.scalers[loss_id]
    every = _initialized(optimizers)
    check_scaled_by(every, loss_id)
    with standing_gradients(every, scaler, loss_id):
        yield scaler.scale(loss.float())
        if delay_unscale:
            leave_scaled(every, scaler)
        else:
            _unscale(scaler, every, delay_overflow_check)
    if not delay_unscale:
        scaler.update()


def _initialized(optimizers: Any) -> list[torch.optim.Optimizer]:
    every = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    if not every:
        raise OptionError("scale_loss() got no optimizer; give those whose parameters the loss reaches.")
    for optimizer in every:
        if not hasattr(optimizer, SCALED_BY):
            raise OptionError(
                f"scale_loss() got a {type(optimizer).__name__} that initialize() did not return; use what it returned."
            )
    return every


def _unscale(scaler: LossScaler, optimizers: list[torch.optim.Optimizer], delay_overflow_check: bool) -> None:
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    found = [flag for optimizer in optimizers for flag in scaler._found_inf_per_device(optimizer).values()]
    for optimizer in optimizers:
        add_back(optimizer)
        setattr(optimizer, SCALED_BY, None)
        if not delay_overflow_check:
            getattr(optimizer, PENDING_FOUND_INF).extend(found)


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The float32 tensors an optimizer updates, whose `.grad` is unscaled after scale_loss.

    Without a scaler it is there after `loss.backward()`, where they are asked for anew.

        torch.nn.utils.clip_grad_norm_(fxamp.master_params(optimizer), max_norm=1.0)

    Args:
        optimizer: any; of one that has no masters these are its parameters.

    Returns:
        Masters, and parameters that need none, in the order of the optimizer's groups.
    """
    if not hasattr(optimizer, "param_groups"):
        raise OptionError(f"master_params() got a {type(optimizer).__name__}; give it an optimizer.")
    if isinstance(optimizer, MasterWeightOptimizer):
        yield from optimizer.master_params()
    else:
        yield from gradients.parameters(optimizer)


def state_dict() -> dict[str, dict[str, float]]:
    """{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}, apex's format."""
    return saved(_current("state_dict").scalers)


def load_state_dict(state: dict[str, dict[str, float]]) -> None:
    """Load apex's format; call it after `initialize` with the same level. A static scale becomes the one loaded.

    Raises:
        CheckpointError: a key that is no loss scaler's, or a value that is none of its states; nothing is changed.
        NotInitializedError: initialize was not called.
    """
    load(_current("load_state_dict").scalers, state)


def disable_casts() -> contextlib.AbstractContextManager[None]:
    """Inside, models that were converted at O1 run as they are written, in float32, and registered functions cast
    nothing.

        with amp.disable_casts():
            exact = model(x)

    Models of O2 and O3 run as ever: their weights are low.
    """
    session = _amp_state.session
    casts = session is not None and session.properties is not None and session.properties.opt_level == "O1"
    return casts_disabled(session.models() if session is not None and casts else [])


def init(*args: Any, **kwargs: Any) -> Any:
    """apex's old interface, which this module has not.

    Raises:
        OptionError: always; says what to use.
    """
    raise OptionError(
        "init() is apex's old interface: it patches torch's functions for every model. Here models are converted: "
        "model, optimizer = initialize(model, optimizer, opt_level='O1'), and scale_loss() in place of "
        "handle.scale_loss()."
    )


# Internals


def _current(called: str) -> Session:
    if _amp_state.session is None:
        raise NotInitializedError(
            f"{called}() was called before initialize(): "
            "model, optimizer = initialize(model, optimizer, opt_level=...) comes first."
        )
    return _amp_state.session


def _as_list(given: Any, kind: type, name: str) -> list[Any]:
    every = list(given) if isinstance(given, list | tuple) else [given]
    for one in every:
        if not isinstance(one, kind):
            raise OptionError(f"{name}s must be a {name} or a list of {name}s, got a {type(one).__name__}.")
    return every
