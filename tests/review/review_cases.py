"""One small model for each kind of reason, and a larger one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.lists import OpLists

FP16 = torch.float16


class Two(nn.Module):
    """Two linear layers, a buffer, and a forward given as a function of (module, x)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.register_buffer("kept", torch.full((8,), 0.5))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class Block(nn.Module):
    """Attention and a feed-forward part, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2) / 4.0).softmax(-1) @ v)
        return x + self.ff(x)


class Language(nn.Module):
    """A small language model whose head is not aligned."""

    def __init__(self, depth: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 30)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(x), -1)


def tokens() -> torch.Tensor:
    return torch.arange(16).reshape(2, 8) % 30


class Protected(Two):
    _keep_in_fp32_modules = ("b",)


class Hooked(Two):
    """A hook keeps `b` whole: its weights are read inside it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self.b.register_forward_hook(lambda module, args, output: None)


def switched_off(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    with torch.autocast("cpu", enabled=False):
        return m.b(y)


def renewed(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    low = m.a(x)
    m.kept.copy_(m.kept * 0.9 + low[0])
    return m.b(low)


def written(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    m.kept.mul_(0.5)
    return m.a(x) * m.kept


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, the node to explain, its precision, and the kinds of its chain of reasons.

    Attributes:
        culprit: what the explanation must name.
    """

    kind: str
    function: Callable[..., Any]
    node: str
    precision: str
    chain: tuple[str, ...]
    culprit: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: type[Two] = Two
    dtype: torch.dtype = FP16


class Twice(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        return 2 * gradient


WITHOUT_EXP = OpLists.default().with_environment({"FXAMP_DENYLIST_REMOVE": "exp"})

CASES = (
    Case("list", lambda m, x: m.a(x).exp(), "exp", "high", ("list",), "deny.toml"),
    Case(
        *("strict", lambda m, x: m.b(m.a(x).softmax(-1)), "softmax", "high", ("list",), "level 'strict'"),
        {"level": "strict"},
    ),
    Case("allow", lambda m, x: m.a(x), "linear", "low", ("list",), "allow.toml"),
    Case("unlisted", lambda m, x: m.a(x).exp(), "exp", "high", ("unlisted",), "`exp`", {"lists": WITHOUT_EXP}),
    Case("downstream", lambda m, x: m.a(x).exp() + 1.0, "add", "high", ("downstream", "list"), "exp"),
    Case(
        *("far downstream", lambda m, x: m.a(x).exp().view(-1) + 1.0, "add", "high"),
        *(("downstream", "list"), "through view"),
    ),
    Case("upstream", lambda m, x: m.a(x).sigmoid().log(), "sigmoid", "high", ("upstream", "list"), "`log`"),
    Case(
        "position",
        lambda m, x: (m.a(x).sigmoid() + m.a.bias).argsort(-1),
        "add",
        "high",
        ("position", "type"),
        "`argsort`",
    ),
    Case("literal", lambda m, x: m.a(x) + 1e-7, "add", "high", ("literal",), "1e-07"),
    Case(
        *("taint", lambda m, x: m.a(x).masked_fill(x > 0, -1e9) * 2.0, "mul", "high"),
        *(("taint", "literal"), "masked_fill"),
    ),
    Case(
        "integers",
        lambda m, x: m.a(x + torch.arange(8).float()),
        "add",
        "high",
        ("integers", "integers"),
        "positions or exact integers",
    ),
    Case(
        "rows",
        lambda m, x: torch.nn.functional.embedding(x.long().abs(), m.a.weight),
        "embedding",
        "high",
        ("rows",),
        "added in the table's dtype",
    ),
    Case(
        "gradient sums",
        lambda m, x: torch.nn.functional.interpolate(m.a(x)[None], scale_factor=2, mode="linear"),
        "interpolate",
        "high",
        ("gradient sums",),
        "one by one",
    ),
    Case(
        "sum",
        lambda m, x: m.a(x).index_put((torch.zeros(len(x), dtype=torch.long),), m.b(x), accumulate=True),
        "index_put",
        "high",
        ("sum",),
        "adds to what is there",
    ),
    Case(
        "square",
        lambda m, x: m.a(x).relu().mul(2.0) ** 1 * 1.0 + (lambda y: y * y)(m.b(x)),
        "mul_2",
        "high",
        ("square",),
        "256",
    ),
    Case(
        *("stream", lambda m, x: m.b(x + m.a(x) + m.b(x) * 0.5), "add_1", "high", ("stream",), "bfloat16"),
        dtype=torch.bfloat16,
    ),
    Case(
        *("begins a stream", lambda m, x: m.b((m.a(x) + m.kept) + m.b(x) + m.kept.relu() * m.a(x)), "add", "high"),
        *(("stream", "stream"), "begins"),
        dtype=torch.bfloat16,
    ),
    Case("state", renewed, "add", "high", ("state",), "rounded anew at each call"),
    Case(
        *("differences", lambda m, x: m.b(nn.functional.layer_norm(m.a(x).softmax(-1), (8,))), "softmax", "high"),
        *(("differences",), "layer_norm goes by"),
    ),
    Case(
        *("by differences", lambda m, x: m.b(nn.functional.layer_norm(m.a(x).softmax(-1), (8,))), "layer_norm", "high"),
        *(("differences",), "layer_norm goes by"),
    ),
    Case("user cast", lambda m, x: m.b(m.a(x).float()), "linear_1", "high", ("user operand", "user cast"), "float_1"),
    Case("user region", switched_off, "linear_1", "high", ("user region",), "autocast off"),
    Case("not low-born", lambda m, x: m.a(x + 1.0), "add", "high", ("not low-born", "input"), "input_0"),
    Case(
        *("not between", lambda m, x: torch.tanh(m.a(x)), "tanh", "high", ("not between",), "two allow nodes"),
        {"level": "aggressive"},
    ),
    Case("override", lambda m, x: m.b(m.a(x)), "linear", "high", ("override",), "'a'", {"overrides": {"a": "deny"}}),
    Case("protected", lambda m, x: m.b(m.a(x)), "linear_1", "high", ("override",), "_keep_in_fp32", model=Protected),
    Case("aliasing", written, "mul_", "high", ("aliasing", "parameter"), "in place"),
    Case(
        *("type", lambda m, x: m.b(m.a(x)), "b", "high", ("type",), "inside the module", {"capture": "symbolic"}),
        model=Hooked,
    ),
    Case(
        *("boundary", lambda m, x: m.b(m.a(x)), "b", "high", ("boundary",), "converted by itself"),
        {"boundaries": "b"},
    ),
    Case(
        "user dtype", lambda m, x: m.a(x).softmax(-1, dtype=torch.float32), "softmax", "high", ("user dtype",), "dtype"
    ),
    Case("author", lambda m, x: Twice.apply(m.a(x)), "twice", "low", ("author",), "has torch.autocast give it float16"),
    Case("inside", lambda m, x: torch.vmap(lambda row: m.b(row))(m.a(x)), "vmapped", "low", ("inside",), "linear"),
    Case(
        "operand",
        lambda m, x: torch.vmap(lambda row, at: m.b(row) + at, (0, None))(m.a(x), torch.arange(8.0)),
        "vmapped",
        "high",
        ("operand",),
        "integers",
    ),
    Case("creation", lambda m, x: m.a(x) * torch.ones(8), "ones", "high", ("creation",), "default"),
    Case("cut, high", lambda m, x: torch.relu(x).exp(), "relu", "high", ("cut",), "minimum cut"),
    Case("cut, low", lambda m, x: m.b(m.a(x).relu()), "relu", "low", ("cut",), "linear"),
    Case("input", lambda m, x: m.a(x), "input_0", "high", ("input",), "float32"),
    Case("parameter", lambda m, x: m.a(x), "a_weight", "high", ("parameter",), "O2"),
    Case("level", lambda m, x: m.a(x).exp(), "exp", "low", ("level",), "O3", {"opt_level": "O3"}),
    Case("cast", lambda m, x: m.a(x), "to", "low", ("cast", "input"), "read by linear"),
    Case("no float", lambda m, x: m.a(x)[:, torch.arange(3)], "arange", "none", ("type",), "no float32 value"),
    Case("conversion", lambda m, x: m.a(x) * (x > 0).float().exp(), "float_1", "high", ("conversion",), "mask"),
    Case("mask, low", lambda m, x: m.b(m.a(x) * (x > 0).float()), "float_1", "low", ("absorbed",), "mask"),
)
