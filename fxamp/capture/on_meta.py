"""What nodes give on torch's meta tensors, which tell sizes in a third of the time that fake tensors take.

They know neither devices nor what a data-dependent op may give: a graph in which other nodes stand than plain ops is
left to fakes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fxamp.fakes import Fakes
from fxamp.opnames import canonical_name

_META = torch.device("meta")
_MAKING = frozenset("arange empty eye full linspace ones tensor zeros".split())
_READ = frozenset({"T", "device", "dtype", "mH", "mT", "ndim", "shape"})
_PLAIN = frozenset(
    "abs add addmm all amax amin any argmax argmin baddbmm bitwise_and bitwise_not bitwise_or bmm bool broadcast_to "
    "cat ceil chunk clamp clone contiguous conv1d conv2d conv3d cos cumsum detach diff div dropout einsum embedding "
    "empty_like eq exp expand expand_as flatten flip float floor floor_divide full_like gather ge gelu getattr "
    "getitem group_norm gt index_select int layer_norm le len linear log log_softmax logical_and logical_not "
    "logical_or long lt masked_fill masked_scatter matmul max maximum mean meshgrid min minimum movedim mul ne neg "
    "new_empty new_full new_ones new_zeros numel ones_like outer pad permute pow prod reciprocal relu remainder "
    "repeat reshape rms_norm roll rsqrt scaled_dot_product_attention select sigmoid silu sin size softmax split sqrt "
    "square squeeze stack std sub sum t tanh tile to transpose tril triu type_as unbind unflatten unsqueeze var view "
    "view_as where zeros_like".split()
)


class OnMeta:
    """Runs nodes on meta tensors.

    Args:
        fakes: of the model's tensors.
    """

    def __init__(self, fakes: Fakes) -> None:
        self._fakes = fakes

    def of(self, value: Any) -> Any:
        """What stands for a value that the model holds."""
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(value.shape, dtype=self._fakes.dtype_of(value), device=_META)

    def run(self, node: fx.Node, values: Callable[[fx.Node], Any]) -> Any:
        """What a plain node gives.

        Raises:
            Exception: whatever torch raises: of meta tensors as such, too.
        """
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values)
        args = tuple(_META if isinstance(given, torch.device) else given for given in args)
        if "device" in kwargs or canonical_name(node.target) in _MAKING:
            kwargs = {**kwargs, "device": _META}
        if isinstance(node.target, str):
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)


def is_plain(node: fx.Node) -> bool:
    """Whether meta tensors tell what a node gives."""
    name = canonical_name(node.target) if node.op in ("call_function", "call_method") else ""
    if name == "getattr":
        return node.args[1] in _READ
    if name == "to" and any(isinstance(given, str) for given in (*node.args, *node.kwargs.values())):
        return False  # a device
    if name in _MAKING:
        return node.op == "call_function"
    return name in _PLAIN
