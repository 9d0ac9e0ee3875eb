"""Leaf modules, which stay whole in a graph, on fake tensors: each runs as a copy of itself, without its hooks.

What forward sets on the module, or puts into its lists and dictionaries, it sets on the copy. What it writes into its
arguments the graph around it would not see: that is refused.
"""

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree as pytree

from fxamp.derived import quiet
from fxamp.errors import CaptureError
from fxamp.fake_limits import is_a_limit
from fxamp.ir import ENGINE
from fxamp.module_hooks import HOOKS, has_hooks, is_traced_hook
from fxamp.recurrent_fakes import without_cudnn
from fxamp.references import copy_slots, repointed

# Attribute of a copy that runs in a module's place: the module.
TWIN_OF = "_fxamp_twin_of"

# What torch keeps in each module: tensors, parts and hooks, each with a rule of its own.
_OF_TORCH = frozenset(vars(nn.Module()))

# Modules that may write into their input and say so: `inplace=True`.
_WRITERS = (nn.modules.dropout._DropoutNd,)


def call_leaf(root: nn.Module, path: str, args: Any, kwargs: Any, fake_of: Callable[[Any], Any]) -> Any:
    """Call a leaf module's plain forward (no hooks) on a copy of it whose state is fake.

    Args:
        root: the model that has it at `path`.
        fake_of: gives the fake of a parameter or buffer.

    Raises:
        CaptureError: it writes into an argument, or fails without its hooks.
    """
    module = root.get_submodule(path)
    containers: dict[int, Any] = {}
    args, kwargs = _own_containers((args, kwargs), containers)  # those of a graph's node refuse to be written
    twin = _without_counting(twin_of(module, fake_of, containers))
    held = _held_by((args, kwargs))
    given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    before = [value._version for value in given]
    try:
        with without_cudnn(module):
            result = twin.forward(*args, **kwargs)
    except Exception as error:
        if is_a_limit(error) or not _needs_hooks(module, given):
            raise
        raise CaptureError(
            f"{path!r} has hooks, and without them it fails ({error}), as a graph is made without running them. "
            "Mark the hooks with @torch.compiler.disable, and use capture='auto' or 'dynamo', which runs them."
        ) from error
    if [value._version for value in given] != before and not isinstance(module, _WRITERS):
        raise CaptureError(
            f"{path!r} stays whole (hooks on it, or boundaries=) and writes into an argument, which the graph "
            "around it cannot see. Return the new value from it instead."
        )
    if _held_by((args, kwargs)) != held:
        raise CaptureError(
            f"{path!r} stays whole (hooks on it, or boundaries=) and adds to or changes a list or dictionary that "
            "it is given, which the graph around it cannot see. Return the new value from it instead."
        )
    if _holds_any(result, set(map(id, containers.values()))):
        raise CaptureError(
            f"{path!r} stays whole (hooks on it, or boundaries=) and gives back a list or dictionary that it is "
            "given or keeps, and writes into that are none of a graph's. Return a new one from it instead."
        )
    return result


def holds_container(arguments: Any) -> bool:
    """Whether a list or dictionary is among arguments, which the module that is given it may write."""
    if isinstance(arguments, (list, dict)):
        return True
    return isinstance(arguments, tuple) and any(map(holds_container, arguments))


# Containers that are copied -> what the copy is: those of a graph's arguments refuse to be written.
_COPIED: dict[type, Any] = {
    **{kind: kind for kind in (list, dict, set, deque, OrderedDict, defaultdict, Counter)},
    immutable_list: list,
    immutable_dict: dict,
}


def _own_containers(value: Any, known: dict[int, Any]) -> Any:
    """The same values in containers that may be written.

    Args:
        known: by the id of each container that was met: the one in its place.
    """
    if type(value) is tuple:
        return tuple(_own_containers(each, known) for each in value)
    if (kind := _COPIED.get(type(value))) is None:
        return value
    if id(value) not in known:
        own: Any = copy.copy(value) if kind is type(value) else kind(value)
        known[id(value)] = own
        places = list(own) if isinstance(own, dict) else range(len(own)) if not isinstance(own, set) else ()
        for place in places:
            own[place] = _own_containers(own[place], known)
    return known[id(value)]


def _holds_any(value: Any, containers: set[int]) -> bool:
    """Whether a value is, or has in it, one of these lists and dictionaries, by id."""
    if id(value) in containers:
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(_holds_any(part, containers) for part in parts)


def _held_by(value: Any) -> Any:
    """What lists and dictionaries hold: equal as long as those hold the same objects."""
    if isinstance(value, (list, tuple)):
        return list(map(_held_by, value))
    if isinstance(value, dict):
        return [(name, _held_by(each)) for name, each in value.items()]
    return id(value)


def _without_counting(twin: nn.Module) -> nn.Module:
    """The twin, with a momentum for batch norms that average over all batches: their number, which no fake has,
    decides on no size or dtype."""
    for part in twin.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.momentum is None:
            part.momentum = 0.0
    return twin


def _needs_hooks(module: nn.Module, given: list[torch.Tensor]) -> bool:
    """Whether hooks may be what a call lacks; arguments of several dtypes are a reason to fail of their own."""
    dtypes = {value.dtype for value in given if value.is_floating_point()}
    return len(dtypes) < 2 and any(map(has_hooks, module.modules()))


def twin_of(module: nn.Module, state_of: Callable[[Any], Any], containers: dict[int, Any]) -> nn.Module:
    """A copy of a module and of those inside it, with other tensors in the places of its parameters and buffers.

    What forward sets is set on the copy, and what it puts into lists and dictionaries of the module into the copy's, so
    that other threads can run the module meanwhile. Converted models in it run the forwards that the user wrote. Hooks
    are the module's own alone: its methods, functions that hold it, and those that compute its weights; others would
    write elsewhere. A module of torch.jit, whose tensors cannot be exchanged, is copied as it is.

    Args:
        state_of: gives the tensor to put in the place of a parameter or buffer.
        containers: takes the module's containers, by their ids, and those in their places.
    """
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    compiled = [part for part in module.modules() if isinstance(part, torch.jit.ScriptModule)]
    twins: dict[int, nn.Module] = {id(part): object.__new__(quiet(type(part))) for part in parts}
    twins.update((id(part), copy.deepcopy(part)) for part in compiled)
    for part in parts:
        own = {name: repointed(value, twins) for name, value in part.__dict__.items() if name != ENGINE}
        own.update((name, _own_containers(own[name], containers)) for name in own.keys() - _OF_TORCH)
        for name in ("_parameters", "_buffers"):
            own[name] = {key: state_of(value) for key, value in part.__dict__[name].items()}
        for name in HOOKS:
            hooks = {key: (hook, repointed(hook, twins)) for key, hook in part.__dict__[name].items()}
            is_own = {key: is_traced_hook(hook) or new is not hook for key, (hook, new) in hooks.items()}
            own[name] = OrderedDict((key, new) for key, (_, new) in hooks.items() if is_own[key])
        twins[id(part)].__dict__.update(own, **{TWIN_OF: part})
        copy_slots(part, twins[id(part)])
    return twins[id(module)]
