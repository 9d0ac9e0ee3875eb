"""Which modules stay whole in a captured graph."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from fxamp.capture.recurrent import is_recurrent
from fxamp.ir import ENGINE
from fxamp.module_hooks import has_hooks

# Modules that keep state between calls or read `self.training` themselves; subclasses too (timm's
# BatchNormAct2d traced into would move `num_batches_tracked` at trace time). Of recurrent layers those that have a
# forward of their own.
_STATEFUL = (_NormBase, _DropoutNd, nn.RNNBase, nn.RNNCellBase)
# Python control flow on values that no example can decide.
_OPAQUE = (nn.AdaptiveLogSoftmaxWithLoss,)

# What torch keeps in dictionaries of each module: parameters, buffers, children, hooks.
TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is called as a whole: it keeps state, or hooks on it must fire."""
    if has_hooks(module) or is_boundary(module) or isinstance(module, torch.jit.ScriptModule):
        return True
    return isinstance(module, (*_STATEFUL, *_OPAQUE)) and not is_recurrent(module)


def is_boundary(module: nn.Module) -> bool:
    """Whether the module is converted by itself, and stays whole in the graph around it."""
    return bool(getattr(module.__dict__.get(ENGINE), "is_boundary", False))
