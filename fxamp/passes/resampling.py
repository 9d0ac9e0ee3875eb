"""Resampling by weighted means: what its backward would lose in 16 bits."""

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
_SMOOTH = frozenset(("linear", "bilinear", "trilinear", "bicubic"))


def adds_gradients_low(node: fx.Node) -> bool:
    """Whether a node resamples by weighted means, so that its backward adds gradients up in 16 bits where it is low.

    CUDA adds the gradient of each number that is made to those of its neighbours one by one, in their dtype. On an
    H100, in bfloat16: of 1 x 1 -> 64 x 64 a tenth of the gradient is lost; to twice as many numbers forward and
    backward take 1.2 (bilinear) to 7.5 times (bicubic) as long as in float32 with both casts. Bilinear to fewer
    numbers takes 0.6 of the time and loses nothing: it may be low. Of `nearest` each sum is kept in float32 and rounded
    once; `area`, which is adaptive pooling, adds in 16 bits, too, but few, unless it enlarges.
    """
    op = ir.mark(node).op
    mode = _BY_NAME.get(op)
    if mode == "":
        mode = ir.argument_of(node, 3, "mode", "nearest")
    if mode is None or (isinstance(mode, str) and mode not in _SMOOTH):
        return False
    is_antialiased = op.endswith("_aa") or ir.argument_of(node, 6, "antialias", False) is not False
    return mode != "bilinear" or is_antialiased or _may_enlarge(node)


def _may_enlarge(node: fx.Node) -> bool:
    """Whether a dimension is larger afterwards, or may be: its size is not known."""
    before, after = ir.shape_of(ir.argument_of(node, 0, "input")), ir.shape_of(node)
    if before is None or after is None or len(before) != len(after):
        return True
    return any(now > old for old, now in zip(before, after, strict=True))
