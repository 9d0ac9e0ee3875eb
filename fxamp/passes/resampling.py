"""Which resampling nodes spread each number over many, so that their backward adds many gradients up."""

from torch import fx

from fxamp import ir

_BY_NAME = {
    **dict.fromkeys(("interpolate", "upsample"), ""),
    "upsample_bilinear": "bilinear",
    "upsample_linear1d": "linear",
    "upsample_bilinear2d": "bilinear",
    "_upsample_bilinear2d_aa": "bilinear",
    "upsample_trilinear3d": "trilinear",
    "upsample_bicubic2d": "bicubic",
    "_upsample_bicubic2d_aa": "bicubic",
}
"""Op -> its mode; "" where an argument says it."""
_MODE_POSITION = 3
_SMOOTH = ("linear", "bilinear", "trilinear", "bicubic")


def spreads_numbers(node: fx.Node) -> bool:
    """Whether a node makes more numbers along a dimension of weighted means of its input's.

    CUDA's backward adds the gradient of each of them to those of its neighbours one by one, in their dtype: of
    1 x 1 -> 64 x 64 in bfloat16 a tenth of the gradient is lost, and all these additions take longer than in float32.
    Of `nearest` and `area` each sum is kept in float32 and rounded once; to fewer numbers there is little to add.
    A size that is not known may be larger.
    """
    op = ir.mark(node).op
    mode = _BY_NAME.get(op)
    if mode == "":
        mode = ir.argument_of(node, _MODE_POSITION, "mode", "nearest")
    if mode is None or (isinstance(mode, str) and mode not in _SMOOTH):
        return False
    before, after = ir.shape_of(ir.argument_of(node, 0, "input")), ir.shape_of(node)
    if before is None or after is None or len(before) != len(after):
        return True
    return any(now > old for old, now in zip(before, after, strict=True))
