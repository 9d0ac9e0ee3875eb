"""One canonical name for an op, however the graph spells it."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ALIASES = {
    "__abs__": "abs",
    "__add__": "add",
    "__and__": "bitwise_and",
    "__bool__": "is_nonzero",
    "__contains__": "contains",
    "__div__": "div",
    "__eq__": "eq",
    "__float__": "item",
    "__floordiv__": "floor_divide",
    "__ge__": "ge",
    "__get__": "getattr",
    "__getattribute__": "getattr",
    "__getitem__": "getitem",
    "__gt__": "gt",
    "__iadd__": "add",
    "__iand__": "bitwise_and",
    "__idiv__": "div",
    "__ifloordiv__": "floor_divide",
    "__ilshift__": "bitwise_left_shift",
    "__imod__": "remainder",
    "__imul__": "mul",
    "__index__": "item",
    "__int__": "item",
    "__invert__": "bitwise_not",
    "__ior__": "bitwise_or",
    "__ipow__": "pow",
    "__irshift__": "bitwise_right_shift",
    "__isub__": "sub",
    "__iter__": "unbind",
    "__itruediv__": "div",
    "__ixor__": "bitwise_xor",
    "__le__": "le",
    "__len__": "len",
    "__lshift__": "bitwise_left_shift",
    "__lt__": "lt",
    "__matmul__": "matmul",
    "__mod__": "remainder",
    "__mul__": "mul",
    "__ne__": "ne",
    "__neg__": "neg",
    "__nonzero__": "is_nonzero",
    "__or__": "bitwise_or",
    "__pos__": "positive",
    "__pow__": "pow",
    "__radd__": "add",
    "__rand__": "bitwise_and",
    "__rdiv__": "rtruediv",
    "__reversed__": "flip",
    "__rfloordiv__": "rfloordiv",
    "__rmatmul__": "rmatmul",
    "__rmod__": "rmod",
    "__rmul__": "mul",
    "__ror__": "bitwise_or",
    "__rpow__": "rpow",
    "__rshift__": "bitwise_right_shift",
    "__rsub__": "rsub",
    "__rtruediv__": "rtruediv",
    "__rxor__": "bitwise_xor",
    "__setitem__": "setitem",
    "__sub__": "sub",
    "__truediv__": "div",
    "__xor__": "bitwise_xor",
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "adaptive_avg_pool3d",
    "_convolution": "convolution",
    "_embedding_bag": "embedding_bag",
    "_get_data_attr": "detach",
    "_log_softmax": "log_softmax",
    "_max_pool1d": "max_pool1d",
    "_max_pool2d": "max_pool2d",
    "_max_pool3d": "max_pool3d",
    "_reshape_alias": "reshape",
    "_softmax": "softmax",
    "_sparse_addmm": "sparse_addmm",
    "_sparse_log_softmax": "sparse_log_softmax",
    "_sparse_mm": "sparse_mm",
    "_sparse_softmax": "sparse_softmax",
    "_spsolve": "sparse_spsolve",
    "_threshold": "threshold",
    "_unsafe_index_put": "index_put",
    "_unsafe_view": "view",
    "absolute": "abs",
    "and": "bitwise_and",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "det": "linalg_det",
    "divide": "div",
    "fix": "trunc",
    "floordiv": "floor_divide",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "i0": "special_i0",
    "iadd": "add",
    "iand": "bitwise_and",
    "ifloordiv": "floor_divide",
    "ilshift": "bitwise_left_shift",
    "imatmul": "matmul",
    "imod": "remainder",
    "imul": "mul",
    "inv": "bitwise_not",
    "inverse": "linalg_inv",
    "invert": "bitwise_not",
    "ior": "bitwise_or",
    "ipow": "pow",
    "irshift": "bitwise_right_shift",
    "isub": "sub",
    "itruediv": "div",
    "ixor": "bitwise_xor",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "log_sigmoid": "logsigmoid",
    "lshift": "bitwise_left_shift",
    "matrix_exp": "linalg_matrix_exp",
    "matrix_power": "linalg_matrix_power",
    "mod": "remainder",
    "moveaxis": "movedim",
    "multiply": "mul",
    "ndimension": "dim",
    "negative": "neg",
    "nelement": "numel",
    "not": "logical_not",
    "not_equal": "ne",
    "or": "bitwise_or",
    "orgqr": "linalg_householder_product",
    "pos": "positive",
    "row_stack": "vstack",
    "rshift": "bitwise_right_shift",
    "slogdet": "linalg_slogdet",
    "special_digamma": "digamma",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_gammainc": "igamma",
    "special_gammaincc": "igammac",
    "special_gammaln": "lgamma",
    "special_log1p": "log1p",
    "special_log_softmax": "log_softmax",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "special_multigammaln": "mvlgamma",
    "special_polygamma": "polygamma",
    "special_psi": "digamma",
    "special_round": "round",
    "special_sinc": "sinc",
    "special_softmax": "softmax",
    "special_xlogy": "xlogy",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "trapz": "trapezoid",
    "true_divide": "div",
    "truediv": "div",
    "xor": "bitwise_xor",
}
"""Other spelling -> canonical name; in-place `name_` needs no entry."""

PREFIXES = {
    "torch.masked": "masked_",
    "torch.signal.windows": "signal_windows_",
    "torch.sparse": "sparse_",
}
"""Modules whose Python functions carry the bare name of another op (`torch.masked.softmax`)."""

MODULES = {
    "AdaptiveAvgPool1d": "adaptive_avg_pool1d",
    "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
    "AdaptiveAvgPool3d": "adaptive_avg_pool3d",
    "AdaptiveMaxPool1d": "adaptive_max_pool1d",
    "AdaptiveMaxPool2d": "adaptive_max_pool2d",
    "AdaptiveMaxPool3d": "adaptive_max_pool3d",
    "AlphaDropout": "alpha_dropout",
    "AvgPool1d": "avg_pool1d",
    "AvgPool2d": "avg_pool2d",
    "AvgPool3d": "avg_pool3d",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "Bilinear": "bilinear",
    "CELU": "celu",
    "CTCLoss": "ctc_loss",
    "ChannelShuffle": "channel_shuffle",
    "ConstantPad1d": "pad",
    "ConstantPad2d": "pad",
    "ConstantPad3d": "pad",
    "Conv1d": "conv1d",
    "Conv2d": "conv2d",
    "Conv3d": "conv3d",
    "ConvTranspose1d": "conv_transpose1d",
    "ConvTranspose2d": "conv_transpose2d",
    "ConvTranspose3d": "conv_transpose3d",
    "CosineEmbeddingLoss": "cosine_embedding_loss",
    "CosineSimilarity": "cosine_similarity",
    "CrossEntropyLoss": "cross_entropy",
    "CrossMapLRN2d": "local_response_norm",
    "ELU": "elu",
    "Embedding": "embedding",
    "EmbeddingBag": "embedding_bag",
    "FeatureAlphaDropout": "feature_alpha_dropout",
    "Flatten": "flatten",
    "Fold": "fold",
    "FractionalMaxPool2d": "fractional_max_pool2d",
    "FractionalMaxPool3d": "fractional_max_pool3d",
    "GELU": "gelu",
    "GLU": "glu",
    "GRU": "gru",
    "GRUCell": "gru_cell",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "GroupNorm": "group_norm",
    "Hardshrink": "hardshrink",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "Hardtanh": "hardtanh",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "HuberLoss": "huber_loss",
    "Identity": "identity",
    "KLDivLoss": "kl_div",
    "L1Loss": "l1_loss",
    "LPPool1d": "lp_pool1d",
    "LPPool2d": "lp_pool2d",
    "LPPool3d": "lp_pool3d",
    "LSTM": "lstm",
    "LSTMCell": "lstm_cell",
    "LayerNorm": "layer_norm",
    "LeakyReLU": "leaky_relu",
    "Linear": "linear",
    "LinearCrossEntropyLoss": "linear_cross_entropy",
    "LocalResponseNorm": "local_response_norm",
    "LogSigmoid": "logsigmoid",
    "LogSoftmax": "log_softmax",
    "MSELoss": "mse_loss",
    "MarginRankingLoss": "margin_ranking_loss",
    "MaxPool1d": "max_pool1d",
    "MaxPool2d": "max_pool2d",
    "MaxPool3d": "max_pool3d",
    "MaxUnpool1d": "max_unpool1d",
    "MaxUnpool2d": "max_unpool2d",
    "MaxUnpool3d": "max_unpool3d",
    "Mish": "mish",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "MultiheadAttention": "multi_head_attention_forward",
    "NLLLoss": "nll_loss",
    "PReLU": "prelu",
    "PairwiseDistance": "pairwise_distance",
    "PixelShuffle": "pixel_shuffle",
    "PixelUnshuffle": "pixel_unshuffle",
    "PoissonNLLLoss": "poisson_nll_loss",
    "RMSNorm": "rms_norm",
    "RNN": "rnn",
    "RNNCell": "rnn_cell",
    "RReLU": "rrelu",
    "ReLU": "relu",
    "ReLU6": "relu6",
    "SELU": "selu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
    "SmoothL1Loss": "smooth_l1_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "Softmax": "softmax",
    "Softmax2d": "softmax",
    "Softmin": "softmin",
    "Softplus": "softplus",
    "Softshrink": "softshrink",
    "Softsign": "softsign",
    "Tanh": "tanh",
    "Tanhshrink": "tanhshrink",
    "Threshold": "threshold",
    "TripletMarginLoss": "triplet_margin_loss",
    "TripletMarginWithDistanceLoss": "triplet_margin_with_distance_loss",
    "Unflatten": "unflatten",
    "Unfold": "unfold",
    "Upsample": "interpolate",
    "ZeroPad1d": "pad",
    "ZeroPad2d": "pad",
    "ZeroPad3d": "pad",
    "_BatchNorm": "batch_norm",
    "_CircularPadNd": "pad",
    "_DropoutNd": "dropout",
    "_InstanceNorm": "instance_norm",
    "_ReflectionPadNd": "pad",
    "_ReplicationPadNd": "pad",
}
"""Class of torch.nn -> the op its forward runs; subclasses are found through their MRO."""


def canonical_name(target: Callable[..., Any] | str) -> str:
    """The one name of what an fx node calls.

        canonical_name(operator.iadd) == canonical_name("add_") == "add"
        canonical_name(torch.ops.aten._softmax.default) == "softmax"
        canonical_name(torch.fft.rfft) == "fft_rfft"
        canonical_name(torch.ops.torchvision.roi_align.default) == "torchvision::roi_align"
        canonical_name(MyFunction.apply) == "pkg.module.MyFunction"

    Args:
        target: the `target` of a `call_function` node, or the method name of a `call_method` node.

    Returns:
        A plain name for torch's own ops, `ns::op` for ops of other libraries, and a dotted path for
        Python functions and classes that are not torch's.
    """
    if isinstance(target, str):
        return _plain(target)
    registered = _registered_name(target)
    if registered is not None:
        namespace, _, name = registered.partition("::")
        return _plain(name) if namespace == "aten" else registered
    if isinstance(target, functools.partial):
        return canonical_name(target.func)
    if _is_function_apply(target):
        return dotted_path(target.__self__)  # type: ignore[attr-defined]
    return _python_name(target)


def module_name(cls: type) -> str:
    """The op a leaf module runs: the nearest of its base classes that `MODULES` names, else its dotted path.

    module_name(nn.SyncBatchNorm) == "batch_norm"
    """
    bases = (base.__name__ for base in cls.__mro__ if base.__module__.startswith("torch.nn."))
    return next((MODULES[base] for base in bases if base in MODULES), dotted_path(cls))


def dotted_path(target: Callable[..., Any]) -> str:
    """Where Python finds `target`: "pkg.module.Class.method"; of a nameless object, its class's path."""
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return dotted_path(type(target))
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def is_qualified(name: str) -> bool:
    """Whether `name` is a dotted path or `ns::op`: not torch's, so only the user can know that it exists."""
    return "." in name or "::" in name


