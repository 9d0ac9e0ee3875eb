"""Which autocast a converted model runs under: none, or torch's where no graph can hold a call at O2 or O3.

A model that generates text hands its cache from call to call, and symbolic capture takes no objects. Dynamo, to which
O1 leaves such calls, would see the low weights as the model's own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from fxamp.dtypes import LOW_DTYPES
from fxamp.model.views import device_of
from fxamp.runtime.masters import is_stored_low


def outside_autocast(run: Callable[..., Any], *args: Any) -> Any:
    """A converted model inside an autocast region makes its own casts, and only those."""
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run(*args)
    return run(*args)


def run_low(module: nn.Module, options: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward as it is written, under torch.autocast and on the low weights.

    Args:
        module: converted at O2 or O3.
        options: of its conversion. At O3 floating inputs are made low, as the weights are. At O2 weights of norms,
            and others of one dimension, are read in float32: a norm of float32 values takes no low ones.

    Returns:
        What forward gives, low tensors in `options.output_dtype`.
    """
    base: Any = type(module)._fxamp_base  # type: ignore[attr-defined]
    if options.opt_level == "O3":
        args, kwargs = _floats_as(options.low, (args, kwargs), {torch.float32})
    with torch.autocast(device_of(module).type, dtype=options.low), _wide_vectors(module, options.opt_level):
        result = base.forward(module, *args, **kwargs)
    return result if options.output_dtype is None else _floats_as(options.output_dtype, result, {*LOW_DTYPES})


_NORMS = (nn.LayerNorm, nn.RMSNorm)  # those whose weights may have more than one dimension
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def _wide_vectors(module: nn.Module, opt_level: str) -> Iterator[None]:
    """Weights of norms are read in float32 at O2; other threads that ask for the same wait."""
    if opt_level == "O3":
        yield
        return
    with _one_at_a_time:
        norms = {weight for part in module.modules() if isinstance(part, _NORMS) for weight in part.parameters()}
        low = {path: weight for path, weight in module.named_parameters() if is_stored_low(weight)}
        wide = {path: weight.float() for path, weight in low.items() if weight.dim() < 2 or weight in norms}
        with _reparametrize_module(module, wide):
            yield


def _floats_as(dtype: torch.dtype, values: Any, replaced: set[torch.dtype]) -> Any:
    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in replaced else tensor

    return pytree.tree_map_only(torch.Tensor, converted, values)
