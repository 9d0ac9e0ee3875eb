"""Powers of negative numbers: torch.fx writes them as negatives of powers."""

import operator

import torch
from torch import fx


def call_power(node: fx.Node, gives_tensor: bool) -> bool:
    """Make a power of a negative number a call, in place; whether it was one.

    -1 ** x            # what torch.fx writes, and Python reads as -(1 ** x)
    torch.pow(-1, x)   # after, and pow(-1, n) where n is no tensor
    """
    base = node.args[0] if node.target is operator.pow else None
    if not isinstance(base, (int, float)) or not base < 0:
        return False
    node.target = torch.pow if gives_tensor else pow
    return True
