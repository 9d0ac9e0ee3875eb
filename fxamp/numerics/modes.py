"""The modes that a caller has on around a tool: off while it runs a model, which they would change."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.capture.unseen import no_inference_mode
from fxamp.dtypes import AUTOCAST_KINDS


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """No autocast, under which an fp32 run would be none, no inference mode, in which nothing has a gradient, and no
    anomaly mode, which stops at what is looked for."""
    with no_inference_mode(), torch.autograd.set_detect_anomaly(False), contextlib.ExitStack() as stack:
        for kind in AUTOCAST_KINDS:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def usable(inputs: Any) -> Any:
    """Inputs as autograd takes them: copies of tensors that were made in inference mode, all else as it is."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    if not any(tensor.is_inference() for tensor in tensors):
        return inputs
    with no_inference_mode():
        return pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, inputs
        )
