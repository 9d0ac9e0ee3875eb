"""can_pad: whether a dimension of a GEMM can be padded without anybody seeing it, or why not."""

from collections.abc import Mapping

from torch import fx

from fxamp import ir
from fxamp.inplace import mutated
from fxamp.passes.gemm_types import Gemm, GemmDim
from fxamp.passes.recurrent_gemms import Recurrent
from fxamp.passes.static_dims import Static, is_static


def can_pad(gemm: Gemm, dim: GemmDim, static: Mapping[fx.Node, Static]) -> str:
    """ "" when a dimension can be padded, else the reason why it cannot.

    Every operand must hold the dimension in full (a broadcast one is not padded with the others), its size must be
    the same in every call, and the GEMM must run in low precision.
    """
    node = gemm.node
    if ir.mark(node).precision != "low":
        return "it runs in fp32"
    if mutated(node):
        return "it writes into one of its operands"
    if isinstance(gemm, Recurrent):
        return ""  # its sizes are its weights'
    if not any(is_static(static, ir.argument_of(node, at.position, at.keyword), at.dim) for at in dim.places):
        return f"{dim.name} = {dim.size} is known only at run time"
    if dim.name == "K" and len(dim.places) < 2:
        return "one operand broadcasts K"
    return ""
