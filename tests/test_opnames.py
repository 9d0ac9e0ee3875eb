"""Canonical names."""

import functools
import operator
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxamp.opnames import (
    canonical_name,
    dotted_path,
    is_qualified,
    is_torch_op,
    module_name,
)
from fxamp.spellings import ALIASES, MODULES, PREFIXES

sys.path.insert(0, str(Path(__file__).parent / "lists"))
from known_ops import op_infos, op_of

SPELLINGS = {
    "add": [torch.add, operator.add, operator.iadd, "add", "add_", "__add__", "__iadd__", "__radd__"],
    "batch_norm": [F.batch_norm, torch.batch_norm, torch.ops.aten.batch_norm.default],
    "bitwise_and": [torch.bitwise_and, operator.and_, "__and__", "__rand__"],
    "bitwise_not": [operator.inv, operator.invert, "__invert__", torch.bitwise_not],
    "cat": [torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat.default],
    "clamp": [torch.clamp, torch.clip, "clip_"],
    "conv2d": [F.conv2d, torch.conv2d, torch.ops.aten.conv2d.default],
    "convolution": [
        torch.convolution,
        torch.ops.aten._convolution.default,
        torch.ops.aten.convolution.default,
    ],
    "div": [
        torch.div,
        torch.true_divide,
        torch.divide,
        operator.truediv,
        operator.itruediv,
        "__div__",
        "divide_",
    ],
    "embedding": [F.embedding, torch.embedding, torch.ops.aten.embedding.default],
    "fft_rfft": [torch.fft.rfft, torch.ops.aten.fft_rfft.default],
    "floor_divide": [operator.floordiv, torch.floor_divide, "__floordiv__"],
    "getattr": [getattr, torch.Tensor.shape.__get__, torch.Tensor.T.__get__, "__get__"],
    "getitem": [operator.getitem, "__getitem__", torch.Tensor.__getitem__],
    "gelu": [F.gelu, torch._C._nn.gelu, torch.ops.aten.gelu, torch.ops.aten.gelu.default],
    "len": [len, "__len__", torch.Tensor.__len__],
    "linalg_norm": [torch.linalg.norm, torch.ops.aten.linalg_norm.default],
    "linear": [F.linear, torch._C._nn.linear, torch.ops.aten.linear.default],
    "log_softmax": [F.log_softmax, torch.log_softmax, "log_softmax", torch.ops.aten._log_softmax.default],
    "logsigmoid": [F.logsigmoid, torch.ops.aten.log_sigmoid.default],
    "lstm": [torch._VF.lstm, torch.lstm, torch.ops.aten.lstm.input],
    "masked_softmax": [torch.masked.softmax],
    "matmul": [torch.matmul, operator.matmul, operator.imatmul, "__matmul__", "matmul", torch.linalg.matmul],
    "max_pool2d": [F.max_pool2d, F._max_pool2d, torch.max_pool2d, torch.ops.aten.max_pool2d.default],
    "mul": [torch.mul, torch.multiply, operator.mul, operator.imul, "mul_", "__rmul__", torch.Tensor.mul_],
    "neg": [operator.neg, torch.negative, "__neg__"],
    "norm": [torch.norm, torch.Tensor.norm, "norm"],
    "pow": [operator.pow, operator.ipow, "__pow__", torch.ops.aten.pow.Tensor_Scalar],
    "relu": [F.relu, F.relu_, torch.relu, torch.relu_, "relu_", torch.ops.aten.relu_.default],
    "remainder": [operator.mod, operator.imod, torch.remainder, "__mod__"],
    "rtruediv": ["__rtruediv__", "__rdiv__", torch.Tensor.__rdiv__],
    "scaled_dot_product_attention": [F.scaled_dot_product_attention],
    "setitem": [operator.setitem, "__setitem__"],
    "sigmoid": [torch.sigmoid, F.sigmoid, torch.special.expit, "sigmoid_"],
    "signal_windows_hann": [torch.signal.windows.hann],
    "softmax": [F.softmax, torch.softmax, torch.special.softmax, torch.ops.aten._softmax.default, "softmax"],
    "sparse_mm": [torch.sparse.mm],
    "special_i0": [torch.special.i0, torch.i0, torch.ops.aten.special_i0.default],
    "split": [torch.split, torch.Tensor.split, torch.ops.aten.split.Tensor],
    "sub": [torch.sub, torch.subtract, operator.sub, "sub_"],
    "threshold": [F.threshold, F.threshold_, torch.threshold],
    "to": ["to", torch.Tensor.to, torch.ops.aten.to.dtype],
    "transpose": [torch.transpose, torch.swapaxes, "swapdims_"],
    "view": ["view", torch.ops.aten._unsafe_view.default, torch.ops.aten.view.default],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_has_the_one_name(name):
    assert [canonical_name(target) for target in SPELLINGS[name]] == [name] * len(SPELLINGS[name])


def test_reversed_operators_that_do_not_commute_keep_their_own_name():
    names = {canonical_name(f"__r{operation}__") for operation in ("sub", "pow", "mod", "matmul", "floordiv")}
    assert names == {"rsub", "rpow", "rmod", "rmatmul", "rfloordiv"}


@pytest.mark.parametrize("variant", ["op", "method_variant", "inplace_variant", "operator_variant"])
def test_variants_in_torchs_database_agree(variant):
    seen = 0
    for info in op_infos():
        function = getattr(info, variant)
        names = {op_of(info), *(canonical_name(alias.op) for alias in info.aliases if alias.op)}
        is_named = isinstance(function, types.BuiltinFunctionType | types.MethodDescriptorType)
        if is_named and info.name != "_segment_reduce":  # stands in for segment_reduce, whose backward differs
            seen += 1
            assert canonical_name(function) in names, (info.name, function)
    assert seen > 10


def test_aliases_are_sorted_and_lead_to_canonical_names():
    assert list(ALIASES) == sorted(ALIASES)
    assert [name for name in ALIASES.values() if name in ALIASES or not is_torch_op(name)] == []
    assert all(canonical_name(spelling) == name for spelling, name in ALIASES.items())


def test_modules_are_sorted_and_lead_to_ops():
    assert list(MODULES) == sorted(MODULES)
    assert [name for name in MODULES.values() if canonical_name(name) != name] == []


def test_prefixed_packages_exist():
    assert all(functools.reduce(getattr, package.split(".")[1:], torch) for package in PREFIXES)


def my_function(x):
    return x


class Holder:
    def method(self, x):
        return x

    def __call__(self, x):
        return x


class MyFunction(torch.autograd.Function):
    pass


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (my_function, "my_function"),
        (functools.partial(my_function), "my_function"),
        (MyFunction.apply, "MyFunction"),
        (MyFunction, "MyFunction"),
        (Holder().method, "Holder.method"),
        (Holder(), "Holder"),
        (Holder, "Holder"),
    ],
)
def test_what_is_not_torchs_has_a_dotted_path(target, path):
    assert canonical_name(target) == f"{__name__}.{path}"
    assert is_qualified(canonical_name(target))


