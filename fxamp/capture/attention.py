"""Attention modules as one graph node on explicit weights, and the questions of torch's Transformer that bind nothing.

attention(query, key, value)                          # nn.MultiheadAttention
multi_head_attention_forward(query, key, value, ...)  # in the graph; masks go in as they came
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import transformer

from fxamp.capture.proxies import rank_of


def as_node(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], has_example: bool
) -> Callable[..., Any] | None:
    """What to call in the place of an attention module's forward; None where it is another module or not known."""
    if type(module).forward is not nn.MultiheadAttention.forward:
        return None
    rank = rank_of(args[0] if args else kwargs.get("query")) if has_example else 3
    return functools.partial(_attention, module, rank == 3) if rank in (2, 3) else None


def _attention(
    module: Any,
    is_batched: bool,
    query: Any,
    key: Any,
    value: Any,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    turns = module.batch_first and is_batched
    if turns:
        query, key, value = _turned(query, key, value)
    separate = {} if module._qkv_same_embed_dim else _separate_weights(module)
    output, weights = F.multi_head_attention_forward(
        query,
        key,
        value,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        module.dropout,
        module.out_proj.weight,
        module.out_proj.bias,
        training=module.training,
        key_padding_mask=key_padding_mask,
        need_weights=need_weights,
        attn_mask=attn_mask,
        average_attn_weights=average_attn_weights,
        is_causal=is_causal,
        **separate,
    )
    return (output.transpose(1, 0) if turns else output), (weights if need_weights else None)


def _turned(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Sequence first; what is one value stays one, which is how the kernel knows self-attention."""
    turned: dict[int, Any] = {}
    for given in (query, key, value):
        if id(given) not in turned:
            turned[id(given)] = given.transpose(1, 0)
    return turned[id(query)], turned[id(key)], turned[id(value)]


def _separate_weights(module: Any) -> dict[str, Any]:
    return {
        "use_separate_proj_weight": True,
        "q_proj_weight": module.q_proj_weight,
        "k_proj_weight": module.k_proj_weight,
        "v_proj_weight": module.v_proj_weight,
    }


@contextlib.contextmanager
def plain_paths() -> Iterator[None]:
    """No fused inference kernel, no nested tensors, and no look into a mask for whether it is causal.

    They are shortcuts that depend on data and on whether gradients are on. The plain path gives the same values, which
    are rounded otherwise, but in padded rows, where nested tensors leave zeros. (Under autocast torch takes it, too.)
    """
    was = torch.backends.mha.get_fastpath_enabled()
    original = {name: getattr(transformer, name) for name in _PLAIN}
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        vars(transformer).update(_PLAIN)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)
        vars(transformer).update(original)


class _Functional:
    """torch.nn.functional for the Transformer modules: masks reach the attention, which makes them float itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def _canonical_mask(self, mask: Any, *_: Any, **__: Any) -> Any:
        return mask

    def _none_or_dtype(self, _: Any) -> None:
        return None


_PLAIN: dict[str, Any] = {
    "F": _Functional(),
    "_get_seq_len": lambda *_: None,
    "_detect_is_causal_mask": lambda mask, is_causal=None, size=None: is_causal is True,
}
