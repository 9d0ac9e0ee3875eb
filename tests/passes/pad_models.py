"""Models of odd sizes for the padding tests, and what runs them padded and not."""

import copy
import dataclasses
import functools
import itertools

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxamp
from fxamp import ir
from fxamp.capture.inputs import flatten_call
from fxamp.model.engine import engine_of
from fxamp.model.views import plain_view
from fxamp.pipeline import build_variant
from fxamp.runtime.padded_results import cast_of_part

BF16 = torch.bfloat16


def whole_numbers(model):
    """The model with small whole numbers as weights: sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
    return model


@dataclasses.dataclass
class Run:
    """One training step of a converted model."""

    model: nn.Module
    outputs: tuple
    gradients: dict
    buffers: dict

    @property
    def graph(self):
        return engine_of(self.model).all_variants()[0].graph

    def notes(self):
        return {ir.mark(n).op: ir.mark(n).pad for n in self.graph.nodes if ir.mark(n).pad is not None}

    def role(self, role):
        return [node for node in self.graph.nodes if ir.mark(node).role == role]

    def parts(self):
        """Slices, and casts that read a part of a padded value."""
        return [node for node in self.graph.nodes if ir.mark(node).role == "slice" or node.target is cast_of_part]

    def activation_pads(self):
        """Pads of values that are not parameters."""
        pads = [node for node in self.role("pad") if node.target is functional.pad]
        return [node for node in pads if ir.mark(node.args[0]).role != "weight cast" and node.args[0].op != "get_attr"]


def step(model, *inputs, **options):
    """Convert a copy of the model and run it forward and backward."""
    options = {"dtype": BF16, "pad": "always", "example_inputs": inputs, **options}
    converted = fxamp.convert(copy.deepcopy(model), **options)
    torch.manual_seed(0)
    outputs = tuple(tree_leaves(converted(*inputs)))
    sum((value.float() * (1 + at)).sum() for at, value in enumerate(outputs)).backward()
    gradients = {name: parameter.grad for name, parameter in converted.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in converted.named_buffers()}
    return Run(converted, outputs, gradients, buffers)


def assert_equal(padded, plain):
    """Outputs with their strides, gradients and buffers, bit for bit."""
    for ours, theirs in zip(padded.outputs, plain.outputs, strict=True):
        assert ours.is_contiguous() == theirs.is_contiguous()
        assert_same(ours, theirs, "output")
    for name, gradient in plain.gradients.items():
        ours = padded.gradients[name]
        assert (ours is None) == (gradient is None), name
        if gradient is not None:
            assert_same(ours, gradient, name)
    for name, buffer in plain.buffers.items():
        assert torch.equal(padded.buffers[name], buffer), name


def assert_same(ours, theirs, name):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


def check(model, *inputs, **options):
    """Run padded and not, compare, and return the padded run."""
    padded = step(model, *inputs, **options)
    assert_equal(padded, step(model, *inputs, **{**options, "pad_to": 0}))
    return padded


def in_float64(model, inputs, pad_to, pad="always"):
    """The model's step with float64 in the place of the low dtype: (loss and sums of the outputs, gradients)."""
    converted = fxamp.convert(copy.deepcopy(model), torch.bfloat16, inputs, pad=pad, pad_to=pad_to, output_dtype=None)
    options = dataclasses.replace(engine_of(converted).options, low=torch.float64)
    plain = plain_view(converted)
    spec, flat = flatten_call(inputs, {})
    variant = build_variant(plain, spec, flat, options)
    torch.manual_seed(0)
    result = variant.compiled.run(plain, *flat)
    results = [value.double() for value in tree_leaves(result)]
    loss = sum((value * value + value).sum() for value in results)
    loss.backward()
    notes = [ir.mark(node).pad for node in variant.graph.nodes]
    assert any(note is not None and note.state == "padded" for note in notes) == bool(pad_to)
    return torch.stack([loss.detach(), *[value.detach().sum() for value in results]]), [
        parameter.grad for parameter in plain.parameters()
    ]


