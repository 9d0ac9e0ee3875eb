"""FlexAttention where no compiler sees the graph: torch fuses it under `torch.compile` alone.

Outside of that, the op is dense: it makes all scores, in float32, of (batch, heads, queries, keys). What a model asks
for, by a compiled function of its own or by being compiled, is the kernel; Dynamo's graph holds the op in both cases.

Source: torch/nn/attention/flex_attention.py, torch/_higher_order_ops/flex_attention.py (2.11 to 2.13).
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fxamp.capture.frames import compile_apart

log = logging.getLogger("fxamp")

_NAME = "flex_attention"
_MOST = 128  # kernels that are kept

# By what is done to a score, and which scores there are; the oldest first.
_kernels: dict[tuple[Hashable, Hashable], Callable[..., Any]] = {}


def fuse_attention(graph: fx.Graph) -> None:
    """Let each call of the op run as a kernel."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.__name__ == _NAME:
            node.target = flex_attention


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: fx.GraphModule,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: tuple[Any, ...] = (),
    mask_buffers: tuple[Any, ...] = (),
) -> tuple[torch.Tensor, ...]:
    """The op as `torch.compile` fuses it, or as it is where that cannot be done, which is said once.

    Args:
        query: (batch, heads, queries, width).
        key: (batch, heads or a divisor of them, keys, width).
        value: (batch, heads as of `key`, keys, width of values).
        score_mod: (score, batch, head, query, key, *score_buffers) -> score.
        block_mask: sizes and indices of the blocks, and last (batch, head, query, key, *mask_buffers) -> bool.
        scale: of the products.
        kernel_options: for the kernel, and which of its results are asked for.

    Returns:
        The values, (batch, heads, queries, width of values), and in float32 what else is asked for.
    """
    given = (query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers)
    if isinstance(query, FakeTensor):
        return _dense(*given)
    which = _content(score_mod), _content(block_mask[-1])
    kernel = _kernels.get(which)
    if kernel is None:
        kernel = _kernels[which] = _kernel(score_mod, block_mask[-1])
        for oldest in list(_kernels)[:-_MOST]:
            _kernels.pop(oldest, None)  # another thread may have
    try:
        return kernel(*given)  # type: ignore[no-any-return]
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = str(error).split("\n", 1)[0]
        log.warning("flex_attention runs dense, as torch.compile makes no kernel of it: %s", reason)
        _kernels[which] = _dense
    return _dense(*given)


def _dense(*given: Any) -> tuple[torch.Tensor, ...]:
    return torch.ops.higher_order.flex_attention(*given)  # type: ignore[no-any-return]


def _content(function: fx.GraphModule) -> Hashable:
    """Of graphs that say the same, one and the same: layers share a kernel, as equal functions of Python do."""
    numbers = {node: number for number, node in enumerate(function.graph.nodes)}
    said: list[Hashable] = []
    for node in numbers:
        if node.op in ("get_attr", "call_module"):
            return function  # it has state
        given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda value: f"node {numbers[value]}")
        said.append((node.op, "" if node.op == "placeholder" else node.target, repr(given)))
    return tuple(said)


def _kernel(score_mod: fx.GraphModule, mask_mod: fx.GraphModule) -> Callable[..., Any]:
    """The op with these functions, compiled; Dynamo wants to find what they read in them, and then passes it along."""

    def attention(
        asked: int,
        operands: tuple[torch.Tensor, ...],
        blocks: tuple[Any, ...],
        scale: float,
        kernel_options: dict[str, Any],
        score_buffers: tuple[Any, ...],
        mask_buffers: tuple[Any, ...],
    ) -> Any:
        def score(*given: Any) -> Any:
            return score_mod(*given, *score_buffers)

        def mask(*given: Any) -> Any:
            return mask_mod(*given, *mask_buffers)

        attend = torch.ops.higher_order.flex_attention
        results = attend(*operands, score, (*blocks, mask), scale, kernel_options)
        return results[:asked]  # not every kernel has the others

    compiled = compile_apart(attention, "inductor", fullgraph=True)

    def call(query: Any, key: Any, value: Any, _: Any, block_mask: Any, scale: Any, options: Any, *buffers: Any) -> Any:
        asked = 3 if options.get("OUTPUT_MAX") else 2 if options.get("OUTPUT_LOGSUMEXP") else 1
        return compiled(asked, (query, key, value), tuple(block_mask[:-1]), scale, dict(options), *buffers)

    return call
