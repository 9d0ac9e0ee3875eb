"""Arguments for a run of their own: what forward writes into is not the caller's, and is as it was for the next run."""

import copy
import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxamp.sparse import is_sparse

log = logging.getLogger("fxamp")


def copied(given: Any) -> Any:
    """The same arguments in other memory.

    Tensors that share memory share it in the copy too, but for those with a gradient, whose originals it reaches;
    parameters stay themselves. An object that cannot be copied stays itself as well.
    """
    memo: dict[int, Any] = {}
    with _Connected():
        return pytree.tree_map(lambda value: _copied_leaf(value, memo), given)


def _copied_leaf(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, torch.nn.Parameter):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # a lock, a generator, a handle ...
        log.debug("an argument of type %s cannot be copied: %s", type(value).__qualname__, error)
        memo.clear()  # of what it had begun with
        return value


class _Connected(TorchFunctionMode):
    """copy.deepcopy of a tensor with a gradient is a clone, which autograd follows to the original.

    So is that of a sparse one: torch copies no rows that are compressed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            with torch.enable_grad():
                is_cloned = tensor.requires_grad or is_sparse(tensor)
                memo[id(tensor)] = tensor.clone() if is_cloned else func(*args)  # type: ignore[no-untyped-call]
        return memo[id(tensor)]
