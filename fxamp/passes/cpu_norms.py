"""Layer norms on a CPU: the gradients of their weights are added up in float32."""

import dataclasses

import torch
from torch import fx
from torch.nn import functional

from fxamp import ir
from fxamp.passes.base import Pass
from fxamp.runtime.layer_norms import layer_norm

_LAYER_NORMS = (functional.layer_norm, torch.layer_norm)


@dataclasses.dataclass(frozen=True)
class AddNormGradientsUp(Pass):
    """A low layer norm with weights goes by a function that adds up their gradients in float32, on a CPU alone.

    y = F.layer_norm(x, (8,), w, b)   # before: the CPU's kernel adds the gradients of w and b in x's dtype
    y = layer_norm(x, (8,), w, b)     # after: the same numbers, and gradients as a GPU's kernel gives them
    """

    device: str

    def apply(self, graph: fx.Graph) -> bool:
        if self.device != "cpu":
            return False
        found = [
            node
            for node in graph.nodes
            if node.target in _LAYER_NORMS and ir.mark(node).precision == "low" and len(node.all_input_nodes) > 1
        ]
        for node in found:
            node.target = layer_norm
        return bool(found)