def test_ops_of_other_libraries_keep_their_namespace():
    @torch.library.custom_op("fxamp_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for target in (twice, torch.ops.fxamp_tests.twice, torch.ops.fxamp_tests.twice.default):
        assert canonical_name(target) == "fxamp_tests::twice"
    assert canonical_name(torch.ops.higher_order.cond) == "higher_order::cond"
    assert canonical_name(torch.ops.prims.convert_element_type.default) == "prims::convert_element_type"


def test_a_torch_function_named_like_a_python_one_is_torchs():
    assert canonical_name(torch.sum) == canonical_name(sum) == "sum"
    assert canonical_name(torch.nn.init.normal_) == "normal"


class MyLinear(nn.Linear):
    pass


class MyBlock(nn.Module):
    pass


class LSTM(nn.Module):
    """A user's class that only shares its name with one of torch."""


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (nn.BatchNorm2d, "batch_norm"),
        (nn.SyncBatchNorm, "batch_norm"),
        (nn.LazyBatchNorm1d, "batch_norm"),
        (nn.InstanceNorm3d, "instance_norm"),
        (nn.Dropout, "dropout"),
        (nn.Dropout3d, "dropout"),
        (nn.AlphaDropout, "alpha_dropout"),
        (nn.FeatureAlphaDropout, "feature_alpha_dropout"),
        (nn.Linear, "linear"),
        (nn.LazyLinear, "linear"),
        (MyLinear, "linear"),
        (nn.Conv3d, "conv3d"),
        (nn.ConvTranspose1d, "conv_transpose1d"),
        (nn.LSTM, "lstm"),
        (nn.GRU, "gru"),
        (nn.RNN, "rnn"),
        (nn.LSTMCell, "lstm_cell"),
        (nn.RNNCell, "rnn_cell"),
        (nn.MultiheadAttention, "multi_head_attention_forward"),
        (nn.CrossEntropyLoss, "cross_entropy"),
        (nn.UpsamplingBilinear2d, "interpolate"),
        (nn.ReflectionPad2d, "pad"),
        (nn.CircularPad2d, "pad"),
        (nn.ZeroPad2d, "pad"),
        (nn.Sequential, "torch.nn.modules.container.Sequential"),
        (MyBlock, f"{__name__}.MyBlock"),
        (LSTM, f"{__name__}.LSTM"),
    ],
)
def test_module_name(cls, name):
    assert module_name(cls) == name


CONTAINERS = {
    "Container",
    "DataParallel",
    "Module",
    "ModuleDict",
    "ModuleList",
    "ParameterDict",
    "ParameterList",
}
CONTAINERS |= {"RNNBase", "RNNCellBase", "Sequential", "AdaptiveLogSoftmaxWithLoss"}


def test_every_leaf_module_of_torch_is_an_op():
    classes = {name: cls for name, cls in vars(nn).items() if isinstance(cls, type) and issubclass(cls, nn.Module)}
    without = {name for name, cls in classes.items() if is_qualified(module_name(cls))}
    assert {name for name in without - CONTAINERS if "Transformer" not in name} == set()


def test_dotted_path_of_an_object_is_its_classs():
    assert dotted_path(Holder()) == f"{__name__}.Holder"


@pytest.mark.parametrize(
    "name", ["add", "relu", "fft_rfft", "rnn", "masked_softmax", "sparse_mm", "rtruediv", "getattr"]
)
def test_torch_has_the_op(name):
    assert is_torch_op(name)


@pytest.mark.parametrize("name", ["sofmax", "masked_sofmax", "signal_windows_han", "", "Linear_", "LinearLayer"])
def test_torch_has_not_the_op(name):
    assert not is_torch_op(name)