@functools.cache
def is_torch_op(name: str) -> bool:
    """Whether this torch has an op with that canonical name, in any namespace where ops live."""
    spellings = (name, f"{name}_", f"__{name}__", *_spellings(name))
    return any(_exists(spelling) for spelling in spellings)


def _plain(name: str) -> str:
    if name.startswith("__"):
        return ALIASES.get(name, name)
    name = name.removesuffix("_")
    return ALIASES.get(name, name)


def _registered_name(target: Callable[..., Any]) -> str | None:
    """`namespace::op` of an op in torch's dispatcher, or of a `torch.library.custom_op`."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target.__name__}"
    if isinstance(target, torch._library.custom_ops.CustomOpDef):
        return target._qualname
    return None


def _is_function_apply(target: Callable[..., Any]) -> bool:
    owner = getattr(target, "__self__", None)
    return inspect.isclass(owner) and issubclass(owner, torch.autograd.Function)


def _python_name(target: Callable[..., Any]) -> str:
    name = getattr(target, "__name__", "")
    module = _module_of(target)
    if inspect.isclass(target) and module != "builtins":
        return dotted_path(target)
    if module in ("builtins", "_operator"):
        return _plain(name)
    if module != "torch" and not module.startswith("torch."):
        return dotted_path(target)
    if inspect.ismethod(target) and not isinstance(target.__self__, torch.Tensor):
        return dotted_path(target)
    for package, prefix in PREFIXES.items():
        if isinstance(target, types.FunctionType) and f"{module}.".startswith(f"{package}."):
            return prefix + name
    return _plain(name)


def _module_of(target: Callable[..., Any]) -> str:
    """The module's name; descriptors of Tensor and getters of its attributes have none and are torch's."""
    module = getattr(target, "__module__", None)
    if module:
        return str(module)
    owner = getattr(target, "__objclass__", None) or getattr(target, "__self__", None)
    owner = owner if inspect.isclass(owner) else type(owner)
    return "torch" if owner.__name__ in ("TensorBase", "getset_descriptor", "property") else str(owner.__module__)


@functools.cache
def _spellings_by_name() -> dict[str, list[str]]:
    spellings: dict[str, list[str]] = {}
    for spelling, name in ALIASES.items():
        spellings.setdefault(name, []).append(spelling)
    return spellings


def _spellings(name: str) -> list[str]:
    return _spellings_by_name().get(name, [])


def _exists(name: str) -> bool:
    return (
        any(hasattr(namespace, name) for namespace in _namespaces())
        or hasattr(torch.ops.aten, name)
        or name in MODULES.values()
        or any(_exists_in_package(package, prefix, name) for package, prefix in PREFIXES.items())
    )


@functools.cache
def _namespaces() -> tuple[Any, ...]:
    import builtins
    import operator

    import torch.nn.attention

    functions = (
        torch,
        torch.Tensor,
        nn.functional,
        nn.init,
        torch._VF,
        torch._C._nn,
        torch._C,
        torch.amp.autocast_mode,
        torch._C._autograd,
        torch.nn.attention,
    )
    return (*functions, operator, builtins)


def _exists_in_package(package: str, prefix: str, name: str) -> bool:
    if not name.startswith(prefix):
        return False
    path = package.removeprefix("torch.").split(".")
    return hasattr(functools.reduce(getattr, path, torch), name.removeprefix(prefix))
