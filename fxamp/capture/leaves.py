"""Which modules stay whole in a captured graph."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.weight_norm import WeightNorm

from fxamp.capture.recurrent import is_recurrent
from fxamp.ir import ENGINE

# Modules that keep state between calls or read `self.training` themselves; subclasses too (timm's
# BatchNormAct2d traced into would move `num_batches_tracked` at trace time).
_STATEFUL = (_NormBase, _DropoutNd, nn.RNNBase, nn.RNNCellBase)
# Python control flow on values that no example can decide.
_OPAQUE = (nn.AdaptiveLogSoftmaxWithLoss,)

# Hooks that only compute a weight from parameters are traced with the forward they stand before.
_TRACED_HOOKS = (WeightNorm,)

# What torch keeps in dictionaries of each module: parameters, buffers, children, hooks.
TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is called as a whole: it keeps state, or hooks on it must fire."""
    if has_hooks(module) or is_boundary(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    return isinstance(module, (*_STATEFUL, *_OPAQUE)) and not is_recurrent(module)


def is_boundary(module: nn.Module) -> bool:
    """Whether the module is converted by itself, and stays whole in the graph around it."""
    return bool(getattr(module.__dict__.get(ENGINE), "is_boundary", False))


def has_hooks(module: nn.Module) -> bool:
    """Whether anybody registered a forward or backward hook on the module that a graph could not hold."""
    return bool(hooks_on(module))


def hooks_on(module: nn.Module) -> list[object]:
    """Those hooks, in their order."""
    return [hook for hooks in hook_dictionaries(module) for hook in hooks.values() if not is_traced_hook(hook)]


def is_traced_hook(hook: object) -> bool:
    """Whether a hook is a part of the model's own forward: an old weight_norm, or one that transformers sets to collect
    hidden states for the forward that is running."""
    return isinstance(hook, _TRACED_HOOKS) or str(getattr(hook, "__module__", "")).startswith("transformers.")


def recomputed_weights(module: nn.Module) -> list[str]:
    """Names of the attributes that the module's own hooks compute anew before each forward (old weight_norm)."""
    return [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, _TRACED_HOOKS)]


def hook_dictionaries(module: nn.Module) -> list[dict[int, object]]:
    """The module's hook dictionaries; hooks that are added later appear in them."""
    return [module.__dict__[name] for name in HOOKS if name in module.__dict__]
