"""Layer and group norms on a CPU: what their gradients are taken from is float32."""

import dataclasses

import torch
from torch import fx
from torch.nn import functional

from fxamp import ir
from fxamp.passes.base import Pass
from fxamp.runtime.group_norms import group_norm
from fxamp.runtime.layer_norms import layer_norm

_LAYER_NORMS = (functional.layer_norm, torch.layer_norm)
_GROUP_NORMS = (functional.group_norm, torch.group_norm)


@dataclasses.dataclass(frozen=True)
class AddNormGradientsUp(Pass):
    """A low layer or group norm goes by a function that takes its gradients in float32, on a CPU alone.

    y = F.layer_norm(x, (8,), w, b)   # before: the CPU's kernel adds the gradients of w and b in x's dtype
    y = layer_norm(x, (8,), w, b)     # after: the same numbers, and gradients as a GPU's kernel gives them

    y = F.group_norm(x, 2, w, b)      # before: the kernel keeps mean and scale for the gradients in x's dtype
    y = group_norm(x, 2, w, b)        # after: the same numbers, and gradients from a float32 mean and scale
    """

    device: str

    def apply(self, graph: fx.Graph) -> bool:
        if self.device != "cpu":
            return False
        low = [node for node in graph.nodes if ir.mark(node).precision == "low"]
        layers = [node for node in low if node.target in _LAYER_NORMS and len(node.all_input_nodes) > 1]
        groups = [node for node in low if node.target in _GROUP_NORMS]
        for node in layers:
            node.target = layer_norm
        for node in groups:
            node.target = group_norm
        return bool(layers or groups)
