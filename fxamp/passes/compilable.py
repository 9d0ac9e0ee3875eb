"""Calls of which compilers can make nothing, in a form that they follow."""

import dataclasses

import torch
from torch import fx

from fxamp import ir
from fxamp.grouped import GROUPED, grouped_mm
from fxamp.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class LetCompilersFollow(Pass):
    """A grouped product of another dtype than bfloat16 goes by a function that has a form for compilers.

    y = torch._grouped_mm(x, w, offs)   # before: Dynamo asks torch's meta kernel, which refuses float16
    y = grouped_mm(x, w, offs)          # after: the same call, and an op of its own under torch.compile
    """

    def apply(self, graph: fx.Graph) -> bool:
        found = [node for node in graph.nodes if node.target in GROUPED and ir.dtype_of(node) != torch.bfloat16]
        for node in found:
            node.target = grouped_mm
        return bool(found)
