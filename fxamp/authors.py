"""What the authors of custom functions and ops have torch.autocast do with their inputs.

    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float16)      # on the forward of an autograd.Function
    torch.library.register_autocast("mylib::attention", "cuda", torch.float16)

Both cast all floating inputs and switch autocast off inside. Here nothing is switched on: a rule keeps their word.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef, _maybe_get_opdef
from torch.utils import _pytree as pytree

_OPS = CustomOpDef, torch._ops.OpOverload, torch._ops.OpOverloadPacket
_decorated: Any = torch.amp.custom_fwd(lambda: None, device_type="cpu")


def _function_of(target: Any) -> type[torch.autograd.Function] | None:
    """The class whose `apply` is called."""
    owner = getattr(target, "__self__", None)
    return owner if inspect.isclass(owner) and issubclass(owner, torch.autograd.Function) else None


def cast_by_autocast(function: Any, device: str) -> torch.dtype | None:
    """The dtype that a function or an op is to have its inputs in on a device, None where its author says nothing."""
    if (owner := _function_of(function)) is not None:
        return _cast_by_forward(owner.forward, device)
    if isinstance(function, torch._ops.OpOverloadPacket):
        function = getattr(function, "default", None)
    if not isinstance(function, CustomOpDef | torch._ops.OpOverload):
        return None
    op: Any = _maybe_get_opdef(function)
    if op is None:
        return None
    # a table by device since torch 2.13
    given = (
        op._autocast_dtype.get(device) if hasattr(op, "_autocast_dtype") else vars(op).get(f"_autocast_{device}_dtype")
    )
    return given if isinstance(given, torch.dtype) else None


def _cast_by_forward(forward: Any, device: str) -> torch.dtype | None:
    while forward is not None:
        if getattr(forward, "__code__", None) is _decorated.__code__:
            cells = (cell.cell_contents for cell in forward.__closure__)
            held = dict(zip(forward.__code__.co_freevars, cells, strict=True))
            return held["cast_inputs"] if held["device_type"] == device else None
        forward = getattr(forward, "__wrapped__", None)
    return None


def run_as_cast(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function gives where float32 stands for what its author has the inputs cast to."""
    if _function_of(function) is None and not isinstance(function, _OPS):
        return function(*args, **kwargs)
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    dtype = cast_by_autocast(function, tensors[0].device.type) if tensors else None
    if dtype is None or all(value.dtype != torch.float32 for value in tensors):
        return function(*args, **kwargs)
    args, kwargs = _in_place_of((args, kwargs), torch.float32, dtype)
    return _in_place_of(function(*args, **kwargs), dtype, torch.float32)


def _in_place_of(values: Any, old: torch.dtype, new: torch.dtype) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda value: value.to(new) if value.dtype == old else value, values)
