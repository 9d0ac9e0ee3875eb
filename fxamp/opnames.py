"""One canonical name for an op, however the graph spells it."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.spellings import ALIASES, MODULES, ONE_MODULE, PREFIXES

# Dynamo writes numpy's functions, methods and operators as functions of this module.
_DYNAMOS_NUMPY = "torch._dynamo.utils"


def canonical_name(target: Callable[..., Any] | str) -> str:
    """The one name of what an fx node calls.

        canonical_name(operator.iadd) == canonical_name("add_") == "add"
        canonical_name(torch.ops.aten._softmax.default) == "softmax"
        canonical_name(torch.fft.rfft) == "fft_rfft"
        canonical_name(torch.ops.torchvision.roi_align.default) == "torchvision::roi_align"
        canonical_name(MyFunction.apply) == "pkg.module.MyFunction"

    Args:
        target: the `target` of a `call_function` node, or the method name of a `call_method` node.

    Returns:
        A plain name for torch's own ops, `ns::op` for ops of other libraries, and a dotted path for
        Python functions and classes that are not torch's.
    """
    if isinstance(target, str):
        return _plain(target)
    registered = _registered_name(target)
    if registered is not None:
        namespace, _, name = registered.partition("::")
        return _plain(name) if namespace == "aten" else registered
    if isinstance(target, functools.partial):
        return canonical_name(target.func)
    if _is_function_apply(target):
        return dotted_path(target.__self__)  # type: ignore[attr-defined]
    return _python_name(target)


def module_name(cls: type) -> str:
    """The op a leaf module runs: the nearest of its base classes that `MODULES` names, else its dotted path.

    module_name(nn.SyncBatchNorm) == "batch_norm"
    """
    bases = (base.__name__ for base in cls.__mro__ if base.__module__.startswith("torch.nn."))
    return next((MODULES[base] for base in bases if base in MODULES), dotted_path(cls))


def dotted_path(target: Callable[..., Any]) -> str:
    """Where Python finds `target`: "pkg.module.Class.method"; of a nameless object, its class's path.

    A module of a library that comes under several names (`ONE_MODULE`) has one here.
    """
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return dotted_path(type(target))
    module = getattr(target, "__module__", None)
    module = ONE_MODULE.get(str(module).rpartition(".")[2], module)
    return f"{module}.{name}" if module else str(name)


def is_qualified(name: str) -> bool:
    """Whether `name` is a dotted path or `ns::op`: not torch's, so only the user can know that it exists."""
    return "." in name or "::" in name


@functools.cache
def is_torch_op(name: str) -> bool:
    """Whether this torch has an op with that canonical name, in any namespace where ops live."""
    spellings = (name, f"{name}_", f"__{name}__", *_spellings(name))
    return any(_exists(spelling) for spelling in spellings)


def _plain(name: str) -> str:
    if name.startswith("__"):
        return ALIASES.get(name, name)
    name = name.removesuffix("_")
    return ALIASES.get(name, name)


def _registered_name(target: Callable[..., Any]) -> str | None:
    """`namespace::op` of an op in torch's dispatcher, or of a `torch.library.custom_op`."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.__name__}"
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return target._qualname
    return None


def _is_function_apply(target: Callable[..., Any]) -> bool:
    owner = getattr(target, "__self__", None)
    return inspect.isclass(owner) and issubclass(owner, torch.autograd.Function)


def _python_name(target: Callable[..., Any]) -> str:
    name = getattr(target, "__name__", "")
    module = _module_of(target)
    if inspect.isclass(target) and module != "builtins":
        return dotted_path(target)
    if module in ("builtins", "_operator"):
        return _plain(name)
    if module != "torch" and not module.startswith("torch."):
        return dotted_path(target)
    if module == _DYNAMOS_NUMPY:
        return f"numpy.{name.removeprefix('wrapped_')}"
    if inspect.ismethod(target) and not isinstance(target.__self__, torch.Tensor):
        return dotted_path(target)
    for package, prefix in PREFIXES.items():
        if isinstance(target, types.FunctionType) and f"{module}.".startswith(f"{package}."):
            return prefix + name
    return _plain(name)


def _module_of(target: Callable[..., Any]) -> str:
    """The module's name; descriptors of Tensor and getters of its attributes have none and are torch's."""
    module = getattr(target, "__module__", None)
    if module:
        return str(module)
    owner = getattr(target, "__objclass__", None) or getattr(target, "__self__", None)
    owner = owner if inspect.isclass(owner) else type(owner)
    return "torch" if owner.__name__ in ("TensorBase", "getset_descriptor", "property") else str(owner.__module__)


@functools.cache
def _spellings_by_name() -> dict[str, list[str]]:
    spellings: dict[str, list[str]] = {}
    for spelling, name in ALIASES.items():
        spellings.setdefault(name, []).append(spelling)
    return spellings


def _spellings(name: str) -> list[str]:
    return _spellings_by_name().get(name, [])


def _exists(name: str) -> bool:
    return (
        any(hasattr(namespace, name) for namespace in _namespaces())
        or hasattr(torch.ops.aten, name)
        or name in MODULES.values()
        or any(_exists_in_package(package, prefix, name) for package, prefix in PREFIXES.items())
    )


@functools.cache
def _namespaces() -> tuple[Any, ...]:
    import builtins
    import operator

    import torch.nn.attention

    functions = (
        torch,
        torch.Tensor,
        nn.functional,
        nn.init,
        torch._VF,
        torch._C._nn,
        torch._C,
        torch.amp.autocast_mode,
        torch._C._autograd,
        torch.nn.attention,
    )
    return (*functions, operator, builtins)


def _exists_in_package(package: str, prefix: str, name: str) -> bool:
    if not name.startswith(prefix):
        return False
    path = package.removeprefix("torch.").split(".")
    return hasattr(functools.reduce(getattr, path, torch), name.removeprefix(prefix))
