"""Hooks on modules: those that must fire, and those that are a part of the model's own forward."""

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

# Hooks that only compute a weight from parameters are traced with the forward they stand before.
_TRACED_HOOKS = (WeightNorm,)

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


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


def makes_weight(hook: object) -> bool:
    """Whether a hook of torch's own sets a weight of the module that it is on before each forward."""
    return isinstance(hook, (*_TRACED_HOOKS, SpectralNorm, BasePruningMethod))


def recomputed_weights(module: nn.Module) -> list[str]:
    """Names of the attributes that the module's own hooks compute anew before each forward (old weight_norm)."""
    return [hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, _TRACED_HOOKS)]


def hook_dictionaries(module: nn.Module) -> list[dict[int, object]]:
    """The module's hook dictionaries; hooks that are added later appear in them."""
    return [module.__dict__[name] for name in HOOKS if name in module.__dict__]