def assert_equal_in_float64(model, *inputs):
    loss, gradients = in_float64(model, inputs, 8)
    expected, theirs = in_float64(model, inputs, 0)
    # float64 sums in another order; gradients come back through float32 parameters (one rounding of 2**-24)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, reference in zip(gradients, theirs, strict=True):
        scale = 0.0 if reference is None else float(reference.abs().max())
        torch.testing.assert_close(ours, reference, rtol=2**-22, atol=2**-22 * scale)


class Gemms(TorchDispatchMode):
    """Records (op, sizes that alignment is about) of every GEMM that runs in low precision."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if tensors and tensors[0].dtype in (torch.float16, BF16):
            sizes = _SIZES.get(name, lambda *_: ())(*tensors)
            self.seen += [(name, size) for size in sizes]
        return func(*args, **(kwargs or {}))


def _product(left, right):
    return (*left.shape[-2:], right.shape[-1])


_SIZES = {
    "mm": _product,
    "bmm": _product,
    "addmm": lambda added, left, right: _product(left, right),
    "baddbmm": lambda added, left, right: _product(left, right),
    "convolution": lambda x, weight, *_: weight.shape[:2],
    "convolution_backward": lambda gradient, x, weight, *_: weight.shape[:2],
}


# ------------------------------------------------------------------------------------------------- models


class Attention(nn.Module):
    def __init__(self, width=30, heads=5):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        batch, length, width = x.size()
        parts = self.qkv(x).split(self.out.in_features, dim=2)
        q, k, v = (p.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for p in parts)
        weights = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).contiguous().view(batch, length, width))


class Flash(Attention):
    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (p.reshape(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, channels=17):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.one, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.two, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, 10)

    def forward(self, x):
        x = functional.max_pool2d(self.stem(x).relu_(), 2)
        y = functional.relu(self.norm1(self.one(x)), inplace=True)
        y = self.norm2(self.two(y))
        y += x
        return self.head(torch.flatten(self.pool(functional.relu(y, inplace=True)), 1))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 11, 3, padding=1), nn.Conv2d(11, 21, 2, stride=2)
        self.up, self.out = nn.ConvTranspose2d(21, 11, 2, stride=2), nn.Conv2d(22, 5, 1)
        self.norm = nn.GroupNorm(3, 21)

    def forward(self, x):
        a = functional.relu(self.down(x))
        return self.out(torch.cat([a, self.up(functional.relu(self.norm(self.deep(a))))], 1))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.out = nn.Bilinear(5, 7, 9), nn.Linear(9, 3)

    def forward(self, x):
        return self.out(torch.relu(self.pair(x[:, :5], x[:, 5:])))


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(13, 11)), nn.Parameter(torch.ones(5, 11))
        self.m, self.bias = nn.Parameter(torch.ones(5, 9)), nn.Parameter(torch.ones(9))

    def forward(self, x):
        y = torch.einsum("btc,cd->btd", x, self.w).relu()
        y = torch.einsum("btd,ed->bte", y, self.v)
        return torch.addmm(self.bias, y.flatten(0, 1), self.m) @ self.m.t()


class Head(nn.Module):
    """A language model's ends: a table, a tied head, and the loss inside."""

    def __init__(self, words=1009, width=20, loss=functional.cross_entropy, tied=True, bias=False):
        super().__init__()
        self.table, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=bias)
        self.words, self.loss = words, loss
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens, targets):
        logits = self.head(self.table(tokens))
        return self.loss(logits.view(-1, logits.size(-1)), targets.view(-1))


class HeadAndLogits(Head):
    """As the models of Hugging Face compute it: shifted, made contiguous; the logits come back too."""

    def forward(self, tokens, targets):
        logits = self.head(self.table(tokens))
        shifted = logits[..., :-1, :].contiguous()
        return logits, self.loss(shifted.view(-1, self.words), targets[..., 1:].reshape(-1))


def mlp(*widths):
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def words(count, *shape):
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(1))


def numbers(*shape):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(2)).float()


smoothed = functools.partial(functional.cross_entropy, label_smoothing=0.1)
