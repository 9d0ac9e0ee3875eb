"""From what a user writes to the canonical name of an op."""

import functools
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import _symbolic_trace

from fxamp.errors import OpListError, nearest
from fxamp.opnames import canonical_name, is_qualified, is_torch_op, module_name
from fxamp.spellings import ALIASES


def op_name(op: str | Callable[..., Any], listed: Iterable[str], where: str = "") -> str:
    """Canonical name of an op as a user names it.

        op_name(torch.nn.Softmax, lists) == op_name("torch.nn.functional.softmax", lists) == "softmax"
        op_name("nn.Softmax", lists) == op_name("F.softmax", lists) == op_name("aten.softmax", lists) == "softmax"
        op_name("my_project.fused_gemm", lists) == "my_project.fused_gemm"

    Raises:
        OpListError: a name that is neither torch's nor a dotted path or `ns::op`; hints at one of `listed`.
    """
    if not isinstance(op, str) and (not callable(op) or isinstance(op, torch.nn.Module)):
        kind = f"a module of class {type(op).__name__}" if isinstance(op, torch.nn.Module) else repr(op)
        raise OpListError(f"{where}{kind} names no op. Give a name, a function or a class; overrides= take paths.")
    name = _from_string(op) if isinstance(op, str) else _from_object(op)
    if name is None:
        last = re.split(r"[.:]", str(op))[-1]
        raise OpListError(
            f"{where}{op!r} is not an op of torch.{nearest(last, [*listed, *ALIASES])} "
            "Other functions and classes are named by dotted path, other libraries' ops by ns::op."
        )
    return name


def entered(op: str | Callable[..., Any], name: str) -> str | None:
    """Why a list that names this op changes nothing: a capture goes into a plain Python function, whose ops have lists.

    None for what a graph can hold as one op, and for a name that no loaded module has.
    """
    if "." not in name or is_torch_op(name):
        return None
    function = _loaded(op) if isinstance(op, str) else op
    if not isinstance(function, types.FunctionType):
        return None
    if (id(function.__globals__), function.__name__) in _symbolic_trace._wrapped_fns_to_patch:
        return None
    return (
        f"{name!r} is a Python function, which is no op of a graph: capture enters it, and the lists decide about the "
        "ops inside. To choose its precision, cast at its first line (x.float()), decorate it with float_function, "
        "half_function or promote_function of fxamp.runtime.apex and use its initialize(), or give it to torch.fx.wrap."
    )


def _loaded(path: str) -> Any:
    """What has a dotted path in the modules that are loaded, None where nothing has."""
    owner, _, last = path.rpartition(".")
    if not owner:
        return None
    return getattr(sys.modules.get(owner) or _loaded(owner), last, None)


def _from_object(op: Callable[..., Any]) -> str:
    """A module class of torch is the op it runs; any other class is itself, not the base that it extends."""
    if inspect.isclass(op) and op.__module__.startswith("torch.nn."):
        return module_name(op)
    return canonical_name(op)


# What users write for modules of torch; a package of theirs with such a name is found where torch has no such thing.
_SHORT = {
    "torch.": "torch.",
    "aten::": "torch.ops.aten.",
    "aten.": "torch.ops.aten.",
    "ops.aten.": "torch.ops.aten.",
    "nn.": "torch.nn.",
    "nn.functional.": "torch.nn.functional.",
    "functional.": "torch.nn.functional.",
    "F.": "torch.nn.functional.",
    "Tensor.": "torch.Tensor.",
}


def _from_string(text: str) -> str | None:
    """None where nothing has that name."""
    for short, whole in _SHORT.items():
        if text.startswith(short):
            target = _torch_attribute(whole + text.removeprefix(short))
            if callable(target):
                return _from_object(target)
    name = text.removeprefix("aten::")
    if is_qualified(name):
        return None if _is_torchs(name) else name
    name = canonical_name(name)
    return name if is_torch_op(name) else None


def _is_torchs(path: str) -> bool:
    """Whether a dotted path can only mean torch: it starts as torch does, and no package has that name."""
    first = path.partition(".")[0]
    if not path.startswith(tuple(_SHORT)):
        return False
    return first == "torch" or (first not in sys.modules and importlib.util.find_spec(first) is None)


def _torch_attribute(path: str) -> Any:
    try:
        return functools.reduce(getattr, path.split(".")[1:], torch)
    except AttributeError:
        return None
