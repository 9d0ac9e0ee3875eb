"""What transformers collects of a running forward: hooks on its layers put hidden states where it looks for them."""

import sys

from torch import nn

from fxamp.module_hooks import hook_dictionaries

_COLLECTING = "transformers.utils.output_capturing"
COLLECTED = (
    "transformers collects hidden states, or attentions, of its layers for the forward around it. Convert the model "
    "whose forward that is"
)


def is_collected_from(module: nn.Module) -> bool:
    """Whether a forward around a module's is to have what modules inside of it give. A graph of it alone would not do.

    transformers knows of the innermost forward that collects by a context variable; its hooks stay on the modules.
    """
    collector = getattr(sys.modules.get(_COLLECTING), "_active_collector", None)
    if collector is None or not collector.get():
        return False
    inside = (hooks.values() for inner in module.modules() if inner is not module for hooks in hook_dictionaries(inner))
    return any(getattr(hook, "__module__", "") == _COLLECTING for hooks in inside for hook in hooks)
