"""Layer and group norms on a CPU: what their gradients are made of is float32."""

import dataclasses

import torch
from torch import fx
from torch.nn import functional

from fxamp import ir
from fxamp.passes.base import Pass
from fxamp.runtime.cpu_norms import group_norm, layer_norm

_OURS = {
    functional.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    functional.group_norm: group_norm,
    torch.group_norm: group_norm,
}


@dataclasses.dataclass(frozen=True)
class WidenNorms(Pass):
    """A low layer or group norm goes by a function that hands the CPU's kernel float32 weights; on a CPU alone.

    y = F.layer_norm(x, (8,), w, b)   # the kernel keeps mean and scale, and adds the gradients of w and b, in x's dtype
    y = layer_norm(x, (8,), w, b)     # the same numbers, and gradients as a GPU's kernel gives them
    """

    device: str

    def apply(self, graph: fx.Graph) -> bool:
        if self.device != "cpu":
            return False
        found = [node for node in graph.nodes if node.target in _OURS and ir.mark(node).precision == "low"]
        for node in found:
            node.target = _OURS[node.target]
        return bool(found)
